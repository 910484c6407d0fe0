//! The cache on the host's disk: opened extents in one file of slots, each block sealed by itself.
//!
//! Owns slots, what goes first, and that nothing wrong is ever read from it. What is in it is in S3 too: every error is a miss. It never takes room
//! from writes: what can't be written is not kept.
//!
//! What is where is known in memory, and written through to the host's index (`io/index.rs`), so that it is warm after a restart. Each start seals with a
//! key of its own, whose nonces count over all blocks that it ever writes; the keys of earlier starts lie in the index, wrapped by the cluster's, and only
//! open. A slot that was given to another extent while somebody reads from it does not open: that is a miss as well. So is a row of an index that is older
//! than the file.

use std::collections::{HashMap, HashSet, VecDeque};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::{Arc, Mutex};

use crate::format::cached::{Cached, ExtentKey, SESSIONS, SLOT_BLOCKS, SLOT_BYTES};
use crate::format::extent::PackRef;
use crate::format::seal::{ClusterKeys, FamilyKey, Kind, ObjectKey, WrappedKey};
use crate::format::{BLOCK_BYTES, FormatError};
use crate::host::{lock, random};
use crate::io::index::{Index, Opened};

#[derive(Clone)]
struct Entry {
    at: Arc<Cached>,
    /// Was it wanted since it was last looked at for removal?
    used: bool,
}

#[derive(Default)]
struct Slots {
    entries: HashMap<ExtentKey, Entry>,
    round: VecDeque<ExtentKey>,
    free: Vec<u32>,
    /// Slots that were ever used.
    used: u32,
    /// Fewer than were allowed, since others needed the room.
    max: Option<u32>,
    next: u64,
}

/// The cache file.
pub struct Slab {
    file: File,
    /// Of this start, and of earlier ones of which something is left.
    keys: HashMap<u32, ObjectKey>,
    session: u32,
    slots_max: u32,
    slots: Mutex<Slots>,
    index: Option<Arc<Index>>,
}

/// A key of this start, and as it is kept.
fn draw(keys: &ClusterKeys) -> Result<(ObjectKey, WrappedKey), FormatError> {
    let drawn = FamilyKey::new(random()?);
    let wrapped = drawn.wrap(keys, SESSIONS, random()?)?;
    Ok((drawn.object("cache", &wrapped.salt)?, wrapped))
}

fn unwrap(wrapped: &WrappedKey, keys: &ClusterKeys) -> Option<ObjectKey> {
    FamilyKey::unwrap(wrapped, keys).and_then(|key| key.object("cache", &wrapped.salt)).ok()
}

impl Slab {
    /// Opens the cache file of a directory, or begins one, of at most `bytes_max`; and the index beside it. None: that is less than one slot, another process
    /// has it, or the disk does not let us; there is no cache on the disk then.
    #[must_use]
    pub fn open(dir: &Path, keys: &ClusterKeys, bytes_max: u64) -> Option<Self> {
        use std::os::unix::fs::OpenOptionsExt;
        let slots_max = u32::try_from(bytes_max / SLOT_BYTES as u64).unwrap_or(u32::MAX);
        if slots_max == 0 {
            return None;
        }
        let path = dir.join("cache.slab");
        let index = match Index::open(&dir.join("index")) {
            Opened::Ours(index) => Some(Arc::new(index)),
            Opened::Nothing => None,
            Opened::Taken => {
                tracing::warn!(path = %path.display(), "another process has the cache on the disk; volumes have none here");
                return None;
            }
        };
        let file = File::options().read(true).write(true).create(true).truncate(index.is_none()).mode(0o600).open(&path);
        let file = file.inspect_err(|error| tracing::warn!(path = %path.display(), %error, "volumes have no cache on the disk")).ok()?;
        let (key, wrapped) = draw(keys).ok()?;
        let mut slab = Self { file, keys: HashMap::new(), session: 0, slots_max, slots: Mutex::default(), index };
        slab.find(keys);
        if let Some(index) = &slab.index {
            index.keep_session(slab.session, &wrapped);
        }
        slab.keys.insert(slab.session, key);
        Some(slab)
    }

