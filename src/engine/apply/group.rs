//! One worker: a connection, and groups on it for as long as the process lives.

use std::collections::{BTreeSet, HashSet};
use std::sync::Arc;

use tokio::time::Instant;

use super::{Apply, Member, Registered, log_trouble};
use crate::engine::outcome::{Known, Outcome, after};
use crate::engine::queue::{Queued, Turn};
use crate::ledger::claim::Times;
use crate::ledger::operation::StateName;
use crate::ledger::receipt::{self, Raised, Receipt};
use crate::ledger::settlement::{self, Applied};
use crate::ledger::submission::Submission;
use crate::ledger::tenant::Tenant;
use crate::ledger::{claim, read};
use crate::postgres::error::Error as DatabaseError;
use crate::postgres::session::{Limits, Session};

/// Takes groups until the queue is closed and empty.
pub async fn work(apply: Arc<Apply>) {
    let mut kept = None;
    loop {
        let line = apply.queue.line().await;
        if !apply.queue.occupied().await {
            return;
        }
        // Before the turn: it often takes as long to come as this does.
        let begun = begin(&apply, kept.take()).await;
        let Some((group, turn)) = apply.queue.take(apply.settings.largest_group).await else {
            return;
        };
        drop(line);
        let (group, twins) = without_twins(group);
        // A second delivery of the same id must not meet the first one's uncommitted row in the same transaction; it
        // goes first in the next group, where it finds the committed one.
        let outcome = match begun {
            Ok(session) => commit(&apply, session, &group, turn).await,
            Err(error) => Err(error.into()),
        };
        apply.queue.put_back(twins);
        match outcome {
            Ok((endings, session)) => {
                finish(&apply, group, endings);
                // Nobody waits for this.
                kept = clean(session).await;
            }
            Err(error) => {
                log_failure(&error, &group);
                split(&apply, group);
            }
        }
    }
}

/// Takes what handlers left off the session. One that cannot be cleaned is closed; what was committed stays.
async fn clean(session: Session) -> Option<Session> {
    session.cleaned().await.unwrap_or_else(|error| {
        tracing::warn!(error = %error, "session closed after its commit");
        None
    })
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

/// Opens a group's transaction.
async fn begin(apply: &Apply, kept: Option<Session>) -> Result<Session, DatabaseError> {
    let mut session = match kept {
        Some(session) => session,
        None => apply.pool.session().await?,
    };
    session.begin(apply.settings.group_limits()).await?;
    Ok(session)
}

async fn commit(
    apply: &Apply,
    mut session: Session,
    group: &[Member],
    turn: Turn<'_, Member>,
) -> Result<(Vec<Ending>, Session), Error> {
    let began = Instant::now();
    // No handler of a group may run longer than its own kind allows.
    let limits = apply.settings.group_limits();
    if let Some(shortest) = group.iter().map(|member| member.submission.kind.timeout).min()
        && shortest < limits.statement
    {
        let statement = shortest;
        session.limit(Limits { statement, ..limits }).await?;
    }
    let submissions: Vec<&Submission> = group.iter().map(|member| &*member.submission).collect();
    let endings = fill(apply, &mut session, &submissions).await?;
    let committing = Instant::now();
    // Everything this group locks, it has: the next one of this tenant can wait for nothing but this commit.
    drop(turn);
    session.commit_before_cleaning().await?;
    apply.metrics.group(group.len(), committing.elapsed(), began.elapsed());
    let endings = endings.into_iter().map(|ending| ending.since(began)).collect();
    Ok((endings, session))
}

/// Claims, runs and settles within the open transaction; answers in the order of the submissions.
async fn fill(apply: &Apply, session: &mut Session, submissions: &[&Submission]) -> Result<Vec<Ending>, Error> {
    // The queue gives out groups of one tenant.
    let Some(tenant) = submissions.first().map(|submission| &submission.tenant) else {
        return Ok(Vec::new());
    };
    let won = claim::perform_all(session, tenant, apply.settings.max_result_bytes, submissions).await?;
    let mut endings = Vec::with_capacity(submissions.len());
    let (mut refused, mut withdrawn, mut lost) = (Vec::new(), Vec::new(), Vec::new());
    for (submission, won) in submissions.iter().copied().zip(won) {
        let id = submission.id.as_str();
        endings.push(match won.map(|won| (won.times, won.applied)) {
            Some((times, Applied::Returned(receipt))) => {
                Decided::new(submission, times, StateName::Succeeded, receipt).ending()
            }
            Some((times, Applied::Refused(raised))) => {
                let receipt = Receipt::failed(described(submission, times), &raised);
                let decided = Decided::new(submission, times, StateName::Failed, receipt);
                refused.push((decided.clone(), raised));
                decided.ending()
            }
            Some((_, Applied::Passing(_))) => {
                withdrawn.push(id);
                Ending::Alone
            }
            Some((_, Applied::Broken(raised))) => {
                withdrawn.push(id);
                let id = submission.id.clone();
                Ending::Answer(Outcome::HandlerBroken { id, raised })
            }
            None => {
                lost.push(id);
                Ending::Alone
            }
        });
    }
    if !refused.is_empty() {
        store_refused(session, tenant, &refused).await?;
    }
    if !withdrawn.is_empty() {
        claim::withdraw(session, tenant, &withdrawn).await?;
    }
    if !lost.is_empty() {
        tell(session, tenant, &lost, submissions, &mut endings).await?;
    }
    Ok(endings)
}

/// Tells the losers of the claim what is there: they are read in a statement of their own, which sees the winners'
/// commits.
async fn tell(
    session: &mut Session,
    tenant: &Tenant,
    lost: &[&str],
    submissions: &[&Submission],
    endings: &mut [Ending],
) -> Result<(), Error> {
    for operation in read::existing(session, tenant, lost).await? {
        let place = submissions.binary_search_by(|submission| submission.id.cmp(&operation.id));
        if let Ok(place) = place
            && let (Some(submission), Some(ending)) = (submissions.get(place), endings.get_mut(place))
        {
            *ending = Ending::Answer(Outcome::of(&operation, &submission.fingerprint));
        }
    }
    Ok(())
}

/// A winner whose handler has decided.
#[derive(Clone)]
struct Decided<'a> {
    submission: &'a Submission,
    times: Times,
    state: StateName,
    receipt: Arc<Receipt>,
}

