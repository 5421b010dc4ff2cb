-- The ledger: what was asked, what was decided, what was answered.
--
-- Rules that every table keeps (a test reads the catalogue and holds them):
--   * tenant_id comes first in each table, primary key and unique index, so that the whole schema can be spread by tenant;
--   * text or uuid identifiers, no serials, no triggers, no unlogged tables;
--   * times are PostgreSQL's own, never a client's.
--
-- The tables written on the path of an operation (operations, receipts, history, deliveries) carry no foreign keys
-- between them: each would cost a look-up and a row lock for every operation. One transaction writes them together
-- and one transaction purges them together, and a test looks for orphans.
--
-- create schema ledger: done by the migrator, which keeps its own table there.

create table ledger.tenants (
    tenant_id  text        not null primary key
               check (tenant_id ~ '^[a-z0-9][a-z0-9-]{0,39}$'),
    created_at timestamptz not null default clock_timestamp()
);
comment on table  ledger.tenants is 'Who shares this service. Operation ids are unique within a tenant; another tenant''s do not exist for it.';
comment on column ledger.tenants.tenant_id  is 'Short stable name; part of every API key.';
comment on column ledger.tenants.created_at is 'When the tenant was made.';

create table ledger.api_keys (
    tenant_id     text        not null references ledger.tenants,
    key_id        text        not null check (key_id ~ '^[0-9A-Za-z]{16}$'),
    secret_sha256 bytea       not null check (octet_length(secret_sha256) = 32),
    role          text        not null check (role in ('agent', 'approver', 'operator', 'admin')),
    label         text        not null check (char_length(label) between 1 and 200),
    kinds         text[]      check (cardinality(kinds) > 0),
    created_at    timestamptz not null default clock_timestamp(),
    last_used_at  timestamptz,
    revoked_at    timestamptz,
    primary key (tenant_id, key_id)
);
comment on table  ledger.api_keys is 'Credentials. A row stays when its key is revoked, so that history can name who acted.';
comment on column ledger.api_keys.tenant_id     is 'The tenant whose operations the key may touch.';
comment on column ledger.api_keys.key_id        is 'The public half: 16 base-62 characters, safe to log.';
comment on column ledger.api_keys.secret_sha256 is 'SHA-256 of the whole key as shown once; 256 random bits need no slow hash.';
comment on column ledger.api_keys.role          is 'agent: submit, plan, cancel own, read. approver: decide. operator: read all, settle unknowns, purge. admin: keys.';
comment on column ledger.api_keys.label         is 'What people call the key.';
comment on column ledger.api_keys.kinds         is 'The kinds this key is limited to; null means every kind.';
comment on column ledger.api_keys.created_at    is 'When the key was made.';
comment on column ledger.api_keys.last_used_at  is 'Last accepted use, exact to about a minute; a refused use never moves it.';
comment on column ledger.api_keys.revoked_at    is 'From this moment the key is refused, within one second on every process.';

create table ledger.instances (
    instance_id  uuid        not null primary key,
    hostname     text        not null,
    version      text        not null,
    started_at   timestamptz not null default clock_timestamp(),
    heartbeat_at timestamptz not null default clock_timestamp()
);
comment on table  ledger.instances is 'One row per running process. A claim names its instance; recovery touches only claims of instances whose heartbeat has lapsed.';
comment on column ledger.instances.instance_id  is 'Made anew at each start.';
comment on column ledger.instances.hostname     is 'Where it runs, for people.';
comment on column ledger.instances.version      is 'Version of the program.';
comment on column ledger.instances.started_at   is 'When it started.';
comment on column ledger.instances.heartbeat_at is 'Last sign of life, by the database''s clock.';

