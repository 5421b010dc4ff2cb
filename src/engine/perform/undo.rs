//! A reversal: claimed together with the operation that it undoes, and then sent; and what its end makes of the operation.
//!
//! It begins on a task of its own. Neither a caller that hangs up nor a commit in doubt may leave a reversal behind that is claimed
//! and that nobody sends: the operation would be "being undone" for ever.

use std::sync::Arc;
use std::time::Duration;

use tokio::sync::oneshot;

use super::attempt::Attempt;
use super::{LIMITS, Perform};
use crate::ledger::compensation::{self, Ended};
use crate::ledger::forward::{self, Forward};
use crate::ledger::operation::{Operation, StateName};
use crate::ledger::plan::{self, Seen};
use crate::ledger::receipt::{self, Receipt};
use crate::ledger::reconciliation::{self, Ending, Note};
use crate::ledger::tenant::Tenant;
use crate::outbound::send::Ready;
use crate::postgres::error::Error;

/// What came of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Begun {
    /// It is claimed, and its operation is being undone.
    Claimed,
    /// Somebody else was quicker with this id.
    Taken,
    /// The operation is not as it was seen.
    Changed,
}

pub struct Undoing {
    pub operation: Operation,
    pub seen: Seen,
    /// The reversal's first.
    pub attempt: Attempt,
    pub event: String,
    pub actor: String,
    pub reason: String,
    pub evidence: Option<String>,
}

impl Undoing {
    /// Tells what came of the claim, and sends if there is one.
    pub async fn run(self, ready: Ready, told: oneshot::Sender<Result<Begun, Error>>) {
        let perform = self.attempt.perform.clone();
        let reversal = self.attempt.forward.clone();
        let Some(place) = perform.claiming.enter(&reversal.tenant, &reversal.id) else {
            return drop(told.send(Ok(Begun::Taken)));
        };
        let claimed = match self.begin(&perform, &reversal).await {
            Ok(begun) => {
                drop(told.send(Ok(begun)));
                begun == Begun::Claimed
            }
            Err(error) => {
                drop(told.send(Err(error)));
                self.stands(&perform, &reversal).await
            }
        };
        drop(place);
        if claimed {
            self.attempt.run(ready, None).await;
        }
    }

    async fn begin(&self, perform: &Perform, reversal: &Forward) -> Result<Begun, Error> {
        let note = Note {
            event: &self.event,
            actor: &self.actor,
            reason: &self.reason,
            evidence: self.evidence.as_deref(),
        };
        let (tenant, instance) = (&reversal.tenant, perform.instance);
        perform
            .write(async |session| {
                let claimed = forward::claim_all(session, tenant, instance, LIMITS.lock, &[reversal]).await?;
                if claimed.is_empty() {
                    return Ok(Begun::Taken);
                }
                let parent = &self.operation.id;
                if !compensation::begin(session, parent, self.seen, reversal, note).await? {
                    forward::withdraw(session, tenant, &reversal.id, self.attempt.fence).await?;
                    return Ok(Begun::Changed);
                }
                Ok(Begun::Claimed)
            })
            .await
    }

    /// Whether a claim stands whose commit was not confirmed; asked until the database says so.
    async fn stands(&self, perform: &Arc<Perform>, reversal: &Forward) -> bool {
        let (tenant, fence) = (&reversal.tenant, self.attempt.fence);
        let mut delay = Duration::from_millis(100);
        loop {
            tokio::time::sleep(delay).await;
            delay = (delay * 2).min(Duration::from_secs(10));
            let stands = perform
                .write(async |session| {
                    // The lost commit has changed this row as well: whoever locks it waits until that has ended.
                    plan::hold(session, tenant, &self.operation.id, fence).await?;
                    plan::hold(session, tenant, &reversal.id, fence).await
                })
                .await;
            match stands {
                Ok(stands) => return stands,
                Err(error) => {
                    tracing::warn!(operation.id = %reversal.id, error = %error, "cannot tell yet whether the reversal has begun");
                }
            }
        }
    }
}

impl Perform {
    /// Tells operations that are being undone what became of their reversals: `compensated` if it succeeded, unknown again,
    /// for people, if it was refused.
    pub async fn follow_compensations(&self, tenant: &Tenant) -> Result<(), Error> {
        let mut session = self.pool.reader(LIMITS).await?;
        let ended = compensation::ended(&mut session, tenant).await?;
        session.finish().await?;
        for one in ended {
            let state = if one.is_undone {
                StateName::Compensated
            } else {
                StateName::NeedsReconciliation
            };
            if self.conclude(tenant, &one, state).await? {
                tracing::info!(operation.id = %one.id, state = state.as_str(), "a compensation has ended");
            }
        }
        Ok(())
    }

    async fn conclude(&self, tenant: &Tenant, ended: &Ended, state: StateName) -> Result<bool, Error> {
        let (event, reason) = match (ended.is_undone, ended.had_succeeded) {
            (true, _) => ("compensated", "its reversal succeeded"),
            (false, true) => (
                "compensation_failed",
                "its reversal was refused: the effect stands, unless a person finds otherwise",
            ),
            (false, false) => (
                "compensation_failed",
                "its reversal was refused: whether there was an effect is as unknown as before",
            ),
        };
        let actor = self.actor();
        let evidence = serde_json::json!({ "reversal": ended.reversal }).to_string();
        let note = Note {
            event,
            actor: &actor,
            reason,
            evidence: Some(&evidence),
        };
        if ended.had_succeeded || !ended.is_undone {
            return self
                .write(async |session| compensation::end(session, tenant, ended, state, note).await)
                .await;
        }
        // From now on there is no effect, whatever there was before, and callers may be told so.
        let receipt = Receipt::gave_up(
            receipt::Unanswered {
                id: &ended.id,
                kind: &ended.kind,
                fingerprint: &ended.fingerprint,
                attempt: ended.attempt,
            },
            "its outcome was unknown, and it has been undone",
        );
        let ending = Ending {
            state,
            receipt: &receipt,
            retention: self.retention_of(&ended.kind),
            external_reference: None,
        };
        let seen = Seen {
            state: StateName::Compensating,
            version: ended.version,
        };
        let settled = self
            .write(async |session| reconciliation::settle(session, tenant, &ended.id, seen, ending, note).await)
            .await?;
        Ok(settled.is_some())
    }
}
