//! The pool, and the two guards at its door: a server that would lose acknowledged commits is refused, and so is a
//! pooler that cannot keep named statements when we were told it can.

use std::io;
use std::str::FromStr;
use std::time::Duration;

use sqlx::postgres::{PgConnectOptions, PgPoolOptions};
use sqlx::{ConnectOptions, Connection, PgConnection, PgPool};
use tokio::time::Instant;

use super::error::{Error, doing};
use super::session::{Limits, Session};

/// Between two tries to reach a PostgreSQL that is not up yet.
const RECONNECT: Duration = Duration::from_millis(500);

/// How to reach the database. Has no `Debug`: an address may carry a password.
#[derive(Clone)]
pub struct Options {
    /// `postgres://…`.
    pub url: String,
    pub max_connections: u32,
    pub acquire_timeout: Duration,
    /// Off behind a pooler in transaction mode that does not support prepared statements.
    pub prepared_statements: bool,
}

/// The pool of one process.
#[derive(Clone)]
pub struct Pool {
    pool: PgPool,
    prepared_statements: bool,
}

#[derive(Debug, thiserror::Error)]
pub enum OpenError {
    #[error("the database address is not a PostgreSQL URL; expected postgres://user:password@host:port/database")]
    Url(#[source] sqlx::Error),
    #[error("cannot connect to PostgreSQL at {place}; check that it runs, the address and the credentials")]
    Connect { place: String, source: Error },
    #[error(
        "PostgreSQL at {place} did not come up within {waited:?}; check that it runs and that the address is right, or \
         wait longer with --database-wait"
    )]
    NotUp {
        place: String,
        waited: Duration,
        source: Error,
    },
}

impl OpenError {
    /// What may be over in a moment, if PostgreSQL is on its way up: nobody listens, its name is not known yet, or it says
    /// so itself.
    fn may_pass(&self) -> Option<&sqlx::Error> {
        let Self::Connect { source, .. } = self else {
            return None;
        };
        let passes = match &source.source {
            sqlx::Error::Io(_) => true,
            // cannot_connect_now and its like; too_many_connections
            sqlx::Error::Database(error) => error
                .code()
                .is_some_and(|code| code.starts_with("57") || code.starts_with("53")),
            _ => false,
        };
        passes.then_some(&source.source)
    }

    fn after(self, waited: Duration) -> Self {
        match self {
            Self::Connect { place, source } => Self::NotUp { place, waited, source },
            Self::Url(_) | Self::NotUp { .. } => self,
        }
    }
}

/// A setting under which PostgreSQL acknowledges commits that a crash then loses.
#[derive(Debug, thiserror::Error)]
#[error(
    "PostgreSQL runs with {setting} = {value}: a crash could lose receipts that were acknowledged. Turn it on, or \
     start with --allow-unsafe-durability if losing them is acceptable"
)]
pub struct Unsafe {
    pub setting: String,
    pub value: String,
}

impl Pool {
    /// Connects once, so that a wrong address is an error now and not at the first request.
    ///
    /// Outside the pool, which tries again until its time is up and then only says that it is.
    pub async fn open(options: &Options) -> Result<Self, OpenError> {
        let connect = connect_options(options)?;
        let unreachable = |source| OpenError::Connect {
            place: place(&options.url),
            source: Error {
                doing: "connect",
                source,
            },
        };
        match tokio::time::timeout(options.acquire_timeout, PgConnection::connect_with(&connect)).await {
            Ok(Ok(connection)) => drop(connection.close().await),
            Ok(Err(error)) => return Err(unreachable(error)),
            Err(_) => return Err(unreachable(silent())),
        }
        Self::lazy(options)
    }

    /// The same with a PostgreSQL that may be on its way up, as when everything is started together: it is waited for.
    ///
    /// One that refuses us, for its own reasons or ours, would do so again.
    pub async fn open_within(options: &Options, wait: Duration) -> Result<Self, OpenError> {
        let give_up_at = Instant::now() + wait;
        let mut said = String::new();
        loop {
            let error = match Self::open(options).await {
                Err(error) if !wait.is_zero() => error,
                opened => return opened,
            };
            let Some(cause) = error.may_pass().map(ToString::to_string) else {
                return Err(error);
            };
            if Instant::now() + RECONNECT >= give_up_at {
                return Err(error.after(wait));
            }
            if cause != said {
                tracing::info!(place = place(&options.url), cause, at_most = ?wait, "waiting for PostgreSQL");
                said = cause;
            }
            tokio::time::sleep(RECONNECT).await;
        }
    }

    /// A pool that connects when first used.
    pub fn lazy(options: &Options) -> Result<Self, OpenError> {
        let connect = connect_options(options)?;
        let pool = PgPoolOptions::new()
            .max_connections(options.max_connections)
            .acquire_timeout(options.acquire_timeout)
            .idle_timeout(Duration::from_secs(300))
            .connect_lazy_with(connect);
        Ok(Self {
            pool,
            prepared_statements: options.prepared_statements,
        })
    }

    /// Borrows a connection.
    pub async fn session(&self) -> Result<Session, Error> {
        // On the heap: sqlx's future has 4 KB, and would make those of all who await it that much larger.
        let connection = Box::pin(self.pool.acquire());
        let connection = connection.await.map_err(doing("get a database connection"))?;
        Ok(Session::new(connection, self.prepared_statements))
    }

