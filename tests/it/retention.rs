//! Retention: a receipt ends when the database's clock says so, the purge takes finished operations whole, and a late
//! duplicate is told the truth at any moment.

use std::process::{Command, Output};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use opledger::engine::recovery::{self, Purged};
use serde_json::Value;
use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::support::handlers::{self, WAYS};
use crate::support::{Answer, Ledger, open, run, until};

/// Purges only when a test says so.
const BY_HAND: &str = "[recovery]\npurge = \"forever\"\n";

/// Waits until the receipt's time is over by the database's clock.
async fn expired(ledger: &Ledger, id: &str) {
    until("the receipt expires", async || {
        sqlx::query_scalar::<_, bool>(
            "select clock_timestamp() >= receipt_expires_at from ledger.operations where operation_id = $1",
        )
        .bind(id)
        .fetch_one(&ledger.sql)
        .await
        .unwrap()
    })
    .await;
}

async fn purge(ledger: &Ledger, tombstones: Option<Duration>) -> Purged {
    let pool = open(&ledger.service_url).await;
    let purged = recovery::purge(&pool, tombstones, |_| {}).await.unwrap();
    pool.close().await;
    purged
}

/// `opledger purge` itself, as the service's role.
fn purge_program(ledger: &Ledger, arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_opledger"))
        .arg("purge")
        .arg("--config")
        .arg(&ledger.config_path)
        .args(arguments)
        .env("DATABASE_URL", &ledger.service_url)
        .output()
        .unwrap()
}

/// Rows of an operation beside its own: receipt, history, counts.
async fn rows_of(ledger: &Ledger, id: &str) -> (i64, i64, i64, i64) {
    sqlx::query_as(
        "select (select count(*) from ledger.operations where operation_id = $1 and purged_at is null), \
                (select count(*) from ledger.receipts where operation_id = $1), \
                (select count(*) from ledger.history where operation_id = $1), \
                (select count(*) from ledger.deliveries where operation_id = $1)",
    )
    .bind(id)
    .fetch_one(&ledger.sql)
    .await
    .unwrap()
}

/// What people see; the request's own id and the time of day aside.
fn seen(answer: &Answer) -> (u16, String, String, Value) {
    let mut body = answer.json();
    if let Some(document) = body.as_object_mut() {
        document.remove("deliveries");
    }
    (
        answer.status,
        answer.header("operation-state").to_owned(),
        answer.header("receipt-expires").to_owned(),
        body,
    )
}

