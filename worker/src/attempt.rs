//! One attempt as a state machine: which phase it is in, when its deadlines fall, how it is stopped, and what its end says.
//!
//! Owns the order of phases, the start and run deadlines, TERM, grace and KILL, and which cause of an end wins. Pure: time comes as
//! milliseconds of the worker's monotonic clock. Does not own slots (`slots`), nor anything that really runs (`runtime`).

use minicbor::bytes::ByteVec;
use volley_jobspecs::failure::FailureClass;
use volley_jobspecs::ids::AttemptName;
use volley_jobspecs::spec::DurationMs;
use volley_jobspecs::wire::plan::Isolation;
use volley_jobspecs::wire::report::{AttemptEnd, Cause, Ending, MESSAGE_BYTES_MAX, Outputs, Stream, Timing, Usage};
use volley_jobspecs::wire::volume::{Kept, Left};
use volley_jobspecs::wire::work::{At, AtStage, TemplateStage};

use crate::trace::Stages;

/// Time between TERM and KILL for an attempt whose command has not begun, and so has no grace of its own, in milliseconds: there
/// is nothing to be polite to but our own downloads.
const GRACE_MS_BEFORE_RUN: u64 = 1_000;

/// Why an attempt is being stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopCause {
    /// The leader ordered it.
    Cancelled,
    /// It ran past its run deadline.
    RunTimeout,
    /// Inputs and machine were not ready by its start deadline.
    StartTimeout,
    /// The worker itself is told to stop at once.
    WorkerStopped,
    /// Nobody wants to hear of it any more.
    Forgotten,
}

/// How hard an attempt is stopped. Rises only.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Force {
    /// TERM to everything that runs; preparing and persisting are given up.
    Term,
    /// KILL to everything that runs.
    Kill,
    /// The same, and nothing of it is kept.
    Abandon,
}

/// What an executor says of the attempt it runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Progress {
    /// The command is about to run. `grace_ms` is what its spec gives it between TERM and KILL.
    Started {
        /// Milliseconds between TERM and KILL.
        grace_ms: u64,
    },
    /// The command and all its processes are gone; outputs are being kept.
    Exited,
    /// Its machine's template needs this first; or nothing more.
    Template(Option<TemplateStage>),
    /// Its volumes are being opened, or what was written on them is being committed; or not any more.
    Volumes(bool),
}

/// How the work of an attempt came out, before deadlines and cancels have their say.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Outcome {
    /// `None`: success.
    pub failure: Option<FailureClass>,
    /// Exit code, or number of the signal.
    pub code: Option<i32>,
    /// For people.
    pub message: Option<String>,
    /// What it used.
    pub usage: Option<Usage>,
    /// A small `result.json`.
    pub result: Option<Vec<u8>>,
    /// Stdout.
    pub stdout: Option<Stream>,
    /// Stderr.
    pub stderr: Option<Stream>,
    /// Output files.
    pub outputs: Option<Outputs>,
    /// Does it say nothing of this worker, whatever its class says of others?
    pub blameless: bool,
    /// What kept it from beginning, where more is known than its class says.
    pub cause: Option<Cause>,
    /// What it left in volumes that it wrote: of a success in all of them, otherwise in none.
    pub volumes: Vec<Left>,
    /// Clones that it keeps.
    pub kept: Vec<Kept>,
    /// How long each stage took.
    pub stages: Stages,
}

impl Outcome {
    /// A success that left nothing.
    #[must_use]
    pub fn success() -> Self {
        Self {
            failure: None,
            code: Some(0),
            message: None,
            usage: None,
            result: None,
            stdout: None,
            stderr: None,
            outputs: None,
            blameless: false,
            cause: None,
            volumes: Vec::new(),
            kept: Vec::new(),
            stages: Stages::default(),
        }
    }

