//! A file system for a volume that nothing was ever written on, and one that is smaller than its disk.
//!
//! Owns making the image of one, as large as the disk and almost empty, with the owner and mode of its top directory; and making one larger that is not mounted, where the
//! worker may not have its kernel do it. Does not own writing an image on the volume.
//!
//! Unlike a scratch disk's (`machines/scratch.rs`) it has a journal and check sums: it outlives its machine.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::Duration;

use tokio::process::Command;

use super::Top;

/// How long making one may take: it writes a megabyte for some GiB of the disk.
const MAKE_WAIT: Duration = Duration::from_secs(120);
/// What a directory's mode has beside its permissions.
const DIRECTORY: u32 = 0o040_000;
/// What mke2fs gives the top directory.
const MODE_MADE: u32 = 0o755;
/// Bits of a mode that are permissions.
const MODE_BITS: u32 = 0o7777;
/// What all have: nothing kept back for root, and what it takes to grow while it is mounted.
const ARGUMENTS: [&str; 8] = ["-q", "-F", "-t", "ext4", "-b", "4096", "-m", "0"];
const FEATURES: &str = "-Ohas_journal,extent,flex_bg,metadata_csum,64bit,resize_inode";
/// The disk is zeros, and so is what is not written: tables and journal are not.
const LAZY: &str = "nodiscard,lazy_itable_init=1,lazy_journal_init=1";

/// Why there is none.
#[derive(Debug, thiserror::Error)]
pub enum BlankError {
    /// A program can't be run.
    #[error("{}: {source}; install e2fsprogs, or name the program in the worker's configuration", .program.display())]
    Program {
        /// Which.
        program: PathBuf,
        /// What the system says.
        source: std::io::Error,
    },
    /// It failed.
    #[error("{} could not make or grow a file system of {} MiB: {said}", .program.display(), .bytes >> 20)]
    Failed {
        /// Which.
        program: PathBuf,
        /// The disk's size.
        bytes: u64,
        /// What it said.
        said: String,
    },
    /// The image.
    #[error("the image of a file system, {}: {source}", .path.display())]
    Image {
        /// Which.
        path: PathBuf,
        /// What the system says.
        source: std::io::Error,
    },
}

/// Makes the image of an empty file system of `bytes`, with `mke2fs`.
///
/// # Errors
/// [`BlankError`].
pub async fn make(mke2fs: &Path, path: &Path, bytes: u64, top: Top) -> Result<(), BlankError> {
    let image = |source| BlankError::Image { path: path.to_owned(), source };
    let file = File::options().write(true).create(true).truncate(true).open(path).map_err(image)?;
    file.set_len(bytes).map_err(image)?;
    let options = format!("-E{LAZY},root_owner={}:{}", top.uid, top.gid);
    let mut command = Command::new(mke2fs);
    command.args(ARGUMENTS).arg(FEATURES).arg(options).arg(path);
    run(command, mke2fs, bytes).await?;
    let mode = top.mode & MODE_BITS;
    if mode == MODE_MADE {
        return Ok(());
    }
    // mke2fs learnt to set it in 1.47.1 only; this one is beside it everywhere.
    let debugfs = mke2fs.with_file_name("debugfs");
    let mut command = Command::new(&debugfs);
    command.args(["-w", "-R", &format!("set_inode_field <2> mode 0{:o}", DIRECTORY | mode)]).arg(path);
    run(command, &debugfs, bytes).await
}

/// Does the superblock of an ext4 in `path` (linux/fs/ext4/ext4.h: at byte 1,024 of the disk, little endian) speak of less than so many bytes? Only for what this host may
/// mount: it was not written by a guest.
///
/// # Errors
/// What the system says.
pub fn is_smaller(path: &Path, bytes: u64) -> std::io::Result<bool> {
    let mut block = [0; 1_024];
    std::os::unix::fs::FileExt::read_exact_at(&File::open(path)?, &mut block, 1_024)?;
    let number = |at: usize| block.get(at..at + 4).and_then(|bytes| bytes.try_into().ok()).map_or(0, u32::from_le_bytes);
    // s_blocks_count_lo, s_blocks_count_hi, s_log_block_size.
    let blocks = u64::from(number(0x4)) | u64::from(number(0x150)) << 32;
    Ok(1_024u64.checked_shl(number(0x18)).and_then(|block| blocks.checked_mul(block)).is_some_and(|has| has < bytes))
}

