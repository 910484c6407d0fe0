//! Spans of a coordinator: a submit, a job from its acceptance to its end, and attempts that were lost.
//!
//! Owns what they say and where they hang: caller → submit → job → attempts (which the workers tell of). Pure; the callers bring clock
//! and randomness. Does not own when they are told (`driver`, `api/submit`) or sending them (`volley_jobspecs::observe`).

use volley_jobspecs::api::JobState;
use volley_jobspecs::failure::FailureClass;
use volley_jobspecs::ids::{AttemptName, JobId};
use volley_jobspecs::observe::{Span, SpanKind, Value};
use volley_jobspecs::units;
use volley_jobspecs::wire::trace::TraceContext;

use crate::state::effects::AttemptRow;
use crate::state::job::{Facts, Progress};

/// The context of a submit: in the caller's trace, or in a new one. `ids` are 24 random bytes; `records` decides whether the trace is
/// recorded, given its id and what the caller decided.
#[must_use]
pub fn of_submit(
    caller: Option<&TraceContext>,
    ids: [u8; 24],
    records: impl FnOnce([u8; 16], Option<bool>) -> bool,
) -> Option<TraceContext> {
    let (trace, span) = ids.split_first_chunk::<16>()?;
    let trace = caller.map_or(*trace, TraceContext::trace);
    let sampled = records(trace, caller.map(TraceContext::sampled));
    TraceContext::new(trace, span.try_into().ok()?, sampled)
}

/// The context of a job; none for jobs that were submitted to a build without traces, or with a context that was none.
#[must_use]
pub fn of_job(id: JobId, facts: &Facts) -> Option<TraceContext> {
    Some(submit_of(facts)?.of_job(id))
}

/// The id by which people find a job's trace.
#[must_use]
pub fn id_of(facts: &Facts) -> Option<String> {
    submit_of(facts).map(|context| context.trace_id())
}

fn submit_of(facts: &Facts) -> Option<TraceContext> {
    facts.trace.as_deref()?.parse().ok()
}

/// The span of a submit. `outcome` is the job, or why there is none.
#[must_use]
pub fn submit_span(
    context: TraceContext,
    caller: Option<&TraceContext>,
    (start_us, end_us): (u64, u64),
    outcome: Result<&str, String>,
) -> Span {
    Span {
        context,
        parent: caller.map(TraceContext::span),
        remote: caller.is_some(),
        kind: SpanKind::Server,
        name: "submit",
        start_us,
        end_us,
        attributes: outcome.as_ref().map(|job| vec![("volley.job", Value::from(*job))]).unwrap_or_default(),
        error: outcome.err(),
    }
}

/// The span of a job that has ended; none while it goes on, or when it has no trace. A later round hangs below the first; when it
/// began is `round_ms`, in milliseconds since 1970, as far as anybody remembers.
#[must_use]
pub fn job_span(id: JobId, facts: &Facts, progress: &Progress, round_ms: Option<u64>) -> Option<Span> {
    let (submit, ended_ms) = (submit_of(facts)?, progress.ended_ms?);
    let job = submit.of_job(id);
    let first = progress.round <= 1;
    let total = facts.plan.tasks;
    let (counts, state) = (progress.counts(total), progress.state(total));
    let start_ms = if first { facts.submitted_ms } else { round_ms.unwrap_or(ended_ms) };
    let mut attributes = vec![
        ("volley.job", Value::from(id.to_string())),
        ("volley.job.name", facts.plan.name.as_str().into()),
        ("volley.tenant", facts.tenant.as_str().into()),
        ("volley.job.state", word(state).into()),
        ("volley.job.round", progress.round.into()),
        ("volley.tasks", counts.total.into()),
        ("volley.tasks.succeeded", counts.succeeded.into()),
        ("volley.tasks.failed", counts.failed.into()),
        ("volley.tasks.infra_failed", counts.infra_failed.into()),
        ("volley.tasks.cancelled", counts.cancelled.into()),
    ];
    attributes.extend(progress.reason.as_deref().map(|reason| ("volley.job.reason", reason.into())));
    let error = (state == JobState::Failed).then(|| {
        let bad = counts.failed + counts.infra_failed;
        progress.reason.clone().unwrap_or_else(|| format!("{bad} of {} did not succeed", units::count(u64::from(total), "task")))
    });
    Some(Span {
        context: if first { job } else { job.derived(&[progress.round.into()]) },
        parent: Some(if first { submit.span() } else { job.span() }),
        // Whoever took the submit may have been another coordinator.
        remote: first,
        kind: SpanKind::Internal,
        name: if first { "job" } else { "rerun" },
        start_us: start_ms.saturating_mul(1_000),
        end_us: ended_ms.max(start_ms).saturating_mul(1_000),
        attributes,
        error,
    })
}

