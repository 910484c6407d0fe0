//! The mount that shows a volume as one file.
//!
//! Owns opening the kernel's end, and mounting it on a file. What is mounted is the file itself: there is no directory, no name and no
//! second node. Does not own what the kernel asks on it (`session`).

use std::ffi::CString;
use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{FileType, Mode, OFlags};
use rustix::io::Errno;
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};

use super::wire::TRANSFER_BYTES_MAX;

/// A file with something mounted on it; not for longer than this lives, if this process may unmount.
#[derive(Debug)]
pub struct Mounted {
    path: PathBuf,
}

impl Mounted {
    /// Mounts on the file `path`, which is made if it is not there. The kernel asks on the descriptor, and does not let anybody in whom the
    /// file's mode does not.
    ///
    /// # Errors
    /// What the system says; usually that it takes root, or that there is no FUSE here. Also when `path` is no plain file.
    pub fn new(path: &Path, read_only: bool) -> io::Result<(Self, File)> {
        let kernel = File::options().read(true).write(true).open("/dev/fuse")?;
        let target = target(path)?;
        let options = format!(
            "fd={},rootmode=100000,user_id=0,group_id=0,allow_other,default_permissions,max_read={TRANSFER_BYTES_MAX}",
            kernel.as_raw_fd()
        );
        let options = CString::new(options).map_err(io::Error::other)?;
        let mut flags = MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC | MountFlags::NOATIME;
        flags.set(MountFlags::RDONLY, read_only);
        // Through the descriptor: whoever owns the directory may have put a link there since.
        let target = format!("/proc/self/fd/{}", target.as_raw_fd());
        mount("volley-volume", target.as_str(), "fuse.volley", flags, options.as_c_str())?;
        Ok((Self { path: path.to_owned() }, kernel))
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        // Without the right to it, or when somebody did it already, there is nothing to be done here.
        let _ = unmount(&self.path, UnmountFlags::DETACH | UnmountFlags::NOFOLLOW);
    }
}

/// The file to mount on; no link is followed to it.
fn target(path: &Path) -> io::Result<OwnedFd> {
    let mode = Mode::RUSR | Mode::WUSR;
    match rustix::fs::open(path, OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC, mode) {
        Ok(_) | Err(Errno::EXIST) => {}
        Err(e) => return Err(e.into()),
    }
    let opened = rustix::fs::open(path, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty())?;
    if FileType::from_raw_mode(rustix::fs::fstat(&opened)?.st_mode) != FileType::RegularFile {
        return Err(io::Error::new(io::ErrorKind::AlreadyExists, "there is something that is no plain file"));
    }
    Ok(opened)
}