    /// A failure without a command that ran.
    #[must_use]
    pub fn failed(class: FailureClass, message: String) -> Self {
        Self { failure: Some(class), code: None, message: Some(message), ..Self::success() }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    Preparing,
    Running { since_ms: u64, grace_ms: u64 },
    Persisting { since_ms: u64, ran_ms: u64 },
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Stopping {
    cause: StopCause,
    kill_at_ms: u64,
    killed: bool,
    /// The command had already ended well when the stop came: if everything was kept all the same, that is a success.
    after_exit: bool,
}

/// One attempt in a slot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Attempt {
    /// Its name.
    pub name: AttemptName,
    isolation: Isolation,
    wait_ms: u64,
    began_ms: u64,
    start_ms: u64,
    run_ms: u64,
    phase: Phase,
    template: Option<TemplateStage>,
    /// Does it wait for its volumes?
    volumes: bool,
    stopping: Option<Stopping>,
}

impl Attempt {
    /// Begins an attempt that waited `wait_ms` for its slot; `start_ms` and `run_ms` are its deadlines' lengths.
    #[must_use]
    pub fn begin(name: AttemptName, isolation: Isolation, wait_ms: u64, now_ms: u64, (start_ms, run_ms): (u64, u64)) -> Self {
        let phase = Phase::Preparing;
        Self { name, isolation, wait_ms, began_ms: now_ms, start_ms, run_ms, phase, template: None, volumes: false, stopping: None }
    }

    /// Takes note of what the executor says. What comes out of order is ignored: phases only go forward.
    pub fn progress(&mut self, now_ms: u64, progress: Progress) {
        (self.template, self.volumes) = match progress {
            Progress::Template(stage) => (stage, self.volumes),
            Progress::Volumes(wait) => (self.template, wait),
            Progress::Started { .. } | Progress::Exited => (None, false),
        };
        self.phase = match (self.phase, progress) {
            (Phase::Preparing, Progress::Started { grace_ms }) => Phase::Running { since_ms: now_ms, grace_ms },
            (Phase::Running { since_ms, .. }, Progress::Exited) => {
                Phase::Persisting { since_ms: now_ms, ran_ms: now_ms.saturating_sub(since_ms) }
            }
            (phase, Progress::Template(_) | Progress::Volumes(_))
            | (phase @ Phase::Preparing, Progress::Exited)
            | (phase @ Phase::Running { .. }, Progress::Started { .. })
            | (phase @ Phase::Persisting { .. }, _) => phase,
        };
    }

    /// How far it is, and for how long.
    #[must_use]
    pub fn at(&self, now_ms: u64) -> At {
        let (stage, since_ms) = match self.phase {
            Phase::Preparing => (AtStage::Preparing, self.began_ms),
            Phase::Running { since_ms, .. } => (AtStage::Running, since_ms),
            Phase::Persisting { since_ms, .. } => (AtStage::Keeping, since_ms),
        };
        At { name: self.name, stage, for_ms: now_ms.saturating_sub(since_ms), template: self.template, volumes: self.volumes }
    }

    /// Stops the attempt. Returns what to do now; `None` when it is being stopped already and no harder.
    pub fn stop(&mut self, now_ms: u64, cause: StopCause) -> Option<Force> {
        let at_once = matches!(cause, StopCause::WorkerStopped | StopCause::Forgotten);
        match &mut self.stopping {
            Some(stopping) => {
                // A stop that wants no report overrides; else the first cause stands, for it is what ended the task.
                if at_once {
                    stopping.cause = cause;
                }
                stopping.killed |= at_once;
                at_once.then_some(Force::Abandon)
            }
            none => {
                let grace_ms = match self.phase {
                    Phase::Running { grace_ms, .. } => grace_ms,
                    Phase::Preparing | Phase::Persisting { .. } => GRACE_MS_BEFORE_RUN,
                };
                *none = Some(Stopping {
                    cause,
                    kill_at_ms: now_ms.saturating_add(grace_ms),
                    killed: at_once,
                    after_exit: matches!(self.phase, Phase::Persisting { .. }),
                });
                Some(if at_once { Force::Abandon } else { Force::Term })
            }
        }
    }

