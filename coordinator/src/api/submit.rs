//! `POST /v1/jobs`: a spec becomes a job, or every reason why not.
//!
//! Owns the order: read, validate, look for the key, cut the items' file, store a large spec, record. Nothing of a job exists before
//! its record is applied; pages and specs stored before that have a name of their own, and are collected if no job comes to name it.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use axum::Json;
use axum::body::Body;
use axum::extract::State;
use axum::http::{HeaderMap, StatusCode};
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use volley_jobspecs::api::{ErrorBody, IDEMPOTENCY_HEADER, PlanAnswer, SubmitAnswer};
use volley_jobspecs::expand::{FileFormat, ItemFile};
use volley_jobspecs::ids::{JobId, WorkerId};
use volley_jobspecs::keys;
use volley_jobspecs::observe::is_recorded;
use volley_jobspecs::pages::{LoadedPage, Page};
use volley_jobspecs::parse::{SPEC_BYTES_MAX, parse_and_validate};
use volley_jobspecs::plan::plan;
use volley_jobspecs::resolve::{InputSource, ResolvedTask};
use volley_jobspecs::spec::{FileSource, Isolation};
use volley_jobspecs::validate::{Features, ValidJob};
use volley_jobspecs::wire::plan::{self, SPEC_INLINE_BYTES_MAX, SpecRef};
use volley_jobspecs::wire::record::Submit;
use volley_jobspecs::wire::trace::{HEADER, TraceContext};
use volley_jobspecs::wire::{LEVEL_KEEPING, LEVEL_OFFERS, LEVEL_ROUNDS, LEVEL_VOLUMES};
use volley_store::{Store, StoreConfig};

use super::App;
use super::auth::{Caller, random_hex};
use super::error::ApiError;
use super::extract::{QueryOf, body};
use crate::driver::wall_us;
use crate::explain;
use crate::io::items::{self as file_items, Counted, ItemsError};
use crate::items::{self, Readable, Source, SourceError};
use crate::state::effects::{Answer, Refusal};
use crate::state::rows;
use crate::state::worker::Worker;
use crate::trace;
use crate::uploads::ANY;

/// Longest idempotency key, in bytes: a UUID or a hash with a prefix; kept in memory for a day.
pub const KEY_BYTES_MAX: usize = 128;
/// Tasks a dry run shows from each end when the request doesn't say.
const SHOWN: u32 = 3;
/// Most of them.
const SHOWN_MAX: u32 = 100;

/// Submits a job. The same idempotency key with the same spec gives the same job.
///
/// With `dryRun=true` nothing is created: the answer is what the job would be (`PlanAnswer`). Either answer warns when no worker that is
/// there now could ever run its tasks.
#[utoipa::path(post, path = "/v1/jobs", operation_id = "submitJob", tag = "jobs", request_body(content_type = "application/json", description = "A job spec, `volley/v1`"),
    params(("dryRun" = Option<bool>, Query, description = "Only say what it would be"),
        ("show" = Option<u32>, Query, description = "With `dryRun`: so many tasks of the beginning, and of the end; 1 to 100, 3 by default"), ("tenant" = Option<String>, Query, description = "Operators: for whom"),
        ("idempotency-key" = Option<String>, Header, description = "At most 128 printable ASCII characters; kept for a day"),
        ("traceparent" = Option<String>, Header, description = "W3C trace context, version 00: the job goes on with that trace")),
    responses((status = 201, body = SubmitAnswer), (status = 200, body = SubmitAnswer, description = "It existed, or the plan of a dry run"),
        (status = 400, body = ErrorBody), (status = 409, body = ErrorBody), (status = 413, body = ErrorBody), (status = 429, body = ErrorBody), (status = 503, body = ErrorBody)))]
