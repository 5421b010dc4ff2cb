//! What was done: objects, and effects counted by reference. One lock around all of it, so that an effect, its count and
//! its key are there together.

use std::collections::{HashMap, VecDeque};
use std::time::Instant;

use serde::Serialize;
use serde_json::{Value, json};
use time::format_description::well_known::Rfc3339;
use tokio::sync::oneshot;

use super::Settings;
use super::keys::Keys;
use super::object::{Content, Object};
use super::received::Received;
use super::route::{Capability, Resource};

/// How many effects and objects are listed.
const MOST_LISTED: usize = 100;

pub struct Memory {
    pub settings: Settings,
    pub keys: Keys,
    pub received: Received,
    /// In the order in which they were made.
    objects: Vec<Object>,
    by_id: HashMap<String, usize>,
    by_reference: HashMap<String, Vec<usize>>,
    effects: HashMap<String, u64>,
    totals: HashMap<Capability, u64>,
    latest: VecDeque<Effect>,
    /// Requests that wait until they are released, by reference.
    held: HashMap<String, Vec<oneshot::Sender<()>>>,
}

#[derive(Debug, Clone, Serialize)]
struct Effect {
    capability: &'static str,
    object: &'static str,
    id: String,
    #[serde(rename = "ref")]
    reference: String,
    at: String,
}

impl Memory {
    pub fn new(settings: Settings) -> Self {
        Self {
            settings,
            keys: Keys::new(settings.key_memory, settings.max_records),
            received: Received::new(settings.max_records),
            objects: Vec::new(),
            by_id: HashMap::new(),
            by_reference: HashMap::new(),
            effects: HashMap::new(),
            totals: HashMap::new(),
            latest: VecDeque::new(),
            held: HashMap::new(),
        }
    }

    /// Makes an object: one effect. None if there is no room for another.
    pub fn make(&mut self, capability: Capability, reference: &str, content: Content) -> Option<&Object> {
        if self.objects.len() >= self.settings.max_records {
            return None;
        }
        let object = Object {
            id: format!("{}_{}", content.id_prefix(), uuid::Uuid::now_v7().simple()),
            object: content.name(),
            content,
            reference: reference.to_owned(),
            created: now(),
            capability,
            version: 1,
            made_at: Instant::now(),
        };
        let at = self.objects.len();
        self.by_id.insert(object.id.clone(), at);
        self.by_reference.entry(reference.to_owned()).or_default().push(at);
        self.objects.push(object);
        self.count_effect(at);
        self.objects.last()
    }

    /// Changes an object: one effect.
    pub fn change(&mut self, id: &str, content: Content) -> Option<&Object> {
        let at = *self.by_id.get(id)?;
        self.objects[at].content = content;
        self.objects[at].version += 1;
        self.count_effect(at);
        self.objects.get(at)
    }

    fn count_effect(&mut self, at: usize) {
        let object = &self.objects[at];
        *self.effects.entry(object.reference.clone()).or_default() += 1;
        *self.totals.entry(object.capability).or_default() += 1;
        self.latest.push_back(Effect {
            capability: object.capability.name(),
            object: object.object,
            id: object.id.clone(),
            reference: object.reference.clone(),
            at: now(),
        });
        if self.latest.len() > MOST_LISTED {
            self.latest.pop_front();
        }
    }

    pub fn by_id(&self, capability: Capability, resource: Resource, id: &str) -> Option<&Object> {
        let object = &self.objects[*self.by_id.get(id)?];
        (object.capability == capability && object.content.resource() == resource).then_some(object)
    }

    /// The first that was made under this reference.
    pub fn by_reference(&self, capability: Capability, resource: Resource, reference: &str) -> Option<&Object> {
        self.of_reference(reference)
            .find(|object| object.capability == capability && object.content.resource() == resource)
    }

    /// The latest, oldest first; only what look-ups see already.
    pub fn list(&self, capability: Capability, resource: Resource, reference: Option<&str>) -> Vec<&Object> {
        let hidden = match capability {
            Capability::Lookup => self.settings.lookup_delay,
            Capability::Key | Capability::Conditional | Capability::None => std::time::Duration::ZERO,
        };
        let candidates: Box<dyn DoubleEndedIterator<Item = &Object>> = match reference {
            Some(reference) => Box::new(self.of_reference(reference)),
            None => Box::new(self.objects.iter()),
        };
        let mut listed: Vec<&Object> = candidates
            .rev()
            .filter(|object| object.capability == capability && object.content.resource() == resource)
            .filter(|object| object.made_at.elapsed() >= hidden)
            .take(MOST_LISTED)
            .collect();
        listed.reverse();
        listed
    }

    fn of_reference(&self, reference: &str) -> impl DoubleEndedIterator<Item = &Object> {
        self.by_reference
            .get(reference)
            .into_iter()
            .flatten()
            .map(|at| &self.objects[*at])
    }

    pub fn effects_of(&self, reference: &str) -> u64 {
        self.effects.get(reference).copied().unwrap_or_default()
    }

    pub fn all_effects(&self) -> Value {
        let totals: serde_json::Map<String, Value> = Capability::ALL
            .into_iter()
            .map(|capability| {
                let count = self.totals.get(&capability).copied().unwrap_or_default();
                (capability.name().to_owned(), count.into())
            })
            .collect();
        json!({"count": self.totals.values().sum::<u64>(), "totals": totals, "last": self.latest})
    }

    /// Whoever awaits this goes on when the reference is released.
    pub fn hold(&mut self, reference: &str) -> oneshot::Receiver<()> {
        let (sender, receiver) = oneshot::channel();
        let held = self.held.entry(reference.to_owned()).or_default();
        held.retain(|sender| !sender.is_closed());
        held.push(sender);
        receiver
    }

    /// How many requests went on.
    pub fn release(&mut self, reference: &str) -> usize {
        let held = self.held.remove(reference).unwrap_or_default();
        held.into_iter().filter_map(|sender| sender.send(()).ok()).count()
    }
}

#[expect(
    clippy::disallowed_methods,
    reason = "a downstream has a clock of its own, and nothing is decided by it"
)]
fn now() -> String {
    // A year of four digits can always be written.
    time::OffsetDateTime::now_utc().format(&Rfc3339).unwrap_or_default()
}
