//! `/v1/jobs/{job}/tasks/{index}/outputs`: the files a task left.
//!
//! Owns which attempt's files are meant and streaming them from the bucket. Does not own how they got there (the worker's `persist`).

use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use tokio_util::io::ReaderStream;
use volley_jobspecs::api::{ErrorBody, OutputFile};
use volley_jobspecs::ids::JobId;
use volley_jobspecs::keys;
use volley_jobspecs::wire::report::Ending;

use super::App;
use super::auth::Caller;
use super::error::ApiError;
use super::extract::{PathOf, QueryOf, job_id, task_index};
use super::tasks::stored;
use crate::state::effects::AttemptRow;
use crate::state::rows;

/// Largest list of output files that is read, in bytes: some hundred thousand files.
const LIST_BYTES_MAX: u64 = 32 * 1024 * 1024;
/// Bytes of an object handed on at once.
const STREAM_BYTES: usize = 64 * 1024;

/// The attempt that is meant: the named one, else the one that succeeded, else the last that ended.
///
/// # Errors
/// 404 when a named one is not among those that have ended.
pub fn attempt(app: &App, id: JobId, index: u32, number: Option<u32>) -> Result<Option<AttemptRow>, ApiError> {
    let mut ended: Vec<AttemptRow> = rows::attempts(app.handle.rows(), id, index)?.into_iter().map(|(_, row)| row).collect();
    match number {
        Some(number) => match ended.into_iter().find(|row| row.end.name.number == number) {
            Some(row) => Ok(Some(row)),
            None => Err(ApiError::not_found(format!("no attempt {number} of task {index} of job {id} has ended"))),
        },
        None => {
            let best = ended.iter().rposition(|row| row.end.ending == Ending::Succeeded).or(ended.len().checked_sub(1));
            Ok(best.map(|at| ended.swap_remove(at)))
        }
    }
}

/// Lists the output files of a task: of the attempt that decided it, or of the one named.
#[utoipa::path(get, path = "/v1/jobs/{job}/tasks/{index}/outputs", operation_id = "listOutputs", tag = "tasks",
    params(("job" = String, Path, description = "The job"), ("index" = u32, Path, description = "The task, from 0"),
        ("attempt" = Option<u32>, Query, description = "Of this attempt, from 1")),
    responses((status = 200, body = Vec<OutputFile>), (status = 404, body = ErrorBody), (status = 503, body = ErrorBody)))]
pub async fn list(
    State(app): State<Arc<App>>,
    caller: Caller,
    PathOf((job, index)): PathOf<(String, String)>,
    query: QueryOf,
) -> Result<Json<Vec<OutputFile>>, ApiError> {
    let query = query.only(&["attempt"])?;
    let (id, index) = (job_id(&job)?, task_index(&index)?);
    let (facts, _) = app.job(&caller, id)?;
    stored(&app, id, &facts, index)?;
    let row = attempt(&app, id, index, query.parse("attempt", "a number from 1")?)?;
    let Some(row) = row.filter(|row| row.end.outputs.is_some()) else { return Ok(Json(Vec::new())) };
    let listed = app.store.get(&keys::attempt_manifest(&row.end.name), LIST_BYTES_MAX).await;
    let listed = listed.map_err(|error| ApiError::store(error.kind(), format!("the list of output files: {error}")))?;
    let files = serde_json::from_slice(&listed);
    files.map(Json).map_err(|error| ApiError::unavailable(format!("the list of output files in the bucket is damaged: {error}")))
}

/// Fetches an output file.
#[utoipa::path(get, path = "/v1/jobs/{job}/tasks/{index}/outputs/{*path}", operation_id = "getOutput", tag = "tasks",
    params(("job" = String, Path, description = "The job"), ("index" = u32, Path, description = "The task, from 0"),
        ("path" = String, Path, description = "The file, as listed"), ("attempt" = Option<u32>, Query, description = "Of this attempt, from 1")),
    responses((status = 200, content_type = "application/octet-stream"), (status = 404, body = ErrorBody), (status = 503, body = ErrorBody)))]
pub async fn get(
    State(app): State<Arc<App>>,
    caller: Caller,
    PathOf((job, index, path)): PathOf<(String, String, String)>,
    query: QueryOf,
) -> Result<Response, ApiError> {
    let query = query.only(&["attempt"])?;
    let (id, index) = (job_id(&job)?, task_index(&index)?);
    let (facts, _) = app.job(&caller, id)?;
    stored(&app, id, &facts, index)?;
    let row = attempt(&app, id, index, query.parse("attempt", "a number from 1")?)?;
    let shown: String = path.chars().take(200).collect();
    let none = || ApiError::not_found(format!("task {index} of job {id} left no file {shown:?}; GET …/outputs lists what it left"));
    // A key is never resolved like a path, but nobody should have to know that to be sure.
    let plain = path.split('/').all(|part| !matches!(part, "" | "." | "..")) && !path.contains('\0');
    let row = row.filter(|row| plain && row.end.outputs.is_some()).ok_or_else(none)?;
    let opened = app.store.get_stream(&keys::attempt_output(&row.end.name, &path)).await;
    let stream = opened.map_err(|error| match error.kind() {
        volley_store::ErrorKind::NotFound => none(),
        kind => ApiError::store(kind, error.to_string()),
    })?;
    let bytes = stream.bytes;
    let body = Body::from_stream(ReaderStream::with_capacity(stream, STREAM_BYTES));
    let mut response = body.into_response();
    response.headers_mut().insert(header::CONTENT_TYPE, HeaderValue::from_static("application/octet-stream"));
    response.headers_mut().insert(header::CONTENT_LENGTH, HeaderValue::from(bytes));
    Ok(response)
}
