//! The one database: its preparation, what is asked of it between the rounds, and the final count.

use anyhow::{Context as _, Result, ensure};
use sqlx::PgPool;
use sqlx::postgres::PgPoolOptions;

use crate::contestant::Contestant;
use crate::process;

/// The hand-written server's own tables: what such a team would have.
const BASELINE_TABLES: &str = "
    create schema if not exists bench;

    create table if not exists bench.idempotency (
        tenant_id       text        not null,
        idempotency_key text        not null,
        request_sha256  bytea       not null,
        answer          text,
        created_at      timestamptz not null default clock_timestamp(),
        settled_at      timestamptz,
        primary key (tenant_id, idempotency_key)
    );

    create table if not exists bench.audit (
        audit_id        bigint      generated always as identity primary key,
        tenant_id       text        not null,
        idempotency_key text        not null,
        event           text        not null,
        at              timestamptz not null default clock_timestamp()
    );
";

/// What of PostgreSQL's settings decides the figures.
const SETTINGS: [&str; 10] = [
    "fsync",
    "synchronous_commit",
    "full_page_writes",
    "wal_level",
    "wal_sync_method",
    "commit_delay",
    "shared_buffers",
    "max_wal_size",
    "max_connections",
    "data_checksums",
];

pub struct Database {
    pub pool: PgPool,
    postmaster: u32,
}

impl Database {
    pub async fn connect(owner_url: &str) -> Result<Self> {
        let pool = PgPoolOptions::new()
            .max_connections(1)
            .connect(owner_url)
            .await
            .context("connect to the database as its owner")?;
        let backend: i32 = sqlx::query_scalar("select pg_backend_pid()").fetch_one(&pool).await?;
        let postmaster =
            process::parent(backend.unsigned_abs()).context("find PostgreSQL among this machine's processes")?;
        Ok(Self { pool, postmaster })
    }

    /// All processes of this PostgreSQL have this one as their parent.
    pub fn postmaster(&self) -> u32 {
        self.postmaster
    }

    pub async fn prepare(&self) -> Result<()> {
        let shop: bool = sqlx::query_scalar("select to_regclass('shop.accounts') is not null")
            .fetch_one(&self.pool)
            .await?;
        if !shop {
            for file in [
                include_str!("../../examples/shop/schema.sql"),
                include_str!("../../examples/shop/functions.sql"),
                include_str!("../../examples/shop/data.sql"),
            ] {
                sqlx::raw_sql(file)
                    .execute(&self.pool)
                    .await
                    .context("create the shop")?;
            }
        }
        sqlx::raw_sql(BASELINE_TABLES)
            .execute(&self.pool)
            .await
            .context("create the hand-written server's tables")?;
        Ok(())
    }

    /// Gives the server's tenant its accounts, and notes what they hold.
    pub async fn admit(&self, contestant: &mut Contestant, accounts: u32) -> Result<()> {
        sqlx::query("select shop.seed($1, $2)")
            .bind(&contestant.tenant)
            .bind(i32::try_from(accounts).context("count the accounts")?)
            .execute(&self.pool)
            .await
            .context("create a tenant's accounts")?;
        contestant.balance_before = self.balance(&contestant.tenant).await?;
        Ok(())
    }

    /// Every deposit was of 1: as many were applied as were acknowledged, none lost and none doubled.
    pub async fn verify(&self, contestant: &Contestant) -> Result<()> {
        let deposited = self.balance(&contestant.tenant).await? - contestant.balance_before;
        ensure!(
            i64::try_from(contestant.acknowledged) == Ok(deposited),
            "{} acknowledged {} deposits, but its accounts have received {deposited}",
            contestant.name.as_str(),
            contestant.acknowledged,
        );
        Ok(())
    }

    /// Clears up after the last round, so that each begins alike.
    pub async fn settle_down(&self) -> Result<()> {
        for statement in ["vacuum (analyze)", "checkpoint"] {
            sqlx::raw_sql(statement)
                .execute(&self.pool)
                .await
                .with_context(|| format!("run {statement}"))?;
        }
        Ok(())
    }

    pub async fn version(&self) -> Result<String> {
        Ok(sqlx::query_scalar("select current_setting('server_version')")
            .fetch_one(&self.pool)
            .await?)
    }

    pub async fn today(&self) -> Result<String> {
        Ok(sqlx::query_scalar("select current_date::text")
            .fetch_one(&self.pool)
            .await?)
    }

    pub async fn size(&self) -> Result<String> {
        Ok(
            sqlx::query_scalar("select pg_size_pretty(pg_database_size(current_database()))")
                .fetch_one(&self.pool)
                .await?,
        )
    }

    pub async fn directory(&self) -> Result<String> {
        Ok(sqlx::query_scalar("select current_setting('data_directory')")
            .fetch_one(&self.pool)
            .await?)
    }

    pub async fn settings(&self) -> Result<Vec<(&'static str, String)>> {
        let mut settings = Vec::new();
        for name in SETTINGS {
            let value = sqlx::query_scalar("select current_setting($1)")
                .bind(name)
                .fetch_one(&self.pool)
                .await?;
            settings.push((name, value));
        }
        Ok(settings)
    }

    async fn balance(&self, tenant: &str) -> Result<i64> {
        sqlx::query_scalar("select coalesce(sum(balance), 0)::bigint from shop.accounts where tenant_id = $1")
            .bind(tenant)
            .fetch_one(&self.pool)
            .await
            .context("add up a tenant's accounts")
    }
}
