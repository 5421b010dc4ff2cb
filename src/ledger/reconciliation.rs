//! Unknown outcomes: how they come about, what is learnt about them, and what ends them.
//!
//! Every verb is one guarded statement with its history row. Nothing in here is decided by time alone: an unknown is ended
//! by an answer, by a look-up that proves something, or by a named person.

use std::time::Duration;

use uuid::Uuid;

use super::claim::milliseconds;
use super::operation::StateName;
use super::operation_id::OperationId;
use super::plan::{Fence, Seen, Times};
use super::receipt::{Omitted, Receipt};
use super::settlement::headers_json;
use super::tenant::Tenant;
use crate::postgres::error::{Error, doing};
use crate::postgres::session::Session;

/// What is added to the history.
#[derive(Debug, Clone, Copy)]
pub struct Note<'a> {
    pub event: &'a str,
    pub actor: &'a str,
    pub reason: &'a str,
    /// JSON text.
    pub evidence: Option<&'a str>,
}

/// A running attempt ends without an answer: `needs_reconciliation`. `due` is when recovery goes on by itself; `None`
/// leaves it to people. False if the claim is no longer ours.
pub async fn unknown(
    session: &mut Session,
    tenant: &Tenant,
    id: &OperationId,
    fence: Fence,
    due: Option<Duration>,
    note: Note<'_>,
) -> Result<bool, Error> {
    let changed = sqlx::query!(
        r#"
        with changed as (
            update ledger.operations
            set state = 'needs_reconciliation', instance_id = null, version = version + 1,
                due_at = statement_timestamp() + $5::float8 * interval '1 millisecond'
            where tenant_id = $1 and operation_id = $2 and state = 'running' and attempt = $3
                  and instance_id = $4::text::uuid
            returning tenant_id, operation_id, version, attempt
        )
        insert into ledger.history (tenant_id, operation_id, version, at, event, state, actor, attempt, reason, evidence)
        select tenant_id, operation_id, version, statement_timestamp(), $6, 'needs_reconciliation', $7, attempt, $8,
               $9::text::jsonb
        from changed
        "#,
        tenant.as_str(),
        id.as_str(),
        fence.attempt,
        fence.instance.to_string(),
        due.map(milliseconds),
        note.event,
        note.actor,
        note.reason,
        note.evidence,
    )
    .execute(&mut *session)
    .await
    .map_err(doing("record the unknown outcome"))?;
    Ok(changed.rows_affected() == 1)
}

/// The claim of a lapsed instance: it may have sent, nobody knows. False if it is no longer as it was seen.
pub async fn lapse(
    session: &mut Session,
    tenant: &Tenant,
    id: &OperationId,
    version: i32,
    due: Option<Duration>,
    note: Note<'_>,
) -> Result<bool, Error> {
    let changed = sqlx::query!(
        r#"
        with lapsed as materialized (
            select operation_id from ledger.operations
            where tenant_id = $1 and operation_id = $2 and state = 'running' and version = $3
            for no key update skip locked
        ), changed as (
            update ledger.operations o
            set state = 'needs_reconciliation', instance_id = null, version = o.version + 1,
                due_at = statement_timestamp() + $4::float8 * interval '1 millisecond'
            from lapsed where o.tenant_id = $1 and o.operation_id = lapsed.operation_id
            returning o.tenant_id, o.operation_id, o.version, o.attempt
        )
        insert into ledger.history (tenant_id, operation_id, version, at, event, state, actor, attempt, reason, evidence)
        select tenant_id, operation_id, version, statement_timestamp(), $5, 'needs_reconciliation', $6, attempt, $7,
               $8::text::jsonb
        from changed
        "#,
        tenant.as_str(),
        id.as_str(),
        version,
        due.map(milliseconds),
        note.event,
        note.actor,
        note.reason,
        note.evidence,
    )
    .execute(&mut *session)
    .await
    .map_err(doing("record the lapsed claim"))?;
    Ok(changed.rows_affected() == 1)
}