pub async fn submit(
    State(app): State<Arc<App>>,
    caller: Caller,
    query: QueryOf,
    headers: HeaderMap,
    request: Body,
) -> Result<Response, ApiError> {
    let query = query.only(&["dryRun", "show"])?;
    let dry = query.flag("dryRun")?;
    let show = query.parse::<u32>("show", "a number from 1 to 100")?.unwrap_or(SHOWN);
    if !(1..=SHOWN_MAX).contains(&show) || (!dry && query.get("show").is_some()) {
        return Err(ApiError::bad_request(format!("query parameter show: 1 to {SHOWN_MAX}, together with dryRun=true")));
    }
    let key = idempotency_key(&headers)?;
    let begun = wall_us();
    let bytes = body(request, SPEC_BYTES_MAX, "put the items in a file and name it in items.jsonl").await?;
    let features = features(&app).await?;
    let job = super::blocking(move || Ok(parse_and_validate(&bytes, &features)?)).await?;
    may_read_inputs(&app, &caller, &job).await?;
    if dry {
        return dry_run(&app, &caller, &job, show).await.map(|answer| Json(answer).into_response());
    }
    let before = headers.get(HEADER).and_then(|value| value.to_str().ok()?.parse().ok());
    let context = context(&app, before.as_ref())?;
    let answer = record(&app, &caller, &job, key, context).await;
    if is_recorded(&app.observer, &context)
        && let Some(observer) = &app.observer
    {
        let outcome = answer.as_ref().map(|answer| answer.job.as_str()).map_err(|error| error.body.message.clone());
        observer.spans(vec![trace::submit_span(context, before.as_ref(), (begun, wall_us()), outcome)]);
    }
    let answer = answer?;
    if answer.existed {
        is_there(&app, &answer)?;
    }
    let status = if answer.existed { StatusCode::OK } else { StatusCode::CREATED };
    Ok((status, Json(answer)).into_response())
}

/// A key is remembered for longer than some jobs: who sends it again must not be told of a job that is gone as if it ran.
fn is_there(app: &App, answer: &SubmitAnswer) -> Result<(), ApiError> {
    let there = answer.job.parse().ok().and_then(|id: JobId| rows::header(app.handle.rows(), id).transpose()).transpose()?;
    match there {
        Some(_) => Ok(()),
        None => {
            let message = format!("this idempotency key made job {}, which was removed since; use a new key to run it again", answer.job);
            Err(ApiError::conflict(message))
        }
    }
}

/// Every job has one trace, its caller's or its own, whether anybody records it or not.
fn context(app: &App, caller: Option<&TraceContext>) -> Result<TraceContext, ApiError> {
    let mut ids = [0; 24];
    let failed = |why: &dyn std::fmt::Display| ApiError::unavailable(format!("no randomness from the system: {why}"));
    getrandom::fill(&mut ids).map_err(|error| failed(&error))?;
    let records =
        |trace, parent: Option<bool>| app.observer.as_ref().map_or(parent.unwrap_or(true), |observer| observer.records(trace, parent));
    trace::of_submit(caller, ids, records).ok_or_else(|| failed(&"it gave zeros"))
}

/// Makes the job, or finds the one that the key made.
async fn record(app: &App, caller: &Caller, job: &ValidJob, key: Option<String>, context: TraceContext) -> Result<SubmitAnswer, ApiError> {
    let spec_hash = job.spec_hash();
    if let Some(key) = &key
        && let Some(answer) = known(app, caller, key, &spec_hash).await?
    {
        return Ok(answer);
    }
    let level = level(app).await?;
    let nonce = random_hex(8)?;
    let name = |hash: &str| if level >= LEVEL_ROUNDS { keys::for_one_job(hash, &nonce) } else { hash.to_owned() };
    let (tasks, pages) = match job.items().file() {
        None => (job.tasks(), None),
        Some(file) => {
            let (from, at, counted) = count(app, caller, file).await?;
            let (tasks, pages) = (counted.index.count, name(&counted.index.hash()));
            fits(job, &counted)?;
            file_items::keep(&from, &at, file, counted, &app.store, &pages).await.map_err(|e| refuse_items(file, &e))?;
            (Some(tasks), Some(pages))
        }
    };
    let tasks = tasks.ok_or_else(|| ApiError::bad_spec("$.items", "can't be counted"))?;
    let mut plan = plan::JobPlan { items: pages, ..plan(job, tasks) };
    if level < LEVEL_OFFERS {
        plan.needs.image = None;
    }
    let spec = spec_ref(app, job, &spec_hash, name(&spec_hash)).await?;
    let actor = caller.submitter(random_hex(16)?);
    let idempotency_key = match key {
        Some(key) => key,
        None => random_hex(16)?,
    };
    let uploads = if level >= LEVEL_KEEPING { uploads(job) } else { Vec::new() };
    let warnings = warnings(app, &plan).await?;
    let submit = Submit { actor, idempotency_key, spec_hash, plan, spec, trace: Some(context.to_string()), uploads };
    match app.handle.submit(submit).await? {
        Answer::Submitted { job, tasks, existed } => Ok(SubmitAnswer { job: job.to_string(), tasks, existed, warnings }),
        // The handle turns refusals into errors, and a submit is never only done.
        Answer::Done | Answer::Refused(_) => {
            Err(ApiError::unavailable("the submit was answered with something else; ask again with the same key"))
        }
    }
}

