//! Large requests: in a file while they come in and while they wait, whole or not at all.

use std::path::Path;

use bytes::Bytes;
use sha2::{Digest, Sha256};

use super::{Bench, lost_at_first};
use crate::support::downstream::{Downstream, Gate, Script};
use crate::support::process::{self, Process};
use crate::support::wire::Wire;
use crate::support::{Client, Database, TENANT, until, write_config};

const MIB: usize = 1 << 20;

/// The program, so that its memory and files are its own, behind a database and before the downstream `pay`.
struct Stand {
    process: Process,
    agent: Client,
    database: Database,
    pay: Downstream,
    _config: tempfile::TempDir,
}

impl Stand {
    /// With this directory for large bodies.
    async fn start(directory: &Path) -> Self {
        let (pay, database) = (Downstream::start().await, Database::create().await);
        let keys = database.keys(TENANT).await;
        let (config, path) = write_config(&config(directory, &pay));
        let process = Process::serve(&path, &database.service_url);
        Self {
            agent: Client::new(process.address, &keys["agent"]),
            process,
            database,
            pay,
            _config: config,
        }
    }

    /// The head of a request with a body of this many bytes.
    fn head(&self, key: &str, bytes: usize) -> String {
        format!(
            "POST /v1/proxy/pay/{key} HTTP/1.1\r\nhost: ledger\r\nauthorization: Bearer {}\r\n\
             idempotency-key: {key}\r\ncontent-length: {bytes}\r\n\r\n",
            self.agent.key
        )
    }

    /// Memory that is the process's own, in bytes.
    fn memory(&self) -> usize {
        let status = std::fs::read_to_string(self.process.proc("status")).unwrap();
        let line = status.lines().find_map(|line| line.strip_prefix("RssAnon:")).unwrap();
        line.trim().trim_end_matches(" kB").parse::<usize>().unwrap() << 10
    }

    /// Nameless files that the process has open.
    fn files(&self) -> usize {
        std::fs::read_dir(self.process.proc("fd"))
            .unwrap()
            .filter_map(|file| std::fs::read_link(file.ok()?.path()).ok())
            .filter(|name| name.to_string_lossy().ends_with(" (deleted)"))
            .count()
    }

    /// Waits until the kernel holds nothing any more that was sent to the process and not read.
    async fn has_read_everything(&self) {
        let port = format!(":{:04X}", self.process.address.port());
        until("everything that was sent is read", async || {
            let sockets = std::fs::read_to_string("/proc/net/tcp").unwrap();
            sockets
                .lines()
                .filter(|line| line.contains(&port))
                .all(|line| line.contains(" 00000000:00000000 "))
        })
        .await;
    }
}

fn config(directory: &Path, pay: &Downstream) -> String {
    let downstream = pay.config("pay", &format!("max_request_bytes = {}", 64 * MIB));
    format!("[limits]\nspool_dir = \"{}\"\n{downstream}", directory.display())
}

