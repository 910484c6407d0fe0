//! A container's root, put together in a shim's own mounts, and what comes back from behind its runtime.
//!
//! Owns the mounts: the image's disk (read-only, kept from one container to the next of the same image), an overlay over it whose writes are
//! thrown away, and the task's directories in it; and reading the report of the container's first process (`volley_guest::container`). All
//! of it is in the shim's own namespace of mounts, and goes with its last process, however that ends. Does not own the runtime's
//! configuration (`runtime/container`) or starting it (`child`).
//!
//! A path in an image may be a link to anywhere, and here it would lead to the host. So nothing is ever looked up through the mounted
//! root but directories that were made in a layer above the image, where whatever the image has of that name is out of sight.

use std::fs::{self, File};
use std::io::{self, Read};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::{FileExt, chown};
use std::path::{Path, PathBuf};

use rustix::mount::{MountFlags, MountPropagationFlags, MoveMountFlags, UnmountFlags};
use rustix::thread::UnshareFlags;
use volley_guest::container::{Report, Step as InStep};

use super::child::HIGH;
use super::mounts::{copy_of, hide_below, show_owners_as};
use super::proto::{Container, Exited, Reply, Step};

/// Longest text of a runtime's that is told, in bytes.
const LOG_BYTES_MAX: usize = 1024;
/// Longest report, in bytes: a handful of numbers.
const REPORT_BYTES_MAX: u64 = 256;
/// The kind of an image's disk.
const DISK: &str = "erofs";
/// Every mount of ours: nothing in there gives rights or opens a device.
const FLAGS: MountFlags = MountFlags::NOSUID.union(MountFlags::NODEV);
/// Leaves the host's mounts for a copy of its own, without what is mounted below `hidden`.
///
/// # Errors
/// What the system says; usually that this takes root.
pub fn own_mounts(hidden: Option<&str>) -> io::Result<()> {
    // SAFETY: a process of one thread, whose descriptors and root directory stay what they were.
    unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNS) }?;
    // What is mounted here is seen nowhere else; what is unmounted on the host goes here as well.
    rustix::mount::mount_change("/", MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC)?;
    if let Some(hidden) = hidden {
        hide_below(Path::new(hidden));
    }
    Ok(())
}

/// On a host with both kinds of cgroups, runtimes refuse to start when the newer has controllers of its own. They need neither here.
pub fn hide_half_cgroups() {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let of = |kind: &str| -> Vec<String> {
        let lines = mounts.lines().filter_map(|line| line.split_once(" - "));
        lines
            .filter(|(_, right)| right.split(' ').next() == Some(kind))
            .filter_map(|(left, _)| Some(left.split(' ').nth(4)?.to_owned()))
            .collect()
    };
    if of("cgroup").is_empty() {
        return;
    }
    for place in of("cgroup2") {
        // A runtime that then refuses says so itself.
        let _ = rustix::mount::unmount(place.as_str(), UnmountFlags::DETACH);
    }
}

/// A root that is mounted. It is taken apart when this goes.
#[derive(Debug)]
pub struct Root {
    dir: PathBuf,
    container: Container,
}

impl Root {
    /// Puts it together.
    ///
    /// # Errors
    /// What could not be done, in words.
    pub fn make(container: Container) -> Result<Self, String> {
        let root = Self { dir: PathBuf::from(&container.dir), container };
        match root.assemble() {
            Ok(()) => Ok(root),
            Err((what, why)) => Err(format!("putting the container's root together: {what}: {why}")),
        }
    }

    fn assemble(&self) -> Result<(), (String, io::Error)> {
        let at = |what: &str| {
            let what = what.to_owned();
            move |e: io::Error| (what, e)
        };
        self.clear().map_err(at("clearing it"))?;
        let lower = self.lower()?;
        let [upper, work, top] = ["upper", "ovl", "root"].map(|name| self.dir.join(name));
        for dir in [&upper, &work, &top] {
            fs::create_dir_all(dir).map_err(at("making directories"))?;
        }
        self.own(&upper).map_err(at("making directories"))?;
        self.write_hosts(&lower, &upper).map_err(at("writing /etc/hosts"))?;
        let skeleton = self.skeleton();
        let [skeleton, lower, upper, work] = [&skeleton, &lower, &upper, &work].map(|dir| dir.display());
        let options = format!("lowerdir={skeleton}:{lower},upperdir={upper},workdir={work},volatile");
        let options = std::ffi::CString::new(options).map_err(|e| at("its path")(e.into()))?;
        rustix::mount::mount("overlay", &top, "overlay", FLAGS, options.as_c_str()).map_err(|e| at("mounting an overlay")(e.into()))?;
        for (from, to) in &self.container.binds {
            let to = top.join(to.trim_start_matches('/'));
            let bound = rustix::mount::mount_bind(from.as_str(), &to)
                .and_then(|()| rustix::mount::mount_remount(&to, MountFlags::BIND | FLAGS, c""));
            bound.map_err(|e| at(&format!("showing {from}"))(e.into()))?;
        }
        Ok(())
    }

