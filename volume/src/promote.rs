//! `promote`: what an attempt wrote becomes what stands, after the cluster's log has accepted the attempt.
//!
//! Owns the repeatable exchange of the head. Whether to promote is the leader's decision.

use volley_jobspecs::ids::{AttemptName, VolumeId};

use crate::host::Host;
use crate::open::OpenError;
use crate::state::moves;

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
        self.change_head(what.volume, |head, commit| moves::promote(head, what.attempt, what.base, what.root, commit))
    }
}
