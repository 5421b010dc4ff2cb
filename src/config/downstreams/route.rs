//! `[[downstreams.NAME.routes]]`: what a method and a path declare.

use std::collections::BTreeMap;
use std::time::Duration;

use http::{HeaderName, Method, StatusCode};
use serde::Deserialize;

use super::{header_name, one_or_more};
use crate::config::optional_duration;
use crate::outbound::downstream::{Ability, Call, CallBody, Limits, Probe, Retry, Route};
use crate::outbound::headers::may_be_set;
use crate::outbound::template::{Pointer, Template};

/// Methods that a route is for unless it names some.
const UNSAFE: [Method; 4] = [Method::POST, Method::PUT, Method::PATCH, Method::DELETE];

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct RouteSettings {
    #[serde(default, deserialize_with = "one_or_more")]
    method: Vec<String>,
    path: String,
    #[serde(default)]
    idempotency: Idempotency,
    key_header: Option<String>,
    key_form: Option<KeyForm>,
    #[serde(default, deserialize_with = "optional_duration")]
    key_retention: Option<Duration>,
    #[serde(default, deserialize_with = "optional_duration")]
    key_margin: Option<Duration>,
    read_back: Option<ProbeSettings>,
    look_up: Option<ProbeSettings>,
    #[serde(default, deserialize_with = "optional_duration")]
    settle_delay: Option<Duration>,
    #[serde(default, deserialize_with = "optional_duration")]
    interval: Option<Duration>,
    #[serde(default, deserialize_with = "optional_duration")]
    max_in_flight: Option<Duration>,
    require_key: Option<bool>,
    #[serde(default)]
    meaningful_headers: Vec<String>,
    reference: Option<String>,
    #[serde(default)]
    stream: bool,
    retry: Option<RetrySettings>,
    compensation: Option<CallSettings>,
    approval: Option<String>,
}

#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum Idempotency {
    Key,
    Conditional,
    Lookup,
    #[default]
    None,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
enum KeyForm {
    Plain,
    Quoted,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct ProbeSettings {
    path: String,
    #[serde(default)]
    found: String,
    ours: BTreeMap<String, String>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
struct RetrySettings {
    on: Option<Vec<u16>>,
    max_attempts: Option<u32>,
    #[serde(default, deserialize_with = "optional_duration")]
    first_delay: Option<Duration>,
    #[serde(default, deserialize_with = "optional_duration")]
    longest_delay: Option<Duration>,
    #[serde(default, deserialize_with = "optional_duration")]
    deadline: Option<Duration>,
}

/// A request made of templates: a kind's, filled in from the payload, or a reversal, filled in from the answer that it
/// reverses.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct CallSettings {
    method: String,
    path: String,
    #[serde(default)]
    headers: BTreeMap<String, String>,
    body: Option<BodySettings>,
}

#[derive(Debug, Clone, Deserialize)]
#[serde(untagged, expecting = "a JSON pointer, or a table of templates")]
enum BodySettings {
    Part(String),
    Object(BTreeMap<String, String>),
}

/// What holds where no route matches: the least.
pub fn undeclared(limits: &Limits, key_required: Option<bool>) -> Route {
    Route {
        name: "everything else".to_owned(),
        methods: UNSAFE.to_vec(),
        pattern: crate::outbound::downstream::Pattern::everything(),
        ability: Ability::None,
        key_required: key_required.unwrap_or(true),
        meaningful_headers: Vec::new(),
        max_in_flight: in_flight(limits),
        retry: retry(None),
        reference: None,
        compensation: None,
        stream: false,
    }
}

/// The longest that an attempt can take here, and as much again as a slow answer may take to be read.
fn in_flight(limits: &Limits) -> Duration {
    limits.head + limits.idle
}

fn retry(settings: Option<&RetrySettings>) -> Retry {
    let default = Retry {
        on: vec![StatusCode::TOO_MANY_REQUESTS, StatusCode::SERVICE_UNAVAILABLE],
        max_attempts: 5,
        first_delay: Duration::from_millis(500),
        longest_delay: Duration::from_secs(30),
        deadline: Duration::from_secs(600),
    };
    let Some(settings) = settings else { return default };
    Retry {
        on: default.on,
        max_attempts: settings.max_attempts.unwrap_or(default.max_attempts),
        first_delay: settings.first_delay.unwrap_or(default.first_delay),
        longest_delay: settings.longest_delay.unwrap_or(default.longest_delay),
        deadline: settings.deadline.unwrap_or(default.deadline),
    }
}

impl RouteSettings {
    /// As messages about the file name it.
    pub fn place(&self, at: usize) -> String {
        format!("number {} ({})", at + 1, self.name())
    }

