//! `opledger operations submit`: the request, with the payload's text as it was given.

use std::io::Read as _;
use std::path::{Path, PathBuf};

use http::{HeaderValue, Method};
use serde::Serialize;
use serde_json::value::RawValue;

use super::PreferArgs;
use super::delivered::settled;
use crate::cli::client::retry::RetryArgs;
use crate::cli::client::{Client, Request, TimeArgs};
use crate::cli::exit::{self, Exit, Failure};
use crate::config::ClientArgs;
use crate::ledger::operation_id::OperationId;

#[derive(Debug, clap::Args)]
#[command(after_help = format!("{EXAMPLES}\n\n{}", exit::HELP))]
pub struct Args {
    /// The type of operation, e.g. order.refund
    #[arg(long)]
    kind: String,
    #[command(flatten)]
    payload: PayloadArgs,
    /// The operation's id: one per intended action, the same whenever it is tried again
    #[arg(long)]
    id: OperationId,
    /// A reference of your own to find the operation by
    #[arg(long, value_name = "TEXT")]
    external_reference: Option<String>,
    #[command(flatten)]
    run: RunArgs,
    /// Store the intent without running it; `execute` runs it
    #[arg(long)]
    plan: bool,
    #[command(flatten)]
    prefer: PreferArgs,
    #[command(flatten)]
    retry: RetryArgs,
    #[command(flatten)]
    pub client: ClientArgs,
    #[command(flatten)]
    time: TimeArgs,
}

/// Where the payload comes from.
#[derive(Debug, clap::Args)]
#[group(required = true, multiple = false)]
struct PayloadArgs {
    /// The payload as JSON; - reads stdin
    #[arg(long, value_name = "JSON", allow_hyphen_values = true)]
    payload: Option<String>,
    /// File that holds the payload; - reads stdin
    #[arg(long, value_name = "FILE")]
    payload_file: Option<PathBuf>,
}

/// Which engine asks, in which of its runs. Shown to people; never part of what makes two requests the same.
#[derive(Debug, Clone, Default, clap::Args, Serialize)]
struct RunArgs {
    /// The engine that asks, e.g. langgraph
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    engine: Option<String>,
    /// Its run
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    run_id: Option<String>,
    /// The step of the run
    #[arg(long)]
    #[serde(skip_serializing_if = "Option::is_none")]
    step: Option<String>,
    /// The engine's own count of its tries
    #[arg(long, value_name = "N")]
    #[serde(skip_serializing_if = "Option::is_none")]
    attempt: Option<u32>,
}

const EXAMPLES: &str = "\
Examples:
  opledger operations submit --kind order.refund --id acme:order-1001:refund:rev-1 \\
      --payload '{\"order_id\":\"1001\",\"amount\":500}'
  jq -c .refund order.json | opledger operations submit --kind order.refund \\
      --id acme:order-1001:refund:rev-1 --payload-file - --wait 30 --json";

pub async fn run(args: Args) -> Result<Exit, Failure> {
    let payload = args.payload.read()?;
    let body = compose(&args.kind, &payload, &args)?;
    let client = Client::new(&args.client)?;
    let request = Request::new(Method::POST, "/v1/operations", args.prefer.timeout(args.time))
        .header("idempotency-key", key_header(&args.id)?)
        .body(body);
    let answer = client.send_again(&args.prefer.on(request), args.retry.retries).await?;
    settled(&answer, args.client.json, args.plan || args.prefer.respond_async)
}

/// The request's body. The payload is checked to be one JSON value, so that no text of it becomes a member beside it, and
/// goes in as it is.
fn compose(kind: &str, payload: &str, args: &Args) -> Result<Vec<u8>, Failure> {
    #[derive(Serialize)]
    struct Submission<'a> {
        kind: &'a str,
        payload: &'a RawValue,
        #[serde(skip_serializing_if = "Option::is_none")]
        run: Option<&'a RunArgs>,
        #[serde(skip_serializing_if = "Option::is_none")]
        external_reference: Option<&'a str>,
        #[serde(skip_serializing_if = "Option::is_none")]
        mode: Option<&'static str>,
    }
    let payload: &RawValue = serde_json::from_str(payload)
        .map_err(|error| Failure::refused("payload-invalid", format!("the payload is not one JSON value: {error}")))?;
    let submission = Submission {
        kind,
        payload,
        run: Some(&args.run).filter(|run| run.is_given()),
        external_reference: args.external_reference.as_deref(),
        mode: args.plan.then_some("plan"),
    };
    serde_json::to_vec(&submission).map_err(|error| Failure::other(format!("cannot compose the request: {error}")))
}

