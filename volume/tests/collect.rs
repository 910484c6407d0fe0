//! Collection: what nobody needs goes after two looks, what anybody needs stays, and whatever can't be read keeps everything.
//!
//! `SEEDS=1000 cargo test -p volley-volume --test collect` runs more histories.
#![expect(clippy::unwrap_used, reason = "a test says with a panic that it failed")]

mod support;

use std::collections::BTreeMap;
use std::sync::Arc;

use support::{MIB, id, new, noise, opener, quiet, snap};
use tokio::runtime::Runtime;
use volley_jobspecs::ids::VolumeId;
use volley_volume::device::Device;
use volley_volume::format::head::FlushMode;
use volley_volume::format::keys;
use volley_volume::format::seal::ClusterKeys;
use volley_volume::io::fake::{Fake, Fault};
use volley_volume::io::s3::Objects;
use volley_volume::{CollectError, Collected, Collection, Host, Known, OpenError, Pinned, Promotion};

const DAY_MS: u64 = 86_400_000;
/// Too much for a head.
const PIECE: usize = 128 << 10;

struct World {
    bucket: Arc<Fake>,
    host: Arc<Host>,
    known: Known,
    /// Days that have passed.
    days: u64,
    _dir: tempfile::TempDir,
    _runtime: Runtime,
}

fn now_ms() -> u64 {
    std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_millis() as u64
}

impl World {
    fn new() -> Self {
        let (bucket, dir, runtime) = (Arc::new(Fake::default()), tempfile::tempdir().unwrap(), Runtime::new().unwrap());
        let keys = ClusterKeys::new(&[[1; 32]]).unwrap();
        let objects = Arc::clone(&bucket) as Arc<dyn Objects>;
        let host = Host::new(objects, keys, dir.path().to_owned(), runtime.handle().clone(), quiet());
        Self { bucket, host, known: Known::default(), days: 0, _dir: dir, _runtime: runtime }
    }

    fn make(&mut self, volume: u8) {
        self.host.create(new(id(volume), 4 * MIB, FlushMode::S3)).unwrap();
        self.known.volumes.insert(id(volume));
    }

    /// Somebody writes, and it is accepted.
    fn write(&self, volume: u8, offset: u64, bytes: &[u8]) {
        let open = self.host.attach(id(volume), &opener(volume)).unwrap();
        // Each is a commit with a pack of its own; after 64 of them the map is written anew, and packs are named by it alone.
        for (n, part) in bytes.chunks(PIECE).enumerate() {
            open.write(offset + (n * PIECE) as u64, part, true).unwrap();
        }
        let (content, generation) = open.detach().unwrap();
        let accepted = Promotion { volume: id(volume), attempt: None, base: generation, root: content.digest() };
        self.host.promote(&accepted).unwrap();
    }

    fn read(&self, volume: u8) -> Vec<u8> {
        let open = self.host.attach(id(volume), &opener(99)).unwrap();
        let mut bytes = vec![0; 4 << 20];
        open.read(0, &mut bytes).unwrap();
        open.detach().unwrap();
        bytes
    }

    fn collect(&self, dry_run: bool) -> Result<Collected, CollectError> {
        let now_ms = || now_ms() + self.days * DAY_MS;
        self.host.collect(&Collection { known: &self.known, name: "a test", dry_run, now_ms: &now_ms })
    }

    fn packs(&self) -> usize {
        self.bucket.keys().iter().filter(|key| key.contains("/p/")).count()
    }
}

