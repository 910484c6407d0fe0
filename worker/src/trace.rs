//! What an attempt leaves for those who watch: how long each stage took, the spans of those attempts that are kept, figures.
//!
//! Owns the stages' names, the choice of attempts (every failure, one success in a hundred) and what their spans say. Pure: a span is
//! built at the end of its attempt from a few numbers, so that what nobody keeps costs nothing. Does not own sending
//! (`volley_jobspecs::observe`).

use std::collections::BTreeMap;

use volley_jobspecs::failure::FailureClass;
use volley_jobspecs::ids::{AttemptName, JobId, WorkerId};
use volley_jobspecs::observe::{Figure, FigureKind, Span, SpanKind, Value};
use volley_jobspecs::wire::plan::Isolation;
use volley_jobspecs::wire::report::{AttemptEnd, Ending};
use volley_jobspecs::wire::trace::{TraceContext, is_kept};

use crate::control::Status;

/// Jobs whose trace is known: as many as can be active on one host at once, and some more.
const JOBS_KEPT: usize = 512;

/// A stage of an attempt, in the order they come.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// From receipt to a slot.
    Claim,
    /// Directories, inputs, the item put in.
    Prepare,
    /// The machine.
    Restore,
    /// The command.
    Execute,
    /// Outputs and logs.
    Persist,
    /// Everything is cleared away.
    Reclaim,
    /// From its end until that is in the log.
    Report,
}

impl Stage {
    /// All of them.
    pub const ALL: [Self; 7] = [Self::Claim, Self::Prepare, Self::Restore, Self::Execute, Self::Persist, Self::Reclaim, Self::Report];

    /// Its name, which is its file's too.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Claim => "claim",
            Self::Prepare => "prepare",
            Self::Restore => "restore",
            Self::Execute => "execute",
            Self::Persist => "persist",
            Self::Reclaim => "reclaim",
            Self::Report => "report",
        }
    }
}

/// How long each stage of an attempt took, in microseconds; 0 where it did not come to it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Stages([u64; 7]);

impl Stages {
    /// Adds to a stage. What took less than a microsecond counts as one: it did happen.
    pub fn add(&mut self, stage: Stage, us: u64) {
        self.0[stage as usize] += us.max(1);
    }

    /// A stage's time, in microseconds.
    #[must_use]
    pub fn us(&self, stage: Stage) -> u64 {
        self.0[stage as usize]
    }
}

/// How often each stage was passed, and how long that took in all.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct StageTotals {
    counts: [u64; 7],
    us: Stages,
}

impl StageTotals {
    /// Counts what an attempt took.
    pub fn count(&mut self, stages: &Stages) {
        for stage in Stage::ALL {
            let us = stages.us(stage);
            if us > 0 {
                self.counts[stage as usize] += 1;
                self.us.add(stage, us);
            }
        }
    }

    /// Counts one stage.
    pub fn count_one(&mut self, stage: Stage, us: u64) {
        self.counts[stage as usize] += 1;
        self.us.0[stage as usize] += us;
    }

    /// How often a stage was passed, and its microseconds in all.
    #[must_use]
    pub fn of(&self, stage: Stage) -> (u64, u64) {
        (self.counts[stage as usize], self.us.us(stage))
    }
}

/// An attempt of which a span is kept.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kept {
    name: AttemptName,
    class: Option<FailureClass>,
    code: Option<i32>,
    message: Option<String>,
    isolation: Isolation,
    stages: Stages,
    ended_ms: u64,
}

impl Kept {
    /// Keeps an attempt, if it is one to be kept. `ended_ms` is by the worker's clock.
    #[must_use]
    pub fn new(end: &AttemptEnd, stages: Stages, ended_ms: u64) -> Option<Self> {
        let class = match end.ending {
            Ending::Failed(class) => Some(class),
            Ending::Succeeded if is_kept(end.name.job, end.name.index, end.name.number) => None,
            Ending::Succeeded | Ending::Returned => return None,
        };
        let (code, message) = (end.code, class.and(end.message.clone()));
        Some(Self { name: end.name, class, code, message, isolation: end.isolation, stages, ended_ms })
    }

    /// Its job.
    #[must_use]
    pub fn job(&self) -> JobId {
        self.name.job
    }

