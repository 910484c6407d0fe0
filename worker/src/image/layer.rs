//! Reading a layer: a tar archive, unpacked, entry by entry and without its contents.
//!
//! Owns headers, long names (GNU and PAX), what is read into memory at most, and which kinds of entry are taken. Does not own
//! compression (`unpack`), the check of names (`entry`) or what entries mean together (`merge`).

use std::collections::BTreeMap;
use std::io::{self, Read, Seek, SeekFrom};

use super::entry::{Attrs, Entry, Left, What};
use super::merge::shown;

const BLOCK: u64 = 512;
/// Longest extended header, in bytes: room for the longest path and link target and for all attributes that can be kept, many times.
const HEADER_BYTES_MAX: u64 = 256 * 1024;
/// Most entries of an image's layers together. The largest images known have a few hundred thousand files.
pub const ENTRIES_MAX: u64 = 4 << 20;
/// Most bytes of names, link targets and attributes of an image together: they are held in memory until its disk is written.
pub const METADATA_BYTES_MAX: u64 = 512 << 20;

/// A layer that can't be read.
#[derive(Debug, thiserror::Error)]
pub enum LayerError {
    /// It can't be read from disk.
    #[error("the layer can't be read: {0}")]
    Io(#[from] io::Error),
    /// It ends within an entry.
    #[error("the layer ends at byte {at}, within an entry; it was cut")]
    Cut {
        /// Where.
        at: u64,
    },
    /// It is no tar archive, or a broken one.
    #[error("the layer is no tar archive, or a broken one: at byte {at}, {what}")]
    Bad {
        /// Where the entry begins.
        at: u64,
        /// What is wrong.
        what: &'static str,
    },
    /// An extended header that is too long.
    #[error("the layer has an extended header of {bytes} bytes at byte {at}; {HEADER_BYTES_MAX} are the most")]
    Header {
        /// Where the entry begins.
        at: u64,
        /// Its size.
        bytes: u64,
    },
    /// A file stored without its holes.
    #[error("the layer stores {path:?} as a sparse file; pack it without --sparse")]
    Sparse {
        /// The file.
        path: String,
    },
    /// The image has too many entries.
    #[error("the image has more than {max} files in its layers; make it smaller")]
    Entries {
        /// The most there may be.
        max: u64,
    },
    /// The image's names are too long together.
    #[error("names and attributes of the image's files take more than {max} bytes; make it smaller")]
    Metadata {
        /// The most they may take.
        max: u64,
    },
}

/// What an image's layers may still bring.
#[derive(Debug, Clone, Copy)]
pub struct Budget {
    /// The most entries there may be.
    pub entries_max: u64,
    /// Entries so far.
    pub entries: u64,
    /// The most bytes of names and attributes there may be.
    pub metadata_max: u64,
    /// Bytes so far.
    pub metadata: u64,
}

impl Default for Budget {
    fn default() -> Self {
        Self { entries_max: ENTRIES_MAX, entries: 0, metadata_max: METADATA_BYTES_MAX, metadata: 0 }
    }
}

impl Budget {
    fn charge(&mut self, entry: &Entry) -> Result<(), LayerError> {
        self.entries += 1;
        if self.entries > self.entries_max {
            return Err(LayerError::Entries { max: self.entries_max });
        }
        let link = match &entry.what {
            What::Symlink(target) | What::HardLink(target) => target.len(),
            What::Dir | What::File { .. } | What::Fifo | What::Left(_) => 0,
        };
        let xattrs: usize = entry.attrs.xattrs.iter().map(|(name, value)| name.len() + value.len()).sum();
        self.metadata += (entry.path.len() + link + xattrs) as u64;
        if self.metadata > self.metadata_max {
            return Err(LayerError::Metadata { max: self.metadata_max });
        }
        Ok(())
    }
}

/// An extended header.
#[derive(Debug, Default, Clone)]
struct Pax {
    values: BTreeMap<Vec<u8>, Vec<u8>>,
}

impl Pax {
    /// Reads records `LENGTH KEY=VALUE\n`, where the length counts the whole record.
    fn read(&mut self, mut bytes: &[u8]) -> Option<()> {
        while !bytes.is_empty() {
            let space = bytes.iter().position(|byte| *byte == b' ')?;
            let length: usize = std::str::from_utf8(&bytes[..space]).ok()?.parse().ok()?;
            let record = bytes.get(space + 1..length)?.strip_suffix(b"\n")?;
            let equals = record.iter().position(|byte| *byte == b'=')?;
            self.values.insert(record[..equals].to_vec(), record[equals + 1..].to_vec());
            bytes = &bytes[length..];
        }
        Some(())
    }

