//! QEMU: machines on KVM where it is worth something, emulated in software elsewhere.
//!
//! Owns the order of what is done with QEMU: how it is started, saved, loaded and given disks. All of its connections are made before it
//! starts and are handed to it; it opens no path but /proc/self/fd and what was attached for it.

mod arguments;
mod qmp;

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use futures::FutureExt;
use futures::future::BoxFuture;
use serde_json::{Value, json};
use volley_jobspecs::machine;

use super::console::Tail;
use super::files::{self, Frozen};
use super::kvm::Kvm;
use super::spawner::proto::{Exited, Step};
use super::spawner::{Launch, MachineSpawner, Process, Program, SpawnError};
use super::{
    Accelerator, Boot, Capabilities, Disk, FORMAT, Identity, Kind, PORT_NAME, SETTLES, SLOTS, Size, Slot, Snapshot, Source, Version, Vm,
    Vmm, VmmError, io_error,
};
use crate::guest::Stream;
use arguments::{Arguments, Begin, Memory};
use qmp::Qmp;

/// The program, where a distribution puts it.
pub const PROGRAM: &str = "/usr/bin/qemu-system-x86_64";
/// The first version with all that is used here (`blockdev-reopen`).
const OLDEST: Version = Version(6, 1, 0);
/// How long its start may take: 0.1 s were measured, and many start at once on a busy host.
const START_WAIT: Duration = Duration::from_secs(30);
/// How long saving may take: devices' state only, half a megabyte; memory lies in its file already.
const SAVE_WAIT: Duration = Duration::from_secs(60);
/// How long loading may take, of the same half megabyte.
const LOAD_WAIT: Duration = Duration::from_secs(60);
/// How long a process that was killed may take to be gone.
const END_WAIT: Duration = Duration::from_secs(15);
/// Lines of its errors that are told.
const SAID_LINES: usize = 3;
/// The kernel's command line, before a boot's own words. The clock of an emulated processor is not compared with others: it is right.
const WORDS: &str = "console=ttyS0 loglevel=4 panic=-1 tsc=reliable";
/// The state's name among the descriptors that QEMU was given.
const STATE: &str = "state";

/// The host's memory that an emulated machine takes beside what every machine does, in bytes: what was translated.
const TRANSLATED_BYTES: u64 = (arguments::TRANSLATED_MIB as u64) << 20;

/// The driver.
#[derive(Debug)]
pub struct Qemu {
    spawner: MachineSpawner,
    program: PathBuf,
    capabilities: Capabilities,
}

impl Qemu {
    /// Finds out what QEMU can do here. `program`: [`PROGRAM`] when not given. `kvm`: what a look at it said (`kvm::probe`).
    ///
    /// # Errors
    /// [`VmmError::Unusable`].
    pub async fn open(spawner: MachineSpawner, program: Option<&Path>, kvm: Kvm) -> Result<Self, VmmError> {
        let program = program.unwrap_or(Path::new(PROGRAM)).to_owned();
        let unusable = |why: String| VmmError::Unusable { vmm: Kind::Qemu, why };
        if !program.is_file() {
            return Err(unusable(format!("{} is not there; install qemu-system-x86, or name another with --qemu", program.display())));
        }
        let said = super::version_of(&spawner, Program::Path(&program), "qemu").await;
        let said = said.map_err(|why| match why {
            // It is there, so what is missing is missing in the view that machines have of the host.
            VmmError::Spawn(SpawnError::NotStarted { step: Step::Exec, errno: libc::ENOENT, .. }) => {
                unusable(format!("{} can't be run there where machines run, which see /usr only; install it below /usr", program.display()))
            }
            why => why,
        })?;
        let version = usable_version(&said).map_err(unusable)?;
        let accelerator = if kvm == Kvm::Usable { Accelerator::Kvm } else { Accelerator::Tcg };
        let cpu = arguments::cpu(accelerator);
        let identity = Identity { vmm: Kind::Qemu, version, accelerator, machine: arguments::MACHINE, cpu, format: FORMAT };
        let emulated = accelerator != Accelerator::Kvm;
        let capabilities = Capabilities {
            identity,
            emulated,
            why_emulated: emulated.then(|| kvm.as_str()),
            connects_paused: true,
            sets_clock: false,
            serials: true,
            standing_bytes: machine::VMM_BYTES,
            beside_bytes: if accelerator == Accelerator::Tcg { TRANSLATED_BYTES } else { 0 },
            missing: spawner.missing(),
        };
        Ok(Self { spawner, program, capabilities })
    }

