//! What holds for every text, tried on texts made at random.

use proptest::collection::{btree_map, vec};
use proptest::prelude::*;
use serde_json::{Map, Value as Json};

use super::{Node, parse};

fn canonical(text: &str) -> Option<Vec<u8>> {
    parse(text.as_bytes(), 128).ok().map(|node| node.canonical())
}

fn text() -> impl Strategy<Value = String> {
    vec(
        prop_oneof![3 => any::<char>(), 2 => proptest::char::range('\u{1}', '\u{7f}')],
        0..8,
    )
    .prop_map(|characters| characters.into_iter().filter(|character| *character != '\0').collect())
}

fn double() -> impl Strategy<Value = f64> {
    let short =
        (any::<i32>(), -30..30_i32).prop_map(|(mantissa, exponent)| f64::from(mantissa) * 10_f64.powi(exponent));
    // Quarters of this size lie just between two spellings.
    let quarters = (1_u64 << 52..1 << 53).prop_map(|quarters| quarters as f64 / 4.0);
    prop_oneof![any::<f64>(), short, quarters].prop_filter("finite", |double| double.is_finite())
}

fn scalar() -> impl Strategy<Value = Json> {
    prop_oneof![
        Just(Json::Null),
        any::<bool>().prop_map(Json::from),
        any::<i32>().prop_map(Json::from),
        double().prop_map(Json::from),
        text().prop_map(Json::from),
    ]
}

fn tree() -> impl Strategy<Value = Json> {
    scalar().prop_recursive(4, 48, 12, |inner| {
        prop_oneof![
            vec(inner.clone(), 0..6).prop_map(Json::from),
            btree_map(text(), inner, 0..12).prop_map(|members| Json::Object(members.into_iter().collect())),
        ]
    })
}

/// The same value in another spelling: order of members, blanks, escapes and number formats come from `choices`.
fn respelled(value: &Json, choices: &mut impl Iterator<Item = usize>, out: &mut String) {
    let blanks = ["", " ", "\n", "\t\r "];
    let mut choose = |of: usize| choices.next().unwrap_or(0) % of;
    out.push_str(blanks[choose(4)]);
    match value {
        Json::Null | Json::Bool(_) => out.push_str(&value.to_string()),
        Json::Number(number) => match (number.as_i64(), number.as_f64(), choose(4)) {
            (Some(integer), _, 1) => out.push_str(&format!("{integer}.00E-0")),
            (Some(integer), _, 2) => out.push_str(&format!("{integer}000e-3")),
            (Some(integer), _, _) => out.push_str(&integer.to_string()),
            // Not by the standard library's formatting, which may take the odd one of two equally near spellings.
            (None, Some(double), 0) => out.push_str(&ryu_js::Buffer::new().format(double).replace('e', "E")),
            (None, Some(double), 1) => {
                out.push_str(&with_exponent(&ryu_js::Buffer::new().format(double).replace('+', "")))
            }
            (None, _, _) => out.push_str(&number.to_string()),
        },
        Json::String(string) => respelled_string(string, &mut choose, out),
        Json::Array(items) => {
            out.push('[');
            for (index, item) in items.iter().enumerate() {
                out.push_str(if index > 0 { "," } else { "" });
                respelled(item, choices, out);
            }
            out.push(']');
        }
        Json::Object(members) => {
            let mut members: Vec<_> = members.iter().collect();
            let turn = choose(members.len().max(1));
            members.rotate_left(turn);
            if choose(2) == 1 {
                members.reverse();
            }
            out.push('{');
            for (index, (name, member)) in members.into_iter().enumerate() {
                out.push_str(if index > 0 { "," } else { "" });
                respelled(&Json::String(name.clone()), choices, out);
                out.push(':');
                respelled(member, choices, out);
            }
            out.push('}');
        }
    }
    out.push_str(blanks[choices.next().unwrap_or(0) % 4]);
}

/// The same number, its digits written out as a whole number.
fn with_exponent(literal: &str) -> String {
    let (negative, digits, power) = decimal(literal);
    format!(
        "{}{}e{power}",
        if negative { "-" } else { "" },
        if digits.is_empty() { "0" } else { &digits }
    )
}

