//! Tenants do not exist for one another, and each role may do what it is for.

use serde_json::Value;

use crate::support::client::{Answer, encoded};
use crate::support::contract::{self, Operation};
use crate::support::{Client, Ledger};

/// The same request of somebody else's id and of nobody's must look alike, but for what is new in each answer.
fn comparable(answer: &Answer) -> Answer {
    let mut answer = answer.clone();
    for fresh in ["request-id", "date"] {
        answer.headers.remove(fresh);
    }
    answer
}

/// A body that the route takes, so that the id decides.
fn good_body(operation: &Operation<'_>) -> &'static str {
    match operation.path.rsplit('/').next() {
        Some("resolve") => r#"{"verdict":"failed","version":1,"reason":"taken over"}"#,
        Some("compensate") => r#"{"version":1,"reason":"taken over"}"#,
        Some(_) | None if operation.method == "PATCH" => r#"{"label":"taken over"}"#,
        Some(_) | None => "",
    }
}

async fn send(client: &Client, operation: &Operation<'_>, path: &str, body: &str) -> Answer {
    let headers: &[(&str, &str)] = if body.is_empty() {
        &[]
    } else {
        &[("content-type", "application/json")]
    };
    client.send(operation.method, path, headers, body).await
}

#[tokio::test]
async fn the_same_id_in_two_tenants_is_two_operations() {
    let ledger = Ledger::start().await;
    let (ours, theirs) = (
        ledger.agent(),
        ledger.agent().with_key(&ledger.tenant("other").await["agent"]),
    );
    let body = r#"{"account":"acct-1","amount":500}"#;
    let first = ours.submit("same", "account.deposit", body).await.succeeded();
    let equal = theirs.submit("same", "account.deposit", body).await.succeeded();
    assert!(!equal.is_replay());
    assert_ne!(equal.body, first.body);
    ours.deposit("another", "acct-1", 1).await.succeeded();
    assert!(!theirs.deposit("another", "acct-1", 2).await.succeeded().is_replay());
    assert_eq!(
        ours.submit("same", "account.deposit", body).await.succeeded().body,
        first.body
    );
    for tenant in ["demo", "other"] {
        let count: i64 = sqlx::query_scalar("select count(*) from ledger.operations where tenant_id = $1")
            .bind(tenant)
            .fetch_one(&ledger.sql)
            .await
            .unwrap();
        assert_eq!(count, 2, "{tenant}");
    }
    let list = theirs.get("/v1/operations").await.succeeded().json();
    assert_eq!(list["operations"].as_array().unwrap().len(), 2);
}

#[tokio::test]
async fn what_belongs_to_another_tenant_is_not_found_on_any_route() {
    let ledger = Ledger::start().await;
    let theirs = ledger.tenant("other").await;
    let ours = ledger.agent();
    ours.deposit("settled", "acct-1", 500).await.succeeded();
    ours.submit_with("planned", "account.deposit", r#"{"account":"acct-1","amount":1}"#, &[])
        .await
        .succeeded();
    let planned = r#"{"operation_id":"waiting","kind":"account.deposit","payload":{"account":"acct-1","amount":1},"mode":"plan"}"#;
    assert_eq!(ours.post("/v1/operations", planned).await.status, 202);
    let admin = ledger.client("admin");
    let keys = admin.get("/v1/keys").await.json();
    let key_id = keys["keys"][0]["key_id"].as_str().unwrap().to_owned();
    let before = (
        ours.operation("settled").await,
        ours.operation("waiting").await,
        balance_and_keys(&ledger).await,
    );

    let mut tried = 0;
    for operation in contract::contract().operations() {
        let (parameter, foreign, missing): (&str, Vec<&str>, &str) = if operation.path.contains("{operation_id}") {
            ("{operation_id}", vec!["settled", "waiting"], "nobodys")
        } else if operation.path.contains("{key_id}") {
            ("{key_id}", vec![&key_id], "0123456789abcdef")
        } else {
            // Downstreams are the installation's, not a tenant's; what is stored of a request has an id of its tenant's.
            let is_proxy = operation.path.starts_with("/v1/proxy/");
            assert!(
                is_proxy || !operation.path.starts_with("/v1/") || !operation.path.contains('{'),
                "{}: which id?",
                operation.path
            );
            continue;
        };
        for role in operation.roles() {
            let client = ours.with_key(&theirs[role]);
            let body = good_body(&operation);
            let none = send(&client, &operation, &operation.path.replace(parameter, missing), body).await;
            let none = none.is(404, "not-found");
            for id in &foreign {
                let found = send(&client, &operation, &operation.path.replace(parameter, id), body).await;
                assert_eq!(
                    comparable(&found),
                    comparable(&none),
                    "{} {}",
                    operation.method,
                    operation.path
                );
                tried += 1;
            }
        }
    }
    assert!(tried >= 10, "only {tried} requests were made from openapi.yaml");
    let after = (
        ours.operation("settled").await,
        ours.operation("waiting").await,
        balance_and_keys(&ledger).await,
    );
    assert_eq!(after, before);
}

async fn balance_and_keys(ledger: &Ledger) -> (i64, Vec<(String, String, bool)>) {
    let keys =
        sqlx::query_as("select key_id, label, revoked_at is null from ledger.api_keys order by tenant_id, key_id")
            .fetch_all(&ledger.sql)
            .await
            .unwrap();
    (ledger.balance("acct-1").await, keys)
}

#[tokio::test]
async fn each_route_takes_the_roles_it_names_and_no_other() {
    let ledger = Ledger::start().await;
    for operation in contract::contract().operations() {
        let path = operation
            .path
            .replace("{operation_id}", "nobodys")
            .replace("{key_id}", "0123456789abcdef")
            .replace("{code}", "not-found")
            .replace("{downstream}", "nobody")
            .replace("{path}", "x");
        let name = format!("{} {}", operation.method, operation.path);
        let anonymous = send(&ledger.agent().with_key(""), &operation, &path, "").await;
        if operation.roles().is_empty() {
            assert_eq!(anonymous.status, 200, "{name}");
            continue;
        }
        anonymous.is(401, "unauthenticated");
        for role in ["agent", "approver", "operator", "admin"] {
            let answer = send(&ledger.client(role), &operation, &path, "").await;
            if operation.roles().contains(&role) {
                assert!(![401, 403].contains(&answer.status), "{name} as {role}: {answer:?}");
            } else {
                answer.is(403, "forbidden");
            }
        }
    }
}

#[tokio::test]
async fn a_credential_is_a_whole_key_as_bearer_or_as_user_name() {
    use base64::Engine as _;
    let ledger = Ledger::start().await;
    let anonymous = ledger.agent().with_key("");
    let key = ledger.keys["agent"].clone();
    let other = ledger.tenant("other").await["agent"].clone();
    let basic = |text: String| format!("Basic {}", base64::engine::general_purpose::STANDARD.encode(text));
    let list = async |credential: String| {
        anonymous
            .send("GET", "/v1/operations", &[("authorization", &credential)], "")
            .await
    };
    for good in [
        format!("Bearer {key}"),
        format!("bearer {key}"),
        basic(format!("{key}:")),
        basic(format!("{key}:x")),
        basic(key.clone()),
    ] {
        list(good).await.succeeded();
    }
    let last = if key.ends_with('a') { 'b' } else { 'a' };
    let another_secret = format!("{}{last}", &key[..key.len() - 1]);
    let another_tenant = key.replacen("opl_demo_", "opl_other_", 1);
    let mixed = format!("{}{}", &key[..key.len() - 43], &other[other.len() - 43..]);
    for bad in [
        "Bearer".to_owned(),
        "Bearer x".to_owned(),
        key.clone(),
        format!("Token {key}"),
        format!("Bearer {another_secret}"),
        format!("Bearer {another_tenant}"),
        format!("Bearer {mixed}"),
        format!("Bearer {key} {key}"),
        basic(format!("user:{key}")),
        "Basic !!!".to_owned(),
    ] {
        list(bad).await.is(401, "unauthenticated");
    }
    let twice = [
        ("authorization", format!("Bearer {key}")),
        ("authorization", format!("Bearer {key}")),
    ];
    let twice: Vec<(&str, &str)> = twice.iter().map(|(name, value)| (*name, value.as_str())).collect();
    anonymous
        .send("GET", "/v1/operations", &twice, "")
        .await
        .is(401, "unauthenticated");
}

#[tokio::test]
async fn a_key_limited_to_kinds_neither_runs_nor_sees_the_others() {
    let ledger = Ledger::start().await;
    let admin = ledger.client("admin");
    let body = r#"{"role":"agent","label":"refunds only","kinds":["order.refund"]}"#;
    let created = admin.post("/v1/keys", body).await.json();
    let limited = ledger.agent().with_key(created["secret"].as_str().unwrap());
    ledger.agent().deposit("deposit", "acct-1", 5).await.succeeded();
    limited.deposit("mine", "acct-1", 5).await.is(403, "forbidden");
    limited.deposit("deposit", "acct-1", 5).await.is(403, "forbidden");
    for path in ["/v1/operations/deposit", "/v1/operations/deposit/receipt"] {
        let refused = limited.get(path).await.is(403, "forbidden");
        assert!(refused.header("operation-state").is_empty());
    }
    for verb in ["execute", "cancel"] {
        limited
            .send(
                "POST",
                &format!("/v1/operations/{}/{verb}", encoded("deposit")),
                &[],
                "",
            )
            .await
            .is(403, "forbidden");
    }
    limited
        .submit("refund", "order.refund", r#"{"order_id":"1001","amount":1}"#)
        .await
        .succeeded();
    let seen = limited.get("/v1/operations").await.succeeded().json();
    let ids: Vec<&Value> = seen["operations"]
        .as_array()
        .unwrap()
        .iter()
        .map(|one| &one["operation_id"])
        .collect();
    assert_eq!(ids, ["refund"]);
    assert_eq!(ledger.count("select count(*) from ledger.operations").await, 2);
}
