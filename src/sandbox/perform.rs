//! What each capability does with a request: the whole difference between the four prefixes, keys apart.

use http::header::{ETAG, IF_MATCH, IF_NONE_MATCH, LOCATION};
use http::{HeaderMap, StatusCode};
use serde_json::{Value, json};

use super::memory::Memory;
use super::object::{Asked, Content, Malformed, Object, is_reference};
use super::reply::Reply;
use super::route::{Call, Capability, Resource};

/// A well-formed wish to change something.
#[derive(Debug)]
pub enum Intent {
    Create {
        reference: String,
        content: Content,
    },
    Put {
        reference: String,
        content: Content,
        conditions: Conditions,
    },
}

/// What must hold for a `PUT`.
#[derive(Debug, Default)]
pub struct Conditions {
    is_new: bool,
    version: Option<String>,
}

impl Conditions {
    fn read(headers: &HeaderMap) -> Self {
        let text = |name| headers.get(name).and_then(|value| value.to_str().ok()).map(str::trim);
        Self {
            is_new: text(IF_NONE_MATCH) == Some("*"),
            version: text(IF_MATCH).map(str::to_owned),
        }
    }

    fn are_none(&self) -> bool {
        !self.is_new && self.version.is_none()
    }

    fn hold_for(&self, existing: Option<&Object>) -> bool {
        let version_holds = match (self.version.as_deref(), existing) {
            (None, _) => true,
            (Some(_), None) => false,
            (Some(expected), Some(object)) => expected == "*" || expected == object.etag(),
        };
        version_holds && !(self.is_new && existing.is_some())
    }
}

impl Intent {
    /// None if the call only reads.
    pub fn read(call: &Call, body: Result<Asked, Malformed>, headers: &HeaderMap) -> Result<Option<Self>, Malformed> {
        let required = |asked: &Asked| asked.reference.clone().ok_or(Malformed::Reference);
        let intent = match call {
            Call::Read { .. } | Call::List { .. } => return Ok(None),
            Call::Create(resource) => {
                let asked = body?;
                Self::Create {
                    reference: required(&asked)?,
                    content: asked.content(*resource)?,
                }
            }
            Call::Reverse { charge } => {
                let asked = body?;
                Self::Create {
                    reference: required(&asked)?,
                    content: asked.reversal(charge.clone())?,
                }
            }
            Call::Put { resource, reference } => {
                let asked = body?;
                if !is_reference(reference) || asked.reference.as_ref().is_some_and(|other| other != reference) {
                    return Err(Malformed::OtherReference);
                }
                Self::Put {
                    reference: reference.clone(),
                    content: asked.content(*resource)?,
                    conditions: Conditions::read(headers),
                }
            }
        };
        Ok(Some(intent))
    }
}

impl Memory {
    pub fn perform(&mut self, capability: Capability, intent: Intent) -> Reply {
        match intent {
            Intent::Create { reference, content } => self.create(capability, &reference, content),
            Intent::Put {
                reference,
                content,
                conditions,
            } => self.put(capability, &reference, content, &conditions),
        }
    }

    fn create(&mut self, capability: Capability, reference: &str, mut content: Content) -> Reply {
        if let Content::Reversal { charge } = &mut content {
            match self.named(capability, Resource::Charges, charge) {
                Some(object) => charge.clone_from(&object.id),
                None => return not_found(),
            }
        }
        if capability == Capability::Conditional
            && let Some(existing) = self.by_reference(capability, content.resource(), reference)
        {
            return already(existing);
        }
        self.make(capability, reference, content).map_or_else(Reply::full, made)
    }

    fn put(&mut self, capability: Capability, reference: &str, content: Content, conditions: &Conditions) -> Reply {
        if capability == Capability::Conditional && conditions.are_none() {
            let message = "a PUT here needs If-None-Match: * or If-Match with the version that it expects";
            return Reply::refused(StatusCode::PRECONDITION_REQUIRED, "condition-missing", message);
        }
        let existing = self.by_reference(capability, content.resource(), reference);
        if !conditions.hold_for(existing) {
            let message = "it is not, or no longer, as the request expects it";
            let refused = Reply::refused(StatusCode::PRECONDITION_FAILED, "condition-failed", message);
            return match existing {
                Some(object) => refused.with(ETAG, &object.etag()),
                None => refused,
            };
        }
        match existing.map(|object| object.id.clone()) {
            Some(id) => self.change(&id, content).map_or_else(not_found, shown),
            None => self.make(capability, reference, content).map_or_else(Reply::full, made),
        }
    }

    pub fn read(&self, capability: Capability, call: &Call) -> Reply {
        match call {
            Call::Read { resource, name } => self.named(capability, *resource, name).map_or_else(not_found, shown),
            Call::List { resource, reference } => {
                let listed = self.list(capability, *resource, reference.as_deref());
                Reply::json(StatusCode::OK, &json!({"data": listed}))
            }
            Call::Create(_) | Call::Put { .. } | Call::Reverse { .. } => not_found(),
        }
    }

    /// By its id; under `/conditional`, where a reference is a name, by that as well.
    fn named(&self, capability: Capability, resource: Resource, name: &str) -> Option<&Object> {
        let by_id = self.by_id(capability, resource, name);
        match capability {
            Capability::Conditional => by_id.or_else(|| self.by_reference(capability, resource, name)),
            Capability::Key | Capability::Lookup | Capability::None => by_id,
        }
    }
}

fn made(object: &Object) -> Reply {
    Reply::json(StatusCode::CREATED, object)
        .with(LOCATION, &object.path())
        .with(ETAG, &object.etag())
}

fn shown(object: &Object) -> Reply {
    Reply::json(StatusCode::OK, object).with(ETAG, &object.etag())
}

fn already(existing: &Object) -> Reply {
    let body: Value = json!({
        "error": {"code": "exists", "message": "something with this ref exists"},
        "id": existing.id,
        "existing": existing,
    });
    Reply::json(StatusCode::CONFLICT, &body)
        .with(LOCATION, &existing.path())
        .with(ETAG, &existing.etag())
}

fn not_found() -> Reply {
    Reply::refused(StatusCode::NOT_FOUND, "not-found", "there is no such thing here")
}
