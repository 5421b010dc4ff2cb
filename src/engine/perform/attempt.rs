//! One attempt, from a ready connection to a stored outcome. It runs on a task of its own: neither the answer nor its
//! settlement depends on the caller's connection.

use std::sync::Arc;
use std::time::Duration;

use bytes::{Bytes, BytesMut};
use sha2::{Digest, Sha256};
use tokio::sync::{mpsc, oneshot};
use tokio::time::Instant;
use tokio_util::task::TaskTracker;
use tracing::Instrument;

use super::decide::{self, Learnt, Next, Standing};
use super::{Delivered, Passing, Perform, Piece, outgoing};
use crate::engine::outcome::{Known, Outcome, Refusal, after};
use crate::ledger::forward::{self, Answered, Forward};
use crate::ledger::operation::StateName;
use crate::ledger::plan::{self, Fence};
use crate::ledger::receipt::Receipt;
use crate::ledger::reconciliation::{self, Note};
use crate::outbound::downstream::{Downstream, Route};
use crate::outbound::headers;
use crate::outbound::retry_after::retry_after;
use crate::outbound::send::{Answer, Failure, NotSent, Ready, Unknown};
use crate::telemetry::metrics::Metrics;
use crate::telemetry::trace;

/// Pieces of a streamed answer that wait for a slow caller.
const PIECES: usize = 16;

/// How long a caller may leave the stream unread before it is given up; the operation goes on without it.
const READER_PATIENCE: Duration = Duration::from_secs(30);

/// How long a caller waits for an answer that cannot be stored.
const UNRECORDED: Duration = Duration::from_secs(5);

/// How long after the database was asked for its claim an attempt may still begin. Recovery counts from there: were a
/// process to stand still between claim and send, it would send what others have found not to have been sent.
pub const SEND_WITHIN: Duration = Duration::from_secs(2);

pub type Reply = oneshot::Sender<Result<Delivered, Refusal>>;

/// An attempt that has been claimed.
pub struct Attempt {
    pub perform: Arc<Perform>,
    pub forward: Arc<Forward>,
    pub downstream: Arc<Downstream>,
    pub route: Arc<Route>,
    pub fence: Fence,
    /// When this process asked for the claim, and how old the operation and its first send were then.
    pub claimed: Instant,
    pub age: Duration,
    pub since_first_send: Duration,
    /// An earlier attempt ended unknown.
    pub repeated: bool,
    /// No other operation depends on it: if its first attempt is never sent, it can be taken back altogether.
    pub alone: bool,
    /// Attempts before a person allowed new ones; they do not count against the limit.
    pub earlier_attempts: i32,
}

/// A complete answer that was read to its end.
struct Complete {
    status: u16,
    lines: Vec<(String, String)>,
    /// `None` if it was too large to store.
    body: Option<Bytes>,
    size: u64,
    digest: [u8; 32],
    retry_after: Option<Duration>,
    evidence: Option<String>,
}

impl Attempt {
    /// Sends, and carries what comes of it to the ledger and to whoever still waits.
    pub fn run(self, ready: Ready, reply: Option<Reply>) -> impl Future<Output = ()> + Send {
        let span = tracing::info_span!(
            "attempt",
            otel.kind = "client",
            downstream = %self.downstream.name,
            operation.id = %self.forward.id,
            kind = %self.forward.kind,
            fingerprint = %self.forward.fingerprint,
            attempt = self.fence.attempt,
            outcome = tracing::field::Empty,
        );
        if let Some(parent) = self.forward.trace_parent.as_deref().and_then(|text| text.parse().ok()) {
            trace::continue_from(&span, &parent);
        }
        let caller = ToCaller::new(reply, self.perform.tasks.clone(), self.perform.metrics.clone());
        Box::new(self).perform(ready, caller).instrument(span)
    }

