//! Immutable objects: frames behind each other, and an index at the end. Packs and map pages are such objects.
//!
//! Owns the layout of the whole, and a frame's packing and sealing. Does not own what frames hold.
//!
//! ```text
//! 0    4   VVOB
//! 4    2   version, 1
//! 6    1   what it is: 1 pack, 2 map
//! 7    1   reserved
//! 8    16  salt of this writing
//! 24   8   reserved
//! 32   …   frames, without gaps: the packed bytes, AES-256-GCM, and the tag (16)
//! end-48:
//! 0    4   offset of the index, which is the last frame
//! 4    4   its stored bytes, with tag
//! 8    4   its plain bytes
//! 12   1   its codec: 0 raw, 1 zstd
//! 13   3   reserved
//! 16   4   frames, the index among them
//! 20   8   bytes of the whole object
//! 28   12  reserved
//! 40   4   CRC-32 (IEEE) of everything before
//! 44   4   VVOE
//! ```
//! A frame is read by its place ([`Frame`]) with one ranged request; the place comes from a sealed record, and so does the salt. Header and
//! footer are for those who have no such record: verification, rebuilding, and telling a torn object from a whole one without a key.

use super::FormatError;
use super::fields::{Fields, Writer, small};
use super::seal::{Codec, Kind, ObjectKey, Packer, Salt, TAG_BYTES, unpack};

const MAGIC: [u8; 4] = *b"VVOB";
const END_MAGIC: [u8; 4] = *b"VVOE";
const VERSION: u16 = 1;
/// Bytes before the first frame.
pub const HEADER_BYTES: usize = 32;
/// Bytes behind the last one.
pub const FOOTER_BYTES: usize = 48;
/// Largest object. A pack aims at 16 MiB; a map of a full disk has its root of 27 MiB and many pages.
pub const OBJECT_BYTES_MAX: usize = 1 << 30;
const WHAT: &str = "an object of a volume";

/// What an object is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum ObjectKind {
    /// Extents and their table.
    Pack = 1,
    /// Map pages and their root.
    Map = 2,
}

/// Where a frame lies in its object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, minicbor::Encode, minicbor::Decode)]
pub struct Frame {
    /// Its first byte.
    #[n(0)]
    pub offset: u32,
    /// Its bytes, with the tag.
    #[n(1)]
    pub stored: u32,
    /// Bytes it holds.
    #[n(2)]
    pub plain: u32,
    /// How they are packed: the number of a [`Codec`].
    #[n(3)]
    pub codec: u8,
}

impl Frame {
    /// Is it one that could have been written, with at most `plain_max` bytes in it?
    #[must_use]
    pub fn is_sound(&self, plain_max: usize) -> bool {
        let plain = self.plain as usize;
        let packed = (self.stored as usize).checked_sub(TAG_BYTES);
        let fits = match Codec::from_u8(self.codec) {
            Some(Codec::Raw) => packed == Some(plain),
            Some(Codec::Zstd) => packed.is_some_and(|packed| packed > 0 && packed < plain),
            None => false,
        };
        fits && plain <= plain_max && self.offset as usize >= HEADER_BYTES && self.offset.checked_add(self.stored).is_some()
    }

    /// Opens it. `bytes`: exactly what is stored at its place.
    ///
    /// # Errors
    /// [`FormatError`], said of `what`.
    pub fn open(&self, what: &'static str, key: &ObjectKey, kind: Kind, bytes: &[u8], plain_max: usize) -> Result<Vec<u8>, FormatError> {
        let (Some(codec), true) = (Codec::from_u8(self.codec), self.is_sound(plain_max)) else {
            return Err(FormatError::Field { what, field: "place of a frame", value: u64::from(self.plain) });
        };
        if bytes.len() != self.stored as usize {
            return Err(FormatError::Size { what, bytes: bytes.len() });
        }
        let (cipher, tag) = bytes.split_last_chunk::<TAG_BYTES>().ok_or(FormatError::Seal { what })?;
        let mut packed = cipher.to_vec();
        key.open(what, kind, u64::from(self.offset), &self.added(), &mut packed, tag)?;
        unpack(what, codec, packed, self.plain as usize)
    }

