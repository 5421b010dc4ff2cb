//! The table of failures: what has certainly not been sent, and what nobody can know.

use std::sync::Arc;
use std::time::Duration;

use http::Method;
use opledger::outbound::send::Outbound;
use tokio::io::AsyncReadExt;
use tokio::net::{TcpSocket, TcpStream};

use super::server::{Peer, Server};
use super::{Ended, SHORT, attempt, downstream, post, request};

/// One attempt at a server; it must have come with one connection and one request.
async fn once(server: &Server) -> Ended {
    let ended = attempt(&Outbound::default(), &Arc::new(downstream(&server.url())), post()).await;
    assert_eq!((server.connections(), server.requests().len()), (1, 1), "{ended:?}");
    ended
}

#[tokio::test]
async fn a_name_that_is_none_has_sent_nothing() {
    let ended = attempt(
        &Outbound::default(),
        &Arc::new(downstream("http://nobody.invalid")),
        post(),
    )
    .await;
    assert_eq!(ended.name(), "not_sent dns", "{ended:?}");
}

#[tokio::test]
async fn a_refused_connection_has_sent_nothing() {
    let server = Server::saying("").await;
    let url = server.url();
    drop(server);
    tokio::task::yield_now().await;
    let ended = attempt(&Outbound::default(), &Arc::new(downstream(&url)), post()).await;
    assert_eq!(ended.name(), "not_sent connect", "{ended:?}");
}

#[tokio::test]
async fn a_connection_that_does_not_come_about_in_time_has_sent_nothing() {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let listener = socket.listen(1).unwrap();
    let address = listener.local_addr().unwrap();
    // Nobody accepts: once the queue is full, further connections wait.
    let mut queued = Vec::new();
    while let Ok(Ok(stream)) = tokio::time::timeout(SHORT, TcpStream::connect(address)).await {
        queued.push(stream);
        assert!(queued.len() < 100);
    }
    let mut downstream = downstream(&format!("http://{address}"));
    downstream.limits.connect = SHORT;
    let ended = attempt(&Outbound::default(), &Arc::new(downstream), post()).await;
    assert_eq!(ended.name(), "not_sent connect", "{ended:?}");
}

#[tokio::test]
async fn a_peer_that_closes_every_connection_unread_has_got_nothing() {
    let server = Server::start(|peer| async move { drop(peer) }).await;
    let outbound = Outbound::default();
    let downstream = Arc::new(downstream(&server.url()));
    for _ in 0..20 {
        let ready = outbound.connect(&downstream).await.unwrap();
        // By now the peer has closed it, and the one dialled instead is closed as it is written to or before.
        tokio::time::sleep(Duration::from_millis(2)).await;
        let ended = ready.send(post()).await;
        assert!(ended.is_err());
    }
    assert_eq!(server.requests().len(), 0);
}

