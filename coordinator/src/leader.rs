//! The leader: decides by records and acts on what the state wants.
//!
//! Owns everything only a leader knows: beats, links to workers, the scheduler, the one publish in flight, trailing work under way.
//! Pure: time is an argument, actions are returned. Does not own the state (it only reads it) or the lease (`driver`).

use std::collections::{BTreeMap, BTreeSet};

use volley_jobspecs::ids::{JobId, Term, WorkerId};
use volley_jobspecs::wire::record::{Decided, Decision, Trailing};
use volley_jobspecs::wire::work::{At, Beat, BeatAnswer, KeptMachine, WorkAnswer, WorkMessage};
use volley_jobspecs::wire::{LEVEL_BEGUN, LEVEL_OFFERS};

use crate::place::{self, Scheduler};
use crate::send::{self, Link};
use crate::state::State;
use crate::state::effects::Effects;
use crate::state::job::Job;
use crate::timers;
use crate::volumes::Work;

pub mod volumes;
use volumes::Works;

/// Silence after which a worker is lost, in milliseconds (DESIGN §5): five beats.
pub const LOST_AFTER_MS: u64 = 15_000;
/// Grace after a takeover or a reconnect, in milliseconds: nobody could be heard before.
pub const GRACE_MS: u64 = 30_000;
/// Reports of all workers together, a second: what one stream with fsync on takes with room to spare (measured: 2,000 to 3,000).
pub const REPORTS_PER_SECOND: u64 = 1_000;
/// Shortest linger of a worker's reports, in milliseconds.
pub const LINGER_MS_MIN: u32 = 5;
/// While attempts are open, time is recorded at least this often, in milliseconds, so that instants in results are true to a quarter of a
/// second: a job of one short task took no time otherwise. Four small records a second are nothing to the log.
pub const TICK_MS: u64 = 250;
/// A round that found no fit is tried again after this long at most, in milliseconds; only rate limits need it.
pub const RATE_ROUND_MS: u64 = 20;
/// Trailing works under way at once: each is one or more S3 requests.
pub const TRAILING_MAX: usize = 8;

/// What was heard of a worker.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct HeardOf {
    /// Milliseconds since then.
    pub silent_ms: u64,
    /// Does it take nothing more by its own will?
    pub draining: bool,
    /// What its slots were at.
    pub at: Vec<At>,
    /// Machines of failed attempts that it kept.
    pub kept: Vec<KeptMachine>,
}

/// What the driver is to do.
#[derive(Debug, Clone, PartialEq)]
pub enum Action {
    /// Publish to the leader's subject, on condition that its last message is `after`.
    Publish {
        /// What.
        decided: Decided,
        /// Sequence of the last message on the subject.
        after: u64,
    },
    /// Send a work message.
    Send(WorkerId, WorkMessage),
    /// Do what trails a job's end, then say so with [`Leader::trailed`].
    Trail(JobId, Trailing),
    /// Do what a volume needs in the bucket, then say so with [`Leader::worked`].
    Work(Work),
    /// Another leads: give up the lease and only follow.
    StepDown,
}

/// What tests shorten and other builds may set otherwise; production uses the default.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tuning {
    /// See [`LOST_AFTER_MS`].
    pub lost_after_ms: u64,
    /// See [`GRACE_MS`].
    pub grace_ms: u64,
    /// See [`place::BUNDLE_MS`].
    pub bundle_ms: u64,
    /// See [`place::BUNDLE_TASKS_MAX`].
    pub bundle_tasks_max: u32,
}

impl Default for Tuning {
    fn default() -> Self {
        Self { lost_after_ms: LOST_AFTER_MS, grace_ms: GRACE_MS, bundle_ms: place::BUNDLE_MS, bundle_tasks_max: place::BUNDLE_TASKS_MAX }
    }
}

/// A coordinator in office.
#[derive(Debug)]
pub struct Leader {
    term: Term,
    round: u64,
    /// Wall clock and monotonic clock at takeover; from then on only the monotonic one moves.
    anchor: (u64, u64),
    /// Since when workers can be heard.
    connected_ms: u64,
    /// The last instant it was told, by the monotonic clock.
    now_ms: u64,
    tuning: Tuning,
    scheduler: Scheduler,
    links: BTreeMap<WorkerId, Link>,
    /// Decisions that ride in the next round.
    pending: Vec<Decision>,
    /// Lives that wait to be recorded as joined.
    joining: BTreeMap<WorkerId, Beat>,
    in_flight: bool,
    /// The last message on our subject that was passed over, of which the state's own fence knows nothing.
    passed: u64,
    last_tick_ms: u64,
    last_digest: Option<(u64, [u8; 16])>,
    place_again: bool,
    next_rate_round_ms: u64,
    doing: BTreeSet<(JobId, Trailing)>,
    /// What volumes need in the bucket.
    works: Works,
    /// Jobs whose manifest is to be written. Follows from the state, as the next; kept so that no event costs a walk over all jobs.
    manifests: BTreeSet<JobId>,
    /// Workers that hold bundles of a job, and how many each.
    holders: BTreeMap<JobId, BTreeMap<WorkerId, u32>>,
}

