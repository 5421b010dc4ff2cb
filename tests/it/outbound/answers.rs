//! What comes through: the request as it is written, and the answer as it was given.

use std::sync::Arc;

use http::{HeaderValue, Method};
use opledger::outbound::downstream::Secret;
use opledger::outbound::send::Outbound;

use super::server::{Peer, Server};
use super::{Ended, attempt, downstream, post, request};

async fn answered(said: impl Into<Vec<u8>>, method: Method) -> (u16, String, Vec<u8>) {
    let server = Server::saying(said).await;
    let outbound = Outbound::default();
    let sent = request(method, "/x", "");
    match attempt(&outbound, &Arc::new(downstream(&server.url())), sent).await {
        Ended::Answered { status, headers, body } => {
            let names: Vec<_> = headers.keys().map(|name| name.as_str()).collect();
            (status.as_u16(), names.join(","), body)
        }
        other => panic!("{other:?}"),
    }
}

#[tokio::test]
async fn the_request_is_written_as_it_is_and_with_our_credential_only() {
    let server = Server::keeping("HTTP/1.1 204 No Content\r\n\r\n").await;
    let mut downstream = downstream(&format!("{}/base", server.url()));
    downstream.credential = vec![(
        http::header::AUTHORIZATION,
        Secret::new(HeaderValue::from_static("Bearer downstream")),
    )];
    let downstream = Arc::new(downstream);
    let outbound = Outbound::default();
    let mut sent = request(Method::POST, "/base/a%2Eb;c?d=%2f&e", "body");
    sent.headers
        .insert("authorization", HeaderValue::from_static("Bearer caller"));
    sent.headers.insert("host", HeaderValue::from_static("elsewhere"));
    sent.headers.insert("content-length", HeaderValue::from_static("99"));
    sent.headers.append("x-twice", HeaderValue::from_static("1"));
    sent.headers.append("x-twice", HeaderValue::from_static("2"));
    attempt(&outbound, &downstream, sent).await;
    for method in [
        Method::POST,
        Method::PUT,
        Method::PATCH,
        Method::DELETE,
        Method::GET,
        Method::HEAD,
    ] {
        attempt(&outbound, &downstream, request(method, "/base", "")).await;
    }
    let requests = server.requests();
    let first = &requests[0];
    let mut lines: Vec<_> = first.head.trim_end().lines().collect();
    assert_eq!(lines.remove(0), "POST /base/a%2Eb;c?d=%2f&e HTTP/1.1");
    assert_eq!(lines.remove(0), format!("host: {}", server.address));
    lines.sort_unstable();
    let expected = [
        "authorization: Bearer downstream",
        "content-length: 4",
        "x-twice: 1",
        "x-twice: 2",
    ];
    assert_eq!(lines, expected);
    assert_eq!(first.body, b"body");
    for received in &requests[1..] {
        let framed = received.head.contains("content-length: 0\r\n");
        let has_body = ["POST", "PUT", "PATCH"]
            .iter()
            .any(|method| received.head.starts_with(method));
        assert_eq!(framed, has_body, "{}", received.head);
    }
    assert_eq!(requests.len(), 7);
}

#[tokio::test]
async fn interim_answers_are_skipped() {
    let said = "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: <x>\r\n\r\nHTTP/1.1 201 Created\r\nLocation: /1\r\n\
                Content-Length: 2\r\n\r\nok";
    assert_eq!(
        answered(said, Method::POST).await,
        (201, "location,content-length".to_owned(), b"ok".to_vec())
    );
}

#[tokio::test]
async fn answers_without_a_body_end_at_once() {
    for (said, method, status) in [
        ("HTTP/1.1 204 No Content\r\n\r\n", Method::POST, 204),
        (
            "HTTP/1.1 204 No Content\r\nContent-Length: 5\r\n\r\nextra",
            Method::POST,
            204,
        ),
        (
            "HTTP/1.1 304 Not Modified\r\nContent-Length: 5\r\n\r\n",
            Method::GET,
            304,
        ),
        ("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n", Method::HEAD, 200),
        (
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
            Method::HEAD,
            200,
        ),
        ("HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", Method::POST, 200),
    ] {
        let (got, _, body) = answered(said, method).await;
        assert_eq!((got, body.len()), (status, 0), "{said}");
    }
}

#[tokio::test]
async fn every_complete_answer_is_an_answer() {
    for status in [200, 201, 202, 303, 307, 308, 400, 409, 418, 429, 500, 503, 599] {
        let said = format!("HTTP/1.1 {status} X\r\nLocation: http://other.invalid/\r\nContent-Length: 1\r\n\r\nx");
        let (got, lines, body) = answered(said, Method::POST).await;
        assert_eq!((got, body.as_slice()), (status, b"x".as_slice()));
        assert!(
            lines.contains("location"),
            "a redirect is an answer, and nobody follows it"
        );
    }
}

