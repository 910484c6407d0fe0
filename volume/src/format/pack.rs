//! A pack: extents, and the table that says which blocks they are.
//!
//! Owns the table's layout, writing a pack and reading its table. The object around it is `object.rs`'s. Key: `vol/<id>/p/<epoch>-<seq>-<n>`.
//!
//! Each extent is a frame. The object's index is the table:
//! ```text
//! 0   4      VVPT
//! 4   2      version, 1
//! 6   2      reserved
//! 8   4      pointers
//! 12  4      reserved
//! 16  48 n   pointers (`extent.rs`) in the order of their blocks, none twice; their pack is 0: this one. Holes are among them.
//! ```

use super::content::Delta;
use super::extent::{EXTENT_BYTES_MAX, HOLE_BLOCKS_MAX, POINTER_BYTES, PackRef, Pointer, Stored, hash, in_order};
use super::fields::{Fields, Writer, small};
use super::object::{Frame, ObjectKind, ObjectWriter, Whole, slice};
use super::seal::{FamilyKey, Kind};
use super::{BLOCK_BYTES, FormatError};

const MAGIC: [u8; 4] = *b"VVPT";
const VERSION: u16 = 1;
const HEADER_BYTES: usize = 16;
const WHAT: &str = "a pack's table";
/// Most pointers of a table, 3 MiB: whoever attaches reads whole tables.
pub const POINTERS_MAX: usize = 65_536;
/// Most bytes of a plain table.
pub const TABLE_BYTES_MAX: usize = HEADER_BYTES + POINTERS_MAX * POINTER_BYTES;

/// Writes a pack.
pub struct PackWriter {
    reference: PackRef,
    object: ObjectWriter,
    pointers: Vec<Pointer>,
}

impl PackWriter {
    /// Begins one under its name. The salt in it is fresh and random.
    ///
    /// # Errors
    /// [`FormatError::Make`].
    pub fn new(family: &FamilyKey, reference: PackRef) -> Result<Self, FormatError> {
        let object = ObjectWriter::new(ObjectKind::Pack, reference.opens_with(family)?, reference.salt)?;
        Ok(Self { reference, object, pointers: Vec::new() })
    }

    /// Bytes of its extents so far.
    #[must_use]
    pub fn len(&self) -> usize {
        self.object.len()
    }

    /// Has it nothing to say?
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.pointers.is_empty()
    }

    /// Can it take no more pointers?
    #[must_use]
    pub fn is_full(&self) -> bool {
        self.pointers.len() >= POINTERS_MAX
    }

    /// Adds an extent: whole blocks, behind everything it has so far.
    ///
    /// # Errors
    /// [`FormatError::Make`].
    pub fn extent(&mut self, block: u64, plain: &[u8]) -> Result<(), FormatError> {
        if plain.is_empty() || plain.len() > EXTENT_BYTES_MAX || !plain.len().is_multiple_of(BLOCK_BYTES) {
            return Err(FormatError::Make { what: "an extent", why: format!("{} bytes are none", plain.len()) });
        }
        let blocks = small(WHAT, plain.len() / BLOCK_BYTES)?;
        self.check_next(block)?;
        let frame = self.object.push(Kind::Extent, plain)?;
        let stored = Stored { pack: 0, frame, skip: 0, hash: hash(plain) };
        self.pointers.push(Pointer { block, blocks, stored: Some(stored) });
        Ok(())
    }

    /// Adds a hole of at most [`HOLE_BLOCKS_MAX`] blocks.
    ///
    /// # Errors
    /// [`FormatError::Make`].
    pub fn hole(&mut self, block: u64, blocks: u32) -> Result<(), FormatError> {
        if blocks == 0 || blocks > HOLE_BLOCKS_MAX {
            return Err(FormatError::Make { what: "a hole", why: format!("{blocks} blocks are none") });
        }
        self.check_next(block)?;
        self.pointers.push(Pointer { block, blocks, stored: None });
        Ok(())
    }

    fn check_next(&self, block: u64) -> Result<(), FormatError> {
        let why = if self.is_full() {
            "it has all pointers it may have".to_owned()
        } else if self.pointers.last().is_some_and(|last| last.end() > block) {
            format!("block {block} lies before what it has")
        } else {
            return Ok(());
        };
        Err(FormatError::Make { what: "a pack", why })
    }

    /// Ends it: its bytes, what a head says of it (without a body), and its pointers.
    ///
    /// # Errors
    /// [`FormatError::Make`].
    pub fn finish(self) -> Result<(Vec<u8>, Delta, Vec<Pointer>), FormatError> {
        let table = write_table(&self.pointers)?;
        let (bytes, place) = self.object.finish(Kind::Table, &table)?;
        let hash = *blake3::hash(&table).as_bytes();
        let delta = Delta { pack: self.reference, table: place, hash, bytes: bytes.len() as u64, body: None };
        Ok((bytes, delta, self.pointers))
    }
}

