//! Query parameters: each at most once, none unknown, none empty; and the cursors of lists.

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;

use super::problem::Problem;

const DEFAULT_LIMIT: i64 = 50;
const LARGEST_LIMIT: i64 = 500;

/// The parameters of one request; what is left at the end was unknown.
pub struct Parameters(Vec<(String, String)>);

impl Parameters {
    pub fn parse(query: Option<&str>) -> Result<Self, Problem> {
        let mut parameters: Vec<(String, String)> = Vec::new();
        for pair in query.unwrap_or_default().split('&').filter(|pair| !pair.is_empty()) {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            let (name, value) = (decoded(name)?, decoded(value)?);
            if value.is_empty() {
                return Err(Problem::parameter(
                    shortened(&name),
                    "the parameter is empty; leave it out or give it a value",
                ));
            }
            if value.contains('\0') {
                return Err(Problem::parameter(
                    shortened(&name),
                    "the parameter contains a NUL character",
                ));
            }
            if parameters.iter().any(|(known, _)| *known == name) {
                return Err(Problem::parameter(shortened(&name), "the parameter was sent twice"));
            }
            parameters.push((name, value));
        }
        Ok(Self(parameters))
    }

    /// Takes a parameter out.
    pub fn take(&mut self, name: &str) -> Option<String> {
        let index = self.0.iter().position(|(known, _)| known == name)?;
        Some(self.0.swap_remove(index).1)
    }

    /// `limit`, 1 to 500, 50 by default.
    pub fn limit(&mut self) -> Result<i64, Problem> {
        let Some(text) = self.take("limit") else {
            return Ok(DEFAULT_LIMIT);
        };
        text.parse()
            .ok()
            .filter(|limit| (1..=LARGEST_LIMIT).contains(limit) && text.bytes().all(|byte| byte.is_ascii_digit()))
            .ok_or_else(|| Problem::parameter("limit", "a limit is a whole number from 1 to 500"))
    }

    /// The two parts of `cursor`.
    pub fn cursor(&mut self) -> Result<Option<(String, String)>, Problem> {
        let Some(text) = self.take("cursor") else {
            return Ok(None);
        };
        let bytes = URL_SAFE_NO_PAD.decode(text).map_err(|_| bad_cursor())?;
        let text = String::from_utf8(bytes).map_err(|_| bad_cursor())?;
        let (first, second) = text.split_once(' ').ok_or_else(bad_cursor)?;
        if second.contains('\0') {
            return Err(bad_cursor());
        }
        Ok(Some((first.to_owned(), second.to_owned())))
    }

    /// Refuses what nobody took.
    pub fn finish(self) -> Result<(), Problem> {
        match self.0.first() {
            Some((name, _)) => Err(Problem::parameter(shortened(name), "there is no such parameter")),
            None => Ok(()),
        }
    }
}

/// A cursor that points behind an item with these two sort keys; neither may contain a blank.
pub fn cursor(first: &str, second: &str) -> String {
    URL_SAFE_NO_PAD.encode(format!("{first} {second}"))
}

pub fn bad_cursor() -> Problem {
    Problem::parameter("cursor", "send next_cursor of the page before as it was")
}

fn shortened(name: &str) -> String {
    name.chars().take(60).collect()
}

/// Percent-decoding of `application/x-www-form-urlencoded`.
fn decoded(text: &str) -> Result<String, Problem> {
    let broken = || Problem::parameter(shortened(text), "the query is not percent-encoded UTF-8");
    let mut bytes = Vec::with_capacity(text.len());
    let mut rest = text.bytes();
    while let Some(byte) = rest.next() {
        bytes.push(match byte {
            b'+' => b' ',
            b'%' => {
                let mut digit = || rest.next().and_then(|digit| char::from(digit).to_digit(16));
                let (high, low) = (digit().ok_or_else(broken)?, digit().ok_or_else(broken)?);
                u8::try_from(high * 16 + low).map_err(|_| broken())?
            }
            byte => byte,
        });
    }
    String::from_utf8(bytes).map_err(|_| broken())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parameters_are_decoded_and_strict() {
        let mut good = Parameters::parse(Some("kind=order%2Erefund&run_id=a+b&limit=7")).unwrap();
        assert_eq!(good.take("kind").as_deref(), Some("order.refund"));
        assert_eq!(good.take("run_id").as_deref(), Some("a b"));
        assert_eq!(good.limit().unwrap(), 7);
        assert!(good.finish().is_ok());
        for bad in ["a=1&a=2", "a=", "a", "a=%", "a=%zz", "a=%ff", "a=%00"] {
            assert!(Parameters::parse(Some(bad)).is_err(), "{bad}");
        }
        assert!(Parameters::parse(Some("x=1")).unwrap().finish().is_err());
        for bad in ["0", "501", "-1", "+5", "x", "5.0"] {
            assert!(
                Parameters::parse(Some(&format!("limit={}", bad.replace('+', "%2B"))))
                    .unwrap()
                    .limit()
                    .is_err(),
                "{bad}"
            );
        }
    }

    #[test]
    fn a_cursor_comes_back_as_it_went() {
        let text = format!("cursor={}", cursor("2026-01-01T00:00:00.000000Z", "a/b%"));
        let parts = Parameters::parse(Some(&text)).unwrap().cursor().unwrap().unwrap();
        assert_eq!(parts, ("2026-01-01T00:00:00.000000Z".to_owned(), "a/b%".to_owned()));
        assert!(Parameters::parse(Some("cursor=abc")).unwrap().cursor().is_err());
    }
}
