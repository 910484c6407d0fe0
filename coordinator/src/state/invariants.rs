//! What must hold after every record.
//!
//! Owns the checks that tests and the simulation run. Never called in production: they walk everything.

use std::collections::BTreeMap;

use super::State;
use super::task::{PAGE_TASKS, Phase};
use super::worker::{BUNDLES_PER_SLOT, Promised};

/// Everything that doesn't hold, in words; empty: all well.
#[must_use]
pub fn broken(state: &State) -> Vec<String> {
    let mut broken = Vec::new();
    let mut bundles_of: BTreeMap<_, u32> = BTreeMap::new();
    for (name, worker) in &state.workers {
        let mut promised = Promised::default();
        for (id, bundle) in &worker.bundles {
            promised.add(&bundle.needs);
            *bundles_of.entry(bundle.job).or_default() += 1;
            let open = state.jobs.get(&bundle.job).map_or(0, |job| job.open.values().filter(|o| o.bundle == *id).count());
            if open != bundle.left as usize {
                broken.push(format!("bundle {id:?} of {name} says {} left, its job has {open} open", bundle.left));
            }
            if bundle.left == 0 {
                broken.push(format!("bundle {id:?} of {name} is empty but open"));
            }
        }
        if promised != worker.promised {
            broken.push(format!("{name} says {:?} promised, its bundles add up to {promised:?}", worker.promised));
        }
        if worker.bundles.len() as u32 > worker.info.slots * BUNDLES_PER_SLOT {
            broken.push(format!("{name} has {} bundles for {} slots", worker.bundles.len(), worker.info.slots));
        }
    }
    let mut of_tenants = BTreeMap::new();
    for job in state.jobs.values() {
        super::count_bundles(&mut of_tenants, &job.facts.tenant, job.bundles, true);
        let held = bundles_of.get(&job.id).copied().unwrap_or(0);
        if held != job.bundles {
            broken.push(format!("{} says {} bundles, workers hold {held}", job.id, job.bundles));
        }
        if let Some(max) = job.facts.plan.concurrency
            && job.bundles > max
        {
            broken.push(format!("{} has {} bundles, its limit is {max}", job.id, job.bundles));
        }
        broken.extend(broken_tasks(job));
        let counts = job.counts();
        let sum =
            counts.waiting + counts.running + counts.backoff + counts.succeeded + counts.failed + counts.infra_failed + counts.cancelled;
        if sum != counts.total || counts.waiting != job.waiting() + held_back(job) {
            broken.push(format!("{} counts don't add up: {counts:?}, waiting {}", job.id, job.waiting()));
        }
        // A job without tasks ends with the Tick that starts its clock.
        let begins = state.head.unstamped.contains(&job.id);
        if !begins && job.progress.ended_ms.is_some() != (job.ended_tasks() == job.tasks()) {
            broken.push(format!(
                "{} ended: {:?}, with {} of {} tasks ended",
                job.id,
                job.progress.ended_ms,
                job.ended_tasks(),
                job.tasks()
            ));
        }
    }
    if of_tenants != state.tenant_bundles {
        broken.push(format!("tenants are said to have {:?} bundles, their jobs have {of_tenants:?}", state.tenant_bundles));
    }
    broken
}

/// Tasks that are to run again once their last attempt has been stopped.
fn held_back(job: &super::job::Job) -> u32 {
    let cells = job.pages.values().flat_map(super::task::Page::cells);
    cells.filter(|cell| cell.phase == Phase::Ready && cell.held).count() as u32
}

fn broken_tasks(job: &super::job::Job) -> Vec<String> {
    let mut broken = Vec::new();
    let (mut running, mut backoff) = (0, 0);
    for (number, page) in &job.pages {
        if page.settled() {
            broken.push(format!("{} page {number} is settled but in memory", job.id));
        }
        for (place, cell) in page.cells().iter().enumerate() {
            let index = number * PAGE_TASKS + place as u32;
            running += u32::from(cell.phase == Phase::Open);
            backoff += u32::from(cell.phase == Phase::Backoff);
            let wrong = (cell.held != job.open.contains_key(&index))
                || (cell.phase == Phase::Open && !cell.held)
                || ((cell.phase == Phase::Ready && !cell.held) != job.ready.contains(&index))
                || ((cell.phase == Phase::Backoff) != page.due.contains_key(&(place as u16)))
                || ((cell.phase == Phase::Fresh) != (index >= job.progress.next_fresh))
                || (matches!(cell.phase, Phase::Backoff | Phase::Fresh) && cell.held);
            let over = cell.failures > job.facts.plan.retry.attempts.max(1) || cell.infra > job.facts.plan.retry.infra_attempts.max(1);
            if wrong || over {
                broken.push(format!(
                    "{} task {index}: {cell:?}, open {:?}, next fresh {}",
                    job.id,
                    job.open.get(&index),
                    job.progress.next_fresh
                ));
            }
        }
    }
    if running != job.progress.running || backoff != job.progress.backoff {
        broken.push(format!(
            "{} says {} running, {} in backoff; its pages {running}, {backoff}",
            job.id, job.progress.running, job.progress.backoff
        ));
    }
    broken
}
