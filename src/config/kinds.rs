//! `[kinds."…"]`: the registered types of operations, each with the function or the downstream that performs it.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::Deserialize;

use super::downstreams::{CallSettings, Fault};
use super::{File, optional_duration, read as read_text};
use crate::ledger::forward::PROXY_KINDS;
use crate::ledger::kind::{Handler, Kind, Kinds, is_kind_name};
use crate::outbound::registry::{DownstreamKind, DownstreamKinds, Downstreams};

/// How long a handler may run unless its kind says otherwise.
const DEFAULT_TIMEOUT: Duration = Duration::from_secs(10);

/// `[kinds."…"]`: one registered type of operation.
#[derive(Debug, Clone, Deserialize)]
#[serde(deny_unknown_fields)]
pub(super) struct KindSettings {
    handler: Option<String>,
    downstream: Option<String>,
    request: Option<CallSettings>,
    schema: Option<PathBuf>,
    #[serde(default, deserialize_with = "optional_duration")]
    retention: Option<Duration>,
    #[serde(default, deserialize_with = "optional_duration")]
    timeout: Option<Duration>,
    group_commit: Option<bool>,
}

/// Every kind of the file, by what performs it.
pub(super) fn read(file: &File, folder: &Path, downstreams: &Downstreams) -> Result<(Kinds, DownstreamKinds), Fault> {
    let (mut kinds, mut downstream_kinds) = (Vec::new(), Vec::new());
    for (name, settings) in &file.kinds {
        let place = format!("kinds.\"{name}\"");
        let performed = settings
            .performed(name, folder, file, downstreams)
            .map_err(|problem| problem.within(&place))?;
        match performed {
            Performed::Function(kind) => kinds.push(kind),
            Performed::Call(kind) => downstream_kinds.push(kind),
        }
    }
    Ok((kinds.into_iter().collect(), downstream_kinds.into_iter().collect()))
}

enum Performed {
    Function(Kind),
    Call(DownstreamKind),
}

impl KindSettings {
    fn performed(&self, name: &str, folder: &Path, file: &File, downstreams: &Downstreams) -> Result<Performed, Fault> {
        if !is_kind_name(name) {
            return Err(Fault::Value(
                "a kind's name is 1 to 100 of a-z, 0-9, _, - and ., beginning with a letter".to_owned(),
            ));
        }
        if name.starts_with(PROXY_KINDS) {
            return Err(Fault::Value(format!(
                "names that begin with {PROXY_KINDS} are those of proxied requests; choose another"
            )));
        }
        let schema = match &self.schema {
            Some(schema) => Some(compile(&folder.join(schema)).map_err(|problem| problem.within("schema"))?),
            None => None,
        };
        let retention = self.retention.unwrap_or(file.retention.receipts);
        match (&self.handler, &self.downstream) {
            (Some(handler), None) => self.function(name, handler, schema, retention).map(Performed::Function),
            (None, Some(downstream)) => {
                let downstream = downstreams
                    .get(downstream)
                    .ok_or_else(|| format!("downstream: there is no downstreams.{downstream}"))?;
                let call = self.call()?;
                Ok(Performed::Call(DownstreamKind {
                    name: name.into(),
                    downstream: downstream.clone(),
                    call,
                    schema: schema.map(Arc::new),
                    retention,
                }))
            }
            (None, None) => Err(Fault::Value(
                "name what performs it: handler = \"schema.function\", or downstream and request".to_owned(),
            )),
            (Some(_), Some(_)) => Err(Fault::Value(
                "handler and downstream are two ways to perform it; name one".to_owned(),
            )),
        }
    }

