//! The map of a disk: pages, each for 64 MiB of it, and the root page that lists them.
//!
//! Owns both layouts, writing a map object and reading pages of it. Key: `vol/<id>/m/<epoch>-<seq>`. The object around them is `object.rs`'s; its index
//! is the root. A map object has the pages that changed, and its root names all pages, most of them in older objects, of other volumes perhaps.
//!
//! A **page**:
//! ```text
//! 0    4     VVMP
//! 4    2     version, 1
//! 6    2     reserved
//! 8    8     number of the page: its first block / 16,384
//! 16   4     n: packs
//! 20   4     m: pointers
//! 24   8     reserved
//! 32   56 n  packs (`extent.rs`)
//! …    48 m  pointers (`extent.rs`) in the order of their blocks, all within the page, none a hole: what is not mapped is zeros
//! ```
//! The **root**:
//! ```text
//! 0    4     VVMR
//! 4    2     version, 1
//! 6    2     reserved
//! 8    8     size of the disk in bytes
//! 16   4     n: map objects
//! 20   4     m: pages
//! 24   8     reserved
//! 32   48 n  map objects: volume (16), epoch (8), sequence (8), salt (16)
//! …    64 m  pages in order: number (8), object (4), offset (4), stored bytes (4), plain bytes (4), codec (1), reserved (3), reserved (4),
//!            BLAKE3 of the plain page (32)
//! ```
//! Pages and root make a Merkle tree: the root's hash in the head stands for every byte of the disk.

use std::collections::BTreeMap;

use volley_jobspecs::ids::VolumeId;

use super::content::{MapRef, RootRef, check_size};
use super::extent::{PACK_REF_BYTES, POINTER_BYTES, PackRef, Pointer, in_order};
use super::fields::{Fields, Writer, small};
use super::object::{Frame, ObjectKind, ObjectWriter};
use super::seal::{FamilyKey, Kind};
use super::{BLOCK, FormatError, SIZE_MAX};

/// Blocks of a page: 64 MiB. A page of 4 KiB pieces has 1.7 MiB, one of 64 KiB pieces 50 KB; smaller pages would make the root larger.
pub const PAGE_BLOCKS: u64 = 16_384;
/// Pages of the largest disk.
pub const PAGES_MAX: u64 = SIZE_MAX / BLOCK / PAGE_BLOCKS;
const PAGE_MAGIC: [u8; 4] = *b"VVMP";
const ROOT_MAGIC: [u8; 4] = *b"VVMR";
const VERSION: u16 = 1;
const HEADER_BYTES: usize = 32;
const OBJECT_REF_BYTES: usize = 48;
const PAGE_REF_BYTES: usize = 64;
/// Most bytes of a plain page: a pointer and a pack for each block.
pub const PAGE_BYTES_MAX: usize = HEADER_BYTES + PAGE_BLOCKS as usize * (PACK_REF_BYTES + POINTER_BYTES);
/// Most bytes of a plain root: each page in an object of its own.
pub const ROOT_BYTES_MAX: usize = HEADER_BYTES + PAGES_MAX as usize * (OBJECT_REF_BYTES + PAGE_REF_BYTES);
const PAGE: &str = "a map page";
const ROOT: &str = "a map's root page";

/// Where the blocks of 64 MiB of the disk lie.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Page {
    /// The packs that the pointers name by their place here.
    pub packs: Vec<PackRef>,
    /// Without holes, in order.
    pub pointers: Vec<Pointer>,
}

/// Where a page lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PageRef {
    /// The object.
    pub object: MapRef,
    /// The frame.
    pub frame: Frame,
    /// BLAKE3 of the plain page.
    pub hash: [u8; 32],
}

/// The root page.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Root {
    /// Size of the disk in bytes.
    pub size: u64,
    /// Pages that map something, by number.
    pub pages: BTreeMap<u64, PageRef>,
}

