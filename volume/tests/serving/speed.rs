//! How fast it is, beside `qemu-nbd` with a raw file: one client for both, one after the other, in turns.

use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use volley_volume::serve::nbd::client::connect;
use volley_volume::serve::nbd::wire::{RequestHead, SIMPLE_REPLY_BYTES, command, decode_simple_reply};
use volley_volume::serve::socket::Socket;

use crate::device::FileDevice;
use crate::file::{Mounted, possible};
use crate::process::{Killed, place, server};
use crate::{have, soon};

const SIZE: u64 = 512 << 20;
const ROUNDS: usize = 7;
const TIME: Duration = Duration::from_millis(700);

/// Operations a second, with `depth` under way.
fn measure(path: &Path, command: u16, len: u32, depth: usize, random: bool) -> f64 {
    let (stream, export) = connect(path, "").unwrap();
    let (mut out, mut back) = (&stream, &stream);
    let bytes = vec![0x5a; len as usize];
    let blocks = export.size / u64::from(len);
    let (mut state, mut next) = (1u64, 0u64);
    let mut send = |out: &mut &UnixStream, count: usize| {
        let mut said = Vec::with_capacity(count * (28 + bytes.len()));
        for _ in 0..count {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let block = if random { (state >> 33) % blocks } else { next % blocks };
            next += 1;
            said.extend(RequestHead { flags: 0, command, cookie: next, offset: block * u64::from(len), len }.encode());
            if command == command::WRITE {
                said.extend(&bytes);
            }
        }
        out.write_all(&said).unwrap();
    };
    let reply = SIMPLE_REPLY_BYTES + if command == command::READ { len as usize } else { 0 };
    let mut buffer = vec![0; reply.max(256 * 1024)];
    let (begin, mut done, mut held) = (Instant::now(), 0usize, 0);
    send(&mut out, depth);
    while begin.elapsed() < TIME {
        let got = back.read(&mut buffer[held..]).unwrap();
        assert!(got > 0);
        held += got;
        let whole = held / reply;
        for at in 0..whole {
            let head = buffer[at * reply..].first_chunk().and_then(decode_simple_reply);
            assert!(head.is_some_and(|(_, error)| error == 0));
        }
        if whole > 0 {
            buffer.copy_within(whole * reply..held, 0);
            held -= whole * reply;
            done += whole;
            send(&mut out, whole);
        }
    }
    done as f64 / begin.elapsed().as_secs_f64()
}

/// `cargo test -p volley-volume --test serving speed -- --ignored --nocapture`
#[test]
#[ignore = "a measurement, not a check"]
fn beside_qemu_nbd() {
    if !have(&["qemu-nbd"]) {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    for name in ["ours", "theirs"] {
        let mut file = std::fs::File::create(dir.path().join(name)).unwrap();
        (0..SIZE >> 20).for_each(|_| file.write_all(&[1; 1 << 20]).unwrap());
    }
    let _socket = Socket::open(&place(dir.path(), "s"), Arc::new(FileDevice::at(&dir.path().join("ours"), SIZE))).unwrap();
    let path = |name: &str| dir.path().join(name);
    let qemu = Command::new("qemu-nbd").args(["-f", "raw", "-t", "-k"]).arg(path("q")).arg(path("theirs")).spawn().unwrap();
    let _qemu = Killed(qemu);
    soon("qemu-nbd", || UnixStream::connect(path("q")).is_ok());
    println!("{:<28} {:>12} {:>12} {:>7}", "operations a second", "ours", "qemu-nbd", "ratio");
    for (name, command, len, depth, random) in [
        ("4 KiB random read, 1", command::READ, 4096, 1, true),
        ("4 KiB random read, 16", command::READ, 4096, 16, true),
        ("4 KiB random write, 1", command::WRITE, 4096, 1, true),
        ("4 KiB random write, 16", command::WRITE, 4096, 16, true),
        ("1 MiB sequential read, 1", command::READ, 1 << 20, 1, false),
        ("1 MiB sequential read, 4", command::READ, 1 << 20, 4, false),
        ("1 MiB sequential write, 1", command::WRITE, 1 << 20, 1, false),
        ("1 MiB sequential write, 4", command::WRITE, 1 << 20, 4, false),
    ] {
        let mut rates = [Vec::new(), Vec::new()];
        for _ in 0..ROUNDS {
            for (rates, socket) in rates.iter_mut().zip(["s", "q"]) {
                rates.push(measure(&path(socket), command, len, depth, random));
            }
        }
        let [ours, theirs] = rates.map(|mut rates| {
            rates.sort_by(f64::total_cmp);
            rates[ROUNDS / 2]
        });
        println!("{name:<28} {ours:>12.0} {theirs:>12.0} {:>7.2}", ours / theirs);
    }
}

/// Calls a second of one user of a file, or of the socket behind it.
fn calls(mut one: impl FnMut(u64)) -> f64 {
    let (begin, mut done) = (Instant::now(), 0u64);
    while begin.elapsed() < TIME {
        one(done.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 20);
        done += 1;
    }
    done as f64 / begin.elapsed().as_secs_f64()
}

/// `cargo test -p volley-volume --test serving speed -- --ignored --nocapture`
#[test]
#[ignore = "a measurement, not a check"]
fn the_file_beside_the_socket() {
    if !possible() {
        return;
    }
    let dir = tempfile::tempdir().unwrap();
    let mut disk = std::fs::File::create(dir.path().join("disk")).unwrap();
    (0..SIZE >> 20).for_each(|_| disk.write_all(&[1; 1 << 20]).unwrap());
    let _server = server(dir.path(), SIZE);
    let mut socket = [0.0; 4];
    let kinds =
        [(command::READ, 4096, true), (command::WRITE, 4096, true), (command::READ, 1 << 20, false), (command::WRITE, 1 << 20, false)];
    for (rate, (command, len, random)) in socket.iter_mut().zip(kinds) {
        *rate = measure(&dir.path().join("socket"), command, len, 1, random);
    }
    let _mounted = Mounted::new(dir.path(), 0, None, Duration::from_secs(60));
    let file = std::fs::File::options().read(true).write(true).open(dir.path().join("file")).unwrap();
    let mut bytes = vec![7; 1 << 20];
    println!("{:<28} {:>12} {:>12}", "operations a second", "the file", "the socket");
    for (socket, (command, len, _)) in socket.into_iter().zip(kinds) {
        let blocks = SIZE / u64::from(len);
        let bytes = &mut bytes[..len as usize];
        let rate = calls(|n| {
            let offset = n % blocks * u64::from(len);
            if command == command::READ { file.read_exact_at(bytes, offset).unwrap() } else { file.write_all_at(bytes, offset).unwrap() }
        });
        println!("{:<28} {rate:>12.0} {socket:>12.0}", format!("{len} bytes, {}", if command == command::READ { "read" } else { "write" }));
    }
}
