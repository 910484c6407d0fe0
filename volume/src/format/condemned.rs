//! What the collector found unneeded, and since when; and who collects now.
//!
//! Owns its fields. Key: `gc/condemned`, one in a bucket, replaced on the condition of its tag. An envelope (`envelope.rs`), letters `VVGC`, version 1, at most
//! 16 MiB, nothing sealed.
//!
//! It is no more than a memory between two runs: without it a collection begins anew, and deletes that much later.

use std::collections::BTreeMap;

use minicbor::{Decode, Encode};

use super::FormatError;
use super::envelope::{Form, read_open, write_open};

/// Its key.
pub const KEY: &str = "gc/condemned";
/// Largest record: as many keys of 100 bytes as a run condemns, and room for longer ones.
pub const CONDEMNED_BYTES_MAX: usize = 16 << 20;
const FORM: Form = Form { what: "the list of what is unneeded", magic: *b"VVGC", version: 1, bytes_max: CONDEMNED_BYTES_MAX };

/// Who collects.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
pub struct Collector {
    /// For people.
    #[n(0)]
    pub name: String,
    /// Until when nobody else begins, in milliseconds since the Unix epoch.
    #[n(1)]
    pub until_ms: u64,
}

/// The record.
#[derive(Debug, Clone, PartialEq, Eq, Default, Encode, Decode)]
pub struct Condemned {
    /// Drawn at random for each writing: tells one's own whose answer was lost.
    #[cbor(n(0), with = "minicbor::bytes")]
    pub writing: [u8; 16],
    /// Who collects; None: nobody.
    #[n(1)]
    pub collector: Option<Collector>,
    /// Keys that nobody needs, and since when that is known, in milliseconds since the Unix epoch.
    #[n(2)]
    pub keys: BTreeMap<String, u64>,
}

impl Condemned {
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
        fn a_list_comes_back_and_no_damage_passes(
            writing: [u8; 16], keys in proptest::collection::btree_map("[a-z0-9/-]{0,60}", any::<u64>(), 0..20), name in "[a-z]{0,9}",
            until_ms: u64, held: bool, at: prop::sample::Index, bit in 0u8..8,
        ) {
            let condemned = Condemned { writing, collector: held.then_some(Collector { name, until_ms }), keys };
            let bytes = condemned.write().unwrap();
            prop_assert_eq!(Condemned::read(&bytes), Ok(condemned));
            let place = at.index(bytes.len());
            let mut damaged = bytes.clone();
            damaged[place] ^= 1 << bit;
            prop_assert!(Condemned::read(&damaged).is_err() && Condemned::read(&bytes[..place]).is_err());
        }
    }
}
