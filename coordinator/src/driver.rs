//! The driver: the only loop of a coordinator.
//!
//! Owns the core, and moves bytes between it and the edges: log batches in, actions out, requests answered. Makes no decision about
//! a job. Does not own the API (`api`), which speaks to it through a [`Handle`].

use std::collections::HashMap;
use std::sync::Arc;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use async_nats::{HeaderMap, Subject};
use bytes::Bytes;
use futures::StreamExt;
use tokio::sync::{broadcast, mpsc, oneshot, watch};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use volley_jobspecs::ids::{JobId, WorkerId};
use volley_jobspecs::observe::Observing;
use volley_jobspecs::subjects;
use volley_jobspecs::wire::record::{Decided, Decision, Record, Trailing};
use volley_jobspecs::wire::work::{Beat, JobForWorker, WorkAnswer};
use volley_jobspecs::wire::{self};

use crate::api::panics;
use crate::apply::ApplyError;
use crate::core::{Core, CoreError, Message};
use crate::io::lease;
use crate::io::log::{Fenced, Log, LogError};
use crate::io::rocks::RocksRows;
use crate::leader::{Action, Leader, Tuning};
use crate::metrics::Metrics;
use crate::state::effects::{Answer, Effects};
use crate::state::rows;
use crate::state::{Head, State};
use crate::trace;
use crate::trail::{Keeper, Trailer};
use crate::volumes::Work;

mod handle;
mod observe;
pub use handle::{Event, Handle, RequestError};
use observe::Watching;

/// Messages that may wait for the driver: a thousand workers' beats and answers.
const INPUTS_WAITING: usize = 4_096;
/// Inputs taken before the leader is polled and the log looked at again.
const INPUTS_PER_TURN: usize = 256;
/// Events an SSE client may fall behind before it must read the state anew.
const EVENTS_KEPT: usize = 4_096;
/// Pause after a refused Lead or an unknown outcome, before the next try.
const LEAD_PAUSE: Duration = Duration::from_millis(200);
/// Pause between two lines that say the same.
const SAY_AGAIN: Duration = Duration::from_secs(10);

