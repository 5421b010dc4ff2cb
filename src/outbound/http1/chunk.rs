//! What stands between the pieces of a chunked body, byte by byte (RFC 9112, 7.1). Extensions and trailers are read past.

/// Longest line that says how long a chunk is.
const LONGEST_LINE: u16 = 4 << 10;

/// Longest trailers, all together.
const LONGEST_TRAILERS: u16 = 16 << 10;

/// What comes next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Chunk {
    /// A digit of the size, the first of them for sure; `line` counts the bytes of the line so far.
    FirstDigit,
    Size {
        size: u64,
        line: u16,
    },
    /// White space after the size.
    Padding {
        size: u64,
        line: u16,
    },
    Extension {
        size: u64,
        line: u16,
    },
    /// The line feed after the size.
    SizeFeed {
        size: u64,
    },
    /// So many bytes of the body.
    Content(u64),
    ContentReturn,
    ContentFeed,
    /// A line of the trailers, or the end of all; `read` counts the bytes of all trailers so far.
    TrailerStart {
        read: u16,
    },
    TrailerName {
        read: u16,
    },
    TrailerValue {
        read: u16,
    },
    TrailerFeed {
        read: u16,
    },
    LastFeed,
    End,
}

impl Chunk {
    pub const START: Self = Self::FirstDigit;
    pub const CONTENT_END: Self = Self::ContentReturn;

    pub fn is_end(self) -> bool {
        self == Self::End
    }

    /// What comes after this byte. A byte of content is counted by whoever takes it.
    pub fn after(self, byte: u8) -> Result<Self, &'static str> {
        match self {
            Self::FirstDigit => match digit(byte) {
                Some(size) => Ok(Self::Size { size, line: 1 }),
                None => Err("a chunk begins without its size"),
            },
            Self::Size { size, line } => match digit(byte) {
                Some(digit) => Ok(Self::Size {
                    size: size
                        .checked_mul(16)
                        .map(|size| size | digit)
                        .ok_or("a chunk's size is beyond counting")?,
                    line: longer(line)?,
                }),
                None => Self::after_size(byte, size, line),
            },
            Self::Padding { size, line } => Self::after_size(byte, size, line),
            Self::Extension { size, line } => match byte {
                b'\r' => Ok(Self::SizeFeed { size }),
                b'\n' => Err("a chunk's size line ends without a carriage return"),
                _ => Ok(Self::Extension {
                    size,
                    line: longer(line)?,
                }),
            },
            Self::SizeFeed { size } => match (byte, size) {
                (b'\n', 0) => Ok(Self::TrailerStart { read: 0 }),
                (b'\n', size) => Ok(Self::Content(size)),
                _ => Err("a chunk's size line ends without a line feed"),
            },
            Self::ContentReturn if byte == b'\r' => Ok(Self::ContentFeed),
            Self::ContentFeed if byte == b'\n' => Ok(Self::FirstDigit),
            Self::ContentReturn | Self::ContentFeed => Err("a chunk is longer than its size"),
            Self::TrailerStart { read } => match byte {
                b'\r' => Ok(Self::LastFeed),
                _ if is_token(byte) => Ok(Self::TrailerName { read: more(read)? }),
                _ => Err("a trailer begins without its name"),
            },
            Self::TrailerName { read } => match byte {
                b':' => Ok(Self::TrailerValue { read: more(read)? }),
                _ if is_token(byte) => Ok(Self::TrailerName { read: more(read)? }),
                _ => Err("a trailer's name has no end"),
            },
            Self::TrailerValue { read } => match byte {
                b'\r' => Ok(Self::TrailerFeed { read: more(read)? }),
                b'\t' | b' '..=b'~' | 0x80.. => Ok(Self::TrailerValue { read: more(read)? }),
                _ => Err("a trailer has control characters"),
            },
            Self::TrailerFeed { read } if byte == b'\n' => Ok(Self::TrailerStart { read: more(read)? }),
            Self::LastFeed if byte == b'\n' => Ok(Self::End),
            Self::TrailerFeed { .. } | Self::LastFeed => Err("a trailer ends without a line feed"),
            Self::Content(_) | Self::End => Ok(self),
        }
    }

    fn after_size(byte: u8, size: u64, line: u16) -> Result<Self, &'static str> {
        let line = longer(line)?;
        match byte {
            b' ' | b'\t' => Ok(Self::Padding { size, line }),
            b';' => Ok(Self::Extension { size, line }),
            b'\r' => Ok(Self::SizeFeed { size }),
            _ => Err("a chunk's size is no number"),
        }
    }
}

