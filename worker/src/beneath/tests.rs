//! Tests of `beneath`: nothing outside is read or written, whatever a task swaps in meanwhile.

use std::fs;
use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use rustix::fs::{FileType, OFlags, RenameFlags};
use rustix::io::Errno;

use super::{list, make_dirs, open, open_plain, parts, root, step_by_step};

/// Swaps the directory `name` in `dir` for a link to `to`, and back, as fast as it can, until dropped.
pub(crate) struct Swapping {
    stop: Arc<AtomicBool>,
    thread: Option<std::thread::JoinHandle<u64>>,
}

impl Swapping {
    pub(crate) fn start(dir: &Path, name: &str, to: &Path) -> Self {
        let (real, link) = (dir.join(name), dir.join("link"));
        fs::create_dir_all(&real).expect("made");
        symlink(to, &link).expect("linked");
        let stop = Arc::new(AtomicBool::new(false));
        let stopped = Arc::clone(&stop);
        let thread = std::thread::spawn(move || {
            let mut swaps = 0;
            while !stopped.load(Ordering::Relaxed) {
                rustix::fs::renameat_with(rustix::fs::CWD, &real, rustix::fs::CWD, &link, RenameFlags::EXCHANGE).expect("swapped");
                swaps += 1;
            }
            swaps
        });
        Self { stop, thread: Some(thread) }
    }

    /// Ends it.
    pub(crate) fn end(mut self) {
        self.stop.store(true, Ordering::Relaxed);
        let swaps = self.thread.take().expect("runs").join().expect("never fails");
        assert!(swaps > 100, "{swaps} swaps");
    }
}

struct Place {
    _dir: tempfile::TempDir,
    root: OwnedFd,
    path: PathBuf,
}

fn place() -> Place {
    let dir = tempfile::tempdir().expect("a directory");
    let path = dir.path().join("root");
    fs::create_dir_all(path.join("a/b")).expect("made");
    fs::write(path.join("a/b/file"), "mine").expect("written");
    fs::write(dir.path().join("outside"), "not mine").expect("written");
    symlink(dir.path(), path.join("up")).expect("linked");
    symlink("file", path.join("a/b/near")).expect("linked");
    Place { root: root(&path).expect("opened"), path, _dir: dir }
}

fn opened(place: &Place, path: &str) -> [Result<(), Option<i32>>; 2] {
    let whole = open(&place.root, Path::new(path), OFlags::RDONLY).map(drop).map_err(|e| e.raw_os_error());
    let stepped = parts(Path::new(path)).and_then(|parts| {
        let (last, way) = parts.split_last().expect("not empty");
        step_by_step(&place.root, way, last, OFlags::RDONLY | super::ALWAYS)
    });
    [whole, stepped.map(drop).map_err(|e| e.raw_os_error())]
}

#[test]
fn both_ways_of_opening_refuse_the_same() {
    let place = place();
    let says = |errno: Errno| [Err(Some(errno.raw_os_error())); 2];
    assert_eq!(opened(&place, "a/b/file"), [Ok(()); 2]);
    assert_eq!(opened(&place, "./a/./b"), [Ok(()); 2]);
    assert_eq!(opened(&place, "up/outside"), says(Errno::LOOP));
    assert_eq!(opened(&place, "a/b/near"), says(Errno::LOOP));
    assert_eq!(opened(&place, "a/b/file/x"), says(Errno::NOTDIR));
    assert_eq!(opened(&place, "a/none/x"), says(Errno::NOENT));
    assert_eq!(opened(&place, "a/../../outside"), says(Errno::XDEV));
    assert_eq!(opened(&place, "/etc/passwd"), says(Errno::XDEV));
    assert!(make_dirs(&place.root, Path::new("up/new"), 0o700, None).is_err());
    assert!(make_dirs(&place.root, Path::new("a/new/er"), 0o700, None).is_ok() && place.path.join("a/new/er").is_dir());
    let entries = list(&place.root).expect("read");
    assert!(entries.contains(&("a".into(), FileType::Directory)) && entries.contains(&("up".into(), FileType::Symlink)));
}

#[test]
fn what_a_task_can_not_read_is_not_read_for_it() {
    let place = place();
    let file = place.path.join("a/b/file");
    let me = rustix::process::geteuid().as_raw();
    let read = |owner| {
        let mut text = String::new();
        open_plain(&place.root, Path::new("a/b/file"), owner)?.read_to_string(&mut text).map(|_| text)
    };
    fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).expect("changed");
    assert_eq!(read(None).expect("ours"), "mine");
    assert_eq!(read(Some((me, 0))).expect("the task's"), "mine");
    assert!(read(Some((me + 1, 0))).is_err(), "such as a hard link to the worker's own file");
    fs::set_permissions(&file, fs::Permissions::from_mode(0o444)).expect("changed");
    assert_eq!(read(Some((me + 1, 0))).expect("everybody's, such as an input"), "mine");
    assert!(open_plain(&place.root, Path::new("a/b"), None).is_err());
}
