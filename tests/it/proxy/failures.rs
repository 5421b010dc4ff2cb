//! Downstreams that are not there, and downstreams that fail after they may have acted: the first is known to have done
//! nothing, the second stays unknown, and neither is ever guessed at.

use std::time::Duration;

use tokio::net::{TcpListener, TcpSocket, TcpStream};
use tokio::task::JoinSet;

use super::{Bench, events};
use crate::support::downstream::{Downstream, Script};
use crate::support::random::Random;
use crate::support::{Ledger, Setup};

#[tokio::test]
async fn what_was_not_reached_stores_nothing_and_the_key_runs_later() {
    // Accepts connections and says nothing.
    let silent = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let full = full_queue().await;
    let free = free_address().await;
    let addresses = [
        ("dns", "http://nowhere.invalid".to_owned()),
        ("refused", format!("http://{free}")),
        ("connect", format!("http://{}", full.address)),
        ("tls", format!("https://{}", silent.local_addr().unwrap())),
    ];
    let mut config: String = addresses
        .iter()
        .map(|(name, url)| format!("[downstreams.{name}]\nurl = \"{url}\"\nconnect_timeout = \"400ms\"\n"))
        .collect();
    let pay = Downstream::start().await;
    // Speaks, but no TLS.
    config += &format!(
        "[downstreams.plain]\nurl = \"https://{}\"\nconnect_timeout = \"400ms\"\n",
        pay.address
    );
    config += &pay.config("pay", "");
    let ledger = Ledger::with(Setup {
        config,
        sql: String::new(),
    })
    .await;
    let agent = ledger.agent();
    for name in ["dns", "refused", "connect", "tls", "plain"] {
        let lines = [("idempotency-key", name)];
        for _ in 0..2 {
            let target = format!("/v1/proxy/{name}/x");
            let refused = agent
                .send("POST", &target, &lines, "")
                .await
                .is(502, "downstream-unreachable");
            assert!(refused.header("retry-after").parse::<u32>().unwrap() >= 1);
            assert_eq!(refused.json()["retryable"], true);
            agent
                .send("GET", &target, &[], "")
                .await
                .is(502, "downstream-unreachable");
        }
        agent.get(&format!("/v1/operations/{name}")).await.is(404, "not-found");
        agent.send("POST", "/v1/proxy/pay/x", &lines, "").await.succeeded();
    }
    assert_eq!(pay.count(), 5);
}

/// A listener whose queue of new connections is full: the kernel answers no more.
struct FullQueue {
    address: std::net::SocketAddr,
    _listener: TcpListener,
    _waiting: Vec<TcpStream>,
}

async fn full_queue() -> FullQueue {
    let socket = TcpSocket::new_v4().unwrap();
    socket.bind("127.0.0.1:0".parse().unwrap()).unwrap();
    let listener = socket.listen(1).unwrap();
    let address = listener.local_addr().unwrap();
    let mut waiting = Vec::new();
    while let Ok(Ok(stream)) = tokio::time::timeout(Duration::from_millis(300), TcpStream::connect(address)).await {
        waiting.push(stream);
        assert!(waiting.len() < 64, "the queue is never full");
    }
    FullQueue {
        address,
        _listener: listener,
        _waiting: waiting,
    }
}

async fn free_address() -> std::net::SocketAddr {
    TcpListener::bind("127.0.0.1:0").await.unwrap().local_addr().unwrap()
}

