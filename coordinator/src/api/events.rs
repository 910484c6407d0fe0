//! `GET /v1/jobs/{job}/events`: what happens to a job, as server-sent events.
//!
//! Owns the order (the present state first, then changes, an end at the job's end) and what is sent when a client falls behind (the
//! present state again). Does not own results in full: those are `results`.

use std::convert::Infallible;
use std::sync::Arc;

use axum::extract::State;
use axum::response::sse::{self, KeepAlive, Sse};
use futures::Stream;
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::{broadcast, mpsc};
use volley_jobspecs::api::{ErrorBody, EventView, JobView, TaskState, TaskView};
use volley_jobspecs::failure::FailureClass;
use volley_jobspecs::ids::JobId;

use super::App;
use super::auth::Caller;
use super::error::ApiError;
use super::extract::{PathOf, QueryOf, job_id};
use super::streams::{KEEP_ALIVE, Permit};
use super::views;
use crate::driver::Event;
use crate::state::effects::ResultEntry;
use crate::state::job::Facts;
use crate::state::rows;

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
        let Some(progress) = rows::progress(app.handle.rows(), id).ok().flatten() else { return };
        let over = progress.ended_ms.is_some();
        if over {
            // The rows may be ahead of the events: once the driver has answered, it has told everything up to the end.
            _ = app.handle.read(|_, _, _| ()).await;
            while let Ok(event) = events.try_recv() {
                if event.job == id {
                    sequence = event.sequence.max(sequence);
                    ended.extend(event.ended);
                }
            }
        }
        let job = views::job(id, &facts, &progress, &|key| app.store.url(key));
        if tell(job, sequence, &ended, &out).await.is_none() || over {
            return;
        }
        match next(&app, id, &mut events, &out).await {
            Some((as_of, tasks)) => (sequence, ended) = (as_of, tasks),
            None => return,
        }
    }
}

/// Waits for the job's next event; `None`: the client has gone, or the coordinator stops.
async fn next(app: &App, id: JobId, events: &mut broadcast::Receiver<Event>, out: &Out) -> Option<(u64, Vec<ResultEntry>)> {
    loop {
        let event = tokio::select! {
            event = events.recv() => event,
            () = out.closed() => return None,
            () = app.stop.cancelled() => return None,
        };
        match event {
            Ok(event) if event.job == id => return Some((event.sequence, event.ended)),
            Ok(_) => {}
            Err(RecvError::Lagged(_)) => return Some((app.handle.sequence(), Vec::new())),
            Err(RecvError::Closed) => return None,
        }
    }
}

/// Sends what happened. `None`: the client has gone.
async fn tell(job: JobView, sequence: u64, ended: &[ResultEntry], out: &Out) -> Option<()> {
    for entry in ended {
        let view = EventView { sequence, kind: "task".to_owned(), job: job.clone(), task: Some(task(entry)) };
        send(view, out).await?;
    }
    send(EventView { sequence, kind: "job".to_owned(), job, task: None }, out).await
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
