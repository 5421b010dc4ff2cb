//! Claims and settlements of forwarded operations, written in groups: what waits is committed together.
//!
//! An operation costs two commits, one before its request leaves and one after its answer is complete. Those of many
//! operations share theirs. A group holds no business locks, so its members only wait for each other's disk.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use time::OffsetDateTime;
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

/// Connections that write groups.
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

enum Entry {
    Claim {
        forward: Arc<Forward>,
        reply: oneshot::Sender<Result<Claim, Unwritten>>,
    },
    Settle {
        tenant: Tenant,
        answered: Box<Answered>,
        reply: oneshot::Sender<Result<Option<Times>, Unwritten>>,
    },
}

impl Queued for Entry {
    fn tenant(&self) -> &Tenant {
        match self {
            Self::Claim { forward, .. } => &forward.tenant,
            Self::Settle { tenant, .. } => tenant,
        }
    }
}

impl Entry {
    fn id(&self) -> &OperationId {
        match self {
            Self::Claim { forward, .. } => &forward.id,
            Self::Settle { answered, .. } => &answered.id,
        }
    }

    fn fail(self, why: Unwritten) {
        // Nobody may be waiting any more.
        match self {
            Self::Claim { reply, .. } => drop(reply.send(Err(why))),
            Self::Settle { reply, .. } => drop(reply.send(Err(why))),
        }
    }
}

pub struct Book {
    pool: Pool,
    queue: Queue<Entry>,
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
            queue: Queue::new(capacity),
            instance,
            metrics,
            closed: AtomicBool::new(false),
            writers: TaskTracker::new(),
        });
        for _ in 0..WRITERS {
            book.writers.spawn(write(book.clone()));
        }
        book
    }

    /// Claims the operation, if its id is free.
    pub async fn claim(&self, forward: Arc<Forward>) -> Result<Claim, Unwritten> {
        if self.closed.load(Ordering::Relaxed) {
            return Err(Unwritten::Stopping);
        }
        let (reply, written) = oneshot::channel();
        self.enter(Entry::Claim { forward, reply })?;
        written.await.unwrap_or(Err(Unwritten::Stopping))
    }

    /// Settles an attempt; `None` if its claim does not stand any more.
    pub async fn settle(&self, tenant: &Tenant, answered: Answered) -> Result<Option<Times>, Unwritten> {
        let (reply, written) = oneshot::channel();
        let entry = Entry::Settle {
            tenant: tenant.clone(),
            answered: Box::new(answered),
            reply,
        };
        // The answer is there and must not be lost for want of a place.
        self.queue.put_back(vec![entry]);
        written.await.unwrap_or(Err(Unwritten::Stopping))
    }

    /// Takes no more claims.
    pub fn close(&self) {
        self.closed.store(true, Ordering::Relaxed);
    }

    /// Ends when everything is written. Called when nobody writes any more.
    pub async fn finish(&self) {
        self.queue.close();
        self.writers.close();
        self.writers.wait().await;
    }

    fn enter(&self, entry: Entry) -> Result<(), Unwritten> {
        self.queue.push(entry).map_err(|full| match full {
            Full::Capacity(_) => Unwritten::Busy,
            Full::Closed(_) => Unwritten::Stopping,
        })
    }
}

