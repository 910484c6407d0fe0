//! The HTTP API: JSON over HTTP on any coordinator, with its OpenAPI document generated from the code.
//!
//! Owns the router and what every request and answer has in common (sequence header, limits, error form). One file per
//! resource. Reads come from the local rows and state; writes become records and are answered when they were applied. Does not own
//! any decision about a job.

pub mod auth;
pub mod cluster;
pub mod collect;
pub mod document;
pub mod error;
pub mod events;
pub mod exec;
pub mod explain;
pub mod extract;
pub mod follow;
pub mod jobs;
pub mod listen;
pub mod logs;
pub mod outputs;
pub mod panics;
pub mod rest;
pub mod results;
pub mod streams;
pub mod submit;
pub mod tasks;
pub mod tenants;
pub mod uploads;
pub mod verify;
pub mod views;
pub mod volumes;
pub mod workers;

use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::extract::{Request, State};
use axum::http::{HeaderValue, StatusCode};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use tokio::sync::Semaphore;
use tokio_util::sync::CancellationToken;
use utoipa::OpenApi;
use utoipa_axum::router::OpenApiRouter;
use utoipa_axum::routes;
use volley_jobspecs::api::SEQUENCE_HEADER;
use volley_jobspecs::ids::JobId;
use volley_jobspecs::observe::Observing;
use volley_jobspecs::validate::Features;
use volley_store::{Store, StoreConfig};

use crate::driver::{Handle, RequestError};
use crate::io::volumes::Volumes;
use crate::state::effects::Refusal;
use crate::state::job::{Facts, Progress};
use crate::state::rows;
use auth::Caller;
use document::Bearer;
use error::ApiError;
use extract::{HEADERS_BYTES_MAX, URI_BYTES_MAX};
use streams::Streams;

/// How long a request may wait for the sequence it asks for.
pub const SEQUENCE_WAIT: Duration = Duration::from_secs(10);

/// What every handler works with.
pub struct App {
    /// The coordinator.
    pub handle: Handle,
    /// The bucket.
    pub store: Store,
    /// Volumes in it.
    pub volumes: Volumes,
    /// How the bucket is reached; for reading items from others.
    pub store_config: StoreConfig,
    /// Other buckets that items may be read from; `*` is any.
    pub items_buckets: Vec<String>,
    /// SHA-256 of the bootstrap token's secret.
    pub bootstrap_hash: Option<String>,
    /// What specs may use.
    pub features: Features,
    /// Largest upload, in bytes.
    pub upload_bytes_max: u64,
    /// May whoever is on this host read the metrics without a token?
    pub local_metrics: bool,
    /// Who is told of spans.
    pub observer: Observing,
    /// The cluster's id.
    pub cluster: String,
    /// Open streams.
    pub streams: Streams,
    /// Room for shells.
    pub sessions: Arc<Semaphore>,
    /// After this much silence a stream says that it lives.
    pub keep_alive: Duration,
    /// Ends streams.
    pub stop: CancellationToken,
}

impl std::fmt::Debug for App {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("App").field("cluster", &self.cluster).field("store", &self.store).finish_non_exhaustive()
    }
}

impl App {
    /// A job's rows, if the caller may see it.
    ///
    /// # Errors
    /// 404 when there is no such job, or it is another tenant's: the two look the same.
    pub fn job(&self, caller: &Caller, id: JobId) -> Result<(Facts, Progress), ApiError> {
        let found = rows::header(self.handle.rows(), id)?.filter(|(facts, _)| caller.sees(&facts.tenant));
        found.ok_or_else(|| Refusal::NoJob(id).into())
    }
}

/// Runs what reads many rows where it may block.
///
/// # Errors
/// What `work` says; 503 when the coordinator is stopping.
pub async fn blocking<T: Send + 'static>(work: impl FnOnce() -> Result<T, ApiError> + Send + 'static) -> Result<T, ApiError> {
    match tokio::task::spawn_blocking(work).await {
        Ok(result) => result,
        Err(error) => match error.try_into_panic() {
            // Goes on where the request is answered.
            Ok(panic) => std::panic::resume_unwind(panic),
            Err(_) => Err(RequestError::Stopping.into()),
        },
    }
}

#[derive(OpenApi)]
#[openapi(modifiers(&Bearer), info(title = "Volley", description = "Distributed batch fan-out: submit a job, follow it, fetch its results.\n\nAuthenticate with `Authorization: Bearer <token>`. Every answer carries `volley-sequence`; a request that carries it waits until this coordinator has applied that much. Errors have one form (`ErrorBody`).", license(name = "Apache-2.0")),
    components(schemas(volley_jobspecs::api::ErrorBody, volley_jobspecs::api::EventView, volley_jobspecs::api::ResultRow, volley_jobspecs::api::LogLine, volley_jobspecs::api::LogPiece)))]
struct Document;

