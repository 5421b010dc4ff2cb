//! Paths that lead elsewhere, redirects, and messages that two readers would cut in different places.

use std::fmt::Write as _;

use super::{Bench, events};
use crate::support::downstream::{Downstream, Script};
use crate::support::wire::Wire;

#[tokio::test]
async fn no_spelling_of_a_path_leaves_the_base() {
    let bench = Bench::start().await;
    let agent = bench.agent();
    let dotted = [
        "/..",
        "/../admin",
        "/allowed/../admin",
        "/allowed/..",
        "/./x",
        "/x/.",
        "/%2e%2e/admin",
        "/%2E./admin",
        "/.%2e/admin",
        "/%252e%252e/admin",
        "/..;/admin",
        "/..%3b/admin",
        "/..%2fadmin",
        "/..%5cadmin",
        "/a%2f..%2f..%2fadmin",
        "/%2f/admin",
        "//admin",
        "//x",
        "/a//b",
        "/a%00",
        "/a%0d%0aX:1",
        "/%zz",
        "/%",
        "/%2",
        "/..%252fadmin",
        "/%c0%ae%c0%ae/%2e%2e/admin",
    ];
    for path in dotted {
        for method in ["POST", "GET"] {
            let target = format!("/v1/proxy/pay{path}");
            let request = format!(
                "{method} {target} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {}\r\nIdempotency-Key: dots\r\nContent-Length: 0\r\n\r\n",
                agent.key
            );
            let mut wire = Wire::sent(agent.address, request).await;
            let status = wire.status().await.unwrap();
            assert!([400, 404].contains(&status), "{method} {path}: {status}");
        }
    }
    assert_eq!(bench.pay.count(), 0, "{:?}", bench.pay.requests());
    agent.get("/v1/operations/dots").await.is(404, "not-found");
    // What is no dot segment goes on exactly as it was sent.
    for (number, path) in [
        "",
        "/",
        "/a/",
        "/a%20b",
        "/...",
        "/.well-known/x",
        "/%E2%82%AC?x=/../y&z=%2e%2e",
        "/a:b@c;d=e,f",
        "/%2E%2Ex",
    ]
    .into_iter()
    .enumerate()
    {
        agent
            .forward("POST", &format!("k{number}"), path, "{}")
            .await
            .succeeded();
        assert_eq!(bench.pay.requests().pop().unwrap().target, format!("/base{path}"));
    }
}

#[tokio::test]
async fn what_a_route_declares_holds_for_the_path_that_is_sent() {
    let bench = Bench::with(
        "require_key = false\n[[routes]]\npath = \"/charges\"\nrequire_key = true\n[[routes]]\npath = \"/charges/*\"\nrequire_key = true",
    )
    .await;
    for path in [
        "/charges",
        "/%63harges",
        "/ch%61rges",
        "/charges/1",
        "/charges/%31",
        "/charges?x=1",
        "/charges?",
    ] {
        bench
            .agent()
            .send("POST", &format!("/v1/proxy/pay{path}"), &[], "")
            .await
            .is(400, "key-missing");
    }
    assert_eq!(bench.pay.count(), 0);
}

#[tokio::test]
async fn redirects_are_answers_and_nobody_follows_them() {
    let (bench, elsewhere) = (Bench::start().await, Downstream::start().await);
    for status in [301_u16, 302, 303, 307, 308] {
        let location = format!("http://{}/stolen", elsewhere.address);
        let lines = format!("Location: {location}\r\n");
        bench.pay.answers(move |_| Script::with_lines(status, &lines, "moved"));
        let key = format!("k{status}");
        let first = bench.post(&key, &format!("/{status}"), "{}").await;
        assert_eq!((first.status, first.header("location")), (status, location.as_str()));
        bench.is_replayed(&first, &key, &format!("/{status}"), "{}").await;
        assert_eq!(
            bench.agent().send("GET", "/v1/proxy/pay/x", &[], "").await.status,
            status
        );
    }
    assert_eq!(elsewhere.connections(), 0);
}

