//! Layouts and numbers of the kernel's FUSE protocol, as far as one file needs them.
//!
//! Owns where each field lies; numbers are in the processor's order. Source: linux/fuse.h, protocol 7.31 (Linux 5.4) and what later ones
//! add by flags. Pure. Does not own what is done (`session`).

use std::time::Duration;

/// The kernel's protocol that is understood: this major version, and at least this minor one. Layouts since then grow by flags only.
pub const MAJOR: u32 = 7;
/// See [`MAJOR`].
pub const MINOR: u32 = 31;
/// The node of the only file: what is mounted is the file itself.
pub const ROOT: u64 = 1;
/// Most bytes of one read or write.
pub const TRANSFER_BYTES_MAX: u32 = 1 << 20;
/// Bytes of a buffer into which any request fits: the kernel wants room for its heads and the most that is written at once.
pub const REQUEST_BYTES_MAX: usize = TRANSFER_BYTES_MAX as usize + 4096;
/// Bytes of an answer without what it carries.
pub const ANSWER_HEAD_BYTES: usize = 16;

const IN_HEAD_BYTES: usize = 40;
const PAGE_BYTES: u32 = 4096;
/// Requests that the kernel sends without waiting for earlier ones, and from how many on it holds others back.
const BACKGROUND: u16 = 128;
const CONGESTED: u16 = 96;

/// `FUSE_ASYNC_READ`, `FUSE_BIG_WRITES`, `FUSE_ASYNC_DIO`, `FUSE_MAX_PAGES`.
const WANTED: u32 = 1 | 1 << 5 | 1 << 15 | 1 << 22;
/// `FOPEN_DIRECT_IO`: the users of the file have caches of their own, and what was written is with the server when the write returns.
/// `FOPEN_NOFLUSH`: nothing is to be done when it is closed. `FOPEN_PARALLEL_DIRECT_WRITES`: writes need not wait for each other.
const OPENED: u32 = 1 | 1 << 5 | 1 << 6;
/// `FATTR_MODE`, `FATTR_UID`, `FATTR_GID` and `FATTR_SIZE`.
const SET_MODE: u32 = 1;
const SET_UID: u32 = 1 << 1;
const SET_GID: u32 = 1 << 2;
const SET_SIZE: u32 = 1 << 3;
/// Between the size and the owner of `fuse_setattr_in`: a lock's owner, three times, their fractions, the mode, and one that is not used.
const SETATTR_TIMES_BYTES: usize = 4 * 8 + 3 * 4 + 4 + 4;
/// `FUSE_NOTIFY_INVAL_INODE`.
const FORGET_ATTRIBUTES: i32 = 2;
/// How long the kernel may believe attributes. Only the size changes, and then it is told.
const ATTRIBUTES_VALID: Duration = Duration::from_secs(1);

/// What the kernel asks.
#[derive(Debug, PartialEq, Eq)]
pub enum Asked<'a> {
    /// To agree upon a version.
    Init {
        /// Its version.
        major: u32,
        /// Its version.
        minor: u32,
        /// Most bytes it reads ahead.
        readahead: u32,
        /// What it can.
        flags: u32,
    },
    /// Size, owner, mode.
    GetAttr,
    /// To change them: the mode, or owner, group and size to these.
    SetAttr {
        /// See there.
        mode: bool,
        /// See there.
        uid: Option<u32>,
        /// See there.
        gid: Option<u32>,
        /// See there.
        size: Option<u64>,
    },
    /// To open the file with these flags of open(2).
    Open {
        /// See there.
        flags: u32,
    },
    /// To read.
    Read {
        /// In bytes.
        offset: u64,
        /// In bytes.
        len: u32,
    },
    /// To write; with `sync` durably.
    Write {
        /// In bytes.
        offset: u64,
        /// What.
        bytes: &'a [u8],
        /// See there.
        sync: bool,
    },
    /// To make durable what was written.
    Sync,
    /// fallocate(2).
    Allocate {
        /// In bytes.
        offset: u64,
        /// In bytes.
        len: u64,
        /// Its mode.
        mode: u32,
    },
    /// Sizes of the file system.
    StatFs,
    /// Nothing that needs doing: a close.
    Nothing,
    /// Nothing, and it wants no answer.
    Silent,
    /// Something that is not known here.
    Other(u32),
}

