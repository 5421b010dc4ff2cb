//! Random moments that can be had again: the seed is printed, and `OPLEDGER_TEST_SEED` sets it.

use std::time::Duration;

/// SplitMix64 (Steele, Lea, Flood 2014): small, and good enough to choose moments.
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    /// A new seed, or the one from the environment; printed, so that a failing run can be repeated.
    pub fn announced(test: &str) -> Self {
        let seed = std::env::var("OPLEDGER_TEST_SEED")
            .ok()
            .and_then(|seed| seed.parse().ok())
            .unwrap_or_else(|| getrandom::u64().unwrap());
        println!("{test}: OPLEDGER_TEST_SEED={seed}");
        Self(seed)
    }

    /// Another stream, for another thread of the test.
    pub fn split(&mut self) -> Self {
        Self(self.next())
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        mixed ^ (mixed >> 31)
    }

    /// A number from 0 to `bound - 1`.
    pub fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }

    /// A duration from `least` to `most`.
    pub fn between(&mut self, least: Duration, most: Duration) -> Duration {
        let range = u64::try_from((most - least).as_micros()).unwrap();
        least + Duration::from_micros(self.below(range + 1))
    }
}
