//! A task's command in its machine: from its start to a verdict.
//!
//! Owns its streams, which are pipes here as in every tier, its stops, and telling apart how it can end: the command's own end, the guest's
//! memory, the guest's kernel, or a guest that says nothing. Stops are asked of the guest; when it does not obey in time the machine is
//! given up, and whoever holds it kills it.

use std::convert::Infallible;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Duration;

use rustix::pipe::PipeFlags;
use tokio::io::AsyncWriteExt;
use tokio::net::unix::pipe;
use tokio::sync::watch;
use tokio::time::Instant;
use tokio_util::task::AbortOnDropHandle;
use volley_jobspecs::wire::guest::mux::Channel;
use volley_jobspecs::wire::guest::{Ended, Exec, Exit as GuestExit, Limits, Refusal, RefusalKind};

use super::{Exit, Ready, Streams};
use crate::attempt::Force;
use crate::execute::ExecuteError;
use crate::guest::{Command, Guest, GuestError};
use crate::prepare::{InMachine, Prepared};
use crate::spawner::proto::Step;
use crate::vmm::Vm;

/// Bytes moved at once: a pipe's whole buffer.
const CHUNK_BYTES: usize = 64 * 1024;
/// How long the guest may take to kill a command with all it started. A thousand processes take ten seconds in an emulated machine.
const KILL_WAIT: Duration = Duration::from_secs(15);
/// How long the end of a machine is waited for whose agent was lost: a kernel that panics switches off at once.
const LAST_WORDS_WAIT: Duration = Duration::from_secs(3);
/// Lines of the console that are told.
const CONSOLE_LINES: usize = 12;
/// What the guest's kernel says when it gives up.
const PANIC: &str = "Kernel panic";
/// What it says when it gives up for want of memory.
const NO_MEMORY: [&str; 2] = ["System is deadlocked on memory", "Out of memory and no killable processes"];

/// Why there is no end.
#[derive(Debug)]
enum Why {
    /// It did not begin.
    NotStarted(Refusal),
    /// The agent is lost.
    Lost(GuestError),
}

type End = Option<Result<Ended, Arc<Why>>>;

/// A command that runs, or is about to.
#[derive(Debug)]
pub struct Running {
    end: watch::Receiver<End>,
    wish: watch::Sender<Option<Force>>,
    give_up_at: watch::Sender<Option<Instant>>,
    _task: AbortOnDropHandle<()>,
}

/// Starts the command. It is asked of the guest in the background, so that a guest that does not answer can be given up at any moment.
///
/// # Errors
/// [`ExecuteError::Local`].
pub fn start(ready: &Ready, prepared: &Prepared, inside: &InMachine) -> Result<(Running, Streams), ExecuteError> {
    let pipe = || rustix::pipe::pipe_with(PipeFlags::CLOEXEC | PipeFlags::NONBLOCK).map_err(|e| ExecuteError::Local(e.into()));
    let ((stdout, to_stdout), (stderr, to_stderr)) = (pipe()?, pipe()?);
    let sender = |end: OwnedFd| pipe::Sender::from_owned_fd(end).map_err(ExecuteError::Local);
    let pipes = [sender(to_stdout)?, sender(to_stderr)?];
    let limits = &prepared.limits;
    let exec = Exec {
        argv: prepared.task.command.clone(),
        env: crate::runtime::environment(inside, &ready.image),
        cwd: Some(inside.cwd.clone()),
        user: ready.user.clone(),
        input: prepared.task.stdin.is_some(),
        timeout_ms: None,
        grace_ms: 0,
        limits: Limits { memory_bytes: limits.memory_bytes, pids: limits.pids, cpu_milli: limits.cpu_milli, open_files: None },
        leave: false,
        tty: None,
        expendable: false,
    };
    let ((told, end), (wish, wishes)) = (watch::channel(None), watch::channel(None));
    let (guest, stdin) = (ready.guest.clone(), prepared.task.stdin.clone());
    let task = tokio::spawn(async move {
        let ended = run(&guest, &exec, stdin, wishes, pipes).await;
        told.send_replace(Some(ended.map_err(Arc::new)));
    });
    let running = Running { end, wish, give_up_at: watch::Sender::new(None), _task: AbortOnDropHandle::new(task) };
    Ok((running, Streams { stdout, stderr }))
}

