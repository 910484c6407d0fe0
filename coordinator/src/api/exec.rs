//! `/v1/jobs/{job}/tasks/{index}/exec`: a command in a task's machine, over a WebSocket.
//!
//! Owns the route, what is wished for, and which attempt's machine is meant. Handing frames on is in `relay`, the machine is the worker's
//! (`shells` there).

mod relay;

use std::sync::Arc;
use std::time::Duration;

use async_nats::StatusCode as NatsStatus;
use axum::extract::State;
use axum::extract::ws::WebSocketUpgrade;
use axum::extract::ws::rejection::WebSocketUpgradeRejection;
use axum::http::StatusCode;
use axum::response::Response;
use futures::StreamExt;
use relay::Relay;
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use volley_jobspecs::api::ErrorBody;
use volley_jobspecs::ids::{AttemptName, JobId, WorkerId};
use volley_jobspecs::wire::plan::Isolation;
use volley_jobspecs::wire::report::Ending;
use volley_jobspecs::wire::shell::{self, BadWish, FRAME_BYTES_MAX, Open, Opened, Refused, SessionId, Tty};
use volley_jobspecs::{subjects, wire};

use super::App;
use super::auth::Caller;
use super::error::ApiError;
use super::extract::{PathOf, QueryOf, job_id, task_index};
use super::tasks::{holders, stored};
use crate::state::rows;

/// Shells that go through one coordinator at once: each holds a connection, a subscription and up to half a megabyte on its way.
pub const SESSIONS_MAX: usize = 128;
/// How long a worker may take to answer: it asks nobody.
const ANSWER_WAIT: Duration = Duration::from_secs(5);

/// Room for [`SESSIONS_MAX`].
#[must_use]
pub fn sessions() -> Arc<Semaphore> {
    Arc::new(Semaphore::new(SESSIONS_MAX))
}

/// Runs a command in the machine of a task that runs there, or of one that failed and whose machine was kept (`task.keepFailed`).
///
/// Without `attempt`: of the one that runs now, else of the last that ended. Without `cmd`: a shell. The answer is a WebSocket whose binary
/// messages are frames in CBOR, numbered from 1 in each direction: input, output, sizes of the terminal, and how the command ended. The
/// command line and the SDK speak it. Only tasks with isolation `microvm` have a machine; whoever may cancel the job may do this.
#[utoipa::path(get, path = "/v1/jobs/{job}/tasks/{index}/exec", operation_id = "execInTask", tag = "tasks",
    params(("job" = String, Path, description = "The job"), ("index" = u32, Path, description = "The task, from 0"),
        ("attempt" = Option<u32>, Query, description = "Of this attempt, from 1"),
        ("tty" = Option<String>, Query, description = "With a terminal of this size: `24x80`, lines and columns"),
        ("term" = Option<String>, Query, description = "With `tty`: what kind of terminal shows it, such as `xterm-256color`"),
        ("cmd" = Option<Vec<String>>, Query, description = "The command's words, one parameter each; a shell when none is given")),
    responses((status = 101, description = "The command is being started; frames follow"), (status = 400, body = ErrorBody),
        (status = 404, body = ErrorBody), (status = 409, body = ErrorBody),
        (status = 426, description = "It was not asked as a WebSocket", body = ErrorBody), (status = 429, body = ErrorBody),
        (status = 503, body = ErrorBody)))]
pub async fn exec(
    State(app): State<Arc<App>>,
    caller: Caller,
    PathOf((job, index)): PathOf<(String, String)>,
    query: QueryOf,
    upgrade: Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
) -> Result<Response, ApiError> {
    let query = query.only(&["attempt", "tty", "term", "cmd"])?;
    let number = query.parse::<u32>("attempt", "a number from 1")?;
    let (id, index) = (job_id(&job)?, task_index(&index)?);
    let wish = Wish::read(&query)?;
    let Meant { name, worker, runs } = machine(&app, &caller, id, index, number).await?;
    let upgrade = upgrade.map_err(|_| {
        let hint = "this path is a WebSocket (RFC 6455): `volley exec` and the SDK speak it";
        ApiError::new(StatusCode::UPGRADE_REQUIRED, "upgrade_required", hint)
    })?;
    let places = (app.streams.take(&caller.tenant)?, session_place(&app)?);
    let session = new_session()?;
    let frames = app.handle.client().subscribe(subjects::shell_from_worker(&worker, &session)).await;
    let frames = frames.map_err(|error| ApiError::unavailable(format!("NATS refused a subscription for a shell: {error}")))?;
    let open = Open { name, session, argv: wish.argv, tty: wish.tty, term: wish.term, end: false };
    ask(&app, &worker, &open, runs).await?;
    tracing::info!(job = %id, task = index, attempt = name.number, principal = caller.principal, "a shell was opened");
    let relay = Relay { revoked: caller.revoked(&app), app, to: subjects::shell_to_worker(&worker, &session), places };
    let upgrade = upgrade.max_message_size(FRAME_BYTES_MAX).max_frame_size(FRAME_BYTES_MAX);
    Ok(upgrade.on_upgrade(move |socket| relay.run(socket, frames)))
}

