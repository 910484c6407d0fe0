//! What a worker and its volume server say to each other.
//!
//! Owns the messages and their frames: 4 bytes of length, little endian, and that many bytes of CBOR with numbered fields. Does not own the connection, nor what is
//! done. Both ends are of one build: the worker starts the program that it is.

use std::io::{self, Read, Write};

use minicbor::{Decode, Encode};
use volley_jobspecs::ids::{AttemptName, SnapshotId, TenantId, VolumeId};

use crate::format::head::FlushMode;

/// Longest frame in bytes: keys of a cluster are 65 each, paths and reasons some hundred.
pub const FRAME_BYTES_MAX: usize = 256 * 1024;
/// Longest reason in bytes.
const WORDS_BYTES_MAX: usize = 4_000;

/// Something that a worker asks for.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Asked {
    /// Its number, which the reply has.
    #[n(0)]
    pub id: u64,
    /// What.
    #[n(1)]
    pub request: Request,
}

/// What can be asked for.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
pub enum Request {
    /// The first, and once.
    #[n(0)]
    Setup(#[n(0)] Box<Setup>),
    /// To open a volume.
    #[n(1)]
    Open(#[n(0)] Box<Open>),
    /// To serve one that is open.
    #[n(2)]
    Serve(#[n(0)] Serve),
    /// To write the image of a file system on it: what is not a hole or zeros.
    #[n(3)]
    Pour {
        /// On which.
        #[n(0)]
        handle: u64,
        /// The image's path.
        #[n(1)]
        file: String,
    },
    /// Of one that is written: serves it no more, commits, and lets it go.
    #[n(4)]
    Finish {
        /// Which.
        #[n(0)]
        handle: u64,
    },
    /// Of a copy: serves it no more, and makes it a volume.
    #[n(5)]
    Keep {
        /// Which.
        #[n(0)]
        handle: u64,
    },
    /// Serves it no more. A copy is gone then, a log that has more than S3 is put aside. It need not be open.
    #[n(6)]
    Forget {
        /// Which.
        #[n(0)]
        handle: u64,
        /// Which volume that is.
        #[n(1)]
        volume: VolumeId,
    },
    /// Figures.
    #[n(7)]
    Stats,
}

/// What a server is told at its start.
#[derive(Clone, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Setup {
    /// See `volley_store::StoreConfig`.
    #[n(0)]
    pub endpoint: Option<String>,
    /// See there.
    #[n(1)]
    pub region: String,
    /// See there.
    #[n(2)]
    pub bucket: String,
    /// See there.
    #[n(3)]
    pub prefix: String,
    /// Access key and secret; None: the standard chain, of this process's environment.
    #[n(4)]
    pub credentials: Option<(String, String)>,
    /// See there.
    #[n(5)]
    pub path_style: bool,
    /// The cluster's keys, as the file has them.
    #[n(6)]
    pub keys: String,
    /// Where logs and cache lie; this server's alone.
    #[n(7)]
    pub dir: String,
    /// This host's name, for people.
    #[n(8)]
    pub host: String,
    /// Is nothing open that a server before this one had? Then copies that are left go, and logs are put aside.
    #[n(9)]
    pub fresh: bool,
    /// What may be used.
    #[n(10)]
    pub bounds: Bounds,
}

/// No secret is ever shown.
impl std::fmt::Debug for Setup {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Setup").field("bucket", &self.bucket).field("dir", &self.dir).field("fresh", &self.fresh).finish_non_exhaustive()
    }
}

/// See [`crate::Limits`]. Times are in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Bounds {
    /// See there.
    #[n(0)]
    pub commit_every_ms: u64,
    /// See there.
    #[n(1)]
    pub commit_bytes: u64,
    /// See there.
    #[n(2)]
    pub dirty_bytes_max: u64,
    /// See there.
    #[n(3)]
    pub stall_max_ms: u64,
    /// See there.
    #[n(4)]
    pub log_keep_bytes: u64,
    /// See there.
    #[n(5)]
    pub ephemeral_bytes_max: u64,
    /// See there.
    #[n(6)]
    pub cache_bytes: u64,
    /// See there.
    #[n(7)]
    pub cache_disk_bytes: u64,
}

