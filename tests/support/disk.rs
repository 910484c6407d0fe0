//! A small file system for one test.
//!
//! Owns mounting, filling and unmounting it. Needs the right to mount a tmpfs; without it a test says that it was skipped and why.

use std::path::{Path, PathBuf};
use std::process::Command;

/// A tmpfs that can be filled.
pub struct Disk {
    dir: PathBuf,
}

impl Disk {
    /// Mounts one of `size` (as mount takes it) on `dir`, which is made; none, with the reason said, where that isn't allowed.
    pub fn mount(dir: &Path, size: &str) -> Option<Self> {
        std::fs::create_dir_all(dir).unwrap();
        let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", &format!("size={size},mode=755"), "tmpfs"]).arg(dir).output();
        match mounted {
            Ok(output) if output.status.success() => Some(Self { dir: dir.to_owned() }),
            other => {
                println!("skipped: a small file system can't be mounted here: {other:?}");
                None
            }
        }
    }

    /// Takes all space there is.
    pub fn fill(&self) {
        use std::io::Write as _;
        let mut file = std::fs::File::options().append(true).create(true).open(self.filler()).unwrap();
        let mut size = 64 * 1024;
        while size > 0 {
            if file.write(&vec![7; size]).is_err() {
                size /= 2;
            }
        }
    }

    /// Gives it back.
    pub fn empty(&self) {
        _ = std::fs::remove_file(self.filler());
    }

    fn filler(&self) -> PathBuf {
        self.dir.join("filler")
    }
}

impl Drop for Disk {
    fn drop(&mut self) {
        _ = Command::new("umount").arg("-l").arg(&self.dir).status();
    }
}