/// Ends the machine of a failed attempt that is kept (`task.keepFailed`), with whatever is run in it. Without `attempt`: of the last one.
#[utoipa::path(delete, path = "/v1/jobs/{job}/tasks/{index}/exec", operation_id = "endKeptMachine", tag = "tasks",
    params(("job" = String, Path, description = "The job"), ("index" = u32, Path, description = "The task, from 0"),
        ("attempt" = Option<u32>, Query, description = "Of this attempt, from 1")),
    responses((status = 204), (status = 400, body = ErrorBody), (status = 404, body = ErrorBody),
        (status = 409, description = "None is kept", body = ErrorBody), (status = 503, body = ErrorBody)))]
pub async fn end(
    State(app): State<Arc<App>>,
    caller: Caller,
    PathOf((job, index)): PathOf<(String, String)>,
    query: QueryOf,
) -> Result<StatusCode, ApiError> {
    let query = query.only(&["attempt"])?;
    let number = query.parse::<u32>("attempt", "a number from 1")?;
    let (id, index) = (job_id(&job)?, task_index(&index)?);
    let Meant { name, worker, runs } = machine(&app, &caller, id, index, number).await?;
    // What an older worker runs instead does nothing.
    let open = Open { name, session: new_session()?, argv: vec!["true".to_owned()], tty: None, term: None, end: true };
    ask(&app, &worker, &open, runs).await?;
    tracing::info!(job = %id, task = index, attempt = name.number, principal = caller.principal, "a machine that was kept was ended");
    Ok(StatusCode::NO_CONTENT)
}

fn session_place(app: &App) -> Result<OwnedSemaphorePermit, ApiError> {
    app.sessions.clone().try_acquire_owned().map_err(|_| {
        let message = format!("{SESSIONS_MAX} shells are open at this coordinator, the most; end one, or ask another coordinator");
        ApiError::new(StatusCode::TOO_MANY_REQUESTS, "too_many_streams", message)
    })
}

fn new_session() -> Result<SessionId, ApiError> {
    let mut bytes = [0; 16];
    getrandom::fill(&mut bytes).map_err(|e| ApiError::unavailable(format!("no randomness from the system: {e}")))?;
    Ok(SessionId::new(bytes))
}

/// What is to be run, and how.
#[derive(Debug)]
struct Wish {
    argv: Vec<String>,
    tty: Option<Tty>,
    term: Option<String>,
}

impl Wish {
    fn read(query: &QueryOf) -> Result<Self, ApiError> {
        let argv: Vec<String> = query.all("cmd").map(str::to_owned).collect();
        let tty = query
            .get("tty")
            .map(|text| size(text).ok_or_else(|| ApiError::bad_request("query parameter tty: allowed: ROWSxCOLS, such as 24x80")));
        let term = query.get("term").map(str::to_owned);
        shell::check(&argv, term.as_deref()).map_err(|why| {
            let parameter = if why == BadWish::Term { "term" } else { "cmd" };
            ApiError::bad_request(format!("query parameter {parameter}: {why}"))
        })?;
        Ok(Self { argv, tty: tty.transpose()?, term })
    }
}

fn size(text: &str) -> Option<Tty> {
    let (rows, cols) = text.split_once('x')?;
    Some(Tty { rows: rows.parse().ok()?, cols: cols.parse().ok()? })
}

/// An attempt and its worker.
#[derive(Debug)]
struct Meant {
    name: AttemptName,
    worker: WorkerId,
    /// It has not ended.
    runs: bool,
}

