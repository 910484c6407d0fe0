//! Rows in RocksDB.
//!
//! Owns the database's options and the mapping of tables to column families. Does not own what the rows say (`state::rows`).
//! Everything in it can be rebuilt from the log, so writes are not synced: after a crash of the machine the log fills the gap.

use std::path::Path;
use std::sync::{Arc, Weak};

use rocksdb::checkpoint::Checkpoint;
use rocksdb::{
    BlockBasedOptions, Cache, ColumnFamily, ColumnFamilyDescriptor, DB, DBCompressionType, Direction, ErrorKind, IteratorMode, LiveFile,
    Options, ReadOptions, WriteBatch,
};

use crate::state::rows::{Rows, RowsError, Table, Visit, Write};

/// Memtables of all tables together, in bytes: with [`CACHE_BYTES`] the bound on RocksDB's memory.
pub const MEMTABLES_BYTES: usize = 24 * 1024 * 1024;
/// Block cache, in bytes.
pub const CACHE_BYTES: usize = 8 * 1024 * 1024;

/// A row: its key and its value.
pub type KeyValue = (Vec<u8>, Vec<u8>);

/// Rows in RocksDB. Cheap to clone.
#[derive(Clone)]
pub struct RocksRows {
    db: Arc<DB>,
}

impl std::fmt::Debug for RocksRows {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RocksRows").field("path", &self.db.path()).finish()
    }
}

impl RocksRows {
    /// Opens the database, and makes it when there is none. RocksDB itself looks only at some of its files when it opens; here all
    /// of them must be there, as long as they were written, so that a lost or cut one is found now and not by some later read.
    ///
    /// # Errors
    /// [`RowsError::Store`] when it can't be opened, [`RowsError::Broken`] when what lies there is damaged.
    pub fn open(path: &Path) -> Result<Self, RowsError> {
        let cache = Cache::new_lru_cache(CACHE_BYTES);
        let mut options = Options::default();
        options.create_if_missing(true);
        options.create_missing_column_families(true);
        options.set_db_write_buffer_size(MEMTABLES_BYTES);
        options.set_max_background_jobs(2);
        options.set_max_open_files(256);
        // A small log of its own: 10 MiB are plenty to explain a fault.
        options.set_max_log_file_size(5 * 1024 * 1024);
        options.set_keep_log_file_num(2);
        options.set_max_total_wal_size(64 * 1024 * 1024);
        let families = Table::ALL.map(|table| {
            let mut blocks = BlockBasedOptions::default();
            blocks.set_block_cache(&cache);
            blocks.set_cache_index_and_filter_blocks(true);
            let mut options = Options::default();
            options.set_block_based_table_factory(&blocks);
            options.set_compression_type(DBCompressionType::Lz4);
            options.set_write_buffer_size(MEMTABLES_BYTES / 3);
            ColumnFamilyDescriptor::new(table.name(), options)
        });
        let db = DB::open_cf_descriptors(&options, path, families).map_err(opening)?;
        match lost_files(&db)?.first() {
            None => Ok(Self { db: Arc::new(db) }),
            Some(lost) => Err(RowsError::Broken(lost.clone())),
        }
    }

    /// Makes a copy of the database as it is between two batches in the directory `to`, which must not be there and lies on the
    /// same disk: what is large is linked, not copied.
    ///
    /// # Errors
    /// [`RowsError`] when that fails.
    pub fn copy_to(&self, to: &Path) -> Result<(), RowsError> {
        Checkpoint::new(&self.db).and_then(|checkpoint| checkpoint.create_checkpoint(to)).map_err(store)
    }

    /// Opens a database that is there, to read it as it is now; somebody else may have it open.
    ///
    /// # Errors
    /// [`RowsError`] when it can't be opened.
    pub fn read_only(path: &Path) -> Result<Self, RowsError> {
        let db = DB::open_cf_for_read_only(&Options::default(), path, Table::ALL.map(Table::name), false).map_err(opening)?;
        Ok(Self { db: Arc::new(db) })
    }

    /// Every row, in order: for comparing.
    ///
    /// # Errors
    /// [`RowsError`] when the store fails.
    pub fn dump(&self) -> Result<Vec<(Table, KeyValue)>, RowsError> {
        let mut all = Vec::new();
        for table in Table::ALL {
            self.scan(table, b"", b"", &mut |key, value| {
                all.push((table, (key.to_vec(), value.to_vec())));
                true
            })?;
        }
        Ok(all)
    }

    /// Sees when nobody has it open any more.
    #[must_use]
    pub fn watch(&self) -> Watch {
        Watch(Arc::downgrade(&self.db))
    }

    /// Writes everything in memory to its files.
    ///
    /// # Errors
    /// [`RowsError::Store`] when that fails.
    pub fn flush(&self) -> Result<(), RowsError> {
        Table::ALL.iter().try_for_each(|table| self.db.flush_cf(self.family(*table)?).map_err(store))
    }

