//! Unknown outcomes, recovered by what the downstream declares that it can do, and by nothing else.

use std::collections::HashMap;
use std::sync::Mutex;
use std::time::Duration;

use serde_json::json;

use super::{Bench, JSON, events, lost_at_first};
use crate::support::downstream::{Received, Script};

const KEY: &str = "[[routes]]\npath = \"/charges\"\nidempotency = \"key\"\nkey_retention = \"24h\"\nkey_header = \"X-Idem\"\n\
                   retry = { first_delay = \"100ms\", longest_delay = \"200ms\" }\n";

#[tokio::test]
async fn a_key_is_sent_again_with_the_same_bytes_and_its_caller_gets_the_answer() {
    let bench = Bench::with(KEY).await;
    bench
        .pay
        .answers(lost_at_first(|_| Script::answer(201, "{\"id\":\"ch_1\"}")));
    let body = "{\"b\": 1.0,  \"a\":[1]}";
    let lines = [
        ("idempotency-key", "k"),
        JSON,
        ("x-account", "7"),
        ("x-idem", "the agent's own"),
    ];
    let first = bench.agent().send("POST", "/v1/proxy/pay/charges", &lines, body).await;
    assert_eq!((first.status, first.json()["id"].as_str()), (201, Some("ch_1")));
    let [lost, again] = &bench.pay.requests()[..] else {
        panic!("{:?}", bench.pay.requests())
    };
    assert!(lost.header("x-idem").starts_with("opl-"));
    assert!(lost.all("idempotency-key").is_empty());
    assert_eq!(lost.body, body.as_bytes());
    let sent = |request: &Received| {
        (
            request.method.clone(),
            request.target.clone(),
            request.lines.clone(),
            request.body.clone(),
        )
    };
    assert_eq!(sent(lost), sent(again));
    let operation = bench.operation("k").await;
    assert_eq!(
        events(&operation),
        ["claimed", "outcome_unknown", "sent_again", "claimed", "succeeded"]
    );
    assert_eq!((&operation["attempts"], &operation["effects"]), (&2.into(), &1.into()));
    let stored: String = sqlx::query_scalar("select downstream_key from ledger.requests")
        .fetch_one(&bench.ledger.sql)
        .await
        .unwrap();
    assert_eq!(lost.header("x-idem"), stored);
    bench.nothing_more_is_sent().await;
}

#[tokio::test]
async fn each_operation_has_a_key_of_its_own_at_the_downstream() {
    let bench = Bench::with(KEY).await;
    let theirs = bench.ledger.tenant("other").await;
    for client in [bench.agent(), bench.agent().with_key(&theirs["agent"])] {
        for key in ["a", "b"] {
            client.forward("POST", key, "/charges", "{}").await.succeeded();
        }
    }
    let mut keys: Vec<_> = bench
        .pay
        .requests()
        .iter()
        .map(|request| request.header("x-idem").to_owned())
        .collect();
    keys.sort();
    keys.dedup();
    assert_eq!(keys.len(), 4);
}

#[tokio::test]
async fn a_key_that_is_still_in_use_downstream_is_not_the_first_ones_answer() {
    let bench = Bench::with(KEY).await;
    bench.pay.answers(|request| match request.number {
        0 => Script::new().reset(),
        1 => Script::answer(409, "{\"error\":\"in use\"}"),
        2 => Script::answer(503, "{}"),
        _ => Script::answer(200, "{\"id\":1}"),
    });
    let first = bench.post("k", "/charges", "{}").await.succeeded();
    assert_eq!(first.json()["id"], 1);
    assert_eq!(bench.pay.count(), 4);
}

#[tokio::test]
async fn a_key_is_not_relied_on_after_the_downstream_may_have_forgotten_it() {
    let bench = Bench::with(
        "head_timeout = \"1200ms\"\n[[routes]]\npath = \"/charges\"\nidempotency = \"key\"\nkey_retention = \"2s\"\nkey_margin = \"1s\"\n\
         retry = { first_delay = \"50ms\" }\n",
    )
    .await;
    bench.pay.answers(|_| Script::new().hang());
    let lines = [("idempotency-key", "k"), JSON, ("prefer", "wait=0")];
    let answer = bench.agent().send("POST", "/v1/proxy/pay/charges", &lines, "{}").await;
    answer.is(409, "outcome-unknown");
    // As if this process had died and another one came upon it, as due.
    let due = "update ledger.operations set due_at = now(), version = version + 1";
    crate::support::run(&bench.ledger.sql, due).await;
    let left = "select count(*) from ledger.history where event = 'left_to_people' and reason like '%forgotten%'";
    crate::support::until("a sweep leaves it to people", async || {
        bench.ledger.count(left).await == 1
    })
    .await;
    bench.nothing_more_is_sent().await;
    assert_eq!(bench.pay.count(), 1);
    assert_eq!(bench.state("k").await, "needs_reconciliation");
}

