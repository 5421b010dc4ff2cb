//! Texts with places to fill in: `/v1/charges?ref={/order_id}&key={key}`.
//!
//! A place is a JSON pointer into the operation's payload (`{/order_id}`), or one of the names `{operation_id}` and
//! `{key}` (the key that the downstream gets). `{{` and `}}` are braces. What may be filled in is a string, a number or
//! `true` and `false`; anything else is [`Missing`], and so is, in a path, whatever could make it another path.

use std::fmt;
use std::str::FromStr;

use serde_json::Value;

use super::path;

/// A JSON pointer (RFC 6901).
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Pointer(String);

/// A text with places.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Template(Vec<Piece>);

#[derive(Debug, Clone, PartialEq, Eq)]
enum Piece {
    Literal(String),
    OperationId,
    Key,
    Payload(Pointer),
}

/// What places are filled from.
#[derive(Debug, Clone, Copy)]
pub struct Values<'a> {
    pub operation_id: &'a str,
    /// As the downstream gets it.
    pub key: &'a str,
    /// The operation's payload; for a reversal, the answer that is to be reversed.
    pub payload: &'a Value,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("a JSON pointer is empty or begins with /, and ~ stands only in ~0 and ~1: {0:?}")]
pub struct InvalidPointer(String);

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum InvalidTemplate {
    #[error("a brace is not closed; write {{{{ and }}}} for braces")]
    Open,
    #[error("a brace closes nothing; write {{{{ and }}}} for braces")]
    Closed,
    #[error("{{{0}}} is no place; places are {{/pointer}} into the payload, {{operation_id}} and {{key}}")]
    Place(String),
    #[error(transparent)]
    Pointer(#[from] InvalidPointer),
}

/// A place that cannot be filled; nothing has been sent.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Missing {
    #[error("there is no {place} to fill in")]
    Absent { place: String },
    #[error("{place} is not a string, a number, true or false")]
    Kind { place: String },
    /// Empty, or with a slash, a backslash or a control character.
    #[error("{place} is empty or has a character that does not fit into a path")]
    Unfit { place: String },
    #[error("filled in, the path is not one that is sent: {0}")]
    Path(#[from] path::Refused),
}

impl Pointer {
    /// The value it points at.
    pub fn find<'v>(&self, value: &'v Value) -> Option<&'v Value> {
        value.pointer(&self.0)
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// Whether it points at the whole.
    pub fn is_whole(&self) -> bool {
        self.0.is_empty()
    }
}

impl FromStr for Pointer {
    type Err = InvalidPointer;

    fn from_str(text: &str) -> Result<Self, InvalidPointer> {
        let begins = text.is_empty() || text.starts_with('/');
        let escapes = text
            .split('~')
            .skip(1)
            .all(|after| after.starts_with('0') || after.starts_with('1'));
        if begins && escapes {
            Ok(Self(text.to_owned()))
        } else {
            Err(InvalidPointer(text.to_owned()))
        }
    }
}

impl fmt::Display for Pointer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for Template {
    type Err = InvalidTemplate;

    fn from_str(text: &str) -> Result<Self, InvalidTemplate> {
        let mut pieces = Vec::new();
        let mut literal = String::new();
        let mut rest = text;
        while let Some(at) = rest.find(['{', '}']) {
            literal.push_str(&rest[..at]);
            let (brace, behind) = rest[at..].split_at(1);
            if behind.starts_with(brace) {
                literal.push_str(brace);
                rest = &behind[1..];
                continue;
            }
            if brace == "}" {
                return Err(InvalidTemplate::Closed);
            }
            let (place, behind) = behind.split_once('}').ok_or(InvalidTemplate::Open)?;
            if !literal.is_empty() {
                pieces.push(Piece::Literal(std::mem::take(&mut literal)));
            }
            pieces.push(Piece::place(place)?);
            rest = behind;
        }
        literal.push_str(rest);
        if !literal.is_empty() {
            pieces.push(Piece::Literal(literal));
        }
        Ok(Self(pieces))
    }
}

/// As the file writes it.
impl fmt::Display for Template {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for piece in &self.0 {
            match piece {
                Piece::Literal(literal) => f.write_str(&literal.replace('{', "{{").replace('}', "}}"))?,
                place => write!(f, "{{{}}}", place.name())?,
            }
        }
        Ok(())
    }
}

impl Piece {
    fn place(text: &str) -> Result<Self, InvalidTemplate> {
        match text {
            "operation_id" => Ok(Self::OperationId),
            "key" => Ok(Self::Key),
            pointer if pointer.starts_with('/') => Ok(Self::Payload(pointer.parse()?)),
            other => Err(InvalidTemplate::Place(other.to_owned())),
        }
    }
}

impl Template {
    /// The text with its places filled, for a header line, a body or a comparison.
    pub fn fill(&self, values: &Values<'_>) -> Result<String, Missing> {
        let mut text = String::new();
        for piece in &self.0 {
            match piece {
                Piece::Literal(literal) => text.push_str(literal),
                place => text.push_str(&place.value(values)?),
            }
        }
        Ok(text)
    }

    /// The text as path and query below a downstream's base: every value is percent-encoded (all but `A-Z a-z 0-9 - . _
    /// ~`), and none can add a segment, a dot segment, a query or a parameter. Empty values are refused, for a path that
    /// lacks its last segment is a list, and a query that lacks its value finds anything.
    pub fn fill_path(&self, values: &Values<'_>) -> Result<String, Missing> {
        let mut text = String::new();
        let mut in_query = false;
        for piece in &self.0 {
            match piece {
                Piece::Literal(literal) => {
                    text.push_str(literal);
                    in_query |= literal.contains('?');
                }
                place => {
                    let value = place.value(values)?;
                    let unfit = |character: char| character.is_control() || character == '/' || character == '\\';
                    if value.is_empty() || (!in_query && value.contains(unfit)) {
                        return Err(Missing::Unfit { place: place.name() });
                    }
                    encode(&value, &mut text);
                }
            }
        }
        path::check(&text)?;
        Ok(text)
    }
}

