//! Random histories of hosts, collectors and one bucket in which anybody may be stopped before any request and go on when everything has changed: after a takeover,
//! after collections, days later. What must hold: nothing that somebody needs is ever deleted; whoever has lost the right to write changes nothing that is read; every
//! read is what the model says; and in the end nothing is left that nobody needs.
//!
//! The log is played by the test: it says which volumes and snapshots have names, what was accepted, and what a job has pinned.
//!
//! Each history has a seed, which a failure names: `SEED=n SEEDS=1` runs it alone. `SEEDS=1000 cargo test -p volley-volume --test collect_simulation` runs more.
#![expect(clippy::unwrap_used, reason = "a test says with a panic that it failed")]

mod support;

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

    /// Gives the volume to a host on which nobody else has it open.
    fn attach(&mut self, disk: u8) -> bool {
        self.settle(disk);
        let taken: Vec<usize> =
            self.zombies.iter().filter(|(of, _)| *of == disk).map(|(_, writer)| writer.host).chain(self.parked(disk)).collect();
        let free: Vec<usize> = (0..HOSTS).filter(|host| !taken.contains(host)).collect();
        let Some(host) = self.pick(&free) else { return false };
        let (attach, sequence) = (self.fresh(), self.fresh());
        let attempt = AttemptName { job: JobId(7), stage: 0, index: 3, number: 1, sequence };
        let resume = self.roll(3) == 0;
        let by = Opener {
            attempt: Some(attempt),
            host: format!("host-{host}"),
            attach: u128::from(attach).to_le_bytes(),
            until_ms: u64::MAX,
            guest: false,
            force: true,
            resume,
        };
        let volume = loop {
            match self.hosts[host].attach(id(disk), &by) {
                Ok(volume) => break volume,
                Err(OpenError::Fetch(_) | OpenError::Busy { .. }) => self.bucket.clear_faults(),
                Err(error) => panic!("volume {disk}: {error}"),
            };
        };
        let found = read(&volume).unwrap();
        let of = self.disks.get_mut(&disk).unwrap();
        if resume {
            assert!(found == of.promised || of.perhaps.contains(&found), "volume {disk}: a state that nobody committed");
        } else {
            assert!(found == of.accepted, "volume {disk}: not what was accepted");
        }
        of.promised.clone_from(&found);
        of.perhaps.clear();
        of.writer = Some(Writer { host, attach, attempt, volume, plain: found });
        true
    }

    /// Hosts where a volume is open in the hands of somebody who is stopped.
    fn parked(&self, disk: u8) -> Vec<usize> {
        let of = |doing: &Doing| match doing {
            Doing::Flush { disk: of, writer, .. } | Doing::Finish { disk: of, writer, .. } if *of == disk => Some(writer.host),
            _ => None,
        };
        self.stopped.iter().filter_map(|(doing, _)| of(doing)).collect()
    }

    /// What an attempt left is accepted or given up before the volume is given to the next.
    fn settle(&mut self, disk: u8) {
        let Some((promotion, plain)) = self.disks.get_mut(&disk).unwrap().left.take() else { return };
        if self.roll(4) == 0 {
            return;
        }
        self.trouble(&["put", "get"], &[Fault::LoseAnswer, Fault::LoseRequest, Fault::Late]);
        while self.cluster().promote(&promotion).is_err() {
            self.bucket.clear_faults();
        }
        self.bucket.clear_faults();
        // The leader that comes next does it again.
        self.cluster().promote(&promotion).unwrap();
        self.count.promoted += 1;
        let of = self.disks.get_mut(&disk).unwrap();
        of.generation += 1;
        of.accepted = plain;
        (of.promised, of.perhaps) = (of.accepted.clone(), Vec::new());
    }

    /// The writer of some volume. One that has none is given one, unless its last is stopped and not replaced yet.
    fn writer(&mut self) -> Option<u8> {
        let disk = self.some_disk()?;
        if self.disks[&disk].writer.is_some() {
            return Some(disk);
        }
        if !self.parked(disk).is_empty() && self.roll(2) == 0 {
            return None;
        }
        self.count.takeovers += usize::from(!self.parked(disk).is_empty());
        self.attach(disk).then_some(disk)
    }

    fn write(&mut self) {
        let Some(disk) = self.writer() else { return };
        for _ in 0..=self.roll(3) {
            let (offset, zeros) = (self.roll(MIB - 1), self.roll(6) == 0);
            let longest = if self.roll(2) == 0 { 6_000 } else { 300_000 };
            let len = (1 + self.roll(longest)).min(MIB - offset);
            let bytes = if zeros { vec![0; len as usize] } else { noise(len as usize, self.dice) };
            let Writer { volume, plain, .. } = self.disks.get_mut(&disk).unwrap().writer.as_mut().unwrap();
            let done = if zeros { volume.discard(offset, len) } else { volume.write(offset, &bytes, false) };
            done.unwrap();
            plain[offset as usize..(offset + len) as usize].copy_from_slice(&bytes);
            assert!(read(volume).unwrap() == *plain, "volume {disk}: what was written is not read");
        }
    }

    fn flush(&mut self) {
        let Some(disk) = self.writer() else { return };
        let Writer { host, attach, attempt, volume, plain } = self.disks.get_mut(&disk).unwrap().writer.take().unwrap();
        self.trouble(&["put", "put", "put", "get"], &[Fault::LoseAnswer, Fault::LoseRequest, Fault::Late, Fault::Hold, Fault::Hold]);
        let writer = Parked { host, attach, attempt, plain };
        let work = move || {
            let done = volume.flush();
            (volume, done)
        };
        match run(&self.bucket, work) {
            Run::Done((volume, done)) => self.flushed(disk, writer, volume, &done),
            Run::Stopped(work) => {
                // It may still happen.
                self.disks.get_mut(&disk).unwrap().perhaps.push(writer.plain.clone());
                self.stopped.push((Doing::Flush { disk, writer, work }, self.collections));
            }
        }
    }

    /// A flush of whoever has the right has ended.
    fn flushed(&mut self, disk: u8, writer: Parked, volume: Volume, done: &io::Result<()>) {
        let of = self.disks.get_mut(&disk).unwrap();
        let Parked { host, attach, attempt, plain } = writer;
        match done {
            Ok(()) => (of.promised, of.perhaps) = (plain.clone(), Vec::new()),
            Err(error) => {
                assert!(volume.failure().is_none(), "out without a takeover: {error}");
                of.perhaps.push(plain.clone());
            }
        }
        of.writer = Some(Writer { host, attach, attempt, volume, plain });
    }

    /// Another host gets the volume, while whoever has it does not know.
    fn take_over(&mut self) {
        let Some(disk) = self.some_disk() else { return };
        if let Some(writer) = self.disks.get_mut(&disk).unwrap().writer.take() {
            self.zombies.push((disk, writer));
        }
        if self.attach(disk) {
            self.count.takeovers += 1;
        } else {
            self.kill(disk);
        }
    }

    /// Those of a volume that were replaced are killed, those who are stopped as well as can be: they go on first.
    fn kill(&mut self, disk: u8) {
        self.wake_if(|doing| matches!(doing, Doing::Flush { disk: of, .. } | Doing::Finish { disk: of, .. } if *of == disk));
        self.zombies.retain(|(of, _)| *of != disk);
    }

    /// Killed, and opened again by the same attach: the log has everything.
    fn restart(&mut self) {
        let Some(disk) = self.writer() else { return };
        let Writer { host, attach, attempt, volume, plain } = self.disks.get_mut(&disk).unwrap().writer.take().unwrap();
        drop(volume);
        let attach_of = u128::from(attach).to_le_bytes();
        let by = Opener {
            attempt: Some(attempt),
            host: String::new(),
            attach: attach_of,
            until_ms: u64::MAX,
            guest: false,
            force: true,
            resume: true,
        };
        self.trouble(&["put", "get"], &[Fault::LoseAnswer, Fault::LoseRequest, Fault::Late]);
        let volume = loop {
            match self.hosts[host].attach(id(disk), &by) {
                Ok(volume) => break volume,
                Err(OpenError::Fetch(_) | OpenError::Busy { .. }) => self.bucket.clear_faults(),
                Err(error) => panic!("volume {disk}: {error}"),
            };
        };
        self.bucket.clear_faults();
        assert!(read(&volume).unwrap() == plain, "volume {disk}: the log lost something");
        self.disks.get_mut(&disk).unwrap().writer = Some(Writer { host, attach, attempt, volume, plain });
    }

    /// The attempt ends: a last commit, and the volume is let go.
    fn finish(&mut self) {
        let Some(disk) = self.writer() else { return };
        let Writer { host, attach, attempt, volume, plain } = self.disks.get_mut(&disk).unwrap().writer.take().unwrap();
        self.trouble(&["put", "put", "get"], &[Fault::LoseAnswer, Fault::LoseRequest, Fault::Hold, Fault::Hold]);
        let writer = Parked { host, attach, attempt, plain };
        match run(&self.bucket, move || volume.detach()) {
            Run::Done(done) => self.finished(disk, writer, done),
            Run::Stopped(work) => {
                self.disks.get_mut(&disk).unwrap().perhaps.push(writer.plain.clone());
                self.stopped.push((Doing::Finish { disk, writer, work }, self.collections));
            }
        }
    }

    fn finished(&mut self, disk: u8, writer: Parked, done: Result<(Content, u64), OpenError>) {
        let of = self.disks.get_mut(&disk).unwrap();
        match done {
            Ok((content, generation)) => {
                assert_eq!(generation, of.generation, "volume {disk}");
                let promotion = Promotion { volume: id(disk), attempt: Some(writer.attempt), base: generation, root: content.digest() };
                (of.promised, of.perhaps) = (writer.plain.clone(), Vec::new());
                of.left = Some((promotion, writer.plain));
                // Most often at once; otherwise collections see it as it is.
                if self.roll(3) > 0 {
                    self.settle(disk);
                }
            }
            // The attempt failed: what it had committed may be gone on with, by whoever asks for that.
            Err(_) => of.perhaps.push(writer.plain),
        }
    }

    fn snapshot(&mut self) {
        let Some(disk) = self.some_disk() else { return };
        self.settle(disk);
        let (shot, cluster) = (self.fresh_id(), self.cluster());
        let plain = self.disks[&disk].accepted.clone();
        let (named, job) = (self.roll(2) == 0, self.fresh());
        if named {
            self.known.snapshots.insert(snap(shot));
        } else {
            // As when a job is accepted: it is known from then on, and pinned first.
            while cluster.pin(&format!("j{job}"), Pinned::Accepted(id(disk), snap(shot))).is_err() {}
            self.shots.insert(shot, Shot { plain, named, jobs: vec![job] });
            return;
        }
        self.trouble(&["put"], &[Fault::LoseAnswer, Fault::LoseRequest, Fault::Late, Fault::Hold]);
        match run(&self.bucket, move || cluster.snapshot_accepted(id(disk), snap(shot))) {
            Run::Done(done) => self.taken(shot, plain, &done),
            Run::Stopped(work) => self.stopped.push((Doing::Snapshot { shot, plain, work }, self.collections)),
        }
    }

    fn taken(&mut self, shot: u8, plain: Vec<u8>, done: &Result<(), OpenError>) {
        match done {
            Ok(()) => drop(self.shots.insert(shot, Shot { plain, named: true, jobs: Vec::new() })),
            Err(_) => drop(self.known.snapshots.remove(&snap(shot))),
        }
    }

    /// A copy: one that has a name at once, or a task's own, which is kept or not.
    fn clone(&mut self) {
        let Some(base) = self.some_shot() else { return };
        if self.disks.len() >= DISKS + 2 {
            return;
        }
        let (clone, job, host) = (self.fresh_id(), self.fresh(), self.roll(HOSTS as u64) as usize);
        let mut plain = self.shots[&base].plain.clone();
        if self.roll(3) == 0 {
            self.cluster().clone_named(snap(base), id(clone), FlushMode::S3).unwrap();
            return self.named(clone, plain);
        }
        let owner = format!("j{job}");
        self.cluster().pin(&owner, Pinned::Snapshot(snap(base))).unwrap();
        self.shots.get_mut(&base).unwrap().jobs.push(job);
        let volume = self.hosts[host].clone_ephemeral(snap(base), id(clone), FlushMode::S3, false).unwrap();
        for _ in 0..self.roll(3) {
            let longest = if self.roll(2) == 0 { 6_000 } else { 300_000 };
            let (offset, len) = (self.roll(MIB / 2) as usize, self.roll(longest) as usize);
            let bytes = noise(len, self.dice);
            volume.write(offset as u64, &bytes, false).unwrap();
            plain[offset..offset + len].copy_from_slice(&bytes);
            assert!(read(&volume).unwrap() == plain, "copy {clone}");
        }
        if self.roll(4) == 0 {
            volume.detach().unwrap();
            return self.unpin(job);
        }
        self.trouble(&["put", "put", "get"], &[Fault::LoseAnswer, Fault::LoseRequest, Fault::Late, Fault::Hold, Fault::Hold]);
        match run(&self.bucket, move || volume.keep()) {
            Run::Done(done) => self.kept(clone, base, job, plain, &done),
            Run::Stopped(work) => self.stopped.push((Doing::Keep { clone, base, job, plain, work }, self.collections)),
        }
    }

    fn kept(&mut self, clone: u8, base: u8, job: u64, plain: Vec<u8>, done: &Result<Content, OpenError>) {
        let pinned = self.shots.get(&base).is_some_and(|shot| shot.jobs.contains(&job));
        self.count.kept += usize::from(done.is_ok() && pinned);
        self.count.too_late += usize::from(!pinned);
        // The log accepts no result of an attempt that was given up.
        if done.is_ok() && pinned {
            self.named(clone, plain);
        }
        if pinned {
            self.unpin(job);
        }
    }

    fn unpin(&mut self, job: u64) {
        self.cluster().unpin(&format!("j{job}")).unwrap();
        self.shots.values_mut().for_each(|shot| shot.jobs.retain(|of| *of != job));
        self.shots.retain(|_, shot| shot.named || !shot.jobs.is_empty());
    }

    /// A name goes, or a job ends, whatever is still done for it.
    fn forget(&mut self) {
        if self.roll(2) == 0
            && let Some(disk) = self.some_disk().filter(|_| self.disks.len() > 1)
        {
            let of = self.disks.remove(&disk).unwrap();
            self.zombies.extend(of.writer.map(|writer| (disk, writer)));
            self.trouble(&["put", "get"], &[Fault::LoseAnswer, Fault::LoseRequest, Fault::Late]);
            while self.cluster().remove(id(disk), true).is_err() {
                self.bucket.clear_faults();
            }
            self.bucket.clear_faults();
            self.known.volumes.remove(&id(disk));
            return;
        }
        // A job ends whose attempt is stopped in the middle of keeping its copy.
        let late = self.stopped.iter().find_map(|(doing, _)| match doing {
            Doing::Keep { job, .. } => Some(*job),
            _ => None,
        });
        if let Some(job) = late {
            return self.unpin(job);
        }
        let Some(shot) = self.some_shot() else { return };
        let of = self.shots.get_mut(&shot).unwrap();
        if of.named {
            of.named = false;
            self.known.snapshots.remove(&snap(shot));
            self.shots.retain(|_, shot| shot.named || !shot.jobs.is_empty());
        } else if let Some(job) = of.jobs.first().copied() {
            self.unpin(job);
        }
    }

    /// One of those who are stopped, or do not know yet that they were replaced, goes on.
    fn wake(&mut self) {
        if self.roll(3) == 0 {
            self.deliver();
        }
        if self.roll(2) == 0 && !self.zombies.is_empty() {
            let at = self.roll(self.zombies.len() as u64) as usize;
            let (disk, Writer { volume, plain, .. }) = self.zombies.swap_remove(at);
            let head = self.bucket.object(&keys::head(id(disk)));
            // Nothing that it reads is anything else than what it wrote, until it knows.
            let offset = self.roll(MIB - 5_000);
            let mut into = vec![0; 5_000];
            match volume.read(offset, &mut into) {
                Ok(()) => assert!(into == plain[offset as usize..][..5_000], "volume {disk}: another one's bytes"),
                // What it reads may have been collected since.
                Err(error) => assert!(error.kind() != ErrorKind::InvalidData, "{error}"),
            }
            volume.write(offset / 4096 * 4096, &noise(4096, offset), false).unwrap();
            volume.flush().expect_err("somebody who is out has committed");
            self.out(disk, &volume, head);
            return;
        }
        if self.stopped.is_empty() {
            return;
        }
        let at = self.roll(self.stopped.len() as u64) as usize;
        let (doing, since) = self.stopped.swap_remove(at);
        self.go_on(doing, since);
    }

    fn wake_if(&mut self, which: impl Fn(&Doing) -> bool) {
        let (some, others) = std::mem::take(&mut self.stopped).into_iter().partition(|(doing, _)| which(doing));
        self.stopped = others;
        let some: Vec<(Doing, usize)> = some;
        some.into_iter().for_each(|(doing, since)| self.go_on(doing, since));
    }

    /// Somebody who is out: it knows now, and has changed nothing.
    fn out(&mut self, disk: u8, volume: &Volume, head: Option<bytes::Bytes>) {
        assert!(matches!(volume.failure(), Some(Failure::Fenced { .. })), "volume {disk}: {:?}", volume.failure());
        for done in [volume.write(0, &[1], false), volume.read(0, &mut [0]), volume.discard(0, 4096)] {
            assert_eq!(done.unwrap_err().kind(), ErrorKind::StaleNetworkFileHandle);
        }
        assert!(self.bucket.object(&keys::head(id(disk))) == head, "volume {disk}: somebody who is out has changed its head");
        self.count.fenced += 1;
    }

    fn go_on(&mut self, doing: Doing, since: usize) {
        self.count.woken_after_collection += usize::from(self.collections > since);
        match doing {
            Doing::Flush { disk, writer, work } => {
                let (right, head) = (self.has_right(disk, writer.attach), self.bucket.object(&keys::head(id(disk))));
                let (volume, done) = self.end(work);
                if right {
                    return self.flushed(disk, writer, volume, &done);
                }
                assert!(done.is_err(), "volume {disk}: a commit of somebody who is out");
                self.out(disk, &volume, head);
            }
            Doing::Finish { disk, writer, work } => {
                let (right, head) = (self.has_right(disk, writer.attach), self.bucket.object(&keys::head(id(disk))));
                let done = self.end(work);
                if right {
                    return self.finished(disk, writer, done);
                }
                assert!(done.is_err() && self.bucket.object(&keys::head(id(disk))) == head, "volume {disk}: somebody who is out let it go");
            }
            Doing::Keep { clone, base, job, plain, work } => {
                let done = self.end(work);
                self.kept(clone, base, job, plain, &done);
            }
            Doing::Snapshot { shot, plain, work } => {
                let done = self.end(work);
                self.taken(shot, plain, &done);
            }
            Doing::Collect { work } => {
                self.count.late_collectors += usize::from(self.collections > since);
                if let Ok(done) = self.end(work) {
                    self.count.deleted += done.deleted.0;
                }
                self.check();
            }
        }
    }

    /// Has whoever attached with this still the right to write? It has unless somebody else was given it since: then there is another writer, or was one.
    fn has_right(&mut self, disk: u8, attach: u64) -> bool {
        let Some(bytes) = self.bucket.object(&keys::head(id(disk))) else { return false };
        let keys = ClusterKeys::new(&[[1; 32]]).unwrap();
        let (head, _) = volley_volume::format::head::Head::read(id(disk), &keys, &bytes).unwrap();
        self.disks.contains_key(&disk) && head.holder.is_some_and(|holder| holder.attach == u128::from(attach).to_le_bytes())
    }

    fn end<T>(&mut self, work: Stopped<T>) -> T {
        self.bucket.release(work.hold);
        let begun = Instant::now();
        while !work.thread.is_finished() {
            assert!(begun.elapsed() < Duration::from_secs(60), "it does not go on");
            std::thread::sleep(Duration::from_micros(50));
        }
        joined(work.thread)
    }

    fn deliver(&mut self) {
        let heads: Vec<_> = self.disks.keys().map(|disk| (*disk, self.bucket.object(&keys::head(id(*disk))))).collect();
        self.bucket.deliver();
        for (disk, head) in heads {
            let now = self.bucket.object(&keys::head(id(disk)));
            assert!(now == head || !self.disks[&disk].perhaps.is_empty(), "volume {disk}: a head that nobody waits for");
        }
    }

    /// Hours pass. A request that was sent arrives within minutes or not at all (its signature is good for 15); whoever is stopped before it sends may sleep for days,
    /// but for one: a snapshot of a state is stored within a day of reading it, or not at all.
    fn time(&mut self) {
        self.deliver();
        let hours = [1, 5, 30, 80][self.roll(4) as usize];
        if hours > 5 {
            self.wake_if(|doing| matches!(doing, Doing::Snapshot { .. }));
        }
        self.hours += hours;
    }

    fn collect(&mut self) {
        let (known, hours, cluster) = (self.known.clone(), self.hours, self.cluster());
        let busy = self.stopped.iter().any(|(doing, _)| matches!(doing, Doing::Collect { .. }));
        let begin = move || {
            let now_ms = move || {
                let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap();
                now.as_millis() as u64 + hours * HOUR_MS
            };
            cluster.collect(&Collection { known: &known, name: "a test", dry_run: false, now_ms: &now_ms })
        };
        let trouble = self.roll(2) == 0;
        if trouble {
            let kinds = ["list", "get", "get range", "put", "delete", "delete"];
            self.trouble(&kinds, &[Fault::LoseAnswer, Fault::LoseRequest, Fault::Hold, Fault::Hold, Fault::FlipBit]);
        }
        match run(&self.bucket, begin) {
            Run::Done(Ok(done)) => {
                self.collections += 1;
                self.count.deleted += done.deleted.0;
            }
            Run::Done(Err(CollectError::Busy { .. })) => assert!(busy, "nobody else collects"),
            Run::Done(Err(error)) => assert!(trouble, "{error}"),
            Run::Stopped(work) => self.stopped.push((Doing::Collect { work }, self.collections)),
        }
        if trouble {
            // A run that failed has the lease for an hour.
            self.hours += 1;
        }
        self.check();
    }

    /// Everything that has a name is whole.
    fn check(&mut self) {
        let cluster = self.cluster();
        for disk in self.disks.keys() {
            cluster.verify(id(*disk), true).unwrap_or_else(|error| panic!("volume {disk}: {error}"));
        }
        if self.shots.is_empty() {
            return;
        }
        let name = format!("looks-{}", self.fresh());
        let host = self.host(&name);
        for (shot, of) in &self.shots {
            let clone = host.clone_ephemeral(snap(*shot), VolumeId([250; 16]), FlushMode::None, false);
            let clone = clone.unwrap_or_else(|error| panic!("snapshot {shot}: {error}"));
            assert!(read(&clone).unwrap() == of.plain, "snapshot {shot}");
            clone.detach().unwrap();
        }
        std::fs::remove_dir_all(self.dir.path().join(name)).unwrap();
    }

    /// Everybody goes on, everything is read once more, and when nothing has a name nothing is left.
    fn end_of_it(mut self) -> Count {
        self.wake_if(|_| true);
        self.deliver();
        while let Some((disk, Writer { volume, .. })) = self.zombies.pop() {
            let head = self.bucket.object(&keys::head(id(disk)));
            volume.write(0, &[1; 4096], false).unwrap();
            volume.flush().expect_err("somebody who is out has committed");
            self.out(disk, &volume, head);
        }
        let disks: Vec<u8> = self.disks.keys().copied().collect();
        for disk in &disks {
            self.disks.get_mut(disk).unwrap().writer = None;
            assert!(self.attach(*disk));
            self.disks.get_mut(disk).unwrap().writer = None;
        }
        self.check();
        for disk in disks {
            self.disks.remove(&disk);
            self.cluster().remove(id(disk), true).unwrap();
        }
        let jobs: Vec<u64> = self.shots.values().flat_map(|shot| shot.jobs.clone()).collect();
        jobs.into_iter().for_each(|job| self.unpin(job));
        self.shots.clear();
        self.known = Known::default();
        for _ in 0..16 {
            self.hours += 60;
            let (known, hours) = (self.known.clone(), self.hours);
            let now = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH).unwrap().as_millis() as u64;
            let now_ms = move || now + hours * HOUR_MS;
            let done = self.cluster().collect(&Collection { known: &known, name: "a test", dry_run: false, now_ms: &now_ms }).unwrap();
            self.count.deleted += done.deleted.0;
        }
        assert_eq!(self.bucket.keys(), [condemned::KEY], "what nobody needs is left");
        self.count
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
