//! The users of tasks and machines on a host where the worker runs as root.
//!
//! Owns which numbers slots and machines have when nobody names any, whether they are somebody else's, and whether such users reach their
//! directories. Does not own becoming one (`spawner`) or whose directories are whose (`dirs`).

use std::io;
use std::ops::RangeInclusive;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

/// The first user and group of slots when nobody names one. systemd's table of users (<https://systemd.io/UIDS-GIDS/>) has 65536 to
/// 524287 as unused; useradd gives subordinate users from 100000 on, so that the slots of a worker fit in between.
pub const FIRST: u32 = 80_000;

/// Where users and groups are given out: the file, and whether each of its lines gives a range (`name:first:count`) or one number (its
/// third field).
const FILES: [(&str, bool); 4] = [("/etc/passwd", false), ("/etc/group", false), ("/etc/subuid", true), ("/etc/subgid", true)];
/// Which users and groups there are at all in this process's namespace: lines of `first, first outside, count`.
const MAPS: [&str; 2] = ["/proc/self/uid_map", "/proc/self/gid_map"];

/// The first user and group of machines when nobody names one: behind those of slots, before the subordinate users.
pub const FIRST_OF_MACHINES: u32 = 90_000;

/// The user and group of those programs that show volumes as files, once they have mounted: the last before those of machines.
pub const OF_FILES: u32 = FIRST_OF_MACHINES - 1;

/// Who gets users.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Whose {
    /// Tasks, by their slot.
    Slots,
    /// Machines.
    Machines,
}

impl Whose {
    fn wanted(self) -> &'static str {
        match self {
            Self::Slots => "tasks should run as users of their own, one for each slot",
            Self::Machines => "machines should run as users of their own, one for each",
        }
    }

    fn others(self) -> &'static str {
        match self {
            Self::Slots => {
                "name the first of as many free ones with --task-users UID:GID, or one user for all tasks with --task-user UID:GID"
            }
            Self::Machines => "give those to nobody else, or leave `microvm` out of the worker's isolation",
        }
    }
}

/// Why slots or machines can't have users of their own from [`FIRST`] or [`FIRST_OF_MACHINES`] on. Each says what helps.
#[derive(Debug, thiserror::Error)]
pub enum UsersError {
    /// They are somebody's.
    #[error("{}, {first} to {last}, but {file} has {owner} there; {}", .whose.wanted(), .whose.others())]
    Taken {
        /// For whom.
        whose: Whose,
        /// The first.
        first: u32,
        /// The last.
        last: u32,
        /// The file that says so.
        file: &'static str,
        /// Whose.
        owner: String,
    },
    /// They can't be used in this container.
    #[error("{}, {first} to {last}, but this container has no such users ({file}); {}", .whose.wanted(), .whose.others())]
    Unmapped {
        /// For whom.
        whose: Whose,
        /// The first.
        first: u32,
        /// The last.
        last: u32,
        /// The file that says so.
        file: &'static str,
    },
    /// Whether they are can't be seen.
    #[error("reading {file}, to see which users are free: {source}; {}", .whose.others())]
    Read {
        /// For whom.
        whose: Whose,
        /// Which.
        file: &'static str,
        /// What the system said.
        source: io::Error,
    },
}

/// The first user and group for so many slots, after looking that none of them is somebody else's. Users that only a directory server
/// knows are not seen.
///
/// # Errors
/// [`UsersError`].
pub fn for_slots(slots: u32) -> Result<(u32, u32), UsersError> {
    look(Whose::Slots, FIRST, slots)?;
    Ok((FIRST, FIRST))
}

/// Looks that the users for so many machines are nobody else's, as [`for_slots`] does.
///
/// # Errors
/// [`UsersError`].
pub fn for_machines(machines: u32) -> Result<(), UsersError> {
    look(Whose::Machines, FIRST_OF_MACHINES, machines)
}

