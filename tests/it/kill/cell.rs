//! The cells of the matrix: where an operation stood when something died, and what its downstream can do about it.

use std::net::SocketAddr;
use std::time::Duration;

use crate::support::proxy::{Side, Stop};

use super::downstream::Point;

/// The longest that a request may be on its way, unless a test says otherwise.
pub const IN_FLIGHT: Duration = Duration::from_secs(8);

pub const LEASE: Duration = Duration::from_secs(2);

/// Where the operation stands still.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Boundary {
    BeforeTheClaim,
    AfterTheClaim,
    AfterTheFirstByte,
    BeforeTheEffect,
    AfterTheLastByte,
    AfterTheHead,
    BeforeTheSettlement,
    AfterTheSettlement,
    BeforeOurAnswer,
    AfterOurAnswer,
}

/// What the downstream can do about a request that it may have received before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ability {
    Key,
    /// Takes keys, and forgets them sooner than a lease lapses.
    Forgetful,
    Conditional,
    Lookup,
    None,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cell {
    pub boundary: Boundary,
    pub ability: Ability,
}

/// How an operation has to end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ending {
    /// The id is free, and nothing was sent.
    Free,
    Succeeded,
    /// `needs_reconciliation`, with so many effects that nobody knows of.
    Unknown {
        effects: usize,
    },
}

impl Boundary {
    pub const ALL: [Self; 10] = [
        Self::BeforeTheClaim,
        Self::AfterTheClaim,
        Self::AfterTheFirstByte,
        Self::BeforeTheEffect,
        Self::AfterTheLastByte,
        Self::AfterTheHead,
        Self::BeforeTheSettlement,
        Self::AfterTheSettlement,
        Self::BeforeOurAnswer,
        Self::AfterOurAnswer,
    ];

    /// Where the database stands still, for those boundaries that are at a COMMIT.
    pub fn stop(self, id: &str) -> Option<Stop> {
        let claim = "insert into ledger.requests";
        let settlement = "insert into ledger.receipts";
        let (statement, side) = match self {
            Self::BeforeTheClaim => (claim, Side::Before),
            Self::AfterTheClaim => (claim, Side::After),
            Self::BeforeTheSettlement => (settlement, Side::Before),
            Self::AfterTheSettlement => (settlement, Side::After),
            Self::AfterTheFirstByte
            | Self::BeforeTheEffect
            | Self::AfterTheLastByte
            | Self::AfterTheHead
            | Self::BeforeOurAnswer
            | Self::AfterOurAnswer => return None,
        };
        Some(Stop {
            statement,
            parameter: id.to_owned(),
            side,
        })
    }

    /// Where the downstream stands still, for those boundaries that are within its answer.
    pub fn point(self) -> Option<Point> {
        match self {
            Self::BeforeTheEffect => Some(Point::BeforeTheEffect),
            Self::AfterTheLastByte => Some(Point::AfterTheEffect),
            Self::AfterTheHead => Some(Point::AfterTheHead),
            Self::BeforeTheClaim
            | Self::AfterTheClaim
            | Self::AfterTheFirstByte
            | Self::BeforeTheSettlement
            | Self::AfterTheSettlement
            | Self::BeforeOurAnswer
            | Self::AfterOurAnswer => None,
        }
    }

    fn is_settled(self) -> bool {
        matches!(
            self,
            Self::AfterTheSettlement | Self::BeforeOurAnswer | Self::AfterOurAnswer
        )
    }

    /// Whether the whole request has left, so that the downstream acts on it, sooner or later.
    fn has_left(self) -> bool {
        !matches!(
            self,
            Self::BeforeTheClaim | Self::AfterTheClaim | Self::AfterTheFirstByte
        )
    }
}

impl Ability {
    pub const ALL: [Self; 5] = [Self::Key, Self::Forgetful, Self::Conditional, Self::Lookup, Self::None];

    pub fn name(self) -> &'static str {
        match self {
            Self::Key => "key",
            Self::Forgetful => "forgetful",
            Self::Conditional => "conditional",
            Self::Lookup => "lookup",
            Self::None => "none",
        }
    }

    /// Whether an unknown can be cleared up without a person, later than a lease after the send.
    fn recovers(self) -> bool {
        matches!(self, Self::Key | Self::Conditional | Self::Lookup)
    }
}

