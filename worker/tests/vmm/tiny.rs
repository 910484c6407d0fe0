//! The tiny guest: a program of our own that speaks the agent's protocol, built here from its source for the real Firecracker.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use tempfile::TempDir;
use volley_jobspecs::wire::guest::{Exec, Exit};
use volley_worker::guest::Guest;
use volley_worker::vmm::firecracker::Firecracker;
use volley_worker::vmm::spawner::MachineSpawner;
use volley_worker::vmm::{Boot, Size, Snapshot, Vmm, VmmError, kvm};

use crate::linux::{output, session};
use crate::tiny_guest::{binary, built};

const SIZE: Size = Size { vcpus: 1, memory_bytes: 64 << 20 };
/// What machines are booted from.
pub struct Tiny {
    pub vmm: Firecracker,
    /// Where Firecracker lies.
    pub program: PathBuf,
    kernel: PathBuf,
    root: Arc<File>,
    dir: TempDir,
}

impl Tiny {
    pub async fn find(spawner: &MachineSpawner) -> Option<Self> {
        let found = Self::try_find(spawner).await;
        found.map_err(|why| eprintln!("skipped: {why}")).ok()
    }

    async fn try_find(spawner: &MachineSpawner) -> Result<Self, String> {
        let dir = tempfile::tempdir().unwrap();
        let kernel = built(dir.path())?;
        let program = binary()?;
        let vmm = match Firecracker::open(spawner.clone(), &program, kvm::probe(spawner).await).await {
            Ok(vmm) => vmm,
            Err(why @ VmmError::Unusable { .. }) => return Err(why.to_string()),
            Err(why) => panic!("{why}"),
        };
        let root = dir.path().join("root");
        std::fs::write(&root, [b"the root disk\0".as_slice(), &[0; 4082]].concat()).unwrap();
        std::fs::set_permissions(&root, std::os::unix::fs::PermissionsExt::from_mode(0o444)).unwrap();
        Ok(Self { vmm, program, kernel, root: Arc::new(File::open(root).unwrap()), dir })
    }

    pub fn boots(&self) -> Boot {
        Boot {
            size: SIZE,
            kernel: self.kernel.clone(),
            initrd: None,
            words: String::new(),
            root: Some(self.root.clone()),
            cgroups: Vec::new(),
        }
    }

    pub async fn saved(&self) -> Snapshot {
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
    pub fn disk(&self, name: &str, bytes: u64) -> File {
        let file = File::options().read(true).write(true).create_new(true).open(self.dir.path().join(name)).unwrap();
        file.set_len(bytes).unwrap();
        file.write_all_at(name.as_bytes(), 0).unwrap();
        file
    }
}

pub async fn run(guest: &Guest, words: &[&str]) -> (String, Exit) {
    let argv = words.iter().map(|word| (*word).to_owned()).collect();
    let (said, ended) = output(guest, &Exec { argv, ..Exec::default() }).await;
    (said, ended.exit)
}

pub async fn say(guest: &Guest, words: &[&str]) -> String {
    let (said, exit) = run(guest, words).await;
    assert_eq!(exit, Exit::Code(0), "{words:?}: {said}");
    said
}
