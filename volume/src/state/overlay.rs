//! What the log says of the disk: for each run of blocks the last operation on it, and where its bytes are.
//!
//! Owns the intervals. Lies over the map: what is here is newer than what is there, or the same. Pure.

use std::collections::BTreeMap;
use std::ops::Range;

use crate::format::log::LogPlace;

/// Where a run of blocks has its bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// In the log.
    Log(LogPlace),
    /// Nowhere: it reads as zeros.
    Zero,
}

impl Place {
    fn skip(self, blocks: u64) -> Self {
        match self {
            Self::Log(place) => Self::Log(place.skip(blocks)),
            Self::Zero => Self::Zero,
        }
    }
}

/// A run of blocks of one operation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Run {
    /// First block of the disk.
    pub block: u64,
    /// Blocks.
    pub blocks: u64,
    /// The operation.
    pub op: u64,
    /// Its bytes.
    pub place: Place,
}

impl Run {
    /// The block behind it.
    #[must_use]
    pub fn end(&self) -> u64 {
        self.block + self.blocks
    }

    fn part(&self, from: u64, to: u64) -> Self {
        Self { block: from, blocks: to - from, op: self.op, place: self.place.skip(from - self.block) }
    }
}

/// The intervals, none twice.
#[derive(Debug, Clone, Default)]
pub struct Overlay {
    runs: BTreeMap<u64, Run>,
    /// Blocks that lie in each segment and are still the last word.
    live: BTreeMap<u64, u64>,
}

impl Overlay {
    /// An operation on a run of blocks. A whole disk is one run: its cost is that of the runs it replaces.
    pub fn put(&mut self, run: Run) {
        if run.blocks == 0 {
            return;
        }
        self.cut_out(run.block..run.end());
        self.insert(run);
    }

    fn insert(&mut self, run: Run) {
        if let Place::Log(place) = run.place {
            *self.live.entry(place.segment).or_default() += run.blocks;
        }
        self.runs.insert(run.block, run);
    }

    fn remove(&mut self, block: u64) -> Option<Run> {
        let run = self.runs.remove(&block)?;
        if let Place::Log(place) = run.place
            && let Some(live) = self.live.get_mut(&place.segment)
        {
            *live = live.saturating_sub(run.blocks);
            if *live == 0 {
                self.live.remove(&place.segment);
            }
        }
        Some(run)
    }

    fn cut_out(&mut self, range: Range<u64>) {
        let before = self.runs.range(..range.start).next_back().map(|(block, run)| (*block, run.end()));
        let first = before.filter(|(_, end)| *end > range.start).map_or(range.start, |(block, _)| block);
        while let Some(block) = self.runs.range(first..range.end).next().map(|(block, _)| *block) {
            let Some(run) = self.remove(block) else { break };
            if run.block < range.start {
                self.insert(run.part(run.block, range.start));
            }
            if run.end() > range.end {
                self.insert(run.part(range.end, run.end()));
            }
            // The part before the range begins where the run did: go on behind it.
            if run.block < range.start {
                self.cut_out(range);
                return;
            }
        }
    }

    /// What a range consists of, in order and without gaps: runs, and ranges that the log says nothing of.
    #[must_use]
    pub fn get(&self, range: Range<u64>) -> Vec<Result<Run, Range<u64>>> {
        let mut out = Vec::new();
        let mut at = range.start;
        if range.is_empty() {
            return out;
        }
        let before = self.runs.range(..range.start).next_back().map(|(_, run)| run).filter(|run| run.end() > range.start);
        for run in before.into_iter().chain(self.runs.range(range.clone()).map(|(_, run)| run)) {
            if run.block > at {
                out.push(Err(at..run.block));
            }
            let part = run.part(run.block.max(range.start), run.end().min(range.end));
            at = part.end();
            out.push(Ok(part));
        }
        if at < range.end {
            out.push(Err(at..range.end));
        }
        out
    }

    /// The last operation on a block, if the log says anything of it.
    #[must_use]
    pub fn op_of(&self, block: u64) -> Option<u64> {
        self.runs.range(..=block).next_back().map(|(_, run)| run).filter(|run| run.end() > block).map(|run| run.op)
    }

