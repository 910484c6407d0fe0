//! Why an attempt failed, and what follows from it.
//!
//! Owns the classes and the questions every other part asks of them. Does not own budgets or rules: those are in the spec and
//! are applied by the coordinator's `retry`.

use std::fmt;

use minicbor::{Decode, Encode};
use serde::{Deserialize, Serialize};

/// The class of a failure. Infra classes say nothing about the task's own work.
#[derive(
    Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Encode, Decode, Serialize, Deserialize, schemars::JsonSchema, utoipa::ToSchema,
)]
#[serde(rename_all = "snake_case")]
#[cbor(index_only)]
pub enum FailureClass {
    /// The command ended with a code other than 0.
    #[n(0)]
    ExitCode,
    /// The command was ended by a signal that Volley did not send.
    #[n(1)]
    Signal,
    /// The kernel ended it at its memory limit.
    #[n(2)]
    Oom,
    /// It ran longer than `timeouts.run`.
    #[n(3)]
    RunTimeout,
    /// Inputs and machine were not ready within `timeouts.start`.
    #[n(4)]
    StartTimeout,
    /// No worker took the task within `timeouts.queue`.
    #[n(5)]
    QueueTimeout,
    /// The machine could not be restored from its template.
    #[n(6)]
    RestoreFailed,
    /// The machine stopped answering.
    #[n(7)]
    GuestLost,
    /// The worker stopped answering, restarted, or forgot the attempt.
    #[n(8)]
    HostLost,
    /// An input was not there, or was not what its checksum says.
    #[n(9)]
    InputMissing,
    /// Inputs, outputs or logs could not be read or written within the storage budget.
    #[n(10)]
    StorageFailed,
    /// A rule of the tenant or the worker forbids it.
    #[n(11)]
    PolicyDenied,
    /// A person, a deadline of the job or its failure limit ended it.
    #[n(12)]
    Cancelled,
}

impl FailureClass {
    /// Every class, in wire order.
    pub const ALL: [Self; 13] = [
        Self::ExitCode,
        Self::Signal,
        Self::Oom,
        Self::RunTimeout,
        Self::StartTimeout,
        Self::QueueTimeout,
        Self::RestoreFailed,
        Self::GuestLost,
        Self::HostLost,
        Self::InputMissing,
        Self::StorageFailed,
        Self::PolicyDenied,
        Self::Cancelled,
    ];

    /// Is another try made when no rule of the spec says otherwise?
    #[must_use]
    pub fn retry_by_default(self) -> bool {
        match self {
            Self::ExitCode | Self::Signal | Self::Oom | Self::RunTimeout => true,
            Self::StartTimeout | Self::RestoreFailed | Self::GuestLost | Self::HostLost | Self::StorageFailed => true,
            // The same bytes will be missing again, the same rule will deny again, the queue deadline is the job's.
            Self::InputMissing | Self::PolicyDenied | Self::QueueTimeout | Self::Cancelled => false,
        }
    }

    /// Does it count against `retry.attempts`? Infra classes have a budget of their own.
    #[must_use]
    pub fn counts_against_attempts(self) -> bool {
        !self.is_infra()
    }

    /// Is it the cluster's failure, so that the task is left without a verdict?
    #[must_use]
    pub fn is_infra(self) -> bool {
        match self {
            Self::StartTimeout | Self::QueueTimeout | Self::RestoreFailed | Self::GuestLost | Self::HostLost | Self::StorageFailed => true,
            Self::ExitCode | Self::Signal | Self::Oom | Self::RunTimeout | Self::InputMissing | Self::PolicyDenied | Self::Cancelled => {
                false
            }
        }
    }

    /// Does the failure say something about the task's own work, so that an eval may count it as a wrong answer?
    #[must_use]
    pub fn result_valid(self) -> bool {
        matches!(self, Self::ExitCode | Self::Signal | Self::Oom | Self::RunTimeout)
    }

    /// The name used in specs, results and metrics.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::ExitCode => "exit_code",
            Self::Signal => "signal",
            Self::Oom => "oom",
            Self::RunTimeout => "run_timeout",
            Self::StartTimeout => "start_timeout",
            Self::QueueTimeout => "queue_timeout",
            Self::RestoreFailed => "restore_failed",
            Self::GuestLost => "guest_lost",
            Self::HostLost => "host_lost",
            Self::InputMissing => "input_missing",
            Self::StorageFailed => "storage_failed",
            Self::PolicyDenied => "policy_denied",
            Self::Cancelled => "cancelled",
        }
    }
}

impl fmt::Display for FailureClass {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.as_str())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_infra_class_is_ever_a_verdict() {
        for class in FailureClass::ALL {
            assert!(!(class.is_infra() && class.result_valid()), "{class}");
            assert_eq!(class.is_infra(), !class.counts_against_attempts(), "{class}");
        }
    }

    #[test]
    fn the_name_is_the_one_serde_writes() {
        for class in FailureClass::ALL {
            assert_eq!(serde_json::to_string(&class).ok(), Some(format!("\"{class}\"")));
        }
    }
}