    fn name(&self) -> String {
        if self.method.is_empty() {
            self.path.clone()
        } else {
            format!("{} {}", self.method.join("|"), self.path)
        }
    }

    pub fn route(&self, limits: &Limits, key_required: Option<bool>) -> Result<Route, String> {
        self.fits()?;
        let max_in_flight = self.max_in_flight.unwrap_or_else(|| in_flight(limits));
        if max_in_flight < limits.head {
            return Err(
                "max_in_flight must be at least head_timeout: for so long an attempt may be under way from here alone"
                    .to_owned(),
            );
        }
        match self.approval.as_deref() {
            None | Some("never") => {}
            Some(_) => return Err("approval: only \"never\" is possible so far".to_owned()),
        }
        let reference = self.reference.as_deref().map(pointer).transpose();
        let compensation = self.compensation.as_ref().map(CallSettings::call).transpose();
        Ok(Route {
            name: self.name(),
            methods: self.methods()?,
            pattern: self.path.parse().map_err(|error| format!("path: {error}"))?,
            ability: self.ability()?,
            key_required: self.require_key.or(key_required).unwrap_or(true),
            meaningful_headers: self.meaningful_headers()?,
            max_in_flight,
            retry: self.retry()?,
            reference: reference.map_err(|problem| format!("reference: {problem}"))?,
            compensation: compensation.map_err(|problem| format!("compensation: {problem}"))?,
            stream: self.stream,
        })
    }

    /// An option of another `idempotency` than the route's own promises what will not happen.
    fn fits(&self) -> Result<(), String> {
        use Idempotency::{Conditional, Key, Lookup};
        let options = [
            ("key_header", self.key_header.is_some(), Key, "key"),
            ("key_form", self.key_form.is_some(), Key, "key"),
            ("key_retention", self.key_retention.is_some(), Key, "key"),
            ("key_margin", self.key_margin.is_some(), Key, "key"),
            ("read_back", self.read_back.is_some(), Conditional, "conditional"),
            ("look_up", self.look_up.is_some(), Lookup, "lookup"),
            ("settle_delay", self.settle_delay.is_some(), Lookup, "lookup"),
            ("interval", self.interval.is_some(), Lookup, "lookup"),
        ];
        let odd = options
            .iter()
            .find(|(_, there, of, _)| *there && *of != self.idempotency);
        if let Some((option, _, _, of)) = odd {
            return Err(format!("{option} goes with idempotency = \"{of}\" only"));
        }
        // An answer is followed by another send only where a second send is harmless.
        let safe = [Key, Conditional].contains(&self.idempotency);
        if !safe && self.retry.as_ref().is_some_and(|retry| retry.on.is_some()) {
            return Err(
                "retry.on needs a route that is safe to send again: idempotency = \"key\" or \"conditional\""
                    .to_owned(),
            );
        }
        Ok(())
    }

    fn methods(&self) -> Result<Vec<Method>, String> {
        if self.method.is_empty() {
            return Ok(UNSAFE.to_vec());
        }
        self.method.iter().map(|name| method(name)).collect()
    }

    fn ability(&self) -> Result<Ability, String> {
        match self.idempotency {
            Idempotency::None => Ok(Ability::None),
            Idempotency::Key => self.key(),
            Idempotency::Conditional => {
                let read_back = self.read_back.as_ref().ok_or(
                    "idempotency = \"conditional\" needs read_back: a refusal alone does not tell whose object is there",
                )?;
                let read_back = read_back.probe().map_err(|problem| format!("read_back: {problem}"))?;
                Ok(Ability::Conditional { read_back })
            }
            Idempotency::Lookup => {
                let look_up = self.look_up.as_ref();
                let look_up = look_up.ok_or("idempotency = \"lookup\" needs look_up: where to ask, and for what")?;
                Ok(Ability::Lookup {
                    probe: look_up.probe().map_err(|problem| format!("look_up: {problem}"))?,
                    settle_delay: self.settle_delay.unwrap_or(Duration::from_secs(2)),
                    interval: self.interval.unwrap_or(Duration::from_secs(5)),
                })
            }
        }
    }

    fn key(&self) -> Result<Ability, String> {
        let header = header_name(self.key_header.as_deref().unwrap_or("Idempotency-Key"))
            .and_then(|name| settable(name, "key_header"))?;
        let retention = self.key_retention.ok_or(
            "idempotency = \"key\" needs key_retention: how long the downstream remembers a key, e.g. \"24h\"",
        )?;
        let margin = match self.key_margin {
            Some(margin) => margin,
            // A part of it, for clocks and for the way there.
            None => (retention / 24).clamp(Duration::from_secs(1), Duration::from_secs(3_600)),
        };
        if margin >= retention {
            return Err("key_margin must be less than key_retention, or no key is ever relied on".to_owned());
        }
        Ok(Ability::Key {
            header,
            quoted: self.key_form == Some(KeyForm::Quoted),
            retention,
            margin,
        })
    }

