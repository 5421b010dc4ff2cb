//! One pass over the text. Strings without escapes, names and number literals are borrowed from it.

use std::borrow::Cow;

use super::pointer::Fault;
use super::{Invalid, Node, Reason, Value};

pub(super) type Parsed<T> = Result<T, Box<Fault>>;
type Member<'a> = (Cow<'a, str>, Node<'a>);

/// Up to so many members, comparing each with each is quicker than sorting them.
const FEW_MEMBERS: usize = 8;

pub(super) fn document(text: &[u8], max_depth: usize) -> Result<Node<'_>, Invalid> {
    let text = std::str::from_utf8(text).map_err(|error| {
        Fault::new(Reason::NotUtf8 {
            at: error.valid_up_to(),
        })
    })?;
    if text.starts_with('\u{feff}') {
        return Err(Fault::new(Reason::ByteOrderMark).into());
    }
    let mut reader = Reader { text, at: 0, max_depth };
    reader.skip_blanks();
    let node = reader.node(0)?;
    reader.skip_blanks();
    if reader.at < text.len() {
        return Err(Fault::new(Reason::Trailing { at: reader.at }).into());
    }
    Ok(node)
}

/// `scalar` adds strings, numbers and words.
pub(super) struct Reader<'a> {
    pub(super) text: &'a str,
    pub(super) at: usize,
    max_depth: usize,
}

impl<'a> Reader<'a> {
    /// `depth` counts the arrays and objects around the value.
    fn node(&mut self, depth: usize) -> Parsed<Node<'a>> {
        let start = self.at;
        let value = match self.peek() {
            Some(b'{') => self.object(depth + 1)?,
            Some(b'[') => self.array(depth + 1)?,
            Some(b'"') => Value::String(self.string()?),
            Some(b'-' | b'0'..=b'9') => Value::Number(self.number()?),
            Some(b't') => self.word("true", Value::Bool(true))?,
            Some(b'f') => self.word("false", Value::Bool(false))?,
            Some(b'n') => self.word("null", Value::Null)?,
            Some(_) | None => return Err(self.expected("a value")),
        };
        Ok(Node {
            raw: &self.text[start..self.at],
            value,
        })
    }

    fn object(&mut self, depth: usize) -> Parsed<Value<'a>> {
        self.open(depth)?;
        let mut members = Vec::new();
        if self.take(b'}') {
            return Ok(Value::Object(members));
        }
        loop {
            let (name, node) = self.member(depth)?;
            members.push((name, node));
            self.skip_blanks();
            if self.take(b'}') {
                break;
            }
            self.want(b',', "a comma or }")?;
            self.skip_blanks();
        }
        match repeated(&members) {
            Some(name) => Err(Fault::new(Reason::DuplicateMember).in_member(name)),
            None => Ok(Value::Object(members)),
        }
    }

    fn member(&mut self, depth: usize) -> Parsed<Member<'a>> {
        if self.peek() != Some(b'"') {
            return Err(self.expected("a member's name in double quotes"));
        }
        let name = self.string()?;
        self.skip_blanks();
        self.want(b':', "a colon")?;
        self.skip_blanks();
        match self.node(depth) {
            Ok(node) => Ok((name, node)),
            Err(fault) => Err(fault.in_member(&name)),
        }
    }

    fn array(&mut self, depth: usize) -> Parsed<Value<'a>> {
        self.open(depth)?;
        let mut items = Vec::new();
        if self.take(b']') {
            return Ok(Value::Array(items));
        }
        loop {
            match self.node(depth) {
                Ok(node) => items.push(node),
                Err(fault) => return Err(fault.in_item(items.len())),
            }
            self.skip_blanks();
            if self.take(b']') {
                return Ok(Value::Array(items));
            }
            self.want(b',', "a comma or ]")?;
            self.skip_blanks();
        }
    }

    /// Past a bracket, if one may be opened here, and the blanks behind it.
    fn open(&mut self, depth: usize) -> Parsed<()> {
        if depth > self.max_depth {
            return Err(Fault::new(Reason::TooDeep { limit: self.max_depth }));
        }
        self.at += 1;
        self.skip_blanks();
        Ok(())
    }

    fn skip_blanks(&mut self) {
        while matches!(self.peek(), Some(b' ' | b'\t' | b'\n' | b'\r')) {
            self.at += 1;
        }
    }

    pub(super) fn peek(&self) -> Option<u8> {
        self.text.as_bytes().get(self.at).copied()
    }

    pub(super) fn take(&mut self, byte: u8) -> bool {
        let found = self.peek() == Some(byte);
        self.at += usize::from(found);
        found
    }

    fn want(&mut self, byte: u8, expected: &'static str) -> Parsed<()> {
        if self.take(byte) {
            Ok(())
        } else {
            Err(self.expected(expected))
        }
    }

    #[cold]
    pub(super) fn expected(&self, expected: &'static str) -> Box<Fault> {
        if self.at < self.text.len() {
            Fault::new(Reason::Syntax { at: self.at, expected })
        } else {
            Fault::new(Reason::Unfinished { expected })
        }
    }
}

