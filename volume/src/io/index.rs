//! The host's index, in RocksDB: what the cache file holds, and frames of maps and tables that were fetched.
//!
//! Owns the database's options, its directory, and that one process has it at a time. Rows are `format/cached.rs`'s.
//!
//! **Nothing in it is needed.** The bucket and the logs are the truth; whoever deletes the directory while the host is stopped has cold reads, and no other
//! loss. So writes are not synced: after a kill the kernel has them, after a power cut some are missing or old, and what they name does not open
//! then. A database that does not open is deleted, and begun anew.

use std::fs::File;
use std::path::Path;

use rocksdb::{
    BlockBasedOptions, Cache, ColumnFamily, ColumnFamilyDescriptor, DB, DBCompactionStyle, DBCompressionType, FifoCompactOptions,
    IteratorMode, Options,
};

use crate::format::cached::{Cached, ExtentKey, frame_key};
use crate::format::seal::WrappedKey;

/// Where the cache file has what.
const CACHE: &str = "cache";
/// The sessions' keys.
const KEYS: &str = "keys";
/// Frames of maps and tables.
const FRAMES: &str = "frames";
/// Bytes of frames that are kept: maps of some hundred GiB. The oldest go first.
const FRAMES_BYTES: u64 = 256 << 20;
/// A memtable, in bytes. Rows are small and few a second.
const MEMTABLE_BYTES: usize = 8 << 20;
/// Block cache, in bytes: what is read again lies in memory elsewhere.
const BLOCKS_BYTES: usize = 8 << 20;

/// The index of a host.
pub struct Index {
    db: DB,
    /// Keeps other processes of the host out.
    _lock: File,
}

/// What came of opening one.
pub enum Opened {
    /// It is ours.
    Ours(Index),
    /// Another process has it, and the cache file with it.
    Taken,
    /// There is none, for want of room or rights.
    Nothing,
}

impl Index {
    /// Opens the index in a directory, or begins one.
    #[must_use]
    pub fn open(dir: &Path) -> Opened {
        let failed = |error: &dyn std::fmt::Display| {
            tracing::warn!(path = %dir.display(), %error, "volumes begin with a cold cache at each start");
            Opened::Nothing
        };
        let lock = match std::fs::create_dir_all(dir.parent().unwrap_or(dir)).and_then(|()| File::create(dir.with_extension("lock"))) {
            Ok(lock) => lock,
            Err(error) => return failed(&error),
        };
        match lock.try_lock() {
            Ok(()) => {}
            Err(std::fs::TryLockError::WouldBlock) => return Opened::Taken,
            Err(std::fs::TryLockError::Error(error)) => return failed(&error),
        }
        let again = |error: rocksdb::Error| {
            tracing::warn!(path = %dir.display(), %error, "the index of cached blocks does not open, and is begun anew");
            if let Err(error) = std::fs::remove_dir_all(dir) {
                tracing::warn!(path = %dir.display(), %error, "can't be removed");
            }
            open(dir)
        };
        match open(dir).or_else(again) {
            Ok(db) => Opened::Ours(Self { db, _lock: lock }),
            Err(error) => failed(&error),
        }
    }

    fn family(&self, name: &str) -> Option<&ColumnFamily> {
        self.db.cf_handle(name)
    }

    fn put(&self, family: &str, key: &[u8], value: &[u8]) {
        if let Some(family) = self.family(family)
            && let Err(error) = self.db.put_cf(family, key, value)
        {
            tracing::debug!(%error, "the index of cached blocks takes nothing");
        }
    }

    fn delete(&self, family: &str, key: &[u8]) {
        if let Some(family) = self.family(family)
            && let Err(error) = self.db.delete_cf(family, key)
        {
            tracing::debug!(%error, "the index of cached blocks takes nothing");
        }
    }