fn routes() -> OpenApiRouter<Arc<App>> {
    OpenApiRouter::with_openapi(Document::openapi())
        .routes(routes!(jobs::list, submit::submit))
        .routes(routes!(jobs::get, jobs::remove))
        .routes(routes!(jobs::spec))
        .routes(routes!(jobs::cancel))
        .routes(routes!(jobs::pause))
        .routes(routes!(jobs::resume))
        .routes(routes!(jobs::rerun))
        .routes(routes!(explain::job))
        .routes(routes!(tasks::list))
        .routes(routes!(tasks::get))
        .routes(routes!(tasks::attempts))
        .routes(routes!(explain::task))
        .routes(routes!(results::results))
        .routes(routes!(logs::task))
        .routes(routes!(logs::job))
        .routes(routes!(exec::exec, exec::end))
        .routes(routes!(outputs::list))
        .routes(routes!(outputs::get))
        .routes(routes!(events::events))
        .routes(routes!(uploads::upload))
        .routes(routes!(workers::list))
        .routes(routes!(workers::drain))
        .routes(routes!(workers::resume))
        .routes(routes!(volumes::list, volumes::create))
        .routes(routes!(volumes::show, volumes::remove))
        .routes(routes!(volumes::snapshot))
        .routes(routes!(volumes::remove_snapshot))
        .routes(routes!(volumes::resize))
        .routes(routes!(verify::verify))
        .routes(routes!(collect::collect))
        .routes(routes!(tenants::list, tenants::put))
        .routes(routes!(tenants::remove))
        .routes(routes!(tenants::list_tokens, tenants::create_token))
        .routes(routes!(tenants::revoke_token))
        .routes(routes!(cluster::cluster))
        .routes(routes!(cluster::healthz))
        .routes(routes!(cluster::readyz))
        .routes(routes!(cluster::metrics))
        .routes(routes!(cluster::openapi))
}

/// The OpenAPI document, as JSON with a line feed at its end.
#[must_use]
pub fn openapi_json() -> String {
    let (_, mut document) = routes().split_for_parts();
    document::complete(&mut document);
    // A document of text, lists and maps with text keys: there is no failing path.
    let mut text = document.to_pretty_json().unwrap_or_default();
    text.push('\n');
    text
}

/// The router.
pub fn router(app: Arc<App>) -> Router {
    let (router, _) = routes().split_for_parts();
    router
        .fallback(async || ApiError::not_found("no such path; GET /openapi.json lists all"))
        .method_not_allowed_fallback(async || {
            ApiError::new(
                StatusCode::METHOD_NOT_ALLOWED,
                "method_not_allowed",
                "this path doesn't take this method; GET /openapi.json lists all",
            )
        })
        .layer(middleware::from_fn_with_state(app.clone(), common))
        .layer(middleware::from_fn(panics::answer))
        .layer(middleware::from_fn(rest::read_rest))
        .with_state(app)
}

/// What every request and answer has in common.
async fn common(State(app): State<Arc<App>>, request: Request, next: Next) -> Response {
    let (method, path) = (request.method().clone(), request.uri().path().to_owned());
    let started = tokio::time::Instant::now();
    let admitted = match admit(&request) {
        Ok(wanted) => caught_up(&app, wanted).await,
        Err(error) => Err(error),
    };
    let mut response = match admitted {
        Ok(()) => next.run(request).await,
        Err(error) => error.into_response(),
    };
    response.headers_mut().insert(SEQUENCE_HEADER, HeaderValue::from(app.handle.sequence()));
    response.headers_mut().insert("x-content-type-options", HeaderValue::from_static("nosniff"));
    tracing::debug!(%method, path, status = response.status().as_u16(), took_ms = started.elapsed().as_millis() as u64, "request");
    response
}

/// Refuses what is too long; returns the sequence the request asks for.
fn admit(request: &Request) -> Result<Option<u64>, ApiError> {
    let uri = request.uri();
    let uri_bytes = uri.path().len() + uri.query().map_or(0, str::len);
    if uri_bytes > URI_BYTES_MAX {
        let message = format!("the path and query have {uri_bytes} bytes; at most {URI_BYTES_MAX} are allowed");
        return Err(ApiError::new(StatusCode::URI_TOO_LONG, "too_large", message));
    }
    let headers = request.headers();
    let header_bytes: usize = headers.iter().map(|(name, value)| name.as_str().len() + value.len()).sum();
    if header_bytes > HEADERS_BYTES_MAX {
        let message = format!("the headers have {header_bytes} bytes; at most {HEADERS_BYTES_MAX} are allowed");
        return Err(ApiError::new(StatusCode::REQUEST_HEADER_FIELDS_TOO_LARGE, "too_large", message));
    }
    let Some(wanted) = headers.get(SEQUENCE_HEADER) else { return Ok(None) };
    let wanted: Option<u64> = wanted.to_str().ok().and_then(|text| text.trim().parse().ok());
    let wrong = || ApiError::bad_request(format!("the header {SEQUENCE_HEADER} is no number; send one that an answer carried"));
    wanted.map(Some).ok_or_else(wrong)
}

/// Waits until this coordinator has applied as much as the request asks for.
async fn caught_up(app: &App, wanted: Option<u64>) -> Result<(), ApiError> {
    let Some(wanted) = wanted else { return Ok(()) };
    let reached = tokio::select! {
        reached = app.handle.wait_for(wanted, SEQUENCE_WAIT) => reached,
        () = app.stop.cancelled() => false,
    };
    if reached {
        return Ok(());
    }
    if app.stop.is_cancelled() {
        return Err(ApiError::unavailable("this coordinator is stopping; ask again, or another coordinator"));
    }
    let message = format!(
        "this coordinator has applied the log up to {}, the request asks for {wanted}; ask again, or another coordinator",
        app.handle.sequence()
    );
    Err(ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "behind", message))
}
