//! Volumes on the embedded S3 server: what is written is there again, from the log, from S3 alone, for one writer at a time.
#![expect(clippy::unwrap_used, reason = "a test says with a panic that it failed")]

mod support;

use std::io::ErrorKind;
use std::sync::atomic::Ordering;
use std::time::Duration;

use support::{Fault, MIB, World, id, new, noise, opener, quiet, snap};
use volley_volume::device::Device;
use volley_volume::format::head::FlushMode;
use volley_volume::{Failure, Limits, OpenError, Opener, Promotion, VerifyError, Volume, Whole};

fn read(volume: &Volume, offset: u64, len: usize) -> Vec<u8> {
    let mut into = vec![7; len];
    volume.read(offset, &mut into).unwrap();
    into
}

/// Operations of all kinds, on the volume and on a plain array.
fn work(volume: &Volume, plain: &mut [u8], seed: u64, count: usize) {
    let dice = noise(count * 16, seed);
    let number = |at: usize| u64::from_le_bytes(dice[at..at + 8].try_into().unwrap());
    for step in 0..count {
        let (a, b) = (number(step * 16), number(step * 16 + 8));
        let offset = (a % (plain.len() as u64 - 1)) as usize;
        let longest = (plain.len() - offset).min(if b & 64 == 0 { 9_000 } else { 300_000 });
        let len = 1 + (b >> 8) as usize % longest;
        let (offset, len) =
            if b & 16 == 0 { (offset, len) } else { (offset / 4096 * 4096, (len / 4096 * 4096).min(plain.len() - offset / 4096 * 4096)) };
        match b % 8 {
            0 => {
                plain[offset..offset + len].fill(0);
                volume.zero(offset as u64, len as u64, b & 32 == 0, false).unwrap();
            }
            1 => {
                plain[offset..offset + len].fill(0);
                volume.discard(offset as u64, len as u64).unwrap();
            }
            kind => {
                let bytes = if kind == 2 { vec![seed as u8; len] } else { noise(len, a) };
                plain[offset..offset + len].copy_from_slice(&bytes);
                volume.write(offset as u64, &bytes, false).unwrap();
            }
        }
    }
}

#[test]
fn what_was_written_is_there_from_the_log_and_from_s3_alone() {
    let world = World::new();
    let (host, _) = world.host("a", quiet());
    host.create(new(id(1), 8 * MIB, FlushMode::Local)).unwrap();
    let mut plain = vec![0; 8 * MIB as usize];
    let mut volume = host.attach(id(1), &opener(1)).unwrap();
    for round in 0..6 {
        work(&volume, &mut plain, round, 60);
        assert!(read(&volume, 0, plain.len()) == plain, "round {round}");
        match round {
            1 => volume.flush().unwrap(),
            // As if the process had been killed.
            2 | 4 => {
                drop(volume);
                volume = host.attach(id(1), &opener(1)).unwrap();
                assert!(read(&volume, 0, plain.len()) == plain, "after the log was read, round {round}");
            }
            3 => {
                volume.resize(9 * MIB).unwrap();
                plain.resize(9 * MIB as usize, 0);
                volume.snapshot(snap(1)).unwrap();
            }
            _ => {}
        }
    }
    let root = volume.detach().unwrap().0.digest();
    // Only what was accepted is there for the next; so it is accepted, twice.
    for _ in 0..2 {
        host.promote(&Promotion { volume: id(1), attempt: None, base: 0, root }).unwrap();
    }
    let (elsewhere, requests) = world.host("b", quiet());
    let volume = elsewhere.attach(id(1), &opener(2)).unwrap();
    assert_eq!(volume.size(), 9 * MIB);
    assert!(read(&volume, 0, plain.len()) == plain, "from S3 alone");
    requests.take();
    assert!(read(&volume, 0, plain.len()) == plain, "and again");
    assert_eq!(requests.take(), [], "from the cache");
    let verified = elsewhere.verify(id(1), true).unwrap();
    assert!(verified.blocks > 100 && verified.bytes > MIB, "{verified:?}");
    let (again, _) = world.host("c", quiet());
    assert!(world.damage("/p/") > 0);
    let damaged = again.verify(id(1), true).unwrap_err();
    assert!(matches!(&damaged, VerifyError::Damaged { object, .. } if object.contains("/p/")), "{damaged:?}");
    assert!(again.verify(id(1), false).is_ok(), "the map alone is whole");
    let stopped = again.verify_seen(Whole::Volume(id(1)), true, &mut |how_far| how_far.packs_all == 0);
    assert!(matches!(stopped, Err(VerifyError::Stopped)), "{stopped:?}");
    let whole = world.host("d", quiet()).0.verify_seen(Whole::Snapshot(snap(1)), false, &mut |_| true).unwrap();
    assert!(whole.blocks > 0 && whole.bytes == 0, "{whole:?}");
}

