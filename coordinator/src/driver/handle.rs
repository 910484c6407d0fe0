//! The handle to a running coordinator: what the API asks of it.
//!
//! Owns requests (publish a record, wait until it is applied, give its answer) and reads (a closure run on the driver between two
//! batches). Does not own HTTP.

use std::time::Duration;

use bytes::Bytes;
use tokio::sync::{broadcast, mpsc, oneshot, watch};
use volley_jobspecs::ids::JobId;
use volley_jobspecs::subjects;
use volley_jobspecs::wire::record::{Control, Decision, Record, Submit};
use volley_jobspecs::wire::{self, MESSAGE_BYTES_MAX};

use super::{Input, Parts};
use crate::io::log::{Log, LogError};
use crate::io::rocks::RocksRows;
use crate::leader::Leader;
use crate::metrics::Metrics;
use crate::state::State;
use crate::state::effects::{Answer, Refusal, ResultEntry};

/// How long a record may take to reach the log and be applied, before the request is answered with 503.
pub const REQUEST_TIMEOUT: Duration = Duration::from_secs(20);
/// Share of the log's bytes above which submits are refused, in percent (DESIGN §5).
pub const LOG_FULL_PERCENT: u64 = 80;

/// Something of a job changed.
#[derive(Debug, Clone)]
pub struct Event {
    /// As of this record.
    pub sequence: u64,
    /// Which job.
    pub job: JobId,
    /// Tasks that ended.
    pub ended: Vec<ResultEntry>,
    /// Has the job itself ended?
    pub over: bool,
}

/// Why a request was not done.
#[derive(Debug, thiserror::Error)]
pub enum RequestError {
    /// It was refused.
    #[error(transparent)]
    Refused(#[from] Refusal),
    /// The log can't be written.
    #[error("the request could not be recorded: {0}")]
    Log(#[from] LogError),
    /// It was recorded, or not; nobody can say yet.
    #[error("the request was not applied within {0:?}; it may still be. Ask again with the same idempotency key")]
    Timeout(Duration),
    /// The log is nearly full.
    #[error("the log is {percent} % full; no jobs are accepted until it is trimmed or enlarged")]
    LogFull {
        /// How full.
        percent: u64,
    },
    /// The record would be too large for a message.
    #[error("the request is {bytes} bytes in the log's form, the most is {MESSAGE_BYTES_MAX}; put large items into a file (items.jsonl)")]
    TooLarge {
        /// How large.
        bytes: usize,
    },
    /// The coordinator is stopping.
    #[error("this coordinator is stopping; ask another, or again in a moment")]
    Stopping,
}

/// A running coordinator. Cheap to clone.
#[derive(Clone)]
pub struct Handle {
    inputs: mpsc::Sender<Input>,
    log: Log,
    rows: RocksRows,
    client: async_nats::Client,
    events: broadcast::Sender<Event>,
    applied: watch::Receiver<u64>,
    metrics: Metrics,
}

impl std::fmt::Debug for Handle {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Handle").field("sequence", &self.sequence()).finish_non_exhaustive()
    }
}

impl Handle {
    pub(super) fn new(inputs: mpsc::Sender<Input>, parts: &Parts, events: broadcast::Sender<Event>, applied: watch::Receiver<u64>) -> Self {
        let (log, rows, client, metrics) = (parts.log.clone(), parts.rows.clone(), parts.client.clone(), parts.metrics.clone());
        Self { inputs, log, rows, client, events, applied, metrics }
    }

    /// What is counted.
    #[must_use]
    pub fn metrics(&self) -> &Metrics {
        &self.metrics
    }

    /// The stored rows.
    #[must_use]
    pub fn rows(&self) -> &RocksRows {
        &self.rows
    }

    /// The log.
    #[must_use]
    pub fn log(&self) -> &Log {
        &self.log
    }

    /// Core NATS, for live output.
    #[must_use]
    pub fn client(&self) -> &async_nats::Client {
        &self.client
    }

