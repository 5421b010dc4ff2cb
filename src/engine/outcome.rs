//! What a verb came to: values, without HTTP.

use std::sync::Arc;
use std::time::Duration;

use time::OffsetDateTime;
use tokio::time::Instant;

use crate::ledger::fingerprint::Fingerprint;
use crate::ledger::forward::Forward;
use crate::ledger::operation::{Operation, StateName, Verdict};
use crate::ledger::operation_id::OperationId;
use crate::ledger::receipt::{Raised, Receipt};
use crate::ledger::submission::Submission;

/// What a caller is told about an operation.
#[derive(Debug, Clone)]
pub enum Outcome {
    /// Settled: this is the receipt, to be served until `serve_until` at the latest.
    Settled {
        operation: Known,
        receipt: Arc<Receipt>,
        expires_at: OffsetDateTime,
        serve_until: Instant,
        replayed: bool,
    },
    /// Stored and not settled, by this delivery or by an earlier one; ask again later.
    Accepted { operation: Known, repeated: bool },
    /// Another delivery is at it.
    InProgress { operation: Known },
    /// It may have acted; nobody knows. `recovers`: that may change without anybody's doing.
    Unknown { operation: Known, recovers: bool },
    /// The id belongs to another payload or kind.
    Mismatch {
        original: Known,
        created_at: Option<OffsetDateTime>,
        requested: Fingerprint,
    },
    /// It was settled, and its receipt is no longer kept.
    Expired {
        operation: Known,
        settled_at: OffsetDateTime,
        expires_at: OffsetDateTime,
    },
    /// It is settled, and its answer was too large to store.
    NotStored { operation: Known, receipt: Arc<Receipt> },
    /// The handler raised what no handler may raise; nothing was stored.
    HandlerBroken { id: OperationId, raised: Raised },
}

/// What is known of an operation when it is answered.
#[derive(Debug, Clone)]
pub struct Known {
    pub id: OperationId,
    pub kind: Arc<str>,
    /// `None` while it is being run by a transaction whose rows nobody else can see yet.
    pub state: Option<StateName>,
    pub fingerprint: Fingerprint,
    /// Trace context of the first delivery.
    pub trace_parent: Option<Arc<str>>,
    /// Once it is settled and that was read.
    pub receipt_expires_at: Option<OffsetDateTime>,
}

/// Why a verb gives no outcome. None of these stores anything or spends an id, but for `Unrecorded`.
#[derive(Debug, Clone, thiserror::Error)]
pub enum Refusal {
    #[error("too many operations are queued")]
    Busy { retry_after: Duration },
    #[error("the ledger's database is not available")]
    Unavailable,
    #[error("the handler {handler} ran longer than the timeout of {timeout:?} of its kind {kind} and was rolled back")]
    Overtime {
        kind: Arc<str>,
        handler: String,
        timeout: Duration,
    },
    /// Nothing was sent and nothing is stored.
    #[error("the downstream {downstream} was not reached: {cause}")]
    Unreachable { downstream: Arc<str>, cause: String },
    /// A request that is no operation was sent, and no answer came.
    #[error("the downstream {downstream} did not answer: {cause}")]
    NoAnswer { downstream: Arc<str>, cause: String },
    /// The downstream has answered, and the answer could not be stored yet.
    #[error("the answer for operation {} is not stored yet", operation.id)]
    Unrecorded { operation: Box<Known> },
    #[error("this process is stopping")]
    Stopping,
    #[error("the ledger failed in a way that trying again may not mend")]
    Internal,
}

impl Outcome {
    /// Whether this delivery made the effect.
    pub fn is_effect(&self) -> bool {
        matches!(self, Self::Settled { receipt, replayed: false, .. } if receipt.status < 400)
    }

