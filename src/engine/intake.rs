//! The front door: what callers may do with operations. Every way in, first or again, ends in one [`Outcome`].

use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use tokio::time::Instant;
use tokio_util::task::TaskTracker;
use uuid::Uuid;

use super::apply::{Apply, Work};
use super::deliveries::Deliveries;
use super::outcome::{Known, Outcome, Refusal};
use super::replays::Replays;
use crate::ledger::canonical;
use crate::ledger::fingerprint::Fingerprint;
use crate::ledger::key::Caller;
use crate::ledger::kind::{Kind, Kinds};
use crate::ledger::operation::{Operation, State, StateName};
use crate::ledger::operation_id::OperationId;
use crate::ledger::plan::{self, Beginning, Seen, Stored};
use crate::ledger::receipt::{self, Receipt};
use crate::ledger::submission::{MAX_DEPTH, Mode, Submission};
use crate::ledger::tenant::Tenant;
use crate::ledger::{read, retention, settlement};
use crate::outbound::registry::DownstreamKinds;
use crate::postgres::error::{Error as DatabaseError, Trouble};
use crate::postgres::pool::Pool;
use crate::postgres::session::{Limits, Session};
use crate::telemetry::metrics::Metrics;

/// Limits of the short statements here.
const LIMITS: Limits = Limits {
    lock: Duration::from_secs(2),
    statement: Duration::from_secs(5),
};

/// How often a waiting caller looks again.
const LOOK_AGAIN: Duration = Duration::from_millis(100);

/// How long a caller is ready to wait for a settled answer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Preference {
    /// Answer at once, run afterwards.
    pub respond_async: bool,
    /// Wait this long for an operation that another delivery runs.
    pub wait: Option<Duration>,
}

pub struct Intake {
    pub pool: Pool,
    pub apply: Arc<Apply>,
    pub replays: Arc<Replays>,
    pub deliveries: Arc<Deliveries>,
    pub metrics: Arc<Metrics>,
    pub tasks: TaskTracker,
    pub instance: Uuid,
    pub kinds: RwLock<Arc<Kinds>>,
}

/// Why an operation could not be cancelled.
#[derive(Debug)]
pub enum NotCancelled {
    /// The tenant has no such operation.
    NotFound,
    /// Another key asked for it, or this one no longer covers its kind.
    NotYours,
    /// It has begun, or it is over.
    TooLate(Known),
    Refused(Refusal),
}

/// What a transaction's statements returned, and what is known of its commit.
struct Written<T> {
    value: T,
    committed: Result<(), DatabaseError>,
}

