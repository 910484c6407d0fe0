//! `volley results`.

use std::path::PathBuf;

use volley_jobspecs::api::{ResultRow, TaskState};
use volley_jobspecs::failure::FailureClass;
use volley_jobspecs::ids::JobId;
use volley_sdk::{Results, ResultsQuery};

use crate::clean;
use crate::ctx::Ctx;
use crate::error::CliError;
use crate::exit::Exit;
use crate::failures::is_remark;
use crate::progress::Line;
use crate::summary::word;
use crate::table::count;
use crate::units;
use crate::verbs::run::Sink;

/// Longest result or message shown, in characters.
const TEXT_CHARS: usize = 100;

/// Arguments.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The job.
    job: JobId,
    /// Only tasks that did not succeed.
    #[arg(long)]
    failed: bool,
    /// Only tasks that succeeded with a remark. Such as: processes that had to be killed, output that was skipped or is cut.
    #[arg(long, conflicts_with = "failed")]
    remarks: bool,
    /// Also rows that a rerun superseded. Without, each task has one row, its present one.
    #[arg(long)]
    all: bool,
    /// Waits for more until the job has ended.
    #[arg(short, long)]
    follow: bool,
    /// Writes the rows to a file, as lines of JSON.
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Only rows behind this cursor: the field `cursor` of an earlier row.
    #[arg(long, value_name = "CURSOR")]
    after: Option<String>,
}

/// Carries it out.
pub async fn run(ctx: &Ctx, args: Args) -> Result<Exit, CliError> {
    let client = if args.follow { ctx.patient_client()? } else { ctx.client()? };
    let mut results = client.results(args.job, ResultsQuery { after: args.after, follow: args.follow, superseded: args.all });
    let wanted = |row: &ResultRow| (!args.failed || row.state != TaskState::Succeeded) && (!args.remarks || is_remark(row));
    match args.out {
        Some(path) => {
            let mut sink = Sink::open(ctx.out, &path)?;
            let rows = to_file(ctx, &mut results, &mut sink, wanted).await?;
            ctx.out.note(&format!("{} in {}", count(rows, "row"), path.display()));
        }
        None => {
            // Not before the first answer: an error has no columns.
            let mut begun = ctx.out.json();
            loop {
                let row = results.next().await.transpose()?;
                if !std::mem::replace(&mut begun, true) {
                    ctx.out.raw(header().as_bytes())?;
                }
                let Some(row) = row else { break };
                match (wanted(&row), ctx.out.json()) {
                    (false, _) => {}
                    (true, true) => ctx.out.row(&row)?,
                    // Line by line rather than as a table: rows are shown as they come, and there may be millions.
                    (true, false) => ctx.out.raw(line(&row).as_bytes())?,
                }
            }
        }
    }
    Ok(Exit::Success)
}

async fn to_file(ctx: &Ctx, results: &mut Results, sink: &mut Sink, wanted: impl Fn(&ResultRow) -> bool) -> Result<u64, CliError> {
    let mut progress = Line::start(ctx.out);
    let mut rows = 0;
    while let Some(row) = results.next().await {
        let row = row?;
        if wanted(&row) {
            sink.write(&row)?;
            rows += 1;
            if rows % 1_000 == 0 {
                progress.set(count(rows, "row"));
            }
        }
    }
    progress.end();
    sink.finish()?;
    Ok(rows)
}

fn header() -> String {
    format!("{:<8} {:<10} {:<14} {:>5} {:>5} {:>7}  {}\n", "TASK", "STATE", "CLASS", "CODE", "TRIES", "RAN", "RESULT OR MESSAGE")
}

fn line(row: &ResultRow) -> String {
    let mut text = match (&row.message, &row.result, &row.stdout_tail) {
        (Some(message), ..) => message.clone(),
        (None, Some(result), _) => result.to_string(),
        (None, None, Some(tail)) => tail.trim().lines().last().unwrap_or_default().to_owned(),
        (None, None, None) => String::new(),
    };
    if row.superseded {
        text = format!("(superseded by a rerun) {text}");
    }
    let class = row.class.map(|class| class.as_str()).unwrap_or_default();
    let code = row.code.map(|code| code.to_string()).unwrap_or_default();
    let state = word(&row.state);
    // What no worker told the end of was measured by none.
    let untold = matches!(row.class, Some(FailureClass::HostLost | FailureClass::QueueTimeout | FailureClass::Cancelled));
    let ran = if untold && row.run_ms == 0 { String::new() } else { units::time(u64::from(row.run_ms)) };
    let line =
        format!("{:<8} {state:<10} {class:<14} {code:>5} {:>5} {ran:>7}  {}", row.index, row.attempts, clean::cell(&text, TEXT_CHARS));
    line.trim_end().to_owned() + "\n"
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::testing::row;

    #[test]
    fn a_row_shows_why_it_failed_or_what_came_of_it() {
        let failed = line(&row(17, Some(FailureClass::RunTimeout), Some("ran longer than 3s\nand more")));
        assert_eq!(failed, "17       failed     run_timeout        1     1   120ms  ran longer than 3s and more\n");
        let lost = ResultRow { run_ms: 0, ..row(17, Some(FailureClass::HostLost), Some("worker w is lost")) };
        assert!(!line(&lost).contains("0ms"), "{}", line(&lost));
        let mut good = row(3, None, None);
        assert_eq!(line(&good), "3        succeeded                           1   120ms  out\n");
        good.superseded = true;
        assert!(line(&good).ends_with("120ms  (superseded by a rerun) out\n"));
        good.superseded = false;
        good.result = Some(serde_json::json!({ "score": 1 }));
        assert!(line(&good).ends_with("120ms  {\"score\":1}\n"));
        assert_eq!(header().split_once("RESULT").map(|(left, _)| left.len()), failed.find("ran longer"));
    }
}
