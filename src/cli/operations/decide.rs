//! `opledger operations resolve` and `compensate`: a named person's decision, about the version that the person saw.
//!
//! Without `--version` the operation is read and shown first, and the version that was shown is the one that is sent: a
//! decision never meets an operation that has changed since. Nothing is sent twice by itself.

use std::io::{self, BufRead, IsTerminal, Write as _};
use std::path::Path;

use clap::ValueEnum;
use http::Method;
use serde::Serialize;
use serde_json::value::RawValue;

use super::show::{self, Operation};
use super::unknown::shell;
use super::{OneArgs, operation};
use crate::cli::client::answer::Answer;
use crate::cli::client::{Client, Request};
use crate::cli::exit::{self, Exit, Failure};
use crate::cli::output;
use crate::ledger::operation::StateName;

/// How much of the history is shown before a decision.
const LAST: usize = 5;

const EXAMPLES: &str = "\
Examples:
  opledger operations resolve acme:order-1001:refund:rev-1 --verdict succeeded \\
      --reason 'refund re_31 is there' --external-reference re_31 \\
      --answer-status 200 --answer-body @refund.json
  opledger operations resolve acme:order-1001:refund:rev-1 --verdict not-executed --version 4 \\
      --reason 'support of the bank: nothing arrived'

Without --version the operation is shown first, and you are asked. A script names the version that it has seen.";

#[derive(Debug, clap::Args)]
#[command(after_help = format!("{EXAMPLES}\n\n{}", exit::HELP))]
pub struct ResolveArgs {
    #[command(flatten)]
    pub one: OneArgs,
    /// What has been found out
    #[arg(long, value_enum)]
    verdict: Verdict,
    #[command(flatten)]
    decision: DecisionArgs,
    /// With succeeded: where the downstream names what was made, e.g. its id there
    #[arg(long, value_name = "TEXT")]
    external_reference: Option<String>,
    /// How it is known, as JSON, kept in the history; @FILE reads a file
    #[arg(long, value_name = "JSON", allow_hyphen_values = true)]
    evidence: Option<String>,
    /// With succeeded: the status of the downstream's own answer, which callers get from now on
    #[arg(long, value_name = "STATUS", value_parser = clap::value_parser!(u16).range(200..=599))]
    answer_status: Option<u16>,
    /// The answer's body, as JSON; @FILE reads a file
    #[arg(long, value_name = "JSON", requires = "answer_status", allow_hyphen_values = true)]
    answer_body: Option<String>,
    /// The answer's body, if it is no JSON; @FILE reads a file
    #[arg(
        long,
        value_name = "TEXT",
        requires = "answer_status",
        conflicts_with = "answer_body"
    )]
    answer_text: Option<String>,
    /// One of the answer's header lines, 'name: value'; may be given several times
    #[arg(long, value_name = "LINE", requires = "answer_status", value_parser = header_line)]
    answer_header: Vec<(String, String)>,
}

#[derive(Debug, clap::Args)]
#[command(after_help = exit::HELP)]
pub struct CompensateArgs {
    #[command(flatten)]
    pub one: OneArgs,
    #[command(flatten)]
    decision: DecisionArgs,
}

/// Who decides is the API key's; why and about what is said here.
#[derive(Debug, clap::Args)]
struct DecisionArgs {
    /// How you know; kept in the history
    #[arg(long, value_name = "TEXT")]
    reason: String,
    /// The version that you have seen; without it the operation is shown, and you are asked
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(i32).range(1..))]
    version: Option<i32>,
    /// Do not ask
    #[arg(long)]
    yes: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Verdict {
    /// It acted: callers get its answer
    Succeeded,
    /// It did not act: a new attempt is made
    NotExecuted,
    /// It did not act, and will not be tried again
    Failed,
    /// It may have acted: its declared reversal is sent
    Compensate,
}

/// What is to be decided.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Decision {
    Resolve(Verdict),
    Compensate,
}

/// The members of both requests.
#[derive(Serialize)]
struct Body<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    verdict: Option<&'static str>,
    version: i32,
    reason: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    external_reference: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    evidence: Option<&'a RawValue>,
    #[serde(skip_serializing_if = "Option::is_none")]
    answer: Option<Given<'a>>,
}

