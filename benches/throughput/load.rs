//! The clients: so many connections, each sending its next deposit as soon as the last is answered.

use std::net::SocketAddr;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use anyhow::{Context as _, Result};
use tokio::task::JoinSet;

use crate::connection::Connection;
use crate::histogram::Histogram;

/// The requests of one server. A deposit is told by its number alone: its operation id and its account follow from it,
/// so a deposit can be sent again without having been kept.
pub struct Requests {
    head: Vec<u8>,
    /// What follows the key, for each account.
    tails: Vec<Vec<u8>>,
}

/// The numbers that a phase's clients take their deposits from.
pub enum Numbers {
    /// New ones, one after the other.
    Fresh(AtomicU64),
    /// Some of these, picked at random.
    Again(Range<u64>),
}

/// When a phase's requests count.
#[derive(Clone, Copy)]
pub struct Window {
    pub from: Instant,
    pub until: Instant,
}

impl Requests {
    /// `credential` is a complete header line, or nothing.
    pub fn new(
        address: SocketAddr,
        path: &str,
        credential: &str,
        accounts: u32,
        body: fn(account: u32) -> String,
    ) -> Self {
        let head = format!(
            "POST {path} HTTP/1.1\r\nHost: {address}\r\nContent-Type: application/json\r\n{credential}Idempotency-Key: "
        );
        let tail = |account| {
            let body = body(account);
            format!("\r\nContent-Length: {}\r\n\r\n{body}", body.len()).into_bytes()
        };
        Self {
            head: head.into_bytes(),
            tails: (1..=accounts).map(tail).collect(),
        }
    }

    fn write(&self, number: u64, request: &mut Vec<u8>) {
        request.clear();
        request.extend_from_slice(&self.head);
        // Writing to a vector cannot fail.
        let _ = std::io::Write::write_fmt(request, format_args!("acme:order-{number}:deposit:rev-1"));
        request.extend_from_slice(&self.tails[(mix(number) % self.tails.len() as u64) as usize]);
    }
}

impl Numbers {
    /// A number that no earlier run has used on the same database: the time in microseconds, which deposits do not outrun.
    pub fn start() -> u64 {
        // The clock of a machine that runs benchmarks stands after 1970.
        SystemTime::now()
            .duration_since(UNIX_EPOCH)
            .unwrap_or(Duration::ZERO)
            .as_micros() as u64
    }

    pub fn fresh(from: u64) -> Self {
        Self::Fresh(AtomicU64::new(from))
    }

    fn next(&self, random: &mut u64) -> u64 {
        match self {
            Self::Fresh(next) => next.fetch_add(1, Ordering::Relaxed),
            Self::Again(sent) => {
                *random = mix(*random);
                sent.start + *random % (sent.end - sent.start)
            }
        }
    }
}

impl Window {
    pub fn opening_in(warm_up: Duration, length: Duration) -> Self {
        let from = Instant::now() + warm_up;
        Self {
            from,
            until: from + length,
        }
    }

    pub fn seconds(&self) -> f64 {
        (self.until - self.from).as_secs_f64()
    }

    fn holds(&self, instant: Instant) -> bool {
        self.from <= instant && instant < self.until
    }
}

pub async fn connect(address: SocketAddr, clients: usize) -> Result<Vec<Connection>> {
    let mut connections = Vec::with_capacity(clients);
    for _ in 0..clients {
        connections.push(Connection::open(address).await?);
    }
    Ok(connections)
}

/// Drives all connections until the window closes. Every request that was sent is answered before this returns, so all
/// numbers taken are acknowledged deposits; the first that is not ends the run.
pub async fn drive(
    connections: Vec<Connection>,
    requests: &Arc<Requests>,
    numbers: &Arc<Numbers>,
    window: Window,
) -> Result<Histogram> {
    let mut clients = JoinSet::new();
    for (seed, connection) in connections.into_iter().enumerate() {
        clients.spawn(client(
            connection,
            requests.clone(),
            numbers.clone(),
            window,
            seed as u64,
        ));
    }
    let mut latencies = Histogram::new();
    while let Some(client) = clients.join_next().await {
        latencies.merge(&client.context("run a client")??);
    }
    Ok(latencies)
}

async fn client(
    mut connection: Connection,
    requests: Arc<Requests>,
    numbers: Arc<Numbers>,
    window: Window,
    mut random: u64,
) -> Result<Histogram> {
    let mut latencies = Histogram::new();
    let mut request = Vec::with_capacity(1024);
    let mut sent_at = Instant::now();
    while sent_at < window.until {
        requests.write(numbers.next(&mut random), &mut request);
        connection.exchange(&request).await?;
        let answered_at = Instant::now();
        if window.holds(answered_at) {
            latencies.add(answered_at - sent_at);
        }
        sent_at = answered_at;
    }
    Ok(latencies)
}

/// SplitMix64: spreads neighbouring numbers evenly.
fn mix(number: u64) -> u64 {
    let mut mixed = number.wrapping_add(0x9E37_79B9_7F4A_7C15);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^ (mixed >> 31)
}