    /// What the index says is in the file. What no key opens any more, or lies where something else does, is forgotten.
    fn find(&mut self, keys: &ClusterKeys) {
        let Some(index) = self.index.clone() else { return };
        let sessions = index.sessions();
        self.session = sessions.iter().map(|(number, _)| *number).max().map_or(0, |last| last.wrapping_add(1));
        let mut opens: HashMap<u32, ObjectKey> =
            sessions.iter().filter_map(|(number, wrapped)| Some((*number, unwrap(wrapped, keys)?))).collect();
        let (mut slots, mut taken, mut needed) = (Slots::default(), HashSet::new(), HashSet::new());
        for (key, at) in index.cached(self.slots_max) {
            let apart = at.slots.iter().all(|slot| !taken.contains(slot));
            if !apart || !opens.contains_key(&at.session) {
                index.forget(&key);
                continue;
            }
            taken.extend(at.slots.iter().copied());
            needed.insert(at.session);
            slots.entries.insert(key, Entry { at: Arc::new(at), used: false });
            slots.round.push_back(key);
        }
        slots.used = taken.iter().max().map_or(0, |last| last + 1);
        slots.free = (0..slots.used).filter(|slot| !taken.contains(slot)).collect();
        sessions.iter().filter(|(number, _)| !needed.contains(number)).for_each(|(number, _)| index.forget_session(*number));
        opens.retain(|number, _| needed.contains(number));
        (self.keys, self.slots) = (opens, Mutex::new(slots));
    }

    /// The host's index, if there is one.
    #[must_use]
    pub fn index(&self) -> Option<&Index> {
        self.index.as_deref()
    }

    /// Empties it, since somebody who needs it finds no room on its disk; until the next start it takes half of what it had. Tells whether it had anything.
    pub fn leave_room(&self) -> bool {
        let mut slots = lock(&self.slots);
        if slots.used == 0 {
            return false;
        }
        let all: Vec<ExtentKey> = slots.entries.keys().copied().collect();
        all.iter().for_each(|key| self.remove(&mut slots, key));
        // Nonces count on.
        *slots = Slots { max: Some(slots.used / 2), next: slots.next, ..Slots::default() };
        // Whoever reads meanwhile reads zeros, which do not open.
        self.file.set_len(0).is_ok()
    }

    /// Is an extent there?
    #[must_use]
    pub fn has(&self, pack: PackRef, offset: u32) -> bool {
        lock(&self.slots).entries.contains_key(&(pack, offset))
    }

    /// Reads whole blocks of an extent, from its block `skip` on; tells whether they were there.
    #[must_use]
    pub fn read(&self, pack: PackRef, offset: u32, skip: usize, into: &mut [u8]) -> bool {
        let key = (pack, offset);
        let at = {
            let mut slots = lock(&self.slots);
            let Some(entry) = slots.entries.get_mut(&key) else { return false };
            entry.used = true;
            Arc::clone(&entry.at)
        };
        let good = self.read_cached(&at, skip, into);
        if !good {
            // Damaged, or another's by now.
            let mut slots = lock(&self.slots);
            if slots.entries.get(&key).is_some_and(|now| now.at == at) {
                self.remove(&mut slots, &key);
            }
        }
        good
    }

    fn read_cached(&self, cached: &Cached, skip: usize, into: &mut [u8]) -> bool {
        let Some(key) = self.keys.get(&cached.session) else { return false };
        let (mut at, mut rest) = (skip, into);
        while !rest.is_empty() {
            // As much as lies in one slot.
            let inside = at % SLOT_BLOCKS;
            let len = rest.len().min((SLOT_BLOCKS - inside) * BLOCK_BYTES);
            let (part, behind) = std::mem::take(&mut rest).split_at_mut(len);
            let Some(slot) = cached.slots.get(at / SLOT_BLOCKS) else { return false };
            let place = u64::from(*slot) * SLOT_BYTES as u64 + (inside * BLOCK_BYTES) as u64;
            if self.file.read_exact_at(part, place).is_err() {
                return false;
            }
            for block in part.chunks_exact_mut(BLOCK_BYTES) {
                let index = cached.first + at as u64;
                let opened = cached.tag(at).map(|tag| key.open("a cached block", Kind::CacheBlock, index, &[], block, tag));
                if opened.is_none_or(|opened| opened.is_err()) {
                    return false;
                }
                at += 1;
            }
            rest = behind;
        }
        true
    }

