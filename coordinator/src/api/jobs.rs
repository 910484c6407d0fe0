//! `/v1/jobs`: list, look at, cancel, pause, resume, rerun and remove jobs.
//!
//! Owns those routes. Does not own submitting (`submit`) or anything of single tasks (`tasks`).

use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::http::{StatusCode, header};
use axum::response::{IntoResponse, Response};
use volley_jobspecs::api::{CancelRequest, ErrorBody, JobState, JobView, Page};
use volley_jobspecs::ids::JobId;
use volley_jobspecs::keys;
use volley_jobspecs::wire::plan::SpecRef;
use volley_jobspecs::wire::record::{Control, Verb};

use super::auth::{Caller, random_hex};
use super::error::ApiError;
use super::extract::{PathOf, QueryOf, job_id, json};
use super::{App, blocking, views};
use crate::leader::Leader;
use crate::state::job::{Facts, Progress};
use crate::state::rows::{self, RowsError, Table};

/// Jobs looked at for one page: a filter that few jobs pass ends a page early rather than reading for ever.
const JOBS_SCANNED_MAX: usize = 10_000;
/// Longest reason of a cancel, in bytes: it is kept in memory with the job.
const REASON_BYTES_MAX: usize = 1_024;

/// What a listed job must be.
#[derive(Debug, Default)]
struct Filter {
    state: Option<JobState>,
    name: Option<String>,
    labels: Vec<(String, String)>,
}

impl Filter {
    fn new(query: &QueryOf) -> Result<Self, ApiError> {
        let states = "queued, running, paused, ending, succeeded, failed, cancelled";
        let state = query.get("state").map(|text| {
            let known = serde_json::from_value(serde_json::Value::from(text));
            known.map_err(|_| ApiError::bad_request(format!("query parameter state: allowed: {states}")))
        });
        let labels = query.all("label").map(|text| {
            let pair = text.split_once('=').map(|(key, value)| (key.to_owned(), value.to_owned()));
            pair.ok_or_else(|| ApiError::bad_request("query parameter label: allowed: key=value"))
        });
        let labels = labels.collect::<Result<_, _>>()?;
        Ok(Self { state: state.transpose()?, name: query.get("name").map(str::to_owned), labels })
    }

    fn passes(&self, facts: &Facts, progress: &Progress) -> bool {
        let plan = &facts.plan;
        self.state.is_none_or(|state| state == progress.state(plan.tasks))
            && self.name.as_ref().is_none_or(|name| *name == plan.name)
            && self.labels.iter().all(|(key, value)| plan.labels.get(key) == Some(value))
    }
}

/// Lists jobs, the newest first.
#[utoipa::path(get, path = "/v1/jobs", operation_id = "listJobs", tag = "jobs",
    params(("state" = Option<JobState>, Query, description = "Only those in this state"), ("name" = Option<String>, Query, description = "Only those of this name"),
        ("label" = Option<Vec<String>>, Query, description = "Only those with this label, `key=value`; may be repeated"),
        ("limit" = Option<u32>, Query, description = "Rows, 1 to 1000; 100 by default"), ("after" = Option<String>, Query, description = "`next` of the page before"),
        ("tenant" = Option<String>, Query, description = "Operators: whose")),
    responses((status = 200, body = Page<JobView>), (status = 400, body = ErrorBody), (status = 401, body = ErrorBody)))]
pub async fn list(State(app): State<Arc<App>>, caller: Caller, query: QueryOf) -> Result<Json<Page<JobView>>, ApiError> {
    let query = query.only(&["state", "name", "label", "limit", "after"])?;
    let (filter, limit) = (Filter::new(&query)?, query.limit()?);
    let after = query.parse::<JobId>("after", "the `next` of a page, such as j1042")?;
    blocking(move || page(&app, &caller, &filter, limit, after)).await.map(Json)
}

