//! JSON as the ledger reads and compares it: RFC 8259 text under I-JSON (RFC 7493), written back in the one canonical
//! spelling of RFC 8785 (JCS).
//!
//! Two texts are the same payload exactly when their canonical bytes are the same. So whatever could be read in two ways
//! is refused here, before an operation is claimed: repeated members, lone surrogates, NUL, and numbers that a double
//! does not give back. Everything here is pure, and takes time in proportion to the text (objects: n log n).
//!
//! Left to others: how long a text may be, what its members mean, and how a refusal becomes an answer.

mod number;
mod parse;
mod pointer;
#[cfg(test)]
mod properties;
mod scalar;
mod write;

use std::borrow::Cow;

/// How deep [`parse`] goes at most, whatever limit it is given: reading, writing and dropping a node call themselves once
/// a level, and the stack of a worker thread is finite.
pub const DEEPEST: usize = 512;

/// One JSON value, together with the text it was read from.
#[derive(Clone, Debug)]
pub struct Node<'a> {
    raw: &'a str,
    value: Value<'a>,
}

/// What a node is. Members and items stand in the order in which they were sent.
#[derive(Clone, Debug)]
pub enum Value<'a> {
    Null,
    Bool(bool),
    /// The literal as it was sent. A double gives back exactly its decimal value.
    Number(&'a str),
    /// Without its escapes.
    String(Cow<'a, str>),
    Array(Vec<Node<'a>>),
    /// Names are without their escapes, and no two are equal.
    Object(Vec<(Cow<'a, str>, Node<'a>)>),
}

/// Why a text is not accepted, and where.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
#[error("{}{reason}", pointer::prefix(.pointer))]
pub struct Invalid {
    /// RFC 6901: the value at which reading stopped, or the member that is there twice. Long names and long pointers are
    /// cut and end in `…`, so that an answer never carries much of what was sent.
    pub pointer: String,
    pub reason: Reason,
}

/// Bytes are counted from 0, from the start of the text.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum Reason {
    #[error("the text is not UTF-8 from byte {at} on")]
    NotUtf8 { at: usize },
    #[error("the text begins with a byte order mark; send it without one")]
    ByteOrderMark,
    #[error("not JSON: expected {expected} at byte {at}")]
    Syntax { at: usize, expected: &'static str },
    #[error("not JSON: the text ends where {expected} should be")]
    Unfinished { expected: &'static str },
    #[error("the text goes on after its value, at byte {at}; send one value")]
    Trailing { at: usize },
    #[error("the member is there twice, so which value counts is unknown; send it once")]
    DuplicateMember,
    #[error("half of a surrogate pair at byte {at}: it is not a character")]
    LoneSurrogate { at: usize },
    #[error("a NUL character at byte {at}: it cannot be stored")]
    Nul { at: usize },
    /// `literal` is cut; `reads` is `None` where the literal is too long to say.
    #[error(
        "the number {literal} is not exact: a double reads it as {}; send it as a string",
        .reads.as_deref().unwrap_or("another number")
    )]
    InexactNumber { literal: String, reads: Option<String> },
    #[error("arrays and objects are nested more than {limit} deep")]
    TooDeep { limit: usize },
}

/// Reads one JSON value, blanks around it allowed. A scalar has depth 0 and `[]` depth 1; more than `max_depth` (or
/// [`DEEPEST`]) is refused.
pub fn parse(text: &[u8], max_depth: usize) -> Result<Node<'_>, Invalid> {
    parse::document(text, max_depth.min(DEEPEST))
}

