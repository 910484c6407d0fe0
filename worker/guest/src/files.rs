//! Files as one tar stream, in and out, with limits.
//!
//! Owns what a stream may hold and how it is read and written below a directory held open, on both sides: the host does not trust the
//! guest's streams, and an agent does not trust what lies in its directories. Symbolic links are kept and never followed; devices,
//! sockets and pipes are left out and reported. Does not own which files.

pub(crate) mod below;
mod pack;
mod unpack;

use std::io;

use volley_jobspecs::wire::guest::{FileLimits, Files, SKIPPED_LISTED_MAX, SKIPPED_NAME_BYTES_MAX, SkipReason, Skipped};

pub use pack::{PackError, pack, pack_named};
pub use unpack::{Unpack, UnpackError, unpack};

/// Deepest directory below the first: each level is held open while it is walked.
pub const DEPTH_MAX: usize = 128;

/// Past a limit.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("more than {limit} {what}")]
pub struct TooMuch {
    /// Of what.
    pub what: &'static str,
    /// How much is allowed.
    pub limit: u64,
}

/// Counts what goes through a stream.
struct Tally {
    files: Files,
    limits: FileLimits,
}

impl Tally {
    fn new(limits: FileLimits) -> Self {
        Self { files: Files::default(), limits }
    }

    fn entry(&mut self, path: &[u8]) -> Result<(), TooMuch> {
        if self.files.entries >= self.limits.entries {
            return Err(TooMuch { what: "files, directories and links", limit: self.limits.entries });
        }
        if path.len() > self.limits.path_bytes as usize {
            return Err(TooMuch { what: "bytes in a path", limit: self.limits.path_bytes.into() });
        }
        self.files.entries += 1;
        Ok(())
    }

    fn bytes(&mut self, len: u64) -> Result<(), TooMuch> {
        let sum = self.files.bytes.checked_add(len).filter(|sum| *sum <= self.limits.bytes);
        self.files.bytes = sum.ok_or(TooMuch { what: "bytes", limit: self.limits.bytes })?;
        Ok(())
    }

    fn skip(&mut self, path: &[u8], why: SkipReason) {
        self.files.skipped_total += 1;
        if self.files.skipped.len() < SKIPPED_LISTED_MAX {
            let mut path = String::from_utf8_lossy(path.get(..SKIPPED_NAME_BYTES_MAX).unwrap_or(path)).into_owned();
            // What replaces a byte has three.
            while path.len() > SKIPPED_NAME_BYTES_MAX {
                path.pop();
            }
            self.files.skipped.push(Skipped { path, why });
        }
    }
}

/// Does the disk have no room left?
#[must_use]
pub fn is_full(e: &io::Error) -> bool {
    matches!(e.raw_os_error(), Some(libc::ENOSPC | libc::EDQUOT))
}

#[cfg(test)]
mod tests;
