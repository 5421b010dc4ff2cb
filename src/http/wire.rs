//! The socket under a connection, with two courtesies that the HTTP library does not have.
//!
//! What is no request at all never reaches the router: hyper answers it by itself, with a bare status. Here such an
//! answer is exchanged for the shape that all errors have. And a connection that the service ends is first read to its
//! end for a while: closing a socket with unread bytes resets it, and the peer would lose the answer that told it why.

use std::io;
use std::pin::Pin;
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncReadExt, AsyncWrite, AsyncWriteExt, ReadBuf};
use tokio::net::TcpStream;
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::timeout;
use tokio_util::task::TaskTracker;

use super::problem::{Code, Problem};

/// How long a peer may be silent after its connection was ended; a body that is refused may be on its way meanwhile.
const LINGER: Duration = Duration::from_secs(2);

/// How long it may go on sending.
const LONGEST_LINGER: Duration = Duration::from_secs(30);

/// No bare answer of hyper is longer.
const LONGEST_BARE: usize = 256;

pub struct Wire {
    /// Gone only in `drop`.
    stream: Option<TcpStream>,
    /// What is sent in place of a bare answer, as far as it is not sent yet.
    instead: Vec<u8>,
    /// Whether the peer has ended its side.
    ended: bool,
    /// Among the open connections; held while it lingers, too. Gone only in `drop`.
    place: Option<OwnedSemaphorePermit>,
    lingering: TaskTracker,
}

impl Wire {
    pub fn new(stream: TcpStream, place: OwnedSemaphorePermit, lingering: TaskTracker) -> Self {
        Self {
            stream: Some(stream),
            instead: Vec::new(),
            ended: false,
            place: Some(place),
            lingering,
        }
    }

    fn stream(&mut self) -> io::Result<Pin<&mut TcpStream>> {
        self.stream
            .as_mut()
            .map(Pin::new)
            .ok_or_else(|| io::ErrorKind::NotConnected.into())
    }

    fn poll_instead(&mut self, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        while !self.instead.is_empty() {
            let Some(stream) = self.stream.as_mut() else { break };
            let sent = ready!(Pin::new(stream).poll_write(context, &self.instead))?;
            if sent == 0 {
                return Poll::Ready(Err(io::ErrorKind::WriteZero.into()));
            }
            self.instead.drain(..sent);
        }
        Poll::Ready(Ok(()))
    }
}

impl AsyncRead for Wire {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        let before = buffer.filled().len();
        let had_room = buffer.remaining() > 0;
        let read = ready!(self.stream()?.poll_read(context, buffer));
        self.ended |= read.is_err() || (had_room && buffer.filled().len() == before);
        Poll::Ready(read)
    }
}

/// Not vectored: so each head comes in one piece, and a short answer in one write.
impl AsyncWrite for Wire {
    fn poll_write(mut self: Pin<&mut Self>, context: &mut Context<'_>, bytes: &[u8]) -> Poll<io::Result<usize>> {
        ready!(self.poll_instead(context))?;
        match bare_answer(bytes) {
            Some(0) => {
                self.instead = shaped(bytes);
                Poll::Ready(Ok(bytes.len()))
            }
            // Answers of requests before it are in the same buffer: they first.
            Some(start) => self.stream()?.poll_write(context, &bytes[..start]),
            None => self.stream()?.poll_write(context, bytes),
        }
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_instead(context))?;
        self.stream()?.poll_flush(context)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        ready!(self.poll_instead(context))?;
        self.stream()?.poll_shutdown(context)
    }
}

impl Drop for Wire {
    fn drop(&mut self) {
        // Without a runtime the process is about to end anyway.
        if let Some(stream) = self.stream.take()
            && !self.ended
            && tokio::runtime::Handle::try_current().is_ok()
        {
            self.lingering.spawn(linger(stream, self.place.take()));
        }
    }
}

/// Ends our side, and reads the other's to its end.
async fn linger(mut stream: TcpStream, _place: Option<OwnedSemaphorePermit>) {
    let mut unread = [0; 16 << 10];
    let rest = async {
        if stream.shutdown().await.is_ok() {
            while matches!(timeout(LINGER, stream.read(&mut unread)).await, Ok(Ok(count)) if count > 0) {}
        }
    };
    // A peer that is still sending then has had its time.
    let _ = timeout(LONGEST_LINGER, rest).await;
}

/// Where hyper's own answer begins, if these bytes end with one. It is the last thing on its connection, has an empty
/// body, and lacks the `request-id` of all of ours.
fn bare_answer(bytes: &[u8]) -> Option<usize> {
    if !bytes.ends_with(b"\r\n\r\n") {
        return None;
    }
    let from = bytes.len().saturating_sub(LONGEST_BARE);
    let start = from
        + bytes[from..]
            .windows(9)
            .rposition(|window| window.starts_with(b"HTTP/1.") && window[8] == b' ')?;
    let text = std::str::from_utf8(&bytes[start..]).ok()?.to_ascii_lowercase();
    let is_error = text[9..].starts_with('4');
    (is_error && text.contains("\r\ncontent-length: 0\r\n") && !text.contains("\r\nrequest-id:")).then_some(start)
}

/// A bare answer in our shape.
fn shaped(bare: &[u8]) -> Vec<u8> {
    let status = bare
        .get(9..12)
        .and_then(|digits| std::str::from_utf8(digits).ok())
        .unwrap_or_default();
    let problem = match status {
        "414" => Problem::new(
            Code::UriTooLong,
            "the address is far too long; the connection is closed",
        ),
        "431" => Problem::new(
            Code::HeadersTooLarge,
            "the headers are far too large or too many, or declare a length beyond all limits; the connection is closed",
        ),
        _ => Problem::new(
            Code::RequestInvalid,
            "this is no well-formed HTTP/1.1 request; the connection is closed",
        ),
    };
    let id = uuid::Uuid::now_v7();
    tracing::debug!(request.id = %id, status, "refused what is no request");
    problem.closing(&id.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    const BARE: &[u8] = b"HTTP/1.1 400 Bad Request\r\nconnection: close\r\ncontent-length: 0\r\n\r\n";

    #[test]
    fn only_what_the_library_wrote_by_itself_is_exchanged() {
        let before = b"HTTP/1.1 200 OK\r\nrequest-id: 1\r\ncontent-length: 2\r\n\r\n{}";
        assert_eq!(bare_answer(BARE), Some(0));
        assert_eq!(bare_answer(&[before, BARE].concat()), Some(before.len()));
        for other in [
            &before[..],
            b"HTTP/1.1 100 Continue\r\n\r\n",
            b"HTTP/1.1 404 Not Found\r\nrequest-id: 1\r\ncontent-length: 0\r\n\r\n",
            b"HTTP/1.1 204 No Content\r\nrequest-id: 1\r\n\r\n",
            b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\n\r\n",
            b"",
        ] {
            assert_eq!(bare_answer(other), None, "{:?}", String::from_utf8_lossy(other));
        }
    }

    #[test]
    fn the_exchanged_answer_is_whole() {
        let answer = String::from_utf8(shaped(BARE)).unwrap();
        let (head, body) = answer.split_once("\r\n\r\n").unwrap();
        assert!(head.starts_with("HTTP/1.1 400 Bad Request\r\n"), "{head}");
        assert!(head.contains(&format!("\r\ncontent-length: {}", body.len())), "{head}");
        assert!(body.contains("\"code\":\"request-invalid\""), "{body}");
    }
}
