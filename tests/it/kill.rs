//! Whatever dies at whatever moment, an operation has one effect at most, and what is not known is not said.
//!
//! A matrix: the boundary at which an operation stands, what its downstream can do, and what dies. Boundaries are reached
//! from outside, by holding back bytes: the database's, the downstream's, the caller's. The downstream counts what it
//! does.

mod cell;
mod downstream;
mod gateway;
mod late;
mod record;
mod scene;

use std::sync::Arc;
use std::time::{Duration, Instant};

use anyhow::{Context, bail, ensure};
use nix::sys::signal::Signal;

use self::cell::{Ability, Boundary, Cell, Ending, IN_FLIGHT, LEASE};
use self::scene::{First, Scene, Standing, send, server};
use crate::support::victim::Victim;
use crate::support::{Answer, Client};

/// Lease, sweep, the longest time on the way and what the look-ups take: within this, recovery has done what it can. Half
/// of it is for a busy machine.
const RECOVERY: Duration = Duration::from_secs(2 * (LEASE.as_secs() + 1 + IN_FLIGHT.as_secs() + 2));

/// A matrix begins fifty requests at once, so there is one at a time.
static ONE_AT_A_TIME: tokio::sync::Mutex<()> = tokio::sync::Mutex::const_new(());

/// What a run of a matrix says.
enum Judged {
    Right,
    /// Claims were confirmed too late to be acted on, so that cells did not stand where they should: the machine was too
    /// busy to say anything.
    TooBusy(String),
}

