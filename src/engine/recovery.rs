//! What a process does by itself: heartbeats, taking over what nobody runs any more, and the purge. Every sweep is
//! bounded, can be run by hand, and may run on any number of processes at once.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
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
///
/// It also tells whether the silence of others means anything. While the database is away all are silent, and all of them
/// may be at work: only who has been heard itself for as long as a lease may say that others have not.
pub struct Heartbeat {
    instance: uuid::Uuid,
    hostname: String,
    lease: Duration,
    heard: Mutex<Heard>,
}

#[derive(Debug, Clone, Copy)]
struct Heard {
    last: Instant,
    /// From when on the silence of others is theirs.
    judges_from: Instant,
}

impl Heard {
    /// Others may need as long as the database was away to find it again.
    fn again(self, now: Instant, lease: Duration) -> Self {
        let gap = now - self.last;
        Self {
            last: now,
            judges_from: match gap > lease / 2 {
                true => now + gap.max(lease),
                false => self.judges_from,
            },
        }
    }

    fn may_judge(self, now: Instant, lease: Duration) -> bool {
        now >= self.judges_from && now - self.last <= lease / 2
    }
}

impl Heartbeat {
    pub fn new(instance: uuid::Uuid, hostname: String, lease: Duration) -> Self {
        let last = Instant::now();
        Self {
            instance,
            hostname,
            lease,
            heard: Mutex::new(Heard {
                last,
                judges_from: last + lease,
            }),
        }
    }

    /// Time since the last one that was written.
    pub fn age(&self) -> Duration {
        self.heard().last.elapsed()
    }

    /// Whether claims of instances that are not heard of may be taken away.
    pub fn may_judge(&self) -> bool {
        self.heard().may_judge(Instant::now(), self.lease)
    }

    fn heard(&self) -> MutexGuard<'_, Heard> {
        self.heard.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub async fn write(&self, pool: &Pool) -> Result<(), Error> {
        let mut session = pool.transaction(LIMITS).await?;
        instance::beat(&mut session, self.instance, &self.hostname, env!("CARGO_PKG_VERSION")).await?;
        session.commit().await?;
        let mut heard = self.heard();
        *heard = heard.again(Instant::now(), self.lease);
        Ok(())
    }

    async fn leave(&self, pool: &Pool) -> Result<(), Error> {
        let mut session = pool.transaction(LIMITS).await?;
        instance::leave(&mut session, self.instance).await?;
        session.commit().await
    }
}

/// Sweeps until told to stop.
pub async fn keep_sweeping(
    intake: Arc<Intake>,
    perform: Arc<Perform>,
    beat: Arc<Heartbeat>,
    settings: Settings,
    stop: CancellationToken,
) {
    loop {
        tokio::select! {
            () = tokio::time::sleep(settings.sweep) => {}
            () = stop.cancelled() => return,
        }
        let lease = beat.may_judge().then_some(settings.lease);
        match sweep(&intake, &perform, lease).await {
            Ok(0) => {}
            Ok(taken) => {
                intake.metrics.recovered(taken);
                tracing::info!(operations = taken, "took over abandoned operations");
            }
            Err(error) => tracing::warn!(error = %error, "sweep failed; the next one tries again"),
        }
    }
}

/// Takes over operations that nobody runs: claims of lapsed instances, if there is a lease to judge them by, and what is
/// due. Returns how many.
pub async fn sweep(intake: &Arc<Intake>, perform: &Arc<Perform>, lease: Option<Duration>) -> Result<u64, Error> {
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
    if let Some(lease) = lease {
        let mut session = intake.pool.transaction(LIMITS).await?;
        instance::forget_lapsed(&mut session, lease * 60).await?;
        session.commit().await?;
    }
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

#[cfg(test)]
mod tests {
    use super::*;

    const LEASE: Duration = Duration::from_secs(15);

    fn after(start: Instant, seconds: u64) -> Instant {
        start + Duration::from_secs(seconds)
    }

    /// Heard every two seconds from `from` to `to`.
    fn steadily(mut heard: Heard, start: Instant, from: u64, to: u64) -> Heard {
        for second in (from..=to).step_by(2) {
            heard = heard.again(after(start, second), LEASE);
        }
        heard
    }

    #[test]
    fn only_who_has_been_heard_for_a_lease_may_say_that_others_have_not() {
        let start = Instant::now();
        let new = Heard {
            last: start,
            judges_from: start + LEASE,
        };
        let heard = steadily(new, start, 0, 14);
        assert!(!heard.may_judge(after(start, 14), LEASE));
        let heard = steadily(heard, start, 16, 20);
        assert!(heard.may_judge(after(start, 20), LEASE));
        // Not heard for a while: neither during it, nor for as long again after it.
        assert!(!heard.may_judge(after(start, 28), LEASE));
        let back = heard.again(after(start, 60), LEASE);
        assert!(!back.may_judge(after(start, 60), LEASE));
        let back = steadily(back, start, 62, 98);
        assert!(!back.may_judge(after(start, 98), LEASE));
        assert!(steadily(back, start, 100, 100).may_judge(after(start, 100), LEASE));
        // A short break costs a lease.
        let back = back.again(after(start, 108), LEASE);
        assert!(!steadily(back, start, 110, 120).may_judge(after(start, 122), LEASE));
        assert!(steadily(back, start, 110, 124).may_judge(after(start, 124), LEASE));
    }
}
