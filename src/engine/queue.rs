//! Where deliveries wait for a group: first in, first out within a tenant, tenants in turn, bounded as a whole.

use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};

use tokio::sync::Notify;

use super::apply::Member;
use crate::ledger::tenant::Tenant;

/// A bounded queue that gives out groups of one tenant each.
pub struct Queue {
    waiting: Mutex<Waiting>,
    arrived: Notify,
    capacity: usize,
}

#[derive(Default)]
struct Waiting {
    members: HashMap<Tenant, VecDeque<Member>>,
    /// Tenants with members, in the order of their turns.
    turns: VecDeque<Tenant>,
    length: usize,
    closed: bool,
}

/// The queue takes no more; the member comes back.
pub enum Full {
    Capacity(Box<Member>),
    Closed(Box<Member>),
}

impl Queue {
    pub fn new(capacity: usize) -> Self {
        Self {
            waiting: Mutex::default(),
            arrived: Notify::new(),
            capacity,
        }
    }

    /// Adds a new delivery at its tenant's end.
    pub fn push(&self, member: Member) -> Result<(), Full> {
        let mut waiting = self.lock();
        if waiting.closed {
            return Err(Full::Closed(Box::new(member)));
        }
        if waiting.length >= self.capacity {
            return Err(Full::Capacity(Box::new(member)));
        }
        waiting.insert(member, VecDeque::push_back);
        drop(waiting);
        self.arrived.notify_one();
        Ok(())
    }

    /// Puts members back at the front: they have been accepted already, so neither capacity nor closing refuses them.
    pub fn put_back(&self, members: Vec<Member>) {
        if members.is_empty() {
            return;
        }
        let mut waiting = self.lock();
        for member in members.into_iter().rev() {
            waiting.insert(member, VecDeque::push_front);
        }
        drop(waiting);
        self.arrived.notify_one();
    }

    /// Waits for work and takes up to `most` members of the tenant whose turn it is: whatever is there, at once.
    /// `None` once the queue is closed and empty.
    pub async fn take(&self, most: usize) -> Option<Vec<Member>> {
        loop {
            let arrived = self.arrived.notified();
            {
                let mut waiting = self.lock();
                if let Some(group) = waiting.group(most) {
                    if waiting.length > 0 {
                        self.arrived.notify_one();
                    }
                    return Some(group);
                }
                if waiting.closed {
                    // Wake the next worker that waits, so that all of them see the end.
                    self.arrived.notify_one();
                    return None;
                }
            }
            arrived.await;
        }
    }

    /// Refuses new members from now on; what waits is still given out.
    pub fn close(&self) {
        self.lock().closed = true;
        self.arrived.notify_one();
    }

    /// Whether new members are refused.
    pub fn is_closed(&self) -> bool {
        self.lock().closed
    }

    /// How many wait.
    pub fn len(&self) -> usize {
        self.lock().length
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    fn lock(&self) -> MutexGuard<'_, Waiting> {
        // No code below panics while it holds the lock half changed.
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Waiting {
    fn insert(&mut self, member: Member, place: impl FnOnce(&mut VecDeque<Member>, Member)) {
        let tenant = member.tenant().clone();
        let members = self.members.entry(tenant.clone()).or_default();
        if members.is_empty() {
            self.turns.push_back(tenant);
        }
        place(members, member);
        self.length += 1;
    }

    fn group(&mut self, most: usize) -> Option<Vec<Member>> {
        let tenant = self.turns.pop_front()?;
        let members = self.members.get_mut(&tenant)?;
        let group: Vec<Member> = members.drain(..most.min(members.len())).collect();
        if members.is_empty() {
            self.members.remove(&tenant);
        } else {
            self.turns.push_back(tenant);
        }
        self.length -= group.len();
        Some(group)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::apply::test_member;

    fn ids(group: Option<Vec<Member>>) -> Vec<String> {
        group
            .unwrap_or_default()
            .iter()
            .map(|member| member.id().as_str().to_owned())
            .collect()
    }

    #[tokio::test]
    async fn tenants_take_turns_and_each_keeps_its_order() {
        let queue = Queue::new(10);
        for (tenant, id) in [("a", "1"), ("a", "2"), ("a", "3"), ("b", "4")] {
            assert!(queue.push(test_member(tenant, id)).is_ok());
        }
        assert_eq!(ids(queue.take(2).await), ["1", "2"]);
        assert_eq!(ids(queue.take(2).await), ["4"]);
        assert_eq!(ids(queue.take(2).await), ["3"]);
        assert!(queue.is_empty());
    }

    #[tokio::test]
    async fn a_full_queue_refuses_and_a_closed_one_empties() {
        let queue = Queue::new(1);
        assert!(queue.push(test_member("a", "1")).is_ok());
        assert!(matches!(queue.push(test_member("a", "2")), Err(Full::Capacity(_))));
        queue.close();
        assert!(matches!(queue.push(test_member("a", "3")), Err(Full::Closed(_))));
        queue.put_back(vec![test_member("a", "0")]);
        assert_eq!(ids(queue.take(9).await), ["0", "1"]);
        assert!(queue.take(9).await.is_none());
        assert!(queue.take(9).await.is_none());
    }
}
