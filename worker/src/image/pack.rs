//! A plain directory as a layer: a tar archive, the same for the same files.
//!
//! Owns the order, what is taken over and what is left out. Nothing of the directory is followed out of it: links are kept as links.
//! Does not own what a layer means (`merge`).

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::fs::{self, File, Metadata, OpenOptions};
use std::io::{self, Read, Write};
use std::os::unix::ffi::{OsStrExt, OsStringExt};
use std::os::unix::fs::{FileTypeExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// Most names below one directory: what an image may have.
const NAMES_MAX: usize = super::merge::INODES_MAX;
/// Largest numbers that the header's own fields hold: 7 and 11 octal digits.
const SHORT_ID_MAX: u32 = 0o7_777_777;
const SHORT_SIZE_MAX: u64 = 0o77_777_777_777;
/// Largest extended attribute that Linux has, and list of their names.
const XATTR_BYTES: usize = 64 * 1024;

/// Writes what is in `dir` as a tar archive.
///
/// # Errors
/// What the system says, with the path; also when a file changes while it is read.
pub fn pack(dir: &Path, out: &mut dyn Write) -> io::Result<()> {
    let mut packer = Packer { out: tar::Builder::new(out), seen: BTreeMap::new(), names: 0 };
    let meta = fs::metadata(dir).map_err(|e| with_path(dir, &e))?;
    if !meta.is_dir() {
        return Err(with_path(dir, &io::Error::other("it is no directory; tar:FILE imports an archive")));
    }
    packer.entry(b"./", dir, &meta)?;
    // Directories to look into, the next one last; parents come before what is in them.
    let mut left: Vec<(PathBuf, Vec<u8>)> = vec![(dir.to_owned(), Vec::new())];
    while let Some((dir, prefix)) = left.pop() {
        let mut inside = Vec::new();
        for name in sorted(&dir).map_err(|e| with_path(&dir, &e))? {
            packer.names += 1;
            if packer.names > NAMES_MAX {
                return Err(with_path(&dir, &io::Error::other(format!("more than {NAMES_MAX} files"))));
            }
            let (path, mut inner) = (dir.join(&name), [&prefix, name.as_bytes()].concat());
            let meta = fs::symlink_metadata(&path).map_err(|e| with_path(&path, &e))?;
            if meta.is_dir() {
                inner.push(b'/');
                inside.push((path.clone(), inner.clone()));
            }
            packer.entry(&inner, &path, &meta).map_err(|e| with_path(&path, &e))?;
        }
        left.extend(inside.into_iter().rev());
    }
    packer.out.into_inner()?.flush()
}

fn with_path(path: &Path, why: &io::Error) -> io::Error {
    io::Error::new(why.kind(), format!("{}: {why}", path.display()))
}

fn sorted(dir: &Path) -> io::Result<Vec<OsString>> {
    let mut names = fs::read_dir(dir)?.map(|entry| Ok(entry?.file_name())).collect::<io::Result<Vec<_>>>()?;
    names.sort_by(|a, b| a.as_bytes().cmp(b.as_bytes()));
    Ok(names)
}

struct Packer<'a> {
    out: tar::Builder<&'a mut dyn Write>,
    /// The first name of each file that has several.
    seen: BTreeMap<(u64, u64), Vec<u8>>,
    names: usize,
}

impl Packer<'_> {
    fn entry(&mut self, name: &[u8], path: &Path, meta: &Metadata) -> io::Result<()> {
        let kind = meta.file_type();
        let known = if meta.nlink() > 1 && !kind.is_dir() { self.seen.get(&(meta.dev(), meta.ino())) } else { None };
        let (flag, link) = if let Some(first) = known {
            (tar::EntryType::Link, Some(first.clone()))
        } else if kind.is_symlink() {
            (tar::EntryType::Symlink, Some(fs::read_link(path)?.into_os_string().into_vec()))
        } else if kind.is_dir() {
            (tar::EntryType::Directory, None)
        } else if kind.is_file() {
            (tar::EntryType::Regular, None)
        } else if kind.is_fifo() {
            (tar::EntryType::Fifo, None)
        } else if kind.is_char_device() {
            (tar::EntryType::Char, None)
        } else if kind.is_block_device() {
            (tar::EntryType::Block, None)
        } else {
            // A socket is nothing without its process, and archives have no word for it.
            return Ok(());
        };
        if known.is_none() && meta.nlink() > 1 && !kind.is_dir() {
            self.seen.insert((meta.dev(), meta.ino()), name.to_vec());
        }
        let file = if flag == tar::EntryType::Regular { Some(open(path, meta)?) } else { None };
        let mut header = header(flag, meta);
        let mut extended: Vec<(String, Vec<u8>)> = Vec::new();
        if !put(&mut header.as_old_mut().name, name) {
            extended.push(("path".to_owned(), name.to_vec()));
        }
        if let Some(link) = &link
            && !put(&mut header.as_old_mut().linkname, link)
        {
            extended.push(("linkpath".to_owned(), link.clone()));
        }
        extended.extend(long_numbers(meta));
        if flag != tar::EntryType::Link {
            extended.extend(xattrs(path)?);
        }
        if !extended.is_empty() {
            self.out.append_pax_extensions(extended.iter().map(|(key, value)| (key.as_str(), value.as_slice())))?;
        }
        header.set_cksum();
        match file {
            Some(file) => self.out.append(&header, Exactly { file, left: meta.len() }),
            None => self.out.append(&header, io::empty()),
        }
    }
}

