//! From a reply to what is sent: padded, packed, in pieces, as a stream, or cut.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use bytes::Bytes;
use http::header::{
    CONTENT_DISPOSITION, CONTENT_ENCODING, CONTENT_TYPE, DATE, LINK, RETRY_AFTER, SET_COOKIE, WWW_AUTHENTICATE,
};
use http::{HeaderName, HeaderValue, Response};
use http_body::Frame;
use http_body_util::combinators::BoxBody;
use http_body_util::{BodyExt, Full};
use tokio::time::Sleep;

use super::fault::{End, Faults};
use super::gzip;
use super::line::{Manner, Place, Scissors};
use super::reply::Reply;

pub type Body = BoxBody<Bytes, io::Error>;

/// Between two events of a stream.
const EVENT_PAUSE: Duration = Duration::from_millis(100);

/// The answer with all that was asked to go wrong in it.
pub fn answer(reply: Reply, faults: &Faults, scissors: &Scissors) -> Response<Body> {
    let mut reply = reply;
    if let Some(status) = faults.status_after {
        reply.status = status;
    }
    if faults.odd_json {
        reply.body = Bytes::from_static(br#"{"b":1,   "a":1.10,"c":1e2}"#);
    }
    if faults.large > reply.body.len() {
        reply.body = padded(&reply.body, faults.large);
    }
    if faults.gzip {
        reply.body = gzip::stored(&reply.body).into();
        reply.headers.insert(CONTENT_ENCODING, HeaderValue::from_static("gzip"));
    }
    if let Some(value) = faults
        .retry_after
        .as_deref()
        .and_then(|value| HeaderValue::from_str(value).ok())
    {
        reply.headers.insert(RETRY_AFTER, value);
    }
    if faults.odd_headers {
        add_odd_headers(&mut reply);
    }
    let events = faults.stream.or(faults.cut_stream);
    if events.is_some() {
        reply
            .headers
            .insert(CONTENT_TYPE, HeaderValue::from_static("text/event-stream"));
    }
    let length = reply.body.len();
    let body = match (events, faults.slow_body) {
        (Some(events), _) => stream(events, faults.cut_stream.is_some()),
        (None, Some((pieces, pause))) => in_pieces(&reply.body, pieces, pause),
        (None, None) => match faults.end {
            Some(End::InBody { chunked: true, .. }) => in_pieces(&reply.body, 1, Duration::ZERO),
            Some(_) | None => Full::new(reply.body).map_err(never).boxed(),
        },
    };
    if let Some(end) = faults.end {
        let (place, manner) = end.place(length);
        scissors.cut(place, manner);
    } else if faults.close_idle {
        scissors.cut(Place::Body(length), Manner::Close);
    }
    let mut response = Response::new(body);
    *response.status_mut() = reply.status;
    *response.headers_mut() = reply.headers;
    response
}

/// A JSON object gets a member more, so that it stays one; anything else gets blanks.
fn padded(body: &[u8], size: usize) -> Bytes {
    let padding = size.saturating_sub(body.len() + r#","padding":"""#.len());
    match body.strip_suffix(b"}") {
        Some(open) if open.len() > 1 => [open, br#","padding":""#, &vec![b'x'; padding], br#""}"#]
            .concat()
            .into(),
        Some(_) | None => [body, &vec![b' '; size - body.len()]].concat().into(),
    }
}

fn add_odd_headers(reply: &mut Reply) {
    let lines = [
        (SET_COOKIE, "session=secret; HttpOnly"),
        (WWW_AUTHENTICATE, "Basic realm=\"sandbox\""),
        (DATE, "Wed, 21 Oct 2015 07:28:00 GMT"),
        (HeaderName::from_static("x-request-id"), "req-1"),
        (LINK, "</a>; rel=\"next\""),
        (LINK, "</b>; rel=\"prev\", </c>; rel=\"last\""),
        (CONTENT_DISPOSITION, "attachment; filename=\"a,b.txt\""),
        (http::header::CONNECTION, "X-Foo"),
        (HeaderName::from_static("x-foo"), "1"),
        (HeaderName::from_static("keep-alive"), "timeout=5"),
    ];
    for (name, value) in lines {
        reply.headers.append(name, HeaderValue::from_static(value));
    }
}

fn stream(events: usize, cut: bool) -> Body {
    let event = |number: usize| Bytes::from(format!("data: {{\"event\":{number}}}\n\n"));
    let mut pieces: VecDeque<(Duration, Bytes)> = (1..=events).map(|number| (EVENT_PAUSE, event(number))).collect();
    if !cut {
        pieces.push_back((EVENT_PAUSE, Bytes::from_static(b"data: [DONE]\n\n")));
    }
    Pieces {
        pieces,
        pause: None,
        cut,
    }
    .boxed()
}

fn in_pieces(body: &Bytes, pieces: usize, pause: Duration) -> Body {
    let size = body.len().div_ceil(pieces).max(1);
    let parts = (0..body.len()).step_by(size);
    let part = |start: usize| body.slice(start..body.len().min(start + size));
    Pieces {
        pieces: parts
            .map(|start| (if start == 0 { Duration::ZERO } else { pause }, part(start)))
            .collect(),
        pause: None,
        cut: false,
    }
    .boxed()
}

/// A body without a length, piece by piece, each after its pause.
struct Pieces {
    pieces: VecDeque<(Duration, Bytes)>,
    pause: Option<Pin<Box<Sleep>>>,
    /// Breaks off instead of ending.
    cut: bool,
}

impl http_body::Body for Pieces {
    type Data = Bytes;
    type Error = io::Error;

    fn poll_frame(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<io::Result<Frame<Bytes>>>> {
        let Some((pause, _)) = self.pieces.front() else {
            let broken = || Err(io::Error::new(io::ErrorKind::ConnectionAborted, "cut on request"));
            return Poll::Ready(std::mem::take(&mut self.cut).then(broken));
        };
        let pause = *pause;
        let sleep = self.pause.get_or_insert_with(|| Box::pin(tokio::time::sleep(pause)));
        ready!(sleep.as_mut().poll(context));
        self.pause = None;
        let piece = self.pieces.pop_front();
        Poll::Ready(piece.map(|(_, bytes)| Ok(Frame::data(bytes))))
    }
}

fn never(never: Infallible) -> io::Error {
    match never {}
}
