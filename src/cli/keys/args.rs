//! The arguments of `opledger keys`, and the rules of the service for the way that does not pass it.

use clap::Args;
use http::Method;

use crate::cli::client::{Request, TimeArgs};
use crate::cli::exit;
use crate::cli::pages::PageArgs;
use crate::config::{ClientArgs, DatabaseArgs};
use crate::ledger::key::{InvalidRole, Role};
use crate::ledger::kind::is_kind_name;
use crate::ledger::tenant::Tenant;

/// Through the service, or straight in the database.
#[derive(Debug, Args)]
pub struct WayArgs {
    /// Go straight to the database, for this tenant; without it through the service with an admin's key
    #[arg(long)]
    pub tenant: Option<Tenant>,
    #[command(flatten)]
    pub database: DatabaseArgs,
    #[command(flatten)]
    pub client: ClientArgs,
    #[command(flatten)]
    pub time: TimeArgs,
}

#[derive(Debug, Args)]
#[command(after_help = exit::HELP)]
pub struct CreateArgs {
    /// agent submits and reads, approver reads, operator reads everything and settles, admin makes keys
    #[arg(long, value_parser = role)]
    pub role: Role,
    /// What people call the key
    #[arg(long, value_parser = label)]
    pub label: String,
    /// Limit the key to this kind; may be given again
    #[arg(long = "kind", value_name = "KIND", value_parser = kind)]
    pub kinds: Vec<String>,
    #[command(flatten)]
    pub way: WayArgs,
}

#[derive(Debug, Args)]
#[command(after_help = exit::HELP)]
pub struct ListArgs {
    #[command(flatten)]
    pub page: PageArgs,
    #[command(flatten)]
    pub way: WayArgs,
}

#[derive(Debug, Args)]
#[command(after_help = exit::HELP)]
pub struct RevokeArgs {
    /// The key's id: the 16 characters before its secret
    pub key_id: String,
    #[command(flatten)]
    pub way: WayArgs,
}

#[derive(Debug, Args)]
#[command(after_help = exit::HELP)]
#[group(id = "change", required = true, multiple = true, args = ["label", "kinds", "every_kind"])]
pub struct UpdateArgs {
    /// The key's id: the 16 characters before its secret
    pub key_id: String,
    /// Call it this from now on
    #[arg(long, value_parser = label)]
    pub label: Option<String>,
    /// Limit the key to this kind; may be given again
    #[arg(long = "kind", value_name = "KIND", value_parser = kind, conflicts_with = "every_kind")]
    pub kinds: Vec<String>,
    /// Lift the limit to kinds
    #[arg(long)]
    pub every_kind: bool,
    #[command(flatten)]
    pub way: WayArgs,
}

impl WayArgs {
    pub fn request(&self, method: Method, path: &str) -> Request {
        Request::new(method, path, self.time.timeout())
    }
}

fn role(name: &str) -> Result<Role, String> {
    name.parse().map_err(|error: InvalidRole| error.to_string())
}

fn label(text: &str) -> Result<String, String> {
    if text.is_empty() || text.len() > 200 || text.chars().any(char::is_control) {
        return Err("a label is 1 to 200 bytes without control characters".to_owned());
    }
    Ok(text.to_owned())
}

fn kind(name: &str) -> Result<String, String> {
    if is_kind_name(name) {
        Ok(name.to_owned())
    } else {
        Err("the name of a kind is 1 to 100 of a-z, 0-9, _, - and ., beginning with a letter".to_owned())
    }
}
