//! A tar stream becomes files below a directory.
//!
//! Owns what is taken from a stream that nobody trusts. The `tar` crate reads the form; what it reads at once for names and maps of holes
//! is bounded here, as are sizes, counts and paths. Nothing is ever reached through a link, so nothing is written outside the directory.

use std::cell::Cell;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::rc::Rc;

use rustix::fs::{AtFlags, FileType, Mode, OFlags, Timespec, Timestamps, UTIME_OMIT};
use rustix::io::Errno;
use tar::EntryType;
use volley_jobspecs::wire::guest::{FileLimits, Files, SkipReason};

use super::below::{self, Fresh};
use super::{Tally, TooMuch};

/// Bytes of heads, long names and maps of holes of one entry. The crate holds all of them in memory.
const HEADS_BYTES_MAX: u64 = 1024 * 1024;
/// Bytes behind the end mark: tar programs fill up their last record of 10 KiB.
const TAIL_BYTES_MAX: u64 = 1024 * 1024;
/// Bytes moved at once; a block of zeros becomes a hole.
const BLOCK_BYTES: usize = 64 * 1024;
/// Mode of directories that a stream does not name.
const DIR_MODE: u32 = 0o755;

/// How a stream is unpacked.
#[derive(Debug, Clone, Copy)]
pub struct Unpack {
    /// Whose everything becomes; whoever runs this when not given.
    pub owner: Option<(u32, u32)>,
    /// Bits of modes that are kept.
    pub mode_mask: u32,
    /// How much at most.
    pub limits: FileLimits,
}

/// Why a stream was not unpacked to its end. What came before stays.
#[derive(Debug, thiserror::Error)]
pub enum UnpackError {
    /// Past a limit.
    #[error("the stream has {0}")]
    TooMuch(#[from] TooMuch),
    /// It could not be read, is cut, or is no tar stream.
    #[error("the stream of files can't be read: {0}")]
    Stream(#[source] io::Error),
    /// A file could not be written.
    #[error("can't write {path}: {source}")]
    File {
        /// Which.
        path: String,
        /// Why.
        source: io::Error,
    },
}

/// A stream that is read under a budget.
struct Meter<R> {
    stream: R,
    left: Rc<Cell<u64>>,
    ended: Rc<Cell<bool>>,
}

impl<R: Read> Read for Meter<R> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let len = into.len().min(usize::try_from(self.left.get()).unwrap_or(usize::MAX));
        let Some(into) = into.get_mut(..len).filter(|into| !into.is_empty()) else {
            return if into.is_empty() { Ok(0) } else { Err(io::Error::other("more bytes than expected")) };
        };
        let len = self.stream.read(into)?;
        self.ended.set(len == 0);
        self.left.set(self.left.get().saturating_sub(len as u64));
        Ok(len)
    }
}

/// Unpacks a stream below `dir`.
///
/// # Errors
/// [`UnpackError`].
pub fn unpack(stream: impl Read, dir: &OwnedFd, how: Unpack) -> Result<Files, UnpackError> {
    let (left, ended) = (Rc::new(Cell::new(0)), Rc::new(Cell::new(false)));
    let mut archive = tar::Archive::new(Meter { stream, left: left.clone(), ended: ended.clone() });
    let mut to = Target { dir, how, tally: Tally::new(how.limits) };
    let mut entries = archive.entries().map_err(UnpackError::Stream)?;
    loop {
        left.set(HEADS_BYTES_MAX);
        let entry = match entries.next() {
            Some(Ok(entry)) => entry,
            Some(Err(_)) if left.get() == 0 => return Err(TooMuch { what: "bytes in names", limit: HEADS_BYTES_MAX }.into()),
            Some(Err(e)) => return Err(UnpackError::Stream(e)),
            None => break,
        };
        // Its size is checked before its body is read.
        left.set(u64::MAX);
        to.take(entry)?;
    }
    if ended.get() {
        return Err(UnpackError::Stream(io::Error::new(io::ErrorKind::UnexpectedEof, "it is cut: it has no end mark")));
    }
    left.set(TAIL_BYTES_MAX);
    io::copy(&mut archive.into_inner(), &mut io::sink()).map_err(UnpackError::Stream)?;
    Ok(to.tally.files)
}

struct Target<'a> {
    dir: &'a OwnedFd,
    how: Unpack,
    tally: Tally,
}