/// Stores refusals; the claims say `succeeded` until then.
async fn store_refused(
    session: &mut Session,
    tenant: &Tenant,
    refused: &[(Decided<'_>, Raised)],
) -> Result<(), DatabaseError> {
    let actors: Vec<String> = refused
        .iter()
        .map(|(decided, _)| decided.submission.requester())
        .collect();
    let settled: Vec<_> = refused
        .iter()
        .zip(&actors)
        .map(|((decided, raised), actor)| decided.settled(actor, raised))
        .collect();
    settlement::store_all(session, tenant, &settled).await?;
    let ids: Vec<&str> = refused
        .iter()
        .map(|(decided, _)| decided.submission.id.as_str())
        .collect();
    settlement::mark_failed(session, tenant, &ids).await
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
    fn new(submission: &'a Submission, times: Times, state: StateName, receipt: Receipt) -> Self {
        Self {
            submission,
            times,
            state,
            receipt: Arc::new(receipt),
        }
    }

    fn settled<'b>(&'b self, actor: &'b str, raised: &'b Raised) -> settlement::Settled<'b> {
        settlement::Settled {
            id: &self.submission.id,
            state: self.state,
            version: 1,
            attempt: 1,
            receipt: &self.receipt,
            settled_at: self.times.settled_at,
            expires_at: self.times.expires_at,
            actor,
            raised: Some(raised),
        }
    }

    fn ending(self) -> Ending {
        Ending::Answer(Outcome::Settled {
            operation: Known::submitted(self.submission, Some(self.state)),
            receipt: self.receipt,
            expires_at: self.times.expires_at,
            serve_until: after(self.times.expires_at - self.times.settled_at),
            replayed: false,
        })
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

fn log_failure(error: &Error, group: &[Member]) {
    let members = group.len();
    match error {
        Error::Database(error) if error.is_cancelled() => {
            let handlers: BTreeSet<String> = group
                .iter()
                .map(|member| member.submission.kind.handler.to_string())
                .collect();
            tracing::warn!(
                members,
                ?handlers,
                "the handlers of a group took too long together and were rolled back; its members run alone"
            );
        }
        Error::Database(error) => log_trouble(error, members),
        Error::Read(error) => tracing::error!(error = %error, members, "group rolled back"),
    }
}
