//! `/v1/volumes`: making, listing, cloning and removing volumes and their snapshots.
//!
//! Owns those routes. What is in the bucket is made first and named by a record then: what a request leaves behind that failed in between is nobody's,
//! and is collected. Does not own heads (`io/volumes`) or what may be done when (`volumes`).

use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::http::StatusCode;
use volley_jobspecs::api::{ErrorBody, ResizeRequest, SnapshotRequest, SnapshotView, VolumeRequest, VolumeView};
use volley_jobspecs::ids::{SnapshotId, TenantId, VolumeId};
use volley_jobspecs::spec::Flush;
use volley_jobspecs::spec::volumes::{check_name, parse_name};
use volley_jobspecs::wire::record::{Control, Verb};
use volley_jobspecs::wire::{LEVEL_GROWTH, LEVEL_VOLUMES};
use volley_volume::format::head::FlushMode;
use volley_volume::format::{BLOCK, SIZE_MAX, SIZE_MIN};
use volley_volume::{Host, NewVolume, OpenError};

use super::App;
use super::auth::{Caller, random_hex};
use super::error::ApiError;
use super::extract::{PathOf, QueryOf, json};
use super::views::instant;
use crate::state::effects::Refusal;
use crate::state::volume::{Snapshot, Volume};
use crate::volumes::holder;

fn view(name: &str, volume: &Volume) -> VolumeView {
    let snapshot = |(name, snapshot): (&String, &Snapshot)| SnapshotView {
        name: name.clone(),
        id: snapshot.id.to_string(),
        size_bytes: snapshot.size_bytes,
        created: instant(snapshot.created_ms),
    };
    VolumeView {
        name: name.to_owned(),
        id: volume.id.to_string(),
        size_bytes: volume.size_bytes,
        generation: volume.generation,
        created: instant(volume.created_ms),
        held_by: (!volume.is_free()).then(|| holder(volume)),
        growing_to_bytes: volume.growth,
        snapshots: volume.snapshots.iter().map(snapshot).collect(),
    }
}

/// A volume of a tenant.
pub(super) async fn found(app: &App, tenant: &TenantId, name: &str) -> Result<Volume, ApiError> {
    let key = (tenant.clone(), name.to_owned());
    let found = app.handle.read(move |state, _, _| state.volumes.get(&key).cloned()).await?;
    found.ok_or_else(|| Refusal::VolumeMissing(name.to_owned()).into())
}

async fn shown(app: &App, tenant: &TenantId, name: &str) -> Result<Json<VolumeView>, ApiError> {
    found(app, tenant, name).await.map(|volume| Json(view(name, &volume)))
}

/// Does this cluster have volumes?
///
/// # Errors
/// 503 while it is upgraded, 409 without a key: asking again does not help then.
pub(super) async fn may_have_volumes(app: &App) -> Result<(), ApiError> {
    if super::submit::level(app).await? < LEVEL_VOLUMES {
        return Err(ApiError::unavailable("not every coordinator of the cluster knows volumes yet; upgrade all of them"));
    }
    if app.volumes.are_on() {
        return Ok(());
    }
    Err(ApiError::conflict("this cluster has no key for volumes; start its coordinators and workers with --volume-keys"))
}

/// Does something in the bucket.
async fn in_bucket<T: Send + 'static>(app: &App, work: impl FnOnce(&Host) -> Result<T, OpenError> + Send + 'static) -> Result<T, ApiError> {
    may_have_volumes(app).await?;
    match app.volumes.with(work).await {
        Some(Ok(done)) => Ok(done),
        Some(Err(OpenError::Move(error))) => Err(ApiError::conflict(error.to_string())),
        Some(Err(error)) => Err(ApiError::unavailable(format!("the bucket: {error}"))),
        None => Err(ApiError::unavailable("what was asked for ended early; try again")),
    }
}

async fn record(app: &App, caller: &Caller, verb: Verb) -> Result<(), ApiError> {
    // Of the tenant that is asked for, also where an operator asks.
    let actor = caller.submitter(random_hex(16)?);
    app.handle.control(Control { actor, verb }).await?;
    Ok(())
}

fn checked(what: &str, name: &str) -> Result<(), ApiError> {
    check_name(name).map_err(|why| {
        ApiError::bad_request(format!(
            "{name:?} is no name for a {what}: {why}; use 1 to 128 of a-z A-Z 0-9 . _ -, beginning with a letter or digit"
        ))
    })
}

