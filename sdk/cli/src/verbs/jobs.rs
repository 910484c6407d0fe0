//! `volley jobs`.

use jiff::Timestamp;
use volley_jobspecs::api::{JobState, JobView, PAGE_ROWS_DEFAULT, PAGE_ROWS_MAX};
use volley_sdk::{Client, JobsQuery};

use crate::clean;
use crate::ctx::Ctx;
use crate::error::CliError;
use crate::exit::Exit;
use crate::progress::ended;
use crate::summary::state;
use crate::table::table;
use crate::units;

/// The operator's own tenant, which is there without being made or listed.
const DEFAULT_TENANT: &str = "default";

/// Arguments.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Only jobs in this state. One of queued, running, paused, ending, succeeded, failed, cancelled.
    #[arg(long, value_parser = job_state)]
    state: Option<JobState>,
    /// Only jobs of this name.
    #[arg(long, value_name = "NAME")]
    name: Option<String>,
    /// Only jobs with this label. May be repeated.
    #[arg(long = "label", value_name = "KEY=VALUE", value_parser = units::pair)]
    labels: Vec<(String, String)>,
    #[command(flatten)]
    page: PageArgs,
}

/// Which part of a list.
#[derive(Debug, clap::Args)]
pub struct PageArgs {
    /// Most rows.
    #[arg(long, value_name = "N", default_value_t = PAGE_ROWS_DEFAULT, value_parser = clap::value_parser!(u32).range(1..=i64::from(PAGE_ROWS_MAX)))]
    pub limit: u32,
    /// Goes on behind an earlier page.
    #[arg(long, value_name = "CURSOR")]
    pub after: Option<String>,
    /// All rows; as JSON, one a line.
    #[arg(long, conflicts_with_all = ["limit", "after"])]
    pub all: bool,
}

fn job_state(text: &str) -> Result<JobState, String> {
    serde_json::from_value(text.into()).map_err(|_| "one of queued, running, paused, ending, succeeded, failed, cancelled".to_owned())
}

/// Carries it out.
pub async fn run(ctx: &Ctx, args: Args) -> Result<Exit, CliError> {
    let client = ctx.client()?;
    let limit = if args.page.all { PAGE_ROWS_MAX } else { args.page.limit };
    let mut query = JobsQuery { state: args.state, name: args.name, labels: args.labels, limit: Some(limit), after: args.page.after };
    if !args.page.all {
        let page = client.jobs(&query).await?;
        if page.rows.is_empty() {
            tenant_is_there(ctx, &client).await?;
        }
        ctx.out.show(&page, || jobs_table(&page.rows, Timestamp::now()))?;
        more(ctx, page.next.as_deref());
        return Ok(Exit::Success);
    }
    let mut rows = Vec::new();
    loop {
        let page = client.jobs(&query).await?;
        if ctx.out.json() {
            page.rows.iter().try_for_each(|job| ctx.out.row(job))?;
        } else {
            rows.extend(page.rows);
        }
        match page.next {
            Some(next) => query.after = Some(next),
            None => break,
        }
    }
    if !ctx.out.json() {
        ctx.out.raw(jobs_table(&rows, Timestamp::now()).as_bytes())?;
    }
    Ok(Exit::Success)
}

/// An empty list of a tenant that there isn't is a mistake in its name. Only an operator can know.
async fn tenant_is_there(ctx: &Ctx, client: &Client) -> Result<(), CliError> {
    let Some(name) = ctx.tenant().filter(|name| *name != DEFAULT_TENANT) else { return Ok(()) };
    match client.tenants().await {
        Ok(tenants) if tenants.iter().all(|tenant| tenant.tenant != name) => {
            Err(CliError::NotFound(format!("no tenant {name}; `volley tenant ls` lists them, `volley tenant add {name}` makes it")))
        }
        // Whoever may not list tenants was told already whether it may act for this one.
        Ok(_) | Err(_) => Ok(()),
    }
}

/// Says how to go on with a list.
pub(crate) fn more(ctx: &Ctx, next: Option<&str>) {
    if let (Some(next), false) = (next, ctx.out.json()) {
        ctx.out.note(&format!("there are more: --after {next}, or --all"));
    }
}

/// Jobs as a table.
#[must_use]
pub fn jobs_table(jobs: &[JobView], now: Timestamp) -> String {
    let of_many = jobs.windows(2).any(|pair| pair[0].tenant != pair[1].tenant);
    let row = |job: &JobView| {
        let tenant = job.tenant.clone();
        let cells = vec![
            job.job.clone(),
            job.name.clone(),
            state(job),
            format!("{}/{}", ended(&job.tasks), job.tasks.total),
            job.tasks.failed.to_string(),
            job.tasks.infra_failed.to_string(),
            job.tasks.cancelled.to_string(),
            units::age(&job.submitted, now),
            units::span(job.started.as_deref(), job.ended.as_deref(), now),
            clean::cell(job.reason.as_deref().unwrap_or_default(), 60),
        ];
        of_many.then_some(tenant).into_iter().chain(cells).collect()
    };
    let header = ["JOB", "NAME", "STATE", "DONE", "FAILED", "NO VERDICT", "CANCELLED", "AGE", "TOOK", "REASON"];
    let header: Vec<&str> = of_many.then_some("TENANT").into_iter().chain(header).collect();
    table(&header, jobs.iter().map(row).collect())
}

#[cfg(test)]
mod tests {
    use volley_jobspecs::api::TaskCounts;

    use super::*;
    use crate::testing::job;

    #[test]
    fn a_job_is_a_line() {
        let now = "2026-01-01T00:02:00Z".parse().unwrap_or_else(|e| panic!("{e}"));
        let counts = TaskCounts { total: 9, succeeded: 5, failed: 2, cancelled: 1, running: 1, ..TaskCounts::default() };
        let text = jobs_table(&[job(JobState::Running, counts, None)], now);
        assert_eq!(
            text,
            "JOB  NAME   STATE    DONE  FAILED  NO VERDICT  CANCELLED  AGE    TOOK   REASON\nj7   evals  running  8/9   2       0           1          2m00s  1m05s\n"
        );
    }

    #[test]
    fn states_are_the_apis_words() {
        assert_eq!(job_state("cancelled"), Ok(JobState::Cancelled));
        assert!(job_state("done").is_err());
    }
}
