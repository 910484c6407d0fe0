//! The world: virtual time, one queue of events, a network that loses, repeats and delays, and a devil with a seed.
//!
//! Owns what may go wrong and when. The devil rests after [`DEVIL_UNTIL_MS`]; then everything must come to its end.

use std::collections::BTreeMap;

use volley_coordinator::checkpoint;
use volley_coordinator::core::Message;
use volley_coordinator::leader::{Action, Tuning};
use volley_jobspecs::ids::{Incarnation, JobId, TenantId, WorkerId};
use volley_jobspecs::subjects;
use volley_jobspecs::wire::record::{Control, Decision, Record, Verb};
use volley_jobspecs::wire::work::{Beat, BeatAnswer, WorkAnswer, WorkMessage};
use volley_jobspecs::wire::{self, LEVEL};
use volley_worker::core::{Action as Do, Input, JobAnswer, JobFacts};

use super::coordinator::{Checkpoint, Coordinator, GIVE_UP_MS, is_ours};
use super::demands::{self, Notebook};
use super::host::{self, Host};
use super::log::{Log, Written};
use super::random::Random;

/// The devil's working time.
const DEVIL_UNTIL_MS: u64 = 120_000;
/// After which every job must have ended: 4,200 tasks one at a time, most of them failing three times, take more than an hour.
const END_MS: u64 = 6_000_000;
/// The lease's time to live at the server.
const TTL_MS: u64 = 6_000;
/// What NATS says to a publish.
const PUB_ACK: &[u8] = br#"{"stream":"VOLLEY_LOG","seq":12}"#;
const COORDINATORS: usize = 3;
const WORKERS: usize = 5;

#[derive(Debug, Clone)]
pub enum Event {
    /// A coordinator's loop turns: reads, polls, renews.
    Turn(usize),
    /// A worker's loop turns.
    Tick(usize),
    Beat {
        to: usize,
        from: usize,
        life: u64,
        beat: Beat,
    },
    BeatAnswer {
        to: usize,
        life: u64,
        incarnation: Incarnation,
        answer: Option<BeatAnswer>,
    },
    Work {
        to: usize,
        from: usize,
        message: WorkMessage,
    },
    WorkAnswer {
        to: usize,
        worker: WorkerId,
        answer: WorkAnswer,
    },
    Report {
        from: usize,
        life: u64,
        incarnation: Incarnation,
        number: u64,
        bytes: Vec<u8>,
    },
    ReportAcked {
        to: usize,
        life: u64,
        incarnation: Incarnation,
        number: u64,
        sequence: Option<u64>,
    },
    Job {
        to: usize,
        life: u64,
        job: JobId,
    },
    /// A coordinator's publish reaches the server; the answer may be lost.
    Fenced {
        from: usize,
        life: u64,
        bytes: Vec<u8>,
        after: u64,
        lead: bool,
    },
    /// The answer to a publish is matched to it by its bytes: a driver waits for one publish at a time.
    FencedAnswer {
        to: usize,
        life: u64,
        bytes: Vec<u8>,
        written: Option<Written>,
    },
    Ended {
        host: usize,
        life: u64,
        slot: u32,
    },
    Client,
    Devil,
}

pub struct World {
    pub now: u64,
    order: u64,
    queue: BTreeMap<(u64, u64), Event>,
    pub random: Random,
    pub log: Log,
    pub coordinators: Vec<Coordinator>,
    pub hosts: Vec<Host>,
    lease: Option<(usize, u64, u64)>,
    pub notebook: Notebook,
    failing: u64,
    jobs_left: u64,
    /// What coordinators left in the bucket.
    checkpoints: Vec<Checkpoint>,
    /// How often one was loaded.
    pub loads: u64,
}

impl World {
    /// Runs one seed to its end. Returns what did not hold.
    pub fn run(seed: u64) -> Vec<String> {
        let mut world = Self::new(seed);
        world.go();
        demands::at_the_end(&mut world)
    }

