//! The only loop: next event, core, actions.
//!
//! Owns the clock, the slot tasks, and the requests under way, of which there is at most one beat, one report and one per job. Does
//! not own any decision (`core`).

use std::collections::{BTreeMap, VecDeque};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use bytes::Bytes;
use tokio::sync::{mpsc, watch};
use tokio::task::JoinHandle;
use volley_jobspecs::ids::{AttemptName, Incarnation, JobId, WorkerId};
use volley_jobspecs::observe::{self, Observing};
use volley_jobspecs::wire;
use volley_jobspecs::wire::live::Watch;
use volley_jobspecs::wire::plan::Isolation;
use volley_jobspecs::wire::volume::Given;
use volley_jobspecs::wire::work::{Beat, BeatAnswer, WorkMessage};

use crate::attempt::Outcome;
use crate::cgroup::Cgroups;
use crate::containers::Containers;
use crate::control::{Status, Wish, Wishes};
use crate::core::{Action, Core, CoreConfig, Input, JobAnswer};
use crate::executor::{Executor, Shared, SlotOrder};
use crate::job::{Job, JobError};
use crate::live::{AllWatched, Watched};
use crate::machines::Machines;
use crate::ports::{Bus, Incoming, Objects};
use crate::runtime::container::ContainerMachine;
use crate::runtime::microvm::MicrovmMachine;
use crate::runtime::null;
use crate::runtime::process::ProcessMachine;
use crate::runtime::tiers::Tiers;
use crate::spawner::Spawner;
use crate::stop::{Stopper, stop_signal};
use crate::trace::{Kept, Traces};

/// Events that may wait for the loop: a few from every busy slot; a slot that finds it full waits, which loses nothing.
pub const EVENTS_MAX: usize = 1_024;
/// Jobs kept read: as many as can be active on one host at once, and some more.
const JOBS_KEPT: usize = 256;
/// Actions carried out before other tasks of the runtime get a turn.
const ACTIONS_PER_TURN: u32 = 512;
/// Jobs watched at once: people at terminals.
const WATCHED_MAX: usize = 256;

/// How long the last beat may still be on its way when the loop ends: longer than a coordinator takes to answer.
const LAST_BEAT_TIME: Duration = Duration::from_secs(2);

/// What the loop hears from requests it started.
enum Heard {
    Core(Input),
    Job(JobId, Box<Result<Job, JobError>>),
}

/// The parts of a worker.
pub struct Parts<B, O> {
    /// What all slots share.
    pub shared: Shared<B, O>,
    /// Ends and progress of slots.
    pub events: mpsc::Receiver<Input>,
    /// Who watches what.
    pub watched: watch::Sender<AllWatched>,
    /// Starts processes; `None`: this worker offers neither `process` nor `container`.
    pub spawner: Option<Spawner>,
    /// Does it offer `process`?
    pub processes: bool,
    /// Containers; `None`: this worker does not offer `container`.
    pub containers: Option<Arc<Containers>>,
    /// Machines; `None`: this worker does not offer `microvm`.
    pub machines: Option<Arc<Machines>>,
    /// Limits.
    pub cgroups: Option<Arc<Cgroups>>,
    /// Who is told of spans.
    pub observer: Observing,
}

struct Slot {
    orders: mpsc::Sender<SlotOrder>,
    stopper: Stopper,
}

/// The loop's state.
pub struct Driver<B, O> {
    parts: Parts<B, O>,
    core: Core,
    worker: WorkerId,
    begin: Instant,
    slots: BTreeMap<u32, Slot>,
    jobs: BTreeMap<JobId, (u64, Arc<Job>)>,
    traces: Traces,
    job_clock: u64,
    heard: mpsc::Sender<Heard>,
    hearing: mpsc::Receiver<Heard>,
    actions: Vec<Action>,
    todo: VecDeque<Action>,
    last_beat: Option<JoinHandle<()>>,
    exit: bool,
}

