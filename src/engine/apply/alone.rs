//! Operations that run in a transaction of their own: slow kinds, members of a group that was split, and operations that
//! were stored before they run.
//!
//! A lost connection needs no special path: whatever became of the commit, trying again either finds the row and
//! replays it, or waits for the commit that is still under way, or wins the claim because nothing was committed.

use std::sync::Arc;
use std::time::Duration;

use serde_json::value::RawValue;
use tokio::time::Instant;

use super::{Apply, Member, Registered, Work, log_trouble};
use crate::engine::outcome::{Known, Outcome, Refusal, after};
use crate::engine::queue::Queued;
use crate::ledger::operation::StateName;
use crate::ledger::operation_id::OperationId;
use crate::ledger::plan::{self, Beginning, Fence};
use crate::ledger::read;
use crate::ledger::receipt::{self, Raised, Receipt};
use crate::ledger::settlement::{self, Applied, Call};
use crate::ledger::submission::Submission;
use crate::ledger::tenant::Tenant;
use crate::postgres::error::{Error as DatabaseError, Trouble, backoff};
use crate::postgres::session::{Limits, Session};

/// How long a stored operation waits after its handler broke.
const BROKEN_DELAY: Duration = Duration::from_secs(30);

/// How long a stored operation waits when passing trouble outlasted its deadline.
const TROUBLE_DELAY: Duration = Duration::from_secs(5);

/// Runs a member to its outcome and answers it.
pub async fn run(apply: Arc<Apply>, member: Member, registered: Registered) {
    // Closed only with the process.
    let Ok(_permit) = apply.alone.clone().acquire_owned().await else {
        return;
    };
    let outcome = settle(&apply, &member).await;
    if let Ok(outcome) = &outcome {
        apply.replays.keep(member.tenant(), outcome);
        if outcome.is_effect() {
            apply.metrics.committed_effect();
        }
    }
    drop(registered);
    member.answer(outcome);
}

/// How one transaction ended.
enum Tried {
    Answer(Outcome),
    /// Rolled back by trouble that may pass.
    Passing(Raised),
    /// Rolled back because the handler is broken.
    Broken(Raised),
}

async fn settle(apply: &Apply, member: &Member) -> Result<Outcome, Refusal> {
    let mut tried = 0;
    loop {
        let asked = Instant::now();
        let passing = match attempt(apply, member).await {
            Ok(Tried::Answer(outcome)) => return Ok(outcome.since(asked)),
            Ok(Tried::Broken(raised)) => return Ok(broken(apply, member, raised).await),
            Ok(Tried::Passing(raised)) => raised.message,
            Err(error) => match fate(&error, member) {
                Fate::Passing => error.to_string(),
                Fate::Overtime => {
                    let refusal = overtime(&member.submission);
                    return give_up(apply, member, &refusal.to_string(), refusal.clone()).await;
                }
                Fate::Twin => {
                    return Ok(Outcome::InProgress {
                        operation: Known::submitted(&member.submission, None),
                    });
                }
                Fate::Lasting => return give_up(apply, member, "internal error", Refusal::Internal).await,
            },
        };
        let delay = backoff(tried, random());
        if Instant::now() + delay >= member.deadline {
            return give_up(apply, member, &passing, Refusal::Unavailable).await;
        }
        tried += 1;
        apply.metrics.retried();
        tokio::time::sleep(delay).await;
    }
}

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error(transparent)]
    Database(#[from] DatabaseError),
    #[error(transparent)]
    Read(read::Error),
    /// The handler ran for as long as its kind allows, and was cancelled.
    #[error(transparent)]
    Overtime(DatabaseError),
    /// The claim waited for a rival's commit as long as it may.
    #[error("another delivery of this operation is being run")]
    Twin,
}

impl From<read::Error> for Error {
    fn from(error: read::Error) -> Self {
        match error {
            read::Error::Database(error) => Self::Database(error),
            read::Error::Impossible { .. } => Self::Read(error),
        }
    }
}

enum Fate {
    Passing,
    Lasting,
    Overtime,
    Twin,
}

fn fate(error: &Error, member: &Member) -> Fate {
    match error {
        Error::Twin => Fate::Twin,
        Error::Overtime(error) => {
            log_overtime(error, &member.submission);
            Fate::Overtime
        }
        Error::Read(error) => {
            tracing::error!(error = %error, "operation rolled back");
            Fate::Lasting
        }
        Error::Database(error) => {
            log_trouble(error, 1);
            match error.trouble() {
                Trouble::Passing | Trouble::LockTimeout => Fate::Passing,
                Trouble::Lasting => Fate::Lasting,
            }
        }
    }
}