/// A volume to be opened.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Open {
    /// What the worker calls it, never twice.
    #[n(0)]
    pub handle: u64,
    /// Which bytes.
    #[n(1)]
    pub what: What,
    /// At least so many; a disk that is smaller grows.
    #[n(2)]
    pub size_bytes: Option<u64>,
    /// What a flush promises, of what is made or copied.
    #[n(3)]
    pub flush: FlushMode,
    /// Will a guest write on it?
    #[n(4)]
    pub guest: bool,
    /// Was it open, in a server before this one? Then what that had acknowledged is there, or it is not opened.
    #[n(5)]
    pub again: bool,
}

/// Which bytes.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
pub enum What {
    /// A volume that is written.
    #[n(0)]
    Write {
        /// Which.
        #[n(0)]
        volume: VolumeId,
        /// Whose, if it is made.
        #[n(1)]
        tenant: TenantId,
        /// The generation it is to have; 0: it is made if it is not there and has a size.
        #[n(2)]
        generation: u64,
        /// By which attempt.
        #[n(3)]
        attempt: AttemptName,
        /// Drawn at random for this opening, the same when it is opened again.
        #[cbor(n(4), with = "minicbor::bytes")]
        attach: [u8; 16],
    },
    /// A copy of a snapshot.
    #[n(1)]
    Copy {
        /// Of which.
        #[n(0)]
        snapshot: SnapshotId,
        /// What it is called.
        #[n(1)]
        volume: VolumeId,
    },
}

impl What {
    /// What it is called.
    #[must_use]
    pub fn volume(&self) -> VolumeId {
        match self {
            Self::Write { volume, .. } | Self::Copy { volume, .. } => *volume,
        }
    }
}

/// Where a volume is served, and to whom: see `serve::socket::Place`.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Serve {
    /// Which.
    #[n(0)]
    pub handle: u64,
    /// See there.
    #[n(1)]
    pub dir: String,
    /// See there.
    #[n(2)]
    pub file: String,
    /// See there.
    #[n(3)]
    pub owner: u32,
    /// See there.
    #[n(4)]
    pub group: u32,
    /// See there.
    #[n(5)]
    pub peers: Vec<u32>,
    /// See there.
    #[n(6)]
    pub export: String,
}

/// What a server says.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
pub enum Said {
    /// The reply to what had this number.
    #[n(0)]
    Reply {
        /// See [`Asked::id`].
        #[n(0)]
        id: u64,
        /// What came of it.
        #[n(1)]
        reply: Reply,
    },
    /// A volume takes nothing more, for good.
    #[n(1)]
    Failed {
        /// Which.
        #[n(0)]
        handle: u64,
        /// Why.
        #[n(1)]
        refused: Refused,
    },
}

