//! Layouts and numbers of the NBD protocol, for both ends.
//!
//! Owns where each field lies; all numbers are big-endian. Source: doc/proto.md of the NBD project. Pure. Does not own which message
//! may come when (`handshake`, `connection`).

use std::io;

/// What a server says first.
pub const SERVER_MAGIC: u64 = 0x4e42_444d_4147_4943;
/// Before each option, and after [`SERVER_MAGIC`] for the newstyle negotiation.
pub const OPTION_MAGIC: u64 = 0x4948_4156_454F_5054;
/// Before each answer to an option.
pub const OPTION_REPLY_MAGIC: u64 = 0x0003_e889_0455_65a9;
/// Before each request.
pub const REQUEST_MAGIC: u32 = 0x2560_9513;
/// Before a reply without a structure.
pub const SIMPLE_REPLY_MAGIC: u32 = 0x6744_6698;
/// Before each piece of a structured reply.
pub const CHUNK_MAGIC: u32 = 0x668e_33ef;

/// Handshake flags, the same of server and client: newstyle fixed; no zeros behind the answer to `EXPORT_NAME`.
pub const FIXED_NEWSTYLE: u16 = 1;
/// See [`FIXED_NEWSTYLE`].
pub const NO_ZEROES: u16 = 2;

/// Options, and what they want.
pub mod option {
    /// Serve this export; has no answer but the export's size and flags.
    pub const EXPORT_NAME: u32 = 1;
    /// Leave.
    pub const ABORT: u32 = 2;
    /// Which exports are there?
    pub const LIST: u32 = 3;
    /// Encrypt.
    pub const STARTTLS: u32 = 5;
    /// Describe an export.
    pub const INFO: u32 = 6;
    /// Describe it and serve it.
    pub const GO: u32 = 7;
    /// Reply to reads with structure.
    pub const STRUCTURED_REPLY: u32 = 8;
    /// Which metadata is there?
    pub const LIST_META_CONTEXT: u32 = 9;
    /// Which metadata `BLOCK_STATUS` shall tell.
    pub const SET_META_CONTEXT: u32 = 10;
}

/// Kinds of answers to options. The highest bit marks errors.
pub mod answer {
    /// Done.
    pub const ACK: u32 = 1;
    /// An export that is there.
    pub const SERVER: u32 = 2;
    /// Something about an export.
    pub const INFO: u32 = 3;
    /// Metadata that is there.
    pub const META_CONTEXT: u32 = 4;
    /// Not known here.
    pub const ERR_UNSUP: u32 = 1 << 31 | 1;
    /// Not as the protocol has it.
    pub const ERR_INVALID: u32 = 1 << 31 | 3;
    /// No such export.
    pub const ERR_UNKNOWN: u32 = 1 << 31 | 6;
    /// Longer than is taken here.
    pub const ERR_TOO_BIG: u32 = 1 << 31 | 9;
}

/// Kinds of information about an export.
pub mod info {
    /// Its size and flags.
    pub const EXPORT: u16 = 0;
    /// Its name.
    pub const NAME: u16 = 1;
    /// Its smallest, preferred and largest request.
    pub const BLOCK_SIZE: u16 = 3;
}

/// What an export can do.
pub mod flag {
    /// There are flags.
    pub const HAS_FLAGS: u16 = 1;
    /// Writes are refused.
    pub const READ_ONLY: u16 = 1 << 1;
    /// It knows `FLUSH`.
    pub const SEND_FLUSH: u16 = 1 << 2;
    /// It knows [`FUA`](super::command_flag::FUA).
    pub const SEND_FUA: u16 = 1 << 3;
    /// It knows `TRIM`.
    pub const SEND_TRIM: u16 = 1 << 5;
    /// It knows `WRITE_ZEROES`.
    pub const SEND_WRITE_ZEROES: u16 = 1 << 6;
    /// It knows [`DF`](super::command_flag::DF).
    pub const SEND_DF: u16 = 1 << 7;
}

/// Commands.
pub mod command {
    /// Reads.
    pub const READ: u16 = 0;
    /// Writes; the bytes follow the request.
    pub const WRITE: u16 = 1;
    /// Leaves; there is no reply.
    pub const DISC: u16 = 2;
    /// Makes what was replied to durable.
    pub const FLUSH: u16 = 3;
    /// What is there is wanted no more.
    pub const TRIM: u16 = 4;
    /// Writes zeros.
    pub const WRITE_ZEROES: u16 = 6;
    /// What is where?
    pub const BLOCK_STATUS: u16 = 7;
}

/// Flags of commands.
pub mod command_flag {
    /// Reply when it is durable.
    pub const FUA: u16 = 1;
    /// Zeros that keep room.
    pub const NO_HOLE: u16 = 1 << 1;
    /// What is read comes in one piece.
    pub const DF: u16 = 1 << 2;
    /// One extent is enough.
    pub const REQ_ONE: u16 = 1 << 3;
}

