//! Handlers are other people's code: what one does to its session reaches no other operation.

use crate::support::{Ledger, Setup};

/// A handler that runs what it is given, and one that tells what it finds.
const SQL: &str = "
    create schema habits;
    create function habits.run(payload jsonb, operation jsonb) returns jsonb language plpgsql as $$
    begin
        execute payload->>'sql';
        return '{}';
    end
    $$;
    create function habits.look(payload jsonb, operation jsonb) returns jsonb language sql as $$
        select jsonb_build_object(
            'durable', current_setting('synchronous_commit'), 'path', current_setting('search_path'),
            'locks', (select count(*) from pg_locks where locktype = 'advisory' and pid = pg_backend_pid()),
            'tables', (select count(*) from pg_class where relpersistence = 't' and relkind = 'r'))
    $$;
    grant usage on schema habits to opledger;
";

async fn ledger(group_commit: bool) -> Ledger {
    // One connection for each way, so that the next operation meets the same one.
    let kind = |name: &str| {
        format!("[kinds.\"{name}\"]\nhandler = \"habits.{name}\"\ngroup_commit = {group_commit}\ntimeout = \"2s\"\n")
    };
    let config = format!(
        "[database]\napply_connections = 1\nmax_connections = 4\n{}{}",
        kind("run"),
        kind("look")
    );
    Ledger::with(Setup {
        config,
        sql: SQL.to_owned(),
    })
    .await
}

#[tokio::test]
async fn what_a_handler_sets_for_its_session_ends_with_its_transaction() {
    for group_commit in [true, false] {
        let ledger = ledger(group_commit).await;
        let agent = ledger.agent();
        let look = async |id: String| agent.submit(&id, "look", "{}").await.succeeded().json()["result"].clone();
        let untouched = look("before".to_owned()).await;
        let habits = [
            "set synchronous_commit = off",
            "set search_path = habits",
            "select pg_advisory_lock(77)",
            "create temp table kept (n int)",
            "select set_config('search_path', 'habits', false)",
        ];
        for (number, sql) in habits.iter().enumerate() {
            let payload = serde_json::json!({ "sql": sql }).to_string();
            agent
                .submit(&format!("habit-{number}"), "run", &payload)
                .await
                .succeeded();
            // More looks than there are connections.
            for look_number in 0..6 {
                let found = look(format!("look-{number}-{look_number}")).await;
                assert_eq!(found, untouched, "{sql}, group commit {group_commit}");
            }
        }
    }
}

#[tokio::test]
async fn a_handler_that_takes_prepared_statements_away_harms_no_other_caller() {
    for group_commit in [true, false] {
        let ledger = ledger(group_commit).await;
        let agent = ledger.agent();
        for number in 0..8 {
            let raise = if number % 2 == 0 {
                ""
            } else {
                "; select 1/0 from no_such_table"
            };
            let payload = serde_json::json!({ "sql": format!("deallocate all{raise}") }).to_string();
            let answer = agent.submit(&format!("greedy-{number}"), "run", &payload).await;
            assert!(matches!(answer.status, 200 | 500 | 503), "{answer:?}");
            agent.submit(&format!("plain-{number}"), "look", "{}").await.succeeded();
            agent.get("/v1/operations?limit=1").await.succeeded();
        }
    }
}