/// Do the items have what the spec asks of them? The first and the last stand for all: a name that is misspelt is so in every task.
fn fits(job: &ValidJob, counted: &Counted) -> Result<(), ApiError> {
    for index in [0, counted.index.count.saturating_sub(1)] {
        if let Some(item) = item_of(counted, index) {
            resolved(job, &item, index)?;
        }
    }
    Ok(())
}

/// A task with its item's values.
fn resolved(job: &ValidJob, item: &Value, index: u32) -> Result<ResolvedTask, ApiError> {
    // The job has no id yet; what a worker will put in is shown as its name.
    let resolved = job.resolve(item, index, "${job.id}", 1);
    resolved.map_err(|error| ApiError::bad_spec("$.task", format!("task {index}: {error}")))
}

/// What keeps a job from running as things are now. It is taken all the same: workers may come.
async fn warnings(app: &App, plan: &plan::JobPlan) -> Result<Vec<String>, ApiError> {
    let needs = plan.needs.clone();
    Ok(app.handle.read(move |state, _, _| explain::nowhere(state, &needs)).await?.into_iter().collect())
}

/// Refuses inputs that are Volley's or another tenant's. Of those that a task's values complete the worker judges.
async fn may_read_inputs(app: &App, caller: &Caller, job: &ValidJob) -> Result<(), ApiError> {
    let readable = Readable { bucket: app.store.bucket(), prefix: app.store.prefix(), others: &app.items_buckets };
    for (number, input) in job.task().inputs.iter().enumerate() {
        if !input.from.starts_with("s3://") || input.from.contains("${") {
            continue;
        }
        let source = FileSource { upload: None, s3: Some(input.from.clone()) };
        let file = ItemFile { source, format: FileFormat::Jsonl, chunk: None };
        let yours = match items::source(&file, &caller.tenant, &readable) {
            Err(SourceError::NotYours { .. }) => false,
            Ok(Source::Own { job: Some(id), .. }) => rows::facts(app.handle.rows(), id)?.is_some_and(|facts| facts.tenant == caller.tenant),
            // What other buckets workers may read is a matter of their credentials.
            Ok(_) | Err(_) => true,
        };
        if !yours {
            let why = format!(
                "{:?} belongs to Volley, to another tenant or to a job that is not there; inputs come from your own uploads, jobs and files",
                input.from
            );
            return Err(ApiError::bad_spec(&format!("$.task.inputs[{number}].from"), why));
        }
    }
    Ok(())
}

/// The level that all coordinators have reached.
///
/// # Errors
/// 503 when this coordinator is stopping.
pub async fn level(app: &App) -> Result<u32, ApiError> {
    Ok(app.handle.read(|state, _, _| state.head.level).await?)
}

/// Uploads that a spec names. A name that only a task completes may be any.
fn uploads(job: &ValidJob) -> Vec<String> {
    let items = job.items().file().and_then(|file| file.source.upload.as_deref());
    let inputs = job
        .task()
        .inputs
        .iter()
        .filter_map(|input| input.from.strip_prefix("upload:").or_else(|| input.from.starts_with("${").then_some(ANY)));
    let mut names: Vec<String> = items.into_iter().chain(inputs).map(|id| if id.contains("${") { ANY } else { id }.to_owned()).collect();
    names.sort_unstable();
    names.dedup();
    names
}