fn size_of(size: Option<u64>) -> Result<u64, ApiError> {
    let size = size.ok_or_else(|| ApiError::bad_request("\"sizeBytes\" is missing; a new volume needs one"))?;
    if !(SIZE_MIN..=SIZE_MAX).contains(&size) {
        return Err(ApiError::bad_request(format!("\"sizeBytes\" is {size}; allowed: 1 MiB to 16 TiB")));
    }
    Ok(size.next_multiple_of(BLOCK))
}

fn flush_of(flush: Option<Flush>) -> FlushMode {
    match flush.unwrap_or(Flush::Local) {
        Flush::None => FlushMode::None,
        Flush::Local => FlushMode::Local,
        Flush::S3 => FlushMode::S3,
    }
}

fn random_id() -> Result<[u8; 16], ApiError> {
    let mut id = [0; 16];
    getrandom::fill(&mut id).map_err(|e| ApiError::unavailable(format!("the system gives no random numbers: {e}")))?;
    Ok(id)
}

/// Lists the volumes.
#[utoipa::path(get, path = "/v1/volumes", operation_id = "listVolumes", tag = "volumes", responses((status = 200, body = Vec<VolumeView>)))]
pub async fn list(State(app): State<Arc<App>>, caller: Caller, query: QueryOf) -> Result<Json<Vec<VolumeView>>, ApiError> {
    query.only(&[])?;
    let tenant = caller.tenant.clone();
    let all = app.handle.read(move |state, _, _| {
        let from = (tenant.clone(), String::new());
        let of = state.volumes.range(from..).take_while(|((whose, _), _)| *whose == tenant);
        of.map(|((_, name), volume)| view(name, volume)).collect()
    });
    Ok(Json(all.await?))
}

/// Shows a volume.
#[utoipa::path(get, path = "/v1/volumes/{name}", operation_id = "getVolume", tag = "volumes", params(("name" = String, Path, description = "The volume's name")),
    responses((status = 200, body = VolumeView), (status = 404, body = ErrorBody)))]
pub async fn show(
    State(app): State<Arc<App>>,
    caller: Caller,
    PathOf(name): PathOf<String>,
    query: QueryOf,
) -> Result<Json<VolumeView>, ApiError> {
    query.only(&[])?;
    shown(&app, &caller.tenant, &name).await
}

/// Makes a volume: a new one, which reads as zeros, or a clone of a snapshot.
#[utoipa::path(post, path = "/v1/volumes", operation_id = "createVolume", tag = "volumes", request_body = VolumeRequest,
    responses((status = 201, body = VolumeView), (status = 400, body = ErrorBody), (status = 404, body = ErrorBody), (status = 409, body = ErrorBody), (status = 503, body = ErrorBody)))]
pub async fn create(
    State(app): State<Arc<App>>,
    caller: Caller,
    query: QueryOf,
    body: Body,
) -> Result<(StatusCode, Json<VolumeView>), ApiError> {
    query.only(&[])?;
    let request: VolumeRequest = json(body, None).await?;
    checked("volume", &request.name)?;
    let (tenant, flush, volume) = (caller.tenant.clone(), flush_of(request.flush), VolumeId(random_id()?));
    // Told before anything is made; the record decides.
    if found(&app, &tenant, &request.name).await.is_ok() {
        return Err(Refusal::VolumeExists(request.name).into());
    }
    let size_bytes = match &request.from {
        None => {
            let size = size_of(request.size_bytes)?;
            in_bucket(&app, move |host| host.create(NewVolume { volume, tenant, size, flush })).await?;
            size
        }
        Some(from) => {
            if request.size_bytes.is_some() {
                return Err(ApiError::bad_request("\"sizeBytes\" can't be given with \"from\": a clone is as large as its snapshot"));
            }
            let snapshot = snapshot_of(&app, &tenant, from).await?;
            in_bucket(&app, move |host| host.clone_named(snapshot.id, volume, flush)).await?;
            snapshot.size_bytes
        }
    };
    record(&app, &caller, Verb::PutVolume { name: request.name.clone(), volume, size_bytes }).await?;
    Ok((StatusCode::CREATED, shown(&app, &caller.tenant, &request.name).await?))
}

async fn snapshot_of(app: &App, tenant: &TenantId, text: &str) -> Result<Snapshot, ApiError> {
    let parsed = parse_name(text).ok().and_then(|(volume, snapshot)| Some((volume, snapshot?)));
    let (volume, name) = parsed.ok_or_else(|| ApiError::bad_request(format!("\"from\" is {text:?}; allowed: VOLUME@SNAPSHOT")))?;
    let found = found(app, tenant, volume).await?;
    let missing = || Refusal::SnapshotMissing { name: volume.to_owned(), snapshot: name.to_owned() };
    found.snapshots.get(name).copied().ok_or_else(|| missing().into())
}

