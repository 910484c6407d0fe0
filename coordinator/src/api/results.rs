//! `GET /v1/jobs/{job}/results`: how each task ended, as they end.
//!
//! Owns reading result rows in chunks, their cursor, and following a job to its end. One chunk is in memory at a time, and none is
//! read before the client has taken the one before. Does not own what a row says (`views`).

use std::fmt;
use std::str::FromStr;
use std::sync::Arc;

use axum::body::{Body, Bytes};
use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use futures::StreamExt;
use tokio::sync::broadcast;
use tokio::sync::broadcast::error::RecvError;
use tokio::time::Instant;
use volley_jobspecs::api::{ErrorBody, ResultRow};
use volley_jobspecs::ids::JobId;

use super::App;
use super::auth::Caller;
use super::error::ApiError;
use super::extract::{PathOf, QueryOf, job_id};
use super::streams::Permit;
use super::views;
use crate::driver::Event;
use crate::io::rocks::RocksRows;
use crate::state::effects::{AttemptRow, ResultEntry};
use crate::state::job::Progress;
use crate::state::rows::{self, Rows, RowsError, Table};

/// Rows read at once: with every inline part full 5 MiB, commonly 100 KiB.
pub const CHUNK_ROWS: usize = 500;
/// Stored rows looked at for one chunk: where a rerun superseded many, a reader gets fewer rows rather than waiting for long.
const SCANNED_ROWS_MAX: usize = 50_000;
/// A follower looks again after this long, whatever it heard or missed.
const LOOK_AGAIN: std::time::Duration = std::time::Duration::from_secs(5);

/// A place in a job's results: behind the row of log sequence and place, and behind the tasks that were never given out up to `rest`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Cursor {
    sequence: u64,
    place: u32,
    /// The next task, of those that were never given out.
    rest: u32,
}

impl Cursor {
    /// Before everything.
    pub const START: Self = Self { sequence: 0, place: 0, rest: 0 };
}

impl fmt::Display for Cursor {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}.{}", self.sequence, self.place, self.rest)
    }
}

/// A text that is no cursor.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("not a cursor; take the `cursor` of the last row you have")]
pub struct CursorError;

impl FromStr for Cursor {
    type Err = CursorError;
    fn from_str(text: &str) -> Result<Self, CursorError> {
        let mut parts = text.split('.');
        let mut next = || parts.next().ok_or(CursorError);
        let sequence = next()?.parse().map_err(|_| CursorError)?;
        let place = next()?.parse().map_err(|_| CursorError)?;
        let rest = next()?.parse().map_err(|_| CursorError)?;
        if parts.next().is_some() { Err(CursorError) } else { Ok(Self { sequence, place, rest }) }
    }
}

/// Rows behind a cursor.
#[derive(Debug)]
pub struct Chunk {
    /// The rows.
    pub rows: Vec<ResultRow>,
    /// Behind them.
    pub next: Cursor,
    /// May there be more by now? False: these were all there are.
    pub more: bool,
}

/// Which rows of a job.
#[derive(Debug, Clone, Copy)]
pub struct Wanted<'a> {
    /// Which job.
    pub job: JobId,
    /// As it stood before its rows are read.
    pub progress: &'a Progress,
    /// Also those that a rerun superseded.
    pub superseded: bool,
}

/// Reads the next rows of a job, at most `limit`.
///
/// # Errors
/// [`RowsError`] when the store fails or a row is damaged.
pub fn chunk(rows: &RocksRows, url: &dyn Fn(&str) -> String, wanted: Wanted<'_>, from: Cursor, limit: usize) -> Result<Chunk, RowsError> {
    let Wanted { job, progress, superseded } = wanted;
    let mut entries: Vec<(Cursor, ResultEntry)> = Vec::with_capacity(limit);
    let (mut damaged, mut next, mut scanned, mut more) = (None, from, 0, false);
    let start = rows::result_key(job, from.sequence, from.place);
    rows.scan(Table::Results, &rows::job_key(job), &start, &mut |key, value| {
        let Some((sequence, place)) = place_of(key) else { return true };
        if (sequence, place) == (from.sequence, from.place) {
            return true;
        }
        more = entries.len() == limit || scanned == SCANNED_ROWS_MAX;
        if more {
            return false;
        }
        (scanned, next) = (scanned + 1, Cursor { sequence, place, rest: from.rest });
        match rows::result_entry(key, value) {
            Ok(entry) if superseded || !progress.supersedes(sequence, entry.class) => entries.push((next, entry)),
            Ok(_) => {}
            Err(error) => damaged = Some(error),
        }
        damaged.is_none()
    })?;
    if let Some(error) = damaged {
        return Err(error);
    }
    let decided: Vec<_> =
        entries.iter().filter(|(_, entry)| entry.number > 0).map(|(_, entry)| rows::try_key(job, entry.index, entry.number)).collect();
    let mut attempts = rows.first_of_each(Table::Attempts, &decided)?.into_iter();
    let mut found = Vec::with_capacity(entries.len());
    for (cursor, entry) in entries {
        let row = if entry.number > 0 { attempts.next().flatten() } else { None };
        let row: Option<AttemptRow> = row.and_then(|(_, value)| volley_jobspecs::wire::decode("attempt", &value).ok());
        let mut view = views::result(&entry, row.as_ref(), cursor.to_string(), url);
        view.superseded = progress.supersedes(cursor.sequence, entry.class);
        if entry.number == 0 {
            view.message = views::undecided(entry.class, progress.reason.as_deref().filter(|_| !view.superseded));
        }
        found.push(view);
    }
    Ok(Chunk { rows: found, next, more })
}

