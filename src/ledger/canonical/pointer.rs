//! Where in a text reading stopped, as a JSON pointer (RFC 6901). The pointer is put together only once something is
//! wrong, on the way out of the values that enclose the fault, and stays short whatever was sent.

use super::{Invalid, Reason};

/// In bytes, before escaping.
const LONGEST_NAME: usize = 64;
/// In bytes.
const LONGEST_POINTER: usize = 512;

/// A fault, and the names and indices from it outwards. Boxed in results: the way without a fault should stay cheap.
pub(super) struct Fault {
    reason: Reason,
    outwards: Vec<String>,
}

impl Fault {
    #[cold]
    pub(super) fn new(reason: Reason) -> Box<Self> {
        Box::new(Self {
            reason,
            outwards: Vec::new(),
        })
    }

    #[cold]
    pub(super) fn in_member(mut self: Box<Self>, name: &str) -> Box<Self> {
        self.outwards.push(cut(name, LONGEST_NAME));
        self
    }

    #[cold]
    pub(super) fn in_item(mut self: Box<Self>, index: usize) -> Box<Self> {
        self.outwards.push(index.to_string());
        self
    }
}

impl From<Box<Fault>> for Invalid {
    fn from(fault: Box<Fault>) -> Self {
        let mut pointer = String::new();
        for name in fault.outwards.iter().rev() {
            if pointer.len() + name.len() > LONGEST_POINTER {
                pointer.push_str("/…");
                break;
            }
            pointer.push('/');
            pointer.push_str(&name.replace('~', "~0").replace('/', "~1"));
        }
        Self {
            pointer,
            reason: fault.reason,
        }
    }
}

/// At most `longest` bytes of a text, with `…` where it was cut.
pub(super) fn cut(text: &str, longest: usize) -> String {
    if text.len() <= longest {
        return text.to_owned();
    }
    format!("{}…", &text[..text.floor_char_boundary(longest)])
}

/// A pointer in front of a sentence. Control characters are escaped: a message stays on its line.
pub(super) fn prefix(pointer: &str) -> String {
    if pointer.is_empty() {
        return String::new();
    }
    let mut prefix = String::with_capacity(pointer.len() + 2);
    for character in pointer.chars() {
        if character.is_control() {
            prefix.extend(character.escape_default());
        } else {
            prefix.push(character);
        }
    }
    prefix + ": "
}

#[cfg(test)]
mod tests {
    use super::super::parse;

    fn pointer(text: &str) -> String {
        parse(text.as_bytes(), 128).unwrap_err().pointer
    }

    #[test]
    fn a_pointer_names_the_value_at_fault() {
        assert_eq!(pointer("1e999"), "");
        assert_eq!(pointer(r#"{"a":[0,{"b":1e999}]}"#), "/a/1/b");
        assert_eq!(pointer(r#"{"a/b":{"m~n":{"":1e999}}}"#), "/a~1b/m~0n/");
        assert_eq!(pointer(r#"{"a":{"qty":1,"x":2,"q\u0074y":-1}}"#), "/a/qty");
        assert_eq!(pointer(r#"{"a":{"\ud800":1}}"#), "/a");
        assert_eq!(pointer(r#"{"a":"\ud800"}"#), "/a");
    }

    #[test]
    fn a_huge_name_does_not_come_back_whole() {
        let name = "ä/~".repeat(3_000_000);
        let refused = parse(format!("{{\"{name}\":1e999}}").as_bytes(), 128).unwrap_err();
        assert!(refused.pointer.len() < 150, "{} bytes", refused.pointer.len());
        assert!(
            refused.pointer.starts_with("/ä~1~0ä~1~0") && refused.pointer.ends_with("~0…"),
            "{}",
            refused.pointer
        );
        assert!(refused.to_string().len() < 400);
    }

    #[test]
    fn a_long_way_down_does_not_come_back_whole() {
        let name = "~".repeat(60);
        let text = format!("{}1e999{}", format!("{{\"{name}\":").repeat(128), "}".repeat(128));
        let refused = parse(text.as_bytes(), 128).unwrap_err();
        assert!(refused.pointer.len() < 700, "{} bytes", refused.pointer.len());
        assert!(refused.pointer.ends_with("/…"));
    }
}
