//! `volley cancel`.

use std::cell::Cell;

use volley_jobspecs::api::CancelRequest;
use volley_jobspecs::units;
use volley_sdk::Client;

use crate::ctx::Ctx;
use crate::each::{JobsArg, each_job};
use crate::error::CliError;
use crate::exit::Exit;

/// Arguments.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    jobs: JobsArg,
    /// Stops tasks that run. Otherwise they may end.
    #[arg(long)]
    now: bool,
    /// Why, for whoever looks at the job later.
    #[arg(long, value_name = "TEXT", default_value = "")]
    reason: String,
}

/// Carries it out.
pub async fn run(ctx: &Ctx, args: Args) -> Result<Exit, CliError> {
    let request = CancelRequest { now: args.now, reason: args.reason };
    let running = Cell::new(0);
    let work = async |client: &Client, job| {
        let view = client.cancel(job, &request).await?;
        running.set(running.get() + u64::from(view.tasks.running));
        Ok(view)
    };
    let done = each_job(ctx, &args.jobs.jobs, work).await;
    if running.get() > 0 && !args.now {
        let tasks = units::count(running.get(), "task");
        ctx.out.note(&format!("{tasks} that run may end by themselves; `volley cancel --now` stops them"));
    }
    done
}
