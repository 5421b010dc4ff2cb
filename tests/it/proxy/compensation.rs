//! Reversals: operations of their own, which can succeed, be refused, or be unknown themselves.

use serde_json::{Value, json};

use super::{Bench, events};
use crate::support::Answer;
use crate::support::downstream::{Gate, Received, Script};

const ROUTES: &str = "head_timeout = \"300ms\"\nidle_timeout = \"300ms\"\n\
     [[routes]]\npath = \"/charges\"\nmax_in_flight = \"400ms\"\nreference = \"/id\"\n\
     compensation = { method = \"POST\", path = \"/charges/{/id}/refunds\", headers = { X-Ref = \"{operation_id}\" }, body = { key = \"{key}\" } }\n\
     [[routes]]\npath = \"/bare\"\nmax_in_flight = \"400ms\"\n\
     compensation = { method = \"DELETE\", path = \"/things/{operation_id}\" }\n";

/// Charges succeed; reversals get this.
async fn charged(reversal: impl Fn(&Received) -> Script + Send + Sync + 'static) -> Bench {
    let bench = Bench::with(ROUTES).await;
    bench.pay.answers(move |request| match request.target.as_str() {
        "/base/charges" => Script::answer(201, "{\"id\":\"ch_1\"}"),
        "/base/bare" => Script::new().reset(),
        _ => reversal(request),
    });
    bench.post("k", "/charges", "{\"amount\":5}").await;
    bench
}

async fn compensate(bench: &Bench, id: &str) -> Answer {
    let version = bench.operation(id).await["version"].as_i64().unwrap();
    let body = json!({"version": version, "reason": "ordered by mistake"}).to_string();
    bench
        .operator()
        .post(&format!("/v1/operations/{id}/compensate"), &body)
        .await
}

#[tokio::test]
async fn a_reversal_that_succeeds_compensates_and_both_know_each_other() {
    let bench = charged(|_| Script::answer(200, "{\"id\":\"re_1\"}")).await;
    let begun = compensate(&bench, "k").await;
    assert_eq!(
        (begun.status, begun.json()["state"].as_str()),
        (200, Some("compensating"))
    );
    let parent = bench.until("k", "compensated").await;
    let reversal = bench.operation("k:compensation").await;
    assert_eq!(reversal["state"], "succeeded");
    assert_eq!(
        parent["links"],
        json!([{"relation": "compensated_by", "operation_id": "k:compensation"}])
    );
    assert_eq!(
        reversal["links"],
        json!([{"relation": "compensates", "operation_id": "k"}])
    );
    assert_eq!(events(&parent), ["claimed", "succeeded", "compensating", "compensated"]);
    let sent = bench.pay.requests().pop().unwrap();
    assert_eq!(
        (sent.method.as_str(), sent.target.as_str()),
        ("POST", "/base/charges/ch_1/refunds")
    );
    assert_eq!(sent.header("x-ref"), "k");
    assert!(sent.json()["key"].as_str().unwrap().starts_with("opl-"));
    assert_eq!(parent["external_reference"], "ch_1");
    // Whoever sends it again is told what it was answered, and in which state it is now.
    let again = bench.post("k", "/charges", "{\"amount\":5}").await;
    assert_eq!(
        (again.status, again.is_replay(), again.header("operation-state")),
        (201, true, "compensated")
    );
    compensate(&bench, "k").await.is(409, "state-conflict");
    compensate(&bench, "k:compensation").await.is(409, "state-conflict");
    bench.nothing_more_is_sent().await;
    assert_eq!(bench.pay.count(), 2);
}

