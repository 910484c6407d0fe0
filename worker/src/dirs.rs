//! The directories of a slot: where a task works, where its outputs go, where its temporary files go.
//!
//! Owns making and emptying them. They are reused when a task left them empty and as they were: making and removing directories
//! costs as much as starting a process, and even looking into them is a tenth of it, so they are looked at once an attempt. Does not
//! own how it is seen that nothing changed (`seen`), what is put in (`prepare`) or kept (`persist`).

mod seen;

use std::fs;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use rustix::fs::{FileType, OFlags};
use seen::Seen;

use crate::beneath;

/// Mode of a task's directories: its own user only.
const MODE: u32 = 0o700;
/// Mode of a slot's directory: a task's user may pass, and change nothing.
const ROOT_MODE: u32 = 0o755;

/// Mode of a slot's directory whose user's group is nobody else's.
const CLOSED_MODE: u32 = 0o710;
/// Work, output and temporary directory.
const NAMES: [&str; 3] = ["work", "out", "tmp"];

/// Least room on the disk of a worker's directory, in bytes. With less no task begins, and one that fails is not blamed: it may have
/// failed for want of room. Small enough that a disk with less is full by anybody's measure.
pub const ROOM_BYTES_MIN: u64 = 4 * 1024 * 1024;
/// Least number of files that can still be made there: a task's directories and a few files of its own.
pub const ROOM_FILES_MIN: u64 = 32;
/// With so many times the least room there is plenty: it is not asked for again within [`PLENTY_LASTS`].
const PLENTY: u64 = 256;
/// How long plenty of room is believed in: a disk takes longer to fill that much.
const PLENTY_LASTS: Duration = Duration::from_millis(100);

/// A disk is full.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("the worker's disk is full: {} has room for {bytes} bytes and {files} files; make room there", .dir.display())]
pub struct Full {
    /// A directory on it.
    pub dir: PathBuf,
    /// Bytes left.
    pub bytes: u64,
    /// Files left.
    pub files: u64,
}

/// A slot's directories.
#[derive(Debug, Clone)]
pub struct Dirs {
    root: PathBuf,
    owner: Option<(u32, u32)>,
    closed: bool,
    clean: bool,
    lent: Instant,
    /// When there was plenty of room.
    plenty: Option<Instant>,
    seen: [Option<Seen>; 3],
}

impl Dirs {
    /// The directories below `root`, to belong to `owner` if one is given.
    #[must_use]
    pub fn new(root: PathBuf, owner: Option<(u32, u32)>) -> Self {
        Self { root, owner, closed: false, clean: false, lent: Instant::now(), plenty: None, seen: [None; 3] }
    }

    /// The same, which only its owner can enter: users of other slots can't.
    #[must_use]
    pub fn closed(root: PathBuf, owner: Option<(u32, u32)>) -> Self {
        Self { closed: true, ..Self::new(root, owner) }
    }

    /// Where the task starts, its HOME.
    #[must_use]
    pub fn work(&self) -> PathBuf {
        self.root.join(NAMES[0])
    }

    /// Its VOLLEY_OUTPUT_DIR.
    #[must_use]
    pub fn out(&self) -> PathBuf {
        self.root.join(NAMES[1])
    }

    /// Its TMPDIR.
    #[must_use]
    pub fn tmp(&self) -> PathBuf {
        self.root.join(NAMES[2])
    }

    /// Whom they belong to, if not the worker.
    #[must_use]
    pub fn owner(&self) -> Option<(u32, u32)> {
        self.owner
    }

    /// Does the slot have a user of its own?
    #[must_use]
    pub fn are_closed(&self) -> bool {
        self.closed
    }

    fn all(&self) -> [PathBuf; 3] {
        NAMES.map(|name| self.root.join(name))
    }

    /// Makes all of them, empty. Costs nothing when they are known to be so.
    ///
    /// # Errors
    /// What the system says; the path is part of it.
    pub fn make(&mut self) -> io::Result<()> {
        if self.clean {
            return Ok(());
        }
        for (name, dir) in NAMES.into_iter().zip(self.all()) {
            if seen::look(&dir, MODE, self.owner).is_none() {
                remove_all(&dir).map_err(|e| with_path(&dir, &e))?;
                self.make_one(name).map_err(|e| with_path(&dir, &e))?;
            }
        }
        self.clean = true;
        Ok(())
    }

