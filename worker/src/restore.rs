//! Stage *restore*: a machine made ready for one attempt.
//!
//! Owns the stage's errors and their classes. What "ready" means is the tier's (`runtime`).

use volley_jobspecs::failure::FailureClass;

use crate::cgroup::CgroupError;
use crate::prepare::Prepared;
use crate::runtime::Machine;
use crate::spawner::SpawnerError;

/// Why a machine is not ready.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    /// The slot's helper doesn't come up.
    #[error(transparent)]
    Spawner(#[from] SpawnerError),
    /// Limits can't be set.
    #[error("setting limits: {0}")]
    Limits(#[from] CgroupError),
    /// Limits are asked for, and this worker can't enforce any.
    #[error(
        "the task asks for cpu, memory or pids limits, and this worker has no writable cgroups; run it as root or with a delegated \
         cgroup, or leave out task.resources"
    )]
    NoLimits,
}

impl RestoreError {
    /// What it means for the task.
    #[must_use]
    pub fn class(&self) -> FailureClass {
        match self {
            Self::Spawner(_) | Self::Limits(_) => FailureClass::RestoreFailed,
            Self::NoLimits => FailureClass::PolicyDenied,
        }
    }
}

/// Makes `machine` ready.
///
/// # Errors
/// [`RestoreError`].
pub async fn restore<M: Machine>(machine: &mut M, prepared: &Prepared) -> Result<(), RestoreError> {
    machine.restore(prepared).await
}
