//! The behaviours this service promises, each as a test against a real PostgreSQL.
#![expect(
    clippy::disallowed_methods,
    reason = "tests may spawn, sleep and read their machine's clock"
)]

mod submit;
mod support;
mod traces;
