//! `volley explain`.

use volley_jobspecs::api::Explanation;
use volley_jobspecs::ids::JobId;

use crate::clean;
use crate::ctx::Ctx;
use crate::error::CliError;
use crate::exit::Exit;
use crate::table::table;

/// Longest sentence shown, in characters.
const LINE_CHARS: usize = 1_000;

/// Arguments.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The job.
    job: JobId,
    /// The task, counted from 0. Left out: the job as a whole.
    task: Option<u32>,
}

/// Carries it out.
pub async fn run(ctx: &Ctx, args: Args) -> Result<Exit, CliError> {
    let client = ctx.client()?;
    let explanation = match args.task {
        Some(task) => client.explain(args.job, task).await?,
        None => client.explain_job(args.job).await?,
    };
    ctx.out.show(&explanation, || text(&explanation))?;
    Ok(Exit::Success)
}

fn text(explanation: &Explanation) -> String {
    let mut summary = format!("{}\n", clean::cell(&explanation.summary, LINE_CHARS));
    for detail in &explanation.details {
        summary.push_str(&format!("  {}\n", clean::cell(detail, LINE_CHARS)));
    }
    for next in &explanation.next {
        summary.push_str(&format!("next: {}\n", clean::cell(next, LINE_CHARS)));
    }
    if explanation.workers.is_empty() {
        return summary;
    }
    let row = |worker: &volley_jobspecs::api::WorkerExplanation| {
        let reasons = if worker.reasons.is_empty() { "fits".to_owned() } else { worker.reasons.join("; ") };
        vec![worker.worker.clone(), clean::cell(&reasons, LINE_CHARS)]
    };
    format!("{summary}\n{}", table(&["WORKER", "IN THE WAY"], explanation.workers.iter().map(row).collect()))
}
