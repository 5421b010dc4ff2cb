//! Attempts that are known not to have acted: how often, how soon, and for how long they are followed by another.

use std::time::Duration;

use serde_json::Value;
use sqlx::{Connection, PgConnection};

use super::{Bench, JSON, events};
use crate::support::downstream::{Downstream, Script};
use crate::support::{Answer, Ledger, Setup, until};

const KEY: &str = "[[routes]]\npath = \"/**\"\nidempotency = \"key\"\nkey_retention = \"24h\"\n\
                   retry = { first_delay = \"50ms\", longest_delay = \"100ms\" }\n";

/// Without waiting for what may still settle.
async fn at_once(bench: &Bench, key: &str) -> Answer {
    let lines = [("idempotency-key", key), JSON, ("prefer", "wait=0")];
    bench
        .agent()
        .send("POST", &format!("/v1/proxy/pay/{key}"), &lines, "{}")
        .await
}

#[tokio::test]
async fn retry_after_is_honoured_capped_and_ignored_where_it_is_rubbish() {
    let bench = Bench::with(KEY).await;
    let date = "Date: Wed, 21 Oct 2026 07:28:00 GMT\r\n";
    let waits = [
        ("seconds", "Retry-After: 7\r\n".to_owned(), 7.0),
        (
            "date",
            format!("{date}Retry-After: Wed, 21 Oct 2026 07:28:09 GMT\r\n"),
            9.0,
        ),
        (
            "past",
            format!("{date}Retry-After: Wed, 21 Oct 2020 07:28:09 GMT\r\n"),
            0.0,
        ),
        ("negative", "Retry-After: -7\r\n".to_owned(), 0.0),
        ("rubbish", "Retry-After: soon\r\n".to_owned(), 0.0),
        ("absent", String::new(), 0.0),
    ];
    for (key, lines, at_least) in waits {
        let before = bench.pay.count();
        bench.pay.answers(move |request| {
            if request.number == before {
                Script::with_lines(429, &lines, "{}")
            } else {
                Script::answer(200, "{}")
            }
        });
        let accepted = at_once(&bench, key).await;
        if at_least > 0.0 {
            assert_eq!(
                (accepted.status, accepted.json()["state"].as_str()),
                (202, Some("retry_wait")),
                "{key}"
            );
            let due = "select extract(epoch from o.due_at - h.at)::float8 from ledger.operations o \
                       join ledger.history h using (operation_id) where o.operation_id = $1 and h.state = 'retry_wait'";
            let due: f64 = sqlx::query_scalar(due)
                .bind(key)
                .fetch_one(&bench.ledger.sql)
                .await
                .unwrap();
            assert!((at_least - 0.01..at_least + 0.5).contains(&due), "{key}: {due}");
        } else {
            bench.until(key, "succeeded").await;
        }
    }
}

#[tokio::test]
async fn a_wait_that_nobody_has_time_for_is_an_answer() {
    let bench = Bench::with(KEY).await;
    for wait in ["601", "1000000000000", "99999999999999999999999999"] {
        let lines = format!("Retry-After: {wait}\r\n");
        bench
            .pay
            .answers(move |_| Script::with_lines(429, &lines, "{\"error\":\"slow down\"}"));
        let first = bench.post(wait, &format!("/{wait}"), "{}").await;
        assert_eq!((first.status, first.header("retry-after")), (429, wait));
        assert_eq!(first.json()["error"], "slow down");
        bench.is_replayed(&first, wait, &format!("/{wait}"), "{}").await;
    }
}

#[tokio::test]
async fn the_caller_waits_for_a_retry_and_gets_its_answer() {
    let bench = Bench::with(KEY).await;
    bench.pay.answers(|request| match request.number {
        0 => Script::with_lines(503, "Retry-After: 1\r\n", "{}"),
        1 => Script::answer(429, "{}"),
        _ => Script::answer(201, "{\"id\":1}"),
    });
    let began = std::time::Instant::now();
    let first = bench.post("k", "/x", "{}").await;
    assert_eq!(first.status, 201);
    assert!(began.elapsed() >= Duration::from_secs(1), "{:?}", began.elapsed());
    let requests = bench.pay.requests();
    assert_eq!(requests.len(), 3);
    assert!(requests.iter().all(|request| request.lines == requests[0].lines));
    let operation = bench.operation("k").await;
    assert_eq!((&operation["attempts"], &operation["effects"]), (&3.into(), &1.into()));
}

