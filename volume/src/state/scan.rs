//! What a log that was found says: the operations up to its end, and whether anything before that end is missing.
//!
//! Owns the order of segments and operations, telling a torn end from damage, and the last word on what is needed. Does not read files. Pure.
//!
//! What comes out is a prefix of the operations, always. The log ends at the first record that does not open. If any record, before or behind
//! that place, says that more was on the disk already, or that a missing segment was needed, then it is no torn end, and the log is
//! refused: whoever has acknowledged flushes does not go on without what was flushed.
//!
//! Where the host is known not to have lost its power since a segment was begun, what was appended is there whether it was flushed or not, and only the very last record
//! can be torn, by a kill in the middle of it. A record behind one that does not open is damage then, and the log is refused, too: whoever writes is alive, and has
//! been told that what was in it was written.

use crate::format::FormatError;
use crate::format::log::{
    ALIGN, LogPlace, RECORD_HEADER_BYTES, RECORD_MAGIC, RECORDS_FROM, Record, SEGMENT_BYTES, SegmentHeader, open_block,
};
use crate::format::seal::{ObjectKey, TAG_BYTES};
use crate::format::{BLOCK_BYTES, log::RECORD_BLOCKS_MAX};

/// Why a log can't be gone on with.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum ScanError {
    /// Something in the middle is not readable.
    #[error(
        "the log is damaged: operation {missing} in segment {segment} at byte {at} does not open, and everything up to operation {durable} had been \
         flushed; the disk of this host is not to be trusted. What was committed to S3 is safe: attach by force to go on with it"
    )]
    Damaged {
        /// The segment.
        segment: u64,
        /// Offset of the record.
        at: u32,
        /// The first operation that is missing.
        missing: u64,
        /// What had been flushed.
        durable: u64,
    },
    /// Something in the middle is not readable, and no power cut can have been the cause.
    #[error(
        "the log is damaged: operation {missing} in segment {segment} at byte {at} does not open, later ones do, and this host has not lost its power since: its \
         disk is not to be trusted. What was committed to S3 is safe: attach by force to go on with it"
    )]
    Rotten {
        /// The segment.
        segment: u64,
        /// Offset of the record.
        at: u32,
        /// The first operation that is missing.
        missing: u64,
    },
    /// Segments at its beginning are gone.
    #[error(
        "the log begins with operation {first}, and {needed} is the next one that S3 lacks: segments were removed or never reached the disk. What was \
         committed to S3 is safe: attach by force to go on with it"
    )]
    Missing {
        /// The first operation that is there.
        first: u64,
        /// The first one that is needed.
        needed: u64,
    },
}

/// An operation that was found.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Entry {
    /// What it says.
    pub record: Record,
    /// Where its blocks lie.
    pub place: LogPlace,
}

/// How far the log goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct End {
    /// Its last operation; the one that S3 has, if there is none behind.
    pub op: u64,
    /// The last segment that was fed.
    pub segment: u64,
    /// Segments before this one are not needed, by what its records say.
    pub oldest: u64,
}

/// How far everything opened.
#[derive(Debug, Clone, Copy)]
struct Last {
    epoch: u64,
    segment: u64,
    op: u64,
}

/// Reads a log, segment by segment.
#[derive(Debug)]
pub struct Scan {
    /// All up to this one is in S3.
    committed: u64,
    last: Option<Last>,
    first_op: Option<u64>,
    first_segment: u64,
    torn: Option<(u64, u32)>,
    durable: u64,
    oldest: u64,
    segment: u64,
    whole_from: Option<u64>,
    /// An operation behind the end that is there all the same, where nothing but damage can be the reason; 0: none.
    beyond: u64,
}

impl Scan {
    /// `committed`: the last operation that S3 has. `whole_from`: segments of this epoch and later ones were written since the host was last started.
    #[must_use]
    pub fn new(committed: u64, whole_from: Option<u64>) -> Self {
        let (last, first_op, torn) = (None, None, None);
        Self { committed, last, first_op, first_segment: 0, torn, durable: 0, oldest: 0, segment: 0, whole_from, beyond: 0 }
    }

