//! The fingerprint of a request: what must be the same for two requests under one id to be the same request.
//!
//! It is written `v1:` and the SHA-256 of the request's frames in 64 lowercase hexadecimal digits. Any client can work it
//! out; this is the whole recipe:
//!
//! - **bytes frame**: the number of bytes as 8 bytes, most significant first, and then the bytes. Text is UTF-8.
//! - **count frame**: a bytes frame that holds a count as 8 bytes, most significant first (so 16 bytes in all). It stands
//!   before whatever may be there or not, or more than once.
//! - **operation**: `op`, kind, canonical payload. Three bytes frames. The payload is the RFC 8785 text of the `payload`
//!   member, as [`canonical`](super::canonical) writes it.
//! - **proxy**: `px`, downstream, method, path and query, count of content types (0 or 1), the content type if there is
//!   one, `json` or `raw`, body, count of headers, and for each header its name and its value. The body is the RFC 8785
//!   text after `json`, and the bytes as they were sent after `raw`. Names of headers are in lower case and in the order
//!   of their bytes; lines of one name stay in the order in which they were sent.
//!
//! As every frame says how long it is, two requests share their bytes only if they share every part.
//!
//! Left to others: which headers matter, when a body is read as JSON, and everything that is deliberately not in here
//! (the run that asked, trace headers, credentials, time).

use std::fmt;
use std::str::FromStr;

use sha2::{Digest as _, Sha256};

use super::canonical::Node;

const VERSION: &str = "v1:";
const DIGEST_BYTES: usize = 32;
const HEX: &[u8; 16] = b"0123456789abcdef";

#[derive(Clone, Copy, Eq, Hash, PartialEq)]
pub struct Fingerprint([u8; DIGEST_BYTES]);

/// A request to a downstream, as it will be sent.
#[derive(Clone, Copy, Debug)]
pub struct ProxyRequest<'a> {
    pub downstream: &'a str,
    pub method: &'a str,
    pub path_and_query: &'a str,
    pub content_type: Option<&'a str>,
    pub body: Body<'a>,
    /// Those that the downstream's configuration lists as meaningful, one entry a line, in any order of names.
    pub headers: &'a [(&'a str, &'a [u8])],
}

#[derive(Clone, Copy, Debug)]
pub enum Body<'a> {
    /// Compared as JSON: spelling does not matter.
    Canonical(&'a Node<'a>),
    /// Compared byte by byte.
    Raw(&'a [u8]),
}

/// A text that is not a fingerprint. Positions count bytes from 0.
#[derive(Clone, Debug, Eq, PartialEq, thiserror::Error)]
pub enum InvalidFingerprint {
    #[error("a fingerprint begins with v1:")]
    Version,
    #[error("a fingerprint has 64 hexadecimal digits after v1:, not {digits}")]
    Length { digits: usize },
    #[error("a fingerprint has only 0-9 and a-f after v1:; see byte {at}")]
    Digit { at: usize },
}

impl Fingerprint {
    pub fn operation(kind: &str, payload: &Node) -> Self {
        Self::of_canonical(kind, &payload.canonical())
    }

    /// The same for a payload whose canonical text is at hand.
    pub fn of_canonical(kind: &str, canonical: &[u8]) -> Self {
        let mut hash = Sha256::new();
        operation_frames(kind, canonical, &mut |bytes| hash.update(bytes));
        Self(hash.finalize().into())
    }

    pub fn proxy(request: &ProxyRequest) -> Self {
        let mut hash = Sha256::new();
        proxy_frames(request, &mut |bytes| hash.update(bytes));
        Self(hash.finalize().into())
    }
}

impl fmt::Display for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        let mut digits = [0; 2 * DIGEST_BYTES];
        for (pair, byte) in digits.chunks_exact_mut(2).zip(self.0) {
            pair[0] = HEX[usize::from(byte >> 4)];
            pair[1] = HEX[usize::from(byte & 0xF)];
        }
        f.write_str(VERSION)?;
        // Digits are ASCII.
        f.write_str(std::str::from_utf8(&digits).unwrap_or_default())
    }
}

