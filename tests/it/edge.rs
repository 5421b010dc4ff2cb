//! The edge on the wire: sizes, times, framing, and odd ids. One shape for every error, whoever notices it first.

use std::fmt::Write as _;
use std::time::{Duration, Instant};

use crate::support::client::{Answer, encoded};
use crate::support::downstream::Downstream;
use crate::support::wire::Wire;
use crate::support::{Client, Ledger, Setup};

/// A kind that takes any payload and gives it back.
const ECHO: &str = "create function shop.echo(payload jsonb, operation jsonb) returns jsonb language sql
                    as 'select payload'; grant execute on function shop.echo(jsonb, jsonb) to opledger;";
const ECHO_KIND: &str = "[kinds.\"test.echo\"]\nhandler = \"shop.echo\"\n";

async fn with_limits(limits: &str) -> Ledger {
    Ledger::with(Setup {
        config: format!("[limits]\n{limits}\n{ECHO_KIND}"),
        sql: ECHO.to_owned(),
    })
    .await
}

/// The head of a submission, without its length.
fn head(agent: &Client, key: &str) -> String {
    format!(
        "POST /v1/operations HTTP/1.1\r\nhost: ledger\r\nauthorization: Bearer {}\r\nidempotency-key: {key}\r\n\
         content-type: application/json\r\n",
        agent.key
    )
}

fn get(agent: &Client, target: &str) -> String {
    format!(
        "GET {target} HTTP/1.1\r\nhost: ledger\r\nauthorization: Bearer {}\r\n\r\n",
        agent.key
    )
}

/// A deposit that is this many bytes long.
fn padded(bytes: usize) -> String {
    let body = r#"{"kind":"account.deposit","payload":{"account":"acct-1","amount":5}}"#;
    format!("{body}{}", " ".repeat(bytes - body.len()))
}

fn in_chunks(body: &str) -> Vec<u8> {
    let mut chunks = Vec::new();
    for chunk in body.as_bytes().chunks(60_000) {
        chunks.extend_from_slice(format!("{:x}\r\n", chunk.len()).as_bytes());
        chunks.extend_from_slice(chunk);
        chunks.extend_from_slice(b"\r\n");
    }
    chunks.extend_from_slice(b"0\r\n\r\n");
    chunks
}

async fn submitted(wire: &mut Wire) -> Option<Answer> {
    wire.answer_to("POST", "/v1/operations").await
}

#[tokio::test]
async fn a_body_over_the_limit_is_answered_to_a_client_that_is_still_writing_and_claims_nothing() {
    const LIMIT: usize = 100_000;
    let ledger = with_limits(&format!("max_body_bytes = {LIMIT}")).await;
    let agent = ledger.agent();
    // Far over the limit the server stops looking at it, but a reset would take the answer away from most clients.
    for bytes in [LIMIT + 1, 3 * LIMIT, 40 * LIMIT] {
        let body = padded(bytes);
        let length = format!("{}content-length: {bytes}\r\n\r\n{body}", head(&agent, "big"));
        let mut chunked = format!("{}transfer-encoding: chunked\r\n\r\n", head(&agent, "big")).into_bytes();
        chunked.extend(in_chunks(&body));
        for request in [length.into_bytes(), chunked] {
            let mut wire = Wire::sent(agent.address, request).await;
            assert!(wire.taken, "the connection was reset while {bytes} bytes were sent");
            submitted(&mut wire).await.expect("an answer").is(413, "too-large");
        }
    }
    agent.get("/v1/operations/big").await.is(404, "not-found");
    let fits = padded(LIMIT);
    let mut wire = Wire::sent(
        agent.address,
        format!("{}content-length: {LIMIT}\r\n\r\n{fits}", head(&agent, "big")),
    )
    .await;
    submitted(&mut wire).await.expect("an answer").succeeded();
    let mut chunked = format!("{}transfer-encoding: chunked\r\n\r\n", head(&agent, "big")).into_bytes();
    chunked.extend(in_chunks(&fits));
    assert!(
        submitted(&mut Wire::sent(agent.address, chunked).await)
            .await
            .expect("an answer")
            .succeeded()
            .is_replay()
    );
}

