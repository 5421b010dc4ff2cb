//! Behind PgBouncer in transaction mode: every transaction may find itself on another server connection.

use std::process::Stdio;
use std::time::{Duration, Instant};

use crate::support::bouncer::Bouncer;
use crate::support::notes::{self, Sent, audit, settle_all};
use crate::support::process::{Process, command, finished};
use crate::support::{Client, Database, TENANT, run, shared, write_config};

const UNNAMED: &str = r#"
    [database]
    prepared_statements = false
    [recovery]
    heartbeat = "200ms"
    lease = "1s"
    sweep = "200ms"
"#;

#[tokio::test]
async fn processes_and_migrations_work_through_a_pooler_and_leave_no_lock() {
    let database = Database::empty().await;
    let bouncer = Bouncer::before(shared(), 4);
    let owner = bouncer.url("postgres", &database.name);

    // A migration that is killed in its middle: something it wants to make is being made by somebody else.
    run(&database.sql, "create schema ledger").await;
    let mut rival = database.sql.begin().await.unwrap();
    sqlx::query("create table ledger.receipts (x int)")
        .execute(&mut *rival)
        .await
        .unwrap();
    let mut killed = command(&["migrate"], &owner)
        .stdout(Stdio::null())
        .stderr(Stdio::null())
        .spawn()
        .unwrap();
    until(
        &database,
        "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'",
        1,
    )
    .await;
    // Others wait for it, or for what it leaves.
    let migrations = async {
        let migrate = || finished(&["migrate", "--grant-to", "opledger"], &owner);
        tokio::join!(migrate(), migrate(), migrate())
    };
    let killer = async {
        until(
            &database,
            "select count(*) from pg_stat_activity where datname = current_database() and wait_event = 'advisory'",
            3,
        )
        .await;
        killed.kill().unwrap();
        killed.wait().unwrap();
        rival.rollback().await.unwrap();
    };
    let (ends, ()) = tokio::join!(migrations, killer);
    let ends = [ends.0, ends.1, ends.2];
    assert!(ends.iter().all(|end| end.code == Some(0)), "{ends:?}");
    assert_eq!(
        ends.iter().filter(|end| end.stdout.contains("applied")).count(),
        1,
        "{ends:?}"
    );
    until(&database, LEFT_LOCKS, 0).await;

    database.add_shop().await;
    notes::install(&database.sql).await;
    let key = database.keys(TENANT).await["agent"].clone();
    let (_directory, config) = write_config(&format!("{UNNAMED}{}", notes::KINDS));
    let url = bouncer.url("opledger", &database.name);
    let again = finished(&["migrate"], &owner);
    let starting = tokio::task::spawn_blocking(move || {
        std::thread::scope(|scope| {
            let starters = [0, 1, 2].map(|_| scope.spawn(|| Process::serve(&config, &url)));
            starters.map(|starter| starter.join().unwrap())
        })
    });
    let (again, processes) = tokio::join!(again, starting);
    assert_eq!(again.code, Some(0), "{again:?}");
    let processes = processes.unwrap();

    let client = Client::new(processes[0].address, &key);
    let mut random = crate::support::random::Random::announced("pooler");
    let sent: Vec<Sent> = (0..300)
        .map(|number| Sent::any(format!("b{number}"), &mut random))
        .collect();
    let sent = settle_all(sent, &client).await;
    // What one of them stored, the others replay.
    let sent = settle_all(sent, &client.at(processes[1].address)).await;
    let sent = settle_all(sent, &client.at(processes[2].address)).await;
    audit(&database.sql, &sent).await;
    drop(processes);
    until(&database, LEFT_LOCKS, 0).await;
}

/// Locks that a session or an open transaction of ours still holds.
const LEFT_LOCKS: &str = "
    select count(*) from pg_locks l join pg_database d on d.oid = l.database
    where d.datname = current_database() and l.pid <> pg_backend_pid()
      and (l.locktype = 'advisory' or l.relation in
           (select c.oid from pg_class c join pg_namespace n on n.oid = c.relnamespace where n.nspname = 'ledger'))";

#[tokio::test]
async fn a_pooler_that_does_not_keep_prepared_statements_is_refused_with_the_way_out() {
    let database = Database::create().await;
    let bouncer = Bouncer::before(shared(), 4);
    let (_directory, config) = write_config("[database]\nprepared_statements = true\n");
    let serve = ["serve", "--listen", "127.0.0.1:0", "--config", config.to_str().unwrap()];
    for _ in 0..5 {
        let end = finished(&serve, &bouncer.url("opledger", &database.name)).await;
        assert_eq!(end.code, Some(1), "{end:?}");
        assert!(end.stderr.contains("prepared_statements = false"), "{end:?}");
    }
}

#[tokio::test]
async fn every_route_works_through_a_pooler_under_load() {
    let database = Database::create().await;
    notes::install(&database.sql).await;
    let keys = database.keys(TENANT).await;
    let bouncer = Bouncer::before(shared(), 3);
    let (_directory, config) = write_config(&format!("{UNNAMED}{}", notes::KINDS));
    let process = Process::serve(&config, &bouncer.url("opledger", &database.name));
    let client = Client::new(process.address, &keys["agent"]);
    let mut random = crate::support::random::Random::announced("pooler routes");
    let stop = tokio_util::sync::CancellationToken::new();
    let load = notes::load(&client, "l", &mut random, &stop);
    let routes = async {
        for number in 0..10 {
            let plan = format!(r#"{{"kind":"note","operation_id":"r{number}","payload":{{}},"mode":"plan"}}"#);
            assert_eq!(client.post("/v1/operations", &plan).await.status, 202);
            assert_eq!(client.operation(&format!("r{number}")).await["state"], "planned");
            client
                .post(&format!("/v1/operations/r{number}/execute"), "")
                .await
                .succeeded();
            client
                .get(&format!("/v1/operations/r{number}/receipt"))
                .await
                .succeeded();
            client.get("/v1/operations?limit=5&kind=note").await.succeeded();
            let admin = client.with_key(&keys["admin"]);
            let made = admin.post("/v1/keys", r#"{"role":"agent","label":"x"}"#).await;
            assert_eq!(made.status, 201, "{made:?}");
            admin.get("/v1/keys").await.succeeded();
        }
        stop.cancel();
    };
    let (sent, ()) = tokio::join!(load, routes);
    let lost = sent.iter().filter(|one| one.acknowledged.is_none()).count();
    assert!(lost <= 32, "requests failed: {lost}");
    let sent = settle_all(sent, &client).await;
    audit(&database.sql, &sent).await;
    assert!(!process.log().contains("prepared statement"), "{}", process.log());
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
