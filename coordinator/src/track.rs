//! track: what happened to attempts: reported, lost with their worker, or forgotten by it.
//!
//! Owns what counts as stale and what becomes of a task when its attempt ends. Does not own budgets (`retry`) or the end of a job
//! (`finish`). Whichever terminal record the log orders first stands: a success of a task that was cancelled meanwhile changes nothing.

use std::collections::BTreeMap;
use std::mem::discriminant;

use volley_jobspecs::failure::FailureClass;
use volley_jobspecs::ids::{AttemptName, BundleId, Incarnation, JobId, WorkerId};
use volley_jobspecs::wire::plan::Isolation;
use volley_jobspecs::wire::report::{AttemptEnd, Cause, Ending, Report};
use volley_jobspecs::wire::work::WorkerInfo;
use volley_jobspecs::wire::{LEVEL_BEGUN, LEVEL_OFFERS, LEVEL_UNCOUNTED};

use crate::state::State;
use crate::state::effects::{AttemptRow, Effects, ResultEntry};
use crate::state::job::Trouble;
use crate::state::task::{Cell, Phase};
use crate::state::worker::{self, Promised, Worker};
use crate::{assign, finish, retry, timers, volumes};

/// Tries of a task whose image no live worker has. With the default backoff the fifth comes after some 8 seconds: enough for a worker that
/// has it to be started anew.
const IMAGE_TRIES: u16 = 5;

/// Applies a worker's report.
pub fn track(state: &mut State, sequence: u64, report: &Report, fx: &mut Effects) {
    let known = state.workers.get(&report.worker).is_some_and(|w| w.incarnation == report.incarnation);
    if !known {
        state.head.stale_ends += report.ends.len() as u64;
        return;
    }
    for end in &report.ends {
        if ended(state, sequence, &report.worker, end, true, fx).is_none() {
            state.head.stale_ends += 1;
        }
    }
}

/// Applies the end of one attempt. `charge`: it may have begun. `None`: no such attempt is open on that worker.
fn ended(state: &mut State, sequence: u64, worker: &WorkerId, end: &AttemptEnd, charge: bool, fx: &mut Effects) -> Option<()> {
    let name = &end.name;
    let open = state.jobs.get(&name.job)?.open.get(&name.index).copied()?;
    if open.bundle.sequence != name.sequence || u32::from(open.number) != name.number {
        return None;
    }
    let end = &*volumes::judge(state, end);
    let assigned_ms = assign::close(state, worker, name.job, name.index, fx)?;
    // Of a task that was cancelled meanwhile nothing is accepted.
    let wanted = state.jobs.get(&name.job)?.cell(name.index).is_some_and(|cell| cell.phase == Phase::Open);
    volumes::ended(state, end, wanted && end.ending == Ending::Succeeded, fx);
    if end.ending != Ending::Returned && charge {
        let row = AttemptRow { worker: worker.clone(), end: end.clone(), assigned_ms, ended_ms: state.head.now_ms };
        fx.attempts.push((*name, row));
    }
    note_trouble(state, worker, end);
    settle(state, sequence, end, charge, fx);
    let job = state.jobs.get_mut(&name.job)?;
    timers::watch_queue(job, &state.head, &mut state.timers);
    finish::check(state, name.job, fx);
    Some(())
}

/// Keeps with the job what kept an attempt from beginning, so that it is said once and not by each task alone.
fn note_trouble(state: &mut State, worker: &WorkerId, end: &AttemptEnd) {
    let now_ms = state.head.now_ms;
    let Some(job) = state.jobs.get_mut(&end.name.job).filter(|_| state.head.level >= LEVEL_OFFERS) else { return };
    let trouble = &mut job.progress.trouble;
    match (end.ending, end.cause) {
        (Ending::Succeeded, _) => *trouble = None,
        (Ending::Failed(_), Some(cause)) => match trouble {
            Some(known) if discriminant(&known.cause) == discriminant(&cause) => known.attempts = known.attempts.saturating_add(1),
            other => {
                let text = end.message.clone().unwrap_or_default();
                *other = Some(Trouble { cause, text, worker: worker.clone(), since_ms: now_ms, attempts: 1 });
            }
        },
        (Ending::Failed(_), None) | (Ending::Returned, _) => {}
    }
}

