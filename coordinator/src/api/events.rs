//! `GET /v1/jobs/{job}/events`: what happens to a job, as server-sent events.
//!
//! Owns the order (the present state first, then changes, an end at the job's end) and what is sent when a client falls behind (the
//! present state again). Does not own results in full: those are `results`.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::response::sse::{self, KeepAlive, Sse};
use futures::Stream;
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::mpsc;
use volley_jobspecs::api::{ErrorBody, EventView, TaskState, TaskView};
use volley_jobspecs::failure::FailureClass;
use volley_jobspecs::ids::JobId;

use super::App;
use super::auth::Caller;
use super::error::ApiError;
use super::extract::{PathOf, QueryOf, job_id};
use super::streams::Permit;
use super::views;
use crate::state::effects::ResultEntry;
use crate::state::job::Facts;
use crate::state::rows;

/// A comment is sent after this much silence, so that nobody between takes the connection for dead.
const KEEP_ALIVE: Duration = Duration::from_secs(15);
/// Events that wait for a slow client.
const EVENTS_WAITING: usize = 64;

/// Follows a job: an event for each change of its state or counts (`job`) and each task that ends (`task`). The first is the present
/// state; the stream ends when the job has ended.
#[utoipa::path(get, path = "/v1/jobs/{job}/events", operation_id = "followJobEvents", tag = "jobs", params(("job" = String, Path, description = "The job")),
    responses((status = 200, content_type = "text/event-stream", body = EventView), (status = 404, body = ErrorBody), (status = 429, body = ErrorBody)))]
pub async fn events(
    State(app): State<Arc<App>>,
    caller: Caller,
    PathOf(job): PathOf<String>,
    query: QueryOf,
) -> Result<Sse<sse::KeepAliveStream<impl Stream<Item = Result<sse::Event, Infallible>>>>, ApiError> {
    query.only(&[])?;
    let id = job_id(&job)?;
    let (facts, _) = app.job(&caller, id)?;
    let permit = app.streams.take(&caller.tenant)?;
    let (out, mut waiting) = mpsc::channel(EVENTS_WAITING);
    tokio::spawn(follow(app, id, facts, out, permit));
    let stream = futures::stream::poll_fn(move |cx| waiting.poll_recv(cx));
    Ok(Sse::new(stream).keep_alive(KeepAlive::new().interval(KEEP_ALIVE)))
}

type Out = mpsc::Sender<Result<sse::Event, Infallible>>;

async fn follow(app: Arc<App>, id: JobId, facts: Facts, out: Out, _permit: Permit) {
    // Listening begins before the first look, so that nothing falls between the two.
    let mut events = app.handle.events();
    let (mut sequence, mut ended) = (app.handle.sequence(), Vec::new());
    loop {
        match tell(&app, id, &facts, sequence, &ended, &out).await {
            Some(false) => {}
            Some(true) | None => return,
        }
        loop {
            let event = tokio::select! {
                event = events.recv() => event,
                () = out.closed() => return,
                () = app.stop.cancelled() => return,
            };
            match event {
                Ok(event) if event.job == id => {
                    (sequence, ended) = (event.sequence, event.ended);
                    break;
                }
                Ok(_) => {}
                Err(RecvError::Lagged(_)) => {
                    (sequence, ended) = (app.handle.sequence(), Vec::new());
                    break;
                }
                Err(RecvError::Closed) => return,
            }
        }
    }
}

/// Sends what happened. Some(true): that was the end of the job; `None`: the client or the job has gone.
async fn tell(app: &App, id: JobId, facts: &Facts, sequence: u64, ended: &[ResultEntry], out: &Out) -> Option<bool> {
    let progress = rows::progress(app.handle.rows(), id).ok().flatten()?;
    let job = views::job(id, facts, &progress, &|key| app.store.url(key));
    for entry in ended {
        let view = EventView { sequence, kind: "task".to_owned(), job: job.clone(), task: Some(task(entry)) };
        send(view, out).await?;
    }
    let over = job.state.ended();
    send(EventView { sequence, kind: "job".to_owned(), job, task: None }, out).await?;
    Some(over)
}

async fn send(view: EventView, out: &Out) -> Option<()> {
    let event = sse::Event::default().id(view.sequence.to_string()).event(&view.kind).json_data(&view).ok()?;
    out.send(Ok(event)).await.ok()
}

fn task(entry: &ResultEntry) -> TaskView {
    let state = match entry.class {
        None => TaskState::Succeeded,
        Some(FailureClass::Cancelled) => TaskState::Cancelled,
        Some(_) => TaskState::Failed,
    };
    TaskView { index: entry.index, state, attempts: u32::from(entry.attempts), class: entry.class, worker: None, next_try: None }
}
