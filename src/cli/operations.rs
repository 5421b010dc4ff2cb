//! `opledger operations`: submit, read, list, execute, cancel and settle from a shell.
//!
//! Payloads go out as the text that was given, and answers come back as the bytes that were sent: no number is read
//! and written again on the way.

mod decide;
mod delivered;
pub mod show;
mod submit;
pub mod unknown;

use std::process::ExitCode;
use std::time::Duration;

use clap::{Args, Subcommand, ValueEnum};
use http::{HeaderValue, Method};
use serde::Deserialize;
use serde::de::IgnoredAny;
use serde_json::value::RawValue;

use super::client::answer::Answer;
use super::client::retry::RetryArgs;
use super::client::{Client, Request, TimeArgs};
use super::exit::{self, Exit, Failure};
use super::output;
use super::pages::{List, PageArgs};
use crate::config::ClientArgs;
use crate::ledger::operation_id::OperationId;
use decide::{CompensateArgs, ResolveArgs};
use delivered::settled;
use show::Operation;

const EXAMPLES: &str = "\
Examples:
  export OPLEDGER_URL=http://127.0.0.1:8080 OPLEDGER_API_KEY_FILE=agent.key

  opledger operations submit --kind order.refund --id acme:order-1001:refund:rev-1 \\
      --payload '{\"order_id\":\"1001\",\"amount\":500}'
  opledger operations get acme:order-1001:refund:rev-1
  opledger operations receipt acme:order-1001:refund:rev-1 > receipt.json
  opledger operations list --state failed --all --json
  opledger operations resolve acme:order-1001:refund:rev-1 --verdict succeeded --reason 'refund re_31 is there'

The id names the business intent, never a try: run the same command again after any trouble, with the same id.
A positional id that begins with - goes after --.";

/// Submit, read, list and settle operations
#[derive(Debug, Subcommand)]
#[command(after_help = format!("{EXAMPLES}\n\n{}", exit::HELP))]
pub enum Command {
    /// Submit one business intent: it takes effect once, however often this is run
    Submit(submit::Args),
    /// Show an operation
    Get(OneArgs),
    /// List operations, newest first or oldest first
    List(ListArgs),
    /// Write the receipt to stdout, byte for byte
    Receipt(ReceiptArgs),
    /// Show what happened to an operation, oldest first
    History(OneArgs),
    /// Run a planned operation
    Execute(ExecuteArgs),
    /// Withdraw an operation that has not begun
    Cancel(OneArgs),
    /// Say how an operation ended whose outcome is unknown
    Resolve(ResolveArgs),
    /// Undo a succeeded operation by its declared reversal
    Compensate(CompensateArgs),
}

/// One operation.
#[derive(Debug, Args)]
#[command(after_help = exit::HELP)]
pub struct OneArgs {
    /// The operation's id
    id: OperationId,
    #[command(flatten)]
    client: ClientArgs,
    #[command(flatten)]
    time: TimeArgs,
}

#[derive(Debug, Args)]
#[command(after_help = exit::HELP)]
pub struct ReceiptArgs {
    #[command(flatten)]
    one: OneArgs,
    /// Write the answer's status and headers to stderr
    #[arg(long)]
    headers: bool,
    /// Write nothing if the receipt still has this entity tag, e.g. '"0d6c…"'
    #[arg(long, value_name = "TAG")]
    if_none_match: Option<HeaderValue>,
}

#[derive(Debug, Args)]
#[command(after_help = exit::HELP)]
pub struct ExecuteArgs {
    #[command(flatten)]
    one: OneArgs,
    #[command(flatten)]
    prefer: PreferArgs,
    #[command(flatten)]
    retry: RetryArgs,
}

/// How long the service should wait.
#[derive(Debug, Clone, Args)]
pub struct PreferArgs {
    /// Let the service wait up to this long for an operation that is being run
    #[arg(long, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=60))]
    wait: Option<u64>,
    /// Be content with 202: accepted, not settled (exit code 0)
    #[arg(long = "async")]
    respond_async: bool,
    /// W3C trace context to send along
    #[arg(long, value_name = "TRACEPARENT")]
    traceparent: Option<HeaderValue>,
}

