//! The downstream has answered, and the answer cannot be stored: it is tried again, and never sent for again.

use std::time::{Duration, Instant};

use crate::support::downstream::{Downstream, Gate, Script};
use crate::support::victim::Victim;
use crate::support::{Answer, Client, run, serve, until, write_config};

use super::Bench;

/// A request whose answer waits at the gate.
async fn held(bench: &Bench, key: &str) -> (Gate, tokio::task::JoinHandle<Answer>) {
    let gate = Gate::new();
    let waits = gate.clone();
    bench.pay.answers(move |_| {
        Script::new()
            .gate(&waits)
            .before(Script::answer(201, "{\"id\":\"ch_1\"}"))
    });
    let before = bench.pay.count();
    let (agent, key) = (bench.agent(), key.to_owned());
    let answer = tokio::spawn(async move { agent.forward("POST", &key, &format!("/{key}"), "{}").await });
    bench.pay.received(before + 1).await;
    (gate, answer)
}

#[tokio::test]
async fn a_row_that_is_locked_for_a_while_delays_the_answer_and_no_more() {
    let bench = Bench::start().await;
    let (gate, answer) = held(&bench, "k").await;
    let mut holder = bench.ledger.sql.begin().await.unwrap();
    sqlx::query("select from ledger.operations where operation_id = 'k' for update")
        .execute(&mut *holder)
        .await
        .unwrap();
    gate.open();
    until("the settlement waits", async || {
        bench
            .ledger
            .count(
                "select count(*) from pg_stat_activity where datname = current_database() and wait_event_type = 'Lock'",
            )
            .await
            == 1
    })
    .await;
    // Longer than a statement waits for a lock.
    tokio::time::sleep(Duration::from_millis(1500)).await;
    holder.rollback().await.unwrap();
    let first = answer.await.unwrap();
    assert_eq!((first.status, first.is_replay()), (201, false));
    bench.is_replayed(&first, "k", "/k", "{}").await;
    assert_eq!(bench.pay.count(), 1);
}

#[tokio::test]
async fn an_answer_that_cannot_be_stored_for_long_is_told_as_such_and_stored_later() {
    let bench = Bench::start().await;
    let (gate, answer) = held(&bench, "k").await;
    let mut holder = bench.ledger.sql.begin().await.unwrap();
    sqlx::query("select from ledger.operations where operation_id = 'k' for update")
        .execute(&mut *holder)
        .await
        .unwrap();
    gate.open();
    let began = Instant::now();
    let told = answer.await.unwrap().is(503, "ledger-unavailable");
    assert!(began.elapsed() < Duration::from_secs(12), "{:?}", began.elapsed());
    assert_eq!(
        (told.header("operation-id"), told.json()["operation_url"].as_str()),
        ("k", Some("/v1/operations/k"))
    );
    holder.rollback().await.unwrap();
    bench.until("k", "succeeded").await;
    let again = bench.post("k", "/k", "{}").await;
    assert_eq!((again.status, again.json()["id"].as_str()), (201, Some("ch_1")));
    assert_eq!(bench.pay.count(), 1);
}

#[tokio::test]
async fn passing_trouble_while_the_answer_is_stored_is_passed_over() {
    let bench = Bench::start().await;
    // Deadlock, serialization failure, out of connections, and a limit of time.
    for (number, code) in ["40P01", "40001", "53300", "57014"].into_iter().enumerate() {
        let sql = format!(
            "create sequence public.tries; grant usage on public.tries to opledger;
             create function public.trouble() returns trigger language plpgsql as $$
             begin
                 if new.state = 'succeeded' and nextval('public.tries') <= 2 then
                     raise exception using errcode = '{code}', message = 'in the test';
                 end if;
                 return new;
             end $$;
             create trigger trouble before update on ledger.operations for each row execute function public.trouble()"
        );
        let key = format!("k{number}");
        let (gate, answer) = held(&bench, &key).await;
        run(&bench.ledger.sql, &sql).await;
        gate.open();
        let first = answer.await.unwrap();
        assert_eq!((first.status, first.is_replay()), (201, false), "{code}");
        let tries: i64 = sqlx::query_scalar("select last_value from public.tries")
            .fetch_one(&bench.ledger.sql)
            .await
            .unwrap();
        assert!(tries >= 3, "{code}: {tries}");
        run(
            &bench.ledger.sql,
            "drop trigger trouble on ledger.operations; drop function public.trouble; drop sequence public.tries",
        )
        .await;
        bench.is_replayed(&first, &key, &format!("/{key}"), "{}").await;
        assert_eq!(bench.pay.sends(&format!("/{key}")), 1);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_database_that_restarts_meanwhile_costs_no_answer() {
    let victim = Victim::start("proxied").await;
    let (sql, key) = victim.prepare("proxied").await;
    let pay = Downstream::start().await;
    let (_directory, config) = write_config(&format!(
        "[database]\nacquire_timeout = \"1s\"\n{}{}",
        super::SWEEPS,
        pay.config("pay", "")
    ));
    let running = serve(&config, &victim.server.url("opledger", "proxied")).await;
    let agent = Client::new(running.address, &key);
    let gate = Gate::new();
    let waits = gate.clone();
    pay.answers(move |_| {
        Script::new()
            .gate(&waits)
            .before(Script::answer(201, "{\"id\":\"ch_1\"}"))
    });
    let asked: Vec<_> = (0..8)
        .map(|number| {
            let agent = agent.clone();
            tokio::spawn(async move {
                agent
                    .forward("POST", &format!("k{number}"), &format!("/k{number}"), "{}")
                    .await
            })
        })
        .collect();
    pay.received(8).await;
    victim.kill().await;
    gate.open();
    // New requests are refused, and none of them is forwarded.
    let refused = agent.forward("POST", "new", "/new", "{}").await;
    assert!(refused.status == 503 || refused.status == 500, "{refused:?}");
    assert_eq!(pay.sends("/new"), 0);
    victim.restart().await;
    for (number, answer) in asked.into_iter().enumerate() {
        let (key, answer) = (format!("k{number}"), answer.await.unwrap());
        match answer.status {
            201 => assert!(!answer.is_replay()),
            _ => assert_eq!(answer.is(503, "ledger-unavailable").header("operation-id"), key),
        }
    }
    let unsettled = "select count(*) from ledger.operations where settled_at is null";
    until("every answer is stored", async || {
        sqlx::query_scalar::<_, i64>(unsettled)
            .fetch_one(&sql)
            .await
            .is_ok_and(|count| count == 0)
    })
    .await;
    for number in 0..8 {
        let again = agent
            .forward("POST", &format!("k{number}"), &format!("/k{number}"), "{}")
            .await;
        assert_eq!((again.status, again.json()["id"].as_str()), (201, Some("ch_1")));
        assert_eq!(pay.sends(&format!("/k{number}")), 1);
    }
}