fn digit(byte: u8) -> Option<u64> {
    char::from(byte).to_digit(16).map(u64::from)
}

fn longer(line: u16) -> Result<u16, &'static str> {
    let line = line + 1;
    (line <= LONGEST_LINE)
        .then_some(line)
        .ok_or("a chunk's size line is too long")
}

fn more(read: u16) -> Result<u16, &'static str> {
    let read = read + 1;
    (read <= LONGEST_TRAILERS)
        .then_some(read)
        .ok_or("the trailers are too long")
}

fn is_token(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"!#$%&'*+-.^_`|~".contains(&byte)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What comes after all of these bytes, where there is no content among them.
    fn after(text: &str) -> Result<Chunk, &'static str> {
        text.bytes().try_fold(Chunk::START, Chunk::after)
    }

    #[test]
    fn a_size_is_hexadecimal_and_nothing_else() {
        for (line, size) in [
            ("5", 5),
            ("a", 10),
            ("fF", 255),
            ("0005", 5),
            ("5;a", 5),
            ("5 ;a=\"b\"", 5),
            ("5 \t", 5),
            ("ffffffffffffffff", u64::MAX),
        ] {
            assert_eq!(after(&format!("{line}\r\n")), Ok(Chunk::Content(size)), "{line}");
        }
        for bad in [
            "",
            ";a",
            " 5",
            "+5",
            "-5",
            "0x5",
            "5_0",
            "5 6",
            "g",
            "5\n",
            "5;a\n",
            "5\r5",
            "10000000000000000",
            "00000000000000000ffffffffffffffff0",
        ] {
            assert!(after(&format!("{bad}\r\n")).is_err(), "{bad}");
        }
    }

    #[test]
    fn the_last_chunk_is_followed_by_lines_and_an_empty_one() {
        for end in ["0\r\n\r\n", "000;x\r\n\r\n", "0\r\nX-Sum: 1\r\nY:\r\n\r\n"] {
            assert_eq!(after(end), Ok(Chunk::End), "{end:?}");
        }
        for bad in [
            "0\r\n\n",
            "0\r\nX: 1\n\r\n",
            "0\r\nX: 1\rY",
            "0\r\n folded: 1\r\n\r\n",
            "0\r\nHTTP/1.1 200 OK\r\n\r\n",
            "0\r\nX : 1\r\n\r\n",
            "0\r\nX: a\0b\r\n\r\n",
            "0\r\n\rx",
        ] {
            assert!(after(bad).is_err(), "{bad:?}");
        }
    }

    #[test]
    fn lines_end_some_time() {
        let ext = |length: usize| after(&format!("5;{}\r\n", "x".repeat(length)));
        assert_eq!(ext(usize::from(LONGEST_LINE) - 2), Ok(Chunk::Content(5)));
        assert!(ext(usize::from(LONGEST_LINE) - 1).is_err());
        assert!(after(&"0".repeat(usize::from(LONGEST_LINE) + 1)).is_err());
        assert!(after(&format!("0\r\n{}", "X: y\r\n".repeat(usize::from(LONGEST_TRAILERS)))).is_err());
        assert!(after(&format!("0\r\n{}", "x".repeat(usize::from(LONGEST_TRAILERS) + 1))).is_err());
    }
}
