//! Who is measured when.
//!
//! All servers run all the time, over one PostgreSQL, and are driven in turns of a few seconds. Within a round each has
//! its turn at each number of clients, and who begins changes from turn to turn: what the machine does besides meets
//! all of them alike. A turn has two phases, new deposits and then the same ones again.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow};

use crate::contestant::{Contestant, Name};
use crate::database::Database;
use crate::histogram::Histogram;
use crate::load::{self, Numbers, Window};
use crate::options::Measure;
use crate::report::{self, Report};
use crate::{preload, process};

/// How many clients the pool sizes are compared with.
const CALIBRATION_CLIENTS: usize = 64;

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Phase {
    First,
    Replay,
}

/// What one phase of one turn has shown.
pub struct Measurement {
    /// How many operations were stored beforehand, where --stored says so.
    pub stored: Option<u64>,
    pub round: u32,
    pub clients: usize,
    pub contestant: Name,
    pub phase: Phase,
    pub seconds: f64,
    pub latencies: Histogram,
    pub cpu: Cpu,
}

/// CPU time that was used while a phase's window was open.
#[derive(Clone, Copy, Default)]
pub struct Cpu {
    pub server: Duration,
    pub postgres: Duration,
    pub clients: Duration,
}

/// One pool size of a baseline, tried.
pub struct Trial {
    pub contestant: Name,
    pub pool: u32,
    pub rate: f64,
}

/// Everything that has been started and has to be ended.
struct Field<'a> {
    options: &'a Measure,
    database: Database,
    owner_url: String,
    contestants: Vec<Contestant>,
}

impl Measurement {
    pub fn operations(&self) -> u64 {
        self.latencies.total()
    }

    pub fn rate(&self) -> f64 {
        self.operations() as f64 / self.seconds
    }
}

pub async fn run(options: Measure) -> Result<()> {
    let directory = options.dir.clone().unwrap_or_else(default_directory);
    let opledger = if options.baselines_only {
        None
    } else {
        Some(start_opledger(&options, &directory).await?)
    };
    let outcome = with_opledger(&options, opledger).await;
    if !options.baselines_only && !options.keep && outcome.is_ok() {
        std::fs::remove_dir_all(&directory).context("remove opledger's directory")?;
        std::fs::remove_file(directory.with_extension("log")).context("remove opledger's log")?;
    }
    outcome
}

async fn with_opledger(options: &Measure, opledger: Option<(Contestant, Option<String>)>) -> Result<()> {
    let (contestant, its_url) = opledger.unzip();
    let owner_url = options
        .owner_url
        .clone()
        .or(its_url.flatten())
        .context("find the database: opledger named none, and there is no --owner-url")?;
    let mut field = Field {
        database: Database::connect(&owner_url).await?,
        options,
        owner_url,
        contestants: contestant.into_iter().collect(),
    };
    // However it ends, the servers are asked to stop: opledger would otherwise leave its PostgreSQL to itself.
    let outcome = tokio::select! {
        outcome = field.measure() => outcome,
        _ = tokio::signal::ctrl_c() => Err(anyhow!("interrupted")),
    };
    let stopped = field.stop().await;
    outcome?;
    stopped
}

