//! The whole worker as a state machine: inputs in, actions out.
//!
//! Owns what is held, what starts where, what is stopped, what is said in beats and reports, how a life ends and the next begins.
//! Pure: no clock, no I/O, no runtime, so a simulation can drive it as the driver does. Every input may come twice, late or never.
//! Does not own how anything is carried out (`driver` and the stages).

mod intake;
mod words;

use std::collections::BTreeMap;

use volley_jobspecs::ids::{AttemptName, BundleId, Incarnation, JobId, Term};
use volley_jobspecs::wire::report::AttemptEnd;
use volley_jobspecs::wire::work::{Beat, BeatAnswer, KeptMachine, YOUNG_BUNDLE_MS_MAX};

use crate::attempt::{Attempt, Outcome, StopCause};
use crate::bundle::HeldBundle;
use crate::claim::Heard;
use crate::report::{Haste, Origin, Outbox};
use crate::slots::{Capacity, Slots};
use crate::trace::{Kept, Stage, Stages};

pub use words::{Action, CoreConfig, Input, JobAnswer, JobFacts, Totals};

/// Wait before a beat that got no answer is repeated, in milliseconds: shorter than the beat, so that one lost message costs little.
const BEAT_RETRY_MS: u64 = 1_000;
/// How long a worker that is told to stop at once tries to get its last reports into the log, in milliseconds.
const STOP_FLUSH_MS: u64 = 3_000;
/// How long a worker that leaves waits until that is in the log, in milliseconds.
const LEAVE_MS: u64 = 5_000;
/// Wait before a worker whose leaving is not in the log yet says it again, in milliseconds: the log takes less as a rule.
const LEAVE_AGAIN_MS: u64 = 50;

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Going {
    /// Working.
    On,
    /// Taking nothing more.
    Draining,
    /// Killing everything; the last reports are tried until then.
    Stopping { until_ms: u64 },
    /// This life was declared lost: everything is being killed, nothing is said any more.
    Dying { then_exit: bool },
    /// Everything is dead and the driver was asked for a new life.
    Unborn,
    /// Nothing is held any more; it is said until the log has it.
    Leaving { until_ms: u64 },
    /// Over.
    Gone,
}

#[derive(Debug, Clone)]
struct Current {
    bundle: BundleId,
    place: u16,
    attempt: Attempt,
}

impl Current {
    fn stop_action(&self, slot: u32, force: crate::attempt::Force) -> Action {
        Action::Stop { slot, name: self.attempt.name, force, timed_out: self.attempt.has_run_out() }
    }
}

/// What is known of a job. `missing` counts how often the leader said that it knows no such job.
#[derive(Debug, Clone)]
enum Job {
    Asked { missing: u32 },
    AskAgain { at_ms: u64, missing: u32 },
    Known(JobFacts),
}

/// A worker.
#[derive(Debug)]
pub struct Core {
    config: CoreConfig,
    heard: Heard,
    going: Going,
    joined: bool,
    slots: Slots,
    current: Vec<Option<Current>>,
    running: u32,
    bundles: BTreeMap<BundleId, HeldBundle>,
    jobs: BTreeMap<JobId, Job>,
    outbox: Outbox,
    beat_at_ms: u64,
    beat_out: bool,
    totals: Totals,
    /// Attempts that are told of once their end is in the log.
    kept: BTreeMap<(BundleId, u16), Kept>,
    /// Machines of failed attempts; whatever life they failed in.
    machines_kept: Vec<KeptMachine>,
}

impl Core {
    /// A worker at the start of a life. Its first beat is due at once.
    #[must_use]
    pub fn new(config: CoreConfig, incarnation: Incarnation, now_ms: u64) -> Self {
        let total = Capacity {
            cpu_milli: config.info.cpu_milli.into(),
            memory_bytes: config.info.memory_bytes,
            disk_bytes: config.info.disk_bytes,
        };
        Self {
            heard: Heard { incarnation, term: Term(0), taken: 0 },
            going: Going::On,
            joined: false,
            slots: Slots::new(config.info.slots, total),
            current: (0..config.info.slots).map(|_| None).collect(),
            running: 0,
            bundles: BTreeMap::new(),
            jobs: BTreeMap::new(),
            outbox: Outbox::new(config.worker.clone(), incarnation, config.linger_ms),
            beat_at_ms: now_ms,
            beat_out: false,
            totals: Totals::default(),
            kept: BTreeMap::new(),
            machines_kept: Vec::new(),
            config,
        }
    }

