//! The server is killed under volumes that are in use, and while they are let go.

use std::fs::{self, File};
use std::io::Write as _;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use volley_worker::volumes::{Show, VolumeError};

use crate::world::{MOUNT, World, bytes, copy, kill_server, possible, soon, volume, write};

/// Kills of the server under a file system; `VOLLEY_KILLS` says otherwise.
fn rounds(default: u64) -> u64 {
    std::env::var("VOLLEY_KILLS").ok().and_then(|n| n.parse().ok()).unwrap_or(default)
}

#[tokio::test(flavor = "multi_thread")]
async fn a_file_system_does_not_notice_that_its_server_is_killed() {
    if !possible() {
        return;
    }
    let world = World::new().await;
    let one = world.worker("one").await;
    let open = one.open(write(1, 1, 0, MOUNT)).await.unwrap();
    let tree = open.dir().to_owned();
    let (stop, done) = (Arc::new(AtomicBool::new(false)), Arc::new(AtomicU64::new(0)));
    let (stopped, counted) = (Arc::clone(&stop), Arc::clone(&done));
    let writing = std::thread::spawn(move || {
        let mut last = [0u64; 40];
        for i in 1u64.. {
            if stopped.load(Ordering::SeqCst) {
                return (last, i);
            }
            let place = i * 17 % 40;
            let mut file = File::create(tree.join(place.to_string())).unwrap();
            file.write_all(&bytes(i, 10_000 + (i * 7919 % 500_000) as usize)).unwrap();
            if i % 3 == 0 {
                file.sync_all().unwrap();
            }
            last[place as usize] = i;
            counted.store(i, Ordering::SeqCst);
        }
        (last, 0)
    });
    for round in 0..rounds(6) {
        // One that is killed before it has replied to anything is not back: half a minute of that is too long for anybody.
        let before = done.load(Ordering::SeqCst);
        tokio::task::block_in_place(|| soon("something written", || done.load(Ordering::SeqCst) > before + 3));
        tokio::time::sleep(Duration::from_millis(round * 37 % 400)).await;
        tokio::task::block_in_place(|| kill_server(&one, true));
    }
    stop.store(true, Ordering::SeqCst);
    let (last, written) = tokio::task::spawn_blocking(move || writing.join().unwrap()).await.unwrap();
    assert!(written > 20, "hardly anything was written");
    let check = |dir: &std::path::Path| {
        for (place, i) in last.iter().enumerate().filter(|(_, i)| **i > 0) {
            let found = fs::read(dir.join(place.to_string())).unwrap();
            assert!(found == bytes(*i, 10_000 + (i * 7919 % 500_000) as usize), "file {place}");
        }
    };
    check(open.dir());
    let left = open.finish().await.unwrap();
    world.promote(1, left).await;
    world.nothing_left("one");
    let two = world.worker("two").await;
    let open = two.open(write(2, 1, 1, MOUNT)).await.unwrap();
    check(open.dir());
    open.forget().await;
    println!("{} kills, {written} files written", rounds(6));
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_let_go_while_the_server_is_killed_is_let_go_once() {
    if !possible() {
        return;
    }
    let world = World::new().await;
    let one = world.worker("one").await;
    let two = world.worker("two").await;
    let mut generation = 0;
    for round in 0..u32::try_from(rounds(8)).unwrap() {
        let open = one.open(write(10 + round, 1, generation, MOUNT)).await.unwrap();
        if round > 0 {
            let before = u64::from(round - 1);
            assert!(fs::read(open.dir().join("last")).unwrap() == bytes(before, 3 << 20), "what round {before} wrote");
        }
        fs::write(open.dir().join("last"), bytes(round.into(), 3 << 20)).unwrap();
        let finishing = tokio::spawn(open.finish());
        tokio::time::sleep(Duration::from_millis(u64::from(round) * 23 % 160)).await;
        tokio::task::block_in_place(|| kill_server(&one, false));
        let left = finishing.await.unwrap().unwrap();
        assert_eq!(left.generation, generation);
        world.promote(10 + round, left).await;
        generation += 1;
        // And a copy that is kept.
        let snapshot = volley_jobspecs::ids::SnapshotId([100 + round as u8; 16]);
        world.host(move |host| host.snapshot_accepted(volume(1), snapshot)).await.unwrap();
        let kept = 50 + round as u8;
        let open = two.open(copy(10 + round, snapshot, kept, MOUNT)).await.unwrap();
        fs::write(open.dir().join("copy"), bytes(1_000 + u64::from(round), 2 << 20)).unwrap();
        let keeping = tokio::spawn(open.keep());
        tokio::time::sleep(Duration::from_millis(u64::from(round) * 31 % 200)).await;
        tokio::task::block_in_place(|| kill_server(&two, false));
        keeping.await.unwrap().unwrap();
        let snapshot = world.snapshot(kept).await;
        let open = two.open(copy(10 + round, snapshot, 150 + round as u8, Show::Mount { read_only: true })).await.unwrap();
        assert!(fs::read(open.dir().join("copy")).unwrap() == bytes(1_000 + u64::from(round), 2 << 20));
        open.forget().await;
    }
    world.nothing_left("one");
    world.nothing_left("two");
    let stats = (one.stats().await.unwrap(), two.stats().await.unwrap());
    assert_eq!((stats.0.open, stats.0.aside, stats.1.open, stats.1.aside), (0, 0, 0, 0));
}

#[tokio::test(flavor = "multi_thread")]
async fn whoever_was_replaced_is_told_and_takes_nothing_back() {
    if !possible() {
        return;
    }
    let world = World::new().await;
    let (one, two) = (world.worker("one").await, world.worker("two").await);
    let open = one.open(write(1, 1, 0, MOUNT)).await.unwrap();
    world.promote(1, open.finish().await.unwrap()).await;
    let first = one.open(write(2, 1, 1, MOUNT)).await.unwrap();
    fs::write(first.dir().join("mine"), "of the first").unwrap();
    let second = two.open(write(3, 1, 1, MOUNT)).await.unwrap();
    fs::write(second.dir().join("mine"), "of the second").unwrap();
    // The first writes on: its next commit tells.
    File::create(first.dir().join("more")).and_then(|mut file| file.write_all(&bytes(1, 1 << 20)).and_then(|()| file.sync_all())).ok();
    let why = tokio::time::timeout(Duration::from_secs(60), first.failed()).await.unwrap();
    assert!(matches!(why, VolumeError::Elsewhere { .. }) && why.blameless(), "{why}");
    assert!(first.finish().await.is_err());
    // One that was not told, and whose server comes back, takes nothing from whoever has it.
    let third = one.open(write(4, 1, 1, MOUNT)).await.unwrap();
    // In the background: the next one waits for it.
    drop(second);
    let fourth = two.open(write(5, 1, 1, MOUNT)).await.unwrap();
    fs::write(fourth.dir().join("mine"), "of the fourth").unwrap();
    tokio::task::block_in_place(|| kill_server(&one, true));
    let why = tokio::time::timeout(Duration::from_secs(60), third.failed()).await.unwrap();
    assert!(matches!(why, VolumeError::Elsewhere { .. }), "{why}");
    third.forget().await;
    // Nor one that is late: a later attempt was given it.
    let late = one.open(write(3, 1, 1, MOUNT)).await;
    assert!(matches!(late, Err(VolumeError::Elsewhere { .. })), "{late:?}");
    let left = fourth.finish().await.unwrap();
    world.promote(5, left).await;
    let wrong = one.open(write(6, 1, 1, MOUNT)).await;
    assert!(matches!(wrong, Err(VolumeError::NotAsGiven { .. })), "{wrong:?}");
    let open = one.open(write(7, 1, 2, MOUNT)).await.unwrap();
    assert_eq!(fs::read(open.dir().join("mine")).unwrap(), b"of the fourth");
    open.forget().await;
    world.nothing_left("one");
    world.nothing_left("two");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_cant_be_started_is_said_and_one_that_can_is_used() {
    if !possible() {
        return;
    }
    let mut world = World::new().await;
    let there = world.of("program");
    world.program = Some(there.clone());
    std::os::unix::fs::symlink("/bin/false", &there).unwrap();
    let one = world.worker("one").await;
    assert!(one.lack().unwrap().contains("ended at once: exit status: 1"), "{:?}", one.lack());
    let begin = std::time::Instant::now();
    let why = one.open(write(1, 1, 0, MOUNT)).await.unwrap_err();
    assert!(matches!(&why, VolumeError::Off(words) if words.contains("ended at once")) && !why.blameless(), "{why}");
    assert!(begin.elapsed() < Duration::from_secs(5), "nobody waits for what is not there");
    fs::remove_file(&there).unwrap();
    std::os::unix::fs::symlink(std::env::current_exe().unwrap(), &there).unwrap();
    soon("a server", || one.lack().is_none() && one.server().is_some());
    let open = one.open(write(1, 1, 0, MOUNT)).await.unwrap();
    assert!(open.made());
    open.forget().await;
    // The same attempt again, before the first is let go.
    let open = one.open(write(1, 1, 0, MOUNT)).await.unwrap();
    drop(open);
    let open = one.open(write(1, 1, 0, MOUNT)).await.unwrap();
    assert!(open.made());
    // Whoever waits no longer leaves nothing.
    drop(open);
    // Usually while it is being opened; one that was faster is dropped.
    drop(tokio::time::timeout(Duration::from_millis(3), one.open(write(1, 1, 0, MOUNT))).await);
    world.nothing_left("one");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_server_that_stays_away_has_failed_its_volumes() {
    if !possible() {
        return;
    }
    let mut world = World::new().await;
    let there = world.of("program");
    world.program = Some(there.clone());
    std::os::unix::fs::symlink(std::env::current_exe().unwrap(), &there).unwrap();
    let one = world.worker("one").await;
    let open = one.open(write(1, 1, 0, MOUNT)).await.unwrap();
    fs::remove_file(&there).unwrap();
    let begin = std::time::Instant::now();
    tokio::task::block_in_place(|| kill_server(&one, false));
    let why = tokio::time::timeout(Duration::from_secs(60), open.failed()).await.unwrap();
    assert!(matches!(why, VolumeError::Host { .. }), "{why}");
    // As long as QEMU and the program that shows the file try to connect again.
    assert!(begin.elapsed() >= Duration::from_secs(29), "{:?}", begin.elapsed());
    assert!(open.finish().await.is_err());
    std::os::unix::fs::symlink(std::env::current_exe().unwrap(), &there).unwrap();
    world.nothing_left("one");
}
