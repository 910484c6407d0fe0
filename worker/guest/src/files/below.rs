//! Reaching files below a directory held open, one name at a time, without following a link.
//!
//! Owns the way to a file. Whoever owns the directories may swap a name at any moment, so each step is taken from the directory that
//! was opened before, never by a path.

use std::ffi::{OsStr, OsString};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::{OsStrExt, OsStringExt};

use rustix::fs::{FileType, Gid, Mode, OFlags, Uid};
use rustix::io::Errno;

use super::DEPTH_MAX;

const DIRECTORY: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::NOFOLLOW).union(OFlags::CLOEXEC);

/// The names of a path, without those that mean nothing. None when it leads out, or deeper than [`DEPTH_MAX`].
pub fn names(path: &[u8]) -> Option<Vec<OsString>> {
    let names: Vec<&[u8]> = path.split(|byte| *byte == b'/').filter(|name| !name.is_empty() && *name != b".").collect();
    let fine = names.len() <= DEPTH_MAX && names.iter().all(|name| *name != b".." && !name.contains(&0));
    fine.then(|| names.into_iter().map(|name| OsString::from_vec(name.to_vec())).collect())
}

/// What new directories on the way are like.
#[derive(Debug, Clone, Copy)]
pub struct Fresh {
    /// Whose.
    pub owner: Option<(u32, u32)>,
    /// Their mode.
    pub mode: u32,
}

/// Opens the directory of these names; with `fresh` it makes those that are missing.
///
/// # Errors
/// What the system says: ELOOP or ENOTDIR when a name is no directory.
pub fn open_dir(root: &OwnedFd, names: &[OsString], fresh: Option<Fresh>) -> io::Result<OwnedFd> {
    let mut dir = root.try_clone()?;
    for name in names {
        dir = match rustix::fs::openat(&dir, name, DIRECTORY, Mode::empty()) {
            Err(Errno::NOENT) if fresh.is_some() => make_dir(&dir, name, fresh)?,
            opened => opened?,
        };
    }
    Ok(dir)
}

fn make_dir(dir: &OwnedFd, name: &OsStr, fresh: Option<Fresh>) -> io::Result<OwnedFd> {
    match rustix::fs::mkdirat(dir, name, Mode::from_raw_mode(0o700)) {
        Ok(()) | Err(Errno::EXIST) => {}
        Err(e) => return Err(e.into()),
    }
    let made = rustix::fs::openat(dir, name, DIRECTORY, Mode::empty())?;
    if let Some(fresh) = fresh {
        own(&made, fresh.owner)?;
        rustix::fs::fchmod(&made, Mode::from_raw_mode(fresh.mode))?;
    }
    Ok(made)
}

/// Gives an open file or directory to somebody.
///
/// # Errors
/// What the system says.
pub fn own(file: impl AsFd, owner: Option<(u32, u32)>) -> io::Result<()> {
    match owner {
        Some((uid, gid)) => Ok(rustix::fs::fchown(file, Some(Uid::from_raw(uid)), Some(Gid::from_raw(gid)))?),
        None => Ok(()),
    }
}

/// The entries of a directory, in order of their names; without kinds where the file system does not say.
///
/// # Errors
/// What the system says.
pub fn list(dir: &OwnedFd) -> io::Result<Vec<(OsString, FileType)>> {
    let mut found = Vec::new();
    for entry in rustix::fs::Dir::read_from(dir)? {
        let entry = entry?;
        let name = entry.file_name().to_bytes();
        if name != b"." && name != b".." {
            found.push((OsStr::from_bytes(name).to_owned(), entry.file_type()));
        }
    }
    found.sort_by(|a, b| a.0.cmp(&b.0));
    Ok(found)
}
