//! Claim, send, settle: the only path on which a byte leaves for a downstream.
//!
//! Connect, claim, send, in this order: what fails before the claim has sent nothing and stores nothing, and a crash can
//! leave an unknown only between the claim's commit and the settlement's. From the claim on everything happens on a task
//! of its own; the caller waits for a value.

mod attempt;
mod book;
mod decide;
mod places;
mod planned;
mod proof;
mod recover;
pub mod resolve;
mod undo;

use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard};
use std::time::Duration;

use bytes::Bytes;
use http::uri::PathAndQuery;
use http::{HeaderMap, HeaderName, HeaderValue, Method};
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use uuid::Uuid;

use self::attempt::{Attempt, Reply};
use self::book::{Book, Claim, Unwritten};
use self::places::{Doubts, Place, Places};
use super::intake::refusal;
use super::outcome::{Known, Outcome, Refusal};
use super::replays::Replays;
use crate::ledger::fingerprint::Fingerprint;
use crate::ledger::forward::{self, Forward, Request};
use crate::ledger::operation::{Operation, StateName};
use crate::ledger::operation_id::OperationId;
use crate::ledger::plan::{Fence, Seen};
use crate::ledger::read;
use crate::ledger::reconciliation::{self, Note};
use crate::ledger::tenant::Tenant;
use crate::outbound::downstream::{Downstream, Route};
use crate::outbound::headers;
use crate::outbound::registry::{DownstreamKinds, Downstreams};
use crate::outbound::send::{self, Failure, NotSent, Outbound, Ready};
use crate::postgres::error::{Error as DatabaseError, Trouble};
use crate::postgres::pool::Pool;
use crate::postgres::session::{Limits, Session};
use crate::telemetry::metrics::Metrics;

/// Limits of the short statements here.
const LIMITS: Limits = Limits {
    lock: Duration::from_secs(2),
    statement: Duration::from_secs(5),
};

/// How long a claim that was given up may take to arrive at the database after all.
const ARRIVES_WITHIN: Duration = Duration::from_secs(60);

/// What a delivery gets.
pub enum Delivered {
    /// What this delivery's own attempt came to.
    First(Outcome),
    /// What became of an operation that was known before.
    Known(Outcome),
    /// The answer as it comes.
    Passing(Passing),
}

/// An answer on its way.
pub struct Passing {
    /// `None` for a request that passes through without being an operation.
    pub operation: Option<Known>,
    pub status: u16,
    pub headers: Vec<(String, String)>,
    pub body: mpsc::Receiver<Piece>,
}

/// A piece of a body on its way. A body whose pieces stop without an end was cut off.
#[derive(Debug)]
pub enum Piece {
    Data(Bytes),
    End,
}

pub struct Perform {
    pub pool: Pool,
    pub outbound: Outbound,
    pub replays: Arc<Replays>,
    pub metrics: Arc<Metrics>,
    pub tasks: TaskTracker,
    pub instance: Uuid,
    declared: RwLock<Declared>,
    book: Arc<Book>,
    /// A sweep must not come upon what a timer has woken, or what takes long.
    taking_up: Places,
    /// From a claim to the moment at which it is known to stand or not: until then nobody else here may claim the id.
    claiming: Places,
    /// Claims that may still arrive at the database although nobody waits for them.
    doubts: Doubts,
    /// Nothing that is due later is waited for.
    stop: CancellationToken,
    retention: Duration,
}

impl Perform {
    pub fn start(
        pool: Pool,
        replays: Arc<Replays>,
        metrics: Arc<Metrics>,
        tasks: TaskTracker,
        instance: Uuid,
        settings: Settings,
    ) -> Arc<Self> {
        let book = Book::open(pool.clone(), settings.queue, instance, metrics.clone());
        Arc::new(Self {
            pool,
            outbound: Outbound::default(),
            replays,
            metrics,
            tasks,
            instance,
            declared: RwLock::new(settings.declared),
            book,
            taking_up: Places::default(),
            claiming: Places::default(),
            doubts: Doubts::default(),
            stop: CancellationToken::new(),
            retention: settings.retention,
        })
    }

