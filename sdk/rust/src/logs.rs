//! What tasks write to stdout and stderr.
//!
//! Owns these streams. A followed task's stream that breaks can't be gone on with: live output isn't kept anywhere, and what is kept
//! is there once the attempt has ended. A followed job's stream is opened again, and what was written in between is missing in it.

use bytes::Bytes;
use futures::Stream;
use volley_jobspecs::api::LogLine;
use volley_jobspecs::ids::JobId;

use crate::client::Client;
use crate::error::Error;
use crate::http::{Answer, Call, Patience};
use crate::lines::Lines;

/// Which output of a task to read.
#[derive(Debug, Clone, Default)]
pub struct TaskLogsQuery {
    /// `stdout`, `stderr` or `both`; the server's default is `both`.
    pub stream: Option<String>,
    /// Of which try, counted from 1; the last one by default.
    pub attempt: Option<u32>,
    /// Wait for more until the try has ended?
    pub follow: bool,
}

/// Raw bytes that a task wrote.
#[derive(Debug)]
pub struct LogStream {
    answer: Answer,
    follow: bool,
}

impl LogStream {
    /// The next bytes; `None` at the end.
    ///
    /// # Errors
    /// A connection that broke.
    pub async fn chunk(&mut self) -> Result<Option<Bytes>, Error> {
        if self.follow { self.answer.chunk_some_time().await } else { self.answer.chunk().await }
    }
}

/// Live output of all tasks of a job.
#[derive(Debug)]
pub struct JobLogs {
    client: Client,
    job: JobId,
    lines: Option<Lines>,
    patience: Patience,
}

impl JobLogs {
    /// The next piece; `None` once the job has ended.
    ///
    /// # Errors
    /// A cluster that was away for longer than the budget.
    pub async fn next(&mut self) -> Result<Option<LogLine>, Error> {
        loop {
            match self.step().await {
                Ok(Step::Line(line)) => {
                    self.patience.renew();
                    return Ok(Some(line));
                }
                Ok(Step::Again) => {}
                Ok(Step::End) => return Ok(None),
                Err(error) => {
                    let endpoint = self.lines.take().map(|lines| lines.answer.endpoint().clone());
                    self.patience.wait(error, endpoint.as_ref()).await?;
                }
            }
        }
    }

    /// As a stream, for combinators; it ends after an error.
    pub fn into_stream(self) -> impl Stream<Item = Result<LogLine, Error>> + Send {
        futures::stream::try_unfold(self, |mut logs| async move { Ok(logs.next().await?.map(|line| (line, logs))) })
    }

    async fn step(&mut self) -> Result<Step, Error> {
        let Some(lines) = &mut self.lines else {
            let call = Call::get(&["jobs", &self.job.to_string(), "logs"], format!("follow the logs of {}", self.job));
            self.lines = Some(Lines::quiet(self.client.send_once(&call.query("follow", true)).await?));
            return Ok(Step::Again);
        };
        match lines.next().await? {
            Some(line) if line.is_empty() => Ok(Step::Again),
            Some(line) => serde_json::from_slice(&line).map(Step::Line).map_err(|error| lines.answer.unexpected(error.to_string())),
            None => {
                self.lines = None;
                if self.client.job(self.job).await?.state.ended() {
                    return Ok(Step::End);
                }
                let (endpoint, doing) = (self.client.endpoint(), format!("follow the logs of {}", self.job));
                Err(Error::Broken { endpoint, doing, why: "it ended before the job did".into() })
            }
        }
    }
}

enum Step {
    Line(LogLine),
    Again,
    End,
}

impl Client {
    /// What a task wrote.
    ///
    /// # Errors
    /// Code `not_found` when there is no such job, task or attempt.
    pub async fn task_logs(&self, job: JobId, index: u32, query: &TaskLogsQuery) -> Result<LogStream, Error> {
        let path = ["jobs", &job.to_string(), "tasks", &index.to_string(), "logs"];
        let call = Call::get(&path, format!("read the logs of task {index} of {job}"))
            .query_if("stream", query.stream.as_ref())
            .query_if("attempt", query.attempt)
            .query("follow", query.follow);
        Ok(LogStream { answer: self.open(&call).await?, follow: query.follow })
    }

    /// What the tasks of a job write from now on. Nothing is sent before the first piece is asked for.
    #[must_use]
    pub fn job_logs(&self, job: JobId) -> JobLogs {
        JobLogs { client: self.clone(), job, lines: None, patience: Patience::new(self.clone()) }
    }
}
