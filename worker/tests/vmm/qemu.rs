//! QEMU with a Linux guest and the real agent.

use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::time::{Duration, Instant};

use volley_jobspecs::wire::guest::Mount;
use volley_worker::vmm::qemu::Qemu;
use volley_worker::vmm::{Disk, Size, Slot, Snapshot, Source, Version, Vm, Vmm, VmmError};

use crate::linux::{Linux, ext4, qemu, session, sh, shell};
use crate::nbd::Server;
use crate::{Held, SOON, broken_states, children, median, pss_kib, spawner, with_state};

/// Size of scratch disks.
const SCRATCH_BYTES: u64 = 96 << 20;

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

/// What the host's kernel says of the VMM: its own user, no rights, and system calls that are refused.
fn is_confined(vm: &dyn Vm) {
    let status = std::fs::read_to_string(format!("/proc/{}/status", vm.pid())).unwrap();
    let user = vm.user().unwrap();
    for line in [format!("Uid:\t{user}\t{user}"), "CapEff:\t0000000000000000".into(), "NoNewPrivs:\t1".into(), "Seccomp:\t2".into()] {
        assert!(status.contains(&line), "{line}: {status}");
    }
}

/// How long the steps of a restored machine took.
#[derive(Clone, Copy)]
struct Took {
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
    let mount = Mount {
        disk,
        bytes: SCRATCH_BYTES,
        fs: "ext4".to_owned(),
        target: "/scratch".to_owned(),
        read_only: false,
        owner: None,
        grow: false,
    };
    guest.mount(mount).await.unwrap();
    assert_eq!(sh(&guest, "cat /tmp/warm; echo mine > /scratch/mine; cat /scratch/mine").await, "warm\nmine");
    (guest, Took { swap, answer, exec: begin.elapsed() })
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
        is_confined(&*vm);
        let Some(scratch) = ext4(&linux.dir.path().join(format!("scratch-{nonce}")), SCRATCH_BYTES) else { return };
        let (guest, took) = bring_up(&qemu, &mut vm, scratch.into(), nonce).await;
        eprintln!("restore {restore:?}, swap {:?}, cont to answer {:?}, to exec {:?}", took.swap, took.answer, took.exec);
        assert!(drawn.insert(sh(&guest, "head -c 32 /dev/urandom | od -t x1").await), "siblings differ");
        let size = sh(&guest, "cat /sys/block/vdf/size; cat /sys/block/vdf/queue/physical_block_size").await;
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

#[tokio::test(flavor = "multi_thread")]
async fn thirty_restores_in_a_row_leave_nothing() {
    let (Some(spawner), Some(linux)) = (spawner(), Linux::find().await) else { return };
    let Some(qemu) = qemu(&spawner).await else { return };
    let snapshot = saved(&qemu, &linux).await;
    let begin = Instant::now();
    let eight = futures::future::join_all((0..8).map(|_| qemu.restore(&snapshot, &[])));
    let eight: Vec<_> = eight.await.into_iter().map(Result::unwrap).collect();
    eprintln!("8 at once stand after {:?}", begin.elapsed());
    let each: Vec<u64> = eight.iter().map(|vm| pss_kib(vm.pid())).collect();
    eprintln!("KiB each {each:?}, memory of all {} MiB", snapshot.memory.allocated_bytes().unwrap() >> 20);
    futures::future::join_all(eight.into_iter().map(Vm::kill))
        .await
        .into_iter()
        .for_each(|ended| assert!(ended.unwrap().signal == Some(9)));
    let (mut before, mut restores, mut answers) = (None, Vec::new(), Vec::new());
    for n in 0..30 {
        let begin = Instant::now();
        let mut vm = qemu.restore(&snapshot, &[]).await.unwrap();
        restores.push(begin.elapsed());
        let scratch = tempfile::tempfile_in(linux.dir.path()).unwrap();
        scratch.set_len(SCRATCH_BYTES).unwrap();
        vm.swap(Slot::SCRATCH, Disk { source: Source::File(scratch.into()), bytes: SCRATCH_BYTES }).await.unwrap();
        vm.resume().await.unwrap();
        let guest = session(vm.connect().await.unwrap(), n, true).await;
        answers.push(begin.elapsed());
        guest.reseed([n; 64]).await.unwrap();
        drop(guest);
        // Some are killed, some only dropped.
        let pid = vm.pid();
        if n % 2 == 0 {
            vm.kill().await.unwrap();
        } else {
            drop(vm);
        }
        gone(pid).await;
        tokio::time::sleep(Duration::from_millis(20)).await;
        let now = Held::now(&spawner);
        let first = before.get_or_insert_with(|| now.clone());
        assert_eq!(first, &now, "after {n}");
    }
    eprintln!("restored and standing: median {:?}; answered: {:?}", median(restores), median(answers));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_no_snapshot_of_this_qemu_is_not_restored() {
    let (Some(spawner), Some(linux)) = (spawner(), Linux::find().await) else { return };
    let Some(qemu) = qemu(&spawner).await else { return };
    let snapshot = saved(&qemu, &linux).await;
    let mut other = snapshot.clone();
    other.made_by.version = Version(99, 0, 0);
    let why = qemu.restore(&other, &[]).await.unwrap_err();
    assert!(matches!(why, VmmError::Other { .. }) && why.to_string().contains("99.0.0"), "{why}");
    for state in broken_states(&snapshot) {
        let begin = Instant::now();
        let why = qemu.restore(&with_state(&snapshot, &state), &[]).await.unwrap_err();
        eprintln!("{} bytes: {why}, after {:?}", state.len(), begin.elapsed());
        assert!(matches!(why, VmmError::Ended { .. } | VmmError::Refused { .. }), "{why:?}");
    }
    // Memory of another size.
    let larger = Size { memory_bytes: 256 << 20, ..snapshot.size };
    assert!(qemu.restore(&Snapshot { size: larger, ..snapshot.clone() }, &[]).await.is_err());
    let begin = Instant::now();
    while !children(spawner.pid()).is_empty() {
        assert!(begin.elapsed() < SOON);
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    qemu.restore(&snapshot, &[]).await.unwrap().kill().await.unwrap();
}

/// Waits until a process is gone.
async fn gone(pid: u32) {
    let begin = Instant::now();
    while std::path::Path::new(&format!("/proc/{pid}")).exists() {
        assert!(begin.elapsed() < SOON, "process {pid} lives");
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_vmm_that_is_killed_is_told_and_its_sibling_lives() {
    let (Some(spawner), Some(linux)) = (spawner(), Linux::find().await) else { return };
    let Some(qemu) = qemu(&spawner).await else { return };
    let snapshot = saved(&qemu, &linux).await;
    let mut live = Vec::new();
    for nonce in [1, 2, 3] {
        let mut vm = qemu.restore(&snapshot, &[]).await.unwrap();
        vm.resume().await.unwrap();
        let guest = session(vm.connect().await.unwrap(), nonce, true).await;
        guest.reseed([nonce; 64]).await.unwrap();
        live.push((vm, guest));
    }
    let (mut victim, lost) = live.remove(0);
    let kill = |pid: u32| {
        // SAFETY: a plain system call, on a process that this test started.
        assert_eq!(unsafe { libc::kill(pid.cast_signed(), libc::SIGKILL) }, 0);
    };
    kill(victim.pid());
    let exited = tokio::time::timeout(SOON, victim.ended()).await.unwrap().unwrap();
    assert_eq!((exited.code, exited.signal), (None, Some(9)));
    assert!(lost.hello().await.is_err());
    let why = victim.pause().await.unwrap_err();
    assert!(matches!(&why, VmmError::Ended { end, .. } if end == "signal 9"), "{why}");
    // A guest's kernel panics: the end of its console says so.
    let (panics, guest) = live.remove(0);
    let _lost = guest.exec(&shell("echo c > /proc/sysrq-trigger")).await;
    let exited = tokio::time::timeout(SOON, panics.ended()).await.unwrap().unwrap();
    let console = panics.console();
    assert!(exited.code == Some(0) && console.contains("Kernel panic - not syncing: sysrq triggered crash"), "{exited:?} {console}");
    let (mut sibling, guest) = live.remove(0);
    assert_eq!(sh(&guest, "cat /tmp/warm").await, "warm");
    // What can't be a disk is refused, and the machine lives on.
    sibling.pause().await.unwrap();
    let file = tempfile::tempfile_in(linux.dir.path()).unwrap();
    let odd = sibling.swap(Slot::SCRATCH, Disk { source: Source::File(file.into()), bytes: 513 }).await;
    assert!(matches!(odd, Err(VmmError::Slot(_))));
    let nothing = std::fs::File::open("/dev/null").unwrap();
    let refused = sibling.swap(Slot::SCRATCH, Disk { source: Source::File(nothing.into()), bytes: 512 }).await;
    assert!(matches!(refused, Err(VmmError::Refused { .. })), "{refused:?}");
    sibling.resume().await.unwrap();
    assert_eq!(sh(&guest, "cat /tmp/warm").await, "warm");
    // A VMM that stands still itself is killed all the same.
    let stopped = qemu.restore(&snapshot, &[]).await.unwrap();
    // SAFETY: a plain system call, on a process that this test started.
    assert_eq!(unsafe { libc::kill(stopped.pid().cast_signed(), libc::SIGSTOP) }, 0);
    assert_eq!(tokio::time::timeout(SOON, stopped.kill()).await.unwrap().unwrap().signal, Some(9));
    // The spawner dies, and every machine with it; the next one is started by another.
    let (old, pid) = (spawner.pid(), sibling.pid());
    kill(old);
    gone(pid).await;
    assert!(sibling.ended().await.is_err() && sibling.pause().await.is_err());
    let vm = qemu.restore(&snapshot, &[]).await.unwrap();
    assert_ne!(spawner.pid(), old);
    vm.kill().await.unwrap();
}

#[tokio::test(flavor = "multi_thread")]
async fn a_volume_behind_nbd_whose_server_goes_away_and_comes_back() {
    let (Some(spawner), Some(linux)) = (spawner(), Linux::find().await) else { return };
    let Some(qemu) = qemu(&spawner).await else { return };
    let snapshot = saved(&qemu, &linux).await;
    let image = linux.dir.path().join("image");
    let Some(_) = ext4(&image, 32 << 20) else { return };
    let volume = tempfile::tempdir().unwrap();
    let socket = volume.path().join("nbd");
    let server = Server::start(&socket, std::fs::read(&image).unwrap());
    let mut vm = qemu.restore(&snapshot, &[]).await.unwrap();
    // The directory's own mode is for its owner only; the machine gets it as it is.
    std::fs::set_permissions(volume.path(), std::os::unix::fs::PermissionsExt::from_mode(0o711)).unwrap();
    let slot = Slot::volume(1).unwrap();
    let dir: OwnedFd = std::fs::File::open(volume.path()).unwrap().into();
    let begin = Instant::now();
    let source = Source::Nbd { dir, socket: "nbd".to_owned(), export: "one".to_owned() };
    vm.swap(slot, Disk { source, bytes: 32 << 20 }).await.unwrap();
    eprintln!("swap {:?}", begin.elapsed());
    vm.resume().await.unwrap();
    let guest = session(vm.connect().await.unwrap(), 5, true).await;
    guest.reseed([5; 64]).await.unwrap();
    let disk = slot.disk(qemu.capabilities());
    let mount =
        Mount { disk, bytes: 32 << 20, fs: "ext4".to_owned(), target: "/volume".to_owned(), read_only: false, owner: None, grow: false };
    guest.mount(mount).await.unwrap();
    assert_eq!(sh(&guest, "echo before > /volume/before; sync; echo done").await, "done");
    let bytes = server.stop(&socket);
    // It comes back, under the same name, while the guest waits for its writes.
    let (written, server) = tokio::join!(sh(&guest, "echo after > /volume/after; sync; echo done"), async {
        tokio::time::sleep(Duration::from_secs(1)).await;
        Server::start(&socket, bytes)
    });
    assert_eq!(written, "done");
    assert_eq!(sh(&guest, "cat /volume/before /volume/after").await, "before\nafter");
    guest.unmount("/volume", SOON).await.unwrap();
    vm.kill().await.unwrap();
    let kept = server.stop(&socket);
    assert!(kept.windows(6).any(|bytes| bytes == b"after\n"));
    assert_eq!(children(spawner.pid()), Vec::<u32>::new());
}
