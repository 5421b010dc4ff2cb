//! The page that comes out: machine, settings, tables.
//!
//! Every figure is a median over the rounds with the range beside it; ratios are taken within a round first.

use std::fmt::Write as _;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context as _, Result};

use crate::contestant::{Contestant, Name};
use crate::database::Database;
use crate::histogram::Histogram;
use crate::options::Measure;
use crate::process;
use crate::rounds::{Measurement, Phase, Trial};

pub struct Report<'a> {
    pub options: &'a Measure,
    pub contestants: &'a [Contestant],
    pub trials: &'a [Trial],
    pub measurements: &'a [Measurement],
}

/// One row of a table: a number of stored operations, where there are several, and a number of clients.
#[derive(Clone, Copy, PartialEq, Eq)]
struct Load {
    stored: Option<u64>,
    clients: usize,
}

/// Servers in the order of the columns.
const COLUMNS: [Name; 3] = [Name::Handwritten, Name::Bare, Name::Opledger];
/// Which server's rate is divided by which one's.
const RATIOS: [(Name, Name); 3] = [
    (Name::Opledger, Name::Handwritten),
    (Name::Opledger, Name::Bare),
    (Name::Bare, Name::Handwritten),
];

pub async fn publish(report: &Report<'_>, database: &Database) -> Result<()> {
    let mut page = String::from("# Benchmarks\n\n");
    introduction(&mut page, report);
    for (title, phase) in [("New deposits", Phase::First), ("Replays", Phase::Replay)] {
        writeln!(page, "## {title}\n")?;
        rates(&mut page, report, phase)?;
        ratios(&mut page, report, phase)?;
        latencies(&mut page, report, phase)?;
        cpu(&mut page, report, phase)?;
    }
    memory(&mut page, report)?;
    count(&mut page, report)?;
    circumstances(&mut page, report, database).await?;
    match &report.options.report {
        Some(path) => std::fs::write(path, page).with_context(|| format!("write {}", path.display())),
        None => {
            print!("{page}");
            Ok(())
        }
    }
}

fn introduction(page: &mut String, report: &Report<'_>) {
    page.push_str(
        "Deposits over HTTP into one of many accounts, by servers over one PostgreSQL:\n\n\
         - **handwritten**: axum and sqlx, one transaction per request: claim the `Idempotency-Key`, update the balance,\n  \
           store the answer, write an audit row. It checks no credentials and keeps no receipts.\n\
         - **bare**: the same update in one statement, with nothing to protect it. A second delivery deposits again.\n",
    );
    if report
        .contestants
        .iter()
        .any(|contestant| contestant.name == Name::Opledger)
    {
        page.push_str(
            "- **opledger**: `POST /v1/operations` with an API key: claim, fingerprint, handler and receipt, settled once.\n",
        );
    }
    page.push_str(
        "\nFigures are medians over the rounds, with the lowest and the highest in parentheses. Ratios are taken within a\n\
         round, where the servers had their turns next to each other: they say more than rates, which depend on the machine\n\
         and on what else it does. Servers, PostgreSQL and the clients share its cores.\n\n",
    );
}

fn rates(page: &mut String, report: &Report<'_>, phase: Phase) -> Result<()> {
    page.push_str("Requests per second:\n\n");
    let names = report.names(phase);
    report.header(page, names.iter().map(|name| name.as_str().to_owned()))?;
    for load in report.loads() {
        let cells = names.iter().map(|&name| {
            let rates = report.matching(load, phase, name).map(Measurement::rate).collect();
            spread(rates, thousands)
        });
        report.row(page, load, cells)?;
    }
    page.push('\n');
    Ok(())
}

fn ratios(page: &mut String, report: &Report<'_>, phase: Phase) -> Result<()> {
    let names = report.names(phase);
    let pairs: Vec<_> = RATIOS
        .into_iter()
        .filter(|(a, b)| names.contains(a) && names.contains(b))
        .collect();
    if pairs.is_empty() {
        return Ok(());
    }
    page.push_str("Ratios of these rates, within a round:\n\n");
    report.header(
        page,
        pairs.iter().map(|(a, b)| format!("{} / {}", a.as_str(), b.as_str())),
    )?;
    for load in report.loads() {
        let cells = pairs.iter().map(|&(above, below)| {
            let ratios = report
                .matching(load, phase, above)
                .filter_map(|above| {
                    let below = report
                        .matching(load, phase, below)
                        .find(|below| below.round == above.round)?;
                    Some(above.rate() / below.rate())
                })
                .collect();
            spread(ratios, |ratio| format!("{ratio:.2}"))
        });
        report.row(page, load, cells)?;
    }
    page.push('\n');
    Ok(())
}

