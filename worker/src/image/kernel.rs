//! The kernel that guests boot.
//!
//! Owns finding it, reading its version out of it, and which of its two forms a VMM is given. Nothing is executed and nothing fetched:
//! deploy/setup.sh unpacks Debian's package. Does not own booting it.

mod unpack;

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

pub use unpack::UnpackError;

/// Names one kernel for all guests.
pub const VARIABLE: &str = "VOLLEY_GUEST_KERNEL";
/// Where a distribution installs kernels, and how Debian's for guests are named there.
const BOOT: &str = "/boot";
const CLOUD: &str = "-cloud-amd64";
/// The setup header of a kernel image for x86:
/// <https://docs.kernel.org/arch/x86/boot.html#the-real-mode-kernel-header>. Its magic number, and where its version's text is.
const MAGIC_AT: u64 = 0x202;
const MAGIC: &[u8; 4] = b"HdrS";
const VERSION_AT: u64 = 0x20e;
/// The text's place is counted from here.
const SETUP_AT: u64 = 0x200;
/// Longest version text: `uname -r`, who built it and when. The kernel's own limit for the first part is 64.
const VERSION_BYTES_MAX: usize = 256;

/// As much of an ELF file as says what it is for.
const ELF_HEAD_BYTES: usize = 64;
/// What stands before the version in an uncompressed kernel: the first line of its console.
const BANNER: &[u8] = b"Linux version ";

/// A kernel.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kernel {
    /// Its file.
    pub path: PathBuf,
    /// What `uname -r` says under it; empty where an uncompressed one does not tell.
    pub release: String,
    /// What its file is.
    pub form: Form,
}

/// What a kernel's file is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Form {
    /// As distributions install it (`vmlinuz`): packed, with a beginning that unpacks it.
    BzImage,
    /// An ELF file (`vmlinux`).
    Elf,
}

/// No kernel.
#[derive(Debug, thiserror::Error)]
pub enum KernelError {
    /// None was found.
    #[error("no kernel for guests: looked for {}; name one with --guest-kernel or {VARIABLE}, or install linux-image-cloud-amd64", .looked.join(", "))]
    None {
        /// Where it was looked for.
        looked: Vec<String>,
    },
    /// It can't be read.
    #[error("the kernel {}: {source}", .path.display())]
    Io {
        /// Which.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// It is something else.
    #[error("{} is no Linux kernel for x86 (bzImage, or an ELF file for x86-64)", .path.display())]
    Other {
        /// The file.
        path: PathBuf,
    },
    /// It is not packed.
    #[error("{} is an uncompressed kernel, which only Firecracker is given; QEMU wants its bzImage (vmlinuz)", .path.display())]
    NotPacked {
        /// The file.
        path: PathBuf,
    },
    /// It can't be unpacked.
    #[error("the kernel {}: Firecracker boots an uncompressed one, and {why}; name its vmlinux with {VARIABLE}", .path.display())]
    Packed {
        /// The file.
        path: PathBuf,
        /// Why not.
        why: UnpackError,
    },
}

impl Kernel {
    /// As a bzImage.
    ///
    /// # Errors
    /// [`KernelError::NotPacked`].
    pub fn packed(self) -> Result<Self, KernelError> {
        match self.form {
            Form::BzImage => Ok(self),
            Form::Elf => Err(KernelError::NotPacked { path: self.path }),
        }
    }

