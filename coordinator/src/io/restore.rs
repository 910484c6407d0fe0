//! The coordinator's directory: opened as it is, built again when it is damaged, from a checkpoint where the log no longer suffices.
//!
//! Owns which of the three is done, and that a crash at any moment leaves something the next start can go on from. Does not own making
//! checkpoints (`io/checkpoint.rs`) or replaying the log (`driver`).
//!
//! RocksDB makes a new database where there is no file `CURRENT`. So it is the first file to go and the last to come: whatever else lies
//! around, a directory without it is an empty one.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use volley_jobspecs::keys;
use volley_store::{DownloadError, GetError, ListError, Store};

use super::checkpoint::{COPY_DIR, CheckpointError, hash_file, manifests, remove_dir};
use super::log::{Log, LogError};
use super::rocks::RocksRows;
use crate::checkpoint::{MANIFEST_BYTES_MAX, Manifest, Unfit, Wanted, applied_skip, is_ours};
use crate::state::rows::{self, Rows, RowsError, Table, Write};

/// RocksDB row with the cluster's id.
const CLUSTER_ROW: &[u8] = b"cluster";
/// Says, by being there, that the database is to be dropped.
const MARK: &str = "REBUILD";
/// Directory into which a checkpoint is fetched.
const FETCH_DIR: &str = "loading";
/// The file that makes a directory a database.
const CURRENT: &str = "CURRENT";

