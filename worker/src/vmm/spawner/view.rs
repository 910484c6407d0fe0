//! What VMMs see of the host.
//!
//! Owns the spawner's namespaces and the few mounts in them: programs and libraries read-only, their own /proc, four devices, and a
//! directory in memory where each VMM has one of its own. One view serves all VMMs: they are kept apart by their users, because a mount
//! namespace for each is copied mount by mount, and that is dear where many start at once. All of it goes with the last process in it.

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::symlink;
use std::path::Path;

use rustix::fs::{FileType, Mode, OFlags};
use rustix::mount::{MountFlags, MountPropagationFlags, UnmountFlags};
use rustix::thread::UnshareFlags;

/// Where the processes' directories are, in the view.
pub const MACHINES: &str = "/m";
/// How [`leave`] names the mounts that it could not leave.
pub const FILES: &str = "a view of the host's files";
/// What the directory in memory holds at most: sockets and mount points, a few a process.
const ROOT_OPTIONS: &std::ffi::CStr = c"mode=0755,size=16m,nr_inodes=65536";
/// Where the view is put together: a directory that every host has, and that nothing here reads.
const PLACES: [&str; 2] = ["/tmp", "/sys"];
/// Devices: those of every program, and KVM. Name, major and minor number (Documentation/admin-guide/devices.txt of Linux).
const DEVICES: [(&str, u32, u32); 4] = [("null", 1, 3), ("zero", 1, 5), ("urandom", 1, 9), ("kvm", 10, 232)];
/// Libraries and programs, on hosts where these are links into /usr and where they are not.
const DIRS: [&str; 5] = ["lib", "lib64", "lib32", "bin", "sbin"];

/// Leaves the host's namespaces; what can't be left is named. Before the spawner's own process is forked, which is the first of its
/// namespace of processes: when it ends, the kernel ends all others in there.
pub fn leave() -> Vec<String> {
    let mut missing = Vec::new();
    let root = rustix::process::geteuid().is_root();
    let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    // SAFETY: a process of one thread, whose file descriptors and root directory stay what they were.
    let unshare = |flags| unsafe { rustix::thread::unshare_unsafe(flags) };
    if !root {
        let mapped = unshare(UnshareFlags::NEWUSER).map_err(io::Error::from).and_then(|()| {
            fs::write("/proc/self/setgroups", "deny")?;
            fs::write("/proc/self/uid_map", format!("0 {uid} 1"))?;
            fs::write("/proc/self/gid_map", format!("0 {gid} 1"))
        });
        missing.push("a user for each machine (the worker is not root)".to_owned());
        if let Err(e) = mapped {
            missing.push(format!("a user namespace: {e}"));
        }
    }
    for (flag, what) in [
        (UnshareFlags::NEWNS, FILES),
        (UnshareFlags::NEWNET, "an empty network"),
        (UnshareFlags::NEWIPC, "shared memory of its own"),
        (UnshareFlags::NEWUTS, "a host name of its own"),
        (UnshareFlags::NEWPID, "processes of its own"),
    ] {
        if let Err(e) = unshare(flag) {
            missing.push(format!("{what}: {e}"));
        }
    }
    missing
}

/// Enters the view. In the first process of the new namespaces. `own_mounts`: the mounts are this process's alone.
///
/// # Errors
/// What the system says, and at which step.
pub fn enter(own_mounts: bool) -> Result<OwnedFd, String> {
    if !own_mounts {
        return Err("no mount namespace of its own".to_owned());
    }
    let at = |what: String| move |e: io::Error| format!("{what}: {e}");
    let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
    rustix::mount::mount_change("/", private).map_err(|e| at("making mounts private".to_owned())(e.into()))?;
    let place = PLACES.into_iter().map(Path::new).find(|place| place.is_dir()).ok_or("neither /tmp nor /sys is there")?;
    let mount = |kind: &str, target: &Path, flags, options: &std::ffi::CStr| {
        rustix::mount::mount(kind, target, kind, flags, options).map_err(|e| at(format!("mounting {}", target.display()))(e.into()))
    };
    mount("tmpfs", place, MountFlags::NOSUID, ROOT_OPTIONS)?;
    for dir in ["usr", "proc", "dev", "etc", "m", "old"] {
        fs::create_dir(place.join(dir)).map_err(at(format!("making {dir}")))?;
    }
    let mode = |dir: &str, mode| fs::set_permissions(place.join(dir), std::os::unix::fs::PermissionsExt::from_mode(mode));
    // Who has a directory there passes; nobody lists.
    mode("m", 0o711).map_err(at("opening the way to the directories".to_owned()))?;
    bind_read_only(Path::new("/usr"), &place.join("usr"))?;
    for dir in DIRS {
        let (from, to) = (Path::new("/").join(dir), place.join(dir));
        if let Ok(target) = fs::read_link(&from) {
            symlink(target, &to).map_err(at(format!("linking {dir}")))?;
        } else if from.is_dir() {
            fs::create_dir(&to).map_err(at(format!("making {dir}")))?;
            bind_read_only(&from, &to)?;
        }
    }
    // Without it libraries are looked for in their usual places only.
    let _ = fs::copy("/etc/ld.so.cache", place.join("etc/ld.so.cache"));
    let flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    mount("proc", &place.join("proc"), flags, c"hidepid=2,subset=pid").or_else(|_| mount("proc", &place.join("proc"), flags, c""))?;
    for (name, major, minor) in DEVICES {
        make_device(&place.join("dev").join(name), name, major, minor).map_err(at(format!("making the device {name}")))?;
    }
    let turned = rustix::process::pivot_root(place, place.join("old").as_path())
        .and_then(|()| rustix::process::chdir("/"))
        .and_then(|()| rustix::mount::unmount("/old", UnmountFlags::DETACH));
    turned.map_err(|e| at("entering the view".to_owned())(e.into()))?;
    let _ = fs::remove_dir("/old");
    let opened = rustix::fs::open(MACHINES, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty());
    opened.map_err(|e| at(format!("opening {MACHINES}"))(e.into()))
}

fn bind_read_only(from: &Path, to: &Path) -> Result<(), String> {
    let flags = MountFlags::BIND | MountFlags::RDONLY | MountFlags::NOSUID | MountFlags::NODEV;
    rustix::mount::mount_bind(from, to)
        .and_then(|()| rustix::mount::mount_remount(to, flags, c""))
        .map_err(|e| format!("showing {}: {}", from.display(), io::Error::from(e)))
}

/// A device with a name that everybody may open: what it can do is the kernel's to bound. KVM only where the host has it.
fn make_device(path: &Path, name: &str, major: u32, minor: u32) -> io::Result<()> {
    let host = Path::new("/dev").join(name);
    if !host.exists() {
        return Ok(());
    }
    let mode = Mode::RUSR | Mode::WUSR | Mode::RGRP | Mode::WGRP | Mode::ROTH | Mode::WOTH;
    match rustix::fs::mknodat(rustix::fs::CWD, path, FileType::CharacterDevice, mode, rustix::fs::makedev(major, minor)) {
        // The mask of this process does not count here.
        Ok(()) => Ok(rustix::fs::chmod(path, mode)?),
        // Without root no devices are made; the host's is shown instead.
        Err(_) => {
            fs::write(path, "")?;
            Ok(rustix::mount::mount_bind(&host, path)?)
        }
    }
}