/// The key's log sequence and place.
fn place_of(key: &[u8]) -> Option<(u64, u32)> {
    let sequence = u64::from_be_bytes(key.get(8..16)?.try_into().ok()?);
    Some((sequence, u32::from_be_bytes(key.get(16..20)?.try_into().ok()?)))
}

/// Rows of tasks that were never given out, once their job has ended: they have none in the store.
fn rest(progress: &Progress, tasks: u32, from: Cursor, limit: usize) -> Chunk {
    let Some(class) = progress.rest.filter(|_| progress.ended_ms.is_some()) else {
        return Chunk { rows: Vec::new(), next: from, more: false };
    };
    let first = progress.next_fresh.max(from.rest);
    let end = tasks.min(first.saturating_add(u32::try_from(limit).unwrap_or(u32::MAX)));
    let mut next = from;
    let row = |index| {
        next = Cursor { rest: index + 1, ..from };
        let entry = ResultEntry { index, number: 0, class: Some(class), attempts: 0 };
        let message = views::undecided(entry.class, progress.reason.as_deref());
        ResultRow { message, ..views::result(&entry, None, next.to_string(), &|key| key.to_owned()) }
    };
    let rows = (first..end).map(row).collect();
    Chunk { rows, next, more: end < tasks }
}

/// Appends a row as one line of JSON.
pub fn line(row: &ResultRow, bytes: &mut Vec<u8>) {
    // Text and numbers only: there is no failing path.
    if serde_json::to_writer(&mut *bytes, row).is_ok() {
        bytes.push(b'\n');
    }
}

/// A stream of results on its way to a client.
struct Follow {
    app: Arc<App>,
    job: JobId,
    tasks: u32,
    cursor: Cursor,
    superseded: bool,
    /// None: ends at what is there.
    events: Option<broadcast::Receiver<Event>>,
    /// When something was last sent.
    sent: Instant,
    _permit: Permit,
}

enum Step {
    Bytes(Bytes),
    /// Nothing so far, but there is more.
    Again,
    /// Nothing new now, but there may be.
    Wait,
    End,
}

impl Follow {
    /// The next bytes; none: the stream has ended.
    async fn next(mut self) -> Option<(Result<Bytes, std::io::Error>, Self)> {
        loop {
            match self.step().await {
                Ok(Step::Bytes(bytes)) => {
                    self.sent = Instant::now();
                    return Some((Ok(bytes), self));
                }
                Ok(Step::Wait) if self.sent.elapsed() >= self.app.keep_alive => {
                    self.sent = Instant::now();
                    return Some((Ok(Bytes::from_static(b"\n")), self));
                }
                Ok(Step::Again) => {}
                Ok(Step::End) => return None,
                Ok(Step::Wait) => {
                    if !self.wait().await {
                        return None;
                    }
                }
                // The head was sent as success; breaking the body off is the only way to say that this is not all.
                Err(error) => return Some((Err(std::io::Error::other(error.to_string())), self)),
            }
        }
    }

    async fn step(&mut self) -> Result<Step, RowsError> {
        let (app, job, tasks, from, superseded) = (self.app.clone(), self.job, self.tasks, self.cursor, self.superseded);
        let read = tokio::task::spawn_blocking(move || {
            let rows = app.handle.rows();
            // Looked at before the rows: an end that was seen means that every row is there.
            let Some(progress) = rows::progress(rows, job)? else { return Ok(None) };
            let mut chunk = chunk(rows, &|key| app.store.url(key), Wanted { job, progress: &progress, superseded }, from, CHUNK_ROWS)?;
            if !chunk.more {
                let more = rest(&progress, tasks, chunk.next, CHUNK_ROWS - chunk.rows.len());
                chunk.rows.extend(more.rows);
                (chunk.next, chunk.more) = (more.next, more.more);
            }
            let mut bytes = Vec::with_capacity(chunk.rows.len() * 256);
            chunk.rows.iter().for_each(|row| line(row, &mut bytes));
            Ok(Some((bytes, chunk.next, progress.ended_ms.is_some(), chunk.more)))
        });
        let read = read.await.map_err(|error| RowsError::Store(format!("a read ended early: {error}")))??;
        // A job that was removed meanwhile has no more results.
        let Some((bytes, next, ended, more)) = read else { return Ok(Step::End) };
        self.cursor = next;
        Ok(match (bytes.is_empty(), more, ended || self.events.is_none()) {
            (false, ..) => Step::Bytes(Bytes::from(bytes)),
            (true, true, _) => Step::Again,
            (true, false, true) => Step::End,
            (true, false, false) => Step::Wait,
        })
    }

