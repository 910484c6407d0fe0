//! Why a task does not run.
//!
//! Owns the reasons: what of the job, of the task, and of each worker stands in the way. Pure, and with the same judgements as
//! `place` makes. Does not own placing, or what has ended (`ended`).

pub mod ended;

use std::cmp::Reverse;
use std::collections::BTreeMap;

use volley_jobspecs::api::{Explanation, TemplateView, WorkerExplanation};
use volley_jobspecs::ids::{JobId, WorkerId};
use volley_jobspecs::units;
use volley_jobspecs::wire::plan::Needs;
use volley_jobspecs::wire::report::Cause;
use volley_jobspecs::wire::work::{At, AtStage, TemplateStage};

use crate::api::views::{self, SILENT_AFTER_MS, instant};
use crate::leader::HeardOf;
use crate::split::Waiting;
use crate::state::State;
use crate::state::job::Job;
use crate::state::task::{Cell, PAGE_TASKS, Phase};
use crate::state::volume::{Holder, Volume};
use crate::state::worker::{self, BUNDLES_PER_SLOT, Unfit, Worker, Workers};
use crate::volumes;

/// Jobs named that hold the places a task waits for: enough to see whom to ask.
const HOLDERS_NAMED: usize = 3;

/// Workers named with what they lack, for somebody who submits: enough to see what is wrong with the spec.
const WORKERS_NAMED: usize = 3;

/// What only the leader knows.
#[derive(Debug, Clone, Default)]
pub struct Heard {
    /// What was heard of each worker; of none on a follower.
    pub workers: BTreeMap<WorkerId, HeardOf>,
    /// The worker where the task failed last.
    pub failed_on: Option<WorkerId>,
    /// What kept its last try from beginning.
    pub cause: Option<Cause>,
}

