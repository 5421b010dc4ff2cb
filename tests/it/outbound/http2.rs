//! HTTP/2: many requests on a connection, and what the protocol says about those it ends.

use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use bytes::Bytes;
use h2::server::SendResponse;
use h2::{Reason, RecvStream};
use http::{Method, Request, Response};
use opledger::outbound::downstream::{Downstream, Tls};
use opledger::outbound::send::Outbound;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt};
use tokio::net::{TcpListener, TcpStream};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::version::TLS13;

use super::server::Server;
use super::tls::{Authority, settings};
use super::{Ended, SHORT, attempt, downstream, post, request, until};

/// What a server does with a request.
#[derive(Debug, Clone, Copy)]
enum Deed {
    /// Reads it whole and gives its body back.
    Echo,
    Hold,
    Reset(Reason),
    /// Answers with a head, some of the body, and a reset.
    Cut(Reason),
    /// Less than the length it announces.
    Short,
    /// Ends the connection without a word.
    Vanish,
}

struct Server2 {
    address: SocketAddr,
    connections: Arc<AtomicUsize>,
    requests: Arc<AtomicUsize>,
    /// Connections that are no more.
    ended: Arc<AtomicUsize>,
}

impl Server2 {
    async fn start(deed: Deed, tls: Option<TlsAcceptor>) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let server = Self {
            address: listener.local_addr().unwrap(),
            connections: Arc::default(),
            requests: Arc::default(),
            ended: Arc::default(),
        };
        let (connections, requests) = (server.connections.clone(), server.requests.clone());
        let ended = server.ended.clone();
        tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                connections.fetch_add(1, Ordering::SeqCst);
                let (tls, requests, ended) = (tls.clone(), requests.clone(), ended.clone());
                tokio::spawn(async move {
                    match tls {
                        Some(tls) => serve(tls.accept(stream).await.unwrap(), deed, requests).await,
                        None => serve(stream, deed, requests).await,
                    }
                    ended.fetch_add(1, Ordering::SeqCst);
                });
            }
        });
        server
    }

    fn downstream(&self) -> Downstream {
        let mut downstream = downstream(&format!("http://{}/base", self.address));
        downstream.tls.http2 = true;
        downstream
    }

    fn counts(&self) -> (usize, usize) {
        (
            self.connections.load(Ordering::SeqCst),
            self.requests.load(Ordering::SeqCst),
        )
    }
}

async fn serve<Stream>(stream: Stream, deed: Deed, requests: Arc<AtomicUsize>)
where
    Stream: AsyncRead + AsyncWrite + Unpin + Send + 'static,
{
    let Ok(mut connection) = h2::server::handshake(stream).await else {
        return;
    };
    while let Some(Ok((request, answer))) = connection.accept().await {
        requests.fetch_add(1, Ordering::SeqCst);
        match deed {
            Deed::Vanish => return,
            Deed::Echo | Deed::Hold | Deed::Reset(_) | Deed::Cut(_) | Deed::Short => {
                tokio::spawn(perform(request, answer, deed));
            }
        }
    }
}

async fn perform(request: Request<RecvStream>, mut answer: SendResponse<Bytes>, deed: Deed) {
    let (head, mut body) = request.into_parts();
    match deed {
        Deed::Reset(reason) => answer.send_reset(reason),
        Deed::Hold | Deed::Vanish => std::future::pending().await,
        Deed::Cut(reason) => {
            let mut stream = answer.send_response(Response::new(()), false).unwrap();
            stream.send_data(Bytes::from_static(b"half"), false).unwrap();
            tokio::time::sleep(SHORT / 3).await;
            stream.send_reset(reason);
        }
        Deed::Short => {
            let head = Response::builder().header("content-length", 10).body(()).unwrap();
            let mut stream = answer.send_response(head, false).unwrap();
            stream.send_data(Bytes::from_static(b"half"), true).unwrap();
        }
        Deed::Echo => {
            let mut echoed = Vec::new();
            while let Some(piece) = body.data().await {
                let piece = piece.unwrap();
                body.flow_control().release_capacity(piece.len()).unwrap();
                echoed.extend_from_slice(&piece);
            }
            let answered = Response::builder()
                .header("x-uri", head.uri.to_string())
                .header("x-host", head.headers.contains_key("host").to_string())
                .header("x-length", head.headers["content-length"].clone())
                .body(())
                .unwrap();
            let mut stream = answer.send_response(answered, false).unwrap();
            let mut rest = Bytes::from(echoed);
            while !rest.is_empty() {
                stream.reserve_capacity(rest.len());
                let granted = std::future::poll_fn(|cx| stream.poll_capacity(cx)).await;
                let piece = rest.split_to(granted.unwrap().unwrap().min(rest.len()));
                stream.send_data(piece, rest.is_empty()).unwrap();
            }
        }
    }
}