    fn text(&self, key: &str) -> Option<&str> {
        std::str::from_utf8(self.values.get(key.as_bytes())?).ok()
    }

    /// A number: none, one, or something that is none.
    fn number(&self, key: &str) -> Option<Option<u64>> {
        self.values.contains_key(key.as_bytes()).then(|| self.text(key)?.parse().ok())
    }
}

/// Reads the entries of one layer.
///
/// # Errors
/// [`LayerError`].
pub fn entries<R: Read + Seek>(layer: &mut R, budget: &mut Budget) -> Result<Vec<Entry>, LayerError> {
    let len = layer.seek(SeekFrom::End(0))?;
    let mut reader = Reader { layer, len, at: 0 };
    let mut found = Vec::new();
    while let Some(entry) = reader.next()? {
        budget.charge(&entry)?;
        found.push(entry);
    }
    Ok(found)
}

struct Reader<'a, R> {
    layer: &'a mut R,
    len: u64,
    /// Where the next header begins.
    at: u64,
}

impl<R: Read + Seek> Reader<'_, R> {
    fn next(&mut self) -> Result<Option<Entry>, LayerError> {
        let (mut local, mut name, mut link) = (Pax::default(), None, None);
        loop {
            let begin = self.at;
            let Some(header) = self.header()? else { return Ok(None) };
            let size =
                number(&header.as_old().size, header.entry_size()).ok_or(LayerError::Bad { at: begin, what: "its size is no number" })?;
            let kind = header.as_old().linkflag[0];
            match kind {
                b'x' => {
                    let bytes = self.extended(begin, size)?;
                    local = Pax::default();
                    local.read(&bytes).ok_or(LayerError::Bad { at: begin, what: "its extended header can't be read" })?;
                }
                // For all entries to come: a comment, of the tools that are left.
                b'g' => self.skip(size)?,
                b'L' => name = Some(until_zero(&self.extended(begin, size)?).to_vec()),
                b'K' => link = Some(until_zero(&self.extended(begin, size)?).to_vec()),
                _ => return self.entry(begin, &header, size, &local, name, link).map(Some),
            }
        }
    }

    /// The header at `self.at`, which moves behind it; none at the archive's end.
    fn header(&mut self) -> Result<Option<tar::Header>, LayerError> {
        // Two blocks of zeros end an archive; tools differ in whether they write them.
        if self.at == self.len {
            return Ok(None);
        }
        let bytes = self.read(self.at, BLOCK)?;
        if bytes.iter().all(|byte| *byte == 0) {
            return Ok(None);
        }
        let mut header = tar::Header::new_old();
        header.as_mut_bytes().copy_from_slice(&bytes);
        let sum =
            |of: fn(u8) -> i64| bytes.iter().enumerate().map(|(i, byte)| if (148..156).contains(&i) { 32 } else { of(*byte) }).sum::<i64>();
        // Some old tools added up signed bytes.
        let right = header
            .cksum()
            .is_ok_and(|said| i64::from(said) == sum(i64::from) || i64::from(said) == sum(|byte| i64::from(byte.cast_signed())));
        if !right {
            return Err(LayerError::Bad { at: self.at, what: "the checksum of a header is wrong" });
        }
        self.at += BLOCK;
        Ok(Some(header))
    }

    /// The contents of an extended header.
    fn extended(&mut self, begin: u64, size: u64) -> Result<Vec<u8>, LayerError> {
        if size > HEADER_BYTES_MAX {
            return Err(LayerError::Header { at: begin, bytes: size });
        }
        let bytes = self.read(self.at, size)?;
        self.skip(size)?;
        Ok(bytes)
    }

    /// Bytes from `at` on; few enough for memory.
    fn read(&mut self, at: u64, bytes: u64) -> Result<Vec<u8>, LayerError> {
        if self.len.saturating_sub(at) < bytes {
            return Err(LayerError::Cut { at: self.len });
        }
        let mut buffer = vec![0; bytes as usize];
        self.layer.seek(SeekFrom::Start(at))?;
        self.layer.read_exact(&mut buffer)?;
        Ok(buffer)
    }

    /// Moves behind contents.
    fn skip(&mut self, size: u64) -> Result<(), LayerError> {
        let end = self.at.checked_add(size).filter(|end| *end <= self.len).ok_or(LayerError::Cut { at: self.len })?;
        // The last one may lack its padding.
        self.at = end.next_multiple_of(BLOCK).min(self.len);
        Ok(())
    }

    fn entry(
        &mut self,
        begin: u64,
        header: &tar::Header,
        size: u64,
        pax: &Pax,
        name: Option<Vec<u8>>,
        link: Option<Vec<u8>>,
    ) -> Result<Entry, LayerError> {
        let bad = |what| LayerError::Bad { at: begin, what };
        let path = pax.values.get(b"path".as_slice()).cloned().or(name).unwrap_or_else(|| short_name(header));
        let link = pax.values.get(b"linkpath".as_slice()).cloned().or(link);
        let link = || link.unwrap_or_else(|| until_zero(&header.as_old().linkname).to_vec());
        let kind = header.as_old().linkflag[0];
        if kind == b'S' || pax.values.keys().any(|key| key.starts_with(b"GNU.sparse.")) {
            return Err(LayerError::Sparse { path: shown(&path) });
        }
        let size = match pax.number("size") {
            Some(size) => size.ok_or_else(|| bad("its size is no number"))?,
            None => size,
        };
        let at = self.at;
        let what = match kind {
            // Before directories had a letter, a slash at the end said it.
            b'0' | 0 | b'7' if path.ends_with(b"/") => What::Dir,
            b'0' | 0 | b'7' => What::File { at, size },
            b'1' => What::HardLink(link()),
            b'2' => What::Symlink(link()),
            b'3' | b'4' => What::Left(Left::Device),
            b'5' => What::Dir,
            b'6' => What::Fifo,
            _ => What::Left(Left::Unknown),
        };
        // A size of what has no contents says nothing: some tools note that of a link's target.
        match (&what, kind) {
            (What::File { .. } | What::Left(Left::Unknown), _) | (What::Dir, b'0' | 0 | b'7') => self.skip(size)?,
            (What::Dir | What::HardLink(_) | What::Symlink(_) | What::Fifo | What::Left(_), _) => {}
        }
        Ok(Entry { path, what, attrs: attrs(header, pax).ok_or_else(|| bad("its owner, mode or time is no number"))? })
    }
}

