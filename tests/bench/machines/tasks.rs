//! `task-overhead`: what a task in a machine costs, beside the same steps by a bare script.

use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant};

use minicbor::bytes::ByteArray;
use volley_guest::files::Unpack;
use volley_jobspecs::ids::TenantId;
use volley_jobspecs::machine::DISK_BYTES_DEFAULT;
use volley_jobspecs::spec::Resources;
use volley_jobspecs::wire::guest::mux::Channel;
use volley_jobspecs::wire::guest::{Dir, Exec, FileLimits, Furnish, Get, Identity, Mount};
use volley_worker::MachineConfig;
use volley_worker::cgroup::Cgroups;
use volley_worker::dirs::Dirs;
use volley_worker::guest::Guest;
use volley_worker::machines::{Machines, Wanted};
use volley_worker::mounts::Mounts;
use volley_worker::prepare::Prepared;
use volley_worker::runtime::Machine;
use volley_worker::runtime::microvm::MicrovmMachine;
use volley_worker::template::Template;
use volley_worker::vmm::spawner::MachineSpawner;
use volley_worker::vmm::{Disk, Slot, Source, Vm};

use crate::figures::part;
use crate::image;
use crate::limits::{Limit, line, pair};
use crate::ms;
use crate::prepared::prepared;

/// Tasks of each kind, in turns.
const ROUNDS: usize = 20;
/// What the worker may add to a machine's own time, in milliseconds.
const OVERHEAD: Limit = Limit::AtMost(10.0);

