//! Answers that come in pieces: passed on as they come where that is wanted, and stored whole.

use std::net::SocketAddr;
use std::time::Duration;

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::Bench;
use crate::support::downstream::{Gate, Script};

const EVENTS: &str = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream; charset=utf-8\r\n";

/// A caller that reads as it comes.
struct Reader {
    stream: TcpStream,
    text: String,
}

impl Reader {
    async fn post(address: SocketAddr, api_key: &str, key: &str, path: &str) -> Self {
        let mut stream = TcpStream::connect(address).await.unwrap();
        let request = format!(
            "POST /v1/proxy/pay{path} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {api_key}\r\nIdempotency-Key: {key}\r\n\
             Connection: close\r\nContent-Length: 0\r\n\r\n"
        );
        stream.write_all(request.as_bytes()).await.unwrap();
        Self {
            stream,
            text: String::new(),
        }
    }

    /// Reads until this text has come.
    async fn sees(&mut self, text: &str) {
        while !self.text.contains(text) {
            assert!(self.more().await, "the answer ends without {text:?}: {:?}", self.text);
        }
    }

    /// Reads to the end; all that has come.
    async fn rest(mut self) -> String {
        while self.more().await {}
        self.text
    }

    async fn more(&mut self) -> bool {
        let mut bytes = [0; 4096];
        let read = tokio::time::timeout(Duration::from_secs(10), self.stream.read(&mut bytes)).await;
        let count = read.expect("more comes in time").unwrap_or(0);
        self.text.push_str(std::str::from_utf8(&bytes[..count]).unwrap());
        count > 0
    }
}

async fn reader(bench: &Bench, key: &str, path: &str) -> Reader {
    let agent = bench.agent();
    Reader::post(agent.address, &agent.key, key, path).await
}

/// The last chunk: whoever has it knows that nothing is missing.
const END: &str = "\r\n0\r\n\r\n";

#[tokio::test]
async fn pieces_without_a_length_are_stored_whole() {
    let bench = Bench::start().await;
    let pause = Duration::from_millis(200);
    bench.pay.answers(move |_| {
        Script::new()
            .then("HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\none\r\n")
            .pause(pause)
            .then("3\r\ntwo\r\n")
            .pause(pause)
            .then("5\r\nthree\r\n0\r\n\r\n")
    });
    let first = bench.post("k", "/x", "{}").await.succeeded();
    assert_eq!(first.body, "onetwothree");
    bench.is_replayed(&first, "k", "/x", "{}").await;
}

#[tokio::test]
async fn events_are_passed_on_as_they_come_and_replayed_as_they_came() {
    let bench = Bench::with("[[routes]]\npath = \"/stream\"\nstream = true").await;
    for (key, path, head) in [
        ("events", "/x", EVENTS),
        (
            "declared",
            "/stream",
            "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n",
        ),
    ] {
        let gate = Gate::new();
        let (held, head) = (gate.clone(), head.to_owned());
        bench.pay.answers(move |_| {
            Script::new()
                .then(format!("{head}Transfer-Encoding: chunked\r\n\r\n9\r\ndata: 1\n\n\r\n"))
                .gate(&held)
                .then("9\r\ndata: 2\n\n\r\n0\r\n\r\n")
        });
        let mut reader = reader(&bench, key, path).await;
        // Before the last has been sent.
        reader.sees("data: 1\n\n").await;
        assert!(!reader.text.contains("data: 2"));
        assert_eq!(bench.state(key).await, "running");
        bench.post(key, path, "").await;
        gate.open();
        let whole = reader.rest().await;
        assert!(whole.contains("data: 2\n\n") && whole.ends_with(END), "{whole:?}");
        assert!(
            whole.to_ascii_lowercase().contains(&format!("operation-id: {key}")),
            "{whole}"
        );
        // An end that was seen is a receipt that is stored.
        let again = bench
            .agent()
            .send("POST", &format!("/v1/proxy/pay{path}"), &[("idempotency-key", key)], "")
            .await;
        assert!(again.is_replay());
        assert_eq!(again.body, "data: 1\n\ndata: 2\n\n");
    }
    assert_eq!(bench.pay.count(), 2);
}

#[tokio::test]
async fn a_stream_that_is_cut_off_is_unknown_and_never_replayed() {
    let bench = Bench::start().await;
    for (key, end) in [("eof", Script::new().close()), ("reset", Script::new().reset())] {
        bench.pay.answers(move |_| {
            Script::new()
                .then(format!(
                    "{EVENTS}Transfer-Encoding: chunked\r\n\r\n9\r\ndata: 1\n\n\r\n"
                ))
                .pause(Duration::from_millis(50))
                .before(end.clone())
        });
        let whole = reader(&bench, key, &format!("/{key}")).await.rest().await;
        assert!(whole.contains("data: 1") && !whole.ends_with(END), "{whole:?}");
        bench.until(key, "needs_reconciliation").await;
        let target = format!("/v1/proxy/pay/{key}");
        let again = bench
            .agent()
            .send("POST", &target, &[("idempotency-key", key)], "")
            .await;
        again.is(409, "outcome-unknown");
        assert_eq!(bench.pay.sends(&format!("/{key}")), 1);
    }
}