impl Leader {
    /// Takes office. `wall_ms` since 1970, `now_ms` monotonic. The state has applied everything up to our Lead record.
    #[must_use]
    pub fn new(state: &State, wall_ms: u64, now_ms: u64, tuning: Tuning) -> Self {
        let (manifests, holders) = (manifests(state), holders(state));
        let links = state.workers.iter().map(|(name, worker)| (name.clone(), Link::new(worker.incarnation, now_ms))).collect();
        Self {
            term: state.head.term,
            round: state.head.round,
            anchor: (wall_ms.max(state.head.now_ms), now_ms),
            connected_ms: now_ms,
            now_ms,
            tuning,
            scheduler: Scheduler::new(tuning.bundle_ms, tuning.bundle_tasks_max),
            links,
            pending: Vec::new(),
            joining: BTreeMap::new(),
            in_flight: false,
            passed: 0,
            last_tick_ms: state.head.now_ms,
            last_digest: None,
            place_again: true,
            next_rate_round_ms: now_ms,
            doing: BTreeSet::new(),
            works: Works::new(state),
            manifests,
            holders,
        }
    }

    /// Its term.
    #[must_use]
    pub fn term(&self) -> Term {
        self.term
    }

    /// The time it would record now, in milliseconds since 1970.
    #[must_use]
    pub fn wall_ms(&self, now_ms: u64) -> u64 {
        self.anchor.0 + now_ms.saturating_sub(self.anchor.1)
    }

    /// What was heard of a worker.
    #[must_use]
    pub fn heard(&self, worker: &WorkerId, now_ms: u64) -> Option<HeardOf> {
        let link = self.links.get(worker)?;
        Some(HeardOf {
            silent_ms: now_ms.saturating_sub(link.heard_ms),
            draining: link.draining,
            at: link.at.clone(),
            kept: link.kept.clone(),
        })
    }

    /// The connection to NATS is new: whoever was silent may not have been.
    pub fn reconnected(&mut self, now_ms: u64) {
        self.connected_ms = now_ms;
    }

    /// A digest of the state after record `sequence` was taken.
    pub fn digest(&mut self, sequence: u64, hash: [u8; 16]) {
        self.last_digest = Some((sequence, hash));
    }

    /// Records were applied; `fx` is what came of them.
    pub fn applied(&mut self, state: &State, fx: &Effects) {
        if state.head.round >= self.round {
            self.in_flight = false;
        }
        self.scheduler.learn(state, &fx.attempts);
        self.works.applied(state, fx);
        for name in &fx.workers {
            match state.workers.get(name) {
                None => _ = self.links.remove(name),
                Some(worker) if self.links.get(name).is_none_or(|link| link.incarnation != worker.incarnation) => {
                    self.links.insert(name.clone(), Link::new(worker.incarnation, self.now_ms));
                    if let Some(beat) = self.joining.remove(name) {
                        self.meet(state, &beat);
                    }
                }
                Some(_) => {}
            }
        }
        for name in &fx.resumed {
            self.scheduler.pardon(name);
            if let Some(found) = state.workers.get(name).filter(|worker| worker.quarantined_until_ms > state.head.now_ms) {
                self.pending.push(Decision::Quarantine { worker: name.clone(), incarnation: found.incarnation, until_ms: 0 });
            }
        }
        for (name, id, job) in &fx.opened {
            *self.holders.entry(*job).or_default().entry(name.clone()).or_insert(0) += 1;
            if let (Some(link), Some(worker)) = (self.links.get_mut(name), state.workers.get(name)) {
                link.opened(state, *id, worker);
            }
        }
        for (name, id, job) in &fx.closed {
            self.let_go(*job, name);
            if let Some(link) = self.links.get_mut(name) {
                link.closed(*id);
            }
        }
        for id in &fx.jobs {
            match state.jobs.get(id).is_some_and(wants_manifest) {
                true => _ = self.manifests.insert(*id),
                false => _ = self.manifests.remove(id),
            }
            match state.jobs.get(id) {
                Some(job) if send::wants_ends(job) => self.tell_ends(state, *id),
                Some(_) => {}
                None => self.scheduler.forget(*id),
            }
        }
        for name in fx.workers.iter().filter(|name| state.workers.get(*name).is_some_and(|w| w.draining)) {
            let jobs: BTreeSet<JobId> = state.workers.get(name).map(|w| w.bundles.values().map(|b| b.job).collect()).unwrap_or_default();
            jobs.iter().for_each(|job| self.tell_ends(state, *job));
        }
        for id in &fx.forgotten {
            self.manifests.remove(id);
            self.holders.remove(id);
        }
        self.place_again |= !fx.is_empty();
    }

