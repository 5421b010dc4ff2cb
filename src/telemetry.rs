//! Logs, traces and metrics: what a person at night needs to see, and never a payload, a key or a body.

mod lines;
pub mod metrics;
pub mod trace;

use std::io::IsTerminal;

use tracing::Level;
use tracing_subscriber::field::MakeExt;
use tracing_subscriber::filter::Targets;
use tracing_subscriber::fmt::format::debug_fn;
use tracing_subscriber::layer::SubscriberExt;
use tracing_subscriber::util::SubscriberInitExt;
use tracing_subscriber::{EnvFilter, Layer};

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
///
/// The filter is about log lines: which spans are exported does not depend on how much is logged.
pub fn start(format: LogFormat, filter: &str, exporter: Option<trace::Exporter>) -> Result<(), InvalidFilter> {
    let filter = EnvFilter::try_new(filter).map_err(|_| InvalidFilter {
        filter: filter.to_owned(),
    })?;
    let layer = tracing_subscriber::fmt::layer();
    let lines = match format {
        LogFormat::Text => layer
            .with_writer(std::io::stderr)
            .with_target(false)
            .with_ansi(std::io::stderr().is_terminal())
            .fmt_fields(debug_fn(lines::field).delimited(" "))
            .boxed(),
        LogFormat::Json => layer
            .with_writer(lines::JsonLines(std::io::stderr))
            .json()
            .flatten_event(true)
            .with_current_span(true)
            .boxed(),
    };
    // A second start, as in tests, keeps the first one's settings.
    let _ = match exporter {
        Some(exporter) => tracing_subscriber::registry()
            .with(lines.with_filter(filter))
            .with(
                exporter
                    .layer()
                    .with_filter(Targets::new().with_target("opledger", Level::INFO)),
            )
            .try_init(),
        // One filter for everything is cheaper than one for each layer.
        None => tracing_subscriber::registry().with(lines).with(filter).try_init(),
    };
    Ok(())
}
