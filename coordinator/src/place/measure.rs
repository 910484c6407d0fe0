//! What the scheduler measures: how long a job's tasks take, and how workers conduct themselves.
//!
//! Owns the estimates. Leader only; never part of the state.

use volley_jobspecs::failure::FailureClass;

/// Samples after which old ones count half, so that the median follows a job whose tasks change.
const HALVE_AFTER: u32 = 4_096;
/// Ends a worker is judged by.
const WINDOW: u32 = 20;
/// First quarantine, in milliseconds; each further one is twice as long, up to [`QUARANTINE_MS_MAX`].
const QUARANTINE_MS: u64 = 60_000;
/// Longest quarantine, in milliseconds: an hour, then it is tried again.
const QUARANTINE_MS_MAX: u64 = 60 * 60_000;

/// Durations of a job's tasks, in buckets that double.
#[derive(Debug, Default)]
pub struct Durations {
    buckets: [u32; 32],
    total: u32,
}

impl Durations {
    /// Adds one, in milliseconds.
    pub fn add(&mut self, ms: u64) {
        let bucket = (64 - ms.leading_zeros()).min(31) as usize;
        self.buckets[bucket] += 1;
        self.total += 1;
        if self.total >= HALVE_AFTER {
            self.buckets.iter_mut().for_each(|n| *n /= 2);
            self.total = self.buckets.iter().sum();
        }
    }

    /// Upper bound of the bucket that holds the median, in milliseconds; none before the first sample.
    #[must_use]
    pub fn median_ms(&self) -> Option<u64> {
        let mut seen = 0;
        let middle = self.total.div_ceil(2);
        let found = self.buckets.iter().position(|n| {
            seen += n;
            seen >= middle
        });
        (self.total > 0).then_some(found).flatten().map(|bucket| if bucket == 0 { 0 } else { (1 << bucket) - 1 })
    }
}

/// How a worker's last attempts ended.
#[derive(Debug, Default)]
pub struct Conduct {
    ends: u32,
    infra: u32,
    failed: u32,
    quarantines: u32,
    total: (u64, u64),
}

impl Conduct {
    /// Adds an end: why it failed, or nothing for a success.
    pub fn add(&mut self, class: Option<FailureClass>) {
        if !class.is_none_or(super::says_something) {
            return;
        }
        self.ends += 1;
        self.infra += u32::from(class.is_some_and(super::blames_worker));
        self.failed += u32::from(class.is_some());
        self.total = (self.total.0 + 1, self.total.1 + u64::from(class.is_some()));
    }

    /// Ends and failures since this leader began.
    #[must_use]
    pub fn totals(&self) -> (u64, u64) {
        self.total
    }

    /// After a window of ends: for how long should it get nothing? `all` is what all workers together did.
    ///
    /// It is judged bad when half of its attempts failed by the infrastructure's fault, or when nearly all of them failed while
    /// nearly all of the others' succeeded: a task that is wrong is wrong everywhere.
    pub fn judge(&mut self, all: (u64, u64)) -> Option<u64> {
        if self.ends < WINDOW {
            return None;
        }
        let (others, others_failed) = (all.0 - self.total.0, all.1 - self.total.1);
        let alone = self.failed * 10 >= self.ends * 8 && others >= u64::from(WINDOW) && others_failed * 5 < others;
        let bad = self.infra * 2 >= self.ends || alone;
        (self.ends, self.infra, self.failed) = (0, 0, 0);
        if !bad {
            self.quarantines = self.quarantines.saturating_sub(1);
            return None;
        }
        let ms = (QUARANTINE_MS << self.quarantines.min(16)).min(QUARANTINE_MS_MAX);
        self.quarantines += 1;
        Some(ms)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_median_is_within_its_bucket() {
        let mut d = Durations::default();
        assert_eq!(d.median_ms(), None);
        d.add(0);
        assert_eq!(d.median_ms(), Some(0));
        for _ in 0..1_000 {
            d.add(100);
        }
        assert_eq!(d.median_ms(), Some(127));
        for _ in 0..20_000 {
            d.add(1);
        }
        assert_eq!(d.median_ms(), Some(1));
    }

    #[test]
    fn a_worker_that_fails_alone_is_judged_bad_and_one_that_fails_with_all_is_not() {
        let mut bad = Conduct::default();
        (0..WINDOW).for_each(|_| bad.add(Some(FailureClass::ExitCode)));
        let own = bad.totals();
        assert_eq!(bad.judge((own.0 + 100, own.1 + 2)), Some(QUARANTINE_MS));
        let mut among_bad = Conduct::default();
        (0..WINDOW).for_each(|_| among_bad.add(Some(FailureClass::ExitCode)));
        assert_eq!(among_bad.judge((own.0 + 100, own.1 + 90)), None);
        let mut infra = Conduct::default();
        (0..WINDOW).for_each(|i| infra.add((i % 2 == 0).then_some(FailureClass::RestoreFailed)));
        assert_eq!(infra.judge((1_000, 900)), Some(QUARANTINE_MS));
        let storage = || {
            let mut conduct = Conduct::default();
            (0..WINDOW).for_each(|_| conduct.add(Some(FailureClass::StorageFailed)));
            conduct
        };
        assert_eq!(storage().judge(own), None, "storage that is away for the only worker");
        assert_eq!(storage().judge((own.0 + 100, own.1 + 90)), None, "or for all");
        assert_eq!(storage().judge((own.0 + 100, own.1)), Some(QUARANTINE_MS), "a disk that is full");
        // Tasks that end their own machines, wherever they are: whoever writes them must not keep workers from everybody else.
        let mut attacked = Conduct::default();
        (0..WINDOW).for_each(|_| attacked.add(Some(FailureClass::GuestLost)));
        assert_eq!(attacked.judge((own.0 + 100, own.1 + 90)), None);
    }

    #[test]
    fn a_host_that_was_lost_is_not_judged_for_it() {
        for class in [FailureClass::HostLost, FailureClass::Cancelled] {
            let mut lost = Conduct::default();
            (0..4).for_each(|_| lost.add(None));
            (0..10 * WINDOW).for_each(|_| lost.add(Some(class)));
            assert_eq!(lost.judge((10_000, 10 * u64::from(WINDOW))), None, "{class:?}");
            assert_eq!(lost.totals(), (4, 0), "{class:?}");
        }
    }
}
