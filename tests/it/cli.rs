//! The command line where people settle what nobody knows: against the real service, with a downstream that takes
//! requests and says nothing.

use std::process::Command;

use serde_json::Value;

use crate::support::downstream::{Downstream, Script};
use crate::support::process::{self, Finished};
use crate::support::terminal::Terminal;
use crate::support::{Ledger, Setup, until};

/// What the downstream of a test declares: nothing, nothing for long, a look-up that is far away, and a reversal.
fn config(downstream: &Downstream) -> String {
    format!(
        r#"
        [recovery]
        sweep = "300ms"
        [downstreams.pay]
        url = "http://{}"
        head_timeout = "200ms"
        idle_timeout = "200ms"
        replayed_headers = ["X-Charge"]
        [[downstreams.pay.routes]]
        path = "/charges"
        max_in_flight = "400ms"
        [[downstreams.pay.routes]]
        path = "/slow"
        max_in_flight = "10m"
        [[downstreams.pay.routes]]
        path = "/looked"
        idempotency = "lookup"
        look_up = {{ path = "/looked?ref={{operation_id}}", ours = {{ "/ref" = "{{operation_id}}" }} }}
        settle_delay = "1h"
        [[downstreams.pay.routes]]
        path = "/reversible"
        compensation = {{ method = "POST", path = "/reversals", headers = {{ X-Of = "{{operation_id}}" }} }}
        [kinds."pay.charge"]
        downstream = "pay"
        request = {{ method = "POST", path = "/charges", body = "" }}
        [kinds."pay.slow"]
        downstream = "pay"
        request = {{ method = "POST", path = "/slow", body = "" }}
        [kinds."pay.looked"]
        downstream = "pay"
        request = {{ method = "POST", path = "/looked", body = "" }}
        [kinds."pay.reversible"]
        downstream = "pay"
        request = {{ method = "POST", path = "/reversible", body = "" }}
        "#,
        downstream.address
    )
}

async fn start() -> (Downstream, Ledger) {
    let downstream = Downstream::start().await;
    downstream.answers(|_| Script::new().close());
    let setup = Setup {
        config: config(&downstream),
        ..Setup::default()
    };
    let ledger = Ledger::with(setup).await;
    (downstream, ledger)
}

/// A command with the key of a role.
fn prepared(ledger: &Ledger, role: &str, arguments: &[&str]) -> Command {
    let mut command = process::command(arguments, "");
    command
        .env("OPLEDGER_URL", format!("http://{}", ledger.running.address))
        .env("OPLEDGER_API_KEY", &ledger.keys[role]);
    command
}

async fn run(ledger: &Ledger, role: &str, arguments: &[&str]) -> Finished {
    process::ended(prepared(ledger, role, arguments)).await
}

async fn operator(ledger: &Ledger, arguments: &[&str]) -> Finished {
    run(ledger, "operator", arguments).await
}

async fn submit(ledger: &Ledger, kind: &str, id: &str, more: &[&str]) -> Finished {
    let mut arguments = vec![
        "operations",
        "submit",
        "--kind",
        kind,
        "--id",
        id,
        "--payload",
        r#"{"amount":5}"#,
    ];
    arguments.extend_from_slice(more);
    run(ledger, "agent", &arguments).await
}

/// An operation that its downstream took without a word.
async fn unknown(ledger: &Ledger, kind: &str, id: &str) {
    let end = submit(ledger, kind, id, &[]).await;
    assert_eq!(end.code, Some(8), "{end:?}");
    assert!(end.stderr.contains("outcome-unknown"), "{end:?}");
}

fn ends(end: &Finished, code: i32, stderr: &[&str]) {
    assert_eq!(end.code, Some(code), "{end:?}");
    for text in stderr {
        assert!(end.stderr.contains(text), "{text:?} is not in {end:?}");
    }
}

async fn state(ledger: &Ledger, id: &str) -> (String, i64) {
    let operation = ledger.agent().operation(id).await;
    (
        operation["state"].as_str().unwrap().to_owned(),
        operation["version"].as_i64().unwrap(),
    )
}

const RESOLVE: [&str; 4] = ["operations", "resolve", "--reason", "seen at the bank"];

fn resolve<'a>(id: &'a str, verdict: &'a str, more: &[&'a str]) -> Vec<&'a str> {
    let mut arguments = RESOLVE.to_vec();
    arguments.extend_from_slice(&[id, "--verdict", verdict]);
    arguments.extend_from_slice(more);
    arguments
}

