//! What was answered once is answered again, to the byte and line by line; and what counts as the same request.

use std::time::Duration;

use super::{Bench, JSON, stable};
use crate::support::downstream::{Downstream, Gate, Script};
use crate::support::{Ledger, Setup};

/// `{"text":"hello"}`, compressed.
const GZIP: [u8; 36] = [
    0x1f, 0x8b, 0x08, 0x00, 0x00, 0x00, 0x00, 0x00, 0x02, 0xff, 0xab, 0x56, 0x2a, 0x49, 0xad, 0x28, 0x51, 0xb2, 0x52,
    0xca, 0x48, 0xcd, 0xc9, 0xc9, 0x57, 0xaa, 0x05, 0x00, 0x3c, 0xaa, 0xdc, 0x89, 0x10, 0x00, 0x00, 0x00,
];

#[tokio::test]
async fn a_replay_has_the_very_bytes_of_the_first_answer() {
    let bench = Bench::start().await;
    let body = "{\"b\":1,   \"a\":1.10,\"c\":1e2}\n ";
    bench.pay.answers(move |_| Script::answer(200, body));
    let first = bench.post("k", "/charges", "{}").await.succeeded();
    assert!(!first.is_replay());
    assert_eq!(first.body, body);
    assert_eq!(first.header("operation-id"), "k");
    assert_eq!(first.header("operation-state"), "succeeded");
    assert_eq!(
        first.header("receipt-expires").len(),
        "2026-01-01T00:00:00.000000Z".len()
    );
    bench.is_replayed(&first, "k", "/charges", "{}").await;
    let receipt = bench.agent().get("/v1/operations/k/receipt").await.succeeded();
    assert_eq!(receipt.body, first.body);
}

#[tokio::test]
async fn header_lines_keep_their_number_order_and_commas() {
    let bench = Bench::with("replayed_headers = [\"X-Valid\", \"X-Bytes\"]").await;
    let lines = "Content-Disposition: attachment; filename=\"a,b.txt\"\r\nLink: <a>; rel=next\r\nLink: <b>; rel=prev, <c>\r\n\
                 Last-Modified: Wed, 21 Oct 2026 07:28:00 GMT\r\nX-Valid: Wed, 21 Oct 2026 07:28:00 GMT\r\nX-Bytes: caf\u{e9}\r\n";
    let bytes: Vec<u8> = format!("HTTP/1.1 200 OK\r\n{lines}Content-Length: 2\r\n\r\n{{}}")
        .chars()
        .map(|character| u8::try_from(character).unwrap())
        .collect();
    bench.pay.answers(move |_| Script::new().then(&bytes));
    let first = bench.post("k", "/charges", "{}").await.succeeded();
    let all = |name: &str| -> Vec<&[u8]> {
        first
            .headers
            .get_all(name)
            .iter()
            .map(|value| value.as_bytes())
            .collect()
    };
    assert_eq!(all("link"), [&b"<a>; rel=next"[..], b"<b>; rel=prev, <c>"]);
    assert_eq!(all("content-disposition"), [b"attachment; filename=\"a,b.txt\""]);
    assert_eq!(all("last-modified"), [b"Wed, 21 Oct 2026 07:28:00 GMT"]);
    assert_eq!(all("x-valid"), [b"Wed, 21 Oct 2026 07:28:00 GMT"]);
    assert_eq!(all("x-bytes"), [b"caf\xe9"]);
    bench.is_replayed(&first, "k", "/charges", "{}").await;
}

#[tokio::test]
async fn every_status_is_replayed_with_its_location_and_tag_and_nothing_is_sent_twice() {
    let bench = Bench::start().await;
    for status in [201_u16, 202, 204, 303, 304, 400, 404, 409, 418, 422, 500, 502, 503, 599] {
        let head = format!("HTTP/1.1 {status} X\r\nLocation: /charges/{status}\r\nETag: \"v{status}\"\r\n");
        let body = format!("{{\"status\":{status},\"title\":\"theirs\"}}");
        bench.pay.answers(move |_| {
            if [204, 304].contains(&status) {
                Script::new().then(format!("{head}\r\n"))
            } else {
                Script::new().then(format!(
                    "{head}Content-Type: application/json\r\nContent-Length: {}\r\n\r\n{body}",
                    body.len()
                ))
            }
        });
        let (key, path) = (format!("k{status}"), format!("/charges/{status}"));
        let first = bench.post(&key, &path, "{}").await;
        assert_eq!(first.status, status);
        assert_eq!(first.header("location"), path);
        assert_eq!(first.header("etag"), format!("\"v{status}\""));
        assert!([204, 304].contains(&status) || first.json()["title"] == "theirs");
        assert_eq!(
            first.header("operation-state"),
            if status < 400 { "succeeded" } else { "failed" }
        );
        bench.is_replayed(&first, &key, &path, "{}").await;
        assert_eq!(bench.pay.sends(&path), 1, "{status}");
    }
}

