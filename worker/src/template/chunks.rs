//! Chunks: a snapshot's file in pieces, each compressed, sealed and named by what is in it.
//!
//! Owns where a file is cut, which pieces are left out, and the bytes of an object. Pure: reads and writes are `share`'s.
//!
//! An object is `VTC1`, the key's id (8 bytes), a nonce (24 bytes), then the sealed zstd frame with its tag. Its name is the keyed BLAKE3 of
//! the plain bytes, so equal pieces of one owner are one object. Sealed with XChaCha20-Poly1305; what stands before the nonce, the name and
//! the plain size are authenticated with it, so that an object under another's name does not open.
//!
//! **Nonces** are drawn at random for each seal and stored in the object. They are not derived from the plain bytes: another version of
//! zstd makes other bytes of the same piece, which would then be sealed under one nonce, and that must never happen. With 192 bits,
//! 2^60 seals under one key meet with a chance below 2^-70.

use std::ops::Range;

use chacha20poly1305::aead::{Aead, Payload};
use chacha20poly1305::{KeyInit, XChaCha20Poly1305, XNonce};

use super::keys::{KeyId, OwnerKey};

/// Size of a piece. A guest's memory is a patchwork of written and unwritten pages, so small pieces leave out more zeros, and equal ones
/// are found more often; each is a request, and a request costs milliseconds on S3. Measured in record 22.
pub const CHUNK_BYTES: u32 = 1 << 20;
/// Sizes that are read, so that the one above can change: below, manifests grow; above, a piece takes too much memory.
pub const CHUNK_BYTES_READ: std::ops::RangeInclusive<u32> = (64 << 10)..=(16 << 20);
/// Unit in which zeros are left out within a piece: the guest's and the host's page.
pub const PAGE_BYTES: usize = 4 << 10;
/// zstd's level: higher ones cost the builder more time than the smaller objects save.
const LEVEL: i32 = 1;
/// How an object begins.
const MAGIC: [u8; 4] = *b"VTC1";
const NONCE_BYTES: usize = 24;
const TAG_BYTES: usize = 16;
/// Before the sealed bytes.
const HEAD_BYTES: usize = MAGIC.len() + 8 + NONCE_BYTES;

/// Why an object is not the piece that is wanted.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ChunkError {
    /// It has another form.
    #[error("it is no chunk of a template ({0} bytes)")]
    Form(usize),
    /// Sealed with another key.
    #[error("it is sealed with the key {found}, not with {wanted}")]
    Key {
        /// The key of the manifest.
        wanted: KeyId,
        /// The object's.
        found: KeyId,
    },
    /// Damaged, truncated, or another piece's.
    #[error("it does not open: it was damaged, or is another one's")]
    Seal,
    /// Its plain bytes are not those that it is named by.
    #[error("it holds other bytes than it is named by")]
    Content,
    /// It can't be made.
    #[error("{0}")]
    Make(String),
}

/// Names a piece: the keyed BLAKE3 of its plain bytes.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct ChunkName(pub [u8; 32]);

impl std::fmt::Display for ChunkName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(blake3::Hash::from_bytes(self.0).to_hex().as_str())
    }
}

impl std::fmt::Debug for ChunkName {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        std::fmt::Display::fmt(self, f)
    }
}

/// The numbers of the pieces of a file that may hold something, in order. `data`: where it has data, in order; elsewhere are holes.
#[must_use]
pub fn cut(bytes: u64, chunk_bytes: u32, data: &[Range<u64>]) -> Vec<u32> {
    let size = u64::from(chunk_bytes.max(1));
    let mut pieces: Vec<u32> = Vec::new();
    for part in data {
        let end = part.end.min(bytes);
        if part.start >= end {
            continue;
        }
        for piece in part.start / size..=(end - 1) / size {
            let Ok(piece) = u32::try_from(piece) else { break };
            if pieces.last().is_none_or(|last| *last < piece) {
                pieces.push(piece);
            }
        }
    }
    pieces
}

/// Where a piece lies in its file.
#[must_use]
pub fn range(bytes: u64, chunk_bytes: u32, piece: u32) -> Range<u64> {
    let start = u64::from(piece).saturating_mul(chunk_bytes.into());
    start.min(bytes)..start.saturating_add(chunk_bytes.into()).min(bytes)
}

