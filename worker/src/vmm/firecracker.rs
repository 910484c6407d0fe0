//! Firecracker: machines on KVM.
//!
//! Owns the order of what is done with Firecracker: how it is started, saved, loaded and given disks. Its snapshots name files by path, so
//! every process has a directory of its own with the same names in it, and descriptors with the same numbers.

mod api;
mod bodies;
mod metrics;

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::time::Instant;

use super::console::Tail;
use super::files::{self, Frozen};
use super::kvm::Kvm;
use super::spawner::proto::{Exited, Step};
use super::spawner::{Launch, MachineSpawner, Process, Program, SpawnError};
use super::{
    Accelerator, Boot, Capabilities, Disk, FORMAT, Identity, Kind, PORT_NUMBER, SETTLES, Size, Slot, Snapshot, Source, Version, Vm, Vmm,
    VmmError, io_error,
};
use crate::guest::Stream;
use api::Api;
use bodies::Call;
use metrics::Metrics;

/// How long its start may take: 7 ms were measured, and many start at once on a busy host.
const START_WAIT: Duration = Duration::from_secs(30);
/// How long a request may take that does little.
const CALL_WAIT: Duration = Duration::from_secs(30);
/// How long a boot may take until the processors run; the kernel is read meanwhile.
const BOOT_WAIT: Duration = Duration::from_secs(60);
/// How long saving may take: all memory is written, 0.15 GiB a second where that was slowest.
const SAVE_WAIT: Duration = Duration::from_secs(600);
/// How long a process that was killed may take to be gone.
const END_WAIT: Duration = Duration::from_secs(15);
/// How long the agent may take to listen: an emulated guest's whole boot.
const CONNECT_WAIT: Duration = Duration::from_secs(120);
/// Between tries to reach it.
const CONNECT_AGAIN: Duration = Duration::from_millis(10);
/// How long one try may take; Firecracker itself gives up after two seconds.
const TRY_WAIT: Duration = Duration::from_secs(5);
/// Longest answer to a try: `OK` and a port.
const ANSWER_BYTES_MAX: usize = 32;
/// Lines of its errors that are told.
const SAID_LINES: usize = 3;
/// The host's memory that a machine takes while it stands still, in bytes: less than 1 MB was measured, shared pages divided.
const STANDING_BYTES: u64 = 4 << 20;
/// Size of what lies in an empty slot.
const EMPTY_BYTES: u64 = 1 << 20;
/// The kernel's command line, before a boot's own words: Firecracker's documentation has the same.
const WORDS: &str = "console=ttyS0 reboot=k panic=-1 i8042.noaux i8042.nomux i8042.dumbkbd loglevel=4";

/// The driver.
#[derive(Debug)]
pub struct Firecracker {
    spawner: MachineSpawner,
    program: File,
    /// What lies in all empty slots of all machines: zeros that can't be written.
    empty: Arc<Frozen>,
    capabilities: Capabilities,
}

impl Firecracker {
    /// Finds out what Firecracker can do here. `kvm`: what a look at it said (`kvm::probe`).
    ///
    /// # Errors
    /// [`VmmError::Unusable`].
    pub async fn open(spawner: MachineSpawner, program: &Path, kvm: Kvm) -> Result<Self, VmmError> {
        let unusable = |why: String| VmmError::Unusable { vmm: Kind::Firecracker, why };
        let file = File::open(program).map_err(|e| match e.kind() {
            io::ErrorKind::NotFound => {
                unusable(format!("{} is not there; install it, or name another with --firecracker", program.display()))
            }
            _ => unusable(format!("{}: {e}", program.display())),
        })?;
        let mode = file.metadata().map_err(io_error(program.display().to_string()))?.permissions().mode();
        if mode & 0o001 == 0 {
            return Err(unusable(format!("{} may not be executed by everybody: chmod 755 it", program.display())));
        }
        let accelerator = match kvm {
            Kvm::Usable => Accelerator::Kvm,
            Kvm::Emulates => Accelerator::EmulatingKvm,
            Kvm::Forbidden => return Err(unusable(kvm.as_str().to_owned())),
            Kvm::Missing | Kvm::Broken => {
                return Err(unusable(format!("{}, and it has nothing else; use QEMU (--vmm qemu)", kvm.as_str())));
            }
        };
        let said = super::version_of(&spawner, Program::File(file.as_fd()), "firecracker").await.map_err(|why| match why {
            VmmError::Spawn(SpawnError::NotStarted { step: Step::Exec, errno, .. }) => {
                let why = io::Error::from_raw_os_error(errno);
                unusable(format!("{} can't be executed ({why}); it must be a program that is linked statically", program.display()))
            }
            why => why,
        })?;
        let version = usable_version(&said).map_err(unusable)?;
        let identity = Identity { vmm: Kind::Firecracker, version, accelerator, machine: "microvm", cpu: "host", format: FORMAT };
        let emulated = accelerator != Accelerator::Kvm;
        let capabilities = Capabilities {
            identity,
            emulated,
            why_emulated: emulated.then(|| kvm.as_str()),
            connects_paused: false,
            sets_clock: bodies::sets_clock(version),
            serials: false,
            standing_bytes: STANDING_BYTES,
            beside_bytes: 0,
            missing: spawner.missing(),
        };
        let empty = files::in_memory("volley-empty")?;
        empty.set_len(EMPTY_BYTES).map_err(io_error("making an empty disk"))?;
        Ok(Self { spawner, program: file, empty: Arc::new(Frozen::seal(empty)?), capabilities })
    }

