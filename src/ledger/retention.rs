//! Retention: three clocks, all the database's. A receipt past its time is not served, whether or not the purge has been
//! by; the purge removes what it can no longer serve and leaves the tombstone; a tombstone goes only if told to.

use std::time::Duration;

use super::claim::milliseconds;
use super::tenant::Tenant;
use crate::postgres::error::{Error, doing};
use crate::postgres::session::Session;

/// How long receipts are kept unless the configuration says otherwise.
pub const DEFAULT: Duration = Duration::from_secs(400 * 86_400);

/// Removes payload, request, receipt and history of up to `limit` finished operations whose receipts have expired, in the
/// session's transaction: all of one operation, or nothing. Returns how many.
///
/// Only final operations are taken, oldest expiry first; rows that somebody else holds are left for the next time. The
/// lock is on the operation's row: receipts may not be updated, and PostgreSQL asks for that right before it locks one.
/// Counts of deliveries stay with the tombstone, so that what people see is the same before and after.
pub async fn purge(session: &mut Session, tenant: &Tenant, limit: i64) -> Result<u64, Error> {
    let purged = sqlx::query_scalar!(
        r#"
        with now as materialized (select clock_timestamp() as at),
        expired as materialized (
            select r.operation_id
            from ledger.receipts r
            join ledger.operations o on o.tenant_id = $1 and o.operation_id = r.operation_id
            where r.tenant_id = $1 and r.expires_at <= (select at from now)
              and o.state in ('rejected', 'cancelled', 'succeeded', 'failed', 'compensated')
            order by r.expires_at limit $2
            for no key update of o skip locked
        ), receipts as (
            delete from ledger.receipts t using expired e where t.tenant_id = $1 and t.operation_id = e.operation_id
        ), history as (
            delete from ledger.history t using expired e where t.tenant_id = $1 and t.operation_id = e.operation_id
        ), requests as (
            delete from ledger.requests t using expired e where t.tenant_id = $1 and t.operation_id = e.operation_id
        ), tombstones as (
            update ledger.operations t
            set payload = null, run = null, run_id = null, external_reference = null, trace_parent = null,
                purged_at = now.at
            from expired e, now where t.tenant_id = $1 and t.operation_id = e.operation_id
            returning 1
        )
        select count(*) as "count!" from tombstones
        "#,
        tenant.as_str(),
        limit,
    )
    .fetch_one(&mut *session)
    .await
    .map_err(doing("purge expired receipts"))?;
    Ok(purged.cast_unsigned())
}

/// Removes up to `limit` tombstones that were purged longer ago than `keep`: from then on their ids are free again.
pub async fn forget(session: &mut Session, tenant: &Tenant, keep: Duration, limit: i64) -> Result<u64, Error> {
    let forgotten = sqlx::query_scalar!(
        r#"
        with old as materialized (
            select operation_id from ledger.operations
            where tenant_id = $1 and purged_at <= clock_timestamp() - $2::float8 * interval '1 millisecond'
            order by purged_at limit $3 for update skip locked
        ), deliveries as (
            delete from ledger.deliveries t using old where t.tenant_id = $1 and t.operation_id = old.operation_id
        ), links as (
            delete from ledger.links t using old where t.tenant_id = $1 and t.operation_id = old.operation_id
        ), tombstones as (
            delete from ledger.operations t using old where t.tenant_id = $1 and t.operation_id = old.operation_id
            returning 1
        )
        select count(*) as "count!" from tombstones
        "#,
        tenant.as_str(),
        milliseconds(keep),
        limit,
    )
    .fetch_one(&mut *session)
    .await
    .map_err(doing("forget old tombstones"))?;
    Ok(forgotten.cast_unsigned())
}

/// How many finished operations have receipts past their time, counted up to `most`.
pub async fn backlog(session: &mut Session, tenant: &Tenant, most: i64) -> Result<u64, Error> {
    let count = sqlx::query_scalar!(
        r#"
        select count(*) as "count!" from (
            select from ledger.receipts where tenant_id = $1 and expires_at <= clock_timestamp() limit $2) expired
        "#,
        tenant.as_str(),
        most,
    )
    .fetch_one(&mut *session)
    .await
    .map_err(doing("count the expired receipts"))?;
    Ok(count.cast_unsigned())
}