#[test]
fn damage_in_s3_is_an_error_and_never_other_bytes() {
    let world = World::new();
    let (host, _) = world.host("a", quiet());
    host.create(new(id(1), 8 * MIB, FlushMode::Local)).unwrap();
    let volume = host.attach(id(1), &opener(1)).unwrap();
    let plain = noise(MIB as usize, 3);
    volume.write(MIB, &plain, false).unwrap();
    let root = volume.detach().unwrap().0.digest();
    host.promote(&Promotion { volume: id(1), attempt: None, base: 0, root }).unwrap();
    assert_eq!(world.damage("/p/"), 1);
    let (host, _) = world.host("b", quiet());
    let volume = host.attach(id(1), &opener(2)).unwrap();
    let mut wrong = 0;
    for block in 0..256u64 {
        let mut into = vec![0; 4096];
        match volume.read(MIB + block * 4096, &mut into) {
            Ok(()) => assert!(into == plain[block as usize * 4096..][..4096]),
            Err(error) => {
                assert_eq!(error.kind(), ErrorKind::InvalidData);
                wrong += 1;
            }
        }
    }
    assert!((1..=16).contains(&wrong), "one extent: {wrong}");
}

#[test]
fn of_two_writers_exactly_one_commits() {
    let world = World::new();
    let ((a, _), (b, _)) = (world.host("a", quiet()), world.host("b", quiet()));
    a.create(new(id(1), MIB, FlushMode::S3)).unwrap();
    let first = a.attach(id(1), &opener(1)).unwrap();
    first.write(0, &[1; 4096], true).unwrap();
    assert!(matches!(b.attach(id(1), &opener(2)), Err(OpenError::Move(_))), "somebody has it");
    let second = b.attach(id(1), &Opener { force: true, resume: true, ..opener(2) }).unwrap();
    first.write(4096, &[1; 4096], false).unwrap();
    second.write(4096, &[2; 4096], true).unwrap();
    let error = first.flush().unwrap_err();
    assert_eq!(error.kind(), ErrorKind::StaleNetworkFileHandle, "{error}");
    assert!(matches!(first.failure(), Some(Failure::Fenced { epoch: 2, .. })));
    for error in [first.write(0, &[1; 9], false), first.read(0, &mut [0; 9]), first.flush(), first.discard(0, 4096)] {
        assert_eq!(error.unwrap_err().kind(), ErrorKind::StaleNetworkFileHandle);
    }
    drop(first);
    // Its log is put aside and not mixed in when this host has the volume again.
    let third = a.attach(id(1), &Opener { force: true, resume: true, ..opener(1) }).unwrap();
    assert!(read(&third, 0, 4096) == [1; 4096] && read(&third, 4096, 4096) == [2; 4096]);
    let aside = std::fs::read_dir(world.dir.join("a"))
        .unwrap()
        .filter(|entry| entry.as_ref().unwrap().file_name().to_str().unwrap().contains("lost"));
    assert_eq!(aside.count(), 1);
    assert!(second.flush().is_ok(), "it had nothing to commit");
    second.write(0, &[3; 4096], false).unwrap();
    assert!(second.flush().is_err());
}