#[tokio::test]
async fn a_body_that_says_it_is_too_large_is_refused_before_any_of_it_is_sent() {
    const LIMIT: usize = 1000;
    let pay = Downstream::start().await;
    let ledger = with_limits(&format!(
        "max_body_bytes = {LIMIT}\n{}",
        pay.config("pay", &format!("max_request_bytes = {LIMIT}"))
    ))
    .await;
    let agent = ledger.agent();
    for target in ["/v1/operations", "/v1/proxy/pay/x"] {
        let head = head(&agent, "big").replace("/v1/operations", target);
        for length in [LIMIT + 1, usize::MAX >> 1] {
            for expect in ["", "expect: 100-continue\r\n"] {
                let mut wire =
                    Wire::sent(agent.address, format!("{head}{expect}content-length: {length}\r\n\r\n")).await;
                // Not 100 (Continue), which would be the first that comes.
                let answer = wire.answer_to("POST", target).await.expect("an answer");
                answer.clone().is(413, "too-large");
                assert_eq!(answer.header("connection"), "close");
                assert!(wire.is_closed().await);
            }
        }
    }
    agent.get("/v1/operations/big").await.is(404, "not-found");
    assert_eq!(pay.connections(), 0);
}

#[tokio::test]
async fn a_client_that_writes_all_of_a_refused_body_slowly_finds_the_answer() {
    let ledger = with_limits("max_body_bytes = 1000").await;
    let agent = ledger.agent();
    let began = Instant::now();
    let request = format!("{}content-length: 4000000\r\n\r\n", head(&agent, "big"));
    let mut wire = Wire::sent(agent.address, request).await;
    for _ in 0..40 {
        wire.send(padded(100_000)).await;
        // The subject is a slow writer.
        tokio::time::sleep(Duration::from_millis(80)).await;
    }
    assert!(began.elapsed() > Duration::from_secs(3));
    assert!(wire.taken, "the connection was reset");
    submitted(&mut wire).await.expect("an answer").is(413, "too-large");
    agent.get("/v1/operations/big").await.is(404, "not-found");
}

#[tokio::test]
async fn a_client_that_waits_for_100_continue_gets_it_or_its_answer() {
    let ledger = with_limits("max_body_bytes = 1000").await;
    let agent = ledger.agent();
    let head = format!("{}expect: 100-continue\r\n", head(&agent, "patient"));
    let mut wire = Wire::sent(agent.address, format!("{head}content-length: 100\r\n\r\n")).await;
    assert_eq!(wire.status().await, Some(100));
    wire.send(padded(100)).await;
    submitted(&mut wire).await.expect("an answer").succeeded();
}

#[tokio::test]
async fn what_arrives_too_slowly_is_answered_408_or_cut_off_and_claims_nothing() {
    let ledger = with_limits("header_timeout = \"500ms\"\nbody_timeout = \"500ms\"").await;
    let agent = ledger.agent();
    let began = Instant::now();
    let mut head_only = Wire::sent(agent.address, "GET /healthz HTTP/1.1\r\nhost: le").await;
    let mut silent = Wire::connect(agent.address).await;
    let body = padded(100);
    let request = format!("{}content-length: 100\r\n\r\n{}", head(&agent, "slow"), &body[..99]);
    let mut half = Wire::sent(agent.address, request).await;
    let chunked = format!(
        "{}transfer-encoding: chunked\r\n\r\n64\r\n{body}\r\n",
        head(&agent, "slow")
    );
    let mut unfinished = Wire::sent(agent.address, chunked).await;
    assert!(head_only.is_closed().await);
    assert!(silent.is_closed().await);
    for wire in [&mut half, &mut unfinished] {
        submitted(wire).await.expect("an answer").is(408, "request-timeout");
        assert!(wire.is_closed().await, "what comes late must not be read as a request");
    }
    assert!(began.elapsed() < Duration::from_secs(8), "{:?}", began.elapsed());
    agent.get("/v1/operations/slow").await.is(404, "not-found");
    agent.deposit("slow", "acct-1", 5).await.succeeded();
}

