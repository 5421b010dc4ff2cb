//! Reading operations: the document, the receipt, lists and their pages.

use std::collections::BTreeSet;

use serde_json::Value;
use sha2::{Digest, Sha256};

use crate::support::client::{Answer, encoded};
use crate::support::{Client, Ledger};

async fn plan(agent: &Client, id: &str) -> Answer {
    let body = format!(
        r#"{{"operation_id":"{id}","kind":"account.deposit","payload":{{"account":"acct-1","amount":1}},"mode":"plan"}}"#
    );
    let answer = agent.post("/v1/operations", &body).await;
    assert_eq!(answer.status, 202, "{answer:?}");
    answer
}

async fn cancel(agent: &Client, id: &str) -> Answer {
    agent
        .send("POST", &format!("/v1/operations/{}/cancel", encoded(id)), &[], "")
        .await
}

fn ids(page: &Value) -> Vec<String> {
    page["operations"]
        .as_array()
        .unwrap()
        .iter()
        .map(|one| one["operation_id"].as_str().unwrap().to_owned())
        .collect()
}

async fn listed(client: &Client, query: &str) -> Vec<String> {
    ids(&client.get(&format!("/v1/operations?{query}")).await.succeeded().json())
}

#[tokio::test]
async fn a_document_says_what_happened_and_never_the_payload() {
    let ledger = Ledger::start().await;
    let agent = ledger.agent();
    let body = r#"{"kind":"account.deposit","payload":{"account":"acct-7","amount":5},"external_reference":"ticket 7",
                   "run":{"engine":"langgraph","run_id":"r-1","step":"pay","attempt":2}}"#;
    let headers = [("idempotency-key", "a/b"), ("content-type", "application/json")];
    let first = agent.send("POST", "/v1/operations", &headers, body).await.succeeded();
    agent.send("POST", "/v1/operations", &headers, body).await.succeeded();
    let shown = agent.get("/v1/operations/a%2Fb").await.succeeded();
    assert_eq!(
        (shown.header("operation-id"), shown.header("operation-state")),
        ("a/b", "succeeded")
    );
    assert!(!String::from_utf8_lossy(&shown.body).contains("acct-7"));
    let document = shown.json();
    let receipt = first.json();
    for (member, expected) in [
        ("operation_id", Value::from("a/b")),
        ("kind", "account.deposit".into()),
        ("target", "shop.deposit".into()),
        ("state", "succeeded".into()),
        ("fingerprint", receipt["fingerprint"].clone()),
        (
            "run",
            serde_json::json!({"engine": "langgraph", "run_id": "r-1", "step": "pay", "attempt": 2}),
        ),
        ("external_reference", "ticket 7".into()),
        ("requested_by", ledger.keys["agent"].split('_').nth(2).unwrap().into()),
        ("deliveries", 2.into()),
        ("attempts", 1.into()),
        ("effects", 1.into()),
        ("settled_at", receipt["settled_at"].clone()),
        ("receipt_expires_at", first.header("receipt-expires").into()),
        ("links", Value::Array(Vec::new())),
    ] {
        assert_eq!(document[member], expected, "{member}");
    }
    assert_eq!(document["receipt"]["status"], 200);
    assert_eq!(document["receipt"]["size"], first.body.len());
    assert_eq!(document["receipt"]["body_sha256"], sha256(&first.body));
    assert_eq!(
        document["receipt"]["headers"],
        serde_json::json!([["content-type", "application/json"]])
    );
    // The list shows the same, without the history.
    let mut summary = document.clone();
    summary.as_object_mut().unwrap().remove("history");
    assert_eq!(
        agent.get("/v1/operations").await.json()["operations"],
        serde_json::json!([summary])
    );
}