/// What the caller of a cancelled handler is told: the database is well, and to wait for it would not help.
fn overtime(submission: &Submission) -> Refusal {
    Refusal::Overtime {
        kind: submission.kind.name.clone(),
        handler: submission.kind.handler.to_string(),
        timeout: submission.kind.timeout,
    }
}

fn log_overtime(error: &DatabaseError, submission: &Submission) {
    tracing::warn!(
        operation.id = %submission.id,
        kind = &*submission.kind.name,
        handler = %submission.kind.handler,
        timeout = ?submission.kind.timeout,
        sqlstate = error.sqlstate(),
        "the handler ran longer than its kind's timeout and was rolled back; make it faster or raise the timeout"
    );
}

/// One transaction.
async fn attempt(apply: &Apply, member: &Member) -> Result<Tried, Error> {
    let submission = &*member.submission;
    let limits = Limits {
        lock: apply.settings.duplicate_wait,
        statement: submission.kind.timeout,
    };
    let mut session = apply.pool.transaction(limits).await?;
    let attempt = match begin(apply, &mut session, submission, member.work).await? {
        Begun::Ours { attempt } => attempt,
        Begun::Told(outcome) => {
            session.rollback().await?;
            return Ok(Tried::Answer(outcome));
        }
        Begun::Gone => {
            session.rollback().await?;
            return Ok(Tried::Passing(Raised {
                sqlstate: "40001".to_owned(),
                message: "the row that held the id is gone again".to_owned(),
                detail: None,
                by_ledger: true,
            }));
        }
    };
    let began = Instant::now();
    let applied = apply_one(apply, &mut session, submission, attempt)
        .await
        .map_err(|error| {
            // Cancelled, and by whom? PostgreSQL says that in words only, and those depend on its language.
            if error.is_cancelled() && began.elapsed() >= submission.kind.timeout {
                Error::Overtime(error)
            } else {
                error.into()
            }
        })?;
    let (state, receipt, raised) = match applied {
        Applied::Returned(result) => (StateName::Succeeded, Written::Succeeded(result), None),
        Applied::Refused(raised) => (StateName::Failed, Written::Failed(raised.clone()), Some(raised)),
        Applied::Passing(raised) => {
            session.rollback_after_handlers().await?;
            return Ok(Tried::Passing(raised));
        }
        Applied::Broken(raised) => {
            // Nobody knows what else it did to the connection.
            session.rollback().await?;
            session.close_on_drop();
            return Ok(Tried::Broken(raised));
        }
    };
    let times = plan::settle(
        &mut session,
        &submission.tenant,
        &submission.id,
        state,
        submission.kind.retention,
    )
    .await?;
    let receipt = Arc::new(receipt.at(submission, attempt, times));
    let settled = settlement::Settled {
        id: &submission.id,
        state,
        version: times.version,
        attempt,
        receipt: &receipt,
        settled_at: times.settled_at,
        expires_at: times.expires_at,
        actor: &apply.actor,
        raised: raised.as_ref(),
    };
    settlement::store_all(&mut session, &submission.tenant, &[settled]).await?;
    session.commit_after_handlers().await?;
    Ok(Tried::Answer(Outcome::Settled {
        operation: Known::submitted(submission, Some(state)),
        receipt,
        expires_at: times.expires_at,
        serve_until: after(times.expires_at - times.settled_at),
        replayed: false,
    }))
}

enum Begun {
    Ours { attempt: i32 },
    Told(Outcome),
    Gone,
}

/// Gets hold of the operation's row, or says what is there instead.
async fn begin(apply: &Apply, session: &mut Session, submission: &Submission, work: Work) -> Result<Begun, Error> {
    let ours = match work {
        Work::First => {
            let beginning = Beginning::Claimed {
                instance: apply.instance,
            };
            let stored = plan::store(session, submission, beginning)
                .await
                .map_err(|error| match error.trouble() {
                    // The only lock this insert can wait for is a rival's claim of the same id.
                    Trouble::LockTimeout => Error::Twin,
                    Trouble::Passing | Trouble::Lasting => error.into(),
                })?;
            stored.then_some(1)
        }
        Work::Claimed { attempt } => {
            let fence = Fence {
                attempt,
                instance: apply.instance,
            };
            plan::hold(session, &submission.tenant, &submission.id, fence)
                .await?
                .then_some(attempt)
        }
    };
    if let Some(attempt) = ours {
        return Ok(Begun::Ours { attempt });
    }
    let found = read::one(session, &submission.tenant, &submission.id).await?;
    Ok(found.map_or(Begun::Gone, |operation| {
        Begun::Told(Outcome::of(&operation, &submission.fingerprint))
    }))
}

