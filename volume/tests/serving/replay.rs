//! The power of a machine is cut while ext4 writes on a volume: whatever of its unflushed writes had reached the disk, the file system is whole, and what was synced is there.
//!
//! A recorder stands between whoever shows the volume and our server, and keeps every request and when it was answered. From that, disks are made as a cut could have left them:
//! all that a flush covers, and of the rest nothing, everything, or any blocks. `CUTS=400` tries more of them.

use std::collections::HashMap;
use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Mutex};
use std::time::Duration;

use rustix::mount::{UnmountFlags, unmount};
use volley_jobspecs::ids::{TenantId, VolumeId};
use volley_volume::format::head::FlushMode;
use volley_volume::format::seal::ClusterKeys;
use volley_volume::io::fake::Fake;
use volley_volume::serve::nbd::wire::{SIMPLE_REPLY_MAGIC, command, option};
use volley_volume::serve::socket::Socket;
use volley_volume::{Host, Limits, NewVolume, Opener};

use crate::process::place;
use crate::{file, have};

const MIB: u64 = 1 << 20;
const SIZE: u64 = 24 * MIB;
const BLOCK: usize = 4096;
const FUA: u16 = 1;

#[derive(Debug)]
enum Event {
    /// Bytes for a place, in the order in which they were asked for.
    Write {
        cookie: u64,
        offset: u64,
        bytes: Vec<u8>,
        durable: bool,
    },
    Flush {
        cookie: u64,
    },
    Done {
        cookie: u64,
    },
    /// The user's file of this number was synced: it must be there from now on.
    Synced(u64),
}

type Record = Arc<Mutex<Vec<Event>>>;

fn take<const N: usize>(stream: &mut UnixStream) -> Option<[u8; N]> {
    let mut bytes = [0; N];
    stream.read_exact(&mut bytes).ok()?;
    Some(bytes)
}

fn number(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0, |number, byte| number << 8 | u64::from(*byte))
}

/// Passes what the client says, and keeps it. Ends with the connection.
fn client_says(mut from: UnixStream, mut to: UnixStream, record: &Record, reads: &Mutex<HashMap<u64, usize>>) -> Option<()> {
    to.write_all(&take::<4>(&mut from)?).ok()?;
    loop {
        let head = take::<16>(&mut from)?;
        let mut data = vec![0; number(&head[12..]) as usize];
        from.read_exact(&mut data).ok()?;
        to.write_all(&[&head[..], &data].concat()).ok()?;
        if number(&head[8..12]) == u64::from(option::GO) {
            break;
        }
    }
    loop {
        let head = take::<28>(&mut from)?;
        let (flags, kind) = (number(&head[4..6]) as u16, number(&head[6..8]) as u16);
        let (cookie, offset, len) = (number(&head[8..16]), number(&head[16..24]), number(&head[24..]) as usize);
        let mut bytes = vec![0; if kind == command::WRITE { len } else { 0 }];
        from.read_exact(&mut bytes).ok()?;
        let durable = flags & FUA != 0;
        let event = match kind {
            command::WRITE => Some(Event::Write { cookie, offset, bytes: bytes.clone(), durable }),
            command::TRIM | command::WRITE_ZEROES => Some(Event::Write { cookie, offset, bytes: vec![0; len], durable }),
            command::FLUSH => Some(Event::Flush { cookie }),
            command::READ => {
                reads.lock().unwrap().insert(cookie, len);
                None
            }
            _ => None,
        };
        record.lock().unwrap().extend(event);
        to.write_all(&[&head[..], &bytes].concat()).ok()?;
    }
}

/// Passes what the server says, and keeps what it has done.
fn server_says(mut from: UnixStream, mut to: UnixStream, record: &Record, reads: &Mutex<HashMap<u64, usize>>) -> Option<()> {
    to.write_all(&take::<18>(&mut from)?).ok()?;
    loop {
        let head = take::<20>(&mut from)?;
        let mut data = vec![0; number(&head[16..]) as usize];
        from.read_exact(&mut data).ok()?;
        to.write_all(&[&head[..], &data].concat()).ok()?;
        if (number(&head[8..12]), number(&head[12..16])) == (u64::from(option::GO), 1) {
            break;
        }
    }
    loop {
        let magic = take::<4>(&mut from)?;
        let (head, cookie, len, last) = if number(&magic) == u64::from(SIMPLE_REPLY_MAGIC) {
            let rest = take::<12>(&mut from)?;
            let cookie = number(&rest[4..]);
            let read = reads.lock().unwrap().get(&cookie).copied().filter(|_| number(&rest[..4]) == 0);
            assert_eq!(number(&rest[..4]), 0, "the server failed");
            ([&magic[..], &rest].concat(), cookie, read.unwrap_or_default(), true)
        } else {
            let rest = take::<16>(&mut from)?;
            ([&magic[..], &rest].concat(), number(&rest[4..12]), number(&rest[12..]) as usize, number(&rest[..2]) & 1 == 1)
        };
        let mut data = vec![0; len];
        from.read_exact(&mut data).ok()?;
        if last && reads.lock().unwrap().remove(&cookie).is_none() {
            record.lock().unwrap().push(Event::Done { cookie });
        }
        to.write_all(&[&head, &data[..]].concat()).ok()?;
    }
}