    /// Its life.
    #[must_use]
    pub fn incarnation(&self) -> Incarnation {
        self.heard.incarnation
    }

    /// Has a leader recorded this life as joined?
    #[must_use]
    pub fn is_joined(&self) -> bool {
        self.joined
    }

    /// How many attempts run.
    #[must_use]
    pub fn running(&self) -> u32 {
        self.running
    }

    /// How many bundles are held.
    #[must_use]
    pub fn held(&self) -> usize {
        self.bundles.len()
    }

    /// How many bundles wait for a slot.
    #[must_use]
    pub fn waiting(&self) -> usize {
        self.slots.waiting()
    }

    /// Counts, for metrics.
    #[must_use]
    pub fn totals(&self) -> Totals {
        self.totals
    }

    /// Bytes of ends that are not in the log yet.
    #[must_use]
    pub fn unsent_bytes(&self) -> usize {
        self.outbox.unsent_bytes()
    }

    /// Takes an input and says what to do, in order.
    pub fn handle(&mut self, now_ms: u64, input: Input, out: &mut Vec<Action>) {
        match input {
            Input::Work(message) => self.on_work(now_ms, message, out),
            Input::BeatAnswered { incarnation, answer } => self.on_beat_answer(now_ms, incarnation, answer, out),
            Input::BeatUnanswered { incarnation } => {
                if incarnation == self.heard.incarnation {
                    self.beat_out = false;
                    self.beat_at_ms = now_ms + BEAT_RETRY_MS.min(self.config.beat_ms);
                }
            }
            Input::Job { job, answer } => self.on_job(now_ms, job, answer),
            Input::Progress { slot, name, progress } => {
                if let Some(current) = self.current_of(slot, name) {
                    current.attempt.progress(now_ms, progress);
                }
            }
            Input::Ended { slot, name, outcome } => self.on_ended(now_ms, slot, name, outcome),
            Input::ReportAcked { incarnation, number, sequence } => {
                self.on_report_acked(now_ms, incarnation, number, sequence, out);
            }
            Input::ReportFailed { incarnation, number } => {
                if incarnation == self.heard.incarnation {
                    // An answer to an earlier repeat says nothing new.
                    if self.outbox.failed(now_ms, number).is_ok() {
                        self.totals.reports_repeated += 1;
                    }
                }
            }
            Input::Images(images) => {
                if self.config.info.images != images {
                    self.config.info.images = images;
                    self.beat_at_ms = now_ms;
                }
            }
            Input::KeptMachines(machines) => {
                self.machines_kept = machines;
                self.beat_at_ms = now_ms;
            }
            Input::Drain => self.on_drain(now_ms),
            Input::Stop => self.on_stop(now_ms, out),
            Input::Born(incarnation) => {
                if self.going == Going::Unborn {
                    let (totals, machines_kept) = (self.totals, std::mem::take(&mut self.machines_kept));
                    *self = Self { totals, machines_kept, ..Self::new(self.config.clone(), incarnation, now_ms) };
                }
            }
            Input::Tick => {}
        }
        self.go_on(now_ms, out);
    }

    /// When [`Input::Tick`] next has something to do, in milliseconds of the worker's clock.
    #[must_use]
    pub fn wakeup_ms(&self) -> Option<u64> {
        if matches!(self.going, Going::Unborn | Going::Gone) {
            return None;
        }
        let attempts = self.current.iter().flatten().filter_map(|current| current.attempt.deadline_ms()).min();
        let jobs = self.jobs.values().filter_map(|job| match job {
            Job::AskAgain { at_ms, .. } => Some(*at_ms),
            Job::Asked { .. } | Job::Known(_) => None,
        });
        let silent = matches!(self.going, Going::Dying { .. });
        let beat = (!self.beat_out && !silent).then_some(self.beat_at_ms);
        let report = if silent { None } else { self.outbox.due_ms(self.haste()) };
        let going = match self.going {
            Going::Stopping { until_ms } | Going::Leaving { until_ms } => Some(until_ms),
            Going::On | Going::Draining | Going::Dying { .. } | Going::Unborn | Going::Gone => None,
        };
        attempts.into_iter().chain(jobs).chain(beat).chain(report).chain(going).min()
    }

