//! `/v1/workers`: who runs tasks.
//!
//! Owns those routes. Silence, and that a worker drains by its own will, is known only where the leader is; elsewhere it is left out.

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use volley_jobspecs::api::{ErrorBody, KeptView, WorkerView};
use volley_jobspecs::ids::{JobId, WorkerId};
use volley_jobspecs::wire::record::{Control, Verb};

use super::auth::{Caller, random_hex};
use super::error::ApiError;
use super::extract::{PathOf, QueryOf};
use super::{App, views};
use crate::state::rows;

/// Lists the workers that have joined and were not lost.
#[utoipa::path(get, path = "/v1/workers", operation_id = "listWorkers", tag = "workers", responses((status = 200, body = Vec<WorkerView>), (status = 401, body = ErrorBody)))]
pub async fn list(State(app): State<Arc<App>>, caller: Caller, query: QueryOf) -> Result<Json<Vec<WorkerView>>, ApiError> {
    query.only(&[])?;
    let views = app.handle.read(|state, leader, now_ms| {
        let view = |(name, worker)| {
            let heard = leader.and_then(|leader| leader.heard(name, now_ms));
            views::worker(name, worker, state.head.now_ms, heard.as_ref())
        };
        state.workers.iter().map(view).collect::<Vec<_>>()
    });
    let mut views = views.await?;
    for view in &mut views {
        let mut seen = Vec::new();
        for kept in std::mem::take(&mut view.kept) {
            if sees(&app, &caller, &kept)? {
                seen.push(kept);
            }
        }
        view.kept = seen;
    }
    Ok(Json(views))
}

/// May the caller know of it? Workers are everybody's, jobs are not.
fn sees(app: &App, caller: &Caller, kept: &KeptView) -> Result<bool, ApiError> {
    let Ok(job) = kept.job.parse::<JobId>() else { return Ok(false) };
    Ok(rows::facts(app.handle.rows(), job)?.is_some_and(|facts| caller.sees(&facts.tenant)))
}

async fn set(app: &App, caller: &Caller, worker: &str, on: bool) -> Result<StatusCode, ApiError> {
    caller.operators_only()?;
    let shown: String = worker.chars().take(80).collect();
    let worker = WorkerId::new(worker).map_err(|_| ApiError::not_found(format!("no worker {shown:?} (`volley workers` lists them)")))?;
    let actor = caller.controller(random_hex(16)?)?;
    app.handle.control(Control { actor, verb: Verb::Drain { worker, on } }).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Gives a worker nothing more; what it runs may end.
#[utoipa::path(post, path = "/v1/workers/{worker}/drain", operation_id = "drainWorker", tag = "workers", params(("worker" = String, Path, description = "Its name")),
    responses((status = 204), (status = 403, body = ErrorBody), (status = 404, body = ErrorBody)))]
pub async fn drain(
    State(app): State<Arc<App>>,
    caller: Caller,
    PathOf(worker): PathOf<String>,
    query: QueryOf,
) -> Result<StatusCode, ApiError> {
    query.only(&[])?;
    set(&app, &caller, &worker, true).await
}

/// Gives a drained worker work again.
#[utoipa::path(post, path = "/v1/workers/{worker}/resume", operation_id = "resumeWorker", tag = "workers", params(("worker" = String, Path, description = "Its name")),
    responses((status = 204), (status = 403, body = ErrorBody), (status = 404, body = ErrorBody)))]
pub async fn resume(
    State(app): State<Arc<App>>,
    caller: Caller,
    PathOf(worker): PathOf<String>,
    query: QueryOf,
) -> Result<StatusCode, ApiError> {
    query.only(&[])?;
    set(&app, &caller, &worker, false).await
}
