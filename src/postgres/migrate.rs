//! Brings a database to this program's schema.
//!
//! All pending migrations run in one transaction that first takes a transaction-level advisory lock: several processes
//! may start at once, one migrates and the others find nothing left to do; a process killed in the middle leaves
//! nothing behind, and no lock outlives its transaction, so this works through a pooler in transaction mode too. For
//! the same reason everything is sent through the simple protocol, without prepared statements.

use std::borrow::Cow;

use sqlx::migrate::{Migration, Migrator};
use sqlx::postgres::PgRow;
use sqlx::{PgConnection, Row};

use super::error::{Error as DatabaseError, doing};
use super::pool::Pool;

static MIGRATIONS: Migrator = sqlx::migrate!("./migrations");

/// "opledger" in ASCII, cut to 63 bits.
const LOCK: i64 = 0x6f70_6c65_6467_6572;

/// What a database has, compared with what this program brings.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Status {
    /// Migrations this program brings and the database lacks, as `0001 ledger`.
    pub pending: Vec<String>,
    /// Versions the database has and this program does not know: a newer release migrated it.
    pub newer: Vec<i64>,
}

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(transparent)]
    Database(#[from] DatabaseError),
    #[error("failed to run migration {name}")]
    Migration { name: String, source: sqlx::Error },
    #[error(
        "migration {name} was applied with other contents than this program brings; use the release that migrated the database, or restore migrations/ unchanged"
    )]
    Changed { name: String },
    #[error("\"{role}\" is not a role name this command accepts; use letters, digits and underscores")]
    Role { role: String },
}

/// Applies what is pending and, if asked, grants the service's role what it needs. Returns what was applied.
pub async fn run(pool: &Pool, grant_to: Option<&str>) -> Result<Vec<String>, Error> {
    if let Some(role) = grant_to.filter(|role| !is_role_name(role)) {
        return Err(Error::Role { role: role.to_owned() });
    }
    let mut session = pool.session().await?;
    session.begin_unlimited().await?;
    let connection = session.connection();
    execute(
        connection,
        "take the migration lock",
        format!("select pg_advisory_xact_lock({LOCK})"),
    )
    .await?;
    execute(connection, "make the migrations table", CREATE_TABLE.to_owned()).await?;
    let status = compare(&applied(connection).await?)?;
    let pending = MIGRATIONS
        .iter()
        .filter(|migration| status.pending.contains(&name(migration)));
    for migration in pending {
        apply(connection, migration).await?;
    }
    if let Some(role) = grant_to {
        execute(connection, "grant the service's role its rights", grants(role)).await?;
    }
    session.commit().await?;
    Ok(status.pending)
}

/// Compares without changing anything.
pub async fn status(pool: &Pool) -> Result<Status, Error> {
    let mut session = pool.session().await?;
    let exists = rows(
        session.connection(),
        "look for the migrations table",
        "select to_regclass('ledger.migrations')::text",
    )
    .await?;
    let missing = exists.first().and_then(|row| row.get::<Option<String>, _>(0)).is_none();
    let applied = if missing {
        Vec::new()
    } else {
        applied(session.connection()).await?
    };
    compare(&applied)
}

const CREATE_TABLE: &str = "
    -- That it is there already is no news.
    set local client_min_messages = warning;
    create schema if not exists ledger;
    create table if not exists ledger.migrations (
        version    bigint      not null primary key,
        name       text        not null,
        checksum   text        not null,
        applied_at timestamptz not null default clock_timestamp()
    );
    comment on table ledger.migrations is 'Which migrations have run, each with the SHA-384 of its text.';
    comment on column ledger.migrations.version    is 'Number in the file name.';
    comment on column ledger.migrations.name       is 'Number and title.';
    comment on column ledger.migrations.checksum   is 'SHA-384 of the file, in hex.';
    comment on column ledger.migrations.applied_at is 'When it ran.';
";

async fn apply(connection: &mut PgConnection, migration: &Migration) -> Result<(), Error> {
    let name = name(migration);
    tracing::info!(migration = %name, "applying");
    let record = format!(
        "insert into ledger.migrations (version, name, checksum) values ({}, '{}', '{}')",
        migration.version,
        name.replace('\'', "''"),
        checksum(migration),
    );
    for sql in [Cow::from(migration.sql.as_str()), Cow::from(record)] {
        sqlx::raw_sql(sqlx::AssertSqlSafe(sql.into_owned()))
            .execute(&mut *connection)
            .await
            .map_err(|source| Error::Migration {
                name: name.clone(),
                source,
            })?;
    }
    Ok(())
}

/// The service reads, writes and runs handlers; it owns nothing, and it cannot change the schema.
fn grants(role: &str) -> String {
    format!(
        "grant usage on schema ledger to \"{role}\";
         grant select, insert, update, delete on all tables in schema ledger to \"{role}\";
         revoke insert, update, delete on ledger.migrations from \"{role}\";
         revoke update on ledger.receipts, ledger.history, ledger.requests, ledger.links from \"{role}\";
         grant execute on all functions in schema ledger to \"{role}\";"
    )
}

fn is_role_name(role: &str) -> bool {
    !role.is_empty() && role.len() <= 63 && role.bytes().all(|byte| byte.is_ascii_alphanumeric() || byte == b'_')
}

async fn applied(connection: &mut PgConnection) -> Result<Vec<(i64, String)>, DatabaseError> {
    let rows = rows(
        connection,
        "read the migrations table",
        "select version::text, checksum from ledger.migrations order by version",
    )
    .await?;
    Ok(rows
        .iter()
        .map(|row| {
            (
                row.get::<String, _>(0).parse().unwrap_or(i64::MAX),
                row.get::<String, _>(1),
            )
        })
        .collect())
}

fn compare(applied: &[(i64, String)]) -> Result<Status, Error> {
    let mut pending = Vec::new();
    for migration in MIGRATIONS.iter() {
        match applied.iter().find(|(version, _)| *version == migration.version) {
            None => pending.push(name(migration)),
            Some((_, known)) if *known != checksum(migration) => return Err(Error::Changed { name: name(migration) }),
            Some(_) => {}
        }
    }
    let newer = applied
        .iter()
        .map(|(version, _)| *version)
        .filter(|version| !MIGRATIONS.version_exists(*version));
    Ok(Status {
        pending,
        newer: newer.collect(),
    })
}

fn name(migration: &Migration) -> String {
    format!("{:04} {}", migration.version, migration.description)
}

fn checksum(migration: &Migration) -> String {
    migration.checksum.iter().map(|byte| format!("{byte:02x}")).collect()
}

async fn execute(connection: &mut PgConnection, intent: &'static str, sql: String) -> Result<(), DatabaseError> {
    sqlx::raw_sql(sqlx::AssertSqlSafe(sql))
        .execute(connection)
        .await
        .map_err(doing(intent))?;
    Ok(())
}

async fn rows(
    connection: &mut PgConnection,
    intent: &'static str,
    sql: &'static str,
) -> Result<Vec<PgRow>, DatabaseError> {
    sqlx::raw_sql(sql).fetch_all(connection).await.map_err(doing(intent))
}
