//! What the server is told. It goes on the command line at each start, not into a file: there is
//! nothing to migrate in a directory that stays, and `alter system` cannot undo it.

use std::ffi::OsString;
use std::fs;
use std::os::unix::ffi::OsStringExt as _;

use super::account::Account;
use super::home::Home;
use super::locate::Installation;
use super::socket::{self, SocketDirectory};
use super::{Lifetime, Options};

const SMALL_MEMORY_KIB: u64 = 2 * 1024 * 1024;

/// Data safe, and nobody else near it. Last on the command line, so that these win.
const FIXED: &[(&str, &str)] = &[
    ("fsync", "on"),
    ("full_page_writes", "on"),
    ("synchronous_commit", "on"),
    ("listen_addresses", ""),
    ("unix_socket_permissions", "0700"),
    // `postgres.log` is its standard error; `%e` is how a start tells why it was refused.
    ("log_destination", "stderr"),
    ("logging_collector", "off"),
    ("log_line_prefix", "%m [%p] %e "),
];

/// For throughput, at no cost to durability.
const USUAL: &[(&str, &str)] = &[
    // Several pools of the service, its tests side by side, and a psql or two.
    ("max_connections", "200"),
    // After each checkpoint the first change to a page logs all of it: have few checkpoints. A
    // crash then replays more, seconds at most at these sizes.
    ("checkpoint_timeout", "15min"),
    // Short statements by index; compiling one takes longer than running it.
    ("jit", "off"),
    // One line each quarter of an hour that nobody reads.
    ("log_checkpoints", "off"),
];

pub fn arguments(
    options: &Options,
    home: &Home,
    socket: &SocketDirectory,
    installation: &Installation,
    account: &Account,
) -> Vec<OsString> {
    let mut arguments = vec![OsString::from("-D"), home.data().into()];
    let mut set = |name: &str, value: &[u8]| {
        arguments.push("-c".into());
        arguments.push(OsString::from_vec([name.as_bytes(), b"=", value].concat()));
    };
    for (name, value) in USUAL.iter().chain(sizes(options.lifetime)) {
        set(name, value.as_bytes());
    }
    if has_lz4(home, installation, account) {
        // Less to write and sync, above all after a checkpoint, for little processor time.
        set("wal_compression", b"lz4");
    }
    for (name, value) in &options.settings {
        set(name, value.as_bytes());
    }
    for (name, value) in FIXED {
        set(name, value.as_bytes());
    }
    set("port", socket::PORT.to_string().as_bytes());
    set("unix_socket_directories", &socket::as_setting(socket));
    arguments
}

fn sizes(lifetime: Lifetime) -> &'static [(&'static str, &'static str)] {
    match lifetime {
        Lifetime::Kept if has_small_memory() => &[("shared_buffers", "128MB"), ("max_wal_size", "2GB")],
        Lifetime::Kept => &[("shared_buffers", "256MB"), ("max_wal_size", "2GB")],
        // Several test runs may be on one machine at once, and their disks are often small.
        Lifetime::Ephemeral => &[("shared_buffers", "128MB"), ("max_wal_size", "512MB")],
    }
}

/// Where the system does not say, it is a developer's machine with plenty.
fn has_small_memory() -> bool {
    let meminfo = fs::read_to_string("/proc/meminfo").unwrap_or_default();
    let total_kib = meminfo.lines().find_map(|line| {
        line.strip_prefix("MemTotal:")?
            .trim()
            .strip_suffix(" kB")?
            .parse::<u64>()
            .ok()
    });
    total_kib.is_some_and(|kib| kib < SMALL_MEMORY_KIB)
}

/// Not every build has lz4, and one without refuses to start with it; so ask, about 10 ms.
fn has_lz4(home: &Home, installation: &Installation, account: &Account) -> bool {
    let mut command = account.command(&installation.postgres(), home);
    command
        .arg("-D")
        .arg(home.data())
        .args(["-C", "wal_compression", "-c", "wal_compression=lz4"]);
    command.output().is_ok_and(|output| output.status.success())
}
