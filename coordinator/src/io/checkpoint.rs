//! Checkpoints in the bucket, and what else the leader keeps in order beside its rounds: the log's length, old files, uploads, the level.
//!
//! Owns copying the database, storing what is new of it, and the deletions. All is asked of the state again every few seconds, safe to
//! repeat, and harmless if two coordinators do it. Does not own when and what (`checkpoint`), or loading one (`io/restore.rs`).

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::time::Duration;

use bytes::Bytes;
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use volley_jobspecs::ids::TenantId;
use volley_jobspecs::keys;
use volley_jobspecs::wire::record::Decision;
use volley_jobspecs::wire::{LEVEL, LEVEL_KEEPING};
use volley_store::{DeleteError, GetError, LIST_LIMIT_MAX, ListError, PutError, Store, UploadError, UploadOptions};

use super::levels::Levels;
use super::log::LogError;
use super::rocks::RocksRows;
use crate::checkpoint::{self, Every, File, MANIFEST_BYTES_MAX, Manifest, VERSION};
use crate::driver::{Handle, RequestError, wall_ms};
use crate::state::Head;
use crate::state::rows::{self, RowsError};

/// Directory, beside RocksDB's files, in which a copy lies while it is stored.
pub const COPY_DIR: &str = "checkpoint";
/// How long a record may take to be applied before it is given up: the next look decides anew.
const RECORD_WAIT: Duration = Duration::from_secs(30);
/// How often is looked whether it was.
const RECORD_LOOK: Duration = Duration::from_millis(50);
/// Uploads deleted at one look.
const UPLOADS_AT_ONCE: usize = 100;
/// Bytes hashed at a time.
const HASH_CHUNK: usize = 1024 * 1024;
/// Pause before the next look while the level of records is not this build's: a cluster that has just begun is at the oldest.
const RAISE_LOOK: Duration = Duration::from_secs(1);