    /// Keeps an extent.
    pub fn keep(&self, pack: PackRef, offset: u32, plain: &[u8]) {
        let (key, blocks) = ((pack, offset), plain.len() / BLOCK_BYTES);
        let Some(seals) = self.keys.get(&self.session) else { return };
        let (taken, first) = {
            let mut slots = lock(&self.slots);
            if slots.entries.contains_key(&key) {
                return;
            }
            let Some(taken) = self.take(&mut slots, blocks.div_ceil(SLOT_BLOCKS)) else { return };
            let first = slots.next;
            slots.next += blocks as u64;
            (taken, first)
        };
        let mut sealed = plain.to_vec();
        let pieces = sealed.chunks_exact_mut(BLOCK_BYTES);
        let tags: Result<Vec<_>, _> = (first..).zip(pieces).map(|(index, block)| seals.seal(Kind::CacheBlock, index, &[], block)).collect();
        let mut parts = taken.iter().zip(sealed.chunks(SLOT_BYTES));
        let written = parts.all(|(slot, part)| self.file.write_all_at(part, u64::from(*slot) * SLOT_BYTES as u64).is_ok());
        let mut slots = lock(&self.slots);
        match tags {
            Ok(tags) if written && !slots.entries.contains_key(&key) => {
                let at = Cached { session: self.session, first, slots: taken, tags: tags.concat() };
                if let Some(index) = &self.index {
                    index.keep(&key, &at);
                }
                slots.entries.insert(key, Entry { at: Arc::new(at), used: false });
                slots.round.push_back(key);
            }
            _ => slots.free.extend(taken),
        }
    }

    fn remove(&self, slots: &mut Slots, key: &ExtentKey) {
        if let Some(entry) = slots.entries.remove(key) {
            // Its row first: the slots are not given out under it.
            if let Some(index) = &self.index {
                index.forget(key);
            }
            slots.free.extend(&entry.at.slots);
        }
    }

    /// Slots for an extent: free ones, new ones, or those of what was not wanted for a whole round.
    fn take(&self, slots: &mut Slots, wanted: usize) -> Option<Vec<u32>> {
        let mut taken = Vec::with_capacity(wanted);
        while taken.len() < wanted {
            if let Some(slot) = slots.free.pop() {
                taken.push(slot);
            } else if slots.used < slots.max.unwrap_or(self.slots_max) {
                taken.push(slots.used);
                slots.used += 1;
            } else {
                let Some(oldest) = slots.round.pop_front() else {
                    slots.free.extend(taken);
                    return None;
                };
                match slots.entries.get_mut(&oldest) {
                    Some(entry) if entry.used => {
                        entry.used = false;
                        slots.round.push_back(oldest);
                    }
                    _ => self.remove(slots, &oldest),
                }
            }
        }
        Some(taken)
    }
}

#[cfg(test)]
mod tests {
    use volley_jobspecs::ids::VolumeId;

    use super::*;

    fn pack(n: u32) -> PackRef {
        PackRef { volume: VolumeId([1; 16]), epoch: 1, seq: 1, n, salt: [0; 16] }
    }

    fn keys(byte: u8) -> ClusterKeys {
        ClusterKeys::new(&[[byte; 32]]).unwrap()
    }

    fn plain(blocks: usize, seed: u8) -> Vec<u8> {
        (0..blocks).flat_map(|block| vec![seed ^ block as u8; BLOCK_BYTES]).collect()
    }

