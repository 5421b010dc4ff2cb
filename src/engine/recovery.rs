//! What a process does by itself: heartbeats, taking over what nobody runs any more, and the purge. Every sweep is
//! bounded, can be run by hand, and may run on any number of processes at once.

use std::sync::Arc;
use std::time::Duration;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::intake::Intake;
use super::perform::Perform;
use crate::ledger::operation::StateName;
use crate::ledger::operation_id::OperationId;
use crate::ledger::plan::{self, Abandoned, Seen};
use crate::ledger::tenant::Tenant;
use crate::ledger::{instance, reconciliation, retention, tenant};
use crate::postgres::error::Error;
use crate::postgres::pool::Pool;
use crate::postgres::session::Limits;
use crate::telemetry::metrics::Metrics;

/// Limits of a sweep's statements.
const LIMITS: Limits = Limits {
    lock: Duration::from_secs(2),
    statement: Duration::from_secs(4),
};

/// Most operations a sweep takes over from one tenant at a time.
const TAKE_OVER: i64 = 50;

/// Most operations purged in one transaction.
pub const PURGE_BATCH: i64 = 1_000;

/// When sweeps run and what they respect.
#[derive(Debug, Clone, Copy)]
pub struct Settings {
    /// Between heartbeats.
    pub heartbeat: Duration,
    /// A claim is safe while its instance's heartbeat is younger than this.
    pub lease: Duration,
    /// Between sweeps for abandoned operations.
    pub sweep: Duration,
    /// Between purges; `None` leaves purging to `opledger purge`.
    pub purge: Option<Duration>,
    /// How long tombstones are kept; `None` is for ever.
    pub tombstones: Option<Duration>,
}

/// Writes heartbeats until told to stop, then takes this instance's row away.
pub async fn keep_heartbeat(intake: Arc<Intake>, beat: Arc<Heartbeat>, every: Duration, stop: CancellationToken) {
    loop {
        match beat.write(&intake.pool).await {
            Ok(()) => {}
            Err(error) => tracing::warn!(error = %error, "heartbeat missed"),
        }
        tokio::select! {
            () = tokio::time::sleep(every) => {}
            () = stop.cancelled() => break,
        }
    }
    if let Err(error) = beat.leave(&intake.pool).await {
        tracing::warn!(error = %error, "the instance's row stays until it lapses");
    }
}

/// This process's sign of life.
pub struct Heartbeat {
    instance: uuid::Uuid,
    hostname: String,
    written: std::sync::Mutex<Instant>,
}

impl Heartbeat {
    pub fn new(instance: uuid::Uuid, hostname: String) -> Self {
        Self {
            instance,
            hostname,
            written: std::sync::Mutex::new(Instant::now()),
        }
    }

    /// Time since the last one that was written.
    pub fn age(&self) -> Duration {
        self.written
            .lock()
            .unwrap_or_else(std::sync::PoisonError::into_inner)
            .elapsed()
    }

    pub async fn write(&self, pool: &Pool) -> Result<(), Error> {
        let mut session = pool.transaction(LIMITS).await?;
        instance::beat(&mut session, self.instance, &self.hostname, env!("CARGO_PKG_VERSION")).await?;
        session.commit().await?;
        *self.written.lock().unwrap_or_else(std::sync::PoisonError::into_inner) = Instant::now();
        Ok(())
    }

    async fn leave(&self, pool: &Pool) -> Result<(), Error> {
        let mut session = pool.transaction(LIMITS).await?;
        instance::leave(&mut session, self.instance).await?;
        session.commit().await
    }
}

/// Sweeps until told to stop.
pub async fn keep_sweeping(intake: Arc<Intake>, perform: Arc<Perform>, settings: Settings, stop: CancellationToken) {
    loop {
        tokio::select! {
            () = tokio::time::sleep(settings.sweep) => {}
            () = stop.cancelled() => return,
        }
        match sweep(&intake, &perform, settings.lease).await {
            Ok(0) => {}
            Ok(taken) => {
                intake.metrics.recovered(taken);
                tracing::info!(operations = taken, "took over abandoned operations");
            }
            Err(error) => tracing::warn!(error = %error, "sweep failed; the next one tries again"),
        }
    }
}

