//! Deliveries of known operations, counted in memory and written in batches: a replay waits for no write.
//!
//! A crash may lose up to [`EVERY`] of counting. Nothing is decided by these counts.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::sync::Notify;
use tokio_util::sync::CancellationToken;

use crate::ledger::delivery::{self, Repeats};
use crate::ledger::operation_id::OperationId;
use crate::ledger::tenant::Tenant;
use crate::postgres::error::Error;
use crate::postgres::pool::Pool;
use crate::postgres::session::Limits;

/// How often counts are written.
const EVERY: Duration = Duration::from_millis(500);

/// Most operations with unwritten counts; beyond, they are written at once.
const CROWDED: usize = 20_000;

/// Most operations written in one transaction.
const BATCH: usize = 1_000;

const LIMITS: Limits = Limits {
    lock: Duration::from_secs(2),
    statement: Duration::from_secs(10),
};

type Counts = BTreeMap<Tenant, BTreeMap<String, i64>>;

#[derive(Default)]
pub struct Deliveries {
    counts: Mutex<Counts>,
    crowded: Notify,
}

impl Deliveries {
    /// Counts one more delivery of a known operation.
    pub fn count(&self, tenant: &Tenant, id: &OperationId) {
        let mut counts = self.lock();
        if !counts.contains_key(tenant) {
            counts.insert(tenant.clone(), BTreeMap::new());
        }
        let Some(of_tenant) = counts.get_mut(tenant) else {
            return;
        };
        match of_tenant.get_mut(id.as_str()) {
            Some(count) => *count += 1,
            None => drop(of_tenant.insert(id.as_str().to_owned(), 1)),
        }
        if of_tenant.len() >= CROWDED {
            self.crowded.notify_one();
        }
    }

    /// Deliveries of this operation that are not written yet.
    pub fn unwritten(&self, tenant: &Tenant, id: &str) -> i64 {
        self.lock()
            .get(tenant)
            .and_then(|counts| counts.get(id))
            .copied()
            .unwrap_or(0)
    }

    /// Writes batch after batch until the token is cancelled, and once more then.
    pub async fn write_regularly(self: Arc<Self>, pool: Pool, stop: CancellationToken) {
        loop {
            let stopping = tokio::select! {
                () = tokio::time::sleep(EVERY) => false,
                () = self.crowded.notified() => false,
                () = stop.cancelled() => true,
            };
            if let Err(error) = self.write(&pool).await {
                tracing::warn!(error = %error, "delivery counts kept for the next batch");
            }
            if stopping {
                return;
            }
        }
    }

    /// Writes all counts; those of a failed batch are kept.
    pub async fn write(&self, pool: &Pool) -> Result<(), Error> {
        let counts = std::mem::take(&mut *self.lock());
        let mut outcome = Ok(());
        for (tenant, counts) in counts {
            let repeats: Vec<Repeats> = counts
                .into_iter()
                .map(|(operation_id, count)| Repeats { operation_id, count })
                .collect();
            for batch in repeats.chunks(BATCH) {
                if outcome.is_ok() {
                    outcome = write_batch(pool, &tenant, batch).await;
                }
                if outcome.is_err() {
                    self.put_back(&tenant, batch);
                }
            }
        }
        outcome
    }

    fn put_back(&self, tenant: &Tenant, batch: &[Repeats]) {
        let mut counts = self.lock();
        let of_tenant = counts.entry(tenant.clone()).or_default();
        for repeats in batch {
            *of_tenant.entry(repeats.operation_id.clone()).or_default() += repeats.count;
        }
    }

    fn lock(&self) -> MutexGuard<'_, Counts> {
        self.counts.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn write_batch(pool: &Pool, tenant: &Tenant, batch: &[Repeats]) -> Result<(), Error> {
    let mut session = pool.transaction(LIMITS).await?;
    delivery::add(&mut session, tenant, batch).await?;
    session.commit().await
}
