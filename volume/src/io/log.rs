//! The log's files: segments of 64 MiB in the volume's directory, appended to, flushed in groups, given back and used again.
//!
//! Owns file names, room, the order of a new segment's birth, and what a failed flush means. Records are `format/log.rs`'s, what a log says is
//! `state/scan.rs`'s.
//!
//! A segment's room is taken in steps, so that a thousand clones which write a little take little; a write never finds that there is none, because
//! its room was taken before.
//!
//! `<number in 16 digits of hex>.log` is a segment, `spare-….log` one that waits to be used again: its blocks are there already, so that flushes need
//! not wait for the file system to find room. A file whose header names another segment than its own name does was never born.
//!
//! **A failed flush ends the log.** After an error of `fdatasync` the kernel may have dropped what it could not write and forget that it did, so a second
//! flush would say what is not true. Nothing is acknowledged any more; whoever opens the volume again reads what is on the disk.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{self, IoSliceMut};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use volley_jobspecs::ids::VolumeId;

use crate::format::log::{Change, LogPlace, RECORDS_FROM, Record, SEGMENT_BYTES, SegmentHeader, open_block};
use crate::format::seal::{FamilyKey, ObjectKey, Salt, TAG_BYTES};
use crate::format::{BLOCK_BYTES, FormatError};
use crate::state::scan::{End, Entry, Scan, ScanError};

/// Segments that wait to be used again, a volume: what is written until a commit makes more of them. More would only keep room from others.
const SPARES_MAX: usize = 4;
/// Room that is taken first; then as much again as there is.
const ROOM_FIRST: u64 = 256 << 10;
/// Largest step: flushes wait for the file system's own records of each.
const ROOM_STEP_MAX: u64 = 16 << 20;
/// Tags that are read at once: those of the longest record.
const TAGS_MAX: usize = 256;
/// Bytes before the blocks that are read along with them.
const FRONT_BYTES_MAX: usize = TAGS_MAX * TAG_BYTES;

/// Why the log can't be used.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// A file or directory.
    #[error("{what} {}: {error}", path.display())]
    File {
        /// What was done.
        what: &'static str,
        /// Where.
        path: PathBuf,
        /// The system's words.
        error: io::Error,
    },
    /// Bytes in it.
    #[error("{}: byte {at}: {error}", path.display())]
    Format {
        /// The segment's file.
        path: PathBuf,
        /// Offset in it.
        at: u64,
        /// What is wrong.
        error: FormatError,
    },
    /// It does not hold what was flushed.
    #[error("{}: {error}", dir.display())]
    Scan {
        /// The log's directory.
        dir: PathBuf,
        /// What is missing.
        error: ScanError,
    },
}

impl LogError {
    /// Is it for want of room?
    #[must_use]
    pub fn is_full(&self) -> bool {
        matches!(self, Self::File { error, .. } if matches!(error.kind(), io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded))
    }
}

/// A segment's file.
pub struct Segment {
    number: u64,
    first_op: u64,
    file: File,
    key: ObjectKey,
    path: PathBuf,
}

impl Segment {
    /// Reads whole blocks.
    ///
    /// # Errors
    /// [`LogError`]: a block that does not open is an error, never other bytes.
    pub fn read(&self, place: LogPlace, into: &mut [u8]) -> Result<(), LogError> {
        let mut front = [0; FRONT_BYTES_MAX];
        for (number, part) in into.chunks_mut(TAGS_MAX * BLOCK_BYTES).enumerate() {
            let place = place.skip((number * TAGS_MAX) as u64);
            self.read_raw(place, &mut front, part).map_err(|error| self.error("reading", error))?;
            let blocks = part.as_chunks_mut::<BLOCK_BYTES>().0.iter_mut().zip(front.as_chunks::<TAG_BYTES>().0);
            for (number, (block, tag)) in blocks.enumerate() {
                let at = place.skip(number as u64).data;
                open_block(&self.key, at, tag, block).map_err(|error| LogError::Format {
                    path: self.path.clone(),
                    at: at.into(),
                    error,
                })?;
            }
        }
        Ok(())
    }

