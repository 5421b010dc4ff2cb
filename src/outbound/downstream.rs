//! Downstreams: APIs that cannot share our transaction, and what each of their routes declares it can do.
//!
//! The declaration alone decides how an attempt with an unknown outcome is recovered. What is not declared is
//! [`Ability::None`]: the careful choice is the default.

use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use http::uri::{Authority, Scheme};
use http::{HeaderName, HeaderValue, Method, StatusCode};

use super::template::{Pointer, Template};

/// One downstream of the configuration.
#[derive(Debug)]
pub struct Downstream {
    pub name: Arc<str>,
    pub base: Base,
    /// Header lines that authenticate us; put on every request, whatever the caller sent under their names.
    pub credential: Vec<(HeaderName, Secret)>,
    pub tls: Tls,
    pub limits: Limits,
    /// Names of answers' header lines that are stored and replayed beside the usual ones.
    pub replayed_headers: Vec<HeaderName>,
    /// In the order of the file; the first that matches counts.
    pub routes: Vec<Arc<Route>>,
    /// What holds where no route matches.
    pub undeclared: Arc<Route>,
}

/// Where a downstream is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Base {
    pub scheme: Scheme,
    pub authority: Authority,
    /// Begins with `/` and does not end with one; empty for the root.
    pub path: String,
}

/// A value that is never shown.
#[derive(Clone, PartialEq, Eq)]
pub struct Secret(HeaderValue);

impl Secret {
    /// The value is marked as sensitive, so that no library prints it either.
    pub fn new(mut value: HeaderValue) -> Self {
        value.set_sensitive(true);
        Self(value)
    }

    /// For the request line of the one header it belongs to.
    pub fn reveal(&self) -> &HeaderValue {
        &self.0
    }
}

impl fmt::Debug for Secret {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Secret(…)")
    }
}

/// How connections are secured and which protocol they speak.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Tls {
    /// PEM; trusted instead of the system's roots.
    pub authorities: Option<Arc<[u8]>>,
    /// PEM of certificate chain and key, when the downstream asks who we are.
    pub client: Option<(Arc<[u8]>, Arc<[u8]>)>,
    /// Offer HTTP/2 (by ALPN over TLS; by prior knowledge over plain TCP).
    pub http2: bool,
}

/// What an attempt may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// From the look-up of the name to the end of the TLS handshake.
    pub connect: Duration,
    /// From the first byte sent to the answer's head.
    pub head: Duration,
    /// Between two pieces of the answer's body, or of ours that the downstream does not take.
    pub idle: Duration,
    /// Requests on their way at the same time, from this process.
    pub concurrency: usize,
    /// Longest request body, in bytes.
    pub request_bytes: usize,
    /// Longest answer that is stored and replayed, in bytes.
    pub stored_body: usize,
}

/// What one method and path, or a pattern of paths, declares.
#[derive(Debug)]
pub struct Route {
    /// As messages name it, e.g. `POST /v1/charges`.
    pub name: String,
    pub methods: Vec<Method>,
    pub pattern: Pattern,
    pub ability: Ability,
    /// Whether an unsafe request without a key is refused; if not, it passes through unprotected.
    pub key_required: bool,
    /// Request headers that make two requests different, beside the content type.
    pub meaningful_headers: Vec<HeaderName>,
    /// Longest time after a send during which the downstream may still act on it.
    pub max_in_flight: Duration,
    pub retry: Retry,
    /// Where the answer names what was made, e.g. `/id`: becomes the external reference.
    pub reference: Option<Pointer>,
    /// The declared reversal.
    pub compensation: Option<Call>,
    /// Pass the answer on as it comes, whatever its type; event streams always are.
    pub stream: bool,
}

/// Paths of a route: `*` is one segment, `**` at the end is any number of them.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Pattern(Vec<Part>);

#[derive(Debug, Clone, PartialEq, Eq)]
enum Part {
    Exactly(String),
    Any,
    Rest,
}

/// What the downstream can do about a request that it may have received before (`idempotency` in the file).
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Ability {
    /// Takes our key and answers again what it answered first.
    Key {
        header: HeaderName,
        /// `"abc"`, an RFC 8941 string, instead of plain `abc`.
        quoted: bool,
        /// How long it remembers a key, from the first send.
        retention: Duration,
        /// How much earlier we stop relying on that.
        margin: Duration,
    },
    /// Refuses what has been done already (409 or 412), and shows what is there.
    Conditional { read_back: Probe },
    /// Can be asked by our reference.
    Lookup {
        probe: Probe,
        /// How long it may take from an effect until the look-up shows it.
        settle_delay: Duration,
        /// Between two look-ups.
        interval: Duration,
    },
    None,
}

/// A question to the downstream about one operation.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Probe {
    /// Path and query of a GET.
    pub path: Template,
    /// Where the object is in the answer; the whole answer if empty. Not there, null or an empty list: not found.
    pub found: Pointer,
    /// What proves that the object is this operation's: the member and the value it must have.
    pub ours: Vec<(Pointer, Template)>,
}

/// A request that is put together from an operation's payload.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Call {
    pub method: Method,
    /// Path and query.
    pub path: Template,
    pub headers: Vec<(HeaderName, Template)>,
    pub body: CallBody,
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum CallBody {
    Empty,
    /// The part of the payload at this pointer, as canonical JSON; the empty pointer is all of it.
    Part(Pointer),
    /// An object of templates.
    Object(Vec<(String, Template)>),
}

/// When and how often an attempt that is known, or declared, not to have acted is followed by another.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Retry {
    /// Answers after which the same request may be sent again, where the route is safe to send again.
    pub on: Vec<StatusCode>,
    /// Most attempts altogether.
    pub max_attempts: u32,
    /// Upper bound of the first delay; doubled with every attempt.
    pub first_delay: Duration,
    pub longest_delay: Duration,
    /// From the first claim on; no attempt begins later.
    pub deadline: Duration,
}
