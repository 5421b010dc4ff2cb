//! What a caller submits: the request's members, taken apart once and kept as values that cannot be wrong any more.

use std::sync::Arc;

use super::canonical::{self, Node, Value};
use super::fingerprint::Fingerprint;
use super::kind::Kind;
use super::operation_id::{InvalidOperationId, OperationId};
use super::tenant::Tenant;

/// Deepest nesting of a payload (a scalar is 0, `[]` is 1).
pub const MAX_DEPTH: usize = 128;

/// Longest `external_reference` and longest member of `run`, in characters.
const MAX_REFERENCE: usize = 255;

/// Whether the operation is to run now.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Mode {
    #[default]
    Execute,
    /// Store intent and payload; run on `execute`.
    Plan,
}

/// The members of a submission, still borrowed from the body.
#[derive(Debug)]
pub struct Envelope<'a> {
    pub kind: &'a str,
    pub payload: &'a Node<'a>,
    pub operation_id: Option<OperationId>,
    pub run: Option<Run>,
    pub external_reference: Option<String>,
    pub mode: Mode,
}

/// Which engine asked, in which of its runs; stored for people, never part of the fingerprint.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Run {
    /// The member `run` as it was sent.
    pub text: String,
    pub run_id: Option<String>,
}

/// Why a body is not a submission.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Invalid {
    #[error("{detail}")]
    Member { pointer: String, detail: String },
    #[error("{0}")]
    OperationId(#[from] InvalidOperationId),
}

/// Parses a request body as JSON, with room for the envelope around the deepest payload.
pub fn parse(body: &[u8]) -> Result<Node<'_>, Invalid> {
    canonical::parse(body, MAX_DEPTH + 1).map_err(|invalid| {
        let reason = match invalid.reason {
            canonical::Reason::TooDeep { .. } => canonical::Reason::TooDeep { limit: MAX_DEPTH },
            reason => reason,
        };
        Invalid::Member {
            pointer: invalid.pointer,
            detail: reason.to_string(),
        }
    })
}

impl<'a> Envelope<'a> {
    /// Takes the members apart; unknown ones are refused by their pointer.
    pub fn read(body: &'a Node<'a>) -> Result<Self, Invalid> {
        let Value::Object(members) = body.value() else {
            return Err(member(
                "",
                "the body must be a JSON object with \"kind\" and \"payload\"",
            ));
        };
        let (mut kind, mut payload) = (None, None);
        let mut envelope = Optional::default();
        for (name, node) in members {
            match name.as_ref() {
                "kind" => kind = Some(string("/kind", node)?),
                "payload" => payload = Some(node),
                "operation_id" => {
                    envelope.operation_id = Some(OperationId::parse(string("/operation_id", node)?)?);
                }
                "run" => envelope.run = Some(run(node)?),
                "external_reference" => envelope.external_reference = Some(reference("/external_reference", node)?),
                "mode" => envelope.mode = mode(node)?,
                _ => return Err(unknown("", name)),
            }
        }
        Ok(Self {
            kind: kind.ok_or_else(|| member("/kind", "\"kind\" is missing: name the type of operation"))?,
            payload: payload
                .ok_or_else(|| member("/payload", "\"payload\" is missing: send what the handler needs"))?,
            operation_id: envelope.operation_id,
            run: envelope.run,
            external_reference: envelope.external_reference,
            mode: envelope.mode,
        })
    }
}

#[derive(Default)]
struct Optional {
    operation_id: Option<OperationId>,
    run: Option<Run>,
    external_reference: Option<String>,
    mode: Mode,
}

fn run(node: &Node<'_>) -> Result<Run, Invalid> {
    let Value::Object(members) = node.value() else {
        return Err(member(
            "/run",
            "\"run\" must be an object of engine, run_id, step and attempt",
        ));
    };
    let mut run_id = None;
    for (name, node) in members {
        match name.as_ref() {
            "engine" | "step" => drop(reference(&format!("/run/{name}"), node)?),
            "run_id" => run_id = Some(reference("/run/run_id", node)?),
            "attempt" if is_count(node.raw()) => {}
            "attempt" => {
                return Err(member(
                    "/run/attempt",
                    "\"attempt\" must be a whole number from 0 to 2147483647",
                ));
            }
            _ => return Err(unknown("/run", name)),
        }
    }
    Ok(Run {
        text: node.raw().to_owned(),
        run_id,
    })
}

fn mode(node: &Node<'_>) -> Result<Mode, Invalid> {
    match string("/mode", node)? {
        "execute" => Ok(Mode::Execute),
        "plan" => Ok(Mode::Plan),
        _ => Err(member("/mode", "\"mode\" must be \"execute\" or \"plan\"")),
    }
}

fn string<'a>(pointer: &str, node: &'a Node<'a>) -> Result<&'a str, Invalid> {
    match node.value() {
        Value::String(text) => Ok(text),
        _ => Err(member(pointer, "must be a string")),
    }
}

fn reference(pointer: &str, node: &Node<'_>) -> Result<String, Invalid> {
    let text = string(pointer, node)?;
    if !is_reference(text) {
        return Err(member(
            pointer,
            "must be 1 to 255 characters, none of them a control character",
        ));
    }
    Ok(text.to_owned())
}

