//! Bodies as they arrive, within limits of size and time.
//!
//! A body that is too large is refused as soon as that is known: by its declared length before anything of it is read, and
//! otherwise at the first byte too many. The rest is left unread, and the connection ends with the answer; `wire` sees to it
//! that a client which is still writing gets to read it.

use axum::body::Body;
use bytes::{Bytes, BytesMut};
use http_body::Body as _;
use http_body_util::BodyExt as _;
use tokio::time::Instant;

use super::App;
use super::problem::{Code, Problem};
use super::spool::{self, IN_MEMORY, Spool};

/// A body of any type within these many bytes, in memory.
pub async fn in_memory(app: &App, body: Body, limit: usize) -> Result<Bytes, Problem> {
    let mut arriving = Arriving::new(app, body, limit)?;
    let mut whole = BytesMut::with_capacity(arriving.declared().min(IN_MEMORY));
    while let Some(piece) = arriving.next().await? {
        whole.extend_from_slice(&piece);
    }
    Ok(whole.freeze())
}

/// The same, in a temporary file if it is large.
pub async fn spooled(app: &App, body: Body, limit: usize) -> Result<Bytes, Problem> {
    let mut arriving = Arriving::new(app, body, limit)?;
    let mut spool = Spool::new(&app.limits.spool_dir, arriving.declared());
    while let Some(piece) = arriving.next().await? {
        spool.push(&piece).await.map_err(|error| not_kept(&error))?;
    }
    spool.finish().await.map_err(|error| not_kept(&error))
}

struct Arriving {
    body: Body,
    limit: usize,
    received: usize,
    deadline: Instant,
}

impl Arriving {
    fn new(app: &App, body: Body, limit: usize) -> Result<Self, Problem> {
        let arriving = Self {
            body,
            limit,
            received: 0,
            deadline: Instant::now() + app.limits.body_timeout,
        };
        // Not even asked for: a client that waits for 100 (Continue) must not be told to go on.
        if arriving.declared() > limit {
            return Err(too_large(limit));
        }
        Ok(arriving)
    }

    /// How long it says it is; 0 if it does not.
    fn declared(&self) -> usize {
        usize::try_from(self.body.size_hint().lower()).unwrap_or(usize::MAX)
    }

    /// The next piece; `None` at the end of a complete body.
    async fn next(&mut self) -> Result<Option<Bytes>, Problem> {
        loop {
            let frame = match tokio::time::timeout_at(self.deadline, self.body.frame()).await {
                Err(_) => {
                    let detail = "the body did not arrive in time; nothing was stored";
                    return Err(Problem::new(Code::RequestTimeout, detail).last());
                }
                Ok(None) => return Ok(None),
                Ok(Some(Err(_))) => {
                    let detail = "the body broke off or is framed wrongly; nothing was stored";
                    return Err(Problem::member("", detail).last());
                }
                Ok(Some(Ok(frame))) => frame,
            };
            // Trailers are no part of it.
            let Ok(piece) = frame.into_data() else { continue };
            self.received = self.received.saturating_add(piece.len());
            if self.received > self.limit {
                return Err(too_large(self.limit));
            }
            return Ok(Some(piece));
        }
    }
}

fn too_large(limit: usize) -> Problem {
    let detail = format!("the body has more than {limit} bytes; nothing was stored");
    Problem::new(Code::TooLarge, detail).last()
}

fn not_kept(error: &spool::Error) -> Problem {
    let cause = std::error::Error::source(error).map(ToString::to_string);
    tracing::error!(error = %error, cause = cause.unwrap_or_default(), "large request bodies are refused");
    Problem::no_room().last()
}
