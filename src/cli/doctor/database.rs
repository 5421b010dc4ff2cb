//! The server behind the address: is it there, is it one to rely on, and does it have what the service needs?
//!
//! Everything is asked through the simple protocol, which works behind every pooler.

use std::time::{Duration, Instant};

use sqlx::postgres::PgRow;
use sqlx::{Connection, PgConnection, Row};

use super::{Findings, role};
use crate::app;
use crate::cli::exit::chain;
use crate::config::{Config, Database};
use crate::postgres::error::{Error, doing};
use crate::postgres::migrate;
use crate::postgres::pool::{Pool, place};

/// Oldest supported major version.
const OLDEST: i64 = 15;

/// Clocks further apart are worth a warning.
const CLOSE: Duration = Duration::from_secs(1);

/// How long one attempt to connect may take.
const CONNECT: Duration = Duration::from_secs(5);

/// The clock is read this often; the quickest answer counts.
const READINGS: usize = 5;

/// Looks at everything that an address leads to; stops at the first thing without which the rest means nothing.
pub async fn examine(url: String, config: Option<&Config>, findings: &mut Findings) {
    let place = place(&url);
    let settings = config.map(|config| config.file.database).unwrap_or_default();
    let began = Instant::now();
    let options = settings.options(url);
    let pool = match Pool::open(&options).await {
        Ok(pool) => pool,
        Err(error) => {
            let what = refusal(&options.url)
                .await
                .map_or_else(|| chain(&error), |why| format!("{error}: {why}"));
            return findings.fail("database", what, "nothing else can be checked until it answers");
        }
    };
    let opened = began.elapsed().as_secs_f64() * 1e3;
    findings.ok(
        "database",
        format!("PostgreSQL at {place} answers; connecting took {opened:.0} ms"),
    );
    let looked = async {
        server(&pool, findings).await?;
        durability(&pool, findings).await?;
        statements(&pool, &settings, findings).await?;
        clock(&pool, findings).await?;
        connections(&pool, &settings, findings).await?;
        if migrations(&pool, findings).await? {
            role::examine(&pool, findings).await?;
        }
        if let Some(config) = config {
            handlers(&pool, config, findings).await?;
        }
        Ok(())
    };
    if let Err(error) = looked.await {
        let error: Error = error;
        findings.fail(
            "database",
            chain(&error),
            "the checks after this one were left out; mend this first",
        );
    }
    pool.close().await;
}

/// Why one plain attempt to connect fails: the pool tries until its time is over, and then says just that.
async fn refusal(url: &str) -> Option<String> {
    let attempt = tokio::time::timeout(CONNECT, PgConnection::connect(url)).await;
    match attempt {
        Err(_) => Some(format!("no answer within {} s", CONNECT.as_secs())),
        Ok(connected) => connected.err().map(|error| chain(&error)),
    }
}

/// The rows of one statement, all columns as text.
pub(super) async fn rows(pool: &Pool, intent: &'static str, sql: &'static str) -> Result<Vec<PgRow>, Error> {
    let mut session = pool.session().await?;
    let rows = sqlx::raw_sql(sql)
        .fetch_all(session.connection())
        .await
        .map_err(doing(intent))?;
    Ok(rows)
}

/// The columns of a statement that gives one row.
pub(super) async fn row<const COLUMNS: usize>(
    pool: &Pool,
    intent: &'static str,
    sql: &'static str,
) -> Result<[String; COLUMNS], Error> {
    let rows = rows(pool, intent, sql).await?;
    let row = rows.first().ok_or(sqlx::Error::RowNotFound).map_err(doing(intent))?;
    Ok(std::array::from_fn(|column| {
        row.get::<Option<String>, _>(column).unwrap_or_default()
    }))
}

async fn server(pool: &Pool, findings: &mut Findings) -> Result<(), Error> {
    let [number, version, standby, read_only] = row(
        pool,
        "read the server's version",
        "select current_setting('server_version_num'), current_setting('server_version'), \
         pg_is_in_recovery()::text, current_setting('default_transaction_read_only')",
    )
    .await?;
    if number.parse::<i64>().unwrap_or(0) / 10_000 < OLDEST {
        findings.fail(
            "version",
            format!("PostgreSQL {version} is too old"),
            format!("use PostgreSQL {OLDEST} or later"),
        );
    } else {
        findings.ok("version", format!("PostgreSQL {version}"));
    }
    if standby == "true" {
        findings.fail(
            "primary",
            "this server is a standby and takes no writes",
            "give the primary's address",
        );
    } else if read_only == "on" {
        let advice = "unset it for this role and database: alter role … reset default_transaction_read_only";
        findings.fail("primary", "default_transaction_read_only is on", advice);
    }
    Ok(())
}

async fn durability(pool: &Pool, findings: &mut Findings) -> Result<(), Error> {
    match pool.durability().await? {
        None => findings.ok("durability", "fsync, full_page_writes and synchronous_commit are on"),
        Some(lossy) => findings.fail(
            "durability",
            format!(
                "{} is {}: a crash of PostgreSQL would lose receipts that were acknowledged",
                lossy.setting, lossy.value
            ),
            "turn it on; `serve` refuses this server otherwise",
        ),
    }
    Ok(())
}