    /// In the layer that takes what is written. An image in which `/etc` is something else than a directory is left as it is.
    fn write_hosts(&self, lower: &Path, upper: &Path) -> io::Result<()> {
        if fs::symlink_metadata(lower.join("etc")).is_ok_and(|there| !there.is_dir()) {
            return Ok(());
        }
        let dir = upper.join("etc");
        fs::create_dir(&dir)?;
        fs::write(dir.join("hosts"), &self.container.hosts)?;
        self.own(&dir)?;
        self.own(&dir.join("hosts"))
    }

    /// Where it is put together.
    pub fn top(&self) -> PathBuf {
        self.dir.join("root")
    }

    /// User and group on the host that it belongs to.
    pub fn owner(&self) -> (u32, u32) {
        self.container.owner
    }

    /// Directories over the image: a layer that is the same for each container of a user.
    fn skeleton(&self) -> PathBuf {
        self.dir.join("skeleton")
    }

    /// Makes a directory the container's. Its mode is right already: helpers have a mask that takes writing from others.
    fn own(&self, dir: &Path) -> io::Result<()> {
        let (uid, gid) = self.container.owner;
        chown(dir, Some(uid), Some(gid))
    }

    fn make_skeleton(&self) -> io::Result<()> {
        let skeleton = self.skeleton();
        crate::dirs::remove_all(&skeleton)?;
        fs::create_dir(&skeleton)?;
        self.own(&skeleton)?;
        for dir in &self.container.dirs {
            let dir = skeleton.join(dir.trim_start_matches('/'));
            fs::create_dir(&dir).and_then(|()| self.own(&dir))?;
        }
        Ok(())
    }

    /// The image's disk, its owners shown as the container's. Mounted anew when the last container was of another image or user.
    fn lower(&self) -> Result<PathBuf, (String, io::Error)> {
        let (disk, shown, note) = (self.dir.join("disk"), self.dir.join("lower"), self.dir.join("mounted"));
        let Container { device, users, groups, .. } = &self.container;
        // Another helper's mounts are not ours.
        let wanted = format!("{} {device:?} {users:?} {groups:?} {:?}", std::process::id(), self.container.dirs);
        if fs::read_to_string(&note).is_ok_and(|found| found == wanted) {
            return Ok(shown);
        }
        let failed = |what: &str| {
            let what = what.to_owned();
            move |e: rustix::io::Errno| (what, io::Error::from(e))
        };
        let _ = fs::remove_file(&note);
        for dir in [&shown, &disk] {
            fs::create_dir_all(dir).map_err(|e| ("making directories".to_owned(), e))?;
            while rustix::mount::unmount(dir, UnmountFlags::DETACH).is_ok() {}
        }
        if let Some(device) = device {
            rustix::mount::mount(device.as_str(), &disk, DISK, FLAGS | MountFlags::RDONLY, c"")
                .map_err(failed("mounting the image's disk"))?;
        }
        show_as(&disk, &shown, users, groups)
            .map_err(|e| ("showing the image's files as the container's users' (Linux 5.19 or newer)".to_owned(), e))?;
        self.make_skeleton().map_err(|e| ("making directories".to_owned(), e))?;
        fs::write(&note, wanted).map_err(|e| ("noting what is mounted".to_owned(), e))?;
        Ok(shown)
    }

    /// Takes it apart, and throws away what was written.
    fn clear(&self) -> io::Result<()> {
        let top = self.dir.join("root");
        while rustix::mount::unmount(&top, UnmountFlags::DETACH).is_ok() {}
        crate::dirs::remove_all(&self.dir.join("upper"))?;
        // What is made in it each time, and says that what is there may be half written.
        crate::dirs::remove_all(&self.dir.join("ovl/work"))
    }

    /// What the runtime inherits behind its own three streams, and our ends of it.
    ///
    /// # Errors
    /// What the system says.
    pub fn descriptors(&self, streams: [&OwnedFd; 3]) -> io::Result<(Behind, Vec<OwnedFd>)> {
        if !self.container.reports {
            return Ok((Behind { report: None, log: None }, Vec::new()));
        }
        let (report, told) = rustix::pipe::pipe_with(rustix::pipe::PipeFlags::CLOEXEC | rustix::pipe::PipeFlags::NONBLOCK)?;
        let mut inherits = vec![high(&told)?];
        for stream in streams {
            inherits.push(high(stream)?);
        }
        for file in &self.container.join {
            inherits.push(high(&File::options().write(true).open(file)?)?);
        }
        let log = rustix::fs::memfd_create("volley-runtime", rustix::fs::MemfdFlags::CLOEXEC)?;
        Ok((Behind { report: Some(report), log: Some(log) }, inherits))
    }
}

