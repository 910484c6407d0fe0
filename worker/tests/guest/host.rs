//! What this machine has for guests: QEMU, a kernel with modules, busybox.
//!
//! Owns finding them and putting programs into a guest's RAM disk.

use std::path::{Path, PathBuf};
use std::process::Command;

use volley_guest::initramfs::Archive;

/// The programs of this machine that make a guest.
pub struct Host {
    pub qemu: PathBuf,
    pub busybox: PathBuf,
    pub kernel: PathBuf,
}

impl Host {
    /// Finds them, or says what is missing. `tests/run` installs all of them.
    pub fn find() -> Result<Self, String> {
        let program = |name: &str| {
            let path = std::env::var_os("PATH").unwrap_or_default();
            let found = std::env::split_paths(&path).map(|dir| dir.join(name)).find(|file| file.is_file());
            found.ok_or_else(|| format!("no {name} in PATH"))
        };
        Ok(Self {
            qemu: program("qemu-system-x86_64")?,
            busybox: program("busybox")?,
            kernel: part("VOLLEY_GUEST_KERNEL", "vmlinuz").filter(|file| file.is_file()).ok_or("no guest kernel (VOLLEY_GUEST_KERNEL)")?,
        })
    }
}

/// Where a part of a guest lies: as the environment says, or where `tests/run` puts it.
pub fn part(variable: &str, name: &str) -> Option<PathBuf> {
    std::env::var_os(variable).map(PathBuf::from).or_else(|| {
        let cache = std::env::var_os("XDG_CACHE_HOME").map(PathBuf::from);
        let cache = cache.or_else(|| Some(Path::new(&std::env::var_os("HOME")?).join(".cache")))?;
        Some(cache.join("volley/guest").join(name))
    })
}

/// Adds a program of this machine to a RAM disk, with the libraries it loads.
pub fn add_program(disk: &mut Archive, from: &Path, to: &str) {
    let read = |path: &Path| std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
    disk.file(Path::new(to), &read(from), 0o755);
    // One that is linked statically has none, and says so on stderr.
    let listed = Command::new("ldd").arg(from).output().expect("ldd");
    let listed = String::from_utf8_lossy(&listed.stdout).into_owned();
    for library in listed.split_whitespace().filter(|word| word.starts_with('/')).map(Path::new) {
        if !disk.has(library) {
            disk.file(library, &read(library), 0o755);
        }
    }
}
