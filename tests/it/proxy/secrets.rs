//! Whose credentials go where: a caller's end at the ledger, the downstream's own is known to nobody else.

use std::time::Duration;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use sqlx::PgPool;

use super::JSON;
use crate::support::downstream::{Downstream, Script};
use crate::support::process::Process;
use crate::support::{Client, Database, TENANT, until, write_config};

const SECRET: &str = "sk_live_Zu6RCgDCmT3Lf4TkBdz8";
const HEADER_SECRET: &str = "hdr_9sPq2mXw7VbN";

/// Every row of every table of the ledger, as text; bytes as hexadecimal digits.
async fn dumped(sql: &PgPool) -> String {
    let tables: Vec<String> = sqlx::query_scalar(
        "select format('%I.%I', schemaname, tablename) from pg_tables where schemaname in ('ledger', 'public')",
    )
    .fetch_all(sql)
    .await
    .unwrap();
    assert!(tables.len() >= 8, "{tables:?}");
    let mut all = String::new();
    for table in tables {
        let query = format!("select coalesce(string_agg(t::text, e'\\n'), '') from {table} t");
        let text: String = sqlx::query_scalar(sqlx::AssertSqlSafe(query))
            .fetch_one(sql)
            .await
            .unwrap();
        all.push_str(&text);
    }
    all
}

/// The spellings in which a secret could be written down.
fn spellings(secret: &str) -> [String; 4] {
    let hex: String = secret.bytes().map(|byte| format!("{byte:02x}")).collect();
    let basic = |text: String| BASE64_STANDARD.encode(text).trim_end_matches('=').to_owned();
    [
        secret.to_owned(),
        hex,
        basic(format!("{secret}:")),
        basic(secret.to_owned()),
    ]
}

