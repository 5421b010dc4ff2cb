//! A private PostgreSQL for `opledger dev` and for the tests: the machine's own server, run by us
//! in one directory, reached through one Unix socket, gone when we are gone.
//!
//! It is a real server with durability on: what is acknowledged here survives a crash as it would
//! in production. This module leaves databases, roles and migrations to its callers, and knows
//! nothing of `serve`, whose server somebody else runs.
//!
//! What the directory holds:
//!
//! ```text
//! lock             held (flock) by the process that runs the server, and naming it
//! data/            the data directory, complete from the moment it has this name
//! init-*/          a data directory being made; never used if its maker died
//! socket/          the Unix socket, closed to other users
//! postgres.log     the server's own words; postgres.log.1 before it
//! ```
//!
//! Everything blocks; nothing here needs a runtime.

#![expect(
    clippy::disallowed_methods,
    reason = "everything here blocks; it runs on the main thread or a test's own"
)]

mod account;
mod error;
mod home;
mod initdb;
mod leftover;
mod locate;
mod lock;
mod server;
mod settings;
mod socket;
#[cfg(test)]
mod tests;

use std::ffi::OsString;
use std::fmt::Write as _;
use std::os::unix::ffi::OsStrExt as _;
use std::path::{Path, PathBuf};

use account::Account;
pub use error::Error;
use home::Home;
use locate::{Installation, Search};
use lock::Lock;
use server::{Launch, Server};
use socket::SocketDirectory;

/// The role that owns the cluster. It needs no password: only we can reach the socket.
pub const SUPERUSER: &str = "postgres";

#[derive(Debug, Clone)]
pub struct Options {
    /// Created if it is missing, and ours alone.
    pub dir: PathBuf,
    pub lifetime: Lifetime,
    /// Further server settings. They win over our choices for speed, never over those that keep
    /// data safe (`fsync` and the like) or the server private.
    pub settings: Vec<(String, String)>,
    /// Where `initdb` and `postgres` are; looked for when it is `None`.
    pub bin_dir: Option<PathBuf>,
    /// The `PATH` to look in.
    pub search_path: Option<OsString>,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Lifetime {
    /// The data stays for the next start.
    Kept,
    /// The data goes with the [`Cluster`]. Durability stays on meanwhile: a crash test on a server
    /// that does not sync proves nothing.
    Ephemeral,
}

/// A running server; dropping it stops it.
#[derive(Debug)]
pub struct Cluster {
    server: Option<Server>,
    pid: u32,
    launch: Launch,
    lifetime: Lifetime,
    home: Home,
    installation: Installation,
    // Released last, when nothing of ours runs in the directory any more.
    _lock: Lock,
}

impl Options {
    #[must_use]
    pub fn kept(dir: impl Into<PathBuf>) -> Self {
        Self::new(dir.into(), Lifetime::Kept)
    }

    #[must_use]
    pub fn ephemeral(dir: impl Into<PathBuf>) -> Self {
        Self::new(dir.into(), Lifetime::Ephemeral)
    }

    fn new(dir: PathBuf, lifetime: Lifetime) -> Self {
        Self {
            dir,
            lifetime,
            settings: Vec::new(),
            bin_dir: None,
            search_path: None,
        }
    }
}

impl Cluster {
    /// Starts the server, making the data directory first if there is none, and returns when it
    /// accepts queries.
    ///
    /// On Linux the server is told to stop when **the thread that calls this** ends, however it
    /// ends: call it from the main thread, or from one that lives as long as the process. On other
    /// systems a server whose starter was killed runs on until the next start in its directory,
    /// which stops it first.
    pub fn start(options: &Options) -> Result<Self, Error> {
        let home = Home::open(&options.dir)?;
        let account = Account::choose(&home.data())?;
        let lock = Lock::take(&home)?;
        let installation = find_installation(options, &home, &account)?;
        initdb::make_data_directory(&home, &installation, &account)?;
        leftover::stop(&home.data());

        let socket = SocketDirectory::prepare(&home, &account)?;
        let launch = Launch {
            arguments: settings::arguments(options, &home, &socket, &installation, &account),
            program: installation.postgres(),
            home: home.clone(),
            socket,
            account,
        };
        let server = Server::start(&launch)?;
        Ok(Self {
            pid: server.pid(),
            server: Some(server),
            launch,
            lifetime: options.lifetime,
            home,
            installation,
            _lock: lock,
        })
    }

    /// A connection URL for the superuser, for sqlx and for libpq (`psql "$url"`).
    #[must_use]
    pub fn url(&self, database: &str) -> String {
        self.url_as(SUPERUSER, database)
    }

    /// Every part is spelt out, so that a stray `PGPORT` or `PGSSLMODE` changes nothing.
    #[must_use]
    pub fn url_as(&self, role: &str, database: &str) -> String {
        format!(
            "postgres:///{}?host={}&port={}&user={}&sslmode=disable",
            percent_encoded(database.as_bytes()),
            percent_encoded(self.socket_dir().as_os_str().as_bytes()),
            socket::PORT,
            percent_encoded(role.as_bytes()),
        )
    }

    #[must_use]
    pub fn socket_dir(&self) -> &Path {
        self.launch.socket.path()
    }

    /// The postmaster's process; after [`kill`](Self::kill), the one that was.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// The server's version, as in `15.18`.
    #[must_use]
    pub fn version(&self) -> &str {
        &self.installation.version.text
    }

    /// Where this server's programs are, `psql` and `pg_dump` perhaps among them.
    #[must_use]
    pub fn bin_dir(&self) -> &Path {
        &self.installation.bin_dir
    }

    /// Where the server writes its log.
    #[must_use]
    pub fn log(&self) -> PathBuf {
        self.home.log()
    }

    /// Ends every session, writes a checkpoint and waits for the server to be gone.
    pub fn stop(mut self) -> Result<(), Error> {
        self.server.take().map_or(Ok(()), Server::stop)
    }

    /// Kills the postmaster as a crash would. Its sessions notice within moments, not at once.
    pub fn kill(&mut self) {
        if let Some(server) = self.server.take() {
            server.kill();
        }
    }

    /// Whether the postmaster still runs.
    pub fn is_running(&mut self) -> bool {
        self.server.as_mut().is_some_and(Server::is_running)
    }

    /// Starts the server again after a [`kill`](Self::kill), and kills it first if it still runs.
    /// It is bound to the calling thread as by [`start`](Self::start).
    pub fn restart(&mut self) -> Result<(), Error> {
        self.kill();
        let server = Server::start(&self.launch)?;
        self.pid = server.pid();
        self.server = Some(server);
        Ok(())
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        drop(self.server.take());
        match self.lifetime {
            Lifetime::Kept => {}
            Lifetime::Ephemeral => self.home.remove(),
        }
    }
}

fn find_installation(options: &Options, home: &Home, account: &Account) -> Result<Installation, Error> {
    let search = Search {
        bin_dir: options.bin_dir.as_deref(),
        path: options.search_path.as_deref(),
        usual_places: locate::usual_places(),
    };
    locate::find(&search, &home.data(), |postgres| account.version_of(postgres, home))
}

fn percent_encoded(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, &byte| {
        if byte.is_ascii_alphanumeric() || b"-._~".contains(&byte) {
            text.push(char::from(byte));
        } else {
            // Writing to a string cannot fail.
            let _ = write!(text, "%{byte:02X}");
        }
        text
    })
}
