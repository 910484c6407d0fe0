//! Randomness from a seed: nothing else in the simulation is random.

use volley_jobspecs::backoff::splitmix64;

/// A generator.
#[derive(Debug, Clone)]
pub struct Random(u64);

impl Random {
    pub fn new(seed: u64) -> Self {
        Self(splitmix64(seed))
    }

    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        splitmix64(self.0)
    }

    /// Even over `0..below`.
    pub fn below(&mut self, below: u64) -> u64 {
        if below == 0 { 0 } else { self.next() % below }
    }

    /// Even over `from..=to`.
    pub fn between(&mut self, from: u64, to: u64) -> u64 {
        from + self.below(to - from + 1)
    }

    /// True once in `n`.
    pub fn one_in(&mut self, n: u64) -> bool {
        self.below(n) == 0
    }
}
