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

/// Answers to a repeated send that are not the first one's: it may be running still, or was never asked for. Whether we are
/// let in (401, 403, 407) is decided before anybody looks for the key, and may have changed since. A key's 500 is replayed as
/// any other answer (Stripe, "Idempotent requests").
const PROVES_NOTHING: [u16; 11] = [401, 403, 407, 408, 409, 421, 425, 429, 502, 503, 504];

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
    let asks_to_wait =
        route.retry.on.iter().any(|on| on.as_u16() == status) && (status != 503 || retry_after.is_some());
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
    Next::Settle {
        succeeded: status < 400,
    }
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
    let ceiling = retry
        .first_delay
        .saturating_mul(1 << doublings)
        .min(retry.longest_delay);
    ceiling.mul_f64(jitter.clamp(0.0, 1.0))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::outbound::downstream::Probe;
    use crate::outbound::samples;

    const FULL: f64 = 1.0;
    const HOUR: Duration = Duration::from_secs(3_600);

    fn probe() -> Probe {
        Probe {
            path: "/charges?ref={operation_id}".parse().unwrap(),
            found: "/data/0".parse().unwrap(),
            ours: Vec::new(),
        }
    }

    fn abilities() -> [Ability; 4] {
        [
            Ability::Key {
                header: "idempotency-key".parse().unwrap(),
                quoted: false,
                retention: HOUR * 24,
                margin: HOUR,
            },
            Ability::Conditional { read_back: probe() },
            Ability::Lookup {
                probe: probe(),
                settle_delay: Duration::from_secs(2),
                interval: Duration::from_secs(5),
            },
            Ability::None,
        ]
    }

    fn route(ability: Ability) -> Route {
        let mut route = samples::route("POST", "/charges");
        route.ability = ability;
        route.retry.on = vec![
            http::StatusCode::TOO_MANY_REQUESTS,
            http::StatusCode::SERVICE_UNAVAILABLE,
        ];
        route
    }

    fn first() -> Standing {
        Standing {
            attempt: 1,
            age: Duration::from_secs(1),
            since_first_send: Duration::from_secs(1),
            repeated: false,
        }
    }

    fn again() -> Standing {
        Standing {
            attempt: 2,
            repeated: true,
            ..first()
        }
    }

    fn answer(status: u16) -> Learnt {
        Learnt::Answer {
            status,
            retry_after: None,
        }
    }

    fn told_to_wait(status: u16, seconds: u64) -> Learnt {
        Learnt::Answer {
            status,
            retry_after: Some(Duration::from_secs(seconds)),
        }
    }

    #[test]
    fn a_first_complete_answer_is_final_for_every_ability() {
        for ability in abilities() {
            let route = route(ability);
            for status in [200, 201, 204, 302, 399, 400, 404, 409, 412, 422, 500, 502, 503, 504] {
                let expected = Next::Settle {
                    succeeded: status < 400,
                };
                assert_eq!(
                    next(&route, answer(status), first(), FULL),
                    expected,
                    "{} {status}",
                    route.ability.name()
                );
            }
        }
    }

    #[test]
    fn only_what_is_safe_to_send_again_waits_when_it_is_told_to() {
        for (ability, waits) in abilities().into_iter().zip([true, true, false, false]) {
            let route = route(ability);
            for status in [429, 503] {
                let decided = next(&route, told_to_wait(status, 7), first(), FULL);
                let expected = if waits {
                    Next::Wait(Duration::from_secs(7))
                } else {
                    Next::Settle { succeeded: false }
                };
                assert_eq!(decided, expected, "{} {status}", route.ability.name());
            }
        }
    }

    #[test]
    fn a_503_that_names_no_time_is_an_answer() {
        let route = route(abilities()[0].clone());
        assert_eq!(
            next(&route, answer(503), first(), FULL),
            Next::Settle { succeeded: false }
        );
        assert!(matches!(next(&route, answer(429), first(), FULL), Next::Wait(_)));
    }

    #[test]
    fn a_wait_beyond_the_deadline_or_after_the_last_attempt_is_an_answer() {
        let route = route(abilities()[0].clone());
        let settled = Next::Settle { succeeded: false };
        for wait in [601, 1_000_000_000_000, u64::MAX] {
            assert_eq!(next(&route, told_to_wait(429, wait), first(), FULL), settled, "{wait}");
        }
        let last = Standing { attempt: 5, ..first() };
        assert_eq!(next(&route, told_to_wait(429, 1), last, FULL), settled);
        let late = Standing { age: HOUR, ..first() };
        assert_eq!(next(&route, told_to_wait(429, 1), late, FULL), settled);
    }

    #[test]
    fn without_an_answer_the_ability_alone_decides() {
        let second = Duration::from_millis(500);
        let expected = [Some(second), Some(second), Some(Duration::from_secs(2)), None];
        for (ability, due) in abilities().into_iter().zip(expected) {
            let route = route(ability);
            assert_eq!(
                next(&route, Learnt::Unknown, first(), FULL),
                Next::Unknown(due),
                "{}",
                route.ability.name()
            );
        }
    }

    #[test]
    fn a_key_is_not_relied_on_beyond_the_downstreams_memory() {
        let route = route(abilities()[0].clone());
        let at = |hours: u32| Standing {
            since_first_send: HOUR * hours,
            ..first()
        };
        assert!(matches!(
            next(&route, Learnt::Unknown, at(22), FULL),
            Next::Unknown(Some(_))
        ));
        // Its memory is 24 hours, less a margin of one.
        assert_eq!(next(&route, Learnt::Unknown, at(23), FULL), Next::Unknown(None));
        assert_eq!(
            next(&route, told_to_wait(429, 1), at(23), FULL),
            Next::Settle { succeeded: false }
        );
    }

    #[test]
    fn what_was_never_sent_is_tried_again_and_in_the_end_fails() {
        for ability in abilities() {
            let route = route(ability);
            assert!(matches!(next(&route, Learnt::NotSent, first(), FULL), Next::Wait(_)));
            let last = Standing { attempt: 5, ..first() };
            assert_eq!(next(&route, Learnt::NotSent, last, FULL), Next::GiveUp);
        }
    }

    #[test]
    fn a_repeated_send_that_fails_leaves_the_earlier_one_unknown() {
        for ability in abilities().into_iter().take(2) {
            let route = route(ability);
            for learnt in [
                Learnt::NotSent,
                Learnt::Unknown,
                told_to_wait(429, 1),
                told_to_wait(503, 1),
            ] {
                let decided = next(&route, learnt, again(), FULL);
                assert!(matches!(decided, Next::Unknown(Some(_))), "{learnt:?}: {decided:?}");
                let last = Standing { attempt: 5, ..again() };
                let decided = next(&route, learnt, last, FULL);
                let left = matches!(decided, Next::Unknown(None) | Next::ReadBack);
                assert!(left, "{learnt:?}: {decided:?}");
            }
        }
    }

    #[test]
    fn a_repeated_key_ends_with_the_first_answer_and_not_with_a_gateways() {
        let route = route(abilities()[0].clone());
        for status in [200, 201, 302, 400, 402, 404, 422, 500] {
            let expected = Next::Settle {
                succeeded: status < 400,
            };
            assert_eq!(next(&route, answer(status), again(), FULL), expected, "{status}");
        }
        for status in PROVES_NOTHING {
            assert!(
                matches!(next(&route, answer(status), again(), FULL), Next::Unknown(Some(_))),
                "{status}"
            );
        }
    }

    #[test]
    fn a_repeated_condition_that_is_refused_is_read_back() {
        let route = route(abilities()[1].clone());
        assert_eq!(
            next(&route, answer(201), again(), FULL),
            Next::Settle { succeeded: true }
        );
        for status in [400, 404, 409, 412, 500] {
            assert_eq!(next(&route, answer(status), again(), FULL), Next::ReadBack, "{status}");
        }
    }

    #[test]
    fn delays_double_with_full_jitter_and_stay_finite() {
        let retry = route(Ability::None).retry;
        assert_eq!(backoff(&retry, 1, FULL), Duration::from_millis(500));
        assert_eq!(backoff(&retry, 2, FULL), Duration::from_secs(1));
        assert_eq!(backoff(&retry, 2, 0.25), Duration::from_millis(250));
        for attempt in [7, 60, u32::MAX] {
            assert_eq!(backoff(&retry, attempt, FULL), Duration::from_secs(30), "{attempt}");
        }
    }
}