/// A request.
#[derive(Debug, PartialEq, Eq)]
pub struct Request<'a> {
    /// Names it in its answer.
    pub unique: u64,
    /// What is wanted.
    pub asked: Asked<'a>,
}

struct Fields<'a>(&'a [u8]);

impl<'a> Fields<'a> {
    fn skip(&mut self, count: usize) -> Option<()> {
        self.0 = self.0.get(count..)?;
        Some(())
    }

    fn u32(&mut self) -> Option<u32> {
        let (head, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(u32::from_ne_bytes(*head))
    }

    fn u64(&mut self) -> Option<u64> {
        let (head, rest) = self.0.split_first_chunk()?;
        self.0 = rest;
        Some(u64::from_ne_bytes(*head))
    }
}

impl<'a> Request<'a> {
    /// Reads one. None: it is not as the protocol has it.
    #[must_use]
    pub fn decode(bytes: &'a [u8]) -> Option<Self> {
        let mut from = Fields(bytes);
        let (len, opcode, unique) = (from.u32()?, from.u32()?, from.u64()?);
        if usize::try_from(len).ok()? != bytes.len() {
            return None;
        }
        let mut from = Fields(bytes.get(IN_HEAD_BYTES..)?);
        Some(Self { unique, asked: asked(opcode, &mut from)? })
    }
}

fn asked<'a>(opcode: u32, from: &mut Fields<'a>) -> Option<Asked<'a>> {
    Some(match opcode {
        26 => Asked::Init { major: from.u32()?, minor: from.u32()?, readahead: from.u32()?, flags: from.u32()? },
        3 => Asked::GetAttr,
        4 => {
            let valid = from.u32()?;
            from.skip(12)?;
            let size = from.u64()?;
            let (mut uid, mut gid) = (None, None);
            if valid & (SET_UID | SET_GID) != 0 {
                from.skip(SETATTR_TIMES_BYTES)?;
                let owner = (from.u32()?, from.u32()?);
                (uid, gid) = ((valid & SET_UID != 0).then_some(owner.0), (valid & SET_GID != 0).then_some(owner.1));
            }
            Asked::SetAttr { mode: valid & SET_MODE != 0, uid, gid, size: (valid & SET_SIZE != 0).then_some(size) }
        }
        14 => Asked::Open { flags: from.u32()? },
        15 => {
            from.skip(8)?;
            Asked::Read { offset: from.u64()?, len: from.u32()? }
        }
        16 => {
            from.skip(8)?;
            let (offset, len) = (from.u64()?, usize::try_from(from.u32()?).ok()?);
            from.skip(12)?;
            let flags = from.u32()?;
            from.skip(4)?;
            // O_DSYNC, which O_SYNC holds too.
            let sync = flags & libc::O_DSYNC.cast_unsigned() != 0;
            Asked::Write { offset, bytes: from.0.get(..len)?, sync }
        }
        20 => Asked::Sync,
        43 => {
            from.skip(8)?;
            Asked::Allocate { offset: from.u64()?, len: from.u64()?, mode: from.u32()? }
        }
        17 => Asked::StatFs,
        // RELEASE, FLUSH.
        18 | 25 => Asked::Nothing,
        // FORGET, INTERRUPT, DESTROY, BATCH_FORGET.
        2 | 36 | 38 | 42 => Asked::Silent,
        other => Asked::Other(other),
    })
}

