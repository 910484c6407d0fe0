//! Random histories of hosts, collectors and one bucket in which anybody may be stopped before any request and go on when everything has changed: after a takeover,
//! after collections, days later. What must hold: nothing that somebody needs is ever deleted; whoever has lost the right to write changes nothing that is read; every
//! read is what the model says; and in the end nothing is left that nobody needs.
//!
//! The log is played by the test: it says which volumes and snapshots have names, what was accepted, and what a job has pinned.
//!
//! Each history has a seed, which a failure names: `SEED=n SEEDS=1` runs it alone. `SEEDS=1000 cargo test -p volley-volume --test collect_simulation` runs more.
#![expect(clippy::unwrap_used, reason = "a test says with a panic that it failed")]

mod acts;
#[path = "../support/mod.rs"]
mod support;
mod wakes;

use std::collections::BTreeMap;
use std::io::{self, ErrorKind};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use support::{MIB, new, noise, quiet};
use tokio::runtime::Builder;
use tokio::sync::oneshot;
use volley_jobspecs::ids::{AttemptName, JobId, SnapshotId, VolumeId};
use volley_volume::device::Device;
use volley_volume::format::content::Content;
use volley_volume::format::head::FlushMode;
use volley_volume::format::seal::ClusterKeys;
use volley_volume::format::{condemned, keys};
use volley_volume::io::fake::{Fake, Fault};
use volley_volume::io::s3::Objects;
use volley_volume::{CollectError, Collected, Collection, Failure, Host, Known, Limits, OpenError, Opener, Pinned, Promotion, Volume};

const BYTES: usize = MIB as usize;
const HOUR_MS: u64 = 3_600_000;
/// Volumes at once: more would only take longer.
const DISKS: usize = 3;
/// Hosts that write. One more than can have a writer that was deposed.
const HOSTS: usize = 3;
const STEPS: usize = 100;

/// Work that another thread does, stopped before one of its requests.
struct Stopped<T> {
    thread: JoinHandle<T>,
    hold: u64,
}

enum Run<T> {
    Done(T),
    Stopped(Stopped<T>),
}

fn joined<T>(thread: JoinHandle<T>) -> T {
    thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
}

/// Does something on a thread of its own, until it ends or is stopped.
fn run<T: Send + 'static>(bucket: &Fake, work: impl FnOnce() -> T + Send + 'static) -> Run<T> {
    let before = bucket.held();
    let (tell, told) = std::sync::mpsc::channel();
    let thread = std::thread::spawn(move || {
        tell.send(rustix::thread::gettid().as_raw_nonzero()).unwrap();
        work()
    });
    let (thread_id, begun) = (told.recv().unwrap(), Instant::now());
    // It may have others under way beside the one that waits: until it waits for that one alone, a fault that is meant for somebody else could meet them.
    let waits = || {
        let stat = std::fs::read_to_string(format!("/proc/self/task/{thread_id}/stat")).unwrap_or_default();
        stat.contains(") S ")
    };
    loop {
        if thread.is_finished() {
            bucket.clear_faults();
            return Run::Done(joined(thread));
        }
        if let Some(hold) = bucket.held().into_iter().find(|hold| !before.contains(hold)) {
            let (mut quiet, mut made) = (0, bucket.made());
            while quiet < 5 && !thread.is_finished() {
                std::thread::sleep(Duration::from_micros(100));
                quiet = if waits() && bucket.made() == made { quiet + 1 } else { 0 };
                made = bucket.made();
            }
            bucket.clear_faults();
            return Run::Stopped(Stopped { thread, hold });
        }
        assert!(begun.elapsed() < Duration::from_secs(60), "it neither ends nor waits");
        std::thread::sleep(Duration::from_micros(50));
    }
}

/// Whoever writes a volume.
struct Writer {
    host: usize,
    attach: u64,
    attempt: AttemptName,
    volume: Volume,
    plain: Vec<u8>,
}

