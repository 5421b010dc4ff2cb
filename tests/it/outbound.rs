//! One attempt at a downstream, over real sockets: what is known when it fails, and what comes through when it does not.

mod answers;
mod connections;
mod failures;
mod http2;
mod server;
mod tls;

use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use http::{HeaderMap, Method, StatusCode};
use opledger::outbound::downstream::{Ability, Downstream, Limits, Pattern, Retry, Route, Tls};
use opledger::outbound::send::{Answer, Failure, NotSent, Outbound, Request, Unknown};

/// Short enough for a test, and long enough for a machine that has other things to do.
const CONNECT: Duration = Duration::from_secs(2);
const SHORT: Duration = Duration::from_millis(300);

fn downstream(url: &str) -> Downstream {
    Downstream {
        name: "peer".into(),
        base: url.parse().unwrap(),
        credential: Vec::new(),
        tls: Tls::default(),
        limits: Limits {
            connect: CONNECT,
            head: Duration::from_secs(10),
            idle: Duration::from_secs(10),
            concurrency: 1_000,
            request_bytes: 64 << 20,
            stored_body: 1 << 20,
        },
        replayed_headers: Vec::new(),
        routes: Vec::new(),
        undeclared: Arc::new(Route {
            name: "everything else".to_owned(),
            methods: vec![Method::POST],
            pattern: Pattern::everything(),
            ability: Ability::None,
            key_required: true,
            meaningful_headers: Vec::new(),
            max_in_flight: Duration::from_secs(20),
            retry: Retry {
                on: Vec::new(),
                max_attempts: 1,
                first_delay: SHORT,
                longest_delay: SHORT,
                deadline: CONNECT,
            },
            reference: None,
            compensation: None,
            stream: false,
        }),
    }
}

fn request(method: Method, path: &str, body: impl Into<Bytes>) -> Request {
    Request {
        method,
        path_and_query: path.parse().unwrap(),
        headers: HeaderMap::new(),
        body: body.into(),
    }
}

fn post() -> Request {
    request(Method::POST, "/charges", "{}")
}

/// How an attempt ended, its answer read to the end.
#[derive(Debug)]
enum Ended {
    Answered {
        status: StatusCode,
        headers: HeaderMap,
        body: Vec<u8>,
    },
    NotSent(NotSent),
    Unknown(Unknown),
}

impl Ended {
    /// Its name and stage, in a word.
    fn name(&self) -> String {
        match self {
            Self::Answered { status, .. } => format!("answered {}", status.as_u16()),
            Self::NotSent(not_sent) => format!("not_sent {}", not_sent.stage),
            Self::Unknown(unknown) => format!("unknown {}", unknown.stage),
        }
    }
}

async fn attempt(outbound: &Outbound, downstream: &Arc<Downstream>, request: Request) -> Ended {
    let ready = match outbound.connect(downstream).await {
        Ok(ready) => ready,
        Err(not_sent) => return Ended::NotSent(not_sent),
    };
    match ready.send(request).await {
        Ok(answer) => read(answer).await,
        Err(Failure::NotSent(not_sent)) => Ended::NotSent(not_sent),
        Err(Failure::Unknown(unknown)) => Ended::Unknown(unknown),
    }
}

async fn read(mut answer: Answer) -> Ended {
    let mut body = Vec::new();
    loop {
        match answer.body.next().await {
            Some(Ok(piece)) => body.extend_from_slice(&piece),
            Some(Err(unknown)) => {
                // It stays so: a body that broke off never comes to look complete.
                assert_eq!(answer.body.next().await, Some(Err(unknown.clone())));
                return Ended::Unknown(unknown);
            }
            None => {
                return Ended::Answered {
                    status: answer.status,
                    headers: answer.headers,
                    body,
                };
            }
        }
    }
}

/// Looks again until it is so.
async fn until(what: &str, mut is_so: impl FnMut() -> bool) {
    let deadline = tokio::time::Instant::now() + Duration::from_secs(10);
    while !is_so() {
        assert!(tokio::time::Instant::now() < deadline, "not within 10 s: {what}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}