/// Runs the handler and its deferred constraints behind a savepoint, so that a refusal by either undoes the effect and
/// keeps the claim.
async fn apply_one(
    apply: &Apply,
    session: &mut Session,
    submission: &Submission,
    attempt: i32,
) -> Result<Applied<Box<RawValue>>, DatabaseError> {
    session.savepoint().await?;
    let operation = submission.operation_argument(attempt);
    let call = Call {
        handler: submission.kind.handler.quoted(),
        payload: &submission.canonical,
        operation: &operation,
        max_result_bytes: apply.settings.max_result_bytes,
    };
    let result = match settlement::apply(session, call).await? {
        Applied::Returned(result) => result,
        raised @ (Applied::Refused(_) | Applied::Passing(_) | Applied::Broken(_)) => return Ok(raised),
    };
    match settlement::check_constraints(session).await {
        Ok(()) => Ok(Applied::Returned(result)),
        Err(error) => match Applied::by_constraint(&error) {
            Some(raised) => session.rollback_to_savepoint().await.map(|()| raised),
            None => Err(error),
        },
    }
}

enum Written {
    Succeeded(Box<RawValue>),
    Failed(Raised),
}

impl Written {
    fn at(self, submission: &Submission, attempt: i32, times: plan::Times) -> Receipt {
        let settled = receipt::Settled {
            id: &submission.id,
            kind: &submission.kind.name,
            fingerprint: &submission.fingerprint,
            attempt,
            settled_at: times.settled_at,
        };
        match self {
            Self::Succeeded(result) => Receipt::succeeded(settled, &result),
            Self::Failed(raised) => Receipt::failed(settled, &raised),
        }
    }
}

/// A broken handler: a first delivery stores nothing, a stored operation waits for the repair.
async fn broken(apply: &Apply, member: &Member, raised: Raised) -> Outcome {
    let evidence = settlement::evidence_json(&raised);
    put_back(apply, member, BROKEN_DELAY, "the handler is broken", Some(&evidence)).await;
    Outcome::HandlerBroken {
        id: member.submission.id.clone(),
        raised,
    }
}

async fn give_up(apply: &Apply, member: &Member, reason: &str, refusal: Refusal) -> Result<Outcome, Refusal> {
    put_back(apply, member, TROUBLE_DELAY, reason, None).await;
    Err(refusal)
}

/// Puts a stored operation back to wait. The row names this living process as its claimer, so nobody else would: this
/// goes on until it is written, or the process stops and its claims lapse.
async fn put_back(apply: &Apply, member: &Member, delay: Duration, reason: &str, evidence: Option<&str>) {
    let Work::Claimed { attempt } = member.work else {
        return;
    };
    let (tenant, id) = (member.tenant(), member.id());
    let fence = Fence {
        attempt,
        instance: apply.instance,
    };
    for tried in 0.. {
        match wait(apply, tenant, id, fence, delay, reason, evidence).await {
            Ok(()) => return,
            Err(error) if apply.queue.is_closed() => {
                log_trouble(&error, 1);
                return;
            }
            Err(error) => {
                log_trouble(&error, 1);
                tokio::time::sleep(backoff(tried, random())).await;
            }
        }
    }
}

async fn wait(
    apply: &Apply,
    tenant: &Tenant,
    id: &OperationId,
    fence: Fence,
    delay: Duration,
    reason: &str,
    evidence: Option<&str>,
) -> Result<(), DatabaseError> {
    let limits = Limits {
        lock: apply.settings.duplicate_wait,
        statement: apply.settings.group_statement,
    };
    let mut session = apply.pool.transaction(limits).await?;
    plan::wait(&mut session, tenant, id, fence, delay, reason, evidence).await?;
    session.commit().await
}

fn random() -> u64 {
    getrandom::u64().unwrap_or(0)
}