#[tokio::test]
async fn a_reversal_that_is_refused_leaves_the_effect_to_people() {
    let bench = charged(|_| Script::answer(402, "{\"error\":\"too late\"}")).await;
    assert_eq!(compensate(&bench, "k").await.status, 200);
    let parent = bench.until("k", "needs_reconciliation").await;
    assert_eq!(
        events(&parent),
        ["claimed", "succeeded", "compensating", "compensation_failed"]
    );
    assert_eq!(bench.state("k:compensation").await, "failed");
    bench
        .post("k", "/charges", "{\"amount\":5}")
        .await
        .is(409, "outcome-unknown");
    // A person finds that the effect stands: callers get their first answer again.
    let decision = json!({"verdict": "succeeded", "version": parent["version"], "reason": "it stands"});
    assert_eq!(bench.operator().resolve("k", decision).await.status, 200);
    let again = bench.post("k", "/charges", "{\"amount\":5}").await;
    assert_eq!((again.status, again.json()["id"].as_str()), (201, Some("ch_1")));
    assert_eq!(bench.pay.count(), 2);
}

#[tokio::test]
async fn a_reversal_whose_outcome_is_unknown_is_neither() {
    let bench = charged(|_| Script::new().reset()).await;
    assert_eq!(compensate(&bench, "k").await.status, 200);
    let reversal = bench.until("k:compensation", "needs_reconciliation").await;
    bench.nothing_more_is_sent().await;
    assert_eq!(bench.state("k").await, "compensating");
    // People decide about the reversal, and the operation follows.
    let decision =
        json!({"verdict": "succeeded", "version": reversal["version"], "reason": "refunded, says the provider"});
    assert_eq!(bench.operator().resolve("k:compensation", decision).await.status, 200);
    bench.until("k", "compensated").await;
    assert_eq!(bench.pay.count(), 2);
}

#[tokio::test]
async fn an_unknown_operation_is_undone_where_its_reversal_needs_no_answer() {
    let bench = charged(|_| Script::answer(204, "")).await;
    bench.post("bare", "/bare", "{}").await.is(409, "outcome-unknown");
    let version = bench.operation("bare").await["version"].clone();
    let decision = json!({"verdict": "compensate", "version": version, "reason": "better not"});
    let begun = bench.operator().resolve("bare", decision).await;
    assert_eq!(
        (begun.status, begun.json()["state"].as_str()),
        (200, Some("compensating"))
    );
    let undone = bench.until("bare", "compensated").await;
    assert_eq!(bench.pay.requests().pop().unwrap().target, "/base/things/bare");
    assert_eq!(
        events(&undone),
        ["claimed", "outcome_unknown", "resolved", "compensated"]
    );
    assert_eq!(undone["history"][3]["evidence"]["reversal"], "bare:compensation");
    let told = bench.post("bare", "/bare", "{}").await.is(422, "operation-failed");
    assert!(told.is_replay());
    bench.is_replayed(&told, "bare", "/bare", "{}").await;
    assert_eq!(bench.pay.sends("/bare"), 1);
}

/// An unknown operation that is to be undone, while its reversal is held.
async fn being_undone(bench: &Bench) -> Value {
    bench.post("bare", "/bare", "{}").await.is(409, "outcome-unknown");
    let version = bench.operation("bare").await["version"].clone();
    let decision = json!({"verdict": "compensate", "version": version, "reason": "better not"});
    let begun = bench.operator().resolve("bare", decision).await;
    assert_eq!(
        (begun.status, begun.json()["state"].as_str()),
        (200, Some("compensating"))
    );
    begun.json()
}

