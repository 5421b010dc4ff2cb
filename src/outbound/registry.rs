//! Everything that one configuration declares of the way out.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::Arc;
use std::time::Duration;

use super::downstream::{Call, Downstream};

/// Every downstream of one configuration.
#[derive(Debug, Clone, Default)]
pub struct Downstreams(BTreeMap<Arc<str>, Arc<Downstream>>);

/// A kind of operation whose effect is one call to a downstream.
#[derive(Clone)]
pub struct DownstreamKind {
    pub name: Arc<str>,
    pub downstream: Arc<Downstream>,
    /// Filled in from the operation's payload. The route, and with it recovery, is that of the path it fills in.
    pub call: Call,
    /// Compiled JSON Schema of the payload.
    pub schema: Option<Arc<jsonschema::Validator>>,
    /// How long a receipt is kept.
    pub retention: Duration,
}

/// Every kind with a downstream of one configuration.
#[derive(Debug, Clone, Default)]
pub struct DownstreamKinds(BTreeMap<Arc<str>, Arc<DownstreamKind>>);

impl fmt::Debug for DownstreamKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DownstreamKind")
            .field("name", &self.name)
            .field("downstream", &self.downstream.name)
            .field("call", &self.call)
            .finish_non_exhaustive()
    }
}

impl Downstreams {
    pub fn get(&self, name: &str) -> Option<&Arc<Downstream>> {
        self.0.get(name)
    }

    /// All of them, by name.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<Downstream>> {
        self.0.values()
    }
}

impl FromIterator<Downstream> for Downstreams {
    fn from_iter<Iter: IntoIterator<Item = Downstream>>(downstreams: Iter) -> Self {
        let named = |downstream: Downstream| (downstream.name.clone(), Arc::new(downstream));
        Self(downstreams.into_iter().map(named).collect())
    }
}

impl DownstreamKinds {
    pub fn get(&self, name: &str) -> Option<&Arc<DownstreamKind>> {
        self.0.get(name)
    }

    /// All of them, by name.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<DownstreamKind>> {
        self.0.values()
    }
}

impl FromIterator<DownstreamKind> for DownstreamKinds {
    fn from_iter<Iter: IntoIterator<Item = DownstreamKind>>(kinds: Iter) -> Self {
        let named = |kind: DownstreamKind| (kind.name.clone(), Arc::new(kind));
        Self(kinds.into_iter().map(named).collect())
    }
}