/// Does it hold nothing but zeros?
#[must_use]
pub fn is_zero(bytes: &[u8]) -> bool {
    let (words, rest) = bytes.as_chunks::<8>();
    words.iter().all(|word| u64::from_ne_bytes(*word) == 0) && rest.iter().all(|byte| *byte == 0)
}

/// The parts of a piece that hold something, in whole pages: what is not written stays a hole, which takes no memory.
pub fn written(plain: &[u8]) -> impl Iterator<Item = Range<usize>> {
    let mut at = 0;
    std::iter::from_fn(move || {
        let page = |at: usize| plain.get(at..plain.len().min(at + PAGE_BYTES)).filter(|page| !page.is_empty());
        while page(at).is_some_and(is_zero) {
            at += PAGE_BYTES;
        }
        let start = at;
        while page(at).is_some_and(|page| !is_zero(page)) {
            at += PAGE_BYTES;
        }
        (at > start).then(|| start..at.min(plain.len()))
    })
}

/// The name of a piece.
#[must_use]
pub fn name(key: &OwnerKey, plain: &[u8]) -> ChunkName {
    ChunkName(*blake3::keyed_hash(&key.naming, plain).as_bytes())
}

/// Compresses and seals a piece. `nonce` is fresh and random.
///
/// # Errors
/// [`ChunkError::Make`].
pub fn seal(key: &OwnerKey, name: ChunkName, plain: &[u8], nonce: [u8; NONCE_BYTES]) -> Result<Vec<u8>, ChunkError> {
    let packed = zstd::bulk::compress(plain, LEVEL).map_err(|e| ChunkError::Make(format!("compressing a chunk: {e}")))?;
    let cipher = XChaCha20Poly1305::new(&key.sealing.into());
    let aad = bound(key.id, name, plain.len());
    let sealed = cipher.encrypt(&XNonce::from(nonce), Payload { msg: &packed, aad: &aad });
    let sealed = sealed.map_err(|e| ChunkError::Make(format!("sealing a chunk: {e}")))?;
    Ok([&MAGIC[..], &key.id.0, &nonce, &sealed].concat())
}

/// Opens an object and makes sure that it is the piece of this name and size.
///
/// # Errors
/// [`ChunkError`].
pub fn open(key: &OwnerKey, name: ChunkName, plain_bytes: usize, object: &[u8]) -> Result<Vec<u8>, ChunkError> {
    let form = || ChunkError::Form(object.len());
    let (head, sealed) = object.split_at_checked(HEAD_BYTES).ok_or_else(form)?;
    let (magic, rest) = head.split_first_chunk::<4>().ok_or_else(form)?;
    let (id, nonce) = rest.split_first_chunk::<8>().ok_or_else(form)?;
    let nonce = <[u8; NONCE_BYTES]>::try_from(nonce).map_err(|_| form())?;
    if *magic != MAGIC {
        return Err(form());
    }
    if KeyId(*id) != key.id {
        return Err(ChunkError::Key { wanted: key.id, found: KeyId(*id) });
    }
    let cipher = XChaCha20Poly1305::new(&key.sealing.into());
    let aad = bound(key.id, name, plain_bytes);
    let packed = cipher.decrypt(&XNonce::from(nonce), Payload { msg: sealed, aad: &aad }).map_err(|_| ChunkError::Seal)?;
    let plain = zstd::bulk::decompress(&packed, plain_bytes).map_err(|_| ChunkError::Content)?;
    if plain.len() != plain_bytes || self::name(key, &plain) != name {
        return Err(ChunkError::Content);
    }
    Ok(plain)
}

/// Most bytes of a piece's object: zstd's own bound for what can't be compressed, and ours.
#[must_use]
pub fn object_bytes_max(plain_bytes: usize) -> u64 {
    (HEAD_BYTES + zstd::zstd_safe::compress_bound(plain_bytes) + TAG_BYTES) as u64
}