#[tokio::test]
async fn history_tells_each_change_in_order_with_its_actor() {
    let ledger = Ledger::start().await;
    let agent = ledger.agent();
    plan(&agent, "withdrawn").await;
    cancel(&agent, "withdrawn").await.succeeded();
    plan(&agent, "executed").await;
    agent
        .send("POST", "/v1/operations/executed/execute", &[], "")
        .await
        .succeeded();
    agent
        .submit("refused", "account.deposit", r#"{"account":"nobody","amount":1}"#)
        .await
        .is(422, "operation-failed");
    let requester = format!("key:{}", ledger.keys["agent"].split('_').nth(2).unwrap());
    for (id, states, effects) in [
        ("withdrawn", vec!["planned", "cancelled"], 0),
        ("executed", vec!["planned", "running", "succeeded"], 1),
        ("refused", vec!["failed"], 0),
    ] {
        let document = agent.operation(id).await;
        let history = document["history"].as_array().unwrap();
        let mut told: Vec<&str> = history.iter().map(|entry| entry["state"].as_str().unwrap()).collect();
        told.dedup();
        // Whether a claim is told apart from its settlement is for the way it is run.
        let told: Vec<&str> = told.into_iter().filter(|state| *state != "running").collect();
        let states: Vec<&str> = states.into_iter().filter(|state| *state != "running").collect();
        assert_eq!(told, states, "{id}");
        assert_eq!(document["version"], history.len(), "{id}");
        assert_eq!(document["effects"], effects, "{id}");
        for entry in history {
            // What a caller decided is the caller's; what the ledger did for it is the process's, `requested_by` apart.
            let by_caller = ["planned", "cancelled"].contains(&entry["state"].as_str().unwrap());
            assert!(!by_caller || entry["actor"] == requester.as_str(), "{id}: {entry}");
        }
        let times: Vec<&str> = history.iter().map(|entry| entry["at"].as_str().unwrap()).collect();
        assert!(times.is_sorted(), "{id}: {times:?}");
    }
}

#[tokio::test]
async fn a_receipt_is_read_byte_for_byte_and_that_is_no_delivery() {
    let ledger = Ledger::start().await;
    let agent = ledger.agent();
    let paid = agent.deposit("paid", "acct-1", 5).await.succeeded();
    let refused = agent.deposit("refused", "nobody", 5).await.is(422, "operation-failed");
    plan(&agent, "withdrawn").await;
    cancel(&agent, "withdrawn").await.succeeded();
    let withdrawn = agent
        .send("POST", "/v1/operations/withdrawn/execute", &[], "")
        .await
        .is(409, "operation-cancelled");
    for (id, first) in [("paid", paid), ("refused", refused), ("withdrawn", withdrawn)] {
        for role in ["agent", "approver", "operator"] {
            let read = ledger.client(role).get(&format!("/v1/operations/{id}/receipt")).await;
            assert_eq!((read.status, &read.body), (first.status, &first.body), "{id} as {role}");
            assert_eq!(read.header("content-type"), first.header("content-type"));
            assert_eq!(read.header("receipt-expires"), first.header("receipt-expires"));
            assert_eq!(read.header("etag"), format!("\"{}\"", sha256(&first.body)));
            assert!(read.is_replay());
        }
        assert_eq!(agent.operation(id).await["deliveries"], 1, "{id}");
    }
    let head = agent.send("HEAD", "/v1/operations/paid/receipt", &[], "").await;
    assert_eq!((head.status, head.body.len()), (200, 0));
}

#[tokio::test]
async fn a_receipt_that_the_caller_holds_is_not_sent_again() {
    let ledger = Ledger::start().await;
    let agent = ledger.agent();
    agent.deposit("paid", "acct-1", 5).await.succeeded();
    agent.deposit("refused", "nobody", 5).await.is(422, "operation-failed");
    let read = async |id: &str, tags: &str| {
        agent
            .send(
                "GET",
                &format!("/v1/operations/{id}/receipt"),
                &[("if-none-match", tags)],
                "",
            )
            .await
    };
    let tag = read("paid", "\"x\"").await.succeeded().header("etag").to_owned();
    for held in [tag.clone(), format!("W/{tag}"), format!("\"x\", {tag}"), "*".to_owned()] {
        let answer = read("paid", &held).await;
        assert_eq!(
            (answer.status, answer.body.len(), answer.header("etag")),
            (304, 0, tag.as_str()),
            "{held}"
        );
    }
    for other in ["\"x\"".to_owned(), tag.trim_matches('"').to_owned(), tag.to_uppercase()] {
        assert_eq!(read("paid", &other).await.status, 200, "{other}");
    }
    let failed = read("refused", "*").await.is(422, "operation-failed");
    assert!(!failed.body.is_empty());
}

#[tokio::test]
async fn what_is_not_settled_has_no_receipt_yet() {
    let ledger = Ledger::start().await;
    let agent = ledger.agent();
    let planned = plan(&agent, "later").await;
    let read = agent.get("/v1/operations/later/receipt").await;
    assert_eq!((read.status, &read.body), (202, &planned.body));
    assert_eq!(read.header("location"), "/v1/operations/later");
    assert!(read.header("etag").is_empty());
    agent.get("/v1/operations/nobodys/receipt").await.is(404, "not-found");
    assert_eq!(agent.operation("later").await["receipt"], Value::Null);
}

#[tokio::test]
async fn waiting_for_a_planned_operation_does_not_wait() {
    let ledger = Ledger::start().await;
    let agent = ledger.agent();
    plan(&agent, "later").await;
    let began = std::time::Instant::now();
    let body = r#"{"operation_id":"later","kind":"account.deposit","payload":{"account":"acct-1","amount":1}}"#;
    let headers = [("content-type", "application/json"), ("prefer", "wait=30")];
    assert_eq!(agent.send("POST", "/v1/operations", &headers, body).await.status, 202);
    assert!(began.elapsed().as_secs() < 10, "nothing runs that could be waited for");
}

#[tokio::test]
async fn filters_hold_together() {
    let ledger = Ledger::start().await;
    let agent = ledger.agent();
    agent.deposit("d-1", "acct-1", 1).await.succeeded();
    agent.deposit("d-2", "acct-1", 1).await.succeeded();
    agent.deposit("failed", "nobody", 1).await.is(422, "operation-failed");
    plan(&agent, "planned").await;
    let refund = r#"{"operation_id":"r-1","kind":"order.refund","payload":{"order_id":"1001","amount":1},
                     "run":{"run_id":"run 1+%"},"external_reference":"ticket/7 ü"}"#;
    agent.post("/v1/operations", refund).await.succeeded();
    let fingerprint = agent.operation("d-1").await["fingerprint"].as_str().unwrap().to_owned();
    let moment = agent.operation("failed").await["created_at"]
        .as_str()
        .unwrap()
        .to_owned();
    for (query, expected) in [
        (String::new(), vec!["r-1", "planned", "failed", "d-2", "d-1"]),
        ("state=succeeded".to_owned(), vec!["r-1", "d-2", "d-1"]),
        ("state=planned".to_owned(), vec!["planned"]),
        ("state=failed".to_owned(), vec!["failed"]),
        ("state=needs_reconciliation".to_owned(), vec![]),
        ("kind=order.refund".to_owned(), vec!["r-1"]),
        ("kind=no.such.kind".to_owned(), vec![]),
        (format!("run_id={}", encoded("run 1+%")), vec!["r-1"]),
        ("run_id=run+1%2B%25".to_owned(), vec!["r-1"]),
        (format!("external_reference={}", encoded("ticket/7 ü")), vec!["r-1"]),
        (format!("fingerprint={fingerprint}"), vec!["planned", "d-2", "d-1"]),
        (
            format!("kind=account.deposit&fingerprint={fingerprint}&state=succeeded"),
            vec!["d-2", "d-1"],
        ),
        (format!("since={moment}"), vec!["r-1", "planned", "failed"]),
        (format!("until={moment}"), vec!["d-2", "d-1"]),
        (format!("since={moment}&until={moment}"), vec![]),
        ("kind=order.refund&state=planned".to_owned(), vec![]),
        ("limit=2".to_owned(), vec!["r-1", "planned"]),
        ("order=newest&limit=2".to_owned(), vec!["r-1", "planned"]),
        (
            "order=oldest".to_owned(),
            vec!["d-1", "d-2", "failed", "planned", "r-1"],
        ),
        (
            format!("order=oldest&since={moment}&limit=2"),
            vec!["failed", "planned"],
        ),
    ] {
        assert_eq!(listed(&agent, &query).await, expected, "{query}");
    }
}