/// What came of it.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
pub enum Reply {
    /// It was done.
    #[n(0)]
    Done,
    /// It is open.
    #[n(1)]
    Opened(#[n(0)] Opened),
    /// It was finished: by this request, or before the server that was asked ended.
    #[n(2)]
    Left(#[n(0)] Left),
    /// It is a volume: by this request, or before the server that was asked ended. Its size in bytes.
    #[n(3)]
    Kept(#[n(0)] u64),
    /// Figures.
    #[n(4)]
    Stats(#[n(0)] Stats),
    /// No.
    #[n(5)]
    Refused(#[n(0)] Refused),
}

/// A volume that is open.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Opened {
    /// Its size.
    #[n(0)]
    pub bytes: u64,
    /// Was nothing ever written on it?
    #[n(1)]
    pub blank: bool,
    /// Did a guest ever write on it, before this opening?
    #[n(2)]
    pub guest_written: bool,
    /// Has it grown with this opening?
    #[n(3)]
    pub grown: bool,
}

/// What was left on a volume.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Left {
    /// Digest of the last state.
    #[cbor(n(0), with = "minicbor::bytes")]
    pub root: [u8; 32],
    /// The generation it began with.
    #[n(1)]
    pub generation: u64,
    /// Its size.
    #[n(2)]
    pub size_bytes: u64,
}

/// Figures of a server.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Stats {
    /// Volumes that are open.
    #[n(0)]
    pub open: u64,
    /// Bytes that S3 lacks.
    #[n(1)]
    pub dirty_bytes: u64,
    /// Logs that were put aside, and their bytes.
    #[n(2)]
    pub aside: u64,
    /// See there.
    #[n(3)]
    pub aside_bytes: u64,
}

/// Why not.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode, thiserror::Error)]
#[cbor(map)]
#[error("{words}")]
pub struct Refused {
    /// Of which kind.
    #[n(0)]
    pub kind: RefusedKind,
    /// In words, for people.
    #[n(1)]
    pub words: String,
}

/// Kinds of refusals.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode)]
#[cbor(index_only)]
pub enum RefusedKind {
    /// Somebody else has it, or had it since.
    #[n(0)]
    Elsewhere,
    /// There is no such volume or snapshot, or it was deleted.
    #[n(1)]
    Missing,
    /// It is another state than the one that is wanted.
    #[n(2)]
    OtherState,
    /// This host, its disk or its way to S3.
    #[n(3)]
    Host,
}

impl Refused {
    /// A refusal, with words that are not too long.
    #[must_use]
    pub fn new(kind: RefusedKind, words: &str) -> Self {
        let end = (0..=words.len().min(WORDS_BYTES_MAX)).rev().find(|end| words.is_char_boundary(*end)).unwrap_or_default();
        Self { kind, words: words.get(..end).unwrap_or_default().to_owned() }
    }
}

/// A frame with this in it.
///
/// # Errors
/// `InvalidData`: it would be too long.
pub fn frame<T: Encode<()>>(message: &T) -> io::Result<Vec<u8>> {
    let mut bytes = vec![0; LENGTH_BYTES];
    minicbor::encode(message, &mut bytes).map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e.to_string()))?;
    let len = bytes.len() - LENGTH_BYTES;
    let length = length(len)?;
    bytes.get_mut(..LENGTH_BYTES).unwrap_or_default().copy_from_slice(&length);
    Ok(bytes)
}

/// Bytes of a frame's length.
pub const LENGTH_BYTES: usize = 4;

fn length(len: usize) -> io::Result<[u8; LENGTH_BYTES]> {
    let too_long = || io::Error::new(io::ErrorKind::InvalidData, format!("a message of {len} bytes; {FRAME_BYTES_MAX} are the most"));
    u32::try_from(len).ok().filter(|_| len <= FRAME_BYTES_MAX).map(u32::to_le_bytes).ok_or_else(too_long)
}

/// How long what follows these first bytes is.
///
/// # Errors
/// `InvalidData`: longer than any frame.
pub fn following(bytes: [u8; LENGTH_BYTES]) -> io::Result<usize> {
    let len = u32::from_le_bytes(bytes) as usize;
    length(len).map(|_| len)
}

/// What a frame has in it.
///
/// # Errors
/// `InvalidData`.
pub fn message<T: for<'b> Decode<'b, ()>>(bytes: &[u8]) -> io::Result<T> {
    let mut decoder = minicbor::Decoder::new(bytes);
    let message = decoder.decode().map_err(|e| io::Error::new(io::ErrorKind::InvalidData, e.to_string()))?;
    if decoder.position() == bytes.len() {
        return Ok(message);
    }
    Err(io::Error::new(io::ErrorKind::InvalidData, "there is something behind a message"))
}

/// Reads a frame. None: the other end has closed.
///
/// # Errors
/// What the system says; `InvalidData` for what is no frame.
pub fn receive<T: for<'b> Decode<'b, ()>>(mut from: impl Read) -> io::Result<Option<T>> {
    let mut length = [0; LENGTH_BYTES];
    let mut read = 0;
    while read < LENGTH_BYTES {
        match from.read(length.get_mut(read..).unwrap_or_default()) {
            Ok(0) if read == 0 => return Ok(None),
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(more) => read += more,
            Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
            Err(e) => return Err(e),
        }
    }
    let mut bytes = vec![0; following(length)?];
    from.read_exact(&mut bytes)?;
    message(&bytes).map(Some)
}