/// The file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct File {
    /// In bytes.
    pub size: u64,
    /// May it only be read?
    pub read_only: bool,
    /// Its owner.
    pub uid: u32,
    /// Its group.
    pub gid: u32,
}

impl File {
    /// Are these its owner, group and size, as far as they are said? A VMM's driver gives it to the VMM, whose it is.
    #[must_use]
    pub fn is(&self, uid: Option<u32>, gid: Option<u32>, size: Option<u64>) -> bool {
        uid.is_none_or(|uid| uid == self.uid) && gid.is_none_or(|gid| gid == self.gid) && size.is_none_or(|size| size == self.size)
    }

    /// Its mode: a file that nobody but its owner may open.
    #[must_use]
    pub fn mode(&self) -> u32 {
        libc::S_IFREG | if self.read_only { 0o400 } else { 0o600 }
    }

    /// Its attributes, as an answer carries them.
    #[must_use]
    pub fn attributes(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(104);
        let (blocks, block) = (self.size.div_ceil(512), PAGE_BYTES);
        out.extend(ATTRIBUTES_VALID.as_secs().to_ne_bytes());
        out.extend([0; 8]);
        out.extend([ROOT, self.size, blocks, 0, 0, 0].iter().flat_map(|field| field.to_ne_bytes()));
        out.extend([0, 0, 0, self.mode(), 1, self.uid, self.gid, 0, block, 0].iter().flat_map(|field: &u32| field.to_ne_bytes()));
        out
    }

    /// The sizes of a file system that is this file.
    #[must_use]
    pub fn sizes(&self) -> Vec<u8> {
        let mut out = Vec::with_capacity(80);
        out.extend([self.size / u64::from(PAGE_BYTES), 0, 0, 1, 0].iter().flat_map(|field| field.to_ne_bytes()));
        out.extend([PAGE_BYTES, 255, PAGE_BYTES, 0].iter().flat_map(|field| field.to_ne_bytes()));
        out.extend([0; 24]);
        out
    }
}

/// What is agreed upon with a kernel of these flags.
#[must_use]
pub fn agreed(readahead: u32, flags: u32) -> Vec<u8> {
    let mut out = Vec::with_capacity(64);
    out.extend([MAJOR, MINOR, readahead, flags & WANTED].iter().flat_map(|field| field.to_ne_bytes()));
    out.extend([BACKGROUND, CONGESTED].iter().flat_map(|field| field.to_ne_bytes()));
    // Times are not kept; one nanosecond is what the kernel takes for the finest.
    out.extend([TRANSFER_BYTES_MAX, 1].iter().flat_map(|field| field.to_ne_bytes()));
    out.extend([(TRANSFER_BYTES_MAX / PAGE_BYTES) as u16, 0].iter().flat_map(|field| field.to_ne_bytes()));
    out.resize(64, 0);
    out
}

/// The file is open.
#[must_use]
pub fn opened() -> Vec<u8> {
    let mut out = vec![0; 8];
    out.extend(OPENED.to_ne_bytes());
    out.extend([0; 4]);
    out
}

/// So many bytes were written.
#[must_use]
pub fn written(len: u32) -> [u8; 8] {
    let mut out = [0; 8];
    out[..4].copy_from_slice(&len.to_ne_bytes());
    out
}

/// The head of an answer with `len` bytes behind it; `error` is an errno, or 0.
#[must_use]
pub fn answer_head(unique: u64, error: i32, len: usize) -> [u8; ANSWER_HEAD_BYTES] {
    let mut out = [0; ANSWER_HEAD_BYTES];
    // At most a transfer and a head.
    out[..4].copy_from_slice(&((ANSWER_HEAD_BYTES + len) as u32).to_ne_bytes());
    out[4..8].copy_from_slice(&error.wrapping_neg().to_ne_bytes());
    out[8..].copy_from_slice(&unique.to_ne_bytes());
    out
}

