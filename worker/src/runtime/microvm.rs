//! The microvm tier: a machine of its own for each attempt, restored from a template and destroyed with it.
//!
//! Owns a slot's machine and the order of its life: restored, made unlike its siblings, given a scratch disk and inputs, its command run,
//! its outputs fetched, killed. How it is made ready is in `microvm/ready`, how its command runs in `microvm/command`. Does not own VMMs
//! (`vmm`), the agent's calls (`guest`) or templates (`machines`).
//!
//! What the guest says is its own word only. It ends as *guest lost* when it says nothing, and its machine is killed whatever it does.

mod command;
mod ready;
mod volumes;

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use tokio::sync::watch;
use tokio::task::JoinHandle;
use volley_guest::files::{Unpack, UnpackError};
use volley_jobspecs::failure::FailureClass;
use volley_jobspecs::spec::Resources;
use volley_jobspecs::wire::guest::{FileLimits, Files, Get, GetNamed, Put, RefusalKind};
use volley_jobspecs::wire::work::TemplateStage;

use super::{Exit, Machine, Streams};
use crate::attempt::Force;
use crate::dirs::Dirs;
use crate::execute::ExecuteError;
use crate::guest::{FilesError, Guest, GuestError};
use crate::machines::groups;
use crate::machines::kept::{self, KeepError};
use crate::machines::{Machines, Wanted};
use crate::mounts::{End, MountError, Mounts};
use crate::persist::PersistError;
use crate::prepare::{InMachine, Prepared};
use crate::restore::RestoreError;
use crate::shells::{Entered, Gone, Place as ShellPlace};
use crate::standby::Standing;
use crate::vmm::console;
use command::Running;
use ready::{Place, Ready};

/// Where the scratch disk is mounted in a machine.
pub const SCRATCH: &str = "/volley";
/// Where a command starts, its HOME.
pub const WORK: &str = "/volley/work";
/// Its VOLLEY_OUTPUT_DIR.
pub const OUT: &str = "/volley/out";
/// Its TMPDIR; it lies on the scratch disk too.
pub const TMP: &str = "/tmp";

/// How long inputs may take to get into a machine, and outputs out of it: an emulated one moves some 20 MB a second.
const FILES_WAIT: Duration = Duration::from_secs(900);
/// Most files, directories and links moved at once: those that can be kept (`persist`), and directories for them.
const ENTRIES_MAX: u64 = 200_000;
/// Longest path: what Linux takes.
const PATH_BYTES_MAX: u32 = 4_096;
/// Entries that were left out and are named.
const SKIPPED_NAMED: usize = 5;
/// Bits of modes that files of a machine keep on the host: they run as nobody there.
const MODE_MASK: u32 = 0o777;

/// A slot of the microvm tier.
#[derive(Debug)]
pub struct MicrovmMachine {
    machines: Arc<Machines>,
    ready: Option<Ready>,
    running: Option<Running>,
    /// People may run commands in it.
    entered: Option<Entered>,
    /// What the machine's template still needs.
    stage: watch::Sender<Option<TemplateStage>>,
    /// Machines that are being killed.
    dying: Option<JoinHandle<()>>,
}

impl MicrovmMachine {
    /// A slot in which nothing ran yet.
    #[must_use]
    pub fn new(machines: Arc<Machines>) -> Self {
        Self { machines, ready: None, running: None, entered: None, stage: watch::Sender::default(), dying: None }
    }

    /// What the template of the machine that is being restored still needs, as it changes.
    #[must_use]
    pub fn stages(&self) -> watch::Receiver<Option<TemplateStage>> {
        self.stage.subscribe()
    }

    /// What every result of this slot says.
    #[must_use]
    pub fn label(&self) -> Option<String> {
        self.machines.label()
    }

    /// Kills the machine, whatever it does. [`MicrovmMachine::release`] waits for its end.
    pub fn kill(&mut self) {
        if let (Some(entered), Some(ready)) = (&mut self.entered, &self.ready)
            && ready.vm.ended().now_or_never().is_some()
        {
            entered.goes(Gone::Died);
        }
        (self.running, self.entered) = (None, None);
        if let Some(Ready { vm, guest, group, .. }) = self.ready.take() {
            drop(guest);
            self.dying = Some(tokio::spawn(Standing { vm, group }.end()));
        }
    }

    /// Ends people's commands in the machine, and lets none begin until it is kept.
    pub fn end_shells(&self) {
        if let Some(entered) = &self.entered {
            entered.close();
        }
    }

    /// Lets nothing in the machine run while its outputs are fetched, so that nobody changes them or holds that up, and lets no command of
    /// people's begin. A machine in which that fails loses people's commands.
    pub async fn hold(&self) {
        let (Some(entered), Some(ready)) = (&self.entered, &self.ready) else { return };
        entered.hold();
        if let Err(why) = ready.guest.hold(true).await {
            tracing::warn!(%why, "a machine that may be kept can't be held; shells in it end");
            entered.close();
        }
    }

