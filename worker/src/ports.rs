//! What a worker needs of the world, as traits: the bus (NATS) and objects (S3).
//!
//! Owns their shapes and the fakes of tests. Does not own the adapters (`io`).

use std::future::Future;
use std::path::Path;

use bytes::Bytes;
use tokio::sync::mpsc;
use volley_jobspecs::ids::{JobId, WorkerId};
use volley_jobspecs::wire::live::Watch;
use volley_jobspecs::wire::trace::TraceContext;

/// Why a message got no good answer.
#[derive(Debug, Clone, thiserror::Error)]
pub enum BusError {
    /// Nobody answered in time, or the connection is down.
    #[error("no answer: {0}")]
    NoAnswer(String),
    /// The server refused it.
    #[error("refused: {0}")]
    Refused(String),
}

/// A work message as it came, with where its answer goes.
#[derive(Debug)]
pub struct Incoming {
    /// The encoded work message.
    pub bytes: Bytes,
    /// Subject of the answer, if one is wanted.
    pub reply: Option<String>,
    /// The trace of the one job it is about, when it is about one and says so.
    pub trace: Option<TraceContext>,
}

/// The bus. Cheap to clone; every call bounds its own time.
pub trait Bus: Clone + Send + Sync + 'static {
    /// Listens for work messages; goes on over reconnects.
    fn work(&self, worker: &WorkerId) -> impl Future<Output = Result<mpsc::Receiver<Incoming>, BusError>> + Send;
    /// Listens for jobs that somebody watches, and for what of them is asked; goes on over reconnects.
    fn watches(&self) -> impl Future<Output = Result<mpsc::Receiver<(JobId, Watch)>, BusError>> + Send;
    /// Answers a work message.
    fn answer(&self, reply: String, bytes: Vec<u8>) -> impl Future<Output = Result<(), BusError>> + Send;
    /// Beats, and returns the leader's answer.
    fn beat(&self, worker: &WorkerId, bytes: Vec<u8>) -> impl Future<Output = Result<Bytes, BusError>> + Send;
    /// Asks for a job; an empty answer: no such job. `trace` goes along.
    fn job(&self, job: JobId, trace: Option<TraceContext>) -> impl Future<Output = Result<Bytes, BusError>> + Send;
    /// Publishes a report to the log; returns its sequence once it is durable. `trace`, of the one job it is about, goes along.
    fn report(&self, worker: &WorkerId, bytes: Bytes, trace: Option<TraceContext>) -> impl Future<Output = Result<u64, BusError>> + Send;
    /// Sends a piece of live output, or drops it when that would take time.
    fn live(&self, job: JobId, index: u32, bytes: Vec<u8>) -> impl Future<Output = ()> + Send;
}

/// Why an object could not be read or written.
#[derive(Debug, Clone, thiserror::Error)]
pub enum ObjectError {
    /// It isn't there.
    #[error("{0}")]
    Missing(String),
    /// It isn't what its checksum says.
    #[error("{0}")]
    Mismatch(String),
    /// Storage didn't do it within its budget, or refuses for good.
    #[error("{0}")]
    Failed(String),
}

/// Which object.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct ObjectName {
    /// The bucket; `None`: the cluster's own.
    pub bucket: Option<String>,
    /// The key.
    pub key: String,
}

/// What was written or read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Moved {
    /// How many bytes.
    pub bytes: u64,
    /// Their SHA-256, in hex.
    pub sha256: String,
}

/// Objects. Cheap to clone; retries and its budget are the adapter's.
pub trait Objects: Clone + Send + Sync + 'static {
    /// Reads a small object of the cluster's bucket whole.
    fn get(&self, key: &str, bytes_max: u64) -> impl Future<Output = Result<Bytes, ObjectError>> + Send;
    /// Reads any object into a new file.
    fn download(&self, object: &ObjectName, path: &Path, sha256: Option<&str>) -> impl Future<Output = Result<Moved, ObjectError>> + Send;
    /// Writes a small object.
    fn put(&self, key: &str, bytes: Bytes) -> impl Future<Output = Result<(), ObjectError>> + Send;
    /// The prefix of the cluster's own objects, if that is the object's bucket: empty, or ending in `/`.
    fn own_prefix(&self, object: &ObjectName) -> Option<&str>;
    /// Writes a file as an object, in pieces, whatever its size.
    fn upload(&self, key: &str, file: std::fs::File) -> impl Future<Output = Result<Moved, ObjectError>> + Send;
}
