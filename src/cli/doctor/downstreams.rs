//! The way out: can each downstream be reached as an attempt would, is what its routes declare wise, and is there room for
//! large requests? None is sent: a connection is made, secured and closed.

use std::net::IpAddr;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use tokio::task::JoinSet;

use super::{Findings, chain};
use crate::http::spool;
use crate::outbound::downstream::{Ability, Downstream};
use crate::outbound::registry::Downstreams;
use crate::outbound::send::{NotSent, Outbound};

/// What came of a connection: how long it took, in milliseconds, or why there is none.
type Reached = Result<f64, NotSent>;

/// Looks at every downstream; they are dialled at the same time, and shown in the order of their names.
pub async fn examine(downstreams: &Downstreams, spool_dir: &Path, findings: &mut Findings) {
    if downstreams.iter().next().is_some() {
        room(spool_dir, findings);
    }
    let outbound = Arc::new(Outbound::default());
    let mut dialling = JoinSet::new();
    for (at, downstream) in downstreams.iter().cloned().enumerate() {
        let outbound = outbound.clone();
        dialling.spawn(async move { (at, reach(&outbound, &downstream).await) });
    }
    let mut reached = dialling.join_all().await;
    reached.sort_by_key(|(at, _)| *at);
    for (downstream, (_, reached)) in downstreams.iter().zip(reached) {
        reachable(downstream, reached, findings);
        declared(downstream, findings);
    }
}

fn room(directory: &Path, findings: &mut Findings) {
    match spool::check(directory) {
        Ok(()) => findings.ok(
            "spool_dir",
            format!("large request bodies can be kept in {}", directory.display()),
        ),
        Err(error) => findings.fail(
            "spool_dir",
            chain(&error),
            "set spool_dir under [limits] to a directory on a disk that the service may write to",
        ),
    }
}

async fn reach(outbound: &Outbound, downstream: &Arc<Downstream>) -> Reached {
    let began = Instant::now();
    // Dropped without a request, it is closed.
    outbound.connect(downstream).await?;
    Ok(began.elapsed().as_secs_f64() * 1e3)
}

fn reachable(downstream: &Downstream, reached: Reached, findings: &mut Findings) {
    let (name, base) = (&downstream.name, &downstream.base);
    match reached {
        Ok(took) => {
            let steps = if base.is_tls() {
                "name, connection and TLS"
            } else {
                "name and connection"
            };
            findings.ok(
                "downstream",
                format!("downstream {name} at {base} is reached: {steps} took {took:.0} ms; no request was sent"),
            );
        }
        Err(not_sent) => findings.fail(
            "downstream",
            format!("downstream {name} at {base} is not reached: {not_sent}"),
            advice(&not_sent),
        ),
    }
    if !base.is_tls() && !downstream.credential.is_empty() && !is_here(base.host()) {
        findings.warn(
            "downstream",
            format!("downstream {name} gets its secret in clear text"),
            "use a url that begins with https",
        );
    }
}

fn advice(not_sent: &NotSent) -> &'static str {
    match not_sent.stage {
        "dns" => "correct the host in its url, or this machine's name resolution",
        "tls" => {
            "its certificate has to be for that name, and of an authority that this machine or ca_file trusts; it may also \
             want to see client_cert_file"
        }
        _ => "is it up, and may this machine reach that port? Until then its operations are answered with 502",
    }
}

/// What is declared and may be regretted.
fn declared(downstream: &Downstream, findings: &mut Findings) {
    let name = &downstream.name;
    if downstream.routes.is_empty() {
        findings.warn(
            "routes",
            format!("downstream {name} declares no routes: after every unknown outcome a person decides"),
            "declare what its paths can do: [[downstreams.NAME.routes]] with idempotency = \"key\", \"conditional\" or \"lookup\"",
        );
    }
    for route in &downstream.routes {
        if route.ability == Ability::None {
            findings.warn(
                "routes",
                format!(
                    "downstream {name}, {}: declares nothing, so after an unknown outcome a person decides",
                    route.name
                ),
                "if it takes a key, refuses what is done already, or can be asked, declare its idempotency",
            );
        }
        if let Some(haste) = downstream.haste(route) {
            findings.warn(
                "routes",
                format!("downstream {name}, {}: {haste}", route.name),
                "raise max_in_flight above both, or leave it out; or lower the time-outs",
            );
        }
    }
    let unprotected: Vec<&str> = downstream
        .routes
        .iter()
        .chain([&downstream.undeclared])
        .filter(|route| !route.key_required)
        .map(|route| route.name.as_str())
        .collect();
    if !unprotected.is_empty() {
        findings.warn(
            "routes",
            format!(
                "downstream {name} passes requests without a key on, unprotected: {}",
                unprotected.join(", ")
            ),
            "leave require_key = false out as soon as every caller sends a key",
        );
    }
}

/// Whether nothing leaves this machine on the way there.
fn is_here(host: &str) -> bool {
    host == "localhost" || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::cli::doctor::Level;
    use crate::outbound::samples;

    fn warnings(downstream: &Downstream) -> Vec<String> {
        let mut findings = Findings::default();
        declared(downstream, &mut findings);
        assert!(
            findings
                .checks
                .iter()
                .all(|check| check.level == Level::Warn && check.advice.is_some())
        );
        findings.checks.into_iter().map(|check| check.what).collect()
    }

    #[test]
    fn what_a_route_declares_and_may_be_regretted_is_a_warning() {
        let mut downstream = samples::downstream();
        let longest = downstream.limits.head + downstream.limits.idle;
        let mut route = samples::route("POST", "/charges");
        route.max_in_flight = longest - Duration::from_millis(1);
        downstream.routes = vec![Arc::new(route)];
        let found = warnings(&downstream);
        assert!(found[0].contains("POST /charges: declares nothing"), "{found:?}");
        assert!(found[1].contains("max_in_flight is"), "{found:?}");
        assert_eq!(found.len(), 2, "{found:?}");
        let mut route = samples::route("POST", "/charges");
        route.max_in_flight = longest;
        route.ability = Ability::Key {
            header: http::HeaderName::from_static("idempotency-key"),
            quoted: false,
            retention: Duration::from_secs(86_400),
            margin: Duration::from_secs(3_600),
        };
        downstream.routes = vec![Arc::new(route)];
        assert_eq!(warnings(&downstream), Vec::<String>::new());
        downstream.routes.clear();
        assert_eq!(warnings(&downstream).len(), 1);
    }
}
