//! Control groups: limits, out-of-memory counts, and who is still alive in a slot. v1, v2 and hybrid hosts.
//!
//! Owns one cgroup per slot, made once and reused; its limits are rewritten only when the next task's differ. The slot's shim lives
//! in it, so that everything it starts is there from its first instruction and nothing has to be moved. Does not own who is started
//! (`spawner`) or which limits a task has.

mod layout;

use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

pub use layout::Controller;

use volley_jobspecs::units::counted;

use crate::spawner::tree;

/// Period of the CPU quota, in microseconds: the kernel's own default.
const CPU_PERIOD_US: u64 = 100_000;
/// Smallest CPU quota the kernel takes, in microseconds.
const CPU_QUOTA_US_MIN: u64 = 1_000;
/// How long what a predecessor left is killed and waited for.
const SWEEP_TIME: Duration = Duration::from_secs(10);
/// "No limit" in v1's memory files.
const V1_UNLIMITED: &str = "-1";
/// The shim itself counts as one.
const SHIM_PIDS: u64 = 1;

/// Why cgroups can't be used.
#[derive(Debug, thiserror::Error)]
pub enum CgroupError {
    /// The kernel shows none.
    #[error("no cgroup hierarchy is mounted")]
    None,
    /// A controller is missing.
    #[error("the {} controller is not available here", .0.as_str())]
    Missing(Controller),
    /// A file can't be written or a directory made.
    #[error("{what} {}: {source}; run the worker as root, or give its service Delegate=yes", .path.display())]
    Denied {
        /// What was tried.
        what: &'static str,
        /// On which path.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// What is in a cgroup's memory, mostly left by earlier tasks, is more than the next limit.
    #[error("{} holds {bytes} bytes before the task begins, and its limit is {limit}; it wants a fresh cgroup or more memory", .path.display())]
    Full {
        /// Where.
        path: PathBuf,
        /// How much it holds.
        bytes: u64,
        /// How much it may.
        limit: u64,
    },
    /// Processes of a predecessor don't die.
    #[error("{} in {} can't be killed; a dead disk may be what hangs there", counted(*count as u64, "process", "processes"), .path.display())]
    Alive {
        /// Where.
        path: PathBuf,
        /// How many.
        count: usize,
    },
}

fn denied(what: &'static str, path: &Path) -> impl FnOnce(io::Error) -> CgroupError {
    let path = path.to_owned();
    move |source| CgroupError::Denied { what, path, source }
}

/// What one task may use.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Limits {
    /// Memory in bytes.
    pub memory_bytes: Option<u64>,
    /// CPU in thousandths of a core.
    pub cpu_milli: Option<u32>,
    /// Processes and threads.
    pub pids: Option<u32>,
}

