//! What tasks write to stdout and stderr.
//!
//! Owns these streams, and coming back after a broken connection without repeating a byte. What comes live begins with what was written
//! before. Of much output the middle of that is missing, and of a job what was written while the connection was away: of a task it is told
//! ([`LogStream::missed`]), and what is kept may have it once the try has ended.

use base64::Engine as _;
use base64::engine::general_purpose::STANDARD;
use bytes::Bytes;
use futures::Stream;
use volley_jobspecs::api::{LogLine, LogPiece};
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
pub struct LogStream(Kind);

#[derive(Debug)]
enum Kind {
    /// What was kept, read once.
    Kept(Box<Answer>),
    /// What is written, followed over breaks.
    Followed(Box<Followed>),
}

#[derive(Debug)]
struct Followed {
    client: Client,
    call: Call,
    lines: Option<Lines>,
    /// Where to go on.
    after: Option<String>,
    /// Behind the last piece of stdout and of stderr: the attempt and the offset.
    next: [Option<(u32, u64)>; 2],
    missed: u64,
    ended: bool,
    patience: Patience,
}

impl LogStream {
    /// The next bytes; `None` at the end.
    ///
    /// # Errors
    /// A connection that broke; of a followed stream, a cluster that was away for longer than the budget.
    pub async fn chunk(&mut self) -> Result<Option<Bytes>, Error> {
        match &mut self.0 {
            Kind::Kept(answer) => answer.chunk().await,
            Kind::Followed(followed) => followed.chunk().await,
        }
    }

    /// How many bytes are missing before the last chunk, since this was last asked: the worker doesn't hold them any more, or they were lost
    /// on their way.
    pub fn missed(&mut self) -> u64 {
        match &mut self.0 {
            Kind::Kept(_) => 0,
            Kind::Followed(followed) => std::mem::take(&mut followed.missed),
        }
    }
}

impl Followed {
    async fn chunk(&mut self) -> Result<Option<Bytes>, Error> {
        while !self.ended {
            match self.step().await {
                Ok(Some(bytes)) => {
                    self.patience.renew();
                    return Ok(Some(bytes));
                }
                Ok(None) => {}
                Err(error) => {
                    let endpoint = self.lines.take().map(|lines| lines.answer.endpoint().clone());
                    self.patience.wait(error, endpoint.as_ref()).await?;
                }
            }
        }
        Ok(None)
    }

    /// One step: bytes, or progress of another kind.
    async fn step(&mut self) -> Result<Option<Bytes>, Error> {
        let Some(lines) = &mut self.lines else {
            let call = self.call.clone().query_if("after", self.after.as_ref());
            self.lines = Some(Lines::new(self.client.send_once(&call).await?));
            return Ok(None);
        };
        match lines.next().await? {
            // A keep-alive.
            Some(line) if line.is_empty() => Ok(None),
            Some(line) => {
                let read = serde_json::from_slice::<LogPiece>(&line).map_err(|error| error.to_string());
                let piece = read.map_err(|why| lines.answer.unexpected(why))?;
                let bytes = STANDARD.decode(&piece.base64).map_err(|error| lines.answer.unexpected(error.to_string()))?;
                Ok(self.piece(piece, bytes))
            }
            None => Err(lines.answer.broken("it ended before the task did")),
        }
    }

    fn piece(&mut self, piece: LogPiece, bytes: Vec<u8>) -> Option<Bytes> {
        if piece.end {
            self.ended = true;
            return None;
        }
        let next = &mut self.next[usize::from(piece.stream == "stderr")];
        let behind = next.filter(|(attempt, _)| *attempt == piece.attempt).map_or(0, |(_, offset)| offset);
        self.missed += piece.offset.saturating_sub(behind);
        *next = Some((piece.attempt, piece.offset + bytes.len() as u64));
        self.after = Some(piece.cursor);
        Some(Bytes::from(bytes))
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
            self.lines = Some(Lines::new(self.client.send_once(&call.query("follow", true)).await?));
            return Ok(Step::Again);
        };
        match lines.next().await? {
            // A keep-alive.
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
        if !query.follow {
            return Ok(LogStream(Kind::Kept(Box::new(self.open(&call).await?))));
        }
        let call = call.query("form", "pieces");
        let lines = Some(Lines::new(self.open(&call).await?));
        let (client, patience) = (self.clone(), Patience::new(self.clone()));
        let followed = Followed { client, call, lines, after: None, next: [None; 2], missed: 0, ended: false, patience };
        Ok(LogStream(Kind::Followed(Box::new(followed))))
    }

    /// What the tasks of a job write, beginning with a little of what those that run wrote before. Nothing is sent before the first piece is asked for.
    #[must_use]
    pub fn job_logs(&self, job: JobId) -> JobLogs {
        JobLogs { client: self.clone(), job, lines: None, patience: Patience::new(self.clone()) }
    }
}
