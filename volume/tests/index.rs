//! The index of what is cached is deleted, cut, mixed with another time's, or left alone while the host is stopped, again and again: what is read is what
//! was written, and where nothing was done to it, what was read before costs no request.
//!
//! `ROUNDS=200 cargo test -p volley-volume --test index` does it more often.

mod support;

use std::path::Path;

use support::{MIB, World, id, new, noise, opener, quiet, snap};
use volley_volume::Limits;
use volley_volume::device::Device;
use volley_volume::format::head::FlushMode;

/// Something that happens to a host's disk while nobody has it open; tells whether anything was done.
fn happen(dir: &Path, dice: &[u8]) -> bool {
    let index = dir.join("index");
    let files = || {
        let mut files: Vec<_> = std::fs::read_dir(&index).unwrap().map(|entry| entry.unwrap().path()).collect();
        files.sort();
        files
    };
    let one = |files: &[std::path::PathBuf]| files[dice[1] as usize % files.len()].clone();
    match dice[0] % 7 {
        0 => std::fs::remove_dir_all(&index).unwrap(),
        1 => std::fs::remove_file(dir.join("cache.slab")).unwrap(),
        2 => std::fs::remove_file(one(&files())).unwrap(),
        3 => {
            let path = one(&files());
            let len = std::fs::metadata(&path).unwrap().len();
            std::fs::File::options().write(true).open(path).unwrap().set_len(len * u64::from(dice[2]) / 256).unwrap();
        }
        4 => {
            let path = one(&files());
            let mut bytes = std::fs::read(&path).unwrap();
            let at = bytes.len() * dice[2] as usize / 256;
            if let Some(byte) = bytes.get_mut(at) {
                *byte ^= 1 << (dice[3] % 8);
            }
            std::fs::write(path, bytes).unwrap();
        }
        5 => {
            // The index of another time, over a file that went on.
            let (old, before) = (dir.join("before"), dir.join("before").exists());
            if before {
                std::fs::remove_dir_all(&index).unwrap();
                std::fs::rename(&old, &index).unwrap();
            } else {
                let copied = std::process::Command::new("cp").arg("-a").arg(&index).arg(&old).status().unwrap();
                assert!(copied.success());
            }
            return before;
        }
        _ => return false,
    }
    true
}

#[test]
fn whatever_becomes_of_the_index_what_is_read_is_what_was_written() {
    let rounds: u64 = std::env::var("ROUNDS").map_or(24, |rounds| rounds.parse().unwrap());
    let world = World::new();
    let (host, _) = world.host("a", quiet());
    host.create(new(id(1), 64 * MIB, FlushMode::Local)).unwrap();
    let volume = host.attach(id(1), &opener(1)).unwrap();
    let plain = noise(8 * MIB as usize, 1);
    volume.write(0, &plain, false).unwrap();
    volume.snapshot(snap(1)).unwrap();
    // Room for half of it at times: then others give way.
    let limits = |round: u64| Limits { cache_disk_bytes: if round % 5 == 4 { 4 * MIB } else { 64 * MIB }, ..quiet() };
    let (mut warm, mut warm_rounds) = (false, 0);
    for round in 0..rounds {
        let seed = rounds * 1_000 + round;
        let (other, requests) = world.host("b", limits(round));
        let clone = other.clone_ephemeral(snap(1), id(2), FlushMode::Local, true).unwrap();
        let mut into = vec![0; plain.len()];
        clone.read(0, &mut into).unwrap();
        assert!(into == plain, "round {round}");
        let asked = requests.take();
        if warm {
            // Who the snapshot is, and nothing of what is in it.
            assert_eq!(asked.len(), 1, "round {round}: {asked:?}");
            warm_rounds += 1;
        }
        // Half of it again, in pieces, as another clone.
        let second = other.clone_ephemeral(snap(1), id(3), FlushMode::Local, true).unwrap();
        let mut piece = vec![0; 9_000];
        for at in (0..plain.len() / 2).step_by(131_072) {
            second.read(at as u64, &mut piece).unwrap();
            assert!(piece == plain[at..at + 9_000], "round {round}");
        }
        drop((clone, second, other));
        for part in [id(2), id(3)] {
            std::fs::remove_dir_all(world.dir.join("b").join(part.to_string())).unwrap();
        }
        let hit = happen(&world.dir.join("b"), &noise(4, seed));
        warm = !hit && round % 5 != 4 && (round + 1) % 5 != 4;
    }
    assert!(rounds < 20 || warm_rounds > 0, "no round had the index of the one before");
}
