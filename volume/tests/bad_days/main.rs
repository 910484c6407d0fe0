//! Bad days of a volume, on a bucket of the real client's: S3 that is away, disks that are full, bits that flip, ranges as large as a disk. Each compares bytes.
//!
//! `OUTAGE_SECS=60 cargo test -p volley-volume --test bad_days outage` lets S3 be away for longer than the 3 s of a usual run.
#![expect(clippy::unwrap_used, reason = "a test says with a panic that it failed")]

#[path = "../support/mod.rs"]
mod support;

mod engine;
mod flips;
mod full;
mod outage;
mod ranges;

use std::path::Path;

use support::World;
use volley_volume::device::Device;
use volley_volume::{Promotion, Volume};

/// All of a volume, or a part.
pub fn read(volume: &Volume, offset: u64, len: usize) -> Vec<u8> {
    let mut into = vec![7; len];
    volume.read(offset, &mut into).unwrap();
    into
}

/// What was written is let go and accepted.
pub fn accept(world: &World, volume: Volume, base: u64) {
    let id = volume.id();
    let root = volume.detach().unwrap().0.digest();
    world.host("accepts", support::quiet()).0.promote(&Promotion { volume: id, attempt: None, base, root }).unwrap();
}

/// A directory and all in it, once more.
pub fn copy(from: &Path, to: &Path) {
    std::fs::create_dir_all(to).unwrap();
    for entry in std::fs::read_dir(from).unwrap() {
        let entry = entry.unwrap();
        let name = to.join(entry.file_name());
        if entry.file_type().unwrap().is_dir() {
            copy(&entry.path(), &name);
        } else {
            std::fs::copy(entry.path(), name).unwrap();
        }
    }
}
