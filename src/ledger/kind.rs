//! Kinds: the registered types of operations, each with the function that performs it.

use std::collections::HashMap;
use std::fmt;
use std::str::FromStr;
use std::sync::Arc;
use std::time::Duration;

use super::canonical::Node;
use crate::postgres::error::{Error, doing};
use crate::postgres::session::Session;

/// Longest name of a kind.
const MAX_NAME: usize = 100;

/// One registered type of operation.
pub struct Kind {
    pub name: Arc<str>,
    pub handler: Handler,
    /// Compiled JSON Schema of the payload.
    pub schema: Option<jsonschema::Validator>,
    /// How long a receipt is kept.
    pub retention: Duration,
    /// Longest run of the handler.
    pub timeout: Duration,
    /// Whether it may share a transaction's commit with others; off for handlers that take long.
    pub group_commit: bool,
}

impl fmt::Debug for Kind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Kind")
            .field("name", &self.name)
            .field("handler", &self.handler)
            .finish_non_exhaustive()
    }
}

/// A payload that its kind's schema refuses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SchemaViolation {
    /// JSON pointer into the payload.
    pub pointer: String,
    pub detail: String,
}

impl Kind {
    /// Checks a payload against the kind's schema; the first violation is reported.
    pub fn validate(&self, payload: &Node<'_>) -> Result<(), SchemaViolation> {
        validate(self.schema.as_ref(), payload)
    }
}

/// Checks a payload against a kind's schema, if it has one.
pub fn validate(schema: Option<&jsonschema::Validator>, payload: &Node<'_>) -> Result<(), SchemaViolation> {
    let Some(schema) = schema else { return Ok(()) };
    let value = payload.to_json();
    schema.validate(&value).map_err(|error| SchemaViolation {
        pointer: error.instance_path().to_string(),
        detail: shortened(&error.masked().to_string()),
    })
}

fn shortened(text: &str) -> String {
    const MOST: usize = 300;
    match text.char_indices().nth(MOST) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

/// A handler's name, `schema.function`, both plain identifiers, so that it needs no escaping but quotes.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Handler {
    schema: String,
    function: String,
    quoted: Arc<str>,
}

#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("a handler is written schema.function, each of a-z, 0-9 and _, not starting with a digit")]
pub struct InvalidHandler;

impl FromStr for Handler {
    type Err = InvalidHandler;

    fn from_str(name: &str) -> Result<Self, InvalidHandler> {
        let (schema, function) = name.split_once('.').ok_or(InvalidHandler)?;
        let identifier = |part: &str| {
            (1..=63).contains(&part.len())
                && part
                    .bytes()
                    .all(|byte| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'_')
                && !part.starts_with(|first: char| first.is_ascii_digit())
        };
        if !identifier(schema) || !identifier(function) {
            return Err(InvalidHandler);
        }
        let quoted = format!("\"{schema}\".\"{function}\"").into();
        Ok(Self {
            schema: schema.to_owned(),
            function: function.to_owned(),
            quoted,
        })
    }
}

impl fmt::Display for Handler {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.schema, self.function)
    }
}

impl Handler {
    /// Both parts in double quotes, as `ledger.apply` takes it.
    pub fn quoted(&self) -> &str {
        &self.quoted
    }
}

/// The name of a kind: 1 to 100 of `a-z`, `0-9`, `_`, `-` and `.`, beginning with a letter.
pub fn is_kind_name(name: &str) -> bool {
    let alphabet = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || b"_-.".contains(&byte);
    (1..=MAX_NAME).contains(&name.len())
        && name.bytes().all(alphabet)
        && name.starts_with(|first: char| first.is_ascii_lowercase())
}

/// Every kind of one configuration.
#[derive(Debug, Default)]
pub struct Kinds(HashMap<Arc<str>, Arc<Kind>>);

impl Kinds {
    pub fn get(&self, name: &str) -> Option<&Arc<Kind>> {
        self.0.get(name)
    }

    /// All kinds, by name.
    pub fn iter(&self) -> impl Iterator<Item = &Arc<Kind>> {
        let mut kinds: Vec<_> = self.0.values().collect();
        kinds.sort_by(|left, right| left.name.cmp(&right.name));
        kinds.into_iter()
    }
}

impl FromIterator<Kind> for Kinds {
    fn from_iter<Iter: IntoIterator<Item = Kind>>(kinds: Iter) -> Self {
        Self(
            kinds
                .into_iter()
                .map(|kind| (kind.name.clone(), Arc::new(kind)))
                .collect(),
        )
    }
}

/// What is wrong with a handler in the database; `None` if it can be called.
pub async fn handler_fault(session: &mut Session, handler: &Handler) -> Result<Option<String>, Error> {
    let found = sqlx::query!(
        r#"
        select pg_catalog.format_type(f.prorettype, null) as "returns!",
               has_schema_privilege(n.oid, 'usage') and has_function_privilege(f.oid, 'execute') as "callable!",
               f.prokind = 'f' and not f.proretset as "plain!"
        from pg_catalog.pg_proc f
        join pg_catalog.pg_namespace n on n.oid = f.pronamespace
        where n.nspname = $1 and f.proname = $2
          and f.pronargs = 2
          and f.proargtypes[0] = 'jsonb'::regtype and f.proargtypes[1] = 'jsonb'::regtype
        "#,
        handler.schema,
        handler.function,
    )
    .fetch_optional(&mut *session)
    .await
    .map_err(doing("look the handler up"))?;
    Ok(match found {
        None => Some(format!(
            "there is no function {handler}(payload jsonb, operation jsonb) in this database"
        )),
        Some(found) if found.returns != "jsonb" || !found.plain => Some(format!(
            "{handler}(jsonb, jsonb) must be a plain function that returns jsonb, not {}",
            found.returns
        )),
        Some(found) if !found.callable => Some(format!(
            "this role may not run {handler}; grant usage on schema {} and execute on function {handler}(jsonb, jsonb)",
            handler.schema
        )),
        Some(_) => None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_handler_is_two_plain_identifiers() {
        let handler: Handler = "shop.refund".parse().unwrap();
        assert_eq!(
            (handler.quoted(), handler.to_string().as_str()),
            (r#""shop"."refund""#, "shop.refund")
        );
        for bad in [
            "refund",
            "shop.",
            ".refund",
            "shop.re fund",
            "shop.refund()",
            "a.b.c",
            "shop.\"x",
            "1shop.x",
            "Shop.x",
        ] {
            assert!(bad.parse::<Handler>().is_err(), "{bad}");
        }
    }

    #[test]
    fn kind_names_are_plain() {
        assert!(is_kind_name("order.refund") && is_kind_name("a"));
        for bad in ["", "Order", "1a", ".a", "a b", "a\n", &"a".repeat(101)] {
            assert!(!is_kind_name(bad), "{bad}");
        }
    }
}