    async fn boot_now(&self, boot: Boot) -> Result<Box<dyn Vm>, VmmError> {
        let accelerator = self.capabilities.identity.accelerator;
        let memory = files::in_memory("volley-memory")?;
        memory.set_len(boot.size.memory_bytes).map_err(io_error("making a machine's memory"))?;
        let readable = |path: &Path| {
            let at = io_error(path.display().to_string());
            File::open(path).and_then(|mut file| files::copy_in_memory("volley-boot", &mut file)).map_err(at)
        };
        let kernel = readable(&boot.kernel)?;
        let initrd = boot.initrd.as_deref().map(readable).transpose()?;
        let root = if boot.root.is_some() { " volley.root=vda" } else { "" };
        let words = format!("{WORDS} volley.port={PORT_NAME}{root} {}", boot.words);
        let begin = Begin::Kernel { line: words.trim_end(), initrd: initrd.is_some() };
        let arguments = Arguments { accelerator, size: boot.size, memory: Memory::Shared, root: boot.root.is_some(), begin };
        let begun = Begun { memory: memory.as_fd(), root: boot.root.clone(), more: std::iter::once(&kernel).chain(&initrd).collect() };
        let mut vm = self.start(&arguments, &begun, &boot.cgroups).await?;
        vm.memory = Some(memory);
        Ok(Box::new(vm))
    }

    async fn restore_now(&self, snapshot: &Snapshot, cgroups: &[String]) -> Result<Box<dyn Vm>, VmmError> {
        let this = &self.capabilities.identity;
        if snapshot.made_by != *this {
            return Err(VmmError::Other { made_by: snapshot.made_by.clone(), this: this.clone() });
        }
        let memory = match snapshot.memory.is_sealed() {
            true => Memory::Sealed,
            false if this.version >= arguments::READ_ONLY_MEMORY => Memory::ReadOnly,
            false => {
                let why = format!("version {} can only map memory from a sealed file in memory", this.version);
                return Err(VmmError::Unusable { vmm: Kind::Qemu, why });
            }
        };
        let root = snapshot.root.is_some();
        let arguments = Arguments { accelerator: this.accelerator, size: snapshot.size, memory, root, begin: Begin::State };
        let opened = snapshot.memory.open()?;
        let begun = Begun { memory: opened.as_fd(), root: snapshot.root.clone(), more: Vec::new() };
        let mut vm = self.start(&arguments, &begun, cgroups).await?;
        match vm.load(&snapshot.state).await {
            Ok(()) => Ok(Box::new(vm)),
            Err(why) => Err(vm.explained(why).await),
        }
    }

