//! `opledger check`: would this configuration serve?

use std::process::ExitCode;

use crate::app;
use crate::config::{self, DatabaseArgs, FileArgs};
use crate::postgres::pool::Pool;

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  opledger check --config opledger.toml --offline      the file and its JSON Schemas
  DATABASE_URL=… opledger check                        that each handler exists and may be called, too

What each route of a downstream declares is said in words: above all, what follows an unknown outcome.")]
pub struct Args {
    #[command(flatten)]
    file: FileArgs,
    #[command(flatten)]
    database: DatabaseArgs,
    /// Leave the database out
    #[arg(long)]
    offline: bool,
}

pub async fn run(args: Args) -> anyhow::Result<ExitCode> {
    let config = config::load(&args.file.config)?;
    for kind in config.kinds.iter() {
        let schema = if kind.schema.is_some() {
            "with a schema"
        } else {
            "without a schema: any JSON is taken"
        };
        println!("kind {}: handler {}, {schema}", kind.name, kind.handler);
    }
    for kind in config.downstream_kinds.iter() {
        let call = &kind.call;
        println!(
            "kind {}: {} {} at {}",
            kind.name, call.method, call.path, kind.downstream.name
        );
    }
    for downstream in config.downstreams.iter() {
        println!("downstream {}: {}", downstream.name, downstream.base);
        for route in downstream.routes.iter().chain([&downstream.undeclared]) {
            println!("  {}", route.sentence());
            if let Some(haste) = downstream.haste(route) {
                println!("    warning: {haste}");
            }
        }
    }
    if config.downstreams.iter().next().is_some() {
        println!("whether the downstreams are reached: opledger doctor");
    }
    let count = config.kinds.iter().count();
    if count == 0 && config.downstream_kinds.iter().count() == 0 {
        println!("{}", without_kinds(&config));
    }
    app::check_spool(&config, &config.file.limits.spool_dir)?;
    if args.offline {
        println!(
            "{}: file and schemas are valid; handlers were not looked at",
            args.file.config.display()
        );
        return Ok(ExitCode::SUCCESS);
    }
    let pool = Pool::open(&config.file.database.options(args.database.url()?)).await?;
    let faults = app::handler_faults(&pool, &config.kinds).await?;
    for fault in &faults {
        eprintln!("opledger: {fault}");
    }
    if faults.is_empty() {
        println!(
            "{}: valid, and all {count} handlers can be called",
            args.file.config.display()
        );
        Ok(ExitCode::SUCCESS)
    } else {
        Ok(ExitCode::FAILURE)
    }
}

/// What a file without kinds is good for.
fn without_kinds(config: &config::Config) -> &'static str {
    match config.downstreams.iter().next() {
        Some(_) => "no kinds are registered: requests go through the proxy, /v1/proxy/{downstream}/…",
        None => "neither kinds nor downstreams are registered: nothing can be submitted",
    }
}
