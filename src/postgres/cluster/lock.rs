//! One process at a time runs the server of a directory.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Write as _};
use std::os::unix::fs::OpenOptionsExt as _;
use std::path::Path;
use std::thread;
use std::time::Duration;

use super::error::{Error, file};
use super::home::Home;

/// Held for as long as it lives; the kernel releases it if we are killed. The server does not
/// inherit it, so an orphaned server holds no lock.
#[derive(Debug)]
pub struct Lock {
    _file: File,
}

impl Lock {
    pub fn take(home: &Home) -> Result<Self, Error> {
        let path = home.lock_file();
        let mut options = OpenOptions::new();
        options.create(true).truncate(false).read(true).write(true).mode(0o644);
        let lock = options.open(&path).map_err(file("open", &path))?;
        match lock.try_lock() {
            Ok(()) => {
                sign(&lock).map_err(file("write to", &path))?;
                Ok(Self { _file: lock })
            }
            Err(TryLockError::WouldBlock) => Err(Error::Held {
                dir: home.dir().into(),
                holder: holder(&path),
            }),
            Err(TryLockError::Error(source)) => Err(file("lock", &path)(source)),
        }
    }
}

fn sign(mut lock: &File) -> io::Result<()> {
    lock.set_len(0)?;
    writeln!(lock, "{}", std::process::id())
}

/// Who holds the lock. It may have taken it a moment ago and not have signed yet, so that the file
/// is empty or names its predecessor: look again for a while.
fn holder(path: &Path) -> Option<u32> {
    (0..20).find_map(|_| {
        let signed = fs::read_to_string(path)
            .ok()?
            .trim()
            .parse()
            .ok()
            .filter(|&pid| is_alive(pid));
        if signed.is_none() {
            thread::sleep(Duration::from_millis(5));
        }
        signed
    })
}

fn is_alive(pid: u32) -> bool {
    use nix::errno::Errno;
    use nix::sys::signal::kill;
    use nix::unistd::Pid;

    i32::try_from(pid).is_ok_and(|pid| kill(Pid::from_raw(pid), None) != Err(Errno::ESRCH))
}