#[test]
fn what_was_written_over_goes_after_two_looks_and_nothing_else() {
    let mut world = World::new();
    world.make(1);
    let (first, second) = (noise(2 << 20, 1), noise(3 << 20, 2));
    world.write(1, 0, &first);
    world.host.snapshot_accepted(id(1), snap(1)).unwrap();
    world.known.snapshots.insert(snap(1));
    (0..4).for_each(|_| world.write(1, 0, &second));
    let before = world.bucket.keys().len();

    let dry = world.collect(true).unwrap();
    assert!(dry.condemned.0 > 0 && dry.deleted == (0, 0) && world.bucket.keys().len() == before, "{dry:?}");
    let one = world.collect(false).unwrap();
    assert_eq!((one.condemned, one.deleted), (dry.condemned, (0, 0)));
    assert_eq!(world.bucket.keys().len(), before + 1, "the list itself");
    let again = world.collect(false).unwrap();
    assert_eq!(again.deleted, (0, 0), "the same day");
    world.days = 1;
    assert_eq!(world.collect(true).unwrap().deleted, one.condemned);
    let two = world.collect(false).unwrap();
    assert_eq!(two.deleted, one.condemned);
    assert_eq!(world.bucket.keys().len() as u64, before as u64 + 1 - two.deleted.0);
    assert_eq!(world.collect(false).unwrap().condemned, (0, 0));

    world.host.verify(id(1), true).unwrap();
    assert!(world.read(1)[..3 << 20] == second);
    world.host.clone_named(snap(1), id(2), FlushMode::Local).unwrap();
    assert!(world.read(2)[..2 << 20] == first, "the snapshot's bytes are there");
    assert_eq!(two.stored.values().sum::<u64>(), two.objects.1 - two.condemned.1);
}

#[test]
fn whatever_cant_be_read_keeps_everything() {
    let mut world = World::new();
    world.make(1);
    (0..5).for_each(|n| world.write(1, 0, &noise(2 << 20, n)));
    world.host.snapshot_accepted(id(1), snap(1)).unwrap();
    world.host.pin("j1", Pinned::Snapshot(snap(1))).unwrap();
    world.collect(false).unwrap();
    world.days = 2;
    let all = world.bucket.keys();
    world.bucket.requests();
    world.collect(true).unwrap();
    let requests = world.bucket.requests();
    for request in ["list", "get", "get range"] {
        let count = requests.iter().filter(|(kind, _)| *kind == request).count();
        assert!(count > 0, "{request}");
        for before in 0..count {
            (0..before).for_each(|_| world.bucket.fault(request, Fault::Pass));
            world.bucket.fault(request, if request == "list" { Fault::LoseRequest } else { Fault::FlipBit });
            assert!(world.collect(false).is_err(), "{request} {before}");
            assert_eq!(world.bucket.clear_faults(), 0);
            assert!(world.bucket.keys() == all, "{request} {before}");
            // One that was lost is waited for, not for long.
            world.days += 1;
        }
    }
    // A run that got through has deleted something, or the above proves nothing.
    world.collect(false).unwrap();
    assert!(world.bucket.keys().len() < all.len());
}

#[test]
fn one_collects_at_a_time() {
    let world = World::new();
    let list = volley_volume::format::condemned::Condemned {
        collector: Some(volley_volume::format::condemned::Collector { name: "other".into(), until_ms: now_ms() + 60_000 }),
        ..Default::default()
    };
    world.bucket.set(volley_volume::format::condemned::KEY, list.write().unwrap().into());
    assert!(matches!(world.collect(false), Err(CollectError::Busy { name, .. }) if name == "other"));
    world.collect(true).unwrap();
    let late = World { days: 1, ..world };
    late.collect(false).unwrap();
}

#[test]
fn an_answer_that_is_lost_is_no_second_run() {
    let mut world = World::new();
    world.make(1);
    (0..5).for_each(|n| world.write(1, 0, &noise(2 << 20, n)));
    for day in 0..3 {
        world.days = day;
        world.bucket.fault("put", Fault::LoseAnswer);
        let _ = world.collect(false);
        world.bucket.clear_faults();
        world.collect(false).unwrap();
        world.host.verify(id(1), true).unwrap();
    }
    assert_eq!(world.collect(true).unwrap().condemned, (0, 0));
}

