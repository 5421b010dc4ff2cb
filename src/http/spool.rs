//! Where the bytes of a request's body are kept while they come in: few of them in memory, many in a file.
//!
//! The file has no name and goes with its last reader, however that ends. A body that is complete is plain `Bytes` either
//! way: nobody behind this module sees the difference, and a large body that waits for its downstream takes pages that the
//! kernel can write out, not memory of this process. Limits of size and time are the caller's.

use std::fs::File;
use std::io::{self, Write as _};
use std::path::{Path, PathBuf};

use bytes::{Bytes, BytesMut};
use memmap2::Mmap;

/// Most of a body that is kept in memory. What is beyond goes to the file in pieces of about this size.
pub const IN_MEMORY: usize = 64 << 10;

/// Why a body cannot be kept.
#[derive(Debug, thiserror::Error)]
#[error("cannot keep a request body in {}", directory.display())]
pub struct Error {
    directory: PathBuf,
    source: io::Error,
}

/// Whether a body could be kept in this directory.
pub fn check(directory: &Path) -> Result<(), Error> {
    let tried = tempfile::tempfile_in(directory).and_then(|mut file| file.write_all(b"?"));
    tried.map_err(|source| Error {
        directory: directory.into(),
        source,
    })
}

/// A body as far as it is there.
pub struct Spool<'a> {
    directory: &'a Path,
    /// `None` as long as everything is in memory, and while a piece is being written.
    file: Option<File>,
    unwritten: BytesMut,
}

impl<'a> Spool<'a> {
    /// Will use this directory if the body turns out to be large; so many bytes are expected at least.
    pub fn new(directory: &'a Path, expected: usize) -> Self {
        Self {
            directory,
            file: None,
            unwritten: BytesMut::with_capacity(expected.min(IN_MEMORY)),
        }
    }

    /// Adds a piece. After an error the body is of no use any more.
    pub async fn push(&mut self, piece: &[u8]) -> Result<(), Error> {
        self.unwritten.extend_from_slice(piece);
        if self.unwritten.len() <= IN_MEMORY {
            return Ok(());
        }
        let (file, unwritten) = self.apart();
        let (file, unwritten) = self.aside(move || write(file()?, unwritten)).await?;
        (self.file, self.unwritten) = (Some(file), unwritten);
        Ok(())
    }

    /// The whole body.
    pub async fn finish(mut self) -> Result<Bytes, Error> {
        if self.file.is_none() {
            return Ok(self.unwritten.freeze());
        }
        let (file, unwritten) = self.apart();
        self.aside(move || map(write(file()?, unwritten)?.0)).await
    }

    /// What writes the next piece: the file, which is made when it is first asked for, and the bytes.
    fn apart(&mut self) -> (impl FnOnce() -> io::Result<File> + use<>, BytesMut) {
        let (file, directory) = (self.file.take(), self.directory.to_owned());
        let file = move || match file {
            Some(file) => Ok(file),
            None => tempfile::tempfile_in(directory),
        };
        (file, std::mem::take(&mut self.unwritten))
    }

    /// Disks may be slow: runs it where nobody else has to wait.
    async fn aside<T: Send + 'static>(
        &self,
        work: impl FnOnce() -> io::Result<T> + Send + 'static,
    ) -> Result<T, Error> {
        #[expect(
            clippy::disallowed_methods,
            reason = "the request waits for it; of one that has ended nothing is to be kept"
        )]
        let worked = tokio::task::spawn_blocking(work).await;
        worked
            .unwrap_or_else(|stopped| Err(io::Error::other(stopped)))
            .map_err(|source| Error {
                directory: self.directory.to_owned(),
                source,
            })
    }
}

/// Writes it all, and gives the emptied buffer back.
fn write(mut file: File, mut bytes: BytesMut) -> io::Result<(File, BytesMut)> {
    file.write_all(&bytes)?;
    bytes.clear();
    Ok((file, bytes))
}

#[expect(
    unsafe_code,
    reason = "sound while nobody changes or shortens the file: it has no name, was opened by us alone, and its one \
              descriptor is given away here and closed"
)]
fn map(file: File) -> io::Result<Bytes> {
    let map = unsafe { Mmap::map(&file) }?;
    Ok(Bytes::from_owner(map))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn body(bytes: usize) -> Vec<u8> {
        (0..bytes).map(|at| (at % 251) as u8).collect()
    }

    async fn spooled(body: &[u8], piece: usize) -> Bytes {
        let directory = crate::config::temporary_directory();
        let mut spool = Spool::new(&directory, body.len());
        for piece in body.chunks(piece) {
            spool.push(piece).await.unwrap();
            assert!(spool.unwritten.len() <= IN_MEMORY);
        }
        spool.finish().await.unwrap()
    }

    #[tokio::test]
    async fn a_body_comes_out_as_it_went_in_whatever_its_size_and_pieces() {
        for bytes in [0, 1, IN_MEMORY - 1, IN_MEMORY, IN_MEMORY + 1, 2 * IN_MEMORY, 1_000_003] {
            for piece in [1_000, IN_MEMORY, IN_MEMORY + 1, 2_000_000] {
                let body = body(bytes);
                assert!(
                    spooled(&body, piece).await == body,
                    "{bytes} bytes in pieces of {piece}"
                );
            }
        }
    }

    #[tokio::test]
    async fn a_body_outlives_its_file_and_leaves_no_name() {
        let directory = tempfile::tempdir().unwrap();
        let body = body(3 * IN_MEMORY);
        let mut spool = Spool::new(directory.path(), 0);
        spool.push(&body).await.unwrap();
        assert!(spool.file.is_some());
        assert_eq!(std::fs::read_dir(&directory).unwrap().count(), 0);
        let mut spooled = spool.finish().await.unwrap();
        drop(directory);
        let front = spooled.split_to(IN_MEMORY);
        assert!([&front[..], &spooled.clone()[..]].concat() == body);
    }

    #[tokio::test]
    async fn only_a_large_body_needs_the_directory() {
        let directory = crate::config::temporary_directory().join("not there");
        let mut spool = Spool::new(&directory, 0);
        spool.push(&body(IN_MEMORY)).await.unwrap();
        let error = spool.push(b"x").await.unwrap_err();
        assert_eq!(error.source.kind(), io::ErrorKind::NotFound);
        assert!(error.to_string().contains("not there"), "{error}");
        assert_eq!(check(&directory).unwrap_err().to_string(), error.to_string());
        let mut small = Spool::new(&directory, 1);
        small.push(b"x").await.unwrap();
        assert_eq!(small.finish().await.unwrap(), "x");
    }

    #[tokio::test]
    async fn a_full_disk_is_an_error_and_no_shorter_body() {
        let directory = crate::config::temporary_directory();
        let full = || {
            let mut spool = Spool::new(&directory, 0);
            spool.file = Some(File::options().write(true).open("/dev/full").unwrap());
            spool
        };
        let pushed = full().push(&body(2 * IN_MEMORY)).await.unwrap_err();
        let mut spool = full();
        spool.push(b"x").await.unwrap();
        let finished = spool.finish().await.unwrap_err();
        for error in [pushed, finished] {
            assert_eq!(error.source.kind(), io::ErrorKind::StorageFull);
        }
    }
}
