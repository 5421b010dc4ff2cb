//! One connection that speaks HTTP/1.1, and takes one request at a time.
//!
//! Everything is written and read by the future that waits for the answer and by nothing else. So whoever drops that future
//! closes the connection, and once it has returned nothing is written behind its back. While an answer is waited for, a
//! connection holds no buffers.

mod body;
mod chunk;
mod head;
mod reading;
#[cfg(test)]
mod tests;
mod upload;

use std::fmt;
use std::future::poll_fn;
use std::io;
use std::pin::{Pin, pin};
use std::sync::Arc;
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONNECTION, CONTENT_LENGTH, TRANSFER_ENCODING};
use http::{HeaderMap, Method, Response, Version};
use tokio::io::{AsyncRead, ReadBuf};
use tokio::time::{Instant, sleep_until};

use self::body::{Body, is_bodiless};
pub use self::head::encode;
use self::reading::{Broke, Reading};
use self::upload::Upload;
use super::dial::chain;
use super::downstream::Limits;
use super::headers::keep_alive_seconds;
use super::send::{Broken, Unknown};
use super::socket::{Meter, Stream, Waiting};
use super::tls;

/// How long a connection may wait for its next request. Most servers wait longer, so that we are the ones who close.
pub const IDLE: Duration = Duration::from_secs(4);

pub struct Http1 {
    stream: Stream,
    meter: Arc<Meter>,
    /// The method of the request under way.
    method: Method,
    upload: Upload,
    /// Why no more of it could be written. Its answer may have come all the same.
    cut: Option<io::Error>,
    /// When it must have been written and the head of its answer have come; `None` once that is there.
    latest: Option<Instant>,
    patience: Patience,
    reading: Reading,
    /// The peer has closed it, or spoken unasked.
    spoilt: bool,
    /// It has carried an answer before.
    used: bool,
    /// How long it may be kept after the answer that it carries now; `None`: not at all.
    pub keep: Option<Duration>,
}

/// From the beginning to the answer's head, and for how long the peer may take nothing of the request.
#[derive(Debug, Clone, Copy, Default)]
struct Patience {
    head: Duration,
    idle: Duration,
}

/// What is wrong with an answer.
#[derive(Debug, thiserror::Error)]
#[error("{0}")]
pub struct Fault(Box<str>);

/// Why nothing more of a request is written.
enum Halt {
    Late(Late),
    Failed(io::Error),
}

/// Which time is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Late {
    /// The one for the answer's head.
    Head,
    /// The one in which the peer must take something of the request.
    Stalled,
}

impl Fault {
    fn new(cause: impl fmt::Display) -> Self {
        Self(cause.to_string().into())
    }
}

impl Http1 {
    pub fn new(stream: Stream, meter: Arc<Meter>) -> Self {
        Self {
            stream,
            meter,
            method: Method::GET,
            upload: Upload::default(),
            cut: None,
            latest: None,
            patience: Patience::default(),
            reading: Reading::new(),
            spoilt: false,
            used: false,
            keep: Some(IDLE),
        }
    }

    /// Whether it can take a request: nothing is under way, and the peer has neither closed it nor said anything.
    pub fn is_usable(&mut self) -> bool {
        self.spoilt |= !self.upload.is_done() || !self.reading.body().is_end() || self.reading.has_more();
        if let Stream::Tls(stream) = &mut self.stream {
            // Takes in what is TLS's own.
            let mut byte = [0];
            let mut buffer = ReadBuf::new(&mut byte);
            let read = Pin::new(stream).poll_read(&mut Context::from_waker(Waker::noop()), &mut buffer);
            self.spoilt |= read.is_ready();
        }
        !self.spoilt
            && match self.meter.waiting() {
                Waiting::Nothing => true,
                // TLS hands out its tickets right after the handshake. Whatever else comes unasked would be read as an
                // answer, or is the end.
                Waiting::Bytes => matches!(self.stream, Stream::Tls(_)) && !self.used,
                Waiting::End => false,
            }
    }

    /// Writes the beginning of a request. Only once this has returned `Ok` has the peer been sent anything of it.
    pub async fn begin(&mut self, method: Method, head: Bytes, body: Bytes, limits: &Limits) -> Result<(), Broken> {
        if !self.is_usable() {
            return Err(Broken::Untouched("the peer has closed the connection".to_owned()));
        }
        self.method = method;
        self.upload = Upload::new(head, body);
        self.reading = Reading::new();
        self.latest = Some(Instant::now() + limits.head);
        self.patience = Patience {
            head: limits.head,
            idle: limits.idle,
        };
        let before = self.meter.written();
        match self.within(|this, cx| this.poll_begin(before, cx)).await {
            // Nothing has left; and now that it is too late for it, nothing shall.
            Err(Broken::Unknown(late)) if self.meter.written() == before => Err(Broken::Refused {
                stage: "late",
                cause: late.cause,
            }),
            begun => begun,
        }
    }

    /// Writes the rest of the request, and reads the head of its answer.
    pub async fn answer(&mut self) -> Result<Response<()>, Broken> {
        let head = self.within(Self::poll_answer).await?;
        // An answer to half a request is one. What the peer makes of the other half, only it knows.
        let whole = self.upload.is_done() && self.cut.is_none();
        self.latest = None;
        self.used = true;
        self.keep = if whole {
            keep(&self.method, &head, self.reading.body())
        } else {
            None
        };
        Ok(head)
    }

    /// Whether the answer has come to its end.
    pub fn is_end(&self) -> bool {
        self.reading.body().is_end()
    }

