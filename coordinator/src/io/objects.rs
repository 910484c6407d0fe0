//! What trails a job's end, in the bucket: its manifest with the pages of its results, and the deletion of objects.
//!
//! Owns what the manifest says and which objects go. Everything here is safe to repeat and holds one page of rows at a time,
//! whatever the number of tasks. Does not own when it is done (`leader`, `finish`).

use std::future::Future;
use std::pin::Pin;
use std::time::Duration;

use bytes::Bytes;
use serde::Serialize;
use volley_jobspecs::api::{JobView, ResultRow};
use volley_jobspecs::failure::FailureClass;
use volley_jobspecs::ids::{AttemptName, JobId};
use volley_jobspecs::keys;
use volley_jobspecs::wire::record::Trailing;
use volley_jobspecs::wire::report::Ending;
use volley_store::{DeleteError, ListError, PutError, Store};

use super::garbage::delete_all;
use super::rocks::RocksRows;
use super::volumes::Volumes;
use crate::api::results::{self, Cursor, Wanted};
use crate::api::views;
use crate::metrics::Metrics;
use crate::state::effects::AttemptRow;
use crate::state::job::{Facts, Progress};
use crate::state::rows::{self, Rows, RowsError, Table};
use crate::trail::Trailer;

/// Rows of one result page: with every inline part full, 20 MiB; commonly 300 KiB.
const PAGE_ROWS: usize = 2_000;
/// Attempts looked at before the deletions they call for are made.
const SWEEP_ATTEMPTS: usize = 1_000;
/// Pause after a failure, before the leader is told and asks again.
const FAILURE_PAUSE: Duration = Duration::from_secs(5);

