//! How a batch reaches the collector: HTTP/1.1, with TLS where the address says so.

use std::error::Error;
use std::fmt;
use std::io;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use http::uri::Scheme;
use http::{Request, Response, Uri};
use http_body_util::{BodyExt, Full, Limited};
use hyper_rustls::HttpsConnectorBuilder;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::{Connect, HttpConnector};
use hyper_util::rt::TokioExecutor;
use opentelemetry_http::{HttpClient, HttpError};

/// An answer says little, and is not worth more memory than this.
const MAX_ANSWER_BYTES: usize = 64 * 1024;

#[derive(Debug)]
struct Collector<C> {
    client: Client<C, Full<Bytes>>,
    patience: Duration,
    failure: LastFailure,
}

/// Why the last batch found no collector. Whoever called us is told only that it did not.
#[derive(Debug, Clone, Default)]
pub(super) struct LastFailure(Arc<Mutex<Option<String>>>);

/// Where below the collector's base URL the spans go, if it is one.
pub(super) fn traces_url(base: &str) -> Option<Uri> {
    let url: Uri = format!("{}/v1/traces", base.trim_end_matches('/')).parse().ok()?;
    let web = url.scheme() == Some(&Scheme::HTTP) || url.scheme() == Some(&Scheme::HTTPS);
    (web && url.host().is_some_and(|host| !host.is_empty()) && url.query().is_none()).then_some(url)
}

pub(super) fn client(url: &Uri, patience: Duration) -> io::Result<(Arc<dyn HttpClient>, LastFailure)> {
    let failure = LastFailure::default();
    let client: Arc<dyn HttpClient> = if url.scheme() == Some(&Scheme::HTTPS) {
        // Only now: a container that has no certificates can still reach a plain collector.
        let connector = HttpsConnectorBuilder::new()
            .with_native_roots()?
            .https_only()
            .enable_http1()
            .build();
        Arc::new(Collector::new(connector, patience, failure.clone()))
    } else {
        Arc::new(Collector::new(HttpConnector::new(), patience, failure.clone()))
    };
    Ok((client, failure))
}

impl<C: Connect + Clone> Collector<C> {
    fn new(connector: C, patience: Duration, failure: LastFailure) -> Self {
        Self {
            client: Client::builder(TokioExecutor::new()).build(connector),
            patience,
            failure,
        }
    }
}

#[async_trait::async_trait]
impl<C> HttpClient for Collector<C>
where
    C: Connect + Clone + Send + Sync + fmt::Debug + 'static,
{
    async fn send_bytes(&self, request: Request<Bytes>) -> Result<Response<Bytes>, HttpError> {
        let exchange = async {
            let (head, body) = self.client.request(request.map(Full::new)).await?.into_parts();
            let body = Limited::new(body, MAX_ANSWER_BYTES).collect().await?.to_bytes();
            Ok(Response::from_parts(head, body))
        };
        let answer = tokio::time::timeout(self.patience, exchange)
            .await
            .unwrap_or_else(|late| Err(late.into()));
        self.failure.keep(answer.as_ref().err());
        answer
    }
}

impl LastFailure {
    pub(super) fn take(&self) -> Option<String> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    fn keep(&self, error: Option<&HttpError>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = error.map(|error| chain(error.as_ref()));
    }
}

fn chain(error: &dyn Error) -> String {
    let causes = std::iter::successors(error.source(), |&cause| cause.source());
    causes.fold(error.to_string(), |text, cause| format!("{text}: {cause}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_go_below_the_collectors_address() {
        let below = |base| traces_url(base).map(|url| url.to_string());
        assert_eq!(
            below("http://localhost:4318").unwrap(),
            "http://localhost:4318/v1/traces"
        );
        assert_eq!(
            below("https://otel.example/tenant/a/").unwrap(),
            "https://otel.example/tenant/a/v1/traces"
        );
        for refused in [
            "",
            "localhost:4318",
            "grpc://localhost:4317",
            "/v1",
            "http://",
            "http://a b",
            "http://a?b=c",
        ] {
            assert_eq!(below(refused), None, "{refused}");
        }
    }
}
