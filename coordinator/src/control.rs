//! control: what people and programs ask for: cancel, pause, resume, rerun, remove, drain, tenants and tokens.
//!
//! Owns what each verb may be asked of. Each is one record whatever the number of tasks. Does not own who may ask: the API checked that.

use volley_jobspecs::ids::{JobId, TenantId};
use volley_jobspecs::wire::record::{Control, Verb};
use volley_jobspecs::wire::{LEVEL_ROUNDS, LEVEL_TENANTS};

use crate::state::effects::{Answer, Effects, Refusal};
use crate::state::job::EndCause;
use crate::state::task::{PAGE_TASKS, Phase};
use crate::state::{State, Tenant, Token};
use crate::{finish, timers, uploads, volumes};

/// The tenant whose principals may see and change everything.
pub const OPERATOR: &str = "operator";
/// Tenants that are there without being made, and stay.
pub const BUILT_IN: [&str; 2] = ["default", OPERATOR];

/// Applies a control.
pub fn control(state: &mut State, sequence: u64, control: &Control, fx: &mut Effects) {
    let tenant = &control.actor.tenant;
    let done = match &control.verb {
        Verb::Cancel { job, stop_running, reason } => cancel(state, sequence, tenant, *job, *stop_running, reason, fx),
        Verb::Pause { job } => pause(state, tenant, *job, true),
        Verb::Resume { job } => pause(state, tenant, *job, false),
        Verb::Rerun { job } => rerun(state, sequence, tenant, *job),
        Verb::Remove { job } => remove(state, tenant, *job),
        Verb::Drain { worker, on } => match state.workers.get_mut(worker) {
            Some(found) => {
                found.draining = *on;
                if !on {
                    fx.resumed.push(worker.clone());
                }
                fx.workers.insert(worker.clone());
                Ok(())
            }
            None => Err(Refusal::NoWorker(worker.clone())),
        },
        Verb::PutTenant { tenant, policy } => {
            state.tenants.insert(tenant.clone(), Tenant { policy: policy.clone() });
            fx.tenants.insert(tenant.clone());
            Ok(())
        }
        Verb::RemoveTenant { tenant } => remove_tenant(state, tenant, fx),
        Verb::CreateToken { id, tenant, secret_hash, operator } => create_token(state, id, tenant, secret_hash, *operator, fx),
        Verb::RevokeToken { id } => match state.tokens.remove(id) {
            Some(_) => {
                fx.tokens.insert(id.clone());
                Ok(())
            }
            None => Err(Refusal::NoToken(id.clone())),
        },
        Verb::Uploaded { id } => {
            uploads::uploaded(state, tenant, id, fx);
            Ok(())
        }
        Verb::PutVolume { .. }
        | Verb::RemoveVolume { .. }
        | Verb::PutSnapshot { .. }
        | Verb::RemoveSnapshot { .. }
        | Verb::HoldVolume { .. }
        | Verb::GrowVolume { .. } => volumes::verb(state, &control.actor, &control.verb, fx),
    };
    // A job and pages that were loaded for this record leave memory at its end, whatever came of the record.
    if let Some(job) = crate::apply::job_of(&control.verb).and_then(|id| state.jobs.get(&id)) {
        fx.touched_jobs.insert(job.id);
        fx.touched_pages.extend(job.pages.keys().map(|number| (job.id, *number)));
    }
    let answer = done.map_or_else(Answer::Refused, |()| Answer::Done);
    fx.answers.push((control.actor.request_id.clone(), answer));
}

fn may(state: &State, tenant: &TenantId, id: JobId) -> Result<(), Refusal> {
    let job = state.jobs.get(&id).ok_or(Refusal::NoJob(id))?;
    if job.facts.tenant == *tenant || tenant.as_str() == OPERATOR { Ok(()) } else { Err(Refusal::NoJob(id)) }
}

fn cancel(
    state: &mut State,
    sequence: u64,
    tenant: &TenantId,
    id: JobId,
    now: bool,
    reason: &str,
    fx: &mut Effects,
) -> Result<(), Refusal> {
    may(state, tenant, id)?;
    if state.jobs.get(&id).is_some_and(|job| job.progress.ended_ms.is_some()) {
        return Err(Refusal::Ended(id));
    }
    let reason = if reason.is_empty() { "cancelled".to_owned() } else { reason.to_owned() };
    finish::end(state, sequence, id, EndCause::Cancelled, reason, now, fx);
    Ok(())
}

fn pause(state: &mut State, tenant: &TenantId, id: JobId, on: bool) -> Result<(), Refusal> {
    may(state, tenant, id)?;
    let Some(job) = state.jobs.get_mut(&id).filter(|job| job.progress.ended_ms.is_none()) else { return Err(Refusal::Ended(id)) };
    job.progress.paused = on;
    timers::watch_queue(job, &state.head, &mut state.timers);
    Ok(())
}

