//! The log: what was written to a volume and is not in S3 yet, in segments on the host's disk.
//!
//! Owns the layout of a segment's header and of a record, and their checks. Reading a whole log is `state/scan.rs`'s, files are `io/log.rs`'s.
//!
//! A segment is a file of 64 MiB, preallocated, and used again when what is in it is no longer wanted. Each use has a salt of its own and so a
//! key of its own: what an earlier use left behind opens as nothing. A use is written by one process only, each byte once.
//!
//! The **header**, in the first 4 KiB, zeros behind it:
//! ```text
//! 0    4   VVLS
//! 4    2   version, 1
//! 6    2   reserved
//! 8    16  volume
//! 24   8   epoch
//! 32   8   number of the segment, rising by one, over all epochs
//! 40   8   number of its first operation
//! 48   16  salt of this use
//! 64   32  reserved
//! 96   16  tag: AES-256-GCM of nothing, the bytes before it authenticated
//! ```
//! A **record**, at a multiple of 64, begins with 64 bytes:
//! ```text
//! 0    4   VVLR
//! 4    1   kind: 1 write, 2 zeros, 3 hole, 4 resize, 5 mark
//! 5    3   reserved
//! 8    8   number of the operation; rises by one over all segments and epochs. A mark has that of the operation before it
//! 16   8   first block of the disk; of a resize the new size in bytes
//! 24   8   blocks; of a resize and a mark 0
//! 32   8   durable: all operations up to this one were known to be on the disk
//! 40   8   oldest: segments before this one are not needed: what was the last word in them was appended again. 0: nothing ever was
//! 48   16  tag: AES-256-GCM of nothing; the bytes before it and the tags behind it authenticated
//! 64   16 n  of a write: the tags of its blocks
//! …    4096 n  the blocks, each sealed by itself, so that one is read without the others
//! ```
//! Nonces: the record's offset in the segment, and the block's, with kinds of their own.
//!
//! `durable` tells a torn end from damage: behind it a power cut may have taken anything, and recovery stops at the first record that does not
//! open; before it nothing may be missing.

use volley_jobspecs::ids::VolumeId;

use super::fields::{Fields, Writer};
use super::seal::{FamilyKey, Kind, ObjectKey, Salt, TAG_BYTES};
use super::{BLOCK, BLOCK_BYTES, FormatError, SIZE_MAX, keys};

/// Bytes of a segment. It is the unit in which room is given back; a header costs little of it.
pub const SEGMENT_BYTES: u32 = 64 << 20;
/// Where a segment's first record lies.
pub const RECORDS_FROM: u32 = 4096;
/// Records begin at multiples of it.
pub const ALIGN: u32 = 64;
/// Bytes before a record's tags.
pub const RECORD_HEADER_BYTES: usize = 64;
/// Most blocks of a write's record, 1 MiB: a longer write is several, and each must fit into a segment.
pub const RECORD_BLOCKS_MAX: u64 = 256;
/// How a record begins.
pub const RECORD_MAGIC: [u8; 4] = *b"VVLR";
const SEGMENT_MAGIC: [u8; 4] = *b"VVLS";
const VERSION: u16 = 1;
const HEADER_BYTES: usize = 112;
const RECORD_TAG_AT: usize = RECORD_HEADER_BYTES - TAG_BYTES;
const SEGMENT: &str = "a segment of a volume's log";
const RECORD: &str = "a record of a volume's log";
const DATA: &str = "a block in a volume's log";

/// A segment's header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct SegmentHeader {
    /// The volume.
    pub volume: VolumeId,
    /// The writer's.
    pub epoch: u64,
    /// Of the segment.
    pub segment: u64,
    /// The first operation in it.
    pub first_op: u64,
    /// Of this use.
    pub salt: Salt,
}