/// A whole number, in whichever spelling: `2`, `2.0` and `2e0` are equal to the ledger.
fn is_count(literal: &str) -> bool {
    literal
        .parse::<f64>()
        .is_ok_and(|count| count.fract() == 0.0 && (0.0..=f64::from(i32::MAX)).contains(&count))
}

/// Whether a text can be an `external_reference` or a member of `run`.
pub fn is_reference(text: &str) -> bool {
    (1..=MAX_REFERENCE).contains(&text.chars().count()) && !text.chars().any(char::is_control)
}

fn member(pointer: &str, detail: &str) -> Invalid {
    Invalid::Member {
        pointer: pointer.to_owned(),
        detail: detail.to_owned(),
    }
}

fn unknown(parent: &str, name: &str) -> Invalid {
    let shown: String = name.chars().take(60).collect();
    let pointer = format!("{parent}/{}", shown.replace('~', "~0").replace('/', "~1"));
    Invalid::Member {
        pointer,
        detail: "there is no such member; remove it or correct its name".to_owned(),
    }
}

/// One intent, ready to be claimed: every rule about its form has been checked.
#[derive(Debug)]
pub struct Submission {
    pub tenant: Tenant,
    pub id: OperationId,
    pub kind: Arc<Kind>,
    pub fingerprint: Fingerprint,
    /// The text exactly as it was sent; stored and shown.
    pub payload: Box<str>,
    /// The canonical text, which is what was fingerprinted; the handler gets this.
    pub canonical: Box<str>,
    pub run: Option<Run>,
    pub external_reference: Option<String>,
    /// Key id of the caller.
    pub requested_by: Arc<str>,
    pub trace_parent: Option<String>,
}

impl Submission {
    /// The handler's second argument: `{"id","tenant","kind","fingerprint","attempt"}`.
    pub fn operation_argument(&self, attempt: i32) -> String {
        // No part of these alphabets needs escaping but the id's, which serde_json does.
        format!(
            r#"{{"id":{},"tenant":"{}","kind":"{}","fingerprint":"{}","attempt":{attempt}}}"#,
            serde_json::Value::from(self.id.as_str()),
            self.tenant,
            self.kind.name,
            self.fingerprint,
        )
    }

    /// `key:<key id>` of the caller, as history names it.
    pub fn requester(&self) -> String {
        format!("key:{}", self.requested_by)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn pointer(body: &str) -> String {
        let node = match parse(body.as_bytes()) {
            Ok(node) => node,
            Err(Invalid::Member { pointer, .. }) => return pointer,
            Err(Invalid::OperationId(_)) => return "/operation_id".to_owned(),
        };
        match Envelope::read(&node) {
            Ok(_) => "accepted".to_owned(),
            Err(Invalid::Member { pointer, .. }) => pointer,
            Err(Invalid::OperationId(_)) => "/operation_id".to_owned(),
        }
    }

    #[test]
    fn every_member_is_checked_and_named_by_its_pointer() {
        let cases = [
            (r#"{"kind":"k","payload":{}}"#, "accepted"),
            (
                r#"{"kind":"k","payload":null,"mode":"plan","external_reference":"x"}"#,
                "accepted",
            ),
            (
                r#"{"kind":"k","payload":1,"run":{"engine":"e","run_id":"r","step":"s","attempt":2}}"#,
                "accepted",
            ),
            (r#"[]"#, ""),
            (r#"{"payload":1}"#, "/kind"),
            (r#"{"kind":"k"}"#, "/payload"),
            (r#"{"kind":1,"payload":1}"#, "/kind"),
            (r#"{"kind":"k","payload":1,"kid":1}"#, "/kid"),
            (r#"{"kind":"k","payload":1,"run":{"a/b":1}}"#, "/run/a~1b"),
            (r#"{"kind":"k","payload":1,"run":{"attempt":-1}}"#, "/run/attempt"),
            (r#"{"kind":"k","payload":1,"run":[]}"#, "/run"),
            (r#"{"kind":"k","payload":1,"mode":"later"}"#, "/mode"),
            (r#"{"kind":"k","payload":1,"operation_id":""}"#, "/operation_id"),
            (r#"{"kind":"k","payload":1,"run":{"attempt":2.0}}"#, "accepted"),
            (r#"{"kind":"k","payload":1,"run":{"attempt":2.5}}"#, "/run/attempt"),
            (r#"{"kind":"k","payload":1,"run":{"attempt":"2"}}"#, "/run/attempt"),
            (
                r#"{"kind":"k","payload":1,"run":{"attempt":2147483648}}"#,
                "/run/attempt",
            ),
            (r#"{"kind":"k","payload":1,"run":{"step":"a\nb"}}"#, "/run/step"),
            (
                r#"{"kind":"k","payload":1,"external_reference":""}"#,
                "/external_reference",
            ),
            (
                r#"{"kind":"k","payload":1,"external_reference":"a\u001fb"}"#,
                "/external_reference",
            ),
            (r#"{"kind":"k","payload":{"a":1,"a":1}}"#, "/payload/a"),
        ];
        for (body, expected) in cases {
            assert_eq!(pointer(body), expected, "{body}");
        }
    }

    #[test]
    fn the_payload_may_be_128_deep_and_no_deeper() {
        let body = |depth: usize| format!(r#"{{"kind":"k","payload":{}{}}}"#, "[".repeat(depth), "]".repeat(depth));
        assert_eq!(pointer(&body(128)), "accepted");
        assert_ne!(pointer(&body(129)), "accepted");
    }
}
