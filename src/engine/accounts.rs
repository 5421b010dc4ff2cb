//! Who is calling: keys are looked up in the database and believed for less than a second, so that a revocation holds on
//! every process within one.

use std::sync::Arc;
use std::time::Duration;

use moka::future::Cache;

use super::outcome::Refusal;
use crate::ledger::key::{self, Caller, Secret};
use crate::postgres::error::Error;
use crate::postgres::pool::Pool;
use crate::postgres::session::Limits;

/// How long a look-up is believed.
const BELIEVED: Duration = Duration::from_millis(800);

/// Most keys remembered at a time, wrong ones included.
const MOST: u64 = 10_000;

const LIMITS: Limits = Limits {
    lock: Duration::from_secs(1),
    statement: Duration::from_secs(2),
};

pub struct Accounts {
    pool: Pool,
    callers: Cache<[u8; 32], Option<Caller>>,
}

impl Accounts {
    pub fn new(pool: Pool) -> Self {
        let callers = Cache::builder().max_capacity(MOST).time_to_live(BELIEVED).build();
        Self { pool, callers }
    }

    /// The caller behind a presented key; `None` if it is unknown or revoked. Concurrent look-ups of one key are one.
    pub async fn caller(&self, secret: &Secret) -> Result<Option<Caller>, Refusal> {
        let digest = secret.sha256();
        if let Some(caller) = self.callers.get(&digest).await {
            return Ok(caller);
        }
        // On the heap: nearly every request does without it, and those that wait for long should be small.
        Box::pin(self.callers.try_get_with(digest, self.look_up(secret)))
            .await
            .map_err(|error: Arc<Error>| {
                tracing::warn!(error = %error, "cannot check an API key");
                Refusal::Unavailable
            })
    }

    /// Looks every key up again: one of them was changed here, and its next request must not be told what held before.
    pub fn forget(&self) {
        self.callers.invalidate_all();
    }

    async fn look_up(&self, secret: &Secret) -> Result<Option<Caller>, Error> {
        let mut session = self.pool.reader(LIMITS).await?;
        let caller = key::authenticate(&mut session, secret).await?;
        session.finish().await?;
        Ok(caller)
    }
}
