//! Instances: one heartbeat row per process. A claim names its instance, and recovery leaves the claims of living
//! instances alone, whatever time it is on this machine: the database's clock decides.

use std::time::Duration;

use uuid::Uuid;

use super::claim::milliseconds;
use crate::postgres::error::{Error, doing};
use crate::postgres::session::Session;

/// Says that this process lives; makes its row on the first call, and again if a sweep removed it meanwhile.
pub async fn beat(session: &mut Session, instance: Uuid, hostname: &str, version: &str) -> Result<(), Error> {
    sqlx::query!(
        r#"
        insert into ledger.instances (instance_id, hostname, version, heartbeat_at)
        values ($1::text::uuid, $2, $3, clock_timestamp())
        on conflict (instance_id) do update set heartbeat_at = excluded.heartbeat_at
        "#,
        instance.to_string(),
        hostname,
        version,
    )
    .execute(&mut *session)
    .await
    .map_err(doing("write the heartbeat"))?;
    Ok(())
}

/// Removes this process's row: it has stopped and holds no claim.
pub async fn leave(session: &mut Session, instance: Uuid) -> Result<(), Error> {
    sqlx::query!(
        "delete from ledger.instances where instance_id = $1::text::uuid",
        instance.to_string()
    )
    .execute(&mut *session)
    .await
    .map_err(doing("remove the heartbeat"))?;
    Ok(())
}

/// Removes rows of instances that have been silent for far longer than any lease.
pub async fn forget_lapsed(session: &mut Session, silent: Duration) -> Result<u64, Error> {
    let forgotten = sqlx::query!(
        r#"
        delete from ledger.instances where heartbeat_at < clock_timestamp() - $1::float8 * interval '1 millisecond'
        "#,
        milliseconds(silent),
    )
    .execute(&mut *session)
    .await
    .map_err(doing("forget silent instances"))?;
    Ok(forgotten.rows_affected())
}