#[tokio::test]
async fn many_requests_share_a_connection() {
    let server = Server2::start(Deed::Echo, None).await;
    let (outbound, downstream) = (Arc::new(Outbound::default()), Arc::new(server.downstream()));
    let large = Bytes::from(vec![b'x'; 3 << 20]);
    let sent = request(Method::POST, "/base/x?y", large.clone());
    match attempt(&outbound, &downstream, sent).await {
        Ended::Answered { headers, body, .. } => {
            assert_eq!(headers["x-uri"], format!("http://{}/base/x?y", server.address));
            assert_eq!(
                (&headers["x-host"], &headers["x-length"]),
                (&"false".parse().unwrap(), &"3145728".parse().unwrap())
            );
            assert_eq!(body, large);
        }
        other => panic!("{other:?}"),
    }
    assert!(outbound.has_idle(&downstream));
    let attempts: Vec<_> = (0..50)
        .map(|_| {
            let (outbound, downstream) = (outbound.clone(), downstream.clone());
            tokio::spawn(async move { attempt(&outbound, &downstream, post()).await.name() })
        })
        .collect();
    for attempt in attempts {
        assert_eq!(attempt.await.unwrap(), "answered 200");
    }
    assert_eq!(server.counts(), (1, 51));
}

#[tokio::test]
async fn whoever_closes_the_way_out_leaves_no_connection_behind() {
    let server = Server2::start(Deed::Echo, None).await;
    let (outbound, downstream) = (Outbound::default(), Arc::new(server.downstream()));
    attempt(&outbound, &downstream, post()).await;
    assert!(outbound.has_idle(&downstream));
    let began = tokio::time::Instant::now();
    assert!(outbound.close(SHORT).await, "something goes on");
    assert!(began.elapsed() < SHORT);
    until("the peer sees its end", || server.ended.load(Ordering::SeqCst) == 1).await;
    // What is held all the same is not waited for in vain.
    let outbound = Outbound::default();
    let held = outbound.connect(&downstream).await.unwrap();
    assert!(!outbound.close(SHORT).await);
    drop(held);
    until("the peer sees its end", || server.ended.load(Ordering::SeqCst) == 2).await;
    assert!(outbound.close(SHORT).await);
}

#[tokio::test]
async fn over_tls_the_peer_chooses_the_protocol() {
    let authority = Authority::new();
    for (protocol, expected) in [("h2", "answered 200"), ("http/1.1", "unknown head")] {
        let mut settings = settings(&authority.issue("localhost"), None, &TLS13);
        settings.alpn_protocols = vec![protocol.as_bytes().to_vec()];
        let server = Server2::start(Deed::Echo, Some(TlsAcceptor::from(Arc::new(settings)))).await;
        let mut downstream = downstream(&format!("https://localhost:{}", server.address.port()));
        downstream.tls = Tls {
            authorities: Some(authority.pem()),
            client: None,
            http2: true,
        };
        let ended = attempt(&Outbound::default(), &Arc::new(downstream), post()).await;
        // The second speaks HTTP/2 although it agreed on another protocol, and cannot read ours.
        assert_eq!(ended.name(), expected, "{ended:?}");
    }
}

#[tokio::test]
async fn a_peer_that_does_not_speak_it_gets_no_request() {
    let server = Server::saying("HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n").await;
    let mut downstream = downstream(&server.url());
    downstream.tls.http2 = true;
    let ended = attempt(&Outbound::default(), &Arc::new(downstream), post()).await;
    assert_eq!(ended.name(), "not_sent connect", "{ended:?}");
    let heads: Vec<_> = server.requests().into_iter().map(|received| received.head).collect();
    assert!(heads.iter().all(|head| head.starts_with("PRI * HTTP/2.0")), "{heads:?}");
}