/// Milliseconds of each step, as they follow each other.
#[derive(Default)]
struct Rounds(Vec<(&'static str, Vec<f64>)>);

impl Rounds {
    fn add(&mut self, step: &'static str, took: Duration) {
        match self.0.iter_mut().find(|(name, _)| *name == step) {
            Some((_, all)) => all.push(ms(took)),
            None => self.0.push((step, vec![ms(took)])),
        }
    }

    fn of(&self, step: &str) -> &[f64] {
        self.0.iter().find(|(name, _)| *name == step).map_or(&[], |(_, all)| all)
    }
}

/// One attempt by the tier.
async fn by_tier(machine: &mut MicrovmMachine, prepared: &Prepared, dirs: &Dirs, rounds: &mut Rounds) {
    let begin = Instant::now();
    machine.restore(prepared, &mut Mounts::none()).await.unwrap();
    let ready = Instant::now();
    let streams = machine.start(prepared).await.unwrap();
    let exit = machine.wait().await.unwrap();
    assert_eq!(exit.code, Some(0));
    drop(streams);
    let ended = Instant::now();
    machine.collect(prepared, dirs).await.unwrap();
    let collected = Instant::now();
    machine.release().await;
    rounds.add("ready", ready - begin);
    rounds.add("command", ended - ready);
    rounds.add("outputs", collected - ended);
    rounds.add("end", collected.elapsed());
    rounds.add("all", begin.elapsed());
}

/// The same steps, one behind the other, with a machine that stands still and a disk that is made.
async fn by_script(machines: &Machines, template: &Template, vm: Option<Box<dyn Vm>>, dirs: &Dirs, rounds: &mut Rounds) {
    let mut scratch = machines.scratch.make(DISK_BYTES_DEFAULT).await.unwrap();
    let begin = Instant::now();
    let mut vm = match vm {
        Some(vm) => vm,
        None => machines.vmm.restore(&template.snapshot, &[]).await.unwrap(),
    };
    let bytes = scratch.bytes;
    vm.swap(Slot::SCRATCH, Disk { source: Source::File(scratch.file.take().unwrap()), bytes }).await.unwrap();
    vm.resume().await.unwrap();
    let mut nonce = [0; 32];
    getrandom::fill(&mut nonce).unwrap();
    let (guest, _) = Guest::connect(vm.connect().await.unwrap(), nonce, true, Duration::from_secs(60)).await.unwrap();
    guest.reseed([nonce, nonce].concat().try_into().unwrap()).await.unwrap();
    guest.set_clock(1_800_000_000_000_000_000).await.unwrap();
    let machine_id = Some(ByteArray::from([1; 16]));
    guest.set_identity(Identity { hostname: Some("bare".to_owned()), machine_id, boot_id: machine_id }).await.unwrap();
    let disk = Slot::SCRATCH.disk(machines.vmm.capabilities());
    let mount = Mount { disk, bytes, fs: "ext4".to_owned(), target: "/volley".to_owned(), read_only: false, owner: None, grow: false };
    let dir = |name: &str| Dir { name: name.to_owned(), mode: 0o777, also: None };
    guest.furnish(Furnish { mount, dirs: vec![dir("work"), dir("out"), dir("tmp")], user: None }).await.unwrap();
    rounds.add("ready", begin.elapsed());
    let ready = Instant::now();
    let command = guest.exec(&Exec { argv: vec!["/bin/true".to_owned()], ..Exec::default() }).await.unwrap();
    for channel in [Channel::Output, Channel::Errors] {
        assert_eq!(command.read(channel, &mut [0; 64]).await.unwrap(), 0);
    }
    command.ended().await.unwrap();
    drop(command);
    rounds.add("command", ready.elapsed());
    let ended = Instant::now();
    let limits = FileLimits { bytes, entries: 1_000, path_bytes: 4_096 };
    let out = OwnedFd::from(std::fs::File::open(dirs.out()).unwrap());
    let how = Unpack { owner: None, mode_mask: 0o777, limits };
    guest.get(Get { path: "/volley/out".to_owned(), limits }, out, how, Duration::from_secs(60)).await.unwrap();
    rounds.add("outputs", ended.elapsed());
    let collected = Instant::now();
    drop(guest);
    vm.kill().await.unwrap();
    rounds.add("end", collected.elapsed());
    rounds.add("all", begin.elapsed());
}

async fn machines(
    spawner: &MachineSpawner,
    dir: &Path,
    standby_of_one_max: u32,
    cgroups: Option<&Arc<Cgroups>>,
) -> Option<(Arc<Machines>, String)> {
    let mut config = MachineConfig::new(dir);
    let note = image::noted(&config.images).await.map_err(|why| eprintln!("skipped: {why}")).ok()?;
    config.standby_of_one_max = Some(standby_of_one_max);
    config.spawner = Some(spawner.clone());
    let machines = Machines::open(&config, &dir.join("machines"), 2, cgroups.cloned()).await.unwrap();
    Some((Arc::new(machines), format!("sha256:{}", note.digest.hex())))
}

async fn until_waits(machines: &Machines, waiting: u32) {
    let begin = Instant::now();
    while machines.standby.waiting() < waiting as usize {
        assert!(begin.elapsed() < Duration::from_secs(30), "none waits");
        tokio::time::sleep(Duration::from_millis(20)).await;
    }
}

/// From a machine that waited, then with start and load.
pub async fn overhead(spawner: &MachineSpawner) {
    let dir = tempfile::tempdir().unwrap();
    let cgroups = Cgroups::open(&format!("volley-bench-{}", std::process::id())).map(Arc::new);
    let cgroups = cgroups.map_err(|why| eprintln!("without cgroups: {why}")).ok();
    // The script's machines are in no cgroup: with and without them, so that it is seen what they cost. On a busy host a cgroup's processes
    // share the time that one process beside it has.
    for (waiting, cgroups) in [(1, None), (1, cgroups.as_ref()), (0, None), (0, cgroups.as_ref())] {
        let grouped = if cgroups.is_some() { ", in cgroups" } else { "" };
        let dir = dir.path().join(format!("{waiting}{}", grouped.len()));
        let Some((machines, image)) = machines(spawner, &dir, waiting, cgroups).await else { return };
        let mut dirs = Dirs::new(dir.join("slot"), None);
        dirs.make().unwrap();
        let prepared = prepared(&image, Resources::default(), &dirs);
        let mut machine = MicrovmMachine::new(machines.clone());
        let (mut ours, mut bare) = (Rounds::default(), Rounds::default());
        // The first has its template made.
        by_tier(&mut machine, &prepared, &dirs, &mut Rounds::default()).await;
        let template = machines
            .template(&Wanted::plain(&TenantId::new("public").unwrap(), Some(&image), &Resources::default()))
            .await
            .unwrap()
            .template;
        for _ in 0..ROUNDS {
            until_waits(&machines, waiting).await;
            by_tier(&mut machine, &prepared, &dirs, &mut ours).await;
            // Until the next one waits, so that its restore is in nobody's way.
            until_waits(&machines, waiting).await;
            let vm = if waiting > 0 { Some(machines.vmm.restore(&template.snapshot, &[]).await.unwrap()) } else { None };
            by_script(&machines, &template, vm, &dirs, &mut bare).await;
        }
        let how = format!("{}{grouped}", if waiting > 0 { "standby" } else { "load" });
        for step in ["ready", "command", "outputs", "end", "all"] {
            pair(&format!("task {how}: {step} ms"), ours.of(step), Some(bare.of(step)), None);
        }
        let beyond = |at| part(ours.of("all"), at) - part(bare.of("all"), at);
        // With start and load it is the machine that takes the time, and the script has its restore beside it.
        line(&format!("task-overhead {how} ms"), beyond(0.5), None, (waiting > 0).then_some(OVERHEAD));
        line(&format!("task-overhead {how} ms p99"), beyond(0.99), None, None);
        drop(machine);
        machines.close().await;
    }
    if let Some(cgroups) = cgroups {
        cgroups.sweep().unwrap();
    }
}