/// A volume that has a name.
struct Disk {
    accepted: Vec<u8>,
    generation: u64,
    writer: Option<Writer>,
    /// What whoever goes on with the working state finds: the last that was promised, or something since.
    promised: Vec<u8>,
    perhaps: Vec<Vec<u8>>,
    /// What an attempt left; nobody is given the volume until it is promoted or given up.
    left: Option<(Promotion, Vec<u8>)>,
}

struct Shot {
    plain: Vec<u8>,
    named: bool,
    jobs: Vec<u64>,
}

/// What somebody does who is stopped.
enum Doing {
    Flush { disk: u8, writer: Parked, work: Stopped<(Volume, io::Result<()>)> },
    Finish { disk: u8, writer: Parked, work: Stopped<Result<(Content, u64), OpenError>> },
    Keep { clone: u8, base: u8, job: u64, plain: Vec<u8>, work: Stopped<Result<Content, OpenError>> },
    Snapshot { shot: u8, plain: Vec<u8>, work: Stopped<Result<(), OpenError>> },
    Collect { work: Stopped<Result<Collected, CollectError>> },
}

/// A writer whose volume another thread has.
struct Parked {
    host: usize,
    attach: u64,
    attempt: AttemptName,
    plain: Vec<u8>,
}

/// What happened, over all histories: that the histories are what they should be.
#[derive(Debug, Default)]
struct Count {
    takeovers: usize,
    fenced: usize,
    woken_after_collection: usize,
    late_collectors: usize,
    deleted: u64,
    kept: usize,
    too_late: usize,
    promoted: usize,
}

struct History {
    bucket: Arc<Fake>,
    hosts: Vec<Arc<Host>>,
    dir: tempfile::TempDir,
    known: Known,
    disks: BTreeMap<u8, Disk>,
    shots: BTreeMap<u8, Shot>,
    /// Whoever was replaced, and does not know it yet.
    zombies: Vec<(u8, Writer)>,
    stopped: Vec<(Doing, usize)>,
    collections: usize,
    hours: u64,
    dice: u64,
    next: u64,
    ids: u8,
    count: Count,
    runtime: tokio::runtime::Handle,
    _stop: oneshot::Sender<()>,
}

fn id(byte: u8) -> VolumeId {
    support::id(byte)
}

fn snap(byte: u8) -> SnapshotId {
    support::snap(byte)
}

/// A runtime on a thread of its own, whose clock jumps: pauses between tries take no time. One thread, so the order of requests is always the same.
fn runtime() -> (tokio::runtime::Handle, oneshot::Sender<()>) {
    let runtime = Builder::new_current_thread().enable_time().start_paused(true).build().unwrap();
    let handle = runtime.handle().clone();
    let (stop, stopped) = oneshot::channel();
    std::thread::spawn(move || runtime.block_on(async { _ = stopped.await }));
    (handle, stop)
}

fn limits() -> Limits {
    // Reads go to the bucket: what is gone there is missed.
    Limits { log_keep_bytes: 0, cache_bytes: 0, cache_disk_bytes: 0, ..quiet() }
}

impl History {
    fn new(seed: u64) -> Self {
        let (runtime, stop) = runtime();
        let dir = tempfile::tempdir().unwrap();
        let mut history = Self {
            bucket: Arc::default(),
            hosts: Vec::new(),
            dir,
            known: Known::default(),
            disks: BTreeMap::new(),
            shots: BTreeMap::new(),
            zombies: Vec::new(),
            stopped: Vec::new(),
            collections: 0,
            hours: 0,
            dice: seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1,
            next: 0,
            ids: 0,
            count: Count::default(),
            runtime,
            _stop: stop,
        };
        history.hosts = (0..=HOSTS).map(|n| history.host(&format!("host-{n}"))).collect();
        history.create();
        history
    }

    fn host(&self, name: &str) -> Arc<Host> {
        let dir = self.dir.path().join(name);
        std::fs::create_dir_all(&dir).unwrap();
        let keys = ClusterKeys::new(&[[1; 32]]).unwrap();
        Host::new(Arc::clone(&self.bucket) as Arc<dyn Objects>, keys, dir, self.runtime.clone(), limits())
    }

