//! The verbs that need more than SQL: they own connections, tasks and time-outs.
//!
//! HTTP handlers hand a value in and wait for a value; a client that hangs up drops the wait and nothing else.

pub mod accounts;
pub mod apply;
pub mod deliveries;
pub mod intake;
pub mod outcome;
pub mod perform;
pub mod queue;
pub mod recovery;
pub mod replays;
