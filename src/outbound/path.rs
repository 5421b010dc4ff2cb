//! Paths that are sent: the caller's bytes below the downstream's base, or nothing.
//!
//! A path is refused where two readers could take it for different things: whatever a policy says about a path must
//! hold for the path that the downstream sees. So nothing is normalised, decoded or repaired here. What matches a
//! route's pattern is [`super::downstream::Pattern`]'s business.

use http::uri::PathAndQuery;

use super::downstream::Base;

/// Why a path is not sent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Refused {
    #[error("it does not begin with a slash")]
    NoSlash,
    #[error("it has a dot segment (. or .., in some spelling)")]
    DotSegment,
    #[error("it has an empty segment (//)")]
    EmptySegment,
    #[error("it has a slash or a backslash in a disguise (\\, %2f or %5c)")]
    Separator,
    #[error("it has a control character, or one that an address cannot carry unencoded")]
    Character,
    #[error("it has a % that is not followed by two hexadecimal digits")]
    Escape,
    #[error("it is too long")]
    TooLong,
}

/// Path and query below the base: `path` is what stands behind `/v1/proxy/{downstream}`, as it was sent.
pub fn join(base: &Base, path: &str, query: Option<&str>) -> Result<PathAndQuery, Refused> {
    // Without a slash it would go on with the base's last segment.
    if !path.is_empty() && !path.starts_with('/') {
        return Err(Refused::NoSlash);
    }
    if path.contains('?') {
        return Err(Refused::Character);
    }
    let mut whole = String::with_capacity(base.path.len() + path.len() + 1 + query.map_or(0, str::len));
    whole.push_str(&base.path);
    whole.push_str(path);
    if let Some(query) = query {
        if whole.is_empty() {
            whole.push('/');
        }
        whole.push('?');
        whole.push_str(query);
    }
    if whole.is_empty() {
        whole.push('/');
    }
    // The very text that is sent, the base included.
    check(&whole)?;
    PathAndQuery::try_from(whole).map_err(|_| Refused::TooLong)
}

/// The same for path and query in one, as a filled template has them.
pub fn below(base: &Base, path_and_query: &str) -> Result<PathAndQuery, Refused> {
    match path_and_query.split_once('?') {
        Some((path, query)) => join(base, path, Some(query)),
        None => join(base, path_and_query, None),
    }
}

/// Whether path and query may be sent.
pub fn check(path_and_query: &str) -> Result<(), Refused> {
    let Some((path, query)) = path_and_query.split_once('?') else {
        return check_path(path_and_query);
    };
    check_path(path)?;
    escapes(query)?;
    if query.bytes().all(in_query) {
        Ok(())
    } else {
        Err(Refused::Character)
    }
}

/// Whether a path may be sent.
pub fn check_path(path: &str) -> Result<(), Refused> {
    escapes(path)?;
    let Some(below) = path.strip_prefix('/') else {
        return Err(Refused::NoSlash);
    };
    if path.contains('\\') {
        return Err(Refused::Separator);
    }
    if !path.bytes().all(|byte| byte == b'/' || in_segment(byte)) {
        return Err(Refused::Character);
    }
    let mut segments = below.split('/').peekable();
    while let Some(segment) = segments.next() {
        // A slash at the end is part of the path's name, and no empty segment in it.
        if segment.is_empty() && segments.peek().is_some() {
            return Err(Refused::EmptySegment);
        }
        decoded(segment)?;
    }
    Ok(())
}

/// Looks at a segment as readers do that decode once, twice, and so on.
fn decoded(segment: &str) -> Result<(), Refused> {
    let mut bytes = segment.as_bytes().to_vec();
    loop {
        // Some servers cut parameters off before they look for dots.
        let name = bytes.split(|&byte| byte == b';').next().unwrap_or_default();
        if name == b"." || name == b".." {
            return Err(Refused::DotSegment);
        }
        if bytes.iter().any(|byte| b"/\\".contains(byte)) {
            return Err(Refused::Separator);
        }
        if bytes.iter().any(u8::is_ascii_control) {
            return Err(Refused::Character);
        }
        let next = percent_decoded(&bytes);
        if next == bytes {
            return Ok(());
        }
        bytes = next;
    }
}

/// Once decoded; what is no escape stays.
pub(super) fn percent_decoded(bytes: &[u8]) -> Vec<u8> {
    let mut decoded = Vec::with_capacity(bytes.len());
    let mut rest = bytes;
    while let [first, behind @ ..] = rest {
        let escape = match (first, behind) {
            (b'%', [high, low, ..]) => hex(*high).zip(hex(*low)),
            _ => None,
        };
        match escape {
            Some((high, low)) => {
                decoded.push(high << 4 | low);
                rest = &behind[2..];
            }
            None => {
                decoded.push(*first);
                rest = behind;
            }
        }
    }
    decoded
}