/// Why a checkpoint was not made, or something old not removed.
#[derive(Debug, thiserror::Error)]
pub enum CheckpointError {
    /// The database can't be copied or read.
    #[error(transparent)]
    Rows(#[from] RowsError),
    /// A file of the copy can't be read or written.
    #[error("{}: {source}", .path.display())]
    File {
        /// Which.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// The copy has no head: nothing was applied yet.
    #[error("the copy in {} holds no state", .0.display())]
    Empty(PathBuf),
    /// A manifest that must be there is not, or is damaged.
    #[error("the manifest of checkpoint {sequence} is damaged ({what}); nothing is deleted or trimmed")]
    Manifest {
        /// Of which.
        sequence: u64,
        /// What is wrong.
        what: String,
    },
    /// The state changed hands.
    #[error("checkpoint {0} is stored, but was not recorded in time: another coordinator may lead by now")]
    NotRecorded(u64),
    /// The log.
    #[error(transparent)]
    Log(#[from] LogError),
    /// The coordinator stops.
    #[error(transparent)]
    Request(#[from] RequestError),
    /// The bucket.
    #[error(transparent)]
    Get(#[from] GetError),
    /// The bucket.
    #[error(transparent)]
    Put(#[from] PutError),
    /// The bucket.
    #[error(transparent)]
    Upload(#[from] UploadError),
    /// The bucket.
    #[error(transparent)]
    List(#[from] ListError),
    /// The bucket.
    #[error(transparent)]
    Delete(#[from] DeleteError),
    /// A thread ended early.
    #[error("a read ended early: {0}")]
    Thread(#[from] tokio::task::JoinError),
}

/// Keeps things in order while its coordinator leads.
pub struct Keeper {
    /// The coordinator.
    pub handle: Handle,
    /// The bucket.
    pub store: Store,
    /// Directory of its RocksDB.
    pub dir: PathBuf,
    /// The coordinator's name, unique per start.
    pub name: String,
    /// When checkpoints are made.
    pub every: Every,
    /// What every coordinator's build can apply.
    pub levels: Levels,
}

/// What the keeper looks at.
struct Look {
    leads: bool,
    head: Head,
    uploads: Vec<(TenantId, String)>,
}

impl Keeper {
    /// Keeps things in order until `stop`.
    pub async fn run(mut self, stop: CancellationToken) {
        let mut swept = None;
        loop {
            self.levels.say(&self.name).await;
            let raised = self.state().await.is_ok_and(|look| look.head.level >= LEVEL);
            tokio::select! {
                () = stop.cancelled() => return,
                done = self.look(&mut swept) => match done {
                    Ok(()) => {}
                    Err(CheckpointError::Request(_)) => return,
                    Err(error) => tracing::warn!(%error, "a checkpoint, or the removal of an old one, failed; it is tried again"),
                }
            }
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(if raised { self.every.look } else { self.every.look.min(RAISE_LOOK) }) => {}
            }
        }
    }

    async fn state(&self) -> Result<Look, RequestError> {
        let read = |state: &crate::state::State, leader: Option<&crate::leader::Leader>, _| {
            let going = state.uploads.iter().filter(|(_, upload)| upload.going).map(|(name, _)| name.clone());
            Look { leads: leader.is_some(), head: state.head.clone(), uploads: going.take(UPLOADS_AT_ONCE).collect() }
        };
        self.handle.read(read).await
    }

    async fn look(&self, swept: &mut Option<u64>) -> Result<(), CheckpointError> {
        let look = self.state().await?;
        if !look.leads {
            return Ok(());
        }
        if look.head.level < LEVEL && self.levels.lowest(&self.name).await.is_some_and(|lowest| lowest >= LEVEL) {
            tracing::info!(level = LEVEL, "every coordinator supports it: raising the level of the records");
            self.handle.record(Decision::Level(LEVEL)).await?;
        }
        if look.head.level < LEVEL_KEEPING {
            return Ok(());
        }
        for (tenant, id) in look.uploads {
            self.store.delete(&keys::upload(&tenant, &id)).await?;
            self.handle.record(Decision::UploadGone { tenant, id }).await?;
        }
        let (first, last, bytes, bytes_max) = self.handle.log().bounds().await?;
        let log = checkpoint::Log { first, last, bytes, bytes_max: u64::try_from(bytes_max).ok() };
        if checkpoint::due(&self.every, &look.head, &log) {
            self.make(&look.head).await?;
        }
        let head = self.state().await?.head;
        let newest = head.checkpoints.last().copied();
        if newest.is_some() && *swept != newest {
            self.trim(&head, first).await?;
            self.sweep(&head).await?;
            *swept = newest;
        }
        Ok(())
    }

    /// Makes a checkpoint and has it recorded.
    async fn make(&self, known: &Head) -> Result<(), CheckpointError> {
        let started = Instant::now();
        let copy = self.dir.join(COPY_DIR);
        remove_dir(&copy).await?;
        let (rows, to) = (self.handle.rows().clone(), copy.clone());
        let (head, files) = tokio::task::spawn_blocking(move || copied(&rows, &to)).await??;
        let mut stored = self.files_of(known).await;
        let tag = format!("{}-{}", head.sequence, self.name);
        let (mut manifest, mut new_bytes) = (Vec::new(), 0);
        for (name, bytes, hash) in files {
            let key = match stored.remove(&hash) {
                Some(key) => key,
                None => {
                    let key = keys::checkpoint_file(&format!("{hash}-{tag}"));
                    self.upload(&copy.join(&name), &key, bytes).await?;
                    new_bytes += bytes;
                    key
                }
            };
            manifest.push(File { name, key, bytes, blake3: hash });
        }
        let Head { sequence, level, skipped, .. } = head;
        let manifest =
            Manifest { version: VERSION.to_owned(), cluster: self.handle.log().cluster.clone(), sequence, level, skipped, files: manifest };
        // Text and numbers only: there is no failing path.
        let bytes = serde_json::to_vec_pretty(&manifest).unwrap_or_default();
        self.store.put(&keys::checkpoint(sequence), Bytes::from(bytes)).await?;
        remove_dir(&copy).await?;
        self.handle.record(Decision::Checkpointed { sequence }).await?;
        let asked = Instant::now();
        while !self.state().await?.head.checkpoints.contains(&sequence) {
            if asked.elapsed() > RECORD_WAIT {
                return Err(CheckpointError::NotRecorded(sequence));
            }
            tokio::time::sleep(RECORD_LOOK).await;
        }
        tracing::info!(sequence, files = manifest.files.len(), new_bytes, ms = started.elapsed().as_millis() as u64, "made a checkpoint");
        Ok(())
    }

    /// Keys of the files of the two newest checkpoints, by hash. One that can't be read only costs storing its files again.
    async fn files_of(&self, head: &Head) -> BTreeMap<String, String> {
        let mut known = BTreeMap::new();
        for sequence in head.checkpoints.iter().rev().take(2) {
            match self.manifest(*sequence).await {
                Ok(manifest) => known.extend(manifest.files.into_iter().map(|file| (file.blake3, file.key))),
                Err(error) => tracing::warn!(%error, "an older checkpoint can't be built upon"),
            }
        }
        known
    }

    async fn upload(&self, path: &Path, key: &str, bytes: u64) -> Result<(), CheckpointError> {
        let file = tokio::fs::File::open(path).await.map_err(|source| CheckpointError::File { path: path.to_owned(), source })?;
        let options = UploadOptions { bytes_hint: Some(bytes), ..UploadOptions::default() };
        self.store.upload_stream(key, file, &options).await?;
        Ok(())
    }

    async fn manifest(&self, sequence: u64) -> Result<Manifest, CheckpointError> {
        let bytes = self.store.get(&keys::checkpoint(sequence), MANIFEST_BYTES_MAX).await?;
        let damaged = |what: String| CheckpointError::Manifest { sequence, what };
        let manifest: Manifest = serde_json::from_slice(&bytes).map_err(|e| damaged(e.to_string()))?;
        if manifest.version == VERSION && manifest.sequence == sequence { Ok(manifest) } else { Err(damaged("it is another's".to_owned())) }
    }

    /// Trims the log, once it is sure that the checkpoints it stands in for are there.
    async fn trim(&self, head: &Head, first: u64) -> Result<(), CheckpointError> {
        let Some(keep) = checkpoint::keep_from(head).filter(|keep| *keep > first) else { return Ok(()) };
        for sequence in head.checkpoints.iter().rev().take(2) {
            self.manifest(*sequence).await?;
        }
        let removed = self.handle.log().trim(keep).await?;
        tracing::info!(keep, removed, "trimmed the log");
        Ok(())
    }

    /// Deletes older manifests and the files that only they name. If any manifest that is kept can't be read, nothing is deleted.
    async fn sweep(&self, head: &Head) -> Result<(), CheckpointError> {
        let Some(oldest) = head.checkpoints.first().copied() else { return Ok(()) };
        // Listed first: a file that is stored from now on is not among them.
        let there = files(&self.store).await?;
        let (mut kept, mut going, mut goes) = (Vec::new(), Vec::new(), Vec::new());
        let found = manifests(&self.store).await?;
        if let Some(sequence) = head.checkpoints.iter().find(|sequence| !found.contains(sequence)) {
            return Err(CheckpointError::Manifest { sequence: *sequence, what: "it is not in the bucket".to_owned() });
        }
        for sequence in found {
            if sequence >= oldest {
                kept.push(self.manifest(sequence).await?);
            } else {
                // One that can't be read names nothing; its files go when they are old.
                going.extend(self.manifest(sequence).await.ok());
                goes.push(keys::checkpoint(sequence));
            }
        }
        let files = checkpoint::sweep(&kept, &going, &there, i64::try_from(wall_ms()).unwrap_or(0));
        for some in goes.chunks(LIST_LIMIT_MAX).chain(files.chunks(LIST_LIMIT_MAX)) {
            self.store.delete_many(some).await?;
        }
        Ok(())
    }
}

/// Sequences of the manifests in the bucket, oldest first.
///
/// # Errors
/// [`ListError`].
pub async fn manifests(store: &Store) -> Result<Vec<u64>, ListError> {
    let mut found = Vec::new();
    let mut after: Option<String> = None;
    loop {
        let page = store.list(keys::CHECKPOINTS, after.as_deref(), LIST_LIMIT_MAX).await?;
        found.extend(page.objects.iter().filter_map(|object| keys::checkpoint_sequence(&object.key)));
        // Files come behind the manifests.
        let behind = page.objects.last().is_some_and(|last| last.key.starts_with(keys::CHECKPOINT_FILES));
        match page.next {
            Some(next) if !behind => after = Some(next),
            Some(_) | None => return Ok(found),
        }
    }
}

/// Keys of all files, with the time of their storing.
async fn files(store: &Store) -> Result<Vec<(String, i64)>, ListError> {
    let mut found = Vec::new();
    let mut after: Option<String> = None;
    loop {
        let page = store.list(keys::CHECKPOINT_FILES, after.as_deref(), LIST_LIMIT_MAX).await?;
        found.extend(page.objects.into_iter().map(|object| (object.key, object.modified_ms)));
        match page.next {
            Some(next) => after = Some(next),
            None => return Ok(found),
        }
    }
}

/// Removes a directory that may not be there.
///
/// # Errors
/// [`CheckpointError::File`].
pub async fn remove_dir(path: &Path) -> Result<(), CheckpointError> {
    match tokio::fs::remove_dir_all(path).await {
        Ok(()) => Ok(()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(()),
        Err(source) => Err(CheckpointError::File { path: path.to_owned(), source }),
    }
}

/// Copies the database; returns where it stood, and its files with sizes and hashes.
fn copied(from: &RocksRows, to: &Path) -> Result<(Head, Vec<(String, u64, String)>), CheckpointError> {
    from.copy_to(to)?;
    let failed = |source| CheckpointError::File { path: to.to_owned(), source };
    let mut files = Vec::new();
    for entry in std::fs::read_dir(to).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if checkpoint::belongs(&name) {
            let (bytes, hash) = hash_file(&entry.path())?;
            files.push((name, bytes, hash));
        }
    }
    files.sort_unstable();
    let head = rows::load_head(&RocksRows::read_only(to)?)?.ok_or_else(|| CheckpointError::Empty(to.to_owned()))?;
    Ok((head, files))
}

/// Size and blake3 of a file.
///
/// # Errors
/// [`CheckpointError::File`].
pub fn hash_file(path: &Path) -> Result<(u64, String), CheckpointError> {
    let failed = |source| CheckpointError::File { path: path.to_owned(), source };
    let mut file = std::fs::File::open(path).map_err(failed)?;
    let (mut hasher, mut chunk, mut bytes) = (blake3::Hasher::new(), vec![0; HASH_CHUNK], 0);
    loop {
        match std::io::Read::read(&mut file, &mut chunk).map_err(failed)? {
            0 => return Ok((bytes, hasher.finalize().to_hex().to_string())),
            read => {
                hasher.update(&chunk[..read]);
                bytes += read as u64;
            }
        }
    }
}
