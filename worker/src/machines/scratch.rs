//! Scratch disks: an empty file system for one machine, thrown away with it.
//!
//! Owns making one of each size, once, and copies of it, which take no more room than what is written to them. The host makes the file
//! system and never reads it again: a guest has written to it.

use std::collections::BTreeMap;
use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use rustix::fs::SeekFrom;
use rustix::io::Errno;
use tokio::sync::Mutex;

/// Smallest disk, in bytes: a file system needs some of it for itself.
const DISK_BYTES_MIN: u64 = 16 << 20;
/// Sizes are rounded up to this many bytes.
const DISK_STEP_BYTES: u64 = 1 << 20;
/// Sizes kept: each takes about a megabyte on the host's disk.
const SIZES_KEPT: usize = 16;
/// How long making a file system may take: some tens of milliseconds, on a disk that may be busy.
const MAKE_WAIT: Duration = Duration::from_secs(60);
/// What all of them have: nothing kept back for root.
const ARGUMENTS: [&str; 8] = ["-q", "-F", "-t", "ext4", "-b", "4096", "-m", "0"];
/// No journal and no checksums, as nothing outlives its machine. The tables are zero already, and the guest is told so: otherwise its kernel
/// would write them in the background, 32 MiB of a disk of 2 GiB.
const LEAN: [&str; 2] = ["-O^has_journal,^metadata_csum,uninit_bg,^resize_inode", "-Enodiscard,root_owner=0:0,assume_storage_prezeroed=1"];
/// The same for e2fsprogs before 1.47, which can't tell it so.
const PLAIN: [&str; 2] = ["-O^has_journal", "-Enodiscard,root_owner=0:0,lazy_itable_init=1"];

/// Why there is no scratch disk.
#[derive(Debug, thiserror::Error)]
pub enum ScratchError {
    /// The program can't be run.
    #[error("{}: {source}; install e2fsprogs, or name the program in the worker's configuration", .program.display())]
    Program {
        /// Which.
        program: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// It failed.
    #[error("{} could not make a file system of {} MiB: {said}", .program.display(), .bytes >> 20)]
    Failed {
        /// Which.
        program: PathBuf,
        /// The disk's size.
        bytes: u64,
        /// What it said.
        said: String,
    },
    /// A file.
    #[error("a scratch disk in {}: {source}; check the disk of the worker's directory", .dir.display())]
    Io {
        /// The directory.
        dir: PathBuf,
        /// What the system says.
        source: io::Error,
    },
}

/// A disk for one machine. Its file goes when this is dropped.
#[derive(Debug)]
pub struct ScratchDisk {
    /// Its file, open for reading and writing.
    pub file: Option<OwnedFd>,
    /// Its size.
    pub bytes: u64,
    path: PathBuf,
}

impl Drop for ScratchDisk {
    fn drop(&mut self) {
        // What can't be removed now is removed at the next start.
        let _ = std::fs::remove_file(&self.path);
    }
}

#[derive(Debug)]
struct Made {
    used: u64,
    file: Arc<File>,
}

/// Makes scratch disks.
#[derive(Debug)]
pub struct ScratchDisks {
    dir: PathBuf,
    program: PathBuf,
    next: AtomicU64,
    made: Mutex<BTreeMap<u64, Made>>,
}

impl ScratchDisks {
    /// In an empty directory.
    ///
    /// # Errors
    /// What the system says.
    pub fn open(dir: &Path, program: PathBuf) -> io::Result<Self> {
        std::fs::create_dir_all(dir)?;
        Ok(Self { dir: dir.to_owned(), program, next: AtomicU64::new(1), made: Mutex::default() })
    }

    /// A new disk with an empty ext4, of at least so many bytes.
    ///
    /// # Errors
    /// [`ScratchError`].
    pub async fn make(&self, bytes: u64) -> Result<ScratchDisk, ScratchError> {
        let bytes = bytes.max(DISK_BYTES_MIN).div_ceil(DISK_STEP_BYTES).saturating_mul(DISK_STEP_BYTES);
        let from = self.empty(bytes).await?;
        let path = self.dir.join(self.next.fetch_add(1, Ordering::Relaxed).to_string());
        let mut disk = ScratchDisk { file: None, bytes, path };
        let copied = tokio::task::spawn_blocking(move || {
            let file = File::options().read(true).write(true).create_new(true).open(&disk.path)?;
            copy(&from, &file, bytes)?;
            disk.file = Some(file.into());
            Ok(disk)
        });
        let copied = copied.await.unwrap_or_else(|e| Err(io::Error::other(e)));
        copied.map_err(|source| ScratchError::Io { dir: self.dir.clone(), source })
    }

