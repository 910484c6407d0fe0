//! send: what a worker must be told, and reconciliation of what it says it holds with what the log says.
//!
//! Owns the link to each worker: orders waiting, the one message in flight, what it last took. Nothing here is a fact: all of it is
//! made again from the state and the next beats after a takeover. Does not own when a worker is lost (`leader`).

use std::collections::{BTreeMap, VecDeque};

use volley_jobspecs::ids::{AttemptName, BundleId, Incarnation, JobId, Term};
use volley_jobspecs::wire::record::Run;
use volley_jobspecs::wire::work::{At, Beat, Bundle, KeptMachine, Order, Try, WorkMessage};

use crate::state::State;
use crate::state::job::Job;
use crate::state::task::Phase;
use crate::state::worker::Worker;
use crate::track::open_name;
use crate::volumes;

/// An unanswered message is sent again after this long, in milliseconds.
pub const RESEND_MS: u64 = 1_000;
/// Orders in one message: 128 bundles of 256 tasks are at most half of the largest message.
pub const ORDERS_PER_MESSAGE: usize = 128;

/// The link to one life of one worker.
#[derive(Debug)]
pub struct Link {
    /// Which life.
    pub incarnation: Incarnation,
    /// When it was last heard, by the leader's monotonic clock in milliseconds.
    pub heard_ms: u64,
    /// Does it say that it takes nothing more?
    pub draining: bool,
    /// What its slots were at when it was last heard.
    pub at: Vec<At>,
    /// Machines that it kept then.
    pub kept: Vec<KeptMachine>,
    /// Has it beaten since this leader began? Until then nothing is known of what it holds, and nothing is sent.
    met: bool,
    number: u64,
    in_flight: Option<(WorkMessage, u64)>,
    orders: VecDeque<Order>,
    /// Bundles it was sent by this leader, and in which message; 0: it said itself that it holds it.
    sent: BTreeMap<BundleId, u64>,
    /// What it was told to stop or hand back, by bundle.
    told: BTreeMap<BundleId, (Vec<Run>, bool)>,
}

impl Link {
    /// A link to a worker not heard of yet.
    #[must_use]
    pub fn new(incarnation: Incarnation, now_ms: u64) -> Self {
        Self {
            incarnation,
            heard_ms: now_ms,
            draining: false,
            at: Vec::new(),
            kept: Vec::new(),
            met: false,
            number: 0,
            in_flight: None,
            orders: VecDeque::new(),
            sent: BTreeMap::new(),
            told: BTreeMap::new(),
        }
    }

    /// Queues an order.
    pub fn order(&mut self, order: Order) {
        self.orders.push_back(order);
    }

    /// Queues a bundle that was opened on it.
    pub fn opened(&mut self, state: &State, id: BundleId, worker: &Worker) {
        // Before its first beat everything open is queued at once, by `reconcile`.
        if let Some(bundle) = worker.bundles.get(&id).filter(|_| self.met) {
            self.run(state, id, bundle.job, bundle.indices());
        }
    }

    fn run(&mut self, state: &State, id: BundleId, job: JobId, indices: impl Iterator<Item = u32>) {
        let Some(job) = state.jobs.get(&job) else { return };
        let tasks = tries(job, id, indices);
        if !tasks.is_empty() {
            self.sent.insert(id, u64::MAX);
            let writes = volumes::written(&job.facts.plan).next().is_some();
            let indices = tasks.iter().filter(|_| writes).flat_map(|tries| tries.first..tries.first + tries.count);
            let volumes = indices.flat_map(|index| volumes::given(&state.volumes, job, index)).collect();
            self.order(Order::Run(Bundle { id, job: job.id, tasks, volumes }));
        }
    }

    /// Forgets a bundle that is closed.
    pub fn closed(&mut self, id: BundleId) {
        self.sent.remove(&id);
        self.told.remove(&id);
    }

    /// The message to send now, if there is one: the one in flight again when it was not answered, else the next.
    pub fn next_message(&mut self, term: Term, now_ms: u64) -> Option<WorkMessage> {
        if let Some((message, sent_ms)) = &mut self.in_flight {
            if now_ms < *sent_ms + RESEND_MS {
                return None;
            }
            *sent_ms = now_ms;
            return Some(message.clone());
        }
        if self.orders.is_empty() || !self.met {
            return None;
        }
        self.number += 1;
        let count = self.orders.len().min(ORDERS_PER_MESSAGE);
        let orders: Vec<Order> = self.orders.drain(..count).collect();
        for order in &orders {
            if let Order::Run(bundle) = order {
                self.sent.insert(bundle.id, self.number);
            }
        }
        let message = WorkMessage { incarnation: self.incarnation, term, number: self.number, orders };
        self.in_flight = Some((message.clone(), now_ms));
        Some(message)
    }