/// However an answer fails to come or to be complete: it is unknown, told as such, and never sent again.
#[tokio::test]
async fn whatever_ends_an_attempt_without_a_complete_answer_leaves_it_unknown() {
    let head = "HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n";
    let ways: Vec<(&str, Script)> = vec![
        ("eof", Script::new().close()),
        ("reset", Script::new().reset()),
        ("silence", Script::new().hang()),
        ("first-byte", Script::new().then("H").pause(MOMENT).reset()),
        ("half-head", Script::new().then(head).pause(MOMENT).reset()),
        ("half-head-eof", Script::new().then(head).close()),
        (
            "head",
            Script::new()
                .then(format!("{head}Content-Length: 9\r\n\r\n"))
                .pause(MOMENT)
                .reset(),
        ),
        (
            "half-body",
            Script::new()
                .then(format!("{head}Content-Length: 9\r\n\r\n{{\"a\""))
                .close(),
        ),
        (
            "half-body-stalls",
            Script::new()
                .then(format!("{head}Content-Length: 9\r\n\r\n{{\"a\""))
                .hang(),
        ),
        (
            "half-chunk",
            Script::new()
                .then(format!("{head}Transfer-Encoding: chunked\r\n\r\n9\r\n{{\"a\""))
                .close(),
        ),
        (
            "no-last-chunk",
            Script::new()
                .then(format!("{head}Transfer-Encoding: chunked\r\n\r\n2\r\n{{}}\r\n"))
                .close(),
        ),
        (
            "no-last-line",
            Script::new()
                .then(format!("{head}Transfer-Encoding: chunked\r\n\r\n2\r\n{{}}\r\n0\r\n"))
                .close(),
        ),
        (
            "until-closed-reset",
            Script::new().then(format!("{head}\r\n{{}}")).pause(MOMENT).reset(),
        ),
        ("no-http", Script::new().then("SSH-2.0-OpenSSH_9.2\r\n").close()),
        ("garbage", Script::new().then([0u8, 255, 13, 10, 13, 10]).close()),
        (
            "continue-only",
            Script::new().then("HTTP/1.1 100 Continue\r\n\r\n").close(),
        ),
        (
            "switching",
            Script::new()
                .then("HTTP/1.1 101 Switching Protocols\r\nUpgrade: x\r\nConnection: upgrade\r\n\r\n")
                .hang(),
        ),
    ];
    let bench = Bench::with("head_timeout = \"600ms\"\nidle_timeout = \"600ms\"").await;
    let scripts: std::collections::HashMap<String, Script> = ways
        .iter()
        .map(|(name, script)| (format!("/base/{name}"), script.clone()))
        .collect();
    bench.pay.answers(move |request| scripts[&request.target].clone());
    let mut senders = JoinSet::new();
    for (name, _) in &ways {
        let (agent, name) = (bench.agent(), (*name).to_owned());
        senders.spawn(async move {
            let answer = agent.forward("POST", &name, &format!("/{name}"), "{}").await;
            (name, answer)
        });
    }
    for (name, answer) in senders.join_all().await {
        let unknown = answer.is(409, "outcome-unknown");
        assert_eq!(unknown.json()["retryable"], false, "{name}");
        assert_eq!(unknown.json()["operation_url"], format!("/v1/operations/{name}"));
        assert_eq!(unknown.header("operation-state"), "needs_reconciliation");
        let operation = bench.operation(&name).await;
        assert_eq!(operation["state"], "needs_reconciliation", "{name}");
        assert_eq!(events(&operation), ["claimed", "outcome_unknown"], "{name}");
        assert!(operation["receipt"].is_null(), "half an answer is no receipt");
    }
    bench.nothing_more_is_sent().await;
    for (name, _) in &ways {
        bench
            .post(name, &format!("/{name}"), "{}")
            .await
            .is(409, "outcome-unknown");
        bench
            .post(name, &format!("/{name}"), "{\"a\":1}")
            .await
            .is(422, "fingerprint-mismatch");
        bench
            .agent()
            .get(&format!("/v1/operations/{name}/receipt"))
            .await
            .is(409, "outcome-unknown");
        assert_eq!(bench.pay.sends(&format!("/{name}")), 1, "{name}");
    }
}

/// Long enough for what was written before it to be read on its own, on a busy machine too: a reset takes back what
/// nobody has read.
const MOMENT: Duration = Duration::from_millis(500);

#[tokio::test]
async fn a_complete_answer_stands_whatever_becomes_of_the_connection() {
    let bench = Bench::start().await;
    let endings = [
        Script::new(),
        Script::new().close(),
        Script::new().pause(MOMENT).reset(),
    ];
    for (number, ending) in endings.into_iter().enumerate() {
        for body in ["", "{\"a\":1}"] {
            let ending = ending.clone();
            bench
                .pay
                .answers(move |_| Script::with_lines(201, "Connection: close\r\n", body).before(ending.clone()));
            let key = format!("k{number}{}", body.len());
            let first = bench.post(&key, &format!("/{key}"), "{}").await;
            assert_eq!((first.status, &first.body[..]), (201, body.as_bytes()));
            bench.is_replayed(&first, &key, &format!("/{key}"), "{}").await;
        }
    }
    // A body without a length ends with its connection.
    bench
        .pay
        .answers(|_| Script::new().then("HTTP/1.0 200 OK\r\n\r\nold").close());
    let old = bench.post("old", "/old", "{}").await.succeeded();
    assert_eq!(old.body, "old");
    // Interim answers are not the answer.
    bench.pay.answers(|_| {
        Script::new()
            .then("HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nLink: <x>\r\n\r\n")
            .before(Script::answer(202, "{}"))
    });
    assert_eq!(bench.post("interim", "/interim", "{}").await.status, 202);
}