impl Cell {
    pub fn all() -> Vec<Self> {
        let of = |boundary| Ability::ALL.map(|ability| Self { boundary, ability });
        Boundary::ALL.into_iter().flat_map(of).collect()
    }

    /// The operation's id, which is also the downstream's reference. No cell's is part of another's.
    pub fn id(&self) -> String {
        format!("{:?}.{}.", self.boundary, self.ability.name())
    }

    /// Bodies that are read for their meaning take longest.
    pub fn content_type(&self) -> &'static str {
        match self.boundary {
            Boundary::AfterTheFirstByte => "application/octet-stream",
            _ => "application/json",
        }
    }

    pub fn path(&self) -> String {
        let downstream = match self.boundary {
            Boundary::AfterTheFirstByte => "narrow",
            _ => "things",
        };
        format!("/v1/proxy/{downstream}/{}/things", self.ability.name())
    }

    /// More than what sockets take on the way, where it has to stop in the middle.
    pub fn body(&self) -> String {
        let fill = match self.boundary {
            Boundary::AfterTheFirstByte => "x".repeat(6 << 20),
            _ => String::new(),
        };
        format!(r#"{{"fill":"{fill}","ref":"{}"}}"#, self.id())
    }

    /// When the claimer died, or stood still past its lease.
    pub fn once_its_claim_lapsed(&self) -> Ending {
        match self.boundary {
            Boundary::BeforeTheClaim => Ending::Free,
            settled if settled.is_settled() => Ending::Succeeded,
            _ if self.ability.recovers() => Ending::Succeeded,
            left => Ending::Unknown {
                effects: usize::from(left.has_left()),
            },
        }
    }

    /// When the database died and came back, and the claimer lived: it knows what became of its attempt.
    pub fn once_its_database_is_back(&self) -> Ending {
        match self.boundary {
            Boundary::BeforeTheClaim | Boundary::AfterTheClaim => Ending::Free,
            _ => Ending::Succeeded,
        }
    }
}

/// The services of the matrix; every test adds where its downstream is.
pub fn config(things: SocketAddr, narrow: SocketAddr, in_flight: Duration) -> String {
    let seconds = in_flight.as_secs();
    let routes = |name: &str| {
        format!(
            r#"
            [[downstreams.{name}.routes]]
            path = "/key/things"
            idempotency = "key"
            key_retention = "1h"
            retry = {{ max_attempts = 100, first_delay = "100ms", longest_delay = "300ms" }}
            [[downstreams.{name}.routes]]
            path = "/forgetful/things"
            idempotency = "key"
            key_retention = "1500ms"
            key_margin = "500ms"
            [[downstreams.{name}.routes]]
            path = "/conditional/things"
            idempotency = "conditional"
            read_back = {{ path = "/conditional/things/{{/ref}}", ours = {{ "/ref" = "{{/ref}}" }} }}
            retry = {{ first_delay = "100ms", longest_delay = "300ms" }}
            [[downstreams.{name}.routes]]
            path = "/lookup/things"
            idempotency = "lookup"
            look_up = {{ path = "/lookup/things?ref={{/ref}}", found = "/data/0", ours = {{ "/data/0/ref" = "{{/ref}}" }} }}
            settle_delay = "300ms"
            interval = "300ms"
            max_in_flight = "{seconds}s"
            "#
        )
    };
    let downstream = |name: &str, address| {
        format!(
            r#"
            [downstreams.{name}]
            url = "http://{address}"
            head_timeout = "{seconds}s"
            idle_timeout = "{seconds}s"
            max_request_bytes = 16000000
            {}
            "#,
            routes(name)
        )
    };
    format!(
        r#"
        [database]
        max_connections = 8
        apply_connections = 2
        [recovery]
        heartbeat = "200ms"
        lease = "{}s"
        sweep = "200ms"
        purge = "forever"
        {}{}
        "#,
        LEASE.as_secs(),
        downstream("things", things),
        downstream("narrow", narrow)
    )
}