fn idempotency_key(headers: &HeaderMap) -> Result<Option<String>, ApiError> {
    let Some(value) = headers.get(IDEMPOTENCY_HEADER) else { return Ok(None) };
    let fits = |text: &&str| (1..=KEY_BYTES_MAX).contains(&text.len()) && text.bytes().all(|b| b.is_ascii_graphic());
    let key = value.to_str().ok().filter(fits);
    let wrong = || {
        ApiError::bad_request(format!(
            "the header {IDEMPOTENCY_HEADER} takes 1 to {KEY_BYTES_MAX} printable ASCII characters without spaces"
        ))
    };
    key.map(|key| Some(key.to_owned())).ok_or_else(wrong)
}

/// What specs may use: what this build can do, and the tiers that workers offer.
async fn features(app: &App) -> Result<Features, ApiError> {
    let mut features = app.features.clone();
    features.volumes |= app.volumes.are_on() && level(app).await? >= LEVEL_VOLUMES;
    let workers = app.handle.read(|state, _, _| {
        let workers = state.workers.iter();
        let tiers = workers.clone().flat_map(|(_, worker)| worker.info.isolation.iter().copied()).collect::<BTreeSet<_>>();
        let lack = |(name, worker): (&WorkerId, &Worker)| {
            let of_worker = worker.info.lacks.iter().map(|lack| (lack.tier, format!("worker {name} can't offer it: {}", lack.why)));
            of_worker.collect::<Vec<_>>()
        };
        // One is enough to see what is wrong; `volley cluster` lists all.
        (tiers, workers.flat_map(lack).collect::<BTreeMap<_, _>>())
    });
    let (offered, lacks) = workers.await?;
    features.isolation.extend(offered.into_iter().map(of_spec));
    features.why_not.extend(lacks.into_iter().map(|(tier, why)| (of_spec(tier), why)));
    Ok(features)
}

fn of_spec(tier: plan::Isolation) -> Isolation {
    match tier {
        plan::Isolation::Null => Isolation::Null,
        plan::Isolation::Process => Isolation::Process,
        plan::Isolation::Container => Isolation::Container,
        plan::Isolation::Microvm => Isolation::Microvm,
    }
}

/// The job that the key made before. Looked for before anything is read or stored; asked again when the record is applied.
async fn known(app: &App, caller: &Caller, key: &str, spec_hash: &str) -> Result<Option<SubmitAnswer>, ApiError> {
    let entry = (caller.tenant.clone(), key.to_owned());
    let found = app.handle.read(move |state, _, _| state.keys.get(&entry).cloned()).await?;
    match found {
        None => Ok(None),
        Some(found) if found.spec_hash == spec_hash => {
            Ok(Some(SubmitAnswer { job: found.job.to_string(), tasks: found.tasks, existed: true, warnings: Vec::new() }))
        }
        Some(found) => Err(Refusal::KeyReused { key: key.to_owned(), job: found.job }.into()),
    }
}

async fn spec_ref(app: &App, job: &ValidJob, hash: &str, name: String) -> Result<SpecRef, ApiError> {
    let json = job.to_json().into_bytes();
    if json.len() <= SPEC_INLINE_BYTES_MAX {
        return Ok(SpecRef::Inline(json.into()));
    }
    let len = json.len() as u64;
    let put = app.store.put(&keys::spec(&name), json.into()).await;
    put.map_err(|error| ApiError::store(error.kind(), format!("storing the spec: {error}")))?;
    Ok(SpecRef::Stored { hash: hash.to_owned(), len, name: keys::of_one_job(&name).then_some(name) })
}

/// Opens and counts the file with the items.
async fn count(app: &App, caller: &Caller, file: &ItemFile) -> Result<(Store, String, Counted), ApiError> {
    let readable = Readable { bucket: app.store.bucket(), prefix: app.store.prefix(), others: &app.items_buckets };
    let found = items::source(file, &caller.tenant, &readable);
    let (from, key) = match found.map_err(|error| ApiError::bad_spec(&items::path(file), error.to_string()))? {
        Source::Own { key, job } => {
            let owned = match job {
                Some(id) => rows::facts(app.handle.rows(), id)?.is_some_and(|facts| facts.tenant == caller.tenant),
                None => true,
            };
            if !owned {
                return Err(ApiError::bad_spec(&items::path(file), format!("{key:?} belongs to a job that is not there, or not yours")));
            }
            (app.store.clone(), key)
        }
        Source::Other { bucket, key } => {
            let config = StoreConfig { bucket, prefix: String::new(), ..app.store_config.clone() };
            let store = Store::connect(&config).await;
            (store.map_err(|error| ApiError::bad_spec(&items::path(file), error.to_string()))?, key)
        }
    };
    let counted = file_items::count(&from, &key, file).await.map_err(|e| refuse_items(file, &e))?;
    Ok((from, key, counted))
}

