//! A pin: keeps a snapshot from being collected while somebody needs it, for instance a job whose tasks clone it.
//!
//! Owns its fields. Key: `pin/<owner>/<snapshot>`: one a job, not one a clone. An envelope (`envelope.rs`), letters `VVPN`, version 1, nothing sealed.

use minicbor::{Decode, Encode};
use volley_jobspecs::ids::SnapshotId;

use super::FormatError;
use super::envelope::{Form, read_open, write_open};

const FORM: Form = Form { what: "a pin", magic: *b"VVPN", version: 1, bytes_max: PIN_BYTES_MAX };
/// Largest pin: it has three short fields.
pub const PIN_BYTES_MAX: usize = 4 << 10;

/// A pin.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
pub struct Pin {
    /// The snapshot that stays.
    #[n(0)]
    pub snapshot: SnapshotId,
    /// Whose pin it is: a job's id, or a name.
    #[n(1)]
    pub owner: String,
    /// Until when, in milliseconds since the Unix epoch; None: until it is deleted. An owner that lives longer writes it again.
    #[n(2)]
    pub until_ms: Option<u64>,
}

impl Pin {
    /// Its bytes.
    ///
    /// # Errors
    /// [`FormatError::Make`] for an owner that is too long.
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
        fn a_pin_comes_back_and_no_damage_passes(
            id: [u8; 16], owner in "[a-z0-9]{0,40}", until_ms in proptest::option::of(any::<u64>()), at: prop::sample::Index, bit in 0u8..8,
        ) {
            let pin = Pin { snapshot: SnapshotId(id), owner, until_ms };
            let bytes = pin.write().unwrap();
            prop_assert_eq!(Pin::read(&bytes), Ok(pin));
            let place = at.index(bytes.len());
            let mut damaged = bytes.clone();
            damaged[place] ^= 1 << bit;
            prop_assert!(Pin::read(&damaged).is_err() && Pin::read(&bytes[..place]).is_err());
        }
    }

    #[test]
    fn a_long_owner_is_refused() {
        assert!(Pin { snapshot: SnapshotId([0; 16]), owner: "x".repeat(5_000), until_ms: None }.write().is_err());
    }
}
