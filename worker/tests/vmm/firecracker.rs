//! The real Firecracker with the tiny guest.

use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use volley_guest::files::Unpack;
use volley_jobspecs::wire::guest::{Exec, Exit, FileLimits, Get, Identity, Put, RefusalKind};
use volley_worker::guest::{Guest, GuestError};
use volley_worker::vmm::{Boot, Disk, Slot, Snapshot, Source, Vm, Vmm, VmmError};

use crate::linux::session;
use crate::tiny::{Tiny, run, say};
use crate::{Held, SOON, broken_states, children, median, pss_kib, spawner, with_state};

#[tokio::test(flavor = "multi_thread")]
async fn a_tiny_machine_is_saved_and_restored_with_other_disks() {
    let Some(spawner) = spawner() else { return };
    let Some(tiny) = Tiny::find(&spawner).await else { return };
    eprintln!("{} {:?}", tiny.vmm.capabilities().identity, tiny.vmm.capabilities().why_emulated);
    let snapshot = tiny.saved().await;
    let mut vm = tiny.vmm.restore(&snapshot, &[]).await.unwrap();
    let volume = Slot::volume(0).unwrap();
    let begin = Instant::now();
    vm.swap(volume, Disk { source: Source::File(tiny.disk("volume", 4096).into()), bytes: 4096 }).await.unwrap();
    eprintln!("swap {:?}", begin.elapsed());
    // Its own filter of system calls is on: nothing turns it off.
    let status = std::fs::read_to_string(format!("/proc/{}/status", vm.pid())).unwrap();
    assert!(status.contains("Seccomp:\t2") && status.contains("NoNewPrivs:\t1"), "{status}");
    vm.swap(Slot::SCRATCH, Disk { source: Source::File(tiny.disk("first", 8192).into()), bytes: 8192 }).await.unwrap();
    // The second one counts.
    let scratch = tiny.disk("second", 8192);
    vm.swap(Slot::SCRATCH, Disk { source: Source::File(scratch.try_clone().unwrap().into()), bytes: 8192 }).await.unwrap();
    let odd = Disk { source: Source::File(tiny.disk("odd", 1000).into()), bytes: 1000 };
    assert!(matches!(vm.swap(volume, odd).await, Err(VmmError::Slot(_))));
    vm.resume().await.unwrap();
    let guest = session(vm.connect().await.unwrap(), 7, true).await;
    assert!(matches!(guest.exec(&Exec { argv: vec!["count".to_owned()], ..Exec::default() }).await,
        Err(GuestError::Refused(r)) if r.kind == RefusalKind::NotReseeded));
    guest.reseed([7; 64]).await.unwrap();
    guest.set_clock(1).await.unwrap();
    guest.set_identity(Identity::default()).await.unwrap();
    assert_eq!(say(&guest, &["count"]).await, "0003", "it goes on where it was");
    for (disk, told) in [("0", "the root disk"), ("1", "volume"), ("2", ""), ("5", "second")] {
        assert_eq!(say(&guest, &["read", disk]).await, told, "disk {disk}");
    }
    assert_eq!(say(&guest, &["write", "5", "written"]).await, "");
    let mut bytes = [0; 7];
    scratch.read_exact_at(&mut bytes, 0).unwrap();
    assert_eq!(&bytes, b"written");
    // The root disk and empty slots take nothing.
    assert_ne!(run(&guest, &["write", "0", "x"]).await.1, Exit::Code(0));
    assert_ne!(run(&guest, &["write", "2", "x"]).await.1, Exit::Code(0));
    // Files, as far as it has any: none go in, and none come out.
    let (from, to) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let limits = FileLimits { bytes: 1 << 20, entries: 10, path_bytes: 100 };
    let put = Put { dir: "/in".to_owned(), owner: None, limits };
    assert_eq!(guest.put(put, from.path().to_owned(), SOON).await.unwrap(), Default::default());
    let how = Unpack { owner: None, mode_mask: 0o777, limits };
    let into = std::fs::File::open(to.path()).unwrap().into();
    assert_eq!(guest.get(Get { path: "/out".to_owned(), limits }, into, how, SOON).await.unwrap(), Default::default());
    // A new connection takes the place of the old one; pause and resume are not noticed.
    vm.pause().await.unwrap();
    vm.resume().await.unwrap();
    let guest = {
        drop(guest);
        session(vm.connect().await.unwrap(), 8, false).await
    };
    assert_eq!(say(&guest, &["count"]).await, "0004");
    // Firecracker says what it could not do for the guest.
    assert_eq!(vm.console().matches("block request").count(), 2, "{}", vm.console());
    vm.kill().await.unwrap();
    assert_eq!(children(spawner.pid()), Vec::<u32>::new());
}

/// A file system in memory with next to no room, until this is dropped.
struct Small(tempfile::TempDir);

