//! The log: one JetStream stream.
//!
//! Owns publishing with and without the leader's fence, and reading it from a sequence on for ever. Does not own how
//! the stream is kept (`stream`) or what the records say.

use std::collections::BTreeSet;
use std::time::Duration;

use async_nats::HeaderMap;
use async_nats::header::NATS_EXPECTED_LAST_SUBJECT_SEQUENCE;
use async_nats::jetstream::consumer::{AckPolicy, DeliverPolicy, pull};
use async_nats::jetstream::context::{PublishError, PublishErrorKind};
use async_nats::jetstream::message::PublishMessage;
use async_nats::jetstream::{self, Context, ErrorCode};
use bytes::Bytes;
use futures::StreamExt;
use tokio::sync::mpsc;
use volley_jobspecs::subjects::{LOG_LEADER, LOG_STREAM};
use volley_jobspecs::wire::trace;

use super::stream;
pub use super::stream::Shape;
use crate::core::{Mark, Message};

/// Records in one batch to the driver (DESIGN §5: smaller pulls fall behind).
pub const BATCH_RECORDS: usize = 500;
/// Batches that may wait for the driver.
pub const BATCHES_WAITING: usize = 4;
/// How long one publish may take before it is tried again.
const PUBLISH_TIMEOUT: Duration = Duration::from_secs(5);
/// Pause before a failed read or publish is tried again.
const RETRY_PAUSE: Duration = Duration::from_millis(200);
/// Key of the cluster's id in the stream's metadata.
pub(super) const CLUSTER_ID: &str = "volley-cluster";
/// Keys of the records to pass over, in the stream's metadata: they go with the log, wherever it is restored to.
const SKIP: &str = "volley-skip-";

/// Why the log can't be used.
#[derive(Debug, thiserror::Error)]
pub enum LogError {
    /// NATS refused or did not answer.
    #[error("NATS {what} failed: {why}; is JetStream on (`nats-server -js`), may this user use it, and has its disk room?")]
    Nats {
        /// What was tried.
        what: &'static str,
        /// What it said.
        why: String,
    },
    /// NATS can't keep so many copies.
    #[error("NATS can't keep {replicas} copies of the log: {why}; a cluster of at least {replicas} servers can, or leave --replicas out")]
    Replicas {
        /// How many were asked for.
        replicas: usize,
        /// What it said.
        why: String,
    },
    /// NATS has no room for a log of this size.
    #[error(
        "NATS can't set {bytes} bytes aside for the log: {why}; give JetStream more room (`max_file_store`), or say less with --log-bytes"
    )]
    Room {
        /// How many were asked for.
        bytes: u64,
        /// What it said.
        why: String,
    },
    /// Records that are needed were trimmed.
    #[error("record {next} is needed next, but the log begins at {first}; a checkpoint must be loaded")]
    Trimmed {
        /// Needed.
        next: u64,
        /// First there.
        first: u64,
    },
    /// The log is older than what was applied.
    #[error(
        "the log is older than this coordinator: the log ends at record {last}, this coordinator has applied record {applied}. NATS lost data or was restored from an older backup. Restore the newer log; or, to go on with the older one and lose what came after it, delete the RocksDB directory of every coordinator and, in the bucket, the checkpoints behind record {last}"
    )]
    Behind {
        /// End of the log.
        last: u64,
        /// Applied.
        applied: u64,
    },
}

/// How a fenced publish ended.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Fenced {
    /// It is in the log, at this sequence.
    Written(u64),
    /// Another message of the subject came first.
    Refused,
    /// Nothing is known: it may be in the log.
    Unknown(String),
}

/// The log. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Log {
    context: Context,
    /// The cluster's id, from the stream's metadata.
    pub cluster: String,
    /// Copies that NATS keeps of it, and so of what else is kept there.
    pub replicas: usize,
}

pub(super) fn nats(what: &'static str) -> impl Fn(&dyn std::fmt::Display) -> LogError {
    move |why| LogError::Nats { what, why: why.to_string() }
}

impl Log {
    /// Opens the stream, and makes it when there is none. `cluster` is the id a new one gets.
    ///
    /// # Errors
    /// [`LogError::Nats`], [`LogError::Replicas`], [`LogError::Room`].
    pub async fn open(client: async_nats::Client, shape: Shape, cluster: &str) -> Result<Self, LogError> {
        let context = jetstream::new(client);
        let opened = stream::open(&context, shape, cluster).await?;
        Ok(Self::of(context, &opened))
    }

    fn of(context: Context, stream: &jetstream::stream::Stream) -> Self {
        let config = &stream.cached_info().config;
        let cluster = config.metadata.get(CLUSTER_ID).cloned().unwrap_or_default();
        Self { context, cluster, replicas: config.num_replicas }
    }

    /// Opens the stream that is there.
    ///
    /// # Errors
    /// [`LogError::Nats`], also when there is none.
    pub async fn existing(client: async_nats::Client) -> Result<Self, LogError> {
        let context = jetstream::new(client);
        let stream = context.get_stream(LOG_STREAM).await.map_err(|e| nats("opening the stream VOLLEY_LOG")(&e))?;
        Ok(Self::of(context, &stream))
    }