    /// What was changed by the operations `after + 1 ..= until` and not changed again since, in the order of the blocks.
    #[must_use]
    pub fn changed(&self, after: u64, until: u64) -> Vec<Run> {
        self.runs.values().filter(|run| run.op > after && run.op <= until).copied().collect()
    }

    /// Forgets what lies in segments before `oldest`, and zeros, of operations up to `op`: the map says the same.
    pub fn forget(&mut self, op: u64, oldest: u64) {
        let gone = |run: &&Run| {
            run.op <= op
                && match run.place {
                    Place::Zero => true,
                    Place::Log(place) => place.segment < oldest,
                }
        };
        let blocks: Vec<u64> = self.runs.values().filter(gone).map(|run| run.block).collect();
        for block in blocks {
            self.remove(block);
        }
    }

    /// Blocks of a segment that are still the last word.
    #[must_use]
    pub fn live(&self, segment: u64) -> u64 {
        self.live.get(&segment).copied().unwrap_or_default()
    }

    /// Blocks that lie in any segment and are still the last word.
    #[must_use]
    pub fn live_blocks(&self) -> u64 {
        self.live.values().sum()
    }

    /// Number of runs.
    #[must_use]
    pub fn len(&self) -> usize {
        self.runs.len()
    }

    /// Does the log say nothing?
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.runs.is_empty()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const BLOCKS: u64 = 64;

    fn log(segment: u64, number: u64) -> Place {
        Place::Log(LogPlace { segment, tags: 0, data: 0 }.skip(number))
    }

    proptest! {
        #[test]
        fn each_block_has_the_last_operation_on_it(
            all in proptest::collection::vec((0..BLOCKS, 1u64..20, proptest::option::of(0u64..4)), 0..40), from in 0..BLOCKS, len in 0u64..30, until in 0u64..50,
        ) {
            let mut overlay = Overlay::default();
            let mut plain: Vec<Option<(u64, Place)>> = vec![None; BLOCKS as usize + 40];
            for (op, (block, blocks, segment)) in (1..).zip(all) {
                let place = segment.map_or(Place::Zero, |segment| log(segment, op * 100));
                overlay.put(Run { block, blocks, op, place });
                for number in 0..blocks {
                    plain[(block + number) as usize] = Some((op, place.skip(number)));
                }
            }
            let mut at = from;
            for piece in overlay.get(from..from + len) {
                let range = match &piece { Ok(run) => run.block..run.end(), Err(range) => range.clone() };
                prop_assert!(range.start == at && range.end > at);
                for block in range.clone() {
                    let found = piece.as_ref().ok().map(|run| (run.op, run.place.skip(block - run.block)));
                    prop_assert_eq!(found, plain[block as usize]);
                    prop_assert_eq!(overlay.op_of(block), found.map(|(op, _)| op));
                }
                at = range.end;
            }
            prop_assert_eq!(at, from + len);
            for segment in 0..4 {
                let live = plain.iter().flatten().filter(|(_, place)| matches!(place, Place::Log(place) if place.segment == segment)).count();
                prop_assert_eq!(overlay.live(segment), live as u64);
                }
            let changed: u64 = overlay.changed(3, until).iter().map(|run| run.blocks).sum();
            prop_assert_eq!(changed, plain.iter().flatten().filter(|(op, _)| *op > 3 && *op <= until).count() as u64);
            overlay.forget(until, 2);
            for (block, was) in plain.iter().enumerate() {
                let gone = was.is_some_and(|(op, place)| op <= until && match place { Place::Zero => true, Place::Log(place) => place.segment < 2 });
                prop_assert_eq!(overlay.op_of(block as u64), was.filter(|_| !gone).map(|(op, _)| op));
            }
        }
    }

    #[test]
    fn a_whole_disk_is_one_run() {
        let mut overlay = Overlay::default();
        overlay.put(Run { block: 5, blocks: 3, op: 1, place: log(0, 0) });
        overlay.put(Run { block: 0, blocks: 1 << 32, op: 2, place: Place::Zero });
        assert_eq!((overlay.len(), overlay.live(0)), (1, 0));
        overlay.put(Run { block: 9, blocks: 1, op: 3, place: log(0, 0) });
        assert_eq!(overlay.len(), 3);
    }
}
