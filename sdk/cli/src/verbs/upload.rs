//! `volley upload`.

use std::path::PathBuf;

use serde_json::json;

use crate::ctx::Ctx;
use crate::error::CliError;
use crate::exit::Exit;
use crate::spec_file::upload;

/// Arguments.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The file. A spec names it by the id that is printed: `"upload": "ID"` for items, `"from": "upload:ID"` for an input.
    #[arg(value_name = "FILE")]
    file: PathBuf,
}

/// Carries it out.
pub async fn run(ctx: &Ctx, args: Args) -> Result<Exit, CliError> {
    let id = upload(ctx, &ctx.patient_client()?, &args.file).await?;
    ctx.out.show(&json!({ "id": id }), || format!("{id}\n"))?;
    Ok(Exit::Success)
}
