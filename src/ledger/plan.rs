//! Operations that are stored before they run: planned ones, and accepted ones that run in the background.
//!
//! Each verb is one guarded statement with its history row; a guard that does not hold changes nothing. In-database
//! operations are known not to have acted until they are settled, because their effect is part of the settling
//! transaction: a claim whose process died can simply be run again.

use std::time::Duration;

use time::OffsetDateTime;
use uuid::Uuid;

use super::claim::milliseconds;
use super::operation::StateName;
use super::operation_id::OperationId;
use super::submission::Submission;
use super::tenant::Tenant;
use crate::postgres::error::{Error, doing};
use crate::postgres::session::Session;

/// How a stored operation begins.
#[derive(Debug, Clone, Copy)]
pub enum Beginning {
    /// Not to run yet.
    Planned,
    /// Claimed by this instance, which runs it after its caller has been answered.
    Accepted { instance: Uuid },
    /// Claimed by this instance within the transaction that settles it.
    Claimed { instance: Uuid },
}

/// Stores the submission if its id is free; says whether it did.
pub async fn store(session: &mut Session, submission: &Submission, beginning: Beginning) -> Result<bool, Error> {
    let (state, event, attempt, instance) = match beginning {
        Beginning::Planned => (StateName::Planned, "planned", 0, None),
        Beginning::Accepted { instance } => (StateName::Running, "accepted", 1, Some(instance.to_string())),
        Beginning::Claimed { instance } => (StateName::Running, "claimed", 1, Some(instance.to_string())),
    };
    let stored = sqlx::query!(
        r#"
        with stored as (
            insert into ledger.operations (
                tenant_id, operation_id, kind, target, state, fingerprint, attempt, version, payload, run, run_id,
                external_reference, requested_by, trace_parent, instance_id, created_at)
            values ($1, $2, $3, $4, $5, $6, $7, 1, $8, $9::text::jsonb, $10, $11, $12, $13, $14::text::uuid,
                    statement_timestamp())
            on conflict (tenant_id, operation_id) do nothing
            returning tenant_id, operation_id, version, created_at, state, attempt
        )
        insert into ledger.history (tenant_id, operation_id, version, at, event, state, actor, attempt)
        select tenant_id, operation_id, version, created_at, $15, state, $16, attempt from stored
        "#,
        submission.tenant.as_str(),
        submission.id.as_str(),
        &*submission.kind.name,
        submission.kind.handler.to_string(),
        state.as_str(),
        submission.fingerprint.to_string(),
        attempt,
        &*submission.payload,
        submission.run.as_ref().map(|run| run.text.as_str()),
        submission.run.as_ref().and_then(|run| run.run_id.as_deref()),
        submission.external_reference.as_deref(),
        &*submission.requested_by,
        submission.trace_parent.as_deref(),
        instance,
        event,
        submission.requester(),
    )
    .execute(&mut *session)
    .await
    .map_err(doing("store the operation"))?;
    Ok(stored.rows_affected() == 1)
}

/// An operation that was stored earlier, with all that running it needs.
#[derive(Debug, Clone)]
pub struct Stored {
    pub tenant: Tenant,
    pub id: OperationId,
    pub kind: String,
    pub payload: String,
    pub requested_by: String,
    pub trace_parent: Option<String>,
    pub attempt: i32,
    pub version: i32,
}

/// What it takes to claim a stored operation: the state and version that the claimer has seen.
#[derive(Debug, Clone, Copy)]
pub struct Seen {
    pub state: StateName,
    pub version: i32,
}

/// Claims a stored operation for its next attempt. `None` if it is no longer as it was seen.
pub async fn claim(
    session: &mut Session,
    tenant: &Tenant,
    id: &OperationId,
    seen: Seen,
    instance: Uuid,
    actor: &str,
) -> Result<Option<Stored>, Error> {
    let claimed = sqlx::query!(
        r#"
        with claimed as (
            update ledger.operations
            set state = 'running', instance_id = $5::text::uuid, attempt = attempt + 1, version = version + 1, due_at = null
            where tenant_id = $1 and operation_id = $2 and state = $3 and version = $4
            returning tenant_id, operation_id, kind, payload, requested_by, trace_parent, attempt, version
        ), noted as (
            insert into ledger.history (tenant_id, operation_id, version, at, event, state, actor, attempt)
            select tenant_id, operation_id, version, clock_timestamp(), 'claimed', 'running', $6, attempt from claimed
        )
        select kind, payload as "payload!", requested_by, trace_parent, attempt, version from claimed
        "#,
        tenant.as_str(),
        id.as_str(),
        seen.state.as_str(),
        seen.version,
        instance.to_string(),
        actor,
    )
    .fetch_optional(&mut *session)
    .await
    .map_err(doing("claim the stored operation"))?;
    Ok(claimed.map(|row| Stored {
        tenant: tenant.clone(),
        id: id.clone(),
        kind: row.kind,
        payload: row.payload,
        requested_by: row.requested_by,
        trace_parent: row.trace_parent,
        attempt: row.attempt,
        version: row.version,
    }))
}

