//! How fast an open volume is, without a protocol: `cargo test -p volley-volume --test speed -- --ignored --nocapture`.

mod support;

use std::os::unix::fs::FileExt;
use std::time::{Duration, Instant};

use support::{MIB, World, id, new, noise, opener, snap};
use volley_volume::Limits;
use volley_volume::device::Device;
use volley_volume::format::head::FlushMode;

fn say(name: &str, count: u64, bytes: u64, took: Duration) {
    let each = took / u32::try_from(count).unwrap();
    println!("{name}: {count} in {took:.2?}, {each:.1?} each, {:.0} MiB/s", (count * bytes) as f64 / MIB as f64 / took.as_secs_f64());
}

fn timed(name: &str, count: u64, bytes: u64, mut one: impl FnMut(u64)) {
    let start = Instant::now();
    (0..count).for_each(&mut one);
    say(name, count, bytes, start.elapsed());
}

#[test]
#[ignore = "a measurement"]
fn figures() {
    let world = World::new();
    let big = Limits { commit_every: Duration::from_secs(3_600), commit_bytes: u64::MAX, dirty_bytes_max: u64::MAX, ..Limits::default() };
    let (host, _) = world.host("a", big);
    host.create(new(id(1), 1 << 30, FlushMode::Local)).unwrap();
    let volume = host.attach(id(1), &opener(1)).unwrap();
    let (large, mut into) = (noise(MIB as usize, 1), vec![0; MIB as usize]);
    let place = |n: u64| n.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 46 << 12;
    let raw = std::fs::File::options().read(true).write(true).create_new(true).open(world.dir.join("raw")).unwrap();

    timed("1 MiB writes, in order", 1024, MIB, |n| volume.write(n * MIB, &large, false).unwrap());
    timed("  a plain file", 1024, MIB, |n| raw.write_all_at(&large, n * MIB).unwrap());
    timed("1 MiB reads, in order", 1024, MIB, |n| volume.read(n * MIB, &mut into).unwrap());
    timed("  a plain file", 1024, MIB, |n| raw.read_exact_at(&mut into, n * MIB).unwrap());
    timed("4 KiB reads at random", 100_000, 4096, |n| volume.read(place(n), &mut into[..4096]).unwrap());
    timed("  a plain file", 100_000, 4096, |n| raw.read_exact_at(&mut into[..4096], place(n)).unwrap());
    timed("4 KiB writes at random", 50_000, 4096, |n| volume.write(place(n), &large[..4096], false).unwrap());
    timed("  a plain file", 50_000, 4096, |n| raw.write_all_at(&large[..4096], place(n)).unwrap());
    timed("4 KiB reads at random, written at random", 100_000, 4096, |n| volume.read(place(n), &mut into[..4096]).unwrap());
    volume.flush().unwrap();
    raw.sync_data().unwrap();
    timed("4 KiB writes and flushes", 300, 4096, |n| volume.write(place(n), &large[..4096], true).unwrap());
    timed("  a plain file", 300, 4096, |n| {
        raw.write_all_at(&large[..4096], place(n)).unwrap();
        raw.sync_data().unwrap();
    });
    drop(volume);
    let start = Instant::now();
    let volume = host.attach(id(1), &opener(1)).unwrap();
    println!("a log of 1.2 GiB read and checked: {:.2?}", start.elapsed());
    let start = Instant::now();
    volume.snapshot(snap(1)).unwrap();
    println!("1 GiB committed: {:.2?}", start.elapsed());
    drop(volume);
    let start = Instant::now();
    let volume = host.attach(id(1), &opener(1)).unwrap();
    println!("attached again, nothing in the log: {:.2?}", start.elapsed());
    timed("1 MiB reads from S3, in order", 256, MIB, |n| volume.read(n * MIB, &mut into).unwrap());
    timed("clones opened, a block written and read", 200, 4096, |n| {
        let clone = host.clone_ephemeral(snap(1), volley_jobspecs::ids::VolumeId([n as u8 + 10; 16]), FlushMode::Local, true).unwrap();
        clone.write(8192, &large[..4096], false).unwrap();
        clone.read(8192, &mut into[..4096]).unwrap();
        clone.detach().unwrap();
    });
}