/// Why a coordinator ended.
#[derive(Debug, thiserror::Error)]
pub enum DriverError {
    /// The log can't be used.
    #[error(transparent)]
    Log(#[from] LogError),
    /// The core can't go on.
    #[error(transparent)]
    Core(#[from] CoreError),
    /// A subscription failed.
    #[error("NATS refused a subscription: {0}; may this user subscribe to volley.> ?")]
    Subscribe(String),
}

impl DriverError {
    /// Would this coordinator be well again with its rows dropped and built anew?
    #[must_use]
    pub fn wants_rebuild(&self) -> bool {
        match self {
            Self::Core(CoreError::Digest { .. }) => true,
            Self::Core(CoreError::Rows(error)) => error.is_damage(),
            Self::Log(_) | Self::Core(_) | Self::Subscribe(_) => false,
        }
    }

    /// Is what comes next no longer in the log, so that a checkpoint must be loaded?
    #[must_use]
    pub fn wants_checkpoint(&self) -> bool {
        matches!(self, Self::Log(LogError::Trimmed { .. }))
    }
}

/// A closure that reads the core.
type Read = Box<dyn FnOnce(&State, Option<&Leader>, u64) + Send>;

/// What comes to the driver besides the log.
pub(crate) enum Input {
    Beat(Beat, Option<Subject>),
    Answer(WorkerId, WorkAnswer),
    JobRequest(JobId, Subject),
    Read(Read),
    Await(String, oneshot::Sender<Answer>),
    Published { refused: bool },
    Trailed(JobId, Trailing, bool),
    Worked(Work, Option<Decision>),
    Record(Decision),
    LeadPublished,
}

/// What a driver needs.
pub struct Parts {
    /// The coordinator's name, made unique per start.
    pub name: String,
    /// Core NATS.
    pub client: async_nats::Client,
    /// Counts connections.
    pub connections: watch::Receiver<u64>,
    /// The log.
    pub log: Log,
    /// RocksDB.
    pub rows: RocksRows,
    /// What trails a job's end.
    pub trailer: Arc<dyn Trailer>,
    /// What volumes need in the bucket.
    pub keeper: Arc<dyn Keeper>,
    /// Tuning.
    pub tuning: Tuning,
    /// Copies of the lease's bucket.
    pub replicas: usize,
    /// What is counted.
    pub metrics: Metrics,
    /// Who is told of spans.
    pub observer: Observing,
}

/// Starts a coordinator. The handle is of use at once; the task ends with `stop` or an error.
///
/// # Errors
/// [`DriverError`] when the state can't be opened or a subscription fails.
pub async fn start(
    parts: Parts,
    stop: CancellationToken,
) -> Result<(Handle, tokio::task::JoinHandle<Result<(), DriverError>>), DriverError> {
    let mut core = Core::open(&parts.rows).map_err(CoreError::from)?;
    let (_, last, _, _) = parts.log.bounds().await?;
    core.pass_over(parts.log.skips().await?);
    let Head { sequence: applied, level, .. } = core.state().head;
    if level > wire::LEVEL {
        return Err(CoreError::Apply(ApplyError::Level { sequence: applied, level }).into());
    }
    if applied > last {
        return Err(LogError::Behind { last, applied }.into());
    }
    let (inputs, receiver) = mpsc::channel(INPUTS_WAITING);
    let (events, _) = broadcast::channel(EVENTS_KEPT);
    let (progress, applied) = watch::channel(applied);
    subscribe(&parts, &inputs).await?;
    let handle = Handle::new(inputs.clone(), &parts, events.clone(), applied);
    let driver = Driver {
        core,
        started: Instant::now(),
        waiting: HashMap::new(),
        inputs,
        events,
        progress,
        leading: false,
        lead_sent: None,
        publishing: false,
        watching: Watching::new(parts.observer.clone()),
        parts,
    };
    Ok((handle, tokio::spawn(driver.run(receiver, stop))))
}

async fn subscribe(parts: &Parts, inputs: &mpsc::Sender<Input>) -> Result<(), DriverError> {
    let refused = |e: async_nats::SubscribeError| DriverError::Subscribe(e.to_string());
    let mut beats = parts.client.subscribe(subjects::BEATS_ALL).await.map_err(refused)?;
    let mut jobs = parts.client.subscribe(subjects::JOBS_ALL).await.map_err(refused)?;
    let mut answers = parts.client.subscribe(format!("{}.*", ack_prefix(&parts.name))).await.map_err(refused)?;
    let inputs = inputs.clone();
    tokio::spawn(async move {
        loop {
            let input = tokio::select! {
                Some(message) = beats.next() => wire::decode("beat", &message.payload).ok().map(|beat| Input::Beat(beat, message.reply)),
                Some(message) = answers.next() => {
                    let worker = message.subject.rsplit('.').next().and_then(|name| WorkerId::new(name).ok());
                    let answer = wire::decode("work answer", &message.payload).ok();
                    worker.zip(answer).map(|(worker, answer)| Input::Answer(worker, answer))
                }
                Some(message) = jobs.next() => {
                    let job = message.subject.rsplit('.').next().and_then(|id| id.parse().ok());
                    job.zip(message.reply).map(|(job, reply)| Input::JobRequest(job, reply))
                }
                else => return,
            };
            if let Some(input) = input
                && inputs.send(input).await.is_err()
            {
                return;
            }
        }
    });
    Ok(())
}

fn ack_prefix(name: &str) -> String {
    format!("volley.ack.{name}")
}

/// Wall clock, in microseconds since 1970.
#[must_use]
pub fn wall_us() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_micros() as u64)
}

/// Wall clock, in milliseconds since 1970.
#[must_use]
pub fn wall_ms() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_millis() as u64)
}

struct Driver {
    core: Core,
    parts: Parts,
    started: Instant,
    /// Requests that wait for their record to be applied, by request id.
    waiting: HashMap<String, oneshot::Sender<Answer>>,
    inputs: mpsc::Sender<Input>,
    events: broadcast::Sender<Event>,
    progress: watch::Sender<u64>,
    leading: bool,
    lead_sent: Option<Instant>,
    publishing: bool,
    watching: Watching,
}

impl Driver {
    fn now_ms(&self) -> u64 {
        self.started.elapsed().as_millis() as u64
    }

