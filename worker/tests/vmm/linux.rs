//! A Linux guest with the real agent: kernel, RAM disk and a root disk with busybox.

use std::fs::File;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use tempfile::TempDir;
use volley_guest::initramfs;
use volley_jobspecs::wire::guest::mux::Channel;
use volley_jobspecs::wire::guest::{Ended, Exec, Exit};
use volley_worker::guest::{Guest, Stream};
use volley_worker::image::{self, Limits, Source, Store};
use volley_worker::vmm::qemu::Qemu;
use volley_worker::vmm::spawner::MachineSpawner;
use volley_worker::vmm::{Boot, Size, VmmError, kvm};

use crate::SOON;
use crate::host::{self, Host};

pub const SIZE: Size = Size { vcpus: 1, memory_bytes: 192 << 20 };

/// QEMU; or none, and the reason is printed.
pub async fn qemu(spawner: &MachineSpawner) -> Option<Qemu> {
    match Qemu::open(spawner.clone(), None, kvm::probe(spawner).await).await {
        Ok(qemu) => Some(qemu),
        Err(why @ VmmError::Unusable { .. }) => {
            eprintln!("skipped: {why}");
            None
        }
        Err(why) => panic!("{why}"),
    }
}

/// What machines are booted from.
pub struct Linux {
    host: Host,
    initrd: PathBuf,
    root: Arc<File>,
    pub dir: TempDir,
}

impl Linux {
    /// Finds everything; or says what is missing.
    pub async fn find() -> Option<Self> {
        let found = Self::try_find().await;
        found.map_err(|why| eprintln!("skipped: {why}")).ok()
    }

    async fn try_find() -> Result<Self, String> {
        let host = Host::find()?;
        let modules = host::part("VOLLEY_GUEST_MODULES", "modules").filter(|dir| dir.is_dir());
        let modules = modules.ok_or("no guest modules (VOLLEY_GUEST_MODULES)")?;
        let agent = initramfs::find_agent().map_err(|e| e.to_string())?;
        let dir = tempfile::tempdir().unwrap();
        let initrd = dir.path().join("initrd");
        std::fs::write(&initrd, initramfs::build(&agent, Some(&modules), &initramfs::MODULES).unwrap()).unwrap();
        let files = dir.path().join("files");
        host::busybox_files(&files)?;
        let store = Store::open(&dir.path().join("images")).unwrap();
        let note = image::import(&store, Source::Directory(files), None, Limits::default()).await.map_err(|e| e.to_string())?;
        let path = store.root(&note.root);
        std::fs::set_permissions(&path, std::fs::Permissions::from_mode(0o444)).unwrap();
        Ok(Self { host, initrd, root: Arc::new(File::open(path).unwrap()), dir })
    }

    pub fn boot(&self, words: &str) -> Boot {
        Boot {
            size: SIZE,
            kernel: self.host.kernel.clone(),
            initrd: Some(self.initrd.clone()),
            words: words.to_owned(),
            root: Some(self.root.clone()),
            cgroups: Vec::new(),
        }
    }
}

/// An empty disk with ext4; none, and the reason is printed.
pub fn ext4(path: &Path, bytes: u64) -> Option<File> {
    let file = File::options().read(true).write(true).create_new(true).open(path).unwrap();
    file.set_len(bytes).unwrap();
    match std::process::Command::new("/sbin/mke2fs").args(["-q", "-t", "ext4", "-E", "lazy_itable_init=1"]).arg(path).status() {
        Ok(status) if status.success() => Some(file),
        other => {
            eprintln!("skipped: /sbin/mke2fs: {other:?}");
            None
        }
    }
}

pub fn shell(script: &str) -> Exec {
    let argv = ["/bin/sh", "-c", script].map(str::to_owned).to_vec();
    Exec { argv, env: vec![("PATH".to_owned(), "/bin".to_owned())], ..Exec::default() }
}

/// Begins a session.
pub async fn session(stream: Box<dyn Stream>, nonce: u8, reseed: bool) -> Guest {
    let (guest, hello) = Guest::connect(stream, [nonce; 32], reseed, 2 * SOON).await.unwrap();
    assert_eq!(hello.reseed_due, reseed);
    guest
}

/// Runs a command and returns what it wrote.
pub async fn output(guest: &Guest, exec: &Exec) -> (String, Ended) {
    let command = guest.exec(exec).await.unwrap();
    let (mut all, mut buffer) = (Vec::new(), vec![0; 65536]);
    loop {
        match command.read(Channel::Output, &mut buffer).await.unwrap() {
            0 => break,
            len => all.extend_from_slice(&buffer[..len]),
        }
    }
    let ended = tokio::time::timeout(SOON, command.ended()).await.unwrap().unwrap();
    (String::from_utf8_lossy(&all).trim().to_owned(), ended)
}

/// The same of a shell, which must end well.
pub async fn sh(guest: &Guest, script: &str) -> String {
    let (said, ended) = output(guest, &shell(script)).await;
    assert_eq!(ended.exit, Exit::Code(0), "{script}: {said}");
    said
}
