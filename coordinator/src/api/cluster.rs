//! `/v1/cluster`, `/healthz`, `/readyz`, `/metrics`, `/openapi.json`: the coordinator itself.
//!
//! Owns those routes and the gauges that are read from the state at each scrape. Does not own the counters (`metrics`).

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::sync::Arc;
use std::time::Duration;

use axum::Json;
use axum::extract::{ConnectInfo, FromRequestParts, Request, State};
use axum::http::{StatusCode, header, request};
use axum::response::{IntoResponse, Response};
use prometheus_client::encoding::prometheus_text;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::Gauge;
use prometheus_client::registry::Registry;
use volley_jobspecs::api::{ClusterView, ErrorBody};
use volley_jobspecs::subjects::{LEASE_BUCKET, LEASE_KEY};
use volley_jobspecs::wire::plan::Isolation;

use super::App;
use super::auth::Caller;
use super::error::ApiError;
use super::extract::QueryOf;
use super::views;
use crate::state;

/// How long readiness and gauges may wait for NATS.
const NATS_WAIT: Duration = Duration::from_secs(2);
/// Records a coordinator may be behind and still be ready: less than a second of work.
const LAG_MAX: u64 = 1_000;
/// Lines about what workers lack: hosts that are made alike lack it for the same reason.
const LACKS_MAX: usize = 20;
/// Workers named in one of them; `volley workers` shows all.
const WORKERS_NAMED: usize = 3;

/// The cluster, as this coordinator sees it.
#[utoipa::path(get, path = "/v1/cluster", operation_id = "getCluster", tag = "cluster", responses((status = 200, body = ClusterView), (status = 503, body = ErrorBody)))]
pub async fn cluster(State(app): State<Arc<App>>, _caller: Caller, query: QueryOf) -> Result<Json<ClusterView>, ApiError> {
    query.only(&[])?;
    let bounds = app.handle.log().bounds().await;
    let (_, _, log_bytes, log_bytes_max) = bounds.map_err(|error| ApiError::unavailable(error.to_string()))?;
    let (head, lacks) = app.handle.read(|state, _, _| (state.head.clone(), lacks(state))).await?;
    Ok(Json(ClusterView {
        id: app.cluster.clone(),
        version: env!("CARGO_PKG_VERSION").to_owned(),
        leader: head.leader,
        term: head.term.0,
        sequence: head.sequence,
        level: head.level,
        log_bytes,
        log_bytes_max: u64::try_from(log_bytes_max).ok(),
        features: features(&app),
        lacks,
        bucket: app.store.url(""),
    }))
}

/// What workers were to offer and can't: a line for each reason, with those who give it.
fn lacks(state: &state::State) -> Vec<String> {
    let mut by_reason: BTreeMap<(Isolation, &str), Vec<&str>> = BTreeMap::new();
    for (name, worker) in &state.workers {
        for lack in &worker.info.lacks {
            by_reason.entry((lack.tier, &lack.why)).or_default().push(name.as_str());
        }
    }
    let line = |((tier, why), names): ((Isolation, &str), Vec<&str>)| {
        let named = names.get(..names.len().min(WORKERS_NAMED)).unwrap_or_default().join(", ");
        let more = names.len().saturating_sub(WORKERS_NAMED);
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        format!("{} on {named}{more}: {why}", tier.as_str())
    };
    by_reason.into_iter().take(LACKS_MAX).map(line).collect()
}

fn features(app: &App) -> Vec<String> {
    let features = &app.features;
    let tiers = features.isolation.iter().filter_map(|tier| serde_json::to_value(tier).ok()?.as_str().map(str::to_owned));
    let others = [
        ("volumes", features.volumes || app.volumes.are_on()),
        ("stages", features.stages),
        ("schedule", features.schedule),
        ("notify", features.notify),
        ("secrets", features.secrets),
        ("network", features.network),
    ];
    tiers.chain(others.into_iter().filter(|(_, on)| *on).map(|(name, _)| name.to_owned())).collect()
}

/// Answers 200 as long as the process lives.
#[utoipa::path(get, path = "/healthz", operation_id = "getHealth", tag = "cluster", responses((status = 200, content_type = "text/plain")))]
pub async fn healthz() -> &'static str {
    "ok\n"
}

/// Answers 200 when this coordinator has caught up with the log and somebody leads; else 503 and the reason.
#[utoipa::path(get, path = "/readyz", operation_id = "getReadiness", tag = "cluster", responses((status = 200, content_type = "text/plain"), (status = 503, body = ErrorBody)))]
pub async fn readyz(State(app): State<Arc<App>>) -> Result<&'static str, ApiError> {
    let not_ready = |why: String| ApiError::new(StatusCode::SERVICE_UNAVAILABLE, "not_ready", why);
    let lag = lag(&app).await.ok_or_else(|| not_ready("NATS does not answer".to_owned()))?;
    if lag > LAG_MAX {
        return Err(not_ready(format!("{lag} records behind the log; catching up")));
    }
    let leads = async {
        let bucket = app.handle.log().context().get_key_value(LEASE_BUCKET).await.ok()?;
        bucket.get(LEASE_KEY).await.ok()?
    };
    match tokio::time::timeout(NATS_WAIT, leads).await {
        Ok(Some(_)) => Ok("ready\n"),
        Ok(None) => Err(not_ready("no coordinator leads at the moment; one will within seconds".to_owned())),
        Err(_) => Err(not_ready("NATS does not answer".to_owned())),
    }
}

/// Records in the log that were not applied here yet; `None`: NATS doesn't answer.
async fn lag(app: &App) -> Option<u64> {
    let bounds = tokio::time::timeout(NATS_WAIT, app.handle.log().bounds()).await;
    let (_, last, _, _) = bounds.ok()?.ok()?;
    Some(last.saturating_sub(app.handle.sequence()))
}

