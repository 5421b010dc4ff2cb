//! Why a private server did not start or stop: each message names the cause and the next step.

use std::io;
use std::path::PathBuf;
use std::process::ExitStatus;

#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error(
        "found no PostgreSQL {} or newer on this machine: {advice}; or set DATABASE_URL to a server that runs already",
        super::locate::OLDEST_MAJOR
    )]
    NotFound { advice: &'static str },

    #[error(
        "{} does not hold both initdb and postgres: name the directory that does (pg_config --bindir tells it)",
        bin_dir.display()
    )]
    NotInBinDir { bin_dir: PathBuf },

    #[error(
        "PostgreSQL {version} in {} is too old, {} or newer is needed: {advice}; or set DATABASE_URL to a newer server",
        bin_dir.display(),
        super::locate::OLDEST_MAJOR
    )]
    TooOld {
        bin_dir: PathBuf,
        version: String,
        advice: &'static str,
    },

    #[error(
        "{} was made by PostgreSQL {made_by} and the server found is {version}: install PostgreSQL {made_by}, \
         carry the data over with pg_upgrade, or choose another directory",
        data.display()
    )]
    OtherMajor {
        data: PathBuf,
        made_by: u32,
        version: String,
    },

    #[error(
        "the database in {} is in use by {}: stop that first, or choose another directory",
        dir.display(),
        holder.map_or_else(|| "another process".to_owned(), |pid| format!("process {pid}"))
    )]
    Held { dir: PathBuf, holder: Option<u32> },

    #[error(
        "PostgreSQL refuses to run as root, so it runs as {account}, who cannot reach {}: {} is closed to other users; \
         choose a directory elsewhere, such as one in /var/lib, or open that one with chmod o+x",
        dir.display(),
        closed.display()
    )]
    Unreachable {
        dir: PathBuf,
        account: String,
        closed: PathBuf,
    },

    #[error(
        "the data directory {} belongs to {owner}, and PostgreSQL would run as {account}: start as you did when it was \
         made, give it away with chown -R, or choose another directory",
        data.display()
    )]
    DataOwner {
        data: PathBuf,
        owner: String,
        account: String,
    },

    #[error(
        "uid {uid} has no entry in the user database (/etc/passwd), and initdb refuses to run without one: \
         add an entry, run as another user, or set DATABASE_URL to a server that runs already"
    )]
    NoPasswdEntry { uid: u32 },

    #[error(
        "PostgreSQL refuses to run as root, and there is neither a user postgres nor a user nobody to run it as: \
         add one, or start as an ordinary user"
    )]
    NoAccount,

    #[error(
        "the path of the socket would be too long, and {} cannot stand in for it because it belongs to somebody else: \
         remove it, or choose a directory with a shorter path",
        path.display()
    )]
    SocketDirectory { path: PathBuf },

    #[error("initdb could not make a database in {} ({status}); nothing was kept; its last words:\n{tail}", dir.display())]
    Initdb {
        dir: PathBuf,
        status: ExitStatus,
        tail: String,
    },

    #[error("PostgreSQL did not start ({status}); the end of {}:\n{tail}", log.display())]
    NotStarted {
        log: PathBuf,
        status: ExitStatus,
        tail: String,
    },

    #[error(
        "another server, or what is left of one, was still in {} after {seconds} s: end the process named below, or \
         whatever should have buried it (in a container, run an init: docker run --init):\n{tail}",
        data.display()
    )]
    Occupied { data: PathBuf, seconds: u64, tail: String },

    #[error(
        "PostgreSQL was not ready within {seconds} s and was stopped; it may have had much to recover, so look in {} \
         and start again",
        log.display()
    )]
    NotReady { log: PathBuf, seconds: u64 },

    #[error(
        "PostgreSQL did not stop cleanly ({status}); the next start recovers what was committed; {} says why",
        log.display()
    )]
    NotStopped { log: PathBuf, status: ExitStatus },

    #[error("failed to run {} as {account}: check that this user may execute it", program.display())]
    Run {
        program: PathBuf,
        account: String,
        #[source]
        source: io::Error,
    },

    #[error("{} answered {answer:?} to --version: name another directory with PostgreSQL's programs", program.display())]
    Version { program: PathBuf, answer: String },

    #[error("failed to {doing} {}: check that the path is writable and the disk has room", path.display())]
    File {
        doing: &'static str,
        path: PathBuf,
        #[source]
        source: io::Error,
    },
}

/// For `map_err`: says what we were doing, and to which path.
pub(super) fn file(doing: &'static str, path: impl Into<PathBuf>) -> impl FnOnce(io::Error) -> Error {
    let path = path.into();
    move |source| Error::File { doing, path, source }
}
