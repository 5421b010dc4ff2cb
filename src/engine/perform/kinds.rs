//! Kinds that a downstream performs: callers submit a typed payload, and the request is put together from it.

use std::collections::HashMap;
use std::sync::Arc;
use std::time::Duration;

use super::resolve::call_request;
use crate::ledger::canonical::Node;
use crate::ledger::forward::{self, Request};
use crate::ledger::kind::{self, SchemaViolation};
use crate::ledger::operation_id::OperationId;
use crate::ledger::tenant::Tenant;
use crate::outbound::downstream::{Call, Downstream};
use crate::outbound::template::Values;

/// One registered type of operation with a downstream for its handler.
pub struct DownstreamKind {
    pub name: Arc<str>,
    pub downstream: Arc<str>,
    pub call: Call,
    /// Compiled JSON Schema of the payload.
    pub schema: Option<jsonschema::Validator>,
    /// How long a receipt is kept.
    pub retention: Duration,
}

impl std::fmt::Debug for DownstreamKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("DownstreamKind")
            .field("name", &self.name)
            .field("downstream", &self.downstream)
            .finish_non_exhaustive()
    }
}

impl DownstreamKind {
    /// Checks a payload against the kind's schema; the first violation is reported.
    pub fn validate(&self, payload: &Node<'_>) -> Result<(), SchemaViolation> {
        kind::validate(self.schema.as_ref(), payload)
    }

    /// The request of an operation, or why the payload does not give one.
    pub fn request(
        &self,
        downstream: &Downstream,
        tenant: &Tenant,
        id: &OperationId,
        canonical: &str,
    ) -> Result<Request, String> {
        let payload = serde_json::from_str(canonical).map_err(|error| error.to_string())?;
        let key = forward::downstream_key(tenant, id);
        let values = Values {
            operation_id: id.as_str(),
            key: &key,
            payload: &payload,
        };
        call_request(downstream, &self.call, &values)
    }
}

/// Every such kind of one configuration.
#[derive(Debug, Default)]
pub struct DownstreamKinds(HashMap<Arc<str>, Arc<DownstreamKind>>);

impl DownstreamKinds {
    pub fn get(&self, name: &str) -> Option<&Arc<DownstreamKind>> {
        self.0.get(name)
    }

    /// All of them, by name.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<DownstreamKind>> {
        let mut kinds: Vec<_> = self.0.values().collect();
        kinds.sort_by(|left, right| left.name.cmp(&right.name));
        kinds.into_iter()
    }
}

impl FromIterator<DownstreamKind> for DownstreamKinds {
    fn from_iter<Iter: IntoIterator<Item = DownstreamKind>>(kinds: Iter) -> Self {
        Self(kinds.into_iter().map(|kind| (kind.name.clone(), Arc::new(kind))).collect())
    }
}