    /// Removes every record before `keep`.
    ///
    /// # Errors
    /// [`LogError::Nats`].
    pub async fn trim(&self, keep: u64) -> Result<u64, LogError> {
        let stream = self.context.get_stream_no_info(LOG_STREAM).await.map_err(|e| nats("trimming the log")(&e))?;
        let purged = stream.purge().sequence(keep).await.map_err(|e| nats("trimming the log")(&e))?;
        Ok(purged.purged)
    }

    /// Records to pass over.
    ///
    /// # Errors
    /// [`LogError::Nats`].
    pub async fn skips(&self) -> Result<BTreeSet<u64>, LogError> {
        let info = self.info().await?;
        let keys = info.config.metadata.keys();
        Ok(keys.filter_map(|key| key.strip_prefix(SKIP)?.parse().ok()).collect())
    }

    /// Has every coordinator pass over a record from its next start on.
    ///
    /// # Errors
    /// [`LogError::Nats`].
    pub async fn skip(&self, sequence: u64) -> Result<(), LogError> {
        let mut config = self.info().await?.config;
        config.metadata.insert(format!("{SKIP}{sequence}"), "1".to_owned());
        self.context.update_stream(config).await.map_err(|e| nats("noting the record in the stream VOLLEY_LOG")(&e))?;
        Ok(())
    }

    /// The JetStream context.
    #[must_use]
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// The stream, as it is now: finding it asks for that.
    async fn info(&self) -> Result<jetstream::stream::Info, LogError> {
        let found = self.context.get_stream(LOG_STREAM).await.map_err(|e| nats("reading the stream VOLLEY_LOG")(&e))?;
        Ok(found.cached_info().clone())
    }

    /// First and last sequence, and bytes used and allowed (-1: any number).
    ///
    /// # Errors
    /// [`LogError::Nats`].
    pub async fn bounds(&self) -> Result<(u64, u64, u64, i64), LogError> {
        let info = self.info().await?;
        Ok((info.state.first_sequence, info.state.last_sequence, info.state.bytes, info.config.max_bytes))
    }

    /// Since when this log is kept, in milliseconds since the Unix epoch, by NATS's clock. One that was restored may say when it was restored.
    ///
    /// # Errors
    /// [`LogError::Nats`].
    pub async fn since_ms(&self) -> Result<u64, LogError> {
        let info = self.info().await?;
        Ok(u64::try_from(info.created.unix_timestamp_nanos() / 1_000_000).unwrap_or(0))
    }

    /// Publishes a record and waits until it is safe. Tried again until `deadline`: a record may so be in the log twice, which
    /// `apply` is made for.
    ///
    /// # Errors
    /// [`LogError::Nats`] after the deadline, or at once when the log is full.
    pub async fn publish(&self, subject: &str, record: Bytes, deadline: Duration) -> Result<u64, LogError> {
        self.publish_traced(subject, record, None, deadline).await
    }

    /// The same; the trace that the record belongs to goes along in a header, which no reader of the log relies on.
    ///
    /// # Errors
    /// As [`Log::publish`].
    pub async fn publish_traced(&self, subject: &str, record: Bytes, trace: Option<&str>, deadline: Duration) -> Result<u64, LogError> {
        let started = tokio::time::Instant::now();
        loop {
            let message = PublishMessage::build().payload(record.clone());
            let message = match trace {
                Some(trace) => message.header(trace::HEADER, trace),
                None => message,
            };
            let error = match self.publish_once(message, subject).await {
                Ok(sequence) => return Ok(sequence),
                Err(error) => error,
            };
            let full = error.contains("maximum bytes exceeded");
            if full || started.elapsed() >= deadline {
                return Err(nats("publishing to the log")(&error));
            }
            tokio::time::sleep(RETRY_PAUSE).await;
        }
    }

    async fn publish_once(&self, message: PublishMessage, subject: &str) -> Result<u64, String> {
        let sent = self.context.send_publish(subject.to_owned(), message).await.map_err(|e| describe(&e))?;
        match tokio::time::timeout(PUBLISH_TIMEOUT, sent).await {
            Ok(Ok(ack)) => Ok(ack.sequence),
            Ok(Err(error)) => Err(describe(&error)),
            Err(_) => Err("no answer in time".to_owned()),
        }
    }

    /// Publishes to the leader's subject on condition that its last message is `after`. The server is the judge, so a leader that
    /// was deposed without knowing can write nothing.
    pub async fn publish_fenced(&self, record: Bytes, after: u64) -> Fenced {
        let message = PublishMessage::build().payload(record).expected_last_subject_sequence(after);
        let sent = match self.context.send_publish(LOG_LEADER, message).await {
            Ok(sent) => sent,
            Err(error) => return fenced_error(&error),
        };
        match tokio::time::timeout(PUBLISH_TIMEOUT, sent).await {
            Ok(Ok(ack)) => Fenced::Written(ack.sequence),
            Ok(Err(error)) => fenced_error(&error),
            Err(_) => Fenced::Unknown("no answer in time".to_owned()),
        }
    }

