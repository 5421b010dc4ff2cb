//! PostgreSQL: the pool and its guards, the session, migrations, and the private cluster for `dev` and tests.
//!
//! Nothing here knows what an operation is.

pub mod cluster;
pub mod error;
mod executor;
pub mod migrate;
pub mod pool;
pub mod session;
