//! `volume-io`: an open volume behind its NBD server, beside `qemu-nbd` with a raw file on the same disk: one client for both, in turns.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::process::{Child, Command, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

use volley_volume::device::Device;
use volley_volume::format::head::FlushMode;
use volley_volume::serve::nbd::client::connect;
use volley_volume::serve::nbd::wire::{RequestHead, SIMPLE_REPLY_BYTES, command, decode_simple_reply};
use volley_volume::serve::socket::{Place, Socket};
use volley_volume::{Limits, Volume};

use crate::costs::held;
use crate::figures::median;
use crate::limits::{Limit, line};
use crate::meter::Meter;
use crate::support::{MIB, World, id, new, noise, opener, snap};

const SIZE: u64 = 512 << 20;
const ROUNDS: usize = 7;
const TIME: Duration = Duration::from_millis(700);
/// What must hold of every figure here.
const LIMIT: Limit = Limit::RatioAtLeast(0.8);
/// Long writes are measured in bursts of so many that the log takes them while uploads are held; then all is uploaded, with the clock stopped. So ours
/// writes to segments that were used before, as a volume at work does, and theirs to a file that is there: neither to memory that nobody had yet.
const BURST: usize = 240;
const BURSTS: usize = 21;

/// What a client asks for, again and again.
#[derive(Clone, Copy)]
struct Load {
    name: &'static str,
    command: u16,
    len: u32,
    /// Requests under way.
    depth: usize,
    random: bool,
    /// A flush behind each.
    flush: bool,
    /// Measured in bursts.
    bursts: bool,
}

const fn load(name: &'static str, command: u16, len: u32, depth: usize, random: bool) -> Load {
    Load { name, command, len, depth, random, flush: false, bursts: false }
}

const LOADS: [Load; 7] = [
    load("4 KiB random reads, 1", command::READ, 4096, 1, true),
    load("4 KiB random reads, 16", command::READ, 4096, 16, true),
    load("4 KiB random writes, 1", command::WRITE, 4096, 1, true),
    load("4 KiB random writes, 16", command::WRITE, 4096, 16, true),
    load("1 MiB reads in order, 4", command::READ, 1 << 20, 4, false),
    Load { bursts: true, ..load("1 MiB writes in order, 4", command::WRITE, 1 << 20, 4, false) },
    Load { flush: true, ..load("4 KiB write and flush", command::WRITE, 4096, 1, true) },
];

/// Operations a second, for some time or up to so many.
fn measure(path: &Path, load: Load, time: Duration, most: usize) -> f64 {
    let (stream, export) = connect(path, "").unwrap();
    let (mut out, mut back) = (&stream, &stream);
    let bytes = noise(load.len as usize, 5);
    let blocks = export.size / u64::from(load.len);
    let (mut state, mut next) = (1u64, 0u64);
    let mut send = |out: &mut &UnixStream, count: usize| {
        let mut said = Vec::with_capacity(count * (56 + bytes.len()));
        for _ in 0..count {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let block = if load.random { (state >> 33) % blocks } else { next % blocks };
            next += 1;
            let head = RequestHead { flags: 0, command: load.command, cookie: next, offset: block * u64::from(load.len), len: load.len };
            said.extend(head.encode());
            if load.command == command::WRITE {
                said.extend(&bytes);
            }
        }
        out.write_all(&said).unwrap();
    };
    let reply = SIMPLE_REPLY_BYTES + if load.command == command::READ { load.len as usize } else { 0 };
    let mut buffer = vec![0; reply.max(256 * 1024)];
    let (begin, mut done, mut kept) = (Instant::now(), 0usize, 0);
    send(&mut out, load.depth);
    while begin.elapsed() < time && done < most {
        let got = back.read(&mut buffer[kept..]).unwrap();
        assert!(got > 0);
        kept += got;
        let whole = kept / reply;
        for at in 0..whole {
            let head = buffer[at * reply..].first_chunk().and_then(decode_simple_reply);
            assert!(head.is_some_and(|(_, error)| error == 0));
        }
        if whole > 0 {
            buffer.copy_within(whole * reply..kept, 0);
            kept -= whole * reply;
            done += whole;
            if load.flush {
                out.write_all(&RequestHead { flags: 0, command: command::FLUSH, cookie: 0, offset: 0, len: 0 }.encode()).unwrap();
                back.read_exact(&mut buffer[..SIMPLE_REPLY_BYTES]).unwrap();
                assert!(buffer.first_chunk().and_then(decode_simple_reply).is_some_and(|(_, error)| error == 0));
            }
            send(&mut out, whole);
        }
    }
    done as f64 / begin.elapsed().as_secs_f64()
}