#[tokio::test]
async fn what_ends_before_the_answer_is_complete_is_unknown() {
    let oversize = format!(
        "HTTP/1.1 200 OK\r\nX: {}\r\nContent-Length: 0\r\n\r\n",
        "x".repeat(70 << 10)
    );
    let crowd = format!("HTTP/1.1 200 OK\r\n{}Content-Length: 0\r\n\r\n", "X: y\r\n".repeat(300));
    let interim = "HTTP/1.1 102 Processing\r\n\r\n".repeat(1_000) + "HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n";
    let cases: Vec<(&str, &str)> = vec![
        ("", "unknown head"),
        ("H", "unknown head"),
        ("HTTP/1.1 200 OK\r\nContent-", "unknown head"),
        ("HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n", "unknown body"),
        ("HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n01234", "unknown body"),
        ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", "unknown body"),
        (
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n01234\r\n",
            "unknown body",
        ),
        (
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n012",
            "unknown body",
        ),
        (
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n01234\r\n0\r\n",
            "unknown body",
        ),
        (
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nxyz\r\n",
            "unknown body",
        ),
        (
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1_0\r\n0123456789abcdef\r\n0\r\n\r\n",
            "unknown body",
        ),
        (
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n+1\r\nx\r\n0\r\n\r\n",
            "unknown body",
        ),
        (
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n10000000000000001\r\nx\r\n0\r\n\r\n",
            "unknown body",
        ),
        (
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nxy\r\n0\r\n\r\n",
            "unknown body",
        ),
        (
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\nx\n0\n\n",
            "unknown body",
        ),
        (
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n0\r\nHTTP/1.1 200 OK\r\n\r\n",
            "unknown body",
        ),
        ("HTTP/1.1 100 Continue\r\n\r\n", "unknown head"),
        (&interim, "unknown head"),
        (&oversize, "unknown head"),
        (&crowd, "unknown head"),
        ("rubbish\r\n\r\n", "unknown head"),
        ("HTTP/1.1 2000 OK\r\n\r\n", "unknown head"),
        ("HTTP/3.7 200 OK\r\n\r\n", "unknown head"),
        ("HTTP/1.1 200 OK\r\nno colon\r\n\r\n", "unknown head"),
        (
            "HTTP/1.1 200 OK\r\nX : space\r\nContent-Length: 0\r\n\r\n",
            "unknown head",
        ),
        (
            "HTTP/1.1 200 OK\r\nX: a\0b\r\nContent-Length: 0\r\n\r\n",
            "unknown head",
        ),
        // Two readers could find two bodies in each of these.
        (
            "HTTP/1.1 200 OK\r\nX: a\r\n b\r\nContent-Length: 0\r\n\r\n",
            "unknown head",
        ),
        (
            "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            "unknown head",
        ),
        (
            "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 3\r\n\r\nabc",
            "unknown head",
        ),
        (
            "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 2\r\n\r\nab",
            "unknown head",
        ),
        ("HTTP/1.1 200 OK\r\nContent-Length: 2, 2\r\n\r\nab", "unknown head"),
        ("HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\n", "unknown head"),
        ("HTTP/1.1 200 OK\r\nContent-Length: +1\r\n\r\na", "unknown head"),
        ("HTTP/1.1 200 OK\r\nContent-Length:\r\n\r\n", "unknown head"),
        (
            "HTTP/1.1 200 OK\r\nContent-Length: 18446744073709551617\r\n\r\na",
            "unknown head",
        ),
        ("HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\nx", "unknown head"),
        (
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
            "unknown head",
        ),
        (
            "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: x\r\n\r\n0\r\n\r\n",
            "unknown head",
        ),
        (
            "HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
            "unknown head",
        ),
        (
            "HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n",
            "unknown head",
        ),
    ];
    for (said, expected) in cases {
        let ended = once(&Server::saying(said).await).await;
        assert_eq!(ended.name(), expected, "{:.100}: {ended:?}", said);
    }
}

#[tokio::test]
async fn a_reset_is_unknown_wherever_it_falls() {
    for (said, expected) in [
        ("", "unknown head"),
        ("H", "unknown head"),
        ("HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n", "unknown body"),
        ("HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n01234", "unknown body"),
        // Without a length only an orderly end is the end.
        ("HTTP/1.1 200 OK\r\n\r\n01234", "unknown body"),
    ] {
        let server = Server::start(move |mut peer: Peer| async move {
            peer.request().await.unwrap();
            peer.say(said).await;
            // So that what was said is read before the reset overtakes it.
            tokio::time::sleep(Duration::from_millis(50)).await;
            peer.reset();
        })
        .await;
        let ended = once(&server).await;
        assert_eq!(ended.name(), expected, "{said:?}: {ended:?}");
    }
}

#[tokio::test]
async fn a_peer_that_goes_in_the_middle_of_our_body_leaves_it_unknown() {
    let server = Server::start(|mut peer: Peer| async move {
        peer.head().await.unwrap();
        peer.stream.read_exact(&mut [0; 1_000]).await.unwrap();
        peer.reset();
    })
    .await;
    let large = request(Method::POST, "/charges", vec![b'x'; 32 << 20]);
    let ended = attempt(&Outbound::default(), &Arc::new(downstream(&server.url())), large).await;
    assert!(
        matches!(&ended, Ended::Unknown(unknown) if unknown.stage != "body"),
        "{ended:?}"
    );
    assert_eq!(server.connections(), 1);
}

