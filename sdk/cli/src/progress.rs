//! How far something is.
//!
//! Owns rates, what is left, and the line on standard error: drawn over itself on a terminal, written now and then elsewhere. Does
//! not own what is counted.

use std::collections::VecDeque;
use std::io::{self, IsTerminal as _, Write as _};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use volley_jobspecs::api::{JobState, JobView, TaskCounts};

use crate::out::Out;
use crate::units;

/// How far back a rate looks: long enough to be steady, short enough to notice a change.
const WINDOW: Duration = Duration::from_secs(30);
/// Most samples of a window.
const SAMPLES_MAX: usize = 256;
/// Least time between two lines where nobody sees them drawn over.
const LINE_EVERY: Duration = Duration::from_secs(5);

/// The rate of a growing count, and how long the rest takes.
#[derive(Debug, Default)]
pub struct Meter {
    samples: VecDeque<(Duration, u64)>,
}

impl Meter {
    /// Takes a count at a time since the start.
    pub fn observe(&mut self, at: Duration, count: u64) {
        while self.samples.len() > 1 && (self.samples.len() >= SAMPLES_MAX || self.samples.front().is_some_and(|(t, _)| at - *t > WINDOW)) {
            self.samples.pop_front();
        }
        self.samples.push_back((at, count));
    }

    /// Per second; none before there are two moments to compare.
    #[must_use]
    pub fn rate(&self) -> Option<f64> {
        let (from, to) = (self.samples.front()?, self.samples.back()?);
        let seconds = to.0.checked_sub(from.0)?.as_secs_f64();
        (seconds > 0.0).then(|| to.1.saturating_sub(from.1) as f64 / seconds)
    }

    /// How long `left` takes at this rate; none while nothing moves.
    #[must_use]
    pub fn left(&self, left: u64) -> Option<Duration> {
        let rate = self.rate().filter(|rate| *rate > 0.0)?;
        Duration::try_from_secs_f64(left as f64 / rate).ok()
    }
}

/// How many tasks have ended, whichever way.
#[must_use]
pub fn ended(counts: &TaskCounts) -> u32 {
    counts.succeeded + counts.failed + counts.infra_failed + counts.cancelled
}

/// The line under which a job is followed.
#[must_use]
pub fn job_line(job: &JobView, meter: &Meter) -> String {
    let counts = &job.tasks;
    let mut parts = vec![format!("{}/{} done", ended(counts), counts.total)];
    let mut part = |number: u32, word: &str| {
        if number > 0 {
            parts.push(format!("{number} {word}"));
        }
    };
    part(counts.failed, "failed");
    part(counts.infra_failed, "without verdict");
    part(counts.cancelled, "cancelled");
    part(counts.running, "running");
    part(counts.backoff, "to be retried");
    part(counts.waiting, "waiting");
    let left = counts.total.saturating_sub(ended(counts));
    if let Some(rate) = meter.rate()
        && left > 0
        && !job.state.ended()
    {
        parts.push(if rate < 10.0 { format!("{rate:.1}/s") } else { format!("{rate:.0}/s") });
        if let Some(time) = meter.left(u64::from(left)) {
            parts.push(format!("ETA {}", units::time(u64::try_from(time.as_millis()).unwrap_or(u64::MAX))));
        }
    }
    match job.state {
        JobState::Paused => parts.push("paused".into()),
        JobState::Ending => parts.push("ending".into()),
        JobState::Queued | JobState::Running | JobState::Succeeded | JobState::Failed | JobState::Cancelled => {}
    }
    format!("{} {}  {}", job.job, job.name, parts.join("  "))
}

/// A line on standard error that changes.
#[derive(Debug)]
pub struct Line {
    bar: ProgressBar,
    /// Nobody sees it drawn over: written now and then.
    written: bool,
    last: Option<(Instant, String)>,
}

