//! What the API under `/key` remembers of each `Idempotency-Key`.

use std::collections::{HashMap, VecDeque};
use std::time::{Duration, Instant};

use http::{HeaderMap, HeaderName};

use super::reply::Reply;

pub const IDEMPOTENCY_KEY: HeaderName = HeaderName::from_static("idempotency-key");

/// What makes two requests the same: method, path and body, hashed.
pub type Digest = [u8; 32];

#[derive(Debug)]
pub struct Keys {
    kept: HashMap<String, Kept>,
    /// Oldest first; a key that was forgotten since and used again is in it twice.
    order: VecDeque<(Instant, String)>,
    memory: Duration,
    most: usize,
}

#[derive(Debug)]
struct Kept {
    request: Digest,
    first_at: Instant,
    /// None as long as the first request runs.
    reply: Option<Reply>,
}

#[derive(Debug)]
pub enum Claim {
    Fresh,
    Replay(Reply),
    Running,
    Mismatch,
    Full,
}

impl Keys {
    pub fn new(memory: Duration, most: usize) -> Self {
        Self {
            kept: HashMap::new(),
            order: VecDeque::new(),
            memory,
            most,
        }
    }

    pub fn claim(&mut self, key: &str, request: Digest, now: Instant) -> Claim {
        self.forget_expired(now);
        match self.kept.get(key) {
            Some(kept) if kept.request != request => Claim::Mismatch,
            Some(Kept { reply: Some(reply), .. }) => Claim::Replay(reply.clone()),
            Some(Kept { reply: None, .. }) => Claim::Running,
            None if self.order.len() >= self.most => Claim::Full,
            None => {
                let kept = Kept {
                    request,
                    first_at: now,
                    reply: None,
                };
                self.kept.insert(key.to_owned(), kept);
                self.order.push_back((now, key.to_owned()));
                Claim::Fresh
            }
        }
    }

    /// Keeps the answer of the first request.
    pub fn settle(&mut self, key: &str, reply: &Reply) {
        if let Some(kept) = self.kept.get_mut(key) {
            kept.reply = Some(reply.clone());
        }
    }

    /// As if the key had never been used.
    pub fn forget(&mut self, key: &str) {
        self.kept.remove(key);
    }

    fn forget_expired(&mut self, now: Instant) {
        while let Some((first_at, _)) = self.order.front()
            && now.duration_since(*first_at) >= self.memory
            && let Some((first_at, key)) = self.order.pop_front()
        {
            if self.kept.get(&key).is_some_and(|kept| kept.first_at == first_at) {
                self.kept.remove(&key);
            }
        }
    }
}

/// The key of a request, plain or as a string of RFC 8941. An error says what is wrong with it.
pub fn key(headers: &HeaderMap) -> Result<Option<String>, &'static str> {
    let mut lines = headers.get_all(IDEMPOTENCY_KEY).iter();
    let Some(line) = lines.next() else { return Ok(None) };
    if lines.next().is_some() {
        return Err("there are two Idempotency-Key lines");
    }
    let text = line.to_str().map_err(|_| "the Idempotency-Key is no ASCII text")?;
    let key = match text.strip_prefix('"') {
        Some(quoted) => unquoted(quoted).ok_or("the Idempotency-Key is no whole quoted text")?,
        None => text.to_owned(),
    };
    match key.is_empty() {
        true => Err("the Idempotency-Key is empty"),
        false => Ok(Some(key)),
    }
}

/// What stands before the closing quote, which must be the end.
fn unquoted(quoted: &str) -> Option<String> {
    let mut plain = String::new();
    let mut characters = quoted.chars();
    loop {
        match characters.next()? {
            '"' => return characters.next().is_none().then_some(plain),
            '\\' => plain.push(characters.next()?),
            character => plain.push(character),
        }
    }
}

#[cfg(test)]
mod tests {
    use http::{HeaderValue, StatusCode};

    use super::*;

    const HOUR: Duration = Duration::from_secs(3_600);

    #[test]
    fn a_key_is_remembered_for_its_time_and_not_longer() {
        let mut keys = Keys::new(HOUR, 10);
        let start = Instant::now();
        assert!(matches!(keys.claim("k", [1; 32], start), Claim::Fresh));
        assert!(matches!(keys.claim("k", [1; 32], start), Claim::Running));
        keys.settle("k", &Reply::empty(StatusCode::CREATED));
        let last = start + HOUR - Duration::from_nanos(1);
        assert!(matches!(keys.claim("k", [1; 32], last), Claim::Replay(_)));
        assert!(matches!(keys.claim("k", [2; 32], last), Claim::Mismatch));
        assert!(matches!(keys.claim("k", [2; 32], start + HOUR), Claim::Fresh));
    }

    #[test]
    fn a_key_that_was_forgotten_counts_its_time_from_its_next_use() {
        let mut keys = Keys::new(HOUR, 10);
        let start = Instant::now();
        assert!(matches!(keys.claim("k", [1; 32], start), Claim::Fresh));
        keys.forget("k");
        assert!(matches!(keys.claim("k", [1; 32], start + HOUR / 2), Claim::Fresh));
        assert!(matches!(keys.claim("k", [1; 32], start + HOUR), Claim::Running));
    }

    #[test]
    fn a_full_memory_takes_no_new_key_until_one_expires() {
        let mut keys = Keys::new(HOUR, 1);
        let start = Instant::now();
        assert!(matches!(keys.claim("a", [1; 32], start), Claim::Fresh));
        assert!(matches!(keys.claim("b", [1; 32], start), Claim::Full));
        assert!(matches!(keys.claim("b", [1; 32], start + HOUR), Claim::Fresh));
    }

    #[test]
    fn plain_and_quoted_keys_are_the_same() {
        let read = |text: &'static str| {
            let headers = HeaderMap::from_iter([(IDEMPOTENCY_KEY, HeaderValue::from_static(text))]);
            key(&headers).ok().flatten()
        };
        assert_eq!(read("a-1").as_deref(), Some("a-1"));
        assert_eq!(read(r#""a-1""#).as_deref(), Some("a-1"));
        assert_eq!(read(r#""a\"\\1""#).as_deref(), Some(r#"a"\1"#));
        for broken in [r#""a"#, r#""a" b"#, r#""""#, ""] {
            assert_eq!(read(broken), None, "{broken}");
        }
    }
}
