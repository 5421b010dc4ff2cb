//! `/v1/keys`: the API keys of the caller's tenant.

use std::sync::Arc;

use axum::Router;
use axum::body::Body;
use axum::extract::{RawQuery, State};
use axum::response::Response;
use axum::routing::{get, patch};
use http::{HeaderMap, StatusCode};
use serde::Serialize;

use super::App;
use super::answer;
use super::extract::{self, Segment};
use super::members::{members, parsed, text, unknown};
use super::problem::{Code, Problem};
use super::query::{self, Parameters};
use crate::engine::intake::refusal;
use crate::ledger::canonical::{Node, Value};
use crate::ledger::key::{self, Change, Key, NewKey, Role, Secret};
use crate::ledger::kind::is_kind_name;
use crate::ledger::receipt::format_time;
use crate::postgres::error::Error as DatabaseError;
use crate::postgres::session::{Limits, Session};

const LIMITS: Limits = Limits {
    lock: std::time::Duration::from_secs(2),
    statement: std::time::Duration::from_secs(5),
};

/// Most kinds a key may be limited to.
const MOST_KINDS: usize = 100;

pub fn routes() -> Router<Arc<App>> {
    Router::new()
        .route("/v1/keys", get(list).post(create))
        .route("/v1/keys/{key_id}", patch(change).delete(revoke))
}

/// `POST /v1/keys`: a new key; its secret is in this answer and nowhere else.
async fn create(State(app): State<Arc<App>>, headers: HeaderMap, body: Body) -> Result<Response, Problem> {
    let caller = extract::caller(&app, &headers, &[Role::Admin]).await?;
    let body = extract::json_body(&app, &headers, body).await?;
    let new = new_key(&parsed(&body)?)?;
    let secret = Secret::generate(&caller.tenant).map_err(|error| {
        tracing::error!(error = %error, "no randomness for a new key");
        Problem::new(Code::Internal, "the key could not be made; the log says why")
    })?;
    let key = write(&app, async |session| key::create(session, &secret, &new).await).await?;
    tracing::info!(created = key.key_id, role = key.role, "key created");
    let document = Created {
        key_id: &key.key_id,
        role: &key.role,
        label: &key.label,
        kinds: key.kinds.as_deref(),
        secret: secret.reveal(),
        created_at: format_time(key.created_at),
    };
    Ok(answer::json(StatusCode::CREATED, &document))
}

/// `GET /v1/keys`: by key id, revoked ones included.
async fn list(State(app): State<Arc<App>>, RawQuery(query): RawQuery, headers: HeaderMap) -> Result<Response, Problem> {
    let caller = extract::caller(&app, &headers, &[Role::Admin]).await?;
    let mut parameters = Parameters::parse(query.as_deref())?;
    let limit = parameters.limit()?;
    let after = parameters.cursor()?.map(|(_, key_id)| key_id).unwrap_or_default();
    parameters.finish()?;
    let mut keys = write(&app, async |session| {
        key::list(session, &caller.tenant, &after, limit + 1).await
    })
    .await?;
    let more = i64::try_from(keys.len()).is_ok_and(|count| count > limit);
    if more {
        keys.pop();
    }
    let next_cursor = keys
        .last()
        .filter(|_| more)
        .map(|last| query::cursor("key", &last.key_id));
    let keys: Vec<Document> = keys.into_iter().map(Document::from).collect();
    Ok(answer::json(
        StatusCode::OK,
        &serde_json::json!({ "keys": keys, "next_cursor": next_cursor }),
    ))
}