    /// Reads sealed blocks, and their tags to the beginning of `front`: with one call where what lies between is little.
    fn read_raw(&self, place: LogPlace, front: &mut [u8; FRONT_BYTES_MAX], into: &mut [u8]) -> io::Result<()> {
        let between = place.data.saturating_sub(place.tags) as usize;
        if let Some(front) = front.get_mut(..between) {
            let whole = between + into.len();
            let mut parts = [IoSliceMut::new(front), IoSliceMut::new(into)];
            if rustix::io::preadv(&self.file, &mut parts, place.tags.into())? == whole {
                return Ok(());
            }
        }
        let tags = front.get_mut(..into.len() / BLOCK_BYTES * TAG_BYTES).unwrap_or_default();
        self.file.read_exact_at(tags, place.tags.into())?;
        self.file.read_exact_at(into, place.data.into())
    }

    fn error(&self, what: &'static str, error: io::Error) -> LogError {
        LogError::File { what, path: self.path.clone(), error }
    }
}

/// Names the log.
#[derive(Clone)]
pub struct LogOf {
    /// Its directory.
    pub dir: PathBuf,
    /// The volume.
    pub volume: VolumeId,
    /// The volume's key.
    pub family: FamilyKey,
    /// Must it outlive the host's crash? An ephemeral clone does not: its attempt is lost then.
    pub lasts: bool,
    /// Segments of this epoch and later ones were written since the host was last started: no power cut has taken anything of them. None: nobody knows.
    pub whole_from: Option<u64>,
}

/// What was found on the disk.
pub struct Found {
    /// Operations that S3 lacks, in order.
    pub entries: Vec<Entry>,
    /// How far it goes.
    pub end: End,
    segments: BTreeMap<u64, Arc<Segment>>,
    /// Behind every number that any file has.
    next: u64,
}

impl LogOf {
    /// Reads the log of a volume. `committed`: the last operation that S3 has.
    ///
    /// # Errors
    /// [`LogError`].
    pub fn find(&self, committed: u64) -> Result<Found, LogError> {
        let (mut segments, mut next) = (BTreeMap::new(), 0);
        for (number, path) in self.files()? {
            next = number + 1;
            let mut bytes = [0; RECORDS_FROM as usize];
            let read = File::open(&path).and_then(|file| file.read_exact_at(&mut bytes, 0));
            match read {
                // It was not even long enough for a header: never born.
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => continue,
                read => read.map_err(|error| LogError::File { what: "reading", path: path.clone(), error })?,
            }
            let header = match SegmentHeader::read(self.volume, &self.family, &bytes) {
                Ok(header) => header,
                // No header was ever written: a power cut came first. A header lies within one sector, so it is there as a whole or what was before.
                Err(_) if crate::is_zero(&bytes) => continue,
                Err(error) => return Err(LogError::Format { path, at: 0, error }),
            };
            if header.segment == number {
                segments.insert(number, (header, self.open(&header, path)?));
            }
        }
        // Those that S3 has wholly need not be read: the next one's first operation tells.
        let needed = segments.values().rev().find(|(header, _)| header.first_op <= committed.saturating_add(1));
        let from = needed.map_or(0, |(header, _)| header.segment);
        let (mut scan, mut entries) = (Scan::new(committed, self.whole_from), Vec::new());
        for (header, segment) in segments.range(from..).map(|(_, both)| both) {
            let path = &segment.path;
            let bytes = std::fs::read(path).map_err(|error| LogError::File { what: "reading", path: path.clone(), error })?;
            entries.extend(scan.feed(header, &segment.key, &bytes));
        }
        let end = scan.end().map_err(|error| LogError::Scan { dir: self.dir.clone(), error })?;
        let segments = segments.into_iter().map(|(number, (_, segment))| (number, Arc::new(segment))).collect();
        Ok(Found { entries, end, segments, next })
    }

    /// The segments' files, in order.
    fn files(&self) -> Result<BTreeMap<u64, PathBuf>, LogError> {
        let error = |error| LogError::File { what: "listing", path: self.dir.clone(), error };
        let mut found = BTreeMap::new();
        for entry in std::fs::read_dir(&self.dir).map_err(error)? {
            let path = entry.map_err(error)?.path();
            let name = path.file_name().and_then(|name| name.to_str()).and_then(|name| name.strip_suffix(".log"));
            if let Some(number) = name.filter(|name| name.len() == 16).and_then(|name| u64::from_str_radix(name, 16).ok()) {
                found.insert(number, path);
            }
        }
        Ok(found)
    }

