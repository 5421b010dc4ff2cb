//! The program itself, for tests that kill it.

use std::io::{BufRead, BufReader};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// A running `opledger serve`; killed when it is dropped.
pub struct Process {
    child: Child,
    pub address: SocketAddr,
}

impl Process {
    /// Starts the program and waits until it serves. Its log goes on being read, so that it never blocks on it.
    pub fn serve(config: &Path, database_url: &str) -> Self {
        Self::serve_at(config, database_url, "127.0.0.1:0".parse().unwrap())
    }

    pub fn serve_at(config: &Path, database_url: &str, listen: SocketAddr) -> Self {
        let mut child = Command::new(env!("CARGO_BIN_EXE_opledger"))
            .args(["serve", "--log-format", "json", "--config"])
            .arg(config)
            .args(["--listen", &listen.to_string()])
            .env("DATABASE_URL", database_url)
            .stdin(Stdio::null())
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
            if event["message"] == "serving" {
                break event["address"].as_str().unwrap().parse().unwrap();
            }
            seen.push(line);
        };
        std::thread::spawn(move || lines.for_each(drop));
        Self { child, address }
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn signal(&self, signal: Signal) {
        kill(Pid::from_raw(self.child.id().cast_signed()), signal).unwrap();
    }

    /// SIGKILL, and wait until it is gone.
    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// Waits for it to end by itself.
    pub fn wait(&mut self) -> std::process::ExitStatus {
        self.child.wait().unwrap()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}