#[tokio::test]
async fn a_status_that_no_receipt_can_have_is_not_stored_for_ever_in_vain() {
    let bench = Bench::start().await;
    bench.pay.answers(|_| Script::answer(799, "{}"));
    let answer = tokio::time::timeout(Duration::from_secs(4), bench.post("k", "/charges", "{}"));
    let answer = answer.await.expect("an answer in time");
    // Such a status is none of HTTP's: whether it acted, nobody knows.
    answer.is(409, "outcome-unknown");
    assert_eq!(bench.state("k").await, "needs_reconciliation");
    assert_eq!(bench.pay.count(), 1);
}

#[tokio::test]
async fn personal_header_lines_are_neither_replayed_nor_shown() {
    let lines = "Set-Cookie: session=s3cr3t\r\nWWW-Authenticate: Basic realm=x\r\nDate: Wed, 21 Oct 2026 07:28:00 GMT\r\n\
                 X-Request-Id: req_4711\r\nX-Total: 3\r\nServer: nginx\r\nCache-Control: max-age=5\r\n";
    let bench = Bench::with("replayed_headers = [\"X-Total\"]").await;
    bench.pay.answers(move |_| Script::with_lines(200, lines, "{}"));
    let first = bench.post("k", "/charges", "{}").await.succeeded();
    for absent in ["set-cookie", "www-authenticate", "x-request-id", "server"] {
        assert!(!first.headers.contains_key(absent), "{absent}");
    }
    // This downstream's settings allow it.
    assert_eq!(first.header("x-total"), "3");
    assert_ne!(first.header("date"), "Wed, 21 Oct 2026 07:28:00 GMT");
    assert_eq!(first.header("cache-control"), "no-store");
    bench.is_replayed(&first, "k", "/charges", "{}").await;
    let shown = bench.operation("k").await.to_string();
    assert!(!shown.contains("s3cr3t"), "{shown}");
    assert!(
        shown.contains("req_4711"),
        "people find the request in the downstream's logs: {shown}"
    );
}

#[tokio::test]
async fn hop_by_hop_lines_are_dropped_and_the_body_stays_whole() {
    let bench = Bench::with("replayed_headers = [\"X-Foo\", \"X-Kept\"]").await;
    bench.pay.answers(|_| {
        Script::new()
            .then(
                "HTTP/1.1 200 OK\r\nConnection: close, X-Foo\r\nX-Foo: 1\r\nX-Kept: 2\r\nKeep-Alive: timeout=5\r\n\
                 Proxy-Authenticate: Basic\r\nTrailer: X-Kept\r\nTransfer-Encoding: chunked\r\n\r\n\
                 3\r\nabc\r\n4;ext=1\r\ndefg\r\n0\r\nX-Kept: 3\r\n\r\n",
            )
            .close()
    });
    let first = bench.post("k", "/charges", "{}").await.succeeded();
    assert_eq!(first.body, "abcdefg");
    assert_eq!(first.header("content-length"), "7");
    for absent in [
        "x-foo",
        "keep-alive",
        "trailer",
        "transfer-encoding",
        "proxy-authenticate",
    ] {
        assert!(!first.headers.contains_key(absent), "{absent}");
    }
    assert_eq!(first.header("x-kept"), "2");
    bench.is_replayed(&first, "k", "/charges", "{}").await;
}

#[tokio::test]
async fn encoded_answers_fit_their_length_and_their_encoding() {
    let bench = Bench::start().await;
    for coding in ["gzip", "br", "deflate", "identity"] {
        bench.pay.answers(move |_| {
            Script::with_lines(
                200,
                &format!("Content-Encoding: {coding}\r\nVary: Accept-Encoding\r\n"),
                GZIP,
            )
        });
        for accept in ["", coding] {
            let key = format!("{coding}-{accept}");
            let mut lines = vec![("idempotency-key", key.as_str())];
            if !accept.is_empty() {
                lines.push(("accept-encoding", accept));
            }
            let first = bench
                .agent()
                .send("POST", "/v1/proxy/pay/x", &lines, "")
                .await
                .succeeded();
            assert_eq!(bench.pay.requests().last().unwrap().header("accept-encoding"), accept);
            // With it or without, a retry gets the same.
            let again = bench
                .agent()
                .send("POST", "/v1/proxy/pay/x", &[("idempotency-key", &key)], "")
                .await;
            assert!(again.is_replay());
            assert_eq!(stable(&again), stable(&first));
            assert_eq!(first.header("content-encoding"), coding);
            assert_eq!(first.header("content-length"), GZIP.len().to_string());
            assert_eq!(first.body, &GZIP[..]);
        }
    }
}

