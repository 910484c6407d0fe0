//! What runs a task: one machine per slot, the same semantics in every isolation tier.
//!
//! Owns the trait and the words of its answers. Does not own any tier: `runtime/microvm` (a virtual machine), `runtime/container`
//! (an OCI runtime), `runtime/process` (own session, cgroup and directories on the host), `runtime/null` (nothing runs); `runtime/tiers` chooses among a slot's.

pub mod container;
pub mod microvm;
pub mod null;
pub mod process;
pub mod tiers;

use std::future::Future;
use std::os::fd::OwnedFd;

use crate::attempt::Force;
use crate::execute::ExecuteError;
use crate::mounts::Mounts;
use crate::prepare::Prepared;
use crate::restore::RestoreError;

/// How a command ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Exit {
    /// Its exit code, unless a signal ended it.
    pub code: Option<i32>,
    /// The signal that ended it.
    pub signal: Option<i32>,
    /// Did the kernel kill something of it at its memory limit?
    pub oom: bool,
    /// CPU time in microseconds.
    pub cpu_us: u64,
    /// Most memory resident at once, in bytes.
    pub memory_bytes_max: u64,
    /// Processes it left running, which were killed.
    pub strays: u32,
    /// Was its machine's disk full at its end?
    pub disk_full: bool,
}

/// What a command writes, as it writes it: the reading ends of pipes, which don't block.
#[derive(Debug)]
pub struct Streams {
    /// Its stdout.
    pub stdout: OwnedFd,
    /// Its stderr.
    pub stderr: OwnedFd,
}

/// A place where one command at a time runs.
pub trait Machine: Send + Sync {
    /// Makes it ready for an attempt, fresh as if nothing had ever run in it, with the volumes that it wants: they are open in `mounts` then.
    fn restore(&mut self, prepared: &Prepared, mounts: &mut Mounts) -> impl Future<Output = Result<(), RestoreError>> + Send;
    /// Starts the command.
    fn start(&mut self, prepared: &Prepared) -> impl Future<Output = Result<Streams, ExecuteError>> + Send;
    /// Waits until the command and everything it started is gone. Cancel-safe.
    fn wait(&self) -> impl Future<Output = Result<Exit, ExecuteError>> + Send;
    /// Stops it. Never waits for the end, and never depends on the command's cooperation.
    fn stop(&self, force: Force) -> impl Future<Output = ()> + Send;
}

/// The environment of a command that runs in an image: what every task has, the image's, and the task's own, of which the later counts.
fn environment(inside: &crate::prepare::InMachine, image: &crate::image::oci::Config) -> Vec<(String, String)> {
    let mut env = inside.defaults.clone();
    env.extend(crate::machines::image_env(image));
    env.extend(inside.own.iter().map(|(name, value)| (name.clone(), value.clone())));
    env.into_iter().collect()
}
