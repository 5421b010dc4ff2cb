//! `opledger migrate`, what `serve` refuses to start on, and what a running service takes from a changed configuration.

use nix::sys::signal::Signal;
use tokio_util::sync::CancellationToken;

use crate::support::notes::{self, Sent, audit, settle_all};
use crate::support::process::{Finished, Process, finished};
use crate::support::random::Random;
use crate::support::{Client, Database, Ledger, Setup, TENANT, run, write_config};

async fn migrate(database: &Database) -> Finished {
    finished(&["migrate", "--grant-to", "opledger"], &database.owner_url).await
}

async fn number(database: &Database, query: &'static str) -> i64 {
    sqlx::query_scalar(query).fetch_one(&database.sql).await.unwrap()
}

/// Starts a service that is expected not to start, and returns what it says.
async fn refused(lines: &str, database_url: &str) -> String {
    let (_directory, config) = write_config(lines);
    let serve = [
        "serve",
        "--listen",
        "127.0.0.1:0",
        "--database-wait",
        "0s",
        "--config",
        config.to_str().unwrap(),
    ];
    let Finished { code, stderr, .. } = finished(&serve, database_url).await;
    assert!(
        code.is_some_and(|code| code != 0),
        "it starts or crashes: {code:?} {stderr}"
    );
    assert!(!stderr.contains("panicked"), "{stderr}");
    stderr
}

#[tokio::test]
async fn several_processes_migrate_at_once_and_one_of_them_does() {
    let database = Database::empty().await;
    let ends = tokio::join!(
        migrate(&database),
        migrate(&database),
        migrate(&database),
        migrate(&database),
        migrate(&database)
    );
    let ends = [ends.0, ends.1, ends.2, ends.3, ends.4];
    for end in &ends {
        assert_eq!(end.code, Some(0), "{end:?}");
    }
    assert_eq!(
        ends.iter().filter(|end| end.stdout.contains("applied 0001")).count(),
        1,
        "{ends:?}"
    );
    assert_eq!(
        number(&database, "select count(*) from ledger.migrations where version = 1").await,
        1
    );
    assert_eq!(number(&database, "select count(*) from pg_locks where locktype = 'advisory' and database = (select oid from pg_database where datname = current_database())").await, 0);
}

#[tokio::test]
async fn a_check_says_what_is_pending_and_changes_nothing() {
    let database = Database::empty().await;
    let before = finished(&["migrate", "--check"], &database.owner_url).await;
    assert_eq!(before.code, Some(1), "{before:?}");
    assert!(before.stdout.contains("pending 0001"), "{before:?}");
    assert_eq!(
        number(&database, "select count(*) from pg_namespace where nspname = 'ledger'").await,
        0
    );
    assert_eq!(migrate(&database).await.code, Some(0));
    let after = finished(&["migrate", "--check"], &database.owner_url).await;
    assert_eq!((after.code, after.stdout.trim()), (Some(0), "up to date"));
}

#[tokio::test]
async fn a_migration_whose_text_was_changed_afterwards_is_refused_by_every_command() {
    let database = Database::create().await;
    run(&database.sql, "update ledger.migrations set checksum = repeat('0', 96)").await;
    for arguments in [&["migrate"][..], &["migrate", "--check"]] {
        let end = finished(arguments, &database.owner_url).await;
        assert_ne!(end.code, Some(0), "{end:?}");
        assert!(end.stderr.contains("applied with other contents"), "{end:?}");
    }
    assert!(
        refused("", &database.service_url)
            .await
            .contains("applied with other contents")
    );
}

#[tokio::test]
async fn a_database_that_a_later_release_migrated_is_served_and_named() {
    let database = Database::create().await;
    run(
        &database.sql,
        "insert into ledger.migrations (version, name, checksum) values (9999, '9999 later', repeat('0', 96))",
    )
    .await;
    let check = finished(&["migrate", "--check"], &database.owner_url).await;
    assert_eq!(check.code, Some(0), "{check:?}");
    assert!(check.stdout.contains("9999"), "{check:?}");
    let (_directory, config) = write_config("");
    drop(Process::serve(&config, &database.service_url));
}