fn respelled_string(string: &str, choose: &mut impl FnMut(usize) -> usize, out: &mut String) {
    out.push('"');
    for character in string.chars() {
        if choose(3) == 0 || character.is_control() || matches!(character, '"' | '\\') {
            for unit in character.encode_utf16(&mut [0; 2]) {
                out.push_str(&if choose(2) == 0 {
                    format!("\\u{unit:04x}")
                } else {
                    format!("\\u{unit:04X}")
                });
            }
        } else if character == '/' {
            out.push_str("\\/");
        } else {
            out.push(character);
        }
    }
    out.push('"');
}

/// What RFC 8785 asks for, by another road: sorted by real UTF-16, numbers by `ryu-js`, strings by `serde_json`.
fn expected(value: &Json) -> String {
    match value {
        Json::Null | Json::Bool(_) => value.to_string(),
        Json::Number(number) => ryu_js::Buffer::new().format(number.as_f64().unwrap()).to_owned(),
        Json::String(_) => value.to_string(),
        Json::Array(items) => format!("[{}]", items.iter().map(expected).collect::<Vec<_>>().join(",")),
        Json::Object(members) => {
            let mut members: Vec<_> = members.iter().collect();
            members.sort_by_key(|(name, _)| name.encode_utf16().collect::<Vec<_>>());
            let member = |(name, value): (&String, &Json)| format!("{}:{}", Json::from(name.as_str()), expected(value));
            format!("{{{}}}", members.into_iter().map(member).collect::<Vec<_>>().join(","))
        }
    }
}

/// A literal's decimal value: digits without zeros at either end, and the power of ten of the last. Slow and simple.
fn decimal(literal: &str) -> (bool, String, i64) {
    let (mantissa, exponent) = literal.split_once('e').unwrap_or((literal, "0"));
    let (whole, fraction) = mantissa.split_once('.').unwrap_or((mantissa, ""));
    let digits = format!("{}{fraction}", whole.trim_start_matches('-'));
    let kept = digits.trim_end_matches('0');
    let power = exponent.parse::<i64>().unwrap() - fraction.len() as i64 + (digits.len() - kept.len()) as i64;
    let kept = kept.trim_start_matches('0').to_owned();
    if kept.is_empty() {
        (false, kept, 0)
    } else {
        (literal.starts_with('-'), kept, power)
    }
}

fn double_gives_back(literal: &str) -> bool {
    let double: f64 = literal.parse().unwrap();
    double.is_finite() && decimal(&ryu_js::Buffer::new().format(double).replace('+', "")) == decimal(literal)
}

