//! `POST /v1/uploads`: a file for items or inputs, streamed into the bucket.
//!
//! Owns the id and the limits. A file is in memory only in parts. Does not own what becomes of it: specs name it by its id.

use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode, header};
use futures::TryStreamExt;
use tokio::sync::Semaphore;
use tokio_util::io::StreamReader;
use volley_jobspecs::api::{ErrorBody, UploadAnswer};
use volley_jobspecs::keys;
use volley_jobspecs::wire::LEVEL_KEEPING;
use volley_jobspecs::wire::record::{Control, Verb};
use volley_store::{UploadError, UploadOptions};

use super::App;
use super::auth::{Caller, random_hex};
use super::error::ApiError;
use super::extract::QueryOf;
use crate::state::effects::Refusal;

/// Largest upload when the configuration doesn't say, in bytes.
pub const UPLOAD_BYTES_MAX: u64 = 50 * 1024 * 1024 * 1024;
/// Uploads at once: each holds up to 40 MiB of parts.
const UPLOADS_MAX: usize = 8;
/// How long an upload waits for its turn.
const TURN_WAIT: Duration = Duration::from_secs(30);

static TURNS: Semaphore = Semaphore::const_new(UPLOADS_MAX);

/// Uploads a file. Name it in a spec as `upload: <id>` (items) or `upload:<id>` (inputs).
#[utoipa::path(post, path = "/v1/uploads", operation_id = "upload", tag = "uploads", request_body(content_type = "application/octet-stream", description = "The file"),
    responses((status = 201, body = UploadAnswer), (status = 400, body = ErrorBody), (status = 413, body = ErrorBody), (status = 503, body = ErrorBody)))]
pub async fn upload(
    State(app): State<Arc<App>>,
    caller: Caller,
    query: QueryOf,
    headers: HeaderMap,
    body: Body,
) -> Result<(StatusCode, Json<UploadAnswer>), ApiError> {
    query.only(&[])?;
    let bytes_hint: Option<u64> = headers.get(header::CONTENT_LENGTH).and_then(|value| value.to_str().ok()?.parse().ok());
    let too_large = || {
        ApiError::too_large(format!(
            "the file has more than the {} bytes this cluster takes; put it into the bucket yourself and name it as s3://…",
            app.upload_bytes_max
        ))
    };
    if bytes_hint.is_some_and(|bytes| bytes > app.upload_bytes_max) {
        return Err(too_large());
    }
    let tenant = caller.tenant.clone();
    if !app.handle.read(move |state, _, _| state.tenants.contains_key(&tenant)).await? {
        return Err(Refusal::NoTenant(caller.tenant).into());
    }
    let turn = tokio::time::timeout(TURN_WAIT, TURNS.acquire()).await;
    let Ok(Ok(_turn)) = turn else {
        return Err(ApiError::new(
            StatusCode::SERVICE_UNAVAILABLE,
            "overloaded",
            format!("{UPLOADS_MAX} uploads are under way here; try again in a moment"),
        ));
    };
    let id = format!("u{}", random_hex(12)?);
    let reader = StreamReader::new(body.into_data_stream().map_err(std::io::Error::other));
    let options = UploadOptions { bytes_hint, bytes_max: Some(app.upload_bytes_max), content_type: None };
    match app.store.upload_stream(&keys::upload(&caller.tenant, &id), reader, &options).await {
        Ok(uploaded) => {
            record(&app, &caller, &id).await?;
            Ok((StatusCode::CREATED, Json(UploadAnswer { id, bytes: uploaded.bytes, sha256: uploaded.sha256 })))
        }
        Err(UploadError::TooLarge { .. }) => Err(too_large()),
        Err(UploadError::Read { bytes, source, .. }) => {
            Err(ApiError::bad_request(format!("the body broke off after {bytes} bytes: {source}")))
        }
        Err(error) => Err(ApiError::store(error.kind(), format!("storing the upload: {error}"))),
    }
}

/// Records the upload, so that it goes one day. One that can't be recorded is deleted at once.
async fn record(app: &App, caller: &Caller, id: &str) -> Result<(), ApiError> {
    if super::submit::level(app).await? < LEVEL_KEEPING {
        return Ok(());
    }
    let control = Control { actor: caller.submitter(random_hex(16)?), verb: Verb::Uploaded { id: id.to_owned() } };
    if let Err(error) = app.handle.control(control).await {
        _ = app.store.delete(&keys::upload(&caller.tenant, id)).await;
        return Err(error.into());
    }
    Ok(())
}
