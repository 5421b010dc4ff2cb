//! `opledger dev`: everything at once, to try things out: a private PostgreSQL, the schema, an example business, a tenant
//! with one key per role, and the service.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::Duration;

use anyhow::Context;
use serde::{Deserialize, Serialize};

use super::{serve, shop};
use crate::app::{self, Running};
use crate::config::{self, Database};
use crate::ledger::key::{self, NewKey, Role, Secret};
use crate::ledger::tenant::{self, Tenant};
use crate::postgres::cluster::{Cluster, Options};
use crate::postgres::migrate;
use crate::postgres::pool::Pool;
use crate::postgres::session::Limits;
use crate::sandbox;

const DATABASE: &str = "ledger";
const SERVICE_ROLE: &str = "opledger";
const TENANT: &str = "demo";

#[derive(Debug, clap::Args)]
#[command(after_help = "\
Examples:
  opledger dev                                keeps its data in .opledger; started again, it finds it
  opledger dev --ephemeral --listen 127.0.0.1:0 --json
                                              for scripts: one JSON line on stdout when ready, nothing kept

PostgreSQL 15 or later must be installed; it is started without TCP in the directory, and stops with this program.")]
pub struct Args {
    /// Directory of the private PostgreSQL
    #[arg(long, default_value = ".opledger", value_name = "DIR")]
    dir: PathBuf,
    /// Use a temporary directory and remove it at the end
    #[arg(long, conflicts_with = "dir")]
    ephemeral: bool,
    /// Address and port to listen on; port 0 takes a free one
    #[arg(long, default_value = "127.0.0.1:8080", value_name = "ADDRESS")]
    listen: SocketAddr,
    /// Address of the sandbox, a small API to try the proxy against [default: 127.0.0.1:8090, or a free port]
    #[arg(long, value_name = "ADDRESS")]
    sandbox_listen: Option<SocketAddr>,
    /// Accounts of the example business
    #[arg(long, default_value_t = 1_000, value_name = "N", value_parser = clap::value_parser!(u32).range(1..=10_000_000))]
    accounts: u32,
    /// Configuration to serve instead of the example's
    #[arg(long, value_name = "FILE")]
    config: Option<PathBuf>,
    /// Print exactly one JSON line on stdout when ready
    #[arg(long)]
    json: bool,
}

/// What is printed when everything is ready.
#[derive(Serialize)]
struct Ready {
    url: String,
    tenant: &'static str,
    keys: Keys,
    /// The owner's address, for looking at the tables with psql; the service itself runs under a role that owns nothing.
    database_url: String,
    /// The sandbox: what the downstreams sandbox-key, -conditional, -lookup and -none lead to.
    sandbox_url: String,
    pid: u32,
}

impl Ready {
    fn key(&self, role: &str) -> &str {
        self.keys.get(role).map_or("", String::as_str)
    }
}

/// One key per role.
type Keys = BTreeMap<String, String>;

pub async fn run(args: Args) -> anyhow::Result<ExitCode> {
    let mut options = match args.ephemeral {
        true => Options::ephemeral(temporary_directory()?),
        false => Options::kept(std::path::absolute(&args.dir).context("cannot make the directory's path absolute")?),
    };
    options.bin_dir = config::postgres_programs();
    options.search_path = config::search_path();
    // Listening for signals comes first: one that arrives while PostgreSQL starts must still stop it.
    let mut signals = serve::Signals::listen()?;
    tracing::info!(directory = %options.dir.display(), "starting a private PostgreSQL");
    let mut cluster = Cluster::start(&options)?;
    let sandbox = start_sandbox(args.sandbox_listen).await?;
    let started = tokio::select! {
        started = begin(&args, &options.dir, &cluster, sandbox.address) => Some(started?),
        () = signals.told_to_stop() => None,
    };
    if let Some((running, keys, config)) = started {
        announce(&args, &running, keys, &config, &cluster, sandbox.address)?;
        watch(&running, &mut signals, &mut cluster).await;
        serve::stop(running).await;
    }
    sandbox.stop().await;
    cluster.stop()?;
    if args.ephemeral {
        std::fs::remove_dir_all(&options.dir).with_context(|| format!("cannot remove {}", options.dir.display()))?;
    }
    Ok(ExitCode::SUCCESS)
}