    fn haste(&self) -> Haste {
        match self.going {
            Going::On if self.current.iter().all(Option::is_some) => Haste::Gather,
            Going::On => Haste::Soon,
            _ => Haste::Now,
        }
    }

    fn on_beat_answer(&mut self, now_ms: u64, incarnation: Incarnation, answer: BeatAnswer, out: &mut Vec<Action>) {
        if incarnation != self.heard.incarnation {
            return;
        }
        self.beat_out = false;
        if matches!(self.going, Going::Leaving { .. }) {
            // A life that ended before the log has it would be taken for one that was lost, with whatever it was given last.
            if answer.joined && !answer.lost {
                self.beat_at_ms = now_ms + LEAVE_AGAIN_MS;
                return;
            }
            self.going = Going::Gone;
            out.push(Action::Exit);
            return;
        }
        if !self.heard.hear(answer.term) {
            return;
        }
        self.outbox.set_linger(answer.linger_ms.into());
        self.joined = answer.joined;
        if answer.lost {
            let then_exit = matches!(self.going, Going::Draining | Going::Stopping { .. });
            if matches!(self.going, Going::On | Going::Draining | Going::Stopping { .. }) {
                self.going = Going::Dying { then_exit };
                self.kill_all(now_ms, StopCause::Forgotten, out);
            }
        }
        if self.going == Going::On {
            self.hand_back_stuck(now_ms);
        }
    }

    /// Hands back what waits behind long tasks. Not while reports can't leave: then nothing begins anywhere on this worker, and what was
    /// handed back would not be heard of.
    fn hand_back_stuck(&mut self, now_ms: u64) {
        if self.outbox.unsent_bytes() >= self.config.unsent_bytes_max {
            return;
        }
        let stuck = |bundle: &&HeldBundle| now_ms >= bundle.received_ms + YOUNG_BUNDLE_MS_MAX && bundle.has_waiting();
        let ids: Vec<BundleId> = self.bundles.values().filter(stuck).map(|bundle| bundle.id).collect();
        for id in ids {
            self.hand_back(now_ms, id, None, None);
        }
    }

    fn kill_all(&mut self, now_ms: u64, cause: StopCause, out: &mut Vec<Action>) {
        for (slot, current) in (0u32..).zip(&mut self.current) {
            if let Some(current) = current
                && let Some(force) = current.attempt.stop(now_ms, cause)
            {
                out.push(current.stop_action(slot, force));
            }
        }
    }

    fn current_of(&mut self, slot: u32, name: AttemptName) -> Option<&mut Current> {
        self.current.get_mut(slot as usize)?.as_mut().filter(|current| current.attempt.name == name)
    }

    fn on_ended(&mut self, now_ms: u64, slot: u32, name: AttemptName, outcome: Outcome) {
        if self.current_of(slot, name).is_none() {
            return;
        }
        let Some(current) = self.current.get_mut(slot as usize).and_then(Option::take) else { return };
        self.running -= 1;
        let origin = Origin { bundle: current.bundle, place: current.place };
        let silent = current.attempt.is_forgotten() || matches!(self.going, Going::Dying { .. });
        if let Some(bundle) = self.bundles.get_mut(&current.bundle) {
            bundle.ended(current.place);
            if silent {
                bundle.done(current.place);
            }
        }
        if !silent {
            let mut stages = outcome.stages;
            let end = current.attempt.end(now_ms, outcome);
            stages.add(Stage::Claim, u64::from(end.timing.wait_ms) * 1_000);
            self.take_end(now_ms, end, stages, origin);
        }
        self.drop_if_done(current.bundle);
    }

