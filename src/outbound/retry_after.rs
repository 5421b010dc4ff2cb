//! `Retry-After` (RFC 9110, 10.2.3): seconds or a date. What is neither counts as absent.

use std::time::Duration;

use http::HeaderMap;
use http::header::{DATE, RETRY_AFTER};

/// How long the downstream asks us to wait. A date is read against the clock that the answer shows in `Date`, because ours
/// may differ, and counts as absent if it shows none; one in the past is no wait.
pub fn retry_after(headers: &HeaderMap) -> Option<Duration> {
    let text = headers.get(RETRY_AFTER)?.to_str().ok()?.trim();
    if !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit()) {
        // More seconds than fit are more than anybody waits.
        return Some(Duration::from_secs(text.parse().unwrap_or(u64::MAX)));
    }
    let until = httpdate::parse_http_date(text).ok()?;
    let now = httpdate::parse_http_date(headers.get(DATE)?.to_str().ok()?).ok()?;
    Some(until.duration_since(now).unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(value: &str) -> Option<u64> {
        let lines = [
            (RETRY_AFTER, value.parse().unwrap()),
            (DATE, "Wed, 21 Oct 2026 07:28:00 GMT".parse().unwrap()),
        ];
        retry_after(&lines.into_iter().collect()).map(|wait| wait.as_secs())
    }

    #[test]
    fn seconds_and_dates_are_read_and_the_rest_is_absent() {
        assert_eq!(read("7"), Some(7));
        assert_eq!(read("99999999999999999999999"), Some(u64::MAX));
        assert_eq!(read("Wed, 21 Oct 2026 07:28:09 GMT"), Some(9));
        assert_eq!(read("Wed, 21 Oct 2026 07:00:00 GMT"), Some(0));
        for odd in ["-1", "1.5", "soon", "", "1e9"] {
            assert_eq!(read(odd), None, "{odd}");
        }
    }
}