    fn path(&self, number: u64) -> PathBuf {
        self.dir.join(format!("{number:016x}.log"))
    }

    fn open(&self, header: &SegmentHeader, path: PathBuf) -> Result<Segment, LogError> {
        let file = OpenOptions::new().read(true).write(true).open(&path);
        let file = file.map_err(|error| LogError::File { what: "opening", path: path.clone(), error })?;
        let key = header.key(&self.family).map_err(|error| LogError::Format { path: path.clone(), at: 0, error })?;
        Ok(Segment { number: header.segment, first_op: header.first_op, file, key, path })
    }
}

/// Gives random bytes that were never used.
pub type Fresh = Box<dyn FnMut() -> Result<Salt, FormatError> + Send>;

/// A log that is written.
pub struct Log {
    of: LogOf,
    epoch: u64,
    segments: BTreeMap<u64, Arc<Segment>>,
    /// The one that is appended to, and where; none before the first record.
    current: Option<(Arc<Segment>, u32)>,
    /// Bytes of it that the file has room for.
    room: u64,
    next: u64,
    /// Segments before this one are not needed, though S3 has not what is in them.
    cleaned: u64,
    last_op: u64,
    durable: u64,
    /// Written to since they were last flushed.
    unflushed: Vec<Arc<Segment>>,
    /// Segments before this one have names that outlive a crash of the host.
    named: u64,
    spares: Vec<PathBuf>,
    buffer: Vec<u8>,
    salt: Fresh,
}

/// What one flush covers.
pub struct Flush {
    segments: Vec<Arc<Segment>>,
    /// The log's directory, if segments were begun since it was last flushed, and the number behind theirs.
    names: Option<(PathBuf, u64)>,
    /// All operations up to this one.
    pub op: u64,
}

impl Flush {
    /// Waits for the disk.
    ///
    /// # Errors
    /// [`LogError`]: nothing of it is known to be on the disk, and nothing ever will be.
    pub fn wait(&self) -> Result<(), LogError> {
        for segment in &self.segments {
            rustix::fs::fdatasync(&segment.file).map_err(|error| segment.error("flushing", error.into()))?;
        }
        match &self.names {
            Some((dir, _)) => sync_dir(dir).map_err(|error| LogError::File { what: "naming the segments in", path: dir.clone(), error }),
            None => Ok(()),
        }
    }
}

impl Log {
    /// Goes on behind what was found, in an epoch of its own. `salt` gives fresh random bytes. Nothing is written yet.
    #[must_use]
    pub fn new(of: LogOf, epoch: u64, found: Found, salt: Fresh) -> Self {
        let Found { end, segments, next, .. } = found;
        let unflushed = segments.values().cloned().collect();
        let (last_op, buffer) = (end.op, Vec::new());
        Self {
            of,
            epoch,
            segments,
            current: None,
            room: 0,
            next,
            cleaned: end.oldest,
            last_op,
            durable: 0,
            unflushed,
            // Those that were found, too: whoever began them may have been killed before their first flush.
            named: 0,
            spares: Vec::new(),
            buffer,
            salt,
        }
    }

    /// The epoch that it is written in.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// The last operation.
    #[must_use]
    pub fn last_op(&self) -> u64 {
        self.last_op
    }

    /// The last operation that is known to be on the disk.
    #[must_use]
    pub fn durable(&self) -> u64 {
        self.durable
    }

