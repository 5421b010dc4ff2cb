//! Keys straight in the database: no service has to run, and no key has to exist.
//!
//! Every statement is inside a transaction and none is prepared by name, so that any pooler may stand in between.

use std::time::Duration;

use super::{Created, Key};
use crate::cli::exit::{Exit, Failure, chain};
use crate::config::DatabaseArgs;
use crate::ledger::key::{self, Change, NewKey, Role, Secret};
use crate::ledger::receipt::format_time;
use crate::ledger::tenant::{self, Tenant};
use crate::postgres::error::{Error, Trouble};
use crate::postgres::pool::{OpenError, Options, Pool};
use crate::postgres::session::{Limits, Session};

const LIMITS: Limits = Limits {
    lock: Duration::from_secs(5),
    statement: Duration::from_secs(10),
};

/// Keys read at once.
const PAGE: i64 = 500;

/// Makes a key, and its tenant if it is missing.
pub async fn create(
    database: &DatabaseArgs,
    tenant: &Tenant,
    role: Role,
    label: &str,
    kinds: Option<&[String]>,
) -> Result<Created, Failure> {
    let secret = Secret::generate(tenant)
        .map_err(|error| Failure::other(format!("this machine gives no randomness for a new key: {error}")))?;
    let new = NewKey {
        role,
        label: label.to_owned(),
        kinds: kinds.map(<[String]>::to_vec),
    };
    let key = within(database, async |session| {
        tenant::ensure(session, tenant).await?;
        key::create(session, &secret, &new).await
    })
    .await?;
    Ok(Created {
        key_id: key.key_id,
        role: key.role,
        label: key.label,
        kinds: key.kinds,
        secret: secret.reveal().to_owned(),
        created_at: format_time(key.created_at),
    })
}

/// Every key of the tenant.
pub async fn list(database: &DatabaseArgs, tenant: &Tenant) -> Result<Vec<Key>, Failure> {
    let keys = within(database, async |session| {
        let mut keys = key::list(session, tenant, "", PAGE).await?;
        loop {
            let after = keys.last().map(|key| key.key_id.clone()).unwrap_or_default();
            let more = key::list(session, tenant, &after, PAGE).await?;
            if more.is_empty() {
                return Ok(keys);
            }
            keys.extend(more);
        }
    })
    .await?;
    Ok(keys.into_iter().map(Key::from).collect())
}

pub async fn revoke(database: &DatabaseArgs, tenant: &Tenant, key_id: &str) -> Result<(), Failure> {
    let known = within(database, async |session| key::revoke(session, tenant, key_id).await).await?;
    if known { Ok(()) } else { Err(missing(tenant, key_id)) }
}

pub async fn change(
    database: &DatabaseArgs,
    tenant: &Tenant,
    key_id: &str,
    label: Option<&str>,
    kinds: Option<Option<&[String]>>,
) -> Result<Key, Failure> {
    let change = Change {
        label: label.map(str::to_owned),
        kinds: kinds.map(|kinds| kinds.map(<[String]>::to_vec)),
    };
    let changed = within(database, async |session| {
        key::change(session, tenant, key_id, &change).await
    })
    .await?;
    changed.map(Key::from).ok_or_else(|| missing(tenant, key_id))
}

/// Runs statements in one transaction on a connection of their own.
async fn within<T>(
    database: &DatabaseArgs,
    statements: impl AsyncFnOnce(&mut Session) -> Result<T, Error>,
) -> Result<T, Failure> {
    let options = Options {
        url: database.url()?,
        max_connections: 1,
        acquire_timeout: Duration::from_secs(5),
        prepared_statements: false,
    };
    let pool = Pool::open(&options).await.map_err(|error| not_opened(&error))?;
    let mut session = pool.transaction(LIMITS).await.map_err(|error| failed(&error))?;
    let found = statements(&mut session).await.map_err(|error| failed(&error))?;
    session.commit().await.map_err(|error| failed(&error))?;
    drop(session);
    pool.close().await;
    Ok(found)
}

fn not_opened(error: &OpenError) -> Failure {
    match error {
        OpenError::Url(_) => Failure {
            exit: Exit::Usage,
            ..Failure::other(chain(error))
        },
        OpenError::Connect { .. } | OpenError::NotUp { .. } => {
            Failure::unavailable("database-not-reached", chain(error))
        }
    }
}

fn failed(error: &Error) -> Failure {
    let detail = chain(error);
    match (error.sqlstate().as_deref(), error.trouble()) {
        (Some("42P01" | "3F000"), _) => Failure::other(format!(
            "{detail}; the database lacks the ledger's tables: run `opledger migrate` first"
        )),
        (Some("42501"), _) => Failure::other(format!(
            "{detail}; this role has not the rights: run `opledger migrate --grant-to ROLE` as the owner, or use the owner's address"
        )),
        (_, Trouble::Passing | Trouble::LockTimeout) => Failure::unavailable("database-unavailable", detail),
        (_, Trouble::Lasting) => Failure::other(detail),
    }
}

fn missing(tenant: &Tenant, key_id: &str) -> Failure {
    Failure {
        exit: Exit::NotFound,
        code: "not-found",
        detail: format!("the tenant {tenant} has no key {key_id} that is in use"),
        retryable: false,
    }
}

impl From<key::Key> for Key {
    fn from(key: key::Key) -> Self {
        Self {
            key_id: key.key_id,
            role: key.role,
            label: key.label,
            kinds: key.kinds,
            created_at: format_time(key.created_at),
            last_used_at: key.last_used_at.map(format_time),
            revoked_at: key.revoked_at.map(format_time),
        }
    }
}