impl<'a> Node<'a> {
    /// The value's text exactly as it was sent, without the blanks around it. For keeping, not for PostgreSQL's `jsonb`,
    /// which refuses some spellings of numbers that are accepted here (`0e99999999999`): it takes the canonical text.
    pub fn raw(&self) -> &'a str {
        self.raw
    }

    pub fn value(&self) -> &Value<'a> {
        &self.value
    }

    /// The member of that name; `None` if there is none, or if this is not an object.
    pub fn get(&self, name: &str) -> Option<&Node<'a>> {
        match &self.value {
            Value::Object(members) => members.iter().find(|member| member.0 == name).map(|member| &member.1),
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Array(_) => None,
        }
    }

    /// The one spelling of RFC 8785.
    pub fn canonical(&self) -> Vec<u8> {
        // Canonical text is rarely longer than what was sent: only exponents written out make it grow.
        let mut out = Vec::with_capacity(self.raw.len() + 24);
        self.write_canonical(&mut out);
        out
    }

    pub fn write_canonical(&self, out: &mut Vec<u8>) {
        write::node(self, out);
    }

    /// For validators that want a tree of `serde_json`. Equal numbers become equal whatever their spelling: integers are
    /// i64 or u64 when they fit, everything else is f64.
    pub fn to_json(&self) -> serde_json::Value {
        match &self.value {
            Value::Null => serde_json::Value::Null,
            Value::Bool(bool) => serde_json::Value::Bool(*bool),
            Value::Number(literal) => number::to_json(literal),
            Value::String(string) => serde_json::Value::String(string.as_ref().to_owned()),
            Value::Array(items) => serde_json::Value::Array(items.iter().map(Node::to_json).collect()),
            Value::Object(members) => {
                let member = |(name, node): &(Cow<str>, Node)| (name.as_ref().to_owned(), node.to_json());
                serde_json::Value::Object(members.iter().map(member).collect())
            }
        }
    }
}

/// Where a string's bytes cannot stand for themselves: a quote, a backslash or a control character.
fn first_escaped(bytes: &[u8]) -> Option<usize> {
    const CHUNK: usize = 32;
    let escaped = |byte: &u8| matches!(byte, b'"' | b'\\' | 0..0x20);
    // No way out in the middle of a chunk: so the compiler looks at all of it at once.
    let is_plain = |chunk: &&[u8]| !chunk.iter().fold(false, |found, byte| found | escaped(byte));
    let plain = bytes.chunks_exact(CHUNK).take_while(is_plain).count() * CHUNK;
    bytes[plain..].iter().position(escaped).map(|at| plain + at)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn a_node_keeps_its_text_as_it_was_sent() {
        let node = parse(b" \n{ \"payload\" : {\"amount\": 1.50e0,\"a\\u0062\":[1 , 2]} }\t", 128).unwrap();
        assert_eq!(
            node.raw(),
            "{ \"payload\" : {\"amount\": 1.50e0,\"a\\u0062\":[1 , 2]} }"
        );
        let payload = node.get("payload").unwrap();
        assert_eq!(payload.raw(), "{\"amount\": 1.50e0,\"a\\u0062\":[1 , 2]}");
        assert_eq!(payload.get("amount").unwrap().raw(), "1.50e0");
        assert_eq!(payload.get("ab").unwrap().raw(), "[1 , 2]");
        assert!(payload.get("missing").is_none());
        assert!(payload.get("amount").unwrap().get("amount").is_none());
    }

    #[test]
    fn a_tree_for_validators_has_the_same_values() {
        let node = parse(
            br#"{"a":[null,true,-1,1.0,1e2,0.5,-0,18446744073709552000],"b":{"c":"\u00e9"}}"#,
            128,
        )
        .unwrap();
        let tree = json!({"a": [null, true, -1, 1, 100, 0.5, 0, 18446744073709552000_f64], "b": {"c": "é"}});
        assert_eq!(node.to_json(), tree);
    }

    #[test]
    fn a_refusal_reads_as_a_sentence() {
        let refused = |text: &str| parse(text.as_bytes(), 2).unwrap_err().to_string();
        assert_eq!(
            refused(r#"{"line":{"n":9007199254740993}}"#),
            "/line/n: the number 9007199254740993 is not exact: a double reads it as 9007199254740992; \
             send it as a string"
        );
        assert_eq!(refused("[1"), "not JSON: the text ends where a comma or ] should be");
        assert_eq!(refused("nul"), "not JSON: expected null at byte 0");
        assert_eq!(
            refused("[[[]]]"),
            "/0/0: arrays and objects are nested more than 2 deep"
        );
        assert_eq!(
            refused("{\"a\\nb\":1,\"a\\nb\":2}"),
            "/a\\nb: the member is there twice, so which value counts is unknown; send it once"
        );
    }
}
