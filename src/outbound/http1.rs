//! One connection that speaks HTTP/1.1, and takes one request at a time.
//!
//! hyper reads and writes; it is driven from the future that waits for the answer and from nowhere else. So whoever drops
//! that future closes the connection, and once it has returned nothing is written behind its back.

use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Waker};
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONTENT_LENGTH, TRANSFER_ENCODING};
use http::{HeaderMap, Method, Response, StatusCode};
use http_body::Body;
use http_body_util::Full;
use hyper::body::Incoming;
use hyper::client::conn::http1::{Builder, Connection, SendRequest};
use hyper_util::rt::TokioIo;
use tokio::time::{Instant, sleep_until};

use super::dial::chain;
use super::downstream::Limits;
use super::headers::keep_alive_seconds;
use super::send::{Broken, Unknown};
use super::socket::{Meter, Stream, Waiting};
use super::tls;

/// Longest head of an answer, and most that is read at once.
const BUFFER: usize = 64 << 10;

/// Most header lines of an answer.
const MOST_LINES: usize = 256;

/// How long a connection may wait for its next request. Most servers wait longer, so that we are the ones who close.
pub const IDLE: Duration = Duration::from_secs(4);

pub struct Http1 {
    sender: SendRequest<Full<Bytes>>,
    connection: Connection<TokioIo<Stream>, Full<Bytes>>,
    /// It has ended and must not be polled again.
    ended: bool,
    meter: Arc<Meter>,
    secured: bool,
    /// It has carried an answer before.
    pub used: bool,
    /// How long it may be kept after the answer that it carries now; `None`: not at all.
    pub keep: Option<Duration>,
}

impl Http1 {
    pub async fn new(stream: Stream, meter: Arc<Meter>) -> hyper::Result<Self> {
        let secured = matches!(stream, Stream::Tls(_));
        let (sender, connection) = Builder::new()
            .max_buf_size(BUFFER)
            // The buffer alone would let a head pass that arrives in few large pieces.
            .max_header_size(BUFFER)
            .max_headers(MOST_LINES)
            .handshake(TokioIo::new(stream))
            .await?;
        Ok(Self {
            sender,
            connection,
            ended: false,
            meter,
            secured,
            used: false,
            keep: Some(IDLE),
        })
    }

    /// Whether it can take a request: nothing is under way, and the peer has neither closed it nor said anything.
    pub fn is_usable(&mut self) -> bool {
        if self.poll_connection(&mut Context::from_waker(Waker::noop())).is_ready() || !self.sender.is_ready() {
            return false;
        }
        match self.meter.waiting() {
            Waiting::Nothing => true,
            // TLS hands out its tickets right after the handshake. Whatever else comes unasked would be read as an answer,
            // or is the end.
            Waiting::Bytes => self.secured && !self.used,
            Waiting::End => false,
        }
    }

    /// One request, up to the head of its answer.
    pub async fn send(
        &mut self,
        request: http::Request<Full<Bytes>>,
        limits: &Limits,
    ) -> Result<Response<Incoming>, Broken> {
        if !self.is_usable() {
            return Err(Broken::Untouched("the peer has closed the connection".to_owned()));
        }
        let method = request.method().clone();
        let before = self.meter.written();
        let latest = Instant::now() + limits.head;
        let mut answer = pin!(self.sender.try_send_request(request));
        let mut clock = pin!(sleep_until(latest));
        let outcome = std::future::poll_fn(|cx| {
            // Before anything more is written: a process that stood still for long would otherwise end a request that
            // others have long found not to have been made.
            if let Some(since) = self.meter.blocked_since() {
                let stalled = since + limits.idle;
                if Instant::now() >= stalled.min(latest) {
                    return Poll::Ready(Err(self.late(stalled <= latest, limits)));
                }
            }
            let ended = self.poll_connection(cx).is_ready();
            if let Poll::Ready(answer) = answer.as_mut().poll(cx) {
                return Poll::Ready(answer.map_err(|mut error| {
                    // The message comes back if it never met the connection. Where hyper cannot say so, the count does.
                    let untouched = error.take_message().is_some() || self.meter.written() == before;
                    self.broken(untouched, &error.into_error())
                }));
            }
            if ended {
                return Poll::Ready(Err(match self.meter.written() == before {
                    true => Broken::Untouched("the connection ended".to_owned()),
                    false => self.cut("head", "the connection ended"),
                }));
            }
            let stalled = self.meter.blocked_since().map(|since| since + limits.idle);
            let deadline = stalled.map_or(latest, |stalled| stalled.min(latest));
            if clock.deadline() != deadline {
                clock.as_mut().reset(deadline);
            }
            clock
                .as_mut()
                .poll(cx)
                .map(|()| Err(self.late(stalled == Some(deadline), limits)))
        })
        .await?;
        if let Err(fault) = framing(outcome.status(), outcome.headers()) {
            return Err(self.cut("head", fault));
        }
        self.used = true;
        self.keep = keep(&method, outcome.status(), outcome.headers());
        Ok(outcome)
    }

