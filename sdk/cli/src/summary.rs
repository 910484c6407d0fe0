//! The end of a run: what came of it, where it lies, what to do next.
//!
//! Owns its text and its JSON. Does not own reading what it shows (`verbs::run`).

use serde::Serialize;
use volley_jobspecs::api::JobView;

use crate::clean;
use crate::exit::Exit;
use crate::failures::{CANCELLED, Group};
use crate::table::{count, fields, table};
use crate::units;

/// Longest message shown, in characters.
const MESSAGE_CHARS: usize = 80;

/// What a run came to.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Summary {
    /// The job.
    pub job: JobView,
    /// The largest groups of failures.
    pub failures: Vec<Group>,
    /// They come from so many result rows; fewer than there are when the job is large.
    pub rows_read: u64,
    /// How many of those rows are successes with a remark.
    pub remarks: u64,
    /// What the command exits with.
    pub exit_code: u8,
}

impl Summary {
    /// Puts it together.
    #[must_use]
    pub fn new(job: JobView, failures: Vec<Group>, rows_read: u64, remarks: u64) -> Self {
        let exit_code = Exit::of_job(&job).code();
        Self { job, failures, rows_read, remarks, exit_code }
    }

    /// For people.
    #[must_use]
    pub fn text(&self) -> String {
        let job = &self.job;
        let counts = &job.tasks;
        let mut text = format!("\n{} {}: {}", job.job, job.name, state(job));
        if let Some(reason) = job.reason.as_deref().filter(|reason| !reason.is_empty()) {
            text.push_str(&format!(" ({})", clean::cell(reason, MESSAGE_CHARS)));
        }
        let now = jiff::Timestamp::now();
        let took = units::span(Some(&job.submitted), job.ended.as_deref(), now);
        text.push_str(&format!(", {} in {took}\n\n", count(u64::from(counts.total), "task")));
        let number = |number: u32| {
            if number == 0 { String::new() } else { number.to_string() }
        };
        text.push_str(&fields(&[
            ("  succeeded", counts.succeeded.to_string()),
            ("    with remarks", remarks(&job.job, self.remarks)),
            ("  failed", number(counts.failed)),
            ("  without verdict", number(counts.infra_failed)),
            ("  cancelled", number(counts.cancelled)),
        ]));
        if !job.failures.is_empty() {
            let rows = job.failures.iter().map(|(class, tasks)| vec![format!("  {class}"), tasks.to_string()]).collect();
            text.push_str(&format!("\n{}", table(&["  FAILURE CLASS", "TASKS"], rows)));
        }
        if !self.failures.is_empty() {
            let row = |group: &Group| {
                let message = clean::cell(&group.message, MESSAGE_CHARS);
                vec![format!("  {}", group.tasks), group.class.clone(), group.first.to_string(), message]
            };
            let rows = self.failures.iter().map(row).collect();
            text.push_str(&format!("\n{}", table(&["  TASKS", "CLASS", "FIRST", "MESSAGE"], rows)));
            let shown: u32 = self.failures.iter().map(|group| group.tasks).sum();
            let more = (counts.failed + counts.infra_failed + counts.cancelled).saturating_sub(shown);
            if self.rows_read < u64::from(counts.total) {
                text.push_str(&format!("  (of the first {})\n", count(self.rows_read, "result")));
            } else if more > 0 {
                text.push_str(&format!(
                    "  and {} in smaller groups: `volley results {} --failed`\n",
                    count(u64::from(more), "task"),
                    job.job
                ));
            }
        }
        text.push_str(&format!("\noutputs and logs: {}\n", job.objects));
        text.push_str(&self.next());
        text
    }

