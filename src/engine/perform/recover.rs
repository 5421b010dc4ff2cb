//! Going on with what an attempt left behind: due retries, unknowns that the downstream can settle, claims of processes
//! that are gone.
//!
//! Any process may do any of it at any time: each step is guarded by the state and version it has seen.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;

use super::attempt::{Attempt, SEND_WITHIN, jitter};
use super::decide::{self, Standing};
use super::proof::{Found, Object};
use super::{Perform, Tenant};
use crate::ledger::forward::{self, Forward, Stored};
use crate::ledger::operation::StateName;
use crate::ledger::operation_id::OperationId;
use crate::ledger::plan::{self, Fence, Seen};
use crate::ledger::receipt::{self, Receipt};
use crate::ledger::reconciliation::{self, Ending, Note};
use crate::outbound::downstream::{Ability, Downstream, Probe, Route};
use crate::postgres::error::Error;

/// Longest pause between two look-ups that brought nothing.
const LONGEST_PAUSE: Duration = Duration::from_secs(600);

/// A stored operation with what its downstream declares today.
pub struct Case {
    pub stored: Stored,
    pub forward: Arc<Forward>,
    pub downstream: Arc<Downstream>,
    pub route: Arc<Route>,
    read: Instant,
}

impl Perform {
    /// Takes an operation up again after this delay, if this process still lives; if not, a sweep does.
    pub(super) fn wake_after(self: &Arc<Self>, forward: &Forward, delay: Duration) {
        let (perform, tenant, id) = (self.clone(), forward.tenant.clone(), forward.id.clone());
        self.tasks.spawn(async move {
            tokio::select! {
                () = tokio::time::sleep(delay) => perform.take_up_later(&tenant, &id),
                // It has begun nothing yet, and another process will.
                () = perform.stop.cancelled() => {}
            }
        });
    }

    /// The same at once, on a task of its own; never twice at a time in this process.
    pub fn take_up_later(self: &Arc<Self>, tenant: &Tenant, id: &OperationId) {
        let (perform, tenant, id) = (self.clone(), tenant.clone(), id.clone());
        self.tasks.spawn(async move {
            if let Err(error) = perform.take_up(&tenant, &id).await {
                tracing::warn!(operation.id = %id, error = %error, "the next sweep will take this operation up");
            }
        });
    }

    /// Takes up an operation that is due, whatever it is due for. Says whether there was something to do.
    async fn take_up(self: &Arc<Self>, tenant: &Tenant, id: &OperationId) -> Result<bool, Error> {
        let Some(_place) = self.taking_up.enter(tenant, id) else {
            return Ok(false);
        };
        let Some(stored) = self.stored(tenant, id).await? else {
            return Ok(false);
        };
        let state = stored.state;
        let seen = stored.seen();
        let Some(case) = self.case(stored) else {
            if state == StateName::NeedsReconciliation {
                let reason = "its downstream is not configured here any more";
                self.learn(tenant, id, seen, None, "left_to_people", reason, None)
                    .await?;
            }
            return Ok(false);
        };
        match state {
            StateName::RetryWait => self.retry(case).await,
            StateName::NeedsReconciliation => self.reconcile(case).await,
            StateName::Planned
            | StateName::WaitingApproval
            | StateName::Rejected
            | StateName::Cancelled
            | StateName::Running
            | StateName::Succeeded
            | StateName::Failed
            | StateName::Compensating
            | StateName::Compensated => Ok(false),
        }
    }

    /// Takes the claim of a lapsed instance away: its request may have left.
    pub async fn lapsed(self: &Arc<Self>, tenant: &Tenant, id: &OperationId, version: i32) -> Result<bool, Error> {
        let due = self
            .stored(tenant, id)
            .await?
            .and_then(|stored| self.case(stored))
            .map(|case| {
                let due = decide::recovery(&case.route, case.standing(), jitter());
                (case.forward, due)
            });
        let actor = self.actor();
        let note = Note {
            event: "claim_lapsed",
            actor: &actor,
            reason: "the process that held the claim stopped; its request may have been sent",
            evidence: None,
        };
        let after = due.as_ref().and_then(|(_, due)| *due);
        let lapsed = self
            .write(async |session| reconciliation::lapse(session, tenant, id, version, after, note).await)
            .await?;
        if let (true, Some((forward, Some(after)))) = (lapsed, due) {
            self.wake_after(&forward, after);
        }
        Ok(lapsed)
    }