/// How often a delivery has come to this, by the service's own count.
async fn delivered(bench: &Bench, outcome: &str) -> u64 {
    let metrics = bench.agent().get("/metrics").await;
    let text = String::from_utf8(metrics.body.to_vec()).unwrap();
    let name = format!("opledger_deliveries_total{{outcome=\"{outcome}\"}} ");
    let line = text.lines().find_map(|line| line.strip_prefix(&name));
    line.map_or(0, |count| count.parse().unwrap())
}

#[tokio::test]
async fn a_delivery_that_is_streamed_is_counted_once_by_how_it_ends() {
    let bench = Bench::with("max_stored_body = 100").await;
    let event = |end: Script| {
        let head = format!("{EVENTS}Transfer-Encoding: chunked\r\n\r\n9\r\ndata: 1\n\n\r\n");
        Script::new().then(head).pause(Duration::from_millis(20)).before(end)
    };
    let counts = async || {
        let mut counts = Vec::new();
        for outcome in ["effect", "refused", "unknown", "replay", "not_stored"] {
            counts.push(delivered(&bench, outcome).await);
        }
        counts
    };
    bench.pay.plan(event(Script::new().then("0\r\n\r\n")));
    reader(&bench, "whole", "/x").await.rest().await;
    assert_eq!(counts().await, [1, 0, 0, 0, 0]);
    bench.pay.plan(event(Script::new().close()));
    reader(&bench, "cut", "/x").await.rest().await;
    bench.until("cut", "needs_reconciliation").await;
    crate::support::until("it is counted", async || counts().await == [1, 0, 1, 0, 0]).await;
    // Too large to store, and passed on for that.
    bench.pay.plan(Script::answer(200, "x".repeat(200)));
    assert_eq!(bench.post("large", "/x", "{}").await.succeeded().body.len(), 200);
    bench.pay.plan(Script::answer(402, "x".repeat(200)));
    assert_eq!(bench.post("refused", "/x", "{}").await.status, 402);
    assert_eq!(counts().await, [2, 1, 1, 0, 0]);
    // Later deliveries are what they were.
    reader(&bench, "whole", "/x").await.rest().await;
    bench.post("large", "/x", "{}").await.is(410, "response-not-stored");
    assert_eq!(counts().await, [2, 1, 1, 1, 1]);
}

#[tokio::test]
async fn a_reader_that_leaves_a_stream_does_not_stop_it() {
    let bench = Bench::start().await;
    let gate = Gate::new();
    let held = gate.clone();
    bench.pay.answers(move |_| {
        Script::new()
            .then(format!(
                "{EVENTS}Transfer-Encoding: chunked\r\n\r\n9\r\ndata: 1\n\n\r\n"
            ))
            .gate(&held)
            .then("9\r\ndata: 2\n\n\r\n0\r\n\r\n")
    });
    let mut reader = reader(&bench, "k", "/x").await;
    reader.sees("data: 1").await;
    drop(reader);
    gate.open();
    bench.until("k", "succeeded").await;
    let again = bench
        .agent()
        .send("POST", "/v1/proxy/pay/x", &[("idempotency-key", "k")], "")
        .await;
    assert_eq!(again.body, "data: 1\n\ndata: 2\n\n");
    assert_eq!(bench.pay.count(), 1);
}

#[tokio::test]
async fn a_stream_without_events_is_no_empty_answer() {
    let bench = Bench::start().await;
    bench.pay.answers(|_| {
        Script::new()
            .then(format!("{EVENTS}\r\ndata: 1\n\n"))
            .pause(Duration::from_millis(50))
            .then("data: 2\n\n")
            .close()
    });
    let whole = reader(&bench, "k", "/x").await.rest().await;
    assert!(whole.contains("data: 2\n\n"), "{whole}");
    let again = bench
        .agent()
        .send("POST", "/v1/proxy/pay/x", &[("idempotency-key", "k")], "")
        .await;
    assert_eq!(again.body, "data: 1\n\ndata: 2\n\n");
}

#[tokio::test]
async fn a_get_that_streams_is_passed_on_and_one_that_breaks_off_is_seen_to() {
    let bench = Bench::start().await;
    let gate = Gate::new();
    let held = gate.clone();
    bench.pay.answers(move |_| {
        Script::new()
            .then(format!(
                "{EVENTS}Transfer-Encoding: chunked\r\n\r\n9\r\ndata: 1\n\n\r\n"
            ))
            .gate(&held)
            .close()
    });
    let agent = bench.agent();
    let mut stream = TcpStream::connect(agent.address).await.unwrap();
    let request = format!(
        "GET /v1/proxy/pay/x HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {}\r\n\r\n",
        agent.key
    );
    stream.write_all(request.as_bytes()).await.unwrap();
    let mut reader = Reader {
        stream,
        text: String::new(),
    };
    reader.sees("data: 1").await;
    gate.open();
    let whole = reader.rest().await;
    assert!(!whole.ends_with(END), "{whole:?}");
}
