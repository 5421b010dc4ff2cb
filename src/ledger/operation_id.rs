//! The id of an operation: it names one business intent, and is what makes a repeated request the same request.
//!
//! 1 to 255 bytes of printable ASCII without blanks. An id is taken as it is or refused, never cut, trimmed or
//! normalised: two different texts never become one id.
//!
//! Left to others: which header or member the id comes from, and what happens when two of them disagree.

use std::fmt::{self, Write as _};
use std::str::FromStr;
use std::sync::Arc;

pub const LONGEST: usize = 255;

/// Cheap to clone: it goes wherever the operation goes.
#[derive(Clone, Debug, Eq, Hash, Ord, PartialEq, PartialOrd)]
pub struct OperationId(Arc<str>);

/// Which rule a text breaks, and where: bytes are counted from 0 in the text or header value as it was given. None of
/// them carries more of it than one byte.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum InvalidOperationId {
    #[error("the operation id is empty; it has 1 to {LONGEST} bytes")]
    Empty,
    #[error("the operation id has {bytes} bytes; it has at most {LONGEST}")]
    TooLong { bytes: usize },
    #[error(
        "the operation id has the byte 0x{byte:02X} at {at}; only printable ASCII without blanks (0x21 to 0x7E) is allowed"
    )]
    Byte { at: usize, byte: u8 },
    #[error("the key begins with a quote and has none at its end")]
    Unterminated,
    #[error(r#"the key has a backslash at byte {at}; within quotes it stands only before " or \"#)]
    Escape { at: usize },
    #[error("the key goes on after its closing quote, at byte {at}; no parameters are allowed")]
    AfterQuote { at: usize },
}

impl OperationId {
    pub fn parse(text: impl AsRef<[u8]>) -> Result<Self, InvalidOperationId> {
        let text = text.as_ref();
        check_length(text)?;
        Ok(Self(
            text.iter()
                .enumerate()
                .map(|(at, &byte)| allowed(at, byte))
                .collect::<Result<String, _>>()?
                .into(),
        ))
    }

    /// From the value of an `Idempotency-Key` header: a string of RFC 8941 (`"abc"`), or the bare id (`abc`). Blanks
    /// around the value belong to the header, not to the id.
    pub fn from_key_header(value: &[u8]) -> Result<Self, InvalidOperationId> {
        let blank = |byte: &u8| matches!(byte, b' ' | b'\t');
        let start = value.iter().take_while(|byte| blank(byte)).count();
        let end = value.len() - value[start..].iter().rev().take_while(|byte| blank(byte)).count();
        let key = match &value[start..end] {
            [b'"', ..] => unquoted(&value[..end], start)?,
            bare => {
                check_length(bare)?;
                bare.iter()
                    .enumerate()
                    .map(|(at, &byte)| allowed(start + at, byte))
                    .collect::<Result<String, _>>()?
            }
        };
        Ok(Self(key.into()))
    }

    pub fn as_str(&self) -> &str {
        &self.0
    }

    /// As one segment of a path: everything is encoded but the unreserved characters of RFC 3986. The ids `.` and `..`
    /// are encoded as well, as they would otherwise be steps within the path.
    pub fn percent_encoded(&self) -> String {
        let is_step = matches!(self.as_str(), "." | "..");
        let mut encoded = String::with_capacity(self.0.len() + 16);
        for byte in self.0.bytes() {
            match byte {
                b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'_' | b'~' => encoded.push(char::from(byte)),
                b'.' if !is_step => encoded.push('.'),
                // Writing to a string does not fail.
                _ => _ = write!(encoded, "%{byte:02X}"),
            }
        }
        encoded
    }
}

impl OperationId {
    /// Where the operation is read: a reference relative to the service's root.
    pub fn url(&self) -> String {
        format!("/v1/operations/{}", self.percent_encoded())
    }
}

impl fmt::Display for OperationId {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl FromStr for OperationId {
    type Err = InvalidOperationId;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::parse(text)
    }
}

fn check_length(id: &[u8]) -> Result<(), InvalidOperationId> {
    match id.len() {
        0 => Err(InvalidOperationId::Empty),
        1..=LONGEST => Ok(()),
        bytes => Err(InvalidOperationId::TooLong { bytes }),
    }
}

fn allowed(at: usize, byte: u8) -> Result<char, InvalidOperationId> {
    if byte.is_ascii_graphic() {
        Ok(char::from(byte))
    } else {
        Err(InvalidOperationId::Byte { at, byte })
    }
}