impl Field<'_> {
    async fn measure(&mut self) -> Result<()> {
        self.database.prepare().await?;
        for opledger in &mut self.contestants {
            self.database.admit(opledger, self.options.accounts).await?;
        }
        let mut trials = Vec::new();
        for name in [Name::Handwritten, Name::Bare] {
            let pool = self.best_pool(name, &mut trials).await?;
            let baseline = self.start_baseline(name, pool).await?;
            self.contestants.push(baseline);
        }
        let mut measurements = Vec::new();
        if self.options.stored.is_empty() {
            self.all_rounds(None, &mut measurements).await?;
        }
        let mut stored_before = 0;
        for &stored in &self.options.stored {
            for contestant in &self.contestants {
                preload::top_up(&self.database, contestant, stored_before, stored).await?;
            }
            stored_before = stored;
            self.all_rounds(Some(stored), &mut measurements).await?;
        }
        let report = Report {
            options: self.options,
            contestants: &self.contestants,
            trials: &trials,
            measurements: &measurements,
        };
        report::publish(&report, &self.database).await
    }

    async fn start_baseline(&self, name: Name, pool: u32) -> Result<Contestant> {
        let mut baseline = Contestant::baseline(name, &self.owner_url, pool, self.options.accounts).await?;
        self.database.admit(&mut baseline, self.options.accounts).await?;
        Ok(baseline)
    }

    /// Tries each pool size for one phase of new deposits.
    async fn best_pool(&self, name: Name, trials: &mut Vec<Trial>) -> Result<u32> {
        if let [only] = self.options.pools[..] {
            return Ok(only);
        }
        let mut best = None;
        for &pool in &self.options.pools {
            let mut baseline = self.start_baseline(name, pool).await?;
            self.database.settle_down().await?;
            let fresh = Numbers::fresh(baseline.next_number);
            let measurement = self.phase(&mut baseline, fresh, None, 0, CALIBRATION_CLIENTS).await?;
            self.database.verify(&baseline).await?;
            baseline.stop().await?;
            let rate = measurement.rate();
            eprintln!("{} with a pool of {pool}: {rate:.0}/s", name.as_str());
            if best.is_none_or(|(_, best_rate)| rate > best_rate) {
                best = Some((pool, rate));
            }
            trials.push(Trial {
                contestant: name,
                pool,
                rate,
            });
        }
        best.map(|(pool, _)| pool).context("--pools names no pool size")
    }

    async fn all_rounds(&mut self, stored: Option<u64>, measurements: &mut Vec<Measurement>) -> Result<()> {
        // Taken out for the while, so that a turn can borrow its server and the field.
        let mut contestants = std::mem::take(&mut self.contestants);
        let outcome = self.rounds(&mut contestants, stored, measurements).await;
        self.contestants = contestants;
        outcome
    }

    async fn rounds(
        &self,
        contestants: &mut [Contestant],
        stored: Option<u64>,
        measurements: &mut Vec<Measurement>,
    ) -> Result<()> {
        for round in 0..self.options.rounds {
            self.database.settle_down().await?;
            for (turn, &clients) in self.options.clients.iter().enumerate() {
                for place in 0..contestants.len() {
                    let whose = (place + turn + round as usize) % contestants.len();
                    self.turn(&mut contestants[whose], stored, round, clients, measurements)
                        .await?;
                }
            }
            for contestant in &*contestants {
                self.database.verify(contestant).await?;
            }
        }
        Ok(())
    }

    async fn turn(
        &self,
        contestant: &mut Contestant,
        stored: Option<u64>,
        round: u32,
        clients: usize,
        measurements: &mut Vec<Measurement>,
    ) -> Result<()> {
        let start = contestant.next_number;
        measurements.push(
            self.phase(contestant, Numbers::fresh(start), stored, round, clients)
                .await?,
        );
        if contestant.name.replays() {
            let again = Numbers::Again(start..contestant.next_number);
            measurements.push(self.phase(contestant, again, stored, round, clients).await?);
        }
        Ok(())
    }

    async fn phase(
        &self,
        contestant: &mut Contestant,
        numbers: Numbers,
        stored: Option<u64>,
        round: u32,
        clients: usize,
    ) -> Result<Measurement> {
        let numbers = Arc::new(numbers);
        let connections = load::connect(contestant.address, clients).await?;
        let window = Window::opening_in(
            Duration::from_secs_f64(self.options.warm_up),
            Duration::from_secs_f64(self.options.seconds),
        );
        let (latencies, cpu) = tokio::try_join!(
            load::drive(connections, &contestant.requests, &numbers, window),
            self.cpu_within(window, contestant.pid),
        )
        .with_context(|| format!("measure {} with {clients} clients", contestant.name.as_str()))?;
        let phase = match &*numbers {
            Numbers::Fresh(next) => {
                let next = next.load(Ordering::Relaxed);
                contestant.acknowledged += next - contestant.next_number;
                contestant.next_number = next;
                Phase::First
            }
            Numbers::Again(_) => Phase::Replay,
        };
        let measurement = Measurement {
            stored,
            round,
            clients,
            contestant: contestant.name,
            phase,
            seconds: window.seconds(),
            latencies,
            cpu,
        };
        eprintln!(
            "round {} · {clients} clients · {} · {phase:?}: {:.0}/s",
            round + 1,
            contestant.name.as_str(),
            measurement.rate(),
        );
        Ok(measurement)
    }

    async fn cpu_within(&self, window: Window, server: u32) -> Result<Cpu> {
        let postmaster = self.database.postmaster();
        tokio::time::sleep_until(window.from.into()).await;
        let before = cpu_so_far(server, postmaster).await?;
        tokio::time::sleep_until(window.until.into()).await;
        let after = cpu_so_far(server, postmaster).await?;
        Ok(Cpu {
            server: after.server.saturating_sub(before.server),
            postgres: after.postgres.saturating_sub(before.postgres),
            clients: after.clients.saturating_sub(before.clients),
        })
    }

    async fn stop(self) -> Result<()> {
        // The baselines were started last and hold connections to opledger's PostgreSQL: they go first.
        self.database.pool.close().await;
        for contestant in self.contestants.into_iter().rev() {
            contestant.stop().await?;
        }
        Ok(())
    }
}

/// Reading all of `/proc` takes milliseconds, which the clients must not wait for.
async fn cpu_so_far(server: u32, postmaster: u32) -> Result<Cpu> {
    tokio::task::spawn_blocking(move || {
        Ok(Cpu {
            server: process::cpu(server)?,
            postgres: process::cpu_with_children(postmaster)?,
            clients: process::cpu(std::process::id())?,
        })
    })
    .await
    .context("read CPU times")?
}

async fn start_opledger(options: &Measure, directory: &Path) -> Result<(Contestant, Option<String>)> {
    let binary = options
        .opledger
        .as_deref()
        .context("find opledger: name it with --opledger")?;
    if let Some(parent) = directory.parent() {
        std::fs::create_dir_all(parent).context("create a directory for opledger")?;
    }
    let (contestant, ready) = Contestant::opledger(binary, directory, options.accounts).await?;
    Ok((contestant, ready.owner_database_url.or(ready.database_url)))
}

/// On the disk of the build, not in `/tmp`, which may be memory: commits have to reach a disk to be worth measuring.
fn default_directory() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("benchmark-{}", std::process::id()))
}