    /// The last message on the leader's subject: its sequence and bytes.
    ///
    /// # Errors
    /// [`LogError::Nats`].
    pub async fn last_leader(&self) -> Result<Option<(u64, Bytes)>, LogError> {
        let stream = self.context.get_stream_no_info(LOG_STREAM).await.map_err(|e| nats("reading the stream VOLLEY_LOG")(&e))?;
        match stream.get_last_raw_message_by_subject(LOG_LEADER).await {
            Ok(message) => Ok(Some((message.sequence, message.payload))),
            Err(error) if error.kind() == jetstream::stream::LastRawMessageErrorKind::NoMessageFound => Ok(None),
            Err(error) => Err(nats("reading the leader's last record")(&error)),
        }
    }

    /// Reads every record from `next` on, for ever, in order and without a gap.
    #[must_use]
    pub fn read(&self, next: u64) -> mpsc::Receiver<Result<Vec<Message>, LogError>> {
        let (sender, receiver) = mpsc::channel(BATCHES_WAITING);
        let log = self.clone();
        tokio::spawn(async move {
            let mut next = next.max(1);
            while !sender.is_closed() {
                match log.read_some(&mut next, &sender).await {
                    Err(error @ (LogError::Trimmed { .. } | LogError::Behind { .. })) => {
                        _ = sender.send(Err(error)).await;
                        return;
                    }
                    Err(error) => tracing::warn!(%error, next, "reading the log failed; trying again"),
                    Ok(()) => {}
                }
                tokio::time::sleep(RETRY_PAUSE).await;
            }
        });
        receiver
    }

    /// Reads until something fails. Consumers live in the server's memory, so a restarted server has forgotten ours.
    async fn read_some(&self, next: &mut u64, sender: &mpsc::Sender<Result<Vec<Message>, LogError>>) -> Result<(), LogError> {
        let stream = self.context.get_stream_no_info(LOG_STREAM).await.map_err(|e| nats("reading the stream VOLLEY_LOG")(&e))?;
        // A server that lost the end of the log gives its sequences out again: what comes next is not what was meant.
        let (_, last, _, _) = self.bounds().await?;
        if last + 1 < *next {
            return Err(LogError::Behind { last, applied: *next - 1 });
        }
        let config = pull::Config {
            deliver_policy: DeliverPolicy::ByStartSequence { start_sequence: *next },
            ack_policy: AckPolicy::None,
            memory_storage: true,
            inactive_threshold: Duration::from_secs(60),
            ..pull::Config::default()
        };
        let consumer = stream.create_consumer(config).await.map_err(|e| nats("making a consumer of the log")(&e))?;
        let messages =
            consumer.stream().max_messages_per_batch(BATCH_RECORDS).expires(Duration::from_secs(20)).heartbeat(Duration::from_secs(3));
        let messages = messages.messages().await.map_err(|e| nats("reading the log")(&e))?;
        let mut batches = messages.ready_chunks(BATCH_RECORDS);
        while let Some(batch) = batches.next().await {
            let mut records = Vec::with_capacity(batch.len());
            for message in batch {
                let message = message.map_err(|e| nats("reading the log")(&e))?;
                let sequence = message.info().map_err(|e| nats("reading the log")(&e))?.stream_sequence;
                match sequence.cmp(next) {
                    std::cmp::Ordering::Less => continue,
                    std::cmp::Ordering::Equal => {}
                    std::cmp::Ordering::Greater => return Err(LogError::Trimmed { next: *next, first: sequence }),
                }
                *next += 1;
                let mark = mark(&message.subject, message.headers.as_ref());
                records.push(Message { sequence, bytes: message.payload.to_vec(), mark });
            }
            if sender.send(Ok(records)).await.is_err() {
                return Ok(());
            }
        }
        Ok(())
    }
}

fn mark(subject: &str, headers: Option<&HeaderMap>) -> Mark {
    match headers.and_then(|headers| headers.get(NATS_EXPECTED_LAST_SUBJECT_SEQUENCE)) {
        _ if subject != LOG_LEADER => Mark::Elsewhere,
        Some(_) => Mark::Fenced,
        None => Mark::Unfenced,
    }
}

fn describe(error: &PublishError) -> String {
    match std::error::Error::source(error) {
        Some(source) => format!("{error}: {source}"),
        None => error.to_string(),
    }
}

fn fenced_error(error: &PublishError) -> Fenced {
    let code = std::error::Error::source(error).and_then(|s| s.downcast_ref::<jetstream::Error>()).map(jetstream::Error::error_code);
    if error.kind() == PublishErrorKind::WrongLastSequence || code == Some(ErrorCode::STREAM_WRONG_LAST_SEQUENCE) {
        return Fenced::Refused;
    }
    Fenced::Unknown(describe(error))
}
