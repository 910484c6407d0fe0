//! `read`: bytes of the disk, from the log, the head, the cache or S3.
//!
//! Owns finding out where each block lies and fetching what lies elsewhere, neighbours with one request. Does not own the order of writes.

use std::collections::{HashMap, HashSet};
use std::io;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::Ordering;

use crate::device::Piece;
use crate::format::extent::{PackRef, Stored};
use crate::format::log::LogPlace;
use crate::format::object::slice;
use crate::format::pack::open_extent;
use crate::format::{BLOCK, BLOCK_BYTES};
use crate::host::{FetchError, Host, at, lock};
use crate::io::log::Segment;
use crate::state::map::{Found, Missing};
use crate::state::overlay::Place;
use crate::volume::{Shared, State, blocks_of};

/// Bytes of neighbouring extents that one request fetches. Longer ones would keep the first block waiting for the last.
const FETCH_BYTES_MAX: u64 = 1 << 20;
/// Blocks that are fetched ahead at first, and at most, when reads follow each other: 128 KiB to 4 MiB. More would push out what others want.
const AHEAD_BLOCKS: std::ops::RangeInclusive<u64> = 32..=1_024;

/// Where a run of blocks has its bytes.
#[derive(Clone)]
enum Source {
    Zero,
    Log(Arc<Segment>, LogPlace),
    Extent(PackRef, Stored),
    /// In a segment that is not there: the volume has a fault.
    Gone,
}

/// An extent's name in memory.
type ExtentKey = (PackRef, u32);
/// Extents that one read needs.
type Extents = HashMap<ExtentKey, Arc<Vec<u8>>>;

impl Shared {
    /// Reads. None: it would have to wait for S3, and may not.
    pub fn read(&self, offset: u64, into: &mut [u8], wait: bool) -> Option<io::Result<()>> {
        if into.is_empty() {
            return Some(Ok(()));
        }
        if let Err(error) = self.within(offset, into.len() as u64) {
            return Some(Err(error));
        }
        let blocks = blocks_of(offset, into.len() as u64);
        let skip = (offset - blocks.start * BLOCK) as usize;
        if skip == 0 && into.len().is_multiple_of(BLOCK_BYTES) {
            return self.read_blocks(blocks, into, wait);
        }
        let mut whole = vec![0; ((blocks.end - blocks.start) * BLOCK) as usize];
        let read = self.read_blocks(blocks, &mut whole, wait)?;
        Some(read.map(|()| into.copy_from_slice(whole.get(skip..skip + into.len()).unwrap_or_default())))
    }

    /// Reads whole blocks.
    pub fn read_blocks(&self, blocks: Range<u64>, into: &mut [u8], wait: bool) -> Option<io::Result<()>> {
        let (sources, mut extents) = match self.locate(blocks, wait).transpose()? {
            Ok(found) => found,
            Err(error) => return Some(Err(error)),
        };
        let mut rest = into;
        for (blocks, source) in sources {
            let (part, behind) = std::mem::take(&mut rest).split_at_mut((blocks * BLOCK) as usize);
            rest = behind;
            let done = match source {
                Source::Zero => {
                    part.fill(0);
                    Ok(())
                }
                Source::Log(segment, place) => segment.read(place, part).map_err(|error| self.log_error(&error)),
                Source::Extent(pack, stored) => self.part_of_extent(&mut extents, pack, &stored, part, wait)?,
                Source::Gone => Err(io::Error::new(io::ErrorKind::InvalidData, format!("{}: a segment of the log is gone", self.id))),
            };
            if done.is_err() {
                return Some(done);
            }
        }
        Some(Ok(()))
    }

    /// A part of an extent: from those at hand, from the disk's cache, or, if that has lost it since, from S3.
    fn part_of_extent(&self, extents: &mut Extents, pack: PackRef, stored: &Stored, into: &mut [u8], wait: bool) -> Option<io::Result<()>> {
        let offset = stored.frame.offset;
        if !extents.contains_key(&(pack, offset)) {
            if self.host.slab.as_ref().is_some_and(|slab| slab.read(pack, offset, stored.skip as usize, into)) {
                return Some(Ok(()));
            }
            if !wait {
                return None;
            }
            if let Err(error) = self.fetch(vec![(pack, *stored)], Vec::new(), extents) {
                return Some(Err(self.fetch_error(&error)));
            }
        }
        Some(copy(extents, pack, stored, into))
    }