fn latencies(page: &mut String, report: &Report<'_>, phase: Phase) -> Result<()> {
    page.push_str("Latency in milliseconds, median and 99th percentile over all rounds:\n\n");
    let names = report.names(phase);
    report.header(page, names.iter().map(|name| format!("{} p50 / p99", name.as_str())))?;
    for load in report.loads() {
        let cells = names.iter().map(|&name| {
            let mut all = Histogram::new();
            report
                .matching(load, phase, name)
                .for_each(|measurement| all.merge(&measurement.latencies));
            format!(
                "{} / {}",
                milliseconds(all.quantile(0.5)),
                milliseconds(all.quantile(0.99))
            )
        });
        report.row(page, load, cells)?;
    }
    page.push('\n');
    Ok(())
}

fn cpu(page: &mut String, report: &Report<'_>, phase: Phase) -> Result<()> {
    page.push_str("CPU time per request in microseconds, over all rounds: server + PostgreSQL (+ clients):\n\n");
    let names = report.names(phase);
    report.header(page, names.iter().map(|name| name.as_str().to_owned()))?;
    for load in report.loads() {
        let cells = names.iter().map(|&name| {
            let measurements: Vec<_> = report.matching(load, phase, name).collect();
            let operations: u64 = measurements.iter().map(|measurement| measurement.operations()).sum();
            let each = |part: fn(&Measurement) -> Duration| {
                let total: Duration = measurements.iter().map(|measurement| part(measurement)).sum();
                total.as_secs_f64() * 1e6 / operations.max(1) as f64
            };
            format!(
                "{:.0} + {:.0} (+ {:.0})",
                each(|m| m.cpu.server),
                each(|m| m.cpu.postgres),
                each(|m| m.cpu.clients)
            )
        });
        report.row(page, load, cells)?;
    }
    page.push('\n');
    Ok(())
}

fn memory(page: &mut String, report: &Report<'_>) -> Result<()> {
    page.push_str("## Memory\n\nThe most that each server's process had at a time, PostgreSQL not counted:\n\n");
    for contestant in report.contestants {
        let mebibytes = process::peak_memory(contestant.pid)? as f64 / 1_048_576.0;
        writeln!(page, "- {}: {mebibytes:.1} MiB", contestant.name.as_str())?;
    }
    page.push('\n');
    Ok(())
}

/// The count itself was made after every round; a run in which it failed has no report.
fn count(page: &mut String, report: &Report<'_>) -> Result<()> {
    page.push_str(
        "## The count\n\nAfter every round each server's accounts were added up. They had received exactly the deposits that\n\
         the server had acknowledged: none was lost, and no replay deposited again. Every answer was a success.\n\n",
    );
    for contestant in report.contestants {
        writeln!(
            page,
            "- {}: {} deposits",
            contestant.name.as_str(),
            thousands(contestant.acknowledged as f64)
        )?;
    }
    page.push('\n');
    Ok(())
}

async fn circumstances(page: &mut String, report: &Report<'_>, database: &Database) -> Result<()> {
    page.push_str("## Circumstances\n\n");
    writeln!(page, "- {}", database.today().await?)?;
    machine(page)?;
    writeln!(
        page,
        "- PostgreSQL {}, a database of {} at the end",
        database.version().await?,
        database.size().await?
    )?;
    let directory = database.directory().await?;
    if let Some(file_system) = output(Command::new("stat").args(["-f", "-c", "%T"]).arg(Path::new(&directory))) {
        writeln!(page, "- its files are on {file_system}")?;
    }
    for (name, value) in database.settings().await? {
        writeln!(page, "  - `{name} = {value}`")?;
    }
    if let Some(version) = report
        .options
        .opledger
        .as_ref()
        .and_then(|binary| output(Command::new(binary).arg("--version")))
    {
        writeln!(page, "- {version}")?;
    }
    for contestant in report.contestants {
        if let Some(pool) = contestant.pool {
            writeln!(
                page,
                "- {}: a pool of {pool} connections{}",
                contestant.name.as_str(),
                report.trials_of(contestant.name)
            )?;
        }
    }
    writeln!(
        page,
        "- {} rounds; {} s each, after {} s uncounted; {} accounts per server; the servers' order changed with every turn",
        report.options.rounds, report.options.seconds, report.options.warm_up, report.options.accounts,
    )?;
    page.push_str("- before every round: `vacuum (analyze)` and a checkpoint\n");
    writeln!(
        page,
        "\nMade by `cargo bench --bench throughput -- {}`.",
        arguments().join(" ")
    )?;
    Ok(())
}