    /// Starts QEMU with everything it has connected, and takes its control connection.
    async fn start(&self, arguments: &Arguments<'_>, begun: &Begun<'_>, cgroups: &[String]) -> Result<QemuVm, VmmError> {
        let pair = || UnixStream::pair().map_err(io_error("making a connection to QEMU"));
        let ((control, its_control), (agent, its_agent)) = (pair()?, pair()?);
        for ours in [&control, &agent] {
            ours.set_nonblocking(true).map_err(io_error("making a connection to QEMU"))?;
        }
        let follow = || Tail::follow().map_err(io_error("making a console"));
        let ((console, its_console), (errors, its_errors)) = (follow()?, follow()?);
        let null = File::open("/dev/null").map_err(io_error("/dev/null"))?;
        let root = match &begun.root {
            Some(root) => files::open_again(root).map_err(io_error("opening a root disk"))?,
            None => null.try_clone().map_err(io_error("/dev/null"))?,
        };
        let mut inherits = vec![null.as_fd(), its_console.as_fd(), its_errors.as_fd(), its_control.as_fd(), its_agent.as_fd()];
        inherits.extend([begun.memory, root.as_fd()]);
        inherits.extend(begun.more.iter().map(|file| file.as_fd()));
        let words = arguments::arguments(arguments);
        let argv = std::iter::once("qemu".to_owned()).chain(words).map(Into::into).collect();
        let launch = Launch { program: Program::Path(&self.program), argv, cgroups, inherits };
        let process = self.spawner.launch(&launch).await?;
        drop(launch);
        // Only QEMU writes to them from now on: when it ends, they do.
        drop((its_console, its_errors, its_control, its_agent));
        let control = tokio::net::UnixStream::from_std(control).map_err(io_error("making a connection to QEMU"))?;
        let mut end = End { process, console, errors };
        let qmp = match Qmp::greet(control, START_WAIT).await {
            Ok(qmp) => qmp,
            Err(why) => return Err(end.explained(why).await),
        };
        let mut vm = QemuVm {
            qmp,
            agent,
            end,
            memory: None,
            root: begun.root.clone(),
            size: arguments.size,
            made_by: self.capabilities.identity.clone(),
            contents: [0; SLOTS],
            newest: 0,
            sets: arguments::ROOT_SET,
        };
        // Memory stays in its file, and the end of a migration is told.
        let capability = |name: &str| json!({"capability": name, "state": true});
        let capabilities = json!({"capabilities": [capability("x-ignore-shared"), capability("events")]});
        match vm.qmp.command("migrate-set-capabilities", capabilities).await {
            Ok(_) => Ok(vm),
            Err(why) => Err(vm.explained(why).await),
        }
    }
}

/// The version that QEMU says it has, if it is one that can be used; else why not.
fn usable_version(said: &str) -> Result<Version, String> {
    match Version::find(said, "version ") {
        None => Err(format!("it does not tell its version: {said:?}")),
        Some(version) if version < OLDEST => Err(format!("it is version {version}; {OLDEST} is the oldest that can be used")),
        Some(version) => Ok(version),
    }
}

/// What a machine is begun with.
struct Begun<'a> {
    memory: BorrowedFd<'a>,
    root: Option<Arc<File>>,
    /// Kernel and RAM disk.
    more: Vec<&'a File>,
}

impl Vmm for Qemu {
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

/// The process, and what it says.
#[derive(Debug)]
struct End {
    process: Process,
    console: Tail,
    errors: Tail,
}

impl End {
    /// Kills it and waits.
    async fn kill(&self) -> Result<Exited, VmmError> {
        self.process.kill();
        let what = "its end".to_owned();
        let exited = tokio::time::timeout(END_WAIT, self.process.exited()).await;
        Ok(exited.map_err(|_| VmmError::Silent { vmm: Kind::Qemu, what, after: END_WAIT })??)
    }

    /// Says more of an error: a connection breaks because the process ended, and that has a reason.
    async fn explained(&mut self, why: VmmError) -> VmmError {
        super::explained(why, &self.process, &self.errors, SAID_LINES).await
    }
}

/// A machine.
#[derive(Debug)]
struct QemuVm {
    qmp: Qmp,
    agent: UnixStream,
    end: End,
    /// Of a machine that was booted.
    memory: Option<File>,
    root: Option<Arc<File>>,
    size: Size,
    made_by: Identity,
    /// What lies in each slot ([`Slot::content`]).
    contents: [u32; SLOTS],
    /// The newest number of a content; one that could not be put in keeps its own.
    newest: u32,
    /// The newest set of descriptors.
    sets: u32,
}

impl QemuVm {
    async fn explained(&mut self, why: VmmError) -> VmmError {
        self.end.explained(why).await
    }

    async fn command(&mut self, name: &str, arguments: Value) -> Result<Value, VmmError> {
        match self.qmp.command(name, arguments).await {
            Ok(value) => Ok(value),
            Err(why) => Err(self.explained(why).await),
        }
    }

