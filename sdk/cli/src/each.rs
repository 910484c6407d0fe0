//! One request for each of several jobs.
//!
//! Owns going on after a failure, and what is shown of the jobs. Does not own the requests.

use std::io::Write as _;

use clap::Args;
use volley_jobspecs::api::JobView;
use volley_jobspecs::ids::JobId;
use volley_sdk::{Client, Error};

use crate::ctx::Ctx;
use crate::error::CliError;
use crate::exit::Exit;
use crate::verbs::jobs::jobs_table;

/// Which jobs.
#[derive(Debug, Clone, Args)]
pub struct JobsArg {
    /// The jobs, such as j1042.
    #[arg(value_name = "JOB", required = true)]
    pub jobs: Vec<JobId>,
}

/// Does something to each job and shows them as they are then. A job that fails doesn't keep the others from it; the first error is
/// what the command fails with.
pub async fn each_job(ctx: &Ctx, jobs: &[JobId], work: impl AsyncFn(&Client, JobId) -> Result<JobView, Error>) -> Result<Exit, CliError> {
    let client = ctx.client()?;
    let (mut done, mut failed) = (Vec::new(), None);
    for job in jobs {
        match work(&client, *job).await {
            Ok(view) => done.push(view),
            Err(error) => {
                if failed.is_none() {
                    failed = Some(error);
                } else {
                    // The last one is told when the command ends.
                    let _ = std::io::stderr().write_all(CliError::from(error).render(ctx.out.format).as_bytes());
                }
            }
        }
    }
    if !done.is_empty() {
        match (done.as_slice(), jobs) {
            ([one], [_]) => ctx.out.show(one, || jobs_table(&done, jiff::Timestamp::now()))?,
            _ => ctx.out.show(&done, || jobs_table(&done, jiff::Timestamp::now()))?,
        }
    }
    failed.map_or(Ok(Exit::Success), |error| Err(error.into()))
}