#[tokio::test]
async fn pages_stay_true_while_operations_come_and_change() {
    let ledger = Ledger::start().await;
    let agent = ledger.agent();
    let mut there = BTreeSet::new();
    for number in 0..23 {
        let id = format!("first-{number}");
        plan(&agent, &id).await;
        there.insert(id);
    }
    // Several of one transaction share their time: the id decides then.
    sqlx::query("update ledger.operations set created_at = (select min(created_at) from ledger.operations) where operation_id like 'first-1%'")
        .execute(&ledger.sql)
        .await
        .unwrap();
    for query in ["", "&state=planned"] {
        let mut seen = Vec::new();
        let mut cursor = String::new();
        let mut pages = 0;
        loop {
            let page = agent
                .get(&format!("/v1/operations?limit=5{query}{cursor}"))
                .await
                .succeeded()
                .json();
            let of_page = ids(&page);
            assert!(of_page.len() <= 5);
            seen.extend(of_page);
            pages += 1;
            // New ones come before the first page, and those already shown change their state.
            plan(&agent, &format!("later{}-{pages}", query.len())).await;
            let last = seen.last().unwrap().clone();
            cancel(&agent, &last).await.succeeded();
            let Some(next) = page["next_cursor"].as_str() else {
                break;
            };
            cursor = format!("&cursor={next}");
        }
        let once: BTreeSet<String> = seen.iter().cloned().collect();
        assert_eq!(once.len(), seen.len(), "nothing is shown twice: {seen:?}");
        let still: BTreeSet<String> = if query.is_empty() {
            there.clone()
        } else {
            planned(&ledger, &once).await
        };
        assert!(once.is_superset(&still), "nothing is left out");
        assert!(
            !once.iter().any(|id| id.starts_with(&format!("later{}-", query.len()))),
            "{once:?}"
        );
    }
}

