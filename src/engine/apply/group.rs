//! One worker: a connection, and groups on it for as long as the process lives.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use tokio::time::Instant;

use super::{Apply, Member, Registered, log_trouble};
use crate::engine::outcome::{Known, Outcome, after};
use crate::engine::queue::{Queued, Turn};
use crate::ledger::claim::Times;
use crate::ledger::operation::StateName;
use crate::ledger::receipt::{self, Raised, Receipt};
use crate::ledger::settlement::{self, Applied, Call};
use crate::ledger::submission::Submission;
use crate::ledger::tenant::Tenant;
use crate::ledger::{claim, read};
use crate::postgres::error::Error as DatabaseError;
use crate::postgres::session::{Limits, Session};

/// Takes groups until the queue is closed and empty.
pub async fn work(apply: Arc<Apply>) {
    let mut session = None;
    while let Some((group, turn)) = apply.queue.take(apply.settings.largest_group).await {
        let (group, twins) = without_twins(group);
        // A second delivery of the same id must not meet the first one's uncommitted row in the same transaction; it
        // goes first in the next group, where it finds the committed one.
        let outcome = commit(&apply, &mut session, &group, turn).await;
        apply.queue.put_back(twins);
        match outcome {
            Ok(endings) => finish(&apply, group, endings),
            Err(error) => {
                session = None;
                log_failure(&error, group.len());
                split(&apply, group);
            }
        }
    }
}

/// Members in order of id, so that two groups lock alike; and the later deliveries of an id that occurs twice.
fn without_twins(group: Vec<Member>) -> (Vec<Member>, Vec<Member>) {
    let mut seen = HashSet::with_capacity(group.len());
    let (mut first, twins): (Vec<_>, Vec<_>) = group.into_iter().partition(|member| seen.insert(member.id().clone()));
    first.sort_unstable_by(|left, right| left.id().cmp(right.id()));
    (first, twins)
}

/// What a committed group means for one member.
enum Ending {
    Answer(Outcome),
    /// Its claim was taken back, or the row that stopped it is gone again: it has to run by itself.
    Alone,
}

impl Ending {
    fn since(self, asked: Instant) -> Self {
        match self {
            Self::Answer(outcome) => Self::Answer(outcome.since(asked)),
            Self::Alone => Self::Alone,
        }
    }
}

#[derive(Debug, thiserror::Error)]
enum Error {
    #[error(transparent)]
    Database(#[from] DatabaseError),
    #[error(transparent)]
    Read(read::Error),
}

impl From<read::Error> for Error {
    fn from(error: read::Error) -> Self {
        match error {
            read::Error::Database(error) => Self::Database(error),
            read::Error::Impossible { .. } => Self::Read(error),
        }
    }
}

async fn commit(
    apply: &Apply,
    kept: &mut Option<Session>,
    group: &[Member],
    turn: Turn<'_, Member>,
) -> Result<Vec<Ending>, Error> {
    let began = Instant::now();
    let mut session = match kept.take() {
        Some(session) => session,
        None => apply.pool.session().await?,
    };
    // No handler of a group may run longer than its own kind allows.
    let shortest = group.iter().map(|member| member.submission.kind.timeout).min();
    let limits = Limits {
        lock: apply.settings.group_lock,
        statement: shortest.map_or(apply.settings.group_statement, |own| {
            own.min(apply.settings.group_statement)
        }),
    };
    session.begin(limits).await?;
    let submissions: Vec<&Submission> = group.iter().map(|member| &*member.submission).collect();
    let endings = fill(apply, &mut session, &submissions).await?;
    let committing = Instant::now();
    // Everything this group locks, it has: the next one of this tenant can wait for nothing but this commit.
    drop(turn);
    session.commit_after_handlers().await?;
    apply.metrics.group(group.len(), committing.elapsed(), began.elapsed());
    *kept = Some(session);
    Ok(endings.into_iter().map(|ending| ending.since(began)).collect())
}

/// Claims, runs and settles within the open transaction.
async fn fill(apply: &Apply, session: &mut Session, submissions: &[&Submission]) -> Result<Vec<Ending>, Error> {
    // The queue gives out groups of one tenant.
    let Some(tenant) = submissions.first().map(|submission| &submission.tenant) else {
        return Ok(Vec::new());
    };
    let claimed = claim::claim_all(session, tenant, submissions).await?;
    let (winners, losers): (Vec<&Submission>, Vec<&Submission>) = submissions
        .iter()
        .partition(|submission| claimed.contains_key(submission.id.as_str()));
    let mut outcomes = settle(apply, session, tenant, &winners, &claimed).await?;
    outcomes.extend(told(session, tenant, &losers).await?);
    Ok(submissions
        .iter()
        .map(|submission| {
            outcomes
                .remove(submission.id.as_str())
                .map_or(Ending::Alone, Ending::Answer)
        })
        .collect())
}

type Outcomes = HashMap<String, Outcome>;

/// What the losers of the claim are told: they read in a statement of their own, which sees the winners' commits.
async fn told(session: &mut Session, tenant: &Tenant, losers: &[&Submission]) -> Result<Outcomes, Error> {
    if losers.is_empty() {
        return Ok(Outcomes::new());
    }
    let ids: Vec<&str> = losers.iter().map(|submission| submission.id.as_str()).collect();
    let operations = read::existing(session, tenant, &ids).await?;
    Ok(operations
        .iter()
        .filter_map(|operation| {
            let submission = losers.iter().find(|submission| submission.id == operation.id)?;
            Some((
                operation.id.as_str().to_owned(),
                Outcome::of(operation, &submission.fingerprint),
            ))
        })
        .collect())
}

/// A winner whose handler has decided.
struct Decided<'a> {
    submission: &'a Submission,
    times: Times,
    state: StateName,
    receipt: Arc<Receipt>,
    raised: Option<Raised>,
}

