//! Volumes of a worker with all that is real: the server and what shows files in processes of their own, S3 over HTTP, FUSE, loop devices, ext4, QEMU's tools.
//!
//! Most of it takes root, FUSE and loop devices; without, a test says what is missing and is skipped. Each has a worker's directory and a bucket of its own.
#![expect(clippy::unwrap_used, reason = "a test says with a panic that it failed")]

mod disks;
mod kills;
mod mounts;
mod programs;
mod stopped;
mod world;
