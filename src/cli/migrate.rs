//! `opledger migrate`: brings the database to this program's schema, as its owner.

use std::process::ExitCode;

use crate::config::{Database, DatabaseArgs, WaitArgs};
use crate::postgres::migrate;
use crate::postgres::pool::Pool;

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  DATABASE_URL=postgres://owner@db/ledger opledger migrate --grant-to opledger
  opledger migrate --check      exit code 1 if something is pending; changes nothing

Several processes may run this at once, also through a pooler; one migrates, the others find nothing to do.")]
pub struct Args {
    #[command(flatten)]
    database: DatabaseArgs,
    #[command(flatten)]
    wait: WaitArgs,
    /// Say what is pending and change nothing
    #[arg(long)]
    check: bool,
    /// Give this role what `serve` needs; it owns nothing
    #[arg(long, value_name = "ROLE", conflicts_with = "check")]
    grant_to: Option<String>,
}

pub async fn run(args: Args) -> anyhow::Result<ExitCode> {
    let settings = Database {
        max_connections: 1,
        prepared_statements: false,
        ..Database::default()
    };
    let pool = Pool::open_within(&settings.options(args.database.url()?), args.wait.database_wait).await?;
    if args.check {
        return check(&pool).await;
    }
    let applied = migrate::run(&pool, args.grant_to.as_deref()).await?;
    for name in &applied {
        println!("applied {name}");
    }
    if applied.is_empty() {
        println!("nothing to do: the database is up to date");
    }
    if let Some(role) = args.grant_to {
        println!("granted {role} what `opledger serve` needs");
    }
    Ok(ExitCode::SUCCESS)
}

async fn check(pool: &Pool) -> anyhow::Result<ExitCode> {
    let status = migrate::status(pool).await?;
    for version in &status.newer {
        println!("newer   {version:04}: this database was migrated by a later release");
    }
    for name in &status.pending {
        println!("pending {name}");
    }
    if status.pending.is_empty() {
        println!("up to date");
        return Ok(ExitCode::SUCCESS);
    }
    eprintln!("opledger: {} pending; run `opledger migrate`", status.pending.len());
    Ok(ExitCode::FAILURE)
}
