//! Mounts that one task is shown, in its shim's own namespace of mounts.
//!
//! Owns putting them where the task finds them, with the owners that it is to see, and taking them away when nothing of it runs any more. They
//! come as descriptors of mounts that are nowhere yet, and are in no other namespace: the worker never finds a volume's files among a task's, and
//! nothing is left when a shim dies. Does not own what is mounted (`mounts` of the worker), nor a container's root (`container`).

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Component, Path, PathBuf};

use rustix::fs::{AtFlags, Gid, Mode, OFlags, ResolveFlags, Uid};
use rustix::io::Errno;
use rustix::mount::{MoveMountFlags, UnmountFlags};
use volley_guest::mountinfo;

use super::proto::ShowMount;
use crate::beneath;

/// `MOUNT_ATTR_RDONLY` of linux/mount.h.
const MOUNT_ATTR_RDONLY: u64 = 0x0000_0001;
/// `MOUNT_ATTR_IDMAP` of the same.
const MOUNT_ATTR_IDMAP: u64 = 0x0010_0000;
/// Mode of the directories that lead to a mount, where there are none.
const MODE: u32 = 0o755;

/// `struct mount_attr` of linux/mount.h.
#[repr(C)]
#[derive(Default)]
struct MountAttr {
    attr_set: u64,
    attr_clr: u64,
    propagation: u64,
    userns_fd: u64,
}