/// Tells the kernel that the file has other attributes than it believes.
#[must_use]
pub fn forget_attributes() -> Vec<u8> {
    let mut out = ((ANSWER_HEAD_BYTES + 24) as u32).to_ne_bytes().to_vec();
    out.extend(FORGET_ATTRIBUTES.to_ne_bytes());
    out.extend(0u64.to_ne_bytes());
    out.extend(ROOT.to_ne_bytes());
    // A negative offset leaves what it read of the file alone.
    out.extend((-1i64).to_ne_bytes());
    out.extend(0i64.to_ne_bytes());
    out
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn request(opcode: u32, fields: &[u8]) -> Vec<u8> {
        let mut bytes = ((IN_HEAD_BYTES + fields.len()) as u32).to_ne_bytes().to_vec();
        bytes.extend(opcode.to_ne_bytes());
        bytes.extend(7u64.to_ne_bytes());
        bytes.resize(IN_HEAD_BYTES, 0);
        bytes.extend(fields);
        bytes
    }

    fn longs(fields: &[u64]) -> Vec<u8> {
        fields.iter().flat_map(|field| field.to_ne_bytes()).collect()
    }

    #[test]
    fn requests_are_understood() {
        let asked = |bytes: &[u8]| format!("{:?}", Request::decode(bytes).unwrap().asked);
        // A file handle, the offset, the length (and flags of the read in its upper half), and what is not looked at.
        assert_eq!(asked(&request(15, &longs(&[9, 4096, 512, 0, 0]))), "Read { offset: 4096, len: 512 }");
        let mut write = longs(&[9, 4096, 3, 0, libc::O_SYNC as u64]);
        write.extend(b"abc");
        assert_eq!(asked(&request(16, &write)), "Write { offset: 4096, bytes: [97, 98, 99], sync: true }");
        write.pop();
        assert_eq!(Request::decode(&request(16, &write)), None);
        assert_eq!(asked(&request(43, &longs(&[9, 1, 2, 3]))), "Allocate { offset: 1, len: 2, mode: 3 }");
        assert_eq!(asked(&request(4, &longs(&[8, 0, 77, 0]))), "SetAttr { mode: false, uid: None, gid: None, size: Some(77) }");
        assert_eq!(asked(&request(4, &longs(&[1, 0, 77, 0]))), "SetAttr { mode: true, uid: None, gid: None, size: None }");
        let mut owner = longs(&[6, 0, 77]);
        owner.resize(76, 0);
        owner.extend([1, 2, 0, 0, 3, 4, 0, 0]);
        assert_eq!(asked(&request(4, &owner)), "SetAttr { mode: false, uid: Some(513), gid: Some(1027), size: None }");
        assert_eq!(Request::decode(&request(4, &owner[..80])), None);
        assert_eq!(asked(&request(99, &[])), "Other(99)");
    }

    #[test]
    fn a_request_that_is_cut_is_none() {
        let whole = request(15, &longs(&[9, 4096, 512, 0, 0]));
        assert!((0..whole.len()).all(|len| Request::decode(&whole[..len]).is_none()));
        assert_eq!(Request::decode(&request(15, &longs(&[9]))), None);
    }

    #[test]
    fn answers_have_the_kernels_sizes() {
        let file = File { size: 5, read_only: false, uid: 1, gid: 2 };
        assert_eq!((file.attributes().len(), file.sizes().len(), agreed(0, u32::MAX).len(), opened().len()), (104, 80, 64, 16));
        assert_eq!(forget_attributes().len(), 40);
        assert_eq!(answer_head(3, 5, 0)[..8], [16, 0, 0, 0, 251, 255, 255, 255]);
    }

    proptest! {
        #[test]
        fn any_bytes_are_read_without_harm(opcode in 0u32..60, fields in proptest::collection::vec(any::<u8>(), 0..100)) {
            let _ = Request::decode(&request(opcode, &fields));
            let _ = Request::decode(&fields);
        }
    }
}
