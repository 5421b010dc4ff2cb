//! Holds answers to `openapi.yaml`: status, content type, body and headers of every answer that a test receives.
//!
//! The client asks `check` after each answer, so whatever the whole run sees is documented, or the test that saw it fails.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use jsonschema::{Draft, Validator};
use serde_json::{Value, json};

use super::client::Answer;

/// Headers of HTTP itself, which the description does not list.
const HTTPS_OWN: [&str; 5] = [
    "content-type",
    "content-length",
    "date",
    "connection",
    "transfer-encoding",
];

/// Lines of a downstream's answer that nobody may get to see behind the proxy, whatever the configuration says.
const NEVER_PASSED: [&str; 9] = [
    "keep-alive",
    "proxy-authenticate",
    "proxy-connection",
    "set-cookie",
    "set-cookie2",
    "te",
    "trailer",
    "upgrade",
    "www-authenticate",
];

/// The methods a path item may have.
const METHODS: [&str; 8] = ["get", "put", "post", "delete", "options", "head", "patch", "trace"];

/// `openapi.yaml`, with the schemas that have been compiled so far.
pub struct Contract {
    pub api: Value,
    validators: Mutex<HashMap<String, Arc<Validator>>>,
}

/// One operation of the description.
#[derive(Clone, Copy)]
pub struct Operation<'a> {
    pub path: &'a str,
    /// In capitals.
    pub method: &'a str,
    pub described: &'a Value,
}

impl Operation<'_> {
    /// The roles that it takes; none means that it needs no credential.
    pub fn roles(&self) -> Vec<&str> {
        self.described["x-roles"]
            .as_array()
            .unwrap()
            .iter()
            .map(|role| role.as_str().unwrap())
            .collect()
    }
}

pub fn contract() -> &'static Contract {
    static CONTRACT: OnceLock<Contract> = OnceLock::new();
    CONTRACT.get_or_init(|| {
        let api = serde_saphyr::from_str(include_str!("../../../openapi.yaml")).expect("openapi.yaml is YAML");
        Contract {
            api,
            validators: Mutex::default(),
        }
    })
}

/// The kinds that a downstream performs in some test's configuration.
static PERFORMED_BY_DOWNSTREAMS: Mutex<Option<HashSet<String>>> = Mutex::new(None);

/// Notes which kinds of a configuration a downstream performs: their answers are the downstream's own.
pub fn note_kinds(configuration: &str) {
    let Ok(file) = configuration.parse::<toml::Table>() else {
        return;
    };
    let kinds = file.get("kinds").and_then(toml::Value::as_table);
    let performed = kinds
        .into_iter()
        .flatten()
        .filter(|(_, kind)| kind.get("downstream").is_some());
    let mut noted = PERFORMED_BY_DOWNSTREAMS.lock().unwrap_or_else(PoisonError::into_inner);
    noted
        .get_or_insert_default()
        .extend(performed.map(|(name, _)| name.clone()));
}

/// Whether a submission is of a kind that a downstream performs.
fn is_for_a_downstream(submission: &[u8]) -> bool {
    let submission: Value = serde_json::from_slice(submission).unwrap_or_default();
    let noted = PERFORMED_BY_DOWNSTREAMS.lock().unwrap_or_else(PoisonError::into_inner);
    let kind = submission["kind"].as_str();
    kind.zip(noted.as_ref())
        .is_some_and(|(kind, noted)| noted.contains(kind))
}

/// Panics if the description does not allow this answer to a request with this body.
pub fn check(method: &str, target: &str, sent: &[u8], answer: &Answer) {
    let faults = contract().faults(method, target, sent, answer);
    assert!(
        faults.is_empty(),
        "{method} {target} was answered against openapi.yaml:\n{}\n{answer:?}",
        faults.join("\n")
    );
}

