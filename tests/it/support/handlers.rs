//! Handlers of the tests' own, for what the example business never does: wait, refuse on demand, break, promise.
//!
//! Each writes one row to `it.effects`, so that effects are counted where they happen. Every kind exists twice: `note`
//! shares a commit with others, `note.alone` has a transaction of its own.

use super::{Ledger, Setup};

/// A database with the handlers below, a service that knows their kinds, and `config` before them.
pub async fn ledger(config: &str) -> Ledger {
    Ledger::with(setup(config)).await
}

pub fn setup(config: &str) -> Setup {
    Setup {
        config: format!("{config}\n{}", kinds()),
        sql: SQL.to_owned(),
    }
}

/// The two ways in which a kind may be run.
pub const WAYS: [&str; 2] = ["", ".alone"];

fn kinds() -> String {
    let named = |name: &str, handler: &str, more: &str| {
        WAYS.map(|way| {
            let group = way.is_empty();
            format!("[kinds.\"{name}{way}\"]\nhandler = \"it.{handler}\"\ngroup_commit = {group}\n{more}\n")
        })
        .concat()
    };
    let kind = |name: &str, more: &str| named(name, name, more);
    ["note", "raise", "promise", "owe", "repair", "flaky"]
        .map(|name| kind(name, ""))
        .concat()
        + &kind("gated", "timeout = \"30s\"")
        + &kind("hasty", "timeout = \"500ms\"")
        + &kind("brief", "retention = \"2s\"")
        + &named("fleeting", "brief", "retention = \"1s\"")
}

const SQL: &str = r"
create schema it;
grant usage on schema it to opledger;

create table it.effects (
    tenant_id text not null, operation_id text not null, kind text not null, attempt integer not null, payload jsonb,
    at timestamptz not null default clock_timestamp());
create table it.open_gates (gate text primary key);
create sequence it.tries;
create table it.promises (code text not null, detail text not null);
create table it.creditors (creditor integer primary key);
create table it.debts (creditor integer references it.creditors deferrable initially deferred);

create function it.keep_promise() returns trigger language plpgsql as $$
begin
    raise exception using errcode = new.code, message = 'promised ' || new.code, detail = new.detail;
end $$;
create constraint trigger kept after insert on it.promises deferrable initially deferred
    for each row execute function it.keep_promise();

create function it.record(payload jsonb, operation jsonb) returns void language sql as $$
    insert into it.effects (tenant_id, operation_id, kind, attempt, payload)
    values (operation->>'tenant', operation->>'id', operation->>'kind', (operation->>'attempt')::integer, payload);
$$;

-- Gives back what it was given.
create function it.note(payload jsonb, operation jsonb) returns jsonb
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    perform it.record(payload, operation);
    return payload;
end $$;

create function it.brief(payload jsonb, operation jsonb) returns jsonb
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    perform it.record(payload, operation);
    perform pg_sleep(coalesce((payload->>'seconds')::float8, 0));
    return payload;
end $$;

-- Waits until its gate, or every gate, is open: each statement sees what was committed before it.
create function it.gated(payload jsonb, operation jsonb) returns jsonb
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    perform it.record(payload, operation);
    while not exists (select from it.open_gates where gate in ('every', payload->>'gate')) loop
        perform pg_sleep(0.01);
    end loop;
    return payload;
end $$;

-- Makes its effect, then raises what the payload names.
create function it.raise(payload jsonb, operation jsonb) returns jsonb
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    perform it.record(payload, operation);
    raise exception using errcode = payload->>'code', message = 'raised ' || (payload->>'code'), detail = 'in detail';
end $$;

-- Returns, and raises what the payload names when deferred constraints are checked.
create function it.promise(payload jsonb, operation jsonb) returns jsonb
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    perform it.record(payload, operation);
    insert into it.promises values (payload->>'code', 'in detail');
    return payload;
end $$;

-- Breaks a deferred foreign key.
create function it.owe(payload jsonb, operation jsonb) returns jsonb
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    perform it.record(payload, operation);
    insert into it.debts values ((payload->'creditor')::integer);
    return payload;
end $$;

-- Broken until somebody replaces it.
create function it.repair(payload jsonb, operation jsonb) returns jsonb
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    perform it.record(payload, operation);
    return it.no_such_function(payload);
end $$;

-- Raises the payload's code as often as it says, and then succeeds. A sequence keeps count through rollbacks.
create function it.flaky(payload jsonb, operation jsonb) returns jsonb
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    perform it.record(payload, operation);
    if nextval('it.tries') <= (payload->'times')::integer then
        raise exception using errcode = payload->>'code', message = 'not yet';
    end if;
    return payload;
end $$;

-- Takes as long as the payload says and may take half a second.
create function it.hasty(payload jsonb, operation jsonb) returns jsonb
language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
begin
    perform it.record(payload, operation);
    if payload ? 'code' then
        raise exception using errcode = payload->>'code', message = 'never';
    end if;
    perform pg_sleep((payload->'seconds')::float8);
    return payload;
end $$;
";

impl Ledger {
    /// How often an operation took effect.
    pub async fn effects(&self, id: &str) -> i64 {
        sqlx::query_scalar("select count(*) from it.effects where operation_id = $1")
            .bind(id)
            .fetch_one(&self.sql)
            .await
            .unwrap()
    }

    /// Waits until this many handlers run at the gate.
    pub async fn at_the_gate(&self, handlers: i64) {
        super::until("handlers run at the gate", async || {
            // A handler has made its effect, and its statement goes on.
            self.count(
                "select count(distinct pid) from pg_locks join pg_stat_activity using (pid) \
                 where relation = 'it.effects'::regclass and mode = 'RowExclusiveLock' and granted and state = 'active'",
            )
            .await
                == handlers
        })
        .await;
    }

    /// Lets the handlers at every gate go on, these and later ones.
    pub async fn open_the_gate(&self) {
        self.open_gate("every").await;
    }

    /// Lets those go on whose payload names this gate.
    pub async fn open_gate(&self, gate: &str) {
        sqlx::query("insert into it.open_gates values ($1)")
            .bind(gate)
            .execute(&self.sql)
            .await
            .unwrap();
    }

    /// All that is stored, in figures that any write would change.
    pub async fn rows(&self) -> String {
        sqlx::query_scalar(
            "select concat_ws(' ', \
             (select concat(count(*), '/', sum(version), '/', md5(string_agg(o::text, '' order by operation_id))) from ledger.operations o), \
             (select concat(count(*), '/', md5(string_agg(r::text, '' order by operation_id))) from ledger.receipts r), \
             (select concat(count(*), '/', md5(string_agg(h::text, '' order by operation_id, version))) from ledger.history h), \
             (select count(*) from it.effects))",
        )
        .fetch_one(&self.sql)
        .await
        .unwrap()
    }
}
