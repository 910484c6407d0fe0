//! The words the core speaks: its inputs and actions.
//!
//! Owns their shapes. Does not own what follows from them.

use volley_jobspecs::failure::FailureClass;
use volley_jobspecs::ids::{AttemptName, Incarnation, JobId, WorkerId};
use volley_jobspecs::wire::plan::{Isolation, Needs};
use volley_jobspecs::wire::report::{AttemptEnd, Ending};
use volley_jobspecs::wire::volume::Given;
use volley_jobspecs::wire::work::{Beat, BeatAnswer, KeptMachine, WorkAnswer, WorkMessage, WorkerInfo};

use crate::attempt::{Force, Outcome, Progress};
use crate::claim::ClaimError;
use crate::report::Publish;
use crate::trace::{Kept, StageTotals, Stages};

/// What stays the same over a worker's lives.
#[derive(Debug, Clone)]
pub struct CoreConfig {
    /// Its name.
    pub worker: WorkerId,
    /// What it has.
    pub info: WorkerInfo,
    /// Milliseconds between beats.
    pub beat_ms: u64,
    /// Linger of reports until a leader has said otherwise, in milliseconds.
    pub linger_ms: u64,
    /// Most bytes of ends that are not in the log; above, nothing new is started.
    pub unsent_bytes_max: usize,
    /// Are spans wanted of attempts?
    pub traced: bool,
}

/// What the core needs to know of a job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct JobFacts {
    /// What one task needs.
    pub needs: Needs,
    /// Start deadline, in milliseconds.
    pub start_ms: u64,
    /// Run deadline, in milliseconds.
    pub run_ms: u64,
}

/// What came of asking for a job.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum JobAnswer {
    /// Here it is.
    Known(JobFacts),
    /// The leader knows no such job.
    Missing,
    /// It can't be run by this build; says why.
    Unusable(String),
    /// Nobody answered.
    NoAnswer,
}

/// What happens to a worker.
#[derive(Debug, Clone, PartialEq)]
pub enum Input {
    /// A work message came.
    Work(WorkMessage),
    /// A beat was answered.
    BeatAnswered {
        /// The life that beat.
        incarnation: Incarnation,
        /// The answer.
        answer: BeatAnswer,
    },
    /// A beat got no answer.
    BeatUnanswered {
        /// The life that beat.
        incarnation: Incarnation,
    },
    /// A job was asked for.
    Job {
        /// Which.
        job: JobId,
        /// What came of it.
        answer: JobAnswer,
    },
    /// An attempt went on.
    Progress {
        /// In which slot.
        slot: u32,
        /// Which attempt.
        name: AttemptName,
        /// To where.
        progress: Progress,
    },
    /// An attempt ended and everything of it is gone from the slot.
    Ended {
        /// In which slot.
        slot: u32,
        /// Which attempt.
        name: AttemptName,
        /// How it came out.
        outcome: Outcome,
    },
    /// A report is in the log.
    ReportAcked {
        /// The life that reported.
        incarnation: Incarnation,
        /// The report's number.
        number: u64,
        /// Its sequence in the log.
        sequence: u64,
    },
    /// A report may or may not be in the log.
    ReportFailed {
        /// The life that reported.
        incarnation: Incarnation,
        /// The report's number.
        number: u64,
    },
    /// It has these images now (`WorkerInfo::images`).
    Images(Option<Vec<u64>>),
    /// It keeps these machines now.
    KeptMachines(Vec<KeptMachine>),
    /// Take nothing more, finish what runs, hand back the rest, leave.
    Drain,
    /// Stop now.
    Stop,
    /// The next life begins; the answer to [`Action::NewLife`].
    Born(Incarnation),
    /// Time passed.
    Tick,
}

/// What a worker does.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    /// Answer the work message of this input.
    Answer(WorkAnswer),
    /// Say this to the leader. The result comes back as an input.
    Beat(Beat),
    /// Ask for a job. The result comes back as an input.
    FetchJob(JobId),
    /// Run an attempt in a slot; nothing else runs there. Its end comes back as an input.
    Run {
        /// In which slot.
        slot: u32,
        /// Which attempt.
        name: AttemptName,
        /// Under which isolation.
        isolation: Isolation,
        /// What it may write.
        volumes: Vec<Given>,
    },
    /// Stop the attempt in a slot.
    Stop {
        /// In which slot.
        slot: u32,
        /// Which attempt.
        name: AttemptName,
        /// How hard.
        force: Force,
        /// Only because its time to run is over?
        timed_out: bool,
    },
    /// Publish a report. The result comes back as an input.
    Publish {
        /// The life that reports.
        incarnation: Incarnation,
        /// What to publish.
        publish: Publish,
    },
    /// Tell of an attempt whose end is in the log since now.
    Tell(Box<Kept>),
    /// An incoming message was dropped; for the log.
    Dropped(ClaimError),
    /// Everything is dead; begin a new life with a fresh incarnation ([`Input::Born`]).
    NewLife,
    /// The worker is done. Comes once, last.
    Exit,
}

/// Counts since the worker began, over all its lives; for metrics.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Totals {
    /// Attempts that succeeded.
    pub succeeded: u64,
    /// Attempts that failed by themselves.
    pub failed: u64,
    /// Attempts that failed through no fault of the task.
    pub infra_failed: u64,
    /// Attempts handed back before they began.
    pub returned: u64,
    /// Reports that are in the log.
    pub reports: u64,
    /// Publishes of reports that had to be repeated.
    pub reports_repeated: u64,
    /// Time spent in each stage, summed over attempts; in *report*, over reports.
    pub stages: StageTotals,
    by_class: [u64; FailureClass::ALL.len()],
}

impl Totals {
    /// Attempts that failed in this class.
    #[must_use]
    pub fn of_class(&self, class: FailureClass) -> u64 {
        self.by_class[class as usize]
    }

    /// Counts an end.
    pub fn count(&mut self, end: &AttemptEnd, stages: &Stages) {
        let counter = match end.ending {
            Ending::Succeeded => &mut self.succeeded,
            Ending::Failed(class) if class.is_infra() => &mut self.infra_failed,
            Ending::Failed(_) => &mut self.failed,
            Ending::Returned => &mut self.returned,
        };
        *counter += 1;
        if let Ending::Failed(class) = end.ending {
            self.by_class[class as usize] += 1;
        }
        self.stages.count(stages);
    }
}