    /// All that comes after the answer's head is on the heap: waiting for it is what may take long, and many do.
    async fn perform(self: Box<Self>, ready: Ready, caller: ToCaller) {
        let began = Instant::now();
        let sent = if self.claimed.elapsed() > SEND_WITHIN {
            ready.give_back();
            let cause = "the claim was confirmed too late to be acted on; somebody else may have it by now";
            Err(NotSent::new("late", cause).into())
        } else {
            ready.send(outgoing(&self.forward.request, &self.route)).await
        };
        Box::pin(self.conclude(began, sent, caller)).await;
    }

    async fn conclude(self: Box<Self>, began: Instant, sent: Result<Answer, Failure>, mut caller: ToCaller) {
        let ended = match sent {
            Ok(answer) => Box::pin(self.receive(answer, &mut caller))
                .await
                .map_err(Failure::Unknown),
            Err(failure) => Err(failure),
        };
        let outcome = match &ended {
            Ok(_) => "answered",
            Err(Failure::NotSent(_)) => "not_sent",
            Err(Failure::Unknown(_)) => "unknown",
        };
        tracing::Span::current().record("outcome", outcome);
        self.perform
            .metrics
            .attempted(&self.downstream.name, outcome, began.elapsed());
        match ended {
            Ok(complete) => Box::pin(self.answered(complete, caller)).await,
            Err(Failure::NotSent(not_sent)) => {
                let next = decide::next(&self.route, Learnt::NotSent, self.standing(), jitter());
                let cause = not_sent.to_string();
                Box::pin(self.without_answer(next, "not_sent", &cause, caller)).await;
            }
            Err(Failure::Unknown(unknown)) => {
                tracing::warn!(cause = %unknown, "the outcome is unknown");
                Box::pin(self.unknown(unknown, caller)).await;
            }
        }
    }

    /// Reads the answer to its end, passing it on as it comes where that is wanted or where it grows too large to store.
    async fn receive(&self, mut answer: Answer, caller: &mut ToCaller) -> Result<Complete, Unknown> {
        let lines = headers::replayed(&self.downstream, &answer.headers);
        let status = answer.status.as_u16();
        let wait = retry_after(&answer.headers);
        let evidence =
            headers::evidence(&answer.headers).map(|ids| serde_json::json!({ "downstream_request": ids }).to_string());
        let stored_body = self.downstream.limits.stored_body;
        // A retry must be able to tell its caller nothing yet.
        let may_wait = self.route.retry.on.contains(&answer.status) || self.repeated;
        let streams = !may_wait && (self.route.stream || is_event_stream(&lines));
        let mut kept = BytesMut::new();
        let mut digest = Sha256::new();
        let mut size = 0u64;
        if streams {
            caller.begin(self.known(StateName::Running), status, &lines);
        }
        while let Some(piece) = answer.body.next().await {
            let piece = match piece {
                Ok(piece) => piece,
                Err(unknown) => {
                    caller.cut();
                    return Err(unknown);
                }
            };
            digest.update(&piece);
            size += piece.len() as u64;
            let fits = usize::try_from(size).is_ok_and(|size| size <= stored_body);
            if fits {
                kept.extend_from_slice(&piece);
            }
            if caller.is_streaming() {
                caller.pass(piece).await;
            } else if !fits && !may_wait {
                caller.begin(self.known(StateName::Running), status, &lines);
                caller.pass(std::mem::take(&mut kept).freeze()).await;
                caller.pass(piece).await;
            }
        }
        let fits = usize::try_from(size).is_ok_and(|size| size <= stored_body);
        Ok(Complete {
            status,
            lines,
            body: fits.then(|| kept.freeze()),
            size,
            digest: digest.finalize().into(),
            retry_after: wait,
            evidence,
        })
    }

