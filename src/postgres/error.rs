//! What can go wrong with the database, told apart by SQLSTATE and never by a constraint's name or a message's words.

use std::time::Duration;

/// A statement failed.
#[derive(Debug, thiserror::Error)]
#[error("failed to {doing}")]
pub struct Error {
    /// What we were doing, to be read after "failed to".
    pub doing: &'static str,
    #[source]
    pub source: sqlx::Error,
}

/// Wraps an sqlx error with what we were doing: `.map_err(doing("settle the operation"))`.
pub fn doing(doing: &'static str) -> impl FnOnce(sqlx::Error) -> Error {
    move |source| Error { doing, source }
}

/// Whether trying again may help.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Trouble {
    /// A lock could not be had in time.
    LockTimeout,
    /// Deadlock, serialisation, resources, shutdown or a lost connection: the same statement may pass next time.
    Passing,
    /// The statement, the schema or the rights are wrong: it fails the same way next time.
    Lasting,
}

impl Error {
    /// SQLSTATE, when the server answered with one.
    pub fn sqlstate(&self) -> Option<String> {
        match &self.source {
            sqlx::Error::Database(error) => error.code().map(|code| code.into_owned()),
            _ => None,
        }
    }

    /// Whether the server has refused the statement: then nothing of its transaction stands. If the connection was lost
    /// instead, or the server goes down, a commit may stand or not.
    pub fn is_refused(&self) -> bool {
        self.sqlstate()
            .is_some_and(|code| !code.starts_with("08") && !code.starts_with("57P"))
    }

    /// Whether the statement was cancelled, because its time was up or because somebody asked for that.
    pub fn is_cancelled(&self) -> bool {
        self.sqlstate().is_some_and(|code| code == "57014")
    }

    /// Which kind of trouble this is.
    pub fn trouble(&self) -> Trouble {
        match &self.source {
            sqlx::Error::Database(error) => error.code().map_or(Trouble::Lasting, |code| trouble(&code)),
            // 58P01-like file errors, protocol errors and broken pipes all end the connection.
            sqlx::Error::Io(_)
            | sqlx::Error::Tls(_)
            | sqlx::Error::Protocol(_)
            | sqlx::Error::PoolTimedOut
            | sqlx::Error::PoolClosed
            | sqlx::Error::WorkerCrashed => Trouble::Passing,
            _ => Trouble::Lasting,
        }
    }
}

/// Tells trouble from an SQLSTATE (PostgreSQL, appendix A).
pub fn trouble(sqlstate: &str) -> Trouble {
    match sqlstate {
        "55P03" => Trouble::LockTimeout,
        // serialization_failure, deadlock_detected
        "40001" | "40P01" => Trouble::Passing,
        // insufficient resources, operator intervention, connection exception
        code if ["53", "57", "08"].contains(&code.get(..2).unwrap_or_default()) => Trouble::Passing,
        // read_only_sql_transaction: a standby that is about to take over, or one reached by mistake.
        // idle_in_transaction_session_timeout: this process was frozen or cut off for too long.
        // invalid_sql_statement_name: somebody took this connection's prepared statements away; another one has them.
        "25006" | "25P03" | "26000" => Trouble::Passing,
        _ => Trouble::Lasting,
    }
}

/// How long to wait before try number `tried + 1`: exponential with full jitter, so that the two members of a deadlock
/// do not meet again (Brooker, "Exponential Backoff and Jitter").
pub fn backoff(tried: u32, random: u64) -> Duration {
    let ceiling = 10u64.saturating_mul(1 << tried.min(8)).min(1_000);
    Duration::from_millis(1 + random % ceiling)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passing_trouble_is_told_by_class() {
        for code in ["40001", "40P01", "53300", "57014", "57P01", "08006", "25006", "25P03"] {
            assert_eq!(trouble(code), Trouble::Passing, "{code}");
        }
        for code in ["42883", "42501", "23505", "XX000", "", "5"] {
            assert_eq!(trouble(code), Trouble::Lasting, "{code}");
        }
        assert_eq!(trouble("55P03"), Trouble::LockTimeout);
    }

    #[test]
    fn backoff_stays_finite_and_jittered() {
        for tried in [0, 1, 8, 60, u32::MAX] {
            assert!(backoff(tried, u64::MAX) <= Duration::from_millis(1_001));
            assert!(backoff(tried, 0) >= Duration::from_millis(1));
        }
    }
}