#[tokio::test]
async fn sends_under_a_key_come_to_an_end_and_the_rest_is_for_people() {
    let bench = Bench::with(&KEY.replace("first_delay", "max_attempts = 3, first_delay")).await;
    bench.pay.answers(|_| Script::new().reset());
    let lines = [("idempotency-key", "k"), JSON, ("prefer", "wait=3")];
    let answer = bench.agent().send("POST", "/v1/proxy/pay/charges", &lines, "{}").await;
    answer.is(409, "outcome-unknown");
    bench.nothing_more_is_sent().await;
    assert_eq!(bench.pay.count(), 3);
}

/// Whoever would wait for it waits for a person, and those take longer.
#[tokio::test]
async fn nobody_waits_for_what_only_a_person_can_end() {
    let bench = Bench::with(&KEY.replace("first_delay", "max_attempts = 2, first_delay")).await;
    bench.pay.answers(|_| Script::new().reset());
    let began = std::time::Instant::now();
    // The first waits for the second send, and no longer.
    bench.post("k", "/charges", "{}").await.is(409, "outcome-unknown");
    assert_eq!(bench.pay.count(), 2);
    bench.post("k", "/charges", "{}").await.is(409, "outcome-unknown");
    let lines = [("idempotency-key", "k"), JSON, ("prefer", "wait=30")];
    let patient = bench.agent().send("POST", "/v1/proxy/pay/charges", &lines, "{}").await;
    patient.is(409, "outcome-unknown");
    assert!(began.elapsed() < Duration::from_secs(8), "{:?}", began.elapsed());
    assert_eq!(bench.pay.count(), 2);
}

const OBJECT: &str = "[[routes]]\npath = \"/objects/*\"\nidempotency = \"conditional\"\n\
     read_back = { path = \"/objects/{/name}\", ours = { \"/ref\" = \"{operation_id}\" } }\n\
     retry = { first_delay = \"50ms\" }\n";

#[tokio::test]
async fn a_refused_condition_is_read_back_and_ours_foreign_and_nothing_are_told_apart() {
    let bench = Bench::with(OBJECT).await;
    bench.pay.answers(lost_at_first(|request| {
        match (request.method.as_str(), request.target.as_str()) {
            ("GET", "/base/objects/ours") => Script::with_lines(
                200,
                "ETag: \"7\"\r\nContent-Type: application/json\r\n",
                "{\"ref\":\"ours\",\"v\":1.10}",
            ),
            ("GET", "/base/objects/foreign") => Script::answer(200, "{\"ref\":\"somebody-else\"}"),
            ("GET", _) => Script::answer(404, "{}"),
            _ => Script::answer(412, "{\"error\":\"exists\"}"),
        }
    }));
    let put = async |name: &str| {
        let body = json!({"name": name}).to_string();
        bench
            .agent()
            .forward("PUT", name, &format!("/objects/{name}"), &body)
            .await
    };
    let ours = put("ours").await.succeeded();
    assert_eq!(ours.body, "{\"ref\":\"ours\",\"v\":1.10}");
    assert_eq!(ours.header("etag"), "\"7\"");
    assert_eq!(bench.state("ours").await, "succeeded");
    // Neither proves that it did not act.
    for name in ["foreign", "nothing"] {
        let lines = [("idempotency-key", name), JSON, ("prefer", "wait=1")];
        let (target, body) = (
            format!("/v1/proxy/pay/objects/{name}"),
            json!({ "name": name }).to_string(),
        );
        let unknown = bench.agent().send("PUT", &target, &lines, &body).await;
        unknown.is(409, "outcome-unknown");
        assert_eq!(bench.state(name).await, "needs_reconciliation");
    }
    bench.nothing_more_is_sent().await;
    for name in ["ours", "foreign", "nothing"] {
        // Two sends and one look.
        assert_eq!(bench.pay.sends(&format!("/objects/{name}")), 3, "{name}");
    }
}

#[tokio::test]
async fn a_condition_that_is_refused_at_once_is_an_answer() {
    let bench = Bench::with(OBJECT).await;
    bench.pay.answers(|_| Script::answer(409, "{\"error\":\"exists\"}"));
    let first = bench
        .agent()
        .forward("PUT", "k", "/objects/x", "{\"name\":\"x\"}")
        .await;
    assert_eq!((first.status, first.json()["error"].as_str()), (409, Some("exists")));
    assert_eq!(bench.state("k").await, "failed");
    assert_eq!(bench.pay.count(), 1);
}

const LOOKUP: &str = "head_timeout = \"400ms\"\nidle_timeout = \"400ms\"\n[[routes]]\npath = \"/orders\"\nidempotency = \"lookup\"\n\
     look_up = { path = \"/orders?ref={/ref}\", found = \"/data/0\", ours = { \"/data/0/ref\" = \"{/ref}\" } }\n\
     settle_delay = \"100ms\"\ninterval = \"150ms\"\nmax_in_flight = \"1500ms\"\nretry = { first_delay = \"50ms\" }\n";