/// `PATCH /v1/keys/{key_id}`: label and kinds.
async fn change(
    State(app): State<Arc<App>>,
    key_id: Segment,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Problem> {
    let caller = extract::caller(&app, &headers, &[Role::Admin]).await?;
    let body = extract::json_body(&app, &headers, body).await?;
    let change = changes(&parsed(&body)?)?;
    let key_id = well_formed(key_id.text()?)?;
    let changed = write(&app, async |session| {
        key::change(session, &caller.tenant, key_id, &change).await
    })
    .await?;
    let key = changed.ok_or_else(Problem::not_found)?;
    app.accounts.forget();
    Ok(answer::json(StatusCode::OK, &Document::from(key)))
}

/// `DELETE /v1/keys/{key_id}`: revokes it, on every process within a second.
async fn revoke(
    State(app): State<Arc<App>>,
    key_id: Segment,
    headers: HeaderMap,
    body: Body,
) -> Result<Response, Problem> {
    let caller = extract::caller(&app, &headers, &[Role::Admin]).await?;
    extract::no_body(&app, body).await?;
    let key_id = well_formed(key_id.text()?)?;
    let known = write(&app, async |session| key::revoke(session, &caller.tenant, key_id).await).await?;
    if !known {
        return Err(Problem::not_found());
    }
    app.accounts.forget();
    tracing::info!(revoked = key_id, "key revoked");
    let mut response = Response::new(Body::empty());
    *response.status_mut() = StatusCode::NO_CONTENT;
    Ok(response)
}

async fn write<T>(
    app: &App,
    statements: impl AsyncFnOnce(&mut Session) -> Result<T, DatabaseError>,
) -> Result<T, Problem> {
    let written = async {
        let mut session = app.pool.transaction(LIMITS).await?;
        let written = statements(&mut session).await?;
        session.commit().await?;
        Ok(written)
    };
    written.await.map_err(|error: DatabaseError| refusal(&error).into())
}

/// A key id that could exist; others are as unknown as those that do not.
fn well_formed(key_id: &str) -> Result<&str, Problem> {
    let good = key_id.len() == 16 && key_id.bytes().all(|byte| byte.is_ascii_alphanumeric());
    if good { Ok(key_id) } else { Err(Problem::not_found()) }
}

fn new_key(body: &Node<'_>) -> Result<NewKey, Problem> {
    let mut role = None;
    let mut label = None;
    let mut kinds = None;
    for (name, value) in members(body)? {
        match name {
            "role" => {
                let name = text("/role", value)?;
                role = Some(
                    name.parse::<Role>()
                        .map_err(|error| Problem::member("/role", error.to_string()))?,
                );
            }
            "label" => label = Some(label_of(value)?),
            "kinds" => kinds = kinds_of(value)?,
            _ => return Err(unknown(name)),
        }
    }
    Ok(NewKey {
        role: role
            .ok_or_else(|| Problem::member("/role", "\"role\" is missing: agent, approver, operator or admin"))?,
        label: label.ok_or_else(|| Problem::member("/label", "\"label\" is missing: say what the key is for"))?,
        kinds,
    })
}

fn changes(body: &Node<'_>) -> Result<Change, Problem> {
    let mut change = Change::default();
    for (name, value) in members(body)? {
        match name {
            "label" => change.label = Some(label_of(value)?),
            "kinds" => change.kinds = Some(kinds_of(value)?),
            _ => return Err(unknown(name)),
        }
    }
    if change.label.is_none() && change.kinds.is_none() {
        return Err(Problem::member(
            "",
            "nothing to change: send \"label\", \"kinds\" or both",
        ));
    }
    Ok(change)
}

fn label_of(node: &Node<'_>) -> Result<String, Problem> {
    let label = text("/label", node)?;
    if !(1..=200).contains(&label.chars().count()) || label.chars().any(char::is_control) {
        return Err(Problem::member(
            "/label",
            "a label is 1 to 200 characters, none of them a control character",
        ));
    }
    Ok(label.to_owned())
}

fn kinds_of(node: &Node<'_>) -> Result<Option<Vec<String>>, Problem> {
    let items = match node.value() {
        Value::Null => return Ok(None),
        Value::Array(items) if (1..=MOST_KINDS).contains(&items.len()) => items,
        _ => {
            return Err(Problem::member(
                "/kinds",
                "kinds is null for every kind, or a list of 1 to 100 names",
            ));
        }
    };
    let mut kinds: Vec<String> = Vec::with_capacity(items.len());
    for (index, item) in items.iter().enumerate() {
        let pointer = format!("/kinds/{index}");
        let name = text(&pointer, item)?;
        if !is_kind_name(name) {
            return Err(Problem::member(pointer, "this is not the name of a kind"));
        }
        if kinds.iter().any(|known| known == name) {
            return Err(Problem::member(pointer, "this kind is listed twice"));
        }
        kinds.push(name.to_owned());
    }
    Ok(Some(kinds))
}

#[derive(Serialize)]
struct Created<'a> {
    key_id: &'a str,
    role: &'a str,
    label: &'a str,
    kinds: Option<&'a [String]>,
    secret: &'a str,
    created_at: String,
}

#[derive(Serialize)]
struct Document {
    key_id: String,
    role: String,
    label: String,
    kinds: Option<Vec<String>>,
    created_at: String,
    last_used_at: Option<String>,
    revoked_at: Option<String>,
}

impl From<Key> for Document {
    fn from(key: Key) -> Self {
        Self {
            key_id: key.key_id,
            role: key.role,
            label: key.label,
            kinds: key.kinds,
            created_at: format_time(key.created_at),
            last_used_at: key.last_used_at.map(format_time),
            revoked_at: key.revoked_at.map(format_time),
        }
    }
}
