//! `opledger dev`: what it tells people to do, and that it leaves nothing running.

use std::os::unix::fs::PermissionsExt;
use std::process::Stdio;

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;
use tokio::io::{AsyncBufReadExt, AsyncReadExt, BufReader};
use tokio::process::Command;

/// What it has printed when it was ready, and afterwards on stderr.
async fn told(arguments: &[&str]) -> (String, String) {
    let mut process = Command::new(env!("CARGO_BIN_EXE_opledger"))
        .args([
            "dev",
            "--accounts",
            "1",
            "--listen",
            "127.0.0.1:0",
            "--sandbox-listen",
            "127.0.0.1:0",
        ])
        .args(arguments)
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .kill_on_drop(true)
        .spawn()
        .unwrap();
    let mut output = BufReader::new(process.stdout.take().unwrap());
    let mut text = String::new();
    while !text.contains("Stop with Ctrl-C") && output.read_line(&mut text).await.unwrap() > 0 {}
    let pid = Pid::from_raw(process.id().unwrap().try_into().unwrap());
    kill(pid, Signal::SIGTERM).unwrap();
    let mut log = String::new();
    process.stderr.take().unwrap().read_to_string(&mut log).await.unwrap();
    assert!(process.wait().await.unwrap().success(), "{log}");
    (text, log)
}

#[tokio::test]
async fn a_file_of_ones_own_is_told_of_and_not_the_example() {
    let directory = tempfile::tempdir().unwrap();
    let file = directory.path().join("mine.toml");
    std::fs::write(&file, "[downstreams.mine]\nurl = \"http://127.0.0.1:1\"\n").unwrap();
    let (text, _) = told(&["--ephemeral", "--config", file.to_str().unwrap()]).await;
    assert!(
        text.contains("mine.toml") && text.contains("/v1/proxy/mine/PATH"),
        "{text}"
    );
    assert!(
        !text.contains("order.refund") && !text.contains("Submit an operation"),
        "{text}"
    );
    assert!(
        text.contains("all data goes with it") && !text.contains("the data stays"),
        "{text}"
    );
}

#[tokio::test]
async fn a_second_start_finds_everything_and_makes_no_news_of_it() {
    let directory = tempfile::tempdir().unwrap();
    // Run by root, PostgreSQL is another user's process, and has to get there.
    std::fs::set_permissions(directory.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let place = directory.path().join("kept");
    let first = told(&["--dir", place.to_str().unwrap()]).await;
    assert!(first.1.contains("applying"), "{}", first.1);
    assert!(
        first.0.contains("order.refund") && first.0.contains("the data stays"),
        "{}",
        first.0
    );
    let (text, log) = told(&["--dir", place.to_str().unwrap()]).await;
    assert!(!log.contains("skipping") && !log.contains("applying"), "{log}");
    let key = |text: &str| text.lines().find(|line| line.starts_with("  agent")).map(str::to_owned);
    assert_eq!(key(&text), key(&first.0));
}
