//! Cleaning: the log of an ephemeral clone, which never commits, keeps what is the last word on its blocks and little more.
//!
//! Owns when the oldest segment is given up, and what of it is appended again first. A volume with a head in S3 has no need of it: a commit makes room there.
//!
//! Segments go from the front only, so the operations that are left have no gap. What is the last word in the oldest one, its zeros too, is appended again as an
//! operation of now, which it is: the blocks have these bytes now. Then a mark says from which segment on the log counts.

use std::io;

use crate::format::BLOCK_BYTES;
use crate::format::log::{Change, RECORD_BLOCKS_MAX, SEGMENT_BYTES};
use crate::host::lock;
use crate::state::overlay::Place;
use crate::volume::{Shared, State};

/// Bytes that the log may have beside twice what it needs: below, cleaning would cost more than the room is worth.
const SLACK_BYTES: u64 = 4 * SEGMENT_BYTES as u64;

impl Shared {
    /// Gives up the oldest segments, as long as half of the log or more is not needed.
    pub fn clean(&self) -> io::Result<()> {
        loop {
            let mut state = lock(&self.state);
            let needed = state.overlay.live_blocks() * BLOCK_BYTES as u64;
            let Some((oldest, from, until)) = state.log.oldest() else { return Ok(()) };
            if state.log.bytes() <= 2 * needed + SLACK_BYTES || state.failure.is_some() {
                return Ok(());
            }
            self.append_again(&mut state, from, until)?;
            state.log.clean(oldest + 1).map_err(|error| self.log_error(&error))?;
        }
    }

    /// What the operations `from ..= until` have the last word on, once more.
    fn append_again(&self, state: &mut State, from: u64, until: u64) -> io::Result<()> {
        let mut plain = Vec::new();
        for run in state.overlay.changed(from.saturating_sub(1), until) {
            let Place::Log(place) = run.place else {
                let change = Change::Zero { block: run.block, blocks: run.blocks, hole: true };
                let (op, place) = state.log.append(change, &[]).map_err(|error| self.log_error(&error))?;
                state.play(change, op, place);
                continue;
            };
            let gone = || io::Error::new(io::ErrorKind::InvalidData, format!("{}: segment {} is gone", self.id, place.segment));
            let segment = state.log.segment(place.segment).ok_or_else(gone)?;
            let mut done = 0;
            while done < run.blocks {
                let blocks = (run.blocks - done).min(RECORD_BLOCKS_MAX);
                plain.resize(blocks as usize * BLOCK_BYTES, 0);
                segment.read(place.skip(done), &mut plain).map_err(|error| self.log_error(&error))?;
                let change = Change::Write { block: run.block + done, blocks };
                let (op, place) = state.log.append(change, &[&plain]).map_err(|error| self.log_error(&error))?;
                state.play(change, op, place);
                done += blocks;
            }
        }
        // Whether it was resized in there is not known any more: saying it again is harmless.
        let change = Change::Resize { size: state.size };
        state.log.append(change, &[]).map(|_| ()).map_err(|error| self.log_error(&error))
    }
}
