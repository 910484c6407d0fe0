//! Files that are moved into a machine and out of it.
//!
//! Owns the shapes of what is asked and of what is told of them. Does not own how they travel (tar, in `volley-guest`).

use minicbor::{Decode, Encode};

/// Where the files of a tar stream go.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Put {
    /// The directory; made if it isn't there. Nothing is written outside it.
    #[n(0)]
    pub dir: String,
    /// Whose everything becomes; root's when not given.
    #[n(1)]
    pub owner: Option<(u32, u32)>,
    /// How much at most.
    #[n(2)]
    pub limits: FileLimits,
}

/// Which files are wanted.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Get {
    /// A directory, which gives all below it by their paths from it, or one file, which gives itself by its last name.
    #[n(0)]
    pub path: String,
    /// How much at most.
    #[n(1)]
    pub limits: FileLimits,
}

/// Which files below a directory are wanted.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct GetNamed {
    /// The directory.
    #[n(0)]
    pub dir: String,
    /// Paths from it: of files, or of directories, which give all below them. One that is not there gives nothing; no link is followed on
    /// the way.
    #[n(1)]
    pub names: Vec<String>,
    /// How much at most.
    #[n(2)]
    pub limits: FileLimits,
}

/// How much one tar stream may hold. Past a limit the call fails; what came before it stays.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct FileLimits {
    /// Bytes of all files together; holes count.
    #[n(0)]
    pub bytes: u64,
    /// Files, directories and links.
    #[n(1)]
    pub entries: u64,
    /// Longest path, in bytes.
    #[n(2)]
    pub path_bytes: u32,
}

/// What came of a stream of files.
#[derive(Debug, Clone, PartialEq, Eq, Default, Encode, Decode)]
#[cbor(map)]
pub struct Files {
    /// Files, directories and links.
    #[n(0)]
    pub entries: u64,
    /// Bytes of the files, holes included.
    #[n(1)]
    pub bytes: u64,
    /// What was left out, the first [`super::SKIPPED_LISTED_MAX`].
    #[n(2)]
    pub skipped: Vec<Skipped>,
    /// What was left out, all of it.
    #[n(3)]
    pub skipped_total: u64,
}

/// One entry that was left out.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode)]
#[cbor(map)]
pub struct Skipped {
    /// Its path; what is no UTF-8 is replaced, and a long one is cut.
    #[n(0)]
    pub path: String,
    /// Why.
    #[n(1)]
    pub why: SkipReason,
}

/// Why an entry was left out.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode)]
#[cbor(index_only)]
pub enum SkipReason {
    /// A device, socket or named pipe.
    #[n(0)]
    Special,
    /// Its path, or that of the file it links to, leads out of the directory.
    #[n(1)]
    Outside,
    /// A part of its path is a symbolic link or a file.
    #[n(2)]
    InTheWay,
    /// The file it links to is not there.
    #[n(3)]
    NoTarget,
    /// It was there and is gone, or became something else.
    #[n(4)]
    Gone,
    /// A kind this build does not know.
    #[n(5)]
    Unknown,
}
