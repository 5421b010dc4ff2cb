-- The shop: a small business whose updates the ledger applies.
--
-- Nothing here knows of the ledger. These are ordinary tables, owned by the business; the ledger reaches them only
-- through the handlers in functions.sql. Running this file again changes nothing.
--
-- `tenant_id` comes first in every table and every key: one tenant's rows lie together, and no statement can find
-- another tenant's row by forgetting a condition that the key would have asked for.

create schema if not exists shop;
comment on schema shop is 'The example business: accounts, orders and tickets.';

-- An amount of money in minor units (cents). A negative deposit would be a withdrawal, so the type refuses it, also
-- for callers that no JSON Schema has checked. PostgreSQL has no `create domain if not exists`.
do $$
begin
    create domain shop.amount as bigint constraint amount_in_range check (value between 1 and 1000000000000);
exception
    when duplicate_object then null;
end
$$;
comment on domain shop.amount is 'Money in minor units, 1 to 1,000,000,000,000.';

create table if not exists shop.accounts (
    tenant_id text   not null,
    account   text   not null,
    balance   bigint not null,
    primary key (tenant_id, account),
    constraint balance_not_negative check (balance >= 0)
);
comment on table  shop.accounts is 'Accounts that money is deposited to and moved between.';
comment on column shop.accounts.tenant_id is 'Whose account it is.';
comment on column shop.accounts.account   is 'The account''s name, unique within the tenant: acct-1.';
comment on column shop.accounts.balance   is 'What it holds, in minor units; never below zero.';

create table if not exists shop.orders (
    tenant_id text    not null,
    order_id  text    not null,
    paid      bigint  not null,
    refunded  bigint  not null default 0,
    refunds   integer not null default 0,
    primary key (tenant_id, order_id),
    constraint paid_not_negative     check (paid >= 0),
    constraint refunded_within_paid  check (refunded between 0 and paid),
    constraint refunds_not_negative  check (refunds >= 0)
);
comment on table  shop.orders is 'Paid orders, refundable in parts.';
comment on column shop.orders.tenant_id is 'Whose order it is.';
comment on column shop.orders.order_id  is 'The order''s number, unique within the tenant: 1001.';
comment on column shop.orders.paid      is 'What the customer has paid, in minor units.';
comment on column shop.orders.refunded  is 'What has been paid back so far, in minor units; never more than paid.';
comment on column shop.orders.refunds   is 'How many refunds that was: the effects, counted where they happen.';

create table if not exists shop.tickets (
    tenant_id text   not null,
    ticket_id text   not null,
    version   bigint not null default 1,
    title     text   not null,
    status    text   not null default 'open',
    priority  text   not null default 'normal',
    assignee  text,
    primary key (tenant_id, ticket_id),
    constraint version_positive  check (version >= 1),
    constraint status_is_known   check (status in ('open', 'waiting', 'closed')),
    constraint priority_is_known check (priority in ('low', 'normal', 'high'))
);
comment on table  shop.tickets is 'Support tickets, changed under an optimistic version.';
comment on column shop.tickets.tenant_id is 'Whose ticket it is.';
comment on column shop.tickets.ticket_id is 'The ticket''s name, unique within the tenant: T-1.';
comment on column shop.tickets.version   is 'Counts the changes, from 1; a change must name the version it has seen.';
comment on column shop.tickets.title     is 'What it is about, in one line.';
comment on column shop.tickets.status    is 'open: to be worked on; waiting: for the customer; closed: settled.';
comment on column shop.tickets.priority  is 'low, normal or high.';
comment on column shop.tickets.assignee  is 'Who works on it; null: nobody yet.';
