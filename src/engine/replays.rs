//! Receipts of late, kept in memory: a retry usually follows its first call by seconds.
//!
//! Receipts are immutable, so a copy can be served without asking anybody, for as long as the database said it may be.
//! Only committed outcomes come in here. What can still change, the state beside the receipt, is at most
//! [`LONGEST`] old.
//!
//! The latest are the ones that are sent again, so the oldest go first, whether or not they were asked for: no order of
//! use has to be kept, and an entry is its receipt and little else. Each entry counts with all the memory it takes.

use std::collections::VecDeque;
use std::hash::{BuildHasher, RandomState};
use std::mem::size_of;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use hashbrown::HashTable;
use time::OffsetDateTime;
use tokio::time::Instant;

use super::outcome::{Known, Outcome};
use crate::ledger::fingerprint::Fingerprint;
use crate::ledger::operation::StateName;
use crate::ledger::operation_id::OperationId;
use crate::ledger::receipt::Receipt;
use crate::ledger::tenant::Tenant;

/// How long a copy is kept at most.
const LONGEST: Duration = Duration::from_secs(60);

/// Parts with a lock each.
const SHARDS: usize = 8;

/// What an entry takes beside its bytes: itself, behind an `Arc`; the counter behind shared `Bytes`; its places in table
/// and queue, both of which may be half empty; and what an allocator adds when it rounds up.
const OVERHEAD: usize = size_of::<Entry>() + 16 + 32 + 40 + 48;

pub struct Replays {
    hasher: RandomState,
    shards: [Mutex<Shard>; SHARDS],
    /// The most that the entries of a shard may take, in bytes.
    room: usize,
}

#[derive(Default)]
struct Shard {
    table: HashTable<Arc<Entry>>,
    /// The same in the order in which they came, and those that a later one of the same id has replaced.
    queue: VecDeque<Arc<Entry>>,
    taken: usize,
    /// Header lines of the latest entry; most receipts have the same.
    headers: Arc<[(String, String)]>,
}

/// What header lines take beside themselves: two allocations a line, and the counters of the `Arc`.
const LINE_OVERHEAD: usize = size_of::<(String, String)>() + 2 * 16;

struct Entry {
    hash: u64,
    tenant: Tenant,
    kind: Arc<str>,
    fingerprint: Fingerprint,
    state: Option<StateName>,
    status: u16,
    headers: Arc<[(String, String)]>,
    /// What the header lines take, if they came with this entry; 0 if an earlier one brought them.
    ///
    /// That one goes first. So of all header lines kept, those of one entry a shard may be left uncounted.
    headers_weight: usize,
    body_sha256: [u8; 32],
    expires_at: OffsetDateTime,
    serve_until: Instant,
    /// Operation id, trace context of the first delivery, body.
    bytes: Bytes,
    id: u16,
    trace_parent: u16,
}

impl Replays {
    /// A cache of about this many bytes; 0 turns it off.
    pub fn new(bytes: u64) -> Self {
        Self {
            hasher: RandomState::new(),
            shards: Default::default(),
            room: usize::try_from(bytes).unwrap_or(usize::MAX) / SHARDS,
        }
    }

    /// Keeps a committed outcome, if it is a receipt.
    pub fn keep(&self, tenant: &Tenant, outcome: &Outcome) {
        let Outcome::Settled {
            operation,
            receipt,
            expires_at,
            serve_until,
            ..
        } = outcome
        else {
            return;
        };
        let hash = self.hasher.hash_one((tenant, &operation.id));
        let id = operation.id.as_str();
        let trace_parent = operation.trace_parent.as_deref().unwrap_or_default();
        let (Ok(id_length), Ok(trace_parent_length)) = (u16::try_from(id.len()), u16::try_from(trace_parent.len()))
        else {
            return;
        };
        let bytes = [id.as_bytes(), trace_parent.as_bytes(), &receipt.body].concat();
        let headers_weight = weight_of(&receipt.headers);
        if bytes.len() + headers_weight + OVERHEAD > self.room {
            return;
        }
        let mut shard = self.lock(hash);
        let brings_headers = *shard.headers != *receipt.headers;
        if brings_headers {
            shard.headers = receipt.headers.as_slice().into();
        }
        let entry = Entry {
            hash,
            tenant: tenant.clone(),
            kind: operation.kind.clone(),
            fingerprint: operation.fingerprint,
            state: operation.state,
            status: receipt.status,
            headers: shard.headers.clone(),
            headers_weight: if brings_headers { headers_weight } else { 0 },
            body_sha256: receipt.body_sha256,
            expires_at: *expires_at,
            serve_until: (*serve_until).min(Instant::now() + LONGEST),
            bytes: bytes.into(),
            id: id_length,
            trace_parent: trace_parent_length,
        };
        shard.insert(entry, self.room);
    }