/// Ends with its owner.
struct Killed(Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

fn filled(world: &World, name: &str, limits: Limits) -> Arc<Volume> {
    let (host, _) = Meter::host(world, name, limits);
    let number = name.as_bytes()[0];
    host.create(new(id(number), SIZE, FlushMode::Local)).unwrap();
    let volume = host.attach(id(number), &opener(number)).unwrap();
    for n in 0..SIZE / MIB {
        volume.write(n * MIB, &noise(MIB as usize, n), false).unwrap();
    }
    volume.flush().unwrap();
    Arc::new(volume)
}

fn served(dir: &Path, file: &str, volume: &Arc<Volume>) -> Socket {
    let me = rustix::process::geteuid().as_raw();
    let place = Place {
        dir: dir.to_owned(),
        file: file.to_owned(),
        owner: me,
        group: rustix::process::getegid().as_raw(),
        peers: vec![me],
        export: String::new(),
    };
    Socket::open(&place, Arc::clone(volume) as Arc<dyn Device>).unwrap()
}

/// `volume-io`.
pub fn beside_qemu_nbd() {
    let world = World::new();
    let dir = world.dir.clone();
    let volume = filled(&world, "a", held());
    let socket = served(&dir, "s", &volume);
    let mut raw = std::fs::File::create(dir.join("raw")).unwrap();
    (0..SIZE / MIB).for_each(|n| raw.write_all(&noise(MIB as usize, n)).unwrap());
    raw.sync_all().unwrap();
    let mut theirs = Command::new("qemu-nbd");
    // It tells of each client that leaves while replies are under way.
    theirs.args(["-f", "raw", "-t", "-k"]).arg(dir.join("q")).arg(dir.join("raw")).stderr(Stdio::null());
    let theirs = theirs.spawn();
    let Ok(theirs) = theirs else {
        eprintln!("skipped: there is no qemu-nbd; apt-get install qemu-utils");
        return;
    };
    let _theirs = Killed(theirs);
    let begin = Instant::now();
    while UnixStream::connect(dir.join("q")).is_err() {
        assert!(begin.elapsed() < Duration::from_secs(30), "qemu-nbd does not come up");
        std::thread::sleep(Duration::from_millis(20));
    }
    for load in LOADS {
        let mut rates = [Vec::new(), Vec::new()];
        let (rounds, most) = if load.bursts { (BURSTS, BURST) } else { (ROUNDS, usize::MAX) };
        for round in 0..rounds {
            for (rates, socket) in rates.iter_mut().zip(["s", "q"]) {
                rates.push(measure(&dir.join(socket), load, TIME, most));
            }
            if load.bursts {
                // Which commits.
                volume.snapshot(snap(round as u8)).unwrap();
            }
        }
        line(&format!("volume-io {}, 1/s", load.name), median(&rates[0]), Some(median(&rates[1])), Some(LIMIT));
    }
    drop(socket);
    // With commits as they come, to a server on the same disk.
    let volume = filled(&world, "b", Limits::default());
    let _socket = served(&dir, "t", &volume);
    let sustained = measure(&dir.join("t"), LOADS[5], Duration::from_secs(10), usize::MAX);
    line("volume-io sustained writes, MiB/s", sustained, None, None);
}
