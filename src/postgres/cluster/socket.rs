//! The directory of the Unix socket, which is all that guards the server.

use std::fs::{self, DirBuilder, Permissions};
use std::io::ErrorKind;
use std::os::unix::ffi::OsStrExt as _;
use std::os::unix::fs::{DirBuilderExt as _, MetadataExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};

use nix::unistd::geteuid;

use super::account::Account;
use super::error::{Error, file};
use super::home::Home;

/// Only the name of the socket depends on it; the server does not listen on TCP.
pub const PORT: u16 = 5432;

const SOCKET: &str = ".s.PGSQL.5432";
const SOCKET_LOCK: &str = ".s.PGSQL.5432.lock";

/// What `sockaddr_un` holds, less the closing zero: 107 bytes on Linux, 103 on macOS and the BSDs.
const LONGEST_PATH_BYTES: usize = if cfg!(target_os = "linux") { 107 } else { 103 };

/// One in `/tmp` goes when this is dropped.
#[derive(Debug)]
pub struct SocketDirectory {
    path: PathBuf,
    place: Place,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Place {
    Home,
    /// In `/tmp`, because the path at home does not do for a socket.
    Temporary,
}

impl SocketDirectory {
    pub fn prepare(home: &Home, account: &Account) -> Result<Self, Error> {
        let at_home = home.socket();
        let (path, place) = if does_for_a_socket(&at_home) {
            (at_home, Place::Home)
        } else {
            (stand_in(home)?, Place::Temporary)
        };
        // First made or found to be ours, and only then ours to remove.
        make(&path, account)?;
        Ok(Self { path, place })
    }

    pub fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for SocketDirectory {
    fn drop(&mut self) {
        match self.place {
            Place::Home => {}
            Place::Temporary => {
                // A killed server leaves these.
                for name in [SOCKET, SOCKET_LOCK] {
                    let _ = fs::remove_file(self.path.join(name));
                }
                let _ = fs::remove_dir(&self.path);
            }
        }
    }
}

/// Anybody may make directories in `/tmp`, so one that is there already counts only if it is a
/// directory of ours or of the account, and then nobody else can have swapped it.
fn make(path: &Path, account: &Account) -> Result<(), Error> {
    match DirBuilder::new().mode(0o700).create(path) {
        Err(error) if error.kind() != ErrorKind::AlreadyExists => {
            return Err(file("create the directory", path)(error));
        }
        Ok(()) | Err(_) => {}
    }
    let found = fs::symlink_metadata(path).map_err(file("look at", path))?;
    let ours = [account.uid(), geteuid().as_raw()].contains(&found.uid());
    if !found.is_dir() || !ours {
        return Err(Error::SocketDirectory { path: path.into() });
    }
    fs::set_permissions(path, Permissions::from_mode(0o700)).map_err(file("set the permissions of", path))?;
    account.give(path)
}

/// Short enough; and text without a comma, which URLs and libpq read as the end of a host.
fn does_for_a_socket(directory: &Path) -> bool {
    let socket = directory.join(SOCKET);
    socket.as_os_str().len() <= LONGEST_PATH_BYTES && socket.to_str().is_some_and(|path| !path.contains(','))
}

/// A short name that follows from the directory alone, so that a killed server's socket is found
/// again and two directories never share one.
fn stand_in(home: &Home) -> Result<PathBuf, Error> {
    let home = fs::metadata(home.dir()).map_err(file("look at", home.dir()))?;
    Ok(PathBuf::from(format!(
        "/tmp/opledger-{:x}-{:x}",
        home.dev(),
        home.ino()
    )))
}

/// As `unix_socket_directories` wants it: a list, whose members may be quoted.
pub fn as_setting(directory: &SocketDirectory) -> Vec<u8> {
    let mut setting = b"\"".to_vec();
    for &byte in directory.path.as_os_str().as_bytes() {
        setting.extend(std::iter::repeat_n(byte, if byte == b'"' { 2 } else { 1 }));
    }
    setting.push(b'"');
    setting
}