/// Adds evidence without changing the state: a look-up's answer, an answer that came too late, a note. If the operation is
/// unknown, `due` says when recovery goes on; `None` leaves it to people.
pub async fn learn(
    session: &mut Session,
    tenant: &Tenant,
    id: &OperationId,
    seen: Seen,
    due: Option<Duration>,
    note: Note<'_>,
) -> Result<bool, Error> {
    let changed = sqlx::query!(
        r#"
        with changed as (
            update ledger.operations
            set version = version + 1,
                due_at = case when state = 'needs_reconciliation'
                              then statement_timestamp() + $5::float8 * interval '1 millisecond' else due_at end
            where tenant_id = $1 and operation_id = $2 and state = $3 and version = $4 and purged_at is null
            returning tenant_id, operation_id, version, attempt, state
        )
        insert into ledger.history (tenant_id, operation_id, version, at, event, state, actor, attempt, reason, evidence)
        select tenant_id, operation_id, version, statement_timestamp(), $6, state, $7, attempt, $8, $9::text::jsonb
        from changed
        "#,
        tenant.as_str(),
        id.as_str(),
        seen.state.as_str(),
        seen.version,
        due.map(milliseconds),
        note.event,
        note.actor,
        note.reason,
        note.evidence,
    )
    .execute(&mut *session)
    .await
    .map_err(doing("add to the history"))?;
    Ok(changed.rows_affected() == 1)
}

/// Claims an unknown operation for another send of the same request: by way of `retry_wait`, which nobody else sees.
pub async fn resend(
    session: &mut Session,
    tenant: &Tenant,
    id: &OperationId,
    seen: Seen,
    instance: Uuid,
    note: Note<'_>,
) -> Result<Option<Fence>, Error> {
    let attempt = sqlx::query_scalar!(
        r#"
        with changed as (
            update ledger.operations
            set state = 'running', instance_id = $5::text::uuid, attempt = attempt + 1, version = version + 2, due_at = null
            where tenant_id = $1 and operation_id = $2 and state = $3 and version = $4
            returning tenant_id, operation_id, version, attempt
        ), noted as (
            insert into ledger.history (
                tenant_id, operation_id, version, at, event, state, actor, attempt, reason, evidence)
            select tenant_id, operation_id, version - 1, statement_timestamp(), $6, 'retry_wait', $7, attempt - 1, $8,
                   $9::text::jsonb
            from changed
            union all
            select tenant_id, operation_id, version, statement_timestamp(), 'claimed', 'running', $7, attempt, null, null
            from changed
        )
        select attempt from changed
        "#,
        tenant.as_str(),
        id.as_str(),
        seen.state.as_str(),
        seen.version,
        instance.to_string(),
        note.event,
        note.actor,
        note.reason,
        note.evidence,
    )
    .fetch_optional(&mut *session)
    .await
    .map_err(doing("claim the unknown operation"))?;
    Ok(attempt.map(|attempt| Fence { attempt, instance }))
}

/// It is proved, or decided, that an unknown attempt has not acted: `retry_wait`, due after `delay`.
pub async fn not_executed(
    session: &mut Session,
    tenant: &Tenant,
    id: &OperationId,
    seen: Seen,
    delay: Duration,
    note: Note<'_>,
) -> Result<bool, Error> {
    let changed = sqlx::query!(
        r#"
        with changed as (
            update ledger.operations
            set state = 'retry_wait', version = version + 1,
                due_at = statement_timestamp() + $4::float8 * interval '1 millisecond'
            where tenant_id = $1 and operation_id = $2 and state = 'needs_reconciliation' and version = $3
            returning tenant_id, operation_id, version, attempt
        )
        insert into ledger.history (tenant_id, operation_id, version, at, event, state, actor, attempt, reason, evidence)
        select tenant_id, operation_id, version, statement_timestamp(), $5, 'retry_wait', $6, attempt, $7, $8::text::jsonb
        from changed
        "#,
        tenant.as_str(),
        id.as_str(),
        seen.version,
        milliseconds(delay),
        note.event,
        note.actor,
        note.reason,
        note.evidence,
    )
    .execute(&mut *session)
    .await
    .map_err(doing("put the operation back"))?;
    Ok(changed.rows_affected() == 1)
}