    pub(super) async fn stored(&self, tenant: &Tenant, id: &OperationId) -> Result<Option<Stored>, Error> {
        let mut session = self.pool.reader(super::LIMITS).await?;
        let stored = forward::stored(&mut session, tenant, id).await?;
        session.finish().await?;
        Ok(stored)
    }

    /// `None` if its downstream is not configured, or is elsewhere now.
    pub(super) fn case(&self, stored: Stored) -> Option<Case> {
        let (downstream, route) = self.declared(&stored)?;
        let forward = Arc::new(stored.forward(self.retention_of(&stored.kind)));
        Some(Case {
            stored,
            forward,
            downstream,
            route,
            read: Instant::now(),
        })
    }

    /// Another attempt at what is known not to have acted.
    async fn retry(self: &Arc<Self>, case: Case) -> Result<bool, Error> {
        let (tenant, id) = (&case.forward.tenant, &case.forward.id);
        let standing = case.standing();
        if standing.attempt >= case.route.retry.max_attempts || standing.age > case.route.retry.deadline {
            let cause = format!("no attempt of {} is left", case.route.retry.max_attempts);
            return self
                .fail(&case.forward, case.stored.seen(), case.stored.attempt, &cause)
                .await;
        }
        let ready = match self.outbound.connect(&case.downstream).await {
            Ok(ready) => ready,
            Err(not_sent) => {
                tracing::info!(operation.id = %id, error = %not_sent, "the downstream is not reached; trying later");
                self.wake_after(&case.forward, case.pause());
                return Ok(false);
            }
        };
        let seen = case.stored.seen();
        let actor = self.actor();
        let instance = self.instance;
        let fence = Fence {
            attempt: case.stored.attempt + 1,
            instance,
        };
        let asked = Instant::now();
        let claimed = self
            .write(async |session| plan::claim(session, tenant, id, seen, instance, &actor).await)
            .await;
        match claimed {
            Ok(Some(_)) => {
                case.attempt(self, fence, asked, false).run(ready, None).await;
                Ok(true)
            }
            Ok(None) => Ok(false),
            Err(error) => {
                self.unsent(&case, fence, false).await;
                Err(error)
            }
        }
    }

    /// What a downstream's ability makes of an unknown.
    async fn reconcile(self: &Arc<Self>, case: Case) -> Result<bool, Error> {
        match &case.route.ability {
            Ability::Key { .. } | Ability::Conditional { .. } => {
                match decide::recovery(&case.route, case.standing(), 0.0) {
                    Some(_) => self.send_again(case).await,
                    None => {
                        let reason = match &case.route.ability {
                            Ability::Key { .. } if case.standing().attempt < case.route.retry.max_attempts => {
                                "the downstream may have forgotten the key by now; sending again could act twice"
                            }
                            _ => "no attempt is left",
                        };
                        self.leave_to_people(&case, reason).await
                    }
                }
            }
            Ability::Lookup {
                probe,
                settle_delay,
                interval,
            } => {
                let (probe, settle_delay, interval) = (probe.clone(), *settle_delay, *interval);
                self.look_up(case, &probe, settle_delay, interval).await
            }
            Ability::None => self.leave_to_people(&case, "the downstream cannot be asked").await,
        }
    }

    async fn send_again(self: &Arc<Self>, case: Case) -> Result<bool, Error> {
        let (tenant, id) = (&case.forward.tenant, &case.forward.id);
        let ready = match self.outbound.connect(&case.downstream).await {
            Ok(ready) => ready,
            Err(not_sent) => {
                tracing::info!(operation.id = %id, error = %not_sent, "the downstream is not reached; trying later");
                self.wake_after(&case.forward, case.pause());
                return Ok(false);
            }
        };
        let (seen, actor, instance) = (case.stored.seen(), self.actor(), self.instance);
        let note = Note {
            event: "sent_again",
            actor: &actor,
            reason: "the downstream declares that it acts once on this request however often it is sent",
            evidence: None,
        };
        let asked = Instant::now();
        let claimed = self
            .write(async |session| reconciliation::resend(session, tenant, id, seen, instance, note).await)
            .await;
        match claimed {
            Ok(Some(fence)) => {
                case.attempt(self, fence, asked, true).run(ready, None).await;
                Ok(true)
            }
            Ok(None) => Ok(false),
            Err(error) => {
                let fence = Fence {
                    attempt: case.stored.attempt + 1,
                    instance,
                };
                self.unsent(&case, fence, true).await;
                Err(error)
            }
        }
    }

