//! Connections: kept while they are good, never used half-read, and never a reason to send twice.

use std::collections::HashMap;
use std::io::{Read, Write};
use std::sync::Arc;
use std::time::Duration;

use http::{HeaderValue, Method};
use opledger::outbound::send::Outbound;

use super::server::{Peer, Server};
use super::{Ended, SHORT, attempt, downstream, post, request, until};

const OK: &str = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";

#[tokio::test]
async fn a_connection_is_used_again_once_its_answer_was_read() {
    let server = Server::keeping(OK).await;
    let (outbound, downstream) = (Outbound::default(), Arc::new(downstream(&server.url())));
    assert!(!outbound.has_idle(&downstream));
    for _ in 0..5 {
        assert_eq!(attempt(&outbound, &downstream, post()).await.name(), "answered 200");
        assert!(outbound.has_idle(&downstream));
    }
    let chunked = Server::keeping("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\n\r\n").await;
    let other = Arc::new(super::downstream(&chunked.url()));
    // Another address under the same name: what waits for the old one is not for the new one.
    for _ in 0..5 {
        assert_eq!(attempt(&outbound, &other, post()).await.name(), "answered 200");
    }
    assert_eq!((server.connections(), server.requests().len()), (1, 5));
    assert_eq!((chunked.connections(), chunked.requests().len()), (1, 5));
    until("the old connection is closed", || server.gone() == 1).await;
}

#[tokio::test]
async fn a_connection_that_may_carry_more_than_its_answer_is_not_used_again() {
    for said in [
        "HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Length: 2\r\n\r\nok",
        "HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok",
        "HTTP/1.1 200 OK\r\nKeep-Alive: timeout=1\r\nContent-Length: 2\r\n\r\nok",
        "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok more",
        "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nokHTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nforged",
        "HTTP/1.1 204 No Content\r\nContent-Length: 6\r\n\r\n",
    ] {
        let server = Server::keeping(said).await;
        let (outbound, downstream) = (Outbound::default(), Arc::new(downstream(&server.url())));
        for _ in 0..2 {
            let ended = attempt(&outbound, &downstream, post()).await;
            assert!(ended.name().starts_with("answered"), "{said:?} {ended:?}");
        }
        assert_eq!(server.connections(), 2, "{said:?}");
    }
    let server = Server::keeping("HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n").await;
    let (outbound, downstream) = (Outbound::default(), Arc::new(downstream(&server.url())));
    for _ in 0..2 {
        attempt(&outbound, &downstream, request(Method::HEAD, "/x", "")).await;
    }
    assert_eq!(server.connections(), 2);
}

#[tokio::test]
async fn what_a_peer_says_unasked_is_no_answer_to_the_next_request() {
    let (tell, told) = tokio::sync::watch::channel(false);
    let (said, mut heard) = tokio::sync::mpsc::channel(1);
    let server = Server::start(move |mut peer: Peer| {
        let (mut told, said) = (told.clone(), said.clone());
        async move {
            peer.request().await.unwrap();
            peer.say(OK).await;
            told.wait_for(|speak| *speak).await.unwrap();
            peer.say("HTTP/1.1 200 OK\r\nContent-Length: 6\r\n\r\nforged").await;
            said.send(()).await.unwrap();
            peer.hold().await;
        }
    })
    .await;
    let (outbound, downstream) = (Outbound::default(), Arc::new(downstream(&server.url())));
    attempt(&outbound, &downstream, post()).await;
    assert!(outbound.has_idle(&downstream));
    tell.send(true).unwrap();
    heard.recv().await.unwrap();
    match attempt(&outbound, &downstream, post()).await {
        Ended::Answered { body, .. } => assert_eq!(body, b"ok"),
        other => panic!("{other:?}"),
    }
    assert_eq!(server.connections(), 2);
}

