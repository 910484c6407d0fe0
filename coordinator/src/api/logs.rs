//! `…/tasks/{index}/logs` and `/v1/jobs/{job}/logs`: what tasks wrote, kept and live.
//!
//! Owns reading kept streams and following live ones. Live pieces may be lost on their way; when an attempt ends, what was kept of
//! it fills the end of what was sent. Does not own publishing (the worker).

use std::sync::Arc;
use std::time::Duration;

use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use futures::StreamExt;
use tokio::sync::mpsc;
use volley_jobspecs::api::{ErrorBody, LogLine};
use volley_jobspecs::ids::JobId;
use volley_jobspecs::wire::live::Live;
use volley_jobspecs::wire::report::Stream;
use volley_jobspecs::{keys, subjects, wire};

use super::App;
use super::auth::Caller;
use super::error::ApiError;
use super::extract::{PathOf, QueryOf, job_id, task_index};
use super::outputs::attempt;
use super::streams::{KEEP_ALIVE, Permit};
use super::tasks::stored;
use crate::state::effects::AttemptRow;
use crate::state::rows;

/// Pieces that wait for a slow client; beyond it, live pieces wait at the subscription and are lost there in the end.
const PIECES_WAITING: usize = 16;
/// Bytes of a kept stream fetched at once.
const FETCH_BYTES: u64 = 1024 * 1024;
/// Followers look this often whether an attempt or the job has ended, beside what events tell.
const LOOK_AGAIN: Duration = Duration::from_secs(5);

/// What is wanted of a task's output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Wanted {
    stdout: bool,
    stderr: bool,
}

impl Wanted {
    fn new(query: &QueryOf) -> Result<Self, ApiError> {
        match query.get("stream") {
            None | Some("both") => Ok(Self { stdout: true, stderr: true }),
            Some("stdout") => Ok(Self { stdout: true, stderr: false }),
            Some("stderr") => Ok(Self { stdout: false, stderr: true }),
            Some(_) => Err(ApiError::bad_request("query parameter stream: allowed: stdout, stderr, both")),
        }
    }

    fn has(self, stderr: bool) -> bool {
        if stderr { self.stderr } else { self.stdout }
    }
}

type Out = mpsc::Sender<Result<Bytes, std::io::Error>>;

fn body(mut pieces: mpsc::Receiver<Result<Bytes, std::io::Error>>) -> Body {
    Body::from_stream(futures::stream::poll_fn(move |cx| pieces.poll_recv(cx)))
}

/// What a task wrote, as it wrote it: the kept stream, or what comes with `follow=true`.
///
/// Without `attempt`: of the attempt that decided the task, or the last one. `both` is stdout, then stderr; followed, they come mixed
/// as they are written.
#[utoipa::path(get, path = "/v1/jobs/{job}/tasks/{index}/logs", operation_id = "getTaskLogs", tag = "tasks",
    params(("job" = String, Path, description = "The job"), ("index" = u32, Path, description = "The task, from 0"),
        ("stream" = Option<String>, Query, description = "`stdout`, `stderr` or `both` (default)"), ("attempt" = Option<u32>, Query, description = "Of this attempt, from 1"),
        ("follow" = Option<bool>, Query, description = "Go on until the task has ended")),
    responses((status = 200, content_type = "text/plain"), (status = 404, body = ErrorBody), (status = 429, body = ErrorBody), (status = 503, body = ErrorBody)))]
pub async fn task(State(app): State<Arc<App>>, caller: Caller, PathOf((job, index)): PathOf<(String, String)>, query: QueryOf) -> Result<Response, ApiError> {
    let query = query.only(&["stream", "attempt", "follow"])?;
    let wanted = Wanted::new(&query)?;
    let number = query.parse::<u32>("attempt", "a number from 1")?;
    let (id, index) = (job_id(&job)?, task_index(&index)?);
    let (facts, _) = app.job(&caller, id)?;
    stored(&app, id, &facts, index)?;
    let permit = app.streams.take(&caller.tenant)?;
    let (out, pieces) = mpsc::channel(PIECES_WAITING);
    if query.flag("follow")? {
        let follow = FollowTask::open(app, id, index, number, wanted, out, permit).await?;
        tokio::spawn(follow.run());
    } else {
        let row = attempt(&app, id, index, number)?;
        tokio::spawn(async move {
            let _permit = permit;
            if let Some(row) = row {
                _ = send_kept(&app, &row, wanted, [0, 0], &out).await;
            }
        });
    }
    Ok(([(header::CONTENT_TYPE, "text/plain; charset=utf-8")], body(pieces)).into_response())
}

/// Sends what was kept of an attempt, from these positions on. `None`: the client has gone.
async fn send_kept(app: &App, row: &AttemptRow, wanted: Wanted, from: [u64; 2], out: &Out) -> Option<()> {
    let streams = [("stdout", &row.end.stdout, from[0]), ("stderr", &row.end.stderr, from[1])];
    for (name, stream, from) in streams {
        let Some(stream) = stream.as_ref().filter(|_| wanted.has(name == "stderr")) else { continue };
        // Of a stream whose middle is missing, nobody can tell what follows a position in the middle.
        if from > 0 && stream.truncated {
            continue;
        }
        send_stream(app, &keys::attempt_log(&row.end.name, name), stream, from, out).await?;
    }
    Some(())
}

