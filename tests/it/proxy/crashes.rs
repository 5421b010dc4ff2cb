//! Processes that die, freeze, or stop with requests on their way.

use std::path::PathBuf;
use std::time::Duration;

use nix::sys::signal::Signal;
use serde_json::json;
use tempfile::TempDir;
use tokio::task::JoinSet;

use super::events;
use crate::support::downstream::{Downstream, Gate, Script};
use crate::support::process::Process;
use crate::support::{Client, Database, TENANT, until, write_config};

/// Short leases, so that a dead process's claims soon lapse.
const QUICK: &str = "[recovery]\nheartbeat = \"150ms\"\nlease = \"900ms\"\nsweep = \"150ms\"\n";

/// A database, a downstream, and the configuration of the processes between them.
struct House {
    database: Database,
    pay: Downstream,
    agent_key: String,
    operator_key: String,
    config: PathBuf,
    _directory: TempDir,
}

impl House {
    async fn with(lines: &str, more: &str) -> Self {
        let (database, pay) = (Database::create().await, Downstream::start().await);
        let keys = database.keys(TENANT).await;
        let (directory, config) = write_config(&format!("{more}\n{QUICK}{}", pay.config("pay", lines)));
        Self {
            database,
            pay,
            agent_key: keys["agent"].clone(),
            operator_key: keys["operator"].clone(),
            config,
            _directory: directory,
        }
    }

    fn process(&self) -> Process {
        Process::serve(&self.config, &self.database.service_url)
    }

    fn agent(&self, process: &Process) -> Client {
        Client::new(process.address, &self.agent_key)
    }

    fn operator(&self, process: &Process) -> Client {
        Client::new(process.address, &self.operator_key)
    }

    async fn number(&self, query: &'static str) -> i64 {
        sqlx::query_scalar(query).fetch_one(&self.database.sql).await.unwrap()
    }
}

const UNKNOWN: &str = "select count(*) from ledger.operations where state = 'needs_reconciliation'";

/// Sends without caring for the answer.
fn sent(client: &Client, key: &str) -> tokio::task::JoinHandle<Option<crate::support::Answer>> {
    let (client, key) = (client.clone(), key.to_owned());
    tokio::spawn(async move { client.try_forward("POST", &key, &format!("/{key}"), "{}").await.ok() })
}

#[tokio::test]
async fn a_request_of_a_killed_process_is_unknown_and_time_alone_never_sends_it_again() {
    let house = House::with("", "").await;
    house.pay.answers(|_| Script::new().hang());
    let mut first = house.process();
    let lost = sent(&house.agent(&first), "k");
    house.pay.received(1).await;
    first.kill();
    assert!(lost.await.unwrap().is_none());
    let second = house.process();
    let agent = house.agent(&second);
    // Never free, never run again: busy until the claim has lapsed, and then unknown.
    until("it is unknown", async || {
        let answer = agent.forward("POST", "k", "/k", "{}").await;
        assert!(
            ["operation-in-progress", "outcome-unknown"].contains(&answer.code().as_str()),
            "{answer:?}"
        );
        answer.code() == "outcome-unknown"
    })
    .await;
    // Well past every lease and time-out.
    house.pay.answers(|_| Script::answer(200, "{}"));
    tokio::time::sleep(Duration::from_secs(3)).await;
    let told = agent.forward("POST", "k", "/k", "{}").await.is(409, "outcome-unknown");
    assert_eq!(told.json()["operation_url"], "/v1/operations/k");
    assert_eq!(house.pay.count(), 1);
    let operation = agent.operation("k").await;
    assert_eq!(events(&operation), ["claimed", "claim_lapsed"]);
    // How many effects there are is what nobody knows.
    assert_eq!(
        (&operation["attempts"], &operation["effects"]),
        (&1.into(), &serde_json::Value::Null)
    );
}

#[tokio::test]
async fn a_process_killed_before_its_claim_leaves_a_free_key() {
    // Takes connections and never says a word of TLS.
    let silent = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let slow = format!(
        "[downstreams.slow]\nurl = \"https://{}\"\n",
        silent.local_addr().unwrap()
    );
    let house = House::with("", &slow).await;
    let mut first = house.process();
    let agent = house.agent(&first);
    let lost = tokio::spawn(async move {
        let lines = [("idempotency-key", "k")];
        agent.try_send("POST", "/v1/proxy/slow/x", &lines, "".into()).await
    });
    let _connection = silent.accept().await.unwrap();
    first.kill();
    assert!(lost.await.unwrap().is_err());
    assert_eq!(house.number("select count(*) from ledger.operations").await, 0);
    let second = house.process();
    house.agent(&second).forward("POST", "k", "/k", "{}").await.succeeded();
    assert_eq!(house.pay.count(), 1);
}