/// Why there is no database to start with.
#[derive(Debug, thiserror::Error)]
pub enum RestoreError {
    /// The directory can't be used.
    #[error("can't use the directory {}: {source}; check its owner, permissions and free space", .path.display())]
    Directory {
        /// Which file or directory.
        path: PathBuf,
        /// Why.
        source: std::io::Error,
    },
    /// RocksDB can't be opened.
    #[error("can't open the RocksDB in {}: {source} (does another coordinator use it?)", .path.display())]
    Rows {
        /// Where.
        path: PathBuf,
        /// Why.
        source: RowsError,
    },
    /// RocksDB belongs to another cluster.
    #[error("the RocksDB in {} belongs to cluster {found}, log and bucket to cluster {log}; choose another directory, or delete this one: it is rebuilt from checkpoint and log", .path.display())]
    OtherRows {
        /// The directory.
        path: PathBuf,
        /// The log's cluster.
        log: String,
        /// RocksDB's cluster.
        found: String,
    },
    /// The log.
    #[error(transparent)]
    Log(#[from] LogError),
    /// The bucket holds a checkpoint of records that the log doesn't have.
    #[error(
        "the log is older than the bucket: the log ends at record {last}, the bucket holds a checkpoint of record {checkpoint}. NATS lost data or was restored from an older backup. Restore the newer log; or, to go on with the older one and lose what came after it, delete the RocksDB directory of every coordinator and, in the bucket, the checkpoints behind record {last}"
    )]
    Ahead {
        /// End of the log.
        last: u64,
        /// The newest checkpoint.
        checkpoint: u64,
    },
    /// No checkpoint leads up to the log.
    #[error(
        "record {next} is needed next, the log begins at {first}, and no checkpoint in the bucket can stand in ({why}); restore the bucket's checkpoints from a backup"
    )]
    NoCheckpoint {
        /// Needed.
        next: u64,
        /// First in the log.
        first: u64,
        /// What was found.
        why: String,
    },
    /// The bucket can't be listed.
    #[error("looking for checkpoints: {0}")]
    List(#[from] ListError),
    /// The bucket failed in the middle.
    #[error("loading a checkpoint: {0}")]
    Load(#[from] LoadError),
}

/// Why one checkpoint could not be loaded.
#[derive(Debug, thiserror::Error)]
pub enum LoadError {
    /// Its manifest can't be read.
    #[error(transparent)]
    Get(#[from] GetError),
    /// Its manifest does not fit.
    #[error(transparent)]
    Unfit(#[from] Unfit),
    /// A file can't be fetched.
    #[error(transparent)]
    Download(#[from] DownloadError),
    /// A file is not what the manifest says.
    #[error("{key} is damaged: {found}, not {wanted}")]
    Damaged {
        /// Which.
        key: String,
        /// blake3 and size as found.
        found: String,
        /// As they should be.
        wanted: String,
    },
    /// A file can't be read or written here.
    #[error(transparent)]
    Local(#[from] CheckpointError),
    /// What was put together is no such state.
    #[error("it stands at record {found:?}, not {wanted}")]
    Sequence {
        /// As found.
        found: Option<u64>,
        /// As it should be.
        wanted: u64,
    },
    /// What was put together can't be opened.
    #[error(transparent)]
    Rows(#[from] RowsError),
}

/// Has the next [`open`] drop the database. Survives a crash.
///
/// # Errors
/// [`RestoreError::Directory`].
pub fn mark(dir: &Path) -> Result<(), RestoreError> {
    let path = dir.join(MARK);
    std::fs::write(&path, b"").map_err(|source| RestoreError::Directory { path, source })
}

/// Opens the database in `dir`, so that the next record it needs is in the log.
///
/// # Errors
/// [`RestoreError`]: one clear line.
pub async fn open(dir: &Path, store: &Store, log: &Log) -> Result<RocksRows, RestoreError> {
    let failed = |source| RestoreError::Directory { path: dir.to_owned(), source };
    tokio::fs::create_dir_all(dir).await.map_err(failed)?;
    if dir.join(MARK).exists() {
        drop_rows(dir).map_err(failed)?;
    }
    let ((first, last, _, _), skips) = (log.bounds().await?, log.skips().await?);
    let checkpoints = manifests(store).await?;
    if let Some(checkpoint) = checkpoints.last().copied().filter(|newest| *newest > last) {
        return Err(RestoreError::Ahead { last, checkpoint });
    }
    let (rows, applied) = open_sound(dir, &log.cluster, &skips).await?;
    // Ours alone now; what a crash left is of no use.
    for left in [COPY_DIR, FETCH_DIR] {
        remove_dir(&dir.join(left)).await.map_err(LoadError::Local)?;
    }
    if applied > last {
        return Err(LogError::Behind { last, applied }.into());
    }
    let trimmed = first > applied + 1;
    if !trimmed && (applied > 0 || checkpoints.is_empty()) {
        return Ok(rows);
    }
    drop(rows);
    let wanted = Wanted { cluster: &log.cluster, first, skips: &skips };
    let why = match load(dir, store, &checkpoints, &wanted).await? {
        Ok(sequence) => {
            tracing::info!(sequence, "loaded a checkpoint");
            return open_rows(dir).await;
        }
        Err(why) => why,
    };
    if trimmed {
        return Err(RestoreError::NoCheckpoint { next: applied + 1, first, why });
    }
    tracing::warn!(why, "no checkpoint can be loaded; the state is built from the log, which is whole");
    let (rows, _) = open_sound(dir, &log.cluster, &skips).await?;
    Ok(rows)
}

async fn open_rows(dir: &Path) -> Result<RocksRows, RestoreError> {
    let path = dir.to_owned();
    let opened = tokio::task::spawn_blocking(move || RocksRows::open(&path)).await;
    let opened = opened.unwrap_or_else(|error| Err(RowsError::Store(error.to_string())));
    opened.map_err(|source| RestoreError::Rows { path: dir.to_owned(), source })
}

/// Opens the database and says how far it is; one that is damaged, or applied what is to be passed over, is dropped first.
async fn open_sound(dir: &Path, cluster: &str, skips: &BTreeSet<u64>) -> Result<(RocksRows, u64), RestoreError> {
    let why = match open_rows(dir).await {
        Ok(rows) => match belongs(dir, rows, cluster)? {
            Ok((rows, applied, skipped)) => match applied_skip(applied, &skipped, skips) {
                None => return Ok((rows, applied)),
                Some(skip) => format!("record {skip} was applied here before `volley log skip` said to pass over it"),
            },
            Err(error) => error.to_string(),
        },
        Err(RestoreError::Rows { source, .. }) if source.is_damage() => source.to_string(),
        Err(error) => return Err(error),
    };
    tracing::error!("dropping the RocksDB in {} and building it again from checkpoint and log: {why}", dir.display());
    drop_rows(dir).map_err(|source| RestoreError::Directory { path: dir.to_owned(), source })?;
    let rows = open_rows(dir).await?;
    match belongs(dir, rows, cluster)? {
        Ok((rows, applied, _)) => Ok((rows, applied)),
        Err(source) => Err(RestoreError::Rows { path: dir.to_owned(), source }),
    }
}

type Opened = (RocksRows, u64, BTreeSet<u64>);

/// Checks that the database is of this cluster (a new one becomes so). Within: damage.
fn belongs(dir: &Path, rows: RocksRows, cluster: &str) -> Result<Result<Opened, RowsError>, RestoreError> {
    let looked = || -> Result<(Option<Vec<u8>>, u64, BTreeSet<u64>), RowsError> {
        let head = rows::load_head(&rows)?.unwrap_or_default();
        Ok((rows.get(Table::Meta, CLUSTER_ROW)?, head.sequence, head.skipped))
    };
    let path = || dir.to_owned();
    match looked() {
        Ok((Some(found), _, _)) if found != cluster.as_bytes() => {
            Err(RestoreError::OtherRows { path: path(), log: cluster.to_owned(), found: String::from_utf8_lossy(&found).into_owned() })
        }
        Ok((Some(_), applied, skipped)) => Ok(Ok((rows, applied, skipped))),
        Ok((None, applied, skipped)) => {
            let write = Write::Put(Table::Meta, CLUSTER_ROW.to_vec(), cluster.as_bytes().to_vec());
            rows.write(vec![write]).map_err(|source| RestoreError::Rows { path: path(), source })?;
            Ok(Ok((rows, applied, skipped)))
        }
        Err(error) if error.is_damage() => Ok(Err(error)),
        Err(source) => Err(RestoreError::Rows { path: path(), source }),
    }
}

/// Removes RocksDB's files, and only those.
fn drop_rows(dir: &Path) -> std::io::Result<()> {
    remove_file(&dir.join(CURRENT))?;
    for entry in std::fs::read_dir(dir)? {
        let entry = entry?;
        let name = entry.file_name();
        if name.to_str().is_some_and(is_ours) && entry.file_type()?.is_file() {
            remove_file(&entry.path())?;
        }
    }
    remove_file(&dir.join(MARK))
}

fn remove_file(path: &Path) -> std::io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
        Ok(()) | Err(_) => Ok(()),
    }
}

/// Loads the newest checkpoint that can be used. Within: why none can. A bucket or disk that fails is an error at once.
async fn load(dir: &Path, store: &Store, checkpoints: &[u64], wanted: &Wanted<'_>) -> Result<Result<u64, String>, RestoreError> {
    let mut why = "there is none".to_owned();
    for sequence in checkpoints.iter().rev() {
        match load_one(dir, store, *sequence, wanted).await {
            Ok(()) => return Ok(Ok(*sequence)),
            Err(LoadError::Get(error)) if error.is_retryable() => return Err(LoadError::Get(error).into()),
            Err(LoadError::Download(error)) if error.is_retryable() => return Err(LoadError::Download(error).into()),
            Err(error @ LoadError::Local(_)) => return Err(error.into()),
            // Each older one is too old as well.
            Err(error @ LoadError::Unfit(Unfit::Old { .. })) => {
                return Ok(Err(if why == "there is none" { error.to_string() } else { why }));
            }
            Err(error) => {
                tracing::warn!(%error, sequence, "a checkpoint can't be used; trying an older one");
                why = format!("checkpoint {sequence}: {error}");
            }
        }
    }
    Ok(Err(why))
}

async fn load_one(dir: &Path, store: &Store, sequence: u64, wanted: &Wanted<'_>) -> Result<(), LoadError> {
    let bytes = store.get(&keys::checkpoint(sequence), MANIFEST_BYTES_MAX).await?;
    let manifest = Manifest::read(&bytes, wanted)?;
    let fetched = dir.join(FETCH_DIR);
    remove_dir(&fetched).await?;
    let local = |path: &Path| {
        let path = path.to_owned();
        move |source| LoadError::Local(CheckpointError::File { path, source })
    };
    tokio::fs::create_dir(&fetched).await.map_err(local(&fetched))?;
    for file in &manifest.files {
        let path = fetched.join(&file.name);
        store.download_to(&file.key, &path, None).await?;
        let hashed = tokio::task::spawn_blocking(move || hash_file(&path)).await.map_err(CheckpointError::Thread)??;
        if hashed != (file.bytes, file.blake3.clone()) {
            let (found, wanted) =
                (format!("{} bytes, blake3 {}", hashed.0, hashed.1), format!("{} bytes, blake3 {}", file.bytes, file.blake3));
            return Err(LoadError::Damaged { key: file.key.clone(), found, wanted });
        }
    }
    let found = rows::load_head(&RocksRows::read_only(&fetched)?)?.map(|head| head.sequence);
    if found != Some(sequence) {
        return Err(LoadError::Sequence { found, wanted: sequence });
    }
    drop_rows(dir).map_err(local(dir))?;
    let names = manifest.files.iter().map(|file| file.name.as_str());
    for name in names.filter(|name| *name != CURRENT).chain([CURRENT]) {
        std::fs::rename(fetched.join(name), dir.join(name)).map_err(local(&dir.join(name)))?;
    }
    remove_dir(&fetched).await?;
    Ok(())
}
