//! Operations that a downstream performs: claimed in one transaction, sent outside of any, settled in another.
//!
//! The claim stores all that a later attempt needs, and its commit is the permission to send. The settling statement
//! presents the claim again (attempt and instance, the fence): whoever has lost it meanwhile changes nothing.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use sha2::{Digest, Sha256};
use time::OffsetDateTime;
use uuid::Uuid;

use super::claim::milliseconds;
use super::fingerprint::Fingerprint;
use super::operation::StateName;
use super::operation_id::OperationId;
use super::plan::{Fence, Seen, Times};
use super::receipt::{Omitted, Receipt};
use super::settlement::headers_json;
use super::submission::Run;
use super::tenant::Tenant;
use crate::postgres::error::{Error, doing};
use crate::postgres::session::Session;

/// Kinds of proxied requests are `proxy.` and the downstream's name; no configured kind may begin so.
pub const PROXY_KINDS: &str = "proxy.";

/// One intent that a downstream is to perform.
#[derive(Debug, Clone)]
pub struct Forward {
    pub tenant: Tenant,
    pub id: OperationId,
    pub kind: Arc<str>,
    pub fingerprint: Fingerprint,
    pub downstream: Arc<str>,
    /// For people: `POST payments/charges`.
    pub target: String,
    /// What was asked: the payload's text, or a description of the proxied request.
    pub payload: Box<str>,
    pub request: Request,
    pub run: Option<Run>,
    pub external_reference: Option<String>,
    /// Key id of the caller.
    pub requested_by: Arc<str>,
    pub trace_parent: Option<String>,
    pub retention: Duration,
}

/// The request as it is sent on every attempt.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Request {
    pub method: String,
    pub path_and_query: String,
    pub headers: Vec<(String, String)>,
    pub body: bytes::Bytes,
    pub downstream_key: String,
}

/// The key that a downstream gets for an operation: the same on every attempt, and no other operation's, whatever the
/// alphabets of tenants and ids.
pub fn downstream_key(tenant: &Tenant, id: &OperationId) -> String {
    const DIGITS: usize = 40;
    let mut hash = Sha256::new();
    for part in [tenant.as_str(), id.as_str()] {
        hash.update((part.len() as u64).to_be_bytes());
        hash.update(part);
    }
    let mut key = String::from("opl-");
    key.extend(hash.finalize().iter().map(|byte| format!("{byte:02x}")));
    key.truncate("opl-".len() + DIGITS);
    key
}

/// As PostgreSQL takes it, in milliseconds.
fn lock_timeout(lock: Duration) -> String {
    lock.as_millis().to_string()
}

/// Claims every id that is free, with its request; answers when each was claimed. Ids are in order, one tenant's, and
/// none occurs twice. Losers are read in a statement of their own.
///
/// The statement sets its own limit for locks (`lock`), so that it can be a transaction by itself.
pub async fn claim_all(
    session: &mut Session,
    tenant: &Tenant,
    instance: Uuid,
    lock: Duration,
    forwards: &[&Forward],
) -> Result<HashMap<String, OffsetDateTime>, Error> {
    fn all<'a, T>(forwards: &[&'a Forward], part: impl Fn(&'a Forward) -> T) -> Vec<T> {
        forwards.iter().map(|forward| part(forward)).collect()
    }
    let claimed = sqlx::query!(
        r#"
        with limits as materialized (select set_config('lock_timeout', $19, true)),
        m as materialized (
            select m.* from limits, unnest(
                $3::text[], $4::text[], $5::text[], $6::text[], $7::text[], $8::text[], $9::text[], $10::text[],
                $11::text[], $12::text[], $13::text[], $14::text[], $15::text[], $16::text[], $17::bytea[], $18::text[])
            as m (operation_id, kind, target, downstream, fingerprint, payload, run, run_id, external_reference,
                  requested_by, trace_parent, method, path_and_query, headers, body, downstream_key)
        ), claimed as (
            insert into ledger.operations (
                tenant_id, operation_id, kind, target, downstream, state, fingerprint, attempt, version, payload, run,
                run_id, external_reference, requested_by, trace_parent, instance_id, created_at)
            select $1, m.operation_id, m.kind, m.target, m.downstream, 'running', m.fingerprint, 1, 1, m.payload,
                   m.run::jsonb, m.run_id, m.external_reference, m.requested_by, m.trace_parent, $2::text::uuid,
                   statement_timestamp()
            from m
            on conflict (tenant_id, operation_id) do nothing
            returning operation_id, created_at
        ), noted as (
            insert into ledger.history (tenant_id, operation_id, version, at, event, state, actor, attempt)
            select $1, c.operation_id, 1, c.created_at, 'claimed', 'running', 'key:' || m.requested_by, 1
            from claimed c join m using (operation_id)
        ), kept as (
            insert into ledger.requests (
                tenant_id, operation_id, method, path_and_query, headers, body, downstream_key, sent_at)
            select $1, c.operation_id, m.method, m.path_and_query, m.headers::jsonb, m.body, m.downstream_key,
                   c.created_at
            from claimed c join m using (operation_id)
        )
        select operation_id, created_at from claimed
        "#,
        tenant.as_str(),
        instance.to_string(),
        &all(forwards, |one| one.id.as_str()) as _,
        &all(forwards, |one| &*one.kind) as _,
        &all(forwards, |one| one.target.as_str()) as _,
        &all(forwards, |one| &*one.downstream) as _,
        &all(forwards, |one| one.fingerprint.to_string()) as _,
        &all(forwards, |one| &*one.payload) as _,
        &all(forwards, |one| one.run.as_ref().map(|run| run.text.as_str())) as _,
        &all(forwards, |one| one.run.as_ref()?.run_id.as_deref()) as _,
        &all(forwards, |one| one.external_reference.as_deref()) as _,
        &all(forwards, |one| &*one.requested_by) as _,
        &all(forwards, |one| one.trace_parent.as_deref()) as _,
        &all(forwards, |one| one.request.method.as_str()) as _,
        &all(forwards, |one| one.request.path_and_query.as_str()) as _,
        &all(forwards, |one| headers_json(&one.request.headers)) as _,
        &all(forwards, |one| &one.request.body[..]) as _,
        &all(forwards, |one| one.request.downstream_key.as_str()) as _,
        lock_timeout(lock),
    )
    .fetch_all(&mut *session)
    .await
    .map_err(doing("claim the forwarded operations"))?;
    Ok(claimed
        .into_iter()
        .map(|row| (row.operation_id, row.created_at))
        .collect())
}

