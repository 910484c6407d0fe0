//! Rows of the host's index: where the cache file has an extent, and the keys that open it.
//!
//! Owns their fields. They lie in RocksDB (`io/index.rs`), in CBOR, and are never believed: what they name opens with its tags or is not there.
//!
//! - `cache`: the key is (pack, offset of the extent in it); the value a [`Cached`].
//! - `keys`: the key is the number of a session, 4 bytes, big end first; the value a wrapped key (`seal.rs`). A session is one start of a host: each has
//!   a key of its own, so that no nonce is used again whatever of the index is lost.
//! - `frames`: the key is an object's key in the bucket, a zero, and the frame's offset, 4 bytes; the value the frame as the bucket has it, sealed.

use minicbor::{Decode, Encode};
use volley_jobspecs::ids::VolumeId;

use super::BLOCK_BYTES;
use super::extent::PackRef;
use super::seal::TAG_BYTES;

/// Bytes of a slot of the cache file: the extents that are written have that size.
pub const SLOT_BYTES: usize = 64 << 10;
/// Blocks of a slot.
pub const SLOT_BLOCKS: usize = SLOT_BYTES / BLOCK_BYTES;
/// Whose key the sessions' keys are wrapped as: no volume has this id.
pub const SESSIONS: VolumeId = VolumeId([0; 16]);

/// An extent's name: its pack and its offset in it.
pub type ExtentKey = (PackRef, u32);

/// Where the cache file has an extent.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
pub struct Cached {
    /// The session whose key seals it.
    #[n(0)]
    pub session: u32,
    /// Index of its first block's nonce; the others' follow.
    #[n(1)]
    pub first: u64,
    /// The slots of its blocks, in order.
    #[n(2)]
    pub slots: Vec<u32>,
    /// The tags of its blocks, 16 bytes each.
    #[cbor(n(3), with = "minicbor::bytes")]
    pub tags: Vec<u8>,
}

impl Cached {
    /// The tag of a block.
    #[must_use]
    pub fn tag(&self, block: usize) -> Option<&[u8; TAG_BYTES]> {
        self.tags.as_chunks::<TAG_BYTES>().0.get(block)
    }

    /// Does it hang together, in a file of so many slots?
    #[must_use]
    pub fn fits(&self, slots_max: u32) -> bool {
        let blocks = self.tags.len() / TAG_BYTES;
        let whole = self.tags.len().is_multiple_of(TAG_BYTES) && blocks > 0 && self.slots.len() == blocks.div_ceil(SLOT_BLOCKS);
        whole && self.slots.iter().all(|slot| *slot < slots_max) && self.first.checked_add(blocks as u64).is_some()
    }

    /// A row.
    #[must_use]
    pub fn write(key: &ExtentKey, value: &Self) -> Option<(Vec<u8>, Vec<u8>)> {
        Some((minicbor::to_vec(key).ok()?, minicbor::to_vec(value).ok()?))
    }

    /// Reads a row. None: it is damaged, or does not fit.
    #[must_use]
    pub fn read(key: &[u8], value: &[u8], slots_max: u32) -> Option<(ExtentKey, Self)> {
        let (key, value): (ExtentKey, Self) = (minicbor::decode(key).ok()?, minicbor::decode(value).ok()?);
        value.fits(slots_max).then_some((key, value))
    }
}

/// The key of a frame's row.
#[must_use]
pub fn frame_key(object: &str, offset: u32) -> Vec<u8> {
    let mut key = Vec::with_capacity(object.len() + 5);
    key.extend_from_slice(object.as_bytes());
    key.push(0);
    key.extend_from_slice(&offset.to_be_bytes());
    key
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_row_comes_back_and_one_that_does_not_fit_is_none(
            id: [u8; 16], epoch: u64, n: u32, offset: u32, session: u32, first in 0u64..1 << 60, blocks in 1usize..200, cut: prop::sample::Index, slot in 0u32..64,
        ) {
            let pack = PackRef { volume: VolumeId(id), epoch, seq: 1, n, salt: id };
            let cached = Cached { session, first, slots: vec![slot; blocks.div_ceil(SLOT_BLOCKS)], tags: vec![7; blocks * TAG_BYTES] };
            let (key, value) = Cached::write(&(pack, offset), &cached).unwrap();
            prop_assert_eq!(Cached::read(&key, &value, 64), Some(((pack, offset), cached.clone())));
            prop_assert_eq!(Cached::read(&key, &value, slot), None);
            prop_assert_eq!(Cached::read(&key, &value[..cut.index(value.len())], 64), None);
            prop_assert_eq!(Cached::read(&key[..cut.index(key.len())], &value, 64), None);
            let odd = [
                Cached { tags: vec![7; blocks * TAG_BYTES + 1], ..cached.clone() },
                Cached { slots: vec![slot; blocks.div_ceil(SLOT_BLOCKS) + 1], ..cached.clone() },
                Cached { first: u64::MAX, ..cached },
            ];
            for odd in odd {
                let (key, value) = Cached::write(&(pack, offset), &odd).unwrap();
                prop_assert_eq!(Cached::read(&key, &value, 64), None);
            }
        }
    }
}
