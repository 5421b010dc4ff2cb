//! Reading operations: what a duplicate needs, what people look up, and lists.

use std::sync::Arc;

use sqlx::{Postgres, QueryBuilder, Row};
use time::OffsetDateTime;

use super::compensation::Link;
use super::fingerprint::Fingerprint;
use super::operation::{Answer, Operation, Settlement, State, StateName};
use super::operation_id::OperationId;
use super::receipt::{Omitted, Receipt};
use super::tenant::Tenant;
use crate::postgres::error::{Error as DatabaseError, doing};
use crate::postgres::session::Session;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Database(#[from] DatabaseError),
    #[error("operation {operation} is stored in a way this program does not understand: {what}")]
    Impossible { operation: String, what: &'static str },
}

/// The stored operations among these ids, in no particular order.
pub async fn existing(session: &mut Session, tenant: &Tenant, ids: &[&str]) -> Result<Vec<Operation>, Error> {
    let rows = sqlx::query_as!(
        Stored,
        r#"
        select o.operation_id, o.kind, o.state, o.fingerprint, o.attempt, o.version, o.requested_by, o.trace_parent,
               o.created_at, o.settled_at, o.receipt_expires_at, o.due_at is not null as "is_due!",
               o.downstream is not null as "is_downstreams!",
               statement_timestamp() as "read_at!",
               r.status as "status?", r.headers::text as headers, r.body as "body?", r.body_sha256 as "body_sha256?",
               r.omitted_bytes
        from ledger.operations o
        left join ledger.receipts r on r.tenant_id = o.tenant_id and r.operation_id = o.operation_id
        where o.tenant_id = $1 and o.operation_id = any($2)
        "#,
        tenant.as_str(),
        ids as _,
    )
    .fetch_all(&mut *session)
    .await
    .map_err(doing("read the stored operations"))?;
    rows.into_iter().map(|row| row.operation(tenant)).collect()
}

/// The operation of this id, if the tenant has one.
pub async fn one(session: &mut Session, tenant: &Tenant, id: &OperationId) -> Result<Option<Operation>, Error> {
    Ok(existing(session, tenant, &[id.as_str()]).await?.pop())
}

/// The columns as they come.
struct Stored {
    operation_id: String,
    kind: String,
    state: String,
    fingerprint: String,
    attempt: i32,
    version: i32,
    requested_by: String,
    trace_parent: Option<String>,
    created_at: OffsetDateTime,
    settled_at: Option<OffsetDateTime>,
    receipt_expires_at: Option<OffsetDateTime>,
    is_due: bool,
    is_downstreams: bool,
    read_at: OffsetDateTime,
    status: Option<i16>,
    headers: Option<String>,
    body: Option<Vec<u8>>,
    body_sha256: Option<Vec<u8>>,
    omitted_bytes: Option<i64>,
}

impl Stored {
    /// The one place where columns become an operation; combinations that the rule does not know are errors.
    fn operation(mut self, tenant: &Tenant) -> Result<Operation, Error> {
        let impossible = |what| Error::Impossible {
            operation: self.operation_id.clone(),
            what,
        };
        let name = StateName::parse(&self.state).ok_or_else(|| impossible("unknown state"))?;
        let id = OperationId::parse(&self.operation_id).map_err(|_| impossible("operation id outside the alphabet"))?;
        let fingerprint: Fingerprint = self
            .fingerprint
            .parse()
            .map_err(|_| impossible("malformed fingerprint"))?;
        let state = self.state(name)?;
        Ok(Operation {
            tenant: tenant.clone(),
            id,
            kind: self.kind,
            is_downstreams: self.is_downstreams,
            fingerprint,
            attempt: self.attempt,
            version: self.version,
            requested_by: self.requested_by,
            trace_parent: self.trace_parent,
            created_at: self.created_at,
            state,
        })
    }

    fn state(&mut self, name: StateName) -> Result<State, Error> {
        Ok(match name {
            StateName::Planned => State::Planned,
            StateName::WaitingApproval => State::WaitingApproval,
            StateName::Running => State::Running,
            StateName::RetryWait => State::RetryWait,
            StateName::NeedsReconciliation => State::NeedsReconciliation { recovers: self.is_due },
            StateName::Rejected => State::Rejected(self.settlement()?),
            StateName::Cancelled => State::Cancelled(self.settlement()?),
            StateName::Succeeded => State::Succeeded(self.settlement()?),
            StateName::Failed => State::Failed(self.settlement()?),
            StateName::Compensating => State::Compensating(match self.settled_at {
                Some(_) => Some(self.settlement()?),
                None => None,
            }),
            StateName::Compensated => State::Compensated(self.settlement()?),
        })
    }

    fn settlement(&mut self) -> Result<Settlement, Error> {
        let operation = self.operation_id.clone();
        let impossible = move |what| Error::Impossible { operation, what };
        let (Some(settled_at), Some(expires_at)) = (self.settled_at, self.receipt_expires_at) else {
            return Err(impossible("settled without its times"));
        };
        let answer = if expires_at <= self.read_at {
            Answer::Expired
        } else {
            Answer::Kept(Arc::new(
                self.receipt().ok_or_else(|| impossible("settled without a receipt"))?,
            ))
        };
        Ok(Settlement {
            settled_at,
            expires_at,
            read_at: self.read_at,
            answer,
        })
    }

    fn receipt(&mut self) -> Option<Receipt> {
        Some(Receipt {
            status: self.status?.cast_unsigned(),
            headers: serde_json::from_str(self.headers.as_deref()?).ok()?,
            body: self.body.take()?.into(),
            body_sha256: self.body_sha256.take()?.try_into().ok()?,
            omitted: self.omitted_bytes.map(|bytes| Omitted::new(bytes.unsigned_abs())),
        })
    }
}

/// What people see of an operation beside its decision data.
#[derive(Debug, Clone)]
pub struct Summary {
    pub operation_id: String,
    pub kind: String,
    pub target: String,
    pub state: StateName,
    pub fingerprint: String,
    pub version: i32,
    pub run: Option<String>,
    pub external_reference: Option<String>,
    /// A downstream performs it.
    pub is_forwarded: bool,
    pub requested_by: String,
    pub deliveries: i64,
    pub attempts: i32,
    pub created_at: OffsetDateTime,
    /// When it is taken up again by itself, if that is so.
    pub due_at: Option<OffsetDateTime>,
    pub settled_at: Option<OffsetDateTime>,
    pub receipt_expires_at: Option<OffsetDateTime>,
    /// Status, header lines, SHA-256 in hex and size of the receipt while it is kept.
    pub receipt: Option<ReceiptSummary>,
    pub links: Vec<Link>,
}

#[derive(Debug, Clone)]
pub struct ReceiptSummary {
    pub status: u16,
    pub headers: String,
    pub body_sha256: String,
    pub size: i64,
}

/// One change of an operation.
#[derive(Debug, Clone)]
pub struct Change {
    pub version: i32,
    pub at: OffsetDateTime,
    pub event: String,
    pub state: String,
    pub actor: String,
    pub attempt: i32,
    pub reason: Option<String>,
    pub evidence: Option<String>,
}

// What the purge will remove is not shown from the moment it may, so that nobody can tell whether it has been by.
const SUMMARY: &str = r"
    select o.operation_id, o.kind, o.target, o.state, o.fingerprint, o.version,
           case when o.state = 'compensating' or o.receipt_expires_at > statement_timestamp() or o.settled_at is null
                then o.run::text end as run,
           case when o.state = 'compensating' or o.receipt_expires_at > statement_timestamp() or o.settled_at is null
                then o.external_reference end as external_reference,
           o.downstream is not null as is_forwarded, o.requested_by, 1 + coalesce(d.repeats, 0) as deliveries, o.attempt, o.created_at,
           case when o.state in ('retry_wait', 'needs_reconciliation') then o.due_at end as due_at,
           o.settled_at, o.receipt_expires_at, r.status, r.headers::text as headers,
           encode(r.body_sha256, 'hex') as body_sha256, coalesce(r.omitted_bytes, octet_length(r.body)) as size,
           array(select l.relation from ledger.links l where l.tenant_id = o.tenant_id
                 and l.operation_id = o.operation_id order by l.relation, l.other_id) as relations,
           array(select l.other_id from ledger.links l where l.tenant_id = o.tenant_id
                 and l.operation_id = o.operation_id order by l.relation, l.other_id) as others
    from ledger.operations o
    left join ledger.deliveries d on d.tenant_id = o.tenant_id and d.operation_id = o.operation_id
    left join ledger.receipts r on r.tenant_id = o.tenant_id and r.operation_id = o.operation_id
         and r.expires_at > statement_timestamp()
    where o.tenant_id = ";

/// One operation as people see it.
pub async fn summary(session: &mut Session, tenant: &Tenant, id: &OperationId) -> Result<Option<Summary>, Error> {
    let mut query = QueryBuilder::<Postgres>::new(SUMMARY);
    query
        .push_bind(tenant.as_str().to_owned())
        .push(" and o.operation_id = ")
        .push_bind(id.as_str().to_owned());
    Ok(summaries(session, query, "read the operation").await?.pop())
}

/// The changes of an operation up to a version, so that they match a summary read just before; none once the purge may
/// remove them.
pub async fn history(
    session: &mut Session,
    tenant: &Tenant,
    id: &OperationId,
    up_to: i32,
) -> Result<Vec<Change>, DatabaseError> {
    sqlx::query_as!(
        Change,
        r#"
        select version, at, event, state, actor, attempt, reason, evidence::text as evidence
        from ledger.history where tenant_id = $1 and operation_id = $2 and version <= $3
          and not exists (select from ledger.operations o
                          where o.tenant_id = $1 and o.operation_id = $2 and o.state <> 'compensating'
                            and o.receipt_expires_at <= statement_timestamp())
        order by version
        "#,
        tenant.as_str(),
        id.as_str(),
        up_to,
    )
    .fetch_all(&mut *session)
    .await
    .map_err(doing("read the history"))
}

/// Which operations a list shows.
#[derive(Debug, Clone, Default)]
pub struct Filter {
    pub state: Option<StateName>,
    pub kind: Option<String>,
    /// The kinds the caller's key is limited to.
    pub covered: Option<Arc<[String]>>,
    pub run_id: Option<String>,
    pub fingerprint: Option<String>,
    pub external_reference: Option<String>,
    /// Created at or after.
    pub since: Option<OffsetDateTime>,
    /// Created before.
    pub until: Option<OffsetDateTime>,
    pub order: Order,
    /// Only what comes after this place in the order.
    pub after: Option<Place>,
}

/// By creation, then by id.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Order {
    #[default]
    Newest,
    Oldest,
}