/// Puts the claim of a lapsed instance back: its attempt never committed, so it is known not to have acted.
///
/// PostgreSQL may still be at that attempt, and roll it back only when it notices that nobody listens any more. Until
/// then it holds the row, and the sweep passes it by: waiting here would keep every other operation waiting, too.
pub async fn lapse(
    session: &mut Session,
    tenant: &Tenant,
    id: &OperationId,
    version: i32,
    actor: &str,
) -> Result<bool, Error> {
    let now = clock(session).await?;
    let changed = sqlx::query!(
        r#"
        with lapsed as materialized (
            select operation_id from ledger.operations
            where tenant_id = $1 and operation_id = $2 and state = 'running' and version = $3
            for no key update skip locked
        ), changed as (
            update ledger.operations o
            set state = 'retry_wait', instance_id = null, version = o.version + 1, due_at = $4
            from lapsed where o.tenant_id = $1 and o.operation_id = lapsed.operation_id
            returning o.tenant_id, o.operation_id, o.version, o.attempt
        )
        insert into ledger.history (tenant_id, operation_id, version, at, event, state, actor, attempt, reason)
        select tenant_id, operation_id, version, $4, 'claim_lapsed', 'retry_wait', $5, attempt,
               'the process that held the claim stopped; its transaction never committed'
        from changed
        "#,
        tenant.as_str(),
        id.as_str(),
        version,
        now,
        actor,
    )
    .execute(&mut *session)
    .await
    .map_err(doing("put the lapsed claim back"))?;
    Ok(changed.rows_affected() == 1)
}

/// The claim a running attempt presents when it settles: the fence.
#[derive(Debug, Clone, Copy)]
pub struct Fence {
    pub attempt: i32,
    pub instance: Uuid,
}

/// What a settled attempt is stored as.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Times {
    pub version: i32,
    pub settled_at: OffsetDateTime,
    pub expires_at: OffsetDateTime,
}

/// Locks the claimed row for settling; false if the claim is not, or no longer, ours. Called before the handler runs, so
/// that a process which lost its claim makes no effect.
///
/// The row is locked by its key alone and looked at afterwards. A claim whose commit is still under way on a connection we
/// have lost is waited for that way; a condition on the state would pass the old row by without waiting.
pub async fn hold(session: &mut Session, tenant: &Tenant, id: &OperationId, fence: Fence) -> Result<bool, Error> {
    let held = sqlx::query_scalar!(
        r#"
        with held as materialized (
            select state, attempt, instance_id from ledger.operations
            where tenant_id = $1 and operation_id = $2
            for no key update
        )
        select state = 'running' and attempt = $3 and instance_id = $4::text::uuid from held
        "#,
        tenant.as_str(),
        id.as_str(),
        fence.attempt,
        fence.instance.to_string(),
    )
    .fetch_optional(&mut *session)
    .await
    .map_err(doing("hold the claimed operation"))?;
    Ok(held.flatten().unwrap_or(false))
}

/// Settles a held operation; receipt and history row follow by `settlement::store_all` in the same transaction.
pub async fn settle(
    session: &mut Session,
    tenant: &Tenant,
    id: &OperationId,
    state: StateName,
    retention: Duration,
) -> Result<Times, Error> {
    let now = clock(session).await?;
    let settled = sqlx::query!(
        r#"
        update ledger.operations
        set state = $3, instance_id = null, version = version + 1, settled_at = $4::timestamptz,
            receipt_expires_at = $4::timestamptz + $5::float8 * interval '1 millisecond'
        where tenant_id = $1 and operation_id = $2
        returning version, settled_at as "settled_at!", receipt_expires_at as "expires_at!"
        "#,
        tenant.as_str(),
        id.as_str(),
        state.as_str(),
        now,
        milliseconds(retention),
    )
    .fetch_one(&mut *session)
    .await
    .map_err(doing("settle the operation"))?;
    Ok(Times {
        version: settled.version,
        settled_at: settled.settled_at,
        expires_at: settled.expires_at,
    })
}