/// Stores an intent with its request, and sends nothing; says whether its id was free.
pub async fn plan(session: &mut Session, forward: &Forward) -> Result<bool, Error> {
    let stored = sqlx::query!(
        r#"
        with stored as (
            insert into ledger.operations (
                tenant_id, operation_id, kind, target, downstream, state, fingerprint, attempt, version, payload, run,
                run_id, external_reference, requested_by, trace_parent, created_at)
            values ($1, $2, $3, $4, $5, 'planned', $6, 0, 1, $7, $8::text::jsonb, $9, $10, $11, $12,
                    statement_timestamp())
            on conflict (tenant_id, operation_id) do nothing
            returning tenant_id, operation_id, created_at
        ), kept as (
            insert into ledger.requests (tenant_id, operation_id, method, path_and_query, headers, body, downstream_key)
            select tenant_id, operation_id, $13, $14, $15::text::jsonb, $16, $17 from stored
        )
        insert into ledger.history (tenant_id, operation_id, version, at, event, state, actor, attempt)
        select tenant_id, operation_id, 1, created_at, 'planned', 'planned', $18, 0 from stored
        "#,
        forward.tenant.as_str(),
        forward.id.as_str(),
        &*forward.kind,
        forward.target,
        &*forward.downstream,
        forward.fingerprint.to_string(),
        &*forward.payload,
        forward.run.as_ref().map(|run| run.text.as_str()),
        forward.run.as_ref().and_then(|run| run.run_id.as_deref()),
        forward.external_reference.as_deref(),
        &*forward.requested_by,
        forward.trace_parent.as_deref(),
        forward.request.method,
        forward.request.path_and_query,
        headers_json(&forward.request.headers),
        &forward.request.body[..],
        forward.request.downstream_key,
        format!("key:{}", forward.requested_by),
    )
    .execute(&mut *session)
    .await
    .map_err(doing("store the plan"))?;
    Ok(stored.rows_affected() == 1)
}

/// An attempt's complete answer, ready to be stored.
#[derive(Debug, Clone)]
pub struct Answered {
    pub id: OperationId,
    pub fence: Fence,
    pub state: StateName,
    pub receipt: Arc<Receipt>,
    pub retention: Duration,
    /// Where the answer names what was made.
    pub external_reference: Option<String>,
    pub reason: Option<String>,
    /// JSON text: what was seen beside the answer itself.
    pub evidence: Option<String>,
}