/// An entry's place: the directory, and its name there.
struct Place {
    parent: OwnedFd,
    name: OsString,
}

impl Target<'_> {
    fn take(&mut self, mut entry: tar::Entry<'_, impl Read>) -> Result<(), UnpackError> {
        let kind = entry.header().entry_type();
        self.tally.bytes(entry.size())?;
        if kind == EntryType::XGlobalHeader {
            return rest(&mut entry);
        }
        let path = entry.path_bytes().into_owned();
        self.tally.entry(&path)?;
        let skip = match self.make(&mut entry, kind, &path) {
            Ok(skip) => skip,
            Err(Made::Stream(e)) => return Err(UnpackError::Stream(e)),
            // A link or file of theirs is in the way.
            Err(Made::File(e)) if matches!(e.raw_os_error(), Some(libc::ELOOP | libc::ENOTDIR | libc::EISDIR | libc::EEXIST)) => {
                Some(SkipReason::InTheWay)
            }
            Err(Made::File(source)) => {
                let path = String::from_utf8_lossy(&path).chars().take(256).collect();
                return Err(UnpackError::File { path, source });
            }
        };
        if let Some(why) = skip {
            self.tally.files.entries -= 1;
            self.tally.skip(&path, why);
        }
        rest(&mut entry)
    }

    fn make(&mut self, entry: &mut tar::Entry<'_, impl Read>, kind: EntryType, path: &[u8]) -> Result<Option<SkipReason>, Made> {
        let Some(names) = below::names(path) else { return Ok(Some(SkipReason::Outside)) };
        let mode = entry.header().mode().unwrap_or(0o644) & self.how.mode_mask;
        let mtime = entry.header().mtime().ok();
        match kind {
            EntryType::Directory => self.directory(&names, mode)?,
            // How the oldest tar programs write directories.
            EntryType::Regular if path.ends_with(b"/") => self.directory(&names, mode)?,
            EntryType::Regular | EntryType::Continuous | EntryType::GNUSparse => {
                let Some(place) = self.place(names)? else { return Ok(Some(SkipReason::InTheWay)) };
                self.file(&place, entry, mode, mtime)?;
            }
            EntryType::Symlink => {
                let Some(place) = self.place(names)? else { return Ok(Some(SkipReason::InTheWay)) };
                let target = entry.link_name_bytes().unwrap_or_default().into_owned();
                if target.is_empty() || target.len() > self.how.limits.path_bytes as usize || target.contains(&0) {
                    return Ok(Some(SkipReason::Outside));
                }
                self.symlink(&place, OsStr::from_bytes(&target))?;
            }
            EntryType::Link => {
                let target = entry.link_name_bytes().unwrap_or_default().into_owned();
                let Some(target) = below::names(&target).filter(|names| !names.is_empty()) else { return Ok(Some(SkipReason::Outside)) };
                let Some(place) = self.place(names)? else { return Ok(Some(SkipReason::InTheWay)) };
                return Ok(self.link(&place, &target)?);
            }
            EntryType::Char | EntryType::Block | EntryType::Fifo => return Ok(Some(SkipReason::Special)),
            _ => return Ok(Some(SkipReason::Unknown)),
        }
        Ok(None)
    }

    fn fresh(&self, mode: u32) -> Fresh {
        // Who is not root needs these bits to write below it.
        let mode = if rustix::process::geteuid().is_root() { mode } else { mode | 0o700 };
        Fresh { owner: self.how.owner, mode }
    }

    fn directory(&self, names: &[OsString], mode: u32) -> io::Result<()> {
        let Some((last, way)) = names.split_last() else { return Ok(()) };
        let parent = below::open_dir(self.dir, way, Some(self.fresh(DIR_MODE)))?;
        let fresh = self.fresh(mode);
        let made = below::open_dir(&parent, std::slice::from_ref(last), Some(fresh))?;
        below::own(&made, fresh.owner)?;
        Ok(rustix::fs::fchmod(&made, Mode::from_raw_mode(fresh.mode))?)
    }

    /// The place of a file or link, with whatever file or link was there gone. None when a directory is there.
    fn place(&self, mut names: Vec<OsString>) -> io::Result<Option<Place>> {
        let Some(name) = names.pop() else { return Ok(None) };
        let parent = below::open_dir(self.dir, &names, Some(self.fresh(DIR_MODE)))?;
        match rustix::fs::unlinkat(&parent, &name, AtFlags::empty()) {
            Ok(()) | Err(Errno::NOENT) => Ok(Some(Place { parent, name })),
            Err(Errno::ISDIR | Errno::PERM) => Ok(None),
            Err(e) => Err(e.into()),
        }
    }

    fn file(&self, place: &Place, entry: &mut impl Read, mode: u32, mtime: Option<u64>) -> Result<(), Made> {
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mut file =
            File::from(rustix::fs::openat(&place.parent, &place.name, flags, Mode::from_raw_mode(0o600)).map_err(io::Error::from)?);
        write_sparse(entry, &mut file)?;
        below::own(&file, self.how.owner)?;
        // Behind the owner: changing that takes bits away.
        rustix::fs::fchmod(&file, Mode::from_raw_mode(mode)).map_err(io::Error::from)?;
        if let Some(seconds) = mtime.and_then(|seconds| i64::try_from(seconds).ok()) {
            let omit = Timespec { tv_sec: 0, tv_nsec: UTIME_OMIT };
            let times = Timestamps { last_access: omit, last_modification: Timespec { tv_sec: seconds, tv_nsec: 0 } };
            // A time the file system can't hold is no reason to lose the file.
            let _ = rustix::fs::futimens(&file, &times);
        }
        Ok(())
    }

    fn symlink(&self, place: &Place, target: &OsStr) -> io::Result<()> {
        rustix::fs::symlinkat(target, &place.parent, &place.name)?;
        if let Some((uid, gid)) = self.how.owner {
            let (uid, gid) = (rustix::fs::Uid::from_raw(uid), rustix::fs::Gid::from_raw(gid));
            rustix::fs::chownat(&place.parent, &place.name, Some(uid), Some(gid), AtFlags::SYMLINK_NOFOLLOW)?;
        }
        Ok(())
    }

    /// A second name of a file that came before.
    fn link(&self, place: &Place, target: &[OsString]) -> io::Result<Option<SkipReason>> {
        let Some((last, way)) = target.split_last() else { return Ok(Some(SkipReason::Outside)) };
        let from = match below::open_dir(self.dir, way, None) {
            Ok(from) => from,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(Some(SkipReason::NoTarget)),
            Err(e) => return Err(e),
        };
        match rustix::fs::statat(&from, last, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) if matches!(FileType::from_raw_mode(stat.st_mode), FileType::RegularFile | FileType::Symlink) => {}
            Ok(_) => return Ok(Some(SkipReason::Special)),
            Err(Errno::NOENT) => return Ok(Some(SkipReason::NoTarget)),
            Err(e) => return Err(e.into()),
        }
        rustix::fs::linkat(&from, last, &place.parent, &place.name, AtFlags::empty())?;
        Ok(None)
    }
}

