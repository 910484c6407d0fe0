//! Watching a job: its state and counts, whenever they change.
//!
//! Owns coming back after a broken connection and knowing the end. Does not own results: an event that a break swallowed isn't sent
//! again, but the next one carries the counts as they are then. Whoever needs each task's end reads `results`.

use futures::Stream;
use volley_jobspecs::api::{EventView, JobView};
use volley_jobspecs::ids::JobId;

use crate::client::Client;
use crate::error::Error;
use crate::http::{Call, Patience};
use crate::lines::Lines;
use crate::sse::EventReader;

/// A job's events until its end.
#[derive(Debug)]
pub struct Watch {
    client: Client,
    job: JobId,
    lines: Option<(Lines, EventReader)>,
    /// Sequence of the last event that was given.
    last: Option<u64>,
    ended: bool,
    without_tasks: bool,
    patience: Patience,
}

impl Client {
    /// Watches a job. The first event says how it stands now, the last one that it has ended. Those of the job come a few times a
    /// second at most, each with the job as it is then.
    #[must_use]
    pub fn watch(&self, job: JobId) -> Watch {
        Watch {
            client: self.clone(),
            job,
            lines: None,
            last: None,
            ended: false,
            without_tasks: false,
            patience: Patience::new(self.clone()),
        }
    }

    /// Waits until a job has ended.
    ///
    /// # Errors
    /// Code `not_found` when there is none, or a connection that was away for longer than the budget.
    pub async fn wait(&self, job: JobId) -> Result<JobView, Error> {
        let mut watch = self.watch(job).without_tasks();
        while let Some(event) = watch.next().await {
            let event = event?;
            if let Some(job) = event.job.filter(|job| job.state.ended()) {
                return Ok(job);
            }
        }
        self.job(job).await
    }
}

impl Watch {
    /// Only changes of the job, not the end of each task.
    #[must_use]
    pub fn without_tasks(mut self) -> Self {
        self.without_tasks = true;
        self
    }

    /// The next event; `None` after the job's end. After an error nothing more comes.
    pub async fn next(&mut self) -> Option<Result<EventView, Error>> {
        while !self.ended {
            match self.step().await {
                Ok(Some(event)) => {
                    self.patience.renew();
                    self.last = Some(event.sequence);
                    // What is asked next, maybe of another coordinator, must not be older than this.
                    self.client.observe_sequence(event.sequence);
                    self.ended = event.job.as_ref().is_some_and(|job| job.state.ended());
                    return Some(Ok(event));
                }
                Ok(None) => {}
                Err(error) => {
                    let endpoint = self.lines.take().map(|(lines, _)| lines.answer.endpoint().clone());
                    if let Err(error) = self.patience.wait(error, endpoint.as_ref()).await {
                        self.ended = true;
                        return Some(Err(error));
                    }
                }
            }
        }
        None
    }

    /// As a stream, for combinators.
    pub fn into_stream(self) -> impl Stream<Item = Result<EventView, Error>> + Send {
        futures::stream::unfold(self, |mut watch| async move { watch.next().await.map(|event| (event, watch)) })
    }

    async fn step(&mut self) -> Result<Option<EventView>, Error> {
        let Some((lines, reader)) = &mut self.lines else {
            let mut call =
                Call::get(&["jobs", &self.job.to_string(), "events"], format!("watch {}", self.job)).query("tasks", !self.without_tasks);
            if let Some(last) = self.last {
                call = call.header("last-event-id", last);
            }
            self.lines = Some((Lines::new(self.client.send_once(&call).await?), EventReader::new(self.without_tasks)));
            return Ok(None);
        };
        let Some(line) = lines.next().await? else {
            return self.stream_ended().await;
        };
        let Some(data) = reader.line(&line) else {
            return Ok(None);
        };
        let event: EventView = serde_json::from_slice(&data).map_err(|error| lines.answer.unexpected(error.to_string()))?;
        // Another coordinator may be behind the one before: what it says is older than what the caller knows.
        let known = self.last.is_some_and(|last| event.sequence < last);
        Ok((!known).then_some(event))
    }

    /// The stream ended without the job's end in it: that came meanwhile, or the coordinator was stopped.
    async fn stream_ended(&mut self) -> Result<Option<EventView>, Error> {
        self.lines = None;
        let job = self.client.job(self.job).await?;
        if job.state.ended() {
            return Ok(Some(self.end(job)));
        }
        Err(Error::Broken {
            endpoint: self.client.endpoint(),
            doing: format!("watch {}", self.job),
            why: "it ended before the job did".into(),
        })
    }

    fn end(&self, job: JobView) -> EventView {
        EventView { sequence: self.client.sequence().max(self.last.unwrap_or(0)), kind: "job".into(), job: Some(job), task: None }
    }
}
