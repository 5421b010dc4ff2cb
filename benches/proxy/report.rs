//! The page that comes out. Every figure is a median over the rounds with its range; ratios are taken within a round.

use std::fmt::Write as _;

use anyhow::{Context as _, Result};
use sqlx::PgPool;

use crate::Measure;
use crate::contestants::{Contestant, Name};
use crate::histogram::Histogram;
use crate::process;
use crate::rounds::{Measurement, Phase};

type Rate = (Name, Phase);

/// Which rate is divided by which.
const RATIOS: [(Rate, Rate, &str); 4] = [
    (
        (Name::Opledger, Phase::First),
        (Name::Handwritten, Phase::First),
        "first: opledger / handwritten",
    ),
    (
        (Name::Opledger, Phase::First),
        (Name::Plain, Phase::First),
        "first: opledger / plain",
    ),
    (
        (Name::Opledger, Phase::Replay),
        (Name::Plain, Phase::First),
        "replays: opledger / plain's forwards",
    ),
    (
        (Name::Opledger, Phase::Replay),
        (Name::Handwritten, Phase::Replay),
        "replays: opledger / handwritten",
    ),
];

pub async fn publish(
    options: &Measure,
    contestants: &[Contestant],
    measurements: &[Measurement],
    pool: &PgPool,
) -> Result<()> {
    let mut page = String::from(
        "# Benchmarks of the proxy\n\n\
         A small JSON request with an `Idempotency-Key`, through proxies to one trivial downstream that answers at once:\n\n\
         - **plain**: an axum reverse proxy that stores nothing;\n\
         - **nginx**: the same by nginx;\n\
         - **handwritten**: axum and sqlx: commit the claim, send, commit the answer. It checks no credentials, keeps no\n  \
           history, and knows nothing of unknown outcomes;\n\
         - **opledger**: `/v1/proxy/…` with an API key.\n\n\
         Figures are medians over the rounds, with the lowest and the highest in parentheses. Ratios are taken within a\n\
         round. Proxies, downstream, PostgreSQL and clients share the machine's cores.\n\n",
    );
    for (title, phase) in [("Forwarding", Phase::First), ("Replays", Phase::Replay)] {
        writeln!(page, "## {title}\n")?;
        table(&mut page, options, "Requests per second", measurements, phase, |all| {
            spread(all.iter().map(|one| one.rate()).collect(), |rate| format!("{rate:.0}"))
        })?;
        let quantiles = |all: &[&Measurement]| {
            let mut merged = Histogram::new();
            all.iter().for_each(|one| merged.merge(&one.latencies));
            let at = |share| merged.quantile(share).as_secs_f64() * 1e3;
            format!("{:.2} / {:.2}", at(0.5), at(0.99))
        };
        let title = "Latency in milliseconds, median / 99th percentile over all rounds";
        table(&mut page, options, title, measurements, phase, quantiles)?;
        let cpu = |all: &[&Measurement]| {
            let count = all.iter().map(|one| one.latencies.total()).sum::<u64>().max(1) as f64;
            let proxy: f64 = all.iter().map(|one| one.cpu.0.as_secs_f64()).sum();
            let postgres: f64 = all.iter().map(|one| one.cpu.1.as_secs_f64()).sum();
            format!("{:.0} + {:.0}", proxy / count * 1e6, postgres / count * 1e6)
        };
        let title = "CPU time per request in microseconds, proxy + PostgreSQL";
        table(&mut page, options, title, measurements, phase, cpu)?;
    }
    ratios(&mut page, options, measurements)?;
    page.push_str("## Memory\n\nThe most that each proxy's process had at a time:\n\n");
    for contestant in contestants {
        let mebibytes = process::peak_memory(contestant.server.pid)? as f64 / 1_048_576.0;
        writeln!(page, "- {}: {mebibytes:.1} MiB", contestant.name.as_str())?;
    }
    let version: String = sqlx::query_scalar("select current_setting('server_version')")
        .fetch_one(pool)
        .await?;
    let today: String = sqlx::query_scalar("select current_date::text").fetch_one(pool).await?;
    let cores = std::thread::available_parallelism().map_or(0, std::num::NonZero::get);
    writeln!(
        page,
        "\n## Circumstances\n\n- {today}, {cores} cores, PostgreSQL {version} with its default durability\n\
         - {} rounds; {} s each, after {} s uncounted; the proxies' order changed with every turn\n\
         - after every turn the downstream had counted as many effects as the proxy had acknowledged first calls\n\n\
         Made by `cargo bench --bench proxy -- {}`.",
        options.rounds,
        options.seconds,
        options.warm_up,
        std::env::args()
            .skip(1)
            .filter(|argument| argument != "--bench")
            .collect::<Vec<_>>()
            .join(" ")
    )?;
    match &options.report {
        Some(path) => std::fs::write(path, page).with_context(|| format!("write {}", path.display())),
        None => {
            print!("{page}");
            Ok(())
        }
    }
}

