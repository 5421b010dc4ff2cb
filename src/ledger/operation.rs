//! What an operation is, and the whole of its rule: which state may follow which, and what a delivery is told.
//!
//! Pure: no SQL, no clock, no I/O. The columns come in through `Stored::try_from` in `read.rs`, which refuses
//! combinations that this type cannot express; the table repeats the rule in its CHECK constraints.

use std::fmt;
use std::sync::Arc;

use time::OffsetDateTime;

use super::fingerprint::Fingerprint;
use super::operation_id::OperationId;
use super::receipt::Receipt;
use super::tenant::Tenant;

/// The name of a state, as columns, answers and logs spell it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum StateName {
    Planned,
    WaitingApproval,
    Rejected,
    Cancelled,
    Running,
    RetryWait,
    Succeeded,
    Failed,
    NeedsReconciliation,
    Compensating,
    Compensated,
}

impl StateName {
    /// Every state.
    pub const ALL: [Self; 11] = [
        Self::Planned,
        Self::WaitingApproval,
        Self::Rejected,
        Self::Cancelled,
        Self::Running,
        Self::RetryWait,
        Self::Succeeded,
        Self::Failed,
        Self::NeedsReconciliation,
        Self::Compensating,
        Self::Compensated,
    ];

    pub fn as_str(self) -> &'static str {
        match self {
            Self::Planned => "planned",
            Self::WaitingApproval => "waiting_approval",
            Self::Rejected => "rejected",
            Self::Cancelled => "cancelled",
            Self::Running => "running",
            Self::RetryWait => "retry_wait",
            Self::Succeeded => "succeeded",
            Self::Failed => "failed",
            Self::NeedsReconciliation => "needs_reconciliation",
            Self::Compensating => "compensating",
            Self::Compensated => "compensated",
        }
    }

    /// The state of that name.
    pub fn parse(name: &str) -> Option<Self> {
        Self::ALL.into_iter().find(|state| state.as_str() == name)
    }

    /// The states that may follow this one.
    pub fn next(self) -> &'static [Self] {
        match self {
            Self::Planned => &[Self::WaitingApproval, Self::Running, Self::Cancelled],
            Self::WaitingApproval => &[Self::Running, Self::Rejected, Self::Cancelled],
            Self::Running => &[
                Self::Succeeded,
                Self::Failed,
                Self::RetryWait,
                Self::NeedsReconciliation,
            ],
            Self::RetryWait => &[Self::Running, Self::Failed],
            Self::NeedsReconciliation => &[Self::Succeeded, Self::Failed, Self::RetryWait, Self::Compensating],
            Self::Succeeded => &[Self::Compensating],
            Self::Compensating => &[Self::Compensated, Self::NeedsReconciliation],
            Self::Rejected | Self::Cancelled | Self::Failed | Self::Compensated => &[],
        }
    }

    /// Whether the rule allows this change.
    pub fn may_become(self, next: Self) -> bool {
        self.next().contains(&next)
    }

    /// Final states have an answer; only they are ever purged.
    pub fn is_final(self) -> bool {
        match self {
            Self::Rejected | Self::Cancelled | Self::Succeeded | Self::Failed | Self::Compensated => true,
            Self::Planned
            | Self::WaitingApproval
            | Self::Running
            | Self::RetryWait
            | Self::NeedsReconciliation
            | Self::Compensating => false,
        }
    }

    /// Business changes that stand, where that is known.
    pub fn effects(self) -> Option<u32> {
        match self {
            Self::Succeeded => Some(1),
            Self::NeedsReconciliation | Self::Compensating => None,
            // A compensated effect was made and undone: none stands.
            Self::Compensated
            | Self::Planned
            | Self::WaitingApproval
            | Self::Rejected
            | Self::Cancelled
            | Self::Running
            | Self::RetryWait
            | Self::Failed => Some(0),
        }
    }
}

