//! The way out: what downstreams declare, and one attempt at one of them.
//!
//! This part knows requests, answers and what can be known of a failure. What is claimed, stored or decided by it is none
//! of its business.

pub mod downstream;
pub mod retry_after;
pub mod send;
pub mod template;
