//! `opledger purge`: removes what is past its retention, in small transactions; safe beside a running service.

use std::io::IsTerminal;
use std::process::ExitCode;

use crate::config::{self, DatabaseArgs, FileArgs};
use crate::engine::recovery;
use crate::postgres::pool::Pool;

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  DATABASE_URL=… opledger purge
  opledger purge --config /etc/opledger.toml --database-url-file /run/secrets/database_url

Only finished operations are purged. Their tombstones (id, fingerprint, final state, times) stay as long as
retention.tombstones says, so that a late duplicate gets 410 and never a second effect.")]
pub struct Args {
    #[command(flatten)]
    file: FileArgs,
    #[command(flatten)]
    database: DatabaseArgs,
    /// One JSON document on stdout, for scripts
    #[arg(long)]
    json: bool,
}

pub async fn run(args: Args) -> anyhow::Result<ExitCode> {
    let config = config::load(&args.file.config)?;
    let pool = Pool::open(&config.file.database.options(args.database.url()?)).await?;
    let watched = std::io::stderr().is_terminal();
    let purged = recovery::purge(&pool, config.file.retention.tombstones, |so_far| {
        if watched {
            eprint!(
                "\rpurged {} receipts, {} tombstones",
                so_far.receipts, so_far.tombstones
            );
        }
    })
    .await?;
    if watched {
        eprintln!();
    }
    if args.json {
        println!(
            "{}",
            serde_json::json!({ "receipts": purged.receipts, "tombstones": purged.tombstones })
        );
    } else {
        println!(
            "purged {} receipts and {} tombstones",
            purged.receipts, purged.tombstones
        );
    }
    Ok(ExitCode::SUCCESS)
}
