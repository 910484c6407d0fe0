//! `volley rm`.

use std::time::Duration;

use serde_json::json;
use volley_jobspecs::ids::JobId;
use volley_sdk::{Client, Error};

use crate::ctx::Ctx;
use crate::each::JobsArg;
use crate::error::CliError;
use crate::exit::Exit;
use crate::progress::Line;

/// First pause before it is looked whether a job is gone; most are after a round or two of the leader.
const LOOK_FIRST: Duration = Duration::from_millis(50);
/// Longest pause: each look costs the cluster one request.
const LOOK_MAX: Duration = Duration::from_secs(1);
/// How long nothing is said: who waits longer should see why.
const SILENT: Duration = Duration::from_secs(1);

/// Arguments.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    jobs: JobsArg,
    /// Doesn't wait until they are gone. The cluster removes them in the background, and shows them until then.
    #[arg(long)]
    no_wait: bool,
}

/// Carries it out. The first job that can't be removed ends it, once those before it are gone.
pub async fn run(ctx: &Ctx, args: Args) -> Result<Exit, CliError> {
    let client = ctx.patient_client()?;
    let (mut begun, mut failed) = (Vec::new(), None);
    for job in &args.jobs.jobs {
        match client.remove(*job).await {
            Ok(()) => begun.push(*job),
            Err(error) => {
                failed = Some(error);
                break;
            }
        }
    }
    for job in &begun {
        let word = if args.no_wait { "is being removed" } else { "is removed" };
        if !args.no_wait {
            wait_until_gone(ctx, &client, *job).await?;
        }
        // What is gone can't be shown any more, so it is said as it goes.
        if !ctx.out.json() {
            ctx.out.raw(format!("{job} {word}\n").as_bytes())?;
        }
    }
    if ctx.out.json() && (failed.is_none() || !begun.is_empty()) {
        let removed: Vec<String> = begun.iter().map(ToString::to_string).collect();
        ctx.out.show(&json!({ "removed": removed }), String::new)?;
    }
    failed.map_or(Ok(Exit::Success), |error| Err(error.into()))
}

async fn wait_until_gone(ctx: &Ctx, client: &Client, job: JobId) -> Result<(), CliError> {
    let (mut pause, mut waited, mut line) = (LOOK_FIRST, Duration::ZERO, None);
    loop {
        match client.job(job).await {
            Err(Error::Refused { status: 404, .. }) => break,
            Ok(_) => {}
            Err(error) => return Err(error.into()),
        }
        if waited >= SILENT {
            let line = line.get_or_insert_with(|| Line::start(ctx.out));
            line.set(format!("{job}: its objects are being deleted; Ctrl-C leaves that to the cluster"));
        }
        tokio::time::sleep(pause).await;
        waited += pause;
        pause = (pause * 2).min(LOOK_MAX);
    }
    if let Some(line) = line {
        line.end();
    }
    Ok(())
}
