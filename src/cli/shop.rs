//! The example business, carried in the program: its SQL, its configuration, its schemas.

use std::io;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};

use crate::postgres::error::{Error, doing};
use crate::postgres::session::Session;

macro_rules! shop {
    ($name:literal) => {
        ($name, include_str!(concat!("../../examples/shop/", $name)))
    };
}

/// In this order; each may run again.
const SQL: &[(&str, &str)] = &[
    shop!("schema.sql"),
    shop!("functions.sql"),
    shop!("data.sql"),
    shop!("grants.sql"),
];

const CONFIG: (&str, &str) = shop!("opledger.toml");
const SANDBOX: (&str, &str) = shop!("sandbox.toml");

const FILES: &[(&str, &str)] = &[
    shop!("schemas/account.deposit.json"),
    shop!("schemas/account.transfer.json"),
    shop!("schemas/order.refund.json"),
    shop!("schemas/ticket.update.json"),
    shop!("schemas/charge.create.json"),
];

/// Makes or renews the schema `shop`, and gives the tenant its accounts, orders and tickets if they are not there.
pub async fn load(session: &mut Session, tenant: &str, accounts: u32) -> Result<(), Error> {
    // What is there from an earlier start is no news.
    sqlx::raw_sql("set local client_min_messages = warning")
        .execute(session.connection())
        .await
        .map_err(doing("load the example business"))?;
    for (_, sql) in SQL {
        sqlx::raw_sql(*sql)
            .execute(session.connection())
            .await
            .map_err(doing("load the example business"))?;
    }
    let accounts = i32::try_from(accounts).unwrap_or(i32::MAX);
    sqlx::query("select shop.seed($1, $2)")
        .bind(tenant)
        .bind(accounts)
        .execute(&mut *session)
        .await
        .map_err(doing("seed the example business"))?;
    Ok(())
}

/// Writes configuration and schemas below a directory, with the sandbox at this address among the downstreams; returns the
/// configuration's path.
pub fn write_config(directory: &Path, sandbox: SocketAddr) -> io::Result<PathBuf> {
    std::fs::create_dir_all(directory.join("schemas"))?;
    for (name, text) in FILES {
        std::fs::write(directory.join(name), text)?;
    }
    let downstreams = SANDBOX.1.replace("SANDBOX", &sandbox.to_string());
    let path = directory.join(CONFIG.0);
    std::fs::write(&path, format!("{}{downstreams}", CONFIG.1))?;
    Ok(path)
}
