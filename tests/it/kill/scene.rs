//! Processes that hold operations at every boundary, on one database and before one downstream.

use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use bytes::Bytes;
use nix::sys::signal::Signal;
use sqlx::PgPool;
use tokio::task::JoinHandle;

use super::cell::{self, Boundary, Cell, IN_FLIGHT};
use super::downstream::{Downstream, Gate};
use super::gateway::Gateway;
use crate::support::process::Process;
use crate::support::proxy::{Held, Proxy};
use crate::support::victim::Victim;
use crate::support::{Answer, Client, Database, Dropped, Shared, TENANT, shared, write_config};

/// Boundaries at a COMMIT that one process can hold at a time: it has two writers.
const COMMITS: usize = 2;

/// Database and downstream, and the configuration that brings them together.
pub struct Scene {
    pub things: Downstream,
    pub sql: PgPool,
    service_url: String,
    database: String,
    key: String,
    config: PathBuf,
    _directory: tempfile::TempDir,
    // A server of a test's own ends with it.
    _dropped: Option<Dropped>,
}

/// A process behind its own way to the database, and what it holds.
pub struct First {
    pub process: Process,
    // Its way to the database ends with it.
    _proxy: Proxy,
    pub standing: Vec<Standing>,
}

/// An operation at its boundary.
pub struct Standing {
    pub cell: Cell,
    hold: Hold,
    answer: JoinHandle<anyhow::Result<Answer>>,
}

enum Hold {
    Commit(Held),
    Downstream(Gate),
    Door,
    Answer(Gateway),
    Nothing,
}

impl Scene {
    pub async fn on_the_shared_server() -> Self {
        Self::with(IN_FLIGHT).await
    }

    /// With another longest time on the way.
    pub async fn with(in_flight: Duration) -> Self {
        let database = Database::create().await;
        let key = database.keys(TENANT).await["agent"].clone();
        let scene = Self::new(database.sql, database.service_url, database.name, key, in_flight).await;
        Self {
            _dropped: Some(database.dropped),
            ..scene
        }
    }

    /// On a server that can be killed.
    pub async fn on(victim: &Victim, database: &str) -> Self {
        let (sql, key) = victim.prepare(database).await;
        let url = victim.server.url("opledger", database);
        Self::new(sql, url, database.to_owned(), key, IN_FLIGHT).await
    }

    async fn new(sql: PgPool, service_url: String, database: String, key: String, in_flight: Duration) -> Self {
        let things = Downstream::start().await;
        let (directory, config) = write_config(&cell::config(things.address, things.narrow, in_flight));
        Self {
            things,
            sql,
            service_url,
            database,
            key,
            config,
            _directory: directory,
            _dropped: None,
        }
    }

    /// A process with nothing between it and the database.
    pub async fn process(&self) -> Process {
        self.serve(self.service_url.clone()).await
    }

    async fn serve(&self, url: String) -> Process {
        let config = self.config.clone();
        // It waits for the process's first lines, which come by way of proxies that run here.
        tokio::task::spawn_blocking(move || Process::serve(&config, &url))
            .await
            .unwrap()
    }

    pub fn client(&self, address: SocketAddr) -> Client {
        Client::new(address, &self.key).unchecked()
    }

    /// As many processes as it takes to hold all these cells, each at its boundary; or what did not come to its own, on a
    /// machine that is too busy.
    pub async fn hold(self: &Arc<Self>, server: &Shared, cells: &[Cell]) -> Result<Vec<First>, String> {
        let (at_commits, others): (Vec<Cell>, Vec<Cell>) =
            cells.iter().partition(|cell| cell.boundary.stop("").is_some());
        let groups = at_commits.chunks(COMMITS).chain([&others[..]]);
        let mut starting = Vec::new();
        for group in groups.filter(|group| !group.is_empty()) {
            let proxy = Proxy::before(server).await;
            let (scene, url, group) = (self.clone(), proxy.url("opledger", &self.database), group.to_vec());
            starting.push(tokio::spawn(async move {
                let process = scene.serve(url).await;
                (process, proxy, group)
            }));
        }
        let mut firsts = Vec::new();
        for starting in starting {
            let (process, proxy, group) = starting.await.unwrap();
            firsts.push((process, proxy, group));
        }
        // All at once, so that none grows old while others come.
        let mut held = Vec::new();
        for (process, proxy, group) in firsts {
            let mut standing = Vec::new();
            for cell in group {
                standing.push(self.bring(cell, process.address, &proxy).await);
            }
            held.push(First {
                process,
                _proxy: proxy,
                standing,
            });
        }
        for first in &held {
            for one in &first.standing {
                let reached = tokio::time::timeout(Duration::from_secs(15), one.reached(&self.things));
                if reached.await.is_err() {
                    let log = first.process.log();
                    return Err(format!("{:?} does not come to its boundary:\n{log}", one.cell));
                }
            }
        }
        self.things.stalled(narrow(cells)).await;
        Ok(held)
    }

