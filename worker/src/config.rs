//! What a worker is told.
//!
//! Owns the values, their defaults and what is checked before anything starts. Does not read flags or files.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use volley_jobspecs::ids::WorkerId;
use volley_jobspecs::keys;
use volley_jobspecs::observe::Observing;
use volley_jobspecs::wire::plan::Isolation;

use crate::shells::Shells;
use crate::template::share::Sharing;
use crate::template::step::Steps;
use crate::vmm::choice::Choice;
use crate::vmm::spawner::MachineSpawner;
use crate::volumes::VolumesConfig;

/// Most slots of a worker: each has a shim process and three directories once it was used.
pub const SLOTS_MAX: u32 = 4_096;
/// Shortest beat, in milliseconds: below, beats are most of what a leader hears.
pub const BEAT_MS_MIN: u64 = 100;
/// Longest beat, in milliseconds: a worker counts as lost after 15 s of silence, and one beat may get lost.
pub const BEAT_MS_MAX: u64 = 7_000;

/// Where e2fsprogs has it on every distribution.
const MKE2FS: &str = "/sbin/mke2fs";
/// A template's build: a boot takes 4 to 9 seconds in an emulated machine, and warm-up commands what they take. Less than a task's
/// `timeouts.start`, so that a task whose warm-up hangs is told which command that is.
const BUILD_MS_MAX: u64 = 240_000;

/// A worker's configuration.
#[derive(Debug, Clone)]
pub struct Config {
    /// Its name, which it keeps over restarts.
    pub name: WorkerId,
    /// Its directory: work directories, input cache, lock. One worker per directory.
    pub dir: PathBuf,
    /// Bundles it runs at once.
    pub slots: u32,
    /// CPU for tasks, in thousandths of a core.
    pub cpu_milli: u32,
    /// Memory for tasks, in bytes.
    pub memory_bytes: u64,
    /// Disk for tasks, in bytes.
    pub disk_bytes: u64,
    /// Isolation tiers to offer: `null`, `process`, `container` and `microvm`.
    pub isolation: Vec<Isolation>,
    /// Its labels.
    pub labels: BTreeMap<String, String>,
    /// User and group tasks run as, when the worker runs as root; `None`: as the worker.
    pub task_user: Option<(u32, u32)>,
    /// Does each slot have a user of its own? Slot 0 has `task_user`, the next the numbers after it. Tasks of different slots then
    /// can't signal each other, nor read each other's files.
    pub task_user_per_slot: bool,
    /// Use cgroups? Without, tasks that ask for limits are refused.
    pub cgroups: bool,
    /// Milliseconds between beats.
    pub beat_ms: u64,
    /// Linger of reports until a leader says otherwise, in milliseconds.
    pub linger_ms: u64,
    /// Bytes kept of each of stdout and stderr; what is above loses its middle.
    pub stream_bytes_max: usize,
    /// Bytes of fetched inputs kept for other tasks that want the same.
    pub cache_bytes_max: u64,
    /// Most bytes of ends that are not in the log; above, nothing new is started.
    pub unsent_bytes_max: usize,
    /// The build, for people.
    pub build: String,
    /// The host's name, for people.
    pub host: String,
    /// Who is told of spans and figures.
    pub observer: Observing,
    /// What containers are made of; used only where `isolation` has `container`.
    pub containers: ContainerConfig,
    /// What machines are made of; used only where `isolation` has `microvm`, but for what containers have of it.
    pub machines: MachineConfig,
    /// What volumes are made of; none: tasks that want any are not for this worker.
    pub volumes: Option<VolumesConfig>,
}

/// What containers are made of. They have their images and their first program from [`MachineConfig`].
#[derive(Debug, Clone, Default)]
pub struct ContainerConfig {
    /// The OCI runtime, crun, runc or runsc: a path, or a name that is looked for in PATH. `crun` when none is named.
    pub runtime: Option<PathBuf>,
}