/// Explains a task of a job in memory.
#[must_use]
pub fn explain(state: &State, id: JobId, index: u32, heard: &Heard) -> Explanation {
    let Some(job) = state.jobs.get(&id) else {
        return only("it ended in this moment; ask again".to_owned());
    };
    let cell = job.cell(index);
    match settled(state, job, index, cell, heard) {
        Some((summary, next)) => {
            let backs_off = cell.is_some_and(|cell| cell.phase == Phase::Backoff && heard.cause.is_some());
            let details = job.progress.trouble.iter().filter(|_| backs_off).map(views::trouble).collect();
            Explanation { details, next: next.map(str::to_owned).into_iter().collect(), ..only(summary) }
        }
        None => {
            let why = waiting(state, job, Some(index), heard);
            Explanation { summary: format!("the task waits for a worker: {}", why.summary), ..why }
        }
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
        if job.waiting() > 0 { waiting(state, job, Waiting::new(job).peek(), heard) } else { only(of_idle(job, counts.running)) };
    let places = [
        (counts.waiting, "waits for a worker", "wait for a worker"),
        (counts.running, "is with a worker", "are with workers"),
        (counts.backoff, "waits for its next try", "wait for their next try"),
    ];
    let total = units::count(u64::from(counts.total), "task");
    let said = |(count, one, more): (u32, &str, &str)| format!("{count} of {total} {}", if count == 1 { one } else { more });
    explanation.details.extend(places.into_iter().filter(|(count, ..)| *count > 0).map(said));
    explanation.details.extend(heard.workers.iter().flat_map(|(worker, of_worker)| for_templates(id, worker, of_worker)));
    let backing = job.pages.iter().find_map(|(number, page)| Some(number * PAGE_TASKS + u32::from(*page.due.keys().next()?)));
    let more = |index| format!("`volley explain {id} {index}` says why task {index} waits for its next try");
    explanation.next.extend(backing.map(more));
    if let Some(trouble) = &job.progress.trouble {
        explanation.details.push(views::trouble(trouble));
        explanation.next.push(ended::missing(trouble.cause).to_owned());
    }
    explanation
}

/// What to say of a job of which nothing waits for a worker.
fn of_idle(job: &Job, running: u32) -> String {
    match (job.progress.ending.is_some(), job.progress.paused) {
        (true, _) if running > 0 => {
            format!(
                "the job is being ended: nothing more of it starts, and what runs may end by itself; `volley cancel --now {}` stops it",
                job.id
            )
        }
        (true, _) => "the job is being ended".to_owned(),
        (false, true) => {
            format!("nothing of the job waits for a worker; it is paused, and `volley resume {}` lets further tries begin", job.id)
        }
        (false, false) => "nothing of the job waits for a worker".to_owned(),
    }
}

/// What a worker does for templates of the job's machines, a line for each step.
fn for_templates(id: JobId, worker: &WorkerId, heard: &HeardOf) -> Vec<String> {
    let line = |view: TemplateView| {
        let (tasks, wait) = (units::count(u64::from(view.tasks), "task"), if view.tasks == 1 { "waits" } else { "wait" });
        format!("worker {worker}: {}, for {} s now; {tasks} there {wait} for it", view.step, view.for_ms / 1_000)
    };
    views::templates(id, worker, heard).into_iter().map(line).collect()
}

fn only(summary: String) -> Explanation {
    Explanation { summary, details: Vec::new(), next: Vec::new(), workers: Vec::new() }
}

/// What is to say when the task doesn't wait for a worker, and what can be done if something can.
fn settled(state: &State, job: &Job, index: u32, cell: Option<Cell>, heard: &Heard) -> Option<(String, Option<&'static str>)> {
    let Some(cell) = cell else { return Some(("the task has ended".to_owned(), None)) };
    let summary = match cell.phase {
        Phase::Succeeded => Some("the task has succeeded".to_owned()),
        Phase::Failed => Some(format!("the task has failed ({})", cell.class().map_or("unknown", |c| c.as_str()))),
        Phase::Cancelled => Some("the task was cancelled".to_owned()),
        Phase::Open => Some(open(state, job, index, cell, heard)),
        Phase::Backoff => {
            let page = job.pages.get(&(index / PAGE_TASKS));
            let due = page.and_then(|page| page.due.get(&((index % PAGE_TASKS) as u16)));
            let until = due.map_or_else(String::new, |due| format!(" until {}", instant(*due)));
            let class = cell.class().map_or_else(String::new, |class| format!(", the last time as {class}"));
            let failed = units::counted(u64::from(cell.failures + cell.infra), "time", "times");
            let next = u32::from(cell.number) + 1;
            Some(format!("the task backs off{until}; it failed {failed}{class}, and try {next} comes then ($.task.retry.backoff)"))
        }
        Phase::Fresh if job.progress.rest.is_some() => Some("the task ended with its job before it was ever given out".to_owned()),
        Phase::Fresh | Phase::Ready => None,
    }?;
    let backing = cell.class().filter(|_| cell.phase == Phase::Backoff);
    Some((summary, backing.and_then(|class| ended::change(class, job.facts.plan.needs.isolation, heard.cause))))
}

/// How far a task is that is with a worker.
fn open(state: &State, job: &Job, index: u32, cell: Cell, heard: &Heard) -> String {
    let number = cell.number;
    let Some((worker, bundle)) = state.holder(job, index) else { return format!("the task is given out, in try {number}") };
    let assigned = state.workers.get(worker).and_then(|found| found.bundles.get(&bundle)).map(|bundle| instant(bundle.assigned_ms));
    let given = assigned.map_or_else(String::new, |assigned| format!(" since {assigned}"));
    let Some(of_worker) = heard.workers.get(worker) else {
        return format!("the task is with worker {worker}{given}, in try {number}: it runs, or waits there for its turn");
    };
    let silent = match of_worker.silent_ms {
        0..=SILENT_AFTER_MS => String::new(),
        ms => format!("; the worker was not heard for {} s", ms / 1_000),
    };
    let is_it = |at: &&At| (at.name.job, at.name.index, at.name.sequence) == (job.id, index, bundle.sequence);
    let Some(at) = of_worker.at.iter().find(is_it) else {
        return format!(
            "the task waits at worker {worker} for its turn{given}, in try {number}: other tasks of its bundle or slot run first{silent}"
        );
    };
    let since = instant(state.head.now_ms.saturating_sub(of_worker.silent_ms + at.for_ms));
    let what = match (at.stage, at.template) {
        (AtStage::Preparing, _) if at.volumes => "is being prepared: its volumes are being opened",
        (AtStage::Keeping, _) if at.volumes => "has run; what it wrote on its volumes is being committed",
        (AtStage::Preparing, Some(TemplateStage::Building)) => {
            "is being prepared: its machine's template is being built there, once for all its tasks"
        }
        (AtStage::Preparing, Some(TemplateStage::Awaited)) => "is being prepared: its machine's template is being built by another worker",
        (AtStage::Preparing, Some(TemplateStage::Fetching)) => "is being prepared: its machine's template is being fetched",
        (AtStage::Preparing, None) => "is being prepared: its inputs and its machine",
        (AtStage::Running, _) => "runs",
        (AtStage::Keeping, _) => "has run; its outputs and logs are being kept",
    };
    format!("the task {what}, on worker {worker}, since {since}, in try {number}{silent}")
}

/// Why a task that waits for a worker still does.
fn waiting(state: &State, job: &Job, index: Option<u32>, heard: &Heard) -> Explanation {
    let now_ms = state.head.now_ms;
    let explained = |name: &WorkerId, worker: &Worker| {
        let mut reasons = reasons(job, (&state.workers, worker), now_ms, heard.workers.get(name));
        if heard.failed_on.as_ref() == Some(name) {
            reasons.push("the task failed here before; another worker is preferred".to_owned());
        }
        WorkerExplanation { worker: name.to_string(), reasons }
    };
    let workers: Vec<_> = state.workers.iter().map(|(name, worker)| explained(name, worker)).collect();
    let summary = of_job(state, job).or_else(|| index.and_then(|index| of_volumes(state, job, index)));
    let summary = summary.unwrap_or_else(|| of_workers(job, state, &workers));
    let next = never(state, job).then(|| could(state, &job.facts.plan.needs)).or_else(|| resume(state, job));
    Explanation { summary, workers, next: next.into_iter().collect(), ..only(String::new()) }
}

/// Have workers joined, and could none of them ever run the job's tasks, even when idle?
fn never(state: &State, job: &Job) -> bool {
    !state.workers.is_empty()
        && state.workers.values().all(|worker| !worker::obstacles(&state.workers, &worker.info, &job.facts.plan.needs).is_empty())
}

/// What to do where all that could run the job's tasks take nothing because somebody said so.
fn resume(state: &State, job: &Job) -> Option<String> {
    let fit = |worker: &Worker| worker::obstacles(&state.workers, &worker.info, &job.facts.plan.needs).is_empty();
    let fitting: Vec<_> = state.workers.iter().filter(|(_, worker)| fit(worker)).collect();
    let (first, _) = fitting.first().filter(|_| fitting.iter().all(|(_, worker)| worker.draining))?;
    Some(format!("`volley workers resume {first}` has it take tasks again"))
}

/// What to do about tasks that no worker could ever run: what to ask for otherwise, or what a worker would have to have.
fn could(state: &State, needs: &Needs) -> String {
    let (mut places, mut wanted) = (Vec::new(), Vec::new());
    for unfit in state.workers.values().flat_map(|worker| worker::obstacles(&state.workers, &worker.info, needs)) {
        let (place, want) = match unfit {
            Unfit::Isolation { tier, .. } => ("$.task.isolation", format!("offers isolation \"{tier}\"")),
            Unfit::Templates { needs, .. } => {
                ("$.task.resources.memory", format!("has room for templates of {} (--template-memory)", units::bytes(needs)))
            }
            Unfit::Image => ("$.task.image", "has that image".to_owned()),
            Unfit::FewCores { needs, .. } => ("$.task.resources.cpus", format!("has {} cores", units::cores(needs.into()))),
            Unfit::TooSmall { what: what @ "of disk", needs, .. } => {
                ("$.task.resources.disk", format!("has {} {what}", units::bytes(needs)))
            }
            Unfit::TooSmall { what, needs, .. } => ("$.task.resources.memory", format!("has {} {what}", units::bytes(needs))),
            Unfit::Label(key, value) => ("$.placement.labels", format!("has the label {key}={value}")),
            Unfit::Volumes(_) => ("$.task.volumes", "runs as root with --volume-keys".to_owned()),
            Unfit::Limits => ("$.task.resources", "may use cgroups (as root, or with a delegated one)".to_owned()),
        };
        if !places.contains(&place) {
            places.push(place);
        }
        if !wanted.contains(&want) {
            wanted.push(want);
        }
    }
    format!("start a worker that {} (`volley worker --help`), or change {} and submit again", list(&wanted), list(&places))
}

/// Words in a row: `a`, `a and b`, `a, b and c`.
fn list<T: AsRef<str>>(words: &[T]) -> String {
    let words: Vec<&str> = words.iter().map(AsRef::as_ref).collect();
    match words.split_last() {
        Some((last, before)) if !before.is_empty() => format!("{} and {last}", before.join(", ")),
        _ => words.concat(),
    }
}

/// What a task's volumes hold it back with.
fn of_volumes(state: &State, job: &Job, index: u32) -> Option<String> {
    if let Some(pin) = job.progress.pins.iter().flatten().find(|pin| !pin.held) {
        let name = job.facts.plan.volumes.get(usize::from(pin.slot)).map_or("", |volume| &volume.name);
        return Some(format!("what the job reads of volume {name} is being kept for it; its tasks start when that is done"));
    }
    volumes::written(&job.facts.plan).find_map(|(slot, wanted)| {
        let name = wanted.name_of(job.id, index);
        let Some(volume) = state.volumes.get(&(job.facts.tenant.clone(), name.clone())) else {
            let missing = format!("it writes volume {name}, which is not there: make it (`volley volume create {name} SIZE`)");
            return wanted.size_bytes.is_none().then(|| format!("{missing}, or give it a size in $.task.volumes[{slot}].size"));
        };
        (!volume.is_free()).then(|| format!("it writes volume {name}, and {}", volume_of(state, volume)))
    })
}

/// Who has a volume, and where.
fn volume_of(state: &State, volume: &Volume) -> String {
    let holder = volumes::holder(volume);
    let Some(Holder::Attempt(name)) = &volume.holder else { return holder };
    let found = state.jobs.get(&name.job).and_then(|job| state.holder(job, name.index));
    found.map_or_else(|| holder.clone(), |(worker, _)| format!("{holder} on worker {worker}"))
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
    if never(state, job) {
        return "no worker could ever run this task, as it is; see each worker's reasons".to_owned();
    }
    if workers.iter().any(|worker| worker.reasons.is_empty()) {
        let ahead = Waiting::new(job).left();
        if let Some(rate) = job.facts.plan.rate {
            return format!(
                "a worker would take it; the job may start {} per {} ms ($.limits.rate), and {}",
                units::count(u64::from(rate.count), "task"),
                rate.per_ms,
                units::counted(u64::from(ahead), "of its tasks waits", "of its tasks wait")
            );
        }
        return format!(
            "a worker would take it: it is about to be given out ({}, jobs of higher priority or with less of their share go first)",
            units::counted(u64::from(ahead), "task of this job waits", "tasks of this job wait")
        );
    }
    let holders = holders(state, job);
    let held = if holders.is_empty() { String::new() } else { format!(" ({holders})") };
    format!("every worker that could run this task is busy{held}, draining, quarantined or silent; see each worker's reasons")
}

/// What is to say when no worker that has joined could ever run such tasks, even when idle.
#[must_use]
pub fn nowhere(state: &State, needs: &Needs) -> Option<String> {
    if state.workers.is_empty() {
        return Some("no worker has joined the cluster, so nothing of it runs until one does (`volley worker`)".to_owned());
    }
    let mut named = Vec::new();
    for (name, worker) in &state.workers {
        let unfit = worker::obstacles(&state.workers, &worker.info, needs);
        if unfit.is_empty() {
            return None;
        }
        if named.len() < WORKERS_NAMED {
            let reasons: Vec<String> = unfit.iter().map(ToString::to_string).collect();
            named.push(format!("{name} {}", reasons.join(" and ")));
        }
    }
    let more = match state.workers.len() - named.len() {
        0 => String::new(),
        more => format!("; and {} more", units::count(more as u64, "worker")),
    };
    Some(format!("none of the workers that are there now could ever run its tasks: {}{more}", named.join("; ")))
}

/// Which other jobs hold places on workers that could run the job's tasks, those with most first.
fn holders(state: &State, job: &Job) -> String {
    let fit = state.workers.values().filter(|worker| worker::obstacles(&state.workers, &worker.info, &job.facts.plan.needs).is_empty());
    let mut places: BTreeMap<JobId, usize> = BTreeMap::new();
    fit.flat_map(|worker| worker.bundles.values()).for_each(|bundle| *places.entry(bundle.job).or_default() += 1);
    let all: usize = places.values().sum();
    let mut others: Vec<(JobId, usize)> = places.into_iter().filter(|(id, _)| *id != job.id).collect();
    others.sort_by_key(|(id, count)| (Reverse(*count), *id));
    let named = others
        .iter()
        .take(HOLDERS_NAMED)
        .map(|(id, count)| format!("job {id} holds {count} of {} taken", units::count(all as u64, "place")));
    let mut text: Vec<String> = named.collect();
    if others.len() > HOLDERS_NAMED {
        text.push(format!("{} the others", units::counted((others.len() - HOLDERS_NAMED) as u64, "more job", "more jobs")));
    }
    text.join(", ")
}

/// Everything between the job's tasks and one worker.
fn reasons(job: &Job, (workers, worker): (&Workers, &Worker), now_ms: u64, heard: Option<&HeardOf>) -> Vec<String> {
    let needs = &job.facts.plan.needs;
    let mut reasons: Vec<String> = worker::obstacles(workers, &worker.info, needs).iter().map(ToString::to_string).collect();
    if worker.draining || heard.is_some_and(|heard| heard.draining) {
        reasons.push("is draining".to_owned());
    }
    if worker.quarantined_until_ms > now_ms {
        reasons.push(format!("failed too much of what it was given and gets nothing until {}", instant(worker.quarantined_until_ms)));
    }
    if let Some(ms) = heard.map(|heard| heard.silent_ms).filter(|ms| *ms > SILENT_AFTER_MS) {
        reasons.push(format!("was not heard for {} s", ms / 1_000));
    }
    if !reasons.is_empty() {
        return reasons;
    }
    let (held, slots) = (worker.bundles.len() as u64, u64::from(worker.info.slots));
    if held >= slots * u64::from(BUNDLES_PER_SLOT) {
        reasons.push(match slots {
            1 => "is full: its one slot is taken, and a bundle waits for it".to_owned(),
            _ => format!("is full: all {slots} slots are taken, and as many bundles wait"),
        });
    } else if held >= slots {
        reasons.push(match slots {
            1 => "is busy: its one slot is taken".to_owned(),
            _ => format!("is busy: all {slots} slots are taken"),
        });
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
    use volley_jobspecs::failure::FailureClass;
    use volley_jobspecs::ids::{AttemptName, BundleId, Incarnation, TenantId};
    use volley_jobspecs::parse::parse_and_validate;
    use volley_jobspecs::validate::Features;
    use volley_jobspecs::wire::plan::{Isolation, SpecRef};
    use volley_jobspecs::wire::record::Run;

    use crate::state::job::{Facts, OpenAttempt};
    use crate::state::task::Page;
    use crate::state::worker::{Bundle, Promised};
    use crate::testing::worker_info;

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
        let info = worker_info(slots, isolation);
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
    fn a_task_that_waits_for_a_volume_is_told_who_has_it() {
        use volley_jobspecs::ids::{SnapshotId, VolumeId};
        use volley_jobspecs::wire::volume::{Access, Pin, VolumePlan};
        use volley_jobspecs::wire::work::HasVolumes;

        use crate::state::volume::Promotion;

        let mut s = state(2, Isolation::Process);
        let plan = |name: &str, access, size_bytes| VolumePlan { name: name.to_owned(), snapshot: None, access, size_bytes };
        let job = s.jobs.get_mut(&JobId(1)).unwrap_or_else(|| panic!("no job"));
        job.facts.plan.needs.volumes = Some(true);
        job.facts.plan.volumes = vec![plan("data", Access::Ro, None), plan("state", Access::Rw, None)];
        let pin = Pin { slot: 0, volume: VolumeId([1; 16]), snapshot: None, held: false };
        job.progress.pins = Some(vec![pin]);
        assert_eq!(said(&s, &Heard::default()).1, ["can't have volumes"]);
        s.workers.values_mut().for_each(|worker| worker.info.volumes = Some(HasVolumes::no("no key")));
        assert_eq!(said(&s, &Heard::default()).1, ["can't have volumes: no key"]);
        s.workers.values_mut().for_each(|worker| worker.info.volumes = Some(HasVolumes::Yes));
        let summary = |s: &State| explain(s, JobId(1), 0, &Heard::default()).summary;
        assert!(summary(&s).contains("what the job reads of volume data is being kept for it"), "{}", summary(&s));
        let job = s.jobs.get_mut(&JobId(1)).unwrap_or_else(|| panic!("no job"));
        job.progress.pins = Some(vec![Pin { snapshot: Some(SnapshotId([2; 16])), held: true, ..pin }]);
        assert!(summary(&s).contains("it writes volume state, which is not there: make it (`volley volume create state SIZE`)"));
        let key = (TenantId::new("t").unwrap_or_else(|e| panic!("{e}")), "state".to_owned());
        let name = AttemptName { job: JobId(9), stage: 0, index: 3, number: 2, sequence: 7 };
        let volume = s.volumes.entry(key).or_insert_with(|| Volume::new(VolumeId([3; 16]), 1 << 20, 0));
        volume.holder = Some(Holder::Attempt(name));
        assert!(summary(&s).contains("it writes volume state, and task 3 of job j9, in try 2, writes it"), "{}", summary(&s));
        for volume in s.volumes.values_mut() {
            volume.holder = None;
            volume.promotion = Some(Promotion { generation: 1, attempt: name, root: [0; 32], size_bytes: 1 << 20 });
        }
        assert!(summary(&s).contains("what task 3 of job j9 wrote is being accepted"), "{}", summary(&s));
        s.volumes.values_mut().for_each(|volume| volume.promotion = None);
        assert!(summary(&s).contains("about to be given out"), "{}", summary(&s));
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
    fn a_task_is_said_to_run_to_wait_or_to_back_off() {
        let mut s = state(2, Isolation::Process);
        s.head.now_ms = 100_000;
        let bundle = BundleId { sequence: 7, place: 0 };
        let needs = s.jobs[&JobId(1)].facts.plan.needs.clone();
        for worker in s.workers.values_mut() {
            let tasks = vec![Run { first: 0, count: 2 }];
            worker.bundles.insert(bundle, Bundle { job: JobId(1), tasks, left: 2, assigned_ms: 90_000, needs: needs.clone() });
        }
        let job = s.jobs.get_mut(&JobId(1)).unwrap_or_else(|| panic!("no job"));
        let mut page = Page::fresh(9);
        for place in 0..2 {
            page.update(place, |cell| (cell.phase, cell.number) = (Phase::Open, 1));
            job.open.insert(u32::from(place), OpenAttempt { bundle, number: 1 });
        }
        page.update(2, |cell| {
            (cell.phase, cell.number, cell.failures) = (Phase::Backoff, 1, 1);
            cell.set_class(Some(FailureClass::ExitCode));
        });
        page.due.insert(2, 120_000);
        job.pages.insert(0, page);
        let said = |index, heard: &Heard| explain(&s, JobId(1), index, heard).summary;
        let unheard = said(0, &Heard::default());
        assert_eq!(unheard, "the task is with worker w since 1970-01-01T00:01:30Z, in try 1: it runs, or waits there for its turn");
        let name = AttemptName { job: JobId(1), stage: 0, index: 0, number: 1, sequence: 7 };
        let at = vec![At { name, stage: AtStage::Running, for_ms: 3_000, template: None, volumes: false }];
        let of_worker = HeardOf { silent_ms: 2_000, at, ..HeardOf::default() };
        let heard = Heard { workers: s.workers.keys().map(|w| (w.clone(), of_worker.clone())).collect(), failed_on: None, cause: None };
        assert_eq!(said(0, &heard), "the task runs, on worker w, since 1970-01-01T00:01:35Z, in try 1");
        assert!(said(1, &heard).starts_with("the task waits at worker w for its turn since 1970-01-01T00:01:30Z, in try 1"));
        assert_eq!(
            said(2, &heard),
            "the task backs off until 1970-01-01T00:02:00Z; it failed 1 time, the last time as exit_code, and try 2 comes then ($.task.retry.backoff)"
        );
        assert!(said(3, &heard).starts_with("the task waits for a worker: "));
        let building = At { name, stage: AtStage::Preparing, for_ms: 3_000, template: Some(TemplateStage::Building), volumes: false };
        let building = HeardOf { silent_ms: 2_000, at: vec![building], ..HeardOf::default() };
        let workers = s.workers.keys().map(|w| (w.clone(), building.clone())).collect();
        let line = "worker w: building template, for 5 s now; 1 task there waits for it".to_owned();
        assert!(explain_job(&s, JobId(1), &Heard { workers, ..Heard::default() }).details.contains(&line));
        assert_eq!(explain_job(&s, JobId(1), &heard).next, ["`volley explain j1 2` says why task 2 waits for its next try"]);
        assert!(explain(&s, JobId(1), 2, &heard).next.is_empty(), "what is wrong with its command is not for us to say");
        let job = s.jobs.get_mut(&JobId(1)).unwrap_or_else(|| panic!("no job"));
        job.facts.plan.needs.isolation = Isolation::Container;
        job.pages.get_mut(&0).unwrap_or_else(|| panic!("no page")).update(2, |cell| cell.set_class(Some(FailureClass::RestoreFailed)));
        let next = explain(&s, JobId(1), 2, &heard).next;
        assert!(next.len() == 1 && !next[0].contains("image"), "not known to be the image's fault: {next:?}");
        let heard = Heard { cause: Some(Cause::NoImage(1)), ..heard };
        let next = explain(&s, JobId(1), 2, &heard).next;
        assert!(next.len() == 1 && next[0].contains("volley image import"), "{next:?}");
    }

    #[test]
    fn who_submits_is_told_when_no_worker_could_ever_run_it() {
        let mut s = state(2, Isolation::Null);
        let needs = s.jobs[&JobId(1)].facts.plan.needs.clone();
        let said = nowhere(&s, &needs).unwrap_or_default();
        assert_eq!(said, "none of the workers that are there now could ever run its tasks: w doesn't offer isolation \"process\"");
        let other = s.workers.values().next().cloned().unwrap_or_else(|| panic!("no worker"));
        for name in ["a", "b", "c"] {
            s.workers.insert(WorkerId::new(name).unwrap_or_else(|e| panic!("{e}")), other.clone());
        }
        assert!(nowhere(&s, &needs).is_some_and(|said| said.ends_with("; and 1 worker more")), "{:?}", nowhere(&s, &needs));
        s.workers.values_mut().for_each(|worker| worker.draining = true);
        if let Some(worker) = s.workers.values_mut().next() {
            worker.info.isolation = vec![Isolation::Process];
        }
        assert_eq!(nowhere(&s, &needs), None, "one that drains may be resumed");
        s.workers.clear();
        assert!(nowhere(&s, &needs).is_some_and(|said| said.contains("no worker has joined")));
    }

    #[test]
    fn a_tier_that_a_worker_cant_offer_is_named_with_the_reason() {
        let mut s = state(2, Isolation::Null);
        for worker in s.workers.values_mut() {
            worker.info.lacks = vec![volley_jobspecs::wire::work::Lack::new(Isolation::Process, "no fork here; install one")];
        }
        let (_, reasons) = said(&s, &Heard::default());
        assert_eq!(reasons, ["can't offer isolation \"process\": no fork here; install one"]);
        let needs = s.jobs[&JobId(1)].facts.plan.needs.clone();
        assert!(nowhere(&s, &needs).is_some_and(|said| said.ends_with("w can't offer isolation \"process\": no fork here; install one")));
    }

    #[test]
    fn each_obstacle_is_named() {
        let none = Heard::default();
        assert!(said(&state(2, Isolation::Process), &none).0.contains("about to be given out"));
        let (summary, reasons) = said(&state(2, Isolation::Null), &none);
        assert!(summary.contains("no worker could ever run") && reasons[0].contains("isolation"), "{summary} {reasons:?}");
        let mut s = state(2, Isolation::Null);
        let next = |s: &State| [explain(s, JobId(1), 0, &Heard::default()), explain_job(s, JobId(1), &Heard::default())].map(|e| e.next);
        let offer =
            "start a worker that offers isolation \"process\" (`volley worker --help`), or change $.task.isolation and submit again";
        assert_eq!(next(&s), [[offer], [offer]]);
        let job = s.jobs.get_mut(&JobId(1)).unwrap_or_else(|| panic!("no job"));
        (job.facts.plan.needs.memory_bytes, job.facts.plan.needs.isolation) = (2 << 30, Isolation::Null);
        job.facts.plan.needs.labels.insert("gpu".into(), "a100".into());
        let large = "start a worker that has 2.0 GiB of memory and has the label gpu=a100 (`volley worker --help`), or change $.task.resources.memory and $.placement.labels and submit again";
        assert_eq!(next(&s), [[large], [large]]);
        assert!(next(&state(2, Isolation::Process)).iter().all(Vec::is_empty));
        let (_, reasons) = said(&state(0, Isolation::Process), &none);
        assert!(reasons[0].contains("full"), "{reasons:?}");

        let mut s = state(2, Isolation::Process);
        let lost = HeardOf { silent_ms: 60_000, ..HeardOf::default() };
        let silent = Heard {
            workers: s.workers.keys().map(|w| (w.clone(), lost.clone())).collect(),
            failed_on: s.workers.keys().next().cloned(),
            cause: None,
        };
        let (summary, reasons) = said(&s, &silent);
        assert!(summary.contains("silent") && reasons.len() == 2, "{summary} {reasons:?}");
        for worker in s.workers.values_mut() {
            worker.draining = true;
        }
        assert_eq!(said(&s, &none).1, ["is draining"]);
        assert_eq!(explain(&s, JobId(1), 0, &none).next, ["`volley workers resume w` has it take tasks again"]);
        for worker in s.workers.values_mut() {
            worker.draining = false;
        }
        let leaves = HeardOf { draining: true, ..HeardOf::default() };
        let leaves = Heard { workers: s.workers.keys().map(|w| (w.clone(), leaves.clone())).collect(), failed_on: None, cause: None };
        assert_eq!(said(&s, &leaves).1, ["is draining"], "by its own will");
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