    /// Waits until something of the job has changed; false: the coordinator stops.
    async fn wait(&mut self) -> bool {
        let Some(events) = &mut self.events else { return false };
        let job = self.job;
        let changed = async {
            loop {
                match events.recv().await {
                    Ok(event) if event.job == job => return true,
                    Ok(_) => {}
                    Err(RecvError::Lagged(_)) => return true,
                    Err(RecvError::Closed) => return false,
                }
            }
        };
        tokio::select! {
            changed = changed => changed,
            () = tokio::time::sleep(LOOK_AGAIN.min(self.app.keep_alive)) => true,
            () = self.app.stop.cancelled() => false,
        }
    }
}

/// Streams how the tasks of a job ended, one JSON object a line, in the order they ended.
///
/// With `follow=true` the stream goes on until the job has ended and every row was sent; an empty line now and then keeps it alive. Each task has at
/// most one row: what a rerun superseded is left out, unless `superseded=true` asks for it; such a row says so.
#[utoipa::path(get, path = "/v1/jobs/{job}/results", operation_id = "streamResults", tag = "jobs",
    params(("job" = String, Path, description = "The job"), ("after" = Option<String>, Query, description = "Cursor of the last row you have"),
        ("follow" = Option<bool>, Query, description = "Go on until the job has ended"),
        ("superseded" = Option<bool>, Query, description = "Also rows that a rerun superseded"), ("tenant" = Option<String>, Query, description = "Operators: whose")),
    responses((status = 200, content_type = "application/x-ndjson", body = ResultRow), (status = 400, body = ErrorBody), (status = 404, body = ErrorBody),
        (status = 429, body = ErrorBody)))]
pub async fn results(
    State(app): State<Arc<App>>,
    caller: Caller,
    PathOf(job): PathOf<String>,
    query: QueryOf,
) -> Result<Response, ApiError> {
    let query = query.only(&["after", "follow", "superseded"])?;
    let job = job_id(&job)?;
    let (facts, _) = app.job(&caller, job)?;
    let cursor = query.parse::<Cursor>("after", "the cursor of a row, such as 1042.0.0")?.unwrap_or(Cursor::START);
    let permit = app.streams.take(&caller.tenant)?;
    let superseded = query.flag("superseded")?;
    let events = query.flag("follow")?.then(|| app.handle.events());
    let revoked = caller.revoked(&app);
    let follow = Follow { app, job, tasks: facts.plan.tasks, cursor, superseded, events, sent: Instant::now(), _permit: permit };
    let body = Body::from_stream(futures::stream::unfold(follow, Follow::next).take_until(revoked));
    Ok(([(header::CONTENT_TYPE, "application/x-ndjson")], body).into_response())
}

#[cfg(test)]
mod tests {
    use super::*;
    use volley_jobspecs::failure::FailureClass;

    #[test]
    fn cursors_round_trip_and_refuse_other_text() {
        let cursor = Cursor { sequence: 1042, place: 7, rest: 3 };
        assert_eq!(cursor.to_string().parse(), Ok(cursor));
        for bad in ["", "1", "1.2", "1.2.3.4", "a.b.c", "-1.0.0", "1.2.99999999999"] {
            assert_eq!(bad.parse::<Cursor>(), Err(CursorError), "{bad}");
        }
    }

    #[test]
    fn tasks_that_never_started_are_rows_once_the_job_has_ended() {
        let mut progress = Progress { next_fresh: 3, rest: Some(FailureClass::Cancelled), ..Progress::default() };
        assert_eq!(rest(&progress, 10, Cursor::START, 4).rows.len(), 0);
        progress.ended_ms = Some(1);
        let first = rest(&progress, 10, Cursor::START, 4);
        assert_eq!(first.rows.iter().map(|r| r.index).collect::<Vec<_>>(), [3, 4, 5, 6]);
        let second = rest(&progress, 10, first.next, 4);
        assert_eq!(second.rows.iter().map(|r| r.index).collect::<Vec<_>>(), [7, 8, 9]);
        assert_eq!(rest(&progress, 10, second.next, 4).rows.len(), 0);
    }
}
