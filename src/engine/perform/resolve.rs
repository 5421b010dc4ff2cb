//! What a named person decides about an operation: how an unknown ended, or that an effect is to be undone.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::Instant;

use super::Perform;
use super::attempt::{Attempt, SEND_WITHIN};
use super::undo::{Begun, Undoing};
use crate::engine::intake::refusal;
use crate::engine::outcome::{Known, Refusal};
use crate::ledger::compensation;
use crate::ledger::fingerprint::{Body, Fingerprint, ProxyRequest};
use crate::ledger::forward::{self, Forward, PROXY_KINDS, Stored};
use crate::ledger::key::Caller;
use crate::ledger::operation::{Answer, Operation, StateName};
use crate::ledger::operation_id::OperationId;
use crate::ledger::plan::{Fence, Seen};
use crate::ledger::read;
use crate::ledger::receipt::{self, Receipt};
use crate::ledger::reconciliation::{self, Ending, Note};
use crate::outbound::downstream::{Call, Downstream, Route};
use crate::outbound::headers;
use crate::outbound::template::Values;
use crate::postgres::error::Error;

/// A decision, with the version of the operation that its maker has seen.
#[derive(Debug)]
pub struct Resolution {
    pub verdict: Verdict,
    pub version: i32,
    pub reason: String,
    /// JSON text.
    pub evidence: Option<String>,
}

#[derive(Debug)]
pub enum Verdict {
    /// It acted; callers get this answer, or one of ours if it is not known.
    Succeeded {
        answer: Option<Receipt>,
        external_reference: Option<String>,
    },
    /// It did not act: a new attempt is allowed.
    NotExecuted,
    /// It did not act, and will not be tried again.
    Failed,
    /// It is to be undone, by its declared reversal.
    Compensate,
}

impl Verdict {
    pub fn as_str(&self) -> &'static str {
        match self {
            Self::Succeeded { .. } => "succeeded",
            Self::NotExecuted => "not-executed",
            Self::Failed => "failed",
            Self::Compensate => "compensate",
        }
    }
}

/// Why a decision was not taken.
#[derive(Debug)]
pub enum NotResolved {
    NotFound,
    /// The key does not cover the operation's kind.
    NotCovered,
    /// It is in another state, or has changed since it was seen.
    Changed {
        known: Known,
        version: i32,
    },
    /// A request may still be on its way.
    TooEarly {
        known: Known,
        wait: Duration,
    },
    /// The reversal is not declared, or cannot be made from what is stored.
    NoReversal {
        known: Known,
        cause: String,
    },
    Refused(Refusal),
}

impl From<Error> for NotResolved {
    fn from(error: Error) -> Self {
        Self::Refused(refusal(&error))
    }
}

impl Perform {
    /// Ends an unknown by a person's decision.
    pub async fn resolve(
        self: &Arc<Self>,
        caller: &Caller,
        id: &OperationId,
        resolution: Resolution,
    ) -> Result<(), NotResolved> {
        let operation = self.decidable(caller, id, resolution.version).await?;
        if operation.state.name() != StateName::NeedsReconciliation {
            return Err(changed(&operation));
        }
        if matches!(resolution.verdict, Verdict::NotExecuted | Verdict::Failed)
            && self.has_succeeded(&operation).await?
        {
            return Err(NotResolved::NoReversal {
                known: Known::of(&operation),
                cause: "it has succeeded, as its receipt says; what is unknown is whether that was undone".to_owned(),
            });
        }
        let evidence = evidence(&resolution.verdict, resolution.evidence.as_deref());
        let reason = resolution.reason.as_str();
        let actor = caller.actor();
        let note = Note {
            event: "resolved",
            actor: &actor,
            reason,
            evidence: Some(&evidence),
        };
        let stored = self.stored(&caller.tenant, id).await?;
        let done = match resolution.verdict {
            Verdict::Succeeded {
                answer,
                ref external_reference,
            } => {
                let receipt = answer.unwrap_or_else(|| Receipt::resolved(described(&operation), reason));
                let reference = external_reference.as_deref();
                self.end(&operation, StateName::Succeeded, &receipt, reference, note)
                    .await?
            }
            Verdict::Failed => {
                let receipt = Receipt::gave_up(described(&operation), reason);
                self.end(&operation, StateName::Failed, &receipt, None, note).await?
            }
            Verdict::NotExecuted => self.allow(&operation, stored.as_ref(), note).await?,
            Verdict::Compensate => return self.undo(&operation, stored, note).await,
        };
        if done {
            Ok(())
        } else {
            Err(self.changed_meanwhile(caller, id).await)
        }
    }

