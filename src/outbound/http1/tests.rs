//! Answers read in all kinds of pieces, and beside another reader: hyper, which most of the world's Rust reads with.

use std::collections::VecDeque;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use http::{HeaderMap, HeaderValue, Method, Request};
use http_body_util::{BodyExt, Full};
use hyper_util::rt::TokioIo;
use proptest::prelude::*;
use tokio::io::{AsyncRead, AsyncReadExt, AsyncWriteExt, ReadBuf};

use super::head::encode;
use super::reading::Reading;

/// An answer as it was understood.
#[derive(Debug, PartialEq, Eq)]
struct Understood {
    status: u16,
    lines: Vec<(String, Vec<u8>)>,
    body: Vec<u8>,
}

/// Where an answer was found to be none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Refused {
    Head,
    Body,
}

impl Understood {
    fn new<B>(head: &http::Response<B>, body: Vec<u8>) -> Self {
        let line = |(name, value): (&http::HeaderName, &HeaderValue)| (name.to_string(), value.as_bytes().to_vec());
        Self {
            status: head.status().as_u16(),
            lines: head.headers().iter().map(line).collect(),
            body,
        }
    }
}

/// Gives one piece at a time, nothing in between, and then the end.
struct Pieces {
    pieces: VecDeque<Bytes>,
    is_silent: bool,
}

impl AsyncRead for Pieces {
    fn poll_read(mut self: Pin<&mut Self>, _: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        self.is_silent = !self.is_silent;
        if self.is_silent {
            return Poll::Pending;
        }
        if let Some(piece) = self.pieces.front_mut() {
            let part = piece.split_to(piece.len().min(buffer.remaining()));
            buffer.put_slice(&part);
            if piece.is_empty() {
                self.pieces.pop_front();
            }
        }
        Poll::Ready(Ok(()))
    }
}

/// Our own reader; and whether more had come than the answer.
fn ours(pieces: impl IntoIterator<Item = Bytes>, method: &Method) -> Result<(Understood, bool), Refused> {
    let mut io = Pieces {
        pieces: pieces.into_iter().filter(|piece| !piece.is_empty()).collect(),
        is_silent: false,
    };
    let mut cx = Context::from_waker(Waker::noop());
    let mut reading = Reading::new();
    let head = loop {
        if let Poll::Ready(head) = reading.poll_head(&mut io, &mut cx, method) {
            break head.map_err(|_| Refused::Head)?;
        }
    };
    let mut body = Vec::new();
    loop {
        match reading.poll_piece(&mut io, &mut cx) {
            Poll::Pending => {}
            Poll::Ready(Some(Ok(piece))) => body.extend_from_slice(&piece),
            Poll::Ready(Some(Err(_))) => return Err(Refused::Body),
            Poll::Ready(None) => break,
        }
    }
    let has_more = reading.has_more() || !io.pieces.is_empty();
    Ok((Understood::new(&head, body), has_more))
}

fn in_one(answer: &[u8], method: &Method) -> Result<Understood, Refused> {
    ours([Bytes::copy_from_slice(answer)], method).map(|(understood, _)| understood)
}

/// hyper's reader, and the request as it wrote it.
async fn hypers(answer: &[u8], request: Request<Full<Bytes>>) -> (Result<Understood, Refused>, Vec<u8>) {
    let (io, mut peer) = tokio::io::duplex(1 << 20);
    let (mut sender, connection) = hyper::client::conn::http1::Builder::new()
        .max_buf_size(64 << 10)
        .max_headers(256)
        .handshake::<_, Full<Bytes>>(TokioIo::new(io))
        .await
        .unwrap();
    let peer = async move {
        let mut written = Vec::new();
        while !written.windows(4).any(|four| four == b"\r\n\r\n") {
            assert!(peer.read_buf(&mut written).await.unwrap() > 0);
        }
        let _ = peer.write_all(answer).await;
        written
    };
    let asking = async move {
        let answer = sender.send_request(request).await.map_err(|_| Refused::Head)?;
        let (head, body) = answer.into_parts();
        let body = body.collect().await.map_err(|_| Refused::Body)?;
        Ok(Understood::new(
            &http::Response::from_parts(head, ()),
            body.to_bytes().to_vec(),
        ))
    };
    let (written, understood, _) = tokio::join!(peer, asking, connection);
    (understood, written)
}

