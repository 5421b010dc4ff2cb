//! Transactions that are stopped where they commit, on either side of it, until the test lets them go or loses them: at
//! their COMMIT, or at the statement that is a transaction by itself.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use tokio::sync::watch;

/// Which transaction is stopped, and where.
#[derive(Debug, Clone)]
pub struct Stop {
    /// Part of the text of a statement that it runs.
    pub statement: &'static str,
    /// Bytes among that statement's parameters.
    pub parameter: String,
    pub side: Side,
}

/// The side of its commit on which a transaction is stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// The server has not been sent what commits it.
    Before,
    /// The server has committed and answered; the client has read nothing of it.
    After,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Planned,
    Reached,
    LetGo,
    Lost,
}

/// A stop that is planned, as the test sees it.
pub struct Held(watch::Sender<Phase>);

/// The same, as the connections see it.
#[derive(Debug)]
pub struct Waiting {
    stop: Stop,
    phase: watch::Sender<Phase>,
}

pub fn plan(stop: Stop) -> (Waiting, Held) {
    let phase = watch::Sender::new(Phase::Planned);
    let waiting = Waiting {
        stop,
        phase: phase.clone(),
    };
    (waiting, Held(phase))
}

impl Held {
    /// Returns when a transaction stands there.
    pub async fn reached(&self) {
        let _ = self.0.subscribe().wait_for(|phase| *phase != Phase::Planned).await;
    }

    /// Lets it go on.
    pub fn let_go(&self) {
        self.0.send_replace(Phase::LetGo);
    }

    /// Closes its connection on both sides; what was held never arrives.
    pub fn lose(&self) {
        self.0.send_replace(Phase::Lost);
    }
}

impl Waiting {
    fn reach(&self) {
        // A decision that was made before anybody stood here is kept.
        self.phase.send_if_modified(|phase| {
            let first = *phase == Phase::Planned;
            if first {
                *phase = Phase::Reached;
            }
            first
        });
    }

    async fn goes_on(&self) -> bool {
        let mut phase = self.phase.subscribe();
        let decided = phase
            .wait_for(|phase| matches!(phase, Phase::LetGo | Phase::Lost))
            .await;
        decided.is_ok_and(|phase| *phase == Phase::LetGo)
    }
}

/// Stands until the test has decided about every one of them, which a transaction of a group may have several of. False
/// if the connection is to be lost.
async fn stand(stops: Vec<Waiting>) -> bool {
    stops.iter().for_each(Waiting::reach);
    for stop in stops {
        if !stop.goes_on().await {
            return false;
        }
    }
    true
}

/// What one connection is at.
pub struct Watch {
    /// Texts of the statements that were prepared on it, by name.
    statements: HashMap<Vec<u8>, Vec<u8>>,
    /// A `begin` has been seen, and not its end.
    in_transaction: bool,
    /// Stops that apply to the transaction that is open.
    met: Vec<Waiting>,
    /// Those behind its commit, for the other direction.
    stopped: Arc<Mutex<Vec<Waiting>>>,
}

impl Watch {
    pub fn new(stopped: Arc<Mutex<Vec<Waiting>>>) -> Self {
        Self {
            statements: HashMap::new(),
            in_transaction: false,
            met: Vec::new(),
            stopped,
        }
    }

    /// Looks at a client's message before it goes on; waits where a stop says so. False if the connection is to be lost.
    pub async fn may_pass(&mut self, message: &[u8], stops: &Mutex<Vec<Waiting>>) -> bool {
        let Some((kind, rest)) = message.split_first() else {
            return true;
        };
        let mut texts = rest.get(4..).unwrap_or_default().split(|byte| *byte == 0);
        match (kind, texts.next(), texts.next()) {
            (b'Q', Some(text), _) => {
                let ends = is_said(text, b"commit") || is_said(text, b"rollback");
                let commits = is_said(text, b"commit");
                self.in_transaction = !ends && (self.in_transaction || text.starts_with(b"begin"));
                !commits || self.stand_at_the_commit().await
            }
            (b'P', Some(name), Some(text)) => {
                self.statements.insert(name.to_vec(), text.to_vec());
                true
            }
            (b'B', Some(_portal), Some(name)) => {
                self.meet(name, message, stops);
                self.in_transaction || self.stand_at_the_commit().await
            }
            _ => true,
        }
    }

    /// Takes the stops that apply to a statement, so that each is made only once.
    fn meet(&mut self, name: &[u8], message: &[u8], stops: &Mutex<Vec<Waiting>>) {
        let Some(text) = self.statements.get(name) else { return };
        let met = |waiting: &mut Waiting| {
            contains(text, waiting.stop.statement.as_bytes()) && contains(message, waiting.stop.parameter.as_bytes())
        };
        self.met.extend(stops.lock().unwrap().extract_if(.., met));
    }

    async fn stand_at_the_commit(&mut self) -> bool {
        let (before, after) = std::mem::take(&mut self.met)
            .into_iter()
            .partition(|waiting| waiting.stop.side == Side::Before);
        self.stopped.lock().unwrap().extend::<Vec<_>>(after);
        stand(before).await
    }
}

/// Before anything of the server's is passed on: the answer to a commit that was let through waits here. False if the
/// connection is to be lost.
pub async fn may_be_answered(stopped: &Mutex<Vec<Waiting>>) -> bool {
    let waiting = std::mem::take(&mut *stopped.lock().unwrap());
    stand(waiting).await
}

fn contains(bytes: &[u8], wanted: &[u8]) -> bool {
    bytes.windows(wanted.len()).any(|window| window == wanted)
}

/// Whether one of a simple query's statements is this one; what surrounds it in the same message makes no difference.
pub fn is_said(text: &[u8], statement: &[u8]) -> bool {
    text.split(|byte| *byte == b';')
        .any(|said| said.trim_ascii().eq_ignore_ascii_case(statement))
}