#[tokio::test]
async fn a_reset_while_the_request_is_written_is_unknown() {
    let bench = Bench::start().await;
    let body = "x".repeat(900_000);
    for cut_at in [1, 200, 100_000, 800_000] {
        bench.pay.cuts_at(cut_at);
        let key = format!("cut-{cut_at}");
        bench
            .post(&key, &format!("/{key}"), &body)
            .await
            .is(409, "outcome-unknown");
        assert_eq!(bench.state(&key).await, "needs_reconciliation");
    }
    assert_eq!(bench.pay.count(), 0, "it never saw a whole request, but who knows");
    assert_eq!(bench.pay.connections(), 4, "one connection, one attempt");
}

#[tokio::test]
async fn fifty_resets_after_the_effect_are_fifty_unknowns_and_no_second_send() {
    let bench = Bench::start().await;
    bench.pay.answers(|_| Script::new().reset());
    let mut senders = JoinSet::new();
    for number in 0..50 {
        let agent = bench.agent();
        senders.spawn(async move {
            let key = format!("k{number}");
            agent
                .forward("POST", &key, &format!("/{key}"), "{}")
                .await
                .is(409, "outcome-unknown");
        });
    }
    senders.join_all().await;
    bench.nothing_more_is_sent().await;
    for number in 0..50 {
        assert_eq!(bench.pay.sends(&format!("/k{number}")), 1, "{number}");
    }
    let unknown = "select count(*) from ledger.operations where state = 'needs_reconciliation' and attempt = 1 and due_at is null";
    assert_eq!(bench.ledger.count(unknown).await, 50);
}

/// A downstream closes idle connections just as the next request is written.
#[tokio::test]
async fn a_connection_that_closes_as_it_is_used_never_makes_a_second_send() {
    const ROUNDS: usize = 500;
    let mut random = Random::announced("idle connections");
    let bench = Bench::start().await;
    let pauses = std::sync::Mutex::new(random.split());
    bench.pay.answers(move |_| {
        let mut pauses = pauses.lock().unwrap();
        let answer = Script::answer(200, "{}");
        match pauses.below(4) {
            // Closes at once, at a moment, or keeps it.
            0 => answer.close(),
            1 => answer.reset(),
            2 => answer
                .pause(pauses.between(Duration::ZERO, Duration::from_millis(4)))
                .close(),
            _ => answer
                .pause(pauses.between(Duration::ZERO, Duration::from_millis(4)))
                .reset(),
        }
    });
    let agent = bench.agent();
    let mut answers = std::collections::BTreeMap::new();
    for round in 0..ROUNDS {
        let key = format!("k{round}");
        let answer = agent.forward("POST", &key, &format!("/{key}"), "{}").await;
        let is_known = match answer.status {
            200 => true,
            409 => answer.code() == "outcome-unknown",
            502 => answer.code() == "downstream-unreachable",
            _ => false,
        };
        assert!(is_known, "{answer:?}");
        *answers.entry(answer.status).or_insert(0) += 1;
        assert!(bench.pay.sends(&format!("/{key}")) <= 1, "{key}");
        assert!(answer.status != 200 || bench.pay.sends(&format!("/{key}")) == 1);
    }
    println!("{answers:?}");
    bench.nothing_more_is_sent().await;
    for round in 0..ROUNDS {
        assert!(bench.pay.sends(&format!("/k{round}")) <= 1, "{round}");
    }
    assert!(answers[&200] > ROUNDS / 2, "{answers:?}");
}

/// The moments at which a caller hangs up, after its request has been written.
const MOMENTS: u64 = 20;

#[tokio::test]
async fn a_caller_that_hangs_up_does_not_stop_its_request() {
    let bench = Bench::start().await;
    bench.pay.answers(|_| {
        Script::new()
            .pause(Duration::from_millis(20))
            .before(Script::answer(200, "{}"))
    });
    let key = &bench.ledger.keys["agent"];
    for moment in 0..MOMENTS {
        let request = format!(
            "POST /v1/proxy/pay/k{moment} HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {key}\r\nIdempotency-Key: k{moment}\r\n\
             Content-Type: application/json\r\nContent-Length: 2\r\n\r\n{{}}"
        );
        let mut stream = TcpStream::connect(bench.agent().address).await.unwrap();
        tokio::io::AsyncWriteExt::write_all(&mut stream, request.as_bytes())
            .await
            .unwrap();
        tokio::time::sleep(Duration::from_millis(2 * moment)).await;
        stream.set_zero_linger().unwrap();
    }
    for moment in 0..MOMENTS {
        let (key, path) = (format!("k{moment}"), format!("/k{moment}"));
        crate::support::until("a retry is replayed", async || {
            let answer = bench.post(&key, &path, "{}").await;
            assert!(
                answer.status == 200 || answer.code() == "operation-in-progress",
                "{answer:?}"
            );
            answer.status == 200
        })
        .await;
        assert_eq!(bench.pay.sends(&path), 1, "{moment}");
    }
}
