//! The arrows of the house, read from the sources: imports run downwards only.

use std::path::{Path, PathBuf};

/// The arrow, top first. `config` and `telemetry` stand beside it, and `outbound` beside `ledger`: the engine uses both,
/// and neither knows the other.
const ARROW: [&str; 6] = ["cli", "app", "http", "engine", "ledger", "postgres"];

/// A source file: its path below `src`, and its text without comments and tests.
struct Source {
    path: PathBuf,
    text: String,
}

impl Source {
    /// The layer it belongs to: its first folder, or its own name.
    fn layer(&self) -> &str {
        let first = self.path.components().next().unwrap().as_os_str().to_str().unwrap();
        first.trim_end_matches(".rs")
    }

    fn is(&self, path: &str) -> bool {
        self.path == Path::new(path)
    }

    /// Whether the name occurs as a word of its own.
    fn names(&self, word: &str) -> bool {
        let part_of_name = |side: Option<char>| side.is_some_and(|side| side.is_alphanumeric() || side == '_');
        self.text.match_indices(word).any(|(at, _)| {
            let before = self.text[..at].chars().next_back();
            let after = self.text[at + word.len()..].chars().next();
            !part_of_name(before) && !part_of_name(after)
        })
    }
}

fn sources() -> Vec<Source> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("src");
    let mut sources = Vec::new();
    let mut folders = vec![root.clone()];
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs") {
                let text = std::fs::read_to_string(&path).unwrap();
                let text = without_tests(&text);
                let code: Vec<&str> = text
                    .lines()
                    .filter(|line| !line.trim_start().starts_with("//"))
                    .collect();
                sources.push(Source {
                    path: path.strip_prefix(&root).unwrap().to_owned(),
                    text: code.join("\n"),
                });
            }
        }
    }
    assert!(sources.len() > 40);
    sources
}

/// Without the module of tests; what stands behind it is code again.
fn without_tests(text: &str) -> String {
    match text.split_once("#[cfg(test)]\nmod tests {") {
        Some((code, tests)) => {
            let behind = tests.split_once("\n}\n").map_or("", |(_, behind)| behind);
            format!("{code}{behind}")
        }
        None => text.to_owned(),
    }
}

/// The files that break a rule.
fn breaking(rule: impl Fn(&Source) -> bool) -> Vec<PathBuf> {
    sources()
        .into_iter()
        .filter(|source| rule(source))
        .map(|source| source.path)
        .collect()
}

#[test]
fn imports_run_downwards_only() {
    for (rank, layer) in ARROW.iter().enumerate() {
        for above in &ARROW[..rank] {
            let upwards =
                breaking(|source| source.layer() == *layer && source.text.contains(&format!("crate::{above}")));
            assert!(upwards.is_empty(), "{layer} imports {above}: {upwards:?}");
        }
    }
    let across = breaking(|source| {
        let names = |layer: &str| source.text.contains(&format!("crate::{layer}"));
        match source.layer() {
            "outbound" => [
                "cli",
                "app",
                "http",
                "engine",
                "ledger",
                "postgres",
                "config",
                "telemetry",
            ]
            .iter()
            .any(|layer| names(layer)),
            "ledger" | "postgres" | "telemetry" => names("outbound"),
            _ => false,
        }
    });
    assert!(
        across.is_empty(),
        "the way out and the ledger know nothing of each other: {across:?}"
    );
    let beside = breaking(|source| {
        let names = |layer: &str| source.text.contains(&format!("crate::{layer}"));
        match source.layer() {
            "ledger" | "postgres" => names("config") || names("telemetry"),
            // It counts what it does; its settings it is given.
            "engine" => names("config"),
            _ => false,
        }
    });
    assert!(beside.is_empty(), "settings and metrics are handed down: {beside:?}");
}

#[test]
fn the_ledger_knows_no_http() {
    const SERVERS_AND_CLIENTS: [&str; 6] = ["axum", "hyper", "hyper_util", "h2", "tower", "tower_http"];
    let named = |source: &Source, names: &[&str]| {
        names
            .iter()
            .any(|name| source.text.contains(&format!("{name}::")) && source.names(name))
    };
    let breaking = breaking(|source| match source.layer() {
        "ledger" | "postgres" => named(source, &SERVERS_AND_CLIENTS) || named(source, &["http"]),
        // What is sent to a downstream has a method and header lines; who reads and writes them is not its business.
        "engine" => named(source, &SERVERS_AND_CLIENTS),
        _ => false,
    });
    assert!(breaking.is_empty(), "{breaking:?}");
}