impl Line {
    /// A line; nothing is shown when the output is to be quiet.
    #[must_use]
    pub fn start(out: Out) -> Self {
        let terminal = io::stderr().is_terminal();
        let bar = if terminal && !out.quiet {
            ProgressBar::new_spinner()
        } else {
            ProgressBar::with_draw_target(None, ProgressDrawTarget::hidden())
        };
        bar.set_style(ProgressStyle::with_template("{spinner} {wide_msg}").unwrap_or_else(|_| ProgressStyle::default_spinner()));
        if terminal && !out.quiet {
            bar.enable_steady_tick(Duration::from_millis(120));
        }
        Self { bar, written: !terminal && !out.quiet, last: None }
    }

    /// Says how it stands.
    pub fn set(&mut self, text: String) {
        if self.written {
            let due = self.last.as_ref().is_none_or(|(at, last)| at.elapsed() >= LINE_EVERY && *last != text);
            if due {
                // A standard error that is gone is nobody's loss.
                let _ = writeln!(io::stderr(), "{text}");
                self.last = Some((Instant::now(), text));
            }
        } else {
            self.bar.set_message(text);
        }
    }

    /// Writes something else without the line in between.
    pub fn around<T>(&self, write: impl FnOnce() -> T) -> T {
        self.bar.suspend(write)
    }

    /// Stops drawing, for a question that needs the line.
    pub fn pause(&mut self) {
        self.bar.disable_steady_tick();
        self.bar.finish_and_clear();
    }

    /// Draws again.
    pub fn resume(&mut self) {
        if !self.bar.is_hidden() {
            self.bar.reset();
            self.bar.enable_steady_tick(Duration::from_millis(120));
        }
    }

    /// Takes the line away.
    pub fn end(self) {
        self.bar.finish_and_clear();
    }
}

/// A transfer of bytes, as a line with rate and time left.
#[derive(Debug)]
pub struct Transfer {
    bar: ProgressBar,
}

impl Transfer {
    /// Begins one of `bytes` bytes.
    #[must_use]
    pub fn start(out: Out, what: &str, bytes: u64) -> Self {
        // indicatif draws to terminals only.
        let target = if out.quiet { ProgressDrawTarget::hidden() } else { ProgressDrawTarget::stderr() };
        let bar = ProgressBar::with_draw_target(Some(bytes), target);
        let template = "{msg} {wide_bar} {bytes}/{total_bytes} {bytes_per_sec} ETA {eta}";
        bar.set_style(ProgressStyle::with_template(template).unwrap_or_else(|_| ProgressStyle::default_bar()));
        bar.set_message(what.to_owned());
        Self { bar }
    }

    /// So many more bytes.
    pub fn add(&self, bytes: u64) {
        self.bar.inc(bytes);
    }

    /// Takes the line away.
    pub fn end(&self) {
        self.bar.finish_and_clear();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::job;

    fn seconds(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    #[test]
    fn a_rate_looks_back_half_a_minute() {
        let mut meter = Meter::default();
        assert_eq!(meter.rate(), None);
        meter.observe(seconds(0), 0);
        assert_eq!((meter.rate(), meter.left(5)), (None, None));
        meter.observe(seconds(10), 100);
        assert_eq!((meter.rate(), meter.left(50)), (Some(10.0), Some(seconds(5))));
        meter.observe(seconds(100), 100);
        meter.observe(seconds(110), 100);
        assert_eq!((meter.rate(), meter.left(50)), (Some(0.0), None));
    }

    #[test]
    fn the_line_names_what_is_there_and_nothing_else() {
        let mut meter = Meter::default();
        meter.observe(seconds(0), 0);
        meter.observe(seconds(2), 100);
        let counts = TaskCounts { total: 492, succeeded: 70, failed: 30, running: 16, waiting: 376, ..TaskCounts::default() };
        assert_eq!(
            job_line(&job(JobState::Running, counts, None), &meter),
            "j7 evals  100/492 done  30 failed  16 running  376 waiting  50/s  ETA 7.8s"
        );
        let counts = TaskCounts { total: 2, succeeded: 1, infra_failed: 1, ..TaskCounts::default() };
        assert_eq!(job_line(&job(JobState::Failed, counts, None), &meter), "j7 evals  2/2 done  1 without verdict");
    }
}
