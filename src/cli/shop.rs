//! The example business, carried in the program: its SQL, its configuration, its schemas.

use std::io;
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

const FILES: &[(&str, &str)] = &[
    shop!("opledger.toml"),
    shop!("schemas/account.deposit.json"),
    shop!("schemas/account.transfer.json"),
    shop!("schemas/order.refund.json"),
    shop!("schemas/ticket.update.json"),
];

/// Makes or renews the schema `shop`, and gives the tenant its accounts, orders and tickets if they are not there.
pub async fn load(session: &mut Session, tenant: &str, accounts: u32) -> Result<(), Error> {
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

/// Writes configuration and schemas below a directory; returns the configuration's path.
pub fn write_config(directory: &Path) -> io::Result<PathBuf> {
    std::fs::create_dir_all(directory.join("schemas"))?;
    for (name, text) in FILES {
        std::fs::write(directory.join(name), text)?;
    }
    Ok(directory.join("opledger.toml"))
}