#[tokio::test]
async fn a_migration_that_fails_leaves_nothing_behind_and_runs_once_it_can() {
    let database = Database::empty().await;
    // Something is in the way of the last table.
    run(
        &database.sql,
        "create schema ledger; create table ledger.deliveries (x int)",
    )
    .await;
    let end = migrate(&database).await;
    assert_ne!(end.code, Some(0), "{end:?}");
    assert!(end.stderr.contains("failed to run migration 0001"), "{end:?}");
    assert_eq!(
        number(&database, "select count(*) from pg_tables where schemaname = 'ledger'").await,
        1
    );
    run(&database.sql, "drop table ledger.deliveries").await;
    assert_eq!(migrate(&database).await.code, Some(0));
}

#[tokio::test]
async fn a_role_name_that_is_none_is_refused_before_anything_is_done() {
    let database = Database::empty().await;
    let end = finished(
        &["migrate", "--grant-to", "x\"; drop schema ledger; --"],
        &database.owner_url,
    )
    .await;
    assert_ne!(end.code, Some(0));
    assert!(end.stderr.contains("role name"), "{end:?}");
    assert_eq!(
        number(&database, "select count(*) from pg_namespace where nspname = 'ledger'").await,
        0
    );
}

#[tokio::test]
async fn the_services_role_owns_nothing_and_cannot_rewrite_the_past() {
    let ledger = Ledger::start().await;
    ledger.agent().deposit("d-1", "acct-1", 1).await.succeeded();
    let owned = ledger
        .count("select count(*) from pg_class c join pg_roles r on r.oid = c.relowner where r.rolname = 'opledger'")
        .await;
    assert_eq!(owned, 0);
    let service = sqlx::PgPool::connect(&ledger.service_url).await.unwrap();
    for statement in [
        "update ledger.receipts set status = 500",
        "update ledger.history set reason = 'nothing happened'",
        "update ledger.requests set body = 'another'",
        "update ledger.links set other_id = 'another'",
        "insert into ledger.migrations (version, name, checksum) values (2, 'x', 'x')",
        "update ledger.migrations set checksum = 'x'",
        "delete from ledger.migrations",
        "create table ledger.mine (x int)",
        "alter table ledger.operations add column x int",
        "alter table ledger.operations drop constraint operations_state",
        "drop table ledger.receipts",
        "truncate ledger.history",
        "create function ledger.mine() returns int language sql as 'select 1'",
        "update shop.accounts set balance = 0",
        "select * from shop.accounts",
    ] {
        let refused = sqlx::query(statement).execute(&service).await.expect_err(statement);
        // insufficient_privilege, or "must be owner", which has the same code.
        assert_eq!(
            refused.as_database_error().unwrap().code().as_deref(),
            Some("42501"),
            "{statement}: {refused}"
        );
    }
    service.close().await;
}

#[tokio::test]
async fn a_database_without_the_schema_is_not_served() {
    let database = Database::empty().await;
    let said = refused("", &database.service_url).await;
    assert!(
        said.contains("0001 ledger") && said.contains("opledger migrate"),
        "{said}"
    );
}

#[tokio::test]
async fn a_database_that_may_lose_acknowledged_commits_is_served_only_when_told_so_in_so_many_words() {
    let database = Database::create().await;
    run(
        &database.sql,
        &format!(
            "alter role opledger in database \"{}\" set synchronous_commit = off",
            database.name
        ),
    )
    .await;
    let said = refused("", &database.service_url).await;
    assert!(
        said.contains("synchronous_commit = off") && said.contains("--allow-unsafe-durability"),
        "{said}"
    );
    let (_directory, config) = write_config("");
    let mut told = crate::support::process::command(
        &[
            "serve",
            "--allow-unsafe-durability",
            "--listen",
            "127.0.0.1:0",
            "--log-format",
            "json",
            "--config",
        ],
        &database.service_url,
    )
    .arg(&config)
    .stderr(std::process::Stdio::piped())
    .spawn()
    .unwrap();
    let lines = std::io::BufReader::new(told.stderr.take().unwrap());
    let mut warned = false;
    for line in std::io::BufRead::lines(lines).map_while(Result::ok) {
        warned |= line.contains("WARN") && line.contains("synchronous_commit");
        if line.contains("\"serving\"") {
            break;
        }
    }
    told.kill().unwrap();
    told.wait().unwrap();
    assert!(warned, "it says what it was told to accept");
}