impl SegmentHeader {
    /// What seals and opens the segment's records.
    ///
    /// # Errors
    /// [`FormatError::Make`].
    pub fn key(&self, family: &FamilyKey) -> Result<ObjectKey, FormatError> {
        family.object(&keys::segment(self.volume, self.epoch, self.segment), &self.salt)
    }

    /// Its bytes, up to the first record.
    ///
    /// # Errors
    /// [`FormatError::Make`].
    pub fn write(&self, family: &FamilyKey) -> Result<Vec<u8>, FormatError> {
        let mut out = Writer::with_capacity(RECORDS_FROM as usize);
        out.begin(SEGMENT_MAGIC, VERSION).reserved::<2>().bytes(&self.volume.0).u64(self.epoch).u64(self.segment).u64(self.first_op);
        let mut bytes = out.bytes(&self.salt).reserved::<32>().finish();
        let tag = self.key(family)?.seal(Kind::LogHeader, 0, &bytes, &mut [])?;
        bytes.extend_from_slice(&tag);
        bytes.resize(RECORDS_FROM as usize, 0);
        Ok(bytes)
    }

    /// Reads the header of a segment of `volume`. `bytes`: up to the first record.
    ///
    /// # Errors
    /// [`FormatError`]: also for a segment of another volume, which another key opens.
    pub fn read(volume: VolumeId, family: &FamilyKey, bytes: &[u8]) -> Result<Self, FormatError> {
        let mut fields = Fields::new(SEGMENT, bytes);
        fields.begin(SEGMENT_MAGIC, VERSION)?;
        fields.reserved::<2>()?;
        let header = Self {
            volume: VolumeId(fields.array()?),
            epoch: fields.u64()?,
            segment: fields.u64()?,
            first_op: fields.u64()?,
            salt: fields.array()?,
        };
        fields.reserved::<32>()?;
        let tag = fields.array()?;
        let signed = bytes.get(..HEADER_BYTES - TAG_BYTES).unwrap_or_default();
        if header.volume != volume {
            return Err(FormatError::Seal { what: SEGMENT });
        }
        header.key(family)?.open(SEGMENT, Kind::LogHeader, 0, signed, &mut [], &tag)?;
        let rest = fields.bytes(RECORDS_FROM as usize - HEADER_BYTES)?;
        fields.end()?;
        match rest.iter().find(|byte| **byte != 0) {
            Some(byte) => Err(FormatError::Field { what: SEGMENT, field: "reserved", value: u64::from(*byte) }),
            None => Ok(header),
        }
    }
}

/// What a record says.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Change {
    /// These blocks have the bytes behind the record.
    Write {
        /// First block of the disk.
        block: u64,
        /// Blocks, at most [`RECORD_BLOCKS_MAX`].
        blocks: u64,
    },
    /// These blocks read as zeros.
    Zero {
        /// First block of the disk.
        block: u64,
        /// Blocks.
        blocks: u64,
        /// They need keep no room.
        hole: bool,
    },
    /// The disk has this size now, in bytes.
    Resize {
        /// In bytes.
        size: u64,
    },
    /// Nothing: it only carries what every record does.
    Mark,
}

impl Change {
    /// The blocks that it changes.
    #[must_use]
    pub fn blocks(&self) -> std::ops::Range<u64> {
        match *self {
            Self::Write { block, blocks } | Self::Zero { block, blocks, .. } => block..block.saturating_add(blocks),
            Self::Resize { .. } | Self::Mark => 0..0,
        }
    }
}

/// A record of the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Record {
    /// What it says.
    pub change: Change,
    /// Number of the operation.
    pub op: u64,
    /// All operations up to this one were known to be on the disk.
    pub durable: u64,
    /// Segments before this one are not needed: what was the last word in them was appended again.
    pub oldest: u64,
}

impl Record {
    /// Blocks whose bytes follow it.
    #[must_use]
    pub fn data_blocks(&self) -> u64 {
        match self.change {
            Change::Write { blocks, .. } => blocks,
            _ => 0,
        }
    }

