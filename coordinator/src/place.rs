//! place: ready tasks and free capacity become one list of assignments a round.
//!
//! Owns the order (priority, then fair share by tenant and job, then fit, then avoiding the worker where a task failed, then who has its volumes
//! in a cache), the size of bundles and the judgement of workers. Runs on the leader only: its decisions are records, so it may use clocks and floats,
//! and may differ between builds. Does not own what `apply` makes of them (`assign`).

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet};

use volley_jobspecs::failure::FailureClass;
use volley_jobspecs::ids::{AttemptName, JobId, TenantId, WorkerId};
use volley_jobspecs::wire::record::Assignment;
use volley_jobspecs::wire::report::Ending;
use volley_jobspecs::wire::work::YOUNG_BUNDLE_MS_MAX;

use crate::split::Waiting;
use crate::state::State;
use crate::state::effects::AttemptRow;
use crate::state::job::Job;
use crate::state::worker::{self, BUNDLES_PER_SLOT, Bundle, Promised, Worker};
use crate::volumes;

mod measure;
mod warm;
pub use measure::{Conduct, Durations};
use warm::Warm;

/// A bundle aims at this much work, in milliseconds (DESIGN §5): a hundred times the cost of a message, short enough to rebalance.
pub const BUNDLE_MS: u64 = 100;
/// Most tasks in a bundle.
pub const BUNDLE_TASKS_MAX: u32 = 256;
/// A bundle may wait at a worker only if it is expected to take no longer than this, in milliseconds: behind a long task it would
/// wait although another worker is free.
pub const WAITING_BUNDLE_MS_MAX: u64 = 1_000;
/// Assignments in one round: with the runs below, about a quarter of the largest message.
pub const ROUND_ASSIGNMENTS_MAX: usize = 2_048;
/// Runs of tasks in one round, for the same reason.
pub const ROUND_RUNS_MAX: usize = 16_384;
/// Failed tasks whose worker is remembered; beyond that the oldest are forgotten and may meet the same worker again.
pub const AVOID_MAX: usize = 100_000;
/// How much busier than the least busy one a worker that has a task's volumes in its cache may be, in thousandths of its slots, and be taken all the same: a
/// cold cache costs tens of milliseconds, a crowded worker may cost more.
const WARM_LOAD_MAX: u64 = 500;

/// What the leader has learnt and keeps from round to round. Losing it costs a little speed, never correctness.
#[derive(Debug)]
pub struct Scheduler {
    bundle_ms: u64,
    bundle_tasks_max: u32,
    durations: BTreeMap<JobId, Durations>,
    starts: BTreeMap<JobId, (f64, u64)>,
    avoid: BTreeMap<(JobId, u32), WorkerId>,
    conduct: BTreeMap<WorkerId, Conduct>,
    warm: Warm,
}

impl Scheduler {
    /// One that has learnt nothing. For the arguments see [`BUNDLE_MS`] and [`BUNDLE_TASKS_MAX`].
    #[must_use]
    pub fn new(bundle_ms: u64, bundle_tasks_max: u32) -> Self {
        Self {
            bundle_ms,
            bundle_tasks_max,
            durations: BTreeMap::new(),
            starts: BTreeMap::new(),
            avoid: BTreeMap::new(),
            conduct: BTreeMap::new(),
            warm: Warm::default(),
        }
    }

    /// Learns from ended attempts. `state`: with their records applied.
    pub fn learn(&mut self, state: &State, ended: &[(AttemptName, AttemptRow)]) {
        for (name, row) in ended {
            if let Some(job) =
                state.jobs.get(&name.job).filter(|job| row.end.ending == Ending::Succeeded && !job.facts.plan.volumes.is_empty())
            {
                self.warm.ran(state, job, name.index, &row.worker);
            }
            let ran = match row.end.ending {
                Ending::Succeeded => true,
                Ending::Failed(class) => says_something(class),
                Ending::Returned => false,
            };
            if ran {
                let timing = &row.end.timing;
                let took = u64::from(timing.prepare_ms) + u64::from(timing.run_ms) + u64::from(timing.persist_ms);
                self.durations.entry(name.job).or_default().add(took);
            }
            let task = (name.job, name.index);
            match row.end.ending {
                Ending::Failed(class) => {
                    self.avoid.insert(task, row.worker.clone());
                    if row.end.blameless != Some(true) {
                        self.conduct.entry(row.worker.clone()).or_default().add(Some(class));
                    }
                }
                Ending::Succeeded => {
                    self.conduct.entry(row.worker.clone()).or_default().add(None);
                    // Most tasks never failed: the map is usually empty, and then this costs nothing.
                    if !self.avoid.is_empty() {
                        self.avoid.remove(&task);
                    }
                }
                Ending::Returned => {}
            }
        }
        while self.avoid.len() > AVOID_MAX {
            self.avoid.pop_first();
        }
    }