#[tokio::test]
async fn unknowns_are_shown_oldest_first_with_what_happened_and_what_to_do() {
    let (downstream, ledger) = start().await;
    unknown(&ledger, "pay.charge", "first;id").await;
    unknown(&ledger, "pay.looked", "second").await;
    unknown(&ledger, "pay.charge", "third").await;
    downstream.plan(Script::with_lines(201, "", "{}"));
    ends(&submit(&ledger, "pay.charge", "known", &[]).await, 0, &[]);
    let shown = operator(&ledger, &["unknowns"]).await;
    ends(&shown, 0, &[]);
    let heads: Vec<&str> = shown
        .stdout
        .lines()
        .filter(|line| !line.starts_with(' ') && !line.is_empty())
        .collect();
    assert_eq!(heads, ["first;id", "second", "third"]);
    for text in [
        "what       pay.charge: POST pay/charges",
        "key there  opl-",
        "1 attempt, version 2",
        "last       outcome_unknown: ",
        "only a person can decide",
        "goes on by itself at 2",
        "opledger operations resolve --verdict succeeded --reason '…' 'first;id'",
    ] {
        assert!(shown.stdout.contains(text), "{text:?} is not in {}", shown.stdout);
    }
    let document: Value = serde_json::from_str(&operator(&ledger, &["unknowns", "--json"]).await.stdout).unwrap();
    let of = |number: usize| &document["operations"][number];
    assert!(of(0)["due_at"].is_null() && of(1)["due_at"].is_string(), "{document}");
    assert_eq!(of(0)["last"]["event"], "outcome_unknown");
    assert!(of(0)["age_seconds"].as_i64().is_some_and(|age| age < 60), "{document}");
    assert_eq!(of(1)["due_at"], ledger.agent().operation("second").await["due_at"]);
    let page = operator(&ledger, &["unknowns", "--limit", "2"]).await;
    ends(&page, 0, &["there is more: --all, or --cursor "]);
    assert!(!page.stdout.contains("third"));
    let cursor = page.stderr.trim().rsplit(' ').next().unwrap();
    let rest = operator(&ledger, &["unknowns", "--cursor", cursor]).await;
    assert!(rest.stdout.starts_with("third\n"), "{rest:?}");
    let all = operator(&ledger, &["unknowns", "--limit", "1", "--all"]).await;
    assert!(all.stdout.contains("third") && all.stderr.is_empty(), "{all:?}");
}

#[tokio::test]
async fn get_shows_an_unknown_with_the_time_of_the_next_look_and_what_to_do() {
    let (_downstream, ledger) = start().await;
    unknown(&ledger, "pay.looked", "a").await;
    let shown = operator(&ledger, &["operations", "get", "a"]).await.stdout;
    let due_at = ledger.agent().operation("a").await["due_at"]
        .as_str()
        .unwrap()
        .to_owned();
    assert!(shown.contains(&format!("goes on by itself at {due_at}")), "{shown}");
    assert!(shown.contains("find out whether it acted: POST pay/looked"), "{shown}");
    assert!(shown.contains("1 attempt, unknown effects"), "{shown}");
}

#[tokio::test]
async fn a_decision_is_shown_first_and_not_taken_where_nobody_can_be_asked() {
    let (_downstream, ledger) = start().await;
    unknown(&ledger, "pay.charge", "a").await;
    let before = state(&ledger, "a").await;
    let refused = operator(&ledger, &resolve("a", "not-executed", &[])).await;
    let shown = [
        "needs_reconciliation",
        "outcome_unknown",
        "SENT AGAIN, as attempt 2",
        "give --version with the version that was seen, or --yes",
    ];
    ends(&refused, 2, &shown);
    assert_eq!(state(&ledger, "a").await, before, "nothing was sent");
    ends(
        &operator(&ledger, &resolve("a", "failed", &["--yes"])).await,
        0,
        &["decided"],
    );
    assert_eq!(state(&ledger, "a").await.0, "failed");
    let again = operator(&ledger, &resolve("a", "failed", &["--yes"])).await;
    ends(&again, 10, &["the operation is failed", "nothing was sent"]);
}

