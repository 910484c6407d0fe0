//! `remove`: a volume is deleted. Its head says so from then on, and takes a new epoch, so that whoever still writes is out.
//!
//! Owns the exchange of the head. What is left of the volume goes with the next collection.

use volley_jobspecs::ids::VolumeId;

use crate::format::keys;
use crate::host::{Host, now_ms, random};
use crate::io::s3::Put;
use crate::open::OpenError;
use crate::state::moves;

/// How often it is tried when the head changes at the same time, or nobody answers.
const TRIES: u32 = 8;

impl Host {
    /// Deletes a volume; one that is deleted stays so. `force`: even if somebody has it.
    ///
    /// # Errors
    /// [`OpenError`].
    pub fn remove(&self, volume: VolumeId, force: bool) -> Result<(), OpenError> {
        let mut why = String::new();
        for _ in 0..TRIES {
            let (head, family, tag) = self.head(volume)?;
            if head.tombstone.is_some() {
                return Ok(());
            }
            let next = moves::remove(&head, force, now_ms(), random()?)?;
            match self.put_if_match(&keys::head(volume), next.write(&family, random()?)?.into(), &tag)? {
                Put::Written(_) => return Ok(()),
                // The next look at the head tells whether it was done.
                Put::Refused => "it was changed at the same time".clone_into(&mut why),
                Put::Unknown(words) => why = words,
            }
        }
        Err(OpenError::Busy { volume, why })
    }
}
