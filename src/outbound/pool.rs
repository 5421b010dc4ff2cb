//! Connections to one downstream that wait for their next request, and the places of those that are under way.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError, Weak};

use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::time::{Instant, sleep, timeout};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use super::dial::{Connection, Dialler};
use super::downstream::{Downstream, Tls};
use super::http1::{Http1, IDLE};
use super::http2::{Http2, Lane};
use super::send::NotSent;
use super::tls;

pub struct Pool {
    pub dialler: Dialler,
    tls: Tls,
    concurrency: usize,
    places: Arc<Semaphore>,
    connections: Mutex<Connections>,
    /// Whether somebody looks after connections that have waited too long.
    kept: AtomicBool,
    /// Nobody looks after them any more.
    stop: CancellationToken,
}

#[derive(Default)]
struct Connections {
    /// The latest last, and taken first: the others may then grow old and go.
    idle: Vec<Idle>,
    shared: Vec<Arc<Http2>>,
}

struct Idle {
    connection: Box<Http1>,
    until: Instant,
}

/// What one request is sent on.
pub enum Line {
    One(Box<Http1>),
    Lane(Lane),
}

impl Pool {
    pub fn new(downstream: &Downstream, tasks: TaskTracker, stop: CancellationToken) -> Self {
        let config = downstream
            .base
            .is_tls()
            .then(|| tls::client_config(&downstream.tls).map_err(|error| error.to_string()));
        Self {
            dialler: Dialler {
                base: downstream.base.clone(),
                tls: config,
                http2: downstream.tls.http2,
                within: downstream.limits.connect,
                tasks,
            },
            tls: downstream.tls.clone(),
            concurrency: downstream.limits.concurrency,
            places: Arc::new(Semaphore::new(downstream.limits.concurrency)),
            connections: Mutex::default(),
            kept: AtomicBool::new(false),
            stop,
        }
    }

    /// Whether its connections lead where this downstream is, in the way it wants them.
    pub fn fits(&self, downstream: &Downstream) -> bool {
        self.dialler.base == downstream.base
            && self.tls == downstream.tls
            && self.concurrency == downstream.limits.concurrency
            && self.dialler.within == downstream.limits.connect
    }

    /// Waits for a place among those under way.
    pub async fn place(&self) -> Result<OwnedSemaphorePermit, NotSent> {
        match timeout(self.dialler.within, self.places.clone().acquire_owned()).await {
            Ok(Ok(place)) => Ok(place),
            // Never closed.
            Ok(Err(closed)) => Err(NotSent::new("busy", closed.to_string())),
            Err(_) => Err(NotSent::new(
                "busy",
                format!(
                    "{} requests are under way, and none ended within {:?}",
                    self.concurrency, self.dialler.within
                ),
            )),
        }
    }

    pub fn has_idle(&self) -> bool {
        let mut connections = self.connections();
        let now = Instant::now();
        let usable = |idle: &mut Idle| idle.until > now && idle.connection.is_usable();
        connections.idle.iter_mut().any(usable) || connections.shared.iter().any(|shared| shared.lane().is_some())
    }

    /// A connection that has waited, if there is one that can take a request.
    pub fn take(&self) -> Option<Line> {
        let mut connections = self.connections();
        connections.shared.retain(|shared| !shared.is_over());
        if let Some(lane) = connections.shared.iter().find_map(Http2::lane) {
            return Some(Line::Lane(lane));
        }
        while let Some(mut idle) = connections.idle.pop() {
            if idle.until > Instant::now() && idle.connection.is_usable() {
                return Some(Line::One(idle.connection));
            }
        }
        None
    }

    pub async fn dial(self: &Arc<Self>) -> Result<Line, NotSent> {
        match self.dialler.dial().await? {
            Connection::One(connection) => Ok(Line::One(connection)),
            Connection::Shared(shared) => {
                let lane = shared
                    .lane()
                    .ok_or_else(|| NotSent::new("closed", "the peer takes no requests on a new connection"))?;
                self.connections().shared.push(shared);
                self.keep();
                Ok(Line::Lane(lane))
            }
        }
    }

    /// Takes a connection back whose answer has been read to its end.
    pub fn give_back(self: &Arc<Self>, mut connection: Box<Http1>) {
        let Some(keep) = connection.keep else { return };
        if !connection.is_usable() {
            return;
        }
        let until = Instant::now() + keep;
        self.connections().idle.push(Idle { connection, until });
        self.keep();
    }

    /// Sees to it that what waits too long is closed, also when no request ever comes by again.
    fn keep(self: &Arc<Self>) {
        if !self.kept.swap(true, Ordering::AcqRel) {
            self.dialler.tasks.spawn(sweep(Arc::downgrade(self), self.stop.clone()));
        }
    }

    /// Closes what has waited too long; whether anything is left.
    fn close_old(&self) -> bool {
        let mut connections = self.connections();
        let now = Instant::now();
        connections
            .idle
            .retain_mut(|idle| idle.until > now && idle.connection.is_usable());
        connections.shared.retain(|shared| {
            let old = shared.idle_since().is_some_and(|since| since + IDLE <= now);
            !old && !shared.is_over()
        });
        let left = !connections.idle.is_empty() || !connections.shared.is_empty();
        if !left {
            // Under the lock: whoever puts a connection in after us finds that nobody sweeps.
            self.kept.store(false, Ordering::Release);
            connections.idle.shrink_to_fit();
        }
        left
    }

    fn connections(&self) -> std::sync::MutexGuard<'_, Connections> {
        self.connections.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

async fn sweep(pool: Weak<Pool>, stop: CancellationToken) {
    loop {
        tokio::select! {
            () = sleep(IDLE / 4) => {}
            () = stop.cancelled() => return,
        }
        let Some(pool) = pool.upgrade() else { return };
        if !pool.close_old() {
            return;
        }
    }
}
