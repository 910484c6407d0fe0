//! Which attempts' machines are kept, and what their results say of it.
//!
//! Owns that decision: a failure of the task's own, never one that somebody wanted, nor one of the machine's or the cluster's. Does not own the
//! machines that are kept (`machines/kept`).

use std::time::{Duration, SystemTime, UNIX_EPOCH};

use volley_jobspecs::failure::FailureClass;
use volley_jobspecs::ids::AttemptName;

use crate::attempt::Outcome;
use crate::execute::ExecuteError;
use crate::prepare::Prepared;
use crate::runtime::Exit;
use crate::runtime::tiers::Tiers;

/// May it come to that? Then what people run in the machine stands still while its outputs are fetched, and goes on when it is kept. `timed_out` as of
/// [`StopSignal::timed_out`](crate::stop::StopSignal::timed_out).
pub fn may_be_kept(prepared: &Prepared, exit: &Result<Exit, ExecuteError>, timed_out: Option<bool>) -> bool {
    let failed = match (exit, timed_out) {
        (_, Some(false)) => false,
        (exit, Some(true)) => exit.is_ok(),
        (Ok(exit), None) => exit.oom || exit.code != Some(0),
        (Err(why), None) => why.class().0 == FailureClass::ExitCode,
    };
    failed && prepared.task.keep_failed_ms.is_some()
}

/// Is it, with this verdict?
pub fn is_kept(failure: Option<FailureClass>, timed_out: Option<bool>) -> bool {
    let own = |class| {
        matches!(
            class,
            FailureClass::ExitCode | FailureClass::Signal | FailureClass::Oom | FailureClass::RunTimeout | FailureClass::PolicyDenied
        )
    };
    match timed_out {
        // Cancelled, or the worker leaves.
        Some(false) => false,
        // Ending well when told that time is over is no success.
        Some(true) => failure.is_none_or(own),
        None => failure.is_some_and(own),
    }
}

/// Keeps it, and says so; or why not.
pub async fn keep(machine: &mut Tiers, prepared: &Prepared, name: &AttemptName, time: Duration, mut outcome: Outcome) -> Outcome {
    let said = match machine.keep(prepared, time).await {
        Ok(()) => {
            let AttemptName { job, index, number, .. } = name;
            // What is written here stays, also when the machine has gone.
            let until = clock(SystemTime::now() + time);
            format!("its machine was kept, until {until} UTC at most: volley exec {job} {index} --attempt {number}")
        }
        Err(why) => crate::chain(&why),
    };
    outcome.message = Some(match outcome.message {
        Some(message) => format!("{message}; {said}"),
        None => said,
    });
    outcome
}

/// The time of day. A day at most lies ahead, so it says which.
fn clock(at: SystemTime) -> String {
    let minutes = at.duration_since(UNIX_EPOCH).map_or(0, |since| since.as_secs() / 60);
    format!("{:02}:{:02}", minutes / 60 % 24, minutes % 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_what_the_task_did_itself_keeps_its_machine() {
        for class in [FailureClass::ExitCode, FailureClass::Signal, FailureClass::Oom, FailureClass::PolicyDenied] {
            assert!(is_kept(Some(class), None) && is_kept(Some(class), Some(true)) && !is_kept(Some(class), Some(false)), "{class:?}");
        }
        for class in [FailureClass::GuestLost, FailureClass::StorageFailed, FailureClass::Cancelled, FailureClass::RestoreFailed] {
            assert!(!is_kept(Some(class), None) && !is_kept(Some(class), Some(true)), "{class:?}");
        }
        assert!(!is_kept(None, None) && is_kept(None, Some(true)));
    }

    #[test]
    fn the_time_of_day_is_told() {
        assert_eq!(clock(UNIX_EPOCH + Duration::from_secs(86_400 + 14 * 3_600 + 5 * 60 + 59)), "14:05");
    }
}
