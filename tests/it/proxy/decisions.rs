//! People end what nobody can know: each verdict, and who may not decide, or not yet, or not about this.

use serde_json::{Value, json};

use super::{Bench, events, lost_at_first};
use crate::support::downstream::Script;
use crate::support::until;

const BRIEF: &str =
    "head_timeout = \"300ms\"\nidle_timeout = \"300ms\"\n[[routes]]\npath = \"/**\"\nmax_in_flight = \"1s\"\n";

/// A ledger in which `k` is unknown after one send, and its version.
async fn unknown(lines: &str) -> (Bench, i64) {
    let bench = Bench::with(lines).await;
    bench
        .pay
        .answers(lost_at_first(|_| Script::answer(201, "{\"id\":\"ch_2\"}")));
    bench.post("k", "/charges", "{}").await.is(409, "outcome-unknown");
    let version = bench.operation("k").await["version"].as_i64().unwrap();
    (bench, version)
}

fn verdict(verdict: &str, version: i64) -> Value {
    json!({"verdict": verdict, "version": version, "reason": "the provider's support says so"})
}

#[tokio::test]
async fn only_an_operator_of_the_tenant_decides_and_only_about_what_they_have_seen() {
    let (bench, version) = unknown("").await;
    let theirs = bench.ledger.tenant("other").await;
    let failed = verdict("failed", version);
    for role in ["agent", "approver", "admin"] {
        bench
            .ledger
            .client(role)
            .resolve("k", failed.clone())
            .await
            .is(403, "forbidden");
    }
    let operator = bench.operator();
    let foreign = operator.with_key(&theirs["operator"]);
    let missing = foreign.resolve("nobodys", failed.clone()).await.is(404, "not-found");
    assert_eq!(
        foreign.resolve("k", failed.clone()).await.is(404, "not-found").body,
        missing.body
    );
    operator
        .resolve("k", verdict("failed", version - 1))
        .await
        .is(409, "state-conflict");
    operator
        .resolve("k", verdict("failed", version + 1))
        .await
        .is(409, "state-conflict");
    let cases = [
        (json!({"verdict": "failed", "reason": "x"}), "/version"),
        (json!({"verdict": "failed", "version": version}), "/reason"),
        (
            json!({"verdict": "failed", "version": version, "reason": "  "}),
            "/reason",
        ),
        (json!({"verdict": "failed", "version": version, "reason": "a\u{0}"}), ""),
        (
            json!({"verdict": "maybe", "version": version, "reason": "x"}),
            "/verdict",
        ),
        (json!({"version": version, "reason": "x"}), "/verdict"),
        (
            json!({"verdict": "failed", "version": version, "reason": "x", "actor": "me"}),
            "/actor",
        ),
        (
            json!({"verdict": "failed", "version": version, "reason": "x", "answer": {"status": 200}}),
            "/verdict",
        ),
        (
            json!({"verdict": "succeeded", "version": version, "reason": "x", "answer": {"status": 100}}),
            "/answer/status",
        ),
        (
            json!({"verdict": "succeeded", "version": version, "reason": "x", "answer": {"status": 200, "headers": [["content-length", "7"]]}}),
            "/answer/headers",
        ),
        (
            json!({"verdict": "succeeded", "version": version, "reason": "x", "answer": {"status": 200, "headers": [["x", "a\r\nSet-Cookie: b"]]}}),
            "/answer/headers",
        ),
    ];
    for (body, pointer) in cases {
        let refused = operator.resolve("k", body.clone()).await;
        assert_eq!(refused.status, 400, "{body}");
        assert!(
            pointer.is_empty() || refused.json()["pointer"] == pointer,
            "{body}: {:?}",
            refused.json()
        );
    }
    let operation = bench.operation("k").await;
    assert_eq!(
        (&operation["state"], &operation["version"]),
        (&"needs_reconciliation".into(), &version.into())
    );
    assert_eq!(bench.pay.count(), 1);
}

