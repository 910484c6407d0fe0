//! Virtual machines: what a driver of a VMM does, the same for all of them.
//!
//! Owns the traits, what machines are made of (size, disks in slots, snapshots) and the one error of all of it. The drivers are
//! `vmm/qemu` and `vmm/firecracker`; both start their processes through `vmm/spawner`. Does not own what happens inside a machine
//! (`guest`), nor which machine a task gets. Which driver a host has is chosen in `vmm/choice`.
//!
//! The life of a machine: [`Vmm::boot`] → it runs → its agent prepares the snapshot → [`Vm::snapshot`], which ends it. Then any number
//! of times: [`Vmm::restore`] → it stands still → [`Vm::swap`] puts disks into slots → [`Vm::resume`] → [`Vm::connect`] → [`Vm::kill`].

pub mod choice;
pub mod console;
pub mod files;
pub mod firecracker;
pub mod greet;
pub mod kvm;
pub mod processor;
pub mod qemu;
pub mod spawner;

use std::fmt;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use futures::future::BoxFuture;
use volley_jobspecs::wire::guest as wire;

use crate::guest::Stream;
use console::Tail;
use files::{Frozen, FrozenError};
use spawner::proto::Exited;
use spawner::{Launch, MachineSpawner, Process, Program, SpawnError};

/// Volumes a machine has slots for. A spec with more is invalid.
pub const VOLUMES: u8 = 4;
/// Slots of a machine: its volumes, and its scratch disk.
pub const SLOTS: usize = VOLUMES as usize + 1;
/// Changes when the device list or the way of saving does: a snapshot of another format is made anew, not tried.
pub const FORMAT: u32 = 1;
/// The virtio port (QEMU) and the vsock port (Firecracker) that the agent serves.
pub const PORT_NAME: &str = "volley";
/// What sizes of disks are counted in.
const SECTOR_BYTES: u64 = 512;
/// How long a guest is left alone before it is saved, once its agent has answered. What it still does then, such as ending what answered and
/// clearing up behind it, every machine that is restored would do again before it answers: a quarter of that time where it is emulated. After
/// 50 ms most of it was done, after 200 ms all.
const SETTLES: Duration = Duration::from_millis(200);
/// See [`PORT_NAME`].
pub const PORT_NUMBER: u32 = 5000;

/// Why something could not be done with a machine. The machine is of no further use, but for [`VmmError::Refused`] and
/// [`VmmError::Slot`].
#[derive(Debug, thiserror::Error)]
pub enum VmmError {
    /// The VMM is not there or can't be used here.
    #[error("{vmm} can't be used: {why}")]
    Unusable {
        /// Which.
        vmm: Kind,
        /// Why, and what to do.
        why: String,
    },
    /// Its process could not be started.
    #[error(transparent)]
    Spawn(#[from] SpawnError),
    /// A file of the machine.
    #[error("{what}: {source}")]
    Io {
        /// Which, and what was tried.
        what: String,
        /// What the system says.
        source: io::Error,
    },
    /// What was saved can't be kept.
    #[error(transparent)]
    Frozen(#[from] FrozenError),
    /// The VMM says no.
    #[error("{vmm} refused {what}: {why}")]
    Refused {
        /// Which.
        vmm: Kind,
        /// What.
        what: String,
        /// In its words, with no control characters.
        why: String,
    },
    /// It did not answer in time.
    #[error("{vmm} did not finish {what} within {} s", .after.as_secs_f32())]
    Silent {
        /// Which.
        vmm: Kind,
        /// What.
        what: String,
        /// For how long.
        after: Duration,
    },
    /// It answered something that is no answer.
    #[error("{vmm} answered to {what} with something else: {why}")]
    Nonsense {
        /// Which.
        vmm: Kind,
        /// To what.
        what: String,
        /// What is wrong.
        why: String,
    },
    /// It has ended.
    #[error("{vmm} ended at {what} ({end}); it said last: {said}")]
    Ended {
        /// Which.
        vmm: Kind,
        /// At what.
        what: String,
        /// How.
        end: String,
        /// The end of what it wrote on its error stream.
        said: String,
    },
    /// The snapshot is of another VMM, version, accelerator or format.
    #[error("the snapshot was made by {made_by}, this is {this}; it must be made anew")]
    Other {
        /// By what.
        made_by: Identity,
        /// What this is.
        this: Identity,
    },
    /// What can't be put into a slot, or can't be done with this machine.
    #[error("{0}")]
    Slot(String),
}

impl VmmError {
    /// May it be a guest's doing? It can end its VMM at any moment, by switching itself off, and keep it from answering.
    #[must_use]
    pub fn is_of_guest(&self) -> bool {
        matches!(self, Self::Ended { .. } | Self::Silent { .. })
    }
}

/// A kind of VMM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Kind {
    /// QEMU.
    Qemu,
    /// Firecracker.
    Firecracker,
}

impl fmt::Display for Kind {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        out.write_str(match self {
            Self::Qemu => "QEMU",
            Self::Firecracker => "Firecracker",
        })
    }
}

