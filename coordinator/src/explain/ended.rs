//! Why a task or a job ended as it did, and what can be done about it.
//!
//! Owns the words for what has ended. Pure, and with the same judgements as `retry` makes. Does not own what still waits (`explain`).

use volley_jobspecs::api::{Explanation, JobState};
use volley_jobspecs::failure::FailureClass;
use volley_jobspecs::ids::JobId;
use volley_jobspecs::units;
use volley_jobspecs::wire::plan::Isolation;
use volley_jobspecs::wire::report::{Cause, Ending, Timing};

use super::only;
use crate::api::views;
use crate::retry::{self, Verdict};
use crate::state::effects::AttemptRow;
use crate::state::job::{EndCause, Facts, Progress};
use crate::state::task::{Cell, Phase};

/// Tries that are named one by one, the last ones: `volley task` lists all.
const TRIES_SHOWN: usize = 5;

/// Said of an image that was looked for on the last worker.
const NOWHERE: &str = "; no other worker that was there had it either";

/// A task that has ended.
#[derive(Debug, Clone, Copy)]
pub struct EndedTask<'a> {
    /// Its job.
    pub job: JobId,
    /// Its place in the job.
    pub index: u32,
    /// What never changes of the job.
    pub facts: &'a Facts,
    /// What changes of the job.
    pub progress: &'a Progress,
    /// The task.
    pub cell: Cell,
    /// Its attempts, each with the sequence of its assignment.
    pub attempts: &'a [(u64, AttemptRow)],
}

/// Explains a task that has ended.
#[must_use]
pub fn task(task: &EndedTask<'_>) -> Explanation {
    let EndedTask { job, index, progress, cell, .. } = *task;
    let class = views::task_state(&cell, progress.rest).1;
    let decided = task.attempts.last().map(|(_, row)| row).filter(|row| row.end.name.number == u32::from(cell.number));
    let mut explanation = match (cell.phase, class, decided) {
        (Phase::Succeeded, _, Some(row)) => only(format!("the task succeeded in try {} on worker {}", cell.number, row.worker)),
        (Phase::Succeeded, ..) => only("the task succeeded".to_owned()),
        (Phase::Failed, Some(class), Some(row)) if class != FailureClass::QueueTimeout => {
            let what = row.end.message.as_deref().unwrap_or("no more is known");
            let nowhere =
                if class == FailureClass::InputMissing && matches!(row.end.cause, Some(Cause::NoImage(_))) { NOWHERE } else { "" };
            only(format!("the task failed in try {} on worker {}: {class}, {what}{nowhere}", cell.number, row.worker))
        }
        (_, class, _) => {
            only(format!("the task was {}", views::undecided(class, progress.reason.as_deref()).unwrap_or_else(|| "ended".to_owned())))
        }
    };
    explanation.details = details(task, class);
    explanation.next = match class {
        None => vec![format!("`volley outputs get {job} {index}` fetches its files, `volley logs {job} {index}` shows what it wrote")],
        Some(class) => next((job, index), class, task.facts.plan.needs.isolation, decided),
    };
    explanation
}

fn details(task: &EndedTask<'_>, class: Option<FailureClass>) -> Vec<String> {
    let (cell, retry) = (task.cell, &task.facts.plan.retry);
    let mut details = Vec::new();
    let hidden = task.attempts.len().saturating_sub(TRIES_SHOWN);
    if hidden > 0 {
        let earlier = units::counted(hidden as u64, "earlier try", "earlier tries");
        details.push(format!("{earlier}: `volley task {} {}` lists all", task.job, task.index));
    }
    details.extend(task.attempts.iter().skip(hidden).map(|(_, row)| attempt(row)));
    // An attempt that is being stopped has no row yet.
    if task.attempts.is_empty() && !cell.held {
        details.push("it was never with a worker".to_owned());
    }
    if let Some(class) = class.filter(|_| cell.phase == Phase::Failed) {
        details.extend(decided_by(task, class));
        details.push(format!(
            "in this round: {} of {} ($.task.retry.attempts), {} of {} ($.task.retry.infraAttempts)",
            cell.failures,
            units::counted(u64::from(retry.attempts), "try that may fail by itself", "tries that may fail by themselves"),
            cell.infra,
            units::count(u64::from(retry.infra_attempts), "infra failure")
        ));
    }
    if cell.held {
        details.push("its attempt is still being stopped on its worker; what it ends as is said then".to_owned());
    }
    details
}