    /// The next piece of the answer's body.
    pub fn poll_body(&mut self, body: &mut Incoming, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, Unknown>>> {
        loop {
            // Asking first is what makes hyper read on.
            let asked = match Pin::new(&mut *body).poll_frame(cx) {
                Poll::Pending => {
                    let ended = self.poll_connection(cx).is_ready();
                    match Pin::new(&mut *body).poll_frame(cx) {
                        Poll::Pending if ended => {
                            let unknown = Unknown::new("body", "the connection ended before the body did");
                            return Poll::Ready(Some(Err(unknown)));
                        }
                        asked => asked,
                    }
                }
                asked => asked,
            };
            return match asked {
                Poll::Pending => Poll::Pending,
                Poll::Ready(None) => Poll::Ready(None),
                Poll::Ready(Some(Err(error))) => Poll::Ready(Some(Err(Unknown::new("body", chain(&error))))),
                Poll::Ready(Some(Ok(frame))) => match frame.into_data() {
                    Ok(data) if data.is_empty() => continue,
                    Ok(data) => Poll::Ready(Some(Ok(data))),
                    // Trailers.
                    Err(_) => continue,
                },
            };
        }
    }

    fn poll_connection(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        if self.ended {
            return Poll::Ready(());
        }
        // What went wrong reaches whoever waits for the answer or its body.
        let ended = Pin::new(&mut self.connection).poll(cx).map(drop);
        self.ended = ended.is_ready();
        ended
    }

    fn broken(&self, untouched: bool, error: &hyper::Error) -> Broken {
        if untouched {
            return Broken::Untouched(chain(error));
        }
        if let (false, Some(alert)) = (self.used, tls::refused_us(error)) {
            return Broken::Refused {
                stage: "tls",
                cause: format!("the peer refuses our certificate ({alert:?})"),
            };
        }
        let stage = if self.meter.write_failed() { "request" } else { "head" };
        Broken::Unknown(Unknown::new(stage, chain(error)))
    }

    fn late(&self, stalled: bool, limits: &Limits) -> Broken {
        if stalled {
            let cause = format!("the peer took nothing for {:?}", limits.idle);
            Broken::Unknown(Unknown::new("request", cause))
        } else {
            self.cut("head", format!("no answer within {:?}", limits.head))
        }
    }

    fn cut(&self, stage: &'static str, cause: impl Into<String>) -> Broken {
        Broken::Unknown(Unknown::new(stage, cause))
    }
}

/// Refuses a head whose body two readers would end at different places.
fn framing(status: StatusCode, lines: &HeaderMap) -> Result<(), &'static str> {
    if status == StatusCode::SWITCHING_PROTOCOLS {
        return Err("it switches protocols, which nobody asked for");
    }
    let lengths: Vec<_> = lines.get_all(CONTENT_LENGTH).iter().collect();
    let codings: Vec<_> = lines.get_all(TRANSFER_ENCODING).iter().collect();
    match (lengths.as_slice(), codings.as_slice()) {
        ([], []) => Ok(()),
        ([length], []) if length.as_bytes().iter().all(u8::is_ascii_digit) => Ok(()),
        ([], [coding]) if coding.as_bytes().eq_ignore_ascii_case(b"chunked") => Ok(()),
        ([_, ..], []) => Err("it has more than one length"),
        ([], [_, ..]) => Err("it has a transfer coding other than chunked"),
        ([_, ..], [_, ..]) => Err("it has a length and a transfer coding"),
    }
}

/// Where there may be no body, a peer that sends one all the same would have it read as the next answer.
fn keep(method: &Method, status: StatusCode, lines: &HeaderMap) -> Option<Duration> {
    let bodiless = *method == Method::HEAD || [StatusCode::NO_CONTENT, StatusCode::NOT_MODIFIED].contains(&status);
    let framed = lines.contains_key(CONTENT_LENGTH) || lines.contains_key(TRANSFER_ENCODING);
    if bodiless && (framed || *method == Method::HEAD) {
        return None;
    }
    match keep_alive_seconds(lines) {
        Some(seconds) => IDLE
            .min(Duration::from_secs(seconds.saturating_sub(1)))
            .checked_sub(Duration::from_millis(1)),
        None => Some(IDLE),
    }
}