    /// Counts an end, keeps it to be told of if it is one of those, and has it reported.
    fn take_end(&mut self, now_ms: u64, end: AttemptEnd, stages: Stages, origin: Origin) {
        self.totals.count(&end, &stages);
        if self.config.traced
            && let Some(kept) = Kept::new(&end, stages, now_ms)
        {
            self.kept.insert((origin.bundle, origin.place), kept);
        }
        self.outbox.push(now_ms, end, origin);
    }

    fn on_report_acked(&mut self, now_ms: u64, incarnation: Incarnation, number: u64, sequence: u64, out: &mut Vec<Action>) {
        if incarnation != self.heard.incarnation {
            return;
        }
        let since_ms = self.outbox.in_flight_since_ms(number).unwrap_or(now_ms);
        // An answer to an earlier repeat says nothing new.
        let Ok(origins) = self.outbox.acked(number, sequence) else { return };
        self.totals.reports += 1;
        self.totals.stages.count_one(Stage::Report, now_ms.saturating_sub(since_ms) * 1_000);
        for origin in origins {
            if let Some(kept) = self.kept.remove(&(origin.bundle, origin.place)) {
                out.push(Action::Tell(Box::new(kept)));
            }
            if let Some(bundle) = self.bundles.get_mut(&origin.bundle) {
                bundle.done(origin.place);
            }
            self.drop_if_done(origin.bundle);
        }
    }

    fn drop_if_done(&mut self, id: BundleId) {
        let Some(bundle) = self.bundles.get(&id) else { return };
        if !bundle.is_done() {
            return;
        }
        let job = bundle.job;
        self.bundles.remove(&id);
        if !self.bundles.values().any(|bundle| bundle.job == job) {
            self.jobs.remove(&job);
        }
    }

    fn on_drain(&mut self, now_ms: u64) {
        if self.going != Going::On {
            return;
        }
        self.going = Going::Draining;
        self.beat_at_ms = now_ms;
        let ids: Vec<BundleId> = self.bundles.keys().copied().collect();
        for id in ids {
            self.hand_back(now_ms, id, None, None);
        }
    }

    fn on_stop(&mut self, now_ms: u64, out: &mut Vec<Action>) {
        self.on_drain(now_ms);
        if let Going::Dying { then_exit } = &mut self.going {
            *then_exit = true;
        }
        if self.going == Going::Draining {
            self.going = Going::Stopping { until_ms: now_ms + STOP_FLUSH_MS };
            self.kill_all(now_ms, StopCause::WorkerStopped, out);
        }
    }

    /// Everything the state wants done now.
    fn go_on(&mut self, now_ms: u64, out: &mut Vec<Action>) {
        self.fire_deadlines(now_ms, out);
        if matches!(self.going, Going::On) {
            self.fetch_jobs(now_ms, out);
        }
        self.advance_slots(now_ms, out);
        self.move_towards_the_end(now_ms, out);
        if matches!(self.going, Going::Dying { .. } | Going::Unborn | Going::Gone) {
            return;
        }
        let incarnation = self.heard.incarnation;
        if let Some(publish) = self.outbox.publish(now_ms, self.haste()) {
            out.push(Action::Publish { incarnation, publish });
        }
        if !self.beat_out && now_ms >= self.beat_at_ms {
            self.beat_out = true;
            self.beat_at_ms = now_ms + self.config.beat_ms;
            out.push(Action::Beat(self.beat(now_ms)));
        }
    }

    fn fire_deadlines(&mut self, now_ms: u64, out: &mut Vec<Action>) {
        for (slot, current) in (0u32..).zip(&mut self.current) {
            if let Some(current) = current
                && let Some(force) = current.attempt.tick(now_ms)
            {
                out.push(current.stop_action(slot, force));
            }
        }
    }

    fn fetch_jobs(&mut self, now_ms: u64, out: &mut Vec<Action>) {
        for (id, job) in &mut self.jobs {
            if let Job::AskAgain { at_ms, missing } = *job
                && at_ms <= now_ms
            {
                *job = Job::Asked { missing };
                out.push(Action::FetchJob(*id));
            }
        }
    }

