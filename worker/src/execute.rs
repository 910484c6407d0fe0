//! Stage *execute*: a command from its start until nothing of it runs.
//!
//! Owns reading its streams, live output, and passing stops on. Does not own deadlines (`attempt`) or how anything is killed
//! (`runtime`).

use std::os::fd::OwnedFd;
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use tokio::net::unix::pipe;
use tokio::time::Interval;
use volley_jobspecs::failure::FailureClass;

use crate::attempt::Force;
use crate::capture::Capture;
use crate::live::{Changes, LiveOutput};
use crate::mounts::{MountError, Mounts};
use crate::ports::Bus;
use crate::prepare::Prepared;
use crate::runtime::{Exit, Machine, Streams};
use crate::spawner::proto::Step;
use crate::stop::StopSignal;

/// Bytes read at a time: a pipe's whole buffer.
const READ_BYTES: usize = 64 * 1024;
/// Bytes of the first read after a task has ended: most of those that were never watched wrote a line or nothing.
const FIRST_READ_BYTES: usize = 4 * 1024;
/// How often a slot looks whether its task runs for longer than this, and so its streams want to be watched: twice as long at most a task
/// that fills its pipes at once waits, and what it writes is shown later. Far below what a person notices; far above what the shortest
/// tasks take.
pub const LOOK_EVERY: Duration = Duration::from_millis(10);
/// How long it is waited for being told that a volume was lost, when a command that has any ended badly.
const LOST_WAIT: Duration = Duration::from_millis(200);
/// How long what is left in the pipes is read once everything is dead. There is no writer left then, unless a descriptor was handed
/// to a process that isn't the task's.
const DRAIN_TIME: Duration = Duration::from_secs(2);

/// Why a command has no exit.
#[derive(Debug, thiserror::Error)]
pub enum ExecuteError {
    /// It could not be started.
    #[error("{}", not_started(*.step, *.errno))]
    NotStarted {
        /// At which step.
        step: Step,
        /// The system's error number.
        errno: i32,
    },
    /// What watches it is gone.
    #[error("the process that watches the task was killed from outside; everything of the task was killed with it")]
    Lost,
    /// Something of it can't be killed.
    #[error("a process of the task can't be killed: it hangs in the kernel, usually on a dead disk or mount; look at the host")]
    Stuck,
    /// This host can't start anything.
    #[error("starting the task: {0}")]
    Spawner(String),
    /// The machine it runs in is lost, or does not obey.
    #[error("{0}")]
    Guest(String),
    /// What runs in the machine ended it: its kernel panicked, or it switched off.
    #[error("{0}")]
    GuestEnded(String),
    /// No container comes about, or its runtime fails.
    #[error("{0}")]
    Container(String),
    /// Its machine does not start it.
    #[error("starting the task: its machine refused: {0}")]
    Refused(String),
    /// This process can't make pipes or files.
    #[error("pipes for the task: {0}; check the limit on open files (ulimit -n)")]
    Local(#[source] std::io::Error),
}

impl ExecuteError {
    /// Does it say nothing of this worker? A task with a machine of its own may do with it what it likes, also so that nothing begins in it; and what a container
    /// or a volume is put on is its image's and its inputs'. That the runtime works was tried when the worker began.
    #[must_use]
    pub fn is_blameless(&self) -> bool {
        match self {
            Self::GuestEnded(_) | Self::Guest(_) | Self::Refused(_) | Self::Container(_) => true,
            Self::NotStarted { .. } | Self::Lost | Self::Stuck | Self::Spawner(_) | Self::Local(_) => false,
        }
    }