    /// Bytes of its files.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        let full = (self.segments.len() + self.spares.len()) as u64 * u64::from(SEGMENT_BYTES);
        self.current.as_ref().map_or(full, |_| full - u64::from(SEGMENT_BYTES) + self.room)
    }

    /// The segment that is appended to; the next one, before the first record.
    #[must_use]
    pub fn current(&self) -> u64 {
        self.current.as_ref().map_or(self.next, |(segment, _)| segment.number)
    }

    /// A segment, to read from while it may be given back.
    #[must_use]
    pub fn segment(&self, number: u64) -> Option<Arc<Segment>> {
        self.segments.get(&number).cloned()
    }

    /// Appends an operation: it is in the kernel's hands when this returns. `data`: the blocks of a write, in pieces.
    ///
    /// # Errors
    /// [`LogError`]: the operation did not happen.
    pub fn append(&mut self, change: Change, data: &[&[u8]]) -> Result<(u64, LogPlace), LogError> {
        let op = self.last_op + u64::from(change != Change::Mark);
        let record = Record { change, op, durable: self.durable, oldest: self.cleaned };
        let (segment, at) = match self.current.take() {
            Some((segment, at)) if u64::from(at) + record.bytes() <= u64::from(SEGMENT_BYTES) => (segment, at),
            _ => (self.begin_segment()?, RECORDS_FROM),
        };
        self.buffer.clear();
        let end = u64::from(at) + record.bytes();
        if end > self.room
            && let Err(error) = take_room(&segment.file, &mut self.room, end)
        {
            // Nothing was written: the segment goes on when there is room again.
            let error = segment.error("making room in", error);
            self.current = Some((segment, at));
            return Err(error);
        }
        let made = record.write(&segment.key, at, data, &mut self.buffer);
        made.map_err(|error| LogError::Format { path: segment.path.clone(), at: at.into(), error })?;
        // After an error the segment is left as it is, half a record at its end: nothing is written twice under one key.
        segment.file.write_all_at(&self.buffer, at.into()).map_err(|error| segment.error("writing", error))?;
        let place = LogPlace::of(segment.number, at, &record);
        self.last_op = op;
        if self.unflushed.last().is_none_or(|last| last.number != segment.number) {
            self.unflushed.push(Arc::clone(&segment));
        }
        self.current = Some((segment, at + self.buffer.len() as u32));
        Ok((op, place))
    }

    fn begin_segment(&mut self) -> Result<Arc<Segment>, LogError> {
        let number = self.next;
        let path = self.of.path(number);
        let error = |what| {
            let path = path.clone();
            move |error: io::Error| LogError::File { what, path, error }
        };
        match self.spares.pop() {
            Some(spare) => std::fs::rename(&spare, &path).map_err(error("using again"))?,
            None => make(&path).map_err(error("making"))?,
        }
        self.next += 1;
        let salt = (self.salt)().map_err(|error| LogError::Format { path: path.clone(), at: 0, error })?;
        let header = SegmentHeader { volume: self.of.volume, epoch: self.epoch, segment: number, first_op: self.last_op + 1, salt };
        let segment = Arc::new(self.of.open(&header, path.clone())?);
        let bytes = header.write(&self.of.family).map_err(|e| LogError::Format { path: path.clone(), at: 0, error: e })?;
        self.room = segment.file.metadata().map_err(error("looking at"))?.len();
        segment.file.write_all_at(&bytes, 0).map_err(error("writing"))?;
        // Its name need not last before its first flush is answered, which sees to it: no write waits for the file system's journal.
        self.segments.insert(number, Arc::clone(&segment));
        Ok(segment)
    }

    /// What a flush of everything so far covers. None: all of it is on the disk.
    #[must_use]
    pub fn flush(&self) -> Option<Flush> {
        let names = (self.of.lasts && self.named < self.next).then(|| (self.of.dir.clone(), self.next));
        (self.durable < self.last_op || !self.unflushed.is_empty()).then(|| Flush {
            segments: self.unflushed.clone(),
            names,
            op: self.last_op,
        })
    }

    /// A flush succeeded.
    pub fn flushed(&mut self, flush: &Flush) {
        self.durable = self.durable.max(flush.op);
        self.named = self.named.max(flush.names.as_ref().map_or(0, |(_, behind)| *behind));
        // What was appended behind the flush lies in its last segment, or in later ones.
        let last = flush.segments.last().map_or(0, |segment| segment.number);
        let behind = self.last_op > flush.op;
        self.unflushed.retain(|segment| segment.number > last || (segment.number == last && behind));
    }

    /// The first segment that must stay: the log keeps what S3 lacks (operations behind `committed`), and about `keep` bytes beside that, because
    /// what was written lately is read soon.
    #[must_use]
    pub fn oldest_wanted(&self, committed: u64, keep: u64) -> u64 {
        let room = (keep / u64::from(SEGMENT_BYTES)) as usize;
        let numbers: Vec<(u64, u64)> = self.segments.values().map(|segment| (segment.number, segment.first_op)).collect();
        let mut oldest = numbers.first().map_or(self.next, |(number, _)| *number);
        for (place, pair) in numbers.windows(2).enumerate() {
            let [_, (number, first_op)] = pair else { break };
            if numbers.len() - place <= room || *first_op > committed.saturating_add(1) {
                break;
            }
            oldest = *number;
        }
        oldest
    }

    /// The oldest segment, if it is not the one that is appended to: its number, its first operation and its last.
    #[must_use]
    pub fn oldest(&self) -> Option<(u64, u64, u64)> {
        let mut segments = self.segments.values();
        let (oldest, next) = (segments.next()?, segments.next()?);
        Some((oldest.number, oldest.first_op, next.first_op.saturating_sub(1)))
    }

    /// What was the last word in the segments before `oldest` was appended again: says so, and gives them back.
    ///
    /// # Errors
    /// [`LogError`]: they stay.
    pub fn clean(&mut self, oldest: u64) -> Result<(), LogError> {
        let before = std::mem::replace(&mut self.cleaned, oldest);
        if let Err(error) = self.append(Change::Mark, &[]) {
            self.cleaned = before;
            return Err(error);
        }
        if self.of.lasts
            && let Some(flush) = self.flush()
        {
            flush.wait()?;
            self.flushed(&flush);
        }
        self.give_back(oldest);
        Ok(())
    }

    /// Gives up the segments that wait to be used again: there is no room for them.
    pub fn drop_spares(&mut self) {
        for path in self.spares.drain(..) {
            if let Err(error) = std::fs::remove_file(&path) {
                tracing::warn!(path = %path.display(), %error, "a segment of a volume's log stays on the disk");
            }
        }
    }

    /// Gives back the segments before `oldest`.
    pub fn give_back(&mut self, oldest: u64) {
        let kept = self.segments.split_off(&oldest.min(self.current()));
        for segment in std::mem::replace(&mut self.segments, kept).into_values() {
            self.unflushed.retain(|unflushed| unflushed.number != segment.number);
            let path = segment.path.clone();
            let spare = self.of.dir.join(format!("spare-{:016x}.log", segment.number));
            // Whoever still reads from it must not see it written again.
            let unread = Arc::into_inner(segment)
                .is_some_and(|segment| segment.file.metadata().is_ok_and(|file| file.len() == u64::from(SEGMENT_BYTES)));
            if unread && self.spares.len() < SPARES_MAX && std::fs::rename(&path, &spare).is_ok() {
                self.spares.push(spare);
            } else if let Err(error) = std::fs::remove_file(&path) {
                tracing::warn!(path = %path.display(), %error, "a segment of a volume's log stays on the disk");
            }
        }
    }
}

