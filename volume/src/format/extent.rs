//! Where blocks of the disk lie: an extent, and the pack that holds it.
//!
//! Owns the two fixed layouts that pack tables and map pages are made of. Does not own those.
//!
//! An **extent** is a run of blocks that was packed and sealed as one. A pointer maps a run of the disk to a part of one: after an overwrite in its
//! middle two pointers share it. 48 bytes:
//! ```text
//! 0    8   first block of the disk
//! 8    4   blocks that are mapped, at least 1
//! 12   4   blocks of the extent before the first mapped one
//! 16   4   pack: its place in the page's list; 0 in a pack's own table
//! 20   4   offset of the frame in the pack
//! 24   4   stored bytes of the frame, with tag
//! 28   2   blocks of the whole extent
//! 30   1   codec: 0 raw, 1 zstd, 255 a hole (all other fields but the first two are zeros)
//! 31   1   reserved
//! 32   16  BLAKE3-128 of the whole extent's plain bytes
//! ```
//! The **reference to a pack** has 56 bytes:
//! ```text
//! 0    16  volume that wrote it
//! 16   8   epoch
//! 24   8   sequence
//! 32   4   number within the commit
//! 36   4   reserved
//! 40   16  salt of its writing, so that a frame is opened without reading the pack's header
//! ```

use minicbor::{Decode, Encode};
use volley_jobspecs::ids::VolumeId;

use super::fields::{Fields, Writer};
use super::object::Frame;
use super::seal::{FamilyKey, ObjectKey, Salt};
use super::{BLOCK, BLOCK_BYTES, FormatError, SIZE_MAX, keys};

/// Bytes of a pointer.
pub const POINTER_BYTES: usize = 48;
/// Bytes of a reference to a pack.
pub const PACK_REF_BYTES: usize = 56;
/// Most blocks of an extent, 256 KiB: whoever wants one block of it fetches and opens all.
pub const EXTENT_BLOCKS_MAX: u16 = 64;
/// Its bytes.
pub const EXTENT_BYTES_MAX: usize = EXTENT_BLOCKS_MAX as usize * BLOCK_BYTES;
/// Most blocks that one hole maps; a longer one is several.
pub const HOLE_BLOCKS_MAX: u32 = 1 << 31;
const HOLE: u8 = 255;

/// Names a pack.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Encode, Decode)]
pub struct PackRef {
    /// The volume that wrote it: another one's, in a clone.
    #[n(0)]
    pub volume: VolumeId,
    /// Of the writer.
    #[n(1)]
    pub epoch: u64,
    /// Of the commit.
    #[n(2)]
    pub seq: u64,
    /// Within the commit.
    #[n(3)]
    pub n: u32,
    /// Of its writing.
    #[cbor(n(4), with = "minicbor::bytes")]
    pub salt: Salt,
}

impl PackRef {
    /// Its key in the bucket.
    #[must_use]
    pub fn key(&self) -> String {
        keys::pack(self.volume, self.epoch, self.seq, self.n)
    }

    /// What opens its frames.
    ///
    /// # Errors
    /// [`FormatError::Make`].
    pub fn opens_with(&self, family: &FamilyKey) -> Result<ObjectKey, FormatError> {
        family.object(&self.key(), &self.salt)
    }

    /// Reads one.
    ///
    /// # Errors
    /// [`FormatError`].
    pub fn read(fields: &mut Fields<'_>) -> Result<Self, FormatError> {
        let (volume, epoch, seq, n) = (VolumeId(fields.array()?), fields.u64()?, fields.u64()?, fields.u32()?);
        fields.reserved::<4>()?;
        Ok(Self { volume, epoch, seq, n, salt: fields.array()? })
    }

    /// Writes one.
    pub fn write(&self, out: &mut Writer) {
        out.bytes(&self.volume.0).u64(self.epoch).u64(self.seq).u32(self.n).reserved::<4>().bytes(&self.salt);
    }
}