#[derive(Debug, Args)]
#[command(after_help = exit::HELP)]
pub struct ListArgs {
    /// Only operations in this state, e.g. failed
    #[arg(long)]
    state: Option<String>,
    /// Only operations of this kind
    #[arg(long)]
    kind: Option<String>,
    /// Only operations that this run of an engine asked for
    #[arg(long)]
    run_id: Option<String>,
    /// Only operations with this fingerprint
    #[arg(long)]
    fingerprint: Option<String>,
    /// Only operations with this reference of the caller's
    #[arg(long)]
    external_reference: Option<String>,
    /// Only operations created at this time or later, e.g. 2026-03-01T00:00:00Z
    #[arg(long, value_name = "TIME")]
    since: Option<String>,
    /// Only operations created before this time
    #[arg(long, value_name = "TIME")]
    until: Option<String>,
    /// Which come first
    #[arg(long, value_enum)]
    order: Option<Order>,
    #[command(flatten)]
    page: PageArgs,
    #[command(flatten)]
    client: ClientArgs,
    #[command(flatten)]
    time: TimeArgs,
}

/// By creation.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Order {
    Newest,
    Oldest,
}

impl Order {
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Newest => "newest",
            Self::Oldest => "oldest",
        }
    }
}

/// Runs one of the commands; failures are shown here, so that `--json` holds for them too.
pub async fn run(command: Command) -> anyhow::Result<ExitCode> {
    let json = command.json();
    let ended = match command {
        Command::Submit(args) => submit::run(args).await,
        Command::Get(args) => get(args).await,
        Command::List(args) => list(args).await,
        Command::Receipt(args) => receipt(args).await,
        Command::History(args) => history(args).await,
        Command::Execute(args) => execute(args).await,
        Command::Cancel(args) => cancel(args).await,
        Command::Resolve(args) => decide::resolve(args).await,
        Command::Compensate(args) => decide::compensate(args).await,
    };
    Ok(ended.unwrap_or_else(|failure| output::failed(&failure, json)).into())
}

impl Command {
    fn json(&self) -> bool {
        match self {
            Self::Submit(args) => args.client.json,
            Self::Get(args) | Self::History(args) | Self::Cancel(args) => args.client.json,
            Self::List(args) => args.client.json,
            Self::Receipt(ReceiptArgs { one, .. }) | Self::Execute(ExecuteArgs { one, .. }) => one.client.json,
            Self::Resolve(args) => args.one.client.json,
            Self::Compensate(args) => args.one.client.json,
        }
    }
}

async fn get(args: OneArgs) -> Result<Exit, Failure> {
    let answer = args.send(Method::GET, "").await?;
    operation(&answer, args.client.json)
}

async fn cancel(args: OneArgs) -> Result<Exit, Failure> {
    let answer = args.send(Method::POST, "/cancel").await?;
    operation(&answer, args.client.json)
}

/// Shows the operation in the answer.
fn operation(answer: &Answer, json: bool) -> Result<Exit, Failure> {
    if !answer.status.is_success() {
        return output::refused(answer, json);
    }
    let operation: Operation<'_> = answer.parsed()?;
    if json {
        output::print_json(&answer.body)?
    } else {
        output::print(operation.render())?
    }
    Ok(Exit::Done)
}

async fn history(args: OneArgs) -> Result<Exit, Failure> {
    #[derive(Deserialize)]
    struct History<'a> {
        #[serde(borrow)]
        history: &'a RawValue,
    }
    let answer = args.send(Method::GET, "").await?;
    if !answer.status.is_success() {
        return output::refused(&answer, args.client.json);
    }
    let History { history } = answer.parsed()?;
    if args.client.json {
        output::print_json(history.get().as_bytes())?;
    } else {
        let operation: Operation<'_> = answer.parsed()?;
        output::print(show::history(&operation.history))?;
    }
    Ok(Exit::Done)
}