    /// Where its blocks begin, from its own first byte.
    #[must_use]
    pub fn data_at(&self) -> u64 {
        RECORD_HEADER_BYTES as u64 + self.data_blocks() * TAG_BYTES as u64
    }

    /// Bytes to the next record.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        (self.data_at() + self.data_blocks() * BLOCK).next_multiple_of(u64::from(ALIGN))
    }

    /// Appends the record to `out`, its blocks sealed, for the offset `at` of the segment. `data`: the plain bytes of a write's blocks, in pieces.
    ///
    /// # Errors
    /// [`FormatError::Make`] if the pieces are not its blocks, or it does not lie within a segment.
    pub fn write(&self, key: &ObjectKey, at: u32, data: &[&[u8]], out: &mut Vec<u8>) -> Result<(), FormatError> {
        let (blocks, bytes) = (self.data_blocks(), data.iter().map(|piece| piece.len() as u64).sum::<u64>());
        let end = u64::from(at) + self.bytes();
        if blocks > RECORD_BLOCKS_MAX || bytes != blocks * BLOCK || !at.is_multiple_of(ALIGN) || end > u64::from(SEGMENT_BYTES) {
            return Err(FormatError::Make { what: RECORD, why: format!("{blocks} blocks, {bytes} bytes at {at} are none") });
        }
        let start = out.len();
        let (data_at, whole) = (self.data_at() as usize, self.bytes() as usize);
        out.reserve(whole);
        out.extend_from_slice(&self.header());
        out.resize(start + data_at, 0);
        data.iter().for_each(|piece| out.extend_from_slice(piece));
        out.resize(start + whole, 0);
        let (front, data) = out.get_mut(start..).unwrap_or_default().split_at_mut(data_at);
        let tags = front.get_mut(RECORD_HEADER_BYTES..).unwrap_or_default();
        let places = (u64::from(at) + data_at as u64..).step_by(BLOCK_BYTES);
        for ((block, tag), place) in data.chunks_exact_mut(BLOCK_BYTES).zip(tags.chunks_exact_mut(TAG_BYTES)).zip(places) {
            tag.copy_from_slice(&key.seal(Kind::LogBlock, place, &[], block)?);
        }
        let signed = signed(front);
        let tag = key.seal(Kind::LogHeader, u64::from(at), &signed, &mut [])?;
        front.get_mut(RECORD_TAG_AT..RECORD_HEADER_BYTES).unwrap_or_default().copy_from_slice(&tag);
        Ok(())
    }

    fn header(&self) -> Vec<u8> {
        let (kind, first, blocks) = match self.change {
            Change::Write { block, blocks } => (1, block, blocks),
            Change::Zero { block, blocks, hole: false } => (2, block, blocks),
            Change::Zero { block, blocks, hole: true } => (3, block, blocks),
            Change::Resize { size } => (4, size, 0),
            Change::Mark => (5, 0, 0),
        };
        let mut out = Writer::with_capacity(RECORD_HEADER_BYTES);
        out.bytes(&RECORD_MAGIC).u8(kind).reserved::<3>().u64(self.op).u64(first).u64(blocks).u64(self.durable).u64(self.oldest);
        out.reserved::<TAG_BYTES>().finish()
    }

    /// Reads the record at the offset `at` of a segment. `bytes`: from there on; what follows it is not looked at. Its blocks are not opened:
    /// [`open_block`] does.
    ///
    /// # Errors
    /// [`FormatError`]: there is none, or none that was written whole by this use of the segment.
    pub fn read(key: &ObjectKey, at: u32, bytes: &[u8]) -> Result<Self, FormatError> {
        let mut fields = Fields::new(RECORD, bytes);
        if fields.array()? != RECORD_MAGIC {
            return Err(FormatError::Magic { what: RECORD });
        }
        let kind = fields.u8()?;
        fields.reserved::<3>()?;
        let (op, first, blocks, durable, oldest) = (fields.u64()?, fields.u64()?, fields.u64()?, fields.u64()?, fields.u64()?);
        let tag = fields.array()?;
        let change = match (kind, blocks) {
            (1, 1..=RECORD_BLOCKS_MAX) => Change::Write { block: first, blocks },
            (2 | 3, 1..) => Change::Zero { block: first, blocks, hole: kind == 3 },
            (4, 0) => Change::Resize { size: first },
            (5, 0) if first == 0 => Change::Mark,
            _ => return Err(fields.bad("kind", u64::from(kind))),
        };
        let record = Self { change, op, durable, oldest };
        let front = bytes.get(..record.data_at() as usize).ok_or(FormatError::Size { what: RECORD, bytes: bytes.len() })?;
        key.open(RECORD, Kind::LogHeader, u64::from(at), &signed(front), &mut [], &tag)?;
        let (end, bytes_end) = (first.checked_add(blocks), u64::from(at) + record.bytes());
        let sized = !matches!(change, Change::Resize { .. }) || first <= SIZE_MAX;
        if !sized || end.is_none_or(|end| blocks > 0 && end > SIZE_MAX / BLOCK) || durable > op || bytes_end > u64::from(SEGMENT_BYTES) {
            return Err(fields.bad("blocks", first));
        }
        Ok(record)
    }
}