    /// The next segment in the order of numbers. `bytes`: the whole file, or as much as there is. Returns the operations behind what S3 has.
    ///
    /// A segment whose header does not open is not fed: nothing in it can be trusted, and the gap it leaves shows.
    pub fn feed(&mut self, header: &SegmentHeader, key: &ObjectKey, bytes: &[u8]) -> Vec<Entry> {
        self.segment = header.segment;
        if self.first_op.is_none() {
            self.first_op = Some(header.first_op);
            self.first_segment = header.segment;
            self.last = Some(Last { epoch: 0, segment: 0, op: header.first_op.saturating_sub(1) });
        }
        let first = self.first_segment == header.segment;
        // A later epoch goes on where its recovery found the end: whatever lies behind that end, or in segments after it, was given up then.
        let follows = self.last.is_some_and(|last| {
            // A number may be left out: a segment that could not be made has one, and no operations.
            let later = (header.epoch, header.segment) > (last.epoch, last.segment) && header.epoch >= last.epoch;
            last.op.checked_add(1) == Some(header.first_op) && later
        });
        match (follows || first, self.last.as_mut()) {
            (true, Some(last)) => {
                self.torn = None;
                self.beyond = 0;
                (last.epoch, last.segment) = (header.epoch, header.segment);
            }
            _ => {
                self.torn.get_or_insert((header.segment, 0));
            }
        }
        let mut found = Vec::new();
        let mut at = RECORDS_FROM;
        while self.torn.is_none() {
            let Some((entry, next)) = self.next(header, key, bytes, at) else { break };
            if entry.record.op > self.committed && entry.record.change != crate::format::log::Change::Mark {
                found.push(entry);
            }
            at = next;
        }
        self.witness(header, key, bytes, at);
        found
    }

    /// The record at `at`, if it opens with all its blocks and is the next operation. None is the end of the segment, or of the log.
    fn next(&mut self, header: &SegmentHeader, key: &ObjectKey, bytes: &[u8], at: u32) -> Option<(Entry, u32)> {
        let here = bytes.get(at as usize..).unwrap_or_default();
        let last = self.last?.op;
        let record = Record::read(key, at, here).ok().filter(|record| {
            let next = if record.change == crate::format::log::Change::Mark { Some(last) } else { last.checked_add(1) };
            Some(record.op) == next && (record.op <= self.committed || blocks_open(key, record, at, here).is_ok())
        })?;
        self.last = Some(Last { epoch: header.epoch, segment: header.segment, op: record.op });
        self.durable = self.durable.max(record.durable);
        self.oldest = self.oldest.max(record.oldest);
        let entry = Entry { record, place: LogPlace::of(header.segment, at, &record) };
        // A record lies within its segment: `Record::read` has checked that.
        Some((entry, at + record.bytes() as u32))
    }

    /// Looks behind the end for records that opened once: what they say of earlier ones holds.
    fn witness(&mut self, header: &SegmentHeader, key: &ObjectKey, bytes: &[u8], from: u32) {
        let end = bytes.len().min(SEGMENT_BYTES as usize) as u32;
        let mut witnesses = (from..end).step_by(ALIGN as usize).filter_map(|at| {
            let here = bytes.get(at as usize..).filter(|here| here.starts_with(&RECORD_MAGIC))?;
            Record::read(key, at, here).ok().map(|record| (at, record))
        });
        // One is enough to know that this segment's end is not its last record; each later one knows no less.
        if let Some((place, first)) = witnesses.next() {
            // A kill in the middle of an append leaves the beginning of the very last record: that is none behind it.
            let torn_itself = self.torn.is_none() && place == from;
            self.torn.get_or_insert((self.segment, from));
            let behind = witnesses.next_back().map(|(_, last)| last);
            for record in behind.iter().chain([&first]) {
                self.durable = self.durable.max(record.durable);
                self.oldest = self.oldest.max(record.oldest);
            }
            let beyond = behind.or(Some(first).filter(|_| !torn_itself));
            if self.whole_from.is_some_and(|from| header.epoch >= from) {
                self.beyond = self.beyond.max(beyond.map_or(0, |record| record.op));
            }
        }
    }

    /// All segments were fed.
    ///
    /// # Errors
    /// [`ScanError`].
    pub fn end(&self) -> Result<End, ScanError> {
        let Some(Last { op, .. }) = self.last else { return Ok(End { op: self.committed, segment: 0, oldest: 0 }) };
        let first = self.first_op.unwrap_or_default();
        // Segments are given back from the front, and a record that was on the disk before says up to which.
        if first > self.committed.saturating_add(1) && self.first_segment > self.oldest {
            return Err(ScanError::Missing { first, needed: self.committed.saturating_add(1) });
        }
        if self.durable > op {
            let (segment, at) = self.torn.unwrap_or((self.segment, 0));
            return Err(ScanError::Damaged { segment, at, missing: op.saturating_add(1), durable: self.durable });
        }
        // What S3 has need not be read.
        if let Some((segment, at)) = self.torn.filter(|_| self.beyond > op.max(self.committed)) {
            return Err(ScanError::Rotten { segment, at, missing: op.saturating_add(1) });
        }
        Ok(End { op: op.max(self.committed), segment: self.segment, oldest: self.oldest })
    }
}

