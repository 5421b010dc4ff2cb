# What people type. Each target sets up what it needs.

# Where setup.sh puts helpers that this machine has not.
export PATH := $(PATH):$(CURDIR)/target/tools/bin

.PHONY: help run test bench lint sqlx

help: ## Show this
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed 's/:.*##/ —/'

run: ## Serve an example business over a private PostgreSQL, and print curl commands to try
	@scripts/setup.sh run
	cargo run --release --locked -- dev

test: ## Pass every test
	@scripts/setup.sh test
	cargo test --locked
	scripts/schemathesis.sh
	scripts/sdk.sh

bench: ## Compare with hand-written and unprotected servers; writes docs/BENCHMARKS*.md
	@scripts/setup.sh bench
	cargo bench --locked --bench throughput -- --report docs/BENCHMARKS.md
	cargo bench --locked --bench proxy -- --report docs/BENCHMARKS-PROXY.md

lint: ## Format, lints, query descriptions, dependencies
	@scripts/setup.sh lint
	cargo fmt --check
	cargo clippy --locked --all-targets -- -D warnings
	scripts/sqlx.sh --check
	cargo machete
	cargo deny --log-level error --locked check bans licenses sources

sqlx: ## Renew .sqlx after changing a query or a migration
	@scripts/setup.sh run
	scripts/sqlx.sh
