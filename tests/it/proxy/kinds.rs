//! Kinds that a downstream performs: a submission becomes one request, filled in from its payload.

use serde_json::{Value, json};

use super::{Bench, events, lost_at_first};
use crate::support::downstream::Script;
use crate::support::{Answer, run, until};

const ROUTES: &str = "[[routes]]\npath = \"/orders/*/charges\"\nidempotency = \"key\"\nkey_retention = \"24h\"\nreference = \"/id\"\n\
                      retry = { first_delay = \"50ms\" }\n";

const KINDS: &str = "[kinds.\"charge.create\"]\ndownstream = \"pay\"\nretention = \"1h\"\n\
     request = { method = \"POST\", path = \"/orders/{/order_id}/charges?ref={operation_id}\", headers = { X-Amount = \"{/amount}\" }, body = \"\" }\n\
     [kinds.\"charge.part\"]\ndownstream = \"pay\"\nrequest = { method = \"PUT\", path = \"/parts/{/order_id}\", body = \"/part\" }\n\
     [kinds.\"charge.text\"]\ndownstream = \"pay\"\nrequest = { method = \"PATCH\", path = \"/texts\", body = { note = \"{/order_id}: {/amount}\", flag = \"{/flag}\" } }\n\
     [kinds.\"charge.delete\"]\ndownstream = \"pay\"\nrequest = { method = \"DELETE\", path = \"/orders/{/order_id}\" }\n";

async fn bench() -> Bench {
    Bench::set_up(ROUTES, KINDS).await
}