async fn receipt(args: ReceiptArgs) -> Result<Exit, Failure> {
    let (client, one) = (Client::new(&args.one.client)?, &args.one);
    let mut request = Request::new(Method::GET, format!("{}/receipt", one.id.url()), one.time.timeout());
    if let Some(tag) = args.if_none_match {
        request = request.header("if-none-match", tag);
    }
    let answer = client.send(&request).await?;
    if args.headers {
        output::say_headers(&answer);
    }
    // Only receipts have an entity tag: other answers say why there is none.
    if answer.header("etag").is_none() {
        return settled(&answer, one.client.json, false);
    }
    if answer.status == http::StatusCode::NOT_MODIFIED {
        output::say("the receipt is the one that you have");
        if one.client.json {
            output::print_json(b"null")?;
        }
        return Ok(Exit::Done);
    }
    if !one.client.json {
        output::print_exact(&answer.body)?
    } else if serde_json::from_slice::<IgnoredAny>(&answer.body).is_ok() {
        output::print_json(&answer.body)?
    } else {
        output::print_document(&delivered::Document::of(&answer))?
    }
    if answer.is_downstreams() {
        return Ok(answer.settlement());
    }
    match answer.problem().filter(|_| !answer.status.is_success()) {
        Some(problem) => {
            output::say(&problem.reason());
            Ok(Exit::of_problem(answer.status.as_u16(), Some(&problem.code)))
        }
        None => Ok(Exit::of_problem(answer.status.as_u16(), None)),
    }
}

async fn execute(args: ExecuteArgs) -> Result<Exit, Failure> {
    let (client, one) = (Client::new(&args.one.client)?, &args.one);
    let request = Request::new(
        Method::POST,
        format!("{}/execute", one.id.url()),
        args.prefer.timeout(one.time),
    );
    let request = args.prefer.on(request);
    let answer = client.send_again(&request, args.retry.retries).await?;
    settled(&answer, one.client.json, args.prefer.respond_async)
}

async fn list(args: ListArgs) -> Result<Exit, Failure> {
    let client = Client::new(&args.client)?;
    let order = args.order.map(|order| order.as_str().to_owned());
    let filters = [
        ("state", &args.state),
        ("kind", &args.kind),
        ("run_id", &args.run_id),
        ("fingerprint", &args.fingerprint),
        ("external_reference", &args.external_reference),
        ("since", &args.since),
        ("until", &args.until),
        ("order", &order),
    ];
    let list = List {
        path: "/v1/operations",
        items: "operations",
        filters: filters
            .into_iter()
            .filter_map(|(name, value)| Some((name, value.clone()?)))
            .collect(),
        page: args.page,
        timeout: args.time.timeout(),
    };
    list.show(&client, args.client.json, show::operations).await
}

impl OneArgs {
    /// Asks for something of this operation, without sending again.
    async fn send(&self, method: Method, verb: &str) -> Result<Answer, Failure> {
        let client = Client::new(&self.client)?;
        let path = format!("{}{verb}", self.id.url());
        Ok(client.send(&Request::new(method, path, self.time.timeout())).await?)
    }
}

impl PreferArgs {
    /// Adds what was chosen to a request.
    fn on(&self, mut request: Request) -> Request {
        let wait = self.wait.map(|seconds| format!("wait={seconds}"));
        let preferences: Vec<String> = self
            .respond_async
            .then(|| "respond-async".to_owned())
            .into_iter()
            .chain(wait)
            .collect();
        if let Ok(preferences) = HeaderValue::try_from(preferences.join(", "))
            && !preferences.is_empty()
        {
            request = request.header("prefer", preferences);
        }
        match &self.traceparent {
            Some(parent) => request.header("traceparent", parent.clone()),
            None => request,
        }
    }

    /// The service may use its time before ours begins.
    fn timeout(&self, time: TimeArgs) -> Duration {
        time.timeout() + Duration::from_secs(self.wait.unwrap_or(0))
    }
}
