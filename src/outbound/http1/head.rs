//! Heads of messages: a request's as it is written, an answer's as it is read.

use std::io::Write;
use std::mem::MaybeUninit;

use bytes::{Buf, Bytes, BytesMut};
use http::header::HOST;
use http::uri::{Authority, PathAndQuery};
use http::{HeaderMap, HeaderName, HeaderValue, Method, Response, StatusCode, Version};
use httparse::{ParserConfig, Status};

use super::Fault;

/// Longest head of an answer.
const LONGEST: usize = 64 << 10;

/// Most header lines of an answer.
const MOST_LINES: usize = 256;

/// Most interim answers (1xx) before the one that counts.
const MOST_INTERIM: usize = 64;

/// Finds the head of an answer in what has come, and skips interim ones.
#[derive(Debug, Default)]
pub struct Heads {
    /// So many of the bytes at hand have been looked at, and are no whole head.
    seen: usize,
    interim: usize,
}

/// A request's head. `Host` is the authority, and the first line; names and values of the others are written as they are.
pub fn encode(method: &Method, target: &PathAndQuery, host: &Authority, lines: &HeaderMap) -> Bytes {
    let others = || lines.iter().filter(|(name, _)| *name != HOST);
    let room: usize = others()
        .map(|(name, value)| name.as_str().len() + value.len() + ": \r\n".len())
        .sum();
    let fixed = method.as_str().len() + target.as_str().len() + host.as_str().len();
    let mut head = Vec::with_capacity(room + fixed + "  / HTTP/1.1\r\nhost: \r\n\r\n".len());
    // A vector takes everything.
    let _ = write!(head, "{method} {target} HTTP/1.1\r\nhost: {host}\r\n");
    for (name, value) in others() {
        head.extend_from_slice(name.as_str().as_bytes());
        head.extend_from_slice(b": ");
        head.extend_from_slice(value.as_bytes());
        head.extend_from_slice(b"\r\n");
    }
    head.extend_from_slice(b"\r\n");
    head.into()
}

impl Heads {
    /// Takes the answer's head off the bytes; `None` if it has not come whole.
    pub fn take(&mut self, bytes: &mut BytesMut) -> Result<Option<Response<()>>, Fault> {
        while self.may_be_whole(bytes) {
            let Some((head, length)) = parse(bytes)? else { break };
            if length > LONGEST {
                return Err(too_long());
            }
            bytes.advance(length);
            self.seen = 0;
            if !head.status().is_informational() || head.status() == StatusCode::SWITCHING_PROTOCOLS {
                return Ok(Some(head));
            }
            self.interim += 1;
            if self.interim > MOST_INTERIM {
                return Err(Fault::new(format!("more than {MOST_INTERIM} interim answers")));
            }
        }
        self.seen = bytes.len();
        // One more byte at least is missing.
        if bytes.len() >= LONGEST {
            return Err(too_long());
        }
        Ok(None)
    }

    /// What comes first is looked at in any case, so that what is no HTTP is refused at once; then only what has a new empty
    /// line, so that a head in a thousand pieces is not read a thousand times.
    fn may_be_whole(&self, bytes: &[u8]) -> bool {
        if self.seen == 0 {
            return !bytes.is_empty();
        }
        let new = &bytes[self.seen.saturating_sub(2).min(bytes.len())..];
        new.windows(2).any(|pair| pair == b"\n\n") || new.windows(3).any(|three| three == b"\n\r\n")
    }
}

fn parse(bytes: &[u8]) -> Result<Option<(Response<()>, usize)>, Fault> {
    let mut slots = [const { MaybeUninit::uninit() }; MOST_LINES];
    let mut parsed = httparse::Response::new(&mut []);
    let status = ParserConfig::default().parse_response_with_uninit_headers(&mut parsed, bytes, &mut slots);
    let length = match status.map_err(|error| Fault::new(error.to_string()))? {
        Status::Partial => return Ok(None),
        Status::Complete(length) => length,
    };
    let mut head = Response::new(());
    *head.version_mut() = match parsed.version {
        Some(1) => Version::HTTP_11,
        Some(_) | None => Version::HTTP_10,
    };
    *head.status_mut() = StatusCode::from_u16(parsed.code.unwrap_or_default()).map_err(Fault::new)?;
    // Of its own, and no longer than it is: the lines outlive what it was read into.
    let text = Bytes::copy_from_slice(&bytes[..length]);
    let lines = head.headers_mut();
    lines.reserve(parsed.headers.len());
    for line in parsed.headers.iter() {
        let name = HeaderName::from_bytes(line.name.as_bytes()).map_err(Fault::new)?;
        let at = line.value.as_ptr().addr() - bytes.as_ptr().addr();
        let value = HeaderValue::from_maybe_shared(text.slice(at..at + line.value.len())).map_err(Fault::new)?;
        lines.append(name, value);
    }
    Ok(Some((head, length)))
}

fn too_long() -> Fault {
    Fault::new(format!("the head is longer than {LONGEST} bytes"))
}
