//! The process tier: own session, process group, cgroup and directories on the worker's host, for code you trust.
//!
//! Owns a slot's shim and cgroup. Does not own how processes are started and killed (`spawner`) or how limits are written (`cgroup`).

use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use super::{Exit, Machine, Streams};
use crate::attempt::Force;
use crate::cgroup::{Cgroups, SlotCgroup};
use crate::execute::ExecuteError;
use crate::mounts::Mounts;
use crate::prepare::Prepared;
use crate::restore::RestoreError;
use crate::spawner::proto::{MakeShim, Reply, Spawn};
use crate::spawner::{self, Shim, Spawner, SpawnerError};
use crate::volumes::Show;

/// How long it is tried to kill what a shim left. What lives longer hangs in the kernel.
const CLEAR_TIME: Duration = Duration::from_secs(5);
/// Between two rounds: processes die within a millisecond or two.
const CLEAR_PAUSE: Duration = Duration::from_millis(5);

/// A slot of the process tier.
#[derive(Debug)]
pub struct ProcessMachine {
    slot: u32,
    /// Of which tier: what is started are runtimes.
    containers: bool,
    /// Does the shim enter the cgroup? Otherwise what it starts does.
    enters: bool,
    spawner: Spawner,
    cgroups: Option<Arc<Cgroups>>,
    generation: u32,
    cgroup: Option<SlotCgroup>,
    shim: Option<Shim>,
    /// Has it mounts of its own?
    own_mounts: bool,
    /// What is mounted below it is not in those.
    hidden: Option<String>,
    /// The command with its volumes, and their mounts; of an attempt that has any.
    shown: Option<(Spawn, Vec<OwnedFd>)>,
    oom_before: u64,
    /// Was the shim found dead? Then the next attempt gets another one.
    gone: AtomicBool,
}

impl ProcessMachine {
    /// A slot in which nothing ran yet. Its shim and cgroup come with the first attempt.
    #[must_use]
    pub fn new(slot: u32, spawner: Spawner, cgroups: Option<Arc<Cgroups>>) -> Self {
        Self {
            slot,
            containers: false,
            enters: true,
            spawner,
            cgroups,
            generation: 0,
            cgroup: None,
            shim: None,
            own_mounts: false,
            hidden: None,
            shown: None,
            oom_before: 0,
            gone: AtomicBool::new(false),
        }
    }

    /// The same for a slot of the container tier: what is started are runtimes. `enters`: they are in the cgroup as well; otherwise what runs
    /// enters it by itself.
    #[must_use]
    pub fn for_containers(slot: u32, spawner: Spawner, cgroups: Option<Arc<Cgroups>>, enters: bool) -> Self {
        Self { containers: true, enters, ..Self::new(slot, spawner, cgroups) }
    }

    /// The same, whose tasks see nothing of what is mounted below this directory but what they are shown of it.
    #[must_use]
    pub fn hiding(self, dir: &Path) -> Self {
        Self { hidden: Some(dir.to_string_lossy().into_owned()), ..self }
    }

    /// The files of its cgroup into which what runs writes itself.
    #[must_use]
    pub fn join_files(&self) -> Vec<String> {
        self.cgroup.as_ref().map(SlotCgroup::join_files).unwrap_or_default()
    }

    async fn make_shim(&mut self) -> Result<(), RestoreError> {
        if let (None, Some(cgroups)) = (&self.cgroup, &self.cgroups) {
            let kind = if self.containers { "container" } else { "slot" };
            let name = match self.generation {
                0 => format!("{kind}-{}", self.slot),
                n => format!("{kind}-{}-{n}", self.slot),
            };
            self.cgroup = Some(cgroups.slot(&name)?);
        }
        let oom_file = self.cgroup.as_ref().and_then(SlotCgroup::oom_file);
        let make = MakeShim {
            join: self.join_files(),
            oom_file,
            containers: self.containers,
            enters: self.enters,
            mounts: self.own_mounts,
            hidden: self.hidden.clone(),
        };
        self.shim = Some(self.spawner.shim(&make).await?);
        Ok(())
    }

    /// Gives up shim and cgroup; the next attempt gets new ones.
    fn discard(&mut self) {
        self.shim = None;
        self.shown = None;
        self.generation += 1;
        if let Some(cgroup) = self.cgroup.take() {
            // Waits for processes to die, which may take long when they hang in the kernel.
            tokio::task::spawn_blocking(move || cgroup.remove());
        }
    }
}

impl Machine for ProcessMachine {
    async fn restore(&mut self, prepared: &Prepared, mounts: &mut Mounts) -> Result<(), RestoreError> {
        self.shown = None;
        self.ready(prepared).await?;
        if prepared.volumes.is_empty() {
            return Ok(());
        }
        mounts.open(&prepared.volumes, (0, 0), |plan| Show::Mount { read_only: plan.read_only }).await?;
        // Whoever owns a volume's top directory is the task, whatever user that is here: its slot's, which is another one in each slot.
        let task = prepared.spawn.uid.zip(prepared.spawn.gid).filter(|(uid, _)| *uid != 0);
        let (shows, trees) = mounts.copies(|(uid, gid)| match task {
            Some(task) => (vec![(uid, task.0)], vec![(gid, task.1)]),
            None => (Vec::new(), Vec::new()),
        })?;
        self.shown = Some((Spawn { mounts: shows, ..prepared.spawn.clone() }, trees));
        Ok(())
    }

    async fn start(&mut self, prepared: &Prepared) -> Result<Streams, ExecuteError> {
        match self.shown.take() {
            None => self.start_as(&prepared.spawn, prepared, &[]).await,
            Some((spawn, trees)) => self.start_as(&spawn, prepared, &trees).await,
        }
    }

