//! Connections to PostgreSQL that are lost exactly at COMMIT, at the claim and at the settlement: whatever the ledger then
//! knows or does not know, a request is sent once.

use std::time::Duration;

use tokio::task::JoinSet;

use crate::support::downstream::{Downstream, Gate, Script};
use crate::support::proxy::{Cut, Proxy};
use crate::support::{Answer, Client, Database, TENANT, serve, shared, until, write_config};

/// Nobody else commits while a cut is planned.
const STILL: &str = "[recovery]\nheartbeat = \"20m\"\nlease = \"1h\"\nsweep = \"20m\"\n";

/// The statements at which a claim and a settlement commit where a group is one statement.
const CLAIM: &str = "insert into ledger.requests";
const SETTLEMENT: &str = "insert into ledger.receipts";

/// How a group is written: one statement that commits by itself, or a transaction.
const FORMS: [(&str, bool); 2] = [("", true), ("[database]\nprepared_statements = false\n", false)];

const CUTS: [Cut; 3] = [Cut::Before, Cut::During, Cut::After];

struct Wired {
    pay: Downstream,
    network: Proxy,
    agent: Client,
    database: Database,
    _running: opledger::app::Running,
    _directory: tempfile::TempDir,
    alone: bool,
}

impl Wired {
    /// What becomes of the next commits of these statements.
    fn plan(&self, statement: &'static str, cuts: impl IntoIterator<Item = Cut>) {
        if self.alone {
            self.network.plan_statements(statement, cuts);
        } else {
            self.network.plan(cuts);
        }
    }
}

async fn wired(form: (&str, bool)) -> Wired {
    let routes =
        "[[routes]]\npath = \"/**\"\ncompensation = { method = \"DELETE\", path = \"/made/{operation_id}\" }\n";
    wired_with(form, routes).await
}

async fn wired_with((lines, alone): (&str, bool), routes: &str) -> Wired {
    let (database, pay) = (Database::create().await, Downstream::start().await);
    let network = Proxy::before(shared()).await;
    let key = database.keys(TENANT).await["agent"].clone();
    let (directory, config) = write_config(&format!("{lines}{STILL}{}", pay.config("pay", routes)));
    let running = serve(&config, &network.url("opledger", &database.name)).await;
    let agent = Client::new(running.address, &key);
    Wired {
        pay,
        network,
        agent,
        database,
        _running: running,
        _directory: directory,
        alone,
    }
}