    /// The one that nobody writes on: what the cluster does, it does here.
    fn cluster(&self) -> Arc<Host> {
        Arc::clone(&self.hosts[HOSTS])
    }

    fn roll(&mut self, sides: u64) -> u64 {
        self.dice = self.dice.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.dice >> 33) % sides
    }

    fn pick<T: Copy>(&mut self, all: &[T]) -> Option<T> {
        let at = self.roll(all.len().max(1) as u64) as usize;
        all.get(at).copied()
    }

    fn fresh(&mut self) -> u64 {
        self.next += 1;
        self.next
    }

    fn fresh_id(&mut self) -> u8 {
        self.ids += 1;
        self.ids
    }

    /// Something goes wrong with one of the next requests, perhaps.
    fn trouble(&mut self, kinds: &[&'static str], faults: &[Fault]) {
        if self.roll(2) == 0 {
            return;
        }
        let (kind, fault) = (self.pick(kinds).unwrap(), self.pick(faults).unwrap());
        for _ in 0..self.roll(5) {
            self.bucket.fault(kind, Fault::Pass);
        }
        self.bucket.fault(kind, fault);
    }

    fn create(&mut self) {
        let disk = self.fresh_id();
        self.cluster().create(new(id(disk), MIB, FlushMode::S3)).unwrap();
        self.named(disk, vec![0; BYTES]);
    }

    fn named(&mut self, disk: u8, plain: Vec<u8>) {
        self.known.volumes.insert(id(disk));
        let disk_of = Disk { promised: plain.clone(), accepted: plain, generation: 0, writer: None, perhaps: Vec::new(), left: None };
        self.disks.insert(disk, disk_of);
    }

    fn some_disk(&mut self) -> Option<u8> {
        let all: Vec<u8> = self.disks.keys().copied().collect();
        self.pick(&all)
    }

    fn some_shot(&mut self) -> Option<u8> {
        let all: Vec<u8> = self.shots.keys().copied().collect();
        self.pick(&all)
    }

    fn step(&mut self) {
        match self.roll(20) {
            0 if self.disks.len() < DISKS => self.create(),
            0..6 => self.write(),
            6..9 => self.flush(),
            9 => self.take_over(),
            10 => self.restart(),
            11 | 12 => self.finish(),
            13 => self.snapshot(),
            14 | 15 => self.clone(),
            16 => self.forget(),
            17 => self.wake(),
            _ => {
                self.time();
                self.collect();
            }
        }
    }
}

fn read(volume: &Volume) -> io::Result<Vec<u8>> {
    let mut found = vec![0; BYTES];
    volume.read(0, &mut found).map(|()| found)
}

#[test]
fn nothing_that_is_needed_goes_and_nobody_who_is_out_changes_anything() {
    let number = |name: &str| std::env::var(name).ok().and_then(|value| value.parse::<u64>().ok());
    let (seeds, first) = (number("SEEDS").unwrap_or(20), number("SEED").unwrap_or(0));
    let mut all = Count::default();
    for seed in first..first + seeds {
        let history = || {
            let mut history = History::new(seed);
            (0..STEPS).for_each(|_| history.step());
            history.end_of_it()
        };
        let count = std::panic::catch_unwind(history).unwrap_or_else(|panic| {
            eprintln!("SEED={seed}");
            std::panic::resume_unwind(panic);
        });
        all.takeovers += count.takeovers;
        all.fenced += count.fenced;
        all.woken_after_collection += count.woken_after_collection;
        all.late_collectors += count.late_collectors;
        all.deleted += count.deleted;
        all.kept += count.kept;
        all.too_late += count.too_late;
        all.promoted += count.promoted;
    }
    println!("{seeds} histories: {all:?}");
    let Count { takeovers, fenced, woken_after_collection, late_collectors, deleted, kept, too_late, promoted } = all;
    let happened = [takeovers, fenced, woken_after_collection, late_collectors, deleted as usize, kept, too_late, promoted];
    // Some of it is rare.
    assert!(seeds < 200 || happened.iter().all(|count| *count > 0), "something never happened");
}
