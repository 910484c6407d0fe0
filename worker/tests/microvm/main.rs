//! Tasks in machines of their own: real QEMU, a real Linux guest, the whole worker; and the same on the real Firecracker, with a guest of our
//! own that speaks the agent's protocol.
#![expect(clippy::unwrap_used, reason = "a test says with a panic that it failed")]

mod bad_days;
mod ends;
mod exec;
mod files;
mod firecracker;
mod groups;
#[path = "../guest/mod.rs"]
mod guest;
mod hard;
#[expect(dead_code, clippy::duplicate_mod, reason = "shared with tests that start QEMU themselves, and `guest` has it too")]
#[path = "../guest/host.rs"]
mod host;
mod image;
mod kept;
#[expect(dead_code, reason = "shared with the tests of the drivers")]
#[path = "../vmm/linux.rs"]
mod linux;
mod linux_on_firecracker;
#[expect(dead_code, reason = "shared with tests of leases")]
#[path = "../nats/mod.rs"]
mod nats;
mod prepared;
mod shell;
mod siblings;
mod still;
#[expect(dead_code, reason = "shared with tests of other tiers")]
#[path = "../support/mod.rs"]
mod support;
mod templates;
#[path = "../vmm/tiny_guest/mod.rs"]
mod tiny_guest;
mod unconfined;
mod unconfirmed;
mod unlike;
mod warm_up;

use std::time::Duration;

use volley_jobspecs::failure::FailureClass;
use volley_jobspecs::ids::JobId;
use volley_jobspecs::wire::plan::Isolation;
use volley_jobspecs::wire::report::{AttemptEnd, Ending};
use volley_jobspecs::wire::work::AtStage;
use volley_worker::Config;
use volley_worker::vmm::spawner::MachineSpawner;

use support::World;

/// For what must not hang.
pub const SOON: Duration = Duration::from_secs(60);

/// A worker with machines; or none, and what is missing is printed.
async fn world(change: impl FnOnce(&mut Config)) -> Option<(World, String)> {
    let dir = tempfile::tempdir().unwrap();
    match image::busybox(&dir.path().join("images")).await {
        Ok(image) => {
            let world = World::start_in(dir, |config| {
                config.isolation = vec![Isolation::Process, Isolation::Microvm];
                change(config);
            });
            Some((world.await, image))
        }
        Err(why) => {
            eprintln!("skipped: {why}");
            None
        }
    }
}

/// A spawner of the test's own; or none, and the reason is printed.
fn spawner() -> Option<MachineSpawner> {
    MachineSpawner::start().map_err(|why| eprintln!("skipped: {why}")).ok()
}

/// Does a task's command run?
fn is_running(w: &World, job: JobId) -> bool {
    w.last_beat().at.iter().any(|at| at.name.job == job && at.stage == AtStage::Running)
}

/// Starts a task and waits until its command runs.
async fn begin(w: &mut World, task: &str) -> JobId {
    let (job, _) = w.job(r#"{"count":1}"#, task);
    let (_, order) = w.bundle(job, 0, 1);
    w.order(vec![order]).await;
    w.until("the command", |w| is_running(w, job)).await;
    job
}

/// A task's JSON.
fn task(image: &str, rest: &str) -> String {
    format!(r#"{{"isolation":"microvm","image":"{image}","resources":{{"memory":"64MiB"}},"timeouts":{{"start":"80s"}},{rest}}}"#)
}

fn failed(class: FailureClass) -> Ending {
    Ending::Failed(class)
}

fn message(end: &AttemptEnd) -> &str {
    end.message.as_deref().unwrap_or_default()
}

/// The children of a process.
fn children(pid: u32) -> Vec<u32> {
    let all = std::fs::read_dir("/proc").unwrap().flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let parent = |pid: u32| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse::<u32>().ok()
    };
    all.filter(|child| parent(*child) == Some(pid)).collect()
}
