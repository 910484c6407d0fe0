//! Ranges as large as a disk, and disks that grow while they are written.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

use volley_volume::Limits;
use volley_volume::device::Device;
use volley_volume::format::head::FlushMode;

use crate::support::{MIB, World, id, new, noise, opener, quiet, snap};
use crate::{accept, read};

const TIB: u64 = 1 << 40;
/// Longest time for a whole disk; it takes some milliseconds, on whatever machine.
const SOON: Duration = Duration::from_secs(5);

#[test]
fn a_whole_disk_of_a_tebibyte_is_trimmed_at_once_and_stays_so() {
    let world = World::new();
    let (host, requests) = world.host("a", Limits { log_keep_bytes: 0, ..quiet() });
    host.create(new(id(1), TIB, FlushMode::Local)).unwrap();
    let volume = host.attach(id(1), &opener(1)).unwrap();
    let places: Vec<u64> = (0..64).map(|n| n * (TIB / 64) + n * 4096).chain([TIB - 300_000]).collect();
    let write = |seed: u64| places.iter().for_each(|at| volume.write(*at, &noise(300_000, at + seed), false).unwrap());
    write(1);
    // So that map pages and packs say something of them.
    volume.snapshot(snap(1)).unwrap();
    write(2);
    requests.take();
    let begun = Instant::now();
    volume.discard(0, TIB).unwrap();
    assert_eq!(requests.take(), [], "it asks for nothing");
    let pieces = volume.pieces(0, TIB).unwrap();
    assert!(pieces.iter().all(|piece| piece.hole), "{pieces:?}");
    places.iter().for_each(|at| assert!(read(&volume, *at, 300_000) == vec![0; 300_000], "{at}"));
    assert!(begun.elapsed() < SOON, "{:?}", begun.elapsed());
    // What is written then is all there is, also elsewhere.
    volume.write(TIB / 2 + 77, &noise(10_000, 3), false).unwrap();
    let begun = Instant::now();
    volume.flush().unwrap();
    drop(volume);
    let volume = host.attach(id(1), &opener(1)).unwrap();
    volume.snapshot(snap(2)).unwrap();
    accept(&world, volume, 0);
    let made = requests.take();
    assert!(begun.elapsed() < SOON && made.len() < 100, "{:?}, {} requests", begun.elapsed(), made.len());
    let (elsewhere, _) = world.host("b", quiet());
    let volume = elsewhere.attach(id(1), &opener(2)).unwrap();
    places.iter().for_each(|at| assert!(read(&volume, *at, 300_000) == vec![0; 300_000], "{at}"));
    assert!(read(&volume, TIB / 2 + 77, 10_000) == noise(10_000, 3));
    let verified = elsewhere.verify(id(1), true).unwrap();
    // Three blocks, in what is accepted and in what is worked on.
    assert!(verified.blocks <= 6, "{verified:?}");
    let clone = elsewhere.clone_ephemeral(snap(1), id(3), FlushMode::None, false).unwrap();
    places.iter().for_each(|at| assert!(read(&clone, *at, 300_000) == noise(300_000, at + 1), "the older snapshot has it all"));
}

#[test]
fn a_disk_grows_while_it_is_written() {
    let world = World::new();
    let (host, _) = world.host("a", Limits { commit_every: Duration::from_millis(30), log_keep_bytes: 0, ..Limits::default() });
    host.create(new(id(1), MIB, FlushMode::Local)).unwrap();
    let mut volume = host.attach(id(1), &opener(1)).unwrap();
    let mut plain = vec![0; MIB as usize];
    for life in 0..4u64 {
        let (stop, count) = (AtomicBool::new(false), AtomicU64::new(0));
        let last: Vec<Vec<(u64, u64)>> = std::thread::scope(|scope| {
            let writers: Vec<_> = (0..3u64)
                .map(|writer| {
                    let (volume, stop, count) = (&volume, &stop, &count);
                    scope.spawn(move || {
                        let mut all = Vec::new();
                        for n in 0.. {
                            if stop.load(Ordering::SeqCst) && n > 50 {
                                break;
                            }
                            // A part of each MiB is one writer's. The end of the disk, which grows, is written at most.
                            let mibs = volume.size() / MIB;
                            let mib = if n % 3 == 0 { n % mibs } else { mibs - 1 };
                            let at = mib * MIB + writer * 300_000 + n * 977 % 200_000;
                            volume.write(at, &noise(5_000, at + n + life), false).unwrap();
                            all.push((at, at + n + life));
                            count.fetch_add(1, Ordering::SeqCst);
                        }
                        all
                    })
                })
                .collect();
            for _ in 0..8 {
                let before = count.load(Ordering::SeqCst);
                volume.resize(volume.size() + MIB).unwrap();
                while count.load(Ordering::SeqCst) < before + 20 {
                    std::thread::yield_now();
                }
            }
            assert!(volume.resize(volume.size() - MIB).is_err());
            stop.store(true, Ordering::SeqCst);
            writers.into_iter().map(|writer| writer.join().unwrap()).collect()
        });
        plain.resize((1 + 8 * (life + 1)) as usize * MIB as usize, 0);
        assert_eq!(volume.size(), plain.len() as u64);
        for (at, seed) in last.into_iter().flatten() {
            plain[at as usize..at as usize + 5_000].copy_from_slice(&noise(5_000, seed));
        }
        assert!(read(&volume, 0, plain.len()) == plain, "life {life}");
        // Killed, and opened again.
        drop(volume);
        volume = host.attach(id(1), &opener(1)).unwrap();
        assert_eq!(volume.size(), plain.len() as u64);
        assert!(read(&volume, 0, plain.len()) == plain, "life {life}, from the log");
    }
    accept(&world, volume, 0);
    let (elsewhere, _) = world.host("b", quiet());
    let volume = elsewhere.attach(id(1), &opener(2)).unwrap();
    assert_eq!(volume.size(), plain.len() as u64);
    assert!(read(&volume, 0, plain.len()) == plain, "from S3 alone");
}