impl Page {
    /// Its bytes. The caller keeps to the rules of the layout; a reader checks them.
    ///
    /// # Errors
    /// [`FormatError::Make`].
    pub fn write(&self, number: u64) -> Result<Vec<u8>, FormatError> {
        let mut out = Writer::with_capacity(HEADER_BYTES + self.packs.len() * PACK_REF_BYTES + self.pointers.len() * POINTER_BYTES);
        out.begin(PAGE_MAGIC, VERSION).reserved::<2>().u64(number);
        out.u32(small(PAGE, self.packs.len())?).u32(small(PAGE, self.pointers.len())?).reserved::<8>();
        self.packs.iter().for_each(|pack| pack.write(&mut out));
        self.pointers.iter().for_each(|pointer| pointer.write(&mut out));
        Ok(out.finish())
    }

    /// Reads the page of this number.
    ///
    /// # Errors
    /// [`FormatError`].
    pub fn read(number: u64, plain: &[u8]) -> Result<Self, FormatError> {
        let mut fields = Fields::new(PAGE, plain);
        fields.begin(PAGE_MAGIC, VERSION)?;
        fields.reserved::<2>()?;
        match fields.u64()? {
            found if found == number && number < PAGES_MAX => {}
            found => return Err(fields.bad("number", found)),
        }
        let (packs, pointers) = (fields.u32()?, fields.u32()?);
        fields.reserved::<8>()?;
        let room = u64::from(packs) * PACK_REF_BYTES as u64 + u64::from(pointers) * POINTER_BYTES as u64;
        if HEADER_BYTES as u64 + room != plain.len() as u64 || plain.len() > PAGE_BYTES_MAX {
            return Err(FormatError::Size { what: PAGE, bytes: plain.len() });
        }
        let packs: Vec<PackRef> = (0..packs).map(|_| PackRef::read(&mut fields)).collect::<Result<_, _>>()?;
        let pointers: Vec<Pointer> = (0..pointers).map(|_| Pointer::read(&mut fields)).collect::<Result<_, _>>()?;
        let (start, end) = (number * PAGE_BLOCKS, (number + 1) * PAGE_BLOCKS);
        let inside = |pointer: &Pointer| pointer.block >= start && pointer.end() <= end;
        let stored = |pointer: &Pointer| pointer.stored.is_some_and(|stored| (stored.pack as usize) < packs.len());
        if let Some(wrong) = pointers.iter().find(|pointer| !inside(pointer) || !stored(pointer)) {
            return Err(fields.bad("block of a pointer", wrong.block));
        }
        if !in_order(&pointers) {
            return Err(fields.bad("order of blocks", number));
        }
        fields.end()?;
        Ok(Self { packs, pointers })
    }

    /// Opens a page. `bytes`: what is stored at its place.
    ///
    /// # Errors
    /// [`FormatError`].
    pub fn open(family: &FamilyKey, number: u64, at: &PageRef, bytes: &[u8]) -> Result<Self, FormatError> {
        let plain = at.frame.open(PAGE, &at.object.opens_with(family)?, Kind::Page, bytes, PAGE_BYTES_MAX)?;
        if *blake3::hash(&plain).as_bytes() != at.hash {
            return Err(FormatError::Checksum { what: PAGE });
        }
        Self::read(number, &plain)
    }
}

impl Root {
    /// Its bytes.
    ///
    /// # Errors
    /// [`FormatError::Make`].
    pub fn write(&self) -> Result<Vec<u8>, FormatError> {
        let mut places: BTreeMap<MapRef, u32> = self.pages.values().map(|page| (page.object, 0)).collect();
        for (place, (_, number)) in (0..).zip(places.iter_mut()) {
            *number = place;
        }
        let mut out = Writer::with_capacity(HEADER_BYTES + places.len() * OBJECT_REF_BYTES + self.pages.len() * PAGE_REF_BYTES);
        out.begin(ROOT_MAGIC, VERSION).reserved::<2>().u64(self.size);
        out.u32(small(ROOT, places.len())?).u32(small(ROOT, self.pages.len())?).reserved::<8>();
        for object in places.keys() {
            out.bytes(&object.volume.0).u64(object.epoch).u64(object.seq).bytes(&object.salt);
        }
        for (number, page) in &self.pages {
            out.u64(*number).u32(places.get(&page.object).copied().unwrap_or_default());
            page.frame.write(&mut out);
            out.reserved::<4>().bytes(&page.hash);
        }
        Ok(out.finish())
    }

