//! `standby-memory`, `restore-leaks`: what machines that wait cost, and what those that are gone leave.

use std::collections::BTreeMap;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use volley_jobspecs::wire::guest::{Furnish, Mount};
use volley_worker::cgroup::{Cgroups, Limits};
use volley_worker::guest::Guest;
use volley_worker::machines::ScratchDisks;
use volley_worker::machines::groups::Groups;
use volley_worker::standby::Standing;
use volley_worker::vmm::spawner::MachineSpawner;
use volley_worker::vmm::{Disk, Kind, Slot, Snapshot, Source, Vm, Vmm};

use crate::limits::{Limit, line, pair};
use crate::linux::{self, Linux, qemu};
use crate::tiny::Tiny;
use crate::{SOON, ms};

/// Clones that wait at once.
const CLONES: usize = 32;
/// Restores in a row.
const RESTORES: usize = 1_000;
/// Size of the disk that each of them has, and writes to where its guest can.
const SCRATCH_BYTES: u64 = 64 << 20;
const WRITES: &str = "head -c 1048576 /dev/zero > /volley/file; sync";
/// The worker's memory afterwards, of what it was before.
const FLAT: Limit = Limit::RatioAtMost(1.05);
/// After so many nothing grows that is filled at first use.
const WARM: usize = 50;