    async fn answered(self, complete: Complete, caller: ToCaller) {
        let learnt = Learnt::Answer {
            status: complete.status,
            retry_after: complete.retry_after,
        };
        match decide::next(&self.route, learnt, self.standing(), jitter()) {
            Next::Settle { succeeded } => self.settle(complete, succeeded, caller).await,
            Next::ReadBack => {
                let cause = format!("the downstream answered {} to the repeated request", complete.status);
                Arc::new(self).read_back(cause, caller).await;
            }
            next @ (Next::Wait(_) | Next::GiveUp | Next::Unknown(_)) => {
                let cause = format!("the downstream answered {}", complete.status);
                self.without_answer(next, "answered", &cause, caller).await;
            }
        }
    }

    async fn unknown(self, unknown: Unknown, caller: ToCaller) {
        let next = decide::next(&self.route, Learnt::Unknown, self.standing(), jitter());
        self.without_answer(next, "outcome_unknown", &unknown.to_string(), caller)
            .await;
    }

    /// The object that a conditional downstream refuses to make again may be ours.
    async fn read_back(self: Arc<Self>, cause: String, caller: ToCaller) {
        let found = self
            .perform
            .read_back(&self.forward, &self.downstream, &self.route)
            .await;
        let Some(attempt) = Arc::into_inner(self) else { return };
        match found {
            Ok(super::proof::Found::Ours(object)) => attempt.settle_proved(object, caller).await,
            // Somebody else's object is no proof that ours was never there.
            Ok(found @ (super::proof::Found::Foreign | super::proof::Found::Nothing)) => {
                let shows = match found {
                    super::proof::Found::Foreign => "something that is not this operation's",
                    super::proof::Found::Ours(_) | super::proof::Found::Nothing => "nothing",
                };
                let cause = format!("{cause}, and shows {shows}");
                attempt
                    .without_answer(Next::Unknown(None), "outcome_unknown", &cause, caller)
                    .await;
            }
            Err(trouble) => {
                let next = Next::Unknown(decide::recovery(&attempt.route, attempt.standing(), jitter()));
                let cause = format!("{cause}, and cannot be asked: {trouble}");
                attempt.without_answer(next, "outcome_unknown", &cause, caller).await;
            }
        }
    }