    /// Forgets what belongs to a job that has ended.
    pub fn forget(&mut self, job: JobId) {
        self.durations.remove(&job);
        self.starts.remove(&job);
        let tasks: Vec<_> = self.avoid.range((job, 0)..=(job, u32::MAX)).map(|(task, _)| *task).collect();
        tasks.iter().for_each(|task| _ = self.avoid.remove(task));
    }

    /// Forgets what a worker did: somebody wants it to be given tasks.
    pub fn pardon(&mut self, worker: &WorkerId) {
        self.conduct.remove(worker);
    }

    /// Workers that should get nothing for a while, and for how long, in milliseconds.
    pub fn misbehaving(&mut self) -> Vec<(WorkerId, u64)> {
        let all: (u64, u64) = self.conduct.values().map(Conduct::totals).fold((0, 0), |a, b| (a.0 + b.0, a.1 + b.1));
        let judged = self.conduct.iter_mut().filter_map(|(name, conduct)| Some((name.clone(), conduct.judge(all)?)));
        judged.collect()
    }

    /// Tasks a bundle of this job should have, when `slots` could take its tasks.
    fn bundle_tasks(&self, job: JobId, left: u32, slots: u32) -> u32 {
        let Some(median_ms) = self.durations.get(&job).and_then(Durations::median_ms) else { return 1 };
        let by_time = self.bundle_ms / median_ms.max(1);
        let by_share = left / slots.max(1);
        (by_time.min(u64::from(self.bundle_tasks_max)) as u32).min(by_share).max(1)
    }

    fn may_wait(&self, job: JobId) -> bool {
        let median = self.durations.get(&job).and_then(Durations::median_ms);
        median.is_some_and(|ms| ms <= WAITING_BUNDLE_MS_MAX)
    }

    /// Starts the rate limit leaves at `now_ms` (monotonic).
    fn starts_left(&mut self, job: &Job, now_ms: u64) -> u32 {
        let Some(rate) = job.facts.plan.rate else { return u32::MAX };
        let full = f64::from(rate.count.max(1));
        let (left, at) = self.starts.entry(job.id).or_insert((full.min(1.0_f64.max(full / 10.0)), now_ms));
        let gained = now_ms.saturating_sub(*at) as f64 / rate.per_ms.max(1) as f64 * full;
        *left = (*left + gained).min(full);
        *at = now_ms;
        *left as u32
    }

    fn started(&mut self, job: JobId, count: u32) {
        if let Some((left, _)) = self.starts.get_mut(&job) {
            *left -= f64::from(count);
        }
    }

    /// Does some job wait only for its rate limit, so that a round should be tried again soon?
    #[must_use]
    pub fn rate_limited(&self, state: &State) -> bool {
        state.jobs.values().any(|job| job.facts.plan.rate.is_some() && job.startable() && job.waiting() > 0)
    }
}

struct Candidate<'a> {
    name: &'a WorkerId,
    worker: &'a Worker,
    bundles: u32,
    promised: Promised,
    /// Bundles held that are expected to be over soon, those that wait included; counted when it is first asked for.
    young: Option<u32>,
    /// Such bundles given in this round.
    given_short: u32,
    /// A queue that comes first waits for an idle slot here: what comes behind it gets no waiting place, or no slot would ever be idle.
    reserved: bool,
    /// A queue that comes first needs more than is left here, and waits for it: nothing that comes behind it begins here.
    held: bool,
}