    /// Hands the machine over to those that are kept for a while; the slot is free of it then.
    ///
    /// # Errors
    /// [`KeepError`]: it is still the slot's, or gone.
    pub async fn keep(&mut self, resources: &Resources, time: Duration) -> Result<(), KeepError> {
        let bytes = groups::memory_bytes(resources, self.machines.vmm.capabilities());
        let room = self.machines.kept.room(bytes).await?;
        self.running = None;
        let (Some(Ready { guest, vm, group, template, .. }), Some(entered)) = (self.ready.take(), self.entered.take()) else {
            return Err(KeepError::Gone);
        };
        // One that does not answer is of no use to anybody; dropped, it goes.
        guest.hold(false).await.map_err(KeepError::Guest)?;
        let asked = entered.reopen();
        room.keep(kept::Machine { name: entered.name(), guest, machine: Standing { vm, group }, entered, asked, bytes, template }, time)
    }

    /// Kills the machine and waits until nothing is left of it.
    pub async fn release(&mut self) {
        self.kill();
        if let Some(dying) = self.dying.take() {
            // An error: the runtime ends, and the process with it.
            let _ = dying.await;
        }
    }

    /// Has everything on volumes that was written to them and is wanted at such an end, and holds whatever would be written yet.
    ///
    /// # Errors
    /// [`MountError`].
    pub async fn settle(&self, mounts: &Mounts, end: End) -> Result<(), MountError> {
        match &self.ready {
            Some(ready) => volumes::settle(&self.machines, ready, mounts, end).await,
            None => Ok(()),
        }
    }

    /// Takes volumes from the machine, which lives on.
    pub async fn unmount(&self, mounts: &Mounts) {
        if let Some(ready) = &self.ready {
            volumes::unmount(ready, mounts).await;
        }
    }

    /// Fetches what the command left into the slot's directories, where it is found as if the command had run there. Nothing of the
    /// machine is believed but that these are files. What the machine left out, in words, if anything.
    ///
    /// # Errors
    /// [`PersistError::Machine`], [`PersistError::Disk`].
    pub async fn collect(&mut self, prepared: &Prepared, dirs: &Dirs) -> Result<Option<String>, PersistError> {
        let (Some(Ready { guest, vm, scratch_bytes, .. }), Some(_)) = (&mut self.ready, &prepared.inside) else { return Ok(None) };
        let how = Unpack { owner: dirs.owner(), mode_mask: MODE_MASK, limits: limits(*scratch_bytes) };
        let local = |source| PersistError::Read { path: dirs.out(), source };
        let out = get_all(guest, crate::beneath::root(&dirs.out()).map_err(local)?, how);
        let work = match prepared.task.outputs.as_slice() {
            [] => None,
            names => {
                // What is there are the inputs, as they were.
                dirs.empty_work().map_err(local)?;
                Some(get_named(guest, crate::beneath::root(&dirs.work()).map_err(local)?, names, how))
            }
        };
        let fetch = async {
            match work {
                None => out.await.map(|files| vec![files]),
                Some(work) => futures::try_join!(out, work).map(|(out, work)| vec![out, work]),
            }
        };
        // A VMM that is gone is told of elsewhere.
        let (fetched, failed) = tokio::join!(fetch, vm.failed_disk_operations());
        let failed = match &fetched {
            // Behind them: what was read until then and was still in the guest's memory is right.
            Ok(all) if all.iter().any(|files| files.bytes > 0) => vm.failed_disk_operations().await,
            Ok(_) | Err(_) => failed,
        };
        match (failed, fetched) {
            (Ok(count @ 1..), _) => Err(PersistError::Disk { count }),
            (_, Ok(all)) => Ok(left_out(&all)),
            (_, Err(why)) => Err(self.not_collected(why).await),
        }
    }

    async fn not_collected(&self, why: FilesError) -> PersistError {
        let class = match &why {
            FilesError::Guest(GuestError::Refused(refusal)) if refusal.kind == RefusalKind::TooMuch => FailureClass::PolicyDenied,
            FilesError::Unpack(UnpackError::TooMuch(_)) => FailureClass::PolicyDenied,
            FilesError::Unpack(UnpackError::File { .. }) => FailureClass::StorageFailed,
            FilesError::Guest(_) | FilesError::Pack(_) | FilesError::Unpack(_) | FilesError::Thread(_) => FailureClass::GuestLost,
        };
        let text = match (&self.ready, &why) {
            (Some(ready), FilesError::Guest(GuestError::Lost(_))) => command::cause_of(&*ready.vm).await.to_string(),
            _ => crate::chain(&why),
        };
        PersistError::Machine { class, why: text }
    }
}

