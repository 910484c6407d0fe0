//! Finds and deletes objects that no job names: what a failed submit left, what older builds shared between jobs, unfinished uploads; and, now and then, has what
//! volumes left collected.
//!
//! Owns the listing and the deletions. The bucket is listed before the jobs are read, and only what is old goes, so that a submit under
//! way loses nothing. Does not own what counts as garbage (`garbage`), or what a job takes with it when it is removed (`objects`).

use std::time::Duration;

use tokio::time::Instant;
use tokio_util::sync::CancellationToken;
use volley_jobspecs::ids::{JobId, TenantId};
use volley_jobspecs::keys;
use volley_jobspecs::wire::record::Decision;
use volley_jobspecs::wire::{LEVEL_ROUNDS, LEVEL_VOLUMES};
use volley_store::{DeleteError, LIST_LIMIT_MAX, ListError, StaleUploadsError, Store};

use super::collect::{CollectVolumesError, collect};
use super::rocks::RocksRows;
use super::volumes::Volumes;
use crate::driver::{Handle, RequestError, wall_ms};
use crate::garbage::{Collect, Named, Seen, UNFINISHED_MS, upload_of};
use crate::state::rows::{self, Rows, RowsError, Table};

/// Uploads found at one look: each is a decision of the leader.
const UPLOADS_AT_ONCE: usize = 1_000;