/// Makes the file system in `path`, which is not mounted, as large as that is. It is checked first, as `resize2fs` wants it.
///
/// # Errors
/// [`BlankError`].
pub async fn grow(mke2fs: &Path, path: &Path, bytes: u64) -> Result<(), BlankError> {
    let e2fsck = mke2fs.with_file_name("e2fsck");
    let mut check = Command::new(&e2fsck);
    check.args(["-f", "-p"]).arg(path);
    run(check, &e2fsck, bytes).await?;
    let resize2fs = mke2fs.with_file_name("resize2fs");
    let mut resize = Command::new(&resize2fs);
    resize.arg(path);
    run(resize, &resize2fs, bytes).await
}

async fn run(mut command: Command, program: &Path, bytes: u64) -> Result<(), BlankError> {
    command.stdin(Stdio::null()).kill_on_drop(true);
    let failed = |said: String| BlankError::Failed { program: program.to_owned(), bytes, said };
    let output = match tokio::time::timeout(MAKE_WAIT, command.output()).await {
        Ok(Ok(output)) => output,
        Ok(Err(source)) => return Err(BlankError::Program { program: program.to_owned(), source }),
        Err(_late) => return Err(failed(format!("it did not end within {} s", MAKE_WAIT.as_secs()))),
    };
    // debugfs says its version first, and ends well whatever happened.
    let said = String::from_utf8_lossy(&output.stderr);
    let said: Vec<&str> = said.lines().filter(|line| !line.starts_with("debugfs ")).collect();
    if output.status.success() && (said.is_empty() || program.file_name() != Some("debugfs".as_ref())) {
        return Ok(());
    }
    Err(failed(format!("{}: {}", output.status, crate::vmm::console::plain(said.join(" ").trim()))))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn it_has_the_owner_and_mode_that_are_asked_for_and_is_whole() {
        let mke2fs = Path::new("/sbin/mke2fs");
        if !mke2fs.is_file() {
            eprintln!("skipped: no /sbin/mke2fs");
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("image");
        for (bytes, mode) in [(16 << 20, 0o755), (10 << 30, 0o2770)] {
            make(mke2fs, &path, bytes, Top { uid: 80_001, gid: 80_002, mode }).await.unwrap();
            let run = |program: &str, arguments: &[&str]| {
                let output = std::process::Command::new(program).args(arguments).arg(&path).output().unwrap();
                (output.status.success(), String::from_utf8_lossy(&output.stdout).into_owned())
            };
            let (whole, said) = run("/sbin/e2fsck", &["-f", "-n"]);
            assert!(whole, "{said}");
            let stat = run("/sbin/debugfs", &["-R", "stat <2>"]).1;
            assert!(stat.contains(&format!("Mode:  0{mode:o}")) && stat.contains("User: 80001   Group: 80002"), "{stat}");
            let header = run("/sbin/debugfs", &["-R", "stats"]).1;
            assert!(header.contains("has_journal") && header.contains("metadata_csum"), "{header}");
            let stored = std::os::unix::fs::MetadataExt::blocks(&std::fs::metadata(&path).unwrap()) * 512;
            assert!(stored < 8 << 20, "{stored} bytes of {bytes}");
        }
        std::fs::File::options().write(true).open(&path).unwrap().set_len(11 << 30).unwrap();
        assert!(is_smaller(&path, 11 << 30).unwrap() && !is_smaller(&path, 10 << 30).unwrap());
        grow(mke2fs, &path, 11 << 30).await.unwrap();
        assert!(!is_smaller(&path, 11 << 30).unwrap());
        let header = std::process::Command::new("/sbin/debugfs").args(["-R", "stats"]).arg(&path).output().unwrap().stdout;
        let blocks = format!("Block count:              {}", (11u64 << 30) / 4096);
        assert!(String::from_utf8_lossy(&header).contains(&blocks), "{}", String::from_utf8_lossy(&header));
        let broken = make(Path::new("/bin/false"), &path, 16 << 20, Top { uid: 0, gid: 0, mode: 0o755 }).await;
        assert!(matches!(broken, Err(BlankError::Failed { .. })));
        let missing = make(Path::new("/nowhere/mke2fs"), &path, 16 << 20, Top { uid: 0, gid: 0, mode: 0o755 }).await;
        assert!(matches!(missing, Err(BlankError::Program { .. })));
    }
}