    /// Lets time pass. Returns what a deadline that fell wants done.
    pub fn tick(&mut self, now_ms: u64) -> Option<Force> {
        if self.deadline_ms().is_none_or(|deadline| now_ms < deadline) {
            return None;
        }
        match &mut self.stopping {
            Some(stopping) => {
                stopping.killed = true;
                Some(Force::Kill)
            }
            None => match self.phase {
                Phase::Preparing => self.stop(now_ms, StopCause::StartTimeout),
                Phase::Running { .. } => self.stop(now_ms, StopCause::RunTimeout),
                Phase::Persisting { .. } => None,
            },
        }
    }

    /// When [`Attempt::tick`] next has something to do.
    #[must_use]
    pub fn deadline_ms(&self) -> Option<u64> {
        match (&self.stopping, self.phase) {
            (Some(stopping), _) if stopping.killed => None,
            // The command is gone already; what it left may be kept in peace.
            (Some(stopping), Phase::Persisting { .. }) if !stopping.after_exit => None,
            (Some(stopping), _) => Some(stopping.kill_at_ms),
            (None, Phase::Preparing) => Some(self.began_ms.saturating_add(self.start_ms)),
            (None, Phase::Running { since_ms, .. }) => Some(since_ms.saturating_add(self.run_ms)),
            // Storage has a budget of its own, and it is the store's.
            (None, Phase::Persisting { .. }) => None,
        }
    }

    /// Is it being stopped because its time to run is over?
    #[must_use]
    pub fn has_run_out(&self) -> bool {
        self.stopping.is_some_and(|stopping| stopping.cause == StopCause::RunTimeout)
    }

    /// Has the end nobody to hear of it?
    #[must_use]
    pub fn is_forgotten(&self) -> bool {
        self.stopping.is_some_and(|stopping| stopping.cause == StopCause::Forgotten)
    }

    /// Ends the attempt.
    #[must_use]
    pub fn end(self, now_ms: u64, outcome: Outcome) -> AttemptEnd {
        let timing = self.timing(now_ms);
        // A worker that is stopped is nobody's failure: what had not begun is no try.
        let unbegun = self.phase == Phase::Preparing && self.stopping.is_some_and(|stopping| stopping.cause == StopCause::WorkerStopped);
        if unbegun {
            return AttemptEnd { timing, ..AttemptEnd::bare(self.name, Ending::Returned, self.isolation) };
        }
        let stands = self.stopping.is_none_or(|stopping| stopping.after_exit && outcome.failure.is_none());
        let (ending, code, message) = match self.stopping {
            Some(stopping) if !stands => {
                let (class, why) = self.stop_verdict(stopping.cause);
                let message = match outcome.message {
                    Some(detail) => format!("{why}; {detail}"),
                    None => why,
                };
                (Ending::Failed(class), outcome.code, Some(message))
            }
            _ => {
                let ending = outcome.failure.map_or(Ending::Succeeded, Ending::Failed);
                (ending, outcome.code, outcome.message)
            }
        };
        AttemptEnd {
            name: self.name,
            ending,
            code,
            message: message.map(shorten),
            isolation: self.isolation,
            timing,
            usage: outcome.usage,
            result: outcome.result.map(ByteVec::from),
            stdout: outcome.stdout,
            stderr: outcome.stderr,
            outputs: outcome.outputs,
            blameless: outcome.blameless.then_some(true),
            cause: outcome.cause,
            volumes: if ending == Ending::Succeeded { outcome.volumes } else { Vec::new() },
            kept: outcome.kept,
        }
    }

