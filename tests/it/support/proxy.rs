//! A bad network between the service and PostgreSQL: latency, silence, and connections that are lost exactly at COMMIT.
//!
//! It reads just enough of the wire protocol to see a client's messages: a start-up message, then one type byte and a
//! length each. `commit` comes as a simple query, so no prepared statement hides it; what a transaction does is known from
//! the statements it binds, whose texts were sent when they were prepared. A statement that commits by itself does so when
//! its `Sync` comes.

mod hold;

use std::collections::{HashMap, VecDeque};
use std::net::SocketAddr;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use bytes::{Buf, BytesMut};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::tcp::{OwnedReadHalf, OwnedWriteHalf};
use tokio::net::unix;
use tokio::net::{TcpListener, TcpStream, UnixStream};
use tokio::sync::watch;
use tokio_util::sync::CancellationToken;

use self::hold::{Waiting, Watch};
use super::Shared;

pub use self::hold::{Held, Side, Stop};

/// How a COMMIT goes wrong.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Cut {
    /// The connection is lost before the server has read it: nothing is committed.
    Before,
    /// It is lost as soon as the server has been sent it.
    During,
    /// It is lost after the server has committed and before the client has read so.
    After,
    /// The server commits, and then nothing is heard on this connection any more: it is not even closed.
    Silence,
}

pub struct Proxy {
    pub address: SocketAddr,
    network: Arc<Network>,
    // Dropping it ends every connection.
    _end: tokio_util::sync::DropGuard,
}

struct Network {
    latency_ms: AtomicU64,
    flowing: watch::Sender<bool>,
    planned: Mutex<VecDeque<Cut>>,
    /// The same for statements with this text.
    statements: Mutex<(&'static str, VecDeque<Cut>)>,
    made: AtomicU64,
    stops: Mutex<Vec<Waiting>>,
}

impl Proxy {
    /// Stands before the server behind this socket.
    pub async fn before(server: &Shared) -> Self {
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let address = listener.local_addr().unwrap();
        let network = Arc::new(Network {
            latency_ms: AtomicU64::new(0),
            flowing: watch::Sender::new(true),
            planned: Mutex::default(),
            statements: Mutex::default(),
            made: AtomicU64::new(0),
            stops: Mutex::default(),
        });
        let end = CancellationToken::new();
        let socket = server.socket().join(".s.PGSQL.5432");
        tokio::spawn(
            end.clone()
                .run_until_cancelled_owned(accept(listener, socket, network.clone(), end.clone())),
        );
        Self {
            address,
            network,
            _end: end.drop_guard(),
        }
    }

    pub fn url(&self, role: &str, database: &str) -> String {
        format!("postgres://{role}@{}/{database}?sslmode=disable", self.address)
    }

    /// Delays everything that a client sends.
    pub fn delay(&self, latency: Duration) {
        self.network
            .latency_ms
            .store(u64::try_from(latency.as_millis()).unwrap(), Ordering::Relaxed);
    }

    /// Stops, or lets go on, all traffic in both directions.
    pub fn flow(&self, flowing: bool) {
        self.network.flowing.send_replace(flowing);
    }

    /// Plans what becomes of the next COMMITs, one cut each.
    pub fn plan(&self, cuts: impl IntoIterator<Item = Cut>) {
        *self.network.planned.lock().unwrap() = cuts.into_iter().collect();
    }

    /// Stops the next transaction that does this, where it commits; other transactions and connections go on.
    pub fn hold(&self, stop: Stop) -> Held {
        let (waiting, held) = hold::plan(stop);
        self.network.stops.lock().unwrap().push(waiting);
        held
    }

    /// Plans what becomes of the next statements that have this in their text and commit by themselves.
    pub fn plan_statements(&self, text: &'static str, cuts: impl IntoIterator<Item = Cut>) {
        *self.network.statements.lock().unwrap() = (text, cuts.into_iter().collect());
    }

