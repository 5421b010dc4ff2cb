//! The socket under a connection, and the scissors that cut it.
//!
//! Whoever prepares an answer may say beforehand where in it the connection ends, and how. The HTTP library then writes a
//! whole answer as always; only so much of it leaves.

use std::io;
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, ready};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::net::TcpStream;

/// How far an answer gets, in bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// Counted from where the line is now.
    Sent(usize),
    /// Counted from the end of the next head.
    Body(usize),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Manner {
    /// FIN, as of a peer that is done.
    Close,
    /// RST, as of a peer that has crashed.
    Reset,
}

#[derive(Debug, Clone, Copy)]
struct Cut {
    place: Place,
    manner: Manner,
}

impl Cut {
    /// How many of these bytes still leave. The library hands a head over in one piece.
    fn allowed(&mut self, bytes: &[u8]) -> usize {
        if let Place::Body(more) = self.place {
            let head = bytes.windows(4).position(|window| window == b"\r\n\r\n");
            self.place = Place::Sent(head.map_or(bytes.len(), |end| end + 4) + more);
        }
        match self.place {
            Place::Sent(left) => left.min(bytes.len()),
            Place::Body(_) => bytes.len(),
        }
    }

    fn sent(&mut self, count: usize) {
        if let Place::Sent(left) = &mut self.place {
            *left -= count;
        }
    }

    fn is_reached(self) -> bool {
        self.place == Place::Sent(0)
    }
}

/// Cuts one connection. The last word counts.
#[derive(Debug, Clone, Default)]
pub struct Scissors(Arc<Mutex<Option<Cut>>>);

impl Scissors {
    pub fn cut(&self, place: Place, manner: Manner) {
        *self.lock() = Some(Cut { place, manner });
    }

    fn lock(&self) -> MutexGuard<'_, Option<Cut>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

pub struct Line {
    stream: TcpStream,
    scissors: Scissors,
}

impl Line {
    pub fn new(stream: TcpStream) -> (Self, Scissors) {
        let scissors = Scissors::default();
        let line = Self {
            stream,
            scissors: scissors.clone(),
        };
        (line, scissors)
    }

    /// An error once the cut is reached: the library then lets go of the connection, and the socket is closed.
    fn check(&self) -> io::Result<()> {
        match *self.scissors.lock() {
            Some(cut) if cut.is_reached() => {
                if cut.manner == Manner::Reset {
                    self.stream.set_zero_linger()?;
                }
                Err(io::Error::new(io::ErrorKind::ConnectionAborted, "cut on request"))
            }
            Some(_) | None => Ok(()),
        }
    }
}

impl AsyncRead for Line {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

/// Not vectored, so that each head comes in one piece.
impl AsyncWrite for Line {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        self.check()?;
        let allowed = self
            .scissors
            .lock()
            .as_mut()
            .map_or(bytes.len(), |cut| cut.allowed(bytes));
        if allowed == 0 {
            // The place was only now found to be here.
            self.check()?;
        }
        let sent = ready!(Pin::new(&mut self.stream).poll_write(context, &bytes[..allowed]))?;
        if let Some(cut) = self.scissors.lock().as_mut() {
            cut.sent(sent);
        }
        Poll::Ready(Ok(sent))
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.check()?;
        Pin::new(&mut self.stream).poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.check()?;
        Pin::new(&mut self.stream).poll_shutdown(context)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_place_in_the_body_is_counted_from_the_end_of_the_head() {
        let mut cut = Cut {
            place: Place::Body(2),
            manner: Manner::Close,
        };
        assert!(!cut.is_reached());
        assert_eq!(cut.allowed(b"HTTP/1.1 200 OK\r\n\r\n{\"a\":1}"), 21);
        cut.sent(20);
        assert_eq!(cut.allowed(b"\"a\":1}"), 1);
        cut.sent(1);
        assert!(cut.is_reached());
    }
}