    /// As an ELF file; one that is a bzImage is unpacked to this place.
    ///
    /// # Errors
    /// [`KernelError::Packed`], [`KernelError::Io`].
    pub fn unpacked(self, to: &Path) -> Result<Self, KernelError> {
        if self.form == Form::Elf {
            return Ok(self);
        }
        let io_error = |path: &Path| {
            let path = path.to_owned();
            move |source| KernelError::Io { path, source }
        };
        let image = std::fs::read(&self.path).map_err(io_error(&self.path))?;
        let elf = unpack::unpack(&image).map_err(|why| KernelError::Packed { path: self.path, why })?;
        std::fs::write(to, elf).map_err(io_error(to))?;
        Ok(Self { path: to.to_owned(), release: self.release, form: Form::Elf })
    }
}

/// Where kernels are looked for, after the one that was named.
#[derive(Debug, Clone, Default)]
pub struct Places {
    /// The one that [`VARIABLE`] names.
    pub variable: Option<PathBuf>,
    /// The user's cache directory.
    pub cache: Option<PathBuf>,
    /// Where a distribution installs them.
    pub boot: PathBuf,
}

impl Places {
    /// Those of this process.
    #[must_use]
    pub fn of_process() -> Self {
        let path = |name: &str| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
        let cache = path("XDG_CACHE_HOME").or_else(|| Some(path("HOME")?.join(".cache")));
        Self { variable: path(VARIABLE), cache, boot: PathBuf::from(BOOT) }
    }
}

/// Finds the kernel: the one named by `path`; else the one that [`VARIABLE`] names, else the one that deploy/setup.sh unpacked, else the
/// newest installed one for guests. What is named and can't be used is an error; nothing else is taken in its place.
///
/// # Errors
/// [`KernelError`].
pub fn find(path: Option<&Path>, places: &Places) -> Result<Kernel, KernelError> {
    if let Some(named) = path.or(places.variable.as_deref()) {
        return read(named);
    }
    let mut looked = Vec::new();
    if let Some(cache) = &places.cache {
        let path = cache.join("volley/guest/vmlinuz");
        if path.is_file() {
            return read(&path);
        }
        looked.push(path.display().to_string());
    }
    looked.push(places.boot.join(format!("vmlinuz-*{CLOUD}")).display().to_string());
    // Without the directory there is none in it.
    let names = std::fs::read_dir(&places.boot).into_iter().flatten().flatten();
    let names = names.filter_map(|entry| entry.file_name().into_string().ok());
    let newest = names.filter(|name| name.starts_with("vmlinuz-") && name.ends_with(CLOUD)).max_by_key(|name| order(name));
    match newest {
        Some(name) => read(&places.boot.join(name)),
        None => Err(KernelError::None { looked }),
    }
}

/// Reads a kernel's version.
///
/// # Errors
/// [`KernelError`].
pub fn read(path: &Path) -> Result<Kernel, KernelError> {
    let io_error = |source| KernelError::Io { path: path.to_owned(), source };
    let other = || KernelError::Other { path: path.to_owned() };
    let file = File::open(path).map_err(io_error)?;
    let at = |at: u64, buffer: &mut [u8]| match file.read_exact_at(buffer, at) {
        Err(why) if why.kind() == io::ErrorKind::UnexpectedEof => Err(other()),
        Err(why) => Err(io_error(why)),
        Ok(()) => Ok(()),
    };
    let mut head = [0; ELF_HEAD_BYTES];
    at(0, &mut head)?;
    if unpack::is_elf(&head) {
        let bytes = std::fs::read(path).map_err(io_error)?;
        return Ok(Kernel { path: path.to_owned(), release: release_in(&bytes), form: Form::Elf });
    }
    let (mut magic, mut place) = ([0; 4], [0; 2]);
    at(MAGIC_AT, &mut magic)?;
    at(VERSION_AT, &mut place)?;
    let place = u64::from(u16::from_le_bytes(place));
    if magic != *MAGIC || place == 0 {
        return Err(other());
    }
    let mut text = [0; VERSION_BYTES_MAX];
    at(SETUP_AT + place, &mut text)?;
    let release: String = text.iter().take_while(|byte| byte.is_ascii_graphic()).map(|byte| char::from(*byte)).collect();
    if release.is_empty() || release.len() == text.len() {
        return Err(other());
    }
    Ok(Kernel { path: path.to_owned(), release, form: Form::BzImage })
}

/// The version in an uncompressed kernel: the first banner that has one behind it, which those that are formats have not.
fn release_in(elf: &[u8]) -> String {
    let mut rest = elf;
    while let Some(at) = rest.iter().position(|byte| *byte == b'L') {
        rest = rest.get(at..).unwrap_or_default();
        if let Some(text) = rest.strip_prefix(BANNER)
            && text.first().is_some_and(u8::is_ascii_digit)
        {
            let graphic = text.iter().take(VERSION_BYTES_MAX).take_while(|byte| byte.is_ascii_graphic());
            return graphic.map(|byte| char::from(*byte)).collect();
        }
        rest = rest.get(1..).unwrap_or_default();
    }
    String::new()
}

/// A version's numbers, to find the newest: `6.1.0-9` comes before `6.1.0-10`.
fn order(name: &str) -> Vec<u64> {
    name.split(|c: char| !c.is_ascii_digit()).filter_map(|digits| digits.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn fake(path: &Path, release: &str) {
        let mut bytes = vec![0; 4096];
        bytes[0x202..0x206].copy_from_slice(MAGIC);
        bytes[0x20e..0x210].copy_from_slice(&0x400u16.to_le_bytes());
        let text = format!("{release} (debian-kernel@lists.debian.org) #1 SMP");
        bytes[0x600..0x600 + text.len()].copy_from_slice(text.as_bytes());
        std::fs::write(path, bytes).unwrap();
    }

    #[test]
    fn the_named_one_or_the_newest() {
        let dir = tempfile::tempdir().unwrap();
        let boot = dir.path().join("boot");
        std::fs::create_dir(&boot).unwrap();
        let mut places = Places { variable: None, cache: Some(dir.path().join("cache")), boot: boot.clone() };
        let why = find(None, &places).unwrap_err().to_string();
        assert!(why.contains("cache/volley/guest/vmlinuz") && why.contains("boot/vmlinuz-*-cloud-amd64"), "{why}");
        for release in ["6.1.0-9-cloud-amd64", "6.1.0-10-cloud-amd64", "6.1.0-99-amd64"] {
            fake(&boot.join(format!("vmlinuz-{release}")), release);
        }
        assert_eq!(find(None, &places).unwrap().release, "6.1.0-10-cloud-amd64");
        let named = dir.path().join("mine");
        fake(&named, "7.0.1");
        places.variable = Some(named.clone());
        assert_eq!(find(None, &places).unwrap(), Kernel { path: named, release: "7.0.1".to_owned(), form: Form::BzImage });
        assert!(matches!(find(Some(&dir.path().join("none")), &places), Err(KernelError::Io { .. })));
    }

    #[test]
    fn what_is_no_kernel() {
        let dir = tempfile::tempdir().unwrap();
        for (name, bytes) in [("empty", vec![]), ("zeros", vec![0; 4096]), ("elf", b"\x7fELF".repeat(2000))] {
            let path = dir.path().join(name);
            std::fs::write(&path, bytes).unwrap();
            assert!(matches!(read(&path), Err(KernelError::Other { .. })), "{name}");
        }
    }

    #[test]
    fn a_vmm_is_given_the_form_that_it_boots() {
        let dir = tempfile::tempdir().unwrap();
        let (packed, plain, to) = (dir.path().join("vmlinuz"), dir.path().join("vmlinux"), dir.path().join("unpacked"));
        fake(&packed, "6.1.0-9");
        let mut elf = unpack::tests::kernel();
        elf.extend_from_slice(b"Linux version %s (...)\0Linux version 6.1.0-9 (debian-kernel)\0");
        std::fs::write(&plain, &elf).unwrap();
        let found = read(&plain).unwrap();
        assert_eq!((found.release.as_str(), found.form), ("6.1.0-9", Form::Elf));
        assert_eq!(found.clone().unpacked(&to).unwrap(), found);
        assert!(!to.exists());
        assert!(found.packed().unwrap_err().to_string().ends_with("QEMU wants its bzImage (vmlinuz)"));
        let found = read(&packed).unwrap();
        assert_eq!(found.clone().packed().unwrap(), found);
        // It has nothing in it.
        let why = found.unpacked(&to).unwrap_err().to_string();
        assert!(
            why.contains("does not say where in it the kernel is") && why.ends_with("name its vmlinux with VOLLEY_GUEST_KERNEL"),
            "{why}"
        );
        let mut image = unpack::tests::image(&elf);
        image[0x20e..0x210].copy_from_slice(&0x100u16.to_le_bytes());
        image[0x300..0x308].copy_from_slice(b"6.1.0-9 ");
        std::fs::write(&packed, image).unwrap();
        let unpacked = read(&packed).unwrap().unpacked(&to).unwrap();
        assert_eq!((unpacked.release.as_str(), unpacked.form), ("6.1.0-9", Form::Elf));
        assert_eq!(std::fs::read(&to).unwrap(), elf);
    }

    #[test]
    fn a_real_kernel() {
        match find(None, &Places::of_process()) {
            Ok(kernel) => {
                assert!(kernel.release.starts_with(|c: char| c.is_ascii_digit()), "{kernel:?}");
                let dir = tempfile::tempdir().unwrap();
                let begin = std::time::Instant::now();
                let unpacked = kernel.clone().unpacked(&dir.path().join("vmlinux")).unwrap_or_else(|why| panic!("{why}"));
                eprintln!("{} unpacked in {:?}", kernel.release, begin.elapsed());
                // What it says itself is what its image said of it.
                assert_eq!(read(&unpacked.path).unwrap(), unpacked);
            }
            Err(KernelError::None { .. }) => eprintln!("skipped: no guest kernel"),
            Err(why) => panic!("{why}"),
        }
    }
}
