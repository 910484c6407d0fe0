//! Seeing that a directory is empty and as it was made, by one question to the kernel where that suffices.
//!
//! Owns when an unchanged change time proves that nothing was put in. Does not own which directories, or what is done to them.
//!
//! The kernel sets a directory's change time (ctime) whenever an entry comes or goes, or its mode or owner changes, and nobody can set
//! it to an instant of their choice. But it may be as coarse as two seconds, so that a change right after a look may not show. So the
//! time proves something only for what came later than [`COARSE`] after it was first seen. Both are measured by our own clock: the file
//! system's may go wrong as it likes.

use std::mem::MaybeUninit;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::{Duration, Instant};

use rustix::fs::{Mode, OFlags, RawDir, Stat};

/// Longer than the coarsest change times of any file system (two seconds).
const COARSE: Duration = Duration::from_secs(3);
/// Room for the entries of a directory that are read at once, in bytes: an empty one has two.
const ENTRIES_BYTES: usize = 1024;

/// What tells a directory's states apart: device, inode, change time in seconds and nanoseconds.
type Mark = (u64, u64, i64, u64);

/// A directory that was seen empty and as it was made.
#[derive(Debug, Clone, Copy)]
pub struct Seen {
    mark: Mark,
    since: Instant,
}

impl Seen {
    /// Is the directory as it was seen, if it may have been changed since `lent`? If that can't be told, `look` looks into it.
    pub fn still(seen: &mut Option<Self>, dir: &Path, lent: Instant, look: impl FnOnce() -> Option<Mark>) -> bool {
        if let Some(old) = seen.filter(|old| lent.duration_since(old.since) > COARSE)
            && rustix::fs::lstat(dir).is_ok_and(|stat| mark(&stat) == old.mark)
        {
            return true;
        }
        let now = Instant::now();
        let old = seen.take();
        *seen = look().map(|mark| match old {
            Some(old) if old.mark == mark => old,
            _ => Self { mark, since: now },
        });
        seen.is_some()
    }
}

/// Looks into a directory: none if it isn't there, isn't empty, or has another mode or owner.
pub fn look(dir: &Path, mode: u32, owner: Option<(u32, u32)>) -> Option<Mark> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
    let open = rustix::fs::open(dir, flags, Mode::empty()).ok()?;
    let stat = rustix::fs::fstat(&open).ok()?;
    let owned = owner.is_none_or(|owner| (stat.st_uid, stat.st_gid) == owner);
    (owned && stat.st_mode & 0o7777 == mode && is_empty(open)).then(|| mark(&stat))
}

fn is_empty(dir: OwnedFd) -> bool {
    let mut buffer = [MaybeUninit::uninit(); ENTRIES_BYTES];
    let mut entries = RawDir::new(dir, &mut buffer);
    while let Some(entry) = entries.next() {
        if !entry.is_ok_and(|entry| entry.file_name() == c"." || entry.file_name() == c"..") {
            return false;
        }
    }
    true
}

fn mark(stat: &Stat) -> Mark {
    (stat.st_dev, stat.st_ino, stat.st_ctime, stat.st_ctime_nsec)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::cell::Cell;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn the_change_time_alone_is_believed_only_for_later_changes() {
        let dir = tempfile::tempdir().expect("a directory");
        let path = dir.path();
        std::fs::set_permissions(path, std::fs::Permissions::from_mode(0o700)).expect("changed");
        let looks = Cell::new(0);
        let mut seen = None;
        let mut still = |lent| {
            Seen::still(&mut seen, path, lent, || {
                looks.set(looks.get() + 1);
                look(path, 0o700, None)
            })
        };
        let begin = Instant::now();
        assert!(still(begin) && looks.get() == 1);
        assert!(still(begin + COARSE) && looks.get() == 2, "it may have been changed in the moment it was seen");
        let later = Instant::now() + COARSE + Duration::from_millis(1);
        assert!(still(later) && looks.get() == 2, "an unchanged time is enough");
        // The clock of the file system is coarse as well.
        std::thread::sleep(Duration::from_millis(50));
        std::fs::write(path.join("file"), "").expect("written");
        std::fs::remove_file(path.join("file")).expect("removed");
        assert!(still(later) && looks.get() == 3, "empty again, but changed");
        std::thread::sleep(Duration::from_millis(50));
        std::fs::write(path.join("file"), "").expect("written");
        assert!(!still(later + COARSE) && looks.get() == 4);
        assert!(!still(later + COARSE * 2) && looks.get() == 5, "what was not seen empty is never believed");
    }
}
