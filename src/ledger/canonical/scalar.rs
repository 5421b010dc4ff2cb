//! Strings, numbers and words: the values without others inside.

use std::borrow::Cow;

use super::parse::{Parsed, Reader};
use super::pointer::Fault;
use super::{Reason, Value, first_escaped, number};

impl<'a> Reader<'a> {
    pub(super) fn string(&mut self) -> Parsed<Cow<'a, str>> {
        self.at += 1;
        let plain = self.plain();
        if self.take(b'"') {
            return Ok(Cow::Borrowed(plain));
        }
        let mut string = plain.to_owned();
        loop {
            match self.peek() {
                Some(b'"') => break,
                Some(b'\\') => string.push(self.escape()?),
                Some(0) => return Err(Fault::new(Reason::Nul { at: self.at })),
                Some(_) => return Err(self.expected("control characters only as escapes")),
                None => return Err(self.expected("a closing quote")),
            }
            string.push_str(self.plain());
        }
        self.at += 1;
        Ok(Cow::Owned(string))
    }

    /// Up to a quote, a backslash or a control character.
    fn plain(&mut self) -> &'a str {
        let rest = &self.text[self.at..];
        let length = first_escaped(rest.as_bytes()).unwrap_or(rest.len());
        self.at += length;
        &rest[..length]
    }

    fn escape(&mut self) -> Parsed<char> {
        let start = self.at;
        self.at += 1;
        let character = match self.peek() {
            Some(byte @ (b'"' | b'\\' | b'/')) => char::from(byte),
            Some(b'b') => '\u{8}',
            Some(b'f') => '\u{c}',
            Some(b'n') => '\n',
            Some(b'r') => '\r',
            Some(b't') => '\t',
            Some(b'u') => return self.unicode_escape(start),
            Some(_) | None => return Err(self.expected("one of \" \\ / b f n r t u after a backslash")),
        };
        self.at += 1;
        Ok(character)
    }

    /// Behind the backslash at `start`: `uXXXX`, or `uXXXX\uXXXX` for a surrogate pair.
    fn unicode_escape(&mut self, start: usize) -> Parsed<char> {
        self.at += 1;
        let mut code = self.four_hex_digits()?;
        if matches!(code, 0xD800..0xDC00) && self.text[self.at..].starts_with("\\u") {
            self.at += 2;
            let low = self.four_hex_digits()?;
            if matches!(low, 0xDC00..0xE000) {
                code = 0x1_0000 + ((code - 0xD800) << 10) + (low - 0xDC00);
            }
        }
        match char::from_u32(code) {
            Some('\0') => Err(Fault::new(Reason::Nul { at: start })),
            Some(character) => Ok(character),
            // Only surrogates are not characters.
            None => Err(Fault::new(Reason::LoneSurrogate { at: start })),
        }
    }

    fn four_hex_digits(&mut self) -> Parsed<u32> {
        let mut code = 0;
        for _ in 0..4 {
            match self.peek().and_then(|byte| char::from(byte).to_digit(16)) {
                Some(digit) => code = code * 16 + digit,
                None => return Err(self.expected("four hexadecimal digits")),
            }
            self.at += 1;
        }
        Ok(code)
    }

    pub(super) fn number(&mut self) -> Parsed<&'a str> {
        let start = self.at;
        self.take(b'-');
        // A leading zero stands alone.
        if !self.take(b'0') {
            self.digits()?;
        }
        if self.take(b'.') {
            self.digits()?;
        }
        if self.take(b'e') || self.take(b'E') {
            let _ = self.take(b'+') || self.take(b'-');
            self.digits()?;
        }
        let literal = &self.text[start..self.at];
        number::check(literal).map_err(Fault::new)?;
        Ok(literal)
    }

    fn digits(&mut self) -> Parsed<()> {
        let start = self.at;
        while self.peek().is_some_and(|byte| byte.is_ascii_digit()) {
            self.at += 1;
        }
        if self.at == start {
            return Err(self.expected("a digit"));
        }
        Ok(())
    }

    pub(super) fn word(&mut self, word: &'static str, value: Value<'a>) -> Parsed<Value<'a>> {
        if !self.text[self.at..].starts_with(word) {
            return Err(self.expected(word));
        }
        self.at += word.len();
        Ok(value)
    }
}

#[cfg(test)]
mod tests {
    use super::super::parse;
    use super::*;

    fn reason(text: impl AsRef<[u8]>) -> Reason {
        parse(text.as_ref(), 128).unwrap_err().reason
    }

    #[test]
    fn lone_surrogates_are_refused() {
        let texts =
            r#""\ud800"|"\udc00"|"\ud800\ud800"|"\ud800x"|"\ud800\n"|"\udc00\ud800"|"\ud83d\u0041"|{"\udfff":1}"#;
        for text in texts.split('|') {
            assert!(matches!(reason(text), Reason::LoneSurrogate { .. }), "{text}");
        }
        let node = parse(br#""\ud83d\ude00\uD83D\uDE00""#, 128).unwrap();
        assert!(matches!(node.value(), Value::String(string) if string == "😀😀"));
    }

    #[test]
    fn nul_is_refused() {
        assert_eq!(reason(r#"{"a":"x\u0000"}"#), Reason::Nul { at: 7 });
        assert_eq!(reason(r#"{"\u0000":1}"#), Reason::Nul { at: 2 });
        assert_eq!(reason("\"a\0\""), Reason::Nul { at: 2 });
        assert!(parse(br#""\\u0000 \u0001""#, 128).is_ok());
    }

    #[test]
    fn numbers_that_a_double_changes_are_refused() {
        for text in ["9007199254740993", "[0.1000000000000000055]", "{\"a\":1e999}", "1e-999"] {
            assert!(matches!(reason(text), Reason::InexactNumber { .. }), "{text}");
        }
    }
}
