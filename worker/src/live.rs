//! Live output of one attempt, for as long as somebody watches its job.
//!
//! Owns cutting pieces and whether they are sent at all. Nothing depends on their arrival.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Instant;

use minicbor::bytes::ByteVec;
use tokio::sync::watch;
use volley_jobspecs::ids::{AttemptName, JobId};
use volley_jobspecs::wire;
use volley_jobspecs::wire::live::{LIVE_BYTES_MAX, Live};

use crate::ports::Bus;

/// Jobs that are watched, each until when.
pub type Watched = Arc<BTreeMap<JobId, Instant>>;

/// Where the output of one attempt goes.
#[derive(Debug, Clone)]
pub struct LiveOutput<B> {
    /// The bus.
    pub bus: B,
    /// Who watches what.
    pub watched: watch::Receiver<Watched>,
    /// Which attempt.
    pub name: AttemptName,
}

impl<B: Bus> LiveOutput<B> {
    /// Sends a piece that begins at `offset` of its stream, if anybody watches.
    pub async fn send(&self, stderr: bool, offset: u64, bytes: &[u8]) {
        let watched = self.watched.borrow().get(&self.name.job).is_some_and(|until| Instant::now() < *until);
        if !watched {
            return;
        }
        for (piece, at) in bytes.chunks(LIVE_BYTES_MAX).zip((offset..).step_by(LIVE_BYTES_MAX)) {
            let live = Live { name: self.name, stderr, offset: at, bytes: ByteVec::from(piece.to_vec()) };
            self.bus.live(self.name.job, self.name.index, wire::encode(&live)).await;
        }
    }
}
