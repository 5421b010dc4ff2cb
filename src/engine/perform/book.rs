//! Claims and settlements of forwarded operations, written in groups: what waits is committed together.
//!
//! An operation costs two commits, one before its request leaves and one after its answer is complete. Those of many
//! operations share theirs. A group holds no business locks, so its members only wait for each other's disk.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::sync::oneshot;
use tokio::time::Instant;
use tokio_util::task::TaskTracker;
use uuid::Uuid;

use crate::engine::queue::{Full, Queue, Queued};
use crate::ledger::forward::{self, Answered, Forward};
use crate::ledger::operation::Operation;
use crate::ledger::operation_id::OperationId;
use crate::ledger::plan::Times;
use crate::ledger::read;
use crate::ledger::tenant::Tenant;
use crate::postgres::error::{Error, Trouble};
use crate::postgres::pool::Pool;
use crate::postgres::session::{Limits, Session};
use crate::telemetry::metrics::Metrics;

const LIMITS: Limits = Limits {
    lock: Duration::from_secs(1),
    statement: Duration::from_secs(5),
};

/// Most entries of a group.
const LARGEST_GROUP: usize = 64;

/// Connections that write groups of claims, and as many for settlements.
const WRITERS: usize = 2;

/// What came of a claim.
#[derive(Debug)]
pub enum Claim {
    /// It is ours, and committed; the database was asked for it at this moment.
    Won { asked: Instant },
    /// The id is known.
    Lost(Box<Operation>),
    /// A rival's claim is not committed yet.
    Contended,
}

/// Why an entry was not written.
#[derive(Debug)]
pub enum Unwritten {
    /// Too much is waiting; nothing was written.
    Busy,
    Stopping,
    /// The database failed. What was written may stand or not.
    Unclear(Trouble),
}

/// What waits to be written: claims apart from settlements, so that each group is one statement.
trait Entry: Queued + Send + Sized + 'static {
    type Outcome: Send;

    fn id(&self) -> &OperationId;

    /// Writes these, which are of one tenant and in order of id; what came of each.
    fn write_all(
        book: &Book,
        session: &mut Session,
        tenant: &Tenant,
        group: &[Self],
    ) -> impl Future<Output = Result<Vec<Self::Outcome>, Error>> + Send;

    fn answer(self, outcome: Self::Outcome);

    fn fail(self, trouble: Trouble);
}

struct Claiming {
    forward: Arc<Forward>,
    reply: oneshot::Sender<Result<Claim, Unwritten>>,
}

struct Settling {
    tenant: Tenant,
    answered: Box<Answered>,
    reply: oneshot::Sender<Result<Option<Times>, Unwritten>>,
}

pub struct Book {
    pool: Pool,
    claims: Queue<Claiming>,
    settlements: Queue<Settling>,
    instance: Uuid,
    metrics: Arc<Metrics>,
    /// No more claims; settlements are taken to the end.
    closed: AtomicBool,
    /// Apart from all other tasks: they end last, when nobody is left who could have something to write.
    writers: TaskTracker,
}

impl Book {
    pub fn open(pool: Pool, capacity: usize, instance: Uuid, metrics: Arc<Metrics>) -> Arc<Self> {
        let book = Arc::new(Self {
            pool,
            claims: Queue::new(capacity),
            settlements: Queue::new(capacity),
            instance,
            metrics,
            closed: AtomicBool::new(false),
            writers: TaskTracker::new(),
        });
        for _ in 0..WRITERS {
            book.writers.spawn(write(book.clone(), |book| &book.claims));
            book.writers.spawn(write(book.clone(), |book| &book.settlements));
        }
        book
    }

    /// Claims the operation, if its id is free.
    pub async fn claim(&self, forward: Arc<Forward>) -> Result<Claim, Unwritten> {
        if self.closed.load(Ordering::Relaxed) {
            return Err(Unwritten::Stopping);
        }
        let (reply, written) = oneshot::channel();
        self.claims
            .push(Claiming { forward, reply })
            .map_err(|full| match full {
                Full::Capacity(_) => Unwritten::Busy,
                Full::Closed(_) => Unwritten::Stopping,
            })?;
        written.await.unwrap_or(Err(Unwritten::Stopping))
    }

