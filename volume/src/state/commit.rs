//! What a commit consists of: the last word on each block up to an operation, cut into extents and put into packs.
//!
//! Owns the cut, finding zeros, and which packs stay in the head. Reading the blocks and sending the packs is the caller's. Pure.

use std::ops::Range;

use crate::format::content::{BODIES_BYTES_MAX, Content, DELTAS_MAX, Delta};
use crate::format::extent::{HOLE_BLOCKS_MAX, PackRef, Pointer};
use crate::format::object::slice;
use crate::format::pack::{PackWriter, open_table};
use crate::format::seal::FamilyKey;
use crate::format::{BLOCK_BYTES, FormatError};
use crate::state::overlay::{Place, Run};

/// Blocks of an extent, 64 KiB: a random read fetches one, a sequential one fetches neighbours together.
pub const EXTENT_BLOCKS: u64 = 16;
/// Bytes at which a pack is closed. Larger ones would save requests, and cost more when a transfer is cut.
pub const PACK_BYTES: usize = 16 << 20;

/// A piece of a commit, in the order of the blocks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Item {
    /// Blocks that go into one extent; where each run of them lies.
    Extent {
        /// First block.
        block: u64,
        /// Blocks, at most [`EXTENT_BLOCKS`].
        blocks: u64,
        /// Runs without gaps.
        runs: Vec<Run>,
    },
    /// Blocks that read as zeros.
    Hole {
        /// First block.
        block: u64,
        /// Blocks.
        blocks: u64,
    },
}

/// Cuts runs, in order and without a block twice, into pieces. An extent never crosses a multiple of its size, so that what is written again
/// and again replaces whole extents.
#[must_use]
pub fn cut(runs: &[Run]) -> Vec<Item> {
    let mut items: Vec<Item> = Vec::new();
    for run in runs {
        match run.place {
            Place::Zero => match items.last_mut() {
                Some(Item::Hole { block, blocks }) if *block + *blocks == run.block => *blocks += run.blocks,
                _ => items.push(Item::Hole { block: run.block, blocks: run.blocks }),
            },
            Place::Log(place) => {
                let mut at = run.block;
                while at < run.end() {
                    let end = run.end().min((at / EXTENT_BLOCKS + 1) * EXTENT_BLOCKS);
                    let part = Run { block: at, blocks: end - at, op: run.op, place: Place::Log(place.skip(at - run.block)) };
                    match items.last_mut() {
                        Some(Item::Extent { block, blocks, runs }) if *block + *blocks == at && !at.is_multiple_of(EXTENT_BLOCKS) => {
                            *blocks += part.blocks;
                            runs.push(part);
                        }
                        _ => items.push(Item::Extent { block: at, blocks: part.blocks, runs: vec![part] }),
                    }
                    at = end;
                }
            }
        }
    }
    items
}

/// A pack of a commit.
#[derive(Debug)]
pub struct Packed {
    /// The whole object.
    pub bytes: Vec<u8>,
    /// What the head says of it.
    pub delta: Delta,
    /// Its table.
    pub pointers: Vec<Pointer>,
}

/// Puts pieces into packs, one after the other, so that only one lies in memory. Blocks of zeros become holes.
pub struct Packs<'a> {
    family: &'a FamilyKey,
    next: PackRef,
    salt: Box<dyn FnMut() -> Result<[u8; 16], FormatError> + 'a>,
    writer: Option<PackWriter>,
}

impl<'a> Packs<'a> {
    /// `first`: the name of the first pack; the others count on. `salt` gives fresh random bytes.
    pub fn new(family: &'a FamilyKey, first: PackRef, salt: impl FnMut() -> Result<[u8; 16], FormatError> + 'a) -> Self {
        Self { family, next: first, salt: Box::new(salt), writer: None }
    }

    /// The pack that takes the next pointers. One that is full is handed out.
    fn writer(&mut self, full: &mut Vec<Packed>) -> Result<&mut PackWriter, FormatError> {
        if self.writer.as_ref().is_some_and(|writer| writer.len() >= PACK_BYTES || writer.is_full()) {
            full.extend(self.finish()?);
        }
        if self.writer.is_none() {
            self.next.salt = (self.salt)()?;
            self.writer = Some(PackWriter::new(self.family, self.next)?);
            self.next.n += 1;
        }
        self.writer.as_mut().ok_or_else(|| FormatError::Make { what: "a pack", why: "none was begun".to_owned() })
    }

