//! Limits of commands, and the end of everything they started: cgroup v2, which a machine has to itself.
//!
//! Owns one group for all commands, which leaves room for the agent, and in it one per command. The agent stays at the top.

use std::fs::{self, File, OpenOptions};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use volley_jobspecs::wire::guest::Limits;

use super::spawn::Place;

/// Where the machine's cgroups are mounted.
pub const TOP: &str = "/sys/fs/cgroup";
/// The group of all commands, below the top.
const COMMANDS: &str = "commands";
/// Name of a command's group in it, before its number.
const PREFIX: &str = "exec-";
/// Memory that commands leave to the agent: its threads' stacks, a window for each channel, and the tar reader.
const RESERVED_BYTES: u64 = 24 << 20;
/// Processes and threads that commands leave to the agent and the kernel.
const RESERVED_PIDS: u64 = 256;
/// The period that shares of CPU are counted in, in microseconds: the kernel's default.
const CPU_PERIOD_US: u64 = 100_000;
/// How long killed processes may take to go: a thousand of them take ten seconds in an emulated machine. One that waits for a disk goes
/// only when that answers.
const KILL_WAIT: Duration = Duration::from_secs(30);
/// How long commands may take to stand still: each is stopped on its way out of the kernel, in an emulated machine too within moments.
const HOLD_WAIT: Duration = Duration::from_secs(10);
/// Between looks.
const KILL_LOOK: Duration = Duration::from_millis(5);

/// The machine's cgroups.
#[derive(Debug)]
pub struct Cgroups {
    next: AtomicU32,
    /// One that was made before it is wanted: making it is a good part of starting a command in a machine that was just restored.
    spare: Mutex<Option<Group>>,
}

/// One command's.
#[derive(Debug)]
pub struct Group {
    dir: PathBuf,
}

impl Cgroups {
    /// Hands the controllers to the groups below, and keeps room for the agent: whatever commands use up, it still answers.
    ///
    /// # Errors
    /// What the system says: this kernel has no cgroup v2, or they are not mounted.
    pub fn open() -> io::Result<Self> {
        const CONTROLLERS: &str = "+memory +pids +cpu";
        fs::write(Path::new(TOP).join("cgroup.subtree_control"), CONTROLLERS)?;
        let commands = Group::of_commands();
        fs::create_dir_all(&commands.dir)?;
        fs::write(commands.dir.join("cgroup.subtree_control"), CONTROLLERS)?;
        let memory = super::stats::read().memory_total_bytes;
        // Of a machine so small that this is half of it, half.
        commands.set("memory.max", memory.saturating_sub(RESERVED_BYTES).max(memory / 2))?;
        let number = |path: &str| fs::read_to_string(path).ok().and_then(|text| text.trim().parse::<u64>().ok());
        let pids = [number("/proc/sys/kernel/threads-max"), number("/proc/sys/kernel/pid_max")].into_iter().flatten().min();
        if let Some(pids) = pids {
            commands.set("pids.max", pids.saturating_sub(RESERVED_PIDS).max(pids / 2))?;
        }
        let cgroups = Self { next: AtomicU32::new(1), spare: Mutex::default() };
        cgroups.make_spare();
        Ok(cgroups)
    }

    fn spare(&self) -> MutexGuard<'_, Option<Group>> {
        self.spare.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn make(&self) -> io::Result<Group> {
        let dir = Path::new(TOP).join(COMMANDS).join(format!("{PREFIX}{}", self.next.fetch_add(1, Ordering::Relaxed)));
        fs::create_dir(&dir)?;
        Ok(Group { dir })
    }

    /// Makes one that will be wanted, if there is none. Without it a command makes its own.
    pub fn make_spare(&self) {
        let mut spare = self.spare();
        if spare.is_none() {
            *spare = self.make().ok();
        }
    }

    /// A group for a command.
    ///
    /// # Errors
    /// What the system says.
    pub fn group(&self, limits: &Limits) -> io::Result<Group> {
        let spare = self.spare().take();
        let group = match spare {
            Some(group) => group,
            None => self.make()?,
        };
        let set = group.limit(limits);
        if set.is_err() {
            group.remove();
        }
        set.map(|()| group)
    }

    /// Lets nothing of any command run, and waits until nothing does; or lets them go on.
    ///
    /// # Errors
    /// What the system says, or that some do not stand still: they wait for a disk.
    pub fn hold(&self, hold: bool) -> io::Result<()> {
        let commands = Group::of_commands();
        commands.set("cgroup.freeze", u64::from(hold))?;
        let deadline = Instant::now() + HOLD_WAIT;
        while hold && !commands.says("frozen 1") {
            if Instant::now() >= deadline {
                commands.set("cgroup.freeze", 0)?;
                return Err(io::Error::new(io::ErrorKind::TimedOut, "some processes do not stand still"));
            }
            std::thread::sleep(KILL_LOOK);
        }
        Ok(())
    }