/// Below what the paths of a task's mounts lie.
#[derive(Debug, Clone, Copy)]
pub enum Top<'a> {
    /// The task's own directory, in which no part of the way may be a link.
    Work(&'a Path),
    /// A container's root. Links of its image are followed as the container would.
    Root(&'a Path),
}

/// What a task is shown, until this goes.
#[derive(Debug, Default)]
pub struct Shown(Vec<OwnedFd>);

impl Shown {
    /// Puts each of `mounts` where it says. `trees` are the mounts, in the same order; `owner` gets the directories that are made for them.
    ///
    /// # Errors
    /// What could not be done, in words. Nothing is shown then.
    pub fn place(mounts: &[ShowMount], trees: Vec<OwnedFd>, top: Top<'_>, owner: Option<(u32, u32)>) -> Result<Self, String> {
        if mounts.len() != trees.len() {
            return Err(format!("{} mounts came for {} places", trees.len(), mounts.len()));
        }
        let mut shown = Self::default();
        for (mount, tree) in mounts.iter().zip(trees) {
            let failed = |what: &str, e: &io::Error| format!("showing a volume at {}: {what}: {e}", mount.path);
            change(&tree, mount).map_err(|e| failed("with the task's users as its owners (Linux 5.12 or newer)", &e))?;
            let to = open(top, Path::new(&mount.path), owner).map_err(|e| failed("making the directory", &e))?;
            let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH | MoveMountFlags::MOVE_MOUNT_T_EMPTY_PATH;
            rustix::mount::move_mount(&tree, "", &to, "", flags).map_err(|e| failed("mounting", &e.into()))?;
            shown.0.push(tree);
        }
        Ok(shown)
    }
}

impl Drop for Shown {
    fn drop(&mut self) {
        for tree in self.0.drain(..) {
            // By what is open: the task may have moved what it lies in. It is gone with the last who uses it, and nobody does any more.
            let _ = rustix::mount::unmount(format!("/proc/self/fd/{}", tree.as_raw_fd()), UnmountFlags::DETACH);
        }
    }
}

fn change(tree: &OwnedFd, mount: &ShowMount) -> io::Result<()> {
    if mount.read_only {
        set(tree, &MountAttr { attr_set: MOUNT_ATTR_RDONLY, ..MountAttr::default() })?;
    }
    if mount.users.is_empty() {
        return Ok(());
    }
    show_owners_as(tree, &mount.users, &mount.groups)
}

/// Shows the files of a mount that is nowhere yet as others' than they are: on it, and as shown.
///
/// # Errors
/// What the system says.
pub fn show_owners_as(tree: &OwnedFd, users: &[(u32, u32)], groups: &[(u32, u32)]) -> io::Result<()> {
    let names = user_namespace(users, groups)?;
    let userns_fd = u64::try_from(names.as_raw_fd()).unwrap_or(0);
    set(tree, &MountAttr { attr_set: MOUNT_ATTR_IDMAP, userns_fd, ..MountAttr::default() })
}

fn set(tree: &OwnedFd, attributes: &MountAttr) -> io::Result<()> {
    // SAFETY: the structure is the kernel's, of the size that is said, and lives as long as the call.
    let set = unsafe {
        libc::syscall(
            libc::SYS_mount_setattr,
            tree.as_raw_fd(),
            c"".as_ptr(),
            libc::AT_EMPTY_PATH,
            std::ptr::from_ref(attributes),
            size_of::<MountAttr>(),
        )
    };
    if set < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

/// Opens a directory below a top; makes what is missing on the way.
fn open(top: Top<'_>, path: &Path, owner: Option<(u32, u32)>) -> io::Result<OwnedFd> {
    match top {
        Top::Work(dir) => beneath::make_dirs(&beneath::root(dir)?, path, MODE, owner),
        Top::Root(dir) => open_in_root(&beneath::root(dir)?, path, owner),
    }
}

/// The same in a container's root: the kernel itself keeps the way within it, wherever the image's links lead.
fn open_in_root(top: &OwnedFd, path: &Path, owner: Option<(u32, u32)>) -> io::Result<OwnedFd> {
    let resolve = ResolveFlags::IN_ROOT | ResolveFlags::NO_MAGICLINKS;
    let open = |path: &Path| rustix::fs::openat2(top, path, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty(), resolve);
    let (mut way, mut dir) = (PathBuf::new(), None);
    for part in path.components() {
        match part {
            Component::RootDir | Component::CurDir => continue,
            Component::Normal(name) => way.push(name),
            Component::ParentDir | Component::Prefix(_) => return Err(Errno::XDEV.into()),
        }
        dir = Some(match open(&way) {
            Err(Errno::NOENT) => {
                let (above, name) = (dir.as_ref().unwrap_or(top), way.file_name().unwrap_or_default());
                rustix::fs::mkdirat(above, name, Mode::from_raw_mode(MODE))?;
                if let Some((uid, gid)) = owner {
                    let (uid, gid) = (Uid::from_raw(uid), Gid::from_raw(gid));
                    rustix::fs::chownat(above, name, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)?;
                }
                open(&way)?
            }
            opened => opened?,
        });
    }
    dir.ok_or_else(|| Errno::INVAL.into())
}

/// A copy of the mount at `dir`, which is nowhere yet.
///
/// # Errors
/// What the system says.
pub fn copy_of(dir: &Path) -> io::Result<OwnedFd> {
    let flags = rustix::mount::OpenTreeFlags::OPEN_TREE_CLONE | rustix::mount::OpenTreeFlags::OPEN_TREE_CLOEXEC;
    Ok(rustix::mount::open_tree(rustix::fs::CWD, dir, flags)?)
}

/// Leaves out of this namespace everything that is mounted below `dir`: copies of other tasks' volumes, which would be held by them.
pub fn hide_below(dir: &Path) {
    let mounts = fs::read_to_string("/proc/self/mountinfo").unwrap_or_default();
    let places = mounts.lines().filter_map(mountinfo::read).map(|mounted| mounted.place);
    // What was mounted last lies above what was there before.
    for place in places.filter(|place| place.starts_with(dir)).collect::<Vec<_>>().into_iter().rev() {
        // What can't be left out is only held longer.
        let _ = rustix::mount::unmount(&place, UnmountFlags::DETACH);
    }
}

/// A namespace of users with these maps: inside, outside.
fn user_namespace(users: &[(u32, u32)], groups: &[(u32, u32)]) -> io::Result<OwnedFd> {
    let map = |pairs: &[(u32, u32)]| pairs.iter().map(|(inside, outside)| format!("{inside} {outside} 1\n")).collect::<String>();
    // SAFETY: this process has one thread, so that the child may do anything.
    let pid = unsafe { libc::fork() };
    if pid == 0 {
        // It holds the namespace until it was opened: stopped when it is in there, gone when it can't be.
        // SAFETY: plain system calls.
        unsafe {
            libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0);
            if libc::unshare(libc::CLONE_NEWUSER) == 0 {
                libc::raise(libc::SIGSTOP);
            }
            libc::_exit(*libc::__errno_location())
        }
    }
    if pid < 0 {
        return Err(io::Error::last_os_error());
    }
    let mut status = 0;
    // SAFETY: plain system call on a child of ours.
    unsafe { libc::waitpid(pid, &raw mut status, libc::WUNTRACED) };
    if !libc::WIFSTOPPED(status) {
        return Err(io::Error::from_raw_os_error(libc::WEXITSTATUS(status)));
    }
    let made = fs::write(format!("/proc/{pid}/uid_map"), map(users))
        .and_then(|()| fs::write(format!("/proc/{pid}/gid_map"), map(groups)))
        .and_then(|()| File::open(format!("/proc/{pid}/ns/user")));
    // SAFETY: as above.
    unsafe {
        libc::kill(pid, libc::SIGKILL);
        libc::waitpid(pid, &raw mut status, 0);
    }
    made.map(OwnedFd::from)
}
