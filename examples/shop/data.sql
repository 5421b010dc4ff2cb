-- Something to work on: `select shop.seed('acme', 1000)` gives a tenant accounts, orders and tickets.
--
-- Rows that are there already are left alone, so a second start keeps its balances, refunds and versions.

create or replace function shop.seed(tenant text, accounts integer) returns void
language sql set search_path = pg_catalog, pg_temp
as $$
    -- acct-1, acct-2, …: each holds 10,000.00.
    insert into shop.accounts (tenant_id, account, balance)
    select tenant, 'acct-' || n, 1000000
    from generate_series(1, accounts) as n
    on conflict do nothing;

    -- Orders 1001 to 1020: each paid with 100.00.
    insert into shop.orders (tenant_id, order_id, paid)
    select tenant, n::text, 10000
    from generate_series(1001, 1020) as n
    on conflict do nothing;

    -- Tickets T-1 to T-10: open, at version 1.
    insert into shop.tickets (tenant_id, ticket_id, title)
    select tenant, 'T-' || n, 'Where is order ' || 1000 + n || '?'
    from generate_series(1, 10) as n
    on conflict do nothing;
$$;
comment on function shop.seed(text, integer) is
    'Gives a tenant accounts acct-1 to acct-N, orders 1001 to 1020 and tickets T-1 to T-10; keeps what is there.';