/// Takes over operations that nobody runs: claims of lapsed instances, and what is due. Returns how many.
pub async fn sweep(intake: &Arc<Intake>, perform: &Arc<Perform>, lease: Duration) -> Result<u64, Error> {
    let mut taken = 0;
    let mut unknown = 0;
    for tenant in tenants(&intake.pool).await? {
        let mut session = intake.pool.reader(LIMITS).await?;
        let abandoned = plan::abandoned(&mut session, &tenant, lease, TAKE_OVER).await?;
        unknown += reconciliation::unknowns(&mut session, &tenant, 10_000).await?;
        session.finish().await?;
        perform.follow_compensations(&tenant).await?;
        for Abandoned { id, seen, downstream } in abandoned {
            let taken_over = match (downstream, seen.state) {
                (false, _) => take_over(intake, &tenant, &id, seen).await,
                (true, StateName::Running) => perform.lapsed(&tenant, &id, seen.version).await,
                (true, _) => {
                    // Sending and asking take their time, and must not keep the sweep.
                    perform.take_up_later(&tenant, &id);
                    Ok(true)
                }
            };
            match taken_over {
                Ok(is_ours) => taken += u64::from(is_ours),
                // One that cannot be had must not keep the others from being finished.
                Err(error) => tracing::warn!(error = %error, operation.id = %id, "cannot take an operation over"),
            }
        }
    }
    intake.metrics.unknowns(unknown);
    // Long silent instances hold no claim any more: all of theirs have been put back.
    let mut session = intake.pool.transaction(LIMITS).await?;
    instance::forget_lapsed(&mut session, lease * 60).await?;
    session.commit().await?;
    Ok(taken)
}

async fn take_over(intake: &Arc<Intake>, tenant: &Tenant, id: &OperationId, seen: Seen) -> Result<bool, Error> {
    let Some(seen) = waiting(intake, tenant, id, seen).await? else {
        return Ok(false);
    };
    intake.take_over(tenant, id, seen).await
}

/// Brings an abandoned operation to `retry_wait`; `None` if it changed meanwhile.
async fn waiting(intake: &Intake, tenant: &Tenant, id: &OperationId, seen: Seen) -> Result<Option<Seen>, Error> {
    if seen.state == StateName::RetryWait {
        return Ok(Some(seen));
    }
    let mut session = intake.pool.transaction(LIMITS).await?;
    let lapsed = plan::lapse(&mut session, tenant, id, seen.version, &intake.actor()).await?;
    session.commit().await?;
    Ok(lapsed.then_some(Seen {
        state: StateName::RetryWait,
        version: seen.version + 1,
    }))
}

/// Purges regularly until told to stop.
pub async fn keep_purging(pool: Pool, metrics: Arc<Metrics>, settings: Settings, stop: CancellationToken) {
    let Some(every) = settings.purge else { return };
    loop {
        tokio::select! {
            () = tokio::time::sleep(every) => {}
            () = stop.cancelled() => return,
        }
        let purged = tokio::select! {
            purged = purge(&pool, settings.tombstones, |_| {}) => purged,
            () = stop.cancelled() => return,
        };
        match purged {
            Ok(purged) => {
                let left = backlog(&pool).await.unwrap_or_default();
                metrics.purged(purged.receipts, left);
            }
            Err(error) => {
                metrics.purge_failed();
                tracing::warn!(error = %error, "purge failed; the next one goes on where it stopped");
            }
        }
    }
}

/// What a purge removed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Purged {
    pub receipts: u64,
    pub tombstones: u64,
}

/// Purges every tenant in batches, each a transaction of its own; `progress` is told after each batch.
pub async fn purge(
    pool: &Pool,
    tombstones: Option<Duration>,
    mut progress: impl FnMut(Purged),
) -> Result<Purged, Error> {
    let mut purged = Purged::default();
    for tenant in tenants(pool).await? {
        loop {
            let mut session = pool.transaction(LIMITS).await?;
            let batch = retention::purge(&mut session, &tenant, PURGE_BATCH).await?;
            session.commit().await?;
            purged.receipts += batch;
            progress(purged);
            if batch == 0 {
                break;
            }
        }
        while let Some(keep) = tombstones {
            let mut session = pool.transaction(LIMITS).await?;
            let batch = retention::forget(&mut session, &tenant, keep, PURGE_BATCH).await?;
            session.commit().await?;
            purged.tombstones += batch;
            progress(purged);
            if batch == 0 {
                break;
            }
        }
    }
    Ok(purged)
}

/// Expired receipts that are not purged yet, counted up to 10,000 a tenant.
pub async fn backlog(pool: &Pool) -> Result<u64, Error> {
    let mut left = 0;
    for tenant in tenants(pool).await? {
        let mut session = pool.reader(LIMITS).await?;
        left += retention::backlog(&mut session, &tenant, 10_000).await?;
        session.finish().await?;
    }
    Ok(left)
}

async fn tenants(pool: &Pool) -> Result<Vec<Tenant>, Error> {
    let mut session = pool.reader(LIMITS).await?;
    let tenants = tenant::all(&mut session).await?;
    session.finish().await?;
    Ok(tenants)
}