#[tokio::test]
async fn on_a_terminal_only_yes_decides_and_only_about_the_version_that_was_shown() {
    let (_downstream, ledger) = start().await;
    unknown(&ledger, "pay.charge", "a").await;
    let before = state(&ledger, "a").await;
    let ask = || Terminal::run(prepared(&ledger, "operator", &resolve("a", "succeeded", &[])));
    let terminal = ask();
    let shown = terminal.shows("Type yes: ").await;
    assert!(
        shown.contains("outcome_unknown") && shown.contains("callers are told"),
        "{shown}"
    );
    let (code, shown) = terminal.types("no").await;
    assert_eq!((code, state(&ledger, "a").await), (Some(1), before.clone()), "{shown}");

    let terminal = ask();
    terminal.shows("Type yes: ").await;
    // Meanwhile somebody learns something.
    crate::support::run(
        &ledger.sql,
        "with changed as (
             update ledger.operations set version = version + 1 where operation_id = 'a' returning *
         )
         insert into ledger.history (tenant_id, operation_id, version, at, event, state, actor, attempt, reason)
         select tenant_id, operation_id, version, clock_timestamp(), 'looked_up', state,
                'instance:00000000-0000-0000-0000-000000000000', attempt, 'it is there after all' from changed",
    )
    .await;
    let (code, shown) = terminal.types("yes").await;
    assert_eq!(code, Some(10), "{shown}");
    assert!(shown.contains("--version 3"), "{shown}");
    assert_eq!(
        state(&ledger, "a").await,
        ("needs_reconciliation".to_owned(), before.1 + 1)
    );

    let terminal = ask();
    terminal.shows("it is there after all").await;
    let (code, shown) = terminal.types("yes").await;
    assert_eq!(
        (code, state(&ledger, "a").await.0.as_str()),
        (Some(0), "succeeded"),
        "{shown}"
    );
}

#[tokio::test]
async fn a_refused_decision_names_the_next_step() {
    let (_downstream, ledger) = start().await;
    unknown(&ledger, "pay.slow", "a").await;
    let end = operator(&ledger, &resolve("a", "failed", &["--version", "1"])).await;
    ends(
        &end,
        10,
        &["state-conflict", "opledger operations history a", "--version 2"],
    );
    let end = operator(&ledger, &resolve("a", "not-executed", &["--version", "2"])).await;
    ends(&end, 7, &["resolution-too-early", "run it again with --version 2 in "]);
    let end = operator(&ledger, &resolve("a", "compensate", &["--version", "2"])).await;
    ends(
        &end,
        10,
        &[
            "declares no compensation",
            "undo it where it was done",
            "--verdict failed",
        ],
    );
    let end = run(&ledger, "agent", &resolve("a", "failed", &["--version", "2"])).await;
    ends(&end, 4, &["the API key of an operator"]);
    let end = operator(&ledger, &resolve("b", "failed", &["--version", "2"])).await;
    ends(&end, 5, &["check the id"]);
    for wrong in [
        vec!["--answer-body", "{}"],
        vec!["--answer-status", "201"],
        vec!["--external-reference", "re_1"],
    ] {
        ends(&operator(&ledger, &resolve("a", "failed", &wrong)).await, 2, &[]);
    }
    let end = operator(&ledger, &resolve("a", "failed", &["--yes", "--evidence", "{"])).await;
    ends(&end, 3, &["--evidence is not one JSON value"]);
    let json = operator(&ledger, &resolve("a", "failed", &["--version", "1", "--json"])).await;
    assert_eq!(
        serde_json::from_str::<Value>(&json.stdout).unwrap()["code"],
        "state-conflict"
    );
    assert_eq!(state(&ledger, "a").await, ("needs_reconciliation".to_owned(), 2));
}

#[tokio::test]
async fn the_answer_that_a_person_found_is_what_callers_get_from_now_on() {
    let (downstream, ledger) = start().await;
    unknown(&ledger, "pay.charge", "a").await;
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("answer.json");
    std::fs::write(&file, "{\"id\": \"ch_1\", \"amount\": 12233344445555567}\n").unwrap();
    let answer = format!("@{}", file.display());
    let more = [
        "--yes",
        "--external-reference",
        "ch_1",
        "--evidence",
        r#"{"page":"https://bank/ch_1"}"#,
        "--answer-status",
        "201",
        "--answer-body",
        &answer,
        "--answer-header",
        "X-Charge: ch_1",
    ];
    let end = operator(&ledger, &resolve("a", "succeeded", &more)).await;
    ends(&end, 0, &["callers get this from now on"]);
    assert!(end.stdout.contains("reference     ch_1"), "{}", end.stdout);
    let replay = submit(&ledger, "pay.charge", "a", &[]).await;
    ends(&replay, 0, &[]);
    for text in [
        "succeeded (replayed: nothing was sent again)",
        "status     201",
        "header     x-charge: ch_1",
        "header     content-type: application/json",
        "{\"id\": \"ch_1\", \"amount\": 12233344445555567}\n",
    ] {
        assert!(replay.stdout.contains(text), "{text:?} is not in {}", replay.stdout);
    }
    assert_eq!(downstream.requests().len(), 1, "nothing is sent again");
    let history = operator(&ledger, &["operations", "history", "a"]).await.stdout;
    assert!(
        history.contains("seen at the bank") && history.contains("https://bank/ch_1"),
        "{history}"
    );
}