/// Stores a charge without running it.
async fn plan(bench: &Bench, id: &str, payload: &str) -> Answer {
    let body = format!(r#"{{"operation_id":"{id}","kind":"charge.create","payload":{payload},"mode":"plan"}}"#);
    bench.agent().post("/v1/operations", &body).await
}

async fn verb(bench: &Bench, id: &str, verb: &str, lines: &[(&str, &str)]) -> Answer {
    let target = format!("/v1/operations/{id}/{verb}");
    bench.agent().send("POST", &target, lines, "").await
}

const PAYLOAD: &str = r#"{"order_id":"1","amount":1}"#;

fn assert_planned(answer: &Answer, id: &str) {
    assert_eq!(
        (
            answer.status,
            answer.json()["state"].as_str(),
            answer.header("location")
        ),
        (202, Some("planned"), &*format!("/v1/operations/{id}")),
        "{answer:?}"
    );
}

#[tokio::test]
async fn a_payload_becomes_one_request_and_its_answer_the_receipt() {
    let bench = bench().await;
    bench.pay.answers(lost_at_first(|_| {
        Script::answer(201, "{\"id\": \"ch_1\",  \"a\":1.10}")
    }));
    let payload =
        r#"{"order_id":"10 01","amount":500,"deep":{"n":1.5,"big":9007199254740991,"t":true,"z":null,"l":[1,"1"]}}"#;
    let first = bench.agent().submit("k", "charge.create", payload).await;
    assert_eq!(first.status, 201);
    assert_eq!(first.body, "{\"id\": \"ch_1\",  \"a\":1.10}");
    assert_eq!(bench.pay.count(), 2, "the first one's answer was lost");
    let sent = bench.pay.requests().pop().unwrap();
    assert_eq!(
        (sent.method.as_str(), sent.target.as_str()),
        ("POST", "/base/orders/10%2001/charges?ref=k")
    );
    assert_eq!(sent.header("x-amount"), "500");
    assert_eq!(sent.header("content-type"), "application/json");
    assert!(sent.header("idempotency-key").starts_with("opl-"));
    // Every member keeps its type and its value.
    assert_eq!(sent.json(), serde_json::from_str::<serde_json::Value>(payload).unwrap());
    let spelled = payload.replace("500", "5e2").replace("{\"order_id\"", "{ \"order_id\"");
    let again = bench.agent().submit("k", "charge.create", &spelled).await;
    assert!(again.is_replay() && again.status == 201 && again.body == first.body);
    bench
        .agent()
        .submit("k", "charge.create", &payload.replace("500", "501"))
        .await
        .is(422, "fingerprint-mismatch");
    bench
        .agent()
        .submit("k", "charge.part", payload)
        .await
        .is(422, "fingerprint-mismatch");
    let operation = bench.operation("k").await;
    assert_eq!(
        (&operation["kind"], &operation["external_reference"]),
        (&"charge.create".into(), &"ch_1".into())
    );
    assert_eq!(operation["target"], "POST pay/orders/10%2001/charges?ref=k");
    assert_eq!(
        (&operation["deliveries"], &operation["attempts"], &operation["effects"]),
        (&2.into(), &2.into(), &1.into())
    );
}

#[tokio::test]
async fn parts_objects_and_no_body_are_sent_as_they_are_declared() {
    let bench = bench().await;
    for part in [
        json!(null),
        json!(7),
        json!("x"),
        json!([1, {"a": 0.5}]),
        json!({"n": 1}),
    ] {
        let payload = json!({"order_id": "1", "part": part}).to_string();
        bench
            .agent()
            .submit(
                &format!("part-{part}").replace([' ', '"'], "_"),
                "charge.part",
                &payload,
            )
            .await
            .succeeded();
        assert_eq!(bench.pay.requests().pop().unwrap().json(), part);
    }
    bench
        .agent()
        .submit("text", "charge.text", r#"{"order_id":"1","amount":5.50,"flag":false}"#)
        .await
        .succeeded();
    assert_eq!(
        bench.pay.requests().pop().unwrap().json(),
        json!({"note": "1: 5.5", "flag": "false"})
    );
    bench
        .agent()
        .submit("delete", "charge.delete", r#"{"order_id":"1"}"#)
        .await
        .succeeded();
    let sent = bench.pay.requests().pop().unwrap();
    assert_eq!(
        (sent.method.as_str(), sent.body.len(), sent.all("content-type").len()),
        ("DELETE", 0, 0)
    );
}

#[tokio::test]
async fn what_does_not_fill_the_request_is_refused_before_the_claim() {
    let bench = bench().await;
    let cases = [
        ("charge.create", r#"{"amount":1}"#),
        ("charge.create", r#"{"order_id":"1"}"#),
        ("charge.create", r#"{"order_id":{},"amount":1}"#),
        ("charge.create", r#"{"order_id":"","amount":1}"#),
        ("charge.create", r#"{"order_id":"..","amount":1}"#),
        ("charge.create", r#"{"order_id":"a/b","amount":1}"#),
        ("charge.create", r#"{"order_id":"%2e%2e","amount":1}"#),
        ("charge.create", r#"{"order_id":"1","amount":"a\r\nX-Admin: 1"}"#),
        ("charge.part", r#"{"order_id":"1"}"#),
        ("charge.text", r#"{"order_id":"1","amount":1}"#),
        ("charge.text", r#"{"order_id":"1","amount":[1],"flag":true}"#),
    ];
    for (kind, payload) in cases {
        let refused = bench
            .agent()
            .submit("k", kind, payload)
            .await
            .is(400, "payload-invalid");
        assert!(
            refused.json()["pointer"].as_str().unwrap().starts_with("/payload"),
            "{payload}"
        );
    }
    plan(&bench, "k", r#"{"order_id":"1"}"#)
        .await
        .is(400, "payload-invalid");
    assert_eq!(bench.pay.connections(), 0);
    bench.agent().get("/v1/operations/k").await.is(404, "not-found");
    bench
        .agent()
        .submit("k", "charge.create", r#"{"order_id":"1","amount":1}"#)
        .await
        .succeeded();
}

#[tokio::test]
async fn a_known_id_is_answered_when_its_downstream_is_gone() {
    let bench = bench().await;
    let payload = r#"{"order_id":"1","amount":1}"#;
    let first = bench.agent().submit("k", "charge.create", payload).await.succeeded();
    let other = bench.ledger.second().await;
    let (agent, pay) = (bench.agent(), bench.pay);
    drop(pay);
    let again = agent
        .at(other.address)
        .submit("k", "charge.create", payload)
        .await
        .succeeded();
    assert!(again.is_replay() && again.body == first.body);
    agent
        .at(other.address)
        .submit("new", "charge.create", payload)
        .await
        .is(502, "downstream-unreachable");
    agent.get("/v1/operations/new").await.is(404, "not-found");
}

#[tokio::test]
async fn a_plan_is_stored_and_sent_when_it_is_told_to_and_once() {
    let bench = bench().await;
    bench.pay.answers(|_| Script::answer(201, "{\"id\":\"ch_1\"}"));
    assert_planned(&plan(&bench, "k", PAYLOAD).await, "k");
    // Planning again, or submitting what is planned, changes nothing and sends nothing.
    assert_planned(&plan(&bench, "k", PAYLOAD).await, "k");
    assert_planned(&bench.agent().submit("k", "charge.create", PAYLOAD).await, "k");
    plan(&bench, "k", &PAYLOAD.replace("\"amount\":1", "\"amount\":2"))
        .await
        .is(422, "fingerprint-mismatch");
    bench.nothing_more_is_sent().await;
    assert_eq!(bench.pay.connections(), 0);
    let planned = bench.operation("k").await;
    assert_eq!(
        (&planned["attempts"], &planned["effects"], &planned["deliveries"]),
        (&0.into(), &0.into(), &3.into())
    );
    // However long it was planned: its time runs from the first send.
    let older = "update ledger.operations set created_at = created_at - interval '10 days'; \
                 update ledger.history set at = at - interval '10 days'";
    run(&bench.ledger.sql, older).await;

    let first = verb(&bench, "k", "execute", &[]).await;
    assert_eq!((first.status, first.is_replay()), (201, false), "{first:?}");
    assert_eq!(first.json()["id"], "ch_1");
    let sent = bench.pay.requests().pop().unwrap();
    assert_eq!(
        (sent.method.as_str(), sent.target.as_str(), sent.header("x-amount")),
        ("POST", "/base/orders/1/charges?ref=k", "1")
    );
    for again in [
        verb(&bench, "k", "execute", &[]).await,
        bench.agent().submit("k", "charge.create", PAYLOAD).await,
        plan(&bench, "k", PAYLOAD).await,
    ] {
        assert!(again.is_replay() && again.body == first.body, "{again:?}");
    }
    let operation = bench.operation("k").await;
    assert_eq!(events(&operation), ["planned", "claimed", "succeeded"]);
    assert_eq!(operation["attempts"], 1);
    assert_eq!(bench.pay.count(), 1);
}

#[tokio::test]
async fn a_plan_is_recovered_and_retried_as_any_other_and_counts_its_time_from_the_first_send() {
    let bench = bench().await;
    bench.pay.answers(|request| match request.number {
        0 => Script::with_lines(503, "Retry-After: 0\r\n", "{}"),
        1 => Script::new().reset(),
        _ => Script::answer(201, "{\"id\":\"ch_1\"}"),
    });
    plan(&bench, "k", PAYLOAD).await;
    let older = "update ledger.operations set created_at = created_at - interval '10 days'; \
                 update ledger.history set at = at - interval '10 days'";
    run(&bench.ledger.sql, older).await;
    let first = verb(&bench, "k", "execute", &[]).await;
    assert_eq!((first.status, first.is_replay()), (201, false), "{first:?}");
    assert_eq!(
        events(&bench.operation("k").await),
        [
            "planned",
            "claimed",
            "retry_scheduled",
            "claimed",
            "outcome_unknown",
            "sent_again",
            "claimed",
            "succeeded"
        ]
    );
    // Whoever settles it, its receipt is kept for as long as its kind says.
    plan(&bench, "gone", PAYLOAD).await;
    assert_eq!(verb(&bench, "gone", "cancel", &[]).await.status, 200);
    let kept = "select count(*) from ledger.operations where receipt_expires_at - settled_at = interval '1 h'";
    assert_eq!(bench.ledger.count(kept).await, 2);
}

#[tokio::test]
async fn of_many_executions_of_a_plan_one_is_sent_and_a_cancelled_one_never() {
    let bench = bench().await;
    let other = bench.ledger.second().await;
    plan(&bench, "k", PAYLOAD).await;
    let mut executions = tokio::task::JoinSet::new();
    for number in 0..10 {
        let agent = bench.agent();
        let agent = if number % 2 == 0 {
            agent
        } else {
            agent.at(other.address)
        };
        executions.spawn(async move { agent.send("POST", "/v1/operations/k/execute", &[], "").await });
    }
    let answers = executions.join_all().await;
    let firsts = answers
        .iter()
        .filter(|answer| answer.status == 200 && !answer.is_replay());
    assert_eq!(firsts.count(), 1, "{answers:?}");
    for answer in &answers {
        assert!(
            answer.status == 200 || answer.code() == "operation-in-progress",
            "{answer:?}"
        );
    }
    assert_eq!(bench.pay.count(), 1);
    plan(&bench, "gone", PAYLOAD).await;
    assert_eq!(verb(&bench, "gone", "cancel", &[]).await.status, 200);
    verb(&bench, "gone", "execute", &[])
        .await
        .is(409, "operation-cancelled");
    bench
        .agent()
        .submit("gone", "charge.create", PAYLOAD)
        .await
        .is(409, "operation-cancelled");
    verb(&bench, "k", "cancel", &[]).await.is(409, "state-conflict");
    // Afterwards, and not before it is answered.
    plan(&bench, "later", PAYLOAD).await;
    let accepted = verb(&bench, "later", "execute", &[("prefer", "respond-async")]).await;
    assert_eq!(
        (accepted.status, accepted.json()["state"].as_str()),
        (202, Some("running"))
    );
    bench.until("later", "succeeded").await;
    assert_eq!(bench.pay.count(), 2);
}

#[tokio::test]
async fn a_plan_whose_downstream_is_away_stays_planned() {
    let bench = bench().await;
    plan(&bench, "k", PAYLOAD).await;
    let (ledger, pay) = (bench.ledger, bench.pay);
    let address = pay.address;
    drop(pay);
    let agent = ledger.agent();
    let execute = async || agent.send("POST", "/v1/operations/k/execute", &[], "").await;
    execute().await.is(502, "downstream-unreachable");
    let planned = agent.operation("k").await;
    assert_eq!(
        (&planned["state"], &planned["attempts"]),
        (&"planned".into(), &0.into())
    );
    assert_eq!(planned["receipt"], Value::Null);
    let pay = crate::support::downstream::Downstream::start_at(address).await;
    until("it is sent", async || execute().await.status == 200).await;
    assert_eq!(pay.count(), 1);
}