    async fn load(&mut self, state: &Frozen) -> Result<(), VmmError> {
        let state = state.open()?;
        self.qmp.command_with("getfd", json!({"fdname": STATE}), Some(state.as_fd())).await?;
        self.qmp.command("migrate-incoming", json!({"uri": format!("fd:{STATE}")})).await?;
        match self.qmp.migrated("loading a snapshot", LOAD_WAIT).await {
            // Why, it says on its error stream, and ends.
            Err(VmmError::Refused { vmm, what, why: end }) => Err(VmmError::Ended { vmm, what, end, said: String::new() }),
            result => result,
        }
    }

    /// The order counts. The processors stop; the state is written; QEMU is killed before anything else can happen: a QEMU that lives on
    /// after that still moves bytes of the agent's channel into memory when somebody reads it, and the two no longer fit each other.
    async fn save(mut self) -> Result<Snapshot, VmmError> {
        let Some(memory) = self.memory.take() else {
            self.end.kill().await?;
            return Err(VmmError::Slot("a machine that was restored can't be saved: its memory is private".to_owned()));
        };
        tokio::time::sleep(SETTLES).await;
        self.command("stop", json!({})).await?;
        let state = files::in_memory("volley-state")?;
        let saved = async {
            self.qmp.command_with("getfd", json!({"fdname": STATE}), Some(state.as_fd())).await?;
            self.qmp.command("migrate", json!({"uri": format!("fd:{STATE}")})).await?;
            self.qmp.migrated("saving a snapshot", SAVE_WAIT).await
        };
        if let Err(why) = saved.await {
            return Err(self.explained(why).await);
        }
        self.end.kill().await?;
        let (memory, state) = (Arc::new(Frozen::seal(memory)?), Arc::new(Frozen::seal(state)?));
        Ok(Snapshot { made_by: self.made_by, size: self.size, memory, state, root: self.root })
    }

    async fn put(&mut self, slot: Slot, disk: Disk) -> Result<(), VmmError> {
        disk.check(slot)?;
        let old = self.contents.get(slot.index()).copied().unwrap_or_default();
        self.newest += 1;
        let (number, node) = (self.newest, slot.content(self.newest));
        let mut options = self.behind(slot, &node, disk.source).await?;
        if let Some(options) = options.as_object_mut() {
            options.insert("node-name".to_owned(), json!(node));
            options.insert("discard".to_owned(), json!("unmap"));
        }
        self.command("blockdev-add", options).await?;
        let raw = json!({"driver": "raw", "node-name": arguments::node(slot), "file": node, "discard": "unmap"});
        self.command("blockdev-reopen", json!({"options": [raw]})).await?;
        // Without it the guest keeps the size of what was there before.
        self.command("block_resize", json!({"node-name": arguments::node(slot), "size": disk.bytes})).await?;
        self.command("blockdev-del", json!({"node-name": slot.content(old)})).await?;
        if let Some(content) = self.contents.get_mut(slot.index()) {
            *content = number;
        }
        Ok(())
    }

    /// The node for what is behind a disk.
    async fn behind(&mut self, slot: Slot, name: &str, source: Source) -> Result<Value, VmmError> {
        match source {
            Source::File(file) => {
                self.sets += 1;
                let set = self.sets;
                match self.qmp.command_with("add-fd", json!({"fdset-id": set}), Some(file.as_fd())).await {
                    Ok(_) => {}
                    Err(why) => return Err(self.explained(why).await),
                }
                // A scratch disk is thrown away: nobody waits for it to be on the host's disk.
                let no_flush = slot == Slot::SCRATCH;
                let cache = json!({"direct": false, "no-flush": no_flush});
                Ok(json!({"driver": "file", "filename": format!("/dev/fdset/{set}"), "locking": "off", "cache": cache}))
            }
            Source::Nbd { dir, socket, export } => {
                // The directory, not the socket: a server that comes back makes a new one.
                self.end.process.attach(name, dir.as_fd()).await?;
                Ok(nbd(name, &socket, &export))
            }
        }
    }

    async fn go_on(&mut self) -> Result<(), VmmError> {
        self.command("cont", json!({})).await.map(drop)
    }

