//! What clones, attaches, uploads and recovery cost: time and requests.

use std::time::{Duration, Instant};

use volley_jobspecs::ids::VolumeId;
use volley_volume::device::Device;
use volley_volume::format::head::FlushMode;
use volley_volume::{Limits, Volume};

use crate::figures::median;
use crate::limits::{Limit, line};
use crate::meter::Meter;
use crate::support::{MIB, World, id, new, noise, opener, snap};

/// Ephemeral clones, and named ones.
const CLONES: u64 = 1_000;
const NAMED: u64 = 100;
/// Attaches that are timed.
const ATTACHES: u64 = 20;
/// How long an idle volume is watched, unless VOLLEY_BENCH_IDLE_S says otherwise.
const IDLE_S: u64 = 10;

fn numbered(first: u8, number: u64) -> VolumeId {
    let mut id = [first; 16];
    id[8..].copy_from_slice(&number.to_be_bytes());
    VolumeId(id)
}

/// Nothing goes to S3 by itself.
pub fn held() -> Limits {
    let never = Duration::from_secs(86_400);
    Limits { commit_every: never, commit_bytes: u64::MAX, dirty_bytes_max: u64::MAX, cache_bytes: 768 << 20, ..Limits::default() }
}

fn ms(since: Instant) -> f64 {
    since.elapsed().as_secs_f64() * 1e3
}

fn fill(volume: &Volume, mib: u64, seed: u64) {
    for n in 0..mib {
        volume.write(n * MIB, &noise(MIB as usize, seed + n), false).unwrap();
    }
}

/// `volume-clone`.
pub fn clones() {
    let world = World::new();
    let (host, meter) = Meter::host(&world, "a", held());
    host.create(new(id(1), 1 << 30, FlushMode::Local)).unwrap();
    let volume = host.attach(id(1), &opener(1)).unwrap();
    fill(&volume, 64, 1);
    volume.snapshot(snap(1)).unwrap();
    volume.detach().unwrap();
    let mut block = [0; 4096];
    let mut one = |number: u64| {
        let begin = Instant::now();
        let clone = host.clone_ephemeral(snap(1), numbered(2, number), FlushMode::Local, true).unwrap();
        clone.read(number % 64 * MIB, &mut block).unwrap();
        clone.write(number % 64 * MIB, &[7; 4096], false).unwrap();
        let took = ms(begin);
        clone.detach().unwrap();
        took
    };
    // The base is read once.
    (0..64).for_each(|number| _ = one(number));
    meter.take();
    let times: Vec<f64> = (64..64 + CLONES).map(&mut one).collect();
    let passed = meter.take();
    line("volume-clone ephemeral ms", median(&times), None, Some(Limit::AtMost(10.0)));
    line(&format!("volume-clone requests of {CLONES}"), (passed.gets + passed.puts) as f64, None, Some(Limit::AtMost(0.0)));
    for number in 0..NAMED {
        host.clone_named(snap(1), numbered(3, number), FlushMode::Local).unwrap();
    }
    let passed = meter.take();
    line(&format!("volume-clone PUTs of {NAMED} named"), passed.puts as f64, None, Some(Limit::AtMost(NAMED as f64)));
}

/// `volume-attach`.
pub fn attach() {
    let world = World::new();
    let (host, _) = Meter::host(&world, "a", held());
    host.create(new(id(1), 10 << 30, FlushMode::Local)).unwrap();
    let volume = host.attach(id(1), &opener(1)).unwrap();
    fill(&volume, 256, 1);
    volume.snapshot(snap(1)).unwrap();
    let (content, base) = volume.detach().unwrap();
    host.promote(&volley_volume::Promotion { volume: id(1), attempt: None, base, root: content.digest() }).unwrap();
    let mut block = [0; 4096];
    let mut times = Vec::new();
    for number in 0..ATTACHES {
        let begin = Instant::now();
        let volume = host.attach(id(1), &opener(number as u8 + 2)).unwrap();
        volume.read(number * MIB, &mut block).unwrap();
        times.push(ms(begin));
        volume.detach().unwrap();
    }
    // The first two had to read the page and an extent.
    line("volume-attach 10 GiB, warm, ms", median(&times[2..]), None, Some(Limit::AtMost(50.0)));
    let (cold, meter) = Meter::host(&world, "b", held());
    let volume = cold.attach(id(1), &opener(99)).unwrap();
    volume.read(77 * MIB, &mut block).unwrap();
    let passed = meter.take();
    line("volume-attach cold, requests", (passed.gets + passed.puts) as f64, None, Some(Limit::AtMost(5.0)));
    volume.detach().unwrap();
}

/// `volume-puts`.
pub fn puts() {
    let world = World::new();
    let (host, meter) = Meter::host(&world, "a", Limits::default());
    host.create(new(id(1), 1 << 30, FlushMode::Local)).unwrap();
    let volume = host.attach(id(1), &opener(1)).unwrap();
    meter.take();
    let begin = Instant::now();
    fill(&volume, 1_024, 1);
    volume.detach().unwrap();
    let (passed, took) = (meter.take(), begin.elapsed());
    line("volume-puts 1 GiB in order, PUTs", passed.puts as f64, None, Some(Limit::AtMost(90.0)));
    line("volume-puts 1 GiB in order, MiB/s", 1_024.0 / took.as_secs_f64(), None, None);

    host.create(new(id(2), 1 << 30, FlushMode::Local)).unwrap();
    let volume = host.attach(id(2), &opener(2)).unwrap();
    meter.take();
    let blocks = (1_u64 << 30) / 4096;
    for round in 0..2 {
        let mut plain = noise(MIB as usize, round + 9);
        for n in 0..blocks {
            // Every block once a round, in an order without order: the factor is odd.
            let block = n.wrapping_mul(0x9E37_79B1) % blocks;
            let at = (n % 255) as usize * 4096;
            plain[at..at + 8].copy_from_slice(&n.to_le_bytes());
            volume.write(block * 4096, &plain[at..at + 4096], false).unwrap();
        }
    }
    volume.detach().unwrap();
    let passed = meter.take();
    line("volume-puts 1 GiB twice at random, MiB", passed.bytes as f64 / MIB as f64, Some(2_048.0), Some(Limit::RatioAtMost(2.0)));

    let volume = host.attach(id(1), &opener(3)).unwrap();
    meter.take();
    let seconds = std::env::var("VOLLEY_BENCH_IDLE_S").ok().and_then(|text| text.parse().ok()).unwrap_or(IDLE_S);
    std::thread::sleep(Duration::from_secs(seconds));
    let passed = meter.take();
    line(&format!("volume-puts idle {seconds} s, requests"), (passed.gets + passed.puts) as f64, None, Some(Limit::AtMost(0.0)));
    volume.detach().unwrap();
}

/// `volume-recovery`.
pub fn recovery() {
    let world = World::new();
    let (host, _) = Meter::host(&world, "a", held());
    host.create(new(id(1), 1 << 30, FlushMode::Local)).unwrap();
    let volume = host.attach(id(1), &opener(1)).unwrap();
    fill(&volume, 1_024, 1);
    volume.flush().unwrap();
    let mut times = Vec::new();
    let mut volume = Some(volume);
    for _ in 0..5 {
        // As if it had been killed.
        drop(volume.take());
        let begin = Instant::now();
        volume = Some(host.attach(id(1), &opener(1)).unwrap());
        times.push(ms(begin));
    }
    line("volume-recovery 1 GiB of log, ms", median(&times), None, Some(Limit::AtMost(3_000.0)));
}