impl serde::Serialize for Fingerprint {
    fn serialize<S: serde::Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl fmt::Debug for Fingerprint {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

impl FromStr for Fingerprint {
    type Err = InvalidFingerprint;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        let digits = text
            .strip_prefix(VERSION)
            .ok_or(InvalidFingerprint::Version)?
            .as_bytes();
        if digits.len() != 2 * DIGEST_BYTES {
            return Err(InvalidFingerprint::Length { digits: digits.len() });
        }
        let mut digest = [0; DIGEST_BYTES];
        for (index, &digit) in digits.iter().enumerate() {
            let value = match digit {
                b'0'..=b'9' => digit - b'0',
                // One spelling only: texts are compared as texts elsewhere.
                b'a'..=b'f' => digit - b'a' + 10,
                _ => {
                    return Err(InvalidFingerprint::Digit {
                        at: VERSION.len() + index,
                    });
                }
            };
            digest[index / 2] = digest[index / 2] << 4 | value;
        }
        Ok(Self(digest))
    }
}

fn operation_frames(kind: &str, canonical: &[u8], sink: &mut impl FnMut(&[u8])) {
    bytes(b"op", sink);
    bytes(kind.as_bytes(), sink);
    bytes(canonical, sink);
}

fn proxy_frames(request: &ProxyRequest, sink: &mut impl FnMut(&[u8])) {
    bytes(b"px", sink);
    bytes(request.downstream.as_bytes(), sink);
    bytes(request.method.as_bytes(), sink);
    bytes(request.path_and_query.as_bytes(), sink);
    count(usize::from(request.content_type.is_some()), sink);
    if let Some(content_type) = request.content_type {
        bytes(content_type.as_bytes(), sink);
    }
    match request.body {
        Body::Canonical(node) => {
            bytes(b"json", sink);
            bytes(&node.canonical(), sink);
        }
        Body::Raw(body) => {
            bytes(b"raw", sink);
            bytes(body, sink);
        }
    }
    let mut headers: Vec<_> = request
        .headers
        .iter()
        .map(|(name, value)| (name.to_ascii_lowercase(), value))
        .collect();
    // Stable: the lines of one name keep their order.
    headers.sort_by(|a, b| a.0.cmp(&b.0));
    count(headers.len(), sink);
    for (name, value) in headers {
        bytes(name.as_bytes(), sink);
        bytes(value, sink);
    }
}

fn bytes(bytes: &[u8], sink: &mut impl FnMut(&[u8])) {
    sink(&(bytes.len() as u64).to_be_bytes());
    sink(bytes);
}

fn count(count: usize, sink: &mut impl FnMut(&[u8])) {
    bytes(&(count as u64).to_be_bytes(), sink);
}

#[cfg(test)]
mod tests {
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::super::canonical::parse;
    use super::*;

    const REQUEST: ProxyRequest = ProxyRequest {
        downstream: "payments",
        method: "POST",
        path_and_query: "/v1/refunds?expand=charge",
        content_type: Some("application/x-www-form-urlencoded"),
        body: Body::Raw(b"charge=ch_1&amount=500"),
        headers: &[("Stripe-Version", b"2026-01-01"), ("Accept", b"*/*")],
    };

    fn operation(kind: &str, payload: &str) -> Fingerprint {
        Fingerprint::operation(kind, &parse(payload.as_bytes(), 128).unwrap())
    }