#[tokio::test]
async fn an_expired_receipt_looks_the_same_before_and_after_the_purge() {
    let ledger = handlers::ledger(BY_HAND).await;
    let second = ledger.second().await;
    let agent = ledger.agent();
    let body = r#"{"operation_id":"old","kind":"brief","payload":{"n":1},"external_reference":"ref-old",
                   "run":{"engine":"e","run_id":"run-old","step":"s","attempt":1}}"#;
    agent.post("/v1/operations", body).await.succeeded();
    assert!(agent.post("/v1/operations", body).await.succeeded().is_replay());
    expired(&ledger, "old").await;

    let look = async || {
        let mut looks = Vec::new();
        for client in [agent.clone(), agent.at(second.address)] {
            let submitted = client.post("/v1/operations", body).await;
            looks.push(("submit", submitted.is(410, "receipt-expired")));
            let other = client.submit("old", "brief", r#"{"n":2}"#).await;
            looks.push(("mismatch", other.is(422, "fingerprint-mismatch")));
            let asynchronous = client
                .submit_with("old", "brief", r#"{"n":1}"#, &[("prefer", "respond-async")])
                .await;
            looks.push(("async", asynchronous.is(410, "receipt-expired")));
            looks.push((
                "receipt",
                client
                    .get("/v1/operations/old/receipt")
                    .await
                    .is(410, "receipt-expired"),
            ));
            looks.push((
                "execute",
                client
                    .send("POST", "/v1/operations/old/execute", &[], "")
                    .await
                    .is(410, "receipt-expired"),
            ));
            looks.push((
                "cancel",
                client
                    .send("POST", "/v1/operations/old/cancel", &[], "")
                    .await
                    .is(409, "state-conflict"),
            ));
            for path in [
                "/v1/operations/old",
                "/v1/operations",
                "/v1/operations?kind=brief",
                "/v1/operations?state=succeeded",
                "/v1/operations?run_id=run-old",
                "/v1/operations?external_reference=ref-old",
            ] {
                looks.push((path, client.get(path).await.succeeded()));
            }
        }
        looks
    };
    let before = look().await;
    assert_eq!(
        purge(&ledger, None).await,
        Purged {
            receipts: 1,
            tombstones: 0
        }
    );
    let after = look().await;
    for ((what, before), (_, after)) in before.iter().zip(&after) {
        let without_counts = |answer: &Answer| {
            let (status, state, expires, mut body) = seen(answer);
            for listed in body["operations"].as_array_mut().into_iter().flatten() {
                listed.as_object_mut().unwrap().remove("deliveries");
            }
            (status, state, expires, body)
        };
        assert_eq!(without_counts(before), without_counts(after), "{what}");
    }
    assert_eq!(ledger.effects("old").await, 1);
    let shown = agent.operation("old").await;
    assert_eq!(
        (&shown["state"], &shown["receipt"], &shown["effects"]),
        (&"succeeded".into(), &().into(), &1.into())
    );
}

#[tokio::test]
async fn deliveries_of_an_expired_operation_stay_counted() {
    let ledger = handlers::ledger(BY_HAND).await;
    let agent = ledger.agent();
    for _ in 0..3 {
        agent.submit("old", "brief", "{}").await.succeeded();
    }
    expired(&ledger, "old").await;
    agent.submit("old", "brief", "{}").await.is(410, "receipt-expired");
    until("four are counted", async || {
        agent.operation("old").await["deliveries"] == 4
    })
    .await;
    until("and written", async || {
        ledger
            .count("select coalesce(sum(repeats), 0)::bigint from ledger.deliveries")
            .await
            == 3
    })
    .await;
    purge(&ledger, None).await;
    agent.submit("old", "brief", "{}").await.is(410, "receipt-expired");
    until("and written", async || {
        ledger
            .count("select coalesce(sum(repeats), 0)::bigint from ledger.deliveries")
            .await
            == 4
    })
    .await;
    assert_eq!(agent.operation("old").await["deliveries"], 5);
    // When the id is free again nothing of this is left for who takes it next.
    assert_eq!(purge(&ledger, Some(Duration::ZERO)).await.tombstones, 1);
    assert_eq!(ledger.count("select count(*) from ledger.deliveries").await, 0);
    agent.submit("old", "brief", "{}").await.succeeded();
    assert_eq!(agent.operation("old").await["deliveries"], 1);
}

#[tokio::test]
async fn no_receipt_is_served_past_its_time_however_long_its_handler_took() {
    let ledger = handlers::ledger(BY_HAND).await;
    let agent = ledger.agent();
    for way in WAYS {
        let (id, kind) = (format!("slow{way}"), format!("fleeting{way}"));
        // The receipt's second begins with the claim or the settlement, the memory of it after the commit.
        let payload = r#"{"seconds":0.7}"#;
        agent.submit(&id, &kind, payload).await.succeeded();
        expired(&ledger, &id).await;
        agent.submit(&id, &kind, payload).await.is(410, "receipt-expired");
        assert_eq!(ledger.effects(&id).await, 1);
    }
}

#[tokio::test]
async fn the_databases_clock_alone_decides_when_a_receipt_expires() {
    let ledger = handlers::ledger(BY_HAND).await;
    let second = ledger.second().await;
    let agent = ledger.agent().at(second.address);
    // For this machine both were settled a moment ago; for the database one is past its time and one is not.
    for id in ["past", "ahead"] {
        ledger.agent().submit(id, "note", "{}").await.succeeded();
    }
    let shift = "update ledger.operations set receipt_expires_at = clock_timestamp() - interval '1 microsecond' where operation_id = 'past'; \
                 update ledger.receipts set expires_at = clock_timestamp() - interval '1 microsecond' where operation_id = 'past'; \
                 update ledger.operations set settled_at = settled_at - interval '10 years' where operation_id = 'ahead'";
    run(&ledger.sql, shift).await;
    agent.submit("past", "note", "{}").await.is(410, "receipt-expired");
    assert!(agent.submit("ahead", "note", "{}").await.succeeded().is_replay());
    assert_eq!(purge(&ledger, None).await.receipts, 1);
    assert!(agent.submit("ahead", "note", "{}").await.succeeded().is_replay());
}

#[tokio::test]
async fn a_finite_tombstone_frees_its_id_and_leaves_nothing() {
    let ledger = handlers::ledger(&format!("{BY_HAND}[retention]\ntombstones = \"1h\"\n")).await;
    let agent = ledger.agent();
    let first = agent.submit("again", "brief", r#"{"n":1}"#).await.succeeded();
    expired(&ledger, "again").await;
    let hour = Some(Duration::from_secs(3_600));
    assert_eq!(
        purge(&ledger, hour).await,
        Purged {
            receipts: 1,
            tombstones: 0
        }
    );
    assert_eq!(purge(&ledger, hour).await, Purged::default());
    agent
        .submit("again", "brief", r#"{"n":1}"#)
        .await
        .is(410, "receipt-expired");
    run(
        &ledger.sql,
        "update ledger.operations set purged_at = purged_at - interval '1 hour'",
    )
    .await;
    assert_eq!(
        purge(&ledger, hour).await,
        Purged {
            receipts: 0,
            tombstones: 1
        }
    );
    agent.get("/v1/operations/again").await.is(404, "not-found");
    // Free for any payload.
    let second = agent.submit("again", "brief", r#"{"n":2}"#).await.succeeded();
    assert!(!second.is_replay());
    assert_ne!(second.json()["fingerprint"], first.json()["fingerprint"]);
    assert_eq!(ledger.effects("again").await, 2);
    assert_eq!(agent.operation("again").await["history"].as_array().unwrap().len(), 1);
}

#[tokio::test]
async fn only_finished_operations_are_purged() {
    let ledger = handlers::ledger(BY_HAND).await;
    let agent = ledger.agent();
    agent.submit("model", "note", "{}").await.succeeded();
    run(
        &ledger.sql,
        "insert into ledger.operations (tenant_id, operation_id, kind, target, state, fingerprint, attempt, version, payload, \
             requested_by, instance_id, due_at, created_at, settled_at, receipt_expires_at) \
         select tenant_id, s.state, kind, target, s.state, fingerprint, \
             case when s.state in ('planned', 'waiting_approval') then 0 else 1 end, 1, payload, requested_by, \
             case when s.state = 'running' then (select instance_id from ledger.instances limit 1) end, \
             case when s.state = 'retry_wait' then now() + interval '1 year' end, now() - interval '10 years', \
             case when s.settled then now() - interval '10 years' end, case when s.settled then now() - interval '9 years' end \
         from ledger.operations, (values ('planned', false), ('waiting_approval', false), ('running', false), \
             ('retry_wait', false), ('needs_reconciliation', false), ('compensating', true), ('rejected', true), \
             ('cancelled', true), ('succeeded', true), ('failed', true), ('compensated', true)) as s (state, settled) \
         where operation_id = 'model'; \
         insert into ledger.receipts select tenant_id, operation_id, 200, '[]', '', sha256(''), \
             coalesce(receipt_expires_at, now() - interval '9 years') from ledger.operations where operation_id <> 'model'; \
         insert into ledger.history select tenant_id, operation_id, 1, now(), 'made', state, 'test', attempt \
             from ledger.operations where operation_id <> 'model'; \
         insert into ledger.requests select tenant_id, operation_id, 'POST', '/', '[]', '', 'key', created_at \
             from ledger.operations; \
         insert into ledger.links select tenant_id, operation_id, 'compensates', operation_id from ledger.operations",
    )
    .await;
    assert_eq!(
        purge(&ledger, Some(Duration::ZERO)).await,
        Purged {
            receipts: 5,
            tombstones: 5
        }
    );
    let left: Vec<String> = sqlx::query_scalar(
        "select o.operation_id from ledger.operations o join ledger.history using (tenant_id, operation_id) \
         join ledger.receipts using (tenant_id, operation_id) where payload is not null order by o.operation_id",
    )
    .fetch_all(&ledger.sql)
    .await
    .unwrap();
    let expected = [
        "compensating",
        "model",
        "needs_reconciliation",
        "planned",
        "retry_wait",
        "running",
        "waiting_approval",
    ];
    assert_eq!(left, expected);
    // One row of each table for each of the seven, and none for anybody else.
    for table in ["receipts", "history", "requests", "links"] {
        let kept: Vec<String> = sqlx::query_scalar(sqlx::AssertSqlSafe(format!(
            "select operation_id from ledger.{table} order by operation_id"
        )))
        .fetch_all(&ledger.sql)
        .await
        .unwrap();
        assert_eq!(kept, expected, "{table}");
    }
}

/// Three expired operations with every kind of row.
async fn with_three_expired() -> Ledger {
    let ledger = handlers::ledger(BY_HAND).await;
    for id in ["a", "b", "c"] {
        for _ in 0..2 {
            ledger.agent().submit(id, "brief", "{}").await.succeeded();
        }
    }
    until("the counts are written", async || {
        ledger.count("select count(*) from ledger.deliveries").await == 3
    })
    .await;
    expired(&ledger, "c").await;
    run(
        &ledger.sql,
        "insert into ledger.requests select tenant_id, operation_id, 'POST', '/', '[]', '', 'key', created_at \
         from ledger.operations",
    )
    .await;
    ledger
}

async fn assert_whole(ledger: &Ledger) {
    assert_eq!(ledger.count("select count(*) from ledger.requests").await, 3);
    for id in ["a", "b", "c"] {
        assert_eq!(rows_of(ledger, id).await, (1, 1, 1, 1), "{id} is whole");
        ledger
            .agent()
            .submit(id, "brief", "{}")
            .await
            .is(410, "receipt-expired");
    }
}

async fn assert_gone(ledger: &Ledger) {
    assert_eq!(ledger.count("select count(*) from ledger.requests").await, 0);
    for id in ["a", "b", "c"] {
        let (kept, receipts, history, _) = rows_of(ledger, id).await;
        assert_eq!((kept, receipts, history), (0, 0, 0), "{id} is gone");
        ledger
            .agent()
            .submit(id, "brief", "{}")
            .await
            .is(410, "receipt-expired");
        assert_eq!(ledger.effects(id).await, 1);
    }
}

#[tokio::test]
async fn a_purge_whose_later_table_fails_removes_nothing() {
    let ledger = with_three_expired().await;
    run(
        &ledger.sql,
        "create function it.refuse() returns trigger language plpgsql as $$ begin raise exception 'not this row'; end $$",
    )
    .await;
    for table in ["receipts", "history", "requests", "operations"] {
        let event = if table == "operations" { "update" } else { "delete" };
        run(
            &ledger.sql,
            &format!(
                "create trigger refuse before {event} on ledger.{table} for each row when (old.operation_id = 'c') \
                 execute function it.refuse()"
            ),
        )
        .await;
        let failed = purge_program(&ledger, &[]);
        assert!(!failed.status.success());
        assert!(
            String::from_utf8_lossy(&failed.stderr).contains("purge expired receipts"),
            "{failed:?}"
        );
        assert_whole(&ledger).await;
        run(&ledger.sql, &format!("drop trigger refuse on ledger.{table}")).await;
    }
    assert_eq!(purge(&ledger, None).await.receipts, 3);
    assert_gone(&ledger).await;
}

#[tokio::test]
async fn a_purge_killed_halfway_removes_nothing() {
    let ledger = with_three_expired().await;
    run(
        &ledger.sql,
        "create function it.linger() returns trigger language plpgsql as $$ begin perform pg_sleep(60); return old; end $$; \
         create trigger linger before delete on ledger.history for each row execute function it.linger()",
    )
    .await;
    let pool = open(&ledger.service_url).await;
    let purging = tokio::spawn({
        let pool = pool.clone();
        async move { recovery::purge(&pool, None, |_| {}).await }
    });
    let backend = "select coalesce(max(pid), 0)::bigint from pg_stat_activity where datname = current_database() \
                   and wait_event = 'PgSleep' and query like '%tombstones%'";
    until("the purge is halfway", async || ledger.count(backend).await != 0).await;
    let killed: bool = sqlx::query_scalar("select pg_terminate_backend($1::integer)")
        .bind(i32::try_from(ledger.count(backend).await).unwrap())
        .fetch_one(&ledger.sql)
        .await
        .unwrap();
    assert!(killed);
    assert!(purging.await.unwrap().is_err());
    assert_whole(&ledger).await;
    run(&ledger.sql, "drop trigger linger on ledger.history").await;
    // The same pool goes on with another connection.
    assert_eq!(recovery::purge(&pool, None, |_| {}).await.unwrap().receipts, 3);
    assert_gone(&ledger).await;
    pool.close().await;
}

#[tokio::test]
async fn the_program_purges_and_says_what_it_removed() {
    let ledger = handlers::ledger(&format!("{BY_HAND}[retention]\ntombstones = \"1h\"\n")).await;
    let agent = ledger.agent();
    for id in ["a", "b"] {
        agent.submit(id, "brief", "{}").await.succeeded();
    }
    agent.submit("young", "note", "{}").await.succeeded();
    expired(&ledger, "b").await;
    let purged = purge_program(&ledger, &["--json"]);
    assert!(purged.status.success(), "{purged:?}");
    let said: Value = serde_json::from_slice(&purged.stdout).unwrap();
    assert_eq!(said, serde_json::json!({ "receipts": 2, "tombstones": 0 }));
    assert_eq!(
        ledger
            .count("select count(*) from ledger.operations where purged_at is not null")
            .await,
        2
    );
    run(
        &ledger.sql,
        "update ledger.operations set purged_at = purged_at - interval '1 hour' where operation_id = 'a'",
    )
    .await;
    let purged = purge_program(&ledger, &[]);
    assert_eq!(
        String::from_utf8_lossy(&purged.stdout),
        "purged 0 receipts and 1 tombstones\n"
    );
    assert!(agent.submit("young", "note", "{}").await.succeeded().is_replay());
    agent.submit("b", "brief", "{}").await.is(410, "receipt-expired");
    assert!(!agent.submit("a", "brief", "{}").await.succeeded().is_replay());
}

#[tokio::test]
async fn a_purge_without_a_database_fails_and_says_so() {
    let ledger = handlers::ledger(BY_HAND).await;
    let failed = Command::new(env!("CARGO_BIN_EXE_opledger"))
        .arg("purge")
        .arg("--config")
        .arg(&ledger.config_path)
        .env("DATABASE_URL", "postgres://opledger:hidden-secret@127.0.0.1:1/none")
        .output()
        .unwrap();
    assert!(!failed.status.success());
    let said = String::from_utf8_lossy(&failed.stderr);
    assert!(
        said.contains("127.0.0.1:1") && !said.contains("hidden-secret"),
        "{said}"
    );
    assert!(failed.stdout.is_empty());
}

#[tokio::test]
async fn more_than_a_batch_is_purged_in_one_go() {
    let ledger = handlers::ledger(BY_HAND).await;
    ledger.agent().submit("model", "brief", "{}").await.succeeded();
    expired(&ledger, "model").await;
    for table in ["operations", "receipts", "history"] {
        run(
            &ledger.sql,
            &format!(
                "insert into ledger.{table} select (jsonb_populate_record(t, jsonb_build_object('operation_id', 'copy-' || n))).* \
                 from ledger.{table} t, generate_series(1, 2500) n where operation_id = 'model'"
            ),
        )
        .await;
    }
    let mut batches = Vec::new();
    let pool = open(&ledger.service_url).await;
    let purged = recovery::purge(&pool, Some(Duration::ZERO), |so_far| batches.push(so_far.receipts))
        .await
        .unwrap();
    pool.close().await;
    assert_eq!(
        purged,
        Purged {
            receipts: 2_501,
            tombstones: 2_501
        }
    );
    assert!(batches.windows(2).all(|pair| pair[1] - pair[0] <= 1_000), "{batches:?}");
    for table in [
        "select count(*) from ledger.operations",
        "select count(*) from ledger.receipts",
        "select count(*) from ledger.history",
    ] {
        assert_eq!(ledger.count(table).await, 0);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ids_reused_around_their_expiry_have_one_effect_a_period() {
    const CLIENTS: usize = 20;
    const IDS: usize = 5;
    let ledger = handlers::ledger(BY_HAND).await;
    let second = ledger.second().await;
    let stop = Arc::new(AtomicBool::new(false));
    let purging = tokio::spawn({
        let (stop, url) = (stop.clone(), ledger.service_url.clone());
        async move {
            let pool = open(&url).await;
            let mut purges = 0;
            while !stop.load(Ordering::Relaxed) {
                recovery::purge(&pool, Some(Duration::ZERO), |_| {}).await.unwrap();
                purges += 1;
            }
            pool.close().await;
            purges
        }
    });
    let until = Instant::now() + Duration::from_secs(6);
    let mut clients = JoinSet::new();
    for number in 0..CLIENTS {
        let client = if number % 2 == 0 {
            ledger.agent()
        } else {
            ledger.agent().at(second.address)
        };
        clients.spawn(async move {
            let mut ran = 0;
            while Instant::now() < until {
                let id = format!("reused-{}", number % IDS);
                let kind = ["fleeting", "fleeting.alone"][number % IDS % 2];
                let payload = if number == 7 { r#"{"n":2}"# } else { r#"{"n":1}"# };
                let answer = client.submit(&id, kind, payload).await;
                match (answer.status, answer.code().as_str()) {
                    (200, _) => {
                        assert_eq!(answer.json()["result"], serde_json::from_str::<Value>(payload).unwrap());
                        ran += u32::from(!answer.is_replay());
                    }
                    (422, "fingerprint-mismatch") | (409, "operation-in-progress") | (410, "receipt-expired") => {}
                    _ => panic!("{} {:?}", answer.status, String::from_utf8_lossy(&answer.body)),
                }
            }
            ran
        });
    }
    let ran: u32 = clients.join_all().await.iter().sum();
    stop.store(true, Ordering::Relaxed);
    assert!(purging.await.unwrap() > 20);
    // The retention is a second: no two effects of an id are nearer than that (less what a transaction takes).
    let effects = ledger.count("select count(*) from it.effects").await;
    let close = "select count(*) from (select at - lag(at) over (partition by operation_id order by at) as gap from it.effects) e \
                 where gap < interval '950 ms'";
    assert_eq!(ledger.count(close).await, 0);
    assert_eq!(effects, i64::from(ran), "each effect was answered once as the first");
    assert!(
        effects > i64::try_from(IDS * 3).unwrap(),
        "the ids were reused: {effects}"
    );
}