#[test]
fn the_rule_and_the_fingerprint_are_pure() {
    let pure = [
        "ledger/operation.rs",
        "ledger/fingerprint.rs",
        "ledger/canonical.rs",
        "ledger/operation_id.rs",
    ];
    let breaking = breaking(|source| {
        let is_pure = pure.iter().any(|path| source.is(path)) || source.path.starts_with("ledger/canonical");
        is_pure
            && [
                "sqlx",
                "tokio",
                "async",
                "std::fs",
                "std::net",
                "now_utc",
                "Instant::now",
            ]
            .iter()
            .any(|name| source.names(name))
    });
    assert!(breaking.is_empty(), "{breaking:?}");
}

#[test]
fn only_the_configuration_reads_the_environment() {
    let reads = |source: &Source| {
        [
            "env::var",
            "env::var_os",
            "env::vars",
            "env::vars_os",
            "env::temp_dir",
            "env::home_dir",
        ]
        .iter()
        .any(|name| source.names(name))
            || source
                .text
                .split("#[arg(")
                .skip(1)
                .any(|argument| argument.split(")]").next().unwrap_or_default().contains("env"))
    };
    let breaking = breaking(|source| source.layer() != "config" && reads(source));
    assert!(breaking.is_empty(), "{breaking:?}");
}

#[test]
fn only_problems_become_error_statuses() {
    let names_status = |source: &Source| source.names("StatusCode");
    // The command line is a client, and so is the way out: they read statuses. The sandbox is another service.
    let reading = ["http", "cli", "outbound", "engine", "sandbox"];
    // Which of a downstream's answers are passing trouble is a setting.
    let elsewhere = breaking(|source| {
        let is_setting = source.is("config/downstreams/route.rs");
        !reading.contains(&source.layer()) && !is_setting && names_status(source)
    });
    assert!(elsewhere.is_empty(), "{elsewhere:?}");
    let errors = [
        "BAD_REQUEST",
        "UNAUTHORIZED",
        "FORBIDDEN",
        "NOT_FOUND",
        "METHOD_NOT_ALLOWED",
        "REQUEST_TIMEOUT",
        "CONFLICT",
        "GONE",
        "PAYLOAD_TOO_LARGE",
        "URI_TOO_LONG",
        "UNSUPPORTED_MEDIA_TYPE",
        "UNPROCESSABLE_ENTITY",
        "TOO_MANY_REQUESTS",
        "REQUEST_HEADER_FIELDS_TOO_LARGE",
        "INTERNAL_SERVER_ERROR",
        "BAD_GATEWAY",
        "SERVICE_UNAVAILABLE",
        "GATEWAY_TIMEOUT",
    ];
    let statuses = breaking(|source| {
        // Not being ready is an answer of the readiness check, and no error.
        !["cli", "sandbox"].contains(&source.layer())
            && !source.is("config/downstreams/route.rs")
            && !source.is("http/problem.rs")
            && !source.is("http/health.rs")
            && errors.iter().any(|name| source.names(name))
    });
    assert!(statuses.is_empty(), "{statuses:?}");
    let conversions = breaking(|source| {
        let converts = source.text.contains("for Problem {") || source.text.contains("IntoResponse for");
        !source.is("http/problem.rs") && converts
    });
    assert!(conversions.is_empty(), "{conversions:?}");
}

#[test]
fn the_sandbox_knows_nothing_of_the_ledger() {
    let knowing = breaking(|source| {
        source.layer() == "sandbox"
            && [
                "cli",
                "app",
                "http",
                "engine",
                "ledger",
                "outbound",
                "postgres",
                "config",
                "telemetry",
            ]
            .iter()
            .any(|name| source.text.contains(&format!("crate::{name}")))
    });
    assert!(knowing.is_empty(), "what it counts is a second opinion: {knowing:?}");
}