async fn statements(pool: &Pool, settings: &Database, findings: &mut Findings) -> Result<(), Error> {
    if !settings.prepared_statements {
        findings.ok("statements", "prepared statements are turned off, as a pooler may need");
    } else if pool.keeps_named_statements().await? {
        findings.ok("statements", "prepared statements are kept");
    } else {
        findings.fail(
            "statements",
            "a pooler in between loses prepared statements",
            "set prepared_statements = false under [database], or let the pooler keep them (PgBouncer: max_prepared_statements)",
        );
    }
    Ok(())
}

/// Only PostgreSQL's clock decides anything, so a difference harms no operation; but it misleads whoever reads logs.
async fn clock(pool: &Pool, findings: &mut Findings) -> Result<(), Error> {
    let mut best: Option<(Duration, f64)> = None;
    for _ in 0..READINGS {
        let (before, began) = (machine_time(), Instant::now());
        let [text] = row(
            pool,
            "read the clock",
            "select extract(epoch from clock_timestamp())::text",
        )
        .await?;
        let took = began.elapsed();
        let here = before + took.as_secs_f64() / 2.0;
        let ahead = text.parse::<f64>().unwrap_or(here) - here;
        if best.is_none_or(|(quickest, _)| took < quickest) {
            best = Some((took, ahead));
        }
    }
    let Some((took, ahead)) = best else { return Ok(()) };
    let what = format!(
        "PostgreSQL's clock is {:.3} s {} this machine's (measured to within {:.3} s)",
        ahead.abs(),
        if ahead < 0.0 { "behind" } else { "ahead of" },
        took.as_secs_f64() / 2.0,
    );
    if ahead.abs() - took.as_secs_f64() / 2.0 > CLOSE.as_secs_f64() {
        findings.warn(
            "clock",
            what,
            "synchronise both; PostgreSQL's decides about leases and expiry, so results are not at risk",
        );
    } else {
        findings.ok("clock", what);
    }
    Ok(())
}

#[expect(
    clippy::disallowed_methods,
    reason = "the difference to PostgreSQL's clock is what is measured"
)]
fn machine_time() -> f64 {
    let since = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    since.map_or(0.0, |since| since.as_secs_f64())
}

async fn connections(pool: &Pool, settings: &Database, findings: &mut Findings) -> Result<(), Error> {
    // pg_stat_activity hides other roles' rows from plain ones; these counts are everybody's to see.
    let [most, reserved, open, of_role, of_database] = row(
        pool,
        "count the connections",
        "select current_setting('max_connections'), \
                (current_setting('superuser_reserved_connections')::int \
                 + coalesce(current_setting('reserved_connections', true), '0')::int)::text, \
                (select coalesce(sum(numbackends), 0)::text from pg_stat_database), \
                (select rolconnlimit::text from pg_roles where rolname = current_user), \
                (select datconnlimit::text from pg_database where datname = current_database())",
    )
    .await?;
    let number = |text: &str| text.parse::<i64>().unwrap_or(0);
    let limits = [number(&of_role), number(&of_database)]
        .into_iter()
        .filter(|limit| *limit >= 0);
    let usable = limits.fold(number(&most) - number(&reserved), i64::min);
    let (ours, open) = (i64::from(settings.max_connections), number(&open));
    let what =
        format!("{open} connections of {usable} usable ones are open; one process of the service takes up to {ours}");
    if ours > usable {
        findings.fail(
            "connections",
            what,
            "lower max_connections under [database], or raise PostgreSQL's",
        );
    } else if open + ours > usable {
        let advice = "lower max_connections under [database], raise PostgreSQL's, or put a pooler in between; all processes together must fit";
        findings.warn("connections", what, advice);
    } else {
        findings.ok("connections", what);
    }
    Ok(())
}

/// Says whether the ledger's tables are there.
async fn migrations(pool: &Pool, findings: &mut Findings) -> Result<bool, Error> {
    let status = match migrate::status(pool).await {
        Ok(status) => status,
        Err(migrate::Error::Database(error)) if error.sqlstate().as_deref() == Some("42501") => {
            let advice = "run `opledger migrate --grant-to ROLE` with the owner's address";
            findings.fail("migrations", "this role may not read the ledger's tables", advice);
            return Ok(false);
        }
        Err(migrate::Error::Database(error)) => return Err(error),
        Err(error) => {
            findings.fail(
                "migrations",
                chain(&error),
                "do not serve with this release until that is cleared up",
            );
            return Ok(true);
        }
    };
    if !status.pending.is_empty() {
        let what = format!("the database lacks {}", status.pending.join(", "));
        findings.fail(
            "migrations",
            what,
            "run `opledger migrate --grant-to ROLE` with the owner's address",
        );
        return Ok(false);
    }
    if status.newer.is_empty() {
        findings.ok("migrations", "the database has this release's tables");
    } else {
        findings.warn(
            "migrations",
            "a later release has migrated this database",
            "upgrade this one soon",
        );
    }
    Ok(true)
}

async fn handlers(pool: &Pool, config: &Config, findings: &mut Findings) -> Result<(), Error> {
    let faults = match app::handler_faults(pool, &config.kinds).await {
        Err(error) if error.sqlstate().as_deref() == Some("42501") => {
            let advice = "grant the role usage on the schemas of its handlers, and execute on the handlers";
            findings.fail("handlers", chain(&error), advice);
            return Ok(());
        }
        faults => faults?,
    };
    for fault in &faults {
        findings.fail(
            "handlers",
            fault,
            "`serve` refuses to start with it; correct the function, its rights or the file",
        );
    }
    if faults.is_empty() && config.kinds.iter().next().is_some() {
        findings.ok("handlers", "every kind's handler can be called");
    }
    Ok(())
}
