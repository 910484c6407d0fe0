//! `volley run`.

use std::fs::File;
use std::io::{BufWriter, Write as _};
use std::path::{Path, PathBuf};

use volley_jobspecs::api::{JobView, ResultRow};
use volley_jobspecs::ids::JobId;
use volley_sdk::{Client, ResultsQuery};

use crate::ctx::Ctx;
use crate::error::CliError;
use crate::exit::Exit;
use crate::failures::Tally;
use crate::follow::{Followed, detached, follow};
use crate::out::{Out, json_line};
use crate::summary::Summary;
use crate::verbs::submit;

/// Most rows read for the summary's groups of failures: a large job's results are `volley results`' business.
const SUMMARY_ROWS_MAX: u64 = 50_000;
/// Most failures read for them: by then the largest groups are known.
const SUMMARY_FAILURES_MAX: u64 = 2_000;
/// Largest job whose results are read for remarks alone, in tasks: a fraction of a second. `volley results --remarks` reads any.
const REMARK_ROWS_MAX: u64 = 2_000;
/// Groups shown.
const GROUPS_SHOWN: usize = 5;

/// Arguments.
#[derive(Debug, clap::Args)]
pub struct Args {
    #[command(flatten)]
    submit: submit::Args,
    /// Writes each result as a line of JSON as it comes. `-` writes them to standard output and the summary to standard error.
    #[arg(long, value_name = "FILE")]
    results: Option<PathBuf>,
    /// Submits and goes, as `volley submit` does.
    #[arg(long, conflicts_with = "results")]
    detach: bool,
}

/// Carries it out.
pub async fn run(ctx: &Ctx, args: Args) -> Result<Exit, CliError> {
    if args.detach {
        return submit::run(ctx, args.submit).await;
    }
    let client = ctx.patient_client()?;
    // Made before the submit: a file that can't be written should not cost a job.
    let mut sink = args.results.as_deref().map(|path| Sink::open(ctx.out, path)).transpose()?;
    let job = submit::submit(ctx, &client, &args.submit).await?.job;
    let mut tally = Tally::default();
    let followed = match &mut sink {
        Some(sink) => {
            let mut take = |row: &ResultRow| {
                tally.add(row);
                sink.write(row)
            };
            follow(ctx.out, &client, job, Some(&mut take)).await?
        }
        None => follow(ctx.out, &client, job, None).await?,
    };
    let ended = match followed {
        Followed::Ended(ended) => *ended,
        Followed::Detached => {
            ctx.out.note(&detached(job));
            return Ok(Exit::Interrupted);
        }
    };
    if let Some(sink) = &mut sink {
        sink.finish()?;
    } else if ended.tasks.succeeded < ended.tasks.total || u64::from(ended.tasks.total) <= REMARK_ROWS_MAX {
        tally = read(&client, job).await?;
    }
    let to_stderr = sink.as_ref().is_some_and(Sink::is_stdout);
    show(ctx.out, to_stderr, ended, &tally)
}

/// Says what came of a job.
fn show(out: Out, to_stderr: bool, job: JobView, tally: &Tally) -> Result<Exit, CliError> {
    let exit = Exit::of_job(&job);
    let summary = Summary::new(job, tally.top(GROUPS_SHOWN), tally.rows(), tally.remarks());
    if to_stderr {
        out.note(&summary.text());
    } else {
        out.show(&summary, || summary.text())?;
    }
    Ok(exit)
}

/// Counts remarks, where a job is small enough that its results are read for them alone.
pub(crate) async fn remarks(client: &Client, job: &JobView) -> Result<u64, CliError> {
    let id = match job.job.parse() {
        Ok(id) if job.tasks.succeeded > 0 && u64::from(job.tasks.total) <= REMARK_ROWS_MAX => id,
        _ => return Ok(0),
    };
    Ok(read(client, id).await?.remarks())
}

/// Reads results until the largest groups of failures are known.
async fn read(client: &Client, job: JobId) -> Result<Tally, CliError> {
    let mut tally = Tally::default();
    let mut results = client.results(job, ResultsQuery::now());
    while tally.rows() < SUMMARY_ROWS_MAX && tally.failures() < SUMMARY_FAILURES_MAX {
        match results.next().await {
            Some(row) => tally.add(&row?),
            None => break,
        }
    }
    Ok(tally)
}

/// Where result rows go.
pub(crate) enum Sink {
    Stdout(Out),
    File(BufWriter<File>, PathBuf),
}

impl Sink {
    pub(crate) fn open(out: Out, path: &Path) -> Result<Self, CliError> {
        if path == Path::new("-") {
            return Ok(Self::Stdout(out));
        }
        let file = File::create(path).map_err(CliError::file(path, "write"))?;
        Ok(Self::File(BufWriter::new(file), path.to_owned()))
    }

    pub(crate) fn is_stdout(&self) -> bool {
        matches!(self, Self::Stdout(_))
    }

    pub(crate) fn write(&mut self, row: &ResultRow) -> Result<(), CliError> {
        match self {
            Self::Stdout(out) => out.row(row),
            Self::File(file, path) => file.write_all(&json_line(row)?).map_err(CliError::file(&*path, "write")),
        }
    }

    pub(crate) fn finish(&mut self) -> Result<(), CliError> {
        match self {
            Self::Stdout(_) => Ok(()),
            Self::File(file, path) => file.flush().map_err(CliError::file(&*path, "write")),
        }
    }
}