impl Drop for Small {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(self.0.path(), rustix::mount::UnmountFlags::DETACH);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_a_scratch_disk_does_not_do_is_counted() {
    let Some(spawner) = spawner() else { return };
    let Some(tiny) = Tiny::find(&spawner).await else { return };
    let dir = tempfile::tempdir().unwrap();
    if let Err(why) = rustix::mount::mount("tmpfs", dir.path(), "tmpfs", rustix::mount::MountFlags::empty(), c"size=8k,mode=0755") {
        return eprintln!("skipped: mounting a tmpfs: {why}");
    }
    let small = Small(dir);
    let snapshot = tiny.saved().await;
    let mut vm = tiny.vmm.restore(&snapshot, &[]).await.unwrap();
    assert_eq!(vm.failed_disk_operations().await.unwrap(), 0, "it stands still");
    let file = std::fs::File::options().read(true).write(true).create_new(true).open(small.0.path().join("scratch")).unwrap();
    file.set_len(1 << 20).unwrap();
    std::fs::write(small.0.path().join("filler"), [0; 8192]).unwrap();
    vm.swap(Slot::SCRATCH, Disk { source: Source::File(file.into()), bytes: 1 << 20 }).await.unwrap();
    vm.resume().await.unwrap();
    let guest = session(vm.connect().await.unwrap(), 1, true).await;
    guest.reseed([1; 64]).await.unwrap();
    assert_eq!(say(&guest, &["read", "5"]).await, "");
    assert_eq!(vm.failed_disk_operations().await.unwrap(), 0);
    assert_ne!(run(&guest, &["write", "5", "x"]).await.1, Exit::Code(0));
    assert_ne!(run(&guest, &["write", "5", "x"]).await.1, Exit::Code(0));
    // An empty slot takes nothing, and is none of it.
    assert_ne!(run(&guest, &["write", "2", "x"]).await.1, Exit::Code(0));
    let begin = Instant::now();
    assert_eq!(vm.failed_disk_operations().await.unwrap(), 2);
    eprintln!("counted in {:?}", begin.elapsed());
    assert_eq!(vm.failed_disk_operations().await.unwrap(), 2, "until now, not since");
    std::fs::remove_file(small.0.path().join("filler")).unwrap();
    assert_eq!(say(&guest, &["write", "5", "x"]).await, "");
    assert_eq!(vm.failed_disk_operations().await.unwrap(), 2);
    vm.kill().await.unwrap();
}

/// From nothing to the answer to a reseed. When the machine stood still, when it answered, and how long from the resume on.
async fn restored(tiny: &Tiny, snapshot: &Snapshot, nonce: u8) -> (Box<dyn Vm>, Guest, [Duration; 3]) {
    let begin = Instant::now();
    let mut vm = tiny.vmm.restore(snapshot, &[]).await.unwrap();
    let paused = begin.elapsed();
    vm.resume().await.unwrap();
    let guest = session(vm.connect().await.unwrap(), nonce, true).await;
    let answered = begin.elapsed();
    guest.reseed([nonce; 64]).await.unwrap();
    (vm, guest, [paused, answered, answered - paused])
}

#[tokio::test(flavor = "multi_thread")]
async fn many_at_once_and_thirty_in_a_row_leave_nothing() {
    let Some(spawner) = spawner() else { return };
    let Some(tiny) = Tiny::find(&spawner).await else { return };
    let snapshot = tiny.saved().await;
    for many in [16, 64] {
        let begin = Instant::now();
        let all = futures::future::join_all((0..many).map(|n| restored(&tiny, &snapshot, n)));
        let all = tokio::time::timeout(SOON, all).await.unwrap();
        eprintln!("{many} at once: all answered after {:?}", begin.elapsed());
        assert_eq!(children(spawner.pid()).len(), usize::from(many));
        let memory: u64 = all.iter().map(|(vm, ..)| pss_kib(vm.pid())).sum();
        eprintln!("{memory} KiB in all");
        for (vm, guest, _) in all {
            assert_eq!(say(&guest, &["count"]).await, "0003");
            vm.kill().await.unwrap();
        }
    }
    let (mut before, mut times) = (None, Vec::new());
    for n in 0..30 {
        let (vm, guest, took) = restored(&tiny, &snapshot, n).await;
        times.push(took);
        drop(guest);
        vm.kill().await.unwrap();
        // Tasks that follow what it said end when they have read the end.
        tokio::time::sleep(Duration::from_millis(5)).await;
        let now = Held::now(&spawner);
        let first = before.get_or_insert_with(|| now.clone());
        assert_eq!(first, &now, "after {n}");
    }
    for (at, what) in ["restored and standing", "answered", "resume to answer"].into_iter().enumerate() {
        eprintln!("{what}: median {:?}", median(times.iter().map(|took| took[at]).collect()));
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_no_snapshot_of_this_firecracker_is_not_restored() {
    let Some(spawner) = spawner() else { return };
    let Some(tiny) = Tiny::find(&spawner).await else { return };
    let snapshot = tiny.saved().await;
    for state in broken_states(&snapshot) {
        let begin = Instant::now();
        let why = tiny.vmm.restore(&with_state(&snapshot, &state), &[]).await.unwrap_err();
        eprintln!("{} bytes: {why}, after {:?}", state.len(), begin.elapsed());
        assert!(matches!(why, VmmError::Ended { .. } | VmmError::Refused { .. }), "{why:?}");
    }
    // A kernel that is none, and one that does nothing.
    let boot = Boot { kernel: "/dev/null".into(), ..tiny.boots() };
    let why = tiny.vmm.boot(boot).await.unwrap_err();
    assert!(matches!(why, VmmError::Refused { .. }), "{why}");
    let why = tiny.vmm.boot(Boot { kernel: "/no/kernel".into(), ..tiny.boots() }).await.unwrap_err();
    assert!(why.to_string().starts_with("/no/kernel: "), "{why}");
    let begin = Instant::now();
    while !children(spawner.pid()).is_empty() {
        assert!(begin.elapsed() < SOON);
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
}
