//! Jobs: the header, the counts and the pages of tasks that still matter.
//!
//! Owns how a task's phase moves the counts, so that they can't drift apart. Does not own when a phase may change: the stages
//! (`assign`, `track`, `retry`, `finish`) decide that.

use std::collections::{BTreeMap, BTreeSet};

use minicbor::{Decode, Encode};
use volley_jobspecs::api::{JobState, TaskCounts};
use volley_jobspecs::failure::FailureClass;
use volley_jobspecs::ids::{BundleId, JobId, TenantId, WorkerId};
use volley_jobspecs::wire::plan::{JobPlan, SpecRef};
use volley_jobspecs::wire::record::Trailing;
use volley_jobspecs::wire::report::Cause;
use volley_jobspecs::wire::volume::Pin;

use super::task::{Cell, PAGE_TASKS, Page, Phase};

/// What never changes of a job; stored once.
#[derive(Debug, Clone, PartialEq, Encode, Decode)]
#[cbor(map)]
pub struct Facts {
    /// Whose.
    #[n(0)]
    pub tenant: TenantId,
    /// Who submitted it.
    #[n(1)]
    pub principal: String,
    /// Under which idempotency key.
    #[n(2)]
    pub key: String,
    /// What the state machine needs.
    #[n(3)]
    pub plan: JobPlan,
    /// The spec.
    #[n(4)]
    pub spec: SpecRef,
    /// Trace context.
    #[n(5)]
    pub trace: Option<String>,
    /// When it was submitted, in milliseconds since 1970.
    #[n(6)]
    pub submitted_ms: u64,
}

/// Why a job is being ended before its tasks are done.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode)]
#[cbor(index_only)]
pub enum EndCause {
    /// Somebody cancelled it.
    #[n(0)]
    Cancelled,
    /// Too many tasks failed.
    #[n(1)]
    FailFast,
    /// It took too long in all.
    #[n(2)]
    Deadline,
    /// No worker took any of its tasks in time.
    #[n(3)]
    Queue,
}

/// What changes of a job, without its tasks; stored whenever it changes.
#[derive(Debug, Clone, PartialEq, Eq, Default, Encode, Decode)]
#[cbor(map)]
pub struct Progress {
    /// From 1.
    #[n(0)]
    pub round: u32,
    /// Nothing more is started.
    #[n(1)]
    pub paused: bool,
    /// It is being ended, and why.
    #[n(2)]
    pub ending: Option<EndCause>,
    /// Why, for people.
    #[n(3)]
    pub reason: Option<String>,
    /// First start.
    #[n(4)]
    pub started_ms: Option<u64>,
    /// End of the present round.
    #[n(5)]
    pub ended_ms: Option<u64>,
    /// Tasks from here on were never given out.
    #[n(6)]
    pub next_fresh: u32,
    /// What became of the tasks that were never given out, when the job was ended before they were.
    #[n(7)]
    pub rest: Option<FailureClass>,
    /// Tasks by what became of them: [backoff, succeeded, failed, infra failed, cancelled].
    #[n(8)]
    pub backoff: u32,
    /// Ended well.
    #[n(9)]
    pub succeeded: u32,
    /// Ended tasks by failure class, in wire order.
    #[n(10)]
    pub by_class: BTreeMap<u8, u32>,
    /// Since when nothing of it runs though tasks wait; the queue deadline counts from here.
    #[n(11)]
    pub idle_since_ms: Option<u64>,
    /// What still trails its end.
    #[n(12)]
    pub trailing: Vec<Trailing>,
    /// Tasks with [`Phase::Open`].
    #[n(13)]
    pub running: u32,
    /// The record that opened the present round; none before the first rerun, and when that was below level 3.
    #[n(14)]
    pub opened: Option<u64>,
    /// What keeps its tasks from beginning, or did last; gone with the next success. Since level 6.
    #[n(15)]
    pub trouble: Option<Trouble>,
    /// What its tasks read and copy; none: nothing. Since level 7.
    #[n(16)]
    pub pins: Option<Vec<Pin>>,
}

