//! What a method and a path ask for; nothing of what comes of it.

use http::{Method, Uri};

/// What the API under a prefix can do about a request that comes twice.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Capability {
    /// `/key`: takes an `Idempotency-Key` and replays.
    Key,
    /// `/conditional`: takes a natural key or an expected version.
    Conditional,
    /// `/lookup`: can be asked by reference.
    Lookup,
    /// `/none`: does it again.
    None,
}

impl Capability {
    pub const ALL: [Self; 4] = [Self::Key, Self::Conditional, Self::Lookup, Self::None];

    pub fn name(self) -> &'static str {
        match self {
            Self::Key => "key",
            Self::Conditional => "conditional",
            Self::Lookup => "lookup",
            Self::None => "none",
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Resource {
    Charges,
    Mails,
    Bookings,
    /// Made under the charge they reverse.
    Reversals,
}

impl Resource {
    const ALL: [Self; 4] = [Self::Charges, Self::Mails, Self::Bookings, Self::Reversals];

    pub fn name(self) -> &'static str {
        match self {
            Self::Charges => "charges",
            Self::Mails => "mails",
            Self::Bookings => "bookings",
            Self::Reversals => "reversals",
        }
    }

    fn collection_methods(self) -> &'static str {
        match self {
            Self::Charges | Self::Mails | Self::Bookings => "GET, HEAD, POST",
            Self::Reversals => "GET, HEAD",
        }
    }

    fn item_methods(self) -> &'static str {
        match self {
            Self::Charges | Self::Bookings => "GET, HEAD, PUT",
            Self::Mails | Self::Reversals => "GET, HEAD",
        }
    }
}

/// A request to the API.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Call {
    Create(Resource),
    Put {
        resource: Resource,
        reference: String,
    },
    Reverse {
        charge: String,
    },
    Read {
        resource: Resource,
        name: String,
    },
    List {
        resource: Resource,
        reference: Option<String>,
    },
}

/// A request to whoever watches the API.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Desk {
    Health,
    Effects { reference: Option<String> },
    Reset,
    Requests { reference: Option<String> },
    Release { reference: Option<String> },
}

#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Route {
    Call(Capability, Call),
    Desk(Desk),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum NoRoute {
    /// Nothing is there.
    Path,
    /// Something is there, for these methods.
    Method { allow: &'static str },
}

pub fn find(method: &Method, uri: &Uri) -> Result<Route, NoRoute> {
    let segments: Vec<String> = uri.path().split('/').skip(1).map(decoded).collect();
    let segments: Vec<&str> = segments.iter().map(String::as_str).collect();
    let (first, rest) = segments.split_first().ok_or(NoRoute::Path)?;
    match Capability::ALL
        .into_iter()
        .find(|capability| capability.name() == *first)
    {
        Some(capability) => call(method, rest, uri).map(|call| Route::Call(capability, call)),
        None => desk(method, &segments, uri).map(Route::Desk),
    }
}

fn call(method: &Method, segments: &[&str], uri: &Uri) -> Result<Call, NoRoute> {
    let (name, rest) = segments.split_first().ok_or(NoRoute::Path)?;
    let resource = Resource::ALL
        .into_iter()
        .find(|resource| resource.name() == *name)
        .ok_or(NoRoute::Path)?;
    let reads = matches!(*method, Method::GET | Method::HEAD);
    let refused = |allow| Err(NoRoute::Method { allow });
    match rest {
        [] if reads => Ok(Call::List {
            resource,
            reference: reference(uri),
        }),
        [] if *method == Method::POST && resource != Resource::Reversals => Ok(Call::Create(resource)),
        [] => refused(resource.collection_methods()),
        [name] if !name.is_empty() => match *method {
            _ if reads => Ok(Call::Read {
                resource,
                name: (*name).to_owned(),
            }),
            Method::PUT if matches!(resource, Resource::Charges | Resource::Bookings) => Ok(Call::Put {
                resource,
                reference: (*name).to_owned(),
            }),
            _ => refused(resource.item_methods()),
        },
        [charge, "reversals"] if resource == Resource::Charges => match *method {
            Method::POST => Ok(Call::Reverse {
                charge: (*charge).to_owned(),
            }),
            _ => refused("POST"),
        },
        _ => Err(NoRoute::Path),
    }
}

fn desk(method: &Method, segments: &[&str], uri: &Uri) -> Result<Desk, NoRoute> {
    let reads = matches!(*method, Method::GET | Method::HEAD);
    let reference = reference(uri);
    match segments {
        ["healthz"] if reads => Ok(Desk::Health),
        ["healthz"] => Err(NoRoute::Method { allow: "GET, HEAD" }),
        ["_effects"] if reads => Ok(Desk::Effects { reference }),
        ["_effects"] if *method == Method::DELETE => Ok(Desk::Reset),
        ["_effects"] => Err(NoRoute::Method {
            allow: "GET, HEAD, DELETE",
        }),
        ["_requests"] if reads => Ok(Desk::Requests { reference }),
        ["_requests"] => Err(NoRoute::Method { allow: "GET, HEAD" }),
        ["_release"] if *method == Method::POST => Ok(Desk::Release { reference }),
        ["_release"] => Err(NoRoute::Method { allow: "POST" }),
        _ => Err(NoRoute::Path),
    }
}

fn reference(uri: &Uri) -> Option<String> {
    let query = uri.query()?;
    query.split('&').find_map(|pair| pair.strip_prefix("ref=")).map(decoded)
}

/// Percent-decoded; what is no encoding stays as it is, and so does `+`.
fn decoded(text: &str) -> String {
    let bytes = text.as_bytes();
    let mut plain = Vec::with_capacity(bytes.len());
    let mut at = 0;
    while at < bytes.len() {
        let encoded = (bytes[at] == b'%')
            .then(|| text.get(at + 1..at + 3))
            .flatten()
            .and_then(|digits| u8::from_str_radix(digits, 16).ok());
        plain.push(encoded.unwrap_or(bytes[at]));
        at += if encoded.is_some() { 3 } else { 1 };
    }
    String::from_utf8_lossy(&plain).into_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(method: Method, target: &str) -> Result<Route, NoRoute> {
        find(&method, &target.parse().unwrap())
    }

    #[test]
    fn references_are_decoded_in_paths_and_queries() {
        assert_eq!(
            found(Method::PUT, "/conditional/charges/acme%3A1%2F2"),
            Ok(Route::Call(
                Capability::Conditional,
                Call::Put {
                    resource: Resource::Charges,
                    reference: "acme:1/2".to_owned()
                }
            ))
        );
        assert_eq!(
            found(Method::GET, "/lookup/mails?limit=1&ref=a+b%20%zz"),
            Ok(Route::Call(
                Capability::Lookup,
                Call::List {
                    resource: Resource::Mails,
                    reference: Some("a+b %zz".to_owned())
                }
            ))
        );
    }

    #[test]
    fn what_is_not_there_is_told_from_what_takes_other_methods() {
        assert_eq!(found(Method::GET, "/charges"), Err(NoRoute::Path));
        assert_eq!(found(Method::GET, "/none/charges/"), Err(NoRoute::Path));
        assert_eq!(
            found(Method::DELETE, "/none/mails/ml_1"),
            Err(NoRoute::Method { allow: "GET, HEAD" })
        );
    }
}
