//! The cache on the host's disk: opened extents in one file of slots, each block sealed by itself.
//!
//! Owns slots, what goes first, and that nothing wrong is ever read from it. What is in it is in S3 too: every error is a miss. It never takes room
//! from writes: what can't be written is not kept.
//!
//! The key is drawn at each start and kept in memory only, with the index: after a restart the file means nothing, and is begun anew. Nonces count over
//! all blocks that are ever written. A slot that was given to another extent while somebody reads from it does not open: that is a miss as well.

use std::collections::{HashMap, VecDeque};
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::Mutex;

use crate::format::BLOCK_BYTES;
use crate::format::extent::PackRef;
use crate::format::seal::{FamilyKey, Kind, ObjectKey, TAG_BYTES};
use crate::host::{lock, random};

/// Bytes of a slot: the extents that are written have that size.
const SLOT_BYTES: usize = 64 << 10;
const SLOT_BLOCKS: usize = SLOT_BYTES / BLOCK_BYTES;

/// An extent's name: its pack and its offset in it.
type Key = (PackRef, u32);

#[derive(Clone)]
struct Entry {
    slots: Vec<u32>,
    tags: Vec<[u8; TAG_BYTES]>,
    /// Index of the first block's nonce; the others' follow.
    first: u64,
    /// Was it wanted since it was last looked at for removal?
    used: bool,
}

#[derive(Default)]
struct Index {
    entries: HashMap<Key, Entry>,
    round: VecDeque<Key>,
    free: Vec<u32>,
    /// Slots that were ever used.
    slots: u32,
    next: u64,
}

/// The cache file.
pub struct Slab {
    file: File,
    key: ObjectKey,
    slots_max: u32,
    index: Mutex<Index>,
}

impl Slab {
    /// Begins one of at most `bytes_max`. None: that is less than one place, or the disk does not let us; there is no cache then.
    #[must_use]
    pub fn new(path: &Path, bytes_max: u64) -> Option<Self> {
        use std::os::unix::fs::OpenOptionsExt;
        let slots_max = u32::try_from(bytes_max / SLOT_BYTES as u64).unwrap_or(u32::MAX);
        if slots_max == 0 {
            return None;
        }
        let file = File::options().read(true).write(true).create(true).truncate(true).mode(0o600).open(path);
        let file = file.inspect_err(|error| tracing::warn!(path = %path.display(), %error, "volumes have no cache on the disk")).ok()?;
        let key = FamilyKey::new(random().ok()?).object("cache", &random().ok()?).ok()?;
        Some(Self { file, key, slots_max, index: Mutex::default() })
    }

    /// Is an extent there?
    #[must_use]
    pub fn has(&self, pack: PackRef, offset: u32) -> bool {
        lock(&self.index).entries.contains_key(&(pack, offset))
    }

    /// Reads whole blocks of an extent, from its block `skip` on; tells whether they were there.
    #[must_use]
    pub fn read(&self, pack: PackRef, offset: u32, skip: usize, into: &mut [u8]) -> bool {
        let key = (pack, offset);
        let entry = {
            let mut index = lock(&self.index);
            let Some(entry) = index.entries.get_mut(&key) else { return false };
            entry.used = true;
            entry.clone()
        };
        let good = self.read_entry(&entry, skip, into);
        if !good {
            // Damaged, or another's by now.
            let mut index = lock(&self.index);
            if index.entries.get(&key).is_some_and(|now| now.first == entry.first) {
                index.remove(&key);
            }
        }
        good
    }