    /// A worker holds one bundle of a job less.
    fn let_go(&mut self, job: JobId, name: &WorkerId) {
        let Some(of_job) = self.holders.get_mut(&job) else { return };
        if let Some(count) = of_job.get_mut(name) {
            *count = count.saturating_sub(1);
            if *count == 0 {
                of_job.remove(name);
            }
        }
        if of_job.is_empty() {
            self.holders.remove(&job);
        }
    }

    /// What it has noted of the state and is not so, in words; for tests, as it walks everything.
    #[must_use]
    pub fn broken(&self, state: &State) -> Vec<String> {
        let mut broken = Vec::new();
        if self.manifests != manifests(state) {
            broken.push(format!("the leader has manifests of {:?} to write, the state of {:?}", self.manifests, manifests(state)));
        }
        broken.extend(self.works.broken(state));
        if self.holders != holders(state) {
            broken.push(format!("the leader takes {:?} for holders, in the state they are {:?}", self.holders, holders(state)));
        }
        broken
    }

    fn tell_ends(&mut self, state: &State, id: JobId) {
        let Some(job) = state.jobs.get(&id) else { return };
        let names: Vec<WorkerId> = self.holders.get(&id).map(|names| names.keys().cloned().collect()).unwrap_or_default();
        for name in names {
            if let (Some(link), Some(worker)) = (self.links.get_mut(&name), state.workers.get(&name)) {
                link.tell_ends(job, worker);
            }
        }
    }

    fn meet(&mut self, state: &State, beat: &Beat) {
        let (Some(link), Some(worker)) = (self.links.get_mut(&beat.worker), state.workers.get(&beat.worker)) else { return };
        let lost = link.reconcile(state, worker, beat, self.term);
        if !lost.is_empty() {
            self.pending.push(Decision::AttemptsLost(lost));
        }
        for job in state.jobs.values().filter(|job| send::wants_ends(job)) {
            link.tell_ends(job, worker);
        }
    }

    /// A worker beat. Returns what to answer, or nothing when another leads.
    pub fn beat(&mut self, state: &State, beat: Beat, now_ms: u64) -> Option<BeatAnswer> {
        if beat.term > self.term {
            return None;
        }
        self.now_ms = self.now_ms.max(now_ms);
        let workers = self.links.len().max(1) as u64;
        let linger_ms = LINGER_MS_MIN.max((workers * 1_000 / REPORTS_PER_SECOND) as u32);
        let answer = |joined, lost| Some(BeatAnswer { term: self.term, linger_ms, joined, lost });
        let recorded = state.workers.get(&beat.worker).filter(|w| w.incarnation == beat.incarnation);
        let Some(worker) = recorded else {
            if !beat.held.is_empty() {
                // A life that holds something had joined, so it was declared lost; what it holds runs elsewhere by now.
                return answer(false, true);
            }
            let answer = answer(false, false);
            if !beat.leaving && !beat.draining {
                self.join(beat, state.head.level);
            }
            return answer;
        };
        let answer = answer(true, false);
        if let Some(link) = self.links.get_mut(&beat.worker) {
            link.heard_ms = now_ms;
            // For good: a life that drains ends. An older beat that comes late says nothing.
            link.draining |= beat.draining;
            link.at.clone_from(&beat.at);
            link.kept.clone_from(&beat.kept);
        }
        // What it said to have ended is in the log before this. Up to level 4 what it still was given would be charged.
        if beat.leaving && (worker.bundles.is_empty() || state.head.level >= LEVEL_BEGUN) {
            self.decide_once(Decision::WorkerLost { worker: beat.worker.clone(), incarnation: beat.incarnation, left: true });
        } else if beat.reported <= state.head.sequence {
            self.meet(state, &beat);
        }
        let offers = beat.info.at_level(state.head.level);
        if state.head.level >= LEVEL_OFFERS && worker.info != offers && !beat.leaving {
            self.decide_once(Decision::WorkerJoined { worker: beat.worker, incarnation: beat.incarnation, info: offers });
        }
        answer
    }

