//! A database that is slow, silent, or lost at the worst moment, and updates that get into each other's way.

use std::time::{Duration, Instant};

use tokio::task::JoinSet;
use tokio_util::sync::CancellationToken;

use crate::support::notes::{self, Sent, audit, effects, is_receipt, load, settle_all};
use crate::support::proxy::{Cut, Proxy};
use crate::support::random::Random;
use crate::support::{Client, Database, Ledger, Setup, TENANT, run, serve, shared, write_config};
use opledger::app::Running;

/// Nothing but operations commits: what is planned for a COMMIT happens to one of theirs.
const QUIET: &str = r#"
    [recovery]
    heartbeat = "1h"
    lease = "3h"
    sweep = "1h"
    purge = "forever"
"#;

/// A service that reaches its database over a bad network.
struct Remote {
    database: Database,
    proxy: Proxy,
    running: Running,
    client: Client,
    config: std::path::PathBuf,
    _directory: tempfile::TempDir,
}

impl Remote {
    async fn start(lines: &str) -> Self {
        let database = Database::create().await;
        notes::install(&database.sql).await;
        let key = database.keys(TENANT).await["agent"].clone();
        let proxy = Proxy::before(shared()).await;
        let (directory, config) = write_config(&format!("{lines}{}", notes::KINDS));
        let running = serve(&config, &proxy.url("opledger", &database.name)).await;
        let client = Client::new(running.address, &key);
        Self {
            database,
            proxy,
            running,
            client,
            config,
            _directory: directory,
        }
    }

    async fn number(&self, query: &'static str) -> i64 {
        sqlx::query_scalar(query).fetch_one(&self.database.sql).await.unwrap()
    }

