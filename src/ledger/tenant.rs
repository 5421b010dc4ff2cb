//! Tenants: who shares the service.

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use crate::postgres::error::{Error, doing};
use crate::postgres::session::Session;

/// A tenant's name: 1 to 40 of `a-z`, `0-9` and `-`, not starting with `-`.
#[derive(Debug, Clone, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Tenant(Arc<str>);

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("a tenant's name is 1 to 40 of a-z, 0-9 and -, and does not start with -")]
pub struct InvalidTenant;

impl Tenant {
    pub fn as_str(&self) -> &str {
        &self.0
    }
}

impl FromStr for Tenant {
    type Err = InvalidTenant;

    fn from_str(name: &str) -> Result<Self, InvalidTenant> {
        let alphabet = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
        let valid = (1..=40).contains(&name.len()) && name.bytes().all(alphabet) && !name.starts_with('-');
        if valid {
            Ok(Self(name.into()))
        } else {
            Err(InvalidTenant)
        }
    }
}

impl fmt::Display for Tenant {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

/// Makes the tenant if it is not there yet.
pub async fn ensure(session: &mut Session, tenant: &Tenant) -> Result<(), Error> {
    sqlx::query!(
        "insert into ledger.tenants (tenant_id) values ($1) on conflict do nothing",
        tenant.as_str()
    )
    .execute(&mut *session)
    .await
    .map_err(doing("make the tenant"))?;
    Ok(())
}

/// Every tenant, for sweeps that go tenant by tenant.
pub async fn all(session: &mut Session) -> Result<Vec<Tenant>, Error> {
    let names = sqlx::query_scalar!("select tenant_id from ledger.tenants order by tenant_id")
        .fetch_all(&mut *session)
        .await
        .map_err(doing("list the tenants"))?;
    // The CHECK on the column is the same rule as ours.
    Ok(names.iter().filter_map(|name| name.parse().ok()).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_short_and_plain() {
        for good in ["a", "demo", "acme-2", &"a".repeat(40)] {
            assert!(good.parse::<Tenant>().is_ok(), "{good}");
        }
        for bad in ["", "-a", "Acme", "a_b", "é", "a b", &"a".repeat(41)] {
            assert!(bad.parse::<Tenant>().is_err(), "{bad}");
        }
    }
}
