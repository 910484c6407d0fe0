//! What was read from S3 and may be wanted again: opened extents and map pages, in memory, shared by all volumes of the host.
//!
//! Owns a budget and what goes first. Nothing in it is needed: it is read again. An extent is named by its pack and place, so clones of a snapshot
//! find what the first of them read.

use std::collections::{HashMap, VecDeque};
use std::hash::Hash;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::format::content::MapRef;
use crate::format::extent::PackRef;
use crate::format::page::Page;

struct Entry<T> {
    value: Arc<T>,
    bytes: usize,
    /// Was it wanted since it was last looked at for removal?
    used: bool,
}

/// Values by key within a budget; what was not wanted for a whole round goes first.
struct Shelf<K, T> {
    entries: HashMap<K, Entry<T>>,
    round: VecDeque<K>,
    bytes: usize,
    bytes_max: usize,
}

impl<K: Eq + Hash + Copy, T> Shelf<K, T> {
    fn new(bytes_max: usize) -> Self {
        Self { entries: HashMap::new(), round: VecDeque::new(), bytes: 0, bytes_max }
    }

    fn get(&mut self, key: &K) -> Option<Arc<T>> {
        let entry = self.entries.get_mut(key)?;
        entry.used = true;
        Some(Arc::clone(&entry.value))
    }

    fn put(&mut self, key: K, value: Arc<T>, bytes: usize) {
        if bytes > self.bytes_max || self.entries.contains_key(&key) {
            return;
        }
        while self.bytes + bytes > self.bytes_max {
            let Some(oldest) = self.round.pop_front() else { break };
            match self.entries.get_mut(&oldest) {
                Some(entry) if entry.used => {
                    entry.used = false;
                    self.round.push_back(oldest);
                }
                _ => self.bytes -= self.entries.remove(&oldest).map_or(0, |entry| entry.bytes),
            }
        }
        self.bytes += bytes;
        self.entries.insert(key, Entry { value, bytes, used: false });
        self.round.push_back(key);
    }
}

/// The cache of a host.
pub struct Cache {
    extents: Mutex<Shelf<(PackRef, u32), Vec<u8>>>,
    pages: Mutex<Shelf<(MapRef, u32), Page>>,
}

impl Cache {
    /// `bytes_max`: of extents; pages may have a quarter of that beside them.
    #[must_use]
    pub fn new(bytes_max: usize) -> Self {
        Self { extents: Mutex::new(Shelf::new(bytes_max)), pages: Mutex::new(Shelf::new(bytes_max / 4)) }
    }

    /// An extent, by its pack and offset.
    #[must_use]
    pub fn extent(&self, pack: PackRef, offset: u32) -> Option<Arc<Vec<u8>>> {
        lock(&self.extents).get(&(pack, offset))
    }

    /// Keeps an extent.
    pub fn keep_extent(&self, pack: PackRef, offset: u32, plain: Arc<Vec<u8>>) {
        let bytes = plain.len();
        lock(&self.extents).put((pack, offset), plain, bytes);
    }

    /// A page, by its object and offset.
    #[must_use]
    pub fn page(&self, object: MapRef, offset: u32) -> Option<Arc<Page>> {
        lock(&self.pages).get(&(object, offset))
    }

    /// Keeps a page.
    pub fn keep_page(&self, object: MapRef, offset: u32, page: Arc<Page>) {
        let bytes = size_of_val(page.pointers.as_slice()) + size_of_val(page.packs.as_slice());
        lock(&self.pages).put((object, offset), page, bytes);
    }
}

fn lock<T>(shelf: &Mutex<T>) -> MutexGuard<'_, T> {
    shelf.lock().unwrap_or_else(PoisonError::into_inner)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_wanted_goes_first_and_the_budget_holds() {
        let mut shelf: Shelf<u32, u32> = Shelf::new(10);
        (0..10).for_each(|key| shelf.put(key, Arc::new(key), 1));
        assert_eq!(shelf.get(&0).as_deref(), Some(&0));
        (10..15).for_each(|key| shelf.put(key, Arc::new(key), 1));
        assert!(shelf.get(&0).is_some() && shelf.get(&1).is_none() && shelf.get(&14).is_some());
        shelf.put(99, Arc::new(99), 11);
        assert!(shelf.get(&99).is_none() && shelf.bytes <= 10 && shelf.entries.len() == shelf.round.len());
    }
}