/// What becomes of a task whose attempt ended.
fn settle(state: &mut State, sequence: u64, end: &AttemptEnd, charge: bool, fx: &mut Effects) {
    let (id, index, level) = (end.name.job, end.name.index, state.head.level);
    let Some(job) = state.jobs.get_mut(&id) else { return };
    let (returned, open) = (end.ending == Ending::Returned, job.cell(index).is_some_and(|cell| cell.phase == Phase::Open));
    if (level >= LEVEL_BEGUN && (returned || !charge)) || (level >= LEVEL_UNCOUNTED && returned && open) {
        // It never began, so it is no try: the next one has its number, and another name by the sequence.
        job.update(index, |cell| cell.number = cell.number.saturating_sub(1));
    }
    if !open {
        return;
    }
    let Some(cell) = job.cell(index) else { return };
    let result = |class| ResultEntry { index, number: cell.number, class, attempts: cell.number };
    match end.ending {
        Ending::Succeeded => {
            job.update(index, |cell| {
                cell.phase = Phase::Succeeded;
                cell.set_class(None);
            });
            fx.result(id, sequence, result(None));
        }
        _ if job.progress.ending.is_some() && (!charge || returned) => {
            job.update(index, |cell| cell.phase = Phase::Cancelled);
            fx.result(id, sequence, ResultEntry { number: 0, ..result(Some(FailureClass::Cancelled)) });
        }
        Ending::Returned => job.update(index, |cell| cell.phase = Phase::Ready),
        Ending::Failed(_) if !charge => job.update(index, |cell| cell.phase = Phase::Ready),
        Ending::Failed(class) => {
            // A worker that ends a task nobody cancelled has lost it as a host would.
            let class = if class == FailureClass::Cancelled { FailureClass::HostLost } else { class };
            let class = if has_no_image(state, end, cell) { FailureClass::InputMissing } else { class };
            failed(state, sequence, end, class, fx);
        }
    }
}

/// Did it fail for an image that no live worker has, and not for the first time? Another try would meet the same name. A worker that is
/// started anew is away for some seconds, so some tries are made first.
fn has_no_image(state: &State, end: &AttemptEnd, cell: Cell) -> bool {
    let Some(Cause::NoImage(key)) = end.cause.filter(|_| state.head.level >= LEVEL_OFFERS) else { return false };
    let Some(job) = state.jobs.get(&end.name.job) else { return false };
    let tries = IMAGE_TRIES.min(job.facts.plan.retry.infra_attempts.max(1));
    cell.infra.saturating_add(1) >= tries && worker::image_is_nowhere(&state.workers, end.isolation, key)
}

fn failed(state: &mut State, sequence: u64, end: &AttemptEnd, class: FailureClass, fx: &mut Effects) {
    let (id, index) = (end.name.job, end.name.index);
    let Some(job) = state.jobs.get_mut(&id) else { return };
    let Some(cell) = job.cell(index) else { return };
    let verdict = retry::decide(&job.facts.plan.retry, id, index, &cell, class, end.code);
    let again = verdict.filter(|_| job.progress.ending.is_none());
    let due = again.map(|delay_ms| state.head.now_ms.saturating_add(delay_ms));
    job.update(index, |cell| {
        match class.is_infra() {
            true => cell.infra = cell.infra.saturating_add(1),
            false => cell.failures = cell.failures.saturating_add(1),
        }
        cell.set_class(Some(class));
        cell.phase = match due {
            Some(due) if due <= state.head.now_ms => Phase::Ready,
            Some(_) => Phase::Backoff,
            None => Phase::Failed,
        };
    });
    match due {
        Some(due) if due > state.head.now_ms => {
            let (page, place) = job.page_mut(index);
            page.due.insert(place, due);
            state.timers.insert((due, crate::state::Timer::Retry(id, index)));
        }
        Some(_) => {}
        None => {
            fx.result(id, sequence, ResultEntry { index, number: cell.number, class: Some(class), attempts: cell.number });
            finish::fail_fast(state, sequence, id, fx);
        }
    }
}