    /// The replay for this very request. Anything but a plain hit is left to the database: it knows more.
    pub fn find(&self, tenant: &Tenant, id: &OperationId, fingerprint: &Fingerprint) -> Option<Outcome> {
        let hash = self.hasher.hash_one((tenant, id));
        let entry = self
            .lock(hash)
            .table
            .find(hash, |entry| entry.is(tenant, id.as_str()))?
            .clone();
        (entry.fingerprint == *fingerprint && Instant::now() < entry.serve_until).then(|| entry.replay(id))
    }

    fn lock(&self, hash: u64) -> MutexGuard<'_, Shard> {
        // The table uses the highest and the lowest bits.
        let shard = &self.shards[(hash >> 32) as usize % SHARDS];
        shard.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Shard {
    fn insert(&mut self, entry: Entry, room: usize) {
        let entry = Arc::new(entry);
        self.taken += entry.weight();
        self.queue.push_back(entry.clone());
        let same = |other: &Arc<Entry>| other.is(&entry.tenant, entry.operation_id());
        match self.table.find_mut(entry.hash, same) {
            Some(place) => *place = entry,
            None => _ = self.table.insert_unique(entry.hash, entry, |entry| entry.hash),
        }
        while self.taken > room {
            self.remove_oldest();
        }
        // A few at a time, so that memory is given back also where fewer come in than there is room for.
        let now = Instant::now();
        for _ in 0..2 {
            if self.queue.front().is_some_and(|oldest| oldest.serve_until <= now) {
                self.remove_oldest();
            }
        }
    }

    fn remove_oldest(&mut self) {
        let Some(oldest) = self.queue.pop_front() else { return };
        self.taken -= oldest.weight();
        if let Ok(place) = self.table.find_entry(oldest.hash, |entry| Arc::ptr_eq(entry, &oldest)) {
            place.remove();
        }
    }
}

impl Entry {
    fn weight(&self) -> usize {
        self.bytes.len() + self.headers_weight + OVERHEAD
    }

    fn is(&self, tenant: &Tenant, id: &str) -> bool {
        self.operation_id() == id && self.tenant == *tenant
    }

    fn operation_id(&self) -> &str {
        self.text(0, self.id)
    }

    /// Part of the bytes that was a text when it came in.
    fn text(&self, start: u16, length: u16) -> &str {
        let start = usize::from(start);
        let bytes = self.bytes.get(start..start + usize::from(length));
        bytes
            .and_then(|bytes| std::str::from_utf8(bytes).ok())
            .unwrap_or_default()
    }

