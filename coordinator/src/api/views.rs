//! From the state to the API's JSON.
//!
//! Owns the translation of jobs, tasks, attempts, results and workers. Pure. Does not own the shapes (`volley_jobspecs::api`).

use volley_jobspecs::api::{AttemptView, JobView, KeptView, ResultRow, TaskState, TaskView, TemplateView, WorkerView};
use volley_jobspecs::failure::FailureClass;
use volley_jobspecs::ids::{AttemptName, JobId, WorkerId};
use volley_jobspecs::keys;
use volley_jobspecs::wire::report::{AttemptEnd, Ending, Stream};
use volley_jobspecs::wire::work::{HasVolumes, KeptMachine, TemplateStage};

use crate::leader::HeardOf;
use crate::state::effects::{AttemptRow, ResultEntry};
use crate::state::job::{Facts, Progress, Trouble};
use crate::state::task::{Cell, Phase};
use crate::state::worker::Worker;
use crate::trace;

/// RFC 3339 in UTC, of milliseconds since 1970.
#[must_use]
pub fn instant(ms: u64) -> String {
    let timestamp = i64::try_from(ms).ok().and_then(|ms| jiff::Timestamp::from_millisecond(ms).ok());
    // Beyond the year 9999: a deadline that saturated, not an instant anybody waits for.
    timestamp.map_or_else(|| "9999-12-31T23:59:59Z".to_owned(), |t| t.to_string())
}

/// A job. `objects` gives the URL of a key.
#[must_use]
pub fn job(id: JobId, facts: &Facts, progress: &Progress, url: &dyn Fn(&str) -> String) -> JobView {
    let plan = &facts.plan;
    let failures = FailureClass::ALL.iter().filter_map(|class| {
        let count = progress.by_class.get(&(*class as u8)).copied().filter(|count| *count > 0)?;
        Some((class.as_str().to_owned(), count))
    });
    let mut counted = std::collections::BTreeMap::new();
    for (class, count) in failures {
        *counted.entry(class).or_insert(0) += count;
    }
    JobView {
        job: id.to_string(),
        name: plan.name.clone(),
        tenant: facts.tenant.to_string(),
        state: progress.state(plan.tasks),
        reason: progress.reason.clone(),
        trouble: progress.trouble.as_ref().map(trouble),
        tasks: progress.counts(plan.tasks),
        failures: counted,
        labels: plan.labels.clone(),
        priority: plan.priority,
        round: progress.round,
        submitted: instant(facts.submitted_ms),
        started: progress.started_ms.map(instant),
        ended: progress.ended_ms.map(instant),
        exit_code: progress.exit_code(plan.tasks),
        objects: url(&keys::job_prefix(id)),
        trace_id: trace::id_of(facts),
        templates: Vec::new(),
    }
}

/// What kept tasks from beginning, in a line.
#[must_use]
pub fn trouble(trouble: &Trouble) -> String {
    let Trouble { text, worker, since_ms, attempts, .. } = trouble;
    let since = instant(*since_ms);
    match attempts {
        1 => format!("an attempt could not begin, on worker {worker} at {since}: {text}"),
        more => format!("{more} attempts could not begin, the first on worker {worker} at {since}: {text}"),
    }
}

/// What a worker does for the templates of a job's machines. `heard` is known to the leader only.
#[must_use]
pub fn templates(id: JobId, worker: &WorkerId, heard: &HeardOf) -> Vec<TemplateView> {
    let mut found: std::collections::BTreeMap<TemplateStage, (u64, u32)> = std::collections::BTreeMap::new();
    for at in heard.at.iter().filter(|at| at.name.job == id) {
        if let Some(stage) = at.template {
            let (for_ms, tasks) = found.entry(stage).or_default();
            *for_ms = (*for_ms).max(heard.silent_ms + at.for_ms);
            *tasks += 1;
        }
    }
    let view = |(stage, (for_ms, tasks)): (TemplateStage, _)| TemplateView {
        worker: worker.to_string(),
        step: stage.as_str().to_owned(),
        for_ms,
        tasks,
    };
    found.into_iter().map(view).collect()
}

/// Where a task stands, and why it failed last. `rest` is what became of tasks that were never given out.
#[must_use]
pub fn task_state(cell: &Cell, rest: Option<FailureClass>) -> (TaskState, Option<FailureClass>) {
    match (cell.phase, rest) {
        (Phase::Fresh, Some(FailureClass::Cancelled)) => (TaskState::Cancelled, Some(FailureClass::Cancelled)),
        (Phase::Fresh, Some(class)) => (TaskState::Failed, Some(class)),
        (Phase::Fresh, None) => (TaskState::Waiting, None),
        (Phase::Ready, _) => (TaskState::Waiting, cell.class()),
        (Phase::Open, _) => (TaskState::Running, cell.class()),
        (Phase::Backoff, _) => (TaskState::Backoff, cell.class()),
        (Phase::Succeeded, _) => (TaskState::Succeeded, None),
        (Phase::Failed, _) => (TaskState::Failed, cell.class()),
        (Phase::Cancelled, _) => (TaskState::Cancelled, Some(FailureClass::Cancelled)),
    }
}

