//! One attempt: a ready connection, one request written to it, one answer or what can be known without one.
//!
//! Nothing here sends a request a second time. A fresh connection is dialled only when the one at hand turns out, by the
//! kernel's own count, to have taken no byte of the request.

use std::collections::HashMap;
use std::future::poll_fn;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll};
use std::time::Duration;

use bytes::Bytes;
use http::header::{CONTENT_LENGTH, HOST};
use http::uri::PathAndQuery;
use http::{HeaderMap, Method, StatusCode, Uri};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::timeout;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::downstream::Downstream;
use super::headers;
use super::http1::{self, Http1};
use super::http2::Download;
use super::pool::{Line, Pool};

/// RFC 9110, 15: beyond are no classes.
const HIGHEST_STATUS: u16 = 599;

/// A request as it will be sent.
#[derive(Debug, Clone)]
pub struct Request {
    pub method: Method,
    /// With the base's path in front.
    pub path_and_query: PathAndQuery,
    /// End-to-end lines, without credentials; `Host` and the downstream's credential are added when it is sent.
    pub headers: HeaderMap,
    pub body: Bytes,
}

/// Connections to every downstream.
#[derive(Default)]
pub struct Outbound {
    pools: Mutex<HashMap<Arc<str>, Arc<Pool>>>,
    /// Connections that write by themselves, and those who look after idle ones.
    tasks: TaskTracker,
    stop: CancellationToken,
}

/// A connection that can take a request now, and a place among those that may be on their way.
pub struct Ready {
    line: Line,
    pool: Arc<Pool>,
    place: OwnedSemaphorePermit,
    downstream: Arc<Downstream>,
}

/// A complete head, and the body as it comes.
pub struct Answer {
    pub status: StatusCode,
    /// End-to-end lines only.
    pub headers: HeaderMap,
    pub body: AnswerBody,
}

/// Dropped before its end, it takes the connection with it.
pub struct AnswerBody {
    state: State,
    idle: Duration,
}

enum State {
    Reading(Reading),
    Complete,
    Failed(Unknown),
}

struct Reading {
    from: Source,
    pool: Arc<Pool>,
    /// Held until the answer is complete, or given up.
    place: OwnedSemaphorePermit,
}

enum Source {
    One(Box<Http1>),
    Lane(Download),
}

/// A request of which the peer has got something, and the place that it takes.
struct Sent {
    begun: Begun,
    pool: Arc<Pool>,
    place: OwnedSemaphorePermit,
    idle: Duration,
}

enum Begun {
    One(Box<Http1>),
    /// Its answer is there as well.
    Lane(Box<(http::Response<()>, Download)>),
}

/// Nothing has left this process.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{stage}: {cause}")]
pub struct NotSent {
    /// `busy`, `dns`, `connect`, `tls`, `closed` or `late`.
    pub stage: &'static str,
    pub cause: String,
}

/// A byte may have left, and no complete answer came.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{stage}: {cause}")]
pub struct Unknown {
    /// `request`, `head` or `body`: what was under way.
    pub stage: &'static str,
    pub cause: String,
}

