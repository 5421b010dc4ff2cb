//! One attempt: a ready connection, one request written to it, one answer or what can be known without one.

use std::sync::Arc;

use bytes::Bytes;
use http::uri::PathAndQuery;
use http::{HeaderMap, Method, StatusCode};

use super::downstream::Downstream;

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
pub struct Outbound {}

/// A connection that can take a request now, and a place among those that may be on their way.
pub struct Ready {}

/// A complete head, and the body as it comes.
pub struct Answer {
    pub status: StatusCode,
    /// End-to-end lines only.
    pub headers: HeaderMap,
    pub body: AnswerBody,
}

pub struct AnswerBody {}

/// Nothing has left this process.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{stage}: {cause}")]
pub struct NotSent {
    /// `busy`, `dns`, `connect`, `tls` or `closed`.
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

impl Outbound {
    /// Whether a connection waits that would be used without dialling.
    pub fn has_idle(&self, _downstream: &Downstream) -> bool {
        todo!()
    }

    /// A place and a connection: an idle one, or a new one.
    pub async fn connect(&self, _downstream: &Arc<Downstream>) -> Result<Ready, NotSent> {
        todo!()
    }
}

impl Ready {
    /// Sends the request, once. If the connection turns out to have been closed before it took the first byte, a fresh
    /// one is dialled; that is still the one send.
    pub async fn send(self, _request: Request) -> Result<Answer, Failure> {
        todo!()
    }
}

impl AnswerBody {
    /// The next piece; `None` at the end of a complete body.
    pub async fn next(&mut self) -> Option<Result<Bytes, Unknown>> {
        todo!()
    }
}
