//! What volumes need in the bucket: promotions, growth, pins, removals; and making volumes, snapshots and clones for people.
//!
//! Owns waiting for it beside the driver's loop, and which failures are for good. Does not own heads and snapshots (crate `volume`), or when any of it
//! is wanted (`volumes`).

use std::future::Future;
use std::path::PathBuf;
use std::pin::Pin;
use std::sync::Arc;
use std::time::Duration;

use volley_jobspecs::ids::{JobId, SnapshotId};
use volley_jobspecs::wire::record::Decision;
use volley_store::Store;
use volley_volume::format::seal::ClusterKeys;
use volley_volume::{Host, Limits, OpenError, Pinned, Promotion};

use crate::trail::Keeper;
use crate::volumes::Work;

/// Pause after a failure, before the leader begins it anew.
const FAILURE_PAUSE: Duration = Duration::from_secs(2);

/// The volumes of a cluster, as its coordinators see them.
#[derive(Clone)]
pub struct Volumes {
    host: Option<Arc<Host>>,
}

impl Volumes {
    /// `keys`: none, and there are no volumes here.
    #[must_use]
    pub fn new(store: &Store, keys: Option<ClusterKeys>) -> Self {
        // No volume is opened here: there is no log, and nothing to keep on the disk.
        let limits = Limits { cache_disk_bytes: 0, ..Limits::default() };
        let open = |keys| Host::new(Arc::new(store.clone()), keys, PathBuf::new(), tokio::runtime::Handle::current(), limits);
        Self { host: keys.map(open) }
    }

    /// Are there any?
    #[must_use]
    pub fn are_on(&self) -> bool {
        self.host.is_some()
    }

    /// Does something with the bucket, beside the loop. None: this coordinator has no key for volumes.
    pub async fn with<T: Send + 'static, E: Send + 'static>(
        &self,
        work: impl FnOnce(&Host) -> Result<T, E> + Send + 'static,
    ) -> Option<Result<T, E>> {
        let host = Arc::clone(self.host.as_ref()?);
        // A panic is a bug, and the next try tells the same.
        tokio::task::spawn_blocking(move || work(&host)).await.ok()
    }
}

/// The snapshot that is made of a volume for a job: every leader makes the same.
#[must_use]
pub fn pinned_for(job: JobId, slot: u8) -> SnapshotId {
    let mut hasher = blake3::Hasher::new_derive_key("volley snapshot pinned for a job");
    hasher.update(&job.0.to_be_bytes());
    hasher.update(&[slot]);
    let mut id = [0; 16];
    hasher.finalize_xof().fill(&mut id);
    SnapshotId(id)
}

impl Volumes {
    /// Are there volumes here?
    #[must_use]
    pub fn are_offered(&self) -> bool {
        self.host.is_some()
    }

    async fn done(&self, work: Work) -> Option<Result<Decision, OpenError>> {
        match work {
            Work::Promote { tenant, name, volume, promotion } => {
                let generation = promotion.generation;
                let what = Promotion { volume, attempt: Some(promotion.attempt), base: generation.saturating_sub(1), root: promotion.root };
                let why = match self.with(move |host| host.promote(&what)).await? {
                    Ok(()) => None,
                    // The head says something else, and will go on saying it.
                    Err(OpenError::Move(error)) => Some(error.to_string()),
                    Err(error) => return Some(Err(error)),
                };
                Some(Ok(Decision::VolumePromoted { tenant, name, volume, generation, why }))
            }
            Work::Grow { tenant, name, volume, generation, size_bytes } => {
                let why = match self.with(move |host| host.grow(volume, generation, size_bytes)).await? {
                    Ok(()) => None,
                    Err(OpenError::Move(error)) => Some(error.to_string()),
                    Err(error) => return Some(Err(error)),
                };
                Some(Ok(Decision::VolumeGrown { tenant, name, volume, generation: generation.saturating_add(1), why }))
            }
            Work::Pin { job, pin, .. } => {
                let snapshot = pin.snapshot.unwrap_or_else(|| pinned_for(job, pin.slot));
                let what = if pin.snapshot.is_some() { Pinned::Snapshot(snapshot) } else { Pinned::Accepted(pin.volume, snapshot) };
                let done = self.with(move |host| host.pin(&job.to_string(), what)).await?;
                Some(done.map(|()| Decision::VolumePinned { job, slot: pin.slot, snapshot }))
            }
            Work::Remove { tenant, volume } => {
                let done = self.with(move |host| host.remove(volume, true)).await?;
                Some(done.map(|()| Decision::VolumeGone { tenant, volume }))
            }
        }
    }
}

impl Keeper for Volumes {
    fn keep(&self, work: Work) -> Pin<Box<dyn Future<Output = Option<Decision>> + Send + '_>> {
        Box::pin(async move {
            let what = format!("{work:?}");
            match self.done(work).await {
                Some(Ok(decision)) => return Some(decision),
                Some(Err(error)) => tracing::warn!("work for a volume failed, and is tried again: {error} ({what})"),
                None => tracing::warn!("there are volumes, and this coordinator has no key for them (--volume-keys): {what} waits"),
            }
            tokio::time::sleep(FAILURE_PAUSE).await;
            None
        })
    }
}
