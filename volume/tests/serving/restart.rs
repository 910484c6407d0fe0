//! The server is killed and started again under those who use the volume.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::FileExt;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use crate::process::{Killed, server};
use crate::{file, have, pattern, patterns, soon};

const MIB: u64 = 1 << 20;
const ROUNDS: usize = 12;

/// Kills the server `ROUNDS` times while `done` grows, and lets it be away for a moment.
fn kill_again_and_again(dir: &std::path::Path, size: u64, mut running: Killed, done: &dyn Fn() -> u64) -> Killed {
    for round in 0..ROUNDS {
        let before = done();
        soon("something done", || done() > before);
        running.kill();
        std::thread::sleep(Duration::from_millis(round as u64 * 7));
        running = server(dir, size);
    }
    running
}

#[test]
fn qemu_writes_through_restarts_of_the_server() {
    if !have(&["qemu-io"]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let size = 64 * MIB;
    let running = server(dir.path(), size);
    let socket = dir.path().join("socket");
    // QEMU's own client, as a machine has it.
    let image = format!("driver=raw,file.driver=nbd,file.server.type=unix,file.server.path={},file.reconnect-delay=60", socket.display());
    let mut qemu =
        Killed(Command::new("qemu-io").args(["--image-opts", &image]).stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap());
    let mut input = qemu.0.stdin.take().unwrap();
    // That it could not connect at first is no restart.
    let disk = File::open(dir.path().join("disk")).unwrap();
    writeln!(input, "write -q -P 255 {} 512", size - 512).unwrap();
    soon("QEMU", || {
        let mut byte = [0];
        disk.read_exact_at(&mut byte, size - 1).is_ok_and(|()| byte == [255])
    });
    let asked = Arc::new(AtomicU64::new(0));
    let stop = Arc::new(AtomicBool::new(false));
    let (counted, stopped) = (Arc::clone(&asked), Arc::clone(&stop));
    // As it reads one command after the other, and a pipe holds a few thousand, this is not far ahead of it.
    let writing = std::thread::spawn(move || {
        let mut last = vec![0u8; 1023];
        let mut i = 0u64;
        while !stopped.load(Ordering::SeqCst) {
            let (slot, value) = (i * 37 % 1023, (i % 250 + 1) as u8);
            last[slot as usize] = value;
            let padding = " ".repeat(400);
            writeln!(input, "write -q {} -P {value} {} 64k{padding}", if i.is_multiple_of(16) { "-f" } else { "" }, slot * 65_536).unwrap();
            counted.fetch_add(1, Ordering::SeqCst);
            i += 1;
        }
        for (slot, value) in last.iter().enumerate().filter(|(_, value)| **value > 0) {
            writeln!(input, "read -q -P {value} {} 64k", slot * 65_536).unwrap();
        }
        writeln!(input, "quit").unwrap();
        last
    });
    let running = kill_again_and_again(dir.path(), size, running, &|| asked.load(Ordering::SeqCst));
    stop.store(true, Ordering::SeqCst);
    let last = writing.join().unwrap();
    let mut told = String::new();
    std::io::Read::read_to_string(qemu.0.stdout.as_mut().unwrap(), &mut told).unwrap();
    assert!(!told.contains("failed") && !told.contains("error"), "{told}");
    assert!(qemu.0.wait().unwrap().success());
    drop(running);
    let mut block = vec![0; 65_536];
    for (slot, value) in last.iter().enumerate() {
        disk.read_exact_at(&mut block, slot as u64 * 65_536).unwrap();
        assert!(block.iter().all(|byte| byte == value), "slot {slot}");
    }
    assert!(last.iter().filter(|value| **value > 0).count() > 16, "hardly anything was written");
}

#[test]
fn users_of_the_file_do_not_notice_that_the_server_was_killed() {
    if !file::possible() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let size = 64 * MIB;
    let running = server(dir.path(), size);
    let _mounted = file::Mounted::new(dir.path(), 0, None, Duration::from_secs(60));
    let stop = Arc::new(AtomicBool::new(false));
    let done = Arc::new(AtomicU64::new(0));
    // Each has its own part, writes it again and again, reads it back, and syncs now and then.
    let users: Vec<_> = (0..4u64)
        .map(|user| {
            let file = File::options().read(true).write(true).open(dir.path().join("file")).unwrap();
            let (stop, done) = (Arc::clone(&stop), Arc::clone(&done));
            std::thread::spawn(move || {
                let part = 16 * MIB;
                let mut last = vec![0u8; 256];
                let mut back = vec![0; 300_000];
                for i in 0u64.. {
                    let slot = i * 13 % 256;
                    // Some begin and end within blocks; all are shorter than what is between two of them.
                    let (at, len) = (user * part + slot * 65_536 + i % 3 * 100, 1_000 + (i * 4_001 % 60_000) as usize);
                    let seed = (i % 251) as u8;
                    file.write_all_at(&patterns(at, len, seed), at).unwrap();
                    file.read_exact_at(&mut back[..len], at).unwrap();
                    assert!(back[..len].iter().enumerate().all(|(n, byte)| *byte == pattern(at + n as u64, seed)));
                    if i.is_multiple_of(20) {
                        file.sync_data().unwrap();
                    }
                    last[slot as usize] = seed;
                    done.fetch_add(1, Ordering::SeqCst);
                    if i >= 256 && stop.load(Ordering::SeqCst) {
                        // Whole parts, so that what they end with is known.
                        for slot in 0..256 {
                            file.write_all_at(&vec![last[slot as usize]; 65_536], user * part + slot * 65_536).unwrap();
                        }
                        return last;
                    }
                }
                last
            })
        })
        .collect();
    let running = kill_again_and_again(dir.path(), size, running, &|| done.load(Ordering::SeqCst));
    stop.store(true, Ordering::SeqCst);
    let last: Vec<u8> = users.into_iter().flat_map(|user| user.join().unwrap()).collect();
    let (shown, disk) = (File::open(dir.path().join("file")).unwrap(), File::open(dir.path().join("disk")).unwrap());
    let mut block = vec![0; 65_536];
    for (slot, value) in last.iter().enumerate() {
        for file in [&shown, &disk] {
            file.read_exact_at(&mut block, slot as u64 * 65_536).unwrap();
            assert!(block.iter().all(|byte| byte == value), "slot {slot}");
        }
    }
    drop(running);
}

#[test]
fn a_server_that_stays_away_is_an_error_until_it_is_back() {
    if !file::possible() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let mut running = server(dir.path(), MIB);
    let _mounted = file::Mounted::new(dir.path(), 0, None, Duration::from_millis(300));
    let shown = File::options().read(true).write(true).open(dir.path().join("file")).unwrap();
    shown.write_all_at(b"here", 5).unwrap();
    running.kill();
    let failed = |error: std::io::Error| error.raw_os_error() == Some(libc_eio());
    assert!(shown.write_all_at(b"lost", 5).is_err_and(failed));
    assert!(shown.sync_data().is_err_and(failed));
    // Another one of a larger size.
    let _running = server(dir.path(), 2 * MIB);
    soon("the server", || shown.write_all_at(b"back", 5).is_ok());
    let mut bytes = [0; 4];
    shown.read_exact_at(&mut bytes, 5).unwrap();
    assert_eq!(&bytes, b"back");
    soon("the size", || shown.metadata().unwrap().len() == 2 * MIB);
    shown.write_all_at(b"end", 2 * MIB - 3).unwrap();
}

fn libc_eio() -> i32 {
    rustix::io::Errno::IO.raw_os_error()
}