fn asking(method: &Method) -> Request<Full<Bytes>> {
    Request::builder()
        .method(method)
        .uri("/")
        .body(Full::default())
        .unwrap()
}

fn run<T>(future: impl Future<Output = T>) -> T {
    let runtime = tokio::runtime::Builder::new_current_thread().build().unwrap();
    runtime.block_on(future)
}

#[tokio::test]
async fn another_reader_understands_the_same() {
    for answer in [
        "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",
        "HTTP/1.1 200\r\nContent-Length: 0\r\n\r\n",
        "HTTP/1.0 200 OK\r\n\r\nuntil the end",
        "HTTP/1.1 404 \r\nX-Twice: 1\r\nx-other:  spaced \t\r\nX-Twice: 2\r\nX-Empty:\r\nContent-Length: 1\r\n\r\nx",
        "HTTP/1.1 200 OK\r\nX-Bytes: \u{e9}\u{20ac}\tb\r\nContent-Length: 0\r\n\r\n",
        "HTTP/1.1 200 OK\nContent-Length: 2\n\nok",
        "\r\nHTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok",
        "HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: <x>\r\n\r\nHTTP/1.1 204 No Content\r\n\r\n",
        "HTTP/1.1 204 No Content\r\nContent-Length: 5\r\n\r\n",
        "HTTP/1.1 304 Not Modified\r\nTransfer-Encoding: chunked\r\n\r\n",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: Chunked\r\n\r\n5;a=b\r\nabcde\r\n3 \r\nfgh\r\n0\r\nX-Sum: 1\r\n\r\n",
        // Refused by both.
        "",
        "HTTP/1.1 200 OK\r\n",
        "HTTP/2.0 200 OK\r\n\r\n",
        "HTTP/1.1 099 X\r\n\r\n",
        "HTTP/1.1 20 X\r\n\r\n",
        "SSH-2.0-x\r\n\r\n",
        "HTTP/1.1 200 OK\r\nX : 1\r\n\r\n",
        "HTTP/1.1 200 OK\r\nX: 1\r\n 2\r\n\r\n",
        "HTTP/1.1 200 OK\r\n: 1\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length:\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: 1x\r\n\r\nx",
        "HTTP/1.1 200 OK\r\nContent-Length: 18446744073709551616\r\n\r\nx",
        "HTTP/1.0 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nx",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nxy\r\n0\r\n\r\n",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\nx\r\n0\r\n\r\n",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1_0\r\nx\r\n0\r\n\r\n",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n10000000000000000\r\nx\r\n0\r\n\r\n",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nx\r\n",
    ] {
        let hypers = hypers(answer.as_bytes(), asking(&Method::POST)).await.0;
        assert_eq!(in_one(answer.as_bytes(), &Method::POST), hypers, "{answer:?}");
    }
    for answer in [
        "HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\n",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n",
        "HTTP/1.1 200 OK\r\n\r\n",
    ] {
        let hypers = hypers(answer.as_bytes(), asking(&Method::HEAD)).await.0;
        assert_eq!(in_one(answer.as_bytes(), &Method::HEAD), hypers, "{answer:?}");
    }
}

#[tokio::test]
async fn what_two_readers_could_end_at_different_places_is_refused() {
    for answer in [
        "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nContent-Length: 2\r\n\r\nok",
        "HTTP/1.1 200 OK\r\nContent-Length: 2\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip\r\n\r\nok",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: identity, chunked\r\n\r\n0\r\n\r\n",
        "HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
        "HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\n\r\n",
    ] {
        assert_eq!(
            in_one(answer.as_bytes(), &Method::POST),
            Err(Refused::Head),
            "{answer:?}"
        );
    }
    let tunnel = b"HTTP/1.1 200 OK\r\n\r\n";
    assert_eq!(in_one(tunnel, &Method::CONNECT), Err(Refused::Head));
}