    async fn boot_now(&self, boot: Boot) -> Result<Box<dyn Vm>, VmmError> {
        let readable = |path: &Path| {
            let at = io_error(path.display().to_string());
            File::open(path).and_then(|mut file| files::copy_in_memory("volley-boot", &mut file)).map_err(at)
        };
        let kernel = readable(&boot.kernel)?;
        let initrd = boot.initrd.as_deref().map(readable).transpose()?;
        let (memory, state) = (files::in_memory("volley-memory")?, files::in_memory("volley-state")?);
        let more: Vec<&File> = [&kernel, &memory, &state].into_iter().chain(&initrd).collect();
        let mut vm = self.start(boot.size, boot.root.as_ref(), &more, &boot.cgroups).await?;
        let root = if boot.root.is_some() { " volley.root=vda" } else { "" };
        let words = format!("{WORDS} volley.vsock={PORT_NUMBER}{root} {}", boot.words);
        for call in bodies::boot(boot.size, boot.root.is_some(), initrd.is_some(), words.trim_end()) {
            vm.call(call, BOOT_WAIT).await?;
        }
        vm.saves = Some((memory, state));
        Ok(Box::new(vm))
    }

    async fn restore_now(&self, snapshot: &Snapshot, cgroups: &[String]) -> Result<Box<dyn Vm>, VmmError> {
        let this = &self.capabilities.identity;
        if snapshot.made_by != *this {
            return Err(VmmError::Other { made_by: snapshot.made_by.clone(), this: this.clone() });
        }
        let (memory, state) = (snapshot.memory.open()?, snapshot.state.open()?);
        let (metrics, its_metrics) = Metrics::follow(Slot::SCRATCH.name()).map_err(io_error("making a pipe"))?;
        let its_metrics = File::from(its_metrics);
        let mut vm = self.start(snapshot.size, snapshot.root.as_ref(), &[&memory, &state, &its_metrics], cgroups).await?;
        // It opens the pipe by its path, so that must be its user's.
        vm.give(its_metrics.as_fd()).map_err(io_error("giving a pipe to a machine"))?;
        vm.call(bodies::metrics(), CALL_WAIT).await?;
        drop(its_metrics);
        vm.metrics = Some(metrics);
        vm.call(bodies::load(this.version), CALL_WAIT).await?;
        Ok(Box::new(vm))
    }

    async fn start(&self, size: Size, root: Option<&Arc<File>>, more: &[&File], cgroups: &[String]) -> Result<FirecrackerVm, VmmError> {
        let follow = || Tail::follow().map_err(io_error("making a console"));
        let ((console, its_console), (errors, its_errors)) = (follow()?, follow()?);
        let null = File::open("/dev/null").map_err(io_error("/dev/null"))?;
        let its_root = match root {
            Some(root) => files::open_again(root).map_err(io_error("opening a root disk"))?,
            None => null.try_clone().map_err(io_error("/dev/null"))?,
        };
        let mut inherits = vec![null.as_fd(), its_console.as_fd(), its_errors.as_fd(), its_root.as_fd(), self.empty.as_fd()];
        inherits.extend(more.iter().map(|file| file.as_fd()));
        // Its log goes where the console goes: only what is wrong is in it.
        let argv = ["firecracker", "--api-sock", bodies::API_SOCKET, "--level", "Error"].map(Into::into).to_vec();
        let launch = Launch { program: Program::File(self.program.as_fd()), argv, cgroups, inherits };
        let process = self.spawner.launch(&launch).await?;
        drop(launch);
        drop((its_console, its_errors));
        // Whichever comes first: a process that ends makes no socket.
        let api = tokio::select! {
            api = Api::connect(&process, bodies::API_SOCKET, START_WAIT) => api,
            exited = process.exited() => {
                let end = exited.map_or_else(|why| why.to_string(), |exited| format!("{exited:?}"));
                Err(VmmError::Ended { vmm: Kind::Firecracker, what: "its start".to_owned(), end, said: String::new() })
            }
        };
        let api = match api {
            Ok(api) => api,
            Err(why) => return Err(explained(why, &process, &console, &errors).await),
        };
        let made_by = self.capabilities.identity.clone();
        Ok(FirecrackerVm { api, process, console, errors, metrics: None, saves: None, root: root.cloned(), size, made_by, newest: 0 })
    }
}