fn hex(digit: u8) -> Option<u8> {
    char::from(digit)
        .to_digit(16)
        .and_then(|digit| u8::try_from(digit).ok())
}

fn escapes(text: &str) -> Result<(), Refused> {
    let well_formed = |after: &str| {
        let digits = after.as_bytes();
        digits.len() >= 2 && digits[0].is_ascii_hexdigit() && digits[1].is_ascii_hexdigit()
    };
    if text.split('%').skip(1).all(well_formed) {
        Ok(())
    } else {
        Err(Refused::Escape)
    }
}

/// RFC 3986: `pchar`, and the sign of an escape.
fn in_segment(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || b"-._~%!$&'()*+,;=:@".contains(&byte)
}

/// `query`, with the few more that many clients send as they are.
fn in_query(byte: u8) -> bool {
    in_segment(byte) || b"/?[]|^`{}".contains(&byte)
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::uri::Scheme;

    fn base(path: &str) -> Base {
        Base {
            scheme: Scheme::HTTPS,
            authority: "api.example.com".parse().unwrap(),
            path: path.to_owned(),
        }
    }

    fn joined(path: &str, query: Option<&str>) -> Result<String, Refused> {
        join(&base("/base"), path, query).map(|joined| joined.to_string())
    }

    #[test]
    fn the_bytes_are_forwarded_as_they_are() {
        for path in [
            "",
            "/",
            "/a",
            "/a/",
            "/a%20b",
            "/%E2%82%AC",
            "/a.b",
            "/...",
            "/.a",
            "/a..",
            "/a;b=.",
            "/a:b@c",
            "/%25",
            "/a+b",
            "/~x",
            "/.well-known/x",
            "/%2Ea",
        ] {
            assert_eq!(joined(path, None).unwrap(), format!("/base{path}"), "{path}");
        }
        for query in ["", "a=b", "a=/../b", "a=%2f%2e", "a=b?c", "a[]=1|2", "a=%0d%0a"] {
            assert_eq!(
                joined("/x", Some(query)).unwrap(),
                format!("/base/x?{query}"),
                "{query}"
            );
        }
        assert_eq!(join(&base(""), "", None).unwrap(), "/");
        assert_eq!(join(&base(""), "", Some("a")).unwrap(), "/?a");
        assert_eq!(below(&base("/b"), "/c?d=?").unwrap(), "/b/c?d=?");
    }

    #[test]
    fn dot_segments_are_refused_in_every_spelling() {
        for path in [
            "/.",
            "/..",
            "/./x",
            "/a/../b",
            "/a/..",
            "/%2e",
            "/%2E%2e/x",
            "/.%2E",
            "/%2e.",
            "/..;a=b",
            "/.;",
            "/%2e%2e;x/y",
            "/..%3bx",
            "/%252e%252e/x",
            "/%25%32%65",
            "/%2525252e",
        ] {
            assert_eq!(joined(path, None), Err(Refused::DotSegment), "{path}");
        }
    }

    #[test]
    fn separators_in_disguise_empty_segments_and_odd_characters_are_refused() {
        let cases = [
            ("//", Refused::EmptySegment),
            ("//x", Refused::EmptySegment),
            ("/a//b", Refused::EmptySegment),
            ("/a//", Refused::EmptySegment),
            ("/a\\b", Refused::Separator),
            ("/a%5cb", Refused::Separator),
            ("/a%5C..", Refused::Separator),
            ("/a%2fb", Refused::Separator),
            ("/a%2F..%2Fb", Refused::Separator),
            ("/a%252fb", Refused::Separator),
            ("/a%00", Refused::Character),
            ("/a%0d%0ab", Refused::Character),
            ("/a%7f", Refused::Character),
            ("/a b", Refused::Character),
            ("/a\r\nb", Refused::Character),
            ("/a\tb", Refused::Character),
            ("/é", Refused::Character),
            ("/a#b", Refused::Character),
            ("/a<b", Refused::Character),
            ("/%", Refused::Escape),
            ("/%2", Refused::Escape),
            ("/%zz", Refused::Escape),
            ("/%+1", Refused::Escape),
        ];
        for (path, why) in cases {
            assert_eq!(joined(path, None), Err(why), "{path}");
        }
        assert_eq!(joined("x", None), Err(Refused::NoSlash));
        assert!(joined("/a?b", None).is_err());
        for query in ["a#b", "a b", "a\r\nb", "%", "%g0", "é", "a\"b"] {
            assert!(joined("/x", Some(query)).is_err(), "{query}");
        }
    }
}