    fn replay(&self, id: &OperationId) -> Outcome {
        let trace_parent = self.text(self.id, self.trace_parent);
        let body = usize::from(self.id) + usize::from(self.trace_parent);
        Outcome::Settled {
            operation: Known {
                id: id.clone(),
                kind: self.kind.clone(),
                state: self.state,
                fingerprint: self.fingerprint,
                trace_parent: (!trace_parent.is_empty()).then(|| trace_parent.into()),
                receipt_expires_at: Some(self.expires_at),
            },
            receipt: Arc::new(Receipt {
                status: self.status,
                headers: self.headers.to_vec(),
                body: self.bytes.slice(body..),
                body_sha256: self.body_sha256,
                omitted: None,
            }),
            expires_at: self.expires_at,
            serve_until: self.serve_until,
            replayed: true,
        }
    }
}

fn weight_of(headers: &[(String, String)]) -> usize {
    let line = |(name, value): &(String, String)| name.len() + value.len() + LINE_OVERHEAD;
    headers.iter().map(line).sum()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settled(id: &str, body: usize) -> Outcome {
        settled_with(id, body, "application/json")
    }

    fn settled_with(id: &str, body: usize, content_type: &str) -> Outcome {
        let headers = vec![("content-type".to_owned(), content_type.to_owned())];
        Outcome::Settled {
            operation: Known {
                id: OperationId::parse(id).unwrap(),
                kind: "kind".into(),
                state: Some(StateName::Succeeded),
                fingerprint: fingerprint(),
                trace_parent: Some("00-trace-parent-01".into()),
                receipt_expires_at: None,
            },
            receipt: Arc::new(Receipt::new(200, headers, "b".repeat(body).into())),
            expires_at: OffsetDateTime::UNIX_EPOCH,
            serve_until: Instant::now() + Duration::from_secs(3600),
            replayed: false,
        }
    }

    fn fingerprint() -> Fingerprint {
        Fingerprint::of_canonical("kind", b"1")
    }

    fn find(replays: &Replays, tenant: &str, id: &str) -> Option<Outcome> {
        let id = OperationId::parse(id).unwrap();
        replays.find(&tenant.parse().unwrap(), &id, &fingerprint())
    }

    #[test]
    fn a_receipt_comes_back_as_it_was_and_only_for_the_same_request() {
        let replays = Replays::new(1 << 20);
        let tenant: Tenant = "a".parse().unwrap();
        let kept = settled("id", 10);
        replays.keep(&tenant, &kept);
        let (
            Some(Outcome::Settled {
                receipt,
                operation,
                replayed,
                ..
            }),
            Outcome::Settled { receipt: first, .. },
        ) = (find(&replays, "a", "id"), kept)
        else {
            panic!("it was kept")
        };
        assert_eq!((receipt, replayed), (first, true));
        assert_eq!((operation.id.as_str(), &*operation.kind), ("id", "kind"));
        assert_eq!(operation.trace_parent.as_deref(), Some("00-trace-parent-01"));

        assert!(find(&replays, "b", "id").is_none());
        assert!(find(&replays, "a", "i").is_none());
        let other = Fingerprint::of_canonical("kind", b"2");
        assert!(
            replays
                .find(&tenant, &OperationId::parse("id").unwrap(), &other)
                .is_none()
        );
        replays.keep(&tenant, &Outcome::InProgress { operation });
        assert!(find(&replays, "a", "id").is_some());
    }

    #[test]
    fn nothing_is_served_past_its_time() {
        let replays = Replays::new(1 << 20);
        let mut kept = settled("id", 10);
        if let Outcome::Settled { serve_until, .. } = &mut kept {
            *serve_until = Instant::now();
        }
        replays.keep(&"a".parse().unwrap(), &kept);
        assert!(find(&replays, "a", "id").is_none());
    }

    #[test]
    fn the_oldest_go_first_and_the_room_is_kept() {
        let room = 200 * (OVERHEAD + 1000);
        let replays = Replays::new(room as u64);
        let tenant = "a".parse().unwrap();
        for number in 0..1000 {
            replays.keep(&tenant, &settled(&format!("id-{number}"), 1000));
            // Kept again, it takes no more room for good.
            replays.keep(&tenant, &settled("again", 1000));
        }
        let kept = |range: std::ops::Range<usize>| {
            range
                .filter(|number| find(&replays, "a", &format!("id-{number}")).is_some())
                .count()
        };
        assert_eq!(kept(0..500), 0);
        assert!(kept(980..1000) >= 15);
        assert!(find(&replays, "a", "again").is_some());
        for shard in &replays.shards {
            let shard = shard.lock().unwrap();
            assert!(shard.taken <= room / SHARDS);
            assert_eq!(
                shard.taken,
                shard.queue.iter().map(|entry| entry.weight()).sum::<usize>()
            );
            assert!(shard.table.len() <= shard.queue.len());
        }
    }

    #[test]
    fn header_lines_count_with_the_receipt_that_brought_them() {
        let replays = Replays::new(8 << 20);
        let tenant = "a".parse().unwrap();
        let taken = || -> usize { replays.shards.iter().map(|shard| shard.lock().unwrap().taken).sum() };
        let keep_all = |name: &str, content_type: &dyn Fn(u32) -> String| {
            let before = taken();
            for number in 100..200 {
                let kept = settled_with(&format!("{name}-{number}"), 10, &content_type(number));
                replays.keep(&tenant, &kept);
            }
            taken() - before
        };
        let long = "x".repeat(1_000);
        let same = keep_all("a", &|_| long.clone());
        let own = keep_all("b", &|number| format!("{long}{number}"));
        assert!(same < 8 * 1_500 + 100 * (OVERHEAD + 100), "{same}");
        assert!(own >= same - 8 * 1_500 + 100 * 1_000, "{own}, {same}");
    }

    #[test]
    fn without_room_nothing_is_kept() {
        let replays = Replays::new(0);
        replays.keep(&"a".parse().unwrap(), &settled("id", 0));
        assert!(find(&replays, "a", "id").is_none());
    }
}
