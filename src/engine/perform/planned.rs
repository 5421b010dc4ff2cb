//! Plans of what a downstream performs: stored with the request that they will be sent as, and sent when they are told to.
//!
//! What is stored is what is sent, whatever the configuration says by then. Nothing is claimed before there is a connection,
//! as ever: a plan whose downstream is away stays a plan.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::Instant;

use super::attempt::{Attempt, Reply};
use super::recover::Case;
use super::{Delivered, Perform, not_reached};
use crate::engine::intake::refusal;
use crate::engine::outcome::{Known, Outcome, Refusal};
use crate::ledger::forward::{self, Forward};
use crate::ledger::operation::{Operation, StateName};
use crate::ledger::plan::{self, Fence};
use crate::outbound::downstream::Route;
use crate::outbound::send::Ready;
use crate::postgres::error::{Error, Trouble};

/// A plan as it was found, with what its downstream declares today.
pub struct Planned {
    case: Case,
    actor: String,
}

impl Planned {
    /// What its downstream declares today.
    pub fn declared(&self) -> &Route {
        &self.case.route
    }
}

impl Perform {
    /// Stores it and sends nothing; an id that is known already says what is there.
    pub async fn plan(&self, forward: &Forward) -> Result<Outcome, Refusal> {
        let (tenant, id, fingerprint) = (&forward.tenant, &forward.id, &forward.fingerprint);
        if let Some(replay) = self.replays.find(tenant, id, fingerprint) {
            return Ok(replay);
        }
        match self.write(async |session| forward::plan(session, forward).await).await {
            Ok(true) => {
                return Ok(Outcome::Accepted {
                    operation: Known::forwarded(forward, Some(StateName::Planned)),
                    repeated: false,
                });
            }
            Ok(false) => {}
            // The only lock this insert can wait for is a rival's claim of the same id.
            Err(error) if error.trouble() == Trouble::LockTimeout => {
                let operation = Known::forwarded(forward, None);
                return Ok(Outcome::InProgress { operation });
            }
            Err(error) => return Err(refusal(&error)),
        }
        let found = self.operation(tenant, id).await?;
        // Gone again between the two statements: its claim was withdrawn, or its tombstone forgotten.
        found
            .map(|operation| Outcome::of(&operation, fingerprint))
            .ok_or(Refusal::Unavailable)
    }

    /// The plan that an operation is; `None` if it is one no more.
    pub async fn planned(&self, operation: &Operation, actor: String) -> Result<Option<Planned>, Refusal> {
        let stored = self.stored(&operation.tenant, &operation.id).await;
        let stored = stored.map_err(|error| refusal(&error))?;
        let Some(stored) = stored.filter(|stored| stored.state == StateName::Planned) else {
            return Ok(None);
        };
        let downstream = stored.downstream.as_str().into();
        let case = self.case(stored).ok_or_else(|| Refusal::Unreachable {
            downstream,
            cause: "it is not configured here any more".to_owned(),
        })?;
        Ok(Some(Planned { case, actor }))
    }

    /// Sends a plan once, or says what has become of it.
    pub async fn execute(self: &Arc<Self>, planned: Planned, respond_async: bool) -> Result<Delivered, Refusal> {
        let downstream = planned.case.downstream.clone();
        let ready = self.outbound.connect(&downstream).await;
        let ready = ready.map_err(|not_sent| not_reached(&downstream.name, not_sent))?;
        let (reply, answered) = oneshot::channel();
        let perform = self.clone();
        self.tasks.spawn(async move {
            perform.claim_and_execute(planned, ready, reply, respond_async).await;
        });
        // The sender is dropped unused only when the task ends early, which only stopping does.
        answered.await.unwrap_or(Err(Refusal::Stopping))
    }

    async fn claim_and_execute(self: Arc<Self>, planned: Planned, ready: Ready, reply: Reply, respond_async: bool) {
        let Planned { case, actor } = planned;
        let fence = Fence {
            attempt: case.stored.attempt + 1,
            instance: self.instance,
        };
        let asked = Instant::now();
        match self.claim_plan(&case, fence, &actor).await {
            Ok(true) => {}
            Ok(false) => {
                ready.give_back();
                return drop(reply.send(self.told(&case.forward).await));
            }
            Err(error) => {
                drop(reply.send(Err(refusal(&error))));
                self.unsent(&case, fence, false).await;
                // If the claim stood, it waits for its next attempt now.
                return self.wake_after(&case.forward, case.route.retry.first_delay);
            }
        }
        let attempt = Attempt {
            // It begins now, however long it was planned.
            age: Duration::ZERO,
            since_first_send: Duration::ZERO,
            ..case.attempt(&self, fence, asked, false)
        };
        if !respond_async {
            return attempt.run(ready, Some(reply)).await;
        }
        let accepted = Outcome::Accepted {
            operation: Known::forwarded(&attempt.forward, Some(StateName::Running)),
            repeated: false,
        };
        drop(reply.send(Ok(Delivered::First(accepted))));
        attempt.run(ready, None).await;
    }

    /// False if it is not as it was seen.
    async fn claim_plan(&self, case: &Case, fence: Fence, actor: &str) -> Result<bool, Error> {
        let (tenant, id, seen) = (&case.forward.tenant, &case.forward.id, case.stored.seen());
        let claimed = self
            .write(async |session| plan::claim(session, tenant, id, seen, fence.instance, actor).await)
            .await?;
        Ok(claimed.is_some())
    }

    async fn told(&self, forward: &Forward) -> Result<Delivered, Refusal> {
        let found = self.operation(&forward.tenant, &forward.id).await?;
        let operation = found.ok_or(Refusal::Unavailable)?;
        Ok(Delivered::Known(Outcome::of(&operation, &forward.fingerprint)))
    }
}
