-- Roles and database, once, as a superuser:
--
--     psql -v owner_password=… -v service_password=… -f deploy/postgres-init.sql
--
-- In the container the passwords come from the mounted secrets.
--
-- opledger_owner  owns the database and the schema `ledger`; used by `opledger migrate` and by nothing else.
-- opledger        the service: reads and writes the ledger's tables, runs handlers, owns nothing, changes no schema.

\set ON_ERROR_STOP on

\if :{?owner_password}
\else
    \set owner_password `cat /run/secrets/owner_password`
\endif
\if :{?service_password}
\else
    \set service_password `cat /run/secrets/service_password`
\endif

-- An empty password would be stored as none; stop instead.
select :'owner_password' <> '' and :'service_password' <> '' as have_passwords \gset
\if :have_passwords
\else
    \warn 'owner_password and service_password must not be empty'
    do $$ begin raise exception 'no passwords'; end $$;
\endif

create role opledger_owner login password :'owner_password';
create role opledger login password :'service_password';

create database opledger owner opledger_owner encoding 'UTF8' template template0;
revoke all on database opledger from public;
grant connect on database opledger to opledger;

\connect opledger

-- Nobody but the owner creates anything; in PostgreSQL 15 and later this holds for `public` already.
revoke create on schema public from public;

-- The schema `ledger` and the service's rights in it come with the migrations:
--
--     opledger migrate --grant-to opledger

-- For each business schema that has handlers, its owner grants the service just this:
--
--     grant usage on schema shop to opledger;
--     grant execute on function shop.refund(jsonb, jsonb) to opledger;
--
-- with handlers that are `security definer` and set their own `search_path`.
