//! `snapshot`: a state of a volume that stays, and what clones are made of.
//!
//! Owns taking one: the volume commits, and the state it has then gets a name. Nothing is copied.

use volley_jobspecs::ids::{SnapshotId, VolumeId};

use crate::format::keys;
use crate::format::seal::FamilyKey;
use crate::format::snapshot::{SNAPSHOT_BYTES_MAX, Snapshot};
use crate::host::{FetchError, Host, at, lock, now_ms, random};
use crate::io::s3::ObjectsError;
use crate::open::OpenError;
use crate::state::moves;
use crate::volume::Volume;

impl Volume {
    /// Takes a snapshot of the disk as it is now. Map pages are written first, so that whoever clones it reads few objects.
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn snapshot(&self, id: SnapshotId) -> Result<(), OpenError> {
        let shared = &self.shared;
        if shared.ephemeral {
            return Err(OpenError::Ephemeral { volume: shared.id });
        }
        let mut commits = lock(&shared.commits);
        shared.commit_with(&mut commits, true)?;
        let snapshot = moves::snapshot(&commits.head, id, false, now_ms())?;
        shared.host.put_snapshot(&snapshot, &shared.family)
    }
}

impl Host {
    /// Takes a snapshot of what was accepted, without opening the volume: two requests.
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn snapshot_accepted(&self, volume: VolumeId, id: SnapshotId) -> Result<(), OpenError> {
        let (head, family, _) = self.head(volume)?;
        self.put_snapshot(&moves::snapshot(&head, id, true, now_ms())?, &family)
    }

    /// A snapshot, and what opens the blocks it names.
    pub(crate) fn read_snapshot(&self, id: SnapshotId) -> Result<(Snapshot, FamilyKey), FetchError> {
        let key = keys::snapshot(id);
        let (bytes, _) = self.get(&key, SNAPSHOT_BYTES_MAX)?;
        Snapshot::read(id, &self.keys, &bytes).map_err(at(&key))
    }

    fn put_snapshot(&self, snapshot: &Snapshot, family: &FamilyKey) -> Result<(), OpenError> {
        let (key, bytes) = (keys::snapshot(snapshot.line.id), snapshot.write(family, random()?)?);
        match Self::end(&key, &self.begin_put(key.clone(), bytes.into())) {
            // Taken before, by whoever did not hear that it was: the same state is the same snapshot.
            Err(error @ ObjectsError::Refused { .. }) => match self.get(&key, SNAPSHOT_BYTES_MAX) {
                Ok((found, _)) if same(snapshot, &Snapshot::read(snapshot.line.id, &self.keys, &found)?.0) => Ok(()),
                _ => Err(error.into()),
            },
            end => Ok(end.map(|_| ())?),
        }
    }
}

fn same(wanted: &Snapshot, found: &Snapshot) -> bool {
    (wanted.line.volume, wanted.line.root) == (found.line.volume, found.line.root)
}