#[tokio::test]
async fn a_look_up_that_finds_it_settles_it_and_sends_nothing() {
    let bench = Bench::with(LOOKUP).await;
    bench
        .pay
        .answers(|request| match (request.method.as_str(), request.number) {
            ("POST", _) => Script::new().reset(),
            // Not yet visible, not to be had, and then there.
            (_, 1) => Script::answer(200, "{\"data\":[]}"),
            (_, 2) => Script::answer(500, "{}"),
            _ => Script::answer(200, "{\"data\":[{\"ref\":\"r-1\",\"id\":\"or_1\"}]}"),
        });
    bench
        .post("k", "/orders", "{\"ref\":\"r-1\"}")
        .await
        .is(409, "outcome-unknown");
    let operation = bench.until("k", "succeeded").await;
    let found = bench.post("k", "/orders", "{\"ref\":\"r-1\"}").await.succeeded();
    assert!(found.is_replay());
    assert_eq!(found.json(), json!({"ref": "r-1", "id": "or_1"}));
    assert_eq!(bench.pay.sends("/orders"), 1);
    assert!(bench.pay.sends("/orders?ref=r-1") >= 3);
    assert_eq!(
        events(&operation)[..4],
        ["claimed", "outcome_unknown", "looked_up", "look_up_failed"]
    );
    assert_eq!((&operation["attempts"], &operation["effects"]), (&1.into(), &1.into()));
}

#[tokio::test]
async fn not_found_proves_nothing_before_the_request_cannot_be_on_its_way_any_more() {
    let bench = Bench::with(LOOKUP).await;
    bench
        .pay
        .answers(|request| match (request.method.as_str(), request.number) {
            ("POST", 0) => Script::new().reset(),
            ("POST", _) => Script::answer(201, "{\"id\":\"or_2\"}"),
            _ => Script::answer(200, "{\"data\":[]}"),
        });
    let began = std::time::Instant::now();
    bench
        .post("k", "/orders", "{\"ref\":\"r-1\"}")
        .await
        .is(409, "outcome-unknown");
    let operation = bench.until("k", "succeeded").await;
    assert!(
        began.elapsed() >= Duration::from_millis(1500),
        "sent again too early: {:?}",
        began.elapsed()
    );
    assert_eq!(bench.pay.sends("/orders"), 2);
    let seen = events(&operation);
    assert!(
        seen.iter().filter(|event| **event == "looked_up").count() >= 3,
        "{seen:?}"
    );
    assert_eq!(bench.post("k", "/orders", "{\"ref\":\"r-1\"}").await.status, 201);
}

#[tokio::test]
async fn a_look_up_that_shows_something_else_is_left_to_people() {
    let bench = Bench::with(LOOKUP).await;
    bench.pay.answers(|request| match request.method.as_str() {
        "POST" => Script::new().reset(),
        _ => Script::answer(200, "{\"data\":[{\"ref\":\"somebody-else\"}]}"),
    });
    bench
        .post("k", "/orders", "{\"ref\":\"r-1\"}")
        .await
        .is(409, "outcome-unknown");
    crate::support::until("it is looked up", async || bench.pay.count() == 2).await;
    bench.nothing_more_is_sent().await;
    assert_eq!(bench.state("k").await, "needs_reconciliation");
}

#[tokio::test]
async fn what_declares_nothing_stays_unknown() {
    let bench = Bench::start().await;
    bench.pay.answers(lost_at_first(|_| Script::answer(200, "{}")));
    bench.post("k", "/x", "{}").await.is(409, "outcome-unknown");
    // Not even a sweep that finds it due.
    crate::support::run(&bench.ledger.sql, "update ledger.operations set due_at = now()").await;
    bench.nothing_more_is_sent().await;
    assert_eq!(bench.state("k").await, "needs_reconciliation");
    assert_eq!(bench.pay.count(), 1);
}

/// A downstream that keeps its word, behind a network that loses every other answer.
#[tokio::test]
async fn with_a_downstream_that_keeps_its_keys_every_operation_has_one_effect() {
    let bench = Bench::with(KEY).await;
    let book: Mutex<HashMap<String, usize>> = Mutex::default();
    bench.pay.answers(move |request| {
        let mut book = book.lock().unwrap();
        let effects = book.len();
        let mut is_lost = false;
        let key = request.header("x-idem").to_owned();
        let effect = *book.entry(key).or_insert_with(|| {
            is_lost = effects.is_multiple_of(2);
            effects
        });
        if is_lost {
            Script::new().reset()
        } else {
            Script::answer(200, format!("{{\"effect\":{effect}}}"))
        }
    });
    let mut senders = tokio::task::JoinSet::new();
    for number in 0..20 {
        let agent = bench.agent();
        senders.spawn(async move {
            agent
                .forward("POST", &format!("k{number}"), "/charges", "{}")
                .await
                .succeeded()
        });
    }
    let answers = senders.join_all().await;
    let mut effects: Vec<_> = answers
        .iter()
        .map(|answer| answer.json()["effect"].as_u64().unwrap())
        .collect();
    effects.sort_unstable();
    assert_eq!(effects, (0..20).collect::<Vec<_>>());
}