    fn next(&self) -> String {
        let job = &self.job.job;
        let counts = &self.job.tasks;
        match self.failures.iter().find(|group| group.class != CANCELLED) {
            Some(group) => format!(
                "next: `volley results {job} --failed`, `volley logs {job} {}`, `volley outputs get {job}`, `volley rerun {job}`\n",
                group.first
            ),
            // Nothing came of it.
            None if counts.succeeded == 0 && counts.cancelled > 0 => String::new(),
            None => format!("next: `volley results {job}`, `volley outputs get {job}`\n"),
        }
    }
}

/// How many tasks succeeded with something to be said, and how to see it; nothing when none did.
#[must_use]
pub fn remarks(job: &str, number: u64) -> String {
    if number == 0 { String::new() } else { format!("{number} (`volley results {job} --remarks`)") }
}

/// A job's state in a word, as its JSON has it.
#[must_use]
pub fn state(job: &JobView) -> String {
    word(&job.state)
}

/// The word that a value of the API has in JSON.
#[must_use]
pub fn word<T: Serialize>(value: &T) -> String {
    serde_json::to_value(value).ok().and_then(|value| value.as_str().map(ToOwned::to_owned)).unwrap_or_default()
}

#[cfg(test)]
mod tests {
    use volley_jobspecs::api::{JobState, TaskCounts};

    use super::*;
    use crate::testing::job;

    #[test]
    fn the_summary_says_what_where_and_what_next() {
        let counts = TaskCounts { total: 4, succeeded: 2, failed: 2, ..TaskCounts::default() };
        let group = Group { class: "exit_code".into(), message: "exit code 1".into(), tasks: 2, first: 3 };
        let summary = Summary::new(job(JobState::Failed, counts, Some(1)), vec![group], 4, 0);
        assert_eq!(
            summary.text(),
            "
j7 evals: failed, 4 tasks in 1m06s

  succeeded  2
  failed     2

  FAILURE CLASS  TASKS
  exit_code      2

  TASKS  CLASS      FIRST  MESSAGE
  2      exit_code  3      exit code 1

outputs and logs: s3://volley/jobs/j7/
next: `volley results j7 --failed`, `volley logs j7 3`, `volley outputs get j7`, `volley rerun j7`
"
        );
        assert_eq!(summary.exit_code, 1);
        let counts = TaskCounts { total: 9, succeeded: 2, failed: 6, cancelled: 1, ..TaskCounts::default() };
        let group = Group { class: "exit_code".into(), message: "exit code 1".into(), tasks: 2, first: 3 };
        let text = Summary::new(job(JobState::Failed, counts, Some(1)), vec![group], 9, 0).text();
        assert!(text.contains("\n  and 5 tasks in smaller groups: `volley results j7 --failed`\n"), "{text}");
    }

    #[test]
    fn successes_with_remarks_are_counted_when_there_are_any() {
        let counts = TaskCounts { total: 4, succeeded: 4, ..TaskCounts::default() };
        let text = |remarks| Summary::new(job(JobState::Succeeded, counts.clone(), Some(0)), Vec::new(), 4, remarks).text();
        assert!(text(2).contains("\n  succeeded       4\n    with remarks  2 (`volley results j7 --remarks`)\n"), "{}", text(2));
        assert!(!text(0).contains("remarks"));
    }

    #[test]
    fn logs_are_those_of_a_failed_task_and_never_of_a_cancelled_one() {
        let group = |class: &str, first| Group { class: class.into(), message: String::new(), tasks: 2, first };
        let counts = TaskCounts { total: 4, failed: 1, cancelled: 3, ..TaskCounts::default() };
        let stopped = Summary::new(job(JobState::Failed, counts, Some(1)), vec![group("cancelled", 1), group("exit_code", 3)], 4, 0);
        assert!(stopped.next().contains("`volley logs j7 3`"), "{}", stopped.next());
        let counts = TaskCounts { total: 4, cancelled: 4, ..TaskCounts::default() };
        let cancelled = Summary::new(job(JobState::Cancelled, counts, Some(4)), vec![group("cancelled", 1)], 4, 0);
        assert_eq!(cancelled.next(), "");
    }
}