    /// Removes what is no output, before outputs are kept: that may take minutes while the disk is full, and this may be what fills it.
    /// What can't be removed now is met again when the slot is emptied.
    pub fn shed(&self, outputs_in_work: bool) {
        let _ = remove_all(&self.tmp());
        if !outputs_in_work {
            let _ = remove_all(&self.work());
        }
    }

    /// Empties the directory where the task starts, and no other.
    ///
    /// # Errors
    /// What the system says; the path is part of it.
    pub fn empty_work(&self) -> io::Result<()> {
        let work = self.work();
        remove_all(&work).and_then(|()| self.make_one(NAMES[0])).map_err(|e| with_path(&work, &e))
    }

    /// From now on something may write into them.
    pub fn lend(&mut self) {
        self.clean = false;
        self.lent = Instant::now();
    }

    /// Nothing writes into them any more: looks whether all of them are there, empty, and as they were made.
    pub fn settle(&mut self) -> bool {
        if !self.clean {
            let (lent, owner, all) = (self.lent, self.owner, self.all());
            self.clean = self.seen.iter_mut().zip(all).all(|(seen, dir)| Seen::still(seen, &dir, lent, || seen::look(&dir, MODE, owner)));
        }
        self.clean
    }

    /// Are they known to be empty?
    #[must_use]
    pub fn are_clean(&self) -> bool {
        self.clean
    }

    /// Is there room for the next task? Asks the file system only when it has not just seen plenty.
    ///
    /// # Errors
    /// [`Full`].
    pub fn room_for_next(&mut self) -> Result<(), Full> {
        let now = Instant::now();
        if self.plenty.is_some_and(|seen| now.duration_since(seen) < PLENTY_LASTS) {
            return Ok(());
        }
        let Some((bytes, files)) = self.left() else { return Ok(()) };
        let plenty = bytes / PLENTY >= ROOM_BYTES_MIN && files / PLENTY >= ROOM_FILES_MIN;
        self.plenty = plenty.then_some(now);
        self.judge(bytes, files)
    }

    /// Is there room for a task?
    ///
    /// # Errors
    /// [`Full`]. A disk that doesn't say how full it is has room.
    pub fn room(&self) -> Result<(), Full> {
        self.left().map_or(Ok(()), |(bytes, files)| self.judge(bytes, files))
    }

    /// Bytes and files left on the disk.
    fn left(&self) -> Option<(u64, u64)> {
        let disk = rustix::fs::statvfs(&self.root).ok()?;
        // File systems without a fixed number of files say that they have none at all.
        let files = if disk.f_files == 0 { u64::MAX } else { disk.f_favail };
        Some((disk.f_bavail.saturating_mul(disk.f_frsize), files))
    }

    fn judge(&self, bytes: u64, files: u64) -> Result<(), Full> {
        if bytes >= ROOM_BYTES_MIN && files >= ROOM_FILES_MIN {
            return Ok(());
        }
        Err(Full { dir: self.root.clone(), bytes, files })
    }

    /// Opens a directory below [`Dirs::work`]; makes what is missing of it.
    ///
    /// # Errors
    /// What the system says; also when a part of the way is a symbolic link.
    pub fn make_in_work(&self, path: &Path) -> io::Result<OwnedFd> {
        beneath::make_dirs(&beneath::root(&self.work())?, path, MODE, self.owner)
    }

    /// Makes one of the three, with those above it. Above, nothing belongs to the task's user, who must only be able to pass.
    fn make_one(&self, name: &str) -> io::Result<()> {
        if !self.root.is_dir() {
            fs::create_dir_all(&self.root)?;
            match self.owner.filter(|_| self.closed) {
                None => fs::set_permissions(&self.root, fs::Permissions::from_mode(ROOT_MODE))?,
                Some((_, gid)) => {
                    std::os::unix::fs::lchown(&self.root, None, Some(gid))?;
                    fs::set_permissions(&self.root, fs::Permissions::from_mode(CLOSED_MODE))?;
                }
            }
        }
        beneath::make_dirs(&beneath::root(&self.root)?, Path::new(name), MODE, self.owner).map(drop)
    }
}

fn with_path(path: &Path, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{}: {error}", path.display()))
}

/// Removes whatever is there, also directories their owner made unreadable.
///
/// # Errors
/// What the system says.
pub fn remove_all(path: &Path) -> io::Result<()> {
    let Ok(meta) = fs::symlink_metadata(path) else { return Ok(()) };
    if !meta.is_dir() {
        return fs::remove_file(path);
    }
    match fs::remove_dir_all(path) {
        Ok(()) => Ok(()),
        Err(e) if e.kind() == io::ErrorKind::PermissionDenied => {
            open_up(path)?;
            fs::remove_dir_all(path)
        }
        Err(e) => Err(e),
    }
}