    /// A hash of the whole log of one seed.
    pub fn fingerprint(seed: u64) -> (u64, u64) {
        let mut world = Self::new(seed);
        world.go();
        let mut hash = 0;
        for Message { sequence, bytes, .. } in world.log.read(1, usize::MAX) {
            hash = bytes.iter().fold(volley_jobspecs::backoff::splitmix64(hash ^ sequence), |h, b| h.rotate_left(5) ^ u64::from(*b));
        }
        (world.log.len(), hash)
    }

    fn new(seed: u64) -> Self {
        let mut random = Random::new(seed);
        // Another build: other constants of the scheduler.
        let other = Tuning { bundle_ms: random.between(10, 400), bundle_tasks_max: random.between(1, 300) as u32, ..Tuning::default() };
        let coordinators = (0..COORDINATORS).map(|at| Coordinator::new(format!("c{at}"), if at == 0 { other } else { Tuning::default() }));
        let mut world = Self {
            now: 0,
            order: 0,
            queue: BTreeMap::new(),
            log: Log::default(),
            coordinators: coordinators.collect(),
            hosts: Vec::new(),
            lease: None,
            notebook: Notebook::default(),
            failing: [0, 5, 30, 60][random.below(4) as usize],
            jobs_left: random.between(1, 5),
            checkpoints: Vec::new(),
            loads: 0,
            random,
        };
        for at in 0..WORKERS {
            let slots = world.random.between(1, 4) as u32;
            world.hosts.push(Host::new(&format!("w{at}"), slots, &mut world.random, 0));
            world.at(world.random.clone().below(3_000), Event::Tick(at));
        }
        (0..COORDINATORS).for_each(|at| world.at(at as u64 * 7, Event::Turn(at)));
        world.at(500, Event::Client);
        world.at(1_000, Event::Devil);
        world
    }

    fn at(&mut self, when: u64, event: Event) {
        self.order += 1;
        self.queue.insert((when.max(self.now), self.order), event);
    }

    fn soon(&mut self, from: u64, to: u64, event: Event) {
        let when = self.now + self.random.between(from, to);
        self.at(when, event);
    }

    fn devil(&self) -> bool {
        self.now < DEVIL_UNTIL_MS
    }

    fn go(&mut self) {
        while let Some(((when, _), event)) = self.queue.pop_first() {
            self.now = when;
            if self.now > END_MS || (!self.devil() && self.jobs_left == 0 && demands::all_ended(self)) {
                return;
            }
            self.happen(event);
        }
    }

    /// What a frozen process is told by its own kernel and client library waits for it; core NATS messages do too, in its socket.
    fn waits_for(&self, event: &Event) -> Option<u64> {
        let host = match event {
            Event::BeatAnswer { to, .. } | Event::ReportAcked { to, .. } | Event::Job { to, .. } | Event::Work { to, .. } => *to,
            _ => return None,
        };
        let frozen = self.hosts[host].frozen_until;
        (frozen > self.now).then_some(frozen)
    }