/// The downstream's answer as a person has found it. JSON goes as its text, too: it is kept as the downstream wrote it, with
/// numbers that no double holds.
#[derive(Serialize)]
struct Given<'a> {
    status: u16,
    #[serde(skip_serializing_if = "<[_]>::is_empty")]
    headers: &'a [(String, String)],
    #[serde(skip_serializing_if = "Option::is_none")]
    text: Option<&'a str>,
}

pub async fn resolve(args: ResolveArgs) -> Result<Exit, Failure> {
    let given = args.answer_status.is_some() || args.external_reference.is_some();
    if given && args.verdict != Verdict::Succeeded {
        return Err(usage(
            "an answer and an external reference belong to --verdict succeeded only",
        ));
    }
    // Read before anybody is asked, or anything is sent.
    let evidence = json("--evidence", args.evidence.as_deref())?;
    let body = json("--answer-body", args.answer_body.as_deref())?;
    let text = args
        .answer_text
        .as_deref()
        .map(|text| contents("--answer-text", text))
        .transpose()?;
    let mut headers = args.answer_header;
    if body.is_some() && !headers.iter().any(|(name, _)| name == "content-type") {
        headers.push(("content-type".to_owned(), "application/json".to_owned()));
    }
    let decision = Decision::Resolve(args.verdict);
    let compose = |version| Body {
        verdict: Some(args.verdict.as_str()),
        version,
        reason: &args.decision.reason,
        external_reference: args.external_reference.as_deref(),
        evidence: evidence.as_deref(),
        answer: args.answer_status.map(|status| Given {
            status,
            headers: &headers,
            text: body.as_deref().map(RawValue::get).or(text.as_deref()),
        }),
    };
    decide(&args.one, &args.decision, decision, compose).await
}

pub async fn compensate(args: CompensateArgs) -> Result<Exit, Failure> {
    let compose = |version| Body {
        verdict: None,
        version,
        reason: &args.decision.reason,
        external_reference: None,
        evidence: None,
        answer: None,
    };
    decide(&args.one, &args.decision, Decision::Compensate, compose).await
}

async fn decide<'a>(
    one: &OneArgs,
    args: &DecisionArgs,
    decision: Decision,
    compose: impl FnOnce(i32) -> Body<'a>,
) -> Result<Exit, Failure> {
    let client = Client::new(&one.client)?;
    let version = match args.version {
        Some(version) => version,
        None => {
            let read = client
                .send(&Request::new(Method::GET, one.id.url(), one.time.timeout()))
                .await?;
            if !read.status.is_success() {
                return output::refused(&read, one.client.json);
            }
            seen(&read.parsed()?, decision, args.yes)?
        }
    };
    let body = serde_json::to_vec(&compose(version))
        .map_err(|error| Failure::other(format!("cannot compose the request: {error}")))?;
    let path = format!("{}/{}", one.id.url(), decision.verb());
    let request = Request::new(Method::POST, path, one.time.timeout()).body(body);
    let answer = client.send(&request).await.map_err(|error| {
        let mut failure = Failure::from(error);
        if failure.code == "no-answer" {
            let id = shell(one.id.as_str());
            failure.detail.push_str(&format!(
                "\n  look: opledger operations get {id}\n  the same command with --version {version} decides once, however often it is run"
            ));
        }
        failure
    })?;
    if !answer.status.is_success() {
        let exit = output::refused(&answer, one.client.json)?;
        output::say(&next_step(&client, one, &answer, decision, version).await);
        return Ok(exit);
    }
    output::say(decision.done());
    operation(&answer, one.client.json)
}

/// Shows what is known and what will follow; the version that was shown, once the decision is confirmed.
fn seen(operation: &Operation<'_>, decision: Decision, yes: bool) -> Result<i32, Failure> {
    if operation.state != decision.needs().as_str() {
        return Err(Failure {
            exit: Exit::Over,
            code: "state-conflict",
            detail: format!(
                "the operation is {}; only one that is {} can be decided so, and nothing was sent",
                operation.state,
                decision.needs().as_str()
            ),
            retryable: false,
        });
    }
    let mut text = operation.render();
    text.push('\n');
    text.push_str(&show::history(
        operation
            .history
            .get(operation.history.len().saturating_sub(LAST)..)
            .unwrap_or_default(),
    ));
    text.push_str(&format!("\n{}", decision.follows(operation)));
    output::show_aside(&text);
    if !yes {
        confirmed()?;
    }
    Ok(operation.version)
}

