//! The user PostgreSQL runs as, and how a process of its is begun.
//!
//! PostgreSQL refuses root. Anyone else runs it as themselves.

use std::fmt;
use std::fs;
use std::io::{self, ErrorKind};
use std::os::unix::fs::{MetadataExt as _, lchown};
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::Command;

use nix::unistd::{Uid, User, geteuid};

use super::error::{Error, file};
use super::home::Home;
use super::locate::Version;

#[derive(Debug, Clone)]
pub struct Account {
    uid: u32,
    gid: u32,
    /// `None` for a uid without a passwd entry.
    name: Option<String>,
    switch: Switch,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Switch {
    /// We are that user already.
    Stay,
    /// We are root and become that user in the child.
    Drop,
}

impl Account {
    /// Whoever owns the data directory, if there is one; else ourselves; else, for root,
    /// `postgres` or `nobody`.
    pub fn choose(data: &Path) -> Result<Self, Error> {
        let owner = match fs::metadata(data) {
            Ok(metadata) => Some((metadata.uid(), metadata.gid())),
            Err(error) if error.kind() == ErrorKind::NotFound => None,
            Err(error) => return Err(file("look at", data)(error)),
        };
        let me = geteuid();
        if me.is_root() {
            Self::below_root(data, owner)
        } else {
            Self::ourselves(data, owner, me)
        }
    }

    fn below_root(data: &Path, owner: Option<(u32, u32)>) -> Result<Self, Error> {
        let usual = ["postgres", "nobody"]
            .into_iter()
            .find_map(|name| User::from_name(name).ok().flatten());
        match (owner, usual) {
            (Some((0, _)), usual) => Err(Error::DataOwner {
                data: data.into(),
                owner: "root".into(),
                account: usual.map_or_else(|| "an ordinary user".into(), |user| user.name),
            }),
            (Some((uid, gid)), _) => Ok(Self {
                uid,
                gid,
                name: name_of(uid),
                switch: Switch::Drop,
            }),
            (None, Some(user)) => Ok(Self {
                uid: user.uid.as_raw(),
                gid: user.gid.as_raw(),
                name: Some(user.name),
                switch: Switch::Drop,
            }),
            (None, None) => Err(Error::NoAccount),
        }
    }

    fn ourselves(data: &Path, owner: Option<(u32, u32)>, me: Uid) -> Result<Self, Error> {
        let uid = me.as_raw();
        let account = Self {
            uid,
            gid: nix::unistd::getegid().as_raw(),
            name: name_of(uid),
            switch: Switch::Stay,
        };
        match owner {
            Some((owner, _)) if owner != uid => Err(Error::DataOwner {
                data: data.into(),
                owner: name_of(owner).unwrap_or_else(|| format!("uid {owner}")),
                account: account.to_string(),
            }),
            Some(_) | None => Ok(account),
        }
    }

    pub fn uid(&self) -> u32 {
        self.uid
    }

    /// initdb asks the user database who it is, and gives up if it does not know.
    pub fn require_passwd_entry(&self) -> Result<(), Error> {
        match self.name {
            Some(_) => Ok(()),
            None => Err(Error::NoPasswdEntry { uid: self.uid }),
        }
    }

    /// Hands a directory we have just made to this user.
    pub fn give(&self, path: &Path) -> Result<(), Error> {
        match self.switch {
            Switch::Stay => Ok(()),
            Switch::Drop => lchown(path, Some(self.uid), Some(self.gid)).map_err(file("change the owner of", path)),
        }
    }

    /// One of PostgreSQL's programs, run as this user in `home`.
    ///
    /// Its environment is empty but for what it needs: `PGCLIENTENCODING` and the like would change
    /// the server, and our own secrets are none of its business.
    pub fn command(&self, program: &Path, home: &Home) -> Command {
        let mut command = Command::new(program);
        command
            .env_clear()
            .envs([("LC_ALL", "C"), ("TZ", "UTC"), ("PATH", "/usr/bin:/bin")]);
        command.current_dir(home.dir());
        // A group of its own: Ctrl-C in the terminal is for us, who drain first and stop it after.
        command.process_group(0);
        match self.switch {
            Switch::Stay => {}
            // This drops root's supplementary groups too.
            Switch::Drop => {
                command.uid(self.uid).gid(self.gid);
            }
        }
        end_with_parent(&mut command);
        command
    }

    pub fn version_of(&self, postgres: &Path, home: &Home) -> Result<Version, Error> {
        let output = self.command(postgres, home).arg("--version").output();
        let output = output.map_err(|source| self.failed_to_run(postgres, home, source))?;
        let answer = String::from_utf8_lossy(&output.stdout);
        Version::parse(&answer).ok_or_else(|| Error::Version {
            program: postgres.into(),
            answer: answer.trim().into(),
        })
    }

    /// The child enters `home` as its new user before it becomes `program`, and only one error
    /// comes back for both.
    pub fn failed_to_run(&self, program: &Path, home: &Home, source: io::Error) -> Error {
        match self.closed_ancestor(home.dir()) {
            Some(closed) if source.kind() == ErrorKind::PermissionDenied => Error::Unreachable {
                dir: home.dir().into(),
                account: self.to_string(),
                closed,
            },
            Some(_) | None => Error::Run {
                program: program.into(),
                account: self.to_string(),
                source,
            },
        }
    }

    fn closed_ancestor(&self, dir: &Path) -> Option<PathBuf> {
        let mut outermost_first: Vec<_> = dir.ancestors().collect();
        outermost_first.reverse();
        outermost_first
            .into_iter()
            .find(|ancestor| !self.may_enter(ancestor))
            .map(Path::to_owned)
    }

    fn may_enter(&self, dir: &Path) -> bool {
        fs::metadata(dir).is_ok_and(|metadata| {
            let bit = if metadata.uid() == self.uid {
                0o100
            } else if metadata.gid() == self.gid {
                0o010
            } else {
                0o001
            };
            metadata.mode() & bit != 0
        })
    }
}

impl fmt::Display for Account {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.name {
            Some(name) => write!(formatter, "the user {name}"),
            None => write!(formatter, "uid {}", self.uid),
        }
    }
}

fn name_of(uid: u32) -> Option<String> {
    Some(User::from_uid(Uid::from_raw(uid)).ok()??.name)
}

/// Has the kernel interrupt the child when the thread that begins it is gone, even by SIGKILL. For
/// PostgreSQL an interrupt is a fast, clean shutdown; for initdb, a clean-up.
#[cfg(target_os = "linux")]
#[expect(
    unsafe_code,
    reason = "the request has to be made in the child, between fork and exec"
)]
fn end_with_parent(command: &mut Command) {
    let parent = std::process::id();
    let ask = move || {
        nix::sys::prctl::set_pdeathsig(nix::sys::signal::Signal::SIGINT)?;
        // A parent that died before the line above will not die again.
        if std::os::unix::process::parent_id() == parent {
            Ok(())
        } else {
            Err(nix::errno::Errno::ESRCH.into())
        }
    };
    // SAFETY: after a fork in a process with threads only async-signal-safe calls are allowed.
    // `ask` makes two system calls (prctl, getppid), takes no lock and allocates nothing.
    // The standard library runs it after setuid, which would have cancelled the request.
    unsafe { command.pre_exec(ask) };
}

/// There is no such request here: [`super::leftover`] stops the orphan at the next start.
#[cfg(not(target_os = "linux"))]
fn end_with_parent(_command: &mut Command) {}