create table ledger.operations (
    tenant_id          text        not null,
    operation_id       text        not null,
    kind               text        not null,
    target             text        not null,
    state              text        not null
        constraint operations_state check (state in (
            'planned', 'waiting_approval', 'rejected', 'cancelled', 'running', 'retry_wait', 'succeeded', 'failed',
            'needs_reconciliation', 'compensating', 'compensated')),
    fingerprint        text        not null,
    attempt            integer     not null check (attempt >= 0),
    version            integer     not null check (version >= 1),
    payload            text,
    run                jsonb,
    run_id             text,
    external_reference text,
    requested_by       text        not null,
    trace_parent       text,
    instance_id        uuid,
    due_at             timestamptz,
    created_at         timestamptz not null,
    settled_at         timestamptz,
    receipt_expires_at timestamptz,
    purged_at          timestamptz,
    primary key (tenant_id, operation_id),
    -- Lengths are counted and characters are classed, apart: a regular expression with {1,255} or {64} in it costs some
    -- 17 microseconds a row, more than all the indexes of this table together.
    constraint operations_id_alphabet check (octet_length(operation_id) between 1 and 255 and operation_id !~ '[^!-~]'),
    constraint operations_fingerprint_form check (
        fingerprint like 'v1:%' and octet_length(fingerprint) = 67 and substr(fingerprint, 4) !~ '[^0-9a-f]'),
    constraint operations_settled_when_final check (
        (settled_at is not null) = (state in ('rejected', 'cancelled', 'succeeded', 'failed', 'compensating', 'compensated'))),
    constraint operations_expiry_when_settled check ((receipt_expires_at is not null) = (settled_at is not null)),
    constraint operations_running_is_claimed check (state <> 'running' or (instance_id is not null and attempt >= 1)),
    constraint operations_only_running_is_claimed check (instance_id is null or state in ('running', 'compensating')),
    constraint operations_waiting_has_due check (state <> 'retry_wait' or due_at is not null),
    constraint operations_planned_untried check (state not in ('planned', 'waiting_approval') or attempt = 0),
    constraint operations_payload_until_purge check ((payload is null) = (purged_at is not null)),
    constraint operations_purged_when_settled check (purged_at is null or settled_at is not null)
);
comment on table  ledger.operations is 'One business intent under one id. The primary key is the claim: who inserts the row first performs the operation.';
comment on column ledger.operations.tenant_id          is 'Owner.';
comment on column ledger.operations.operation_id       is 'The caller''s name for the intent: 1 to 255 bytes of 0x21-0x7E.';
comment on column ledger.operations.kind               is 'Registered type, e.g. order.refund.';
comment on column ledger.operations.target             is 'What performs it: the handler function.';
comment on column ledger.operations.state is
    'planned: stored, not to be run yet. waiting_approval: a person has to decide. rejected: refused or approval expired. '
    'cancelled: withdrawn before it ran. running: claimed. retry_wait: known not to have acted, will be tried again. '
    'succeeded: effect and receipt committed. failed: finally refused, receipt stored, no effect. '
    'needs_reconciliation: may have acted, nobody knows. compensating, compensated: being undone, undone.';
comment on column ledger.operations.fingerprint        is 'Versioned SHA-256 of kind and canonical payload; the same id with another one is refused.';
comment on column ledger.operations.attempt            is 'Number of the latest attempt; the fence that a late answer must present.';
comment on column ledger.operations.version            is 'Number of changes, and the number of the latest history row.';
comment on column ledger.operations.payload            is 'The payload''s text exactly as it was sent; null once purged.';
comment on column ledger.operations.run                is 'Which engine, run, step and attempt asked first; never part of the fingerprint.';
comment on column ledger.operations.run_id             is 'run.run_id again, for look-up.';
comment on column ledger.operations.external_reference is 'The caller''s own reference, for look-up.';
comment on column ledger.operations.requested_by       is 'Key id of the credential that asked first.';
comment on column ledger.operations.trace_parent       is 'W3C trace context of the first delivery.';
comment on column ledger.operations.instance_id        is 'The process that holds the claim while running.';
comment on column ledger.operations.due_at             is 'When the next attempt is due.';
comment on column ledger.operations.created_at         is 'When the id was first claimed.';
comment on column ledger.operations.settled_at         is 'When the operation became final.';
comment on column ledger.operations.receipt_expires_at is 'When the receipt stops being served, whether or not it has been purged yet.';
comment on column ledger.operations.purged_at          is 'When payload, receipt and history were removed; what is left is the tombstone.';

create index operations_by_time on ledger.operations (tenant_id, created_at, operation_id);
create index operations_by_kind on ledger.operations (tenant_id, kind, created_at, operation_id);
create index operations_by_fingerprint on ledger.operations (tenant_id, fingerprint);
create index operations_by_run on ledger.operations (tenant_id, run_id, created_at) where run_id is not null;
create index operations_by_reference on ledger.operations (tenant_id, external_reference, created_at)
    where external_reference is not null;
-- Succeeded rows, nearly all of them, never enter this index: looking for the others stays cheap for ever, and the
-- common path pays nothing for it.
create index operations_by_state on ledger.operations (tenant_id, state, created_at, operation_id)
    where state <> 'succeeded';
