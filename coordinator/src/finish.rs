//! finish: the end of a job: its last task, its failure limit, its deadlines, a cancel; and what trails the end.
//!
//! Owns when a job ends, when it leaves memory and when it is forgotten. Does not own the manifest itself (`io/manifest.rs`).

use volley_jobspecs::failure::FailureClass;
use volley_jobspecs::ids::JobId;
use volley_jobspecs::wire::record::Trailing;

use crate::state::effects::{Effects, ResultEntry};
use crate::state::job::{EndCause, Facts, Progress};
use crate::state::task::{PAGE_TASKS, Phase};
use crate::state::{Head, State, Timer, count_bundles};
use crate::{timers, uploads};

/// Ends the job if every task has ended.
pub fn check(state: &mut State, id: JobId, fx: &mut Effects) {
    if state.jobs.get(&id).is_none_or(|job| job.progress.ended_ms.is_some() || job.ended_tasks() < job.tasks()) {
        return;
    }
    // While it still counts as running: afterwards it has no deadlines to name.
    timers::drop_deadlines(state, id);
    let Some(job) = state.jobs.get_mut(&id) else { return };
    job.progress.ended_ms = Some(state.head.now_ms);
    job.progress.trailing = vec![Trailing::Manifest];
    let retention = retention_timers(id, &job.facts, &job.progress, &state.head);
    state.timers.extend(retention);
    fx.touched_jobs.insert(id);
}

/// Ends the job before its tasks are done: what waits is cancelled at once, in one record; what runs is stopped or may end.
pub fn end(state: &mut State, sequence: u64, id: JobId, cause: EndCause, reason: String, stop_running: bool, fx: &mut Effects) {
    timers::drop_deadlines(state, id);
    let Some(job) = state.jobs.get_mut(&id).filter(|job| job.progress.ended_ms.is_none()) else { return };
    // A cancel stands above a failure limit that was passed before it, never the other way round.
    if job.progress.ending.is_none_or(|old| old != EndCause::Cancelled) {
        job.progress.ending = Some(cause);
        job.progress.reason = Some(reason);
    }
    let class = if cause == EndCause::Queue { FailureClass::QueueTimeout } else { FailureClass::Cancelled };
    let phase = if cause == EndCause::Queue { Phase::Failed } else { Phase::Cancelled };
    let mut ended: Vec<u32> = Vec::new();
    for (number, page) in &job.pages {
        let first = number * PAGE_TASKS;
        let places = page.cells().iter().enumerate();
        let waits = |phase| matches!(phase, Phase::Ready | Phase::Backoff);
        let hit = places.filter(|(_, cell)| waits(cell.phase) || (stop_running && cell.phase == Phase::Open));
        ended.extend(hit.map(|(place, _)| first + place as u32));
    }
    for index in ended {
        let (page, place) = job.page_mut(index);
        if let Some(due) = page.due.get(&place).copied() {
            state.timers.remove(&(due, Timer::Retry(id, index)));
        }
        let attempts = page.get(place).map_or(0, |cell| cell.number);
        job.update(index, |cell| {
            cell.phase = phase;
            cell.set_class(Some(class));
        });
        fx.touched_pages.insert((id, index / PAGE_TASKS));
        fx.result(id, sequence, ResultEntry { index, number: 0, class: Some(class), attempts });
    }
    // Tasks that were never given out end as a range: they have no cells, no rows, and cost nothing.
    let rest = job.fresh();
    if rest > 0 {
        job.progress.rest = Some(class);
        *job.progress.by_class.entry(class as u8).or_insert(0) += rest;
    }
    fx.touched_jobs.insert(id);
    check(state, id, fx);
}

/// Ends the job when more tasks have failed than its limit allows.
pub fn fail_fast(state: &mut State, sequence: u64, id: JobId, fx: &mut Effects) {
    let Some(job) = state.jobs.get(&id) else { return };
    let Some(limit) = job.facts.plan.fail_fast.filter(|limit| job.progress.ending.is_none() && job.failed() > limit.failures_max) else {
        return;
    };
    let reason = format!("{} tasks failed, more than $.limits.maxFailures allows ({})", job.failed(), limit.failures_max);
    end(state, sequence, id, EndCause::FailFast, reason, limit.stop_running, fx);
}

/// Something that trails a job's end is done.
pub fn done(state: &mut State, id: JobId, what: Trailing, fx: &mut Effects) {
    match what {
        Trailing::Manifest => {
            let Some(job) = state.jobs.get_mut(&id) else { return };
            job.progress.trailing.retain(|t| *t != Trailing::Manifest);
            fx.touched_jobs.insert(id);
        }
        Trailing::FailedObjects => _ = state.head.sweep.remove(&id),
        Trailing::Objects => {
            state.head.sweep.remove(&id);
            if state.head.forget.remove(&id) {
                if let Some(job) = state.jobs.remove(&id) {
                    count_bundles(&mut state.tenant_bundles, &job.facts.tenant, job.bundles, false);
                }
                fx.forgotten.insert(id);
                uploads::forgotten(state, id, fx);
            }
        }
    }
}

/// When an ended job's things are to go. These are exactly the timers the state has of it: what was loaded must have the same.
///
/// None once the job is to be forgotten: everything of it goes then. The timer that says so fires once, and until its rows are gone
/// the job is in `head.forget`. That objects of failed attempts went leaves no trace, so time alone tells whether it is still to
/// come ([`timers::sweep_due`]).
#[must_use]
pub fn retention_timers(id: JobId, facts: &Facts, progress: &Progress, head: &Head) -> Vec<(u64, Timer)> {
    let Some(ended) = progress.ended_ms.filter(|_| !head.forget.contains(&id)) else { return Vec::new() };
    let keep = facts.plan.retention;
    let at = |after: u64| ended.saturating_add(after);
    let forget = keep.job_ms.map(at);
    // Those that would go with the job, or later, need no timer of their own.
    let sweep = keep.failed_objects_ms.map(at).filter(|sweep| *sweep > head.now_ms && forget.is_none_or(|forget| *sweep < forget));
    let sweep = sweep.map(|at| (at, Timer::FailedObjects(id)));
    sweep.into_iter().chain(forget.map(|at| (at, Timer::Forget(id)))).collect()
}

/// Lets go of pages and jobs that nothing will change any more. They stay in RocksDB.
pub fn evict(state: &mut State, fx: &mut Effects) {
    for (id, number) in std::mem::take(&mut fx.touched_pages) {
        let Some(job) = state.jobs.get_mut(&id) else { continue };
        if job.pages.get(&number).is_some_and(crate::state::task::Page::settled)
            && let Some(page) = job.pages.remove(&number)
        {
            fx.pages.remove(&(id, number));
            fx.settled.push((id, number, page));
        } else {
            fx.pages.insert((id, number));
        }
    }
    for id in std::mem::take(&mut fx.touched_jobs) {
        let over = state
            .jobs
            .get(&id)
            .is_some_and(|job| job.progress.ended_ms.is_some() && job.open.is_empty() && job.progress.trailing.is_empty());
        if over && let Some(job) = state.jobs.remove(&id) {
            fx.evicted.push(job);
        }
        fx.jobs.insert(id);
    }
}

#[cfg(test)]
mod tests;