fn blocks_open(key: &ObjectKey, record: &Record, at: u32, here: &[u8]) -> Result<(), FormatError> {
    let cut_off = FormatError::Size { what: "a record of a volume's log", bytes: here.len() };
    let (front, data_at) = (RECORD_HEADER_BYTES, record.data_at() as usize);
    let blocks = record.data_blocks().min(RECORD_BLOCKS_MAX) as usize;
    let tags = here.get(front..data_at).ok_or(cut_off.clone())?;
    let data = here.get(data_at..data_at + blocks * BLOCK_BYTES).ok_or(cut_off)?;
    let mut plain = [0; BLOCK_BYTES];
    for (number, (tag, block)) in tags.as_chunks::<TAG_BYTES>().0.iter().zip(data.as_chunks::<BLOCK_BYTES>().0).enumerate() {
        plain.copy_from_slice(block);
        open_block(key, at + (data_at + number * BLOCK_BYTES) as u32, tag, &mut plain)?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use volley_jobspecs::ids::VolumeId;

    use super::*;
    use crate::format::log::Change;
    use crate::format::seal::FamilyKey;

    /// A log of `records` records in segments of `per` each; each write has two blocks. Returns the segments, and for each record its
    /// segment, offset and length.
    fn log(records: u64, per: u64, durable: u64) -> (Vec<(SegmentHeader, Vec<u8>)>, Vec<(usize, usize, usize)>) {
        let family = FamilyKey::new([1; 32]);
        let (mut segments, mut places): (Vec<(SegmentHeader, Vec<u8>)>, Vec<_>) = (Vec::new(), Vec::new());
        for op in 1..=records {
            if (op - 1) % per == 0 {
                let segment = segments.len() as u64 + 5;
                let header = SegmentHeader { volume: VolumeId([1; 16]), epoch: 1, segment, first_op: op, salt: [segment as u8; 16] };
                segments.push((header, header.write(&family).unwrap()));
            }
            let number = segments.len() - 1;
            let (header, bytes) = segments.last_mut().unwrap();
            let change = Change::Write { block: op, blocks: 2 };
            let at = bytes.len();
            let durable = if op > durable { durable } else { 0 };
            let record = Record { change, op, durable, oldest: 5 };
            record.write(&header.key(&family).unwrap(), at as u32, &[&[op as u8; 2 * BLOCK_BYTES]], bytes).unwrap();
            places.push((number, at, bytes.len() - at));
        }
        (segments, places)
    }

    fn scan(segments: &[(SegmentHeader, Vec<u8>)], committed: u64) -> (Vec<u64>, Result<End, ScanError>) {
        scan_of(segments, committed, None)
    }

    fn scan_of(segments: &[(SegmentHeader, Vec<u8>)], committed: u64, whole_from: Option<u64>) -> (Vec<u64>, Result<End, ScanError>) {
        let family = FamilyKey::new([1; 32]);
        let mut scan = Scan::new(committed, whole_from);
        let mut ops = Vec::new();
        for (header, bytes) in segments {
            ops.extend(scan.feed(header, &header.key(&family).unwrap(), bytes).iter().map(|entry| entry.record.op));
        }
        (ops, scan.end())
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(96))]

        #[test]
        fn the_end_is_a_prefix_and_what_was_flushed_is_never_missing_silently(
            records in 1u64..12, per in 1u64..5, durable in 0u64..12, hit: prop::sample::Index, inside: prop::sample::Index, bit in 0u8..8, committed in 0u64..12,
        ) {
            let (durable, committed) = (durable.min(records), committed.min(records));
            let (mut segments, places) = log(records, per, durable);
            let (ops, end) = scan(&segments, committed);
            prop_assert_eq!(ops, (committed + 1..=records).collect::<Vec<_>>());
            prop_assert_eq!(end.unwrap().op, records);

            let broken = hit.index(places.len());
            let (segment, at, len) = places[broken];
            segments[segment].1[at + inside.index(len)] ^= 1 << bit;
            let (ops, end) = scan(&segments, committed);
            prop_assert!(ops.iter().enumerate().all(|(number, op)| *op == committed + 1 + number as u64), "a prefix");
            match end {
                Ok(end) => {
                    // A later record knew of the flush, if there was one behind it.
                    let witnessed = durable > 0 && durable < records && broken as u64 + 1 != records;
                    let padding = end.op == records;
                    let lost = end.op < durable && witnessed;
                    prop_assert!(padding || !lost, "{} {} {}", end.op, durable, broken);
                    prop_assert_eq!(end.op.max(committed), ops.last().copied().unwrap_or(committed.max(end.op)));
                }
                Err(ScanError::Damaged { missing, durable: said, .. }) => {
                    prop_assert_eq!(missing, broken as u64 + 1);
                    prop_assert!(said == durable && missing <= durable);
                }
                Err(other) => prop_assert!(false, "{other}"),
            }
        }

        #[test]
        fn a_log_that_was_cut_off_anywhere_ends_there(records in 1u64..8, cut: prop::sample::Index) {
            let (mut segments, places) = log(records, 100, 0);
            let len = segments[0].1.len();
            let cut = RECORDS_FROM as usize + cut.index(len - RECORDS_FROM as usize);
            segments[0].1.truncate(cut);
            let whole = places.iter().filter(|(_, at, len)| at + len <= cut).count() as u64;
            let (ops, end) = scan(&segments, 0);
            // The last bytes of a record only fill it up.
            prop_assert!(ops.len() as u64 == whole || ops.len() as u64 == whole + 1);
            prop_assert_eq!(end.unwrap().op, ops.len() as u64);
        }
    }

    #[test]
    fn a_later_epoch_goes_on_where_its_recovery_found_the_end() {
        let (mut segments, places) = log(6, 2, 0);
        // Operation 3, in the second segment, is torn: 4, 5 and 6 are given up.
        segments[1].1[places[2].1] ^= 1;
        assert_eq!(scan(&segments, 0), (vec![1, 2], Ok(End { op: 2, segment: 7, oldest: 5 })));
        let family = FamilyKey::new([1; 32]);
        let header = SegmentHeader { volume: VolumeId([1; 16]), epoch: 2, segment: 8, first_op: 3, salt: [9; 16] };
        let mut bytes = header.write(&family).unwrap();
        let record = Record { change: Change::Resize { size: 1 << 20 }, op: 3, durable: 2, oldest: 5 };
        record.write(&header.key(&family).unwrap(), RECORDS_FROM, &[], &mut bytes).unwrap();
        segments.push((header, bytes));
        assert_eq!(scan(&segments, 0), (vec![1, 2, 3], Ok(End { op: 3, segment: 8, oldest: 5 })));
    }

    #[test]
    fn without_a_power_cut_nothing_may_be_missing_before_the_last_record() {
        let (well, places) = log(6, 2, 0);
        for (broken, (segment, at, len)) in places.into_iter().enumerate() {
            let mut segments = well.clone();
            segments[segment].1[at + 9] ^= 1;
            let (ops, end) = scan(&segments, 0);
            assert_eq!((ops.len(), end.unwrap().op), (broken, broken as u64), "after a power cut");
            let (_, end) = scan_of(&segments, 0, Some(1));
            match end {
                // Nobody can tell whether it was ever written to its end.
                Ok(end) => assert_eq!((broken, end.op), (5, 5)),
                Err(ScanError::Rotten { missing, .. }) => assert_eq!(missing, broken as u64 + 1),
                Err(other) => panic!("{other}"),
            }
            // The beginning of a record is there, and a kill came: it is the last one.
            let mut torn = well.clone();
            torn[segment].1[at + 90..at + len].fill(0);
            torn.truncate(segment + 1);
            torn[segment].1.truncate(at + len);
            assert_eq!(scan_of(&torn, 0, Some(1)).1.map(|end| end.op), Ok(broken as u64));
            // What S3 has does not matter; what is behind it does.
            assert_eq!(scan_of(&segments, 6, Some(1)).1.map(|end| end.op), Ok(6));
            assert_eq!(scan_of(&segments, 4, Some(1)).1.is_err(), broken < 5, "{broken}");
            // What was written before the host was last started a power cut may have torn.
            assert!(scan_of(&segments, 0, Some(2)).1.is_ok());
        }
    }

    #[test]
    fn missing_segments_are_told() {
        let (segments, _) = log(9, 3, 0);
        assert!(matches!(scan(&segments[1..], 0).1, Err(ScanError::Missing { first: 4, needed: 1 })));
        assert_eq!(scan(&segments[1..], 3).1.unwrap().op, 9);
        assert_eq!(scan(&segments[1..], 5), ((6..=9).collect(), Ok(End { op: 9, segment: 7, oldest: 5 })));
        // In the middle: what comes behind the gap is not believed.
        let gap = [segments[0].clone(), segments[2].clone()];
        assert_eq!(scan(&gap, 0), ((1..=3).collect(), Ok(End { op: 3, segment: 7, oldest: 5 })));
        let (segments, _) = log(9, 3, 6);
        let gap = [segments[0].clone(), segments[2].clone()];
        assert!(matches!(scan(&gap, 0).1, Err(ScanError::Damaged { missing: 4, durable: 6, .. })));
        assert_eq!(scan(&[], 4), (vec![], Ok(End { op: 4, segment: 0, oldest: 0 })));
    }
}
