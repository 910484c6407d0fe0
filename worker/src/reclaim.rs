//! Stage *reclaim*: nothing of an attempt is left in its slot.
//!
//! Owns the stage; runs after every attempt, however it ended. Does not own processes, which are gone before (`execute`).

use std::io;

use crate::dirs::Dirs;

/// Why something is left.
#[derive(Debug, thiserror::Error)]
pub enum ReclaimError {
    /// A directory can't be emptied.
    #[error("emptying the slot's directories: {0}; the slot goes on in new ones, look at what is in the way")]
    Dirs(#[source] io::Error),
}

/// Empties a slot. Gives its directories back, empty.
///
/// # Errors
/// [`ReclaimError`]: the slot's directories must not be used again.
pub fn reclaim(mut dirs: Dirs) -> Result<Dirs, ReclaimError> {
    dirs.make().map_err(ReclaimError::Dirs)?;
    Ok(dirs)
}