/// The version that Firecracker says it has, if it is one that can be used; else why not, and what to do.
fn usable_version(said: &str) -> Result<Version, String> {
    match Version::find(said, "Firecracker v") {
        None => Err(format!("it does not tell its version: {said:?}")),
        Some(version) if version < bodies::OLDEST => {
            Err(format!("it is version {version}; {} is the oldest that can be used: install a newer one", bodies::OLDEST))
        }
        Some(version) => Ok(version),
    }
}

/// Says more of an error. It tells why it ends on either stream.
async fn explained(why: VmmError, process: &Process, console: &Tail, errors: &Tail) -> VmmError {
    match super::explained(why, process, errors, SAID_LINES).await {
        VmmError::Ended { vmm, what, end, said } if said.is_empty() => VmmError::Ended { vmm, what, end, said: console.last(SAID_LINES) },
        why => why,
    }
}

impl Vmm for Firecracker {
    fn capabilities(&self) -> &Capabilities {
        &self.capabilities
    }

    fn boot(&self, boot: Boot) -> BoxFuture<'_, Result<Box<dyn Vm>, VmmError>> {
        self.boot_now(boot).boxed()
    }

    fn restore<'a>(&'a self, snapshot: &'a Snapshot, cgroups: &'a [String]) -> BoxFuture<'a, Result<Box<dyn Vm>, VmmError>> {
        self.restore_now(snapshot, cgroups).boxed()
    }
}

/// A machine.
#[derive(Debug)]
struct FirecrackerVm {
    api: Api,
    process: Process,
    console: Tail,
    errors: Tail,
    /// Of a machine that was restored.
    metrics: Option<Metrics>,
    /// Where a machine that was booted is saved: memory and state.
    saves: Option<(File, File)>,
    root: Option<Arc<File>>,
    size: Size,
    made_by: Identity,
    /// The newest number of a slot's content ([`Slot::content`]).
    newest: u32,
}

impl FirecrackerVm {
    async fn call(&mut self, (method, path, body): Call, time_max: Duration) -> Result<(), VmmError> {
        match self.api.call(method, &path, &body, time_max).await {
            Ok(()) => Ok(()),
            Err(why) => Err(explained(why, &self.process, &self.console, &self.errors).await),
        }
    }

    async fn end(&self) -> Result<Exited, VmmError> {
        self.process.kill();
        let what = "its end".to_owned();
        let exited = tokio::time::timeout(END_WAIT, self.process.exited()).await;
        Ok(exited.map_err(|_| VmmError::Silent { vmm: Kind::Firecracker, what, after: END_WAIT })??)
    }

    async fn save(mut self) -> Result<Snapshot, VmmError> {
        let Some((memory, state)) = self.saves.take() else {
            self.end().await?;
            return Err(VmmError::Slot("a machine that was restored is not saved again".to_owned()));
        };
        tokio::time::sleep(SETTLES).await;
        self.call(bodies::state(false), CALL_WAIT).await?;
        self.call(bodies::save(), SAVE_WAIT).await?;
        self.end().await?;
        // All of the guest's memory was written, also what is zeros.
        let memory = tokio::task::spawn_blocking(move || files::without_zeros(&memory).map(|()| memory)).await;
        let memory = memory.unwrap_or_else(|e| Err(io::Error::other(e))).map_err(io_error("freeing zeros of a machine's memory"))?;
        let (memory, state) = (Arc::new(Frozen::seal(memory)?), Arc::new(Frozen::seal(state)?));
        Ok(Snapshot { made_by: self.made_by, size: self.size, memory, state, root: self.root })
    }

    /// Makes a file that of its user.
    fn give(&self, file: BorrowedFd<'_>) -> io::Result<()> {
        let Some(user) = self.process.user() else { return Ok(()) };
        let (user, group) = (rustix::fs::Uid::from_raw(user), rustix::fs::Gid::from_raw(user));
        Ok(rustix::fs::fchown(file, Some(user), Some(group))?)
    }

    async fn count_failed(&mut self) -> Result<u64, VmmError> {
        let Some(lines) = self.metrics.as_ref().map(Metrics::lines) else { return Ok(0) };
        let (what, begin) = ("counting failed disk operations".to_owned(), Instant::now());
        self.call(bodies::tell_metrics(), CALL_WAIT).await?;
        let failed = match &self.metrics {
            Some(metrics) => metrics.failed_behind(lines).await,
            None => Some(0),
        };
        failed.ok_or(VmmError::Silent { vmm: Kind::Firecracker, what, after: begin.elapsed() })
    }

