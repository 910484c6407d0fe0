//! `remove`: a volume is deleted. Its head says so from then on, and takes a new epoch, so that whoever still writes is out.
//!
//! Owns the mark on its head. What is left of the volume goes with the next collection, and the head last of all.

use volley_jobspecs::ids::VolumeId;

use crate::host::{FetchError, Host, now_ms};
use crate::io::s3::ObjectsError;
use crate::open::OpenError;
use crate::state::moves;

impl Host {
    /// Deletes a volume; one that is deleted stays so, and one that was never made is. `force`: even if somebody has it.
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn remove(&self, volume: VolumeId, force: bool) -> Result<(), OpenError> {
        let done = self.change_head(volume, |head, commit| match head.tombstone {
            Some(_) => Ok(None),
            None => moves::remove(head, force, now_ms(), commit).map(Some),
        });
        match done {
            Err(OpenError::Fetch(FetchError::Objects(ObjectsError::NotFound { .. }))) => Ok(()),
            other => other,
        }
    }
}
