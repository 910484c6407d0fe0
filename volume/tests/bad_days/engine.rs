//! The engine's main properties in one sitting, on our own server and on SeaweedFS: whatever is particular about one of them shows as a difference.

use std::io::ErrorKind;
use std::time::Duration;

use volley_volume::device::Device;
use volley_volume::format::head::FlushMode;
use volley_volume::{Collection, Host, Known, Limits, OpenError, Opener};

use crate::support::{MIB, World, id, new, noise, opener, quiet, snap};
use crate::{accept, read};

const DAY_MS: u64 = 86_400_000;

fn collect(host: &Host, known: &Known, days: u64) -> volley_volume::Collected {
    let now_ms = || {
        let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
        now.as_millis() as u64 + days * DAY_MS
    };
    host.collect(&Collection { known, name: "a test", dry_run: false, now_ms: &now_ms }).unwrap()
}

/// Writes by all means, small and large, and reads it again from the log, from S3 alone, and of a snapshot.
fn written_and_read(world: &World, plain: &mut [u8]) {
    let (a, _) = world.host("a", Limits { log_keep_bytes: 0, commit_every: Duration::from_millis(100), ..Limits::default() });
    a.create(new(id(1), plain.len() as u64, FlushMode::S3)).unwrap();
    let volume = a.attach(id(1), &opener(1)).unwrap();
    for round in 0..80u64 {
        let len = [4096, 700, 20_000, 600_000][round as usize % 4];
        let at = (round * 1_234_577) as usize % (plain.len() - len);
        let bytes = noise(len, round);
        volume.write(at as u64, &bytes, round % 8 == 0).unwrap();
        plain[at..at + len].copy_from_slice(&bytes);
        if round % 10 == 9 {
            volume.discard(at as u64, 4_096).unwrap();
            plain[at..at + 4_096].fill(0);
        }
    }
    assert!(read(&volume, 0, plain.len()) == plain);
    drop(volume);
    let volume = a.attach(id(1), &opener(1)).unwrap();
    assert!(read(&volume, 0, plain.len()) == plain, "after the log was read");
    volume.snapshot(snap(1)).unwrap();
    accept(world, volume, 0);
    let (b, _) = world.host("b", quiet());
    let clone = b.clone_ephemeral(snap(1), id(2), FlushMode::None, false).unwrap();
    assert!(read(&clone, 0, plain.len()) == plain, "of the snapshot");
    clone.write(0, &noise(300_000, 77), false).unwrap();
    clone.keep().unwrap();
    let kept = b.attach(id(2), &opener(2)).unwrap();
    assert!(read(&kept, 0, 300_000) == noise(300_000, 77) && read(&kept, 300_000, 100_000) == plain[300_000..400_000]);
    kept.detach().unwrap();
}

/// Eight take it at once, again and again: of those who then write, one commits.
fn one_of_eight_commits(world: &World, plain: &mut [u8]) {
    let hosts: Vec<_> = (0..8).map(|n| world.host(&format!("racer-{n}"), quiet()).0).collect();
    for round in 0..3u8 {
        let ends: Vec<Option<u8>> = std::thread::scope(|scope| {
            let all: Vec<_> = (0u8..)
                .zip(&hosts)
                .map(|(n, host)| {
                    scope.spawn(move || {
                        let by = Opener { force: true, resume: true, ..opener(100 + round * 8 + n) };
                        let volume = match host.attach(id(1), &by) {
                            Ok(volume) => volume,
                            Err(OpenError::Busy { .. }) => return None,
                            Err(error) => panic!("{error}"),
                        };
                        (volume, n).into()
                    })
                })
                .collect();
            let open: Vec<_> = all.into_iter().filter_map(|racer| racer.join().unwrap()).collect();
            let all: Vec<_> = open
                .into_iter()
                .map(|(volume, n)| {
                    scope.spawn(move || {
                        volume.write(8192, &[round * 8 + n; 4096], false).unwrap();
                        match volume.flush() {
                            Ok(()) => {
                                volume.detach().unwrap();
                                Some(n)
                            }
                            Err(error) => {
                                assert_eq!(error.kind(), ErrorKind::StaleNetworkFileHandle, "{error}");
                                None
                            }
                        }
                    })
                })
                .collect();
            all.into_iter().map(|racer| racer.join().unwrap()).collect()
        });
        let won: Vec<u8> = ends.into_iter().flatten().collect();
        let [winner] = won[..] else { panic!("{won:?} have committed") };
        plain[8192..12_288].fill(round * 8 + winner);
        let (host, _) = world.host("looks", quiet());
        let volume = host.attach(id(1), &Opener { force: true, resume: true, ..opener(99) }).unwrap();
        assert!(read(&volume, 0, plain.len()) == plain, "round {round}");
        volume.detach().unwrap();
    }
    let (host, _) = world.host("looks", quiet());
    let volume = host.attach(id(1), &Opener { resume: true, ..opener(98) }).unwrap();
    accept(world, volume, 1);
}

/// What nobody needs goes, and nothing else.
fn collected(world: &World, plain: &mut [u8]) {
    let (host, _) = world.host("collects", quiet());
    let mut known = Known::default();
    known.volumes.insert(id(1));
    known.snapshots.insert(snap(1));
    // The copy's own blocks go, and nothing that it shares.
    host.remove(id(2), false).unwrap();
    let first = collect(&host, &known, 0);
    assert!(first.condemned.0 > 0 && first.deleted.0 == 0, "{first:?}");
    let second = collect(&host, &known, 1);
    assert_eq!(second.deleted, first.condemned);
    host.verify(id(1), true).unwrap();
    let clone = host.clone_ephemeral(snap(1), id(5), FlushMode::None, false).unwrap();
    assert_eq!(read(&clone, 0, plain.len()).len(), plain.len());
    clone.detach().unwrap();
    let volume = host.attach(id(1), &opener(3)).unwrap();
    assert!(read(&volume, 0, plain.len()) == plain);
    volume.detach().unwrap();
    // The snapshot goes; what the volume itself needs stays.
    known.snapshots.clear();
    let gone: u64 = (2..14).map(|day| collect(&host, &known, day).deleted.0).sum();
    assert!(gone > 0);
    let (late, _) = world.host("late", quiet());
    assert!(late.clone_ephemeral(snap(1), id(3), FlushMode::None, false).is_err());
    let volume = late.attach(id(1), &opener(4)).unwrap();
    assert!(read(&volume, 0, plain.len()) == plain);
    volume.detach().unwrap();
    late.verify(id(1), true).unwrap();
    host.remove(id(1), false).unwrap();
    known.volumes.clear();
    (14..20).for_each(|day| drop(collect(&host, &known, day)));
    let left = collect(&host, &known, 21);
    assert_eq!((left.volumes, left.snapshots, left.objects.0), (0, 0, 0));
}

fn engine(world: &World) {
    let mut plain = vec![0; 8 * MIB as usize];
    written_and_read(world, &mut plain);
    one_of_eight_commits(world, &mut plain);
    collected(world, &mut plain);
}

#[test]
fn the_engine_on_the_embedded_server() {
    engine(&World::new());
}

#[test]
fn the_engine_on_seaweedfs() {
    let Some(world) = World::on_seaweedfs() else { return };
    engine(&world);
}