    /// Its span and those of its stages, below `job`. Its end came into the log `ago_us` microseconds before `now_us`, and
    /// that was at `reported_ms` by the worker's clock.
    #[must_use]
    pub fn spans(self, job: &TraceContext, worker: &WorkerId, reported_ms: u64, now_us: u64) -> Vec<Span> {
        let context = job.of_attempt(&self.name);
        let report_us = reported_ms.saturating_sub(self.ended_ms) * 1_000;
        let ended_us = now_us.saturating_sub(report_us);
        let took: u64 = Stage::ALL.iter().map(|stage| self.stages.us(*stage)).sum();
        let mut at = ended_us.saturating_sub(took);
        let mut spans = Vec::with_capacity(Stage::ALL.len() + 1);
        spans.push(self.attempt(context, job.span(), worker, (at, now_us)));
        for (number, stage) in (0..).zip(Stage::ALL) {
            let us = if stage == Stage::Report { report_us } else { self.stages.us(stage) };
            if us > 0 || stage == Stage::Report {
                spans.push(Span {
                    context: context.derived(&[number]),
                    parent: Some(context.span()),
                    remote: false,
                    kind: SpanKind::Internal,
                    name: stage.as_str(),
                    start_us: at,
                    end_us: at + us,
                    attributes: Vec::new(),
                    error: None,
                });
                at += us;
            }
        }
        spans
    }

    fn attempt(&self, context: TraceContext, parent: [u8; 8], worker: &WorkerId, (start_us, end_us): (u64, u64)) -> Span {
        let mut attributes: Vec<(&'static str, Value)> = vec![
            ("volley.job", self.name.job.to_string().into()),
            ("volley.task", self.name.index.into()),
            ("volley.attempt", self.name.number.into()),
            ("volley.worker", worker.as_str().into()),
            ("volley.isolation", self.isolation.as_str().into()),
            ("volley.outcome", self.class.map_or("succeeded", FailureClass::as_str).into()),
        ];
        attributes.extend(self.code.map(|code| ("volley.code", code.into())));
        let error = self.class.map(|class| self.message.clone().unwrap_or_else(|| class.as_str().to_owned()));
        Span { context, parent: Some(parent), remote: true, kind: SpanKind::Internal, name: "attempt", start_us, end_us, attributes, error }
    }
}

/// The traces of jobs, as messages about them said.
#[derive(Debug, Default)]
pub struct Traces(BTreeMap<JobId, TraceContext>);

impl Traces {
    /// Takes note of a job's trace. The oldest job's is forgotten when there are too many.
    pub fn note(&mut self, job: JobId, context: TraceContext) {
        self.0.insert(job, context);
        while self.0.len() > JOBS_KEPT {
            self.0.pop_first();
        }
    }

    /// A job's trace.
    #[must_use]
    pub fn of(&self, job: JobId) -> Option<TraceContext> {
        self.0.get(&job).copied()
    }
}