/// What kept tasks of a job from beginning: kept once, however many met it.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Trouble {
    /// What kind.
    #[n(0)]
    pub cause: Cause,
    /// What the first attempt said that met it.
    #[n(1)]
    pub text: String,
    /// On which worker that was.
    #[n(2)]
    pub worker: WorkerId,
    /// When it ended, in milliseconds since 1970.
    #[n(3)]
    pub since_ms: u64,
    /// Attempts that met it.
    #[n(4)]
    pub attempts: u32,
}

/// An attempt that holds a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OpenAttempt {
    /// In which bundle.
    pub bundle: BundleId,
    /// Its number.
    pub number: u16,
}

/// A job in memory.
#[derive(Debug, Clone, PartialEq)]
pub struct Job {
    /// Its id.
    pub id: JobId,
    /// What never changes.
    pub facts: Facts,
    /// What changes.
    pub progress: Progress,
    /// Pages with a task that is given out and not settled. A settled page is in RocksDB only.
    pub pages: BTreeMap<u32, Page>,
    /// Tasks that wait, not for the first time. Follows from the pages.
    pub ready: BTreeSet<u32>,
    /// Attempts that hold slots, by task. Follows from bundles and pages.
    pub open: BTreeMap<u32, OpenAttempt>,
    /// Bundles open; for the concurrency limit. Follows from the bundles.
    pub bundles: u32,
}

impl Job {
    /// A new job.
    #[must_use]
    pub fn new(id: JobId, facts: Facts) -> Self {
        let progress = Progress { round: 1, ..Progress::default() };
        Self { id, facts, progress, pages: BTreeMap::new(), ready: BTreeSet::new(), open: BTreeMap::new(), bundles: 0 }
    }

    /// Number of tasks.
    #[must_use]
    pub fn tasks(&self) -> u32 {
        self.facts.plan.tasks
    }

    /// Tasks that were never given out and still may be.
    #[must_use]
    pub fn fresh(&self) -> u32 {
        if self.progress.rest.is_some() { 0 } else { self.tasks() - self.progress.next_fresh }
    }

    /// Tasks that wait for a worker.
    #[must_use]
    pub fn waiting(&self) -> u32 {
        self.fresh() + self.ready.len() as u32
    }

    /// May tasks of it be given out?
    #[must_use]
    pub fn startable(&self) -> bool {
        !self.progress.paused && self.progress.ending.is_none() && self.progress.ended_ms.is_none() && self.is_pinned()
    }

    /// Is everything there that its tasks read and copy?
    #[must_use]
    pub fn is_pinned(&self) -> bool {
        self.progress.pins.iter().flatten().all(|pin| pin.held)
    }

    /// Ended tasks of one class.
    #[must_use]
    pub fn ended_as(&self, class: FailureClass) -> u32 {
        self.progress.by_class.get(&(class as u8)).copied().unwrap_or(0)
    }

    /// Tasks that ended without success, cancelled ones not counted.
    #[must_use]
    pub fn failed(&self) -> u32 {
        FailureClass::ALL.iter().filter(|c| **c != FailureClass::Cancelled).map(|c| self.ended_as(*c)).sum()
    }

    /// Tasks that have ended.
    #[must_use]
    pub fn ended_tasks(&self) -> u32 {
        self.progress.succeeded + self.failed() + self.ended_as(FailureClass::Cancelled)
    }

    /// How many tasks stand where.
    #[must_use]
    pub fn counts(&self) -> TaskCounts {
        self.progress.counts(self.tasks())
    }

    /// The page of a task, made when it is not in memory. The caller has made sure that a settled page was loaded.
    pub fn page_mut(&mut self, index: u32) -> (&mut Page, u16) {
        let number = index / PAGE_TASKS;
        let tasks = (self.tasks() - number * PAGE_TASKS).min(PAGE_TASKS);
        (self.pages.entry(number).or_insert_with(|| Page::fresh(tasks)), (index % PAGE_TASKS) as u16)
    }

    /// A task, when its page is in memory; fresh when no task of its page was ever given out.
    #[must_use]
    pub fn cell(&self, index: u32) -> Option<Cell> {
        if index >= self.tasks() {
            return None;
        }
        match self.pages.get(&(index / PAGE_TASKS)) {
            Some(page) => page.get((index % PAGE_TASKS) as u16).copied(),
            None => (index >= self.progress.next_fresh).then_some(Cell::FRESH),
        }
    }

