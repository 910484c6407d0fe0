//! `volley logs`.

use volley_jobspecs::api::LogLine;
use volley_jobspecs::ids::JobId;
use volley_jobspecs::utf8::Utf8;
use volley_sdk::{Client, ResultsQuery, TaskLogsQuery};

use crate::clean::Filter;
use crate::ctx::Ctx;
use crate::error::CliError;
use crate::exit::Exit;
use crate::table::counted;
use crate::tag::Tagger;

/// Arguments.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The job.
    job: JobId,
    /// The task, counted from 0. Left out: all tasks, each line tagged with its task.
    task: Option<u32>,
    /// Shows what was written so far and what follows. Until the task or the job has ended.
    #[arg(short, long)]
    follow: bool,
    /// Which stream.
    #[arg(long, value_parser = ["stdout", "stderr", "both"], default_value = "both", hide_default_value = true)]
    stream: String,
    /// Of which try, counted from 1. Default: the last.
    #[arg(long, value_name = "N", requires = "task", value_parser = clap::value_parser!(u32).range(1..))]
    attempt: Option<u32>,
    /// Passes everything on to the terminal. Also what could move the cursor or change the title.
    #[arg(long)]
    raw: bool,
}

/// Carries it out.
pub async fn run(ctx: &Ctx, args: Args) -> Result<Exit, CliError> {
    let client = ctx.client()?;
    let mut writer = Writer { ctx, filter: (ctx.out.stdout_is_terminal() && !args.raw).then(Filter::default) };
    match (args.task, args.follow) {
        (Some(task), _) => one(&client, &args, task, &mut writer).await?,
        (None, true) => all_live(&client, &args, &mut writer).await?,
        (None, false) => all_stored(&client, &args, &mut writer).await?,
    }
    Ok(Exit::Success)
}

struct Writer<'a> {
    ctx: &'a Ctx,
    filter: Option<Filter>,
}

impl Writer<'_> {
    fn text(&mut self, bytes: &[u8]) -> Result<(), CliError> {
        match &mut self.filter {
            Some(filter) => self.ctx.out.raw(&filter.feed(bytes)),
            None => self.ctx.out.raw(bytes),
        }
    }

    fn json(&self) -> bool {
        self.ctx.out.json()
    }
}

/// The streams to ask for one after the other, so that it is known which bytes are whose.
fn streams(stream: &str) -> &[&str] {
    match stream {
        "stdout" => &["stdout"],
        "stderr" => &["stderr"],
        _ => &["stdout", "stderr"],
    }
}

async fn one(client: &Client, args: &Args, task: u32, writer: &mut Writer<'_>) -> Result<(), CliError> {
    if !writer.json() {
        let query = TaskLogsQuery { stream: Some(args.stream.clone()), attempt: args.attempt, follow: args.follow };
        let mut logs = client.task_logs(args.job, task, &query).await?;
        while let Some(chunk) = logs.chunk().await? {
            let missed = logs.missed();
            if missed > 0 {
                let later = format!("once the try has ended, `volley logs {} {task}` has what was kept of it", args.job);
                writer.ctx.out.note(&format!("{} left out here; {later}", counted(missed, "byte is", "bytes are")));
            }
            writer.text(&chunk)?;
        }
        return Ok(());
    }
    if args.follow && args.stream == "both" {
        let why = "with -o json, --follow needs one stream: --stream stdout or --stream stderr, or leave the task out";
        return Err(CliError::Usage(why.into()));
    }
    for stream in streams(&args.stream) {
        let query = TaskLogsQuery { stream: Some((*stream).to_owned()), attempt: args.attempt, follow: args.follow };
        let mut logs = client.task_logs(args.job, task, &query).await?;
        let mut utf8 = Utf8::default();
        while let Some(chunk) = logs.chunk().await? {
            piece(writer, task, stream, utf8.feed(&chunk))?;
        }
        piece(writer, task, stream, utf8.finish())?;
    }
    Ok(())
}

/// A piece of a stream as a line of JSON, if there is anything in it.
fn piece(writer: &Writer<'_>, index: u32, stream: &str, text: String) -> Result<(), CliError> {
    if text.is_empty() {
        return Ok(());
    }
    writer.ctx.out.row(&LogLine { index, stream: stream.to_owned(), text })
}

async fn all_live(client: &Client, args: &Args, writer: &mut Writer<'_>) -> Result<(), CliError> {
    let mut logs = client.job_logs(args.job);
    let mut tagger = Tagger::default();
    while let Some(line) = logs.next().await? {
        if !streams(&args.stream).contains(&line.stream.as_str()) {
            continue;
        }
        if writer.json() {
            writer.ctx.out.row(&line)?;
        } else {
            let text = tagger.feed(line.index, &line.stream, line.text.as_bytes());
            writer.text(&text)?;
        }
    }
    writer.text(&tagger.end())
}

/// What the tasks that have ended wrote, in the order in which they ended.
async fn all_stored(client: &Client, args: &Args, writer: &mut Writer<'_>) -> Result<(), CliError> {
    let mut results = client.results(args.job, ResultsQuery::now());
    while let Some(row) = results.next().await {
        let index = row?.index;
        for stream in streams(&args.stream) {
            let query = TaskLogsQuery { stream: Some((*stream).to_owned()), attempt: None, follow: false };
            let mut logs = match client.task_logs(args.job, index, &query).await {
                Ok(logs) => logs,
                // Cancelled before it started: there is nothing it could have written.
                Err(error) if error.status() == Some(404) => continue,
                Err(error) => return Err(error.into()),
            };
            let (mut tagger, mut utf8) = (Tagger::default(), Utf8::default());
            while let Some(chunk) = logs.chunk().await? {
                if writer.json() {
                    piece(writer, index, stream, utf8.feed(&chunk))?;
                } else {
                    writer.text(&tagger.feed(index, stream, &chunk))?;
                }
            }
            piece(writer, index, stream, utf8.finish())?;
            writer.text(&tagger.end())?;
        }
    }
    let running = u64::from(client.job(args.job).await?.tasks.running);
    if running > 0 {
        let (them, job) = (counted(running, "task is", "tasks are"), args.job);
        writer.ctx.out.note(&format!(
            "{them} with workers still: `volley logs {job} TASK` shows what one wrote so far, `volley logs -f {job}` what all write"
        ));
    }
    Ok(())
}
