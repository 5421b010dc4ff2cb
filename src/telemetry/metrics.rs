//! Metrics, each process its own: a registry is a value here, not a global, so that two services in one test count apart.

use std::sync::atomic::AtomicU64;
use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::encoding::text::encode;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::{Registry, Unit};

use crate::engine::outcome::{Outcome, Refusal};

/// What a delivery came to.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct DeliveryLabels {
    outcome: &'static str,
}

/// What an attempt at a downstream taught us.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct AttemptLabels {
    downstream: String,
    outcome: &'static str,
}

#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct RequestLabels {
    route: String,
    status: u16,
}

pub struct Metrics {
    registry: Registry,
    deliveries: Family<DeliveryLabels, Counter>,
    effects: Counter,
    groups: Histogram,
    group_seconds: Histogram,
    commit_seconds: Histogram,
    splits: Counter,
    retries: Counter,
    requests: Family<RequestLabels, Counter>,
    request_seconds: Histogram,
    attempts: Family<AttemptLabels, Counter>,
    attempt_seconds: Histogram,
    unknowns: Gauge,
    swept: Counter,
    purged: Counter,
    purge_failures: Counter,
    purge_backlog: Gauge,
    queued: Gauge,
    alone: Gauge,
    connections_used: Gauge,
    connections_idle: Gauge,
    heartbeat_age: Gauge<f64, AtomicU64>,
}

/// Values that are read when asked for.
#[derive(Debug, Clone, Copy, Default)]
pub struct Readings {
    pub queued: usize,
    pub running_alone: usize,
    pub connections: (u32, u32),
    pub heartbeat_age: Duration,
}

impl Default for Metrics {
    fn default() -> Self {
        Self::new()
    }
}

impl Metrics {
    pub fn new() -> Self {
        let seconds = || {
            Histogram::new([
                0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 10.0,
            ])
        };
        let mut metrics = Self {
            registry: Registry::with_prefix("opledger"),
            deliveries: Family::default(),
            effects: Counter::default(),
            groups: Histogram::new([1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0]),
            group_seconds: seconds(),
            commit_seconds: seconds(),
            splits: Counter::default(),
            retries: Counter::default(),
            requests: Family::default(),
            request_seconds: seconds(),
            attempts: Family::default(),
            attempt_seconds: Histogram::new([
                0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0,
            ]),
            unknowns: Gauge::default(),
            swept: Counter::default(),
            purged: Counter::default(),
            purge_failures: Counter::default(),
            purge_backlog: Gauge::default(),
            queued: Gauge::default(),
            alone: Gauge::default(),
            connections_used: Gauge::default(),
            connections_idle: Gauge::default(),
            heartbeat_age: Gauge::default(),
        };
        metrics.register();
        metrics
    }

    fn register(&mut self) {
        let registry = &mut self.registry;
        let named = "Deliveries of operations by outcome (effect, refused, replay, accepted, in_progress, unknown, \
                     mismatch, expired, handler_broken, overtime, rejected_queue, unavailable, internal)";
        registry.register("deliveries", named, self.deliveries.clone());
        registry.register(
            "effects",
            "Operations that succeeded with this process's commit",
            self.effects.clone(),
        );
        registry.register("group_size", "Operations committed together", self.groups.clone());
        registry.register_with_unit(
            "group",
            "Time of a group's transaction",
            Unit::Seconds,
            self.group_seconds.clone(),
        );
        registry.register_with_unit(
            "commit",
            "Time of a group's commit",
            Unit::Seconds,
            self.commit_seconds.clone(),
        );
        registry.register(
            "group_splits",
            "Groups that were rolled back and run one by one",
            self.splits.clone(),
        );
        registry.register(
            "retries",
            "Transactions tried again after passing trouble",
            self.retries.clone(),
        );
        registry.register("http_requests", "Requests by route and status", self.requests.clone());
        let seconds = self.request_seconds.clone();
        registry.register_with_unit("http_request", "Time from request to answer", Unit::Seconds, seconds);
        registry.register(
            "attempts",
            "Attempts at downstreams by what they taught (answered, not_sent, unknown)",
            self.attempts.clone(),
        );
        let seconds = self.attempt_seconds.clone();
        registry.register_with_unit(
            "attempt",
            "Time from sending to the end of the answer",
            Unit::Seconds,
            seconds,
        );
        registry.register(
            "unknowns",
            "Operations whose outcome is unknown, of every tenant, counted by the latest sweep up to 10000 a tenant",
            self.unknowns.clone(),
        );
        registry.register("recovered", "Abandoned operations taken over", self.swept.clone());
        registry.register(
            "purged_receipts",
            "Receipts purged after their retention",
            self.purged.clone(),
        );
        registry.register("purge_failures", "Purges that failed", self.purge_failures.clone());
        registry.register(
            "purge_backlog",
            "Expired receipts not purged yet, counted up to 10000",
            self.purge_backlog.clone(),
        );
        registry.register("queued", "Deliveries waiting for a group", self.queued.clone());
        registry.register(
            "running_alone",
            "Operations that run outside groups or wait to",
            self.alone.clone(),
        );
        registry.register(
            "connections_used",
            "Database connections in use",
            self.connections_used.clone(),
        );
        registry.register(
            "connections_idle",
            "Database connections idle",
            self.connections_idle.clone(),
        );
        let age = self.heartbeat_age.clone();
        registry.register_with_unit(
            "heartbeat_age",
            "Time since the last heartbeat was written",
            Unit::Seconds,
            age,
        );
    }

