//! Results of a job, as its tasks finish.
//!
//! Owns coming back after a broken connection without losing or repeating a row, and knowing when the last row was there. Does not
//! own what is in a row (`volley_jobspecs::api::ResultRow`).
//!
//! Each row carries the cursor behind it; after any break the stream is opened again there. A stream that follows may also end
//! regularly because its coordinator was stopped; so at each end the job is asked whether it has ended, and if it has, what lies
//! behind the last cursor is read once more.

use futures::Stream;
use volley_jobspecs::api::ResultRow;
use volley_jobspecs::ids::JobId;

use crate::client::Client;
use crate::error::Error;
use crate::http::{Call, Patience};
use crate::lines::Lines;

/// Which results to read.
#[derive(Debug, Clone, Default)]
pub struct ResultsQuery {
    /// Only rows behind this cursor.
    pub after: Option<String>,
    /// Wait for more until the job has ended?
    pub follow: bool,
    /// Also rows that a rerun superseded? They say so. Without, each task has at most one row.
    pub superseded: bool,
}

impl ResultsQuery {
    /// What is there now.
    #[must_use]
    pub fn now() -> Self {
        Self::default()
    }

    /// Everything until the job has ended.
    #[must_use]
    pub fn follow() -> Self {
        Self { follow: true, ..Self::default() }
    }

    /// Also rows that a rerun superseded.
    #[must_use]
    pub fn superseded(mut self) -> Self {
        self.superseded = true;
        self
    }

    /// Only rows behind this cursor, which an earlier row carried.
    #[must_use]
    pub fn after(mut self, cursor: impl Into<String>) -> Self {
        self.after = Some(cursor.into());
        self
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Phase {
    /// Until the stream and then the job have ended.
    Follow,
    /// Until the stream has ended.
    Drain,
    /// Nothing more comes.
    Done,
}

/// Results as they finish: each row exactly once, in the order in which the log has them.
#[derive(Debug)]
pub struct Results {
    client: Client,
    job: JobId,
    after: Option<String>,
    superseded: bool,
    phase: Phase,
    lines: Option<Lines>,
    patience: Patience,
}

impl Client {
    /// The results of a job. Nothing is sent before the first row is asked for.
    #[must_use]
    pub fn results(&self, job: JobId, query: ResultsQuery) -> Results {
        Results {
            client: self.clone(),
            job,
            after: query.after,
            superseded: query.superseded,
            phase: if query.follow { Phase::Follow } else { Phase::Drain },
            lines: None,
            patience: Patience::new(self.clone()),
        }
    }
}

impl Results {
    /// The next row; `None` after the last. After an error nothing more comes, and a new stream can go on from [`Results::cursor`].
    pub async fn next(&mut self) -> Option<Result<ResultRow, Error>> {
        while self.phase != Phase::Done {
            match self.step().await {
                Ok(Some(row)) => {
                    self.patience.renew();
                    self.after = Some(row.cursor.clone());
                    return Some(Ok(row));
                }
                Ok(None) => {}
                Err(error) => {
                    let endpoint = self.lines.take().map(|lines| lines.answer.endpoint().clone());
                    if let Err(error) = self.patience.wait(error, endpoint.as_ref()).await {
                        self.phase = Phase::Done;
                        return Some(Err(error));
                    }
                }
            }
        }
        None
    }

    /// The cursor behind the last row that was given.
    #[must_use]
    pub fn cursor(&self) -> Option<&str> {
        self.after.as_deref()
    }

    /// As a stream, for combinators.
    pub fn into_stream(self) -> impl Stream<Item = Result<ResultRow, Error>> + Send {
        futures::stream::unfold(self, |mut results| async move { results.next().await.map(|row| (row, results)) })
    }

    /// One step: a row, or progress of another kind.
    async fn step(&mut self) -> Result<Option<ResultRow>, Error> {
        let Some(lines) = &mut self.lines else {
            let call = Call::get(&["jobs", &self.job.to_string(), "results"], format!("read the results of {}", self.job))
                .query("follow", self.phase == Phase::Follow)
                .query_if("superseded", self.superseded.then_some(true))
                .query_if("after", self.after.as_ref());
            self.lines = Some(Lines::new(self.client.send_once(&call).await?));
            return Ok(None);
        };
        let line = match lines.next().await {
            // Tasks may run for hours without one ending; but a frozen coordinator is silent too, so another connection is made.
            Err(Error::Silent { .. }) if self.phase == Phase::Follow => {
                self.lines = None;
                return Ok(None);
            }
            line => line?,
        };
        match line {
            // A keep-alive.
            Some(line) if line.is_empty() => Ok(None),
            Some(line) => serde_json::from_slice(&line).map(Some).map_err(|error| lines.answer.unexpected(error.to_string())),
            None => self.ended().await.map(|()| None),
        }
    }

    /// The stream ended regularly: was that all?
    async fn ended(&mut self) -> Result<(), Error> {
        self.lines = None;
        match self.phase {
            Phase::Follow => {
                let ended = self.client.job(self.job).await?.state.ended();
                if ended {
                    self.phase = Phase::Drain;
                } else {
                    let why = Error::Broken {
                        endpoint: self.client.endpoint(),
                        doing: format!("follow the results of {}", self.job),
                        why: "it ended before the job did".into(),
                    };
                    // Not at once: a coordinator that is being stopped would be asked in a tight loop.
                    self.patience.wait(why, None).await?;
                }
            }
            Phase::Drain | Phase::Done => self.phase = Phase::Done,
        }
        Ok(())
    }
}