/// What failed while an entry was made.
enum Made {
    Stream(io::Error),
    File(io::Error),
}

impl From<io::Error> for Made {
    fn from(e: io::Error) -> Self {
        Self::File(e)
    }
}

/// Reads what was not wanted of an entry.
fn rest(entry: &mut impl Read) -> Result<(), UnpackError> {
    io::copy(entry, &mut io::sink()).map(|_| ()).map_err(UnpackError::Stream)
}

/// Copies, and leaves out blocks of zeros.
fn write_sparse(from: &mut impl Read, file: &mut File) -> Result<(), Made> {
    let mut block = vec![0; BLOCK_BYTES];
    let mut at: u64 = 0;
    loop {
        let len = fill(from, &mut block).map_err(Made::Stream)?;
        let bytes = block.get(..len).unwrap_or_default();
        if bytes.iter().any(|byte| *byte != 0) {
            file.seek(SeekFrom::Start(at))?;
            file.write_all(bytes)?;
        }
        at += len as u64;
        if len < block.len() {
            break;
        }
    }
    Ok(file.set_len(at)?)
}

/// Reads until the block is full or nothing is left.
fn fill(from: &mut impl Read, block: &mut [u8]) -> io::Result<usize> {
    let mut len = 0;
    while let Some(room) = block.get_mut(len..).filter(|room| !room.is_empty()) {
        match from.read(room) {
            Ok(0) => break,
            Ok(more) => len += more,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    Ok(len)
}