/// Where an extent lies in its pack, and what it must be.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Stored {
    /// The pack's place in the list of packs beside it.
    pub pack: u32,
    /// The frame.
    pub frame: Frame,
    /// Blocks of the extent before the first mapped one.
    pub skip: u32,
    /// BLAKE3-128 of the extent's plain bytes.
    pub hash: [u8; 16],
}

/// A run of blocks of the disk and where it lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Pointer {
    /// First block of the disk.
    pub block: u64,
    /// Blocks.
    pub blocks: u32,
    /// Where; None: it reads as zeros.
    pub stored: Option<Stored>,
}

impl Pointer {
    /// The block behind it.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.block.saturating_add(u64::from(self.blocks))
    }

    /// The part of it within `from..to`, if there is one.
    #[must_use]
    pub fn part(&self, from: u64, to: u64) -> Option<Self> {
        let (start, end) = (self.block.max(from), self.end().min(to));
        let blocks = u32::try_from(end.checked_sub(start)?).ok().filter(|blocks| *blocks > 0)?;
        let before = u32::try_from(start - self.block).ok()?;
        let stored = match self.stored {
            Some(stored) => Some(Stored { skip: stored.skip.checked_add(before)?, ..stored }),
            None => None,
        };
        Some(Self { block: start, blocks, stored })
    }

    /// Reads one and checks all that can be checked without its neighbours.
    ///
    /// # Errors
    /// [`FormatError`].
    pub fn read(fields: &mut Fields<'_>) -> Result<Self, FormatError> {
        let (block, blocks, skip, pack) = (fields.u64()?, fields.u32()?, fields.u32()?, fields.u32()?);
        let (offset, stored_bytes, extent, codec) = (fields.u32()?, fields.u32()?, fields.u16()?, fields.u8()?);
        fields.reserved::<1>()?;
        let hash: [u8; 16] = fields.array()?;
        if blocks == 0 || block.checked_add(u64::from(blocks)).is_none_or(|end| end > SIZE_MAX / BLOCK) {
            return Err(fields.bad("run of blocks", block));
        }
        if codec == HOLE {
            let empty = skip == 0 && pack == 0 && offset == 0 && stored_bytes == 0 && extent == 0 && hash == [0; 16];
            return if empty { Ok(Self { block, blocks, stored: None }) } else { Err(fields.bad("hole with a place", block)) };
        }
        if extent == 0 || extent > EXTENT_BLOCKS_MAX || skip.checked_add(blocks).is_none_or(|end| end > u32::from(extent)) {
            return Err(fields.bad("blocks of an extent", u64::from(extent)));
        }
        let frame = Frame { offset, stored: stored_bytes, plain: u32::from(extent) * BLOCK as u32, codec };
        if !frame.is_sound(EXTENT_BYTES_MAX) {
            return Err(fields.bad("place of an extent", u64::from(offset)));
        }
        Ok(Self { block, blocks, stored: Some(Stored { pack, frame, skip, hash }) })
    }

    /// Writes one.
    pub fn write(&self, out: &mut Writer) {
        out.u64(self.block).u32(self.blocks);
        match &self.stored {
            Some(Stored { pack, frame, skip, hash }) => {
                // At most 64 blocks: see `EXTENT_BLOCKS_MAX`.
                let extent = (frame.plain / BLOCK as u32) as u16;
                out.u32(*skip).u32(*pack).u32(frame.offset).u32(frame.stored).u16(extent).u8(frame.codec).reserved::<1>().bytes(hash);
            }
            None => {
                out.reserved::<18>().u8(HOLE).reserved::<17>();
            }
        }
    }
}

/// The hash that a pointer holds of its extent.
#[must_use]
pub fn hash(plain: &[u8]) -> [u8; 16] {
    let mut hash = [0; 16];
    hash.copy_from_slice(&blake3::hash(plain).as_bytes()[..16]);
    hash
}

