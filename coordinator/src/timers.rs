//! timers: what happens because time has passed.
//!
//! Owns which timers a job has and what each does when it fires. Time moves by `Tick` records only. Does not own start and run
//! deadlines of attempts: those are kept by the worker's monotonic clock.

use std::collections::BTreeSet;

use volley_jobspecs::ids::JobId;
use volley_jobspecs::wire::LEVEL_ROUNDS;

use crate::state::effects::Effects;
use crate::state::job::{EndCause, Job};
use crate::state::task::{PAGE_TASKS, Phase};
use crate::state::worker;
use crate::state::{Head, State, Timer};
use crate::{finish, uploads};

/// Timers one Tick fires at most (DESIGN §5): bounds the time a record takes to apply. The rest fire with the next.
pub const TIMERS_PER_TICK: usize = 10_000;

/// Moves time and fires what is due, in (due, id) order.
pub fn tick(state: &mut State, sequence: u64, now_ms: u64, fx: &mut Effects) {
    state.head.now_ms = state.head.now_ms.max(now_ms);
    for id in std::mem::take(&mut state.head.unstamped) {
        stamp(state, id, fx);
    }
    for _ in 0..TIMERS_PER_TICK {
        let Some(entry) = state.timers.first().filter(|(due, _)| *due <= state.head.now_ms).cloned() else { return };
        state.timers.remove(&entry);
        fire(state, sequence, entry.1, fx);
    }
    sweep_due(state);
}

/// Fires what is due of [`Timer::FailedObjects`]. No row says that such a timer has fired: it counts as fired when its time is over.
/// So none may be left whenever time has moved, or a coordinator that is restarted then would not have it any more.
pub fn sweep_due(state: &mut State) {
    let due = state.timers.iter().take_while(|(due, _)| *due <= state.head.now_ms);
    let due: Vec<_> = due.filter(|(_, timer)| matches!(timer, Timer::FailedObjects(_))).cloned().collect();
    for entry in due {
        state.timers.remove(&entry);
        if let Timer::FailedObjects(id) = entry.1 {
            state.head.sweep.insert(id);
        }
    }
}

/// Starts the clock of a job that was submitted since the last Tick.
fn stamp(state: &mut State, id: JobId, fx: &mut Effects) {
    let Some(job) = state.jobs.get_mut(&id).filter(|job| job.progress.ended_ms.is_none()) else { return };
    if let (Some(wait), Some(since)) = (job.facts.plan.queue_ms, job.progress.idle_since_ms.take()) {
        state.timers.remove(&(since.saturating_add(wait), Timer::Queue(id)));
    }
    job.facts.submitted_ms = state.head.now_ms;
    watch_queue(job, &state.head, &mut state.timers);
    state.timers.extend(total(job));
    fx.new_jobs.insert(id);
    fx.touched_jobs.insert(id);
    finish::check(state, id, fx);
}

/// Does something wait for a Tick of `now_ms`?
#[must_use]
pub fn due(state: &State, now_ms: u64) -> bool {
    !state.head.unstamped.is_empty() || state.timers.first().is_some_and(|(due, _)| *due <= now_ms)
}

fn fire(state: &mut State, sequence: u64, timer: Timer, fx: &mut Effects) {
    match timer {
        Timer::Retry(id, index) => {
            let Some(job) = state.jobs.get_mut(&id) else { return };
            job.update(index, |cell| cell.phase = Phase::Ready);
            watch_queue(job, &state.head, &mut state.timers);
            fx.touched_pages.insert((id, index / PAGE_TASKS));
            fx.touched_jobs.insert(id);
        }
        Timer::Queue(id) => {
            let Some(job) = state.jobs.get(&id) else { return };
            let wait = job.facts.plan.queue_ms.unwrap_or(0);
            let mut reason = format!("no worker took any of its tasks within {wait} ms ($.task.timeouts.queue)");
            if state.head.level >= LEVEL_ROUNDS {
                reason = format!("{reason}: {}", waited_for(state, job));
            }
            finish::end(state, sequence, id, EndCause::Queue, reason, false, fx);
        }
        Timer::Total(id) => {
            let total = state.jobs.get(&id).and_then(|job| job.facts.plan.total_ms).unwrap_or(0);
            finish::end(
                state,
                sequence,
                id,
                EndCause::Deadline,
                format!("it was not done within {total} ms ($.limits.deadline)"),
                true,
                fx,
            );
        }
        Timer::FailedObjects(id) => _ = state.head.sweep.insert(id),
        Timer::Forget(id) => _ = state.head.forget.insert(id),
        Timer::Key(tenant, key) => {
            state.keys.remove(&(tenant.clone(), key.clone()));
            fx.keys.insert((tenant, key));
        }
        Timer::Upload(tenant, id) => uploads::expired(state, tenant, id, fx),
    }
}

