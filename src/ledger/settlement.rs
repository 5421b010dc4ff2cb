//! Settling: running a handler, and storing what handlers led to, inside the transaction that claimed.
//!
//! What a group's handlers return is stored by the statement that claims (`claim`); refusals are stored here.

use serde_json::value::RawValue;
use sqlx::postgres::PgDatabaseError;
use time::OffsetDateTime;

use super::operation::StateName;
use super::operation_id::OperationId;
use super::receipt::{Raised, Receipt};
use super::tenant::Tenant;
use crate::postgres::error::{Error, Trouble, doing, trouble};
use crate::postgres::session::Session;

/// One handler to run.
#[derive(Debug, Clone, Copy)]
pub struct Call<'a> {
    /// Quoted name of the function.
    pub handler: &'a str,
    /// Canonical JSON text.
    pub payload: &'a str,
    /// The handler's second argument, JSON text.
    pub operation: &'a str,
    /// The longest result, as JSON text; the handler of a longer one is broken.
    pub max_result_bytes: i32,
}

/// What a handler did.
#[derive(Debug)]
pub enum Applied<T> {
    /// It returned, and this came of it.
    Returned(T),
    /// A business rule or a constraint refused: the effect is undone, and this is final.
    Refused(Raised),
    /// A deadlock, a lock time-out, a resource: the effect is undone, and the next try may pass.
    Passing(Raised),
    /// Anything else: the handler has to be repaired.
    Broken(Raised),
}

impl<T> Applied<T> {
    /// What a deferred constraint raised when it was checked; `None` if it was not the database that failed.
    pub fn by_constraint(error: &Error) -> Option<Self> {
        let sqlx::Error::Database(database) = &error.source else {
            return None;
        };
        let detail = database
            .try_downcast_ref::<PgDatabaseError>()
            .and_then(PgDatabaseError::detail);
        let raised = Raised {
            sqlstate: error.sqlstate()?,
            message: database.message().to_owned(),
            detail: detail.filter(|detail| !detail.is_empty()).map(ToOwned::to_owned),
            by_ledger: false,
        };
        Some(Self::raised(raised.without_row_contents()))
    }

    /// What `ledger.apply` reported of a handler that did not return.
    pub fn reported(
        sqlstate: Option<String>,
        message: Option<String>,
        detail: Option<String>,
        by_ledger: Option<bool>,
    ) -> Self {
        let raised = Raised {
            sqlstate: sqlstate.unwrap_or_else(|| "XX000".to_owned()),
            message: message.unwrap_or_default(),
            detail: detail.filter(|detail| !detail.is_empty()),
            by_ledger: by_ledger.unwrap_or(false),
        };
        Self::raised(raised.without_row_contents())
    }

    /// The rule that tells a refusal from trouble, by SQLSTATE.
    fn raised(raised: Raised) -> Self {
        let class = raised.sqlstate.get(..2).unwrap_or_default();
        let business = raised.sqlstate == "P0001" || ["OL", "22", "23"].contains(&class);
        match trouble(&raised.sqlstate) {
            _ if business => Self::Refused(raised),
            // Passing for a statement of ours; a handler that raises one of them has brought it about itself.
            _ if ["25006", "25P03", "26000"].contains(&&*raised.sqlstate) => Self::Broken(raised),
            Trouble::Passing | Trouble::LockTimeout => Self::Passing(raised),
            Trouble::Lasting => Self::Broken(raised),
        }
    }
}

/// Runs a handler in a sub-transaction; its result is JSON text.
pub async fn apply(session: &mut Session, call: Call<'_>) -> Result<Applied<Box<RawValue>>, Error> {
    let row = sqlx::query!(
        "select result, error_code, message, detail, by_ledger \
         from ledger.apply($1, $2::text::jsonb, $3::text::jsonb, $4)",
        call.handler,
        call.payload,
        call.operation,
        call.max_result_bytes,
    )
    .fetch_one(&mut *session)
    .await
    .map_err(doing("run the handler"))?;
    let (Some(result), None) = (row.result, &row.error_code) else {
        return Ok(Applied::reported(
            row.error_code,
            row.message,
            row.detail,
            row.by_ledger,
        ));
    };
    Ok(match RawValue::from_string(result) {
        Ok(result) => Applied::Returned(result),
        // PostgreSQL printed it from jsonb, so this does not happen; if it does, nothing must be stored.
        Err(error) => Applied::Broken(Raised {
            sqlstate: "XX000".to_owned(),
            message: format!("the handler's result is not JSON: {error}"),
            detail: None,
            by_ledger: true,
        }),
    })
}

/// Checks deferred constraints now, so that what they raise belongs to the one operation of this transaction.
pub async fn check_constraints(session: &mut Session) -> Result<(), Error> {
    sqlx::raw_sql("set constraints all immediate")
        .execute(&mut *session)
        .await
        .map_err(doing("check the deferred constraints"))?;
    Ok(())
}