    /// Undoes a succeeded operation by its declared reversal.
    pub async fn compensate(
        self: &Arc<Self>,
        caller: &Caller,
        id: &OperationId,
        version: i32,
        reason: &str,
    ) -> Result<(), NotResolved> {
        let operation = self.decidable(caller, id, version).await?;
        if operation.state.name() != StateName::Succeeded {
            return Err(changed(&operation));
        }
        let actor = caller.actor();
        let note = Note {
            event: "compensating",
            actor: &actor,
            reason,
            evidence: None,
        };
        let stored = self.stored(&caller.tenant, id).await?;
        self.undo(&operation, stored, note).await
    }

    async fn decidable(&self, caller: &Caller, id: &OperationId, version: i32) -> Result<Operation, NotResolved> {
        let operation = self
            .operation(&caller.tenant, id)
            .await
            .map_err(NotResolved::Refused)?
            .ok_or(NotResolved::NotFound)?;
        if !caller.covers(&operation.kind) {
            return Err(NotResolved::NotCovered);
        }
        if operation.version != version {
            return Err(changed(&operation));
        }
        Ok(operation)
    }

    /// Whether it succeeded before its reversal was refused. Then its receipt is out in the world: no attempt may be made
    /// again, and none may be said not to have acted.
    async fn has_succeeded(&self, operation: &Operation) -> Result<bool, NotResolved> {
        let (tenant, id) = (&operation.tenant, &operation.id);
        let mut session = self.pool.reader(super::LIMITS).await?;
        let history = read::history(&mut session, tenant, id, operation.version).await?;
        session.finish().await?;
        Ok(history
            .iter()
            .any(|change| change.state == StateName::Succeeded.as_str()))
    }

    async fn end(
        &self,
        operation: &Operation,
        state: StateName,
        receipt: &Receipt,
        external_reference: Option<&str>,
        note: Note<'_>,
    ) -> Result<bool, Error> {
        let ending = Ending {
            state,
            receipt,
            retention: self.retention_of(&operation.kind),
            external_reference,
        };
        let (tenant, id, seen) = (&operation.tenant, &operation.id, seen(operation));
        let settled = self
            .write(async |session| reconciliation::settle(session, tenant, id, seen, ending, note).await)
            .await?;
        Ok(settled.is_some())
    }

    /// A new attempt, once the last one cannot be on its way any more.
    async fn allow(
        self: &Arc<Self>,
        operation: &Operation,
        stored: Option<&Stored>,
        note: Note<'_>,
    ) -> Result<bool, NotResolved> {
        let known = || Known::of(operation);
        let Some(stored) = stored else {
            let cause = "its request is not stored".to_owned();
            return Err(NotResolved::NoReversal { known: known(), cause });
        };
        let longest = self
            .declared(stored)
            .map_or(UNDECLARED_IN_FLIGHT, |(_, route)| route.max_in_flight);
        // A send may have begun a little after its claim.
        let over = longest.saturating_add(SEND_WITHIN);
        let wait = over.saturating_sub(stored.since_last_send.unwrap_or(over));
        if !wait.is_zero() {
            return Err(NotResolved::TooEarly { known: known(), wait });
        }
        let (tenant, id, seen) = (&operation.tenant, &operation.id, seen(operation));
        let changed = self
            .write(async |session| reconciliation::not_executed(session, tenant, id, seen, Duration::ZERO, note).await)
            .await?;
        if changed {
            self.take_up_later(tenant, id);
        }
        Ok(changed)
    }