    /// Cuts made so far.
    pub fn made(&self) -> u64 {
        self.network.made.load(Ordering::Relaxed)
    }
}

async fn accept(listener: TcpListener, socket: PathBuf, network: Arc<Network>, end: CancellationToken) {
    loop {
        let (client, _) = listener.accept().await.unwrap();
        client.set_nodelay(true).unwrap();
        let (socket, network, lost) = (socket.clone(), network.clone(), end.child_token());
        tokio::spawn(async move {
            // A server that is down refuses; so do we, by closing.
            let Ok(server) = UnixStream::connect(socket).await else {
                return;
            };
            carry(client, server, network, lost).await;
        });
    }
}

async fn carry(client: TcpStream, server: UnixStream, network: Arc<Network>, lost: CancellationToken) {
    let (from_client, to_client) = client.into_split();
    let (from_server, to_server) = server.into_split();
    let swallow = Arc::new(AtomicBool::new(false));
    let silent = Arc::new(AtomicBool::new(false));
    let stopped = Arc::new(Mutex::default());
    let watch = Watch::new(stopped.clone());
    let up = up(
        from_client,
        to_server,
        network.clone(),
        swallow.clone(),
        silent.clone(),
        watch,
    );
    let down = down(from_server, to_client, network, swallow, silent.clone(), stopped);
    // Whichever side ends first takes the other with it, and both sockets are closed.
    tokio::select! {
        _ = up => {}
        _ = down => {}
        () = lost.cancelled() => {}
    }
}

async fn up(
    mut client: OwnedReadHalf,
    mut server: unix::OwnedWriteHalf,
    network: Arc<Network>,
    swallow: Arc<AtomicBool>,
    silent: Arc<AtomicBool>,
    mut watch: Watch,
) -> std::io::Result<()> {
    let mut flowing = network.flowing.subscribe();
    let mut unread = BytesMut::new();
    let mut started = false;
    let mut statements = Statements::default();
    loop {
        if client.read_buf(&mut unread).await? == 0 {
            return Ok(());
        }
        tokio::time::sleep(Duration::from_millis(network.latency_ms.load(Ordering::Relaxed))).await;
        let _ = flowing.wait_for(|flowing| *flowing).await;
        while let Some(message) = next_message(&mut unread, &mut started) {
            if !watch.may_pass(&message, &network.stops).await {
                return Ok(());
            }
            let cut = if is_commit(&message) {
                network.planned.lock().unwrap().pop_front()
            } else if let Some(text) = statements.synced(&message) {
                let mut planned = network.statements.lock().unwrap();
                let is_planned = !planned.1.is_empty() && text.contains(planned.0);
                if is_planned { planned.1.pop_front() } else { None }
            } else {
                None
            };
            if let Some(cut) = cut {
                network.made.fetch_add(1, Ordering::Relaxed);
                match cut {
                    Cut::Before => return Ok(()),
                    Cut::During => return server.write_all(&message).await,
                    Cut::After => swallow.store(true, Ordering::Relaxed),
                    Cut::Silence => {
                        silent.store(true, Ordering::Relaxed);
                        server.write_all(&message).await?;
                        return std::future::pending().await;
                    }
                }
            }
            server.write_all(&message).await?;
        }
    }
}

async fn down(
    mut server: unix::OwnedReadHalf,
    mut client: OwnedWriteHalf,
    network: Arc<Network>,
    swallow: Arc<AtomicBool>,
    silent: Arc<AtomicBool>,
    stopped: Arc<Mutex<Vec<Waiting>>>,
) -> std::io::Result<()> {
    let mut flowing = network.flowing.subscribe();
    let mut unread = BytesMut::with_capacity(16 << 10);
    while server.read_buf(&mut unread).await? > 0 && !swallow.load(Ordering::Relaxed) {
        if silent.load(Ordering::Relaxed) {
            return std::future::pending().await;
        }
        let _ = flowing.wait_for(|flowing| *flowing).await;
        if !hold::may_be_answered(&stopped).await {
            return Ok(());
        }
        client.write_all_buf(&mut unread).await?;
    }
    Ok(())
}

/// The next whole message of a client, if it is there.
fn next_message(unread: &mut BytesMut, started: &mut bool) -> Option<BytesMut> {
    let before_length = usize::from(*started);
    let mut length = unread.get(before_length..before_length + 4)?;
    let whole = before_length + usize::try_from(length.get_u32()).unwrap();
    if unread.len() < whole {
        return None;
    }
    *started = true;
    Some(unread.split_to(whole))
}

/// The statements that a connection has prepared, by name, and the one that it runs.
#[derive(Default)]
struct Statements {
    texts: HashMap<Vec<u8>, String>,
    bound: Option<String>,
}

impl Statements {
    /// The text of the statement that this message ends, if it ends one.
    fn synced(&mut self, message: &[u8]) -> Option<String> {
        let mut strings = message.get(5..).unwrap_or_default().split(|byte| *byte == 0);
        match message.first() {
            Some(b'P') => {
                let (name, text) = (strings.next()?, strings.next()?);
                self.texts
                    .insert(name.to_vec(), String::from_utf8_lossy(text).into_owned());
                None
            }
            Some(b'B') => {
                let (_portal, name) = (strings.next()?, strings.next()?);
                self.bound = self.texts.get(name).cloned();
                None
            }
            Some(b'S') => self.bound.take(),
            _ => None,
        }
    }
}

/// Whether a simple query commits.
fn is_commit(message: &[u8]) -> bool {
    let text = message.get(5..).and_then(|text| text.split(|byte| *byte == 0).next());
    message.first() == Some(&b'Q') && text.is_some_and(|text| hold::is_said(text, b"commit"))
}
