//! Operations at which something is being done in this process that must not be done twice at a time, and those of which
//! something may still come.

use std::collections::HashSet;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use crate::ledger::operation_id::OperationId;
use crate::ledger::tenant::Tenant;

#[derive(Debug, Default)]
pub struct Places(Mutex<HashSet<(Tenant, OperationId)>>);

/// Left when it is dropped.
pub struct Place<'a> {
    of: &'a Places,
    key: (Tenant, OperationId),
}

impl Places {
    /// `None` if somebody is there.
    pub fn enter(&self, tenant: &Tenant, id: &OperationId) -> Option<Place<'_>> {
        let key = (tenant.clone(), id.clone());
        let entered = self
            .0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .insert(key.clone());
        // Not `then_some`: a place that is made and not given away is left at once, and it is somebody else's.
        entered.then(|| Place { of: self, key })
    }

    /// Waits until it is free. Whoever is there stays for one look at the database.
    pub async fn entered(&self, tenant: &Tenant, id: &OperationId) -> Place<'_> {
        loop {
            if let Some(place) = self.enter(tenant, id) {
                return place;
            }
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    }
}

impl Drop for Place<'_> {
    fn drop(&mut self) {
        self.of
            .0
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .remove(&self.key);
    }
}

/// Operations of which a claim may still arrive that nobody waits for.
#[derive(Debug, Default)]
pub struct Doubts(Mutex<HashSet<(Tenant, OperationId)>>);

impl Doubts {
    pub fn begin(&self, tenant: &Tenant, id: &OperationId) {
        self.lock().insert((tenant.clone(), id.clone()));
    }

    /// Somebody has claimed it: a claim that arrives now finds the id taken.
    pub fn end(&self, tenant: &Tenant, id: &OperationId) {
        let mut doubts = self.lock();
        if !doubts.is_empty() {
            doubts.remove(&(tenant.clone(), id.clone()));
        }
    }

    pub fn stands(&self, tenant: &Tenant, id: &OperationId) -> bool {
        self.lock().contains(&(tenant.clone(), id.clone()))
    }

    fn lock(&self) -> MutexGuard<'_, HashSet<(Tenant, OperationId)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whoever_finds_a_place_taken_does_not_free_it() {
        let places = Places::default();
        let (tenant, id) = ("a".parse().unwrap(), OperationId::parse("k").unwrap());
        let place = places.enter(&tenant, &id);
        assert!(place.is_some());
        assert!(places.enter(&tenant, &id).is_none());
        assert!(places.enter(&tenant, &id).is_none());
        drop(place);
        assert!(places.enter(&tenant, &id).is_some());
    }
}