impl<B: Bus, O: Objects> Driver<B, O> {
    /// A worker about to live for the first time.
    pub fn new(config: CoreConfig, parts: Parts<B, O>) -> Self {
        let worker = config.worker.clone();
        let (heard, hearing) = mpsc::channel(EVENTS_MAX);
        Self {
            parts,
            core: Core::new(config, fresh_incarnation(), 0),
            worker,
            begin: Instant::now(),
            slots: BTreeMap::new(),
            jobs: BTreeMap::new(),
            traces: Traces::default(),
            job_clock: 0,
            heard,
            hearing,
            actions: Vec::new(),
            todo: VecDeque::new(),
            last_beat: None,
            exit: false,
        }
    }

    /// Lives until told to leave.
    pub async fn live(
        mut self,
        mut work: mpsc::Receiver<Incoming>,
        mut watches: mpsc::Receiver<(JobId, Watch)>,
        mut wishes: Wishes,
        status: watch::Sender<Status>,
    ) {
        tracing::info!(worker = %self.worker, incarnation = self.core.incarnation().0, "worker begins");
        self.feed(Input::Tick, None).await;
        while !self.exit {
            let wakeup = self.core.wakeup_ms().map(|at| self.begin + Duration::from_millis(at));
            tokio::select! {
                Some(input) = self.parts.events.recv() => self.feed(input, None).await,
                Some(heard) = self.hearing.recv() => self.on_heard(heard).await,
                Some(incoming) = work.recv() => self.on_work(incoming).await,
                Some((job, watch)) = watches.recv() => self.watch(job, &watch),
                wish = wishes.next() => match wish {
                    Wish::Drain => {
                        self.keep_none();
                        self.feed(Input::Drain, None).await;
                    }
                    Wish::Stop => {
                        self.keep_none();
                        self.feed(Input::Stop, None).await;
                    }
                },
                () = sleep_until(wakeup), if wakeup.is_some() => self.feed(Input::Tick, None).await,
            }
            status.send_replace(Status {
                opened: true,
                incarnation: self.core.incarnation().0,
                joined: self.core.is_joined(),
                running: self.core.running(),
                bundles: self.core.held(),
                unsent_bytes: self.core.unsent_bytes(),
                totals: self.core.totals(),
            });
        }
        if let Some(beat) = self.last_beat.take() {
            // The answer to the beat before may have ended the loop while this one is on its way; its own answer nobody hears.
            self.hearing.close();
            let _ = tokio::time::timeout(LAST_BEAT_TIME, beat).await;
        }
        tracing::info!(worker = %self.worker, "worker ends");
    }

    /// A result must not say that a machine is kept which goes with the worker.
    fn keep_none(&self) {
        if let Some(machines) = &self.parts.machines {
            machines.kept.refuse();
        }
    }

    fn now_ms(&self) -> u64 {
        u64::try_from(self.begin.elapsed().as_millis()).unwrap_or(u64::MAX)
    }

    async fn on_work(&mut self, incoming: Incoming) {
        match wire::decode::<WorkMessage>("work message", &incoming.bytes) {
            Ok(message) => {
                if let (Some(job), Some(trace)) = (message.only_job(), incoming.trace) {
                    self.traces.note(job, trace);
                }
                self.feed(Input::Work(message), incoming.reply).await;
            }
            Err(why) => tracing::error!(%why, "work message dropped"),
        }
    }

    async fn on_heard(&mut self, heard: Heard) {
        match heard {
            Heard::Core(input) => self.feed(input, None).await,
            Heard::Job(job, loaded) => {
                let answer = match *loaded {
                    Ok(loaded) => {
                        let facts = loaded.facts();
                        self.keep_job(loaded);
                        JobAnswer::Known(facts)
                    }
                    Err(why) => {
                        tracing::warn!(%why);
                        match why {
                            JobError::Bus { .. } | JobError::Storage { .. } | JobError::Unpinned(_) => JobAnswer::NoAnswer,
                            JobError::Missing(_) => JobAnswer::Missing,
                            JobError::Unusable { .. } => JobAnswer::Unusable(why.to_string()),
                        }
                    }
                };
                self.feed(Input::Job { job, answer }, None).await;
            }
        }
    }

