//! An open volume: what its operations share.
//!
//! Owns the state behind one lock, failures that end it, and the seam to those who serve it. Each operation is a file of its own.
//!
//! **Locks**, in the order in which they are taken: `commits` (one commit at a time, may be held for as long as S3 takes), `sync` (one flush of the
//! disk at a time), `state` (short: no request and no flush happens under it; an append to the log does).

use std::collections::HashMap;
use std::io;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Condvar, Mutex};
use std::thread::JoinHandle;

use volley_jobspecs::ids::VolumeId;

use crate::commit::Commits;
use crate::device::{Device, Piece};
use crate::format::BLOCK;
use crate::format::extent::PackRef;
use crate::format::head::{FlushMode, WrittenBy};
use crate::format::log::Change;
use crate::format::seal::FamilyKey;
use crate::host::{Host, lock};
use crate::io::log::{Log, LogError};
use crate::state::map::Map;
use crate::state::overlay::{Overlay, Place, Run};

/// Why a volume takes nothing more, for good.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    /// Somebody else has the right to write.
    #[error("{volume}: {host} has it since (epoch {epoch}); what was not committed here stays in the log")]
    Fenced {
        /// The volume.
        volume: VolumeId,
        /// Who has it.
        host: String,
        /// The epoch in S3.
        epoch: u64,
    },
    /// The log's disk failed.
    #[error("{volume}: the log failed and is not trusted any more: {why}; open the volume again")]
    Log {
        /// The volume.
        volume: VolumeId,
        /// The system's words.
        why: String,
    },
}

impl From<Failure> for io::Error {
    fn from(failure: Failure) -> Self {
        let kind = match failure {
            Failure::Fenced { .. } => io::ErrorKind::StaleNetworkFileHandle,
            Failure::Log { .. } => io::ErrorKind::Other,
        };
        Self::new(kind, failure)
    }
}

/// What changes with each operation.
pub(crate) struct State {
    pub log: Log,
    pub overlay: Overlay,
    pub map: Map,
    /// Packs that lie in the head.
    pub bodies: HashMap<PackRef, Arc<Vec<u8>>>,
    pub size: u64,
    /// The last operation that S3 has.
    pub committed: u64,
    /// Bytes that were appended since the last commit's cut.
    pub dirty: u64,
    /// Somebody waits for room on the log's disk: a commit must not wait for more, and nothing is kept that S3 has.
    pub short: bool,
    pub failure: Option<Failure>,
    pub closing: bool,
}

impl State {
    /// An operation of the log, in memory.
    pub fn play(&mut self, change: Change, op: u64, place: crate::format::log::LogPlace) {
        match change {
            Change::Write { block, blocks } => self.overlay.put(Run { block, blocks, op, place: Place::Log(place) }),
            Change::Zero { block, blocks, .. } => self.overlay.put(Run { block, blocks, op, place: Place::Zero }),
            Change::Resize { size } => self.size = size,
            Change::Mark => {}
        }
    }

    pub fn alive(&self) -> Result<(), Failure> {
        self.failure.clone().map_or(Ok(()), Err)
    }
}

/// What the volume's threads share.
pub(crate) struct Shared {
    pub host: Arc<Host>,
    pub id: VolumeId,
    pub family: FamilyKey,
    pub flush: FlushMode,
    pub read_only: bool,
    /// It has no head in S3, and commits nothing.
    pub ephemeral: bool,
    pub state: Mutex<State>,
    /// Told when a commit made room, or nothing will.
    pub room: Condvar,
    /// Told when there is something to commit.
    pub wake: Condvar,
    pub sync: Mutex<()>,
    /// The block behind the last read, and how many blocks were fetched ahead of one.
    pub ahead: (AtomicU64, AtomicU64),
    pub commits: Mutex<Commits>,
    /// Keeps other processes of the host out of the volume's directory.
    pub _lock: std::fs::File,
}

impl Shared {
    /// Ends the volume.
    pub fn fail(&self, failure: Failure) {
        tracing::error!(volume = %self.id, %failure, "a volume takes nothing more");
        let mut state = lock(&self.state);
        state.failure.get_or_insert(failure);
        drop(state);
        self.room.notify_all();
        self.wake.notify_all();
    }