    /// Rows with keys below `before` (all of them, when it is `None`), from the last one back; `visit` returns false to stop.
    ///
    /// # Errors
    /// [`RowsError::Store`] when the store fails.
    pub fn scan_back(&self, table: Table, before: Option<&[u8]>, visit: Visit<'_>) -> Result<(), RowsError> {
        let mode = before.map_or(IteratorMode::End, |key| IteratorMode::From(key, Direction::Reverse));
        for row in self.db.iterator_cf(self.family(table)?, mode) {
            let (key, value) = row.map_err(store)?;
            if before.is_some_and(|before| &*key >= before) {
                continue;
            }
            if !visit(&key, &value) {
                break;
            }
        }
        Ok(())
    }

    /// The first row of each prefix, if there is one. One iterator serves all: far cheaper than as many scans.
    ///
    /// # Errors
    /// [`RowsError::Store`] when the store fails.
    pub fn first_of_each(&self, table: Table, prefixes: &[Vec<u8>]) -> Result<Vec<Option<KeyValue>>, RowsError> {
        let mut rows = self.db.raw_iterator_cf(self.family(table)?);
        let mut found = Vec::with_capacity(prefixes.len());
        for prefix in prefixes {
            rows.seek(prefix);
            rows.status().map_err(store)?;
            let row = rows.item().filter(|(key, _)| key.starts_with(prefix));
            found.push(row.map(|(key, value)| (key.to_vec(), value.to_vec())));
        }
        Ok(found)
    }

    fn family(&self, table: Table) -> Result<&ColumnFamily, RowsError> {
        self.db.cf_handle(table.name()).ok_or_else(|| RowsError::Store(format!("no table {}", table.name())))
    }
}

/// Sees when a database is closed.
#[derive(Clone)]
pub struct Watch(Weak<DB>);

impl std::fmt::Debug for Watch {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Watch").field("closed", &self.closed()).finish()
    }
}

impl Watch {
    /// Has everybody let go of it?
    #[must_use]
    pub fn closed(&self) -> bool {
        self.0.strong_count() == 0
    }
}

fn store(error: rocksdb::Error) -> RowsError {
    match error.kind() {
        ErrorKind::Corruption => RowsError::Broken(error.to_string()),
        _ => RowsError::Store(error.to_string()),
    }
}

/// What is wrong with the files of tables: one that isn't there, or has another size than the one written. They never change once
/// written.
fn lost_files(db: &DB) -> Result<Vec<String>, RowsError> {
    let look = || -> Result<Vec<String>, RowsError> {
        Ok(db.live_files().map_err(store)?.into_iter().filter_map(|file| lost_file(db.path(), &file)).collect())
    };
    let mut lost = look()?;
    if !lost.is_empty() {
        // A compaction that began with the opening may remove a file between the list and the look, but then it is no longer listed.
        let still = look()?;
        lost.retain(|file| still.contains(file));
    }
    Ok(lost)
}

fn lost_file(dir: &Path, file: &LiveFile) -> Option<String> {
    let path = dir.join(file.name.trim_start_matches('/'));
    match path.metadata() {
        Ok(found) if found.len() == file.size as u64 => None,
        Ok(found) => Some(format!("{} has {} bytes, not {}", path.display(), found.len(), file.size)),
        Err(error) => Some(format!("{}: {error}", path.display())),
    }
}

/// A file that is missing is damage, too; one that is locked, or that the disk has no room for, is not.
fn opening(error: rocksdb::Error) -> RowsError {
    let text = error.to_string();
    match error.kind() {
        ErrorKind::IOError if text.contains("No such file") || text.contains("file size mismatch") => RowsError::Broken(text),
        _ => store(error),
    }
}

/// The smallest key behind all that begin with `prefix`.
fn behind(prefix: &[u8]) -> Option<Vec<u8>> {
    let at = prefix.iter().rposition(|b| *b != u8::MAX)?;
    let mut end = prefix[..=at].to_vec();
    end[at] += 1;
    Some(end)
}

impl Rows for RocksRows {
    fn get(&self, table: Table, key: &[u8]) -> Result<Option<Vec<u8>>, RowsError> {
        self.db.get_cf(self.family(table)?, key).map_err(store)
    }

    fn scan(&self, table: Table, prefix: &[u8], from: &[u8], visit: Visit<'_>) -> Result<(), RowsError> {
        let mut options = ReadOptions::default();
        if let Some(end) = behind(prefix) {
            options.set_iterate_upper_bound(end);
        }
        let start = if from < prefix { prefix } else { from };
        for row in self.db.iterator_cf_opt(self.family(table)?, options, IteratorMode::From(start, Direction::Forward)) {
            let (key, value) = row.map_err(store)?;
            if !key.starts_with(prefix) || !visit(&key, &value) {
                break;
            }
        }
        Ok(())
    }

    fn write(&self, batch: Vec<Write>) -> Result<(), RowsError> {
        let mut writes = WriteBatch::default();
        for write in batch {
            match write {
                Write::Put(table, key, value) => writes.put_cf(self.family(table)?, key, value),
                Write::Delete(table, key) => writes.delete_cf(self.family(table)?, key),
                Write::DeletePrefix(table, prefix) => {
                    if let Some(end) = behind(&prefix) {
                        writes.delete_range_cf(self.family(table)?, prefix, end);
                    }
                }
            }
        }
        self.db.write(writes).map_err(store)
    }
}