/// One settled operation to be stored.
#[derive(Debug, Clone, Copy)]
pub struct Settled<'a> {
    pub id: &'a OperationId,
    pub state: StateName,
    /// The history row's number, 1 for an operation that settles with its claim.
    pub version: i32,
    pub attempt: i32,
    pub receipt: &'a Receipt,
    pub settled_at: OffsetDateTime,
    pub expires_at: OffsetDateTime,
    pub actor: &'a str,
    /// Why, when it was refused.
    pub raised: Option<&'a Raised>,
}

/// Stores receipts and history rows of operations whose own rows already show their final state.
pub async fn store_all(session: &mut Session, tenant: &Tenant, settled: &[Settled<'_>]) -> Result<(), Error> {
    let ids: Vec<&str> = settled.iter().map(|one| one.id.as_str()).collect();
    let statuses: Vec<i16> = settled.iter().map(|one| one.receipt.status.cast_signed()).collect();
    let headers: Vec<String> = settled.iter().map(|one| headers_json(&one.receipt.headers)).collect();
    let bodies: Vec<&[u8]> = settled.iter().map(|one| &*one.receipt.body).collect();
    let digests: Vec<&[u8]> = settled.iter().map(|one| &one.receipt.body_sha256[..]).collect();
    let expires: Vec<OffsetDateTime> = settled.iter().map(|one| one.expires_at).collect();
    let versions: Vec<i32> = settled.iter().map(|one| one.version).collect();
    let times: Vec<OffsetDateTime> = settled.iter().map(|one| one.settled_at).collect();
    let states: Vec<&str> = settled.iter().map(|one| one.state.as_str()).collect();
    let actors: Vec<&str> = settled.iter().map(|one| one.actor).collect();
    let attempts: Vec<i32> = settled.iter().map(|one| one.attempt).collect();
    let reasons: Vec<Option<&str>> = settled
        .iter()
        .map(|one| one.raised.map(|raised| &*raised.message))
        .collect();
    let evidence: Vec<Option<String>> = settled.iter().map(|one| one.raised.map(evidence_json)).collect();
    sqlx::query!(
        r#"
        with receipts as (
            insert into ledger.receipts (tenant_id, operation_id, status, headers, body, body_sha256, expires_at)
            select $1, m.operation_id, m.status, m.headers::jsonb, m.body, m.digest, m.expires_at
            from unnest($2::text[], $3::int2[], $4::text[], $5::bytea[], $6::bytea[], $7::timestamptz[])
                 as m (operation_id, status, headers, body, digest, expires_at)
        )
        insert into ledger.history (tenant_id, operation_id, version, at, event, state, actor, attempt, reason, evidence)
        select $1, m.operation_id, m.version, m.at, m.state, m.state, m.actor, m.attempt, m.reason, m.evidence::jsonb
        from unnest($2::text[], $8::int4[], $9::timestamptz[], $10::text[], $11::text[], $12::int4[], $13::text[],
                    $14::text[])
             as m (operation_id, version, at, state, actor, attempt, reason, evidence)
        "#,
        tenant.as_str(),
        &ids as _,
        &statuses as _,
        &headers as _,
        &bodies as _,
        &digests as _,
        &expires as _,
        &versions as _,
        &times as _,
        &states as _,
        &actors as _,
        &attempts as _,
        &reasons as _,
        &evidence as _,
    )
    .execute(&mut *session)
    .await
    .map_err(doing("store the receipts"))?;
    Ok(())
}

/// Corrects claims of this transaction whose handlers refused: claimed as `succeeded`, they are `failed`.
pub async fn mark_failed(session: &mut Session, tenant: &Tenant, ids: &[&str]) -> Result<(), Error> {
    sqlx::query!(
        r#"
        update ledger.operations set state = 'failed'
        where tenant_id = $1 and operation_id = any($2) and state = 'succeeded' and version = 1
        "#,
        tenant.as_str(),
        ids as _,
    )
    .execute(&mut *session)
    .await
    .map_err(doing("mark the refused operations"))?;
    Ok(())
}

/// `[[name, value], …]`, as the column holds header lines.
pub fn headers_json(headers: &[(String, String)]) -> String {
    serde_json::to_string(headers).unwrap_or_else(|_| "[]".to_owned())
}

/// A refusal as history keeps it.
pub fn evidence_json(raised: &Raised) -> String {
    serde_json::json!({ "sqlstate": raised.sqlstate, "message": raised.message, "detail": raised.detail }).to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_sqlstate_decides_what_a_raised_error_means() {
        let raised = |sqlstate: &str| {
            Applied::<()>::raised(Raised {
                sqlstate: sqlstate.to_owned(),
                message: String::new(),
                detail: None,
                by_ledger: false,
            })
        };
        for code in ["OL001", "OLXYZ", "P0001", "22003", "22012", "23505", "23514"] {
            assert!(matches!(raised(code), Applied::Refused(_)), "{code}");
        }
        for code in ["40001", "40P01", "55P03", "53100", "57014", "08006"] {
            assert!(matches!(raised(code), Applied::Passing(_)), "{code}");
        }
        for code in [
            "42883", "42501", "P0002", "P0004", "0A000", "XX000", "2F005", "25P02", "25006", "26000", "",
        ] {
            assert!(matches!(raised(code), Applied::Broken(_)), "{code}");
        }
    }
}