create index operations_by_purge on ledger.operations (tenant_id, purged_at) where purged_at is not null;

create table ledger.receipts (
    tenant_id    text        not null,
    operation_id text        not null,
    status       smallint    not null check (status between 100 and 599),
    headers      jsonb       not null check (jsonb_typeof(headers) = 'array'),
    body         bytea       not null,
    body_sha256  bytea       not null check (octet_length(body_sha256) = 32),
    expires_at   timestamptz not null,
    primary key (tenant_id, operation_id)
);
comment on table  ledger.receipts is 'The immutable answer: inserted once, never updated, deleted only by the purge.';
comment on column ledger.receipts.tenant_id    is 'Owner.';
comment on column ledger.receipts.operation_id is 'The operation this answers.';
comment on column ledger.receipts.status       is 'HTTP status of the first answer and of every replay.';
comment on column ledger.receipts.headers      is 'Header lines to replay, in order: [[name, value], …].';
comment on column ledger.receipts.body         is 'The bytes of the first answer and of every replay.';
comment on column ledger.receipts.body_sha256  is 'SHA-256 of body; the entity tag.';
comment on column ledger.receipts.expires_at   is 'The same time as operations.receipt_expires_at; here for the purge, which reads in this order.';
create index receipts_by_expiry on ledger.receipts (tenant_id, expires_at);

create table ledger.history (
    tenant_id    text        not null,
    operation_id text        not null,
    version      integer     not null check (version >= 1),
    at           timestamptz not null,
    event        text        not null,
    state        text        not null,
    actor        text        not null,
    attempt      integer     not null,
    reason       text,
    evidence     jsonb,
    primary key (tenant_id, operation_id, version)
);
comment on table  ledger.history is 'Every change of an operation, in order; never updated, deleted only by the purge.';
comment on column ledger.history.tenant_id    is 'Owner.';
comment on column ledger.history.operation_id is 'The operation that changed.';
comment on column ledger.history.version      is 'Which change, from 1 without gaps.';
comment on column ledger.history.at           is 'When.';
comment on column ledger.history.event        is 'What happened: planned, accepted, claimed, succeeded, failed, retry_scheduled, claim_lapsed, cancelled, …';
comment on column ledger.history.state        is 'The state after the change.';
comment on column ledger.history.actor        is 'Who: key:<key id> for a credential, instance:<uuid> for a process.';
comment on column ledger.history.attempt      is 'The attempt it belongs to; 0 before the first.';
comment on column ledger.history.reason       is 'Why, for people.';
comment on column ledger.history.evidence     is 'What was seen, e.g. SQLSTATE and message of a refusal.';

create table ledger.deliveries (
    tenant_id         text        not null,
    operation_id      text        not null,
    repeats           bigint      not null check (repeats > 0),
    last_delivered_at timestamptz not null,
    primary key (tenant_id, operation_id)
);
comment on table  ledger.deliveries is 'How often a known operation was delivered again. Counted in memory and written in batches, so a crash may lose up to a second of counting; nothing is decided by it.';
comment on column ledger.deliveries.tenant_id         is 'Owner.';
comment on column ledger.deliveries.operation_id      is 'The operation.';
comment on column ledger.deliveries.repeats           is 'Deliveries after the first.';
comment on column ledger.deliveries.last_delivered_at is 'When the latest batch with this operation was written.';

-- Runs one handler inside a sub-transaction, so that what it raises undoes its own effect and nothing else.
-- It decides nothing: the SQLSTATE goes back to the caller, which knows what each class means.
-- query_canceled is deliberately not caught (PL/pgSQL's "others" leaves it out): a time-out ends the whole transaction.
create function ledger.apply(
    handler text, payload jsonb, operation jsonb,
    out result text, out error_code text, out message text, out detail text
) language plpgsql as $$
declare
    answer jsonb;
begin
    -- The name comes from the configuration, quoted by the service; never from a caller.
    execute 'select ' || handler || '($1, $2)' into answer using payload, operation;
    result := coalesce(answer::text, 'null');
exception when others or assert_failure then
    get stacked diagnostics
        error_code = returned_sqlstate, message = message_text, detail = pg_exception_detail;
end
$$;
comment on function ledger.apply(text, jsonb, jsonb) is 'Runs a handler in a sub-transaction and reports its result or its SQLSTATE, message and detail.';
revoke execute on function ledger.apply(text, jsonb, jsonb) from public;