impl Contract {
    pub fn operations(&self) -> Vec<Operation<'_>> {
        let mut operations = Vec::new();
        for (path, item) in self.api["paths"].as_object().unwrap() {
            let shared = item.get("$ref").map(|_| self.resolved(item));
            let described = item.as_object().into_iter().chain(shared.and_then(Value::as_object));
            for (name, described) in described.flatten() {
                if METHODS.contains(&name.as_str()) {
                    let method = METHODS.iter().find(|known| *known == name).unwrap();
                    operations.push(Operation {
                        path,
                        method: upper(method),
                        described,
                    });
                }
            }
        }
        operations
    }

    /// The methods of each path, `HEAD` included where there is `GET`.
    pub fn methods(&self) -> BTreeMap<&str, Vec<&str>> {
        let mut methods: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
        for operation in self.operations() {
            let of_path = methods.entry(operation.path).or_default();
            of_path.push(operation.method);
            if operation.method == "GET" {
                of_path.push("HEAD");
            }
        }
        methods.values_mut().for_each(|of_path| of_path.sort_unstable());
        methods
    }

    /// What is wrong with an answer, one line each.
    pub fn faults(&self, method: &str, target: &str, sent: &[u8], answer: &Answer) -> Vec<String> {
        let path = target.split('?').next().unwrap_or_default();
        let mut fewest: Option<Vec<String>> = None;
        for (place, response) in self.responses(method, path, sent, answer) {
            let mut faults = self.header_faults(&place, response, answer);
            if method != "HEAD" {
                faults.extend(self.body_fault(&place, response, answer));
            }
            if fewest.as_ref().is_none_or(|known| faults.len() < known.len()) {
                fewest = Some(faults);
            }
        }
        let mut faults = fewest.unwrap_or_else(|| vec![format!("the status {} is not documented", answer.status)]);
        if path.starts_with("/v1/") && answer.header("cache-control") != "no-store" {
            faults.push("Cache-Control: no-store is missing".to_owned());
        }
        faults
    }

    /// What is documented for this answer, of the route and of every request, with a name for each place.
    fn responses(&self, method: &str, path: &str, sent: &[u8], answer: &Answer) -> Vec<(String, &Value)> {
        let wanted = if method == "HEAD" { "GET" } else { method };
        let operation = self
            .operations()
            .into_iter()
            .find(|operation| operation.method == wanted && self.matches(operation.path, path));
        // A downstream's own answer is held to what is said of those, and to nothing that is said of ours.
        if let Some(operation) = operation.filter(|operation| is_downstreams_own(operation, method, sent, answer)) {
            let place = format!("{} {} default", operation.method, operation.path);
            return vec![(place, self.resolved(&operation.described["responses"]["default"]))];
        }
        let status = answer.status.to_string();
        let of_route = operation.and_then(|operation| {
            let response = operation.described["responses"].get(&status)?;
            Some((format!("{} {} {status}", operation.method, operation.path), response))
        });
        let of_every_request = self.api["x-every-request"]["responses"].get(&status);
        let of_every_request = of_every_request.map(|response| (format!("every request {status}"), response));
        of_route
            .into_iter()
            .chain(of_every_request)
            .map(|(place, response)| (place, self.resolved(response)))
            .collect()
    }

    /// Whether a path is one of those that the template describes.
    fn matches(&self, template: &str, path: &str) -> bool {
        let many = self.api["paths"][template]["x-many-segments"] == true;
        let (template, path): (Vec<_>, Vec<_>) = (template.split('/').collect(), path.split('/').collect());
        let length_fits = if many {
            // What stands for many segments stands last, and for at least one that is not empty.
            path.len() > template.len() || (path.len() == template.len() && path.last() != Some(&""))
        } else {
            path.len() == template.len()
        };
        length_fits
            && template
                .iter()
                .zip(path)
                .all(|(described, sent)| described.starts_with('{') || *described == sent)
    }

    /// Follows a `$ref` that stands alone.
    fn resolved<'a>(&'a self, value: &'a Value) -> &'a Value {
        match value["$ref"].as_str() {
            Some(reference) => self
                .api
                .pointer(reference.trim_start_matches('#'))
                .expect("every $ref leads somewhere"),
            None => value,
        }
    }

    fn header_faults(&self, place: &str, response: &Value, answer: &Answer) -> Vec<String> {
        let none = serde_json::Map::new();
        let documented: BTreeMap<String, &Value> = response["headers"]
            .as_object()
            .unwrap_or(&none)
            .iter()
            .map(|(name, header)| (name.to_ascii_lowercase(), self.resolved(header)))
            .collect();
        let mut faults = Vec::new();
        for (name, value) in &answer.headers {
            if HTTPS_OWN.contains(&name.as_str()) {
                continue;
            }
            let Some(header) = documented.get(name.as_str()) else {
                let is_passed = response["x-more-headers"] == true && !NEVER_PASSED.contains(&name.as_str());
                if !is_passed {
                    faults.push(format!("the header {name} is not documented"));
                }
                continue;
            };
            let text = value.to_str().unwrap_or("not text");
            let value = match header["schema"]["type"].as_str() {
                Some("integer") => text.parse::<i64>().map_or_else(|_| text.into(), Value::from),
                _ => Value::from(text),
            };
            faults.extend(self.mismatch(&format!("{place} header {name}"), &header["schema"], &value));
        }
        let missing = documented
            .iter()
            .filter(|(name, header)| header["required"] == true && !answer.headers.contains_key(name.as_str()))
            .map(|(name, _)| format!("the header {name} is missing"));
        faults.extend(missing);
        faults
    }

    fn body_fault(&self, place: &str, response: &Value, answer: &Answer) -> Option<String> {
        let content = response.get("content");
        if content.is_some_and(|content| content.get("*/*").is_some()) {
            return None;
        }
        if answer.body.is_empty() {
            return content.map(|_| "the body is empty".to_owned());
        }
        let media_type = answer.header("content-type").split(';').next().unwrap_or_default();
        let Some(described) = content.and_then(|content| content.get(media_type)) else {
            return Some(format!("the content type {media_type} is not documented"));
        };
        let value = if media_type.ends_with("json") {
            serde_json::from_slice(&answer.body).map_err(|error| error.to_string())
        } else if media_type.ends_with("yaml") {
            serde_saphyr::from_slice(&answer.body).map_err(|error| error.to_string())
        } else {
            String::from_utf8(answer.body.to_vec())
                .map(Value::from)
                .map_err(|error| error.to_string())
        };
        match value {
            Ok(value) => self.mismatch(&format!("{place} {media_type}"), &described["schema"], &value),
            // This parser's limit, not the description's.
            Err(error) if error.contains("recursion limit") => None,
            Err(error) => Some(format!("the body is not {media_type}: {error}")),
        }
    }

    fn mismatch(&self, place: &str, schema: &Value, value: &Value) -> Option<String> {
        let validator = self.validator(place, schema);
        let faults: Vec<String> = validator
            .iter_errors(value)
            .map(|error| format!("{place}: {error} at {}", error.instance_path()))
            .collect();
        (!faults.is_empty()).then(|| faults.join("\n"))
    }

    fn validator(&self, place: &str, schema: &Value) -> Arc<Validator> {
        let mut validators = self.validators.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(validator) = validators.get(place) {
            return validator.clone();
        }
        let mut schema = schema.clone();
        // Where the references of the schema lead.
        schema["components"] = json!({ "schemas": self.api["components"]["schemas"] });
        let validator = jsonschema::options()
            .with_draft(Draft::Draft202012)
            .should_validate_formats(true)
            .build(&schema)
            .unwrap_or_else(|error| panic!("the schema of {place} is not valid: {error}"));
        let validator = Arc::new(validator);
        validators.insert(place.to_owned(), validator.clone());
        validator
    }
}

