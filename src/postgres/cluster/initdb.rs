//! Makes the data directory, whole or not at all.

use std::fs;
use std::path::Path;

use super::SUPERUSER;
use super::account::Account;
use super::error::{Error, file};
use super::home::{Home, is_present, sync_directory, tail};
use super::locate::Installation;

/// Makes `data/` unless it is there: beside it first, renamed when initdb has finished and has
/// synced every file. (Syncing costs about 70 ms of 500; a power cut between an unsynced initdb and
/// its rename would leave a directory that looks whole and is not.)
pub fn make_data_directory(home: &Home, installation: &Installation, account: &Account) -> Result<(), Error> {
    home.remove_side_directories();
    if is_present(&home.data())? {
        return Ok(());
    }
    account.require_passwd_entry()?;
    let side = home.new_side_directory()?;
    let made = account
        .give(&side)
        .and_then(|()| run_initdb(&side, home, installation, account))
        .and_then(|()| fs::rename(&side, home.data()).map_err(file("put in place", &side)));
    if made.is_err() {
        let _ = fs::remove_dir_all(&side);
    }
    made.and_then(|()| sync_directory(home.dir()))
}

fn run_initdb(side: &Path, home: &Home, installation: &Installation, account: &Account) -> Result<(), Error> {
    let program = installation.initdb();
    let mut command = account.command(&program, home);
    command.arg("--pgdata").arg(side);
    command.args(["--username", SUPERUSER]);
    // Whoever reaches the socket is us: its directory is closed to everybody else.
    command.args(["--auth", "trust"]);
    // The same order and case rules on every machine, whatever its C library.
    command.args(["--encoding", "UTF8", "--locale", "C"]);
    command.args(["--data-checksums", "--no-instructions"]);
    let output = command
        .output()
        .map_err(|source| account.failed_to_run(&program, home, source))?;
    if output.status.success() {
        return Ok(());
    }
    let words = String::from_utf8_lossy(&output.stderr);
    Err(Error::Initdb {
        dir: home.dir().into(),
        status: output.status,
        tail: tail(&words),
    })
}
