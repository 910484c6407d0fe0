//! `GET /v1/jobs/{job}/events`: what happens to a job, as server-sent events.
//!
//! Owns the order (the present state first, then changes, an end at the job's end), how often the job is told anew, and what is sent
//! when a client falls behind (the present state again). Does not own results in full: those are `results`.

use std::convert::Infallible;
use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::response::sse::{self, KeepAlive, Sse};
use futures::{Stream, StreamExt};
use tokio::sync::broadcast::error::RecvError;
use tokio::sync::{broadcast, mpsc};
use tokio::time::Instant;
use volley_jobspecs::api::{ErrorBody, EventView, TaskState, TaskView};
use volley_jobspecs::failure::FailureClass;
use volley_jobspecs::ids::JobId;

use super::App;
use super::auth::Caller;
use super::error::ApiError;
use super::extract::{PathOf, QueryOf, job_id};
use super::streams::Permit;
use super::views;
use crate::driver::Event;
use crate::state::effects::ResultEntry;
use crate::state::rows;

/// Events that wait for a slow client.
const EVENTS_WAITING: usize = 64;
/// Least time between two events of the job itself: people and progress lines see no more than a few a second, and a job of a million
/// tasks changes thousands of times a second.
const JOB_EVENTS_EVERY: Duration = Duration::from_millis(250);

/// Follows a job: an event for changes of its state or counts (`job`), a few a second at most, each with the job as it is then. The
/// first is the present state; the last says that the job has ended, and the stream ends.
///
/// With `tasks=true` also one for each task that ends (`task`). A client that reads too slowly misses some of those; `results` has all.
#[utoipa::path(get, path = "/v1/jobs/{job}/events", operation_id = "followJobEvents", tag = "jobs",
    params(("job" = String, Path, description = "The job"), ("tasks" = Option<bool>, Query, description = "Also an event for each task that ends; false by default")),
    responses((status = 200, content_type = "text/event-stream", body = EventView), (status = 400, body = ErrorBody), (status = 404, body = ErrorBody),
        (status = 429, body = ErrorBody)))]
pub async fn events(
    State(app): State<Arc<App>>,
    caller: Caller,
    PathOf(job): PathOf<String>,
    query: QueryOf,
) -> Result<Sse<sse::KeepAliveStream<impl Stream<Item = Result<sse::Event, Infallible>>>>, ApiError> {
    let query = query.only(&["tasks"])?;
    let tasks = query.flag("tasks")?;
    let id = job_id(&job)?;
    app.job(&caller, id)?;
    let permit = app.streams.take(&caller.tenant)?;
    let (out, mut waiting) = mpsc::channel(EVENTS_WAITING);
    let keep_alive = KeepAlive::new().interval(app.keep_alive);
    let revoked = caller.revoked(&app);
    tokio::spawn(Follow { events: app.handle.events(), app, id, tasks, out, _permit: permit }.run());
    let stream = futures::stream::poll_fn(move |cx| waiting.poll_recv(cx)).take_until(revoked);
    Ok(Sse::new(stream).keep_alive(keep_alive))
}

type Out = mpsc::Sender<Result<sse::Event, Infallible>>;

/// A stream of events on its way to a client.
struct Follow {
    app: Arc<App>,
    id: JobId,
    /// Listened to before the first look, so that nothing falls between the two.
    events: broadcast::Receiver<Event>,
    /// Also those of tasks?
    tasks: bool,
    out: Out,
    _permit: Permit,
}

impl Follow {
    async fn run(mut self) {
        let mut sequence = self.app.handle.sequence();
        loop {
            // Both anew: the clock of a job submitted to an idle cluster starts a moment later.
            let Some((facts, progress)) = rows::header(self.app.handle.rows(), self.id).ok().flatten() else { return };
            let over = progress.ended_ms.is_some();
            if over {
                // The rows may be ahead of the events: once the driver has answered, it has told everything up to the end.
                _ = self.app.handle.read(|_, _, _| ()).await;
                while let Ok(event) = self.events.try_recv() {
                    if event.job == self.id {
                        sequence = event.sequence.max(sequence);
                        if self.ended(&event).await.is_none() {
                            return;
                        }
                    }
                }
            }
            let job = views::job(self.id, &facts, &progress, &|key| self.app.store.url(key));
            let view = EventView { sequence, kind: "job".to_owned(), job: Some(job), task: None };
            if self.send(view).await.is_none() || over {
                return;
            }
            match self.changed(Instant::now() + JOB_EVENTS_EVERY).await {
                Some(as_of) => sequence = as_of.max(sequence),
                None => return,
            }
        }
    }

    /// Waits until the job has changed and `not_before` has come; its end is told at once. `None`: the client has gone, or the
    /// coordinator stops.
    async fn changed(&mut self, not_before: Instant) -> Option<u64> {
        let mut changed = None;
        loop {
            let event = tokio::select! {
                event = self.events.recv() => event,
                () = tokio::time::sleep_until(not_before), if changed.is_some() => return changed,
                () = self.out.closed() => return None,
                () = self.app.stop.cancelled() => return None,
            };
            match event {
                Ok(event) if event.job == self.id => {
                    changed = Some(event.sequence);
                    self.ended(&event).await?;
                    if event.over {
                        return changed;
                    }
                }
                Ok(_) => {}
                Err(RecvError::Lagged(_)) => changed = Some(self.app.handle.sequence()),
                Err(RecvError::Closed) => return None,
            }
        }
    }

    /// Tells of the tasks that ended, if that is wanted. `None`: the client has gone.
    async fn ended(&self, event: &Event) -> Option<()> {
        for entry in event.ended.iter().filter(|_| self.tasks) {
            self.send(EventView { sequence: event.sequence, kind: "task".to_owned(), job: None, task: Some(task(entry)) }).await?;
        }
        Some(())
    }

    /// `None`: the client has gone.
    async fn send(&self, view: EventView) -> Option<()> {
        let event = sse::Event::default().id(view.sequence.to_string()).event(&view.kind).json_data(&view).ok()?;
        self.out.send(Ok(event)).await.ok()
    }
}

fn task(entry: &ResultEntry) -> TaskView {
    let state = match entry.class {
        None => TaskState::Succeeded,
        Some(FailureClass::Cancelled) => TaskState::Cancelled,
        Some(_) => TaskState::Failed,
    };
    TaskView { index: entry.index, state, attempts: u32::from(entry.attempts), class: entry.class, worker: None, next_try: None }
}
