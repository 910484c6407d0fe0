//! Random histories of two hosts, one bucket that loses requests and answers, crashes, and takeovers: whoever opens a volume finds what was
//! promised last, or something that was being committed since, and never a mixture. Each history has a seed, which a failure names.
//!
//! `SEEDS=1000 cargo test -p volley-volume --test simulation` runs more of them.
#![expect(clippy::unwrap_used, reason = "a test says with a panic that it failed")]

mod support;

use std::io::ErrorKind;
use std::path::Path;
use std::sync::Arc;

use support::{MIB, id, new, noise, opener, quiet};
use tokio::runtime::Runtime;
use volley_volume::device::Device;
use volley_volume::format::head::FlushMode;
use volley_volume::format::seal::ClusterKeys;
use volley_volume::io::fake::{Fake, Fault};
use volley_volume::io::s3::Objects;
use volley_volume::{Host, Limits, OpenError, Opener, Volume};

const BYTES: usize = MIB as usize;

struct Dice(Vec<u8>, usize);

impl Dice {
    fn roll(&mut self, sides: usize) -> usize {
        self.1 += 4;
        u32::from_le_bytes(self.0[self.1 - 4..self.1].try_into().unwrap()) as usize % sides
    }
}

/// A writer, and the disk as it should see it.
struct Writer {
    volume: Volume,
    attach: u8,
    plain: Vec<u8>,
    /// Somebody else has taken the volume since.
    deposed: bool,
}

struct History {
    bucket: Arc<Fake>,
    hosts: [Arc<Host>; 2],
    writers: [Option<Writer>; 2],
    /// What was promised last to whoever has the right.
    promised: Vec<u8>,
    /// What may have been committed since without a promise.
    perhaps: Vec<Vec<u8>>,
    attaches: u8,
    dice: Dice,
}

impl History {
    fn new(seed: u64, dir: &Path, runtime: &Runtime) -> Self {
        let bucket = Arc::new(Fake::default());
        let host = |name: &str| {
            let dir = dir.join(format!("{seed}-{name}"));
            std::fs::create_dir_all(&dir).unwrap();
            let keys = ClusterKeys::new(&[[1; 32]]).unwrap();
            let limits = Limits { log_keep_bytes: 0, ..quiet() };
            Host::new(Arc::clone(&bucket) as Arc<dyn Objects>, keys, dir, runtime.handle().clone(), limits)
        };
        let hosts = [host("a"), host("b")];
        hosts[0].create(new(id(1), MIB, FlushMode::S3)).unwrap();
        let dice = Dice(noise(1 << 20, seed + 1), 0);
        Self { bucket, hosts, writers: [None, None], promised: vec![0; BYTES], perhaps: Vec::new(), attaches: 0, dice }
    }

    fn maybe_fault(&mut self) {
        let request = ["put", "put", "put", "get", "get range"][self.dice.roll(5)];
        match self.dice.roll(12) {
            0 | 1 => self.bucket.fault(request, Fault::LoseAnswer),
            2..5 => self.bucket.fault(request, Fault::LoseRequest),
            _ => {}
        }
    }