    /// All rows of a table, those that can be read.
    fn rows(&self, family: &str) -> impl Iterator<Item = (Box<[u8]>, Box<[u8]>)> + '_ {
        let rows = self.family(family).map(|family| self.db.iterator_cf(family, IteratorMode::Start));
        rows.into_iter().flatten().map_while(Result::ok)
    }

    /// The keys of the sessions there were, by their numbers.
    #[must_use]
    pub fn sessions(&self) -> Vec<(u32, WrappedKey)> {
        let read = |(number, key): (Box<[u8]>, Box<[u8]>)| {
            Some((u32::from_be_bytes(number.as_ref().try_into().ok()?), minicbor::decode(&key).ok()?))
        };
        self.rows(KEYS).filter_map(read).collect()
    }

    /// Keeps the key of a session.
    pub fn keep_session(&self, number: u32, key: &WrappedKey) {
        if let Ok(key) = minicbor::to_vec(key) {
            self.put(KEYS, &number.to_be_bytes(), &key);
        }
    }

    /// Forgets a session of which nothing is left.
    pub fn forget_session(&self, number: u32) {
        self.delete(KEYS, &number.to_be_bytes());
    }

    /// What the cache file should hold.
    pub fn cached(&self, slots_max: u32) -> impl Iterator<Item = (ExtentKey, Cached)> + '_ {
        self.rows(CACHE).filter_map(move |(key, value)| Cached::read(&key, &value, slots_max))
    }

    /// Keeps where an extent is.
    pub fn keep(&self, key: &ExtentKey, cached: &Cached) {
        if let Some((key, value)) = Cached::write(key, cached) {
            self.put(CACHE, &key, &value);
        }
    }

    /// Forgets an extent.
    pub fn forget(&self, key: &ExtentKey) {
        if let Ok(key) = minicbor::to_vec(key) {
            self.delete(CACHE, &key);
        }
    }

    /// A frame, sealed, as it was fetched.
    #[must_use]
    pub fn frame(&self, object: &str, offset: u32) -> Option<Vec<u8>> {
        self.db.get_cf(self.family(FRAMES)?, frame_key(object, offset)).ok().flatten()
    }

    /// Keeps a frame.
    pub fn keep_frame(&self, object: &str, offset: u32, bytes: &[u8]) {
        self.put(FRAMES, &frame_key(object, offset), bytes);
    }
}

fn open(dir: &Path) -> Result<DB, rocksdb::Error> {
    let mut options = Options::default();
    options.create_if_missing(true);
    options.create_missing_column_families(true);
    options.set_max_background_jobs(2);
    // What goes by age wants all its files open; they are some dozen.
    options.set_max_open_files(-1);
    options.set_max_log_file_size(1 << 20);
    options.set_keep_log_file_num(2);
    options.set_max_total_wal_size(4 * MEMTABLE_BYTES as u64);
    let cache = Cache::new_lru_cache(BLOCKS_BYTES);
    let family = |name: &str| {
        let mut blocks = BlockBasedOptions::default();
        blocks.set_block_cache(&cache);
        blocks.set_bloom_filter(10.0, false);
        let mut options = Options::default();
        options.set_block_based_table_factory(&blocks);
        // Sealed bytes and tags do not shrink.
        options.set_compression_type(DBCompressionType::None);
        options.set_write_buffer_size(MEMTABLE_BYTES);
        if name == FRAMES {
            let mut oldest_first = FifoCompactOptions::default();
            oldest_first.set_max_table_files_size(FRAMES_BYTES);
            options.set_compaction_style(DBCompactionStyle::Fifo);
            options.set_fifo_compaction_options(&oldest_first);
        }
        ColumnFamilyDescriptor::new(name, options)
    };
    let db = DB::open_cf_descriptors(&options, dir, [CACHE, KEYS, FRAMES].map(family))?;
    // RocksDB finds damage when it reads. All of these rows are read now, or those behind a damaged one would be missing at each start.
    for family in [CACHE, KEYS].into_iter().filter_map(|name| db.cf_handle(name)) {
        db.iterator_cf(family, IteratorMode::Start).try_for_each(|row| row.map(drop))?;
    }
    Ok(db)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_process_has_it_and_a_damaged_one_is_begun_anew() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("index");
        let Opened::Ours(index) = Index::open(&path) else { panic!("a new one") };
        index.keep_frame("map/x", 5, b"frame");
        assert!(matches!(Index::open(&path), Opened::Taken));
        drop(index);
        let Opened::Ours(index) = Index::open(&path) else { panic!("the same") };
        assert_eq!((index.frame("map/x", 5).as_deref(), index.frame("map/x", 6)), (Some(&b"frame"[..]), None));
        drop(index);
        std::fs::write(path.join("CURRENT"), "nonsense").unwrap();
        let Opened::Ours(index) = Index::open(&path) else { panic!("a new one instead") };
        assert_eq!(index.frame("map/x", 5), None);
    }
}
