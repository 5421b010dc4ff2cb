//! A small downstream to try things against: charges, mails and bookings that anybody may make, under four prefixes, one
//! per capability that a downstream can have. It counts requests and effects exactly, and breaks on request: see
//! docs/SANDBOX.md.
//!
//! It is a toy. Everything is in memory, bounded, and gone when it stops; nobody is authenticated. It knows nothing of
//! the ledger, so that what it counts is a second opinion.

mod answer;
mod exchange;
mod fault;
mod gzip;
mod keys;
mod line;
mod memory;
mod object;
mod perform;
mod received;
mod reply;
mod route;

use std::io;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use hyper::service::service_fn;
use hyper_util::rt::{TokioIo, TokioTimer};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio_util::sync::{CancellationToken, DropGuard};
use tokio_util::task::TaskTracker;

use exchange::Exchange;
use line::Line;

/// Most connections at a time; more wait in the kernel's queue.
const MAX_CONNECTIONS: usize = 4_096;

/// Bound of a request's head.
const MAX_HEAD: usize = 64 << 10;

/// How a sandbox behaves where no request says otherwise.
#[derive(Debug, Clone, Copy)]
pub struct Settings {
    pub listen: SocketAddr,
    /// How long an `Idempotency-Key` is remembered under `/key`.
    pub key_memory: Duration,
    /// How long something done stays invisible to look-ups under `/lookup`.
    pub lookup_delay: Duration,
    /// Most objects, keys and references that are remembered, each; beyond, requests are refused.
    pub max_records: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Self {
            listen: SocketAddr::from(([127, 0, 0, 1], 0)),
            key_memory: Duration::from_secs(86_400),
            lookup_delay: Duration::ZERO,
            max_records: 200_000,
        }
    }
}

/// A running sandbox; dropping it stops it.
#[derive(Debug)]
pub struct Running {
    pub address: SocketAddr,
    tasks: TaskTracker,
    stop: DropGuard,
}

impl Running {
    /// Stops at once: connections and requests under way are cut off.
    pub async fn stop(self) {
        drop(self.stop);
        self.tasks.close();
        self.tasks.wait().await;
    }
}

pub async fn start(settings: Settings) -> io::Result<Running> {
    let listener = TcpListener::bind(settings.listen).await?;
    let address = listener.local_addr()?;
    let (tasks, stop) = (TaskTracker::new(), CancellationToken::new());
    let server = Arc::new(Server {
        exchange: Arc::new(Exchange::new(settings)),
        tasks: tasks.clone(),
        stop: stop.clone(),
    });
    tasks.spawn(stop.clone().run_until_cancelled_owned(server.accept(listener)));
    Ok(Running {
        address,
        tasks,
        stop: stop.drop_guard(),
    })
}

struct Server {
    exchange: Arc<Exchange>,
    tasks: TaskTracker,
    stop: CancellationToken,
}

impl Server {
    async fn accept(self: Arc<Self>, listener: TcpListener) {
        let places = Arc::new(Semaphore::new(MAX_CONNECTIONS));
        loop {
            // Never closed.
            let Ok(place) = places.clone().acquire_owned().await else {
                return;
            };
            match listener.accept().await {
                Ok((stream, _)) => {
                    let connection = self.clone().serve(stream, place);
                    self.tasks
                        .spawn(self.stop.clone().run_until_cancelled_owned(connection));
                }
                Err(error) => {
                    tracing::warn!(error = %error, "the sandbox cannot accept a connection");
                    tokio::time::sleep(Duration::from_millis(50)).await;
                }
            }
        }
    }

    async fn serve(self: Arc<Self>, stream: TcpStream, place: OwnedSemaphorePermit) {
        // Pieces of a slow answer must not wait for each other.
        let _ = stream.set_nodelay(true);
        let (line, scissors) = Line::new(stream);
        let service = service_fn(|request| {
            let exchange = self.exchange.clone();
            // On a task of its own: a request that was received takes its course, whether or not its sender stays.
            let answer = self.tasks.spawn(
                self.stop
                    .clone()
                    .run_until_cancelled_owned(exchange.respond(request, scissors.clone())),
            );
            async {
                // Nothing comes of it when the sandbox stops; the connection ends with it.
                let answer = answer.await.ok().flatten();
                answer.ok_or_else(|| io::Error::from(io::ErrorKind::ConnectionAborted))
            }
        });
        let mut http = hyper::server::conn::http1::Builder::new();
        http.timer(TokioTimer::new()).max_buf_size(MAX_HEAD).half_close(true);
        if let Err(error) = http.serve_connection(TokioIo::new(line), service).await {
            tracing::debug!(error = %error, "a connection of the sandbox ended");
        }
        drop(place);
    }
}
