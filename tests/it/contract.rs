//! The router and `openapi.yaml` say the same, both ways. What answers look like is held to the file by the client of all
//! tests (`support/contract.rs`).

use std::collections::{BTreeMap, BTreeSet};

use bytes::Bytes;
use http::HeaderMap;
use opledger::http::health::PAGES;
use serde_json::Value;

use crate::support::client::Answer;
use crate::support::contract::contract;
use crate::support::downstream::{Downstream, Script};
use crate::support::{Ledger, Setup, until};

/// Every route of the sources, as the calls of `.route("…", …)` name them.
fn routes_of_the_sources() -> BTreeSet<String> {
    let mut routes = BTreeSet::new();
    for file in std::fs::read_dir(concat!(env!("CARGO_MANIFEST_DIR"), "/src/http")).unwrap() {
        let file = file.unwrap().path();
        let Ok(text) = std::fs::read_to_string(&file) else {
            panic!("a folder of routes is not looked into here: {}", file.display());
        };
        // A downstream has routes as well, which are asked for by that name.
        let calls = text
            .match_indices(".route(")
            .filter(|(at, _)| !text[..*at].trim_end().ends_with("downstream"));
        routes.extend(calls.map(|(at, call)| {
            let call = text[at + call.len()..]
                .trim_start()
                .strip_prefix('"')
                .expect("a route is a literal, so that it can be found here");
            // The description has no sign for a parameter of many segments; it says so beside it.
            call.split('"').next().unwrap().replace("{*", "{")
        }));
        for other in [".nest(", ".route_service(", ".nest_service("] {
            assert!(!text.contains(other), "{other} adds routes that this test does not see");
        }
    }
    routes
}

#[test]
fn every_route_is_described_and_every_described_path_is_a_route() {
    let described: BTreeSet<String> = contract().methods().keys().map(|path| (*path).to_owned()).collect();
    assert_eq!(routes_of_the_sources(), described);
}

#[tokio::test]
async fn every_path_takes_the_methods_that_are_described_and_no_other() {
    // Nobody listens at port 1: what is forwarded there is answered without being sent.
    let ledger = Ledger::with(Setup {
        config: "[downstreams.nobody]\nurl = \"http://127.0.0.1:1\"\n".to_owned(),
        ..Setup::default()
    })
    .await;
    for (path, methods) in contract().methods() {
        let target = path
            .replace("{operation_id}", "x")
            .replace("{key_id}", "x")
            .replace("{code}", "not-found")
            .replace("{downstream}", "nobody")
            .replace("{path}", "a/b");
        let refused = ledger
            .agent()
            .send("BREW", &target, &[], "")
            .await
            .is(405, "method-not-allowed");
        let mut allowed: Vec<&str> = refused.header("allow").split(',').map(str::trim).collect();
        allowed.sort_unstable();
        assert_eq!(allowed, methods, "{path}");
        for method in methods {
            let answer = ledger.agent().send(method, &target, &[], "").await;
            assert_ne!(answer.status, 405, "{method} {path}");
        }
    }
}