#[test]
fn a_lost_answer_is_neither_a_lost_commit_nor_a_second_one() {
    let world = World::new();
    let (host, requests) = world.host("a", quiet());
    host.create(new(id(1), MIB, FlushMode::S3)).unwrap();
    for (attach, fault) in [(1, Fault::LoseAnswer), (2, Fault::LoseRequest)] {
        requests.fault(fault);
        let volume = host.attach(id(1), &Opener { resume: true, ..opener(attach) }).unwrap();
        for (round, fault) in (0u8..).zip([Fault::LoseAnswer, Fault::LoseRequest]) {
            requests.fault(fault);
            volume.write(u64::from(round) * 4096, &[attach * 16 + round; 4096], true).unwrap();
        }
        requests.fault(fault);
        volume.detach().unwrap();
        let (elsewhere, _) = world.host("b", quiet());
        let volume = elsewhere.attach(id(1), &Opener { resume: true, ..opener(9) }).unwrap();
        assert!(read(&volume, 0, 4096) == [attach * 16; 4096] && read(&volume, 4096, 4096) == [attach * 16 + 1; 4096]);
        volume.detach().unwrap();
    }
}

#[test]
fn small_commits_are_one_request_each_and_an_idle_volume_makes_none() {
    let world = World::new();
    let (host, requests) = world.host("a", Limits { commit_every: Duration::from_millis(50), ..Limits::default() });
    host.create(new(id(1), 64 * MIB, FlushMode::S3)).unwrap();
    let volume = host.attach(id(1), &opener(1)).unwrap();
    requests.take();
    let mut plain = vec![0; 8 * MIB as usize];
    for round in 0..100u64 {
        let (at, bytes) = ((round * 37 % 512) as usize * 4096, noise(4096, round));
        plain[at..at + 4096].copy_from_slice(&bytes);
        volume.write(at as u64, &bytes, true).unwrap();
        let made = requests.take();
        let (heads, packs) =
            (made.iter().filter(|(_, key)| key.ends_with("/head")).count(), made.iter().filter(|(_, key)| key.contains("/p/")).count());
        assert!(heads == 1 && packs <= 1 && made.len() == heads + packs, "{made:?}");
    }
    volume.flush().unwrap();
    assert_eq!(requests.take(), []);
    std::thread::sleep(Duration::from_millis(300));
    assert_eq!(requests.take(), [], "idle");
    assert!(read(&volume, 0, plain.len()) == plain);
    drop(volume);
    let (elsewhere, _) = world.host("b", quiet());
    let volume = elsewhere.attach(id(1), &Opener { force: true, resume: true, ..opener(2) }).unwrap();
    assert!(read(&volume, 0, plain.len()) == plain);
}

#[test]
fn a_large_write_is_few_objects() {
    let world = World::new();
    let (host, requests) = world.host("a", Limits { log_keep_bytes: 0, ..Limits::default() });
    host.create(new(id(1), 1 << 30, FlushMode::Local)).unwrap();
    let volume = host.attach(id(1), &opener(1)).unwrap();
    requests.take();
    for round in 0..256 {
        volume.write(round * MIB, &noise(MIB as usize, round), false).unwrap();
    }
    let root = volume.detach().unwrap().0.digest();
    let made = requests.take();
    assert!(made.iter().all(|(kind, _)| *kind == "put") && made.len() <= 24, "256 MiB: {} requests: {made:?}", made.len());
    host.promote(&Promotion { volume: id(1), attempt: None, base: 0, root }).unwrap();
    let (elsewhere, requests) = world.host("b", quiet());
    let volume = elsewhere.attach(id(1), &opener(2)).unwrap();
    for round in 0..256 {
        assert!(read(&volume, round * MIB, MIB as usize) == noise(MIB as usize, round), "{round}");
    }
    assert!(requests.take().len() < 256 * 2 + 30);
    drop(volume);
    // Small reads that follow each other are few requests, and reads here and there fetch nothing beside what they want.
    let (third, requests) = world.host("c", quiet());
    let volume = third.attach(id(1), &Opener { force: true, ..opener(3) }).unwrap();
    read(&volume, 100 * MIB, 4096);
    requests.take();
    for part in 0..512u64 {
        let at = 64 * MIB + part * 32_768;
        assert!(read(&volume, at, 32_768) == noise(MIB as usize, at / MIB)[(at % MIB) as usize..][..32_768]);
    }
    let made = requests.take().len();
    assert!(made < 40, "16 MiB in pieces of 32 KiB: {made}");
    for part in 0..10u64 {
        read(&volume, (200 - part) * MIB, 4096);
    }
    let made = requests.take();
    assert!(made.iter().filter(|(_, key)| key.contains("/p/")).count() == 10, "{made:?}");
}

