//! `volley cancel`.

use volley_jobspecs::api::CancelRequest;

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
    each_job(ctx, &args.jobs.jobs, async |client, job| client.cancel(job, &request).await).await
}
