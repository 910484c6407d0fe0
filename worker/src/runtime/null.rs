//! The null tier: an attempt completes at once, and nothing runs. It measures everything but the task.
//!
//! Run inline by the driver: no slot task, no channel, no allocation per attempt.

use crate::attempt::Outcome;

/// What every attempt comes to.
#[must_use]
pub fn run() -> Outcome {
    Outcome::success()
}