    fn stop_verdict(&self, cause: StopCause) -> (FailureClass, String) {
        match cause {
            StopCause::Cancelled => (FailureClass::Cancelled, "stopped by the coordinator".to_owned()),
            StopCause::RunTimeout => {
                (FailureClass::RunTimeout, format!("ran longer than timeouts.run ({}) and was stopped", DurationMs(self.run_ms)))
            }
            StopCause::StartTimeout => (
                FailureClass::StartTimeout,
                format!("inputs and machine were not ready within timeouts.start ({})", DurationMs(self.start_ms)),
            ),
            StopCause::WorkerStopped | StopCause::Forgotten => {
                (FailureClass::HostLost, "the worker was stopped while the task ran".to_owned())
            }
        }
    }

    fn timing(&self, now_ms: u64) -> Timing {
        let (prepared, ran, persisted) = match self.phase {
            Phase::Preparing => (now_ms.saturating_sub(self.began_ms), 0, 0),
            Phase::Running { since_ms, .. } => (since_ms.saturating_sub(self.began_ms), now_ms.saturating_sub(since_ms), 0),
            Phase::Persisting { since_ms, ran_ms } => {
                (since_ms.saturating_sub(ran_ms).saturating_sub(self.began_ms), ran_ms, now_ms.saturating_sub(since_ms))
            }
        };
        Timing { wait_ms: clamp(self.wait_ms), prepare_ms: clamp(prepared), run_ms: clamp(ran), persist_ms: clamp(persisted) }
    }
}

fn clamp(ms: u64) -> u32 {
    u32::try_from(ms).unwrap_or(u32::MAX)
}

/// Cuts a message to what a report may carry, at a character.
fn shorten(mut message: String) -> String {
    if message.len() > MESSAGE_BYTES_MAX {
        let mut cut = MESSAGE_BYTES_MAX - '…'.len_utf8();
        while !message.is_char_boundary(cut) {
            cut -= 1;
        }
        message.truncate(cut);
        message.push('…');
    }
    message
}

#[cfg(test)]
mod tests {
    use super::*;
    use volley_jobspecs::ids::JobId;

    fn attempt() -> Attempt {
        let name = AttemptName { job: JobId(1), stage: 0, index: 0, number: 1, sequence: 9 };
        Attempt::begin(name, Isolation::Process, 5, 100, (1_000, 2_000))
    }

    #[test]
    fn what_its_template_needs_is_said_while_it_is_prepared() {
        let mut a = attempt();
        a.progress(110, Progress::Template(Some(TemplateStage::Building)));
        assert_eq!((a.at(120).stage, a.at(120).template), (AtStage::Preparing, Some(TemplateStage::Building)));
        a.progress(130, Progress::Template(None));
        assert_eq!((a.at(140).stage, a.at(140).template, a.at(140).for_ms), (AtStage::Preparing, None, 40));
        a.progress(150, Progress::Template(Some(TemplateStage::Fetching)));
        a.progress(160, Progress::Started { grace_ms: 10 });
        assert_eq!((a.at(170).stage, a.at(170).template), (AtStage::Running, None));
    }

    #[test]
    fn what_was_written_is_told_of_a_success_only() {
        let left = Left { slot: 0, volume: volley_jobspecs::ids::VolumeId([1; 16]), generation: 2, root: [3; 32], size_bytes: 4 };
        let outcome = |failure| Outcome { failure, volumes: vec![left], ..Outcome::success() };
        let mut a = attempt();
        a.progress(110, Progress::Volumes(true));
        assert!(a.at(120).volumes);
        a.progress(150, Progress::Started { grace_ms: 10 });
        assert!(!a.at(150).volumes);
        a.progress(300, Progress::Exited);
        a.progress(301, Progress::Volumes(true));
        assert_eq!((a.at(320).stage, a.at(320).volumes), (AtStage::Keeping, true));
        assert_eq!(a.clone().end(400, outcome(None)).volumes, [left]);
        assert_eq!(a.clone().end(400, outcome(Some(FailureClass::ExitCode))).volumes, []);
        a.stop(310, StopCause::Forgotten);
        assert_eq!(a.end(400, outcome(Some(FailureClass::Cancelled))).volumes, []);
    }

