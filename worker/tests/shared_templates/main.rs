//! Templates shared over a real S3 server and a real nats-server, and run by a real QEMU, and the real Firecracker.
//!
//! What is missing on a machine is said, and its tests pass.
#![expect(clippy::unwrap_used, reason = "a test says with a panic that it failed")]

mod bucket;
mod depot;
mod firecracker;
#[expect(dead_code, reason = "shared with tests that start QEMU themselves")]
#[path = "../guest/host.rs"]
mod host;
#[path = "../microvm/image.rs"]
#[expect(dead_code, reason = "shared with tests of tasks")]
mod image;
mod index;
mod leases;
mod measured;
#[path = "../nats/mod.rs"]
mod nats;
#[path = "../s3/mod.rs"]
mod s3;
#[expect(dead_code, reason = "shared with tests of other tiers")]
#[path = "../support/mod.rs"]
mod support;
mod taken_over;
mod tasks;
#[path = "../vmm/tiny_guest/mod.rs"]
mod tiny_guest;
mod workers;