    /// What is authenticated with its bytes beside the place.
    fn added(&self) -> [u8; 5] {
        let [a, b, c, d] = self.plain.to_le_bytes();
        [self.codec, a, b, c, d]
    }

    /// Reads one: offset, stored, plain, codec, three reserved bytes.
    ///
    /// # Errors
    /// [`FormatError`]; the caller checks that it [is sound](Self::is_sound).
    pub fn read(fields: &mut Fields<'_>) -> Result<Self, FormatError> {
        let frame = Self { offset: fields.u32()?, stored: fields.u32()?, plain: fields.u32()?, codec: fields.u8()? };
        fields.reserved::<3>()?;
        Ok(frame)
    }

    /// Writes one.
    pub fn write(&self, out: &mut Writer) {
        out.u32(self.offset).u32(self.stored).u32(self.plain).u8(self.codec).reserved::<3>();
    }
}

/// Writes an object.
pub struct ObjectWriter {
    key: ObjectKey,
    packer: Packer,
    bytes: Vec<u8>,
    frames: u32,
}

impl ObjectWriter {
    /// Begins one. `key`: derived with its name and `salt`.
    ///
    /// # Errors
    /// [`FormatError::Make`].
    pub fn new(kind: ObjectKind, key: ObjectKey, salt: Salt) -> Result<Self, FormatError> {
        let mut out = Writer::default();
        let bytes = out.begin(MAGIC, VERSION).u8(kind as u8).reserved::<1>().bytes(&salt).reserved::<8>().finish();
        Ok(Self { key, packer: Packer::new()?, bytes, frames: 0 })
    }

    /// Bytes so far.
    #[must_use]
    pub fn len(&self) -> usize {
        self.bytes.len()
    }

    /// Has it no frame yet?
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.frames == 0
    }

    /// Adds a frame; returns where it lies.
    ///
    /// # Errors
    /// [`FormatError::Make`] when the object grows too large.
    pub fn push(&mut self, kind: Kind, plain: &[u8]) -> Result<Frame, FormatError> {
        let (codec, mut packed) = self.packer.pack(plain)?;
        let frame = Frame {
            offset: small(WHAT, self.bytes.len())?,
            stored: small(WHAT, packed.len() + TAG_BYTES)?,
            plain: small(WHAT, plain.len())?,
            codec: codec as u8,
        };
        if self.bytes.len() + packed.len() + TAG_BYTES + FOOTER_BYTES > OBJECT_BYTES_MAX {
            return Err(FormatError::Make { what: WHAT, why: format!("it would have more than {OBJECT_BYTES_MAX} bytes") });
        }
        let tag = self.key.seal(kind, u64::from(frame.offset), &frame.added(), &mut packed)?;
        self.bytes.extend_from_slice(&packed);
        self.bytes.extend_from_slice(&tag);
        self.frames += 1;
        Ok(frame)
    }

    /// Ends it with its index; returns the object's bytes and the index's place.
    ///
    /// # Errors
    /// [`FormatError::Make`].
    pub fn finish(mut self, kind: Kind, index: &[u8]) -> Result<(Vec<u8>, Frame), FormatError> {
        let frame = self.push(kind, index)?;
        let whole = self.bytes.len() + FOOTER_BYTES;
        let mut footer = Writer::default();
        frame.write(&mut footer);
        let footer = footer.u32(self.frames).u64(whole as u64).reserved::<12>().finish();
        self.bytes.extend_from_slice(&footer);
        let sum = crc32fast::hash(&self.bytes);
        self.bytes.extend_from_slice(&sum.to_le_bytes());
        self.bytes.extend_from_slice(&END_MAGIC);
        Ok((self.bytes, frame))
    }
}

/// A whole object that was read: nothing of it was damaged by chance. Its frames are still sealed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Whole {
    /// What it is.
    pub kind: ObjectKind,
    /// Of its writing.
    pub salt: Salt,
    /// Its index.
    pub index: Frame,
    /// Frames, the index among them.
    pub frames: u32,
}