    #[test]
    fn the_happy_road_says_how_long_each_part_took() {
        let mut a = attempt();
        a.progress(150, Progress::Started { grace_ms: 10 });
        a.progress(450, Progress::Exited);
        let end = a.end(500, Outcome::success());
        assert_eq!(end.ending, Ending::Succeeded);
        assert_eq!(end.timing, Timing { wait_ms: 5, prepare_ms: 50, run_ms: 300, persist_ms: 50 });
    }

    #[test]
    fn a_run_past_its_deadline_gets_term_then_kill_and_is_a_run_timeout() {
        let mut a = attempt();
        a.progress(200, Progress::Started { grace_ms: 300 });
        assert_eq!(a.deadline_ms(), Some(2_200));
        assert_eq!(a.tick(2_199), None);
        assert_eq!(a.tick(2_200), Some(Force::Term));
        assert_eq!(a.tick(2_499), None);
        assert_eq!(a.tick(2_500), Some(Force::Kill));
        assert_eq!(a.deadline_ms(), None);
        // Even one that ends with 0 on TERM ran too long.
        assert_eq!(a.end(2_600, Outcome::success()).ending, Ending::Failed(FailureClass::RunTimeout));
    }

    #[test]
    fn preparing_too_long_is_a_start_timeout() {
        let mut a = attempt();
        assert_eq!(a.tick(1_100), Some(Force::Term));
        let end = a.end(1_200, Outcome::failed(FailureClass::StorageFailed, "aborted".into()));
        assert_eq!(end.ending, Ending::Failed(FailureClass::StartTimeout));
    }

    #[test]
    fn what_had_not_begun_when_the_worker_was_stopped_is_handed_back() {
        let (mut a, mut b) = (attempt(), attempt());
        b.progress(150, Progress::Started { grace_ms: 10 });
        for attempt in [&mut a, &mut b] {
            assert_eq!(attempt.stop(200, StopCause::WorkerStopped), Some(Force::Abandon));
        }
        let stopped = || Outcome::failed(FailureClass::Cancelled, "stopped".into());
        let (a, b) = (a.end(210, stopped()), b.end(210, stopped()));
        assert_eq!((a.ending, b.ending), (Ending::Returned, Ending::Failed(FailureClass::HostLost)));
        assert_eq!((a.message, a.timing.prepare_ms), (None, 110));
    }

    #[test]
    fn the_first_cause_stands_but_a_kill_overrides() {
        let mut a = attempt();
        a.progress(200, Progress::Started { grace_ms: 300 });
        assert_eq!(a.stop(300, StopCause::Cancelled), Some(Force::Term));
        assert_eq!(a.stop(310, StopCause::RunTimeout), None);
        assert_eq!(a.stop(320, StopCause::Forgotten), Some(Force::Abandon));
        assert!(a.is_forgotten());
    }

    #[test]
    fn a_success_that_was_kept_before_the_cancel_stands() {
        let mut a = attempt();
        a.progress(200, Progress::Started { grace_ms: 300 });
        a.progress(300, Progress::Exited);
        assert_eq!(a.stop(310, StopCause::Cancelled), Some(Force::Term));
        assert_eq!(a.clone().end(320, Outcome::success()).ending, Ending::Succeeded);
        let failed = Outcome::failed(FailureClass::StorageFailed, "given up".into());
        assert_eq!(a.end(320, failed).ending, Ending::Failed(FailureClass::Cancelled));
    }

    #[test]
    fn messages_are_cut_at_a_character() {
        let cut = shorten("é".repeat(2_000));
        assert!(cut.len() <= MESSAGE_BYTES_MAX && cut.ends_with('…'));
    }
}
