//! Compensation: an operation is undone by another one, its declared reversal, which has its own id, attempts and receipt.

use super::claim::milliseconds;
use super::forward::Forward;
use super::operation_id::OperationId;
use super::plan::Seen;
use super::receipt::Receipt;
use super::reconciliation::Note;
use super::settlement::headers_json;
use super::tenant::Tenant;
use crate::postgres::error::{Error, doing};
use crate::postgres::session::Session;

/// The id of an operation's reversal: there is only one.
pub fn reversal_id(id: &OperationId) -> OperationId {
    const SUFFIX: &str = ":compensation";
    OperationId::parse(format!("{id}{SUFFIX}")).unwrap_or_else(|_| {
        // Too long: then by digest, which fits.
        use sha2::{Digest, Sha256};
        let digits: String = Sha256::digest(id.as_str())
            .iter()
            .map(|byte| format!("{byte:02x}"))
            .collect();
        OperationId::parse(format!("{digits}{SUFFIX}")).unwrap_or_else(|_| id.clone())
    })
}

/// Marks an operation as being undone, and links it with its reversal, which is claimed in the same transaction. An unknown
/// one gets the receipt that its callers will be told from now on. False if it is no longer as it was seen.
pub async fn begin(
    session: &mut Session,
    parent: &OperationId,
    seen: Seen,
    reversal: &Forward,
    receipt: &Receipt,
    note: Note<'_>,
) -> Result<bool, Error> {
    let changed = sqlx::query!(
        r#"
        with changed as (
            update ledger.operations
            set state = 'compensating', version = version + 1, due_at = null,
                settled_at = coalesce(settled_at, statement_timestamp()),
                receipt_expires_at = coalesce(
                    receipt_expires_at,
                    (select r.expires_at from ledger.receipts r where r.tenant_id = $1 and r.operation_id = $2),
                    statement_timestamp() + $6::float8 * interval '1 millisecond')
            where tenant_id = $1 and operation_id = $2 and state = $3 and version = $4 and purged_at is null
            returning tenant_id, operation_id, version, attempt, receipt_expires_at
        ), receipts as (
            insert into ledger.receipts (tenant_id, operation_id, status, headers, body, body_sha256, expires_at)
            select tenant_id, operation_id, $7, $8::text::jsonb, $9, $10, receipt_expires_at from changed
            on conflict (tenant_id, operation_id) do nothing
        ), links as (
            insert into ledger.links (tenant_id, operation_id, relation, other_id)
            select tenant_id, operation_id, 'compensated_by', $5 from changed
            union all
            select tenant_id, $5, 'compensates', operation_id from changed
            on conflict do nothing
        )
        insert into ledger.history (tenant_id, operation_id, version, at, event, state, actor, attempt, reason, evidence)
        select tenant_id, operation_id, version, statement_timestamp(), $11, 'compensating', $12, attempt, $13,
               $14::text::jsonb
        from changed
        "#,
        reversal.tenant.as_str(),
        parent.as_str(),
        seen.state.as_str(),
        seen.version,
        reversal.id.as_str(),
        milliseconds(reversal.retention),
        receipt.status.cast_signed(),
        headers_json(&receipt.headers),
        &receipt.body[..],
        &receipt.body_sha256[..],
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

/// Tells operations that are being undone what became of their reversals: `compensated` if it succeeded; unknown again,
/// for people, if it was refused. While the reversal itself is unknown, so is whether the effect stands, and nothing
/// changes. Returns how many were told.
pub async fn follow(session: &mut Session, tenant: &Tenant, actor: &str) -> Result<u64, Error> {
    let told = sqlx::query!(
        r#"
        with ended as materialized (
            select p.operation_id, p.version, c.operation_id as reversal, c.state
            from ledger.operations p
            join ledger.links l on l.tenant_id = $1 and l.operation_id = p.operation_id and l.relation = 'compensated_by'
            join ledger.operations c on c.tenant_id = $1 and c.operation_id = l.other_id
            where p.tenant_id = $1 and p.state = 'compensating' and c.state in ('succeeded', 'failed')
            order by p.operation_id limit 100
        ), changed as (
            update ledger.operations o
            set state = case e.state when 'succeeded' then 'compensated' else 'needs_reconciliation' end,
                version = o.version + 1, due_at = null,
                settled_at = case e.state when 'succeeded' then o.settled_at end,
                receipt_expires_at = case e.state when 'succeeded' then o.receipt_expires_at end
            from ended e
            where o.tenant_id = $1 and o.operation_id = e.operation_id and o.state = 'compensating'
              and o.version = e.version
            returning o.operation_id, o.version, o.state, o.attempt, e.reversal
        )
        insert into ledger.history (tenant_id, operation_id, version, at, event, state, actor, attempt, reason, evidence)
        select $1, operation_id, version, statement_timestamp(),
               case state when 'compensated' then 'compensated' else 'compensation_failed' end, state, $2, attempt,
               case state when 'compensated' then 'its reversal succeeded'
                    else 'its reversal was refused: the effect stands, unless a person finds otherwise' end,
               jsonb_build_object('reversal', reversal)
        from changed
        "#,
        tenant.as_str(),
        actor,
    )
    .execute(&mut *session)
    .await
    .map_err(doing("follow the compensations"))?;
    Ok(told.rows_affected())
}

/// One link of an operation, as people see it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Link {
    pub relation: String,
    pub operation_id: String,
}