    async fn put(&mut self, slot: Slot, disk: Disk) -> Result<(), VmmError> {
        disk.check(slot)?;
        let Source::File(file) = disk.source else {
            return Err(VmmError::Slot(format!("Firecracker can't put a disk behind NBD into {}: it takes files", slot.name())));
        };
        self.give(file.as_fd()).map_err(io_error("giving a disk to a machine"))?;
        self.newest += 1;
        let content = slot.content(self.newest);
        self.process.attach(&content, file.as_fd()).await?;
        self.call(bodies::swap(slot, &content), CALL_WAIT).await
    }

    /// Asks Firecracker for the agent's port until it listens.
    async fn reach(&self) -> Result<Box<dyn Stream>, VmmError> {
        let deadline = Instant::now() + CONNECT_WAIT;
        loop {
            let ended = async {
                let end = self.process.exited().await.map_or_else(|why: SpawnError| why.to_string(), |exited| format!("{exited:?}"));
                VmmError::Ended { vmm: Kind::Firecracker, what: "a connection".to_owned(), end, said: String::new() }
            };
            let tried = tokio::select! {
                tried = tokio::time::timeout(TRY_WAIT, self.try_once()) => tried,
                why = ended => return Err(explained(why, &self.process, &self.console, &self.errors).await),
            };
            match tried {
                Ok(Ok(stream)) => return Ok(stream),
                Ok(Err(_)) | Err(_) if Instant::now() < deadline => tokio::time::sleep(CONNECT_AGAIN).await,
                Ok(Err(_)) | Err(_) => {
                    let what = "a connection to the machine's agent".to_owned();
                    return Err(VmmError::Silent { vmm: Kind::Firecracker, what, after: CONNECT_WAIT });
                }
            }
        }
    }

    /// One try, as `docs/vsock.md` of Firecracker describes it. Refused: the connection is closed.
    async fn try_once(&self) -> io::Result<Box<dyn Stream>> {
        let mut socket = self.process.connect(bodies::VSOCK).await?;
        socket.write_all(format!("CONNECT {PORT_NUMBER}\n").as_bytes()).await?;
        let mut answer = Vec::new();
        // Byte by byte: what comes behind the line is the agent's.
        while answer.last() != Some(&b'\n') {
            answer.push(socket.read_u8().await?);
            if answer.len() > ANSWER_BYTES_MAX {
                return Err(io::Error::from(io::ErrorKind::InvalidData));
            }
        }
        if answer.starts_with(b"OK ") { Ok(Box::new(socket)) } else { Err(io::Error::from(io::ErrorKind::InvalidData)) }
    }
}

impl Vm for FirecrackerVm {
    fn pid(&self) -> u32 {
        self.process.pid()
    }

    fn user(&self) -> Option<u32> {
        self.process.user()
    }

    fn pause(&mut self) -> BoxFuture<'_, Result<(), VmmError>> {
        self.call(bodies::state(false), CALL_WAIT).boxed()
    }

    fn resume(&mut self) -> BoxFuture<'_, Result<(), VmmError>> {
        self.call(bodies::state(true), CALL_WAIT).boxed()
    }

    fn swap(&mut self, slot: Slot, disk: Disk) -> BoxFuture<'_, Result<(), VmmError>> {
        self.put(slot, disk).boxed()
    }

    fn failed_disk_operations(&mut self) -> BoxFuture<'_, Result<u64, VmmError>> {
        self.count_failed().boxed()
    }

    fn connect(&self) -> BoxFuture<'_, Result<Box<dyn Stream>, VmmError>> {
        self.reach().boxed()
    }

    fn snapshot(self: Box<Self>) -> BoxFuture<'static, Result<Snapshot, VmmError>> {
        self.save().boxed()
    }

    fn console(&self) -> String {
        self.console.text()
    }

    fn ended(&self) -> BoxFuture<'_, Result<Exited, VmmError>> {
        async {
            let exited = self.process.exited().await?;
            // What it wrote last is in the pipe still, or was read by now.
            self.console.ended(END_WAIT).await;
            Ok(exited)
        }
        .boxed()
    }

    fn kill(self: Box<Self>) -> BoxFuture<'static, Result<Exited, VmmError>> {
        async move { self.end().await }.boxed()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_that_is_too_old_or_no_firecracker_is_told_in_a_line() {
        assert_eq!(
            usable_version("Firecracker v1.12.1\n\n2025-07-31T10:00:00 [anonymous-instance:main] exit_code=0\n"),
            Ok(Version(1, 12, 1))
        );
        assert_eq!(
            usable_version("Firecracker v1.11.0\n"),
            Err("it is version 1.11.0; 1.12.0 is the oldest that can be used: install a newer one".to_owned())
        );
        assert_eq!(usable_version("busybox\n"), Err(r#"it does not tell its version: "busybox\n""#.to_owned()));
    }
}