#[tokio::test]
async fn a_stream_that_ends_early_is_unknown_unless_it_was_refused_unseen() {
    for (deed, expected) in [
        (Deed::Reset(Reason::REFUSED_STREAM), "not_sent closed"),
        (Deed::Reset(Reason::INTERNAL_ERROR), "unknown head"),
        (Deed::Reset(Reason::CANCEL), "unknown head"),
        (Deed::Reset(Reason::NO_ERROR), "unknown head"),
        (Deed::Cut(Reason::INTERNAL_ERROR), "unknown body"),
        // A reason that sounds like an end is none.
        (Deed::Cut(Reason::NO_ERROR), "unknown body"),
        (Deed::Cut(Reason::CANCEL), "unknown body"),
        (Deed::Cut(Reason::REFUSED_STREAM), "unknown body"),
        (Deed::Short, "unknown body"),
        (Deed::Vanish, "unknown head"),
    ] {
        let server = Server2::start(deed, None).await;
        let outbound = Outbound::default();
        let ended = attempt(&outbound, &Arc::new(server.downstream()), post()).await;
        assert_eq!(ended.name(), expected, "{deed:?} {ended:?}");
        assert_eq!(server.counts(), (1, 1), "{deed:?}");
    }
}

#[tokio::test]
async fn a_connection_that_did_not_answer_in_time_takes_no_more_requests() {
    let server = Server2::start(Deed::Hold, None).await;
    let mut downstream = server.downstream();
    downstream.limits.head = SHORT;
    let (outbound, downstream) = (Outbound::default(), Arc::new(downstream));
    for _ in 0..2 {
        assert_eq!(attempt(&outbound, &downstream, post()).await.name(), "unknown head");
        assert!(!outbound.has_idle(&downstream));
    }
    let mut stuck = server.downstream();
    stuck.limits.idle = SHORT;
    let large = request(Method::POST, "/base", vec![b'x'; 3 << 20]);
    let ended = attempt(&outbound, &Arc::new(stuck), large).await;
    assert_eq!(ended.name(), "unknown request", "{ended:?}");
    assert_eq!(server.counts(), (3, 3));
}

const HEADERS: u8 = 1;
const SETTINGS: u8 = 4;
const PING: u8 = 6;
const GOAWAY: u8 = 7;
const WINDOW_UPDATE: u8 = 8;
const ACK: u8 = 1;

/// One frame of the connection's own.
fn frame(kind: u8, flags: u8, payload: &[u8]) -> Vec<u8> {
    let length = u8::try_from(payload.len()).unwrap();
    [&[0, 0, length, kind, flags, 0, 0, 0, 0], payload].concat()
}

/// Frames by hand: the second request on a connection is told that the first was the last one looked at.
async fn goes_away_after_the_first(mut stream: TcpStream, requests: Arc<AtomicUsize>) {
    stream.read_exact(&mut [0; 24]).await.unwrap();
    stream.write_all(&frame(SETTINGS, 0, &[])).await.unwrap();
    let mut head = [0; 9];
    while stream.read_exact(&mut head).await.is_ok() {
        let length = u32::from_be_bytes([0, head[0], head[1], head[2]]);
        let mut payload = vec![0; usize::try_from(length).unwrap()];
        stream.read_exact(&mut payload).await.unwrap();
        match (head[3], head[4] & ACK) {
            (SETTINGS, 0) => stream.write_all(&frame(SETTINGS, ACK, &[])).await.unwrap(),
            (PING, 0) => stream.write_all(&frame(PING, ACK, &payload)).await.unwrap(),
            (HEADERS, _) if requests.fetch_add(1, Ordering::SeqCst) == 1 => {
                // The last stream is 1, and nothing is wrong.
                let last_and_reason = [0, 0, 0, 1, 0, 0, 0, 0];
                stream.write_all(&frame(GOAWAY, 0, &last_and_reason)).await.unwrap();
            }
            _ => {}
        }
    }
}

