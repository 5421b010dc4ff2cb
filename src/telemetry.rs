//! Logs, traces and metrics: what a person at night needs to see, and never a payload, a key or a body.

pub mod metrics;

use std::io::IsTerminal;

use tracing_subscriber::EnvFilter;
use tracing_subscriber::fmt::format::FmtSpan;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;

/// How log lines look.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, clap::ValueEnum)]
pub enum LogFormat {
    /// For people.
    #[default]
    Text,
    /// One JSON object a line, for machines.
    Json,
}

#[derive(Debug, thiserror::Error)]
#[error("\"{filter}\" is not a log filter; try info, debug or opledger=debug,sqlx=warn")]
pub struct InvalidFilter {
    filter: String,
}

/// Starts logging to stderr, and exporting spans if an exporter is given.
pub fn start(format: LogFormat, filter: &str) -> Result<(), InvalidFilter> {
    let filter = EnvFilter::try_new(filter).map_err(|_| InvalidFilter { filter: filter.to_owned() })?;
    let subscriber = tracing_subscriber::registry().with(filter);
    let lines = tracing_subscriber::fmt::layer().with_writer(std::io::stderr).with_span_events(FmtSpan::NONE);
    // A second start, as in tests, keeps the first one's settings.
    let _ = match format {
        LogFormat::Text => subscriber
            .with(lines.with_target(false).with_ansi(std::io::stderr().is_terminal()))
            .try_init(),
        LogFormat::Json => subscriber.with(lines.json().flatten_event(true).with_current_span(true)).try_init(),
    };
    Ok(())
}
