//! `volley job`.

use jiff::Timestamp;
use volley_jobspecs::api::{JobView, TemplateView};
use volley_jobspecs::ids::JobId;
use volley_jobspecs::units::count;

use crate::clean;
use crate::ctx::Ctx;
use crate::error::CliError;
use crate::exit::Exit;
use crate::summary::{self, state};
use crate::table::fields;
use crate::units;
use crate::verbs::run::remarks;

/// Longest line about what keeps tasks from beginning, in characters: a reason and the end of a console.
const TROUBLE_CHARS: usize = 2_000;

/// Arguments.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The job.
    job: JobId,
    /// Prints its spec instead, as JSON with all defaults written out.
    #[arg(long)]
    spec: bool,
}

/// Carries it out.
pub async fn run(ctx: &Ctx, args: Args) -> Result<Exit, CliError> {
    let client = ctx.client()?;
    if args.spec {
        let spec = client.job_spec(args.job).await?;
        ctx.out.show(&spec, || format!("{spec:#}\n"))?;
    } else {
        let job = client.job(args.job).await?;
        // Of the job itself nobody knows; who reads JSON asks for the rows.
        let remarks = if ctx.out.json() { 0 } else { remarks(&client, &job).await? };
        ctx.out.show(&job, || text(&job, remarks, Timestamp::now()))?;
    }
    Ok(Exit::Success)
}

fn text(job: &JobView, with_remarks: u64, now: Timestamp) -> String {
    let counts = &job.tasks;
    let number = |number: u32| {
        if number == 0 { String::new() } else { number.to_string() }
    };
    let joined = |pairs: Vec<String>| pairs.join(", ");
    fields(&[
        ("job", job.job.clone()),
        ("name", job.name.clone()),
        ("tenant", job.tenant.clone()),
        ("state", state(job)),
        ("reason", clean::cell(job.reason.as_deref().unwrap_or_default(), 200)),
        ("in the way", clean::cell(job.trouble.as_deref().unwrap_or_default(), TROUBLE_CHARS)),
        ("tasks", counts.total.to_string()),
        ("  waiting", number(counts.waiting)),
        ("  running", number(counts.running)),
        ("  to be retried", number(counts.backoff)),
        ("  succeeded", number(counts.succeeded)),
        ("    with remarks", summary::remarks(&job.job, with_remarks)),
        ("  failed", number(counts.failed)),
        ("  without verdict", number(counts.infra_failed)),
        ("  cancelled", number(counts.cancelled)),
        ("machines", joined(job.templates.iter().map(template).collect())),
        ("failures", joined(job.failures.iter().map(|(class, tasks)| format!("{class} {tasks}")).collect())),
        ("labels", joined(job.labels.iter().map(|(key, value)| clean::cell(&format!("{key}={value}"), 300)).collect())),
        ("priority", job.priority.to_string()),
        ("round", if job.round > 1 { job.round.to_string() } else { String::new() }),
        ("submitted", format!("{} ({} ago)", job.submitted, units::age(&job.submitted, now))),
        ("started", job.started.clone().unwrap_or_default()),
        ("ended", job.ended.clone().unwrap_or_default()),
        ("took", units::span(job.started.as_deref(), job.ended.as_deref(), now)),
        ("exit code", job.exit_code.map(|code| code.to_string()).unwrap_or_default()),
        ("objects", job.objects.clone()),
        ("trace", job.trace_id.clone().unwrap_or_default()),
    ])
}

/// `building template at worker-1 for 12s (4 tasks wait)`.
fn template(of: &TemplateView) -> String {
    let wait = if of.tasks == 1 { "waits" } else { "wait" };
    let tasks = count(u64::from(of.tasks), "task");
    format!("{} at {} for {} ({tasks} {wait})", of.step, clean::cell(&of.worker, 100), units::time(of.for_ms))
}

#[cfg(test)]
mod tests {
    use volley_jobspecs::api::{JobState, TaskCounts};

    use super::*;
    use crate::testing;

    #[test]
    fn a_job_is_shown_without_what_is_zero() {
        let now = "2026-01-01T00:02:00Z".parse().unwrap_or_else(|e| panic!("{e}"));
        let counts = TaskCounts { total: 4, succeeded: 2, failed: 2, ..TaskCounts::default() };
        let text = text(&testing::job(JobState::Failed, counts, Some(1)), 0, now);
        assert!(text.contains("submitted    2026-01-01T00:00:00Z (2m00s ago)\n"), "{text}");
        assert!(text.contains("  failed     2\n") && !text.contains("cancelled") && !text.contains("round"), "{text}");
    }
}