    /// Reads one.
    ///
    /// # Errors
    /// [`FormatError`].
    pub fn read(plain: &[u8]) -> Result<Self, FormatError> {
        let mut fields = Fields::new(ROOT, plain);
        fields.begin(ROOT_MAGIC, VERSION)?;
        fields.reserved::<2>()?;
        let size = fields.u64()?;
        check_size(ROOT, size)?;
        let (objects, count) = (fields.u32()?, fields.u32()?);
        fields.reserved::<8>()?;
        let room = u64::from(objects) * OBJECT_REF_BYTES as u64 + u64::from(count) * PAGE_REF_BYTES as u64;
        if HEADER_BYTES as u64 + room != plain.len() as u64 || plain.len() > ROOT_BYTES_MAX {
            return Err(FormatError::Size { what: ROOT, bytes: plain.len() });
        }
        let object = |fields: &mut Fields<'_>| {
            let (volume, epoch, seq) = (VolumeId(fields.array()?), fields.u64()?, fields.u64()?);
            Ok(MapRef { volume, epoch, seq, salt: fields.array()? })
        };
        let objects: Vec<MapRef> = (0..objects).map(|_| object(&mut fields)).collect::<Result<_, FormatError>>()?;
        let mut pages = BTreeMap::new();
        let past = size.div_ceil(BLOCK * PAGE_BLOCKS);
        for _ in 0..count {
            let (number, place, frame) = (fields.u64()?, fields.u32()?, Frame::read(&mut fields)?);
            fields.reserved::<4>()?;
            let hash = fields.array()?;
            let object = *objects.get(place as usize).ok_or_else(|| fields.bad("object of a page", u64::from(place)))?;
            if number >= past || pages.last_key_value().is_some_and(|(last, _)| *last >= number) {
                return Err(fields.bad("number of a page", number));
            }
            if !frame.is_sound(PAGE_BYTES_MAX) {
                return Err(fields.bad("place of a page", u64::from(frame.offset)));
            }
            pages.insert(number, PageRef { object, frame, hash });
        }
        fields.end()?;
        Ok(Self { size, pages })
    }

    /// Opens one. `bytes`: what is stored at its place.
    ///
    /// # Errors
    /// [`FormatError`].
    pub fn open(family: &FamilyKey, at: &RootRef, bytes: &[u8]) -> Result<Self, FormatError> {
        let plain = at.frame.open(ROOT, &at.object.opens_with(family)?, Kind::Root, bytes, ROOT_BYTES_MAX)?;
        if *blake3::hash(&plain).as_bytes() != at.hash {
            return Err(FormatError::Checksum { what: ROOT });
        }
        Self::read(&plain)
    }
}

/// Writes a map object.
pub struct MapWriter {
    reference: MapRef,
    object: ObjectWriter,
}

impl MapWriter {
    /// Begins one under its name. The salt in it is fresh and random.
    ///
    /// # Errors
    /// [`FormatError::Make`].
    pub fn new(family: &FamilyKey, reference: MapRef) -> Result<Self, FormatError> {
        let object = ObjectWriter::new(ObjectKind::Map, reference.opens_with(family)?, reference.salt)?;
        Ok(Self { reference, object })
    }

    /// Adds a page; returns where it lies.
    ///
    /// # Errors
    /// [`FormatError::Make`].
    pub fn page(&mut self, number: u64, page: &Page) -> Result<PageRef, FormatError> {
        let plain = page.write(number)?;
        let frame = self.object.push(Kind::Page, &plain)?;
        Ok(PageRef { object: self.reference, frame, hash: *blake3::hash(&plain).as_bytes() })
    }

