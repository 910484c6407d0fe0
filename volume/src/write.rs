//! `write`: bytes of the disk into the log.
//!
//! Owns the splitting into records, parts of blocks, and waiting for room. A write has happened when its last record is in the kernel's hands.

use std::io;
use std::ops::Range;
use std::sync::MutexGuard;
use std::time::Instant;

use crate::format::log::{Change, RECORD_BLOCKS_MAX};
use crate::format::{BLOCK, BLOCK_BYTES};
use crate::host::lock;
use crate::io::log::LogError;
use crate::volume::{Shared, State, blocks_of};

impl Shared {
    /// Writes.
    pub fn write(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        self.may_change(offset, bytes.len() as u64)?;
        let (mut at, mut rest) = (offset, bytes);
        while !rest.is_empty() {
            // Up to the end of a record's last block.
            let room = (RECORD_BLOCKS_MAX * BLOCK - at % BLOCK) as usize;
            let (part, behind) = rest.split_at(rest.len().min(room));
            self.write_part(at, part)?;
            at += part.len() as u64;
            rest = behind;
        }
        Ok(())
    }

    /// Writes what fits into one record.
    fn write_part(&self, offset: u64, bytes: &[u8]) -> io::Result<()> {
        let blocks = blocks_of(offset, bytes.len() as u64);
        let (before, end) = ((offset % BLOCK) as usize, offset + bytes.len() as u64);
        let behind = (blocks.end * BLOCK - end) as usize;
        if before == 0 && behind == 0 {
            let change = if crate::is_zero(bytes) { zeros(&blocks) } else { write(&blocks) };
            let data = [bytes];
            return self.append(change, if matches!(change, Change::Write { .. }) { &data } else { &[] }, |_| true).map(|_| ());
        }
        loop {
            // Parts of blocks: what is around them is read, and stays as it was, or all begins anew.
            let first = if before > 0 { Some(blocks.start) } else { None };
            let last = if behind > 0 && (before == 0 || blocks.end - blocks.start > 1) { Some(blocks.end - 1) } else { None };
            let seen = |state: &State| [first, last].map(|block| block.and_then(|block| state.overlay.op_of(block)));
            let then = seen(&lock(&self.state));
            let mut whole = vec![0; ((blocks.end - blocks.start) * BLOCK) as usize];
            let count = whole.len() / BLOCK_BYTES;
            for (number, block) in [(0, first), (count - 1, last)] {
                let (Some(block), Some(place)) = (block, whole.get_mut(number * BLOCK_BYTES..(number + 1) * BLOCK_BYTES)) else { continue };
                self.read_blocks(block..block + 1, place, true).unwrap_or_else(|| Err(io::ErrorKind::WouldBlock.into()))?;
            }
            whole.get_mut(before..before + bytes.len()).unwrap_or_default().copy_from_slice(bytes);
            let data = [whole.as_slice()];
            if self.append(write(&blocks), &data, |state| seen(state) == then)? {
                return Ok(());
            }
        }
    }

    /// Appends an operation to the log and lays it over the disk, if `still` holds; tells whether it did.
    pub fn append(&self, change: Change, data: &[&[u8]], still: impl Fn(&State) -> bool) -> io::Result<bool> {
        let bytes = data.iter().map(|piece| piece.len() as u64).sum::<u64>();
        let mut state = self.room_for(bytes)?;
        let mut end = None;
        let (segment, op, place) = loop {
            state.alive()?;
            if !still(&state) {
                return Ok(false);
            }
            let segment = state.log.current();
            match state.log.append(change, data) {
                Ok((op, place)) => break (segment, op, place),
                Err(error) if error.is_full() => {
                    let end = *end.get_or_insert_with(|| Instant::now() + self.host.limits.stall_max);
                    state = self.wait_for_disk(state, &error, end)?;
                }
                Err(error) => return Err(self.log_error(&error)),
            }
        };
        state.short = false;
        state.play(change, op, place);
        let before = state.dirty;
        state.dirty += bytes.max(BLOCK);
        let wake = before == 0 || (before < self.host.limits.commit_bytes && state.dirty >= self.host.limits.commit_bytes);
        // Once a segment: what is cleaned then lies in others.
        let clean = self.ephemeral && state.log.current() != segment;
        drop(state);
        if clean {
            // The operation has happened; for want of room the log is cleaned with a later one.
            self.clean().or_else(|error| if error.kind() == io::ErrorKind::StorageFull { Ok(()) } else { Err(error) })?;
        }
        if wake {
            self.wake.notify_all();
        }
        Ok(true)
    }

    /// The disk is full: gives up what is on it beside what S3 lacks, and if that was nothing, waits until a commit has made room. Returns when it may be tried again.
    fn wait_for_disk<'a>(&'a self, mut state: MutexGuard<'a, State>, error: &LogError, end: Instant) -> io::Result<MutexGuard<'a, State>> {
        if self.host.leave_room() | (!self.ephemeral && self.give_back_all(&mut state)) {
            return Ok(state);
        }
        let left = end.saturating_duration_since(Instant::now());
        if self.ephemeral || state.dirty == 0 || left.is_zero() || state.closing {
            return Err(self.log_error(error));
        }
        state.short = true;
        self.wake.notify_all();
        let dirty = state.dirty;
        let same = |state: &mut State| state.failure.is_none() && !state.closing && state.dirty == dirty;
        Ok(self.room.wait_timeout_while(state, left, same).map_or_else(|e| e.into_inner().0, |(state, _)| state))
    }

    /// Waits until there is room for so many bytes: until a commit went through, or the wait was long enough to say that the disk is full.
    fn room_for(&self, bytes: u64) -> io::Result<MutexGuard<'_, State>> {
        let limits = &self.host.limits;
        let mut state = lock(&self.state);
        let full = |state: &State| {
            if self.ephemeral {
                state.log.bytes() >= limits.ephemeral_bytes_max
            } else {
                state.dirty > 0 && state.dirty + bytes > limits.dirty_bytes_max
            }
        };
        let end = Instant::now() + limits.stall_max;
        while state.failure.is_none() && full(&state) {
            let left = end.saturating_duration_since(Instant::now());
            if self.ephemeral || left.is_zero() || state.closing {
                let why = format!("{}: {} bytes wait to be committed, more do not fit", self.id, state.dirty);
                return Err(io::Error::new(io::ErrorKind::StorageFull, why));
            }
            self.wake.notify_all();
            state = self.room.wait_timeout(state, left).map_or_else(|e| e.into_inner().0, |(state, _)| state);
        }
        Ok(state)
    }
}

fn write(blocks: &Range<u64>) -> Change {
    Change::Write { block: blocks.start, blocks: blocks.end - blocks.start }
}

/// A write of nothing but zeros: what it covers is allocated, and takes no room all the same.
fn zeros(blocks: &Range<u64>) -> Change {
    Change::Zero { block: blocks.start, blocks: blocks.end - blocks.start, hole: false }
}
