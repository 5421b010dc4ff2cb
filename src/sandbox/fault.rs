//! What a request asks to go wrong: the header `Sandbox-Fault`, a list of faults separated by commas or semicolons.

use std::time::Duration;

use http::{HeaderMap, HeaderName, StatusCode};

use super::line::{Manner, Place};

pub const SANDBOX_FAULT: HeaderName = HeaderName::from_static("sandbox-fault");

/// Every fault, as messages list them.
pub const KNOWN: &str = "delay=2s, delay-after=2s, hold, drop-before, drop-after, reset-before, reset-after, reset-head, reset-body, \
truncate, truncate-chunked, status=503, retry-after=2, status-after=500, forget-key, slow-body=3x200ms, large=100000, \
stream=3, cut-stream=2, close-idle, odd-headers, gzip, odd-json, times=1";

/// Longest pause and longest padding that can be asked for.
const LONGEST: Duration = Duration::from_secs(600);
const LARGEST: usize = 64 << 20;

/// Where the answer ends too early.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    Before(Manner),
    /// After the effect, before the first byte.
    After(Manner),
    InHead,
    /// In the middle of the body.
    InBody {
        manner: Manner,
        chunked: bool,
    },
}

impl End {
    /// Where that is in an answer with a body of this length.
    pub fn place(self, body: usize) -> (Place, Manner) {
        match self {
            Self::Before(manner) | Self::After(manner) => (Place::Sent(0), manner),
            Self::InHead => (Place::Sent(9), Manner::Reset),
            Self::InBody { manner, .. } => (Place::Body((body / 2).max(1)), manner),
        }
    }
}

#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Faults {
    pub delay: Duration,
    pub delay_after: Duration,
    /// Wait, before the effect, until somebody releases the reference.
    pub hold: bool,
    pub end: Option<End>,
    /// Answered without an effect.
    pub status: Option<StatusCode>,
    pub retry_after: Option<String>,
    /// Answered after the effect.
    pub status_after: Option<StatusCode>,
    pub forget_key: bool,
    /// Pieces, and the pause between them.
    pub slow_body: Option<(usize, Duration)>,
    pub large: usize,
    pub stream: Option<usize>,
    pub cut_stream: Option<usize>,
    pub close_idle: bool,
    pub odd_headers: bool,
    pub gzip: bool,
    pub odd_json: bool,
    /// Only the first so many requests of a reference are treated so.
    pub times: Option<u64>,
}

impl Faults {
    /// An error names what is not known.
    pub fn read(headers: &HeaderMap) -> Result<Self, String> {
        let mut faults = Self::default();
        for line in headers.get_all(SANDBOX_FAULT) {
            let text = line.to_str().map_err(|_| "Sandbox-Fault is no ASCII text".to_owned())?;
            for item in text.split([',', ';']).map(str::trim).filter(|item| !item.is_empty()) {
                faults.add(item)?;
            }
        }
        Ok(faults)
    }