    fn keep_job(&mut self, job: Job) {
        self.job_clock += 1;
        if let Some(trace) = job.trace {
            self.traces.note(job.id, trace);
        }
        self.jobs.insert(job.id, (self.job_clock, Arc::new(job)));
        while self.jobs.len() > JOBS_KEPT {
            let Some(oldest) = self.jobs.iter().min_by_key(|(_, (used, _))| *used).map(|(id, _)| *id) else { break };
            self.jobs.remove(&oldest);
        }
    }

    /// Gives an input to the core and does everything that comes of it. `reply`: where the answer to a work message goes.
    async fn feed(&mut self, input: Input, reply: Option<String>) {
        let mut reply = reply;
        self.step(input);
        let mut turn = 0;
        while let Some(action) = self.todo.pop_front() {
            self.perform(action, &mut reply);
            turn += 1;
            if turn % ACTIONS_PER_TURN == 0 {
                tokio::task::yield_now().await;
            }
        }
    }

    fn step(&mut self, input: Input) {
        self.core.handle(self.now_ms(), input, &mut self.actions);
        self.todo.extend(self.actions.drain(..));
    }

    fn perform(&mut self, action: Action, reply: &mut Option<String>) {
        match action {
            Action::Answer(answer) => {
                if let Some(reply) = reply.take() {
                    let bus = self.parts.shared.bus.clone();
                    tokio::spawn(async move {
                        // The leader repeats what isn't answered.
                        let _ = bus.answer(reply, wire::encode(&answer)).await;
                    });
                }
            }
            Action::Beat(beat) => self.beat(&beat),
            Action::FetchJob(job) => self.fetch_job(job),
            // Inline: a million of these must not cost a million messages between tasks.
            Action::Run { slot, name, isolation: Isolation::Null, .. } => {
                self.step(Input::Ended { slot, name, outcome: null::run() });
            }
            Action::Run { slot, name, volumes, .. } => self.run(slot, name, volumes),
            Action::Stop { slot, name, force, timed_out } => {
                if let Some(slot) = self.slots.get(&slot) {
                    slot.stopper.stop(name, force, timed_out);
                }
            }
            Action::Publish { incarnation, publish } => {
                let (bus, worker) = (self.parts.shared.bus.clone(), self.worker.clone());
                let number = publish.number;
                let bytes = Bytes::from_owner(publish.bytes);
                let trace = publish.job.and_then(|job| self.traces.of(job));
                self.ask(async move {
                    match bus.report(&worker, bytes, trace).await {
                        Ok(sequence) => Heard::Core(Input::ReportAcked { incarnation, number, sequence }),
                        Err(why) => {
                            tracing::warn!(%why, number, "report not in the log yet; it is repeated");
                            Heard::Core(Input::ReportFailed { incarnation, number })
                        }
                    }
                });
            }
            Action::Tell(kept) => self.tell(*kept),
            Action::Dropped(why) => tracing::debug!(%why),
            Action::NewLife => {
                let incarnation = fresh_incarnation();
                tracing::warn!(incarnation = incarnation.0, "this life was declared lost; a new one begins");
                self.step(Input::Born(incarnation));
            }
            Action::Exit => self.exit = true,
        }
    }

