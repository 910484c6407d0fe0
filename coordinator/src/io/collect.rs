//! Collection of what volumes left in the bucket.
//!
//! Owns what the log knows of volumes, and that it is known up to now before anybody acts on it: a coordinator that was cut off from the log would take all that was made
//! since for nobody's. Does not own what counts as garbage (crate `volume`), nor when it is looked for (`io/garbage.rs`, `api/volumes.rs`).

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use volley_jobspecs::ids::{SnapshotId, TenantId, VolumeId};
use volley_jobspecs::wire::LEVEL_QUOTAS;
use volley_jobspecs::wire::record::Decision;
use volley_volume::{CollectError, Collected, Collection, Known};

use super::log::LogError;
use super::volumes::{Volumes, pinned_for};
use crate::driver::{Handle, RequestError, wall_ms};
use crate::state::State;

/// How long a coordinator may take to apply what is in the log now.
const LAG_WAIT: Duration = Duration::from_secs(20);

/// Why nothing, or not everything, was collected.
#[derive(Debug, thiserror::Error)]
pub enum CollectVolumesError {
    /// This coordinator has no key.
    #[error("this cluster has no key for volumes; start its coordinators and workers with --volume-keys")]
    NoKey,
    /// It does not know what the log says now.
    #[error("this coordinator is behind the log, and does not know which volumes have a name; ask again in a moment")]
    Behind,
    /// The log does not answer.
    #[error(transparent)]
    Log(#[from] LogError),
    /// The coordinator stops.
    #[error(transparent)]
    Request(#[from] RequestError),
    /// The run.
    #[error(transparent)]
    Collect(#[from] CollectError),
}

/// Collects, or says what would be.
///
/// # Errors
/// [`CollectVolumesError`].
pub async fn collect(volumes: &Volumes, handle: &Handle, name: &str, dry_run: bool) -> Result<Collected, CollectVolumesError> {
    let (_, last, _, _) = handle.log().bounds().await?;
    let since_ms = handle.log().since_ms().await?;
    if !handle.wait_for(last, LAG_WAIT).await {
        return Err(CollectVolumesError::Behind);
    }
    let known = handle.read(move |state, _, _| known(state, since_ms)).await?;
    let name = name.to_owned();
    let done = volumes.with(move |host| host.collect(&Collection { known: &known, name: &name, dry_run, now_ms: &wall_ms }));
    let done = done.await.ok_or(CollectVolumesError::NoKey)??;
    if let Some(decision) = measured(handle, &done.stored).await? {
        handle.record(decision).await?;
    }
    Ok(done)
}

/// What a run has measured of tenants with a limit, if the log does not say the same.
async fn measured(handle: &Handle, stored: &BTreeMap<TenantId, u64>) -> Result<Option<Decision>, RequestError> {
    let stored = stored.clone();
    let decide = move |state: &State| {
        let limited = state.tenants.iter().filter(|(_, tenant)| tenant.policy.stored_bytes_max.is_some());
        let bytes: BTreeMap<TenantId, u64> =
            limited.map(|(name, _)| (name.clone(), stored.get(name).copied().unwrap_or_default())).collect();
        let known = state.head.volumes_stored.as_ref();
        let news = known.map_or(!bytes.is_empty(), |known| *known != bytes) && state.head.level >= LEVEL_QUOTAS;
        news.then_some(Decision::VolumesStored { bytes })
    };
    handle.read(move |state, _, _| decide(state)).await
}

/// What has a name, or is a job's.
fn known(state: &State, since_ms: u64) -> Known {
    let going = state.head.volumes_going.iter().flatten().map(|(_, volume)| *volume);
    let volumes: BTreeSet<VolumeId> = state.volumes.values().map(|volume| volume.id).chain(going).collect();
    let named = state.volumes.values().flat_map(|volume| volume.snapshots.values()).map(|snapshot| snapshot.id);
    // A job's pin keeps its snapshot; this is for the moment between the two.
    let of_jobs = state.jobs.values().flat_map(|job| {
        let pins = job.progress.pins.iter().flatten();
        pins.map(|pin| pin.snapshot.unwrap_or_else(|| pinned_for(job.id, pin.slot)))
    });
    let snapshots: BTreeSet<SnapshotId> = named.chain(of_jobs).collect();
    Known { volumes, snapshots, since_ms }
}