/// Runs the winners' handlers and stores what they led to. Members that are left out of the answer run alone.
async fn settle(
    apply: &Apply,
    session: &mut Session,
    tenant: &Tenant,
    winners: &[&Submission],
    claimed: &HashMap<String, Times>,
) -> Result<Outcomes, Error> {
    let mut outcomes = Outcomes::with_capacity(winners.len());
    if winners.is_empty() {
        return Ok(outcomes);
    }
    let mut decided = Vec::with_capacity(winners.len());
    let mut withdrawn = Vec::new();
    for (submission, applied) in winners.iter().copied().zip(apply_all(session, winners).await?) {
        let Some(times) = claimed.get(submission.id.as_str()).copied() else {
            continue;
        };
        match applied {
            Applied::Returned(result) => {
                let receipt = Receipt::succeeded(described(submission, times), &result);
                decided.push(Decided::new(submission, times, StateName::Succeeded, receipt, None));
            }
            Applied::Refused(raised) => {
                let receipt = Receipt::failed(described(submission, times), &raised);
                decided.push(Decided::new(
                    submission,
                    times,
                    StateName::Failed,
                    receipt,
                    Some(raised),
                ));
            }
            Applied::Passing(_) => withdrawn.push(submission.id.as_str()),
            Applied::Broken(raised) => {
                withdrawn.push(submission.id.as_str());
                let id = submission.id.clone();
                outcomes.insert(id.as_str().to_owned(), Outcome::HandlerBroken { id, raised });
            }
        }
    }
    store(apply, session, tenant, &decided).await?;
    if !withdrawn.is_empty() {
        claim::withdraw(session, tenant, &withdrawn).await?;
    }
    outcomes.extend(decided.into_iter().map(Decided::outcome));
    Ok(outcomes)
}

async fn apply_all(session: &mut Session, winners: &[&Submission]) -> Result<Vec<Applied>, DatabaseError> {
    let arguments: Vec<String> = winners
        .iter()
        .map(|submission| submission.operation_argument(1))
        .collect();
    let calls: Vec<Call<'_>> = winners
        .iter()
        .zip(&arguments)
        .map(|(submission, operation)| Call {
            handler: submission.kind.handler.quoted(),
            payload: &submission.canonical,
            operation,
        })
        .collect();
    settlement::apply_all(session, &calls).await
}

async fn store(
    apply: &Apply,
    session: &mut Session,
    tenant: &Tenant,
    decided: &[Decided<'_>],
) -> Result<(), DatabaseError> {
    if decided.is_empty() {
        return Ok(());
    }
    let settled: Vec<_> = decided.iter().map(|one| one.settled(&apply.actor)).collect();
    settlement::store_all(session, tenant, &settled).await?;
    let failed: Vec<&str> = decided
        .iter()
        .filter(|one| one.state == StateName::Failed)
        .map(|one| one.id())
        .collect();
    if !failed.is_empty() {
        settlement::mark_failed(session, tenant, &failed).await?;
    }
    Ok(())
}

fn described(submission: &Submission, times: Times) -> receipt::Settled<'_> {
    receipt::Settled {
        id: &submission.id,
        kind: &submission.kind.name,
        fingerprint: &submission.fingerprint,
        attempt: 1,
        settled_at: times.settled_at,
    }
}

impl<'a> Decided<'a> {
    fn new(
        submission: &'a Submission,
        times: Times,
        state: StateName,
        receipt: Receipt,
        raised: Option<Raised>,
    ) -> Self {
        Self {
            submission,
            times,
            state,
            receipt: Arc::new(receipt),
            raised,
        }
    }

    fn id(&self) -> &'a str {
        self.submission.id.as_str()
    }

    fn settled<'b>(&'b self, actor: &'b str) -> settlement::Settled<'b> {
        settlement::Settled {
            id: &self.submission.id,
            state: self.state,
            version: 1,
            attempt: 1,
            receipt: &self.receipt,
            settled_at: self.times.settled_at,
            expires_at: self.times.expires_at,
            actor,
            raised: self.raised.as_ref(),
        }
    }

    fn outcome(self) -> (String, Outcome) {
        let operation = Known::submitted(self.submission, Some(self.state));
        let expires_at = self.times.expires_at;
        let serve_until = after(expires_at - self.times.settled_at);
        let outcome = Outcome::Settled {
            operation,
            receipt: self.receipt,
            expires_at,
            serve_until,
            replayed: false,
        };
        (self.submission.id.as_str().to_owned(), outcome)
    }
}

/// Answers a committed group. Only now may anybody see, or keep, what it decided.
fn finish(apply: &Arc<Apply>, group: Vec<Member>, endings: Vec<Ending>) {
    for (member, ending) in group.into_iter().zip(endings) {
        match ending {
            Ending::Answer(outcome) => {
                apply.replays.keep(member.tenant(), &outcome);
                if outcome.is_effect() {
                    apply.metrics.committed_effect();
                }
                member.answer(Ok(outcome));
            }
            Ending::Alone => alone(apply, member),
        }
    }
}

fn split(apply: &Arc<Apply>, group: Vec<Member>) {
    apply.metrics.split();
    for member in group {
        alone(apply, member);
    }
}

fn alone(apply: &Arc<Apply>, member: Member) {
    let registered = Registered::new(apply, &member.submission, member.work);
    apply.tasks.spawn(super::alone::run(apply.clone(), member, registered));
}

fn log_failure(error: &Error, members: usize) {
    match error {
        Error::Database(error) => log_trouble(error, members),
        Error::Read(error) => tracing::error!(error = %error, members, "group rolled back"),
    }
}
