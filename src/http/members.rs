//! Small JSON bodies, member by member; what is wrong is named by its pointer.

use super::problem::Problem;
use crate::ledger::canonical::{self, Node, Value};

/// Deepest nesting of these bodies.
const MAX_DEPTH: usize = 32;

pub fn parsed(body: &[u8]) -> Result<Node<'_>, Problem> {
    canonical::parse(body, MAX_DEPTH).map_err(|invalid| Problem::member(invalid.pointer, invalid.reason.to_string()))
}

pub fn members<'a>(body: &'a Node<'a>) -> Result<impl Iterator<Item = (&'a str, &'a Node<'a>)>, Problem> {
    match body.value() {
        Value::Object(members) => Ok(members.iter().map(|(name, value)| (name.as_ref(), value))),
        _ => Err(Problem::member("", "the body must be a JSON object")),
    }
}

pub fn text<'a>(pointer: &str, node: &'a Node<'a>) -> Result<&'a str, Problem> {
    match node.value() {
        Value::String(text) => Ok(text),
        _ => Err(Problem::member(pointer, "must be a string")),
    }
}

/// A whole number, in whichever spelling.
pub fn whole(pointer: &str, node: &Node<'_>, least: i32, most: i32) -> Result<i32, Problem> {
    let number = node.raw().parse::<f64>().ok().filter(|number| number.fract() == 0.0);
    match number {
        Some(number) if (f64::from(least)..=f64::from(most)).contains(&number) =>
        {
            #[expect(clippy::cast_possible_truncation, reason = "within the range of i32")]
            Ok(number as i32)
        }
        Some(_) | None => Err(Problem::member(
            pointer,
            format!("must be a whole number from {least} to {most}"),
        )),
    }
}

pub fn unknown(name: &str) -> Problem {
    let shown: String = name.chars().take(60).collect();
    let pointer = format!("/{}", shown.replace('~', "~0").replace('/', "~1"));
    Problem::member(pointer, "there is no such member; remove it or correct its name")
}
