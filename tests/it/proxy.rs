//! Proxied requests: forwarded once, replayed for ever, and unknown where nobody can know.
//!
//! What was sent and what took effect is counted at the downstream, never taken from the ledger's own report.

mod bodies;
mod commits;
mod compensation;
mod crashes;
mod decisions;
mod failures;
mod framing;
mod kinds;
mod limits;
mod recovery;
mod refusals;
mod replays;
mod retries;
mod secrets;
mod settlement;
mod streams;

use bytes::Bytes;
use serde_json::Value;

use crate::support::client::encoded;
use crate::support::downstream::{Downstream, Received, Script};
use crate::support::{Answer, Client, Ledger, Setup, until};

/// Sweeps that a test need not wait for long; leases as usual.
const SWEEPS: &str = "[recovery]\nsweep = \"150ms\"\n";

const JSON: (&str, &str) = ("content-type", "application/json");

/// A ledger and the downstream `pay` behind it.
struct Bench {
    ledger: Ledger,
    pay: Downstream,
}

impl Bench {
    /// With these settings and routes of the downstream.
    async fn with(lines: &str) -> Self {
        Self::set_up(lines, "").await
    }

    /// And with more configuration.
    async fn set_up(lines: &str, more: &str) -> Self {
        let pay = Downstream::start().await;
        let config = format!("{more}\n{SWEEPS}{}", pay.config("pay", lines));
        let ledger = Ledger::with(Setup {
            config,
            sql: String::new(),
        })
        .await;
        Self { ledger, pay }
    }

    async fn start() -> Self {
        Self::with("").await
    }

    fn agent(&self) -> Client {
        self.ledger.agent()
    }

    fn operator(&self) -> Client {
        self.ledger.client("operator")
    }

    async fn post(&self, key: &str, path: &str, body: &str) -> Answer {
        self.agent().forward("POST", key, path, body).await
    }

    async fn operation(&self, id: &str) -> Value {
        self.agent().operation(id).await
    }

    async fn state(&self, id: &str) -> String {
        self.operation(id).await["state"].as_str().unwrap().to_owned()
    }

    /// Waits until the operation is in this state.
    async fn until(&self, id: &str, state: &str) -> Value {
        until(&format!("{id} is {state}"), async || self.state(id).await == state).await;
        self.operation(id).await
    }

    /// Sends the very same again, here and to a process that remembers nothing: the answer is the first one's, to the byte,
    /// and nothing is sent.
    async fn is_replayed(&self, first: &Answer, key: &str, path: &str, body: &str) {
        let sent = self.pay.count();
        let other = self.ledger.second().await;
        for client in [self.agent(), self.agent().at(other.address)] {
            let again = client.forward("POST", key, path, body).await;
            assert!(again.is_replay(), "{again:?}");
            assert_ne!(again.header("request-id"), first.header("request-id"));
            assert_eq!(stable(&again), stable(first));
        }
        assert_eq!(self.pay.count(), sent, "a replay was sent");
    }

    /// Leaves sweeps and timers time to do what they must not do, and sees that nothing more is sent.
    async fn nothing_more_is_sent(&self) {
        let sent = self.pay.count();
        tokio::time::sleep(std::time::Duration::from_millis(700)).await;
        assert_eq!(self.pay.count(), sent, "{:?}", self.pay.requests());
    }
}

/// An answer without what is fresh in each.
fn stable(answer: &Answer) -> Answer {
    let mut answer = answer.clone();
    for fresh in ["request-id", "date", "idempotent-replayed"] {
        answer.headers.remove(fresh);
    }
    answer
}

impl Client {
    /// A request with JSON to the downstream `pay`.
    async fn forward(&self, method: &str, key: &str, path: &str, body: &str) -> Answer {
        self.try_forward(method, key, path, body).await.unwrap()
    }

    async fn try_forward(&self, method: &str, key: &str, path: &str, body: &str) -> anyhow::Result<Answer> {
        let lines = [("idempotency-key", key), JSON];
        let target = format!("/v1/proxy/pay{path}");
        self.try_send(method, &target, &lines, Bytes::copy_from_slice(body.as_bytes()))
            .await
    }

    async fn resolve(&self, id: &str, body: Value) -> Answer {
        self.post(&format!("/v1/operations/{}/resolve", encoded(id)), &body.to_string())
            .await
    }
}

/// Resets the first request for each path after it has taken effect, and goes on with `then`.
fn lost_at_first(
    then: impl Fn(&Received) -> Script + Send + Sync + 'static,
) -> impl Fn(&Received) -> Script + Send + Sync {
    let seen = std::sync::Mutex::new(std::collections::HashSet::new());
    move |request| {
        let key = format!("{} {}", request.method, request.target);
        if request.method != "GET" && seen.lock().unwrap().insert(key) {
            Script::new().reset()
        } else {
            then(request)
        }
    }
}

/// The history's events, in order.
fn events(operation: &Value) -> Vec<&str> {
    let history = operation["history"].as_array().unwrap();
    history.iter().map(|entry| entry["event"].as_str().unwrap()).collect()
}