async fn send_stream(app: &App, key: &str, stream: &Stream, from: u64, out: &Out) -> Option<()> {
    if !stream.stored {
        let begins = stream.bytes.saturating_sub(stream.tail.len() as u64);
        let skip = usize::try_from(from.saturating_sub(begins)).unwrap_or(usize::MAX);
        let rest = stream.tail.get(skip..).unwrap_or_default();
        return if rest.is_empty() { Some(()) } else { out.send(Ok(Bytes::copy_from_slice(rest))).await.ok() };
    }
    let mut at = from;
    loop {
        match app.store.get_range(key, at, FETCH_BYTES).await {
            Ok(bytes) if bytes.is_empty() => return Some(()),
            Ok(bytes) => {
                at += bytes.len() as u64;
                let last = (bytes.len() as u64) < FETCH_BYTES;
                out.send(Ok(bytes)).await.ok()?;
                if last {
                    return Some(());
                }
            }
            Err(volley_store::GetError::PastEnd { .. }) => return Some(()),
            // Retention took it; the tail is what is left.
            Err(error) if error.kind() == volley_store::ErrorKind::NotFound && at == from => {
                return if from == 0 { out.send(Ok(Bytes::copy_from_slice(&stream.tail))).await.ok() } else { Some(()) };
            }
            Err(error) => return out.send(Err(std::io::Error::other(error.to_string()))).await.ok(),
        }
    }
}

/// Follows one task's output.
struct FollowTask {
    app: Arc<App>,
    job: JobId,
    index: u32,
    /// Only this attempt.
    only: Option<u32>,
    wanted: Wanted,
    live: async_nats::Subscriber,
    out: Out,
    /// Attempts up to this one were sent to their end.
    done: u32,
    /// Of the attempt that is being sent: its number, and how far each stream was sent.
    sent: (u32, [u64; 2]),
    _permit: Permit,
}

/// Says that somebody watches a job. Lost ones are made up for by the next.
async fn watch(app: &App, job: JobId) {
    if let Err(error) = app.handle.client().publish(subjects::watch(job), Bytes::new()).await {
        tracing::debug!(%job, %error, "a watch was not sent");
    }
}

async fn subscribe(app: &App, subject: String) -> Result<async_nats::Subscriber, ApiError> {
    let subscribed = app.handle.client().subscribe(subject).await;
    subscribed.map_err(|error| ApiError::unavailable(format!("NATS refused a subscription for live output: {error}")))
}

impl FollowTask {
    async fn open(app: Arc<App>, job: JobId, index: u32, only: Option<u32>, wanted: Wanted, out: Out, permit: Permit) -> Result<Self, ApiError> {
        let live = subscribe(&app, subjects::live(job, index)).await?;
        let ended = rows::attempts(app.handle.rows(), job, index)?;
        let last = ended.last().map_or(0, |(_, row)| row.end.name.number);
        // Earlier attempts are history; of a task that has ended, the last one is shown.
        let done = match only {
            Some(number) => number.saturating_sub(1),
            None if settled(&app, job, index) => last.saturating_sub(1),
            None => last,
        };
        Ok(Self { app, job, index, only, wanted, live, out, done, sent: (0, [0, 0]), _permit: permit })
    }

    async fn run(mut self) {
        let mut events = self.app.handle.events();
        let mut repeat = tokio::time::interval(Duration::from_millis(subjects::WATCH_REPEAT_MS));
        let mut look = tokio::time::interval(LOOK_AGAIN);
        let stop = self.app.stop.clone();
        let out = self.out.clone();
        loop {
            tokio::select! {
                _ = repeat.tick() => watch(&self.app, self.job).await,
                _ = look.tick() => if self.look().await.is_none() { return },
                event = events.recv() => match event {
                    Ok(event) if event.job != self.job => {}
                    Ok(_) | Err(tokio::sync::broadcast::error::RecvError::Lagged(_)) => if self.look().await.is_none() { return },
                    Err(tokio::sync::broadcast::error::RecvError::Closed) => return,
                },
                Some(message) = self.live.next() => {
                    let piece: Option<Live> = wire::decode("live output", &message.payload).ok();
                    if let Some(piece) = piece && self.piece(piece).await.is_none() { return }
                }
                () = out.closed() => return,
                () = stop.cancelled() => return,
                else => return,
            }
        }
    }

