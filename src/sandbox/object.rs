//! What can be made: charges, mails, bookings, reversals; and the bodies that ask for them.

use std::time::Instant;

use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};

use super::route::{Capability, Resource};

/// Longest reference, in bytes: an operation id and a word or two.
const LONGEST_REFERENCE: usize = 512;

/// Serialised as it is shown.
#[derive(Debug, Clone, Serialize)]
pub struct Object {
    pub id: String,
    pub object: &'static str,
    #[serde(flatten)]
    pub content: Content,
    #[serde(rename = "ref")]
    pub reference: String,
    pub created: String,
    #[serde(skip)]
    pub capability: Capability,
    #[serde(skip)]
    pub version: u64,
    #[serde(skip)]
    pub made_at: Instant,
}

impl Object {
    pub fn path(&self) -> String {
        let (capability, resource) = (self.capability.name(), self.content.resource().name());
        format!("/{capability}/{resource}/{}", self.id)
    }

    pub fn etag(&self) -> String {
        format!("\"{}\"", self.version)
    }
}

#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(untagged)]
pub enum Content {
    Charge(Charge),
    Mail(Mail),
    Booking(Booking),
    Reversal { charge: String },
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Charge {
    amount: u64,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Mail {
    to: String,
    subject: String,
}

#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Booking {
    room: String,
}

impl Content {
    pub fn resource(&self) -> Resource {
        match self {
            Self::Charge(_) => Resource::Charges,
            Self::Mail(_) => Resource::Mails,
            Self::Booking(_) => Resource::Bookings,
            Self::Reversal { .. } => Resource::Reversals,
        }
    }

    pub fn name(&self) -> &'static str {
        match self {
            Self::Charge(_) => "charge",
            Self::Mail(_) => "mail",
            Self::Booking(_) => "booking",
            Self::Reversal { .. } => "reversal",
        }
    }

    pub fn id_prefix(&self) -> &'static str {
        match self {
            Self::Charge(_) => "ch",
            Self::Mail(_) => "ml",
            Self::Booking(_) => "bk",
            Self::Reversal { .. } => "rv",
        }
    }
}

/// The members of a request's body, its reference apart.
#[derive(Debug, Clone, PartialEq)]
pub struct Asked {
    pub reference: Option<String>,
    members: Map<String, Value>,
}

/// Why a body asks for nothing that can be made; said to its sender.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum Malformed {
    #[error("the body is no JSON object")]
    NoObject,
    #[error("\"ref\" is missing, or no text of 1 to {LONGEST_REFERENCE} bytes")]
    Reference,
    #[error("\"ref\" in the body is another than in the path")]
    OtherReference,
    #[error("{0}")]
    Members(String),
}

impl Asked {
    pub fn parse(body: &[u8]) -> Result<Self, Malformed> {
        let Ok(Value::Object(mut members)) = serde_json::from_slice(body) else {
            return Err(Malformed::NoObject);
        };
        let reference = match members.remove("ref") {
            None => None,
            Some(Value::String(text)) if is_reference(&text) => Some(text),
            Some(_) => return Err(Malformed::Reference),
        };
        Ok(Self { reference, members })
    }

    pub fn content(self, resource: Resource) -> Result<Content, Malformed> {
        let members = Value::Object(self.members);
        let content = match resource {
            Resource::Charges => serde_json::from_value(members).map(Content::Charge),
            Resource::Mails => serde_json::from_value(members).map(Content::Mail),
            Resource::Bookings => serde_json::from_value(members).map(Content::Booking),
            // Names its charge in the path.
            Resource::Reversals => return Err(Malformed::NoObject),
        };
        content.map_err(|error| Malformed::Members(error.to_string()))
    }

    /// The body of a reversal, which has nothing but its reference.
    pub fn reversal(self, charge: String) -> Result<Content, Malformed> {
        match self.members.keys().next() {
            None => Ok(Content::Reversal { charge }),
            Some(unknown) => Err(Malformed::Members(format!("unknown field `{unknown}`, expected `ref`"))),
        }
    }
}

pub fn is_reference(text: &str) -> bool {
    (1..=LONGEST_REFERENCE).contains(&text.len())
}