/// Opens a file that was seen as `meta`; another one in its place is not taken.
fn open(path: &Path, meta: &Metadata) -> io::Result<File> {
    let file = OpenOptions::new().read(true).custom_flags(libc::O_NOFOLLOW | libc::O_NONBLOCK).open(path)?;
    let now = file.metadata()?;
    if (now.dev(), now.ino(), now.len()) != (meta.dev(), meta.ino(), meta.len()) {
        return Err(io::Error::other("it changed while it was read"));
    }
    Ok(file)
}

fn header(flag: tar::EntryType, meta: &Metadata) -> tar::Header {
    let mut header = tar::Header::new_ustar();
    header.set_entry_type(flag);
    header.set_mode(meta.mode() & 0o7777);
    header.set_uid(u64::from(meta.uid().min(SHORT_ID_MAX)));
    header.set_gid(u64::from(meta.gid().min(SHORT_ID_MAX)));
    header.set_mtime(u64::try_from(meta.mtime()).unwrap_or(0).min(SHORT_SIZE_MAX));
    // The header's own field of a larger size has a form that all readers here know.
    header.set_size(if flag == tar::EntryType::Regular { meta.len() } else { 0 });
    header
}

/// Puts text into a field, if it fits.
fn put(field: &mut [u8], text: &[u8]) -> bool {
    let fits = text.len() <= field.len();
    let bytes = text.len().min(field.len());
    field[..bytes].copy_from_slice(&text[..bytes]);
    fits
}

fn long_numbers(meta: &Metadata) -> Vec<(String, Vec<u8>)> {
    let owners = [("uid", meta.uid()), ("gid", meta.gid())];
    owners.into_iter().filter(|(_, id)| *id > SHORT_ID_MAX).map(|(key, id)| (key.to_owned(), id.to_string().into_bytes())).collect()
}

/// Extended attributes of the file at `path`; those of a link are its own. Which are kept is decided where layers are read.
fn xattrs(path: &Path) -> io::Result<Vec<(String, Vec<u8>)>> {
    let mut names = vec![0u8; XATTR_BYTES];
    let length = match rustix::fs::llistxattr(path, &mut names[..]) {
        Ok(length) => length,
        Err(rustix::io::Errno::NOTSUP) => return Ok(Vec::new()),
        Err(why) => return Err(why.into()),
    };
    let mut found = Vec::new();
    for name in names[..length].split(|byte| *byte == 0).filter(|name| !name.is_empty()) {
        // Others can't even be read by everybody, and none of them is kept.
        let Some(text) = std::str::from_utf8(name).ok().filter(|name| name.starts_with("user.") || *name == "security.capability") else {
            continue;
        };
        let mut value = vec![0u8; XATTR_BYTES];
        let length = rustix::fs::lgetxattr(path, text, &mut value[..])?;
        value.truncate(length);
        found.push((format!("SCHILY.xattr.{text}"), value));
    }
    found.sort();
    Ok(found)
}

/// A file of a known size; a shorter one is an error, and what a longer one has more is not read.
struct Exactly {
    file: File,
    left: u64,
}

impl Read for Exactly {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let most = usize::try_from(self.left).unwrap_or(usize::MAX).min(buffer.len());
        let read = self.file.read(&mut buffer[..most])?;
        if read == 0 && most > 0 {
            return Err(io::Error::other("it became shorter while it was read"));
        }
        self.left -= read as u64;
        Ok(read)
    }
}
