//! Keys of a volume's objects in the bucket.
//!
//! Owns where each lies, and reading a key back. Does not own what is in them. Everything but the head is immutable and named by the epoch and
//! the sequence of the commit that wrote it, as 16 digits in hex, so that a listing has them in order; no name is used twice.

use volley_jobspecs::ids::{SnapshotId, VolumeId};

/// Prefix of all volumes.
pub const VOLUMES: &str = "vol/";
/// Prefix of all snapshots.
pub const SNAPSHOTS: &str = "snap/";
/// Prefix of all pins.
pub const PINS: &str = "pin/";

/// Prefix of everything of one volume: `vol/v…/`.
#[must_use]
pub fn volume(id: VolumeId) -> String {
    format!("{VOLUMES}{id}/")
}

/// The head of a volume: `vol/v…/head`. The one object that is ever replaced.
#[must_use]
pub fn head(id: VolumeId) -> String {
    format!("{VOLUMES}{id}/head")
}

/// A pack: `vol/v…/p/<epoch>-<seq>-<n>`.
#[must_use]
pub fn pack(id: VolumeId, epoch: u64, seq: u64, n: u32) -> String {
    format!("{VOLUMES}{id}/p/{epoch:016x}-{seq:016x}-{n:08x}")
}

/// The map pages of a checkpoint: `vol/v…/m/<epoch>-<seq>`.
#[must_use]
pub fn map(id: VolumeId, epoch: u64, seq: u64) -> String {
    format!("{VOLUMES}{id}/m/{epoch:016x}-{seq:016x}")
}

/// A snapshot: `snap/s…`.
#[must_use]
pub fn snapshot(id: SnapshotId) -> String {
    format!("{SNAPSHOTS}{id}")
}

/// Reads the key of a snapshot. None: it is not exactly one that this build writes.
#[must_use]
pub fn parse_snapshot(key: &str) -> Option<SnapshotId> {
    let id = key.strip_prefix(SNAPSHOTS)?.parse().ok()?;
    (snapshot(id) == key).then_some(id)
}

/// A pin: `pin/<owner>/s…`; the owner is a job's id or another name without a slash.
#[must_use]
pub fn pin(owner: &str, id: SnapshotId) -> String {
    format!("{PINS}{owner}/{id}")
}

/// The record of a segment of the log, of which only the name counts: it is derived keys from, and lies on no server.
#[must_use]
pub fn segment(id: VolumeId, epoch: u64, segment: u64) -> String {
    format!("log/{id}/{epoch:016x}/{segment:016x}")
}

/// What a key below [`VOLUMES`] names.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Object {
    /// The head.
    Head,
    /// A pack.
    Pack {
        /// Of the writer.
        epoch: u64,
        /// Of the commit.
        seq: u64,
        /// Within the commit.
        n: u32,
    },
    /// Map pages.
    Map {
        /// Of the writer.
        epoch: u64,
        /// Of the commit.
        seq: u64,
    },
}

/// Reads a key of a volume's object. None: it is not exactly one that this build writes, and nobody may touch it.
#[must_use]
pub fn parse(key: &str) -> Option<(VolumeId, Object)> {
    let (id, rest) = key.strip_prefix(VOLUMES)?.split_once('/')?;
    let id: VolumeId = id.parse().ok()?;
    let mut numbers = rest.get(2..)?.split('-').map(|digits| u64::from_str_radix(digits, 16).ok());
    let object = match rest.get(..2)? {
        "p/" => Object::Pack { epoch: numbers.next()??, seq: numbers.next()??, n: u32::try_from(numbers.next()??).ok()? },
        "m/" => Object::Map { epoch: numbers.next()??, seq: numbers.next()?? },
        _ => Object::Head,
    };
    let written = match object {
        Object::Head => head(id),
        Object::Pack { epoch, seq, n } => pack(id, epoch, seq, n),
        Object::Map { epoch, seq } => map(id, epoch, seq),
    };
    (written == key).then_some((id, object))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn keys_are_read_back_and_sort_by_age(id: [u8; 16], epoch: u64, seq: u64, n: u32) {
            let id = VolumeId(id);
            prop_assert_eq!(parse(&pack(id, epoch, seq, n)), Some((id, Object::Pack { epoch, seq, n })));
            prop_assert_eq!(parse(&map(id, epoch, seq)), Some((id, Object::Map { epoch, seq })));
            prop_assert_eq!(parse(&head(id)), Some((id, Object::Head)));
            if let Some(later) = seq.checked_add(1) {
                prop_assert!(pack(id, epoch, seq, u32::MAX) < pack(id, epoch, later, 0));
            }
        }

        #[test]
        fn other_keys_are_nobodys(text in "(vol/)?(v[0-9a-f]{32})?/?[pm]?/?[-0-9a-fA-F+]{0,40}") {
            if let Some((id, object)) = parse(&text) {
                prop_assert!(object != Object::Head && text.starts_with(&volume(id)));
            }
        }
    }

    #[test]
    fn near_misses_are_nobodys() {
        let id = VolumeId([5; 16]);
        let good = pack(id, 1, 2, 3);
        for bad in [
            good.to_uppercase(),
            format!("{good}0"),
            format!("{good}-0"),
            good.replace("/p/", "/q/"),
            format!("/{good}"),
            format!("vol/{id}/head2"),
        ] {
            assert_eq!(parse(&bad), None, "{bad}");
        }
    }
}
