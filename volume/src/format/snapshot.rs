//! A snapshot: a state of a volume that stays.
//!
//! Owns its fields and their checks. Key: `snap/<id>`; written once, on the condition that nothing is there.
//!
//! An envelope (`envelope.rs`), letters `VVSN`, version 1, at most 2 MiB. Open part: everything but the content, CBOR with the numbers below; sealed part: the
//! [`Content`], CBOR, under the family's key. All that a clone needs is here: its head is made of it without a look at the volume.

use minicbor::{Decode, Encode};
use volley_jobspecs::ids::{SnapshotId, TenantId, VolumeId, check_name};

use super::content::Content;
use super::envelope::{Form, decode, encode, read, write};
use super::head::WrittenBy;
use super::seal::{ClusterKeys, FamilyKey, Salt, WrappedKey};
use super::{FormatError, keys};

const FORM: Form = Form { what: "a snapshot", magic: *b"VVSN", version: 1, bytes_max: SNAPSHOT_BYTES_MAX };
/// Largest snapshot: one state, and the same as a head has room for.
pub const SNAPSHOT_BYTES_MAX: usize = 2 << 20;

/// What of a snapshot anybody may read.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
pub struct Line {
    /// The snapshot.
    #[n(0)]
    pub id: SnapshotId,
    /// The volume it is of.
    #[n(1)]
    pub volume: VolumeId,
    /// Whose it is.
    #[n(2)]
    pub tenant: TenantId,
    /// Epoch of the state's commit.
    #[n(3)]
    pub epoch: u64,
    /// Its sequence.
    #[n(4)]
    pub seq: u64,
    /// Generation, if it is a state that was accepted.
    #[n(5)]
    pub generation: Option<u64>,
    /// Who wrote on the disk.
    #[n(6)]
    pub written_by: WrittenBy,
    /// The family's key.
    #[n(7)]
    pub key: WrappedKey,
    /// When it was taken, in milliseconds since the Unix epoch.
    #[n(8)]
    pub created_ms: u64,
    /// The snapshot that the volume is a clone of.
    #[n(9)]
    pub parent: Option<SnapshotId>,
    /// Size of the disk in bytes.
    #[n(10)]
    pub size: u64,
    /// Digest of the content.
    #[cbor(n(11), with = "minicbor::bytes")]
    pub root: [u8; 32],
}

/// A snapshot.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Snapshot {
    /// What anybody may read.
    pub line: Line,
    /// The disk.
    pub content: Content,
}

impl Snapshot {
    /// Its bytes. `salt`: fresh and random.
    ///
    /// # Errors
    /// [`FormatError::Make`].
    pub fn write(&self, family: &FamilyKey, salt: Salt) -> Result<Vec<u8>, FormatError> {
        self.check()?;
        let key = family.object(&keys::snapshot(self.line.id), &salt)?;
        write(FORM, &encode(FORM.what, &self.line)?, Some((&key, salt, &encode(FORM.what, &self.content)?)))
    }

    /// Reads the snapshot `id`, with its family's key.
    ///
    /// # Errors
    /// [`FormatError`].
    pub fn read(id: SnapshotId, keys_held: &ClusterKeys, bytes: &[u8]) -> Result<(Self, FamilyKey), FormatError> {
        let envelope = read(FORM, bytes)?;
        let line: Line = decode(FORM.what, envelope.open)?;
        let family = FamilyKey::unwrap(&line.key, keys_held)?;
        let content = decode(FORM.what, &envelope.unseal(&family.object(&keys::snapshot(id), &envelope.salt)?)?)?;
        let snapshot = Self { line, content };
        if snapshot.line.id != id {
            return Err(FormatError::Seal { what: FORM.what });
        }
        snapshot.check()?;
        Ok((snapshot, family))
    }

    fn check(&self) -> Result<(), FormatError> {
        let bad = |field, value| FormatError::Field { what: FORM.what, field, value };
        check_name(self.line.tenant.as_str()).map_err(|_| bad("tenant", self.line.tenant.as_str().len() as u64))?;
        self.content.check(FORM.what)?;
        if self.content.size != self.line.size || self.content.digest() != self.line.root {
            return Err(bad("digest of a state with size", self.line.size));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::format::content::tests::content;
    use crate::format::head::tests::cluster;

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn a_snapshot_comes_back_and_no_damage_passes(
            content in content(), id: [u8; 16], volume: [u8; 16], epoch: u64, seq: u64, generation in proptest::option::of(any::<u64>()),
            parent in proptest::option::of(any::<[u8; 16]>()), salt: Salt, at: prop::sample::Index, bit in 0u8..8,
        ) {
            let (id, family) = (SnapshotId(id), FamilyKey::new([3; 32]));
            let line = Line {
                id, volume: VolumeId(volume), tenant: TenantId::new("t").unwrap(), epoch, seq, generation, written_by: WrittenBy::Guest,
                key: family.wrap(&cluster(), VolumeId(volume), salt).unwrap(), created_ms: seq, parent: parent.map(SnapshotId),
                size: content.size, root: content.digest(),
            };
            let snapshot = Snapshot { line, content };
            let bytes = snapshot.write(&family, salt).unwrap();
            prop_assert_eq!(&Snapshot::read(id, &cluster(), &bytes).unwrap().0, &snapshot);
            let place = at.index(bytes.len());
            let mut damaged = bytes.clone();
            damaged[place] ^= 1 << bit;
            prop_assert!(Snapshot::read(id, &cluster(), &damaged).is_err());
            prop_assert!(Snapshot::read(id, &cluster(), &bytes[..place]).is_err());
            prop_assert!(Snapshot::read(SnapshotId([0; 16]), &cluster(), &bytes).is_err());
        }
    }
}