    /// Borrows a connection for a few statements that only read.
    ///
    /// Every statement behind a transaction pooler without prepared statements has to be inside a transaction, or its
    /// two halves (parse, execute) may reach different servers; otherwise the two round trips are saved.
    pub async fn reader(&self, limits: Limits) -> Result<Session, Error> {
        let mut session = self.session().await?;
        if self.prepared_statements {
            session.expect_answers(limits);
        } else {
            session.begin(limits).await?;
        }
        Ok(session)
    }

    /// Borrows a connection and opens a transaction on it.
    pub async fn transaction(&self, limits: Limits) -> Result<Session, Error> {
        let mut session = self.session().await?;
        session.begin(limits).await?;
        Ok(session)
    }

    /// Asks the server for an answer.
    pub async fn ping(&self) -> Result<(), Error> {
        let mut session = self.pool.acquire().await.map_err(doing("get a database connection"))?;
        sqlx::raw_sql("select 1")
            .execute(&mut *session)
            .await
            .map_err(doing("ask the database"))?;
        Ok(())
    }

    /// Connections (in use, idle).
    pub fn usage(&self) -> (u32, u32) {
        let idle = u32::try_from(self.pool.num_idle()).unwrap_or(u32::MAX);
        (self.pool.size().saturating_sub(idle), idle)
    }

    /// Closes every connection.
    pub async fn close(&self) {
        self.pool.close().await;
    }

    /// The first setting that makes an acknowledged commit losable, if there is one.
    pub async fn durability(&self) -> Result<Option<Unsafe>, Error> {
        let mut session = self.pool.acquire().await.map_err(doing("get a database connection"))?;
        // pg_settings through the simple protocol: it works behind every pooler.
        let rows = sqlx::raw_sql(
            "select name, setting from pg_settings \
             where name in ('fsync', 'full_page_writes', 'synchronous_commit') and setting = 'off' order by name",
        )
        .fetch_all(&mut *session)
        .await
        .map_err(doing("read the server's durability settings"))?;
        Ok(rows.first().map(|row| {
            use sqlx::Row;
            Unsafe {
                setting: row.get::<String, _>(0),
                value: row.get::<String, _>(1),
            }
        }))
    }

    /// Whether a statement prepared by name in one transaction is still there in the next.
    ///
    /// A pooler in transaction mode may give the next transaction another server. We make it do so: while a second
    /// connection holds the server that the first one prepared on, the first runs its statement again.
    pub async fn keeps_named_statements(&self) -> Result<bool, Error> {
        let mut first = self.pool.acquire().await.map_err(doing("get a database connection"))?;
        let mut second = self.pool.acquire().await.map_err(doing("get a database connection"))?;
        // Different on each connection of each process: a statement that somebody else has left under the same name on a
        // server answers with another number.
        let (one, other) = (random(), random());
        for _ in 0..2 {
            let prepared = answers(&mut first, one).await;
            sqlx::raw_sql("begin")
                .execute(&mut *second)
                .await
                .map_err(doing("begin a transaction"))?;
            let again = answers(&mut first, one).await;
            let held = answers(&mut second, other).await;
            let _ = sqlx::raw_sql("rollback").execute(&mut *second).await;
            if !(prepared && again && held) {
                first.close_on_drop();
                second.close_on_drop();
                return Ok(false);
            }
        }
        Ok(true)
    }
}

fn silent() -> sqlx::Error {
    sqlx::Error::Io(io::Error::new(io::ErrorKind::TimedOut, "it does not answer"))
}

/// Whether a statement prepared under a name answers with its own number.
async fn answers(connection: &mut PgConnection, number: i32) -> bool {
    let probe = sqlx::AssertSqlSafe(format!("select {number}::int4 as opledger_named_statement_probe"));
    let answer: Result<i32, _> = sqlx::query_scalar(probe).fetch_one(connection).await;
    answer.is_ok_and(|answer| answer == number)
}

fn random() -> i32 {
    getrandom::u32().map_or(1, |number| (number >> 1).cast_signed())
}

fn connect_options(options: &Options) -> Result<PgConnectOptions, OpenError> {
    let mut connect = PgConnectOptions::from_str(&options.url)
        .map_err(OpenError::Url)?
        .disable_statement_logging();
    if connect.get_application_name().is_none() {
        connect = connect.application_name("opledger");
    }
    // Behind a transaction pooler the start-up parameter extra_float_digits is not accepted by older releases.
    connect = connect.extra_float_digits(None);
    if !options.prepared_statements {
        connect = connect.statement_cache_capacity(0);
    }
    Ok(connect)
}

/// Host and database of a URL, without user and password.
pub fn place(url: &str) -> String {
    match PgConnectOptions::from_str(url) {
        Ok(options) => match options.get_socket() {
            Some(socket) => format!(
                "{} ({})",
                socket.display(),
                options.get_database().unwrap_or("default database")
            ),
            None => format!(
                "{}:{}/{}",
                options.get_host(),
                options.get_port(),
                options.get_database().unwrap_or("")
            ),
        },
        Err(_) => "an unreadable address".to_owned(),
    }
}
