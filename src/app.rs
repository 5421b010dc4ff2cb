//! One process: what it is made of, how it starts, and how it stops.

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::RwLock;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use uuid::Uuid;

use crate::config::{self, Config};
use crate::engine::accounts::Accounts;
use crate::engine::apply::{self, Apply};
use crate::engine::deliveries::Deliveries;
use crate::engine::intake::Intake;
use crate::engine::perform::{self, Declared, Perform};
use crate::engine::recovery::{self, Heartbeat};
use crate::engine::replays::Replays;
use crate::http::{self, App, spool};
use crate::ledger::kind::{self, Kinds};
use crate::postgres::error::Error as DatabaseError;
use crate::postgres::migrate;
use crate::postgres::pool::{OpenError, Pool, Unsafe};
use crate::telemetry::metrics::Metrics;

/// Longest wait for connections to close.
const CLOSING: Duration = Duration::from_secs(1);

/// Why a process does not start.
#[derive(Debug, thiserror::Error)]
pub enum StartError {
    #[error(transparent)]
    Open(#[from] OpenError),
    #[error(transparent)]
    Database(#[from] DatabaseError),
    #[error(transparent)]
    Unsafe(#[from] Unsafe),
    #[error(transparent)]
    Migrations(#[from] migrate::Error),
    #[error("the database lacks {}; run `opledger migrate` with the owner's address", pending.join(", "))]
    NotMigrated { pending: Vec<String> },
    #[error(
        "the pooler in front of PostgreSQL does not keep prepared statements; set prepared_statements = false under \
         [database], or let the pooler support them (PgBouncer 1.21 and later: max_prepared_statements)"
    )]
    NoNamedStatements,
    #[error("the configuration names handlers that cannot be called:\n{}", faults.join("\n"))]
    Handlers { faults: Vec<String> },
    #[error(transparent)]
    Spool(#[from] spool::Error),
    #[error("cannot listen on {address}; is another process using it?")]
    Listen {
        address: SocketAddr,
        source: std::io::Error,
    },
}

/// A process that has started.
pub struct Running {
    pub app: Arc<App>,
    pub address: SocketAddr,
    config_path: Option<PathBuf>,
    server: tokio::task::JoinHandle<usize>,
    stop_serving: CancellationToken,
    stop_sweeping: CancellationToken,
    tasks: TaskTracker,
    background: TaskTracker,
    heart: TaskTracker,
    stop_heart: CancellationToken,
}

/// What `start` is given.
pub struct Start {
    pub config: Config,
    /// Read again on `reload`.
    pub config_path: Option<PathBuf>,
    pub database_url: String,
    pub listen: SocketAddr,
    /// How long a PostgreSQL is waited for that is not up yet.
    pub database_wait: Duration,
    /// Whether a server that can lose acknowledged commits is accepted.
    pub allow_unsafe_durability: bool,
}

/// Checks everything that can be checked, then serves.
pub async fn start(start: Start) -> Result<Running, StartError> {
    let file = &start.config.file;
    let pool = Pool::open_within(&file.database.options(start.database_url), start.database_wait).await?;
    guard(&pool, file.database.prepared_statements, start.allow_unsafe_durability).await?;
    let faults = handler_faults(&pool, &start.config.kinds).await?;
    if !faults.is_empty() {
        return Err(StartError::Handlers { faults });
    }
    check_spool(&start.config, &file.limits.spool_dir)?;
    let listener = TcpListener::bind(start.listen)
        .await
        .map_err(|source| StartError::Listen {
            address: start.listen,
            source,
        })?;
    let address = listener.local_addr().map_err(|source| StartError::Listen {
        address: start.listen,
        source,
    })?;
    let app = assemble(pool, start.config);
    app.heartbeat.write(&app.pool).await?;
    Ok(run(app, listener, address, start.config_path))
}

/// Refuses a server that would lose acknowledged commits, a pooler that would break statements, an old schema.
async fn guard(pool: &Pool, prepared_statements: bool, allow_unsafe: bool) -> Result<(), StartError> {
    match pool.durability().await? {
        Some(unsafe_setting) if !allow_unsafe => return Err(unsafe_setting.into()),
        Some(unsafe_setting) => tracing::warn!(
            setting = unsafe_setting.setting,
            "serving although a crash of PostgreSQL can lose acknowledged receipts, as told"
        ),
        None => {}
    }
    if prepared_statements && !pool.keeps_named_statements().await? {
        return Err(StartError::NoNamedStatements);
    }
    let status = migrate::status(pool).await?;
    if !status.pending.is_empty() {
        return Err(StartError::NotMigrated {
            pending: status.pending,
        });
    }
    Ok(())
}

/// What is wrong with the handlers of these kinds, a line each.
pub async fn handler_faults(pool: &Pool, kinds: &Kinds) -> Result<Vec<String>, DatabaseError> {
    let limits = crate::postgres::session::Limits {
        lock: std::time::Duration::from_secs(2),
        statement: std::time::Duration::from_secs(5),
    };
    let mut session = pool.reader(limits).await?;
    let mut faults = Vec::new();
    for kind in kinds.iter() {
        if let Some(fault) = kind::handler_fault(&mut session, &kind.handler).await? {
            faults.push(format!("kinds.\"{}\": {fault}", kind.name));
        }
    }
    session.finish().await?;
    Ok(faults)
}

/// Whether large bodies could be kept in this directory, if there is anything they could be sent to.
pub fn check_spool(config: &Config, directory: &Path) -> Result<(), spool::Error> {
    match config.downstreams.iter().next() {
        Some(_) => spool::check(directory),
        None => Ok(()),
    }
}

fn assemble(pool: Pool, config: Config) -> Arc<App> {
    let Config {
        file,
        kinds,
        downstream_kinds,
        downstreams,
    } = config;
    let declared = Declared::new(downstreams, downstream_kinds);
    let instance = Uuid::now_v7();
    let metrics = Arc::new(Metrics::new());
    let replays = Arc::new(Replays::new(file.limits.replay_cache_bytes));
    let deliveries = Arc::new(Deliveries::default());
    let tasks = TaskTracker::new();
    // Half of what the workers leave: look-ups of keys and operations must never wait for slow handlers.
    let spare = (file.database.max_connections as usize).saturating_sub(file.database.apply_connections);
    let settings = apply::Settings {
        workers: file.database.apply_connections,
        largest_group: file.database.group_size,
        queue: file.limits.max_queued,
        alone: (spare / 2).max(1),
        group_lock: std::time::Duration::from_millis(250),
        group_statement: std::time::Duration::from_secs(2),
        duplicate_wait: file.limits.duplicate_wait,
        // PostgreSQL makes no longer text, so what is beyond is no limit.
        max_result_bytes: i32::try_from(file.limits.max_result_bytes).unwrap_or(i32::MAX),
    };
    let apply = Apply::start(
        pool.clone(),
        settings,
        instance,
        replays.clone(),
        metrics.clone(),
        tasks.clone(),
    );
    let perform = Perform::start(
        pool.clone(),
        replays.clone(),
        metrics.clone(),
        tasks.clone(),
        instance,
        perform::Settings {
            declared,
            queue: file.limits.max_queued,
            retention: file.retention.receipts,
        },
    );
    let intake = Arc::new(Intake {
        pool: pool.clone(),
        apply,
        replays,
        deliveries: deliveries.clone(),
        metrics: metrics.clone(),
        tasks,
        instance,
        kinds: RwLock::new(Arc::new(kinds)),
    });
    Arc::new(App {
        intake,
        perform,
        accounts: Accounts::new(pool.clone()),
        deliveries,
        pool,
        metrics,
        heartbeat: Arc::new(Heartbeat::new(instance, config::hostname(), file.recovery.lease)),
        limits: file.limits,
        recovery: recovery::Settings {
            heartbeat: file.recovery.heartbeat,
            lease: file.recovery.lease,
            sweep: file.recovery.sweep,
            purge: file.recovery.purge,
            tombstones: file.retention.tombstones,
        },
        stopping: AtomicBool::new(false),
    })
}

fn run(app: Arc<App>, listener: TcpListener, address: SocketAddr, config_path: Option<PathBuf>) -> Running {
    let (stop_serving, stop_sweeping, stop_heart) = (
        CancellationToken::new(),
        CancellationToken::new(),
        CancellationToken::new(),
    );
    let (background, heart) = (TaskTracker::new(), TaskTracker::new());
    let settings = app.recovery;
    background.spawn(recovery::keep_sweeping(
        app.intake.clone(),
        app.perform.clone(),
        app.heartbeat.clone(),
        settings,
        stop_sweeping.clone(),
    ));
    background.spawn(recovery::keep_purging(
        app.pool.clone(),
        app.metrics.clone(),
        settings,
        stop_sweeping.clone(),
    ));
    background.spawn(
        app.deliveries
            .clone()
            .write_regularly(app.pool.clone(), stop_heart.clone()),
    );
    heart.spawn(recovery::keep_heartbeat(
        app.intake.clone(),
        app.heartbeat.clone(),
        settings.heartbeat,
        stop_heart.clone(),
    ));
    let server = heart.spawn(http::server::serve(
        listener,
        http::router(app.clone()),
        app.limits.clone(),
        TaskTracker::new(),
        stop_serving.clone(),
    ));
    Running {
        tasks: app.intake.tasks.clone(),
        app,
        address,
        config_path,
        server,
        stop_serving,
        stop_sweeping,
        background,
        heart,
        stop_heart,
    }
}

/// What a stopping process left behind.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Left {
    /// Connections whose requests were cut off.
    pub connections: usize,
    /// Operations still running; their transactions roll back, and their ids stay free or are taken over.
    pub operations: usize,
}

impl Running {
    /// Reads the configuration again, puts its kinds and downstreams in place, and says how many there are. A file that is
    /// not valid, or names a handler that cannot be called, changes nothing.
    pub async fn reload(&self) -> Result<(usize, usize), ReloadError> {
        let Some(path) = &self.config_path else {
            return Ok((0, 0));
        };
        let config = config::load(path)?;
        let faults = handler_faults(&self.app.pool, &config.kinds).await?;
        if !faults.is_empty() {
            return Err(ReloadError::Handlers { faults });
        }
        check_spool(&config, &self.app.limits.spool_dir)?;
        let kinds = config.kinds.iter().count() + config.downstream_kinds.iter().count();
        let downstreams = config.downstreams.iter().count();
        self.app.intake.replace_kinds(config.kinds);
        let declared = Declared::new(config.downstreams, config.downstream_kinds);
        self.app.perform.replace(declared);
        Ok((kinds, downstreams))
    }

    /// Stops accepting, finishes what has begun within the drain limit, writes what was counted, and says what was left.
    pub async fn stop(self) -> Left {
        self.app.stopping.store(true, Ordering::Relaxed);
        let until = Instant::now() + self.app.limits.drain;
        self.stop_sweeping.cancel();
        self.stop_serving.cancel();
        let connections = self.server.await.unwrap_or(0);
        self.app.intake.apply.close();
        self.app.perform.close();
        self.tasks.close();
        let operations = match tokio::time::timeout_at(until, self.tasks.wait()).await {
            Ok(()) => 0,
            Err(_) => self.app.intake.apply.running_alone() + self.app.intake.apply.queued(),
        };
        let _ = tokio::time::timeout_at(until.max(Instant::now() + CLOSING), self.app.perform.finish()).await;
        if !self.app.perform.outbound.close(CLOSING).await {
            tracing::debug!("connections to downstreams end with the process");
        }
        self.stop_heart.cancel();
        self.background.close();
        self.background.wait().await;
        self.heart.close();
        self.heart.wait().await;
        // It would wait for the connections of what is left; those close with the process.
        let _ = tokio::time::timeout(CLOSING, self.app.pool.close()).await;
        Left {
            connections,
            operations,
        }
    }
}

/// Why a reload changed nothing.
#[derive(Debug, thiserror::Error)]
pub enum ReloadError {
    #[error(transparent)]
    Config(#[from] config::Error),
    #[error(transparent)]
    Spool(#[from] spool::Error),
    #[error(transparent)]
    Database(#[from] DatabaseError),
    #[error("the configuration names handlers that cannot be called:\n{}", faults.join("\n"))]
    Handlers { faults: Vec<String> },
}
