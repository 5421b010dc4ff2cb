//! The sandbox keeps what it promises: what it counts is what other tests and people believe.

use std::process::Stdio;
use std::time::{Duration, Instant};

use opledger::sandbox::{self, Settings};
use serde_json::Value;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use crate::support::until;

struct Sandbox(sandbox::Running);

/// What came back on the wire before the connection ended, and whether it ended well.
struct Wire {
    text: String,
    reset: bool,
}

impl Wire {
    fn status(&self) -> u16 {
        self.text.get(9..12).and_then(|status| status.parse().ok()).unwrap_or(0)
    }

    fn body(&self) -> &str {
        self.text.split_once("\r\n\r\n").map_or("", |(_, body)| body)
    }
}

impl Sandbox {
    async fn start() -> Self {
        Self(sandbox::start(Settings::default()).await.unwrap())
    }

    async fn send(&self, method: &str, target: &str, lines: &str, body: &str) -> Wire {
        let mut stream = TcpStream::connect(self.0.address).await.unwrap();
        let request = format!(
            "{method} {target} HTTP/1.1\r\nHost: sandbox\r\nConnection: close\r\n{lines}Content-Length: {}\r\n\r\n{body}",
            body.len()
        );
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut received = Vec::new();
        let read = tokio::time::timeout(Duration::from_secs(10), stream.read_to_end(&mut received));
        let reset = read.await.expect("an end").is_err();
        Wire {
            text: String::from_utf8_lossy(&received).into_owned(),
            reset,
        }
    }