/// A place in the order of a list, whichever way it is read. Rows never move in it, so a cursor stays true while
/// operations are added or change state.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    pub created_at: OffsetDateTime,
    pub operation_id: String,
}

/// Up to `limit` operations, in the filter's order.
///
/// The text is put together from the filters that are there, so that PostgreSQL plans each combination for itself.
pub async fn list(session: &mut Session, tenant: &Tenant, filter: &Filter, limit: i64) -> Result<Vec<Summary>, Error> {
    let mut query = QueryBuilder::<Postgres>::new(SUMMARY);
    query.push_bind(tenant.as_str().to_owned());
    if let Some(state) = filter.state {
        // A literal, so that the planner can see whether the partial index of other states than succeeded serves.
        query.push(" and o.state = '").push(state.as_str()).push("'");
        if state != StateName::Succeeded {
            query.push(" and o.state <> 'succeeded'");
        }
    }
    let equals = [
        (" and o.kind = ", &filter.kind),
        (" and o.run_id = ", &filter.run_id),
        (" and o.fingerprint = ", &filter.fingerprint),
        (" and o.external_reference = ", &filter.external_reference),
    ];
    for (condition, value) in equals {
        if let Some(value) = value {
            query.push(condition).push_bind(value.clone());
        }
    }
    if filter.run_id.is_some() || filter.external_reference.is_some() {
        query.push(
            " and (o.state = 'compensating' or o.receipt_expires_at > statement_timestamp() or o.settled_at is null)",
        );
    }
    if let Some(covered) = &filter.covered {
        query.push(" and o.kind = any(").push_bind(covered.to_vec()).push(")");
    }
    for (condition, time) in [
        (" and o.created_at >= ", filter.since),
        (" and o.created_at < ", filter.until),
    ] {
        if let Some(time) = time {
            query.push(condition).push_bind(time);
        }
    }
    let (beyond, order) = match filter.order {
        Order::Newest => (" < (", " order by o.created_at desc, o.operation_id desc limit "),
        Order::Oldest => (" > (", " order by o.created_at, o.operation_id limit "),
    };
    if let Some(after) = &filter.after {
        query
            .push(" and (o.created_at, o.operation_id)")
            .push(beyond)
            .push_bind(after.created_at)
            .push(", ");
        query.push_bind(after.operation_id.clone()).push(")");
    }
    query.push(order).push_bind(limit);
    summaries(session, query, "list the operations").await
}