/// Writes a frame.
///
/// # Errors
/// What the system says; `InvalidData` for what is too long.
pub fn send<T: Encode<()>>(mut to: impl Write, said: &T) -> io::Result<()> {
    to.write_all(&frame(said)?)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;
    use volley_jobspecs::ids::JobId;

    use super::*;

    fn attempt() -> AttemptName {
        AttemptName { job: JobId(1), stage: 0, index: 3, number: 1, sequence: 9 }
    }

    fn all() -> Vec<Request> {
        let bounds = Bounds {
            commit_every_ms: 1,
            commit_bytes: 2,
            dirty_bytes_max: 3,
            stall_max_ms: 4,
            log_keep_bytes: 5,
            ephemeral_bytes_max: 6,
            cache_bytes: 7,
            cache_disk_bytes: 8,
        };
        let setup = Setup {
            endpoint: Some("http://127.0.0.1:1".into()),
            region: "r".into(),
            bucket: "b".into(),
            prefix: "p".into(),
            credentials: Some(("open".into(), "hidden".into())),
            path_style: true,
            keys: "hidden".into(),
            dir: "/d".into(),
            host: "h".into(),
            fresh: true,
            bounds,
        };
        assert!(!format!("{setup:?}").contains("hidden"), "{setup:?}");
        let write =
            What::Write { volume: VolumeId([1; 16]), tenant: "t".parse().unwrap(), generation: 4, attempt: attempt(), attach: [5; 16] };
        let copy = What::Copy { snapshot: SnapshotId([2; 16]), volume: VolumeId([3; 16]) };
        let open = |what| Open { handle: 1, what, size_bytes: Some(7), flush: FlushMode::S3, guest: true, again: true };
        vec![
            Request::Setup(Box::new(setup)),
            Request::Open(Box::new(open(write))),
            Request::Open(Box::new(open(copy))),
            Request::Serve(Serve {
                handle: 1,
                dir: "/d".into(),
                file: "s".into(),
                owner: 1,
                group: 2,
                peers: vec![0, 1],
                export: "e".into(),
            }),
            Request::Pour { handle: 1, file: "/f".into() },
            Request::Finish { handle: 1 },
            Request::Keep { handle: 1 },
            Request::Forget { handle: 1, volume: VolumeId([4; 16]) },
            Request::Stats,
        ]
    }

    #[test]
    fn everything_comes_back_and_what_is_cut_is_an_error() {
        for (id, request) in all().into_iter().enumerate() {
            let asked = Asked { id: id as u64, request };
            let mut bytes = frame(&asked).unwrap();
            assert_eq!(receive::<Asked>(&bytes[..]).unwrap().as_ref(), Some(&asked));
            for len in 1..bytes.len() {
                assert!(receive::<Asked>(&bytes[..len]).is_err(), "{asked:?} cut to {len}");
            }
            bytes[0] += 1;
            bytes.push(0);
            assert!(receive::<Asked>(&bytes[..]).is_err(), "{asked:?} with something behind");
        }
        assert_eq!(receive::<Asked>(&[][..]).unwrap(), None);
        let refused = Refused::new(RefusedKind::Host, &"é".repeat(WORDS_BYTES_MAX));
        assert!(refused.words.len() <= WORDS_BYTES_MAX && refused.words.ends_with('é'));
        let left = Left { root: [1; 32], generation: 2, size_bytes: 3 };
        for said in [Said::Failed { handle: 3, refused }, Said::Reply { id: 4, reply: Reply::Left(left) }] {
            assert_eq!(receive::<Said>(&frame(&said).unwrap()[..]).unwrap(), Some(said));
        }
    }

    #[test]
    fn too_long_is_refused_before_it_is_read() {
        let long = u32::try_from(FRAME_BYTES_MAX + 1).unwrap().to_le_bytes();
        assert!(following(long).is_err() && receive::<Asked>(&long[..]).is_err());
        assert!(frame(&"x".repeat(FRAME_BYTES_MAX)).is_err());
    }

    proptest! {
        #[test]
        fn other_bytes_are_an_error_and_nothing_else(bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            let _ = message::<Asked>(&bytes);
            let _ = message::<Said>(&bytes);
        }
    }
}
