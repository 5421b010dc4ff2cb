//! Header lines on their way through: which go to the downstream, which come back, and which are kept.
//!
//! Hop-by-hop lines go nowhere. A caller's credentials end here. Of an answer, the lines that describe its content are
//! kept and replayed, and the first caller gets exactly these too, so that nobody can tell a replay by what is missing.

use http::header::{
    self, ACCEPT_RANGES, ALLOW, AUTHORIZATION, CONNECTION, CONTENT_DISPOSITION, CONTENT_ENCODING, CONTENT_LANGUAGE,
    CONTENT_LENGTH, CONTENT_LOCATION, CONTENT_RANGE, CONTENT_TYPE, COOKIE, ETAG, EXPECT, FORWARDED, HOST,
    LAST_MODIFIED, LINK, LOCATION, PROXY_AUTHENTICATE, PROXY_AUTHORIZATION, RETRY_AFTER, SET_COOKIE, TE, TRAILER,
    TRANSFER_ENCODING, UPGRADE, VARY, WWW_AUTHENTICATE,
};
use http::{HeaderMap, HeaderName, HeaderValue};

use super::downstream::Downstream;

/// Concern one connection only, whether or not `Connection` names them (RFC 9110, 7.6.1).
static HOP_BY_HOP: [HeaderName; 10] = [
    CONNECTION,
    HeaderName::from_static("keep-alive"),
    HeaderName::from_static("proxy-connection"),
    PROXY_AUTHENTICATE,
    PROXY_AUTHORIZATION,
    TE,
    TRAILER,
    TRANSFER_ENCODING,
    UPGRADE,
    HeaderName::from_static("http2-settings"),
];

/// Of a caller's request, meant for us: whom it wants, how long its body is, who it is, and what we are to do.
static OURS: [HeaderName; 9] = [
    HOST,
    CONTENT_LENGTH,
    EXPECT,
    AUTHORIZATION,
    COOKIE,
    HeaderName::from_static("idempotency-key"),
    HeaderName::from_static("prefer"),
    FORWARDED,
    HeaderName::from_static("x-real-ip"),
];

/// Describe an answer's content, and mean the same whenever it is read.
static REPLAYED: [HeaderName; 20] = [
    CONTENT_TYPE,
    CONTENT_ENCODING,
    CONTENT_LANGUAGE,
    CONTENT_LOCATION,
    CONTENT_DISPOSITION,
    CONTENT_RANGE,
    HeaderName::from_static("content-digest"),
    HeaderName::from_static("repr-digest"),
    HeaderName::from_static("digest"),
    HeaderName::from_static("content-md5"),
    ETAG,
    LAST_MODIFIED,
    LOCATION,
    LINK,
    RETRY_AFTER,
    VARY,
    ALLOW,
    ACCEPT_RANGES,
    HeaderName::from_static("accept-patch"),
    HeaderName::from_static("accept-post"),
];

/// Never stored, whatever a downstream's settings say, beside the names of requests: framing, the moment of one answer,
/// and what is between the downstream and us.
static NEVER_REPLAYED: [HeaderName; 6] = [
    CONTENT_LENGTH,
    header::DATE,
    header::CACHE_CONTROL,
    SET_COOKIE,
    WWW_AUTHENTICATE,
    HeaderName::from_static("authentication-info"),
];

/// What we say ourselves, of every answer or of an operation.
static OUR_ANSWERS: [HeaderName; 6] = [
    HeaderName::from_static("request-id"),
    HeaderName::from_static("operation-id"),
    HeaderName::from_static("operation-state"),
    HeaderName::from_static("receipt-expires"),
    HeaderName::from_static("idempotent-replayed"),
    HeaderName::from_static("preference-applied"),
];

/// Under which providers say how they name a request in their logs.
const REQUEST_IDS: [&str; 13] = [
    "request-id",
    "x-request-id",
    "x-correlation-id",
    "x-trace-id",
    "cf-ray",
    "x-amzn-requestid",
    "x-amz-request-id",
    "x-amz-cf-id",
    "x-ms-request-id",
    "x-github-request-id",
    "x-goog-request-id",
    "x-cloud-trace-context",
    "paypal-debug-id",
];

/// Longest text that [`evidence`] gives.
const LONGEST_EVIDENCE: usize = 300;

/// The lines of a caller's request that go on to a downstream.
pub fn forwarded(request: &HeaderMap) -> HeaderMap {
    without(request, |name| {
        OURS.contains(name) || name.as_str().starts_with("x-forwarded-") || name.as_str().starts_with("proxy-")
    })
}