/// What is authenticated with a piece.
fn bound(id: KeyId, name: ChunkName, plain_bytes: usize) -> Vec<u8> {
    [&MAGIC[..], &id.0, &name.0, &(plain_bytes as u64).to_le_bytes()].concat()
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::template::Owner;
    use crate::template::keys::Keys;

    fn key(byte: u8) -> OwnerKey {
        Keys::parse(&hex::encode([byte; 32])).unwrap().current(&Owner::Public)
    }

    /// A file of pages, many of them zeros.
    fn file() -> impl Strategy<Value = Vec<u8>> {
        let page = prop_oneof![3 => Just(vec![0; PAGE_BYTES]), 1 => proptest::collection::vec(any::<u8>(), PAGE_BYTES), 1 => Just({
            let mut page = vec![0; PAGE_BYTES];
            page[PAGE_BYTES - 1] = 1;
            page
        })];
        (proptest::collection::vec(page, 0..40), 0..PAGE_BYTES).prop_map(|(pages, cut)| {
            let mut all = pages.concat();
            all.truncate(all.len().saturating_sub(cut));
            all
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        #[test]
        fn a_file_is_what_it_was_after_it_was_cut_and_sealed(plain in file(), nonce: [u8; 24]) {
            let (key, size) = (key(1), 16 << 10);
            let mut back = vec![0; plain.len()];
            let mut wrote = 0;
            let whole = 0..plain.len() as u64;
            for piece in cut(whole.end, size, &[whole]) {
                let at = range(plain.len() as u64, size, piece);
                let at = at.start as usize..at.end as usize;
                let part = &plain[at.clone()];
                if is_zero(part) {
                    continue;
                }
                let name = name(&key, part);
                let object = seal(&key, name, part, nonce).unwrap();
                prop_assert!(object.len() as u64 <= object_bytes_max(part.len()));
                let opened = open(&key, name, part.len(), &object).unwrap();
                for run in written(&opened) {
                    back[at.clone()][run.clone()].copy_from_slice(&opened[run.clone()]);
                    wrote += run.len();
                }
            }
            prop_assert_eq!(&back, &plain);
            prop_assert_eq!(wrote, plain.chunks(PAGE_BYTES).filter(|page| !is_zero(page)).map(<[u8]>::len).sum::<usize>());
        }

        #[test]
        fn what_was_cut_off_changed_or_moved_does_not_open(
            plain in proptest::collection::vec(any::<u8>(), 1..9_000), at: prop::sample::Index, bit in 0u8..8, nonce: [u8; 24],
        ) {
            let key = key(1);
            let own = name(&key, &plain);
            let object = seal(&key, own, &plain, nonce).unwrap();
            let cut_at = at.index(object.len());
            prop_assert!(open(&key, own, plain.len(), &object[..cut_at]).is_err());
            let mut changed = object.clone();
            changed[cut_at] ^= 1 << bit;
            prop_assert!(open(&key, own, plain.len(), &changed).is_err());
            prop_assert!(open(&key, own, plain.len() + 1, &object).is_err());
            prop_assert!(open(&key, name(&key, b"another"), plain.len(), &object).is_err());
            prop_assert!(open(&super::tests::key(2), own, plain.len(), &object).is_err());
        }

        #[test]
        fn pieces_cover_all_data_and_are_in_order(bytes in 0u64..2_000_000, parts in proptest::collection::vec((0u64..2_000_000, 0u64..300_000), 0..6)) {
            let mut data: Vec<Range<u64>> = parts.iter().map(|(start, len)| *start..start + len).collect();
            data.sort_by_key(|part| part.start);
            let pieces = cut(bytes, 64 << 10, &data);
            prop_assert!(pieces.windows(2).all(|pair| pair[0] < pair[1]));
            let covered = |at: u64| pieces.iter().any(|piece| range(bytes, 64 << 10, *piece).contains(&at));
            for part in data.iter().filter(|part| part.start < part.end.min(bytes)) {
                prop_assert!(covered(part.start) && covered(part.end.min(bytes) - 1));
            }
            prop_assert!(pieces.iter().all(|piece| !range(bytes, 64 << 10, *piece).is_empty()));
        }
    }

    #[test]
    fn the_same_piece_has_one_name_for_an_owner_and_another_one_for_others() {
        assert_eq!(name(&key(1), b"piece"), name(&key(1), b"piece"));
        assert_ne!(name(&key(1), b"piece"), name(&key(2), b"piece"));
        assert_ne!(name(&key(1), b"piece").0, *blake3::hash(b"piece").as_bytes());
    }
}