fn page(app: &App, caller: &Caller, filter: &Filter, limit: usize, after: Option<JobId>) -> Result<Page<JobView>, ApiError> {
    let rows = app.handle.rows();
    let (mut found, mut next, mut scanned, mut last) = (Vec::new(), None, 0, None);
    let mut failed: Option<RowsError> = None;
    rows.scan_back(Table::Jobs, after.map(rows::job_key).as_deref(), &mut |key, _| {
        let Some(id) = key.first_chunk::<8>().map(|k| JobId(u64::from_be_bytes(*k))) else { return true };
        if found.len() == limit || scanned == JOBS_SCANNED_MAX {
            next = last;
            return false;
        }
        (scanned, last) = (scanned + 1, Some(id));
        match rows::header(rows, id) {
            Ok(Some((facts, progress))) if caller.sees(&facts.tenant) && filter.passes(&facts, &progress) => {
                found.push(views::job(id, &facts, &progress, &|key| app.store.url(key)));
            }
            Ok(_) => {}
            Err(error) => failed = Some(error),
        }
        failed.is_none()
    })?;
    match failed {
        Some(error) => Err(error.into()),
        None => Ok(Page { rows: found, next: next.map(|id| id.to_string()) }),
    }
}

fn view(app: &App, caller: &Caller, id: JobId) -> Result<JobView, ApiError> {
    let (facts, progress) = app.job(caller, id)?;
    Ok(views::job(id, &facts, &progress, &|key| app.store.url(key)))
}

/// Looks at a job.
#[utoipa::path(get, path = "/v1/jobs/{job}", operation_id = "getJob", tag = "jobs", params(("job" = String, Path, description = "The job")),
    responses((status = 200, body = JobView), (status = 404, body = ErrorBody)))]
pub async fn get(
    State(app): State<Arc<App>>,
    caller: Caller,
    PathOf(job): PathOf<String>,
    query: QueryOf,
) -> Result<Json<JobView>, ApiError> {
    query.only(&[])?;
    let id = job_id(&job)?;
    let mut view = view(&app, &caller, id)?;
    if view.state == JobState::Running {
        let templates = app.handle.read(move |state, leader, now_ms| {
            let heard =
                |leader: &Leader| state.workers.keys().filter_map(|name| Some((name.clone(), leader.heard(name, now_ms)?))).collect();
            leader.map(heard).unwrap_or_else(Vec::new)
        });
        view.templates = templates.await?.iter().flat_map(|(name, heard)| views::templates(id, name, heard)).collect();
    }
    Ok(Json(view))
}

/// The job's spec in canonical form: sorted, defaults written out.
#[utoipa::path(get, path = "/v1/jobs/{job}/spec", operation_id = "getJobSpec", tag = "jobs", params(("job" = String, Path, description = "The job")),
    responses((status = 200, content_type = "application/json"), (status = 404, body = ErrorBody), (status = 503, body = ErrorBody)))]
pub async fn spec(State(app): State<Arc<App>>, caller: Caller, PathOf(job): PathOf<String>, query: QueryOf) -> Result<Response, ApiError> {
    query.only(&[])?;
    let (facts, _) = app.job(&caller, job_id(&job)?)?;
    let bytes = match facts.spec {
        SpecRef::Inline(bytes) => Vec::from(bytes).into(),
        SpecRef::Stored { hash, len, name } => {
            let got = app.store.get(&keys::spec(name.as_ref().unwrap_or(&hash)), len).await;
            got.map_err(|error| ApiError::store(error.kind(), format!("the job's spec: {error}")))?
        }
    };
    Ok(([(header::CONTENT_TYPE, "application/json")], Body::from(bytes)).into_response())
}

/// Asks for something of a job and answers with the job as it is then.
async fn control(app: &App, caller: &Caller, id: JobId, verb: Verb) -> Result<JobView, ApiError> {
    // Also checked when the record is applied; here first, so that another tenant's job never costs a record.
    app.job(caller, id)?;
    let actor = caller.controller(random_hex(16)?)?;
    app.handle.control(Control { actor, verb }).await?;
    view(app, caller, id)
}