/// Copies inputs into a machine.
async fn put_inputs(ready: &Ready, inside: &InMachine) -> Result<(), RestoreError> {
    if !inside.has_files {
        return Ok(());
    }
    let put = Put { dir: WORK.to_owned(), owner: ready.owner, limits: limits(ready.scratch_bytes) };
    let put = ready.guest.put(put, inside.dirs.work(), FILES_WAIT).await;
    put.map(drop).map_err(|why| match why {
        FilesError::Guest(GuestError::Refused(refusal)) if matches!(refusal.kind, RefusalKind::NoSpace | RefusalKind::TooMuch) => {
            RestoreError::NoSpace { disk: ready.scratch_bytes, why: refusal.text }
        }
        other => RestoreError::Inputs(other),
    })
}

/// How much may be moved: what fits onto the scratch disk.
fn limits(scratch_bytes: u64) -> FileLimits {
    FileLimits { bytes: scratch_bytes, entries: ENTRIES_MAX, path_bytes: PATH_BYTES_MAX }
}

async fn get_all(guest: &Guest, to: OwnedFd, how: Unpack) -> Result<Files, FilesError> {
    let get = Get { path: OUT.to_owned(), limits: how.limits };
    there(guest.get(get, to, how, FILES_WAIT).await)
}

async fn get_named(guest: &Guest, to: OwnedFd, names: &[String], how: Unpack) -> Result<Files, FilesError> {
    let get = GetNamed { dir: WORK.to_owned(), names: names.to_vec(), limits: how.limits };
    there(guest.get_named(get, to, how, FILES_WAIT).await)
}

/// What the guest counted. A directory that the command removed gave nothing.
fn there(got: Result<(Files, Files), FilesError>) -> Result<Files, FilesError> {
    match got {
        Ok((_here, there)) => Ok(there),
        Err(FilesError::Guest(GuestError::Refused(refusal))) if refusal.kind == RefusalKind::NotFound => Ok(Files::default()),
        Err(why) => Err(why),
    }
}

/// What the guest left out, in words.
fn left_out(all: &[Files]) -> Option<String> {
    let total: u64 = all.iter().map(|files| files.skipped_total).sum();
    let names = all.iter().flat_map(|files| &files.skipped).take(SKIPPED_NAMED).map(|skipped| console::plain(&skipped.path));
    let names: Vec<String> = names.collect();
    let more = total.saturating_sub(names.len() as u64);
    let more = if more > 0 { format!(" and {more} more") } else { String::new() };
    (total > 0).then(|| format!("left in the machine, as they are no plain files: {}{more}", names.join(", ")))
}

impl Machine for MicrovmMachine {
    async fn restore(&mut self, prepared: &Prepared, mounts: &mut Mounts) -> Result<(), RestoreError> {
        // One of an attempt that was given up before it began.
        self.release().await;
        let inside = prepared.inside.as_deref().ok_or(RestoreError::NotPrepared)?;
        let (tenant, task) = (&inside.tenant, &prepared.task);
        let found = self.machines.template_by_stages(&Wanted::of(tenant, task), &self.stage).await?;
        let limits = groups::limits(&task.resources, self.machines.vmm.capabilities());
        let place = Place { inside, disk: task.resources.disk.map(|disk| disk.0), limits, volumes: &prepared.volumes };
        let ready = ready::make(&self.machines, &found, &place, mounts).await?;
        let ready = self.ready.insert(ready);
        put_inputs(ready, inside).await?;
        // Last: what is mounted there covers what was there before, in every tier.
        Ok(volumes::mount(&self.machines, ready, mounts).await?)
    }

    async fn start(&mut self, prepared: &Prepared) -> Result<Streams, ExecuteError> {
        let (Some(ready), Some(inside)) = (&self.ready, prepared.inside.as_deref()) else { return Err(ExecuteError::Lost) };
        let (running, streams) = command::start(ready, prepared, inside)?;
        self.running = Some(running);
        let (env, cwd) = (super::environment(inside, &ready.image), inside.cwd.clone());
        let place = ShellPlace { guest: Arc::downgrade(&ready.guest), env, cwd, user: ready.user.clone() };
        self.entered = Some(self.machines.shells.enter(inside.name, place));
        Ok(streams)
    }

    async fn wait(&self) -> Result<Exit, ExecuteError> {
        let (Some(ready), Some(running)) = (&self.ready, &self.running) else { return Err(ExecuteError::Lost) };
        match (running.wait(&*ready.vm).await, ready.group.killed_at()) {
            (Err(ExecuteError::Guest(why)), Some(bytes)) => {
                Err(ExecuteError::Guest(format!("{}: {why}", RestoreError::HostMemory { bytes })))
            }
            (ended, _) => ended,
        }
    }

    async fn stop(&self, force: Force) {
        if let Some(running) = &self.running {
            running.stop(force);
        }
    }
}

/// Where a command of a machine starts.
#[must_use]
pub fn workdir(workdir: Option<&str>) -> String {
    match workdir {
        None => WORK.to_owned(),
        // An absolute one replaces the whole path.
        Some(dir) => Path::new(WORK).join(dir).to_string_lossy().into_owned(),
    }
}