    /// Settles an attempt; `None` if its claim does not stand any more.
    pub async fn settle(&self, tenant: &Tenant, answered: Answered) -> Result<Option<Times>, Unwritten> {
        let (reply, written) = oneshot::channel();
        let entry = Settling {
            tenant: tenant.clone(),
            answered: Box::new(answered),
            reply,
        };
        // The answer is there and must not be lost for want of a place.
        self.settlements.put_back(vec![entry]);
        written.await.unwrap_or(Err(Unwritten::Stopping))
    }

    /// Takes no more claims.
    pub fn close(&self) {
        self.closed.store(true, Ordering::Relaxed);
    }

    /// Ends when everything is written. Called when nobody writes any more.
    pub async fn finish(&self) {
        self.claims.close();
        self.settlements.close();
        self.writers.close();
        self.writers.wait().await;
    }
}

async fn write<E: Entry>(book: Arc<Book>, queue: fn(&Book) -> &Queue<E>) {
    let mut kept = None;
    while let Some((group, turn)) = queue(&book).take(LARGEST_GROUP).await {
        let (group, later) = apart(group);
        let written = commit(&book, &mut kept, &group).await;
        drop(turn);
        queue(&book).put_back(later);
        match written {
            Ok(written) => answer(group, written),
            Err(error) => {
                kept = None;
                log(&error, group.len());
                one_by_one(&book, group, &error).await;
            }
        }
    }
}

/// Entries in order of id, and those whose id another entry of the group has: they go into the next one.
fn apart<E: Entry>(group: Vec<E>) -> (Vec<E>, Vec<E>) {
    let mut seen = HashSet::with_capacity(group.len());
    let (mut first, later): (Vec<_>, Vec<_>) = group.into_iter().partition(|entry| seen.insert(entry.id().clone()));
    first.sort_unstable_by(|left, right| left.id().cmp(right.id()));
    (first, later)
}

/// One entry that cannot be written must not keep the others from it. That is only so for what the server has refused:
/// if the connection was lost, the whole group is in doubt. A claim that stands after all would meet itself then, and be
/// taken for a rival's that somebody sends.
async fn one_by_one<E: Entry>(book: &Book, group: Vec<E>, error: &Error) {
    let together = group.len() == 1 || !error.is_refused();
    for entry in group {
        if together {
            entry.fail(error.trouble());
            continue;
        }
        let entry = vec![entry];
        match commit(book, &mut None, &entry).await {
            Ok(written) => answer(entry, written),
            Err(error) => {
                log(&error, 1);
                entry.into_iter().for_each(|entry| entry.fail(error.trouble()));
            }
        }
    }
}

async fn commit<E: Entry>(book: &Book, kept: &mut Option<Session>, group: &[E]) -> Result<Vec<E::Outcome>, Error> {
    let Some(tenant) = group.first().map(|entry| entry.tenant().clone()) else {
        return Ok(Vec::new());
    };
    let began = Instant::now();
    let mut session = match kept.take() {
        Some(session) => session,
        None => book.pool.session().await?,
    };
    let bytes = group.iter().map(Queued::bytes).sum();
    let limits = LIMITS.with_time_for(bytes);
    // One statement is a transaction by itself: a round trip in place of three.
    if session.named_statements() {
        session.expect_answers(limits);
    } else {
        session.begin(limits).await?;
    }
    let written = E::write_all(book, &mut session, &tenant, group).await?;
    let committing = Instant::now();
    session.finish_if_begun().await?;
    book.metrics.group(group.len(), committing.elapsed(), began.elapsed());
    session.release_buffers(bytes);
    *kept = Some(session);
    Ok(written)
}

impl Queued for Claiming {
    fn tenant(&self) -> &Tenant {
        &self.forward.tenant
    }

