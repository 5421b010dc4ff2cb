//! `opledger keys`: API keys, through the service with an admin's key, or straight in the database with `--tenant`.
//!
//! The second way is how a tenant's first key is made. A secret goes to stdout once and alone, so that it can be sent
//! into a file or a vault without passing a screen; everything else is said on stderr.

mod args;
mod database;

use std::process::ExitCode;

use clap::Subcommand;
use http::Method;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use super::client::Client;
use super::exit::{self, Exit, Failure};
use super::output::{self, Table};
use super::pages::List;
use args::{CreateArgs, ListArgs, RevokeArgs, UpdateArgs, WayArgs};

const EXAMPLES: &str = "\
Examples:
  # The first key of a tenant, straight in the database (the tenant is made if it is missing):
  opledger keys create --tenant acme --role admin --label 'key of the platform team' > admin.key

  # Further keys through the service:
  export OPLEDGER_URL=http://127.0.0.1:8080 OPLEDGER_API_KEY_FILE=admin.key
  opledger keys create --role agent --label 'refund agent' --kind order.refund > agent.key
  opledger keys list
  opledger keys update 4fQ2mX9sLk07TzRb --kind order.refund --kind order.ship
  opledger keys revoke 4fQ2mX9sLk07TzRb";

/// Create, list, change and revoke API keys
#[derive(Debug, Subcommand)]
#[command(after_help = format!("{EXAMPLES}\n\n{}", exit::HELP))]
pub enum Command {
    /// Create a key; its secret is written to stdout, this once
    Create(CreateArgs),
    /// List the keys, revoked ones included
    List(ListArgs),
    /// Revoke a key for good, within a second everywhere
    Revoke(RevokeArgs),
    /// Change a key's label or the kinds it covers
    Update(UpdateArgs),
}

/// A key as lists show it.
#[derive(Debug, Serialize, Deserialize)]
struct Key {
    key_id: String,
    role: String,
    label: String,
    kinds: Option<Vec<String>>,
    created_at: String,
    last_used_at: Option<String>,
    revoked_at: Option<String>,
}

/// Every key as one page, in the form of the service's own.
#[derive(Serialize)]
struct Page<'a> {
    keys: &'a [Key],
    next_cursor: Option<&'a str>,
}

/// A key that was just made.
#[derive(Serialize, Deserialize)]
struct Created {
    key_id: String,
    role: String,
    label: String,
    kinds: Option<Vec<String>>,
    secret: String,
    created_at: String,
}

/// What a new key is to be, as the service takes it.
#[derive(Serialize)]
struct New<'a> {
    role: &'static str,
    label: &'a str,
    #[serde(skip_serializing_if = "Option::is_none")]
    kinds: Option<&'a [String]>,
}

/// A change, as the service takes it.
#[derive(Serialize)]
struct Change<'a> {
    #[serde(skip_serializing_if = "Option::is_none")]
    label: Option<&'a str>,
    #[serde(skip_serializing_if = "Option::is_none")]
    kinds: Option<Option<&'a [String]>>,
}

/// Runs one of the commands; failures are shown here, so that `--json` holds for them too.
pub async fn run(command: Command) -> anyhow::Result<ExitCode> {
    let json = command.way().client.json;
    let ended = match command {
        Command::Create(args) => create(args).await,
        Command::List(args) => list(args).await,
        Command::Revoke(args) => revoke(args).await,
        Command::Update(args) => update(args).await,
    };
    Ok(ended.unwrap_or_else(|failure| output::failed(&failure, json)).into())
}

impl Command {
    fn way(&self) -> &WayArgs {
        match self {
            Self::Create(args) => &args.way,
            Self::List(args) => &args.way,
            Self::Revoke(args) => &args.way,
            Self::Update(args) => &args.way,
        }
    }
}

async fn create(args: CreateArgs) -> Result<Exit, Failure> {
    let way = &args.way;
    let kinds = limit(&args.kinds);
    if let Some(tenant) = &way.tenant {
        let created = database::create(&way.database, tenant, args.role, &args.label, kinds).await?;
        return show_created(&created, way.client.json, None);
    }
    let new = New {
        role: args.role.as_str(),
        label: &args.label,
        kinds,
    };
    let answer = Client::new(&way.client)?
        .send(&way.request(Method::POST, "/v1/keys").body(json(&new)?))
        .await?;
    if !answer.status.is_success() {
        return output::refused(&answer, way.client.json);
    }
    show_created(&answer.parsed()?, way.client.json, Some(&answer.body))
}

/// The secret goes to stdout and nowhere else.
fn show_created(created: &Created, json: bool, answer: Option<&[u8]>) -> Result<Exit, Failure> {
    output::say(&format!(
        "made the key {} ({}, \"{}\", {}); its secret is shown this once",
        created.key_id,
        created.role,
        created.label,
        covered(created.kinds.as_deref()),
    ));
    match answer {
        Some(body) if json => output::print_json(body)?,
        None if json => output::print_document(created)?,
        Some(_) | None => output::print(output::inert(&created.secret) + "\n")?,
    }
    Ok(Exit::Done)
}

async fn list(args: ListArgs) -> Result<Exit, Failure> {
    let way = args.way;
    if let Some(tenant) = &way.tenant {
        let keys = database::list(&way.database, tenant).await?;
        if way.client.json {
            output::print_document(&Page {
                keys: &keys,
                next_cursor: None,
            })?;
        } else {
            output::print(table(&keys))?;
        }
        return Ok(Exit::Done);
    }
    let client = Client::new(&way.client)?;
    let list = List {
        path: "/v1/keys",
        items: "keys",
        filters: Vec::new(),
        page: args.page,
        timeout: way.time.timeout(),
    };
    list.show(&client, way.client.json, |items| Ok(table(&parsed(items)?)))
        .await
}

