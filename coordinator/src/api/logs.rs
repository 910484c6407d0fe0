//! `…/tasks/{index}/logs` and `/v1/jobs/{job}/logs`: what tasks wrote, kept and live.
//!
//! Owns those routes and reading kept streams. Does not own following live ones (`follow`).

use std::sync::Arc;

use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use futures::StreamExt;
use futures::future::BoxFuture;
use tokio::sync::mpsc;
use volley_jobspecs::api::{ErrorBody, LogLine};
use volley_jobspecs::ids::AttemptName;
use volley_jobspecs::wire::report::Stream;
use volley_jobspecs::{keys, subjects};

use super::App;
use super::auth::Caller;
use super::error::ApiError;
use super::extract::{PathOf, QueryOf, job_id, task_index};
use super::follow::{self, FollowTask, Place, Sink};
use super::outputs::attempt;
use super::tasks::stored;
use crate::state::effects::AttemptRow;
use crate::state::task::Phase;

/// Pieces that wait for a slow client; beyond it, live pieces wait at the subscription and are lost there in the end.
const PIECES_WAITING: usize = 16;
/// Bytes of a kept stream fetched at once.
const FETCH_BYTES: u64 = 1024 * 1024;

/// What is wanted of a task's output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Wanted {
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

    /// Is this stream wanted?
    #[must_use]
    pub fn has(self, stderr: bool) -> bool {
        if stderr { self.stderr } else { self.stdout }
    }
}

fn body(mut pieces: mpsc::Receiver<Result<Bytes, std::io::Error>>, revoked: BoxFuture<'static, ()>) -> Body {
    Body::from_stream(futures::stream::poll_fn(move |cx| pieces.poll_recv(cx)).take_until(revoked))
}

/// What a task wrote, as it wrote it: the kept stream, or what comes with `follow=true`.
///
/// Without `attempt`: of the attempt that runs now, else of the one that decided the task, or the last one. Of an attempt that runs it is
/// what it has written so far; of much output the beginning and the end. `both` is stdout, then stderr; followed, they come mixed as they
/// are written.
///
/// A followed stream of raw bytes that breaks off can't be gone on with, and is silent as long as the task is. With `form=pieces` it is
/// lines of JSON (`LogPiece`) instead: each says where to go on, empty lines keep the stream alive, and the last one says that it is the end.
#[utoipa::path(get, path = "/v1/jobs/{job}/tasks/{index}/logs", operation_id = "getTaskLogs", tag = "tasks",
    params(("job" = String, Path, description = "The job"), ("index" = u32, Path, description = "The task, from 0"),
        ("stream" = Option<String>, Query, description = "`stdout`, `stderr` or `both` (default)"), ("attempt" = Option<u32>, Query, description = "Of this attempt, from 1"),
        ("follow" = Option<bool>, Query, description = "Go on until the task has ended"),
        ("form" = Option<String>, Query, description = "With `follow`: `raw` (default) or `pieces`"),
        ("after" = Option<String>, Query, description = "With `form=pieces`: cursor of the last piece you have")),
    responses((status = 200, content_type = "text/plain"), (status = 404, body = ErrorBody), (status = 429, body = ErrorBody), (status = 503, body = ErrorBody)))]
pub async fn task(
    State(app): State<Arc<App>>,
    caller: Caller,
    PathOf((job, index)): PathOf<(String, String)>,
    query: QueryOf,
) -> Result<Response, ApiError> {
    let query = query.only(&["stream", "attempt", "follow", "form", "after"])?;
    let (wanted, follows, pieces) = (Wanted::new(&query)?, query.flag("follow")?, pieces(&query)?);
    let after = query.parse::<Place>("after", "the cursor of a piece, such as 1.1024.0")?;
    if !follows && (pieces || after.is_some()) || !pieces && after.is_some() {
        return Err(ApiError::bad_request("form=pieces is for follow=true, and after is for form=pieces"));
    }
    let number = query.parse::<u32>("attempt", "a number from 1")?;
    let (id, index) = (job_id(&job)?, task_index(&index)?);
    let (facts, _) = app.job(&caller, id)?;
    let (cell, _) = stored(&app, id, &facts, index)?;
    let open = (cell.phase == Phase::Open).then(|| u32::from(cell.number)).filter(|open| number.is_none_or(|number| number == *open));
    let permit = app.streams.take(&caller.tenant)?;
    let (out, waiting) = mpsc::channel(PIECES_WAITING);
    let mut sink = Sink::new(out, pieces, after.unwrap_or_default());
    let revoked = caller.revoked(&app);
    if follows {
        let follow = FollowTask::open(app, (id, index), number, wanted, sink, permit).await?;
        tokio::spawn(follow.run());
    } else if open.is_some() {
        // Of a rerun of a success, that is what there is until the new attempt begins.
        let before = if number.is_none() { attempt(&app, id, index, None)? } else { None };
        let follow = FollowTask::open(app, (id, index), open, wanted, sink, permit).await?;
        tokio::spawn(follow.so_far(before));
    } else {
        let row = attempt(&app, id, index, number)?;
        tokio::spawn(async move {
            let _permit = permit;
            if let Some(row) = row {
                _ = send_kept(&app, &row, wanted, [0, 0], &mut sink).await;
            }
        });
    }
    let kind = if pieces { "application/x-ndjson" } else { "text/plain; charset=utf-8" };
    Ok(([(header::CONTENT_TYPE, kind)], body(waiting, revoked)).into_response())
}

