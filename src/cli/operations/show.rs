//! Operations as people read them. Values of the business keep every digit.

use serde::Deserialize;
use serde_json::value::RawValue;

use crate::cli::exit::Failure;
use crate::cli::output::{Table, counted, one_line};

/// The receipt of an operation that succeeded.
#[derive(Debug, Deserialize)]
pub struct Receipt<'a> {
    operation_id: String,
    kind: String,
    state: String,
    fingerprint: String,
    attempt: i64,
    #[serde(borrow)]
    result: &'a RawValue,
    /// Absent where a person decided.
    settled_at: Option<String>,
    /// Why a person decided that it succeeded.
    resolution: Option<String>,
}

/// 202: stored and not settled.
#[derive(Debug, Deserialize)]
pub struct Accepted {
    operation_id: String,
    kind: String,
    pub state: String,
    fingerprint: String,
}

/// An operation as the service shows it.
#[derive(Debug, Deserialize)]
pub struct Operation<'a> {
    pub operation_id: String,
    pub kind: String,
    pub target: String,
    pub state: String,
    fingerprint: String,
    pub version: i32,
    #[serde(borrow)]
    run: Option<&'a RawValue>,
    external_reference: Option<String>,
    #[serde(default)]
    pub downstream_key: Option<String>,
    requested_by: String,
    deliveries: i64,
    pub attempts: i64,
    effects: Option<i64>,
    pub created_at: String,
    pub due_at: Option<String>,
    settled_at: Option<String>,
    receipt_expires_at: Option<String>,
    receipt: Option<Stored>,
    #[serde(default)]
    pub links: Vec<Link>,
    /// Empty in lists.
    #[serde(borrow, default)]
    pub history: Vec<Event<'a>>,
}

/// The other operation undoes this one.
pub const RELATION_UNDONE_BY: &str = "compensated_by";

/// How another operation belongs to this one.
#[derive(Debug, Deserialize)]
pub struct Link {
    pub relation: String,
    pub operation_id: String,
}

/// What is stored of the answer.
#[derive(Debug, Deserialize)]
struct Stored {
    status: u16,
    body_sha256: String,
    size: i64,
}

/// One change.
#[derive(Debug, Deserialize)]
pub struct Event<'a> {
    pub at: String,
    pub event: String,
    pub state: String,
    actor: String,
    attempt: i64,
    pub reason: Option<String>,
    #[serde(borrow)]
    evidence: Option<&'a RawValue>,
}

impl Receipt<'_> {
    pub fn render(&self, replayed: bool) -> String {
        let state = if replayed {
            format!("{} (replayed: nothing was done again)", self.state)
        } else {
            self.state.clone()
        };
        let mut pairs = vec![
            ("operation", self.operation_id.clone()),
            ("kind", self.kind.clone()),
            ("state", state),
            ("fingerprint", self.fingerprint.clone()),
            ("attempt", self.attempt.to_string()),
            ("settled", or_none(self.settled_at.as_deref())),
            ("result", self.result.get().to_owned()),
        ];
        pairs.extend(self.resolution.clone().map(|reason| ("decided by a person", reason)));
        lines(&pairs)
    }
}

impl Accepted {
    pub fn render(&self) -> String {
        lines(&[
            ("operation", self.operation_id.clone()),
            ("kind", self.kind.clone()),
            ("state", self.state.clone()),
            ("fingerprint", self.fingerprint.clone()),
        ])
    }
}

impl Operation<'_> {
    pub fn render(&self) -> String {
        let receipt = self.receipt.as_ref();
        let receipt = receipt.map(|stored| {
            format!(
                "{}, {} bytes, SHA-256 {}",
                stored.status, stored.size, stored.body_sha256
            )
        });
        let mut pairs = vec![
            ("operation", self.operation_id.clone()),
            ("kind", self.kind.clone()),
            ("performed by", self.target.clone()),
            ("state", self.state.clone()),
            ("version", self.version.to_string()),
            ("fingerprint", self.fingerprint.clone()),
            (
                "counts",
                [
                    counted(self.deliveries, "delivery", "deliveries"),
                    counted(self.attempts, "attempt", "attempts"),
                    self.effects(),
                ]
                .join(", "),
            ),
            ("requested by", self.requested_by.clone()),
            ("run", one_line(self.run)),
            ("reference", or_none(self.external_reference.as_deref())),
            ("key there", or_none(self.downstream_key.as_deref())),
            ("created", self.created_at.clone()),
            ("settled", or_none(self.settled_at.as_deref())),
            ("receipt", or_none(receipt.as_deref())),
            ("expires", or_none(self.receipt_expires_at.as_deref())),
        ];
        let linked = |link: &Link| {
            let relation = link.relation.replace('_', " ");
            ("linked", format!("{relation} {}", link.operation_id))
        };
        pairs.extend(self.links.iter().map(linked));
        if self.is_unknown() {
            let last = self.last().map(Event::in_words);
            pairs.extend(last.map(|last| ("last", last)));
            pairs.push(("recovery", self.recovery()));
            let advice = self.advice().0.into_iter();
            pairs.extend(advice.map(|step| ("to do", step)));
        } else if let Some(due_at) = &self.due_at {
            pairs.push(("next attempt", due_at.clone()));
        }
        lines(&pairs)
    }

    fn effects(&self) -> String {
        self.effects.map_or_else(
            || "unknown effects".to_owned(),
            |effects| counted(effects, "effect", "effects"),
        )
    }
}