    fn bytes(&self) -> usize {
        self.forward.payload.len() + self.forward.request.body.len()
    }
}

impl Entry for Claiming {
    type Outcome = Claim;

    fn id(&self) -> &OperationId {
        &self.forward.id
    }

    async fn write_all(
        book: &Book,
        session: &mut Session,
        tenant: &Tenant,
        group: &[Self],
    ) -> Result<Vec<Claim>, Error> {
        let claims: Vec<_> = group.iter().map(|entry| &*entry.forward).collect();
        let asked = Instant::now();
        let claimed = forward::claim_all(session, tenant, book.instance, LIMITS.lock, &claims).await?;
        let ids = claims.iter().map(|forward| forward.id.as_str());
        let losers: Vec<_> = ids.clone().filter(|id| !claimed.contains_key(*id)).collect();
        let mut known = match losers.is_empty() {
            true => HashMap::new(),
            false => known(session, tenant, &losers).await?,
        };
        let outcome = |id| match (claimed.contains_key(id), known.remove(id)) {
            (true, _) => Claim::Won { asked },
            (false, Some(operation)) => Claim::Lost(Box::new(operation)),
            // Gone again between the two statements.
            (false, None) => Claim::Contended,
        };
        Ok(ids.map(outcome).collect())
    }

    fn answer(self, outcome: Claim) {
        // Nobody may be waiting any more.
        let _ = self.reply.send(Ok(outcome));
    }

    fn fail(self, trouble: Trouble) {
        let _ = self.reply.send(match trouble {
            // The only lock a claim can wait for is a rival's claim of the same id.
            Trouble::LockTimeout => Ok(Claim::Contended),
            Trouble::Passing | Trouble::Lasting => Err(Unwritten::Unclear(trouble)),
        });
    }
}

impl Queued for Settling {
    fn tenant(&self) -> &Tenant {
        &self.tenant
    }

    fn bytes(&self) -> usize {
        self.answered.receipt.body.len()
    }
}

impl Entry for Settling {
    type Outcome = Option<Times>;

    fn id(&self) -> &OperationId {
        &self.answered.id
    }

    async fn write_all(
        book: &Book,
        session: &mut Session,
        tenant: &Tenant,
        group: &[Self],
    ) -> Result<Vec<Option<Times>>, Error> {
        let answered: Vec<_> = group.iter().map(|entry| &*entry.answered).collect();
        let mut settled = forward::settle_all(session, tenant, book.instance, LIMITS.lock, &answered).await?;
        Ok(answered
            .iter()
            .map(|answered| settled.remove(answered.id.as_str()))
            .collect())
    }

    fn answer(self, outcome: Option<Times>) {
        // Nobody may be waiting any more.
        let _ = self.reply.send(Ok(outcome));
    }

    fn fail(self, trouble: Trouble) {
        let _ = self.reply.send(Err(Unwritten::Unclear(trouble)));
    }
}

/// A statement of its own, which sees the winners' commits.
async fn known(session: &mut Session, tenant: &Tenant, ids: &[&str]) -> Result<HashMap<String, Operation>, Error> {
    match read::existing(session, tenant, ids).await {
        Ok(found) => Ok(found.into_iter().map(|one| (one.id.as_str().to_owned(), one)).collect()),
        Err(read::Error::Database(error)) => Err(error),
        Err(error @ read::Error::Impossible { .. }) => {
            tracing::error!(error = %error, "cannot read an operation");
            Ok(HashMap::new())
        }
    }
}

fn answer<E: Entry>(group: Vec<E>, outcomes: Vec<E::Outcome>) {
    for (entry, outcome) in group.into_iter().zip(outcomes) {
        entry.answer(outcome);
    }
}

fn log(error: &Error, entries: usize) {
    let cause = std::error::Error::source(error)
        .map(ToString::to_string)
        .unwrap_or_default();
    tracing::warn!(error = %error, cause, entries, "transaction rolled back");
}
