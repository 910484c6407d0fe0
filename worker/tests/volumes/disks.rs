//! Volumes as disks: QEMU's client on the socket, and a disk of the host that is full.

use std::io::{Read as _, Write as _};
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use volley_volume::Limits;
use volley_worker::volumes::{OpenVolume, Show};

use crate::world::{MIB, World, have, kill_server, possible, soon, write};

const NBD: Show = Show::Nbd { uid: 0, gid: 0 };

/// QEMU's client on a volume, as a machine has it; it reads commands.
fn qemu_io(socket: &std::path::Path) -> Child {
    let image = format!("driver=raw,file.driver=nbd,file.server.type=unix,file.server.path={},file.reconnect-delay=30", socket.display());
    let mut command = Command::new("qemu-io");
    command.args(["--image-opts", &image]).stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::inherit()).spawn().unwrap()
}

fn socket(world: &World, worker: &str) -> PathBuf {
    let at = std::fs::read_dir(world.of(worker).join("volumes/at")).unwrap();
    at.map(|entry| entry.unwrap().path().join("s")).next().unwrap()
}

fn end(mut qemu: Child) -> String {
    drop(qemu.stdin.take());
    let mut told = String::new();
    qemu.stdout.take().unwrap().read_to_string(&mut told).unwrap();
    // What failed it says, too.
    qemu.wait().unwrap();
    told
}

#[tokio::test(flavor = "multi_thread")]
async fn qemu_writes_on_while_the_server_is_killed() {
    if !have("qemu-io") || !possible() {
        return;
    }
    let world = World::new().await;
    let one = world.worker("one").await;
    let open = one.open(write(1, 1, 0, NBD)).await.unwrap();
    let mut qemu = qemu_io(&socket(&world, "one"));
    let mut input = qemu.stdin.take().unwrap();
    let writing = std::thread::spawn(move || {
        // A pipe holds some hundred of these: it is never far ahead.
        for i in 0u64..400 {
            let flush = if i % 9 == 0 { "-f" } else { "" };
            let padding = " ".repeat(400);
            writeln!(input, "write -q {flush} -P {} {} 64k{padding}", i % 250 + 1, 16 * MIB + i % 300 * 65_536).unwrap();
        }
        for place in 0u64..300 {
            let last = if place < 100 { place + 300 } else { place };
            writeln!(input, "read -q -P {} {} 64k", last % 250 + 1, 16 * MIB + place * 65_536).unwrap();
        }
        writeln!(input, "quit").unwrap();
    });
    let mut kills = 0;
    while !writing.is_finished() && kills < 8 {
        tokio::time::sleep(Duration::from_millis(100 + kills * 30)).await;
        tokio::task::block_in_place(|| kill_server(&one, true));
        kills += 1;
    }
    let told = tokio::task::spawn_blocking(move || {
        writing.join().unwrap();
        end(qemu)
    });
    let told = told.await.unwrap();
    assert!(!told.contains("failed") && !told.contains("error"), "{told}");
    assert!(kills > 0);
    let left = open.finish().await.unwrap();
    world.promote(1, left).await;
    let two = world.worker("two").await;
    let open = two.open(write(2, 1, 1, NBD)).await.unwrap();
    let mut qemu = qemu_io(&socket(&world, "two"));
    for place in 0u64..300 {
        let last = if place < 100 { place + 300 } else { place };
        writeln!(qemu.stdin.as_mut().unwrap(), "read -q -P {} {} 64k", last % 250 + 1, 16 * MIB + place * 65_536).unwrap();
    }
    let told = end(qemu);
    assert!(!told.contains("failed"), "{told}");
    open.forget().await;
    world.nothing_left("one");
    world.nothing_left("two");
}