impl Intake {
    /// The kinds as they are configured now.
    pub fn kinds(&self) -> Arc<Kinds> {
        self.kinds.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// Puts another configuration's kinds in place; requests under way keep theirs.
    pub fn replace_kinds(&self, kinds: Kinds) {
        *self.kinds.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(kinds);
    }

    /// Submits an operation: performs it once, or says what became of it.
    pub async fn submit(
        self: &Arc<Self>,
        submission: Submission,
        mode: Mode,
        preference: Preference,
    ) -> Result<Outcome, Refusal> {
        let (tenant, id, fingerprint) = (submission.tenant.clone(), submission.id.clone(), submission.fingerprint);
        if let Some(replay) = self.replays.find(&tenant, &id, &fingerprint) {
            self.deliveries.count(&tenant, &id);
            return Ok(replay);
        }
        let intake = self.clone();
        let outcome = match (mode, preference.respond_async) {
            (Mode::Plan, _) => self.store(submission, Beginning::Planned).await?,
            (Mode::Execute, true) => self.finished(async move { intake.accept(submission).await }).await?,
            (Mode::Execute, false) => self.apply.run(Arc::new(submission), Work::First).await?,
        };
        self.count(&tenant, &outcome);
        self.wait(&tenant, &id, &fingerprint, outcome, preference).await
    }

    /// What is known under an id, for a request that could not run anyway.
    pub async fn known(
        &self,
        tenant: &Tenant,
        id: &OperationId,
        fingerprint: &Fingerprint,
    ) -> Result<Option<Outcome>, Refusal> {
        let operation = self.operation(tenant, id).await?;
        let outcome = operation.map(|operation| Outcome::of(&operation, fingerprint));
        if let Some(outcome) = &outcome {
            self.count(tenant, outcome);
        }
        Ok(outcome)
    }

    /// Runs a planned operation.
    pub async fn execute(
        self: &Arc<Self>,
        caller: &Caller,
        operation: &Operation,
        preference: Preference,
    ) -> Result<Outcome, Refusal> {
        let (tenant, id, fingerprint) = (&operation.tenant, &operation.id, &operation.fingerprint);
        let outcome = match operation.state {
            State::Planned => {
                let (intake, operation, actor) = (self.clone(), operation.clone(), caller.actor());
                self.finished(async move { intake.claim_and_run(&operation, &actor, preference).await })
                    .await?
            }
            State::WaitingApproval
            | State::Running
            | State::RetryWait
            | State::NeedsReconciliation { .. }
            | State::Rejected(_)
            | State::Cancelled(_)
            | State::Succeeded(_)
            | State::Failed(_)
            | State::Compensating(_)
            | State::Compensated(_) => Outcome::of(operation, fingerprint),
        };
        self.wait(tenant, id, fingerprint, outcome, preference).await
    }

    /// Withdraws an operation that has not begun; doing so again changes nothing. `elsewhere` are the kinds that downstreams
    /// perform.
    pub async fn cancel(
        &self,
        caller: &Caller,
        id: &OperationId,
        elsewhere: &DownstreamKinds,
    ) -> Result<(), NotCancelled> {
        loop {
            let operation = self
                .operation(&caller.tenant, id)
                .await
                .map_err(NotCancelled::Refused)?;
            let Some(operation) = operation else {
                return Err(NotCancelled::NotFound);
            };
            if *operation.requested_by != *caller.key_id || !caller.covers(&operation.kind) {
                return Err(NotCancelled::NotYours);
            }
            let name = operation.state.name();
            if name == StateName::Cancelled {
                return Ok(());
            }
            if !name.may_become(StateName::Cancelled) {
                return Err(NotCancelled::TooLate(Known::of(&operation)));
            }
            let retention = self.retention(&operation.kind, elsewhere);
            match self.write_cancellation(caller, &operation, retention).await {
                Ok(true) => return Ok(()),
                // It changed between the two statements, and no state is entered twice before it can be cancelled no
                // more: the next look finds an end.
                Ok(false) => {}
                Err(error) => return Err(NotCancelled::Refused(refusal(&error))),
            }
        }
    }

    /// The operation of that id.
    pub async fn operation(&self, tenant: &Tenant, id: &OperationId) -> Result<Option<Operation>, Refusal> {
        self.read(async |session| read::one(session, tenant, id).await).await
    }

    /// Runs a few reading statements on one session.
    pub async fn read<T>(
        &self,
        statements: impl AsyncFnOnce(&mut Session) -> Result<T, read::Error>,
    ) -> Result<T, Refusal> {
        let mut session = self.pool.reader(LIMITS).await.map_err(|error| refusal(&error))?;
        let found = statements(&mut session).await.map_err(|error| match error {
            read::Error::Database(error) => refusal(&error),
            read::Error::Impossible { .. } => {
                tracing::error!(error = %error, "cannot read an operation");
                Refusal::Internal
            }
        })?;
        session.finish().await.map_err(|error| refusal(&error))?;
        Ok(found)
    }

    /// Claims what a sweep found abandoned, and runs it in the background. Says whether it did.
    pub async fn take_over(
        self: &Arc<Self>,
        tenant: &Tenant,
        id: &OperationId,
        seen: Seen,
    ) -> Result<bool, DatabaseError> {
        let Some(stored) = self.claim(tenant, id, seen, &self.actor()).await? else {
            return Ok(false);
        };
        self.run_in_background(stored);
        Ok(true)
    }

    /// How history names this process.
    pub fn actor(&self) -> String {
        format!("instance:{}", self.instance)
    }

    /// Stores without running; an id that is known already says what is there.
    async fn store(&self, submission: Submission, beginning: Beginning) -> Result<Outcome, Refusal> {
        let state = match beginning {
            Beginning::Planned => StateName::Planned,
            Beginning::Accepted { .. } | Beginning::Claimed { .. } => StateName::Running,
        };
        match self.told(&submission, beginning).await? {
            Told::Known(outcome) => Ok(outcome),
            Told::Stored(committed) => committed
                .map(|()| Outcome::Accepted {
                    operation: Known::submitted(&submission, Some(state)),
                    repeated: false,
                })
                .map_err(|error| refusal(&error)),
        }
    }

    /// Stores and claims at once, answers, and runs in the background.
    async fn accept(self: &Arc<Self>, submission: Submission) -> Result<Outcome, Refusal> {
        let submission = Arc::new(submission);
        let beginning = Beginning::Accepted {
            instance: self.instance,
        };
        match self.told(&submission, beginning).await? {
            // The caller asked not to wait: still running is no conflict for it, once it is stored.
            Told::Known(Outcome::InProgress {
                operation: operation @ Known { state: Some(_), .. },
            }) => Ok(Outcome::Accepted {
                operation,
                repeated: true,
            }),
            Told::Known(outcome) => Ok(outcome),
            Told::Stored(committed) => {
                let operation = Known::submitted(&submission, Some(StateName::Running));
                // Even if the commit's answer was lost: the row may be there, and names this process as its claimer.
                self.spawn(submission, Work::Claimed { attempt: 1 });
                committed
                    .map(|()| Outcome::Accepted {
                        operation,
                        repeated: false,
                    })
                    .map_err(|error| refusal(&error))
            }
        }
    }

    /// Stores the submission, or says what is there instead.
    async fn told(&self, submission: &Submission, beginning: Beginning) -> Result<Told, Refusal> {
        if let Some(outcome) = self.apply.twin(submission) {
            return Ok(Told::Known(outcome));
        }
        match self
            .write_unclear(async |session| plan::store(session, submission, beginning).await)
            .await
        {
            Ok(Written { value: true, committed }) => return Ok(Told::Stored(committed)),
            Ok(Written { value: false, .. }) => {}
            // The only lock this insert can wait for is a rival's claim of the same id. It may still roll back, so
            // nothing is promised.
            Err(error) if error.trouble() == Trouble::LockTimeout => {
                return Ok(Told::Known(Outcome::InProgress {
                    operation: Known::submitted(submission, None),
                }));
            }
            Err(error) => return Err(refusal(&error)),
        }
        let found = self.operation(&submission.tenant, &submission.id).await?;
        // Gone again between the two statements: its tombstone was just forgotten.
        found
            .map(|operation| Told::Known(Outcome::of(&operation, &submission.fingerprint)))
            .ok_or(Refusal::Unavailable)
    }

    async fn claim_and_run(
        self: &Arc<Self>,
        operation: &Operation,
        actor: &str,
        preference: Preference,
    ) -> Result<Outcome, Refusal> {
        let (tenant, id) = (&operation.tenant, &operation.id);
        let seen = Seen {
            state: operation.state.name(),
            version: operation.version,
        };
        let claimed = self
            .claim(tenant, id, seen, actor)
            .await
            .map_err(|error| refusal(&error))?;
        let Some(stored) = claimed else {
            let found = self.operation(tenant, id).await?;
            return found
                .map(|found| Outcome::of(&found, &operation.fingerprint))
                .ok_or(Refusal::Unavailable);
        };
        if preference.respond_async {
            self.run_in_background(stored);
            let operation = Known {
                state: Some(StateName::Running),
                ..Known::of(operation)
            };
            return Ok(Outcome::Accepted {
                operation,
                repeated: false,
            });
        }
        let work = Work::Claimed {
            attempt: stored.attempt,
        };
        match self.submission(&stored) {
            Some(submission) => self.apply.run(Arc::new(submission), work).await,
            None => self.without_kind(&stored).await,
        }
    }

    async fn claim(
        self: &Arc<Self>,
        tenant: &Tenant,
        id: &OperationId,
        seen: Seen,
        actor: &str,
    ) -> Result<Option<Stored>, DatabaseError> {
        let claimed = self
            .write_unclear(async |session| plan::claim(session, tenant, id, seen, self.instance, actor).await)
            .await?;
        match (claimed.value, claimed.committed) {
            (Some(stored), Err(error)) => {
                self.run_in_background(stored);
                Err(error)
            }
            (claimed, Ok(())) => Ok(claimed),
            (None, Err(_)) => Ok(None),
        }
    }

    fn run_in_background(self: &Arc<Self>, stored: Stored) {
        let work = Work::Claimed {
            attempt: stored.attempt,
        };
        match self.submission(&stored) {
            Some(submission) => self.spawn(Arc::new(submission), work),
            None => {
                let intake = self.clone();
                self.tasks
                    .spawn(async move { drop(intake.without_kind(&stored).await) });
            }
        }
    }

    fn spawn(self: &Arc<Self>, submission: Arc<Submission>, work: Work) {
        let intake = self.clone();
        self.tasks.spawn(async move {
            let id = submission.id.clone();
            if let Err(refusal) = intake.apply.run(submission, work).await {
                tracing::warn!(operation.id = %id, error = %refusal, "operation waits for its next attempt");
            }
        });
    }

    /// A stored operation's submission, put together again; `None` if its kind is not configured any more.
    fn submission(&self, stored: &Stored) -> Option<Submission> {
        let kind: Arc<Kind> = self.kinds().get(&stored.kind)?.clone();
        let payload = canonical::parse(stored.payload.as_bytes(), MAX_DEPTH).ok()?;
        let canonical = String::from_utf8(payload.canonical()).ok()?;
        Some(Submission {
            tenant: stored.tenant.clone(),
            id: stored.id.clone(),
            fingerprint: Fingerprint::of_canonical(&stored.kind, canonical.as_bytes()),
            kind,
            payload: stored.payload.as_str().into(),
            canonical: canonical.into(),
            run: None,
            external_reference: None,
            requested_by: stored.requested_by.as_str().into(),
            trace_parent: stored.trace_parent.clone(),
        })
    }

    /// Puts an operation back whose kind is not configured here; a process with the kind will run it.
    async fn without_kind(&self, stored: &Stored) -> Result<Outcome, Refusal> {
        const DELAY: Duration = Duration::from_secs(30);
        tracing::error!(operation.id = %stored.id, kind = stored.kind, "the kind of a stored operation is not configured");
        let fence = plan::Fence {
            attempt: stored.attempt,
            instance: self.instance,
        };
        let reason = "its kind is not configured";
        let put_back = self
            .write(async |session| plan::wait(session, &stored.tenant, &stored.id, fence, DELAY, reason, None).await)
            .await;
        put_back.map_err(|error| refusal(&error))?;
        let raised = receipt::Raised {
            sqlstate: "42883".to_owned(),
            message: format!("the kind {} is not configured", stored.kind),
            detail: None,
            by_ledger: true,
        };
        Ok(Outcome::HandlerBroken {
            id: stored.id.clone(),
            raised,
        })
    }

    fn retention(&self, kind: &str, elsewhere: &DownstreamKinds) -> Duration {
        let ours = self.kinds().get(kind).map(|kind| kind.retention);
        ours.or_else(|| elsewhere.get(kind).map(|kind| kind.retention))
            .unwrap_or(retention::DEFAULT)
    }

    async fn write_cancellation(
        &self,
        caller: &Caller,
        operation: &Operation,
        retention: Duration,
    ) -> Result<bool, DatabaseError> {
        let seen = Seen {
            state: operation.state.name(),
            version: operation.version,
        };
        self.write(async |session| {
            let (tenant, id) = (&operation.tenant, &operation.id);
            let Some(times) = plan::cancel(session, tenant, id, seen, retention).await? else {
                return Ok(false);
            };
            let receipt = Receipt::cancelled(receipt::Settled {
                id,
                kind: &operation.kind,
                fingerprint: &operation.fingerprint,
                attempt: operation.attempt,
                settled_at: times.settled_at,
            });
            let settled = settlement::Settled {
                id,
                state: StateName::Cancelled,
                version: times.version,
                attempt: operation.attempt,
                receipt: &receipt,
                settled_at: times.settled_at,
                expires_at: times.expires_at,
                actor: &caller.actor(),
                raised: None,
            };
            settlement::store_all(session, tenant, &[settled]).await?;
            Ok(true)
        })
        .await
    }

    async fn write<T>(
        &self,
        statements: impl AsyncFnOnce(&mut Session) -> Result<T, DatabaseError>,
    ) -> Result<T, DatabaseError> {
        let written = self.write_unclear(statements).await?;
        written.committed.map(|()| written.value)
    }

    /// As `write`, for claims: when the answer to the commit is lost, the claim may stand, and nobody but this living
    /// process would ever run it. So the caller runs it in any case: the attempt presents its claim, and ends if there is
    /// none.
    async fn write_unclear<T>(
        &self,
        statements: impl AsyncFnOnce(&mut Session) -> Result<T, DatabaseError>,
    ) -> Result<Written<T>, DatabaseError> {
        let mut session = self.pool.transaction(LIMITS).await?;
        let value = statements(&mut session).await?;
        let committed = session.commit().await;
        Ok(Written { value, committed })
    }

    /// Runs a verb to its end even if the caller goes away in the middle: a claim that is committed has to be run.
    async fn finished<T: Send + 'static>(
        &self,
        verb: impl Future<Output = Result<T, Refusal>> + Send + 'static,
    ) -> Result<T, Refusal> {
        // It ends early only by a panic, which the runtime has reported.
        self.tasks.spawn(verb).await.unwrap_or(Err(Refusal::Internal))
    }

