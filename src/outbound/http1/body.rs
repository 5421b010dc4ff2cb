//! Where an answer's body ends, and what of the bytes that come is body.

use bytes::{Buf, Bytes, BytesMut};
use http::header::{CONTENT_LENGTH, TRANSFER_ENCODING};
use http::{HeaderMap, Method, Response, StatusCode, Version};

use super::Fault;
use super::chunk::Chunk;

/// How much of a body is still to come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Body {
    /// So many bytes; none is the end.
    Length(u64),
    Chunked(Chunk),
    /// Whatever comes until the connection ends in order.
    UntilClose,
}

impl Body {
    pub const END: Self = Self::Length(0);

    /// Refuses a head whose body two readers would end at different places.
    pub fn of(method: &Method, head: &Response<()>) -> Result<Self, &'static str> {
        if head.status() == StatusCode::SWITCHING_PROTOCOLS || (method == Method::CONNECT && head.status().is_success())
        {
            return Err("it switches protocols, which nobody asked for");
        }
        let framed = framing(head.version(), head.headers())?;
        Ok(if is_bodiless(method, head.status()) {
            Self::END
        } else {
            framed
        })
    }

    /// Whether it is complete.
    pub fn is_end(&self) -> bool {
        match self {
            Self::Length(left) => *left == 0,
            Self::Chunked(chunk) => chunk.is_end(),
            Self::UntilClose => false,
        }
    }

    /// The next piece of it among these bytes. `None`: it is at its end, or more must come.
    pub fn take(&mut self, bytes: &mut BytesMut) -> Result<Option<Bytes>, Fault> {
        self.skip(bytes)?;
        let here = match self {
            Self::Length(left) | Self::Chunked(Chunk::Content(left)) => {
                let here = usize::try_from(*left).unwrap_or(usize::MAX).min(bytes.len());
                *left -= here as u64;
                here
            }
            Self::Chunked(_) => 0,
            Self::UntilClose => bytes.len(),
        };
        if here == 0 {
            return Ok(None);
        }
        let piece = bytes.split_to(here).freeze();
        // If the end has come as well, nobody need ask for it. A fault behind this piece is found when the next is asked for.
        let _ = self.skip(bytes);
        Ok(Some(piece))
    }

    /// What the end of the connection means for it.
    pub fn close(&mut self) -> Result<(), Fault> {
        match self {
            Self::UntilClose => {
                *self = Self::END;
                Ok(())
            }
            Self::Length(0) | Self::Chunked(Chunk::End) => Ok(()),
            Self::Length(_) | Self::Chunked(_) => Err(Fault::new("the connection ended before the body did")),
        }
    }

    /// Takes off what stands between two pieces. Of what is at fault, nothing.
    fn skip(&mut self, bytes: &mut BytesMut) -> Result<(), Fault> {
        let Self::Chunked(chunk) = self else { return Ok(()) };
        if let Chunk::Content(0) = chunk {
            *chunk = Chunk::CONTENT_END;
        }
        let mut next = *chunk;
        let mut passed = 0;
        while let Some(&byte) = bytes.get(passed)
            && !matches!(next, Chunk::Content(_) | Chunk::End)
        {
            next = next.after(byte).map_err(Fault::new)?;
            passed += 1;
        }
        *chunk = next;
        bytes.advance(passed);
        Ok(())
    }
}

/// Whether there is no body, whatever the lines say.
pub fn is_bodiless(method: &Method, status: StatusCode) -> bool {
    *method == Method::HEAD || [StatusCode::NO_CONTENT, StatusCode::NOT_MODIFIED].contains(&status)
}

fn framing(version: Version, lines: &HeaderMap) -> Result<Body, &'static str> {
    let mut lengths = lines.get_all(CONTENT_LENGTH).iter();
    let mut codings = lines.get_all(TRANSFER_ENCODING).iter();
    match (lengths.next(), lengths.next(), codings.next(), codings.next()) {
        (None, _, None, _) => Ok(Body::UntilClose),
        (Some(length), None, None, _) => decimal(length.as_bytes()).map(Body::Length),
        (Some(_), Some(_), None, _) => Err("it has more than one length"),
        (None, _, Some(_), _) if version != Version::HTTP_11 => {
            Err("it has a transfer coding, which its version of HTTP does not know")
        }
        (None, _, Some(coding), None) if coding.as_bytes().eq_ignore_ascii_case(b"chunked") => {
            Ok(Body::Chunked(Chunk::START))
        }
        (None, _, Some(_), _) => Err("it has a transfer coding other than chunked"),
        (Some(_), _, Some(_), _) => Err("it has a length and a transfer coding"),
    }
}

fn decimal(digits: &[u8]) -> Result<u64, &'static str> {
    if digits.is_empty() {
        return Err("its length is no number");
    }
    digits.iter().try_fold(0u64, |value, byte| {
        let digit = byte
            .is_ascii_digit()
            .then(|| u64::from(byte - b'0'))
            .ok_or("its length is no number")?;
        let larger = value.checked_mul(10).and_then(|value| value.checked_add(digit));
        larger.ok_or("its length is beyond counting")
    })
}