/// Pieces of structured replies.
pub mod chunk {
    /// Nothing; ends a reply.
    pub const NONE: u16 = 0;
    /// Bytes that were read, behind their offset.
    pub const OFFSET_DATA: u16 = 1;
    /// Extents, behind the number of their context.
    pub const BLOCK_STATUS: u16 = 5;
    /// It failed.
    pub const ERROR: u16 = 1 << 15 | 1;
    /// The flag of a reply's last piece.
    pub const DONE: u16 = 1;
}

/// Flags of `base:allocation`.
pub mod allocation {
    /// Nothing is kept there.
    pub const HOLE: u32 = 1;
    /// It reads as zeros.
    pub const ZERO: u32 = 1 << 1;
}

/// The only metadata that is served, and its number when it was asked for.
pub const ALLOCATION: &str = "base:allocation";
/// See [`ALLOCATION`].
pub const ALLOCATION_ID: u32 = 1;

/// Bytes of a request without what is written.
pub const REQUEST_BYTES: usize = 28;
/// Bytes of a reply without structure and without what was read.
pub const SIMPLE_REPLY_BYTES: usize = 16;
/// Bytes before a piece's payload.
pub const CHUNK_BYTES: usize = 20;
/// Bytes before the data of an [`OFFSET_DATA`](chunk::OFFSET_DATA) piece, the piece's own head included.
pub const DATA_CHUNK_BYTES: usize = CHUNK_BYTES + 8;
/// Longest text of the protocol, in bytes.
pub const TEXT_BYTES_MAX: usize = 4096;

/// The errors that a reply may carry; the values are Linux's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u32)]
pub enum Errno {
    /// EPERM: writing is not allowed.
    NotPermitted = 1,
    /// EIO.
    Io = 5,
    /// EINVAL: the request is wrong.
    Invalid = 22,
    /// ENOSPC: there is no room, or it would be behind the end.
    NoSpace = 28,
    /// ESHUTDOWN: the volume is no longer ours.
    Shutdown = 108,
}

impl Errno {
    /// What is said of an error of a device.
    #[must_use]
    pub fn of(error: &io::Error) -> Self {
        match error.kind() {
            io::ErrorKind::StorageFull => Self::NoSpace,
            io::ErrorKind::InvalidInput => Self::Invalid,
            io::ErrorKind::ReadOnlyFilesystem => Self::NotPermitted,
            io::ErrorKind::StaleNetworkFileHandle => Self::Shutdown,
            _ => Self::Io,
        }
    }
}

/// The head of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct RequestHead {
    /// See [`command_flag`].
    pub flags: u16,
    /// See [`command`].
    pub command: u16,
    /// Names the request in its reply.
    pub cookie: u64,
    /// In bytes.
    pub offset: u64,
    /// In bytes.
    pub len: u32,
}

impl RequestHead {
    /// None: that is no request, and where the next one begins is not known.
    #[must_use]
    pub fn decode(bytes: &[u8; REQUEST_BYTES]) -> Option<Self> {
        let mut from = Fields(bytes);
        if from.u32()? != REQUEST_MAGIC {
            return None;
        }
        Some(Self { flags: from.u16()?, command: from.u16()?, cookie: from.u64()?, offset: from.u64()?, len: from.u32()? })
    }

    /// Its bytes.
    #[must_use]
    pub fn encode(&self) -> [u8; REQUEST_BYTES] {
        let mut bytes = [0; REQUEST_BYTES];
        bytes[..4].copy_from_slice(&REQUEST_MAGIC.to_be_bytes());
        bytes[4..6].copy_from_slice(&self.flags.to_be_bytes());
        bytes[6..8].copy_from_slice(&self.command.to_be_bytes());
        bytes[8..16].copy_from_slice(&self.cookie.to_be_bytes());
        bytes[16..24].copy_from_slice(&self.offset.to_be_bytes());
        bytes[24..].copy_from_slice(&self.len.to_be_bytes());
        bytes
    }
}

/// A reply without structure; what was read follows, if there was no error.
#[must_use]
pub fn simple_reply(cookie: u64, error: Option<Errno>) -> [u8; SIMPLE_REPLY_BYTES] {
    let mut bytes = [0; SIMPLE_REPLY_BYTES];
    bytes[..4].copy_from_slice(&SIMPLE_REPLY_MAGIC.to_be_bytes());
    bytes[4..8].copy_from_slice(&error.map_or(0, |error| error as u32).to_be_bytes());
    bytes[8..].copy_from_slice(&cookie.to_be_bytes());
    bytes
}

/// Reads the head of a reply without structure: the cookie and the error, 0 for none. None: it is something else.
#[must_use]
pub fn decode_simple_reply(bytes: &[u8; SIMPLE_REPLY_BYTES]) -> Option<(u64, u32)> {
    let mut from = Fields(bytes);
    if from.u32()? != SIMPLE_REPLY_MAGIC {
        return None;
    }
    let error = from.u32()?;
    Some((from.u64()?, error))
}

