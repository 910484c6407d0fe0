//! What a process that serves ends with when it can't go on: one line, and what to exit with.
//!
//! Owns which exit code each of its errors has. Does not own the codes (`volley_cli::Exit`) or what the errors say.

use std::io;
use std::path::Path;

use volley_cli::Exit;
use volley_cli::sdk;
use volley_coordinator::driver::DriverError;
use volley_coordinator::io::bus::ConnectError;
use volley_coordinator::run::{RunError, StartError};
use volley_store::embedded::StartError as S3Error;
use volley_worker::{RunError as WorkerError, chain};

/// Why a process ends.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Failed {
    /// What to exit with.
    pub exit: Exit,
    /// Why, and what to do.
    pub line: String,
}

/// How a process ends.
pub type Ended = Result<(), Failed>;

impl Failed {
    /// An end for which no error speaks.
    pub fn new(exit: Exit, line: impl Into<String>) -> Self {
        Self { exit, line: line.into() }
    }

    /// Of a file or directory of this host. `doing` is what can't be done to it.
    pub fn local(doing: &str, path: &Path, source: &io::Error) -> Self {
        Self::new(of_io(source), format!("can't {doing} {}: {source}", path.display()))
    }

    /// Arguments that can't be used.
    pub fn arguments(error: impl std::error::Error) -> Self {
        Self::new(Exit::BadSpec, chain(&error))
    }

    /// Something that is not there, or does not answer.
    pub fn unavailable(error: impl std::error::Error) -> Self {
        Self::new(Exit::Unavailable, chain(&error))
    }
}

/// Of the system's answer about a file.
fn of_io(error: &io::Error) -> Exit {
    match error.kind() {
        io::ErrorKind::PermissionDenied | io::ErrorKind::ReadOnlyFilesystem => Exit::Denied,
        _ => Exit::LocalFile,
    }
}

/// Of the system's answer about an address.
fn of_listen(error: &io::Error) -> Exit {
    if error.kind() == io::ErrorKind::PermissionDenied { Exit::Denied } else { Exit::Unavailable }
}

fn of_start(error: &StartError) -> Exit {
    match error {
        StartError::Config(_) => Exit::BadSpec,
        StartError::Nats(error) => of_nats(error),
        StartError::Log(_)
        | StartError::Store(_)
        | StartError::Bucket(_)
        | StartError::Probe(_)
        | StartError::ReadIdentity(_)
        | StartError::WriteIdentity(_) => Exit::Unavailable,
        StartError::Identity { .. } | StartError::NoLog { .. } | StartError::OtherBucket { .. } => Exit::Conflict,
        StartError::Restore(_) => Exit::LocalFile,
        StartError::Random(_) => Exit::Internal,
        StartError::Driver(error) => of_driver(error),
        StartError::Listen { source, .. } => of_listen(source),
    }
}

fn of_driver(error: &DriverError) -> Exit {
    match error {
        DriverError::Log(_) | DriverError::Subscribe(_) => Exit::Unavailable,
        DriverError::Core(_) => Exit::Internal,
    }
}

fn of_nats(error: &ConnectError) -> Exit {
    match error {
        ConnectError::Refused { .. } => Exit::Denied,
        ConnectError::Credentials { .. } => Exit::LocalFile,
        _ => Exit::Unavailable,
    }
}

impl From<StartError> for Failed {
    fn from(error: StartError) -> Self {
        Self::new(of_start(&error), chain(&error))
    }
}

impl From<RunError> for Failed {
    fn from(error: RunError) -> Self {
        let exit = match &error {
            RunError::Driver(error) => of_driver(error),
            RunError::Panicked(_) => Exit::Internal,
            RunError::Again(error) => of_start(error),
            RunError::StillOpen(_) => Exit::TryLater,
        };
        Self::new(exit, chain(&error))
    }
}

impl From<ConnectError> for Failed {
    fn from(error: ConnectError) -> Self {
        Self::new(of_nats(&error), chain(&error))
    }
}

impl From<WorkerError> for Failed {
    fn from(error: WorkerError) -> Self {
        let exit = match &error {
            WorkerError::Config(_) | WorkerError::Closed { .. } => Exit::BadSpec,
            WorkerError::Dir { source, .. } => of_io(source),
            WorkerError::Locked { .. } => Exit::Conflict,
            WorkerError::Predecessor(_) | WorkerError::Cgroup(_) | WorkerError::Spawner(_) => Exit::Internal,
            WorkerError::Machines(_) | WorkerError::Containers(_) | WorkerError::Share(_) => Exit::NotConfigured,
            WorkerError::Bus(_) => Exit::Unavailable,
        };
        Self::new(exit, chain(&error))
    }
}

impl From<S3Error> for Failed {
    fn from(error: S3Error) -> Self {
        let exit = match &error {
            S3Error::Root { source, .. } => of_io(source),
            S3Error::InUse { .. } => Exit::Conflict,
            S3Error::Bind { source, .. } => of_listen(source),
        };
        Self::new(exit, chain(&error))
    }
}

impl From<sdk::Error> for Failed {
    fn from(error: sdk::Error) -> Self {
        Self::new(Exit::of_error(&error), chain(&error))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_system_says_has_a_code() {
        let of = |kind: io::ErrorKind| Failed::local("make", Path::new("/x"), &kind.into()).exit.code();
        assert_eq!(of(io::ErrorKind::PermissionDenied), 77);
        assert_eq!(of(io::ErrorKind::ReadOnlyFilesystem), 77);
        assert_eq!(of(io::ErrorKind::StorageFull), 74);
        assert_eq!(of(io::ErrorKind::NotADirectory), 74);
        let listen =
            |kind: io::ErrorKind| Failed::from(StartError::Listen { listen: ([127, 0, 0, 1], 80).into(), source: kind.into() }).exit.code();
        assert_eq!((listen(io::ErrorKind::AddrInUse), listen(io::ErrorKind::PermissionDenied)), (69, 77));
    }
}