#[test]
fn heads_have_bounds() {
    let head = |most: usize| {
        let fixed = "HTTP/1.1 204 No Content\r\nX: \r\n\r\n".len();
        format!("HTTP/1.1 204 No Content\r\nX: {}\r\n\r\n", "x".repeat(most - fixed))
    };
    let lines = |count: usize| format!("HTTP/1.1 204 No Content\r\n{}\r\n", "X: y\r\n".repeat(count));
    let interim = |count: usize| "HTTP/1.1 102 Processing\r\n\r\n".repeat(count) + &lines(0);
    for (fits, beyond) in [
        (head(64 << 10), head((64 << 10) + 1)),
        (lines(256), lines(257)),
        (interim(64), interim(65)),
    ] {
        for pieces in [1, 1_000, 1 << 20] {
            let split = |text: &str| -> Vec<_> { text.as_bytes().chunks(pieces).map(Bytes::copy_from_slice).collect() };
            assert!(ours(split(&fits), &Method::POST).is_ok(), "{:.60} in {pieces}", fits);
            let refused = ours(split(&beyond), &Method::POST).err();
            assert_eq!(refused, Some(Refused::Head), "{:.60} in {pieces}", beyond);
        }
    }
    // Nor is it waited for.
    let endless = format!("HTTP/1.1 200 OK\r\nX: {}", "x".repeat(64 << 10));
    assert_eq!(in_one(endless.as_bytes(), &Method::POST), Err(Refused::Head));
}

#[tokio::test]
async fn a_request_is_written_as_another_writer_would() {
    let mut lines = HeaderMap::new();
    lines.append("x-twice", HeaderValue::from_static("1"));
    lines.append("content-length", HeaderValue::from_static("4"));
    lines.append("x-twice", HeaderValue::from_static("2"));
    lines.append("x-bytes", HeaderValue::from_bytes(b"\xe9\t ").unwrap());
    lines.append("x-empty", HeaderValue::from_static(""));
    for (method, target) in [
        (Method::POST, "/a%2Eb;c?d=%2f&e"),
        (Method::PATCH, "/"),
        (Method::POST, "?q"),
    ] {
        let target: http::uri::PathAndQuery = target.parse().unwrap();
        let written = encode(&method, &target, &"host:8080".parse().unwrap(), &lines);
        let mut request = Request::new(Full::from("body"));
        *request.method_mut() = method;
        *request.uri_mut() = target.into();
        *request.headers_mut() = lines.clone();
        request
            .headers_mut()
            .insert("host", HeaderValue::from_static("host:8080"));
        let (_, hypers) = hypers(b"HTTP/1.1 204 No Content\r\n\r\n", request).await;
        let end = hypers.windows(4).position(|four| four == b"\r\n\r\n").unwrap() + 4;
        let sorted = |head: &[u8]| {
            let text: String = head.iter().map(|&byte| char::from(byte)).collect();
            let mut lines: Vec<_> = text.split("\r\n").map(str::to_owned).collect();
            let first = lines.remove(0);
            lines.sort_unstable();
            (first, lines)
        };
        assert_eq!(sorted(&written), sorted(&hypers[..end]));
        assert!(
            written.windows(7).position(|seven| seven == b"\r\nhost:") < written.windows(3).position(|x| x == b"\nx-")
        );
    }
    // One line, even if the lines at hand have one of their own.
    lines.append("host", HeaderValue::from_static("elsewhere"));
    let written = encode(&Method::GET, &"/".parse().unwrap(), &"h".parse().unwrap(), &lines);
    assert!(written.starts_with(b"GET / HTTP/1.1\r\nhost: h\r\nx-twice: 1\r\n"));
    assert!(!written.windows(9).any(|nine| nine == b"elsewhere"));
}