/// A page of operations, a line each.
pub fn operations(items: &[Box<RawValue>]) -> Result<String, Failure> {
    let mut table = Table::with_header(&[
        "CREATED",
        "STATE",
        "KIND",
        "DELIVERIES",
        "ATTEMPTS",
        "EFFECTS",
        "OPERATION",
    ]);
    for item in items {
        let operation: Operation<'_> = serde_json::from_str(item.get())
            .map_err(|_| Failure::other("the service listed something that is no operation; is it a later release?"))?;
        table.row([
            &operation.created_at,
            &operation.state,
            &operation.kind,
            &operation.deliveries.to_string(),
            &operation.attempts.to_string(),
            &operation.effects(),
            &operation.operation_id,
        ]);
    }
    Ok(table.render())
}

/// Longest evidence that is shown in a line, in characters; all of it is in the JSON.
const SHOWN_EVIDENCE: usize = 200;

/// What happened, a line each. Reason and evidence stand last, where their length moves no other column.
pub fn history(history: &[Event<'_>]) -> String {
    let mut table = Table::with_header(&["AT", "EVENT", "STATE", "ATTEMPT", "ACTOR", "REASON AND EVIDENCE"]);
    for event in history {
        table.row([
            &event.at,
            &event.event,
            &event.state,
            &event.attempt.to_string(),
            &event.actor,
            &event.why(),
        ]);
    }
    table.render()
}

impl Event<'_> {
    /// What happened and why, without evidence.
    pub fn in_words(&self) -> String {
        match &self.reason {
            Some(reason) => format!("{}: {reason}", self.event),
            None => self.event.clone(),
        }
    }

    fn why(&self) -> String {
        let evidence = self.evidence.map(|evidence| shortened(evidence.get()));
        let parts: Vec<&str> = self.reason.as_deref().into_iter().chain(evidence.as_deref()).collect();
        or_none(Some(parts.join("  ").as_str()).filter(|text| !text.is_empty()))
    }
}

fn shortened(evidence: &str) -> String {
    match evidence.char_indices().nth(SHOWN_EVIDENCE) {
        Some((end, _)) => format!("{}… ({} bytes, all with --json)", &evidence[..end], evidence.len()),
        None => evidence.to_owned(),
    }
}

pub fn lines(pairs: &[(&str, String)]) -> String {
    let mut table = Table::default();
    for (name, value) in pairs {
        table.row([name, value.as_str()]);
    }
    table.render()
}

fn or_none(text: Option<&str>) -> String {
    text.unwrap_or("–").to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_receipt_shows_the_result_digit_for_digit_and_inert() {
        let body = "{\"operation_id\":\"a\",\"kind\":\"k\",\"state\":\"succeeded\",\"fingerprint\":\"v1:0\",\"attempt\":1,\
            \"result\":{\"n\":12233344445555567,\"d\":0.1000,\"s\":\"\u{9b}31m\"},\"settled_at\":\"2026-01-01T00:00:00.000000Z\"}";
        let receipt: Receipt<'_> = serde_json::from_str(body).unwrap();
        let text = receipt.render(true);
        assert!(
            text.contains(r#"{"n":12233344445555567,"d":0.1000,"s":"\u{9b}31m"}"#),
            "{text}"
        );
        assert!(text.contains("replayed"));
    }

    #[test]
    fn long_evidence_is_cut_short_and_says_so() {
        let body = format!(
            r#"[{{"at":"t","event":"resolved","state":"succeeded","actor":"key:k","attempt":1,
            "reason":"seen","evidence":{{"page":"{}"}}}}]"#,
            "ü".repeat(5_000)
        );
        let text = history(&serde_json::from_str::<Vec<Event<'_>>>(&body).unwrap());
        assert!(
            text.chars().count() < 500 && text.contains("… (10011 bytes, all with --json)"),
            "{text}"
        );
    }

    #[test]
    fn history_shows_each_event_in_one_inert_line() {
        let body = r#"[{"at":"t","event":"failed","state":"failed","actor":"key:k","attempt":1,
            "reason":"no\nmoney\u001b[2J","evidence":{"sqlstate":"OL001"},"more":1}]"#;
        let text = history(&serde_json::from_str::<Vec<Event<'_>>>(body).unwrap());
        assert_eq!(text.lines().count(), 2);
        assert!(
            text.contains(r"no\u{a}money\u{1b}[2J") && text.contains(r#"{"sqlstate":"OL001"}"#),
            "{text}"
        );
    }
}
