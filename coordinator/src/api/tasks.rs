//! `/v1/jobs/{job}/tasks`: tasks and their attempts.
//!
//! Owns those routes. Tasks are read from their pages; only who holds a task is asked of the driver. Does not own logs, outputs and
//! explanations.

use std::collections::BTreeMap;
use std::sync::Arc;

use axum::Json;
use axum::extract::State;
use volley_jobspecs::api::{AttemptView, ErrorBody, Page, TaskState, TaskView};
use volley_jobspecs::ids::{AttemptName, JobId, WorkerId};
use volley_jobspecs::units;

use super::auth::Caller;
use super::error::ApiError;
use super::extract::{PathOf, QueryOf, job_id, task_index};
use super::{App, blocking, views};
use crate::state::job::{Facts, Progress};
use crate::state::rows;
use crate::state::task::{self, Cell, PAGE_TASKS};

/// Task pages looked at for one page of rows: 1,000,000 tasks. A filter that few pass ends a page early.
const PAGES_SCANNED_MAX: u32 = 245;
/// Attempts of a task that are listed: more than any budget allows.
const ATTEMPTS_MAX: usize = 1_000;

/// A task's stored cell and when its next try is due.
type Stored = (Cell, Option<u64>);

fn cells(page: Option<&task::Page>, number: u32, tasks: u32) -> Vec<Stored> {
    match page {
        None => vec![(Cell::FRESH, None); tasks.saturating_sub(number * PAGE_TASKS).min(PAGE_TASKS) as usize],
        Some(page) => page.cells().iter().zip(0u16..).map(|(cell, place)| (*cell, page.due.get(&place).copied())).collect(),
    }
}

/// Who holds tasks of a job, by task: the attempt, the worker, and since when, in milliseconds since 1970.
pub async fn holders(app: &App, job: JobId, wanted: Vec<u32>) -> Result<BTreeMap<u32, (AttemptName, WorkerId, u64)>, ApiError> {
    let read = move |state: &crate::state::State, _: Option<&crate::leader::Leader>, _: u64| {
        let mut found = BTreeMap::new();
        let Some(in_memory) = state.jobs.get(&job) else { return found };
        let open: BTreeMap<_, _> = wanted.iter().filter_map(|index| Some((*index, in_memory.open.get(index)?))).collect();
        for (index, attempt) in open {
            let holder = state.workers.iter().find_map(|(name, worker)| Some((name, worker.bundles.get(&attempt.bundle)?)));
            if let Some((worker, bundle)) = holder {
                let name = AttemptName { job, stage: 0, index, number: u32::from(attempt.number), sequence: attempt.bundle.sequence };
                found.insert(index, (name, worker.clone(), bundle.assigned_ms));
            }
        }
        found
    };
    Ok(app.handle.read(read).await?)
}

/// Lists tasks in the order of their indexes.
#[utoipa::path(get, path = "/v1/jobs/{job}/tasks", operation_id = "listTasks", tag = "tasks",
    params(("job" = String, Path, description = "The job"), ("state" = Option<TaskState>, Query, description = "Only those in this state"),
        ("limit" = Option<u32>, Query, description = "Rows, 1 to 1000; 100 by default"), ("after" = Option<u32>, Query, description = "`next` of the page before")),
    responses((status = 200, body = Page<TaskView>), (status = 400, body = ErrorBody), (status = 404, body = ErrorBody)))]
pub async fn list(
    State(app): State<Arc<App>>,
    caller: Caller,
    PathOf(job): PathOf<String>,
    query: QueryOf,
) -> Result<Json<Page<TaskView>>, ApiError> {
    let query = query.only(&["state", "limit", "after"])?;
    let wanted = query.get("state").map(|text| {
        let known = serde_json::from_value::<TaskState>(serde_json::Value::from(text));
        known.map_err(|_| ApiError::bad_request("query parameter state: allowed: waiting, running, backoff, succeeded, failed, cancelled"))
    });
    let (wanted, limit) = (wanted.transpose()?, query.limit()?);
    let after = query.parse::<u32>("after", "the index of a task")?;
    let id = job_id(&job)?;
    let (facts, progress) = app.job(&caller, id)?;
    let shared = app.clone();
    let read = move || select(&shared, id, &facts, &progress, wanted, after.map_or(0, |after| after.saturating_add(1)), limit);
    let (found, next, rest) = blocking(read).await?;
    let running = found.iter().filter(|(_, (cell, _))| cell.held).map(|(index, _)| *index).collect();
    let holders = holders(&app, id, running).await?;
    let rows =
        found.iter().map(|(index, (cell, due))| views::task(*index, cell, rest, *due, holders.get(index).map(|(_, worker, _)| worker)));
    Ok(Json(Page { rows: rows.collect(), next: next.map(|index| index.to_string()) }))
}