/// Requests that a careless reader would take for two.
#[tokio::test]
async fn a_request_that_is_framed_in_two_ways_does_not_become_two() {
    let bench = Bench::start().await;
    let agent = bench.agent();
    let smuggled = "POST /base/stolen HTTP/1.1\r\nHost: x\r\nContent-Length: 0\r\n\r\n";
    let chunked = format!("{:x}\r\n{smuggled}\r\n0\r\n\r\n", smuggled.len());
    let zero = format!("0\r\n\r\n{smuggled}");
    let framings = [
        format!("Content-Length: 5\r\nTransfer-Encoding: chunked\r\n\r\n{chunked}"),
        format!("Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n{zero}"),
        format!(
            "Content-Length: 0\r\nContent-Length: {}\r\n\r\n{smuggled}",
            smuggled.len()
        ),
        format!("Content-Length: 0, {}\r\n\r\n{smuggled}", smuggled.len()),
        format!("Content-Length: +{}\r\n\r\n{smuggled}", smuggled.len()),
        format!("Transfer-Encoding: xchunked\r\n\r\n{zero}"),
        format!("Transfer-Encoding: chunked, identity\r\n\r\n{zero}"),
        format!("Transfer-Encoding : chunked\r\n\r\n{zero}"),
        format!("X: a\r\n Transfer-Encoding: chunked\r\nContent-Length: 0\r\n\r\n{zero}"),
        format!("X: a\rTransfer-Encoding: chunked\r\nContent-Length: 0\r\n\r\n{smuggled}"),
        format!("X: a\nX-Smuggled: 1\r\nContent-Length: 0\r\n\r\n{smuggled}"),
        format!("X\0: a\r\nContent-Length: 0\r\n\r\n{smuggled}"),
        format!("Content-Length: {}\r\n\r\n{smuggled}", smuggled.len()),
        format!("Transfer-Encoding: chunked\r\n\r\n{chunked}"),
    ];
    for (number, framing) in framings.iter().enumerate() {
        let request = format!(
            "POST /v1/proxy/pay/k{number} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {}\r\nIdempotency-Key: k{number}\r\nConnection: close\r\n{framing}",
            agent.key
        );
        let mut wire = Wire::sent(agent.address, request).await;
        let status = wire.status().await;
        println!("{number}: {status:?}");
    }
    bench.nothing_more_is_sent().await;
    for request in bench.pay.requests() {
        assert!(request.target.starts_with("/base/k"), "{request:?}");
        assert_eq!(request.header("content-length"), request.body.len().to_string());
        let names = request.names();
        assert!(
            !names.contains(&"transfer-encoding".to_owned()) && !names.contains(&"connection".to_owned()),
            "{request:?}"
        );
        assert!(
            request.lines.iter().all(|line| !line.contains(['\r', '\n', '\0'])),
            "{request:?}"
        );
    }
    // The last two are well formed, and carry those bytes as a body.
    for number in [12, 13] {
        assert_eq!(bench.pay.sends(&format!("/k{number}")), 1, "{number}");
    }
}

