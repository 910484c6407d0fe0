//! A server is stopped (SIGSTOP) in the middle of its work, and goes on when others have had its volume for days.

use std::fs::{self, File};
use std::io::Write as _;
use std::path::Path;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use rustix::process::{Pid, Signal, kill_process};
use volley_volume::{Collected, Collection, Known};
use volley_worker::volumes::VolumeError;

use crate::world::{MOUNT, World, bytes, possible, soon, volume, write};

const DAY_MS: u64 = 86_400_000;

/// The server with this pid, which does nothing until this is dropped.
struct Stopped(Pid);

impl Stopped {
    fn new(pid: u32) -> Self {
        let pid = Pid::from_raw(pid.cast_signed()).unwrap();
        kill_process(pid, Signal::STOP).unwrap();
        let stat = format!("/proc/{}/stat", pid.as_raw_nonzero());
        soon("it has stopped", || fs::read_to_string(&stat).unwrap().contains(") T "));
        Self(pid)
    }
}

impl Drop for Stopped {
    fn drop(&mut self) {
        let _ = kill_process(self.0, Signal::CONT);
    }
}

/// Collects what nobody needs, on a day to come.
async fn collect(world: &World, days: u64) -> Collected {
    let collected = world.host(move |host| {
        let mut known = Known::default();
        known.volumes.insert(volume(1));
        let now_ms = || SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_millis() as u64 + days * DAY_MS;
        host.collect(&Collection { known: &known, name: "a test", dry_run: false, now_ms: &now_ms })
    });
    collected.await.unwrap()
}

fn aside(dir: &Path) -> usize {
    let entries = fs::read_dir(dir).unwrap().flatten();
    entries
        .map(|entry| {
            if entry.file_name().to_string_lossy().contains(".lost-") {
                1
            } else if entry.path().is_dir() {
                aside(&entry.path())
            } else {
                0
            }
        })
        .sum()
}

/// Writes files until that fails; returns how many.
fn files_until_it_fails(tree: &Path) -> u64 {
    let write = |i: u64| {
        let mut file = File::create(tree.join(format!("more-{}", i % 8)))?;
        file.write_all(&bytes(i, 1 << 20))?;
        file.sync_all()
    };
    (0..400).take_while(|i| write(*i).is_ok()).count() as u64
}

async fn a_stopped_writer_wakes_after_takeover_and_collection(pause: Duration) {
    let world = World::new().await;
    let (one, two) = (world.worker("one").await, world.worker("two").await);
    let base = bytes(1, 12 << 20);
    let open = one.open(write(1, 1, 0, MOUNT)).await.unwrap();
    fs::write(open.dir().join("base"), &base).unwrap();
    fs::write(open.dir().join("mine"), "of nobody").unwrap();
    world.promote(1, open.finish().await.unwrap()).await;

    let first = one.open(write(2, 1, 1, MOUNT)).await.unwrap();
    let tree = first.dir().to_owned();
    fs::write(tree.join("mine"), "of the first").unwrap();
    // It writes, commits as it goes, and is stopped somewhere in that.
    let writing = std::thread::spawn(move || files_until_it_fails(&tree));
    tokio::time::sleep(pause).await;
    let stopped = tokio::task::block_in_place(|| Stopped::new(one.server().unwrap()));

    // Others have it, over and over: of what there was when it was stopped, only the base is left.
    for n in 3..6u32 {
        let open = two.open(write(n, 1, u64::from(n) - 2, MOUNT)).await.unwrap();
        assert!(fs::read(open.dir().join("base")).unwrap() == base);
        let before = fs::read_to_string(open.dir().join("mine")).unwrap();
        assert_eq!(before, if n == 3 { "of nobody".to_owned() } else { format!("of {}", n - 1) });
        fs::write(open.dir().join("mine"), format!("of {n}")).unwrap();
        fs::write(open.dir().join("large"), bytes(n.into(), 20 << 20)).unwrap();
        world.promote(n, open.finish().await.unwrap()).await;
    }
    let condemned = collect(&world, 0).await.condemned;
    assert!(condemned.0 > 0);
    assert!(collect(&world, 2).await.deleted.0 > 0);
    let verify = || world.host(|host| host.verify(volume(1), true).unwrap());
    let before = verify().await;

    // It goes on in the middle of whatever it was at.
    drop(stopped);
    let why = tokio::time::timeout(Duration::from_secs(60), first.failed()).await.unwrap();
    assert!(matches!(why, VolumeError::Elsewhere { .. }), "{why}");
    let done = tokio::task::spawn_blocking(move || writing.join().unwrap()).await.unwrap();
    assert!(done < 400, "its I/O does not fail");
    let late =
        File::create(first.dir().join("late")).and_then(|mut file| file.write_all(&bytes(7, 4 << 20)).and_then(|()| file.sync_all()));
    assert!(late.is_err(), "its I/O does not fail");
    assert!(first.finish().await.is_err());
    soon("its log is put aside", || aside(&world.of("one")) == 1);
    assert_eq!(one.stats().await.unwrap().aside, 1);
    assert_eq!(verify().await, before, "it has changed something");

    // Nothing of it is seen by anybody, and what it left in the bucket goes.
    for days in [4, 6] {
        collect(&world, days).await;
    }
    assert_eq!(collect(&world, 8).await.condemned.0, 0);
    for (n, worker) in [(6, &one), (7, &two)] {
        let open = worker.open(write(n, 1, 4, MOUNT)).await.unwrap();
        assert!(fs::read(open.dir().join("base")).unwrap() == base && fs::read(open.dir().join("large")).unwrap() == bytes(5, 20 << 20));
        assert_eq!(fs::read_to_string(open.dir().join("mine")).unwrap(), "of 5");
        assert!(!open.dir().join("late").exists() && !open.dir().join("more-0").exists());
        open.forget().await;
    }
    println!("stopped after {done} files, {} objects were collected meanwhile", condemned.0);
}

#[tokio::test(flavor = "multi_thread")]
async fn a_writer_that_was_stopped_for_days_changes_nothing() {
    if !possible() {
        return;
    }
    // At moments of its writing that differ.
    let rounds: u64 = std::env::var("VOLLEY_STOPS").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(2);
    for round in 0..rounds {
        a_stopped_writer_wakes_after_takeover_and_collection(Duration::from_millis(500 + round * 370 % 1_900)).await;
    }
}
