//! The receiving side that makes an agent's retries safe: one operation id, one effect, one receipt.
//!
//! Imports run downwards only: `cli` → `app` → `http` → `engine` → `ledger` → `postgres`. See docs/ARCHITECTURE.md.

pub mod app;
pub mod cli;

pub mod config;
pub mod engine;
pub mod http;
pub mod ledger;
pub mod outbound;
pub mod postgres;
pub mod sandbox;
pub mod telemetry;