#[tokio::test]
async fn no_credential_is_seen_where_it_does_not_belong() {
    let pay = Downstream::start().await;
    let (database, directory) = (Database::create().await, tempfile::tempdir().unwrap());
    let keys = database.keys(TENANT).await;
    std::fs::write(directory.path().join("secret"), HEADER_SECRET).unwrap();
    let file = directory.path().join("secret").display().to_string();
    let routes = "max_stored_body = 2000\n[[routes]]\npath = \"/key\"\nidempotency = \"key\"\nkey_retention = \"24h\"\n\
                  retry = { first_delay = \"50ms\" }\n";
    let config = pay.config(
        "pay",
        &format!("credential = {{ bearer_env = \"PAY_SECRET\" }}\n{routes}"),
    ) + &pay.config("basic", "credential = { basic_env = \"PAY_SECRET\" }")
        + &pay.config(
            "header",
            &format!("credential = {{ header = \"X-Api-Key\", header_file = \"{file}\" }}"),
        )
        + "[downstreams.gone]\nurl = \"http://127.0.0.1:1\"\ncredential = { bearer_env = \"PAY_SECRET\" }\n";
    let (_directory, path) = write_config(&config);
    let variables = [("PAY_SECRET", SECRET), ("OPLEDGER_LOG", "trace")];
    let process = Process::serve_with(&path, &database.service_url, "127.0.0.1:0".parse().unwrap(), &variables);
    let agent = Client::new(process.address, &keys["agent"]);
    let basic = format!("Basic {}", BASE64_STANDARD.encode(format!("{}:", keys["agent"])));
    let theirs = [
        JSON,
        ("cookie", "session=s3cr3t"),
        ("proxy-authorization", "Basic eA=="),
        ("x-api-key", "agents-own"),
    ];
    let mut answers = Vec::new();
    // Answers, and each way in which one fails to come.
    let endings = [
        ("ok", Script::answer(200, "{}")),
        ("error", Script::answer(401, "{\"error\":\"no\"}")),
        ("large", Script::answer(200, "x".repeat(3000))),
        (
            "events",
            Script::with_lines(200, "Content-Type: text/event-stream\r\n", "data: 1\n\n"),
        ),
        ("reset", Script::new().reset()),
        ("garbage", Script::new().then("garbage\r\n\r\n").close()),
    ];
    for (name, script) in endings {
        pay.answers(move |_| script.clone());
        for downstream in ["pay", "basic", "header", "gone"] {
            let key = format!("{downstream}-{name}");
            let lines = [&[("idempotency-key", key.as_str())], &theirs[..]].concat();
            let target = format!("/v1/proxy/{downstream}/x");
            answers.push(agent.try_send("POST", &target, &lines, "{}".into()).await.ok());
            answers.push(agent.try_send("GET", &target, &lines[1..], "".into()).await.ok());
        }
    }
    // A key in Basic is the ledger's as well.
    let with_basic = [("idempotency-key", "basic-key"), ("authorization", basic.as_str())];
    answers.push(
        agent
            .with_key("")
            .try_send("POST", "/v1/proxy/pay/x", &with_basic, "{}".into())
            .await
            .ok(),
    );
    // A lost answer, recovered by sending again.
    pay.answers(super::lost_at_first(|_| Script::answer(200, "{}")));
    let recovered = [("idempotency-key", "recovered"), JSON];
    let answer = agent
        .try_send("POST", "/v1/proxy/pay/key", &recovered, "{}".into())
        .await
        .unwrap();
    assert_eq!(answer.status, 200);
    answers.push(Some(answer));
    let again = agent
        .try_send("POST", "/v1/proxy/pay/key", &recovered, "{}".into())
        .await;
    answers.push(again.ok());

    let mut seen = [0; 3];
    for request in pay.requests() {
        let text = request.lines.join("\n");
        assert!(
            !text.contains("opl_") && !text.contains("s3cr3t") && !text.contains("eA=="),
            "{text}"
        );
        assert!(!text.contains(&basic), "{text}");
        // One line of each, and the right one.
        match (request.header("authorization"), request.header("x-api-key")) {
            (bearer, "agents-own" | "") if bearer == format!("Bearer {SECRET}") => seen[0] += 1,
            (basic, "agents-own") if basic == format!("Basic {}", BASE64_STANDARD.encode(format!("{SECRET}:"))) => {
                seen[1] += 1
            }
            ("", HEADER_SECRET) => seen[2] += 1,
            other => panic!("{other:?}"),
        }
    }
    assert!(seen.into_iter().all(|count| count >= 12), "{seen:?}");

    // Its history, as everybody reads it.
    for (role, path) in [
        ("operator", "/v1/operations?limit=100"),
        ("agent", "/v1/operations/recovered"),
        ("admin", "/metrics"),
    ] {
        answers.push(Some(Client::new(process.address, &keys[role]).get(path).await));
    }
    until("deliveries are counted", async || {
        sqlx::query_scalar::<_, i64>("select count(*) from ledger.deliveries")
            .fetch_one(&database.sql)
            .await
            .unwrap()
            > 0
    })
    .await;
    let shown: String = answers
        .iter()
        .flatten()
        .map(|answer| format!("{:?}\n{}\n", answer.headers, String::from_utf8_lossy(&answer.body)))
        .collect();
    let (log, tables) = (process.log(), dumped(&database.sql).await);
    assert!(
        log.contains("recovered") && tables.contains("recovered"),
        "there is something to look at"
    );
    for secret in [SECRET, HEADER_SECRET] {
        for spelling in spellings(secret) {
            assert!(!shown.contains(&spelling), "an agent sees {spelling}");
            assert!(!log.contains(&spelling), "the log has {spelling}");
            assert!(!tables.contains(&spelling), "the database has {spelling}");
        }
    }
    for spelling in spellings(&keys["agent"]) {
        assert!(!log.contains(&spelling), "the log has an agent's key");
        assert!(!tables.contains(&spelling), "the database has an agent's key");
    }
    assert!(!tables.contains("s3cr3t"), "a cookie is stored");
}

/// What a downstream says about itself stays its own.
#[tokio::test]
async fn a_secret_that_the_downstream_repeats_is_its_answer_and_nobody_elses_business() {
    let pay = Downstream::start().await;
    let database = Database::create().await;
    let keys = database.keys(TENANT).await;
    let (_directory, path) = write_config(&pay.config("pay", ""));
    let variables = [("OPLEDGER_LOG", "trace")];
    let process = Process::serve_with(&path, &database.service_url, "127.0.0.1:0".parse().unwrap(), &variables);
    let agent = Client::new(process.address, &keys["agent"]);
    pay.answers(|_| Script::with_lines(200, "Set-Cookie: c=cookie-of-theirs\r\n", "body-of-theirs"));
    let lines = [("idempotency-key", "k")];
    agent
        .send("POST", "/v1/proxy/pay/x", &lines, "body-of-ours")
        .await
        .succeeded();
    tokio::time::sleep(Duration::from_millis(100)).await;
    let log = process.log();
    for text in ["cookie-of-theirs", "body-of-theirs", "body-of-ours"] {
        assert!(!log.contains(text), "the log has {text}");
    }
    assert!(!dumped(&database.sql).await.contains("cookie-of-theirs"));
}