/// Takes connections at `dir/socket`, and passes them to `dir/real`.
fn recorder(dir: &Path) -> Record {
    let (record, listener) = (Record::default(), UnixListener::bind(dir.join("socket")).unwrap());
    let (shared, real) = (Arc::clone(&record), dir.join("real"));
    std::thread::spawn(move || {
        for client in listener.incoming().map_while(Result::ok) {
            let Ok(server) = UnixStream::connect(&real) else { continue };
            let reads = Arc::new(Mutex::default());
            let (said, answers) = (client.try_clone().unwrap(), server.try_clone().unwrap());
            let (record, open) = (Arc::clone(&shared), Arc::clone(&reads));
            std::thread::spawn(move || client_says(said, server, &record, &open));
            let record = Arc::clone(&shared);
            std::thread::spawn(move || server_says(answers, client, &record, &reads));
        }
    });
    record
}

/// A drawn number below `sides`.
fn roll(dice: &mut u64, sides: u64) -> u64 {
    *dice = dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    (*dice >> 33) % sides
}

fn content(n: u64) -> Vec<u8> {
    let len = [500, 30_000, 4_096, 150_000][n as usize % 4] + n as usize;
    (0..len).map(|at| (at as u64 * 31 + n * 7) as u8 ^ (at >> 8) as u8).collect()
}

/// Writes as a program does that wants some of it to last: a file, itself and its name synced; and many that come and go.
fn work(tree: &Path, record: &Record) {
    for n in 0..90u64 {
        let path = tree.join(format!("file-{n}"));
        let mut file = File::create(tree.join("new")).unwrap();
        file.write_all(&content(n)).unwrap();
        if n % 3 == 0 {
            file.sync_all().unwrap();
            std::fs::rename(tree.join("new"), &path).unwrap();
            File::open(tree).unwrap().sync_all().unwrap();
            record.lock().unwrap().push(Event::Synced(n));
        } else {
            std::fs::rename(tree.join("new"), &path).unwrap();
        }
        // One that was never synced.
        if n % 5 == 4 {
            let gone = (n - 4..n).find(|n| n % 3 != 0).unwrap();
            std::fs::remove_file(tree.join(format!("file-{gone}"))).unwrap();
            let _ = std::fs::create_dir(tree.join(format!("dir-{n}")));
        }
    }
}

/// What the disk may be when the power goes after `until` events. `lies`: as if flushes had meant nothing.
fn cut(events: &[Event], until: usize, lies: bool, likely: u64, dice: &mut u64) -> Vec<u8> {
    let done: HashMap<u64, usize> = events[..until]
        .iter()
        .enumerate()
        .filter_map(|(at, event)| match event {
            Event::Done { cookie } => Some((*cookie, at)),
            _ => None,
        })
        .collect();
    let flushes = events[..until].iter().enumerate().filter_map(|(at, event)| match event {
        Event::Flush { cookie } if done.contains_key(cookie) => Some(at),
        _ => None,
    });
    let flushed = if lies { 0 } else { flushes.max().unwrap_or_default() };
    let mut disk = vec![0; SIZE as usize];
    for event in &events[..until] {
        let Event::Write { cookie, offset, bytes, durable } = event else { continue };
        let certain = done.get(cookie).is_some_and(|at| *at < flushed || (*durable && !lies));
        let mut at = *offset as usize;
        let mut rest = &bytes[..];
        while !rest.is_empty() {
            let len = rest.len().min(BLOCK - at % BLOCK);
            if certain || roll(dice, 100) < likely {
                disk[at..at + len].copy_from_slice(&rest[..len]);
            }
            (at, rest) = (at + len, &rest[len..]);
        }
    }
    disk
}

fn run(command: &mut Command) -> Result<(), String> {
    let output = command.output().map_err(|error| error.to_string())?;
    let said = || {
        format!("{command:?}: {}: {}{}", output.status, String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr))
    };
    if output.status.success() { Ok(()) } else { Err(said()) }
}

/// A mount that is gone at the latest when this is dropped.
struct Tree<'a>(&'a Path);

impl<'a> Tree<'a> {
    fn new(image: &Path, at: &'a Path, options: &str) -> Result<Self, String> {
        std::fs::create_dir_all(at).unwrap();
        run(Command::new("mount").args(["-t", "ext4", "-o", options]).arg(image).arg(at))?;
        Ok(Self(at))
    }
}

impl Drop for Tree<'_> {
    fn drop(&mut self) {
        let _ = unmount(self.0, UnmountFlags::empty()).or_else(|_| unmount(self.0, UnmountFlags::DETACH));
    }
}

