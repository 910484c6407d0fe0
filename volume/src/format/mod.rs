//! What is stored, one record a file: every byte that outlives a process.
//!
//! Owns layouts, their checks and their limits. Does no I/O; randomness is an argument.
//!
//! | file | what | where |
//! |---|---|---|
//! | `head.rs` | the one mutable object of a volume | `vol/<id>/head`, replaced on the condition of its tag |
//! | `pack.rs` | extents and their table | `vol/<id>/p/<epoch>-<seq>-<n>`, immutable |
//! | `page.rs` | the map: pages of 64 MiB of the disk, and their root | `vol/<id>/m/<epoch>-<seq>`, immutable |
//! | `snapshot.rs` | a state that stays | `snap/<id>`, immutable |
//! | `pin.rs` | whoever needs a snapshot for a while | `pin/<owner>/<id>` |
//! | `condemned.rs` | what the collector found unneeded | `gc/condemned`, replaced on the condition of its tag |
//! | `log.rs` | what was written and is not in S3 yet | segments on the host's disk |
//! | `holding.rs` | which volume a directory of the host is of, and by which right | on the host's disk |
//!
//! Shared by them: `keys.rs` (names in S3), `seal.rs` (compression and encryption), `envelope.rs` (small records), `object.rs` (objects made of
//! frames), `extent.rs` (where blocks lie), `content.rs` (what a disk consists of), `fields.rs` (fixed layouts).
//!
//! **Rules.** Numbers of fixed layouts are little-endian. Reserved bytes are written as zeros and refused if they are not. What is stored says its
//! version; another one is refused, never guessed. A record in CBOR has numbered fields: a reader passes over those it does not know, so a
//! field that a writer must not lose when it writes the record again wants a new version. Whatever is read was perhaps written by
//! somebody else: sums and sizes are checked before they are used, and nothing is allocated by a number that was read without a limit.

pub mod cached;
pub mod condemned;
pub mod content;
pub mod envelope;
pub mod extent;
pub mod fields;
pub mod head;
pub mod holding;
pub mod keys;
pub mod log;
pub mod object;
pub mod pack;
pub mod page;
pub mod pin;
pub mod seal;
pub mod snapshot;
#[cfg(test)]
mod tests;

/// Unit of everything: the block of the disk. Guests' pages and file systems' blocks have this size.
pub const BLOCK_BYTES: usize = 4096;
/// [`BLOCK_BYTES`] for sums of offsets.
pub const BLOCK: u64 = BLOCK_BYTES as u64;
/// Largest disk. The root page of a full one has 262,144 entries, 15 MB: more than that should not be written with each checkpoint.
pub const SIZE_MAX: u64 = 16 << 40;
/// Smallest disk: a file system needs some room.
pub const SIZE_MIN: u64 = 1 << 20;

/// Why bytes are not the record they should be. Says what; the caller adds where.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum FormatError {
    /// Fewer or more bytes than the record has.
    #[error("{what}: {bytes} bytes are not its size: it was cut off, or is something else")]
    Size {
        /// The record.
        what: &'static str,
        /// Bytes that are there.
        bytes: usize,
    },
    /// It begins as something else.
    #[error("{what}: it does not begin as one: it is something else, or was overwritten")]
    Magic {
        /// The record.
        what: &'static str,
    },
    /// Of a version that this build does not know.
    #[error("{what}: it is of version {found}, this build knows {known}: use a newer build")]
    Version {
        /// The record.
        what: &'static str,
        /// Its version.
        found: u16,
        /// The one known here.
        known: u16,
    },
    /// The check sum differs.
    #[error("{what}: its check sum differs: it was damaged")]
    Checksum {
        /// The record.
        what: &'static str,
    },
    /// It does not open under this name and key.
    #[error("{what}: it does not open: it was damaged, or is another one's")]
    Seal {
        /// The record.
        what: &'static str,
    },
    /// Sealed under a key that is not at hand.
    #[error("{what}: its key is wrapped with the cluster's key {wanted}, and this host has {held}: give it that key")]
    ClusterKey {
        /// The record.
        what: &'static str,
        /// Name of the key it wants, in hex.
        wanted: String,
        /// Name of the key that is here, in hex.
        held: String,
    },
    /// A field has a value that it can't have.
    #[error("{what}: {field} can't be {value}: it was damaged, or written by a build with a fault")]
    Field {
        /// The record.
        what: &'static str,
        /// The field.
        field: &'static str,
        /// What stands there.
        value: u64,
    },
    /// No CBOR of this record.
    #[error("{what}: {why}")]
    Cbor {
        /// The record.
        what: &'static str,
        /// The decoder's words.
        why: String,
    },
    /// It can't be written: it would be too large, or its parts do not fit together.
    #[error("{what} can't be written: {why}")]
    Make {
        /// The record.
        what: &'static str,
        /// What is wrong.
        why: String,
    },
}
