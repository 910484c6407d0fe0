//! What a request asks, and whether it may.
//!
//! Owns checking heads of requests against the export, and the extents of `BLOCK_STATUS`. Pure. Does not own doing it (`connection`,
//! `waiting`).

use std::ops::Range;

use crate::device::Piece;

use super::handshake::{Agreed, BLOCK_MAX};
use super::wire::{ALLOCATION_ID, Errno, RequestHead, allocation, chunk, chunk_head, command, command_flag};

/// Blocks of a volume, in bytes: within one, what a write leaves alone may have to be read first.
pub const BLOCK: u64 = 4096;
/// Most extents in one reply: 32 KiB of them.
const EXTENTS_MAX: usize = 4096;

/// What is to be done.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum What {
    /// Reads; with `whole` what was read is wanted in one piece.
    Read {
        /// See there.
        whole: bool,
    },
    /// Writes what follows the request.
    Write {
        /// Reply when it is durable.
        fua: bool,
    },
    /// The client leaves.
    Leave,
    /// Makes everything that was replied to durable.
    Flush,
    /// Discards.
    Trim {
        /// Reply when it is durable.
        fua: bool,
    },
    /// Writes zeros.
    Zero {
        /// They need keep no room.
        hole: bool,
        /// Reply when it is durable.
        fua: bool,
    },
    /// Tells what is stored.
    Status {
        /// One extent is enough.
        one: bool,
    },
}

/// What requests are checked against.
#[derive(Debug, Clone, Copy)]
pub struct Limits {
    /// Bytes of the export now.
    pub size: u64,
    /// Are all writes refused?
    pub read_only: bool,
    /// What was negotiated.
    pub agreed: Agreed,
}

/// Checks a request.
///
/// # Errors
/// What is replied instead. Of a write the bytes still follow.
pub fn check(head: &RequestHead, limits: &Limits) -> Result<What, Errno> {
    let fua = head.flags & command_flag::FUA != 0;
    let (what, also) = match head.command {
        command::READ => {
            let df = if limits.agreed.structured { command_flag::DF } else { 0 };
            (What::Read { whole: head.flags & command_flag::DF != 0 }, df)
        }
        command::WRITE => (What::Write { fua }, 0),
        // It has no reply, so whatever else it says it leaves.
        command::DISC => return Ok(What::Leave),
        command::FLUSH => (What::Flush, 0),
        command::TRIM => (What::Trim { fua }, 0),
        command::WRITE_ZEROES => (What::Zero { hole: head.flags & command_flag::NO_HOLE == 0, fua }, command_flag::NO_HOLE),
        command::BLOCK_STATUS if limits.agreed.allocation => {
            (What::Status { one: head.flags & command_flag::REQ_ONE != 0 }, command_flag::REQ_ONE)
        }
        _ => return Err(Errno::Invalid),
    };
    // Any command may carry FUA; where nothing is written it says nothing.
    if head.flags & !(command_flag::FUA | also) != 0 {
        return Err(Errno::Invalid);
    }
    let writes = matches!(what, What::Write { .. } | What::Trim { .. } | What::Zero { .. });
    if writes && limits.read_only {
        return Err(Errno::NotPermitted);
    }
    let carries = matches!(what, What::Read { .. } | What::Write { .. });
    if carries && head.len > BLOCK_MAX || matches!(what, What::Status { .. }) && head.len == 0 {
        return Err(Errno::Invalid);
    }
    let within = head.offset.checked_add(head.len.into()).is_some_and(|end| end <= limits.size);
    match what {
        What::Flush => Ok(what),
        _ if within => Ok(what),
        // As the protocol has it for what would be put behind the end.
        What::Write { .. } | What::Zero { .. } => Err(Errno::NoSpace),
        _ => Err(Errno::Invalid),
    }
}

/// The blocks that a range touches, by their numbers.
#[must_use]
pub fn blocks(offset: u64, len: u64) -> Range<u64> {
    offset / BLOCK..offset.saturating_add(len).div_ceil(BLOCK)
}

/// The blocks, by where they begin, of which a write of this range leaves something alone.
#[must_use]
pub fn edges(offset: u64, len: u64) -> [Option<u64>; 2] {
    let end = offset.saturating_add(len);
    let begin = |at: u64| (len > 0 && !at.is_multiple_of(BLOCK)).then_some(at - at % BLOCK);
    let (first, last) = (begin(offset), begin(end));
    [first, last.filter(|last| Some(*last) != first)]
}