/// The head of a piece of a structured reply; `len` bytes follow.
#[must_use]
pub fn chunk_head(cookie: u64, kind: u16, done: bool, len: u32) -> [u8; CHUNK_BYTES] {
    let mut bytes = [0; CHUNK_BYTES];
    bytes[..4].copy_from_slice(&CHUNK_MAGIC.to_be_bytes());
    bytes[4..6].copy_from_slice(&(if done { chunk::DONE } else { 0 }).to_be_bytes());
    bytes[6..8].copy_from_slice(&kind.to_be_bytes());
    bytes[8..16].copy_from_slice(&cookie.to_be_bytes());
    bytes[16..].copy_from_slice(&len.to_be_bytes());
    bytes
}

/// A piece with bytes that were read begins with this; `len` of them follow.
#[must_use]
pub fn data_chunk_head(cookie: u64, offset: u64, done: bool, len: u32) -> [u8; DATA_CHUNK_BYTES] {
    let mut bytes = [0; DATA_CHUNK_BYTES];
    // What is read at once is far below 4 GiB.
    bytes[..CHUNK_BYTES].copy_from_slice(&chunk_head(cookie, chunk::OFFSET_DATA, done, len.saturating_add(8)));
    bytes[CHUNK_BYTES..].copy_from_slice(&offset.to_be_bytes());
    bytes
}

/// A whole piece that says that the request failed, and ends the reply.
#[must_use]
pub fn error_chunk(cookie: u64, error: Errno) -> [u8; CHUNK_BYTES + 6] {
    let mut bytes = [0; CHUNK_BYTES + 6];
    bytes[..CHUNK_BYTES].copy_from_slice(&chunk_head(cookie, chunk::ERROR, true, 6));
    bytes[CHUNK_BYTES..CHUNK_BYTES + 4].copy_from_slice(&(error as u32).to_be_bytes());
    bytes
}

/// Fields one after another; None where the bytes end before a field does.
#[derive(Debug, Clone, Copy)]
pub struct Fields<'a>(pub &'a [u8]);

impl<'a> Fields<'a> {
    /// The next `len` bytes.
    pub fn bytes(&mut self, len: usize) -> Option<&'a [u8]> {
        let (head, rest) = self.0.split_at_checked(len)?;
        self.0 = rest;
        Some(head)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.bytes(N)?.try_into().ok()
    }

    /// The next two bytes.
    pub fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_be_bytes)
    }

    /// The next four bytes.
    pub fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_be_bytes)
    }

    /// The next eight bytes.
    pub fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_be_bytes)
    }

    /// A text behind its length.
    pub fn text(&mut self) -> Option<&'a [u8]> {
        let len = usize::try_from(self.u32()?).ok().filter(|len| *len <= TEXT_BYTES_MAX)?;
        self.bytes(len)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn requests_survive(flags: u16, command: u16, cookie: u64, offset: u64, len: u32) {
            let head = RequestHead { flags, command, cookie, offset, len };
            prop_assert_eq!(RequestHead::decode(&head.encode()), Some(head));
        }

        #[test]
        fn replies_survive(cookie: u64) {
            prop_assert_eq!(decode_simple_reply(&simple_reply(cookie, None)), Some((cookie, 0)));
            prop_assert_eq!(decode_simple_reply(&simple_reply(cookie, Some(Errno::NoSpace))), Some((cookie, 28)));
        }

        #[test]
        fn foreign_bytes_are_no_request(bytes: [u8; REQUEST_BYTES]) {
            let begins = bytes[..4] == REQUEST_MAGIC.to_be_bytes();
            prop_assert_eq!(RequestHead::decode(&bytes).is_some(), begins);
        }
    }

    #[test]
    fn a_request_lies_as_the_protocol_has_it() {
        let head = RequestHead { flags: 1, command: 7, cookie: 0x0102, offset: 0x0304, len: 0x0506 };
        let bytes = [0x25, 0x60, 0x95, 0x13, 0, 1, 0, 7, 0, 0, 0, 0, 0, 0, 1, 2, 0, 0, 0, 0, 0, 0, 3, 4, 0, 0, 5, 6];
        assert_eq!(head.encode(), bytes);
    }

    #[test]
    fn errors_of_a_device_have_numbers() {
        let of = |kind| Errno::of(&io::Error::from(kind)) as u32;
        assert_eq!(of(io::ErrorKind::StorageFull), 28);
        assert_eq!(of(io::ErrorKind::InvalidInput), 22);
        assert_eq!(of(io::ErrorKind::ReadOnlyFilesystem), 1);
        assert_eq!(of(io::ErrorKind::StaleNetworkFileHandle), 108);
        assert_eq!(of(io::ErrorKind::TimedOut), 5);
        assert_eq!(of(io::ErrorKind::UnexpectedEof), 5);
    }

    #[test]
    fn a_text_longer_than_allowed_is_none() {
        let mut bytes = 4097u32.to_be_bytes().to_vec();
        bytes.resize(5000, b'x');
        assert_eq!(Fields(&bytes).text(), None);
        assert_eq!(Fields(&[0, 0, 0, 2, b'a']).text(), None);
    }
}
