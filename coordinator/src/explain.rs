//! Why a task does not run.
//!
//! Owns the reasons: what of the job, of the task, and of each worker stands in the way. Pure, and with the same judgements as
//! `place` makes. Does not own placing, or what has ended (`ended`).

pub mod ended;

use std::cmp::Reverse;
use std::collections::BTreeMap;

use volley_jobspecs::api::{Explanation, WorkerExplanation};
use volley_jobspecs::ids::{JobId, WorkerId};
use volley_jobspecs::units;
use volley_jobspecs::wire::plan::Needs;

use crate::api::views::{SILENT_AFTER_MS, instant};
use crate::split::Waiting;
use crate::state::State;
use crate::state::job::Job;
use crate::state::task::{Cell, PAGE_TASKS, Phase};
use crate::state::worker::{self, BUNDLES_PER_SLOT, Worker};

/// Jobs named that hold the places a task waits for: enough to see whom to ask.
const HOLDERS_NAMED: usize = 3;

/// What only the leader knows.
#[derive(Debug, Clone, Default)]
pub struct Heard {
    /// Milliseconds since each worker was heard; none on a follower.
    pub silence: Option<BTreeMap<WorkerId, u64>>,
    /// The worker where the task failed last.
    pub failed_on: Option<WorkerId>,
}

/// Explains a task of a job in memory.
#[must_use]
pub fn explain(state: &State, id: JobId, index: u32, heard: &Heard) -> Explanation {
    let Some(job) = state.jobs.get(&id) else {
        return only("it ended in this moment; ask again".to_owned());
    };
    let cell = job.cell(index);
    match settled(state, job, index, cell) {
        Some(summary) => only(summary),
        None => waiting(state, job, heard),
    }
}

/// Explains a job in memory that has not ended.
#[must_use]
pub fn explain_job(state: &State, id: JobId, heard: &Heard) -> Explanation {
    let Some(job) = state.jobs.get(&id) else {
        return only("it ended in this moment; ask again".to_owned());
    };
    let counts = job.counts();
    let mut explanation =
        if job.waiting() > 0 { waiting(state, job, heard) } else { only("nothing of the job waits for a worker".to_owned()) };
    let places = [(counts.waiting, "wait for a worker"), (counts.running, "are with workers"), (counts.backoff, "wait for their next try")];
    explanation.details.extend(
        places.into_iter().filter(|(count, _)| *count > 0).map(|(count, what)| format!("{count} of {} tasks {what}", counts.total)),
    );
    explanation
}

fn only(summary: String) -> Explanation {
    Explanation { summary, details: Vec::new(), next: Vec::new(), workers: Vec::new() }
}

/// What is to say when the task doesn't wait for a worker.
fn settled(state: &State, job: &Job, index: u32, cell: Option<Cell>) -> Option<String> {
    let Some(cell) = cell else { return Some("the task has ended".to_owned()) };
    match cell.phase {
        Phase::Succeeded => Some("the task has succeeded".to_owned()),
        Phase::Failed => Some(format!("the task has failed ({})", cell.class().map_or("unknown", |c| c.as_str()))),
        Phase::Cancelled => Some("the task was cancelled".to_owned()),
        Phase::Open => {
            let place = state.holder(job, index).map_or_else(String::new, |(worker, _)| format!(" with worker {worker}"));
            Some(format!("the task is{place}, in try {}: it runs, or waits there for its turn", cell.number))
        }
        Phase::Backoff => {
            let page = job.pages.get(&(index / PAGE_TASKS));
            let due = page.and_then(|page| page.due.get(&((index % PAGE_TASKS) as u16)));
            let until = due.map_or_else(String::new, |due| format!(" until {}", instant(*due)));
            Some(format!(
                "the task failed {} times and waits{until} before its next try ($.task.retry.backoff)",
                cell.failures + cell.infra
            ))
        }
        Phase::Fresh if job.progress.rest.is_some() => Some("the task ended with its job before it was ever given out".to_owned()),
        Phase::Fresh | Phase::Ready => None,
    }
}

/// Why a task that waits for a worker still does.
fn waiting(state: &State, job: &Job, heard: &Heard) -> Explanation {
    let now_ms = state.head.now_ms;
    let explained = |name: &WorkerId, worker: &Worker| {
        let silent_ms = heard.silence.as_ref().and_then(|all| all.get(name).copied());
        let mut reasons = reasons(job, worker, now_ms, silent_ms);
        if heard.failed_on.as_ref() == Some(name) {
            reasons.push("the task failed here before; another worker is preferred".to_owned());
        }
        WorkerExplanation { worker: name.to_string(), reasons }
    };
    let workers: Vec<_> = state.workers.iter().map(|(name, worker)| explained(name, worker)).collect();
    let summary = of_job(state, job).unwrap_or_else(|| of_workers(job, state, &workers));
    Explanation { summary, workers, ..only(String::new()) }
}