/// Why garbage was not collected.
#[derive(Debug, thiserror::Error)]
enum GarbageError {
    #[error(transparent)]
    Rows(#[from] RowsError),
    #[error(transparent)]
    Request(#[from] RequestError),
    #[error(transparent)]
    List(#[from] ListError),
    #[error(transparent)]
    Delete(#[from] DeleteError),
    #[error(transparent)]
    Unfinished(#[from] StaleUploadsError),
    #[error("what volumes left: {0}")]
    Volumes(#[from] CollectVolumesError),
    #[error("a read ended early: {0}")]
    Thread(#[from] tokio::task::JoinError),
}

/// How often what volumes left is collected: all of it is read, and nothing goes before it was found a day later again.
const VOLUMES_EVERY: Duration = Duration::from_secs(12 * 60 * 60);

/// Collects garbage while its coordinator leads.
pub struct Collector {
    /// The coordinator.
    pub handle: Handle,
    /// The bucket.
    pub store: Store,
    /// When.
    pub collect: Collect,
    /// Volumes.
    pub volumes: Volumes,
    /// This coordinator's name, for people.
    pub name: String,
}

impl Collector {
    /// Collects until `stop`.
    pub async fn run(self, stop: CancellationToken) {
        let mut volumes_next = Instant::now();
        loop {
            tokio::select! {
                () = stop.cancelled() => return,
                () = tokio::time::sleep(self.collect.every) => {}
            }
            tokio::select! {
                () = stop.cancelled() => return,
                done = self.look(&mut volumes_next) => match done {
                    Ok(()) => {}
                    Err(GarbageError::Request(_)) => return,
                    Err(error) => tracing::warn!(%error, "collecting garbage failed; it is tried again"),
                }
            }
        }
    }

    async fn look(&self, volumes_next: &mut Instant) -> Result<(), GarbageError> {
        let (leads, level) = self.handle.read(|state, leader, _| (leader.is_some(), state.head.level)).await?;
        if !leads || level < LEVEL_ROUNDS {
            return Ok(());
        }
        let now_ms = i64::try_from(wall_ms()).unwrap_or(0);
        let before_ms = now_ms.saturating_sub(self.collect.orphan_ms);
        let (items, specs) = (self.old(keys::ITEMS, before_ms).await?, self.old(keys::SPECS, before_ms).await?);
        let uploads = self.unknown_uploads(before_ms).await?;
        if !items.is_empty() || !specs.is_empty() || !uploads.is_empty() {
            let rows = self.handle.rows().clone();
            let named = tokio::task::spawn_blocking(move || named(&rows, uploads)).await??;
            for name in items.iter().filter(|name| !named.items.contains(*name)) {
                delete_all::<GarbageError>(&self.store, &keys::items_prefix(name)).await?;
                tracing::info!(name, "deleted items that no job names");
            }
            let specs: Vec<String> = specs.iter().filter(|name| !named.specs.contains(*name)).map(|name| keys::spec(name)).collect();
            for some in specs.chunks(LIST_LIMIT_MAX) {
                self.store.delete_many(some).await?;
                tracing::info!(specs = some.len(), "deleted stored specs that no job names");
            }
            for ((tenant, id), jobs) in named.uploads {
                self.handle.record(Decision::UploadFound { tenant, id, jobs: jobs.into_iter().collect() }).await?;
            }
        }
        for prefix in [keys::UPLOADS, keys::JOBS] {
            self.store.abort_stale_uploads(prefix, now_ms.saturating_sub(UNFINISHED_MS)).await?;
        }
        if self.volumes.are_offered() && level >= LEVEL_VOLUMES && *volumes_next <= Instant::now() {
            let done = collect(&self.volumes, &self.handle, &format!("coordinator {}", self.name), false).await?;
            tracing::info!(deleted = done.deleted.0, bytes = done.deleted.1, condemned = done.condemned.0, "collected what volumes left");
            *volumes_next = Instant::now() + VOLUMES_EVERY;
        }
        Ok(())
    }

    /// Names in an area of the bucket of which nothing was written since.
    async fn old(&self, area: &str, before_ms: i64) -> Result<Vec<String>, GarbageError> {
        let (mut seen, mut after) = (Seen::default(), None::<String>);
        loop {
            let page = self.store.list(area, after.as_deref(), LIST_LIMIT_MAX).await?;
            page.objects.iter().for_each(|object| seen.object(area, &object.key, object.modified_ms));
            match page.next {
                Some(next) => after = Some(next),
                None => return Ok(seen.old(before_ms)),
            }
        }
    }

    /// Uploads that lie in the bucket and are not in the state: made before uploads were recorded, or their record was lost.
    async fn unknown_uploads(&self, before_ms: i64) -> Result<Vec<(TenantId, String)>, GarbageError> {
        let (mut found, mut after) = (Vec::new(), None::<String>);
        while found.len() < UPLOADS_AT_ONCE {
            let page = self.store.list(keys::UPLOADS, after.as_deref(), LIST_LIMIT_MAX).await?;
            let old = page.objects.iter().filter(|object| object.modified_ms < before_ms);
            let old: Vec<_> = old.filter_map(|object| upload_of(&object.key)).collect();
            let unknown = self
                .handle
                .read(move |state, _, _| old.into_iter().filter(|upload| !state.uploads.contains_key(upload)).collect::<Vec<_>>());
            found.extend(unknown.await?);
            match page.next {
                Some(next) => after = Some(next),
                None => break,
            }
        }
        found.truncate(UPLOADS_AT_ONCE);
        Ok(found)
    }
}

/// What all jobs name, also those that have ended.
fn named(rows: &RocksRows, uploads: Vec<(TenantId, String)>) -> Result<Named, RowsError> {
    let (mut named, mut failed) = (Named::new(uploads), None);
    rows.scan(Table::Facts, b"", b"", &mut |key, value| {
        let id = key.first_chunk::<8>().map(|id| JobId(u64::from_be_bytes(*id)));
        match (id, rows::facts_of(key, value)) {
            (Some(id), Ok(facts)) => named.job(id, &facts),
            (None, _) => {}
            (_, Err(error)) => failed = Some(error),
        }
        failed.is_none()
    })?;
    // With one job that can't be read, nobody knows what it names.
    failed.map_or(Ok(named), Err)
}

/// Deletes every object below a prefix.
///
/// # Errors
/// [`ListError`] and [`DeleteError`], as `E`; the same call may be repeated.
pub async fn delete_all<E: From<ListError> + From<DeleteError>>(store: &Store, prefix: &str) -> Result<(), E> {
    let mut after: Option<String> = None;
    loop {
        let page = store.list(prefix, after.as_deref(), LIST_LIMIT_MAX).await?;
        let keys: Vec<&str> = page.objects.iter().map(|object| object.key.as_str()).collect();
        if !keys.is_empty() {
            store.delete_many(&keys).await?;
        }
        match page.next {
            Some(next) => after = Some(next),
            None => return Ok(()),
        }
    }
}
