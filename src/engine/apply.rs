//! Group commit of in-database operations, and the connections it happens on.
//!
//! Workers take whatever waits, one tenant at a time, and run a handful of set-based statements: claim all, read what
//! was there already, run the winners' handlers, store all receipts, commit. Each operation is still atomic with its own
//! receipt: a refusal undoes its own sub-transaction, a broken handler takes its claim back, and anything that ends the
//! whole transaction (a deadlock, a time-out, a lost connection) splits the group: its members then run alone (`alone`).
//!
//! Nothing here runs on a caller's future. A member carries a channel for its answer; a caller that has gone away is
//! no reason to stop.

mod alone;
mod group;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::{Semaphore, oneshot, watch};
use tokio::time::Instant;
use tokio_util::task::TaskTracker;
use uuid::Uuid;

use super::outcome::{Known, Outcome, Refusal};
use super::queue::{Full, Queue, Queued};
use super::replays::Replays;
use crate::ledger::operation::StateName;
use crate::ledger::operation_id::OperationId;
use crate::ledger::submission::Submission;
use crate::ledger::tenant::Tenant;
use crate::postgres::error::Error;
use crate::postgres::pool::Pool;
use crate::postgres::session::Limits;
use crate::telemetry::metrics::Metrics;

/// Most members of a group: one sub-transaction each, and a backend caches 64 of them before every snapshot in the
/// server gets slower (PostgreSQL, "subtrans").
pub const LARGEST_GROUP: usize = 64;

/// How groups are formed and bounded.
#[derive(Debug, Clone, Copy)]
pub struct Settings {
    pub workers: usize,
    pub largest_group: usize,
    /// Longest queue, over all tenants.
    pub queue: usize,
    /// Operations that run outside groups at the same time.
    pub alone: usize,
    /// Longest wait for a lock in a group; then its members run alone.
    pub group_lock: Duration,
    /// Longest statement of a group; then its members run alone.
    pub group_statement: Duration,
    /// How long a delivery waits for another one of the same id that is being run.
    pub duplicate_wait: Duration,
    /// The longest result that a handler may return.
    pub max_result_bytes: i32,
}

impl Settings {
    fn group_limits(&self) -> Limits {
        Limits {
            lock: self.group_lock,
            statement: self.group_statement,
        }
    }
}

/// What is to be done with a submission.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Work {
    /// Claim it, and run it if the claim is won.
    First,
    /// Run it: it is stored, and this process has claimed this attempt of it.
    Claimed { attempt: i32 },
}

type Reply = oneshot::Sender<Result<Outcome, Refusal>>;

/// A delivery on its way to an outcome.
pub struct Member {
    submission: Arc<Submission>,
    work: Work,
    deadline: Instant,
    reply: Reply,
}

impl Member {
    pub fn id(&self) -> &OperationId {
        &self.submission.id
    }

    fn answer(self, outcome: Result<Outcome, Refusal>) {
        // The caller may have gone away; what was stored stays.
        let _ = self.reply.send(outcome);
    }
}

impl Queued for Member {
    fn tenant(&self) -> &Tenant {
        &self.submission.tenant
    }

    fn bytes(&self) -> usize {
        self.submission.payload.len() + self.submission.canonical.len()
    }
}

/// The workers' shared state.
pub struct Apply {
    pool: Pool,
    queue: Queue<Member>,
    settings: Settings,
    instance: Uuid,
    /// `instance:<uuid>`, as history names this process.
    actor: String,
    alone: Arc<Semaphore>,
    running_alone: Mutex<HashMap<(Tenant, OperationId), Running>>,
    replays: Arc<Replays>,
    metrics: Arc<Metrics>,
    tasks: TaskTracker,
}

/// An operation that runs alone here or waits to, for duplicates that arrive meanwhile.
#[derive(Clone)]
struct Running {
    /// Its state is `None` unless it was stored before it runs.
    known: Known,
    finished: watch::Receiver<()>,
}

impl Apply {
    /// Starts the workers on `tasks`.
    pub fn start(
        pool: Pool,
        settings: Settings,
        instance: Uuid,
        replays: Arc<Replays>,
        metrics: Arc<Metrics>,
        tasks: TaskTracker,
    ) -> Arc<Self> {
        let apply = Arc::new(Self {
            pool,
            queue: Queue::new(settings.queue),
            settings,
            instance,
            actor: format!("instance:{instance}"),
            alone: Arc::new(Semaphore::new(settings.alone)),
            running_alone: Mutex::default(),
            replays,
            metrics,
            tasks,
        });
        for _ in 0..settings.workers {
            apply.tasks.spawn(group::work(apply.clone()));
        }
        apply
    }

