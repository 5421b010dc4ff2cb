//! A borrowed connection and the transaction on it.
//!
//! sqlx's own `Transaction` rolls back lazily when it is dropped, on whoever borrows the connection next. Ours is
//! blunter: a session dropped inside a transaction or a statement closes its connection, so nothing half done is ever
//! handed on.
//! It also sends `begin` and the transaction's limits in one round trip, and it carries the one setting a pooler in
//! transaction mode needs: whether statements may be prepared by name.

use std::time::Duration;

use sqlx::pool::PoolConnection;
use sqlx::postgres::PgRow;
use sqlx::{Connection, PgConnection, Postgres, Row};

use super::error::{Error, doing};

/// How much longer than its longest statement each side of a connection waits for the other. A machine that is gone, or
/// frozen, says nothing: PostgreSQL then ends the transaction and frees what it has locked, and we give the connection up.
const PATIENCE: Duration = Duration::from_secs(2);

/// What a connection may keep to write its next statements in.
const KEPT_BUFFERS: usize = 1 << 20;

/// Ends a transaction with handlers in it as durably as the connection's own settings say, not a handler's.
const COMMIT: &str = "reset synchronous_commit; commit";

/// Takes everything away that a session can keep, and counts its prepared statements.
const CLEAN: &str = "reset all; reset role; unlisten *; discard temp; \
                     select pg_advisory_unlock_all()::text, count(*)::text from pg_prepared_statement()";

/// How long one transaction may wait and work; enforced by PostgreSQL.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Longest wait for a lock (`lock_timeout`).
    pub lock: Duration,
    /// Longest single statement (`statement_timeout`).
    pub statement: Duration,
}

impl Limits {
    /// The same for a statement that carries this many bytes, which have to be sent and written: a second more for every
    /// 4 MiB.
    pub fn with_time_for(self, bytes: usize) -> Self {
        let seconds = u64::try_from(bytes >> 22).unwrap_or(u64::MAX);
        Self {
            statement: self.statement.saturating_add(Duration::from_secs(seconds)),
            ..self
        }
    }
}

/// A pooled connection, used by one task at a time.
pub struct Session {
    connection: PoolConnection<Postgres>,
    named_statements: bool,
    in_transaction: bool,
    /// Handlers may have left something on it.
    soiled: bool,
    /// Longest wait for an answer; `None` for ever.
    patience: Option<Duration>,
    /// A statement has been sent and not been answered to its end.
    unanswered: bool,
}

impl Session {
    pub(super) fn new(connection: PoolConnection<Postgres>, named_statements: bool) -> Self {
        Self {
            connection,
            named_statements,
            in_transaction: false,
            soiled: false,
            patience: None,
            unanswered: false,
        }
    }

    /// The connection itself, for migrations, which may take their time; other statements run on the session.
    pub fn connection(&mut self) -> &mut PgConnection {
        &mut self.connection
    }

    /// The connection, how long to wait for its answer, and whether one is outstanding.
    pub(super) fn parts(&mut self) -> (&mut PgConnection, Option<Duration>, &mut bool) {
        (&mut self.connection, self.patience, &mut self.unanswered)
    }

    /// Sets how long statements outside a transaction are waited for.
    pub fn expect_answers(&mut self, limits: Limits) {
        self.patience = Some(limits.statement + PATIENCE);
    }

    /// Gives back the memory that statements with this many bytes have taken; the connection would keep it.
    pub fn release_buffers(&mut self, bytes: usize) {
        if bytes > KEPT_BUFFERS {
            self.connection.shrink_buffers();
        }
    }

    /// Whether statements may be prepared by name.
    pub fn named_statements(&self) -> bool {
        self.named_statements
    }

    /// Opens a READ COMMITTED transaction with its limits, in one round trip.
    pub async fn begin(&mut self, limits: Limits) -> Result<(), Error> {
        debug_assert!(!self.in_transaction, "one transaction at a time");
        let begin = format!("begin isolation level read committed; {}", set_local(limits));
        self.expect_answers(limits);
        self.in_transaction = true;
        sqlx::raw_sql(sqlx::AssertSqlSafe(begin))
            .execute(&mut *self)
            .await
            .map_err(doing("begin a transaction"))?;
        Ok(())
    }

    /// Gives the open transaction other limits.
    pub async fn limit(&mut self, limits: Limits) -> Result<(), Error> {
        self.expect_answers(limits);
        sqlx::raw_sql(sqlx::AssertSqlSafe(set_local(limits)))
            .execute(&mut *self)
            .await
            .map_err(doing("set a transaction's limits"))?;
        Ok(())
    }

