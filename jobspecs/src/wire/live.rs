//! Live output: what a running task writes, as it writes it, for whoever watches.
//!
//! Owns its shape, and how whoever watches asks for what was written before. It is no fact: pieces may be lost, and the kept log is
//! what counts.

use minicbor::bytes::ByteVec;
use minicbor::{Decode, Encode};

use crate::ids::AttemptName;
use crate::units::count;

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
    /// Where the piece begins in its stream; a gap says that pieces were lost, not watched or not held any more.
    #[n(2)]
    pub offset: u64,
    /// The piece, at most [`LIVE_BYTES_MAX`].
    #[n(3)]
    pub bytes: ByteVec,
    /// Was it written before somebody asked for it? Such pieces of one attempt follow each other, and before whatever it writes then.
    #[n(4)]
    pub held: Option<Held>,
}

/// Stands where bytes are left out of a stream, of which not everything was kept or sent.
#[must_use]
pub fn left_out(bytes: u64) -> String {
    format!("\n[volley: {} left out here]\n", count(bytes, "byte"))
}

/// What a piece is that answers [`Watch::held`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode)]
#[cbor(index_only)]
pub enum Held {
    /// Bytes. A gap before them says that they are the end of a stream of which not everything is held.
    #[n(0)]
    Piece,
    /// No bytes: that was all of both streams. Only for whoever asked for one task.
    #[n(1)]
    End,
}

/// Somebody watches a job: what is published on `subjects::watch`. An empty message says the same as one without fields.
#[derive(Debug, Clone, PartialEq, Eq, Default, Encode, Decode)]
#[cbor(map)]
pub struct Watch {
    /// Of which tasks is also wanted what they wrote before?
    #[n(0)]
    pub held: Option<Asked>,
}

/// Tasks that are asked for what they wrote before.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Encode, Decode)]
pub enum Asked {
    /// All that run, a little of each.
    #[n(0)]
    All,
    /// One.
    #[n(1)]
    One(#[n(0)] u32),
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::ids::JobId;
    use crate::wire::{decode, encode};

    /// As builds before `held` had it.
    #[derive(Debug, PartialEq, Eq, Encode, Decode)]
    #[cbor(map)]
    struct Older {
        #[n(0)]
        name: AttemptName,
        #[n(1)]
        stderr: bool,
        #[n(2)]
        offset: u64,
        #[n(3)]
        bytes: ByteVec,
    }

    #[test]
    fn pieces_are_read_by_older_builds_and_theirs_here() {
        let name = AttemptName { job: JobId(1), stage: 0, index: 2, number: 3, sequence: 4 };
        let older = Older { name, stderr: true, offset: 7, bytes: b"x".to_vec().into() };
        let newer = Live { name, stderr: true, offset: 7, bytes: b"x".to_vec().into(), held: None };
        assert_eq!(decode::<Live>("live output", &encode(&older)).ok(), Some(newer.clone()));
        let held = Live { held: Some(Held::Piece), ..newer };
        assert_eq!(decode::<Live>("live output", &encode(&held)).ok(), Some(held.clone()));
        assert_eq!(decode::<Older>("live output", &encode(&held)).ok(), Some(older));
    }

    #[test]
    fn watches_come_back() {
        for watch in [Watch::default(), Watch { held: Some(Asked::All) }, Watch { held: Some(Asked::One(7)) }] {
            assert_eq!(decode::<Watch>("watch", &encode(&watch)).ok(), Some(watch));
        }
    }
}