#[tokio::test]
async fn an_answer_that_is_not_read_to_its_end_takes_the_connection_with_it() {
    let server = Server::keeping("HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\nhalf").await;
    let (outbound, downstream) = (Outbound::default(), Arc::new(downstream(&server.url())));
    let mut answer = outbound.connect(&downstream).await.unwrap().send(post()).await.unwrap();
    assert_eq!(answer.body.next().await.unwrap().unwrap(), "half");
    drop(answer);
    until("the connection is closed", || server.gone() == 1).await;
    assert!(!outbound.has_idle(&downstream));
}

#[tokio::test]
async fn an_attempt_that_nobody_waits_for_any_more_closes_its_connection() {
    let server = Server::start(|mut peer: Peer| async move {
        peer.request().await.unwrap();
        peer.hold().await;
    })
    .await;
    let (outbound, downstream) = (Outbound::default(), Arc::new(downstream(&server.url())));
    let ready = outbound.connect(&downstream).await.unwrap();
    assert!(tokio::time::timeout(SHORT, ready.send(post())).await.is_err());
    until("the connection is closed", || server.gone() == 1).await;
    // Nor does one that was only made ready.
    drop(outbound.connect(&downstream).await.unwrap());
    until("that one, too", || server.connections() == 2).await;
    assert_eq!(server.requests().len(), 1);
}

#[tokio::test]
async fn an_idle_connection_is_closed_before_the_peer_would() {
    let server = Server::keeping("HTTP/1.1 200 OK\r\nKeep-Alive: timeout=2\r\nContent-Length: 2\r\n\r\nok").await;
    let (outbound, downstream) = (Outbound::default(), Arc::new(downstream(&server.url())));
    attempt(&outbound, &downstream, post()).await;
    assert!(outbound.has_idle(&downstream));
    until("the idle connection is closed", || server.gone() == 1).await;
    assert!(!outbound.has_idle(&downstream));
}

#[tokio::test]
async fn a_connection_closed_while_it_waited_is_noticed_and_replaced() {
    let server = Server::start(|mut peer: Peer| async move {
        peer.request().await.unwrap();
        peer.say(OK).await;
    })
    .await;
    let (outbound, downstream) = (Outbound::default(), Arc::new(downstream(&server.url())));
    attempt(&outbound, &downstream, post()).await;
    until("the peer's end is noticed", || !outbound.has_idle(&downstream)).await;
    assert_eq!(attempt(&outbound, &downstream, post()).await.name(), "answered 200");
    // Also between getting ready and sending.
    let server = Server::start(|mut peer: Peer| async move {
        if let Ok(Some(_)) = tokio::time::timeout(SHORT, peer.request()).await {
            peer.say(OK).await;
        }
    })
    .await;
    let downstream = Arc::new(super::downstream(&server.url()));
    let ready = outbound.connect(&downstream).await.unwrap();
    tokio::time::sleep(SHORT * 2).await;
    assert!(ready.send(post()).await.is_ok());
    assert_eq!((server.connections(), server.requests().len()), (2, 1));
}