/// The span of an attempt that nobody can tell of but the leader: its worker is lost, or forgot it. `job` is its job's context.
#[must_use]
pub fn lost_span(job: &TraceContext, name: &AttemptName, row: &AttemptRow) -> Span {
    let class = FailureClass::HostLost.as_str();
    Span {
        context: job.of_attempt(name),
        parent: Some(job.span()),
        remote: true,
        kind: SpanKind::Internal,
        name: "attempt",
        start_us: row.assigned_ms.saturating_mul(1_000),
        end_us: row.ended_ms.max(row.assigned_ms).saturating_mul(1_000),
        attributes: vec![
            ("volley.job", Value::from(name.job.to_string())),
            ("volley.task", name.index.into()),
            ("volley.attempt", name.number.into()),
            ("volley.worker", row.worker.as_str().into()),
            ("volley.outcome", class.into()),
        ],
        error: Some(row.end.message.clone().unwrap_or_else(|| class.to_owned())),
    }
}

fn word(state: JobState) -> &'static str {
    match state {
        JobState::Queued => "queued",
        JobState::Running => "running",
        JobState::Paused => "paused",
        JobState::Ending => "ending",
        JobState::Succeeded => "succeeded",
        JobState::Failed => "failed",
        JobState::Cancelled => "cancelled",
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use volley_jobspecs::ids::TenantId;
    use volley_jobspecs::parse::parse_and_validate;
    use volley_jobspecs::plan::plan;
    use volley_jobspecs::validate::Features;
    use volley_jobspecs::wire::plan::SpecRef;

    const CALLER: &str = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-00";

    fn random() -> [u8; 24] {
        std::array::from_fn(|at| at as u8 + 1)
    }

    #[test]
    fn a_submit_goes_on_with_its_callers_trace_or_begins_one() {
        let caller: TraceContext = CALLER.parse().unwrap_or_else(|e| panic!("{e}"));
        let decided = |trace: [u8; 16], parent: Option<bool>| parent.unwrap_or(trace[0] == 1);
        let below = of_submit(Some(&caller), random(), decided).map(|context| context.to_string());
        assert_eq!(below.as_deref(), Some("00-4bf92f3577b34da6a3ce929d0e0e4736-1112131415161718-00"));
        let root = of_submit(None, random(), decided).map(|context| context.to_string());
        assert_eq!(root.as_deref(), Some("00-0102030405060708090a0b0c0d0e0f10-1112131415161718-01"));
        assert_eq!(of_submit(None, [0; 24], decided), None);
    }

    #[test]
    fn a_submit_hangs_below_its_caller_and_says_why_it_was_refused() {
        let caller: TraceContext = CALLER.parse().unwrap_or_else(|e| panic!("{e}"));
        let context = of_submit(Some(&caller), random(), |_, _| true).unwrap_or(caller);
        let span = submit_span(context, Some(&caller), (1, 2), Err("no".to_owned()));
        assert_eq!((span.parent, span.remote, span.error.as_deref()), (Some(caller.span()), true, Some("no")));
        let span = submit_span(context, None, (1, 2), Ok("j7"));
        assert_eq!((span.parent, span.attributes), (None, vec![("volley.job", "j7".into())]));
    }

    fn facts() -> Facts {
        let spec = br#"{"version":"volley/v1","name":"x","items":{"count":9},"task":{"isolation":"process","command":"true"}}"#;
        let job = parse_and_validate(spec, &Features::all()).unwrap_or_else(|e| panic!("{e}"));
        Facts {
            tenant: TenantId::new("t").unwrap_or_else(|e| panic!("{e}")),
            principal: "p".into(),
            key: "k".into(),
            plan: plan(&job, 9),
            spec: SpecRef::Inline(Vec::new().into()),
            trace: Some(CALLER.to_owned()),
            submitted_ms: 5,
        }
    }

    #[test]
    fn a_job_is_told_of_at_its_end_and_each_later_round_below_it() {
        let (id, facts) = (JobId(7), facts());
        let mut progress = Progress { round: 1, succeeded: 8, ..Progress::default() };
        assert_eq!(job_span(id, &facts, &progress, None), None);
        progress.ended_ms = Some(9);
        progress.by_class.insert(FailureClass::ExitCode as u8, 1);
        let job = job_span(id, &facts, &progress, None).unwrap_or_else(|| panic!("a span"));
        assert_eq!((job.name, job.start_us, job.end_us), ("job", 5_000, 9_000));
        assert_eq!(Some(job.context), of_job(id, &facts));
        assert_eq!(job.error.as_deref(), Some("1 of 9 tasks did not succeed"));
        progress.round = 2;
        let rerun = job_span(id, &facts, &progress, Some(8)).unwrap_or_else(|| panic!("a span"));
        assert_eq!((rerun.name, rerun.parent, rerun.start_us), ("rerun", Some(job.context.span()), 8_000));
        assert_ne!(rerun.context, job.context);
        let old = Facts { trace: Some("4bf9-00".to_owned()), ..facts };
        assert_eq!((job_span(id, &old, &progress, None), id_of(&old)), (None, None));
    }
}
