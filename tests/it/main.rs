//! The behaviours this service promises, each as a test against a real PostgreSQL.
#![expect(
    clippy::disallowed_methods,
    clippy::unwrap_used,
    reason = "tests spawn and wait as they like, and an unwrap that fails is a test that fails"
)]

mod chaos;
mod crashes;
mod migrations;
mod pooler;
mod schema;
mod shutdown;
mod claims;
mod fingerprints;
mod plans;
mod retention;
mod states;
mod submit;
mod support;
mod traces;