/// Applies that a worker came up, or has something else to offer than before. Attempts of an older life end.
pub fn joined(state: &mut State, sequence: u64, worker: &WorkerId, incarnation: Incarnation, info: &WorkerInfo, fx: &mut Effects) {
    if let Some(found) = state.workers.get_mut(worker).filter(|found| found.incarnation == incarnation) {
        if state.head.level >= LEVEL_OFFERS && found.info != *info {
            found.info.clone_from(info);
            fx.workers.insert(worker.clone());
        }
        return;
    }
    let draining = state.workers.get(worker).is_some_and(|w| w.draining);
    end_all(state, sequence, worker, true, fx);
    let fresh = Worker {
        incarnation,
        info: info.clone(),
        draining,
        quarantined_until_ms: 0,
        bundles: BTreeMap::new(),
        promised: Promised::default(),
    };
    state.workers.insert(worker.clone(), fresh);
    fx.workers.insert(worker.clone());
}

/// Applies that a worker is gone; `left`: of its own will, and then nothing of what it was given since it said so had begun. False: that
/// life of it was gone before.
pub fn lost(state: &mut State, sequence: u64, worker: &WorkerId, incarnation: Incarnation, left: bool, fx: &mut Effects) -> bool {
    if state.workers.get(worker).is_none_or(|w| w.incarnation != incarnation) {
        return false;
    }
    let begun = !left || state.head.level < LEVEL_BEGUN;
    end_all(state, sequence, worker, begun, fx);
    state.workers.remove(worker);
    fx.workers.insert(worker.clone());
    true
}

/// Ends everything a worker held. Of a bundle only the first unreported task can have been running, so only it is charged, and only if
/// the worker may have `begun` anything.
fn end_all(state: &mut State, sequence: u64, worker: &WorkerId, begun: bool, fx: &mut Effects) {
    let Some(bundles) = state.workers.get(worker).map(|w| w.bundles.clone()) else { return };
    for (id, bundle) in &bundles {
        let mut first = begun;
        for index in bundle.indices() {
            let Some(name) = open_name(state, bundle.job, index, *id) else { continue };
            let message = format!("worker {worker} was lost or restarted while it held this task");
            _ = ended(state, sequence, worker, &host_lost(state, name, message), first, fx);
            first = false;
        }
    }
}

/// Applies that live workers forgot attempts.
pub fn attempts_lost(state: &mut State, sequence: u64, names: &[AttemptName], fx: &mut Effects) {
    for name in names {
        let Some(open) = state.jobs.get(&name.job).and_then(|job| job.open.get(&name.index)) else { continue };
        let Some(worker) = state.workers.iter().find(|(_, w)| w.bundles.contains_key(&open.bundle)).map(|(n, _)| n.clone()) else {
            continue;
        };
        let message = format!("worker {worker} received this task but neither holds nor reported it");
        _ = ended(state, sequence, &worker, &host_lost(state, *name, message), true, fx);
    }
}

/// The name of a task's open attempt, when it belongs to this bundle.
#[must_use]
pub fn open_name(state: &State, job: JobId, index: u32, bundle: BundleId) -> Option<AttemptName> {
    let open = state.jobs.get(&job)?.open.get(&index).filter(|open| open.bundle == bundle)?;
    Some(AttemptName { job, stage: 0, index, number: u32::from(open.number), sequence: bundle.sequence })
}

/// Nobody knows how it ran; it was to run as its job says.
fn host_lost(state: &State, name: AttemptName, message: String) -> AttemptEnd {
    let asked = state.jobs.get(&name.job).map(|job| job.facts.plan.needs.isolation);
    let isolation = asked.filter(|_| state.head.level >= LEVEL_BEGUN).unwrap_or(Isolation::Process);
    AttemptEnd { message: Some(message), ..AttemptEnd::bare(name, Ending::Failed(FailureClass::HostLost), isolation) }
}

#[cfg(test)]
mod tests;
