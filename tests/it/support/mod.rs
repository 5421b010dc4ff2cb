//! What every test stands on: one private PostgreSQL for the whole run, a database each, and the real service on a real
//! socket.
//!
//! `Ledger::start()` is the usual beginning: a fresh database with schema, example business and keys, and one service in
//! this process. `second()` adds another one on the same database. Tests that kill what they test run the program
//! itself (`process`).

pub mod bouncer;
pub mod client;
pub mod contract;
pub mod downstream;
pub mod handlers;
pub mod notes;
pub mod process;
pub mod proxy;
pub mod random;
pub mod terminal;
pub mod victim;
pub mod wire;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{OnceLock, mpsc};
use std::time::Duration;

use opledger::app::{self, Running};
use opledger::config;
use opledger::ledger::key::{self, NewKey, Role, Secret};
use opledger::ledger::tenant::{self, Tenant};
use opledger::postgres::cluster::{Cluster, Options};
use opledger::postgres::migrate;
use opledger::postgres::pool::{self, Pool};
use sqlx::PgPool;

pub use client::{Answer, Client};

/// The tenant that `Ledger::start` makes.
pub const TENANT: &str = "demo";

/// The database every test's own is copied from.
const TEMPLATE: &str = "template_ledger";

/// The run's cluster: how to reach its databases.
pub struct Shared {
    socket: PathBuf,
}

impl Shared {
    pub fn url(&self, role: &str, database: &str) -> String {
        let socket = self.socket.to_str().unwrap().replace('/', "%2F");
        format!("postgres:///{database}?host={socket}&port=5432&user={role}&sslmode=disable")
    }

    pub fn socket(&self) -> &PathBuf {
        &self.socket
    }
}

/// The cluster, started by the first test that asks.
pub fn shared() -> &'static Shared {
    static SHARED: OnceLock<Shared> = OnceLock::new();
    SHARED.get_or_init(|| {
        let (sender, receiver) = std::sync::mpsc::channel();
        // PostgreSQL is bound to the thread that starts it: this one lives as long as the run, and no test's would.
        std::thread::spawn(move || {
            let cluster = start_cluster("shared");
            let shared = Shared {
                socket: cluster.socket_dir().to_owned(),
            };
            sender.send(shared).unwrap();
            loop {
                std::thread::park();
            }
        });
        let shared = receiver.recv().expect("the run's PostgreSQL starts");
        std::thread::scope(|scope| scope.spawn(|| block_on(prepare_template(&shared))).join()).unwrap();
        shared
    })
}

/// A cluster of a test's own, for tests that kill it. Start it on a thread that outlives its use.
pub fn start_cluster(name: &str) -> Cluster {
    // Another PostgreSQL (OPLEDGER_PG_BIN) could not use this one's data.
    let programs = config::postgres_programs().unwrap_or_default();
    let other: String = programs
        .to_string_lossy()
        .chars()
        .filter(char::is_ascii_digit)
        .collect();
    // Another run at the same time has its own; the directories are kept, because starting one again is quick.
    for number in 1..=9 {
        let directory = PathBuf::from(env!("CARGO_TARGET_TMPDIR")).join(format!("postgres{other}-{name}-{number}"));
        let mut options = Options::kept(directory);
        options.search_path = config::search_path();
        options.bin_dir = config::postgres_programs();
        options.settings = vec![("max_connections".to_owned(), "400".to_owned())];
        match Cluster::start(&options) {
            Ok(cluster) => return cluster,
            Err(opledger::postgres::cluster::Error::Held { .. }) => {}
            Err(error) => panic!("the private PostgreSQL does not start: {error}"),
        }
    }
    panic!("nine runs at once are too many");
}

fn block_on<T>(future: impl Future<Output = T>) -> T {
    tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap()
        .block_on(future)
}

async fn prepare_template(shared: &Shared) {
    let maintenance = PgPool::connect(&shared.url("postgres", "postgres")).await.unwrap();
    let left: Vec<String> =
        sqlx::query_scalar("select datname from pg_database where datname like 't\\_%' or datname = $1")
            .bind(TEMPLATE)
            .fetch_all(&maintenance)
            .await
            .unwrap();
    for database in left {
        run(&maintenance, &format!("drop database \"{database}\" with (force)")).await;
    }
    prepare(&maintenance, TEMPLATE, &shared.url("postgres", TEMPLATE)).await;
    maintenance.close().await;
}