/// How an attempt ends without an answer's head.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    #[error(transparent)]
    NotSent(#[from] NotSent),
    #[error(transparent)]
    Unknown(#[from] Unknown),
}

/// How a connection fails a request.
#[derive(Debug)]
pub enum Broken {
    /// It took no byte of it: another connection may be tried.
    Untouched(String),
    /// The peer proved that it did not look at it.
    Refused {
        stage: &'static str,
        cause: String,
    },
    Unknown(Unknown),
}

impl NotSent {
    pub fn new(stage: &'static str, cause: impl Into<String>) -> Self {
        Self {
            stage,
            cause: cause.into(),
        }
    }
}

impl Unknown {
    pub fn new(stage: &'static str, cause: impl Into<String>) -> Self {
        Self {
            stage,
            cause: cause.into(),
        }
    }
}

impl Outbound {
    /// Whether a connection waits that would be used without dialling.
    pub fn has_idle(&self, downstream: &Downstream) -> bool {
        self.pool(downstream).has_idle()
    }

    /// A place and a connection: an idle one, or a new one.
    pub async fn connect(&self, downstream: &Arc<Downstream>) -> Result<Ready, NotSent> {
        let pool = self.pool(downstream);
        let place = pool.place().await?;
        let line = match pool.take() {
            Some(line) => line,
            // On the heap: dialling takes a large future, and waiting for an answer a small one.
            None => Box::pin(pool.dial()).await?,
        };
        Ok(Ready {
            line,
            pool,
            place,
            downstream: downstream.clone(),
        })
    }

    /// Closes what waits, and what nobody waits for any more; called when everything under way has ended. Says whether
    /// nothing is left.
    pub async fn close(&self, within: Duration) -> bool {
        self.stop.cancel();
        self.pools().clear();
        self.tasks.close();
        timeout(within, self.tasks.wait()).await.is_ok()
    }

    fn pools(&self) -> MutexGuard<'_, HashMap<Arc<str>, Arc<Pool>>> {
        self.pools.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// After a reload a name may stand for another place: its old connections are then closed.
    fn pool(&self, downstream: &Downstream) -> Arc<Pool> {
        let mut pools = self.pools();
        match pools.get(&downstream.name) {
            Some(pool) if pool.fits(downstream) => pool.clone(),
            Some(_) | None => {
                let pool = Arc::new(Pool::new(downstream, self.tasks.clone(), self.stop.clone()));
                pools.insert(downstream.name.clone(), pool.clone());
                pool
            }
        }
    }
}

impl Ready {
    /// Puts it back unused.
    pub fn give_back(self) {
        match self.line {
            Line::One(connection) => self.pool.give_back(connection),
            // Others use the same connection.
            Line::Lane(_) => {}
        }
    }

    /// Sends the request, once. If the connection turns out to have been closed before it took the first byte, a fresh
    /// one is dialled; that is still the one send. Dropped, it closes the connection.
    pub fn send(self, request: Request) -> impl Future<Output = Result<Answer, Failure>> + Send {
        // On the heap, and gone before the answer is waited for, together with the request: many wait at a time.
        let begin = Box::pin(self.begin(request));
        async move { begin.await?.answer().await }
    }

    async fn begin(self, request: Request) -> Result<Sent, Failure> {
        let outgoing = Outgoing::new(request, &self.downstream);
        let begun = match outgoing.begin_on(self.line, &self.downstream).await {
            // Not from the pool: what waits there may be as old.
            Err(Broken::Untouched(_)) => outgoing.begin_on(self.pool.dial().await?, &self.downstream).await,
            begun => begun,
        };
        Ok(Sent {
            begun: begun?,
            pool: self.pool,
            place: self.place,
            idle: self.downstream.limits.idle,
        })
    }
}

impl Sent {
    async fn answer(self) -> Result<Answer, Failure> {
        let (head, from) = match self.begun {
            Begun::One(mut connection) => (connection.answer().await?, Source::One(connection)),
            Begun::Lane(answered) => (answered.0, Source::Lane(answered.1)),
        };
        // The parser takes any three digits; no receipt could have it, and no caller could tell what it means.
        if head.status().as_u16() > HIGHEST_STATUS {
            let cause = format!("its status, {}, is none of HTTP's", head.status().as_u16());
            return Err(Unknown::new("head", cause).into());
        }
        let reading = Reading {
            from,
            pool: self.pool,
            place: self.place,
        };
        Ok(Answer {
            status: head.status(),
            headers: headers::end_to_end(head.headers()),
            body: AnswerBody::new(reading, self.idle),
        })
    }
}

impl From<Broken> for Failure {
    fn from(broken: Broken) -> Self {
        match broken {
            Broken::Untouched(cause) => NotSent::new("closed", cause).into(),
            Broken::Refused { stage, cause } => NotSent::new(stage, cause).into(),
            Broken::Unknown(unknown) => unknown.into(),
        }
    }
}

/// A request with all its lines.
struct Outgoing(Request);

impl Outgoing {
    fn new(mut request: Request, downstream: &Downstream) -> Self {
        let has_body = [Method::POST, Method::PUT, Method::PATCH].contains(&request.method);
        request.headers.remove(CONTENT_LENGTH);
        if has_body || !request.body.is_empty() {
            request.headers.insert(CONTENT_LENGTH, request.body.len().into());
        }
        for (name, secret) in &downstream.credential {
            request.headers.insert(name, secret.reveal().clone());
        }
        Self(request)
    }

    async fn begin_on(&self, line: Line, downstream: &Downstream) -> Result<Begun, Broken> {
        let body = self.0.body.clone();
        match line {
            Line::One(mut connection) => {
                let method = self.0.method.clone();
                connection
                    .begin(method, self.http1(downstream), body, &downstream.limits)
                    .await?;
                Ok(Begun::One(connection))
            }
            // Up to its answer it may turn out that the peer has not looked at it.
            Line::Lane(lane) => {
                let sent = lane.send(self.http2(downstream), body, &downstream.limits).await;
                sent.map(|answered| Begun::Lane(Box::new(answered)))
            }
        }
    }

    fn http1(&self, downstream: &Downstream) -> Bytes {
        let request = &self.0;
        http1::encode(
            &request.method,
            &request.path_and_query,
            &downstream.base.authority,
            &request.headers,
        )
    }

    fn http2(&self, downstream: &Downstream) -> http::Request<()> {
        let mut parts = http::uri::Parts::default();
        parts.scheme = Some(downstream.base.scheme.clone());
        parts.authority = Some(downstream.base.authority.clone());
        parts.path_and_query = Some(self.0.path_and_query.clone());
        let mut request = http::Request::new(());
        *request.method_mut() = self.0.method.clone();
        // All three parts are there.
        *request.uri_mut() = Uri::from_parts(parts).unwrap_or_default();
        *request.version_mut() = http::Version::HTTP_2;
        *request.headers_mut() = self.0.headers.clone();
        request.headers_mut().remove(HOST);
        request
    }
}

impl AnswerBody {
    fn new(reading: Reading, idle: Duration) -> Self {
        let mut body = Self {
            state: State::Reading(reading),
            idle,
        };
        body.complete_at_end();
        body
    }

    /// The next piece; `None` at the end of a complete body.
    pub async fn next(&mut self) -> Option<Result<Bytes, Unknown>> {
        let reading = match &mut self.state {
            State::Complete => return None,
            State::Failed(unknown) => return Some(Err(unknown.clone())),
            State::Reading(reading) => reading,
        };
        let piece = match timeout(self.idle, poll_fn(|cx| reading.from.poll(cx))).await {
            Ok(piece) => piece,
            Err(_) => {
                reading.from.give_up();
                Some(Err(Unknown::new("body", format!("nothing came for {:?}", self.idle))))
            }
        };
        match &piece {
            Some(Ok(_)) => self.complete_at_end(),
            Some(Err(unknown)) => self.state = State::Failed(unknown.clone()),
            None => self.complete(),
        }
        piece
    }

    /// Where the length says that nothing more comes, the connection need not wait for somebody to ask.
    fn complete_at_end(&mut self) {
        if matches!(&self.state, State::Reading(reading) if reading.from.is_end()) {
            self.complete();
        }
    }

    fn complete(&mut self) {
        let State::Reading(reading) = std::mem::replace(&mut self.state, State::Complete) else {
            return;
        };
        let Reading { from, pool, place } = reading;
        if let Source::One(connection) = from {
            pool.give_back(connection);
        }
        drop(place);
    }
}

impl Source {
    fn is_end(&self) -> bool {
        match self {
            Self::One(connection) => connection.is_end(),
            Self::Lane(download) => download.is_end(),
        }
    }

    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Option<Result<Bytes, Unknown>>> {
        match self {
            Self::One(connection) => connection.poll_body(cx),
            Self::Lane(download) => download.poll(cx),
        }
    }

    /// A connection of its own is closed with the answer; a shared one is not used for anything new.
    fn give_up(&self) {
        match self {
            Self::One(_) => {}
            Self::Lane(download) => download.spend(),
        }
    }
}
#[cfg(test)]
mod tests {
    use super::*;

    /// Of what a function returns.
    fn size<A, B, R>(_: impl Fn(A, B) -> R) -> usize {
        size_of::<R>()
    }

    #[test]
    fn waiting_for_an_answer_takes_little() {
        let sizes = [size(Ready::send), size_of::<Http1>()];
        assert!(sizes.iter().all(|size| *size <= 512), "{sizes:?}");
    }
}