async fn summaries(
    session: &mut Session,
    mut query: QueryBuilder<Postgres>,
    intent: &'static str,
) -> Result<Vec<Summary>, Error> {
    let rows = query.build().fetch_all(&mut *session).await.map_err(doing(intent))?;
    rows.iter()
        .map(|row| {
            let operation_id: String = row.get("operation_id");
            let state = StateName::parse(row.get("state")).ok_or_else(|| Error::Impossible {
                operation: operation_id.clone(),
                what: "unknown state",
            })?;
            let receipt = row.get::<Option<i16>, _>("status").map(|status| ReceiptSummary {
                status: status.cast_unsigned(),
                headers: row.get("headers"),
                body_sha256: row.get("body_sha256"),
                size: row.get("size"),
            });
            Ok(Summary {
                operation_id,
                kind: row.get("kind"),
                target: row.get("target"),
                state,
                fingerprint: row.get("fingerprint"),
                version: row.get("version"),
                run: row.get("run"),
                external_reference: row.get("external_reference"),
                is_forwarded: row.get("is_forwarded"),
                requested_by: row.get("requested_by"),
                deliveries: row.get("deliveries"),
                attempts: row.get("attempt"),
                created_at: row.get("created_at"),
                due_at: row.get("due_at"),
                settled_at: row.get("settled_at"),
                receipt_expires_at: row.get("receipt_expires_at"),
                receipt,
                links: links(row.get("relations"), row.get("others")),
            })
        })
        .collect()
}

fn links(relations: Vec<String>, others: Vec<String>) -> Vec<Link> {
    relations
        .into_iter()
        .zip(others)
        .map(|(relation, operation_id)| Link { relation, operation_id })
        .collect()
}
