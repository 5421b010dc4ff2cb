//! What follows from an attempt at a downstream: the whole rule, pure.
//!
//! It takes what the attempt taught us and what the route declares, and never assumes: without an answer, only a
//! declared ability of the downstream leads on, and only people end what nobody can know.

use std::time::Duration;

use crate::outbound::downstream::{Ability, Retry, Route};

/// What an attempt taught us.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Learnt {
    /// A complete answer.
    Answer { status: u16, retry_after: Option<Duration> },
    /// Nothing has left this process.
    NotSent,
    /// A byte may have left, and no complete answer came.
    Unknown,
}

/// Where the operation stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Standing {
    /// Number of the attempt that has ended.
    pub attempt: u32,
    /// Since the id was claimed.
    pub age: Duration,
    /// Since the first send.
    pub since_first_send: Duration,
    /// An earlier attempt of it ended unknown, and this one was sent on the strength of the downstream's ability.
    pub repeated: bool,
}

/// What is to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Next {
    /// The answer is final.
    Settle { succeeded: bool },
    /// The same request may be sent again, after this delay.
    Wait(Duration),
    /// It did not act, and no attempt is left: failed, with a receipt of ours.
    GiveUp,
    /// Unknown. Recovery goes on after this delay, or people do.
    Unknown(Option<Duration>),
    /// The downstream refuses what may be our own earlier effect: read the object and see.
    ReadBack,
}

/// Answers to a repeated send that are not the first one's: it may be running still, or was never asked for. A key's 500
/// is replayed as any other answer (Stripe, "Idempotent requests").
const PROVES_NOTHING: [u16; 6] = [409, 425, 429, 502, 503, 504];

/// The rule. `jitter` is a random number in 0..1.
pub fn next(route: &Route, learnt: Learnt, standing: Standing, jitter: f64) -> Next {
    match learnt {
        Learnt::Answer { status, retry_after } => answered(route, status, retry_after, standing, jitter),
        Learnt::NotSent => match again(&route.retry, None, standing, jitter) {
            // An attempt that was never sent says nothing of an earlier one that may have been.
            _ if standing.repeated => Next::Unknown(recovery(route, standing, jitter)),
            Some(delay) => Next::Wait(delay),
            None => Next::GiveUp,
        },
        Learnt::Unknown => Next::Unknown(recovery(route, standing, jitter)),
    }
}

fn answered(route: &Route, status: u16, retry_after: Option<Duration>, standing: Standing, jitter: f64) -> Next {
    let asks_to_wait = route.retry.on.iter().any(|on| on.as_u16() == status) && (status != 503 || retry_after.is_some());
    if asks_to_wait && safe_to_send_again(route, standing) {
        match again(&route.retry, retry_after, standing, jitter) {
            // Being told to wait is no news of an earlier attempt.
            Some(delay) if standing.repeated => return Next::Unknown(Some(delay)),
            Some(delay) => return Next::Wait(delay),
            None if standing.repeated => return Next::Unknown(None),
            None => {}
        }
    }
    if standing.repeated && status >= 400 {
        match &route.ability {
            Ability::Conditional { .. } => return Next::ReadBack,
            Ability::Key { .. } if PROVES_NOTHING.contains(&status) => {
                return Next::Unknown(recovery(route, standing, jitter));
            }
            Ability::Key { .. } | Ability::Lookup { .. } | Ability::None => {}
        }
    }
    Next::Settle { succeeded: status < 400 }
}

/// Whether the downstream can tell a second send from a second intent, still.
fn safe_to_send_again(route: &Route, standing: Standing) -> bool {
    match &route.ability {
        Ability::Key { retention, margin, .. } => standing.since_first_send < retention.saturating_sub(*margin),
        Ability::Conditional { .. } => true,
        Ability::Lookup { .. } | Ability::None => false,
    }
}

/// When recovery takes up an unknown by itself; `None` if only people can.
pub fn recovery(route: &Route, standing: Standing, jitter: f64) -> Option<Duration> {
    match &route.ability {
        Ability::Key { .. } | Ability::Conditional { .. } if safe_to_send_again(route, standing) => {
            (standing.attempt < route.retry.max_attempts).then(|| backoff(&route.retry, standing.attempt, jitter))
        }
        Ability::Lookup { settle_delay, .. } => Some(*settle_delay),
        Ability::Key { .. } | Ability::Conditional { .. } | Ability::None => None,
    }
}

/// The delay before another attempt; `None` if none is left, or the deadline would have passed.
fn again(retry: &Retry, retry_after: Option<Duration>, standing: Standing, jitter: f64) -> Option<Duration> {
    if standing.attempt >= retry.max_attempts {
        return None;
    }
    let delay = backoff(retry, standing.attempt, jitter).max(retry_after.unwrap_or_default());
    (standing.age.saturating_add(delay) <= retry.deadline).then_some(delay)
}

/// Exponential with full jitter (Brooker, "Exponential Backoff and Jitter", AWS Architecture Blog, 2015).
pub fn backoff(retry: &Retry, attempt: u32, jitter: f64) -> Duration {
    let doublings = attempt.saturating_sub(1).min(30);
    let ceiling = retry.first_delay.saturating_mul(1 << doublings).min(retry.longest_delay);
    ceiling.mul_f64(jitter.clamp(0.0, 1.0))
}