    /// Waits as long as the caller prefers for an operation to settle.
    async fn wait(
        &self,
        tenant: &Tenant,
        id: &OperationId,
        fingerprint: &Fingerprint,
        mut outcome: Outcome,
        preference: Preference,
    ) -> Result<Outcome, Refusal> {
        let Some(wait) = preference.wait else {
            return Ok(outcome);
        };
        let first = matches!(outcome, Outcome::Accepted { repeated: false, .. });
        let until = Instant::now() + wait;
        while is_running(&outcome) && Instant::now() < until {
            tokio::time::sleep(LOOK_AGAIN.min(until - Instant::now())).await;
            let Some(operation) = self.operation(tenant, id).await? else {
                continue;
            };
            outcome = match Outcome::of(&operation, fingerprint) {
                Outcome::InProgress { operation } if preference.respond_async => Outcome::Accepted {
                    operation,
                    repeated: true,
                },
                outcome => outcome,
            };
        }
        // The delivery that began it gets the first answer, not a replay of one.
        if let Outcome::Settled { replayed, .. } = &mut outcome
            && first
        {
            *replayed = false;
        }
        Ok(outcome)
    }

    /// Counts the delivery in metrics, and on the operation if it was known before.
    pub fn count(&self, tenant: &Tenant, outcome: &Outcome) {
        let again = match outcome {
            Outcome::Settled {
                operation,
                replayed: true,
                ..
            }
            | Outcome::Accepted {
                operation,
                repeated: true,
            }
            | Outcome::InProgress { operation }
            | Outcome::Unknown { operation, .. }
            | Outcome::Expired { operation, .. }
            | Outcome::NotStored { operation, .. } => Some(operation),
            // A mismatch leaves nothing behind, not even a count.
            Outcome::Settled { .. }
            | Outcome::Accepted { .. }
            | Outcome::Mismatch { .. }
            | Outcome::HandlerBroken { .. } => None,
        };
        if let Some(operation) = again {
            self.deliveries.count(tenant, &operation.id);
        }
    }
}

