//! `/v1/keys`: made, changed, revoked; their secrets are shown once and nowhere else.

use std::time::{Duration, Instant};

use opledger::config::DatabaseArgs;
use opledger::ledger::key::Secret;
use serde_json::Value;
use sqlx::Row;

use crate::support::process::Process;
use crate::support::{Client, Ledger};

/// How long the other processes may go on believing a key.
const AT_ONCE: Duration = Duration::from_secs(1);

const DEPOSIT: &str = r#"{"account":"acct-1","amount":500}"#;

async fn create(admin: &Client, body: &str) -> (String, String) {
    let answer = admin.post("/v1/keys", body).await;
    assert_eq!(answer.status, 201, "{answer:?}");
    let created = answer.json();
    (
        created["key_id"].as_str().unwrap().to_owned(),
        created["secret"].as_str().unwrap().to_owned(),
    )
}

#[tokio::test]
async fn a_secret_is_shown_once_and_stored_nowhere() {
    let ledger = Ledger::start().await;
    let admin = ledger.client("admin");
    let (key_id, secret) = create(&admin, r#"{"role":"agent","label":"worker","kinds":["order.refund"]}"#).await;
    assert!(secret.starts_with(&format!("opl_demo_{key_id}_")));
    let hidden = secret.rsplit('_').next().unwrap().to_owned();
    let list = admin.get("/v1/keys").await;
    assert!(!String::from_utf8_lossy(&list.body).contains(&hidden));
    let changed = admin
        .send(
            "PATCH",
            &format!("/v1/keys/{key_id}"),
            &[("content-type", "application/json")],
            r#"{"label":"w"}"#,
        )
        .await;
    assert!(!String::from_utf8_lossy(&changed.body).contains(&hidden));
    let rows: Vec<String> = sqlx::query_scalar("select api_keys::text from ledger.api_keys")
        .fetch_all(&ledger.sql)
        .await
        .unwrap();
    let bytes = hidden.bytes().map(|byte| format!("{byte:02x}")).collect::<String>();
    for row in rows {
        assert!(!row.contains(&hidden) && !row.contains(&bytes), "{row}");
    }
    let debug = format!("{:?}", Secret::parse(&secret).unwrap());
    assert!(!debug.contains(&hidden), "{debug}");
}

#[tokio::test]
async fn keys_are_listed_page_by_page_in_the_order_of_their_ids() {
    let ledger = Ledger::start().await;
    let admin = ledger.client("admin");
    for number in 0..7 {
        create(&admin, &format!(r#"{{"role":"agent","label":"key {number}"}}"#)).await;
    }
    let mut seen = Vec::new();
    let mut path = "/v1/keys?limit=3".to_owned();
    loop {
        let page = admin.get(&path).await.succeeded().json();
        seen.extend(
            page["keys"]
                .as_array()
                .unwrap()
                .iter()
                .map(|key| key["key_id"].as_str().unwrap().to_owned()),
        );
        let Some(cursor) = page["next_cursor"].as_str() else {
            break;
        };
        path = format!("/v1/keys?limit=3&cursor={cursor}");
    }
    let mut sorted = seen.clone();
    sorted.sort();
    sorted.dedup();
    assert_eq!((seen.len(), &seen), (11, &sorted));
}

#[tokio::test]
async fn a_body_that_makes_no_key_is_refused_with_its_pointer() {
    let ledger = Ledger::start().await;
    let admin = ledger.client("admin");
    let long = format!(r#"{{"role":"agent","label":"{}"}}"#, "x".repeat(201));
    for (body, pointer) in [
        ("[]", ""),
        ("{", ""),
        (r#"{"label":"x"}"#, "/role"),
        (r#"{"role":"agent"}"#, "/label"),
        (r#"{"role":"root","label":"x"}"#, "/role"),
        (r#"{"role":"agent","label":""}"#, "/label"),
        (r#"{"role":"agent","label":"a\nb"}"#, "/label"),
        (r#"{"role":"agent","label":"x","kinds":[]}"#, "/kinds"),
        (r#"{"role":"agent","label":"x","kinds":["A"]}"#, "/kinds/0"),
        (r#"{"role":"agent","label":"x","kinds":["a","a"]}"#, "/kinds/1"),
        (r#"{"role":"agent","label":"x","tenant":"other"}"#, "/tenant"),
        (r#"{"role":"agent","role":"admin","label":"x"}"#, "/role"),
        (&long, "/label"),
    ] {
        let refused = admin.post("/v1/keys", body).await.is(400, "request-invalid");
        assert_eq!(refused.json()["pointer"], pointer, "{body}");
    }
    let (key_id, _) = create(&admin, r#"{"role":"agent","label":"x"}"#).await;
    for (body, pointer) in [
        ("{}", ""),
        (r#"{"role":"admin"}"#, "/role"),
        (r#"{"kinds":"all"}"#, "/kinds"),
    ] {
        let path = format!("/v1/keys/{key_id}");
        let refused = admin
            .send("PATCH", &path, &[("content-type", "application/json")], body)
            .await;
        assert_eq!(refused.is(400, "request-invalid").json()["pointer"], pointer, "{body}");
    }
    assert_eq!(ledger.count("select count(*) from ledger.api_keys").await, 5);
}

#[tokio::test]
async fn a_right_withdrawn_before_the_retry_takes_the_answer_away() {
    let ledger = Ledger::start().await;
    let second = ledger.second().await;
    let admin = ledger.client("admin");
    let (key_id, secret) = create(&admin, r#"{"role":"agent","label":"worker"}"#).await;
    let agent = ledger.agent().with_key(&secret);
    let elsewhere = agent.at(second.address);
    agent.submit("paid", "account.deposit", DEPOSIT).await.succeeded();
    elsewhere.submit("paid", "account.deposit", DEPOSIT).await.succeeded();
    let path = format!("/v1/keys/{key_id}");
    let change = async |body: &str| {
        let answer = admin
            .send("PATCH", &path, &[("content-type", "application/json")], body)
            .await;
        assert_eq!(answer.status, 200);
    };
    change(r#"{"kinds":["order.refund"]}"#).await;
    let began = Instant::now();
    // Where the change was made it holds for the next request; elsewhere within a second.
    for body in [
        agent.submit("paid", "account.deposit", DEPOSIT).await,
        agent.get("/v1/operations/paid/receipt").await,
    ] {
        let refused = body.is(403, "forbidden");
        assert!(!String::from_utf8_lossy(&refused.body).contains("balance"));
    }
    while elsewhere.submit("paid", "account.deposit", DEPOSIT).await.status != 403 {
        assert!(began.elapsed() < AT_ONCE, "the other process still believes the key");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    elsewhere.get("/v1/operations/paid").await.is(403, "forbidden");
    // Given back, the receipt is the same as ever.
    change(r#"{"kinds":null}"#).await;
    assert!(
        agent
            .submit("paid", "account.deposit", DEPOSIT)
            .await
            .succeeded()
            .is_replay()
    );
    second.stop().await;
}

#[tokio::test]
async fn a_revoked_key_is_refused_on_every_process_within_a_second_and_its_use_is_not_noted() {
    let ledger = Ledger::start().await;
    let second = ledger.second().await;
    let admin = ledger.client("admin");
    let (key_id, secret) = create(&admin, r#"{"role":"agent","label":"worker"}"#).await;
    let agent = ledger.agent().with_key(&secret);
    let elsewhere = agent.at(second.address);
    agent.submit("paid", "account.deposit", DEPOSIT).await.succeeded();
    elsewhere.get("/v1/operations").await.succeeded();
    // Old enough for the next use to be worth noting.
    sqlx::query("update ledger.api_keys set last_used_at = last_used_at - interval '1 hour' where key_id = $1")
        .bind(&key_id)
        .execute(&ledger.sql)
        .await
        .unwrap();
    let used_at = || async {
        let row = sqlx::query(
            "select last_used_at::text as used, revoked_at::text as revoked from ledger.api_keys where key_id = $1",
        )
        .bind(&key_id)
        .fetch_one(&ledger.sql)
        .await
        .unwrap();
        (row.get::<String, _>("used"), row.get::<Option<String>, _>("revoked"))
    };
    let before = used_at().await;
    let revoke = || async {
        admin
            .send("DELETE", &format!("/v1/keys/{key_id}"), &[], "")
            .await
            .status
    };
    assert_eq!(revoke().await, 204);
    let began = Instant::now();
    agent
        .submit("paid", "account.deposit", DEPOSIT)
        .await
        .is(401, "unauthenticated");
    while elsewhere.get("/v1/operations").await.status != 401 {
        assert!(began.elapsed() < AT_ONCE, "the other process still believes the key");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
    // Beyond what either process may remember of it.
    tokio::time::sleep(AT_ONCE).await;
    for client in [&agent, &elsewhere] {
        client
            .submit("paid", "account.deposit", DEPOSIT)
            .await
            .is(401, "unauthenticated");
    }
    let after = used_at().await;
    assert_eq!(after.0, before.0);
    assert!(after.1.is_some());
    assert_eq!(revoke().await, 204);
    assert_eq!(used_at().await, after);
    second.stop().await;
}

#[tokio::test]
async fn the_use_of_a_key_is_noted() {
    let ledger = Ledger::start().await;
    let admin = ledger.client("admin");
    let (key_id, secret) = create(&admin, r#"{"role":"agent","label":"worker"}"#).await;
    let last_used = async || {
        let list = admin.get("/v1/keys").await.json();
        let keys = list["keys"].as_array().unwrap();
        keys.iter().find(|key| key["key_id"] == key_id.as_str()).unwrap()["last_used_at"].clone()
    };
    assert_eq!(last_used().await, Value::Null);
    ledger.agent().with_key(&secret).get("/v1/operations").await.succeeded();
    assert!(last_used().await.is_string());
}

#[tokio::test]
async fn neither_keys_nor_payloads_are_ever_logged() {
    const MARK: &str = "payload-that-nobody-else-may-read";
    let ledger = Ledger::start().await;
    let process = Process::serve_with(
        &ledger.config_path,
        &ledger.service_url,
        "127.0.0.1:0".parse().unwrap(),
        &[("OPLEDGER_LOG", "debug")],
    );
    let agent = ledger.agent().at(process.address);
    let admin = ledger.client("admin").at(process.address);
    let (_, made) = create(&admin, r#"{"role":"agent","label":"worker"}"#).await;
    let marked = format!(r#"{{"account":"{MARK}","amount":1}}"#);
    agent
        .submit("odd/id%\"", "account.deposit", &marked)
        .await
        .is(422, "operation-failed");
    agent
        .submit("m", "account.deposit", &marked)
        .await
        .is(422, "operation-failed");
    agent
        .submit("m", "account.deposit", &marked.replace('1', "2"))
        .await
        .is(422, "fingerprint-mismatch");
    agent
        .submit("n", "account.deposit", &format!(r#"{{"account":["{MARK}"]}}"#))
        .await
        .is(400, "payload-invalid");
    // Whatever it ends with.
    let (start, end) = made.split_at(made.len() - 1);
    let wrong = format!("{start}{}", if end == "x" { "y" } else { "x" });
    agent
        .with_key(&wrong)
        .get("/v1/operations")
        .await
        .is(401, "unauthenticated");
    agent
        .send("GET", &format!("/v1/operations?key={made}"), &[], "")
        .await
        .is(400, "request-invalid");
    // Failures of the ledger itself, and of the handler.
    sqlx::raw_sql("alter table shop.accounts rename to away")
        .execute(&ledger.sql)
        .await
        .unwrap();
    agent
        .submit("o", "account.deposit", &marked)
        .await
        .is(500, "handler-broken");
    sqlx::raw_sql("alter table ledger.api_keys rename to away")
        .execute(&ledger.sql)
        .await
        .unwrap();
    let failed = agent.with_key(&made).get("/v1/operations").await;
    assert!(failed.status >= 500, "{failed:?}");
    let log = written(&process, failed.header("request-id")).await;
    assert!(log.len() > 10, "{log:?}");
    let keys = ledger.keys.values().chain([&made, &wrong]);
    let hidden: Vec<&str> = keys.map(|key| key.rsplit('_').next().unwrap()).chain([MARK]).collect();
    for line in &log {
        assert!(
            serde_json::from_str::<Value>(line).is_ok_and(|event| event.is_object()),
            "not one event: {line}"
        );
        for text in &hidden {
            assert!(!line.contains(text), "{line}");
        }
    }
}

/// The log, once the event of this request is in it.
async fn written(process: &Process, request_id: &str) -> Vec<String> {
    let began = Instant::now();
    loop {
        let log: Vec<String> = process.log().lines().map(str::to_owned).collect();
        if log
            .iter()
            .any(|line| line.contains(request_id) && line.contains("answered"))
        {
            return log;
        }
        assert!(began.elapsed() < Duration::from_secs(10), "{log:?}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

#[test]
fn settings_that_carry_secrets_do_not_print_them() {
    let database = DatabaseArgs {
        database_url: Some("postgres://opledger:hunter-two@db/ledger".to_owned()),
        database_url_file: Some("/run/secrets/url".into()),
    };
    let debug = format!("{database:?}");
    assert!(
        debug.contains("/run/secrets/url") && !debug.contains("hunter-two"),
        "{debug}"
    );
}

#[test]
fn the_database_password_is_not_told_when_the_service_does_not_start() {
    let (_directory, config) = crate::support::write_config("");
    let output = std::process::Command::new(env!("CARGO_BIN_EXE_opledger"))
        .args(["serve", "--config"])
        .arg(&config)
        .env("DATABASE_URL", "postgres://opledger:hunter-two@127.0.0.1:1/ledger")
        .env("OPLEDGER_LOG", "debug")
        .output()
        .unwrap();
    assert!(!output.status.success());
    let told = format!(
        "{}{}",
        String::from_utf8_lossy(&output.stderr),
        String::from_utf8_lossy(&output.stdout)
    );
    assert!(!told.is_empty() && !told.contains("hunter-two"), "{told}");
}