    async fn undo(
        self: &Arc<Self>,
        operation: &Operation,
        stored: Option<Stored>,
        note: Note<'_>,
    ) -> Result<(), NotResolved> {
        let no_reversal = |cause: &str| NotResolved::NoReversal {
            known: Known::of(operation),
            cause: cause.to_owned(),
        };
        let stored = stored.ok_or_else(|| no_reversal("its request is not stored"))?;
        let (downstream, route) = self
            .declared(&stored)
            .ok_or_else(|| no_reversal("its downstream is not configured"))?;
        let call = route
            .compensation
            .as_ref()
            .ok_or_else(|| no_reversal("its route declares no compensation"))?;
        let id = match self.reversal_name(operation).await? {
            compensation::Name::Free(id) => id,
            compensation::Name::Exists(id) => {
                return Err(no_reversal(&format!(
                    "its reversal exists already: {id}; decide about that one"
                )));
            }
        };
        let reversal = self
            .reversal(id, operation, &stored, &downstream, call, note.actor)
            .map_err(|cause| no_reversal(&cause))?;
        let path = reversal
            .request
            .path_and_query
            .strip_prefix(&downstream.base.path)
            .unwrap_or_default();
        let method = http::Method::from_bytes(reversal.request.method.as_bytes()).unwrap_or_default();
        let its_route = downstream
            .route(&method, path.split('?').next().unwrap_or_default())
            .clone();
        let ready = self.outbound.connect(&downstream).await.map_err(|not_sent| {
            NotResolved::Refused(Refusal::Unreachable {
                downstream: downstream.name.clone(),
                cause: not_sent.to_string(),
            })
        })?;
        let fence = Fence {
            attempt: 1,
            instance: self.instance,
        };
        let undoing = Undoing {
            operation: operation.clone(),
            seen: seen(operation),
            attempt: Attempt {
                perform: self.clone(),
                forward: Arc::new(reversal),
                downstream,
                route: its_route,
                fence,
                claimed: Instant::now(),
                age: Duration::ZERO,
                since_first_send: Duration::ZERO,
                repeated: false,
                alone: false,
                earlier_attempts: 0,
            },
            event: note.event.to_owned(),
            actor: note.actor.to_owned(),
            reason: note.reason.to_owned(),
            evidence: note.evidence.map(str::to_owned),
        };
        let (told, begun) = oneshot::channel();
        self.tasks.spawn(undoing.run(ready, told));
        match begun.await {
            Ok(Ok(Begun::Claimed)) => Ok(()),
            Ok(Ok(Begun::Taken)) => Err(no_reversal(
                "the id of its reversal was taken in this moment; read the operation, and decide again if it is unchanged",
            )),
            Ok(Ok(Begun::Changed)) => Err(changed(operation)),
            Ok(Err(error)) => Err(error.into()),
            // Only stopping ends it early.
            Err(_) => Err(NotResolved::Refused(Refusal::Stopping)),
        }
    }

    async fn reversal_name(&self, operation: &Operation) -> Result<compensation::Name, Error> {
        let mut session = self.pool.reader(super::LIMITS).await?;
        let name = compensation::name(&mut session, &operation.tenant, &operation.id).await?;
        session.finish().await?;
        Ok(name)
    }

