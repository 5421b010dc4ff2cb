//! The role that the service uses: it should have the rights that it needs, and no others.

use sqlx::Row;

use super::Findings;
use super::database::{row, rows};
use crate::postgres::error::Error;
use crate::postgres::pool::Pool;

/// What `migrate --grant-to` grants, and whether the role has it.
const MISSING: &str = "
    select needed.privilege || ' on ' || needed.name
    from (values
        ('select', 'ledger.migrations'),
        ('select', 'ledger.tenants'), ('insert', 'ledger.tenants'),
        ('select', 'ledger.api_keys'), ('insert', 'ledger.api_keys'), ('update', 'ledger.api_keys'),
        ('select', 'ledger.instances'), ('insert', 'ledger.instances'), ('update', 'ledger.instances'),
        ('delete', 'ledger.instances'),
        ('select', 'ledger.operations'), ('insert', 'ledger.operations'), ('update', 'ledger.operations'),
        ('delete', 'ledger.operations'),
        ('select', 'ledger.receipts'), ('insert', 'ledger.receipts'), ('delete', 'ledger.receipts'),
        ('select', 'ledger.history'), ('insert', 'ledger.history'), ('delete', 'ledger.history'),
        ('select', 'ledger.deliveries'), ('insert', 'ledger.deliveries'), ('update', 'ledger.deliveries'),
        ('delete', 'ledger.deliveries')
    ) as needed (privilege, name)
    where not has_table_privilege(needed.name, needed.privilege)
    union all
    select 'execute on ledger.apply'
    where not has_function_privilege(to_regprocedure('ledger.apply(text, jsonb, jsonb, integer)'), 'execute')";

pub async fn examine(pool: &Pool, findings: &mut Findings) -> Result<(), Error> {
    let [role, superuser, usage] = row(
        pool,
        "read the role's rights",
        "select current_user::text, rolsuper::text, has_schema_privilege('ledger', 'usage')::text \
         from pg_roles where rolname = current_user",
    )
    .await?;
    if superuser == "true" {
        findings.warn(
            "role",
            format!("the role {role} is a superuser: nothing in the database is safe from a mistake in a handler"),
            "make a role that owns nothing (deploy/postgres-init.sql) and run `opledger migrate --grant-to` it",
        );
        return Ok(());
    }
    let advice = format!("run `opledger migrate --grant-to {role}` with the owner's address");
    if usage != "true" {
        findings.fail(
            "rights",
            format!("the role {role} may not use the schema ledger"),
            advice,
        );
        return Ok(());
    }
    let missing: Vec<String> = rows(pool, "read the role's rights", MISSING)
        .await?
        .iter()
        .map(|row| row.get(0))
        .collect();
    if missing.is_empty() {
        findings.ok(
            "rights",
            format!("the role {role} has the rights that the service needs"),
        );
    } else {
        findings.fail(
            "rights",
            format!("the role {role} lacks {}", missing.join(", ")),
            advice,
        );
    }
    excess(pool, &role, findings).await
}

/// A service that owns its tables, or may rewrite receipts, could be made to change what must not change.
async fn excess(pool: &Pool, role: &str, findings: &mut Findings) -> Result<(), Error> {
    let [owned, rewrites] = row(
        pool,
        "look for what the role owns",
        "select ((select count(*) from pg_class where pg_has_role(relowner, 'usage')) \
               + (select count(*) from pg_proc where pg_has_role(proowner, 'usage')) \
               + (select count(*) from pg_namespace where pg_has_role(nspowner, 'usage')) \
               + (select count(*) from pg_database where datname = current_database() and pg_has_role(datdba, 'usage')))::text, \
                (has_table_privilege('ledger.receipts', 'update') or has_table_privilege('ledger.history', 'update'))::text",
    )
    .await?;
    if owned != "0" {
        let what = format!("the role {role} owns {owned} objects in this database, or is a member of a role that does");
        findings.warn(
            "role",
            what,
            "let another role own them; the service needs to own nothing",
        );
    } else if rewrites == "true" {
        let what = format!("the role {role} may rewrite receipts or history");
        findings.warn(
            "role",
            what,
            format!("revoke update on ledger.receipts, ledger.history from {role}"),
        );
    } else {
        findings.ok(
            "role",
            format!("the role {role} owns nothing and cannot rewrite receipts"),
        );
    }
    Ok(())
}
