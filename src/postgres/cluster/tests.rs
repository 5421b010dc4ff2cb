//! The private server against this machine's PostgreSQL, as root and as anybody else.

use std::fs::{self, Permissions};
use std::io::{BufRead as _, BufReader, Write as _};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use nix::sys::signal::{Signal, kill};
use nix::unistd::{Pid, geteuid};
use tempfile::TempDir;

use super::*;

/// Open to the account that root's server runs as.
fn scratch() -> TempDir {
    tempfile::Builder::new()
        .prefix("opledger-")
        .permissions(Permissions::from_mode(0o711))
        .tempdir()
        .unwrap()
}

fn start(dir: &Path) -> Cluster {
    Cluster::start(&Options::kept(dir)).unwrap()
}

fn query(cluster: &Cluster, sql: &str) -> String {
    let output = Command::new(cluster.bin_dir().join("psql"))
        .args([
            "-X",
            "-At",
            "-v",
            "ON_ERROR_STOP=1",
            "-c",
            sql,
            &cluster.url("postgres"),
        ])
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    String::from_utf8(output.stdout).unwrap().trim().to_owned()
}

fn refusal(options: &Options) -> String {
    Cluster::start(options).unwrap_err().to_string()
}

fn is_running(pid: u32) -> bool {
    fs::read(format!("/proc/{pid}/cmdline")).is_ok_and(|arguments| !arguments.is_empty())
}

fn wait_until(what: &str, holds: impl Fn() -> bool) {
    let give_up_at = Instant::now() + Duration::from_secs(10);
    while !holds() {
        assert!(Instant::now() < give_up_at, "still waiting until {what}");
        thread::sleep(Duration::from_millis(10));
    }
}

/// Every process that works for the data directory, sessions included.
fn servers_of(dir: &Path) -> Vec<u32> {
    let data = fs::canonicalize(dir).unwrap().join("data");
    let processes = fs::read_dir("/proc").unwrap().flatten();
    let pids = processes.filter_map(|entry| entry.file_name().to_str()?.parse().ok());
    pids.filter(|pid| fs::read_link(format!("/proc/{pid}/cwd")).is_ok_and(|cwd| cwd == data))
        .collect()
}