    /// Counts a delivery by what it came to.
    pub fn delivered(&self, outcome: Result<&Outcome, &Refusal>) {
        let outcome = match outcome {
            Ok(Outcome::Settled { replayed: true, .. }) => "replay",
            Ok(Outcome::Settled { receipt, .. }) if receipt.status < 400 => "effect",
            Ok(Outcome::Settled { .. }) => "refused",
            Ok(Outcome::Accepted { .. }) => "accepted",
            Ok(Outcome::InProgress { .. }) => "in_progress",
            Ok(Outcome::Unknown { .. }) => "unknown",
            Ok(Outcome::Mismatch { .. }) => "mismatch",
            Ok(Outcome::Expired { .. }) => "expired",
            Ok(Outcome::NotStored { .. }) => "not_stored",
            Ok(Outcome::HandlerBroken { .. }) => "handler_broken",
            Err(Refusal::Busy { .. }) => "rejected_queue",
            Err(Refusal::Unavailable | Refusal::Stopping) => "unavailable",
            Err(Refusal::Overtime { .. }) => "overtime",
            Err(Refusal::Unreachable { .. } | Refusal::NoAnswer { .. }) => "unreachable",
            Err(Refusal::Unrecorded { .. }) => "unrecorded",
            Err(Refusal::Internal) => "internal",
        };
        self.deliveries.get_or_create(&DeliveryLabels { outcome }).inc();
    }

    /// Counts a delivery whose answer was passed on and is too large to be given again.
    pub fn passed_on(&self, status: u16) {
        let outcome = if status < 400 { "effect" } else { "refused" };
        self.deliveries.get_or_create(&DeliveryLabels { outcome }).inc();
    }

    /// Counts an effect that this process committed, whether or not anybody still waits for its answer.
    pub fn committed_effect(&self) {
        self.effects.inc();
    }

    /// Counts an attempt at a downstream.
    pub fn attempted(&self, downstream: &str, outcome: &'static str, took: Duration) {
        let downstream = downstream.to_owned();
        self.attempts
            .get_or_create(&AttemptLabels { downstream, outcome })
            .inc();
        self.attempt_seconds.observe(took.as_secs_f64());
    }

    /// Shows how many outcomes are unknown.
    pub fn unknowns(&self, count: u64) {
        self.unknowns.set(i64::try_from(count).unwrap_or(i64::MAX));
    }

    /// Counts a committed group.
    pub fn group(&self, members: usize, commit: Duration, whole: Duration) {
        // At most 64.
        self.groups
            .observe(f64::from(u32::try_from(members).unwrap_or(u32::MAX)));
        self.commit_seconds.observe(commit.as_secs_f64());
        self.group_seconds.observe(whole.as_secs_f64());
    }

    /// Counts a group that had to be split.
    pub fn split(&self) {
        self.splits.inc();
    }

    /// Counts a transaction that is tried again.
    pub fn retried(&self) {
        self.retries.inc();
    }

    /// Counts an answered request.
    pub fn answered(&self, route: &str, status: u16, took: Duration) {
        self.requests
            .get_or_create(&RequestLabels {
                route: route.to_owned(),
                status,
            })
            .inc();
        self.request_seconds.observe(took.as_secs_f64());
    }

    /// Counts operations that a sweep took over.
    pub fn recovered(&self, operations: u64) {
        self.swept.inc_by(operations);
    }

    /// Counts purged receipts and notes how many are left.
    pub fn purged(&self, receipts: u64, backlog: u64) {
        self.purged.inc_by(receipts);
        self.purge_backlog.set(i64::try_from(backlog).unwrap_or(i64::MAX));
    }

    /// Counts a failed purge.
    pub fn purge_failed(&self) {
        self.purge_failures.inc();
    }

    /// The metrics as OpenMetrics text.
    pub fn encode(&self, readings: Readings) -> String {
        let gauge = |value: usize| i64::try_from(value).unwrap_or(i64::MAX);
        self.queued.set(gauge(readings.queued));
        self.alone.set(gauge(readings.running_alone));
        self.connections_used.set(readings.connections.0.into());
        self.connections_idle.set(readings.connections.1.into());
        self.heartbeat_age.set(readings.heartbeat_age.as_secs_f64());
        let mut text = String::new();
        // Writing to a string does not fail.
        let _ = encode(&mut text, &self.registry);
        text
    }
}