    fn function(
        &self,
        name: &str,
        handler: &str,
        schema: Option<jsonschema::Validator>,
        retention: Duration,
    ) -> Result<Kind, Fault> {
        if self.request.is_some() {
            return Err(Fault::Value("request goes with downstream".to_owned()));
        }
        let handler: Handler = handler.parse().map_err(|error| format!("handler: {error}"))?;
        Ok(Kind {
            name: name.into(),
            handler,
            schema,
            retention,
            timeout: self.timeout.unwrap_or(DEFAULT_TIMEOUT),
            group_commit: self.group_commit.unwrap_or(true),
        })
    }

    fn call(&self) -> Result<crate::outbound::downstream::Call, String> {
        if self.timeout.is_some() {
            return Err("timeout is for handlers; a downstream has head_timeout".to_owned());
        }
        if self.group_commit.is_some() {
            return Err("group_commit is for handlers".to_owned());
        }
        let request = self.request.as_ref();
        let request = request.ok_or("downstream needs request: { method, path, … }, filled in from the payload")?;
        request.call().map_err(|problem| format!("request: {problem}"))
    }
}

fn compile(path: &Path) -> Result<jsonschema::Validator, Fault> {
    let text = read_text(path).map_err(Fault::Read)?;
    let schema = serde_json::from_str(&text).map_err(|error| format!("{} is not JSON: {error}", path.display()))?;
    jsonschema::options()
        .with_draft(jsonschema::Draft::Draft202012)
        .build(&schema)
        .map_err(|error| Fault::Value(format!("{} is not a JSON Schema: {error}", path.display())))
}

#[cfg(test)]
mod tests {
    use crate::config;
    use crate::outbound::downstream::CallBody;

    const DOWNSTREAM: &str = "[downstreams.payments]\nurl = \"https://api.example.com\"\n[kinds.charge]\n";

    fn load(kind: &str) -> Result<config::Config, String> {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("opledger.toml");
        std::fs::write(&path, format!("{DOWNSTREAM}{kind}")).unwrap();
        config::load(&path).map_err(|error| error.to_string())
    }

    #[test]
    fn a_kind_is_performed_by_a_function_or_by_a_downstream() {
        let config = load("handler = \"shop.charge\"").unwrap();
        assert!(config.kinds.get("charge").is_some() && config.downstream_kinds.get("charge").is_none());
        let config = load(
            "downstream = \"payments\"\nrequest = { method = \"POST\", path = \"/charges/{/id}\", body = \"\" }\nretention = \"2d\"",
        )
        .unwrap();
        assert!(config.kinds.get("charge").is_none());
        let kind = config.downstream_kinds.get("charge").unwrap();
        assert_eq!(kind.downstream.name, config.downstreams.get("payments").unwrap().name);
        assert!(matches!(&kind.call.body, CallBody::Part(pointer) if pointer.is_whole()));
        assert_eq!(kind.retention.as_secs(), 2 * 86_400);
    }

    #[test]
    fn what_does_not_fit_a_kind_is_refused() {
        let request = "request = { method = \"POST\", path = \"/charges\" }";
        let cases = [
            (String::new(), "name what performs it"),
            ("downstream = \"payments\"".to_owned(), "downstream needs request"),
            (
                format!("downstream = \"other\"\n{request}"),
                "there is no downstreams.other",
            ),
            (format!("handler = \"a.b\"\n{request}"), "request goes with downstream"),
            (
                "handler = \"a.b\"\ndownstream = \"payments\"".to_owned(),
                "two ways to perform it",
            ),
            (
                format!("downstream = \"payments\"\n{request}\ntimeout = \"5s\""),
                "timeout is for handlers",
            ),
            (
                format!("downstream = \"payments\"\n{request}\ngroup_commit = true"),
                "group_commit is for handlers",
            ),
            (
                "downstream = \"payments\"\nrequest = { method = \"POST\", path = \"/a/{b}\" }".to_owned(),
                "request: path: {b} is no place",
            ),
        ];
        for (kind, because) in cases {
            let problem = load(&kind).unwrap_err();
            assert!(
                problem.contains(because) && problem.contains("kinds.\"charge\""),
                "{kind}: {problem}"
            );
        }
    }
}
