//! Why a volume can't be had, or what was written on it not be kept.
//!
//! Owns the words, the class of failure that each is, and whether it speaks against this worker. Does not own what becomes of the attempt.

use volley_jobspecs::failure::FailureClass;
use volley_volume::server::protocol::{Refused, RefusedKind};

/// Why a volume can't be had, or what was written on it not be kept.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum VolumeError {
    /// The worker has none.
    #[error("this worker has no volumes: {0}")]
    Off(String),
    /// Somebody else has the right to write it, or had it since.
    #[error("volume of slot {slot}: {words}")]
    Elsewhere {
        /// The slot.
        slot: u8,
        /// The server's words.
        words: String,
    },
    /// There is no such volume or snapshot, or it is another state than the one that was given.
    #[error("volume of slot {slot}: {words}")]
    NotAsGiven {
        /// The slot.
        slot: u8,
        /// The server's words.
        words: String,
    },
    /// A guest could have written on it, and this host's kernel would read its file system.
    #[error(
        "volume of slot {slot}: {volume} was written by a machine's guest, and only machines may mount it: a file system that was made to break a kernel would break \
         this host's; use it with isolation microvm, or start the worker with --allow-host-mount where everybody who writes it is trusted"
    )]
    GuestWritten {
        /// The slot.
        slot: u8,
        /// The volume.
        volume: String,
    },
    /// This host: its disk, its way to S3, its mounts.
    #[error("volume of slot {slot}: {what}: {words}")]
    Host {
        /// The slot.
        slot: u8,
        /// What was done.
        what: &'static str,
        /// Why not.
        words: String,
    },
    /// Something still uses what is mounted.
    #[error("volume of slot {slot}: it is still in use after the task has ended, {words}: what was written can't be known to be whole")]
    Busy {
        /// The slot.
        slot: u8,
        /// What the system says.
        words: String,
    },
}

impl VolumeError {
    /// What the server says.
    pub(super) fn refused(slot: u8, what: &'static str, refused: Refused) -> Self {
        let Refused { kind, words } = refused;
        match kind {
            RefusedKind::Elsewhere => Self::Elsewhere { slot, words },
            RefusedKind::Missing | RefusedKind::OtherState => Self::NotAsGiven { slot, words },
            RefusedKind::Host => Self::Host { slot, what, words },
        }
    }

    /// What class of failure that is.
    #[must_use]
    pub fn class(&self) -> FailureClass {
        match self {
            Self::Off(_) | Self::Elsewhere { .. } | Self::NotAsGiven { .. } | Self::Host { .. } | Self::Busy { .. } => {
                FailureClass::StorageFailed
            }
            Self::GuestWritten { .. } => FailureClass::PolicyDenied,
        }
    }

    /// Does it say nothing against this worker: would it be the same on any other?
    #[must_use]
    pub fn blameless(&self) -> bool {
        match self {
            Self::Elsewhere { .. } | Self::NotAsGiven { .. } | Self::GuestWritten { .. } | Self::Busy { .. } => true,
            Self::Off(_) | Self::Host { .. } => false,
        }
    }
}