    async fn run(mut self, mut inputs: mpsc::Receiver<Input>, stop: CancellationToken) -> Result<(), DriverError> {
        let mut records = self.parts.log.read(self.core.state().head.sequence + 1);
        let (mut lease, lease_task) = lease::hold(self.parts.log.context().clone(), self.parts.name.clone(), self.parts.replicas);
        let mut connections = self.parts.connections.clone();
        let result = loop {
            let wake = self.wake(&lease);
            tokio::select! {
                () = stop.cancelled() => break Ok(()),
                batch = records.recv() => match batch {
                    Some(Ok(batch)) => {
                        // A request waits here before its record is published, but both may be ready at once: applied first, the
                        // record's answer would find nobody waiting.
                        while let Ok(input) = inputs.try_recv() {
                            self.input(input);
                        }
                        if let Err(error) = self.apply(&batch) { break Err(error.into()) }
                    }
                    Some(Err(error)) => break Err(error.into()),
                    None => break Ok(()),
                },
                Some(input) = inputs.recv() => {
                    self.input(input);
                    for _ in 0..INPUTS_PER_TURN {
                        let Ok(input) = inputs.try_recv() else { break };
                        self.input(input);
                    }
                }
                Ok(()) = lease.changed() => {}
                Ok(()) = connections.changed() => {
                    let now_ms = self.now_ms();
                    if let Some((leader, _)) = self.core.leader() {
                        leader.reconnected(now_ms);
                    }
                }
                () = tokio::time::sleep_until(wake) => {}
            }
            self.lease(*lease.borrow_and_update());
            self.lead();
        };
        // Dropping the receiver makes the lease's task give the key back, so that another can lead at once.
        drop(lease);
        _ = tokio::time::timeout(lease::RENEW, lease_task).await;
        result
    }

    fn wake(&mut self, lease: &watch::Receiver<Option<Instant>>) -> Instant {
        let now_ms = self.now_ms();
        let base = self.started;
        let mut wake = Instant::now() + Duration::from_secs(1);
        if let Some((leader, state)) = self.core.leader() {
            wake = wake.min(base + Duration::from_millis(leader.wake_at(state, now_ms)));
        }
        match *lease.borrow() {
            Some(until) if self.leading => wake.min(until.max(Instant::now() + Duration::from_millis(1))),
            Some(_) => wake.min(Instant::now() + LEAD_PAUSE),
            None => wake,
        }
    }

    /// Takes and leaves office as the lease says.
    fn lease(&mut self, until: Option<Instant>) {
        let held = until.is_some_and(|until| until > Instant::now());
        match (held, self.leading) {
            (false, true) => self.step_down("its lease ran out"),
            (true, false) if self.lead_sent.is_none_or(|sent| sent.elapsed() > LEAD_PAUSE) => {
                self.lead_sent = Some(Instant::now());
                let (record, after) = self.core.lead_record(&self.parts.name, wall_ms());
                let (log, inputs) = (self.parts.log.clone(), self.inputs.clone());
                let applied = self.core.state().head.sequence;
                tokio::spawn(async move {
                    // A record of the subject that was passed over did not move our own count.
                    let last = log.last_leader().await.ok().flatten().map(|(sequence, _)| sequence);
                    let after = last.filter(|last| *last <= applied).unwrap_or(after);
                    // Refused or unknown: the log will tell; the next try builds on what was applied by then.
                    let fenced = log.publish_fenced(Bytes::from(wire::encode(&record)), after).await;
                    tracing::debug!(?fenced, "asked to lead");
                    _ = inputs.send(Input::LeadPublished).await;
                });
            }
            _ => {}
        }
    }

    fn step_down(&mut self, why: &str) {
        tracing::info!(coordinator = %self.parts.name, why, "no longer leading");
        self.core.leave_office();
        self.leading = false;
        self.publishing = false;
        self.lead_sent = Some(Instant::now());
    }