fn attempt(row: &AttemptRow) -> String {
    let end = &row.end;
    let how = match end.ending {
        Ending::Succeeded => "succeeded".to_owned(),
        Ending::Returned => "handed back".to_owned(),
        Ending::Failed(class) => format!("{class}, {}", end.message.as_deref().unwrap_or("no more is known")),
    };
    // Of one that was lost with its worker nothing is measured.
    let ran = if end.timing == Timing::default() { String::new() } else { format!("; ran {} ms", end.timing.run_ms) };
    format!("try {} on worker {}: {how}{ran}", end.name.number, row.worker)
}

/// Why there was no further try.
fn decided_by(task: &EndedTask<'_>, class: FailureClass) -> Option<String> {
    if class == FailureClass::QueueTimeout {
        return Some("$.task.timeouts.queue ended all tasks of the job that waited".to_owned());
    }
    let code = task.attempts.last().and_then(|(_, row)| row.end.code);
    let mut before = task.cell;
    match class.is_infra() {
        true => before.infra = before.infra.saturating_sub(1),
        false => before.failures = before.failures.saturating_sub(1),
    }
    let rules = task.facts.plan.retry.rules.len();
    Some(match retry::verdict(&task.facts.plan.retry, &before, class, code) {
        Verdict::Rule(place) => format!("$.task.retry.rules[{place}] says that this is not tried again"),
        Verdict::Class if rules == 0 => format!("{class} is not tried again unless a rule in $.task.retry.rules says so; there is none"),
        Verdict::Class => {
            format!("{class} is not tried again, and of {} in $.task.retry.rules none is about it", units::count(rules as u64, "rule"))
        }
        Verdict::Budget(budget) if class.is_infra() => {
            let them = units::counted(u64::from(budget), "try for infra failures is", "tries for infra failures are");
            format!("its {them} used up ($.task.retry.infraAttempts)")
        }
        Verdict::Budget(budget) => {
            format!("its {} used up ($.task.retry.attempts)", units::counted(u64::from(budget), "try is", "tries are"))
        }
        Verdict::Again(_) => "the job was being ended, so it was not tried again".to_owned(),
    })
}

/// What can be done about a failure.
fn next((job, index): (JobId, u32), class: FailureClass, isolation: Isolation, decided: Option<&AttemptRow>) -> Vec<String> {
    let cause = decided.and_then(|row| row.end.cause);
    let mut next: Vec<String> = change(class, isolation, cause).into_iter().map(str::to_owned).collect();
    if decided.is_some() && cause.is_none() {
        next.push(format!("`volley logs {job} {index}` shows what it wrote"));
    }
    next.push(format!("`volley rerun {job}` runs every task again that did not succeed"));
    next
}

/// What would have to change for the next try to come out otherwise.
pub(super) fn change(class: FailureClass, isolation: Isolation, cause: Option<Cause>) -> Option<&'static str> {
    if let Some(cause) = cause {
        return Some(missing(cause));
    }
    let in_image = matches!(isolation, Isolation::Container | Isolation::Microvm);
    match class {
        FailureClass::ExitCode | FailureClass::Signal => None,
        FailureClass::Oom => Some("give it more memory ($.task.resources.memory) and submit again"),
        FailureClass::RunTimeout => Some("give it more time ($.task.timeouts.run) and submit again"),
        FailureClass::StartTimeout => Some("see why its inputs or its machine took so long; more time is $.task.timeouts.start"),
        FailureClass::QueueTimeout => {
            Some("start workers that can run it (`volley workers` lists those there are), or wait longer ($.task.timeouts.queue)")
        }
        FailureClass::RestoreFailed | FailureClass::GuestLost | FailureClass::HostLost => {
            Some("look at the worker's host and log (`volley workers`)")
        }
        FailureClass::InputMissing if in_image => {
            Some("do what the message says: put the input where $.task.inputs says, or correct what it names of $.task")
        }
        FailureClass::InputMissing => Some("put the input where $.task.inputs says"),
        FailureClass::StorageFailed => {
            Some("see that what the message names (the bucket, or the server of an input) can be reached from the workers")
        }
        FailureClass::PolicyDenied => Some("change what the rule forbids, or ask an operator"),
        FailureClass::Cancelled => None,
    }
}

/// The same, of what kept the task from beginning.
pub(super) fn missing(cause: Cause) -> &'static str {
    match cause {
        Cause::NoImage(_) => {
            "put the image on the worker's host (`volley image import IMAGE` there, `volley image ls` lists those it has), or correct $.task.image"
        }
        Cause::NoName => "correct $.task.image: `volley image ls` on a worker's host lists what its images are called",
        Cause::WarmUp => {
            "correct the command of $.task.warmUp that the message names, or what it needs ($.task.resources, the image's files)"
        }
        Cause::Build => {
            "see what the message says of the machine and its console; the worker's log has it too (`volley workers` names its host)"
        }
        Cause::TooLarge => {
            "ask for less memory ($.task.resources.memory), or start a worker with more room for templates (`volley worker --template-memory`)"
        }
    }
}

