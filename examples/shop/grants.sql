-- What the ledger's role may do here: see the schema and call the four handlers. No table, no seed.
--
-- PostgreSQL lets everybody execute a new function, and these run with their owner's rights; that is taken back first.

revoke execute on all functions in schema shop from public;

grant usage on schema shop to opledger;
grant execute on function
    shop.deposit(jsonb, jsonb),
    shop.transfer(jsonb, jsonb),
    shop.refund(jsonb, jsonb),
    shop.update_ticket(jsonb, jsonb)
to opledger;