    /// The downstreams as they are configured now.
    pub fn downstreams(&self) -> Arc<Downstreams> {
        self.read_declared().downstreams.clone()
    }

    /// The kinds that downstreams perform, as they are configured now.
    pub fn kinds(&self) -> Arc<DownstreamKinds> {
        self.read_declared().kinds.clone()
    }

    /// Puts another configuration's downstreams and kinds in place; requests under way keep theirs.
    pub fn replace(&self, declared: Declared) {
        *self.declared.write().unwrap_or_else(PoisonError::into_inner) = declared;
    }

    fn read_declared(&self) -> RwLockReadGuard<'_, Declared> {
        self.declared.read().unwrap_or_else(PoisonError::into_inner)
    }

    /// How long receipts of proxied requests are kept.
    pub fn retention(&self) -> Duration {
        self.retention
    }

    /// The same of a kind that a downstream performs, or of a proxied request.
    fn retention_of(&self, kind: &str) -> Duration {
        self.kinds().get(kind).map_or(self.retention, |kind| kind.retention)
    }

    /// How history names this process.
    pub fn actor(&self) -> String {
        format!("instance:{}", self.instance)
    }

    /// Takes no more claims; what is under way is finished.
    pub fn close(&self) {
        self.stop.cancel();
        self.book.close();
    }

    /// Writes what is left to be written; called when everything under way has ended.
    pub async fn finish(&self) {
        self.book.finish().await;
    }

    /// Forwards an operation once, or says what became of it.
    pub async fn deliver(
        self: &Arc<Self>,
        forward: Arc<Forward>,
        downstream: Arc<Downstream>,
        route: Arc<Route>,
        respond_async: bool,
    ) -> Result<Delivered, Refusal> {
        let (tenant, id, fingerprint) = (forward.tenant.clone(), forward.id.clone(), forward.fingerprint);
        if let Some(replay) = self.replays.find(&tenant, &id, &fingerprint) {
            return Ok(Delivered::Known(replay));
        }
        // A known id needs no connection, and must be answered even if the downstream is gone.
        if !self.outbound.has_idle(&downstream)
            && let Some(operation) = Box::pin(self.operation(&tenant, &id)).await?
        {
            return Ok(Delivered::Known(Outcome::of(&operation, &fingerprint)));
        }
        let ready = match self.outbound.connect(&downstream).await {
            Ok(ready) => ready,
            Err(not_sent) => return Box::pin(self.unreachable(&forward, not_sent)).await,
        };
        let (reply, answered) = oneshot::channel();
        let sending = self
            .clone()
            .claim_and_send(forward, downstream, route, ready, reply, respond_async);
        self.tasks.spawn(sending);
        // The sender is dropped unused only when the task ends early, which only stopping does.
        answered.await.unwrap_or(Err(Refusal::Stopping))
    }

    /// Forwards a safe request, or one that is declared to need no protection: nothing is stored, and nothing repeated.
    pub async fn pass(
        self: &Arc<Self>,
        request: send::Request,
        downstream: Arc<Downstream>,
    ) -> Result<Passing, Refusal> {
        let ready = self
            .outbound
            .connect(&downstream)
            .await
            .map_err(|not_sent| not_reached(&downstream.name, not_sent))?;
        let mut answer = ready.send(request).await.map_err(|failure| match failure {
            Failure::NotSent(not_sent) => not_reached(&downstream.name, not_sent),
            Failure::Unknown(unknown) => Refusal::NoAnswer {
                downstream: downstream.name.clone(),
                cause: unknown.to_string(),
            },
        })?;
        let (pieces, body) = mpsc::channel(16);
        let passing = Passing {
            operation: None,
            status: answer.status.as_u16(),
            headers: headers::passed(&answer.headers),
            body,
        };
        // It ends when the caller goes away: dropping the answer closes its connection.
        self.tasks.spawn(async move {
            while let Some(piece) = answer.body.next().await {
                let Ok(piece) = piece else { return };
                if pieces.send(Piece::Data(piece)).await.is_err() {
                    return;
                }
            }
            drop(pieces.send(Piece::End).await);
        });
        Ok(passing)
    }

    /// The operation of that id.
    pub async fn operation(&self, tenant: &Tenant, id: &OperationId) -> Result<Option<Operation>, Refusal> {
        let mut session = self.pool.reader(LIMITS).await.map_err(|error| refusal(&error))?;
        let found = match read::one(&mut session, tenant, id).await {
            Ok(found) => found,
            Err(read::Error::Database(error)) => return Err(refusal(&error)),
            Err(error @ read::Error::Impossible { .. }) => {
                tracing::error!(error = %error, "cannot read an operation");
                return Err(Refusal::Internal);
            }
        };
        session.finish().await.map_err(|error| refusal(&error))?;
        Ok(found)
    }

    /// Waits for an operation to settle, looking ever more seldom.
    pub async fn settled_within(
        &self,
        tenant: &Tenant,
        id: &OperationId,
        fingerprint: &Fingerprint,
        mut outcome: Outcome,
        patience: Duration,
    ) -> Result<Outcome, Refusal> {
        let until = Instant::now() + patience;
        let mut pause = Duration::from_millis(50);
        while outcome.may_settle_soon() && Instant::now() < until {
            tokio::time::sleep(pause.min(until - Instant::now())).await;
            pause = (pause * 2).min(Duration::from_secs(2));
            if let Some(operation) = self.operation(tenant, id).await? {
                outcome = Outcome::of(&operation, fingerprint);
            }
        }
        Ok(outcome)
    }

    async fn unreachable(&self, forward: &Forward, not_sent: NotSent) -> Result<Delivered, Refusal> {
        if let Some(operation) = self.operation(&forward.tenant, &forward.id).await? {
            return Ok(Delivered::Known(Outcome::of(&operation, &forward.fingerprint)));
        }
        Err(not_reached(&forward.downstream, not_sent))
    }

    async fn claim_and_send(
        self: Arc<Self>,
        forward: Arc<Forward>,
        downstream: Arc<Downstream>,
        route: Arc<Route>,
        ready: Ready,
        reply: Reply,
        respond_async: bool,
    ) {
        // On the heap, and gone before the answer is waited for.
        let Some((claimed, ready, reply)) = Box::pin(self.claim(&forward, ready, reply)).await else {
            return;
        };
        let attempt = Attempt {
            perform: self.clone(),
            forward: forward.clone(),
            downstream,
            route,
            fence: self.first_fence(),
            claimed,
            age: Duration::ZERO,
            since_first_send: Duration::ZERO,
            repeated: false,
            alone: true,
            earlier_attempts: 0,
        };
        if !respond_async {
            return attempt.run(ready, Some(reply)).await;
        }
        let operation = Known::forwarded(&forward, Some(StateName::Running));
        let accepted = Outcome::Accepted {
            operation,
            repeated: false,
        };
        drop(reply.send(Ok(Delivered::First(accepted))));
        Box::pin(attempt.run(ready, None)).await;
    }

    fn first_fence(&self) -> Fence {
        Fence {
            attempt: 1,
            instance: self.instance,
        }
    }

    /// Claims the operation, and says since when; or answers that there is nothing to be sent.
    async fn claim(&self, forward: &Arc<Forward>, ready: Ready, reply: Reply) -> Option<(Instant, Ready, Reply)> {
        let Some(place) = self.claiming.enter(&forward.tenant, &forward.id) else {
            ready.give_back();
            let told = self
                .operation(&forward.tenant, &forward.id)
                .await
                .map(|found| match found {
                    Some(operation) => Outcome::of(&operation, &forward.fingerprint),
                    None => Outcome::InProgress {
                        operation: Known::forwarded(forward, None),
                    },
                });
            drop(reply.send(told.map(Delivered::Known)));
            return None;
        };
        let outcome = match self.book.claim(forward.clone()).await {
            Ok(Claim::Won { asked }) => {
                self.doubts.end(&forward.tenant, &forward.id);
                return Some((asked, ready, reply));
            }
            Ok(Claim::Lost(operation)) => Outcome::of(&operation, &forward.fingerprint),
            Ok(Claim::Contended) => Outcome::InProgress {
                operation: Known::forwarded(forward, None),
            },
            Err(unwritten) => {
                drop(reply.send(Err(refused(&unwritten))));
                if matches!(unwritten, Unwritten::Unclear(_)) {
                    // It may take a minute, and others want the connection's place.
                    drop(ready);
                    Box::pin(self.disown(forward, self.first_fence(), place)).await;
                }
                return None;
            }
        };
        ready.give_back();
        // Before the answer: whoever asks again at once must not find it taken.
        drop(place);
        drop(reply.send(Ok(Delivered::Known(outcome))));
        None
    }

    /// A claim whose commit was not confirmed: nothing was sent, and nobody must believe that something was. Taken back
    /// until it is gone, or cannot be on its way to the database any more: what a broken network holds back may arrive
    /// after the connection has been given up. Should this process stop before, the claim lapses.
    ///
    /// A later claim of this process looks the same, and must not be taken back in its stead when its request has been sent.
    /// So nobody here claims the id before the database has said what is there; and once somebody has claimed it, nothing
    /// can arrive any more.
    async fn disown(&self, forward: &Forward, fence: Fence, place: Place<'_>) {
        let (tenant, id) = (&forward.tenant, &forward.id);
        let limits = LIMITS.with_time_for(forward.request.body.len());
        let mut pause = Pause::default();
        let may_arrive = loop {
            pause.wait().await;
            let looked = self
                .write_within(limits, async |session| {
                    // A commit that is under way shows its row to nobody, but whoever would insert the same one waits.
                    let was_free = forward::claim_all(session, tenant, self.instance, LIMITS.lock, &[forward]).await?;
                    forward::withdraw(session, tenant, id, fence).await?;
                    Ok(!was_free.is_empty())
                })
                .await;
            match looked {
                Ok(may_arrive) => break may_arrive,
                Err(error) => warn_of_doubt(id, &error),
            }
        };
        if may_arrive {
            self.doubts.begin(tenant, id);
            drop(place);
            self.expect_late(forward, fence).await;
        }
    }

    /// Takes a claim back that may still arrive, while nobody else here claims the id.
    async fn expect_late(&self, forward: &Forward, fence: Fence) {
        let (tenant, id) = (&forward.tenant, &forward.id);
        let give_up_at = Instant::now() + ARRIVES_WITHIN;
        let mut pause = Pause::default();
        while Instant::now() < give_up_at && !self.tasks.is_closed() {
            pause.wait().await;
            let Some(_place) = self.claiming.enter(tenant, id) else {
                continue;
            };
            if !self.doubts.stands(tenant, id) {
                return;
            }
            let withdrawn = self
                .write(async |session| forward::withdraw(session, tenant, id, fence).await)
                .await;
            match withdrawn {
                Ok(true) => {
                    tracing::info!(operation.id = %id, "a claim arrived late and was taken back; its request was not sent");
                    break;
                }
                Ok(false) => {}
                Err(error) => warn_of_doubt(id, &error),
            }
        }
        self.doubts.end(tenant, id);
    }

    /// Adds to the history of an operation, whatever its state and version are by now. If it is unknown, recovery goes on
    /// after `due`. Evidence that cannot be stored is logged.
    async fn add_evidence(
        &self,
        tenant: &Tenant,
        id: &OperationId,
        due: Option<Duration>,
        event: &str,
        reason: &str,
        evidence: &str,
    ) {
        let actor = self.actor();
        let note = Note {
            event,
            actor: &actor,
            reason,
            evidence: Some(evidence),
        };
        for _ in 0..5 {
            let Ok(Some(operation)) = self.operation(tenant, id).await else {
                break;
            };
            let seen = Seen {
                state: operation.state.name(),
                version: operation.version,
            };
            let added = self
                .write(async |session| reconciliation::learn(session, tenant, id, seen, due, note).await)
                .await;
            if matches!(added, Ok(true)) {
                return;
            }
        }
        tracing::error!(operation.id = %id, event, evidence, "evidence could not be stored");
    }

    async fn write<T>(
        &self,
        statements: impl AsyncFnOnce(&mut Session) -> Result<T, DatabaseError>,
    ) -> Result<T, DatabaseError> {
        self.write_within(LIMITS, statements).await
    }

    async fn write_within<T>(
        &self,
        limits: Limits,
        statements: impl AsyncFnOnce(&mut Session) -> Result<T, DatabaseError>,
    ) -> Result<T, DatabaseError> {
        let mut session = self.pool.transaction(limits).await?;
        let value = statements(&mut session).await?;
        session.commit().await?;
        Ok(value)
    }
}

