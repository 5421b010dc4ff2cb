-- The handlers: what the ledger calls to apply an operation, one function a kind.
--
-- Every handler has the same shape and the same four duties.
--
--   create function shop.refund(payload jsonb, operation jsonb) returns jsonb
--
-- 1. It takes the tenant from `operation` (id, tenant, kind, fingerprint, attempt), never from `payload`: the
--    payload is what the caller wrote, the operation is what the ledger knows.
-- 2. It returns the result that goes into the receipt, and so to the caller, on every replay.
-- 3. It refuses by raising a code of class OL, with a message for people and a JSON detail for programs. A refusal is
--    an answer too: its receipt is stored, and the update is undone. README.md lists the codes.
-- 4. It does nothing but read and write this database. The ledger runs it inside the transaction that stores the
--    receipt, so both are there or neither is; an e-mail sent from here could not be taken back.
--
-- It need not ask whether it has run before: the ledger calls it once for an operation id that settles. An attempt
-- that the database aborted (a deadlock, a restart) left nothing behind and is made again.
--
-- `security definer` lets the ledger's role call a handler without any right to the tables. A function that runs with
-- its owner's rights must not trust the caller's search path, hence the pinned one and the qualified names.
--
-- Numbers are read as `(payload->'amount')::bigint`, from the JSON value and not from its text: 5, 5.0 and 5e0 are
-- the same number to the ledger, and so they are here.

-- account.deposit {account, amount}: money comes in from outside.
create or replace function shop.deposit(payload jsonb, operation jsonb) returns jsonb
language plpgsql security definer set search_path = pg_catalog, pg_temp
as $$
declare
    deposited   constant shop.amount not null := (payload->'amount')::bigint;
    new_balance bigint;
begin
    update shop.accounts
    set balance = balance + deposited
    where tenant_id = operation->>'tenant' and account = payload->>'account'
    returning balance into new_balance;

    if not found then
        raise exception using
            errcode = 'OL003',
            message = format('There is no account %s.', payload->>'account'),
            detail = jsonb_build_object('account', payload->'account');
    end if;

    return jsonb_build_object('account', payload->'account', 'amount', deposited, 'balance', new_balance);
end
$$;
comment on function shop.deposit(jsonb, jsonb) is 'account.deposit {account, amount}: raises OL003.';

-- account.transfer {from, to, amount}: money moves between two accounts of one tenant.
create or replace function shop.transfer(payload jsonb, operation jsonb) returns jsonb
language plpgsql security definer set search_path = pg_catalog, pg_temp
as $$
declare
    tenant       constant text not null := operation->>'tenant';
    source       constant text not null := payload->>'from';
    target       constant text not null := payload->>'to';
    moved        constant shop.amount not null := (payload->'amount')::bigint;
    source_holds bigint;
    target_holds bigint;
begin
    if source = target then
        raise exception using
            errcode = 'OL005',
            message = format('A transfer needs two accounts, and both are %s.', source),
            detail = jsonb_build_object('account', source);
    end if;

    -- Both rows are locked by one statement, in the order of their names. Two opposite transfers then meet at the
    -- same first row, where one waits; each taking its own source first, they would wait for each other.
    perform from shop.accounts
    where tenant_id = tenant and account in (source, target)
    order by account
    for no key update;

    select balance into source_holds from shop.accounts where tenant_id = tenant and account = source;
    select balance into target_holds from shop.accounts where tenant_id = tenant and account = target;

    if source_holds is null or target_holds is null then
        raise exception using
            errcode = 'OL003',
            message = format('There is no account %s.', case when source_holds is null then source else target end),
            detail = jsonb_build_object('account', case when source_holds is null then source else target end);
    end if;

    if source_holds < moved then
        raise exception using
            errcode = 'OL004',
            message = format('Account %s holds %s, which is less than %s.', source, source_holds, moved),
            detail = jsonb_build_object('account', source, 'balance', source_holds, 'amount', moved);
    end if;

    update shop.accounts
    set balance = balance + case account when source then -moved else moved end
    where tenant_id = tenant and account in (source, target);

    return jsonb_build_object(
        'amount', moved,
        'from', jsonb_build_object('account', source, 'balance', source_holds - moved),
        'to', jsonb_build_object('account', target, 'balance', target_holds + moved));