    fn happen(&mut self, event: Event) {
        if let Some(later) = self.waits_for(&event) {
            self.at(later, event);
            return;
        }
        match event {
            Event::Turn(at) => self.turn(at),
            Event::Tick(at) => {
                let frozen = self.hosts[at].frozen_until;
                self.input(at, Input::Tick);
                self.at((self.now + 100).max(frozen), Event::Tick(at));
            }
            Event::Beat { to, from, life, beat } => {
                let incarnation = beat.incarnation;
                let answer = if self.coordinators[to].runs(self.now) { self.coordinators[to].beat(beat, self.now) } else { None };
                if answer.is_some() {
                    self.core_message(Event::BeatAnswer { to: from, life, incarnation, answer });
                }
                self.poll(to);
            }
            Event::BeatAnswer { to, life, incarnation, answer } if self.hosts[to].life == life => {
                let input = match answer {
                    Some(answer) => Input::BeatAnswered { incarnation, answer },
                    None => Input::BeatUnanswered { incarnation },
                };
                self.input(to, input);
            }
            Event::Work { to, from, message } => {
                let actions = self.input(to, Input::Work(message));
                let worker = self.hosts[to].name.clone();
                for action in actions {
                    if let Do::Answer(answer) = action {
                        self.core_message(Event::WorkAnswer { to: from, worker: worker.clone(), answer });
                    }
                }
            }
            Event::WorkAnswer { to, worker, answer } => {
                if self.coordinators[to].runs(self.now) {
                    self.coordinators[to].answered(&worker, &answer);
                    self.poll(to);
                }
            }
            Event::Report { from, life, incarnation, number, bytes } => self.report(from, life, incarnation, number, bytes),
            Event::ReportAcked { to, life, incarnation, number, sequence } if self.hosts[to].life == life => {
                let input = match sequence {
                    Some(sequence) => Input::ReportAcked { incarnation, number, sequence },
                    None => Input::ReportFailed { incarnation, number },
                };
                self.input(to, input);
            }
            Event::Job { to, life, job } if self.hosts[to].life == life => {
                let known = self
                    .coordinators
                    .iter()
                    .filter(|c| c.runs(self.now))
                    .find_map(|c| c.core.state().job(job).map(|j| j.facts.plan.clone()));
                let lost = self.devil() && self.random.one_in(10);
                let answer = known
                    .filter(|_| !lost)
                    .map_or(JobAnswer::NoAnswer, |p| JobAnswer::Known(JobFacts { needs: p.needs, start_ms: p.start_ms, run_ms: p.run_ms }));
                self.input(to, Input::Job { job, answer });
            }
            Event::Fenced { from, life, bytes, after, lead } => self.fenced(from, life, bytes, after, lead),
            Event::FencedAnswer { to, life, bytes, written } => self.fenced_answer(to, life, bytes, written),
            Event::Ended { host, life, slot } => self.ended(host, life, slot),
            Event::Client => self.client(),
            Event::Devil => self.mischief(),
            Event::BeatAnswer { .. } | Event::ReportAcked { .. } | Event::Job { .. } => {}
        }
    }

    /// A report on its way into the log; it or its answer may be lost.
    fn report(&mut self, from: usize, life: u64, incarnation: Incarnation, number: u64, bytes: Vec<u8>) {
        let subject = subjects::log_report(&self.hosts[from].name);
        let lost = self.devil() && self.random.one_in(12);
        let written = if lost { None } else { Some(self.log.append(&subject, bytes, None)) };
        let sequence = written.and_then(|w| if let Written::At(sequence) = w { Some(sequence) } else { None });
        let answer_lost = self.devil() && self.random.one_in(12);
        let sequence = sequence.filter(|_| !answer_lost);
        let wait = if sequence.is_some() { 5 } else { 2_000 };
        self.soon(1, wait, Event::ReportAcked { to: from, life, incarnation, number, sequence });
    }

    /// Core NATS: may be lost, repeated, late.
    fn core_message(&mut self, event: Event) {
        if self.devil() {
            if self.random.one_in(15) {
                return;
            }
            if self.random.one_in(20) {
                self.soon(1, 4_000, event.clone());
            }
        }
        let late = if self.devil() && self.random.one_in(25) { 3_000 } else { 8 };
        self.soon(0, late, event);
    }

    fn turn(&mut self, at: usize) {
        if self.coordinators[at].runs(self.now) {
            self.keep(at);
            // Reads in bursts of any size, and so behind the others.
            let count = self.random.between(0, 60) as usize;
            let records = self.log.read(self.coordinators[at].next(), count);
            if !records.is_empty() {
                self.coordinators[at].apply(&records, self.now);
                demands::after_apply(self, at);
            }
            self.lease(at);
            self.poll(at);
        }
        let frozen = self.coordinators[at].frozen_until;
        let next = self.now + self.random.between(1, 15);
        self.at(next.max(frozen), Event::Turn(at));
    }

