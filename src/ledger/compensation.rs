//! Compensation: an operation is undone by another one, its declared reversal, which has its own id, attempts and receipt.

use uuid::Uuid;

use super::fingerprint::Fingerprint;
use super::forward::Forward;
use super::operation::StateName;
use super::operation_id::OperationId;
use super::plan::Seen;
use super::reconciliation::Note;
use super::tenant::Tenant;
use crate::postgres::error::{Error, doing};
use crate::postgres::session::Session;

/// What an operation's reversal is called, unless somebody else's operation has that name.
pub fn reversal_id(id: &OperationId) -> OperationId {
    named(id, ":compensation")
}

/// A name that nobody can have taken on purpose. There is one reversal all the same: the operation's state allows one.
fn unforeseeable_id(id: &OperationId) -> OperationId {
    named(id, &format!(":compensation:{}", Uuid::now_v7()))
}

fn named(id: &OperationId, suffix: &str) -> OperationId {
    OperationId::parse(format!("{id}{suffix}")).unwrap_or_else(|_| {
        // Too long: then by digest, which fits.
        use sha2::{Digest, Sha256};
        let digits: String = Sha256::digest(id.as_str())
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        OperationId::parse(format!("{digits}{suffix}")).unwrap_or_else(|_| id.clone())
    })
}

/// What an operation's reversal is or can be called.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Name {
    /// It has one, of this name.
    Exists(String),
    Free(OperationId),
}

/// Every id belongs to whoever uses it first: a stranger's operation under the usual name is not the reversal, and does not
/// stand in its way.
pub async fn name(session: &mut Session, tenant: &Tenant, parent: &OperationId) -> Result<Name, Error> {
    let usual = reversal_id(parent);
    let known = sqlx::query!(
        r#"
        select
            (select other_id from ledger.links
             where tenant_id = $1 and operation_id = $2 and relation = 'compensated_by' limit 1) as reversal,
            exists (select from ledger.operations where tenant_id = $1 and operation_id = $3) as "is_taken!"
        "#,
        tenant.as_str(),
        parent.as_str(),
        usual.as_str(),
    )
    .fetch_one(&mut *session)
    .await
    .map_err(doing("look for the operation's reversal"))?;
    Ok(match known.reversal {
        Some(reversal) => Name::Exists(reversal),
        None if known.is_taken => Name::Free(unforeseeable_id(parent)),
        None => Name::Free(usual),
    })
}

/// Marks an operation as being undone, and links it with its reversal, which is claimed in the same transaction. One that
/// had succeeded keeps its receipt; an unknown one gets none before it is undone. False if it is no longer as it was seen.
pub async fn begin(
    session: &mut Session,
    parent: &OperationId,
    seen: Seen,
    reversal: &Forward,
    note: Note<'_>,
) -> Result<bool, Error> {
    let changed = sqlx::query!(
        r#"
        with changed as (
            update ledger.operations
            set state = 'compensating', version = version + 1, due_at = null
            where tenant_id = $1 and operation_id = $2 and state = $3 and version = $4 and purged_at is null
            returning tenant_id, operation_id, version, attempt
        ), links as (
            insert into ledger.links (tenant_id, operation_id, relation, other_id)
            select tenant_id, operation_id, 'compensated_by', $5 from changed
            union all
            select tenant_id, $5, 'compensates', operation_id from changed
            on conflict do nothing
        )
        insert into ledger.history (tenant_id, operation_id, version, at, event, state, actor, attempt, reason, evidence)
        select tenant_id, operation_id, version, statement_timestamp(), $6, 'compensating', $7, attempt, $8,
               $9::text::jsonb
        from changed
        "#,
        reversal.tenant.as_str(),
        parent.as_str(),
        seen.state.as_str(),
        seen.version,
        reversal.id.as_str(),
        note.event,
        note.actor,
        note.reason,
        note.evidence,
    )
    .execute(&mut *session)
    .await
    .map_err(doing("begin the compensation"))?;
    Ok(changed.rows_affected() == 1)
}

/// An operation that is being undone, and whose reversal has ended.
#[derive(Debug, Clone)]
pub struct Ended {
    pub id: OperationId,
    pub kind: String,
    pub fingerprint: Fingerprint,
    pub attempt: i32,
    pub version: i32,
    /// It had succeeded, and has its receipt; otherwise it was unknown.
    pub had_succeeded: bool,
    pub reversal: String,
    pub is_undone: bool,
}

/// Operations whose reversals have ended. While a reversal itself is unknown, so is whether the effect stands, and its
/// operation is not among them.
pub async fn ended(session: &mut Session, tenant: &Tenant) -> Result<Vec<Ended>, Error> {
    let rows = sqlx::query!(
        r#"
        select p.operation_id, p.kind, p.fingerprint, p.attempt, p.version, p.settled_at is not null as "had_succeeded!",
               c.operation_id as reversal, c.state = 'succeeded' as "is_undone!"
        from ledger.operations p
        join ledger.links l on l.tenant_id = $1 and l.operation_id = p.operation_id and l.relation = 'compensated_by'
        join ledger.operations c on c.tenant_id = $1 and c.operation_id = l.other_id
        where p.tenant_id = $1 and p.state = 'compensating' and p.state <> 'succeeded'
          and c.state in ('succeeded', 'failed')
        order by p.operation_id limit 100
        "#,
        tenant.as_str(),
    )
    .fetch_all(&mut *session)
    .await
    .map_err(doing("look for compensations that have ended"))?;
    Ok(rows
        .into_iter()
        .filter_map(|row| {
            Some(Ended {
                id: OperationId::parse(&row.operation_id).ok()?,
                kind: row.kind,
                fingerprint: row.fingerprint.parse().ok()?,
                attempt: row.attempt,
                version: row.version,
                had_succeeded: row.had_succeeded,
                reversal: row.reversal,
                is_undone: row.is_undone,
            })
        })
        .collect())
}

/// Ends it as it is: `compensated` with the receipt that it has, or unknown again, for people. False if it is no longer as
/// it was seen.
pub async fn end(
    session: &mut Session,
    tenant: &Tenant,
    ended: &Ended,
    state: StateName,
    note: Note<'_>,
) -> Result<bool, Error> {
    let changed = sqlx::query!(
        r#"
        with changed as (
            update ledger.operations
            set state = $4, version = version + 1, due_at = null,
                settled_at = case $4 when 'compensated' then settled_at end,
                receipt_expires_at = case $4 when 'compensated' then receipt_expires_at end
            where tenant_id = $1 and operation_id = $2 and state = 'compensating' and version = $3
            returning tenant_id, operation_id, version, attempt
        )
        insert into ledger.history (tenant_id, operation_id, version, at, event, state, actor, attempt, reason, evidence)
        select tenant_id, operation_id, version, statement_timestamp(), $5, $4, $6, attempt, $7, $8::text::jsonb
        from changed
        "#,
        tenant.as_str(),
        ended.id.as_str(),
        ended.version,
        state.as_str(),
        note.event,
        note.actor,
        note.reason,
        note.evidence,
    )
    .execute(&mut *session)
    .await
    .map_err(doing("end the compensation"))?;
    Ok(changed.rows_affected() == 1)
}

/// One link of an operation, as people see it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Link {
    pub relation: String,
    pub operation_id: String,
}
