//! What a disk consists of at one moment: its size, the root of its map, and what was written since that map.
//!
//! Owns the parts of a head and of a snapshot that say so, and the digest by which a state is named in reports. Does not own the objects they name.
//!
//! A block lies where the last **delta** that maps it says; else where the map says; else it is zeros. A delta is a pack, and is small itself: the pack's
//! table has its pointers. A small pack does not become an object: its bytes lie in the delta (`body`), so that a small commit is one
//! request. The next commit with a pack of its own takes up what such packs hold, and they are gone.

use minicbor::{Decode, Encode};
use volley_jobspecs::ids::VolumeId;

use super::extent::PackRef;
use super::fields::Writer;
use super::object::{FOOTER_BYTES, Frame, HEADER_BYTES, OBJECT_BYTES_MAX};
use super::pack::TABLE_BYTES_MAX;
use super::page::ROOT_BYTES_MAX;
use super::seal::{FamilyKey, ObjectKey, Salt};
use super::{BLOCK, FormatError, SIZE_MAX, SIZE_MIN, keys};

/// Deltas after which a commit writes map pages: whoever attaches reads a table for each.
pub const DELTAS_MAX: usize = 64;
/// Deltas that are read, so that the number above can change.
const DELTAS_READ_MAX: usize = 1_024;
/// Bytes of packs that may lie in deltas, in all: a head holds two states and is sent with each commit.
pub const BODIES_BYTES_MAX: usize = 96 << 10;
/// Bytes of such packs that are read.
const BODIES_READ_MAX: usize = 1 << 20;

/// Names a map object.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Encode, Decode)]
pub struct MapRef {
    /// The volume that wrote it.
    #[n(0)]
    pub volume: VolumeId,
    /// Of the writer.
    #[n(1)]
    pub epoch: u64,
    /// Of the commit.
    #[n(2)]
    pub seq: u64,
    /// Of its writing.
    #[cbor(n(3), with = "minicbor::bytes")]
    pub salt: Salt,
}

impl MapRef {
    /// Its key in the bucket.
    #[must_use]
    pub fn key(&self) -> String {
        keys::map(self.volume, self.epoch, self.seq)
    }

    /// What opens its frames.
    ///
    /// # Errors
    /// [`FormatError::Make`].
    pub fn opens_with(&self, family: &FamilyKey) -> Result<ObjectKey, FormatError> {
        family.object(&self.key(), &self.salt)
    }
}

/// Where a root page lies. Its hash names the whole map: the root has the hashes of the pages, these have those of the extents.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode)]
pub struct RootRef {
    /// The object.
    #[n(0)]
    pub object: MapRef,
    /// The frame.
    #[n(1)]
    pub frame: Frame,
    /// BLAKE3 of the plain root page.
    #[cbor(n(2), with = "minicbor::bytes")]
    pub hash: [u8; 32],
}

/// A pack that was written since the map.
#[derive(Clone, PartialEq, Eq, Encode, Decode)]
pub struct Delta {
    /// The pack.
    #[n(0)]
    pub pack: PackRef,
    /// Where its table lies.
    #[n(1)]
    pub table: Frame,
    /// BLAKE3 of its plain table.
    #[cbor(n(2), with = "minicbor::bytes")]
    pub hash: [u8; 32],
    /// Bytes of the whole pack.
    #[n(3)]
    pub bytes: u64,
    /// The pack itself, if it is no object.
    #[cbor(n(4), with = "minicbor::bytes")]
    pub body: Option<Vec<u8>>,
}

impl std::fmt::Debug for Delta {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let place = if self.body.is_some() { "in the head" } else { "an object" };
        write!(f, "Delta({}, {} bytes, {place})", self.pack.key(), self.bytes)
    }
}

/// A disk at one moment.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
pub struct Content {
    /// Its size in bytes.
    #[n(0)]
    pub size: u64,
    /// The map; None: nothing is mapped.
    #[n(1)]
    pub root: Option<RootRef>,
    /// What was written since, oldest first.
    #[n(2)]
    pub deltas: Vec<Delta>,
}

impl Content {
    /// A disk of zeros.
    #[must_use]
    pub fn empty(size: u64) -> Self {
        Self { size, root: None, deltas: Vec::new() }
    }

    /// Names this state: BLAKE3 of its size (8 bytes), the root's hash (32 zeros if there is none), and, for each delta, the reference of its
    /// pack (56) and the hash of its table (32). Whether a pack lies in the head or in an object makes no difference.
    #[must_use]
    pub fn digest(&self) -> [u8; 32] {
        let mut out = Writer::default();
        out.u64(self.size).bytes(&self.root.map_or([0; 32], |root| root.hash));
        for delta in &self.deltas {
            delta.pack.write(&mut out);
            out.bytes(&delta.hash);
        }
        *blake3::hash(&out.finish()).as_bytes()
    }