    async fn settle_proved(self, object: super::proof::Object, caller: ToCaller) {
        let complete = Complete {
            status: object.status,
            lines: object.lines,
            size: object.body.len() as u64,
            digest: Sha256::digest(&object.body).into(),
            body: Some(object.body),
            retry_after: None,
            evidence: Some(r#"{"proof":"read back"}"#.to_owned()),
        };
        self.settle(complete, true, caller).await;
    }

    async fn settle(self, complete: Complete, succeeded: bool, caller: ToCaller) {
        let state = if succeeded {
            StateName::Succeeded
        } else {
            StateName::Failed
        };
        let external_reference = self.reference(&complete);
        let receipt = Arc::new(match complete.body {
            Some(body) => Receipt::new(complete.status, complete.lines, body),
            None => Receipt::omitted(complete.status, complete.lines, complete.size, complete.digest),
        });
        let answered = Answered {
            id: self.forward.id.clone(),
            fence: self.fence,
            state,
            receipt: receipt.clone(),
            retention: self.forward.retention,
            external_reference,
            reason: (!succeeded).then(|| format!("the downstream answered {}", complete.status)),
            evidence: complete.evidence,
        };
        let mut caller = caller;
        let asked = Instant::now();
        let mut pause = FIRST_PAUSE;
        let times = loop {
            match self.perform.book.settle(&self.forward.tenant, answered.clone()).await {
                Ok(times) => break times,
                Err(why) => {
                    tracing::warn!(operation.id = %self.forward.id, ?why, "the answer is not stored yet; trying again");
                    if asked.elapsed() > UNRECORDED {
                        caller.refuse(self.unrecorded());
                    }
                    // Nothing but the end of this process gives it up: then the outcome is unknown to everybody.
                    pause = later(pause).await;
                }
            }
        };
        let Some(times) = times else {
            return self.late(&receipt, caller).await;
        };
        if succeeded {
            self.perform.metrics.committed_effect();
        }
        let mut operation = self.known(state);
        operation.receipt_expires_at = Some(times.expires_at);
        // Whoever has not been passed it as it came gets what is left of it, and never an empty body in its place.
        if receipt.omitted.is_some() {
            return caller.end(Outcome::NotStored { operation, receipt });
        }
        let outcome = Outcome::Settled {
            operation,
            receipt,
            expires_at: times.expires_at,
            serve_until: after(times.expires_at - times.settled_at),
            replayed: false,
        }
        .since(asked);
        // What can be undone is always read: another process may have undone it, and the state says so.
        if self.route.compensation.is_none() {
            self.perform.replays.keep(&self.forward.tenant, &outcome);
        }
        caller.end(outcome);
    }

    /// The claim does not stand any more: somebody has decided, or our own commit's answer was lost. The answer changes
    /// nothing, and is kept as evidence.
    async fn late(self, receipt: &Receipt, mut caller: ToCaller) {
        let (perform, forward) = (&self.perform, &self.forward);
        let Ok(Some(operation)) = perform.operation(&forward.tenant, &forward.id).await else {
            return caller.fail(self.unrecorded());
        };
        let outcome = Outcome::of(&operation, &forward.fingerprint);
        let is_ours = matches!(&outcome, Outcome::Settled { receipt: stored, .. } | Outcome::NotStored { receipt: stored, .. }
            if operation.attempt == self.fence.attempt && stored.body_sha256 == receipt.body_sha256);
        if !is_ours {
            let evidence = serde_json::json!({
                "attempt": self.fence.attempt, "status": receipt.status, "size": receipt.body.len(),
                "body_sha256": hex(&receipt.body_sha256),
            })
            .to_string();
            let reason = "an answer came after the claim was lost; it changes nothing";
            perform
                .add_evidence(
                    &forward.tenant,
                    &forward.id,
                    self.recovery(),
                    "late_answer",
                    reason,
                    &evidence,
                )
                .await;
            // A stream that ends well would say that this answer is the operation's.
            caller.cut();
        }
        caller.end(match outcome {
            Outcome::Settled {
                operation,
                receipt,
                expires_at,
                serve_until,
                ..
            } => Outcome::Settled {
                operation,
                receipt,
                expires_at,
                serve_until,
                replayed: !is_ours,
            },
            outcome => outcome,
        });
    }

    /// Stores what follows from an attempt that brought no final answer, and tells the caller.
    async fn without_answer(self, next: Next, event: &'static str, cause: &str, mut caller: ToCaller) {
        let perform = self.perform.clone();
        // A withdrawal whose commit is lost is tried again, and must not find a later claim in place of its own.
        let place = match next {
            Next::GiveUp if self.fence.attempt == 1 && self.alone => {
                let (tenant, id) = (&self.forward.tenant, &self.forward.id);
                Some(perform.claiming.entered(tenant, id).await)
            }
            Next::Settle { .. } | Next::Wait(_) | Next::GiveUp | Next::Unknown(_) | Next::ReadBack => None,
        };
        let asked = Instant::now();
        let mut pause = FIRST_PAUSE;
        loop {
            match self.store(next, event, cause).await {
                Ok(true) => break,
                Ok(false) => {
                    let (perform, forward) = (&self.perform, &self.forward);
                    let evidence = serde_json::json!({ "attempt": self.fence.attempt, "cause": cause }).to_string();
                    let reason = "an attempt ended after its claim was lost; it changes nothing";
                    perform
                        .add_evidence(
                            &forward.tenant,
                            &forward.id,
                            self.recovery(),
                            "late_end",
                            reason,
                            &evidence,
                        )
                        .await;
                    break;
                }
                Err(error) => {
                    tracing::warn!(operation.id = %self.forward.id, error = %error, "the end of an attempt is not stored yet; trying again");
                    if asked.elapsed() > UNRECORDED {
                        caller.refuse(self.unrecorded());
                    }
                    pause = later(pause).await;
                }
            }
        }
        drop(place);
        match next {
            Next::Wait(delay) | Next::Unknown(Some(delay)) => self.perform.wake_after(&self.forward, delay),
            Next::Settle { .. } | Next::GiveUp | Next::Unknown(None) | Next::ReadBack => {}
        }
        match self.perform.operation(&self.forward.tenant, &self.forward.id).await {
            Ok(Some(operation)) => caller.end(match Outcome::of(&operation, &self.forward.fingerprint) {
                Outcome::Accepted { operation, .. } => Outcome::Accepted {
                    operation,
                    repeated: false,
                },
                Outcome::Settled {
                    operation,
                    receipt,
                    expires_at,
                    serve_until,
                    ..
                } => Outcome::Settled {
                    operation,
                    receipt,
                    expires_at,
                    serve_until,
                    replayed: false,
                },
                outcome => outcome,
            }),
            Ok(None) => caller.fail(Refusal::Unreachable {
                downstream: self.downstream.name.clone(),
                cause: cause.to_owned(),
            }),
            Err(_) => caller.fail(self.unrecorded()),
        }
    }

    async fn store(&self, next: Next, event: &'static str, cause: &str) -> Result<bool, crate::postgres::error::Error> {
        let (tenant, id) = (&self.forward.tenant, &self.forward.id);
        let actor = self.perform.actor();
        let evidence = serde_json::json!({ "cause": cause }).to_string();
        match next {
            Next::Wait(delay) => {
                self.perform
                    .write(async |session| {
                        plan::wait(session, tenant, id, self.fence, delay, cause, Some(&evidence)).await
                    })
                    .await
            }
            // The first attempt never left: the id is free again, as if it had never been used.
            Next::GiveUp if self.fence.attempt == 1 && self.alone => {
                self.perform
                    .write(async |session| forward::withdraw(session, tenant, id, self.fence).await)
                    .await
            }
            Next::GiveUp => self.perform.give_up(&self.forward, self.fence, cause).await,
            Next::Unknown(due) => {
                let note = Note {
                    event,
                    actor: &actor,
                    reason: cause,
                    evidence: None,
                };
                self.perform
                    .write(async |session| reconciliation::unknown(session, tenant, id, self.fence, due, note).await)
                    .await
            }
            // These two lead elsewhere.
            Next::Settle { .. } | Next::ReadBack => Ok(true),
        }
    }

    /// What has come too late to decide anything must not keep the unknown from being recovered, either.
    fn recovery(&self) -> Option<Duration> {
        decide::recovery(&self.route, self.standing(), jitter())
    }

    fn standing(&self) -> Standing {
        let passed = self.claimed.elapsed();
        Standing {
            attempt: (self.fence.attempt - self.earlier_attempts).unsigned_abs(),
            age: self.age + passed,
            since_first_send: self.since_first_send + passed,
            repeated: self.repeated,
        }
    }

    fn reference(&self, complete: &Complete) -> Option<String> {
        let pointer = self.route.reference.as_ref()?;
        let body = serde_json::from_slice(complete.body.as_deref()?).ok()?;
        let text = match pointer.find(&body)? {
            serde_json::Value::String(text) => text.clone(),
            serde_json::Value::Number(number) => number.to_string(),
            _ => return None,
        };
        crate::ledger::submission::is_reference(&text).then_some(text)
    }

    fn known(&self, state: StateName) -> Known {
        Known::forwarded(&self.forward, Some(state))
    }

    fn unrecorded(&self) -> Refusal {
        Refusal::Unrecorded {
            operation: Box::new(self.known(StateName::Running)),
        }
    }
}

/// Between two tries of storing what an attempt came to.
const FIRST_PAUSE: Duration = Duration::from_millis(250);
const LONGEST_PAUSE: Duration = Duration::from_secs(10);

async fn later(pause: Duration) -> Duration {
    tokio::time::sleep(pause).await;
    (pause * 2).min(LONGEST_PAUSE)
}

/// The way to the caller: one answer, or the head of one and its pieces.
struct ToCaller {
    reply: Option<Reply>,
    pieces: Option<mpsc::Sender<Piece>>,
    streaming: bool,
    /// The caller has the head, and the delivery is not counted yet: whoever gets a whole answer counts for itself.
    uncounted: bool,
    tasks: TaskTracker,
    metrics: Arc<Metrics>,
}

impl ToCaller {
    fn new(reply: Option<Reply>, tasks: TaskTracker, metrics: Arc<Metrics>) -> Self {
        Self {
            reply,
            pieces: None,
            streaming: false,
            uncounted: false,
            tasks,
            metrics,
        }
    }

