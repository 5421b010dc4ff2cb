//! What the ledger has on record of an operation, and whether every step of it was allowed.

use std::time::Duration;

use anyhow::{Context, bail, ensure};
use opledger::ledger::operation::StateName;
use sqlx::PgPool;
use time::OffsetDateTime;

use super::cell::{Ability, Cell};

/// A row of the history; most of it is for people who read of a failure.
#[derive(Debug, Clone, sqlx::FromRow)]
#[expect(dead_code, reason = "shown, not read")]
pub struct Step {
    pub at: OffsetDateTime,
    pub event: String,
    pub state: String,
    pub attempt: i32,
    pub reason: Option<String>,
    pub proof: Option<String>,
}

impl Step {
    fn state(&self) -> anyhow::Result<StateName> {
        StateName::parse(&self.state).with_context(|| format!("no such state: {self:?}"))
    }
}

/// The state of an operation; `None` if its id is free.
pub async fn state(sql: &PgPool, cell: Cell) -> anyhow::Result<Option<String>> {
    let state = sqlx::query_scalar("select state from ledger.operations where operation_id = $1")
        .bind(cell.id())
        .fetch_optional(sql)
        .await?;
    Ok(state)
}

pub async fn history(sql: &PgPool, cell: Cell) -> anyhow::Result<Vec<Step>> {
    let steps = sqlx::query_as(
        "select at, event, state, attempt, reason, evidence->>'proof' as proof from ledger.history
         where operation_id = $1 order by version",
    )
    .bind(cell.id())
    .fetch_all(sql)
    .await?;
    Ok(steps)
}

/// The stored answer's body; fails unless there is exactly one, with the digest it claims.
pub async fn receipt(sql: &PgPool, cell: Cell) -> anyhow::Result<Vec<u8>> {
    let bodies: Vec<Vec<u8>> =
        sqlx::query_scalar("select body from ledger.receipts where operation_id = $1 and sha256(body) = body_sha256")
            .bind(cell.id())
            .fetch_all(sql)
            .await?;
    ensure!(bodies.len() == 1, "{} receipts", bodies.len());
    Ok(bodies.into_iter().next().unwrap_or_default())
}

/// Walks the history: every step is one that the rule allows, and no unknown is ended without proof.
pub fn walk(cell: Cell, steps: &[Step], in_flight: Duration) -> anyhow::Result<()> {
    let mut claimed_at = Vec::new();
    for pair in [&[None][..], &steps.iter().map(Some).collect::<Vec<_>>()]
        .concat()
        .windows(2)
    {
        let [before, Some(step)] = pair else { continue };
        if step.event == "claimed" {
            claimed_at.push(step.at);
        }
        let Some(before) = before else {
            ensure!(step.event == "claimed", "it begins with {step:?}");
            continue;
        };
        let (from, to) = (before.state()?, step.state()?);
        ensure!(
            from == to || from.may_become(to),
            "{from} became {to}: {before:?}, {step:?}"
        );
        if from != to && from == StateName::NeedsReconciliation {
            proved(cell, to, step, *claimed_at.last().context("never claimed")?, in_flight)?;
        }
    }
    let (Some(first), Some(last)) = (claimed_at.first(), claimed_at.last()) else {
        bail!("never claimed: {steps:?}")
    };
    match cell.ability {
        // What it remembers for a second and a half is relied on for a second.
        Ability::Forgetful => ensure!(
            *last - *first < Duration::from_secs(1),
            "a forgotten key was sent again"
        ),
        Ability::None => ensure!(first == last, "what cannot be asked was sent again"),
        Ability::Key | Ability::Conditional | Ability::Lookup => {}
    }
    Ok(())
}

/// What led out of an unknown was what the downstream is able to prove.
fn proved(
    cell: Cell,
    to: StateName,
    step: &Step,
    claimed_at: OffsetDateTime,
    in_flight: Duration,
) -> anyhow::Result<()> {
    let is_proof = match (cell.ability, to) {
        (Ability::Key | Ability::Conditional | Ability::Forgetful, StateName::RetryWait) => step.event == "sent_again",
        (Ability::Lookup, StateName::Succeeded) => step.proof.as_deref() == Some("look_up"),
        // Nothing was there, although nothing could be on its way any more.
        (Ability::Lookup, StateName::RetryWait) => step.event == "looked_up" && step.at - claimed_at >= in_flight,
        _ => false,
    };
    ensure!(is_proof, "an unknown became {to} without proof: {step:?}");
    Ok(())
}

/// Operations that somebody would have to be at.
pub async fn unfinished(sql: &PgPool) -> anyhow::Result<Vec<(String, String)>> {
    let left = sqlx::query_as(
        "select operation_id, state from ledger.operations where state in ('running', 'retry_wait') order by 1",
    )
    .fetch_all(sql)
    .await?;
    Ok(left)
}

/// Whether a claim was confirmed too late to be acted on.
pub async fn any_too_late(sql: &PgPool) -> anyhow::Result<bool> {
    let late = "select exists (select from ledger.history where reason like '%confirmed too late%')";
    Ok(sqlx::query_scalar(late).fetch_one(sql).await?)
}