    async fn look_up(
        self: &Arc<Self>,
        case: Case,
        probe: &Probe,
        settle_delay: Duration,
        interval: Duration,
    ) -> Result<bool, Error> {
        let (tenant, id, seen) = (&case.forward.tenant, &case.forward.id, case.stored.seen());
        // Judged by when the question is asked, not by when the answer comes.
        let since = case.since_last_send();
        // A send may have begun a little after its claim.
        let over = since >= case.route.max_in_flight.saturating_add(settle_delay.max(SEND_WITHIN));
        match self.ask(&case.forward, &case.downstream, probe).await {
            Ok(Found::Ours(object)) => self.prove(&case, object).await,
            Ok(Found::Foreign) => {
                let reason = "the look-up shows something that is not this operation's";
                self.learn(tenant, id, seen, None, "looked_up", reason, None).await
            }
            Ok(Found::Nothing) if over => {
                let actor = self.actor();
                let note = Note {
                    event: "looked_up",
                    actor: &actor,
                    reason: "nothing is there although no request can be on its way any more: it did not act",
                    evidence: None,
                };
                let changed = self
                    .write(async |session| {
                        reconciliation::not_executed(session, tenant, id, seen, Duration::ZERO, note).await
                    })
                    .await?;
                if changed {
                    self.wake_after(&case.forward, Duration::ZERO);
                }
                Ok(changed)
            }
            Ok(Found::Nothing) => {
                let reason = "nothing is there yet, which proves nothing while a request may be on its way";
                let changed = self
                    .learn(tenant, id, seen, Some(interval), "looked_up", reason, None)
                    .await?;
                self.wake_after(&case.forward, interval);
                Ok(changed)
            }
            Err(trouble) => {
                let pause = case.pause().max(interval);
                let changed = self
                    .learn(tenant, id, seen, Some(pause), "look_up_failed", &trouble, None)
                    .await?;
                self.wake_after(&case.forward, pause);
                Ok(changed)
            }
        }
    }