    /// It answered that it took messages up to `taken`.
    pub fn answered(&mut self, taken: u64) {
        if self.in_flight.as_ref().is_some_and(|(message, _)| message.number <= taken) {
            self.in_flight = None;
        }
    }

    /// When this link must be looked at again without any event, by the monotonic clock.
    #[must_use]
    pub fn resend_at(&self) -> Option<u64> {
        self.in_flight.as_ref().map(|(_, sent_ms)| sent_ms + RESEND_MS)
    }

    /// Compares what the worker says with the state. Returns attempts it received but neither holds nor reported.
    ///
    /// Only to be called when the state has applied every report the beat says is in the log (`beat.reported`).
    #[must_use]
    pub fn reconcile(&mut self, state: &State, worker: &Worker, beat: &Beat, term: Term) -> Vec<AttemptName> {
        self.met = true;
        let ours = beat.term == term;
        if ours {
            self.answered(beat.taken);
        }
        let held: BTreeMap<BundleId, &Vec<Run>> = beat.held.iter().map(|h| (h.bundle, &h.tasks)).collect();
        let mut lost = Vec::new();
        for (id, bundle) in &worker.bundles {
            // A beat of another term may be older than the one that showed the bundle held: its silence says nothing.
            let taken = self.sent.get(id).is_some_and(|number| ours && *number <= beat.taken);
            match held.get(id) {
                Some(tasks) => {
                    self.sent.entry(*id).or_insert(0);
                    let holds = |index: u32| tasks.iter().any(|run| (run.first..run.first + run.count).contains(&index));
                    let gone = bundle.indices().filter(|index| !holds(*index));
                    lost.extend(gone.filter_map(|index| open_name(state, bundle.job, index, *id)));
                }
                None if taken => lost.extend(bundle.indices().filter_map(|index| open_name(state, bundle.job, index, *id))),
                None if self.sent.contains_key(id) => {}
                None => self.run(state, *id, bundle.job, bundle.indices()),
            }
        }
        for id in held.keys().filter(|id| !worker.bundles.contains_key(*id)) {
            if self.told.insert(*id, (Vec::new(), false)).is_none() {
                self.order(Order::Forget { bundle: *id });
            }
        }
        lost
    }

    /// Tells the worker what the state wants ended of one job's bundles: tasks that have ended are stopped; what has not begun is
    /// handed back when the job is paused or ending, or the worker is draining.
    pub fn tell_ends(&mut self, job: &Job, worker: &Worker) {
        let back = job.progress.paused || job.progress.ending.is_some() || worker.draining;
        for (id, bundle) in worker.bundles.iter().filter(|(_, b)| b.job == job.id) {
            let mut stop = Vec::new();
            let mut open = Vec::new();
            for index in bundle.indices().filter(|index| job.open.get(index).is_some_and(|o| o.bundle == *id)) {
                let ended = job.cell(index).is_some_and(|cell| cell.phase != Phase::Open);
                push(if ended { &mut stop } else { &mut open }, index);
            }
            let told = self.told.get(id);
            if !stop.is_empty() && told.is_none_or(|(told, _)| *told != stop) {
                self.orders.push_back(Order::Stop { bundle: *id, tasks: stop.clone() });
            }
            if back && !open.is_empty() && told.is_none_or(|(_, told)| !told) {
                self.orders.push_back(Order::HandBack { bundle: *id, tasks: open });
            }
            if back || !stop.is_empty() {
                self.told.insert(*id, (stop, back));
            } else {
                self.told.remove(id);
            }
        }
    }
}

/// Does the state want anything of this job's running attempts ended?
#[must_use]
pub fn wants_ends(job: &Job) -> bool {
    !job.open.is_empty() && (job.progress.paused || job.progress.ending.is_some() || job.open.len() as u32 != job.progress.running)
}

fn push(runs: &mut Vec<Run>, index: u32) {
    match runs.last_mut() {
        Some(last) if last.first + last.count == index => last.count += 1,
        Some(_) | None => runs.push(Run { first: index, count: 1 }),
    }
}

/// The open tasks of a bundle with the numbers of their tries.
fn tries(job: &Job, id: BundleId, indices: impl Iterator<Item = u32>) -> Vec<Try> {
    let mut tries: Vec<Try> = Vec::new();
    for index in indices {
        let Some(open) = job.open.get(&index).filter(|open| open.bundle == id) else { continue };
        let number = u32::from(open.number);
        match tries.last_mut() {
            Some(last) if last.first + last.count == index && last.number == number => last.count += 1,
            Some(_) | None => tries.push(Try { first: index, count: 1, number }),
        }
    }
    tries
}
