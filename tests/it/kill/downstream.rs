//! A downstream of the test's own, which counts its effects at the moment it makes them and stands still where the test
//! wants: at its first byte of a request, before and after its effect, after the head of its answer.
//!
//! It speaks just enough HTTP/1.1, on bare sockets: the moment between two bytes is the subject.

use std::collections::HashMap;
use std::net::SocketAddr;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use bytes::{Bytes, BytesMut};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::sync::watch;
use tokio_util::sync::{CancellationToken, DropGuard};

/// How long `/forgetful` remembers a key.
pub const SHORT_MEMORY: Duration = Duration::from_millis(1_500);

/// Where a request stands still.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Point {
    /// It has been read to its last byte, and nothing has happened yet.
    BeforeTheEffect,
    /// The effect is made, and nothing has been answered.
    AfterTheEffect,
    /// The answer's head is sent, and nothing of its body.
    AfterTheHead,
}

/// A gate that one request, the first with its reference, comes to.
#[derive(Clone)]
pub struct Gate {
    at: Point,
    reached: watch::Sender<bool>,
    open: watch::Sender<bool>,
}

impl Gate {
    pub async fn reached(&self) {
        let _ = self.reached.subscribe().wait_for(|reached| *reached).await;
    }

    pub fn open(&self) {
        self.open.send_replace(true);
    }

    async fn pass(&self) {
        self.reached.send_replace(true);
        let _ = self.open.subscribe().wait_for(|open| *open).await;
    }
}

/// What the narrow door does with connections that have sent their first byte.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd)]
enum Door {
    /// Every one waits.
    Shut,
    /// Those that come now go on; those that wait go on waiting.
    Passable,
    /// All go on.
    Open,
}

pub struct Downstream {
    pub address: SocketAddr,
    /// Another way in, with little room, which stops reading after the first byte.
    pub narrow: SocketAddr,
    world: Arc<World>,
    _end: DropGuard,
}

struct World {
    facts: Mutex<Facts>,
    gates: Mutex<HashMap<String, Gate>>,
    door: watch::Sender<Door>,
    stalled: watch::Sender<usize>,
}

#[derive(Default)]
struct Facts {
    /// What was made, by reference; more than one is a double effect.
    made: HashMap<String, Vec<Bytes>>,
    number: u64,
    /// What each key was answered, and when it came first; `None` while that is under way.
    keys: HashMap<String, (Instant, Option<Bytes>)>,
    /// Complete requests for an effect, by reference.
    asked: HashMap<String, usize>,
    /// Requests that ended before their last byte.
    cut: usize,
}

impl Downstream {
    pub async fn start() -> Self {
        let world = Arc::new(World {
            facts: Mutex::default(),
            gates: Mutex::default(),
            door: watch::Sender::new(Door::Shut),
            stalled: watch::Sender::new(0),
        });
        let end = CancellationToken::new();
        let [address, narrow] = [false, true].map(|is_narrow| {
            let socket = TcpSocket::new_v4().unwrap();
            if is_narrow {
                socket.set_recv_buffer_size(4 << 10).unwrap();
            }
            socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
            let listener = socket.listen(256).unwrap();
            let address = listener.local_addr().unwrap();
            let accepting = accept(listener, world.clone(), is_narrow, end.clone());
            tokio::spawn(end.clone().run_until_cancelled_owned(accepting));
            address
        });
        Self {
            address,
            narrow,
            world,
            _end: end.drop_guard(),
        }
    }

    /// Has the first request with this reference stand still there.
    pub fn hold(&self, reference: &str, at: Point) -> Gate {
        let gate = Gate {
            at,
            reached: watch::Sender::new(false),
            open: watch::Sender::new(false),
        };
        self.world
            .gates
            .lock()
            .unwrap()
            .insert(reference.to_owned(), gate.clone());
        gate
    }

    /// Returns when so many connections stand in the narrow door.
    pub async fn stalled(&self, count: usize) {
        let _ = self.world.stalled.subscribe().wait_for(|now| *now >= count).await;
    }