/// What machines are made of.
#[derive(Debug, Clone)]
pub struct MachineConfig {
    /// Where images lie, as root disks, of containers as well. One worker at a time has this directory.
    pub images: PathBuf,
    /// The VMM.
    pub vmm: Choice,
    /// QEMU; where distributions put it when none is named.
    pub qemu: Option<PathBuf>,
    /// Firecracker; in PATH, /usr/local/bin or /usr/bin when none is named.
    pub firecracker: Option<PathBuf>,
    /// The guests' kernel, a bzImage, for Firecracker also an uncompressed one; found as `image::kernel::find` says when none is named.
    pub kernel: Option<PathBuf>,
    /// That kernel's modules (`/lib/modules/VERSION`); when none are named, `modules` beside the kernel, else where its release's are
    /// installed, else it has all of them built in.
    pub modules: Option<PathBuf>,
    /// The agent's program, linked statically, which is the first one of containers as well; beside this program when none is named.
    pub agent: Option<PathBuf>,
    /// Makes the file systems of scratch disks (e2fsprogs).
    pub mke2fs: PathBuf,
    /// Memory of the host for templates, in bytes: each takes what its machine had written when it was saved, some 100 MiB.
    pub templates_bytes_max: u64,
    /// Memory of the host for machines that wait, in bytes: each takes some 40 MiB. Those of failed attempts that are kept count with all they
    /// can take, and come first. 0: none wait, and none is kept.
    pub standby_bytes_max: u64,
    /// Most machines that wait for one template; as many as the worker has slots when none is given.
    pub standby_of_one_max: Option<u32>,
    /// Longest time for building a template, in milliseconds.
    pub build_ms_max: u64,
    /// How templates are shared with the cluster's other workers; not at all when nothing is said.
    pub share: Option<ShareConfig>,
    /// The same, opened. `run_on_nats` does it when it is not there; for tests, and for whoever has no NATS client of a worker.
    pub sharing: Option<Sharing>,
    /// Who is told how far templates are.
    pub steps: Option<Steps>,
    /// May machines run whose VMMs can't be shut off from everything that they must not reach? For development: a guest that breaks into its
    /// VMM is on the host then.
    pub allow_unconfined: bool,
    /// Starts machines; made at the start when none is given, which costs more the larger this process is. Make it first thing in `main`.
    pub spawner: Option<MachineSpawner>,
    /// Those that can be entered by whoever wants a shell in one.
    pub shells: Shells,
}

/// How templates are shared.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ShareConfig {
    /// The cluster's keys for templates, the same on all its workers: one a line, 64 hexadecimal digits, the first is written with. Only its
    /// owner may read the file.
    pub key_file: PathBuf,
    /// What their objects' keys begin with in the cluster's bucket: empty, or ending in `/`. The same on all workers.
    pub prefix: String,
}

impl ShareConfig {
    /// With this key file, at the usual place of the bucket.
    #[must_use]
    pub fn new(key_file: PathBuf) -> Self {
        Self { key_file, prefix: keys::TEMPLATES.to_owned() }
    }
}

impl MachineConfig {
    /// The defaults: images below the worker's directory, an eighth of the host's memory for templates and as much for machines that wait.
    #[must_use]
    pub fn new(dir: &Path) -> Self {
        Self {
            images: dir.join("images"),
            vmm: Choice::Auto,
            qemu: None,
            firecracker: None,
            kernel: None,
            modules: None,
            agent: None,
            mke2fs: PathBuf::from(MKE2FS),
            templates_bytes_max: total_memory() / 8,
            standby_bytes_max: total_memory() / 8,
            standby_of_one_max: None,
            build_ms_max: BUILD_MS_MAX,
            share: None,
            sharing: None,
            steps: None,
            allow_unconfined: false,
            spawner: None,
            shells: Shells::default(),
        }
    }
}