/// Makes a database with schema, example business and the role `opledger`, reached at `url` by its owner.
pub async fn prepare(maintenance: &PgPool, database: &str, url: &str) {
    run(maintenance, &format!("create database \"{database}\"")).await;
    let role: Option<i32> = sqlx::query_scalar("select 1 from pg_roles where rolname = 'opledger'")
        .fetch_optional(maintenance)
        .await
        .unwrap();
    if role.is_none() {
        run(maintenance, "create role opledger login").await;
    }
    let owner = open(url).await;
    migrate::run(&owner, Some("opledger")).await.unwrap();
    owner.close().await;
    let owner = PgPool::connect(url).await.unwrap();
    for sql in SHOP {
        run(&owner, sql).await;
    }
    owner.close().await;
}

const SHOP: [&str; 4] = [
    include_str!("../../../examples/shop/schema.sql"),
    include_str!("../../../examples/shop/functions.sql"),
    include_str!("../../../examples/shop/data.sql"),
    include_str!("../../../examples/shop/grants.sql"),
];

pub async fn run(pool: &PgPool, sql: &str) {
    sqlx::raw_sql(sqlx::AssertSqlSafe(sql.to_owned()))
        .execute(pool)
        .await
        .unwrap_or_else(|error| panic!("{sql}: {error}"));
}

/// Looks until it is so; panics when it takes longer than anything here may.
pub async fn until(what: &str, mut is_so: impl AsyncFnMut() -> bool) {
    let deadline = tokio::time::Instant::now() + Duration::from_secs(20);
    while !is_so().await {
        assert!(tokio::time::Instant::now() < deadline, "not within 20 s: {what}");
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
}

pub async fn open(url: &str) -> Pool {
    let options = pool::Options {
        url: url.to_owned(),
        max_connections: 2,
        acquire_timeout: Duration::from_secs(10),
        prepared_statements: true,
    };
    Pool::open(&options).await.unwrap()
}

/// How a test's service differs from the default; `config` is the text of an `opledger.toml`.
#[derive(Debug, Clone, Default)]
pub struct Setup {
    /// More lines for `[limits]`, `[retention]`, `[recovery]`, `[database]` and kinds.
    pub config: String,
    /// SQL that the owner runs before the service starts, e.g. a test's own handlers.
    pub sql: String,
}

/// A database of the test's own, with a service on it.
pub struct Ledger {
    pub database: String,
    pub service_url: String,
    pub owner_url: String,
    /// As the owner, to look at the tables.
    pub sql: PgPool,
    pub keys: BTreeMap<&'static str, String>,
    pub config_path: PathBuf,
    pub running: Running,
    // Removed with the test.
    _directory: tempfile::TempDir,
    _dropped: Dropped,
}

impl Ledger {
    pub async fn start() -> Self {
        Self::with(Setup::default()).await
    }

    pub async fn with(setup: Setup) -> Self {
        let database = Database::create().await;
        if !setup.sql.is_empty() {
            run(&database.sql, &setup.sql).await;
        }
        let keys = database.keys(TENANT).await;
        let (directory, config_path) = write_config(&setup.config);
        let running = serve(&config_path, &database.service_url).await;
        Self {
            database: database.name,
            service_url: database.service_url,
            owner_url: database.owner_url,
            sql: database.sql,
            keys,
            config_path,
            running,
            _directory: directory,
            _dropped: database.dropped,
        }
    }

    /// Another service on the same database, with caches and an instance of its own.
    pub async fn second(&self) -> Running {
        serve(&self.config_path, &self.service_url).await
    }

    /// A client of the first service with the agent's key.
    pub fn agent(&self) -> Client {
        self.client("agent")
    }

    pub fn client(&self, role: &str) -> Client {
        Client::new(self.running.address, &self.keys[role])
    }

    /// Keys of another tenant, which is made and seeded.
    pub async fn tenant(&self, name: &str) -> BTreeMap<&'static str, String> {
        make_keys(&self.owner_url, &self.sql, name).await
    }

    /// Balance of an account of the example business: the effect, counted where it happens.
    pub async fn balance(&self, account: &str) -> i64 {
        sqlx::query_scalar("select balance from shop.accounts where tenant_id = $1 and account = $2")
            .bind(TENANT)
            .bind(account)
            .fetch_one(&self.sql)
            .await
            .unwrap()
    }

    /// One number, for questions to the tables.
    pub async fn count(&self, sql: &'static str) -> i64 {
        sqlx::query_scalar(sql).fetch_one(&self.sql).await.unwrap()
    }
}

/// A database without a service.
pub struct Database {
    pub name: String,
    pub service_url: String,
    pub owner_url: String,
    pub sql: PgPool,
    pub dropped: Dropped,
}

/// Has a database dropped when its test has ended: those of all tests take gigabytes together.
pub struct Dropped(String);

impl Drop for Dropped {
    fn drop(&mut self) {
        static NAMES: OnceLock<mpsc::Sender<String>> = OnceLock::new();
        let names = NAMES.get_or_init(|| {
            let (sender, receiver) = mpsc::channel();
            // One after the other and behind everybody's back: each of them makes PostgreSQL write a checkpoint.
            std::thread::spawn(|| block_on(drop_all(receiver)));
            sender
        });
        // What is left when the run ends, the next one drops.
        let _ = names.send(std::mem::take(&mut self.0));
    }
}

