//! A holding: which volume a directory of the host is of, and by which right this host writes it.
//!
//! Owns its fields. A file on the host's disk, replaced as a whole. An envelope (`envelope.rs`), letters `VVHO`, version 1, at most 3 MiB, nothing sealed by itself: the
//! head in it is.
//!
//! It is written **before** the right is asked for. After a crash the head in S3 tells whether it was given: it has the same attach. An ephemeral
//! clone has its whole head here, and none in S3.

use minicbor::{Decode, Encode};
use volley_jobspecs::ids::VolumeId;

use super::FormatError;
use super::envelope::{Form, read_open, write_open};

const FORM: Form = Form { what: "a volume's holding", magic: *b"VVHO", version: 1, bytes_max: HOLDING_BYTES_MAX };
/// Largest holding: a head and some fields.
pub const HOLDING_BYTES_MAX: usize = 3 << 20;

/// A holding.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
pub struct Holding {
    /// The volume.
    #[n(0)]
    pub volume: VolumeId,
    /// Drawn at random by the attach; a restart of the server within the same attach keeps it.
    #[cbor(n(1), with = "minicbor::bytes")]
    pub attach: [u8; 16],
    /// The epoch that is asked for.
    #[n(2)]
    pub epoch: u64,
    /// The epoch whose log is gone on with; the same as `epoch` at a fresh attach, whose log is empty.
    #[n(3)]
    pub log_from: u64,
    /// The head of an ephemeral clone, as it would lie in S3 (`head.rs`).
    #[cbor(n(4), with = "minicbor::bytes")]
    pub ephemeral: Option<Vec<u8>>,
    /// Since when the host has not lost its power; None: written by a build that did not say, or the host does not tell.
    #[n(5)]
    pub boot: Option<Boot>,
}

/// The host's start within which an attach writes its log.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode)]
pub struct Boot {
    /// The start's own random number, as the kernel has it.
    #[cbor(n(0), with = "minicbor::bytes")]
    pub id: [u8; 16],
    /// The first epoch in which this attach wrote since then. What this one and later ones wrote no power cut has taken.
    #[n(1)]
    pub since: u64,
}

impl Boot {
    /// Of an attach that goes on in `epoch` on a host that was started as `id`. `before`: what the last one said.
    #[must_use]
    pub fn of(id: Option<[u8; 16]>, epoch: u64, before: Option<Self>) -> Option<Self> {
        let id = id?;
        Some(before.filter(|before| before.id == id).unwrap_or(Self { id, since: epoch }))
    }
}

impl Holding {
    /// Its bytes.
    ///
    /// # Errors
    /// [`FormatError::Make`].
    pub fn write(&self) -> Result<Vec<u8>, FormatError> {
        write_open(FORM, self)
    }

    /// Reads one.
    ///
    /// # Errors
    /// [`FormatError`].
    pub fn read(bytes: &[u8]) -> Result<Self, FormatError> {
        read_open(FORM, bytes)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_holding_comes_back_and_no_damage_passes(
            id: [u8; 16], attach: [u8; 16], epoch: u64, log_from: u64, ephemeral in proptest::option::of(proptest::collection::vec(any::<u8>(), 0..99)),
            boot: Option<([u8; 16], u64)>,
            at: prop::sample::Index, bit in 0u8..8,
        ) {
            let holding = Holding { volume: VolumeId(id), attach, epoch, log_from, ephemeral, boot: boot.map(|(id, since)| Boot { id, since }) };
            let bytes = holding.write().unwrap();
            prop_assert_eq!(Holding::read(&bytes), Ok(holding));
            let place = at.index(bytes.len());
            let mut damaged = bytes.clone();
            damaged[place] ^= 1 << bit;
            prop_assert!(Holding::read(&damaged).is_err() && Holding::read(&bytes[..place]).is_err());
        }
    }

    #[test]
    fn a_start_of_the_host_begins_with_the_epoch_that_follows_it() {
        let first = Boot::of(Some([1; 16]), 4, None);
        assert_eq!(first, Some(Boot { id: [1; 16], since: 4 }));
        assert_eq!(Boot::of(Some([1; 16]), 7, first), first);
        assert_eq!(Boot::of(Some([2; 16]), 8, first), Some(Boot { id: [2; 16], since: 8 }));
        assert_eq!(Boot::of(None, 9, first), None);
    }
}
