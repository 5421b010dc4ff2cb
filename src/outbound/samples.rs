//! Downstreams and routes for tests to start from.

use std::time::Duration;

use super::downstream::{Ability, Downstream, Limits, Retry, Route, Tls};

pub fn downstream() -> Downstream {
    Downstream {
        name: "payments".into(),
        base: "http://127.0.0.1:1".parse().unwrap(),
        credential: Vec::new(),
        tls: Tls::default(),
        limits: Limits {
            connect: Duration::from_secs(5),
            head: Duration::from_secs(60),
            idle: Duration::from_secs(30),
            concurrency: 256,
            request_bytes: 1 << 20,
            stored_body: 1 << 20,
        },
        replayed_headers: Vec::new(),
        routes: Vec::new(),
        undeclared: Route {
            name: "undeclared".to_owned(),
            ..route("POST", "/**")
        }
        .into(),
    }
}

pub fn route(method: &str, pattern: &str) -> Route {
    Route {
        name: format!("{method} {pattern}"),
        methods: vec![method.parse().unwrap()],
        pattern: pattern.parse().unwrap(),
        ability: Ability::None,
        key_required: true,
        meaningful_headers: Vec::new(),
        max_in_flight: Duration::from_secs(90),
        retry: Retry {
            on: Vec::new(),
            max_attempts: 5,
            first_delay: Duration::from_millis(500),
            longest_delay: Duration::from_secs(30),
            deadline: Duration::from_secs(600),
        },
        reference: None,
        compensation: None,
        stream: false,
    }
}
