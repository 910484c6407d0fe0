//! Rows: how the state lies in RocksDB, and how it is put together again.
//!
//! Owns keys, encodings, what a batch of effects writes, and loading. Behind the port [`Rows`], so that the simulation can
//! keep them in a map. Does not own RocksDB (`io/rocks.rs`).
//!
//! | table | key | value |
//! |---|---|---|
//! | `Meta` | `head`, `tenant/<name>`, `token/<id>` | `Head`, `Tenant`, `Token` |
//! | `Facts` | job (u64 big-endian) | `Facts` |
//! | `Jobs` | job | `Progress` |
//! | `Pages` | job, page (u32 big-endian) | `Page` |
//! | `Workers` | name | `Worker` with its bundles |
//! | `Keys` | tenant, 0, key | `Key` |
//! | `Uploads` | tenant, 0, id | `Upload` |
//! | `Volumes` | tenant, 0, name | `Volume` |
//! | `Attempts` | job, index, number (u16), sequence (u64) | `AttemptRow` |
//! | `Results` | job, log sequence, place (u32) | `ResultEntry` |

use std::collections::BTreeMap;

use volley_jobspecs::ids::{AttemptName, JobId, TenantId, WorkerId};

use super::effects::{AttemptRow, Effects, ResultEntry};
use super::job::{Facts, Job, OpenAttempt, Progress};
use super::task::Page;
use super::worker::Worker;
use super::{Head, Key, State, Tenant, Timer, Token, Upload, count_bundles};

/// What tokens' keys in `Meta` begin with.
const TOKEN_PREFIX: &[u8] = b"token/";

/// A table of rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Table {
    /// Small things, among them the head.
    Meta,
    /// What never changes of a job.
    Facts,
    /// What changes of a job.
    Jobs,
    /// Tasks.
    Pages,
    /// Workers.
    Workers,
    /// Idempotency keys.
    Keys,
    /// Uploads.
    Uploads,
    /// Volumes.
    Volumes,
    /// Ends of attempts.
    Attempts,
    /// Ends of tasks, in the order they came.
    Results,
}

impl Table {
    /// Every table.
    pub const ALL: [Self; 10] = [
        Self::Meta,
        Self::Facts,
        Self::Jobs,
        Self::Pages,
        Self::Workers,
        Self::Keys,
        Self::Uploads,
        Self::Volumes,
        Self::Attempts,
        Self::Results,
    ];

    /// Its name in RocksDB.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::Meta => "meta",
            Self::Facts => "facts",
            Self::Jobs => "jobs",
            Self::Pages => "pages",
            Self::Workers => "workers",
            Self::Keys => "keys",
            Self::Uploads => "uploads",
            Self::Volumes => "volumes",
            Self::Attempts => "attempts",
            Self::Results => "results",
        }
    }
}

/// One change of a batch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Write {
    /// Set a row.
    Put(Table, Vec<u8>, Vec<u8>),
    /// Delete a row.
    Delete(Table, Vec<u8>),
    /// Delete every row whose key begins with this.
    DeletePrefix(Table, Vec<u8>),
}

/// Why rows could not be read or written.
#[derive(Debug, thiserror::Error)]
pub enum RowsError {
    /// The store failed.
    #[error("the coordinator's RocksDB failed: {0}; is its disk full? free space and restart")]
    Store(String),
    /// The database itself is damaged.
    #[error("the coordinator's RocksDB is damaged: {0}; delete its directory: it is rebuilt from checkpoint and log")]
    Broken(String),
    /// A row is no row.
    #[error(
        "row {key} of table {table} is damaged ({what}); stop the coordinator and delete its RocksDB directory: it is rebuilt from the log"
    )]
    Damaged {
        /// Which table.
        table: &'static str,
        /// The key, in hex.
        key: String,
        /// What is wrong.
        what: String,
    },
}

impl RowsError {
    /// Is it the content that is bad, so that building it again helps?
    #[must_use]
    pub fn is_damage(&self) -> bool {
        match self {
            Self::Broken(_) | Self::Damaged { .. } => true,
            Self::Store(_) => false,
        }
    }
}

/// Rows called back in key order; return false to stop.
pub type Visit<'a> = &'a mut dyn FnMut(&[u8], &[u8]) -> bool;