/// The whole reply to `BLOCK_STATUS` of `len` bytes, of which `pieces` tell a beginning, or more.
///
/// # Errors
/// The pieces tell of nothing.
pub fn status(cookie: u64, len: u32, one: bool, pieces: &[Piece]) -> Result<Vec<u8>, Errno> {
    let most = if one { 1 } else { EXTENTS_MAX };
    let mut extents: Vec<(u32, u32)> = Vec::new();
    let mut left = len;
    for piece in pieces {
        // Longer ones are cut: it says nothing of what lies behind.
        let here = u32::try_from(piece.len).unwrap_or(u32::MAX).min(left);
        let flags = if piece.hole { allocation::HOLE | allocation::ZERO } else { 0 };
        if here == 0 {
            continue;
        }
        let full = extents.len() == most;
        match extents.last_mut() {
            Some(last) if last.1 == flags => last.0 += here,
            _ if full => break,
            _ => extents.push((here, flags)),
        }
        left -= here;
    }
    if extents.is_empty() {
        return Err(Errno::Io);
    }
    let payload = 4 + 8 * extents.len();
    let mut reply = chunk_head(cookie, chunk::BLOCK_STATUS, true, payload as u32).to_vec();
    reply.extend(ALLOCATION_ID.to_be_bytes());
    reply.extend(extents.iter().flat_map(|(len, flags)| [len.to_be_bytes(), flags.to_be_bytes()].concat()));
    Ok(reply)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const AGREED: Agreed = Agreed { structured: true, allocation: true };
    const LIMITS: Limits = Limits { size: 10_000, read_only: false, agreed: AGREED };

    fn head(command: u16, flags: u16, offset: u64, len: u32) -> RequestHead {
        RequestHead { flags, command, cookie: 1, offset, len }
    }

    #[test]
    fn what_is_whole_and_within_may() {
        let what = |command, flags| check(&head(command, flags, 9_999, 1), &LIMITS);
        assert_eq!(what(command::READ, 0), Ok(What::Read { whole: false }));
        assert_eq!(what(command::READ, command_flag::DF), Ok(What::Read { whole: true }));
        assert_eq!(what(command::WRITE, command_flag::FUA), Ok(What::Write { fua: true }));
        assert_eq!(what(command::TRIM, 0), Ok(What::Trim { fua: false }));
        assert_eq!(what(command::WRITE_ZEROES, 0), Ok(What::Zero { hole: true, fua: false }));
        assert_eq!(what(command::WRITE_ZEROES, command_flag::NO_HOLE), Ok(What::Zero { hole: false, fua: false }));
        assert_eq!(what(command::BLOCK_STATUS, command_flag::REQ_ONE), Ok(What::Status { one: true }));
        assert_eq!(check(&head(command::FLUSH, 0, 0, 0), &LIMITS), Ok(What::Flush));
        assert_eq!(check(&head(command::READ, 0, 10_000, 0), &LIMITS), Ok(What::Read { whole: false }));
    }

    #[test]
    fn what_is_behind_the_end_may_not() {
        for (command, error) in [
            (command::READ, Errno::Invalid),
            (command::TRIM, Errno::Invalid),
            (command::BLOCK_STATUS, Errno::Invalid),
            (command::WRITE, Errno::NoSpace),
            (command::WRITE_ZEROES, Errno::NoSpace),
        ] {
            for (offset, len) in [(10_000, 1), (9_999, 2), (u64::MAX, 1), (u64::MAX, 0)] {
                let expected = if command == command::BLOCK_STATUS && len == 0 { Errno::Invalid } else { error };
                assert_eq!(check(&head(command, 0, offset, len), &LIMITS), Err(expected), "{command} {offset} {len}");
            }
        }
    }

    #[test]
    fn what_is_not_known_may_not() {
        let refused = |command, flags| check(&head(command, flags, 0, 1), &LIMITS) == Err(Errno::Invalid);
        // CACHE, RESIZE, and nothing.
        assert!([5, 8, 9, u16::MAX].into_iter().all(|command| refused(command, 0)));
        // FAST_ZERO was not offered.
        assert!(refused(command::WRITE_ZEROES, 1 << 4));
        assert!(refused(command::READ, command_flag::NO_HOLE) && refused(command::WRITE, command_flag::DF));
        assert!(refused(command::FLUSH, 1 << 15));
        let plain = Limits { agreed: Agreed { structured: false, allocation: false }, ..LIMITS };
        assert_eq!(check(&head(command::BLOCK_STATUS, 0, 0, 1), &plain), Err(Errno::Invalid));
        assert_eq!(check(&head(command::READ, command_flag::DF, 0, 1), &plain), Err(Errno::Invalid));
        let large = Limits { size: u64::MAX, ..LIMITS };
        assert_eq!(check(&head(command::READ, 0, 0, BLOCK_MAX), &large), Ok(What::Read { whole: false }));
        assert_eq!(check(&head(command::READ, 0, 0, BLOCK_MAX + 1), &large), Err(Errno::Invalid));
        assert_eq!(check(&head(command::TRIM, 0, 0, u32::MAX), &large), Ok(What::Trim { fua: false }));
    }

    #[test]
    fn nothing_is_written_to_what_is_read_only() {
        let read_only = Limits { read_only: true, ..LIMITS };
        for command in [command::WRITE, command::TRIM, command::WRITE_ZEROES] {
            assert_eq!(check(&head(command, 0, 0, 1), &read_only), Err(Errno::NotPermitted));
        }
        assert_eq!(check(&head(command::FLUSH, 0, 0, 0), &read_only), Ok(What::Flush));
    }

    #[test]
    fn edges_are_the_blocks_that_are_written_in_part() {
        assert_eq!(edges(0, 8192), [None, None]);
        assert_eq!(edges(1, 100), [Some(0), None]);
        assert_eq!(edges(100, 8192), [Some(0), Some(8192)]);
        assert_eq!(edges(4096, 1), [None, Some(4096)]);
        assert_eq!(edges(5, 0), [None, None]);
        assert_eq!((blocks(0, 4096), blocks(1, 4096), blocks(4095, 1), blocks(4096, 0)), (0..1, 0..2, 0..1, 1..1));
    }

    #[test]
    fn a_status_without_pieces_is_an_error() {
        assert_eq!(status(1, 10, false, &[]), Err(Errno::Io));
        assert_eq!(status(1, 10, false, &[Piece { len: 0, hole: true }]), Err(Errno::Io));
    }

    proptest! {
        #[test]
        fn statuses_tell_what_the_pieces_say(lens in proptest::collection::vec((0u64..5_000, any::<bool>()), 1..20), len in 1u32..9_000, one: bool) {
            let pieces: Vec<Piece> = lens.iter().map(|(len, hole)| Piece { len: *len, hole: *hole }).collect();
            let holes: Vec<bool> = pieces.iter().flat_map(|piece| vec![piece.hole; piece.len as usize]).take(len as usize).collect();
            let reply = status(7, len, one, &pieces);
            prop_assert_eq!(reply.is_err(), holes.is_empty());
            let Ok(reply) = reply else { return Ok(()) };
            let number = |at: usize| u32::from_be_bytes(reply[at..at + 4].try_into().unwrap()) as usize;
            prop_assert_eq!((number(16), number(20)), (reply.len() - 20, 1));
            let mut told = Vec::new();
            for at in (24..reply.len()).step_by(8) {
                prop_assert!(number(at) > 0);
                told.extend(vec![number(at + 4) == 3; number(at)]);
            }
            if one {
                prop_assert_eq!(reply.len(), 32);
                prop_assert!(holes.starts_with(&told));
            } else {
                prop_assert_eq!(told, holes);
            }
        }

        #[test]
        fn whatever_may_lies_within(command in 0u16..10, flags: u16, offset: u64, len: u32, size: u64, structured: bool) {
            let limits = Limits { size, read_only: false, agreed: Agreed { structured, allocation: structured } };
            if let Ok(what) = check(&head(command, flags, offset, len), &limits) {
                let within = offset.checked_add(len.into()).is_some_and(|end| end <= size);
                prop_assert!(within || matches!(what, What::Leave | What::Flush));
            }
        }
    }
}