/// Saved machines of both VMMs, by the limit of MiB that a clone may take beside its own pages.
async fn saved(spawner: &MachineSpawner) -> Vec<(&'static str, Box<dyn Vmm>, Snapshot, f64)> {
    let mut all: Vec<(&'static str, Box<dyn Vmm>, Snapshot, f64)> = Vec::new();
    if let (Some(qemu), Some(linux)) = (qemu(spawner).await, Linux::find().await) {
        let vm = qemu.boot(linux.boot("")).await.unwrap();
        let guest = linux::session(vm.connect().await.unwrap(), 1, false).await;
        let (_, stream) = guest.prepare_snapshot(false).await.unwrap();
        let snapshot = vm.snapshot().await.unwrap();
        drop(stream);
        all.push(("qemu", Box::new(qemu), snapshot, 24.0));
    }
    if let Some(tiny) = Tiny::find(spawner).await {
        let snapshot = tiny.saved().await;
        all.push(("firecracker", Box::new(tiny.vmm), snapshot, 4.0));
    }
    all
}

/// What a process takes, in MiB: all (what is shared divided), and of that its own copies of guest memory.
fn memory(vm: &dyn Vm) -> (f64, f64) {
    let text = std::fs::read_to_string(format!("/proc/{}/smaps", vm.pid())).unwrap();
    let (mut all, mut own, mut guest) = (0, 0, false);
    for line in text.lines() {
        let mut words = line.split_whitespace();
        let (Some(name), Some(value)) = (words.next(), words.next()) else { continue };
        match (name, value.parse::<u64>()) {
            ("Pss:", Ok(kib)) => all += kib,
            ("Anonymous:", Ok(kib)) if guest => own += kib,
            (name, _) if !name.ends_with(':') => guest = line.contains("volley-memory"),
            _ => {}
        }
    }
    (all as f64 / 1024.0, own as f64 / 1024.0)
}

pub async fn standby_memory(spawner: &MachineSpawner) {
    for (name, vmm, snapshot, limit) in saved(spawner).await {
        let mut waiting = Vec::new();
        for _ in 0..CLONES {
            waiting.push(vmm.restore(&snapshot, &[]).await.unwrap());
        }
        let each: Vec<(f64, f64)> = waiting.iter().map(|vm| memory(&**vm)).collect();
        let beside: Vec<f64> = each.iter().map(|(all, own)| all - own).collect();
        pair(&format!("standby {name} MiB beside pages"), &beside, None, Some(Limit::AtMost(limit)));
        let own: Vec<f64> = each.iter().map(|(_, own)| *own).collect();
        let memory = [snapshot.size.memory_bytes as f64 / 1_048_576.0];
        pair(&format!("standby {name} MiB own pages"), &own, Some(&memory), None);
        for vm in waiting {
            vm.kill().await.unwrap();
        }
    }
}

/// What there is: descriptors of this process by kind, and of the spawner, processes, mounts, directories of machines, cgroups.
fn there(spawner: &MachineSpawner, scratch: &Path) -> BTreeMap<String, usize> {
    let mut all = BTreeMap::new();
    let proc = |rest: &str| format!("/proc/{}/{rest}", spawner.pid());
    let count = |dir: &str| std::fs::read_dir(dir).map_or(0, Iterator::count);
    for entry in std::fs::read_dir("/proc/self/fd").unwrap().flatten() {
        let name = std::fs::read_link(entry.path()).unwrap_or_default().to_string_lossy().into_owned();
        *all.entry(format!("fd {}", name.split('[').next().unwrap_or_default())).or_default() += 1;
    }
    all.insert("fds of the spawner".to_owned(), count(&proc("fd")));
    all.insert("children of the spawner".to_owned(), children(&proc(&format!("task/{}/children", spawner.pid()))));
    all.insert("mounts".to_owned(), std::fs::read_to_string(proc("mountinfo")).unwrap().lines().count());
    // Others on the host mount and make cgroups too: what is counted is ours.
    let ours = scratch.to_string_lossy();
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    all.insert("mounts of the host".to_owned(), mounts.lines().filter(|line| line.contains(&*ours) || line.contains("volley")).count());
    all.insert("directories of machines".to_owned(), count(&proc("root/m")));
    all.insert("files of scratch disks".to_owned(), count(&scratch.to_string_lossy()));
    all.insert("cgroups".to_owned(), cgroups_below(Path::new("/sys/fs/cgroup"), &cgroups_name(), false));
    all
}

/// What the cgroups of this bench are called.
fn cgroups_name() -> String {
    format!("volley-bench-{}", std::process::id())
}

/// Cgroups that lie in one of this name, wherever in the host's tree it is.
fn cgroups_below(dir: &Path, name: &str, inside: bool) -> usize {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let dirs = entries.filter(|entry| entry.file_type().is_ok_and(|kind| kind.is_dir()));
    dirs.map(|entry| {
        let inside = inside || entry.file_name().to_string_lossy().contains(name);
        usize::from(inside) + cgroups_below(&entry.path(), name, inside)
    })
    .sum()
}

fn children(path: &str) -> usize {
    std::fs::read_to_string(path).unwrap_or_default().split_whitespace().count()
}

fn resident_kib() -> f64 {
    let text = std::fs::read_to_string("/proc/self/status").unwrap();
    text.lines().find_map(|line| line.strip_prefix("VmRSS:")?.trim().strip_suffix(" kB")?.trim().parse().ok()).unwrap()
}

/// How long one took.
struct Took {
    /// Its cgroup: to be had, and to get a task's limits.
    limits: Duration,
    /// All, from nothing to nothing.
    all: Duration,
}

/// A restore as a task has it, with a scratch disk that is written to.
async fn once(vmm: &dyn Vmm, snapshot: &Snapshot, n: usize, groups: &Groups, disks: &ScratchDisks) -> Took {
    let begun = Instant::now();
    let mut group = groups.take().unwrap();
    let taken = begun.elapsed();
    let mut scratch = disks.make(SCRATCH_BYTES).await.unwrap();
    let mut vm = vmm.restore(snapshot, &group.join_files()).await.unwrap();
    let bytes = scratch.bytes;
    vm.swap(Slot::SCRATCH, Disk { source: Source::File(scratch.file.take().unwrap()), bytes }).await.unwrap();
    drop(scratch);
    vm.resume().await.unwrap();
    let begin = Instant::now();
    group.limit(Limits { memory_bytes: Some(snapshot.size.memory_bytes + (256 << 20)), cpu_milli: Some(2_000), pids: Some(256) }).unwrap();
    let limits = taken + begin.elapsed();
    let (guest, _) = Guest::connect(vm.connect().await.unwrap(), [n as u8; 32], true, 2 * SOON).await.unwrap();
    guest.reseed([n as u8; 64]).await.unwrap();
    let disk = Slot::SCRATCH.disk(vmm.capabilities());
    let mount = Mount { disk, bytes, fs: "ext4".to_owned(), target: "/volley".to_owned(), read_only: false, owner: None, grow: false };
    guest.furnish(Furnish { mount, dirs: Vec::new(), user: None }).await.unwrap();
    // The tiny guest has no file systems.
    if vmm.capabilities().identity.vmm == Kind::Qemu {
        linux::sh(&guest, WRITES).await;
    }
    drop(guest);
    Standing { vm, group }.end().await;
    Took { limits, all: begun.elapsed() }
}

pub async fn restore_leaks(spawner: &MachineSpawner) {
    for (name, vmm, snapshot, _) in saved(spawner).await {
        let cgroups = Cgroups::open(&cgroups_name());
        let cgroups = cgroups.map_err(|why| eprintln!("without cgroups: {why}")).ok().map(Arc::new);
        let groups = Groups::new(cgroups.clone());
        let scratch = tempfile::tempdir().unwrap();
        let disks = ScratchDisks::open(scratch.path(), "/sbin/mke2fs".into()).unwrap();
        for n in 0..WARM {
            once(&*vmm, &snapshot, n, &groups, &disks).await;
        }
        // Tasks that follow what a machine said end when they have read the end.
        tokio::time::sleep(Duration::from_millis(200)).await;
        let (before, kib) = (there(spawner, scratch.path()), resident_kib());
        let (mut limits, mut all) = (Vec::new(), Vec::new());
        for n in 0..RESTORES {
            let took = once(&*vmm, &snapshot, n, &groups, &disks).await;
            limits.push(ms(took.limits));
            all.push(ms(took.all));
            if n % 100 == 99 {
                eprintln!("{} of {RESTORES} restores of {name}", n + 1);
            }
        }
        tokio::time::sleep(Duration::from_millis(200)).await;
        let after = there(spawner, scratch.path());
        let left: Vec<String> = after
            .iter()
            .filter(|(what, count)| before.get(*what) != Some(count))
            .map(|(what, count)| format!("{what}: {} -> {count}", before.get(what).copied().unwrap_or(0)))
            .collect();
        let sum = |all: &BTreeMap<String, usize>| all.values().sum::<usize>() as f64;
        line(&format!("{name} things held after {RESTORES}"), sum(&after), Some(sum(&before)), Some(Limit::RatioAtMost(1.0)));
        line(&format!("{name} worker KiB after {RESTORES}"), resident_kib(), Some(kib), Some(FLAT));
        pair(&format!("{name} cgroup and limits ms"), &limits, None, None);
        pair(&format!("{name} restore with a disk, to its end ms"), &all, None, None);
        drop(groups);
        if let Some(cgroups) = cgroups {
            cgroups.sweep().unwrap();
        }
        if !left.is_empty() {
            println!("# changed: {}", left.join("; "));
        }
    }
}