/// Why something that trails a job's end was not done.
#[derive(Debug, thiserror::Error)]
enum TrailError {
    #[error(transparent)]
    Rows(#[from] RowsError),
    #[error(transparent)]
    Put(#[from] PutError),
    #[error(transparent)]
    List(#[from] ListError),
    #[error(transparent)]
    Delete(#[from] DeleteError),
    #[error("letting go of what it read of volumes: {0}")]
    Volumes(String),
}

/// The manifest of a round, as JSON.
#[derive(Debug, Serialize)]
#[serde(rename_all = "camelCase")]
struct Manifest {
    /// Form of this document.
    version: &'static str,
    /// The job as it ended.
    job: JobView,
    /// Pages of results in the order they came, one a task.
    pages: Vec<PageRef>,
    /// Tasks that were never given out; they have no rows.
    never_started: Option<NeverStarted>,
}

#[derive(Debug, Serialize)]
struct PageRef {
    key: String,
    rows: usize,
    bytes: usize,
    blake3: String,
}

#[derive(Debug, Serialize)]
struct NeverStarted {
    first: u32,
    count: u32,
    class: FailureClass,
}

/// Trails jobs' ends in a bucket.
#[derive(Clone)]
pub struct Objects {
    store: Store,
    rows: RocksRows,
    metrics: Metrics,
    volumes: Volumes,
}

impl Objects {
    /// In this bucket, from these rows.
    #[must_use]
    pub fn new(store: Store, rows: RocksRows, metrics: Metrics, volumes: Volumes) -> Self {
        Self { store, rows, metrics, volumes }
    }

    async fn manifest(&self, job: JobId) -> Result<(), TrailError> {
        loop {
            let Some((facts, progress)) = rows::header(&self.rows, job)? else { return Ok(()) };
            // A rerun came in between; its own end asks for its own manifest.
            if progress.ended_ms.is_none() {
                return Ok(());
            }
            self.write_manifest(job, &facts, &progress).await?;
            // A round that ended meanwhile would be taken for written together with this one.
            if rows::progress(&self.rows, job)?.is_none_or(|now| now.round == progress.round) {
                return Ok(());
            }
        }
    }

    async fn write_manifest(&self, job: JobId, facts: &Facts, progress: &Progress) -> Result<(), TrailError> {
        let mut pages = Vec::new();
        let mut cursor = Cursor::START;
        loop {
            let (rows, store) = (self.rows.clone(), self.store.clone());
            let (from, as_of) = (cursor, progress.clone());
            let read =
                move || results::chunk(&rows, &|key| store.url(key), Wanted { job, progress: &as_of, superseded: false }, from, PAGE_ROWS);
            let chunk = blocking(read).await?;
            cursor = chunk.next;
            if chunk.rows.is_empty() && chunk.more {
                continue;
            }
            if chunk.rows.is_empty() {
                break;
            }
            let bytes = lines(&chunk.rows);
            let key = keys::job_results(job, progress.round, u32::try_from(pages.len()).unwrap_or(u32::MAX));
            pages.push(PageRef {
                key: key.clone(),
                rows: chunk.rows.len(),
                bytes: bytes.len(),
                blake3: blake3::hash(&bytes).to_hex().to_string(),
            });
            self.store.put(&key, bytes).await?;
            if !chunk.more {
                break;
            }
        }
        let count = facts.plan.tasks.saturating_sub(progress.next_fresh);
        let never_started = progress.rest.map(|class| NeverStarted { first: progress.next_fresh, count, class });
        let view = views::job(job, facts, progress, &|key| self.store.url(key));
        let manifest = Manifest { version: "volley/manifest/v1", job: view, pages, never_started };
        // Text, numbers and lists only: there is no failing path.
        let bytes = serde_json::to_vec_pretty(&manifest).unwrap_or_default();
        self.store.put(&keys::job_manifest(job, progress.round), Bytes::from(bytes)).await?;
        Ok(())
    }

    /// Deletes the objects of every attempt that failed.
    async fn sweep(&self, job: JobId) -> Result<(), TrailError> {
        let mut from = Some(rows::job_key(job));
        while let Some(start) = from.take() {
            let rows = self.rows.clone();
            let (failed, next) = blocking(move || failed_attempts(&rows, job, &start)).await?;
            from = next;
            for name in failed {
                delete_all::<TrailError>(&self.store, &keys::attempt_prefix(&name)).await?;
            }
        }
        Ok(())
    }

    /// Deletes everything of a job. What older builds let several jobs share is left to the collector of garbage.
    async fn delete(&self, job: JobId) -> Result<(), TrailError> {
        delete_all::<TrailError>(&self.store, &keys::job_prefix(job)).await?;
        let Some((facts, progress)) = rows::header(&self.rows, job)? else { return Ok(()) };
        if progress.pins.is_some() {
            let unpinned = self.volumes.with(move |host| host.unpin(&job.to_string())).await;
            let unpinned =
                unpinned.ok_or_else(|| TrailError::Volumes("this coordinator has no key for them (--volume-keys)".to_owned()))?;
            unpinned.map_err(|error| TrailError::Volumes(error.to_string()))?;
        }
        if let Some(items) = facts.plan.items.filter(|name| keys::of_one_job(name)) {
            delete_all::<TrailError>(&self.store, &keys::items_prefix(&items)).await?;
        }
        if let Some(spec) = facts.spec.name().filter(|name| keys::of_one_job(name)) {
            self.store.delete(&keys::spec(spec)).await?;
        }
        Ok(())
    }

    async fn work(&self, job: JobId, what: Trailing) -> Result<(), TrailError> {
        match what {
            Trailing::Manifest => self.manifest(job).await,
            Trailing::FailedObjects => self.sweep(job).await,
            Trailing::Objects => self.delete(job).await,
        }
    }
}

impl Trailer for Objects {
    fn trail(&self, job: JobId, what: Trailing) -> Pin<Box<dyn Future<Output = bool> + Send + '_>> {
        Box::pin(async move {
            match self.work(job, what).await {
                Ok(()) => {
                    self.metrics.trailed.inc();
                    true
                }
                Err(error) => {
                    tracing::warn!(%job, ?what, %error, "what trails a job's end failed; it is tried again");
                    self.metrics.trail_failures.inc();
                    tokio::time::sleep(FAILURE_PAUSE).await;
                    false
                }
            }
        })
    }
}

/// Runs what reads many rows where it may block.
async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T, RowsError> + Send + 'static) -> Result<T, RowsError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(error) => Err(RowsError::Store(format!("a read ended early: {error}"))),
    }
}

fn lines(rows: &[ResultRow]) -> Bytes {
    let mut bytes = Vec::with_capacity(rows.len() * 200);
    for row in rows {
        results::line(row, &mut bytes);
    }
    Bytes::from(bytes)
}

/// Attempts that failed and may have left objects, among the next [`SWEEP_ATTEMPTS`], and where to go on.
fn failed_attempts(rows: &RocksRows, job: JobId, from: &[u8]) -> Result<(Vec<AttemptName>, Option<Vec<u8>>), RowsError> {
    let (mut failed, mut seen, mut next) = (Vec::new(), 0, None);
    rows.scan(Table::Attempts, &rows::job_key(job), from, &mut |key, value| {
        if seen == SWEEP_ATTEMPTS {
            next = Some(key.to_vec());
            return false;
        }
        seen += 1;
        let row: Result<AttemptRow, _> = volley_jobspecs::wire::decode("attempt", value);
        // A row that can't be read is left alone: its objects go with the job's.
        failed.extend(row.ok().filter(leaves_objects).map(|row| row.end.name));
        true
    })?;
    Ok((failed, next))
}

fn leaves_objects(row: &AttemptRow) -> bool {
    let end = &row.end;
    match end.ending {
        Ending::Succeeded | Ending::Returned => false,
        // Nobody knows how far a lost attempt came.
        Ending::Failed(FailureClass::HostLost | FailureClass::StorageFailed) => true,
        Ending::Failed(_) => end.outputs.is_some() || [&end.stdout, &end.stderr].into_iter().flatten().any(|stream| stream.stored),
    }
}