    fn is_streaming(&self) -> bool {
        self.streaming
    }

    /// Passes the head on; pieces follow.
    fn begin(&mut self, operation: Known, status: u16, lines: &[(String, String)]) {
        self.streaming = true;
        let Some(reply) = self.reply.take() else { return };
        let (pieces, body) = mpsc::channel(PIECES);
        let passing = Passing {
            operation: Some(operation),
            status,
            headers: lines.to_vec(),
            body,
        };
        // Whoever has gone away gets no pieces.
        if reply.send(Ok(Delivered::Passing(passing))).is_ok() {
            self.pieces = Some(pieces);
            self.uncounted = true;
        }
    }

    async fn pass(&mut self, piece: Bytes) {
        let Some(pieces) = &self.pieces else { return };
        let sent = tokio::time::timeout(READER_PATIENCE, pieces.send(Piece::Data(piece))).await;
        if !matches!(sent, Ok(Ok(()))) {
            self.pieces = None;
        }
    }

    /// The stream ends in its middle, and its reader sees that: no end comes.
    fn cut(&mut self) {
        self.pieces = None;
    }

    /// Ends the wait early; the operation goes on.
    fn refuse(&mut self, refusal: Refusal) {
        // A stream that ends well would be an acknowledgement.
        self.cut();
        self.count(Err(&refusal));
        if let Some(reply) = self.reply.take() {
            drop(reply.send(Err(refusal)));
        }
    }

