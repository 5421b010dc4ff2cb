//! The way out: what downstreams declare, and one attempt at one of them.
//!
//! This part knows requests, answers and what can be known of a failure. What is claimed, stored or decided by it is none
//! of its business.

pub mod call;
mod deadlines;
mod dial;
pub mod downstream;
pub mod headers;
mod http1;
mod http2;
pub mod path;
mod pool;
pub mod registry;
pub mod retry_after;
#[cfg(test)]
pub mod samples;
pub mod send;
mod sentence;
mod socket;
pub mod template;
pub mod tls;