fn confirmed() -> Result<(), Failure> {
    if !io::stdin().is_terminal() || !io::stderr().is_terminal() {
        return Err(usage(
            "nobody can be asked here, and nothing was sent: give --version with the version that was seen, or --yes",
        ));
    }
    eprint!("Decide so? Type yes: ");
    let _ = io::stderr().flush();
    let mut line = String::new();
    let read = io::stdin().lock().read_line(&mut line);
    if read.is_ok() && line.trim() == "yes" {
        return Ok(());
    }
    Err(Failure {
        exit: Exit::Other,
        code: "not-confirmed",
        detail: "not confirmed; nothing was sent".to_owned(),
        retryable: false,
    })
}

/// What to do after a decision was refused.
async fn next_step(client: &Client, one: &OneArgs, answer: &Answer, decision: Decision, version: i32) -> String {
    let id = shell(one.id.as_str());
    let code = answer.problem().map(|problem| problem.code).unwrap_or_default();
    match (code.as_str(), answer.status.as_u16()) {
        ("resolution-too-early", _) => format!(
            "next: run it again with --version {version} in {} s, or decide otherwise",
            answer.retry_after().map_or(1, |wait| wait.as_secs().max(1))
        ),
        ("state-conflict", _) => {
            let read = client
                .send(&Request::new(Method::GET, one.id.url(), one.time.timeout()))
                .await;
            match read.ok().as_ref().and_then(|read| read.parsed::<Operation<'_>>().ok()) {
                Some(now) if now.version == version && now.state == decision.needs().as_str() => decision.instead(&id),
                Some(now) if now.state == decision.needs().as_str() => format!(
                    "next: look at what has changed, opledger operations history {id}, and decide about --version {}",
                    now.version
                ),
                Some(now) => format!("next: it is {} now; see opledger operations history {id}", now.state),
                None => format!("next: look at it again, opledger operations get {id}"),
            }
        }
        (_, 401 | 403) => "next: use the API key of an operator whose kinds cover this operation".to_owned(),
        (_, 404) => "next: check the id, and that the key is of the same tenant".to_owned(),
        (_, 429 | 502 | 503) => format!("next: nothing was decided; run it again later with --version {version}"),
        (_, _) => format!("next: nothing was decided; see opledger operations get {id}"),
    }
}

impl Verdict {
    fn as_str(self) -> &'static str {
        match self {
            Self::Succeeded => "succeeded",
            Self::NotExecuted => "not-executed",
            Self::Failed => "failed",
            Self::Compensate => "compensate",
        }
    }
}

