//! Files below a directory become a tar stream.
//!
//! Owns the form: GNU tar, which has long names, holes and hard links. A file that changes while it is read can make its own bytes wrong,
//! never the stream. Who owns a file is left out: users of a guest mean nothing outside it.

use std::collections::BTreeMap;
use std::ffi::{OsStr, OsString};
use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::fs::{AtFlags, FileType, Mode, OFlags, SeekFrom as Place, Stat};
use rustix::io::Errno;
use tar::{EntryType, GnuExtSparseHeader, Header};
use volley_jobspecs::wire::guest::{FileLimits, Files, SkipReason};

use super::{DEPTH_MAX, Tally, TooMuch, below};

/// Parts of one file between holes; a file with more is sent with its holes. Their map must stay below what a reader takes
/// (`unpack::HEADS_BYTES_MAX`).
const PARTS_MAX: usize = 4096;
/// Unit of a tar stream, in bytes.
const BLOCK: u64 = 512;
/// Parts listed in a head, and in each of the blocks that may follow it.
const PARTS_IN_HEAD: usize = 4;
const PARTS_IN_BLOCK: usize = 21;

/// Why a stream is not whole.
#[derive(Debug, thiserror::Error)]
pub enum PackError {
    /// Past a limit.
    #[error("there are {0}")]
    TooMuch(#[from] TooMuch),
    /// A file could not be read.
    #[error("can't read {path}: {source}")]
    File {
        /// Which.
        path: String,
        /// Why.
        source: io::Error,
    },
    /// Nobody takes the stream.
    #[error("the stream of files can't be written: {0}")]
    Stream(#[source] io::Error),
}

/// Writes all below `path`, a directory, or `path` itself if it is a file. A link there is left out.
///
/// # Errors
/// [`PackError`].
pub fn pack(path: &Path, out: impl Write, limits: FileLimits) -> Result<Files, PackError> {
    let failed = |source: Errno| PackError::File { path: path.display().to_string(), source: source.into() };
    let name = path.file_name().unwrap_or_default().as_bytes();
    let mut packer = Packer { out: tar::Builder::new(out), tally: Tally::new(limits), seen: BTreeMap::new() };
    let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
    match rustix::fs::open(path, flags, Mode::empty()) {
        Err(Errno::LOOP) => packer.tally.skip(name, SkipReason::InTheWay),
        opened => {
            let opened = opened.map_err(failed)?;
            let stat = rustix::fs::fstat(&opened).map_err(failed)?;
            match FileType::from_raw_mode(stat.st_mode) {
                FileType::Directory => packer.walk(opened, Vec::new())?,
                FileType::RegularFile => packer.file(name, opened, &stat)?,
                _ => packer.tally.skip(name, SkipReason::Special),
            }
        }
    }
    packer.finish()
}

/// Writes the files below `dir`, a directory, that have these paths from it, and all below those that are directories. What is not there is
/// passed over.
///
/// # Errors
/// [`PackError`].
pub fn pack_named(dir: &Path, names: &[String], out: impl Write, limits: FileLimits) -> Result<Files, PackError> {
    let failed = |source: Errno| PackError::File { path: dir.display().to_string(), source: source.into() };
    let mut packer = Packer { out: tar::Builder::new(out), tally: Tally::new(limits), seen: BTreeMap::new() };
    match rustix::fs::open(dir, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty()) {
        Err(Errno::LOOP | Errno::NOTDIR) => packer.tally.skip(dir.as_os_str().as_bytes(), SkipReason::InTheWay),
        root => {
            let root = root.map_err(failed)?;
            for name in names {
                packer.named(&root, name.as_bytes())?;
            }
        }
    }
    packer.finish()
}

struct Packer<W: Write> {
    out: tar::Builder<W>,
    tally: Tally,
    /// Files with several names: the first one.
    seen: BTreeMap<(u64, u64), Vec<u8>>,
}

/// A directory that is being walked: open, its entries that are left, its path.
struct Level {
    dir: OwnedFd,
    names: std::vec::IntoIter<(OsString, FileType)>,
    path: Vec<u8>,
}

impl<W: Write> Packer<W> {
    /// Ends the stream.
    fn finish(self) -> Result<Files, PackError> {
        let Self { mut out, tally, .. } = self;
        out.finish().map_err(PackError::Stream)?;
        out.get_mut().flush().map_err(PackError::Stream)?;
        Ok(tally.files)
    }

    /// One of those that were asked for by name.
    fn named(&mut self, root: &OwnedFd, path: &[u8]) -> Result<(), PackError> {
        let Some(names) = below::names(path) else {
            self.tally.skip(path, SkipReason::Outside);
            return Ok(());
        };
        let Some((last, way)) = names.split_last() else { return Ok(()) };
        let path: Vec<u8> = names.iter().map(|name| name.as_bytes()).collect::<Vec<_>>().join(&b'/');
        let dir = match below::open_dir(root, way, None) {
            Ok(dir) => dir,
            Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(()),
            Err(e) if matches!(e.raw_os_error(), Some(libc::ELOOP | libc::ENOTDIR)) => {
                self.tally.skip(&path, SkipReason::InTheWay);
                return Ok(());
            }
            Err(source) => return Err(PackError::File { path: String::from_utf8_lossy(&path).chars().take(256).collect(), source }),
        };
        if matches!(rustix::fs::statat(&dir, last, AtFlags::SYMLINK_NOFOLLOW), Err(Errno::NOENT)) {
            return Ok(());
        }
        match self.entry(&dir, last, &path)? {
            Some(dir) => self.walk(dir, path),
            None => Ok(()),
        }
    }

    /// All below a directory, whose own path is `path`.
    fn walk(&mut self, dir: OwnedFd, path: Vec<u8>) -> Result<(), PackError> {
        let mut levels = vec![open_level(dir, path)?];
        while let Some(level) = levels.last_mut() {
            let Some((name, _)) = level.names.next() else {
                levels.pop();
                continue;
            };
            let mut path = level.path.clone();
            if !path.is_empty() {
                path.push(b'/');
            }
            path.extend_from_slice(name.as_bytes());
            if let Some(dir) = self.entry(&level.dir, &name, &path)? {
                if levels.len() >= DEPTH_MAX {
                    return Err(TooMuch { what: "directories in each other", limit: DEPTH_MAX as u64 }.into());
                }
                levels.push(open_level(dir, path)?);
            }
        }
        Ok(())
    }

    /// One entry. A directory is returned, to be walked.
    fn entry(&mut self, dir: &OwnedFd, name: &OsStr, path: &[u8]) -> Result<Option<OwnedFd>, PackError> {
        let stat = match rustix::fs::statat(dir, name, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) => stat,
            Err(Errno::NOENT) => {
                self.tally.skip(path, SkipReason::Gone);
                return Ok(None);
            }
            Err(e) => return Err(at(path, e)),
        };
        match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => {
                let opened = self.open(dir, name, path, FileType::Directory)?;
                if let Some((_, stat)) = &opened {
                    self.tally.entry(path)?;
                    self.append(&mut header(EntryType::Directory, stat), path, io::empty())?;
                }
                Ok(opened.map(|(dir, _)| dir))
            }
            FileType::RegularFile => {
                if let Some((file, stat)) = self.open(dir, name, path, FileType::RegularFile)? {
                    self.file(path, file, &stat)?;
                }
                Ok(None)
            }
            FileType::Symlink => {
                match rustix::fs::readlinkat(dir, name, Vec::new()) {
                    Ok(target) => {
                        self.tally.entry(path)?;
                        self.link(&mut header(EntryType::Symlink, &stat), path, target.as_bytes())?;
                    }
                    Err(_changed) => self.tally.skip(path, SkipReason::Gone),
                }
                Ok(None)
            }
            _ => {
                self.tally.skip(path, SkipReason::Special);
                Ok(None)
            }
        }
    }

