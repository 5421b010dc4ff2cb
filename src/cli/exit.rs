//! How a command ends: the exit codes, and what is said when there is nothing else to show.
//!
//! Scripts branch on the code alone; people read the reason on stderr. Which answer means which code is decided here
//! and nowhere else.

use std::process::ExitCode;

/// The codes, for `--help`.
pub const HELP: &str = "\
Exit codes:
   0  done
   1  another error
   2  the command line is wrong
   3  refused before anything was stored (400, 413, 415, …): correct the request; the id is still free
   4  no valid API key, or it may not do that (401, 403)
   5  not found
   6  fingerprint-mismatch: the id belongs to another request; do not go on under a new id
   7  not settled yet (202, operation-in-progress), or too early to decide: ask again under the same id
   8  outcome-unknown: it may have taken effect; read the operation, do not send it again
   9  refused by a business rule or by the downstream: no effect
  10  the operation is over or its state forbids it: rejected, cancelled, receipt expired, begun already
  11  the service was not reached, or cannot serve now: the same command may be run again
  12  the handler or the service is broken (500): the same command may be run again after repair";

/// How a command ends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    Done = 0,
    Other = 1,
    Usage = 2,
    Refused = 3,
    NotAllowed = 4,
    NotFound = 5,
    Mismatch = 6,
    NotSettled = 7,
    Unknown = 8,
    Failed = 9,
    Over = 10,
    Unavailable = 11,
    Broken = 12,
}

/// Why a command ends without an answer of the service: said on stderr, and as a problem with `--json`.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{detail}")]
pub struct Failure {
    pub exit: Exit,
    /// For programs, like the codes of the service's problems.
    pub code: &'static str,
    pub detail: String,
    /// Whether the same command may end differently later.
    pub retryable: bool,
}

impl Exit {
    /// What an answer with this status and problem code means.
    pub fn of_problem(status: u16, code: Option<&str>) -> Self {
        match code {
            Some("fingerprint-mismatch") => Self::Mismatch,
            Some("operation-in-progress" | "resolution-too-early") => Self::NotSettled,
            Some("outcome-unknown") => Self::Unknown,
            Some("operation-failed") => Self::Failed,
            Some("operation-rejected" | "operation-cancelled" | "receipt-expired" | "state-conflict") => Self::Over,
            Some("handler-broken" | "internal") => Self::Broken,
            // Whatever stands between us and the service answers without our codes; so may a later release.
            Some(_) | None => Self::of_status(status),
        }
    }

    fn of_status(status: u16) -> Self {
        match status {
            200..=201 | 203..=299 | 304 => Self::Done,
            202 => Self::NotSettled,
            401 | 403 | 407 => Self::NotAllowed,
            404 => Self::NotFound,
            410 => Self::Over,
            400 | 405 | 408 | 411 | 413 | 414 | 415 | 431 => Self::Refused,
            429 | 502 | 503 | 504 => Self::Unavailable,
            500 => Self::Broken,
            _ => Self::Other,
        }
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}

impl Failure {
    /// Something about this machine, its files or the database; not about the request.
    pub fn other(detail: impl Into<String>) -> Self {
        Self {
            exit: Exit::Other,
            code: "error",
            detail: detail.into(),
            retryable: false,
        }
    }

    /// A request that we do not send, since nothing good could come of it.
    pub fn refused(code: &'static str, detail: impl Into<String>) -> Self {
        Self {
            exit: Exit::Refused,
            code,
            detail: detail.into(),
            retryable: false,
        }
    }

    /// Nothing was reached, or nothing answered.
    pub fn unavailable(code: &'static str, detail: impl Into<String>) -> Self {
        Self {
            exit: Exit::Unavailable,
            code,
            detail: detail.into(),
            retryable: true,
        }
    }
}

impl From<crate::config::Error> for Failure {
    fn from(error: crate::config::Error) -> Self {
        use crate::config::Error;
        let exit = match &error {
            Error::NoApiKey => Exit::NotAllowed,
            Error::NoDatabase => Exit::Usage,
            Error::Read { .. } | Error::Parse { .. } | Error::Value { .. } | Error::Secret { .. } => Exit::Other,
        };
        let code = match exit {
            Exit::NotAllowed => "unauthenticated",
            _ => "error",
        };
        Self {
            exit,
            code,
            detail: chain(&error),
            retryable: false,
        }
    }
}

/// An error and its causes in one line.
pub fn chain(error: &(dyn std::error::Error + 'static)) -> String {
    let mut text = error.to_string();
    let mut cause = error.source();
    while let Some(error) = cause {
        let next = error.to_string();
        // Many errors repeat their cause in their own words.
        if !text.ends_with(&next) {
            text.push_str(": ");
            text.push_str(&next);
        }
        cause = error.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_that_ask_for_different_steps_have_different_codes() {
        let exits = [
            (400, "payload-invalid", Exit::Refused),
            (400, "key-conflict", Exit::Refused),
            (413, "too-large", Exit::Refused),
            (415, "unsupported-media-type", Exit::Refused),
            (401, "unauthenticated", Exit::NotAllowed),
            (403, "forbidden", Exit::NotAllowed),
            (404, "not-found", Exit::NotFound),
            (422, "fingerprint-mismatch", Exit::Mismatch),
            (409, "operation-in-progress", Exit::NotSettled),
            (409, "resolution-too-early", Exit::NotSettled),
            (409, "outcome-unknown", Exit::Unknown),
            (422, "operation-failed", Exit::Failed),
            (409, "operation-rejected", Exit::Over),
            (409, "operation-cancelled", Exit::Over),
            (409, "state-conflict", Exit::Over),
            (410, "receipt-expired", Exit::Over),
            (429, "rate-limited", Exit::Unavailable),
            (503, "ledger-unavailable", Exit::Unavailable),
            (500, "handler-broken", Exit::Broken),
            (500, "internal", Exit::Broken),
        ];
        for (status, code, exit) in exits {
            assert_eq!(Exit::of_problem(status, Some(code)), exit, "{code}");
        }
    }

    #[test]
    fn answers_of_others_are_told_by_status() {
        for (status, exit) in [
            (200, Exit::Done),
            (202, Exit::NotSettled),
            (302, Exit::Other),
            (407, Exit::NotAllowed),
            (409, Exit::Other),
            (422, Exit::Other),
            (502, Exit::Unavailable),
            (504, Exit::Unavailable),
        ] {
            assert_eq!(Exit::of_problem(status, None), exit, "{status}");
        }
        assert_eq!(Exit::of_problem(503, Some("a-later-code")), Exit::Unavailable);
    }

    #[test]
    fn help_names_every_code() {
        for exit in 0..=Exit::Broken as u8 {
            assert!(
                HELP.lines()
                    .any(|line| line.trim_start().starts_with(&format!("{exit}  "))),
                "{exit}"
            );
        }
    }
}
