//! The one S3 adapter of Volley, for coordinators, workers and volumes.
//!
//! Owns: the connection to a bucket ([`Store`]), one file per operation group, the retry rule that all
//! of them share, the start-up probe, and the S3 server that `volley up` embeds ([`embedded`]).
//! Does not own: which keys exist and what their bytes mean (`volley-jobspecs`, `volley-volume`).
//!
//! What holds for every operation:
//! - Keys given and returned are relative to the store's prefix.
//! - 5xx, 408, 429, timeouts and broken connections are tried again, with exponential backoff and full
//!   jitter, until the operation's budget is used up. Other 4xx answers end the operation at once.
//! - A conditional write that was tried again knows its own earlier try: every write carries a random
//!   tag, so a lost answer is never mistaken for a lost race.
//! - An error says what was done, on which endpoint, bucket and key, and what to do next.

mod config;
mod connect;
mod delete;
mod download;
pub mod embedded;
mod error;
mod get;
mod head;
mod list;
mod probe;
mod put;
mod retry;
mod stale;
mod upload;

pub use config::{Retry, StoreConfig};
pub use connect::{ConnectError, Store};
pub use delete::{DELETE_BATCH_MAX, DeleteError};
pub use download::{DownloadError, Downloaded};
pub use error::{ErrorKind, Failure, Place};
pub use get::{GetError, ObjectStream};
pub use head::{HeadError, ObjectMeta};
pub use list::{LIST_LIMIT_MAX, ListError, ListPage, ListedObject};
pub use probe::{EnsureBucketError, ProbeError, ProbeReport};
pub use put::{PutError, PutOutcome};
pub use stale::StaleUploadsError;
pub use upload::{PART_BYTES_MIN, PARTS_MAX, UploadError, UploadOptions, Uploaded};
