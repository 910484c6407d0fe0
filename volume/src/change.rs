//! `change`: the exchange of a head by somebody who does not write the volume.
//!
//! Owns trying again until the answer is clear. What a head may become is `state/moves`'s.

use volley_jobspecs::ids::VolumeId;

use crate::format::head::Head;
use crate::format::keys;
use crate::host::{Host, random};
use crate::io::s3::Put;
use crate::open::OpenError;
use crate::state::moves::MoveError;

/// How often it is tried when the head changes at the same time, or nobody answers.
const TRIES: u32 = 8;

impl Host {
    /// Changes a head: `next` makes the new one of the present one and of fresh random bytes, or says that it is as it should be. Doing it again
    /// is safe where `next` sees that it was done.
    ///
    /// # Errors
    /// What `next` says; [`OpenError::Busy`] when it is changed again and again, or nobody answers.
    pub(crate) fn change_head(
        &self,
        volume: VolumeId,
        next: impl Fn(&Head, [u8; 16]) -> Result<Option<Head>, MoveError>,
    ) -> Result<(), OpenError> {
        let mut why = String::new();
        for _ in 0..TRIES {
            let (head, family, tag) = self.head(volume)?;
            let Some(next) = next(&head, random()?)? else { return Ok(()) };
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