    /// Bytes of packs that lie in it.
    #[must_use]
    pub fn bodies_bytes(&self) -> usize {
        self.deltas.iter().filter_map(|delta| delta.body.as_ref()).map(Vec::len).sum()
    }

    /// Checks what a decoder does not.
    ///
    /// # Errors
    /// [`FormatError::Field`], said of `what`.
    pub fn check(&self, what: &'static str) -> Result<(), FormatError> {
        check_size(what, self.size)?;
        let bad = |field, value: u64| Err(FormatError::Field { what, field, value });
        if let Some(root) = self.root.filter(|root| !root.frame.is_sound(ROOT_BYTES_MAX)) {
            return bad("place of the root", root.frame.offset.into());
        }
        if self.deltas.len() > DELTAS_READ_MAX || self.bodies_bytes() > BODIES_READ_MAX {
            return bad("deltas", self.deltas.len() as u64);
        }
        for delta in &self.deltas {
            // The table is the last frame: its end and the footer's size say how long the pack is.
            let end = u64::from(delta.table.offset) + u64::from(delta.table.stored) + FOOTER_BYTES as u64;
            let sound = delta.table.is_sound(TABLE_BYTES_MAX) && delta.table.offset as usize >= HEADER_BYTES;
            if !sound || end != delta.bytes || delta.bytes > OBJECT_BYTES_MAX as u64 {
                return bad("place of a table", delta.table.offset.into());
            }
            if delta.body.as_ref().is_some_and(|body| body.len() as u64 != delta.bytes) {
                return bad("size of a pack in it", delta.bytes);
            }
        }
        Ok(())
    }
}

/// Can a disk have this size?
///
/// # Errors
/// [`FormatError::Field`], said of `what`.
pub fn check_size(what: &'static str, size: u64) -> Result<(), FormatError> {
    if (SIZE_MIN..=SIZE_MAX).contains(&size) && size.is_multiple_of(BLOCK) {
        return Ok(());
    }
    Err(FormatError::Field { what, field: "size", value: size })
}

#[cfg(test)]
pub mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::format::extent::tests::pack_ref;

    pub fn frame(plain_max: u32) -> impl Strategy<Value = Frame> {
        (32u32..1 << 20, 2..=plain_max, any::<bool>()).prop_map(|(offset, plain, raw)| Frame {
            offset,
            stored: if raw { plain } else { plain / 2 } + 16,
            plain,
            codec: u8::from(!raw),
        })
    }

    fn delta() -> impl Strategy<Value = Delta> {
        (pack_ref(), frame(500), any::<[u8; 32]>(), any::<bool>()).prop_map(|(pack, table, hash, inside)| {
            let table = if inside { Frame { offset: table.offset % 900 + 32, ..table } } else { table };
            let bytes = u64::from(table.offset + table.stored) + FOOTER_BYTES as u64;
            Delta { pack, table, hash, bytes, body: inside.then(|| vec![hash[0]; bytes as usize]) }
        })
    }

    pub fn content() -> impl Strategy<Value = Content> {
        let root = (pack_ref(), frame(9_000), any::<[u8; 32]>()).prop_map(|(pack, frame, hash)| RootRef {
            object: MapRef { volume: pack.volume, epoch: pack.epoch, seq: pack.seq, salt: pack.salt },
            frame,
            hash,
        });
        (SIZE_MIN / BLOCK..=SIZE_MAX / BLOCK, proptest::option::of(root), proptest::collection::vec(delta(), 0..6))
            .prop_map(|(blocks, root, deltas)| Content { size: blocks * BLOCK, root, deltas })
    }

    proptest! {
        #[test]
        fn the_digest_knows_every_part_but_where_a_pack_lies(content in content(), other in content()) {
            prop_assert!(content.check("it").is_ok());
            prop_assert_eq!(content.digest() == other.digest(), content == other);
            let mut moved = content.clone();
            moved.deltas.iter_mut().for_each(|delta| delta.body = None);
            prop_assert_eq!(moved.digest(), content.digest());
            let mut grown = content.clone();
            grown.size ^= BLOCK;
            prop_assert_ne!(grown.digest(), content.digest());
        }
    }

    #[test]
    fn sizes_are_whole_blocks_within_limits() {
        for (size, good) in
            [(SIZE_MIN, true), (SIZE_MAX, true), (0, false), (SIZE_MIN - BLOCK, false), (SIZE_MAX + BLOCK, false), (SIZE_MIN + 512, false)]
        {
            assert_eq!(check_size("it", size).is_ok(), good, "{size}");
        }
    }
}