/// Explains a job that has ended.
#[must_use]
pub fn job(id: JobId, facts: &Facts, progress: &Progress) -> Explanation {
    let counts = progress.counts(facts.plan.tasks);
    let how = match progress.state(facts.plan.tasks) {
        JobState::Succeeded => "succeeded",
        JobState::Cancelled => "was cancelled",
        JobState::Failed | JobState::Queued | JobState::Running | JobState::Paused | JobState::Ending => "failed",
    };
    let why = progress.reason.as_deref().filter(|reason| *reason != "cancelled").map_or_else(String::new, |reason| format!(": {reason}"));
    let total = units::count(u64::from(counts.total), "task");
    let mut explanation = only(format!("the job {how}{why}; {} of {total} succeeded", counts.succeeded));
    let cause = progress.ending.map(|cause| match cause {
        EndCause::Cancelled => "somebody cancelled it",
        EndCause::FailFast => "$.limits.maxFailures ended it before its tasks were done",
        EndCause::Deadline => "$.limits.deadline ended it before its tasks were done",
        EndCause::Queue => "$.task.timeouts.queue ended it before its tasks were done",
    });
    explanation.details.extend(cause.map(str::to_owned));
    for class in FailureClass::ALL {
        let count = progress.by_class.get(&(class as u8)).copied().unwrap_or(0);
        let meaning = if class.is_infra() { ", without a verdict" } else { "" };
        explanation.details.extend((count > 0).then(|| format!("{} ended as {class}{meaning}", units::count(u64::from(count), "task"))));
    }
    if let Some(class) = progress.rest {
        let count = facts.plan.tasks.saturating_sub(progress.next_fresh);
        let them = units::counted(u64::from(count), "of them was", "of them were");
        explanation.details.push(format!("{them} never given out, the first is task {} ({class})", progress.next_fresh));
    }
    explanation.details.extend(
        progress.exit_code(facts.plan.tasks).map(|code| format!("`volley run` ends with exit code {code}; it is round {}", progress.round)),
    );
    if let Some(trouble) = &progress.trouble {
        explanation.details.push(views::trouble(trouble));
        explanation.next.push(missing(trouble.cause).to_owned());
    }
    if counts.succeeded == counts.total {
        explanation.next.push(format!("`volley results {id}` shows what came of it"));
    } else {
        explanation.next.push(format!(
            "`volley results {id} --failed` shows each task that did not succeed, `volley explain {id} TASK` says more of one"
        ));
        explanation.next.push(format!("`volley rerun {id}` runs every task again that did not succeed"));
    }
    explanation
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeMap;

    use volley_jobspecs::ids::{AttemptName, TenantId, WorkerId};
    use volley_jobspecs::parse::parse_and_validate;
    use volley_jobspecs::validate::Features;
    use volley_jobspecs::wire::plan::SpecRef;
    use volley_jobspecs::wire::report::AttemptEnd;

    fn facts(retry: &str) -> Facts {
        let spec = format!(
            r#"{{"version":"volley/v1","name":"x","items":{{"count":9}},"task":{{"isolation":"process","command":"true","retry":{retry}}}}}"#
        );
        let job = parse_and_validate(spec.as_bytes(), &Features::all()).unwrap_or_else(|e| panic!("{e}"));
        let (tenant, plan) = (TenantId::new("t").unwrap(), volley_jobspecs::plan::plan(&job, 9));
        Facts {
            tenant,
            principal: "p".into(),
            key: "k".into(),
            plan,
            spec: SpecRef::Inline(Vec::new().into()),
            trace: None,
            submitted_ms: 0,
        }
    }

    fn row(number: u32, class: FailureClass, code: i32) -> (u64, AttemptRow) {
        let name = AttemptName { job: JobId(1), stage: 0, index: 3, number, sequence: 7 };
        let end = AttemptEnd {
            code: Some(code),
            message: Some(format!("exit code {code}")),
            timing: Timing { run_ms: 60, ..Timing::default() },
            ..AttemptEnd::bare(name, Ending::Failed(class), Isolation::Process)
        };
        (7, AttemptRow { worker: WorkerId::new("w").unwrap(), end, assigned_ms: 0, ended_ms: 0 })
    }

    fn said(retry: &str, phase: Phase, class: FailureClass, attempts: &[(u64, AttemptRow)], progress: &Progress) -> Explanation {
        let mut cell = Cell::FRESH;
        let tries = attempts.len() as u16;
        (cell.phase, cell.failures, cell.number) = (phase, tries, tries);
        cell.set_class(Some(class));
        task(&EndedTask { job: JobId(1), index: 3, facts: &facts(retry), progress, cell, attempts })
    }

    #[test]
    fn a_failed_task_names_its_tries_and_what_decided() {
        let (tries, progress) = ([row(1, FailureClass::ExitCode, 1), row(2, FailureClass::ExitCode, 2)], Progress::default());
        let spent = said(r#"{"attempts":2}"#, Phase::Failed, FailureClass::ExitCode, &tries, &progress);
        assert_eq!(spent.summary, "the task failed in try 2 on worker w: exit_code, exit code 2");
        assert_eq!(spent.details[0], "try 1 on worker w: exit_code, exit code 1; ran 60 ms");
        assert_eq!(spent.details[2], "its 2 tries are used up ($.task.retry.attempts)");
        assert!(spent.next.iter().any(|next| next.contains("volley rerun j1")), "{spent:?}");
        let ruled =
            r#"{"attempts":9,"rules":[{"match":{"signals":["SIGKILL"]},"action":"retry"},{"match":{"exitCodes":[2]},"action":"fail"}]}"#;
        let ruled = said(ruled, Phase::Failed, FailureClass::ExitCode, &tries, &progress);
        assert_eq!(ruled.details[2], "$.task.retry.rules[1] says that this is not tried again");
        let class =
            said(r#"{"attempts":9}"#, Phase::Failed, FailureClass::InputMissing, &[row(1, FailureClass::InputMissing, 0)], &progress);
        assert!(class.details[1].contains("not tried again unless a rule"), "{class:?}");
        let many: Vec<_> = (1..=9).map(|number| row(number, FailureClass::ExitCode, 1)).collect();
        assert!(said(r#"{"attempts":9}"#, Phase::Failed, FailureClass::ExitCode, &many, &progress).details[0].contains("4 earlier tries"));
    }

    #[test]
    fn what_can_be_done_depends_on_what_was_missing() {
        let with = |cause, class, said_by| {
            let (sequence, mut failed) = row(1, said_by, 0);
            failed.end.cause = Some(cause);
            said(
                "{}",
                Phase::Failed,
                class,
                &[(sequence, AttemptRow { end: AttemptEnd { code: None, ..failed.end }, ..failed })],
                &Progress::default(),
            )
        };
        let mut rows = with(Cause::NoImage(1), FailureClass::InputMissing, FailureClass::RestoreFailed);
        assert!(rows.next[0].contains("volley image import"), "{rows:?}");
        rows = with(Cause::WarmUp, FailureClass::InputMissing, FailureClass::InputMissing);
        assert!(rows.next[0].contains("$.task.warmUp") && !rows.next.iter().any(|next| next.contains("volley logs")), "{rows:?}");
        rows = with(Cause::Build, FailureClass::RestoreFailed, FailureClass::RestoreFailed);
        assert!(rows.next[0].contains("console") && !rows.next[0].contains("image"), "{rows:?}");
        rows = with(Cause::TooLarge, FailureClass::PolicyDenied, FailureClass::PolicyDenied);
        assert!(rows.next[0].contains("--template-memory"), "{rows:?}");
    }

    #[test]
    fn what_ended_with_its_job_says_why() {
        let reason = "no worker took any of its tasks within 5000 ms ($.task.timeouts.queue): no worker had joined the cluster";
        let progress = Progress {
            reason: Some(reason.into()),
            ending: Some(EndCause::Queue),
            rest: Some(FailureClass::QueueTimeout),
            by_class: BTreeMap::from([(FailureClass::QueueTimeout as u8, 9)]),
            ended_ms: Some(1),
            ..Progress::default()
        };
        let fresh =
            task(&EndedTask { job: JobId(1), index: 3, facts: &facts("{}"), progress: &progress, cell: Cell::FRESH, attempts: &[] });
        assert_eq!(fresh.summary, format!("the task was given up with its job: {reason}"));
        assert!(fresh.details.contains(&"it was never with a worker".to_owned()) && fresh.next[0].contains("volley workers"), "{fresh:?}");
        let mut held = Cell::FRESH;
        held.held = true;
        let held = task(&EndedTask { job: JobId(1), index: 3, facts: &facts("{}"), progress: &progress, cell: held, attempts: &[] });
        assert!(
            held.details.iter().all(|line| !line.contains("never with")) && held.details[0].contains("still being stopped"),
            "{held:?}"
        );
        let whole = job(JobId(1), &facts("{}"), &progress);
        assert!(
            whole.summary.contains(reason) && whole.details.iter().any(|d| d == "9 tasks ended as queue_timeout, without a verdict"),
            "{whole:?}"
        );
        assert!(whole.details.iter().any(|d| d.starts_with("`volley run` ends with exit code 3")), "{whole:?}");
    }
}
