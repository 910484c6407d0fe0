//! The agent of a machine and the host's side of its protocol, held against each other.
//!
//! `process`: the agent as an ordinary process. `machine`: the agent as the first process of a Linux guest, over a virtio port, and through
//! snapshots. `hostile`: a guest that says anything.

#![expect(clippy::unwrap_used, reason = "a failed step of a test ends the test")]

#[expect(dead_code, reason = "shared with tests of images")]
#[path = "../guest/host.rs"]
mod host;
mod hostile;
mod machine;
mod process;
mod qemu;

use std::time::Duration;

use volley_jobspecs::wire::guest::mux::Channel;
use volley_jobspecs::wire::guest::{Ended, Exec, FileLimits};
use volley_worker::guest::{Command, Guest};

/// More than any file here has.
pub const LIMITS: FileLimits = FileLimits { bytes: 1 << 30, entries: 10_000, path_bytes: 4096 };
/// For what must not hang.
pub const SOON: Duration = Duration::from_secs(60);

/// A command that a shell runs.
pub fn shell(script: &str) -> Exec {
    let argv = ["/bin/sh", "-c", script].map(str::to_owned).to_vec();
    Exec { argv, env: vec![("PATH".to_owned(), "/usr/bin:/bin".to_owned())], ..Exec::default() }
}

/// What a command wrote, and how it ended.
pub struct Outcome {
    pub output: String,
    pub errors: String,
    pub ended: Ended,
}

async fn read_all(command: &Command, channel: Channel) -> String {
    let (mut all, mut buffer) = (Vec::new(), vec![0; 65536]);
    loop {
        match command.read(channel, &mut buffer).await.unwrap() {
            0 => return String::from_utf8_lossy(&all).into_owned(),
            len => all.extend_from_slice(&buffer[..len]),
        }
    }
}

/// Reads everything and waits for the end.
pub async fn finish(command: &Command) -> Outcome {
    let all = async { tokio::join!(read_all(command, Channel::Output), read_all(command, Channel::Errors), command.ended()) };
    let (output, errors, ended) = tokio::time::timeout(SOON, all).await.expect("the command ends");
    Outcome { output, errors, ended: ended.unwrap() }
}

/// Runs a command to its end.
pub async fn run(guest: &Guest, exec: &Exec) -> Outcome {
    finish(&guest.exec(exec).await.unwrap()).await
}