    /// Opens what was of this kind a moment ago; what is not any more is left out.
    fn open(&mut self, dir: &OwnedFd, name: &OsStr, path: &[u8], kind: FileType) -> Result<Option<(OwnedFd, Stat)>, PackError> {
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::NOCTTY | OFlags::CLOEXEC;
        let opened = match rustix::fs::openat(dir, name, flags, Mode::empty()) {
            Ok(opened) => opened,
            Err(Errno::NOENT | Errno::LOOP | Errno::NXIO) => {
                self.tally.skip(path, SkipReason::Gone);
                return Ok(None);
            }
            Err(e) => return Err(at(path, e)),
        };
        let stat = rustix::fs::fstat(&opened).map_err(|e| at(path, e))?;
        if FileType::from_raw_mode(stat.st_mode) != kind {
            self.tally.skip(path, SkipReason::Gone);
            return Ok(None);
        }
        Ok(Some((opened, stat)))
    }

    fn file(&mut self, path: &[u8], file: OwnedFd, stat: &Stat) -> Result<(), PackError> {
        self.tally.entry(path)?;
        if stat.st_nlink > 1 {
            let key = (stat.st_dev, stat.st_ino);
            if let Some(first) = self.seen.get(&key).cloned() {
                return self.link(&mut header(EntryType::Link, stat), path, &first);
            }
            self.seen.insert(key, path.to_vec());
        }
        let len = u64::try_from(stat.st_size).unwrap_or_default();
        self.tally.bytes(len)?;
        let parts = parts(&file, len).filter(|parts| parts.len() <= PARTS_MAX && holes(parts, len));
        let mut header = header(EntryType::Regular, stat);
        match parts {
            None => {
                let mut file = File::from(file);
                // Looking for holes moved it.
                file.rewind().map_err(|source| PackError::File { path: String::from_utf8_lossy(path).into_owned(), source })?;
                header.set_size(len);
                self.append(&mut header, path, Exact { file, left: len })
            }
            Some(parts) => self.sparse(header, path, File::from(file), len, parts),
        }
    }

