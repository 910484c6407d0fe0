//! One stored object: its bytes, then a trailer with everything else.
//!
//! Owns the file format. Bytes and metadata lie in one file so that one rename replaces both at once.
//! ```text
//! object bytes | trailer JSON | crc32 of the JSON, u32 LE | length of the JSON, u32 LE | magic, 8 bytes
//! ```

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Write};
use std::os::unix::fs::FileExt;

use serde::{Deserialize, Serialize};

/// The last bytes of every object file; the digit is the format's version.
const MAGIC: &[u8; 8] = b"vlyobj1\n";
/// crc, length, magic.
const FOOTER_BYTES: usize = 16;
/// A trailer with the longest key and the 2 KiB of metadata that S3 allows is far smaller.
const TRAILER_BYTES_MAX: usize = 64 * 1024;
/// Read from the end at first: holds nearly every trailer.
const TAIL_BYTES: usize = 2048;

/// All of an object but its bytes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Trailer {
    /// The full key, so that a file can be told from its content alone.
    pub(super) key: String,
    /// Size in bytes.
    pub(super) bytes: u64,
    /// Entity tag, unquoted.
    pub(super) etag: String,
    /// Last write, Unix milliseconds.
    pub(super) modified_ms: u64,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) content_type: Option<String>,
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    pub(super) metadata: BTreeMap<String, String>,
}

/// Appends the trailer at the file's position, which must be the end of the object's bytes.
pub(super) fn write_trailer(file: &mut File, trailer: &Trailer) -> io::Result<()> {
    let mut tail = serde_json::to_vec(trailer)?;
    let length = u32::try_from(tail.len()).ok().filter(|length| *length as usize <= TRAILER_BYTES_MAX);
    let length = length.ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "more metadata than an object may have"))?;
    let crc = crc32fast::hash(&tail);
    tail.extend(crc.to_le_bytes());
    tail.extend(length.to_le_bytes());
    tail.extend(MAGIC);
    file.write_all(&tail)
}

/// Reads and checks the trailer of a whole object file.
pub(super) fn read_trailer(file: &File) -> io::Result<Trailer> {
    let total = file.metadata()?.len();
    let tail = read_tail(file, total, TAIL_BYTES)?;
    let (rest, footer) = tail.split_at_checked(tail.len().wrapping_sub(FOOTER_BYTES)).ok_or_else(|| damaged("too short"))?;
    let field = |at: usize| footer.get(at..at + 4).and_then(|bytes| bytes.try_into().ok()).map(u32::from_le_bytes);
    let (Some(crc), Some(length)) = (field(0), field(4)) else { return Err(damaged("too short")) };
    if !footer.ends_with(MAGIC) {
        return Err(damaged("no trailer"));
    }
    let length = length as usize;
    if length > TRAILER_BYTES_MAX {
        return Err(damaged("trailer too long"));
    }
    let longer;
    let json = match rest.len().checked_sub(length) {
        Some(start) => &rest[start..],
        None => {
            longer = read_tail(file, total, length + FOOTER_BYTES)?;
            longer.get(..length).ok_or_else(|| damaged("too short"))?
        }
    };
    if crc32fast::hash(json) != crc {
        return Err(damaged("trailer checksum"));
    }
    let trailer: Trailer = serde_json::from_slice(json)?;
    if trailer.bytes.checked_add((length + FOOTER_BYTES) as u64) != Some(total) {
        return Err(damaged("size differs from the trailer's"));
    }
    Ok(trailer)
}

fn read_tail(file: &File, total: u64, bytes: usize) -> io::Result<Vec<u8>> {
    let bytes = total.min(bytes as u64);
    let mut tail = vec![0; bytes as usize];
    file.read_exact_at(&mut tail, total - bytes)?;
    Ok(tail)
}

fn damaged(what: &str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, format!("the stored object is damaged: {what}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn trailer(bytes: u64, metadata: usize) -> Trailer {
        let metadata = (0..metadata).map(|n| (format!("name-{n}"), "v".repeat(50))).collect();
        let (key, etag) = ("a/b".to_owned(), "e".to_owned());
        Trailer { key, bytes, etag, modified_ms: 7, content_type: Some("text/plain".to_owned()), metadata }
    }

    fn stored(body: &[u8], trailer: &Trailer) -> File {
        let mut file = tempfile::tempfile().unwrap();
        file.write_all(body).unwrap();
        write_trailer(&mut file, trailer).unwrap();
        file
    }

    #[test]
    fn trailers_read_back_short_and_long() {
        for (body, metadata) in [(&b""[..], 0), (b"x", 1), (&[7; 5000], 0), (b"x", 200)] {
            let trailer = trailer(body.len() as u64, metadata);
            assert_eq!(read_trailer(&stored(body, &trailer)).unwrap(), trailer);
        }
    }

    #[test]
    fn damage_is_seen() {
        let good = trailer(3, 0);
        let file = stored(b"abc", &good);
        let total = file.metadata().unwrap().len();
        for at in 3..total {
            let mut byte = [0];
            file.read_exact_at(&mut byte, at).unwrap();
            file.write_all_at(&[byte[0] ^ 0x55], at).unwrap();
            assert!(read_trailer(&file).is_err(), "byte {at}");
            file.write_all_at(&byte, at).unwrap();
        }
        assert_eq!(read_trailer(&file).unwrap(), good);
        file.set_len(total - 1).unwrap();
        assert!(read_trailer(&file).is_err());
        file.set_len(0).unwrap();
        assert!(read_trailer(&file).is_err());
    }
}