impl Config {
    /// A worker with the defaults: as many slots as cores, all their CPU, three quarters of the memory, `process` and `null`.
    #[must_use]
    pub fn new(name: WorkerId, dir: PathBuf) -> Self {
        let cores = u32::try_from(std::thread::available_parallelism().map_or(1, usize::from)).unwrap_or(SLOTS_MAX);
        Self {
            name,
            slots: cores.min(SLOTS_MAX),
            cpu_milli: cores.saturating_mul(1_000),
            memory_bytes: total_memory() / 4 * 3,
            disk_bytes: free_disk(&dir),
            containers: ContainerConfig::default(),
            machines: MachineConfig::new(&dir),
            volumes: None,
            dir,
            isolation: vec![Isolation::Null, Isolation::Process],
            labels: BTreeMap::new(),
            task_user: None,
            task_user_per_slot: false,
            cgroups: true,
            beat_ms: 3_000,
            linger_ms: 5,
            stream_bytes_max: 4 << 20,
            cache_bytes_max: 10 << 30,
            unsent_bytes_max: 64 << 20,
            build: env!("CARGO_PKG_VERSION").to_owned(),
            host: std::fs::read_to_string("/proc/sys/kernel/hostname").map(|h| h.trim().to_owned()).unwrap_or_default(),
            observer: None,
        }
    }

    /// Checks what can be checked without touching anything.
    ///
    /// # Errors
    /// [`ConfigError`] names the value.
    pub fn check(&self) -> Result<(), ConfigError> {
        if !(1..=SLOTS_MAX).contains(&self.slots) {
            return Err(ConfigError::Slots(self.slots));
        }
        if !(BEAT_MS_MIN..=BEAT_MS_MAX).contains(&self.beat_ms) {
            return Err(ConfigError::Beat(self.beat_ms));
        }
        if self.isolation.is_empty() {
            return Err(ConfigError::NoIsolation);
        }
        if let Some(ShareConfig { prefix, .. }) = &self.machines.share
            && !(prefix.is_empty()
                || prefix.strip_suffix('/').is_some_and(|path| path.split('/').all(|part| !matches!(part, "" | "." | ".."))))
        {
            return Err(ConfigError::SharePrefix);
        }
        if self.task_user_per_slot {
            let (uid, gid) = self.task_user.unwrap_or_default();
            // All ones means "no change" to the kernel.
            if uid == 0 || gid == 0 || uid.max(gid).checked_add(self.slots).is_none_or(|end| end == u32::MAX) {
                return Err(ConfigError::TaskUsers { uid, gid, slots: self.slots });
            }
        }
        if self.task_user.is_some() && !rustix::process::geteuid().is_root() {
            return Err(ConfigError::TaskUser);
        }
        Ok(())
    }
}

/// What is wrong with a configuration.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum ConfigError {
    /// Slots out of range.
    #[error("a worker has 1 to {SLOTS_MAX} slots, not {0}")]
    Slots(u32),
    /// Beat out of range.
    #[error("a worker beats every {BEAT_MS_MIN} to {BEAT_MS_MAX} ms, not every {0}")]
    Beat(u64),
    /// Where no object can lie.
    #[error("the prefix of shared templates is empty or ends in `/`, and none of its parts is empty, `.` or `..`; templates/ is usual")]
    SharePrefix,
    /// Nothing to offer.
    #[error("a worker must offer at least one isolation tier: null, process, container or microvm")]
    NoIsolation,
    /// A range of users that holds root, or more than there are.
    #[error("{slots} slots can't have users of their own from {uid}:{gid} on; choose another first user")]
    TaskUsers {
        /// The first user.
        uid: u32,
        /// The first group.
        gid: u32,
        /// How many.
        slots: u32,
    },
    /// Only root can become somebody else.
    #[error("tasks can run as another user only when the worker runs as root; leave the task user out, or run it as root")]
    TaskUser,
}

fn total_memory() -> u64 {
    let info = rustix::system::sysinfo();
    info.totalram.saturating_mul(u64::from(info.mem_unit))
}

/// Nine tenths of what is free where `dir` is or will be.
fn free_disk(dir: &std::path::Path) -> u64 {
    dir.ancestors()
        .find_map(|dir| rustix::fs::statvfs(if dir.as_os_str().is_empty() { ".".as_ref() } else { dir }).ok())
        .map_or(0, |vfs| vfs.f_bavail.saturating_mul(vfs.f_frsize) / 10 * 9)
}
