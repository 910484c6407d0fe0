//! A volume's file system, mounted on this host: for processes and containers.
//!
//! Owns loop devices, mounting and unmounting, and growing what is mounted. Calls block. Does not own the file below (`file`), nor whether this host may mount it at all
//! (`VolumeError::GuestWritten`).

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use volley_guest::mountinfo::{self, Mounted};

/// How long something that was in use a moment ago may take to be free: what was killed lets go of its files, and the kernel of the loop device.
const BUSY_WAIT: Duration = Duration::from_secs(10);
/// Between two tries.
const BUSY_PAUSE: Duration = Duration::from_millis(10);
/// How often a free loop device is asked for: others on the host ask too.
const LOOP_TRIES: u32 = 64;
/// `LOOP_CTL_GET_FREE` and `LOOP_CONFIGURE` of linux/loop.h (the latter since Linux 5.8).
const LOOP_CTL_GET_FREE: libc::c_ulong = 0x4C82;
const LOOP_CONFIGURE: libc::c_ulong = 0x4C0A;
/// `LO_FLAGS_AUTOCLEAR` (it goes with its last user) and `LO_FLAGS_DIRECT_IO` (what is cached is cached once).
const LOOP_FLAGS: u32 = 4 | 16;
/// Bytes of a block of the loop device: what the disks of machines have.
const LOOP_BLOCK_BYTES: u32 = 512;
/// `EXT4_IOC_RESIZE_FS`: `_IOW('f', 16, __u64)`.
const EXT4_IOC_RESIZE_FS: libc::c_ulong = 0x4008_6610;

/// `struct loop_info64` of linux/loop.h.
#[repr(C)]
#[derive(Default)]
struct LoopInfo {
    device: u64,
    inode: u64,
    rdevice: u64,
    offset: u64,
    size_limit: u64,
    number: u32,
    encrypt_type: u32,
    encrypt_key_bytes: u32,
    flags: u32,
    /// `lo_file_name`, `lo_crypt_name` and `lo_encrypt_key`, in words.
    names: [u64; 20],
    init: [u64; 2],
}

/// `struct loop_config` of linux/loop.h.
#[repr(C)]
#[derive(Default)]
struct LoopConfig {
    fd: u32,
    block_bytes: u32,
    info: LoopInfo,
    reserved: [u64; 8],
}

/// What failed.
#[derive(Debug, thiserror::Error)]
pub enum MountError {
    /// A call.
    #[error("{what}: {source}")]
    Io {
        /// What was done.
        what: &'static str,
        /// The system's words.
        source: io::Error,
    },
    /// Somebody uses it.
    #[error("{what}: {source}")]
    Busy {
        /// What was done.
        what: &'static str,
        /// The system's words.
        source: io::Error,
    },
    /// Growing what is mounted takes CAP_SYS_RESOURCE, or the file system can't be grown while it is mounted.
    #[error("this process may not grow a file system that is mounted")]
    NotMounted,
    /// What was written is not all on the disk.
    #[error("the file system has met {0} errors of its disk")]
    Damaged(u64),
}

fn at(what: &'static str) -> impl Fn(io::Error) -> MountError {
    move |source| MountError::Io { what, source }
}

/// A file system that is mounted. It stays when this is dropped: see [`Tree::unmount`] and [`Tree::drop_it`].
#[derive(Debug)]
pub struct Tree {
    dir: PathBuf,
    /// The loop device's name, such as `loop3`.
    device: String,
    /// Open since before anything was written: it hears of every write that failed.
    root: File,
}

impl Tree {
    /// Mounts what is in `file`, a disk with ext4, on the directory `dir`. The journal is replayed, so that even what is read only is whole.
    ///
    /// # Errors
    /// [`MountError`]; nothing is left.
    pub fn mount(file: &Path, dir: &Path, read_only: bool) -> Result<Self, MountError> {
        let (device, held) = attach(file)?;
        let mut flags = MountFlags::NOSUID | MountFlags::NODEV;
        flags.set(MountFlags::RDONLY, read_only);
        // What the disk never had written is zeros: tables need not be written as such.
        mount(Path::new("/dev").join(&device), dir, "ext4", flags, c"noinit_itable")
            .map_err(|e| at("mounting the file system")(e.into()))?;
        drop(held);
        let root = File::open(dir).map_err(|e| {
            let _ = unmount(dir, UnmountFlags::DETACH);
            at("opening what is mounted")(e)
        })?;
        Ok(Self { dir: dir.to_owned(), device, root })
    }

    /// Makes the file system as large as its disk.
    ///
    /// # Errors
    /// [`MountError::NotMounted`], [`MountError::Io`].
    pub fn grow(&self, disk_bytes: u64) -> Result<(), MountError> {
        let stat = rustix::fs::fstatvfs(&self.root).map_err(|e| at("looking at what is mounted")(e.into()))?;
        let blocks = disk_bytes / stat.f_bsize.max(1);
        // SAFETY: it reads one number of 64 bits, which lives until it returns.
        let done = unsafe { libc::ioctl(self.root.as_raw_fd(), EXT4_IOC_RESIZE_FS as _, &raw const blocks) };
        match (done, io::Error::last_os_error()) {
            (0, _) => Ok(()),
            (_, e) if e.kind() == io::ErrorKind::PermissionDenied => Err(MountError::NotMounted),
            (_, e) => Err(at("growing the file system")(e)),
        }
    }