    /// Adds blocks that read as zeros; returns packs that are full.
    ///
    /// # Errors
    /// [`FormatError::Make`].
    pub fn hole(&mut self, block: u64, blocks: u64) -> Result<Vec<Packed>, FormatError> {
        let mut full = Vec::new();
        let (mut at, end) = (block, block + blocks);
        while at < end {
            let len = u32::try_from(end - at).unwrap_or(HOLE_BLOCKS_MAX).min(HOLE_BLOCKS_MAX);
            self.writer(&mut full)?.hole(at, len)?;
            at += u64::from(len);
        }
        Ok(full)
    }

    /// Adds whole blocks, behind everything before; returns packs that are full.
    ///
    /// # Errors
    /// [`FormatError::Make`].
    pub fn blocks(&mut self, block: u64, plain: &[u8]) -> Result<Vec<Packed>, FormatError> {
        let mut full = Vec::new();
        let is_zero = |number: usize| plain.get(number * BLOCK_BYTES..(number + 1) * BLOCK_BYTES).is_some_and(crate::is_zero);
        let count = plain.len() / BLOCK_BYTES;
        let mut at = 0;
        while at < count {
            let zero = is_zero(at);
            let len = (at..count).take_while(|number| is_zero(*number) == zero).count();
            let first = block + at as u64;
            if zero {
                full.extend(self.hole(first, len as u64)?);
            } else {
                let part = plain.get(at * BLOCK_BYTES..(at + len) * BLOCK_BYTES).unwrap_or_default();
                self.writer(&mut full)?.extent(first, part)?;
            }
            at += len;
        }
        Ok(full)
    }

    /// Ends the last pack, if there is one.
    ///
    /// # Errors
    /// [`FormatError::Make`].
    pub fn finish(&mut self) -> Result<Option<Packed>, FormatError> {
        let Some(writer) = self.writer.take().filter(|writer| !writer.is_empty()) else { return Ok(None) };
        let (bytes, delta, pointers) = writer.finish()?;
        Ok(Some(Packed { bytes, delta, pointers }))
    }
}

/// Should the commit take up what lies in the head, because it is too much with `more` bytes, or because it has packs of its own anyway?
#[must_use]
pub fn takes_up(content: &Content, has_objects: bool, more: usize) -> bool {
    let bodies = content.bodies_bytes();
    bodies > 0 && (has_objects || bodies + more > BODIES_BYTES_MAX)
}

/// The blocks that packs in the head say something of, holes too, and that none of `runs` (in order) replaces; in order and without gaps between
/// neighbours. A commit that takes those packs up says all of it again: where a hole was, an older pack would show otherwise.
///
/// # Errors
/// [`FormatError`]: a pack in the head is damaged.
pub fn taken_up(family: &FamilyKey, content: &Content, runs: &[Run]) -> Result<Vec<Range<u64>>, FormatError> {
    let mut all: Vec<Range<u64>> = Vec::new();
    for delta in &content.deltas {
        let Some(body) = &delta.body else { continue };
        let table = slice(body, delta.table).ok_or(FormatError::Size { what: "a pack in a head", bytes: body.len() })?;
        all.extend(open_table(family, delta, table)?.iter().map(|pointer| pointer.block..pointer.end()));
    }
    all.sort_by_key(|range| range.start);
    let mut out: Vec<Range<u64>> = Vec::new();
    let mut runs = runs.iter().peekable();
    let mut done = 0;
    for range in all {
        let mut at = range.start.max(done);
        while at < range.end {
            while runs.next_if(|run| run.end() <= at).is_some() {}
            let next = runs.peek().filter(|run| run.block < range.end);
            let end = next.map_or(range.end, |run| run.block.max(at));
            match out.last_mut() {
                Some(last) if last.end == at => last.end = end,
                _ if at < end => out.push(at..end),
                _ => {}
            }
            at = next.map_or(range.end, |run| run.end());
        }
        done = done.max(range.end);
    }
    Ok(out)
}

/// Does a pack of this size stay in the head?
#[must_use]
pub fn stays(content: &Content, bytes: usize) -> bool {
    content.bodies_bytes() + bytes <= BODIES_BYTES_MAX
}