#[test]
fn ephemeral_clones_make_no_request_and_are_apart_from_each_other() {
    let world = World::new();
    let (host, requests) = world.host("a", quiet());
    host.create(new(id(1), 8 * MIB, FlushMode::Local)).unwrap();
    let volume = host.attach(id(1), &opener(1)).unwrap();
    let base = noise(2 * MIB as usize, 5);
    volume.write(0, &base, false).unwrap();
    volume.snapshot(snap(1)).unwrap();
    volume.write(0, &[9; 4096], false).unwrap();
    let first = host.clone_ephemeral(snap(1), id(100), FlushMode::Local, true).unwrap();
    assert!(read(&first, 0, base.len()) == base);
    requests.take();
    let clones: Vec<Volume> = (101..121).map(|n| host.clone_ephemeral(snap(1), id(n), FlushMode::Local, true).unwrap()).collect();
    for (n, clone) in (0u8..).zip(&clones) {
        clone.write(u64::from(n) * 4096, &[n; 100], true).unwrap();
        assert!(read(clone, 0, 4096)[100..] == base[100..4096]);
    }
    for (n, clone) in clones.iter().enumerate() {
        let mut plain = base.clone();
        plain[n * 4096..n * 4096 + 100].fill(n as u8);
        assert!(read(clone, 0, base.len()) == plain, "clone {n}");
    }
    assert_eq!(requests.take(), []);
    assert!(read(&volume, 0, 4096) == [9; 4096] && read(&volume, 4096, 4096) == base[4096..8192]);

    // Killed and opened again; then kept, twice; the clone is then a volume that stands by itself.
    let mut clones = clones;
    let one = clones.remove(7);
    let clone = one.id();
    drop(one);
    let one = host.clone_ephemeral(snap(1), clone, FlushMode::Local, true).unwrap();
    assert_eq!(requests.take(), []);
    assert!(read(&one, 7 * 4096, 100) == [7; 100]);
    one.keep().unwrap();
    let made = requests.take();
    // The head, and a look whether the snapshot is still there.
    assert_eq!(made.iter().map(|(kind, key)| (*kind, key.ends_with("/head"))).collect::<Vec<_>>(), [("put", true), ("get", false)]);
    clones.remove(0).detach().unwrap();
    assert_eq!(requests.take(), []);
    host.clone_named(snap(1), id(200), FlushMode::Local).unwrap();
    assert_eq!(requests.take().iter().map(|(kind, _)| *kind).collect::<Vec<_>>(), ["put", "get"]);

    let (elsewhere, _) = world.host("b", quiet());
    let kept = elsewhere.attach(clone, &opener(3)).unwrap();
    let mut plain = base.clone();
    plain[7 * 4096..7 * 4096 + 100].fill(7);
    assert!(read(&kept, 0, base.len()) == plain);
    assert!(read(&elsewhere.attach(id(200), &opener(4)).unwrap(), 0, base.len()) == base);
}

