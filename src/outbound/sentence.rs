//! What a route's declaration means for whoever has to rely on it, in a sentence.

use std::time::Duration;

use super::downstream::{Ability, Downstream, Route};

impl Downstream {
    /// Why a route's `max_in_flight` may be too short, if so.
    pub fn haste(&self, route: &Route) -> Option<String> {
        let longest = self.limits.head + self.limits.idle;
        (route.max_in_flight < longest).then(|| {
            format!(
                "max_in_flight is {}, but an attempt may take {} (head_timeout and idle_timeout) from here alone; one that \
                 still acts could be taken for one that did not",
                words(route.max_in_flight),
                words(longest)
            )
        })
    }
}

impl Route {
    /// What it can do, and what follows an unknown outcome.
    pub fn sentence(&self) -> String {
        let recovery = match &self.ability {
            Ability::Key {
                header,
                retention,
                margin,
                ..
            } => format!(
                "takes our key in {}; after an unknown outcome the same request is sent again for up to {}, later a \
                 person decides",
                titled(header.as_str()),
                words(retention.saturating_sub(*margin))
            ),
            Ability::Conditional { read_back } => format!(
                "refuses what has been done already; after an unknown outcome the same request is sent again, and on 409 \
                 or 412 GET {} tells whether it was ours",
                read_back.path
            ),
            Ability::Lookup {
                probe,
                settle_delay,
                interval,
            } => format!(
                "can be asked by our reference; after an unknown outcome GET {} is asked from {} on, every {}, until it \
                 finds our request or {} have passed",
                probe.path,
                words(*settle_delay),
                words(*interval),
                words(self.max_in_flight)
            ),
            Ability::None => "declares nothing; after an unknown outcome a person decides".to_owned(),
        };
        let keyless = if self.key_required {
            "refused without a key"
        } else {
            "without a key it is passed on unprotected"
        };
        let reversal = match &self.compensation {
            Some(call) => format!("; can be reversed with {} {}", call.method, call.path),
            None => String::new(),
        };
        format!("{}: {recovery}; {keyless}{reversal}", self.name)
    }
}

/// As people write header names.
fn titled(name: &str) -> String {
    let part = |part: &str| {
        let (first, rest) = part.split_at(part.len().min(1));
        first.to_ascii_uppercase() + rest
    };
    name.split('-').map(part).collect::<Vec<_>>().join("-")
}

/// A duration in its largest whole unit.
fn words(duration: Duration) -> String {
    const UNITS: [(u128, &str); 4] = [(86_400_000, "d"), (3_600_000, "h"), (60_000, "min"), (1_000, "s")];
    let millis = duration.as_millis();
    UNITS
        .iter()
        // 23 h rather than 1380 min, and 24 h rather than 1 d: up to two days are counted in hours.
        .find(|(unit, name)| millis > 0 && millis.is_multiple_of(*unit) && (*name != "d" || millis > 2 * unit))
        .map_or_else(
            || format!("{millis} ms"),
            |(unit, name)| format!("{} {name}", millis / unit),
        )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::outbound::samples;
    use http::HeaderName;

    #[test]
    fn a_route_says_what_follows_an_unknown_outcome() {
        let mut route = samples::route("POST", "/charges");
        assert_eq!(
            route.sentence(),
            "POST /charges: declares nothing; after an unknown outcome a person decides; refused without a key"
        );
        route.ability = Ability::Key {
            header: HeaderName::from_static("idempotency-key"),
            quoted: false,
            retention: Duration::from_secs(86_400),
            margin: Duration::from_secs(3_600),
        };
        assert!(route.sentence().contains("in Idempotency-Key;"), "{}", route.sentence());
        assert!(route.sentence().contains("for up to 23 h, later a person decides"));
    }

    #[test]
    fn durations_are_read_at_a_glance() {
        let cases = [
            (500, "500 ms"),
            (60_000, "1 min"),
            (90_000, "90 s"),
            (86_400_000, "24 h"),
            (604_800_000, "7 d"),
        ];
        for (millis, text) in cases {
            assert_eq!(words(Duration::from_millis(millis)), text);
        }
    }
}