    /// What it means for the task, and the exit code it counts as.
    #[must_use]
    pub fn class(&self) -> (FailureClass, Option<i32>) {
        match self {
            Self::NotStarted { step: Step::Exec, errno: libc::ENOENT } => (FailureClass::ExitCode, Some(127)),
            Self::NotStarted { step: Step::Exec | Step::Directory, .. } => (FailureClass::ExitCode, Some(126)),
            Self::NotStarted { .. } | Self::Spawner(_) | Self::Container(_) | Self::Refused(_) | Self::Local(_) => {
                (FailureClass::RestoreFailed, None)
            }
            Self::Lost | Self::Stuck | Self::Guest(_) | Self::GuestEnded(_) => (FailureClass::GuestLost, None),
        }
    }
}

fn not_started(step: Step, errno: i32) -> String {
    let error = std::io::Error::from_raw_os_error(errno);
    match (step, errno) {
        (Step::Exec, libc::ENOENT) => "command not found: no such program in PATH, or its interpreter (the #! line) is missing".to_owned(),
        (Step::Exec, libc::EACCES) => "command can't be executed: it is no executable file, or permission is denied".to_owned(),
        (Step::Exec, libc::ENOEXEC) => {
            "command can't be executed: not a program for this machine, or a script without a #! line".to_owned()
        }
        (Step::Exec, _) => format!("command can't be executed: {error}"),
        (Step::Directory, _) => format!("task.workdir can't be entered: {error}"),
        (Step::User, _) => format!("becoming the task's user: {error}"),
        (Step::Clone, _) => format!("making a process: {error}; check the limits on processes"),
        (Step::Request | Step::Session | Step::Streams, _) => format!("setting up the process ({step:?}): {error}"),
    }
}

/// A command that ended.
#[derive(Debug)]
pub struct Executed {
    /// How.
    pub exit: Result<Exit, ExecuteError>,
    /// What it wrote to stdout.
    pub stdout: Capture,
    /// What it wrote to stderr.
    pub stderr: Capture,
    /// It lost a volume and was killed for that, whatever its exit says.
    pub lost: Option<MountError>,
}

/// Runs the command in a machine that was restored for it, and kills it when one of its volumes takes nothing more. `bytes_max` bounds what is kept of each stream; `looks` says when streams
/// that are not watched yet begin to be.
pub async fn execute<M: Machine, B: Bus>(
    machine: &mut M,
    (prepared, mounts): (&Prepared, &Mounts),
    stop: &mut StopSignal,
    live: &mut LiveOutput<B>,
    bytes_max: usize,
    looks: &mut Interval,
) -> Executed {
    let (stdout, stderr) = (Capture::new(bytes_max), Capture::new(bytes_max));
    let mut executed = Executed { exit: Err(ExecuteError::Lost), stdout, stderr, lost: None };
    // Most tasks have none.
    let mut volume_lost = (!mounts.is_empty()).then(|| mounts.failed().boxed());
    let Streams { stdout, stderr } = match machine.start(prepared).await {
        Ok(streams) => streams,
        Err(why) => {
            executed.exit = Err(why);
            return executed;
        }
    };
    let mut readers = (Reader::new(stdout, false), Reader::new(stderr, true));
    let begun = tokio::time::Instant::now();
    let mut changes = Changes::default();
    executed.exit = loop {
        tokio::select! {
            biased;
            force = stop.next() => machine.stop(force).await,
            why = lost(&mut volume_lost), if executed.lost.is_none() => {
                executed.lost = Some(why);
                machine.stop(Force::Kill).await;
            }
            // Before the pipes, so that who asks is answered before anything is read on.
            () = changes.next(), if changes.are_told() => live.look(&executed.stdout, &executed.stderr).await,
            () = readers.0.read(&mut executed.stdout, live), if readers.0.is_watched() => {}
            () = readers.1.read(&mut executed.stderr, live), if readers.1.is_watched() => {}
            exit = machine.wait() => break exit,
            // A look that was due soon after its start says nothing of how long it takes.
            _ = looks.tick(), if !changes.are_told() => if begun.elapsed() >= LOOK_EVERY {
                changes = live.changes();
                live.look(&executed.stdout, &executed.stderr).await;
                readers.0.watch();
                readers.1.watch();
            }
        }
    };
    // What is told of a lost volume may come a moment behind the error that the command ended with.
    if executed.lost.is_none() && volume_lost.is_some() && !matches!(executed.exit, Ok(Exit { code: Some(0), .. })) {
        executed.lost = tokio::time::timeout(LOST_WAIT, lost(&mut volume_lost)).await.ok();
    }
    readers.0.take(&mut executed.stdout, live).await;
    readers.1.take(&mut executed.stderr, live).await;
    if readers.0.is_watched() || readers.1.is_watched() {
        let drain = async {
            readers.0.drain(&mut executed.stdout, live).await;
            readers.1.drain(&mut executed.stderr, live).await;
        };
        if tokio::time::timeout(DRAIN_TIME, drain).await.is_err() {
            tracing::warn!("a stream of the task is still held open by a process that isn't its own; it was cut off");
        }
    }
    executed
}

/// Why a volume takes nothing more. Never, where there are none.
async fn lost(volume_lost: &mut Option<BoxFuture<'_, MountError>>) -> MountError {
    match volume_lost {
        Some(lost) => lost.await,
        None => std::future::pending().await,
    }
}

/// A pipe that is read. Being told when there is something costs more than a short task's whole output, so it begins unwatched.
enum Source {
    Unwatched(OwnedFd),
    Watched(pipe::Receiver),
    Ended,
}

struct Reader {
    source: Source,
    stderr: bool,
    buffer: Vec<u8>,
}

impl Reader {
    fn new(pipe: OwnedFd, stderr: bool) -> Self {
        Self { source: Source::Unwatched(pipe), stderr, buffer: Vec::new() }
    }

