//! States: what a delivery is told in each of them, and how what a handler raises decides which one it is.

use std::time::Duration;

use tokio::task::JoinSet;
use tokio::time::Instant;

use crate::plans::repair;
use crate::support::handlers::{self, WAYS};
use crate::support::process::Process;
use crate::support::{Answer, Client, Database, Ledger, TENANT, run, write_config};

/// A stored answer that no refusal may show.
const STORED: &str = "stored-answer-5120";

const UNSETTLED: [&str; 5] = [
    "planned",
    "waiting_approval",
    "running",
    "retry_wait",
    "needs_reconciliation",
];
const SETTLED: [&str; 6] = [
    "rejected",
    "cancelled",
    "succeeded",
    "failed",
    "compensating",
    "compensated",
];

/// How old a settled operation is.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Age {
    Kept,
    Expired,
    Purged,
}

/// Puts an operation of kind `note` with this payload into a state, as a process that got it there would have left it.
async fn put(ledger: &Ledger, id: &str, state: &str, fingerprint: &str, payload: &str, age: Age) {
    let settled = SETTLED.contains(&state);
    sqlx::query(
        "insert into ledger.operations (tenant_id, operation_id, kind, target, state, fingerprint, attempt, version, \
             payload, requested_by, instance_id, due_at, created_at, settled_at, receipt_expires_at, purged_at) \
         select 'demo', $1, 'note', 'it.note', $2, $3, case when $2 in ('planned', 'waiting_approval') then 0 else 1 end, 1, \
             case when $6 then null else $4 end, '0123456789abcdef', \
             case when $2 = 'running' then (select instance_id from ledger.instances limit 1) end, \
             case when $2 = 'retry_wait' then now() + interval '1 hour' end, now() - interval '2 days', \
             case when $5 then now() - interval '2 days' end, \
             case when $5 then now() + case when $7 then interval '-1 day' else interval '1 day' end end, \
             case when $6 then now() end",
    )
    .bind(id)
    .bind(state)
    .bind(fingerprint)
    .bind(payload)
    .bind(settled)
    .bind(age == Age::Purged)
    .bind(age != Age::Kept)
    .execute(&ledger.sql)
    .await
    .unwrap();
    if settled && age != Age::Purged {
        sqlx::query(
            "insert into ledger.receipts (tenant_id, operation_id, status, headers, body, body_sha256, expires_at) \
             select 'demo', $1, 200, '[[\"content-type\", \"application/json\"]]', convert_to($2, 'UTF8'), \
                 sha256(convert_to($2, 'UTF8')), receipt_expires_at \
             from ledger.operations where operation_id = $1",
        )
        .bind(id)
        .bind(format!(r#"{{"state":"{state}","result":"{STORED}"}}"#))
        .execute(&ledger.sql)
        .await
        .unwrap();
    }
    if age != Age::Purged {
        sqlx::query(
            "insert into ledger.history (tenant_id, operation_id, version, at, event, state, actor, attempt) \
             values ('demo', $1, 1, now(), $2, $2, 'key:0123456789abcdef', 0)",
        )
        .bind(id)
        .bind(state)
        .execute(&ledger.sql)
        .await
        .unwrap();
    }
}

/// Every state a delivery can meet, with an id for each.
fn every_state() -> impl Iterator<Item = (String, &'static str, Age)> {
    let unsettled = UNSETTLED.map(|state| (state.to_owned(), state, Age::Kept));
    let settled = [Age::Kept, Age::Expired, Age::Purged]
        .into_iter()
        .flat_map(|age| SETTLED.map(|state| (format!("{state}-{age:?}"), state, age)));
    // What is being compensated is not over, so it is never purged.
    unsettled
        .into_iter()
        .chain(settled)
        .filter(|(_, state, age)| (*state, *age) != ("compensating", Age::Purged))
}

async fn with_every_state(payload: &str) -> Ledger {
    let ledger = handlers::ledger("[recovery]\npurge = \"forever\"\n").await;
    let model = ledger.agent().submit("model", "note", payload).await.succeeded().json();
    let fingerprint = model["fingerprint"].as_str().unwrap();
    for (id, state, age) in every_state() {
        put(&ledger, &id, state, fingerprint, payload, age).await;
    }
    ledger
}

#[tokio::test]
async fn another_payload_is_refused_in_every_state_before_anything_else_is_said() {
    const PAYLOAD: &str = r#"{"secret":"mellon-7261"}"#;
    let ledger = with_every_state(PAYLOAD).await;
    let second = ledger.second().await;
    let agent = ledger.agent();
    let before = ledger.rows().await;
    for (id, state, _) in every_state() {
        for (kind, payload) in [
            ("note", r#"{"secret":"other"}"#),
            ("note.alone", PAYLOAD),
            ("brief", PAYLOAD),
        ] {
            let plan = format!(r#"{{"operation_id":"{id}","kind":"{kind}","payload":{payload},"mode":"plan"}}"#);
            let refusals = [
                agent.submit(&id, kind, payload).await,
                agent.at(second.address).submit(&id, kind, payload).await,
                agent
                    .submit_with(&id, kind, payload, &[("prefer", "respond-async")])
                    .await,
                agent.submit_with(&id, kind, payload, &[("prefer", "wait=5")]).await,
                agent.post("/v1/operations", &plan).await,
            ];
            for refused in refusals {
                assert_eq!(
                    (refused.status, refused.code().as_str()),
                    (422, "fingerprint-mismatch"),
                    "{id} {kind}"
                );
                let text = String::from_utf8(refused.body.to_vec()).unwrap();
                assert!(!text.contains(STORED) && !text.contains("mellon"), "{id}: {text}");
                let problem = refused.json();
                assert_eq!(
                    (&problem["original"]["state"], &problem["original"]["kind"]),
                    (&state.into(), &"note".into())
                );
                assert_eq!(problem["retryable"], false);
            }
        }
    }
    assert_eq!(ledger.rows().await, before, "a mismatch writes nothing");
}

#[tokio::test]
async fn the_same_payload_is_told_what_the_state_says() {
    let ledger = with_every_state(r#"{"n":1}"#).await;
    let agent = ledger.agent().unchecked();
    let before = ledger.rows().await;
    for (id, state, age) in every_state() {
        let expected = match (state, age) {
            ("planned" | "waiting_approval" | "retry_wait", _) => (202, ""),
            ("running", _) => (409, "operation-in-progress"),
            ("needs_reconciliation", _) => (409, "outcome-unknown"),
            (_, Age::Kept) => (200, ""),
            (_, Age::Expired | Age::Purged) => (410, "receipt-expired"),
        };
        for kind_of_request in [&[][..], &[("prefer", "respond-async")][..]] {
            let answer = agent.submit_with(&id, "note", r#"{"n":1.0}"#, kind_of_request).await;
            let expected = if state == "running" && !kind_of_request.is_empty() {
                (202, "")
            } else {
                expected
            };
            assert_eq!((answer.status, answer.code().as_str()), expected, "{id}");
            assert_eq!(
                (answer.header("operation-id"), answer.header("operation-state")),
                (&*id, state)
            );
            assert_eq!(answer.is_replay(), answer.status == 200, "{id}");
            assert_eq!(
                answer.header("retry-after").is_empty(),
                !["running", "retry_wait"].contains(&state),
                "{id}"
            );
            assert_eq!(
                answer.header("receipt-expires").is_empty(),
                !SETTLED.contains(&state),
                "{id}"
            );
            assert_eq!(answer.header("location").is_empty(), answer.status != 202, "{id}");
            let shows_receipt = String::from_utf8_lossy(&answer.body).contains(STORED);
            assert_eq!(shows_receipt, answer.status == 200, "{id}");
        }
        assert_eq!(agent.operation(&id).await["state"], state);
    }
    assert_eq!(
        ledger.rows().await,
        before,
        "no delivery of a known operation changes it"
    );
}

/// Settled as failed: no effect, a receipt that says why, and the same again.
async fn assert_refused(ledger: &Ledger, id: &str, kind: &str, payload: &str, code: &str) -> Answer {
    let agent = ledger.agent();
    let refused = agent.submit(id, kind, payload).await.is(422, "operation-failed");
    assert!(!refused.is_replay());
    let problem = refused.json();
    assert_eq!(
        (&problem["sqlstate"], &problem["retryable"], &problem["result"]),
        (&code.into(), &false.into(), &().into())
    );
    assert_eq!(
        (&problem["operation_id"], &problem["state"]),
        (&id.into(), &"failed".into())
    );
    assert_eq!(ledger.effects(id).await, 0, "{id}: the effect is undone");
    let again = agent.submit(id, kind, payload).await.is(422, "operation-failed");
    assert!(again.is_replay());
    assert_eq!(again.body, refused.body);
    let operation = agent.operation(id).await;
    assert_eq!(
        (&operation["state"], &operation["effects"], &operation["attempts"]),
        (&"failed".into(), &0.into(), &1.into())
    );
    let last = operation["history"].as_array().unwrap().last().unwrap().clone();
    assert_eq!(
        (&last["event"], &last["evidence"]["sqlstate"]),
        (&"failed".into(), &code.into())
    );
    refused
}

#[tokio::test]
async fn a_business_refusal_is_a_receipt_without_an_effect() {
    let ledger = handlers::ledger("").await;
    for way in WAYS {
        for code in ["OL001", "OLXYZ", "P0001", "22003", "22012", "23505", "23514"] {
            let (id, kind) = (format!("{code}{way}"), format!("raise{way}"));
            let refused = assert_refused(&ledger, &id, &kind, &format!(r#"{{"code":"{code}"}}"#), code)
                .await
                .json();
            assert_eq!(refused["detail"], format!("raised {code}"));
            // What a constraint says in detail is the failing row.
            let shown = code.starts_with("OL") || code == "P0001";
            assert_eq!(
                refused["handler_detail"].as_str(),
                shown.then_some("in detail"),
                "{code}"
            );
        }
    }
}

#[tokio::test]
async fn what_deferred_constraints_refuse_is_a_business_refusal_too() {
    let ledger = handlers::ledger("").await;
    for way in WAYS {
        assert_refused(
            &ledger,
            &format!("owing{way}"),
            &format!("owe{way}"),
            r#"{"creditor":7}"#,
            "23503",
        )
        .await;
        for code in ["OL042", "P0001", "23514"] {
            let (id, kind) = (format!("{code}{way}"), format!("promise{way}"));
            let refused = assert_refused(&ledger, &id, &kind, &format!(r#"{{"code":"{code}"}}"#), code)
                .await
                .json();
            assert_eq!(refused["detail"], format!("promised {code}"));
            assert_eq!(
                refused["handler_detail"].as_str(),
                (code != "23514").then_some("in detail"),
                "{code}"
            );
        }
    }
    assert_eq!(ledger.count("select count(*) from it.debts").await, 0);
    run(&ledger.sql, "insert into it.creditors values (7)").await;
    for way in WAYS {
        ledger
            .agent()
            .submit(&format!("paid{way}"), &format!("owe{way}"), r#"{"creditor":7}"#)
            .await
            .succeeded();
    }
    assert_eq!(ledger.count("select count(*) from it.debts").await, 2);
}

#[tokio::test]
async fn a_broken_handler_stores_nothing_and_leaves_the_id_free() {
    let ledger = handlers::ledger("").await;
    let agent = ledger.agent();
    let before = ledger.rows().await;
    for way in WAYS {
        for (name, code) in [
            ("raise", "P0002"),
            ("raise", "P0003"),
            ("raise", "P0004"),
            ("raise", "42501"),
            ("raise", "42P01"),
            ("raise", "XX000"),
            ("raise", "0A000"),
            ("promise", "P0002"),
            ("promise", "42501"),
        ] {
            let (id, kind) = (format!("{name}-{code}{way}"), format!("{name}{way}"));
            let payload = format!(r#"{{"code":"{code}"}}"#);
            for _ in 0..2 {
                let broken = agent
                    .submit(&id, &kind, &payload)
                    .await
                    .is(500, "handler-broken")
                    .json();
                assert_eq!(
                    (&broken["sqlstate"], &broken["retryable"], &broken["operation_id"]),
                    (&code.into(), &true.into(), &(*id).into())
                );
                agent.get(&format!("/v1/operations/{id}")).await.is(404, "not-found");
            }
        }
    }
    assert_eq!(ledger.rows().await, before);
    for way in WAYS {
        // Not even the payload is bound to the id.
        let id = format!("raise-P0002{way}");
        assert!(
            !agent
                .submit(&id, "note", r#"{"another":1}"#)
                .await
                .succeeded()
                .is_replay()
        );
    }
}

#[tokio::test]
async fn a_repaired_handler_runs_what_was_refused_as_broken() {
    let ledger = handlers::ledger("").await;
    let agent = ledger.agent();
    for way in WAYS {
        agent
            .submit(&format!("again{way}"), &format!("repair{way}"), "{}")
            .await
            .is(500, "handler-broken");
    }
    repair(&ledger).await;
    for way in WAYS {
        let (id, kind) = (format!("again{way}"), format!("repair{way}"));
        let receipt = agent.submit(&id, &kind, "{}").await.succeeded();
        assert!(!receipt.is_replay());
        assert_eq!(receipt.json()["attempt"], 1);
        assert!(agent.submit(&id, &kind, "{}").await.succeeded().is_replay());
        assert_eq!(ledger.effects(&id).await, 1);
    }
    // Replaced while the service runs, a handler's next operation is the new one's.
    run(
        &ledger.sql,
        "create or replace function it.note(payload jsonb, operation jsonb) returns jsonb language sql as 'select jsonb ''\"new\"'''",
    )
    .await;
    for way in WAYS {
        let receipt = agent
            .submit(&format!("replaced{way}"), &format!("note{way}"), "{}")
            .await
            .succeeded();
        assert_eq!(receipt.json()["result"], "new");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn members_of_one_group_do_not_share_their_fate() {
    // One worker, so that what arrives together is one group.
    let ledger = handlers::ledger("[database]\napply_connections = 1\n").await;
    for round in 0..5 {
        let mut together = JoinSet::new();
        for number in 0..30 {
            let agent = ledger.agent();
            let (kind, payload, expected) = match number % 6 {
                0 => ("raise", r#"{"code":"OL001"}"#, (422, "operation-failed")),
                1 => ("raise", r#"{"code":"P0002"}"#, (500, "handler-broken")),
                2 => ("promise", r#"{"code":"23514"}"#, (422, "operation-failed")),
                3 if number == 3 => ("flaky", r#"{"code":"40001","times":0}"#, (200, "")),
                _ => ("note", "{}", (200, "")),
            };
            together.spawn(async move {
                let id = format!("together-{round}-{number}");
                (agent.submit(&id, kind, payload).await, expected, id)
            });
        }
        for (answer, expected, id) in together.join_all().await {
            assert_eq!(
                (answer.status, answer.code().as_str()),
                expected,
                "{id}: {:?}",
                String::from_utf8_lossy(&answer.body)
            );
            assert_eq!(ledger.effects(&id).await, i64::from(answer.status == 200), "{id}");
        }
    }
}

#[tokio::test]
async fn passing_trouble_is_tried_again_behind_the_callers_back() {
    let ledger = handlers::ledger("").await;
    let agent = ledger.agent();
    for way in WAYS {
        for code in ["40001", "40P01", "55P03", "53200", "57014"] {
            run(&ledger.sql, "alter sequence it.tries restart").await;
            let (id, kind) = (format!("{code}{way}"), format!("flaky{way}"));
            let payload = format!(r#"{{"code":"{code}","times":3}}"#);
            let receipt = agent.submit(&id, &kind, &payload).await.succeeded();
            assert!(!receipt.is_replay());
            assert_eq!(ledger.effects(&id).await, 1, "{id}");
            let operation = agent.operation(&id).await;
            assert_eq!(
                (&operation["effects"], &operation["deliveries"]),
                (&1.into(), &1.into())
            );
            assert!(
                ledger.count("select last_value from it.tries").await >= 4,
                "it was tried four times"
            );
        }
    }
}

#[tokio::test]
async fn trouble_that_does_not_pass_ends_with_the_deadline_and_stores_nothing() {
    let ledger = handlers::ledger("").await;
    let agent = ledger.agent();
    let before = ledger.rows().await;
    for way in WAYS {
        for payload in [
            r#"{"code":"40001"}"#,
            r#"{"code":"40P01"}"#,
            r#"{"code":"55P03"}"#,
            r#"{"seconds":30}"#,
        ] {
            let (id, kind) = (format!("never{way}"), format!("hasty{way}"));
            let began = Instant::now();
            let refused = agent.submit(&id, &kind, payload).await.is(503, "ledger-unavailable");
            assert!(refused.header("retry-after").parse::<u32>().unwrap() >= 1);
            assert_eq!(refused.json()["retryable"], true);
            assert!(
                began.elapsed() < Duration::from_secs(3),
                "{payload}: {:?}",
                began.elapsed()
            );
            agent.get(&format!("/v1/operations/{id}")).await.is(404, "not-found");
        }
        assert_eq!(ledger.rows().await, before);
        // The id is free, for another payload too.
        agent
            .submit(&format!("never{way}"), &format!("hasty{way}"), r#"{"seconds":0}"#)
            .await
            .succeeded();
        run(&ledger.sql, "delete from it.effects; delete from ledger.operations; delete from ledger.receipts; delete from ledger.history").await;
    }
}

#[tokio::test]
async fn a_result_that_is_too_large_is_refused_with_its_size_and_leaves_nothing() {
    let ledger = handlers::ledger("[limits]\nmax_result_bytes = 100\n").await;
    let agent = ledger.agent();
    let before = ledger.rows().await;
    let text = |length: usize| format!("\"{}\"", "x".repeat(length - 2));
    for way in WAYS {
        let (id, kind) = (format!("large{way}"), format!("note{way}"));
        // Others of its group are none the worse for it.
        let small: Vec<_> = (0..4)
            .map(|number| {
                let (agent, kind, id) = (agent.clone(), kind.clone(), format!("small-{number}{way}"));
                tokio::spawn(async move { agent.submit(&id, &kind, "{}").await })
            })
            .collect();
        let broken = agent
            .submit(&id, &kind, &text(101))
            .await
            .is(500, "handler-broken")
            .json();
        let detail = broken["detail"].as_str().unwrap();
        assert!(
            detail.contains("returned 101 bytes") && detail.contains("limits.max_result_bytes is 100"),
            "{detail}"
        );
        assert_eq!(
            (&broken["sqlstate"], &broken["retryable"]),
            (&"54000".into(), &true.into())
        );
        for answer in small {
            answer.await.unwrap().succeeded();
        }
        assert_eq!(ledger.effects(&id).await, 0);
        agent.get(&format!("/v1/operations/{id}")).await.is(404, "not-found");
        // The id is free, also for what just fits.
        agent.submit(&id, &kind, &text(100)).await.succeeded();
        // What a handler raises itself is not shown, under this SQLSTATE neither.
        let raised = agent
            .submit("raised", &format!("raise{way}"), r#"{"code":"54000"}"#)
            .await
            .is(500, "handler-broken")
            .json();
        assert!(!raised["detail"].to_string().contains("raised 54000"), "{raised}");
        run(&ledger.sql, "delete from it.effects; delete from ledger.operations; delete from ledger.receipts; delete from ledger.history").await;
    }
    assert_eq!(ledger.rows().await, before);
}

#[tokio::test]
async fn history_names_whoever_asked_for_an_operation_that_settled_at_once() {
    let ledger = handlers::ledger("").await;
    let agent = ledger.agent();
    for (id, kind, payload) in [
        ("done", "note", "{}"),
        ("refused", "raise", r#"{"code":"OL001"}"#),
        ("done.alone", "note.alone", "{}"),
    ] {
        agent.submit(id, kind, payload).await;
        let operation = agent.operation(id).await;
        let requester = format!("key:{}", operation["requested_by"].as_str().unwrap());
        assert_eq!(operation["history"][0]["actor"], requester.as_str(), "{operation}");
    }
}

#[tokio::test]
async fn a_handler_that_takes_too_long_is_named_with_its_time_out_and_the_next_step() {
    let setup = handlers::setup("");
    let database = Database::create().await;
    run(&database.sql, &setup.sql).await;
    let keys = database.keys(TENANT).await;
    let (_directory, config) = write_config(&setup.config);
    let process = Process::serve(&config, &database.service_url);
    let agent = Client::new(process.address, &keys["agent"]);
    for way in WAYS {
        let (id, kind) = (format!("slow{way}"), format!("hasty{way}"));
        let refused = agent.submit(&id, &kind, r#"{"seconds":30}"#).await;
        let detail = refused.is(503, "ledger-unavailable").json()["detail"].to_string();
        for part in [
            "it.hasty",
            "500ms",
            "timeout",
            &format!("[kinds.\\\"{kind}\\\"]"),
            "nothing was stored",
        ] {
            assert!(detail.contains(part), "{part} in {detail}");
        }
        assert!(!detail.contains("database"), "it is not the database's fault: {detail}");
        agent.get(&format!("/v1/operations/{id}")).await.is(404, "not-found");
        process
            .has_logged(&format!(
                r#""operation.id":"{id}","kind":"{kind}","handler":"it.hasty","timeout":"500ms""#
            ))
            .await;
    }
    // Cancelled by somebody else long before its time is up.
    let refused = agent.submit("cancelled", "hasty.alone", r#"{"code":"57014"}"#).await;
    let detail = refused.is(503, "ledger-unavailable").json()["detail"].to_string();
    assert!(!detail.contains("it.hasty"), "{detail}");
}

#[tokio::test]
async fn what_the_handler_returns_is_the_result_even_if_it_is_null() {
    let ledger = handlers::ledger("").await;
    for way in WAYS {
        for (number, result) in ["null", "0", "\"\"", "[]", "{}", r#"{"a": [1, null]}"#]
            .iter()
            .enumerate()
        {
            let answer = ledger
                .agent()
                .submit(&format!("r{number}{way}"), &format!("note{way}"), result)
                .await
                .succeeded();
            assert_eq!(
                answer.json()["result"],
                serde_json::from_str::<serde_json::Value>(result).unwrap()
            );
        }
        run(
            &ledger.sql,
            "create or replace function it.note(payload jsonb, operation jsonb) returns jsonb language sql as 'select null::jsonb'",
        )
        .await;
        let answer = ledger
            .agent()
            .submit(&format!("sql-null{way}"), &format!("note{way}"), "{}")
            .await
            .succeeded();
        assert!(answer.json()["result"].is_null());
        run(
            &ledger.sql,
            "create or replace function it.note(payload jsonb, operation jsonb) returns jsonb language sql as 'select payload'",
        )
        .await;
    }
}