    fn step(&mut self) {
        let who = self.dice.roll(2);
        let Some(mut writer) = self.writers[who].take() else { return self.attach(who, true) };
        match self.dice.roll(10) {
            0..4 => {
                let (offset, len) =
                    (self.dice.roll(BYTES - 1), 1 + self.dice.roll(if self.dice.1.is_multiple_of(8) { 200_000 } else { 6_000 }));
                let len = len.min(BYTES - offset);
                let bytes = noise(len, self.dice.1 as u64);
                let zeros = self.dice.roll(5) == 0;
                let done = if zeros {
                    writer.volume.discard(offset as u64, len as u64)
                } else {
                    writer.volume.write(offset as u64, &bytes, false)
                };
                match done {
                    Ok(()) if zeros => writer.plain[offset..offset + len].fill(0),
                    Ok(()) => writer.plain[offset..offset + len].copy_from_slice(&bytes),
                    // A part of a block that had to be read, from a bucket that was away; or it is out.
                    Err(error) => assert!(writer.deposed || error.kind() == ErrorKind::Other, "{error}"),
                }
                self.writers[who] = Some(writer);
            }
            4..7 => {
                self.maybe_fault();
                match writer.volume.flush() {
                    Ok(()) if writer.deposed => assert_eq!(writer.volume.dirty_bytes(), 0, "a commit of somebody who is out"),
                    Ok(()) => {
                        self.promised.clone_from(&writer.plain);
                        self.perhaps.clear();
                    }
                    Err(error) => {
                        assert_eq!(error.kind() == ErrorKind::StaleNetworkFileHandle, writer.volume.failure().is_some(), "{error}");
                        assert!(writer.volume.failure().is_none() || writer.deposed, "out without a takeover: {error}");
                        if !writer.deposed {
                            self.perhaps.push(writer.plain.clone());
                        }
                    }
                }
                if writer.volume.failure().is_none() {
                    self.writers[who] = Some(writer);
                }
            }
            // Killed, and opened again by the same attach: the log has everything, if nobody took over.
            7 => {
                let Writer { volume, attach, plain, deposed } = writer;
                drop(volume);
                let again = self.persist(who, &Opener { resume: true, ..opener(attach) });
                match again {
                    Ok(volume) => {
                        assert!(!deposed || self.writers[1 - who].is_none(), "two have it");
                        let mut found = vec![0; BYTES];
                        while volume.read(0, &mut found).is_err() {}
                        if deposed {
                            self.found(found.clone());
                        } else {
                            assert!(found == plain, "the log lost something");
                        }
                        self.writers[who] = Some(Writer { volume, attach, plain: found, deposed: false });
                    }
                    Err(OpenError::Move(_)) => assert!(deposed),
                    Err(error) => panic!("{error}"),
                }
            }
            _ => {
                self.writers[who] = Some(writer);
                self.attach(1 - who, self.dice.1.is_multiple_of(8));
            }
        }
    }

    /// A host takes the volume, and finds one of the states that it may find.
    fn attach(&mut self, who: usize, crash: bool) {
        if self.writers[who].as_ref().is_some_and(|writer| crash || writer.volume.failure().is_some()) {
            self.writers[who] = None;
        }
        if self.writers[who].is_some() {
            return;
        }
        self.attaches += 1;
        self.maybe_fault();
        let by = Opener { force: true, resume: true, ..opener(self.attaches) };
        let volume = self.persist(who, &by).unwrap();
        if let Some(other) = &mut self.writers[1 - who] {
            other.deposed = true;
        }
        let mut found = vec![0; BYTES];
        while volume.read(0, &mut found).is_err() {}
        self.found(found.clone());
        self.writers[who] = Some(Writer { volume, attach: self.attaches, plain: found, deposed: false });
    }

    /// Nobody answered: it may have the right all the same, and comes back for it.
    fn persist(&self, who: usize, by: &Opener) -> Result<Volume, OpenError> {
        loop {
            match self.hosts[who].attach(id(1), by) {
                Err(OpenError::Fetch(_) | OpenError::Busy { .. }) => {}
                end => return end,
            }
        }
    }

    fn found(&mut self, found: Vec<u8>) {
        assert!(found == self.promised || self.perhaps.contains(&found), "a state that nobody committed");
        self.promised = found;
        self.perhaps.clear();
    }
}

#[test]
fn whoever_opens_a_volume_finds_what_was_promised_last() {
    let seeds: u64 = std::env::var("SEEDS").ok().and_then(|seeds| seeds.parse().ok()).unwrap_or(20);
    let first: u64 = std::env::var("SEED").ok().and_then(|seed| seed.parse().ok()).unwrap_or(0);
    let runtime = Runtime::new().unwrap();
    for seed in first..first + seeds {
        let run = || {
            let dir = tempfile::tempdir().unwrap();
            let mut history = History::new(seed, dir.path(), &runtime);
            (0..60).for_each(|_| history.step());
            history.writers = [None, None];
            history.attach(0, true);
            let writer = history.writers[0].take().unwrap();
            writer.volume.detach().unwrap();
            while let Err(error) = history.hosts[1].verify(id(1), true) {
                assert!(error.to_string().contains("answer was lost"), "{error}");
            }
        };
        if let Err(panic) = std::panic::catch_unwind(std::panic::AssertUnwindSafe(run)) {
            eprintln!("SEED={seed}");
            std::panic::resume_unwind(panic);
        }
    }
}