fn write_table(pointers: &[Pointer]) -> Result<Vec<u8>, FormatError> {
    let mut out = Writer::with_capacity(HEADER_BYTES + pointers.len() * POINTER_BYTES);
    out.begin(MAGIC, VERSION).reserved::<2>().u32(small(WHAT, pointers.len())?).reserved::<4>();
    pointers.iter().for_each(|pointer| pointer.write(&mut out));
    Ok(out.finish())
}

fn read_table(plain: &[u8]) -> Result<Vec<Pointer>, FormatError> {
    let mut fields = Fields::new(WHAT, plain);
    fields.begin(MAGIC, VERSION)?;
    fields.reserved::<2>()?;
    let count = fields.u32()?;
    fields.reserved::<4>()?;
    if count as usize > POINTERS_MAX || plain.len() != HEADER_BYTES + count as usize * POINTER_BYTES {
        return Err(FormatError::Size { what: WHAT, bytes: plain.len() });
    }
    let pointers: Vec<Pointer> = (0..count).map(|_| Pointer::read(&mut fields)).collect::<Result<_, _>>()?;
    if let Some(foreign) = pointers.iter().filter_map(|pointer| pointer.stored).find(|stored| stored.pack != 0 || stored.skip != 0) {
        return Err(fields.bad("pack", u64::from(foreign.pack)));
    }
    if !in_order(&pointers) {
        return Err(fields.bad("order of blocks", u64::from(count)));
    }
    fields.end()?;
    Ok(pointers)
}

/// Reads the table of a pack. `bytes`: what is stored at its place.
///
/// # Errors
/// [`FormatError`].
pub fn open_table(family: &FamilyKey, delta: &Delta, bytes: &[u8]) -> Result<Vec<Pointer>, FormatError> {
    let key = delta.pack.opens_with(family)?;
    let plain = delta.table.open(WHAT, &key, Kind::Table, bytes, TABLE_BYTES_MAX)?;
    if *blake3::hash(&plain).as_bytes() != delta.hash {
        return Err(FormatError::Checksum { what: WHAT });
    }
    read_table(&plain)
}

/// Opens the extent that a pointer maps a part of. `bytes`: what is stored at its place.
///
/// # Errors
/// [`FormatError`].
pub fn open_extent(family: &FamilyKey, pack: &PackRef, stored: &Stored, bytes: &[u8]) -> Result<Vec<u8>, FormatError> {
    let plain = stored.frame.open("an extent", &pack.opens_with(family)?, Kind::Extent, bytes, EXTENT_BYTES_MAX)?;
    if hash(&plain) == stored.hash { Ok(plain) } else { Err(FormatError::Checksum { what: "an extent" }) }
}

