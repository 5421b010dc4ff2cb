//! The program itself, for tests that kill it, freeze it, or read what it says.

use std::io::{BufRead, BufReader, Read};
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// A running `opledger serve`; killed when it is dropped.
pub struct Process {
    child: Child,
    pub address: SocketAddr,
    log: Arc<Mutex<Vec<String>>>,
}

/// How a command ended.
#[derive(Debug)]
pub struct Finished {
    pub code: Option<i32>,
    pub stdout: String,
    pub stderr: String,
}

/// A command of the program.
pub fn command(arguments: &[&str], database_url: &str) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_opledger"));
    command
        .args(arguments)
        .env("DATABASE_URL", database_url)
        .stdin(Stdio::null());
    command
}

/// Runs a command to its end, on a thread of its own; a `serve` that serves after all is an error.
pub async fn finished(arguments: &[&str], database_url: &str) -> Finished {
    ended(command(arguments, database_url)).await
}

/// Runs a command that a test has prepared to its end.
pub async fn ended(mut command: Command) -> Finished {
    let child = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
    tokio::task::spawn_blocking(|| end(child)).await.unwrap()
}

fn end(mut child: Child) -> Finished {
    let give_up_at = Instant::now() + Duration::from_secs(30);
    while child.try_wait().unwrap().is_none() {
        if Instant::now() > give_up_at {
            let _ = child.kill();
            panic!("the command does not end");
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    let (mut stdout, mut stderr) = (String::new(), String::new());
    child.stdout.take().unwrap().read_to_string(&mut stdout).unwrap();
    child.stderr.take().unwrap().read_to_string(&mut stderr).unwrap();
    Finished {
        code: child.wait().unwrap().code(),
        stdout,
        stderr,
    }
}

impl Process {
    /// Starts the program and waits until it serves.
    pub fn serve(config: &Path, database_url: &str) -> Self {
        Self::serve_at(config, database_url, "127.0.0.1:0".parse().unwrap())
    }

    pub fn serve_at(config: &Path, database_url: &str, listen: SocketAddr) -> Self {
        Self::serve_with(config, database_url, listen, &[])
    }

    /// With more variables in its environment. Its log goes on being read, so that it never blocks on it.
    pub fn serve_with(config: &Path, database_url: &str, listen: SocketAddr, variables: &[(&str, &str)]) -> Self {
        let mut child = command(&["serve", "--log-format", "json", "--config"], database_url)
            .arg(config)
            .args(["--listen", &listen.to_string()])
            .envs(variables.iter().copied())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut lines = BufReader::new(child.stderr.take().unwrap()).lines();
        let mut seen = Vec::new();
        let address = loop {
            let Some(Ok(line)) = lines.next() else {
                panic!("the service does not start: {}", seen.join("\n"))
            };
            let event: serde_json::Value = serde_json::from_str(&line).unwrap_or_default();
            seen.push(line);
            if event["message"] == "serving" {
                break event["address"].as_str().unwrap().parse().unwrap();
            }
        };
        let log = Arc::new(Mutex::new(seen));
        let keep = log.clone();
        std::thread::spawn(move || {
            lines
                .map_while(Result::ok)
                .for_each(|line| keep.lock().unwrap().push(line))
        });
        Self { child, address, log }
    }

    pub fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.child.id().cast_signed()), signal).unwrap();
    }

    /// A file of the kernel's about this process, e.g. `status`.
    pub fn proc(&self, name: &str) -> PathBuf {
        PathBuf::from(format!("/proc/{}/{name}", self.child.id()))
    }

    /// SIGKILL, and wait until it is gone.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Waits for it to end by itself, without blocking the test's other work.
    pub async fn wait(&mut self, most: Duration) -> std::process::ExitStatus {
        let give_up_at = Instant::now() + most;
        loop {
            if let Some(status) = self.child.try_wait().unwrap() {
                return status;
            }
            assert!(
                Instant::now() < give_up_at,
                "the process does not end within {most:?}:\n{}",
                self.log()
            );
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    /// Waits until it has logged a line with this text.
    pub async fn has_logged(&self, text: &str) {
        let give_up_at = Instant::now() + Duration::from_secs(20);
        while !self.log().contains(text) {
            assert!(Instant::now() < give_up_at, "it never logs {text:?}:\n{}", self.log());
            tokio::time::sleep(Duration::from_millis(10)).await;
        }
    }

    pub fn log(&self) -> String {
        self.log.lock().unwrap().join("\n")
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}