#[tokio::test]
async fn safe_methods_pass_through_without_a_key_and_without_a_row() {
    let bench = Bench::start().await;
    bench.pay.answers(|request| {
        if request.method == "HEAD" {
            Script::new().then("HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nETag: \"1\"\r\nContent-Length: 36\r\n\r\n")
        } else {
            Script::with_lines(200, "Content-Encoding: gzip\r\n", GZIP)
        }
    });
    for method in ["GET", "HEAD", "OPTIONS"] {
        for key in [None, Some("k")] {
            let lines: Vec<_> = key.map(|key| ("idempotency-key", key)).into_iter().collect();
            let answer = bench
                .agent()
                .send(method, "/v1/proxy/pay/things?a=b", &lines, "")
                .await
                .succeeded();
            assert_eq!(answer.header("content-encoding"), "gzip", "{method}");
            assert_eq!(answer.body.len(), if method == "HEAD" { 0 } else { GZIP.len() });
            assert!(!answer.headers.contains_key("operation-id"));
        }
    }
    assert_eq!(bench.pay.count(), 6, "each was sent");
    assert_eq!(bench.pay.requests()[0].target, "/base/things?a=b");
    assert_eq!(bench.ledger.count("select count(*) from ledger.operations").await, 0);
}

#[tokio::test]
async fn an_unsafe_request_needs_a_key_unless_its_route_says_otherwise() {
    let bench = Bench::with("[[routes]]\npath = \"/loose\"\nrequire_key = false").await;
    for method in ["POST", "PUT", "PATCH", "DELETE"] {
        bench
            .agent()
            .send(method, "/v1/proxy/pay/strict", &[], "")
            .await
            .is(400, "key-missing");
        bench
            .agent()
            .send(method, "/v1/proxy/pay/strict", &[("idempotency-key", "")], "")
            .await
            .is(400, "key-invalid");
    }
    assert_eq!(bench.pay.count(), 0);
    bench
        .agent()
        .send("POST", "/v1/proxy/pay/loose", &[], "x")
        .await
        .succeeded();
    assert_eq!(bench.ledger.count("select count(*) from ledger.operations").await, 0);
    bench
        .agent()
        .send("POST", "/v1/proxy/pay/loose", &[("idempotency-key", "k")], "x")
        .await
        .succeeded();
    assert_eq!(bench.ledger.count("select count(*) from ledger.operations").await, 1);
}

