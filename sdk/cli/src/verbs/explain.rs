//! `volley explain`.

use volley_jobspecs::api::Explanation;
use volley_jobspecs::ids::JobId;

use crate::clean;
use crate::ctx::Ctx;
use crate::error::CliError;
use crate::exit::Exit;
use crate::table::table;

/// Arguments.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The job.
    job: JobId,
    /// The task, counted from 0.
    task: u32,
}

/// Carries it out.
pub async fn run(ctx: &Ctx, args: Args) -> Result<Exit, CliError> {
    let explanation = ctx.client()?.explain(args.job, args.task).await?;
    ctx.out.show(&explanation, || text(&explanation))?;
    Ok(Exit::Success)
}

fn text(explanation: &Explanation) -> String {
    let summary = format!("{}\n", clean::line(&explanation.summary, 500));
    if explanation.workers.is_empty() {
        return summary;
    }
    let row = |worker: &volley_jobspecs::api::WorkerExplanation| {
        let reasons = if worker.reasons.is_empty() { "fits".to_owned() } else { worker.reasons.join("; ") };
        vec![worker.worker.clone(), clean::line(&reasons, 200)]
    };
    format!("{summary}\n{}", table(&["WORKER", "IN THE WAY"], explanation.workers.iter().map(row).collect()))
}
