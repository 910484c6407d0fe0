//! What tasks write to stdout and stderr.
//!
//! Owns these streams. A break isn't healed here: live output isn't kept anywhere to go on from; what was written is in the stored
//! log once the attempt has ended.

use futures::Stream;
use volley_jobspecs::ids::JobId;

use crate::client::Client;
use crate::error::Error;
use crate::http::{Answer, Call};
use crate::lines::Lines;
use crate::model::LogLine;
use bytes::Bytes;

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
}

impl LogStream {
    /// The next bytes; `None` at the end.
    ///
    /// # Errors
    /// A connection that broke.
    pub async fn chunk(&mut self) -> Result<Option<Bytes>, Error> {
        self.answer.chunk().await
    }
}

/// Live output of all tasks of a job.
#[derive(Debug)]
pub struct JobLogs {
    lines: Lines,
}

impl JobLogs {
    /// The next piece; `None` once the job has ended.
    ///
    /// # Errors
    /// A connection that broke.
    pub async fn next(&mut self) -> Result<Option<LogLine>, Error> {
        loop {
            match self.lines.next().await? {
                None => return Ok(None),
                Some(line) if line.is_empty() => {}
                Some(line) => {
                    let piece = serde_json::from_slice(&line)
                        .map_err(|error| self.lines.answer.unexpected(error.to_string()));
                    return piece.map(Some);
                }
            }
        }
    }

    /// As a stream, for combinators; it ends after an error.
    pub fn into_stream(self) -> impl Stream<Item = Result<LogLine, Error>> + Send {
        futures::stream::try_unfold(self, |mut logs| async move {
            Ok(logs.next().await?.map(|line| (line, logs)))
        })
    }
}

impl Client {
    /// What a task wrote.
    ///
    /// # Errors
    /// Code `not_found` when there is no such job, task or attempt.
    pub async fn task_logs(
        &self,
        job: JobId,
        index: u32,
        query: &TaskLogsQuery,
    ) -> Result<LogStream, Error> {
        let path = [
            "jobs",
            &job.to_string(),
            "tasks",
            &index.to_string(),
            "logs",
        ];
        let call = Call::get(&path, format!("read the logs of task {index} of {job}"))
            .query_if("stream", query.stream.as_ref())
            .query_if("attempt", query.attempt)
            .query("follow", query.follow);
        Ok(LogStream {
            answer: self.open(&call).await?,
        })
    }

    /// What the tasks of a job write from now on.
    ///
    /// # Errors
    /// Code `not_found` when there is no such job.
    pub async fn job_logs(&self, job: JobId) -> Result<JobLogs, Error> {
        let call = Call::get(
            &["jobs", &job.to_string(), "logs"],
            format!("follow the logs of {job}"),
        )
        .query("follow", true);
        Ok(JobLogs {
            lines: Lines::new(self.open(&call).await?),
        })
    }
}
