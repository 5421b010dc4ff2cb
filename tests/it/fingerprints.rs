//! Fingerprints at the door: which requests are the same, and what a request that is not the same is told.

use serde_json::Value;

use crate::support::handlers::{self, WAYS};
use crate::support::{Answer, Client, Ledger};

/// Sends payloads under one id: all but the first must be replays of the first.
async fn are_the_same(client: &Client, id: &str, payloads: &[&str]) {
    let first = client.submit(id, "note", payloads[0]).await.succeeded();
    assert!(!first.is_replay());
    for payload in &payloads[1..] {
        let again = client.submit(id, "note", payload).await.succeeded();
        assert!(again.is_replay(), "{payload}");
        assert_eq!(again.body, first.body, "{payload}");
    }
}

async fn differs(client: &Client, id: &str, payload: &str) -> Answer {
    client.submit(id, "note", payload).await.is(422, "fingerprint-mismatch")
}

/// Refused with 400, and the id runs afterwards as if nothing had been sent.
async fn is_refused_and_the_id_stays_free(ledger: &Ledger, id: &str, payload: &str, pointer: &str) {
    let before = ledger.rows().await;
    let refused = ledger
        .agent()
        .submit(id, "note", payload)
        .await
        .is(400, "payload-invalid");
    assert_eq!(refused.json()["pointer"], pointer, "{payload}");
    assert_eq!(ledger.rows().await, before, "{payload}");
    assert!(
        !ledger
            .agent()
            .submit(id, "note", r#"{"valid":true}"#)
            .await
            .succeeded()
            .is_replay()
    );
    assert_eq!(ledger.effects(id).await, 1);
}

#[tokio::test]
async fn order_spacing_and_escapes_do_not_matter() {
    let ledger = handlers::ledger("").await;
    let second = ledger.second().await;
    let spellings = [
        r#"{"name":"café/au lait","amount":5,"list":[1,{"b":null,"a":true}]}"#,
        r#"{"amount":5,"list":[1,{"a":true,"b":null}],"name":"café/au lait"}"#,
        "{ \"name\" :\t\"café/au lait\",\n\r \"amount\": 5 , \"list\": [ 1, { \"b\": null, \"a\": true } ] }",
        r#"{"name":"caf\u00e9\/au\u0020lait","amount":5,"list":[1,{"b":null,"a":true}]}"#,
        r#"{"n\u0061me":"caf\u00E9/au lait","amount":5,"list":[1,{"b":null,"\u0061":true}]}"#,
    ];
    are_the_same(&ledger.agent(), "spelled", &spellings).await;
    // Without the memory of the first service, too.
    for spelling in spellings {
        assert!(
            ledger
                .agent()
                .at(second.address)
                .submit("spelled", "note", spelling)
                .await
                .succeeded()
                .is_replay()
        );
    }
    assert_eq!(ledger.effects("spelled").await, 1);
}

#[tokio::test]
async fn equal_numbers_are_equal_however_they_are_written() {
    let ledger = handlers::ledger("").await;
    let agent = ledger.agent();
    let spellings = [
        r#"{"a":1}"#,
        r#"{"a":1.0}"#,
        r#"{"a":1e0}"#,
        r#"{"a":10e-1}"#,
        r#"{"a":0.1E+1}"#,
    ];
    are_the_same(&agent, "numbers", &spellings).await;
    are_the_same(
        &agent,
        "zero",
        &[r#"{"a":0}"#, r#"{"a":-0}"#, r#"{"a":0.000}"#, r#"{"a":0e9}"#],
    )
    .await;
    for other in [
        r#"{"a":"1"}"#,
        r#"{"a":1.1}"#,
        r#"{"a":-1}"#,
        r#"{"a":true}"#,
        r#"{"a":null}"#,
        r#"{"a":[1]}"#,
        "{}",
    ] {
        differs(&agent, "numbers", other).await;
    }
    assert_eq!(ledger.effects("numbers").await, 1);
}

#[tokio::test]
async fn null_and_absent_and_empty_differ() {
    let ledger = handlers::ledger("").await;
    let agent = ledger.agent();
    let payloads = [
        r#"{"a":null}"#,
        "{}",
        r#"{"a":""}"#,
        r#"{"a":[]}"#,
        r#"{"a":{}}"#,
        "null",
        "[]",
        "\"\"",
        "0",
        "false",
    ];
    for (number, first) in payloads.iter().enumerate() {
        let id = format!("empty-{number}");
        agent.submit(&id, "note", first).await.succeeded();
        for other in payloads.iter().filter(|other| *other != first) {
            differs(&agent, &id, other).await;
        }
    }
}

#[tokio::test]
async fn neighbouring_big_integers_never_merge() {
    let ledger = handlers::ledger("").await;
    let agent = ledger.agent();
    are_the_same(
        &agent,
        "big",
        &[r#"{"n":9007199254740992}"#, r#"{"n":9007199254740992.0}"#],
    )
    .await;
    // A double cannot tell it from its neighbour, so it is refused; as a string it is another payload.
    let refused = agent
        .submit("big", "note", r#"{"n":9007199254740993}"#)
        .await
        .is(400, "payload-invalid");
    assert_eq!(refused.json()["pointer"], "/payload/n");
    differs(&agent, "big", r#"{"n":"9007199254740993"}"#).await;
    differs(&agent, "big", r#"{"n":9007199254740994}"#).await;
    let stored: String = sqlx::query_scalar("select payload from ledger.operations where operation_id = 'big'")
        .fetch_one(&ledger.sql)
        .await
        .unwrap();
    assert_eq!(stored, r#"{"n":9007199254740992}"#, "the digits that were sent");
    for number in [
        "9007199254740993",
        "0.1000000000000000055",
        "1e999",
        "-1e999",
        "123456789012345678901",
    ] {
        is_refused_and_the_id_stays_free(
            &ledger,
            &format!("n{number}"),
            &format!(r#"{{"n":{number}}}"#),
            "/payload/n",
        )
        .await;
    }
}

#[tokio::test]
async fn what_cannot_be_compared_is_refused_before_the_claim() {
    let ledger = handlers::ledger("").await;
    let cases = [
        ("lone-high", r#"{"s":"\ud800"}"#, "/payload/s"),
        ("lone-low", r#"{"s":["\udc00x"]}"#, "/payload/s/0"),
        ("reversed", r#"{"s":"\udc00\ud800"}"#, "/payload/s"),
        ("twice", r#"{"qty":1,"qty":-1}"#, "/payload/qty"),
        ("twice-escaped", r#"{"qty":1,"\u0071ty":1}"#, "/payload/qty"),
        ("twice-deep", r#"{"list":[{"a":{"b":1,"b":1}}]}"#, "/payload/list/0/a/b"),
        ("nul", r#"{"s":"a\u0000b"}"#, "/payload/s"),
    ];
    for (id, payload, pointer) in cases {
        is_refused_and_the_id_stays_free(&ledger, id, payload, pointer).await;
    }
    // A pair of surrogates is one character.
    are_the_same(&ledger.agent(), "pair", &[r#"{"s":"\ud83d\ude00"}"#, r#"{"s":"😀"}"#]).await;
}

#[tokio::test]
async fn nul_is_refused_wherever_it_stands() {
    let ledger = handlers::ledger("").await;
    let agent = ledger.agent();
    let before = ledger.rows().await;
    for body in [
        r#"{"operation_id":"nul","kind":"note","payload":{"\u0000":1}}"#,
        r#"{"operation_id":"nul","kind":"note\u0000","payload":{}}"#,
        r#"{"operation_id":"n\u0000ul","kind":"note","payload":{}}"#,
        r#"{"operation_id":"nul","kind":"note","payload":{},"external_reference":"a\u0000"}"#,
        r#"{"operation_id":"nul","kind":"note","payload":{},"run":{"run_id":"a\u0000"}}"#,
        r#"{"operation_id":"nul","kind":"note","payload":{},"run":{"step":"\u0000"}}"#,
        "{\"operation_id\":\"nul\",\"kind\":\"note\",\"payload\":\"\0\"}",
    ] {
        let answer = agent.post("/v1/operations", body).await;
        assert_eq!(
            (answer.status, answer.json()["retryable"].as_bool()),
            (400, Some(false)),
            "{body}"
        );
    }
    assert_eq!(ledger.rows().await, before);
    // In looking up, there is nothing of that name.
    for path in [
        "/v1/operations/n%00ul",
        "/v1/operations?kind=%00",
        "/v1/operations?run_id=a%00",
        "/v1/operations?external_reference=%00",
    ] {
        let answer = agent.get(path).await;
        assert!(answer.status < 500, "{path}: {}", String::from_utf8_lossy(&answer.body));
    }
    assert!(
        !agent.submit("nul", "note", "{}").await.succeeded().is_replay(),
        "the id is still free"
    );
}

#[tokio::test]
async fn text_is_not_normalised() {
    let ledger = handlers::ledger("").await;
    let agent = ledger.agent();
    agent.submit("accent", "note", "{\"s\":\"\u{e9}\"}").await.succeeded();
    differs(&agent, "accent", "{\"s\":\"e\u{301}\"}").await;
    assert_eq!(ledger.effects("accent").await, 1);
    // Ids outside ASCII are refused, so no two of them can be taken for one.
    for id in ["caf\u{e9}", "cafe\u{301}"] {
        let body = format!(r#"{{"operation_id":"{id}","kind":"note","payload":{{}}}}"#);
        agent.post("/v1/operations", &body).await.is(400, "key-invalid");
    }
}

#[tokio::test]
async fn a_mismatch_leaves_nothing_behind_in_any_process() {
    let ledger = handlers::ledger("").await;
    let second = ledger.second().await;
    let clients = [ledger.agent(), ledger.agent().at(second.address)];
    for way in WAYS {
        let (id, kind) = (format!("kept{way}"), format!("note{way}"));
        clients[0].submit(&id, &kind, r#"{"amount":1}"#).await.succeeded();
        let before = ledger.rows().await;
        for round in 0..3 {
            for client in [&clients[round % 2], &clients[(round + 1) % 2]] {
                client
                    .submit(&id, &kind, r#"{"amount":2}"#)
                    .await
                    .is(422, "fingerprint-mismatch");
            }
        }
        for client in &clients {
            assert!(
                client
                    .submit(&id, &kind, r#"{"amount":1}"#)
                    .await
                    .succeeded()
                    .is_replay()
            );
            client
                .submit(&id, &kind, r#"{"amount":2}"#)
                .await
                .is(422, "fingerprint-mismatch");
        }
        assert_eq!(ledger.rows().await, before);
    }
}

#[tokio::test]
async fn a_mismatch_says_what_to_do_and_shows_nothing_of_the_payload_or_the_result() {
    let ledger = handlers::ledger("").await;
    let agent = ledger.agent();
    let first = agent
        .submit("order/1%", "note", r#"{"amount":1,"secret":"mellon-7261"}"#)
        .await
        .succeeded();
    let refused = agent
        .submit("order/1%", "note", r#"{"amount":2,"secret":"other-4411"}"#)
        .await;
    let refused = refused.is(422, "fingerprint-mismatch");
    let text = String::from_utf8(refused.body.to_vec()).unwrap();
    assert!(
        !text.contains("mellon-7261") && !text.contains("other-4411") && !text.contains("result"),
        "{text}"
    );
    let problem = refused.json();
    let operation = agent.operation("order/1%").await;
    let original = &problem["original"];
    assert_eq!(original["kind"], "note");
    assert_eq!(original["state"], "succeeded");
    assert_eq!(original["created_at"], operation["created_at"]);
    assert_eq!(original["fingerprint"], first.json()["fingerprint"]);
    assert_ne!(problem["fingerprint"], original["fingerprint"]);
    assert_eq!(problem["operation_id"], "order/1%");
    let url = original["operation_url"].as_str().unwrap();
    assert_eq!(agent.get(url).await.succeeded().json()["operation_id"], "order/1%");
    assert!(
        problem["detail"]
            .as_str()
            .unwrap()
            .contains("do not go on under a new key"),
        "{problem}"
    );
    assert_eq!(ledger.effects("order/1%").await, 1);
}

#[tokio::test]
async fn the_run_and_the_reference_are_no_part_of_the_intent() {
    let ledger = handlers::ledger("").await;
    let agent = ledger.agent();
    let body = |attempt: u32, step: &str| {
        format!(
            r#"{{"operation_id":"engine","kind":"note","payload":{{"n":1}},"external_reference":"ref-{attempt}",
                 "run":{{"engine":"e","run_id":"r-{attempt}","step":"{step}","attempt":{attempt}}}}}"#
        )
    };
    let first = agent.post("/v1/operations", &body(1, "a")).await.succeeded();
    for (attempt, step) in [(2, "a"), (3, "b")] {
        let again = agent.post("/v1/operations", &body(attempt, step)).await.succeeded();
        assert!(again.is_replay());
        assert_eq!(again.body, first.body);
    }
    let operation: Value = agent.operation("engine").await;
    assert_eq!(
        (&operation["run"]["attempt"], &operation["external_reference"]),
        (&1.into(), &"ref-1".into())
    );
}