/// Metrics in Prometheus' text form. For operators; where the coordinator was started so, also for whoever asks from its host.
#[utoipa::path(get, path = "/metrics", operation_id = "getMetrics", tag = "cluster", responses((status = 200, content_type = "text/plain"), (status = 401, body = ErrorBody), (status = 403, body = ErrorBody)))]
pub async fn metrics(State(app): State<Arc<App>>, request: Request) -> Result<Response, ApiError> {
    let (mut parts, _) = request.into_parts();
    if !(app.local_metrics && from_this_host(&parts)) {
        Caller::from_request_parts(&mut parts, &app).await?.operators_only()?;
    }
    Ok(([(header::CONTENT_TYPE, "text/plain; version=0.0.4; charset=utf-8")], text(&app).await?).into_response())
}

/// Every figure, in Prometheus' text form.
///
/// # Errors
/// 503 when the coordinator is stopping.
pub async fn text(app: &App) -> Result<String, ApiError> {
    let mut registry = Registry::default();
    app.handle.metrics().register(&mut registry);
    gauges(app, &mut registry).await?;
    let mut text = String::new();
    prometheus_text::encode(&mut text, &registry).map_err(|error| ApiError::unavailable(format!("metrics can't be written: {error}")))?;
    Ok(text)
}

/// Does the peer sit on this host, with no proxy in between that says it speaks for another?
fn from_this_host(parts: &request::Parts) -> bool {
    let peer = parts.extensions.get::<ConnectInfo<SocketAddr>>();
    let forwarded = ["forwarded", "x-forwarded-for", "x-real-ip"].iter().any(|name| parts.headers.contains_key(*name));
    peer.is_some_and(|ConnectInfo(peer)| peer.ip().is_loopback()) && !forwarded
}

/// What the state says at one moment.
#[derive(Debug, Default)]
struct Counted {
    jobs: BTreeMap<&'static str, i64>,
    tasks: BTreeMap<&'static str, i64>,
    workers: BTreeMap<String, i64>,
    slots: i64,
    stale_ends: i64,
    void_tasks: i64,
    leads: bool,
    term: i64,
}

type Labelled = Family<Vec<(&'static str, String)>, Gauge>;

async fn gauges(app: &App, registry: &mut Registry) -> Result<(), ApiError> {
    let counted = app.handle.read(|state, leader, now_ms| {
        let mut counted = Counted { leads: leader.is_some(), term: state.head.term.0 as i64, ..Counted::default() };
        (counted.stale_ends, counted.void_tasks) = (state.head.stale_ends as i64, state.head.void_tasks as i64);
        for job in state.jobs.values() {
            let name = match (job.progress.ended_ms, job.progress.ending, job.progress.paused, job.progress.started_ms) {
                (Some(_), ..) => "trailing",
                (_, Some(_), ..) => "ending",
                (_, _, true, _) => "paused",
                (_, _, _, None) => "queued",
                (_, _, _, Some(_)) => "running",
            };
            *counted.jobs.entry(name).or_insert(0) += 1;
            let counts = job.counts();
            for (name, count) in [("waiting", counts.waiting), ("running", counts.running), ("backoff", counts.backoff)] {
                *counted.tasks.entry(name).or_insert(0) += i64::from(count);
            }
        }
        for (name, worker) in &state.workers {
            let heard = leader.and_then(|leader| leader.heard(name, now_ms));
            *counted.workers.entry(views::worker(name, worker, state.head.now_ms, heard.as_ref()).state).or_insert(0) += 1;
            counted.slots += i64::from(worker.info.slots);
        }
        counted
    });
    let counted = counted.await?;
    let volley = registry.sub_registry_with_prefix("volley");
    labelled(volley, "jobs", "Jobs in memory, by where they stand", "state", counted.jobs.into_iter().map(|(k, v)| (k.to_owned(), v)));
    labelled(
        volley,
        "tasks",
        "Tasks of those jobs that have not ended, by where they stand",
        "state",
        counted.tasks.into_iter().map(|(k, v)| (k.to_owned(), v)),
    );
    labelled(volley, "workers", "Workers, by state", "state", counted.workers.into_iter());
    let mut one = |name: &str, help: &str, value: i64| {
        let gauge = Gauge::<i64>::default();
        gauge.set(value);
        volley.register(name, help, gauge);
    };
    one("worker_slots", "Slots of all workers", counted.slots);
    one("track_stale_ends", "Ends that named an attempt which was not open", counted.stale_ends);
    one("assign_void_tasks", "Assignments that no longer held when they were applied", counted.void_tasks);
    one("leader", "1 where the leader is", i64::from(counted.leads));
    one("term", "The leader's term", counted.term);
    one("api_streams", "Streams open at this coordinator", i64::from(app.streams.open()));
    one("log_sequence", "The last record applied here", i64::try_from(app.handle.sequence()).unwrap_or(i64::MAX));
    if let Some(lag) = lag(app).await {
        one("log_lag_records", "Records in the log that were not applied here yet", i64::try_from(lag).unwrap_or(i64::MAX));
    }
    Ok(())
}

fn labelled(registry: &mut Registry, name: &str, help: &str, label: &'static str, values: impl Iterator<Item = (String, i64)>) {
    let family = Labelled::default();
    for (value, count) in values {
        family.get_or_create(&vec![(label, value)]).set(count);
    }
    registry.register(name, help, family);
}

/// This document.
#[utoipa::path(get, path = "/openapi.json", operation_id = "getOpenapi", tag = "cluster", responses((status = 200, content_type = "application/json")))]
pub async fn openapi() -> Response {
    ([(header::CONTENT_TYPE, "application/json")], super::openapi_json()).into_response()
}