    /// To be called before anything else is sent, which might end a transaction that somebody left open.
    async fn no_transaction_is_open_within(&self, most: Duration) {
        let open = "select count(*) from pg_stat_activity where datname = current_database()
                    and application_name = 'opledger' and (state like 'idle in transaction%' or state = 'active')";
        let give_up_at = Instant::now() + most;
        while self.number(open).await > 0 {
            assert!(Instant::now() < give_up_at, "a transaction is left open");
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_lost_at_commit_ends_in_the_receipt_or_in_503_and_in_one_effect() {
    let mut random = Random::announced("lost at commit");
    let remote = Remote::start(QUIET).await;
    let mut sent = Vec::new();
    for round in 0..100 {
        let cuts: Vec<Cut> = (0..=random.below(3))
            .map(|_| [Cut::Before, Cut::During, Cut::After][usize::try_from(random.below(3)).unwrap()])
            .collect();
        remote.proxy.plan(cuts.clone());
        let mut one = Sent::any(format!("c{round}"), &mut random);
        one.respond_async = false;
        let answer = one.send(&remote.client).await.unwrap();
        assert!(is_receipt(&answer) || answer.status == 503, "{cuts:?}: {answer:?}");
        remote.proxy.plan([]);
        one.settle(&remote.client).await;
        sent.push(one);
    }
    assert!(remote.proxy.made() >= 100, "commits were lost: {}", remote.proxy.made());
    // From the tables, not from memory.
    let other = serve(&remote.config, &remote.database.service_url).await;
    let sent = settle_all(sent, &remote.client.at(other.address)).await;
    audit(&remote.database.sql, &sent).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_operation_whose_acceptance_lost_its_commit_is_not_left_running() {
    let mut random = Random::announced("acceptance lost");
    let remote = Remote::start(QUIET).await;
    let mut sent = Vec::new();
    for round in 0..30 {
        let cut = [Cut::Before, Cut::During, Cut::After][round % 3];
        remote.proxy.plan([cut]);
        let mut one = Sent::any(format!("a{round}"), &mut random);
        one.respond_async = true;
        let answer = one.send(&remote.client).await.unwrap();
        assert!(matches!(answer.status, 202 | 503), "{cut:?}: {answer:?}");
        remote.proxy.plan([]);
        one.settle(&remote.client).await;
        sent.push(one);
    }
    assert!(remote.proxy.made() >= 30);
    audit(&remote.database.sql, &sent).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_planned_operation_whose_claim_lost_its_commit_is_not_left_running() {
    let remote = Remote::start(QUIET).await;
    let mut sent = Vec::new();
    for round in 0..30 {
        let cut = [Cut::Before, Cut::During, Cut::After][round % 3];
        let one = Sent::new(format!("e{round}"), "note");
        assert_eq!(remote.client.post("/v1/operations", &plan(&one)).await.status, 202);
        remote.proxy.plan([cut]);
        let execute = format!("/v1/operations/{}/execute", one.id);
        let answer = remote.client.post(&execute, "").await;
        assert!(matches!(answer.status, 200 | 503), "{cut:?}: {answer:?}");
        remote.proxy.plan([]);
        let give_up_at = Instant::now() + Duration::from_secs(15);
        while remote.client.post(&execute, "").await.status != 200 {
            assert!(Instant::now() < give_up_at, "{cut:?}: {} is stuck", one.id);
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        sent.push(one);
    }
    audit(&remote.database.sql, &sent).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_connection_that_falls_silent_at_commit_does_not_keep_its_caller_for_ever() {
    let remote = Remote::start(&format!(
        "{QUIET}[kinds.\"note.brief\"]\nhandler = \"shop.note\"\ngroup_commit = false\ntimeout = \"1s\"\n"
    ))
    .await;
    let mut sent = Vec::new();
    for kind in ["note.brief", "note"] {
        remote.proxy.plan([Cut::Silence]);
        let mut one = Sent::new(kind.to_owned(), kind);
        let answer = tokio::time::timeout(Duration::from_secs(18), one.send(&remote.client))
            .await
            .expect("the caller is answered")
            .unwrap();
        assert!(is_receipt(&answer) || answer.status == 503, "{answer:?}");
        one.settle(&remote.client).await;
        assert_eq!(effects(&remote.database.sql, kind).await, 1);
        sent.push(one);
    }
    assert_eq!(remote.proxy.made(), 2);
    audit(&remote.database.sql, &sent).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_database_that_stands_still_for_a_while_costs_time_and_nothing_else() {
    let mut random = Random::announced("stalls");
    let remote = Remote::start("").await;
    let (stop, mut stream) = (CancellationToken::new(), random.split());
    let senders = load(&remote.client, "s", &mut stream, &stop);
    let network = async {
        for _ in 0..6 {
            tokio::time::sleep(random.between(Duration::from_millis(50), Duration::from_millis(250))).await;
            remote.proxy.flow(false);
            tokio::time::sleep(random.between(Duration::from_millis(100), Duration::from_millis(700))).await;
            remote.proxy.flow(true);
            remote.proxy.delay(Duration::from_millis(random.below(20)));
        }
        remote.proxy.delay(Duration::ZERO);
        stop.cancel();
    };
    let (sent, ()) = tokio::join!(senders, network);
    let unanswered = sent.iter().filter(|one| one.acknowledged.is_none()).count();
    assert!(
        unanswered <= 32,
        "only what was cut off at the end is open: {unanswered}"
    );
    let sent = settle_all(sent, &remote.client).await;
    audit(&remote.database.sql, &sent).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_database_that_is_gone_is_503_and_everything_goes_on_when_it_is_back() {
    let remote = Remote::start(
        "[database]\nacquire_timeout = \"300ms\"\n[kinds.\"note.brief\"]\nhandler = \"shop.note\"\ntimeout = \"1s\"\n",
    )
    .await;
    let mut sent: Vec<Sent> = (0..8)
        .map(|number| Sent::new(format!("g{number}"), "note.brief"))
        .collect();
    sent[0].settle(&remote.client).await;
    remote.proxy.flow(false);
    let mut asked = JoinSet::new();
    for one in sent.clone() {
        let client = remote.client.clone();
        asked.spawn(async move {
            let mut one = one;
            tokio::time::timeout(Duration::from_secs(18), one.send(&client))
                .await
                .expect("an answer")
                .unwrap()
        });
    }
    for answer in asked.join_all().await {
        assert!(
            is_receipt(&answer) || (answer.status == 503 && !answer.header("retry-after").is_empty()),
            "{answer:?}"
        );
    }
    remote.proxy.flow(true);
    let sent = settle_all(sent, &remote.client).await;
    audit(&remote.database.sql, &sent).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_dropped_at_any_moment_leave_no_transaction_open_and_the_next_one_works() {
    let mut random = Random::announced("aborts");
    let pool = "[database]\nmax_connections = 3\napply_connections = 1\nacquire_timeout = \"30s\"\n";
    let remote = Remote::start(&format!("{pool}{QUIET}")).await;
    remote.proxy.delay(Duration::from_millis(200));
    let mut dropped = JoinSet::new();
    for number in 0..200 {
        let mut one = Sent::any(format!("d{number}"), &mut random);
        let (client, mut random) = (remote.client.clone(), random.split());
        dropped.spawn(async move {
            // Forty at a time.
            tokio::time::sleep(Duration::from_millis(1_000 * (number / 40))).await;
            let moment = random.between(Duration::ZERO, Duration::from_millis(1_800));
            if number % 3 == 0 {
                let _ = tokio::time::timeout(moment, client.post("/v1/operations", &plan(&one))).await;
            } else {
                let _ = tokio::time::timeout(moment, one.send(&client)).await;
            }
            (number % 3 == 0, one)
        });
    }
    let sent = dropped.join_all().await;
    let (planned, sent): (Vec<_>, Vec<_>) = sent.into_iter().partition(|(is_planned, _)| *is_planned);
    let planned: Vec<Sent> = planned.into_iter().map(|(_, one)| one).collect();
    let sent: Vec<Sent> = sent.into_iter().map(|(_, one)| one).collect();
    remote.proxy.delay(Duration::ZERO);
    let aborted = sent.iter().filter(|one| one.acknowledged.is_none()).count();
    assert!(aborted > 20, "requests were dropped: {aborted}");
    remote.no_transaction_is_open_within(Duration::from_secs(4)).await;
    remote.client.deposit("next", "acct-1", 1).await.succeeded();
    for one in &planned {
        let answer = remote.client.post("/v1/operations", &plan(one)).await;
        assert_eq!(
            (answer.status, answer.header("operation-state")),
            (202, "planned"),
            "{answer:?}"
        );
        assert!(is_receipt(
            &remote
                .client
                .post(&format!("/v1/operations/{}/execute", one.id), "")
                .await
        ));
    }
    let twice = "select count(*) from (select from shop.notes group by operation_id having count(*) > 1) x";
    assert_eq!(remote.number(twice).await, 0);
    let sent = settle_all(sent, &remote.client).await;
    audit(&remote.database.sql, &sent).await;
    let (in_use, _) = remote.running.app.pool.usage();
    assert!(in_use <= 1, "only the worker keeps a connection: {in_use}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_request_dropped_inside_its_transaction_does_not_hand_it_on() {
    let remote = Remote::start(QUIET).await;
    remote.client.get("/v1/operations?limit=1").await.succeeded();
    remote.proxy.delay(Duration::from_millis(40));
    for moment in 1..=25 {
        let one = Sent::new(format!("t{moment}"), "note");
        let _ = tokio::time::timeout(
            Duration::from_millis(15 * moment),
            remote.client.post("/v1/operations", &plan(&one)),
        )
        .await;
        remote.no_transaction_is_open_within(Duration::from_secs(2)).await;
    }
    remote.proxy.delay(Duration::ZERO);
    remote.client.deposit("next", "acct-1", 1).await.succeeded();
}

fn plan(one: &Sent) -> String {
    format!(
        r#"{{"kind":"{}","operation_id":"{}","payload":{},"mode":"plan"}}"#,
        one.kind, one.id, one.payload
    )
}

#[tokio::test]
async fn transfers_in_opposite_order_all_succeed() {
    for group_commit in [true, false] {
        let kind =
            format!("[kinds.\"account.transfer\"]\nhandler = \"shop.transfer\"\ngroup_commit = {group_commit}\n");
        let ledger = Ledger::with(Setup {
            config: kind,
            ..Setup::default()
        })
        .await;
        let second = ledger.second().await;
        let (here, there) = (ledger.agent(), ledger.agent().at(second.address));
        for round in 0..100 {
            let (forth, back) = (format!("f{round}"), format!("b{round}"));
            let (one, other) = tokio::join!(
                here.submit(
                    &forth,
                    "account.transfer",
                    r#"{"from":"acct-1","to":"acct-2","amount":3}"#
                ),
                there.submit(
                    &back,
                    "account.transfer",
                    r#"{"from":"acct-2","to":"acct-1","amount":2}"#
                ),
            );
            one.succeeded();
            other.succeeded();
        }
        assert_eq!(ledger.balance("acct-1").await, 1_000_000 - 100);
        assert_eq!(ledger.balance("acct-2").await, 1_000_000 + 100);
    }
}

/// Locks two rows in the order that the payload says, with a pause between: made to deadlock.
const DEADLOCKING: &str = r"
    create table shop.pairs (name text primary key, swaps integer not null default 0);
    insert into shop.pairs values ('a'), ('b');
    create function shop.swap(payload jsonb, operation jsonb) returns jsonb
    language plpgsql security definer set search_path = pg_catalog, pg_temp as $$
    begin
        update shop.pairs set swaps = swaps + 1 where name = payload->>'first';
        perform pg_sleep(0.01);
        update shop.pairs set swaps = swaps + 1 where name = payload->>'second';
        return '{}';
    end
    $$;
    grant execute on function shop.swap(jsonb, jsonb) to opledger;
";

async fn deadlocks(group_commit: bool) {
    let ledger = Ledger::with(Setup {
        config: format!("[kinds.swap]\nhandler = \"shop.swap\"\ngroup_commit = {group_commit}\n"),
        sql: DEADLOCKING.to_owned(),
    })
    .await;
    // PostgreSQL looks for deadlocks after a second; a hundred rounds would take minutes.
    run(
        &ledger.sql,
        &format!(
            "alter role opledger in database \"{}\" set deadlock_timeout = '10ms'",
            ledger.database
        ),
    )
    .await;
    let (one, other) = (ledger.second().await, ledger.second().await);
    let (here, there) = (ledger.agent().at(one.address), ledger.agent().at(other.address));
    for round in 0..100 {
        let (forth, back) = (format!("f{round}"), format!("b{round}"));
        let answers = tokio::join!(
            here.submit(&forth, "swap", r#"{"first":"a","second":"b"}"#),
            there.submit(&back, "swap", r#"{"first":"b","second":"a"}"#),
        );
        for (id, client, mut answer) in [(forth, &here, answers.0), (back, &there, answers.1)] {
            let payload = if id.starts_with('f') {
                r#"{"first":"a","second":"b"}"#
            } else {
                r#"{"first":"b","second":"a"}"#
            };
            while answer.status == 503 {
                assert!(!answer.header("retry-after").is_empty());
                answer = client.submit(&id, "swap", payload).await;
            }
            answer.succeeded();
        }
    }
    assert_eq!(
        ledger.count("select sum(swaps) from shop.pairs where name = 'a'").await,
        200
    );
    assert_eq!(
        ledger.count("select sum(swaps) from shop.pairs where name = 'b'").await,
        200
    );
    let give_up_at = Instant::now() + Duration::from_secs(10);
    // Sessions report what they met when they are idle; without deadlocks this test shows nothing.
    while ledger
        .count("select deadlocks from pg_stat_database where datname = current_database()")
        .await
        == 0
    {
        assert!(Instant::now() < give_up_at, "there was no deadlock");
        tokio::time::sleep(Duration::from_millis(50)).await;
    }
}

#[tokio::test]
async fn deadlocked_operations_are_tried_again_inside_a_group() {
    deadlocks(true).await;
}

#[tokio::test]
async fn deadlocked_operations_are_tried_again_alone() {
    deadlocks(false).await;
}