/// Runs a matrix until the machine is quiet enough for it.
async fn judged(matrix: impl AsyncFn() -> Judged) {
    let _alone = ONE_AT_A_TIME.lock().await;
    let mut why = String::new();
    for _ in 0..5 {
        match matrix().await {
            Judged::Right => return,
            Judged::TooBusy(wrong) => {
                eprintln!("too busy a machine; again");
                why = wrong;
            }
        }
    }
    panic!("{why}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_process_killed_at_any_boundary_and_started_again_acts_once_and_says_what_it_knows() {
    judged(killed_and_started_again).await;
}

async fn killed_and_started_again() -> Judged {
    let scene = Arc::new(Scene::on_the_shared_server().await);
    let mut firsts = match scene.hold(server(), &Cell::all()).await {
        Ok(firsts) => firsts,
        Err(why) => return Judged::TooBusy(why),
    };
    kill(&scene, &mut firsts);
    let again = scene.process().await;
    let mut matrix = Matrix::new(&scene, vec![scene.client(again.address)]);
    matrix.settles(&firsts, Cell::once_its_claim_lapsed).await;
    matrix.cut_what_was_on_its_way().await;
    matrix.keeps_what_was_acknowledged(firsts).await;
    matrix.end(&again.log()).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn what_a_killed_process_left_at_any_boundary_is_taken_over_by_another() {
    judged(killed_beside_another).await;
}

async fn killed_beside_another() -> Judged {
    let scene = Arc::new(Scene::on_the_shared_server().await);
    let second = scene.process().await;
    let mut firsts = match scene.hold(server(), &Cell::all()).await {
        Ok(firsts) => firsts,
        Err(why) => return Judged::TooBusy(why),
    };
    kill(&scene, &mut firsts);
    let mut matrix = Matrix::new(&scene, vec![scene.client(second.address)]);
    matrix.settles(&firsts, Cell::once_its_claim_lapsed).await;
    matrix.cut_what_was_on_its_way().await;
    matrix.keeps_what_was_acknowledged(firsts).await;
    matrix.end(&second.log()).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_process_frozen_at_any_boundary_past_its_lease_changes_nothing_when_it_wakes() {
    judged(frozen_beside_another).await;
}

async fn frozen_beside_another() -> Judged {
    let scene = Arc::new(Scene::on_the_shared_server().await);
    let second = scene.process().await;
    let firsts = match scene.hold(server(), &Cell::all()).await {
        Ok(firsts) => firsts,
        Err(why) => return Judged::TooBusy(why),
    };
    firsts.iter().for_each(|first| first.signal(Signal::SIGSTOP));
    scene.things.make_passable();
    let mut matrix = Matrix::new(&scene, vec![scene.client(second.address)]);
    matrix.settles(&firsts, Cell::once_its_claim_lapsed).await;

    // Everything that it waits for is there when it wakes.
    scene.things.open();
    for first in &firsts {
        first.let_commits_go();
        first.open_answers();
        first.signal(Signal::SIGCONT);
    }
    matrix.hears_the_late_ends(&firsts).await;
    matrix.cut_what_was_on_its_way().await;
    matrix.ask_also(scene.client(firsts[0].process.address));
    matrix.settled_for_good().await;
    matrix.keeps_what_was_acknowledged(firsts).await;
    matrix.end(&second.log()).await
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_database_killed_at_any_boundary_costs_time_and_nothing_else() {
    judged(without_its_database).await;
}

async fn without_its_database() -> Judged {
    let victim = Victim::start("victim").await;
    let scene = Arc::new(Scene::on(&victim, "kill").await);
    let firsts = match scene.hold(&victim.server, &Cell::all()).await {
        Ok(firsts) => firsts,
        Err(why) => return Judged::TooBusy(why),
    };
    victim.kill().await;
    // Downstreams go on acting and answering while there is nowhere to store it.
    scene.things.open();
    for first in &firsts {
        first.lose_commits();
        first.open_answers();
        first.standing.iter().for_each(Standing::let_it_act);
    }
    // Longer than any lease: when it is back, every process looks as if it were dead.
    tokio::time::sleep(LEASE + Duration::from_millis(500)).await;
    victim.restart().await;
    until_it_answers(&scene).await;
    let log = || {
        firsts
            .iter()
            .map(|first| first.process.log())
            .collect::<Vec<_>>()
            .join("\n")
    };
    let asked = firsts.iter().take(2);
    let mut matrix = Matrix::new(&scene, asked.map(|first| scene.client(first.process.address)).collect());
    matrix.settles(&firsts, Cell::once_its_database_is_back).await;
    let log = log();
    matrix.keeps_what_was_acknowledged(firsts).await;
    matrix.end(&log).await
}

/// Whether an answer is about this effect: the downstream's own, or what it shows of it later.
fn is_about(told: &[u8], made: &[u8]) -> bool {
    let number = |text| serde_json::from_slice::<serde_json::Value>(text).ok()?["number"].as_u64();
    number(told).is_some_and(|told| number(made) == Some(told))
}

/// Waits until the server has recovered.
async fn until_it_answers(scene: &Scene) {
    let give_up_at = Instant::now() + Duration::from_secs(30);
    while let Err(error) = sqlx::query("select 1").execute(&scene.sql).await {
        assert!(Instant::now() < give_up_at, "PostgreSQL does not come back: {error}");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// SIGKILL for all of them; what they had on its way to the database is lost with them, and what the downstream had begun
/// is finished, but for effects that are still to be made.
fn kill(scene: &Scene, firsts: &mut [First]) {
    firsts.iter().for_each(|first| first.signal(Signal::SIGKILL));
    for first in firsts {
        first.process.kill();
        first.lose_commits();
        first.open_answers();
    }
    scene.things.open();
}

/// The cells with what was seen of them; what is wrong is collected, and named by its cell.
struct Matrix<'a> {
    scene: &'a Scene,
    clients: Vec<Client>,
    give_up_at: Instant,
    seen: Vec<(Cell, Ending, Option<Answer>)>,
    wrong: Vec<String>,
}

impl<'a> Matrix<'a> {
    fn new(scene: &'a Scene, clients: Vec<Client>) -> Self {
        Self {
            scene,
            clients,
            give_up_at: Instant::now() + RECOVERY,
            seen: Vec::new(),
            wrong: Vec::new(),
        }
    }

    fn note<T>(&mut self, cell: Cell, outcome: anyhow::Result<T>) -> Option<T> {
        outcome
            .map_err(|error| self.wrong.push(format!("{}: {error:#}", cell.id())))
            .ok()
    }

    /// Every cell comes to its end, and callers are told so.
    async fn settles(&mut self, firsts: &[First], ending: fn(&Cell) -> Ending) {
        let cells = || firsts.iter().flat_map(|first| &first.standing);
        // First, because a downstream acts within the longest time that it has named.
        for one in cells().filter(|one| one.cell.boundary == Boundary::BeforeTheEffect) {
            let met = self
                .until(one.cell, "recovery meets what is still to act", async || {
                    self.has_been_met(one.cell).await
                })
                .await;
            one.let_it_act();
            self.note(one.cell, met);
        }
        for one in cells() {
            let expected = ending(&one.cell);
            let outcome = self.settled(one, expected).await;
            let told = self.note(one.cell, outcome);
            self.seen.push((one.cell, expected, told));
        }
    }

    async fn settled(&self, one: &Standing, expected: Ending) -> anyhow::Result<Answer> {
        let cell = one.cell;
        let state = match expected {
            Ending::Free => None,
            Ending::Succeeded => Some("succeeded"),
            Ending::Unknown { .. } => Some("needs_reconciliation"),
        };
        if expected == Ending::Free {
            ensure!(self.scene.things.asked(&cell.id()) == 0, "it was sent");
        }
        self.until(cell, "it comes to its end", async || {
            Ok(record::state(&self.scene.sql, cell).await?.as_deref() == state)
        })
        .await?;
        self.asked_again(cell, expected).await
    }

    /// Whether recovery has come upon a request that the downstream has taken and not acted on.
    async fn has_been_met(&self, cell: Cell) -> anyhow::Result<bool> {
        let steps = record::history(&self.scene.sql, cell).await?;
        let met = match cell.ability {
            Ability::Key => "answered",
            Ability::Conditional => "succeeded",
            Ability::Lookup => "looked_up",
            Ability::None | Ability::Forgetful => "claim_lapsed",
        };
        // A process that lives has its answer yet to come.
        Ok(steps.iter().any(|step| step.event == met || step.event == "succeeded"))
    }

    /// The same request again, at each process and twice, as engines do.
    async fn asked_again(&self, cell: Cell, expected: Ending) -> anyhow::Result<Answer> {
        let mut told: Option<Answer> = None;
        for client in self.clients.iter().cycle().take(self.clients.len() + 1) {
            let answer = match (expected, &told) {
                (Ending::Free, None) => self.done_at_last(client, cell).await?,
                _ => send(client, cell).await?,
            };
            let (status, code) = (answer.status, answer.code());
            match expected {
                Ending::Unknown { .. } => ensure!(
                    (status, code.as_str()) == (409, "outcome-unknown"),
                    "asked again, it is {status} {code}"
                ),
                Ending::Free | Ending::Succeeded => {
                    ensure!(status < 300, "asked again, it is {status} {code}");
                    let is_first = expected == Ending::Free && told.is_none();
                    ensure!(
                        answer.is_replay() != is_first,
                        "a replay that does not say so, or the reverse"
                    );
                }
            }
            if let Some(told) = &told {
                let same = told.status == answer.status && (status == 409 || told.body == answer.body);
                ensure!(same, "told {told:?}, and then {answer:?}");
            }
            told = Some(answer);
        }
        let told = told.context("nobody was asked")?;
        self.holds(cell, expected, &told).await?;
        Ok(told)
    }

    /// A free id, as soon as PostgreSQL has rolled back what nobody will finish.
    async fn done_at_last(&self, client: &Client, cell: Cell) -> anyhow::Result<Answer> {
        loop {
            let answer = send(client, cell).await?;
            if !matches!(answer.status, 409 | 503) {
                return Ok(answer);
            }
            ensure!(Instant::now() < self.give_up_at, "it stays {answer:?}");
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    }

    /// Effects, receipt and history are what they must be.
    async fn holds(&self, cell: Cell, expected: Ending, told: &Answer) -> anyhow::Result<()> {
        let made = self.scene.things.made(&cell.id());
        let sql = &self.scene.sql;
        match expected {
            Ending::Free | Ending::Succeeded => {
                ensure!(made.len() == 1, "{} effects", made.len());
                ensure!(
                    is_about(&told.body, &made[0]),
                    "told {:?}, made {:?}",
                    told.body,
                    made[0]
                );
                ensure!(record::receipt(sql, cell).await? == told.body, "another receipt");
            }
            Ending::Unknown { effects } => {
                ensure!(made.len() == effects, "{} effects and not {effects}", made.len());
                let asked = self.scene.things.asked(&cell.id());
                ensure!(asked == effects, "sent {asked} times");
            }
        }
        record::walk(cell, &record::history(sql, cell).await?, IN_FLIGHT)
    }

    async fn until(
        &self,
        cell: Cell,
        what: &str,
        mut is_so: impl AsyncFnMut() -> anyhow::Result<bool>,
    ) -> anyhow::Result<()> {
        while !is_so().await? {
            if Instant::now() > self.give_up_at {
                let steps = record::history(&self.scene.sql, cell).await?;
                bail!("not within {RECOVERY:?}: {what}; {steps:#?}");
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(())
    }

    /// A process that wakes learns that its claims are gone, and adds what it knows to the histories.
    async fn hears_the_late_ends(&mut self, firsts: &[First]) {
        self.give_up_at = Instant::now() + Duration::from_secs(15);
        for cell in firsts.iter().flat_map(|first| &first.standing).map(|one| one.cell) {
            let late: &[&str] = match cell.boundary {
                // Nothing of them was, or is ever, sent.
                Boundary::AfterTheFirstByte => &["late_end"],
                // Whether its clock or its socket is looked at first is chance.
                Boundary::BeforeTheEffect | Boundary::AfterTheLastByte | Boundary::AfterTheHead => {
                    &["late_answer", "late_end"]
                }
                Boundary::BeforeTheSettlement => &["late_answer"],
                Boundary::BeforeTheClaim
                | Boundary::AfterTheClaim
                | Boundary::AfterTheSettlement
                | Boundary::BeforeOurAnswer
                | Boundary::AfterOurAnswer => continue,
            };
            let outcome = self
                .until(cell, "the late end is noted", async || {
                    let steps = record::history(&self.scene.sql, cell).await?;
                    Ok(steps.iter().any(|step| late.contains(&step.event.as_str())))
                })
                .await;
            self.note(cell, outcome);
        }
    }

    /// What stood in the narrow door was cut off there: each of these boundaries was one. The downstream learns so once it
    /// has read what was on its way.
    async fn cut_what_was_on_its_way(&mut self) {
        let give_up_at = Instant::now() + RECOVERY;
        while self.scene.things.cut() < Ability::ALL.len() && Instant::now() < give_up_at {
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        let cut = self.scene.things.cut();
        if cut != Ability::ALL.len() {
            self.wrong.push(format!("{cut} requests were cut off in their middle"));
        }
    }

    fn ask_also(&mut self, client: Client) {
        self.clients.push(client);
    }

    /// What every cell had come to stands.
    async fn settled_for_good(&mut self) {
        for (cell, expected, told) in std::mem::take(&mut self.seen) {
            let expected_now = match expected {
                Ending::Free => Ending::Succeeded,
                other => other,
            };
            let again = self.asked_again(cell, expected_now).await;
            let again = self.note(cell, again);
            if let (Some(told), Some(again)) = (&told, &again)
                && (told.status, &told.body) != (again.status, &again.body)
                && told.status != 409
            {
                self.wrong
                    .push(format!("{}: told {told:?}, and later {again:?}", cell.id()));
            }
            self.seen.push((cell, expected_now, told));
        }
    }

    /// Whoever was given an answer at the time was given the one that everybody gets.
    async fn keeps_what_was_acknowledged(&mut self, firsts: Vec<First>) {
        for first in firsts {
            for one in first.standing {
                let cell = one.cell;
                let got = one.answer().await;
                if cell.boundary == Boundary::AfterOurAnswer && got.is_err() {
                    self.wrong.push(format!("{}: its caller was not answered", cell.id()));
                }
                let Some(got) = got.ok().filter(|answer| answer.status < 300) else {
                    continue;
                };
                let stored = record::receipt(&self.scene.sql, cell).await;
                if let Some(stored) = self.note(cell, stored)
                    && got.body != stored
                {
                    self.wrong
                        .push(format!("{}: acknowledged {got:?}, stored {stored:?}", cell.id()));
                }
            }
            // Its process ends here.
        }
    }

    /// Nothing is left to be finished by anybody, and nothing has changed meanwhile.
    async fn end(mut self, log: &str) -> Judged {
        let unfinished = record::unfinished(&self.scene.sql).await.unwrap();
        if !unfinished.is_empty() {
            self.wrong.push(format!("left unfinished: {unfinished:?}"));
        }
        for (cell, expected, told) in std::mem::take(&mut self.seen) {
            let expected = match expected {
                Ending::Free => Ending::Succeeded,
                other => other,
            };
            if let Some(told) = told {
                let holds = self.holds(cell, expected, &told).await;
                self.note(cell, holds);
            }
        }
        if self.wrong.is_empty() {
            return Judged::Right;
        }
        let wrong = format!(
            "{} of {} cells are wrong:\n{}\n\n{log}",
            self.wrong.len(),
            Cell::all().len(),
            self.wrong.join("\n")
        );
        if record::any_too_late(&self.scene.sql).await.unwrap() {
            return Judged::TooBusy(wrong);
        }
        panic!("{wrong}");
    }
}