/// Cancels a job: what waits ends at once; what runs may end, or is stopped with `now`.
#[utoipa::path(post, path = "/v1/jobs/{job}/cancel", operation_id = "cancelJob", tag = "jobs", params(("job" = String, Path, description = "The job")), request_body = CancelRequest,
    responses((status = 200, body = JobView), (status = 404, body = ErrorBody), (status = 409, body = ErrorBody)))]
pub async fn cancel(
    State(app): State<Arc<App>>,
    caller: Caller,
    PathOf(job): PathOf<String>,
    query: QueryOf,
    body: Body,
) -> Result<Json<JobView>, ApiError> {
    query.only(&[])?;
    let job = job_id(&job)?;
    let request: CancelRequest = json(body, Some(CancelRequest::default())).await?;
    if request.reason.len() > REASON_BYTES_MAX {
        return Err(ApiError::bad_request(format!(
            "the reason has {} bytes; at most {REASON_BYTES_MAX} are allowed",
            request.reason.len()
        )));
    }
    let verb = Verb::Cancel { job, stop_running: request.now, reason: request.reason };
    control(&app, &caller, job, verb).await.map(Json)
}

/// Starts nothing more of a job until it is resumed; what runs goes on.
#[utoipa::path(post, path = "/v1/jobs/{job}/pause", operation_id = "pauseJob", tag = "jobs", params(("job" = String, Path, description = "The job")),
    responses((status = 200, body = JobView), (status = 404, body = ErrorBody), (status = 409, body = ErrorBody)))]
pub async fn pause(
    State(app): State<Arc<App>>,
    caller: Caller,
    PathOf(job): PathOf<String>,
    query: QueryOf,
) -> Result<Json<JobView>, ApiError> {
    query.only(&[])?;
    let job = job_id(&job)?;
    control(&app, &caller, job, Verb::Pause { job }).await.map(Json)
}

/// Goes on with a paused job.
#[utoipa::path(post, path = "/v1/jobs/{job}/resume", operation_id = "resumeJob", tag = "jobs", params(("job" = String, Path, description = "The job")),
    responses((status = 200, body = JobView), (status = 404, body = ErrorBody), (status = 409, body = ErrorBody)))]
pub async fn resume(
    State(app): State<Arc<App>>,
    caller: Caller,
    PathOf(job): PathOf<String>,
    query: QueryOf,
) -> Result<Json<JobView>, ApiError> {
    query.only(&[])?;
    let job = job_id(&job)?;
    control(&app, &caller, job, Verb::Resume { job }).await.map(Json)
}

/// Opens a new round for every task that ended without success; results of those that succeeded stay.
#[utoipa::path(post, path = "/v1/jobs/{job}/rerun", operation_id = "rerunJob", tag = "jobs", params(("job" = String, Path, description = "The job")),
    responses((status = 200, body = JobView), (status = 404, body = ErrorBody), (status = 409, body = ErrorBody)))]
pub async fn rerun(
    State(app): State<Arc<App>>,
    caller: Caller,
    PathOf(job): PathOf<String>,
    query: QueryOf,
) -> Result<Json<JobView>, ApiError> {
    query.only(&[])?;
    let job = job_id(&job)?;
    control(&app, &caller, job, Verb::Rerun { job }).await.map(Json)
}

/// Forgets an ended job and deletes its objects, in the background.
#[utoipa::path(delete, path = "/v1/jobs/{job}", operation_id = "removeJob", tag = "jobs", params(("job" = String, Path, description = "The job")),
    responses((status = 202), (status = 404, body = ErrorBody), (status = 409, body = ErrorBody)))]
pub async fn remove(
    State(app): State<Arc<App>>,
    caller: Caller,
    PathOf(job): PathOf<String>,
    query: QueryOf,
) -> Result<StatusCode, ApiError> {
    query.only(&[])?;
    let job = job_id(&job)?;
    app.job(&caller, job)?;
    let actor = caller.controller(random_hex(16)?)?;
    app.handle.control(Control { actor, verb: Verb::Remove { job } }).await?;
    Ok(StatusCode::ACCEPTED)
}