/// The lines of an answer that are not about the connection. `Content-Length` is among them, for answers to HEAD and
/// for those that are passed on as they come; whoever stores an answer counts its bytes.
pub fn end_to_end(answer: &HeaderMap) -> HeaderMap {
    without(answer, |_| false)
}

/// The lines of an answer that are stored, in their order, for the first caller as for every replay.
pub fn replayed(downstream: &Downstream, answer: &HeaderMap) -> Vec<(String, String)> {
    end_to_end(answer)
        .iter()
        .filter(|(name, _)| REPLAYED.contains(name) || downstream.replayed_headers.contains(name))
        .filter(|(name, _)| may_be_replayed(name))
        .map(|(name, value)| (name.as_str().to_owned(), decode_latin1(value.as_bytes())))
        .collect()
}

/// The lines of an answer that is passed on without being stored: all but those between the downstream and us, and those
/// that we say ourselves. `Content-Length` stays, for answers to HEAD.
pub fn passed(answer: &HeaderMap) -> Vec<(String, String)> {
    lines(&without(answer, |name| {
        OUR_ANSWERS.contains(name) || (NEVER_REPLAYED.contains(name) && *name != CONTENT_LENGTH)
    }))
}

/// Whether settings may ask for this line to be stored and replayed.
pub fn may_be_replayed(name: &HeaderName) -> bool {
    !NEVER_REPLAYED.contains(name)
        && !OUR_ANSWERS.contains(name)
        && !HOP_BY_HOP.contains(name)
        && !REQUEST_IDS.contains(&name.as_str())
}

/// Whether settings may put this line on requests of their own: not those that frame or route a message.
pub fn may_be_set(name: &HeaderName) -> bool {
    !HOP_BY_HOP.contains(name) && ![HOST, CONTENT_LENGTH, EXPECT].contains(name)
}

/// By what the downstream's people will find this request, in their own words.
pub fn evidence(answer: &HeaderMap) -> Option<String> {
    let lines: Vec<String> = REQUEST_IDS
        .iter()
        .filter_map(|name| answer.get(*name).map(|value| (name, decode_latin1(value.as_bytes()))))
        .map(|(name, value)| format!("{name}: {value}"))
        .collect();
    (!lines.is_empty()).then(|| lines.join("; ").chars().take(LONGEST_EVIDENCE).collect())
}

/// Header lines as they are stored: in their order, values as ISO-8859-1 characters.
pub fn lines(headers: &HeaderMap) -> Vec<(String, String)> {
    headers
        .iter()
        .map(|(name, value)| (name.as_str().to_owned(), decode_latin1(value.as_bytes())))
        .collect()
}

/// A header value's bytes as characters, one for one (ISO-8859-1).
pub fn decode_latin1(bytes: &[u8]) -> String {
    bytes.iter().map(|&byte| char::from(byte)).collect()
}

/// The bytes again; `None` if the text never were bytes.
pub fn encode_latin1(text: &str) -> Option<Vec<u8>> {
    text.chars().map(|character| u8::try_from(character).ok()).collect()
}

fn without(lines: &HeaderMap, dropped: impl Fn(&HeaderName) -> bool) -> HeaderMap {
    let named = named_by_connection(lines);
    lines
        .iter()
        .filter(|(name, _)| !HOP_BY_HOP.contains(name) && !named.contains(name) && !dropped(name))
        .map(|(name, value)| (name.clone(), value.clone()))
        .fold(HeaderMap::with_capacity(lines.len()), |mut kept, (name, value)| {
            kept.append(name, value);
            kept
        })
}

fn named_by_connection(lines: &HeaderMap) -> Vec<HeaderName> {
    lines
        .get_all(CONNECTION)
        .iter()
        .flat_map(|line| line.as_bytes().split(|&byte| byte == b','))
        .filter_map(|name| HeaderName::from_bytes(name.trim_ascii()).ok())
        .collect()
}

