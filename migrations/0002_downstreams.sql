-- Downstreams: operations that are performed by an API which cannot share our transaction.
--
-- Such an operation is claimed in one transaction, sent, and settled in another. What lies between the two may be
-- unknown for ever, so whatever a later attempt or look-up needs is stored before the first byte leaves.

alter table ledger.operations add column downstream text;
comment on column ledger.operations.downstream is 'The downstream that performs it; null for a function in this database.';
comment on column ledger.operations.due_at is
    'retry_wait: when the next attempt is due. needs_reconciliation: when the downstream is asked or sent to again; null when only a person can decide.';

create table ledger.requests (
    tenant_id      text        not null,
    operation_id   text        not null,
    method         text        not null,
    path_and_query text        not null,
    headers        jsonb       not null check (jsonb_typeof(headers) = 'array'),
    body           bytea       not null,
    downstream_key text        not null,
    sent_at        timestamptz,
    primary key (tenant_id, operation_id)
);
comment on table  ledger.requests is 'What is sent to the downstream, the same on every attempt. Credentials are never in here.';
comment on column ledger.requests.tenant_id      is 'Owner.';
comment on column ledger.requests.operation_id   is 'The operation.';
comment on column ledger.requests.method         is 'HTTP method.';
comment on column ledger.requests.path_and_query is 'Path and query as they are sent, the base''s path included.';
comment on column ledger.requests.headers        is 'Header lines, in order: [[name, value], …]; values as ISO-8859-1 characters.';
comment on column ledger.requests.body           is 'The bytes that are sent.';
comment on column ledger.requests.downstream_key is 'The key that the downstream gets, derived from tenant and operation id.';
comment on column ledger.requests.sent_at        is 'When the first attempt was claimed; from then on the downstream may know the key.';

alter table ledger.receipts add column omitted_bytes bigint 
    check (omitted_bytes is null or (omitted_bytes > 0 and octet_length(body) = 0));
comment on column ledger.receipts.omitted_bytes is
    'Length of an answer that was too large to store; body is empty then, and body_sha256 is that of the whole answer.';

create table ledger.links (
    tenant_id    text not null,
    operation_id text not null,
    relation     text not null check (relation in ('compensates', 'compensated_by')),
    other_id     text not null,
    primary key (tenant_id, operation_id, relation, other_id)
);
comment on table  ledger.links is 'How operations belong together; each link is written in both directions.';
comment on column ledger.links.tenant_id    is 'Owner of both.';
comment on column ledger.links.operation_id is 'The operation.';
comment on column ledger.links.relation     is 'compensates: this one undoes the other. compensated_by: the other undoes this one.';
comment on column ledger.links.other_id     is 'The other operation.';
