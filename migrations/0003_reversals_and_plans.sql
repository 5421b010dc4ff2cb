-- An operation that is being undone has an answer only if it had one before.
--
-- One that had succeeded keeps its receipt. One whose outcome was unknown stays without: whether there is an effect is
-- known once its reversal has succeeded, and not before.

alter table ledger.operations
    drop constraint operations_settled_when_final,
    add constraint operations_settled_when_final check (
        state = 'compensating'
        or (settled_at is not null) = (state in ('rejected', 'cancelled', 'succeeded', 'failed', 'compensated')));
comment on column ledger.operations.settled_at is
    'When the operation became final. compensating: when it had succeeded, if it had.';

-- A plan keeps its request from the start; nothing else of it is new.
comment on column ledger.requests.sent_at is
    'When the first attempt was claimed; from then on the downstream may know the key. Null of what was planned: its history says when.';
