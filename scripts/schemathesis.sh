#!/usr/bin/env bash
# Throws generated requests, good and bad, at a running `opledger dev`, and holds every answer to openapi.yaml.
#
#   scripts/schemathesis.sh            builds, serves, tests; exits with 1 if an answer breaks the description
#   BIN=target/release/opledger scripts/schemathesis.sh
#   SECONDS_PER_ROLE=300 SEED=$RANDOM scripts/schemathesis.sh
#                              longer, and other requests than every run sends
#
# Needs Python 3.10 or later with venv; the tool itself is installed below target/, pinned.
set -euo pipefail
cd "$(dirname "$0")/.."

version=4.32.5
venv=target/schemathesis
work=$(mktemp -d)
budget=${SECONDS_PER_ROLE:-30}
bin=${BIN:-target/debug/opledger}

if [ "$("$venv/bin/schemathesis" --version 2>/dev/null)" != "schemathesis, version $version" ]; then
    python3 -m venv "$venv"
    "$venv/bin/pip" install --quiet --disable-pip-version-check "schemathesis==$version"
fi
# With the tests, so that it is the program that they have built, and no dependency is built in another way for it.
[ -n "${BIN:-}" ] || cargo build --quiet --locked --bin opledger --test it

"$bin" dev --ephemeral --listen 127.0.0.1:0 --json >"$work/ready.json" 2>"$work/log" &
service=$!
trap 'kill "$service" 2>/dev/null; wait "$service" 2>/dev/null; rm -rf "$work"' EXIT
for _ in $(seq 300); do
    [ -s "$work/ready.json" ] && break
    kill -0 "$service" 2>/dev/null || { cat "$work/log" >&2; exit 1; }
    sleep 0.1
done
[ -s "$work/ready.json" ] || { cat "$work/log" >&2; exit 1; }

# What the description leaves to each installation is filled in with the example's kinds, so that generated submissions
# reach the handlers: kinds with their payloads, and one place for the key.
"$venv/bin/python" - "$work" <<'PYTHON'
import json, pathlib, sys, tomllib, yaml

work = pathlib.Path(sys.argv[1])
shop = pathlib.Path("examples/shop")
api = yaml.safe_load(pathlib.Path("openapi.yaml").read_text())
kinds = tomllib.loads((shop / "opledger.toml").read_text())["kinds"]
submission = api["components"]["schemas"]["Submission"]
del submission["properties"]["operation_id"]
variants = []
for name, kind in kinds.items():
    payload = json.loads((shop / kind["schema"]).read_text())
    del payload["$schema"]
    variants.append({**submission, "properties": {**submission["properties"], "kind": {"const": name}, "payload": payload}})
api["components"]["schemas"]["Submission"] = {"oneOf": variants}
key = api["components"]["parameters"]["IdempotencyKey"]
key["required"] = True
key["schema"] = {"type": "string", "pattern": "^[!#-~][!-~]{0,254}$"}
# Made-up cursors are refused, as they should be.
del api["components"]["parameters"]["Cursor"]
# "Any JSON value" is any whose numbers a double gives back; made-up ones are refused, as they should be.
text = {"type": "string", "pattern": "^[ -~]*$"}
exact = {"anyOf": [text, {"type": "object", "propertyNames": {"pattern": "^[a-z]+$"}, "additionalProperties": text}]}
resolution = api["components"]["schemas"]["Resolution"]["properties"]
resolution["evidence"] = exact
resolution["answer"]["properties"]["body"] = exact
# Proxied requests are left out: the answers are a downstream's own, with any status and body, so there is nothing to hold
# them to; and {path} is more than the one segment that a template can say. The tests of the proxy hold ours to the file.
api["paths"] = {path: item for path, item in api["paths"].items() if not path.startswith("/v1/proxy/")}
del api["components"]["pathItems"]
# The example's kinds are performed by functions. So no answer can be a downstream's own, and none is taken for one.
for path in api["paths"].values():
    for operation in path.values():
        if isinstance(operation, dict) and operation.pop("x-downstreams-own", False):
            del operation["responses"]["default"]
for path in api["paths"].values():
    for operation in path.values():
        if isinstance(operation, dict) and "parameters" in operation:
            operation["parameters"] = [p for p in operation["parameters"] if not p.get("$ref", "").endswith("/Cursor")]
submit = api["paths"]["/v1/operations"]["post"]
for example in submit["requestBody"]["content"]["application/json"]["examples"].values():
    example["value"].pop("operation_id", None)
(work / "openapi.yaml").write_text(yaml.safe_dump(api, sort_keys=False))
PYTHON

ready() { "$venv/bin/python" -c 'import json, sys; d = json.load(open(sys.argv[1])); print(d["url"] if len(sys.argv) == 2 else d["keys"][sys.argv[2]])' "$work/ready.json" "$@"; }

# role, then the options that choose what the role may do
run() {
    role=$1
    shift
    "$venv/bin/schemathesis" --config-file scripts/schemathesis.toml run "$work/openapi.yaml" --url "$(ready)" \
        --header "Authorization: Bearer $(ready "$role")" --max-time "$budget" --no-color \
        --seed "${SEED:-1}" --generation-database none "$@"
}

failed=0
run agent --include-tag operations --include-tag service || failed=1
# Ids that end up in these paths are taken from other answers and bent; what is accepted is tested by itself.
run operator --include-tag decisions --exclude-checks positive_data_acceptance || failed=1
run admin --include-tag keys || failed=1
exit "$failed"