    /// Where blocks lie, and the extents among them. `Ok(None)`: it would have to wait.
    fn locate(&self, blocks: Range<u64>, wait: bool) -> io::Result<Option<(Vec<(u64, Source)>, Extents)>> {
        let follows = self.ahead.0.swap(blocks.end, Ordering::Relaxed) == blocks.start;
        loop {
            let mut sources = Vec::new();
            let (missing, bodies) = {
                let state = lock(&self.state);
                state.alive()?;
                let missing = sources_of(&state, blocks.clone(), &mut sources);
                (missing, self.extents_here(&state, &sources))
            };
            match missing {
                Some(missing) if !wait && !self.host.has_page(&missing) => return Ok(None),
                Some(missing) => self.load_page(&missing)?,
                None => {
                    let mut extents = bodies.map_err(|error| self.fetch_error(&error))?;
                    let wanted = self.elsewhere(&sources, &extents);
                    if wanted.is_empty() {
                        return Ok(Some((sources, extents)));
                    }
                    if !wait {
                        return Ok(None);
                    }
                    let ahead = self.ahead_of(blocks.end, follows, &extents);
                    self.fetch(wanted, ahead, &mut extents).map_err(|error| self.fetch_error(&error))?;
                    return Ok(Some((sources, extents)));
                }
            }
        }
    }

    /// The extents that must be fetched.
    fn elsewhere(&self, sources: &[(u64, Source)], extents: &Extents) -> Vec<(PackRef, Stored)> {
        let far = |(_, source): &(u64, Source)| {
            let Source::Extent(pack, stored) = source else { return None };
            let key = (*pack, stored.frame.offset);
            let here = extents.contains_key(&key) || self.host.on_disk(key.0, key.1);
            (!here).then_some((*pack, *stored))
        };
        sources.iter().filter_map(far).collect()
    }

    /// What is likely to be read next and must be fetched, for a read that fetches anyway: more each time that reads follow each other.
    fn ahead_of(&self, block: u64, follows: bool, extents: &Extents) -> Vec<(PackRef, Stored)> {
        let before = self.ahead.1.load(Ordering::Relaxed);
        let window = if follows { (before * 2).clamp(*AHEAD_BLOCKS.start(), *AHEAD_BLOCKS.end()) } else { 0 };
        self.ahead.1.store(window, Ordering::Relaxed);
        let mut sources = Vec::new();
        let state = lock(&self.state);
        let end = (block + window).min(state.size / BLOCK);
        if block < end {
            // A page that is not loaded ends it.
            sources_of(&state, block..end, &mut sources);
        }
        // What lies in the head needs no request.
        let mut far = self.elsewhere(&sources, extents);
        far.retain(|(pack, stored)| !state.bodies.contains_key(pack) && self.host.cache.extent(*pack, stored.frame.offset).is_none());
        far
    }

    /// The extents that the cache or the head has.
    fn extents_here(&self, state: &State, sources: &[(u64, Source)]) -> Result<Extents, FetchError> {
        let mut extents = Extents::new();
        for (_, source) in sources {
            let Source::Extent(pack, stored) = source else { continue };
            let key = (*pack, stored.frame.offset);
            if let Some(plain) = self.host.cache.extent(key.0, key.1) {
                extents.insert(key, plain);
            } else if let Some(body) = state.bodies.get(pack) {
                let bytes = slice(body, stored.frame).unwrap_or_default();
                let plain = Arc::new(open_extent(&self.family, pack, stored, bytes).map_err(at(&pack.key()))?);
                self.host.cache.keep_extent(key.0, key.1, Arc::clone(&plain));
                extents.insert(key, plain);
            }
        }
        Ok(extents)
    }