/// Programs that only pretend. A shell writes them: a file that this process holds open for writing
/// while another test forks could not be executed.
fn pretend(bin_dir: &Path, postgres: &str, initdb: &str) {
    fs::create_dir_all(bin_dir).unwrap();
    for (name, body) in [("postgres", postgres), ("initdb", initdb)] {
        let script = format!("#!/bin/sh\n{body}\n");
        let write = Command::new("/bin/sh")
            .args(["-c", r#"printf '%s' "$1" > "$2" && chmod 755 "$2""#, "sh", &script])
            .arg(bin_dir.join(name))
            .status();
        assert!(write.unwrap().success());
    }
}

#[test]
fn data_stays_over_a_stop_and_a_start() {
    let dir = scratch();
    let begun = Instant::now();
    let cluster = start(dir.path());
    query(&cluster, "select 1");
    eprintln!("first start to first answer: {:?}", begun.elapsed());
    query(&cluster, "create table kept as select 7 as n");

    let begun = Instant::now();
    cluster.stop().unwrap();
    eprintln!("stop: {:?}", begun.elapsed());
    assert_eq!(servers_of(dir.path()), Vec::<u32>::new());

    let begun = Instant::now();
    let cluster = start(dir.path());
    assert_eq!(query(&cluster, "select n from kept"), "7");
    eprintln!("later start to first answer: {:?}", begun.elapsed());
}

#[test]
fn the_server_is_durable_private_and_what_we_asked_for() {
    let dir = scratch();
    let settings = [("work_mem", "5MB"), ("fsync", "off"), ("listen_addresses", "*")];
    let settings = settings
        .map(|(name, value)| (name.to_owned(), value.to_owned()))
        .to_vec();
    let cluster = Cluster::start(&Options {
        settings,
        ..Options::kept(dir.path().join("deep/down"))
    })
    .unwrap();

    let shown = |name: &str| query(&cluster, &format!("show {name}"));
    for on in ["fsync", "full_page_writes", "synchronous_commit", "data_checksums"] {
        assert_eq!(shown(on), "on", "{on}");
    }
    assert_eq!(shown("listen_addresses"), "");
    assert_eq!(shown("work_mem"), "5MB");
    assert_eq!(shown("server_encoding"), "UTF8");
    assert_eq!(shown("lc_collate"), "C");
    assert_eq!(shown("server_version").split(' ').next(), Some(cluster.version()));
    let mode = fs::metadata(cluster.socket_dir()).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o700);
}

#[test]
fn sqlx_reads_the_url_as_psql_does() {
    use sqlx::Connection as _;

    let dir = scratch();
    let cluster = start(&dir.path().join("with space & 100% 'quotes\""));
    query(&cluster, r#"create role "an agent" login"#);
    query(&cluster, r#"create database "a/b c?""#);
    let runtime = tokio::runtime::Builder::new_current_thread()
        .enable_all()
        .build()
        .unwrap();
    let (role, database): (String, String) = runtime.block_on(async {
        let mut connection = sqlx::PgConnection::connect(&cluster.url_as("an agent", "a/b c?"))
            .await
            .unwrap();
        sqlx::query_as("select current_user::text, current_database()::text")
            .fetch_one(&mut connection)
            .await
            .unwrap()
    });
    assert_eq!((role.as_str(), database.as_str()), ("an agent", "a/b c?"));
}

#[test]
fn an_ephemeral_cluster_takes_its_data_with_it() {
    let dir = scratch();
    let home = dir.path().join("gone");
    let cluster = Cluster::start(&Options::ephemeral(&home)).unwrap();
    assert_eq!(query(&cluster, "show fsync"), "on");
    drop(cluster);
    assert!(!home.exists());
}

#[test]
fn committed_rows_survive_a_killed_postmaster() {
    let dir = scratch();
    let mut cluster = start(dir.path());
    query(&cluster, "create table ledger (n int)");
    for n in 1..=5 {
        query(&cluster, &format!("insert into ledger values ({n})"));
        // A session in the middle of a statement keeps the shared memory for a while.
        let mut busy = Command::new(cluster.bin_dir().join("psql"))
            .args(["-X", "-c", "select pg_sleep(0.3)", &cluster.url("postgres")])
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let before = cluster.pid();
        cluster.kill();
        cluster.restart().unwrap();
        assert_ne!(cluster.pid(), before);
        assert_eq!(query(&cluster, "select count(*) from ledger"), n.to_string());
        let _ = busy.wait();
    }
    cluster.stop().unwrap();
}

#[test]
fn a_server_that_died_by_itself_is_reported_by_stop() {
    let dir = scratch();
    let cluster = start(dir.path());
    let pid = Pid::from_raw(i32::try_from(cluster.pid()).unwrap());
    kill(pid, Signal::SIGKILL).unwrap();
    wait_until("the server is gone", || !is_running(cluster.pid()));
    assert!(matches!(cluster.stop(), Err(Error::NotStopped { .. })));
}

#[test]
fn of_three_racing_starters_one_wins_and_the_others_learn_who() {
    let dir = scratch();
    let racers: Vec<_> = (0..3)
        .map(|_| {
            let dir = dir.path().to_owned();
            // The thread hands its cluster over and ends, and so does its server; only the lock is asked about here.
            thread::spawn(move || Cluster::start(&Options::kept(dir)))
        })
        .collect();
    let results: Vec<_> = racers.into_iter().map(|racer| racer.join().unwrap()).collect();
    let refusals: Vec<_> = results
        .iter()
        .filter_map(|result| result.as_ref().err())
        .map(Error::to_string)
        .collect();
    assert_eq!(refusals.len(), 2, "{refusals:?}");
    for message in refusals {
        assert!(
            message.contains(&format!("process {}", std::process::id())),
            "{message}"
        );
        assert!(message.contains(dir.path().to_str().unwrap()), "{message}");
    }
}

#[test]
fn an_interrupted_initdb_leaves_nothing_that_counts() {
    let dir = scratch();
    let half = dir.path().join("init-1234-5678");
    fs::create_dir_all(half.join("base")).unwrap();
    fs::write(half.join("PG_VERSION"), "15\n").unwrap();
    let cluster = start(dir.path());
    assert_eq!(query(&cluster, "select 1"), "1");
    assert!(!half.exists());
}

/// Not a test of its own: the process that the next test kills. It reads a directory, starts a
/// server there and never stops it.
#[test]
#[ignore = "a helper process of a_killed_starter_leaves_no_server"]
fn a_starter_to_be_killed() {
    let mut dir = String::new();
    std::io::stdin().read_line(&mut dir).unwrap();
    let cluster = start(Path::new(dir.trim()));
    println!("\nserver {}", cluster.pid());
    thread::sleep(Duration::from_mins(1));
}

struct Starter(std::process::Child);

impl Starter {
    fn in_directory(dir: &Path) -> Self {
        let mut child = Command::new(std::env::current_exe().unwrap())
            .args([
                "a_starter_to_be_killed",
                "--ignored",
                "--nocapture",
                "--test-threads",
                "1",
            ])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        writeln!(child.stdin.take().unwrap(), "{}", dir.display()).unwrap();
        Self(child)
    }

    fn server(&mut self) -> u32 {
        let lines = BufReader::new(self.0.stdout.take().unwrap()).lines();
        lines
            .map_while(Result::ok)
            .find_map(|line| line.strip_prefix("server ")?.parse().ok())
            .unwrap()
    }

    fn kill(mut self) {
        self.0.kill().unwrap();
        self.0.wait().unwrap();
    }
}

#[test]
#[cfg(target_os = "linux")]
fn a_killed_starter_leaves_no_server() {
    let dir = scratch();
    let mut starter = Starter::in_directory(dir.path());
    let server = starter.server();
    assert!(is_running(server));
    starter.kill();
    wait_until("the server is gone", || servers_of(dir.path()).is_empty());
    let cluster = start(dir.path());
    assert_eq!(query(&cluster, "select 1"), "1");
}

#[test]
fn a_start_right_after_its_predecessor_was_killed_succeeds() {
    let dir = scratch();
    for _ in 0..3 {
        let mut starter = Starter::in_directory(dir.path());
        starter.server();
        starter.kill();
        start(dir.path()).stop().unwrap();
    }
}

#[test]
fn a_starter_killed_at_any_moment_of_its_first_start_poisons_nothing() {
    for wait_ms in [0, 50, 150, 300, 450, 600] {
        let dir = scratch();
        let starter = Starter::in_directory(dir.path());
        thread::sleep(Duration::from_millis(wait_ms));
        starter.kill();
        let cluster = start(dir.path());
        assert_eq!(query(&cluster, "select 1"), "1");
    }
}

#[test]
fn an_orphaned_server_is_stopped_by_the_next_start() {
    let dir = scratch();
    let first = start(dir.path());
    let orphan = first.pid();
    // As where the kernel tells the server nothing: its starter's lock is gone, and it runs on.
    fs::remove_file(dir.path().join("lock")).unwrap();
    let cluster = start(dir.path());
    assert!(!is_running(orphan));
    assert_eq!(query(&cluster, "select 1"), "1");
}

#[test]
fn a_long_path_moves_the_socket_to_a_short_one_for_the_time_being() {
    let dir = scratch();
    let long = dir.path().join("x".repeat(100));
    let mut cluster = start(&long);
    let socket = cluster.socket_dir().to_owned();
    assert!(socket.starts_with("/tmp"), "{}", socket.display());
    assert_eq!(query(&cluster, "select 1"), "1");
    cluster.restart().unwrap();
    assert_eq!(query(&cluster, "select 1"), "1");
    cluster.kill();
    drop(cluster);
    assert!(!socket.exists());
}

#[test]
fn a_directory_in_tmp_that_is_not_ours_is_not_used() {
    let dir = scratch();
    let long = dir.path().join("x".repeat(100));
    let socket = start(&long).socket_dir().to_owned();
    let elsewhere = dir.path().join(".s.PGSQL.5432");
    fs::write(&elsewhere, "").unwrap();
    std::os::unix::fs::symlink(dir.path(), &socket).unwrap();
    let message = refusal(&Options::kept(&long));
    assert!(elsewhere.exists());
    fs::remove_file(&socket).unwrap();
    assert!(message.contains(socket.to_str().unwrap()), "{message}");
}

#[test]
fn a_place_without_the_programs_is_named() {
    let dir = scratch();
    let options = Options {
        bin_dir: Some("/nowhere".into()),
        ..Options::kept(dir.path())
    };
    assert!(refusal(&options).starts_with("/nowhere does not hold both initdb and postgres"));
}

#[test]
fn links_on_the_path_lead_to_the_directory_behind_them() {
    let dir = scratch();
    let cluster = start(&dir.path().join("one"));
    let bin_dir = cluster.bin_dir().to_owned();
    let links = dir.path().join("links");
    fs::create_dir(&links).unwrap();
    std::os::unix::fs::symlink(bin_dir.join("postgres"), links.join("postgres")).unwrap();
    let options = Options {
        search_path: Some(links.into()),
        ..Options::kept(dir.path().join("two"))
    };
    assert_eq!(Cluster::start(&options).unwrap().bin_dir(), bin_dir);
}

#[test]
fn an_old_server_is_refused() {
    let dir = scratch();
    pretend(&dir.path().join("bin"), "echo 'postgres (PostgreSQL) 13.9'", "exit 1");
    let options = Options {
        bin_dir: Some(dir.path().join("bin")),
        ..Options::kept(dir.path().join("home"))
    };
    let message = refusal(&options);
    assert!(
        message.contains("PostgreSQL 13.9") && message.contains("too old"),
        "{message}"
    );
}

#[test]
fn data_of_another_major_version_is_refused() {
    let dir = scratch();
    start(dir.path()).stop().unwrap();
    let bin_dir = dir.path().join("bin");
    pretend(&bin_dir, "echo 'postgres (PostgreSQL) 99.1'", "exit 1");
    let message = refusal(&Options {
        bin_dir: Some(bin_dir),
        ..Options::kept(dir.path())
    });
    assert!(message.contains("99.1") && message.contains("pg_upgrade"), "{message}");
}

#[test]
fn a_failed_initdb_is_told_in_its_own_words_and_leaves_nothing() {
    let dir = scratch();
    let bin_dir = dir.path().join("bin");
    pretend(
        &bin_dir,
        "echo 'postgres (PostgreSQL) 16.1'",
        "echo 'initdb: error: No space left on device' >&2; exit 1",
    );
    let home = dir.path().join("home");
    let message = refusal(&Options {
        bin_dir: Some(bin_dir),
        ..Options::kept(&home)
    });
    assert!(message.ends_with("No space left on device"), "{message}");
    let left: Vec<_> = fs::read_dir(home)
        .unwrap()
        .map(|entry| entry.unwrap().file_name())
        .collect();
    assert_eq!(left, ["lock"]);
}

#[test]
fn a_server_that_refuses_a_setting_says_so_at_once() {
    let dir = scratch();
    let settings = vec![("work_mem".into(), "plenty".into())];
    let begun = Instant::now();
    let message = refusal(&Options {
        settings,
        ..Options::kept(dir.path())
    });
    assert!(message.contains("work_mem"), "{message}");
    assert!(begun.elapsed() < Duration::from_secs(10));
}

#[test]
fn the_log_is_set_aside_when_it_has_grown() {
    let dir = scratch();
    fs::write(dir.path().join("postgres.log"), vec![b'x'; 11 * 1024 * 1024]).unwrap();
    let cluster = start(dir.path());
    assert!(fs::metadata(cluster.log()).unwrap().len() < 1024 * 1024);
    assert!(dir.path().join("postgres.log.1").exists());
}

#[test]
fn a_directory_that_the_dropped_user_cannot_reach_is_named() {
    if !geteuid().is_root() {
        // Nobody is dropped.
        return;
    }
    let closed = scratch();
    fs::set_permissions(closed.path(), Permissions::from_mode(0o700)).unwrap();
    let message = refusal(&Options::kept(closed.path().join("opledger")));
    let closed: PathBuf = fs::canonicalize(closed.path()).unwrap();
    assert!(
        message.contains(&format!("{} is closed to other users", closed.display())),
        "{message}"
    );
}

#[test]
fn a_data_directory_of_roots_is_refused() {
    if !geteuid().is_root() {
        return;
    }
    let dir = scratch();
    fs::create_dir(dir.path().join("data")).unwrap();
    let message = refusal(&Options::kept(dir.path()));
    assert!(
        message.contains("belongs to root") && message.contains("chown -R"),
        "{message}"
    );
}