impl fmt::Display for StateName {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

/// A state with what belongs to it and to no other.
#[derive(Debug, Clone, PartialEq)]
pub enum State {
    Planned,
    WaitingApproval,
    Running,
    RetryWait,
    NeedsReconciliation {
        /// Whether recovery goes on by itself; if not, only a person ends it.
        recovers: bool,
    },
    Rejected(Settlement),
    Cancelled(Settlement),
    Succeeded(Settlement),
    Failed(Settlement),
    /// `None` if its outcome was unknown before.
    Compensating(Option<Settlement>),
    Compensated(Settlement),
}

/// When an operation became final and what is left of its answer.
#[derive(Debug, Clone, PartialEq)]
pub struct Settlement {
    pub settled_at: OffsetDateTime,
    pub expires_at: OffsetDateTime,
    /// The database's time at the reading; `expires_at` minus this is how long the answer may still be served.
    pub read_at: OffsetDateTime,
    pub answer: Answer,
}

/// The stored answer, as it may be served at the moment of reading.
#[derive(Debug, Clone, PartialEq)]
pub enum Answer {
    /// Within its retention.
    Kept(Arc<Receipt>),
    /// Past its retention by the database's clock, whether or not the purge has been by: both look the same.
    Expired,
}

/// What is stored under an operation id, as far as a delivery needs it.
#[derive(Debug, Clone, PartialEq)]
pub struct Operation {
    pub tenant: Tenant,
    pub id: OperationId,
    pub kind: String,
    /// A downstream performs it, and not a function in the database.
    pub is_downstreams: bool,
    pub fingerprint: Fingerprint,
    pub attempt: i32,
    pub version: i32,
    pub requested_by: String,
    pub trace_parent: Option<String>,
    pub created_at: OffsetDateTime,
    pub state: State,
}

/// What a delivery is told about an operation that is already known.
#[derive(Debug, Clone, PartialEq)]
pub enum Verdict {
    /// Other fingerprint: refused in every state, before anything else is said.
    Mismatch,
    /// The first answer again.
    Replay(Arc<Receipt>),
    /// It is settled, and its answer was too large to store: what is left of it.
    NotStored(Arc<Receipt>),
    /// It is settled, and its answer is no longer kept.
    Expired,
    /// Another delivery is at it.
    InProgress,
    /// Stored, not settled: planned, waiting for a decision or for its next attempt.
    Accepted,
    /// It may have acted; nobody knows. Whether that may change without anybody's doing.
    Unknown { recovers: bool },
}

impl Operation {
    /// The rule: what a delivery with this fingerprint is told.
    pub fn on_request(&self, fingerprint: &Fingerprint) -> Verdict {
        if self.fingerprint != *fingerprint {
            return Verdict::Mismatch;
        }
        match &self.state {
            State::Planned | State::WaitingApproval | State::RetryWait => Verdict::Accepted,
            State::Running => Verdict::InProgress,
            State::NeedsReconciliation { recovers } => Verdict::Unknown { recovers: *recovers },
            // Its reversal may need a person, too.
            State::Compensating(None) => Verdict::Unknown { recovers: false },
            State::Rejected(settlement)
            | State::Cancelled(settlement)
            | State::Succeeded(settlement)
            | State::Failed(settlement)
            | State::Compensating(Some(settlement))
            | State::Compensated(settlement) => match &settlement.answer {
                Answer::Kept(receipt) if receipt.omitted.is_some() => Verdict::NotStored(receipt.clone()),
                Answer::Kept(receipt) => Verdict::Replay(receipt.clone()),
                Answer::Expired => Verdict::Expired,
            },
        }
    }
}

impl State {
    pub fn name(&self) -> StateName {
        match self {
            Self::Planned => StateName::Planned,
            Self::WaitingApproval => StateName::WaitingApproval,
            Self::Running => StateName::Running,
            Self::RetryWait => StateName::RetryWait,
            Self::NeedsReconciliation { .. } => StateName::NeedsReconciliation,
            Self::Rejected(_) => StateName::Rejected,
            Self::Cancelled(_) => StateName::Cancelled,
            Self::Succeeded(_) => StateName::Succeeded,
            Self::Failed(_) => StateName::Failed,
            Self::Compensating(_) => StateName::Compensating,
            Self::Compensated(_) => StateName::Compensated,
        }
    }