#[tokio::test]
async fn a_killed_processs_request_is_sent_again_under_its_key_only_while_the_downstream_remembers_it() {
    let route = |retention: &str| {
        format!(
            "[[routes]]\npath = \"/{retention}\"\nidempotency = \"key\"\nkey_retention = \"{retention}\"\nkey_margin = \"300ms\"\nretry = {{ first_delay = \"100ms\" }}\n"
        )
    };
    let house = House::with(&format!("{}{}", route("1s"), route("1h")), "").await;
    house.pay.answers(|_| Script::new().hang());
    let mut first = house.process();
    for key in ["1s", "1h"] {
        sent(&house.agent(&first), key);
    }
    house.pay.received(2).await;
    first.kill();
    house.pay.answers(|_| Script::answer(200, "{}"));
    let second = house.process();
    let agent = house.agent(&second);
    until("the one is sent again", async || {
        agent.operation("1h").await["state"] == "succeeded"
    })
    .await;
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!((house.pay.sends("/1h"), house.pay.sends("/1s")), (2, 1));
    let lines = [("idempotency-key", "1s"), super::JSON, ("prefer", "wait=0")];
    let answer = agent.send("POST", "/v1/proxy/pay/1s", &lines, "{}").await;
    answer.is(409, "outcome-unknown");
}

#[tokio::test]
async fn a_second_process_leaves_the_first_ones_requests_alone() {
    let house = House::with("", "").await;
    let gate = Gate::new();
    let held = gate.clone();
    house
        .pay
        .answers(move |_| Script::new().gate(&held).before(Script::answer(200, "{\"by\":1}")));
    let first = house.process();
    let asked: Vec<_> = (0..5)
        .map(|number| sent(&house.agent(&first), &format!("k{number}")))
        .collect();
    house.pay.received(5).await;
    let second = house.process();
    // Several sweeps and leases.
    tokio::time::sleep(Duration::from_secs(2)).await;
    assert_eq!(
        house
            .number("select count(*) from ledger.operations where state = 'running' and attempt = 1")
            .await,
        5
    );
    gate.open();
    for answer in asked {
        assert_eq!(answer.await.unwrap().unwrap().succeeded().json()["by"], 1);
    }
    for number in 0..5 {
        let key = format!("k{number}");
        assert!(
            house
                .agent(&second)
                .forward("POST", &key, &format!("/{key}"), "{}")
                .await
                .succeeded()
                .is_replay()
        );
    }
    assert_eq!(house.pay.count(), 5);
    assert_eq!(
        house
            .number("select count(*) from ledger.history where event = 'claim_lapsed'")
            .await,
        0
    );
}

#[tokio::test]
async fn a_late_answer_after_the_decision_changes_nothing_and_is_kept_as_evidence() {
    let house = House::with("max_stored_body = 100\n", "").await;
    let gate = Gate::new();
    let held = gate.clone();
    house.pay.answers(move |request| match request.target.as_str() {
        "/base/lost" => Script::new().gate(&held).reset(),
        "/base/large" => Script::new().gate(&held).before(Script::answer(200, "x".repeat(200))),
        _ => Script::new().gate(&held).before(Script::answer(200, "{\"late\":true}")),
    });
    let frozen = house.process();
    // Decided before the answer comes, not decided before it comes, no answer at all, and one too large to store.
    let keys = ["decided", "undecided", "lost", "large"];
    let asked: Vec<_> = keys.iter().map(|key| sent(&house.agent(&frozen), key)).collect();
    house.pay.received(4).await;
    frozen.signal(Signal::SIGSTOP);
    let second = house.process();
    until("the claims have lapsed", async || house.number(UNKNOWN).await == 4).await;
    let agent = house.agent(&second);
    for key in ["decided", "lost", "large"] {
        let version = agent.operation(key).await["version"].clone();
        let decision = json!({"verdict": "failed", "version": version, "reason": "it never arrived"});
        assert_eq!(house.operator(&second).resolve(key, decision).await.status, 200);
    }
    gate.open();
    frozen.signal(Signal::SIGCONT);
    for (key, asked) in keys.iter().zip(asked) {
        // Whoever still waits is told what was decided, and nothing else.
        let told = asked.await.unwrap();
        match *key {
            "undecided" => drop(told.unwrap().is(409, "outcome-unknown")),
            // A stream that was never acknowledged breaks off.
            "large" => {}
            _ => drop(told.unwrap().is(422, "operation-failed")),
        }
    }
    for key in keys {
        until("the evidence is kept", async || {
            let operation = agent.operation(key).await;
            let last = *events(&operation).last().unwrap();
            ["late_answer", "late_end"].contains(&last)
        })
        .await;
        let operation = agent.operation(key).await;
        let expected = if key == "undecided" {
            "needs_reconciliation"
        } else {
            "failed"
        };
        assert_eq!(operation["state"], expected, "{key}");
        let last = operation["history"].as_array().unwrap().last().unwrap();
        assert_eq!(last["evidence"]["attempt"], 1, "{last}");
        if key == "decided" {
            assert_eq!(
                (&last["evidence"]["status"], &last["evidence"]["size"]),
                (&200.into(), &13.into())
            );
        }
        let again = agent.forward("POST", key, &format!("/{key}"), "{}").await;
        assert_eq!(
            again.code(),
            if key == "undecided" {
                "outcome-unknown"
            } else {
                "operation-failed"
            }
        );
    }
    assert_eq!(house.pay.count(), 4);
}

