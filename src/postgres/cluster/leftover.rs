//! A server that outlived whoever started it.
//!
//! Where the kernel passes the parent's death on (Linux), it is at most still shutting down.
//! Elsewhere it runs on, and is stopped here. We hold the directory's lock, so nobody else uses it.

use std::fs;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

/// Stops the server that `postmaster.pid` names, if it is one and serves this directory. If it will
/// not go, the start that follows says so.
pub fn stop(data: &Path) {
    let Some(pid) = named_in(data) else { return };
    for (signal, patience_s) in [(Signal::SIGINT, 10), (Signal::SIGQUIT, 5)] {
        if !serves(pid, data) {
            return;
        }
        let _ = kill(Pid::from_raw(pid), signal);
        let give_up_at = Instant::now() + Duration::from_secs(patience_s);
        while serves(pid, data) && Instant::now() < give_up_at {
            thread::sleep(Duration::from_millis(10));
        }
    }
}

/// A number below two is no server: zero and negative ones address whole groups.
fn named_in(data: &Path) -> Option<i32> {
    let file = fs::read_to_string(data.join("postmaster.pid")).ok()?;
    file.lines().next()?.trim().parse().ok().filter(|&pid| pid > 1)
}

/// The number may belong to some other process by now, so look at what it runs: we always start
/// the server with the data directory as an argument of its own. A zombie has no arguments left.
#[cfg(target_os = "linux")]
fn serves(pid: i32, data: &Path) -> bool {
    use std::os::unix::ffi::OsStrExt as _;

    let arguments = fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
    arguments
        .split(|&byte| byte == 0)
        .any(|argument| argument == data.as_os_str().as_bytes())
}

#[cfg(not(target_os = "linux"))]
fn serves(pid: i32, data: &Path) -> bool {
    let ps = std::process::Command::new("ps")
        .args(["-ww", "-o", "command=", "-p", &pid.to_string()])
        .output();
    let command = ps
        .map(|output| String::from_utf8_lossy(&output.stdout).into_owned())
        .unwrap_or_default();
    command.contains("postgres") && command.contains(&format!("-D {} ", data.display()))
}
