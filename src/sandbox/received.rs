//! Which requests came, by their reference, whether or not they had an effect.

use std::collections::{HashMap, VecDeque};

use http::{HeaderMap, Method, Uri};
use serde::Serialize;

/// The last requests of so many references are kept; the counts of all.
const MOST_SHOWN: usize = 1_000;

/// Longest body that is shown again.
const LONGEST_SHOWN: usize = 8 << 10;

#[derive(Debug)]
pub struct Received {
    by_reference: HashMap<String, Tally>,
    /// References whose last request is kept, in the order in which they first came.
    shown: VecDeque<String>,
    most: usize,
}

/// Requests that might have an effect and look-ups apart, so that asking does not disturb the count.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Tally {
    count: u64,
    reads: u64,
    last: Option<Seen>,
    last_read: Option<Seen>,
}

/// A request as it arrived, credentials included: who tests a proxy has to see what it passes on.
#[derive(Debug, Clone, Serialize)]
pub struct Seen {
    method: String,
    path: String,
    headers: Vec<(String, String)>,
    /// None if it is long or no text.
    body: Option<String>,
}

impl Seen {
    pub fn new(method: &Method, uri: &Uri, headers: &HeaderMap, body: &[u8]) -> Self {
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Self {
            method: method.to_string(),
            path: uri.path_and_query().map_or("/", |path| path.as_str()).to_owned(),
            headers: headers
                .iter()
                .map(|(name, value)| (name.to_string(), text(value.as_bytes())))
                .collect(),
            body: (body.len() <= LONGEST_SHOWN)
                .then(|| std::str::from_utf8(body).ok().map(str::to_owned))
                .flatten(),
        }
    }
}

impl Received {
    pub fn new(most: usize) -> Self {
        Self {
            by_reference: HashMap::new(),
            shown: VecDeque::new(),
            most,
        }
    }

    /// Counts one; the how-many-eth it is, or none if there is no room for another reference.
    pub fn count(&mut self, reference: &str, reads: bool, seen: Seen) -> Option<u64> {
        if !self.by_reference.contains_key(reference) && self.by_reference.len() >= self.most {
            return None;
        }
        self.make_room_to_show(reference);
        let tally = self.by_reference.entry(reference.to_owned()).or_default();
        let (count, last) = match reads {
            true => (&mut tally.reads, &mut tally.last_read),
            false => (&mut tally.count, &mut tally.last),
        };
        *count += 1;
        *last = Some(seen);
        Some(*count)
    }

    pub fn of(&self, reference: &str) -> Tally {
        self.by_reference.get(reference).cloned().unwrap_or_default()
    }

    /// Everything that came, by reference or not, is not counted here: only what had one.
    pub fn total(&self) -> u64 {
        self.by_reference.values().map(|tally| tally.count).sum()
    }

    fn make_room_to_show(&mut self, reference: &str) {
        let is_shown = |tally: &Tally| tally.last.is_some() || tally.last_read.is_some();
        if self.by_reference.get(reference).is_some_and(is_shown) {
            return;
        }
        self.shown.push_back(reference.to_owned());
        if self.shown.len() > MOST_SHOWN
            && let Some(tally) = self.shown.pop_front().and_then(|old| self.by_reference.get_mut(&old))
        {
            (tally.last, tally.last_read) = (None, None);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen() -> Seen {
        Seen::new(
            &Method::POST,
            &Uri::from_static("/none/charges"),
            &HeaderMap::new(),
            b"{}",
        )
    }

    #[test]
    fn looking_up_does_not_disturb_the_count() {
        let mut received = Received::new(10);
        assert_eq!(received.count("r", false, seen()), Some(1));
        assert_eq!(received.count("r", true, seen()), Some(1));
        assert_eq!(received.count("r", false, seen()), Some(2));
        assert_eq!((received.of("r").count, received.of("r").reads), (2, 1));
    }

    #[test]
    fn counts_outlive_what_is_shown() {
        let mut received = Received::new(MOST_SHOWN + 1);
        for number in 0..=MOST_SHOWN {
            assert!(received.count(&number.to_string(), false, seen()).is_some());
        }
        assert!(received.of("0").last.is_none() && received.of("1").last.is_some());
        assert_eq!(received.of("0").count, 1);
        assert_eq!(received.count("another", false, seen()), None);
    }
}
