//! A process that writes is killed (SIGKILL) again and again: nothing that it was told was done is missing, and nothing is there that was not written.
//!
//! `ROUNDS=500 cargo test -p volley-volume --test kills` kills more often.
#![expect(clippy::unwrap_used, reason = "a test says with a panic that it failed")]

mod support;

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use support::{MIB, World, id, new, noise, opener};
use volley_volume::device::Device;
use volley_volume::format::head::FlushMode;
use volley_volume::{Limits, Promotion};

const BLOCKS: u64 = 2_048;
/// Set in the process that writes: where, and the number of its first write.
const CHILD: &str = "VOLLEY_TEST_WRITER";

fn limits() -> Limits {
    Limits { commit_every: Duration::from_millis(30), log_keep_bytes: 0, ..Limits::default() }
}

/// The block of a write, and what it has: its own number in every eight bytes, half of them zero blocks now and then.
fn write_of(number: u64) -> (u64, Vec<u8>) {
    let block = number.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 33;
    let bytes = if number.is_multiple_of(17) { vec![0; 4096] } else { number.to_le_bytes().repeat(512) };
    (block % BLOCKS, bytes)
}

/// Writes for ever, and says after each write that it was done. Not a test by itself: the other one starts it.
#[test]
fn writer() {
    let Ok(task) = std::env::var(CHILD) else { return };
    let (world, first) = task.rsplit_once(' ').unwrap();
    let world = World::join(world);
    let (host, _) = world.host("a", limits());
    let volume = host.attach(id(1), &opener(1)).unwrap();
    let mut out = std::io::stdout().lock();
    for number in first.parse::<u64>().unwrap().. {
        let (block, bytes) = write_of(number);
        volume.write(block * 4096, &bytes, false).unwrap();
        writeln!(out, "\ndone {number}").unwrap();
        out.flush().unwrap();
    }
}

fn start(world: &World, first: u64) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    command.args(["writer", "--exact", "--nocapture"]).env(CHILD, format!("{} {first}", world.address()));
    command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap()
}

#[test]
fn what_a_killed_process_had_written_is_there() {
    let rounds: u64 = std::env::var("ROUNDS").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(20);
    let world = World::new();
    world.host("a", limits()).0.create(new(id(1), BLOCKS * 4096, FlushMode::Local)).unwrap();
    let (mut plain, mut next) = (vec![0; (BLOCKS * 4096) as usize], 1);
    for round in 0..rounds {
        let mut child = start(&world, next);
        let target = next + 1 + u64::from(noise(2, round)[0]) * 40;
        let mut lines = BufReader::new(child.stdout.take().unwrap()).lines();
        let mut done = next - 1;
        for line in lines.by_ref() {
            if let Some(number) = line.unwrap().strip_prefix("done ") {
                done = number.parse().unwrap();
            }
            if done >= target {
                break;
            }
        }
        child.kill().unwrap();
        child.wait().unwrap();
        // What it had said, and nobody had read yet.
        for line in lines {
            if let Some(number) = line.unwrap().strip_prefix("done ") {
                done = number.parse().unwrap_or(done);
            }
        }
        assert!(done >= target, "the writer ended by itself");
        for number in next..=done {
            let (block, bytes) = write_of(number);
            plain[(block * 4096) as usize..][..4096].copy_from_slice(&bytes);
        }
        let volume = world.host("a", limits()).0.attach(id(1), &opener(1)).unwrap();
        let mut found = vec![0; plain.len()];
        volume.read(0, &mut found).unwrap();
        // One write more may have happened, of which it could not tell.
        let (block, bytes) = write_of(done + 1);
        next = done + 1;
        if found != plain {
            plain[(block * 4096) as usize..][..4096].copy_from_slice(&bytes);
            next += 1;
        }
        assert!(found == plain, "round {round}, after write {done}");
    }
    let volume = world.host("a", limits()).0.attach(id(1), &opener(1)).unwrap();
    let root = volume.detach().unwrap().0.digest();
    let (elsewhere, _) = world.host("b", Limits::default());
    elsewhere.promote(&Promotion { volume: id(1), attempt: None, base: 0, root }).unwrap();
    let volume = elsewhere.attach(id(1), &opener(2)).unwrap();
    let mut found = vec![0; (8 * MIB) as usize];
    volume.read(0, &mut found).unwrap();
    assert!(found == plain, "from S3 alone");
    println!("{rounds} kills, {next} writes");
}
