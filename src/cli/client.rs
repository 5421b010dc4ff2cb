//! The HTTP client of the command line: one request, one answer, bounded in time and size.
//!
//! It sends once. Sending again is `retry`'s, and only commands whose request names its operation do
//! so: with the same id, so that the second try finds what the first one did. The API key goes into one header and into
//! no message.

pub mod answer;
pub mod retry;

use std::time::Duration;

use bytes::Bytes;
use http::header::{AUTHORIZATION, USER_AGENT};
use http::{HeaderName, HeaderValue, Method, Response, Uri};
use http_body_util::{BodyExt, Full, LengthLimitError, Limited};
use hyper_rustls::{HttpsConnector, HttpsConnectorBuilder};
use hyper_util::client::legacy::Client as Pooled;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;

use super::exit::{Exit, Failure, chain};
use crate::config::ClientArgs;
use answer::Answer;

const CONNECT: Duration = Duration::from_secs(5);

/// Longest answer, in bytes; a page of 500 operations is far below it.
const LARGEST_ANSWER: usize = 64 << 20;

/// How long to wait for an answer.
#[derive(Debug, Clone, Copy, clap::Args)]
pub struct TimeArgs {
    /// Seconds to wait for an answer, each time
    #[arg(long, default_value_t = 30, value_name = "SECONDS", value_parser = clap::value_parser!(u64).range(1..=3600))]
    pub timeout: u64,
}

/// Talks to one service with one key.
pub struct Client {
    base: String,
    authorization: HeaderValue,
    http: Http,
}

/// Trust roots are read for `https` only: where there are none, `http` works.
enum Http {
    Plain(Pooled<HttpConnector, Full<Bytes>>),
    Tls(Pooled<HttpsConnector<HttpConnector>, Full<Bytes>>),
}

/// What to send.
#[derive(Debug, Clone)]
pub struct Request {
    pub method: Method,
    /// Path and query, percent-encoded.
    pub path: String,
    pub headers: Vec<(HeaderName, HeaderValue)>,
    /// JSON.
    pub body: Option<Bytes>,
    pub timeout: Duration,
}

/// Why there is no answer. None of them holds the key.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("\"{url}\" is not the address of a service; write e.g. http://127.0.0.1:8080, without user and password")]
    Address { url: String },
    #[error("the API key has characters that no API key has; check the file or variable it comes from")]
    Key,
    #[error("cannot read this machine's trusted certificates")]
    Trust { source: std::io::Error },
    #[error("cannot make a request of that")]
    Request { source: http::Error },
    #[error("cannot reach {base}; nothing was sent")]
    Connect {
        base: String,
        source: hyper_util::client::legacy::Error,
    },
    #[error("{base} did not answer within {seconds} s; whether it acted is not known here")]
    Timeout { base: String, seconds: u64 },
    #[error("the connection to {base} broke before the answer was complete; whether it acted is not known here")]
    Broken {
        base: String,
        source: Box<dyn std::error::Error + Send + Sync>,
    },
    #[error("the answer of {base} is longer than {LARGEST_ANSWER} bytes")]
    TooLarge { base: String },
}

impl Client {
    pub fn new(args: &ClientArgs) -> Result<Self, Failure> {
        let key = args.api_key()?;
        Ok(Self::with_key(&args.url, &key)?)
    }

    fn with_key(url: &str, key: &str) -> Result<Self, Error> {
        let (base, tls) = address(url).ok_or_else(|| Error::Address { url: shown(url) })?;
        let mut authorization = HeaderValue::try_from(format!("Bearer {key}")).map_err(|_| Error::Key)?;
        authorization.set_sensitive(true);
        let http = if tls { Http::tls()? } else { Http::plain() };
        Ok(Self {
            base,
            authorization,
            http,
        })
    }

    /// Sends once.
    pub async fn send(&self, request: &Request) -> Result<Answer, Error> {
        let sent = self.request(request).map_err(|source| Error::Request { source })?;
        match tokio::time::timeout(request.timeout, self.exchange(sent)).await {
            Ok(answer) => answer,
            Err(_) => Err(Error::Timeout {
                base: self.base.clone(),
                seconds: request.timeout.as_secs(),
            }),
        }
    }

    fn request(&self, request: &Request) -> Result<http::Request<Full<Bytes>>, http::Error> {
        let mut builder = http::Request::builder()
            .method(request.method.clone())
            .uri(format!("{}{}", self.base, request.path))
            .header(AUTHORIZATION, self.authorization.clone())
            .header(USER_AGENT, concat!("opledger/", env!("CARGO_PKG_VERSION")));
        for (name, value) in &request.headers {
            builder = builder.header(name, value);
        }
        if request.body.is_some() {
            builder = builder.header(http::header::CONTENT_TYPE, "application/json");
        }
        builder.body(Full::new(request.body.clone().unwrap_or_default()))
    }

    async fn exchange(&self, request: http::Request<Full<Bytes>>) -> Result<Answer, Error> {
        let base = || self.base.clone();
        let response = match self.http.request(request).await {
            Ok(response) => response,
            Err(source) if source.is_connect() => return Err(Error::Connect { base: base(), source }),
            Err(source) => {
                return Err(Error::Broken {
                    base: base(),
                    source: source.into(),
                });
            }
        };
        let (head, body) = response.into_parts();
        let body = Limited::new(body, LARGEST_ANSWER).collect().await.map_err(|source| {
            if source.is::<LengthLimitError>() {
                Error::TooLarge { base: base() }
            } else {
                Error::Broken { base: base(), source }
            }
        })?;
        Ok(Answer {
            status: head.status,
            headers: head.headers,
            body: body.to_bytes(),
        })
    }
}

