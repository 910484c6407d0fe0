//! An image's root disk as a block device.
//!
//! Owns attaching it (read-only; the kernel lets go of it with the last mount, also when this process dies) and reading the image's users
//! from it. Does not own mounting it into containers (`spawner/container`): all mounts of one device share what was read of it.

use std::fs::File;
use std::io::{self, Read};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;

use rustix::fs::{Mode, OFlags, ResolveFlags};
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags};

/// `LOOP_CTL_GET_FREE` and `LOOP_CONFIGURE` of linux/loop.h (Linux 5.8).
const LOOP_CTL_GET_FREE: libc::Ioctl = 0x4C82;
const LOOP_CONFIGURE: libc::Ioctl = 0x4C0A;
/// `LO_FLAGS_READ_ONLY` and `LO_FLAGS_AUTOCLEAR` there.
const FLAGS: u32 = 1 | 4;
/// A free device may be taken by somebody else before we have it.
const TRIES: u32 = 16;
/// Most bytes of an image's list of users or groups.
const LIST_BYTES_MAX: u64 = 1 << 20;

/// `struct loop_info64`, in which all we set are the flags.
#[repr(C)]
struct LoopInfo {
    numbers: [u64; 5],
    number: u32,
    encrypt: [u32; 2],
    flags: u32,
    texts: [u8; 160],
    init: [u64; 2],
}

/// `struct loop_config`.
#[repr(C)]
struct LoopConfig {
    fd: u32,
    block_size: u32,
    info: LoopInfo,
    reserved: [u64; 8],
}

/// A disk that is attached.
#[derive(Debug)]
pub struct ImageDisk {
    /// Its device.
    pub device: String,
    /// The image's `/etc/passwd`; empty when it has none.
    pub passwd: String,
    /// Its `/etc/group`.
    pub group: String,
    _held: OwnedFd,
}

impl ImageDisk {
    /// Attaches a disk.
    ///
    /// # Errors
    /// What the system says; usually that this takes root, or that there are no loop devices here.
    pub fn attach(path: &Path) -> io::Result<Self> {
        let file = File::open(path)?;
        let control = File::options().read(true).write(true).open("/dev/loop-control")?;
        let mut tries = 0;
        let (device, held) = loop {
            // SAFETY: a plain request without an argument.
            let number = unsafe { libc::ioctl(control.as_raw_fd(), LOOP_CTL_GET_FREE) };
            if number < 0 {
                return Err(io::Error::last_os_error());
            }
            let device = format!("/dev/loop{number}");
            let held = File::options().read(true).open(&device)?;
            match configure(&held, &file) {
                Ok(()) => break (device, held),
                Err(e) if e.raw_os_error() == Some(libc::EBUSY) && tries < TRIES => tries += 1,
                Err(e) => return Err(e),
            }
        };
        let (passwd, group) = lists(&device)?;
        Ok(Self { device, passwd, group, _held: held.into() })
    }
}

fn configure(device: &File, file: &File) -> io::Result<()> {
    let info = LoopInfo { numbers: [0; 5], number: 0, encrypt: [0; 2], flags: FLAGS, texts: [0; 160], init: [0; 2] };
    let config = LoopConfig { fd: file.as_raw_fd().cast_unsigned(), block_size: 0, info, reserved: [0; 8] };
    // SAFETY: the structure is the kernel's, and lives as long as the call.
    if unsafe { libc::ioctl(device.as_raw_fd(), LOOP_CONFIGURE, &raw const config) } < 0 {
        return Err(io::Error::last_os_error());
    }
    Ok(())
}

/// The image's users and groups, read through a mount that is nowhere. No link in the image leads out of it.
fn lists(device: &str) -> io::Result<(String, String)> {
    let opened = rustix::mount::fsopen("erofs", FsOpenFlags::FSOPEN_CLOEXEC)?;
    rustix::mount::fsconfig_set_string(&opened, "source", device)?;
    rustix::mount::fsconfig_set_flag(&opened, "ro")?;
    rustix::mount::fsconfig_create(&opened)?;
    let closed = MountAttrFlags::MOUNT_ATTR_RDONLY
        | MountAttrFlags::MOUNT_ATTR_NOSUID
        | MountAttrFlags::MOUNT_ATTR_NODEV
        | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    let root = rustix::mount::fsmount(&opened, FsMountFlags::FSMOUNT_CLOEXEC, closed)?;
    let read = |path: &str| -> io::Result<String> {
        let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
        let file = match rustix::fs::openat2(&root, path, flags, Mode::empty(), resolve) {
            Ok(file) => File::from(file),
            Err(rustix::io::Errno::NOENT | rustix::io::Errno::NOTDIR) => return Ok(String::new()),
            Err(e) => return Err(e.into()),
        };
        if !file.metadata()?.is_file() {
            return Ok(String::new());
        }
        let mut bytes = Vec::new();
        file.take(LIST_BYTES_MAX).read_to_end(&mut bytes)?;
        Ok(String::from_utf8_lossy(&bytes).into_owned())
    };
    Ok((read("etc/passwd")?, read("etc/group")?))
}