/// A version, as the program says it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(pub u16, pub u16, pub u16);

impl Version {
    /// The first three numbers with points between them behind `before`.
    #[must_use]
    pub fn find(text: &str, before: &str) -> Option<Self> {
        let rest = text.split_once(before)?.1;
        let numbers: String = rest.chars().take_while(|c| c.is_ascii_digit() || *c == '.').collect();
        let mut numbers = numbers.split('.').map(|number| number.parse().ok());
        Some(Self(numbers.next()??, numbers.next()??, numbers.next().flatten().unwrap_or(0)))
    }
}

impl fmt::Display for Version {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(out, "{}.{}.{}", self.0, self.1, self.2)
    }
}

/// What executes the guest's instructions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Accelerator {
    /// The processor, through KVM.
    Kvm,
    /// The kernel's KVM, which emulates them one by one.
    EmulatingKvm,
    /// QEMU's translator (TCG).
    Tcg,
}

impl Accelerator {
    /// Its name in results and templates.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Kvm => "kvm",
            Self::EmulatingKvm => "kvm-emulated",
            Self::Tcg => "tcg",
        }
    }
}

/// Everything of a driver that a snapshot depends on.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Identity {
    /// The VMM.
    pub vmm: Kind,
    /// Its version.
    pub version: Version,
    /// What executes.
    pub accelerator: Accelerator,
    /// The machine type.
    pub machine: &'static str,
    /// The processor model, as the VMM names it.
    pub cpu: &'static str,
    /// [`FORMAT`].
    pub format: u32,
}

impl fmt::Display for Identity {
    fn fmt(&self, out: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { vmm, version, accelerator, machine, cpu, format } = self;
        write!(out, "{vmm} {version} ({machine}, {}, processor {cpu}, format {format})", accelerator.as_str())
    }
}

/// What a driver can do here.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Capabilities {
    /// What snapshots depend on.
    pub identity: Identity,
    /// Is software executing the guest? Every result says so.
    pub emulated: bool,
    /// Why KVM is not used, in words.
    pub why_emulated: Option<&'static str>,
    /// Can the connection to the agent be made while a machine stands still?
    pub connects_paused: bool,
    /// Does the VMM set the guest's clock itself at a restore? The agent is told the time in any case.
    pub sets_clock: bool,
    /// Are disks found by their serial numbers ([`Slot::disk`])?
    pub serials: bool,
    /// The host's memory that a machine's VMM takes while it stands still and nothing was written in it, in bytes.
    pub standing_bytes: u64,
    /// The host's memory that a machine takes beside what every machine does (`machine::host_memory_bytes`), in bytes.
    pub beside_bytes: u64,
    /// What could not be shut off for machines, in words.
    pub missing: Vec<String>,
}

/// A machine's processors and memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Size {
    /// Virtual processors.
    pub vcpus: u8,
    /// Memory, in bytes; whole MiB.
    pub memory_bytes: u64,
}

/// A machine to boot.
#[derive(Debug)]
pub struct Boot {
    /// Its size.
    pub size: Size,
    /// Its kernel: a bzImage for QEMU, an ELF file for Firecracker.
    pub kernel: PathBuf,
    /// Its initial RAM disk.
    pub initrd: Option<PathBuf>,
    /// Words for the kernel's command line, behind the driver's own.
    pub words: String,
    /// Its read-only root disk, which becomes `vda`; open for reading. Its file must not be writable by others.
    pub root: Option<Arc<File>>,
    /// `cgroup.procs` files that the VMM enters.
    pub cgroups: Vec<String>,
}

/// A machine's saved state. Any number of machines are restored from it, at the same time too, and none can change it.
#[derive(Debug, Clone)]
pub struct Snapshot {
    /// What made it.
    pub made_by: Identity,
    /// Its size.
    pub size: Size,
    /// Its memory.
    pub memory: Arc<Frozen>,
    /// The state of its devices.
    pub state: Arc<Frozen>,
    /// The root disk it was booted with.
    pub root: Option<Arc<File>>,
}

