//! `volley submit`.

use serde_json::json;
use volley_sdk::{Client, IdempotencyKey, SubmitOptions, Submitted};

use crate::clean;
use crate::ctx::Ctx;
use crate::error::CliError;
use crate::exit::Exit;
use crate::spec_file::{KeepArgs, SpecArgs};
use crate::table::count;

/// Longest warning shown, in characters.
const WARNING_CHARS: usize = 500;

/// Arguments.
// Without a group of its own, since `run` has these arguments too and a group's name must be unique.
#[derive(Debug, clap::Args)]
#[group(skip)]
pub struct Args {
    #[command(flatten)]
    pub(crate) spec: SpecArgs,
    #[command(flatten)]
    pub(crate) keep: KeepArgs,
    /// Names this submit. For a day the same key with the same spec is the same job. Default: a fresh one.
    #[arg(long, value_name = "TEXT")]
    pub(crate) key: Option<IdempotencyKey>,
}

/// Carries it out.
pub async fn run(ctx: &Ctx, args: Args) -> Result<Exit, CliError> {
    let submitted = submit(ctx, &ctx.patient_client()?, &args).await?;
    let job = submitted.job;
    let answer = json!({ "job": job.to_string(), "tasks": submitted.tasks, "existed": submitted.existed });
    ctx.out.show(&answer, || format!("{job}\n"))?;
    if !ctx.out.json() {
        ctx.out.note(&format!("next: `volley wait {job}`, `volley results {job} --follow`, `volley explain {job}` (why it does not run)"));
    }
    Ok(Exit::Success)
}

/// Validates here, uploads what belongs to the spec, submits.
pub(crate) async fn submit(ctx: &Ctx, client: &Client, args: &Args) -> Result<Submitted, CliError> {
    let loaded = args.spec.load_keeping(args.keep.keep_failed.as_deref())?;
    let key = match &args.key {
        Some(key) => key.clone(),
        None => IdempotencyKey::random()?,
    };
    let text = loaded.upload(ctx, client).await?;
    let options = SubmitOptions { key: Some(key), trace: ctx.trace.as_ref().map(|trace| trace.context()) };
    let submitted = client.submit_with(text, &options).await?;
    if let Some(trace) = &ctx.trace {
        trace.submitted(submitted.job);
    }
    let name = &loaded.job.spec().name;
    let known = if submitted.existed { " (was there already, under the same key)" } else { "" };
    ctx.out.note(&format!("{}: {name}, {}{known}", submitted.job, count(u64::from(submitted.tasks), "task")));
    warn(ctx, &submitted.warnings);
    Ok(submitted)
}

/// Says what keeps a job from running as things are now. Not in JSON on standard output alone: who reads that may not look.
pub(crate) fn warn(ctx: &Ctx, warnings: &[String]) {
    for warning in warnings {
        ctx.out.note(&format!("warning: {}", clean::cell(warning, WARNING_CHARS)));
    }
}