    #[test]
    fn extents_of_all_sizes_come_back_block_by_block_within_the_budget() {
        let dir = tempfile::tempdir().unwrap();
        let slab = Slab::open(dir.path(), &keys(1), 64 * SLOT_BYTES as u64).unwrap();
        let blocks = |n: u32| 1 + (n as usize * 7) % 64;
        let mut into = vec![0; 64 * BLOCK_BYTES];
        for n in 0..200u32 {
            slab.keep(pack(n), 32, &plain(blocks(n), n as u8));
            // Wanted all the time: it stays.
            assert!(slab.read(pack(0), 32, 0, &mut into[..BLOCK_BYTES]), "{n}");
        }
        assert!(std::fs::metadata(dir.path().join("cache.slab")).unwrap().len() <= 64 * SLOT_BYTES as u64);
        let kept: Vec<u32> = (0..200).filter(|n| slab.has(pack(*n), 32)).collect();
        assert!((10..=64).contains(&kept.len()), "{kept:?}");
        for n in kept {
            let (all, some) = (blocks(n), 3.min(blocks(n)));
            let into = &mut into[..some * BLOCK_BYTES];
            assert!(slab.read(pack(n), 32, all - some, into));
            assert!(*into == plain(all, n as u8)[(all - some) * BLOCK_BYTES..]);
        }
        let mut into = [0; BLOCK_BYTES];
        assert!(!slab.read(pack(0), 33, 0, &mut into) && !slab.read(pack(0), 32, 64, &mut into));
    }

    #[test]
    fn damage_is_a_miss() {
        let dir = tempfile::tempdir().unwrap();
        let slab = Slab::open(dir.path(), &keys(1), 1 << 20).unwrap();
        slab.keep(pack(1), 32, &plain(16, 5));
        let mut byte = [0];
        slab.file.read_exact_at(&mut byte, 5_000).unwrap();
        slab.file.write_all_at(&[byte[0] ^ 1], 5_000).unwrap();
        let mut into = vec![0; BLOCK_BYTES];
        assert!(slab.read(pack(1), 32, 0, &mut into) && into == plain(1, 5));
        assert!(!slab.read(pack(1), 32, 1, &mut into));
        assert!(!slab.has(pack(1), 32), "it is fetched again");
    }

    #[test]
    fn what_was_kept_is_there_after_restarts_and_nothing_wrong_ever_is() {
        let dir = tempfile::tempdir().unwrap();
        let open = |bytes: u64| Slab::open(dir.path(), &keys(1), bytes).unwrap();
        let whole = 64 * SLOT_BYTES as u64;
        let mut into = vec![0; 20 * BLOCK_BYTES];
        for start in 0..4u32 {
            let slab = open(whole);
            assert_eq!((slab.session, slab.keys.len()), (start, start as usize + 1));
            for n in 0..start {
                assert!(slab.read(pack(n), 32, 0, &mut into) && into == plain(20, n as u8), "{n}");
            }
            slab.keep(pack(start), 32, &plain(20, start as u8));
        }
        assert!(
            Slab::open(dir.path(), &keys(1), whole)
                .is_some_and(|one| Slab::open(dir.path(), &keys(1), whole).is_none() && one.has(pack(0), 32))
        );
        // A smaller file: what lies behind its end is forgotten, and what is kept fills the gaps.
        let slab = open(3 * SLOT_BYTES as u64);
        let left: Vec<u32> = (0..4).filter(|n| slab.has(pack(*n), 32)).collect();
        assert_eq!(left.len(), 1);
        slab.keep(pack(9), 32, &plain(20, 9));
        assert!(slab.slots.lock().unwrap().used <= 3);
        drop(slab);
        // The file of another time under the same index.
        std::fs::write(dir.path().join("cache.slab"), vec![7; SLOT_BYTES * 3]).unwrap();
        let slab = open(whole);
        assert!((0..10).all(|n| !slab.read(pack(n), 32, 0, &mut into)));
        slab.keep(pack(1), 32, &plain(20, 1));
        drop(slab);
        // Of another cluster, or after its keys have changed: nothing is there, and room is.
        let slab = Slab::open(dir.path(), &keys(2), whole).unwrap();
        assert!(!slab.has(pack(1), 32) && slab.slots.lock().unwrap().used == 0);
        slab.keep(pack(1), 32, &plain(20, 1));
        assert!(slab.read(pack(1), 32, 0, &mut into) && into == plain(20, 1));
    }
}