#[tokio::test(flavor = "multi_thread")]
async fn only_its_user_reaches_a_machines_volume() {
    if !possible() {
        return;
    }
    let world = World::new().await;
    let one = world.worker("one").await;
    let show = |uid| Show::Nbd { uid, gid: uid };
    let a: OpenVolume = one.open(write(1, 1, 0, show(90_001))).await.unwrap();
    let path = socket(&world, "one");
    let b = one.open(write(2, 2, 0, show(90_002))).await.unwrap();
    let python = |uid: u32| {
        let script =
            "import socket,sys; s=socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); sys.exit(0 if s.recv(8)==b'NBDMAGIC' else 3)";
        let mut command = Command::new("python3");
        command.args(["-c", script, path.to_str().unwrap()]).stderr(Stdio::null());
        std::os::unix::process::CommandExt::uid(&mut command, uid);
        std::os::unix::process::CommandExt::gid(&mut command, uid);
        command.status().unwrap().code()
    };
    if have("python3") {
        assert_eq!((python(90_001), python(90_002)), (Some(0), Some(1)));
    }
    // Root passes the directory, and is let go before anything is said.
    let mut root = UnixStream::connect(&path).unwrap();
    assert_eq!(root.read(&mut [0; 8]).unwrap_or(0), 0);
    a.forget().await;
    assert!(UnixStream::connect(&path).is_err());
    b.forget().await;
    world.nothing_left("one");
}

/// A small file system in memory that is a worker's directory.
struct Small(PathBuf);

impl Small {
    fn new(dir: PathBuf, bytes: u64) -> Self {
        std::fs::create_dir_all(&dir).unwrap();
        let options = std::ffi::CString::new(format!("size={bytes},mode=755")).unwrap();
        rustix::mount::mount("small", &dir, "tmpfs", rustix::mount::MountFlags::empty(), options.as_c_str()).unwrap();
        Self(dir)
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(&self.0, rustix::mount::UnmountFlags::DETACH);
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_full_disk_is_said_and_what_was_taken_stays() {
    if !have("qemu-io") || !possible() {
        return;
    }
    let mut world = World::new().await;
    world.limits = Limits { commit_every: Duration::from_secs(3_600), cache_disk_bytes: 0, ..Limits::default() };
    let small = Small::new(world.of("one"), 48 * MIB);
    let one = world.worker("one").await;
    let open = one.open(write(1, 1, 0, NBD)).await.unwrap();
    let mut qemu = qemu_io(&socket(&world, "one"));
    for place in 0u64..60 {
        writeln!(qemu.stdin.as_mut().unwrap(), "write -P {} {} 1M", place + 1, place * MIB).unwrap();
    }
    let told = tokio::task::spawn_blocking(move || end(qemu)).await.unwrap();
    let taken: Vec<u64> =
        (0..60).filter(|place| told.contains(&format!("wrote 1048576/1048576 bytes at offset {}\n", place * MIB))).collect();
    assert!(told.contains("No space left on device") && (10..55).contains(&taken.len()), "{} taken: {told}", taken.len());
    // Also what a server that is started then finds.
    tokio::task::block_in_place(|| kill_server(&one, true));
    let reads = |socket: PathBuf, taken: Vec<u64>| {
        let mut qemu = qemu_io(&socket);
        for place in &taken {
            writeln!(qemu.stdin.as_mut().unwrap(), "read -P {} {} 1M", place + 1, place * MIB).unwrap();
        }
        let told = end(qemu);
        assert!(!told.contains("failed") && told.matches("read 1048576/1048576").count() == taken.len(), "{told}");
    };
    let (path, places) = (socket(&world, "one"), taken.clone());
    soon("the socket", || UnixStream::connect(&path).is_ok());
    tokio::task::spawn_blocking(move || reads(path, places)).await.unwrap();
    let left = open.finish().await.unwrap();
    world.promote(1, left).await;
    world.nothing_left("one");
    drop(one);
    drop(small);
    let two = world.worker("two").await;
    let open = two.open(write(2, 1, 1, NBD)).await.unwrap();
    let path = socket(&world, "two");
    tokio::task::spawn_blocking(move || reads(path, taken)).await.unwrap();
    open.forget().await;
}
