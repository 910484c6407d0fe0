//! Bits that flip, in the bucket and on the host's disk: they are found, and what is read is never anything else than what was written.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use volley_volume::device::Device;
use volley_volume::format::head::FlushMode;
use volley_volume::{OpenError, Pinned};

use crate::support::{MIB, World, id, new, noise, opener, quiet, snap};
use crate::{accept, copy, read};

/// A bucket with a volume that has packs and map pages, a snapshot of it, and a pin.
fn world() -> (World, Vec<u8>) {
    let world = World::new();
    let (host, _) = world.host("a", quiet());
    host.create(new(id(1), 4 * MIB, FlushMode::Local)).unwrap();
    let volume = host.attach(id(1), &opener(1)).unwrap();
    let plain = noise(4 * MIB as usize, 3);
    volume.write(0, &plain, false).unwrap();
    volume.snapshot(snap(1)).unwrap();
    accept(&world, volume, 0);
    host.pin("j1", Pinned::Snapshot(snap(1))).unwrap();
    (world, plain)
}

/// Tries everything; whatever is read must be right. Returns what has failed.
fn tries(world: &World, plain: &[u8], name: &str) -> Vec<&'static str> {
    let (host, _) = world.host(name, quiet());
    let mut failed = Vec::new();
    let mut look = |what: &'static str, opened: Result<volley_volume::Volume, OpenError>| {
        let Ok(volume) = opened else { return failed.push(what) };
        let mut wrong = 0;
        for (n, expected) in plain.chunks(4096).enumerate() {
            let mut into = vec![0; 4096];
            match volume.read(n as u64 * 4096, &mut into) {
                Ok(()) => assert!(into == expected, "{name}: {what}: block {n}"),
                Err(_) => wrong += 1,
            }
        }
        if wrong > 0 {
            failed.push(what);
        }
        let _ = volume.detach();
    };
    look("clone", host.clone_ephemeral(snap(1), id(2), FlushMode::None, false));
    look("attach", host.attach(id(1), &opener(2)));
    if host.verify(id(1), true).is_err() {
        failed.push("verify");
    }
    failed
}

#[test]
fn damage_of_each_kind_of_object_is_found() {
    let (world, plain) = world();
    assert!(tries(&world, &plain, "well").is_empty());
    for (part, expected) in [
        ("/p/", &["clone", "attach", "verify"][..]),
        ("/m/", &["clone", "attach", "verify"]),
        ("/head", &["attach", "verify"]),
        ("snap/", &["clone"]),
    ] {
        let (world, plain) = crate::flips::world();
        assert!(world.damage(part) > 0, "{part}");
        assert_eq!(tries(&world, &plain, "a host that reads it"), expected, "{part}");
    }
}

fn logs(dir: &Path) -> Vec<PathBuf> {
    let mut all: Vec<PathBuf> = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().path()).collect();
    all.retain(|path| path.extension().is_some_and(|extension| extension == "log"));
    all.sort();
    all
}

/// Where there is something in a file: the header, and one place in each part of so many bytes, drawn by its number.
fn places(path: &Path, part: usize) -> Vec<u64> {
    let bytes = std::fs::read(path).unwrap();
    let parts = bytes.chunks(part).enumerate().filter(|(_, part)| part.iter().any(|byte| *byte != 0));
    parts.map(|(n, part)| (n * part.len()) as u64 + if n == 0 { 5 } else { (n as u64 * 389) % part.len() as u64 }).collect()
}

/// The log of a process that was killed: whatever bit of it flips, it is refused, or it is all there. Only of the very last record nobody can say whether it was
/// ever written to its end.
#[test]
fn a_flipped_bit_of_the_log_is_told_or_does_not_matter() {
    // Each place is a process that begins anew; `FLIPS=512` has one in each 512 bytes.
    let part = std::env::var("FLIPS").ok().and_then(|part| part.parse().ok()).unwrap_or(6_000);
    for flushed in [true, false] {
        let world = World::new();
        let (host, _) = world.host("a", quiet());
        host.create(new(id(1), MIB, FlushMode::Local)).unwrap();
        let volume = host.attach(id(1), &opener(1)).unwrap();
        let (mut plain, mut before) = (vec![0; MIB as usize], Vec::new());
        for n in 0..30u64 {
            before.clone_from(&plain);
            let (at, len) = ((n * 37 % 200) as usize * 4096, (1 + n as usize % 5) * 4096);
            let bytes = noise(len, n);
            volume.write(at as u64, &bytes, false).unwrap();
            plain[at..at + len].copy_from_slice(&bytes);
            // Records say what had been flushed when they were written; the last of these have nothing behind them.
            if flushed && n % 4 == 1 {
                volume.flush().unwrap();
            }
        }
        drop(volume);
        drop(host);
        let well = world.dir.join("a");
        let mut told = 0;
        let mut last = 0;
        for (number, path) in logs(&well.join(id(1).to_string())).into_iter().enumerate() {
            for at in places(&path, part) {
                let name = format!("flipped-{number}-{at}");
                let dir = world.dir.join(&name);
                copy(&well, &dir);
                let file = File::options().read(true).write(true).open(dir.join(path.strip_prefix(&well).unwrap())).unwrap();
                let mut byte = [0];
                file.read_exact_at(&mut byte, at).unwrap();
                file.write_all_at(&[byte[0] ^ 16], at).unwrap();
                let (host, _) = world.host(&name, quiet());
                match host.attach(id(1), &opener(1)) {
                    Ok(volume) => {
                        let found = read(&volume, 0, plain.len());
                        last += usize::from(found == before);
                        assert!(found == plain || found == before, "flushed: {flushed}, {}: byte {at}: an older disk", path.display());
                    }
                    Err(error) => {
                        assert!(matches!(error, OpenError::Log(_)), "{error}");
                        told += 1;
                    }
                }
                drop(host);
                std::fs::remove_dir_all(&dir).unwrap();
            }
        }
        println!("flushed: {flushed}: {told} flips were told, {last} cost the last record");
        assert!(told > 40 && last > 0 && last * 5 < told, "{told} {last}");
    }
}