/// Evidence that comes late must not stop a recovery that is under way.
#[tokio::test]
async fn a_late_answer_does_not_keep_an_unknown_from_being_recovered() {
    let routes = "[[routes]]\npath = \"/orders\"\nidempotency = \"lookup\"\nsettle_delay = \"4s\"\ninterval = \"1s\"\n\
                  look_up = { path = \"/orders/{/ref}\", ours = { \"/ref\" = \"{/ref}\" } }\n";
    let house = House::with(routes, "").await;
    let gate = Gate::new();
    let held = gate.clone();
    house.pay.answers(move |request| match request.method.as_str() {
        "POST" => Script::new().gate(&held).reset(),
        _ => Script::answer(200, "{\"ref\":\"r\"}"),
    });
    let mut frozen = house.process();
    let client = house.agent(&frozen);
    let asked = tokio::spawn(async move { client.try_forward("POST", "k", "/orders", "{\"ref\":\"r\"}").await });
    house.pay.received(1).await;
    frozen.signal(Signal::SIGSTOP);
    let mut second = house.process();
    until("the claim has lapsed", async || house.number(UNKNOWN).await == 1).await;
    // Only a sweep can go on with it now: no process is left that remembers.
    second.kill();
    gate.open();
    frozen.signal(Signal::SIGCONT);
    let late = "select count(*) from ledger.history where event = 'late_end'";
    until("the late end is noted", async || house.number(late).await == 1).await;
    frozen.kill();
    drop(asked);
    assert_eq!(
        house
            .number("select count(*) from ledger.operations where due_at is not null")
            .await,
        1,
        "nobody is to look it up any more"
    );
    let third = house.process();
    until("it is looked up", async || {
        house.agent(&third).operation("k").await["state"] == "succeeded"
    })
    .await;
}

#[tokio::test]
async fn a_stopping_process_finishes_what_is_on_its_way() {
    let house = House::with("", "").await;
    house.pay.answers(|_| {
        Script::new()
            .pause(Duration::from_millis(1500))
            .before(Script::answer(201, "{}"))
    });
    let mut process = house.process();
    let agent = house.agent(&process);
    let requests: Vec<_> = (0..10).map(|number| sent(&agent, &format!("k{number}"))).collect();
    let lines = [("idempotency-key", "async"), ("prefer", "respond-async")];
    assert_eq!(agent.send("POST", "/v1/proxy/pay/async", &lines, "").await.status, 202);
    let mut operations = JoinSet::new();
    for number in 0..10 {
        let agent = agent.clone();
        operations.spawn(async move {
            let payload = r#"{"account":"acct-1","amount":1}"#;
            agent
                .try_submit(&format!("o{number}"), "account.deposit", payload, &[])
                .await
        });
    }
    house.pay.received(11).await;
    process.signal(Signal::SIGTERM);
    for answer in requests {
        assert_eq!(answer.await.unwrap().expect("it is answered").status, 201);
    }
    // Those that came too late were not taken.
    for answer in operations.join_all().await.into_iter().flatten() {
        answer.succeeded();
    }
    let status = process.wait(Duration::from_secs(15)).await;
    assert_eq!(status.code(), Some(0), "{}", process.log());
    assert_eq!(
        house
            .number("select count(*) from ledger.operations where settled_at is null")
            .await,
        0
    );
    assert_eq!(house.pay.count(), 11);
}

#[tokio::test]
async fn what_is_on_its_way_beyond_the_drain_limit_is_unknown_to_the_next_process() {
    let house = House::with("", "[limits]\ndrain = \"400ms\"\n").await;
    house.pay.answers(|_| Script::new().hang());
    let mut process = house.process();
    let agent = house.agent(&process);
    let requests: Vec<_> = (0..10).map(|number| sent(&agent, &format!("k{number}"))).collect();
    house.pay.received(10).await;
    process.signal(Signal::SIGTERM);
    let status = process.wait(Duration::from_secs(15)).await;
    assert_eq!(status.code(), Some(0), "{}", process.log());
    for answer in requests {
        assert!(answer.await.unwrap().is_none(), "a cut-off is no answer");
    }
    // Whatever its heart has said last, and whoever looks.
    let next = house.process();
    until("all is unknown", async || house.number(UNKNOWN).await == 10).await;
    tokio::time::sleep(Duration::from_millis(500)).await;
    let agent = house.agent(&next);
    for number in 0..10 {
        let key = format!("k{number}");
        agent
            .forward("POST", &key, &format!("/{key}"), "{}")
            .await
            .is(409, "outcome-unknown");
    }
    assert_eq!(house.pay.count(), 10);
}
