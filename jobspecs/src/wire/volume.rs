//! What log, leader and workers say of volumes.
//!
//! Owns the shapes: what a job asks for, what an attempt is given and leaves. Does not own how a volume is stored, nor what is done with any of it.

use minicbor::{Decode, Encode};
use serde::Serialize;

use crate::ids::{AttemptName, JobId, SnapshotId, VolumeId};

/// How a task uses a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode, Serialize)]
#[cbor(index_only)]
pub enum Access {
    /// Reads what it was when the job was accepted.
    #[n(0)]
    Ro,
    /// Writes it; one attempt at a time.
    #[n(1)]
    Rw,
    /// Has a copy of what it was when the job was accepted.
    #[n(2)]
    Clone,
}

/// A volume that a job's tasks use. Its place in the spec's list is its slot.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode, Serialize)]
#[cbor(map)]
pub struct VolumePlan {
    /// The volume's name; with `Rw`, `${index}` and `${job.id}` may stand in it.
    #[n(0)]
    pub name: String,
    /// The name of one of its snapshots.
    #[n(1)]
    pub snapshot: Option<String>,
    /// How it is used.
    #[n(2)]
    pub access: Access,
    /// With `Rw`: the size in bytes with which it is made if there is none.
    #[n(3)]
    pub size_bytes: Option<u64>,
}

impl VolumePlan {
    /// The name of the volume that a task uses.
    #[must_use]
    pub fn name_of(&self, job: JobId, index: u32) -> String {
        self.name.replace("${index}", &index.to_string()).replace("${job.id}", &job.to_string())
    }
}

/// The id of the volume that an attempt makes in a slot, or that its clone there becomes: everybody computes the same, and no other attempt or slot
/// has it.
#[must_use]
pub fn made_by(name: &AttemptName, slot: u8) -> VolumeId {
    let mut hasher = blake3::Hasher::new_derive_key("volley volume made for an attempt");
    hasher.update(&name.job.0.to_be_bytes());
    hasher.update(&name.index.to_be_bytes());
    hasher.update(&name.number.to_be_bytes());
    hasher.update(&name.sequence.to_be_bytes());
    hasher.update(&[slot]);
    let mut id = [0; 16];
    hasher.finalize_xof().fill(&mut id);
    VolumeId(id)
}

/// What all tasks of a job read or copy in one slot: it does not change while the job is there.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Encode, Decode, Serialize)]
#[cbor(map)]
pub struct Pin {
    /// The slot.
    #[n(0)]
    pub slot: u8,
    /// Of which volume.
    #[n(1)]
    pub volume: VolumeId,
    /// The snapshot; none: the leader is still to make one of what the volume is.
    #[n(2)]
    pub snapshot: Option<SnapshotId>,
    /// Is it known to be there, and safe from collection? Nothing of the job is started before.
    #[n(3)]
    pub held: bool,
}

/// A volume that an attempt may write.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode, Serialize)]
#[cbor(map)]
pub struct Given {
    /// The task.
    #[n(0)]
    pub index: u32,
    /// Its slot.
    #[n(1)]
    pub slot: u8,
    /// Which volume.
    #[n(2)]
    pub volume: VolumeId,
    /// The generation the attempt begins with; 0: nothing was ever accepted, and there may be no such volume yet.
    #[n(3)]
    pub generation: u64,
}

/// What an attempt left in a volume that it wrote. All of an attempt's stand in one report, and are accepted with its result or not at all.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode, Serialize)]
#[cbor(map)]
pub struct Left {
    /// Its slot.
    #[n(0)]
    pub slot: u8,
    /// Which volume.
    #[n(1)]
    pub volume: VolumeId,
    /// The generation it began with.
    #[n(2)]
    pub generation: u64,
    /// Names what is on it now: the digest of the state that its last commit made.
    #[cbor(n(3), with = "minicbor::bytes")]
    #[serde(serialize_with = "super::hex")]
    pub root: [u8; 32],
    /// Its size now, in bytes.
    #[n(4)]
    pub size_bytes: u64,
}

/// A clone that an attempt keeps. Its objects are in the bucket; its name becomes its own with the record.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode, Serialize)]
#[cbor(map)]
pub struct Kept {
    /// Its slot.
    #[n(0)]
    pub slot: u8,
    /// Which volume it has become.
    #[n(1)]
    pub volume: VolumeId,
    /// Under which name.
    #[n(2)]
    pub name: String,
    /// Its size, in bytes.
    #[n(3)]
    pub size_bytes: u64,
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_slot_of_each_try_has_an_id_of_its_own() {
        let name = AttemptName { job: JobId(1), stage: 0, index: 2, number: 3, sequence: 4 };
        let others = [
            made_by(&name, 1),
            made_by(&AttemptName { job: JobId(2), ..name }, 0),
            made_by(&AttemptName { index: 3, ..name }, 0),
            made_by(&AttemptName { number: 4, ..name }, 0),
            made_by(&AttemptName { sequence: 5, ..name }, 0),
        ];
        assert!(!others.contains(&made_by(&name, 0)));
        // It stands in logs and buckets: it must not change.
        assert_eq!(made_by(&name, 0).to_string(), "v593b32363c4335b2022784ba8181276a");
    }

    #[test]
    fn a_name_is_each_tasks_own() {
        let plan = |name: &str| VolumePlan { name: name.to_owned(), snapshot: None, access: Access::Rw, size_bytes: None };
        assert_eq!(plan("s-${index}.${job.id}-${index}").name_of(JobId(7), 12), "s-12.j7-12");
        assert_eq!(plan("state").name_of(JobId(7), 12), "state");
    }
}