#[tokio::test]
async fn not_executed_is_refused_while_the_request_may_be_on_its_way_and_then_allows_one_more_send() {
    let (bench, version) = unknown(BRIEF).await;
    let early = bench
        .operator()
        .resolve("k", verdict("not-executed", version))
        .await
        .is(409, "resolution-too-early");
    let wait: u64 = early.header("retry-after").parse().unwrap();
    // An attempt may begin two seconds after its claim, and be under way for one.
    assert!((2..=3).contains(&wait), "{wait}");
    assert_eq!(
        bench.operation("k").await["version"],
        version,
        "a refused decision changes nothing"
    );
    until("it is allowed", async || {
        let decided = bench.operator().resolve("k", verdict("not-executed", version)).await;
        decided.status == 200
    })
    .await;
    let late_enough = "select count(*) from ledger.requests where sent_at <= clock_timestamp() - interval '3 s'";
    assert_eq!(bench.ledger.count(late_enough).await, 1, "too early");
    let operation = bench.until("k", "succeeded").await;
    assert_eq!(bench.pay.count(), 2);
    assert_eq!(
        events(&operation),
        ["claimed", "outcome_unknown", "resolved", "claimed", "succeeded"]
    );
    let again = bench.post("k", "/charges", "{}").await;
    assert_eq!(
        (again.status, again.is_replay(), again.json()["id"].as_str()),
        (201, true, Some("ch_2"))
    );
    bench
        .operator()
        .resolve("k", verdict("failed", version))
        .await
        .is(409, "state-conflict");
    bench.nothing_more_is_sent().await;
}

#[tokio::test]
async fn succeeded_is_answered_with_what_a_person_has_found_or_with_a_receipt_of_ours() {
    let (bench, version) = unknown("").await;
    let mut decision = verdict("succeeded", version);
    decision["answer"] =
        json!({"status": 201, "headers": [["location", "/charges/ch_1"]], "body": {"id": "ch_1", "amount": 1.10}});
    decision["external_reference"] = json!("ch_1");
    decision["evidence"] = json!({"ticket": 7});
    let decided = bench.operator().resolve("k", decision).await;
    assert_eq!(
        (decided.status, decided.json()["state"].as_str()),
        (200, Some("succeeded"))
    );
    assert_eq!(decided.json()["external_reference"], "ch_1");
    let first = bench.post("k", "/charges", "{}").await;
    assert_eq!(
        (first.status, first.is_replay(), first.header("location")),
        (201, true, "/charges/ch_1")
    );
    assert_eq!(first.json()["id"], "ch_1");
    bench.is_replayed(&first, "k", "/charges", "{}").await;
    let operation = bench.operation("k").await;
    let last = operation["history"].as_array().unwrap().last().unwrap();
    assert_eq!(last["event"], "resolved");
    assert_eq!(last["evidence"]["evidence"]["ticket"], 7);
    assert_eq!(last["reason"], "the provider's support says so");
    assert!(last["actor"].as_str().unwrap().starts_with("key:"), "{last}");

    bench.post("plain", "/plain", "{}").await.is(409, "outcome-unknown");
    let version = bench.operation("plain").await["version"].as_i64().unwrap();
    assert_eq!(
        bench
            .operator()
            .resolve("plain", verdict("succeeded", version))
            .await
            .status,
        200
    );
    let plain = bench.post("plain", "/plain", "{}").await.succeeded();
    assert_eq!((plain.is_replay(), &plain.json()["result"]), (true, &Value::Null));
    assert_eq!(bench.pay.count(), 2);
}

#[tokio::test]
async fn failed_is_final_and_the_same_receipt_every_time() {
    let (bench, version) = unknown("").await;
    assert_eq!(
        bench.operator().resolve("k", verdict("failed", version)).await.status,
        200
    );
    let first = bench.post("k", "/charges", "{}").await.is(422, "operation-failed");
    assert!(first.is_replay());
    bench.is_replayed(&first, "k", "/charges", "{}").await;
    bench.nothing_more_is_sent().await;
    assert_eq!(bench.pay.count(), 1);
}

#[tokio::test]
async fn of_many_decisions_at_once_one_stands() {
    let (bench, version) = unknown("").await;
    let mut deciders = tokio::task::JoinSet::new();
    for number in 0..20 {
        let operator = bench.operator();
        let decision = verdict(["failed", "succeeded"][number % 2], version);
        deciders.spawn(async move { operator.resolve("k", decision).await });
    }
    let answers = deciders.join_all().await;
    assert_eq!(answers.iter().filter(|answer| answer.status == 200).count(), 1);
    for answer in answers.into_iter().filter(|answer| answer.status != 200) {
        answer.is(409, "state-conflict");
    }
    let operation = bench.operation("k").await;
    assert_eq!(
        events(&operation).iter().filter(|event| **event == "resolved").count(),
        1
    );
}

#[tokio::test]
async fn what_is_not_unknown_is_not_to_be_resolved() {
    let bench = Bench::start().await;
    bench.post("done", "/x", "{}").await.succeeded();
    bench.agent().deposit("function", "acct-1", 1).await.succeeded();
    for id in ["done", "function"] {
        let version = bench.operation(id).await["version"].as_i64().unwrap();
        for decision in ["failed", "succeeded", "not-executed", "compensate"] {
            bench
                .operator()
                .resolve(id, verdict(decision, version))
                .await
                .is(409, "state-conflict");
        }
    }
}
