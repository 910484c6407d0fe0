//! The benches of machines: `tests/bench/run firecracker-restore|qemu-restore|task-overhead|standby-memory|restore-leaks`.
//!
//! Owns which there are. Each compares the drivers and the tier with the same steps done by hand (`bare`), on the real QEMU with a real
//! Linux guest and on the real Firecracker with the tiny guest of the tests. What can't be measured here says why.
#![expect(clippy::unwrap_used, reason = "a bench: a panic ends it with a place")]

mod bare;
#[expect(dead_code, reason = "shared with the benches of jobs, whose lines have no limits")]
#[path = "../figures.rs"]
mod figures;
#[expect(dead_code, reason = "shared with tests that start QEMU themselves")]
#[path = "../../../worker/tests/guest/host.rs"]
mod host;
#[expect(dead_code, reason = "shared with the tests of the tier")]
#[path = "../../../worker/tests/microvm/image.rs"]
mod image;
mod keeping;
mod limits;
#[expect(dead_code, reason = "shared with the tests of the drivers")]
#[path = "../../../worker/tests/vmm/linux.rs"]
mod linux;
#[path = "../../../worker/tests/microvm/prepared.rs"]
mod prepared;
mod restore;
mod tasks;
#[expect(dead_code, reason = "shared with the tests of the drivers")]
#[path = "../../../worker/tests/vmm/tiny.rs"]
mod tiny;
#[path = "../../../worker/tests/vmm/tiny_guest/mod.rs"]
mod tiny_guest;

use std::time::Duration;

use volley_worker::vmm::spawner::MachineSpawner;

/// For what must not hang.
pub const SOON: Duration = Duration::from_secs(60);

const NAMES: [&str; 5] = ["firecracker-restore", "qemu-restore", "task-overhead", "standby-memory", "restore-leaks"];

fn main() {
    let name = std::env::args().nth(1);
    if name.as_deref().is_some_and(|name| !NAMES.contains(&name)) {
        eprintln!("usage: tests/bench/run [NAME], NAME one of {NAMES:?}");
        std::process::exit(2);
    }
    // While this process is small and has one thread.
    let spawner = match MachineSpawner::start() {
        Ok(spawner) => spawner,
        Err(why) => {
            eprintln!("skipped: {why}");
            return;
        }
    };
    limits::heading();
    for each in NAMES.into_iter().filter(|each| name.as_deref().is_none_or(|name| name == *each)) {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            match each {
                "firecracker-restore" => restore::firecracker(&spawner).await,
                "qemu-restore" => restore::qemu(&spawner).await,
                "task-overhead" => tasks::overhead(&spawner).await,
                "standby-memory" => keeping::standby_memory(&spawner).await,
                _ => keeping::restore_leaks(&spawner).await,
            }
        });
        runtime.shutdown_timeout(Duration::from_secs(2));
    }
}

/// In milliseconds.
pub fn ms(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}