/// Opens a new round for every ended task without success: numbers go on, budgets start afresh, successes stay.
fn rerun(state: &mut State, sequence: u64, tenant: &TenantId, id: JobId) -> Result<(), Refusal> {
    may(state, tenant, id)?;
    // Its tenant may have been removed since it ended.
    if let Some(job) = state.jobs.get(&id).filter(|job| !state.tenants.contains_key(&job.facts.tenant)) {
        return Err(Refusal::NoTenant(job.facts.tenant.clone()));
    }
    // Its objects go, and with them what would run again.
    if state.head.level >= LEVEL_ROUNDS && state.head.forget.contains(&id) {
        return Err(Refusal::Removed(id));
    }
    let Some(job) = state.jobs.get_mut(&id) else { return Err(Refusal::NoJob(id)) };
    let mut again: Vec<u32> = Vec::new();
    for (number, page) in &job.pages {
        let first = number * PAGE_TASKS;
        let lost = page.cells().iter().enumerate().filter(|(_, cell)| matches!(cell.phase, Phase::Failed | Phase::Cancelled));
        again.extend(lost.map(|(place, _)| first + place as u32));
    }
    let rest = job.progress.rest.take();
    if let Some(class) = rest {
        let count = job.progress.by_class.entry(class as u8).or_insert(0);
        *count = count.saturating_sub(job.facts.plan.tasks - job.progress.next_fresh);
    }
    if again.is_empty() && rest.is_none() {
        return Err(Refusal::NothingToRerun(id));
    }
    for index in again {
        job.update(index, |cell| {
            cell.phase = Phase::Ready;
            cell.failures = 0;
            cell.infra = 0;
        });
    }
    // The total deadline was for the first round; the queue deadline starts anew below.
    if let Some(timer) = timers::total(job) {
        state.timers.remove(&timer);
    }
    for timer in finish::retention_timers(id, &job.facts, &job.progress, &state.head) {
        state.timers.remove(&timer);
    }
    state.head.sweep.remove(&id);
    state.head.forget.remove(&id);
    job.progress.round += 1;
    if state.head.level >= LEVEL_ROUNDS {
        job.progress.opened = Some(sequence);
    }
    job.progress.ending = None;
    job.progress.reason = None;
    job.progress.trouble = None;
    job.progress.ended_ms = None;
    job.progress.trailing.clear();
    timers::watch_queue(job, &state.head, &mut state.timers);
    Ok(())
}

fn remove(state: &mut State, tenant: &TenantId, id: JobId) -> Result<(), Refusal> {
    may(state, tenant, id)?;
    let Some(job) = state.jobs.get(&id) else { return Err(Refusal::NoJob(id)) };
    if job.progress.ended_ms.is_none() {
        return Err(Refusal::NotEnded(id));
    }
    for timer in finish::retention_timers(id, &job.facts, &job.progress, &state.head) {
        state.timers.remove(&timer);
    }
    state.head.forget.insert(id);
    Ok(())
}

/// Jobs of it that have ended stay until their time is over; operators see them.
fn remove_tenant(state: &mut State, tenant: &TenantId, fx: &mut Effects) -> Result<(), Refusal> {
    if BUILT_IN.contains(&tenant.as_str()) {
        return Err(Refusal::BuiltIn(tenant.clone()));
    }
    if !state.tenants.contains_key(tenant) {
        return Err(Refusal::NoTenant(tenant.clone()));
    }
    let jobs = state.jobs.values().filter(|job| job.facts.tenant == *tenant && job.progress.ended_ms.is_none()).count();
    if jobs > 0 {
        return Err(Refusal::TenantBusy { tenant: tenant.clone(), jobs });
    }
    state.tenants.remove(tenant);
    fx.tenants.insert(tenant.clone());
    let tokens: Vec<String> = state.tokens.iter().filter(|(_, token)| token.tenant == *tenant).map(|(id, _)| id.clone()).collect();
    for id in tokens {
        state.tokens.remove(&id);
        fx.tokens.insert(id);
    }
    Ok(())
}

fn create_token(state: &mut State, id: &str, tenant: &TenantId, hash: &str, operator: bool, fx: &mut Effects) -> Result<(), Refusal> {
    if !state.tenants.contains_key(tenant) {
        return Err(Refusal::NoTenant(tenant.clone()));
    }
    let created_ms = (state.head.level >= LEVEL_TENANTS).then_some(state.head.now_ms);
    state.tokens.insert(id.to_owned(), Token { tenant: tenant.clone(), secret_hash: hash.to_owned(), operator, created_ms });
    fx.tokens.insert(id.to_owned());
    Ok(())
}