/// As they were given, less cargo's own and the database's address, which may hold a password.
fn arguments() -> Vec<String> {
    let mut shown = Vec::new();
    let mut arguments = std::env::args().skip(1);
    while let Some(argument) = arguments.next() {
        if argument == "--owner-url" {
            arguments.next();
            shown.push("--owner-url …".to_owned());
        } else if argument.starts_with("--owner-url=") {
            shown.push("--owner-url …".to_owned());
        } else if argument != "--bench" {
            shown.push(argument);
        }
    }
    shown
}

fn machine(page: &mut String) -> Result<()> {
    let processors = std::fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
    let model = processors
        .lines()
        .find_map(|line| {
            line.strip_prefix("model name")?
                .split_once(':')
                .map(|(_, model)| model.trim())
        })
        .unwrap_or("processor of unknown make");
    let memory = std::fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let gibibytes = memory
        .lines()
        .find_map(|line| {
            line.strip_prefix("MemTotal:")?
                .trim()
                .split(' ')
                .next()?
                .parse::<f64>()
                .ok()
        })
        .map_or(0.0, |kilobytes| kilobytes / 1_048_576.0);
    let kernel = output(Command::new("uname").arg("-sr")).unwrap_or_default();
    let cores = std::thread::available_parallelism().map_or(0, std::num::NonZero::get);
    writeln!(page, "- {model}, {cores} cores, {gibibytes:.0} GiB of memory, {kernel}")?;
    Ok(())
}

impl<'a> Report<'a> {
    fn names(&self, phase: Phase) -> Vec<Name> {
        let present = |name: &Name| {
            self.measurements
                .iter()
                .any(|m| m.contestant == *name && m.phase == phase)
        };
        COLUMNS.into_iter().filter(present).collect()
    }

    fn loads(&self) -> Vec<Load> {
        let mut loads = Vec::new();
        for measurement in self.measurements {
            let load = Load {
                stored: measurement.stored,
                clients: measurement.clients,
            };
            if !loads.contains(&load) {
                loads.push(load);
            }
        }
        loads
    }

    fn matching(&self, load: Load, phase: Phase, name: Name) -> impl Iterator<Item = &'a Measurement> {
        self.measurements.iter().filter(move |measurement| {
            measurement.stored == load.stored
                && measurement.clients == load.clients
                && measurement.phase == phase
                && measurement.contestant == name
        })
    }

    fn trials_of(&self, name: Name) -> String {
        let trials: Vec<_> = self
            .trials
            .iter()
            .filter(|trial| trial.contestant == name)
            .map(|trial| format!("{}: {}/s", trial.pool, thousands(trial.rate)))
            .collect();
        if trials.is_empty() {
            String::new()
        } else {
            format!(", the best of those tried ({})", trials.join(", "))
        }
    }

    fn header(&self, page: &mut String, columns: impl Iterator<Item = String>) -> Result<()> {
        let mut columns: Vec<_> = columns.collect();
        columns.insert(0, "clients".to_owned());
        if !self.options.stored.is_empty() {
            columns.insert(0, "stored".to_owned());
        }
        writeln!(page, "| {} |\n|{}", columns.join(" | "), "---:|".repeat(columns.len()))?;
        Ok(())
    }

    fn row(&self, page: &mut String, load: Load, cells: impl Iterator<Item = String>) -> Result<()> {
        let mut columns: Vec<_> = cells.collect();
        columns.insert(0, load.clients.to_string());
        if let Some(stored) = load.stored {
            columns.insert(0, thousands(stored as f64));
        }
        writeln!(page, "| {} |", columns.join(" | "))?;
        Ok(())
    }
}

/// "median (lowest–highest)"
fn spread(mut figures: Vec<f64>, print: impl Fn(f64) -> String) -> String {
    figures.sort_by(f64::total_cmp);
    let (Some(&lowest), Some(&highest)) = (figures.first(), figures.last()) else {
        return "–".to_owned();
    };
    let middle = figures.len() / 2;
    let median = if figures.len() % 2 == 1 {
        figures[middle]
    } else {
        (figures[middle - 1] + figures[middle]) / 2.0
    };
    format!("{} ({}–{})", print(median), print(lowest), print(highest))
}

fn thousands(figure: f64) -> String {
    let digits = format!("{figure:.0}");
    let mut grouped = String::new();
    for (position, digit) in digits.chars().enumerate() {
        if position > 0 && (digits.len() - position).is_multiple_of(3) {
            grouped.push(',');
        }
        grouped.push(digit);
    }
    grouped
}

fn milliseconds(latency: Duration) -> String {
    format!("{:.2}", latency.as_secs_f64() * 1e3)
}

/// What a command prints, if it can be run at all.
fn output(command: &mut Command) -> Option<String> {
    let output = command.output().ok()?;
    let text = String::from_utf8(output.stdout).ok()?.trim().to_owned();
    (output.status.success() && !text.is_empty()).then_some(text)
}
