//! What failed, for the end of a run.
//!
//! Owns grouping failures by class and message. Does not own reading rows (`verbs`).

use std::collections::BTreeMap;

use serde::Serialize;
use volley_jobspecs::api::{ResultRow, TaskState};

use crate::clean;

/// Most different messages kept apart: more are no groups any more.
const GROUPS_MAX: usize = 1_000;
/// Longest message compared, in characters: behind that, ids and addresses make every message another one.
const MESSAGE_CHARS_MAX: usize = 100;

/// Longest message kept of a group, in characters.
const MESSAGE_KEPT_MAX: usize = 500;
/// The class of tasks that were cancelled.
pub const CANCELLED: &str = "cancelled";

/// Failures with the same class, and the same first part of their messages.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Group {
    /// The class.
    pub class: String,
    /// The message of the first of them, shortened.
    pub message: String,
    /// How many tasks.
    pub tasks: u32,
    /// The first of them.
    pub first: u32,
}

/// Groups failures.
#[derive(Debug, Default)]
pub struct Tally {
    groups: BTreeMap<(String, String), (u32, u32, String)>,
    failures: u64,
    rows: u64,
    remarks: u64,
}

/// Did the task succeed with something to be said, such as that an output was skipped?
#[must_use]
pub fn is_remark(row: &ResultRow) -> bool {
    row.state == TaskState::Succeeded && row.message.is_some()
}

impl Tally {
    /// Takes a row; one that succeeded counts as read only.
    pub fn add(&mut self, row: &ResultRow) {
        self.rows += 1;
        self.remarks += u64::from(is_remark(row));
        if row.state == TaskState::Succeeded {
            return;
        }
        self.failures += 1;
        let class = match row.state {
            TaskState::Cancelled => CANCELLED,
            _ => row.class.map_or("failed", |class| class.as_str()),
        };
        let message = row.message.as_deref().unwrap_or_default().lines().next().unwrap_or_default();
        // What a message says behind its first part is each task's own: that a process was left, that a machine was kept.
        let verdict = message.split("; ").next().unwrap_or_default();
        let key = (class.to_owned(), clean::line(verdict, MESSAGE_CHARS_MAX));
        let full = self.groups.len() >= GROUPS_MAX;
        match self.groups.get_mut(&key) {
            Some((tasks, first, shown)) => {
                *tasks += 1;
                if row.index < *first {
                    (*first, *shown) = (row.index, clean::line(message, MESSAGE_KEPT_MAX));
                }
            }
            None if full => {}
            None => {
                self.groups.insert(key, (1, row.index, clean::line(message, MESSAGE_KEPT_MAX)));
            }
        }
    }

    /// How many rows were read.
    #[must_use]
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// How many of them succeeded with remarks.
    #[must_use]
    pub fn remarks(&self) -> u64 {
        self.remarks
    }

    /// How many of them had not succeeded.
    #[must_use]
    pub fn failures(&self) -> u64 {
        self.failures
    }

    /// The largest groups, largest first.
    #[must_use]
    pub fn top(&self, most: usize) -> Vec<Group> {
        let group = |((class, _), (tasks, first, message)): (&(String, String), &(u32, u32, String))| Group {
            class: class.clone(),
            message: message.clone(),
            tasks: *tasks,
            first: *first,
        };
        let mut groups: Vec<Group> = self.groups.iter().map(group).collect();
        groups.sort_by(|a, b| b.tasks.cmp(&a.tasks).then(a.first.cmp(&b.first)));
        groups.truncate(most);
        groups
    }
}

#[cfg(test)]
mod tests {
    use volley_jobspecs::failure::FailureClass;

    use super::*;
    use crate::testing::row;

    #[test]
    fn the_largest_group_comes_first_with_its_first_task() {
        let mut tally = Tally::default();
        tally.add(&row(9, Some(FailureClass::RunTimeout), Some("ran longer than 3s")));
        for index in [8, 5] {
            tally.add(&row(index, Some(FailureClass::ExitCode), Some("exit code 1\nmore")));
        }
        tally.add(&row(1, None, None));
        let top = tally.top(5);
        assert_eq!((top[0].class.as_str(), top[0].message.as_str(), top[0].tasks, top[0].first), ("exit_code", "exit code 1", 2, 5));
        let mut tally_of_kept = Tally::default();
        for index in [4, 2, 3] {
            let message = format!("exit code 9; its machine was kept: volley exec j1 {index}");
            tally_of_kept.add(&row(index, Some(FailureClass::ExitCode), Some(&message)));
        }
        let kept = tally_of_kept.top(5);
        assert_eq!((kept.len(), kept[0].tasks, kept[0].first), (1, 3, 2));
        assert!(kept[0].message.ends_with("j1 2"), "the message is the first one's: {}", kept[0].message);
        assert_eq!((top.len(), tally.rows(), tally.failures(), tally.top(1).len()), (2, 4, 3, 1));
    }
}
