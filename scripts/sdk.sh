#!/usr/bin/env bash
# Runs Stripe's and OpenAI's own Python SDKs against a running service, and kills it in the middle.
#
#   scripts/sdk.sh                       builds and tests
#   BIN=target/release/opledger scripts/sdk.sh -k stripe
#
# Needs Python 3.10 or later with venv; the SDKs are installed below target/, pinned.
set -euo pipefail
cd "$(dirname "$0")/.."

venv=target/sdk
wanted=$(cat tests/sdk/requirements.txt tests/sdk/constraints.txt)
if [ "$wanted" != "$(cat "$venv/installed.txt" 2>/dev/null)" ]; then
    python3 -m venv "$venv"
    "$venv/bin/pip" install --quiet --disable-pip-version-check -r tests/sdk/requirements.txt -c tests/sdk/constraints.txt
    echo "$wanted" >"$venv/installed.txt"
fi
# With the tests, so that it is the program that they have built, and no dependency is built in another way for it.
[ -n "${BIN:-}" ] || cargo build --quiet --locked --bin opledger --test it
cd tests/sdk
"../../$venv/bin/python" -W ignore::ResourceWarning -m unittest "$@"