fn look(whose: Whose, first: u32, count: u32) -> Result<(), UsersError> {
    let last = first.saturating_add(count.saturating_sub(1));
    let read = |file| read(file).map_err(|source| UsersError::Read { whose, file, source });
    for file in MAPS {
        let map = read(file)?;
        if !map.is_empty() && !is_mapped(&map, &(first..=last)) {
            return Err(UsersError::Unmapped { whose, first, last, file });
        }
    }
    for (file, ranges) in FILES {
        if let Some(owner) = owner(&read(file)?, ranges, &(first..=last)) {
            return Err(UsersError::Taken { whose, first, last, file, owner });
        }
    }
    Ok(())
}

/// A file's text; nothing when there is no such file.
fn read(file: &'static str) -> io::Result<String> {
    match std::fs::read(file) {
        Ok(bytes) => Ok(String::from_utf8_lossy(&bytes).into_owned()),
        Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(String::new()),
        Err(e) => Err(e),
    }
}

/// Whose a number of the wanted is, as such a file has it.
fn owner(text: &str, ranges: bool, wanted: &RangeInclusive<u32>) -> Option<String> {
    text.lines().find_map(|line| {
        let mut fields = line.split(':');
        let name = fields.next()?;
        let (second, third) = (fields.next()?, fields.next()?.trim().parse::<u64>().ok()?);
        let (first, count) = if ranges { (second.trim().parse::<u64>().ok()?, third) } else { (third, 1) };
        let meets = count > 0 && first <= u64::from(*wanted.end()) && u64::from(*wanted.start()) < first.saturating_add(count);
        meets.then(|| match count {
            1 => format!("{name} ({first})"),
            _ => format!("{name} ({first} to {})", first.saturating_add(count - 1)),
        })
    })
}

/// Does one line of a namespace's map hold all of the wanted?
fn is_mapped(text: &str, wanted: &RangeInclusive<u32>) -> bool {
    text.lines().any(|line| {
        let mut fields = line.split_whitespace().map(|field| field.parse::<u64>().unwrap_or(0));
        let (Some(first), Some(_), Some(count)) = (fields.next(), fields.next(), fields.next()) else { return false };
        first <= u64::from(*wanted.start()) && u64::from(*wanted.end()) < first.saturating_add(count)
    })
}

/// The directory on the way to this one, or itself, through which other users can't pass.
#[must_use]
pub fn closed_above(dir: &Path) -> Option<PathBuf> {
    let closed = |dir: &&Path| std::fs::metadata(dir).is_ok_and(|meta| meta.permissions().mode() & 0o001 == 0);
    dir.ancestors().find(closed).map(Path::to_owned)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_of_others_are_seen() {
        let passwd = "root:x:0:0:root:/root:/bin/sh\n+nis\nodd:x:80003:100::/:/bin/sh\n";
        assert_eq!(owner(passwd, false, &(80_000..=80_003)).as_deref(), Some("odd (80003)"));
        assert_eq!(owner(passwd, false, &(80_000..=80_002)), None);
        let subuid = "me:65536:14464\nyou:80004:10\n";
        assert_eq!(owner(subuid, true, &(80_000..=80_003)), None);
        assert_eq!(owner(subuid, true, &(79_999..=80_000)).as_deref(), Some("me (65536 to 79999)"));
        assert_eq!(owner(subuid, true, &(80_000..=80_004)).as_deref(), Some("you (80004 to 80013)"));
    }

    #[test]
    fn a_container_has_only_the_users_of_its_map() {
        assert!(is_mapped("         0          0 4294967295\n", &(80_000..=84_095)));
        assert!(!is_mapped("0 1000 1\n1 100000 65535\n", &(80_000..=80_001)));
        assert!(is_mapped("0 1000 1\n1 100000 65535\n", &(60_000..=60_001)));
    }

    #[test]
    fn a_directory_that_is_closed_to_others_is_named() {
        let place = tempfile::tempdir().expect("a directory");
        let dir = place.path().join("a/b");
        std::fs::create_dir_all(&dir).expect("made");
        std::fs::set_permissions(place.path(), std::fs::Permissions::from_mode(0o700)).expect("closed");
        assert_eq!(closed_above(&dir).as_deref(), Some(place.path()));
    }
}
