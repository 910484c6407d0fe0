//! The map of a disk in memory: pages that are loaded when they are wanted, and what was changed since they were stored.
//!
//! Owns looking up, changing and listing what must be written. Loading is the caller's: a page that is not here is named. Pages are shared
//! between the clones of a snapshot until one changes its own. Pure.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

use crate::format::extent::{PackRef, Pointer, Stored};
use crate::format::page::{PAGE_BLOCKS, Page, PageRef, Root};

/// A run of blocks and where it lies; None: it reads as zeros.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Found {
    /// First block.
    pub block: u64,
    /// Blocks.
    pub blocks: u64,
    /// The pack, and the place in it.
    pub place: Option<(PackRef, Stored)>,
}

/// A page that is not loaded.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Missing {
    /// Its number.
    pub number: u64,
    /// Where it lies.
    pub at: PageRef,
}

#[derive(Debug, Clone, Default)]
struct Slot {
    /// Where it lies; None: only here.
    stored: Option<PageRef>,
    /// With all changes; None: not loaded.
    page: Option<Arc<Page>>,
    /// Changes that wait for it to be loaded, oldest first; each in order and without a block twice.
    pending: Vec<(PackRef, Vec<Pointer>)>,
    /// Is it another than what is stored?
    changed: bool,
}

/// The map.
#[derive(Debug, Clone, Default)]
pub struct Map {
    slots: BTreeMap<u64, Slot>,
}

impl Map {
    /// From a root page, nothing loaded.
    #[must_use]
    pub fn new(root: &Root) -> Self {
        let slot = |at: &PageRef| Slot { stored: Some(*at), ..Slot::default() };
        Self { slots: root.pages.iter().map(|(number, at)| (*number, slot(at))).collect() }
    }

    /// What a range consists of, in order and without gaps, up to the first page that is not loaded, which is named.
    pub fn get(&self, range: Range<u64>, out: &mut Vec<Found>) -> Option<Missing> {
        let mut at = range.start;
        if range.is_empty() {
            return None;
        }
        for (number, slot) in self.slots.range(range.start / PAGE_BLOCKS..=(range.end - 1) / PAGE_BLOCKS) {
            let first = number * PAGE_BLOCKS;
            if first > at {
                zeros(at..first, out);
                at = first;
            }
            let end = (first + PAGE_BLOCKS).min(range.end);
            match (&slot.page, slot.stored) {
                (Some(page), _) => {
                    in_page(page, at..end, out);
                    at = end;
                }
                (None, Some(stored)) => return Some(Missing { number: *number, at: stored }),
                (None, None) => {}
            }
        }
        zeros(at..range.end, out);
        None
    }

    /// A page was loaded.
    pub fn load(&mut self, number: u64, page: Arc<Page>) {
        let Some(slot) = self.slots.get_mut(&number).filter(|slot| slot.page.is_none()) else { return };
        let mut page = page;
        for (pack, pointers) in std::mem::take(&mut slot.pending) {
            merge(Arc::make_mut(&mut page), pack, &pointers);
        }
        slot.page = Some(page);
    }

    /// Blocks lie elsewhere now: the pointers of a pack's table.
    pub fn apply(&mut self, pack: PackRef, pointers: &[Pointer]) {
        let mut by_page: BTreeMap<u64, Vec<Pointer>> = BTreeMap::new();
        for pointer in pointers {
            let last = (pointer.end() - 1) / PAGE_BLOCKS;
            let numbers: Vec<u64> = match pointer.stored {
                Some(_) => (pointer.block / PAGE_BLOCKS..=last).collect(),
                // A hole matters where something is mapped: a trim of the whole disk does not walk over all of it.
                None => {
                    let here = pointer.block / PAGE_BLOCKS..=last;
                    let ours = by_page.range(here.clone()).map(|(number, _)| *number);
                    let mut all: Vec<u64> = self.slots.range(here).map(|(number, _)| *number).chain(ours).collect();
                    all.sort_unstable();
                    all.dedup();
                    all
                }
            };
            for number in numbers {
                let part = pointer.part(number * PAGE_BLOCKS, (number + 1) * PAGE_BLOCKS);
                by_page.entry(number).or_default().extend(part);
            }
        }
        for (number, pointers) in by_page {
            let slot = self.slots.entry(number).or_default();
            slot.changed = true;
            let blocks: u64 = pointers.iter().map(|pointer| u64::from(pointer.blocks)).sum();
            if blocks == PAGE_BLOCKS {
                // All of it is new: what it was is not wanted.
                slot.pending.clear();
                slot.page = Some(Arc::default());
            }
            if slot.page.is_none() && slot.stored.is_some() {
                slot.pending.push((pack, pointers));
            } else {
                merge(Arc::make_mut(slot.page.get_or_insert_default()), pack, &pointers);
            }
        }
    }