#[tokio::test]
async fn bodies_come_byte_for_byte() {
    let gzip = [0x1f, 0x8b, 8, 0, 0, 0, 0, 0, 0, 3, 0xff, 0x00];
    let mut said = format!(
        "HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\nContent-Length: {}\r\n\r\n",
        gzip.len()
    )
    .into_bytes();
    said.extend_from_slice(&gzip);
    assert_eq!(answered(said, Method::POST).await.2, gzip);
    let chunked = "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTrailer: X\r\nConnection: close, X-Hop\r\nX-Hop: 1\r\n\
                   Keep-Alive: timeout=5\r\nETag: x\r\n\r\n3;ext=1\r\nabc\r\n2\r\nde\r\n0\r\nX: trailer\r\n\r\n";
    assert_eq!(
        answered(chunked, Method::POST).await,
        (200, "etag".to_owned(), b"abcde".to_vec())
    );
    let until_close = "HTTP/1.1 200 OK\r\n\r\n{\"a\": 1.10}";
    assert_eq!(answered(until_close, Method::POST).await.2, b"{\"a\": 1.10}");
    let large = vec![b'z'; 5 << 20];
    let mut said = format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n", large.len()).into_bytes();
    said.extend_from_slice(&large);
    assert_eq!(answered(said, Method::POST).await.2, large);
}

#[tokio::test]
async fn an_answer_may_come_before_all_of_our_body_is_taken() {
    let server = Server::start(|mut peer: Peer| async move {
        peer.head().await.unwrap();
        peer.say("HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nno").await;
        peer.hold().await;
    })
    .await;
    let outbound = Outbound::default();
    let downstream = Arc::new(downstream(&server.url()));
    let large = request(Method::POST, "/x", vec![b'x'; 32 << 20]);
    let ended = attempt(&outbound, &downstream, large).await;
    assert_eq!(ended.name(), "answered 413", "{ended:?}");
    super::until("the connection, half written, is closed", || server.gone() == 1).await;
    assert!(!outbound.has_idle(&downstream));
}

#[tokio::test]
async fn a_peer_may_begin_its_answer_and_then_want_the_rest_of_the_request() {
    const WHOLE: usize = 32 << 20;
    let server = Server::start(|mut peer: Peer| async move {
        let (_, length) = peer.head().await.unwrap();
        peer.say("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n").await;
        assert_eq!(peer.body(length).await.unwrap().len(), WHOLE);
        peer.say("2\r\nok\r\n0\r\n\r\n").await;
        peer.hold().await;
    })
    .await;
    let outbound = Outbound::default();
    let downstream = Arc::new(downstream(&server.url()));
    match attempt(&outbound, &downstream, request(Method::POST, "/x", vec![b'x'; WHOLE])).await {
        Ended::Answered { status, body, .. } => assert_eq!((status.as_u16(), body.as_slice()), (200, b"ok".as_slice())),
        other => panic!("{other:?}"),
    }
    // Where a request and its answer cross, nobody can be sure what comes next on the connection.
    assert!(!outbound.has_idle(&downstream));
    super::until("the connection is closed", || server.gone() == 1).await;
}

#[tokio::test]
async fn what_a_peer_says_before_it_resets_a_request_half_taken_is_its_answer() {
    let server = Server::start(|mut peer: Peer| async move {
        peer.head().await.unwrap();
        peer.say("HTTP/1.1 413 Too Large\r\nContent-Length: 2\r\n\r\nno").await;
        peer.reset();
    })
    .await;
    let downstream = Arc::new(downstream(&server.url()));
    for _ in 0..20 {
        let large = request(Method::POST, "/x", vec![b'x'; 8 << 20]);
        let ended = attempt(&Outbound::default(), &downstream, large).await;
        assert_eq!(ended.name(), "answered 413", "{ended:?}");
    }
    assert_eq!(server.connections(), 20);
}

#[tokio::test]
async fn an_answer_in_single_bytes_is_one() {
    let server = Server::start(|mut peer: Peer| async move {
        peer.stream.set_nodelay(true).unwrap();
        while peer.request().await.is_some() {
            for byte in b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n2\r\nok\r\n0\r\n\r\n" {
                peer.say([*byte]).await;
                tokio::task::yield_now().await;
            }
        }
    })
    .await;
    let outbound = Outbound::default();
    let downstream = Arc::new(downstream(&server.url()));
    for _ in 0..3 {
        match attempt(&outbound, &downstream, post()).await {
            Ended::Answered { body, .. } => assert_eq!(body, b"ok"),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(server.connections(), 1);
}

#[tokio::test]
async fn a_streamed_answer_comes_piece_by_piece() {
    let (tell, told) = tokio::sync::watch::channel(0);
    let server = Server::start(move |mut peer: Peer| {
        let mut told = told.clone();
        async move {
            peer.request().await.unwrap();
            peer.say("HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n")
                .await;
            for piece in 1..=3 {
                told.wait_for(|turn| *turn >= piece).await.unwrap();
                peer.say("2\r\nab\r\n").await;
            }
            peer.say("0\r\n\r\n").await;
        }
    })
    .await;
    let downstream = Arc::new(downstream(&server.url()));
    let outbound = Outbound::default();
    let mut answer = outbound.connect(&downstream).await.unwrap().send(post()).await.unwrap();
    for piece in 1..=3 {
        tell.send(piece).unwrap();
        assert_eq!(answer.body.next().await.unwrap().unwrap(), "ab");
    }
    assert!(answer.body.next().await.is_none() && answer.body.next().await.is_none());
}