fn parsed(items: &[Box<RawValue>]) -> Result<Vec<Key>, Failure> {
    let keys = items
        .iter()
        .map(|item| serde_json::from_str(item.get()))
        .collect::<Result<_, _>>();
    keys.map_err(|_| Failure::other("the service listed something that is no API key; is it a later release?"))
}

fn table(keys: &[Key]) -> String {
    let mut table = Table::with_header(&["KEY", "ROLE", "KINDS", "CREATED", "LAST USED", "REVOKED", "LABEL"]);
    for key in keys {
        table.row([
            key.key_id.as_str(),
            &key.role,
            &covered(key.kinds.as_deref()),
            &key.created_at,
            key.last_used_at.as_deref().unwrap_or("–"),
            key.revoked_at.as_deref().unwrap_or("–"),
            &key.label,
        ]);
    }
    table.render()
}

async fn revoke(args: RevokeArgs) -> Result<Exit, Failure> {
    let (way, key_id) = (&args.way, key_id(&args.key_id)?);
    if let Some(tenant) = &way.tenant {
        database::revoke(&way.database, tenant, key_id).await?;
    } else {
        let answer = Client::new(&way.client)?
            .send(&way.request(Method::DELETE, &one(key_id)))
            .await?;
        if !answer.status.is_success() {
            return output::refused(&answer, way.client.json);
        }
    }
    output::say(&format!("revoked {key_id}: within a second every process refuses it"));
    if way.client.json {
        output::print_document(&serde_json::json!({ "key_id": key_id, "revoked": true }))?;
    }
    Ok(Exit::Done)
}

async fn update(args: UpdateArgs) -> Result<Exit, Failure> {
    let (way, key_id) = (&args.way, key_id(&args.key_id)?);
    let kinds = if args.every_kind {
        Some(None)
    } else {
        limit(&args.kinds).map(Some)
    };
    if let Some(tenant) = &way.tenant {
        let key = database::change(&way.database, tenant, key_id, args.label.as_deref(), kinds).await?;
        if way.client.json {
            output::print_document(&key)?
        } else {
            output::print(table(&[key]))?
        }
        return Ok(Exit::Done);
    }
    let change = Change {
        label: args.label.as_deref(),
        kinds,
    };
    let request = way.request(Method::PATCH, &one(key_id)).body(json(&change)?);
    let answer = Client::new(&way.client)?.send(&request).await?;
    if !answer.status.is_success() {
        return output::refused(&answer, way.client.json);
    }
    let key: Key = answer.parsed()?;
    if way.client.json {
        output::print_json(&answer.body)?
    } else {
        output::print(table(&[key]))?
    }
    Ok(Exit::Done)
}

/// No kinds given is no limit.
fn limit(kinds: &[String]) -> Option<&[String]> {
    Some(kinds).filter(|kinds| !kinds.is_empty())
}

fn covered(kinds: Option<&[String]>) -> String {
    kinds.map_or_else(|| "every kind".to_owned(), |kinds| kinds.join(","))
}

fn one(key_id: &str) -> String {
    format!("/v1/keys/{key_id}")
}

fn json(body: &impl Serialize) -> Result<Vec<u8>, Failure> {
    serde_json::to_vec(body).map_err(|error| Failure::other(format!("cannot compose the request: {error}")))
}

/// Checked here and not by clap, which shows what it refuses: somebody may have given a whole key.
fn key_id(text: &str) -> Result<&str, Failure> {
    if text.len() == 16 && text.bytes().all(|byte| byte.is_ascii_alphanumeric()) {
        return Ok(text);
    }
    Err(Failure {
        exit: Exit::Usage,
        ..Failure::refused(
            "request-invalid",
            "a key's id is 16 letters and digits: what stands before the secret in a key",
        )
    })
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Parser)]
    struct Line {
        #[command(subcommand)]
        command: Command,
    }

    fn line(words: &str) -> Result<Command, clap::Error> {
        Line::try_parse_from(std::iter::once("keys").chain(words.split(' '))).map(|line| line.command)
    }

    #[test]
    fn a_change_changes_something_and_kinds_are_not_limited_and_lifted_at_once() {
        assert!(line("update 4fQ2mX9sLk07TzRb").is_err());
        assert!(line("update 4fQ2mX9sLk07TzRb --kind a --every-kind").is_err());
        assert!(line("update 4fQ2mX9sLk07TzRb --every-kind --label b").is_ok());
        assert!(line("create --role owner --label a").is_err());
        assert!(line("create --role agent --label a --kind A").is_err());
        assert_eq!(key_id("short").unwrap_err().exit, Exit::Usage);
    }

    #[test]
    fn a_lifted_limit_is_null_and_one_left_alone_is_absent() {
        let text = |change: &Change<'_>| serde_json::to_string(change).unwrap();
        assert_eq!(
            text(&Change {
                label: None,
                kinds: Some(None)
            }),
            r#"{"kinds":null}"#
        );
        assert_eq!(
            text(&Change {
                label: Some("a"),
                kinds: None
            }),
            r#"{"label":"a"}"#
        );
    }

    #[test]
    fn labels_are_inert_in_tables() {
        let key = Key {
            key_id: "k".to_owned(),
            role: "agent".to_owned(),
            label: "a\u{1b}[31m".to_owned(),
            kinds: None,
            created_at: "t".to_owned(),
            last_used_at: None,
            revoked_at: None,
        };
        assert!(!table(&[key]).contains('\u{1b}'));
    }
}
