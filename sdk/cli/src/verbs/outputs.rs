//! `volley outputs`.

use std::io::IsTerminal as _;
use std::path::{Path, PathBuf};

use clap::Subcommand;
use futures::{StreamExt as _, TryStreamExt as _};
use serde_json::json;
use volley_jobspecs::api::OutputFile;
use volley_jobspecs::ids::JobId;
use volley_sdk::{Client, ResultsQuery};

use crate::clean;
use crate::ctx::Ctx;
use crate::error::CliError;
use crate::exit::Exit;
use crate::progress::Transfer;
use crate::table::{count, table};
use crate::units;

/// Files fetched at once: enough to fill a network, few enough to leave the coordinator room.
const FETCHES_AT_ONCE: usize = 8;

/// Arguments.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(subcommand)]
    verb: Verb,
}

#[derive(Debug, Subcommand)]
enum Verb {
    /// Lists output files.
    Ls(Which),
    /// Fetches output files to DIR/TASK/PATH and checks them.
    Get(Get),
}

#[derive(Debug, clap::Args)]
struct Which {
    /// The job.
    job: JobId,
    /// The task, counted from 0. Left out: all tasks.
    task: Option<u32>,
    /// Of which try, counted from 1. Default: the one that decided.
    #[arg(long, value_name = "N", requires = "task")]
    attempt: Option<u32>,
}

#[derive(Debug, clap::Args)]
struct Get {
    #[command(flatten)]
    which: Which,
    /// Only these files, as `outputs ls` names them.
    #[arg(value_name = "PATH")]
    paths: Vec<String>,
    /// Where to. Default: a directory named like the job.
    #[arg(long, value_name = "DIR")]
    dir: Option<PathBuf>,
    /// Writes the one file to standard output.
    #[arg(long, conflicts_with = "dir", requires = "paths")]
    stdout: bool,
}

/// An output file of a task.
#[derive(Debug, Clone)]
struct Found {
    task: u32,
    file: OutputFile,
}

/// Carries it out.
pub async fn run(ctx: &Ctx, args: Args) -> Result<Exit, CliError> {
    let client = ctx.client()?;
    match args.verb {
        Verb::Ls(which) => {
            let found = find(&client, &which, &[]).await?;
            let view = |found: &Found| json!({ "index": found.task, "path": found.file.path, "bytes": found.file.bytes, "sha256": found.file.sha256 });
            let views: Vec<_> = found.iter().map(view).collect();
            ctx.out.show(&views, || files_table(&found))?;
        }
        Verb::Get(get) if get.stdout => to_stdout(ctx, &client, &get).await?,
        Verb::Get(get) => to_dir(ctx, &client, &get).await?,
    }
    Ok(Exit::Success)
}

/// The files of a task, or of every task that has some.
async fn find(client: &Client, which: &Which, paths: &[String]) -> Result<Vec<Found>, CliError> {
    let mut tasks = Vec::new();
    match which.task {
        Some(task) => tasks.push(task),
        None => {
            let mut results = client.results(which.job, ResultsQuery::now());
            while let Some(row) = results.next().await {
                let row = row?;
                if row.output_files > 0 {
                    tasks.push(row.index);
                }
            }
            tasks.sort_unstable();
            tasks.dedup();
        }
    }
    let list = |task: u32| async move {
        let files = client.outputs(which.job, task, which.attempt).await?;
        Ok::<_, CliError>(files.into_iter().map(move |file| Found { task, file }).collect::<Vec<_>>())
    };
    let found: Vec<Vec<Found>> = futures::stream::iter(tasks).map(list).buffered(FETCHES_AT_ONCE).try_collect().await?;
    let found: Vec<Found> = found.into_iter().flatten().collect();
    if let Some(missing) = paths.iter().find(|path| !found.iter().any(|found| found.file.path == **path)) {
        let next = format!("`volley outputs ls {}` lists what there is", which.job);
        return Err(CliError::NotFound(format!("there is no output {missing:?}; {next}")));
    }
    Ok(found.into_iter().filter(|found| paths.is_empty() || paths.contains(&found.file.path)).collect())
}

async fn to_stdout(ctx: &Ctx, client: &Client, get: &Get) -> Result<(), CliError> {
    let (Some(task), [path]) = (get.which.task, get.paths.as_slice()) else {
        return Err(CliError::Usage("--stdout takes one task and one path".into()));
    };
    let mut output = client.output(get.which.job, task, get.which.attempt, path).await?;
    let mut filter = std::io::stdout().is_terminal().then(clean::Filter::default);
    while let Some(chunk) = output.chunk().await? {
        match &mut filter {
            Some(filter) => ctx.out.raw(&filter.feed(&chunk))?,
            None => ctx.out.raw(&chunk)?,
        }
    }
    Ok(())
}

async fn to_dir(ctx: &Ctx, client: &Client, get: &Get) -> Result<(), CliError> {
    let which = &get.which;
    let dir = get.dir.clone().unwrap_or_else(|| PathBuf::from(which.job.to_string()));
    let found = find(client, which, &get.paths).await?;
    let bytes: u64 = found.iter().map(|found| found.file.bytes).sum();
    let transfer = Transfer::start(ctx.out, &format!("fetching {}", count(found.len() as u64, "file")), bytes);
    let progress = |bytes| transfer.add(bytes);
    let fetch = |found: &Found| {
        let (dir, found) = (target_dir(&dir, found.task), found.clone());
        let progress = &progress;
        async move { client.fetch_output(which.job, found.task, which.attempt, &found.file, &dir, progress).await }
    };
    let fetched: Result<Vec<PathBuf>, _> =
        futures::stream::iter(found.iter().map(fetch)).buffer_unordered(FETCHES_AT_ONCE).try_collect().await;
    transfer.end();
    let fetched = fetched?.len();
    let answer = json!({ "dir": dir, "files": fetched, "bytes": bytes });
    ctx.out.show(&answer, || format!("{}, {} in {}\n", count(fetched as u64, "file"), units::bytes(bytes), dir.display()))
}

/// A directory a task: tasks' files have the same names more often than not.
fn target_dir(dir: &Path, task: u32) -> PathBuf {
    dir.join(task.to_string())
}

fn files_table(found: &[Found]) -> String {
    let row = |found: &Found| {
        let file = &found.file;
        vec![found.task.to_string(), clean::cell(&file.path, 200), units::bytes(file.bytes), file.sha256.clone()]
    };
    table(&["TASK", "PATH", "SIZE", "SHA-256"], found.iter().map(row).collect())
}