    /// Ends it with the root; returns its bytes and where the root lies.
    ///
    /// # Errors
    /// [`FormatError::Make`].
    pub fn finish(self, root: &Root) -> Result<(Vec<u8>, RootRef), FormatError> {
        let plain = root.write()?;
        let (bytes, frame) = self.object.finish(Kind::Root, &plain)?;
        Ok((bytes, RootRef { object: self.reference, frame, hash: *blake3::hash(&plain).as_bytes() }))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::format::content::tests::frame;
    use crate::format::extent::tests::{pack_ref, pointers};
    use crate::format::object::slice;

    fn page(number: u64) -> impl Strategy<Value = Page> {
        proptest::collection::vec(pack_ref(), 1..6).prop_flat_map(move |packs| {
            pointers(number * PAGE_BLOCKS, PAGE_BLOCKS as u32, packs.len() as u32, false)
                .prop_map(move |pointers| Page { packs: packs.clone(), pointers })
        })
    }

    fn map_ref() -> impl Strategy<Value = MapRef> {
        pack_ref().prop_map(|pack| MapRef { volume: pack.volume, epoch: pack.epoch, seq: pack.seq, salt: pack.salt })
    }

    fn root() -> impl Strategy<Value = Root> {
        let pages = proptest::collection::vec(map_ref(), 1..4).prop_flat_map(|objects| {
            let page = (0u64..100, 0..objects.len(), frame(5_000), any::<[u8; 32]>());
            proptest::collection::vec(page, 0..8).prop_map(move |pages| {
                pages.into_iter().map(|(number, object, frame, hash)| (number, PageRef { object: objects[object], frame, hash })).collect()
            })
        });
        (100u64..5_000, pages).prop_map(|(sizes, pages)| Root { size: sizes * BLOCK * PAGE_BLOCKS, pages })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn a_map_comes_back_and_no_damage_passes(
            first in page(3), second in page(70_000), reference in map_ref(), at: prop::sample::Index, bit in 0u8..8,
        ) {
            let family = FamilyKey::new([5; 32]);
            let mut writer = MapWriter::new(&family, reference).unwrap();
            let mut root = Root { size: SIZE_MAX, pages: BTreeMap::new() };
            root.pages.insert(3, writer.page(3, &first).unwrap());
            root.pages.insert(70_000, writer.page(70_000, &second).unwrap());
            let (bytes, place) = writer.finish(&root).unwrap();

            let open_all = |bytes: &[u8]| -> Result<(Root, Page, Page), FormatError> {
                let part = |frame| slice(bytes, frame).unwrap();
                let root = Root::open(&family, &place, part(place.frame))?;
                let (a, b) = (root.pages[&3], root.pages[&70_000]);
                Ok((root, Page::open(&family, 3, &a, part(a.frame))?, Page::open(&family, 70_000, &b, part(b.frame))?))
            };
            prop_assert_eq!(open_all(&bytes), Ok((root, first.clone(), second)));
            let mut damaged = bytes.clone();
            let hit = 32 + at.index(bytes.len() - 32 - 48);
            damaged[hit] ^= 1 << bit;
            prop_assert!(open_all(&damaged).is_err());

            let (number, place) = (3, Root::open(&family, &place, slice(&bytes, place.frame).unwrap()).unwrap().pages[&3]);
            prop_assert!(Page::open(&family, number + 1, &place, slice(&bytes, place.frame).unwrap()).is_err());
            let other = PageRef { hash: [0; 32], ..place };
            prop_assert!(Page::open(&family, number, &other, slice(&bytes, place.frame).unwrap()).is_err());
        }

        #[test]
        fn roots_and_pages_come_back_whole_or_not_at_all(root in root(), page in page(9), at: prop::sample::Index, bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let plain = root.write().unwrap();
            prop_assert_eq!(Root::read(&plain), Ok(root));
            prop_assert!(Root::read(&plain[..at.index(plain.len())]).is_err());
            let plain = page.write(9).unwrap();
            prop_assert_eq!(Page::read(9, &plain), Ok(page));
            prop_assert!(Page::read(8, &plain).is_err());
            prop_assert!(Page::read(9, &plain[..at.index(plain.len())]).is_err());
            prop_assert!(Root::read(&bytes).is_err() && Page::read(9, &bytes).is_err());
        }

        #[test]
        fn hostile_fields_of_a_page_are_errors(page in page(9), at: prop::sample::Index, value: u8) {
            let mut plain = page.write(9).unwrap();
            let place = at.index(plain.len());
            plain[place] = value;
            if let Ok(read) = Page::read(9, &plain) {
                prop_assert_eq!(read.write(9).unwrap(), plain);
                prop_assert!(in_order(&read.pointers));
                prop_assert!(read.pointers.iter().all(|pointer| pointer.stored.is_some_and(|stored| (stored.pack as usize) < read.packs.len())));
            }
        }
    }
}