/// Lets a volume grow that nobody writes. The answer comes when that is decided; `growingToBytes` goes when it is done.
#[utoipa::path(post, path = "/v1/volumes/{name}/resize", operation_id = "resizeVolume", tag = "volumes", params(("name" = String, Path, description = "The volume's name")),
    request_body = ResizeRequest, responses((status = 200, body = VolumeView), (status = 400, body = ErrorBody), (status = 404, body = ErrorBody), (status = 409, body = ErrorBody), (status = 503, body = ErrorBody)))]
pub async fn resize(
    State(app): State<Arc<App>>,
    caller: Caller,
    PathOf(name): PathOf<String>,
    query: QueryOf,
    body: Body,
) -> Result<Json<VolumeView>, ApiError> {
    query.only(&[])?;
    let request: ResizeRequest = json(body, None).await?;
    let size_bytes = size_of(Some(request.size_bytes))?;
    let volume = found(&app, &caller.tenant, &name).await?.id;
    if super::submit::level(&app).await? < LEVEL_GROWTH {
        return Err(ApiError::unavailable("not every coordinator of the cluster lets volumes grow yet; upgrade all of them"));
    }
    record(&app, &caller, Verb::GrowVolume { name: name.clone(), volume, size_bytes }).await?;
    shown(&app, &caller.tenant, &name).await
}

/// Removes a volume that nobody writes, with its snapshots. What jobs have pinned stays as long as they do.
#[utoipa::path(delete, path = "/v1/volumes/{name}", operation_id = "removeVolume", tag = "volumes", params(("name" = String, Path, description = "The volume's name")),
    responses((status = 204), (status = 404, body = ErrorBody), (status = 409, body = ErrorBody), (status = 503, body = ErrorBody)))]
pub async fn remove(
    State(app): State<Arc<App>>,
    caller: Caller,
    PathOf(name): PathOf<String>,
    query: QueryOf,
) -> Result<StatusCode, ApiError> {
    query.only(&[])?;
    // Checked first, so that a mistyped name costs no record.
    found(&app, &caller.tenant, &name).await?;
    record(&app, &caller, Verb::RemoveVolume { name }).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Makes a snapshot of a volume as it was last accepted: what a task is writing now is not in it.
#[utoipa::path(post, path = "/v1/volumes/{name}/snapshots", operation_id = "createSnapshot", tag = "volumes", params(("name" = String, Path, description = "The volume's name")),
    request_body = SnapshotRequest, responses((status = 201, body = VolumeView), (status = 400, body = ErrorBody), (status = 404, body = ErrorBody), (status = 409, body = ErrorBody), (status = 503, body = ErrorBody)))]
pub async fn snapshot(
    State(app): State<Arc<App>>,
    caller: Caller,
    PathOf(name): PathOf<String>,
    query: QueryOf,
    body: Body,
) -> Result<(StatusCode, Json<VolumeView>), ApiError> {
    query.only(&[])?;
    let request: SnapshotRequest = json(body, None).await?;
    checked("snapshot", &request.name)?;
    let found = found(&app, &caller.tenant, &name).await?;
    // A volume that a task was to make has no head until the task began.
    if found.is_to_be_made() {
        let text = format!("volume {name} was never accepted yet, and {}; wait for it", holder(&found));
        return Err(ApiError::conflict(text));
    }
    let (volume, id) = (found.id, SnapshotId(random_id()?));
    in_bucket(&app, move |host| host.snapshot_accepted(volume, id)).await?;
    let verb = Verb::PutSnapshot { name: name.clone(), volume, snapshot: request.name, id, size_bytes: found.size_bytes };
    record(&app, &caller, verb).await?;
    Ok((StatusCode::CREATED, shown(&app, &caller.tenant, &name).await?))
}

/// Removes a snapshot's name. What jobs have pinned stays as long as they do.
#[utoipa::path(delete, path = "/v1/volumes/{name}/snapshots/{snapshot}", operation_id = "removeSnapshot", tag = "volumes",
    params(("name" = String, Path, description = "The volume's name"), ("snapshot" = String, Path, description = "The snapshot's name")),
    responses((status = 204), (status = 404, body = ErrorBody), (status = 503, body = ErrorBody)))]
pub async fn remove_snapshot(
    State(app): State<Arc<App>>,
    caller: Caller,
    PathOf((name, snapshot)): PathOf<(String, String)>,
    query: QueryOf,
) -> Result<StatusCode, ApiError> {
    query.only(&[])?;
    found(&app, &caller.tenant, &name).await?;
    record(&app, &caller, Verb::RemoveSnapshot { name, snapshot }).await?;
    Ok(StatusCode::NO_CONTENT)
}
