//! A volume as a file.

use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use rustix::fs::{FallocateFlags, fallocate};
use rustix::io::Errno;
use rustix::mount::{UnmountFlags, unmount};
use volley_volume::serve::socket::{Place, Socket};

use crate::device::FileDevice;
use crate::process::{Killed, place, server, shim};
use crate::{have, is_root, patterns, soon};

const MIB: u64 = 1 << 20;

/// Can files be shown here?
pub fn possible() -> bool {
    if !is_root() {
        println!("skipped: not root");
        return false;
    }
    if File::options().read(true).write(true).open("/dev/fuse").is_err() {
        println!("skipped: no FUSE here");
        return false;
    }
    true
}

/// A shim, and its mount, which is gone at the latest when the test ends.
pub struct Mounted {
    shim: Killed,
    file: PathBuf,
}

impl Mounted {
    pub fn new(dir: &Path, owner: u32, run_as: Option<u32>, patience: Duration) -> Self {
        Self { shim: shim(dir, owner, run_as, patience), file: dir.join("file") }
    }
}

impl Drop for Mounted {
    fn drop(&mut self) {
        let _ = unmount(&self.file, UnmountFlags::DETACH);
    }
}

fn served(place: &Place, device: FileDevice) -> (Arc<FileDevice>, Socket) {
    let device = Arc::new(device);
    (Arc::clone(&device), Socket::open(place, device).unwrap())
}

#[test]
fn the_file_is_a_disk_of_its_owner_alone() {
    if !possible() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    std::fs::set_permissions(dir.path(), std::fs::Permissions::from_mode(0o755)).unwrap();
    let (owner, other, shim) = (60_001, 60_002, 60_003);
    let place = Place { owner: shim, group: shim, peers: vec![0, shim], ..place(dir.path(), "socket") };
    let (device, socket) = served(&place, FileDevice::new(8 * MIB));
    let mut mounted = Mounted::new(dir.path(), owner, Some(shim), Duration::from_secs(60));
    let path = dir.path().join("file");
    let about = std::fs::metadata(&path).unwrap();
    assert_eq!((about.len(), about.uid(), about.gid(), about.mode()), (8 * MIB, owner, owner, 0o100_600));
    let status = std::fs::read_to_string(format!("/proc/{}/status", mounted.shim.0.id())).unwrap();
    assert!(status.contains(&format!("Uid:\t{shim}\t{shim}\t{shim}\t{shim}")), "{status}");
    let may = |uid: u32| Command::new("dd").args(["of=/dev/null", "count=1", &format!("if={}", path.display())]).uid(uid).gid(uid).output();
    assert!(may(owner).unwrap().status.success());
    assert!(!may(other).unwrap().status.success() && !may(shim).unwrap().status.success());
    let file = File::options().read(true).write(true).open(&path).unwrap();
    let bytes = patterns(3, 5 * MIB as usize, 1);
    file.write_all_at(&bytes, 3).unwrap();
    let mut back = vec![0; bytes.len()];
    file.read_exact_at(&mut back, 3).unwrap();
    assert!(back == bytes && device.bytes(3, bytes.len()) == bytes, "there when the write has returned");
    let flushes = || device.flushes.load(std::sync::atomic::Ordering::SeqCst);
    let before = flushes();
    file.sync_all().unwrap();
    assert!(flushes() > before);
    let sync = rustix::fs::OFlags::DSYNC.bits().cast_signed();
    let durable = File::options().write(true).custom_flags(sync).open(&path).unwrap();
    let before = flushes();
    file.write_all_at(b"no", 0).unwrap();
    assert_eq!(flushes(), before);
    durable.write_all_at(b"yes", 0).unwrap();
    assert_eq!(flushes(), before + 1);
    drop(durable);
    device.fail_flushes(true);
    assert!(file.sync_data().is_err());
    device.fail_flushes(false);
    // It ends where it ends, and nobody changes that.
    assert_eq!(file.write_at(b"abc", 8 * MIB - 1).unwrap(), 1);
    assert_eq!(file.write_at(b"abc", 8 * MIB).unwrap_err().raw_os_error(), Some(Errno::NOSPC.raw_os_error()));
    assert_eq!(file.read_at(&mut back, 8 * MIB).unwrap(), 0);
    assert!(file.set_len(0).is_err() && std::fs::write(&path, "x").is_err());
    file.set_len(8 * MIB).unwrap();
    for (flags, offset) in [(FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 4096), (FallocateFlags::ZERO_RANGE, 70_001)] {
        fallocate(&file, flags, offset, 10_000).unwrap();
        file.read_exact_at(&mut back[..10_000], offset).unwrap();
        assert!(back[..10_000].iter().all(|byte| *byte == 0));
    }
    device.fail(Some(std::io::ErrorKind::StorageFull));
    assert_eq!(file.write_at(b"abc", 0).unwrap_err().raw_os_error(), Some(Errno::NOSPC.raw_os_error()));
    device.fail(None);
    drop(file);
    // A process that is just being started has what we have open.
    soon("the unmount", || unmount(&path, UnmountFlags::empty()).is_ok());
    assert!(mounted.shim.0.wait().unwrap().success(), "the shim ends with its mount");
    socket.detach();
}

