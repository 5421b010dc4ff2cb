//! The ledger: operations, fingerprints, receipts, and the statements that store them.
//!
//! `operation`, `canonical`, `fingerprint`, `operation_id`, `receipt` and `submission` are pure. Each other file is one
//! family of verbs with its SQL inline. Nothing here knows HTTP.

pub mod canonical;
pub mod claim;
pub mod compensation;
pub mod delivery;
pub mod fingerprint;
pub mod forward;
pub mod instance;
pub mod key;
pub mod kind;
pub mod operation;
pub mod operation_id;
pub mod plan;
pub mod read;
pub mod receipt;
pub mod reconciliation;
pub mod retention;
pub mod settlement;
pub mod submission;
pub mod tenant;