/// Close to each other and close to where doubles run out of digits, so that equal values meet.
fn literal() -> impl Strategy<Value = String> {
    let mantissa = prop_oneof![
        "-?(0|[1-9][0-9]{0,2})(\\.[0-9]{1,3})?",
        "-?90071992547409[0-9]{2}(\\.0{1,3})?",
        "-?[1-9][0-9]{14,20}",
        "-?[0-9]\\.[0-9]{13,19}".prop_map(|text| text),
    ];
    (
        mantissa,
        prop_oneof![
            Just(String::new()),
            (-4..5).prop_map(|e| format!("e{e}")),
            (-345..320).prop_map(|e| format!("e{e}"))
        ],
    )
        .prop_map(|(mantissa, exponent)| mantissa + &exponent)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 512, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn canonical_text_is_what_the_rfc_asks_for(tree in tree()) {
        let written = canonical(&tree.to_string()).unwrap();
        prop_assert_eq!(String::from_utf8(written).unwrap(), expected(&tree));
    }

    #[test]
    fn canonical_text_read_again_is_itself(tree in tree()) {
        let once = canonical(&tree.to_string()).unwrap();
        prop_assert_eq!(&parse(&once, 128).unwrap().canonical(), &once);
    }

    #[test]
    fn spelling_never_changes_the_canonical_text(tree in tree(), choices in vec(any::<usize>(), 200)) {
        let mut text = String::new();
        respelled(&tree, &mut choices.into_iter(), &mut text);
        prop_assert_eq!(canonical(&text), canonical(&tree.to_string()), "{}", text);
    }

    #[test]
    fn a_changed_value_changes_the_canonical_text(a in tree(), b in tree()) {
        let same = parse(a.to_string().as_bytes(), 128).unwrap().to_json() == parse(b.to_string().as_bytes(), 128).unwrap().to_json();
        prop_assert_eq!(canonical(&a.to_string()) == canonical(&b.to_string()), same);
    }

    #[test]
    fn the_tree_for_validators_has_the_same_canonical_text(tree in tree()) {
        let text = tree.to_string();
        let node = parse(text.as_bytes(), 128).unwrap();
        prop_assert_eq!(parse(node.to_json().to_string().as_bytes(), 128).unwrap().canonical(), node.canonical());
    }

    #[test]
    fn a_number_passes_exactly_when_a_double_gives_it_back(literal in literal()) {
        prop_assert_eq!(canonical(&literal).is_some(), double_gives_back(&literal), "{}", literal);
    }

    #[test]
    fn numbers_are_equal_exactly_when_their_decimal_values_are(a in literal(), b in literal()) {
        if let (Some(one), Some(other)) = (canonical(&a), canonical(&b)) {
            prop_assert_eq!(one == other, decimal(&a) == decimal(&b), "{} {}", a, b);
        }
    }

    #[test]
    fn a_number_and_its_shifted_spelling_are_equal(literal in "-?[1-9][0-9]{0,14}", shift in 0..20_usize) {
        let shifted = format!("{literal}{}e-{shift}", "0".repeat(shift));
        prop_assert_eq!(canonical(&shifted), canonical(&literal));
    }

    #[test]
    fn every_double_passes_in_its_shortest_spelling(double in double()) {
        let shortest = ryu_js::Buffer::new().format(double).to_owned();
        let written = String::from_utf8(canonical(&shortest).unwrap()).unwrap();
        prop_assert_eq!(&written, &shortest);
        prop_assert_eq!(written.parse::<f64>().unwrap(), double);
        // By another road: the standard library differs at most in the last digit, where two are as near.
        let (_, other, _) = decimal(&format!("{double:e}"));
        let (_, digits, _) = decimal(&written.replace('+', ""));
        let is_even = digits.ends_with(['0', '2', '4', '6', '8']);
        prop_assert!(other == digits || other.len() == digits.len() && is_even, "{} {}", other, digits);
    }

    #[test]
    fn arbitrary_bytes_never_panic(bytes in vec(any::<u8>(), 0..64)) {
        let _ = parse(&bytes, 8).map(|node| node.canonical());
    }

    #[test]
    fn nearly_json_never_panics(text in "[\\[\\]{}:,\"\\\\u0-9a-fA-F.eE+\\- ntrué😀\u{0}]{0,40}") {
        if let Err(refused) = parse(text.as_bytes(), 8) {
            prop_assert!(refused.to_string().len() < 400);
        }
    }

    #[test]
    fn damaged_json_is_refused_or_read_and_never_panics(tree in tree(), at in any::<prop::sample::Index>(), byte in any::<u8>()) {
        let mut bytes = tree.to_string().into_bytes();
        let at = at.index(bytes.len());
        bytes[at] = byte;
        if let Ok(node) = parse(&bytes, 128) {
            let again = node.canonical();
            prop_assert_eq!(parse(&again, 128).unwrap().canonical(), again);
        }
    }

    #[test]
    fn everything_accepted_is_json_for_others_too(tree in tree(), choices in vec(any::<usize>(), 200)) {
        let mut text = String::new();
        respelled(&tree, &mut choices.into_iter(), &mut text);
        prop_assert!(serde_json::from_str::<Json>(&text).is_ok());
        let raw = |node: &Node| node.raw().to_owned();
        prop_assert_eq!(raw(&parse(text.as_bytes(), 128).unwrap()), text.trim_matches([' ', '\t', '\r', '\n']));
    }
}

#[test]
fn an_order_of_members_is_an_order_for_every_two_names() {
    let names = [
        "",
        "a",
        "\u{7f}",
        "\u{80}",
        "\u{7ff}",
        "\u{800}",
        "\u{d7ff}",
        "\u{e000}",
        "\u{ffff}",
        "\u{10000}",
        "\u{10ffff}",
    ];
    for a in names {
        for b in names {
            let (a, b) = (format!("x{a}y"), format!("x{b}y"));
            if a == b {
                continue;
            }
            let mut members = Map::new();
            members.insert(a, Json::from(1));
            members.insert(b, Json::from(2));
            let tree = Json::Object(members);
            assert_eq!(
                String::from_utf8(canonical(&tree.to_string()).unwrap()).unwrap(),
                expected(&tree)
            );
        }
    }
}
