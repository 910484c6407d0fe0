//! trail: what follows a job's end without holding anything up: its manifest, and the deletion of objects.
//!
//! Owns the port; the work itself is S3 and lies in `io/objects.rs`. Every work is safe to repeat.

use std::future::Future;
use std::pin::Pin;

use volley_jobspecs::ids::JobId;
use volley_jobspecs::wire::record::Trailing;

/// Does what trails a job's end.
pub trait Trailer: Send + Sync {
    /// Does it. False: it failed and should be tried again.
    fn trail(&self, job: JobId, what: Trailing) -> Pin<Box<dyn Future<Output = bool> + Send + '_>>;
}
