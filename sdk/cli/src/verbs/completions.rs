//! `volley completions`.

use clap_complete::{Shell, generate};

use crate::cli::command;
use crate::ctx::Ctx;
use crate::error::CliError;
use crate::exit::Exit;

/// Arguments.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// For which shell.
    shell: Shell,
}

/// Carries it out.
pub fn run(ctx: &Ctx, args: Args) -> Result<Exit, CliError> {
    let mut script = Vec::new();
    generate(args.shell, &mut command(), "volley", &mut script);
    ctx.out.raw(&script)?;
    Ok(Exit::Success)
}
