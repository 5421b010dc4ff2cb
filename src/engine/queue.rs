//! Where deliveries wait for a group: first in, first out within a tenant, tenants in turn, bounded as a whole.
//!
//! A tenant has one turn at a time. Two groups of one tenant that ran side by side would meet on the same business rows,
//! in whatever order their handlers lock them: they would wait for each other's commits, and now and then for each other.
//! So a group holds its tenant's turn while it claims, runs and stores, and passes it on just before it commits: the next
//! group works while this one's commit reaches the disk, and has nothing of it to wait for but that. What arrives
//! meanwhile makes the next group larger. A turn ends after [`LONGEST_TURN`] in any case: one slow handler must not keep its
//! tenant waiting.

use std::collections::{HashMap, VecDeque};
use std::sync::{Mutex, MutexGuard, PoisonError};

use std::time::Duration;

use tokio::sync::Notify;
use tokio::time::Instant;

use crate::ledger::tenant::Tenant;

/// How long a group may keep the next one of its tenant waiting.
const LONGEST_TURN: Duration = Duration::from_millis(100);

/// Most bytes of a group with more than one member: all of them are in memory at once, in one message to PostgreSQL, and
/// have one statement's time to be written.
const HEAVIEST_GROUP: usize = 8 << 20;

/// What may wait here.
pub trait Queued {
    fn tenant(&self) -> &Tenant;

    /// How large it is, as far as that differs: its bodies.
    fn bytes(&self) -> usize;
}

/// A bounded queue that gives out groups of one tenant each.
pub struct Queue<Member> {
    waiting: Mutex<Waiting<Member>>,
    arrived: Notify,
    line: tokio::sync::Mutex<()>,
    capacity: usize,
}

struct Waiting<Member> {
    members: HashMap<Tenant, VecDeque<Member>>,
    /// Tenants with members, in the order of their turns.
    turns: VecDeque<Tenant>,
    /// Tenants whose turn is held by a group: which turn it is, and when it ends at the latest.
    held: HashMap<Tenant, (u64, Instant)>,
    taken: u64,
    length: usize,
    closed: bool,
}

/// The queue takes no more; the member comes back.
pub enum Full<Member> {
    Capacity(Box<Member>),
    Closed(Box<Member>),
}

impl<Member: Queued> Queue<Member> {
    pub fn new(capacity: usize) -> Self {
        Self {
            waiting: Mutex::new(Waiting::empty()),
            arrived: Notify::new(),
            line: tokio::sync::Mutex::default(),
            capacity,
        }
    }

    /// Adds a new delivery at its tenant's end.
    pub fn push(&self, member: Member) -> Result<(), Full<Member>> {
        let mut waiting = self.lock();
        if waiting.closed {
            return Err(Full::Closed(Box::new(member)));
        }
        if waiting.length >= self.capacity {
            return Err(Full::Capacity(Box::new(member)));
        }
        waiting.insert(member, VecDeque::push_back);
        drop(waiting);
        self.arrived.notify_last();
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
        self.arrived.notify_last();
    }

    /// Waits until something waits here, though its tenant's turn may not have come yet. `false` once the queue is closed
    /// and empty.
    ///
    /// Whoever takes after that must be the only one who does: see [`line`](Self::line).
    pub async fn occupied(&self) -> bool {
        loop {
            let arrived = self.arrived.notified();
            {
                let waiting = self.lock();
                if waiting.length > 0 || waiting.closed {
                    return waiting.length > 0;
                }
            }
            arrived.await;
        }
    }

    /// The head of the line: where one taker at a time gets ready, so that what it has seen waiting is still there when it
    /// takes.
    pub async fn line(&self) -> tokio::sync::MutexGuard<'_, ()> {
        self.line.lock().await
    }

    /// Waits for work and takes up to `most` members of the tenant whose turn it is: whatever is there, at once, as
    /// long as it is not too much to be written together. `None` once the queue is closed and empty.
    pub async fn take(&self, most: usize) -> Option<(Vec<Member>, Turn<'_, Member>)> {
        loop {
            let arrived = self.arrived.notified();
            let until = {
                let mut waiting = self.lock();
                if let Some((tenant, number, group)) = waiting.group(most) {
                    if waiting.length > 0 {
                        self.arrived.notify_last();
                    }
                    let queue = self;
                    return Some((group, Turn { queue, tenant, number }));
                }
                if waiting.closed && waiting.length == 0 {
                    // Wake the next worker that waits, so that all of them see the end.
                    self.arrived.notify_last();
                    return None;
                }
                waiting.next_turn()
            };
            match until {
                // Whether it arrives or the turn is over: look again.
                Some(until) => drop(tokio::time::timeout_at(until, arrived).await),
                None => arrived.await,
            }
        }
    }

    /// Refuses new members from now on; what waits is still given out.
    pub fn close(&self) {
        self.lock().closed = true;
        self.arrived.notify_last();
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

    fn lock(&self) -> MutexGuard<'_, Waiting<Member>> {
        // No code below panics while it holds the lock half changed.
        self.waiting.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A tenant's turn; dropping it passes it on.
pub struct Turn<'a, Member: Queued> {
    queue: &'a Queue<Member>,
    tenant: Tenant,
    number: u64,
}