/// An empty segment, with its first room.
fn make(path: &Path) -> io::Result<()> {
    use std::os::unix::fs::OpenOptionsExt;
    let file = OpenOptions::new().write(true).create_new(true).mode(0o600).open(path)?;
    take_room(&file, &mut 0, ROOM_FIRST).inspect_err(|_| drop(std::fs::remove_file(path)))
}

/// Takes room up to `end` at least: no write within it ends for want of some.
fn take_room(file: &File, room: &mut u64, end: u64) -> io::Result<()> {
    let step = (*room).clamp(ROOM_FIRST, ROOM_STEP_MAX);
    let whole = (*room + step).max(end).min(SEGMENT_BYTES.into());
    let take = |bytes| rustix::fs::fallocate(file, rustix::fs::FallocateFlags::empty(), 0, bytes);
    match take(whole) {
        // The disk is nearly full: what is needed now may fit all the same.
        Err(rustix::io::Errno::NOSPC | rustix::io::Errno::DQUOT) if end < whole => {
            take(end)?;
            *room = end;
            return Ok(());
        }
        // A file system that takes no room ahead: writes find out.
        Err(rustix::io::Errno::OPNOTSUPP) => file.set_len(whole)?,
        taken => taken?,
    }
    *room = whole;
    Ok(())
}