    /// From now on the narrow door lets through what comes; what stands in it stays.
    pub fn make_passable(&self) {
        self.world.door.send_replace(Door::Passable);
    }

    /// Reads on where the narrow door was shut.
    pub fn open(&self) {
        self.world.door.send_replace(Door::Open);
    }

    /// What it has made under this reference.
    pub fn made(&self, reference: &str) -> Vec<Bytes> {
        self.world
            .facts
            .lock()
            .unwrap()
            .made
            .get(reference)
            .cloned()
            .unwrap_or_default()
    }

    /// Complete requests for an effect with this reference.
    pub fn asked(&self, reference: &str) -> usize {
        let facts = self.world.facts.lock().unwrap();
        facts.asked.get(reference).copied().unwrap_or_default()
    }

    /// Requests that ended before their last byte.
    pub fn cut(&self) -> usize {
        self.world.facts.lock().unwrap().cut
    }
}

async fn accept(listener: TcpListener, world: Arc<World>, is_narrow: bool, end: CancellationToken) {
    loop {
        let (stream, _) = listener.accept().await.unwrap();
        stream.set_nodelay(true).unwrap();
        let (world, end) = (world.clone(), end.clone());
        tokio::spawn(end.run_until_cancelled_owned(async move {
            let mut line = Line {
                stream,
                unread: BytesMut::new(),
            };
            while let Some(request) = world.next(&mut line, is_narrow).await {
                // A peer that is gone hears nothing.
                if world.answer(&request, &mut line.stream).await.is_err() {
                    return;
                }
            }
        }));
    }
}

struct Line {
    stream: TcpStream,
    unread: BytesMut,
}

struct Request {
    method: String,
    target: String,
    key: Option<String>,
    reference: String,
}

struct Answer {
    status: &'static str,
    body: Bytes,
}

impl World {
    /// The next complete request; `None` at the end of the connection.
    async fn next(&self, line: &mut Line, is_narrow: bool) -> Option<Request> {
        if is_narrow {
            while line.unread.is_empty() {
                line.more(1).await?;
            }
            self.stand_in_the_door().await;
        }
        let end = loop {
            if let Some(end) = line.unread.windows(4).position(|four| four == b"\r\n\r\n") {
                break end + 4;
            }
            if line.more(64 << 10).await.is_none() {
                self.facts.lock().unwrap().cut += usize::from(!line.unread.is_empty());
                return None;
            }
        };
        let head = String::from_utf8(line.unread.split_to(end).to_vec()).unwrap();
        let header = |wanted: &str| {
            head.lines().skip(1).find_map(|text| {
                let (name, value) = text.split_once(": ")?;
                name.eq_ignore_ascii_case(wanted).then(|| value.to_owned())
            })
        };
        let length: usize = header("content-length").map_or(0, |length| length.parse().unwrap());
        while line.unread.len() < length {
            if line.more(64 << 10).await.is_none() {
                self.facts.lock().unwrap().cut += 1;
                return None;
            }
        }
        let body: serde_json::Value = serde_json::from_slice(&line.unread.split_to(length)).unwrap_or_default();
        let mut words = head.split(' ').map(str::to_owned);
        Some(Request {
            method: words.next()?,
            target: words.next()?,
            key: header("idempotency-key"),
            reference: body["ref"].as_str().unwrap_or_default().to_owned(),
        })
    }

    async fn stand_in_the_door(&self) {
        if *self.door.borrow() == Door::Shut {
            self.stalled.send_modify(|count| *count += 1);
            let _ = self.door.subscribe().wait_for(|door| *door == Door::Open).await;
        }
    }

    async fn answer(&self, request: &Request, stream: &mut TcpStream) -> std::io::Result<()> {
        let answer = match request.method.as_str() {
            "GET" => self.look(&request.target),
            _ => self.perform(request).await,
        };
        let head = format!(
            "HTTP/1.1 {}\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
            answer.status,
            answer.body.len()
        );
        stream.write_all(head.as_bytes()).await?;
        self.stand(request, Point::AfterTheHead).await;
        stream.write_all(&answer.body).await
    }