    /// A file with holes: a map in the head and in blocks behind it, then its parts.
    fn sparse(&mut self, mut header: Header, path: &[u8], file: File, len: u64, mut parts: Vec<(u64, u64)>) -> Result<(), PackError> {
        // An empty part says where the file ends.
        parts.push((len, 0));
        header.set_entry_type(EntryType::GNUSparse);
        header.set_size(parts.iter().map(|(_, len)| len).sum());
        let mut map: Vec<u8> = Vec::new();
        let (first, more) = parts.split_at(parts.len().min(PARTS_IN_HEAD));
        if let Some(gnu) = header.as_gnu_mut() {
            gnu.set_real_size(len);
            gnu.set_is_extended(!more.is_empty());
            for (place, (offset, len)) in gnu.sparse.iter_mut().zip(first) {
                place.set_offset(*offset);
                place.set_length(*len);
            }
        }
        let blocks = more.len().div_ceil(PARTS_IN_BLOCK);
        for (number, some) in more.chunks(PARTS_IN_BLOCK).enumerate() {
            let mut block = GnuExtSparseHeader::new();
            for (place, (offset, len)) in block.sparse_mut().iter_mut().zip(some) {
                place.set_offset(*offset);
                place.set_length(*len);
            }
            block.set_is_extended(number + 1 < blocks);
            map.extend_from_slice(block.as_bytes());
        }
        self.append(&mut header, path, io::Cursor::new(map).chain(Parts { file, parts: parts.into_iter(), now: None }))
    }

    fn link(&mut self, header: &mut Header, path: &[u8], target: &[u8]) -> Result<(), PackError> {
        if header.set_link_name_literal(target).is_err() {
            self.long(b'K', target)?;
            let cut = target.get(..100).unwrap_or(target);
            header.set_link_name_literal(cut).map_err(PackError::Stream)?;
        }
        self.append(header, path, io::empty())
    }

