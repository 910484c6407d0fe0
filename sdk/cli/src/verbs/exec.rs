//! `volley exec`.

use std::io::{self, Read as _, Write as _};

use serde_json::json;
use tokio::signal::unix::{Signal, SignalKind, signal};
use tokio::sync::mpsc;
use volley_jobspecs::ids::JobId;
use volley_sdk::{Bytes, ExecEnded, ExecEvent, ExecInput, ExecRequest, ExecSession};

use crate::ctx::Ctx;
use crate::error::CliError;
use crate::exit::Exit;
use crate::terminal::{self, Raw};

/// Bytes of input read at once.
const READ_BYTES: usize = 32 * 1024;
/// Pieces of input that wait for the session.
const PIECES_WAITING: usize = 2;
/// What shells add to the number of a signal that ended a command.
const SIGNAL_BASE: i32 = 128;

/// Arguments.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// The job.
    job: JobId,
    /// The task, counted from 0. One that runs, or one that failed under `--keep-failed` or `task.keepFailed`.
    task: u32,
    /// In the machine of which try, counted from 1. Default: of the one that runs, else of the last.
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    attempt: Option<u32>,
    /// Ends the machine instead, one that was kept, before its time. `volley workers` lists those there are.
    #[arg(long, conflicts_with = "command")]
    end: bool,
    /// The command and its arguments, behind `--`. Default: a shell, /bin/sh. It runs beside the task's command, as the same user, with the same
    /// environment and directory. On a terminal it has one of its own; otherwise input, output and errors are passed on apart, as they
    /// are. Its exit code is that of `volley exec`; a signal counts as 128 and its number.
    #[arg(last = true, value_name = "CMD")]
    command: Vec<String>,
}

/// Carries it out.
pub async fn run(ctx: &Ctx, args: Args) -> Result<Exit, CliError> {
    if args.end {
        ctx.client()?.end_machine(args.job, args.task, args.attempt).await?;
        let ended = json!({ "job": args.job.to_string(), "task": args.task, "ended": true });
        ctx.out.show(&ended, || format!("the machine of task {} of {} was ended\n", args.task, args.job))?;
        return Ok(Exit::Success);
    }
    if ctx.out.json() {
        return Err(CliError::Usage("exec passes on what the command writes as it is, which is no JSON; leave `-o json` out".to_owned()));
    }
    let on_terminal = terminal::is_there();
    let request = ExecRequest {
        attempt: args.attempt,
        tty: on_terminal.then(terminal::size),
        term: std::env::var("TERM").ok().filter(|_| on_terminal),
        ..ExecRequest::new(args.job, args.task, args.command)
    };
    let session = ctx.client()?.exec(&request).await?;
    let signals = Signals::watch().map_err(|source| CliError::System { doing: "watch for signals", source })?;
    let raw =
        if on_terminal { Some(Raw::begin().map_err(|source| CliError::System { doing: "pass on what is typed", source })?) } else { None };
    feed(session.input());
    let ended = show(session, signals, on_terminal).await;
    // Before anything else is written.
    drop(raw);
    let Some(ended) = ended? else { return Ok(Exit::Interrupted) };
    if ended.oom {
        ctx.out.note("the machine was out of memory, and its kernel ended something of the command");
    }
    Ok(exit(&ended))
}

struct Signals {
    resized: Signal,
    terminate: Signal,
    hung_up: Signal,
}

impl Signals {
    fn watch() -> io::Result<Self> {
        let (resized, terminate) = (signal(SignalKind::window_change())?, signal(SignalKind::terminate())?);
        Ok(Self { resized, terminate, hung_up: signal(SignalKind::hangup())? })
    }
}

/// Shows what comes until the end. None: this process is to end.
async fn show(mut session: ExecSession, mut signals: Signals, on_terminal: bool) -> Result<Option<ExecEnded>, CliError> {
    let input = session.input();
    loop {
        tokio::select! {
            event = session.next() => match event {
                Some(Ok(ExecEvent::Output { stderr, bytes })) => write(stderr, bytes).await?,
                Some(Ok(ExecEvent::Ended(ended))) => return Ok(Some(ended)),
                Some(Err(error)) => return Err(error.into()),
                // It says how it ended before.
                None => return Ok(None),
            },
            Some(()) = signals.resized.recv(), if on_terminal => input.resize(terminal::size()).await,
            Some(()) = signals.terminate.recv() => return Ok(None),
            Some(()) = signals.hung_up.recv() => return Ok(None),
        }
    }
}

/// Writes where it may block: whoever reads slowly holds the command up, and not the session.
async fn write(stderr: bool, bytes: Bytes) -> Result<(), CliError> {
    let written = tokio::task::spawn_blocking(move || {
        if stderr {
            return io::stderr().write_all(&bytes);
        }
        let mut out = io::stdout().lock();
        out.write_all(&bytes)?;
        out.flush()
    });
    written.await.unwrap_or_else(|panicked| Err(io::Error::other(panicked))).map_err(CliError::Output)
}

/// Passes standard input on, from a thread of its own: a read that waits for somebody to type can't be given up.
fn feed(input: ExecInput) {
    let (pieces, mut read) = mpsc::channel::<Vec<u8>>(PIECES_WAITING);
    std::thread::spawn(move || {
        let (mut stdin, mut buffer) = (io::stdin().lock(), vec![0; READ_BYTES]);
        loop {
            match stdin.read(&mut buffer) {
                Ok(len @ 1..) if pieces.blocking_send(buffer.get(..len).unwrap_or_default().to_vec()).is_ok() => {}
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // The end, or nobody wants it any more.
                Ok(_) | Err(_) => return,
            }
        }
    });
    tokio::spawn(async move {
        while let Some(bytes) = read.recv().await {
            if !input.write(&bytes).await {
                return;
            }
        }
        input.end().await;
    });
}

fn exit(ended: &ExecEnded) -> Exit {
    let code = match (ended.code, ended.signal) {
        (Some(code), _) => code,
        (None, Some(signal)) => SIGNAL_BASE + signal,
        (None, None) => return Exit::Internal,
    };
    // As the system counts: the lowest byte.
    Exit::Command(u8::try_from(code & 0xff).unwrap_or(u8::MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_commands_end_is_the_verbs() {
        let of = |code, signal| exit(&ExecEnded { code, signal, oom: false }).code();
        assert_eq!([of(Some(0), None), of(Some(3), None), of(Some(255), None), of(None, Some(9))], [0, 3, 255, 137]);
        assert_eq!(of(None, None), Exit::Internal.code());
    }
}