impl Whole {
    /// Checks a whole object from its first byte to its last.
    ///
    /// # Errors
    /// [`FormatError`].
    pub fn read(bytes: &[u8]) -> Result<Self, FormatError> {
        let size = FormatError::Size { what: WHAT, bytes: bytes.len() };
        let mut header = Fields::new(WHAT, bytes);
        header.begin(MAGIC, VERSION)?;
        let kind = match header.u8()? {
            1 => ObjectKind::Pack,
            2 => ObjectKind::Map,
            other => return Err(header.bad("kind", u64::from(other))),
        };
        header.reserved::<1>()?;
        let salt = header.array()?;
        header.reserved::<8>()?;
        let (body, footer) = bytes.split_last_chunk::<FOOTER_BYTES>().ok_or(size)?;
        let mut fields = Fields::new(WHAT, footer);
        let index = Frame::read(&mut fields)?;
        let (frames, whole) = (fields.u32()?, fields.u64()?);
        fields.reserved::<12>()?;
        let sum = fields.u32()?;
        if fields.array()? != END_MAGIC {
            return Err(FormatError::Magic { what: "the end of an object of a volume" });
        }
        if whole != bytes.len() as u64 || crc32fast::hash(&bytes[..bytes.len() - 8]) != sum {
            return Err(FormatError::Checksum { what: WHAT });
        }
        let end = u64::from(index.offset) + u64::from(index.stored);
        if end != body.len() as u64 || frames == 0 {
            return Err(fields.bad("place of the index", end));
        }
        Ok(Self { kind, salt, index, frames })
    }
}

/// A frame's bytes within a whole object.
#[must_use]
pub fn slice(bytes: &[u8], frame: Frame) -> Option<&[u8]> {
    let start = frame.offset as usize;
    bytes.get(start..start.checked_add(frame.stored as usize)?)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::format::seal::FamilyKey;

    fn key() -> ObjectKey {
        FamilyKey::new([1; 32]).object("vol/x/p/1", &[2; 16]).unwrap()
    }

    fn piece() -> impl Strategy<Value = Vec<u8>> {
        prop_oneof![proptest::collection::vec(any::<u8>(), 0..3_000), proptest::collection::vec(0u8..2, 1..3_000)]
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn frames_and_index_come_back_and_no_damage_passes(
            pieces in proptest::collection::vec(piece(), 0..5), index in piece(), at: prop::sample::Index, bit in 0u8..8,
        ) {
            let mut writer = ObjectWriter::new(ObjectKind::Pack, key(), [2; 16]).unwrap();
            let frames: Vec<Frame> = pieces.iter().map(|piece| writer.push(Kind::Extent, piece).unwrap()).collect();
            let (bytes, place) = writer.finish(Kind::Table, &index).unwrap();
            let whole = Whole::read(&bytes).unwrap();
            prop_assert_eq!(whole, Whole { kind: ObjectKind::Pack, salt: [2; 16], index: place, frames: pieces.len() as u32 + 1 });
            prop_assert_eq!(place.open("it", &key(), Kind::Table, slice(&bytes, place).unwrap(), 3_000), Ok(index));

            let place = at.index(bytes.len());
            let mut damaged = bytes.clone();
            damaged[place] ^= 1 << bit;
            prop_assert!(Whole::read(&damaged).is_err());
            prop_assert!(Whole::read(&bytes[..place]).is_err());
            // Whoever reads frame by frame sees none of the check sum: a frame opens to its own bytes or not at all.
            for (frame, piece) in frames.iter().zip(&pieces) {
                let opened = frame.open("it", &key(), Kind::Extent, slice(&damaged, *frame).unwrap(), 3_000);
                let hit = (frame.offset as usize..(frame.offset + frame.stored) as usize).contains(&place);
                prop_assert_eq!(opened.ok(), (!hit).then(|| piece.clone()));
            }
        }

        #[test]
        fn wrong_places_never_open(offset: u32, stored in 0u32..5_000, plain in 0u32..5_000, codec: u8, bytes in proptest::collection::vec(any::<u8>(), 0..5_000)) {
            let frame = Frame { offset, stored, plain, codec };
            prop_assert!(frame.open("it", &key(), Kind::Extent, &bytes, 4_096).is_err());
        }
    }
}