    fn add(&mut self, item: &str) -> Result<(), String> {
        let (name, value) = item
            .split_once('=')
            .map_or((item, None), |(name, value)| (name, Some(value)));
        let unknown = || format!("there is no fault {item}; known are {KNOWN}");
        let both = |chunked| End::InBody {
            manner: Manner::Close,
            chunked,
        };
        match (name, value) {
            ("delay", Some(value)) => self.delay = duration(value).ok_or_else(unknown)?,
            ("delay-after", Some(value)) => self.delay_after = duration(value).ok_or_else(unknown)?,
            ("hold", None) => self.hold = true,
            ("drop-before", None) => self.end = Some(End::Before(Manner::Close)),
            ("drop-after", None) => self.end = Some(End::After(Manner::Close)),
            ("reset-before", None) => self.end = Some(End::Before(Manner::Reset)),
            ("reset-after", None) => self.end = Some(End::After(Manner::Reset)),
            ("reset-head", None) => self.end = Some(End::InHead),
            ("reset-body", None) => {
                self.end = Some(End::InBody {
                    manner: Manner::Reset,
                    chunked: false,
                });
            }
            ("truncate", None) => self.end = Some(both(false)),
            ("truncate-chunked", None) => self.end = Some(both(true)),
            ("status", Some(value)) => self.status = Some(status(value).ok_or_else(unknown)?),
            ("retry-after", Some(value)) => self.retry_after = Some(value.to_owned()),
            ("status-after", Some(value)) => self.status_after = Some(status(value).ok_or_else(unknown)?),
            ("forget-key", None) => self.forget_key = true,
            ("slow-body", None) => self.slow_body = Some((3, Duration::from_millis(200))),
            ("slow-body", Some(value)) => self.slow_body = Some(pieces(value).ok_or_else(unknown)?),
            ("large", Some(value)) => {
                self.large = count(value).filter(|large| *large <= LARGEST).ok_or_else(unknown)?
            }
            ("stream", Some(value)) => self.stream = Some(count(value).ok_or_else(unknown)?),
            ("cut-stream", Some(value)) => self.cut_stream = Some(count(value).ok_or_else(unknown)?),
            ("close-idle", None) => self.close_idle = true,
            ("odd-headers", None) => self.odd_headers = true,
            ("gzip", None) => self.gzip = true,
            ("odd-json", None) => self.odd_json = true,
            ("times", Some(value)) => self.times = Some(value.parse().map_err(|_| unknown())?),
            _ => return Err(unknown()),
        }
        Ok(())
    }

    /// What is left of it for the how-many-eth request of a reference.
    pub fn at(self, number: u64) -> Self {
        match self.times {
            Some(times) if number > times => Self::default(),
            Some(_) | None => self,
        }
    }
}

fn count(text: &str) -> Option<usize> {
    text.parse().ok()
}

fn status(text: &str) -> Option<StatusCode> {
    let status: u16 = text.parse().ok()?;
    StatusCode::from_u16(status)
        .ok()
        .filter(|status| status.as_u16() >= 200)
}

fn duration(text: &str) -> Option<Duration> {
    let duration = match text.strip_suffix("ms") {
        Some(milliseconds) => Duration::from_millis(milliseconds.parse().ok()?),
        None => Duration::from_secs(text.strip_suffix('s')?.parse().ok()?),
    };
    (duration <= LONGEST).then_some(duration)
}

fn pieces(text: &str) -> Option<(usize, Duration)> {
    let (pieces, pause) = text.split_once('x')?;
    Some((
        count(pieces).filter(|pieces| (1..=1_000).contains(pieces))?,
        duration(pause)?,
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<Faults, String> {
        Faults::read(&HeaderMap::from_iter([(SANDBOX_FAULT, text.parse().unwrap())]))
    }

    #[test]
    fn faults_are_combined_and_unknown_ones_are_named() {
        let faults = read("delay=2s, status=503;retry-after=7 , times=2").unwrap();
        assert_eq!((faults.delay, faults.times), (Duration::from_secs(2), Some(2)));
        assert_eq!(faults.retry_after.as_deref(), Some("7"));
        assert_eq!(
            read("slow-body").unwrap().slow_body,
            read("slow-body=3x200ms").unwrap().slow_body
        );
        assert_eq!(
            read("slow-body=3x200ms").unwrap().slow_body,
            Some((3, Duration::from_millis(200)))
        );
        for bad in [
            "dely=1s",
            "delay",
            "delay=1h",
            "status=99",
            "drop-after=1",
            "slow-body=0x1s",
            "large=999999999999",
        ] {
            assert!(read(bad).is_err_and(|message| message.contains(bad)), "{bad}");
        }
    }

    #[test]
    fn a_fault_with_a_number_of_times_ends_after_them() {
        let faults = read("drop-after, times=1").unwrap();
        assert!(faults.clone().at(1).end.is_some());
        assert!(faults.at(2).end.is_none());
    }
}