    /// A stream is counted by how it ends, once.
    fn count(&mut self, outcome: Result<&Outcome, &Refusal>) {
        if !std::mem::take(&mut self.uncounted) {
            return;
        }
        match outcome {
            // Too large for those who come later; this caller has got it.
            Ok(Outcome::NotStored { receipt, .. }) => self.metrics.passed_on(receipt.status),
            outcome => self.metrics.delivered(outcome),
        }
    }

    fn end(mut self, outcome: Outcome) {
        self.count(Ok(&outcome));
        if let Some(reply) = self.reply.take() {
            drop(reply.send(Ok(Delivered::First(outcome))));
        }
        if let Some(pieces) = self.pieces.take() {
            // Nobody waits for a reader that does not read.
            self.tasks
                .spawn(async move { drop(tokio::time::timeout(READER_PATIENCE, pieces.send(Piece::End)).await) });
        }
    }

    fn fail(mut self, refusal: Refusal) {
        self.refuse(refusal);
    }
}

fn is_event_stream(lines: &[(String, String)]) -> bool {
    lines.iter().any(|(name, value)| {
        name == "content-type"
            && value
                .split(';')
                .next()
                .is_some_and(|media| media.trim().eq_ignore_ascii_case("text/event-stream"))
    })
}

/// A number in 0..1 that nobody has to be unable to guess.
pub fn jitter() -> f64 {
    // 53 bits are what a double holds.
    #[expect(clippy::cast_precision_loss, reason = "53 bits fit")]
    let random = (getrandom::u64().unwrap_or(u64::MAX) >> 11) as f64;
    #[expect(clippy::cast_precision_loss, reason = "a power of two")]
    let range = (1u64 << 53) as f64;
    random / range
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}