impl<Member: Queued> Drop for Turn<'_, Member> {
    fn drop(&mut self) {
        let mut waiting = self.queue.lock();
        // If it took too long, the turn is somebody else's by now.
        if waiting
            .held
            .get(&self.tenant)
            .is_some_and(|(number, _)| *number == self.number)
        {
            waiting.held.remove(&self.tenant);
        }
        let more = waiting.members.contains_key(&self.tenant);
        drop(waiting);
        if more {
            self.queue.arrived.notify_one();
        }
    }
}

impl<Member: Queued> Waiting<Member> {
    fn empty() -> Self {
        Self {
            members: HashMap::new(),
            turns: VecDeque::new(),
            held: HashMap::new(),
            taken: 0,
            length: 0,
            closed: false,
        }
    }

    fn insert(&mut self, member: Member, place: impl FnOnce(&mut VecDeque<Member>, Member)) {
        let tenant = member.tenant().clone();
        let members = self.members.entry(tenant.clone()).or_default();
        if members.is_empty() {
            self.turns.push_back(tenant);
        }
        place(members, member);
        self.length += 1;
    }

    fn group(&mut self, most: usize) -> Option<(Tenant, u64, Vec<Member>)> {
        let now = Instant::now();
        let free = |tenant: &Tenant| self.held.get(tenant).is_none_or(|(_, until)| *until <= now);
        let place = self.turns.iter().position(free)?;
        let tenant = self.turns.remove(place)?;
        let members = self.members.get_mut(&tenant)?;
        let count = together(members, most);
        let group: Vec<Member> = members.drain(..count).collect();
        if members.is_empty() {
            self.members.remove(&tenant);
        } else {
            self.turns.push_back(tenant.clone());
        }
        self.length -= group.len();
        self.taken += 1;
        self.held.insert(tenant.clone(), (self.taken, now + LONGEST_TURN));
        Some((tenant, self.taken, group))
    }

    /// When the first turn ends that somebody waits for.
    fn next_turn(&self) -> Option<Instant> {
        let ends = self.turns.iter().filter_map(|tenant| self.held.get(tenant));
        ends.map(|(_, until)| *until).min()
    }
}

/// How many of the first go into one group.
fn together<Member: Queued>(members: &VecDeque<Member>, most: usize) -> usize {
    let mut bytes = 0usize;
    let fits = |member: &&Member| {
        bytes = bytes.saturating_add(member.bytes());
        bytes <= HEAVIEST_GROUP
    };
    // What is too heavy for any group goes alone.
    members.iter().take(most).take_while(fits).count().max(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::engine::apply::{Member, test_member};

    fn ids(group: Option<(Vec<Member>, Turn<'_, Member>)>) -> Vec<String> {
        group
            .map(|(members, _)| members)
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
    async fn what_is_heavy_together_goes_apart_and_keeps_its_order() {
        struct Weight(Tenant, usize);
        impl Queued for Weight {
            fn tenant(&self) -> &Tenant {
                &self.0
            }

            fn bytes(&self) -> usize {
                self.1
            }
        }
        let queue = Queue::new(10);
        let half = HEAVIEST_GROUP / 2;
        for bytes in [half, half, 1, 10 * HEAVIEST_GROUP, 0, 1] {
            assert!(queue.push(Weight("a".parse().unwrap(), bytes)).is_ok());
        }
        for expected in [vec![half, half], vec![1], vec![10 * HEAVIEST_GROUP], vec![0, 1]] {
            let (group, _turn) = queue.take(64).await.unwrap();
            assert_eq!(group.iter().map(Queued::bytes).collect::<Vec<_>>(), expected);
        }
    }

    #[tokio::test]
    async fn a_tenant_has_one_turn_at_a_time_and_others_do_not_wait_for_it() {
        let queue = Queue::new(10);
        for (tenant, id) in [("a", "1"), ("a", "2"), ("b", "3")] {
            assert!(queue.push(test_member(tenant, id)).is_ok());
        }
        let first = queue.take(1).await.unwrap();
        assert_eq!(first.0[0].id().as_str(), "1");
        assert_eq!(ids(queue.take(1).await), ["3"]);
        let mut second = Box::pin(queue.take(1));
        assert!(
            futures_now(&mut second).await.is_none(),
            "the first group still holds the turn"
        );
        drop(first.1);
        assert_eq!(ids(second.await), ["2"]);
    }

    #[tokio::test]
    async fn a_turn_that_takes_too_long_is_passed_over_its_head() {
        let queue = Queue::new(10);
        for id in ["1", "2", "3"] {
            assert!(queue.push(test_member("a", id)).is_ok());
        }
        let slow = queue.take(1).await.unwrap();
        let next = queue.take(1).await.unwrap();
        assert_eq!(next.0[0].id().as_str(), "2");
        // The slow one's end does not end its successor's turn.
        drop(slow.1);
        let mut third = Box::pin(queue.take(1));
        assert!(futures_now(&mut third).await.is_none());
        drop(next.1);
        assert_eq!(ids(third.await), ["3"]);
    }

    /// What a future gives if it is ready now.
    async fn futures_now<T>(future: &mut (impl Future<Output = T> + Unpin)) -> Option<T> {
        tokio::time::timeout(std::time::Duration::from_millis(20), future)
            .await
            .ok()
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
