//! Files in directories that belong to tasks, reached without following a link of theirs.
//!
//! Owns opening and making below a directory held open. A task may swap any name in its directories at any moment, and those of other
//! slots under the same user as well, so nothing there is ever reached twice by a path: it is opened once, and looked at, changed or
//! handed on as the open file. Does not own which files (`persist`, `inputs`, `dirs`).

use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path};

use rustix::fs::{AtFlags, FileType, Mode, OFlags, ResolveFlags, Stat};
use rustix::io::Errno;

/// Flags of everything opened here.
const ALWAYS: OFlags = OFlags::CLOEXEC.union(OFlags::NOFOLLOW);

/// Opens a directory whose own place only the worker can change.
///
/// # Errors
/// What the system says; also when it is a symbolic link.
pub fn root(dir: &Path) -> io::Result<OwnedFd> {
    Ok(rustix::fs::open(dir, OFlags::RDONLY | OFlags::DIRECTORY | ALWAYS, Mode::empty())?)
}

/// Opens something below `root`. An empty path is `root` itself.
///
/// # Errors
/// What the system says: ELOOP when a part of the way is a symbolic link, EXDEV when it would lead out.
pub fn open(root: &OwnedFd, path: &Path, flags: OFlags) -> io::Result<OwnedFd> {
    let parts = parts(path)?;
    let flags = flags | ALWAYS;
    let Some((last, way)) = parts.split_last() else {
        return Ok(rustix::fs::openat(root, ".", flags, Mode::empty())?);
    };
    let resolve = ResolveFlags::BENEATH | ResolveFlags::NO_SYMLINKS;
    match rustix::fs::openat2(root, path, flags, Mode::empty(), resolve) {
        // Kernels before 5.6 don't have it, and filters of system calls may not know it.
        Err(Errno::NOSYS | Errno::PERM | Errno::AGAIN) => step_by_step(root, way, last, flags),
        opened => Ok(opened?),
    }
}

/// One name at a time, each in the directory that was opened before it.
fn step_by_step(root: &OwnedFd, way: &[&OsStr], last: &OsStr, flags: OFlags) -> io::Result<OwnedFd> {
    let mut held: Option<OwnedFd> = None;
    for part in way {
        let next = rustix::fs::openat(held.as_ref().unwrap_or(root), *part, OFlags::PATH | ALWAYS, Mode::empty())?;
        match kind(&rustix::fs::fstat(&next)?) {
            FileType::Directory => held = Some(next),
            FileType::Symlink => return Err(Errno::LOOP.into()),
            _ => return Err(Errno::NOTDIR.into()),
        }
    }
    Ok(rustix::fs::openat(held.as_ref().unwrap_or(root), last, flags, Mode::empty())?)
}

/// The names on the way.
fn parts(path: &Path) -> io::Result<Vec<&OsStr>> {
    let parts = path.components().filter(|part| !matches!(part, Component::CurDir));
    parts
        .map(|part| match part {
            Component::Normal(name) => Ok(name),
            _ => Err(Errno::XDEV.into()),
        })
        .collect()
}

/// What kind of file it is.
#[must_use]
pub fn kind(stat: &Stat) -> FileType {
    FileType::from_raw_mode(stat.st_mode)
}

/// Opens a plain file below `root` for reading. `owner`: whoever a file must belong to that not everybody may read anyway. A task
/// can't read through us what it can't read itself.
///
/// # Errors
/// What the system says; also when it is something else or somebody else's.
pub fn open_plain(root: &OwnedFd, path: &Path, owner: Option<(u32, u32)>) -> io::Result<File> {
    let file = open(root, path, OFlags::RDONLY | OFlags::NONBLOCK | OFlags::NOCTTY)?;
    let stat = rustix::fs::fstat(&file)?;
    if kind(&stat) != FileType::RegularFile {
        return Err(io::Error::other("no plain file"));
    }
    if owner.is_some_and(|(uid, _)| stat.st_uid != uid && stat.st_mode & 0o004 == 0) {
        return Err(io::Error::other("it belongs to another user"));
    }
    Ok(File::from(file))
}

/// Opens a directory below `root`, and makes what is missing on the way, with `mode` and for `owner`.
///
/// # Errors
/// What the system says: ELOOP or ENOTDIR when a part of the way is a symbolic link.
pub fn make_dirs(root: &OwnedFd, path: &Path, mode: u32, owner: Option<(u32, u32)>) -> io::Result<OwnedFd> {
    let mut dir = open(root, Path::new(""), OFlags::RDONLY | OFlags::DIRECTORY)?;
    for part in parts(path)? {
        dir = make_dir(&dir, part, mode, owner)?;
    }
    Ok(dir)
}

/// One directory in `parent`, opened; made if it isn't there.
fn make_dir(parent: &OwnedFd, name: &OsStr, mode: u32, owner: Option<(u32, u32)>) -> io::Result<OwnedFd> {
    let made = match rustix::fs::mkdirat(parent, name, Mode::from_raw_mode(mode)) {
        Ok(()) => true,
        Err(Errno::EXIST) => false,
        Err(e) => return Err(e.into()),
    };
    let dir = rustix::fs::openat(parent, name, OFlags::RDONLY | OFlags::DIRECTORY | ALWAYS, Mode::empty())?;
    if made && let Some((uid, gid)) = owner {
        rustix::fs::fchown(&dir, Some(rustix::fs::Uid::from_raw(uid)), Some(rustix::fs::Gid::from_raw(gid)))?;
    }
    Ok(dir)
}

/// The entries of a directory held open: name, and kind without following links.
///
/// # Errors
/// What the system says. An entry that vanished meanwhile is left out.
pub fn list(dir: &OwnedFd) -> io::Result<Vec<(OsString, FileType)>> {
    let mut found = Vec::new();
    for entry in rustix::fs::Dir::read_from(dir)? {
        let entry = entry?;
        let name = entry.file_name();
        if name == c"." || name == c".." {
            continue;
        }
        let kind = match entry.file_type() {
            FileType::Unknown => match rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW) {
                Ok(stat) => kind(&stat),
                Err(Errno::NOENT) => continue,
                Err(e) => return Err(e.into()),
            },
            kind => kind,
        };
        found.push((OsStr::from_bytes(name.to_bytes()).to_owned(), kind));
    }
    Ok(found)
}

/// Changes the mode of a directory that can't be read yet.
///
/// # Errors
/// What the system says.
pub fn open_up(root: &OwnedFd, path: &Path, mode: u32) -> io::Result<()> {
    let dir = open(root, path, OFlags::PATH | OFlags::DIRECTORY)?;
    // The only way that all kernels have to change what is open as a place only; the name leads to what is open, not to a path.
    let name = format!("/proc/self/fd/{}", dir.as_fd().as_raw_fd());
    Ok(rustix::fs::chmod(name, Mode::from_raw_mode(mode))?)
}

#[cfg(test)]
pub(crate) mod tests;