/// One command, from the request to its end; all it wrote is in the pipes then.
async fn run(
    guest: &Guest,
    exec: &Exec,
    stdin: Option<String>,
    mut wishes: watch::Receiver<Option<Force>>,
    [to_stdout, to_stderr]: [pipe::Sender; 2],
) -> Result<Ended, Why> {
    let command = match guest.exec(exec).await {
        Ok(command) => command,
        Err(GuestError::Refused(refusal)) => return Err(Why::NotStarted(refusal)),
        Err(why) => return Err(Why::Lost(why)),
    };
    let command = &command;
    let ended = async {
        tokio::try_join!(pump(command, Channel::Output, to_stdout), pump(command, Channel::Errors, to_stderr))?;
        command.ended().await
    };
    let fed = async {
        if let Some(text) = stdin {
            // A command that does not read it is no error.
            let _ = command.write(text.as_bytes()).await;
            command.end_input();
        }
        std::future::pending::<Infallible>().await
    };
    let stopped = async {
        loop {
            // A guest that is lost needs no stop.
            let _ = match *wishes.borrow_and_update() {
                None => Ok(()),
                Some(Force::Term) => command.signal(libc::SIGTERM),
                Some(Force::Kill | Force::Abandon) => command.kill(),
            };
            if wishes.changed().await.is_err() {
                std::future::pending::<Infallible>().await;
            }
        }
    };
    tokio::select! {
        ended = ended => ended.map_err(Why::Lost),
        never = fed => match never {},
        never = stopped => never,
        why = guest.silence() => Err(Why::Lost(why)),
    }
}

/// Moves a stream into its pipe. Whoever reads that slowly holds the command up, as with a pipe of its own.
async fn pump(command: &Command, channel: Channel, to: pipe::Sender) -> Result<(), GuestError> {
    let (mut to, mut buffer) = (Some(to), vec![0; CHUNK_BYTES]);
    loop {
        let len = command.read(channel, &mut buffer).await?;
        if len == 0 {
            return Ok(());
        }
        if let Some(pipe) = &mut to
            && pipe.write_all(buffer.get(..len).unwrap_or_default()).await.is_err()
        {
            // Nobody reads it any more; the command goes on all the same.
            to = None;
        }
    }
}

impl Running {
    /// Waits for the end. Cancel-safe.
    ///
    /// # Errors
    /// [`ExecuteError`].
    pub async fn wait(&self, vm: &dyn Vm) -> Result<Exit, ExecuteError> {
        let (mut end, mut give_up_at) = (self.end.clone(), self.give_up_at.subscribe());
        let told = async {
            let told = end.wait_for(Option::is_some).await.map(|told| told.clone());
            // The task that tells it never ends without.
            told.ok().flatten().unwrap_or_else(|| Err(Arc::new(Why::Lost(GuestError::Lost("the worker's own task ended".to_owned())))))
        };
        let given_up = async {
            loop {
                let at = *give_up_at.borrow_and_update();
                match at {
                    Some(at) => tokio::select! {
                        () = tokio::time::sleep_until(at) => return,
                        changed = give_up_at.changed() => drop(changed),
                    },
                    None => drop(give_up_at.changed().await),
                }
            }
        };
        tokio::select! {
            biased;
            told = told => match told {
                Ok(ended) => Ok(exit(&ended)),
                Err(why) => match &*why {
                    Why::NotStarted(refusal) => Err(not_started(refusal)),
                    Why::Lost(why) => explained(vm, why).await,
                },
            },
            () = given_up => Err(ExecuteError::Guest("its machine did not end it in time and was killed".to_owned())),
            _ended = vm.ended() => verdict_of_machine(vm).await,
        }
    }

