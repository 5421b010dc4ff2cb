//! `opledger unknowns`: the queue of those who settle what nobody knows, oldest first.
//!
//! The list says which operations; what happened to each is in its history, which is read one by one. Ages are by the
//! service's clock, as its answers tell it.

use std::process::ExitCode;
use std::time::Duration;

use http::Method;
use serde::Serialize;
use serde_json::value::RawValue;
use time::OffsetDateTime;
use time::format_description::well_known::Rfc3339;

use super::client::answer::Answer;
use super::client::{Client, Request, TimeArgs};
use super::exit::{self, Exit, Failure};
use super::operations::Order;
use super::operations::show::{Event, Operation};
use super::operations::unknown::Advice;
use super::output::{self, inert};
use super::pages::{self, List, Listed, PageArgs};
use crate::config::ClientArgs;
use crate::ledger::operation::StateName;
use crate::ledger::operation_id::OperationId;

const EXAMPLES: &str = "\
Examples:
  opledger unknowns
  opledger unknowns --all --json | jq -r '.operations[] | select(.due_at == null) | .operation_id'

An operation is here while its downstream may have acted and nothing has proved it. What recovery goes on with by
itself is here too, with the time of its next look.";

#[derive(Debug, clap::Args)]
#[command(after_help = format!("{EXAMPLES}\n\n{}", exit::HELP))]
pub struct Args {
    #[command(flatten)]
    page: PageArgs,
    #[command(flatten)]
    client: ClientArgs,
    #[command(flatten)]
    time: TimeArgs,
}

/// One of them, for scripts.
#[derive(Debug, Serialize)]
struct Unknown {
    operation_id: String,
    kind: String,
    target: String,
    version: i32,
    attempts: i64,
    created_at: String,
    unknown_since: Option<String>,
    age_seconds: Option<i64>,
    due_at: Option<String>,
    /// Its key at the downstream, where that takes one.
    downstream_key: Option<String>,
    last: Option<Last>,
    to_do: Advice,
    #[serde(skip)]
    recovery: String,
}

#[derive(Debug, Serialize)]
struct Last {
    at: String,
    event: String,
    reason: Option<String>,
    #[serde(skip)]
    in_words: String,
}

#[derive(Serialize)]
struct Page<'a> {
    operations: &'a [Unknown],
    next_cursor: Option<&'a str>,
}

pub async fn run(args: Args) -> anyhow::Result<ExitCode> {
    let json = args.client.json;
    let ended = show(args).await;
    Ok(ended.unwrap_or_else(|failure| output::failed(&failure, json)).into())
}

async fn show(args: Args) -> Result<Exit, Failure> {
    let (client, json, timeout) = (Client::new(&args.client)?, args.client.json, args.time.timeout());
    let list = List {
        path: "/v1/operations",
        items: "operations",
        filters: vec![
            ("state", StateName::NeedsReconciliation.as_str().to_owned()),
            ("order", Order::Oldest.as_str().to_owned()),
        ],
        page: args.page,
        timeout,
    };
    let (items, next_cursor) = match list.fetch(&client).await? {
        Listed::Refused(answer) => return output::refused(&answer, json),
        Listed::Found { items, next_cursor } => (items, next_cursor),
    };
    let mut unknowns = Vec::with_capacity(items.len());
    for item in &items {
        let answer = read(&client, item, timeout).await?;
        if !answer.status.is_success() {
            return output::refused(&answer, json);
        }
        let operation: Operation<'_> = answer.parsed()?;
        // Settled since it was listed.
        if operation.is_unknown() {
            unknowns.push(Unknown::of(&operation, now(&answer)));
        }
    }
    if json {
        output::print_document(&Page {
            operations: &unknowns,
            next_cursor: next_cursor.as_deref(),
        })?;
        return Ok(Exit::Done);
    }
    if unknowns.is_empty() {
        output::say("nothing is unknown");
    }
    output::print(unknowns.iter().map(Unknown::render).collect::<Vec<_>>().join("\n"))?;
    pages::say_more(next_cursor.as_deref());
    Ok(Exit::Done)
}

/// The operation with its history.
async fn read(client: &Client, item: &RawValue, timeout: Duration) -> Result<Answer, Failure> {
    let foreign = || Failure::other("the service listed something that is no operation; is it a later release?");
    let listed: Operation<'_> = serde_json::from_str(item.get()).map_err(|_| foreign())?;
    let id = OperationId::parse(&listed.operation_id).map_err(|_| foreign())?;
    Ok(client.send(&Request::new(Method::GET, id.url(), timeout)).await?)
}

/// The time at which the service answered.
fn now(answer: &Answer) -> Option<OffsetDateTime> {
    let date = httpdate::parse_http_date(answer.header("date")?).ok()?;
    Some(date.into())
}