/// What a record's own tag covers: the header before it, and the tags of the blocks.
fn signed(front: &[u8]) -> Vec<u8> {
    [front.get(..RECORD_TAG_AT).unwrap_or_default(), front.get(RECORD_HEADER_BYTES..).unwrap_or_default()].concat()
}

/// Opens a block of the log where it lies. `place`: its offset in the segment.
///
/// # Errors
/// [`FormatError::Seal`].
pub fn open_block(key: &ObjectKey, place: u32, tag: &[u8; TAG_BYTES], block: &mut [u8]) -> Result<(), FormatError> {
    key.open(DATA, Kind::LogBlock, u64::from(place), &[], block, tag)
}

/// Where a run of blocks lies in the log.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LogPlace {
    /// The segment.
    pub segment: u64,
    /// Offset of the first block's tag; the others' follow it.
    pub tags: u32,
    /// Offset of the first block; the others follow it.
    pub data: u32,
}

impl LogPlace {
    /// Of a record's blocks.
    #[must_use]
    pub fn of(segment: u64, at: u32, record: &Record) -> Self {
        // A record lies within a segment, whose offsets fit.
        Self { segment, tags: at + RECORD_HEADER_BYTES as u32, data: at + record.data_at() as u32 }
    }

    /// Of the run without its first `blocks`.
    #[must_use]
    pub fn skip(self, blocks: u64) -> Self {
        let blocks = blocks as u32;
        Self { tags: self.tags + blocks * TAG_BYTES as u32, data: self.data + blocks * BLOCK_BYTES as u32, ..self }
    }
}

#[cfg(test)]
pub mod tests {
    use proptest::prelude::*;

    use super::*;

    fn change() -> impl Strategy<Value = Change> {
        let block = 0u64..SIZE_MAX / BLOCK - 1_000;
        prop_oneof![
            (block.clone(), 1u64..6).prop_map(|(block, blocks)| Change::Write { block, blocks }),
            (block, 1u64..900, any::<bool>()).prop_map(|(block, blocks, hole)| Change::Zero { block, blocks, hole }),
            (0..=SIZE_MAX).prop_map(|size| Change::Resize { size }),
            Just(Change::Mark),
        ]
    }

