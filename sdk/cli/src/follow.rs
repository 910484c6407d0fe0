//! Following a job to its end.
//!
//! Owns the loop of `run` and `wait`: events, results as they finish, the progress line, why nothing moves, interrupts. Does not own
//! the summary (`summary`).

use std::pin::{Pin, pin};
use std::time::{Duration, Instant};

use futures::{Stream, StreamExt as _};
use volley_jobspecs::api::{CancelRequest, JobView, ResultRow};
use volley_jobspecs::ids::JobId;
use volley_sdk::{Client, Error, ResultsQuery};

use crate::error::CliError;
use crate::interrupt::{Choice, Interrupts};
use crate::out::Out;
use crate::progress::{Line, Meter, ended, job_line};
use crate::stall::Stall;

/// How often the line is brought up to date between events.
const REDRAW_EVERY: Duration = Duration::from_millis(500);

/// How following ended.
#[derive(Debug)]
pub enum Followed {
    /// The job has ended.
    Ended(Box<JobView>),
    /// Somebody wanted to leave; the job goes on.
    Detached,
}

/// What takes rows as they come.
pub type RowSink<'a> = &'a mut (dyn FnMut(&ResultRow) -> Result<(), CliError> + Send);

type Rows = Pin<Box<dyn Stream<Item = Result<ResultRow, Error>> + Send>>;

/// Follows a job to its end; every result goes to `rows`, if there is one.
///
/// # Errors
/// A cluster that was away for longer than the client's budget, a sink that failed.
pub async fn follow(out: Out, client: &Client, job: JobId, mut rows: Option<RowSink<'_>>) -> Result<Followed, CliError> {
    let (id, mut interrupts) = (job, Interrupts::listen()?);
    let mut events = pin!(client.watch(job).without_tasks().into_stream());
    let mut results: Rows = match rows {
        Some(_) => Box::pin(client.results(job, ResultsQuery::follow()).into_stream()),
        None => Box::pin(futures::stream::empty()),
    };
    let (mut results_open, mut last) = (rows.is_some(), None::<JobView>);
    let (start, mut meter, mut line) = (Instant::now(), Meter::default(), Line::start(out));
    let mut stall = Stall::start(start);
    let mut redraw = tokio::time::interval(REDRAW_EVERY);
    let over = |last: &Option<JobView>| last.as_ref().is_some_and(|job| job.state.ended());
    while results_open || !over(&last) {
        tokio::select! {
            event = events.next(), if !over(&last) => match event {
                Some(event) => last = event?.job.or(last),
                None => last = Some(client.job(job).await?),
            },
            row = results.next(), if results_open => match (row, &mut rows) {
                (Some(row), Some(sink)) => {
                    let row = row?;
                    line.around(|| sink(&row))?;
                }
                _ => results_open = false,
            },
            choice = interrupts.next() => match choice {
                None => {
                    line.pause();
                    interrupts.ask();
                }
                Some(Choice::Keep) => line.resume(),
                Some(Choice::Detach) => {
                    line.end();
                    return Ok(Followed::Detached);
                }
                Some(Choice::Cancel) => {
                    cancel(out, client, job).await?;
                    line.resume();
                }
            },
            _ = redraw.tick() => {
                if let (Some(job), false) = (&last, interrupts.asking()) {
                    meter.observe(start.elapsed(), u64::from(ended(&job.tasks)));
                    line.set(job_line(job, &meter));
                    if !job.state.ended() && stall.observe(Instant::now(), &job.tasks) {
                        stall.ask(Instant::now(), client, id);
                    }
                }
            }
            reason = stall.next() => line.around(|| out.note(&format!("{id} waits: {reason}; see `volley explain {id}`"))),
        }
    }
    interrupts.withdraw();
    line.end();
    match last {
        Some(job) => Ok(Followed::Ended(Box::new(job))),
        None => Ok(Followed::Ended(Box::new(client.job(job).await?))),
    }
}

async fn cancel(out: Out, client: &Client, job: JobId) -> Result<(), CliError> {
    let request = CancelRequest { now: true, reason: "interrupted in `volley run`".into() };
    match client.cancel(job, &request).await {
        Ok(_) => out.note(&format!("cancelling {job}")),
        // It ended by itself in the meantime.
        Err(error) if error.status() == Some(409) => {}
        Err(error) => return Err(error.into()),
    }
    Ok(())
}

/// What to say to somebody who left.
#[must_use]
pub fn detached(job: JobId) -> String {
    format!(
        "detached; {job} goes on\nnext: `volley wait {job}` follows it again, `volley explain {job}` says why it does not run, `volley cancel {job}` stops it"
    )
}