/// Settles every operation whose claim still stands, with receipt and history row; answers their times by id. The others
/// have been decided by somebody else meanwhile. It sets its own limit for locks, too.
pub async fn settle_all(
    session: &mut Session,
    tenant: &Tenant,
    instance: Uuid,
    lock: Duration,
    answered: &[&Answered],
) -> Result<HashMap<String, Times>, Error> {
    fn all<'a, T>(answered: &[&'a Answered], part: impl Fn(&'a Answered) -> T) -> Vec<T> {
        answered.iter().map(|one| part(one)).collect()
    }
    let settled = sqlx::query!(
        r#"
        with limits as materialized (select set_config('lock_timeout', $15, true)),
        m as materialized (
            select m.* from limits, unnest(
                $3::text[], $4::int4[], $5::text[], $6::float8[], $7::text[], $8::text[], $9::text[], $10::int2[],
                $11::text[], $12::bytea[], $13::bytea[], $14::int8[])
            as m (operation_id, attempt, state, retention, external_reference, reason, evidence, status, headers, body,
                  digest, omitted)
        ), settled as (
            update ledger.operations o
            set state = m.state, instance_id = null, version = o.version + 1, settled_at = statement_timestamp(),
                receipt_expires_at = statement_timestamp() + m.retention * interval '1 millisecond',
                external_reference = coalesce(o.external_reference, m.external_reference)
            from m
            where o.tenant_id = $1 and o.operation_id = m.operation_id and o.state = 'running'
              and o.attempt = m.attempt and o.instance_id = $2::text::uuid
            returning o.operation_id, o.version, o.settled_at, o.receipt_expires_at
        ), receipts as (
            insert into ledger.receipts (
                tenant_id, operation_id, status, headers, body, body_sha256, omitted_bytes, expires_at)
            select $1, s.operation_id, m.status, m.headers::jsonb, m.body, m.digest, m.omitted, s.receipt_expires_at
            from settled s join m using (operation_id)
        ), noted as (
            insert into ledger.history (
                tenant_id, operation_id, version, at, event, state, actor, attempt, reason, evidence)
            select $1, s.operation_id, s.version, s.settled_at, m.state, m.state, 'instance:' || $2, m.attempt,
                   m.reason, m.evidence::jsonb
            from settled s join m using (operation_id)
        )
        select operation_id, version, settled_at as "settled_at!", receipt_expires_at as "expires_at!" from settled
        "#,
        tenant.as_str(),
        instance.to_string(),
        &all(answered, |one| one.id.as_str()) as _,
        &all(answered, |one| one.fence.attempt) as _,
        &all(answered, |one| one.state.as_str()) as _,
        &all(answered, |one| milliseconds(one.retention)) as _,
        &all(answered, |one| one.external_reference.as_deref()) as _,
        &all(answered, |one| one.reason.as_deref()) as _,
        &all(answered, |one| one.evidence.as_deref()) as _,
        &all(answered, |one| one.receipt.status.cast_signed()) as _,
        &all(answered, |one| headers_json(&one.receipt.headers)) as _,
        &all(answered, |one| &one.receipt.body[..]) as _,
        &all(answered, |one| &one.receipt.body_sha256[..]) as _,
        &all(answered, |one| one.receipt.omitted.map(Omitted::bytes)) as _,
        lock_timeout(lock),
    )
    .fetch_all(&mut *session)
    .await
    .map_err(doing("settle the forwarded operations"))?;
    Ok(settled
        .into_iter()
        .map(|row| {
            let times = Times {
                version: row.version,
                settled_at: row.settled_at,
                expires_at: row.expires_at,
            };
            (row.operation_id, times)
        })
        .collect())
}

/// Takes a first claim back whose attempt has sent nothing: the id is free again, as if it had never been used.
pub async fn withdraw(session: &mut Session, tenant: &Tenant, id: &OperationId, fence: Fence) -> Result<bool, Error> {
    // The row is locked by its key first: the claim's own commit may still be under way on a connection we have lost.
    let withdrawn = sqlx::query_scalar!(
        r#"
        with held as materialized (
            select state, attempt, version, instance_id from ledger.operations
            where tenant_id = $1 and operation_id = $2 for update
        ), ours as (
            select 1 from held
            where state = 'running' and attempt = $3 and version = 1 and instance_id = $4::text::uuid
        ), requests as (
            delete from ledger.requests where tenant_id = $1 and operation_id = $2 and exists (select from ours)
        ), history as (
            delete from ledger.history where tenant_id = $1 and operation_id = $2 and exists (select from ours)
        ), operations as (
            delete from ledger.operations where tenant_id = $1 and operation_id = $2 and exists (select from ours)
            returning 1
        )
        select count(*) as "count!" from operations
        "#,
        tenant.as_str(),
        id.as_str(),
        fence.attempt,
        fence.instance.to_string(),
    )
    .fetch_one(&mut *session)
    .await
    .map_err(doing("withdraw the claim"))?;
    Ok(withdrawn == 1)
}

