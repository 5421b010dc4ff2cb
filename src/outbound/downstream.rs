//! Downstreams: APIs that cannot share our transaction, and what each of their routes declares it can do.
//!
//! The declaration alone decides how an attempt with an unknown outcome is recovered. What is not declared is
//! [`Ability::None`]: the careful choice is the default.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use http::uri::{Authority, Scheme, Uri};
use http::{HeaderName, HeaderValue, Method, StatusCode};

use super::path;
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

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidBase {
    #[error("it is no address; write e.g. \"https://api.example.com/v2\"")]
    Address,
    #[error("it carries a credential; name one under `credential` instead, from a variable or a file")]
    Credential,
    #[error("it has a query; a base ends with its path")]
    Query,
    #[error("its path is not one that is sent: {0}")]
    Path(#[from] path::Refused),
}

impl Base {
    /// Without the brackets of an IPv6 address.
    pub fn host(&self) -> &str {
        self.authority.host().trim_start_matches('[').trim_end_matches(']')
    }

    pub fn port(&self) -> u16 {
        self.authority
            .port_u16()
            .unwrap_or(if self.is_tls() { 443 } else { 80 })
    }

    pub fn is_tls(&self) -> bool {
        self.scheme == Scheme::HTTPS
    }
}

impl FromStr for Base {
    type Err = InvalidBase;

    fn from_str(url: &str) -> Result<Self, InvalidBase> {
        let parts = url.parse::<Uri>().map_err(|_| InvalidBase::Address)?.into_parts();
        let (Some(scheme), Some(authority), Some(path)) = (parts.scheme, parts.authority, parts.path_and_query) else {
            return Err(InvalidBase::Address);
        };
        if authority.as_str().contains('@') {
            return Err(InvalidBase::Credential);
        }
        let web = scheme == Scheme::HTTP || scheme == Scheme::HTTPS;
        // `host:` and `host:99999` are authorities to the parser, and no places to connect to.
        let port_fits = authority.port_u16().is_some() || authority.as_str() == authority.host();
        if !web || authority.host().is_empty() || !port_fits || url.contains('#') {
            return Err(InvalidBase::Address);
        }
        if path.query().is_some() {
            return Err(InvalidBase::Query);
        }
        path::check(path.path())?;
        let path = path.path().strip_suffix('/').unwrap_or(path.path()).to_owned();
        Ok(Self {
            scheme,
            authority,
            path,
        })
    }
}

impl fmt::Display for Base {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}://{}{}", self.scheme, self.authority, self.path)
    }
}

impl Downstream {
    /// What is declared for this method and path (as it follows the base, still encoded).
    pub fn route(&self, method: &Method, path: &str) -> &Arc<Route> {
        self.routes
            .iter()
            .find(|route| route.methods.contains(method) && route.pattern.matches(path))
            .unwrap_or(&self.undeclared)
    }
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
    /// When the downstream asks who we are.
    pub client: Option<Identity>,
    /// Offer HTTP/2 (by ALPN over TLS; by prior knowledge over plain TCP).
    pub http2: bool,
}

/// By what a downstream knows us in TLS.
#[derive(Clone, PartialEq, Eq)]
pub struct Identity {
    /// PEM of the certificate and those it leads to.
    pub chain: Arc<[u8]>,
    /// PEM of its private key. Never shown.
    pub key: Arc<[u8]>,
}