/// Has a task ended?
#[must_use]
pub fn ended(cell: &Cell, rest: Option<FailureClass>) -> bool {
    matches!(task_state(cell, rest).0, TaskState::Succeeded | TaskState::Failed | TaskState::Cancelled)
}

/// A task.
#[must_use]
pub fn task(index: u32, cell: &Cell, rest: Option<FailureClass>, due_ms: Option<u64>, worker: Option<&WorkerId>) -> TaskView {
    let (state, class) = task_state(cell, rest);
    TaskView {
        index,
        state,
        attempts: u32::from(cell.number),
        class,
        worker: worker.map(WorkerId::to_string),
        next_try: due_ms.filter(|_| cell.phase == Phase::Backoff).map(instant),
    }
}

fn tail(stream: Option<&Stream>) -> Option<String> {
    stream.map(|stream| String::from_utf8_lossy(&stream.tail).into_owned())
}

fn ending(end: &AttemptEnd) -> (TaskState, Option<FailureClass>) {
    match end.ending {
        Ending::Succeeded => (TaskState::Succeeded, None),
        Ending::Failed(FailureClass::Cancelled) => (TaskState::Cancelled, Some(FailureClass::Cancelled)),
        Ending::Failed(class) => (TaskState::Failed, Some(class)),
        Ending::Returned => (TaskState::Waiting, None),
    }
}

/// An attempt that has ended.
#[must_use]
pub fn attempt(row: &AttemptRow, url: &dyn Fn(&str) -> String) -> AttemptView {
    let end = &row.end;
    let (state, class) = ending(end);
    AttemptView {
        number: end.name.number,
        sequence: end.name.sequence,
        worker: row.worker.to_string(),
        state,
        class,
        code: end.code,
        message: end.message.clone(),
        isolation: end.isolation.as_str().to_owned(),
        assigned: instant(row.assigned_ms),
        ended: Some(instant(row.ended_ms)),
        wait_ms: end.timing.wait_ms,
        prepare_ms: end.timing.prepare_ms,
        run_ms: end.timing.run_ms,
        persist_ms: end.timing.persist_ms,
        cpu_us: end.usage.map(|u| u.cpu_us),
        memory_bytes_max: end.usage.map(|u| u.memory_bytes_max),
        stdout_tail: tail(end.stdout.as_ref()),
        stderr_tail: tail(end.stderr.as_ref()),
        stdout_bytes: end.stdout.as_ref().map_or(0, |s| s.bytes),
        stderr_bytes: end.stderr.as_ref().map_or(0, |s| s.bytes),
        output_files: end.outputs.map_or(0, |o| o.files),
        output_bytes: end.outputs.map_or(0, |o| o.bytes),
        objects: url(&keys::attempt_prefix(&end.name)),
    }
}

/// An attempt that is with a worker.
#[must_use]
pub fn open_attempt(name: &AttemptName, worker: &WorkerId, isolation: &str, assigned_ms: u64, url: &dyn Fn(&str) -> String) -> AttemptView {
    AttemptView {
        number: name.number,
        sequence: name.sequence,
        worker: worker.to_string(),
        state: TaskState::Running,
        class: None,
        code: None,
        message: None,
        isolation: isolation.to_owned(),
        assigned: instant(assigned_ms),
        ended: None,
        wait_ms: 0,
        prepare_ms: 0,
        run_ms: 0,
        persist_ms: 0,
        cpu_us: None,
        memory_bytes_max: None,
        stdout_tail: None,
        stderr_tail: None,
        stdout_bytes: 0,
        stderr_bytes: 0,
        output_files: 0,
        output_bytes: 0,
        objects: url(&keys::attempt_prefix(name)),
    }
}

/// How a task ended, with the attempt that decided it, if one did.
#[must_use]
pub fn result(entry: &ResultEntry, row: Option<&AttemptRow>, cursor: String, url: &dyn Fn(&str) -> String) -> ResultRow {
    let state = match entry.class {
        None => TaskState::Succeeded,
        Some(FailureClass::Cancelled) => TaskState::Cancelled,
        Some(_) => TaskState::Failed,
    };
    let end = row.map(|row| &row.end);
    ResultRow {
        index: entry.index,
        state,
        class: entry.class,
        valid: entry.class.is_none_or(FailureClass::result_valid),
        code: end.and_then(|end| end.code),
        message: end.and_then(|end| end.message.clone()),
        attempts: u32::from(entry.attempts),
        run_ms: end.map_or(0, |end| end.timing.run_ms),
        result: end.and_then(|end| end.result.as_ref()).and_then(|bytes| serde_json::from_slice(bytes).ok()),
        stdout_tail: end.and_then(|end| tail(end.stdout.as_ref())),
        stderr_tail: end.and_then(|end| tail(end.stderr.as_ref())),
        output_files: end.and_then(|end| end.outputs).map_or(0, |outputs| outputs.files),
        objects: end.map(|end| url(&keys::attempt_prefix(&end.name))),
        superseded: false,
        cursor,
    }
}

