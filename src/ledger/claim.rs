//! A group's statement: it claims, runs the winners' handlers, and stores what they returned.
//!
//! The primary key is the only arbiter: who inserts an operation's row first performs it. A rival that inserts meanwhile
//! waits for our commit and then finds the row; it has to *read* it in a second statement, because within one statement
//! the winner's row is not visible to it.
//!
//! An operation is claimed in the state it will have if its handler agrees, `succeeded`: nobody sees the row before the
//! commit, and a row that is never updated leaves no dead version behind. What a handler raised is only reported here. A
//! refusal corrects the claim (`settlement`), trouble withdraws it, both before the commit.

use std::time::Duration;

use time::OffsetDateTime;

use super::receipt::{self, Receipt};
use super::settlement::{Applied, headers_json};
use super::submission::Submission;
use super::tenant::Tenant;
use crate::postgres::error::{Error, doing};
use crate::postgres::session::Session;

/// A claim that was won.
#[derive(Debug)]
pub struct Won {
    /// When the operation settles and until when its receipt is kept, if the transaction commits.
    pub times: Times,
    /// What its handler did. A receipt is stored, with its row of history.
    pub applied: Applied<Receipt>,
}

#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Times {
    pub settled_at: OffsetDateTime,
    pub expires_at: OffsetDateTime,
}

/// Claims every submission whose id is free, and performs those.
///
/// Submissions are the tenant's own, in order of id, so that two groups lock alike, and no id occurs twice. Answers in
/// that order; `None` is for a claim that was lost.
///
/// Handlers run in that order too, one after the other, each in a sub-transaction of its own. `applied` sorts what was
/// claimed: a sort has to have everything before it gives anything, so all claims are made before the first handler runs.
///
/// A claim that settles at once has one row of history, and that is of whoever asked for the operation.
pub async fn perform_all(
    session: &mut Session,
    tenant: &Tenant,
    max_result_bytes: i32,
    submissions: &[&Submission],
) -> Result<Vec<Option<Won>>, Error> {
    let columns = Columns::of(submissions);
    let rows = sqlx::query!(
        r#"
        with claimed as (
            insert into ledger.operations (
                tenant_id, operation_id, kind, target, state, fingerprint, attempt, version, payload, run, run_id,
                external_reference, requested_by, trace_parent, created_at, settled_at, receipt_expires_at)
            select $1, m.operation_id, m.kind, m.target, 'succeeded', m.fingerprint, 1, 1, m.payload, m.run::jsonb,
                   m.run_id, m.external_reference, m.requested_by, m.trace_parent,
                   statement_timestamp(), statement_timestamp(),
                   statement_timestamp() + m.retention * interval '1 millisecond'
            from unnest($2::text[], $3::text[], $4::text[], $5::text[], $6::text[], $7::text[], $8::text[], $9::text[],
                        $10::text[], $11::text[], $12::float8[])
                 as m (operation_id, kind, target, fingerprint, payload, run, run_id, external_reference, requested_by,
                       trace_parent, retention)
            on conflict (tenant_id, operation_id) do nothing
            returning operation_id, requested_by, settled_at, receipt_expires_at
        ), applied as materialized (
            select c.operation_id, c.requested_by, c.place, c.settled_at, c.receipt_expires_at,
                   a.error_code, a.message, a.detail, a.by_ledger,
                   convert_to(
                       c.head || a.result || $17 || to_char(c.settled_at at time zone 'UTC', $18) || $19, 'UTF8'
                   ) as body
            from (
                select claimed.*, m.*
                from claimed
                join unnest($2::text[], $13::text[], $14::text[], $15::text[], $16::text[])
                     with ordinality as m (id, handler, payload, operation, head, place)
                     on m.id = claimed.operation_id
                order by claimed.operation_id collate "C"
            ) as c
            cross join lateral ledger.apply(c.handler, c.payload::jsonb, c.operation::jsonb, $22) as a
        ), receipts as (
            insert into ledger.receipts (tenant_id, operation_id, status, headers, body, body_sha256, expires_at)
            select $1, operation_id, $20, $21::text::jsonb, body, sha256(body), receipt_expires_at
            from applied
            where error_code is null
        ), history as (
            insert into ledger.history (tenant_id, operation_id, version, at, event, state, actor, attempt)
            select $1, operation_id, 1, settled_at, 'succeeded', 'succeeded', 'key:' || requested_by, 1
            from applied
            where error_code is null
        )
        select place as "place!", settled_at as "settled_at!", receipt_expires_at as "expires_at!", error_code, message,
               detail, by_ledger, body
        from applied
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
        &columns.handlers as _,
        &columns.canonicals as _,
        &columns.arguments as _,
        &columns.heads as _,
        receipt::SUCCESS_TIME,
        receipt::TIME_IN_SQL,
        receipt::SUCCESS_END,
        receipt::SUCCESS.cast_signed(),
        headers_json(&receipt::success_headers()),
        max_result_bytes,
    )
    .fetch_all(&mut *session)
    .await
    .map_err(doing("claim and run the operations"))?;
    let mut won: Vec<Option<Won>> = submissions.iter().map(|_| None).collect();
    for row in rows {
        let place = usize::try_from(row.place)
            .ok()
            .and_then(|place| won.get_mut(place.wrapping_sub(1)));
        // The statement gives back the places it was given.
        let Some(place) = place else { continue };
        let times = Times {
            settled_at: row.settled_at,
            expires_at: row.expires_at,
        };
        let applied = match row.body {
            Some(body) => Applied::Returned(Receipt::success(body.into())),
            None => Applied::reported(row.error_code, row.message, row.detail, row.by_ledger),
        };
        *place = Some(Won { times, applied });
    }
    Ok(won)
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

/// A claim is the first attempt.
const ATTEMPT: i32 = 1;

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
    handlers: Vec<&'a str>,
    canonicals: Vec<&'a str>,
    arguments: Vec<String>,
    heads: Vec<String>,
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
            handlers: submissions.iter().map(|one| one.kind.handler.quoted()).collect(),
            canonicals: submissions.iter().map(|one| &*one.canonical).collect(),
            arguments: submissions.iter().map(|one| one.operation_argument(ATTEMPT)).collect(),
            heads: submissions
                .iter()
                .map(|one| receipt::success_head(&one.id, &one.kind.name, &one.fingerprint, ATTEMPT))
                .collect(),
        }
    }
}

/// A duration as PostgreSQL multiplies intervals; exact for anything below 285,000 years.
pub fn milliseconds(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1_000.0
}
