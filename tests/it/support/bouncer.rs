//! PgBouncer in transaction mode, in front of the run's PostgreSQL.

use std::os::unix::fs::{MetadataExt, chown};
use std::os::unix::process::CommandExt;
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

use super::Shared;

/// A running pgbouncer; ended when it is dropped.
pub struct Bouncer {
    child: Child,
    port: u16,
    _directory: tempfile::TempDir,
}

impl Bouncer {
    /// Starts one with this many server connections for each database and role.
    pub fn before(server: &Shared, servers: u32) -> Self {
        let program = ["/usr/sbin/pgbouncer", "/usr/bin/pgbouncer", "/usr/local/bin/pgbouncer"]
            .into_iter()
            .find(|path| std::path::Path::new(path).exists())
            .expect("this test needs PgBouncer: install the package pgbouncer (Debian: apt-get install -y pgbouncer)");
        // It refuses to be root, and only the server's own user reaches the socket.
        let owner = std::fs::metadata(server.socket()).unwrap();
        let directory = tempfile::tempdir().unwrap();
        let port = free_port();
        let users = directory.path().join("users.txt");
        std::fs::write(&users, "\"postgres\" \"\"\n\"opledger\" \"\"\n").unwrap();
        let settings = directory.path().join("pgbouncer.ini");
        let text = format!(
            "[databases]\n* = host={socket} port=5432\n\
             [pgbouncer]\nlisten_addr = 127.0.0.1\nlisten_port = {port}\nunix_socket_dir =\n\
             auth_type = trust\nauth_file = {users}\npool_mode = transaction\n\
             default_pool_size = {servers}\nmax_client_conn = 300\n",
            socket = server.socket().display(),
            users = users.display(),
        );
        std::fs::write(&settings, text).unwrap();
        for path in [directory.path(), &users, &settings] {
            chown(path, Some(owner.uid()), Some(owner.gid())).unwrap();
        }
        let child = Command::new(program)
            .arg(&settings)
            .uid(owner.uid())
            .gid(owner.gid())
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let mut bouncer = Self {
            child,
            port,
            _directory: directory,
        };
        bouncer.wait_until_it_listens();
        bouncer
    }

    pub fn url(&self, role: &str, database: &str) -> String {
        format!("postgres://{role}@127.0.0.1:{}/{database}?sslmode=disable", self.port)
    }

    fn wait_until_it_listens(&mut self) {
        let give_up_at = Instant::now() + Duration::from_secs(10);
        while std::net::TcpStream::connect(("127.0.0.1", self.port)).is_err() {
            assert!(self.child.try_wait().unwrap().is_none(), "pgbouncer ended at once");
            assert!(Instant::now() < give_up_at, "pgbouncer does not listen");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

impl Drop for Bouncer {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

fn free_port() -> u16 {
    std::net::TcpListener::bind("127.0.0.1:0")
        .unwrap()
        .local_addr()
        .unwrap()
        .port()
}
