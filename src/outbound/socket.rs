//! A socket that counts what the kernel takes, so that "nothing has left" is known and not guessed.

use std::io::{self, IoSlice};
use std::os::fd::{AsRawFd, RawFd};
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::task::{Context, Poll};
use std::time::Duration;

use nix::errno::Errno;
use nix::sys::socket::{MsgFlags, recv};
use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;
use tokio::time::Instant;
use tokio_rustls::client::TlsStream;

use super::deadlines::Deadlines;

/// What a connection is made of: TCP, with TLS above the counter or without.
pub enum Stream {
    Plain(Socket),
    Tls(Box<TlsStream<Socket>>),
}

pub struct Socket {
    stream: TcpStream,
    meter: Arc<Meter>,
}

/// What has passed, seen from beside the connection that owns the socket.
#[derive(Debug)]
pub struct Meter {
    socket: RawFd,
    began: Instant,
    written: AtomicU64,
    /// Whether the kernel took nothing when it was asked last, and since when, in milliseconds from `began`.
    blocked: AtomicBool,
    blocked_since: AtomicU64,
    write_failed: AtomicBool,
    /// Of requests that share the connection.
    pub deadlines: Arc<Deadlines>,
}

/// What is waiting to be read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Waiting {
    Nothing,
    Bytes,
    /// The peer has closed or reset the connection.
    End,
}

impl Socket {
    pub fn new(stream: TcpStream) -> (Self, Arc<Meter>) {
        let meter = Arc::new(Meter {
            socket: stream.as_raw_fd(),
            began: Instant::now(),
            written: AtomicU64::new(0),
            blocked: AtomicBool::new(false),
            blocked_since: AtomicU64::new(0),
            write_failed: AtomicBool::new(false),
            deadlines: Arc::default(),
        });
        let socket = Self {
            stream,
            meter: meter.clone(),
        };
        (socket, meter)
    }
}

impl Meter {
    /// Bytes that the kernel took, those of TLS included.
    pub fn written(&self) -> u64 {
        self.written.load(Ordering::Acquire)
    }

    pub fn write_failed(&self) -> bool {
        self.write_failed.load(Ordering::Acquire)
    }

    /// Since when the kernel takes nothing, because the peer does not.
    pub fn blocked_since(&self) -> Option<Instant> {
        let millis = self.blocked_since.load(Ordering::Acquire);
        self.blocked
            .load(Ordering::Acquire)
            .then(|| self.began + Duration::from_millis(millis))
    }

    /// Asks the kernel itself: the runtime learns of a peer's FIN only when it next polls for events. To be called only
    /// while the connection that owns the socket is there.
    pub fn waiting(&self) -> Waiting {
        let mut byte = [0];
        match recv(self.socket, &mut byte, MsgFlags::MSG_PEEK | MsgFlags::MSG_DONTWAIT) {
            Ok(0) => Waiting::End,
            Ok(_) => Waiting::Bytes,
            Err(Errno::EAGAIN | Errno::EINTR) => Waiting::Nothing,
            Err(_) => Waiting::End,
        }
    }

    fn note(&self, outcome: &Poll<io::Result<usize>>) {
        match outcome {
            Poll::Ready(Ok(count)) => {
                self.written.fetch_add(*count as u64, Ordering::AcqRel);
                self.blocked.store(false, Ordering::Release);
            }
            Poll::Ready(Err(_)) => self.write_failed.store(true, Ordering::Release),
            Poll::Pending => {
                if !self.blocked.load(Ordering::Acquire) {
                    let millis = u64::try_from(self.began.elapsed().as_millis()).unwrap_or(u64::MAX);
                    self.blocked_since.store(millis, Ordering::Release);
                    self.blocked.store(true, Ordering::Release);
                }
            }
        }
    }
}

impl AsyncRead for Socket {
    fn poll_read(mut self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(cx, buffer)
    }
}

impl AsyncWrite for Socket {
    fn poll_write(mut self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.meter.deadlines.check()?;
        let outcome = Pin::new(&mut self.stream).poll_write(cx, bytes);
        self.meter.note(&outcome);
        outcome
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.meter.deadlines.check()?;
        let outcome = Pin::new(&mut self.stream).poll_write_vectored(cx, slices);
        self.meter.note(&outcome);
        outcome
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_flush(cx)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_shutdown(cx)
    }
}

impl AsyncRead for Stream {
    fn poll_read(self: Pin<&mut Self>, cx: &mut Context<'_>, buffer: &mut ReadBuf<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_read(cx, buffer),
            Self::Tls(stream) => Pin::new(stream).poll_read(cx, buffer),
        }
    }
}

impl AsyncWrite for Stream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_write(cx, bytes),
            Self::Tls(stream) => Pin::new(stream).poll_write(cx, bytes),
        }
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        slices: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_write_vectored(cx, slices),
            Self::Tls(stream) => Pin::new(stream).poll_write_vectored(cx, slices),
        }
    }

    fn is_write_vectored(&self) -> bool {
        match self {
            Self::Plain(stream) => stream.is_write_vectored(),
            Self::Tls(stream) => stream.is_write_vectored(),
        }
    }

    fn poll_flush(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_flush(cx),
            Self::Tls(stream) => Pin::new(stream).poll_flush(cx),
        }
    }

    fn poll_shutdown(self: Pin<&mut Self>, cx: &mut Context<'_>) -> Poll<io::Result<()>> {
        match self.get_mut() {
            Self::Plain(stream) => Pin::new(stream).poll_shutdown(cx),
            Self::Tls(stream) => Pin::new(stream).poll_shutdown(cx),
        }
    }
}