#[tokio::test]
async fn the_fingerprint_covers_the_whole_target_the_type_and_the_body() {
    let pay = Downstream::start().await;
    let route = "[[routes]]\npath = \"/**\"\nmeaningful_headers = [\"X-Account\"]\n";
    let ledger = Ledger::with(Setup {
        config: pay.config("pay", route) + &pay.config("other", route),
        sql: String::new(),
    })
    .await;
    let agent = ledger.agent();
    let json = r#"{"a":1,"b":[2.0]}"#;
    let send = async |method: &str, target: &str, lines: &[(&str, &str)], body: &str| {
        let lines = [&[("idempotency-key", "k")], lines].concat();
        agent.send(method, &format!("/v1/proxy/{target}"), &lines, body).await
    };
    let account = ("x-account", "7");
    send("POST", "pay/a/1?x=1", &[JSON, account], json).await.succeeded();
    type Lines<'a> = &'a [(&'a str, &'a str)];
    let others: [(&str, &str, Lines<'_>, &str); 12] = [
        ("POST", "pay/a/2?x=1", &[JSON, account], json),
        ("POST", "pay/a/1?x=2", &[JSON, account], json),
        ("POST", "pay/a/1", &[JSON, account], json),
        ("POST", "pay/a/1?x=1&", &[JSON, account], json),
        ("POST", "pay/a/%31?x=1", &[JSON, account], json),
        ("PUT", "pay/a/1?x=1", &[JSON, account], json),
        ("POST", "other/a/1?x=1", &[JSON, account], json),
        ("POST", "pay/a/1?x=1", &[JSON, account], r#"{"a":2,"b":[2]}"#),
        ("POST", "pay/a/1?x=1", &[JSON, account], ""),
        ("POST", "pay/a/1?x=1", &[JSON, ("x-account", "8")], json),
        ("POST", "pay/a/1?x=1", &[JSON], json),
        ("POST", "pay/a/1?x=1", &[("content-type", "text/plain"), account], json),
    ];
    for (method, target, lines, body) in others {
        let refused = send(method, target, lines, body).await.is(422, "fingerprint-mismatch");
        let original = &refused.json()["original"];
        assert_eq!(original["kind"], "proxy.pay", "{method} {target}");
        assert_eq!(original["operation_url"], "/v1/operations/k");
        assert!(
            !String::from_utf8_lossy(&refused.body).contains("\"n\""),
            "no stored answer is shown"
        );
    }
    // Another spelling of the same JSON, and lines that mean nothing, are no other request.
    let spelled = "{ \"b\" : [2], \"a\" : 1e0 }";
    let again = send(
        "POST",
        "pay/a/1?x=1",
        &[JSON, account, ("x-trace", "9"), ("traceparent", "x")],
        spelled,
    )
    .await;
    assert!(again.succeeded().is_replay());
    assert_eq!(pay.count(), 1);
}

#[tokio::test]
async fn an_empty_body_under_another_method_is_another_request() {
    let bench = Bench::start().await;
    let send = async |method: &str| {
        bench
            .agent()
            .send(method, "/v1/proxy/pay/x", &[("idempotency-key", "k")], "")
            .await
    };
    send("POST").await.succeeded();
    for method in ["PATCH", "DELETE", "PUT"] {
        send(method).await.is(422, "fingerprint-mismatch");
    }
    assert!(send("POST").await.is_replay());
    assert_eq!(bench.pay.count(), 1);
}

#[tokio::test]
async fn a_retry_while_the_first_call_runs_is_told_to_wait_and_then_replayed() {
    let bench = Bench::start().await;
    let gate = Gate::new();
    let held = gate.clone();
    bench.pay.answers(move |_| {
        Script::new()
            .gate(&held)
            .before(Script::answer(201, "{\"id\":\"ch_1\"}"))
    });
    let other = bench.ledger.second().await;
    let first = tokio::spawn({
        let agent = bench.agent();
        async move { agent.forward("POST", "k", "/charges", "{}").await }
    });
    bench.pay.received(1).await;
    // Another worker, and again from a checkpoint.
    for client in [bench.agent(), bench.agent().at(other.address), bench.agent()] {
        let busy = client
            .forward("POST", "k", "/charges", "{}")
            .await
            .is(409, "operation-in-progress");
        assert!(busy.header("retry-after").parse::<u32>().unwrap() >= 1);
        assert_eq!(busy.json()["retryable"], true);
        client
            .forward("POST", "k", "/charges", "{\"a\":2}")
            .await
            .is(422, "fingerprint-mismatch");
    }
    let patient = tokio::spawn({
        let agent = bench.agent().at(other.address);
        async move {
            let lines = [("idempotency-key", "k"), JSON, ("prefer", "wait=15")];
            agent.send("POST", "/v1/proxy/pay/charges", &lines, "{}").await
        }
    });
    tokio::time::sleep(Duration::from_millis(300)).await;
    gate.open();
    let first = first.await.unwrap();
    assert_eq!((first.status, first.is_replay()), (201, false));
    let patient = patient.await.unwrap();
    assert!(patient.is_replay());
    assert_eq!(patient.body, first.body);
    bench.is_replayed(&first, "k", "/charges", "{}").await;
    assert_eq!(bench.pay.count(), 1);
    let operation = bench.operation("k").await;
    assert_eq!((&operation["attempts"], &operation["effects"]), (&1.into(), &1.into()));
}

#[tokio::test]
async fn the_key_belongs_to_proxied_requests_and_operations_together_and_conflicts_are_no_errors() {
    let bench = Bench::start().await;
    bench.post("k", "/charges", "{}").await.succeeded();
    bench
        .agent()
        .deposit("k", "acct-1", 5)
        .await
        .is(422, "fingerprint-mismatch");
    bench.agent().deposit("o", "acct-1", 5).await.succeeded();
    bench.post("o", "/charges", "{}").await.is(422, "fingerprint-mismatch");
    for round in 0..3 {
        assert!(
            bench.post("k", "/charges", "{}").await.succeeded().is_replay(),
            "{round}"
        );
        bench
            .post("k", "/charges", "{\"a\":1}")
            .await
            .is(422, "fingerprint-mismatch");
    }
    let quoted = bench.post("\"k\"", "/charges", "{}").await;
    assert!(quoted.is_replay(), "a quoted key is the same key");
    assert_eq!(bench.pay.count(), 1);
}
