//! Files of snapshots, which no VMM can change.
//!
//! Owns making them: in memory, sealed against every change once they are whole. A VMM of an old version must be able to open its memory
//! for writing, though it never writes: a sealed file allows that, and nothing else. Does not own where their bytes come from.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};
use std::os::unix::fs::{FileExt, MetadataExt};

use rustix::fs::{FallocateFlags, MemfdFlags, SealFlags};

/// Bits of a mode that let somebody write.
const WRITE_BITS: u32 = 0o222;

/// What is freed at once: a page of memory.
const PAGE_BYTES: usize = 4096;

/// Unit of `st_blocks`, whatever a file system's blocks are.
const BLOCK_BYTES: u64 = 512;

/// Why a file can't be frozen.
#[derive(Debug, thiserror::Error)]
pub enum FrozenError {
    /// The system refused.
    #[error("{what} a snapshot's file in memory: {source}")]
    System {
        /// What was tried.
        what: &'static str,
        /// What it said.
        source: io::Error,
    },
    /// It can be written.
    #[error("a snapshot's file has the mode {mode:o} and belongs to user {uid}; it must be this user's and writable by nobody")]
    Writable {
        /// Its mode.
        mode: u32,
        /// Whose it is.
        uid: u32,
    },
}

fn at(what: &'static str) -> impl Fn(io::Error) -> FrozenError {
    move |source| FrozenError::System { what, source }
}

/// A file in memory that can still be written. `name` is for people who look at a process's files.
///
/// # Errors
/// [`FrozenError::System`].
pub fn in_memory(name: &str) -> Result<File, FrozenError> {
    let made = rustix::fs::memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING);
    Ok(File::from(made.map_err(|e| at("making")(e.into()))?))
}

/// Frees the parts of a file in memory that hold zeros; they read as before.
///
/// # Errors
/// What the system says.
pub fn without_zeros(file: &File) -> io::Result<()> {
    let bytes = file.metadata()?.len();
    let (mut page, mut at, mut zeros) = (vec![0; PAGE_BYTES], 0, None);
    while at < bytes {
        let len = usize::try_from(bytes - at).unwrap_or(PAGE_BYTES).min(PAGE_BYTES);
        let now = page.get_mut(..len).unwrap_or_default();
        file.read_exact_at(now, at)?;
        match (is_zeros(now), zeros) {
            (true, None) => zeros = Some(at),
            (false, Some(begin)) => {
                free(file, begin, at)?;
                zeros = None;
            }
            _ => {}
        }
        at += len as u64;
    }
    zeros.map_or(Ok(()), |begin| free(file, begin, bytes))
}

fn free(file: &File, begin: u64, end: u64) -> io::Result<()> {
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    Ok(rustix::fs::fallocate(file, flags, begin, end - begin)?)
}

/// In words, as there are many.
fn is_zeros(bytes: &[u8]) -> bool {
    let mut words = bytes.chunks_exact(size_of::<u128>());
    words.all(|word| word == [0; size_of::<u128>()]) && words.remainder().iter().all(|byte| *byte == 0)
}

/// A file that nobody can change.
#[derive(Debug)]
pub struct Frozen {
    file: File,
    sealed: bool,
}

impl Frozen {
    /// Seals a file of [`in_memory`]. No process may have it mapped for writing any more.
    ///
    /// # Errors
    /// [`FrozenError::System`].
    pub fn seal(file: File) -> Result<Self, FrozenError> {
        let seals = SealFlags::WRITE | SealFlags::SHRINK | SealFlags::GROW | SealFlags::SEAL;
        rustix::fs::fcntl_add_seals(&file, seals).map_err(|e| at("sealing")(e.into()))?;
        Ok(Self { file, sealed: true })
    }

    /// Takes a file of a file system: open for reading, this process's user's, writable by nobody. QEMU before 8.2 can't map one.
    ///
    /// # Errors
    /// [`FrozenError`].
    pub fn read_only(file: File) -> Result<Self, FrozenError> {
        let meta = file.metadata().map_err(at("looking at"))?;
        if meta.mode() & WRITE_BITS != 0 || meta.uid() != rustix::process::geteuid().as_raw() {
            return Err(FrozenError::Writable { mode: meta.mode(), uid: meta.uid() });
        }
        Ok(Self { file, sealed: false })
    }

    /// Can it be opened for writing, though not written?
    #[must_use]
    pub fn is_sealed(&self) -> bool {
        self.sealed
    }

