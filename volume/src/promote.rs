//! `promote`: what an attempt wrote becomes what stands, after the cluster's log has accepted the attempt.
//!
//! Owns the repeatable exchange of the head. Whether to promote is the leader's decision.

use volley_jobspecs::ids::{AttemptName, VolumeId};

use crate::format::keys;
use crate::host::{Host, random};
use crate::io::s3::Put;
use crate::open::OpenError;
use crate::state::moves;

/// How often it is tried when the head changes at the same time, or nobody answers.
const TRIES: u32 = 8;

/// What was accepted, as the attempt's report has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Promotion {
    /// The volume.
    pub volume: VolumeId,
    /// The attempt; None: a person.
    pub attempt: Option<AttemptName>,
    /// The generation it began with.
    pub base: u64,
    /// Digest of its last state.
    pub root: [u8; 32],
}

impl Host {
    /// Promotes; doing it again changes nothing.
    ///
    /// # Errors
    /// [`OpenError`]: another state is there, or nobody answers.
    pub fn promote(&self, what: &Promotion) -> Result<(), OpenError> {
        let mut why = String::new();
        for _ in 0..TRIES {
            let (head, family, tag) = self.head(what.volume)?;
            let Some(next) = moves::promote(&head, what.attempt, what.base, what.root, random()?)? else { return Ok(()) };
            match self.put_if_match(&keys::head(what.volume), next.write(&family, random()?)?.into(), &tag)? {
                Put::Written(_) => return Ok(()),
                // The next look at the head tells whether it was done.
                Put::Refused => "it was changed at the same time".clone_into(&mut why),
                Put::Unknown(words) => why = words,
            }
        }
        Err(OpenError::Busy { volume: what.volume, why })
    }
}
