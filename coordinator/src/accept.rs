//! accept: a Submit record becomes a job.
//!
//! Owns idempotency keys and quotas. Does not own the spec's own checks: those were made before the record was written.

use volley_jobspecs::ids::JobId;
use volley_jobspecs::wire::record::Submit;
use volley_jobspecs::wire::volume::Pin;

use crate::state::effects::{Answer, Effects, Refusal};
use crate::state::job::{Facts, Job};
use crate::state::{KEY_MS, Key, State, Timer};
use crate::{uploads, volumes};

/// Applies a submit.
pub fn accept(state: &mut State, sequence: u64, submit: &Submit, fx: &mut Effects) {
    let answer = match check(state, submit) {
        Ok(None) => match volumes::pins(state, &submit.actor.tenant, &submit.plan) {
            Ok(pins) => create(state, sequence, submit, pins, fx),
            Err(refusal) => Answer::Refused(refusal),
        },
        Ok(Some(key)) => Answer::Submitted { job: key.job, tasks: key.tasks, existed: true },
        Err(refusal) => Answer::Refused(refusal),
    };
    fx.answers.push((submit.actor.request_id.clone(), answer));
}

/// The entry of the submit's key, when it was used for the same spec.
fn check(state: &State, submit: &Submit) -> Result<Option<Key>, Refusal> {
    let tenant = &submit.actor.tenant;
    let policy = state.tenants.get(tenant).map(|t| &t.policy).ok_or_else(|| Refusal::NoTenant(tenant.clone()))?;
    if let Some(key) = state.keys.get(&(tenant.clone(), submit.idempotency_key.clone())) {
        if key.spec_hash == submit.spec_hash {
            return Ok(Some(key.clone()));
        }
        return Err(Refusal::KeyReused { key: submit.idempotency_key.clone(), job: key.job });
    }
    if submit.plan.priority > policy.priority_max {
        return Err(Refusal::Priority { tenant: tenant.clone(), max: policy.priority_max, asked: submit.plan.priority });
    }
    let active = || state.jobs.values().filter(|job| job.facts.tenant == *tenant && job.progress.ended_ms.is_none());
    if let Some(max) = policy.active_jobs_max {
        let has = active().count() as u64;
        quota(tenant, "jobs", u64::from(max), has, 1)?;
    }
    if let Some(max) = policy.active_tasks_max {
        let has = active().map(|job| u64::from(job.tasks())).sum();
        quota(tenant, "tasks", max, has, u64::from(submit.plan.tasks))?;
    }
    volumes::quota::job(state, tenant, &submit.plan)?;
    Ok(None)
}

fn quota(tenant: &volley_jobspecs::ids::TenantId, what: &'static str, max: u64, has: u64, brings: u64) -> Result<(), Refusal> {
    if brings > max {
        return Err(Refusal::NeverFits { tenant: tenant.clone(), what, max, brings });
    }
    if has + brings <= max {
        return Ok(());
    }
    Err(Refusal::Quota { tenant: tenant.clone(), what, max, has, brings })
}

fn create(state: &mut State, sequence: u64, submit: &Submit, pins: Option<Vec<Pin>>, fx: &mut Effects) -> Answer {
    let id = JobId(sequence);
    let tenant = submit.actor.tenant.clone();
    let facts = Facts {
        tenant: tenant.clone(),
        principal: submit.actor.principal.clone(),
        key: submit.idempotency_key.clone(),
        plan: submit.plan.clone(),
        spec: submit.spec.clone(),
        trace: submit.trace.clone(),
        submitted_ms: state.head.now_ms,
    };
    let until_ms = state.head.now_ms + KEY_MS;
    let key = Key { job: id, spec_hash: submit.spec_hash.clone(), tasks: submit.plan.tasks, until_ms };
    state.timers.insert((until_ms, Timer::Key(tenant.clone(), submit.idempotency_key.clone())));
    state.keys.insert((tenant.clone(), submit.idempotency_key.clone()), key);
    fx.keys.insert((tenant, submit.idempotency_key.clone()));

    let mut job = Job::new(id, facts);
    job.progress.pins = pins;
    state.jobs.insert(id, job);
    state.head.unstamped.insert(id);
    fx.new_jobs.insert(id);
    fx.touched_jobs.insert(id);
    uploads::named(state, &submit.actor.tenant, id, &submit.uploads, fx);
    Answer::Submitted { job: id, tasks: submit.plan.tasks, existed: false }
}
