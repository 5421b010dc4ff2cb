//! Settings: the file `opledger.toml`, flags, and the environment, which is read here and nowhere else.

mod downstreams;
mod kinds;

use std::collections::BTreeMap;
use std::fmt;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use clap::Args;
use serde::{Deserialize, Deserializer};

use self::downstreams::DownstreamSettings;
use self::kinds::KindSettings;
use crate::ledger::kind::Kinds;
use crate::ledger::retention;
use crate::outbound::registry::{DownstreamKinds, Downstreams};
use crate::postgres::pool;
use crate::telemetry::{LogFormat, trace};

const DAY: Duration = Duration::from_secs(86_400);

/// The longest duration a setting takes: a thousand years, far from where clocks overflow.
const LONGEST: Duration = Duration::from_secs(1_000 * 366 * 86_400);

/// Where the database is. Never printed: an address may carry a password.
#[derive(Clone, Args)]
pub struct DatabaseArgs {
    /// PostgreSQL address, e.g. postgres://opledger@db/ledger (prefer the variable or the file: flags show in `ps`)
    #[arg(long, env = "DATABASE_URL", hide_env_values = true, value_name = "URL")]
    pub database_url: Option<String>,
    /// File that holds the address, e.g. a mounted secret
    #[arg(
        long,
        env = "DATABASE_URL_FILE",
        value_name = "FILE",
        conflicts_with = "database_url"
    )]
    pub database_url_file: Option<PathBuf>,
}

impl fmt::Debug for DatabaseArgs {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DatabaseArgs")
            .field("database_url_file", &self.database_url_file)
            .finish_non_exhaustive()
    }
}

/// Whether the database may still be on its way up.
#[derive(Debug, Clone, Copy, Args)]
pub struct WaitArgs {
    /// Longest wait for a PostgreSQL that does not listen yet, or says that it is starting; 0s does not wait
    #[arg(
        long,
        env = "OPLEDGER_DATABASE_WAIT",
        default_value = "30s",
        value_name = "DURATION",
        value_parser = parse_duration
    )]
    pub database_wait: Duration,
}

/// How the service is reached.
#[derive(Debug, Clone, Args)]
pub struct ListenArgs {
    /// Address and port to listen on; port 0 takes a free one
    #[arg(
        long,
        env = "OPLEDGER_LISTEN",
        default_value = "127.0.0.1:8080",
        value_name = "ADDRESS"
    )]
    pub listen: SocketAddr,
}

/// Options of every command are listed apart from its own.
const GLOBAL: &str = "Global options";

/// How it logs.
#[derive(Debug, Clone, Args)]
pub struct LogArgs {
    /// Form of the log lines on stderr
    #[arg(
        long,
        env = "OPLEDGER_LOG_FORMAT",
        value_enum,
        default_value_t,
        global = true,
        help_heading = GLOBAL
    )]
    pub log_format: LogFormat,
    /// What is logged, e.g. debug or opledger=debug,sqlx=warn
    #[arg(
        long,
        env = "OPLEDGER_LOG",
        default_value = "info",
        value_name = "FILTER",
        global = true,
        help_heading = GLOBAL
    )]
    pub log: String,
}

/// Where the file is.
#[derive(Debug, Clone, Args)]
pub struct FileArgs {
    /// Configuration file: kinds, downstreams, limits, retention
    #[arg(long, env = "OPLEDGER_CONFIG", default_value = "opledger.toml", value_name = "FILE")]
    pub config: PathBuf,
}

/// Whom a client talks to.
#[derive(Debug, Clone, Args)]
pub struct ClientArgs {
    /// Address of the service
    #[arg(
        long,
        env = "OPLEDGER_URL",
        default_value = "http://127.0.0.1:8080",
        value_name = "URL"
    )]
    pub url: String,
    /// File that holds the API key; the variable OPLEDGER_API_KEY works too
    #[arg(long, env = "OPLEDGER_API_KEY_FILE", value_name = "FILE")]
    pub api_key_file: Option<PathBuf>,
    /// One JSON document on stdout, for scripts
    #[arg(long)]
    pub json: bool,
}

/// Where traces go.
#[derive(Debug, Clone, Default, Args)]
pub struct TraceArgs {
    /// Collector for traces (OTLP over HTTP), e.g. http://127.0.0.1:4318; without it none are exported
    #[arg(
        long,
        env = "OTEL_EXPORTER_OTLP_ENDPOINT",
        value_name = "URL",
        global = true,
        help_heading = GLOBAL
    )]
    pub otlp_endpoint: Option<String>,
    /// Headers that the collector wants: name=value,name=value
    #[arg(
        long,
        env = "OTEL_EXPORTER_OTLP_HEADERS",
        hide_env_values = true,
        value_name = "HEADERS",
        global = true,
        help_heading = GLOBAL
    )]
    pub otlp_headers: Option<String>,
}

