//! One connection that speaks HTTP/2, and takes many requests at a time.
//!
//! Here the protocol itself can say that a request was not looked at: `REFUSED_STREAM`, and a `GOAWAY` whose last stream
//! is an earlier one. Everything else that ends a stream before its answer is complete leaves the outcome unknown.

use std::future::poll_fn;
use std::pin::{Pin, pin};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::task::{Context, Poll, Waker};

use bytes::Bytes;
use h2::client::{Builder, ResponseFuture, SendRequest};
use h2::{Reason, RecvStream, SendStream};
use http::{Request, Response};
use tokio::task::AbortHandle;
use tokio::time::{Instant, Sleep, sleep_until, timeout};
use tokio_util::task::TaskTracker;

use super::deadlines::Deadline;
use super::dial::chain;
use super::downstream::Limits;
use super::send::{Broken, Unknown};
use super::socket::{Meter, Stream};

/// Longest head of an answer.
const LONGEST_HEAD: u32 = 64 << 10;

/// What a peer may send ahead of us reading it: on one stream, and on all of them.
const STREAM_WINDOW: u32 = 128 << 10;
const CONNECTION_WINDOW: u32 = 4 << 20;

pub struct Http2 {
    sender: SendRequest<Bytes>,
    streams: AtomicUsize,
    last_used: Mutex<Instant>,
    /// Takes no further requests: it is about to go, or did not answer in time.
    spent: AtomicBool,
    meter: Arc<Meter>,
    driver: AbortHandle,
}

/// One of the streams that a connection can carry at a time.
pub struct Lane(Arc<Http2>);

/// What is still to be sent of a request's body.
pub struct Upload {
    stream: SendStream<Bytes>,
    rest: Bytes,
}

/// An answer's body, and what the peer has not yet taken of ours although it has answered.
pub struct Download {
    lane: Lane,
    stream: RecvStream,
    upload: Option<Upload>,
}

impl Http2 {
    /// Returns once the peer has proved that it speaks HTTP/2: what is sent to one that does not would be lost, and
    /// nobody would know.
    pub async fn new(stream: Stream, meter: Arc<Meter>, tasks: &TaskTracker) -> Result<Self, h2::Error> {
        let (sender, mut connection) = Builder::new()
            .enable_push(false)
            .max_header_list_size(LONGEST_HEAD)
            .initial_window_size(STREAM_WINDOW)
            .initial_connection_window_size(CONNECTION_WINDOW)
            .handshake::<_, Bytes>(stream)
            .await?;
        let mut pings = connection.ping_pong().ok_or(Reason::INTERNAL_ERROR)?;
        let mut pong = pin!(pings.ping(h2::Ping::opaque()));
        poll_fn(|cx| match Pin::new(&mut connection).poll(cx) {
            Poll::Ready(Err(error)) => Poll::Ready(Err(error)),
            Poll::Ready(Ok(())) => Poll::Ready(Err(Reason::NO_ERROR.into())),
            Poll::Pending => pong.as_mut().poll(cx).map(|pong| pong.map(drop)),
        })
        .await?;
        let driver = tasks.spawn(async move {
            if let Err(error) = connection.await {
                tracing::debug!(error = %error, "connection to a downstream ended");
            }
        });
        Ok(Self {
            sender,
            streams: AtomicUsize::new(0),
            last_used: Mutex::new(Instant::now()),
            spent: AtomicBool::new(false),
            meter,
            driver: driver.abort_handle(),
        })
    }

    /// A place for one more request; `None` if it has none, or takes no more at all.
    pub fn lane(self: &Arc<Self>) -> Option<Lane> {
        if self.is_over() {
            return None;
        }
        let most = self.sender.current_max_send_streams();
        self.streams
            .fetch_update(Ordering::AcqRel, Ordering::Acquire, |streams| {
                (streams < most).then_some(streams + 1)
            })
            .ok()
            .map(|_| Lane(self.clone()))
    }

    pub fn is_over(&self) -> bool {
        let mut sender = self.sender.clone();
        let mut refuses = || {
            matches!(
                sender.poll_ready(&mut Context::from_waker(Waker::noop())),
                Poll::Ready(Err(_))
            )
        };
        self.spent.load(Ordering::Acquire) || self.driver.is_finished() || refuses()
    }

    /// Since when it has carried nothing.
    pub fn idle_since(&self) -> Option<Instant> {
        let last_used = *self.last_used.lock().unwrap_or_else(PoisonError::into_inner);
        (self.streams.load(Ordering::Acquire) == 0).then_some(last_used)
    }
}

/// The last one to hold the connection closes it.
impl Drop for Http2 {
    fn drop(&mut self) {
        self.driver.abort();
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        *self.0.last_used.lock().unwrap_or_else(PoisonError::into_inner) = Instant::now();
        self.0.streams.fetch_sub(1, Ordering::AcqRel);
    }
}

impl Lane {
    /// One request, up to the head of its answer.
    pub async fn send(
        self,
        request: Request<()>,
        body: Bytes,
        limits: &Limits,
    ) -> Result<(Response<()>, Download), Broken> {
        let untouched = |error: h2::Error| Broken::Untouched(chain(&error));
        let mut sender = self.0.sender.clone();
        match timeout(limits.connect, poll_fn(|cx| sender.poll_ready(cx))).await {
            Ok(ready) => ready.map_err(untouched)?,
            Err(_) => return Err(Broken::Untouched("the connection had no place for it".to_owned())),
        }
        let before = self.0.meter.written();
        let mut deadline = self.0.meter.deadlines.keep(Instant::now() + limits.head);
        let (answer, stream) = sender.send_request(request, body.is_empty()).map_err(untouched)?;
        let mut upload = (!body.is_empty()).then(|| Upload::new(stream, body));
        let answered = first(answer, &mut upload, limits, &mut deadline).await;
        let broken = match answered {
            Ok(answer) => {
                let (head, stream) = answer.into_parts();
                let lane = self;
                return Ok((Response::from_parts(head, ()), Download { lane, stream, upload }));
            }
            Err(Ended::Late(unknown)) => Broken::Unknown(unknown),
            Err(Ended::Stream(error)) => self.broken(&error, before, upload.is_some(), &deadline),
        };
        // Whatever keeps one request from being answered may keep others: let them have a connection of their own.
        self.0.spent.store(true, Ordering::Release);
        Err(broken)
    }