/// Where it was told to listen; else where its examples expect it, or anywhere.
async fn start_sandbox(listen: Option<SocketAddr>) -> anyhow::Result<sandbox::Running> {
    let at = async |listen| {
        sandbox::start(sandbox::Settings {
            listen,
            ..sandbox::Settings::default()
        })
        .await
    };
    if let Some(listen) = listen {
        return at(listen)
            .await
            .with_context(|| format!("cannot listen on {listen} for the sandbox"));
    }
    match at(SocketAddr::from(([127, 0, 0, 1], 8090))).await {
        Ok(sandbox) => Ok(sandbox),
        Err(_) => at(SocketAddr::from(([127, 0, 0, 1], 0)))
            .await
            .context("cannot listen for the sandbox"),
    }
}

async fn begin(
    args: &Args,
    directory: &Path,
    cluster: &Cluster,
    sandbox: SocketAddr,
) -> anyhow::Result<(Running, Keys, PathBuf)> {
    create_database(cluster).await?;
    let owner = open(cluster.url(DATABASE)).await?;
    migrate::run(&owner, Some(SERVICE_ROLE)).await?;
    let tenant: Tenant = TENANT.parse()?;
    let limits = Limits {
        lock: Duration::from_secs(10),
        statement: Duration::from_secs(600),
    };
    let mut session = owner.transaction(limits).await?;
    shop::load(&mut session, TENANT, args.accounts).await?;
    tenant::ensure(&mut session, &tenant).await?;
    let keys = keys(&mut session, &tenant, &directory.join("keys.json")).await?;
    session.commit().await?;
    drop(session);
    owner.close().await;
    let config_path = match &args.config {
        Some(path) => path.clone(),
        None => {
            shop::write_config(&directory.join("shop"), sandbox).context("cannot write the example's configuration")?
        }
    };
    let start = app::Start {
        config: config::load(&config_path)?,
        config_path: Some(config_path.clone()),
        database_url: cluster.url_as(SERVICE_ROLE, DATABASE),
        listen: args.listen,
        database_wait: Duration::ZERO,
        allow_unsafe_durability: false,
    };
    Ok((app::start(start).await?, keys, config_path))
}

async fn create_database(cluster: &Cluster) -> anyhow::Result<()> {
    let pool = open(cluster.url("postgres")).await?;
    let mut session = pool.session().await?;
    for (object, exists, create) in [
        (
            "database",
            "select 1 from pg_database where datname = 'ledger'",
            "create database ledger",
        ),
        (
            "role",
            "select 1 from pg_roles where rolname = 'opledger'",
            "create role opledger login",
        ),
    ] {
        let found = sqlx::raw_sql(exists).fetch_optional(session.connection()).await?;
        if found.is_none() {
            sqlx::raw_sql(create)
                .execute(session.connection())
                .await
                .with_context(|| format!("cannot create the {object}"))?;
        }
    }
    drop(session);
    pool.close().await;
    Ok(())
}

async fn open(url: String) -> anyhow::Result<Pool> {
    let settings = Database {
        max_connections: 1,
        ..Database::default()
    };
    Ok(Pool::open(&settings.options(url)).await?)
}