async fn drop_all(names: mpsc::Receiver<String>) {
    let maintenance = PgPool::connect(&shared().url("postgres", "postgres")).await.unwrap();
    for name in names {
        let drop = sqlx::AssertSqlSafe(format!("drop database if exists \"{name}\" with (force)"));
        let _ = sqlx::raw_sql(drop).execute(&maintenance).await;
    }
}

impl Database {
    pub async fn create() -> Self {
        static NEXT: AtomicU32 = AtomicU32::new(1);
        let name = format!("t_{}_{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
        let shared = shared();
        let maintenance = PgPool::connect(&shared.url("postgres", "postgres")).await.unwrap();
        run(&maintenance, &format!("create database \"{name}\" template {TEMPLATE}")).await;
        maintenance.close().await;
        let owner_url = shared.url("postgres", &name);
        let sql = PgPool::connect(&owner_url).await.unwrap();
        Self {
            service_url: shared.url("opledger", &name),
            owner_url,
            sql,
            dropped: Dropped(name.clone()),
            name,
        }
    }

    /// One with nothing in it: no schema, no business.
    pub async fn empty() -> Self {
        let database = Self::create().await;
        database.sql.close().await;
        let maintenance = PgPool::connect(&shared().url("postgres", "postgres")).await.unwrap();
        run(
            &maintenance,
            &format!("drop database \"{}\" with (force)", database.name),
        )
        .await;
        run(&maintenance, &format!("create database \"{}\"", database.name)).await;
        maintenance.close().await;
        let sql = PgPool::connect(&database.owner_url).await.unwrap();
        Self { sql, ..database }
    }

    /// Gives a migrated database the example business.
    pub async fn add_shop(&self) {
        for sql in SHOP {
            run(&self.sql, sql).await;
        }
    }

    /// Makes a tenant with its share of the example business and one key per role.
    pub async fn keys(&self, tenant: &str) -> BTreeMap<&'static str, String> {
        make_keys(&self.owner_url, &self.sql, tenant).await
    }
}

pub async fn make_keys(owner_url: &str, sql: &PgPool, tenant: &str) -> BTreeMap<&'static str, String> {
    sqlx::query("select shop.seed($1, 100)")
        .bind(tenant)
        .execute(sql)
        .await
        .unwrap();
    let pool = open(owner_url).await;
    let mut session = pool.session().await.unwrap();
    let tenant: Tenant = tenant.parse().unwrap();
    tenant::ensure(&mut session, &tenant).await.unwrap();
    let mut keys = BTreeMap::new();
    for role in Role::ALL {
        let secret = Secret::generate(&tenant).unwrap();
        let new = NewKey {
            role,
            label: role.as_str().to_owned(),
            kinds: None,
        };
        key::create(&mut session, &secret, &new).await.unwrap();
        keys.insert(role.as_str(), secret.reveal().to_owned());
    }
    drop(session);
    pool.close().await;
    keys
}

/// The example's configuration with a test's own lines.
///
/// Tables of the example that the test's text names again are left out, so that it can replace them.
pub fn write_config(lines: &str) -> (tempfile::TempDir, PathBuf) {
    let directory = tempfile::tempdir().unwrap();
    let shop = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("examples/shop");
    let kinds: String = [
        "account.deposit:deposit",
        "account.transfer:transfer",
        "order.refund:refund",
        "ticket.update:update_ticket",
    ]
    .iter()
    .map(|pair| pair.split_once(':').unwrap())
    .filter(|(kind, _)| !lines.contains(&format!("[kinds.\"{kind}\"]")))
    .map(|(kind, handler)| {
        format!(
            "[kinds.\"{kind}\"]\nhandler = \"shop.{handler}\"\nschema = \"{}/schemas/{kind}.json\"\n",
            shop.display()
        )
    })
    .collect();
    let path = directory.path().join("opledger.toml");
    contract::note_kinds(lines);
    std::fs::write(&path, format!("{lines}\n{kinds}")).unwrap();
    (directory, path)
}

/// Starts a service in this process.
pub async fn serve(config_path: &Path, database_url: &str) -> Running {
    let start = app::Start {
        config: config::load(config_path).unwrap_or_else(|error| panic!("{error}")),
        config_path: Some(config_path.to_owned()),
        database_url: database_url.to_owned(),
        listen: "127.0.0.1:0".parse().unwrap(),
        database_wait: Duration::ZERO,
        allow_unsafe_durability: false,
    };
    app::start(start)
        .await
        .unwrap_or_else(|error| panic!("the service does not start: {error}"))
}