    /// All groups there are but for the spare one, also those of commands that ended and left processes.
    pub fn all(&self) -> Vec<Group> {
        let spare = self.spare().as_ref().map(|group| group.dir.clone());
        let entries = fs::read_dir(Path::new(TOP).join(COMMANDS)).into_iter().flatten().flatten();
        entries
            .filter(|entry| entry.file_name().as_encoded_bytes().starts_with(PREFIX.as_bytes()))
            .map(|entry| Group { dir: entry.path() })
            .filter(|group| Some(&group.dir) != spare.as_ref())
            .collect()
    }
}

impl Group {
    /// That of all commands.
    fn of_commands() -> Self {
        Self { dir: Path::new(TOP).join(COMMANDS) }
    }

    fn limit(&self, limits: &Limits) -> io::Result<()> {
        if let Some(bytes) = limits.memory_bytes {
            self.set("memory.max", bytes)?;
            // A kernel without swap has no such file.
            let _ = self.set("memory.swap.max", 0);
        }
        if let Some(pids) = limits.pids {
            self.set("pids.max", pids.into())?;
        }
        if let Some(milli) = limits.cpu_milli {
            let quota = (u64::from(milli) * CPU_PERIOD_US / 1000).max(1000);
            fs::write(self.dir.join("cpu.max"), format!("{quota} {CPU_PERIOD_US}"))?;
        }
        Ok(())
    }

    fn set(&self, file: &str, value: u64) -> io::Result<()> {
        fs::write(self.dir.join(file), value.to_string())
    }

    /// What it takes to begin a process in it.
    ///
    /// # Errors
    /// What the system says.
    pub fn place(&self) -> io::Result<Place> {
        Ok(Place { dir: File::open(&self.dir)?, entrance: OpenOptions::new().write(true).open(self.dir.join("cgroup.procs"))? })
    }

    /// Kills all of it and waits. How many are left.
    pub fn kill(&self) -> u32 {
        let deadline = Instant::now() + KILL_WAIT;
        // Fails only when the group is gone.
        let _ = fs::write(self.dir.join("cgroup.kill"), "1");
        while self.is_populated() && Instant::now() < deadline {
            std::thread::sleep(KILL_LOOK);
        }
        self.members()
    }

    fn is_populated(&self) -> bool {
        self.says("populated 1")
    }

    /// Is this a line of the group's events?
    fn says(&self, event: &str) -> bool {
        fs::read_to_string(self.dir.join("cgroup.events")).is_ok_and(|text| text.lines().any(|line| line == event))
    }

    /// Processes in it and in groups they made below it.
    pub fn members(&self) -> u32 {
        if !self.is_populated() {
            return 0;
        }
        let own = fs::read_to_string(self.dir.join("cgroup.procs")).unwrap_or_default().lines().count();
        let below = subgroups(&self.dir).into_iter().map(|dir| Self { dir }.members()).sum::<u32>();
        u32::try_from(own).unwrap_or(u32::MAX).saturating_add(below).max(1)
    }

    /// The processes in it and in groups they made below it.
    pub fn processes(&self) -> Vec<i32> {
        let own = fs::read_to_string(self.dir.join("cgroup.procs")).unwrap_or_default();
        let mut found: Vec<i32> = own.lines().filter_map(|line| line.parse().ok()).filter(|pid| *pid > 0).collect();
        found.extend(subgroups(&self.dir).into_iter().flat_map(|dir| Self { dir }.processes()));
        found
    }

    /// Processes of it that the kernel ended for want of memory, its own or the machine's.
    pub fn oom_kills(&self) -> u64 {
        number_behind(&self.dir.join("memory.events"), "oom_kill ")
    }

    /// CPU time in user mode and in the kernel, in microseconds; most memory at once, in bytes.
    pub fn usage(&self) -> (u64, u64, Option<u64>) {
        let cpu = self.dir.join("cpu.stat");
        let peak = fs::read_to_string(self.dir.join("memory.peak")).ok().and_then(|text| text.trim().parse().ok());
        (number_behind(&cpu, "user_usec "), number_behind(&cpu, "system_usec "), peak)
    }

    /// Removes it, and groups that were made below it. One with processes stays.
    pub fn remove(&self) {
        for dir in subgroups(&self.dir) {
            Self { dir }.remove();
        }
        let _ = fs::remove_dir(&self.dir);
    }
}

fn subgroups(dir: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(dir).into_iter().flatten().flatten();
    entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir())).map(|entry| entry.path()).collect()
}

fn number_behind(file: &Path, name: &str) -> u64 {
    let text = fs::read_to_string(file).unwrap_or_default();
    text.lines().find_map(|line| line.strip_prefix(name)?.trim().parse().ok()).unwrap_or_default()
}