#[tokio::test]
async fn a_handler_that_cannot_be_called_is_named_before_anything_is_served() {
    let database = Database::create().await;
    run(
        &database.sql,
        "create function shop.silent(payload jsonb, operation jsonb) returns jsonb language sql as 'select payload';
         revoke execute on function shop.silent(jsonb, jsonb) from public;
         create function shop.textual(payload jsonb, operation jsonb) returns text language sql as $$ select '' $$;
         create function shop.several(payload jsonb, operation jsonb) returns setof jsonb language sql as 'select payload';",
    )
    .await;
    let kinds = "[kinds.a]\nhandler = \"shop.nothing\"\n[kinds.b]\nhandler = \"shop.silent\"\n\
                 [kinds.c]\nhandler = \"shop.textual\"\n[kinds.d]\nhandler = \"shop.several\"\n";
    let said = refused(kinds, &database.service_url).await;
    for expected in [
        "there is no function shop.nothing",
        "may not run shop.silent",
        "shop.textual(jsonb, jsonb) must be",
        "shop.several(jsonb, jsonb) must be",
    ] {
        assert!(said.contains(expected), "{expected}: {said}");
    }
}

#[tokio::test]
async fn an_address_where_no_database_answers_is_one_clear_message_without_the_password() {
    let said = refused("", "postgres://someone:hunter2@127.0.0.1:1/nowhere").await;
    assert!(
        said.contains("127.0.0.1:1/nowhere") && !said.contains("hunter2"),
        "{said}"
    );
}

#[tokio::test]
async fn a_reload_takes_a_good_configuration_keeps_the_old_one_for_a_bad_one_and_drops_no_request() {
    let database = Database::create().await;
    notes::install(&database.sql).await;
    let key = database.keys(TENANT).await["agent"].clone();
    let (_directory, config) = write_config(notes::KINDS);
    let process = Process::serve(&config, &database.service_url);
    let client = Client::new(process.address, &key);
    let good = std::fs::read_to_string(&config).unwrap();
    let (stop, mut random) = (CancellationToken::new(), Random::announced("reload"));
    let load = tokio::spawn({
        let (client, stop) = (client.clone(), stop.clone());
        async move { notes::load(&client, "r", &mut random, &stop).await }
    });

    client.deposit("before", "acct-1", 1).await.succeeded();
    client
        .submit("late", "note.later", "{}")
        .await
        .is(400, "payload-invalid");
    std::fs::write(
        &config,
        format!("{good}\n[kinds.\"note.later\"]\nhandler = \"shop.note\"\n"),
    )
    .unwrap();
    process.signal(Signal::SIGHUP);
    process.has_logged("configuration reloaded").await;
    client.submit("late", "note.later", "{}").await.succeeded();

    for (bad, said) in [
        ("[limits]\nnonsense = 1\n".to_owned(), "nonsense"),
        (format!("{good}\n[kinds.gone]\nhandler = \"shop.gone\"\n"), "shop.gone"),
    ] {
        std::fs::write(&config, bad).unwrap();
        process.signal(Signal::SIGHUP);
        process.has_logged(said).await;
        client.submit("late", "note.later", "{}").await.succeeded();
    }

    stop.cancel();
    let sent: Vec<Sent> = load.await.unwrap();
    // Every client ended because it was told to, not because its request failed.
    assert!(sent.len() > 64, "there was load: {}", sent.len());
    let cut_off = sent.iter().filter(|one| one.acknowledged.is_none()).count();
    assert!(cut_off <= 32, "requests failed during the reload: {cut_off}");
    let sent = settle_all(sent, &client).await;
    audit(&database.sql, &sent).await;
}

#[tokio::test]
async fn a_reload_in_one_process_reads_retention_and_leaves_the_rest() {
    let ledger = Ledger::with(Setup {
        config: "[retention]\nreceipts = \"1d\"".to_owned(),
        ..Setup::default()
    })
    .await;
    ledger.agent().deposit("d-1", "acct-1", 1).await.succeeded();
    let text = std::fs::read_to_string(&ledger.config_path).unwrap();
    std::fs::write(&ledger.config_path, text.replace("1d", "2d")).unwrap();
    ledger.running.reload().await.unwrap();
    ledger.agent().deposit("d-2", "acct-1", 1).await.succeeded();
    let days: Vec<i32> = sqlx::query_scalar(
        "select extract(day from receipt_expires_at - settled_at)::int from ledger.operations order by operation_id",
    )
    .fetch_all(&ledger.sql)
    .await
    .unwrap();
    assert_eq!(days, [1, 2]);
}