/// The keys of an earlier start if they still work, else new ones, kept in a file that only its owner reads.
async fn keys(session: &mut crate::postgres::session::Session, tenant: &Tenant, path: &Path) -> anyhow::Result<Keys> {
    if let Some(keys) = kept_keys(session, path).await? {
        return Ok(keys);
    }
    let mut keys = Keys::new();
    for role in Role::ALL {
        let secret = Secret::generate(tenant).map_err(|error| anyhow::anyhow!("no randomness for a key: {error}"))?;
        key::create(
            session,
            &secret,
            &NewKey {
                role,
                label: format!("dev {}", role.as_str()),
                kinds: None,
            },
        )
        .await?;
        keys.insert(role.as_str().to_owned(), secret.reveal().to_owned());
    }
    write_privately(path, &serde_json::to_vec_pretty(&keys)?).context("cannot keep the keys")?;
    Ok(keys)
}

async fn kept_keys(session: &mut crate::postgres::session::Session, path: &Path) -> anyhow::Result<Option<Keys>> {
    #[derive(Deserialize)]
    #[serde(transparent)]
    struct File(Keys);
    let Ok(text) = std::fs::read(path) else { return Ok(None) };
    let Ok(File(keys)) = serde_json::from_slice(&text) else {
        return Ok(None);
    };
    for role in Role::ALL {
        let Some(secret) = keys.get(role.as_str()).and_then(|text| Secret::parse(text)) else {
            return Ok(None);
        };
        if key::authenticate(session, &secret)
            .await?
            .is_none_or(|caller| caller.role != role)
        {
            return Ok(None);
        }
    }
    Ok(Some(keys))
}

fn write_privately(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    use std::io::Write;
    use std::os::unix::fs::OpenOptionsExt;
    let unfinished = path.with_extension("json.new");
    let mut file = std::fs::OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&unfinished)?;
    file.write_all(bytes)?;
    file.sync_all()?;
    std::fs::rename(unfinished, path)
}

fn announce(
    args: &Args,
    running: &Running,
    keys: Keys,
    config: &Path,
    cluster: &Cluster,
    sandbox: SocketAddr,
) -> anyhow::Result<()> {
    let ready = Ready {
        url: format!("http://{}", running.address),
        tenant: TENANT,
        keys,
        database_url: cluster.url(DATABASE),
        sandbox_url: format!("http://{sandbox}"),
        pid: std::process::id(),
    };
    if args.json {
        println!("{}", serde_json::to_string(&ready)?);
    } else {
        let stays = if args.ephemeral {
            "all data goes with it"
        } else {
            "the data stays"
        };
        let example = match &args.config {
            None => shop_example(&ready),
            Some(_) => own_example(&ready, config, running),
        };
        print!("{}", greeting(&ready, &example, config, stays));
    }
    Ok(())
}

/// What a file of one's own can be tried with.
fn own_example(ready: &Ready, path: &Path, running: &Running) -> String {
    let (url, agent) = (&ready.url, ready.key("agent"));
    let mut text = format!(
        "opledger is ready at {url}, with {} and the tenant \"{}\".\n",
        path.display(),
        ready.tenant
    );
    let (handled, forwarded) = (running.app.intake.kinds(), running.app.perform.kinds());
    let kinds: Vec<_> = handled
        .iter()
        .map(|kind| kind.name.clone())
        .chain(forwarded.iter().map(|kind| kind.name.clone()))
        .collect();
    let downstreams = running.app.perform.downstreams();
    let downstreams: Vec<_> = downstreams.iter().map(|downstream| downstream.name.clone()).collect();
    if let Some(kind) = kinds.first() {
        text.push_str(&format!(
            r#"
Kinds: {}. Submit an operation, with a payload of your own; sent again, it is answered and not done again:

  curl -sS {url}/v1/operations -H 'Authorization: Bearer {agent}' -H 'Content-Type: application/json' \
    -H 'Idempotency-Key: demo:intent-1' -d '{{"kind":"{kind}","payload":{{}}}}'
"#,
            kinds.join(", "),
        ));
    }
    if let Some(downstream) = downstreams.first() {
        text.push_str(&format!(
            r#"
Downstreams: {}. Send a request through the proxy, with a path and a body that it knows; sent again, it is answered
and not forwarded again:

  curl -sS -i {url}/v1/proxy/{downstream}/PATH -H 'Authorization: Bearer {agent}' -H 'Content-Type: application/json' \
    -H 'Idempotency-Key: demo:intent-2' -d '{{}}'
"#,
            downstreams.join(", "),
        ));
    }
    text
}

