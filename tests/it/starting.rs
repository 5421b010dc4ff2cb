//! How `serve` begins: it waits for a PostgreSQL that is on its way up, and for no other.

use std::io::{BufRead, BufReader};
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use tokio::io::{AsyncReadExt, AsyncWriteExt, copy_bidirectional};
use tokio::net::{TcpListener, TcpStream, UnixStream};

use crate::support::process::{command, finished};
use crate::support::{Database, shared, write_config};

/// What PostgreSQL answers while it starts.
const STARTING: &[u8] =
    b"E\x00\x00\x00\x49SFATAL\0VFATAL\0C57P03\0Mthe database system is starting up\0Fp.c\0L1\0Rf\0\0";

/// A way to the run's PostgreSQL that says for a while that it is starting.
async fn door(listener: TcpListener, is_up: Arc<AtomicBool>) {
    while let Ok((mut client, _)) = listener.accept().await {
        if is_up.load(Ordering::Relaxed) {
            tokio::spawn(async move {
                let mut server = UnixStream::connect(shared().socket().join(".s.PGSQL.5432"))
                    .await
                    .unwrap();
                let _ = copy_bidirectional(&mut client, &mut server).await;
            });
        } else {
            refuse(client).await;
        }
    }
}

async fn refuse(mut client: TcpStream) {
    // Its start-up message, whose first word is its length.
    let length = client.read_u32().await.unwrap();
    let mut rest = vec![0; length as usize - 4];
    client.read_exact(&mut rest).await.unwrap();
    client.write_all(STARTING).await.unwrap();
}

/// A command whose log is read line by line.
pub struct Started {
    child: Child,
    lines: Option<std::io::Lines<BufReader<std::process::ChildStderr>>>,
    pub seen: Vec<String>,
}

impl Started {
    pub fn new(arguments: &[&str], database_url: &str) -> Self {
        let mut child = command(arguments, database_url).stderr(Stdio::piped()).spawn().unwrap();
        let lines = BufReader::new(child.stderr.take().unwrap()).lines();
        Self {
            child,
            lines: Some(lines),
            seen: Vec::new(),
        }
    }

    /// Waits for a line with this text.
    pub async fn says(&mut self, text: &'static str) {
        let mut lines = self.lines.take().unwrap();
        let read = tokio::task::spawn_blocking(move || {
            let mut seen = Vec::new();
            while let Some(Ok(line)) = lines.next() {
                let found = line.contains(text);
                seen.push(line);
                if found {
                    return (lines, seen, true);
                }
            }
            (lines, seen, false)
        });
        let (lines, seen, found) = read.await.unwrap();
        self.lines = Some(lines);
        self.seen.extend(seen);
        assert!(found, "it ends without {text:?}:\n{}", self.seen.join("\n"));
    }
}

impl Drop for Started {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

#[tokio::test]
async fn serve_waits_for_a_database_that_comes_up_after_it() {
    let database = Database::create().await;
    let (_directory, config) = write_config("");
    let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
    let address = listener.local_addr().unwrap();
    drop(listener);
    let url = format!("postgres://opledger@{address}/{}?sslmode=disable", database.name);
    let config = config.to_str().unwrap();
    let mut serve = Started::new(&["serve", "--listen", "127.0.0.1:0", "--config", config], &url);
    serve.says("waiting for PostgreSQL").await;
    let is_up = Arc::new(AtomicBool::new(false));
    let listener = TcpListener::bind(address).await.unwrap();
    tokio::spawn(door(listener, is_up.clone()));
    serve.says("the database system is starting up").await;
    is_up.store(true, Ordering::Relaxed);
    serve.says("serving").await;
    let waiting: Vec<_> = serve.seen.iter().filter(|line| line.contains("waiting")).collect();
    assert_eq!(waiting.len(), 2, "one line for each cause: {waiting:?}");
    assert!(waiting[0].contains("refused"), "{waiting:?}");
}

#[tokio::test]
async fn serve_and_migrate_wait_as_long_as_they_are_told_and_then_say_what_to_do() {
    let (_directory, config) = write_config("");
    let config = config.to_str().unwrap();
    for command in [&["serve", "--config", config][..], &["migrate"]] {
        let arguments = [command, &["--database-wait", "1s"]].concat();
        let end = finished(&arguments, "postgres://opledger@127.0.0.1:1/ledger").await;
        assert_eq!(end.code, Some(1), "{end:?}");
        for part in [
            "127.0.0.1:1/ledger did not come up within 1s",
            "--database-wait",
            "refused",
        ] {
            assert!(end.stderr.contains(part), "{part} in {end:?}");
        }
        let arguments = [command, &["--database-wait", "0s"]].concat();
        let end = finished(&arguments, "postgres://opledger@127.0.0.1:1/ledger").await;
        assert!(
            end.stderr
                .contains("cannot connect to PostgreSQL at 127.0.0.1:1/ledger"),
            "{end:?}"
        );
    }
}

#[tokio::test]
async fn a_database_that_refuses_for_good_is_not_waited_for() {
    let (_directory, config) = write_config("");
    let config = config.to_str().unwrap();
    let end = finished(
        &["serve", "--config", config],
        &shared().url("opledger", "no_such_database"),
    )
    .await;
    assert_eq!(end.code, Some(1), "{end:?}");
    assert!(end.stderr.contains("no_such_database"), "{end:?}");
    assert!(!end.stderr.contains("waiting"), "{end:?}");
}