    /// Tells of an attempt. Nobody can be told of one whose job's trace is unknown.
    fn tell(&self, kept: Kept) {
        if let (Some(observer), Some(job)) = (&self.parts.observer, self.traces.of(kept.job()))
            && observe::is_recorded(&self.parts.observer, &job)
        {
            let now_us = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |since| since.as_micros());
            let now_us = u64::try_from(now_us).unwrap_or(u64::MAX);
            observer.spans(kept.spans(&job, &self.worker, self.now_ms(), now_us));
        }
    }

    /// Waits for an answer beside the loop.
    fn ask(&self, question: impl Future<Output = Heard> + Send + 'static) -> JoinHandle<()> {
        let heard = self.heard.clone();
        tokio::spawn(async move {
            // A loop that has ended wants no answer.
            let _ = heard.send(question.await).await;
        })
    }

    fn beat(&mut self, beat: &Beat) {
        let (bus, worker, incarnation) = (self.parts.shared.bus.clone(), self.worker.clone(), beat.incarnation);
        let bytes = wire::encode(beat);
        let asked = self.ask(async move {
            let answer = bus.beat(&worker, bytes).await.map_err(|e| e.to_string());
            match answer.and_then(|bytes| wire::decode::<BeatAnswer>("beat answer", &bytes).map_err(|e| e.to_string())) {
                Ok(answer) => Heard::Core(Input::BeatAnswered { incarnation, answer }),
                Err(why) => {
                    tracing::debug!(why, "beat not answered");
                    Heard::Core(Input::BeatUnanswered { incarnation })
                }
            }
        });
        self.last_beat = beat.leaving.then_some(asked);
    }

    fn fetch_job(&mut self, job: JobId) {
        if let Some((used, known)) = self.jobs.get_mut(&job) {
            self.job_clock += 1;
            *used = self.job_clock;
            let answer = JobAnswer::Known(known.facts());
            self.step(Input::Job { job, answer });
            return;
        }
        let (bus, objects) = (self.parts.shared.bus.clone(), self.parts.shared.objects.clone());
        let trace = self.traces.of(job);
        self.ask(async move { Heard::Job(job, Box::new(Job::load(&bus, &objects, job, trace).await)) });
    }

    fn run(&mut self, slot: u32, name: AttemptName, given: Vec<Given>) {
        let refused = |why: &str| Input::Ended {
            slot,
            name,
            outcome: Outcome::failed(volley_jobspecs::failure::FailureClass::RestoreFailed, why.to_owned()),
        };
        let Some((_, job)) = self.jobs.get(&name.job) else {
            return self.step(refused("the worker forgot the job before its task began"));
        };
        let order = SlotOrder { name, job: Arc::clone(job), given };
        let Parts { shared, cgroups, spawner, processes, containers, machines, .. } = &self.parts;
        let place = self.slots.entry(slot).or_insert_with(|| {
            let (stopper, signal) = stop_signal();
            // One at a time: the core gives a slot its next attempt when the last has ended.
            let (orders, receiver) = mpsc::channel(1);
            let process = spawner
                .clone()
                .filter(|_| *processes)
                .map(|spawner| ProcessMachine::new(slot, spawner, cgroups.clone()).hiding(&shared.dir.with_file_name("volumes")));
            let container = containers.clone().zip(spawner.clone());
            let container = container.map(|(containers, spawner)| ContainerMachine::new(slot, containers, spawner, cgroups.clone()));
            let tiers = Tiers::new(process, container, machines.clone().map(MicrovmMachine::new));
            tokio::spawn(Executor::new(slot, shared.clone(), tiers, signal).serve(receiver));
            Slot { orders, stopper }
        });
        if place.orders.try_send(order).is_err() {
            self.slots.remove(&slot);
            self.step(refused("the slot's task ended; the slot begins anew"));
        }
    }

    /// Somebody watches a job: its output is sent for a while.
    fn watch(&self, job: JobId, watch: &Watch) {
        let now = Instant::now();
        self.parts.watched.send_modify(|watched| {
            let mut kept: BTreeMap<JobId, Watched> = watched.iter().filter(|(_, w)| w.until > now).map(|(j, w)| (*j, w.clone())).collect();
            if kept.len() < WATCHED_MAX || kept.contains_key(&job) {
                kept.entry(job).or_insert_with(|| Watched::new(now)).renew(now, watch.held);
            }
            *watched = Arc::new(kept);
        });
    }
}

async fn sleep_until(at: Option<Instant>) {
    match at {
        Some(at) => tokio::time::sleep_until(at.into()).await,
        None => std::future::pending().await,
    }
}

/// A life's name: random, so that no two lives of any worker are ever mistaken for each other.
fn fresh_incarnation() -> Incarnation {
    let mut bytes = [0; 8];
    if getrandom::fill(&mut bytes).is_err() {
        // A kernel without randomness is not one we run on; time and pid are still unique on this host.
        let nanos = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).map_or(0, |d| d.as_nanos());
        return Incarnation(u64::try_from(nanos & u128::from(u64::MAX)).unwrap_or(0) ^ u64::from(std::process::id()));
    }
    Incarnation(u64::from_le_bytes(bytes))
}
