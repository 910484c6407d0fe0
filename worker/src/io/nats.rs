//! The bus on NATS: work and beats over core NATS, reports into the log over JetStream.
//!
//! Owns subjects and time limits of each call. Does not own the connection's options: it is given a client.

use std::future::IntoFuture;
use std::time::Duration;

use async_nats::connection::State;
use async_nats::jetstream;
use async_nats::jetstream::message::PublishMessage;
use async_nats::{Client, HeaderMap, Request};
use bytes::Bytes;
use futures::StreamExt;
use tokio::sync::mpsc;
use volley_jobspecs::ids::{JobId, WorkerId};
use volley_jobspecs::wire::live::Watch;
use volley_jobspecs::wire::trace::{HEADER, TraceContext};
use volley_jobspecs::{subjects, wire};

use crate::ports::{Bus, BusError, Incoming};

/// How long a leader may take to answer a beat: less than the shortest pause between beats by default.
const BEAT_TIME: Duration = Duration::from_millis(2_500);
/// How long a leader may take to answer a question about a job.
const JOB_TIME: Duration = Duration::from_secs(5);
/// How long the log may take to make a report durable: many fsyncs of a busy disk.
const REPORT_TIME: Duration = Duration::from_secs(5);
/// How long a piece of live output may take to be handed over; then it is dropped.
const LIVE_TIME: Duration = Duration::from_millis(50);
/// Work messages that may wait: the leader has one in flight, and repeats it.
const WORK_MAX: usize = 16;
/// Watches that may wait: one for each person at a terminal, every few seconds.
const WATCHES_MAX: usize = 64;

/// The bus.
#[derive(Debug, Clone)]
pub struct NatsBus {
    client: Client,
    log: jetstream::Context,
}

impl NatsBus {
    /// On a client that is connected, or connecting.
    #[must_use]
    pub fn new(client: Client) -> Self {
        let mut log = jetstream::new(client.clone());
        log.set_timeout(REPORT_TIME);
        Self { client, log }
    }

    /// Its client.
    #[must_use]
    pub fn client(&self) -> Client {
        self.client.clone()
    }

    async fn request(&self, subject: String, bytes: Bytes, trace: Option<TraceContext>, time: Duration) -> Result<Bytes, BusError> {
        let request = Request::new().payload(bytes);
        let request = match trace {
            Some(trace) => request.headers(header(&trace)),
            None => request,
        };
        let asked = tokio::time::timeout(time, self.client.send_request(subject, request)).await;
        match asked {
            Ok(Ok(answer)) => Ok(answer.payload),
            Ok(Err(e)) => Err(BusError::NoAnswer(e.to_string())),
            Err(_) => Err(BusError::NoAnswer(format!("nothing within {} ms", time.as_millis()))),
        }
    }
}

fn header(trace: &TraceContext) -> HeaderMap {
    let mut headers = HeaderMap::new();
    headers.insert(HEADER, trace.to_string().as_str());
    headers
}

impl Bus for NatsBus {
    async fn work(&self, worker: &WorkerId) -> Result<mpsc::Receiver<Incoming>, BusError> {
        let mut messages = self
            .client
            .subscribe(subjects::work(worker))
            .await
            .map_err(|e| BusError::Refused(format!("subscribing to {}: {e}", subjects::work(worker))))?;
        let (sender, receiver) = mpsc::channel(WORK_MAX);
        tokio::spawn(async move {
            while let Some(message) = messages.next().await {
                let trace = message.headers.as_ref().and_then(|headers| headers.get(HEADER)?.as_str().parse().ok());
                let incoming = Incoming { bytes: message.payload, reply: message.reply.map(|s| s.to_string()), trace };
                if sender.send(incoming).await.is_err() {
                    return;
                }
            }
        });
        Ok(receiver)
    }

    async fn watches(&self) -> Result<mpsc::Receiver<(JobId, Watch)>, BusError> {
        let subscribed = self.client.subscribe(subjects::WATCH_ALL).await;
        let mut messages = subscribed.map_err(|e| BusError::Refused(format!("subscribing to {}: {e}", subjects::WATCH_ALL)))?;
        let (sender, receiver) = mpsc::channel(WATCHES_MAX);
        tokio::spawn(async move {
            while let Some(message) = messages.next().await {
                let job = message.subject.rsplit('.').next().and_then(|job| job.parse().ok());
                // One of a newer build that can't be read still says that somebody watches; most are empty.
                let watch = wire::decode::<Watch>("watch", &message.payload).unwrap_or_default();
                if let Some(job) = job
                    && sender.send((job, watch)).await.is_err()
                {
                    return;
                }
            }
        });
        Ok(receiver)
    }

    async fn answer(&self, reply: String, bytes: Vec<u8>) -> Result<(), BusError> {
        let sent = self.client.publish(reply, bytes.into()).await;
        sent.map_err(|e| BusError::NoAnswer(e.to_string()))
    }

    async fn beat(&self, worker: &WorkerId, bytes: Vec<u8>) -> Result<Bytes, BusError> {
        self.request(subjects::beat(worker), bytes.into(), None, BEAT_TIME).await
    }

    async fn job(&self, job: JobId, trace: Option<TraceContext>) -> Result<Bytes, BusError> {
        self.request(subjects::job(job), Bytes::new(), trace, JOB_TIME).await
    }

    async fn report(&self, worker: &WorkerId, bytes: Bytes, trace: Option<TraceContext>) -> Result<u64, BusError> {
        let published = async {
            let message = PublishMessage::build().payload(bytes);
            let message = match trace {
                Some(trace) => message.headers(header(&trace)),
                None => message,
            };
            let ack = self.log.send_publish(subjects::log_report(worker), message).await.map_err(|e| e.to_string())?;
            ack.into_future().await.map(|ack| ack.sequence).map_err(|e| e.to_string())
        };
        // The library's own limit covers the wait for the answer, not a send into a connection that is down.
        match tokio::time::timeout(REPORT_TIME * 2, published).await {
            Ok(Ok(sequence)) => Ok(sequence),
            Ok(Err(why)) => Err(BusError::Refused(why)),
            Err(_) => Err(BusError::NoAnswer(format!("nothing within {} ms", (REPORT_TIME * 2).as_millis()))),
        }
    }

    async fn live(&self, job: JobId, index: u32, bytes: Vec<u8>) {
        if self.client.connection_state() == State::Connected {
            let sent = self.client.publish(subjects::live(job, index), bytes.into());
            // Dropped when it takes long: a task must not wait for somebody who watches.
            let _ = tokio::time::timeout(LIVE_TIME, sent).await;
        }
    }
}
