//! `/v1/gc`: deleting what volumes left in the bucket, when somebody asks for it.
//!
//! Owns that route. Does not own what is deleted (`io/collect`); the leader does the same by itself now and then (`io/garbage`).

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use volley_jobspecs::api::{CollectedView, ErrorBody};
use volley_volume::{CollectError, Collected};

use super::App;
use super::auth::Caller;
use super::error::ApiError;
use super::extract::QueryOf;
use super::volumes::may_have_volumes;
use crate::io::collect::{CollectVolumesError, collect as run};

/// Deletes what volumes left in the bucket and nobody needs. What is found unneeded is deleted by the first run a day later that finds it so too.
#[utoipa::path(post, path = "/v1/gc", operation_id = "collectVolumes", tag = "volumes",
    params(("dryRun" = Option<bool>, Query, description = "Only say what would be done")),
    responses((status = 200, body = CollectedView), (status = 403, body = ErrorBody), (status = 409, body = ErrorBody), (status = 503, body = ErrorBody)))]
pub async fn collect(State(app): State<Arc<App>>, caller: Caller, query: QueryOf) -> Result<Json<CollectedView>, ApiError> {
    let dry_run = query.only(&["dryRun"])?.flag("dryRun")?;
    caller.operators_only()?;
    may_have_volumes(&app).await?;
    match run(&app.volumes, &app.handle, "an operator", dry_run).await {
        Ok(collected) => Ok(Json(view(collected))),
        // Without a key asking again does not help.
        Err(error @ (CollectVolumesError::NoKey | CollectVolumesError::Collect(CollectError::Busy { .. } | CollectError::Overtaken))) => {
            Err(ApiError::conflict(error.to_string()))
        }
        Err(error) => Err(ApiError::unavailable(error.to_string())),
    }
}

fn view(collected: Collected) -> CollectedView {
    CollectedView {
        volumes: collected.volumes,
        snapshots: collected.snapshots,
        objects: collected.objects.0,
        bytes: collected.objects.1,
        condemned_objects: collected.condemned.0,
        condemned_bytes: collected.condemned.1,
        deleted_objects: collected.deleted.0,
        deleted_bytes: collected.deleted.1,
        stored_bytes: collected.stored.into_iter().map(|(tenant, bytes)| (tenant.to_string(), bytes)).collect(),
    }
}