/// The configuration file.
#[derive(Debug, Clone, Default, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct File {
    pub limits: Limits,
    pub retention: Retention,
    pub database: Database,
    pub recovery: Recovery,
    downstreams: BTreeMap<String, DownstreamSettings>,
    kinds: BTreeMap<String, KindSettings>,
}

/// `[limits]`: what a request may take.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Limits {
    /// Longest request body, in bytes.
    pub max_body_bytes: usize,
    /// Longest result of a handler, in bytes of JSON text; beyond, the handler counts as broken.
    pub max_result_bytes: usize,
    /// Longest path and query, in bytes.
    pub max_uri_bytes: usize,
    /// Longest request head, in bytes.
    pub max_header_bytes: usize,
    /// Most header lines.
    pub max_headers: usize,
    /// Time for the head of a request to arrive.
    #[serde(deserialize_with = "duration")]
    pub header_timeout: Duration,
    /// Time for the body of a request to arrive.
    #[serde(deserialize_with = "duration")]
    pub body_timeout: Duration,
    /// Most open connections; more wait in the kernel's queue.
    pub max_connections: usize,
    /// Most deliveries waiting to be run; beyond, 429.
    pub max_queued: usize,
    /// How long a delivery waits for another one of the same id that is being run.
    #[serde(deserialize_with = "duration")]
    pub duplicate_wait: Duration,
    /// How long a stopping process waits for what it has begun.
    #[serde(deserialize_with = "duration")]
    pub drain: Duration,
    /// Memory for receipts of late, in bytes; 0 turns the cache off.
    pub replay_cache_bytes: u64,
    /// Where large bodies of proxied requests are kept while they are under way.
    pub spool_dir: PathBuf,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            max_body_bytes: 1 << 20,
            max_result_bytes: 1 << 20,
            max_uri_bytes: 8 << 10,
            max_header_bytes: 32 << 10,
            max_headers: 100,
            header_timeout: Duration::from_secs(15),
            body_timeout: Duration::from_secs(30),
            max_connections: 10_000,
            max_queued: 10_000,
            duplicate_wait: Duration::from_secs(5),
            drain: Duration::from_secs(30),
            replay_cache_bytes: 20 << 20,
            spool_dir: temporary_directory(),
        }
    }
}

/// `[retention]`: how long answers are kept.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Retention {
    /// How long receipts are replayed.
    #[serde(deserialize_with = "duration")]
    pub receipts: Duration,
    /// How long a tombstone keeps its id spent after the purge; `None` ("forever") is for ever.
    #[serde(deserialize_with = "duration_or_forever")]
    pub tombstones: Option<Duration>,
}

impl Default for Retention {
    fn default() -> Self {
        Self {
            receipts: retention::DEFAULT,
            tombstones: None,
        }
    }
}

/// `[database]`: connections of one process.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Database {
    /// Most connections.
    pub max_connections: u32,
    /// Connections that commit groups; each is one worker.
    pub apply_connections: usize,
    /// Most operations in a group.
    pub group_size: usize,
    /// Turn off behind a pooler in transaction mode that cannot keep prepared statements.
    pub prepared_statements: bool,
    /// How long to wait for a free connection.
    #[serde(deserialize_with = "duration")]
    pub acquire_timeout: Duration,
}

impl Default for Database {
    fn default() -> Self {
        Self {
            max_connections: 16,
            apply_connections: 2,
            group_size: 64,
            prepared_statements: true,
            acquire_timeout: Duration::from_secs(5),
        }
    }
}

/// `[recovery]`: what a process does by itself.
#[derive(Debug, Clone, Copy, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Recovery {
    /// Between heartbeats.
    #[serde(deserialize_with = "duration")]
    pub heartbeat: Duration,
    /// A claim is safe while its process's heartbeat is younger than this.
    #[serde(deserialize_with = "duration")]
    pub lease: Duration,
    /// Between sweeps for abandoned operations.
    #[serde(deserialize_with = "duration")]
    pub sweep: Duration,
    /// Between purges of expired receipts; "forever" leaves them to `opledger purge`.
    #[serde(deserialize_with = "duration_or_forever")]
    pub purge: Option<Duration>,
}

