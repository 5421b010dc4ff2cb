//! Claims: of all the deliveries of one operation, one performs it, and the others are told what it came to.

use std::collections::HashSet;
use std::sync::Arc;
use std::time::Duration;

use sqlx::{Connection, PgConnection};
use tokio::sync::Barrier;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::support::handlers::{self, WAYS};
use crate::support::process::Process;
use crate::support::{Answer, Client, Ledger, until};

/// Each is fifty requests at once; 60 take about nine seconds on two shared cores.
const BURSTS: usize = 60;

/// Panics unless it is the receipt (first or replayed) or a polite "later".
fn result_or_busy(answer: &Answer) {
    match answer.status {
        200 => {}
        409 => assert_busy(answer),
        _ => panic!("{} {}", answer.status, String::from_utf8_lossy(&answer.body)),
    }
}

fn assert_busy(answer: &Answer) {
    assert_eq!((answer.status, answer.code().as_str()), (409, "operation-in-progress"));
    assert!(answer.header("retry-after").parse::<u32>().unwrap() >= 1);
    assert_eq!(answer.json()["retryable"], true);
}

/// No answer of a service so far was a 5xx, by its own count.
async fn assert_no_server_error(client: &Client) {
    let metrics = client.get("/metrics").await;
    let text = String::from_utf8(metrics.body.to_vec()).unwrap();
    let failed: Vec<&str> = text.lines().filter(|line| line.contains("status=\"5")).collect();
    assert!(failed.is_empty(), "{failed:?}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn fifty_copies_at_once_on_two_services_have_one_effect_and_one_receipt() {
    let ledger = Ledger::start().await;
    let second = ledger.second().await;
    let clients = [ledger.agent(), ledger.agent().at(second.address)];
    for round in 0..BURSTS {
        // An account a round: its balance counts the round's effects.
        let account = format!("acct-{}", round + 1);
        let id = format!("acme:burst:{round}");
        let barrier = Arc::new(Barrier::new(50));
        let mut copies = JoinSet::new();
        for copy in 0..50 {
            let (client, barrier) = (clients[copy % 2].clone(), barrier.clone());
            let (id, account) = (id.clone(), account.clone());
            copies.spawn(async move {
                barrier.wait().await;
                client.deposit(&id, &account, 1).await
            });
        }
        let answers = copies.join_all().await;
        answers.iter().for_each(result_or_busy);
        let receipts: HashSet<_> = answers
            .iter()
            .filter(|one| one.status == 200)
            .map(|one| one.body.clone())
            .collect();
        assert_eq!(receipts.len(), 1, "round {round}: one receipt");
        let first = answers
            .iter()
            .filter(|one| one.status == 200 && !one.is_replay())
            .count();
        assert!(first <= 1, "round {round}: {first} first results");
        for client in &clients {
            let again = client.deposit(&id, &account, 1).await.succeeded();
            assert!(again.is_replay() && receipts.contains(&again.body));
        }
        assert_eq!(ledger.balance(&account).await, 1_000_001, "round {round}: one effect");
    }
    for client in &clients {
        assert_no_server_error(client).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn of_two_payloads_under_one_id_the_loser_leaves_no_trace() {
    let ledger = handlers::ledger("").await;
    let second = ledger.second().await;
    let clients = [ledger.agent(), ledger.agent().at(second.address)];
    for round in 0..200 {
        let id = format!("race-{round}");
        let kind = ["note", "note.alone"][round % 2];
        let barrier = Arc::new(Barrier::new(2));
        let mut rivals = JoinSet::new();
        for (number, payload) in [r#"{"is":"A"}"#, r#"{"is":"B"}"#].into_iter().enumerate() {
            // Every other pair meets in one process.
            let client = clients[number * (round / 2 % 2)].clone();
            let (barrier, id) = (barrier.clone(), id.clone());
            rivals.spawn(async move {
                barrier.wait().await;
                (payload, client.submit(&id, kind, payload).await)
            });
        }
        let answers = rivals.join_all().await;
        let (winner, receipt) = answers
            .iter()
            .find(|(_, answer)| answer.status == 200)
            .expect("one wins");
        let (_, loser) = answers
            .iter()
            .find(|(_, answer)| answer.status != 200)
            .expect("one loses");
        loser.clone().is(422, "fingerprint-mismatch");
        assert!(!receipt.is_replay());
        let applied: Vec<String> = sqlx::query_scalar("select payload::text from it.effects where operation_id = $1")
            .bind(&id)
            .fetch_all(&ledger.sql)
            .await
            .unwrap();
        assert_eq!(
            applied.concat().replace(' ', ""),
            **winner,
            "round {round}: the winner's effect alone"
        );
        let operation = clients[0].operation(&id).await;
        assert_eq!(operation["fingerprint"], receipt.json()["fingerprint"]);
        assert_eq!(operation["deliveries"], 1);
        let succeeded = operation["history"]
            .as_array()
            .unwrap()
            .iter()
            .filter(|event| event["event"] == "succeeded");
        assert_eq!(succeeded.count(), 1);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn losing_the_insert_race_is_no_error() {
    let ledger = handlers::ledger("").await;
    let second = ledger.second().await;
    let clients = [ledger.agent(), ledger.agent().at(second.address)];
    for (round, way) in WAYS.iter().cycle().take(10).enumerate() {
        let (id, kind) = (format!("inserted-{round}"), format!("note{way}"));
        // Whatever a delivery reads before it claims, it has read when it waits for this lock.
        let mut barrier = PgConnection::connect(&ledger.owner_url).await.unwrap();
        let held = "begin; lock table ledger.operations in share mode";
        sqlx::raw_sql(held).execute(&mut barrier).await.unwrap();
        let mut rivals = JoinSet::new();
        for client in clients.clone() {
            let (id, kind) = (id.clone(), kind.clone());
            rivals.spawn(async move { client.submit(&id, &kind, "{}").await });
        }
        let waiting =
            "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'";
        until("both wait to insert", async || ledger.count(waiting).await == 2).await;
        sqlx::raw_sql("commit").execute(&mut barrier).await.unwrap();
        let answers = rivals.join_all().await;
        answers.iter().for_each(result_or_busy);
        assert_eq!(
            answers
                .iter()
                .filter(|answer| answer.status == 200 && !answer.is_replay())
                .count(),
            1
        );
        assert_eq!(ledger.effects(&id).await, 1);
    }
    for client in &clients {
        assert_no_server_error(client).await;
    }
}

#[tokio::test]
async fn duplicates_one_after_another_are_replays_or_refusals_and_never_errors() {
    let ledger = handlers::ledger("").await;
    let second = ledger.second().await;
    for way in WAYS {
        let (id, kind, other) = (format!("again{way}"), format!("note{way}"), format!("brief{way}"));
        let first = ledger.agent().submit(&id, &kind, r#"{"n":1}"#).await.succeeded();
        // The second service asks the database; the first one remembers.
        for client in [ledger.agent(), ledger.agent().at(second.address)] {
            let again = client.submit(&id, &kind, r#"{"n":1}"#).await.succeeded();
            assert!(again.is_replay());
            assert_eq!(again.body, first.body);
            client
                .submit(&id, &kind, r#"{"n":2}"#)
                .await
                .is(422, "fingerprint-mismatch");
            client
                .submit(&id, &other, r#"{"n":1}"#)
                .await
                .is(422, "fingerprint-mismatch");
        }
        assert_eq!(ledger.effects(&id).await, 1);
    }
}

/// A rival outside our control that claims an id, and its transaction is still open.
struct OpenClaim(PgConnection);

impl OpenClaim {
    /// Inserts what a first delivery would have written, copied from a settled operation of the same request.
    async fn of(ledger: &Ledger, id: &str, model: &str) -> Self {
        let mut rival = PgConnection::connect(&ledger.owner_url).await.unwrap();
        sqlx::raw_sql("begin").execute(&mut rival).await.unwrap();
        for copy in [
            "insert into ledger.operations select (jsonb_populate_record(o, jsonb_build_object('operation_id', $1))).* \
             from ledger.operations o where operation_id = $2",
            "insert into ledger.receipts select (jsonb_populate_record(r, jsonb_build_object('operation_id', $1))).* \
             from ledger.receipts r where operation_id = $2",
            "insert into ledger.history select (jsonb_populate_record(h, jsonb_build_object('operation_id', $1))).* \
             from ledger.history h where operation_id = $2",
        ] {
            sqlx::query(copy)
                .bind(id)
                .bind(model)
                .execute(&mut rival)
                .await
                .unwrap();
        }
        Self(rival)
    }

    async fn end(mut self, how: &'static str) {
        sqlx::raw_sql(how).execute(&mut self.0).await.unwrap();
    }
}

#[tokio::test]
async fn a_delivery_during_an_open_claim_is_told_what_the_claim_came_to() {
    let ledger = handlers::ledger("").await;
    let agent = ledger.agent();
    for way in WAYS {
        let kind = format!("note{way}");
        let model = format!("model{way}");
        let receipt = agent.submit(&model, &kind, "{}").await.succeeded();

        let id = format!("committed{way}");
        let rival = OpenClaim::of(&ledger, &id, &model).await;
        let began = Instant::now();
        let ((), answer) = tokio::join!(
            async {
                tokio::time::sleep(Duration::from_millis(500)).await;
                rival.end("commit").await;
            },
            agent.submit(&id, &kind, "{}")
        );
        assert!(began.elapsed() >= Duration::from_millis(500), "it waited for the claim");
        assert!(answer.succeeded().is_replay());
        assert_eq!(agent.submit(&id, &kind, "{}").await.succeeded().body, receipt.body);
        assert_eq!(ledger.effects(&id).await, 0, "the effect is the rival's");

        let id = format!("rolled-back{way}");
        let rival = OpenClaim::of(&ledger, &id, &model).await;
        let ((), answer) = tokio::join!(
            async {
                tokio::time::sleep(Duration::from_millis(500)).await;
                rival.end("rollback").await;
            },
            agent.submit(&id, &kind, "{}")
        );
        assert!(!answer.succeeded().is_replay(), "the id was free after all");
        assert_eq!(ledger.effects(&id).await, 1);
    }
    assert_no_server_error(&agent).await;
}

#[tokio::test]
async fn a_delivery_that_waited_long_enough_for_an_open_claim_is_told_to_come_back() {
    let ledger = handlers::ledger("[limits]\nduplicate_wait = \"300ms\"\n").await;
    let agent = ledger.agent();
    agent.submit("model", "note", "{}").await.succeeded();
    let before = ledger.rows().await;
    let rival = OpenClaim::of(&ledger, "open", "model").await;
    for way in WAYS {
        assert_busy(&agent.submit("open", &format!("note{way}"), "{}").await);
        // Nothing is promised while the rival may still roll back: a 202 would be a promise.
        for preference in ["respond-async", "wait=1"] {
            let answer = agent
                .submit_with("open", &format!("note{way}"), "{}", &[("prefer", preference)])
                .await;
            assert_busy(&answer);
        }
    }
    let plan = r#"{"operation_id":"open","kind":"note","payload":{},"mode":"plan"}"#;
    assert_busy(&agent.post("/v1/operations", plan).await);
    assert_eq!(ledger.rows().await, before);
    rival.end("commit").await;
    assert!(agent.submit("open", "note", "{}").await.succeeded().is_replay());
    assert_no_server_error(&agent).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_success_carries_a_receipt_of_its_own() {
    const WORKERS: usize = 50;
    const EACH: usize = 100;
    let ledger = Ledger::start().await;
    let second = ledger.second().await;
    let mut workers = JoinSet::new();
    for worker in 0..WORKERS {
        let client = if worker % 2 == 0 {
            ledger.agent()
        } else {
            ledger.agent().at(second.address)
        };
        workers.spawn(async move {
            let mut receipts = Vec::new();
            for number in 0..EACH {
                let answer = client
                    .deposit(&format!("w{worker}:{number}"), &format!("acct-{}", worker + 1), 1)
                    .await;
                match answer.status {
                    200 => receipts.push(answer.json()["operation_id"].as_str().unwrap().to_owned()),
                    status => assert!(status >= 400, "{status}"),
                }
            }
            receipts
        });
    }
    let receipts = workers.join_all().await.concat();
    let distinct: HashSet<&String> = receipts.iter().collect();
    assert_eq!(distinct.len(), receipts.len());
    let effects = ledger
        .count("select sum(balance - 1000000)::bigint from shop.accounts where tenant_id = 'demo'")
        .await;
    assert_eq!(receipts.len(), usize::try_from(effects).unwrap());
    assert_eq!(ledger.count("select count(*) from ledger.receipts").await, effects);
    assert_eq!(receipts.len(), WORKERS * EACH, "nothing here is a reason to refuse");
}

#[tokio::test]
async fn another_kind_under_the_id_disturbs_neither_the_owner_nor_its_recovery() {
    let ledger = handlers::ledger("[recovery]\nheartbeat = \"100ms\"\nlease = \"400ms\"\nsweep = \"100ms\"\n").await;
    // This service must not be the one that recovers.
    let (config, url) = (ledger.config_path.clone(), ledger.service_url.clone());
    let agent = ledger.agent();
    let mut process = Process::serve(&config, &url);
    let to_process = agent.at(process.address);
    ledger.running.app.pool.close().await;
    let asynchronously = [("prefer", "respond-async")];
    let accepted = to_process
        .submit_with("x", "gated.alone", r#"{"n":1}"#, &asynchronously)
        .await;
    assert_eq!(accepted.status, 202);
    ledger.at_the_gate(1).await;
    let before = ledger.rows().await;
    for kind in ["note", "note.alone", "gated"] {
        to_process
            .submit("x", kind, r#"{"n":1}"#)
            .await
            .is(422, "fingerprint-mismatch");
        to_process
            .submit_with("x", kind, r#"{"n":1}"#, &asynchronously)
            .await
            .is(422, "fingerprint-mismatch");
    }
    assert_eq!(ledger.rows().await, before);
    process.kill();
    let restarted = Process::serve(&config, &url);
    ledger.open_the_gate().await;
    let agent = agent.at(restarted.address);
    agent
        .submit("x", "note", r#"{"n":1}"#)
        .await
        .is(422, "fingerprint-mismatch");
    until("the owner's operation is settled", async || {
        agent.operation("x").await["state"] == "succeeded"
    })
    .await;
    let operation = agent.operation("x").await;
    let events: Vec<_> = operation["history"]
        .as_array()
        .unwrap()
        .iter()
        .map(|change| &change["event"])
        .collect();
    assert_eq!(
        events,
        ["accepted", "claim_lapsed", "claimed", "succeeded"]
            .iter()
            .collect::<Vec<_>>()
    );
    assert_eq!(
        (operation["kind"].as_str(), ledger.effects("x").await),
        (Some("gated.alone"), 1)
    );
}

#[tokio::test]
async fn a_long_call_sent_again_is_busy_or_waits_and_has_one_effect() {
    const KIND: &str = "gated.alone";
    let ledger = handlers::ledger("[limits]\nduplicate_wait = \"300ms\"\n").await;
    let second = ledger.second().await;
    let agent = ledger.agent();
    let first = tokio::spawn({
        let agent = agent.clone();
        async move { agent.submit("long", KIND, "{}").await }
    });
    ledger.at_the_gate(1).await;
    // The engine sends it again, to the same worker and to another one.
    assert_busy(&agent.submit("long", KIND, "{}").await);
    assert_busy(&agent.at(second.address).submit("long", KIND, "{}").await);
    let waiting: Vec<_> = [agent.clone(), agent.at(second.address)]
        .into_iter()
        .map(|client| {
            let patient = [("prefer", "wait=15")];
            tokio::spawn(async move { client.submit_with("long", KIND, "{}", &patient).await })
        })
        .collect();
    ledger.open_the_gate().await;
    let receipt = first.await.unwrap().succeeded();
    for waited in waiting {
        let answer = waited.await.unwrap().succeeded();
        assert!(answer.is_replay());
        assert_eq!(answer.body, receipt.body);
    }
    // And once more from a checkpoint.
    assert!(agent.submit("long", KIND, "{}").await.succeeded().is_replay());
    assert_eq!(ledger.effects("long").await, 1);
}

#[tokio::test]
async fn slow_operations_and_their_duplicates_delay_no_other() {
    let ledger = handlers::ledger("").await;
    let agent = ledger.agent();
    let mut slow = JoinSet::new();
    for number in 0..3 {
        // One of each runs; thirty wait for it.
        for _ in 0..30 {
            let agent = agent.clone();
            slow.spawn(async move { agent.submit(&format!("slow-{number}"), "gated.alone", "{}").await });
        }
    }
    ledger.at_the_gate(3).await;
    let began = Instant::now();
    for number in 0..20 {
        agent.deposit(&format!("quick-{number}"), "acct-1", 1).await.succeeded();
        agent
            .submit(&format!("quick-alone-{number}"), "note.alone", "{}")
            .await
            .succeeded();
        agent.operation(&format!("quick-{number}")).await;
    }
    assert!(began.elapsed() < Duration::from_secs(4), "{:?}", began.elapsed());
    ledger.open_the_gate().await;
    for answer in slow.join_all().await {
        result_or_busy(&answer);
    }
    for number in 0..3 {
        assert_eq!(ledger.effects(&format!("slow-{number}")).await, 1);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn duplicates_of_a_slow_operation_take_no_place_where_others_run() {
    // Two operations run alone at a time.
    let ledger = handlers::ledger("[database]\nmax_connections = 6\napply_connections = 2\n").await;
    let agent = ledger.agent();
    let submit = |id: String, kind: &'static str, payload: &'static str| {
        let agent = agent.clone();
        tokio::spawn(async move { agent.submit(&id, kind, payload).await })
    };
    let ahead: Vec<_> = (0..2)
        .map(|number| submit(format!("ahead-{number}"), "gated.alone", r#"{"gate":"first"}"#))
        .collect();
    ledger.at_the_gate(2).await;
    let copies: Vec<_> = (0..20)
        .map(|_| submit("slow".to_owned(), "gated.alone", r#"{"gate":"second"}"#))
        .collect();
    // Time for the copies to arrive before the other one does; were it too short, the test would only ask for less.
    tokio::time::sleep(Duration::from_millis(300)).await;
    let behind = submit("behind".to_owned(), "note.alone", "{}");
    tokio::time::sleep(Duration::from_millis(100)).await;
    let began = Instant::now();
    ledger.open_gate("first").await;
    behind.await.unwrap().succeeded();
    assert!(began.elapsed() < Duration::from_secs(2), "{:?}", began.elapsed());
    ledger.open_gate("second").await;
    for answer in ahead.into_iter().chain(copies) {
        answer.await.unwrap().succeeded();
    }
    assert_eq!(ledger.effects("slow").await, 1);
}

#[tokio::test]
async fn busy_is_not_a_mismatch() {
    let ledger = handlers::ledger("[limits]\nduplicate_wait = \"200ms\"\n").await;
    let agent = ledger.agent();
    let first = tokio::spawn({
        let agent = agent.clone();
        async move { agent.submit("one", "gated.alone", r#"{"n":1}"#).await }
    });
    ledger.at_the_gate(1).await;
    let busy = agent.submit("one", "gated.alone", r#"{"n":1}"#).await;
    assert_busy(&busy);
    let mismatch = agent
        .submit("one", "gated.alone", r#"{"n":2}"#)
        .await
        .is(422, "fingerprint-mismatch");
    assert_eq!(
        (&busy.json()["retryable"], &mismatch.json()["retryable"]),
        (&true.into(), &false.into())
    );
    assert_eq!(mismatch.header("retry-after"), "");
    ledger.open_the_gate().await;
    first.await.unwrap().succeeded();
    agent
        .submit("one", "gated.alone", r#"{"n":2}"#)
        .await
        .is(422, "fingerprint-mismatch");
}
