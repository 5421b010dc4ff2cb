//! `[downstreams.NAME]`: the APIs that requests are forwarded to, and what each route of them declares.
//!
//! What does not fit together is refused here, with the place and the reason: a route that promises what it has not
//! declared would be recovered in a way that nobody wants.

mod credential;
mod route;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use http::HeaderName;
use serde::{Deserialize, Deserializer};

use self::credential::CredentialSettings;
pub(super) use self::route::CallSettings;
use self::route::RouteSettings;
use super::{Error, optional_duration};
use crate::outbound::downstream::{Base, Downstream, Identity, Limits, Tls};
use crate::outbound::registry::Downstreams;
use crate::outbound::{headers, tls};

/// Longest request body that may be allowed: PostgreSQL holds a value to a gigabyte, and `pg_dump` writes two digits a byte.
const LARGEST_REQUEST: usize = 256 << 20;

/// `[downstreams.NAME]`: where it is, who we are to it, and what an attempt may take.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct DownstreamSettings {
    url: String,
    credential: Option<CredentialSettings>,
    ca_file: Option<PathBuf>,
    client_cert_file: Option<PathBuf>,
    client_key_file: Option<PathBuf>,
    #[serde(default)]
    http2: bool,
    #[serde(default, deserialize_with = "optional_duration")]
    connect_timeout: Option<Duration>,
    #[serde(default, deserialize_with = "optional_duration")]
    head_timeout: Option<Duration>,
    #[serde(default, deserialize_with = "optional_duration")]
    idle_timeout: Option<Duration>,
    concurrency: Option<usize>,
    max_request_bytes: Option<usize>,
    max_stored_body: Option<usize>,
    #[serde(default)]
    replayed_headers: Vec<String>,
    /// For every route that does not say otherwise.
    require_key: Option<bool>,
    #[serde(default)]
    routes: Vec<RouteSettings>,
}

/// What is wrong: with the file itself, with a secret, or with another file it names.
pub(super) enum Fault {
    Value(String),
    Secret(String),
    Read(Error),
}

impl From<String> for Fault {
    fn from(problem: String) -> Self {
        Self::Value(problem)
    }
}

impl Fault {
    /// With the place in front.
    pub(super) fn within(self, place: &str) -> Self {
        match self {
            Self::Value(problem) => Self::Value(format!("{place}: {problem}")),
            Self::Secret(problem) => Self::Secret(format!("{place}: {problem}")),
            read @ Self::Read(_) => read,
        }
    }

    pub(super) fn at(self, path: &Path) -> Error {
        match self {
            Self::Value(problem) => Error::Value {
                path: path.to_owned(),
                problem,
            },
            Self::Secret(problem) => Error::Secret {
                path: path.to_owned(),
                problem,
            },
            Self::Read(error) => error,
        }
    }
}

/// Every downstream of the file, which lies in `folder`.
pub(super) fn read(settings: &BTreeMap<String, DownstreamSettings>, folder: &Path) -> Result<Downstreams, Fault> {
    settings
        .iter()
        .map(|(name, settings)| {
            settings
                .downstream(name, folder)
                .map_err(|problem| problem.within(&format!("downstreams.{name}")))
        })
        .collect()
}

impl DownstreamSettings {
    fn downstream(&self, name: &str, folder: &Path) -> Result<Downstream, Fault> {
        if !is_name(name) {
            return Err(Fault::Value(
                "a downstream's name is 1 to 40 of a-z, 0-9 and -, not beginning with -".to_owned(),
            ));
        }
        let base: Base = self.url.parse().map_err(|error| format!("url: {error}"))?;
        let limits = self.limits()?;
        let tls = self.tls(&base, folder)?;
        let credential = match &self.credential {
            Some(credential) => vec![
                credential
                    .line(folder)
                    .map_err(|problem| problem.within("credential"))?,
            ],
            None => Vec::new(),
        };
        let mut routes = Vec::new();
        for (at, settings) in self.routes.iter().enumerate() {
            let place = settings.place(at);
            let route = settings
                .route(&limits, self.require_key)
                .map_err(|problem| format!("routes, {place}: {problem}"))?;
            routes.push(Arc::new(route));
        }
        Ok(Downstream {
            name: name.into(),
            base,
            credential,
            tls,
            limits,
            replayed_headers: self.replayed_headers()?,
            routes,
            undeclared: Arc::new(route::undeclared(&limits, self.require_key)),
        })
    }

