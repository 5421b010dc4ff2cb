//! The behaviours this service promises, each as a test against a real PostgreSQL.
#![expect(
    clippy::disallowed_methods,
    clippy::unwrap_used,
    reason = "tests spawn and wait as they like, and an unwrap that fails is a test that fails"
)]

mod chaos;
mod claims;
mod cli;
mod contract;
mod crashes;
mod dev;
mod edge;
mod fingerprints;
mod groups;
mod keys;
mod kill;
mod layers;
mod logs;
mod lookups;
mod migrations;
mod outbound;
mod plans;
mod pooler;
mod proxy;
mod retention;
mod sandbox;
mod schema;
mod sessions;
mod shutdown;
mod starting;
mod states;
mod submit;
mod support;
mod tenants;
mod traces;
