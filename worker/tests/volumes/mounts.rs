//! Volumes that are mounted: what stays, what is refused, what is left behind.

use std::fs;
use std::io::Write as _;
use std::os::unix::fs::{MetadataExt as _, PermissionsExt as _};

use volley_jobspecs::failure::FailureClass;
use volley_jobspecs::ids::SnapshotId;
use volley_worker::volumes::{Show, Top, VolumeError, Want};

use crate::world::{MIB, MOUNT, World, bytes, copy, kill_server, possible, programs_with, refused, soon, volume, write};

#[tokio::test(flavor = "multi_thread")]
async fn what_an_attempt_wrote_is_there_for_the_next_and_what_a_failed_one_did_is_not() {
    if !possible() {
        return;
    }
    let world = World::new().await;
    let (one, two) = (world.worker("one").await, world.worker("two").await);
    let want = Want { top: Top { uid: 80_005, gid: 80_006, mode: 0o2770 }, ..write(1, 1, 0, MOUNT) };
    let open = one.open(want).await.unwrap();
    let about = fs::metadata(open.dir()).unwrap();
    assert_eq!((about.uid(), about.gid(), about.permissions().mode() & 0o7777), (80_005, 80_006, 0o2770));
    assert_eq!((open.bytes(), open.grown()), (64 * MIB, false));
    fs::write(open.dir().join("kept"), bytes(1, 3 << 20)).unwrap();
    let left = open.finish().await.unwrap();
    assert_eq!((left.slot, left.volume, left.generation, left.size_bytes), (2, volume(1), 0, 64 * MIB));
    world.nothing_left("one");
    world.promote(1, left).await;
    // On another host: fails. It had more than it committed.
    let open = two.open(write(2, 1, 1, MOUNT)).await.unwrap();
    assert!(fs::read(open.dir().join("kept")).unwrap() == bytes(1, 3 << 20));
    fs::write(open.dir().join("kept"), "spoilt").unwrap();
    open.forget().await;
    world.nothing_left("two");
    // Grown by the third, which is as large as it says.
    let open = one.open(Want { size_bytes: Some(256 * MIB), ..write(3, 1, 1, MOUNT) }).await.unwrap();
    assert!(open.grown() && fs::read(open.dir().join("kept")).unwrap() == bytes(1, 3 << 20));
    assert!(rustix::fs::statvfs(open.dir()).unwrap().f_blocks * 4096 > 200 * MIB);
    fs::write(open.dir().join("large"), bytes(2, 100 << 20)).unwrap();
    let left = open.finish().await.unwrap();
    world.promote(3, left).await;
    let open = two.open(Want { size_bytes: None, ..write(4, 1, 2, MOUNT) }).await.unwrap();
    assert!(fs::read(open.dir().join("large")).unwrap() == bytes(2, 100 << 20));
    drop(open);
    world.nothing_left("two");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_host_does_not_mount_what_a_guest_could_have_written() {
    if !possible() {
        return;
    }
    let mut world = World::new().await;
    let one = world.worker("one").await;
    let open = one.open(write(1, 1, 0, Show::Nbd { uid: 0, gid: 0 })).await.unwrap();
    let left = open.finish().await.unwrap();
    world.promote(1, left).await;
    let snapshot = world.snapshot(1).await;
    for want in [write(2, 1, 1, MOUNT), copy(2, snapshot, 9, Show::Mount { read_only: true })] {
        let why = refused(one.open(want).await);
        assert!(matches!(why, VolumeError::GuestWritten { .. }), "{why}");
        assert_eq!((why.class(), why.blameless()), (FailureClass::PolicyDenied, true));
        assert!(why.to_string().contains("--allow-host-mount") && !why.to_string().contains('\n'), "{why}");
    }
    world.nothing_left("one");
    // A guest has it back, also as a file.
    let open = one.open(copy(3, snapshot, 10, Show::File { uid: 80_001, gid: 80_001 })).await.unwrap();
    let volley_worker::vmm::Source::File(file) = open.source().unwrap() else { panic!("no file") };
    // As a VMM's driver does: it is the VMM's already.
    rustix::fs::fchown(&file, Some(rustix::fs::Uid::from_raw(80_001)), Some(rustix::fs::Gid::from_raw(80_001))).unwrap();
    assert_eq!(rustix::fs::fstat(&file).unwrap().st_size, 64 * MIB as i64);
    drop(file);
    open.forget().await;
    drop(one);
    world.allow = true;
    let one = world.worker("one").await;
    let open = one.open(write(4, 1, 1, MOUNT)).await.unwrap();
    assert!(open.dir().join("lost+found").is_dir());
    open.forget().await;
    world.nothing_left("one");
}

#[tokio::test(flavor = "multi_thread")]
async fn copies_are_their_tasks_own_and_a_kept_one_is_a_volume() {
    if !possible() {
        return;
    }
    let world = World::new().await;
    let one = world.worker("one").await;
    let open = one.open(write(1, 1, 0, MOUNT)).await.unwrap();
    fs::write(open.dir().join("base"), bytes(1, 5 << 20)).unwrap();
    world.promote(1, open.finish().await.unwrap()).await;
    let snapshot = world.snapshot(1).await;
    let (kept, dropped) = tokio::join!(one.open(copy(2, snapshot, 11, MOUNT)), one.open(copy(3, snapshot, 12, MOUNT)));
    let (kept, dropped) = (kept.unwrap(), dropped.unwrap());
    for (open, seed) in [(&kept, 2), (&dropped, 3)] {
        fs::write(open.dir().join("own"), bytes(seed, 2 << 20)).unwrap();
    }
    // Its server dies under it.
    kill_server(&one, true);
    assert!(fs::read(dropped.dir().join("own")).unwrap() == bytes(3, 2 << 20));
    dropped.forget().await;
    assert_eq!(kept.keep().await.unwrap(), 64 * MIB);
    let stats = one.stats().await.unwrap();
    assert_eq!((stats.open, stats.aside), (0, 0));
    let missing = world.host(|host| host.snapshot_accepted(volume(12), SnapshotId([12; 16])).is_err()).await;
    assert!(missing, "nothing of a copy that was dropped is in the bucket");
    let snapshot = world.snapshot(11).await;
    let open = one.open(copy(4, snapshot, 13, Show::Mount { read_only: true })).await.unwrap();
    assert!(fs::read(open.dir().join("base")).unwrap() == bytes(1, 5 << 20));
    assert!(fs::read(open.dir().join("own")).unwrap() == bytes(2, 2 << 20));
    assert_eq!(fs::write(open.dir().join("own"), "x").unwrap_err().kind(), std::io::ErrorKind::ReadOnlyFilesystem);
    drop(open);
    world.nothing_left("one");
}

#[tokio::test(flavor = "multi_thread")]
async fn what_is_still_in_use_is_an_error_and_does_not_stay() {
    if !possible() {
        return;
    }
    let world = World::new().await;
    let one = world.worker("one").await;
    let open = one.open(write(1, 1, 0, MOUNT)).await.unwrap();
    let mut file = fs::File::create(open.dir().join("open")).unwrap();
    let why = open.finish().await.unwrap_err();
    assert!(matches!(why, VolumeError::Busy { slot: 2, .. }), "{why}");
    assert_eq!(why.class(), FailureClass::StorageFailed);
    // Whoever it is can't keep it.
    soon("an error", || file.write_all(&[7; 4096]).and_then(|()| file.sync_all()).is_err());
    drop(file);
    world.nothing_left("one");
}

#[tokio::test(flavor = "multi_thread")]
async fn a_worker_that_was_killed_leaves_nothing_behind_its_next_start() {
    if !possible() {
        return;
    }
    let world = World::new().await;
    let one = world.worker("one").await;
    let snapshot = {
        let open = one.open(write(1, 1, 0, MOUNT)).await.unwrap();
        world.promote(1, open.finish().await.unwrap()).await;
        world.snapshot(1).await
    };
    let at = world.of("one").join("volumes/at");
    let opened = [write(2, 1, 1, MOUNT), copy(2, snapshot, 11, MOUNT), copy(3, snapshot, 12, Show::File { uid: 1, gid: 1 })];
    for want in opened {
        let open = one.open(want).await.unwrap();
        if open.dir().exists() {
            fs::write(open.dir().join("written"), bytes(1, 4 << 20)).unwrap();
        }
        // Nobody ends it.
        std::mem::forget(open);
    }
    assert_eq!(programs_with(at.to_str().unwrap()).len(), 3);
    // Its server goes with it.
    one.abandon();
    let again = world.worker("one").await;
    world.nothing_left("one");
    let stats = again.stats().await.unwrap();
    assert_eq!(stats.open, 0);
    let store = fs::read_dir(world.of("one").join("volumes/store")).unwrap();
    let names: Vec<String> = store.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    assert!(!names.iter().any(|name| name.starts_with(&volume(11).to_string())), "{names:?}");
    let open = again.open(write(4, 1, 1, MOUNT)).await.unwrap();
    assert!(!open.dir().join("written").exists(), "of an attempt that never ended");
    open.forget().await;
    world.nothing_left("one");
}