    /// What the keeper does: checkpoints, trims, and loads one when what comes next is trimmed.
    fn keep(&mut self, at: usize) {
        if self.coordinators[at].next() < self.log.first() {
            let offset = self.random.below(1 << 30);
            let newest = self.checkpoints.last().cloned().unwrap_or_default();
            self.coordinators[at].load(&newest, offset);
            self.loads += 1;
        }
        let sequence = self.coordinators[at].core.state().head.sequence;
        let due = self.devil() && self.random.one_in(100);
        let trim = self.devil() && self.random.one_in(30);
        if let Some((leader, state)) = self.coordinators[at].core.leader().filter(|_| due || trim) {
            if let Some(keep) = checkpoint::keep_from(&state.head).filter(|_| trim) {
                self.log.trim(keep);
            }
            // Some way into the run: every build can follow by then.
            if state.head.level < LEVEL {
                leader.record(Decision::Level(LEVEL));
            }
            if due && state.head.checkpoints.last().is_none_or(|last| *last < sequence) {
                leader.record(Decision::Checkpointed { sequence });
                self.checkpoints.push(self.coordinators[at].rows.dump());
            }
        }
    }

    fn lease(&mut self, at: usize) {
        let now = self.now;
        if self.lease.is_some_and(|(_, _, until)| until <= now) {
            self.lease = None;
        }
        let life = self.coordinators[at].life;
        let mine = self.lease.is_some_and(|(who, whose_life, _)| who == at && whose_life == life);
        let free = self.lease.is_none() && self.random.one_in(20);
        let renew = mine && self.coordinators[at].lease_until < now + GIVE_UP_MS - 2_000 && !(self.devil() && self.random.one_in(30));
        if free || renew {
            self.lease = Some((at, life, now + TTL_MS));
            self.coordinators[at].lease_until = now + GIVE_UP_MS;
        }
        let held = self.coordinators[at].lease_until > now;
        let leads = self.coordinators[at].core.leads();
        if leads && !held {
            self.coordinators[at].step_down();
        }
        let asked = self.coordinators[at].asked_to_lead_at;
        if held && !leads && asked.is_none_or(|asked| now > asked + 200) {
            self.coordinators[at].asked_to_lead_at = Some(now);
            let (record, after) = self.coordinators[at].core.lead_record(&self.coordinators[at].name, self.coordinators[at].wall(now));
            // As the driver: a restart forgot what was passed over.
            let next = self.coordinators[at].next();
            let after = self.log.last_leader().map(|(last, _)| last).filter(|last| *last < next).unwrap_or(after);
            self.publish_fenced(at, wire::encode(&record), after, true);
        }
    }

    fn publish_fenced(&mut self, from: usize, bytes: Vec<u8>, after: u64, lead: bool) {
        let life = self.coordinators[from].life;
        let late = if self.devil() && self.random.one_in(20) { 3_000 } else { 4 };
        self.soon(1, late, Event::Fenced { from, life, bytes, after, lead });
    }

    fn fenced(&mut self, from: usize, life: u64, bytes: Vec<u8>, after: u64, lead: bool) {
        // Lost on the way, or refused because the server still has one of ours in flight.
        let lost = self.devil() && self.random.one_in(15);
        let written = if lost { None } else { Some(self.log.append(subjects::LOG_LEADER, bytes.clone(), Some(after))) };
        let answer_lost = self.devil() && self.random.one_in(15);
        if !lead {
            let written = written.filter(|_| !answer_lost);
            let late = if written.is_some() { 4 } else { 2_000 };
            self.soon(1, late, Event::FencedAnswer { to: from, life, bytes, written });
        }
    }