/// A stored operation of a downstream, with all that another attempt or a look-up needs.
#[derive(Debug, Clone)]
pub struct Stored {
    pub tenant: Tenant,
    pub id: OperationId,
    pub kind: String,
    pub fingerprint: Fingerprint,
    pub downstream: String,
    pub target: String,
    pub payload: String,
    pub state: StateName,
    pub attempt: i32,
    pub version: i32,
    pub requested_by: String,
    pub trace_parent: Option<String>,
    pub request: Request,
    /// Time since the id was claimed, or since a person allowed new attempts, by the database's clock.
    pub age: Duration,
    /// Attempts before that.
    pub earlier_attempts: i32,
    /// Time since the first send; `None` before it.
    pub since_first_send: Option<Duration>,
    /// Time since the latest send.
    pub since_last_send: Option<Duration>,
}

impl Stored {
    /// What a guarded verb presents.
    pub fn seen(&self) -> Seen {
        Seen {
            state: self.state,
            version: self.version,
        }
    }

    /// The intent again, as far as another attempt needs it.
    pub fn forward(&self, retention: Duration) -> Forward {
        Forward {
            tenant: self.tenant.clone(),
            id: self.id.clone(),
            kind: self.kind.as_str().into(),
            fingerprint: self.fingerprint,
            downstream: self.downstream.as_str().into(),
            target: self.target.clone(),
            payload: self.payload.as_str().into(),
            request: self.request.clone(),
            run: None,
            external_reference: None,
            requested_by: self.requested_by.as_str().into(),
            trace_parent: self.trace_parent.clone(),
            retention,
        }
    }
}

/// Reads it; `None` if there is no such operation, or it is no downstream's, or its request has been purged.
pub async fn stored(session: &mut Session, tenant: &Tenant, id: &OperationId) -> Result<Option<Stored>, Error> {
    let row = sqlx::query!(
        r#"
        select o.kind, o.fingerprint, o.downstream as "downstream!", o.target, o.payload as "payload!", o.state,
               o.attempt, o.version, o.requested_by, o.trace_parent, r.method, r.path_and_query, r.headers::text as "headers!", r.body, r.downstream_key,
               extract(epoch from clock_timestamp() - coalesce(allowed.at, r.sent_at, claims.first, o.created_at))::float8 as "age!",
               coalesce(allowed.attempt, 0) as "earlier_attempts!",
               extract(epoch from clock_timestamp() - coalesce(r.sent_at, claims.first))::float8 as since_first,
               extract(epoch from clock_timestamp() - claims.latest)::float8 as since_last
        from ledger.operations o
        join ledger.requests r on r.tenant_id = o.tenant_id and r.operation_id = o.operation_id
        left join lateral (
            select min(h.at) as first, max(h.at) as latest from ledger.history h
            where h.tenant_id = $1 and h.operation_id = $2 and h.event = 'claimed') claims on true
        left join lateral (
            select h.at, h.attempt from ledger.history h
            where h.tenant_id = $1 and h.operation_id = $2 and h.event = 'resolved' and h.state = 'retry_wait'
            order by h.version desc limit 1) allowed on true
        where o.tenant_id = $1 and o.operation_id = $2 and o.downstream is not null and o.payload is not null
        "#,
        tenant.as_str(),
        id.as_str(),
    )
    .fetch_optional(&mut *session)
    .await
    .map_err(doing("read the forwarded operation"))?;
    let seconds = |seconds: f64| Duration::try_from_secs_f64(seconds).unwrap_or_default();
    Ok(row.and_then(|row| {
        Some(Stored {
            tenant: tenant.clone(),
            id: id.clone(),
            kind: row.kind,
            fingerprint: row.fingerprint.parse().ok()?,
            downstream: row.downstream,
            target: row.target,
            payload: row.payload,
            state: StateName::parse(&row.state)?,
            attempt: row.attempt,
            version: row.version,
            requested_by: row.requested_by,
            trace_parent: row.trace_parent,
            request: Request {
                method: row.method,
                path_and_query: row.path_and_query,
                headers: serde_json::from_str(&row.headers).ok()?,
                body: row.body.into(),
                downstream_key: row.downstream_key,
            },
            age: seconds(row.age),
            earlier_attempts: row.earlier_attempts,
            since_first_send: row.since_first.map(seconds),
            since_last_send: row.since_last.map(seconds),
        })
    }))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_downstreams_key_is_an_operations_own() {
        let key = |tenant: &str, id: &str| downstream_key(&tenant.parse().unwrap(), &OperationId::parse(id).unwrap());
        assert_eq!(key("a", "bc"), key("a", "bc"));
        assert_ne!(key("a", "bc"), key("ab", "c"));
        assert_eq!(key("a", "bc").len(), 44);
    }
}