    /// Sends a live piece, without what was sent already.
    async fn piece(&mut self, piece: Live) -> Option<()> {
        let number = piece.name.number;
        let other = (piece.name.job, piece.name.index) != (self.job, self.index) || self.only.is_some_and(|only| only != number);
        if other || number <= self.done || number < self.sent.0 || !self.wanted.has(piece.stderr) {
            return Some(());
        }
        if self.sent.0 < number {
            self.sent = (number, [0, 0]);
        }
        let position = &mut self.sent.1[usize::from(piece.stderr)];
        let skip = usize::try_from(position.saturating_sub(piece.offset)).unwrap_or(usize::MAX);
        let Some(rest) = piece.bytes.get(skip..).filter(|rest| !rest.is_empty()) else { return Some(()) };
        *position = piece.offset + piece.bytes.len() as u64;
        self.out.send(Ok(Bytes::copy_from_slice(rest))).await.ok()
    }

    /// Sends the ends of attempts that have ended. `None`: there is nothing more to follow.
    async fn look(&mut self) -> Option<()> {
        let over = settled(&self.app, self.job, self.index);
        let ended = rows::attempts(self.app.handle.rows(), self.job, self.index).ok()?;
        for (_, row) in ended {
            let number = row.end.name.number;
            if number <= self.done || self.only.is_some_and(|only| only != number) {
                continue;
            }
            let from = if self.sent.0 == number { self.sent.1 } else { [0, 0] };
            send_kept(&self.app, &row, self.wanted, from, &self.out).await?;
            self.done = number;
        }
        let enough = self.only.is_some_and(|only| self.done >= only);
        if over || enough { None } else { Some(()) }
    }
}

/// Has the task ended for good (or gone)?
fn settled(app: &App, job: JobId, index: u32) -> bool {
    let header = rows::header(app.handle.rows(), job).ok().flatten();
    let Some((facts, progress)) = header else { return true };
    match stored(app, job, &facts, index) {
        Ok((cell, _)) => cell.settled() || (progress.ended_ms.is_some() && !cell.held),
        Err(_) => true,
    }
}

/// Live output of all tasks of a job that run, one JSON object a line, until the job has ended. Empty lines keep it alive.
#[utoipa::path(get, path = "/v1/jobs/{job}/logs", operation_id = "followJobLogs", tag = "jobs",
    params(("job" = String, Path, description = "The job"), ("follow" = bool, Query, description = "Must be true: kept output is fetched task by task")),
    responses((status = 200, content_type = "application/x-ndjson", body = LogLine), (status = 400, body = ErrorBody), (status = 404, body = ErrorBody),
        (status = 429, body = ErrorBody)))]
pub async fn job(State(app): State<Arc<App>>, caller: Caller, PathOf(job): PathOf<String>, query: QueryOf) -> Result<Response, ApiError> {
    let query = query.only(&["follow"])?;
    if !query.flag("follow")? {
        return Err(ApiError::bad_request("only live output is given for a whole job: ask with follow=true, or per task at …/tasks/{index}/logs"));
    }
    let id = job_id(&job)?;
    app.job(&caller, id)?;
    let permit = app.streams.take(&caller.tenant)?;
    let live = subscribe(&app, subjects::live_all(id)).await?;
    let (out, pieces) = mpsc::channel(PIECES_WAITING);
    tokio::spawn(follow_job(app, id, live, out, permit));
    Ok(([(header::CONTENT_TYPE, "application/x-ndjson")], body(pieces)).into_response())
}

async fn follow_job(app: Arc<App>, job: JobId, mut live: async_nats::Subscriber, out: Out, _permit: Permit) {
    let mut events = app.handle.events();
    let mut repeat = tokio::time::interval(Duration::from_millis(subjects::WATCH_REPEAT_MS));
    let mut alive = tokio::time::interval_at(tokio::time::Instant::now() + KEEP_ALIVE, KEEP_ALIVE);
    let ended = || !matches!(rows::progress(app.handle.rows(), job), Ok(Some(progress)) if progress.ended_ms.is_none());
    loop {
        tokio::select! {
            // Pieces first: those that came before the job's end are sent before the stream ends.
            biased;
            Some(message) = live.next() => {
                let Ok(piece) = wire::decode::<Live>("live output", &message.payload) else { continue };
                let stream = if piece.stderr { "stderr" } else { "stdout" };
                let line = LogLine { index: piece.name.index, stream: stream.to_owned(), text: String::from_utf8_lossy(&piece.bytes).into_owned() };
                let mut bytes = serde_json::to_vec(&line).unwrap_or_default();
                bytes.push(b'\n');
                if out.send(Ok(Bytes::from(bytes))).await.is_err() { return }
                alive.reset();
            }
            _ = alive.tick() => if out.send(Ok(Bytes::from_static(b"\n"))).await.is_err() { return },
            event = events.recv() => match event {
                Ok(event) if event.job != job => {}
                Ok(_) | Err(tokio::sync::broadcast::error::RecvError::Lagged(_)) => if ended() { return },
                Err(tokio::sync::broadcast::error::RecvError::Closed) => return,
            },
            _ = repeat.tick() => {
                if ended() { return }
                watch(&app, job).await;
            }
            () = out.closed() => return,
            () = app.stop.cancelled() => return,
        }
    }
}
