//! `volley schema`.

use volley_jobspecs::schema::job_schema_text;

use crate::ctx::Ctx;
use crate::error::CliError;
use crate::exit::Exit;

/// Arguments.
#[derive(Debug, clap::Args)]
pub struct Args {}

/// Carries it out.
pub fn run(ctx: &Ctx, _: Args) -> Result<Exit, CliError> {
    ctx.out.raw(job_schema_text().as_bytes())?;
    Ok(Exit::Success)
}
