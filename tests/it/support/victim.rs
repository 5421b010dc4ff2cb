//! A PostgreSQL of a test's own, to be killed under load.

use std::time::Duration;

use sqlx::PgPool;
use tokio::sync::{mpsc, oneshot};

use super::{Shared, TENANT, make_keys, prepare, run, start_cluster};

/// The server, on a thread that outlives every use of it: PostgreSQL is bound to the thread that starts it.
pub struct Victim {
    pub server: Shared,
    commands: mpsc::Sender<(Command, oneshot::Sender<()>)>,
}

#[derive(Debug, Clone, Copy)]
enum Command {
    Kill,
    Restart,
}

impl Victim {
    pub async fn start(name: &'static str) -> Self {
        let (commands, mut inbox) = mpsc::channel::<(Command, oneshot::Sender<()>)>(1);
        let (started, server) = oneshot::channel();
        std::thread::spawn(move || {
            let mut cluster = start_cluster(name);
            started
                .send(Shared {
                    socket: cluster.socket_dir().to_owned(),
                })
                .ok()
                .unwrap();
            while let Some((command, done)) = inbox.blocking_recv() {
                match command {
                    Command::Kill => cluster.kill(),
                    Command::Restart => cluster.restart().unwrap(),
                }
                let _ = done.send(());
            }
        });
        Self {
            server: server.await.expect("the test's own PostgreSQL starts"),
            commands,
        }
    }

    /// Makes a database with schema, example business and keys; returns the owner's pool and the agent's key.
    pub async fn prepare(&self, database: &str) -> (PgPool, String) {
        let maintenance = PgPool::connect(&self.server.url("postgres", "postgres")).await.unwrap();
        run(
            &maintenance,
            &format!("drop database if exists \"{database}\" with (force)"),
        )
        .await;
        let owner_url = self.server.url("postgres", database);
        prepare(&maintenance, database, &owner_url).await;
        maintenance.close().await;
        let sql = PgPool::connect(&owner_url).await.unwrap();
        let keys = make_keys(&owner_url, &sql, TENANT).await;
        (sql, keys["agent"].clone())
    }

    /// SIGKILL for the postmaster; its sessions notice within moments.
    pub async fn kill(&self) {
        self.command(Command::Kill).await;
    }

    /// Starts it again, and returns when it answers.
    pub async fn restart(&self) {
        self.command(Command::Restart).await;
    }

    async fn command(&self, command: Command) {
        let (done, answer) = oneshot::channel();
        self.commands.send((command, done)).await.unwrap();
        tokio::time::timeout(Duration::from_secs(60), answer)
            .await
            .unwrap()
            .unwrap();
    }
}