    async fn perform(&self, request: &Request) -> Answer {
        let (ability, reference) = (request.target.split('/').nth(1).unwrap_or_default(), &request.reference);
        *self.facts.lock().unwrap().asked.entry(reference.clone()).or_default() += 1;
        let made = |body| Answer {
            status: "201 Created",
            body,
        };
        let key = match ability {
            "key" | "forgetful" => request.key.clone(),
            _ => None,
        };
        if let Some(key) = &key {
            let memory = if ability == "key" { Duration::MAX } else { SHORT_MEMORY };
            match self.facts.lock().unwrap().remember(key, memory) {
                Memory::New => {}
                Memory::UnderWay => return conflict(),
                Memory::Answered(body) => return made(body),
            }
        }
        self.stand(request, Point::BeforeTheEffect).await;
        let body = {
            let mut facts = self.facts.lock().unwrap();
            if ability == "conditional" && facts.made.contains_key(reference) {
                return conflict();
            }
            let body = facts.make(reference);
            if let Some((_, answered)) = key.and_then(|key| facts.keys.get_mut(&key)) {
                *answered = Some(body.clone());
            }
            body
        };
        self.stand(request, Point::AfterTheEffect).await;
        made(body)
    }

    /// `/conditional/things/REF` shows the thing, `/lookup/things?ref=REF` a list of them. What it shows is not what it
    /// answered at first, and is about the same effect.
    fn look(&self, target: &str) -> Answer {
        let facts = self.facts.lock().unwrap();
        let found = |reference: &str| {
            let made = facts.made.get(reference)?.first()?;
            let mut shown: serde_json::Value = serde_json::from_slice(made).ok()?;
            shown["shown"] = true.into();
            Some(Bytes::from(shown.to_string()))
        };
        if let Some((_, reference)) = target.split_once("?ref=") {
            let things = found(reference).unwrap_or_default();
            let list = [&b"{\"data\":["[..], &things, b"]}"].concat();
            return Answer {
                status: "200 OK",
                body: list.into(),
            };
        }
        match found(target.rsplit('/').next().unwrap_or_default()) {
            Some(body) => Answer { status: "200 OK", body },
            None => Answer {
                status: "404 Not Found",
                body: Bytes::from_static(b"{}"),
            },
        }
    }

    async fn stand(&self, request: &Request, at: Point) {
        let gate = {
            let mut gates = self.gates.lock().unwrap();
            match gates.get(&request.reference) {
                Some(gate) if gate.at == at => gates.remove(&request.reference),
                Some(_) | None => None,
            }
        };
        if let Some(gate) = gate {
            gate.pass().await;
        }
    }
}

enum Memory {
    New,
    UnderWay,
    Answered(Bytes),
}

impl Facts {
    /// Looks a key up, and takes a note of it if it is new or forgotten.
    fn remember(&mut self, key: &str, memory: Duration) -> Memory {
        match self.keys.get(key) {
            Some((at, answered)) if at.elapsed() < memory => match answered {
                Some(body) => Memory::Answered(body.clone()),
                None => Memory::UnderWay,
            },
            Some(_) | None => {
                self.keys.insert(key.to_owned(), (Instant::now(), None));
                Memory::New
            }
        }
    }

    /// The effect. Its number makes every effect another one.
    fn make(&mut self, reference: &str) -> Bytes {
        self.number += 1;
        let body = serde_json::json!({ "number": self.number, "ref": reference }).to_string();
        let body = Bytes::from(body);
        self.made.entry(reference.to_owned()).or_default().push(body.clone());
        body
    }
}

fn conflict() -> Answer {
    Answer {
        status: "409 Conflict",
        body: Bytes::from_static(b"{\"error\":\"conflict\"}"),
    }
}

impl Line {
    /// Reads up to `most` more bytes; `None` at the end, however it came.
    async fn more(&mut self, most: usize) -> Option<()> {
        let mut piece = vec![0; most];
        let count = self.stream.read(&mut piece).await.unwrap_or(0);
        self.unread.extend_from_slice(&piece[..count]);
        (count > 0).then_some(())
    }
}
