//! `opledger doctor`: says what is wrong, and what to do about it, before or while a service runs. It changes nothing.
//!
//! What `serve` refuses is a FAIL here, and so is a downstream that no request would reach; what works and should not stay
//! so is a warning.

mod database;
mod downstreams;
mod role;

use std::process::ExitCode;

use serde::Serialize;

use super::exit::{Exit, chain};
use super::output;
use crate::config::{self, Config, DatabaseArgs, FileArgs};

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  opledger doctor
  opledger doctor --config /etc/opledger/opledger.toml --json | jq '.checks[] | select(.level == \"fail\")'

Run it where the service runs, with its environment, its address and its role: what it says about rights, secrets and
the network is about those. Downstreams are connected to, and sent no request.
Exit codes: 0 nothing failed (there may be warnings), 1 something failed.")]
pub struct Args {
    #[command(flatten)]
    file: FileArgs,
    #[command(flatten)]
    database: DatabaseArgs,
    /// One JSON document on stdout, for scripts
    #[arg(long)]
    json: bool,
}

/// How bad it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Level {
    Ok,
    Warn,
    Fail,
}

/// One thing that was looked at.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
struct Check {
    level: Level,
    /// What it is about, for programs.
    name: &'static str,
    what: String,
    /// What to do; nothing when all is well.
    advice: Option<String>,
}

/// What was found, in the order in which it was looked at.
#[derive(Debug, Default, Serialize)]
struct Findings {
    checks: Vec<Check>,
}

pub async fn run(args: Args) -> anyhow::Result<ExitCode> {
    let mut findings = Findings::default();
    let config = file(&args.file, &mut findings);
    match args.database.url() {
        Ok(url) => database::examine(url, config.as_ref(), &mut findings).await,
        Err(error) => findings.fail("database", chain(&error), "give the address that the service is given"),
    }
    if let Some(config) = &config {
        downstreams::examine(&config.downstreams, &config.file.limits.spool_dir, &mut findings).await;
    }
    if args.json {
        output::print_document(&findings)?
    } else {
        output::print(findings.render())?
    }
    let failed = findings
        .checks
        .iter()
        .filter(|check| check.level == Level::Fail)
        .count();
    if failed > 0 {
        output::say(&format!("{failed} of {} checks failed", findings.checks.len()));
    }
    Ok(findings.exit().into())
}

fn file(args: &FileArgs, findings: &mut Findings) -> Option<Config> {
    let path = args.config.display();
    match config::load(&args.config) {
        Ok(config) => {
            let kinds = config.kinds.iter().count() + config.downstream_kinds.iter().count();
            let downstreams = config.downstreams.iter().count();
            if kinds + downstreams == 0 {
                findings.warn(
                    "settings",
                    format!("{path} names neither kinds nor downstreams"),
                    "register one: [kinds.\"order.refund\"] or [downstreams.payments]",
                );
            } else {
                let what = format!("{path} is valid and names {kinds} kinds and {downstreams} downstreams");
                findings.ok("settings", what);
            }
            Some(config)
        }
        Err(error @ config::Error::Secret { .. }) => {
            let advice =
                "set the variable or write the file, for the service too; downstreams and handlers were not looked at";
            findings.fail("secrets", chain(&error), advice);
            None
        }
        Err(error) => {
            findings.fail(
                "settings",
                chain(&error),
                "correct the file, or name another one with --config",
            );
            None
        }
    }
}

impl Findings {
    fn ok(&mut self, name: &'static str, what: impl Into<String>) {
        self.checks.push(Check {
            level: Level::Ok,
            name,
            what: what.into(),
            advice: None,
        });
    }

    fn warn(&mut self, name: &'static str, what: impl Into<String>, advice: impl Into<String>) {
        self.checks.push(Check {
            level: Level::Warn,
            name,
            what: what.into(),
            advice: Some(advice.into()),
        });
    }

    fn fail(&mut self, name: &'static str, what: impl Into<String>, advice: impl Into<String>) {
        self.checks.push(Check {
            level: Level::Fail,
            name,
            what: what.into(),
            advice: Some(advice.into()),
        });
    }

    /// A line each.
    fn render(&self) -> String {
        let mut text = String::new();
        for check in &self.checks {
            let level = match check.level {
                Level::Ok => "ok  ",
                Level::Warn => "warn",
                Level::Fail => "FAIL",
            };
            let advice = check
                .advice
                .as_ref()
                .map(|advice| format!(" — {advice}"))
                .unwrap_or_default();
            text.push_str(&format!(
                "{level}  {}\n",
                output::inert(&format!("{}{advice}", check.what))
            ));
        }
        text
    }

    fn exit(&self) -> Exit {
        if self.checks.iter().any(|check| check.level == Level::Fail) {
            Exit::Other
        } else {
            Exit::Done
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_finding_is_one_line_that_says_what_to_do() {
        let mut findings = Findings::default();
        findings.ok("a", "all is well");
        findings.warn("b", "so so\u{1b}[31m", "mend it");
        assert_eq!(findings.exit(), Exit::Done);
        findings.fail("c", "broken\nin two", "replace it");
        assert_eq!(
            findings.render(),
            "ok    all is well\nwarn  so so\\u{1b}[31m — mend it\nFAIL  broken\\u{a}in two — replace it\n"
        );
        assert_eq!(findings.exit(), Exit::Other);
    }
}