impl Unknown {
    fn of(operation: &Operation<'_>, now: Option<OffsetDateTime>) -> Self {
        let created_at = OffsetDateTime::parse(&operation.created_at, &Rfc3339).ok();
        let age = created_at
            .zip(now)
            .map(|(created_at, now)| (now - created_at).whole_seconds().max(0));
        Self {
            operation_id: operation.operation_id.clone(),
            kind: operation.kind.clone(),
            target: operation.target.clone(),
            version: operation.version,
            attempts: operation.attempts,
            created_at: operation.created_at.clone(),
            unknown_since: operation.unknown_since().map(str::to_owned),
            age_seconds: age,
            due_at: operation.due_at.clone(),
            downstream_key: operation.downstream_key.clone(),
            last: operation.last().map(Last::of),
            to_do: operation.advice(),
            recovery: operation.recovery(),
        }
    }

    /// A paragraph.
    fn render(&self) -> String {
        let age = self
            .age_seconds
            .map_or_else(|| format!("since {}", self.created_at), words);
        let mut text = format!("{}\n", inert(&self.operation_id));
        let mut line = |name: &str, value: &str| text.push_str(&format!("  {name:<9}  {}\n", inert(value)));
        line("what", &format!("{}: {}", self.kind, self.target));
        line(
            "age",
            &format!(
                "{age}, {}, version {}",
                output::counted(self.attempts, "attempt", "attempts"),
                self.version
            ),
        );
        if let Some(key) = &self.downstream_key {
            line("key there", key);
        }
        if let Some(last) = &self.last {
            line("last", &last.in_words);
        }
        line("recovery", &self.recovery);
        for step in &self.to_do.0 {
            line("to do", step);
        }
        text
    }
}

impl Last {
    fn of(event: &Event<'_>) -> Self {
        Self {
            at: event.at.clone(),
            event: event.event.clone(),
            reason: event.reason.clone(),
            in_words: event.in_words(),
        }
    }
}

/// Its two largest units.
fn words(seconds: i64) -> String {
    let (days, hours, minutes) = (seconds / 86_400, seconds / 3_600 % 24, seconds / 60 % 60);
    match (days, hours, minutes) {
        (0, 0, 0) => format!("{seconds} s"),
        (0, 0, _) => format!("{minutes} min {} s", seconds % 60),
        (0, _, _) => format!("{hours} h {minutes} min"),
        (_, _, _) => format!("{days} d {hours} h"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_is_shown_with_what_happened_and_what_to_do_and_nothing_of_it_acts() {
        let body = r#"{"operation_id":"a;b","kind":"charge","target":"POST pay/charges","state":"needs_reconciliation",
            "fingerprint":"v1:0","version":3,"run":null,"external_reference":null,"requested_by":"k","deliveries":1,
            "attempts":2,"effects":null,"created_at":"2026-01-01T00:00:00.000000Z","due_at":null,"settled_at":null,
            "receipt_expires_at":null,"receipt":null,"links":[],"history":[
            {"at":"t1","event":"claimed","state":"running","actor":"instance:i","attempt":1,"reason":null,"evidence":null},
            {"at":"t2","event":"outcome_unknown","state":"needs_reconciliation","actor":"instance:i","attempt":1,
             "reason":"head: closed\u001b[2J\nopledger","evidence":null},
            {"at":"t3","event":"left_to_people","state":"needs_reconciliation","actor":"instance:i","attempt":1,
             "reason":"cannot\u001b[2J be\nasked","evidence":null}]}"#;
        let now = OffsetDateTime::parse("2026-01-04T05:00:00Z", &Rfc3339).unwrap();
        let unknown = Unknown::of(&serde_json::from_str(body).unwrap(), Some(now));
        assert_eq!(unknown.unknown_since.as_deref(), Some("t2"));
        let text = unknown.render();
        assert!(
            text.starts_with(
                "a;b\n  what       charge: POST pay/charges\n  age        3 d 5 h, 2 attempts, version 3\n"
            ),
            "{text}"
        );
        assert!(text.contains(r"left_to_people: cannot\u{1b}[2J be\u{a}asked"), "{text}");
        assert!(
            text.contains("only a person can decide") && text.contains("--reason '…' 'a;b'"),
            "{text}"
        );
    }

    #[test]
    fn ages_are_read_at_a_glance() {
        for (seconds, text) in [
            (5, "5 s"),
            (125, "2 min 5 s"),
            (7_260, "2 h 1 min"),
            (200_000, "2 d 7 h"),
        ] {
            assert_eq!(words(seconds), text);
        }
    }
}