#[tokio::test]
async fn whoever_comes_after_the_last_stream_looked_at_was_not_sent() {
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let mut downstream = downstream(&format!("http://{}", listener.local_addr().unwrap()));
    downstream.tls.http2 = true;
    downstream.limits.head = SHORT * 3;
    let requests = Arc::new(AtomicUsize::new(0));
    let counted = requests.clone();
    let accepting = tokio::spawn(async move {
        goes_away_after_the_first(listener.accept().await.unwrap().0, counted).await;
    });
    let (outbound, downstream) = (Arc::new(Outbound::default()), Arc::new(downstream));
    let held = tokio::spawn({
        let (outbound, downstream) = (outbound.clone(), downstream.clone());
        async move { attempt(&outbound, &downstream, post()).await.name() }
    });
    until("the first has come", || requests.load(Ordering::SeqCst) == 1).await;
    let ended = attempt(&outbound, &downstream, post()).await;
    assert_eq!(ended.name(), "not_sent closed", "{ended:?}");
    assert!(!outbound.has_idle(&downstream));
    // The first was looked at, and never answered.
    assert_eq!(held.await.unwrap(), "unknown head");
    assert_eq!(requests.load(Ordering::SeqCst), 2);
    accepting.abort();
}

/// On a thread of its own, so that it acts while the runtime stands still: lets a request begin, takes nothing of its body
/// before it is told to, then what there is, and then what comes of it once there was nothing for a while.
fn takes_late(listener: &std::net::TcpListener, go_on: &std::sync::mpsc::Receiver<()>) -> (usize, usize) {
    use std::io::{Read, Write};
    let (mut stream, _) = listener.accept().unwrap();
    stream.read_exact(&mut [0; 24]).unwrap();
    // As large a window as there is, for each stream and for all of them: only sockets hold the body up.
    let window = [&[0, 4][..], &0x7fff_ffff_u32.to_be_bytes()].concat();
    stream.write_all(&frame(SETTINGS, 0, &window)).unwrap();
    let more = 0x7fff_0000_u32.to_be_bytes();
    stream.write_all(&frame(WINDOW_UPDATE, 0, &more)).unwrap();
    loop {
        let mut head = [0; 9];
        stream.read_exact(&mut head).unwrap();
        let mut payload = vec![0; usize::from(head[2])];
        stream.read_exact(&mut payload).unwrap();
        match (head[3], head[4] & ACK) {
            (SETTINGS, 0) => stream.write_all(&frame(SETTINGS, ACK, &[])).unwrap(),
            (PING, 0) => stream.write_all(&frame(PING, ACK, &payload)).unwrap(),
            (HEADERS, _) => break,
            _ => {}
        }
    }
    go_on.recv().unwrap();
    let mut buffer = vec![0; 1 << 20];
    let mut take = |timeout| {
        stream.set_read_timeout(Some(timeout)).unwrap();
        let mut taken = 0;
        while let Ok(count) = stream.read(&mut buffer)
            && count > 0
        {
            taken += count;
        }
        taken
    };
    (take(SHORT), take(SHORT * 6))
}

#[tokio::test]
async fn a_process_that_stands_still_past_the_deadline_writes_no_more_of_a_body_when_it_goes_on() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let mut downstream = downstream(&format!("http://{}", listener.local_addr().unwrap()));
    downstream.tls.http2 = true;
    downstream.limits.head = SHORT * 2;
    let (go_on, told) = std::sync::mpsc::channel();
    let taking = std::thread::spawn(move || takes_late(&listener, &told));
    let body = vec![b'x'; 32 << 20];
    let downstream = Arc::new(downstream);
    let sending =
        tokio::spawn(async move { attempt(&Outbound::default(), &downstream, request(Method::POST, "/", body)).await });
    // Until no more of it is taken.
    tokio::time::sleep(SHORT).await;
    go_on.send(()).unwrap();
    // The whole runtime: this is what a frozen process does.
    std::thread::sleep(SHORT * 5);
    let ended = sending.await.unwrap();
    assert!(ended.name().starts_with("unknown"), "{ended:?}");
    let (before, after) = taking.join().unwrap();
    assert!(before > 0, "nothing was sent");
    // At most the frame that was begun.
    assert!(
        after < 20_000,
        "{after} bytes of it were written after the deadline, {before} before"
    );
}
