//! `pin`: what a job reads or copies stays as long as the job.
//!
//! Owns the order that makes it safe: first the pin, then the look whether the snapshot is there. A collection that saw no pin before sees the snapshot
//! unmarked in one run only, and deletes nothing after one.

use volley_jobspecs::ids::{SnapshotId, VolumeId};

use crate::format::keys;
use crate::format::pin::Pin;
use crate::format::snapshot::SNAPSHOT_BYTES_MAX;
use crate::host::Host;
use crate::io::s3::{Listed, ObjectsError};
use crate::open::OpenError;

/// What is pinned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pinned {
    /// A snapshot that must be there.
    Snapshot(SnapshotId),
    /// What was accepted of a volume, as a snapshot of this id. If there is one already it is taken: an earlier try got as far.
    Accepted(VolumeId, SnapshotId),
}

impl Host {
    /// Pins a snapshot for an owner, until [`Host::unpin`]. Doing it again changes nothing.
    ///
    /// # Errors
    /// [`OpenError`]: there is no such snapshot or volume, or nobody answers.
    pub fn pin(&self, owner: &str, what: Pinned) -> Result<(), OpenError> {
        let (Pinned::Snapshot(snapshot) | Pinned::Accepted(_, snapshot)) = what;
        let pin = Pin { snapshot, owner: owner.to_owned(), until_ms: None };
        let key = keys::pin(owner, snapshot);
        Self::end(&key, &self.begin_put(key.clone(), pin.write()?.into()))?;
        let there = self.get(&keys::snapshot(snapshot), SNAPSHOT_BYTES_MAX);
        match (there, what) {
            (Ok(_), _) => Ok(()),
            (Err(ObjectsError::NotFound { .. }), Pinned::Accepted(volume, _)) => self.snapshot_accepted(volume, snapshot),
            (Err(error), _) => Err(error.into()),
        }
    }

    /// Lets go of everything an owner has pinned.
    ///
    /// # Errors
    /// [`OpenError`]: nobody answers.
    pub fn unpin(&self, owner: &str) -> Result<(), OpenError> {
        let prefix = format!("{}{owner}/", keys::PINS);
        loop {
            let name = prefix.clone();
            let found = Self::end(&prefix, &self.begin(|objects| async move { objects.list(&name, None).await }))?;
            if found.is_empty() {
                return Ok(());
            }
            for Listed { key, .. } in found {
                let name = key.clone();
                Self::end(&key, &self.begin(|objects| async move { objects.delete(&name).await }))?;
            }
        }
    }
}
