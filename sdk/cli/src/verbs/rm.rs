//! `volley rm`.

use serde_json::json;

use crate::ctx::Ctx;
use crate::each::JobsArg;
use crate::error::CliError;
use crate::exit::Exit;

/// Arguments.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    jobs: JobsArg,
}

/// Carries it out. The first job that can't be removed ends it: what is gone can't be shown any more, so it is said as it goes.
pub async fn run(ctx: &Ctx, args: Args) -> Result<Exit, CliError> {
    let client = ctx.client()?;
    let mut removed = Vec::new();
    for job in &args.jobs.jobs {
        client.remove(*job).await?;
        if !ctx.out.json() {
            ctx.out.raw(format!("{job} is being removed\n").as_bytes())?;
        }
        removed.push(job.to_string());
    }
    if ctx.out.json() {
        ctx.out.show(&json!({ "removed": removed }), String::new)?;
    }
    Ok(Exit::Success)
}
