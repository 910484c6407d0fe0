//! What the command line exits with.
//!
//! Owns every exit code, their list in `--help`, and the mapping from jobs and errors. Does not own messages (`error`).

use volley_jobspecs::api::{JobState, JobView};
use volley_sdk::Error;

/// The exit codes. Scripts rely on them; the numbers from 64 on are those of `sysexits.h`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Exit {
    /// Done; of a job: every task succeeded.
    Success,
    /// Some tasks failed by themselves.
    TasksFailed,
    /// A bad spec or bad arguments; nothing was created.
    BadSpec,
    /// Infra failures left tasks without a verdict.
    NoVerdict,
    /// The job was cancelled.
    Cancelled,
    /// `volume verify` found a volume damaged.
    Damaged,
    /// The cluster's state doesn't allow it.
    Conflict,
    /// There is no such job, task, file, record or worker.
    NotFound,
    /// The cluster can't be reached.
    Unavailable,
    /// Something that should not happen.
    Internal,
    /// A local file can't be read or written.
    LocalFile,
    /// The cluster can't do it now, but may later.
    TryLater,
    /// No valid token, or not one that may do this.
    Denied,
    /// No cluster is configured, or wrongly.
    NotConfigured,
    /// `wait --timeout` ran out.
    TimedOut,
    /// Interrupted; the job goes on.
    Interrupted,
    /// Of `volley exec`: what the command ended with.
    Command(u8),
}

/// The list for `--help`.
pub const EXIT_CODES_HELP: &str = "\
Exit codes:
  0    done; of a job: every task succeeded
  1    some tasks failed
  2    bad spec or bad arguments, nothing was created
  3    infra failures left tasks without a verdict
  4    the job was cancelled
  5    `volume verify` found damage
  65   the state of the cluster doesn't allow it (conflict)
  66   no such job, task, file, record or worker
  69   the cluster can't be reached
  70   something that should not happen
  74   a local file can't be read or written
  75   the cluster can't do it now; the same may succeed later
  77   no valid token, or one that may not do this
  78   no cluster is configured, or wrongly
  124  `wait --timeout` ran out
  130  interrupted; the job goes on
`volley exec` ends with the code of its command, once that runs.";

/// The list for `--help` of what starts processes.
pub const SERVE_EXIT_CODES_HELP: &str = "\
Exit codes:
  0    ended by a signal
  2    bad arguments
  65   the directory, bucket or log is in use, another cluster's, or damaged
  69   a port is taken, nats-server is missing or ends, NATS or S3 can't be reached
  70   something that should not happen
  74   a file or directory can't be read or written, or the disk is full
  77   no permission on a file, a directory or a port, or NATS refuses the user
  78   no home directory, or telemetry is configured wrongly";

impl Exit {
    /// The number.
    #[must_use]
    pub fn code(self) -> u8 {
        match self {
            Self::Success => 0,
            Self::TasksFailed => 1,
            Self::BadSpec => 2,
            Self::NoVerdict => 3,
            Self::Cancelled => 4,
            Self::Damaged => 5,
            Self::Conflict => 65,
            Self::NotFound => 66,
            Self::Unavailable => 69,
            Self::Internal => 70,
            Self::LocalFile => 74,
            Self::TryLater => 75,
            Self::Denied => 77,
            Self::NotConfigured => 78,
            Self::TimedOut => 124,
            Self::Interrupted => 130,
            Self::Command(code) => code,
        }
    }

    /// What a job that has ended exits with: the first that applies of cancelled, no verdict, tasks failed, success.
    #[must_use]
    pub fn of_job(job: &JobView) -> Self {
        match job.exit_code {
            Some(0) => Self::Success,
            Some(1) => Self::TasksFailed,
            Some(3) => Self::NoVerdict,
            Some(4) => Self::Cancelled,
            // None, or one that this build doesn't know: the counts say it too.
            Some(_) | None if job.state == JobState::Cancelled => Self::Cancelled,
            Some(_) | None if job.tasks.infra_failed > 0 => Self::NoVerdict,
            Some(_) | None if job.tasks.failed > 0 || job.state == JobState::Failed => Self::TasksFailed,
            Some(_) | None => Self::Success,
        }
    }

