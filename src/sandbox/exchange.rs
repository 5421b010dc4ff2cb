//! One request: received, counted, performed, answered, each with what was asked to go wrong.

use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use bytes::Bytes;
use http::header::{ALLOW, HeaderName};
use http::{Request, Response, StatusCode};
use http_body_util::{BodyExt, Limited};
use hyper::body::Incoming;
use serde_json::json;
use sha2::{Digest as _, Sha256};

use super::Settings;
use super::answer::{Body, answer};
use super::fault::{End, Faults};
use super::keys::{self, Claim};
use super::line::Scissors;
use super::memory::Memory;
use super::object::Asked;
use super::perform::Intent;
use super::received::Seen;
use super::reply::Reply;
use super::route::{self, Call, Capability, Desk, NoRoute, Route};

/// Longest body of a request.
const LONGEST_BODY: usize = 64 << 20;

const REPLAYED: HeaderName = HeaderName::from_static("idempotent-replayed");

pub struct Exchange(Mutex<Memory>);

impl Exchange {
    pub fn new(settings: Settings) -> Self {
        Self(Mutex::new(Memory::new(settings)))
    }

    pub async fn respond(self: std::sync::Arc<Self>, request: Request<Incoming>, scissors: Scissors) -> Response<Body> {
        let (parts, body) = request.into_parts();
        let plain = |reply| answer(reply, &Faults::default(), &scissors);
        let Ok(body) = Limited::new(body, LONGEST_BODY).collect().await else {
            return plain(Reply::refused(
                StatusCode::PAYLOAD_TOO_LARGE,
                "too-large",
                "the body is too long or broke off",
            ));
        };
        let body = body.to_bytes();
        match route::find(&parts.method, &parts.uri) {
            Err(NoRoute::Path) => plain(Reply::refused(
                StatusCode::NOT_FOUND,
                "not-found",
                "there is nothing here",
            )),
            Err(NoRoute::Method { allow }) => {
                let message = "this address takes other methods";
                plain(Reply::refused(StatusCode::METHOD_NOT_ALLOWED, "method-not-allowed", message).with(ALLOW, allow))
            }
            Ok(Route::Desk(desk)) => plain(self.desk(desk)),
            Ok(Route::Call(capability, call)) => {
                let (reply, faults) = self.call(capability, &call, &parts, body).await;
                answer(reply, &faults, &scissors)
            }
        }
    }

    fn desk(&self, desk: Desk) -> Reply {
        let mut memory = self.memory();
        match desk {
            Desk::Health => Reply::json(StatusCode::OK, &json!({"status": "ok"})),
            Desk::Effects {
                reference: Some(reference),
            } => {
                let count = memory.effects_of(&reference);
                Reply::json(StatusCode::OK, &json!({"ref": reference, "count": count}))
            }
            Desk::Effects { reference: None } => Reply::json(StatusCode::OK, &memory.all_effects()),
            Desk::Reset => {
                let settings = memory.settings;
                *memory = Memory::new(settings);
                Reply::empty(StatusCode::NO_CONTENT)
            }
            Desk::Requests {
                reference: Some(reference),
            } => {
                let mut shown = serde_json::to_value(memory.received.of(&reference)).unwrap_or_default();
                shown["ref"] = reference.into();
                Reply::json(StatusCode::OK, &shown)
            }
            Desk::Requests { reference: None } => {
                Reply::json(StatusCode::OK, &json!({"count": memory.received.total()}))
            }
            Desk::Release { reference } => {
                let released = memory.release(&reference.unwrap_or_default());
                Reply::json(StatusCode::OK, &json!({"released": released}))
            }
        }
    }

    async fn call(
        &self,
        capability: Capability,
        call: &Call,
        parts: &http::request::Parts,
        body: Bytes,
    ) -> (Reply, Faults) {
        let faults = match Faults::read(&parts.headers) {
            Ok(faults) => faults,
            Err(message) => {
                return (
                    Reply::refused(StatusCode::BAD_REQUEST, "fault-unknown", &message),
                    Faults::default(),
                );
            }
        };
        let asked = Asked::parse(&body);
        let reference = reference(call, asked.as_ref().ok());
        let reads = matches!(call, Call::Read { .. } | Call::List { .. });
        let seen = Seen::new(&parts.method, &parts.uri, &parts.headers, &body);
        let number = match &reference {
            Some(reference) => self.memory().received.count(reference, reads, seen),
            None => Some(1),
        };
        let Some(number) = number else {
            return (Reply::full(), Faults::default());
        };
        let faults = faults.at(number);
        if faults.hold {
            let released = self.memory().hold(reference.as_deref().unwrap_or_default());
            // Dropped unreleased, it goes on as well.
            let _ = released.await;
        }
        tokio::time::sleep(faults.delay).await;
        if let Some(status) = faults.status {
            return (
                Reply::refused(status, "asked-for", "this status was asked for; nothing was done"),
                faults,
            );
        }
        if matches!(faults.end, Some(End::Before(_))) {
            return (Reply::empty(StatusCode::OK), faults);
        }
        let reply = self.perform(capability, call, parts, asked, &body, &faults);
        tokio::time::sleep(faults.delay_after).await;
        (reply, faults)
    }

    /// Effect, count and key under one lock: they are there together.
    fn perform(
        &self,
        capability: Capability,
        call: &Call,
        parts: &http::request::Parts,
        asked: Result<Asked, super::object::Malformed>,
        body: &[u8],
        faults: &Faults,
    ) -> Reply {
        let intent = match Intent::read(call, asked, &parts.headers) {
            Ok(Some(intent)) => intent,
            Ok(None) => return self.memory().read(capability, call),
            Err(malformed) => return Reply::refused(StatusCode::BAD_REQUEST, "malformed", &malformed.to_string()),
        };
        let key = match (capability, keys::key(&parts.headers)) {
            (Capability::Key, Ok(key)) => key,
            (Capability::Key, Err(message)) => return Reply::refused(StatusCode::BAD_REQUEST, "key-invalid", message),
            (Capability::Conditional | Capability::Lookup | Capability::None, _) => None,
        };
        let mut memory = self.memory();
        let Some(key) = key else {
            return memory.perform(capability, intent);
        };
        if faults.forget_key {
            memory.keys.forget(&key);
        }
        let mut digest = Sha256::new();
        digest.update(parts.method.as_str());
        digest.update(parts.uri.path());
        digest.update(b"\n");
        digest.update(body);
        match memory.keys.claim(&key, digest.finalize().into(), Instant::now()) {
            Claim::Fresh => {
                let reply = memory.perform(capability, intent);
                memory.keys.settle(&key, &reply);
                reply
            }
            Claim::Replay(reply) => reply.with(REPLAYED, "true"),
            Claim::Running => Reply::refused(
                StatusCode::CONFLICT,
                "key-in-use",
                "the first request with this key runs",
            ),
            Claim::Mismatch => {
                let message = "this key was used with another request";
                Reply::refused(StatusCode::UNPROCESSABLE_ENTITY, "key-reused", message)
            }
            Claim::Full => Reply::full(),
        }
    }

    fn memory(&self) -> MutexGuard<'_, Memory> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn reference(call: &Call, asked: Option<&Asked>) -> Option<String> {
    match call {
        Call::Create(_) | Call::Reverse { .. } => asked.and_then(|asked| asked.reference.clone()),
        Call::Put { reference, .. } => Some(reference.clone()),
        Call::List { reference, .. } => reference.clone(),
        Call::Read { .. } => None,
    }
}