/// What became of storing a submission.
enum Told {
    /// The id was taken.
    Known(Outcome),
    /// It is stored, as far as the commit's answer says.
    Stored(Result<(), DatabaseError>),
}

/// Whether it may settle without anybody's doing: a planned operation would keep its caller waiting for nothing.
fn is_running(outcome: &Outcome) -> bool {
    match outcome {
        Outcome::InProgress { .. } => true,
        Outcome::Accepted { operation, .. } => {
            matches!(operation.state, None | Some(StateName::Running | StateName::RetryWait))
        }
        Outcome::Settled { .. }
        | Outcome::Unknown { .. }
        | Outcome::Mismatch { .. }
        | Outcome::Expired { .. }
        | Outcome::NotStored { .. }
        | Outcome::HandlerBroken { .. } => false,
    }
}

/// Logs a failed statement once and tells the caller whether to come back.
pub fn refusal(error: &DatabaseError) -> Refusal {
    let cause = std::error::Error::source(error)
        .map(ToString::to_string)
        .unwrap_or_default();
    match error.trouble() {
        Trouble::Passing | Trouble::LockTimeout => {
            tracing::warn!(error = %error, cause, "the database is not available");
            Refusal::Unavailable
        }
        Trouble::Lasting => {
            tracing::error!(error = %error, cause, "the database refused a statement");
            Refusal::Internal
        }
    }
}