/// Makes names in a directory as durable as the files.
///
/// # Errors
/// The system's.
pub fn sync_dir(dir: &Path) -> io::Result<()> {
    File::open(dir)?.sync_all()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(dir: &Path) -> LogOf {
        LogOf { dir: dir.to_owned(), volume: VolumeId([1; 16]), family: FamilyKey::new([2; 32]), lasts: true, whole_from: None }
    }

    fn log(dir: &Path, epoch: u64, committed: u64) -> (Log, Vec<Entry>) {
        let found = of(dir).find(committed).unwrap();
        let entries = found.entries.clone();
        let mut counter = epoch as u8 * 16;
        let salt = move || {
            counter += 1;
            Ok([counter; 16])
        };
        (Log::new(of(dir), epoch, found, Box::new(salt)), entries)
    }

    fn block(fill: u64) -> Vec<u8> {
        vec![fill as u8; 256 * BLOCK_BYTES]
    }

    fn fill(log: &mut Log) {
        for _ in 0..70 {
            log.append(Change::Write { block: 0, blocks: 256 }, &[&block(7)]).unwrap();
        }
    }

    #[test]
    fn what_was_appended_is_read_and_found_again() {
        let dir = tempfile::tempdir().unwrap();
        let (mut first, _) = log(dir.path(), 1, 0);
        let places: Vec<LogPlace> = (1..=150u64)
            .map(|op| {
                let (done, place) = first.append(Change::Write { block: op * 256, blocks: 256 }, &[&block(op)]).unwrap();
                assert_eq!(done, op);
                place
            })
            .collect();
        let (op, _) = first.append(Change::Zero { block: 0, blocks: 9, hole: true }, &[]).unwrap();
        assert_eq!((op, first.segments.len()), (151, 3));
        let mut into = block(0);
        for (op, place) in (1..).zip(&places) {
            first.segment(place.segment).unwrap().read(*place, &mut into).unwrap();
            assert!(into == block(op));
        }
        let flush = first.flush().unwrap();
        flush.wait().unwrap();
        first.flushed(&flush);
        assert!(first.flush().is_none() && first.durable() == 151);
        // Names are flushed with the first flush behind their birth, and by no other.
        first.append(Change::Zero { block: 0, blocks: 9, hole: true }, &[]).unwrap();
        let again = first.flush().unwrap();
        assert!(flush.names.is_some() && again.names.is_none());
        drop((flush, again, first));

        let (mut second, entries) = log(dir.path(), 2, 0);
        assert_eq!(entries.iter().map(|entry| entry.record.op).collect::<Vec<_>>(), (1..=152).collect::<Vec<_>>());
        assert_eq!(entries[149].place, places[149]);
        second.append(Change::Resize { size: 1 << 30 }, &[]).unwrap();
        assert_eq!((second.last_op(), second.current()), (153, 3));
        // Given back, used again: what was in there is not found any more.
        second.give_back(3);
        assert_eq!((second.segments.len(), second.spares.len()), (1, 2));
        fill(&mut second);
        assert_eq!((second.segments.len(), second.spares.len()), (2, 1));
        drop(second);
        let (third, entries) = log(dir.path(), 3, 152);
        assert_eq!((entries.len(), third.last_op()), (71, 223));
        assert!(
            matches!(of(dir.path()).find(0), Err(LogError::Scan { error: ScanError::Missing { .. }, .. })) || third.segments.len() == 2
        );
    }

    #[test]
    fn a_segment_that_somebody_reads_is_not_used_again() {
        let dir = tempfile::tempdir().unwrap();
        let (mut log, _) = log(dir.path(), 1, 0);
        let (_, place) = log.append(Change::Write { block: 0, blocks: 256 }, &[&block(1)]).unwrap();
        let reader = log.segment(place.segment).unwrap();
        fill(&mut log);
        let flush = log.flush().unwrap();
        flush.wait().unwrap();
        log.flushed(&flush);
        drop(flush);
        log.give_back(1);
        assert!(log.spares.is_empty());
        let mut into = block(0);
        reader.read(place, &mut into).unwrap();
        assert!(into == block(1));
    }

    #[test]
    fn damage_in_a_block_is_an_error() {
        let dir = tempfile::tempdir().unwrap();
        let (mut log, _) = log(dir.path(), 1, 0);
        let (_, place) = log.append(Change::Write { block: 0, blocks: 2 }, &[&[1; 2 * BLOCK_BYTES]]).unwrap();
        let segment = log.segment(place.segment).unwrap();
        let at = u64::from(place.skip(1).data) + 77;
        let mut byte = [0];
        segment.file.read_exact_at(&mut byte, at).unwrap();
        segment.file.write_all_at(&[byte[0] ^ 4], at).unwrap();
        let mut into = vec![0; BLOCK_BYTES];
        segment.read(place, &mut into).unwrap();
        assert!(matches!(segment.read(place.skip(1), &mut into), Err(LogError::Format { .. })));
    }
}
