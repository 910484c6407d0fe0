//! `flush`: what has been acknowledged becomes as durable as the volume's mode promises.
//!
//! Owns that all who wait share one flush of the disk. In mode `s3` it is a commit.

use std::io;

use crate::format::head::FlushMode;
use crate::host::lock;
use crate::volume::{Failure, Shared};

impl Shared {
    /// Flushes.
    pub fn flush(&self) -> io::Result<()> {
        match self.flush {
            _ if self.read_only => Ok(()),
            FlushMode::None => lock(&self.state).alive().map_err(Into::into),
            FlushMode::S3 if !self.ephemeral => self.commit().map_err(Into::into),
            FlushMode::Local | FlushMode::S3 => self.flush_log(),
        }
    }

    /// Waits until everything up to now is on the host's disk.
    pub fn flush_log(&self) -> io::Result<()> {
        let target = lock(&self.state).log.last_op();
        let _turn = lock(&self.sync);
        let flush = {
            let state = lock(&self.state);
            state.alive()?;
            // Whoever had the turn before has flushed ours too.
            if state.log.durable() >= target && target > 0 {
                return Ok(());
            }
            state.log.flush()
        };
        let Some(flush) = flush else { return Ok(()) };
        if let Err(error) = flush.wait() {
            let failure = Failure::Log { volume: self.id, why: error.to_string() };
            self.fail(failure.clone());
            return Err(failure.into());
        }
        lock(&self.state).log.flushed(&flush);
        Ok(())
    }
}