/// What the quotes enclose, without its escapes. The opening quote is at `start`, and blanks after the value are gone.
fn unquoted(value: &[u8], start: usize) -> Result<String, InvalidOperationId> {
    let mut key = String::with_capacity(value.len());
    let mut bytes = value.iter().copied().enumerate().skip(start + 1);
    loop {
        match bytes.next() {
            None => return Err(InvalidOperationId::Unterminated),
            Some((_, b'"')) => break,
            Some((at, b'\\')) => match bytes.next() {
                Some((_, escaped @ (b'"' | b'\\'))) => key.push(char::from(escaped)),
                Some(_) => return Err(InvalidOperationId::Escape { at }),
                None => return Err(InvalidOperationId::Unterminated),
            },
            Some((at, byte)) => key.push(allowed(at, byte)?),
        }
    }
    if let Some((at, _)) = bytes.next() {
        return Err(InvalidOperationId::AfterQuote { at });
    }
    check_length(key.as_bytes())?;
    Ok(key)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn header(value: &str) -> Result<String, InvalidOperationId> {
        OperationId::from_key_header(value.as_bytes()).map(|id| id.as_str().to_owned())
    }

    #[test]
    fn an_id_is_1_to_255_bytes() {
        assert_eq!(OperationId::parse(""), Err(InvalidOperationId::Empty));
        for bytes in [1, 254, 255] {
            assert_eq!(OperationId::parse("k".repeat(bytes)).unwrap().as_str().len(), bytes);
        }
        for bytes in [256, 2704, 10_000] {
            assert_eq!(
                OperationId::parse("k".repeat(bytes)),
                Err(InvalidOperationId::TooLong { bytes })
            );
        }
    }

    #[test]
    fn an_id_is_printable_ascii_without_blanks() {
        for byte in 0..=255 {
            let parsed = OperationId::parse([b'a', byte, b'b']);
            if (0x21..=0x7E).contains(&byte) {
                assert_eq!(parsed.unwrap().as_str().as_bytes(), [b'a', byte, b'b']);
            } else {
                assert_eq!(parsed, Err(InvalidOperationId::Byte { at: 1, byte }));
            }
        }
        assert_eq!(
            OperationId::parse(" a"),
            Err(InvalidOperationId::Byte { at: 0, byte: b' ' })
        );
        assert_eq!(
            OperationId::parse("a\n"),
            Err(InvalidOperationId::Byte { at: 1, byte: b'\n' })
        );
    }

    #[test]
    fn quotes_around_a_key_are_not_part_of_it() {
        for value in ["abc", "\"abc\"", "  abc\t", " \"abc\" "] {
            assert_eq!(header(value).as_deref(), Ok("abc"), "{value}");
        }
        assert_eq!(header(r#""a\"b\\c""#).as_deref(), Ok(r#"a"b\c"#));
        assert_eq!(header(r#"a"b\c"#).as_deref(), Ok(r#"a"b\c"#));
        assert_eq!(header(r#"abc""#).as_deref(), Ok(r#"abc""#));
        assert_eq!(header("abc;a=1").as_deref(), Ok("abc;a=1"));
    }

    #[test]
    fn a_key_that_is_no_string_is_refused() {
        use InvalidOperationId::{AfterQuote, Byte, Empty, Escape, Unterminated};
        for (value, refused) in [
            ("", Empty),
            (" \t ", Empty),
            ("\"\"", Empty),
            ("\"", Unterminated),
            ("\"abc", Unterminated),
            ("\"abc\\", Unterminated),
            ("\"abc\\\"", Unterminated),
            (" \"a\\bc\"", Escape { at: 3 }),
            ("\"abc\";a=1", AfterQuote { at: 5 }),
            ("\"abc\" ;a", AfterQuote { at: 5 }),
            ("\"abc\", \"abc\"", AfterQuote { at: 5 }),
            ("\"\"\"", AfterQuote { at: 2 }),
            ("\" abc\"", Byte { at: 1, byte: b' ' }),
            (" a bc", Byte { at: 2, byte: b' ' }),
            ("\"\u{e9}\"", Byte { at: 1, byte: 0xC3 }),
            ("abc\0", Byte { at: 3, byte: 0 }),
        ] {
            assert_eq!(header(value), Err(refused), "{value:?}");
        }
    }

    #[test]
    fn a_key_is_as_long_as_what_its_quotes_enclose() {
        let longest = "\\\"".repeat(255);
        assert_eq!(header(&format!("\"{longest}\"")).unwrap().len(), 255);
        assert_eq!(
            header(&format!("\"{longest}k\"")),
            Err(InvalidOperationId::TooLong { bytes: 256 })
        );
        assert_eq!(
            header(&"k".repeat(256)),
            Err(InvalidOperationId::TooLong { bytes: 256 })
        );
    }

    #[test]
    fn a_refusal_says_little_of_what_was_sent() {
        for value in [
            "secret".repeat(10_000),
            format!("\"{}\\x\"", "secret".repeat(100)),
            "\"secret\"secret".to_owned(),
        ] {
            let refused = header(&value).unwrap_err().to_string();
            assert!(!refused.contains("secret") && refused.len() < 150, "{refused}");
        }
    }

    #[test]
    fn every_id_fits_into_a_path() {
        let encoded = |id: &str| OperationId::parse(id).unwrap().percent_encoded();
        assert_eq!(
            encoded("acme:order-1001:refund:rev-1"),
            "acme%3Aorder-1001%3Arefund%3Arev-1"
        );
        assert_eq!(encoded("a/../b%2F?#"), "a%2F..%2Fb%252F%3F%23");
        assert_eq!(encoded("A-z_0.9~"), "A-z_0.9~");
        assert_eq!(encoded("."), "%2E");
        assert_eq!(encoded(".."), "%2E%2E");
        assert_eq!(encoded("..."), "...");
    }

    proptest! {
        #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn a_quoted_key_and_a_bare_key_are_the_same(id in "[!#-~][!-~]{0,254}") {
            let quoted = format!("\"{}\"", id.replace('\\', "\\\\").replace('"', "\\\""));
            prop_assert_eq!(header(&quoted), Ok(id.clone()));
            prop_assert_eq!(header(&id), Ok(id));
        }

        #[test]
        fn arbitrary_headers_never_panic(value in proptest::collection::vec(any::<u8>(), 0..40)) {
            if let Ok(id) = OperationId::from_key_header(&value) {
                prop_assert_eq!(OperationId::parse(id.as_str()), Ok(id));
            }
        }

        #[test]
        fn an_encoded_id_is_decoded_to_itself(id in "[!-~]{1,255}") {
            let encoded = OperationId::parse(&id).unwrap().percent_encoded();
            let mut decoded = String::new();
            let mut rest = encoded.as_str();
            while let Some((before, after)) = rest.split_once('%') {
                decoded.push_str(before);
                decoded.push(char::from(u8::from_str_radix(&after[..2], 16).unwrap()));
                rest = &after[2..];
            }
            prop_assert_eq!(decoded + rest, id);
        }
    }
}
