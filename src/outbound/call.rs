//! A request put together from JSON: from an operation's payload, or for a reversal from the answer that is reversed.

use bytes::Bytes;
use http::header::CONTENT_TYPE;
use http::uri::PathAndQuery;
use http::{HeaderMap, HeaderValue};
use serde_json::{Map, Value};

use super::downstream::{Base, Call, CallBody, Probe};
use super::path;
use super::send::Request;
use super::template::{Missing, Template, Values};

/// Why no request can be made of these values. Nothing has been sent.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Unfit {
    #[error("the path: {0}")]
    Path(Missing),
    #[error("the header {name}: {missing}")]
    Header { name: String, missing: Missing },
    #[error("the header {name} would get a value that is no header text")]
    HeaderText { name: String },
    #[error("the body's member {member}: {missing}")]
    Member { member: String, missing: Missing },
    #[error("the body: there is no {pointer}")]
    Body { pointer: String },
}

impl Call {
    /// The request, the same bytes whenever it is made of the same values. Parts of the payload are written as compact
    /// JSON with sorted members; objects of templates have strings for members.
    pub fn request(&self, base: &Base, values: &Values<'_>) -> Result<Request, Unfit> {
        let mut headers = HeaderMap::new();
        let body = self.body.fill(values)?;
        if !matches!(self.body, CallBody::Empty) {
            headers.insert(CONTENT_TYPE, HeaderValue::from_static("application/json"));
        }
        for (name, template) in &self.headers {
            let text = template.fill(values).map_err(|missing| Unfit::Header {
                name: name.to_string(),
                missing,
            })?;
            let value = HeaderValue::from_str(&text).map_err(|_| Unfit::HeaderText { name: name.to_string() })?;
            headers.insert(name, value);
        }
        Ok(Request {
            method: self.method.clone(),
            path_and_query: filled(&self.path, base, values).map_err(Unfit::Path)?,
            headers,
            body,
        })
    }
}

impl CallBody {
    fn fill(&self, values: &Values<'_>) -> Result<Bytes, Unfit> {
        let value = match self {
            Self::Empty => return Ok(Bytes::new()),
            Self::Part(pointer) => pointer.find(values.payload).cloned().ok_or_else(|| Unfit::Body {
                pointer: pointer.to_string(),
            })?,
            Self::Object(members) => {
                let member = |(name, template): &(String, Template)| match template.fill(values) {
                    Ok(text) => Ok((name.clone(), Value::String(text))),
                    Err(missing) => Err(Unfit::Member {
                        member: name.clone(),
                        missing,
                    }),
                };
                Value::Object(members.iter().map(member).collect::<Result<Map<_, _>, _>>()?)
            }
        };
        Ok(Bytes::from(value.to_string()))
    }
}

impl Probe {
    /// Where to ask.
    pub fn path_and_query(&self, base: &Base, values: &Values<'_>) -> Result<PathAndQuery, Missing> {
        filled(&self.path, base, values)
    }

    /// What was found in an answer, if anything: `None` where there is nothing, null or an empty list.
    pub fn found<'a>(&self, answer: &'a Value) -> Option<&'a Value> {
        self.found.find(answer).filter(|found| match found {
            Value::Null => false,
            Value::Array(items) => !items.is_empty(),
            Value::Bool(_) | Value::Number(_) | Value::String(_) | Value::Object(_) => true,
        })
    }

    /// Whether an answer proves that the object is this operation's. Members are looked for in the whole answer.
    pub fn is_ours(&self, answer: &Value, values: &Values<'_>) -> Result<bool, Missing> {
        for (member, expected) in &self.ours {
            let expected = expected.fill(values)?;
            let there = member.find(answer).and_then(super::template::scalar);
            if there != Some(expected) {
                return Ok(false);
            }
        }
        Ok(true)
    }
}

fn filled(template: &Template, base: &Base, values: &Values<'_>) -> Result<PathAndQuery, Missing> {
    Ok(path::below(base, &template.fill_path(values)?)?)
}

#[cfg(test)]
mod tests {
    use super::*;
    use http::Method;
    use serde_json::json;

    fn call() -> Call {
        Call {
            method: Method::POST,
            path: "/charges/{/id}/refunds".parse().unwrap(),
            headers: vec![("x-account".parse().unwrap(), "acct {/account}".parse().unwrap())],
            body: CallBody::Object(vec![("ref".to_owned(), "{operation_id}".parse().unwrap())]),
        }
    }

    fn made(call: &Call, payload: &Value) -> Result<Request, Unfit> {
        call.request(
            &"https://api.example.com/v2".parse().unwrap(),
            &Values {
                operation_id: "o:1",
                key: "k",
                payload,
            },
        )
    }

    #[test]
    fn a_call_is_filled_in_below_the_base() {
        let request = made(&call(), &json!({"id": "ch 1", "account": 7})).unwrap();
        assert_eq!(request.path_and_query, "/v2/charges/ch%201/refunds");
        assert_eq!(request.headers["x-account"], "acct 7");
        assert_eq!(request.headers["content-type"], "application/json");
        assert_eq!(request.body, r#"{"ref":"o:1"}"#);
        let mut whole = call();
        whole.body = CallBody::Part("/a".parse().unwrap());
        let request = made(&whole, &json!({"id": 1, "account": 7, "a": {"z": 1, "b": [1.5, "x"]}})).unwrap();
        assert_eq!(request.body, r#"{"b":[1.5,"x"],"z":1}"#);
    }

    #[test]
    fn values_smuggle_neither_segments_nor_lines() {
        for (id, account) in [
            ("../x", "1"),
            ("1", "a\r\nX-Admin: 1"),
            ("", "1"),
            ("1/2", "1"),
            ("1", "a\u{0}"),
        ] {
            assert!(
                made(&call(), &json!({"id": id, "account": account})).is_err(),
                "{id:?} {account:?}"
            );
        }
        assert!(made(&call(), &json!({"id": "1"})).is_err());
    }

    #[test]
    fn an_object_is_ours_if_every_member_says_so() {
        let probe = Probe {
            path: "/charges?ref={/ref}".parse().unwrap(),
            found: "/data/0".parse().unwrap(),
            ours: vec![("/data/0/ref".parse().unwrap(), "{/ref}".parse().unwrap())],
        };
        let payload = json!({"ref": "r 1"});
        let values = Values {
            operation_id: "o",
            key: "k",
            payload: &payload,
        };
        let base = "http://h".parse().unwrap();
        assert_eq!(probe.path_and_query(&base, &values).unwrap(), "/charges?ref=r%201");
        for nothing in [
            json!({}),
            json!({"data": []}),
            json!({"data": [null]}),
            json!({"data": [[]]}),
            json!(null),
        ] {
            assert_eq!(probe.found(&nothing), None, "{nothing}");
        }
        let answer = json!({"data": [{"ref": "r 1"}]});
        assert!(probe.found(&answer).is_some() && probe.is_ours(&answer, &values).unwrap());
        let other = json!({"data": [{"ref": "r 2"}]});
        assert!(probe.found(&other).is_some() && !probe.is_ours(&other, &values).unwrap());
    }
}