/// A place for a disk. All machines have all of them; what is not used reads as zeros.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Slot(u8);

impl Slot {
    /// The scratch disk's.
    pub const SCRATCH: Self = Self(VOLUMES);
    const NAMES: [(&'static str, &'static str); SLOTS] =
        [("vol0", "vdb"), ("vol1", "vdc"), ("vol2", "vdd"), ("vol3", "vde"), ("scratch", "vdf")];

    /// A volume's, from 0; none behind the last.
    #[must_use]
    pub fn volume(number: u8) -> Option<Self> {
        (number < VOLUMES).then_some(Self(number))
    }

    /// All of them, in the order of their devices.
    #[must_use]
    pub fn all() -> [Self; SLOTS] {
        std::array::from_fn(|number| Self(u8::try_from(number).unwrap_or(VOLUMES)))
    }

    fn index(self) -> usize {
        self.0.into()
    }

    /// A name for what lies in it, the so-manieth thing; 0 is the empty one.
    fn content(self, number: u32) -> String {
        format!("{}-{number}", self.name())
    }

    /// Its name, and its disk's serial number.
    #[must_use]
    pub fn name(self) -> &'static str {
        Self::NAMES.get(self.index()).map_or("", |(name, _)| name)
    }

    /// How the agent finds its disk. Without serial numbers the guest's own name counts, which is right where the machine was booted
    /// with a root disk.
    #[must_use]
    pub fn disk(self, capabilities: &Capabilities) -> wire::Disk {
        let device = Self::NAMES.get(self.index()).map_or("", |(_, device)| device);
        if capabilities.serials { wire::Disk::Serial(self.name().to_owned()) } else { wire::Disk::Named(device.to_owned()) }
    }
}

/// A disk for a slot.
#[derive(Debug)]
pub struct Disk {
    /// What is behind it.
    pub source: Source,
    /// Its exact size in bytes, a multiple of 512; the agent waits for it.
    pub bytes: u64,
}

impl Disk {
    fn check(&self, slot: Slot) -> Result<(), VmmError> {
        if self.bytes == 0 || !self.bytes.is_multiple_of(SECTOR_BYTES) {
            let (bytes, slot) = (self.bytes, slot.name());
            return Err(VmmError::Slot(format!("a disk of {bytes} bytes can't be put into {slot}: sizes are multiples of {SECTOR_BYTES}")));
        }
        if let Source::File(file) = &self.source {
            let stat = rustix::fs::fstat(file).map_err(|e| io_error("looking at a disk's file")(e.into()))?;
            let regular = crate::beneath::kind(&stat) == rustix::fs::FileType::RegularFile;
            // QEMU would make it fit, and Firecracker take it as it is.
            if regular && u64::try_from(stat.st_size) != Ok(self.bytes) {
                let (bytes, slot, found) = (self.bytes, slot.name(), stat.st_size);
                return Err(VmmError::Slot(format!("a disk of {bytes} bytes for {slot} has a file of {found} bytes")));
            }
        }
        Ok(())
    }
}

/// What is behind a disk.
#[derive(Debug)]
pub enum Source {
    /// A file on a mounted file system, open for reading and writing, with a name; it becomes the VMM's user's. What is written to it is
    /// lost with the host.
    File(OwnedFd),
    /// An NBD export behind a socket of a directory, which stays what it is when the server comes back. QEMU only.
    Nbd {
        /// The directory, open.
        dir: OwnedFd,
        /// The socket's name in it; machines' users must be allowed to connect.
        socket: String,
        /// The export's name.
        export: String,
    },
}

/// A driver.
pub trait Vmm: fmt::Debug + Send + Sync {
    /// What it can do here.
    fn capabilities(&self) -> &Capabilities;
    /// Boots a machine, which runs at once.
    fn boot(&self, boot: Boot) -> BoxFuture<'_, Result<Box<dyn Vm>, VmmError>>;
    /// Restores a machine, which stands still. `cgroups`: `cgroup.procs` files that the VMM enters.
    fn restore<'a>(&'a self, snapshot: &'a Snapshot, cgroups: &'a [String]) -> BoxFuture<'a, Result<Box<dyn Vm>, VmmError>>;
}

