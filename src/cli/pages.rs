//! Lists of the service, page by page, for every command that shows one.

use std::collections::HashMap;
use std::time::Duration;

use http::Method;
use serde_json::value::RawValue;

use super::client::answer::Answer;
use super::client::{Client, Request};
use super::exit::{Exit, Failure};
use super::output;

/// Largest page that the service gives.
const LARGEST_PAGE: u16 = 500;

/// Which page of a list.
#[derive(Debug, Clone, clap::Args)]
pub struct PageArgs {
    /// Most items on a page [default: 50, with --all 500]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u16).range(1..=i64::from(LARGEST_PAGE)))]
    limit: Option<u16>,
    /// The page after this cursor of the page before
    #[arg(long)]
    cursor: Option<String>,
    /// Every page, as one list
    #[arg(long)]
    all: bool,
}

/// What to list.
#[derive(Debug)]
pub struct List {
    pub path: &'static str,
    /// The member of a page that holds the items.
    pub items: &'static str,
    pub filters: Vec<(&'static str, String)>,
    pub page: PageArgs,
    pub timeout: Duration,
}

/// What a list came to.
pub enum Listed {
    Found {
        items: Vec<Box<RawValue>>,
        next_cursor: Option<String>,
    },
    Refused(Answer),
}

/// One page; the items as they came.
#[derive(Debug)]
struct Page {
    items: Vec<Box<RawValue>>,
    next_cursor: Option<String>,
}

impl List {
    /// Shows one page, or with `--all` every page as one document.
    pub async fn show(
        self,
        client: &Client,
        json: bool,
        render: impl Fn(&[Box<RawValue>]) -> Result<String, Failure>,
    ) -> Result<Exit, Failure> {
        let name = self.items;
        let (found, next_cursor) = match self.fetch(client).await? {
            Listed::Refused(answer) => return output::refused(&answer, json),
            Listed::Found { items, next_cursor } => (items, next_cursor),
        };
        if json {
            output::print_json(document(name, &found, next_cursor.as_deref()).as_bytes())?;
            return Ok(Exit::Done);
        }
        output::print(render(&found)?)?;
        say_more(next_cursor.as_deref());
        Ok(Exit::Done)
    }

    /// One page, or with `--all` every page.
    pub async fn fetch(mut self, client: &Client) -> Result<Listed, Failure> {
        let mut found = Vec::new();
        let next_cursor = loop {
            let answer = client
                .send(&Request::new(Method::GET, self.path_and_query(), self.timeout))
                .await?;
            if !answer.status.is_success() {
                return Ok(Listed::Refused(answer));
            }
            let page = self.read(&answer)?;
            found.extend(page.items);
            match page.next_cursor {
                // The same cursor again would go on for ever.
                Some(next) if self.page.all && self.page.cursor.as_ref() != Some(&next) => {
                    self.page.cursor = Some(next)
                }
                next => break next,
            }
        };
        Ok(Listed::Found {
            items: found,
            next_cursor,
        })
    }

    fn path_and_query(&self) -> String {
        let limit = self
            .page
            .limit
            .or(self.page.all.then_some(LARGEST_PAGE))
            .map(|limit| ("limit", limit.to_string()));
        let cursor = self.page.cursor.clone().map(|cursor| ("cursor", cursor));
        let mut path = self.path.to_owned();
        for (index, (name, value)) in self.filters.iter().cloned().chain(limit).chain(cursor).enumerate() {
            path.push(if index == 0 { '?' } else { '&' });
            path.push_str(name);
            path.push('=');
            path.push_str(&percent_encoded(&value));
        }
        path
    }

    fn read(&self, answer: &Answer) -> Result<Page, Failure> {
        let members: HashMap<String, Box<RawValue>> = answer.parsed()?;
        let member = |name: &str| {
            members
                .get(name)
                .ok_or_else(|| answer.foreign())
                .map(|value| value.get())
        };
        Ok(Page {
            items: serde_json::from_str(member(self.items)?).map_err(|_| answer.foreign())?,
            next_cursor: serde_json::from_str(member("next_cursor")?).map_err(|_| answer.foreign())?,
        })
    }
}

/// Says how to see what was left out.
pub fn say_more(next_cursor: Option<&str>) {
    if let Some(cursor) = next_cursor {
        output::say(&format!("there is more: --all, or --cursor {cursor}"));
    }
}

/// All items as one page, in the form of the service's own.
fn document(name: &str, items: &[Box<RawValue>], next_cursor: Option<&str>) -> String {
    let items: Vec<&str> = items.iter().map(|item| item.get()).collect();
    let next_cursor = serde_json::Value::from(next_cursor);
    format!("{{\"{name}\":[{}],\"next_cursor\":{next_cursor}}}", items.join(","))
}

fn percent_encoded(value: &str) -> String {
    let mut encoded = String::with_capacity(value.len());
    for byte in value.bytes() {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            encoded.push(char::from(byte));
        } else {
            encoded.push_str(&format!("%{byte:02X}"));
        }
    }
    encoded
}

#[cfg(test)]
mod tests {
    use super::*;

    fn list(all: bool) -> List {
        List {
            path: "/v1/operations",
            items: "operations",
            filters: vec![("run_id", "a b&c=é".to_owned())],
            page: PageArgs {
                limit: None,
                cursor: Some("x+y".to_owned()),
                all,
            },
            timeout: Duration::from_secs(1),
        }
    }

    #[test]
    fn filters_are_encoded_and_only_what_was_given_is_sent() {
        assert_eq!(
            list(false).path_and_query(),
            "/v1/operations?run_id=a%20b%26c%3D%C3%A9&cursor=x%2By"
        );
        assert!(list(true).path_and_query().contains("&limit=500&cursor="));
    }

    #[test]
    fn pages_are_joined_digit_for_digit() {
        let items: Vec<Box<RawValue>> = serde_json::from_str(r#"[{"n":12233344445555567},0.1000]"#).unwrap();
        let joined = document("operations", &items, None);
        assert_eq!(
            joined,
            r#"{"operations":[{"n":12233344445555567},0.1000],"next_cursor":null}"#
        );
        assert_eq!(
            document("keys", &[], Some("a\"b")),
            r#"{"keys":[],"next_cursor":"a\"b"}"#
        );
    }
}