    fn apply(&mut self, batch: &[Message]) -> Result<(), CoreError> {
        let started = Instant::now();
        let (core, rows) = (&mut self.core, &self.parts.rows);
        // The core is not used again after a panic: the coordinator stops and says which record it was.
        let applied = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| core.apply(rows, batch)));
        let effects =
            applied.unwrap_or_else(|panic| Err(CoreError::Panicked { sequence: self.core.applying(), what: panics::said(&*panic) }))?;
        self.parts.metrics.applied(batch.len(), started.elapsed(), &effects);
        let head = &self.core.state().head;
        if !self.leading && self.lead_sent.is_some() && head.leader == self.parts.name {
            let (term, now_ms) = (head.term, self.now_ms());
            self.core.take_office(wall_ms(), now_ms, self.parts.tuning);
            self.leading = true;
            tracing::info!(coordinator = %self.parts.name, term = term.0, "leading");
        }
        _ = self.progress.send_replace(self.core.state().head.sequence);
        for fx in effects {
            self.tell(fx);
        }
        Ok(())
    }

    fn tell(&mut self, fx: Effects) {
        self.watching.applied(self.core.state(), &fx, self.leading);
        for (request, answer) in fx.answers {
            if let Some(waiter) = self.waiting.remove(&request) {
                _ = waiter.send(answer);
            }
        }
        if self.events.receiver_count() > 0 {
            let sequence = self.core.state().head.sequence;
            for job in fx.jobs {
                let ended = fx.results.iter().filter(|(id, ..)| *id == job).map(|(_, _, _, entry)| *entry).collect();
                // A job that is not in memory has ended.
                let over = self.core.state().job(job).is_none_or(|job| job.progress.ended_ms.is_some());
                _ = self.events.send(Event { sequence, job, ended, over });
            }
        }
    }

    fn input(&mut self, input: Input) {
        let now_ms = self.now_ms();
        match input {
            Input::Beat(beat, reply) => {
                let Some((leader, state)) = self.core.leader() else { return };
                match leader.beat(state, beat, now_ms) {
                    Some(answer) => self.reply(reply, wire::encode(&answer)),
                    None => self.step_down("a worker has heard of a newer leader"),
                }
            }
            Input::Answer(worker, answer) => {
                if let Some((leader, _)) = self.core.leader()
                    && leader.answered(&worker, &answer).is_some()
                {
                    self.step_down("a worker has heard of a newer leader");
                }
            }
            Input::JobRequest(job, reply) => self.job_request(job, reply),
            Input::Read(read) => {
                let now = now_ms;
                match self.core.leader() {
                    Some((leader, state)) => read(state, Some(&*leader), now),
                    None => read(self.core.state(), None, now),
                }
            }
            Input::Await(request, waiter) => {
                // A request whose asker has gone waits for nothing; swept here so that the map stays small.
                self.waiting.retain(|_, waiter| !waiter.is_closed());
                self.waiting.insert(request, waiter);
            }
            Input::Published { refused } => {
                self.publishing = false;
                if refused {
                    self.step_down("the log refused its record: another leads");
                }
            }
            Input::Trailed(job, what, done) => {
                if let Some((leader, state)) = self.core.leader() {
                    leader.trailed(job, what, done);
                    if done {
                        self.watching.trailed(state, job, what);
                    }
                }
            }
            Input::Worked(work, decision) => {
                if let Some((leader, _)) = self.core.leader() {
                    leader.worked(&work, decision);
                }
            }
            Input::Record(decision) => {
                if let Some((leader, _)) = self.core.leader() {
                    leader.record(decision);
                }
            }
            Input::LeadPublished => {}
        }
    }

    /// Any coordinator that knows the job answers; the worker takes the first answer.
    fn job_request(&self, job: JobId, reply: Subject) {
        let found = match self.core.state().job(job) {
            Some(found) => Some((found.facts.clone(), found.progress.pins.clone())),
            None => rows::header(&self.parts.rows, job).ok().flatten().map(|(facts, progress)| (facts, progress.pins)),
        };
        if let Some((facts, pins)) = found {
            let context = trace::of_job(job, &facts);
            let trace = context.map(|context| context.to_string());
            let answer =
                JobForWorker { job, tenant: facts.tenant, plan: facts.plan, spec: facts.spec, trace, pins: pins.unwrap_or_default() };
            self.publish_core(reply, None, context.as_ref().map(observe::header), wire::encode(&answer));
        }
    }

    fn reply(&self, to: Option<Subject>, bytes: Vec<u8>) {
        if let Some(to) = to {
            self.publish_core(to, None, None, bytes);
        }
    }

    /// Core NATS publishes only enqueue; one that can't is as good as lost, which reconciliation is made for.
    fn publish_core(&self, subject: Subject, reply: Option<Subject>, headers: Option<HeaderMap>, bytes: Vec<u8>) {
        let client = self.parts.client.clone();
        let publish = async move {
            match (reply, headers) {
                (Some(reply), Some(headers)) => client.publish_with_reply_and_headers(subject, reply, headers, bytes.into()).await,
                (Some(reply), None) => client.publish_with_reply(subject, reply, bytes.into()).await,
                (None, Some(headers)) => client.publish_with_headers(subject, headers, bytes.into()).await,
                (None, None) => client.publish(subject, bytes.into()).await,
            }
        };
        // The future is ready at once unless the client's queue is full; only then is a task worth its cost.
        let mut publish = Box::pin(publish);
        let waker = futures::task::noop_waker();
        if publish.as_mut().poll(&mut std::task::Context::from_waker(&waker)).is_pending() {
            tokio::spawn(publish);
        }
    }

    /// Lets the leader decide, and does what it says.
    fn lead(&mut self) {
        let now_ms = self.now_ms();
        let Some((leader, state)) = self.core.leader() else { return };
        let polled = Instant::now();
        let actions = leader.poll(state, now_ms);
        if actions.iter().any(|action| matches!(action, Action::Publish { .. })) {
            self.parts.metrics.round_seconds.observe(polled.elapsed().as_secs_f64());
        }
        for action in actions {
            match action {
                Action::Publish { decided, after } => self.publish(decided, after),
                Action::Send(worker, message) => {
                    let reply = format!("{}.{worker}", ack_prefix(&self.parts.name));
                    let headers = observe::header_of_work(self.core.state(), &message);
                    self.publish_core(subjects::work(&worker).into(), Some(reply.into()), headers, wire::encode(&message));
                }
                Action::Trail(job, what) => {
                    let (trailer, inputs) = (self.parts.trailer.clone(), self.inputs.clone());
                    tokio::spawn(async move {
                        let done = trailer.trail(job, what).await;
                        _ = inputs.send(Input::Trailed(job, what, done)).await;
                    });
                }
                Action::Work(work) => {
                    let (keeper, inputs) = (self.parts.keeper.clone(), self.inputs.clone());
                    tokio::spawn(async move {
                        let decision = keeper.keep(work.clone()).await;
                        _ = inputs.send(Input::Worked(work, decision)).await;
                    });
                }
                Action::StepDown => {
                    self.step_down("another leads");
                    return;
                }
            }
        }
    }

    /// Publishes what was decided, until it is known to be in the log or to be refused.
    fn publish(&mut self, decided: Decided, after: u64) {
        self.publishing = true;
        let (log, inputs) = (self.parts.log.clone(), self.inputs.clone());
        let (term, round) = (decided.term, decided.round);
        let bytes = Bytes::from(wire::encode(&Record::Decided(decided)));
        tokio::spawn(async move {
            // Said once and then rarely: a log that takes nothing is asked several times a second, for as long as it lasts.
            let mut said: Option<Instant> = None;
            let mut say = move |why: &dyn std::fmt::Display| {
                if said.is_none_or(|said| said.elapsed() >= SAY_AGAIN) {
                    said = Some(Instant::now());
                    tracing::warn!("can't tell whether our record is in the log, trying again: {why}");
                }
            };
            let refused = loop {
                match log.publish_fenced(bytes.clone(), after).await {
                    Fenced::Written(_) => break false,
                    // Our own message, written though its answer was lost, refuses its repetition.
                    Fenced::Refused => match log.last_leader().await {
                        Ok(last) => break !last.is_some_and(|(_, bytes)| is_ours(&bytes, term, round)),
                        Err(error) => say(&error),
                    },
                    Fenced::Unknown(why) => say(&why),
                }
                if inputs.is_closed() {
                    return;
                }
                tokio::time::sleep(LEAD_PAUSE / 4).await;
            };
            _ = inputs.send(Input::Published { refused }).await;
        });
    }
}

fn is_ours(bytes: &[u8], term: volley_jobspecs::ids::Term, round: u64) -> bool {
    matches!(wire::decode("record", bytes), Ok(Record::Decided(d)) if d.term == term && d.round == round)
}
