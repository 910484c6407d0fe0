//! trail: what follows from the state and is done in the bucket: a job's manifest, the deletion of objects, and what volumes need.
//!
//! Owns the ports; the work itself is S3 and lies in `io/objects.rs` and `io/volumes.rs`. Every work is safe to repeat.

use std::future::Future;
use std::pin::Pin;

use volley_jobspecs::ids::JobId;
use volley_jobspecs::wire::record::{Decision, Trailing};

use crate::volumes::Work;

/// Does what volumes need in the bucket.
pub trait Keeper: Send + Sync {
    /// Does it. Returns what is to be recorded; none: it failed and should be tried again.
    fn keep(&self, work: Work) -> Pin<Box<dyn Future<Output = Option<Decision>> + Send + '_>>;
}

/// Does what trails a job's end.
pub trait Trailer: Send + Sync {
    /// Does it. False: it failed and should be tried again.
    fn trail(&self, job: JobId, what: Trailing) -> Pin<Box<dyn Future<Output = bool> + Send + '_>>;
}
