//! `volley wait`.

use std::time::Duration;

use volley_jobspecs::spec::DurationMs;

use crate::ctx::Ctx;
use crate::each::JobsArg;
use crate::error::CliError;
use crate::exit::Exit;
use crate::follow::{Followed, detached, follow};
use crate::units;
use crate::verbs::jobs::jobs_table;

/// The jobs are looked at for so long whatever the timeout is: with none at all, those that have ended are told.
const LOOK: Duration = Duration::from_secs(2);

/// Arguments.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    jobs: JobsArg,
    /// Gives up after this long, such as 30s or 2h, with exit code 124. The jobs go on.
    #[arg(long, value_name = "DURATION", value_parser = units::scalar::<DurationMs>)]
    timeout: Option<DurationMs>,
}

/// Carries it out.
pub async fn run(ctx: &Ctx, args: Args) -> Result<Exit, CliError> {
    let waiting = wait_all(ctx, &args);
    match args.timeout {
        None => waiting.await,
        Some(timeout) => match tokio::time::timeout(Duration::from_millis(timeout.0).max(LOOK), waiting).await {
            Ok(result) => result,
            Err(_) => {
                ctx.out.note(&format!("not ended within {timeout}; the jobs go on"));
                Ok(Exit::TimedOut)
            }
        },
    }
}

async fn wait_all(ctx: &Ctx, args: &Args) -> Result<Exit, CliError> {
    let client = ctx.patient_client()?;
    let (mut exit, mut ended) = (Exit::Success, Vec::new());
    // One after the other: those that end meanwhile have ended when it is their turn.
    for job in &args.jobs.jobs {
        match follow(ctx.out, &client, *job, None).await? {
            Followed::Ended(view) => {
                exit = exit.worst(Exit::of_job(&view));
                ended.push(*view);
            }
            Followed::Detached => {
                ctx.out.note(&detached(*job));
                return Ok(Exit::Interrupted);
            }
        }
    }
    match ended.as_slice() {
        [one] => ctx.out.show(one, || jobs_table(&ended, jiff::Timestamp::now()))?,
        _ => ctx.out.show(&ended, || jobs_table(&ended, jiff::Timestamp::now()))?,
    }
    Ok(exit)
}
