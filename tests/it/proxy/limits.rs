//! Sizes and forms: what is too large to store, large and binary bodies, many at a time, preferences.

use std::time::{Duration, Instant};

use bytes::Bytes;
use sha2::{Digest, Sha256};
use tokio::task::JoinSet;

use super::{Bench, JSON};
use crate::support::downstream::{Gate, Script};

fn hex(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}

#[tokio::test]
async fn an_answer_too_large_to_store_reaches_its_first_caller_whole_and_is_never_sent_for_again() {
    const CAP: usize = 100_000;
    let bench = Bench::with(&format!("max_stored_body = {CAP}")).await;
    let other = bench.ledger.second().await;
    for (status, bytes) in [
        (200, CAP + 1),
        (201, 30 * CAP),
        (500, CAP + 1),
        (429, CAP + 1),
        (503, 5 * CAP),
    ] {
        let body: Vec<u8> = (0..bytes).map(|at| (at % 251) as u8).collect();
        let sent = body.clone();
        bench.pay.answers(move |_| {
            Script::with_lines(
                status,
                "Content-Type: x/y\r\nLocation: /big\r\nRetry-After: 1\r\n",
                &sent,
            )
        });
        let (key, path) = (format!("k{status}-{bytes}"), format!("/{status}/{bytes}"));
        let first = bench.post(&key, &path, "{}").await;
        if first.status == status {
            assert!(first.body == body, "{key}: {} of {bytes} bytes", first.body.len());
        } else {
            first.clone().is(410, "response-not-stored");
        }
        for client in [bench.agent(), bench.agent().at(other.address), bench.agent()] {
            let again = client
                .forward("POST", &key, &path, "{}")
                .await
                .is(410, "response-not-stored");
            let remains = &again.json()["response"];
            assert_eq!(remains["status"], status);
            assert_eq!(remains["size"], bytes);
            assert_eq!(remains["body_sha256"], hex(&body));
            assert!(
                remains["headers"]
                    .as_array()
                    .unwrap()
                    .contains(&serde_json::json!(["location", "/big"]))
            );
            client
                .forward("POST", &key, &path, "{\"a\":1}")
                .await
                .is(422, "fingerprint-mismatch");
        }
        assert_eq!(bench.pay.sends(&path), 1);
        let operation = bench.operation(&key).await;
        assert_eq!(operation["state"], if status < 400 { "succeeded" } else { "failed" });
        assert_eq!(operation["receipt"]["size"], bytes, "{operation}");
        assert_eq!(operation["receipt"]["body_sha256"], hex(&body));
    }
    // The last byte that fits.
    bench.pay.answers(|_| Script::answer(200, vec![b'x'; CAP]));
    let first = bench.post("fits", "/fits", "{}").await.succeeded();
    bench.is_replayed(&first, "fits", "/fits", "{}").await;
}

#[tokio::test]
async fn a_large_answer_that_is_cut_off_is_unknown_and_its_caller_notices() {
    let bench = Bench::with("max_stored_body = 1000").await;
    bench.pay.answers(|_| {
        Script::new()
            .then("HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n")
            .then(vec![b'x'; 50_000])
            .pause(Duration::from_millis(50))
            .reset()
    });
    let cut = bench.agent().try_forward("POST", "k", "/x", "{}").await;
    assert!(cut.is_err(), "half an answer looks whole: {cut:?}");
    bench.until("k", "needs_reconciliation").await;
    bench.post("k", "/x", "{}").await.is(409, "outcome-unknown");
    assert_eq!(bench.pay.count(), 1);
}

#[tokio::test]
async fn bodies_of_any_bytes_and_sizes_arrive_and_come_back_as_they_are() {
    let bench = Bench::with("max_request_bytes = 6000000\nmax_stored_body = 6000000").await;
    bench
        .pay
        .answers(|request| Script::with_lines(200, "Content-Type: application/octet-stream\r\n", &request.body));
    let bodies: [Vec<u8>; 5] = [
        Vec::new(),
        vec![0],
        (0..=255).collect(),
        b"{\"not json".to_vec(),
        (0..5_000_000_u32)
            .map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8)
            .collect(),
    ];
    for (number, body) in bodies.into_iter().enumerate() {
        let key = format!("k{number}");
        let lines = [("idempotency-key", key.as_str()), ("content-type", "application/json")];
        let body = Bytes::from(body);
        let send = async || {
            bench
                .agent()
                .try_send("POST", "/v1/proxy/pay/echo", &lines, body.clone())
                .await
                .unwrap()
        };
        let first = send().await.succeeded();
        assert!(first.body == body, "{number}");
        let again = send().await.succeeded();
        assert!(again.is_replay() && again.body == body, "{number}");
        let received = bench.pay.requests().pop().unwrap();
        assert!(received.body == body);
        assert_eq!(received.header("content-length"), body.len().to_string());
        let operation = bench.operation(&key).await;
        assert_eq!(operation["receipt"]["size"], body.len());
    }
    assert_eq!(bench.pay.count(), 5);
}