/// Where rows lie.
pub trait Rows {
    /// One row.
    ///
    /// # Errors
    /// [`RowsError::Store`] when the store fails.
    fn get(&self, table: Table, key: &[u8]) -> Result<Option<Vec<u8>>, RowsError>;
    /// Rows from `from` (inclusive) whose keys begin with `prefix`, in key order.
    ///
    /// # Errors
    /// [`RowsError::Store`] when the store fails.
    fn scan(&self, table: Table, prefix: &[u8], from: &[u8], visit: Visit<'_>) -> Result<(), RowsError>;
    /// All of it or nothing.
    ///
    /// # Errors
    /// [`RowsError::Store`] when the store fails; then nothing was written.
    fn write(&self, batch: Vec<Write>) -> Result<(), RowsError>;
}

/// Encodes a row.
#[must_use]
pub fn encode<T: minicbor::Encode<()>>(value: &T) -> Vec<u8> {
    volley_jobspecs::wire::encode(value)
}

fn decode<'b, T: minicbor::Decode<'b, ()>>(table: Table, key: &[u8], bytes: &'b [u8]) -> Result<T, RowsError> {
    volley_jobspecs::wire::decode(table.name(), bytes).map_err(|e| damaged(table, key, &e))
}

fn damaged(table: Table, key: &[u8], what: &dyn std::fmt::Display) -> RowsError {
    RowsError::Damaged { table: table.name(), key: hex::encode(key), what: what.to_string() }
}

/// Key of a job's row.
#[must_use]
pub fn job_key(job: JobId) -> Vec<u8> {
    job.0.to_be_bytes().to_vec()
}

fn page_key(job: JobId, page: u32) -> Vec<u8> {
    [job_key(job), page.to_be_bytes().to_vec()].concat()
}

/// Key of an attempt's row; with fewer parts, a prefix of it.
#[must_use]
pub fn attempt_key(name: &AttemptName) -> Vec<u8> {
    let mut key = task_key(name.job, name.index);
    key.extend_from_slice(&(name.number as u16).to_be_bytes());
    key.extend_from_slice(&name.sequence.to_be_bytes());
    key
}

/// Prefix of a task's attempts.
#[must_use]
pub fn task_key(job: JobId, index: u32) -> Vec<u8> {
    [job_key(job), index.to_be_bytes().to_vec()].concat()
}

/// Prefix of one try of a task; there is at most one row of it.
#[must_use]
pub fn try_key(job: JobId, index: u32, number: u16) -> Vec<u8> {
    [task_key(job, index), number.to_be_bytes().to_vec()].concat()
}

/// Key of a result: (job, sequence, place).
#[must_use]
pub fn result_key(job: JobId, sequence: u64, place: u32) -> Vec<u8> {
    [job_key(job), sequence.to_be_bytes().to_vec(), place.to_be_bytes().to_vec()].concat()
}

fn idempotency_key(tenant: &TenantId, key: &str) -> Vec<u8> {
    [tenant.as_str().as_bytes(), &[0], key.as_bytes()].concat()
}

/// Key of a token's row in `Meta`.
#[must_use]
pub fn token_key(id: &str) -> Vec<u8> {
    [TOKEN_PREFIX, id.as_bytes()].concat()
}

/// The writes that bring the rows to where the state is.
#[must_use]
pub fn batch(state: &State, effects: &Effects) -> Vec<Write> {
    let mut writes = vec![Write::Put(Table::Meta, b"head".to_vec(), encode(&state.head))];
    for id in &effects.new_jobs {
        if let Some(job) = state.jobs.get(id).or_else(|| effects.evicted.iter().find(|job| job.id == *id)) {
            writes.push(Write::Put(Table::Facts, job_key(*id), encode(&job.facts)));
        }
    }
    let live = effects.jobs.iter().filter_map(|id| state.jobs.get(id));
    for job in live.chain(effects.evicted.iter().filter(|job| !state.jobs.contains_key(&job.id))) {
        writes.push(Write::Put(Table::Jobs, job_key(job.id), encode(&job.progress)));
    }
    for (id, number) in &effects.pages {
        let live = state.jobs.get(id).or_else(|| effects.evicted.iter().rev().find(|job| job.id == *id));
        if let Some(page) = live.and_then(|job| job.pages.get(number)) {
            writes.push(Write::Put(Table::Pages, page_key(*id, *number), page.to_bytes()));
        }
    }
    for (id, number, page) in &effects.settled {
        if state.jobs.get(id).is_none_or(|job| !job.pages.contains_key(number)) {
            writes.push(Write::Put(Table::Pages, page_key(*id, *number), page.to_bytes()));
        }
    }
    table(&mut writes, Table::Workers, effects.workers.iter().map(|n| (n.as_str().as_bytes().to_vec(), state.workers.get(n))));
    table(&mut writes, Table::Meta, effects.tenants.iter().map(|n| (format!("tenant/{n}").into_bytes(), state.tenants.get(n))));
    table(&mut writes, Table::Meta, effects.tokens.iter().map(|n| (token_key(n), state.tokens.get(n))));
    table(&mut writes, Table::Keys, effects.keys.iter().map(|(t, k)| (idempotency_key(t, k), state.keys.get(&(t.clone(), k.clone())))));
    table(
        &mut writes,
        Table::Uploads,
        effects.uploads.iter().map(|(t, k)| (idempotency_key(t, k), state.uploads.get(&(t.clone(), k.clone())))),
    );
    let volumes = effects.volumes.iter().map(|(t, k)| (idempotency_key(t, k), state.volumes.get(&(t.clone(), k.clone()))));
    table(&mut writes, Table::Volumes, volumes);
    for (name, row) in &effects.attempts {
        writes.push(Write::Put(Table::Attempts, attempt_key(name), encode(row)));
    }
    for (job, sequence, place, entry) in &effects.results {
        writes.push(Write::Put(Table::Results, result_key(*job, *sequence, *place), encode(entry)));
    }
    for job in &effects.forgotten {
        let tables = [Table::Facts, Table::Jobs, Table::Pages, Table::Attempts, Table::Results];
        writes.extend(tables.map(|table| Write::DeletePrefix(table, job_key(*job))));
    }
    writes
}

fn table<'a, T: minicbor::Encode<()> + 'a>(writes: &mut Vec<Write>, table: Table, rows: impl Iterator<Item = (Vec<u8>, Option<&'a T>)>) {
    writes.extend(rows.map(|(key, value)| match value {
        Some(value) => Write::Put(table, key, encode(value)),
        None => Write::Delete(table, key),
    }));
}

/// The head alone: where the rows stand.
///
/// # Errors
/// [`RowsError`] when the store fails or the row is damaged.
pub fn load_head(rows: &dyn Rows) -> Result<Option<Head>, RowsError> {
    let row = rows.get(Table::Meta, b"head")?;
    row.map(|bytes| decode(Table::Meta, b"head", &bytes)).transpose()
}

/// Puts the state together from its rows.
///
/// # Errors
/// [`RowsError`] when the store fails or a row is damaged.
pub fn load(rows: &dyn Rows) -> Result<State, RowsError> {
    let Some(head) = load_head(rows)? else { return Ok(State::default()) };
    let mut state = State { head, ..State::default() };
    for (key, bytes) in all(rows, Table::Meta, b"tenant/")? {
        let tenant: Tenant = decode(Table::Meta, &key, &bytes)?;
        state.tenants.insert(name(Table::Meta, &key, &key[b"tenant/".len()..])?, tenant);
    }
    for (key, bytes) in all(rows, Table::Meta, TOKEN_PREFIX)? {
        let token: Token = decode(Table::Meta, &key, &bytes)?;
        state.tokens.insert(String::from_utf8_lossy(&key[TOKEN_PREFIX.len()..]).into_owned(), token);
    }
    for (key, bytes) in all(rows, Table::Keys, b"")? {
        let entry: Key = decode(Table::Keys, &key, &bytes)?;
        let (tenant, text) = tenant_and_text(Table::Keys, &key)?;
        state.timers.insert((entry.until_ms, Timer::Key(tenant.clone(), text.clone())));
        state.keys.insert((tenant, text), entry);
    }
    for (key, bytes) in all(rows, Table::Uploads, b"")? {
        let upload: Upload = decode(Table::Uploads, &key, &bytes)?;
        let (tenant, id) = tenant_and_text(Table::Uploads, &key)?;
        state.timers.extend(crate::uploads::timer(&tenant, &id, &upload));
        state.uploads.insert((tenant, id), upload);
    }
    for (key, bytes) in all(rows, Table::Volumes, b"")? {
        let volume = decode(Table::Volumes, &key, &bytes)?;
        state.volumes.insert(tenant_and_text(Table::Volumes, &key)?, volume);
    }
    for (key, bytes) in all(rows, Table::Workers, b"")? {
        let worker: Worker = decode(Table::Workers, &key, &bytes)?;
        state.workers.insert(name::<WorkerId>(Table::Workers, &key, &key)?, worker);
    }
    for (key, bytes) in all(rows, Table::Jobs, b"")? {
        let progress: Progress = decode(Table::Jobs, &key, &bytes)?;
        let id = key.first_chunk::<8>().map(|k| JobId(u64::from_be_bytes(*k)));
        let id = id.ok_or_else(|| damaged(Table::Jobs, &key, &"short key"))?;
        let stays = stays_in_memory(&state, id, &progress);
        match stays {
            true => _ = load_job(&mut state, rows, id, false)?,
            false => retention_timers(&mut state, id, &progress, rows)?,
        }
    }
    Ok(state)
}

fn tenant_and_text(table: Table, key: &[u8]) -> Result<(TenantId, String), RowsError> {
    let at = key.iter().position(|b| *b == 0).ok_or_else(|| damaged(table, key, &"no tenant"))?;
    Ok((name(table, key, &key[..at])?, String::from_utf8_lossy(&key[at + 1..]).into_owned()))
}

fn retention_timers(state: &mut State, id: JobId, progress: &Progress, rows: &dyn Rows) -> Result<(), RowsError> {
    let key = job_key(id);
    let Some(bytes) = rows.get(Table::Facts, &key)? else { return Ok(()) };
    let facts: Facts = decode(Table::Facts, &key, &bytes)?;
    state.timers.extend(crate::finish::retention_timers(id, &facts, progress, &state.head));
    Ok(())
}

/// A job is in memory until it has ended, holds no slot and nothing trails it.
fn stays_in_memory(state: &State, id: JobId, progress: &Progress) -> bool {
    progress.ended_ms.is_none() || !progress.trailing.is_empty() || state.workers.values().any(|w| w.bundles.values().any(|b| b.job == id))
}

/// Brings a job into memory; with `settled`, also the pages that hold nothing but settled tasks. Does nothing when it is there
/// already. Returns whether there is such a job.
///
/// # Errors
/// [`RowsError`] when the store fails or a row is damaged.
pub fn load_job(state: &mut State, rows: &dyn Rows, id: JobId, settled: bool) -> Result<bool, RowsError> {
    let key = job_key(id);
    let mut job = match state.jobs.remove(&id) {
        Some(job) => {
            count_bundles(&mut state.tenant_bundles, &job.facts.tenant, job.bundles, false);
            job
        }
        None => {
            let (Some(facts), Some(progress)) = (rows.get(Table::Facts, &key)?, rows.get(Table::Jobs, &key)?) else { return Ok(false) };
            let mut job = Job::new(id, decode(Table::Facts, &key, &facts)?);
            job.progress = decode(Table::Jobs, &key, &progress)?;
            job
        }
    };
    for (key, bytes) in all(rows, Table::Pages, &key)? {
        let number = key.get(8..12).and_then(|k| k.try_into().ok()).map(u32::from_be_bytes);
        let number = number.ok_or_else(|| damaged(Table::Pages, &key, &"short key"))?;
        if job.pages.contains_key(&number) {
            continue;
        }
        let page = Page::from_bytes(&bytes).map_err(|e| damaged(Table::Pages, &key, &e))?;
        if settled || !page.settled() {
            job.pages.insert(number, page);
        }
    }
    job.rebuild_ready();
    rebuild_open(state, &mut job);
    count_bundles(&mut state.tenant_bundles, &job.facts.tenant, job.bundles, true);
    state.timers.extend(crate::timers::of_job(&job, &state.head));
    state.jobs.insert(id, job);
    Ok(true)
}

/// Which attempts hold slots follows from the bundles and the pages: of the bundles that name a held task, the youngest has it.
fn rebuild_open(state: &State, job: &mut Job) {
    job.open.clear();
    job.bundles = 0;
    let mut bundles = BTreeMap::new();
    for worker in state.workers.values() {
        bundles.extend(worker.bundles.iter().filter(|(_, b)| b.job == job.id));
    }
    for (id, bundle) in bundles {
        job.bundles += 1;
        for index in bundle.indices() {
            if let Some(cell) = job.cell(index).filter(|cell| cell.held) {
                job.open.insert(index, OpenAttempt { bundle: *id, number: cell.number });
            }
        }
    }
}

/// One attempt.
///
/// # Errors
/// [`RowsError`] when the store fails or the row is damaged.
pub fn attempts(rows: &dyn Rows, job: JobId, index: u32) -> Result<Vec<(u64, AttemptRow)>, RowsError> {
    let mut found = Vec::new();
    for (key, bytes) in all(rows, Table::Attempts, &task_key(job, index))? {
        let sequence = key.get(14..22).and_then(|k| k.try_into().ok()).map_or(0, u64::from_be_bytes);
        found.push((sequence, decode(Table::Attempts, &key, &bytes)?));
    }
    Ok(found)
}

/// Reads a stored result entry.
///
/// # Errors
/// [`RowsError::Damaged`] when it is none.
pub fn result_entry(key: &[u8], bytes: &[u8]) -> Result<ResultEntry, RowsError> {
    decode(Table::Results, key, bytes)
}

/// Reads stored facts of a job.
///
/// # Errors
/// [`RowsError::Damaged`] when they are none.
pub fn facts_of(key: &[u8], bytes: &[u8]) -> Result<Facts, RowsError> {
    decode(Table::Facts, key, bytes)
}

/// A job's header rows, whether it is in memory or not.
///
/// # Errors
/// [`RowsError`] when the store fails or a row is damaged.
pub fn header(rows: &dyn Rows, id: JobId) -> Result<Option<(Facts, Progress)>, RowsError> {
    let key = job_key(id);
    let (Some(facts), Some(progress)) = (rows.get(Table::Facts, &key)?, rows.get(Table::Jobs, &key)?) else { return Ok(None) };
    Ok(Some((decode(Table::Facts, &key, &facts)?, decode(Table::Jobs, &key, &progress)?)))
}

/// What changes of a job, whether it is in memory or not.
///
/// # Errors
/// [`RowsError`] when the store fails or the row is damaged.
pub fn progress(rows: &dyn Rows, id: JobId) -> Result<Option<Progress>, RowsError> {
    let key = job_key(id);
    let row = rows.get(Table::Jobs, &key)?;
    row.map(|bytes| decode(Table::Jobs, &key, &bytes)).transpose()
}

/// What never changes of a job.
///
/// # Errors
/// [`RowsError`] when the store fails or the row is damaged.
pub fn facts(rows: &dyn Rows, id: JobId) -> Result<Option<Facts>, RowsError> {
    let key = job_key(id);
    let row = rows.get(Table::Facts, &key)?;
    row.map(|bytes| decode(Table::Facts, &key, &bytes)).transpose()
}

/// A stored page of tasks.
///
/// # Errors
/// [`RowsError`] when the store fails or the row is damaged.
pub fn page(rows: &dyn Rows, id: JobId, number: u32) -> Result<Option<Page>, RowsError> {
    let key = page_key(id, number);
    let row = rows.get(Table::Pages, &key)?;
    row.map(|bytes| Page::from_bytes(&bytes).map_err(|e| damaged(Table::Pages, &key, &e))).transpose()
}

fn all(rows: &dyn Rows, table: Table, prefix: &[u8]) -> Result<Vec<(Vec<u8>, Vec<u8>)>, RowsError> {
    let mut found = Vec::new();
    rows.scan(table, prefix, prefix, &mut |key, value| {
        found.push((key.to_vec(), value.to_vec()));
        true
    })?;
    Ok(found)
}

fn name<T: std::str::FromStr>(table: Table, key: &[u8], text: &[u8]) -> Result<T, RowsError> {
    let text = std::str::from_utf8(text).ok().and_then(|text| text.parse().ok());
    text.ok_or_else(|| damaged(table, key, &"bad name"))
}

/// Rows in a map: for tests and the simulation.
#[derive(Debug, Default)]
pub struct MapRows {
    rows: std::cell::RefCell<BTreeMap<(Table, Vec<u8>), Vec<u8>>>,
}

impl MapRows {
    /// Everything in it, in order.
    #[must_use]
    pub fn dump(&self) -> BTreeMap<(Table, Vec<u8>), Vec<u8>> {
        self.rows.borrow().clone()
    }
}

impl Rows for MapRows {
    fn get(&self, table: Table, key: &[u8]) -> Result<Option<Vec<u8>>, RowsError> {
        Ok(self.rows.borrow().get(&(table, key.to_vec())).cloned())
    }

    fn scan(&self, table: Table, prefix: &[u8], from: &[u8], visit: Visit<'_>) -> Result<(), RowsError> {
        let start = if from < prefix { prefix } else { from };
        for ((_, key), value) in
            self.rows.borrow().range((table, start.to_vec())..).take_while(|((t, k), _)| *t == table && k.starts_with(prefix))
        {
            if !visit(key, value) {
                break;
            }
        }
        Ok(())
    }

    fn write(&self, batch: Vec<Write>) -> Result<(), RowsError> {
        let mut rows = self.rows.borrow_mut();
        for write in batch {
            match write {
                Write::Put(table, key, value) => _ = rows.insert((table, key), value),
                Write::Delete(table, key) => _ = rows.remove(&(table, key)),
                Write::DeletePrefix(table, prefix) => rows.retain(|(t, key), _| *t != table || !key.starts_with(&prefix)),
            }
        }
        Ok(())
    }
}