#[tokio::test]
async fn an_unknown_operation_has_no_receipt_before_it_is_undone() {
    let gate = Gate::new();
    let held = gate.clone();
    let bench = charged(move |_| Script::new().gate(&held).before(Script::answer(204, ""))).await;
    let begun = being_undone(&bench).await;
    for absent in ["receipt", "settled_at", "receipt_expires_at"] {
        assert_eq!(begun[absent], Value::Null, "{absent}");
    }
    // Nobody is told that it had no effect while that is not so.
    let told = bench.post("bare", "/bare", "{}").await.is(409, "outcome-unknown");
    assert_eq!(
        (told.header("operation-state"), told.header("receipt-expires")),
        ("compensating", "")
    );
    assert!(told.json()["detail"].as_str().unwrap().contains("revers"), "{told:?}");
    bench
        .agent()
        .get("/v1/operations/bare/receipt")
        .await
        .is(409, "outcome-unknown");
    assert_eq!(
        bench
            .ledger
            .count("select count(*) from ledger.receipts where operation_id = 'bare'")
            .await,
        0
    );
    gate.open();
    let undone = bench.until("bare", "compensated").await;
    for present in ["receipt", "settled_at", "receipt_expires_at"] {
        assert_ne!(undone[present], Value::Null, "{present}");
    }
    bench.post("bare", "/bare", "{}").await.is(422, "operation-failed");
    assert_eq!(bench.pay.sends("/bare"), 1);
}

#[tokio::test]
async fn an_unknown_operation_whose_reversal_is_refused_is_as_unknown_as_before() {
    let bench = charged(|_| Script::answer(404, "{}")).await;
    being_undone(&bench).await;
    let parent = bench.until("bare", "needs_reconciliation").await;
    assert_eq!(
        events(&parent),
        ["claimed", "outcome_unknown", "resolved", "compensation_failed"]
    );
    assert_eq!(
        (&parent["receipt"], &parent["settled_at"]),
        (&Value::Null, &Value::Null)
    );
    bench.post("bare", "/bare", "{}").await.is(409, "outcome-unknown");
    // It has never succeeded: every verdict is open.
    let decision = json!({"verdict": "failed", "version": parent["version"], "reason": "there was nothing to undo"});
    assert_eq!(bench.operator().resolve("bare", decision).await.status, 200);
    let told = bench.post("bare", "/bare", "{}").await.is(422, "operation-failed");
    assert!(
        told.json()["detail"].as_str().unwrap().contains("nothing to undo"),
        "{told:?}"
    );
}

#[tokio::test]
async fn an_unknown_operation_stays_without_a_receipt_while_its_reversal_is_unknown() {
    let bench = charged(|_| Script::new().reset()).await;
    being_undone(&bench).await;
    let reversal = bench.until("bare:compensation", "needs_reconciliation").await;
    bench.nothing_more_is_sent().await;
    bench.post("bare", "/bare", "{}").await.is(409, "outcome-unknown");
    let decision = json!({"verdict": "succeeded", "version": reversal["version"], "reason": "it is gone"});
    let decided = bench.operator().resolve("bare:compensation", decision).await;
    assert_eq!(decided.status, 200);
    bench.until("bare", "compensated").await;
    bench.post("bare", "/bare", "{}").await.is(422, "operation-failed");
}

#[tokio::test]
async fn a_reversal_that_cannot_be_made_changes_nothing() {
    let bench = Bench::with(ROUTES).await;
    bench.pay.answers(|request| match request.target.as_str() {
        "/base/charges" => Script::answer(201, "{\"no\":\"id\"}"),
        _ => Script::answer(200, "{}"),
    });
    bench.post("no-id", "/charges", "{}").await;
    bench.post("undeclared", "/other", "{}").await;
    for id in ["no-id", "undeclared"] {
        compensate(&bench, id).await.is(409, "state-conflict");
        assert_eq!(bench.state(id).await, "succeeded");
        bench
            .agent()
            .get(&format!("/v1/operations/{id}:compensation"))
            .await
            .is(404, "not-found");
    }
    let version = bench.operation("no-id").await["version"].clone();
    let body = json!({"version": version, "reason": "x"}).to_string();
    bench
        .agent()
        .post("/v1/operations/no-id/compensate", &body)
        .await
        .is(403, "forbidden");
    let theirs = bench.ledger.tenant("other").await;
    let foreign = bench.operator().with_key(&theirs["operator"]);
    foreign
        .post("/v1/operations/no-id/compensate", &body)
        .await
        .is(404, "not-found");
    assert_eq!(bench.pay.count(), 2);
}