#[tokio::test]
async fn a_caller_that_will_not_wait_gets_202_and_finds_the_answer_later() {
    let bench = Bench::start().await;
    let gate = Gate::new();
    let held = gate.clone();
    bench
        .pay
        .answers(move |_| Script::new().gate(&held).before(Script::answer(201, "{\"id\":7}")));
    let lines = [("idempotency-key", "k"), JSON, ("prefer", "respond-async")];
    let send = async || bench.agent().send("POST", "/v1/proxy/pay/x", &lines, "{}").await;
    let accepted = send().await;
    assert_eq!(accepted.status, 202);
    assert_eq!(accepted.header("location"), "/v1/operations/k");
    assert_eq!(accepted.header("preference-applied"), "respond-async");
    assert_eq!(accepted.json()["state"], "running");
    bench.pay.received(1).await;
    assert_eq!(send().await.status, 409);
    let waited = Instant::now();
    let brief = [("idempotency-key", "k"), JSON, ("prefer", "wait=1")];
    let answer = bench.agent().send("POST", "/v1/proxy/pay/x", &brief, "{}").await;
    answer.is(409, "operation-in-progress");
    assert!(
        (900..3000).contains(&waited.elapsed().as_millis()),
        "{:?}",
        waited.elapsed()
    );
    gate.open();
    bench.until("k", "succeeded").await;
    let first = send().await;
    assert_eq!((first.status, first.is_replay()), (201, true));
    assert_eq!(first.json()["id"], 7);
    assert_eq!(bench.pay.count(), 1);
}

#[tokio::test]
async fn no_more_requests_are_under_way_than_the_downstream_may_get() {
    let bench = Bench::with("concurrency = 3\nconnect_timeout = \"500ms\"").await;
    let gate = Gate::new();
    let held = gate.clone();
    bench
        .pay
        .answers(move |_| Script::new().gate(&held).before(Script::answer(200, "{}")));
    let mut senders = JoinSet::new();
    for number in 0..8 {
        let agent = bench.agent();
        senders.spawn(async move {
            let key = format!("k{number}");
            (key.clone(), agent.forward("POST", &key, &format!("/{key}"), "{}").await)
        });
    }
    bench.pay.received(3).await;
    let mut refused = Vec::new();
    for _ in 0..5 {
        let (key, answer) = senders.join_next().await.unwrap().unwrap();
        answer.is(429, "rate-limited");
        refused.push(key);
    }
    assert_eq!(bench.pay.count(), 3);
    gate.open();
    for (_, answer) in senders.join_all().await {
        answer.succeeded();
    }
    for key in refused {
        bench.post(&key, &format!("/{key}"), "{}").await.succeeded();
        assert_eq!(bench.pay.sends(&format!("/{key}")), 1);
    }
}

/// A hundred requests wait for a downstream; whoever does not need it notices nothing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_hanging_downstream_holds_no_transaction_and_slows_nobody_else() {
    let bench = Bench::set_up("", "[database]\nmax_connections = 10\n").await;
    let gate = Gate::new();
    let held = gate.clone();
    bench
        .pay
        .answers(move |_| Script::new().gate(&held).before(Script::answer(200, "{}")));
    let mut senders = JoinSet::new();
    for number in 0..100 {
        let agent = bench.agent();
        senders.spawn(async move {
            let key = format!("k{number}");
            agent.forward("POST", &key, &format!("/{key}"), "{}").await
        });
    }
    bench.pay.received(100).await;
    let mut slowest = Duration::ZERO;
    for number in 0..100 {
        let began = Instant::now();
        bench
            .agent()
            .deposit(&format!("o{number}"), "acct-1", 1)
            .await
            .succeeded();
        slowest = slowest.max(began.elapsed());
        let open = "select count(*) from pg_stat_activity where datname = current_database() and usename = 'opledger' \
                    and xact_start < clock_timestamp() - interval '300 milliseconds'";
        assert_eq!(bench.ledger.count(open).await, 0, "a transaction is open");
    }
    println!("slowest: {slowest:?}");
    assert!(slowest < Duration::from_secs(1), "{slowest:?}");
    assert_eq!(
        bench
            .ledger
            .count("select count(*) from ledger.operations where state = 'running'")
            .await,
        100
    );
    gate.open();
    for answer in senders.join_all().await {
        assert!(!answer.succeeded().is_replay());
    }
    assert_eq!(bench.pay.count(), 100);
}