type Selected = (Vec<(u32, Stored)>, Option<u32>, Option<volley_jobspecs::failure::FailureClass>);

/// Tasks from `first` on that are in the wanted state; and, when there may be more, the last one that was looked at.
fn select(
    app: &App,
    id: JobId,
    facts: &Facts,
    progress: &Progress,
    wanted: Option<TaskState>,
    first: u32,
    limit: usize,
) -> Result<Selected, ApiError> {
    let tasks = facts.plan.tasks;
    let mut found = Vec::new();
    let mut index = first;
    let pages_end = (first / PAGE_TASKS).saturating_add(PAGES_SCANNED_MAX);
    while index < tasks && index / PAGE_TASKS < pages_end {
        let number = index / PAGE_TASKS;
        let page = rows::page(app.handle.rows(), id, number)?;
        for stored in cells(page.as_ref(), number, tasks).into_iter().skip((index % PAGE_TASKS) as usize) {
            if wanted.is_none_or(|wanted| wanted == views::task_state(&stored.0, progress.rest).0) {
                found.push((index, stored));
            }
            index += 1;
            if found.len() == limit {
                return Ok((found, (index < tasks).then(|| index - 1), progress.rest));
            }
        }
        // A stored page that is shorter than it should be must not stop us here for ever.
        index = index.max((number + 1) * PAGE_TASKS);
    }
    Ok((found, (index < tasks).then(|| index - 1), progress.rest))
}

/// A task's stored cell.
///
/// # Errors
/// 404 when the job has no such task.
pub fn stored(app: &App, id: JobId, facts: &Facts, index: u32) -> Result<Stored, ApiError> {
    let tasks = facts.plan.tasks;
    if index >= tasks {
        let them = units::counted(u64::from(tasks), "task is", "tasks are");
        return Err(ApiError::not_found(format!("job {id} has no task {index}: its {them} counted from 0")));
    }
    let page = rows::page(app.handle.rows(), id, index / PAGE_TASKS)?;
    let cells = cells(page.as_ref(), index / PAGE_TASKS, tasks);
    Ok(cells.get((index % PAGE_TASKS) as usize).copied().unwrap_or((Cell::FRESH, None)))
}

/// Looks at a task.
#[utoipa::path(get, path = "/v1/jobs/{job}/tasks/{index}", operation_id = "getTask", tag = "tasks",
    params(("job" = String, Path, description = "The job"), ("index" = u32, Path, description = "The task, from 0")),
    responses((status = 200, body = TaskView), (status = 404, body = ErrorBody)))]
pub async fn get(
    State(app): State<Arc<App>>,
    caller: Caller,
    PathOf((job, index)): PathOf<(String, String)>,
    query: QueryOf,
) -> Result<Json<TaskView>, ApiError> {
    query.only(&[])?;
    let (id, index) = (job_id(&job)?, task_index(&index)?);
    let (facts, progress) = app.job(&caller, id)?;
    let (cell, due) = stored(&app, id, &facts, index)?;
    let holders = holders(&app, id, vec![index]).await?;
    Ok(Json(views::task(index, &cell, progress.rest, due, holders.get(&index).map(|(_, worker, _)| worker))))
}

/// Lists a task's attempts, the first one first; one that is with a worker is the last.
#[utoipa::path(get, path = "/v1/jobs/{job}/tasks/{index}/attempts", operation_id = "listAttempts", tag = "tasks",
    params(("job" = String, Path, description = "The job"), ("index" = u32, Path, description = "The task, from 0")),
    responses((status = 200, body = Vec<AttemptView>), (status = 404, body = ErrorBody)))]
pub async fn attempts(
    State(app): State<Arc<App>>,
    caller: Caller,
    PathOf((job, index)): PathOf<(String, String)>,
    query: QueryOf,
) -> Result<Json<Vec<AttemptView>>, ApiError> {
    query.only(&[])?;
    let (id, index) = (job_id(&job)?, task_index(&index)?);
    let (facts, _) = app.job(&caller, id)?;
    stored(&app, id, &facts, index)?;
    let holder = holders(&app, id, vec![index]).await?.remove(&index);
    let ended = rows::attempts(app.handle.rows(), id, index)?;
    let url = |key: &str| app.store.url(key);
    let mut views: Vec<_> = ended.iter().take(ATTEMPTS_MAX).map(|(_, row)| views::attempt(row, &url)).collect();
    if let Some((name, worker, assigned_ms)) = holder
        && !views.iter().any(|view| view.number == name.number)
    {
        views.push(views::open_attempt(&name, &worker, facts.plan.needs.isolation.as_str(), assigned_ms, &url));
    }
    Ok(Json(views))
}