    /// Opens a transaction without limits, for migrations and other work that people started and watch.
    pub async fn begin_unlimited(&mut self) -> Result<(), Error> {
        self.patience = None;
        self.in_transaction = true;
        sqlx::raw_sql("begin; set local lock_timeout = 0; set local statement_timeout = 0")
            .execute(&mut *self)
            .await
            .map_err(doing("begin a transaction"))?;
        Ok(())
    }

    /// Commits. An error leaves the outcome unknown to us: ask again by operation id, on another session.
    pub async fn commit(&mut self) -> Result<(), Error> {
        self.end("commit", "commit the transaction").await
    }

    /// Commits what handlers have been part of, and cleans the session, in one round trip.
    ///
    /// Handlers are other people's code: what one sets for its session must reach neither this commit nor the next
    /// transaction on this connection. `synchronous_commit` goes back to the connection's own before the commit, or a
    /// handler could make receipts losable; everything else a session can keep goes after it.
    pub async fn commit_after_handlers(&mut self) -> Result<(), Error> {
        self.end_after_handlers(COMMIT, "commit the transaction").await
    }

    /// The same but for the cleaning, which is left to [`cleaned`](Self::cleaned): whoever waits for the commit need not
    /// wait for that. A session that is dropped in between closes its connection.
    pub async fn commit_before_cleaning(&mut self) -> Result<(), Error> {
        self.soiled = true;
        self.end(COMMIT, "commit the transaction").await
    }

    /// The session without anything that handlers may have left on it. `None` if they have taken prepared statements
    /// away that it needs; then, and after an error, its connection is closed.
    pub async fn cleaned(mut self) -> Result<Option<Self>, Error> {
        self.soiled = true;
        let left = sqlx::raw_sql(CLEAN)
            .fetch_all(&mut self)
            .await
            .map_err(doing("clean the session"))?;
        self.soiled = self.misses_statements(&left);
        Ok((!self.soiled).then_some(self))
    }

    /// Rolls back what a handler has been part of; what it may have kept for its session goes too.
    pub async fn rollback_after_handlers(&mut self) -> Result<(), Error> {
        self.end_after_handlers("rollback", "roll the transaction back").await
    }

    /// Has the connection closed instead of being handed on.
    pub fn close_on_drop(&mut self) {
        self.connection.close_on_drop();
    }

    /// Ends what `Pool::reader` may have begun; call it after the last statement.
    pub async fn finish(mut self) -> Result<(), Error> {
        self.finish_if_begun().await
    }

    /// Commits, if a transaction is open.
    pub async fn finish_if_begun(&mut self) -> Result<(), Error> {
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
            .execute(&mut *self)
            .await
            .map_err(doing("set a savepoint"))?;
        Ok(())
    }

    /// Undoes everything since `savepoint`, errors included; the transaction goes on.
    pub async fn rollback_to_savepoint(&mut self) -> Result<(), Error> {
        sqlx::raw_sql("rollback to savepoint effect")
            .execute(&mut *self)
            .await
            .map_err(doing("roll back to the savepoint"))?;
        Ok(())
    }

    async fn end_after_handlers(&mut self, statement: &'static str, intent: &'static str) -> Result<(), Error> {
        let left = sqlx::raw_sql(sqlx::AssertSqlSafe(format!("{statement}; {CLEAN}")))
            .fetch_all(&mut *self)
            .await
            .map_err(doing(intent))?;
        self.in_transaction = false;
        self.soiled = self.misses_statements(&left);
        Ok(())
    }

    /// Whether a handler has deallocated what this connection believes to be prepared, by what [`CLEAN`] found.
    fn misses_statements(&self, left: &[PgRow]) -> bool {
        let count: Option<usize> = left.last().and_then(|row| row.get::<String, _>(1).parse().ok());
        self.named_statements && count.is_none_or(|count| count < self.connection.cached_statements_size())
    }

    async fn end(&mut self, statement: &'static str, intent: &'static str) -> Result<(), Error> {
        sqlx::raw_sql(statement)
            .execute(&mut *self)
            .await
            .map_err(doing(intent))?;
        self.in_transaction = false;
        Ok(())
    }
}

impl Drop for Session {
    fn drop(&mut self) {
        if self.in_transaction || self.unanswered || self.soiled {
            self.connection.close_on_drop();
        }
    }
}

fn set_local(limits: Limits) -> String {
    format!(
        "set local lock_timeout = {}; set local statement_timeout = {}; \
         set local idle_in_transaction_session_timeout = {}",
        milliseconds(limits.lock),
        milliseconds(limits.statement),
        milliseconds(limits.statement + PATIENCE),
    )
}

/// PostgreSQL reads 0 as "no limit", so the shortest limit is one millisecond.
fn milliseconds(limit: Duration) -> u64 {
    u64::try_from(limit.as_millis())
        .unwrap_or(u64::MAX)
        .clamp(1, i32::MAX as u64)
}