/// Between two looks at what is in doubt.
struct Pause(Duration);

impl Default for Pause {
    fn default() -> Self {
        Self(Duration::from_millis(100))
    }
}

impl Pause {
    async fn wait(&mut self) {
        tokio::time::sleep(self.0).await;
        self.0 = (self.0 * 2).min(Duration::from_secs(10));
    }
}

fn warn_of_doubt(id: &OperationId, error: &DatabaseError) {
    tracing::warn!(operation.id = %id, error = %error, "cannot take an unconfirmed claim back yet");
}

/// What a configuration declares.
#[derive(Debug, Clone, Default)]
pub struct Declared {
    pub downstreams: Arc<Downstreams>,
    pub kinds: Arc<DownstreamKinds>,
}

impl Declared {
    pub fn new(downstreams: Downstreams, kinds: DownstreamKinds) -> Self {
        Self {
            downstreams: Arc::new(downstreams),
            kinds: Arc::new(kinds),
        }
    }
}

/// What `Perform::start` is given by the configuration.
pub struct Settings {
    pub declared: Declared,
    /// Most claims that wait to be written.
    pub queue: usize,
    /// How long receipts of proxied requests are kept.
    pub retention: Duration,
}

/// A stored request as it is sent, with the downstream's key where it takes one.
fn outgoing(request: &Request, route: &Route) -> send::Request {
    let mut lines = HeaderMap::with_capacity(request.headers.len() + 1);
    for (name, value) in &request.headers {
        if let (Ok(name), Some(value)) = (HeaderName::try_from(name), latin1(value)) {
            lines.append(name, value);
        }
    }
    if let Some((name, value)) = route.ability.key_line(&request.downstream_key) {
        lines.insert(name, value);
    }
    send::Request {
        // Both were checked before they were stored.
        method: Method::from_bytes(request.method.as_bytes()).unwrap_or(Method::POST),
        path_and_query: PathAndQuery::try_from(request.path_and_query.as_str())
            .unwrap_or_else(|_| PathAndQuery::from_static("/")),
        headers: lines,
        body: request.body.clone(),
    }
}

/// A place that nobody leaves is a queue that is full; anything else is a downstream that is not there.
fn not_reached(downstream: &Arc<str>, not_sent: NotSent) -> Refusal {
    if not_sent.stage == "busy" {
        return Refusal::Busy {
            retry_after: Duration::from_secs(2),
        };
    }
    Refusal::Unreachable {
        downstream: downstream.clone(),
        cause: not_sent.to_string(),
    }
}

fn latin1(text: &str) -> Option<HeaderValue> {
    HeaderValue::from_bytes(&headers::encode_latin1(text)?).ok()
}

fn refused(unwritten: &Unwritten) -> Refusal {
    match unwritten {
        Unwritten::Busy => Refusal::Busy {
            retry_after: Duration::from_secs(1),
        },
        Unwritten::Stopping => Refusal::Stopping,
        Unwritten::Unclear(Trouble::Passing | Trouble::LockTimeout) => Refusal::Unavailable,
        Unwritten::Unclear(Trouble::Lasting) => Refusal::Internal,
    }
}