    fn record() -> impl Strategy<Value = Record> {
        (change(), any::<u64>(), any::<u64>(), any::<u64>()).prop_map(|(change, a, b, oldest)| Record {
            change,
            op: a.max(b),
            durable: a.min(b),
            oldest,
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(96))]

        #[test]
        fn a_segments_header_comes_back_and_no_damage_passes(id: [u8; 16], epoch: u64, segment: u64, first_op: u64, salt: Salt, at in 0usize..4096, bit in 0u8..8) {
            let (volume, family) = (VolumeId(id), FamilyKey::new([1; 32]));
            let header = SegmentHeader { volume, epoch, segment, first_op, salt };
            let bytes = header.write(&family).unwrap();
            prop_assert_eq!(bytes.len(), RECORDS_FROM as usize);
            prop_assert_eq!(SegmentHeader::read(volume, &family, &bytes), Ok(header));
            let mut damaged = bytes.clone();
            damaged[at] ^= 1 << bit;
            prop_assert!(SegmentHeader::read(volume, &family, &damaged).is_err());
            prop_assert!(SegmentHeader::read(volume, &family, &bytes[..at]).is_err());
            prop_assert!(SegmentHeader::read(volume, &FamilyKey::new([2; 32]), &bytes).is_err());
        }

        #[test]
        fn a_record_comes_back_and_no_damage_passes(record in record(), fill: u8, cut in 0usize..4096, place in 0u32..500, salt: Salt, at: prop::sample::Index, bit in 0u8..8) {
            let header = SegmentHeader { volume: VolumeId([1; 16]), epoch: 1, segment: 2, first_op: 3, salt };
            let key = header.key(&FamilyKey::new([1; 32])).unwrap();
            let (offset, plain) = (RECORDS_FROM + place * ALIGN, vec![fill; record.data_blocks() as usize * BLOCK_BYTES]);
            let pieces = plain.split_at(cut.min(plain.len()));
            let mut bytes = vec![9; 5];
            record.write(&key, offset, &[pieces.0, pieces.1], &mut bytes).unwrap();
            let bytes = bytes.split_off(5);
            prop_assert_eq!(bytes.len() as u64, record.bytes());

            let open = |bytes: &[u8], offset: u32| -> Result<(Record, Vec<u8>), FormatError> {
                let record = Record::read(&key, offset, bytes)?;
                let start = LogPlace::of(0, offset, &record);
                let mut all = Vec::new();
                for number in 0..record.data_blocks() {
                    let place = start.skip(number);
                    let (tag, data) = ((place.tags - offset) as usize, (place.data - offset) as usize);
                    let mut block = bytes[data..data + BLOCK_BYTES].to_vec();
                    open_block(&key, place.data, bytes[tag..tag + 16].try_into().unwrap(), &mut block)?;
                    all.extend(block);
                }
                Ok((record, all))
            };
            prop_assert_eq!(open(&bytes, offset), Ok((record, plain.clone())));
            prop_assert!(open(&bytes, offset + ALIGN).is_err());
            let mut damaged = bytes.clone();
            // The bytes that only fill up to the next record mean nothing.
            let used = (record.data_at() + record.data_blocks() * BLOCK) as usize;
            let hit = at.index(used);
            damaged[hit] ^= 1 << bit;
            prop_assert!(open(&damaged, offset).is_err());
            let shorter = Record::read(&key, offset, &bytes[..hit]);
            prop_assert!(hit >= record.data_at() as usize || shorter.is_err());
        }

        #[test]
        fn other_bytes_are_no_record(bytes in proptest::collection::vec(any::<u8>(), 0..200), kind in 0u8..7) {
            let header = SegmentHeader { volume: VolumeId([1; 16]), epoch: 1, segment: 2, first_op: 3, salt: [0; 16] };
            let key = header.key(&FamilyKey::new([1; 32])).unwrap();
            prop_assert!(Record::read(&key, RECORDS_FROM, &bytes).is_err());
            let mut looks = [&RECORD_MAGIC[..], &[kind, 0, 0, 0], &bytes].concat();
            prop_assert!(Record::read(&key, RECORDS_FROM, &looks).is_err());
            looks.resize(64 + 16 * 256, 0);
            prop_assert!(Record::read(&key, RECORDS_FROM, &looks).is_err());
        }
    }
}
