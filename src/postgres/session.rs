//! A borrowed connection and the transaction on it.
//!
//! sqlx's own `Transaction` rolls back lazily when it is dropped, on whoever borrows the connection next. Ours is
//! blunter: a session dropped inside a transaction closes its connection, so nothing half done is ever handed on.
//! It also sends `begin` and the transaction's limits in one round trip, and it carries the one setting a pooler in
//! transaction mode needs: whether statements may be prepared by name.

use std::time::Duration;

use sqlx::pool::PoolConnection;
use sqlx::{PgConnection, Postgres};

use super::error::{Error, doing};

/// How long one transaction may wait and work; enforced by PostgreSQL.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Longest wait for a lock (`lock_timeout`).
    pub lock: Duration,
    /// Longest single statement (`statement_timeout`).
    pub statement: Duration,
}

/// A pooled connection, used by one task at a time.
pub struct Session {
    connection: PoolConnection<Postgres>,
    named_statements: bool,
    in_transaction: bool,
}

impl Session {
    pub(super) fn new(connection: PoolConnection<Postgres>, named_statements: bool) -> Self {
        Self {
            connection,
            named_statements,
            in_transaction: false,
        }
    }

    /// The connection itself, for the simple protocol; other statements run on the session.
    pub fn connection(&mut self) -> &mut PgConnection {
        &mut self.connection
    }

    /// Whether statements may be prepared by name.
    pub fn named_statements(&self) -> bool {
        self.named_statements
    }

    /// Opens a READ COMMITTED transaction with its limits, in one round trip.
    pub async fn begin(&mut self, limits: Limits) -> Result<(), Error> {
        debug_assert!(!self.in_transaction, "one transaction at a time");
        let begin = format!(
            "begin isolation level read committed; set local lock_timeout = {}; set local statement_timeout = {}",
            milliseconds(limits.lock),
            milliseconds(limits.statement),
        );
        self.in_transaction = true;
        sqlx::raw_sql(sqlx::AssertSqlSafe(begin))
            .execute(&mut *self.connection)
            .await
            .map_err(doing("begin a transaction"))?;
        Ok(())
    }

    /// Opens a transaction without limits, for migrations and other work that people started and watch.
    pub async fn begin_unlimited(&mut self) -> Result<(), Error> {
        self.in_transaction = true;
        sqlx::raw_sql("begin; set local lock_timeout = 0; set local statement_timeout = 0")
            .execute(&mut *self.connection)
            .await
            .map_err(doing("begin a transaction"))?;
        Ok(())
    }

    /// Commits. An error leaves the outcome unknown to us: ask again by operation id, on another session.
    pub async fn commit(&mut self) -> Result<(), Error> {
        self.end("commit", "commit the transaction").await
    }

    /// Ends what `Pool::reader` may have begun; call it after the last statement.
    pub async fn finish(mut self) -> Result<(), Error> {
        if self.in_transaction {
            self.commit().await
        } else {
            Ok(())
        }
    }

    /// Rolls back.
    pub async fn rollback(&mut self) -> Result<(), Error> {
        self.end("rollback", "roll the transaction back").await
    }

    /// Marks a point within the transaction to roll back to.
    pub async fn savepoint(&mut self) -> Result<(), Error> {
        sqlx::raw_sql("savepoint effect")
            .execute(&mut *self.connection)
            .await
            .map_err(doing("set a savepoint"))?;
        Ok(())
    }

    /// Undoes everything since `savepoint`, errors included; the transaction goes on.
    pub async fn rollback_to_savepoint(&mut self) -> Result<(), Error> {
        sqlx::raw_sql("rollback to savepoint effect")
            .execute(&mut *self.connection)
            .await
            .map_err(doing("roll back to the savepoint"))?;
        Ok(())
    }

    async fn end(&mut self, statement: &'static str, intent: &'static str) -> Result<(), Error> {
        sqlx::raw_sql(statement)
            .execute(&mut *self.connection)
            .await
            .map_err(doing(intent))?;
        self.in_transaction = false;
        Ok(())
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if self.in_transaction {
            self.connection.close_on_drop();
        }
    }
}

/// PostgreSQL reads 0 as "no limit", so the shortest limit is one millisecond.
fn milliseconds(limit: Duration) -> u64 {
    u64::try_from(limit.as_millis())
        .unwrap_or(u64::MAX)
        .clamp(1, i32::MAX as u64)
}