impl Default for Recovery {
    fn default() -> Self {
        Self {
            heartbeat: Duration::from_secs(2),
            lease: Duration::from_secs(15),
            sweep: Duration::from_secs(5),
            purge: Some(Duration::from_secs(60)),
        }
    }
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("cannot read {}", path.display())]
    Read { path: PathBuf, source: std::io::Error },
    #[error("{} is not a valid configuration", path.display())]
    Parse {
        path: PathBuf,
        source: Box<toml::de::Error>,
    },
    #[error("{}: {problem}", path.display())]
    Value { path: PathBuf, problem: String },
    /// The file is right, and a secret that it names is not there.
    #[error("{}: {problem}", path.display())]
    Secret { path: PathBuf, problem: String },
    #[error(
        "no database address; set DATABASE_URL (or DATABASE_URL_FILE, or --database-url), \
         or run `opledger dev` for a private PostgreSQL"
    )]
    NoDatabase,
    #[error("no API key; set OPLEDGER_API_KEY, or name a file with --api-key-file")]
    NoApiKey,
}

/// A file that was read and found valid, with what it registers.
#[derive(Debug)]
pub struct Config {
    pub file: File,
    /// Kinds whose effect is a function in the database.
    pub kinds: Kinds,
    /// Kinds whose effect is a call to a downstream.
    pub downstream_kinds: DownstreamKinds,
    pub downstreams: Downstreams,
}

/// Reads the file and everything it names.
pub fn load(path: &Path) -> Result<Config, Error> {
    let text = read(path)?;
    let mut file: File = toml::from_str(&text).map_err(|source| Error::Parse {
        path: path.to_owned(),
        source: Box::new(source),
    })?;
    let invalid = |problem: String| Error::Value {
        path: path.to_owned(),
        problem,
    };
    file.check().map_err(invalid)?;
    let folder = path.parent().unwrap_or(Path::new("."));
    file.limits.spool_dir = folder.join(&file.limits.spool_dir);
    let downstreams = downstreams::read(&file.downstreams, folder).map_err(|problem| problem.at(path))?;
    let (kinds, downstream_kinds) = kinds::read(&file, folder, &downstreams).map_err(|problem| problem.at(path))?;
    Ok(Config {
        file,
        kinds,
        downstream_kinds,
        downstreams,
    })
}

impl File {
    fn check(&self) -> Result<(), String> {
        let positive = [
            ("limits.max_body_bytes", self.limits.max_body_bytes),
            ("limits.max_result_bytes", self.limits.max_result_bytes),
            ("limits.max_uri_bytes", self.limits.max_uri_bytes),
            ("limits.max_connections", self.limits.max_connections),
            ("limits.max_queued", self.limits.max_queued),
            ("limits.max_headers", self.limits.max_headers),
            ("database.apply_connections", self.database.apply_connections),
            ("database.group_size", self.database.group_size),
        ];
        if let Some((name, _)) = positive.into_iter().find(|(_, value)| *value == 0) {
            return Err(format!("{name} must be at least 1"));
        }
        if self.limits.max_header_bytes < 8 << 10 {
            return Err("limits.max_header_bytes must be at least 8192".to_owned());
        }
        if self.database.group_size > crate::engine::apply::LARGEST_GROUP {
            return Err(format!(
                "database.group_size must be at most {}",
                crate::engine::apply::LARGEST_GROUP
            ));
        }
        // Workers keep theirs; what is left serves keys, look-ups, slow operations and sweeps.
        if self.database.max_connections as usize <= self.database.apply_connections + 1 {
            return Err("database.max_connections must be at least 2 above database.apply_connections".to_owned());
        }
        if self.recovery.lease < self.recovery.heartbeat * 3 {
            return Err(
                "recovery.lease must be at least three heartbeats, or a living process loses its claims".to_owned(),
            );
        }
        Ok(())
    }
}

impl DatabaseArgs {
    /// The address, from flag, variable or file.
    pub fn url(&self) -> Result<String, Error> {
        match (&self.database_url, &self.database_url_file) {
            (Some(url), _) => Ok(url.clone()),
            (None, Some(path)) => Ok(read(path)?.trim().to_owned()),
            (None, None) => Err(Error::NoDatabase),
        }
    }
}

impl Database {
    /// The pool's options for this address.
    pub fn options(&self, url: String) -> pool::Options {
        pool::Options {
            url,
            max_connections: self.max_connections,
            acquire_timeout: self.acquire_timeout,
            prepared_statements: self.prepared_statements,
        }
    }
}

impl TraceArgs {
    /// The exporter, if a collector is named.
    pub fn exporter(&self) -> Result<Option<trace::Exporter>, trace::Error> {
        let Some(endpoint) = self.otlp_endpoint.clone() else {
            return Ok(None);
        };
        let instance = format!("{}-{}", hostname(), std::process::id());
        let settings = trace::Settings {
            endpoint,
            headers: self.otlp_headers.clone(),
            instance,
        };
        trace::Exporter::start(&settings).map(Some)
    }
}