    /// Checks that a range lies within the disk.
    pub fn within(&self, offset: u64, len: u64) -> io::Result<()> {
        let size = lock(&self.state).size;
        if offset.checked_add(len).is_some_and(|end| end <= size) {
            return Ok(());
        }
        let why = format!("{}: {len} bytes at {offset} reach over its {size} bytes", self.id);
        Err(io::Error::new(io::ErrorKind::InvalidInput, why))
    }

    /// Checks that a range may be changed.
    pub fn may_change(&self, offset: u64, len: u64) -> io::Result<()> {
        if self.read_only {
            return Err(io::Error::new(io::ErrorKind::ReadOnlyFilesystem, format!("{} is open to be read only", self.id)));
        }
        self.within(offset, len)
    }

    pub fn log_error(&self, error: &LogError) -> io::Error {
        let kind = if error.is_full() { io::ErrorKind::StorageFull } else { io::ErrorKind::Other };
        io::Error::new(kind, format!("{}: {error}", self.id))
    }
}

/// An open volume. It is closed by [`Volume::detach`]; dropped without, it is as if the process had been killed: what the log has is found by the
/// next open.
pub struct Volume {
    pub(crate) shared: Arc<Shared>,
    pub(crate) committer: Option<JoinHandle<()>>,
}

impl Volume {
    /// Which one it is.
    #[must_use]
    pub fn id(&self) -> VolumeId {
        self.shared.id
    }

    /// Why it takes nothing more, if so.
    #[must_use]
    pub fn failure(&self) -> Option<Failure> {
        lock(&self.shared.state).failure.clone()
    }

    /// Bytes that S3 lacks, as they lie in the log.
    #[must_use]
    pub fn dirty_bytes(&self) -> u64 {
        lock(&self.shared.state).dirty
    }

    /// Who has written on the disk.
    #[must_use]
    pub fn written_by(&self) -> WrittenBy {
        lock(&self.shared.commits).head.written_by
    }

    /// Was nothing ever written on the disk?
    #[must_use]
    pub fn is_blank(&self) -> bool {
        let commits = lock(&self.shared.commits);
        let content = commits.head.latest();
        let stored = content.root.is_some() || !content.deltas.is_empty();
        !stored && lock(&self.shared.state).overlay.is_empty()
    }

    pub(crate) fn stop(&mut self) {
        lock(&self.shared.state).closing = true;
        self.shared.wake.notify_all();
        self.shared.room.notify_all();
        if let Some(committer) = self.committer.take()
            && committer.join().is_err()
        {
            tracing::error!(volume = %self.shared.id, "the thread that commits ended in a panic");
        }
    }
}

impl Drop for Volume {
    fn drop(&mut self) {
        self.stop();
    }
}

impl Device for Volume {
    fn size(&self) -> u64 {
        lock(&self.shared.state).size
    }

    fn read_only(&self) -> bool {
        self.shared.read_only
    }

    fn read_ready(&self, offset: u64, into: &mut [u8]) -> Option<io::Result<()>> {
        self.shared.read(offset, into, false)
    }

    fn read(&self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        self.shared.read(offset, into, true).unwrap_or_else(|| Err(io::ErrorKind::WouldBlock.into()))
    }

    fn write(&self, offset: u64, bytes: &[u8], durable: bool) -> io::Result<()> {
        self.shared.write(offset, bytes)?;
        if durable { self.flush() } else { Ok(()) }
    }

    fn zero(&self, offset: u64, len: u64, hole: bool, durable: bool) -> io::Result<()> {
        self.shared.zero(offset, len, hole)?;
        if durable { self.flush() } else { Ok(()) }
    }

    fn discard(&self, offset: u64, len: u64) -> io::Result<()> {
        self.shared.zero(offset, len, true)
    }

    fn flush(&self) -> io::Result<()> {
        self.shared.flush()
    }

    fn pieces(&self, offset: u64, len: u64) -> io::Result<Vec<Piece>> {
        self.shared.pieces(offset, len)
    }
}

/// The blocks that a range of bytes touches.
pub(crate) fn blocks_of(offset: u64, len: u64) -> std::ops::Range<u64> {
    offset / BLOCK..offset.saturating_add(len).div_ceil(BLOCK)
}