/// What ends an operation that nobody is running.
#[derive(Debug, Clone, Copy)]
pub struct Ending<'a> {
    pub state: StateName,
    pub receipt: &'a Receipt,
    pub retention: Duration,
    pub external_reference: Option<&'a str>,
}

/// Settles an operation in the state and version that was seen, with its receipt: by a look-up's proof, by a person, or
/// because attempts are used up. `None` if it has changed since. A receipt that is there already, because the operation
/// had succeeded before its reversal failed, stays as it is: nobody is ever given another.
pub async fn settle(
    session: &mut Session,
    tenant: &Tenant,
    id: &OperationId,
    seen: Seen,
    ending: Ending<'_>,
    note: Note<'_>,
) -> Result<Option<Times>, Error> {
    let settled = sqlx::query!(
        r#"
        with settled as (
            update ledger.operations
            set state = $5, due_at = null, version = version + 1, settled_at = statement_timestamp(),
                receipt_expires_at = coalesce(
                    (select r.expires_at from ledger.receipts r where r.tenant_id = $1 and r.operation_id = $2),
                    statement_timestamp() + $6::float8 * interval '1 millisecond'),
                external_reference = coalesce($7, external_reference)
            where tenant_id = $1 and operation_id = $2 and state = $3 and version = $4
            returning tenant_id, operation_id, version, attempt, settled_at, receipt_expires_at
        ), receipts as (
            insert into ledger.receipts (
                tenant_id, operation_id, status, headers, body, body_sha256, omitted_bytes, expires_at)
            select tenant_id, operation_id, $8, $9::text::jsonb, $10, $11, $12, receipt_expires_at from settled
            on conflict (tenant_id, operation_id) do nothing
        ), noted as (
            insert into ledger.history (
                tenant_id, operation_id, version, at, event, state, actor, attempt, reason, evidence)
            select tenant_id, operation_id, version, settled_at, $13, $5, $14, attempt, $15, $16::text::jsonb from settled
        )
        select version, settled_at as "settled_at!", receipt_expires_at as "expires_at!" from settled
        "#,
        tenant.as_str(),
        id.as_str(),
        seen.state.as_str(),
        seen.version,
        ending.state.as_str(),
        milliseconds(ending.retention),
        ending.external_reference,
        ending.receipt.status.cast_signed(),
        headers_json(&ending.receipt.headers),
        &ending.receipt.body[..],
        &ending.receipt.body_sha256[..],
        ending.receipt.omitted.map(Omitted::bytes),
        note.event,
        note.actor,
        note.reason,
        note.evidence,
    )
    .fetch_optional(&mut *session)
    .await
    .map_err(doing("settle the operation"))?;
    Ok(settled.map(|row| Times {
        version: row.version,
        settled_at: row.settled_at,
        expires_at: row.expires_at,
    }))
}

/// How many outcomes of a tenant are unknown, counted up to `most`.
pub async fn unknowns(session: &mut Session, tenant: &Tenant, most: i64) -> Result<u64, Error> {
    let count = sqlx::query_scalar!(
        r#"
        select count(*) as "count!" from (
            select from ledger.operations
            where tenant_id = $1 and state <> 'succeeded' and state = 'needs_reconciliation' limit $2) unknown
        "#,
        tenant.as_str(),
        most,
    )
    .fetch_one(&mut *session)
    .await
    .map_err(doing("count the unknown outcomes"))?;
    Ok(count.cast_unsigned())
}
