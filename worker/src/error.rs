//! Why a worker doesn't run.
//!
//! Owns errors of start-up, and one line of an error with its causes. What happens to attempts is in the errors of the stages.

use std::io;
use std::path::PathBuf;

use crate::cgroup::CgroupError;
use crate::config::ConfigError;
use crate::containers::ContainersError;
use crate::machines::MachinesError;
use crate::ports::BusError;
use crate::spawner::SpawnerError;
use crate::template::keys::KeysError;

/// An error with its causes in one line: the last one says what really happened. What an error says of its cause itself stands there once.
#[must_use]
pub fn chain(error: &dyn std::error::Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        let said = cause.to_string();
        if !text.contains(&said) {
            text = format!("{text}: {said}");
        }
        source = cause.source();
    }
    text
}

/// Why a worker doesn't run.
#[derive(Debug, thiserror::Error)]
pub enum RunError {
    /// It was told something impossible.
    #[error("worker configuration: {0}")]
    Config(#[from] ConfigError),
    /// Its directory can't be used.
    #[error("worker directory {}: {what}: {source}", .path.display())]
    Dir {
        /// Which.
        path: PathBuf,
        /// What was tried.
        what: &'static str,
        /// What the system said.
        source: io::Error,
    },
    /// The users of tasks can't reach it.
    #[error(
        "tasks run as other users, who can't pass through {} to {}; choose another directory, or let them through: chmod o+x {}",
        .closed.display(), .dir.display(), .closed.display()
    )]
    Closed {
        /// The worker's directory.
        dir: PathBuf,
        /// What is closed to them.
        closed: PathBuf,
    },
    /// Another worker has it.
    #[error("another worker (process {pid}) uses {}; give each its own directory", .path.display())]
    Locked {
        /// Which.
        path: PathBuf,
        /// By whom, as it wrote it down.
        pid: String,
    },
    /// What a worker before it left still runs.
    #[error("what an earlier worker left running can't be killed: {0}")]
    Predecessor(String),
    /// Cgroups of a predecessor can't be cleared.
    #[error(transparent)]
    Cgroup(#[from] CgroupError),
    /// Nothing can be started.
    #[error(transparent)]
    Spawner(#[from] SpawnerError),
    /// Nothing else is offered than containers, and they can't be made.
    #[error("containers: {0}; or leave `container` out of the worker's isolation")]
    Containers(#[from] ContainersError),
    /// Machines are offered and can't be made.
    #[error("machines: {0}; or leave `microvm` out of the worker's isolation")]
    Machines(#[from] MachinesError),
    /// Templates are to be shared and can't be.
    #[error("sharing templates: {0}; or leave the key file out of the worker's configuration, and each worker builds its own")]
    Share(#[from] KeysError),
    /// The bus can't be listened to.
    #[error("listening for work: {0}")]
    Bus(#[from] BusError),
}