/// The id as a string of RFC 8941, which keeps an id that itself begins with a quote apart from a quoted one.
fn key_header(id: &OperationId) -> Result<HeaderValue, Failure> {
    let quoted = format!("\"{}\"", id.as_str().replace('\\', "\\\\").replace('"', "\\\""));
    HeaderValue::try_from(quoted).map_err(|error| Failure::refused("key-invalid", error.to_string()))
}

impl PayloadArgs {
    fn read(&self) -> Result<String, Failure> {
        let stdin = Path::new("-");
        let bytes = match (&self.payload, &self.payload_file) {
            (Some(text), _) if text != "-" => return Ok(text.clone()),
            (None, Some(path)) if path != stdin => std::fs::read(path)
                .map_err(|error| Failure::other(format!("cannot read {}: {error}", path.display())))?,
            (Some(_), _) | (None, Some(_) | None) => {
                let mut bytes = Vec::new();
                std::io::stdin()
                    .read_to_end(&mut bytes)
                    .map_err(|error| Failure::other(format!("cannot read the payload from stdin: {error}")))?;
                bytes
            }
        };
        String::from_utf8(bytes).map_err(|_| Failure::refused("payload-invalid", "the payload is not UTF-8"))
    }
}

impl RunArgs {
    fn is_given(&self) -> bool {
        self.engine.is_some() || self.run_id.is_some() || self.step.is_some() || self.attempt.is_some()
    }
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(flatten)]
        args: Args,
    }

    fn composed(payload: &str, more: &[&str]) -> Result<String, Failure> {
        let line = ["submit", "--kind", "order.refund", "--id", "a", "--payload", payload]
            .into_iter()
            .chain(more.iter().copied());
        let args = Line::try_parse_from(line).unwrap().args;
        compose(&args.kind, &args.payload.read()?, &args).map(|body| String::from_utf8(body).unwrap())
    }

    #[test]
    fn the_payload_goes_out_as_it_was_given() {
        let payload = r#"{"n": 12233344445555567, "d" :0.1000,"e":1E2,"s":"\u0041é", "n":1}"#;
        let body = composed(payload, &[]).unwrap();
        assert_eq!(body, format!(r#"{{"kind":"order.refund","payload":{payload}}}"#));
        assert!(composed("-5", &[]).is_ok(), "a number below zero is no flag");
        assert!(
            composed(&("[".repeat(2_000) + &"]".repeat(2_000)), &[]).is_ok(),
            "how deep is the service's to say"
        );
    }

    #[test]
    fn no_payload_becomes_a_member_beside_itself() {
        for bad in [r#"1},"mode":"plan""#, "1 2", "", "{", "{'a':1}", "nul", "\u{feff}1"] {
            let refused = composed(bad, &[]).unwrap_err();
            assert_eq!(
                (refused.exit, refused.code),
                (Exit::Refused, "payload-invalid"),
                "{bad}"
            );
        }
    }

    #[test]
    fn members_are_sent_only_when_given() {
        let more = [
            "--engine",
            "dbos",
            "--attempt",
            "2",
            "--plan",
            "--external-reference",
            "x\"y",
        ];
        let body = composed("null", &more).unwrap();
        assert_eq!(
            body,
            r#"{"kind":"order.refund","payload":null,"run":{"engine":"dbos","attempt":2},"external_reference":"x\"y","mode":"plan"}"#
        );
    }

    #[test]
    fn an_id_is_given_and_not_empty() {
        let line = ["submit", "--kind", "k", "--payload", "1"];
        assert!(Line::try_parse_from(line).is_err());
        assert!(Line::try_parse_from(line.iter().chain(&["--id", ""])).is_err());
        assert!(Line::try_parse_from(line.iter().chain(&["--id", "a b"])).is_err());
        assert!(Line::try_parse_from(line.iter().chain(&["--id", "a", "--payload-file", "f"])).is_err());
    }

    #[test]
    fn the_key_header_is_read_back_as_the_id() {
        for id in ["a", "\"a\"", r"a\b", r#"""#, "a;b=c,d"] {
            let id = OperationId::parse(id).unwrap();
            let header = key_header(&id).unwrap();
            assert_eq!(OperationId::from_key_header(header.as_bytes()), Ok(id));
        }
    }
}
