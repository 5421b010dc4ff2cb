//! Fills the ledgers with settled deposits, to see what a long history costs.
//!
//! Both the hand-written server's tables and opledger's grow, so that they stay comparable. The deposits stored here
//! have the numbers 1 to N, which no measured deposit has, and change no balance. The database has to be a new one.

use anyhow::{Result, ensure};

use crate::contestant::{Contestant, Name};
use crate::database::Database;

/// Rows per statement: a bounded transaction, and a sign of life after each.
const STEP: u64 = 100_000;

/// Each statement stores the deposits $2 to $3 of tenant $1, as the server itself would have.
type Statements = &'static [&'static str];

const HANDWRITTEN: Statements = &[
    "insert into bench.idempotency (tenant_id, idempotency_key, request_sha256, answer, settled_at)
     select $1, 'acme:order-' || n || ':deposit:rev-1',
            sha256(convert_to('{\"account\":\"acct-' || n % 1000 + 1 || '\",\"amount\":1}', 'UTF8')),
            '{\"account\":\"acct-' || n % 1000 + 1 || '\",\"amount\":1,\"balance\":' || 1000000 + n / 1000 || '}',
            clock_timestamp()
     from generate_series($2, $3) as n",
    "insert into bench.audit (tenant_id, idempotency_key, event)
     select $1, 'acme:order-' || n || ':deposit:rev-1', 'deposited'
     from generate_series($2, $3) as n",
];

/// FINISH ME: the rows of one settled `account.deposit` in every table of the schema `ledger` that has any.
const OPLEDGER: Statements = &[];

/// Stores the deposits that are missing up to `to`; `from` are there already.
pub async fn top_up(database: &Database, contestant: &Contestant, from: u64, to: u64) -> Result<()> {
    let statements = match contestant.name {
        Name::Bare => return Ok(()),
        Name::Handwritten => HANDWRITTEN,
        Name::Opledger => OPLEDGER,
    };
    ensure!(
        !statements.is_empty(),
        "--stored: how {} stores a deposit has not been written down",
        contestant.name.as_str()
    );
    let mut stored = from;
    while stored < to {
        let last = to.min(stored + STEP);
        let mut transaction = database.pool.begin().await?;
        for statement in statements {
            sqlx::query(*statement)
                .bind(&contestant.tenant)
                .bind(i64::try_from(stored + 1)?)
                .bind(i64::try_from(last)?)
                .execute(&mut *transaction)
                .await?;
        }
        transaction.commit().await?;
        stored = last;
        eprintln!("{}: {stored} of {to} stored", contestant.name.as_str());
    }
    Ok(())
}