    /// Its size.
    ///
    /// # Errors
    /// [`FrozenError::System`].
    pub fn bytes(&self) -> Result<u64, FrozenError> {
        Ok(self.file.metadata().map_err(at("looking at"))?.len())
    }

    /// The memory it takes, which a host has once however many machines are restored from it: parts that were never written take none.
    ///
    /// # Errors
    /// [`FrozenError::System`].
    pub fn allocated_bytes(&self) -> Result<u64, FrozenError> {
        Ok(self.file.metadata().map_err(at("looking at"))?.blocks().saturating_mul(BLOCK_BYTES))
    }

    /// Reads from a place, all of `into`.
    ///
    /// # Errors
    /// [`FrozenError::System`].
    pub fn read_at(&self, into: &mut [u8], from: u64) -> Result<(), FrozenError> {
        self.file.read_exact_at(into, from).map_err(at("reading"))
    }

    /// Opens it anew for reading, at its beginning: two readers of one descriptor would move each other's place.
    ///
    /// # Errors
    /// [`FrozenError::System`].
    pub fn open(&self) -> Result<File, FrozenError> {
        open_again(&self.file).map_err(at("opening"))
    }
}

impl AsFd for Frozen {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.file.as_fd()
    }
}

/// Opens a file anew for reading.
///
/// # Errors
/// What the system says.
pub fn open_again(file: &File) -> io::Result<File> {
    File::open(format!("/proc/self/fd/{}", file.as_raw_fd()))
}

/// A copy in memory that every user may read, whatever the mode of the file: kernels are root's alone on some hosts.
///
/// # Errors
/// What the system says.
pub fn copy_in_memory(name: &str, from: &mut File) -> io::Result<File> {
    let mut copy = in_memory(name).map_err(io::Error::other)?;
    io::copy(from, &mut copy)?;
    Frozen::seal(copy).and_then(|frozen| frozen.open()).map_err(io::Error::other)
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn a_sealed_file_stays_what_it_is() {
        let mut file = in_memory("test").unwrap();
        file.write_all(b"bytes").unwrap();
        let frozen = Frozen::seal(file).unwrap();
        let again = File::options().read(true).write(true).open(format!("/proc/self/fd/{}", frozen.file.as_raw_fd())).unwrap();
        assert_eq!(again.write_at(b"x", 0).unwrap_err().raw_os_error(), Some(libc::EPERM));
        assert_eq!(again.set_len(1).unwrap_err().raw_os_error(), Some(libc::EPERM));
        assert_eq!(again.set_len(9).unwrap_err().raw_os_error(), Some(libc::EPERM));
        let (mut one, mut other) = (frozen.open().unwrap(), frozen.open().unwrap());
        let read = |file: &mut File| std::io::read_to_string(file).unwrap();
        assert_eq!((read(&mut one), read(&mut other), frozen.bytes().unwrap()), ("bytes".to_owned(), "bytes".to_owned(), 5));
        let sparse = in_memory("sparse").unwrap();
        sparse.set_len(1 << 30).unwrap();
        sparse.write_at(b"x", 1 << 20).unwrap();
        assert!((1..1 << 22).contains(&Frozen::seal(sparse).unwrap().allocated_bytes().unwrap()));
    }

    #[test]
    fn zeros_take_no_memory_and_are_still_there() {
        let file = in_memory("zeros").unwrap();
        let mut bytes = vec![0; 1 << 20];
        for at in [4096 * 3 + 4095, 4096 * 100, bytes.len() - 1] {
            bytes[at] = 7;
        }
        bytes.extend([0; 100]);
        file.write_all_at(&bytes, 0).unwrap();
        without_zeros(&file).unwrap();
        let frozen = Frozen::seal(file).unwrap();
        let mut read = vec![1; bytes.len()];
        frozen.read_at(&mut read, 0).unwrap();
        assert!(read == bytes);
        assert!(frozen.allocated_bytes().unwrap() <= 4 * 4096, "{}", frozen.allocated_bytes().unwrap());
    }

    #[test]
    fn a_file_that_somebody_can_write_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("memory");
        std::fs::write(&path, "x").unwrap();
        assert!(matches!(Frozen::read_only(File::open(&path).unwrap()), Err(FrozenError::Writable { .. })));
        std::fs::set_permissions(&path, std::os::unix::fs::PermissionsExt::from_mode(0o444)).unwrap();
        assert!(!Frozen::read_only(File::open(&path).unwrap()).unwrap().is_sealed());
    }
}