async fn write(book: Arc<Book>) {
    let mut kept = None;
    while let Some((group, turn)) = book.queue.take(LARGEST_GROUP).await {
        let (group, later) = apart(group);
        let written = commit(&book, &mut kept, &group, || drop(turn)).await;
        book.queue.put_back(later);
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
fn apart(group: Vec<Entry>) -> (Vec<Entry>, Vec<Entry>) {
    let mut seen = HashSet::with_capacity(group.len());
    let (mut first, later): (Vec<_>, Vec<_>) = group.into_iter().partition(|entry| seen.insert(entry.id().clone()));
    first.sort_unstable_by(|left, right| left.id().cmp(right.id()));
    (first, later)
}

/// One entry that cannot be written must not keep the others from it. That is only so for what the server has refused:
/// if the connection was lost, the whole group is in doubt. A claim that stands after all would meet itself then, and be
/// taken for a rival's that somebody sends.
async fn one_by_one(book: &Book, group: Vec<Entry>, error: &Error) {
    let together = group.len() == 1 || !error.is_refused();
    for entry in group {
        if together {
            fail(entry, error.trouble());
            continue;
        }
        let entry = vec![entry];
        match commit(book, &mut None, &entry, || ()).await {
            Ok(written) => answer(entry, written),
            Err(error) => {
                log(&error, 1);
                entry.into_iter().for_each(|entry| fail(entry, error.trouble()));
            }
        }
    }
}

fn fail(entry: Entry, trouble: Trouble) {
    match (entry, trouble) {
        // The only lock a claim can wait for is a rival's claim of the same id.
        (Entry::Claim { reply, .. }, Trouble::LockTimeout) => drop(reply.send(Ok(Claim::Contended))),
        (entry, trouble) => entry.fail(Unwritten::Unclear(trouble)),
    }
}

struct Written {
    asked: Instant,
    claimed: HashMap<String, OffsetDateTime>,
    known: HashMap<String, Operation>,
    settled: HashMap<String, Times>,
}

impl Written {
    fn nothing_yet() -> Self {
        Self {
            asked: Instant::now(),
            claimed: HashMap::new(),
            known: HashMap::new(),
            settled: HashMap::new(),
        }
    }
}

async fn commit(
    book: &Book,
    kept: &mut Option<Session>,
    group: &[Entry],
    before_commit: impl FnOnce(),
) -> Result<Written, Error> {
    let began = Instant::now();
    let mut session = match kept.take() {
        Some(session) => session,
        None => book.pool.session().await?,
    };
    let claims = group
        .iter()
        .filter(|entry| matches!(entry, Entry::Claim { .. }))
        .count();
    let one_statement = claims == 0 || claims == group.len();
    // One statement is a transaction by itself: a round trip in place of three.
    if one_statement && session.named_statements() {
        session.expect_answers(LIMITS);
    } else {
        session.begin(LIMITS).await?;
    }
    let written = fill(book, &mut session, group).await?;
    let committing = Instant::now();
    before_commit();
    session.finish_if_begun().await?;
    book.metrics.group(group.len(), committing.elapsed(), began.elapsed());
    *kept = Some(session);
    Ok(written)
}

async fn fill(book: &Book, session: &mut Session, group: &[Entry]) -> Result<Written, Error> {
    let mut written = Written::nothing_yet();
    let Some(tenant) = group.first().map(|entry| entry.tenant().clone()) else {
        return Ok(written);
    };
    let (mut claims, mut settlements) = (Vec::new(), Vec::new());
    for entry in group {
        match entry {
            Entry::Claim { forward, .. } => claims.push(&**forward),
            Entry::Settle { answered, .. } => settlements.push(&**answered),
        }
    }
    if !settlements.is_empty() {
        written.settled = forward::settle_all(session, &tenant, book.instance, LIMITS.lock, &settlements).await?;
    }
    if !claims.is_empty() {
        written.claimed = forward::claim_all(session, &tenant, book.instance, LIMITS.lock, &claims).await?;
        let losers: Vec<&str> = claims
            .iter()
            .map(|forward| forward.id.as_str())
            .filter(|id| !written.claimed.contains_key(*id))
            .collect();
        if !losers.is_empty() {
            written.known = known(session, &tenant, &losers).await?;
        }
    }
    Ok(written)
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

fn answer(group: Vec<Entry>, mut written: Written) {
    for entry in group {
        let id = entry.id().as_str().to_owned();
        // Nobody may be waiting any more.
        match entry {
            Entry::Claim { reply, .. } => {
                let claim = match (written.claimed.remove(&id), written.known.remove(&id)) {
                    (Some(_), _) => Claim::Won { asked: written.asked },
                    (None, Some(operation)) => Claim::Lost(Box::new(operation)),
                    // Gone again between the two statements.
                    (None, None) => Claim::Contended,
                };
                drop(reply.send(Ok(claim)));
            }
            Entry::Settle { reply, .. } => drop(reply.send(Ok(written.settled.remove(&id)))),
        }
    }
}

fn log(error: &Error, entries: usize) {
    let cause = std::error::Error::source(error)
        .map(ToString::to_string)
        .unwrap_or_default();
    tracing::warn!(error = %error, cause, entries, "transaction rolled back");
}
