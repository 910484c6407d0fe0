//! `volley tasks`.

use volley_jobspecs::api::{PAGE_ROWS_MAX, TaskState, TaskView};
use volley_jobspecs::ids::JobId;
use volley_sdk::TasksQuery;

use crate::ctx::Ctx;
use crate::error::CliError;
use crate::exit::Exit;
use crate::summary::word;
use crate::table::table;
use crate::verbs::jobs::{PageArgs, more};

/// Arguments.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The job.
    job: JobId,
    /// Only tasks in this state. One of waiting, running, backoff, succeeded, failed, cancelled.
    #[arg(long, value_parser = task_state)]
    state: Option<TaskState>,
    #[command(flatten)]
    page: PageArgs,
}

fn task_state(text: &str) -> Result<TaskState, String> {
    serde_json::from_value(text.into()).map_err(|_| "one of waiting, running, backoff, succeeded, failed, cancelled".to_owned())
}

/// Carries it out.
pub async fn run(ctx: &Ctx, args: Args) -> Result<Exit, CliError> {
    let client = ctx.client()?;
    let limit = if args.page.all { PAGE_ROWS_MAX } else { args.page.limit };
    let mut query = TasksQuery { state: args.state, limit: Some(limit), after: args.page.after };
    loop {
        let page = client.tasks(args.job, &query).await?;
        if !args.page.all {
            ctx.out.show(&page, || tasks_table(&page.rows))?;
            more(ctx, page.next.as_deref());
            return Ok(Exit::Success);
        }
        // Page by page: all tasks of a large job need not fit in memory.
        if ctx.out.json() {
            page.rows.iter().try_for_each(|task| ctx.out.row(task))?;
        } else {
            ctx.out.raw(tasks_table(&page.rows).as_bytes())?;
        }
        match page.next {
            Some(next) => query.after = Some(next),
            None => return Ok(Exit::Success),
        }
    }
}

/// Tasks as a table.
#[must_use]
pub fn tasks_table(tasks: &[TaskView]) -> String {
    let row = |task: &TaskView| {
        vec![
            task.index.to_string(),
            word(&task.state),
            task.attempts.to_string(),
            task.class.map(|class| class.to_string()).unwrap_or_default(),
            task.worker.clone().unwrap_or_default(),
            task.next_try.clone().unwrap_or_default(),
        ]
    };
    table(&["TASK", "STATE", "TRIES", "LAST FAILURE", "WORKER", "NEXT TRY"], tasks.iter().map(row).collect())
}