#[test]
fn whoever_keeps_a_clone_too_late_is_told_so() {
    let mut world = World::new();
    world.make(1);
    world.write(1, 0, &noise(2 << 20, 1));
    world.host.snapshot_accepted(id(1), snap(1)).unwrap();
    world.known.snapshots.insert(snap(1));
    // A host that died while it uploaded.
    world.bucket.set(&keys::pack(id(7), 1, 1_000, 0), vec![1; 100].into());
    let clone = world.host.clone_ephemeral(snap(1), id(7), FlushMode::None, false).unwrap();
    clone.write(0, &noise(1 << 20, 5), false).unwrap();
    for day in 0..2 {
        world.days = day;
        world.collect(false).unwrap();
    }
    assert!(world.bucket.keys().contains(&keys::head(id(7))), "it is said that it is too late");
    assert!(clone.keep().is_err());
    for day in 2..9 {
        world.days = day;
        world.collect(false).unwrap();
    }
    assert!(!world.bucket.keys().iter().any(|key| key.starts_with(&keys::volume(id(7)))), "{:?}", world.bucket.keys());
}

#[test]
fn whoever_makes_a_clone_of_what_was_collected_is_told_so_and_collections_go_on() {
    let mut world = World::new();
    world.make(1);
    (0..70).for_each(|n| world.write(1, n * 4096, &noise(PIECE, n)));
    world.host.snapshot_accepted(id(1), snap(1)).unwrap();
    world.known.snapshots.insert(snap(1));
    // Small enough for its head: nothing of it lies in the bucket, which would tell a collection of it.
    let clone = world.host.clone_ephemeral(snap(1), id(7), FlushMode::None, false).unwrap();
    clone.write(0, &[5; 4096], false).unwrap();
    world.known.snapshots.clear();
    world.known.volumes.clear();
    world.host.remove(id(1), true).unwrap();
    for day in 0..20 {
        world.days = day;
        world.collect(false).unwrap();
    }
    assert_eq!(world.bucket.keys(), [volley_volume::format::condemned::KEY]);
    // The host knows the snapshot from before.
    assert!(matches!(clone.keep(), Err(OpenError::BaseGone { .. })));
    assert!(matches!(world.host.clone_named(snap(1), id(8), FlushMode::Local), Err(OpenError::BaseGone { .. })));
    for day in 20..26 {
        world.days = day;
        world.collect(false).unwrap();
    }
    assert_eq!(world.bucket.keys(), [volley_volume::format::condemned::KEY]);
}

#[test]
fn a_removed_volume_goes_and_its_clone_stays() {
    let mut world = World::new();
    world.make(1);
    let bytes = noise(3 << 20, 1);
    world.write(1, 0, &bytes);
    world.host.snapshot_accepted(id(1), snap(1)).unwrap();
    world.host.clone_named(snap(1), id(2), FlushMode::Local).unwrap();
    world.known.volumes.insert(id(2));
    world.write(2, 0, &[9; 4096]);
    world.host.remove(id(1), true).unwrap();
    world.known.volumes.remove(&id(1));
    for day in 0..20 {
        world.days = day;
        world.collect(false).unwrap();
        world.host.verify(id(2), true).unwrap();
    }
    assert!(!world.bucket.keys().contains(&keys::snapshot(snap(1))), "nobody names it");
    assert!(world.read(2)[4096..3 << 20] == bytes[4096..]);
    assert!(world.packs() > 0 && world.bucket.keys().contains(&keys::head(id(1))), "its packs are needed, so its head stays");
    world.host.remove(id(2), true).unwrap();
    world.known.volumes.clear();
    for day in 20..26 {
        world.days = day;
        world.collect(false).unwrap();
    }
    assert_eq!(world.bucket.keys(), [volley_volume::format::condemned::KEY]);
}

/// Random histories: whatever has a name is as it was written, at every step.
struct History {
    world: World,
    plain: BTreeMap<u8, Vec<u8>>,
    snapshots: BTreeMap<u8, Vec<u8>>,
    dice: u64,
    next: u8,
}

