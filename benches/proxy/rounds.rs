//! Who is measured when: each proxy has its turn at each number of clients in every round, and who begins changes.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Duration;

use anyhow::{Context as _, Result, anyhow, ensure};
use sqlx::PgPool;

use crate::contestants::{self, Contestant, Name, Server};
use crate::histogram::Histogram;
use crate::load::{self, Numbers, Window};
use crate::{Measure, process, report};

#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum Phase {
    First,
    Replay,
}

/// What one phase of one turn has shown.
pub struct Measurement {
    pub round: u32,
    pub clients: usize,
    pub contestant: Name,
    pub phase: Phase,
    pub seconds: f64,
    pub latencies: Histogram,
    /// CPU time of the proxy's process, and of PostgreSQL.
    pub cpu: (Duration, Duration),
}

impl Measurement {
    pub fn rate(&self) -> f64 {
        self.latencies.total() as f64 / self.seconds
    }
}

pub async fn run(options: Measure) -> Result<()> {
    let directory = options.dir.clone().unwrap_or_else(default_directory);
    let binary = options
        .opledger
        .as_deref()
        .context("find opledger: name it with --opledger")?;
    let downstream = Server::own(&["serve-downstream"]).await?;
    let opledger = contestants::opledger(binary, &directory, &downstream.url).await?;
    let pool = PgPool::connect(&opledger.database_url)
        .await
        .context("connect as the database's owner")?;
    let mut contestants = contestants::all(opledger, &downstream, &directory, options.pool).await?;
    let outcome = tokio::select! {
        outcome = measure(&options, &downstream, &pool, &mut contestants) => outcome,
        _ = tokio::signal::ctrl_c() => Err(anyhow!("interrupted")),
    };
    let outcome = match outcome {
        Ok(measurements) => report::publish(&options, &contestants, &measurements, &pool).await,
        Err(error) => Err(error),
    };
    pool.close().await;
    // opledger comes last, and with it the PostgreSQL that the others use.
    for contestant in contestants {
        contestant.server.stop().await?;
    }
    downstream.stop().await?;
    if outcome.is_ok() {
        std::fs::remove_dir_all(&directory).context("remove opledger's directory")?;
    }
    outcome
}

async fn measure(
    options: &Measure,
    downstream: &Server,
    pool: &PgPool,
    contestants: &mut [Contestant],
) -> Result<Vec<Measurement>> {
    let backend: i32 = sqlx::query_scalar("select pg_backend_pid()").fetch_one(pool).await?;
    let postmaster = process::parent(backend.unsigned_abs())?;
    let mut measurements = Vec::new();
    for round in 0..options.rounds {
        for statement in ["vacuum (analyze)", "checkpoint"] {
            sqlx::raw_sql(statement).execute(pool).await?;
        }
        for (turn, &clients) in options.clients.iter().enumerate() {
            for place in 0..contestants.len() {
                let whose = (place + turn + round as usize) % contestants.len();
                let contestant = &mut contestants[whose];
                let start = contestant.next_number;
                let before: u64 = downstream.get("/effects").await?.parse()?;
                let fresh = Numbers::fresh(start);
                measurements.push(phase(options, contestant, fresh, round, clients, postmaster).await?);
                if contestant.name.replays() {
                    let again = Numbers::Again(start..contestant.next_number);
                    measurements.push(phase(options, contestant, again, round, clients, postmaster).await?);
                }
                let effects = downstream.get("/effects").await?.parse::<u64>()? - before;
                let acknowledged = contestant.next_number - start;
                ensure!(
                    effects == acknowledged,
                    "{} acknowledged {acknowledged} requests, and the downstream has counted {effects} effects",
                    contestant.name.as_str()
                );
            }
        }
    }
    Ok(measurements)
}

async fn phase(
    options: &Measure,
    contestant: &mut Contestant,
    numbers: Numbers,
    round: u32,
    clients: usize,
    postmaster: u32,
) -> Result<Measurement> {
    let numbers = Arc::new(numbers);
    let connections = load::connect(contestant.server.address, clients).await?;
    let window = Window::opening_in(
        Duration::from_secs_f64(options.warm_up),
        Duration::from_secs_f64(options.seconds),
    );
    let (latencies, cpu) = tokio::try_join!(
        load::drive(connections, &contestant.requests, &numbers, window),
        cpu_within(window, contestant.name, contestant.server.pid, postmaster),
    )
    .with_context(|| format!("measure {} with {clients} clients", contestant.name.as_str()))?;
    let phase = match &*numbers {
        Numbers::Fresh(next) => {
            contestant.next_number = next.load(Ordering::Relaxed);
            Phase::First
        }
        Numbers::Again(_) => Phase::Replay,
    };
    let measurement = Measurement {
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

async fn cpu_within(window: Window, name: Name, server: u32, postmaster: u32) -> Result<(Duration, Duration)> {
    tokio::time::sleep_until(window.from.into()).await;
    let before = cpu_so_far(name, server, postmaster).await?;
    tokio::time::sleep_until(window.until.into()).await;
    let after = cpu_so_far(name, server, postmaster).await?;
    Ok((after.0.saturating_sub(before.0), after.1.saturating_sub(before.1)))
}

/// Reading all of `/proc` takes milliseconds, which the clients must not wait for.
async fn cpu_so_far(name: Name, server: u32, postmaster: u32) -> Result<(Duration, Duration)> {
    tokio::task::spawn_blocking(move || {
        let postgres = process::cpu_with_children(postmaster)?;
        let server = match name {
            // Its workers are its children.
            Name::Nginx => process::cpu_with_children(server)?,
            Name::Plain | Name::Handwritten | Name::Opledger => process::cpu(server)?,
        };
        Ok((server, postgres))
    })
    .await
    .context("read CPU times")?
}

/// On the disk of the build, not in `/tmp`, which may be memory: commits have to reach a disk to be worth measuring.
pub fn default_directory() -> PathBuf {
    Path::new(env!("CARGO_TARGET_TMPDIR")).join(format!("proxy-benchmark-{}", std::process::id()))
}