/// Puts a running operation back to wait for its next attempt: this one is known not to have acted.
pub async fn wait(
    session: &mut Session,
    tenant: &Tenant,
    id: &OperationId,
    fence: Fence,
    delay: Duration,
    reason: &str,
    evidence: Option<&str>,
) -> Result<bool, Error> {
    let now = clock(session).await?;
    let changed = sqlx::query!(
        r#"
        with changed as (
            update ledger.operations
            set state = 'retry_wait', instance_id = null, version = version + 1,
                due_at = $5::timestamptz + $6::float8 * interval '1 millisecond'
            where tenant_id = $1 and operation_id = $2 and state = 'running' and attempt = $3
                  and instance_id = $4::text::uuid
            returning tenant_id, operation_id, version, attempt
        )
        insert into ledger.history (tenant_id, operation_id, version, at, event, state, actor, attempt, reason, evidence)
        select tenant_id, operation_id, version, $5, 'retry_scheduled', 'retry_wait', $7, attempt, $8, $9::text::jsonb
        from changed
        "#,
        tenant.as_str(),
        id.as_str(),
        fence.attempt,
        fence.instance.to_string(),
        now,
        milliseconds(delay),
        format!("instance:{}", fence.instance),
        reason,
        evidence,
    )
    .execute(&mut *session)
    .await
    .map_err(doing("put the operation back"))?;
    Ok(changed.rows_affected() == 1)
}

/// Cancels an operation that has not run, by its requester. `None` if it is not, or no longer, to be cancelled.
pub async fn cancel(
    session: &mut Session,
    tenant: &Tenant,
    id: &OperationId,
    seen: Seen,
    retention: Duration,
) -> Result<Option<Times>, Error> {
    let now = clock(session).await?;
    let cancelled = sqlx::query!(
        r#"
        update ledger.operations
        set state = 'cancelled', version = version + 1, settled_at = $5::timestamptz,
            receipt_expires_at = $5::timestamptz + $6::float8 * interval '1 millisecond'
        where tenant_id = $1 and operation_id = $2 and state = $3 and version = $4
        returning version, settled_at as "settled_at!", receipt_expires_at as "expires_at!"
        "#,
        tenant.as_str(),
        id.as_str(),
        seen.state.as_str(),
        seen.version,
        now,
        milliseconds(retention),
    )
    .fetch_optional(&mut *session)
    .await
    .map_err(doing("cancel the operation"))?;
    Ok(cancelled.map(|row| Times {
        version: row.version,
        settled_at: row.settled_at,
        expires_at: row.expires_at,
    }))
}

/// An operation that nobody is running.
#[derive(Debug, Clone)]
pub struct Abandoned {
    pub id: OperationId,
    pub seen: Seen,
    /// Whether a downstream performs it, so that it may have acted.
    pub downstream: bool,
}

/// Operations of a tenant that nobody is running: claims of lapsed instances, if there is a lease to judge them by,
/// attempts that are due, and unknowns that their downstream can settle.
pub async fn abandoned(
    session: &mut Session,
    tenant: &Tenant,
    lease: Option<Duration>,
    limit: i64,
) -> Result<Vec<Abandoned>, Error> {
    let rows = sqlx::query!(
        r#"
        select o.operation_id, o.state, o.version, o.downstream is not null as "downstream!" from ledger.operations o
        where o.tenant_id = $1 and o.state <> 'succeeded' and (
              (o.state = 'running' and $2::float8 is not null and not exists (
                  select from ledger.instances i
                  where i.instance_id = o.instance_id
                    and i.heartbeat_at >= clock_timestamp() - $2::float8 * interval '1 millisecond'))
           or (o.state in ('retry_wait', 'needs_reconciliation') and o.due_at <= clock_timestamp()))
        order by o.created_at limit $3
        "#,
        tenant.as_str(),
        lease.map(milliseconds),
        limit,
    )
    .fetch_all(&mut *session)
    .await
    .map_err(doing("look for abandoned operations"))?;
    Ok(rows
        .into_iter()
        .filter_map(|row| {
            Some(Abandoned {
                id: OperationId::parse(&row.operation_id).ok()?,
                seen: Seen {
                    state: StateName::parse(&row.state)?,
                    version: row.version,
                },
                downstream: row.downstream,
            })
        })
        .collect())
}

async fn clock(session: &mut Session) -> Result<OffsetDateTime, Error> {
    sqlx::query_scalar!(r#"select clock_timestamp() as "now!""#)
        .fetch_one(&mut *session)
        .await
        .map_err(doing("read the clock"))
}