    /// What a settled state holds.
    pub fn settlement(&self) -> Option<&Settlement> {
        match self {
            Self::Rejected(settlement)
            | Self::Cancelled(settlement)
            | Self::Succeeded(settlement)
            | Self::Failed(settlement)
            | Self::Compensated(settlement) => Some(settlement),
            Self::Compensating(settlement) => settlement.as_ref(),
            Self::Planned
            | Self::WaitingApproval
            | Self::Running
            | Self::RetryWait
            | Self::NeedsReconciliation { .. } => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settlement(answer: Answer) -> Settlement {
        let epoch = OffsetDateTime::UNIX_EPOCH;
        Settlement {
            settled_at: epoch,
            expires_at: epoch,
            read_at: epoch,
            answer,
        }
    }

    fn receipt() -> Arc<Receipt> {
        Arc::new(Receipt::new(200, Vec::new(), "{}".into()))
    }

    fn every_state(answer: &Answer) -> Vec<State> {
        let settled = || settlement(answer.clone());
        vec![
            State::Planned,
            State::WaitingApproval,
            State::Running,
            State::RetryWait,
            State::NeedsReconciliation { recovers: true },
            State::Rejected(settled()),
            State::Cancelled(settled()),
            State::Succeeded(settled()),
            State::Failed(settled()),
            State::Compensating(Some(settled())),
            State::Compensated(settled()),
        ]
    }

    fn operation(state: State) -> Operation {
        Operation {
            tenant: "demo".parse().unwrap(),
            id: OperationId::parse("order-1").unwrap(),
            kind: "order.refund".to_owned(),
            is_downstreams: false,
            fingerprint: fingerprint('a'),
            attempt: 1,
            version: 1,
            requested_by: "key".to_owned(),
            trace_parent: None,
            created_at: OffsetDateTime::UNIX_EPOCH,
            state,
        }
    }

    fn fingerprint(digit: char) -> Fingerprint {
        format!("v1:{}", digit.to_string().repeat(64)).parse().unwrap()
    }

    #[test]
    fn another_fingerprint_is_refused_in_every_state_before_anything_else() {
        for answer in [Answer::Kept(receipt()), Answer::Expired] {
            for state in every_state(&answer) {
                let name = state.name();
                assert_eq!(
                    operation(state).on_request(&fingerprint('b')),
                    Verdict::Mismatch,
                    "{name}"
                );
            }
        }
    }

    #[test]
    fn the_same_fingerprint_is_told_what_the_state_says() {
        let kept = receipt();
        let expected = |state: &State| match state.name() {
            StateName::Planned | StateName::WaitingApproval | StateName::RetryWait => Verdict::Accepted,
            StateName::Running => Verdict::InProgress,
            StateName::NeedsReconciliation => Verdict::Unknown { recovers: true },
            StateName::Rejected
            | StateName::Cancelled
            | StateName::Succeeded
            | StateName::Failed
            | StateName::Compensating
            | StateName::Compensated => Verdict::Replay(kept.clone()),
        };
        for state in every_state(&Answer::Kept(kept.clone())) {
            assert_eq!(
                operation(state.clone()).on_request(&fingerprint('a')),
                expected(&state),
                "{}",
                state.name()
            );
        }
    }

    #[test]
    fn what_was_unknown_stays_so_while_it_is_being_undone() {
        let undone = operation(State::Compensating(None));
        assert_eq!(undone.state.settlement(), None);
        assert_eq!(
            undone.on_request(&fingerprint('a')),
            Verdict::Unknown { recovers: false }
        );
        assert_eq!(undone.on_request(&fingerprint('b')), Verdict::Mismatch);
    }

    #[test]
    fn a_settled_operation_past_its_retention_is_expired_and_never_runs_again() {
        for state in every_state(&Answer::Expired) {
            let settled = state.settlement().is_some();
            let verdict = operation(state).on_request(&fingerprint('a'));
            assert_eq!(verdict == Verdict::Expired, settled);
        }
    }

    #[test]
    fn final_states_lead_nowhere_but_to_their_reversal() {
        for state in StateName::ALL {
            let leads_on = state.next().iter().any(|next| *next != StateName::Compensating);
            assert_eq!(leads_on, !state.is_final(), "{state}");
        }
    }

    #[test]
    fn unknown_is_reached_only_from_an_attempt_and_names_survive_the_round_trip() {
        for state in StateName::ALL {
            let attempted = matches!(state, StateName::Running | StateName::Compensating);
            assert_eq!(state.may_become(StateName::NeedsReconciliation), attempted, "{state}");
            assert_eq!(StateName::parse(state.as_str()), Some(state));
        }
        assert_eq!(StateName::parse("done"), None);
    }
}