    async fn charge(&self, ability: &str, reference: &str, lines: &str) -> Wire {
        let body = format!(r#"{{"amount":500,"ref":"{reference}"}}"#);
        self.send("POST", &format!("/{ability}/charges"), lines, &body).await
    }

    /// Lets requests of this reference go on; how many were held.
    async fn release(&self, reference: &str) -> u64 {
        let answer = self.send("POST", &format!("/_release?ref={reference}"), "", "").await;
        let document: Value = serde_json::from_str(answer.body()).unwrap();
        document["released"].as_u64().unwrap()
    }

    async fn count(&self, what: &str, reference: &str) -> u64 {
        let answer = self.send("GET", &format!("/{what}?ref={reference}"), "", "").await;
        let document: Value = serde_json::from_str(answer.body()).unwrap();
        document["count"].as_u64().unwrap()
    }
}

#[tokio::test]
async fn each_prefix_does_what_it_says_about_a_request_that_comes_twice() {
    let sandbox = Sandbox::start().await;
    let key = "Idempotency-Key: \"k\"\r\n";
    let first = sandbox.charge("key", "a", key).await;
    let again = sandbox.charge("key", "a", "Idempotency-Key: k\r\n").await;
    assert_eq!((first.status(), first.body()), (201, again.body()));
    assert!(again.text.contains("idempotent-replayed: true"));
    assert_eq!(sandbox.charge("key", "b", key).await.status(), 422);
    let first = sandbox.charge("conditional", "c", "").await;
    let again = sandbox.charge("conditional", "c", "").await;
    assert_eq!((first.status(), again.status()), (201, 409));
    let put = async |condition: &str| {
        let target = "/conditional/bookings/r1";
        sandbox
            .send("PUT", target, condition, r#"{"room":"blue"}"#)
            .await
            .status()
    };
    assert_eq!(put("If-None-Match: *\r\n").await, 201);
    assert_eq!(put("If-None-Match: *\r\n").await, 412);
    assert_eq!(put("If-Match: \"1\"\r\n").await, 200);
    assert_eq!(put("If-Match: \"1\"\r\n").await, 412);
    for ability in ["lookup", "none"] {
        for _ in 0..2 {
            assert_eq!(sandbox.charge(ability, ability, "").await.status(), 201);
        }
        assert_eq!(sandbox.count("_effects", ability).await, 2);
    }
    let found = sandbox.send("GET", "/lookup/charges?ref=lookup", "", "").await;
    assert_eq!(found.body().matches("\"ch_").count(), 2);
    for (reference, effects) in [("a", 1), ("b", 0), ("c", 1), ("r1", 2)] {
        assert_eq!(sandbox.count("_effects", reference).await, effects, "{reference}");
    }
    assert_eq!(sandbox.count("_requests", "c").await, 2);
}

#[tokio::test]
async fn each_fault_breaks_what_it_names_and_counts_what_was_done() {
    let sandbox = Sandbox::start().await;
    // Fault, effects, whether a head comes, whether it ends in a reset.
    let faults = [
        ("drop-before", 0, false, false),
        ("drop-after", 1, false, false),
        ("reset-before", 0, false, true),
        ("reset-after", 1, false, true),
        ("reset-head", 1, false, true),
        ("reset-body", 1, true, true),
        ("truncate", 1, true, false),
        ("truncate-chunked", 1, true, false),
        ("cut-stream=1", 1, true, false),
    ];
    for (fault, effects, head, reset) in faults {
        let reference = fault.replace('=', "-");
        let wire = sandbox
            .charge("none", &reference, &format!("Sandbox-Fault: {fault}\r\n"))
            .await;
        // A reset may take back what was sent before it.
        assert!(
            wire.text.contains("\r\n\r\n") == head || reset,
            "{fault}: {}",
            wire.text
        );
        assert_eq!(wire.reset, reset, "{fault}");
        assert!(
            !wire.body().ends_with('}') && !wire.text.ends_with("0\r\n\r\n"),
            "{fault}: {}",
            wire.text
        );
        assert_eq!(sandbox.count("_effects", &reference).await, effects, "{fault}");
        assert_eq!(sandbox.count("_requests", &reference).await, 1, "{fault}");
    }
}

#[tokio::test]
async fn what_is_odd_is_whole() {
    let sandbox = Sandbox::start().await;
    let fault = async |fault: &str| {
        sandbox
            .charge("none", "odd", &format!("Sandbox-Fault: {fault}\r\n"))
            .await
    };
    let refused = fault("status=503; retry-after=7").await;
    assert_eq!(refused.status(), 503);
    assert!(refused.text.contains("retry-after: 7"));
    assert_eq!(sandbox.count("_effects", "odd").await, 0);
    assert_eq!(fault("status-after=500").await.status(), 500);
    assert_eq!(sandbox.count("_effects", "odd").await, 1);
    assert!(fault("stream=2").await.body().contains("data: [DONE]"));
    assert!(fault("slow-body=3x10ms").await.text.ends_with("0\r\n\r\n"));
    assert!(fault("large=50000").await.body().len() > 49_000);
    assert!(fault("odd-json").await.body().contains("1.10"));
    let odd = fault("odd-headers").await.text.to_ascii_lowercase();
    assert_eq!(odd.matches("\r\nlink: ").count(), 2);
    assert!(odd.contains("set-cookie: session=secret"));
    assert!(fault("gzip").await.text.contains("content-encoding: gzip"));
    let unknown = fault("drop-aftr").await;
    assert_eq!(unknown.status(), 400);
    assert!(unknown.body().contains("drop-after"), "the known ones are listed");
    let first = sandbox
        .charge("none", "t", "Sandbox-Fault: drop-after, times=1\r\n")
        .await;
    let second = sandbox
        .charge("none", "t", "Sandbox-Fault: drop-after, times=1\r\n")
        .await;
    assert_eq!((first.status(), second.status()), (0, 201));
}

#[tokio::test]
async fn what_waits_waits_before_or_after_the_effect_and_what_is_held_until_it_is_released() {
    const PAUSE: Duration = Duration::from_millis(700);
    let sandbox = Sandbox::start().await;
    for (fault, effects_meanwhile) in [("delay=700ms", 0), ("delay-after=700ms", 1), ("hold", 0)] {
        let reference = fault.split('=').next().unwrap();
        let began = Instant::now();
        let lines = format!("Sandbox-Fault: {fault}\r\n");
        let charge = sandbox.charge("none", reference, &lines);
        let watch = async {
            until("it is received", async || {
                sandbox.count("_requests", reference).await == 1
            })
            .await;
            until("it waits", async || {
                sandbox.count("_effects", reference).await == effects_meanwhile
            })
            .await;
            if fault == "hold" {
                // For as long as nobody releases it; and another reference's release is none.
                assert_eq!(sandbox.release("other").await, 0);
                tokio::time::sleep(PAUSE).await;
                assert_eq!(sandbox.count("_effects", reference).await, 0);
                assert_eq!(sandbox.release(reference).await, 1);
            } else {
                assert!(began.elapsed() < PAUSE, "too slow to see it wait");
            }
        };
        let (charged, ()) = tokio::join!(charge, watch);
        assert_eq!(charged.status(), 201, "{fault}");
        assert!(began.elapsed() >= PAUSE, "{fault}: {:?}", began.elapsed());
        assert_eq!(sandbox.count("_effects", reference).await, 1, "{fault}");
    }
    assert_eq!(sandbox.release("hold").await, 0, "it is released once");
}

#[tokio::test]
async fn a_forgotten_key_acts_again_and_is_remembered_from_then_on() {
    let sandbox = Sandbox::start().await;
    let charge = async |fault: &str| {
        let lines = format!("Idempotency-Key: k\r\n{fault}");
        sandbox.charge("key", "a", &lines).await
    };
    let first = charge("").await;
    let forgotten = charge("Sandbox-Fault: forget-key\r\n").await;
    assert_eq!((first.status(), forgotten.status()), (201, 201));
    assert_ne!(first.body(), forgotten.body());
    assert!(!forgotten.text.contains("idempotent-replayed"));
    assert_eq!(charge("").await.body(), forgotten.body());
    assert_eq!(sandbox.count("_effects", "a").await, 2);
}

#[tokio::test]
async fn an_idle_connection_is_closed_after_its_answer_where_that_is_asked_for() {
    let sandbox = Sandbox::start().await;
    for (fault, closed) in [("close-idle", true), ("odd-json", false)] {
        let mut stream = TcpStream::connect(sandbox.0.address).await.unwrap();
        let body = format!(r#"{{"amount":500,"ref":"{fault}"}}"#);
        let request = format!(
            "POST /none/charges HTTP/1.1\r\nHost: sandbox\r\nSandbox-Fault: {fault}\r\nContent-Length: {}\r\n\r\n{body}",
            body.len()
        );
        stream.write_all(request.as_bytes()).await.unwrap();
        let mut received = Vec::new();
        // Nothing in the answer announces it: a client would use the connection again.
        let limit = Duration::from_millis(if closed { 10_000 } else { 500 });
        let read = tokio::time::timeout(limit, stream.read_to_end(&mut received)).await;
        let text = String::from_utf8_lossy(&received).to_ascii_lowercase();
        assert!(
            text.starts_with("http/1.1 201") && text.ends_with('}'),
            "{fault}: {text}"
        );
        assert!(!text.contains("connection: close"), "{text}");
        assert_eq!(read.is_ok_and(|read| read.is_ok()), closed, "{fault}");
        assert_eq!(sandbox.count("_effects", fault).await, 1);
    }
}

#[tokio::test]
async fn the_command_says_where_it_listens_and_stops_when_it_is_told_to() {
    let mut process = tokio::process::Command::new(env!("CARGO_BIN_EXE_opledger"))
        .args(["sandbox", "--listen", "127.0.0.1:0", "--json"])
        .stdout(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut line = String::new();
    let mut output = tokio::io::BufReader::new(process.stdout.take().unwrap());
    tokio::io::AsyncBufReadExt::read_line(&mut output, &mut line)
        .await
        .unwrap();
    let ready: Value = serde_json::from_str(&line).unwrap();
    let address = ready["url"].as_str().unwrap().trim_start_matches("http://").to_owned();
    assert!(TcpStream::connect(&address).await.is_ok());
    let pid = nix::unistd::Pid::from_raw(ready["pid"].as_i64().unwrap().try_into().unwrap());
    nix::sys::signal::kill(pid, nix::sys::signal::Signal::SIGTERM).unwrap();
    assert!(process.wait().await.unwrap().success());
}
