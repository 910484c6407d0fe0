//! A layer's blob, unpacked: gzip, zstd or not packed at all.
//!
//! Owns telling them apart (by their first bytes, since media types are often wrong), the limit on what comes out, and its digest. Does
//! not own what is in it (`layer`).

use std::fs::File;
use std::io::{self, BufReader, Read, Seek, SeekFrom, Write};
use std::path::Path;

use sha2::{Digest as _, Sha256};

use super::oci::{Digest, digest_of};

/// Most bytes that an image's layers may hold unpacked, together.
pub const UNPACKED_BYTES_MAX: u64 = 64 << 30;
/// Bytes moved at once.
const PIECE: usize = 128 * 1024;
/// Largest window that a zstd frame may ask for, as a power of two: 128 MiB, what `zstd --ultra` makes without `--long`.
const ZSTD_WINDOW_LOG_MAX: u32 = 27;

/// A layer that can't be unpacked.
#[derive(Debug, thiserror::Error)]
pub enum UnpackError {
    /// It can't be read or is broken, or there is no room for it.
    #[error("the layer can't be unpacked: {0}")]
    Io(#[from] io::Error),
    /// More comes out than may.
    #[error("the image's layers hold more than {max} bytes; make it smaller")]
    Large {
        /// The most they may hold.
        max: u64,
    },
    /// What comes out is something else than the image says.
    #[error("the unpacked layer has the digest {found}, the image's configuration says {wanted}; it was not made by a usual tool")]
    Digest {
        /// What came out.
        found: Digest,
        /// What should have.
        wanted: Digest,
    },
}

/// A layer that can be read at any place.
#[derive(Debug)]
pub struct Unpacked {
    /// The archive.
    pub file: File,
    /// Its size.
    pub bytes: u64,
}

/// Unpacks `blob`, whose digest is `digest`, into `scratch`, an empty file, or leaves it where it is if it is not packed. `left`: bytes
/// that may come out, of the `max` for the whole image.
///
/// # Errors
/// [`UnpackError`].
pub fn unpack(blob: &Path, digest: &Digest, scratch: File, wanted: Option<&Digest>, left: u64, max: u64) -> Result<Unpacked, UnpackError> {
    let mut file = File::open(blob)?;
    let mut magic = Vec::new();
    (&file).take(4).read_to_end(&mut magic)?;
    file.seek(SeekFrom::Start(0))?;
    let packed = BufReader::with_capacity(PIECE, file.try_clone()?);
    let (found, bytes, file) = if magic.starts_with(&[0x1f, 0x8b]) {
        pour(flate2::bufread::MultiGzDecoder::new(packed), scratch, left, max)?
    } else if magic.starts_with(&[0x28, 0xb5, 0x2f, 0xfd]) {
        let mut decoder = zstd::stream::read::Decoder::with_buffer(packed)?;
        decoder.window_log_max(ZSTD_WINDOW_LOG_MAX)?;
        pour(decoder, scratch, left, max)?
    } else {
        let bytes = file.metadata()?.len();
        if bytes > left {
            return Err(UnpackError::Large { max });
        }
        (digest.clone(), bytes, file)
    };
    match wanted {
        Some(wanted) if *wanted != found => Err(UnpackError::Digest { found, wanted: wanted.clone() }),
        _ => Ok(Unpacked { file, bytes }),
    }
}

fn pour<R: Read>(mut from: R, mut into: File, left: u64, max: u64) -> Result<(Digest, u64, File), UnpackError> {
    let (mut hash, mut bytes, mut buffer) = (Sha256::new(), 0u64, vec![0; PIECE]);
    loop {
        let piece = match from.read(&mut buffer) {
            Ok(0) => break,
            Ok(piece) => &buffer[..piece],
            Err(why) if why.kind() == io::ErrorKind::Interrupted => continue,
            Err(why) => return Err(why.into()),
        };
        bytes += piece.len() as u64;
        if bytes > left {
            return Err(UnpackError::Large { max });
        }
        hash.update(piece);
        into.write_all(piece)?;
    }
    Ok((digest_of(hash), bytes, into))
}