#[tokio::test]
async fn retries_come_to_an_end_with_the_last_answer() {
    let bench = Bench::with(&KEY.replace("first_delay", "max_attempts = 3, first_delay")).await;
    bench
        .pay
        .answers(|request| Script::answer(429, format!("{{\"try\":{}}}", request.number)));
    let first = bench.post("k", "/x", "{}").await;
    assert_eq!((first.status, &first.json()["try"]), (429, &Value::from(2)));
    bench.is_replayed(&first, "k", "/x", "{}").await;
    assert_eq!(bench.pay.count(), 3);
}

#[tokio::test]
async fn where_a_second_send_is_not_safe_being_told_to_wait_is_the_answer() {
    let bench = Bench::start().await;
    for status in [429, 503] {
        bench
            .pay
            .answers(move |_| Script::with_lines(status, "Retry-After: 1\r\n", "{}"));
        let key = format!("k{status}");
        let first = bench.post(&key, &format!("/{key}"), "{}").await;
        assert_eq!((first.status, first.header("retry-after")), (status, "1"));
        bench.nothing_more_is_sent().await;
        bench.is_replayed(&first, &key, &format!("/{key}"), "{}").await;
        assert_eq!(bench.pay.sends(&format!("/{key}")), 1);
    }
}

#[tokio::test]
async fn a_payload_that_differs_is_refused_while_a_retry_waits() {
    let bench = Bench::with(KEY).await;
    bench
        .pay
        .answers(|_| Script::with_lines(429, "Retry-After: 60\r\n", "{}"));
    assert_eq!(at_once(&bench, "k").await.status, 202);
    assert_eq!(at_once(&bench, "k").await.status, 202);
    bench.post("k", "/k", "{\"a\":1}").await.is(422, "fingerprint-mismatch");
    assert_eq!(bench.pay.count(), 1);
}

/// The connection is there when the operation is claimed, and gone with its peer when it is to be sent.
async fn not_sent_after_its_claim(attempts: u32) -> (Ledger, Downstream, Answer) {
    let pay = Downstream::start().await;
    let address = pay.address;
    let route =
        format!("[[routes]]\npath = \"/**\"\nretry = {{ max_attempts = {attempts}, first_delay = \"100ms\" }}\n");
    let ledger = Ledger::with(Setup {
        config: format!("{}{}", super::SWEEPS, pay.config("pay", &route)),
        sql: String::new(),
    })
    .await;
    let agent = ledger.agent();
    let mut holder = PgConnection::connect(&ledger.owner_url).await.unwrap();
    sqlx::raw_sql("begin; lock table ledger.operations in share mode")
        .execute(&mut holder)
        .await
        .unwrap();
    let sender = tokio::spawn({
        let agent = agent.clone();
        async move { agent.forward("POST", "k", "/x", "{}").await }
    });
    let waiting =
        "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'";
    until("it waits for its claim", async || ledger.count(waiting).await == 1).await;
    assert_eq!((pay.connections(), pay.count()), (1, 0), "connected, and nothing sent");
    drop(pay);
    until("the downstream is gone", async || {
        tokio::net::TcpStream::connect(address).await.is_err()
    })
    .await;
    sqlx::raw_sql("commit").execute(&mut holder).await.unwrap();
    if attempts > 1 {
        let not_sent = "select count(*) from ledger.history where reason like '%connect%' and state = 'retry_wait'";
        until("it is known not to be sent", async || ledger.count(not_sent).await >= 1).await;
        let pay = Downstream::start_at(address).await;
        return (ledger, pay, sender.await.unwrap());
    }
    let answer = sender.await.unwrap();
    (ledger, Downstream::start_at(address).await, answer)
}

#[tokio::test]
async fn what_turns_out_not_to_be_sent_after_the_claim_is_tried_again() {
    let (ledger, pay, answer) = not_sent_after_its_claim(5).await;
    answer.succeeded();
    let operation = ledger.agent().operation("k").await;
    assert!(events(&operation).contains(&"retry_scheduled"), "{operation}");
    assert_eq!(operation["effects"], 1);
    assert_eq!(pay.count(), 1);
}

#[tokio::test]
async fn what_was_never_sent_and_has_no_attempt_left_spends_no_key() {
    let (ledger, pay, answer) = not_sent_after_its_claim(1).await;
    answer.is(502, "downstream-unreachable");
    assert_eq!(ledger.count("select count(*) from ledger.operations").await, 0);
    ledger.agent().forward("POST", "k", "/x", "{}").await.succeeded();
    assert_eq!(pay.count(), 1);
}