    fn is_watched(&self) -> bool {
        matches!(self.source, Source::Watched(_))
    }

    /// From now on [`Reader::read`] is told when there is something.
    fn watch(&mut self) {
        self.source = match std::mem::replace(&mut self.source, Source::Ended) {
            // Unchecked: the machine says what it is.
            Source::Unwatched(pipe) => match pipe::Receiver::from_owned_fd_unchecked(pipe) {
                Ok(pipe) => Source::Watched(pipe),
                Err(why) => {
                    tracing::error!(%why, "a stream of the task can't be watched and is lost; check the limit on open files");
                    Source::Ended
                }
            },
            other => other,
        };
    }

    /// Waits until there is something and reads it. Cancel-safe: what was read is captured before anything else is awaited.
    async fn read<B: Bus>(&mut self, capture: &mut Capture, live: &LiveOutput<B>) {
        let Source::Watched(pipe) = &self.source else { return };
        if pipe.readable().await.is_err() {
            self.source = Source::Ended;
            return;
        }
        self.buffer.resize(READ_BYTES, 0);
        match pipe.try_read(&mut self.buffer) {
            Ok(bytes) => self.got(bytes, capture, live).await,
            Err(e) if e.kind() == std::io::ErrorKind::WouldBlock => {}
            Err(_) => self.source = Source::Ended,
        }
    }

    /// Reads what an unwatched pipe holds now.
    async fn take<B: Bus>(&mut self, capture: &mut Capture, live: &LiveOutput<B>) {
        while let Source::Unwatched(pipe) = &self.source {
            let room = if self.buffer.is_empty() { FIRST_READ_BYTES } else { READ_BYTES };
            self.buffer.resize(room, 0);
            match rustix::io::read(pipe, &mut self.buffer) {
                Ok(bytes) => self.got(bytes, capture, live).await,
                Err(rustix::io::Errno::INTR) => {}
                // Somebody still has the other end: to be waited for.
                Err(rustix::io::Errno::AGAIN) => self.watch(),
                Err(_) => self.source = Source::Ended,
            }
        }
    }

    /// Reads to the end.
    async fn drain<B: Bus>(&mut self, capture: &mut Capture, live: &LiveOutput<B>) {
        while self.is_watched() {
            self.read(capture, live).await;
        }
    }

    async fn got<B: Bus>(&mut self, bytes: usize, capture: &mut Capture, live: &LiveOutput<B>) {
        let read = self.buffer.get(..bytes).unwrap_or_default();
        if read.is_empty() {
            self.source = Source::Ended;
            return;
        }
        let offset = capture.total();
        capture.push(read);
        live.send(self.stderr, offset, read).await;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_an_image_or_a_machine_is_does_not_speak_against_its_worker() {
        let why = || "no".to_owned();
        for own in
            [ExecuteError::Container(why()), ExecuteError::Refused(why()), ExecuteError::Guest(why()), ExecuteError::GuestEnded(why())]
        {
            assert!(own.is_blameless(), "{own}");
        }
        assert!(!ExecuteError::Spawner(why()).is_blameless() && !ExecuteError::Lost.is_blameless());
    }
}