    /// Fetches extents, those that are neighbours in a pack with one request, all requests at once. What goes wrong with those that are only fetched
    /// `ahead` is nobody's concern yet.
    fn fetch(&self, mut wanted: Vec<(PackRef, Stored)>, ahead: Vec<(PackRef, Stored)>, into: &mut Extents) -> Result<(), FetchError> {
        let must: HashSet<ExtentKey> = wanted.iter().map(|(pack, stored)| (*pack, stored.frame.offset)).collect();
        wanted.extend(ahead);
        wanted.sort_by_key(|(pack, stored)| (*pack, stored.frame.offset));
        wanted.dedup_by_key(|(pack, stored)| (*pack, stored.frame.offset));
        let mut groups: Vec<Vec<(PackRef, Stored)>> = Vec::new();
        for one in wanted {
            let end = |stored: &Stored| u64::from(stored.frame.offset) + u64::from(stored.frame.stored);
            match groups.last_mut() {
                Some(group)
                    if group.last().is_some_and(|(pack, stored)| *pack == one.0 && end(stored) == u64::from(one.1.frame.offset))
                        && group.first().is_some_and(|(_, first)| end(&one.1) - u64::from(first.frame.offset) <= FETCH_BYTES_MAX) =>
                {
                    group.push(one);
                }
                _ => groups.push(vec![one]),
            }
        }
        let begin = |group: Vec<(PackRef, Stored)>| {
            let (pack, first) = *group.first()?;
            let len = group.iter().map(|(_, stored)| u64::from(stored.frame.stored)).sum();
            Some((pack, first.frame.offset, self.host.begin_range(pack.key(), first.frame.offset.into(), len), group))
        };
        let requests: Vec<_> = groups.into_iter().filter_map(begin).collect();
        for (pack, start, request, group) in requests {
            let key = pack.key();
            let bytes = match Host::end(&key, &request) {
                Err(error) if group.iter().any(|(pack, stored)| must.contains(&(*pack, stored.frame.offset))) => return Err(error.into()),
                Err(_) => continue,
                Ok(bytes) => bytes,
            };
            for (pack, stored) in group {
                let from = (stored.frame.offset - start) as usize;
                let part = bytes.get(from..from + stored.frame.stored as usize).unwrap_or_default();
                let plain = match open_extent(&self.family, &pack, &stored, part) {
                    Err(error) if must.contains(&(pack, stored.frame.offset)) => return Err(at(&key)(error)),
                    Err(_) => continue,
                    Ok(plain) => Arc::new(plain),
                };
                self.host.keep_extent(pack, stored.frame.offset, &plain);
                into.insert((pack, stored.frame.offset), plain);
            }
        }
        Ok(())
    }

    /// Loads a page of the map.
    pub fn load_page(&self, missing: &Missing) -> io::Result<()> {
        let page = self.host.page(&self.family, missing).map_err(|error| self.fetch_error(&error))?;
        lock(&self.state).map.load(missing.number, page);
        Ok(())
    }

    pub fn fetch_error(&self, error: &FetchError) -> io::Error {
        let kind = match error {
            FetchError::Format { .. } => io::ErrorKind::InvalidData,
            FetchError::Objects(_) => io::ErrorKind::Other,
        };
        io::Error::new(kind, format!("{}: {error}", self.id))
    }

    /// What a range consists of, as far as that is known here.
    pub fn pieces(&self, offset: u64, len: u64) -> io::Result<Vec<Piece>> {
        self.within(offset, len)?;
        let blocks = blocks_of(offset, len);
        let (mut at, end) = (offset, offset + len);
        let mut pieces: Vec<Piece> = Vec::new();
        let mut sources = Vec::new();
        loop {
            let missing = {
                let state = lock(&self.state);
                state.alive()?;
                sources.clear();
                sources_of(&state, blocks.clone(), &mut sources)
            };
            match missing {
                // One piece at least: wait for the page that has it.
                Some(missing) if sources.is_empty() => self.load_page(&missing)?,
                _ => break,
            }
        }
        let mut block = blocks.start;
        for (blocks, source) in sources {
            block += blocks;
            let (hole, len) = (matches!(source, Source::Zero), (block * BLOCK).min(end) - at);
            at += len;
            match pieces.last_mut() {
                Some(last) if last.hole == hole => last.len += len,
                _ => pieces.push(Piece { len, hole }),
            }
        }
        Ok(pieces)
    }
}

/// Where blocks lie, in order, up to the first page that is not loaded.
fn sources_of(state: &State, blocks: Range<u64>, out: &mut Vec<(u64, Source)>) -> Option<Missing> {
    let mut found = Vec::new();
    for piece in state.overlay.get(blocks) {
        match piece {
            Ok(run) => match run.place {
                Place::Zero => out.push((run.blocks, Source::Zero)),
                Place::Log(place) => {
                    // A run's segment is there: the overlay forgets first.
                    let source = state.log.segment(place.segment).map_or(Source::Gone, |segment| Source::Log(segment, place));
                    out.push((run.blocks, source));
                }
            },
            Err(range) => {
                found.clear();
                let missing = state.map.get(range, &mut found);
                out.extend(found.iter().map(|Found { blocks, place, .. }| {
                    (*blocks, place.map_or(Source::Zero, |(pack, stored)| Source::Extent(pack, stored)))
                }));
                if missing.is_some() {
                    return missing;
                }
            }
        }
    }
    None
}

fn copy(extents: &Extents, pack: PackRef, stored: &Stored, into: &mut [u8]) -> io::Result<()> {
    let start = stored.skip as usize * BLOCK_BYTES;
    let plain = extents.get(&(pack, stored.frame.offset)).and_then(|plain| plain.get(start..start + into.len()));
    // Pointers were checked against the size of their extent: this can't happen, and must not give other bytes if it does.
    let plain = plain
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidData, format!("{}: an extent is shorter than its pointer", pack.key())))?;
    into.copy_from_slice(plain);
    Ok(())
}