    fn join(&mut self, beat: Beat, level: u32) {
        if self.joining.get(&beat.worker).is_some_and(|known| known.incarnation == beat.incarnation) {
            return;
        }
        let info = beat.info.at_level(level);
        self.pending.push(Decision::WorkerJoined { worker: beat.worker.clone(), incarnation: beat.incarnation, info });
        self.joining.insert(beat.worker.clone(), beat);
    }

    /// Something that is done beside the leader's own rounds is to be recorded.
    pub fn record(&mut self, decision: Decision) {
        self.decide_once(decision);
    }

    fn decide_once(&mut self, decision: Decision) {
        if !self.pending.contains(&decision) {
            self.pending.push(decision);
        }
    }

    /// A worker answered a work message.
    pub fn answered(&mut self, worker: &WorkerId, answer: &WorkAnswer) -> Option<Action> {
        if answer.term > self.term {
            return Some(Action::StepDown);
        }
        let link = self.links.get_mut(worker).filter(|link| link.incarnation == answer.incarnation && answer.term == self.term);
        if let Some(link) = link {
            link.answered(answer.taken);
        }
        None
    }

    /// What trails a job's end was done (or failed, and is tried again later).
    pub fn trailed(&mut self, job: JobId, what: Trailing, done: bool) {
        self.doing.remove(&(job, what));
        if done {
            self.pending.push(Decision::Done { job, what });
        }
    }

    /// Work for a volume has ended; with nothing to record it failed, and is begun anew.
    pub fn worked(&mut self, work: &Work, decision: Option<Decision>) {
        self.works.ended(work);
        self.pending.extend(decision);
    }

    /// A message on our subject was passed over: the server counts it all the same.
    pub fn passed_over(&mut self, sequence: u64) {
        self.passed = self.passed.max(sequence);
    }

    /// The publish in flight was refused though nobody else leads; it is decided anew.
    pub fn refused(&mut self) {
        self.in_flight = false;
        self.place_again = true;
    }

    /// Everything to do now. Called after every event and when [`Leader::wake_at`] has come.
    pub fn poll(&mut self, state: &State, now_ms: u64) -> Vec<Action> {
        if state.head.term > self.term {
            return vec![Action::StepDown];
        }
        self.now_ms = self.now_ms.max(now_ms);
        let mut actions = Vec::new();
        if !self.in_flight
            && let Some(decided) = self.decide(state, now_ms)
        {
            self.in_flight = true;
            actions.push(Action::Publish { decided, after: state.head.leader_sequence.max(self.passed) });
        }
        for (name, link) in &mut self.links {
            if let Some(message) = link.next_message(self.term, now_ms) {
                actions.push(Action::Send(name.clone(), message));
            }
        }
        self.trail(state, &mut actions);
        if !self.in_flight {
            actions.extend(self.works.begin(state, &self.pending).into_iter().map(Action::Work));
        }
        actions
    }

    /// By the monotonic clock: when to poll again if nothing happens before.
    #[must_use]
    pub fn wake_at(&self, state: &State, now_ms: u64) -> u64 {
        let mut at = now_ms + TICK_MS;
        if let Some((due, _)) = state.timers.first() {
            at = at.min(now_ms + due.saturating_sub(self.wall_ms(now_ms)));
        }
        if self.scheduler.rate_limited(state) {
            at = at.min(self.next_rate_round_ms.max(now_ms + 1));
        }
        let resend = self.links.values().filter_map(Link::resend_at).min();
        at.min(resend.unwrap_or(u64::MAX)).max(now_ms + 1)
    }