#[tokio::test]
async fn a_peers_end_is_seen_even_before_the_runtime_hears_of_it() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let url = format!("http://{}", listener.local_addr().unwrap());
    let (close, closing) = std::sync::mpsc::channel();
    let (closed, until_closed) = std::sync::mpsc::channel();
    // On a thread of its own: the one that the runtime has is held up below.
    std::thread::spawn(move || {
        let mut requests = 0;
        while let Ok((mut stream, _)) = listener.accept() {
            let mut bytes = [0; 4_096];
            requests += usize::from(stream.read(&mut bytes).is_ok_and(|count| count > 0));
            stream.write_all(OK.as_bytes()).unwrap();
            closing.recv().unwrap();
            drop(stream);
            closed.send(requests).unwrap();
        }
    });
    let (outbound, downstream) = (Outbound::default(), Arc::new(downstream(&url)));
    assert_eq!(attempt(&outbound, &downstream, post()).await.name(), "answered 200");
    assert!(outbound.has_idle(&downstream));
    let ready = outbound.connect(&downstream).await.unwrap();
    close.send(()).unwrap();
    assert_eq!(until_closed.recv().unwrap(), 1);
    // Nothing has been awaited since. Written to this connection, the request would be lost, and its outcome unknown.
    close.send(()).unwrap();
    let answer = ready.send(post()).await.unwrap();
    assert_eq!(answer.status, 200);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_peer_that_closes_idle_connections_at_once_never_gets_a_request_twice() {
    // Closed at different moments around the next request, sometimes with a reset.
    let server = Server::start(|mut peer: Peer| async move {
        for round in 0.. {
            if peer.request().await.is_none() {
                return;
            }
            let so_far = peer.received();
            if so_far.is_multiple_of(11) {
                // What the other side sees is the same as if it had been too late.
                return;
            }
            peer.say(OK).await;
            if so_far.is_multiple_of(3) || round > 3 {
                tokio::time::sleep(Duration::from_micros(so_far as u64 * 37 % 400)).await;
                if so_far.is_multiple_of(2) {
                    peer.reset();
                }
                return;
            }
        }
    })
    .await;
    let (outbound, downstream) = (Outbound::default(), Arc::new(downstream(&server.url())));
    let mut ended: HashMap<String, usize> = HashMap::new();
    for round in 0..300_u32 {
        let mut sent = post();
        sent.headers.insert("x-key", HeaderValue::from(round));
        let name = attempt(&outbound, &downstream, sent).await.name();
        *ended.entry(name).or_default() += 1;
        tokio::time::sleep(Duration::from_micros(u64::from(round) * 53 % 500)).await;
    }
    let mut times: HashMap<String, usize> = HashMap::new();
    for received in server.requests() {
        let key = received
            .head
            .lines()
            .find(|line| line.starts_with("x-key"))
            .unwrap()
            .to_owned();
        *times.entry(key).or_default() += 1;
    }
    assert!(times.values().all(|times| *times == 1), "{times:?}");
    let answered = ended["answered 200"];
    assert!(answered > 200 && answered <= times.len(), "{ended:?}");
}

#[tokio::test]
async fn no_more_requests_are_under_way_than_may_be() {
    let server = Server::start(|mut peer: Peer| async move {
        peer.request().await.unwrap();
        peer.say("HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nab").await;
        peer.hold().await;
    })
    .await;
    let mut downstream = downstream(&server.url());
    downstream.limits.concurrency = 2;
    downstream.limits.connect = SHORT;
    let downstream = Arc::new(downstream);
    let outbound = Outbound::default();
    let first = outbound.connect(&downstream).await.unwrap();
    let second = outbound.connect(&downstream).await.unwrap().send(post()).await.unwrap();
    // The second has been answered, but not yet to the end.
    assert_eq!(outbound.connect(&downstream).await.err().unwrap().stage, "busy");
    drop(second);
    let third = outbound.connect(&downstream).await.unwrap();
    drop((first, third));
    assert_eq!(server.requests().len(), 1);
}

#[tokio::test]
async fn hundreds_wait_at_a_time() {
    let (tell, told) = tokio::sync::watch::channel(false);
    let server = Server::start(move |mut peer: Peer| {
        let mut told = told.clone();
        async move {
            peer.request().await.unwrap();
            told.wait_for(|go| *go).await.unwrap();
            peer.say(OK).await;
        }
    })
    .await;
    let (outbound, downstream) = (Arc::new(Outbound::default()), Arc::new(downstream(&server.url())));
    let attempts: Vec<_> = (0..400)
        .map(|_| {
            let (outbound, downstream) = (outbound.clone(), downstream.clone());
            tokio::spawn(async move { attempt(&outbound, &downstream, post()).await.name() })
        })
        .collect();
    until("all have come", || server.requests().len() == 400).await;
    tell.send(true).unwrap();
    for attempt in attempts {
        assert_eq!(attempt.await.unwrap(), "answered 200");
    }
    assert_eq!((server.connections(), server.requests().len()), (400, 400));
}