impl Template {
    /// This template, if what it writes itself is a path that may be sent.
    pub fn checked_path(self) -> Result<Self, path::Refused> {
        let with_a_letter = |piece: &Piece| match piece {
            Piece::Literal(literal) => literal.clone(),
            Piece::OperationId | Piece::Key | Piece::Payload(_) => "x".to_owned(),
        };
        path::check(&self.0.iter().map(with_a_letter).collect::<String>())?;
        Ok(self)
    }
}

impl Piece {
    fn name(&self) -> String {
        match self {
            Self::Literal(literal) => literal.clone(),
            Self::OperationId => "operation_id".to_owned(),
            Self::Key => "key".to_owned(),
            Self::Payload(pointer) => pointer.0.clone(),
        }
    }

    fn value(&self, values: &Values<'_>) -> Result<String, Missing> {
        match self {
            Self::Literal(literal) => Ok(literal.clone()),
            Self::OperationId => Ok(values.operation_id.to_owned()),
            Self::Key => Ok(values.key.to_owned()),
            Self::Payload(pointer) => {
                let place = || pointer.0.clone();
                let found = pointer
                    .find(values.payload)
                    .ok_or_else(|| Missing::Absent { place: place() })?;
                scalar(found).ok_or_else(|| Missing::Kind { place: place() })
            }
        }
    }
}

/// A value as text. Whole numbers keep every digit (up to 64 bits); others are printed as the shortest text that reads
/// as the same double, so that `1.10` becomes `1.1`: what was read once has no other spelling any more.
pub fn scalar(value: &Value) -> Option<String> {
    match value {
        Value::String(text) => Some(text.clone()),
        Value::Number(number) => Some(number.to_string()),
        Value::Bool(value) => Some(value.to_string()),
        Value::Null | Value::Array(_) | Value::Object(_) => None,
    }
}

fn encode(value: &str, text: &mut String) {
    const HEX: &[u8; 16] = b"0123456789ABCDEF";
    for byte in value.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            text.push(char::from(byte));
        } else {
            text.push('%');
            text.push(char::from(HEX[usize::from(byte >> 4)]));
            text.push(char::from(HEX[usize::from(byte & 15)]));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn filled(template: &str, payload: &Value) -> Result<String, Missing> {
        template.parse::<Template>().unwrap().fill(&Values {
            operation_id: "acme:1",
            key: "k 1",
            payload,
        })
    }

    fn path(template: &str, payload: &Value) -> Result<String, Missing> {
        template.parse::<Template>().unwrap().fill_path(&Values {
            operation_id: "acme:1",
            key: "k/1",
            payload,
        })
    }

    #[test]
    fn places_are_filled_and_doubled_braces_are_braces() {
        let payload = json!({"a": {"b~/c": "x"}, "n": 9_007_199_254_740_993_u64, "d": 1.10, "t": true});
        assert_eq!(filled("{{{/a/b~0~1c}}}", &payload).unwrap(), "{x}");
        assert_eq!(
            filled("{operation_id} {key} {/n} {/d} {/t}", &payload).unwrap(),
            "acme:1 k 1 9007199254740993 1.1 true"
        );
        assert_eq!(filled("", &payload).unwrap(), "");
    }

    #[test]
    fn what_is_no_scalar_or_not_there_is_refused() {
        let payload = json!({"o": {}, "l": [1], "z": null});
        for pointer in ["/o", "/l", "/z"] {
            let refused = filled(&format!("{{{pointer}}}"), &payload);
            assert_eq!(
                refused,
                Err(Missing::Kind {
                    place: pointer.to_owned()
                })
            );
        }
        assert_eq!(
            filled("{/x}", &payload),
            Err(Missing::Absent { place: "/x".to_owned() })
        );
    }

    #[test]
    fn no_value_becomes_more_than_one_piece_of_a_path() {
        let of = |value: &str| path("/charges/{/v}/x?ref={/v}", &json!({ "v": value }));
        assert_eq!(
            of("a b?c#d&e=é").unwrap(),
            "/charges/a%20b%3Fc%23d%26e%3D%C3%A9/x?ref=a%20b%3Fc%23d%26e%3D%C3%A9"
        );
        assert_eq!(of("...").unwrap(), "/charges/.../x?ref=...");
        assert_eq!(of("%2e%2e"), Err(Missing::Path(path::Refused::DotSegment)));
        for bad in [".", "..", "", "a/b", "../x", "a\\b", "a\nb", "a\0b"] {
            assert!(of(bad).is_err(), "{bad:?}");
        }
        assert!(path("/a/.{/v}", &json!({"v": "."})).is_err());
        assert_eq!(path("/a?k={key}", &json!({})).unwrap(), "/a?k=k%2F1");
        assert_eq!(path("/a?q={/v}", &json!({"v": "a/../b"})).unwrap(), "/a?q=a%2F..%2Fb");
    }

    #[test]
    fn mistakes_in_templates_are_named() {
        for bad in ["{", "}", "a{b", "{b}", "{}", "{/a~2}", "{operation_id"] {
            assert!(bad.parse::<Template>().is_err(), "{bad}");
        }
        for bad in ["a", "/a~", "/~2"] {
            assert!(bad.parse::<Pointer>().is_err(), "{bad}");
        }
    }
}