    /// Pages that were changed and are not loaded: a checkpoint needs them.
    #[must_use]
    pub fn missing_changed(&self) -> Vec<Missing> {
        let missing = |(number, slot): (&u64, &Slot)| {
            let at = slot.stored.filter(|_| slot.changed && slot.page.is_none())?;
            Some(Missing { number: *number, at })
        };
        self.slots.iter().filter_map(missing).collect()
    }

    /// Pages that were changed, and are loaded. One that maps nothing need not be stored.
    #[must_use]
    pub fn changed(&self) -> Vec<(u64, Arc<Page>)> {
        let changed = self.slots.iter().filter(|(_, slot)| slot.changed);
        changed.filter_map(|(number, slot)| slot.page.as_ref().map(|page| (*number, Arc::clone(page)))).collect()
    }

    /// The root page after the changed pages were stored at `written`; those that are not there map nothing.
    #[must_use]
    pub fn root(&self, size: u64, written: &BTreeMap<u64, PageRef>) -> Root {
        let place = |(number, slot): (&u64, &Slot)| {
            let at = if slot.changed { written.get(number).copied() } else { slot.stored };
            at.map(|at| (*number, at))
        };
        Root { size, pages: self.slots.iter().filter_map(place).collect() }
    }

    /// The changed pages lie at `written` now.
    pub fn stored(&mut self, written: &BTreeMap<u64, PageRef>) {
        self.slots.retain(|number, slot| {
            if slot.changed {
                slot.stored = written.get(number).copied();
                slot.changed = false;
            }
            slot.stored.is_some()
        });
    }
}

fn zeros(range: Range<u64>, out: &mut Vec<Found>) {
    if range.is_empty() {
        return;
    }
    match out.last_mut() {
        Some(last) if last.place.is_none() && last.block + last.blocks == range.start => last.blocks += range.end - range.start,
        _ => out.push(Found { block: range.start, blocks: range.end - range.start, place: None }),
    }
}

fn in_page(page: &Page, range: Range<u64>, out: &mut Vec<Found>) {
    let mut at = range.start;
    let from = page.pointers.partition_point(|pointer| pointer.end() <= range.start);
    for pointer in page.pointers.get(from..).unwrap_or_default() {
        let Some(part) = pointer.part(range.start, range.end) else { break };
        zeros(at..part.block, out);
        at = part.end();
        let place = part.stored.and_then(|stored| Some((*page.packs.get(stored.pack as usize)?, stored)));
        out.push(Found { block: part.block, blocks: part.blocks.into(), place });
    }
    zeros(at..range.end, out);
}

/// Puts pointers of a pack over those of a page.
fn merge(page: &mut Page, pack: PackRef, pointers: &[Pointer]) {
    let place = page.packs.iter().position(|known| *known == pack).unwrap_or_else(|| {
        page.packs.push(pack);
        page.packs.len() - 1
    });
    // A page has fewer packs than blocks.
    let ours = |pointer: &Pointer| Pointer { stored: pointer.stored.map(|stored| Stored { pack: place as u32, ..stored }), ..*pointer };
    let mut out = Vec::with_capacity(page.pointers.len() + pointers.len());
    let mut new = pointers.iter().map(ours).peekable();
    let mut covered = 0;
    for old in &page.pointers {
        let mut from = old.block.max(covered);
        while let Some(next) = new.next_if(|next| next.block < old.end()) {
            out.extend(old.part(from, next.block));
            covered = next.end();
            from = from.max(covered);
            out.push(next);
        }
        out.extend(old.part(from, old.end()));
    }
    out.extend(new);
    out.retain(|pointer| pointer.stored.is_some());
    page.pointers = out;
    prune(page);
}

