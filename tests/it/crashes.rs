//! Processes and servers that die, freeze, or live by another clock: what was acknowledged stays, and everything has one
//! effect.

use std::path::Path;
use std::time::Duration;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use sqlx::PgPool;
use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::support::notes::{self, Sent, audit, effects, load, settle_all};
use crate::support::process::{Process, command, finished};
use crate::support::random::Random;
use crate::support::victim::Victim;
use crate::support::{Client, Database, TENANT, serve, write_config};

/// Short leases, so that a dead process's claims are soon taken over.
const QUICK: &str = r#"
    [recovery]
    heartbeat = "150ms"
    lease = "600ms"
    sweep = "150ms"
"#;

const ROUNDS: usize = 20;

async fn a_moment_later(random: &mut Random) {
    tokio::time::sleep(random.between(Duration::from_millis(100), Duration::from_millis(450))).await;
}

/// Sends what was on its way when the lights went out again at once, as an engine does; all of it is sent again at the end.
async fn resend_unanswered(sent: Vec<Sent>, client: &Client) -> Vec<Sent> {
    let (unanswered, mut sent): (Vec<Sent>, Vec<Sent>) = sent.into_iter().partition(|one| one.acknowledged.is_none());
    let mut senders = JoinSet::new();
    for mut one in unanswered {
        let client = client.clone();
        senders.spawn(async move {
            let _ = tokio::time::timeout(Duration::from_millis(500), one.send(&client)).await;
            one
        });
    }
    sent.extend(senders.join_all().await);
    sent
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_process_loses_nothing_and_repeats_nothing() {
    let mut random = Random::announced("killed process");
    let database = Database::create().await;
    notes::install(&database.sql).await;
    let key = database.keys(TENANT).await["agent"].clone();
    let (_directory, config) = write_config(&format!("{QUICK}{}", notes::KINDS));
    let mut process = Process::serve(&config, &database.service_url);
    let mut sent = Vec::new();
    for round in 0..ROUNDS {
        let client = Client::new(process.address, &key);
        let name = format!("k{round}");
        let (stop, mut stream) = (CancellationToken::new(), random.split());
        let senders = load(&client, &name, &mut stream, &stop);
        let killer = async {
            a_moment_later(&mut random).await;
            process.kill();
        };
        let (round_sent, ()) = tokio::join!(senders, killer);
        process = Process::serve(&config, &database.service_url);
        sent.extend(resend_unanswered(round_sent, &Client::new(process.address, &key)).await);
    }
    assert!(sent.len() > ROUNDS * 32, "there was load: {}", sent.len());
    let sent = settle_all(sent, &Client::new(process.address, &key)).await;
    audit(&database.sql, &sent).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_killed_postgresql_loses_nothing_that_was_acknowledged() {
    let mut random = Random::announced("killed PostgreSQL");
    let victim = Victim::start("victim").await;
    let (sql, key) = victim.prepare("victim").await;
    notes::install(&sql).await;
    let (_directory, config) = write_config(&format!("{QUICK}{}", notes::KINDS));
    let running = serve(&config, &victim.server.url("opledger", "victim")).await;
    let client = Client::new(running.address, &key);
    let mut sent = Vec::new();
    for round in 0..ROUNDS {
        let name = format!("p{round}");
        let (stop, mut stream) = (CancellationToken::new(), random.split());
        let senders = load(&client, &name, &mut stream, &stop);
        let one_session_only = random.below(2) == 0;
        let killer = async {
            a_moment_later(&mut random).await;
            if one_session_only {
                // The server then ends all others too, and recovers by itself.
                kill_a_session(&sql).await;
            } else {
                victim.kill().await;
                victim.restart().await;
            }
            stop.cancel();
        };
        let (round_sent, ()) = tokio::join!(senders, killer);
        sent.extend(resend_unanswered(round_sent, &client).await);
        until_it_answers(&sql).await;
    }
    assert!(sent.len() > ROUNDS * 32, "there was load: {}", sent.len());
    // Nothing may come from memory: another process answers from the tables.
    let other = serve(&config, &victim.server.url("opledger", "victim")).await;
    let sent = settle_all(sent, &client.at(other.address)).await;
    audit(&sql, &sent).await;
}

/// Waits until the server has recovered.
async fn until_it_answers(sql: &PgPool) {
    let give_up_at = std::time::Instant::now() + Duration::from_secs(30);
    while let Err(error) = sqlx::query("select 1").execute(sql).await {
        assert!(
            std::time::Instant::now() < give_up_at,
            "PostgreSQL does not come back: {error}"
        );
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

async fn kill_a_session(sql: &PgPool) {
    let session: Option<i32> = sqlx::query_scalar(
        "select pid from pg_stat_activity where application_name = 'opledger' order by state = 'active' desc, random() limit 1",
    )
    .fetch_optional(sql)
    .await
    .unwrap();
    if let Some(session) = session {
        let _ = kill(Pid::from_raw(session), Signal::SIGKILL);
    }
}

#[tokio::test]
async fn a_process_killed_inside_a_handler_leaves_no_effect_and_a_free_id() {
    let (database, key, _directory, config) = quick("").await;
    let mut process = Process::serve(&config, &database.service_url);
    let client = Client::new(process.address, &key);
    for kind in ["note", "note.alone"] {
        let slow = tokio::spawn({
            let client = client.at(process.address);
            async move { client.try_submit(kind, kind, r#"{"pause":0.5}"#, &[]).await }
        });
        until(&database.sql, IN_HANDLERS, 1).await;
        process.kill();
        assert!(slow.await.unwrap().is_err());
        // The orphaned session ends when its statement does, and rolls back: nobody is there to commit it.
        until(&database.sql, "select count(*) from pg_stat_activity where datname = current_database() and application_name = 'opledger'", 0).await;
        assert_eq!(number(&database.sql, "select count(*) from ledger.operations").await, 0);
        assert_eq!(effects(&database.sql, kind).await, 0);
        process = Process::serve(&config, &database.service_url);
        let answer = client
            .at(process.address)
            .submit(kind, kind, r#"{"pause":0.5}"#)
            .await
            .succeeded();
        assert!(!answer.is_replay());
        assert_eq!(effects(&database.sql, kind).await, 1);
        run_away(&database.sql).await;
    }
}

/// Empties the tables between two halves of a test.
async fn run_away(sql: &PgPool) {
    crate::support::run(
        sql,
        "truncate ledger.operations, ledger.receipts, ledger.history; delete from shop.notes",
    )
    .await;
}

#[tokio::test]
async fn what_a_killed_process_had_accepted_is_finished_by_another() {
    let (database, key, _directory, config) = quick("").await;
    let mut first = Process::serve(&config, &database.service_url);
    let second = Process::serve(&config, &database.service_url);
    let client = Client::new(first.address, &key);
    let mut sent = Vec::new();
    for number in 0..20 {
        let mut one = Sent::new(format!("a{number}"), "note.alone");
        one.payload = r#"{"pause":0.3}"#;
        one.respond_async = true;
        assert_eq!(one.send(&client).await.unwrap().status, 202);
        sent.push(one);
    }
    first.kill();
    let sent = settle_all(sent, &client.at(second.address)).await;
    audit(&database.sql, &sent).await;
}

#[tokio::test]
async fn a_frozen_process_that_wakes_after_its_lease_changes_nothing_any_more() {
    let (database, key, _directory, config) = quick(CROWDED).await;
    let frozen = Process::serve(&config, &database.service_url);
    let client = Client::new(frozen.address, &key);
    let sent = crowd(&database.sql, &client, r#"{"pause":0.8}"#, "fenced").await;
    frozen.signal(Signal::SIGSTOP);
    let second = Process::serve(&config, &database.service_url);
    // The two that were in their transactions hold their rows; that must not keep the third from being taken over.
    until(
        &database.sql,
        "select count(*) from ledger.operations where operation_id = 'fenced' and state = 'succeeded'",
        1,
    )
    .await;
    frozen.signal(Signal::SIGCONT);
    let sent = settle_all(sent, &client.at(second.address)).await;
    until(&database.sql, IN_HANDLERS, 0).await;
    // The woken process has had its turn at the third one when it answers about it.
    client
        .submit("fenced", "note.alone", r#"{"pause":0.8}"#)
        .await
        .succeeded();
    audit(&database.sql, &sent).await;
    assert_eq!(
        number(
            &database.sql,
            "select attempt from ledger.operations where operation_id = 'fenced'"
        )
        .await,
        2
    );
}

#[tokio::test]
async fn a_process_frozen_inside_its_transaction_does_not_hold_an_operation_for_ever() {
    let (database, key, _directory, config) =
        quick("[kinds.\"note.brief\"]\nhandler = \"shop.note\"\ngroup_commit = false\ntimeout = \"2s\"\n").await;
    let frozen = Process::serve(&config, &database.service_url);
    let client = Client::new(frozen.address, &key);
    let mut one = Sent::new("held".to_owned(), "note.brief");
    one.payload = r#"{"pause":0.5}"#;
    one.respond_async = true;
    assert_eq!(one.send(&client).await.unwrap().status, 202);
    until(&database.sql, IN_HANDLERS, 1).await;
    frozen.signal(Signal::SIGSTOP);
    let second = Process::serve(&config, &database.service_url);
    one.settle(&client.at(second.address)).await;
    frozen.signal(Signal::SIGCONT);
    one.settle(&client).await;
    audit(&database.sql, &[one]).await;
}

#[tokio::test]
async fn a_process_whose_clock_is_ten_minutes_ahead_takes_nothing_over_and_purges_nothing_early() {
    let library = [
        "/usr/lib/x86_64-linux-gnu",
        "/usr/lib/aarch64-linux-gnu",
        "/usr/lib64",
        "/usr/local/lib",
    ]
    .map(|place| format!("{place}/faketime/libfaketimeMT.so.1"))
    .into_iter()
    .find(|path| Path::new(path).exists())
    .expect("this test needs libfaketime: install the package faketime (Debian: apt-get install -y faketime)");
    let ahead = [
        ("LD_PRELOAD", library.as_str()),
        ("FAKETIME", "+10m"),
        ("FAKETIME_DONT_FAKE_MONOTONIC", "1"),
    ];
    let (database, key, _directory, config) = quick(&format!("[retention]\nreceipts = \"5m\"\n{CROWDED}")).await;
    let right = Process::serve(&config, &database.service_url);
    let fast = Process::serve_with(&config, &database.service_url, "127.0.0.1:0".parse().unwrap(), &ahead);
    let client = Client::new(right.address, &key);

    let mut live = crowd(&database.sql, &client, r#"{"pause":2}"#, "live").await;
    let mut fresh = Sent::new("fresh".to_owned(), "note");
    fresh.settle(&client).await;
    let purge = command(
        &["purge", "--json", "--config", config.to_str().unwrap()],
        &database.service_url,
    )
    .envs(ahead)
    .output()
    .unwrap();
    assert_eq!(
        String::from_utf8_lossy(&purge.stdout).trim(),
        r#"{"receipts":0,"tombstones":0}"#,
        "{purge:?}"
    );
    // The clock is really another one, or this test shows nothing.
    assert!(minutes_ahead(&fast) >= 9, "faketime does not work here");

    live = settle_all(live, &client.at(fast.address)).await;
    fresh.settle(&client.at(fast.address)).await;
    assert_eq!(number(&database.sql, NOT_LEFT_ALONE).await, 0);
    let mut at_fast = Sent::new("by-the-fast-one".to_owned(), "note");
    at_fast.settle(&client.at(fast.address)).await;
    let off = number(
        &database.sql,
        "select count(*) from ledger.operations where greatest(created_at, settled_at) > clock_timestamp()",
    )
    .await;
    assert_eq!(off, 0, "a time came from a process");
    live.extend([fresh, at_fast]);
    audit(&database.sql, &live).await;
}

/// How far the process's clock is ahead of ours, by its own log.
fn minutes_ahead(process: &Process) -> i64 {
    let log = process.log();
    let line: serde_json::Value = serde_json::from_str(log.lines().next().unwrap_or_default()).unwrap_or_default();
    let stamp = line["timestamp"].as_str().unwrap_or_default();
    let format = &time::format_description::well_known::Rfc3339;
    let theirs = time::OffsetDateTime::parse(stamp, format).expect("log lines have times");
    (theirs - time::OffsetDateTime::now_utc()).whole_minutes()
}

#[tokio::test]
async fn a_second_process_leaves_the_living_ones_work_alone() {
    let (database, key, _directory, config) = quick(CROWDED).await;
    let first = Process::serve(&config, &database.service_url);
    let client = Client::new(first.address, &key);
    let sent = crowd(&database.sql, &client, r#"{"pause":1.5}"#, "live").await;
    let second = Process::serve(&config, &database.service_url);
    let sent = settle_all(sent, &client.at(second.address)).await;
    assert_eq!(number(&database.sql, NOT_LEFT_ALONE).await, 0);
    audit(&database.sql, &sent).await;
}

/// Two places for slow operations.
const CROWDED: &str = "[database]\nmax_connections = 5\napply_connections = 1\n";

const NOT_LEFT_ALONE: &str = "(select count(*) from ledger.history where event = 'claim_lapsed') + (select count(*) from ledger.operations where attempt <> 1)";

/// Three accepted operations in a crowded process: two run, and hold their rows. The last, of this name, is claimed and
/// waits without a transaction: only the rules of the lease protect it.
async fn crowd(sql: &PgPool, client: &Client, payload: &'static str, last: &str) -> Vec<Sent> {
    let mut sent = Vec::new();
    for name in ["s1", "s2", last] {
        let mut one = Sent {
            payload,
            respond_async: true,
            ..Sent::new(name.to_owned(), "note.alone")
        };
        assert_eq!(one.send(client).await.unwrap().status, 202);
        sent.push(one);
    }
    until(sql, IN_HANDLERS, 2).await;
    sent
}

const IN_HANDLERS: &str =
    "select count(*) from pg_stat_activity where datname = current_database() and wait_event = 'PgSleep'";

#[tokio::test]
async fn a_killed_purge_leaves_each_operation_whole_or_gone() {
    let (database, key, _directory, config) = quick("[retention]\nreceipts = \"1s\"\n").await;
    let quiet = std::fs::read_to_string(&config)
        .unwrap()
        .replace("[recovery]", "[recovery]\npurge = \"forever\"");
    std::fs::write(&config, quiet).unwrap();
    let process = Process::serve(&config, &database.service_url);
    let client = Client::new(process.address, &key);
    let sent = (0..300).map(|number| Sent::new(format!("p{number}"), "note")).collect();
    settle_all(sent, &client).await;
    until(
        &database.sql,
        "select count(*) from ledger.receipts where expires_at > clock_timestamp()",
        0,
    )
    .await;
    // A held history row stops the purge in the middle of its statement.
    let mut holder = database.sql.begin().await.unwrap();
    sqlx::query("select from ledger.history where operation_id = 'p150' for update")
        .execute(&mut *holder)
        .await
        .unwrap();
    let purge = ["purge", "--json", "--config", config.to_str().unwrap()];
    let mut purging = command(&purge, &database.service_url)
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    until(
        &database.sql,
        "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'",
        1,
    )
    .await;
    purging.kill().unwrap();
    purging.wait().unwrap();
    holder.rollback().await.unwrap();
    until(
        &database.sql,
        "select count(*) from pg_stat_activity where datname = current_database() and state = 'active'",
        1,
    )
    .await;
    let torn = "select count(*) from ledger.operations o where (o.purged_at is null) <> exists
            (select from ledger.receipts r where r.operation_id = o.operation_id)
         or (o.purged_at is null) <> exists (select from ledger.history h where h.operation_id = o.operation_id)";
    assert_eq!(number(&database.sql, torn).await, 0);
    let end = finished(&purge, &database.service_url).await;
    assert_eq!(end.code, Some(0), "{end:?}");
    assert_eq!(number(&database.sql, torn).await, 0);
    assert_eq!(
        number(
            &database.sql,
            "select count(*) from ledger.operations where purged_at is null"
        )
        .await,
        0
    );
    client.submit("p150", "note", "{}").await.is(410, "receipt-expired");
    assert_eq!(effects(&database.sql, "p150").await, 1);
}

/// A database with the counting business, and a configuration with short leases.
async fn quick(lines: &str) -> (Database, String, tempfile::TempDir, std::path::PathBuf) {
    let database = Database::create().await;
    notes::install(&database.sql).await;
    let key = database.keys(TENANT).await["agent"].clone();
    let (directory, config) = write_config(&format!("{lines}{QUICK}{}", notes::KINDS));
    (database, key, directory, config)
}

async fn number(sql: &PgPool, query: &'static str) -> i64 {
    sqlx::query_scalar(sqlx::AssertSqlSafe(format!("select ({query})::bigint")))
        .fetch_one(sql)
        .await
        .unwrap()
}

/// Waits until a count is as expected.
async fn until(sql: &PgPool, query: &'static str, expected: i64) {
    let give_up_at = std::time::Instant::now() + Duration::from_secs(15);
    loop {
        let found = number(sql, query).await;
        if found == expected {
            return;
        }
        assert!(
            std::time::Instant::now() < give_up_at,
            "{query}: {found}, not {expected}"
        );
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}
