-- How much a handler may return. Its result is stored and replayed for as long as the receipt is kept, so one that is
-- larger than the configuration allows is refused inside the handler's own sub-transaction: that undoes its effect, and
-- nobody else's.

drop function ledger.apply(text, jsonb, jsonb);

-- Runs one handler inside a sub-transaction, so that what it raises undoes its own effect and nothing else.
-- It decides nothing: the SQLSTATE goes back to the caller, which knows what each class means.
-- query_canceled is deliberately not caught (PL/pgSQL's "others" leaves it out): a time-out ends the whole transaction.
create function ledger.apply(
    handler text, payload jsonb, operation jsonb, max_result_bytes integer,
    out result text, out error_code text, out message text, out detail text, out by_ledger boolean
) language plpgsql as $$
declare
    answer jsonb;
    returned text;
begin
    -- The name comes from the configuration, quoted by the service; never from a caller.
    execute 'select ' || handler || '($1, $2)' into answer using payload, operation;
    returned := coalesce(answer::text, 'null');
    if octet_length(returned) > max_result_bytes then
        -- program_limit_exceeded. A handler may raise that as well: so it is said whose words these are.
        by_ledger := true;
        raise exception using errcode = '54000', message = format(
            'the handler returned %s bytes, and limits.max_result_bytes is %s', octet_length(returned), max_result_bytes);
    end if;
    result := returned;
exception when others or assert_failure then
    get stacked diagnostics
        error_code = returned_sqlstate, message = message_text, detail = pg_exception_detail;
end
$$;
comment on function ledger.apply(text, jsonb, jsonb, integer) is 'Runs a handler in a sub-transaction and reports its result or its SQLSTATE, message and detail.';
revoke execute on function ledger.apply(text, jsonb, jsonb, integer) from public;