/// What of the job itself holds its tasks back.
fn of_job(state: &State, job: &Job) -> Option<String> {
    let plan = &job.facts.plan;
    if job.progress.ended_ms.is_some() || job.progress.ending.is_some() {
        return Some("the job is being ended: nothing more of it starts".to_owned());
    }
    if job.progress.paused {
        return Some(format!("the job is paused; `volley resume {}` lets it go on", job.id));
    }
    if let Some(max) = plan.concurrency.filter(|max| job.bundles >= *max) {
        return Some(format!("the job runs as much at once as it may ($.limits.concurrency is {max})"));
    }
    let policy = state.tenants.get(&job.facts.tenant).map(|tenant| &tenant.policy);
    if let Some(max) = policy.and_then(|policy| policy.concurrency)
        && state.bundles_of(&job.facts.tenant) >= max
    {
        return Some(format!("tenant {} runs as much at once as it may ({max}); an operator can raise it", job.facts.tenant));
    }
    None
}

fn of_workers(job: &Job, state: &State, workers: &[WorkerExplanation]) -> String {
    if workers.is_empty() {
        return "no worker has joined the cluster; start one with `volley worker`".to_owned();
    }
    let never = state.workers.values().all(|worker| !worker::unfit(&worker.info, &job.facts.plan.needs).is_empty());
    if never {
        return "no worker could ever run this task, as it is; see each worker's reasons".to_owned();
    }
    if workers.iter().any(|worker| worker.reasons.is_empty()) {
        let ahead = Waiting::new(job).left();
        if let Some(rate) = job.facts.plan.rate {
            return format!(
                "a worker would take it; the job may start {} tasks per {} ms ($.limits.rate), and {ahead} of its tasks wait",
                rate.count, rate.per_ms
            );
        }
        return format!(
            "a worker would take it: it is about to be given out ({ahead} tasks of this job wait, jobs of higher priority or with less of their share go first)"
        );
    }
    let holders = holders(state, job);
    let held = if holders.is_empty() { String::new() } else { format!(" ({holders})") };
    format!("every worker that could run this task is busy{held}, draining, quarantined or silent; see each worker's reasons")
}

/// Which other jobs hold places on workers that could run the job's tasks, those with most first.
fn holders(state: &State, job: &Job) -> String {
    let fit = state.workers.values().filter(|worker| worker::unfit(&worker.info, &job.facts.plan.needs).is_empty());
    let mut places: BTreeMap<JobId, usize> = BTreeMap::new();
    fit.flat_map(|worker| worker.bundles.values()).for_each(|bundle| *places.entry(bundle.job).or_default() += 1);
    let all: usize = places.values().sum();
    let mut others: Vec<(JobId, usize)> = places.into_iter().filter(|(id, _)| *id != job.id).collect();
    others.sort_by_key(|(id, count)| (Reverse(*count), *id));
    let named = others.iter().take(HOLDERS_NAMED).map(|(id, count)| format!("job {id} holds {count} of the {all} places taken"));
    let mut text: Vec<String> = named.collect();
    if others.len() > HOLDERS_NAMED {
        text.push(format!("{} more jobs the others", others.len() - HOLDERS_NAMED));
    }
    text.join(", ")
}

/// Everything between the job's tasks and one worker.
fn reasons(job: &Job, worker: &Worker, now_ms: u64, silent_ms: Option<u64>) -> Vec<String> {
    let needs = &job.facts.plan.needs;
    let mut reasons: Vec<String> = worker::unfit(&worker.info, needs).iter().map(ToString::to_string).collect();
    if worker.draining {
        reasons.push("is draining".to_owned());
    }
    if worker.quarantined_until_ms > now_ms {
        reasons.push(format!("failed too much of what it was given and gets nothing until {}", instant(worker.quarantined_until_ms)));
    }
    if let Some(ms) = silent_ms.filter(|ms| *ms > SILENT_AFTER_MS) {
        reasons.push(format!("was not heard for {} s", ms / 1_000));
    }
    if !reasons.is_empty() {
        return reasons;
    }
    let (held, slots) = (worker.bundles.len() as u64, u64::from(worker.info.slots));
    if held >= slots * u64::from(BUNDLES_PER_SLOT) {
        reasons.push(format!("is full: {slots} slots run, and as many bundles wait"));
    } else if held >= slots {
        reasons.push(format!("is busy: all {slots} slots are taken"));
    }
    if !worker.promised.fits(needs, &worker.info, 1) {
        reasons.push(too_little(worker, needs));
    }
    reasons
}

/// Of what too little is left on a worker for one more bundle.
fn too_little(worker: &Worker, needs: &Needs) -> String {
    let (info, promised) = (&worker.info, &worker.promised);
    let cpu = (u64::from(info.cpu_milli), promised.cpu_milli, u64::from(needs.cpu_milli));
    let memory = (info.memory_bytes, promised.memory_bytes, needs.memory_bytes);
    let disk = (info.disk_bytes, promised.disk_bytes, needs.disk_bytes);
    let all: [(_, _, fn(u64) -> String); 3] =
        [("cores", cpu, units::cores), ("of memory", memory, units::bytes), ("of disk", disk, units::bytes)];
    let short = all.into_iter().filter(|(_, (has, promised, needs), _)| promised + needs > *has);
    let parts: Vec<String> = short
        .map(|(what, (has, promised, needs), show)| {
            format!("{} of its {} {what} are promised, the task needs {}", show(promised), show(has), show(needs))
        })
        .collect();
    format!("has too little left: {}", parts.join("; "))
}

