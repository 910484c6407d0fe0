//! Disks of the host that are full: the log's, whose writers wait and then are told, and the cache's, which nobody notices.

use std::fs::File;
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::Ordering;
use std::time::Duration;

use volley_volume::Limits;
use volley_volume::device::Device;
use volley_volume::format::head::FlushMode;

use crate::support::{MIB, World, id, new, noise, opener, quiet, snap};
use crate::{accept, read};

/// A small file system in memory, at the place of a host's directory.
struct Small(PathBuf);

impl Small {
    fn new(dir: PathBuf, bytes: u64) -> Option<Self> {
        if !rustix::process::geteuid().is_root() {
            eprintln!("skipped: a small file system takes root");
            return None;
        }
        std::fs::create_dir_all(&dir).unwrap();
        let options = std::ffi::CString::new(format!("size={bytes},mode=755")).unwrap();
        rustix::mount::mount("small", &dir, "tmpfs", rustix::mount::MountFlags::empty(), options.as_c_str()).unwrap();
        Some(Self(dir))
    }

    /// Somebody else takes all the room that is left.
    fn fill(&self) -> PathBuf {
        let path = self.0.join("others");
        let mut file = File::create(&path).unwrap();
        while file.write(&[1; 4096]).is_ok_and(|count| count > 0) {}
        path
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = rustix::mount::unmount(&self.0, rustix::mount::UnmountFlags::DETACH);
    }
}

/// Writes pieces of a MiB until one is refused; returns how many were not.
fn write_until_full(volume: &volley_volume::Volume, from: u64, to: u64) -> u64 {
    for n in from..to {
        if let Err(error) = volume.write(n * MIB, &noise(MIB as usize, n), false) {
            assert_eq!(error.kind(), ErrorKind::StorageFull, "{error}");
            return n;
        }
    }
    to
}

fn check(volume: &volley_volume::Volume, count: u64) {
    for n in 0..count {
        assert!(read(volume, n * MIB, MIB as usize) == noise(MIB as usize, n), "MiB {n}");
    }
}

#[test]
fn a_full_disk_under_the_log_loses_nothing_and_is_gone_on_with() {
    let world = World::new();
    let Some(small) = Small::new(world.dir.join("a"), 60 * MIB) else { return };
    let limits = Limits { cache_disk_bytes: 0, stall_max: Duration::from_millis(500), ..quiet() };
    let (host, requests) = world.host("a", limits);
    host.create(new(id(1), 256 * MIB, FlushMode::Local)).unwrap();
    let volume = host.attach(id(1), &opener(1)).unwrap();
    let first = write_until_full(&volume, 0, 10);
    assert_eq!(first, 10);
    // Somebody else has filled it, and S3 is away: nothing makes room.
    requests.away.store(true, Ordering::SeqCst);
    let others = small.fill();
    let full = write_until_full(&volume, first, 256);
    assert!(full < 40, "{full}");
    assert!(volume.failure().is_none(), "it is said, and no more");
    assert_eq!(volume.write(0, &noise(MIB as usize, 9), false).unwrap_err().kind(), ErrorKind::StorageFull);
    check(&volume, full);
    volume.flush().unwrap();
    // A process that is killed then has lost nothing, and can be opened though there is no room.
    requests.away.store(false, Ordering::SeqCst);
    drop(volume);
    std::fs::remove_file(&others).unwrap();
    let others = small.fill();
    let volume = host.attach(id(1), &opener(1)).map_err(|error| error.to_string());
    let volume = match volume {
        Ok(volume) => volume,
        // The holding itself did not fit.
        Err(why) => {
            assert!(why.contains("No space left"), "{why}");
            std::fs::remove_file(&others).unwrap();
            host.attach(id(1), &opener(1)).unwrap()
        }
    };
    check(&volume, full);
    let _ = std::fs::remove_file(&others);
    let more = write_until_full(&volume, full, full + 5);
    assert_eq!(more, full + 5, "there is room again");
    check(&volume, more);
    accept(&world, volume, 0);
    let (elsewhere, _) = world.host("b", quiet());
    let volume = elsewhere.attach(id(1), &opener(2)).unwrap();
    check(&volume, more);
}

/// The disk is smaller than what is written, S3 is there: writers wait for commits that make room, and nobody is told anything.
#[test]
fn a_disk_that_is_too_small_for_all_of_the_log_is_enough() {
    let world = World::new();
    let Some(_small) = Small::new(world.dir.join("a"), 150 * MIB) else { return };
    // By these figures much more would lie in the log.
    let limits = Limits { cache_disk_bytes: 0, log_keep_bytes: 1 << 30, commit_bytes: 512 * MIB, dirty_bytes_max: 1 << 30, ..quiet() };
    let (host, _) = world.host("a", limits);
    host.create(new(id(1), 512 * MIB, FlushMode::Local)).unwrap();
    let volume = host.attach(id(1), &opener(1)).unwrap();
    let count = write_until_full(&volume, 0, 400);
    assert_eq!(count, 400, "the disk was said to be full");
    check(&volume, count);
    accept(&world, volume, 0);
}

/// Of a volume that is read as a whole: more than fits on the disk of the cache.
const PIECES: u64 = 120;
/// That disk. The cache's index takes some tens of MiB of it.
const ROOM: u64 = 100 * MIB;

fn full_cache(shared: bool) {
    let world = World::new();
    let (from, _) = world.host("from", quiet());
    from.create(new(id(1), PIECES * MIB, FlushMode::Local)).unwrap();
    let volume = from.attach(id(1), &opener(1)).unwrap();
    assert_eq!(write_until_full(&volume, 0, PIECES), PIECES);
    volume.snapshot(snap(1)).unwrap();
    drop(volume);
    let dir = world.dir.join("a");
    let small = Small::new(if shared { dir.clone() } else { world.dir.join("cache") }, ROOM);
    let Some(_small) = small else { return };
    if !shared {
        std::fs::create_dir_all(&dir).unwrap();
        std::os::unix::fs::symlink(world.dir.join("cache/slab"), dir.join("cache.slab")).unwrap();
    }
    let (host, _) = world.host("a", Limits { cache_bytes: 1 << 20, cache_disk_bytes: 1 << 30, ..quiet() });
    let clone = host.clone_ephemeral(snap(1), id(2), FlushMode::Local, false).unwrap();
    check(&clone, PIECES);
    check(&clone, PIECES);
    // There is no more room for what was read; what is written has it.
    for n in 0..20 {
        clone.write(n * MIB, &noise(MIB as usize, n + 100), true).unwrap();
    }
    for n in 0..PIECES {
        let seed = if n < 20 { n + 100 } else { n };
        assert!(read(&clone, n * MIB, MIB as usize) == noise(MIB as usize, seed), "MiB {n}");
    }
    let used = |path: &Path| std::fs::metadata(path).map_or(0, |file| file.len());
    assert!(shared || used(&world.dir.join("cache/slab")) > ROOM / 2, "the cache has not filled its disk");
    clone.keep().unwrap();
}

#[test]
fn a_full_disk_under_the_cache_does_not_hurt_writes() {
    full_cache(false);
}

#[test]
fn the_cache_leaves_the_room_of_their_disk_to_the_log() {
    full_cache(true);
}