/// A worker's figures.
#[must_use]
pub fn figures(status: &Status, slots: u32) -> Vec<Figure> {
    let figure = |kind, name: &str, help: &str, labels: &[(&str, &str)], value: f64| Figure {
        name: format!("volley_worker_{name}"),
        help: help.to_owned(),
        kind,
        labels: labels.iter().map(|(name, value)| ((*name).to_owned(), (*value).to_owned())).collect(),
        value,
    };
    let (counter, gauge) = (FigureKind::Counter, FigureKind::Gauge);
    let mut figures = vec![
        figure(gauge, "slots", "Slots of this worker", &[], slots.into()),
        figure(gauge, "slots_busy", "Slots in which an attempt runs", &[], status.running.into()),
        figure(gauge, "bundles_held", "Bundles held, from receipt until their reports are in the log", &[], status.bundles as f64),
        figure(gauge, "unsent_bytes", "Bytes of ends that are not in the log yet", &[], status.unsent_bytes as f64),
        figure(counter, "reports", "Reports that are in the log", &[], status.totals.reports as f64),
        figure(counter, "report_repeats", "Publishes of reports that had to be repeated", &[], status.totals.reports_repeated as f64),
        figure(counter, "attempts_returned", "Attempts handed back before they began", &[], status.totals.returned as f64),
    ];
    let classes = FailureClass::ALL.iter().map(|class| (class.as_str(), status.totals.of_class(*class)));
    for (outcome, count) in std::iter::once(("succeeded", status.totals.succeeded)).chain(classes).filter(|(_, count)| *count > 0) {
        figures.push(figure(counter, "attempts", "Attempts that ended, by outcome", &[("outcome", outcome)], count as f64));
    }
    for stage in Stage::ALL {
        let (labels, (count, us)) = ([("stage", stage.as_str())], status.totals.stages.of(stage));
        figures.push(figure(counter, "stage_passes", "How often a stage was passed; report: by how many reports", &labels, count as f64));
        figures.push(figure(counter, "stage_seconds", "Time spent in a stage, in seconds", &labels, us as f64 / 1e6));
    }
    figures
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::attempt::{Attempt, Outcome};

    fn end(index: u32, outcome: Outcome) -> AttemptEnd {
        let name = AttemptName { job: JobId(5), stage: 0, index, number: 1, sequence: 9 };
        Attempt::begin(name, Isolation::Process, 3, 0, (1_000, 1_000)).end(10, outcome)
    }

    fn job() -> TraceContext {
        "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01".parse().unwrap_or_else(|e| panic!("{e}"))
    }

    #[test]
    fn every_failure_is_kept_and_few_successes() {
        let failed = |index| end(index, Outcome::failed(FailureClass::ExitCode, "exit code 1".to_owned()));
        assert!((0..1_000).all(|index| Kept::new(&failed(index), Stages::default(), 0).is_some()));
        let kept = (0..10_000).filter(|index| Kept::new(&end(*index, Outcome::success()), Stages::default(), 0).is_some()).count();
        assert!((60..140).contains(&kept), "{kept}");
        let returned = AttemptEnd { ending: Ending::Returned, ..end(0, Outcome::success()) };
        assert_eq!(Kept::new(&returned, Stages::default(), 0), None);
    }

    #[test]
    fn the_stages_of_an_attempt_lie_end_to_end_below_it() {
        let mut stages = Stages::default();
        for (stage, us) in [(Stage::Claim, 3_000), (Stage::Prepare, 400), (Stage::Execute, 5_000), (Stage::Reclaim, 0)] {
            stages.add(stage, us);
        }
        let end = end(7, Outcome::failed(FailureClass::ExitCode, "exit code 1".to_owned()));
        let worker = WorkerId::new("w1").unwrap_or_else(|e| panic!("{e}"));
        let kept = Kept::new(&end, stages, 100).unwrap_or_else(|| panic!("a failure is kept"));
        let spans = kept.spans(&job(), &worker, 120, 1_000_000);
        let names: Vec<_> = spans.iter().map(|span| span.name).collect();
        assert_eq!(names, ["attempt", "claim", "prepare", "execute", "reclaim", "report"]);
        let attempt = &spans[0];
        assert_eq!((attempt.parent, attempt.remote, attempt.start_us, attempt.end_us), (Some(job().span()), true, 971_599, 1_000_000));
        assert_eq!(attempt.error.as_deref(), Some("exit code 1"));
        assert!(
            attempt.attributes.contains(&("volley.task", 7u32.into()))
                && attempt.attributes.contains(&("volley.outcome", "exit_code".into()))
        );
        assert!(spans[1..].iter().all(|span| span.parent == Some(attempt.context.span())));
        assert!(spans[1..].windows(2).all(|pair| pair[0].end_us == pair[1].start_us));
        assert_eq!((spans[1].start_us, spans[5].end_us), (attempt.start_us, attempt.end_us));
    }

    #[test]
    fn figures_name_every_stage() {
        let mut status = Status::default();
        status.totals.stages.count_one(Stage::Report, 2_500_000);
        let figures = figures(&status, 4);
        for stage in Stage::ALL {
            let has = |figure: &&Figure| {
                figure.name == "volley_worker_stage_seconds" && figure.labels == [("stage".to_owned(), stage.as_str().to_owned())]
            };
            assert!(figures.iter().any(|figure| has(&figure)), "{stage:?}");
        }
        assert!(figures.iter().any(|figure| figure.name == "volley_worker_stage_seconds" && (figure.value - 2.5).abs() < 1e-9));
    }

    #[test]
    fn the_oldest_jobs_trace_is_forgotten() {
        let mut traces = Traces::default();
        for id in 0..=JOBS_KEPT as u64 {
            traces.note(JobId(id), job());
        }
        assert_eq!((traces.of(JobId(0)), traces.of(JobId(1))), (None, Some(job())));
    }
}