    fn fenced_answer(&mut self, to: usize, life: u64, bytes: Vec<u8>, written: Option<Written>) {
        if self.coordinators[to].life != life {
            return;
        }
        if !self.coordinators[to].runs(self.now) {
            let later = self.coordinators[to].frozen_until;
            if self.coordinators[to].up {
                self.at(later, Event::FencedAnswer { to, life, bytes, written });
            }
            return;
        }
        let Some((decided, after)) = self.coordinators[to].publishing.clone().filter(|(decided, _)| is_ours(&bytes, decided)) else {
            return;
        };
        match written {
            Some(Written::At(_)) => self.coordinators[to].publishing = None,
            Some(Written::Refused) => {
                let ours = self.log.last_leader().is_some_and(|(_, bytes)| is_ours(bytes, &decided));
                self.coordinators[to].publishing = None;
                if !ours {
                    self.coordinators[to].step_down();
                }
            }
            None => self.publish_fenced(to, wire::encode(&Record::Decided(decided)), after, false),
        }
    }

    fn poll(&mut self, at: usize) {
        if !self.coordinators[at].runs(self.now) {
            return;
        }
        for action in self.coordinators[at].poll(self.now) {
            match action {
                Action::Publish { decided, after } => self.publish_fenced(at, wire::encode(&Record::Decided(decided)), after, false),
                Action::Send(worker, message) => {
                    if let Some(to) = self.hosts.iter().position(|h| h.name == worker) {
                        self.core_message(Event::Work { to, from: at, message });
                    }
                }
                Action::Trail(..) | Action::Work(_) | Action::StepDown => {}
            }
        }
    }

    /// Gives a worker an input and does what it says. Returns the actions.
    fn input(&mut self, at: usize, input: Input) -> Vec<Do> {
        if !self.hosts[at].runs(self.now) {
            return Vec::new();
        }
        let mut actions = Vec::new();
        self.hosts[at].core.handle(self.now, input, &mut actions);
        for action in actions.clone() {
            self.act(at, action);
        }
        actions
    }

    fn act(&mut self, at: usize, action: Do) {
        let life = self.hosts[at].life;
        match action {
            Do::Beat(beat) => {
                let incarnation = beat.incarnation;
                for to in 0..COORDINATORS {
                    self.core_message(Event::Beat { to, from: at, life, beat: beat.clone() });
                }
                self.soon(900, 1_100, Event::BeatAnswer { to: at, life, incarnation, answer: None });
            }
            Do::FetchJob(job) => self.soon(1, 50, Event::Job { to: at, life, job }),
            Do::Run { slot, name, .. } => {
                let ends = self.now + host::duration(&name);
                self.hosts[at].running.insert(slot, (name, ends));
                demands::began(self, at, name);
                self.at(ends, Event::Ended { host: at, life, slot });
            }
            Do::Stop { slot, name, .. } => {
                if self.hosts[at].running.get(&slot).is_some_and(|(running, _)| *running == name) {
                    self.soon(1, 300, Event::Ended { host: at, life, slot });
                }
            }
            Do::Publish { incarnation, publish } => {
                self.soon(1, 5, Event::Report { from: at, life, incarnation, number: publish.number, bytes: publish.bytes.to_vec() });
            }
            Do::NewLife => {
                self.hosts[at].running.clear();
                let incarnation = Incarnation(self.random.next());
                self.input(at, Input::Born(incarnation));
            }
            Do::Answer(_) | Do::Tell(_) | Do::Dropped(_) => {}
            Do::Exit => {
                let now = self.now;
                self.hosts[at].restart(&mut self.random, now);
            }
        }
    }

    fn ended(&mut self, at: usize, life: u64, slot: u32) {
        if self.hosts[at].life != life {
            return;
        }
        if !self.hosts[at].runs(self.now) {
            let later = self.hosts[at].frozen_until.max(self.now + 1);
            if self.hosts[at].up {
                self.at(later, Event::Ended { host: at, life, slot });
            }
            return;
        }
        if let Some((name, _)) = self.hosts[at].running.remove(&slot) {
            demands::stopped(self, at, name);
            let outcome = host::outcome(&name, self.failing);
            self.input(at, Input::Ended { slot, name, outcome });
        }
    }

