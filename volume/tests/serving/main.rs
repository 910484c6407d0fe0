//! Volumes as they are served: on a socket and as a file, to clients of our own and to everybody else's.
//!
//! What needs root, FUSE, loop devices, QEMU's or libnbd's tools says what is missing and is skipped.
#![expect(clippy::unwrap_used, reason = "a test says with a panic that it failed")]

mod client;
mod device;
mod file;
mod process;
mod replay;
mod requests;
mod restart;
mod sockets;
mod speed;
mod tools;

use std::time::{Duration, Instant};

/// Waits for something that comes soon.
#[track_caller]
pub fn soon(what: &str, mut there: impl FnMut() -> bool) {
    let begin = Instant::now();
    while !there() {
        assert!(begin.elapsed() < Duration::from_secs(60), "{what} did not come");
        std::thread::sleep(Duration::from_millis(2));
    }
}

/// Is this root?
pub fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Are these programs here? Says which is not.
pub fn have(programs: &[&str]) -> bool {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let mut dirs: Vec<_> = std::env::split_paths(&path).collect();
    dirs.extend(["/usr/sbin".into(), "/sbin".into()]);
    let missing = programs.iter().find(|program| !dirs.iter().any(|dir| dir.join(program).exists()));
    if let Some(missing) = missing {
        println!("skipped: no {missing} here");
    }
    missing.is_none()
}

/// A byte that tells where it is and what wrote it.
pub fn pattern(offset: u64, seed: u8) -> u8 {
    ((offset / 512).wrapping_mul(31) as u8).wrapping_add(offset as u8).wrapping_add(seed)
}

/// Such bytes.
pub fn patterns(offset: u64, len: usize, seed: u8) -> Vec<u8> {
    (offset..offset + len as u64).map(|at| pattern(at, seed)).collect()
}