#[tokio::test]
async fn a_peer_that_takes_no_more_of_our_body_leaves_it_unknown() {
    let server = Server::start(|mut peer: Peer| async move {
        peer.head().await.unwrap();
        tokio::time::sleep(Duration::from_secs(60)).await;
    })
    .await;
    let mut downstream = downstream(&server.url());
    downstream.limits.idle = SHORT;
    let large = request(Method::POST, "/charges", vec![b'x'; 32 << 20]);
    let ended = attempt(&Outbound::default(), &Arc::new(downstream), large).await;
    assert_eq!(ended.name(), "unknown request", "{ended:?}");
    assert_eq!(server.connections(), 1);
}

#[tokio::test]
async fn a_process_that_stands_still_past_the_deadline_does_not_end_its_request_when_it_goes_on() {
    // More than sockets take at once, and less than they take at twice.
    const WHOLE: usize = 6 << 20;
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let mut peer = downstream(&format!("http://{}", listener.local_addr().unwrap()));
    peer.limits.head = SHORT;
    let (go_on, told) = std::sync::mpsc::channel();
    // On a thread of its own: it reads while this process stands still.
    let reading = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        told.recv().unwrap();
        let mut taken = Vec::new();
        // However it ends.
        let _ = std::io::Read::read_to_end(&mut stream, &mut taken);
        taken.len()
    });
    let body = vec![b'x'; WHOLE];
    let sending =
        tokio::spawn(
            async move { attempt(&Outbound::default(), &Arc::new(peer), request(Method::POST, "/", body)).await },
        );
    // Until no more of it is taken.
    tokio::time::sleep(SHORT / 2).await;
    go_on.send(()).unwrap();
    // The whole runtime: this is what a frozen process does.
    std::thread::sleep(SHORT * 2);
    assert_eq!(sending.await.unwrap().name(), "unknown head");
    let taken = reading.join().unwrap();
    assert!(taken > 0 && taken < WHOLE, "{taken} bytes were taken");
}

#[tokio::test]
async fn nor_does_it_when_the_answer_has_begun() {
    const WHOLE: usize = 6 << 20;
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let mut peer = downstream(&format!("http://{}", listener.local_addr().unwrap()));
    peer.limits.idle = SHORT;
    let (go_on, told) = std::sync::mpsc::channel();
    let reading = std::thread::spawn(move || {
        let (mut stream, _) = listener.accept().unwrap();
        // Not before it is asked.
        std::io::Read::read_exact(&mut stream, &mut [0; 10]).unwrap();
        std::io::Write::write_all(&mut stream, b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n").unwrap();
        told.recv().unwrap();
        let mut taken = Vec::new();
        // However it ends.
        let _ = std::io::Read::read_to_end(&mut stream, &mut taken);
        taken.len()
    });
    let body = vec![b'x'; WHOLE];
    let sending =
        tokio::spawn(
            async move { attempt(&Outbound::default(), &Arc::new(peer), request(Method::POST, "/", body)).await },
        );
    tokio::time::sleep(SHORT / 2).await;
    go_on.send(()).unwrap();
    std::thread::sleep(SHORT * 2);
    assert_eq!(sending.await.unwrap().name(), "unknown body");
    let taken = reading.join().unwrap();
    assert!(taken > 0 && taken < WHOLE, "{taken} bytes were taken");
}

#[tokio::test]
async fn an_answer_that_does_not_come_in_time_is_unknown() {
    for (said, expected) in [
        ("", "unknown head"),
        ("HTTP/1.1 200 OK\r\n", "unknown head"),
        ("HTTP/1.1 102 Processing\r\n\r\n", "unknown head"),
        ("HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n01234", "unknown body"),
        ("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", "unknown body"),
    ] {
        let server = Server::start(move |mut peer: Peer| async move {
            peer.request().await.unwrap();
            peer.say(said).await;
            peer.hold().await;
        })
        .await;
        let mut downstream = downstream(&server.url());
        (downstream.limits.head, downstream.limits.idle) = (SHORT, SHORT);
        let outbound = Outbound::default();
        let ended = attempt(&outbound, &Arc::new(downstream), post()).await;
        assert_eq!(ended.name(), expected, "{said:?}: {ended:?}");
        super::until("the connection is closed", || server.gone() == 1).await;
        assert_eq!((server.connections(), server.requests().len()), (1, 1));
    }
}