/// The attempt whose machine is meant, and its worker.
async fn machine(app: &App, caller: &Caller, id: JobId, index: u32, number: Option<u32>) -> Result<Meant, ApiError> {
    let (facts, _) = app.job(caller, id)?;
    stored(app, id, &facts, index)?;
    if facts.plan.needs.isolation != Isolation::Microvm {
        return Err(ApiError::conflict(format!(
            "only tasks with isolation \"microvm\" have a machine; those of job {id} have \"{}\", and run on their worker's host",
            facts.plan.needs.isolation.as_str()
        )));
    }
    if let Some((name, worker, _)) = holders(app, id, vec![index]).await?.remove(&index)
        && number.is_none_or(|number| number == name.number)
    {
        return Ok(Meant { name, worker, runs: true });
    }
    let mut ended = rows::attempts(app.handle.rows(), id, index)?.into_iter().map(|(_, row)| row);
    let row = match number {
        Some(number) => ended.find(|row| row.end.name.number == number).ok_or_else(|| {
            ApiError::not_found(format!("there is no attempt {number} of task {index} of job {id}; `volley task {id} {index}` lists them"))
        })?,
        None => ended.next_back().ok_or_else(|| {
            ApiError::conflict(format!(
                "task {index} of job {id} has not begun, so it has no machine; `volley explain {id} {index}` says what it waits for"
            ))
        })?,
    };
    if row.end.ending == Ending::Succeeded {
        let message = format!(
            "attempt {} of task {index} of job {id} succeeded and its machine is gone; only those of failed attempts are kept, with task.keepFailed",
            row.end.name.number
        );
        return Err(ApiError::conflict(message));
    }
    Ok(Meant { name: row.end.name, worker: row.worker, runs: false })
}

/// Asks the worker for the session.
async fn ask(app: &App, worker: &WorkerId, open: &Open, runs: bool) -> Result<(), ApiError> {
    let client = app.handle.client();
    let away = |why: String| ApiError::unavailable(format!("worker {worker} can't be asked for a shell: {why}"));
    let reply = subjects::shell_answer(&open.session);
    let mut answers = client.subscribe(reply.clone()).await.map_err(|error| away(error.to_string()))?;
    let asked = client.publish_with_reply(subjects::shell(worker), reply, wire::encode(open).into()).await;
    asked.map_err(|error| away(error.to_string()))?;
    let answer = tokio::time::timeout(ANSWER_WAIT, answers.next()).await;
    let answer = match answer {
        Ok(Some(message)) if message.status == Some(NatsStatus::NO_RESPONDERS) => {
            return Err(away("it is not connected, or of an older build; `volley workers` shows it".to_owned()));
        }
        Ok(Some(message)) => {
            wire::decode::<Opened>("answer to a wish for a shell", &message.payload).map_err(|why| away(why.to_string()))?
        }
        Ok(None) => return Err(away("the connection to NATS ended".to_owned())),
        Err(_) => return Err(away(format!("no answer within {} s", ANSWER_WAIT.as_secs()))),
    };
    let AttemptName { job, index, number, .. } = open.name;
    match answer {
        Opened::Yes => Ok(()),
        Opened::No { kind: Refused::NotHere, text } => Err(ApiError::new(
            StatusCode::CONFLICT,
            "conflict",
            format!(
                "attempt {number} of task {index} of job {job} has no machine now: {text}{}",
                match runs {
                    true => format!("; `volley explain {job} {index}` says how far it is"),
                    // It was kept.
                    false if text.starts_with(shell::GONE) => String::new(),
                    false => "; to keep those of failed attempts, submit with --keep-failed or task.keepFailed".to_owned(),
                }
            ),
        )),
        Opened::No { kind: Refused::TooMany, text } => Err(ApiError::new(StatusCode::TOO_MANY_REQUESTS, "too_many_streams", text)),
        Opened::No { kind: Refused::BadRequest, text } => Err(ApiError::bad_request(text)),
        Opened::No { kind: Refused::Runs, text } => Err(ApiError::conflict(text)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn sizes_are_lines_and_columns() {
        assert_eq!(size("24x80"), Some(Tty { rows: 24, cols: 80 }));
        for bad in ["", "24", "x", "24x", "-1x80", "24x80x1", "70000x1"] {
            assert_eq!(size(bad), None, "{bad}");
        }
    }
}