/// What is to say of a task that no attempt decided: it ended with its job. `reason` is the job's, when it is of the same round.
#[must_use]
pub fn undecided(class: Option<FailureClass>, reason: Option<&str>) -> Option<String> {
    let reason = reason.unwrap_or("in a round before the rerun");
    Some(match class? {
        FailureClass::QueueTimeout => format!("given up with its job: {reason}"),
        FailureClass::Cancelled if reason == "cancelled" => "cancelled with its job".to_owned(),
        _ => format!("cancelled with its job: {reason}"),
    })
}

fn kept(machine: &KeptMachine) -> KeptView {
    let AttemptName { job, index, number, .. } = machine.name;
    KeptView { job: job.to_string(), task: index, attempt: number, until: instant(machine.until_ms), memory_bytes: machine.memory_bytes }
}

/// Silence after which a worker is shown as silent, in milliseconds: two beats were missed.
pub const SILENT_AFTER_MS: u64 = 7_000;

/// A worker. `heard` is known to the leader only.
#[must_use]
pub fn worker(name: &WorkerId, worker: &Worker, now_ms: u64, heard: Option<&HeardOf>) -> WorkerView {
    let info = &worker.info;
    let state = match () {
        () if heard.is_some_and(|heard| heard.silent_ms > SILENT_AFTER_MS) => "silent",
        () if worker.draining || heard.is_some_and(|heard| heard.draining) => "draining",
        () if worker.quarantined_until_ms > now_ms => "quarantined",
        () => "ready",
    };
    WorkerView {
        worker: name.to_string(),
        state: state.to_owned(),
        slots: info.slots,
        bundles: u32::try_from(worker.bundles.len()).unwrap_or(u32::MAX),
        tasks: worker.bundles.values().map(|bundle| bundle.left).sum(),
        cpu_milli: info.cpu_milli,
        memory_bytes: info.memory_bytes,
        disk_bytes: info.disk_bytes,
        isolation: info.isolation.iter().map(|tier| tier.as_str().to_owned()).collect(),
        lacks: info.lacks.iter().map(|lack| (lack.tier.as_str().to_owned(), lack.why.clone())).collect(),
        volumes: info.volumes.as_ref().map(|volumes| match volumes {
            HasVolumes::Yes => "yes".to_owned(),
            HasVolumes::No(why) => why.clone(),
        }),
        kept: heard.map(|heard| heard.kept.iter().map(kept).collect()).unwrap_or_default(),
        labels: info.labels.clone(),
        silent_ms: heard.map(|heard| heard.silent_ms),
        build: info.build.clone(),
        host: info.host.clone(),
    }
}

#[cfg(test)]
mod tests {
    use volley_jobspecs::wire::work::{At, AtStage};

    use super::*;

    #[test]
    fn instants_are_rfc_3339_in_utc() {
        assert_eq!(instant(0), "1970-01-01T00:00:00Z");
        assert_eq!(instant(1_700_000_000_123), "2023-11-14T22:13:20.123Z");
        assert_eq!(instant(u64::MAX), "9999-12-31T23:59:59Z");
    }

    #[test]
    fn a_task_that_was_never_given_out_ends_with_its_job() {
        assert_eq!(task_state(&Cell::FRESH, None), (TaskState::Waiting, None));
        let cancelled = Some(FailureClass::Cancelled);
        assert_eq!(task_state(&Cell::FRESH, cancelled), (TaskState::Cancelled, cancelled));
        let queue = Some(FailureClass::QueueTimeout);
        assert_eq!(task_state(&Cell::FRESH, queue), (TaskState::Failed, queue));
    }

    #[test]
    fn what_is_done_for_templates_is_counted_by_stage() {
        let at = |job, index, template, for_ms| At {
            name: AttemptName { job: JobId(job), stage: 0, index, number: 1, sequence: 9 },
            stage: AtStage::Preparing,
            for_ms,
            template,
            volumes: false,
        };
        let building = Some(TemplateStage::Building);
        let all = vec![at(1, 0, building, 500), at(1, 1, building, 700), at(1, 2, None, 1), at(2, 0, building, 1)];
        let heard = HeardOf { silent_ms: 100, at: all, ..HeardOf::default() };
        let worker: WorkerId = "w".parse().unwrap();
        let view = TemplateView { worker: "w".to_owned(), step: "building template".to_owned(), for_ms: 800, tasks: 2 };
        assert_eq!(templates(JobId(1), &worker, &heard), [view]);
        assert_eq!(templates(JobId(3), &worker, &heard), []);
    }

    #[test]
    fn only_verdicts_are_valid_results() {
        let entry = |class| ResultEntry { index: 1, number: 0, class, attempts: 0 };
        let valid = |class| result(&entry(class), None, String::new(), &|key| key.to_owned()).valid;
        assert!(valid(None) && valid(Some(FailureClass::Oom)));
        assert!(!valid(Some(FailureClass::HostLost)) && !valid(Some(FailureClass::Cancelled)));
    }
}