    /// The downstream has shown that it acted: that stands for the answer that was lost.
    async fn prove(self: &Arc<Self>, case: &Case, object: Object) -> Result<bool, Error> {
        let receipt = Receipt::new(object.status, object.lines, object.body);
        let actor = self.actor();
        let note = Note {
            event: "succeeded",
            actor: &actor,
            reason: "the downstream shows that it acted",
            evidence: Some(r#"{"proof":"look_up"}"#),
        };
        let ending = Ending {
            state: StateName::Succeeded,
            receipt: &receipt,
            retention: case.forward.retention,
            external_reference: None,
        };
        let (tenant, id, seen) = (&case.forward.tenant, &case.forward.id, case.stored.seen());
        let settled = self
            .write(async |session| reconciliation::settle(session, tenant, id, seen, ending, note).await)
            .await?;
        if settled.is_some() {
            self.metrics.committed_effect();
        }
        Ok(settled.is_some())
    }

    async fn leave_to_people(&self, case: &Case, reason: &str) -> Result<bool, Error> {
        let (tenant, id, seen) = (&case.forward.tenant, &case.forward.id, case.stored.seen());
        self.learn(tenant, id, seen, None, "left_to_people", reason, None).await
    }

    #[expect(clippy::too_many_arguments, reason = "one history row")]
    async fn learn(
        &self,
        tenant: &Tenant,
        id: &OperationId,
        seen: Seen,
        due: Option<Duration>,
        event: &str,
        reason: &str,
        evidence: Option<&str>,
    ) -> Result<bool, Error> {
        let actor = self.actor();
        let note = Note {
            event,
            actor: &actor,
            reason,
            evidence,
        };
        self.write(async |session| reconciliation::learn(session, tenant, id, seen, due, note).await)
            .await
    }

    /// A running attempt that is known not to have acted, and after which none is left.
    pub(super) async fn give_up(&self, forward: &Forward, fence: Fence, cause: &str) -> Result<bool, Error> {
        let (tenant, id) = (&forward.tenant, &forward.id);
        let Some(stored) = self.stored(tenant, id).await? else {
            return Ok(false);
        };
        if stored.state != StateName::Running || stored.attempt != fence.attempt {
            return Ok(false);
        }
        let reason = format!("{cause}; no attempt is left");
        // Running operations are claimed; nobody but the claimer, and a sweep after its lapse, changes them.
        let version = stored.version;
        self.write(async |session| {
            if !plan::wait(session, tenant, id, fence, Duration::ZERO, &reason, None).await? {
                return Ok(false);
            }
            let seen = Seen {
                state: StateName::RetryWait,
                version: version + 1,
            };
            settle_failed(session, forward, seen, fence.attempt, cause, &self.actor()).await
        })
        .await
    }

    async fn fail(&self, forward: &Forward, seen: Seen, attempt: i32, cause: &str) -> Result<bool, Error> {
        let actor = self.actor();
        self.write(async |session| settle_failed(session, forward, seen, attempt, cause, &actor).await)
            .await
    }

    /// A claim whose commit was not confirmed, and with which nothing was sent: given back until the database has it.
    pub(super) async fn unsent(&self, case: &Case, fence: Fence, repeated: bool) {
        let (tenant, id) = (&case.forward.tenant, &case.forward.id);
        let actor = self.actor();
        let reason = "the claim's commit was not confirmed; nothing was sent";
        let mut delay = Duration::from_millis(100);
        loop {
            tokio::time::sleep(delay).await;
            delay = (delay * 2).min(Duration::from_secs(10));
            let given_back = self
                .write(async |session| {
                    // Waits for the claim's own commit, if that is still under way.
                    if !plan::hold(session, tenant, id, fence).await? {
                        return Ok(());
                    }
                    if repeated {
                        let note = Note {
                            event: "outcome_unknown",
                            actor: &actor,
                            reason,
                            evidence: None,
                        };
                        let due = Some(Duration::from_secs(1));
                        reconciliation::unknown(session, tenant, id, fence, due, note).await?;
                    } else {
                        plan::wait(session, tenant, id, fence, Duration::from_secs(1), reason, None).await?;
                    }
                    Ok(())
                })
                .await;
            match given_back {
                Ok(()) => return,
                Err(error) => {
                    tracing::warn!(operation.id = %id, error = %error, "cannot give an unconfirmed claim back yet");
                }
            }
        }
    }
}

async fn settle_failed(
    session: &mut crate::postgres::session::Session,
    forward: &Forward,
    seen: Seen,
    attempt: i32,
    cause: &str,
    actor: &str,
) -> Result<bool, Error> {
    let receipt = Receipt::gave_up(
        receipt::Unanswered {
            id: &forward.id,
            kind: &forward.kind,
            fingerprint: &forward.fingerprint,
            attempt,
        },
        &format!("the operation did not act, and no attempt is left: {cause}"),
    );
    let ending = Ending {
        state: StateName::Failed,
        receipt: &receipt,
        retention: forward.retention,
        external_reference: None,
    };
    let note = Note {
        event: "failed",
        actor,
        reason: cause,
        evidence: None,
    };
    let settled = reconciliation::settle(session, &forward.tenant, &forward.id, seen, ending, note).await?;
    Ok(settled.is_some())
}

impl Case {
    fn standing(&self) -> Standing {
        let passed = self.read.elapsed();
        Standing {
            attempt: (self.stored.attempt - self.stored.earlier_attempts).unsigned_abs(),
            age: self.stored.age + passed,
            since_first_send: self.stored.since_first_send.unwrap_or_default() + passed,
            repeated: false,
        }
    }

    fn since_last_send(&self) -> Duration {
        self.stored.since_last_send.unwrap_or_default() + self.read.elapsed()
    }

    /// The longer nothing has changed, the longer the next pause.
    fn pause(&self) -> Duration {
        (self.since_last_send() / 4).clamp(
            self.route.retry.first_delay.max(Duration::from_millis(200)),
            LONGEST_PAUSE,
        )
    }

    pub fn attempt(self, perform: &Arc<Perform>, fence: Fence, asked: Instant, repeated: bool) -> Attempt {
        let passed = asked - self.read;
        Attempt {
            perform: perform.clone(),
            age: self.stored.age + passed,
            since_first_send: self.stored.since_first_send.unwrap_or_default() + passed,
            forward: self.forward,
            downstream: self.downstream,
            route: self.route,
            fence,
            claimed: asked,
            repeated,
            alone: false,
            earlier_attempts: self.stored.earlier_attempts,
        }
    }
}
