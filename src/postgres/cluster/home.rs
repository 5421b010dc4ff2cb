//! The cluster's directory: what lies where, and the server's log.

use std::fs::{self, DirBuilder, File, OpenOptions, Permissions};
use std::io::{ErrorKind, Read as _, Seek as _, SeekFrom};
use std::os::unix::fs::{DirBuilderExt as _, OpenOptionsExt as _, PermissionsExt as _};
use std::path::{Path, PathBuf};
use std::time::SystemTime;

use nix::unistd::geteuid;

use super::error::{Error, file};

const LOG_LIMIT_BYTES: u64 = 10 * 1024 * 1024;
const SIDE_PREFIX: &str = "init-";

#[derive(Debug, Clone)]
pub struct Home {
    /// Absolute and without links: the server works in another directory than we do.
    dir: PathBuf,
}

impl Home {
    /// Makes the directory if it is missing; leaves the permissions of one that is there alone.
    pub fn open(dir: &Path) -> Result<Self, Error> {
        if !dir.is_dir() {
            DirBuilder::new()
                .recursive(true)
                .create(dir)
                .map_err(file("create the directory", dir))?;
            // Root's server runs as somebody else, who has to pass through.
            let mode = if geteuid().is_root() { 0o711 } else { 0o700 };
            let permissions = Permissions::from_mode(mode);
            fs::set_permissions(dir, permissions).map_err(file("set the permissions of", dir))?;
        }
        let dir = fs::canonicalize(dir).map_err(file("look at", dir))?;
        Ok(Self { dir })
    }

    pub fn dir(&self) -> &Path {
        &self.dir
    }

    pub fn data(&self) -> PathBuf {
        self.dir.join("data")
    }

    pub fn socket(&self) -> PathBuf {
        self.dir.join("socket")
    }

    pub fn lock_file(&self) -> PathBuf {
        self.dir.join("lock")
    }

    pub fn log(&self) -> PathBuf {
        self.dir.join("postgres.log")
    }

    fn old_log(&self) -> PathBuf {
        self.dir.join("postgres.log.1")
    }

    /// A new name every time: an initdb whose starter was killed may still be cleaning up, and what
    /// it cleans must not be what the next one is making.
    pub fn new_side_directory(&self) -> Result<PathBuf, Error> {
        let clock = SystemTime::now()
            .duration_since(SystemTime::UNIX_EPOCH)
            .unwrap_or_default();
        let side = self
            .dir
            .join(format!("{SIDE_PREFIX}{}-{}", std::process::id(), clock.as_nanos()));
        DirBuilder::new()
            .mode(0o700)
            .create(&side)
            .map_err(file("create the directory", &side))?;
        Ok(side)
    }

    /// Removes what interrupted starts left. What cannot be removed now is in nobody's way.
    pub fn remove_side_directories(&self) {
        let entries = fs::read_dir(&self.dir).into_iter().flatten().flatten();
        for entry in entries.filter(|entry| entry.file_name().to_string_lossy().starts_with(SIDE_PREFIX)) {
            let _ = fs::remove_dir_all(entry.path());
        }
    }

    /// Sets a log that has grown large aside, in place of the one set aside before.
    pub fn rotate_log(&self) -> Result<(), Error> {
        if self.log_length() > LOG_LIMIT_BYTES {
            fs::rename(self.log(), self.old_log()).map_err(file("rename", self.log()))?;
        }
        Ok(())
    }

    /// The log, to append to.
    pub fn open_log(&self) -> Result<File, Error> {
        let mut options = OpenOptions::new();
        options.create(true).append(true).mode(0o600);
        options.open(self.log()).map_err(file("open", self.log()))
    }

    pub fn log_length(&self) -> u64 {
        fs::metadata(self.log()).map_or(0, |metadata| metadata.len())
    }

    /// What was logged after the first `length` bytes; nothing, if that cannot be read.
    pub fn log_since(&self, length: u64) -> String {
        let mut bytes = Vec::new();
        let read = File::open(self.log()).and_then(|mut log| {
            log.seek(SeekFrom::Start(length))?;
            log.take(LOG_LIMIT_BYTES).read_to_end(&mut bytes)
        });
        read.map_or_else(|_| String::new(), |_| String::from_utf8_lossy(&bytes).into_owned())
    }

    /// Removes all that is ours, and the directory itself if nothing else is in it.
    pub fn remove(&self) {
        for tree in [self.data(), self.socket()] {
            let _ = fs::remove_dir_all(tree);
        }
        for path in [self.log(), self.old_log(), self.lock_file()] {
            let _ = fs::remove_file(path);
        }
        let _ = fs::remove_dir(&self.dir);
    }
}

/// The last lines of what a program said.
pub fn tail(text: &str) -> String {
    const LINES: usize = 15;
    let lines: Vec<_> = text.trim_end().lines().collect();
    lines[lines.len().saturating_sub(LINES)..].join("\n")
}

/// Makes a rename or a new entry in `dir` survive a power cut.
pub fn sync_directory(dir: &Path) -> Result<(), Error> {
    File::open(dir)
        .and_then(|dir| dir.sync_all())
        .map_err(file("sync the directory", dir))
}

/// Whether the path exists, a dangling link included; an error if we may not look.
pub fn is_present(path: &Path) -> Result<bool, Error> {
    match fs::symlink_metadata(path) {
        Ok(_) => Ok(true),
        Err(error) if error.kind() == ErrorKind::NotFound => Ok(false),
        Err(error) => Err(file("look at", path)(error)),
    }
}