/// No two of them are alike, and nothing in them repeats soon.
fn body(bytes: usize, number: usize) -> Vec<u8> {
    let mut body = vec![0; bytes];
    let mut state = number as u64 + 1;
    for piece in body.chunks_mut(8) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        piece.copy_from_slice(&state.to_le_bytes()[..piece.len()]);
    }
    body
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_body_of_many_megabytes_arrives_is_stored_and_is_sent_again_byte_for_byte() {
    let bench = Bench::with(
        "max_request_bytes = 67108864\n[[routes]]\npath = \"/**\"\nidempotency = \"key\"\nkey_retention = \"24h\"\n\
         retry = { first_delay = \"50ms\" }\n",
    )
    .await;
    bench.pay.answers(lost_at_first(|_| Script::answer(201, "{}")));
    let body = Bytes::from(body(24 * MIB, 0));
    let lines = [
        ("idempotency-key", "large"),
        ("content-type", "application/octet-stream"),
    ];
    let send = async |body: &Bytes| {
        let target = "/v1/proxy/pay/files";
        bench
            .agent()
            .try_send("POST", target, &lines, body.clone())
            .await
            .unwrap()
    };
    let first = send(&body).await;
    assert_eq!((first.status, first.is_replay()), (201, false), "{first:?}");
    let sent = bench.pay.requests();
    assert_eq!(sent.len(), 2, "the first one was lost");
    for request in &sent {
        assert!(request.body == body);
        assert_eq!(request.header("idempotency-key"), sent[0].header("idempotency-key"));
    }
    let stored: (i32, String) = sqlx::query_as(
        "select length(body), encode(sha256(body), 'hex') from ledger.requests where operation_id = 'large'",
    )
    .fetch_one(&bench.ledger.sql)
    .await
    .unwrap();
    let digest: String = Sha256::digest(&body).iter().map(|byte| format!("{byte:02x}")).collect();
    assert_eq!(stored, (i32::try_from(body.len()).unwrap(), digest));
    assert!(send(&body).await.is_replay());
    let mut other = body.to_vec();
    other[23 * MIB] ^= 1;
    send(&other.into()).await.is(422, "fingerprint-mismatch");
    assert_eq!(bench.pay.count(), 2);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn large_bodies_under_way_take_files_and_not_memory() {
    const BODIES: usize = 24;
    const BYTES: usize = 4 * MIB;
    let directory = tempfile::tempdir().unwrap();
    let stand = Stand::start(directory.path()).await;
    let gate = Gate::new();
    let held = gate.clone();
    stand
        .pay
        .answers(move |_| Script::new().gate(&held).before(Script::answer(200, "{}")));
    let before = stand.memory();
    let mut wires = Vec::new();
    for number in 0..BODIES {
        let mut wire = Wire::sent(stand.agent.address, stand.head(&format!("k{number}"), BYTES)).await;
        wire.send(&body(BYTES, number)[..BYTES / 2]).await;
        wires.push(wire);
    }
    stand.has_read_everything().await;
    let half = stand.memory().saturating_sub(before);
    assert!(half < BODIES * BYTES / 2 / 4, "{} MiB", half / MIB);
    for (number, wire) in wires.iter_mut().enumerate() {
        wire.send(&body(BYTES, number)[BYTES / 2..]).await;
    }
    stand.pay.received(BODIES).await;
    let whole = stand.memory().saturating_sub(before);
    assert!(whole < BODIES * BYTES / 2, "{} MiB", whole / MIB);
    gate.open();
    for (number, wire) in wires.iter_mut().enumerate() {
        let answer = wire.answer_to("POST", &format!("/v1/proxy/pay/k{number}")).await;
        answer.expect("an answer").succeeded();
    }
    for request in stand.pay.requests() {
        let number = request.target.rsplit_once('k').unwrap().1.parse().unwrap();
        assert!(request.body == body(BYTES, number), "{}", request.target);
    }
    until("every file is gone", async || stand.files() == 0).await;
}

#[tokio::test]
async fn a_body_that_breaks_off_leaves_neither_file_nor_row() {
    let directory = tempfile::tempdir().unwrap();
    let stand = Stand::start(directory.path()).await;
    let mut wire = Wire::sent(stand.agent.address, stand.head("half", MIB)).await;
    wire.send(&body(MIB, 0)[..MIB / 2]).await;
    until("the file is there", async || stand.files() == 1).await;
    assert_eq!(std::fs::read_dir(&directory).unwrap().count(), 0, "a file has a name");
    drop(wire);
    until("the file is gone", async || stand.files() == 0).await;
    stand.agent.get("/v1/operations/half").await.is(404, "not-found");
    let rows: i64 = sqlx::query_scalar("select count(*) from ledger.requests")
        .fetch_one(&stand.database.sql)
        .await
        .unwrap();
    assert_eq!((rows, stand.pay.connections()), (0, 0));
}

#[tokio::test]
async fn without_room_for_it_a_large_body_is_refused_and_a_small_one_is_not() {
    let directory = tempfile::tempdir().unwrap();
    let missing = directory.path().join("missing");
    std::fs::create_dir(&missing).unwrap();
    let stand = Stand::start(&missing).await;
    std::fs::remove_dir(&missing).unwrap();
    let large = body(MIB, 0);
    let mut wire = Wire::sent(stand.agent.address, stand.head("k", MIB)).await;
    wire.send(&large).await;
    let answer = wire.answer_to("POST", "/v1/proxy/pay/k").await.expect("an answer");
    answer.clone().is(503, "ledger-unavailable");
    assert_eq!(answer.header("connection"), "close");
    assert_ne!(answer.header("retry-after"), "");
    assert_eq!(answer.json()["retryable"], true);
    stand.process.has_logged(missing.to_str().unwrap()).await;
    stand.agent.get("/v1/operations/k").await.is(404, "not-found");
    assert_eq!(stand.pay.connections(), 0);
    // It gets its room, and the same request goes through.
    std::fs::create_dir(&missing).unwrap();
    let mut wire = Wire::sent(stand.agent.address, stand.head("k", MIB)).await;
    wire.send(&large).await;
    let answer = wire.answer_to("POST", "/v1/proxy/pay/k").await.expect("an answer");
    answer.succeeded();
    assert!(stand.pay.requests()[0].body == large);
}

#[tokio::test]
async fn a_directory_that_cannot_be_written_is_found_before_anything_is_served() {
    let (pay, database) = (Downstream::start().await, Database::create().await);
    let directory = tempfile::tempdir().unwrap();
    let missing = directory.path().join("missing");
    let (_config, path) = write_config(&config(&missing, &pay));
    let path = path.to_str().unwrap();
    for command in ["serve", "check"] {
        let refused = process::finished(&[command, "--config", path], &database.service_url).await;
        assert_ne!(refused.code, Some(0), "{refused:?}");
        assert!(refused.stderr.contains(missing.to_str().unwrap()), "{refused:?}");
    }
    std::fs::create_dir(&missing).unwrap();
    let found = process::finished(&["check", "--config", path], &database.service_url).await;
    assert_eq!(found.code, Some(0), "{found:?}");
    // Without a downstream nothing is ever kept there.
    let (_config, path) = write_config("[limits]\nspool_dir = \"/nowhere\"\n");
    let path = path.to_str().unwrap();
    let found = process::finished(&["check", "--config", path], &database.service_url).await;
    assert_eq!(found.code, Some(0), "{found:?}");
}