/// What stood in the way of a job whose queue deadline passes. Part of the state: other words are another level.
fn waited_for(state: &State, job: &Job) -> String {
    let (joined, needs) = (state.workers.len(), &job.facts.plan.needs);
    let fit = state.workers.values().filter(|worker| worker::unfit(&worker.info, needs).is_empty()).count();
    match (joined, fit) {
        (0, _) => "no worker had joined the cluster".to_owned(),
        (_, 0) => format!("none of the {joined} workers that had joined could ever run such a task"),
        _ => format!("of the {joined} workers that had joined, {fit} could run such a task, but were busy, draining or quarantined"),
    }
}

/// Keeps the queue deadline true: it runs while tasks wait and nothing of the job is with a worker, and starts anew each time that
/// becomes so.
pub fn watch_queue(job: &mut Job, head: &Head, timers: &mut BTreeSet<(u64, Timer)>) {
    let Some(wait) = job.facts.plan.queue_ms else { return };
    let idle = job.startable() && job.open.is_empty() && job.waiting() > 0;
    match (idle, job.progress.idle_since_ms) {
        (true, None) => {
            job.progress.idle_since_ms = Some(head.now_ms);
            timers.insert((head.now_ms.saturating_add(wait), Timer::Queue(job.id)));
        }
        (false, Some(since)) => {
            job.progress.idle_since_ms = None;
            timers.remove(&(since.saturating_add(wait), Timer::Queue(job.id)));
        }
        (true, Some(_)) | (false, None) => {}
    }
}

/// The timer of a job's total deadline.
#[must_use]
pub fn total(job: &Job) -> Option<(u64, Timer)> {
    let total = job.facts.plan.total_ms?;
    // A rerun opens a new round; the deadline was for the first.
    let running = job.progress.ended_ms.is_none() && job.progress.ending.is_none() && job.progress.round <= 1;
    running.then(|| (job.facts.submitted_ms.saturating_add(total), Timer::Total(job.id)))
}

/// Every timer a job in memory has; used when it is loaded.
#[must_use]
pub fn of_job(job: &Job, head: &Head) -> Vec<(u64, Timer)> {
    let stamped = !head.unstamped.contains(&job.id);
    let mut timers: Vec<(u64, Timer)> = total(job).filter(|_| stamped).into_iter().collect();
    if let (Some(wait), Some(since)) = (job.facts.plan.queue_ms, job.progress.idle_since_ms) {
        timers.push((since.saturating_add(wait), Timer::Queue(job.id)));
    }
    for (number, page) in &job.pages {
        timers.extend(page.due.iter().map(|(place, due)| (*due, Timer::Retry(job.id, number * PAGE_TASKS + u32::from(*place)))));
    }
    timers.extend(finish::retention_timers(job.id, &job.facts, &job.progress, head));
    timers
}

/// Takes a job's deadlines away, when it is being ended.
pub fn drop_deadlines(state: &mut State, id: JobId) {
    let Some(job) = state.jobs.get_mut(&id) else { return };
    if let Some(timer) = total(job) {
        state.timers.remove(&timer);
    }
    if let (Some(wait), Some(since)) = (job.facts.plan.queue_ms, job.progress.idle_since_ms.take()) {
        state.timers.remove(&(since.saturating_add(wait), Timer::Queue(id)));
    }
}
