//! Stopping in order, and callers that hang up.

use std::time::{Duration, Instant};

use nix::sys::signal::Signal;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use tokio::task::JoinSet;

use crate::support::notes::{self, Sent, audit, effects, is_receipt, settle_all};
use crate::support::process::Process;
use crate::support::{Client, Database, TENANT, serve, write_config};

const QUICK: &str = r#"
    [recovery]
    heartbeat = "200ms"
    lease = "1s"
    sweep = "200ms"
"#;

async fn begin(lines: &str) -> (Database, String, tempfile::TempDir, std::path::PathBuf) {
    let database = Database::create().await;
    notes::install(&database.sql).await;
    let key = database.keys(TENANT).await["agent"].clone();
    let (directory, config) = write_config(&format!("{lines}{QUICK}{}", notes::KINDS));
    (database, key, directory, config)
}

async fn until(database: &Database, query: &'static str, expected: i64) {
    let give_up_at = Instant::now() + Duration::from_secs(15);
    loop {
        let found: i64 = sqlx::query_scalar(query).fetch_one(&database.sql).await.unwrap();
        if found == expected {
            return;
        }
        assert!(Instant::now() < give_up_at, "{query}: {found}, not {expected}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

const IN_HANDLERS: &str =
    "select count(*) from pg_stat_activity where datname = current_database() and wait_event = 'PgSleep'";

#[tokio::test]
async fn a_stopping_process_answers_what_it_has_begun_and_ends_with_zero() {
    let (database, key, _directory, config) = begin("").await;
    let mut process = Process::serve(&config, &database.service_url);
    let client = Client::new(process.address, &key);
    let mut asked = JoinSet::new();
    for number in 0..10 {
        for (kind, payload, respond_async) in [
            ("note", "{}", false),
            ("note.alone", r#"{"pause":0.4}"#, false),
            ("note.alone", r#"{"pause":0.3}"#, true),
        ] {
            let id = format!("{kind}-{number}-{respond_async}");
            let mut one = Sent {
                payload,
                respond_async,
                ..Sent::new(id, kind)
            };
            let client = Client::new(process.address, &key);
            asked.spawn(async move {
                let answer = one.send(&client).await;
                (one, answer)
            });
        }
    }
    until(&database, IN_HANDLERS, 7).await;
    process.signal(Signal::SIGTERM);
    let mut sent = Vec::new();
    while let Some(ended) = asked.join_next().await {
        let (one, answer) = ended.unwrap();
        let answer = answer.unwrap_or_else(|error| panic!("{} was cut off: {error}", one.id));
        let expected = if one.respond_async {
            answer.status == 202
        } else {
            is_receipt(&answer)
        };
        assert!(expected, "{}: {answer:?}", one.id);
        sent.push(one);
    }
    let status = process.wait(Duration::from_secs(20)).await;
    assert_eq!(status.code(), Some(0), "{}", process.log());
    process.has_logged("everything that had begun is finished").await;
    // Nothing waits for anybody: what was accepted has been finished, and the process's row is gone.
    until(
        &database,
        "select count(*) from ledger.operations where settled_at is null",
        0,
    )
    .await;
    until(&database, "select count(*) from ledger.instances", 0).await;
    let next = serve(&config, &database.service_url).await;
    let sent = settle_all(sent, &client.at(next.address)).await;
    audit(&database.sql, &sent).await;
}

#[tokio::test]
async fn a_stopping_process_takes_no_new_connection_and_keeps_no_idle_one() {
    let (database, key, _directory, config) = begin("").await;
    let mut process = Process::serve(&config, &database.service_url);
    let mut idle = TcpStream::connect(process.address).await.unwrap();
    let busy = tokio::spawn({
        let client = Client::new(process.address, &key);
        async move { client.try_submit("slow", "note.alone", r#"{"pause":0.8}"#, &[]).await }
    });
    until(&database, IN_HANDLERS, 1).await;
    process.signal(Signal::SIGTERM);
    let mut rest = Vec::new();
    idle.read_to_end(&mut rest).await.unwrap();
    assert!(rest.is_empty());
    assert!(TcpStream::connect(process.address).await.is_err(), "it still accepts");
    assert_eq!(busy.await.unwrap().unwrap().status, 200);
    assert_eq!(process.wait(Duration::from_secs(10)).await.code(), Some(0));
}

#[tokio::test]
async fn work_beyond_the_drain_limit_is_left_to_the_next_process_and_has_one_effect() {
    let (database, key, _directory, config) = begin("[limits]\ndrain = \"300ms\"\n").await;
    let mut process = Process::serve(&config, &database.service_url);
    let mut sent = Vec::new();
    for (name, respond_async) in [("answered-late", false), ("accepted", true)] {
        let mut one = Sent {
            payload: r#"{"pause":4}"#,
            respond_async,
            ..Sent::new(name.to_owned(), "note.alone")
        };
        let client = Client::new(process.address, &key);
        sent.push(tokio::spawn(async move {
            let _ = one.send(&client).await;
            one
        }));
    }
    until(&database, IN_HANDLERS, 2).await;
    let told_at = Instant::now();
    process.signal(Signal::SIGTERM);
    assert_eq!(
        process.wait(Duration::from_secs(15)).await.code(),
        Some(0),
        "{}",
        process.log()
    );
    assert!(
        told_at.elapsed() < Duration::from_secs(3),
        "it waits for work that it said it would leave: {:?}",
        told_at.elapsed()
    );
    process.has_logged("requests were cut off").await;
    let mut left = Vec::new();
    for one in sent {
        left.push(one.await.unwrap());
    }
    let next = serve(&config, &database.service_url).await;
    let left = settle_all(left, &Client::new(next.address, &key)).await;
    audit(&database.sql, &left).await;
}

/// The moments at which the client hangs up, in milliseconds after its request has been written.
const MOMENTS: u64 = 20;

#[tokio::test]
async fn a_caller_that_hangs_up_does_not_stop_its_operation() {
    let (database, key, _directory, config) = begin("").await;
    let running = serve(&config, &database.service_url).await;
    let client = Client::new(running.address, &key);
    let forms = [
        ("note", "{}", ""),
        ("note.alone", r#"{"pause":0.03}"#, ""),
        ("note.alone", "{}", "Prefer: respond-async\r\n"),
    ];
    let mut sent = Vec::new();
    for (form, (kind, payload, prefer)) in forms.into_iter().enumerate() {
        for moment in 0..MOMENTS {
            let id = format!("h{form}-{moment}");
            let body = format!(r#"{{"kind":"{kind}","payload":{payload}}}"#);
            let request = format!(
                "POST /v1/operations HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nIdempotency-Key: {id}\r\n\
                 Content-Type: application/json\r\n{prefer}Content-Length: {}\r\n\r\n{body}",
                body.len()
            );
            hang_up(&client, &request, Duration::from_millis(moment * 2)).await;
            sent.push(Sent {
                payload,
                respond_async: !prefer.is_empty(),
                ..Sent::new(id, kind)
            });
        }
    }
    let sent = settle_all(sent, &client).await;
    audit(&database.sql, &sent).await;
}

#[tokio::test]
async fn a_caller_that_hangs_up_while_a_planned_operation_begins_does_not_stop_it() {
    let (database, key, _directory, config) = begin("").await;
    let running = serve(&config, &database.service_url).await;
    let client = Client::new(running.address, &key);
    for moment in 0..MOMENTS {
        let plan = format!(r#"{{"kind":"note","operation_id":"x{moment}","payload":{{}},"mode":"plan"}}"#);
        assert_eq!(client.post("/v1/operations", &plan).await.status, 202);
        let request = format!(
            "POST /v1/operations/x{moment}/execute HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nContent-Length: 0\r\n\r\n"
        );
        hang_up(&client, &request, Duration::from_micros(moment * 400)).await;
    }
    for moment in 0..MOMENTS {
        let execute = format!("/v1/operations/x{moment}/execute");
        let give_up_at = Instant::now() + Duration::from_secs(10);
        while client.post(&execute, "").await.status != 200 {
            assert!(Instant::now() < give_up_at, "x{moment} is stuck");
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        assert_eq!(effects(&database.sql, &format!("x{moment}")).await, 1);
    }
    audit(&database.sql, &[]).await;
}

async fn hang_up(client: &Client, request: &str, after: Duration) {
    let mut stream = TcpStream::connect(client.address).await.unwrap();
    stream.write_all(request.as_bytes()).await.unwrap();
    tokio::time::sleep(after).await;
    // A reset, not a polite end: the service learns of it at once.
    stream.set_zero_linger().unwrap();
}