#[test]
fn a_clone_that_overwrites_much_keeps_a_log_of_what_it_needs() {
    let world = World::new();
    let (host, requests) = world.host("a", Limits { ephemeral_bytes_max: 1 << 30, ..quiet() });
    host.create(new(id(1), 64 * MIB, FlushMode::Local)).unwrap();
    let volume = host.attach(id(1), &opener(1)).unwrap();
    volume.write(0, &noise(4 * MIB as usize, 1), false).unwrap();
    volume.snapshot(snap(1)).unwrap();
    drop(volume);
    let clone = host.clone_ephemeral(snap(1), id(2), FlushMode::Local, true).unwrap();
    requests.take();
    let mut plain = vec![0; 80 * MIB as usize];
    clone.resize(80 * MIB).unwrap();
    // Holes over the snapshot that are older than everything that is cleaned.
    clone.discard(0, 4 * MIB).unwrap();
    for round in 0..1_400u64 {
        let at = (round * 7 % 40 + 8) * MIB;
        let bytes = noise(MIB as usize, round);
        plain[at as usize..(at + MIB) as usize].copy_from_slice(&bytes);
        clone.write(at, &bytes, false).unwrap();
    }
    assert_eq!(requests.take(), []);
    let log = || {
        std::fs::read_dir(world.dir.join(format!("a/{}", id(2))))
            .unwrap()
            .map(|entry| entry.unwrap().metadata().unwrap().len())
            .sum::<u64>()
    };
    assert!(log() < 512 * MIB, "{}", log());
    assert!(read(&clone, 0, plain.len()) == plain);
    drop(clone);
    let clone = host.clone_ephemeral(snap(1), id(2), FlushMode::Local, true).unwrap();
    assert_eq!(clone.size(), 80 * MIB);
    assert!(read(&clone, 0, plain.len()) == plain, "after a restart");
    clone.keep().unwrap();
    let (elsewhere, _) = world.host("b", quiet());
    let kept = elsewhere.attach(id(2), &opener(3)).unwrap();
    assert!(read(&kept, 0, plain.len()) == plain, "kept");
    drop(kept);
    elsewhere.remove(id(2), true).unwrap();
    elsewhere.remove(id(2), true).unwrap();
    assert!(matches!(elsewhere.attach(id(2), &opener(3)), Err(OpenError::Move(_))));
}

#[test]
fn the_cache_on_the_disk_spares_requests_and_may_be_damaged() {
    let world = World::new();
    let (host, _) = world.host("a", quiet());
    host.create(new(id(1), 64 * MIB, FlushMode::Local)).unwrap();
    let volume = host.attach(id(1), &opener(1)).unwrap();
    let plain = noise(8 * MIB as usize, 1);
    volume.write(0, &plain, false).unwrap();
    volume.snapshot(snap(1)).unwrap();
    let (elsewhere, requests) = world.host("b", Limits { cache_bytes: 1 << 20, ..quiet() });
    let clone = elsewhere.clone_ephemeral(snap(1), id(2), FlushMode::Local, true).unwrap();
    assert!(read(&clone, 0, plain.len()) == plain);
    requests.take();
    let other = elsewhere.clone_ephemeral(snap(1), id(3), FlushMode::Local, true).unwrap();
    let mut into = vec![0; 5_000];
    for at in (0..plain.len() - 5_000).step_by(70_001) {
        other.read_ready(at as u64, &mut into).unwrap().unwrap();
        assert!(into == plain[at..at + 5_000]);
    }
    assert_eq!(requests.take(), []);
    let slab = std::fs::File::options().write(true).open(world.dir.join("b/cache.slab")).unwrap();
    std::os::unix::fs::FileExt::write_all_at(&slab, &noise(4 * MIB as usize, 2), 0).unwrap();
    assert!(read(&other, 0, plain.len()) == plain, "what is damaged is fetched again");
    assert!(!requests.take().is_empty());
    slab.set_len(0).unwrap();
    assert!(read(&clone, 0, plain.len()) == plain, "gone");
}

