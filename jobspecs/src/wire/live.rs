//! Live output: what a running task writes, as it writes it, for whoever watches.
//!
//! Owns its shape. It is no fact: pieces may be lost, and the kept log is what counts.

use minicbor::bytes::ByteVec;
use minicbor::{Decode, Encode};

use crate::ids::AttemptName;

/// Most bytes of output in one message.
pub const LIVE_BYTES_MAX: usize = 32 * 1024;

/// A piece of output, published on `subjects::live`.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Live {
    /// Of which attempt.
    #[n(0)]
    pub name: AttemptName,
    /// Is it stderr, or stdout?
    #[n(1)]
    pub stderr: bool,
    /// Where the piece begins in its stream; a gap says that pieces were lost or not watched.
    #[n(2)]
    pub offset: u64,
    /// The piece, at most [`LIVE_BYTES_MAX`].
    #[n(3)]
    pub bytes: ByteVec,
}
