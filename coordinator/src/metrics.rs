//! What the coordinator counts about itself, for Prometheus.
//!
//! Owns the names and what each counts. Does not own gauges of the state: those are read from the state when somebody scrapes
//! (`api/cluster.rs`), so they can't drift from it. One prefix per stage: `volley_accept_…`, `volley_track_…`, `volley_place_…`.

use std::time::Duration;

use prometheus_client::encoding::EncodeLabelSet;
use prometheus_client::metrics::counter::Counter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::histogram::Histogram;
use prometheus_client::registry::Registry;
use volley_jobspecs::failure::FailureClass;
use volley_jobspecs::wire::report::Ending;

use crate::state::effects::{Answer, Effects};

/// Bounds of the duration histograms, in seconds: from a small batch to a second, where something is wrong.
const SECONDS: [f64; 10] = [0.0001, 0.000_25, 0.001, 0.0025, 0.01, 0.025, 0.1, 0.25, 1.0, 2.5];

/// How something ended: `succeeded`, or the failure class.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
pub struct Outcome {
    /// The word.
    pub outcome: &'static str,
}

impl Outcome {
    pub(crate) fn of(class: Option<FailureClass>) -> Self {
        Self { outcome: class.map_or("succeeded", FailureClass::as_str) }
    }
}

/// The counters. Cheap to count; shared between the driver and the API.
#[derive(Debug, Clone)]
pub struct Metrics {
    /// Records applied.
    pub records: Counter,
    /// Messages on the leader's subject that no leader wrote.
    pub aliens: Counter,
    /// Time to apply and store one batch of records.
    pub apply_seconds: Histogram,
    /// Jobs accepted.
    pub jobs_accepted: Counter,
    /// Requests that `apply` refused.
    pub refused: Counter,
    /// Bundles given to workers.
    pub bundles_opened: Counter,
    /// Bundles that came back.
    pub bundles_closed: Counter,
    /// Workers declared lost; those that left of their own will are not counted.
    pub workers_lost: Counter,
    /// Attempts ended, by outcome.
    pub attempts: Family<Outcome, Counter>,
    /// Tasks ended, by outcome; ranges of tasks that never started are not in it.
    pub tasks: Family<Outcome, Counter>,
    /// Time of one leader's round: deciding and placing.
    pub round_seconds: Histogram,
    /// Trailing works that were done.
    pub trailed: Counter,
    /// Trailing works that failed and are tried again.
    pub trail_failures: Counter,
}

impl Default for Metrics {
    fn default() -> Self {
        Self {
            records: Counter::default(),
            aliens: Counter::default(),
            apply_seconds: Histogram::new(SECONDS),
            jobs_accepted: Counter::default(),
            refused: Counter::default(),
            bundles_opened: Counter::default(),
            bundles_closed: Counter::default(),
            workers_lost: Counter::default(),
            attempts: Family::default(),
            tasks: Family::default(),
            round_seconds: Histogram::new(SECONDS),
            trailed: Counter::default(),
            trail_failures: Counter::default(),
        }
    }
}

impl Metrics {
    /// Counts a batch of applied records.
    pub fn applied(&self, records: usize, took: Duration, effects: &[Effects]) {
        self.records.inc_by(records as u64);
        self.apply_seconds.observe(took.as_secs_f64());
        for fx in effects {
            self.aliens.inc_by(fx.aliens);
            let accepted = |answer: &Answer| matches!(answer, Answer::Submitted { existed: false, .. });
            self.jobs_accepted.inc_by(fx.answers.iter().filter(|(_, answer)| accepted(answer)).count() as u64);
            self.workers_lost.inc_by(fx.workers_lost);
            self.refused.inc_by(fx.answers.iter().filter(|(_, answer)| matches!(answer, Answer::Refused(_))).count() as u64);
            self.bundles_opened.inc_by(fx.opened.len() as u64);
            self.bundles_closed.inc_by(fx.closed.len() as u64);
            for (_, row) in &fx.attempts {
                let class = match row.end.ending {
                    Ending::Succeeded => None,
                    Ending::Failed(class) => Some(class),
                    Ending::Returned => continue,
                };
                self.attempts.get_or_create(&Outcome::of(class)).inc();
            }
            for (_, _, _, entry) in &fx.results {
                self.tasks.get_or_create(&Outcome::of(entry.class)).inc();
            }
        }
    }

    /// Registers everything under `volley_`.
    pub fn register(&self, registry: &mut Registry) {
        let volley = registry.sub_registry_with_prefix("volley");
        volley.register("apply_records", "Records of the log that were applied", self.records.clone());
        volley.register("apply_aliens", "Messages on the leader's subject that no leader wrote, passed over", self.aliens.clone());
        volley.register("apply_batch_seconds", "Time to apply and store one batch of records", self.apply_seconds.clone());
        volley.register("accept_jobs", "Jobs accepted", self.jobs_accepted.clone());
        volley.register("accept_refused", "Requests refused when their record was applied", self.refused.clone());
        volley.register("assign_bundles", "Bundles given to workers", self.bundles_opened.clone());
        volley.register("track_bundles", "Bundles that came back from workers", self.bundles_closed.clone());
        volley.register("track_workers_lost", "Workers declared lost", self.workers_lost.clone());
        volley.register("track_attempts", "Attempts that ended, by outcome", self.attempts.clone());
        volley.register("finish_tasks", "Tasks that ended, by outcome", self.tasks.clone());
        volley.register("place_round_seconds", "Time of one round of the leader: deciding and placing", self.round_seconds.clone());
        volley.register("trail_works", "Manifests written and sweeps made after jobs ended", self.trailed.clone());
        volley.register("trail_failures", "Manifests and sweeps that failed and are tried again", self.trail_failures.clone());
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use prometheus_client::encoding::prometheus_text;

    #[test]
    fn what_is_counted_can_be_scraped() {
        let metrics = Metrics::default();
        metrics.applied(3, Duration::from_micros(300), &[Effects::default()]);
        metrics.attempts.get_or_create(&Outcome::of(Some(FailureClass::Oom))).inc();
        let mut registry = Registry::default();
        metrics.register(&mut registry);
        let mut text = String::new();
        prometheus_text::encode(&mut text, &registry).unwrap_or_else(|e| panic!("{e}"));
        assert!(text.contains("volley_apply_records_total 3\n"), "{text}");
        assert!(text.contains("volley_track_attempts_total{outcome=\"oom\"} 1\n"), "{text}");
        assert!(text.contains("volley_apply_batch_seconds_bucket{le=\"0.001\"} 1\n"), "{text}");
    }
}