#[test]
fn s3_that_is_away_stalls_writes_and_loses_nothing() {
    let world = World::new();
    let limits = Limits { dirty_bytes_max: 4 * MIB, commit_bytes: 2 * MIB, stall_max: Duration::from_millis(300), ..quiet() };
    let (host, requests) = world.host("a", limits);
    host.create(new(id(1), 64 * MIB, FlushMode::Local)).unwrap();
    let volume = host.attach(id(1), &opener(1)).unwrap();
    requests.away.store(true, Ordering::SeqCst);
    let mut done = 0;
    let error = loop {
        match volume.write(done * MIB, &noise(MIB as usize, done), false) {
            Ok(()) => done += 1,
            Err(error) => break error,
        }
    };
    assert_eq!(error.kind(), ErrorKind::StorageFull);
    assert!((3..=5).contains(&done), "{done}");
    assert!(volume.flush().is_ok(), "the disk is there");
    assert!(volume.failure().is_none());
    requests.away.store(false, Ordering::SeqCst);
    for round in 0..20 {
        let deadline = std::time::Instant::now() + Duration::from_secs(60);
        while let Err(error) = volume.write(round * MIB, &noise(MIB as usize, round), false) {
            assert!(error.kind() == ErrorKind::StorageFull && std::time::Instant::now() < deadline, "{error}");
        }
    }
    for round in 0..20 {
        assert!(read(&volume, round * MIB, MIB as usize) == noise(MIB as usize, round));
    }
    drop(volume);
    let volume = host.attach(id(1), &opener(1)).unwrap();
    for round in 0..20 {
        assert!(read(&volume, round * MIB, MIB as usize) == noise(MIB as usize, round));
    }
}

#[test]
fn parts_of_one_block_that_are_written_at_the_same_time_all_stay() {
    let world = World::new();
    let (host, _) = world.host("a", Limits { commit_every: Duration::from_millis(5), log_keep_bytes: 0, ..Limits::default() });
    host.create(new(id(1), MIB, FlushMode::Local)).unwrap();
    let volume = host.attach(id(1), &opener(1)).unwrap();
    for round in 1..=50u8 {
        std::thread::scope(|scope| {
            for part in 0..8u64 {
                let volume = &volume;
                scope.spawn(move || volume.write(2048 + part * 512, &[round ^ part as u8; 512], false).unwrap());
            }
        });
        for part in 0..8u64 {
            assert!(read(&volume, 2048 + part * 512, 512) == [round ^ part as u8; 512], "round {round} part {part}");
        }
    }
}

#[test]
fn ranges_outside_are_refused_and_a_whole_disk_is_trimmed_at_once() {
    let world = World::new();
    let (host, _) = world.host("a", quiet());
    host.create(new(id(1), 16 << 40, FlushMode::Local)).unwrap();
    let volume = host.attach(id(1), &opener(1)).unwrap();
    let size = volume.size();
    for error in [
        volume.read(size - 1, &mut [0; 2]),
        volume.write(size, &[0], false),
        volume.zero(u64::MAX, 2, true, false),
        volume.resize(size - 4096),
    ] {
        assert_eq!(error.unwrap_err().kind(), ErrorKind::InvalidInput);
    }
    volume.write(size - 4096, &[5; 4096], false).unwrap();
    volume.write(77, &[5; 4096], false).unwrap();
    assert_eq!(volume.pieces(0, size).unwrap().iter().map(|piece| piece.hole).collect::<Vec<_>>(), [false, true, false]);
    volume.discard(0, size).unwrap();
    assert_eq!(volume.pieces(0, size).unwrap().len(), 1);
    volume.snapshot(snap(1)).unwrap();
    assert!(read(&volume, size - 4096, 4096) == [0; 4096] && read(&volume, 0, 8192) == [0; 8192]);
    let clone = host.clone_ephemeral(snap(1), id(2), FlushMode::None, true).unwrap();
    assert!(read(&clone, 0, 8192) == [0; 8192]);
}
