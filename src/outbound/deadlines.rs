//! Until when the requests on a shared connection may be written.
//!
//! A connection that many requests share writes by itself, whatever becomes of those who wait for the answers. Were a process
//! to stand still past a request's deadline, it would go on with writing before anybody could cancel the request, and end
//! what others have long found not to have been made. So the socket looks at the clock before each write. Once a deadline
//! has passed without its request having ended, nothing is written any more, and the connection breaks.

use std::collections::BTreeSet;
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::time::Instant;

/// How long a request that is over may take to say so: timers, and tasks that wait for their turn.
const GRACE: Duration = Duration::from_millis(250);

/// Those of one connection.
#[derive(Debug, Default)]
pub struct Deadlines {
    standing: Mutex<Standing>,
    missed: AtomicBool,
}

#[derive(Debug, Default)]
struct Standing {
    /// Soonest first; the number tells those of the same moment apart.
    all: BTreeSet<(Instant, u64)>,
    numbers: u64,
}

/// One request's, for as long as it is under way.
#[derive(Debug)]
pub struct Deadline {
    of: Arc<Deadlines>,
    at: Instant,
    number: u64,
}

impl Deadlines {
    /// Has it kept from now on.
    pub fn keep(self: &Arc<Self>, at: Instant) -> Deadline {
        let mut standing = self.standing();
        standing.numbers += 1;
        let number = standing.numbers;
        standing.all.insert((at, number));
        drop(standing);
        Deadline {
            of: self.clone(),
            at,
            number,
        }
    }

    /// Whether a request has been under way past its deadline. It stays so.
    pub fn missed(&self) -> bool {
        self.missed.load(Ordering::Acquire)
    }

    /// To be asked before each write.
    pub fn check(&self) -> io::Result<()> {
        let soonest = self.standing().all.first().map(|(at, _)| *at);
        if soonest.is_some_and(|at| at + GRACE < Instant::now()) {
            self.missed.store(true, Ordering::Release);
        }
        if self.missed() {
            let cause = "this process stood still past the deadline of a request";
            return Err(io::Error::new(io::ErrorKind::TimedOut, cause));
        }
        Ok(())
    }

    fn standing(&self) -> MutexGuard<'_, Standing> {
        self.standing.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Deadline {
    pub fn at(&self) -> Instant {
        self.at
    }

    pub fn has_passed(&self) -> bool {
        self.at <= Instant::now()
    }

    pub fn move_to(&mut self, at: Instant) {
        if at == self.at {
            return;
        }
        let mut standing = self.of.standing();
        standing.all.remove(&(self.at, self.number));
        standing.all.insert((at, self.number));
        self.at = at;
    }
}

impl Drop for Deadline {
    fn drop(&mut self) {
        self.of.standing().all.remove(&(self.at, self.number));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn ago(time: Duration) -> Instant {
        Instant::now().checked_sub(time).unwrap()
    }

    #[test]
    fn nothing_is_written_once_a_request_is_under_way_past_its_deadline() {
        let deadlines = Arc::new(Deadlines::default());
        assert!(deadlines.check().is_ok());
        let _later = deadlines.keep(Instant::now() + GRACE);
        let just_over = deadlines.keep(ago(GRACE / 10));
        assert!(deadlines.check().is_ok() && just_over.has_passed());
        let over = deadlines.keep(ago(GRACE * 2));
        assert!(deadlines.check().is_err());
        // What it has kept from being written is not made up for.
        drop(over);
        assert!(deadlines.check().is_err() && deadlines.missed());
    }

    #[test]
    fn what_has_ended_in_time_or_has_more_of_it_keeps_nobody_from_writing() {
        let deadlines = Arc::new(Deadlines::default());
        let at = ago(GRACE * 2);
        let (ended, mut moved) = (deadlines.keep(at), deadlines.keep(at));
        moved.move_to(Instant::now() + GRACE);
        drop(ended);
        assert!(deadlines.check().is_ok() && !deadlines.missed());
        moved.move_to(at);
        assert!(deadlines.check().is_err());
    }
}