end
$$;
comment on function shop.transfer(jsonb, jsonb) is 'account.transfer {from, to, amount}: raises OL003, OL004, OL005.';

-- order.refund {order_id, amount}: part of an order's price, or all of it, is paid back.
create or replace function shop.refund(payload jsonb, operation jsonb) returns jsonb
language plpgsql security definer set search_path = pg_catalog, pg_temp
as $$
declare
    tenant     constant text not null := operation->>'tenant';
    order_name constant text not null := payload->>'order_id';
    returned   constant shop.amount not null := (payload->'amount')::bigint;
    bought     shop.orders;
begin
    -- Locked until the commit: of two refunds that each would fit, but not both, the second sees the first.
    select * into bought from shop.orders where tenant_id = tenant and order_id = order_name for no key update;

    if not found then
        raise exception using
            errcode = 'OL002',
            message = format('There is no order %s.', order_name),
            detail = jsonb_build_object('order_id', order_name);
    end if;

    if returned > bought.paid - bought.refunded then
        raise exception using
            errcode = 'OL001',
            message = format('Order %s has %s left to refund, which is less than %s.',
                             order_name, bought.paid - bought.refunded, returned),
            detail = jsonb_build_object('order_id', order_name, 'paid', bought.paid, 'refunded', bought.refunded,
                                        'refundable', bought.paid - bought.refunded, 'amount', returned);
    end if;

    update shop.orders
    set refunded = refunded + returned, refunds = refunds + 1
    where tenant_id = tenant and order_id = order_name
    returning * into bought;

    return jsonb_build_object('order_id', order_name, 'amount', returned, 'paid', bought.paid,
                              'refunded', bought.refunded, 'refundable', bought.paid - bought.refunded,
                              'refunds', bought.refunds);
end
$$;
comment on function shop.refund(jsonb, jsonb) is 'order.refund {order_id, amount}: raises OL001, OL002.';

-- ticket.update {ticket_id, expected_version, changes}: some of a ticket's fields change, if nobody was quicker.
create or replace function shop.update_ticket(payload jsonb, operation jsonb) returns jsonb
language plpgsql security definer set search_path = pg_catalog, pg_temp
as $$
declare
    tenant      constant text not null := operation->>'tenant';
    ticket_name constant text not null := payload->>'ticket_id';
    expected    constant bigint not null := (payload->'expected_version')::bigint;
    changes     constant jsonb not null := payload->'changes';
    ticket      shop.tickets;
begin
    select * into ticket from shop.tickets where tenant_id = tenant and ticket_id = ticket_name for no key update;

    if not found then
        raise exception using
            errcode = 'OL006',
            message = format('There is no ticket %s.', ticket_name),
            detail = jsonb_build_object('ticket_id', ticket_name);
    end if;

    if ticket.version <> expected then
        raise exception using
            errcode = 'OL007',
            message = format('Ticket %s is at version %s, not at %s.', ticket_name, ticket.version, expected),
            detail = jsonb_build_object('ticket_id', ticket_name, 'expected_version', expected,
                                        'current_version', ticket.version);
    end if;

    -- A field that is not named stays as it is. Only the assignee may be null, so only there do "not named" and
    -- "set to null" differ.
    update shop.tickets
    set version  = version + 1,
        title    = coalesce(changes->>'title', title),
        status   = coalesce(changes->>'status', status),
        priority = coalesce(changes->>'priority', priority),
        assignee = case when changes ? 'assignee' then changes->>'assignee' else assignee end
    where tenant_id = tenant and ticket_id = ticket_name
    returning * into ticket;

    return to_jsonb(ticket) - 'tenant_id';
end
$$;
comment on function shop.update_ticket(jsonb, jsonb) is
    'ticket.update {ticket_id, expected_version, changes}: raises OL006, OL007.';
