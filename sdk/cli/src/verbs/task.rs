//! `volley task`.

use serde_json::json;
use volley_jobspecs::api::{AttemptView, TaskView};
use volley_jobspecs::ids::JobId;

use crate::clean;
use crate::ctx::Ctx;
use crate::error::CliError;
use crate::exit::Exit;
use crate::summary::word;
use crate::table::{count, table};
use crate::units;
use crate::verbs::tasks::tasks_table;

/// Lines of each stream shown.
const TAIL_LINES: usize = 10;

/// Arguments.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The job.
    job: JobId,
    /// The task, counted from 0.
    task: u32,
}

/// Carries it out.
pub async fn run(ctx: &Ctx, args: Args) -> Result<Exit, CliError> {
    let client = ctx.client()?;
    let task = client.task(args.job, args.task).await?;
    let attempts = client.attempts(args.job, args.task).await?;
    ctx.out.show(&json!({ "task": task, "attempts": attempts }), || text(&task, &attempts))?;
    Ok(Exit::Success)
}

fn text(task: &TaskView, attempts: &[AttemptView]) -> String {
    let mut text = tasks_table(std::slice::from_ref(task));
    if attempts.is_empty() {
        return text;
    }
    let row = |attempt: &AttemptView| {
        let times = [attempt.wait_ms, attempt.prepare_ms, attempt.run_ms, attempt.persist_ms];
        // Of an attempt that is open, or was lost with its worker, nothing is measured.
        let measured = times.iter().any(|ms| *ms > 0);
        let [waited, prepared, ran, saved] = times.map(|ms| if measured { units::time(u64::from(ms)) } else { String::new() });
        vec![
            attempt.number.to_string(),
            word(&attempt.state),
            attempt.class.map(|class| class.to_string()).unwrap_or_default(),
            attempt.code.map(|code| code.to_string()).unwrap_or_default(),
            attempt.worker.clone(),
            attempt.isolation.clone(),
            waited,
            prepared,
            ran,
            saved,
            attempt.memory_bytes_max.map(units::bytes).unwrap_or_default(),
            clean::cell(attempt.message.as_deref().unwrap_or_default(), 80),
        ]
    };
    let header = ["TRY", "STATE", "CLASS", "CODE", "WORKER", "ISOLATION", "WAITED", "PREPARED", "RAN", "SAVED", "MEMORY", "MESSAGE"];
    text.push_str(&format!("\n{}", table(&header, attempts.iter().map(row).collect())));
    if let Some(last) = attempts.last() {
        tail(&mut text, "stdout", last.stdout_tail.as_deref(), last.stdout_bytes);
        tail(&mut text, "stderr", last.stderr_tail.as_deref(), last.stderr_bytes);
        if last.output_files > 0 {
            text.push_str(&format!("\noutputs: {}, {}\n", count(u64::from(last.output_files), "file"), units::bytes(last.output_bytes)));
        }
        text.push_str(&format!("\nobjects: {}\n", last.objects));
    }
    text
}

fn tail(text: &mut String, stream: &str, tail: Option<&str>, bytes: u64) {
    let Some(tail) = tail.filter(|tail| !tail.is_empty()) else {
        return;
    };
    let lines: Vec<&str> = tail.lines().collect();
    let shown = &lines[lines.len().saturating_sub(TAIL_LINES)..];
    text.push_str(&format!("\n{stream} ({}, last lines)\n", units::bytes(bytes)));
    for line in shown {
        text.push_str(&format!("  {}\n", clean::cell(line, 200)));
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tail_is_the_last_lines_without_what_could_move_the_cursor() {
        let mut text = String::new();
        let lines: String = (0..12).map(|n| format!("line {n}\x1b[A\n")).collect();
        tail(&mut text, "stderr", Some(&lines), 2048);
        assert!(text.starts_with("\nstderr (2.0 KiB, last lines)\n  line 2\u{fffd}[A\n"), "{text}");
        tail(&mut text, "stdout", Some(""), 0);
        assert_eq!(text.lines().count(), 12);
    }
}