    fn decide(&mut self, state: &State, now_ms: u64) -> Option<Decided> {
        let wall_ms = self.wall_ms(now_ms);
        let lost_from = self.pending.len();
        self.declare_lost(state, now_ms);
        let mut silent: BTreeSet<WorkerId> = self.pending[lost_from..]
            .iter()
            .filter_map(|d| if let Decision::WorkerLost { worker, .. } = d { Some(worker.clone()) } else { None })
            .chain(self.links.iter().filter(|(_, link)| link.draining).map(|(name, _)| name.clone()))
            .collect();
        for (worker, ms) in self.scheduler.misbehaving() {
            if let Some(found) = state.workers.get(&worker) {
                let incarnation = found.incarnation;
                silent.insert(worker.clone());
                self.pending.push(Decision::Quarantine { worker, incarnation, until_ms: wall_ms + ms });
            }
        }
        let rate_due = now_ms >= self.next_rate_round_ms && self.scheduler.rate_limited(state);
        let assignments = if self.place_again || rate_due {
            self.place_again = false;
            self.next_rate_round_ms = now_ms + RATE_ROUND_MS;
            place::place(&mut self.scheduler, state, now_ms, &silent)
        } else {
            Vec::new()
        };
        let mut decisions = Vec::new();
        let open = state.workers.values().any(|w| !w.bundles.is_empty());
        // The end of a quarantine is no timer of the state's, and nothing else may come to move its time.
        let freed = state.workers.values().any(|w| w.quarantined_until_ms > state.head.now_ms && w.quarantined_until_ms <= wall_ms);
        self.place_again |= freed;
        let stale = freed || (open && wall_ms >= self.last_tick_ms + TICK_MS);
        if let Some((sequence, hash)) = self.last_digest.take() {
            self.pending.push(Decision::Digest { sequence, hash });
        }
        if timers::due(state, wall_ms) || stale || !assignments.is_empty() || !self.pending.is_empty() {
            decisions.push(Decision::Tick(wall_ms));
            self.last_tick_ms = wall_ms;
        }
        decisions.append(&mut self.pending);
        if !assignments.is_empty() {
            decisions.push(Decision::Assign(assignments));
        }
        if decisions.is_empty() {
            return None;
        }
        self.round += 1;
        Some(Decided { term: self.term, round: self.round, decisions })
    }

    fn declare_lost(&mut self, state: &State, now_ms: u64) {
        let heard_from = self.connected_ms + self.tuning.grace_ms;
        for (name, link) in &self.links {
            let dead = now_ms >= heard_from.max(link.heard_ms + self.tuning.lost_after_ms);
            if let Some(worker) = state.workers.get(name).filter(|_| dead) {
                self.pending.push(Decision::WorkerLost { worker: name.clone(), incarnation: worker.incarnation, left: false });
            }
        }
    }

    fn trail(&mut self, state: &State, actions: &mut Vec<Action>) {
        // A job's objects go once nothing writes any more: no attempt of it is with a worker, and nothing else of it is under way here.
        let forget = &state.head.forget;
        let manifests = self.manifests.iter().filter(|id| !forget.contains(id)).map(|id| (*id, Trailing::Manifest));
        let sweeps = state.head.sweep.iter().filter(|id| !forget.contains(id)).map(|id| (*id, Trailing::FailedObjects));
        let quiet =
            |id: &&JobId| !self.holders.contains_key(*id) && !self.doing.iter().any(|(job, what)| job == *id && *what != Trailing::Objects);
        let forgets = forget.iter().filter(quiet).map(|id| (*id, Trailing::Objects));
        let wanted: Vec<(JobId, Trailing)> = manifests.chain(sweeps).chain(forgets).collect();
        for (job, what) in wanted {
            let decided = self.pending.iter().any(|d| matches!(d, Decision::Done { job: j, what: w } if *j == job && *w == what));
            if self.doing.len() < TRAILING_MAX && !decided && !self.in_flight && self.doing.insert((job, what)) {
                actions.push(Action::Trail(job, what));
            }
        }
    }
}

fn wants_manifest(job: &Job) -> bool {
    job.progress.trailing.contains(&Trailing::Manifest)
}

fn manifests(state: &State) -> BTreeSet<JobId> {
    state.jobs.values().filter(|job| wants_manifest(job)).map(|job| job.id).collect()
}

fn holders(state: &State) -> BTreeMap<JobId, BTreeMap<WorkerId, u32>> {
    let mut holders: BTreeMap<JobId, BTreeMap<WorkerId, u32>> = BTreeMap::new();
    for (name, worker) in &state.workers {
        for bundle in worker.bundles.values() {
            *holders.entry(bundle.job).or_default().entry(name.clone()).or_insert(0) += 1;
        }
    }
    holders
}

#[cfg(test)]
mod tests {
    use volley_jobspecs::ids::{Incarnation, TenantId};
    use volley_jobspecs::wire::record::{Actor, Control, Verb};
    use volley_jobspecs::wire::work::WorkerInfo;

    use super::*;
    use crate::state::worker::{Promised, Worker};