/// Reads a whole pack without a head that says anything of it, and opens all of it. `reference`: its name; the salt in it is not looked at.
///
/// # Errors
/// [`FormatError`].
pub fn check(family: &FamilyKey, reference: PackRef, bytes: &[u8]) -> Result<(Delta, Vec<Pointer>), FormatError> {
    let whole = Whole::read(bytes)?;
    if whole.kind != ObjectKind::Pack {
        return Err(FormatError::Field { what: "a pack", field: "kind", value: whole.kind as u64 });
    }
    let reference = PackRef { salt: whole.salt, ..reference };
    let key = reference.opens_with(family)?;
    let part = |frame: Frame| slice(bytes, frame).ok_or(FormatError::Size { what: "a pack", bytes: bytes.len() });
    let plain = whole.index.open(WHAT, &key, Kind::Table, part(whole.index)?, TABLE_BYTES_MAX)?;
    let pointers = read_table(&plain)?;
    for stored in pointers.iter().filter_map(|pointer| pointer.stored.as_ref()) {
        open_extent(family, &reference, stored, part(stored.frame)?)?;
    }
    let hash = *blake3::hash(&plain).as_bytes();
    Ok((Delta { pack: reference, table: whole.index, hash, bytes: bytes.len() as u64, body: None }, pointers))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::format::extent::tests::{pack_ref, pointers};

    /// Runs of blocks: gap before it, blocks, and the byte that fills it; None: a hole.
    fn runs() -> impl Strategy<Value = Vec<(u64, u32, Option<(u8, bool)>)>> {
        proptest::collection::vec((0u64..20, 1u32..9, proptest::option::of((any::<u8>(), any::<bool>()))), 1..8)
    }

    fn bytes_of(blocks: u32, fill: u8, noise: bool) -> Vec<u8> {
        let mut state = u64::from(fill) + 1;
        let mut next = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 56) as u8
        };
        (0..blocks as usize * BLOCK_BYTES).map(|_| if noise { next() } else { fill }).collect()
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        #[test]
        fn a_pack_comes_back_and_no_damage_passes(runs in runs(), reference in pack_ref(), at: prop::sample::Index, bit in 0u8..8) {
            let family = FamilyKey::new([4; 32]);
            let mut writer = PackWriter::new(&family, reference).unwrap();
            let mut block = 0;
            let mut written = Vec::new();
            for (gap, blocks, fill) in runs {
                block += gap;
                match fill {
                    Some((fill, noise)) => {
                        let plain = bytes_of(blocks, fill, noise);
                        writer.extent(block, &plain).unwrap();
                        written.push((block, Some(plain)));
                    }
                    None => {
                        writer.hole(block, blocks).unwrap();
                        written.push((block, None));
                    }
                }
                block += u64::from(blocks);
            }
            prop_assert!(writer.extent(0, &[0; BLOCK_BYTES]).is_err(), "behind what it has only");
            let (bytes, delta, pointers) = writer.finish().unwrap();

            prop_assert_eq!(open_table(&family, &delta, slice(&bytes, delta.table).unwrap()), Ok(pointers.clone()));
            prop_assert_eq!(check(&family, PackRef { salt: [0; 16], ..reference }, &bytes), Ok((delta.clone(), pointers.clone())));
            let place = at.index(bytes.len());
            let mut damaged = bytes.clone();
            damaged[place] ^= 1 << bit;
            prop_assert!(check(&family, reference, &damaged).is_err());
            let other = PackRef { n: reference.n ^ 1, ..reference };
            prop_assert!(check(&family, other, &bytes).is_err());
            for (pointer, (block, plain)) in pointers.iter().zip(&written) {
                prop_assert_eq!(pointer.block, *block);
                prop_assert_eq!(pointer.stored.is_some(), plain.is_some());
                if let (Some(stored), Some(plain)) = (pointer.stored, plain) {
                    let opened = open_extent(&family, &reference, &stored, slice(&bytes, stored.frame).unwrap());
                    prop_assert_eq!(opened.as_ref(), Ok(plain));
                    let opened = open_extent(&family, &reference, &stored, slice(&damaged, stored.frame).unwrap());
                    prop_assert!(opened.is_err() || opened.as_ref() == Ok(plain));
                    let other = Stored { hash: [1; 16], ..stored };
                    prop_assert!(open_extent(&family, &reference, &other, slice(&bytes, stored.frame).unwrap()).is_err());
                }
            }
        }

        #[test]
        fn tables_come_back_and_others_are_refused(mut pointers in pointers(0, 60_000, 1, true), bytes in proptest::collection::vec(any::<u8>(), 0..300)) {
            for stored in pointers.iter_mut().filter_map(|pointer| pointer.stored.as_mut()) {
                stored.skip = 0;
            }
            let table = write_table(&pointers).unwrap();
            prop_assert_eq!(read_table(&table), Ok(pointers.clone()));
            prop_assert!(read_table(&bytes).is_err());
            prop_assert!(read_table(&table[..table.len() - 1]).is_err());
            pointers.reverse();
            prop_assert!(pointers.len() < 2 || read_table(&write_table(&pointers).unwrap()).is_err());
        }
    }
}
