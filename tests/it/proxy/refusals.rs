//! Our own refusals: nothing is sent, nothing is stored, and the same key runs later.

use sqlx::{Connection, PgConnection};
use tokio::task::JoinSet;

use super::{Bench, JSON};
use crate::support::until;

#[tokio::test]
async fn a_refusal_of_ours_is_never_a_result() {
    let bench = Bench::with("max_request_bytes = 1000").await;
    let lines = [("idempotency-key", "k"), JSON];
    let target = "/v1/proxy/pay/charges";
    let agent = bench.agent();
    agent
        .with_key("opl_demo_nobody")
        .send("POST", target, &lines, "{}")
        .await
        .is(401, "unauthenticated");
    for role in ["operator", "admin", "approver"] {
        let other = bench.ledger.client(role);
        other.send("POST", target, &lines, "{}").await.is(403, "forbidden");
    }
    agent
        .send("POST", target, &lines, &"x".repeat(1001))
        .await
        .is(413, "too-large");
    agent
        .send("POST", "/v1/proxy/nobody/charges", &lines, "{}")
        .await
        .is(404, "not-found");
    agent
        .send("POST", "/v1/proxy/p%61y/charges", &lines, "{}")
        .await
        .is(404, "not-found");
    agent
        .send("TRACE", target, &lines, "")
        .await
        .is(405, "method-not-allowed");
    let twice = [("idempotency-key", "k"), ("idempotency-key", "k")];
    agent.send("POST", target, &twice, "{}").await.is(400, "key-conflict");
    // One would be compared, and both be sent.
    let types = [
        ("idempotency-key", "k"),
        ("content-type", "application/json"),
        ("content-type", "text/plain"),
    ];
    agent
        .send("POST", target, &types, "{}")
        .await
        .is(400, "request-invalid");
    agent
        .send("GET", target, &types[1..], "")
        .await
        .is(400, "request-invalid");
    for upgrade in ["websocket", "h2c"] {
        let lines = [
            ("idempotency-key", "k"),
            ("connection", "upgrade"),
            ("upgrade", upgrade),
        ];
        agent.send("POST", target, &lines, "").await.is(400, "request-invalid");
        agent
            .send("GET", target, &lines[1..], "")
            .await
            .is(400, "request-invalid");
    }
    assert_eq!(bench.pay.connections(), 0);
    agent.get("/v1/operations/k").await.is(404, "not-found");
    agent.send("POST", target, &lines, &"x".repeat(1000)).await.succeeded();
    assert_eq!(bench.pay.count(), 1);
}

#[tokio::test]
async fn a_key_that_does_not_cover_the_downstream_gets_neither_it_nor_what_is_stored() {
    let bench = Bench::start().await;
    bench.post("k", "/charges", "{}").await.succeeded();
    let limit = "update ledger.api_keys set kinds = $1 where role = 'agent'";
    let kinds = async |kinds: &str| {
        sqlx::query(limit)
            .bind(vec![kinds.to_owned()])
            .execute(&bench.ledger.sql)
            .await
            .unwrap();
    };
    kinds("proxy.other").await;
    // The service may remember keys for a moment.
    until("the right is withdrawn", async || {
        bench.post("new", "/charges", "{}").await.status == 403
    })
    .await;
    let sent = bench.pay.count();
    bench.post("k", "/charges", "{}").await.is(403, "forbidden");
    bench
        .agent()
        .send("GET", "/v1/proxy/pay/charges", &[], "")
        .await
        .is(403, "forbidden");
    assert_eq!(bench.pay.count(), sent);
    kinds("proxy.pay").await;
    until("the right is back", async || {
        bench.post("k", "/charges", "{}").await.status == 200
    })
    .await;
}

#[tokio::test]
async fn what_finds_no_place_in_the_queue_is_told_to_come_back() {
    let bench = Bench::set_up("", "[limits]\nmax_queued = 1\n").await;
    let mut holder = PgConnection::connect(&bench.ledger.owner_url).await.unwrap();
    let lock = "begin; lock table ledger.operations in share mode";
    sqlx::raw_sql(lock).execute(&mut holder).await.unwrap();
    let mut senders = JoinSet::new();
    for number in 0..12 {
        let agent = bench.agent();
        senders.spawn(async move {
            let key = format!("k{number}");
            let answer = agent.forward("POST", &key, &format!("/{key}"), "{}").await;
            (key, answer)
        });
    }
    let answers = senders.join_all().await;
    assert_eq!(bench.pay.count(), 0, "nothing is sent before its claim is committed");
    sqlx::raw_sql("commit").execute(&mut holder).await.unwrap();
    let limited = answers.iter().filter(|(_, answer)| answer.status == 429);
    assert!(limited.count() > 0);
    for (key, answer) in answers {
        match answer.status {
            429 => assert!(
                answer
                    .is(429, "rate-limited")
                    .header("retry-after")
                    .parse::<u32>()
                    .unwrap()
                    >= 1
            ),
            // Whose claim waited for the lock in vain.
            409 => drop(answer.is(409, "operation-in-progress")),
            503 => drop(answer.is(503, "ledger-unavailable")),
            status => panic!("{key}: {status}"),
        }
        until("it runs", async || {
            bench.post(&key, &format!("/{key}"), "{}").await.status == 200
        })
        .await;
        assert_eq!(bench.pay.sends(&format!("/{key}")), 1, "{key}");
    }
}
