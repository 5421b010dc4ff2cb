//! `credential`: by what a downstream knows us. The secret is in a variable or a file, never in the configuration.

use std::collections::BTreeMap;
use std::error::Error as _;
use std::fmt;
use std::path::{Path, PathBuf};

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use http::header::AUTHORIZATION;
use http::{HeaderName, HeaderValue};
use serde::de::value::MapAccessDeserializer;
use serde::de::{IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize, Deserializer};

use super::{Fault, header_name};
use crate::config;
use crate::outbound::downstream::Secret;
use crate::outbound::headers::may_be_set;

const WHERE: &str = "name a variable or a file that holds the secret, e.g. { bearer_env = \"PAYMENTS_KEY\" }: the \
                     configuration itself is read by too many people";

#[derive(Debug, Clone)]
pub enum CredentialSettings {
    /// A text where the table should be: likely the secret, so that it must not be shown.
    Literal,
    Table(Box<Table>),
}

#[derive(Debug, Clone, Deserialize)]
pub struct Table {
    bearer_env: Option<String>,
    bearer_file: Option<PathBuf>,
    basic_env: Option<String>,
    basic_file: Option<PathBuf>,
    header: Option<String>,
    header_env: Option<String>,
    header_file: Option<PathBuf>,
    /// Read only to be refused without being repeated: likely the secret itself.
    #[serde(flatten)]
    others: BTreeMap<String, IgnoredAny>,
}

impl<'de> Deserialize<'de> for CredentialSettings {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct TextOrTable;
        impl<'de> Visitor<'de> for TextOrTable {
            type Value = CredentialSettings;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a table")
            }

            fn visit_str<E>(self, _: &str) -> Result<Self::Value, E> {
                Ok(CredentialSettings::Literal)
            }

            fn visit_map<A: MapAccess<'de>>(self, map: A) -> Result<Self::Value, A::Error> {
                Table::deserialize(MapAccessDeserializer::new(map))
                    .map(Box::new)
                    .map(CredentialSettings::Table)
            }
        }
        deserializer.deserialize_any(TextOrTable)
    }
}

impl CredentialSettings {
    /// The header line that authenticates us.
    pub fn line(&self, folder: &Path) -> Result<(HeaderName, Secret), Fault> {
        let Self::Table(table) = self else {
            return Err(Fault::Value(WHERE.to_owned()));
        };
        if let Some(name) = table.others.keys().next() {
            return Err(Fault::Value(format!("{name} is no way to name it; {WHERE}")));
        }
        table.line(folder)
    }
}

impl Table {
    fn line(&self, folder: &Path) -> Result<(HeaderName, Secret), Fault> {
        let ways = [
            (&self.bearer_env, &self.bearer_file),
            (&self.basic_env, &self.basic_file),
            (&self.header_env, &self.header_file),
        ];
        let named = ways
            .iter()
            .map(|(variable, file)| usize::from(variable.is_some()) + usize::from(file.is_some()));
        if named.sum::<usize>() != 1 {
            return Err(Fault::Value(
                "name one of bearer_env, bearer_file, basic_env, basic_file, header_env and header_file".to_owned(),
            ));
        }
        let [bearer, basic, header] = ways;
        let is_header = header.0.is_some() || header.1.is_some();
        if self.header.is_some() != is_header {
            return Err(Fault::Value(
                "header names the line, e.g. \"X-Api-Key\", and header_env or header_file its value: both or neither"
                    .to_owned(),
            ));
        }
        if let Some(secret) = secret(bearer, folder)? {
            return Ok((AUTHORIZATION, line(&format!("Bearer {secret}"))?));
        }
        if let Some(secret) = secret(basic, folder)? {
            let pair = if secret.contains(':') {
                secret
            } else {
                format!("{secret}:")
            };
            return Ok((AUTHORIZATION, line(&format!("Basic {}", BASE64_STANDARD.encode(pair)))?));
        }
        let name = header_name(self.header.as_deref().unwrap_or_default())?;
        if !may_be_set(&name) {
            return Err(Fault::Value(format!("header: {name} carries no credential")));
        }
        let secret = secret(header, folder)?.unwrap_or_default();
        Ok((name, line(&secret)?))
    }
}

fn secret((variable, file): (&Option<String>, &Option<PathBuf>), folder: &Path) -> Result<Option<String>, Fault> {
    let (text, place) = match (variable, file) {
        (Some(name), _) => {
            let text =
                config::variable(name).ok_or_else(|| Fault::Secret(format!("the variable {name} is not set")))?;
            (text, format!("the variable {name}"))
        }
        (None, Some(file)) => {
            let path = folder.join(file);
            let text = config::read(&path).map_err(|error| {
                let cause = error.source().map(|cause| format!(": {cause}")).unwrap_or_default();
                Fault::Secret(format!("{error}{cause}"))
            })?;
            (text, path.display().to_string())
        }
        (None, None) => return Ok(None),
    };
    let text = text.trim_end_matches(['\r', '\n']).to_owned();
    if text.trim().is_empty() {
        return Err(Fault::Secret(format!("{place} is empty")));
    }
    Ok(Some(text))
}

fn line(text: &str) -> Result<Secret, String> {
    HeaderValue::from_str(text)
        .map(Secret::new)
        .map_err(|_| "the secret has a character that no header line takes, perhaps a line break".to_owned())
}