#[tokio::test]
async fn a_body_that_breaks_off_claims_nothing() {
    let ledger = Ledger::start().await;
    let agent = ledger.agent();
    let body = padded(100);
    for rest in [
        format!("content-length: 100\r\n\r\n{}", &body[..70]),
        format!("transfer-encoding: chunked\r\n\r\n64\r\n{body}\r\n"),
        format!("transfer-encoding: chunked\r\n\r\n64\r\n{body}"),
    ] {
        let wire = Wire::sent(agent.address, format!("{}{rest}", head(&agent, "broken"))).await;
        assert!(wire.half_closed().await.is_none_or(|answer| answer.status == 400));
    }
    for chunks in ["xyz\r\n", "-1\r\n\r\n", "ffffffffffffffffff\r\n"] {
        let request = format!("{}transfer-encoding: chunked\r\n\r\n{chunks}", head(&agent, "broken"));
        let answer = submitted(&mut Wire::sent(agent.address, request).await).await;
        answer.expect("an answer").is(400, "request-invalid");
    }
    assert_eq!(ledger.count("select count(*) from ledger.operations").await, 0);
}

#[tokio::test]
async fn every_error_has_the_one_shape() {
    let ledger = Ledger::start().await;
    let agent = ledger.agent();
    let json = [("content-type", "application/json"), ("idempotency-key", "k")];
    let submit = async |headers: &[(&str, &str)], body: &str| agent.send("POST", "/v1/operations", headers, body).await;
    submit(&json, "{").await.is(400, "payload-invalid");
    submit(&json, "").await.is(400, "payload-invalid");
    submit(&json, "\u{feff}{}").await.is(400, "payload-invalid");
    submit(&[("content-type", "text/plain"), ("idempotency-key", "k")], "{}")
        .await
        .is(415, "unsupported-media-type");
    submit(&[("idempotency-key", "k")], "{}")
        .await
        .is(415, "unsupported-media-type");
    let compressed = [json[0], json[1], ("content-encoding", "gzip")];
    submit(&compressed, "{}").await.is(415, "unsupported-media-type");
    submit(&json[..1], r#"{"kind":"account.deposit","payload":{}}"#)
        .await
        .is(400, "key-missing");
    agent
        .send("POST", "/v1/operations/k/cancel", &[], "x")
        .await
        .is(400, "request-invalid");
    for path in [
        "/",
        "/v1",
        "/v1/",
        "/v1/nothing",
        "/v1/operations/a/b",
        "/v1/keys/x/y",
        "/v2/operations",
        "/problems/none",
        "/healthz/",
    ] {
        agent.get(path).await.is(404, "not-found");
    }
    for (method, path) in [
        ("PUT", "/v1/operations"),
        ("DELETE", "/v1/operations/x"),
        ("GET", "/v1/operations/x/cancel"),
        ("OPTIONS", "/v1/operations"),
        ("BREW", "/healthz"),
        ("POST", "/v1/keys/x"),
    ] {
        agent.send(method, path, &[], "").await.is(405, "method-not-allowed");
    }
    agent.get("/v1/operations/%20").await.is(400, "key-invalid");
    agent.get("/v1/operations/%FF").await.is(400, "key-invalid");
    agent
        .get(&format!("/v1/operations/{}", "x".repeat(9_000)))
        .await
        .is(414, "uri-too-long");
    agent
        .get(&format!("/v1/operations?kind={}", "x".repeat(9_000)))
        .await
        .is(414, "uri-too-long");
    agent
        .send("GET", "/healthz", &[("x-large", &"x".repeat(40_000))], "")
        .await
        .is(431, "headers-too-large");
    let many: Vec<(String, String)> = (0..150).map(|number| (format!("x-{number}"), "y".to_owned())).collect();
    let many: Vec<(&str, &str)> = many
        .iter()
        .map(|(name, value)| (name.as_str(), value.as_str()))
        .collect();
    agent
        .send("GET", "/healthz", &many, "")
        .await
        .is(431, "headers-too-large");
}

#[tokio::test]
async fn what_is_no_http_at_all_gets_the_one_shape_too_and_the_connection_ends() {
    let ledger = Ledger::start().await;
    let address = ledger.running.address;
    let mut lines = String::new();
    for number in 0..2_000 {
        let _ = write!(lines, "x-{number}: y\r\n");
    }
    let long = "x".repeat(300_000);
    for (request, status, code) in [
        ("hello\r\n\r\n".to_owned(), 400, "request-invalid"),
        (
            "\u{16}\u{3}\u{1}\u{2}\0\u{1}\0\u{1}\u{fc}\u{3}\u{3}\r\n\r\n".to_owned(),
            400,
            "request-invalid",
        ),
        ("GET /healthz HTTP/9.9\r\n\r\n".to_owned(), 400, "request-invalid"),
        (
            "GET /health z HTTP/1.1\r\nhost: x\r\n\r\n".to_owned(),
            400,
            "request-invalid",
        ),
        (
            "GET /healthz HTTP/1.1\r\nno colon\r\n\r\n".to_owned(),
            400,
            "request-invalid",
        ),
        (
            "GET /healthz HTTP/1.1\r\nna me: x\r\n\r\n".to_owned(),
            400,
            "request-invalid",
        ),
        (
            "GET /healthz HTTP/1.1\r\nx: a\0b\r\n\r\n".to_owned(),
            400,
            "request-invalid",
        ),
        (
            format!("GET /healthz HTTP/1.1\r\n{lines}\r\n"),
            431,
            "headers-too-large",
        ),
        (
            format!("GET /healthz HTTP/1.1\r\nx: {long}\r\n\r\n"),
            431,
            "headers-too-large",
        ),
        (
            format!("GET /{} HTTP/1.1\r\nhost: x\r\n\r\n", &long[..70_000]),
            414,
            "uri-too-long",
        ),
    ] {
        let shown: String = request.chars().take(60).collect();
        let mut wire = Wire::sent(address, request).await;
        let answer = wire
            .answer_to("GET", "/")
            .await
            .unwrap_or_else(|| panic!("no answer to {shown:?}"));
        assert_eq!((answer.status, answer.code().as_str()), (status, code), "{shown:?}");
        assert_eq!(answer.header("connection"), "close", "{shown:?}");
        assert!(wire.is_closed().await, "{shown:?}");
    }
    // A client that begins with HTTP/2 would not understand an answer.
    assert!(
        Wire::sent(address, "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n")
            .await
            .is_closed()
            .await
    );
    // After a good request on the same connection as well.
    let mut wire = Wire::sent(address, "GET /healthz HTTP/1.1\r\nhost: x\r\n\r\nhello\r\n\r\n").await;
    assert_eq!(wire.answer_to("GET", "/healthz").await.expect("an answer").status, 200);
    wire.answer_to("GET", "/")
        .await
        .expect("an answer")
        .is(400, "request-invalid");
}

#[tokio::test]
async fn nothing_is_smuggled_past_a_front_end() {
    let ledger = Ledger::start().await;
    let agent = ledger.agent();
    let inner = format!("{}content-length: 68\r\n\r\n{}", head(&agent, "smuggled"), padded(68));
    let body = padded(80);
    let head = head(&agent, "outer");
    let refused = [
        // Two lengths.
        format!("{head}content-length: 80\r\ncontent-length: 81\r\n\r\n{body}{inner}"),
        format!("{head}content-length: 80, 81\r\n\r\n{body}{inner}"),
        format!("{head}content-length: +80\r\n\r\n{body}{inner}"),
        format!("{head}content-length: 0x50\r\n\r\n{body}{inner}"),
        // Encodings that one end reads and the other does not.
        format!("{head}transfer-encoding: xchunked\r\n\r\n50\r\n{body}\r\n0\r\n\r\n{inner}"),
        format!("{head}transfer-encoding: gzip, chunked\r\n\r\n50\r\n{body}\r\n0\r\n\r\n{inner}"),
        format!("{head}transfer-encoding: gzip\r\ntransfer-encoding: chunked\r\n\r\n50\r\n{body}\r\n0\r\n\r\n{inner}"),
        format!("{head}transfer-encoding: chunked, chunked\r\n\r\n50\r\n{body}\r\n0\r\n\r\n{inner}"),
        format!("{head}transfer-encoding: chunked, identity\r\n\r\n50\r\n{body}\r\n0\r\n\r\n{inner}"),
        format!("{head}transfer-encoding : chunked\r\n\r\n50\r\n{body}\r\n0\r\n\r\n{inner}"),
        format!(
            "{}transfer-encoding: chunked\r\n\r\n50\r\n{body}\r\n0\r\n\r\n{inner}",
            head.replace("HTTP/1.1", "HTTP/1.0")
        ),
        // Folded lines, bare CR, and a line before the first header.
        format!("{head}x: a\r\n content-length: 80\r\n\r\n{inner}"),
        format!("{head}x: a\r\n\tcontent-length: 80\r\n\r\n{inner}"),
        format!("{head}x: a\rcontent-length: 80\r\n\r\n{inner}"),
        format!("{head}x: a\r\rcontent-length: 80\r\r{inner}"),
        head.replacen("\r\n", "\r\n content-length: 80\r\n", 1) + "\r\n" + &inner,
    ];
    for request in &refused {
        let mut wire = Wire::sent(agent.address, request).await;
        submitted(&mut wire)
            .await
            .expect("an answer")
            .is(400, "request-invalid");
        assert!(wire.is_closed().await, "{request:?}");
    }
    assert_eq!(ledger.count("select count(*) from ledger.operations").await, 0);
    // Both framings: the chunks count, and whatever follows on the connection is never read as a request (RFC 9112, 6.1).
    let both = format!("{head}content-length: 4\r\ntransfer-encoding: chunked\r\n\r\n50\r\n{body}\r\n0\r\n\r\n{inner}");
    let mut wire = Wire::sent(agent.address, both).await;
    submitted(&mut wire).await.expect("an answer").succeeded();
    assert!(wire.is_closed().await);
    let fewer = format!("{head}transfer-encoding: chunked\r\ncontent-length: 6\r\n\r\n0\r\n\r\n{inner}");
    let mut wire = Wire::sent(agent.address, fewer).await;
    submitted(&mut wire)
        .await
        .expect("an answer")
        .is(400, "payload-invalid");
    assert!(wire.is_closed().await);
    agent.get("/v1/operations/smuggled").await.is(404, "not-found");
}

#[tokio::test]
async fn pipelined_requests_are_answered_in_their_order() {
    let ledger = Ledger::start().await;
    let agent = ledger.agent();
    let body = padded(80);
    let submit = |key: &str| format!("{}content-length: 80\r\n\r\n{body}", head(&agent, key));
    let requests = [
        submit("p-1"),
        get(&agent, "/v1/operations/p-1/receipt"),
        submit("p-2"),
        submit("p-1"),
    ]
    .concat();
    let mut wire = Wire::sent(agent.address, requests).await;
    let first = submitted(&mut wire).await.expect("an answer").succeeded();
    let read = wire
        .answer_to("GET", "/v1/operations/p-1/receipt")
        .await
        .expect("an answer")
        .succeeded();
    let second = submitted(&mut wire).await.expect("an answer").succeeded();
    let again = submitted(&mut wire).await.expect("an answer").succeeded();
    assert_eq!((&read.body, &again.body), (&first.body, &first.body));
    assert_eq!(second.header("operation-id"), "p-2");
    assert!(again.is_replay());
}

#[tokio::test]
async fn an_empty_id_is_refused_wherever_it_stands() {
    let ledger = Ledger::start().await;
    let agent = ledger.agent();
    let payload = r#"{"account":"acct-1","amount":5}"#;
    for key in ["", "\"\"", "   ", "\t"] {
        agent
            .submit(key, "account.deposit", payload)
            .await
            .is(400, "key-invalid");
    }
    let in_body = format!(r#"{{"operation_id":"","kind":"account.deposit","payload":{payload}}}"#);
    agent.post("/v1/operations", &in_body).await.is(400, "key-invalid");
    agent
        .post("/v1/operations", &in_body.replace("\"\"", "null"))
        .await
        .is(400, "payload-invalid");
    agent.get("/v1/operations/").await.is(404, "not-found");
    agent.get("/v1/operations//receipt").await.is(400, "key-invalid");
    agent
        .send("POST", "/v1/operations//execute", &[], "")
        .await
        .is(400, "key-invalid");
    assert_eq!(ledger.count("select count(*) from ledger.operations").await, 0);
}

#[tokio::test]
async fn every_id_of_the_alphabet_works_in_every_path() {
    let ledger = Ledger::start().await;
    let agent = ledger.agent();
    let all: String = ('!'..='~').collect();
    let ids = [
        "/",
        ".",
        "..",
        "../x",
        "a/b",
        "a//b",
        "/a/",
        "%",
        "%2F",
        "%252F",
        "%00",
        "?a=b",
        "a#b",
        "a&b",
        "a+b",
        "\"",
        "'",
        "\"a\"",
        "a\"b",
        "\\",
        "<img/src=x/onerror=alert(1)>",
        "=1+1",
        "@x",
        "-1",
        "{operation_id}",
        "*",
        "receipt",
        "~",
        &all,
    ];
    for id in ids {
        let body = format!(
            r#"{{"operation_id":{},"kind":"account.deposit","payload":{{"account":"acct-1","amount":1}}}}"#,
            serde_json::Value::from(id)
        );
        let first = agent.post("/v1/operations", &body).await.succeeded();
        assert_eq!(
            (first.header("operation-id"), first.json()["operation_id"].as_str()),
            (id, Some(id))
        );
        // The same id as a quoted key.
        let quoted = format!("\"{}\"", id.replace('\\', "\\\\").replace('"', "\\\""));
        assert!(
            agent
                .submit(&quoted, "account.deposit", r#"{"account":"acct-1","amount":1}"#)
                .await
                .succeeded()
                .is_replay()
        );
        let path = format!("/v1/operations/{}", encoded(id));
        assert_eq!(agent.get(&path).await.succeeded().json()["operation_id"], id);
        assert_eq!(agent.get(&format!("{path}/receipt")).await.succeeded().body, first.body);
        let again = agent
            .send("POST", &format!("{path}/execute"), &[], "")
            .await
            .succeeded();
        assert_eq!(again.body, first.body);
        let conflict = agent
            .send("POST", &format!("{path}/cancel"), &[], "")
            .await
            .is(409, "state-conflict");
        let url = conflict.json()["operation_url"].as_str().unwrap().to_owned();
        assert_eq!(agent.get(&url).await.succeeded().json()["operation_id"], id, "{url}");
    }
    assert_eq!(
        ledger.count("select count(*) from ledger.operations").await,
        i64::try_from(ids.len()).unwrap()
    );
}

#[tokio::test]
async fn ids_outside_the_alphabet_are_refused_and_never_merged() {
    let ledger = Ledger::start().await;
    let agent = ledger.agent();
    for id in [
        "a b",
        "a\nb",
        "a\r\nb",
        "é",
        "e\u{301}",
        "😀",
        "a\u{0}b",
        "\u{7f}",
        " a",
        "a ",
        "\u{a0}",
        "\u{feff}a",
    ] {
        let body = format!(
            r#"{{"operation_id":{},"kind":"account.deposit","payload":{{"account":"acct-1","amount":1}}}}"#,
            serde_json::Value::from(id)
        );
        let refused = agent.post("/v1/operations", &body).await;
        assert_eq!(refused.status, 400, "{id:?}");
        assert!(
            ["key-invalid", "payload-invalid"].contains(&refused.code().as_str()),
            "{id:?}"
        );
        agent
            .get(&format!("/v1/operations/{}", encoded(id)))
            .await
            .is(400, "key-invalid");
    }
    for key in [
        "a b",
        "\"a",
        "a\"b\" c",
        "\"a\" x",
        "\"a\"b",
        "\"\\x\"",
        "é",
        "\"a\";p=1",
    ] {
        agent
            .submit(key, "account.deposit", r#"{"account":"acct-1","amount":1}"#)
            .await
            .is(400, "key-invalid");
    }
    assert_eq!(ledger.count("select count(*) from ledger.operations").await, 0);
}

#[tokio::test]
async fn a_key_has_at_most_255_bytes_and_is_never_cut() {
    let ledger = Ledger::start().await;
    let agent = ledger.agent();
    for length in [1, 255] {
        let key = "k".repeat(length);
        agent.deposit(&key, "acct-1", 1).await.succeeded();
        assert_eq!(agent.operation(&key).await["operation_id"], key.as_str());
    }
    for length in [256, 2_704, 10_000] {
        let key = "k".repeat(length);
        agent.deposit(&key, "acct-1", 1).await.is(400, "key-invalid");
        let body = format!(
            r#"{{"operation_id":"{key}","kind":"account.deposit","payload":{{"account":"acct-1","amount":1}}}}"#
        );
        agent.post("/v1/operations", &body).await.is(400, "key-invalid");
    }
    let (first, second) = (format!("{}a", "x".repeat(254)), format!("{}b", "x".repeat(254)));
    agent.deposit(&first, "acct-1", 1).await.succeeded();
    assert!(!agent.deposit(&second, "acct-1", 1).await.succeeded().is_replay());
    assert_eq!(ledger.count("select count(*) from ledger.operations").await, 4);
}

#[tokio::test]
async fn quotes_around_a_key_are_not_part_of_it() {
    let ledger = Ledger::start().await;
    let agent = ledger.agent();
    let first = agent.deposit("\"abc\"", "acct-1", 1).await.succeeded();
    assert_eq!(first.header("operation-id"), "abc");
    for key in ["abc", "  abc  ", " \"abc\"\t"] {
        assert!(agent.deposit(key, "acct-1", 1).await.succeeded().is_replay(), "{key:?}");
    }
    // In the body an id is not a header: its quotes are characters like others.
    let body = r#"{"operation_id":"\"abc\"","kind":"account.deposit","payload":{"account":"acct-1","amount":1}}"#;
    assert_eq!(
        agent
            .post("/v1/operations", body)
            .await
            .succeeded()
            .header("operation-id"),
        "\"abc\""
    );
}

#[tokio::test]
async fn keys_that_disagree_are_refused_and_never_joined() {
    let ledger = Ledger::start().await;
    let agent = ledger.agent();
    let with_keys = async |keys: &[&str], in_body: Option<&str>| {
        let mut headers: Vec<(&str, &str)> = vec![("content-type", "application/json")];
        headers.extend(keys.iter().map(|key| ("idempotency-key", *key)));
        let id = in_body.map_or(String::new(), |id| format!(r#""operation_id":"{id}","#));
        let body = format!(r#"{{{id}"kind":"account.deposit","payload":{{"account":"acct-1","amount":1}}}}"#);
        agent.send("POST", "/v1/operations", &headers, &body).await
    };
    with_keys(&["a", "b"], None).await.is(400, "key-conflict");
    with_keys(&["a", "a"], None).await.is(400, "key-conflict");
    with_keys(&["a", "a"], Some("a")).await.is(400, "key-conflict");
    with_keys(&["a"], Some("b")).await.is(400, "key-conflict");
    // One line with a comma is one key with a comma in it.
    assert_eq!(
        with_keys(&["a,b"], None).await.succeeded().header("operation-id"),
        "a,b"
    );
    assert_eq!(ledger.count("select count(*) from ledger.operations").await, 1);
    with_keys(&["\"c\""], Some("c")).await.succeeded();
    with_keys(&[], None).await.is(400, "key-missing");
}

/// An answer in bounded time, with room for a busy machine and a build for debugging.
async fn soon<T>(answer: impl Future<Output = T>) -> T {
    tokio::time::timeout(Duration::from_secs(15), answer)
        .await
        .expect("an answer in bounded time")
}

#[tokio::test]
async fn depth_and_size_are_bounded_and_what_is_accepted_stays_readable() {
    let ledger = with_limits("max_body_bytes = 11000000\nmax_result_bytes = 11000000").await;
    let agent = ledger.agent();
    let nested = |depth: usize| format!("{}{}", "[".repeat(depth), "]".repeat(depth));
    let objects = |depth: usize| format!("{}1{}", r#"{"a":"#.repeat(depth), "}".repeat(depth));
    let members = |count: usize| {
        let members: Vec<String> = (0..count).map(|number| format!("\"m{number}\":0")).collect();
        format!("{{{}}}", members.join(","))
    };
    for (number, payload) in [
        nested(200),
        nested(129),
        objects(129),
        nested(100_000),
        "[".repeat(100_000),
        objects(100_000),
        "1e999".to_owned(),
        "-1e999".to_owned(),
        "1e99999999999999999999".to_owned(),
        "9".repeat(10_000_000),
        format!("0.{}1", "0".repeat(10_000_000)),
        format!("1e{}", "9".repeat(1_000_000)),
    ]
    .iter()
    .enumerate()
    {
        let id = format!("refused-{number}");
        let refused = soon(agent.submit(&id, "test.echo", payload))
            .await
            .is(400, "payload-invalid");
        assert!(refused.body.len() < 4_000, "a refusal must not carry what was sent");
    }
    soon(agent.submit("members", "test.echo", &members(1_000_000)))
        .await
        .is(413, "too-large");
    assert_eq!(ledger.count("select count(*) from ledger.operations").await, 0);
    for (number, payload) in [
        nested(127),
        nested(128),
        objects(128),
        "1e308".to_owned(),
        "5e-324".to_owned(),
        members(100_000),
    ]
    .iter()
    .enumerate()
    {
        let id = format!("accepted-{number}");
        let first = soon(agent.submit(&id, "test.echo", payload)).await.succeeded();
        let read = soon(agent.get(&format!("/v1/operations/{id}/receipt")))
            .await
            .succeeded();
        assert_eq!(read.body, first.body);
        agent.operation(&id).await;
    }
}