    /// The declared reversal, filled from the operation's answer.
    fn reversal(
        &self,
        id: OperationId,
        operation: &Operation,
        stored: &Stored,
        downstream: &Downstream,
        call: &Call,
        actor: &str,
    ) -> Result<Forward, String> {
        let answer = operation
            .state
            .settlement()
            .and_then(|settlement| match &settlement.answer {
                Answer::Kept(receipt) => serde_json::from_slice(&receipt.body).ok(),
                Answer::Expired => None,
            });
        let answer: serde_json::Value = answer.unwrap_or_default();
        let key = forward::downstream_key(&operation.tenant, &id);
        let values = Values {
            operation_id: operation.id.as_str(),
            key: &key,
            payload: &answer,
        };
        let request = call_request(downstream, call, &values)?;
        let target = format!("{} {}{}", request.method, downstream.name, request.path_and_query);
        Ok(Forward {
            tenant: operation.tenant.clone(),
            kind: format!("{PROXY_KINDS}{}", downstream.name).into(),
            fingerprint: fingerprint(downstream, &request),
            downstream: downstream.name.clone(),
            target,
            payload: serde_json::json!({
                "method": request.method, "path": request.path_and_query, "compensates": operation.id.as_str(),
            })
            .to_string()
            .into(),
            request,
            run: None,
            external_reference: None,
            requested_by: actor.strip_prefix("key:").unwrap_or(actor).into(),
            trace_parent: stored.trace_parent.clone(),
            retention: self.retention(),
            id,
        })
    }

    /// What a stored operation's downstream declares today.
    pub(super) fn declared(&self, stored: &Stored) -> Option<(Arc<Downstream>, Arc<Route>)> {
        let downstream = self.downstreams().get(&stored.downstream)?.clone();
        let below = stored.request.path_and_query.strip_prefix(&downstream.base.path)?;
        let path = below.split('?').next().unwrap_or_default();
        let method = http::Method::from_bytes(stored.request.method.as_bytes()).ok()?;
        let route = downstream.route(&method, path).clone();
        Some((downstream, route))
    }

    async fn changed_meanwhile(&self, caller: &Caller, id: &OperationId) -> NotResolved {
        match self.operation(&caller.tenant, id).await {
            Ok(Some(operation)) => changed(&operation),
            Ok(None) => NotResolved::NotFound,
            Err(refusal) => NotResolved::Refused(refusal),
        }
    }
}

/// How long a request to a downstream that is not configured any more may be on its way.
const UNDECLARED_IN_FLIGHT: Duration = Duration::from_secs(600);

/// A declared call as it is stored and sent.
pub fn call_request(downstream: &Downstream, call: &Call, values: &Values<'_>) -> Result<forward::Request, String> {
    let request = call
        .request(&downstream.base, values)
        .map_err(|unfit| unfit.to_string())?;
    Ok(forward::Request {
        method: request.method.as_str().to_owned(),
        path_and_query: request.path_and_query.as_str().to_owned(),
        headers: headers::lines(&request.headers),
        body: request.body,
        downstream_key: values.key.to_owned(),
    })
}

fn fingerprint(downstream: &Downstream, request: &forward::Request) -> Fingerprint {
    let content_type = request.headers.iter().find(|(name, _)| name == "content-type");
    Fingerprint::proxy(&ProxyRequest {
        downstream: &downstream.name,
        method: &request.method,
        path_and_query: &request.path_and_query,
        content_type: content_type.map(|(_, value)| value.as_str()),
        body: Body::Raw(&request.body),
        headers: &[],
    })
}

fn described(operation: &Operation) -> receipt::Unanswered<'_> {
    receipt::Unanswered {
        id: &operation.id,
        kind: &operation.kind,
        fingerprint: &operation.fingerprint,
        attempt: operation.attempt,
    }
}

fn seen(operation: &Operation) -> Seen {
    Seen {
        state: operation.state.name(),
        version: operation.version,
    }
}

fn changed(operation: &Operation) -> NotResolved {
    NotResolved::Changed {
        known: Known::of(operation),
        version: operation.version,
    }
}

fn evidence(verdict: &Verdict, given: Option<&str>) -> String {
    let given = given.and_then(|text| serde_json::from_str::<serde_json::Value>(text).ok());
    serde_json::json!({ "verdict": verdict.as_str(), "evidence": given }).to_string()
}