    /// Worked out by another program, from this module's description alone.
    #[test]
    fn fingerprints_are_the_same_in_every_implementation() {
        assert_eq!(
            operation("order.refund", r#"{"order_id":"1001","amount":500}"#).to_string(),
            "v1:e90d1c68500f74f076febe8181530c008e4f7894a21f32ef51b300791d0d82a5"
        );
        assert_eq!(
            Fingerprint::proxy(&REQUEST).to_string(),
            "v1:0c194555813a00a7cf03f17ddbf3428387ed0ffdf1ba838fae1f46adcddfd799"
        );
        let node = parse(br#"{ "b": 1.0, "a": "\u00e9" }"#, 128).unwrap();
        let request = ProxyRequest {
            downstream: "crm",
            method: "DELETE",
            path_and_query: "/contacts/7",
            content_type: None,
            body: Body::Canonical(&node),
            headers: &[],
        };
        assert_eq!(
            Fingerprint::proxy(&request).to_string(),
            "v1:6e521366298c8d628ec536222863eae78a82ad28f2b8f10fd4a1cf45398a684c"
        );
    }

    #[test]
    fn spelling_does_not_matter_and_values_do() {
        let first = operation("order.refund", r#"{"order_id":"1001","amount":1}"#);
        for same in ["1.0", "1e0", "10e-1"] {
            assert_eq!(
                operation(
                    "order.refund",
                    &format!("{{ \"amount\" : {same}, \"order\\u005fid\":\"1001\" }}")
                ),
                first
            );
        }
        assert_ne!(operation("order.refund", r#"{"order_id":"1001","amount":"1"}"#), first);
        assert_ne!(operation("order.cancel", r#"{"order_id":"1001","amount":1}"#), first);
    }

    #[test]
    fn every_part_of_a_proxy_request_counts() {
        let node = parse(b"{}", 128).unwrap();
        let other = [
            ProxyRequest {
                downstream: "payment",
                ..REQUEST
            },
            ProxyRequest {
                method: "PUT",
                ..REQUEST
            },
            ProxyRequest {
                path_and_query: "/v1/refunds?expand=charges",
                ..REQUEST
            },
            ProxyRequest {
                content_type: None,
                ..REQUEST
            },
            ProxyRequest {
                content_type: Some(""),
                ..REQUEST
            },
            ProxyRequest {
                body: Body::Raw(b""),
                ..REQUEST
            },
            ProxyRequest {
                body: Body::Raw(b"{}"),
                ..REQUEST
            },
            ProxyRequest {
                body: Body::Canonical(&node),
                ..REQUEST
            },
            ProxyRequest {
                headers: &[],
                ..REQUEST
            },
            ProxyRequest {
                headers: &[("Stripe-Version", b"2026-01-01")],
                ..REQUEST
            },
            ProxyRequest {
                headers: &[("Stripe-Version", b"2026-01-01"), ("Accept", b"")],
                ..REQUEST
            },
            ProxyRequest {
                headers: &[("Accept", b"2026-01-01"), ("Stripe-Version", b"*/*")],
                ..REQUEST
            },
        ];
        let mut seen: Vec<_> = other.iter().chain([&REQUEST]).map(Fingerprint::proxy).collect();
        seen.sort_by_key(|fingerprint| fingerprint.0);
        seen.dedup();
        assert_eq!(seen.len(), other.len() + 1);
    }

    #[test]
    fn the_order_of_different_headers_and_the_case_of_names_do_not_matter() {
        let headers: &[(&str, &[u8])] = &[("accept", b"*/*"), ("stripe-version", b"2026-01-01")];
        assert_eq!(
            Fingerprint::proxy(&ProxyRequest { headers, ..REQUEST }),
            Fingerprint::proxy(&REQUEST)
        );
        let ab: &[(&str, &[u8])] = &[("x", b"a"), ("X", b"b")];
        let ba: &[(&str, &[u8])] = &[("x", b"b"), ("X", b"a")];
        let proxy = |headers| Fingerprint::proxy(&ProxyRequest { headers, ..REQUEST });
        assert_ne!(proxy(ab), proxy(ba));
    }

    #[test]
    fn a_fingerprint_is_read_as_it_is_written_and_in_no_other_way() {
        let fingerprint = Fingerprint::proxy(&REQUEST);
        let text = fingerprint.to_string();
        assert_eq!(text.parse(), Ok(fingerprint));
        let read = |text: &str| text.parse::<Fingerprint>();
        assert_eq!(read(&text[3..]), Err(InvalidFingerprint::Version));
        assert_eq!(read(&text.replace("v1", "v2")), Err(InvalidFingerprint::Version));
        assert_eq!(read(&text[..66]), Err(InvalidFingerprint::Length { digits: 63 }));
        assert_eq!(
            read(&format!("{text}0")),
            Err(InvalidFingerprint::Length { digits: 65 })
        );
        assert_eq!(
            read(&format!("v1:{}", "A".repeat(64))),
            Err(InvalidFingerprint::Digit { at: 3 })
        );
        assert_eq!(
            read(&format!("v1:{}g", "0".repeat(63))),
            Err(InvalidFingerprint::Digit { at: 66 })
        );
        assert_eq!(
            read(&format!("v1:{}", "é".repeat(32))),
            Err(InvalidFingerprint::Digit { at: 3 })
        );
    }

    /// The parts of a request in a form that can be compared.
    #[derive(Clone, Debug, PartialEq)]
    enum Parts {
        Operation {
            kind: String,
            payload: String,
        },
        Proxy {
            texts: [String; 3],
            content_type: Option<String>,
            json: bool,
            body: String,
            headers: Vec<(String, String)>,
        },
    }

    impl Parts {
        fn frames(&self) -> Vec<u8> {
            let mut frames = Vec::new();
            let mut sink = |bytes: &[u8]| frames.extend_from_slice(bytes);
            match self {
                Self::Operation { kind, payload } => {
                    operation_frames(kind, &parse(payload.as_bytes(), 128).unwrap().canonical(), &mut sink);
                }
                Self::Proxy {
                    texts: [downstream, method, path_and_query],
                    content_type,
                    json,
                    body,
                    headers,
                } => {
                    let node = parse(body.as_bytes(), 128).unwrap();
                    let headers: Vec<_> = headers
                        .iter()
                        .map(|(name, value)| (name.as_str(), value.as_bytes()))
                        .collect();
                    let body = if *json {
                        Body::Canonical(&node)
                    } else {
                        Body::Raw(body.as_bytes())
                    };
                    let content_type = content_type.as_deref();
                    proxy_frames(
                        &ProxyRequest {
                            downstream,
                            method,
                            path_and_query,
                            content_type,
                            body,
                            headers: &headers,
                        },
                        &mut sink,
                    );
                }
            }
            frames
        }
    }

    /// From few letters, and from the bytes that frames are made of, so that near misses are common.
    fn parts() -> impl Strategy<Value = Parts> {
        let text = || "(a|b|op|px|json|raw|\u{0}{7}[\u{0}\u{1}\u{2}]){0,2}";
        // Canonical already: each text is another value.
        let json = || prop_oneof!["[0-3]", "\"[ab]{0,2}\""];
        let headers = vec(("[ab]{1,2}", text()), 0..3).prop_map(|mut headers| {
            headers.sort_by(|a, b| a.0.cmp(&b.0));
            headers
        });
        let proxy = (
            [text(), text(), text()],
            prop::option::of(text()),
            any::<bool>(),
            json(),
            headers,
        );
        prop_oneof![
            (text(), json()).prop_map(|(kind, payload)| Parts::Operation { kind, payload }),
            proxy.prop_map(|(texts, content_type, json, body, headers)| Parts::Proxy {
                texts,
                content_type,
                json,
                body,
                headers
            }),
        ]
    }

    /// Takes frames apart again: what can be read back in one way only was not written for anything else.
    fn read_back(mut frames: &[u8]) -> Parts {
        let mut next = || {
            let (length, rest) = frames.split_first_chunk::<8>().unwrap();
            let (bytes, rest) = rest.split_at(u64::from_be_bytes(*length) as usize);
            frames = rest;
            bytes.to_vec()
        };
        let text = |bytes: Vec<u8>| String::from_utf8(bytes).unwrap();
        let count = |bytes: Vec<u8>| u64::from_be_bytes(bytes.try_into().unwrap());
        let parts = if next() == b"op" {
            Parts::Operation {
                kind: text(next()),
                payload: text(next()),
            }
        } else {
            let texts = [text(next()), text(next()), text(next())];
            let content_type = (count(next()) == 1).then(|| text(next()));
            let json = next() == b"json";
            let body = text(next());
            let headers = (0..count(next())).map(|_| (text(next()), text(next()))).collect();
            Parts::Proxy {
                texts,
                content_type,
                json,
                body,
                headers,
            }
        };
        assert!(frames.is_empty());
        parts
    }

    proptest! {
        #![proptest_config(ProptestConfig { cases: 2000, failure_persistence: None, ..ProptestConfig::default() })]

        #[test]
        fn different_requests_never_share_their_bytes(a in parts(), b in parts()) {
            prop_assert_eq!(a.frames() == b.frames(), a == b);
        }

        #[test]
        fn a_request_can_be_read_back_from_its_bytes(parts in parts()) {
            prop_assert_eq!(read_back(&parts.frames()), parts);
        }
    }
}