impl Drop for Root {
    fn drop(&mut self) {
        // What is left is met again by the next one.
        let _ = self.clear();
    }
}

/// A copy of a descriptor, above every place it may get.
fn high(fd: &impl AsFd) -> io::Result<OwnedFd> {
    Ok(rustix::io::fcntl_dupfd_cloexec(fd, HIGH)?)
}

/// Shows a mount a second time, with other owners.
fn show_as(from: &Path, to: &Path, users: &[(u32, u32)], groups: &[(u32, u32)]) -> io::Result<()> {
    let tree = copy_of(from)?;
    show_owners_as(&tree, users, groups)?;
    Ok(rustix::mount::move_mount(&tree, "", rustix::fs::CWD, to, MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH)?)
}

/// Our ends of what a runtime inherits.
#[derive(Debug)]
pub struct Behind {
    report: Option<OwnedFd>,
    /// What the runtime itself says.
    pub log: Option<OwnedFd>,
}

impl Behind {
    /// What is answered when the runtime has ended as `runtime` says, with everything below it.
    pub fn end(self, runtime: Exited) -> Reply {
        let Some(report) = self.report else { return Reply::Exited(by_code(runtime)) };
        let mut bytes = Vec::new();
        // Nobody holds the other end any more, or it is somebody whose report would be late: it is not waited for.
        let _ = File::from(report).take(REPORT_BYTES_MAX).read_to_end(&mut bytes);
        match minicbor::decode::<Report>(&bytes) {
            Ok(Report::Ended(ended)) => Reply::Exited(Exited {
                code: ended.code,
                signal: ended.signal,
                cpu_us: ended.cpu_us.max(runtime.cpu_us),
                memory_bytes_max: ended.memory_bytes_max,
                strays: ended.strays.saturating_add(runtime.strays),
                ..runtime
            }),
            Ok(Report::NotStarted { step, errno }) => Reply::NotStarted { step: step_of(step), errno },
            Err(_) if runtime.oom || runtime.signal == Some(libc::SIGKILL) || runtime.code == Some(128 + libc::SIGKILL) => {
                Reply::Exited(Exited { code: None, signal: Some(libc::SIGKILL), ..runtime })
            }
            Err(_) => Reply::Refused(said(self.log.as_ref(), &runtime)),
        }
    }
}

/// Where an exit code is all there is: those above 128 stand for signals, as a shell has it.
fn by_code(runtime: Exited) -> Exited {
    match runtime.code {
        Some(code) if (129..=128 + 64).contains(&code) => Exited { code: None, signal: Some(code - 128), ..runtime },
        _ => runtime,
    }
}

fn step_of(step: InStep) -> Step {
    match step {
        InStep::Cgroup | InStep::Request => Step::Request,
        InStep::Streams => Step::Streams,
        InStep::Clone => Step::Clone,
        InStep::Directory => Step::Directory,
        InStep::Exec => Step::Exec,
    }
}

/// The runtime's last words, in one line.
fn said(log: Option<&OwnedFd>, runtime: &Exited) -> String {
    let mut bytes = vec![0; LOG_BYTES_MAX];
    let len = log.and_then(|log| log.try_clone().ok()).and_then(|log| {
        let file = File::from(log);
        let from = file.metadata().ok()?.len().saturating_sub(LOG_BYTES_MAX as u64);
        file.read_at(&mut bytes, from).ok()
    });
    let text = String::from_utf8_lossy(bytes.get(..len.unwrap_or(0)).unwrap_or_default()).into_owned();
    let line = text.lines().rev().map(str::trim).find(|line| !line.is_empty()).unwrap_or("it said nothing").to_owned();
    match (runtime.code, runtime.signal) {
        (_, Some(signal)) => format!("the container's runtime was ended by signal {signal}: {line}"),
        (code, None) => format!("the container's runtime failed (exit code {}): {line}", code.unwrap_or(0)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_a_runtime_says_last_is_told() {
        let log = crate::spawner::memory_file("log", b"first\nno such bundle\n\n").expect("a file");
        let runtime = Exited { code: Some(1), ..Exited::default() };
        let behind = Behind { report: None, log: Some(log) };
        assert_eq!(said(behind.log.as_ref(), &runtime), "the container's runtime failed (exit code 1): no such bundle");
        assert!(said(None, &runtime).ends_with("it said nothing"));
    }

    #[test]
    fn without_a_report_codes_above_128_are_signals() {
        let of = |code| by_code(Exited { code: Some(code), ..Exited::default() });
        assert_eq!((of(137).code, of(137).signal), (None, Some(9)));
        assert_eq!((of(128).code, of(255).code, of(7).code), (Some(128), Some(255), Some(7)));
    }
}