fn greeting(ready: &Ready, example: &str, config: &Path, stays: &str) -> String {
    let keys: String = ready
        .keys
        .iter()
        .map(|(role, key)| format!("  {role:<9} {key}\n"))
        .collect();
    format!(
        r#"
{example}
Keys:
{keys}
Tables: psql '{database}'
What nobody knows the outcome of: OPLEDGER_API_KEY={operator} opledger unknowns --url {url}
What is wrong, if something is: DATABASE_URL='{database}' opledger doctor --config {config}
Stop with Ctrl-C; {stays}.
"#,
        url = ready.url,
        database = ready.database_url,
        operator = ready.key("operator"),
        config = config.display(),
    )
}

fn shop_example(ready: &Ready) -> String {
    let (url, agent) = (&ready.url, ready.key("agent"));
    format!(
        r#"opledger is ready at {url}, with the example shop and the tenant "{tenant}".

Pay order 1001's customer 5.00 back:

  curl -sS {url}/v1/operations -H 'Authorization: Bearer {agent}' -H 'Content-Type: application/json' \
    -H 'Idempotency-Key: demo:order-1001:refund:rev-1' -d '{{"kind":"order.refund","payload":{{"order_id":"1001","amount":500}}}}'

Send that again: the same bytes come back, and no second refund is made. Send it altered: it is refused.

  curl -sS {url}/v1/operations -H 'Authorization: Bearer {agent}' -H 'Content-Type: application/json' \
    -H 'Idempotency-Key: demo:order-1001:refund:rev-1' -d '{{"kind":"order.refund","payload":{{"order_id":"1001","amount":501}}}}'

See what happened: deliveries, attempts, effects, history.

  curl -sS {url}/v1/operations/demo:order-1001:refund:rev-1 -H 'Authorization: Bearer {agent}'

Send a request through the proxy to an API that acts and then hangs up, so that nobody can know:

  curl -sS {url}/v1/proxy/sandbox-none/charges -H 'Authorization: Bearer {agent}' -H 'Content-Type: application/json' \
    -H 'Idempotency-Key: demo:order-1001:charge:rev-1' -H 'Sandbox-Fault: drop-after, times=1' -d '{{"amount":500,"ref":"order-1001"}}'

It is unknown, and is not sent again. Through sandbox-key, which remembers keys, the same settles by itself.
The sandbox ({sandbox}) counts for itself: curl '{sandbox}/_effects?ref=order-1001'
"#,
        tenant = ready.tenant,
        sandbox = ready.sandbox_url,
    )
}

/// Serves until told to stop, and brings PostgreSQL back if it is killed, as people do to see what happens.
async fn watch(running: &Running, signals: &mut serve::Signals, cluster: &mut Cluster) {
    let mut stopped = std::pin::pin!(serve::until_stopped(running, signals));
    loop {
        tokio::select! {
            () = &mut stopped => return,
            () = tokio::time::sleep(Duration::from_millis(200)) => {}
        }
        if !cluster.is_running() {
            tracing::warn!("PostgreSQL has gone away; starting it again");
            // On this thread, which lives as long as the process: PostgreSQL is bound to the thread that starts it.
            match cluster.restart() {
                Ok(()) => tracing::info!("PostgreSQL is back"),
                Err(error) => tracing::error!(error = %error, "PostgreSQL does not start"),
            }
        }
    }
}

fn temporary_directory() -> anyhow::Result<PathBuf> {
    let name = format!(
        "opledger-{}-{:08x}",
        std::process::id(),
        getrandom::u32().unwrap_or_default()
    );
    let path = config::temporary_directory().join(name);
    std::fs::create_dir(&path).with_context(|| format!("cannot make {}", path.display()))?;
    Ok(path)
}
