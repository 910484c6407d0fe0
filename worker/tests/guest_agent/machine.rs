//! The agent as the first process of a Linux guest, over a virtio port, and through snapshots.

use std::collections::BTreeSet;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};

use minicbor::bytes::ByteArray;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use volley_guest::files::Unpack;
use volley_jobspecs::wire::guest::mux::Channel;
use volley_jobspecs::wire::guest::{Disk, Exec, Exit, Get, Identity, Limits, Mount, Put, RefusalKind, Tty, User};
use volley_worker::guest::{FilesError, Guest, GuestError};

use crate::qemu::{Machine, Parts, Saved};
use crate::{LIMITS, SOON, finish, run, shell};

/// Everything that machines need, or none, and the reason is printed.
fn parts() -> Option<Arc<Parts>> {
    Parts::find().map_err(|why| eprintln!("skipped: {why}")).ok()
}

async fn output(guest: &Guest, script: &str) -> String {
    let end = run(guest, &shell(script)).await;
    assert_eq!((end.ended.exit, end.errors.as_str()), (Exit::Code(0), ""), "{script}");
    end.output.trim().to_owned()
}

fn unix_now() -> Duration {
    SystemTime::now().duration_since(SystemTime::UNIX_EPOCH).unwrap()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_boots_and_does_what_it_is_asked() {
    let Some(parts) = parts() else { return };
    let mut machine = Machine::boot(&parts, &[], "");
    let (guest, hello) = machine.guest(1, false).await.unwrap();
    assert!(hello.limits && !hello.reseed_due && hello.kernel.starts_with('6'), "{hello:?}");
    let end = run(&guest, &shell("echo out; echo err >&2; exit 3")).await;
    assert_eq!((end.output.as_str(), end.errors.as_str(), end.ended.exit), ("out\n", "err\n", Exit::Code(3)), "{:?}", end.ended);
    limits_hold(&guest).await;
    files_go_in_and_out(&guest).await;
    there_are_terminals(&guest).await;
    it_becomes_somebody(&guest, &hello.boot_id.unwrap()).await;
    let stats = guest.stats().await.unwrap();
    assert!(stats.memory_total_bytes > 100 << 20 && stats.uptime_ms > 0 && stats.cpu_busy_ms > 0, "{stats:?}");
    guest.sync(SOON).await.unwrap();
    guest.shutdown().await.unwrap();
    assert!(machine.off(Duration::from_secs(20)).await);
}

async fn limits_hold(guest: &Guest) {
    let limits = Limits { memory_bytes: Some(24 << 20), ..Limits::default() };
    // The shell fills its own memory, and is what the kernel ends.
    let hog = Exec { limits, ..shell("x=xxxxxxxxxxxxxxxx; while :; do x=$x$x; done") };
    let end = run(guest, &hog).await;
    assert!(end.ended.oom_kills > 0 && end.ended.exit == Exit::Signal(9), "{:?}", end.ended);
    assert!(end.ended.usage.memory_peak_bytes.is_some_and(|peak| peak <= 25 << 20), "{:?}", end.ended);
    let limits = Limits { pids: Some(10), ..Limits::default() };
    let bomb = Exec { limits, timeout_ms: Some(2000), ..shell("b() { b | b & }; b; sleep 60") };
    let end = run(guest, &bomb).await;
    assert!(end.ended.survivors == 0, "{:?}", end.ended);
    // Without limits of their own the agent still has its room.
    let end = run(guest, &shell("x=xxxxxxxxxxxxxxxx; while :; do x=$x$x; done")).await;
    assert!(end.ended.oom_kills > 0 && end.ended.exit == Exit::Signal(9), "{:?}", end.ended);
    let bomb = guest.exec(&shell("b() { b | b & }; b; sleep 600")).await.unwrap();
    tokio::time::sleep(Duration::from_secs(3)).await;
    guest.stats().await.unwrap();
    bomb.kill().unwrap();
    assert_eq!(finish(&bomb).await.ended.survivors, 0);
    // What left the session and closed its streams dies with the command.
    let end = run(guest, &shell("setsid sleep 600 </dev/null >/dev/null 2>&1 & echo $!")).await;
    let stray = end.output.trim().to_owned();
    assert_eq!(output(guest, &format!("[ -d /proc/{stray} ] || echo gone")).await, "gone");
    let end =
        run(guest, &Exec { timeout_ms: Some(300), grace_ms: 200, ..shell("trap '' TERM; exec >&- 2>&-; while :; do sleep 1; done") }).await;
    assert_eq!((end.ended.exit, end.ended.timed_out), (Exit::Signal(9), true));
    let named = |name: &str| Some(User::Named(name.to_owned()));
    let end = run(guest, &Exec { user: named("ann"), ..shell("id -u; id -G; echo again > /dev/stdout; echo err > /dev/stderr") }).await;
    assert_eq!((end.output.as_str(), end.errors.as_str()), ("1000\n1001 50\nagain\n", "err\n"));
    assert!(
        matches!(guest.exec(&Exec { user: named("bob"), ..shell("true") }).await, Err(GuestError::Refused(r)) if r.kind == RefusalKind::NotFound)
    );
    assert_eq!(output(guest, "ls -d /sys/fs/cgroup/commands/exec-* | wc -l").await, "1", "its own");
}

async fn files_go_in_and_out(guest: &Guest) {
    let (from, back) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    std::fs::write(from.path().join("big"), vec![3; 2 << 20]).unwrap();
    std::fs::write(from.path().join("small"), "hello").unwrap();
    let put = Put { dir: "/work/in".to_owned(), owner: Some((1000, 1001)), limits: LIMITS };
    let (here, there) = guest.put(put, from.path().to_owned(), SOON).await.unwrap();
    assert_eq!((here.entries, &here), (2, &there));
    assert_eq!(
        output(guest, "cat /work/in/small; stat -c %u:%g /work/in/big; cp /dev/null /work/in/new; ls -d /dev/null").await,
        "hello1000:1001\n/dev/null"
    );
    let how = Unpack { owner: None, mode_mask: 0o777, limits: LIMITS };
    let opened = OwnedFd::from(std::fs::File::open(back.path()).unwrap());
    let (here, _) = guest.get(Get { path: "/work/in".to_owned(), limits: LIMITS }, opened, how, SOON).await.unwrap();
    assert_eq!((here.entries, here.bytes), (3, (2 << 20) + 5));
    assert!(std::fs::read(back.path().join("big")).unwrap() == vec![3; 2 << 20]);
}

async fn there_are_terminals(guest: &Guest) {
    let exec = Exec {
        user: Some(User::Named("ann".to_owned())),
        tty: Some(Tty { rows: 33, cols: 77 }),
        ..shell("[ -t 0 ] && [ -t 2 ] && echo yes; echo named > $(readlink /proc/self/fd/0); echo ctl >/dev/tty; stty size")
    };
    let end = run(guest, &exec).await;
    assert_eq!((end.output.as_str(), end.errors.as_str(), end.ended.exit), ("yes\r\nnamed\r\nctl\r\n33 77\r\n", "", Exit::Code(0)));
    // What it leaves in the background goes with it.
    let end = run(guest, &Exec { tty: Some(Tty { rows: 24, cols: 80 }), ..shell("sleep 600 & echo $!") }).await;
    let stray = end.output.trim().to_owned();
    assert_eq!(output(guest, &format!("[ -d /proc/{stray} ] || echo gone")).await, "gone");
}

async fn it_becomes_somebody(guest: &Guest, boot_id: &str) {
    let identity = |byte: u8| Identity {
        hostname: Some(format!("task-{byte}")),
        machine_id: Some(ByteArray::from([byte; 16])),
        boot_id: Some(ByteArray::from([byte; 16])),
    };
    for byte in [0xab, 0xcd] {
        guest.set_identity(identity(byte)).await.unwrap();
    }
    let told = output(guest, "hostname; cat /etc/machine-id /proc/sys/kernel/random/boot_id").await;
    let expected = format!("task-{}\n{}\ncdcdcdcd-cdcd-cdcd-cdcd-cdcdcdcdcdcd", 0xcd, "cd".repeat(16));
    assert_eq!(told, expected);
    assert_ne!(guest.hello().await.unwrap().boot_id.unwrap(), boot_id);
    let then = Duration::from_secs(2_000_000_000);
    let before = guest.set_clock(u64::try_from(then.as_nanos()).unwrap()).await.unwrap();
    assert!(Duration::from_nanos(before).abs_diff(unix_now()) < Duration::from_secs(3600));
    let told: u64 = output(guest, "date +%s").await.parse().unwrap();
    assert!((2_000_000_000..2_000_000_100).contains(&told), "{told}");
    let (first, second) = (guest.reseed([1; 64]).await.unwrap(), guest.reseed([1; 64]).await.unwrap());
    assert_ne!(first, second, "the generator goes on");
}

/// Starts a clone with its channel connected before its state is loaded, and begins a session once it runs.
async fn clone(parts: &Parts, saved: &Saved, nonce: u8) -> (Machine, Guest) {
    let mut machine = Machine::restore(parts, saved, &[]);
    let stream = machine.stream().await;
    machine.load(saved);
    machine.resume();
    let (guest, hello) = Guest::connect(stream, [nonce; 32], true, SOON).await.unwrap();
    assert!(hello.reseed_due && hello.boot_id.is_none());
    (machine, guest)
}

#[tokio::test(flavor = "multi_thread")]
async fn clones_of_a_machine_saved_under_load_are_reachable_and_unlike() {
    let Some(parts) = parts() else { return };
    let machine = Machine::boot(&parts, &[], "");
    let (guest, _) = machine.guest(1, false).await.unwrap();
    output(&guest, "echo warm > /tmp/warm; head -c 16 /dev/urandom > /dev/null").await;
    // Output that nobody reads, input that nobody takes, a call that is dropped at once.
    let noisy = guest.exec(&shell("exec yes")).await.unwrap();
    let fed = guest.exec(&Exec { input: true, ..shell("exec sleep 600") }).await.unwrap();
    let _ = tokio::time::timeout(Duration::from_millis(500), fed.write(&vec![0; 2 << 20])).await;
    let (kept, stream) = guest.prepare_snapshot(false).await.unwrap();
    assert_eq!(kept, 0);
    assert!(matches!(noisy.ended().await, Err(GuestError::Lost(_))));
    // The connection stays open and is not read: what the agent said has all been read, and it says nothing more.
    let saved = machine.save();
    drop(stream);

    let mut drawn = BTreeSet::new();
    for nonce in [10, 11] {
        let (machine, guest) = clone(&parts, &saved, nonce).await;
        assert!(matches!(guest.exec(&shell("true")).await, Err(GuestError::Refused(r)) if r.kind == RefusalKind::NotReseeded));
        assert!(drawn.insert(hex(&guest.reseed([nonce; 64]).await.unwrap())), "siblings differ");
        guest.set_clock(u64::try_from(unix_now().as_nanos()).unwrap()).await.unwrap();
        // The kernel drew its boot id when it was first asked for it, before the snapshot.
        guest.set_identity(Identity { boot_id: Some(ByteArray::from([nonce; 16])), ..Identity::default() }).await.unwrap();
        let told =
            output(&guest, "cat /tmp/warm; date +%s; [ -z \"$(ls -d /sys/fs/cgroup/commands/exec-* | tail -n +2)\" ] && echo alone").await;
        let lines: Vec<&str> = told.lines().collect();
        assert_eq!((lines[0], lines[2]), ("warm", "alone"), "nothing of the warm-up lives");
        assert!(unix_now().abs_diff(Duration::from_secs(lines[1].parse().unwrap())) < Duration::from_secs(5), "{told}");
        for name in ["/dev/urandom", "/proc/sys/kernel/random/uuid", "/proc/sys/kernel/random/boot_id"] {
            assert!(drawn.insert(output(&guest, &format!("head -c 32 {name} | od -t x1")).await), "{name}");
        }
        // The host goes, with a channel full, and comes back; in between the agent waits and does not spin.
        let noisy = guest.exec(&shell("exec yes")).await.unwrap();
        tokio::time::sleep(Duration::from_millis(500)).await;
        drop(guest);
        drop(noisy);
        tokio::time::sleep(Duration::from_millis(500)).await;
        let (before, begin) = (machine.cpu_ms(), Instant::now());
        tokio::time::sleep(Duration::from_secs(2)).await;
        let share = (machine.cpu_ms() - before) * 100 / u64::try_from(begin.elapsed().as_millis()).unwrap();
        assert!(share < 30, "{share} % of a core while nobody is connected");
        let (guest, hello) = machine.guest(nonce + 100, false).await.unwrap();
        assert!(!hello.reseed_due);
        assert_eq!(output(&guest, "echo again").await, "again");
    }
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[tokio::test(flavor = "multi_thread")]
async fn a_machine_saved_in_the_middle_of_a_frame_takes_up_a_new_session() {
    let Some(parts) = parts() else { return };
    let machine = Machine::boot(&parts, &[], "");
    let (guest, _) = machine.guest(1, false).await.unwrap();
    // A session that was never ended: the agent has a call open, and then half a frame comes.
    let (_, mut stream) = guest.prepare_snapshot(false).await.unwrap();
    drop(guest_with_half_a_frame(&mut stream).await);
    tokio::time::sleep(Duration::from_millis(500)).await;
    let saved = machine.save();
    drop(stream);
    let (_machine, guest) = clone(&parts, &saved, 20).await;
    guest.reseed([20; 64]).await.unwrap();
    assert_eq!(output(&guest, "echo in").await, "in");
}

/// Begins a session by hand, and leaves the agent in the middle of a frame.
async fn guest_with_half_a_frame(stream: &mut Box<dyn volley_worker::guest::Stream>) -> Vec<u8> {
    use volley_jobspecs::wire::guest::resync::{FRAME_BYTES, From, Resync, Scanner};
    let resync = Resync { nonce: [7; 32], attempt: 1, reseed: false };
    stream.write_all(&resync.encode(From::Host)).await.unwrap();
    let mut echo = vec![0; FRAME_BYTES];
    tokio::time::timeout(SOON, stream.read_exact(&mut echo)).await.unwrap().unwrap();
    assert_eq!(Scanner::new(From::Guest).feed(&echo).1, Some(resync));
    // The head of a frame of 16,000 bytes, and one byte of it.
    stream.write_all(&[2, 0, 0x80, 0x3e, 1, 0, 0, 0, 9]).await.unwrap();
    echo
}

#[tokio::test(flavor = "multi_thread")]
async fn processes_live_on_only_where_that_is_wanted() {
    let Some(parts) = parts() else { return };
    let machine = Machine::boot(&parts, &[], "");
    let (guest, _) = machine.guest(1, false).await.unwrap();
    let server = guest.exec(&shell("echo ready; while :; do echo tick > /tmp/tick; sleep 0.1; done")).await.unwrap();
    let mut buffer = [0; 16];
    assert_eq!(server.read(Channel::Output, &mut buffer).await.unwrap(), 6);
    let (kept, stream) = guest.prepare_snapshot(true).await.unwrap();
    assert!(kept >= 1);
    // Here the host hangs up before the machine is saved.
    drop(stream);
    tokio::time::sleep(Duration::from_millis(300)).await;
    let saved = machine.save();
    let (_machine, guest) = clone(&parts, &saved, 30).await;
    guest.reseed([30; 64]).await.unwrap();
    assert_eq!(output(&guest, "rm /tmp/tick; sleep 1; cat /tmp/tick").await, "tick", "the server still serves");
    // And where it isn't, it ends.
    let (kept, stream) = guest.prepare_snapshot(false).await.unwrap();
    assert_eq!(kept, 0);
    let (guest, _) = Guest::connect(stream, [31; 32], true, SOON).await.unwrap();
    guest.reseed([31; 64]).await.unwrap();
    assert_eq!(output(&guest, "rm /tmp/tick; sleep 1; [ -e /tmp/tick ] || echo quiet").await, "quiet");
}

/// A connection to the vsock port, through a command in the machine that joins it to its streams.
fn tunnel(guest: &Arc<Guest>, port: u32) -> Box<tokio::io::DuplexStream> {
    let (near, far) = tokio::io::duplex(64 * 1024);
    let guest = guest.clone();
    tokio::spawn(async move {
        let command = guest.exec(&Exec { input: true, ..shell(&format!("exec vsock {port}")) }).await.unwrap();
        let (mut from, mut to) = tokio::io::split(far);
        let inward = async {
            let mut buffer = [0; 4096];
            while let Ok(len @ 1..) = from.read(&mut buffer).await {
                command.write(&buffer[..len]).await.unwrap();
            }
        };
        let outward = async {
            let mut buffer = [0; 4096];
            while let Ok(len @ 1..) = command.read(Channel::Output, &mut buffer).await {
                if to.write_all(&buffer[..len]).await.is_err() {
                    break;
                }
            }
        };
        // Either end is the end of the connection.
        tokio::select! { () = inward => {}, () = outward => {} }
    });
    Box::new(near)
}

#[tokio::test(flavor = "multi_thread")]
async fn an_agent_listens_on_vsock() {
    let Some(parts) = parts() else { return };
    let machine = Machine::boot(&parts, &[], "");
    let guest = Arc::new(machine.guest(1, false).await.unwrap().0);
    let _listening = guest.exec(&shell("exec /init --vsock 5000")).await.unwrap();
    // Three sessions: the first is dropped in the middle of a command, the second takes the place of a living one.
    let script = shell("busybox dd if=/dev/zero bs=65536 count=16; echo over >&2");
    for nonce in [40, 41, 42] {
        tokio::time::sleep(Duration::from_millis(300)).await;
        let (inner, _) = Guest::connect(tunnel(&guest, 5000), [nonce; 32], false, SOON).await.unwrap();
        let end = run(&inner, &script).await;
        assert_eq!((end.output.len(), end.errors.lines().last()), (1 << 20, Some("over")));
        let _cut = inner.exec(&shell("exec yes")).await.unwrap();
        if nonce == 41 {
            let (next, _) = Guest::connect(tunnel(&guest, 5000), [50; 32], false, SOON).await.unwrap();
            assert!(matches!(inner.hello().await, Err(GuestError::Lost(_))), "the newer connection counts");
            assert_eq!(output(&next, "echo next").await, "next");
        }
    }
}

/// A disk image with an ext4 file system that holds what lies in `from`; none, and the reason is printed.
fn ext4(image: &Path, from: &Path, bytes: u64) -> Option<()> {
    std::fs::File::create(image).unwrap().set_len(bytes).unwrap();
    let made = std::process::Command::new("/sbin/mke2fs").args(["-q", "-t", "ext4", "-d"]).arg(from).arg(image).status();
    match made {
        Ok(status) => {
            assert!(status.success());
            Some(())
        }
        Err(e) => {
            eprintln!("skipped: no /sbin/mke2fs: {e}");
            None
        }
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn a_root_disk_under_an_overlay_and_disks_that_come_and_go() {
    let Some(parts) = parts() else { return };
    let (files, images) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    for dir in ["bin", "etc", "proc", "sys", "dev", "run", "tmp"] {
        std::fs::create_dir(files.path().join(dir)).unwrap();
    }
    parts.busybox_into(&files.path().join("bin"));
    std::fs::write(files.path().join("etc/release"), "the image\n").unwrap();
    let (root, volume) = (images.path().join("root"), images.path().join("volume"));
    let data = tempfile::tempdir().unwrap();
    std::fs::write(data.path().join("kept"), "on the volume\n").unwrap();
    if ext4(&root, files.path(), 32 << 20).and_then(|()| ext4(&volume, data.path(), 16 << 20)).is_none() {
        return;
    }
    let drive = |image: &Path, name: &str, flags: &str| format!("if=none,id={name},file={},format=raw{flags}", image.display());
    let (root, volume) = (drive(&root, "root", ",readonly=on"), drive(&volume, "vol0", ""));
    let more =
        ["-drive", &root, "-device", "virtio-blk-pci,drive=root", "-drive", &volume, "-device", "virtio-blk-pci,drive=vol0,serial=vol0"];
    let machine = Machine::boot(&parts, &more, "volley.root=vda volley.rootfs=ext4");
    let (guest, _) = machine.guest(1, false).await.unwrap();
    assert_eq!(
        output(&guest, "cat /etc/release; echo mine > /etc/release; cat /etc/release; ls /volley 2>/dev/null || echo none").await,
        "the image\nmine\nnone"
    );
    let mount = Mount {
        disk: Disk::Serial("vol0".to_owned()),
        bytes: 16 << 20,
        fs: "ext4".to_owned(),
        target: "/mnt/data".to_owned(),
        read_only: false,
        owner: Some((1000, 1001)),
        grow: false,
    };
    let refused = |result: Result<(), GuestError>, wanted: RefusalKind| matches!(result, Err(GuestError::Refused(r)) if r.kind == wanted);
    assert!(
        refused(guest.mount(Mount { bytes: 17 << 20, ..mount.clone() }).await, RefusalKind::System),
        "a disk of another size is not mounted"
    );
    assert!(refused(guest.mount(Mount { disk: Disk::Named("vdz".into()), ..mount.clone() }).await, RefusalKind::NotFound));
    assert!(refused(guest.mount(Mount { disk: Disk::Named("../vdb".into()), ..mount.clone() }).await, RefusalKind::NotFound));
    guest.mount(mount.clone()).await.unwrap();
    assert_eq!(output(&guest, "cat /mnt/data/kept; stat -c %u:%g /mnt/data; echo new > /mnt/data/new").await, "on the volume\n1000:1001");
    guest.freeze("/mnt/data").await.unwrap();
    let blocked = guest.exec(&Exec { timeout_ms: Some(60_000), ..shell("echo begin; echo x > /mnt/data/late; echo end") }).await.unwrap();
    let mut buffer = [0; 16];
    assert_eq!(blocked.read(Channel::Output, &mut buffer).await.unwrap(), 6);
    assert!(tokio::time::timeout(Duration::from_millis(500), blocked.read(Channel::Output, &mut buffer)).await.is_err(), "writes are held");
    guest.thaw("/mnt/data").await.unwrap();
    assert_eq!(finish(&blocked).await.output, "end\n");
    std::fs::write(data.path().join("large"), vec![1; 20 << 20]).unwrap();
    let put = Put { dir: "/mnt/data/in".to_owned(), owner: None, limits: LIMITS };
    let full = guest.put(put, data.path().join("large"), SOON).await;
    assert!(matches!(&full, Err(FilesError::Guest(GuestError::Refused(r))) if r.kind == RefusalKind::NoSpace), "{full:?}");
    guest.unmount("/mnt/data", SOON).await.unwrap();
    guest.mount(Mount { disk: Disk::Named("vdb".to_owned()), read_only: true, owner: None, ..mount }).await.unwrap();
    assert_eq!(output(&guest, "cat /mnt/data/new; echo x 2>/dev/null > /mnt/data/x || echo refused").await.lines().next(), Some("new"));
}