    fn stream(&self) -> io::Result<Box<dyn Stream>> {
        Ok(Box::new(tokio::net::UnixStream::from_std(self.agent.try_clone()?)?))
    }
}

/// How long QEMU tries to reach an NBD server again, in seconds; the guest's writes wait meanwhile.
const NBD_PATIENCE_S: u32 = 30;

/// Of all devices. What a guest asks for that no disk could do is counted elsewhere.
fn failed_operations(stats: &Value) -> u64 {
    let kinds = ["failed_rd_operations", "failed_wr_operations", "failed_flush_operations"];
    let of = |device: &Value| kinds.iter().filter_map(|kind| device.get("stats")?.get(kind)?.as_u64()).fold(0, u64::saturating_add);
    stats.as_array().into_iter().flatten().map(of).fold(0, u64::saturating_add)
}

fn nbd(dir: &str, socket: &str, export: &str) -> Value {
    let path = format!("{dir}/{socket}");
    json!({"driver": "nbd", "server": {"type": "unix", "path": path}, "export": export, "reconnect-delay": NBD_PATIENCE_S})
}

impl Vm for QemuVm {
    fn pid(&self) -> u32 {
        self.end.process.pid()
    }

    fn user(&self) -> Option<u32> {
        self.end.process.user()
    }

    fn pause(&mut self) -> BoxFuture<'_, Result<(), VmmError>> {
        async { self.command("stop", json!({})).await.map(drop) }.boxed()
    }

    fn resume(&mut self) -> BoxFuture<'_, Result<(), VmmError>> {
        self.go_on().boxed()
    }

    fn swap(&mut self, slot: Slot, disk: Disk) -> BoxFuture<'_, Result<(), VmmError>> {
        self.put(slot, disk).boxed()
    }

    fn failed_disk_operations(&mut self) -> BoxFuture<'_, Result<u64, VmmError>> {
        async { Ok(failed_operations(&self.command("query-blockstats", json!({})).await?)) }.boxed()
    }

    fn connect(&self) -> BoxFuture<'_, Result<Box<dyn Stream>, VmmError>> {
        async { self.stream().map_err(io_error("taking the connection to a machine's agent")) }.boxed()
    }

    fn snapshot(self: Box<Self>) -> BoxFuture<'static, Result<Snapshot, VmmError>> {
        self.save().boxed()
    }

    fn console(&self) -> String {
        self.end.console.text()
    }

    fn ended(&self) -> BoxFuture<'_, Result<Exited, VmmError>> {
        async {
            let exited = self.end.process.exited().await?;
            // What it wrote last is in the pipe still, or was read by now.
            self.end.console.ended(END_WAIT).await;
            Ok(exited)
        }
        .boxed()
    }

    fn kill(self: Box<Self>) -> BoxFuture<'static, Result<Exited, VmmError>> {
        async move { self.end.kill().await }.boxed()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_that_is_too_old_or_no_qemu_is_told_in_a_line() {
        assert_eq!(usable_version("QEMU emulator version 7.2.22 (Debian 1:7.2)\nCopyright"), Ok(Version(7, 2, 22)));
        assert_eq!(
            usable_version("QEMU emulator version 5.2.0 (Debian 1:5.2)"),
            Err("it is version 5.2.0; 6.1.0 is the oldest that can be used".to_owned())
        );
        assert_eq!(usable_version("busybox\n"), Err(r#"it does not tell its version: "busybox\n""#.to_owned()));
    }

    #[test]
    fn failed_operations_are_those_of_all_disks() {
        let device =
            |wr: u64| json!({"device": "", "stats": {"failed_rd_operations": 1, "failed_wr_operations": wr, "invalid_wr_operations": 7}});
        assert_eq!(failed_operations(&json!([device(0), device(3), {"stats": {"failed_flush_operations": u64::MAX}}])), u64::MAX);
        assert_eq!((failed_operations(&json!([device(2)])), failed_operations(&json!({})), failed_operations(&json!([]))), (3, 0, 0));
    }

    #[test]
    fn an_nbd_server_is_reached_in_the_machines_own_directory() {
        let node = nbd("vol0-1", "nbd.sock", "one");
        assert_eq!(node.pointer("/server/path"), Some(&json!("vol0-1/nbd.sock")));
        assert_eq!(node.pointer("/reconnect-delay"), Some(&json!(30)));
    }
}
