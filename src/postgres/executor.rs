//! A session runs sqlx statements itself, so that two things are in one place: behind a pooler in transaction mode without
//! prepared statements, no statement may be prepared under a name; and no statement is waited for for ever, whatever
//! became of the network.

use std::fmt;
use std::future::Future;
use std::io;
use std::pin::Pin;
use std::task::{Context, Poll};
use std::time::Duration;

use futures_core::Stream;
use futures_core::future::BoxFuture;
use futures_core::stream::BoxStream;
use sqlx::error::BoxDynError;
use sqlx::postgres::{PgArguments, PgQueryResult, PgRow, PgStatement, PgTypeInfo};
use sqlx::{Describe, Either, Error, Execute, Executor, Postgres, SqlStr};
use tokio::time::{Instant, Sleep};

use super::session::Session;

/// A statement that is parsed anew each time, under no name.
struct Unnamed<E>(E);

impl<'q, E: Execute<'q, Postgres>> Execute<'q, Postgres> for Unnamed<E> {
    fn sql(self) -> SqlStr {
        self.0.sql()
    }

    fn statement(&self) -> Option<&PgStatement> {
        None
    }

    fn take_arguments(&mut self) -> Result<Option<PgArguments>, BoxDynError> {
        self.0.take_arguments()
    }

    fn persistent(&self) -> bool {
        false
    }
}

/// An answer as it arrives; one that stays away for too long is an error.
struct Heard<'e, T> {
    rows: BoxStream<'e, Result<T, Error>>,
    silence: Option<Silence>,
    unanswered: &'e mut bool,
}

/// How long nothing has been heard.
struct Silence {
    patience: Duration,
    /// Something has come since the clock was set. Rows come by the dozen: setting it is left to the next wait.
    heard: bool,
    clock: Pin<Box<Sleep>>,
}

impl<'e, T> Heard<'e, T> {
    fn new(rows: BoxStream<'e, Result<T, Error>>, patience: Option<Duration>, unanswered: &'e mut bool) -> Self {
        *unanswered = true;
        Self {
            rows,
            silence: patience.map(|patience| Silence {
                patience,
                heard: false,
                clock: Box::pin(tokio::time::sleep(patience)),
            }),
            unanswered,
        }
    }
}

impl<T> Stream for Heard<'_, T> {
    type Item = Result<T, Error>;

    fn poll_next(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Option<Self::Item>> {
        match self.rows.as_mut().poll_next(context) {
            Poll::Ready(row) => {
                // Whoever reads on after an error, or stops before the end, leaves the connection in its middle.
                *self.unanswered = matches!(row, Some(Ok(_)));
                if let Some(silence) = &mut self.silence {
                    silence.heard = true;
                }
                Poll::Ready(row)
            }
            Poll::Pending => match &mut self.silence {
                Some(silence) => silence.poll_past(context).map(|()| Some(Err(silent()))),
                None => Poll::Pending,
            },
        }
    }
}

impl Silence {
    fn poll_past(&mut self, context: &mut Context<'_>) -> Poll<()> {
        if std::mem::take(&mut self.heard) {
            self.clock.as_mut().reset(Instant::now() + self.patience);
        }
        self.clock.as_mut().poll(context)
    }
}

fn silent() -> Error {
    Error::Io(io::Error::new(io::ErrorKind::TimedOut, "PostgreSQL does not answer"))
}

impl<'c> Executor<'c> for &'c mut Session {
    type Database = Postgres;

    fn fetch_many<'e, 'q: 'e, E>(self, query: E) -> BoxStream<'e, Result<Either<PgQueryResult, PgRow>, Error>>
    where
        'c: 'e,
        E: 'q + Execute<'q, Postgres>,
    {
        let named_statements = self.named_statements();
        let (connection, patience, unanswered) = self.parts();
        let rows = if named_statements {
            connection.fetch_many(query)
        } else {
            connection.fetch_many(Unnamed(query))
        };
        Box::pin(Heard::new(rows, patience, unanswered))
    }

    fn fetch_optional<'e, 'q: 'e, E>(self, query: E) -> BoxFuture<'e, Result<Option<PgRow>, Error>>
    where
        'c: 'e,
        E: 'q + Execute<'q, Postgres>,
    {
        let named_statements = self.named_statements();
        let (connection, patience, unanswered) = self.parts();
        let row = if named_statements {
            connection.fetch_optional(query)
        } else {
            connection.fetch_optional(Unnamed(query))
        };
        Box::pin(async move {
            *unanswered = true;
            let row = match patience {
                Some(patience) => tokio::time::timeout(patience, row).await.map_err(|_| silent())?,
                None => row.await,
            };
            *unanswered = false;
            row
        })
    }

    fn prepare_with<'e>(self, sql: SqlStr, parameters: &'e [PgTypeInfo]) -> BoxFuture<'e, Result<PgStatement, Error>>
    where
        'c: 'e,
    {
        self.connection().prepare_with(sql, parameters)
    }

    fn describe<'e>(self, sql: SqlStr) -> BoxFuture<'e, Result<Describe<Postgres>, Error>>
    where
        'c: 'e,
    {
        self.connection().describe(sql)
    }
}

impl fmt::Debug for Session {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Session").finish_non_exhaustive()
    }
}
