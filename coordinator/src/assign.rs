//! assign: a bundle from the leader becomes attempts, as far as it still holds.
//!
//! Owns the checks: task still ready, worker's life the same, capacity and limits free. What no longer holds is void. Does not own
//! the choice of worker and tasks: that is `place`, on the leader only.

use volley_jobspecs::ids::{AttemptName, BundleId, JobId, WorkerId};
use volley_jobspecs::wire::record::{Assignment, Run};

use crate::state::effects::Effects;
use crate::state::job::{Job, OpenAttempt};
use crate::state::task::{PAGE_TASKS, Phase};
use crate::state::worker::{self, BUNDLES_PER_SLOT, Bundle};
use crate::state::{State, count_bundles};
use crate::{timers, volumes};

/// Assignments of one decision; their places, and so the ids of their bundles, begin behind those of earlier decisions of the record.
pub const PLACES_PER_DECISION: u32 = 1 << 16;

/// Applies the assignments of one decision.
pub fn assign(state: &mut State, sequence: u64, decision: u32, assignments: &[Assignment], fx: &mut Effects) {
    for (place, assignment) in (decision * PLACES_PER_DECISION..).zip(assignments) {
        open(state, BundleId { sequence, place }, assignment, fx);
    }
}

fn open(state: &mut State, id: BundleId, assignment: &Assignment, fx: &mut Effects) {
    let asked: u64 = assignment.tasks.iter().map(|run| u64::from(run.count)).sum();
    let taken = if allowed(state, assignment) { take(state, id, assignment, fx) } else { Default::default() };
    let count: u32 = taken.iter().map(|run| run.count).sum();
    state.head.void_tasks += asked - u64::from(count);
    if count == 0 {
        return;
    }
    let (Some(worker), Some(job)) = (state.workers.get_mut(&assignment.worker), state.jobs.get_mut(&assignment.job)) else { return };
    let needs = job.facts.plan.needs.clone();
    job.bundles += 1;
    count_bundles(&mut state.tenant_bundles, &job.facts.tenant, 1, true);
    job.progress.started_ms.get_or_insert(state.head.now_ms);
    timers::watch_queue(job, &state.head, &mut state.timers);
    worker.promised.add(&needs);
    worker.bundles.insert(id, Bundle { job: job.id, tasks: taken, left: count, assigned_ms: state.head.now_ms, needs });
    fx.touched_jobs.insert(job.id);
    fx.workers.insert(assignment.worker.clone());
    fx.opened.push((assignment.worker.clone(), id, job.id));
}

/// May a bundle of this job be opened on this worker now?
fn allowed(state: &State, assignment: &Assignment) -> bool {
    let (Some(worker), Some(job)) = (state.workers.get(&assignment.worker), state.jobs.get(&assignment.job)) else { return false };
    let plan = &job.facts.plan;
    let tenant_max = state.tenants.get(&job.facts.tenant).and_then(|t| t.policy.concurrency);
    worker.incarnation == assignment.incarnation
        && worker::takes_more(worker, state.head.now_ms)
        && worker::unfit(&worker.info, &plan.needs).is_empty()
        && worker.promised.fits(&plan.needs, &worker.info, BUNDLES_PER_SLOT)
        && job.startable()
        && plan.concurrency.is_none_or(|max| job.bundles < max)
        && tenant_max.is_none_or(|max| state.bundles_of(&job.facts.tenant) < max)
}

/// Opens an attempt for every task of the assignment that still waits. Returns them as runs.
fn take(state: &mut State, id: BundleId, assignment: &Assignment, fx: &mut Effects) -> Vec<Run> {
    let (volumes, now_ms) = (&mut state.volumes, state.head.now_ms);
    let Some(job) = state.jobs.get_mut(&assignment.job) else { return Vec::new() };
    let writes = volumes::written(&job.facts.plan).next().is_some();
    let mut taken: Vec<Run> = Vec::new();
    for run in &assignment.tasks {
        let end = run.first.saturating_add(run.count).min(job.tasks());
        for index in run.first..end {
            if writes && !volumes::are_free(volumes, job, index) {
                continue;
            }
            let Some(number) = take_one(job, id, index, fx) else { continue };
            if writes {
                let name = AttemptName { job: job.id, stage: 0, index, number: u32::from(number), sequence: id.sequence };
                volumes::give(volumes, now_ms, job, name, fx);
            }
            match taken.last_mut() {
                Some(last) if last.first + last.count == index => last.count += 1,
                Some(_) | None => taken.push(Run { first: index, count: 1 }),
            }
        }
    }
    taken
}

/// Opens one, and returns the number of its try.
fn take_one(job: &mut Job, id: BundleId, index: u32, fx: &mut Effects) -> Option<u16> {
    // Fresh tasks are given out in order, so that "never given out" is one number; a leader that skips ahead is wrong.
    let fresh = index == job.progress.next_fresh && job.fresh() > 0;
    let waits = fresh || job.ready.contains(&index);
    if !waits || job.open.contains_key(&index) {
        return None;
    }
    if fresh {
        job.progress.next_fresh += 1;
    }
    let mut number = 0;
    job.update(index, |cell| {
        cell.phase = Phase::Open;
        cell.held = true;
        cell.number = cell.number.saturating_add(1);
        number = cell.number;
    });
    job.open.insert(index, OpenAttempt { bundle: id, number });
    fx.touched_pages.insert((job.id, index / PAGE_TASKS));
    Some(number)
}

/// Ends the attempt of one task on `worker`: its bundle shrinks, and with the bundle's last attempt the slot is free. Returns
/// when the attempt was assigned, and nothing when it was not open there.
pub fn close(state: &mut State, worker: &WorkerId, job: JobId, index: u32, fx: &mut Effects) -> Option<u64> {
    let found = state.jobs.get_mut(&job)?;
    let holder = state.workers.get_mut(worker)?;
    let id = found.open.get(&index)?.bundle;
    let bundle = holder.bundles.get_mut(&id)?;
    found.open.remove(&index);
    found.update(index, |cell| cell.held = false);
    let assigned_ms = bundle.assigned_ms;
    bundle.left -= 1;
    if bundle.left == 0 {
        holder.promised.remove(&bundle.needs);
        holder.bundles.remove(&id);
        found.bundles -= 1;
        count_bundles(&mut state.tenant_bundles, &found.facts.tenant, 1, false);
        fx.closed.push((worker.clone(), id, job));
    }
    fx.touched_pages.insert((job, index / PAGE_TASKS));
    fx.touched_jobs.insert(job);
    fx.workers.insert(worker.clone());
    Some(assigned_ms)
}