impl Candidate<'_> {
    /// Does a bundle run here that will be over soon? Behind long ones alone nothing should wait.
    fn soon_idle(&mut self, cluster: &Cluster<'_>) -> bool {
        let is_young = |bundle: &&Bundle| {
            cluster.short.contains(&bundle.job) && cluster.state.head.now_ms <= bundle.assigned_ms.saturating_add(YOUNG_BUNDLE_MS_MAX)
        };
        let held = self.worker.bundles.values();
        let young = *self.young.get_or_insert_with(|| held.filter(is_young).count() as u32);
        young + self.given_short > self.bundles.saturating_sub(self.worker.info.slots)
    }

    fn load(&self) -> u64 {
        u64::from(self.bundles) * 1_000 / u64::from(self.worker.info.slots.max(1))
    }
}

struct Queue<'a> {
    job: &'a Job,
    waiting: Waiting<'a>,
    bundles: u32,
    starts: u32,
    /// Some worker has its image, so that those that don't are not asked.
    pinned: bool,
    /// No worker has room to build the template of its machines.
    too_large: bool,
    /// Its tasks write volumes: each is a bundle of its own, so that a volume is free as soon as its task has ended.
    writes: bool,
}

/// One round: who runs what next. `silent` workers get nothing. `now_ms` is monotonic and for rate limits only.
pub fn place(scheduler: &mut Scheduler, state: &State, now_ms: u64, silent: &BTreeSet<WorkerId>) -> Vec<Assignment> {
    let mut candidates: Vec<Candidate<'_>> = Vec::new();
    let takes_more = |w: &Worker| worker::takes_more(w, state.head.now_ms);
    for (name, worker) in state.workers.iter().filter(|(name, w)| takes_more(w) && !silent.contains(*name)) {
        let bundles = worker.bundles.len() as u32;
        candidates.push(Candidate {
            name,
            worker,
            bundles,
            promised: worker.promised,
            young: None,
            given_short: 0,
            reserved: false,
            held: false,
        });
    }
    if candidates.is_empty() {
        return Vec::new();
    }
    let mut by_load: BTreeSet<(u64, usize)> = candidates.iter().enumerate().map(|(at, c)| (c.load(), at)).collect();
    let slots: u32 = state.workers.values().map(|w| w.info.slots).sum();
    let mut shares = Shares::new(scheduler, state, now_ms);
    let mut assignments = Vec::new();
    let short: BTreeSet<JobId> = state.jobs.keys().copied().filter(|job| scheduler.may_wait(*job)).collect();
    let cluster = Cluster { short, slots, state };
    let mut runs = 0;
    while assignments.len() < ROUND_ASSIGNMENTS_MAX && runs < ROUND_RUNS_MAX {
        let Some(mut queue) = shares.pop() else { break };
        let Some((at, assignment)) = fit(scheduler, &mut queue, &mut candidates, &by_load, &cluster) else { continue };
        let candidate = &mut candidates[at];
        by_load.remove(&(candidate.load(), at));
        candidate.bundles += 1;
        candidate.promised.add(&queue.job.facts.plan.needs);
        candidate.given_short += u32::from(cluster.short.contains(&queue.job.id));
        if candidate.bundles < candidate.worker.info.slots * BUNDLES_PER_SLOT {
            by_load.insert((candidate.load(), at));
        }
        runs += assignment.tasks.len();
        queue.bundles += 1;
        let count = assignment.tasks.iter().map(|run| run.count).sum();
        queue.starts = queue.starts.saturating_sub(count);
        scheduler.started(queue.job.id, count);
        assignments.push(assignment);
        // Where all its tasks write one volume, that one is given out now.
        let goes_on = !queue.writes || !volumes::one_at_a_time(&queue.job.facts.plan) && next_is_free(state, &mut queue);
        shares.count(queue.job);
        if goes_on {
            shares.push(queue);
        }
    }
    assignments
}

/// Can the queue's next task be given what it writes?
fn next_is_free(state: &State, queue: &mut Queue<'_>) -> bool {
    queue.waiting.peek().is_some_and(|index| volumes::are_free(&state.volumes, queue.job, index))
}