impl Limits {
    /// Is anything limited?
    #[must_use]
    pub fn any(&self) -> bool {
        self.memory_bytes.is_some() || self.cpu_milli.is_some() || self.pids.is_some()
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Version {
    V1,
    V2,
}

/// The worker's part of the host's cgroups.
#[derive(Debug, Clone)]
pub struct Cgroups {
    controllers: Vec<(Controller, Version, PathBuf)>,
    /// The same directories, each once.
    folders: Vec<PathBuf>,
}

impl Cgroups {
    /// Finds out what this process may use, and kills what a worker of the same `name` left in it.
    ///
    /// # Errors
    /// [`CgroupError`]: no limits can be enforced here.
    pub fn open(name: &str) -> Result<Self, CgroupError> {
        let read = |path: &str| fs::read_to_string(path).map_err(denied("reading", Path::new(path)));
        let own = layout::own(&read("/proc/self/mountinfo")?, &read("/proc/self/cgroup")?);
        if own.v1.is_empty() && own.v2.is_none() {
            return Err(CgroupError::None);
        }
        let mut controllers = Vec::new();
        let mut folders: Vec<PathBuf> = Vec::new();
        for (controller, path) in &own.v1 {
            controllers.push((*controller, Version::V1, path.join(name)));
            if !folders.contains(&path.join(name)) {
                folders.push(path.join(name));
            }
        }
        if let (Some(path), Some(top)) = (&own.v2, &own.v2_top) {
            let wanted: Vec<Controller> =
                Controller::ALL.into_iter().filter(|c| controllers.iter().all(|(known, ..)| known != c)).collect();
            let found = handed(top, &wanted);
            if !found.is_empty() {
                let folder = delegate(path, top, name, &found)?.join(name);
                controllers.extend(found.into_iter().map(|c| (c, Version::V2, folder.clone())));
                folders.push(folder);
            }
        }
        for controller in Controller::ALL {
            if controllers.iter().all(|(known, ..)| *known != controller) {
                return Err(CgroupError::Missing(controller));
            }
        }
        let cgroups = Self { controllers, folders };
        cgroups.sweep()?;
        for folder in &cgroups.folders {
            fs::create_dir_all(folder).map_err(denied("making", folder))?;
        }
        cgroups.enable_v2_below()?;
        // What can be made can be limited; better to know now than at the first task.
        let probe = cgroups.slot("probe")?;
        probe.write(&Limits { memory_bytes: Some(64 << 20), cpu_milli: Some(1_000), pids: Some(64) })?;
        probe.remove();
        Ok(cgroups)
    }

    fn enable_v2_below(&self) -> Result<(), CgroupError> {
        for (controller, version, folder) in &self.controllers {
            if *version == Version::V2 {
                let file = folder.join("cgroup.subtree_control");
                fs::write(&file, format!("+{}", controller.as_str())).map_err(denied("writing", &file))?;
            }
        }
        Ok(())
    }

    /// Kills everything in the worker's cgroups and removes them.
    ///
    /// # Errors
    /// [`CgroupError::Alive`] when something can't be killed.
    pub fn sweep(&self) -> Result<(), CgroupError> {
        for folder in &self.folders {
            sweep(folder)?;
        }
        Ok(())
    }

    /// Makes the cgroup of a slot.
    ///
    /// # Errors
    /// [`CgroupError::Denied`].
    pub fn slot(&self, slot: &str) -> Result<SlotCgroup, CgroupError> {
        for folder in &self.folders {
            let path = folder.join(slot);
            fs::create_dir_all(&path).map_err(denied("making", &path))?;
        }
        let controllers = self.controllers.iter().map(|(c, v, folder)| (*c, *v, folder.join(slot))).collect();
        let folders = self.folders.iter().map(|folder| folder.join(slot)).collect();
        Ok(SlotCgroup { controllers, folders, limits: Limits::default() })
    }
}

/// Which of these controllers a v2 cgroup can use and hand down.
fn handed(folder: &Path, wanted: &[Controller]) -> Vec<Controller> {
    let listed = fs::read_to_string(folder.join("cgroup.controllers")).unwrap_or_default();
    wanted.iter().copied().filter(|c| listed.split_whitespace().any(|word| word == c.as_str())).collect()
}

/// Finds the v2 cgroup below which ours is made, and lets it hand controllers down. There, a cgroup that hands any down may hold no
/// processes itself. So a service that is alone in its cgroup moves to a leaf of its own; a worker started from a shell, whose cgroup
/// is the session's and often lacks controllers that nobody asked for, leaves that alone and goes to the top, where the rule doesn't
/// hold.
fn delegate(own: &Path, top: &Path, name: &str, controllers: &[Controller]) -> Result<PathBuf, CgroupError> {
    let leaf_name = format!("{name}-agent");
    // Already in its leaf, so what is above that is where it was put.
    let own = own.parent().filter(|_| own.ends_with(&leaf_name)).unwrap_or(own);
    let words: Vec<String> = controllers.iter().map(|c| format!("+{}", c.as_str())).collect();
    let hand_down = |folder: &Path| fs::write(folder.join("cgroup.subtree_control"), words.join(" "));
    let at_the_top = || match hand_down(top) {
        Ok(()) => Ok(top.to_owned()),
        Err(e) => Err(denied("writing", &top.join("cgroup.subtree_control"))(e)),
    };
    if handed(own, controllers).len() < controllers.len() {
        return at_the_top();
    }
    match hand_down(own) {
        Ok(()) => return Ok(own.to_owned()),
        Err(e) if e.raw_os_error() == Some(libc::EBUSY) => {}
        Err(e) => return Err(denied("writing", &own.join("cgroup.subtree_control"))(e)),
    }
    let members = fs::read_to_string(own.join("cgroup.procs")).unwrap_or_default();
    if !members.lines().all(is_ours) {
        return at_the_top();
    }
    let leaf = own.join(leaf_name);
    fs::create_dir_all(&leaf).map_err(denied("making", &leaf))?;
    for pid in members.lines() {
        // One that ended meanwhile is no loss; one that can't be moved shows in the write below.
        let _ = fs::write(leaf.join("cgroup.procs"), pid);
    }
    hand_down(own).map_err(denied("writing", &own.join("cgroup.subtree_control")))?;
    Ok(own.to_owned())
}

/// Is it this process, one of its helpers, or another worker? What program a helper is, only root can see.
fn is_ours(pid: &str) -> bool {
    let program = |pid: &str| fs::read_link(format!("/proc/{pid}/exe")).ok();
    let (own, helpers) = (std::process::id(), tree::descendants(std::process::id().cast_signed()));
    program(pid).is_some_and(|found| Some(found) == program("self"))
        || pid.parse().is_ok_and(|pid: libc::pid_t| pid == own.cast_signed() || helpers.contains(&pid))
}

fn sweep(folder: &Path) -> Result<(), CgroupError> {
    let begin = Instant::now();
    while folder.exists() {
        let alive = kill_and_remove(folder);
        if begin.elapsed() > SWEEP_TIME {
            return Err(CgroupError::Alive { path: folder.to_owned(), count: alive });
        }
        if folder.exists() {
            std::thread::sleep(Duration::from_millis(5));
        }
    }
    Ok(())
}

/// One round: kills what is in a cgroup and, first, in those below it, which tasks with the rights may have made; removes what is
/// empty. Returns how many processes it met.
fn kill_and_remove(folder: &Path) -> usize {
    let alive = below(folder).iter().map(|below| kill_and_remove(below)).sum::<usize>() + kill_in(folder);
    let _ = fs::remove_dir(folder);
    alive
}

/// The same without removing anything of the cgroup itself.
fn kill_below(folder: &Path) -> usize {
    below(folder).iter().map(|below| kill_and_remove(below)).sum::<usize>() + kill_in(folder)
}

/// The cgroups in one. The whole list first: a directory kept open at each depth might be more than we may open.
fn below(folder: &Path) -> Vec<PathBuf> {
    let inner = fs::read_dir(folder).into_iter().flatten().flatten().filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    inner.map(|entry| entry.path()).collect()
}

fn kill_in(folder: &Path) -> usize {
    let alive = tree::listed(&folder.join("cgroup.procs"));
    for pid in &alive {
        // SAFETY: plain system call, on a process listed a moment ago in a cgroup that is ours alone.
        unsafe {
            libc::kill(*pid, libc::SIGKILL);
        }
    }
    alive.len()
}

/// The cgroup of one slot.
#[derive(Debug)]
pub struct SlotCgroup {
    controllers: Vec<(Controller, Version, PathBuf)>,
    folders: Vec<PathBuf>,
    limits: Limits,
}

impl SlotCgroup {
    /// The files a process writes itself into to be in it.
    #[must_use]
    pub fn join_files(&self) -> Vec<String> {
        self.folders.iter().map(|folder| folder.join("cgroup.procs").to_string_lossy().into_owned()).collect()
    }

    /// The file with the line `oom_kill N`.
    #[must_use]
    pub fn oom_file(&self) -> Option<String> {
        self.controllers.iter().find_map(|(controller, version, folder)| {
            let file = match version {
                Version::V1 => folder.join("memory.oom_control"),
                Version::V2 => folder.join("memory.events"),
            };
            (*controller == Controller::Memory).then(|| file.to_string_lossy().into_owned())
        })
    }

    /// How often the kernel killed something in it for want of memory.
    #[must_use]
    pub fn oom_kills(&self) -> u64 {
        self.oom_file().and_then(|file| fs::read(file).ok()).map_or(0, |text| tree::oom_kills(&text))
    }

    /// Sets the limits, if they differ from what is set.
    ///
    /// # Errors
    /// [`CgroupError::Denied`] (v1) or [`CgroupError::Full`] (v2) also when a memory limit can't be lowered because of what earlier
    /// tasks left: the slot then wants a fresh cgroup.
    pub fn set_limits(&mut self, limits: Limits) -> Result<(), CgroupError> {
        if self.limits != limits {
            self.write(&limits)?;
            self.limits = limits;
        }
        Ok(())
    }

    fn write(&self, limits: &Limits) -> Result<(), CgroupError> {
        for (controller, version, folder) in &self.controllers {
            match (controller, version) {
                (Controller::Memory, Version::V1) => write_memory_v1(folder, limits.memory_bytes)?,
                (Controller::Memory, Version::V2) => write_memory_v2(folder, limits.memory_bytes)?,
                (Controller::Cpu, Version::V1) => {
                    put(folder, "cpu.cfs_quota_us", &text(limits.cpu_milli.map(quota_us), "-1"))?;
                }
                (Controller::Cpu, Version::V2) => {
                    let quota = text(limits.cpu_milli.map(quota_us), "max");
                    put(folder, "cpu.max", &format!("{quota} {CPU_PERIOD_US}"))?;
                }
                (Controller::Pids, Version::V1 | Version::V2) => {
                    put(folder, "pids.max", &text(limits.pids.map(|pids| u64::from(pids) + SHIM_PIDS), "max"))?;
                }
            }
        }
        Ok(())
    }

    /// Kills what is in it, if anything is. How many processes were met; they may take a moment to be gone.
    #[must_use]
    pub fn kill(&self) -> usize {
        self.folders.iter().map(|folder| kill_below(folder)).sum()
    }

    /// Kills what is left in it and removes it.
    pub fn remove(&self) {
        for folder in &self.folders {
            // What can't be killed keeps its directory; the next start tries again.
            let _ = sweep(folder);
        }
    }
}

fn quota_us(cpu_milli: u32) -> u64 {
    (u64::from(cpu_milli) * CPU_PERIOD_US / 1_000).max(CPU_QUOTA_US_MIN)
}

fn text(value: Option<u64>, none: &str) -> String {
    value.map_or_else(|| none.to_owned(), |value| value.to_string())
}

/// With swap counted in, the two files bound each other: both are opened first, then set from the inner to the outer.
fn write_memory_v1(folder: &Path, limit: Option<u64>) -> Result<(), CgroupError> {
    put_if_there(folder, "memory.memsw.limit_in_bytes", V1_UNLIMITED)?;
    let limit = text(limit, V1_UNLIMITED);
    if put(folder, "memory.limit_in_bytes", &limit).is_err() {
        // Pages of files that earlier tasks read are charged here; give them back and try once more.
        let _ = fs::write(folder.join("memory.force_empty"), "0");
        put(folder, "memory.limit_in_bytes", &limit)?;
    }
    put_if_there(folder, "memory.memsw.limit_in_bytes", &limit)
}

/// A limit below what is in use isn't refused as in v1: the kernel kills until it fits, and would begin with the slot's helper.
fn write_memory_v2(folder: &Path, limit: Option<u64>) -> Result<(), CgroupError> {
    let excess = |limit: u64| {
        let used = fs::read_to_string(folder.join("memory.current")).unwrap_or_default();
        used.trim().parse::<u64>().unwrap_or(0).saturating_sub(limit)
    };
    if let Some(limit) = limit
        && excess(limit) > 0
    {
        // As in v1: pages of files that earlier tasks read are charged here and can be given back.
        let _ = fs::write(folder.join("memory.reclaim"), excess(limit).to_string());
        let left = excess(limit);
        if left > 0 {
            return Err(CgroupError::Full { path: folder.to_owned(), bytes: limit + left, limit });
        }
    }
    put(folder, "memory.max", &text(limit, "max"))?;
    put_if_there(folder, "memory.swap.max", if limit.is_some() { "0" } else { "max" })
}

fn put(folder: &Path, file: &str, value: &str) -> Result<(), CgroupError> {
    let path = folder.join(file);
    fs::write(&path, value).map_err(denied("writing", &path))
}

fn put_if_there(folder: &Path, file: &str, value: &str) -> Result<(), CgroupError> {
    if folder.join(file).exists() { put(folder, file, value) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn limits_are_written_once_and_removed_with_the_slot() {
        let name = format!("volley-test-{}", std::process::id());
        let cgroups = match Cgroups::open(&name) {
            Ok(cgroups) => cgroups,
            Err(why) => {
                eprintln!("skipped: {why}");
                return;
            }
        };
        let mut slot = cgroups.slot("0").expect("a slot");
        let limits = Limits { memory_bytes: Some(32 << 20), cpu_milli: Some(500), pids: Some(10) };
        assert!(slot.set_limits(limits).is_ok());
        assert!(slot.set_limits(Limits::default()).is_ok());
        assert!(slot.join_files().iter().all(|file| Path::new(file).exists()));
        assert!(slot.oom_file().is_some_and(|file| Path::new(&file).exists()));
        let mut child = std::process::Command::new("sleep").arg("100").spawn().expect("sleep");
        for folder in &slot.folders {
            let below = folder.join("made/by/the-task");
            fs::create_dir_all(&below).expect("made");
            fs::write(below.join("cgroup.procs"), child.id().to_string()).expect("joined");
        }
        let reaper = std::thread::spawn(move || child.wait());
        cgroups.sweep().expect("swept");
        assert!(reaper.join().is_ok_and(|status| status.is_ok_and(|status| !status.success())));
        assert!(cgroups.folders.iter().all(|folder| !folder.exists()));
    }
}
