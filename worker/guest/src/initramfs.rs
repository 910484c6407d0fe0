//! The initial RAM disk a machine boots the agent from.
//!
//! Owns the archive ("newc", as the kernel's Documentation/driver-api/early-userspace/buffer-format.rst describes it), which modules go
//! in, and where the agent's binary is found. Does not own the kernel or the command line.

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::agent::boot::{MODULES_DIR, MODULES_LIST};

/// The modules a machine needs: its bus, disk, channel and root. Those a kernel has built in are left out.
pub const MODULES: [&str; 8] =
    ["virtio_pci", "virtio_mmio", "virtio_blk", "virtio_console", "vmw_vsock_virtio_transport", "overlay", "erofs", "ext4"];
/// Names the agent's binary where it does not lie beside the program.
pub const AGENT_VARIABLE: &str = "VOLLEY_GUEST_AGENT";
/// The name of its file.
pub const AGENT_NAME: &str = "volley-guest";

const DIRECTORY: u32 = 0o040_755;
const FILE: u32 = 0o100_000;
const SYMLINK: u32 = 0o120_777;

/// Why a RAM disk can't be built.
#[derive(Debug, thiserror::Error)]
pub enum InitramfsError {
    /// The agent's binary is not there.
    #[error("no agent for machines: {path} is not there; build it (`cargo build -p volley-guest`) or name it in {AGENT_VARIABLE}")]
    NoAgent {
        /// Where it was looked for.
        path: PathBuf,
    },
    /// It would not start in a RAM disk.
    #[error(
        "{path} is linked to libraries, which neither a RAM disk nor every container has; build it where the static C library is installed"
    )]
    NotStatic {
        /// Which.
        path: PathBuf,
    },
    /// A module is missing.
    #[error("the kernel's modules in {dir} have no {name}, nor does it say that it is built in")]
    NoModule {
        /// The directory.
        dir: PathBuf,
        /// The module.
        name: String,
    },
    /// A file can't be read.
    #[error("can't read {path}: {source}")]
    Read {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// Builds a RAM disk: the agent as the first program, and modules of the kernel it is for. `modules` is that kernel's directory
/// (`/lib/modules/VERSION`); none when it has everything built in. `names` are those that go in, usually [`MODULES`], with what they need.
///
/// # Errors
/// [`InitramfsError`].
pub fn build(agent: &Path, modules: Option<&Path>, names: &[&str]) -> Result<Vec<u8>, InitramfsError> {
    let binary = read(agent)?;
    if !is_static(&binary) {
        return Err(InitramfsError::NotStatic { path: agent.to_owned() });
    }
    let mut archive = Archive::new();
    archive.file(Path::new("/init"), &binary, 0o755);
    if let Some(dir) = modules {
        let mut list = String::new();
        for file in load_order(dir, names)? {
            let name = file.file_name().unwrap_or_default();
            archive.file(&Path::new(MODULES_DIR).join(name), &read(&file)?, 0o644);
            list.push_str(&name.to_string_lossy());
            list.push('\n');
        }
        archive.file(&Path::new(MODULES_DIR).join(MODULES_LIST), list.as_bytes(), 0o644);
    }
    Ok(archive.finish())
}

/// The agent's binary: what the environment names, or beside this program, where a build and a package put it.
///
/// # Errors
/// [`InitramfsError::NoAgent`].
pub fn find_agent() -> Result<PathBuf, InitramfsError> {
    if let Some(path) = std::env::var_os(AGENT_VARIABLE).map(PathBuf::from) {
        return if path.is_file() { Ok(path) } else { Err(InitramfsError::NoAgent { path }) };
    }
    let program = std::env::current_exe().unwrap_or_default();
    // A test lies one directory further down.
    let places: Vec<PathBuf> = program.ancestors().skip(1).take(2).map(|dir| dir.join(AGENT_NAME)).collect();
    match places.iter().find(|path| path.is_file()) {
        Some(path) => Ok(path.clone()),
        None => Err(InitramfsError::NoAgent { path: places.into_iter().next().unwrap_or_default() }),
    }
}

/// Looks that the agent's binary needs no libraries.
///
/// # Errors
/// [`InitramfsError::NotStatic`], or that it can't be read.
pub fn check_static(agent: &Path) -> Result<(), InitramfsError> {
    if is_static(&read(agent)?) { Ok(()) } else { Err(InitramfsError::NotStatic { path: agent.to_owned() }) }
}

fn read(path: &Path) -> Result<Vec<u8>, InitramfsError> {
    fs::read(path).map_err(|source| InitramfsError::Read { path: path.to_owned(), source })
}

/// Does this ELF file need neither an interpreter nor libraries?
#[must_use]
pub fn is_static(elf: &[u8]) -> bool {
    /// Program header types of elf.h, and the dynamic tag of a needed library.
    const PT_DYNAMIC: u64 = 2;
    const PT_INTERP: u64 = 3;
    const DT_NEEDED: u64 = 1;
    let number = |at: usize, len: usize| -> Option<u64> {
        let bytes = elf.get(at..at.checked_add(len)?)?;
        Some(bytes.iter().rev().fold(0, |sum, byte| sum << 8 | u64::from(*byte)))
    };
    let place = |at, len| number(at, len).and_then(|n| usize::try_from(n).ok());
    // 64 bits, little end first.
    if elf.get(..6) != Some(b"\x7fELF\x02\x01") {
        return false;
    }
    let (Some(heads), Some(size), Some(count)) = (place(32, 8), place(54, 2), place(56, 2)) else { return false };
    (0..count).all(|head| {
        let head = heads.saturating_add(head.saturating_mul(size));
        match number(head, 4) {
            None | Some(PT_INTERP) => false,
            Some(PT_DYNAMIC) => match (place(head.saturating_add(8), 8), place(head.saturating_add(32), 8)) {
                (Some(from), Some(len)) => {
                    (0..len / 16).all(|tag| number(from.saturating_add(tag * 16), 8).is_some_and(|tag| tag != DT_NEEDED))
                }
                _ => false,
            },
            Some(_) => true,
        }
    })
}

/// The files of these modules and of those they need, in the order in which they are loaded.
///
/// # Errors
/// [`InitramfsError`].
pub fn load_order(dir: &Path, names: &[&str]) -> Result<Vec<PathBuf>, InitramfsError> {
    let mut files = Vec::new();
    find_modules(dir, &mut files).map_err(|source| InitramfsError::Read { path: dir.to_owned(), source })?;
    files.sort();
    let built_in = fs::read_to_string(dir.join("modules.builtin")).unwrap_or_default();
    let built_in: BTreeSet<String> = built_in.lines().filter_map(|line| module_name(Path::new(line))).collect();
    let mut order = Vec::new();
    let mut seen = BTreeSet::new();
    // Each is looked at twice: first for what it needs, then it is taken.
    let mut stack: Vec<(String, bool)> = names.iter().rev().map(|name| ((*name).to_owned(), false)).collect();
    while let Some((name, ready)) = stack.pop() {
        let Some(file) = files.iter().find(|file| module_name(file).as_ref() == Some(&name)) else {
            if built_in.contains(&name) {
                continue;
            }
            return Err(InitramfsError::NoModule { dir: dir.to_owned(), name });
        };
        if ready {
            order.push(file.clone());
        } else if seen.insert(name.clone()) {
            stack.push((name, true));
            stack.extend(needs(&read(file)?).into_iter().map(|needed| (needed, false)));
        }
    }
    Ok(order)
}

fn find_modules(dir: &Path, files: &mut Vec<PathBuf>) -> io::Result<()> {
    for entry in fs::read_dir(dir)? {
        let entry = entry?;
        if entry.file_type()?.is_dir() {
            find_modules(&entry.path(), files)?;
        } else if entry.path().extension().is_some_and(|extension| extension == "ko") {
            files.push(entry.path());
        }
    }
    Ok(())
}

/// A module's name: its file's, where - and _ are one.
fn module_name(file: &Path) -> Option<String> {
    Some(file.file_stem()?.to_str()?.replace('-', "_"))
}

/// What a module says of itself that it needs: `depends=a,b` among the texts of its .modinfo section, each ended by a zero.
fn needs(module: &[u8]) -> Vec<String> {
    let text = module.split(|byte| *byte == 0).find_map(|text| text.strip_prefix(b"depends="));
    let text = String::from_utf8_lossy(text.unwrap_or_default()).into_owned();
    text.split(',').filter(|name| !name.is_empty()).map(|name| name.replace('-', "_")).collect()
}

/// An archive of the "newc" form, being written.
#[derive(Debug, Default)]
pub struct Archive {
    bytes: Vec<u8>,
    known: BTreeSet<PathBuf>,
}

impl Archive {
    /// An empty one.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// Was this path added?
    #[must_use]
    pub fn has(&self, path: &Path) -> bool {
        self.known.contains(path)
    }

    /// Adds a directory, with those it lies in.
    pub fn dir(&mut self, path: &Path) {
        if let Some(parent) = path.parent() {
            self.dir(parent);
            if !self.has(path) {
                self.entry(path, DIRECTORY, &[]);
            }
        }
    }

    /// Adds a file of less than 4 GiB, with the directories it lies in.
    pub fn file(&mut self, path: &Path, bytes: &[u8], mode: u32) {
        if let Some(parent) = path.parent() {
            self.dir(parent);
        }
        self.entry(path, FILE | mode, bytes);
    }

    /// Adds a symbolic link, with the directories it lies in.
    pub fn symlink(&mut self, path: &Path, target: &str) {
        if let Some(parent) = path.parent() {
            self.dir(parent);
        }
        self.entry(path, SYMLINK, target.as_bytes());
    }

    /// The whole archive.
    #[must_use]
    pub fn finish(mut self) -> Vec<u8> {
        self.entry(Path::new("/TRAILER!!!"), 0, &[]);
        self.bytes
    }

    /// Appends one entry: a head of 13 numbers, the name, the bytes; name and bytes end at multiples of 4.
    fn entry(&mut self, path: &Path, mode: u32, bytes: &[u8]) {
        let name = path.as_os_str().as_encoded_bytes();
        let name = name.strip_prefix(b"/").unwrap_or(name);
        let (name_len, len) = (name.len() + 1, bytes.len());
        let number = self.known.len() + 1;
        let head = format!("070701{number:08x}{mode:08x}{:016x}{:08x}{:08x}{len:08x}{:032x}{name_len:08x}{:08x}", 0, 1, 0, 0, 0);
        self.bytes.extend_from_slice(head.as_bytes());
        self.bytes.extend_from_slice(name);
        self.bytes.push(0);
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
        self.bytes.extend_from_slice(bytes);
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
        self.known.insert(path.to_owned());
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn modules_come_behind_what_they_need() {
        let dir = tempfile::tempdir().unwrap();
        let module = |path: &str, needs: &str| {
            let path = dir.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, format!("\x7fELF\0license=GPL\0depends={needs}\0name=x\0")).unwrap();
        };
        module("drivers/virtio/virtio_pci.ko", "virtio-ring,virtio");
        module("drivers/virtio/virtio.ko", "");
        module("drivers/virtio/virtio-ring.ko", "virtio");
        module("drivers/block/virtio_blk.ko", "virtio_ring,virtio");
        fs::write(dir.path().join("modules.builtin"), "kernel/fs/ext4/ext4.ko\n").unwrap();
        let order = load_order(dir.path(), &["virtio_pci", "ext4", "virtio_blk"]).unwrap();
        let names: Vec<_> = order.iter().map(|file| module_name(file).unwrap()).collect();
        assert_eq!(names, ["virtio", "virtio_ring", "virtio_pci", "virtio_blk"]);
        assert!(matches!(load_order(dir.path(), &["erofs"]), Err(InitramfsError::NoModule { .. })));
    }

    #[test]
    fn this_program_is_not_static() {
        assert!(!is_static(&fs::read(std::env::current_exe().unwrap()).unwrap()));
        assert!(!is_static(b"#!/bin/sh\n"));
        assert!(!is_static(b"\x7fELF\x02\x01"));
    }
}
