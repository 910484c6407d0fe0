//! `…/explain`: why a task or a job does not run, or ended as it did.
//!
//! Owns those routes, and which of the two questions is answered: what has ended is explained from its rows, what has not from the
//! state. Does not own the reasons (`crate::explain`).

use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use volley_jobspecs::api::{ErrorBody, Explanation};
use volley_jobspecs::ids::{JobId, WorkerId};
use volley_jobspecs::wire::report::Cause;

use super::auth::Caller;
use super::error::ApiError;
use super::extract::{PathOf, QueryOf, job_id, task_index};
use super::tasks::stored;
use super::{App, views};
use crate::explain::ended::{self, EndedTask};
use crate::explain::{Heard, explain, explain_job};
use crate::leader::Leader;
use crate::state::{self, rows};

/// Says why a task does not run: what of its job, and what of each worker, stands in the way. Of one that has ended: why, after which
/// tries, which rule decided, and what can be done.
#[utoipa::path(get, path = "/v1/jobs/{job}/tasks/{index}/explain", operation_id = "explainTask", tag = "tasks",
    params(("job" = String, Path, description = "The job"), ("index" = u32, Path, description = "The task, from 0")),
    responses((status = 200, body = Explanation), (status = 404, body = ErrorBody)))]
pub async fn task(
    State(app): State<Arc<App>>,
    caller: Caller,
    PathOf((job, index)): PathOf<(String, String)>,
    query: QueryOf,
) -> Result<Json<Explanation>, ApiError> {
    query.only(&[])?;
    let (id, index) = (job_id(&job)?, task_index(&index)?);
    let (facts, progress) = app.job(&caller, id)?;
    let (cell, _) = stored(&app, id, &facts, index)?;
    let attempts = rows::attempts(app.handle.rows(), id, index)?;
    if views::ended(&cell, progress.rest) {
        let task = EndedTask { job: id, index, facts: &facts, progress: &progress, cell, attempts: &attempts };
        return Ok(Json(ended::task(&task)));
    }
    let failed_on = attempts.last().map(|(_, row)| row.worker.clone());
    let cause = attempts.last().and_then(|(_, row)| row.end.cause);
    waiting(&app, (failed_on, cause), move |state, heard| explain(state, id, index, heard)).await
}

/// Says why a job does not go on, or why it ended as it did.
#[utoipa::path(get, path = "/v1/jobs/{job}/explain", operation_id = "explainJob", tag = "jobs", params(("job" = String, Path, description = "The job")),
    responses((status = 200, body = Explanation), (status = 404, body = ErrorBody)))]
pub async fn job(
    State(app): State<Arc<App>>,
    caller: Caller,
    PathOf(job): PathOf<String>,
    query: QueryOf,
) -> Result<Json<Explanation>, ApiError> {
    query.only(&[])?;
    let id: JobId = job_id(&job)?;
    let (facts, progress) = app.job(&caller, id)?;
    if progress.ended_ms.is_some() {
        return Ok(Json(ended::job(id, &facts, &progress)));
    }
    waiting(&app, (None, None), move |state, heard| explain_job(state, id, heard)).await
}

async fn waiting(
    app: &App,
    (failed_on, cause): (Option<WorkerId>, Option<Cause>),
    explain: impl FnOnce(&state::State, &Heard) -> Explanation + Send + 'static,
) -> Result<Json<Explanation>, ApiError> {
    let read = move |state: &state::State, leader: Option<&Leader>, now_ms: u64| {
        let all = |leader: &Leader| state.workers.keys().filter_map(|name| Some((name.clone(), leader.heard(name, now_ms)?))).collect();
        explain(state, &Heard { workers: leader.map(all).unwrap_or_default(), failed_on, cause })
    };
    Ok(Json(app.handle.read(read).await?))
}