/// Are lines of JSON wanted?
fn pieces(query: &QueryOf) -> Result<bool, ApiError> {
    match query.get("form") {
        None | Some("raw") => Ok(false),
        Some("pieces") => Ok(true),
        Some(_) => Err(ApiError::bad_request("query parameter form: allowed: raw, pieces")),
    }
}

/// Sends what was kept of an attempt, from these positions on. `None`: the client has gone.
pub async fn send_kept(app: &App, row: &AttemptRow, wanted: Wanted, from: [u64; 2], sink: &mut Sink) -> Option<()> {
    let streams = [("stdout", &row.end.stdout, from[0]), ("stderr", &row.end.stderr, from[1])];
    for (name, stream, from) in streams {
        let stderr = name == "stderr";
        let Some(stream) = stream.as_ref().filter(|_| wanted.has(stderr)) else { continue };
        if from == 0 || !stream.truncated {
            send_stream(app, &row.end.name, stderr, stream, from, sink).await?;
        } else if from < stream.bytes {
            // Of a stream whose middle is missing, the only place that is known is that of its last bytes.
            sink.gap(tail_begins(stream).saturating_sub(from)).await?;
            send_tail(&row.end.name, stderr, stream, from, true, sink).await?;
        }
        sink.ended(&row.end.name, stderr, stream.bytes);
    }
    Some(())
}

/// Where the part of a stream begins that rides in its attempt's end.
fn tail_begins(stream: &Stream) -> u64 {
    stream.bytes.saturating_sub(stream.tail.len() as u64)
}

/// Sends what of that part lies behind `from`.
async fn send_tail(name: &AttemptName, stderr: bool, stream: &Stream, from: u64, moves: bool, sink: &mut Sink) -> Option<()> {
    let begins = tail_begins(stream);
    let skip = usize::try_from(from.saturating_sub(begins)).unwrap_or(usize::MAX).min(stream.tail.len());
    let tail = Bytes::copy_from_slice(stream.tail.get(skip..).unwrap_or_default());
    sink.send(name, stderr, begins + skip as u64, tail, moves).await
}

async fn send_stream(app: &App, name: &AttemptName, stderr: bool, stream: &Stream, from: u64, sink: &mut Sink) -> Option<()> {
    let key = keys::attempt_log(name, if stderr { "stderr" } else { "stdout" });
    // Where the middle is missing, a place in what was kept is none in the stream.
    let moves = !stream.truncated;
    if !stream.stored {
        return send_tail(name, stderr, stream, from, moves, sink).await;
    }
    let mut at = from;
    loop {
        match app.store.get_range(&key, at, FETCH_BYTES).await {
            Ok(bytes) if bytes.is_empty() => return Some(()),
            Ok(bytes) => {
                let (offset, last) = (at, (bytes.len() as u64) < FETCH_BYTES);
                at += bytes.len() as u64;
                sink.send(name, stderr, offset, bytes, moves).await?;
                if last {
                    return Some(());
                }
            }
            Err(volley_store::GetError::PastEnd { .. }) => return Some(()),
            // Retention took it; the tail is what is left.
            Err(error) if error.kind() == volley_store::ErrorKind::NotFound && at == from => {
                return if from == 0 { send_tail(name, stderr, stream, 0, moves, sink).await } else { Some(()) };
            }
            Err(error) => {
                _ = sink.fail(error.to_string()).await;
                return None;
            }
        }
    }
}

/// Live output of all tasks of a job that run, one JSON object a line, until the job has ended: first a little of what they wrote before,
/// then everything. Empty lines keep it alive.
#[utoipa::path(get, path = "/v1/jobs/{job}/logs", operation_id = "followJobLogs", tag = "jobs",
    params(("job" = String, Path, description = "The job"), ("follow" = bool, Query, description = "Must be true: kept output is fetched task by task")),
    responses((status = 200, content_type = "application/x-ndjson", body = LogLine), (status = 400, body = ErrorBody), (status = 404, body = ErrorBody),
        (status = 429, body = ErrorBody)))]
pub async fn job(State(app): State<Arc<App>>, caller: Caller, PathOf(job): PathOf<String>, query: QueryOf) -> Result<Response, ApiError> {
    let query = query.only(&["follow"])?;
    if !query.flag("follow")? {
        return Err(ApiError::bad_request(
            "only live output is given for a whole job: ask with follow=true, or per task at …/tasks/{index}/logs",
        ));
    }
    let id = job_id(&job)?;
    app.job(&caller, id)?;
    let permit = app.streams.take(&caller.tenant)?;
    let live = follow::subscribe(&app, subjects::live_all(id)).await?;
    let (out, pieces) = mpsc::channel(PIECES_WAITING);
    let revoked = caller.revoked(&app);
    tokio::spawn(follow::follow_job(app, id, live, out, permit));
    Ok(([(header::CONTENT_TYPE, "application/x-ndjson")], body(pieces, revoked)).into_response())
}
