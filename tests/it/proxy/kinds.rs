//! Kinds that a downstream performs: a submission becomes one request, filled in from its payload.

use serde_json::json;

use super::{Bench, lost_at_first};
use crate::support::downstream::Script;

const ROUTES: &str = "[[routes]]\npath = \"/orders/*/charges\"\nidempotency = \"key\"\nkey_retention = \"24h\"\nreference = \"/id\"\n\
                      retry = { first_delay = \"50ms\" }\n";

const KINDS: &str = "[kinds.\"charge.create\"]\ndownstream = \"pay\"\n\
     request = { method = \"POST\", path = \"/orders/{/order_id}/charges?ref={operation_id}\", headers = { X-Amount = \"{/amount}\" }, body = \"\" }\n\
     [kinds.\"charge.part\"]\ndownstream = \"pay\"\nrequest = { method = \"PUT\", path = \"/parts/{/order_id}\", body = \"/part\" }\n\
     [kinds.\"charge.text\"]\ndownstream = \"pay\"\nrequest = { method = \"PATCH\", path = \"/texts\", body = { note = \"{/order_id}: {/amount}\", flag = \"{/flag}\" } }\n\
     [kinds.\"charge.delete\"]\ndownstream = \"pay\"\nrequest = { method = \"DELETE\", path = \"/orders/{/order_id}\" }\n";

async fn bench() -> Bench {
    Bench::set_up(ROUTES, KINDS).await
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
    let plan = r#"{"operation_id":"k","kind":"charge.create","payload":{"order_id":"1","amount":1},"mode":"plan"}"#;
    bench
        .agent()
        .post("/v1/operations", plan)
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
