//! Latencies in buckets: exact below 128 µs, within 1.6 % above. Adding one costs a shift and an increment.

use std::time::Duration;

/// Buckets per doubling.
const STEPS: u64 = 64;
/// Up to 2^37 µs, a day and a half.
const BUCKETS: usize = 32 * STEPS as usize;

#[derive(Clone)]
pub struct Histogram {
    counts: Vec<u64>,
    total: u64,
}

impl Histogram {
    pub fn new() -> Self {
        Self {
            counts: vec![0; BUCKETS],
            total: 0,
        }
    }

    pub fn add(&mut self, latency: Duration) {
        let micros = latency.as_micros() as u64;
        self.counts[bucket(micros).min(BUCKETS - 1)] += 1;
        self.total += 1;
    }

    pub fn merge(&mut self, other: &Self) {
        for (count, more) in self.counts.iter_mut().zip(&other.counts) {
            *count += more;
        }
        self.total += other.total;
    }

    pub fn total(&self) -> u64 {
        self.total
    }

    /// The latency that `share` of all requests stayed at or below.
    pub fn quantile(&self, share: f64) -> Duration {
        let rank = (share * self.total as f64).ceil().max(1.0) as u64;
        let mut seen = 0;
        for (bucket, count) in self.counts.iter().enumerate() {
            seen += count;
            if seen >= rank {
                return Duration::from_micros(lower_bound(bucket as u64));
            }
        }
        Duration::ZERO
    }
}

/// The first two doublings are exact; each further one has `STEPS` buckets, twice as wide as those before.
fn bucket(micros: u64) -> usize {
    let shift = (micros / STEPS).checked_ilog2().unwrap_or(0) as u64;
    (shift * STEPS + (micros >> shift)) as usize
}

fn lower_bound(bucket: u64) -> u64 {
    if bucket < 2 * STEPS {
        return bucket;
    }
    let shift = bucket / STEPS - 1;
    (bucket - shift * STEPS) << shift
}