/// A machine. Dropped, it is killed.
pub trait Vm: fmt::Debug + Send + Sync {
    /// The VMM's process, as the host sees it.
    fn pid(&self) -> u32;
    /// The VMM's user; none where it runs as the worker.
    fn user(&self) -> Option<u32>;
    /// Stops its processors.
    fn pause(&mut self) -> BoxFuture<'_, Result<(), VmmError>>;
    /// Lets them go on.
    fn resume(&mut self) -> BoxFuture<'_, Result<(), VmmError>>;
    /// Puts a disk into a slot of a machine that stands still and has never seen the slot's former one.
    fn swap(&mut self, slot: Slot, disk: Disk) -> BoxFuture<'_, Result<(), VmmError>>;
    /// How many reads, writes and flushes failed on the host until now; the guest was told of an error each time. QEMU counts those of all disks,
    /// Firecracker those of the scratch disk, with what a guest asks for that no disk does; of a machine that was booted it counts none.
    fn failed_disk_operations(&mut self) -> BoxFuture<'_, Result<u64, VmmError>>;
    /// The connection to its agent, once it runs; a new session is begun on it. There is one connection: what is returned earlier must
    /// not be used any more.
    fn connect(&self) -> BoxFuture<'_, Result<Box<dyn Stream>, VmmError>>;
    /// Saves it and ends it. The agent has prepared itself, and what connection it had is neither read nor written from then on.
    fn snapshot(self: Box<Self>) -> BoxFuture<'static, Result<Snapshot, VmmError>>;
    /// The end of what it wrote on its console, without control characters.
    fn console(&self) -> String;
    /// Waits for the VMM's end, and until nothing is left of it; [`Vm::console`] has all of its last words then.
    fn ended(&self) -> BoxFuture<'_, Result<Exited, VmmError>>;
    /// Kills it, whatever it does, and waits until nothing is left of it.
    fn kill(self: Box<Self>) -> BoxFuture<'static, Result<Exited, VmmError>>;
}

/// An error of a file.
fn io_error(what: impl Into<String>) -> impl FnOnce(io::Error) -> VmmError {
    let what = what.into();
    move |source| VmmError::Io { what, source }
}

/// How long a program may take to say its version, and a process that broke its connection to be gone.
const SHORT_WAIT: Duration = Duration::from_secs(10);

/// What a program says to `--version`, run as a machine's process is.
async fn version_of(spawner: &MachineSpawner, program: Program<'_>, name: &str) -> Result<String, VmmError> {
    let null = File::open("/dev/null").map_err(io_error("/dev/null"))?;
    let (said, write) = Tail::follow().map_err(io_error("making a pipe"))?;
    let inherits = vec![null.as_fd(), write.as_fd(), write.as_fd()];
    let launch = Launch { program, argv: vec![name.into(), "--version".into()], cgroups: &[], inherits };
    let process = spawner.launch(&launch).await?;
    drop(launch);
    drop(write);
    // A program that hangs is killed with the process.
    let _ = tokio::time::timeout(SHORT_WAIT, process.exited()).await;
    Ok(said.ended(SHORT_WAIT).await)
}

/// Says more of an error: a connection breaks because the process ended, and that has a reason.
async fn explained(why: VmmError, process: &Process, errors: &Tail, lines: usize) -> VmmError {
    let VmmError::Ended { vmm, what, end, .. } = why else { return why };
    process.kill();
    let exited = tokio::time::timeout(SHORT_WAIT, process.exited()).await;
    errors.ended(SHORT_WAIT).await;
    let end = match exited {
        Ok(Ok(Exited { code: Some(code), .. })) => format!("exit code {code}"),
        Ok(Ok(Exited { signal: Some(signal), .. })) => format!("signal {signal}"),
        Ok(Err(why)) => why.to_string(),
        Ok(Ok(_)) | Err(_) => end,
    };
    VmmError::Ended { vmm, what, end, said: errors.last(lines) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_found() {
        assert_eq!(Version::find("QEMU emulator version 7.2.22 (Debian 1:7.2)", "version "), Some(Version(7, 2, 22)));
        assert_eq!(Version::find("Firecracker v1.12.1\n", "Firecracker v"), Some(Version(1, 12, 1)));
        assert_eq!(Version::find("QEMU emulator version 10.0", "version "), Some(Version(10, 0, 0)));
        assert_eq!(Version::find("something else", "version "), None);
        assert!(Version(8, 2, 0) > Version(7, 2, 22));
    }

    #[test]
    fn slots_have_names() {
        let names: Vec<_> = Slot::all().into_iter().map(Slot::name).collect();
        assert_eq!(names, ["vol0", "vol1", "vol2", "vol3", "scratch"]);
        assert_eq!((Slot::volume(3), Slot::volume(4)), (Some(Slot(3)), None));
    }
}