/// A valid answer.
fn answers() -> impl Strategy<Value = Vec<u8>> {
    let pieces = prop::collection::vec(prop::collection::vec(any::<u8>(), 1..40), 0..5);
    let names = prop::collection::vec(("[a-zA-Z][a-z0-9_-]{0,8}", "[!-~]{0,3}[ -~\t]{0,10}"), 0..6);
    let interim = prop::collection::vec(prop::sample::select(vec![100, 102, 103]), 0..3);
    (
        prop::sample::select(vec![200, 201, 204, 400, 500]),
        names,
        pieces,
        0..4u8,
        interim,
    )
        .prop_map(|(status, names, pieces, framing, interim)| {
            let mut answer = String::new();
            for status in interim {
                answer.push_str(&format!("HTTP/1.1 {status} Soon\r\nX-Soon: 1\r\n\r\n"));
            }
            answer.push_str(&format!("HTTP/1.1 {status} Some Reason\r\n"));
            for (name, value) in names {
                answer.push_str(&format!("X-{name}: {value}\r\n"));
            }
            let mut answer = answer.into_bytes();
            match framing {
                0 => {
                    answer.extend_from_slice(b"\r\n");
                    answer.extend(pieces.concat());
                }
                1 => {
                    let body = pieces.concat();
                    answer.extend_from_slice(format!("Content-Length: {}\r\n\r\n", body.len()).as_bytes());
                    answer.extend(body);
                }
                trailers => {
                    answer.extend_from_slice(b"Transfer-Encoding: chunked\r\n\r\n");
                    for piece in pieces {
                        let extension = if piece.len() % 2 == 0 { ";a=b" } else { "" };
                        answer.extend_from_slice(format!("{:X}{extension}\r\n", piece.len()).as_bytes());
                        answer.extend(piece);
                        answer.extend_from_slice(b"\r\n");
                    }
                    answer.extend_from_slice(if trailers == 2 {
                        b"0\r\n\r\n"
                    } else {
                        b"0\r\nX-Sum: 1\r\n\r\n"
                    });
                }
            }
            answer
        })
}

/// The bytes, cut at these places.
fn cut(bytes: &[u8], places: &[prop::sample::Index]) -> Vec<Bytes> {
    let mut places: Vec<usize> = places.iter().map(|place| place.index(bytes.len() + 1)).collect();
    places.sort_unstable();
    places.push(bytes.len());
    let mut from = 0;
    places
        .into_iter()
        .map(|to| Bytes::copy_from_slice(&bytes[std::mem::replace(&mut from, to)..to]))
        .collect()
}

proptest! {
    #[test]
    fn it_does_not_matter_in_which_pieces_an_answer_comes(
        answer in answers(),
        places in prop::collection::vec(any::<prop::sample::Index>(), 0..12),
    ) {
        let whole = ours([Bytes::from(answer.clone())], &Method::POST);
        prop_assert!(whole.is_ok(), "{whole:?}");
        prop_assert_eq!(&ours(cut(&answer, &places), &Method::POST), &whole);
        let single = answer.iter().map(|byte| Bytes::copy_from_slice(&[*byte]));
        prop_assert_eq!(&ours(single, &Method::POST), &whole);
        prop_assert_eq!(whole.map(|(whole, _)| whole), run(hypers(&answer, asking(&Method::POST))).0);
    }

    #[test]
    fn nothing_is_understood_that_another_reader_refuses_or_understands_otherwise(
        answer in answers(),
        spoilt in prop::collection::vec((any::<prop::sample::Index>(), 0..3u8, prop::sample::select(b"\r\n:; 0fF_x\t\0\xff".to_vec())), 1..4),
        places in prop::collection::vec(any::<prop::sample::Index>(), 0..4),
    ) {
        let mut answer = answer;
        for (place, how, byte) in spoilt {
            let at = place.index(answer.len());
            match how {
                0 => answer[at] = byte,
                1 => answer.insert(at, byte),
                _ => drop(answer.remove(at)),
            }
        }
        let ours = ours(cut(&answer, &places), &Method::POST);
        if let Ok((understood, _)) = ours {
            prop_assert_eq!(Ok(understood), run(hypers(&answer, asking(&Method::POST))).0);
        }
    }

    #[test]
    fn any_bytes_are_read_without_a_panic(bytes in prop::collection::vec(any::<u8>(), 0..400), chunked in any::<bool>()) {
        let mut answer = Vec::new();
        if chunked {
            answer.extend_from_slice(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n");
        }
        answer.extend(bytes);
        let _ = in_one(&answer, &Method::POST);
    }
}