/// What one round knows of the whole cluster.
struct Cluster<'a> {
    /// Jobs whose tasks are short enough to wait behind others, and to be waited for.
    short: BTreeSet<JobId>,
    slots: u32,
    state: &'a State,
}

/// The least loaded worker that takes the queue's next bundle. When none does only because no slot is idle, those that could are
/// reserved; when one with an idle slot lacks cpu, memory or disk, it is held until it has them.
fn fit(
    scheduler: &Scheduler,
    queue: &mut Queue<'_>,
    candidates: &mut [Candidate<'_>],
    by_load: &BTreeSet<(u64, usize)>,
    cluster: &Cluster<'_>,
) -> Option<(usize, Assignment)> {
    let job = queue.job;
    let needs = &job.facts.plan.needs;
    let next = queue.waiting.peek()?;
    let (pinned, too_large) = (queue.pinned, queue.too_large);
    let could = |c: &Candidate<'_>| {
        let info = &c.worker.info;
        worker::unfit(info, needs).is_empty()
            && !(pinned && worker::lacks_image(info, needs))
            && !worker::too_large_here(info, needs, too_large)
    };
    // The worker where it failed is taken only if no other could ever run it.
    let avoided = scheduler.avoid.get(&(job.id, next)).filter(|bad| candidates.iter().any(|c| c.name != *bad && could(c)));
    let may_wait = cluster.short.contains(&job.id);
    let fits = |c: &mut Candidate<'_>| {
        let idle = c.bundles < c.worker.info.slots;
        !c.held
            && avoided != Some(c.name)
            && (idle || (may_wait && !c.reserved && c.soon_idle(cluster)))
            && could(c)
            && c.promised.fits(needs, &c.worker.info, if idle { 1 } else { BUNDLES_PER_SLOT })
    };
    let least = by_load.iter().map(|(_, at)| *at).find(|at| fits(&mut candidates[*at]));
    let warmer = least.and_then(|least| warm_place(scheduler, cluster.state, (job, next), candidates, least, fits));
    let Some(at) = warmer.or(least) else {
        if !may_wait {
            let busy = |c: &Candidate<'_>| c.bundles >= c.worker.info.slots && avoided != Some(c.name) && could(c);
            candidates.iter_mut().filter(|c| busy(c)).for_each(|c| c.reserved = true);
        }
        // One is enough, and it stays the same: with nothing new it becomes the least loaded.
        let filling = |c: &Candidate<'_>| c.bundles < c.worker.info.slots && avoided != Some(c.name) && could(c);
        let hold = by_load.iter().map(|(_, at)| *at).find(|at| !candidates[*at].held && filling(&candidates[*at]));
        if let Some(candidate) = hold.and_then(|at| candidates.get_mut(at)) {
            candidate.held = true;
        }
        return None;
    };
    let alone = |index| scheduler.avoid.contains_key(&(job.id, index));
    let size = if queue.writes { 1 } else { scheduler.bundle_tasks(job.id, queue.waiting.left(), cluster.slots) }.min(queue.starts);
    let tasks = queue.waiting.take(size, alone);
    let worker = &candidates[at];
    let assignment = Assignment { worker: worker.name.clone(), incarnation: worker.worker.incarnation, job: job.id, tasks };
    (!assignment.tasks.is_empty()).then_some((at, assignment))
}