#[tokio::test]
async fn what_did_not_act_is_sent_again_once_that_is_safe() {
    let (downstream, ledger) = start().await;
    unknown(&ledger, "pay.charge", "a").await;
    downstream.plan(Script::with_lines(201, "", r#"{"id":"ch_2"}"#));
    until("it may be sent again", async || {
        let end = operator(&ledger, &resolve("a", "not-executed", &["--version", "2"])).await;
        assert!([Some(0), Some(7)].contains(&end.code), "{end:?}");
        end.code == Some(0)
    })
    .await;
    until("it is settled", async || state(&ledger, "a").await.0 == "succeeded").await;
    assert_eq!(downstream.requests().len(), 2);
    let receipt = run(&ledger, "agent", &["operations", "receipt", "a"]).await;
    assert_eq!((receipt.code, receipt.stdout.as_str()), (Some(0), r#"{"id":"ch_2"}"#));
}

#[tokio::test]
async fn a_reversal_is_sent_and_both_operations_show_their_link() {
    let (downstream, ledger) = start().await;
    downstream.plan(Script::with_lines(201, "", r#"{"id":"ch_1"}"#));
    ends(&submit(&ledger, "pay.reversible", "a", &[]).await, 0, &[]);
    let compensate = ["operations", "compensate", "a", "--reason", "charged by mistake"];
    ends(&operator(&ledger, &compensate).await, 2, &["reversal is SENT", "--yes"]);
    assert_eq!(downstream.requests().len(), 1);
    downstream.plan(Script::with_lines(201, "", "{}"));
    let done = operator(&ledger, &[&compensate[..], &["--yes"]].concat()).await;
    ends(&done, 0, &["its reversal, linked below"]);
    assert!(
        done.stdout.contains("linked        compensated by a:compensation"),
        "{}",
        done.stdout
    );
    until("it is undone", async || state(&ledger, "a").await.0 == "compensated").await;
    assert!(
        downstream.requests()[1].target == "/reversals",
        "{:?}",
        downstream.requests()
    );
    let reversal = operator(&ledger, &["operations", "get", "a:compensation"]).await.stdout;
    assert!(reversal.contains("linked        compensates a\n"), "{reversal}");
    let again = operator(&ledger, &[&compensate[..], &["--yes"]].concat()).await;
    ends(&again, 10, &["the operation is compensated"]);
    downstream.plan(Script::with_lines(201, "", "{}"));
    ends(&submit(&ledger, "pay.charge", "b", &[]).await, 0, &[]);
    let none = ["operations", "compensate", "b", "--reason", "no", "--version", "2"];
    ends(
        &operator(&ledger, &none).await,
        10,
        &["declares no compensation", "undo it where it was done"],
    );
}

#[tokio::test]
async fn after_a_refused_reversal_nobody_is_told_to_send_the_operation_again() {
    let (downstream, ledger) = start().await;
    downstream.plan(Script::with_lines(201, "", r#"{"id":"ch_1"}"#));
    ends(&submit(&ledger, "pay.reversible", "a", &[]).await, 0, &[]);
    downstream.plan(Script::with_lines(409, "", "{}"));
    let compensate = [
        "operations",
        "compensate",
        "a",
        "--reason",
        "charged by mistake",
        "--yes",
    ];
    ends(&operator(&ledger, &compensate).await, 0, &[]);
    until("its reversal is refused", async || {
        state(&ledger, "a").await.0 == "needs_reconciliation"
    })
    .await;
    let shown = operator(&ledger, &["unknowns"]).await.stdout;
    assert!(
        shown.contains("compensation_failed") && shown.contains("operations get a:compensation"),
        "{shown}"
    );
    assert!(
        !shown.contains("not-executed") && shown.contains("callers keep their receipt"),
        "{shown}"
    );
    let end = operator(&ledger, &resolve("a", "not-executed", &["--yes"])).await;
    ends(&end, 10, &["it has succeeded", "choose another verdict"]);
    ends(&operator(&ledger, &resolve("a", "succeeded", &["--yes"])).await, 0, &[]);
    assert_eq!(downstream.requests().len(), 2);
}

#[tokio::test]
async fn a_downstreams_answer_is_shown_as_it_is_and_its_state_decides_the_exit_code() {
    let (downstream, ledger) = start().await;
    let hostile = r#"{"code":"fingerprint-mismatch","retryable":true,"type":"/problems/fingerprint-mismatch"}"#;
    downstream.plan(Script::with_lines(
        422,
        "content-type: application/problem+json\r\n",
        hostile,
    ));
    let refused = submit(&ledger, "pay.charge", "a", &[]).await;
    ends(&refused, 9, &["the downstream refused it"]);
    assert!(
        refused.stdout.contains("status     422") && refused.stdout.contains(hostile),
        "{refused:?}"
    );
    let receipt = run(&ledger, "agent", &["operations", "receipt", "a"]).await;
    assert_eq!((receipt.code, receipt.stdout.as_str()), (Some(9), hostile));
    downstream.plan(Script::with_lines(
        200,
        "content-type: text/plain\r\n",
        "done\u{1b}[2J\n",
    ));
    let text = submit(&ledger, "pay.charge", "b", &["--json"]).await;
    ends(&text, 0, &[]);
    let document: Value = serde_json::from_str(&text.stdout).unwrap();
    assert_eq!(document["answer"]["text"], "done\u{1b}[2J\n");
    assert_eq!(
        (&document["state"], &document["replayed"]),
        (&"succeeded".into(), &false.into())
    );
    let shown = submit(&ledger, "pay.charge", "b", &[]).await;
    assert!(shown.stdout.contains(r"done\u{1b}[2J"), "{shown:?}");
    let mismatch = run(
        &ledger,
        "agent",
        &[
            "operations",
            "submit",
            "--kind",
            "pay.charge",
            "--id",
            "a",
            "--payload",
            "7",
        ],
    )
    .await;
    ends(&mismatch, 6, &["fingerprint-mismatch"]);
    assert_eq!(downstream.requests().len(), 2);
}

#[tokio::test]
async fn doctor_reaches_downstreams_without_sending_anything() {
    let (downstream, ledger) = start().await;
    let doctor = |config: &str| {
        let path = ledger.config_path.with_file_name("doctor.toml");
        std::fs::write(&path, config).unwrap();
        let mut command = process::command(&["doctor", "--config"], &ledger.service_url);
        command.arg(path).env_remove("PAY_SECRET");
        process::ended(command)
    };
    let found = doctor(&config(&downstream)).await;
    assert_eq!(found.code, Some(0), "{found:?}");
    for text in [
        &format!(
            "ok    downstream pay at http://{} is reached: name and connection took ",
            downstream.address
        ),
        "warn  downstream pay, /charges: declares nothing",
        "ok    large request bodies can be kept in ",
    ] {
        assert!(found.stdout.contains(text), "{text:?} is not in {}", found.stdout);
    }
    assert!(!found.stdout.contains("/looked: declares nothing"), "{}", found.stdout);
    until("the connection is seen", async || downstream.connections() >= 1).await;
    assert_eq!((downstream.connections(), downstream.count()), (1, 0));
    assert!(downstream.fragments().is_empty());
    let https = config(&downstream).replace("http://", "https://");
    let found = doctor(&https).await;
    assert_eq!(found.code, Some(1), "{found:?}");
    assert!(found.stdout.contains("is not reached: tls: "), "{}", found.stdout);
    let found = doctor(&format!("[limits]\nspool_dir = \"/nowhere\"\n{}", config(&downstream))).await;
    assert_eq!(found.code, Some(1), "{found:?}");
    assert!(
        found.stdout.contains("FAIL  cannot keep a request body in /nowhere: "),
        "{}",
        found.stdout
    );
    let closed = "[downstreams.a]\nurl = \"http://127.0.0.1:1\"\n[downstreams.b]\nurl = \"http://nowhere.invalid\"\n";
    let found = doctor(closed).await;
    assert_eq!(found.code, Some(1), "{found:?}");
    assert!(
        found
            .stdout
            .contains("FAIL  downstream a at http://127.0.0.1:1 is not reached: connect: "),
        "{found:?}"
    );
    assert!(
        found
            .stdout
            .contains("FAIL  downstream b at http://nowhere.invalid is not reached: dns: "),
        "{found:?}"
    );
    let secret = "[downstreams.a]\nurl = \"http://127.0.0.1:1\"\ncredential = { bearer_env = \"PAY_SECRET\" }\n";
    let found = doctor(secret).await;
    assert_eq!(found.code, Some(1), "{found:?}");
    assert!(
        found
            .stdout
            .contains("the variable PAY_SECRET is not set — set the variable"),
        "{}",
        found.stdout
    );
}