fn table(
    page: &mut String,
    options: &Measure,
    title: &str,
    measurements: &[Measurement],
    phase: Phase,
    cell: impl Fn(&[&Measurement]) -> String,
) -> Result<()> {
    let names: Vec<Name> = Name::ALL
        .into_iter()
        .filter(|name| {
            measurements
                .iter()
                .any(|one| one.contestant == *name && one.phase == phase)
        })
        .collect();
    writeln!(page, "{title}:\n")?;
    let columns: Vec<&str> = names.iter().map(|name| name.as_str()).collect();
    writeln!(
        page,
        "| clients | {} |\n|---:|{}",
        columns.join(" | "),
        "---:|".repeat(columns.len())
    )?;
    for &clients in &options.clients {
        let cells: Vec<String> = names
            .iter()
            .map(|&name| cell(&matching(measurements, name, phase, clients)))
            .collect();
        writeln!(page, "| {clients} | {} |", cells.join(" | "))?;
    }
    page.push('\n');
    Ok(())
}

fn ratios(page: &mut String, options: &Measure, measurements: &[Measurement]) -> Result<()> {
    page.push_str("## Ratios\n\nOf rates within a round:\n\n");
    let titles: Vec<&str> = RATIOS.iter().map(|(_, _, title)| *title).collect();
    writeln!(
        page,
        "| clients | {} |\n|---:|{}",
        titles.join(" | "),
        "---:|".repeat(titles.len())
    )?;
    for &clients in &options.clients {
        let cells: Vec<String> = RATIOS
            .iter()
            .map(|((above, its_phase), (below, other_phase), _)| {
                let below = matching(measurements, *below, *other_phase, clients);
                let ratios = matching(measurements, *above, *its_phase, clients)
                    .into_iter()
                    .filter_map(|above| {
                        let below = below.iter().find(|below| below.round == above.round)?;
                        Some(above.rate() / below.rate())
                    })
                    .collect();
                spread(ratios, |ratio| format!("{ratio:.2}"))
            })
            .collect();
        writeln!(page, "| {clients} | {} |", cells.join(" | "))?;
    }
    page.push('\n');
    Ok(())
}

fn matching(measurements: &[Measurement], name: Name, phase: Phase, clients: usize) -> Vec<&Measurement> {
    measurements
        .iter()
        .filter(|one| one.contestant == name && one.phase == phase && one.clients == clients)
        .collect()
}

/// "median (lowest–highest)"
fn spread(mut figures: Vec<f64>, print: impl Fn(f64) -> String) -> String {
    figures.sort_by(f64::total_cmp);
    let (Some(&lowest), Some(&highest)) = (figures.first(), figures.last()) else {
        return "–".to_owned();
    };
    format!(
        "{} ({}–{})",
        print(figures[figures.len() / 2]),
        print(lowest),
        print(highest)
    )
}
