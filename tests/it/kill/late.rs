//! Claims that are confirmed too late, and claims that arrive after they were given up.

use std::sync::Arc;
use std::time::Duration;

use nix::sys::signal::Signal;

use super::cell::{Ability, Boundary, Cell};
use super::record;
use super::scene::{Scene, send, server};
use crate::support::until;

/// Shorter than a session's patience, so that a claim can still be confirmed when recovery has ended it.
const SHORT: Duration = Duration::from_secs(1);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_that_is_confirmed_after_it_was_taken_away_is_not_acted_on() {
    let scene = Arc::new(Scene::with(SHORT).await);
    let second = scene.process().await;
    let cells = [Ability::Lookup, Ability::None].map(|ability| Cell {
        boundary: Boundary::AfterTheClaim,
        ability,
    });
    let [asked_for, left] = cells;
    let firsts = scene.hold(server(), &cells).await.unwrap();
    firsts[0].signal(Signal::SIGSTOP);
    for (cell, state) in [(asked_for, "succeeded"), (left, "needs_reconciliation")] {
        until(&format!("{} is {state}", cell.id()), async || {
            record::state(&scene.sql, cell).await.unwrap().as_deref() == Some(state)
        })
        .await;
    }
    firsts[0].let_commits_go();
    firsts[0].signal(Signal::SIGCONT);
    for cell in cells {
        until(&format!("{} has its late end", cell.id()), async || {
            let steps = record::history(&scene.sql, cell).await.unwrap();
            steps.iter().any(|step| step.event.starts_with("late_"))
        })
        .await;
        record::walk(cell, &record::history(&scene.sql, cell).await.unwrap(), SHORT).unwrap();
    }
    assert_eq!(scene.things.made(&asked_for.id()).len(), 1, "{}", second.log());
    assert_eq!(scene.things.asked(&left.id()), 0, "{}", firsts[0].process.log());
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_claim_that_arrives_after_it_was_given_up_is_taken_back() {
    let scene = Arc::new(Scene::with(SHORT).await);
    let cell = Cell {
        boundary: Boundary::BeforeTheClaim,
        ability: Ability::None,
    };
    let mut firsts = scene.hold(server(), &[cell]).await.unwrap();
    let first = &mut firsts[0];
    let client = scene.client(first.process.address);
    // Its process waits for as long as a session has patience.
    until("the claim is given up", async || first.standing[0].is_answered()).await;
    // And finds nothing to take back.
    first.process.has_logged("transaction rolled back").await;
    tokio::time::sleep(Duration::from_millis(500)).await;
    first.let_commits_go();
    let refused = first.standing.remove(0).answer().await.unwrap();
    assert_eq!((refused.status, refused.code().as_str()), (503, "ledger-unavailable"));
    // Its row may be there too short a time to be seen.
    first
        .process
        .has_logged("a claim arrived late and was taken back")
        .await;
    assert_eq!(record::state(&scene.sql, cell).await.unwrap(), None);
    assert_eq!(scene.things.asked(&cell.id()), 0);
    assert_eq!(send(&client, cell).await.unwrap().status, 201);
    assert_eq!(scene.things.made(&cell.id()).len(), 1);
}