    /// Events from now on.
    #[must_use]
    pub fn events(&self) -> broadcast::Receiver<Event> {
        self.events.subscribe()
    }

    /// The last record that was applied.
    #[must_use]
    pub fn sequence(&self) -> u64 {
        *self.applied.borrow()
    }

    /// Waits until record `sequence` was applied; false: not within `timeout`.
    pub async fn wait_for(&self, sequence: u64, timeout: Duration) -> bool {
        let mut applied = self.applied.clone();
        let reached = applied.wait_for(|applied| *applied >= sequence);
        matches!(tokio::time::timeout(timeout, reached).await, Ok(Ok(_)))
    }

    /// Runs a closure on the state, between two batches of records. The last argument is the driver's monotonic clock in
    /// milliseconds. Keep it short: nothing else happens meanwhile.
    ///
    /// # Errors
    /// [`RequestError::Stopping`].
    pub async fn read<T: Send + 'static>(
        &self,
        read: impl FnOnce(&State, Option<&Leader>, u64) -> T + Send + 'static,
    ) -> Result<T, RequestError> {
        let (sender, receiver) = oneshot::channel();
        let input = Input::Read(Box::new(move |state, leader, now_ms| _ = sender.send(read(state, leader, now_ms))));
        self.inputs.send(input).await.map_err(|_| RequestError::Stopping)?;
        receiver.await.map_err(|_| RequestError::Stopping)
    }

    /// Records a submit and answers when it was applied. Safe to repeat with the same idempotency key.
    ///
    /// # Errors
    /// [`RequestError`].
    pub async fn submit(&self, submit: Submit) -> Result<Answer, RequestError> {
        let (_, _, used, allowed) = self.log.bounds().await?;
        if let Ok(allowed) = u64::try_from(allowed)
            && allowed > 0
            && used * 100 / allowed >= LOG_FULL_PERCENT
        {
            return Err(RequestError::LogFull { percent: used * 100 / allowed });
        }
        let subject = subjects::log_submit(&submit.actor.tenant);
        let request = submit.actor.request_id.clone();
        let trace = submit.trace.clone();
        self.request(&subject, request, Record::Submit(Box::new(submit)), trace.as_deref()).await
    }

    /// Records a control and answers when it was applied.
    ///
    /// # Errors
    /// [`RequestError`].
    pub async fn control(&self, control: Control) -> Result<Answer, RequestError> {
        let subject = subjects::log_control(&control.actor.tenant);
        let request = control.actor.request_id.clone();
        self.request(&subject, request, Record::Control(control), None).await
    }

    /// Has the leader record something, if this coordinator leads; what came of it is seen in the state.
    ///
    /// # Errors
    /// [`RequestError::Stopping`].
    pub async fn record(&self, decision: Decision) -> Result<(), RequestError> {
        self.inputs.send(Input::Record(decision)).await.map_err(|_| RequestError::Stopping)
    }

    async fn request(&self, subject: &str, request: String, record: Record, trace: Option<&str>) -> Result<Answer, RequestError> {
        let bytes = wire::encode(&record);
        if bytes.len() > MESSAGE_BYTES_MAX {
            return Err(RequestError::TooLarge { bytes: bytes.len() });
        }
        let (sender, receiver) = oneshot::channel();
        self.inputs.send(Input::Await(request, sender)).await.map_err(|_| RequestError::Stopping)?;
        let answered = async {
            self.log.publish_traced(subject, Bytes::from(bytes), trace, REQUEST_TIMEOUT / 2).await?;
            receiver.await.map_err(|_| RequestError::Stopping)
        };
        let answer = tokio::time::timeout(REQUEST_TIMEOUT, answered).await.map_err(|_| RequestError::Timeout(REQUEST_TIMEOUT))??;
        match answer {
            Answer::Refused(refusal) => Err(refusal.into()),
            answer @ (Answer::Submitted { .. } | Answer::Done) => Ok(answer),
        }
    }
}
