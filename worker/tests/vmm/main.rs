//! Machines on the real VMMs: QEMU with a Linux guest, Firecracker with a tiny guest of our own, and what their processes can't do.

#![expect(clippy::unwrap_used, reason = "a failed step of a test ends the test")]

mod confined;
mod firecracker;
#[expect(dead_code, reason = "shared with tests that start QEMU themselves")]
#[path = "../guest/host.rs"]
mod host;
mod linux;
mod nbd;
mod qemu;
#[expect(dead_code, reason = "shared with benches")]
mod tiny;
mod tiny_guest;

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use volley_worker::vmm::Snapshot;
use volley_worker::vmm::files::{Frozen, in_memory};
use volley_worker::vmm::spawner::MachineSpawner;

/// For what must not hang, on a busy machine.
pub const SOON: Duration = Duration::from_secs(60);

/// A spawner that shuts off everything, or none, and the reason is printed.
pub fn spawner() -> Option<MachineSpawner> {
    let spawner = match MachineSpawner::start() {
        Ok(spawner) => spawner,
        Err(why) => {
            eprintln!("skipped: {why}");
            return None;
        }
    };
    match spawner.missing().as_slice() {
        [] => Some(spawner),
        missing => {
            eprintln!("skipped: can't shut off {}", missing.join(", "));
            None
        }
    }
}

/// What this process holds: descriptors by what they are, and its children and theirs.
#[derive(Debug, PartialEq, Eq, Clone)]
pub struct Held {
    pub files: BTreeMap<String, usize>,
    pub processes: usize,
}

impl Held {
    pub fn now(spawner: &MachineSpawner) -> Self {
        let mut files = BTreeMap::new();
        for entry in std::fs::read_dir("/proc/self/fd").unwrap().flatten() {
            // Without the numbers: the kind is what counts.
            let name = std::fs::read_link(entry.path()).unwrap_or_default().to_string_lossy().into_owned();
            *files.entry(name.split('[').next().unwrap_or_default().to_owned()).or_default() += 1;
        }
        Self { files, processes: children(spawner.pid()).len() }
    }
}

/// The children of a process.
pub fn children(pid: u32) -> Vec<u32> {
    let all = std::fs::read_dir("/proc").unwrap().flatten().filter_map(|entry| entry.file_name().to_str()?.parse::<u32>().ok());
    let parent = |pid: u32| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse::<u32>().ok()
    };
    all.filter(|child| parent(*child) == Some(pid)).collect()
}

/// A snapshot whose state is something else.
pub fn with_state(snapshot: &Snapshot, bytes: &[u8]) -> Snapshot {
    let mut file = in_memory("test").unwrap();
    std::io::Write::write_all(&mut file, bytes).unwrap();
    Snapshot { state: Arc::new(Frozen::seal(file).unwrap()), ..snapshot.clone() }
}

/// States that no VMM should load: nothing, half of one, one with changed bytes in it, and no state at all.
pub fn broken_states(snapshot: &Snapshot) -> Vec<Vec<u8>> {
    let mut state = vec![0; usize::try_from(snapshot.state.bytes().unwrap()).unwrap()];
    snapshot.state.read_at(&mut state, 0).unwrap();
    let half = state[..state.len() / 2].to_vec();
    let junk = b"no state of any machine".repeat(1000);
    state[..4096].iter_mut().for_each(|byte| *byte ^= 0x55);
    vec![Vec::new(), half, state, junk]
}

/// The memory a process takes, what it shares divided among those it shares it with; in KiB.
pub fn pss_kib(pid: u32) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).unwrap();
    text.lines().find_map(|line| line.strip_prefix("Pss:")?.trim().strip_suffix(" kB")?.trim().parse::<u64>().ok()).unwrap()
}

/// The middle of what was measured.
pub fn median(mut all: Vec<Duration>) -> Duration {
    all.sort();
    all[all.len() / 2]
}
