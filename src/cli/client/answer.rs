//! An answer of the service, and the reason in it when it is a problem.

use std::time::Duration;

use bytes::Bytes;
use http::header::RETRY_AFTER;
use http::{HeaderMap, StatusCode};
use serde::Deserialize;

use crate::cli::exit::{Exit, Failure};

/// What came back.
#[derive(Debug, Clone)]
pub struct Answer {
    pub status: StatusCode,
    pub headers: HeaderMap,
    pub body: Bytes,
}

/// The members of a problem that people are told; others are left alone.
#[derive(Debug, Clone, Deserialize)]
pub struct Problem {
    pub code: String,
    #[serde(default)]
    pub detail: String,
    #[serde(default)]
    pub retryable: bool,
    #[serde(default)]
    operation_url: Option<String>,
    #[serde(default)]
    pointer: Option<String>,
    #[serde(default)]
    parameter: Option<String>,
    #[serde(default)]
    sqlstate: Option<String>,
    #[serde(default)]
    message: Option<String>,
    #[serde(default)]
    original: Option<Original>,
}

#[derive(Debug, Clone, Deserialize)]
struct Original {
    kind: String,
    state: Option<String>,
    created_at: Option<String>,
}

impl Answer {
    /// The body as what was asked for. Anything else than JSON of that form did not come from this service.
    pub fn parsed<'a, T: Deserialize<'a>>(&'a self) -> Result<T, Failure> {
        serde_json::from_slice(&self.body).map_err(|_| self.foreign())
    }

    /// The problem in the body, if it is one.
    pub fn problem(&self) -> Option<Problem> {
        serde_json::from_slice(&self.body).ok()
    }

    pub fn header(&self, name: &str) -> Option<&str> {
        self.headers.get(name)?.to_str().ok()
    }

    /// An answer in no form of ours: from a proxy in between, or from another service.
    pub fn foreign(&self) -> Failure {
        let exit = match Exit::of_problem(self.status.as_u16(), None) {
            // What is no answer of ours settles nothing.
            Exit::Done | Exit::NotSettled => Exit::Other,
            exit => exit,
        };
        Failure {
            exit,
            code: "not-our-answer",
            detail: format!(
                "the answer (status {}) is not one of opledger's; check the address and what stands before the service",
                self.status.as_u16()
            ),
            retryable: exit == Exit::Unavailable,
        }
    }

    /// How long the service asks to wait.
    pub fn retry_after(&self) -> Option<Duration> {
        self.header(RETRY_AFTER.as_str())?.parse().ok().map(Duration::from_secs)
    }
}

impl Problem {
    /// The reason for people: what is wrong, where, and where to read on.
    pub fn reason(&self) -> String {
        let mut reason = format!("{}: {}", self.code, self.detail);
        let place = [
            ("at", &self.pointer),
            ("parameter", &self.parameter),
            ("SQLSTATE", &self.sqlstate),
        ];
        for (what, text) in place.iter().filter_map(|(what, text)| Some((what, text.as_deref()?))) {
            reason.push_str(&format!(
                "\n  {what} {}",
                if text.is_empty() { "the whole body" } else { text }
            ));
        }
        if let Some(message) = self.message.as_deref().filter(|message| !self.detail.contains(message)) {
            reason.push_str(&format!("\n  {message}"));
        }
        if let Some(original) = &self.original {
            reason.push_str(&format!("\n  the id belongs to an operation of kind {}", original.kind));
            for (what, text) in [("state", &original.state), ("created at", &original.created_at)] {
                if let Some(text) = text {
                    reason.push_str(&format!(", {what} {text}"));
                }
            }
        }
        if let Some(url) = &self.operation_url {
            reason.push_str(&format!("\n  {url}"));
        }
        reason
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_reason_names_the_original_and_where_to_read_it() {
        let body = r#"{"code":"fingerprint-mismatch","detail":"Nothing was done.","operation_url":"/v1/operations/a",
            "original":{"kind":"order.refund","state":"succeeded","created_at":"2026-01-01T00:00:00.000000Z"}}"#;
        let reason = serde_json::from_str::<Problem>(body).unwrap().reason();
        assert!(
            reason.contains("order.refund, state succeeded") && reason.ends_with("/v1/operations/a"),
            "{reason}"
        );
    }
}
