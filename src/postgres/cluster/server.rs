//! The postmaster as a child process: begun, waited for, ended.

use std::ffi::OsString;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::process::{Child, ExitStatus, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::Pid;

use super::account::Account;
use super::error::{Error, file};
use super::home::{Home, tail};
use super::socket::SocketDirectory;

/// How long a killed server's remains may keep a new one out: its sessions finish their statement
/// first, and its own process may lie unburied for a while.
const OCCUPIED_AT_MOST: Duration = Duration::from_secs(15);
/// A living server that is not ready is recovering, and gets further than one that starts again.
const READY_WITHIN: Duration = Duration::from_mins(2);
const LOOK_EVERY: Duration = Duration::from_millis(5);

/// Asked nicely, then firmly, then not asked.
const STOPPING: [(Signal, Duration); 3] = [
    // A fast shutdown: sessions end, the checkpoint is written.
    (Signal::SIGINT, Duration::from_secs(30)),
    // At once, and the next start recovers.
    (Signal::SIGQUIT, Duration::from_secs(5)),
    (Signal::SIGKILL, Duration::from_secs(5)),
];

/// SQLSTATE `lock_file_exists`: another server, or what is left of one, is in the data directory.
const OCCUPIED: &str = " F0001 ";

/// All it takes to start the server, and to start it again.
#[derive(Debug)]
pub struct Launch {
    pub program: PathBuf,
    pub arguments: Vec<OsString>,
    pub home: Home,
    pub socket: SocketDirectory,
    pub account: Account,
}

/// A child that is stopped when this is dropped.
#[derive(Debug)]
pub struct Server {
    child: Child,
    home: Home,
}

enum Readiness {
    Ready,
    Ended(ExitStatus),
    Late,
}

impl Server {
    /// Begins the server and waits until it accepts queries. While the data directory is occupied
    /// it tries again; it never removes `postmaster.pid`, which is what keeps two servers apart.
    pub fn start(launch: &Launch) -> Result<Self, Error> {
        let home = &launch.home;
        home.rotate_log()?;
        let give_up_at = Instant::now() + OCCUPIED_AT_MOST;
        loop {
            let log_length = home.log_length();
            let mut server = Self::begin(launch)?;
            match server.wait_until_ready()? {
                Readiness::Ready => return Ok(server),
                Readiness::Late => {
                    return Err(Error::NotReady {
                        log: home.log(),
                        seconds: READY_WITHIN.as_secs(),
                    });
                }
                Readiness::Ended(status) => {
                    let words = home.log_since(log_length);
                    if !words.contains(OCCUPIED) {
                        return Err(Error::NotStarted {
                            log: home.log(),
                            status,
                            tail: tail(&words),
                        });
                    }
                    if Instant::now() > give_up_at {
                        return Err(occupied(home, &words));
                    }
                }
            }
            thread::sleep(Duration::from_millis(100));
        }
    }

    fn begin(launch: &Launch) -> Result<Self, Error> {
        let log = launch.home.open_log()?;
        let mut command = launch.account.command(&launch.program, &launch.home);
        command
            .args(&launch.arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log);
        let child = command
            .spawn()
            .map_err(|source| launch.account.failed_to_run(&launch.program, &launch.home, source))?;
        Ok(Self {
            child,
            home: launch.home.clone(),
        })
    }

    pub fn pid(&self) -> u32 {
        self.child.id()
    }

    pub fn is_running(&mut self) -> bool {
        matches!(self.status(), Ok(None))
    }

    fn wait_until_ready(&mut self) -> Result<Readiness, Error> {
        let give_up_at = Instant::now() + READY_WITHIN;
        while Instant::now() < give_up_at {
            if let Some(status) = self.status()? {
                return Ok(Readiness::Ended(status));
            }
            if says_ready(&self.home.data(), self.pid()) {
                return Ok(Readiness::Ready);
            }
            thread::sleep(LOOK_EVERY);
        }
        Ok(Readiness::Late)
    }

    pub fn stop(mut self) -> Result<(), Error> {
        self.end()
    }

    /// As a crash would, and buries it: an unburied postmaster still looks alive to the next one.
    pub fn kill(mut self) {
        // Neither can fail for a child of ours that we have not waited for.
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    fn end(&mut self) -> Result<(), Error> {
        if let Some(status) = self.status()? {
            return self.judge(status);
        }
        for (signal, patience) in STOPPING {
            self.signal(signal)
                .map_err(file("send a signal to the server of", self.home.dir()))?;
            let give_up_at = Instant::now() + patience;
            while Instant::now() < give_up_at {
                if let Some(status) = self.status()? {
                    return self.judge(status);
                }
                thread::sleep(Duration::from_millis(2));
            }
        }
        // Killed and still there: the kernel is waiting for a disk. Nothing more we can do.
        self.child
            .wait()
            .map_err(file("wait for the server of", self.home.dir()))
            .and_then(|status| self.judge(status))
    }

    fn judge(&self, status: ExitStatus) -> Result<(), Error> {
        if status.success() {
            Ok(())
        } else {
            Err(Error::NotStopped {
                log: self.home.log(),
                status,
            })
        }
    }

    /// Safe to send: a child that has not been waited for keeps its process id.
    fn signal(&self, signal: Signal) -> io::Result<()> {
        let pid = i32::try_from(self.pid()).map_err(io::Error::other)?;
        Ok(kill(Pid::from_raw(pid), signal)?)
    }

    fn status(&mut self) -> Result<Option<ExitStatus>, Error> {
        self.child
            .try_wait()
            .map_err(file("wait for the server of", self.home.dir()))
    }
}

impl Drop for Server {
    fn drop(&mut self) {
        // A drop has nobody to tell; `stop` has.
        let _ = self.end();
    }
}

fn occupied(home: &Home, words: &str) -> Error {
    Error::Occupied {
        data: home.data(),
        seconds: OCCUPIED_AT_MOST.as_secs(),
        tail: tail(words),
    }
}

/// The postmaster writes its state into line 8 of its pid file, for `pg_ctl` to wait on; the first
/// line is its process id, which tells its file from one that a killed server left.
fn says_ready(data: &Path, pid: u32) -> bool {
    fs::read_to_string(data.join("postmaster.pid")).is_ok_and(|file| {
        let mut lines = file.lines();
        let first = lines.next().map(str::trim);
        first == Some(pid.to_string().as_str()) && lines.nth(6).map(str::trim) == Some("ready")
    })
}
