//! Asking a downstream what became of an operation.

use std::sync::Arc;

use bytes::{Bytes, BytesMut};
use http::header::ACCEPT;
use http::{HeaderMap, HeaderValue, Method};
use serde_json::Value;

use super::Perform;
use crate::ledger::forward::{Forward, PROXY_KINDS};
use crate::outbound::downstream::{Ability, Downstream, Probe, Route};
use crate::outbound::headers;
use crate::outbound::send::{self, Answer};
use crate::outbound::template::Values;

/// Longest answer to a look-up, in bytes.
const LONGEST: usize = 1 << 20;

/// What a downstream shows.
#[derive(Debug)]
pub enum Found {
    /// The operation's own object: it has acted.
    Ours(Object),
    /// Something else is where the operation's object would be.
    Foreign,
    /// Nothing is there now.
    Nothing,
}

/// What stands for an answer that was lost.
#[derive(Debug)]
pub struct Object {
    pub status: u16,
    pub lines: Vec<(String, String)>,
    pub body: Bytes,
}

impl Perform {
    /// What is there instead, after a conditional request was refused.
    pub(super) async fn read_back(
        &self,
        forward: &Forward,
        downstream: &Arc<Downstream>,
        route: &Route,
    ) -> Result<Found, String> {
        match &route.ability {
            Ability::Conditional { read_back } => self.ask(forward, downstream, read_back).await,
            Ability::Key { .. } | Ability::Lookup { .. } | Ability::None => {
                Err("the route declares no way to read back".to_owned())
            }
        }
    }

    /// Asks. An answer that says neither yes nor no is an error: it proves nothing.
    pub(super) async fn ask(
        &self,
        forward: &Forward,
        downstream: &Arc<Downstream>,
        probe: &Probe,
    ) -> Result<Found, String> {
        let payload = payload(forward);
        let values = Values {
            operation_id: forward.id.as_str(),
            key: &forward.request.downstream_key,
            payload: &payload,
        };
        let path_and_query = probe
            .path_and_query(&downstream.base, &values)
            .map_err(|missing| missing.to_string())?;
        let mut lines = HeaderMap::new();
        lines.insert(ACCEPT, HeaderValue::from_static("application/json"));
        let request = send::Request {
            method: Method::GET,
            path_and_query,
            headers: lines,
            body: Bytes::new(),
        };
        let ready = self
            .outbound
            .connect(downstream)
            .await
            .map_err(|error| error.to_string())?;
        let answer = ready.send(request).await.map_err(|error| error.to_string())?;
        match answer.status.as_u16() {
            200 => judge(downstream, answer, probe, &values).await,
            404 | 410 => Ok(Found::Nothing),
            status => Err(format!("the look-up was answered {status}")),
        }
    }
}

/// What templates are filled from: the body of a proxied request, the payload of a kind's.
pub fn payload(forward: &Forward) -> Value {
    let text = if forward.kind.starts_with(PROXY_KINDS) {
        &forward.request.body[..]
    } else {
        forward.payload.as_bytes()
    };
    serde_json::from_slice(text).unwrap_or_default()
}

async fn judge(downstream: &Downstream, answer: Answer, probe: &Probe, values: &Values<'_>) -> Result<Found, String> {
    let lines = headers::replayed(downstream, &answer.headers);
    let body = whole(answer).await?;
    let document: Value =
        serde_json::from_slice(&body).map_err(|error| format!("the look-up's answer is not JSON: {error}"))?;
    let Some(object) = probe.found(&document) else {
        return Ok(Found::Nothing);
    };
    if !probe
        .is_ours(&document, values)
        .map_err(|missing| missing.to_string())?
    {
        return Ok(Found::Foreign);
    }
    let whole_answer = std::ptr::eq(object, &document);
    Ok(Found::Ours(Object {
        status: 200,
        body: if whole_answer {
            body
        } else {
            // A value that was parsed prints.
            serde_json::to_vec(object).unwrap_or_default().into()
        },
        lines: if whole_answer {
            lines
        } else {
            vec![("content-type".to_owned(), "application/json".to_owned())]
        },
    }))
}

async fn whole(mut answer: Answer) -> Result<Bytes, String> {
    let mut body = BytesMut::new();
    while let Some(piece) = answer.body.next().await {
        body.extend_from_slice(&piece.map_err(|error| error.to_string())?);
        if body.len() > LONGEST {
            return Err(format!("the look-up's answer has more than {LONGEST} bytes"));
        }
    }
    Ok(body.freeze())
}