    fn limits(&self) -> Result<Limits, String> {
        let limits = Limits {
            connect: self.connect_timeout.unwrap_or(Duration::from_secs(5)),
            head: self.head_timeout.unwrap_or(Duration::from_secs(60)),
            idle: self.idle_timeout.unwrap_or(Duration::from_secs(30)),
            concurrency: self.concurrency.unwrap_or(256),
            request_bytes: self.max_request_bytes.unwrap_or(1 << 20),
            stored_body: self.max_stored_body.unwrap_or(1 << 20),
        };
        if limits.request_bytes > LARGEST_REQUEST {
            return Err(format!("max_request_bytes must be at most {LARGEST_REQUEST}"));
        }
        if limits.concurrency == 0 || limits.concurrency > tokio::sync::Semaphore::MAX_PERMITS {
            return Err("concurrency must be at least 1".to_owned());
        }
        Ok(limits)
    }

    fn tls(&self, base: &Base, folder: &Path) -> Result<Tls, Fault> {
        let named = [&self.ca_file, &self.client_cert_file, &self.client_key_file];
        if !base.is_tls() && named.iter().any(|file| file.is_some()) {
            return Err(Fault::Value(
                "ca_file, client_cert_file and client_key_file need a url that begins with https".to_owned(),
            ));
        }
        let client = match (&self.client_cert_file, &self.client_key_file) {
            (Some(chain), Some(key)) => Some(Identity {
                chain: bytes(folder, chain)?,
                key: bytes(folder, key)?,
            }),
            (None, None) => None,
            (Some(_), None) | (None, Some(_)) => {
                return Err(Fault::Value(
                    "client_cert_file and client_key_file go together".to_owned(),
                ));
            }
        };
        let tls = Tls {
            authorities: self.ca_file.as_ref().map(|file| bytes(folder, file)).transpose()?,
            client,
            http2: self.http2,
        };
        if base.is_tls() {
            tls::check(&tls).map_err(|error| error.to_string())?;
        }
        Ok(tls)
    }

    fn replayed_headers(&self) -> Result<Vec<HeaderName>, String> {
        let name = |name: &String| {
            let header = header_name(name).map_err(|problem| format!("replayed_headers: {problem}"))?;
            if headers::may_be_replayed(&header) {
                Ok(header)
            } else {
                Err(format!(
                    "replayed_headers: {name} is about one connection or one answer of ours, and cannot be replayed"
                ))
            }
        };
        self.replayed_headers.iter().map(name).collect()
    }
}

/// A downstream's name, as it stands in paths: 1 to 40 of `a-z`, `0-9` and `-`, not beginning with `-`.
fn is_name(name: &str) -> bool {
    let alphabet = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    (1..=40).contains(&name.len()) && name.bytes().all(alphabet) && !name.starts_with('-')
}

fn header_name(name: &str) -> Result<HeaderName, String> {
    name.parse().map_err(|_| format!("{name:?} is no name of a header"))
}

fn bytes(folder: &Path, file: &Path) -> Result<Arc<[u8]>, Fault> {
    let path = folder.join(file);
    std::fs::read(&path)
        .map(Into::into)
        .map_err(|source| Fault::Read(Error::Read { path, source }))
}

