//! The cases: a task, and what is expected of it in every tier.
//!
//! Owns what a case is, and the words they are written in. A task has isolation, image, 64 MiB and a start timeout already; commands are
//! such that busybox and a distribution's own tools do the same.

mod ends;
mod environment;
mod files;
mod limits;
mod streams;

use std::time::Duration;

use serde_json::{Value, json};
use volley_jobspecs::failure::FailureClass;
use volley_jobspecs::wire::report::Ending;

use crate::run::{Seen, Tier};

type Check = Box<dyn Fn(&Seen) -> Result<(), String> + Send + Sync>;

/// A case.
pub struct Case {
    pub name: String,
    /// Fields of `task`.
    pub task: Value,
    /// In the image with a user of its own.
    pub user: bool,
    /// Attempts, one after another in one slot.
    pub count: u32,
    /// Is it stopped from outside, when its command has run for so long?
    pub stop_after: Option<Duration>,
    /// Stdout is another each time.
    pub varies: bool,
    /// How it ends is the shell's choice.
    pub free: bool,
    checks: Vec<Check>,
    differs: Vec<(Tier, &'static str)>,
    skips: Vec<(Tier, &'static str)>,
}

/// A case that runs this in a shell.
pub fn shell(name: &str, script: &str) -> Case {
    case(name, json!({ "command": script }))
}

/// A case that runs these words.
pub fn words(name: &str, words: &[&str]) -> Case {
    case(name, json!({ "command": words }))
}

/// A case.
pub fn case(name: &str, task: Value) -> Case {
    Case {
        name: name.to_owned(),
        task,
        user: false,
        count: 1,
        stop_after: None,
        varies: false,
        free: false,
        checks: Vec::new(),
        differs: Vec::new(),
        skips: Vec::new(),
    }
}

impl Case {
    /// Adds fields of the task.
    pub fn with(mut self, more: Value) -> Self {
        if let (Some(task), Value::Object(more)) = (self.task.as_object_mut(), more) {
            task.extend(more);
        }
        self
    }

    /// Expects something more.
    pub fn check(mut self, check: impl Fn(&Seen) -> Result<(), String> + Send + Sync + 'static) -> Self {
        self.checks.push(Box::new(check));
        self
    }

    /// Each attempt succeeded.
    pub fn ok(self) -> Self {
        self.check(|seen| all(seen, |seen_end| seen_end == (Ending::Succeeded, Some(0)), "success"))
    }

    /// It failed with this exit code.
    pub fn code(self, code: i32) -> Self {
        self.failed(FailureClass::ExitCode, Some(code))
    }

    /// It was ended by this signal.
    pub fn signal(self, signal: i32) -> Self {
        self.failed(FailureClass::Signal, Some(signal))
    }

    /// It failed so.
    pub fn failed(self, class: FailureClass, code: Option<i32>) -> Self {
        self.check(move |seen| all(seen, |end| end == (Ending::Failed(class), code), &format!("{class:?} with {code:?}")))
    }

    /// It failed so, whatever the code.
    pub fn class(self, class: FailureClass) -> Self {
        self.check(move |seen| all(seen, |(ending, _)| ending == Ending::Failed(class), &format!("{class:?}")))
    }

    /// This is all it wrote to stdout.
    pub fn out(self, wanted: &str) -> Self {
        let wanted = wanted.to_owned();
        self.check(move |seen| that(seen.out() == wanted, &format!("stdout {wanted:?}")))
    }

    /// This is all it wrote to stderr.
    pub fn err(self, wanted: &str) -> Self {
        let wanted = wanted.to_owned();
        self.check(move |seen| that(seen.err() == wanted, &format!("stderr {wanted:?}")))
    }

    /// The message says this.
    pub fn says(self, wanted: &str) -> Self {
        let wanted = wanted.to_owned();
        self.check(move |seen| that(seen.message().contains(&wanted), &format!("a message with {wanted:?}")))
    }

    /// These are all the output files.
    pub fn paths(self, wanted: &[&str]) -> Self {
        let wanted: Vec<String> = wanted.iter().map(|path| (*path).to_owned()).collect();
        self.check(move |seen| that(seen.paths() == wanted, &format!("files {wanted:?}")))
    }

    /// An output file holds this.
    pub fn file(self, path: &str, bytes: &[u8]) -> Self {
        let (path, bytes) = (path.to_owned(), bytes.to_vec());
        self.check(move |seen| that(seen.file(&path) == Some(&bytes), &format!("the file {path:?}, {} bytes", bytes.len())))
    }

    /// Stdout is another each time.
    pub fn varies(mut self) -> Self {
        self.varies = true;
        self
    }

    /// How it ends is the shell's choice.
    pub fn free(mut self) -> Self {
        self.free = true;
        self
    }

    /// In the image with a user of its own; the process tier has no image.
    pub fn in_its_users_image(mut self) -> Self {
        self.user = true;
        self.skip(Tier::Process, "it has no image")
    }

    /// Several attempts, one after another in one slot.
    pub fn times(mut self, count: u32) -> Self {
        self.count = count;
        self
    }

    /// Stopped from outside.
    pub fn stopped_after_ms(mut self, ms: u64) -> Self {
        self.stop_after = Some(Duration::from_millis(ms));
        self
    }

    /// This tier is known to do something else.
    pub fn differs(mut self, tier: Tier, why: &'static str) -> Self {
        self.differs.push((tier, why));
        self
    }

    /// This tier has nothing of the kind.
    pub fn skip(mut self, tier: Tier, why: &'static str) -> Self {
        self.skips.push((tier, why));
        self
    }

    /// Runs for so long at most, with so much time after TERM.
    pub fn within(self, run: &str, grace: &str) -> Self {
        self.with(json!({ "timeouts": { "run": run, "grace": grace } }))
    }

    pub fn holds(&self, seen: &Seen) -> Result<(), String> {
        self.checks.iter().try_for_each(|check| check(seen))
    }

    pub fn differing(&self, tier: Tier) -> Option<&'static str> {
        self.differs.iter().find(|(of, _)| *of == tier).map(|(_, why)| *why)
    }

    pub fn skipped(&self, tier: Tier) -> Option<&'static str> {
        self.skips.iter().find(|(of, _)| *of == tier).map(|(_, why)| *why)
    }
}

/// Ok, or that this was expected.
pub fn that(holds: bool, wanted: &str) -> Result<(), String> {
    if holds { Ok(()) } else { Err(format!("expected {wanted}")) }
}

fn all(seen: &Seen, holds: impl Fn((Ending, Option<i32>)) -> bool, wanted: &str) -> Result<(), String> {
    that(seen.ends.iter().all(|end| holds((end.ending, end.code))), wanted)
}

/// All of them.
pub fn all_cases() -> Vec<Case> {
    [ends::cases(), streams::cases(), environment::cases(), files::cases(), limits::cases()].into_iter().flatten().collect()
}