    /// A person: submits jobs, and plays with them.
    fn client(&mut self) {
        if self.jobs_left > 0 {
            self.jobs_left -= 1;
            let submit = demands::submit(&mut self.random, self.log.len());
            let bytes = wire::encode(&Record::Submit(Box::new(submit)));
            // A client whose answer was lost repeats the very same submit.
            let times = if self.random.one_in(5) { 2 } else { 1 };
            (0..times).for_each(|_| _ = self.log.append("volley.log.submit.default", bytes.clone(), None));
        } else if self.devil() {
            self.play();
        }
        if self.devil() || self.jobs_left > 0 {
            self.soon(500, 12_000, Event::Client);
        } else {
            // Whatever was paused must go on, or nothing ends.
            let paused: Vec<JobId> = self.coordinators[1].core.state().jobs.values().filter(|j| j.progress.paused).map(|j| j.id).collect();
            paused.into_iter().for_each(|job| self.control(Verb::Resume { job }));
            self.soon(2_000, 2_000, Event::Client);
        }
    }

    fn play(&mut self) {
        let submits = self
            .log
            .read(1, usize::MAX)
            .into_iter()
            .filter(|message| matches!(wire::decode::<Record>("r", &message.bytes), Ok(Record::Submit(_))));
        let jobs: Vec<u64> = submits.map(|message| message.sequence).collect();
        let job = JobId(jobs[self.random.below(jobs.len() as u64) as usize]);
        let verb = match self.random.below(10) {
            0 => Verb::Cancel { job, stop_running: self.random.one_in(2), reason: String::new() },
            1 | 2 => Verb::Pause { job },
            3 | 4 => Verb::Resume { job },
            5 | 6 => Verb::Rerun { job },
            7 | 8 => Verb::Remove { job },
            _ => Verb::Drain { worker: self.hosts[0].name.clone(), on: self.random.one_in(2) },
        };
        self.control(verb);
    }

    fn control(&mut self, verb: Verb) {
        let request_id = format!("r{}", self.log.len());
        let tenant = TenantId::new("default").unwrap();
        let actor = volley_jobspecs::wire::record::Actor { tenant, principal: "person".to_owned(), request_id };
        self.log.append("volley.log.control.default", wire::encode(&Record::Control(Control { actor, verb })), None);
    }

    fn mischief(&mut self) {
        if !self.devil() {
            self.rest();
            return;
        }
        let who = self.random.below(COORDINATORS as u64) as usize;
        let host = self.random.below(WORKERS as u64) as usize;
        let until = self.now + self.random.between(100, 25_000);
        match self.random.below(10) {
            0 | 1 => self.coordinators[who].frozen_until = until,
            2 | 3 => {
                let offset = self.random.below(1 << 30);
                self.coordinators[who].restart(offset);
                // An upgrade: the same coordinator, another build.
                self.coordinators[who].tuning = Tuning { bundle_tasks_max: self.random.between(1, 256) as u32, ..Tuning::default() };
            }
            4 => self.coordinators[who].wall_offset += self.random.between(0, 7_200_000) as i64 - 3_600_000,
            5 | 6 => self.hosts[host].frozen_until = until,
            7 => {
                self.hosts[host].up = false;
                demands::died(self, host);
                self.hosts[host].restart(&mut self.random.clone(), self.now);
                self.hosts[host].frozen_until = self.now + self.random.between(1, 40_000);
            }
            8 => self.input(host, Input::Drain).clear(),
            // NATS answers to whatever subject a publish names.
            9 => _ = self.log.append(subjects::LOG_LEADER, PUB_ACK.to_vec(), None),
            _ => {}
        }
        self.soon(200, 9_000, Event::Devil);
    }

    fn rest(&mut self) {
        self.coordinators.iter_mut().for_each(|c| c.frozen_until = 0);
        self.hosts.iter_mut().for_each(|h| h.frozen_until = 0);
        self.control(Verb::Drain { worker: self.hosts[0].name.clone(), on: false });
    }
}
