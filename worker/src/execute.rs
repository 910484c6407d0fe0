//! Stage *execute*: a command from its start until nothing of it runs.
//!
//! Owns reading its streams, live output, and passing stops on. Does not own deadlines (`attempt`) or how anything is killed
//! (`runtime`).

use std::time::Duration;

use tokio::net::unix::pipe;
use volley_jobspecs::failure::FailureClass;

use crate::capture::Capture;
use crate::live::LiveOutput;
use crate::ports::Bus;
use crate::prepare::Prepared;
use crate::runtime::{Exit, Machine, Streams};
use crate::spawner::proto::Step;
use crate::stop::StopSignal;

/// Bytes read at a time: a pipe's whole buffer.
const READ_BYTES: usize = 64 * 1024;
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
    /// This process can't make pipes or files.
    #[error("pipes for the task: {0}; check the limit on open files (ulimit -n)")]
    Local(#[source] std::io::Error),
}

impl ExecuteError {
    /// What it means for the task, and the exit code it counts as.
    #[must_use]
    pub fn class(&self) -> (FailureClass, Option<i32>) {
        match self {
            Self::NotStarted { step: Step::Exec, errno: libc::ENOENT } => (FailureClass::ExitCode, Some(127)),
            Self::NotStarted { step: Step::Exec | Step::Directory, .. } => (FailureClass::ExitCode, Some(126)),
            Self::NotStarted { .. } | Self::Spawner(_) | Self::Local(_) => (FailureClass::RestoreFailed, None),
            Self::Lost | Self::Stuck => (FailureClass::GuestLost, None),
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
}

/// Runs the command in a machine that was restored for it. `bytes_max` bounds what is kept of each stream.
pub async fn execute<M: Machine, B: Bus>(
    machine: &mut M,
    prepared: &Prepared,
    stop: &mut StopSignal,
    live: &LiveOutput<B>,
    bytes_max: usize,
) -> Executed {
    let mut executed = Executed { exit: Err(ExecuteError::Lost), stdout: Capture::new(bytes_max), stderr: Capture::new(bytes_max) };
    let Streams { stdout, stderr } = match machine.start(prepared).await {
        Ok(streams) => streams,
        Err(why) => {
            executed.exit = Err(why);
            return executed;
        }
    };
    let mut readers = (Reader::new(stdout, false), Reader::new(stderr, true));
    executed.exit = loop {
        tokio::select! {
            biased;
            force = stop.next() => machine.stop(force).await,
            more = readers.0.read(&mut executed.stdout, live), if readers.0.open => readers.0.open = more,
            more = readers.1.read(&mut executed.stderr, live), if readers.1.open => readers.1.open = more,
            exit = machine.wait() => break exit,
        }
    };
    let drain = async {
        while readers.0.open {
            readers.0.open = readers.0.read(&mut executed.stdout, live).await;
        }
        while readers.1.open {
            readers.1.open = readers.1.read(&mut executed.stderr, live).await;
        }
    };
    if tokio::time::timeout(DRAIN_TIME, drain).await.is_err() {
        tracing::warn!("a stream of the task is still held open by a process that isn't its own; it was cut off");
    }
    executed
}

struct Reader {
    pipe: pipe::Receiver,
    stderr: bool,
    open: bool,
    buffer: Vec<u8>,
}

impl Reader {
    fn new(pipe: pipe::Receiver, stderr: bool) -> Self {
        Self { pipe, stderr, open: true, buffer: Vec::new() }
    }

    /// Reads once; false at the end. Cancel-safe: what was read is captured before anything is awaited.
    async fn read<B: Bus>(&mut self, capture: &mut Capture, live: &LiveOutput<B>) -> bool {
        // Only when there is something: most tasks of a large job write nothing at all.
        if self.pipe.readable().await.is_err() {
            return false;
        }
        self.buffer.clear();
        self.buffer.reserve(READ_BYTES);
        match self.pipe.try_read_buf(&mut self.buffer) {
            Ok(0) => false,
            Ok(_) => {
                let offset = capture.total();
                capture.push(&self.buffer);
                live.send(self.stderr, offset, &self.buffer).await;
                true
            }
            Err(e) => e.kind() == std::io::ErrorKind::WouldBlock,
        }
    }
}