    /// Of several jobs, the one that matters most.
    #[must_use]
    pub fn worst(self, other: Self) -> Self {
        let rank = |exit: Self| [Self::Success, Self::TasksFailed, Self::NoVerdict, Self::Cancelled].iter().position(|e| *e == exit);
        if rank(other).unwrap_or(usize::MAX) > rank(self).unwrap_or(usize::MAX) { other } else { self }
    }

    /// What an error of the SDK exits with.
    #[must_use]
    pub fn of_error(error: &Error) -> Self {
        match error {
            Error::NoCluster { .. } | Error::Setting { .. } => Self::NotConfigured,
            Error::BadSpec(_) => Self::BadSpec,
            Error::Unreachable { .. } | Error::Broken { .. } | Error::Silent { .. } => Self::Unavailable,
            Error::File { .. } | Error::Checksum { .. } | Error::Path { .. } => Self::LocalFile,
            Error::Ended { .. } => Self::Conflict,
            Error::Unexpected { .. } | Error::Random(_) => Self::Internal,
            Error::Refused { status, body, .. } => match status {
                401 | 403 => Self::Denied,
                404 => Self::NotFound,
                409 => Self::Conflict,
                _ if body.retryable => Self::TryLater,
                400..500 => Self::BadSpec,
                _ => Self::Internal,
            },
        }
    }
}

impl From<Exit> for std::process::ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit.code())
    }
}

#[cfg(test)]
mod tests {
    use volley_jobspecs::api::{ErrorBody, TaskCounts};

    use super::*;
    use crate::testing::job;

    #[test]
    fn a_jobs_exit_code_is_the_first_that_applies() {
        let counts = |failed, infra_failed| TaskCounts { total: 9, failed, infra_failed, ..TaskCounts::default() };
        let of = |state, tasks, exit_code| Exit::of_job(&job(state, tasks, exit_code)).code();
        assert_eq!(of(JobState::Succeeded, counts(0, 0), None), 0);
        assert_eq!(of(JobState::Failed, counts(2, 0), None), 1);
        assert_eq!(of(JobState::Failed, counts(2, 1), None), 3);
        assert_eq!(of(JobState::Cancelled, counts(2, 1), None), 4);
        assert_eq!(of(JobState::Failed, counts(2, 1), Some(1)), 1);
        assert_eq!(of(JobState::Failed, counts(0, 0), None), 1);
    }

    #[test]
    fn of_several_jobs_the_worst_counts() {
        assert_eq!(Exit::Success.worst(Exit::TasksFailed).worst(Exit::Success), Exit::TasksFailed);
        assert_eq!(Exit::Cancelled.worst(Exit::NoVerdict), Exit::Cancelled);
    }

    #[test]
    fn refusals_are_told_apart() {
        let of = |status, retryable| {
            let body = ErrorBody { code: "c".into(), message: "m".into(), retryable, problems: Vec::new() };
            Exit::of_error(&Error::Refused { status, doing: "d".into(), body }).code()
        };
        let got =
            [of(400, false), of(401, false), of(403, false), of(404, false), of(409, false), of(413, false), of(503, true), of(500, false)];
        assert_eq!(got, [2, 77, 77, 66, 65, 2, 75, 70]);
    }

    #[test]
    fn the_help_lists_every_code() {
        let all = [
            Exit::Success,
            Exit::TasksFailed,
            Exit::BadSpec,
            Exit::NoVerdict,
            Exit::Cancelled,
            Exit::Damaged,
            Exit::Conflict,
            Exit::NotFound,
            Exit::Unavailable,
            Exit::Internal,
            Exit::LocalFile,
            Exit::TryLater,
            Exit::Denied,
            Exit::NotConfigured,
            Exit::TimedOut,
            Exit::Interrupted,
        ];
        for exit in all {
            let listed = EXIT_CODES_HELP.lines().any(|line| line.trim_start().starts_with(&format!("{} ", exit.code())));
            assert!(listed, "{exit:?}");
        }
    }
}
