#!/usr/bin/env bash
# Renews .sqlx, the descriptions of our queries that let the project build without a database.
# With --check it changes nothing and fails if they are out of date.
set -euo pipefail
cd "$(dirname "$0")/.."

bin=${OPLEDGER_PG_BIN:-$(ls -d /usr/lib/postgresql/*/bin 2>/dev/null | sort -V | tail -n 1)}
[ -x "$bin/initdb" ] || { echo "sqlx.sh: PostgreSQL's programs were not found; set OPLEDGER_PG_BIN" >&2; exit 1; }

scratch=$(mktemp -d)
as_postgres=()
if [ "$(id -u)" = 0 ]; then
    # PostgreSQL does not run as root.
    chown postgres "$scratch"
    as_postgres=(setpriv --reuid=postgres --regid=postgres --clear-groups)
fi
stop() {
    "${as_postgres[@]}" "$bin/pg_ctl" -D "$scratch/data" -m immediate stop >/dev/null 2>&1 || true
    rm -rf "$scratch"
}
trap stop EXIT

"${as_postgres[@]}" "$bin/initdb" -D "$scratch/data" -U postgres -A trust --no-sync >/dev/null
"${as_postgres[@]}" "$bin/pg_ctl" -D "$scratch/data" -o "-c listen_addresses= -c fsync=off -k $scratch" -l "$scratch/log" -w start >/dev/null
psql=("$bin/psql" -q -h "$scratch" -U postgres -v ON_ERROR_STOP=1)
"${psql[@]}" -c 'create schema ledger'
for migration in migrations/*.sql; do "${psql[@]}" -1 -f "$migration" >/dev/null; done

found=$scratch/found
mkdir "$found"
# The macros describe each query to the database and write what they learn into this directory. The test profile has the
# dependencies as clippy has them for all targets, so that none is built for this alone.
touch src/lib.rs
DATABASE_URL="postgres:///postgres?host=$scratch&user=postgres" SQLX_OFFLINE=false SQLX_OFFLINE_DIR="$found" \
    cargo check --quiet --locked --lib --profile test

if [ "${1:-}" = --check ]; then
    diff -r .sqlx "$found" >/dev/null || { echo "sqlx.sh: .sqlx is out of date; run \`make sqlx\` and commit it" >&2; exit 1; }
    echo ".sqlx is up to date"
else
    rm -rf .sqlx
    cp -r "$found" .sqlx
    echo "$(find .sqlx -name '*.json' | wc -l) queries described in .sqlx"
fi