/// Is it time to write map pages?
#[must_use]
pub fn wants_checkpoint(content: &Content) -> bool {
    content.deltas.len() > DELTAS_MAX
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use volley_jobspecs::ids::VolumeId;

    use super::*;
    use crate::format::log::LogPlace;
    use crate::format::pack::check;

    fn runs() -> impl Strategy<Value = Vec<Run>> {
        proptest::collection::vec((0u64..9, 1u64..50, any::<bool>()), 0..20).prop_map(|all| {
            let mut at = 0;
            let place = |number| LogPlace { segment: 0, tags: 0, data: 0 }.skip(number);
            all.into_iter()
                .map(|(gap, blocks, zero)| {
                    let block = at + gap;
                    at = block + blocks;
                    Run { block, blocks, op: 1, place: if zero { Place::Zero } else { Place::Log(place(block)) } }
                })
                .collect()
        })
    }

    proptest! {
        #[test]
        fn pieces_are_all_blocks_in_order(runs in runs()) {
            let items = cut(&runs);
            let mut left: Vec<(u64, bool)> = runs.iter().flat_map(|run| (run.block..run.end()).map(|block| (block, run.place == Place::Zero))).collect();
            left.reverse();
            for item in items {
                match item {
                    Item::Hole { block, blocks } => (block..block + blocks).for_each(|block| assert_eq!(left.pop(), Some((block, true)))),
                    Item::Extent { block, blocks, runs } => {
                        prop_assert_eq!(block / EXTENT_BLOCKS, (block + blocks - 1) / EXTENT_BLOCKS);
                        let mut at = block;
                        for run in runs {
                            let place = LogPlace { segment: 0, tags: 0, data: 0 }.skip(at);
                            prop_assert_eq!((run.block, run.place), (at, Place::Log(place)));
                            at = run.end();
                            (run.block..at).for_each(|block| assert_eq!(left.pop(), Some((block, false))));
                        }
                        prop_assert_eq!(at, block + blocks);
                    }
                }
            }
            prop_assert!(left.is_empty());
        }

        #[test]
        fn what_packs_in_the_head_say_is_said_again(old in proptest::collection::vec(runs(), 1..4), new in runs()) {
            let family = FamilyKey::new([1; 32]);
            let mut content = Content::empty(1 << 30);
            let mut wanted = std::collections::BTreeSet::new();
            for (seq, runs) in (0..).zip(&old) {
                let mut packs = Packs::new(&family, PackRef { volume: VolumeId([1; 16]), epoch: 1, seq, n: 0, salt: [0; 16] }, || Ok([7; 16]));
                runs.iter().for_each(|run| assert!(packs.hole(run.block, run.blocks).unwrap().is_empty()));
                let Some(packed) = packs.finish().unwrap() else { continue };
                // Every second one is an object.
                if seq % 2 == 0 {
                    wanted.extend(runs.iter().flat_map(|run| run.block..run.end()));
                }
                content.deltas.push(Delta { body: (seq % 2 == 0).then_some(packed.bytes), ..packed.delta });
            }
            new.iter().flat_map(|run| run.block..run.end()).for_each(|block| { wanted.remove(&block); });
            let found: Vec<u64> = taken_up(&family, &content, &new).unwrap().into_iter().flatten().collect();
            prop_assert_eq!(found, wanted.into_iter().collect::<Vec<_>>());
        }

        #[test]
        fn zeros_within_are_holes(blocks in proptest::collection::vec(any::<bool>(), 1..60)) {
            let family = FamilyKey::new([1; 32]);
            let first = PackRef { volume: VolumeId([1; 16]), epoch: 1, seq: 1, n: 0, salt: [0; 16] };
            let mut packs = Packs::new(&family, first, || Ok([7; 16]));
            let plain: Vec<u8> = blocks.iter().flat_map(|full| vec![u8::from(*full); BLOCK_BYTES]).collect();
            prop_assert!(packs.blocks(100, &plain).unwrap().is_empty());
            let packed = packs.finish().unwrap().unwrap();
            prop_assert_eq!(check(&family, first, &packed.bytes), Ok((packed.delta, packed.pointers.clone())));
            let full: Vec<bool> = packed.pointers.iter().flat_map(|pointer| (0..pointer.blocks).map(|_| pointer.stored.is_some())).collect();
            prop_assert_eq!(full, blocks);
        }
    }

    #[test]
    fn packs_are_closed_when_they_are_full_and_have_names_of_their_own() {
        let family = FamilyKey::new([1; 32]);
        let first = PackRef { volume: VolumeId([1; 16]), epoch: 1, seq: 1, n: 0, salt: [0; 16] };
        let mut counter = 0;
        let mut packs = Packs::new(&family, first, || {
            counter += 1;
            Ok([counter; 16])
        });
        let mut state = 1u64;
        let mut noise = || {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            state.to_le_bytes()
        };
        let mut done = Vec::new();
        for number in 0..600 {
            let plain: Vec<u8> = (0..(64 << 10) / 8).flat_map(|_| noise()).collect();
            done.extend(packs.blocks(number * EXTENT_BLOCKS, &plain).unwrap());
        }
        done.extend(packs.hole(1 << 20, 1 << 32).unwrap());
        done.extend(packs.finish().unwrap());
        assert_eq!(done.iter().map(|pack| (pack.delta.pack.n, pack.delta.pack.salt[0])).collect::<Vec<_>>(), [(0, 1), (1, 2), (2, 3)]);
        assert!(done.iter().all(|pack| pack.bytes.len() < PACK_BYTES + (1 << 20)));
    }
}