    /// A state with this worker, which gets nothing until 9 s.
    fn quarantined(name: &WorkerId) -> State {
        let mut state = State::default();
        state.head.now_ms = 1_000;
        let info = WorkerInfo {
            slots: 1,
            cpu_milli: 1_000,
            memory_bytes: 1 << 30,
            disk_bytes: 1 << 30,
            isolation: Vec::new(),
            labels: BTreeMap::new(),
            limits: false,
            build: String::new(),
            host: String::new(),
            lacks: Vec::new(),
            template_bytes: None,
            images: None,
            fetches: false,
            volumes: None,
        };
        let worker = Worker {
            incarnation: Incarnation(7),
            info,
            draining: false,
            quarantined_until_ms: 9_000,
            bundles: BTreeMap::new(),
            promised: Promised::default(),
        };
        state.workers.insert(name.clone(), worker);
        state
    }

    #[test]
    fn a_quarantined_worker_that_is_resumed_is_trusted_again() {
        let name = WorkerId::new("w").unwrap_or_else(|e| panic!("{e}"));
        let mut state = quarantined(&name);
        let mut leader = Leader::new(&state, 1_000, 0, Tuning::default());
        let drain = |state: &mut State, leader: &mut Leader, on| {
            let tenant = TenantId::new("operator").unwrap_or_else(|e| panic!("{e}"));
            let actor = Actor { tenant, principal: "p".to_owned(), request_id: "r".to_owned() };
            let mut fx = Effects::default();
            crate::control::control(state, 1, &Control { actor, verb: Verb::Drain { worker: name.clone(), on } }, &mut fx);
            leader.applied(state, &fx);
        };
        drain(&mut state, &mut leader, true);
        assert_eq!(leader.pending, []);
        drain(&mut state, &mut leader, false);
        let trusted = Decision::Quarantine { worker: name.clone(), incarnation: Incarnation(7), until_ms: 0 };
        assert_eq!(leader.pending, [trusted]);
        state.workers.values_mut().for_each(|worker| worker.quarantined_until_ms = 0);
        drain(&mut state, &mut leader, false);
        assert_eq!(leader.pending.len(), 1, "nothing is recorded of one that is trusted already");
    }

    #[test]
    fn the_end_of_a_quarantine_moves_time_though_nothing_else_happens() {
        let mut state = quarantined(&WorkerId::new("w").unwrap_or_else(|e| panic!("{e}")));
        let mut leader = Leader::new(&state, 1_000, 0, Tuning::default());
        assert!(leader.decide(&state, 0).is_none() && leader.decide(&state, 7_999).is_none());
        let decided = leader.decide(&state, 8_000).unwrap_or_else(|| panic!("a tick"));
        assert_eq!(decided.decisions, [Decision::Tick(9_000)]);
        assert!(leader.place_again, "and what waits is placed when it was applied");
        state.head.now_ms = 9_000;
        assert!(leader.decide(&state, 8_001).is_none() && !leader.place_again);
    }

    #[test]
    fn what_a_worker_says_of_itself_is_recorded_as_the_level_allows() {
        let name = WorkerId::new("w").unwrap_or_else(|e| panic!("{e}"));
        let mut state = quarantined(&name);
        let info = WorkerInfo { images: Some(vec![1]), ..state.workers[&name].info.clone() };
        let beat = |info: &WorkerInfo, life| Beat {
            worker: name.clone(),
            incarnation: Incarnation(life),
            info: info.clone(),
            held: Vec::new(),
            term: Term(0),
            taken: 0,
            reported: 0,
            draining: false,
            leaving: false,
            at: Vec::new(),
            kept: Vec::new(),
        };
        let recorded = |state: &State, life| {
            let mut leader = Leader::new(state, 1_000, 0, Tuning::default());
            assert!(leader.beat(state, beat(&info, life), 1).is_some());
            let said =
                leader.pending.iter().filter_map(|d| if let Decision::WorkerJoined { info, .. } = d { Some(info.clone()) } else { None });
            said.collect::<Vec<_>>()
        };
        assert_eq!(recorded(&state, 7), [], "an older level says nothing more of a life that it knows");
        assert_eq!(recorded(&state, 8), [WorkerInfo { images: None, ..info.clone() }], "and of another one as much as it knows");
        state.head.level = LEVEL_OFFERS;
        assert_eq!(recorded(&state, 7), std::slice::from_ref(&info));
        if let Some(worker) = state.workers.get_mut(&name) {
            worker.info = info.clone();
        }
        assert_eq!(recorded(&state, 7), []);
    }
}
