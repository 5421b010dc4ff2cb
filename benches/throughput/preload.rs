//! Fills the ledgers with settled deposits, to see what a long history costs.
//!
//! Both the hand-written server's tables and opledger's grow, so that they stay comparable. The deposits stored here
//! have the numbers 1 to N, which no measured deposit has, and change no balance. The database has to be a new one.

use anyhow::Result;

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

/// The rows of one settled `account.deposit`: operation, receipt, history.
const OPLEDGER: Statements = &[
    "insert into ledger.operations (
         tenant_id, operation_id, kind, target, state, fingerprint, attempt, version, payload, requested_by, created_at,
         settled_at, receipt_expires_at)
     select $1, 'acme:order-' || n || ':deposit:rev-1', 'account.deposit', 'shop.deposit', 'succeeded',
            'v1:' || encode(sha256(convert_to(n::text, 'UTF8')), 'hex'), 1, 1,
            '{\"account\":\"acct-' || n % 1000 + 1 || '\",\"amount\":1}', 'preloadpreload00', statement_timestamp(),
            statement_timestamp(), statement_timestamp() + interval '400 days'
     from generate_series($2, $3) as n",
    "insert into ledger.receipts (tenant_id, operation_id, status, headers, body, body_sha256, expires_at)
     select $1, 'acme:order-' || n || ':deposit:rev-1', 200, '[[\"content-type\", \"application/json\"]]', b.body,
            sha256(b.body), statement_timestamp() + interval '400 days'
     from generate_series($2, $3) as n
     cross join lateral (select convert_to(
         '{\"operation_id\":\"acme:order-' || n || ':deposit:rev-1\",\"kind\":\"account.deposit\",\"state\":\"succeeded\",'
         '\"fingerprint\":\"v1:' || encode(sha256(convert_to(n::text, 'UTF8')), 'hex') || '\",\"attempt\":1,\"result\":'
         '{\"amount\": 1, \"account\": \"acct-' || n % 1000 + 1 || '\", \"balance\": 1000001},'
         '\"settled_at\":\"2026-01-01T00:00:00.000000Z\"}', 'UTF8') as body) as b",
    "insert into ledger.history (tenant_id, operation_id, version, at, event, state, actor, attempt)
     select $1, 'acme:order-' || n || ':deposit:rev-1', 1, statement_timestamp(), 'succeeded', 'succeeded',
            'instance:00000000-0000-7000-8000-000000000000', 1
     from generate_series($2, $3) as n",
];

/// Stores the deposits that are missing up to `to`; `from` are there already.
pub async fn top_up(database: &Database, contestant: &Contestant, from: u64, to: u64) -> Result<()> {
    let statements = match contestant.name {
        Name::Bare => return Ok(()),
        Name::Handwritten => HANDWRITTEN,
        Name::Opledger => OPLEDGER,
    };
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
