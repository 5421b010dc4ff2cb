//! A plain HTTP/1.1 client of the tests: keeps nothing, retries nothing, shows everything, and holds each answer to
//! `openapi.yaml`.

use std::net::SocketAddr;

use bytes::Bytes;
use http::{HeaderMap, Method, Request};
use http_body_util::{BodyExt, Full};
use hyper_util::client::legacy::Client as Hyper;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use serde_json::Value;

use super::contract;

/// Talks to one service with one key.
#[derive(Clone)]
pub struct Client {
    pub address: SocketAddr,
    pub key: String,
    /// Whether answers are held to the description.
    checks: bool,
    hyper: Hyper<HttpConnector, Full<Bytes>>,
}

/// A whole answer.
#[derive(Debug, Clone, PartialEq)]
pub struct Answer {
    pub status: u16,
    pub headers: HeaderMap,
    pub body: Bytes,
}

impl Answer {
    pub fn json(&self) -> Value {
        serde_json::from_slice(&self.body)
            .unwrap_or_else(|error| panic!("not JSON ({error}): {:?}", String::from_utf8_lossy(&self.body)))
    }

    /// The problem's code; empty for answers that are no problem.
    pub fn code(&self) -> String {
        if self.header("content-type") != "application/problem+json" {
            return String::new();
        }
        self.json()["code"].as_str().unwrap_or_default().to_owned()
    }

    pub fn header(&self, name: &str) -> &str {
        self.headers.get(name).map_or("", |value| value.to_str().unwrap())
    }

    pub fn is_replay(&self) -> bool {
        self.header("idempotent-replayed") == "true"
    }

    /// Panics unless it is a first result or a replay; returns itself.
    pub fn succeeded(self) -> Self {
        assert_eq!(self.status, 200, "{:?}", String::from_utf8_lossy(&self.body));
        self
    }

    /// Panics unless it is this problem; returns itself.
    pub fn is(self, status: u16, code: &str) -> Self {
        assert_eq!(
            (self.status, self.code().as_str()),
            (status, code),
            "{:?}",
            String::from_utf8_lossy(&self.body)
        );
        self
    }
}

impl Client {
    pub fn new(address: SocketAddr, key: &str) -> Self {
        Self {
            address,
            key: key.to_owned(),
            checks: true,
            hyper: Hyper::builder(TokioExecutor::new()).build_http(),
        }
    }

    /// The same key at another service.
    pub fn at(&self, address: SocketAddr) -> Self {
        Self {
            address,
            ..self.clone()
        }
    }

    /// Another key at the same service.
    pub fn with_key(&self, key: &str) -> Self {
        Self {
            key: key.to_owned(),
            ..self.clone()
        }
    }

    /// For tests that plant receipts which the service would not write.
    pub fn unchecked(&self) -> Self {
        Self {
            checks: false,
            ..self.clone()
        }
    }

    /// Submits an operation.
    pub async fn submit(&self, id: &str, kind: &str, payload: &str) -> Answer {
        self.submit_with(id, kind, payload, &[]).await
    }

    pub async fn submit_with(&self, id: &str, kind: &str, payload: &str, headers: &[(&str, &str)]) -> Answer {
        self.try_submit(id, kind, payload, headers).await.unwrap()
    }

    /// Submits, and gives network errors back.
    pub async fn try_submit(
        &self,
        id: &str,
        kind: &str,
        payload: &str,
        headers: &[(&str, &str)],
    ) -> anyhow::Result<Answer> {
        let body = format!(r#"{{"kind":{},"payload":{payload}}}"#, Value::from(kind));
        let mut lines = vec![("idempotency-key", id), ("content-type", "application/json")];
        lines.extend_from_slice(headers);
        self.try_send("POST", "/v1/operations", &lines, body.into()).await
    }

    /// Deposits into an account: the simplest effect.
    pub async fn deposit(&self, id: &str, account: &str, amount: i64) -> Answer {
        self.submit(
            id,
            "account.deposit",
            &format!(r#"{{"account":"{account}","amount":{amount}}}"#),
        )
        .await
    }

    pub async fn get(&self, path: &str) -> Answer {
        self.send("GET", path, &[], "").await
    }

    /// The operation as it is shown.
    pub async fn operation(&self, id: &str) -> Value {
        self.get(&format!("/v1/operations/{}", encoded(id)))
            .await
            .succeeded()
            .json()
    }

    pub async fn post(&self, path: &str, body: &str) -> Answer {
        self.send("POST", path, &[("content-type", "application/json")], body)
            .await
    }

    pub async fn send(&self, method: &str, path: &str, headers: &[(&str, &str)], body: &str) -> Answer {
        self.try_send(method, path, headers, Bytes::copy_from_slice(body.as_bytes()))
            .await
            .unwrap()
    }

    pub async fn try_send(
        &self,
        method: &str,
        path: &str,
        headers: &[(&str, &str)],
        body: Bytes,
    ) -> anyhow::Result<Answer> {
        let mut request = Request::builder()
            .method(Method::from_bytes(method.as_bytes()).unwrap())
            .uri(format!("http://{}{path}", self.address));
        if !self.key.is_empty() {
            request = request.header("authorization", format!("Bearer {}", self.key));
        }
        for (name, value) in headers {
            request = request.header(*name, *value);
        }
        let response = self
            .hyper
            .request(request.body(Full::new(body.clone())).unwrap())
            .await?;
        let (parts, answered) = response.into_parts();
        let answer = Answer {
            status: parts.status.as_u16(),
            headers: parts.headers,
            body: answered.collect().await?.to_bytes(),
        };
        if self.checks {
            contract::check(method, path, &body, &answer);
        }
        Ok(answer)
    }
}

/// An id as a path segment.
pub fn encoded(id: &str) -> String {
    id.bytes()
        .map(|byte| match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'_' | b'.' | b'~' => char::from(byte).to_string(),
            _ => format!("%{byte:02X}"),
        })
        .collect()
}
