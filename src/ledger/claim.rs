//! Claiming: who inserts an operation's row first performs it.
//!
//! The primary key is the only arbiter. A rival that inserts meanwhile waits for our commit and then finds the row; it
//! has to *read* it in a second statement, because within one statement the winner's row is not visible to it.
//!
//! An in-database operation is claimed in the state it will have if its handler agrees, `succeeded`: nobody sees the
//! row before the commit, and a row that is never updated leaves no dead version behind. A refusal corrects it
//! (`settlement`), trouble withdraws it, both before the commit.

use std::collections::HashMap;
use std::time::Duration;

use time::OffsetDateTime;

use super::submission::Submission;
use super::tenant::Tenant;
use crate::postgres::error::{Error, doing};
use crate::postgres::session::Session;

/// When a claimed operation settles and until when its receipt is kept, if its transaction commits.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Times {
    pub settled_at: OffsetDateTime,
    pub expires_at: OffsetDateTime,
}

/// Claims every submission whose id is free, in the order given, which must be by id so that two groups lock alike.
///
/// Returns the winners by operation id. All submissions are the tenant's own and no id occurs twice.
pub async fn claim_all(
    session: &mut Session,
    tenant: &Tenant,
    submissions: &[&Submission],
) -> Result<HashMap<String, Times>, Error> {
    let columns = Columns::of(submissions);
    let claimed = sqlx::query!(
        r#"
        insert into ledger.operations (
            tenant_id, operation_id, kind, target, state, fingerprint, attempt, version, payload, run, run_id,
            external_reference, requested_by, trace_parent, created_at, settled_at, receipt_expires_at)
        select $1, m.operation_id, m.kind, m.target, 'succeeded', m.fingerprint, 1, 1, m.payload, m.run::jsonb, m.run_id,
               m.external_reference, m.requested_by, m.trace_parent, statement_timestamp(), statement_timestamp(),
               statement_timestamp() + m.retention * interval '1 millisecond'
        from unnest($2::text[], $3::text[], $4::text[], $5::text[], $6::text[], $7::text[], $8::text[], $9::text[],
                    $10::text[], $11::text[], $12::float8[])
             as m (operation_id, kind, target, fingerprint, payload, run, run_id, external_reference, requested_by,
                   trace_parent, retention)
        on conflict (tenant_id, operation_id) do nothing
        returning operation_id, settled_at as "settled_at!", receipt_expires_at as "expires_at!"
        "#,
        tenant.as_str(),
        &columns.ids as _,
        &columns.kinds as _,
        &columns.targets as _,
        &columns.fingerprints as _,
        &columns.payloads as _,
        &columns.runs as _,
        &columns.run_ids as _,
        &columns.references as _,
        &columns.requested_by as _,
        &columns.trace_parents as _,
        &columns.retentions as _,
    )
    .fetch_all(&mut *session)
    .await
    .map_err(doing("claim the operations"))?;
    Ok(claimed
        .into_iter()
        .map(|row| {
            (
                row.operation_id,
                Times {
                    settled_at: row.settled_at,
                    expires_at: row.expires_at,
                },
            )
        })
        .collect())
}

/// Takes claims of this transaction back, as if they had never been made: the ids stay free.
pub async fn withdraw(session: &mut Session, tenant: &Tenant, ids: &[&str]) -> Result<(), Error> {
    sqlx::query!(
        "delete from ledger.operations where tenant_id = $1 and operation_id = any($2)",
        tenant.as_str(),
        ids as _,
    )
    .execute(&mut *session)
    .await
    .map_err(doing("withdraw the claims"))?;
    Ok(())
}

/// The submissions turned on their side: one array a column.
struct Columns<'a> {
    ids: Vec<&'a str>,
    kinds: Vec<&'a str>,
    targets: Vec<String>,
    fingerprints: Vec<String>,
    payloads: Vec<&'a str>,
    runs: Vec<Option<&'a str>>,
    run_ids: Vec<Option<&'a str>>,
    references: Vec<Option<&'a str>>,
    requested_by: Vec<&'a str>,
    trace_parents: Vec<Option<&'a str>>,
    retentions: Vec<f64>,
}

impl<'a> Columns<'a> {
    fn of(submissions: &[&'a Submission]) -> Self {
        Self {
            ids: submissions.iter().map(|one| one.id.as_str()).collect(),
            kinds: submissions.iter().map(|one| &*one.kind.name).collect(),
            targets: submissions.iter().map(|one| one.kind.handler.to_string()).collect(),
            fingerprints: submissions.iter().map(|one| one.fingerprint.to_string()).collect(),
            payloads: submissions.iter().map(|one| &*one.payload).collect(),
            runs: submissions
                .iter()
                .map(|one| one.run.as_ref().map(|run| run.text.as_str()))
                .collect(),
            run_ids: submissions
                .iter()
                .map(|one| one.run.as_ref()?.run_id.as_deref())
                .collect(),
            references: submissions
                .iter()
                .map(|one| one.external_reference.as_deref())
                .collect(),
            requested_by: submissions.iter().map(|one| &*one.requested_by).collect(),
            trace_parents: submissions.iter().map(|one| one.trace_parent.as_deref()).collect(),
            retentions: submissions.iter().map(|one| milliseconds(one.kind.retention)).collect(),
        }
    }
}

/// A duration as PostgreSQL multiplies intervals; exact for anything below 285,000 years.
pub fn milliseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1_000.0
}