/// For how long a peer keeps an idle connection, if it says so (`Keep-Alive: timeout=5`).
pub(super) fn keep_alive_seconds(answer: &HeaderMap) -> Option<u64> {
    answer
        .get_all("keep-alive")
        .iter()
        .filter_map(|line: &HeaderValue| line.to_str().ok())
        .flat_map(|line| line.split(','))
        .find_map(|part| part.trim().strip_prefix("timeout=")?.parse().ok())
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::outbound::samples::downstream;

    fn lines(text: &str) -> HeaderMap {
        let mut map = HeaderMap::new();
        for line in text.lines().map(str::trim).filter(|line| !line.is_empty()) {
            let (name, value) = line.split_once(": ").unwrap();
            let name = HeaderName::from_bytes(name.as_bytes()).unwrap();
            map.append(name, HeaderValue::from_bytes(value.as_bytes()).unwrap());
        }
        map
    }

    fn names(map: &HeaderMap) -> Vec<&str> {
        map.keys().map(HeaderName::as_str).collect()
    }

    #[test]
    fn credentials_and_hop_by_hop_lines_end_here() {
        let request = lines(
            "Host: ledger
             Authorization: Bearer opl_x
             Proxy-Authorization: Basic x
             Proxy-Connection: keep-alive
             Proxy-Something: 1
             Cookie: a=b
             Connection: close, X-Hop
             Connection: x-other
             X-Hop: 1
             X-Other: 1
             Keep-Alive: timeout=5
             TE: trailers
             Trailer: X
             Transfer-Encoding: chunked
             Upgrade: h2c
             HTTP2-Settings: x
             Content-Length: 3
             Expect: 100-continue
             Idempotency-Key: k
             Prefer: wait=5
             Forwarded: for=1
             X-Forwarded-For: 1
             X-Forwarded-Host: h
             X-Real-Ip: 1
             Content-Type: application/json
             Accept: a/b
             Accept: c/d
             X-Api-Version: 3
             User-Agent: me
             Traceparent: 00-1
             Tracestate: a=b",
        );
        let forwarded = forwarded(&request);
        assert_eq!(
            names(&forwarded),
            [
                "content-type",
                "accept",
                "x-api-version",
                "user-agent",
                "traceparent",
                "tracestate"
            ]
        );
        assert_eq!(forwarded.get_all("accept").iter().count(), 2);
        assert!(!forwarded.contains_key("accept-encoding"), "none is made up");
        assert_eq!(super::forwarded(&lines("Accept-Encoding: br"))["accept-encoding"], "br");
    }

    #[test]
    fn what_describes_the_content_is_kept_line_by_line() {
        let answer = lines(
            "Content-Type: application/json
             Link: <a>; rel=next
             Link: <b>; rel=prev
             Content-Disposition: attachment; filename=\"a,b.txt\"
             Location: /charges/1
             ETag: \"x\"
             X-Total: 3
             Set-Cookie: a=b
             WWW-Authenticate: Basic
             Date: now
             Server: s
             X-Request-Id: 7
             Content-Length: 5
             Cache-Control: private
             Idempotent-Replayed: true
             Connection: close, retry-after
             Retry-After: 3
             Keep-Alive: timeout=5",
        );
        let mut downstream = downstream();
        let kept = |downstream: &Downstream| -> Vec<String> {
            let lines = replayed(downstream, &answer);
            lines.into_iter().map(|(name, _)| name).collect()
        };
        let usual = [
            "content-type",
            "link",
            "link",
            "content-disposition",
            "location",
            "etag",
        ];
        assert_eq!(kept(&downstream), usual);
        for name in [
            "x-total",
            "set-cookie",
            "connection",
            "keep-alive",
            "content-length",
            "date",
            "www-authenticate",
            "x-request-id",
        ] {
            downstream.replayed_headers.push(HeaderName::from_static(name));
        }
        assert_eq!(kept(&downstream)[6..], ["x-total"]);
        let passed: Vec<String> = passed(&answer).into_iter().map(|(name, _)| name).collect();
        assert_eq!(passed[..6], usual);
        assert_eq!(passed[6..], ["x-total", "server", "x-request-id", "content-length"]);
        assert_eq!(evidence(&answer).as_deref(), Some("x-request-id: 7"));
        assert_eq!(keep_alive_seconds(&answer), Some(5));
        assert!(end_to_end(&answer).contains_key("content-length"));
    }

    #[test]
    fn every_byte_of_a_value_comes_back() {
        let bytes: Vec<u8> = (0..=255).collect();
        assert_eq!(encode_latin1(&decode_latin1(&bytes)).unwrap(), bytes);
        assert_eq!(encode_latin1("€"), None);
    }

    #[test]
    fn a_value_cannot_smuggle_a_line() {
        for bad in ["a\r\nX: 1", "a\nb", "a\0b", "a\rb"] {
            assert!(HeaderValue::from_str(bad).is_err() && HeaderValue::from_bytes(bad.as_bytes()).is_err());
        }
    }
}