    async fn bring(&self, cell: Cell, ledger: SocketAddr, proxy: &Proxy) -> Standing {
        let id = cell.id();
        let hold = match (cell.boundary, cell.boundary.stop(&id), cell.boundary.point()) {
            (_, Some(stop), _) => Hold::Commit(proxy.hold(stop)),
            (_, _, Some(point)) => Hold::Downstream(self.things.hold(&id, point)),
            (Boundary::AfterTheFirstByte, ..) => Hold::Door,
            (Boundary::BeforeOurAnswer, ..) => Hold::Answer(Gateway::before(ledger).await),
            _ => Hold::Nothing,
        };
        let address = match &hold {
            Hold::Answer(gateway) => gateway.address,
            _ => ledger,
        };
        let client = self.client(address);
        let answer = tokio::spawn(async move { send(&client, cell).await });
        Standing { cell, hold, answer }
    }
}

/// One delivery of a cell's operation, which does not wait for what another one is at.
pub async fn send(client: &Client, cell: Cell) -> anyhow::Result<Answer> {
    let id = cell.id();
    let lines = [
        ("idempotency-key", id.as_str()),
        ("content-type", cell.content_type()),
        ("prefer", "wait=0"),
    ];
    client
        .try_send("POST", &cell.path(), &lines, Bytes::from(cell.body()))
        .await
}

/// How many of these stand in the downstream's narrow door.
fn narrow(cells: &[Cell]) -> usize {
    let stand_there = |cell: &&Cell| cell.boundary == Boundary::AfterTheFirstByte;
    cells.iter().filter(stand_there).count()
}

impl First {
    pub fn signal(&self, signal: Signal) {
        self.process.signal(signal);
    }

    /// Nothing of what was on its way between it and the database arrives any more.
    pub fn lose_commits(&self) {
        for one in &self.standing {
            if let Hold::Commit(held) = &one.hold {
                held.lose();
            }
        }
    }

    pub fn let_commits_go(&self) {
        for one in &self.standing {
            if let Hold::Commit(held) = &one.hold {
                held.let_go();
            }
        }
    }

    /// What stands in the downstream goes on, but for effects that are still to be made.
    pub fn open_answers(&self) {
        for one in &self.standing {
            match &one.hold {
                Hold::Downstream(gate) if one.cell.boundary != Boundary::BeforeTheEffect => gate.open(),
                Hold::Answer(gateway) => gateway.open(),
                Hold::Downstream(_) | Hold::Commit(_) | Hold::Door | Hold::Nothing => {}
            }
        }
    }
}

impl Standing {
    async fn reached(&self, things: &Downstream) {
        match &self.hold {
            Hold::Commit(held) => held.reached().await,
            Hold::Downstream(gate) => gate.reached().await,
            Hold::Door => things.stalled(1).await,
            Hold::Answer(gateway) => gateway.answered().await,
            Hold::Nothing => {
                while !self.is_answered() {
                    tokio::time::sleep(Duration::from_millis(5)).await;
                }
            }
        }
    }

    /// The effect that was still to be made is made.
    pub fn let_it_act(&self) {
        if let Hold::Downstream(gate) = &self.hold {
            gate.open();
        }
    }

    pub fn is_answered(&self) -> bool {
        self.answer.is_finished()
    }

    /// What its caller got.
    pub async fn answer(self) -> anyhow::Result<Answer> {
        // A gateway that is dropped would cut it off.
        let answer = tokio::time::timeout(Duration::from_secs(30), self.answer).await;
        drop(self.hold);
        answer??
    }
}

/// The server of the whole run.
pub fn server() -> &'static Shared {
    shared()
}