    /// Runs one operation to its outcome. Dropping the future abandons the wait, never the operation.
    pub async fn run(self: &Arc<Self>, submission: Arc<Submission>, work: Work) -> Result<Outcome, Refusal> {
        let deadline = Instant::now() + submission.kind.timeout;
        let until = Instant::now() + self.settings.duplicate_wait;
        let (reply, outcome) = oneshot::channel();
        let member = Member {
            submission,
            work,
            deadline,
            reply,
        };
        loop {
            if work == Work::First
                && let Some(outcome) = self.wait_for_twin(&member.submission, until).await
            {
                return Ok(outcome);
            }
            if work == Work::First && member.submission.kind.group_commit {
                self.queue.push(member).map_err(|full| match full {
                    Full::Capacity(_) => Refusal::Busy {
                        retry_after: Duration::from_secs(1),
                    },
                    Full::Closed(_) => Refusal::Stopping,
                })?;
                break;
            }
            if self.lock_running().len() >= self.settings.queue {
                return Err(Refusal::Busy {
                    retry_after: Duration::from_secs(1),
                });
            }
            // From here on duplicates wait for this one, and take none of the few places where operations run alone.
            let registered = Registered::new(self, &member.submission, work);
            if work == Work::First && !registered.is_first() {
                continue;
            }
            self.tasks.spawn(alone::run(self.clone(), member, registered));
            break;
        }
        // The sender is dropped unused only when a worker's task ends early, which only stopping does.
        outcome.await.unwrap_or(Err(Refusal::Stopping))
    }

    /// What a delivery that does not wait is told of a twin that runs alone in this process and is not stored yet.
    pub fn twin(&self, submission: &Submission) -> Option<Outcome> {
        let key = (submission.tenant.clone(), submission.id.clone());
        let twin = self
            .lock_running()
            .get(&key)
            .filter(|twin| twin.known.state.is_none())
            .cloned()?;
        Some(
            twin.mismatch(submission)
                .unwrap_or(Outcome::InProgress { operation: twin.known }),
        )
    }

    /// How many deliveries wait for a group.
    pub fn queued(&self) -> usize {
        self.queue.len()
    }

    /// Operations that run alone or wait to.
    pub fn running_alone(&self) -> usize {
        self.lock_running().len()
    }

    /// Takes no more operations; those accepted are finished.
    pub fn close(&self) {
        self.queue.close();
    }

    /// A delivery whose twin runs alone in this process waits for it here, not on a lock in the database.
    async fn wait_for_twin(&self, submission: &Submission, until: Instant) -> Option<Outcome> {
        loop {
            let key = (submission.tenant.clone(), submission.id.clone());
            let mut twin = self.lock_running().get(&key).cloned()?;
            if let Some(mismatch) = twin.mismatch(submission) {
                return Some(mismatch);
            }
            if tokio::time::timeout_at(until, twin.finished.changed()).await.is_err() {
                return Some(Outcome::InProgress { operation: twin.known });
            }
        }
    }

    fn lock_running(&self) -> MutexGuard<'_, HashMap<(Tenant, OperationId), Running>> {
        self.running_alone.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Running {
    fn mismatch(&self, submission: &Submission) -> Option<Outcome> {
        let differs = self.known.fingerprint != submission.fingerprint;
        differs.then(|| Outcome::Mismatch {
            original: self.known.clone(),
            created_at: None,
            requested: submission.fingerprint,
        })
    }
}

/// Lets duplicates see that this operation runs here; ends when it is dropped.
struct Registered {
    apply: Arc<Apply>,
    key: (Tenant, OperationId),
    // Dropping it wakes everybody who waits.
    finished: Option<watch::Sender<()>>,
}

impl Registered {
    fn new(apply: &Arc<Apply>, submission: &Submission, work: Work) -> Self {
        let key = (submission.tenant.clone(), submission.id.clone());
        let (finished, receiver) = watch::channel(());
        let known = Known::submitted(submission, (work != Work::First).then_some(StateName::Running));
        let mut running = apply.lock_running();
        // Members of a group that was split may have a twin here already; that one stays the one to wait for.
        let vacant = !running.contains_key(&key);
        if vacant {
            running.insert(
                key.clone(),
                Running {
                    known,
                    finished: receiver,
                },
            );
        }
        drop(running);
        Self {
            apply: apply.clone(),
            key,
            finished: vacant.then_some(finished),
        }
    }

    /// Whether duplicates wait for this one.
    fn is_first(&self) -> bool {
        self.finished.is_some()
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        if self.finished.is_some() {
            self.apply.lock_running().remove(&self.key);
        }
    }
}

/// Logs a failed transaction once, where it is handled.
fn log_trouble(error: &Error, members: usize) {
    let cause = std::error::Error::source(error)
        .map(ToString::to_string)
        .unwrap_or_default();
    tracing::warn!(error = %error, cause, members, "transaction rolled back");
}

#[cfg(test)]
pub fn test_member(tenant: &str, id: &str) -> Member {
    use crate::ledger::fingerprint::Fingerprint;
    use crate::ledger::kind::Kind;
    let kind = Kind {
        name: "test".into(),
        handler: "test.test".parse().unwrap(),
        schema: None,
        retention: Duration::from_secs(60),
        timeout: Duration::from_secs(1),
        group_commit: true,
    };
    let submission = Submission {
        tenant: tenant.parse().unwrap(),
        id: OperationId::parse(id).unwrap(),
        fingerprint: Fingerprint::of_canonical("test", b"1"),
        kind: Arc::new(kind),
        payload: "1".into(),
        canonical: "1".into(),
        run: None,
        external_reference: None,
        requested_by: "key".into(),
        trace_parent: None,
    };
    Member {
        submission: Arc::new(submission),
        work: Work::First,
        deadline: Instant::now(),
        reply: oneshot::channel().0,
    }
}