    /// Tells a delivery of a known operation what the rule says.
    pub fn of(operation: &Operation, fingerprint: &Fingerprint) -> Self {
        let known = Known::of(operation);
        match operation.on_request(fingerprint) {
            Verdict::Mismatch => Self::Mismatch {
                original: known,
                created_at: Some(operation.created_at),
                requested: *fingerprint,
            },
            Verdict::Accepted => Self::Accepted {
                operation: known,
                repeated: true,
            },
            Verdict::InProgress => Self::InProgress { operation: known },
            Verdict::Unknown { recovers } => Self::Unknown {
                operation: known,
                recovers,
            },
            Verdict::Replay(receipt) => match operation.state.settlement() {
                Some(settlement) => Self::Settled {
                    operation: known,
                    receipt,
                    expires_at: settlement.expires_at,
                    // The database's clock says how long is left; this machine's only counts it down.
                    serve_until: after(settlement.expires_at - settlement.read_at),
                    replayed: true,
                },
                // A replay comes from a settlement, by `on_request`.
                None => Self::InProgress { operation: known },
            },
            Verdict::NotStored(receipt) => Self::NotStored {
                operation: known,
                receipt,
            },
            Verdict::Expired => match operation.state.settlement() {
                Some(settlement) => Self::Expired {
                    operation: known,
                    settled_at: settlement.settled_at,
                    expires_at: settlement.expires_at,
                },
                None => Self::InProgress { operation: known },
            },
        }
    }
}

impl Outcome {
    /// Whether it may change without anybody's doing.
    pub fn may_settle_soon(&self) -> bool {
        match self {
            Self::InProgress { .. } => true,
            Self::Unknown { recovers, .. } => *recovers,
            Self::Accepted { operation, .. } => {
                matches!(operation.state, None | Some(StateName::Running | StateName::RetryWait))
            }
            Self::Settled { .. }
            | Self::Mismatch { .. }
            | Self::Expired { .. }
            | Self::NotStored { .. }
            | Self::HandlerBroken { .. } => false,
        }
    }

    /// The same, as it is told to the delivery that began the operation.
    pub fn as_first(mut self) -> Self {
        match &mut self {
            Self::Settled { replayed, .. } => *replayed = false,
            Self::Accepted { repeated, .. } => *repeated = false,
            Self::InProgress { .. }
            | Self::Unknown { .. }
            | Self::Mismatch { .. }
            | Self::Expired { .. }
            | Self::NotStored { .. }
            | Self::HandlerBroken { .. } => {}
        }
        self
    }

    /// Counts what is left of the receipt's time from the moment at which the database was asked, not from its answer:
    /// a handler, a commit or a slow network in between must not prolong it.
    pub fn since(mut self, asked: Instant) -> Self {
        if let Self::Settled { serve_until, .. } = &mut self {
            *serve_until = serve_until.checked_sub(asked.elapsed()).unwrap_or(asked);
        }
        self
    }
}

/// The moment `left` from now; a retention beyond what the clock can count never ends.
pub fn after(left: time::Duration) -> Instant {
    let left = Duration::try_from(left).unwrap_or_default();
    let now = Instant::now();
    now.checked_add(left)
        .unwrap_or(now + Duration::from_secs(u64::from(u32::MAX)))
}

impl Known {
    /// What a submission says of its operation before anything of it has been read back.
    pub fn submitted(submission: &Submission, state: Option<StateName>) -> Self {
        Self {
            id: submission.id.clone(),
            kind: submission.kind.name.clone(),
            state,
            fingerprint: submission.fingerprint,
            trace_parent: submission.trace_parent.as_deref().map(Into::into),
            receipt_expires_at: None,
        }
    }

    /// The same of an operation that a downstream performs.
    pub fn forwarded(forward: &Forward, state: Option<StateName>) -> Self {
        Self {
            id: forward.id.clone(),
            kind: forward.kind.clone(),
            state,
            fingerprint: forward.fingerprint,
            trace_parent: forward.trace_parent.as_deref().map(Into::into),
            receipt_expires_at: None,
        }
    }

    pub fn of(operation: &Operation) -> Self {
        Self {
            id: operation.id.clone(),
            kind: operation.kind.as_str().into(),
            state: Some(operation.state.name()),
            fingerprint: operation.fingerprint,
            trace_parent: operation.trace_parent.as_deref().map(Into::into),
            receipt_expires_at: operation.state.settlement().map(|settlement| settlement.expires_at),
        }
    }
}