    /// Unmounts, when everything that was written has reached the disk. Whoever uses it is left alone, and it is unmounted when they let go: that is an error then.
    ///
    /// # Errors
    /// [`MountError`].
    pub fn unmount(self) -> Result<(), MountError> {
        let Self { dir, device, root } = self;
        let synced = rustix::fs::syncfs(&root).map_err(|e| at("writing out the file system")(e.into()));
        // A read-only one has none, and one that was unmounted neither.
        let errors = std::fs::read_to_string(format!("/sys/fs/ext4/{device}/errors_count")).ok().and_then(|n| n.trim().parse().ok());
        drop(root);
        let unmounted = until_free(|| unmount(&dir, UnmountFlags::NOFOLLOW));
        if unmounted.is_err() {
            let _ = unmount(&dir, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW);
        }
        synced?;
        match unmounted {
            Ok(()) => errors.filter(|errors| *errors > 0).map_or(Ok(()), |errors| Err(MountError::Damaged(errors))),
            Err(source) if source.raw_os_error() == Some(libc::EBUSY) => Err(MountError::Busy { what: "unmounting", source }),
            Err(source) => Err(at("unmounting")(source)),
        }
    }

    /// Unmounts; what was written is wanted by nobody.
    pub fn drop_it(self) {
        let Self { dir, root, .. } = self;
        drop(root);
        if unmount(&dir, UnmountFlags::NOFOLLOW).is_err() {
            let _ = unmount(&dir, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW);
        }
    }
}

/// Unmounts a file on which a volume is shown; what uses it is the kernel's loop device, which lets go of it soon.
///
/// # Errors
/// [`MountError`].
pub fn unmount_file(file: &Path) -> Result<(), MountError> {
    match until_free(|| unmount(file, UnmountFlags::NOFOLLOW)) {
        Ok(()) => Ok(()),
        // It is not mounted: whoever showed it has ended.
        Err(e) if e.raw_os_error() == Some(libc::EINVAL) => Ok(()),
        Err(source) => {
            abort_file(file);
            Err(MountError::Busy { what: "unmounting its file", source })
        }
    }
}

/// Ends what shows a volume as a file: whoever still reads or writes it is told of errors, and so is what waits for a server that is gone.
pub fn abort_file(file: &Path) {
    let _ = unmount(file, UnmountFlags::FORCE | UnmountFlags::NOFOLLOW);
    let _ = unmount(file, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW);
}

fn until_free(try_it: impl Fn() -> Result<(), Errno>) -> io::Result<()> {
    let begin = Instant::now();
    loop {
        match try_it() {
            Err(Errno::BUSY) if begin.elapsed() < BUSY_WAIT => std::thread::sleep(BUSY_PAUSE),
            done => return Ok(done?),
        }
    }
}

/// A loop device on a file, which goes when nobody uses it: its name, and the device opened.
fn attach(file: &Path) -> Result<(String, File), MountError> {
    let below = File::options().read(true).write(true).open(file).map_err(at("opening the volume's file"))?;
    let control = File::options().read(true).write(true).open("/dev/loop-control").map_err(at("opening /dev/loop-control"))?;
    for _ in 0..LOOP_TRIES {
        // SAFETY: it takes no argument.
        let number = unsafe { libc::ioctl(control.as_raw_fd(), LOOP_CTL_GET_FREE as _) };
        if number < 0 {
            return Err(at("finding a free loop device")(io::Error::last_os_error()));
        }
        let name = format!("loop{number}");
        let device = File::options().read(true).write(true).open(Path::new("/dev").join(&name)).map_err(at("opening a loop device"))?;
        let info = LoopInfo { flags: LOOP_FLAGS, ..LoopInfo::default() };
        let fd = below.as_raw_fd().cast_unsigned();
        let config = LoopConfig { fd, block_bytes: LOOP_BLOCK_BYTES, info, ..LoopConfig::default() };
        // SAFETY: it reads one such structure, which lives until it returns.
        let done = unsafe { libc::ioctl(device.as_raw_fd(), LOOP_CONFIGURE as _, &raw const config) };
        if done == 0 {
            return Ok((name, device));
        }
        match io::Error::last_os_error() {
            // Somebody else was given the same one.
            e if e.raw_os_error() == Some(libc::EBUSY) => {}
            e => return Err(at("setting up a loop device")(e)),
        }
    }
    Err(at("finding a free loop device")(io::ErrorKind::ResourceBusy.into()))
}

/// Unmounts everything below a directory, which a worker before this one left: nobody uses it any more, and nothing of it is wanted.
///
/// # Errors
/// The list of mounts can't be read.
pub fn clear_below(dir: &Path) -> io::Result<()> {
    let table = std::fs::read_to_string("/proc/self/mountinfo")?;
    let mut below: Vec<Mounted<'_>> = table.lines().filter_map(mountinfo::read).filter(|found| found.place.starts_with(dir)).collect();
    // What waits for a server that is gone goes on, with errors.
    for found in below.iter().filter(|found| found.kind.starts_with("fuse")) {
        let _ = unmount(&found.place, UnmountFlags::FORCE | UnmountFlags::NOFOLLOW);
    }
    while let Some(Mounted { place: path, .. }) = below.pop() {
        if let Err(e) = unmount(&path, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW) {
            tracing::warn!(path = %path.display(), error = %e, "what a worker before this one had mounted can't be unmounted");
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_kernels_structures_have_its_sizes() {
        assert_eq!((size_of::<LoopInfo>(), size_of::<LoopConfig>()), (232, 304));
    }
}
