//! Disks that come and go while the machine runs, and holding writes to them.
//!
//! Owns finding a disk, checking its size, mounting and unmounting. The slot's disk was another one when the machine was saved, and the
//! kernel learns of the new size some moments after the host changed it.

use std::ffi::CString;
use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::Mode;
use rustix::mount::{MountFlags, UnmountFlags};
use volley_jobspecs::wire::guest::{Answer, Dir, Disk, Furnish, Mount, Refusal, RefusalKind, User};

use super::session::refused;
use super::users;
use crate::{files, mountinfo};

/// How long a disk's new size is waited for; it takes a few milliseconds.
const SIZE_WAIT: Duration = Duration::from_secs(2);
/// Between looks.
const SIZE_LOOK: Duration = Duration::from_millis(2);
/// Unit of sizes in /sys/block, in bytes, whatever the disk's own blocks are.
const SECTOR_BYTES: u64 = 512;
/// `_IOWR('X', 119, int)` and `_IOWR('X', 120, int)` of linux/fs.h.
const FIFREEZE: libc::c_ulong = 0xC004_5877;
const FITHAW: libc::c_ulong = 0xC004_5878;
/// `_IOW('f', 16, __u64)` of fs/ext4/ext4.h.
const EXT4_IOC_RESIZE_FS: libc::c_ulong = 0x4008_6610;

/// Mounts a disk.
pub fn mount(mount: &Mount) -> Answer {
    let name = match find(&mount.disk) {
        Some(name) => name,
        None => return Answer::Refused(Refusal::new(RefusalKind::NotFound, format!("there is no disk {:?}", mount.disk))),
    };
    let size = wait_for_size(&name, mount.bytes);
    if size != mount.bytes {
        let text = format!("disk {name} has {size} bytes, not {}", mount.bytes);
        return Answer::Refused(Refusal::new(RefusalKind::System, text));
    }
    match try_mount(&name, mount) {
        Ok(()) => Answer::Done,
        Err(e) => refused(format_args!("mounting {name} ({}) at {}", mount.fs, mount.target), &e),
    }
}

fn try_mount(name: &str, mount: &Mount) -> io::Result<()> {
    make_place(Path::new(&mount.target))?;
    let mut flags = MountFlags::NOSUID | MountFlags::NODEV;
    if mount.read_only {
        flags |= MountFlags::RDONLY;
    }
    let options: Option<&std::ffi::CStr> = None;
    rustix::mount::mount(format!("/dev/{name}"), &mount.target, &mount.fs, flags, options)?;
    if mount.grow && !mount.read_only {
        grow(Path::new(&mount.target), mount.bytes)?;
    }
    if let Some((uid, gid)) = mount.owner.filter(|_| !mount.read_only) {
        std::os::unix::fs::chown(&mount.target, Some(uid), Some(gid))?;
    }
    Ok(())
}

/// Makes an ext4 file system as large as its disk. One that is so already is left as it is.
fn grow(target: &Path, bytes: u64) -> io::Result<()> {
    let dir = File::open(target)?;
    let block = u64::try_from(rustix::fs::fstatfs(&dir)?.f_bsize).unwrap_or_default();
    let blocks = bytes.checked_div(block).ok_or(io::ErrorKind::InvalidData)?;
    // SAFETY: the request reads one number, which lives as long as the call.
    let result = unsafe { libc::ioctl(dir.as_raw_fd(), EXT4_IOC_RESIZE_FS, &raw const blocks) };
    if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
}

/// Mounts a disk and makes directories on it.
pub fn furnish(furnish: &Furnish) -> Answer {
    let owner = match &furnish.user {
        None => None,
        Some(User::Ids { uid, gid, .. }) => Some((*uid, *gid)),
        Some(User::Named(name)) => match users::find(name) {
            Some(ids) => Some((ids.uid, ids.gid)),
            None => return Answer::Refused(Refusal::new(RefusalKind::NoUser, format!("there is no user {name}"))),
        },
    };
    match mount(&furnish.mount) {
        Answer::Done => {}
        refused => return refused,
    }
    for dir in &furnish.dirs {
        if let Err(e) = make(Path::new(&furnish.mount.target), dir, owner) {
            return refused(format_args!("making {} on a disk", dir.name), &e);
        }
    }
    Answer::Furnished { owner }
}

fn make(top: &Path, dir: &Dir, owner: Option<(u32, u32)>) -> io::Result<()> {
    if dir.name.is_empty() || dir.name.starts_with('.') || dir.name.contains('/') {
        return Err(io::ErrorKind::InvalidInput.into());
    }
    let path = top.join(&dir.name);
    fs::create_dir_all(&path)?;
    if let Some((uid, gid)) = owner {
        std::os::unix::fs::chown(&path, Some(uid), Some(gid))?;
    }
    // Behind the owner, which takes bits away; and whatever the umask is.
    rustix::fs::chmod(&path, Mode::from_raw_mode(dir.mode))?;
    if let Some(also) = &dir.also {
        make_place(Path::new(also))?;
        rustix::mount::mount_bind(&path, also)?;
    }
    Ok(())
}

/// A directory to mount on. What an image or a warm-up has of that name and is none gives way, as in a container.
pub fn make_place(path: &Path) -> io::Result<()> {
    if fs::metadata(path).is_ok_and(|there| there.is_dir()) {
        return Ok(());
    }
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => return Err(e),
        _ => {}
    }
    fs::create_dir_all(path)
}

