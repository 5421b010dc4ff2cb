//! Counting deliveries after the first. Counts are gathered in memory (`engine/deliveries`) and written here in batches,
//! so that a replay writes nothing.

use super::tenant::Tenant;
use crate::postgres::error::{Error, doing};
use crate::postgres::session::Session;

/// Deliveries of one operation since the last batch.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Repeats {
    pub operation_id: String,
    pub count: i64,
}

/// Adds a batch of one tenant's counts; rows must be in order of id so that two batches lock alike.
///
/// It does not look whether the operations still have their receipts: that would cost twice as much as the counting. A
/// count that comes after the purge stays beside the tombstone and goes with it.
pub async fn add(session: &mut Session, tenant: &Tenant, repeats: &[Repeats]) -> Result<(), Error> {
    let ids: Vec<&str> = repeats.iter().map(|one| one.operation_id.as_str()).collect();
    let counts: Vec<i64> = repeats.iter().map(|one| one.count).collect();
    sqlx::query!(
        r#"
        insert into ledger.deliveries as d (tenant_id, operation_id, repeats, last_delivered_at)
        select $1, m.operation_id, m.repeats, statement_timestamp()
        from unnest($2::text[], $3::int8[]) as m (operation_id, repeats)
        on conflict (tenant_id, operation_id) do update
        set repeats = d.repeats + excluded.repeats, last_delivered_at = excluded.last_delivered_at
        "#,
        tenant.as_str(),
        &ids as _,
        &counts as _,
    )
    .execute(&mut *session)
    .await
    .map_err(doing("count the deliveries"))?;
    Ok(())
}