impl Decision {
    fn verb(self) -> &'static str {
        match self {
            Self::Resolve(_) => "resolve",
            Self::Compensate => "compensate",
        }
    }

    /// The state in which it can be taken.
    fn needs(self) -> StateName {
        match self {
            Self::Resolve(_) => StateName::NeedsReconciliation,
            Self::Compensate => StateName::Succeeded,
        }
    }

    /// What it will do, in words.
    fn follows(self, operation: &Operation<'_>) -> String {
        let what = match self {
            Self::Resolve(Verdict::Succeeded) => {
                "succeeded: nothing is sent; callers are told from now on that it succeeded, with the answer that you give, \
                 or with a receipt that says that a person decided"
                    .to_owned()
            }
            Self::Resolve(Verdict::NotExecuted) => format!(
                "not-executed: the same request is SENT AGAIN, as attempt {}; if it did act after all, it acts twice",
                operation.attempts + 1
            ),
            Self::Resolve(Verdict::Failed) => {
                "failed: nothing is sent; callers are told from now on that it had no effect, and the id is spent".to_owned()
            }
            Self::Resolve(Verdict::Compensate) => {
                "compensate: its declared reversal is SENT, as an operation of its own; once it has succeeded, \
                 callers are told that there is no effect"
                    .to_owned()
            }
            Self::Compensate => {
                "compensate: its declared reversal is SENT, as an operation of its own; callers go on getting their receipt"
                    .to_owned()
            }
        };
        let recovery = match &operation.due_at {
            Some(due_at) if operation.is_unknown() => {
                format!("recovery would go on by itself at {due_at}; this takes it out of its hands\n")
            }
            Some(_) | None => String::new(),
        };
        format!("{recovery}{what}\n")
    }

    fn done(self) -> &'static str {
        match self {
            Self::Resolve(Verdict::Succeeded | Verdict::Failed) => "decided; callers get this from now on",
            Self::Resolve(Verdict::NotExecuted) => "decided; it is being sent again",
            Self::Resolve(Verdict::Compensate) | Self::Compensate => {
                "decided; its reversal, linked below, is an operation of its own: look at it too"
            }
        }
    }

    /// What else can be done where it cannot be done so.
    fn instead(self, id: &str) -> String {
        match self {
            Self::Resolve(Verdict::Compensate) => format!(
                "next: undo it where it was done, then opledger operations resolve --verdict failed --reason '…' {id}; or declare \
                 compensation for its route and reload the service (SIGHUP)"
            ),
            Self::Compensate => "next: undo it where it was done, by hand or by an operation of its own; or declare \
                                 compensation for its route and reload the service (SIGHUP)"
                .to_owned(),
            Self::Resolve(Verdict::Succeeded | Verdict::NotExecuted | Verdict::Failed) => {
                format!("next: it has not changed; choose another verdict, opledger operations history {id}")
            }
        }
    }
}

fn usage(detail: &str) -> Failure {
    Failure {
        exit: Exit::Usage,
        code: "usage",
        detail: detail.to_owned(),
        retryable: false,
    }
}

/// One JSON value, its digits as they were given.
fn json(flag: &str, given: Option<&str>) -> Result<Option<Box<RawValue>>, Failure> {
    let Some(given) = given else { return Ok(None) };
    let text = contents(flag, given)?;
    let value: &RawValue = serde_json::from_str(&text)
        .map_err(|error| Failure::refused("request-invalid", format!("{flag} is not one JSON value: {error}")))?;
    Ok(Some(value.to_owned()))
}

/// The text, or with `@` that of a file.
fn contents(flag: &str, given: &str) -> Result<String, Failure> {
    let Some(path) = given.strip_prefix('@') else {
        return Ok(given.to_owned());
    };
    std::fs::read_to_string(Path::new(path))
        .map_err(|error| Failure::other(format!("{flag}: cannot read {path}: {error}")))
}

fn header_line(line: &str) -> Result<(String, String), String> {
    let (name, value) = line.split_once(':').ok_or("write a header line as 'name: value'")?;
    Ok((name.trim().to_ascii_lowercase(), value.trim().to_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_given_goes_out_digit_for_digit() {
        let evidence = json("--evidence", Some(r#"{"n": 12233344445555567, "d":0.1000}"#)).unwrap();
        let headers = [header_line("Content-Type:  application/json").unwrap()];
        let body = Body {
            verdict: Some("succeeded"),
            version: 3,
            reason: "seen",
            external_reference: None,
            evidence: evidence.as_deref(),
            answer: Some(Given {
                status: 201,
                headers: &headers,
                text: Some("ok"),
            }),
        };
        assert_eq!(
            serde_json::to_string(&body).unwrap(),
            r#"{"verdict":"succeeded","version":3,"reason":"seen","evidence":{"n": 12233344445555567, "d":0.1000},"answer":{"status":201,"headers":[["content-type","application/json"]],"text":"ok"}}"#
        );
    }

    #[test]
    fn what_is_no_json_is_refused_before_anything_is_sent() {
        for bad in ["", "{", "1 2", "{'a':1}", "1},\"verdict\":\"failed\""] {
            assert_eq!(json("--evidence", Some(bad)).unwrap_err().exit, Exit::Refused, "{bad}");
        }
        assert_eq!(json("--evidence", Some("@/nonexistent")).unwrap_err().exit, Exit::Other);
        assert!(header_line("no colon").is_err());
    }
}
