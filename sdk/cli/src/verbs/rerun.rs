//! `volley rerun`.

use crate::ctx::Ctx;
use crate::each::{JobsArg, each_job};
use crate::error::CliError;
use crate::exit::Exit;

/// Arguments.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    jobs: JobsArg,
}

/// Carries it out.
pub async fn run(ctx: &Ctx, args: Args) -> Result<Exit, CliError> {
    each_job(ctx, &args.jobs.jobs, async |client, job| client.rerun(job).await).await
}