/// Do pointers lie behind each other, without a block twice?
#[must_use]
pub fn in_order(pointers: &[Pointer]) -> bool {
    pointers.windows(2).all(|pair| pair[0].end() <= pair[1].block)
}

#[cfg(test)]
pub mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Pointers of all shapes within `from..from + room` blocks, in order, into one of `packs`; holes if wanted.
    pub fn pointers(from: u64, room: u32, packs: u32, holes: bool) -> impl Strategy<Value = Vec<Pointer>> {
        let one = (
            0u32..40,
            1u16..=EXTENT_BLOCKS_MAX,
            any::<[u8; 16]>(),
            32u32..1 << 24,
            0..packs,
            any::<bool>(),
            any::<prop::sample::Index>(),
            0u8..4,
        );
        proptest::collection::vec(one, 0..30).prop_map(move |all| {
            let mut out: Vec<Pointer> = Vec::new();
            let mut at = from;
            for (gap, extent, hash, offset, pack, raw, cut, kind) in all {
                let (plain, skip) = (u32::from(extent) * BLOCK as u32, cut.index(extent.into()) as u32);
                let blocks = u32::from(extent) - skip;
                let stored = if raw { plain + 16 } else { plain / 2 };
                let frame = Frame { offset, stored, plain, codec: u8::from(!raw) };
                let stored = (!holes || kind > 0).then_some(Stored { pack, frame, skip, hash });
                let pointer = Pointer { block: at + u64::from(gap), blocks, stored };
                if pointer.end() > from + u64::from(room) {
                    break;
                }
                at = pointer.end();
                out.push(pointer);
            }
            out
        })
    }

    pub fn pack_ref() -> impl Strategy<Value = PackRef> {
        (any::<[u8; 16]>(), any::<u64>(), any::<u64>(), any::<u32>(), any::<Salt>()).prop_map(|(volume, epoch, seq, n, salt)| PackRef {
            volume: VolumeId(volume),
            epoch,
            seq,
            n,
            salt,
        })
    }

    proptest! {
        #[test]
        fn pointers_and_packs_have_their_sizes_and_come_back(all in pointers(7, 4_000, 9, true), pack in pack_ref()) {
            for pointer in all {
                let mut out = Writer::default();
                pointer.write(&mut out);
                let bytes = out.finish();
                prop_assert_eq!(bytes.len(), POINTER_BYTES);
                prop_assert_eq!(Pointer::read(&mut Fields::new("it", &bytes)), Ok(pointer));
            }
            let mut out = Writer::default();
            pack.write(&mut out);
            let bytes = out.finish();
            prop_assert_eq!(bytes.len(), PACK_REF_BYTES);
            prop_assert_eq!(PackRef::read(&mut Fields::new("it", &bytes)), Ok(pack));
        }

        #[test]
        fn whatever_is_read_is_sound(bytes in proptest::collection::vec(any::<u8>(), POINTER_BYTES)) {
            if let Ok(pointer) = Pointer::read(&mut Fields::new("it", &bytes)) {
                prop_assert!(pointer.blocks > 0 && pointer.end() <= SIZE_MAX / BLOCK);
                let mut out = Writer::default();
                pointer.write(&mut out);
                prop_assert_eq!(out.finish(), bytes);
            }
        }

        #[test]
        fn a_part_maps_the_same_blocks(all in pointers(0, 500, 1, true), from in 0u64..500, len in 0u64..100) {
            let of = |pointer: &Pointer, block: u64| pointer.stored.map(|stored| (stored.hash, u64::from(stored.skip) + block - pointer.block));
            for pointer in all {
                let part = pointer.part(from, from + len);
                for block in from..from + len {
                    let inside = (pointer.block..pointer.end()).contains(&block);
                    prop_assert_eq!(part.is_some_and(|part| (part.block..part.end()).contains(&block)), inside);
                    if let (Some(part), true) = (part, inside) {
                        prop_assert_eq!(of(&part, block), of(&pointer, block));
                    }
                }
            }
        }
    }
}