/// A worker with an idle slot that has the task's volumes in its cache and is hardly busier than the least busy one that takes it.
fn warm_place(
    scheduler: &Scheduler,
    state: &State,
    (job, index): (&Job, u32),
    candidates: &mut [Candidate<'_>],
    least: usize,
    fits: impl Fn(&mut Candidate<'_>) -> bool,
) -> Option<usize> {
    if job.facts.plan.volumes.is_empty() {
        return None;
    }
    let load_max = candidates.get(least)?.load() + WARM_LOAD_MAX;
    scheduler.warm.workers(state, job, index).into_iter().find_map(|name| {
        // They are in the order of their names, as the state has them.
        let at = candidates.binary_search_by(|candidate| candidate.name.cmp(name)).ok()?;
        let candidate = candidates.get_mut(at)?;
        (candidate.bundles < candidate.worker.info.slots && candidate.load() <= load_max && fits(candidate)).then_some(at)
    })
}

/// Jobs that may start something, by priority class, tenant and job share.
struct Shares<'a> {
    classes: BTreeMap<Reverse<i16>, BTreeMap<&'a TenantId, BTreeMap<(u64, JobId), Queue<'a>>>>,
    tenants: BTreeMap<&'a TenantId, (u32, u32, Option<u32>)>,
}

impl<'a> Shares<'a> {
    fn new(scheduler: &mut Scheduler, state: &'a State, now_ms: u64) -> Self {
        let mut shares = Self { classes: BTreeMap::new(), tenants: BTreeMap::new() };
        for job in state.jobs.values() {
            let policy = state.tenants.get(&job.facts.tenant).map(|t| &t.policy);
            let weight = policy.map_or(100, |p| p.weight.max(1));
            shares.tenants.entry(&job.facts.tenant).or_insert((0, weight, policy.and_then(|p| p.concurrency))).0 += job.bundles;
            if job.startable() && job.waiting() > 0 {
                let starts = scheduler.starts_left(job, now_ms);
                let pinned = worker::image_is_somewhere(&state.workers, &job.facts.plan.needs);
                let too_large = worker::is_too_large(&state.workers, &job.facts.plan.needs);
                let writes = volumes::written(&job.facts.plan).next().is_some();
                let mut queue = Queue { job, waiting: Waiting::new(job), bundles: job.bundles, starts, pinned, too_large, writes };
                if !writes || next_is_free(state, &mut queue) {
                    shares.push(queue);
                }
            }
        }
        shares
    }

    fn push(&mut self, mut queue: Queue<'a>) {
        let plan = &queue.job.facts.plan;
        let full = plan.concurrency.is_some_and(|max| queue.bundles >= max);
        if full || queue.starts == 0 || queue.waiting.peek().is_none() {
            return;
        }
        let share = u64::from(queue.bundles) * 1_000_000 / u64::from(plan.weight.max(1));
        let class = self.classes.entry(Reverse(plan.priority)).or_default();
        class.entry(&queue.job.facts.tenant).or_default().insert((share, queue.job.id), queue);
    }

    /// A job was given one bundle more.
    fn count(&mut self, job: &Job) {
        if let Some((bundles, _, _)) = self.tenants.get_mut(&job.facts.tenant) {
            *bundles += 1;
        }
    }

    /// The queue that is furthest behind its share, in the highest class.
    fn pop(&mut self) -> Option<Queue<'a>> {
        loop {
            let mut class = self.classes.first_entry()?;
            let tenants = class.get_mut();
            let open = tenants.iter().filter(|(name, queues)| {
                let tenant = self.tenants.get(*name);
                !queues.is_empty() && tenant.is_none_or(|(bundles, _, max)| max.is_none_or(|max| *bundles < max))
            });
            let share = |name: &TenantId| {
                self.tenants.get(name).map_or(0, |(bundles, weight, _)| u64::from(*bundles) * 1_000_000 / u64::from(*weight))
            };
            let Some(name) = open.map(|(name, _)| *name).min_by_key(|name| (share(name), *name)) else {
                class.remove();
                continue;
            };
            return tenants.get_mut(name).and_then(|queues| queues.pop_first()).map(|(_, queue)| queue);
        }
    }
}

/// Does a failure say anything about how tasks fare on the worker? Attempts that were cancelled don't, nor do those of a host that was
/// lost: that was one event, however many attempts it ended, and the life that follows has done nothing wrong yet.
fn says_something(class: FailureClass) -> bool {
    !matches!(class, FailureClass::HostLost | FailureClass::Cancelled)
}

/// Classes that speak against the worker rather than the task. Not failures of storage: a bucket that is away, or the server of a spec's
/// input, is away for all workers. Nor a guest that was lost: whoever is root in one can end it, and would keep workers from everybody else; nor a
/// start that took too long: the spec says how long that is, down to a millisecond. One that meets them alone is judged by that.
fn blames_worker(class: FailureClass) -> bool {
    matches!(class, FailureClass::RestoreFailed)
}

#[cfg(test)]
mod tests;