/// Lets the owner into every directory below. Links that are put in the way meanwhile are not followed.
fn open_up(path: &Path) -> io::Result<()> {
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else { return Err(io::ErrorKind::InvalidInput.into()) };
    let parent = beneath::root(parent)?;
    let mut stack = vec![PathBuf::from(name)];
    while let Some(dir) = stack.pop() {
        beneath::open_up(&parent, &dir, MODE)?;
        let entries = beneath::list(&beneath::open(&parent, &dir, OFlags::RDONLY | OFlags::DIRECTORY)?)?;
        let below = entries.into_iter().filter(|(_, kind)| *kind == FileType::Directory);
        stack.extend(below.map(|(name, _)| dir.join(name)));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn empty_directories_are_reused_and_others_made_anew() {
        let place = tempfile::tempdir().expect("a directory");
        let mut dirs = Dirs::new(place.path().join("slots/0"), None);
        dirs.make().expect("made");
        dirs.lend();
        assert!(dirs.settle());
        dirs.lend();
        let inode = |path: PathBuf| std::os::unix::fs::MetadataExt::ino(&fs::metadata(path).expect("there"));
        let (work, out) = (inode(dirs.work()), inode(dirs.out()));
        fs::create_dir_all(dirs.out().join("a/b")).expect("made");
        fs::set_permissions(dirs.out().join("a"), fs::Permissions::from_mode(0o000)).expect("changed");
        std::os::unix::fs::symlink("/etc", dirs.tmp().join("link")).expect("linked");
        assert!(!dirs.settle());
        dirs.make().expect("cleared");
        assert_eq!(inode(dirs.work()), work);
        assert!(inode(dirs.out()) != out || fs::read_dir(dirs.out()).expect("there").next().is_none());
        assert!(Path::new("/etc/passwd").exists());
        fs::remove_dir(dirs.work()).expect("removed");
        std::os::unix::fs::symlink("/tmp", dirs.work()).expect("linked");
        dirs.lend();
        assert!(!dirs.settle());
        dirs.make().expect("cleared");
        assert!(fs::symlink_metadata(dirs.work()).expect("there").is_dir());
    }
    #[test]
    fn directories_made_unreadable_are_opened_up_and_links_are_not_followed() {
        let place = tempfile::tempdir().expect("a directory");
        let (dir, outside) = (place.path().join("dir"), place.path().join("outside"));
        fs::create_dir_all(dir.join("a/b")).expect("made");
        fs::create_dir(&outside).expect("made");
        let mode = |path: &Path| fs::metadata(path).expect("there").permissions().mode() & 0o7777;
        fs::set_permissions(&outside, fs::Permissions::from_mode(0o750)).expect("changed");
        std::os::unix::fs::symlink(&outside, dir.join("a/link")).expect("linked");
        for closed in ["a/b", "a", ""] {
            fs::set_permissions(dir.join(closed), fs::Permissions::from_mode(0o0)).expect("changed");
        }
        open_up(&dir).expect("opened up");
        assert_eq!([mode(&dir), mode(&dir.join("a/b")), mode(&outside)], [0o700, 0o700, 0o750]);
        assert!(open_up(&dir.join("a/link")).is_err());
        assert_eq!(mode(&outside), 0o750);
    }
    #[test]
    fn whatever_a_task_leaves_or_changes_is_seen() {
        let place = tempfile::tempdir().expect("a directory");
        let mut dirs = Dirs::new(place.path().join("0"), None);
        let changes: [fn(&Dirs) -> io::Result<()>; 6] = [
            |dirs| fs::write(dirs.out().join("file"), "x"),
            |dirs| fs::write(dirs.tmp().join(".hidden"), ""),
            |dirs| fs::create_dir(dirs.work().join("...")),
            |dirs| fs::set_permissions(dirs.work(), fs::Permissions::from_mode(0o777)),
            |dirs| fs::remove_dir(dirs.tmp()),
            |dirs| fs::remove_dir(dirs.out()).and_then(|()| fs::write(dirs.out(), "a file")),
        ];
        for (number, change) in changes.iter().enumerate() {
            dirs.make().expect("made");
            dirs.lend();
            change(&dirs).expect("changed");
            assert!(!dirs.settle(), "change {number}");
            dirs.make().expect("emptied");
            dirs.lend();
            assert!(dirs.settle(), "change {number}");
        }
    }
}