#[test]
fn the_checks_of_answers_notice_what_is_not_described() {
    let answer = |status: u16, headers: &[(&'static str, &str)], body: &str| {
        let lines = [
            ("request-id", "0195c3a8-5d3e-7c41-9f0a-3f2b6a1c9d10"),
            ("x-content-type-options", "nosniff"),
        ];
        let mut map = HeaderMap::new();
        for (name, value) in lines.iter().chain(headers) {
            map.append(*name, value.parse().unwrap());
        }
        Answer {
            status,
            headers: map,
            body: Bytes::copy_from_slice(body.as_bytes()),
        }
    };
    let json = ("content-type", "application/json");
    let faults = |path: &str, answer: Answer| contract().faults("GET", path, b"", &answer);
    assert_eq!(
        faults("/healthz", answer(200, &[json], r#"{"status":"ok"}"#)),
        Vec::<String>::new()
    );
    for (path, wrong) in [
        ("/healthz", answer(200, &[json], r#"{"status":"fine"}"#)),
        ("/healthz", answer(200, &[json], r#"{"status":"ok","more":1}"#)),
        ("/healthz", answer(200, &[json], "")),
        ("/healthz", answer(200, &[("content-type", "text/plain")], "ok")),
        (
            "/healthz",
            answer(200, &[json, ("x-powered-by", "axum")], r#"{"status":"ok"}"#),
        ),
        ("/healthz", answer(201, &[json], r#"{"status":"ok"}"#)),
        (
            "/v1/operations",
            answer(200, &[json], r#"{"operations":[],"next_cursor":null}"#),
        ),
        (
            "/v1/operations",
            answer(
                200,
                &[json, ("cache-control", "private")],
                r#"{"operations":[],"next_cursor":null}"#,
            ),
        ),
    ] {
        assert!(!faults(path, wrong.clone()).is_empty(), "{path}: {wrong:?}");
    }
}

#[test]
fn a_downstreams_own_answers_are_taken_for_its_own_and_nothing_else_is() {
    let lines = [
        ("request-id", "0195c3a8-5d3e-7c41-9f0a-3f2b6a1c9d10"),
        ("x-content-type-options", "nosniff"),
        ("cache-control", "no-store"),
    ];
    let answer = |status: u16, headers: &[(&'static str, &str)], body: &str| {
        let mut map = HeaderMap::new();
        for (name, value) in lines.iter().chain(headers) {
            map.append(*name, value.parse().unwrap());
        }
        Answer {
            status,
            headers: map,
            body: Bytes::copy_from_slice(body.as_bytes()),
        }
    };
    crate::support::contract::note_kinds("[kinds.\"contract.forwarded\"]\ndownstream = \"payments\"\n");
    let faults =
        |path: &str, sent: &str, answer: &Answer| contract().faults("POST", path, sent.as_bytes(), answer).len();
    let (forwarded, here) = (
        r#"{"kind":"contract.forwarded","payload":{}}"#,
        r#"{"kind":"account.deposit","payload":{}}"#,
    );
    let own = answer(
        418,
        &[("content-type", "text/x-tea"), ("x-total", "3"), ("location", "/tea/1")],
        "short and stout",
    );
    for path in ["/v1/proxy/payments", "/v1/proxy/payments/", "/v1/proxy/payments/a/b/"] {
        assert_eq!(faults(path, "", &own), 0, "{path}");
    }
    assert_eq!(faults("/v1/operations", forwarded, &own), 0);
    assert!(faults("/v1/operations", here, &own) > 0);
    assert_eq!(faults("/v1/operations/x/execute", "", &own), 0);
    let of_a_function = answer(418, &[("operation-id", "x")], r#"{"operation_id":"x"}"#);
    assert!(faults("/v1/operations/x/execute", "", &of_a_function) > 0);
    assert!(faults("/v1/operations/x/cancel", "", &own) > 0);
    assert!(faults("/v1/proxies/payments", "", &own) > 0);
    let cookie = answer(200, &[("set-cookie", "session=1")], "");
    assert!(faults("/v1/proxy/payments/a", "", &cookie) > 0);
    // A problem of ours keeps to what is said of ours, wherever it is.
    let problem = ("content-type", "application/problem+json");
    let ours = answer(418, &[problem], r#"{"type":"/problems/teapot","title":"Tea"}"#);
    assert!(faults("/v1/proxy/payments/a", "", &ours) > 0);
    let theirs = answer(418, &[problem], r#"{"type":"https://tea.example/pot","title":"Tea"}"#);
    assert_eq!(faults("/v1/proxy/payments/a", "", &theirs), 0);
}

#[test]
fn every_problem_is_described_and_has_its_page() {
    let api = &contract().api;
    let described: BTreeMap<&str, &Value> = api["x-problems"]
        .as_object()
        .unwrap()
        .iter()
        .map(|(code, problem)| (code.as_str(), problem))
        .collect();
    let listed: BTreeSet<&str> = api["components"]["schemas"]["Code"]["enum"]
        .as_array()
        .unwrap()
        .iter()
        .map(|code| code.as_str().unwrap())
        .collect();
    let pages: BTreeSet<&str> = PAGES.iter().map(|(code, _)| *code).collect();
    assert_eq!(described.keys().copied().collect::<BTreeSet<_>>(), listed);
    assert_eq!(pages, listed);
    for (code, page) in PAGES {
        let title = described[code]["title"].as_str().unwrap();
        assert!(page.contains(title), "the page of {code} lacks its title: {title}");
    }
    let rows = squeezed(include_str!("../../src/http/problem.rs"));
    let receipts = include_str!("../../src/ledger/receipt.rs");
    for (code, problem) in described {
        let (status, retryable) = (&problem["status"], &problem["retryable"]);
        let row = format!(
            "(\"{code}\", {status}, {retryable}, \"{}\")",
            problem["title"].as_str().unwrap()
        );
        // Approvals come later; their problem is described already, as old receipts must stay readable.
        let in_sources = rows.contains(&squeezed(&row))
            || receipts.contains(&format!("code: \"{code}\""))
            || code == "operation-rejected";
        assert!(in_sources, "{row} is not in the sources");
    }
}

/// Without blanks, and without the comma that the formatter puts at the end of a list that it breaks.
fn squeezed(text: &str) -> String {
    text.split_whitespace().collect::<String>().replace(",)", ")")
}

#[tokio::test]
async fn every_problem_leads_to_its_page() {
    let ledger = Ledger::start().await;
    for (code, page) in PAGES {
        let answer = ledger
            .agent()
            .with_key("")
            .get(&format!("/problems/{code}"))
            .await
            .succeeded();
        assert_eq!(answer.body, page.as_bytes());
    }
}

#[tokio::test]
async fn the_service_describes_and_watches_itself_without_a_credential() {
    let ledger = Ledger::start().await;
    let anyone = ledger.agent().with_key("");
    let described = anyone.get("/openapi.yaml").await.succeeded();
    assert_eq!(described.body, include_str!("../../openapi.yaml").as_bytes());
    anyone.get("/healthz").await.succeeded();
    anyone.get("/readyz").await.succeeded();
    let metrics = anyone.get("/metrics").await.succeeded();
    assert!(String::from_utf8_lossy(&metrics.body).ends_with("# EOF\n"));
}

/// Sends everything that can be answered about a downstream, each once; the client holds every answer to the description.
#[tokio::test]
async fn whatever_comes_of_a_downstream_is_answered_as_it_is_described() {
    let peer = Downstream::start().await;
    peer.answers(|_| Script::new().close());
    let ledger = Ledger::with(Setup {
        config: format!(
            "{PEER}\n[downstreams.peer]\nurl = \"http://{}/base\"\n{ROUTES}",
            peer.address
        ),
        ..Setup::default()
    })
    .await;
    let (agent, operator) = (ledger.agent(), ledger.client("operator"));
    let json = ("content-type", "application/json");
    let charge = async |key: &str, body: &str| {
        let lines = [("idempotency-key", key), json];
        agent.send("POST", "/v1/proxy/peer/charges", &lines, body).await
    };
    let decide =
        async |id: &str, verb: &str, body: &str| operator.post(&format!("/v1/operations/{id}/{verb}"), body).await;
    let receipt = async |id: &str| agent.get(&format!("/v1/operations/{id}/receipt")).await;

    // Refused before anything is sent.
    agent
        .send("POST", "/v1/proxy/peer/charges", &[json], "{}")
        .await
        .is(400, "key-missing");
    agent.get("/v1/proxy/peer/a//b").await.is(400, "request-invalid");
    agent.get("/v1/proxy/stranger/a").await.is(404, "not-found");
    agent.get("/v1/proxy/nobody/a").await.is(502, "downstream-unreachable");
    assert_eq!(peer.connections(), 0);

    // Answered, replayed, and refused under another request.
    let lines =
        "location: /charges/1\r\nx-total: 3\r\nx-other: 4\r\nset-cookie: a=b\r\ncontent-type: application/json\r\n";
    peer.plan(Script::with_lines(201, lines, r#"{"id":"ch_1"}"#));
    let first = charge("paid", r#"{"amount":1}"#).await;
    assert_eq!(
        (first.status, first.header("x-total"), first.header("x-other")),
        (201, "3", "")
    );
    assert_eq!(first.header("operation-state"), "succeeded");
    let again = charge("paid", r#"{ "amount": 1.0 }"#).await;
    assert!(again.is_replay());
    assert_eq!((again.status, &again.body), (201, &first.body));
    charge("paid", r#"{"amount":2}"#).await.is(422, "fingerprint-mismatch");
    assert_eq!(receipt("paid").await.body, first.body);
    assert_eq!(agent.operation("paid").await["external_reference"], "ch_1");
    peer.plan(Script::with_lines(402, "content-type: text/plain\r\n", "no money"));
    let refused = charge("refused", "{}").await;
    assert_eq!((refused.status, refused.header("operation-state")), (402, "failed"));

    // Safe requests keep what an answer has, and are nobody's operation.
    peer.plan(Script::with_lines(
        200,
        "x-other: 4\r\nset-cookie: a=b\r\ncontent-type: text/plain\r\n",
        "hello",
    ));
    let passed = agent.get("/v1/proxy/peer/charges/1?x=y").await.succeeded();
    assert_eq!((passed.header("x-other"), passed.header("operation-id")), ("4", ""));
    peer.plan(Script::with_lines(200, "", "hello"));
    let head = agent.send("HEAD", "/v1/proxy/peer", &[], "").await.succeeded();
    assert_eq!(head.header("content-length"), "5");
    agent.get("/v1/proxy/peer/").await.is(502, "downstream-failed");

    // Too large to store.
    peer.plan(Script::with_lines(200, "content-type: text/plain\r\n", "x".repeat(100)));
    assert_eq!(charge("large", "{}").await.body.len(), 100);
    let left = charge("large", "{}").await.is(410, "response-not-stored");
    assert_eq!(left.json()["response"]["size"], 100);
    receipt("large").await.is(410, "response-not-stored");

    // Unknown, and what people make of it.
    for id in ["found", "believed", "absent"] {
        charge(id, "{}").await.is(409, "outcome-unknown");
        receipt(id).await.is(409, "outcome-unknown");
    }
    let early = r#"{"verdict":"not-executed","version":2,"reason":"nothing there"}"#;
    let early = decide("absent", "resolve", early).await.is(409, "resolution-too-early");
    assert!(!early.header("retry-after").is_empty());
    let stale = r#"{"verdict":"failed","version":1,"reason":"nothing there"}"#;
    decide("absent", "resolve", stale).await.is(409, "state-conflict");
    decide("absent", "resolve", "{}").await.is(400, "request-invalid");
    let failed = r#"{"verdict":"failed","version":2,"reason":"nothing there","evidence":{"seen":[]}}"#;
    decide("absent", "resolve", failed).await.succeeded();
    charge("absent", "{}").await.is(422, "operation-failed");
    receipt("absent").await.is(422, "operation-failed");
    let found = r#"{"verdict":"succeeded","version":2,"reason":"it is there","external_reference":"ch_9",
                    "answer":{"status":201,"headers":[["x-total","1"]],"body":{"id":"ch_9"}}}"#;
    let resolved = decide("found", "resolve", found).await.succeeded().json();
    assert_eq!(
        (&resolved["state"], &resolved["external_reference"]),
        (&"succeeded".into(), &"ch_9".into())
    );
    assert_eq!(charge("found", "{}").await.body, r#"{"id":"ch_9"}"#);
    assert_eq!(receipt("found").await.status, 201);
    let believed = r#"{"verdict":"succeeded","version":2,"reason":"they say so"}"#;
    decide("believed", "resolve", believed).await.succeeded();
    assert_eq!(charge("believed", "{}").await.json()["resolution"], "they say so");
    assert_eq!(receipt("believed").await.json()["result"], Value::Null);

    // Undone.
    let undo = r#"{"version":2,"reason":"cancelled"}"#;
    decide("refused", "compensate", undo).await.is(409, "state-conflict");
    peer.plan(Script::with_lines(204, "", ""));
    let undone = decide("paid", "compensate", undo).await.succeeded().json();
    assert_eq!(undone["links"][0]["operation_id"], "paid:compensation");
    until("it is undone", async || {
        agent.operation("paid").await["state"] == "compensated"
    })
    .await;
    assert_eq!(receipt("paid").await.body, first.body);
    let listed = agent.get("/v1/operations?state=compensated").await.succeeded().json();
    assert_eq!(listed["operations"][0]["links"], undone["links"]);

    // What has succeeded, and could not be undone, has succeeded.
    peer.plan(Script::with_lines(
        201,
        "content-type: application/json\r\n",
        r#"{"id":"ch_2"}"#,
    ));
    let stands = charge("stands", "{}").await;
    peer.plan(Script::with_lines(402, "", "too late"));
    decide("stands", "compensate", undo).await.succeeded();
    until("the reversal is refused", async || {
        agent.operation("stands").await["state"] == "needs_reconciliation"
    })
    .await;
    let sent = peer.requests().len();
    let version = agent.operation("stands").await["version"].clone();
    let verdict = |verdict: &str| format!(r#"{{"verdict":"{verdict}","version":{version},"reason":"they refused"}}"#);
    for wrong in ["not-executed", "failed"] {
        decide("stands", "resolve", &verdict(wrong))
            .await
            .is(409, "state-conflict");
    }
    decide("stands", "resolve", &verdict("succeeded")).await.succeeded();
    assert_eq!(charge("stands", "{}").await.body, stands.body);
    assert_eq!(peer.requests().len(), sent);

    // Kinds that it performs.
    let submit = async |id: &str, lines: &[(&str, &str)]| {
        agent
            .submit_with(id, "order.charge", r#"{"charge":{"amount":1}}"#, lines)
            .await
    };
    peer.plan(Script::with_lines(201, "content-type: text/plain\r\n", "charged"));
    assert_eq!(submit("kind", &[]).await.body, "charged");
    assert!(submit("kind", &[]).await.is_replay());
    assert_eq!(receipt("kind").await.body, "charged");
    let unfit = agent.submit("unfit", "order.charge", r#"{"amount":1}"#).await;
    assert_eq!(unfit.is(400, "payload-invalid").json()["pointer"], "/payload");
    let plan = r#"{"operation_id":"plan","kind":"order.charge","payload":{"charge":1},"mode":"plan"}"#;
    let execute = async |id: &str| agent.post(&format!("/v1/operations/{id}/execute"), "").await;
    assert_eq!(agent.post("/v1/operations", plan).await.json()["state"], "planned");
    peer.plan(Script::with_lines(201, "content-type: text/plain\r\n", "charged"));
    assert_eq!(execute("plan").await.body, "charged");
    assert!(execute("plan").await.is_replay());
    let away = plan
        .replace("\"plan\",\"kind\"", "\"gone\",\"kind\"")
        .replace("charge\",", "away\",");
    assert_eq!(agent.post("/v1/operations", &away).await.json()["state"], "planned");
    execute("gone").await.is(502, "downstream-unreachable");
    peer.plan(Script::with_lines(200, "", ""));
    assert_eq!(submit("later", &[("prefer", "respond-async")]).await.status, 202);
    until("it is settled", async || {
        agent.operation("later").await["state"] == "succeeded"
    })
    .await;
    agent
        .submit("away", "order.away", "{}")
        .await
        .is(502, "downstream-unreachable");
    submit("silent", &[]).await.is(409, "outcome-unknown");
}

const PEER: &str = r#"
[recovery]
sweep = "200ms"

[downstreams.nobody]
url = "http://127.0.0.1:1"

[kinds."order.charge"]
downstream = "peer"
request = { method = "POST", path = "/charges", body = "/charge" }

[kinds."order.away"]
downstream = "nobody"
request = { method = "POST", path = "/charges" }
"#;

const ROUTES: &str = r#"
max_stored_body = 64
replayed_headers = ["X-Total"]

[[downstreams.peer.routes]]
method = "POST"
path = "/charges"
reference = "/id"
max_in_flight = "10m"
compensation = { method = "POST", path = "/charges/{/id}/undo" }
"#;