    fn broken(&self, error: &h2::Error, before: u64, uploading: bool, deadline: &Deadline) -> Broken {
        // The peer, and not this side about itself.
        let said = error.is_remote().then(|| error.reason()).flatten();
        if error.is_go_away() && said.is_some() {
            return Broken::Refused {
                stage: "closed",
                cause: "the peer goes away, and the request comes after the last one it has looked at".to_owned(),
            };
        }
        if error.is_reset() && said == Some(Reason::REFUSED_STREAM) {
            return Broken::Refused {
                stage: "closed",
                cause: "the peer refuses the stream, unseen".to_owned(),
            };
        }
        if error.is_io() && self.0.meter.written() == before {
            // Nothing has left; and once it is too late for it, nothing shall.
            return match deadline.has_passed() {
                true => Broken::Refused {
                    stage: "late",
                    cause: chain(error),
                },
                false => Broken::Untouched(chain(error)),
            };
        }
        Broken::Unknown(Unknown::new(if uploading { "request" } else { "head" }, chain(error)))
    }
}

enum Ended {
    Late(Unknown),
    Stream(h2::Error),
}

/// Sends the body until the answer's head is there.
async fn first(
    answer: ResponseFuture,
    upload: &mut Option<Upload>,
    limits: &Limits,
    deadline: &mut Deadline,
) -> Result<Response<RecvStream>, Ended> {
    let latest = deadline.at();
    let mut stalled = Instant::now() + limits.idle;
    let mut answer = pin!(answer);
    let mut clock = pin!(sleep_until(latest));
    poll_fn(|cx| {
        if let Poll::Ready(answer) = answer.as_mut().poll(cx) {
            return Poll::Ready(answer.map_err(Ended::Stream));
        }
        // Before anything more is written, as nothing may be by then.
        if let Some(sending) = upload.as_mut().filter(|_| !deadline.has_passed()) {
            let left = sending.rest.len();
            // An error of the upload is the stream's, and told with more detail by the answer.
            if sending.poll(cx).is_ready() {
                *upload = None;
            } else if sending.rest.len() < left {
                stalled = Instant::now() + limits.idle;
            }
        }
        deadline.move_to(if upload.is_some() { stalled.min(latest) } else { latest });
        expired(clock.as_mut(), deadline.at(), cx).map(|()| {
            Err(Ended::Late(if upload.is_some() {
                Unknown::new("request", format!("the peer took nothing for {:?}", limits.idle))
            } else {
                Unknown::new("head", format!("no answer within {:?}", limits.head))
            }))
        })
    })
    .await
}

fn expired(mut clock: Pin<&mut Sleep>, deadline: Instant, cx: &mut Context<'_>) -> Poll<()> {
    if clock.deadline() != deadline {
        clock.as_mut().reset(deadline);
    }
    clock.poll(cx)
}

impl Upload {
    fn new(mut stream: SendStream<Bytes>, rest: Bytes) -> Self {
        stream.reserve_capacity(rest.len());
        Self { stream, rest }
    }

    /// Ready when the peer has room for all of it, or wants no more.
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<()> {
        loop {
            // A peer that has all it needs resets the stream with NO_ERROR.
            if let Poll::Ready(Ok(_) | Err(_)) = self.stream.poll_reset(cx) {
                return Poll::Ready(());
            }
            let granted = match self.stream.poll_capacity(cx) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(Some(Ok(granted))) => granted.min(self.rest.len()),
                Poll::Ready(Some(Err(_)) | None) => return Poll::Ready(()),
            };
            let piece = self.rest.split_to(granted);
            let last = self.rest.is_empty();
            if self.stream.send_data(piece, last).is_err() || last {
                return Poll::Ready(());
            }
            self.stream.reserve_capacity(self.rest.len());
        }
    }
}

impl Download {
    /// Whether nothing more will come.
    pub fn is_end(&self) -> bool {
        self.stream.is_end_stream()
    }

    /// The connection is given up: what is under way on it ends, and nothing else begins.
    pub fn spend(&self) {
        self.lane.0.spent.store(true, Ordering::Release);
    }

    pub fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, Unknown>>> {
        if self.upload.as_mut().is_some_and(|upload| upload.poll(cx).is_ready()) {
            self.upload = None;
        }
        loop {
            return match self.stream.poll_data(cx) {
                Poll::Pending => Poll::Pending,
                Poll::Ready(None) => Poll::Ready(None),
                // A stream that is reset has no end, whatever reason the peer gives.
                Poll::Ready(Some(Err(error))) => Poll::Ready(Some(Err(Unknown::new("body", chain(&error))))),
                Poll::Ready(Some(Ok(piece))) => {
                    let _ = self.stream.flow_control().release_capacity(piece.len());
                    if piece.is_empty() {
                        continue;
                    }
                    Poll::Ready(Some(Ok(piece)))
                }
            };
        }
    }
}