impl History {
    fn roll(&mut self, sides: u64) -> u64 {
        self.dice = self.dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.dice >> 33) % sides
    }

    fn some<T: Copy>(&mut self, of: impl Fn(&Self) -> Vec<T>) -> Option<T> {
        let all = of(self);
        let at = self.roll(all.len().max(1) as u64) as usize;
        all.get(at).copied()
    }

    fn step(&mut self) {
        self.next += 1;
        match self.roll(12) {
            0 => {
                self.world.make(self.next);
                self.plain.insert(self.next, vec![0; 4 << 20]);
            }
            1..5 => {
                let Some(volume) = self.some(|h| h.plain.keys().copied().collect()) else { return };
                for _ in 0..self.roll(3) {
                    let (offset, len) = (self.roll(2 << 20) as usize / 4096 * 4096, 4096 * (1 + self.roll(500)) as usize);
                    let bytes = noise(len, self.dice);
                    self.world.write(volume, offset as u64, &bytes);
                    self.plain.get_mut(&volume).unwrap()[offset..offset + len].copy_from_slice(&bytes);
                }
            }
            5 => {
                let Some(volume) = self.some(|h| h.plain.keys().copied().collect()) else { return };
                self.world.host.snapshot_accepted(id(volume), snap(self.next)).unwrap();
                self.world.known.snapshots.insert(snap(self.next));
                let plain = self.plain[&volume].clone();
                self.snapshots.insert(self.next, plain);
            }
            6 => {
                let Some(from) = self.some(|h| h.snapshots.keys().copied().collect()) else { return };
                self.world.host.clone_named(snap(from), id(self.next), FlushMode::Local).unwrap();
                self.world.known.volumes.insert(id(self.next));
                self.plain.insert(self.next, self.snapshots[&from].clone());
            }
            7 => {
                let Some(volume) = self.some(|h| h.plain.keys().copied().collect()) else { return };
                self.world.host.remove(id(volume), true).unwrap();
                self.world.known.volumes.remove(&id(volume));
                self.plain.remove(&volume);
            }
            8 => {
                let Some(gone) = self.some(|h| h.snapshots.keys().copied().collect()) else { return };
                self.world.known.snapshots.remove(&snap(gone));
                self.snapshots.remove(&gone);
            }
            _ => {
                self.world.days += self.roll(4);
                if self.roll(3) == 0 {
                    let kind = ["list", "get", "get range", "put", "delete"][self.roll(5) as usize];
                    let fault = [Fault::LoseAnswer, Fault::LoseRequest][self.roll(2) as usize];
                    (0..self.roll(6)).for_each(|_| self.world.bucket.fault(kind, Fault::Pass));
                    self.world.bucket.fault(kind, fault);
                    let _ = self.world.collect(false);
                    self.world.bucket.clear_faults();
                    self.world.days += 1;
                }
                self.world.collect(false).unwrap();
                self.check();
            }
        }
    }

    fn check(&self) {
        for (volume, plain) in &self.plain {
            self.world.host.verify(id(*volume), true).unwrap();
            assert!(self.world.read(*volume) == *plain, "volume {volume}");
        }
        for (snapshot, plain) in &self.snapshots {
            let clone = self.world.host.clone_ephemeral(snap(*snapshot), VolumeId([200; 16]), FlushMode::None, false).unwrap();
            let mut bytes = vec![0; 4 << 20];
            clone.read(0, &mut bytes).unwrap();
            assert!(bytes == *plain, "snapshot {snapshot}");
            clone.detach().unwrap();
        }
    }
}

#[test]
fn whatever_has_a_name_is_as_it_was_written() {
    let seeds: u64 = std::env::var("SEEDS").ok().and_then(|seeds| seeds.parse().ok()).unwrap_or(4);
    let first: u64 = std::env::var("SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(0);
    let mut deleted = 0;
    for seed in first..first + seeds {
        let run = || {
            let world = World::new();
            let mut history = History { world, plain: BTreeMap::new(), snapshots: BTreeMap::new(), dice: seed, next: 0 };
            (0..80).for_each(|_| history.step());
            // In the end, only what is needed is left.
            for _ in 0..12 {
                history.world.days += 3;
                history.world.collect(false).unwrap();
                history.check();
            }
            history.world.bucket.requests().iter().filter(|(kind, _)| *kind == "delete").count()
        };
        match std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)) {
            Ok(count) => deleted += count,
            Err(panic) => {
                eprintln!("SEED={seed}");
                std::panic::resume_unwind(panic);
            }
        }
    }
    assert!(deleted > 0, "nothing was ever collected");
}