/// Its name among the kernel's disks.
fn find(disk: &Disk) -> Option<String> {
    match disk {
        // No way out of /sys/block.
        Disk::Named(name) => (!name.contains('/') && !name.starts_with('.') && size(name).is_some()).then(|| name.clone()),
        Disk::Serial(serial) => {
            let mut names: Vec<String> =
                fs::read_dir("/sys/block").ok()?.flatten().filter_map(|entry| entry.file_name().into_string().ok()).collect();
            names.sort();
            names.into_iter().find(|name| fs::read_to_string(format!("/sys/block/{name}/serial")).is_ok_and(|text| text.trim() == serial))
        }
    }
}

fn size(name: &str) -> Option<u64> {
    let sectors: u64 = fs::read_to_string(format!("/sys/block/{name}/size")).ok()?.trim().parse().ok()?;
    sectors.checked_mul(SECTOR_BYTES)
}

fn wait_for_size(name: &str, bytes: u64) -> u64 {
    let deadline = Instant::now() + SIZE_WAIT;
    loop {
        let now = size(name).unwrap_or_default();
        if now == bytes || Instant::now() >= deadline {
            return now;
        }
        std::thread::sleep(SIZE_LOOK);
    }
}

/// Writes out and unmounts.
pub fn unmount(target: &str) -> Answer {
    match rustix::mount::unmount(target, UnmountFlags::NOFOLLOW) {
        Ok(()) => Answer::Done,
        Err(e) => refused(format_args!("unmounting {target}"), &e.into()),
    }
}

/// Holds writes to a file system, or lets them go on.
pub fn freeze(target: &str, on: bool) -> Answer {
    let what = if on { "freezing" } else { "thawing" };
    let done = File::open(Path::new(target)).and_then(|dir| {
        let request = if on { FIFREEZE } else { FITHAW };
        // SAFETY: these requests ignore their argument.
        let result = unsafe { libc::ioctl(dir.as_raw_fd(), request, 0) };
        if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) }
    });
    match done {
        Ok(()) => Answer::Done,
        Err(e) => refused(format_args!("{what} {target}"), &e),
    }
}

/// Has everything on a disk that was written to its file system, and holds whatever would be written yet. The file system is found by its disk: whoever
/// runs here may have mounted it elsewhere too, or something else in its place.
pub fn settle(disk: &Disk) -> Answer {
    let Some(name) = find(disk) else {
        return Answer::Refused(Refusal::new(RefusalKind::NotFound, format!("there is no disk {disk:?}")));
    };
    match try_settle(&name) {
        Ok(()) => Answer::Done,
        Err(e) => refused(format_args!("writing out what is on {name}"), &e),
    }
}

fn try_settle(name: &str) -> io::Result<()> {
    let number = fs::read_to_string(format!("/sys/block/{name}/dev"))?;
    let number = number.trim();
    let device = number.split_once(':').and_then(|(major, minor)| Some(rustix::fs::makedev(major.parse().ok()?, minor.parse().ok()?)));
    let mounts = fs::read_to_string("/proc/self/mountinfo")?;
    let of_disk = mounts.lines().filter_map(mountinfo::read).filter(|mounted| mounted.device == number);
    for place in of_disk.map(|mounted| mounted.place) {
        // What lies above it hides it; then it is found at another place, or not unmounted, which is told below.
        let Ok(dir) = File::open(place) else { continue };
        if rustix::fs::fstat(&dir).is_ok_and(|found| Some(found.st_dev) == device) {
            // SAFETY: this request ignores its argument.
            let result = unsafe { libc::ioctl(dir.as_raw_fd(), FIFREEZE, 0) };
            return match io::Error::last_os_error() {
                // The task froze it itself.
                busy if result < 0 && busy.raw_os_error() == Some(libc::EBUSY) => Ok(()),
                e if result < 0 => Err(e),
                _ => Ok(()),
            };
        }
    }
    // Not mounted any more: what was written is on its way. Nobody else can have it, or this is refused.
    let flags = rustix::fs::OFlags::RDWR | rustix::fs::OFlags::EXCL | rustix::fs::OFlags::CLOEXEC;
    let disk = rustix::fs::open(format!("/dev/{name}"), flags, Mode::empty())?;
    Ok(rustix::fs::fsync(disk)?)
}

/// Writes out, unmounts what was mounted from a disk, and switches the machine off. Does not come back when that works.
///
/// # Errors
/// What the system says.
pub fn switch_off() -> io::Result<()> {
    rustix::fs::sync();
    let mounts = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    for line in mounts.lines().rev().filter(|line| line.starts_with("/dev/")) {
        if let Some(target) = line.split(' ').nth(1).and_then(|target| CString::new(target).ok()) {
            // One that is in use is made read-only by the kernel's own care: it was written out above.
            let _ = rustix::mount::unmount(target.as_c_str(), UnmountFlags::DETACH);
        }
    }
    Ok(rustix::system::reboot(rustix::system::RebootCommand::PowerOff)?)
}

/// Is the file system full, rather than broken?
pub fn kind_of(e: &io::Error) -> RefusalKind {
    if files::is_full(e) { RefusalKind::NoSpace } else { RefusalKind::System }
}