    async fn wait(&self) -> Result<Exit, ExecuteError> {
        let shim = self.shim.as_ref().ok_or(ExecuteError::Lost)?;
        let reply = shim.reply().await;
        if matches!(reply, Err(SpawnerError::ShimGone)) {
            self.gone.store(true, Ordering::Relaxed);
            self.clear().await;
        }
        match reply {
            Ok(Reply::Exited(exited)) if exited.stuck => Err(ExecuteError::Stuck),
            Ok(Reply::Exited(exited)) => Ok(Exit {
                code: exited.code,
                signal: exited.signal,
                oom: exited.oom,
                cpu_us: exited.cpu_us,
                memory_bytes_max: exited.memory_bytes_max,
                strays: exited.strays,
                disk_full: false,
            }),
            Ok(Reply::NotStarted { step, errno }) => Err(ExecuteError::NotStarted { step, errno }),
            Ok(Reply::Refused(why)) => Err(ExecuteError::Container(why)),
            Ok(Reply::Ready | Reply::Broken(_)) => Err(ExecuteError::Spawner("it answered out of turn".into())),
            // The kernel may have taken the shim itself for want of memory: the verdict is the same.
            Err(SpawnerError::ShimGone) if self.cgroup.as_ref().is_some_and(|c| c.oom_kills() > self.oom_before) => {
                Ok(Exit { signal: Some(libc::SIGKILL), oom: true, ..Exit::default() })
            }
            Err(SpawnerError::ShimGone) => Err(ExecuteError::Lost),
            Err(other) => Err(ExecuteError::Spawner(other.to_string())),
        }
    }

    async fn stop(&self, force: Force) {
        let Some(shim) = &self.shim else { return };
        // A shim that is gone took everything with it.
        let _ = match force {
            Force::Term => shim.term().await,
            Force::Kill | Force::Abandon => shim.kill().await,
        };
    }
}

impl ProcessMachine {
    /// Makes shim and cgroup ready, with the attempt's limits.
    ///
    /// # Errors
    /// [`RestoreError`].
    pub async fn ready(&mut self, prepared: &Prepared) -> Result<(), RestoreError> {
        let mounts = !prepared.volumes.is_empty();
        // Tasks without volumes see the host's mounts as they come and go.
        if std::mem::take(self.gone.get_mut()) || self.own_mounts != mounts && !self.containers {
            self.shim = None;
        }
        self.own_mounts = mounts;
        if self.shim.is_none() {
            self.make_shim().await?;
        }
        match &mut self.cgroup {
            None if prepared.limits.any() => return Err(RestoreError::NoLimits),
            None => return Ok(()),
            Some(cgroup) => match cgroup.set_limits(prepared.limits) {
                Ok(()) => {}
                Err(why) => {
                    tracing::info!(slot = self.slot, %why, "the slot gets a fresh cgroup");
                    self.discard();
                    self.make_shim().await?;
                    if let Some(cgroup) = &mut self.cgroup {
                        cgroup.set_limits(prepared.limits)?;
                    }
                }
            },
        }
        // Without a limit a helper that is killed is no matter of memory, and reading the count is saved.
        let limited = self.cgroup.as_ref().filter(|_| prepared.limits.memory_bytes.is_some());
        self.oom_before = limited.map_or(u64::MAX, SlotCgroup::oom_kills);
        Ok(())
    }

    /// Ends what a shim that is gone has left, before anybody looks at what the task did.
    async fn clear(&self) {
        let Some(cgroup) = &self.cgroup else { return };
        let begun = tokio::time::Instant::now();
        while cgroup.kill() > 0 && begun.elapsed() < CLEAR_TIME {
            tokio::time::sleep(CLEAR_PAUSE).await;
        }
    }

    /// Starts this in place of the task's command, with the task's streams. `mounts`: what `spawn` is shown.
    ///
    /// # Errors
    /// [`ExecuteError`].
    pub async fn start_as(&mut self, spawn: &Spawn, prepared: &Prepared, mounts: &[OwnedFd]) -> Result<Streams, ExecuteError> {
        let shim = self.shim.as_ref().ok_or(ExecuteError::Lost)?;
        let owner = prepared.spawn.uid.zip(prepared.spawn.gid);
        let pipe = || -> std::io::Result<_> {
            let (read, write) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC)?;
            rustix::io::ioctl_fionbio(&read, true)?;
            if let Some((uid, gid)) = owner {
                // So that it can open them by name: /dev/stdout.
                rustix::fs::fchown(&write, Some(rustix::fs::Uid::from_raw(uid)), Some(rustix::fs::Gid::from_raw(gid)))?;
            }
            Ok((read, write))
        };
        let ((stdout, stdout_end), (stderr, stderr_end)) = pipe().and_then(|out| Ok((out, pipe()?))).map_err(ExecuteError::Local)?;
        let stdin = match &prepared.task.stdin {
            Some(text) => Some(spawner::memory_file("stdin", text.as_bytes()).map_err(ExecuteError::Local)?),
            None => None,
        };
        shim.spawn(spawn, stdout_end.as_fd(), stderr_end.as_fd(), stdin.as_ref().map(|f| f.as_fd()), mounts).await.map_err(
            |e| match e {
                SpawnerError::ShimGone => ExecuteError::Lost,
                other => ExecuteError::Spawner(other.to_string()),
            },
        )?;
        Ok(Streams { stdout, stderr })
    }

    /// After an attempt whose end leaves the slot in doubt: nothing of it is used again.
    pub fn distrust(&mut self) {
        self.discard();
    }
}