/// Whether an answer is a downstream's own. Ours are told by what `openapi.yaml` says that they are told by.
fn is_downstreams_own(operation: &Operation<'_>, method: &str, sent: &[u8], answer: &Answer) -> bool {
    if operation.described["x-downstreams-own"] != true {
        return false;
    }
    let possible = if operation.path == "/v1/operations" {
        is_for_a_downstream(sent)
    } else if operation.path.ends_with("/receipt") || operation.path.ends_with("/execute") {
        // The request does not tell whose answer it asks for; one of ours names its operation.
        let body: Value = serde_json::from_slice(&answer.body).unwrap_or_default();
        answer.status != 304 && body["operation_id"] != answer.header("operation-id")
    } else {
        true
    };
    possible && !is_ours(method, answer)
}

fn is_ours(method: &str, answer: &Answer) -> bool {
    if method == "HEAD" {
        // Without a body only the type is left, and a downstream's errors seldom have this one.
        return answer.header("content-type") == "application/problem+json";
    }
    let body: Value = serde_json::from_slice(&answer.body).unwrap_or_default();
    let is_problem = answer.header("content-type") == "application/problem+json"
        && body["type"].as_str().is_some_and(|page| page.starts_with("/problems/"));
    let is_accepted = answer.status == 202 && body["operation_url"] == answer.header("location");
    is_problem || is_accepted
}

fn upper(method: &str) -> &'static str {
    match method {
        "get" => "GET",
        "put" => "PUT",
        "post" => "POST",
        "delete" => "DELETE",
        "options" => "OPTIONS",
        "head" => "HEAD",
        "patch" => "PATCH",
        _ => "TRACE",
    }
}