/// A name that is there twice. By comparing, not by hashing: names cannot be chosen so that this takes long.
fn repeated<'m>(members: &'m [Member]) -> Option<&'m str> {
    if members.len() <= FEW_MEMBERS {
        let earlier = |(index, (name, _)): &(usize, &Member)| members[..*index].iter().any(|other| other.0 == *name);
        return members
            .iter()
            .enumerate()
            .find(earlier)
            .map(|(_, member)| member.0.as_ref());
    }
    let mut names: Vec<&str> = members.iter().map(|member| member.0.as_ref()).collect();
    names.sort_unstable();
    names.windows(2).find(|pair| pair[0] == pair[1]).map(|pair| pair[0])
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant};

    use super::super::{DEEPEST, parse};
    use super::*;

    fn reason(text: impl AsRef<[u8]>) -> Reason {
        parse(text.as_ref(), 128).unwrap_err().reason
    }

    fn accepts(text: impl AsRef<[u8]>) -> bool {
        parse(text.as_ref(), 128).is_ok()
    }

    #[test]
    fn json_is_read() {
        let texts = r#"null| true |false|0|-0|-12.5e+3|""|"a\\\""|[]|[ ]|{}|{ }|[1,[2,{}],"x"]|{"":{"":""}}"#;
        for text in texts
            .split('|')
            .chain(["\r\n\t[ 1 , 2 ]\r\n\t", "\"\u{7f}\u{2028}\u{ffff}\u{10ffff}\""])
        {
            assert!(accepts(text), "{text}");
        }
    }

    #[test]
    fn what_is_not_json_is_refused() {
        let words = "| |nul|nulll|True|NaN|Infinity|'a'|a|// c|1 2|[] []";
        let numbers = "+1|01|-|-01|1.|.5|1e|1e+|1e1.5|0x1|1_000";
        let strings = r#""|"a|"\|"\u|"\u12"|"\u+123"|"\u12g4"|"\u00é"|"\x41"|"\é""#;
        let nested =
            r#"[|[1|[1,|[1,]|[,1]|[1 2]|]|[1}|{|{"a"|{"a":|{"a":1|{"a":1,|{"a":1,}|{a:1}|{1:1}|{"a" 1}|{"a":1 "b":2}"#;
        let texts = [words, numbers, strings, nested]
            .into_iter()
            .flat_map(|texts| texts.split('|'));
        for text in texts.chain(["\"\t\"", "\"\n\"", "\u{a0}1", "1\0", "[1]\u{c}"]) {
            let refused = reason(text);
            assert!(
                matches!(
                    refused,
                    Reason::Syntax { .. } | Reason::Unfinished { .. } | Reason::Trailing { .. }
                ),
                "{text}: {refused:?}"
            );
        }
    }

    #[test]
    fn a_fault_names_its_byte() {
        assert_eq!(
            reason("[1 2]"),
            Reason::Syntax {
                at: 3,
                expected: "a comma or ]"
            }
        );
        assert_eq!(reason("{\"a\":"), Reason::Unfinished { expected: "a value" });
        assert_eq!(reason("1 2"), Reason::Trailing { at: 2 });
    }

    #[test]
    fn bytes_that_are_not_utf8_are_refused() {
        assert_eq!(reason(b"[\"\xff\"]"), Reason::NotUtf8 { at: 2 });
        assert_eq!(reason(b"\"\xed\xa0\x80\""), Reason::NotUtf8 { at: 1 });
        assert_eq!(reason(b"\"\xc0\x80\""), Reason::NotUtf8 { at: 1 });
        assert_eq!(reason(b"\xef\xbb\xbf{}"), Reason::ByteOrderMark);
        assert_eq!(reason(b"\xff\xfe{\0}\0"), Reason::NotUtf8 { at: 0 });
    }

    #[test]
    fn repeated_members_are_refused() {
        assert_eq!(reason(r#"{"qty":1,"qty":-1}"#), Reason::DuplicateMember);
        assert_eq!(reason(r#"{"qty":1,"qty":1}"#), Reason::DuplicateMember);
        assert_eq!(reason(r#"{"qty":1,"q\u0074y":1}"#), Reason::DuplicateMember);
        assert_eq!(reason(r#"[{"a":{"b":1,"b":1}}]"#), Reason::DuplicateMember);
        assert!(accepts(r#"{"a":{"a":1},"b":{"a":1},"A":1}"#));
    }

    #[test]
    fn repeated_members_are_refused_among_many() {
        let many = |names: &[usize]| {
            let members: Vec<_> = names.iter().map(|name| format!("\"m{name}\":0")).collect();
            format!("{{{}}}", members.join(","))
        };
        let names: Vec<usize> = (0..100).collect();
        assert!(accepts(many(&names)));
        for twice in [0, 7, 8, 99] {
            let text = many(&[&names[..], &[twice]].concat());
            assert_eq!(parse(text.as_bytes(), 128).unwrap_err().pointer, format!("/m{twice}"));
        }
    }

    #[test]
    fn a_scalar_has_depth_0_and_an_empty_array_depth_1() {
        assert!(parse(b"1", 0).is_ok());
        assert_eq!(parse(b"[]", 0).unwrap_err().reason, Reason::TooDeep { limit: 0 });
        assert!(parse(b"[{}]", 2).is_ok());
        assert_eq!(parse(b"[{}]", 1).unwrap_err().reason, Reason::TooDeep { limit: 1 });
    }

    #[test]
    fn nesting_is_read_to_the_limit_and_refused_past_it() {
        let nested = |depth: usize| format!("{}{}", "[".repeat(depth), "]".repeat(depth));
        assert!(accepts(nested(127)));
        assert!(accepts(nested(128)));
        for depth in [129, 200, 100_000] {
            assert_eq!(reason(nested(depth)), Reason::TooDeep { limit: 128 });
        }
        assert_eq!(reason("{\"a\":".repeat(100_000)), Reason::TooDeep { limit: 128 });
    }

    #[test]
    fn no_limit_is_deeper_than_the_stack() {
        let nested = |depth: usize| format!("{}{}", "[".repeat(depth), "]".repeat(depth));
        let text = nested(DEEPEST);
        let node = parse(text.as_bytes(), usize::MAX).unwrap();
        assert_eq!(node.canonical(), text.as_bytes());
        let _ = node.to_json();
        let refused = parse(nested(DEEPEST + 1).as_bytes(), usize::MAX)
            .map(|_| ())
            .unwrap_err();
        assert_eq!(refused.reason, Reason::TooDeep { limit: DEEPEST });
    }

    #[test]
    fn hostile_sizes_take_no_long_time() {
        let names = |count: usize, prefix: &str| {
            let members: Vec<_> = (0..count)
                .rev()
                .map(|name| format!("\"{prefix}{name:07}\":0"))
                .collect();
            format!("{{{}}}", members.join(","))
        };
        let texts = [
            "1".repeat(10_000_000),
            format!("0.{}", "1".repeat(10_000_000)),
            format!("1e{}", "9".repeat(10_000_000)),
            "[".repeat(1_000_000),
            format!("\"{}\"", "\\u0041".repeat(200_000)),
            format!("[{}0]", "0,".repeat(300_000)),
            names(1_000_000, ""),
            names(100_000, "a long beginning that they all share "),
        ];
        for text in texts {
            let started = Instant::now();
            if let Ok(node) = parse(text.as_bytes(), 128) {
                assert!(!node.canonical().is_empty());
            }
            // Generous: this is a debug build on a busy machine, and quadratic time would be hours.
            assert!(
                started.elapsed() < Duration::from_secs(20),
                "{:?} for {}…",
                started.elapsed(),
                &text[..20]
            );
        }
    }
}
