//! The host's power is cut: of what was written to the log since the last flush any page may be there or not. What comes back is a state that the disk
//! had, and none older than the flush.
//!
//! The pages are mixed by the test: it keeps the log's files as they were at the flush, and lays some of the pages that were written since over them.
#![expect(clippy::unwrap_used, reason = "a test says with a panic that it failed")]

mod support;

use std::collections::HashMap;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use support::{MIB, World, id, new, noise, opener, quiet};
use volley_volume::device::Device;
use volley_volume::format::head::FlushMode;
use volley_volume::format::holding::{Boot, Holding};
use volley_volume::{Limits, Volume};

const BLOCKS: u64 = MIB / 4096;

/// The log's files, by inode: a segment that is used again has another name and the old pages. A commit may take one away meanwhile; then all is read again.
fn files(dir: &Path) -> HashMap<u64, (PathBuf, Vec<u8>)> {
    loop {
        let entries = std::fs::read_dir(dir).unwrap().map(|entry| entry.unwrap());
        let logs = entries.filter(|entry| entry.file_name().to_str().unwrap().ends_with(".log"));
        let read: std::io::Result<_> =
            logs.map(|entry| Ok((entry.metadata()?.ino(), (entry.path(), std::fs::read(entry.path())?)))).collect();
        if let Ok(all) = read {
            return all;
        }
    }
}

struct Dice(Vec<u8>, usize);

impl Dice {
    fn roll(&mut self, sides: u64) -> u64 {
        self.1 += 4;
        u64::from(u32::from_le_bytes(self.0[self.1 - 4..self.1].try_into().unwrap())) % sides
    }
}

/// One operation of one record.
fn change(volume: &Volume, plain: &mut [u8], dice: &mut Dice) {
    let block = dice.roll(BLOCKS);
    let longest = if dice.roll(6) == 0 { 200 } else { 5 };
    let blocks = (1 + dice.roll(longest)).min(BLOCKS - block);
    let range = (block * 4096) as usize..((block + blocks) * 4096) as usize;
    if dice.roll(5) == 0 {
        volume.zero(block * 4096, blocks * 4096, true, false).unwrap();
        plain[range].fill(0);
    } else {
        let bytes = noise(range.len(), dice.1 as u64);
        volume.write(block * 4096, &bytes, false).unwrap();
        plain[range].copy_from_slice(&bytes);
    }
}

/// The host's next start has another number than the one that wrote: power was lost in between.
fn started_again(dir: &Path) {
    let path = dir.join("holding");
    let holding = Holding::read(&std::fs::read(&path).unwrap()).unwrap();
    let boot = holding.boot.map(|boot| Boot { id: [9; 16], ..boot });
    std::fs::write(path, Holding { boot, ..holding }.write().unwrap()).unwrap();
}

fn read(volume: &Volume) -> Vec<u8> {
    let mut found = vec![0; MIB as usize];
    volume.read(0, &mut found).unwrap();
    found
}

#[test]
fn a_power_cut_leaves_a_state_that_was_and_none_before_the_flush() {
    let rounds: u64 = std::env::var("ROUNDS").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(25);
    let world = World::new();
    let limits = || Limits { log_keep_bytes: 0, commit_bytes: 8 * MIB, ..quiet() };
    let (host, _) = world.host("a", limits());
    host.create(new(id(1), MIB, FlushMode::Local)).unwrap();
    let dir = world.dir.join("a").join(id(1).to_string());
    let mut plain = vec![0; MIB as usize];
    let mut dice = Dice(noise(1 << 22, 1), 0);
    let (mut lost, mut whole) = (0, 0);
    for round in 0..rounds {
        let volume = host.attach(id(1), &opener(1)).unwrap();
        let count = dice.roll(40);
        (0..count).for_each(|_| change(&volume, &mut plain, &mut dice));
        volume.flush().unwrap();
        let before = files(&dir);
        let mut states = vec![plain.clone()];
        for _ in 0..dice.roll(30) {
            change(&volume, &mut plain, &mut dice);
            states.push(plain.clone());
        }
        drop(volume);
        started_again(&dir);
        let likely = dice.roll(100);
        for (inode, (path, mut now)) in files(&dir) {
            let old = before.get(&inode).map(|(_, bytes)| bytes.as_slice()).unwrap_or_default();
            for (number, page) in now.chunks_mut(4096).enumerate() {
                let old = old.get(number * 4096..(number + 1) * 4096).unwrap_or(&[0; 4096]);
                if page != &old[..page.len()] && dice.roll(100) >= likely {
                    page.copy_from_slice(&old[..page.len()]);
                }
            }
            std::fs::write(path, now).unwrap();
        }
        let volume = host.attach(id(1), &opener(1)).unwrap_or_else(|error| panic!("round {round}: {error}"));
        let found = read(&volume);
        let place = states.iter().rposition(|state| *state == found);
        let place = place.unwrap_or_else(|| panic!("round {round}: a state that never was, or one before the flush"));
        if place + 1 < states.len() {
            lost += 1
        } else {
            whole += 1
        }
        plain = found;
        drop(volume);
    }
    println!("{rounds} power cuts: {lost} lost something that was not flushed, {whole} nothing");
    assert!(rounds < 20 || lost > 0 && whole > 0);
}

#[test]
fn a_flushed_page_that_is_gone_is_told() {
    let world = World::new();
    let (host, _) = world.host("a", quiet());
    host.create(new(id(1), MIB, FlushMode::Local)).unwrap();
    let dir = world.dir.join("a").join(id(1).to_string());
    let volume = host.attach(id(1), &opener(1)).unwrap();
    let (mut plain, mut dice) = (vec![0; MIB as usize], Dice(noise(1 << 16, 7), 0));
    (0..20).for_each(|_| change(&volume, &mut plain, &mut dice));
    volume.flush().unwrap();
    change(&volume, &mut plain, &mut dice);
    drop(volume);
    let (path, mut bytes) = files(&dir).into_values().next().unwrap();
    bytes[8192..12_288].fill(0);
    std::fs::write(path, bytes).unwrap();
    let error = host.attach(id(1), &opener(1)).map(|_| ()).unwrap_err();
    assert!(error.to_string().contains("does not open, and everything up to operation"), "{error}");
}
