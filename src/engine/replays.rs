//! Receipts of late, kept in memory: a retry usually follows its first call by seconds.
//!
//! Receipts are immutable, so a copy can be served without asking anybody, for as long as the database said it may be.
//! Only committed outcomes come in here. What can still change, the state beside the receipt, is at most
//! [`LONGEST`] old.

use std::time::Duration;

use moka::policy::EvictionPolicy;
use moka::sync::Cache;
use tokio::time::Instant;

use super::outcome::Outcome;
use crate::ledger::fingerprint::Fingerprint;
use crate::ledger::operation_id::OperationId;
use crate::ledger::tenant::Tenant;

/// How long a copy is kept at most.
const LONGEST: Duration = Duration::from_secs(60);

/// What an entry costs beside its receipt's bytes.
const OVERHEAD: usize = 900;

pub struct Replays(Cache<(Tenant, OperationId), Outcome>);

impl Replays {
    /// A cache of about this many bytes; 0 turns it off.
    pub fn new(bytes: u64) -> Self {
        let cache = Cache::builder()
            .max_capacity(bytes)
            // The latest are the ones that are sent again. By its own policy the cache would rather keep what was asked
            // for often, and refuse what is new.
            .eviction_policy(EvictionPolicy::lru())
            .weigher(|_, outcome| u32::try_from(OVERHEAD + size(outcome)).unwrap_or(u32::MAX))
            .time_to_live(LONGEST)
            .build();
        Self(cache)
    }

    /// Keeps a committed outcome, if it is a receipt.
    pub fn keep(&self, tenant: &Tenant, outcome: &Outcome) {
        if let Outcome::Settled {
            operation,
            receipt,
            expires_at,
            serve_until,
            ..
        } = outcome
        {
            let replay = Outcome::Settled {
                operation: operation.clone(),
                receipt: receipt.clone(),
                expires_at: *expires_at,
                serve_until: *serve_until,
                replayed: true,
            };
            self.0.insert((tenant.clone(), operation.id.clone()), replay);
        }
    }

    /// The replay for this very request. Anything but a plain hit is left to the database: it knows more.
    pub fn find(&self, tenant: &Tenant, id: &OperationId, fingerprint: &Fingerprint) -> Option<Outcome> {
        let found = self.0.get(&(tenant.clone(), id.clone()))?;
        let Outcome::Settled {
            operation, serve_until, ..
        } = &found
        else {
            return None;
        };
        (operation.fingerprint == *fingerprint && Instant::now() < *serve_until).then_some(found)
    }
}

fn size(outcome: &Outcome) -> usize {
    match outcome {
        Outcome::Settled { receipt, .. } => receipt.body.len(),
        Outcome::Accepted { .. }
        | Outcome::InProgress { .. }
        | Outcome::Unknown { .. }
        | Outcome::Mismatch { .. }
        | Outcome::Expired { .. }
        | Outcome::NotStored { .. }
        | Outcome::HandlerBroken { .. } => 0,
    }
}