    /// The next piece of the answer's body. A peer may want the rest of the request before it goes on.
    pub fn poll_body(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, Unknown>>> {
        if let Poll::Ready(Err(Halt::Late(_) | Halt::Failed(_))) = self.poll_upload(cx) {
            self.upload = Upload::default();
        }
        let piece = ready!(self.reading.poll_piece(&mut self.stream, cx));
        Poll::Ready(piece.map(|piece| piece.map_err(|broke| Unknown::new("body", chain(&broke)))))
    }

    /// A step, again and again until it is done or its time is over.
    async fn within<T>(
        &mut self,
        mut step: impl FnMut(&mut Self, &mut Context<'_>) -> Poll<Result<T, Broken>>,
    ) -> Result<T, Broken> {
        let mut clock = pin!(sleep_until(Instant::now()));
        poll_fn(|cx| {
            if let Poll::Ready(done) = step(self, cx) {
                return Poll::Ready(done);
            }
            let Some((deadline, late)) = self.deadline() else {
                return Poll::Pending;
            };
            if clock.deadline() != deadline {
                clock.as_mut().reset(deadline);
            }
            clock.as_mut().poll(cx).map(|()| Err(self.late(late)))
        })
        .await
    }

    fn poll_begin(&mut self, before: u64, cx: &mut Context<'_>) -> Poll<Result<(), Broken>> {
        while self.meter.written() == before {
            match ready!(self.poll_write(cx)) {
                Ok(()) => {}
                Err(Halt::Late(late)) => return Poll::Ready(Err(self.late(late))),
                Err(Halt::Failed(error)) if self.meter.written() == before => {
                    return Poll::Ready(Err(Broken::Untouched(chain(&error))));
                }
                Err(Halt::Failed(error)) => self.cut = Some(error),
            }
        }
        Poll::Ready(Ok(()))
    }

    fn poll_answer(&mut self, cx: &mut Context<'_>) -> Poll<Result<Response<()>, Broken>> {
        if self.cut.is_none() {
            match self.poll_upload(cx) {
                Poll::Ready(Err(Halt::Late(late))) => return Poll::Ready(Err(self.late(late))),
                // What the peer said before it closed is there to be read, or its end is.
                Poll::Ready(Err(Halt::Failed(error))) => self.cut = Some(error),
                Poll::Ready(Ok(())) | Poll::Pending => {}
            }
        }
        let answered = ready!(self.reading.poll_head(&mut self.stream, cx, &self.method));
        Poll::Ready(answered.map_err(|broke| self.broken(broke)))
    }

    /// All that is taken now of the request.
    fn poll_upload(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Halt>> {
        while !self.upload.is_done() {
            ready!(self.poll_write(cx))?;
        }
        Poll::Ready(Ok(()))
    }

    /// Before anything more is written, a look at the clock: a process that stood still for long would otherwise end a
    /// request that others have long found not to have been made.
    fn poll_write(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), Halt>> {
        if let Some((deadline, late)) = self.deadline()
            && Instant::now() >= deadline
        {
            return Poll::Ready(Err(Halt::Late(late)));
        }
        self.upload.poll_step(&mut self.stream, cx).map_err(Halt::Failed)
    }

    fn deadline(&self) -> Option<(Instant, Late)> {
        let stalled = self.meter.blocked_since().map(|since| since + self.patience.idle);
        match (stalled, self.latest) {
            (Some(stalled), Some(latest)) if stalled > latest => Some((latest, Late::Head)),
            (Some(stalled), _) => Some((stalled, Late::Stalled)),
            (None, latest) => latest.map(|latest| (latest, Late::Head)),
        }
    }

    fn broken(&mut self, broke: Broke) -> Broken {
        if let (false, Broke::Io(error)) = (self.used, &broke)
            && let Some(alert) = tls::refused_us(error)
        {
            return Broken::Refused {
                stage: "tls",
                cause: format!("the peer refuses our certificate ({alert:?})"),
            };
        }
        let stage = if self.meter.write_failed() { "request" } else { "head" };
        let cause = match &self.cut {
            Some(error) => chain(error),
            None => chain(&broke),
        };
        Broken::Unknown(Unknown::new(stage, cause))
    }

    fn late(&self, late: Late) -> Broken {
        Broken::Unknown(match late {
            Late::Stalled => Unknown::new("request", format!("the peer took nothing for {:?}", self.patience.idle)),
            Late::Head => Unknown::new("head", format!("no answer within {:?}", self.patience.head)),
        })
    }
}

/// Where there may be no body, a peer that sends one all the same would have it read as the next answer.
fn keep(method: &Method, head: &Response<()>, body: &Body) -> Option<Duration> {
    let lines = head.headers();
    let framed = lines.contains_key(CONTENT_LENGTH) || lines.contains_key(TRANSFER_ENCODING);
    let bodiless = is_bodiless(method, head.status());
    let doubtful = bodiless && (framed || *method == Method::HEAD);
    if doubtful || *body == Body::UntilClose || head.version() != Version::HTTP_11 || closes(lines) {
        return None;
    }
    match keep_alive_seconds(lines) {
        Some(seconds) => IDLE
            .min(Duration::from_secs(seconds.saturating_sub(1)))
            .checked_sub(Duration::from_millis(1)),
        None => Some(IDLE),
    }
}

fn closes(lines: &HeaderMap) -> bool {
    lines
        .get_all(CONNECTION)
        .iter()
        .flat_map(|line| line.as_bytes().split(|&byte| byte == b','))
        .any(|option| option.trim_ascii().eq_ignore_ascii_case(b"close"))
}
