//! Volumes as the log knows them: names, who writes, and what is still to be done in the bucket.
//!
//! Owns the shapes. What is on a volume is in the bucket alone, and who may write there is decided there; the log decides who is to.

use std::collections::BTreeMap;

use minicbor::{Decode, Encode};
use volley_jobspecs::ids::{AttemptName, SnapshotId, TenantId, VolumeId};

/// Volumes, by tenant and name.
pub type Volumes = BTreeMap<(TenantId, String), Volume>;

/// A volume.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Volume {
    /// Which: a name may be another volume's later.
    #[n(0)]
    pub id: VolumeId,
    /// Its size as of what was last accepted, in bytes.
    #[n(1)]
    pub size_bytes: u64,
    /// Counts what was accepted; 0: it is as it was made.
    #[n(2)]
    pub generation: u64,
    /// When it was made, in milliseconds since 1970.
    #[n(3)]
    pub created_ms: u64,
    /// Who writes it. Nobody else is given it.
    #[n(4)]
    pub holder: Option<Holder>,
    /// What was accepted and its head does not say yet. Until it does, nobody is given it.
    #[n(5)]
    pub promotion: Option<Promotion>,
    /// Its snapshots that have a name.
    #[n(6)]
    pub snapshots: BTreeMap<String, Snapshot>,
    /// The size in bytes that it is to have, and its head does not say yet. Until it does, nobody is given it.
    #[n(7)]
    pub growth: Option<u64>,
}

/// Who writes a volume.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
pub enum Holder {
    /// A task.
    #[n(0)]
    Attempt(#[n(0)] AttemptName),
    /// A person.
    #[n(1)]
    Person {
        /// Who: the id of a token, or `operator`.
        #[n(0)]
        principal: String,
        /// Since when, in milliseconds since 1970.
        #[n(1)]
        since_ms: u64,
    },
}

/// What an attempt left, which becomes what the volume is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Encode, Decode)]
#[cbor(map)]
pub struct Promotion {
    /// The generation it becomes.
    #[n(0)]
    pub generation: u64,
    /// Whose result it is.
    #[n(1)]
    pub attempt: AttemptName,
    /// Names what it left: the digest of a state of the volume.
    #[cbor(n(2), with = "minicbor::bytes")]
    pub root: [u8; 32],
    /// Its size, in bytes.
    #[n(3)]
    pub size_bytes: u64,
}

/// A snapshot that has a name.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Snapshot {
    /// Which.
    #[n(0)]
    pub id: SnapshotId,
    /// Its size, in bytes.
    #[n(1)]
    pub size_bytes: u64,
    /// When it got its name, in milliseconds since 1970.
    #[n(2)]
    pub created_ms: u64,
}

impl Volume {
    /// One that was just made.
    #[must_use]
    pub fn new(id: VolumeId, size_bytes: u64, created_ms: u64) -> Self {
        Self { id, size_bytes, generation: 0, created_ms, holder: None, promotion: None, snapshots: BTreeMap::new(), growth: None }
    }

    /// Is there something that its head does not say yet?
    #[must_use]
    pub fn is_changing(&self) -> bool {
        self.promotion.is_some() || self.growth.is_some()
    }

    /// Has it no head yet? A task that was to make it has one made when it begins.
    #[must_use]
    pub fn is_to_be_made(&self) -> bool {
        self.generation == 0 && matches!(self.holder, Some(Holder::Attempt(_)))
    }

    /// May it be given to somebody who writes?
    #[must_use]
    pub fn is_free(&self) -> bool {
        self.holder.is_none() && !self.is_changing()
    }
}