    fn meaningful_headers(&self) -> Result<Vec<HeaderName>, String> {
        self.meaningful_headers
            .iter()
            .map(|name| header_name(name).map_err(|problem| format!("meaningful_headers: {problem}")))
            .collect()
    }

    fn retry(&self) -> Result<Retry, String> {
        let mut retry = retry(self.retry.as_ref());
        if let Some(on) = self.retry.as_ref().and_then(|settings| settings.on.as_ref()) {
            retry.on = on.iter().map(|status| passing(*status)).collect::<Result<_, _>>()?;
        }
        if retry.max_attempts == 0 {
            return Err("retry.max_attempts must be at least 1".to_owned());
        }
        if retry.first_delay > retry.longest_delay {
            return Err("retry.first_delay must not be longer than retry.longest_delay".to_owned());
        }
        Ok(retry)
    }
}

/// A status that may say "not now". What says "done" or "never" is an answer.
fn passing(status: u16) -> Result<StatusCode, String> {
    StatusCode::from_u16(status)
        .ok()
        .filter(|status| status.is_client_error() || status.is_server_error())
        .ok_or_else(|| format!("retry.on: {status} is no error's status"))
}

impl ProbeSettings {
    fn probe(&self) -> Result<Probe, String> {
        if self.ours.is_empty() {
            return Err("ours must name at least one member that proves whose object it is".to_owned());
        }
        let ours = self.ours.iter().map(|(member, value)| {
            let member = pointer(member).map_err(|problem| format!("ours: {problem}"))?;
            let value = value.parse().map_err(|error| format!("ours, {member}: {error}"))?;
            Ok((member, value))
        });
        Ok(Probe {
            path: path(&self.path)?,
            found: pointer(&self.found).map_err(|problem| format!("found: {problem}"))?,
            ours: ours.collect::<Result<_, String>>()?,
        })
    }
}

impl CallSettings {
    pub fn call(&self) -> Result<Call, String> {
        let headers = self.headers.iter().map(|(name, value)| {
            let name = header_name(name).and_then(|name| settable(name, "headers"))?;
            let value = value.parse().map_err(|error| format!("headers, {name}: {error}"))?;
            Ok((name, value))
        });
        Ok(Call {
            method: method(&self.method)?,
            path: path(&self.path)?,
            headers: headers.collect::<Result<_, String>>()?,
            body: self.body.as_ref().map_or(Ok(CallBody::Empty), BodySettings::body)?,
        })
    }
}

impl BodySettings {
    fn body(&self) -> Result<CallBody, String> {
        match self {
            Self::Part(part) => pointer(part)
                .map(CallBody::Part)
                .map_err(|problem| format!("body: {problem}")),
            Self::Object(members) => {
                let member = |(name, value): (&String, &String)| {
                    let value = value.parse().map_err(|error| format!("body, {name}: {error}"))?;
                    Ok((name.clone(), value))
                };
                Ok(CallBody::Object(
                    members.iter().map(member).collect::<Result<_, String>>()?,
                ))
            }
        }
    }
}

fn method(name: &str) -> Result<Method, String> {
    let method = name
        .parse()
        .ok()
        .filter(|_| name.bytes().all(|byte| byte.is_ascii_uppercase()));
    match method {
        Some(Method::GET | Method::HEAD | Method::OPTIONS | Method::TRACE | Method::CONNECT) => Err(format!(
            "method: {name} changes nothing, and is passed on as it is; declare methods that do"
        )),
        Some(method) => Ok(method),
        None => Err(format!("method: {name:?} is no method; write e.g. \"POST\"")),
    }
}

fn pointer(text: &str) -> Result<Pointer, String> {
    text.parse().map_err(|error| format!("{error}"))
}

fn path(text: &str) -> Result<Template, String> {
    text.parse::<Template>()
        .map_err(|error| error.to_string())
        .and_then(|template| template.checked_path().map_err(|error| error.to_string()))
        .map_err(|problem| format!("path: {problem}"))
}

fn settable(name: HeaderName, option: &str) -> Result<HeaderName, String> {
    if may_be_set(&name) {
        Ok(name)
    } else {
        Err(format!(
            "{option}: {name} is about the connection, and not for settings"
        ))
    }
}