#[test]
fn what_is_read_only_is_not_written_to() {
    if !possible() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let (_device, _socket) = served(&place(dir.path(), "socket"), FileDevice::read_only(MIB));
    let _mounted = Mounted::new(dir.path(), 0, None, Duration::from_secs(60));
    let path = dir.path().join("file");
    assert!(File::options().write(true).open(&path).is_err());
    assert_eq!(std::fs::read(&path).unwrap(), vec![0; MIB as usize]);
}

#[test]
fn a_size_that_grew_is_seen_when_the_server_is_back() {
    if !possible() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let place = place(dir.path(), "socket");
    let device = Arc::new(FileDevice::new(MIB));
    let socket = Socket::open(&place, device.clone()).unwrap();
    let _mounted = Mounted::new(dir.path(), 0, None, Duration::from_secs(60));
    let file = File::options().read(true).write(true).open(dir.path().join("file")).unwrap();
    file.write_all_at(b"kept", 0).unwrap();
    device.grow(3 * MIB);
    socket.detach();
    let _socket = Socket::open(&place, device.clone()).unwrap();
    soon("the size", || file.metadata().unwrap().len() == 3 * MIB);
    file.write_all_at(b"more", 3 * MIB - 4).unwrap();
    assert_eq!((device.bytes(0, 4), device.bytes(3 * MIB - 4, 4)), (b"kept".to_vec(), b"more".to_vec()));
}

fn run(program: &str, args: &[&str]) -> String {
    let path = format!("{}:/usr/sbin:/sbin", std::env::var("PATH").unwrap_or_default());
    let output = Command::new(program).args(args).env("PATH", path).output().unwrap();
    let told = format!("{}{}", String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{program} {args:?}: {told}");
    told
}

/// A loop device on a file; detached at the latest when the test ends.
struct Loop(String);

impl Loop {
    fn new(file: &Path) -> Self {
        Self(run("losetup", &["--direct-io=on", "--find", "--show", file.to_str().unwrap()]).trim().to_owned())
    }
}

impl Drop for Loop {
    fn drop(&mut self) {
        let _ = Command::new("/usr/sbin/losetup").args(["-d", &self.0]).status();
    }
}

/// A mount that is gone when the test ends.
struct Tree(PathBuf);

impl Tree {
    fn new(device: &str, dir: &Path) -> Self {
        run("mount", &["-t", "ext4", "-o", "nosuid,nodev", device, dir.to_str().unwrap()]);
        Self(dir.to_owned())
    }
}

impl Drop for Tree {
    fn drop(&mut self) {
        let _ = unmount(&self.0, UnmountFlags::empty());
    }
}

#[test]
fn a_file_system_on_it_keeps_what_was_written_while_the_server_is_killed() {
    if !possible() || !have(&["mkfs.ext4", "losetup", "fsck.ext4", "mount"]) {
        return;
    }
    if !Path::new("/dev/loop-control").exists() {
        println!("skipped: no loop devices here");
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let mut running = server(dir.path(), 96 * MIB);
    let _mounted = Mounted::new(dir.path(), 0, None, Duration::from_secs(60));
    let tree = dir.path().join("tree");
    std::fs::create_dir(&tree).unwrap();
    let content = |i: u64| patterns(i * 1000, 200_000 + (i * 7919 % 90_000) as usize, i as u8);
    {
        let device = Loop::new(&dir.path().join("file"));
        run("mkfs.ext4", &["-q", &device.0]);
        let mounted = Tree::new(&device.0, &tree);
        for i in 0..120u64 {
            let file = File::create(tree.join(i.to_string())).unwrap();
            file.write_all_at(&content(i), 0).unwrap();
            if i % 4 == 0 {
                file.sync_all().unwrap();
            }
            if i % 20 == 10 {
                running.kill();
                // What is synced meanwhile waits.
                let again = std::thread::spawn({
                    let dir = dir.path().to_owned();
                    move || server(&dir, 96 * MIB)
                });
                file.sync_all().unwrap();
                running = again.join().unwrap();
            }
        }
        std::fs::remove_file(tree.join("7")).unwrap();
        run("fstrim", &[tree.to_str().unwrap()]);
        drop(mounted);
        run("fsck.ext4", &["-f", "-n", &device.0]);
    }
    let device = Loop::new(&dir.path().join("file"));
    let _tree = Tree::new(&device.0, &tree);
    for i in (0..120u64).filter(|i| *i != 7) {
        assert!(std::fs::read(tree.join(i.to_string())).unwrap() == content(i), "file {i}");
    }
}