impl fmt::Debug for Identity {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Identity(…)")
    }
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

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidPattern {
    #[error("a pattern begins with a slash")]
    NoSlash,
    #[error("** stands alone in the last segment")]
    Rest,
    #[error("* stands alone in its segment")]
    Any,
    #[error("no such path is ever sent: {0}")]
    Path(#[from] path::Refused),
}

impl Pattern {
    /// `/**`.
    pub fn everything() -> Self {
        Self(vec![Part::Rest])
    }

    /// Whether a path fits. Segments are compared decoded, so that another spelling of a path is not another route.
    pub fn matches(&self, path: &str) -> bool {
        let mut segments = path.strip_prefix('/').unwrap_or(path).split('/');
        for part in &self.0 {
            let fits = match part {
                Part::Rest => return true,
                Part::Any => segments.next().is_some_and(|segment| !segment.is_empty()),
                Part::Exactly(wanted) => segments
                    .next()
                    .is_some_and(|segment| path::percent_decoded(segment.as_bytes()) == wanted.as_bytes()),
            };
            if !fits {
                return false;
            }
        }
        segments.next().is_none()
    }
}

impl FromStr for Pattern {
    type Err = InvalidPattern;

    fn from_str(text: &str) -> Result<Self, InvalidPattern> {
        let below = text.strip_prefix('/').ok_or(InvalidPattern::NoSlash)?;
        path::check_path(text)?;
        let last = below.split('/').count() - 1;
        let part = |(at, segment): (usize, &str)| match segment {
            "**" if at == last => Ok(Part::Rest),
            "*" => Ok(Part::Any),
            odd if odd.contains("**") => Err(InvalidPattern::Rest),
            odd if odd.contains('*') => Err(InvalidPattern::Any),
            exactly => Ok(Part::Exactly(
                // Escapes that are no text are compared as what they are written, and fit no path.
                String::from_utf8(path::percent_decoded(exactly.as_bytes())).unwrap_or_else(|_| exactly.to_owned()),
            )),
        };
        below
            .split('/')
            .enumerate()
            .map(part)
            .collect::<Result<_, _>>()
            .map(Self)
    }
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
    Conditional {
        read_back: Probe,
    },
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

impl Ability {
    /// As the file, the API and people name it.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Key { .. } => "key",
            Self::Conditional { .. } => "conditional",
            Self::Lookup { .. } => "lookup",
            Self::None => "none",
        }
    }

    /// The line in which the downstream expects our key, if it takes one. `None`, too, for a key that is no header text.
    pub fn key_line(&self, key: &str) -> Option<(HeaderName, HeaderValue)> {
        let Self::Key { header, quoted, .. } = self else {
            return None;
        };
        let text = if *quoted {
            format!("\"{}\"", key.replace('\\', "\\\\").replace('"', "\\\""))
        } else {
            key.to_owned()
        };
        HeaderValue::from_str(&text).ok().map(|value| (header.clone(), value))
    }
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::outbound::samples;

    fn matching(pattern: &str, path: &str) -> bool {
        pattern.parse::<Pattern>().unwrap().matches(path)
    }

    #[test]
    fn patterns_match_whole_paths() {
        let cases = [
            ("/charges", "/charges", true),
            ("/charges", "/%63harges", true),
            ("/charges", "/charges/", false),
            ("/charges", "/charges/1", false),
            ("/charges", "/chargesx", false),
            ("/charges", "/Charges", false),
            ("/charges/*", "/charges/1", true),
            ("/charges/*", "/charges/", false),
            ("/charges/*", "/charges/1/x", false),
            ("/charges/*/capture", "/charges/1/capture", true),
            ("/charges/**", "/charges", true),
            ("/charges/**", "/charges/1/2/", true),
            ("/charges/**", "/charge", false),
            ("/**", "", true),
            ("/**", "/x", true),
            ("/", "", true),
            ("/", "/", true),
            ("/", "/x", false),
            ("/a b", "/a%20b", true),
        ];
        for (pattern, path, expected) in cases {
            assert_eq!(
                matching(&pattern.replace(' ', "%20"), path),
                expected,
                "{pattern} {path}"
            );
        }
    }

    #[test]
    fn patterns_that_match_nothing_are_refused() {
        for bad in [
            "", "charges", "/a/../b", "/a//b", "/a/**/b", "/a*", "/a/b**", "/a?b", "/a b", "/%zz",
        ] {
            assert!(bad.parse::<Pattern>().is_err(), "{bad}");
        }
    }

    #[test]
    fn the_first_route_that_matches_counts_and_the_rest_is_undeclared() {
        let mut downstream = samples::downstream();
        downstream.routes = vec![
            Arc::new(samples::route("POST", "/charges/*")),
            Arc::new(samples::route("POST", "/charges/**")),
        ];
        let name = |method, path| downstream.route(&method, path).name.clone();
        assert_eq!(name(Method::POST, "/charges/1"), "POST /charges/*");
        assert_eq!(name(Method::POST, "/charges/1/2"), "POST /charges/**");
        assert_eq!(name(Method::PUT, "/charges/1"), "undeclared");
    }

    #[test]
    fn a_base_is_scheme_host_and_path() {
        let base: Base = "https://[::1]:8443/v2/".parse().unwrap();
        assert_eq!((base.host(), base.port(), base.path.as_str()), ("::1", 8443, "/v2"));
        let base: Base = "http://api.example.com".parse().unwrap();
        assert_eq!((base.port(), base.path.as_str()), (80, ""));
        for bad in [
            "",
            "api.example.com",
            "ftp://a",
            "http://",
            "https://user:pw@a/",
            "https://a/?q",
            "https://a/../b",
            "https://a:99999",
            "https://a:/",
            "https://a/#x",
            "/x",
        ] {
            assert!(bad.parse::<Base>().is_err(), "{bad}");
        }
    }

    #[test]
    fn keys_are_written_as_the_downstream_takes_them() {
        let key = |quoted| Ability::Key {
            header: HeaderName::from_static("idempotency-key"),
            quoted,
            retention: Duration::from_secs(1),
            margin: Duration::ZERO,
        };
        let line = |quoted, text: &str| key(quoted).key_line(text).map(|(_, value)| value);
        assert_eq!(line(false, "a\"b").unwrap(), "a\"b");
        assert_eq!(line(true, "a\"b\\").unwrap(), "\"a\\\"b\\\\\"");
        assert_eq!(line(false, "a\nb"), None);
        assert_eq!(Ability::None.key_line("a"), None);
    }

    #[test]
    fn a_secret_is_not_shown() {
        let secret = Secret::new(HeaderValue::from_static("Bearer sk"));
        assert_eq!(format!("{secret:?} {:?}", secret.reveal()), "Secret(…) Sensitive");
    }
}