    /// Changes a task and moves the counts with it.
    pub fn update(&mut self, index: u32, change: impl FnOnce(&mut Cell)) {
        let (page, place) = self.page_mut(index);
        let Some(before) = page.update(place, change) else { return };
        let Some(after) = page.get(place).copied() else { return };
        // A task that is to run again may still have an attempt that is being stopped: it waits for that one's end first.
        if after.phase == Phase::Ready && !after.held {
            self.ready.insert(index);
        } else if before.phase == Phase::Ready {
            self.ready.remove(&index);
        }
        if before.phase != after.phase {
            self.count(&before, false);
            self.count(&after, true);
        }
    }

    fn count(&mut self, cell: &Cell, up: bool) {
        let slot = match cell.phase {
            Phase::Fresh | Phase::Ready => return,
            Phase::Open => &mut self.progress.running,
            Phase::Backoff => &mut self.progress.backoff,
            Phase::Succeeded => &mut self.progress.succeeded,
            Phase::Failed => {
                let class = cell.class().unwrap_or(FailureClass::ExitCode);
                self.progress.by_class.entry(class as u8).or_insert(0)
            }
            Phase::Cancelled => self.progress.by_class.entry(FailureClass::Cancelled as u8).or_insert(0),
        };
        *slot = if up { *slot + 1 } else { slot.saturating_sub(1) };
    }

    /// Rebuilds what follows from the pages after they were loaded.
    pub fn rebuild_ready(&mut self) {
        self.ready.clear();
        for (number, page) in &self.pages {
            let first = number * PAGE_TASKS;
            let ready = page.cells().iter().enumerate().filter(|(_, cell)| cell.phase == Phase::Ready && !cell.held);
            self.ready.extend(ready.map(|(place, _)| first + place as u32));
        }
    }
}

impl Progress {
    /// Did a rerun undo this end of a task? A rerun takes back every end but success, so the order of the two records tells.
    #[must_use]
    pub fn supersedes(&self, sequence: u64, class: Option<FailureClass>) -> bool {
        class.is_some() && self.opened.is_some_and(|opened| sequence < opened)
    }

    /// How many of `total` tasks stand where.
    #[must_use]
    pub fn counts(&self, total: u32) -> TaskCounts {
        let of = |pick: fn(FailureClass) -> bool| -> u32 {
            let classes = FailureClass::ALL.iter().filter(|c| pick(**c));
            classes.map(|c| self.by_class.get(&(*c as u8)).copied().unwrap_or(0)).sum()
        };
        let mut counts = TaskCounts {
            total,
            running: self.running,
            backoff: self.backoff,
            succeeded: self.succeeded,
            failed: of(|c| !c.is_infra() && c != FailureClass::Cancelled),
            infra_failed: of(FailureClass::is_infra),
            cancelled: of(|c| c == FailureClass::Cancelled),
            waiting: 0,
        };
        counts.waiting = total
            .saturating_sub(counts.running + counts.backoff + counts.succeeded)
            .saturating_sub(counts.failed + counts.infra_failed + counts.cancelled);
        counts
    }

    /// Where the job stands.
    #[must_use]
    pub fn state(&self, total: u32) -> JobState {
        if self.ended_ms.is_some() {
            let counts = self.counts(total);
            return match self.ending {
                Some(EndCause::Cancelled) => JobState::Cancelled,
                Some(EndCause::FailFast | EndCause::Deadline | EndCause::Queue) => JobState::Failed,
                None if counts.succeeded == total => JobState::Succeeded,
                None => JobState::Failed,
            };
        }
        match () {
            () if self.ending.is_some() => JobState::Ending,
            () if self.paused => JobState::Paused,
            () if self.started_ms.is_none() => JobState::Queued,
            () => JobState::Running,
        }
    }

    /// What the CLI exits with (DESIGN §6): 4 cancelled, 3 tasks without a verdict, 1 tasks failed, 0 all succeeded.
    #[must_use]
    pub fn exit_code(&self, total: u32) -> Option<u8> {
        let counts = self.counts(total);
        Some(match self.state(total) {
            JobState::Cancelled => 4,
            JobState::Succeeded => 0,
            JobState::Failed if counts.infra_failed > 0 => 3,
            JobState::Failed => 1,
            JobState::Queued | JobState::Running | JobState::Paused | JobState::Ending => return None,
        })
    }
}