/// Sends it until there is an answer; everything before that says to come back.
async fn until_answered(agent: &Client, key: &str) -> Answer {
    let give_up_at = std::time::Instant::now() + Duration::from_secs(15);
    loop {
        let answer = agent.forward("POST", key, &format!("/{key}"), "{}").await;
        match (answer.status, answer.code().as_str()) {
            (201, _) => return answer,
            (503, "ledger-unavailable") | (409, "operation-in-progress") => {}
            other => panic!("{key}: {other:?}"),
        }
        assert!(std::time::Instant::now() < give_up_at, "{key} is stuck: {answer:?}");
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_whose_commit_is_lost_is_sent_once_however_soon_it_is_tried_again() {
    for form in FORMS {
        lose_claims(&wired(form).await).await;
    }
}

async fn lose_claims(wired: &Wired) {
    const ROUNDS: usize = 12;
    // As long as it takes to take an unconfirmed claim back, and longer.
    wired.pay.answers(|_| {
        Script::new()
            .pause(Duration::from_millis(150))
            .before(Script::answer(201, "{}"))
    });
    wired.agent.forward("POST", "warm", "/warm", "{}").await;
    let mut cuts = 0;
    let mut lost = 0;
    for round in 0..ROUNDS {
        let key = format!("k{round}");
        wired.plan(CLAIM, [CUTS[round % 3]]);
        let first = wired.agent.forward("POST", &key, &format!("/{key}"), "{}").await;
        lost += u32::from(first.status == 503);
        cuts = wired.network.made();
        wired.plan(CLAIM, []);
        until_answered(&wired.agent, &key).await;
        assert_eq!(
            wired.pay.sends(&format!("/{key}")),
            1,
            "{key}: {:?} {first:?}",
            CUTS[round % 3]
        );
    }
    assert!(cuts >= ROUNDS as u64 * 9 / 10 && lost >= 6, "{cuts} cuts, {lost} lost");
    let settled: i64 =
        sqlx::query_scalar("select count(*) from ledger.operations where state = 'succeeded' and attempt = 1")
            .fetch_one(&wired.database.sql)
            .await
            .unwrap();
    assert_eq!(settled, ROUNDS as i64 + 1);
}

/// Many claims share a commit: none of them is forgotten because the others were in doubt with it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn claims_that_lose_their_common_commit_are_all_free_or_sent_and_none_is_stuck() {
    for form in FORMS {
        lose_groups(&wired(form).await).await;
    }
}

async fn lose_groups(wired: &Wired) {
    wired.pay.answers(|_| {
        Script::new()
            .pause(Duration::from_millis(150))
            .before(Script::answer(201, "{}"))
    });
    for (round, cut) in CUTS.iter().cycle().take(3).enumerate() {
        // What piles up while nothing flows is claimed together.
        wired.network.flow(false);
        let mut senders = JoinSet::new();
        for number in 0..24 {
            let agent = wired.agent.clone();
            senders.spawn(async move {
                let key = format!("g{round}-{number}");
                let first = agent.forward("POST", &key, &format!("/{key}"), "{}").await;
                assert!([201, 503, 409].contains(&first.status), "{first:?}");
                key
            });
        }
        tokio::time::sleep(Duration::from_millis(300)).await;
        wired.plan(CLAIM, [*cut; 3]);
        wired.network.flow(true);
        let keys = senders.join_all().await;
        wired.plan(CLAIM, []);
        for key in keys {
            until_answered(&wired.agent, &key).await;
            assert_eq!(wired.pay.sends(&format!("/{key}")), 1, "{key}: {cut:?}");
        }
    }
    assert!(wired.network.made() >= 6, "{}", wired.network.made());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_settlement_whose_commit_is_lost_is_found_again() {
    for form in FORMS {
        lose_settlements(&wired(form).await).await;
    }
}

async fn lose_settlements(wired: &Wired) {
    const ROUNDS: usize = 12;
    for round in 0..ROUNDS {
        let key = format!("s{round}");
        let gate = Gate::new();
        let held = gate.clone();
        wired.pay.answers(move |request| {
            Script::new()
                .gate(&held)
                .before(Script::answer(201, format!("{{\"n\":{}}}", request.number)))
        });
        let asked = tokio::spawn({
            let (agent, key) = (wired.agent.clone(), key.clone());
            async move { agent.forward("POST", &key, &format!("/{key}"), "{}").await }
        });
        wired.pay.received(round + 1).await;
        let made = wired.network.made();
        wired.plan(SETTLEMENT, [CUTS[round % 3]]);
        gate.open();
        let first = asked.await.unwrap();
        assert_eq!(
            (first.status, first.is_replay()),
            (201, false),
            "{:?} {first:?}",
            CUTS[round % 3]
        );
        assert_eq!(first.json()["n"], round);
        assert_eq!(wired.network.made(), made + 1);
        let again = wired.agent.forward("POST", &key, &format!("/{key}"), "{}").await;
        assert!(again.is_replay() && again.body == first.body);
        assert_eq!(wired.pay.sends(&format!("/{key}")), 1);
    }
    let odd = "select count(*) from ledger.history where event not in ('claimed', 'succeeded')";
    let odd: i64 = sqlx::query_scalar(odd).fetch_one(&wired.database.sql).await.unwrap();
    assert_eq!(odd, 0, "nothing was late, nobody else was at it");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_unknown_whose_commit_is_lost_is_written_down_once() {
    let wired = wired(FORMS[0]).await;
    for (round, cut) in CUTS.into_iter().enumerate() {
        let key = format!("u{round}");
        let gate = Gate::new();
        let held = gate.clone();
        wired.pay.answers(move |_| Script::new().gate(&held).reset());
        let asked = tokio::spawn({
            let (agent, key) = (wired.agent.clone(), key.clone());
            async move { agent.forward("POST", &key, &format!("/{key}"), "{}").await }
        });
        wired.pay.received(round + 1).await;
        wired.network.plan([cut]);
        gate.open();
        asked.await.unwrap().is(409, "outcome-unknown");
        assert_eq!(wired.pay.sends(&format!("/{key}")), 1);
        let operation = wired.agent.operation(&key).await;
        assert_eq!(
            super::events(&operation)[..2],
            ["claimed", "outcome_unknown"],
            "{cut:?}"
        );
        assert_eq!(operation["state"], "needs_reconciliation");
    }
}

/// A reversal that was begun in doubt is not left begun for ever.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_reversal_whose_commit_is_lost_is_made_once() {
    let wired = wired(FORMS[0]).await;
    let keys = wired.database.keys("ops").await;
    let agent = wired.agent.with_key(&keys["agent"]);
    let operator = wired.agent.with_key(&keys["operator"]);
    for (round, cut) in CUTS.into_iter().enumerate() {
        let key = format!("r{round}");
        wired.pay.answers(|_| Script::answer(201, "{}"));
        agent.forward("POST", &key, &format!("/{key}"), "{}").await;
        let version = agent.operation(&key).await["version"].clone();
        let body = serde_json::json!({"version": version, "reason": "x"}).to_string();
        let target = format!("/v1/operations/{key}/compensate");
        wired.network.plan([cut]);
        operator.post(&target, &body).await;
        wired.network.plan([]);
        until("the reversal is made", async || {
            operator.post(&target, &body).await;
            wired.pay.sends(&format!("/made/{key}")) == 1
        })
        .await;
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert_eq!(wired.pay.sends(&format!("/made/{key}")), 1, "{cut:?}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_plan_whose_claim_is_lost_is_sent_once() {
    let lines = "[kinds.\"thing.make\"]\ndownstream = \"pay\"\nrequest = { method = \"POST\", path = \"/{operation_id}\", body = \"\" }\n";
    let wired = wired_with((lines, false), "").await;
    wired.pay.answers(|_| Script::answer(201, "{}"));
    for (round, cut) in CUTS.into_iter().enumerate() {
        let key = format!("p{round}");
        let plan = format!(r#"{{"operation_id":"{key}","kind":"thing.make","payload":{{}},"mode":"plan"}}"#);
        assert_eq!(wired.agent.post("/v1/operations", &plan).await.status, 202);
        let execute = async || {
            let target = format!("/v1/operations/{key}/execute");
            wired.agent.send("POST", &target, &[("prefer", "wait=5")], "").await
        };
        wired.network.plan([cut]);
        let first = execute().await.is(503, "ledger-unavailable");
        wired.network.plan([]);
        until("it is sent", async || execute().await.status == 201).await;
        tokio::time::sleep(Duration::from_millis(300)).await;
        assert_eq!(wired.pay.sends(&format!("/{key}")), 1, "{cut:?} {first:?}");
    }
}

/// A commit that was lost may come about after all, later than anybody looks.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_whose_commit_comes_late_is_taken_back() {
    let wired = wired(FORMS[0]).await;
    wired.pay.answers(|_| Script::answer(201, "{}"));
    wired.plan(CLAIM, [Cut::Before]);
    wired
        .agent
        .forward("POST", "k", "/k", "{}")
        .await
        .is(503, "ledger-unavailable");
    // The row that the lost statement would have left, in a transaction that is still open.
    let mut late = wired.database.sql.begin().await.unwrap();
    let row = "insert into ledger.operations (tenant_id, operation_id, kind, target, downstream, state, fingerprint, attempt, \
                   version, payload, requested_by, instance_id, created_at) \
               select $1, 'k', 'proxy.pay', 'POST pay/k', 'pay', 'running', 'v1:' || repeat('0', 64), 1, 1, '{}', 'x', \
                   instance_id, now() from ledger.instances";
    sqlx::query(row).bind(TENANT).execute(&mut *late).await.unwrap();
    tokio::time::sleep(Duration::from_millis(400)).await;
    late.commit().await.unwrap();
    let rows = "select count(*) from ledger.operations";
    until("it is taken back", async || {
        sqlx::query_scalar::<_, i64>(rows)
            .fetch_one(&wired.database.sql)
            .await
            .unwrap()
            == 0
    })
    .await;
    until_answered(&wired.agent, "k").await;
    assert_eq!(wired.pay.count(), 1);
}

/// A claim that is taken back because nothing was sent, in doubt itself: a later claim is not taken for it.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_withdrawal_whose_commit_is_lost_leaves_a_later_claim_alone() {
    let mut wired = wired_with(FORMS[0], "[[routes]]\npath = \"/**\"\nretry = { max_attempts = 1 }\n").await;
    let address = wired.pay.address;
    let mut holder = wired.database.sql.begin().await.unwrap();
    sqlx::query("lock table ledger.operations in share mode")
        .execute(&mut *holder)
        .await
        .unwrap();
    let first = tokio::spawn({
        let agent = wired.agent.clone();
        async move { agent.forward("POST", "k", "/k", "{}").await }
    });
    let waiting =
        "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'";
    let sql = wired.database.sql.clone();
    let count = async |query: &'static str| sqlx::query_scalar::<_, i64>(query).fetch_one(&sql).await.unwrap();
    until("it waits for its claim", async || count(waiting).await == 1).await;
    // Gone when it is to be sent, and back soon.
    wired.pay = Downstream::start().await;
    wired.network.plan([Cut::After]);
    holder.commit().await.unwrap();
    until("the withdrawal's answer is lost", async || wired.network.made() == 1).await;
    wired.pay = Downstream::start_at(address).await;
    wired.pay.answers(|_| {
        Script::new()
            .pause(Duration::from_millis(800))
            .before(Script::answer(201, "{}"))
    });
    until_answered(&wired.agent, "k").await;
    assert_eq!(wired.pay.sends("/k"), 1);
    // It was not sent; by now somebody else may be at it.
    let first = first.await.unwrap();
    let told = ["downstream-unreachable", "operation-in-progress"];
    assert!(told.contains(&first.code().as_str()), "{first:?}");
}