    /// Starts in every slot what may start: the next task of its bundle, or the next bundle.
    fn advance_slots(&mut self, now_ms: u64, out: &mut Vec<Action>) {
        let may_start = self.going == Going::On && self.outbox.unsent_bytes() < self.config.unsent_bytes_max;
        for slot in 0..self.slots.count() {
            let idle = self.current.get(slot as usize).is_some_and(Option::is_none);
            let Some(id) = self.slots.in_slot(slot).filter(|_| idle) else { continue };
            let over = self.bundles.get(&id).is_none_or(|bundle| !bundle.has_waiting());
            if over || self.going != Going::On {
                self.slots.release(slot);
            } else if may_start {
                self.run_next(now_ms, slot, id, out);
            }
        }
        if !may_start {
            return;
        }
        loop {
            let (bundles, jobs) = (&self.bundles, &self.jobs);
            let needs = |id| match jobs.get(&bundles.get(&id)?.job)? {
                Job::Known(facts) => Some(facts.needs.clone()),
                Job::Asked { .. } | Job::AskAgain { .. } => None,
            };
            let Some((slot, id)) = self.slots.start_next(needs) else { break };
            self.run_next(now_ms, slot, id, out);
        }
    }

    fn run_next(&mut self, now_ms: u64, slot: u32, id: BundleId, out: &mut Vec<Action>) {
        let Some(bundle) = self.bundles.get_mut(&id) else { return };
        let Some(Job::Known(facts)) = self.jobs.get(&bundle.job) else { return };
        let Some((place, name)) = bundle.begin_next().and_then(|place| Some((place, bundle.name(place)?))) else {
            return;
        };
        let (wait_ms, volumes) = (now_ms.saturating_sub(bundle.received_ms), bundle.given(name.index));
        let isolation = facts.needs.isolation;
        let attempt = Attempt::begin(name, isolation, wait_ms, now_ms, (facts.start_ms, facts.run_ms));
        if let Some(current) = self.current.get_mut(slot as usize) {
            *current = Some(Current { bundle: id, place, attempt });
            self.running += 1;
            out.push(Action::Run { slot, name, isolation, volumes });
        }
    }

    fn move_towards_the_end(&mut self, now_ms: u64, out: &mut Vec<Action>) {
        let nothing_left = self.running == 0 && self.outbox.is_empty();
        match self.going {
            Going::Draining if nothing_left => self.leave(now_ms),
            Going::Stopping { until_ms } if nothing_left || (self.running == 0 && now_ms >= until_ms) => {
                self.leave(now_ms);
            }
            Going::Dying { then_exit } if self.running == 0 => {
                self.going = if then_exit { Going::Gone } else { Going::Unborn };
                out.push(if then_exit { Action::Exit } else { Action::NewLife });
            }
            Going::Leaving { until_ms } if now_ms >= until_ms => {
                self.going = Going::Gone;
                out.push(Action::Exit);
            }
            Going::On
            | Going::Draining
            | Going::Stopping { .. }
            | Going::Dying { .. }
            | Going::Unborn
            | Going::Leaving { .. }
            | Going::Gone => {}
        }
    }

    fn leave(&mut self, now_ms: u64) {
        self.going = Going::Leaving { until_ms: now_ms + LEAVE_MS };
        self.beat_at_ms = now_ms;
        // The answer to an earlier beat must not be taken for the answer to the last.
        self.beat_out = false;
    }

    fn beat(&self, now_ms: u64) -> Beat {
        Beat {
            worker: self.config.worker.clone(),
            incarnation: self.heard.incarnation,
            info: self.config.info.clone(),
            held: self.bundles.values().map(HeldBundle::held).collect(),
            term: self.heard.term,
            taken: self.heard.taken,
            reported: self.outbox.reported(),
            draining: self.going != Going::On,
            leaving: matches!(self.going, Going::Leaving { .. }) && self.bundles.is_empty(),
            at: self.current.iter().flatten().map(|current| current.attempt.at(now_ms)).collect(),
            kept: self.machines_kept.clone(),
        }
    }
}

#[cfg(test)]
mod tests;