#[tokio::test]
async fn pages_with_the_oldest_first_show_each_operation_once_and_what_comes_later_last() {
    let ledger = Ledger::start().await;
    let agent = ledger.agent();
    for number in 0..17 {
        plan(&agent, &format!("first-{number}")).await;
    }
    // Several of one transaction share their time: the id decides then.
    sqlx::query("update ledger.operations set created_at = (select min(created_at) from ledger.operations) where operation_id like 'first-1%'")
        .execute(&ledger.sql)
        .await
        .unwrap();
    let (mut seen, mut cursor) = (Vec::new(), String::new());
    loop {
        let page = agent
            .get(&format!("/v1/operations?order=oldest&limit=4{cursor}"))
            .await
            .succeeded()
            .json();
        seen.extend(ids(&page));
        if seen.len() == 4 {
            plan(&agent, "later").await;
        }
        cancel(&agent, seen.last().unwrap()).await.succeeded();
        let Some(next) = page["next_cursor"].as_str() else {
            break;
        };
        cursor = format!("&cursor={next}");
    }
    let ordered: Vec<String> =
        sqlx::query_scalar("select operation_id from ledger.operations order by created_at, operation_id")
            .fetch_all(&ledger.sql)
            .await
            .unwrap();
    assert_eq!(seen, ordered);
    assert_eq!(seen.last().unwrap(), "later");
}

/// The first operations that are planned now, or were when they were shown.
async fn planned(ledger: &Ledger, shown: &BTreeSet<String>) -> BTreeSet<String> {
    let now: Vec<String> = sqlx::query_scalar(
        "select operation_id from ledger.operations where state = 'planned' and operation_id like 'first-%'",
    )
    .fetch_all(&ledger.sql)
    .await
    .unwrap();
    assert!(!now.is_empty() && !shown.is_empty());
    now.into_iter().collect()
}

#[tokio::test]
async fn a_page_has_50_items_unless_told_otherwise_and_500_at_most() {
    let ledger = Ledger::start().await;
    let agent = ledger.agent();
    plan(&agent, "one").await;
    sqlx::query(
        "insert into ledger.operations select (jsonb_populate_record(o, jsonb_build_object('operation_id', 'copy-' || n))).*
         from ledger.operations o, generate_series(1, 520) n",
    )
    .execute(&ledger.sql)
    .await
    .unwrap();
    for (query, count) in [("", 50), ("limit=1", 1), ("limit=500", 500)] {
        let page = agent.get(&format!("/v1/operations?{query}")).await.succeeded().json();
        assert_eq!(ids(&page).len(), count);
        assert!(page["next_cursor"].is_string());
    }
    for query in [
        "limit=0",
        "limit=501",
        "limit=-1",
        "limit=1.0",
        "limit=x",
        "limit=99999999999999999999",
    ] {
        refuses(&agent, query, "limit").await;
    }
}

async fn refuses(agent: &Client, query: &str, parameter: &str) {
    let refused = agent
        .get(&format!("/v1/operations?{query}"))
        .await
        .is(400, "request-invalid");
    assert_eq!(refused.json()["parameter"], parameter, "{query}");
}

#[tokio::test]
async fn a_bad_parameter_is_refused_by_its_name() {
    let ledger = Ledger::start().await;
    let agent = ledger.agent();
    let long = format!("run_id={}", "x".repeat(256));
    for (query, parameter) in [
        ("state=done", "state"),
        ("state=", "state"),
        ("state", "state"),
        ("state=planned&state=planned", "state"),
        ("kind=Order", "kind"),
        ("kind=%00", "kind"),
        ("run_id=a%0Ab", "run_id"),
        (&long, "run_id"),
        ("fingerprint=v1:00", "fingerprint"),
        (
            "fingerprint=v2:0000000000000000000000000000000000000000000000000000000000000000",
            "fingerprint",
        ),
        ("since=yesterday", "since"),
        ("since=2026-01-01", "since"),
        ("until=2026-13-01T00:00:00Z", "until"),
        ("until=9999-12-31T23:59:59-23:59", "until"),
        ("order=random", "order"),
        ("order=oldest&order=oldest", "order"),
        ("colour=red", "colour"),
        ("cursor=x", "cursor"),
        ("cursor=AAAA", "cursor"),
        ("cursor=MjAyNi0wMS0wMVQwMDowMDowMFo", "cursor"),
        ("kind=%ZZ", "%ZZ"),
        ("kind=%FF", "%FF"),
    ] {
        refuses(&agent, query, parameter).await;
    }
    for odd in [
        "since=0000-01-01T00:00:00Z",
        "since=9999-12-31T23:59:59Z",
        "until=0000-01-01T00:00:00Z",
        "until=2026-01-01T00:00:00%2B14:00",
    ] {
        agent.get(&format!("/v1/operations?{odd}")).await.succeeded();
    }
}

fn sha256(bytes: &[u8]) -> String {
    Sha256::digest(bytes).iter().map(|byte| format!("{byte:02x}")).collect()
}