impl ClientArgs {
    /// The API key, from file or variable; never from a flag, which `ps` would show.
    pub fn api_key(&self) -> Result<String, Error> {
        match &self.api_key_file {
            Some(path) => Ok(read(path)?.trim().to_owned()),
            None => variable("OPLEDGER_API_KEY").ok_or(Error::NoApiKey),
        }
    }
}

/// Where PostgreSQL's programs are, if the environment says so.
pub fn postgres_programs() -> Option<PathBuf> {
    variable("OPLEDGER_PG_BIN").map(PathBuf::from)
}

/// `PATH`, to look for PostgreSQL's programs.
#[expect(clippy::disallowed_methods, reason = "this file is where the environment is read")]
pub fn search_path() -> Option<std::ffi::OsString> {
    std::env::var_os("PATH")
}

/// Where temporary files go.
pub fn temporary_directory() -> PathBuf {
    std::env::temp_dir()
}

/// The machine's name, for people who read the table of instances.
pub fn hostname() -> String {
    std::fs::read_to_string("/proc/sys/kernel/hostname")
        .ok()
        .map(|name| name.trim().to_owned())
        .or_else(|| variable("HOSTNAME"))
        .unwrap_or_else(|| "unknown".to_owned())
}

#[expect(clippy::disallowed_methods, reason = "this file is where the environment is read")]
fn variable(name: &str) -> Option<String> {
    std::env::var(name).ok().filter(|value| !value.is_empty())
}

fn read(path: &Path) -> Result<String, Error> {
    std::fs::read_to_string(path).map_err(|source| Error::Read {
        path: path.to_owned(),
        source,
    })
}

/// A duration as the file writes it: a whole number and `ms`, `s`, `m`, `h` or `d`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span(pub Duration);

impl std::str::FromStr for Span {
    type Err = InvalidSpan;

    fn from_str(text: &str) -> Result<Self, InvalidSpan> {
        let digits = text.trim_end_matches(|unit: char| unit.is_ascii_alphabetic());
        let count: u64 = digits.parse().map_err(|_| InvalidSpan)?;
        let unit = match &text[digits.len()..] {
            "ms" => Duration::from_millis(1),
            "s" => Duration::from_secs(1),
            "m" => Duration::from_secs(60),
            "h" => Duration::from_secs(3_600),
            "d" => DAY,
            _ => return Err(InvalidSpan),
        };
        let nanos = unit.as_nanos().checked_mul(count.into()).ok_or(InvalidSpan)?;
        if nanos == 0 || nanos > LONGEST.as_nanos() {
            return Err(InvalidSpan);
        }
        Ok(Self(Duration::from_nanos_u128(nanos)))
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct InvalidSpan;

impl std::error::Error for InvalidSpan {}

impl fmt::Display for InvalidSpan {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("write a duration as a whole number above 0 with ms, s, m, h or d, e.g. \"30s\" or \"400d\"")
    }
}

fn duration<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Duration, D::Error> {
    let text = String::deserialize(deserializer)?;
    text.parse()
        .map(|Span(duration)| duration)
        .map_err(serde::de::Error::custom)
}

/// A duration as flags spell it, the same way as the file.
pub fn parse_duration(text: &str) -> Result<Duration, String> {
    if text == "0s" {
        return Ok(Duration::ZERO);
    }
    text.parse()
        .map(|Span(duration)| duration)
        .map_err(|error| format!("{error}"))
}

fn optional_duration<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Duration>, D::Error> {
    duration(deserializer).map(Some)
}

fn duration_or_forever<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<Duration>, D::Error> {
    let text = String::deserialize(deserializer)?;
    if text == "forever" {
        return Ok(None);
    }
    text.parse()
        .map(|Span(duration)| Some(duration))
        .map_err(serde::de::Error::custom)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn durations_are_read_and_nonsense_is_not() {
        assert_eq!("30s".parse(), Ok(Span(Duration::from_secs(30))));
        assert_eq!("400d".parse(), Ok(Span(retention::DEFAULT)));
        assert_eq!("5ms".parse(), Ok(Span(Duration::from_millis(5))));
        for bad in [
            "",
            "0s",
            "s",
            "1",
            "1 s",
            "1.5h",
            "-1s",
            "1w",
            "99999999999999999999d",
            "9999999d",
        ] {
            assert_eq!(bad.parse::<Span>(), Err(InvalidSpan), "{bad}");
        }
    }

    #[test]
    fn an_unknown_key_is_an_error_that_names_its_line() {
        let error = toml::from_str::<File>("[limits]\nmax_body_bytes = 1\nmax_bdy = 2\n")
            .unwrap_err()
            .to_string();
        assert!(error.contains("line 3") && error.contains("max_bdy"), "{error}");
    }
}
