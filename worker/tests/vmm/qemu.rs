//! QEMU with a Linux guest and the real agent.

use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use volley_jobspecs::wire::guest::Mount;
use volley_worker::vmm::qemu::Qemu;
use volley_worker::vmm::kvm;
use volley_worker::vmm::{Disk, Slot, Snapshot, Source, Vm, Vmm, VmmError};

use crate::linux::{Linux, ext4, session, sh};
use crate::{Held, SOON, children, median, spawner};

/// Size of scratch disks.
const SCRATCH_BYTES: u64 = 96 << 20;

async fn qemu(spawner: &volley_worker::vmm::spawner::MachineSpawner) -> Option<Qemu> {
    match Qemu::open(spawner.clone(), None, kvm::probe(spawner).await).await {
        Ok(qemu) => Some(qemu),
        Err(why @ VmmError::Unusable { .. }) => {
            eprintln!("skipped: {why}");
            None
        }
        Err(why) => panic!("{why}"),
    }
}

/// Boots a machine, has its agent prepare it, and saves it.
async fn saved(qemu: &Qemu, linux: &Linux) -> Snapshot {
    let begin = Instant::now();
    let vm = qemu.boot(linux.boot("")).await.unwrap();
    let guest = session(vm.connect().await.unwrap(), 1, false).await;
    eprintln!("boot to the first answer: {:?}", begin.elapsed());
    assert_eq!(sh(&guest, "echo warm > /tmp/warm; cat /etc/release").await, "the image");
    assert!(vm.console().is_empty() || !vm.console().contains('\u{1b}'));
    let begin = Instant::now();
    let (kept, stream) = guest.prepare_snapshot(false).await.unwrap();
    assert_eq!(kept, 0);
    let (prepared, begin) = (begin.elapsed(), Instant::now());
    let snapshot = vm.snapshot().await.unwrap();
    eprintln!("prepared in {prepared:?}, saved and ended in {:?}, state {} bytes", begin.elapsed(), snapshot.state.bytes().unwrap());
    drop(stream);
    snapshot
}

/// How long the steps of a restored machine took.
#[derive(Clone, Copy)]
struct Took {
    restore: Duration,
    swap: Duration,
    answer: Duration,
    exec: Duration,
}

/// From a paused machine to its first command's output.
async fn bring_up(qemu: &Qemu, vm: &mut Box<dyn Vm>, scratch: OwnedFd, nonce: u8) -> (volley_worker::guest::Guest, Took) {
    let begin = Instant::now();
    vm.swap(Slot::SCRATCH, Disk { source: Source::File(scratch), bytes: SCRATCH_BYTES }).await.unwrap();
    let (swap, begin) = (begin.elapsed(), Instant::now());
    vm.resume().await.unwrap();
    let guest = session(vm.connect().await.unwrap(), nonce, true).await;
    let answer = begin.elapsed();
    guest.reseed([nonce; 64]).await.unwrap();
    let disk = Slot::SCRATCH.disk(qemu.capabilities());
    let mount = Mount { disk, bytes: SCRATCH_BYTES, fs: "ext4".to_owned(), target: "/scratch".to_owned(), read_only: false, owner: None };
    guest.mount(mount).await.unwrap();
    assert_eq!(sh(&guest, "cat /tmp/warm; echo mine > /scratch/mine; cat /scratch/mine").await, "warm\nmine");
    (guest, Took { restore: Duration::ZERO, swap, answer, exec: begin.elapsed() })
}

#[tokio::test(flavor = "multi_thread")]
async fn a_linux_machine_is_saved_and_its_clones_are_alike_in_nothing_but_their_past() {
    let (Some(spawner), Some(linux)) = (spawner(), Linux::find().await) else { return };
    let Some(qemu) = qemu(&spawner).await else { return };
    eprintln!("{} {:?}", qemu.capabilities().identity, qemu.capabilities().why_emulated);
    let snapshot = saved(&qemu, &linux).await;
    // All of them stand still at once, with their own users.
    let restored = futures::future::join_all((0..4).map(|_| async {
        let begin = Instant::now();
        (qemu.restore(&snapshot, &[]).await.unwrap(), begin.elapsed())
    }));
    let (mut drawn, mut users, mut live) = (BTreeSet::new(), BTreeSet::new(), Vec::new());
    for ((mut vm, restore), nonce) in restored.await.into_iter().zip(10..) {
        assert!(users.insert(vm.user().unwrap()));
        let Some(scratch) = ext4(&linux.dir.path().join(format!("scratch-{nonce}")), SCRATCH_BYTES) else { return };
        let (guest, took) = bring_up(&qemu, &mut vm, scratch.into(), nonce).await;
        eprintln!("restore {restore:?}, swap {:?}, cont to answer {:?}, to exec {:?}", took.swap, took.answer, took.exec);
        assert!(drawn.insert(sh(&guest, "head -c 32 /dev/urandom | od -t x1").await), "siblings differ");
        let size = sh(
            &guest,
            "cat /sys/block/vdf/size; stat -c %s /sys/block/vdf/queue 2>/dev/null >/dev/null; cat /sys/block/vdf/queue/physical_block_size",
        )
        .await;
        assert_eq!(size, format!("{}\n4096", SCRATCH_BYTES / 512));
        live.push((vm, guest));
    }
    // An empty slot reads as zeros; a slot that was swapped before it ran shows the new size only.
    let (vm, guest) = live.pop().unwrap();
    assert_eq!(sh(&guest, "head -c 8 /dev/vdb | od -A n -t x1").await.replace(' ', ""), "0".repeat(16));
    // A machine that was restored can't be saved: its memory is private.
    drop(guest);
    assert!(matches!(vm.snapshot().await, Err(VmmError::Slot(_))));
    for (vm, _guest) in live {
        let pid = vm.pid();
        vm.kill().await.unwrap();
        assert!(!std::path::Path::new(&format!("/proc/{pid}")).exists());
    }
    assert_eq!(children(spawner.pid()), Vec::<u32>::new());
}
