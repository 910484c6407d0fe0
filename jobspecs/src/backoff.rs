//! How long a task waits before its next try.
//!
//! Owns the arithmetic, in whole milliseconds and without floats, so that every coordinator computes the same instant.
//! Does not own the decision to retry.

use minicbor::{Decode, Encode};

use crate::ids::JobId;

/// Longest wait between two tries, in milliseconds: a day. A longer one is a schedule, not a backoff.
pub const DELAY_MS_MAX: u64 = 24 * 60 * 60 * 1000;

/// Exponential backoff with full jitter.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode, serde::Serialize)]
#[cbor(map)]
pub struct Backoff {
    /// Upper bound of the first wait, in milliseconds.
    #[n(0)]
    pub initial_ms: u64,
    /// What the bound is multiplied with after each failure, in thousandths (2000 doubles it).
    #[n(1)]
    pub factor_milli: u32,
    /// The bound never passes this, in milliseconds.
    #[n(2)]
    pub cap_ms: u64,
}

impl Default for Backoff {
    fn default() -> Self {
        Self { initial_ms: 1_000, factor_milli: 2_000, cap_ms: 60_000 }
    }
}

impl Backoff {
    /// Upper bound of the wait after the `failures`-th failure (1 for the first), in milliseconds.
    #[must_use]
    pub fn bound_ms(&self, failures: u32) -> u64 {
        let cap = self.cap_ms.min(DELAY_MS_MAX);
        let mut bound = self.initial_ms.min(cap);
        for _ in 1..failures {
            if bound >= cap || self.factor_milli <= 1_000 {
                break;
            }
            bound = (bound.saturating_mul(u64::from(self.factor_milli)) / 1_000).min(cap);
        }
        bound
    }

    /// The wait after the `failures`-th failure: even over 0 ..= bound, from a generator seeded by (job, task, attempt), in
    /// milliseconds.
    #[must_use]
    pub fn delay_ms(&self, failures: u32, job: JobId, index: u32, number: u32) -> u64 {
        let seed = job.0 ^ (u64::from(index) << 32) ^ u64::from(number);
        // Scaling by the high half of a 128-bit product has no modulo bias worth the name and needs no division.
        let span = u128::from(self.bound_ms(failures)) + 1;
        ((u128::from(splitmix64(splitmix64(seed))) * span) >> 64) as u64
    }
}

/// One step of the splitmix64 generator (Steele, Lea, Flood: "Fast splittable pseudorandom number generators", 2014).
#[must_use]
pub fn splitmix64(state: u64) -> u64 {
    let mut z = state.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn the_bound_doubles_to_the_cap() {
        let b = Backoff::default();
        assert_eq!((1..=8).map(|n| b.bound_ms(n)).collect::<Vec<_>>(), [1000, 2000, 4000, 8000, 16000, 32000, 60000, 60000]);
    }

    #[test]
    fn jitter_is_spread_over_the_whole_bound() {
        let b = Backoff::default();
        let delays: Vec<u64> = (0..10_000).map(|i| b.delay_ms(3, JobId(5), i, 1)).collect();
        let mean = delays.iter().sum::<u64>() / 10_000;
        assert!((1_900..=2_100).contains(&mean), "{mean}");
        assert!(delays.iter().any(|d| *d < 100) && delays.iter().any(|d| *d > 3_900));
    }

    proptest! {
        #[test]
        fn a_delay_never_passes_its_bound(initial in 0u64..1 << 40, factor in 0u32..100_000, cap in 0u64..1 << 40, n in 0u32..1000, job: u64, index: u32) {
            let b = Backoff { initial_ms: initial, factor_milli: factor, cap_ms: cap };
            prop_assert!(b.delay_ms(n, JobId(job), index, n) <= b.bound_ms(n));
            prop_assert!(b.bound_ms(n) <= cap.min(DELAY_MS_MAX));
        }
    }
}
