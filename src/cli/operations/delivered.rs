//! What a delivery was answered. The answers of this service are recognised by their form and by the id in them; an
//! answer that names the operation in its headers alone is the downstream's own, and shown as it is.

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use http::HeaderName;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::show::{Accepted, Receipt, lines};
use crate::cli::client::answer::Answer;
use crate::cli::exit::{Exit, Failure};
use crate::cli::output;

/// Lines that are about this delivery, not of the downstream's answer.
const OURS: [&str; 12] = [
    "operation-id",
    "operation-state",
    "receipt-expires",
    "idempotent-replayed",
    "preference-applied",
    "request-id",
    "cache-control",
    "x-content-type-options",
    "date",
    "connection",
    "content-length",
    "transfer-encoding",
];

/// Shows what a delivery was answered: a receipt, or that it is not settled yet, or why there will be none.
pub fn settled(answer: &Answer, json: bool, accepted_will_do: bool) -> Result<Exit, Failure> {
    if answer.is_downstreams() {
        return downstreams(answer, json);
    }
    let (text, exit) = match answer.status.as_u16() {
        200 => {
            let receipt: Receipt<'_> = answer.parsed()?;
            (
                receipt.render(answer.header("idempotent-replayed").is_some()),
                Exit::Done,
            )
        }
        202 => {
            let accepted: Accepted = answer.parsed()?;
            let exit = if accepted_will_do { Exit::Done } else { Exit::NotSettled };
            if exit == Exit::NotSettled {
                output::say(&format!("accepted, not settled: the operation is {}", accepted.state));
            }
            (accepted.render(), exit)
        }
        _ => return output::refused(answer, json),
    };
    if json {
        output::print_json(&answer.body)?
    } else {
        output::print(text)?
    }
    Ok(exit)
}

/// The downstream's own answer, for people and for scripts.
fn downstreams(answer: &Answer, json: bool) -> Result<Exit, Failure> {
    if json {
        output::print_document(&Document::of(answer))?;
    } else {
        output::print(render(answer))?;
    }
    let exit = answer.settlement();
    if exit == Exit::Failed {
        output::say("the downstream refused it; no effect, and it is not sent again");
    }
    Ok(exit)
}

/// An answer with any body as one JSON document: JSON as it is, other text as text.
#[derive(Serialize)]
pub struct Document<'a> {
    operation_id: &'a str,
    state: &'a str,
    replayed: bool,
    answer: Parts<'a>,
}

#[derive(Serialize)]
struct Parts<'a> {
    status: u16,
    headers: Vec<(&'a str, String)>,
    #[serde(skip_serializing_if = "Option::is_none")]
    body: Option<&'a RawValue>,
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    base64: Option<String>,
}

impl<'a> Document<'a> {
    pub fn of(answer: &'a Answer) -> Self {
        let text = std::str::from_utf8(&answer.body);
        let body = text.ok().and_then(|text| serde_json::from_str(text).ok());
        Self {
            operation_id: answer.header("operation-id").unwrap_or_default(),
            state: answer.header("operation-state").unwrap_or_default(),
            replayed: answer.header("idempotent-replayed").is_some(),
            answer: Parts {
                status: answer.status.as_u16(),
                headers: headers(answer).map(|(name, value)| (name.as_str(), value)).collect(),
                body,
                text: text.ok().filter(|text| body.is_none() && !text.is_empty()),
                base64: text.is_err().then(|| BASE64_STANDARD.encode(&answer.body)),
            },
        }
    }
}

fn headers(answer: &Answer) -> impl Iterator<Item = (&HeaderName, String)> {
    let theirs = answer.headers.iter().filter(|(name, _)| !OURS.contains(&name.as_str()));
    theirs.map(|(name, value)| (name, String::from_utf8_lossy(value.as_bytes()).into_owned()))
}