    /// Passes a stop on.
    pub fn stop(&self, force: Force) {
        self.wish.send_replace(Some(force));
        let wait = match force {
            Force::Term => return,
            Force::Kill => KILL_WAIT,
            Force::Abandon => Duration::ZERO,
        };
        self.give_up_at.send_replace(Some(Instant::now() + wait));
    }
}

fn exit(ended: &Ended) -> Exit {
    let (code, signal) = match ended.exit {
        GuestExit::Code(code) => (Some(code), None),
        GuestExit::Signal(signal) => (None, Some(signal)),
    };
    Exit {
        code,
        signal,
        oom: ended.oom_kills > 0,
        cpu_us: ended.usage.user_us.saturating_add(ended.usage.system_us),
        memory_bytes_max: ended.usage.memory_peak_bytes.unwrap_or(0),
        strays: ended.strays,
        disk_full: ended.disk_full,
    }
}

/// Why a command did not start, in the words of every tier.
fn not_started(refusal: &Refusal) -> ExecuteError {
    match (refusal.kind, refusal.errno) {
        (RefusalKind::CannotExec, Some(errno)) => ExecuteError::NotStarted { step: Step::Exec, errno },
        // The user was found before.
        (RefusalKind::NotFound, _) => ExecuteError::NotStarted { step: Step::Directory, errno: libc::ENOENT },
        _ => ExecuteError::Refused(refusal.text.clone()),
    }
}

/// The session broke. Did the machine end? Then its console says why.
async fn explained(vm: &dyn Vm, why: &GuestError) -> Result<Exit, ExecuteError> {
    match tokio::time::timeout(LAST_WORDS_WAIT, vm.ended()).await {
        Ok(_ended) => verdict_of_machine(vm).await,
        Err(_lives) => Err(ExecuteError::Guest(why.to_string())),
    }
}

async fn verdict_of_machine(vm: &dyn Vm) -> Result<Exit, ExecuteError> {
    if NO_MEMORY.iter().any(|words| vm.console().contains(words)) {
        return Ok(Exit { signal: Some(libc::SIGKILL), oom: true, ..Exit::default() });
    }
    Err(cause_of(vm).await)
}

/// Why a machine ended, or is lost; with the end of its console.
pub async fn cause_of(vm: &dyn Vm) -> ExecuteError {
    let ended = tokio::time::timeout(LAST_WORDS_WAIT, vm.ended()).await;
    let console = vm.console();
    let panic = console.lines().rfind(|line| line.contains(PANIC)).and_then(|line| line.split_once(PANIC)).map(|(_, why)| why);
    let itself = panic.is_some() || matches!(&ended, Ok(Ok(exited)) if exited.signal.is_none());
    let what = match (panic, ended) {
        (Some(why), _) => format!("the guest's kernel panicked ({})", why.trim_matches([' ', '-', ':'])),
        (None, Ok(Ok(exited))) => match (exited.code, exited.signal) {
            (_, Some(signal)) => format!("its machine was ended by signal {signal}"),
            (code, None) => format!("its machine switched off (exit code {})", code.unwrap_or(0)),
        },
        (None, Ok(Err(why))) => why.to_string(),
        (None, Err(_lives)) => "its machine's agent does not answer any more".to_owned(),
    };
    let last = crate::template::last_lines(&console, CONSOLE_LINES);
    let text = if last.is_empty() { what } else { format!("{what}; its console said last: {last}") };
    if itself { ExecuteError::GuestEnded(text) } else { ExecuteError::Guest(text) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_command_that_did_not_start_is_told_as_in_every_tier() {
        let refusal = |kind, errno| Refusal { errno, ..Refusal::new(kind, "words") };
        let class = |kind, errno| not_started(&refusal(kind, errno)).class().1;
        assert_eq!(class(RefusalKind::CannotExec, Some(libc::ENOENT)), Some(127));
        assert_eq!(class(RefusalKind::CannotExec, Some(libc::EACCES)), Some(126));
        assert_eq!(class(RefusalKind::NotFound, None), Some(126));
        assert_eq!(not_started(&refusal(RefusalKind::System, None)).to_string(), "starting the task: its machine refused: words");
    }
}