    /// The file that disks of this size are copies of.
    async fn empty(&self, bytes: u64) -> Result<Arc<File>, ScratchError> {
        // Held while one is made: whoever wants the same waits for it.
        let mut made = self.made.lock().await;
        let used = self.next.fetch_add(1, Ordering::Relaxed);
        if let Some(known) = made.get_mut(&bytes) {
            known.used = used;
            return Ok(known.file.clone());
        }
        let path = self.dir.join(format!("empty-{bytes}"));
        let file = self.fresh(&path, bytes).await;
        // It is reached by its descriptor only, and its room is free again when nobody holds it.
        let _ = std::fs::remove_file(&path);
        let file = Arc::new(file?);
        while made.len() >= SIZES_KEPT {
            let Some(oldest) = made.iter().min_by_key(|(_, known)| known.used).map(|(bytes, _)| *bytes) else { break };
            made.remove(&oldest);
        }
        made.insert(bytes, Made { used, file: file.clone() });
        Ok(file)
    }

    async fn fresh(&self, path: &Path, bytes: u64) -> Result<File, ScratchError> {
        match self.make_fs(path, bytes, LEAN).await {
            Err(ScratchError::Failed { .. }) => self.make_fs(path, bytes, PLAIN).await,
            made => made,
        }
    }

    async fn make_fs(&self, path: &Path, bytes: u64, features: [&str; 2]) -> Result<File, ScratchError> {
        let io_error = |source| ScratchError::Io { dir: self.dir.clone(), source };
        let file = File::options().read(true).write(true).create(true).truncate(true).open(path).map_err(io_error)?;
        file.set_len(bytes).map_err(io_error)?;
        let mut command = tokio::process::Command::new(&self.program);
        command.args(ARGUMENTS).args(features).arg(path).stdin(Stdio::null()).kill_on_drop(true);
        let failed = |said: String| ScratchError::Failed { program: self.program.clone(), bytes, said };
        let output = match tokio::time::timeout(MAKE_WAIT, command.output()).await {
            Ok(Ok(output)) => output,
            Ok(Err(source)) => return Err(ScratchError::Program { program: self.program.clone(), source }),
            Err(_late) => return Err(failed(format!("it did not end within {} s", MAKE_WAIT.as_secs()))),
        };
        if !output.status.success() {
            let said = String::from_utf8_lossy(&output.stderr);
            return Err(failed(format!("{}: {}", output.status, crate::vmm::console::plain(said.trim()))));
        }
        Ok(file)
    }
}

/// Copies what is written of a file; as a clone where the file system can.
fn copy(from: &File, to: &File, bytes: u64) -> io::Result<()> {
    if rustix::fs::ioctl_ficlone(to, from).is_ok() {
        return Ok(());
    }
    to.set_len(bytes)?;
    // Opened anew: copies are made at the same time, and a descriptor has one place.
    let from = crate::vmm::files::open_again(from)?;
    let mut at = 0;
    while at < bytes {
        let begin = match rustix::fs::seek(&from, SeekFrom::Data(at)) {
            Ok(begin) => begin,
            Err(Errno::NXIO) => return Ok(()),
            Err(e) => return Err(e.into()),
        };
        let end = rustix::fs::seek(&from, SeekFrom::Hole(begin))?;
        rustix::fs::seek(&from, SeekFrom::Start(begin))?;
        rustix::fs::seek(to, SeekFrom::Start(begin))?;
        io::copy(&mut io::Read::take(&from, end.saturating_sub(begin)), &mut &*to)?;
        at = end.max(begin + 1);
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::os::fd::AsFd;

    use super::*;

    #[tokio::test]
    async fn each_is_a_new_file_system_and_goes() {
        let dir = tempfile::tempdir().unwrap();
        let program = PathBuf::from("/sbin/mke2fs");
        if !program.is_file() {
            eprintln!("skipped: no /sbin/mke2fs");
            return;
        }
        let disks = ScratchDisks::open(dir.path(), program).unwrap();
        let (one, other) = tokio::join!(disks.make(64 << 20), disks.make((63 << 20) + 1));
        let (one, other) = (one.unwrap(), other.unwrap());
        let read = |disk: &ScratchDisk| std::fs::read(&disk.path).unwrap();
        assert_eq!((one.bytes, read(&one).len()), (64 << 20, 64 << 20));
        assert!(read(&one) == read(&other), "two copies of one");
        // The magic number of ext2 to ext4, at 1,024 + 56.
        assert_eq!(read(&one)[1_080..1_082], [0x53, 0xef]);
        let stat = rustix::fs::fstat(one.file.as_ref().unwrap().as_fd()).unwrap();
        assert!(stat.st_blocks * 512 < 2 << 20, "{} blocks", stat.st_blocks);
        drop((one, other));
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
        let broken = ScratchDisks::open(dir.path(), "/bin/false".into()).unwrap();
        assert!(matches!(broken.make(1).await, Err(ScratchError::Failed { .. })));
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0);
    }
}