/// An entry's attributes; nothing if one of them can't be read.
fn attrs(header: &tar::Header, pax: &Pax) -> Option<Attrs> {
    let old = header.as_old();
    let owner = |key: &str, short: Option<u64>| -> Option<u32> { u32::try_from(pax.number(key).unwrap_or(short)?).ok() };
    let mtime = match pax.text("mtime") {
        Some(text) => text.split('.').next()?.parse::<i64>().ok()?,
        None => i64::try_from(number(&old.mtime, header.mtime())?).unwrap_or(0),
    };
    let mut attrs = Attrs {
        mode: (number(&old.mode, header.mode().map(u64::from))? & 0o7777) as u16,
        uid: owner("uid", number(&old.uid, header.uid()))?,
        gid: owner("gid", number(&old.gid, header.gid()))?,
        // Before 1970 there were no such files.
        mtime: u64::try_from(mtime).unwrap_or(0),
        ..Attrs::default()
    };
    for (key, value) in &pax.values {
        if let Some(name) = key.strip_prefix(b"SCHILY.xattr.") {
            attrs.put_xattr(name, value);
        }
    }
    Some(attrs)
}

/// A number of a header. A field that was left empty says 0.
fn number(field: &[u8], read: io::Result<u64>) -> Option<u64> {
    if field.iter().all(|byte| matches!(byte, 0 | b' ')) { Some(0) } else { read.ok() }
}

/// The name in the header itself.
fn short_name(header: &tar::Header) -> Vec<u8> {
    let name = until_zero(&header.as_old().name).to_vec();
    match header.as_ustar() {
        Some(ustar) if ustar.prefix[0] != 0 => [until_zero(&ustar.prefix), b"/", &name].concat(),
        _ => name,
    }
}

fn until_zero(bytes: &[u8]) -> &[u8] {
    let end = bytes.iter().position(|byte| *byte == 0).unwrap_or(bytes.len());
    &bytes[..end]
}

#[cfg(test)]
mod tests;