/// Drops packs that no pointer names any more.
fn prune(page: &mut Page) {
    let mut used: Vec<Option<u32>> = vec![None; page.packs.len()];
    let mut packs = Vec::with_capacity(page.packs.len());
    for stored in page.pointers.iter_mut().filter_map(|pointer| pointer.stored.as_mut()) {
        let Some((slot, pack)) = used.get_mut(stored.pack as usize).zip(page.packs.get(stored.pack as usize)) else { continue };
        stored.pack = *slot.get_or_insert_with(|| {
            packs.push(*pack);
            packs.len() as u32 - 1
        });
    }
    page.packs = packs;
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use volley_jobspecs::ids::VolumeId;

    use super::*;
    use crate::format::extent::in_order;
    use crate::format::extent::tests::pointers;

    const BLOCKS: u64 = 3 * PAGE_BLOCKS;

    fn pack(n: u32) -> PackRef {
        PackRef { volume: VolumeId([0; 16]), epoch: 1, seq: 1, n, salt: [0; 16] }
    }

    /// Tables of packs, near the borders of pages.
    fn tables() -> impl Strategy<Value = Vec<Vec<Pointer>>> {
        let hole = (0..BLOCKS - 1, 1u32..40_000)
            .prop_map(|(block, blocks)| vec![Pointer { block, blocks: blocks.min((BLOCKS - block) as u32), stored: None }]);
        let table = (0u64..3, 0u64..900).prop_flat_map(|(page, off)| {
            let from = (page * PAGE_BLOCKS + off).saturating_sub(500);
            pointers(from, 1_200, 1, true)
        });
        proptest::collection::vec(prop_oneof![4 => table, 1 => hole], 1..8)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]

        #[test]
        fn each_block_lies_where_the_last_table_says(tables in tables(), lazy: bool, after in 0usize..8) {
            let mut plain: BTreeMap<u64, (u32, [u8; 16], u32)> = BTreeMap::new();
            let mut map = Map::default();
            let mut store: BTreeMap<u64, Arc<Page>> = BTreeMap::new();
            for (n, table) in (0..).zip(&tables) {
                map.apply(pack(n), table);
                for pointer in table {
                    for block in pointer.block..pointer.end() {
                        match pointer.stored {
                            Some(stored) => plain.insert(block, (n, stored.hash, stored.skip + (block - pointer.block) as u32)),
                            None => plain.remove(&block),
                        };
                    }
                }
                if lazy && n as usize == after {
                    // A checkpoint, and a fresh start from it: what comes later waits for the pages.
                    let object = crate::format::content::MapRef { volume: VolumeId([0; 16]), epoch: 1, seq: 1, salt: [0; 16] };
                    let at = PageRef { object, frame: crate::format::object::Frame { offset: 32, stored: 0, plain: 0, codec: 0 }, hash: [0; 32] };
                    prop_assert!(map.missing_changed().is_empty());
                    store = map.changed().into_iter().filter(|(_, page)| !page.pointers.is_empty()).collect();
                    let written = store.keys().map(|number| (*number, at)).collect();
                    let root = map.root(1 << 40, &written);
                    map.stored(&written);
                    prop_assert!(map.changed().is_empty());
                    map = Map::new(&root);
                }
            }
            let mut found = Vec::new();
            while let Some(missing) = { found.clear(); map.get(0..BLOCKS, &mut found) } {
                map.load(missing.number, Arc::clone(&store[&missing.number]));
            }
            let mut at = 0;
            for run in found {
                prop_assert!(run.block == at && run.blocks > 0);
                at += run.blocks;
                for block in run.block..at {
                    let here = run.place.map(|(pack, stored)| (pack.n, stored.hash, stored.skip + (block - run.block) as u32));
                    prop_assert_eq!(here, plain.get(&block).copied(), "block {}", block);
                }
            }
            prop_assert_eq!(at, BLOCKS);
            for (number, page) in map.changed() {
                prop_assert!(in_order(&page.pointers));
                prop_assert_eq!(Page::read(number, &page.write(number).unwrap()), Ok((*page).clone()));
            }
        }
    }

    #[test]
    fn a_trim_of_an_empty_disk_makes_nothing() {
        let mut map = Map::default();
        map.apply(
            pack(0),
            &[Pointer { block: 0, blocks: 1 << 31, stored: None }, Pointer { block: 1 << 31, blocks: 1 << 31, stored: None }],
        );
        assert!(map.changed().is_empty());
    }
}
