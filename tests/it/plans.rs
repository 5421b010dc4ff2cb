//! Operations that are stored before they run: planned ones, and accepted ones that run in the background.

use std::time::Duration;

use nix::sys::signal::Signal;
use serde_json::Value;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::support::handlers::{self, WAYS};
use crate::support::process::Process;
use crate::support::{Answer, Client, Ledger, run, until};

const ASYNC: [(&str, &str); 1] = [("prefer", "respond-async")];

/// Lapses quickly and looks often.
const QUICK_RECOVERY: &str = "[recovery]\nheartbeat = \"100ms\"\nlease = \"400ms\"\nsweep = \"100ms\"\n";

async fn plan(client: &Client, id: &str, kind: &str, payload: &str) -> Answer {
    let body = format!(r#"{{"operation_id":"{id}","kind":"{kind}","payload":{payload},"mode":"plan"}}"#);
    client.post("/v1/operations", &body).await
}

async fn execute(client: &Client, id: &str) -> Answer {
    client
        .send("POST", &format!("/v1/operations/{id}/execute"), &[], "")
        .await
}

async fn cancel(client: &Client, id: &str) -> Answer {
    client
        .send("POST", &format!("/v1/operations/{id}/cancel"), &[], "")
        .await
}

/// The names of the changes so far.
fn events(operation: &Value) -> Vec<&str> {
    operation["history"]
        .as_array()
        .unwrap()
        .iter()
        .map(|change| change["event"].as_str().unwrap())
        .collect()
}

fn assert_accepted(answer: &Answer, id: &str, state: &str) {
    assert_eq!(answer.status, 202, "{:?}", String::from_utf8_lossy(&answer.body));
    assert_eq!(answer.header("location"), format!("/v1/operations/{id}"));
    assert_eq!(
        (answer.header("operation-id"), answer.header("operation-state")),
        (id, state)
    );
    assert_eq!(answer.json()["state"], state);
}

#[tokio::test]
async fn a_planned_operation_runs_when_it_is_told_to_and_once() {
    let ledger = handlers::ledger("").await;
    let agent = ledger.agent();
    for way in WAYS {
        let (id, kind) = (format!("planned{way}"), format!("note{way}"));
        assert_accepted(&plan(&agent, &id, &kind, r#"{"n":1}"#).await, &id, "planned");
        // Planning again, or submitting what is planned, changes nothing and runs nothing.
        assert_accepted(&plan(&agent, &id, &kind, r#"{"n":1}"#).await, &id, "planned");
        assert_accepted(&agent.submit(&id, &kind, r#"{"n":1}"#).await, &id, "planned");
        assert_accepted(
            &agent.submit_with(&id, &kind, r#"{"n":1}"#, &ASYNC).await,
            &id,
            "planned",
        );
        plan(&agent, &id, &kind, r#"{"n":2}"#)
            .await
            .is(422, "fingerprint-mismatch");
        assert_eq!(ledger.effects(&id).await, 0);
        let operation = agent.operation(&id).await;
        assert_eq!((&operation["attempts"], &operation["effects"]), (&0.into(), &0.into()));

        let receipt = execute(&agent, &id).await.succeeded();
        assert!(!receipt.is_replay());
        assert_eq!(receipt.json()["result"]["n"], 1);
        for again in [execute(&agent, &id).await, agent.submit(&id, &kind, r#"{"n":1}"#).await] {
            assert!(again.succeeded().is_replay());
        }
        assert_eq!(agent.submit(&id, &kind, r#"{"n":1}"#).await.body, receipt.body);
        assert_eq!(ledger.effects(&id).await, 1);
        assert_eq!(events(&agent.operation(&id).await), ["planned", "claimed", "succeeded"]);
    }
    execute(&agent, "unheard-of").await.is(404, "not-found");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_many_executions_at_once_one_runs() {
    let ledger = handlers::ledger("").await;
    let second = ledger.second().await;
    let clients = [ledger.agent(), ledger.agent().at(second.address)];
    for round in 0..20 {
        let id = format!("planned-{round}");
        plan(&clients[0], &id, "note", "{}").await;
        let mut executions = JoinSet::new();
        for number in 0..10 {
            let (client, id) = (clients[number % 2].clone(), id.clone());
            executions.spawn(async move { execute(&client, &id).await });
        }
        let answers = executions.join_all().await;
        for answer in &answers {
            assert!(
                answer.status == 200 || answer.code() == "operation-in-progress",
                "{answer:?}"
            );
        }
        assert_eq!(
            answers
                .iter()
                .filter(|answer| answer.status == 200 && !answer.is_replay())
                .count(),
            1
        );
        assert_eq!(ledger.effects(&id).await, 1);
        assert_eq!(
            events(&clients[0].operation(&id).await),
            ["planned", "claimed", "succeeded"]
        );
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_plan_is_either_cancelled_or_run_and_never_both() {
    let ledger = handlers::ledger("").await;
    let second = ledger.second().await;
    let clients = [ledger.agent(), ledger.agent().at(second.address)];
    for round in 0..30 {
        let id = format!("contested-{round}");
        plan(&clients[0], &id, "note", "{}").await;
        let mut rivals = JoinSet::new();
        for number in 0..6 {
            let (client, id) = (clients[number % 2].clone(), id.clone());
            rivals.spawn(async move {
                if number < 3 {
                    ("execute", execute(&client, &id).await)
                } else {
                    ("cancel", cancel(&client, &id).await)
                }
            });
        }
        let answers = rivals.join_all().await;
        let state = clients[0].operation(&id).await["state"].as_str().unwrap().to_owned();
        let effects = ledger.effects(&id).await;
        assert!(
            (state.as_str(), effects) == ("succeeded", 1) || (state.as_str(), effects) == ("cancelled", 0),
            "{state} {effects}"
        );
        for (verb, answer) in answers {
            let allowed: &[(u16, &str)] = match (verb, state.as_str()) {
                ("execute", "succeeded") => &[(200, ""), (409, "operation-in-progress")],
                ("execute", _) => &[(409, "operation-cancelled")],
                (_, "cancelled") => &[(200, "")],
                (_, _) => &[(409, "state-conflict")],
            };
            assert!(
                allowed.contains(&(answer.status, answer.code().as_str())),
                "{verb} {state}: {answer:?}"
            );
        }
    }
}

#[tokio::test]
async fn a_cancelled_plan_never_runs() {
    let ledger = handlers::ledger("").await;
    let agent = ledger.agent();
    plan(&agent, "withdrawn", "note", "{}").await;
    let shown = cancel(&agent, "withdrawn").await.succeeded().json();
    assert_eq!((&shown["state"], &shown["effects"]), (&"cancelled".into(), &0.into()));
    let before = ledger.rows().await;
    assert_eq!(
        cancel(&agent, "withdrawn").await.succeeded().json()["version"],
        shown["version"]
    );
    let told = agent
        .submit("withdrawn", "note", "{}")
        .await
        .is(409, "operation-cancelled");
    assert_eq!(told.json()["retryable"], false);
    for again in [
        agent.submit_with("withdrawn", "note", "{}", &ASYNC).await,
        plan(&agent, "withdrawn", "note", "{}").await,
        execute(&agent, "withdrawn").await,
        agent.get("/v1/operations/withdrawn/receipt").await,
    ] {
        assert_eq!(again.is(409, "operation-cancelled").body, told.body);
    }
    agent
        .submit("withdrawn", "note", r#"{"n":2}"#)
        .await
        .is(422, "fingerprint-mismatch");
    assert_eq!(ledger.rows().await, before);
    assert_eq!(ledger.effects("withdrawn").await, 0);
    assert_eq!(events(&agent.operation("withdrawn").await), ["planned", "cancelled"]);
}

#[tokio::test]
async fn only_who_asked_may_cancel_and_only_before_it_runs() {
    let ledger = handlers::ledger("").await;
    let agent = ledger.agent();
    plan(&agent, "mine", "note", "{}").await;
    let other = ledger.tenant("other").await;
    cancel(&agent.with_key(&other["agent"]), "mine")
        .await
        .is(404, "not-found");
    cancel(&ledger.client("operator"), "mine").await.is(403, "forbidden");
    let colleague = ledger.tenant("demo").await;
    cancel(&agent.with_key(&colleague["agent"]), "mine")
        .await
        .is(403, "forbidden");
    assert_eq!(agent.operation("mine").await["state"], "planned");

    execute(&agent, "mine").await.succeeded();
    cancel(&agent, "mine").await.is(409, "state-conflict");
    agent.submit_with("running", "gated.alone", "{}", &ASYNC).await;
    cancel(&agent, "running").await.is(409, "state-conflict");
    ledger.open_the_gate().await;
    until("it runs on", async || {
        agent.operation("running").await["state"] == "succeeded"
    })
    .await;
}

#[tokio::test]
async fn an_accepted_operation_sent_twice_has_one_address_and_one_receipt() {
    let ledger = handlers::ledger("").await;
    let second = ledger.second().await;
    for way in WAYS {
        let (id, kind) = (format!("later{way}"), format!("gated{way}"));
        let agent = ledger.agent();
        let began = Instant::now();
        let first = agent.submit_with(&id, &kind, "{}", &ASYNC).await;
        assert!(began.elapsed() < Duration::from_secs(2), "answered before it ran");
        assert_accepted(&first, &id, "running");
        assert_eq!(first.header("preference-applied"), "respond-async");
        for client in [agent.clone(), agent.at(second.address)] {
            let again = client.submit_with(&id, &kind, "{}", &ASYNC).await;
            assert_accepted(&again, &id, "running");
            assert_eq!(
                (&again.body, again.header("location")),
                (&first.body, first.header("location"))
            );
            client
                .submit_with(&id, &kind, "1", &ASYNC)
                .await
                .is(422, "fingerprint-mismatch");
            // Who does not ask to be answered at once is told that somebody else is at it.
            client.submit(&id, &kind, "{}").await.is(409, "operation-in-progress");
        }
        ledger.open_the_gate().await;
        let waited = agent
            .submit_with(&id, &kind, "{}", &[("prefer", "respond-async, wait=15")])
            .await
            .succeeded();
        for client in [agent.clone(), agent.at(second.address)] {
            let replay = client.submit_with(&id, &kind, "{}", &ASYNC).await.succeeded();
            assert!(replay.is_replay());
            assert_eq!(replay.body, waited.body);
        }
        assert_eq!(ledger.effects(&id).await, 1);
        // 1 + 2 again + 2 told that it runs + 1 that waited + 2 replays; mismatches do not count.
        until("every delivery is counted", async || {
            agent.operation(&id).await["deliveries"] == 8
        })
        .await;
        run(&ledger.sql, "delete from it.open_gates").await;
    }
}

#[tokio::test]
async fn waiting_ends_with_the_receipt_or_with_the_time() {
    let ledger = handlers::ledger("").await;
    let agent = ledger.agent();
    let began = Instant::now();
    let waited = agent
        .submit_with("slow", "gated.alone", "{}", &[("prefer", "respond-async, wait=1")])
        .await;
    assert_accepted(&waited, "slow", "running");
    assert!(
        (1.0..4.0).contains(&began.elapsed().as_secs_f64()),
        "{:?}",
        began.elapsed()
    );
    let waiting = tokio::spawn({
        let agent = agent.clone();
        async move {
            agent
                .submit_with("slow", "gated.alone", "{}", &[("prefer", "wait=15")])
                .await
        }
    });
    ledger.at_the_gate(1).await;
    ledger.open_the_gate().await;
    assert_eq!(waiting.await.unwrap().succeeded().json()["state"], "succeeded");
}

#[tokio::test]
async fn a_refused_accepted_operation_fails_and_keeps_its_receipt() {
    let ledger = handlers::ledger("").await;
    let agent = ledger.agent();
    for way in WAYS {
        let (id, kind) = (format!("refused{way}"), format!("raise{way}"));
        assert_eq!(
            agent
                .submit_with(&id, &kind, r#"{"code":"OL001"}"#, &ASYNC)
                .await
                .status,
            202
        );
        until("it is settled", async || {
            agent.operation(&id).await["state"] == "failed"
        })
        .await;
        let replay = agent
            .submit_with(&id, &kind, r#"{"code":"OL001"}"#, &ASYNC)
            .await
            .is(422, "operation-failed");
        assert!(replay.is_replay());
        assert_eq!(ledger.effects(&id).await, 0);
        assert_eq!(events(&agent.operation(&id).await), ["accepted", "failed"]);
    }
}

#[tokio::test]
async fn a_stored_operation_with_a_broken_handler_waits_for_the_repair() {
    let ledger = handlers::ledger(QUICK_RECOVERY).await;
    let agent = ledger.agent();
    plan(&agent, "planned", "repair", "{}").await;
    let broken = execute(&agent, "planned").await.is(500, "handler-broken");
    assert_eq!(
        (&broken.json()["sqlstate"], &broken.json()["retryable"]),
        (&"42883".into(), &true.into())
    );
    assert_eq!(agent.submit_with("accepted", "repair", "{}", &ASYNC).await.status, 202);
    for id in ["planned", "accepted"] {
        until("it waits", async || agent.operation(id).await["state"] == "retry_wait").await;
        assert_eq!(ledger.effects(id).await, 0);
        assert_accepted(&agent.submit(id, "repair", "{}").await, id, "retry_wait");
        let operation = agent.operation(id).await;
        assert_eq!(
            operation["history"].as_array().unwrap().last().unwrap()["evidence"]["sqlstate"],
            "42883"
        );
    }
    repair(&ledger).await;
    // Its time is half a minute away: bring it nearer.
    run(
        &ledger.sql,
        "update ledger.operations set due_at = clock_timestamp() where state = 'retry_wait'",
    )
    .await;
    for id in ["planned", "accepted"] {
        until("it runs after the repair", async || {
            agent.operation(id).await["state"] == "succeeded"
        })
        .await;
        assert_eq!(ledger.effects(id).await, 1);
        assert_eq!(agent.submit(id, "repair", "{}").await.succeeded().json()["attempt"], 2);
    }
}

/// Puts the missing function in place.
pub async fn repair(ledger: &Ledger) {
    let function = "create or replace function it.no_such_function(jsonb) returns jsonb language sql as 'select $1'";
    run(&ledger.sql, function).await;
}

#[tokio::test]
async fn an_accepted_operation_of_a_killed_process_is_taken_over_and_has_one_effect() {
    let ledger = handlers::ledger(QUICK_RECOVERY).await;
    let agent = ledger.agent();
    let mut process = Process::serve(&ledger.config_path, &ledger.service_url);
    let doomed = agent.at(process.address);
    for way in WAYS {
        let answer = doomed
            .submit_with(&format!("orphan{way}"), &format!("gated{way}"), "{}", &ASYNC)
            .await;
        assert_eq!(answer.status, 202);
    }
    ledger.at_the_gate(2).await;
    let alive: String = sqlx::query_scalar("select string_agg(instance_id::text, ' ') from ledger.operations")
        .fetch_one(&ledger.sql)
        .await
        .unwrap();
    process.kill();
    ledger.open_the_gate().await;
    for way in WAYS {
        let id = format!("orphan{way}");
        until("it is taken over", async || {
            agent.operation(&id).await["state"] == "succeeded"
        })
        .await;
        assert_eq!(ledger.effects(&id).await, 1);
        let operation = agent.operation(&id).await;
        assert_eq!(events(&operation), ["accepted", "claim_lapsed", "claimed", "succeeded"]);
        assert_eq!(operation["attempts"], 2);
        let settler = operation["history"][3]["actor"]
            .as_str()
            .unwrap()
            .strip_prefix("instance:")
            .unwrap()
            .to_owned();
        assert!(!alive.contains(&settler), "another process settled it");
        assert!(
            agent
                .submit(&id, &format!("gated{way}"), "{}")
                .await
                .succeeded()
                .is_replay()
        );
    }
}

#[tokio::test]
async fn one_operation_that_cannot_be_taken_over_yet_keeps_no_other_waiting() {
    let ledger = handlers::ledger(QUICK_RECOVERY).await;
    let agent = ledger.agent();
    let mut process = Process::serve(&ledger.config_path, &ledger.service_url);
    let doomed = agent.at(process.address);
    doomed.submit_with("held", "gated.alone", "{}", &ASYNC).await;
    ledger.at_the_gate(1).await;
    doomed.submit_with("broken", "repair", "{}", &ASYNC).await;
    until("it waits", async || {
        agent.operation("broken").await["state"] == "retry_wait"
    })
    .await;
    // The process dies, but PostgreSQL goes on with the handler it has begun, and with its lock on the row.
    process.kill();
    until("the process is forgotten", async || {
        ledger
            .count(
                "select count(*) from ledger.operations o join ledger.instances i using (instance_id) \
                 where o.operation_id = 'held' and i.heartbeat_at > clock_timestamp() - interval '400 ms'",
            )
            .await
            == 0
    })
    .await;
    repair(&ledger).await;
    run(
        &ledger.sql,
        "update ledger.operations set due_at = clock_timestamp() where operation_id = 'broken'",
    )
    .await;
    let began = Instant::now();
    until("the other one runs", async || {
        agent.operation("broken").await["state"] == "succeeded"
    })
    .await;
    assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
    assert_eq!(agent.operation("held").await["state"], "running");
    ledger.open_the_gate().await;
    until("and the first one, too", async || {
        agent.operation("held").await["state"] == "succeeded"
    })
    .await;
    assert_eq!(ledger.effects("held").await, 1);
}

/// Two operations run alone at a time; more wait, claimed and without a lock on their rows.
const TWO_AT_A_TIME: &str = "[database]\nmax_connections = 6\napply_connections = 2\n";

#[tokio::test]
async fn a_living_process_keeps_its_claims_however_long_they_wait_or_run() {
    let ledger = handlers::ledger(&format!("{QUICK_RECOVERY}{TWO_AT_A_TIME}")).await;
    let second = ledger.second().await;
    let agent = ledger.agent();
    let ids = ["long-1", "long-2", "queued-1", "queued-2"];
    for id in ids {
        assert_eq!(agent.submit_with(id, "gated.alone", "{}", &ASYNC).await.status, 202);
    }
    ledger.at_the_gate(2).await;
    // Four leases and fifteen sweeps of each process.
    tokio::time::sleep(Duration::from_millis(1_600)).await;
    for id in ids {
        let operation = agent.at(second.address).operation(id).await;
        assert_eq!(
            (&operation["state"], events(&operation)),
            (&"running".into(), vec!["accepted"]),
            "{id}"
        );
    }
    ledger.open_the_gate().await;
    for id in ids {
        until("it is settled", async || {
            agent.operation(id).await["state"] == "succeeded"
        })
        .await;
        assert_eq!(
            (ledger.effects(id).await, &agent.operation(id).await["attempts"]),
            (1, &1.into())
        );
    }
}

#[tokio::test]
async fn a_process_that_comes_back_after_it_lost_a_claim_makes_no_second_effect() {
    let ledger = handlers::ledger(&format!("{QUICK_RECOVERY}{TWO_AT_A_TIME}")).await;
    let agent = ledger.agent();
    let process = Process::serve(&ledger.config_path, &ledger.service_url);
    let frozen = agent.at(process.address);
    for id in ["long-1", "long-2"] {
        frozen.submit_with(id, "gated.alone", "{}", &ASYNC).await;
    }
    ledger.at_the_gate(2).await;
    frozen.submit_with("queued", "note.alone", "{}", &ASYNC).await;
    process.signal(Signal::SIGSTOP);
    until("another process takes it over", async || {
        agent.operation("queued").await["state"] == "succeeded"
    })
    .await;
    let settled = agent.operation("queued").await;
    assert_eq!(events(&settled), ["accepted", "claim_lapsed", "claimed", "succeeded"]);
    process.signal(Signal::SIGCONT);
    ledger.open_the_gate().await;
    for id in ["long-1", "long-2"] {
        until("it is settled", async || {
            agent.operation(id).await["state"] == "succeeded"
        })
        .await;
        assert_eq!(ledger.effects(id).await, 1);
    }
    // The frozen process has come to the queued one when a later one of its own has passed it.
    frozen
        .submit_with("after", "note.alone", "{}", &[("prefer", "respond-async, wait=15")])
        .await
        .succeeded();
    assert_eq!(ledger.effects("queued").await, 1);
    assert_eq!(agent.operation("queued").await["history"], settled["history"]);
}
