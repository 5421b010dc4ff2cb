//! The writer of RFC 8785. It cannot fail: whatever has no canonical spelling was refused when it was read.

use std::borrow::Cow;
use std::cmp::Ordering;

use super::{Node, Value, first_escaped, number};

type Member<'a> = (Cow<'a, str>, Node<'a>);

pub(super) fn node(node: &Node, out: &mut Vec<u8>) {
    match &node.value {
        Value::Null => out.extend_from_slice(b"null"),
        Value::Bool(true) => out.extend_from_slice(b"true"),
        Value::Bool(false) => out.extend_from_slice(b"false"),
        Value::Number(literal) => number::write_canonical(literal, out),
        Value::String(text) => string(text, out),
        Value::Array(items) => array(items, out),
        Value::Object(members) => object(members, out),
    }
}

fn array(items: &[Node], out: &mut Vec<u8>) {
    out.push(b'[');
    for (index, item) in items.iter().enumerate() {
        if index > 0 {
            out.push(b',');
        }
        node(item, out);
    }
    out.push(b']');
}

fn object(members: &[Member], out: &mut Vec<u8>) {
    let mut sorted: Vec<(&str, &Node)> = members.iter().map(|(name, value)| (name.as_ref(), value)).collect();
    // Many clients sort already; then this is one look at the names.
    sorted.sort_unstable_by(|a, b| by_utf16(a.0, b.0));
    out.push(b'{');
    for (index, (name, value)) in sorted.into_iter().enumerate() {
        if index > 0 {
            out.push(b',');
        }
        string(name, out);
        out.push(b':');
        node(value, out);
    }
    out.push(b'}');
}

/// The order of the UTF-16 code units. It differs from that of the UTF-8 bytes in one place only: characters past U+FFFF
/// (first byte 0xF0 and up) are surrogates in UTF-16, and so come before U+E000 to U+FFFF (first byte 0xEE or 0xEF).
fn by_utf16(a: &str, b: &str) -> Ordering {
    let rank = |byte: u8| if matches!(byte, 0xEE | 0xEF) { byte + 0x10 } else { byte };
    match a.bytes().zip(b.bytes()).find(|(a, b)| a != b) {
        Some((a, b)) => rank(a).cmp(&rank(b)),
        None => a.len().cmp(&b.len()),
    }
}

/// Only quotes, backslashes and control characters are escaped.
fn string(text: &str, out: &mut Vec<u8>) {
    out.push(b'"');
    let mut rest = text.as_bytes();
    while let Some(plain) = first_escaped(rest) {
        out.extend_from_slice(&rest[..plain]);
        escape(rest[plain], out);
        rest = &rest[plain + 1..];
    }
    out.extend_from_slice(rest);
    out.push(b'"');
}

fn escape(byte: u8, out: &mut Vec<u8>) {
    let letter = match byte {
        0x08 => b'b',
        b'\t' => b't',
        b'\n' => b'n',
        0x0C => b'f',
        b'\r' => b'r',
        b'"' | b'\\' => byte,
        control => return out.extend_from_slice(format!("\\u{control:04x}").as_bytes()),
    };
    out.extend_from_slice(&[b'\\', letter]);
}

#[cfg(test)]
mod tests {
    use super::super::parse;

    fn canonical(text: &str) -> String {
        String::from_utf8(parse(text.as_bytes(), 128).unwrap().canonical()).unwrap()
    }

    /// RFC 8785, 3.2.2 and 3.2.3. Its 333333333.33333329 is not a number that a double gives back, so it is refused here;
    /// the double it stands for is put in its place.
    #[test]
    fn the_rfcs_sample_is_written_as_it_says() {
        let text = r#"{
            "numbers": [333333333.33333329, 1E30, 4.50, 2e-3, 0.000000000000000000000000001],
            "string": "\u20ac$\u000F\u000aA'\u0042\u0022\u005c\\\"\/",
            "literals": [null, true, false]
        }"#;
        assert_eq!(parse(text.as_bytes(), 128).unwrap_err().pointer, "/numbers/0");
        assert_eq!(
            canonical(&text.replace("333333333.33333329", "333333333.3333333")),
            r#"{"literals":[null,true,false],"numbers":[333333333.3333333,1e+30,4.5,0.002,1e-27],"#.to_owned()
                + r#""string":"€$\u000f\nA'B\"\\\\\"/"}"#
        );
    }

    /// RFC 8785, 3.2.3, and the reference implementations' "weird" sample.
    #[test]
    fn members_are_sorted_by_utf16_code_units() {
        let text = r#"{
            "\u20ac": "Euro Sign", "\r": "Carriage Return", "\ufb33": "Hebrew Letter Dalet With Dagesh", "1": "One",
            "\ud83d\ude00": "Emoji: Grinning Face", "\u0080": "Control\u007f",
            "\u00f6": "Latin Small Letter O With Diaeresis", "</script>": "Browser Challenge"
        }"#;
        assert_eq!(
            canonical(text),
            "{\"\\r\":\"Carriage Return\",\"1\":\"One\",\"</script>\":\"Browser Challenge\",\"\u{80}\":\"Control\u{7f}\",\
             \"ö\":\"Latin Small Letter O With Diaeresis\",\"€\":\"Euro Sign\",\"😀\":\"Emoji: Grinning Face\",\
             \"\u{fb33}\":\"Hebrew Letter Dalet With Dagesh\"}"
        );
    }

    #[test]
    fn a_shorter_name_comes_first_and_nesting_is_sorted_too() {
        assert_eq!(
            canonical(r#"{"ab":1,"a":{"c":[{"z":1,"y":2}],"b":0},"":3}"#),
            r#"{"":3,"a":{"b":0,"c":[{"y":2,"z":1}]},"ab":1}"#
        );
    }

    #[test]
    fn only_what_must_be_is_escaped() {
        let all: String = ('\u{1}'..='\u{80}').collect();
        let text = serde_json::to_string(&all).unwrap();
        let written = canonical(&text);
        assert!(
            written.starts_with(r#""\u0001\u0002\u0003\u0004\u0005\u0006\u0007\b\t\n\u000b\f\r\u000e"#),
            "{written}"
        );
        assert!(written.ends_with("}~\u{7f}\u{80}\""));
        assert!(written.contains(r##"\u001f !\"#$%&'()*+,-./0"##));
        assert!(written.contains(r#"[\\]"#));
    }

    #[test]
    fn text_is_not_normalised() {
        assert_ne!(canonical("\"\u{e9}\""), canonical("\"e\u{301}\""));
        assert_eq!(canonical("\"\u{e9}\""), canonical("\"\\u00e9\""));
    }

    #[test]
    fn null_and_absent_differ() {
        assert_ne!(canonical(r#"{"a":null}"#), canonical("{}"));
    }
}