fn refuse_items(file: &ItemFile, error: &ItemsError) -> ApiError {
    let path = items::path(file);
    let kind = match error {
        ItemsError::Open(error) => error.kind(),
        ItemsError::Put(error) => error.kind(),
        ItemsError::Read { .. } => volley_store::ErrorKind::Unavailable,
        ItemsError::Cut(_) | ItemsError::Changed => return ApiError::bad_spec(&path, error.to_string()),
    };
    match (error, kind) {
        (ItemsError::Open(_), volley_store::ErrorKind::NotFound) => {
            ApiError::bad_spec(&path, format!("no such file ({error}); upload it first"))
        }
        (ItemsError::Open(_), volley_store::ErrorKind::Denied | volley_store::ErrorKind::Rejected) => {
            ApiError::bad_spec(&path, error.to_string())
        }
        _ => ApiError::store(kind, format!("{path}: {error}")),
    }
}

/// What the job would be. Creates nothing.
async fn dry_run(app: &App, caller: &Caller, job: &ValidJob, show: u32) -> Result<PlanAnswer, ApiError> {
    let counted = match job.items().file() {
        None => None,
        Some(file) => Some(count(app, caller, file).await?.2),
    };
    let tasks = counted.as_ref().map_or_else(|| job.tasks(), |counted| Some(counted.index.count));
    let tasks = tasks.ok_or_else(|| ApiError::bad_spec("$.items", "can't be counted"))?;
    let shown = |index: u32| -> Result<Value, ApiError> {
        let item = match &counted {
            None => job.items().item(u64::from(index)),
            Some(counted) => item_of(counted, index),
        };
        let item = item.ok_or_else(|| ApiError::bad_spec("$.items", format!("task {index} has no item")))?;
        Ok(task_json(index, &item, &resolved(job, &item, index)?))
    };
    // Of a large file not every page is kept; those tasks that are at hand are shown.
    let (near, far) = match &counted {
        Some(counted) if counted.kept.len() < counted.index.pages.len() => (
            counted.kept.last().map_or(0, |page| page.entry.first + page.entry.count),
            counted.last.as_ref().map_or(tasks, |page| page.entry.first),
        ),
        Some(_) | None => (tasks, 0),
    };
    let first = (0..tasks.min(show).min(near)).map(shown).collect::<Result<_, _>>()?;
    let last = (tasks.saturating_sub(show).max(show).max(far)..tasks).map(shown).collect::<Result<_, _>>()?;
    let warnings = warnings(app, &plan(job, tasks)).await?;
    Ok(PlanAnswer { tasks, first, last, warnings })
}

fn item_of(counted: &Counted, index: u32) -> Option<Value> {
    let on = |page: &&Page| (page.entry.first..page.entry.first + page.entry.count).contains(&index);
    let page = counted.kept.iter().chain(&counted.last).find(on)?;
    LoadedPage::new(&page.entry, page.bytes.clone()).ok()?.item(index).ok()
}

fn task_json(index: u32, item: &Value, task: &ResolvedTask) -> Value {
    let inputs = task.inputs.iter().map(|input| {
        let from = match &input.from {
            InputSource::S3 { bucket, key } => format!("s3://{bucket}/{key}"),
            InputSource::Http(url) => url.clone(),
            InputSource::Upload(id) => format!("upload:{id}"),
        };
        json!({ "from": from, "path": input.path, "sha256": input.sha256, "executable": input.executable })
    });
    let inputs: Vec<Value> = inputs.collect();
    json!({
        "index": index, "item": item, "image": task.image, "isolation": task.isolation, "command": task.command, "env": task.env,
        "stdin": task.stdin, "workdir": task.workdir, "resources": task.resources, "inputs": inputs, "outputs": task.outputs,
        "volumes": task.volumes, "timeouts": task.timeouts, "network": task.network, "secrets": task.secrets,
    })
}