impl TimeArgs {
    pub fn timeout(self) -> Duration {
        Duration::from_secs(self.timeout)
    }
}

impl Http {
    fn plain() -> Self {
        let mut connector = HttpConnector::new();
        connector.set_connect_timeout(Some(CONNECT));
        connector.set_nodelay(true);
        Self::Plain(
            Pooled::builder(TokioExecutor::new())
                .retry_canceled_requests(false)
                .build(connector),
        )
    }

    fn tls() -> Result<Self, Error> {
        let mut connector = HttpConnector::new();
        connector.set_connect_timeout(Some(CONNECT));
        connector.set_nodelay(true);
        connector.enforce_http(false);
        let connector = HttpsConnectorBuilder::new()
            .with_native_roots()
            .map_err(|source| Error::Trust { source })?
            .https_only()
            .enable_http1()
            .wrap_connector(connector);
        Ok(Self::Tls(
            Pooled::builder(TokioExecutor::new())
                .retry_canceled_requests(false)
                .build(connector),
        ))
    }

    async fn request(
        &self,
        request: http::Request<Full<Bytes>>,
    ) -> Result<Response<hyper::body::Incoming>, hyper_util::client::legacy::Error> {
        match self {
            Self::Plain(client) => client.request(request).await,
            Self::Tls(client) => client.request(request).await,
        }
    }
}

impl Request {
    pub fn new(method: Method, path: impl Into<String>, timeout: Duration) -> Self {
        Self {
            method,
            path: path.into(),
            headers: Vec::new(),
            body: None,
            timeout,
        }
    }

    pub fn header(mut self, name: &'static str, value: HeaderValue) -> Self {
        self.headers.push((HeaderName::from_static(name), value));
        self
    }

    pub fn body(mut self, json: impl Into<Bytes>) -> Self {
        self.body = Some(json.into());
        self
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let detail = chain(&error);
        match error {
            Error::Address { .. } => Self {
                exit: Exit::Usage,
                code: "address-invalid",
                detail,
                retryable: false,
            },
            Error::Key => Self {
                exit: Exit::NotAllowed,
                code: "unauthenticated",
                detail,
                retryable: false,
            },
            Error::Request { .. } => Self::refused("request-invalid", detail),
            Error::Trust { .. } | Error::TooLarge { .. } => Self::other(detail),
            Error::Connect { .. } => Self::unavailable("not-reached", detail),
            Error::Timeout { .. } | Error::Broken { .. } => Self::unavailable("no-answer", detail),
        }
    }
}

/// The address without a slash at its end, and whether it asks for TLS.
fn address(url: &str) -> Option<(String, bool)> {
    let uri: Uri = url.parse().ok()?;
    let tls = match uri.scheme_str()? {
        "http" => false,
        "https" => true,
        _ => return None,
    };
    let authority = uri.authority()?;
    if authority.as_str().contains('@') || authority.host().is_empty() || uri.query().is_some() {
        return None;
    }
    Some((
        format!(
            "{}://{authority}{}",
            if tls { "https" } else { "http" },
            uri.path().trim_end_matches('/')
        ),
        tls,
    ))
}

/// An address as it may be shown: what stands before an `@` may be a password.
fn shown(url: &str) -> String {
    match url.rsplit_once('@') {
        Some((_, place)) => format!("…@{place}"),
        None => url.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const KEY: &str = "opl_demo_0123456789abcdef_0123456789012345678901234567890123456789abc";

    #[test]
    fn addresses_are_plain() {
        assert_eq!(
            address("http://127.0.0.1:8080/"),
            Some(("http://127.0.0.1:8080".to_owned(), false))
        );
        assert_eq!(
            address("https://ledger.example/at/"),
            Some(("https://ledger.example/at".to_owned(), true))
        );
        for bad in [
            "",
            "127.0.0.1:8080",
            "ftp://a",
            "http://",
            "http://user:word@a",
            "http://a/?q=1",
        ] {
            assert_eq!(address(bad), None, "{bad}");
        }
        assert!(!shown("http://user:word@a").contains("word"));
    }

    #[tokio::test]
    async fn no_failure_shows_the_key() {
        // Nothing listens on port 1 of the loop-back interface.
        let client = Client::with_key("http://127.0.0.1:1", KEY).unwrap();
        let request = Request::new(Method::GET, "/v1/keys", Duration::from_secs(5));
        let error = client.send(&request).await.unwrap_err();
        assert!(matches!(error, Error::Connect { .. }));
        let refused = Client::with_key("http://127.0.0.1:1", &format!("{KEY}\n{KEY}"))
            .err()
            .unwrap();
        for error in [error, refused] {
            let debug = format!("{error:?}");
            let failure = Failure::from(error);
            assert!(
                !debug.contains("abcdef") && !failure.detail.contains("abcdef"),
                "{debug}"
            );
        }
        assert!(!format!("{:?}", client.request(&request).unwrap()).contains("abcdef"));
    }
}