/// Is the file system on a disk whole, with all that was synced?
fn check(dir: &Path, disk: &[u8], synced: &[u64]) -> Result<(), String> {
    let image = dir.join("image");
    let file = File::create(&image).unwrap();
    file.set_len(SIZE).unwrap();
    for (n, block) in disk.chunks(BLOCK).enumerate().filter(|(_, block)| block.iter().any(|byte| *byte != 0)) {
        file.write_all_at(block, (n * BLOCK) as u64).unwrap();
    }
    drop(file);
    // The journal is read, as a mount would; and nothing but that had to be done. 1: the journal had something.
    let replay = Command::new("e2fsck").args(["-y", "-E", "journal_only"]).arg(&image).output().map_err(|error| error.to_string())?;
    if replay.status.code().is_none_or(|code| code > 1) {
        return Err(format!("the journal: {}", String::from_utf8_lossy(&replay.stdout)));
    }
    run(Command::new("e2fsck").args(["-f", "-n"]).arg(&image))?;
    let at = dir.join("looked-at");
    let tree = Tree::new(&image, &at, "loop,ro")?;
    for n in synced {
        let found = std::fs::read(tree.0.join(format!("file-{n}"))).map_err(|error| format!("file {n}: {error}"))?;
        if found != content(*n) {
            return Err(format!("file {n} has other bytes"));
        }
    }
    Ok(())
}

#[test]
fn ext4_is_whole_after_a_power_cut_at_any_flush_and_between() {
    if !file::possible() || !have(&["mke2fs", "e2fsck", "mount"]) {
        return;
    }
    let cuts: u64 = std::env::var("CUTS").ok().and_then(|cuts| cuts.parse().ok()).unwrap_or(30);
    let (dir, runtime) = (tempfile::tempdir().unwrap(), tokio::runtime::Runtime::new().unwrap());
    let keys = ClusterKeys::new(&[[1; 32]]).unwrap();
    let limits = Limits { commit_every: Duration::from_millis(50), log_keep_bytes: 0, cache_disk_bytes: 0, ..Limits::default() };
    std::fs::create_dir(dir.path().join("host")).unwrap();
    let host = Host::new(Arc::new(Fake::default()), keys, dir.path().join("host"), runtime.handle().clone(), limits);
    let (volume, tenant) = (VolumeId([1; 16]), TenantId::new("t").unwrap());
    host.create(NewVolume { volume, tenant, size: SIZE, flush: FlushMode::Local }).unwrap();
    let by = Opener { attempt: None, host: "a".into(), attach: [1; 16], until_ms: u64::MAX, guest: false, force: false, resume: false };
    let _socket = Socket::open(&place(dir.path(), "real"), Arc::new(host.attach(volume, &by).unwrap())).unwrap();
    let record = recorder(dir.path());
    let from = {
        let _shown = file::Mounted::new(dir.path(), 0, None, Duration::from_secs(60));
        let shown = dir.path().join("file");
        run(Command::new("mke2fs").args(["-q", "-F", "-t", "ext4", "-b", "4096", "-J", "size=4"]).arg(&shown)).unwrap();
        let at = dir.path().join("tree");
        let tree = Tree::new(&shown, &at, "loop").unwrap();
        File::open(tree.0).unwrap().sync_all().unwrap();
        rustix::fs::syncfs(File::open(tree.0).unwrap()).unwrap();
        let from = record.lock().unwrap().len();
        work(tree.0, &record);
        from
    };
    let events = std::mem::take(&mut *record.lock().unwrap());
    let flushes: Vec<usize> = (from..events.len()).filter(|at| matches!(events[*at], Event::Flush { .. })).collect();
    assert!(flushes.len() > 20, "{} flushes", flushes.len());
    let synced_by = |until: usize| {
        events[..until].iter().filter_map(|event| if let Event::Synced(n) = event { Some(*n) } else { None }).collect::<Vec<_>>()
    };
    let (mut dice, mut found) = (7, 0);
    for n in 0..cuts {
        // At the flushes in turn, and anywhere.
        let until = match n % 2 {
            0 => flushes[(n as usize / 2 * flushes.len() / (cuts as usize).div_ceil(2)).min(flushes.len() - 1)] + 1,
            _ => from + roll(&mut dice, (events.len() - from) as u64) as usize,
        };
        let likely = [0, 100, roll(&mut dice, 100)][roll(&mut dice, 3) as usize];
        let disk = cut(&events, until, false, likely, &mut dice);
        let checked = check(dir.path(), &disk, &synced_by(until));
        checked
            .unwrap_or_else(|why| panic!("a cut after {until} of {} events, {likely} in 100 unflushed blocks there: {why}", events.len()));
        // The same of a disk whose flushes mean nothing: that it is found says that the above does.
        if n < 8 {
            let disk = cut(&events, until, true, 40, &mut dice);
            found += usize::from(check(dir.path(), &disk, &synced_by(until)).is_err());
        }
    }
    assert!(found > 0, "a disk that lies is not found");
    println!("{cuts} power cuts in {} requests, {} of them flushes", events.len(), flushes.len());
}