#[cfg(test)]
mod tests {
    use super::*;
    use volley_jobspecs::ids::{Incarnation, TenantId};
    use volley_jobspecs::parse::parse_and_validate;
    use volley_jobspecs::validate::Features;
    use volley_jobspecs::wire::plan::{Isolation, SpecRef};
    use volley_jobspecs::wire::work::WorkerInfo;

    use crate::state::job::Facts;
    use crate::state::worker::Promised;

    fn state(slots: u32, isolation: Isolation) -> State {
        let spec = br#"{"version":"volley/v1","name":"x","items":{"count":9},"task":{"isolation":"process","command":"true"},"limits":{"concurrency":5}}"#;
        let job = parse_and_validate(spec, &Features::all()).unwrap_or_else(|e| panic!("{e}"));
        let facts = Facts {
            tenant: TenantId::new("t").unwrap_or_else(|e| panic!("{e}")),
            principal: "p".into(),
            key: "k".into(),
            plan: volley_jobspecs::plan::plan(&job, 9),
            spec: SpecRef::Inline(Vec::new().into()),
            trace: None,
            submitted_ms: 0,
        };
        let mut state = State::default();
        state.jobs.insert(JobId(1), Job::new(JobId(1), facts));
        let info = WorkerInfo {
            slots,
            cpu_milli: 4_000,
            memory_bytes: 1 << 30,
            disk_bytes: 1 << 30,
            isolation: vec![isolation],
            labels: BTreeMap::new(),
            limits: true,
            build: String::new(),
            host: String::new(),
        };
        let worker = Worker {
            incarnation: Incarnation(1),
            info,
            draining: false,
            quarantined_until_ms: 0,
            bundles: BTreeMap::new(),
            promised: Promised::default(),
        };
        state.workers.insert(WorkerId::new("w").unwrap_or_else(|e| panic!("{e}")), worker);
        state
    }

    fn said(state: &State, heard: &Heard) -> (String, Vec<String>) {
        let explanation = explain(state, JobId(1), 0, heard);
        (explanation.summary, explanation.workers.into_iter().flat_map(|w| w.reasons).collect())
    }

    #[test]
    fn what_is_too_little_or_too_small_is_said_in_units() {
        let mut s = state(2, Isolation::Process);
        let needs = |s: &mut State, needs: Needs| s.jobs.get_mut(&JobId(1)).unwrap_or_else(|| panic!("no job")).facts.plan.needs = needs;
        let plain = s.jobs[&JobId(1)].facts.plan.needs.clone();
        needs(&mut s, Needs { cpu_milli: 500, memory_bytes: 512 << 20, ..plain.clone() });
        for worker in s.workers.values_mut() {
            worker.promised = Promised { cpu_milli: 3_750, memory_bytes: 256 << 20, disk_bytes: 0 };
        }
        let (_, reasons) = said(&s, &Heard::default());
        assert_eq!(reasons, ["has too little left: 3.75 of its 4 cores are promised, the task needs 0.5"]);
        needs(&mut s, Needs { cpu_milli: 4_500, memory_bytes: 3 << 29, ..plain });
        let (_, reasons) = said(&s, &Heard::default());
        assert_eq!(reasons, ["has 4 cores in all, the task needs 4.5", "has 1.0 GiB of memory in all, the task needs 1.5 GiB"]);
    }

    #[test]
    fn each_obstacle_is_named() {
        let none = Heard::default();
        assert!(said(&state(2, Isolation::Process), &none).0.contains("about to be given out"));
        let (summary, reasons) = said(&state(2, Isolation::Null), &none);
        assert!(summary.contains("no worker could ever run") && reasons[0].contains("isolation"), "{summary} {reasons:?}");
        let (_, reasons) = said(&state(0, Isolation::Process), &none);
        assert!(reasons[0].contains("full"), "{reasons:?}");

        let mut s = state(2, Isolation::Process);
        let silent =
            Heard { silence: Some(s.workers.keys().map(|w| (w.clone(), 60_000)).collect()), failed_on: s.workers.keys().next().cloned() };
        let (summary, reasons) = said(&s, &silent);
        assert!(summary.contains("silent") && reasons.len() == 2, "{summary} {reasons:?}");
        for worker in s.workers.values_mut() {
            worker.draining = true;
        }
        assert_eq!(said(&s, &none).1, ["is draining"]);
        s.workers.clear();
        assert!(said(&s, &none).0.contains("no worker has joined"));

        let mut s = state(2, Isolation::Process);
        let job = s.jobs.get_mut(&JobId(1)).unwrap_or_else(|| panic!("no job"));
        job.bundles = 5;
        assert!(said(&s, &none).0.contains("$.limits.concurrency is 5"));
        let job = s.jobs.get_mut(&JobId(1)).unwrap_or_else(|| panic!("no job"));
        job.progress.paused = true;
        assert!(said(&s, &none).0.contains("volley resume j1"));
    }
}