    fn append(&mut self, header: &mut Header, path: &[u8], data: impl Read) -> Result<(), PackError> {
        // Byte for byte: the crate's own way changes a path, and takes none that is odd.
        let place = header.as_old_mut();
        if path.len() < place.name.len() {
            for (to, from) in place.name.iter_mut().zip(path) {
                *to = *from;
            }
        } else {
            self.long(b'L', path)?;
            let place = header.as_old_mut();
            for (to, from) in place.name.iter_mut().zip(path) {
                *to = *from;
            }
        }
        header.set_cksum();
        self.out.append(header, data).map_err(PackError::Stream)
    }

    /// An entry that holds the name of the next one.
    fn long(&mut self, kind: u8, name: &[u8]) -> Result<(), PackError> {
        let mut header = Header::new_gnu();
        let title = b"././@LongLink";
        for (to, from) in header.as_old_mut().name.iter_mut().zip(title) {
            *to = *from;
        }
        header.set_mode(0o644);
        header.set_uid(0);
        header.set_gid(0);
        header.set_mtime(0);
        header.set_size(name.len() as u64 + 1);
        header.set_entry_type(EntryType::new(kind));
        header.set_cksum();
        self.out.append(&header, name.chain(io::repeat(0).take(1))).map_err(PackError::Stream)
    }
}

fn open_level(dir: OwnedFd, path: Vec<u8>) -> Result<Level, PackError> {
    let names = below::list(&dir).map_err(|source| PackError::File { path: String::from_utf8_lossy(&path).into_owned(), source })?;
    Ok(Level { dir, names: names.into_iter(), path })
}

fn at(path: &[u8], source: Errno) -> PackError {
    PackError::File { path: String::from_utf8_lossy(path).chars().take(256).collect(), source: source.into() }
}

fn header(kind: EntryType, stat: &Stat) -> Header {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.set_mode(stat.st_mode & 0o7777);
    header.set_mtime(u64::try_from(stat.st_mtime).unwrap_or_default());
    header.set_uid(0);
    header.set_gid(0);
    header.set_size(0);
    header
}

/// Where a file has bytes: offset and length of each part. None where the file system can't say.
fn parts(file: impl AsFd, len: u64) -> Option<Vec<(u64, u64)>> {
    let mut parts = Vec::new();
    let mut at = 0;
    while at < len && parts.len() <= PARTS_MAX {
        let begin = match rustix::fs::seek(&file, Place::Data(at)) {
            Ok(begin) => begin,
            Err(Errno::NXIO) => break,
            Err(_) => return None,
        };
        let end = rustix::fs::seek(&file, Place::Hole(begin)).ok()?.min(len);
        if begin >= end || begin < at {
            // It changes while it is read.
            return None;
        }
        parts.push((begin, end - begin));
        at = end;
    }
    // All but the last must be whole blocks of the stream.
    let (_, whole) = parts.split_last().map_or((None, &[][..]), |(last, whole)| (Some(last), whole));
    whole.iter().all(|(_, len)| len % BLOCK == 0).then_some(parts)
}

/// Is a hole among the parts worth a map?
fn holes(parts: &[(u64, u64)], len: u64) -> bool {
    parts.iter().map(|(_, len)| len).sum::<u64>() < len
}

/// So many bytes of a file, whatever becomes of it; zeros for those that went.
struct Exact {
    file: File,
    left: u64,
}

impl Read for Exact {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let len = into.len().min(usize::try_from(self.left).unwrap_or(usize::MAX));
        let into = into.get_mut(..len).unwrap_or_default();
        let read = match self.file.read(into)? {
            0 => {
                into.fill(0);
                into.len()
            }
            read => read,
        };
        self.left -= read as u64;
        Ok(read)
    }
}

/// The parts of a file, one behind the other.
struct Parts {
    file: File,
    parts: std::vec::IntoIter<(u64, u64)>,
    now: Option<Exact>,
}

impl Read for Parts {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        loop {
            if let Some(part) = &mut self.now
                && part.left > 0
            {
                return part.read(into);
            }
            let Some((offset, len)) = self.parts.next() else { return Ok(0) };
            let mut file = self.file.try_clone()?;
            file.seek(SeekFrom::Start(offset))?;
            self.now = Some(Exact { file, left: len });
        }
    }
}