    fn read_entry(&self, entry: &Entry, skip: usize, into: &mut [u8]) -> bool {
        let (mut at, mut rest) = (skip, into);
        while !rest.is_empty() {
            // As much as lies in one slot.
            let inside = at % SLOT_BLOCKS;
            let len = rest.len().min((SLOT_BLOCKS - inside) * BLOCK_BYTES);
            let (part, behind) = std::mem::take(&mut rest).split_at_mut(len);
            let Some(slot) = entry.slots.get(at / SLOT_BLOCKS) else { return false };
            let place = u64::from(*slot) * SLOT_BYTES as u64 + (inside * BLOCK_BYTES) as u64;
            if self.file.read_exact_at(part, place).is_err() {
                return false;
            }
            for block in part.chunks_exact_mut(BLOCK_BYTES) {
                let index = entry.first + at as u64;
                let opened = entry.tags.get(at).map(|tag| self.key.open("a cached block", Kind::CacheBlock, index, &[], block, tag));
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
        let wanted = blocks.div_ceil(SLOT_BLOCKS);
        let (slots, first) = {
            let mut index = lock(&self.index);
            if index.entries.contains_key(&key) {
                return;
            }
            let Some(slots) = index.take(wanted, self.slots_max) else { return };
            let first = index.next;
            index.next += blocks as u64;
            (slots, first)
        };
        let mut sealed = plain.to_vec();
        let blocks = sealed.chunks_exact_mut(BLOCK_BYTES);
        let tags: Result<Vec<_>, _> =
            (first..).zip(blocks).map(|(index, block)| self.key.seal(Kind::CacheBlock, index, &[], block)).collect();
        let mut parts = slots.iter().zip(sealed.chunks(SLOT_BYTES));
        let written = parts.all(|(slot, part)| self.file.write_all_at(part, u64::from(*slot) * SLOT_BYTES as u64).is_ok());
        let mut index = lock(&self.index);
        match tags {
            Ok(tags) if written && !index.entries.contains_key(&key) => {
                index.entries.insert(key, Entry { slots, tags, first, used: false });
                index.round.push_back(key);
            }
            _ => index.free.extend(slots),
        }
    }
}

impl Index {
    fn remove(&mut self, key: &Key) {
        if let Some(entry) = self.entries.remove(key) {
            self.free.extend(entry.slots);
        }
    }

    /// Slots for an extent: free ones, new ones, or those of what was not wanted for a whole round.
    fn take(&mut self, wanted: usize, slots_max: u32) -> Option<Vec<u32>> {
        let mut slots = Vec::with_capacity(wanted);
        while slots.len() < wanted {
            if let Some(slot) = self.free.pop() {
                slots.push(slot);
            } else if self.slots < slots_max {
                slots.push(self.slots);
                self.slots += 1;
            } else {
                let Some(oldest) = self.round.pop_front() else {
                    self.free.extend(slots);
                    return None;
                };
                match self.entries.get_mut(&oldest) {
                    Some(entry) if entry.used => {
                        entry.used = false;
                        self.round.push_back(oldest);
                    }
                    _ => self.remove(&oldest),
                }
            }
        }
        Some(slots)
    }
}

#[cfg(test)]
mod tests {
    use volley_jobspecs::ids::VolumeId;

    use super::*;

    fn pack(n: u32) -> PackRef {
        PackRef { volume: VolumeId([1; 16]), epoch: 1, seq: 1, n, salt: [0; 16] }
    }

    fn plain(blocks: usize, seed: u8) -> Vec<u8> {
        (0..blocks).flat_map(|block| vec![seed ^ block as u8; BLOCK_BYTES]).collect()
    }

    #[test]
    fn extents_of_all_sizes_come_back_block_by_block_within_the_budget() {
        let dir = tempfile::tempdir().unwrap();
        let slab = Slab::new(&dir.path().join("slab"), 64 * SLOT_BYTES as u64).unwrap();
        let blocks = |n: u32| 1 + (n as usize * 7) % 64;
        let mut into = vec![0; 64 * BLOCK_BYTES];
        for n in 0..200u32 {
            slab.keep(pack(n), 32, &plain(blocks(n), n as u8));
            // Wanted all the time: it stays.
            assert!(slab.read(pack(0), 32, 0, &mut into[..BLOCK_BYTES]), "{n}");
        }
        assert!(std::fs::metadata(dir.path().join("slab")).unwrap().len() <= 64 * SLOT_BYTES as u64);
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
        let slab = Slab::new(&dir.path().join("slab"), 1 << 20).unwrap();
        slab.keep(pack(1), 32, &plain(16, 5));
        let mut byte = [0];
        slab.file.read_exact_at(&mut byte, 5_000).unwrap();
        slab.file.write_all_at(&[byte[0] ^ 1], 5_000).unwrap();
        let mut into = vec![0; BLOCK_BYTES];
        assert!(slab.read(pack(1), 32, 0, &mut into) && into == plain(1, 5));
        assert!(!slab.read(pack(1), 32, 1, &mut into));
        assert!(!slab.has(pack(1), 32), "it is fetched again");
    }
}