fn render(answer: &Answer) -> String {
    let state = answer.header("operation-state").unwrap_or_default();
    let state = match answer.header("idempotent-replayed") {
        Some(_) => format!("{state} (replayed: nothing was sent again)"),
        None => state.to_owned(),
    };
    let mut pairs = vec![
        (
            "operation",
            answer.header("operation-id").unwrap_or_default().to_owned(),
        ),
        ("state", state),
        ("status", answer.status.as_u16().to_string()),
    ];
    pairs.extend(headers(answer).map(|(name, value)| ("header", format!("{name}: {value}"))));
    let mut text = lines(&pairs);
    match std::str::from_utf8(&answer.body) {
        Ok("") => {}
        Ok(body) => text.push_str(&format!("\n{}\n", output::inert_lines(body.trim_end()))),
        Err(_) => text.push_str(&format!(
            "\n{} bytes that are no text; `opledger operations receipt` writes them as they are\n",
            answer.body.len()
        )),
    }
    text
}

impl Answer {
    /// Whether this is a downstream's own answer: it names the operation in its headers, and is in none of our forms.
    pub fn is_downstreams(&self) -> bool {
        #[derive(Deserialize)]
        struct Ours {
            operation_id: String,
            #[serde(default)]
            r#type: String,
            #[serde(default)]
            code: String,
            #[serde(default)]
            fingerprint: String,
        }
        let Some(id) = self.header("operation-id") else {
            return false;
        };
        let Ok(ours) = serde_json::from_slice::<Ours>(&self.body) else {
            return true;
        };
        let is_problem = !ours.code.is_empty() && ours.r#type == format!("/problems/{}", ours.code);
        ours.operation_id != id || !(is_problem || ours.fingerprint.starts_with("v1:"))
    }

    /// How the operation of a receipt ended, whatever status its performer chose.
    pub fn settlement(&self) -> Exit {
        match self.header("operation-state") {
            Some("succeeded" | "compensating" | "compensated") => Exit::Done,
            Some("failed") => Exit::Failed,
            Some("rejected" | "cancelled") => Exit::Over,
            // Passed on while it was being run, and ended well: it is settled by its status.
            Some("running") if self.status.as_u16() < 400 => Exit::Done,
            Some("running") => Exit::Failed,
            Some(_) | None => Exit::of_problem(self.status.as_u16(), None),
        }
    }
}

#[cfg(test)]
mod tests {
    use http::{HeaderMap, StatusCode};

    use super::*;

    fn answer(status: u16, state: &str, body: &str) -> Answer {
        let mut headers = HeaderMap::new();
        headers.insert("operation-id", "a".parse().unwrap());
        headers.insert("operation-state", state.parse().unwrap());
        headers.insert("x-charge", "ch_1".parse().unwrap());
        Answer {
            status: StatusCode::from_u16(status).unwrap(),
            headers,
            body: body.to_owned().into(),
        }
    }

    #[test]
    fn a_downstreams_answer_is_told_from_ours_whatever_it_says() {
        let ours = r#"{"type":"/problems/operation-failed","code":"operation-failed","operation_id":"a"}"#;
        assert!(!answer(422, "failed", ours).is_downstreams());
        assert!(!answer(200, "succeeded", r#"{"operation_id":"a","fingerprint":"v1:0"}"#).is_downstreams());
        for theirs in [
            "",
            "<html>",
            r#"{"code":"fingerprint-mismatch","retryable":true}"#,
            r#"{"type":"/problems/outcome-unknown","code":"outcome-unknown","operation_id":"b"}"#,
            r#"{"operation_id":"a"}"#,
        ] {
            assert!(answer(409, "failed", theirs).is_downstreams(), "{theirs}");
        }
    }

    #[test]
    fn the_state_decides_how_the_command_ends_not_the_downstreams_status() {
        for (status, state, exit) in [
            (302, "succeeded", Exit::Done),
            (404, "failed", Exit::Failed),
            (503, "failed", Exit::Failed),
            (200, "running", Exit::Done),
            (402, "running", Exit::Failed),
        ] {
            assert_eq!(answer(status, state, "x").settlement(), exit, "{status} {state}");
        }
    }

    #[test]
    fn any_body_fits_into_the_document_and_none_acts_on_a_terminal() {
        let shown = |body: &str| serde_json::to_string(&Document::of(&answer(201, "succeeded", body)).answer).unwrap();
        assert_eq!(
            shown(r#"{"n":12233344445555567}"#),
            r#"{"status":201,"headers":[["x-charge","ch_1"]],"body":{"n":12233344445555567}}"#
        );
        assert!(shown("plain").ends_with(r#""text":"plain"}"#));
        assert!(!render(&answer(201, "succeeded", "a\u{1b}[2Jb")).contains('\u{1b}'));
    }
}