/// Ids belong to whoever uses them first, and an agent must not be able to stand in the way of a reversal.
#[tokio::test]
async fn a_strangers_operation_under_the_reversals_usual_name_is_no_obstacle() {
    let bench = charged(|_| Script::answer(200, "{}")).await;
    bench.post("k:compensation", "/other", "{}").await;
    assert_eq!(compensate(&bench, "k").await.status, 200);
    let parent = bench.until("k", "compensated").await;
    let reversal = parent["links"][0]["operation_id"].as_str().unwrap();
    assert!(reversal.starts_with("k:compensation:"), "{reversal}");
    let reversal = bench.operation(reversal).await;
    assert_eq!(
        (&reversal["state"], &reversal["links"][0]["operation_id"]),
        (&json!("succeeded"), &json!("k"))
    );
    assert_eq!(bench.operation("k:compensation").await["links"], json!([]));
    assert_eq!(bench.pay.sends("/charges/ch_1/refunds"), 1);
}

/// Also when its first reversal has another name than the one that is now free.
#[tokio::test]
async fn an_operation_has_one_reversal_whatever_that_is_called() {
    let bench = charged(|_| Script::answer(402, "{}")).await;
    bench.post("k:compensation", "/other", "{}").await;
    assert_eq!(compensate(&bench, "k").await.status, 200);
    let parent = bench.until("k", "needs_reconciliation").await;
    let decision = json!({"verdict": "succeeded", "version": parent["version"], "reason": "it stands"});
    assert_eq!(bench.operator().resolve("k", decision).await.status, 200);
    let again = compensate(&bench, "k").await.is(409, "state-conflict");
    let reversal = parent["links"][0]["operation_id"].as_str().unwrap();
    assert!(
        again.json()["detail"].as_str().unwrap().contains(reversal),
        "{}",
        again.json()
    );
    bench.nothing_more_is_sent().await;
    assert_eq!(bench.pay.sends("/charges/ch_1/refunds"), 1);
}

#[tokio::test]
async fn many_wishes_to_undo_it_are_one_reversal() {
    let bench = charged(|_| Script::answer(200, "{}")).await;
    let version = bench.operation("k").await["version"].clone();
    let body = json!({"version": version, "reason": "x"}).to_string();
    let mut askers = tokio::task::JoinSet::new();
    for _ in 0..10 {
        let (operator, body) = (bench.operator(), body.clone());
        askers.spawn(async move { operator.post("/v1/operations/k/compensate", &body).await });
    }
    let answers = askers.join_all().await;
    assert_eq!(
        answers.iter().filter(|answer| answer.status == 200).count(),
        1,
        "{answers:?}"
    );
    assert!(answers.iter().all(|answer| [200, 409].contains(&answer.status)));
    bench.until("k", "compensated").await;
    assert_eq!(bench.pay.sends("/charges/ch_1/refunds"), 1);
}

/// What has succeeded once is not run again because its reversal was refused.
#[tokio::test]
async fn an_operation_that_succeeded_is_not_declared_not_executed_after_a_refused_reversal() {
    let bench = charged(|_| Script::answer(402, "{}")).await;
    assert_eq!(compensate(&bench, "k").await.status, 200);
    let parent = bench.until("k", "needs_reconciliation").await;
    tokio::time::sleep(std::time::Duration::from_millis(500)).await;
    let decision = json!({"verdict": "not-executed", "version": parent["version"], "reason": "gone, it seems"});
    bench.operator().resolve("k", decision).await.is(409, "state-conflict");
    bench.nothing_more_is_sent().await;
    assert_eq!(bench.pay.sends("/charges"), 1, "{:?}", bench.state("k").await);
    assert_ne!(bench.operation("k").await["receipt"], Value::Null);
}