/// Answers that a careless reader would take for two, or for other ones.
#[tokio::test]
async fn an_answer_that_is_framed_in_two_ways_is_none() {
    let bench = Bench::with("head_timeout = \"2s\"\nidle_timeout = \"2s\"").await;
    let second = "HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nstolen";
    let faults = [
        format!("Content-Length: 0\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n{second}"),
        format!("Transfer-Encoding: chunked\r\nContent-Length: 5\r\n\r\n5\r\nhello\r\n0\r\n\r\n{second}"),
        format!("Content-Length: 0\r\nContent-Length: 5\r\n\r\nhello{second}"),
        format!("Content-Length: 0\r\nContent-Length: 0\r\n\r\n{second}"),
        format!("Content-Length: -1\r\n\r\n{second}"),
        format!("Content-Length: +5\r\n\r\nhello{second}"),
        format!("Content-Length: 99999999999999999999\r\n\r\n{second}"),
        format!("Transfer-Encoding: gzip\r\n\r\n{second}"),
        format!("Transfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n{second}"),
        format!("Transfer-Encoding: chunked\r\n\r\nxyz\r\n{second}"),
        format!("Transfer-Encoding: chunked\r\n\r\n-1\r\n{second}"),
        format!("Transfer-Encoding: chunked\r\n\r\nffffffffffffffffff\r\n{second}"),
        format!("X: a\r\n folded: b\r\nContent-Length: 0\r\n\r\n{second}"),
        format!("X: a\rSet-Cookie: b\r\nContent-Length: 0\r\n\r\n{second}"),
        format!("X\0: a\r\nContent-Length: 0\r\n\r\n{second}"),
        format!("Location: /a\0b\r\nContent-Length: 0\r\n\r\n{second}"),
        format!("X : a\r\nContent-Length: 0\r\n\r\n{second}"),
    ];
    for (number, fault) in faults.iter().enumerate() {
        let answer = format!("HTTP/1.1 200 OK\r\n{fault}");
        bench.pay.answers(move |_| Script::new().then(&answer).close());
        let key = format!("k{number}");
        let answer = bench.post(&key, &format!("/{key}"), "{}").await;
        assert_eq!(answer.code(), "outcome-unknown", "{number}: {fault:?} {answer:?}");
        assert_eq!(events(&bench.operation(&key).await), ["claimed", "outcome_unknown"]);
    }
    // Heads without an end, and with too many lines.
    let mut many = "HTTP/1.1 200 OK\r\n".to_owned();
    for number in 0..1000 {
        write!(many, "X-{number}: 1\r\n").unwrap();
    }
    let long = format!(
        "HTTP/1.1 200 OK\r\nX: {}\r\nContent-Length: 0\r\n\r\n",
        "x".repeat(1 << 20)
    );
    for (key, head) in [("many", format!("{many}Content-Length: 0\r\n\r\n")), ("long", long)] {
        bench.pay.answers(move |_| Script::new().then(&head).close());
        bench
            .post(key, &format!("/{key}"), "{}")
            .await
            .is(409, "outcome-unknown");
    }
}

/// What a downstream says unasked is no answer to the next request.
#[tokio::test]
async fn bytes_after_an_answer_are_not_the_next_ones() {
    let bench = Bench::start().await;
    let stolen = "HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nstolen";
    for (key, script) in [
        ("at-once", Script::answer(200, "{}").then(stolen)),
        (
            "later",
            Script::answer(200, "{}")
                .pause(std::time::Duration::from_millis(50))
                .then(stolen),
        ),
        (
            "body-of-204",
            Script::new().then(format!(
                "HTTP/1.1 204 No\r\nContent-Length: {}\r\n\r\n{stolen}",
                stolen.len()
            )),
        ),
        (
            "body-of-304",
            Script::new().then(format!("HTTP/1.1 304 No\r\n\r\n{stolen}")),
        ),
    ] {
        bench.pay.answers(move |_| script.clone());
        let first = bench.post(key, &format!("/{key}"), "{}").await;
        assert_ne!(&first.body[..], b"stolen");
        tokio::time::sleep(std::time::Duration::from_millis(100)).await;
        bench
            .pay
            .answers(|request| Script::answer(200, format!("\"{}\"", request.target)));
        for number in 0..3 {
            let path = format!("/{key}/{number}");
            let next = bench.post(&format!("{key}-{number}"), &path, "{}").await.succeeded();
            assert_eq!(next.body, format!("\"/base{path}\""), "{key}");
        }
    }
    // A body that follows an answer to HEAD.
    bench.pay.answers(move |_| {
        Script::new().then(format!(
            "HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{stolen}",
            stolen.len()
        ))
    });
    let head = bench
        .agent()
        .send("HEAD", "/v1/proxy/pay/head", &[], "")
        .await
        .succeeded();
    assert!(head.body.is_empty());
    bench.pay.answers(|_| Script::answer(200, "mine"));
    assert_eq!(
        bench.agent().send("GET", "/v1/proxy/pay/get", &[], "").await.body,
        "mine"
    );
}