/// One text or a list of them.
fn one_or_more<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<String>, D::Error> {
    #[derive(Deserialize)]
    #[serde(untagged, expecting = "a text or a list of texts")]
    enum OneOrMore {
        One(String),
        More(Vec<String>),
    }
    Ok(match OneOrMore::deserialize(deserializer)? {
        OneOrMore::One(text) => vec![text],
        OneOrMore::More(texts) => texts,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::outbound::downstream::{Ability, CallBody};
    use http::{Method, StatusCode};

    const ROUTE: &str = "url = \"https://api.example.com/base/\"\n[[routes]]\npath = \"/charges\"\n";

    fn settings(text: &str) -> Result<Downstream, String> {
        let settings: DownstreamSettings = toml::from_str(text).map_err(|error| error.to_string())?;
        settings
            .downstream("payments", Path::new("."))
            .map_err(|problem| match problem {
                Fault::Value(problem) | Fault::Secret(problem) => problem,
                Fault::Read(error) => error.to_string(),
            })
    }

    fn refused(text: &str, because: &str) {
        match settings(text) {
            Ok(_) => panic!("taken: {text}"),
            Err(problem) => assert!(problem.contains(because), "{text}\n{problem}"),
        }
    }

    #[test]
    fn everything_that_can_be_said_is_read() {
        let downstream = settings(
            r#"
            url = "https://api.example.com/base"
            connect_timeout = "1s"
            head_timeout = "20s"
            idle_timeout = "3s"
            concurrency = 7
            max_request_bytes = 100
            max_stored_body = 200
            http2 = true
            replayed_headers = ["X-Total", "X-RateLimit-Limit"]
            [[routes]]
            method = "POST"
            path = "/charges"
            idempotency = "key"
            key_header = "X-Key"
            key_form = "quoted"
            key_retention = "24h"
            key_margin = "1h"
            max_in_flight = "90s"
            require_key = false
            meaningful_headers = ["X-Account"]
            reference = "/id"
            stream = true
            approval = "never"
            retry = { on = [429, 503], max_attempts = 3, first_delay = "1s", longest_delay = "2s", deadline = "1m" }
            compensation = { method = "POST", path = "/charges/{/id}/refunds", headers = { X-A = "{key}" }, body = { a = "{/b}" } }
            [[routes]]
            method = ["PUT", "PATCH"]
            path = "/objects/*"
            idempotency = "conditional"
            read_back = { path = "/objects/{/ref}", ours = { "/ref" = "{/ref}" } }
            [[routes]]
            path = "/things/**"
            idempotency = "lookup"
            look_up = { path = "/things?ref={/ref}", found = "/data/0", ours = { "/data/0/ref" = "{/ref}" } }
            settle_delay = "1s"
            interval = "2s"
            "#,
        )
        .unwrap();
        assert_eq!(downstream.base.path, "/base");
        assert_eq!(downstream.limits.concurrency, 7);
        let route = downstream.route(&Method::POST, "/charges");
        let Ability::Key {
            header, quoted: true, ..
        } = &route.ability
        else {
            panic!("{route:?}")
        };
        assert_eq!(header, "x-key");
        assert!(!route.key_required && route.stream);
        assert_eq!(
            route.retry.on,
            [StatusCode::TOO_MANY_REQUESTS, StatusCode::SERVICE_UNAVAILABLE]
        );
        let call = route.compensation.as_ref().unwrap();
        assert!(matches!(&call.body, CallBody::Object(members) if members.len() == 1));
        assert_eq!(
            downstream.route(&Method::PATCH, "/objects/1").ability.name(),
            "conditional"
        );
        assert_eq!(
            downstream.route(&Method::DELETE, "/things/1/2").ability.name(),
            "lookup"
        );
        assert_eq!(downstream.route(&Method::DELETE, "/objects/1").ability, Ability::None);
        assert_eq!(downstream.undeclared.max_in_flight, Duration::from_secs(23));
    }

    #[test]
    fn what_does_not_fit_the_idempotency_is_refused() {
        let cases = [
            (
                "key_retention = \"24h\"",
                "key_retention goes with idempotency = \"key\" only",
            ),
            ("idempotency = \"key\"", "needs key_retention"),
            (
                "idempotency = \"key\"\nkey_retention = \"1h\"\nkey_margin = \"1h\"",
                "key_margin must be less",
            ),
            ("idempotency = \"conditional\"", "needs read_back"),
            ("idempotency = \"lookup\"", "needs look_up"),
            (
                "idempotency = \"lookup\"\nlook_up = { path = \"/a\", ours = {} }",
                "ours must name",
            ),
            (
                "settle_delay = \"2s\"",
                "settle_delay goes with idempotency = \"lookup\" only",
            ),
            ("retry = { on = [503] }", "retry.on needs a route that is safe"),
            (
                "idempotency = \"key\"\nkey_retention = \"1h\"\nretry = { on = [200] }",
                "200 is no error's status",
            ),
            ("retry = { max_attempts = 0 }", "max_attempts must be at least 1"),
            ("max_in_flight = \"1s\"", "at least head_timeout"),
            ("approval = \"always\"", "only \"never\" is possible so far"),
            ("method = \"GET\"", "GET changes nothing"),
            ("method = \"post\"", "is no method"),
            ("idempotence = \"key\"", "line 4"),
            ("idempotency = \"maybe\"", "line 4"),
            ("reference = \"id\"", "reference: a JSON pointer"),
            (
                "compensation = { method = \"POST\", path = \"/a/../{/id}\" }",
                "dot segment",
            ),
            (
                "compensation = { method = \"POST\", path = \"/a\", body = \"x\" }",
                "body: a JSON pointer",
            ),
            ("compensation = { method = \"POST\", path = \"/{id}\" }", "is no place"),
            (
                "compensation = { method = \"POST\", path = \"/a\", headers = { Host = \"x\" } }",
                "about the connection",
            ),
        ];
        for (line, because) in cases {
            refused(&format!("{ROUTE}{line}\n"), because);
        }
    }

    #[test]
    fn where_and_how_it_is_reached_is_checked() {
        for (line, because) in [
            ("url = \"ftp://x\"", "url: it is no address"),
            ("url = \"https://u:p@x\"", "carries a credential"),
            ("url = \"http://x\"\nca_file = \"ca.pem\"", "begins with https"),
            ("url = \"https://x\"\nclient_cert_file = \"c\"", "go together"),
            (
                "url = \"https://x\"\nmax_request_bytes = 268435457",
                "at most 268435456",
            ),
            ("url = \"https://x\"\nconcurrency = 0", "concurrency must be"),
            ("url = \"https://x\"\nca_file = \"/nonexistent\"", "cannot read"),
            ("url = \"https://x\"\nca_file = \"/dev/null\"", "no PEM"),
            (
                "url = \"https://x\"\nreplayed_headers = [\"Connection\"]",
                "cannot be replayed",
            ),
            (
                "url = \"https://x\"\nreplayed_headers = [\"Set-Cookie\"]",
                "cannot be replayed",
            ),
            ("url = \"https://x\"\nconnect_timeout = \"5\"", "line 2"),
            ("url = \"https://x\"\ntimeout = \"5s\"", "line 2"),
        ] {
            refused(line, because);
        }
        for name in ["", "-a", "A", "a_b", "a.b", "a/b", &"a".repeat(41)] {
            assert!(!is_name(name), "{name}");
        }
        assert!(is_name("a") && is_name("0-a") && is_name(&"a".repeat(40)));
    }

    #[test]
    fn a_secret_in_the_file_is_refused_and_not_repeated() {
        for literal in [
            "\"sk_live\"",
            "{ bearer = \"sk_live\" }",
            "{ basic = \"sk_live\" }",
            "{ api_key = \"sk_live\" }",
        ] {
            let problem = settings(&format!("url = \"https://x\"\ncredential = {literal}")).unwrap_err();
            assert!(
                problem.contains("name a variable or a file") && !problem.contains("sk_live"),
                "{problem}"
            );
        }
        for (credential, because) in [
            ("{ bearer_env = \"OPLEDGER_NOT_SET\" }", "OPLEDGER_NOT_SET is not set"),
            ("{}", "name one of"),
            ("{ bearer_env = \"A\", basic_env = \"B\" }", "name one of"),
            ("{ header_env = \"PATH\" }", "both or neither"),
            ("{ header = \"Host\", header_env = \"PATH\" }", "carries no credential"),
            ("{ bearer_file = \"/dev/null\" }", "is empty"),
            ("{ bearer_file = \"/nonexistent\" }", "cannot read"),
        ] {
            refused(&format!("url = \"https://x\"\ncredential = {credential}"), because);
        }
    }

    #[test]
    fn a_secret_becomes_the_line_that_the_downstream_expects() {
        let folder = tempfile::tempdir().unwrap();
        let line = |credential: &str, secret: &str| {
            std::fs::write(folder.path().join("secret"), secret).unwrap();
            let settings: DownstreamSettings =
                toml::from_str(&format!("url = \"https://x\"\ncredential = {credential}")).unwrap();
            let downstream = settings.downstream("a", folder.path());
            let (name, secret) = downstream.ok()?.credential.remove(0);
            Some(format!("{name}: {}", secret.reveal().to_str().unwrap()))
        };
        let bearer = "{ bearer_file = \"secret\" }";
        assert_eq!(line(bearer, "sk_1\n").unwrap(), "authorization: Bearer sk_1");
        let basic = "{ basic_file = \"secret\" }";
        assert_eq!(line(basic, "sk_1").unwrap(), "authorization: Basic c2tfMTo=");
        assert_eq!(line(basic, "user:pw").unwrap(), "authorization: Basic dXNlcjpwdw==");
        let header = "{ header = \"X-Api-Key\", header_file = \"secret\" }";
        assert_eq!(line(header, "k").unwrap(), "x-api-key: k");
        assert_eq!(line(header, "k\r\nX: 1"), None);
    }
}
