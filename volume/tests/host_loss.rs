//! A host is lost with its disk, again and again, while it writes: of a volume whose flushes reach S3 nothing that was flushed is missing, and one whose flushes reach the
//! host's disk is exactly what was committed last.
//!
//! `ROUNDS=100 cargo test -p volley-volume --test host_loss` loses more of them than the 20 of a usual run.
#![expect(clippy::unwrap_used, reason = "a test says with a panic that it failed")]

mod support;

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use support::{World, id, new, noise, opener, quiet};
use volley_volume::device::Device;
use volley_volume::format::head::{FlushMode, Head};
use volley_volume::format::keys;
use volley_volume::format::seal::ClusterKeys;
use volley_volume::{Limits, Opener};

const BLOCKS: u64 = 1_024;
/// Set in the process that writes: where, which host it is, and the numbers of its first writes.
const CHILD: &str = "VOLLEY_TEST_LOST_WRITER";
/// The volumes: flushes reach S3, or the host's disk.
const VOLUMES: [(u8, FlushMode); 2] = [(1, FlushMode::S3), (2, FlushMode::Local)];

fn limits() -> Limits {
    Limits { commit_every: Duration::from_millis(30), log_keep_bytes: 0, cache_disk_bytes: 0, ..Limits::default() }
}

/// The block of a write, and what it has.
fn write_of(volume: u8, number: u64) -> (usize, Vec<u8>) {
    let block = (number * 2 + u64::from(volume)).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 33;
    let bytes = if number.is_multiple_of(17) { vec![0; 4096] } else { number.to_le_bytes().repeat(512) };
    ((block % BLOCKS) as usize, bytes)
}

fn lay(volume: u8, plain: &mut [u8], number: u64) {
    let (block, bytes) = write_of(volume, number);
    plain[block * 4096..][..4096].copy_from_slice(&bytes);
}

fn by(attach: u8) -> Opener {
    Opener { force: true, resume: true, ..opener(attach) }
}

/// Writes for ever on both, and says what was written and what was flushed. Not a test by itself: the other one starts it.
#[test]
fn writer() {
    let Ok(task) = std::env::var(CHILD) else { return };
    let words: Vec<&str> = task.split(' ').collect();
    let [endpoint, dir, host, first, second] = words[..] else { panic!("{task}") };
    let world = World::join(&format!("{endpoint} {dir}"));
    let (host_of, _) = world.host(host, limits());
    let attach = host.rsplit('-').next().unwrap().parse::<u64>().unwrap() as u8;
    std::thread::scope(|scope| {
        for ((volume, _), first) in VOLUMES.into_iter().zip([first, second]) {
            let open = host_of.attach(id(volume), &by(attach)).unwrap();
            scope.spawn(move || {
                for number in first.parse::<u64>().unwrap().. {
                    let (block, bytes) = write_of(volume, number);
                    open.write(block as u64 * 4096, &bytes, false).unwrap();
                    let mut said = format!("wrote {volume} {number}\n");
                    if number.is_multiple_of(7) {
                        open.flush().unwrap();
                        said += &format!("flushed {volume} {number}\n");
                    }
                    // Lines stay whole: there is one call for each.
                    std::io::stdout().lock().write_all(format!("\n{said}").as_bytes()).unwrap();
                    std::io::stdout().flush().unwrap();
                }
            });
        }
    });
}

fn start(world: &World, host: &str, first: [u64; 2]) -> Child {
    let mut command = Command::new(std::env::current_exe().unwrap());
    let task = format!("{} {host} {} {}", world.address(), first[0], first[1]);
    command.args(["writer", "--exact", "--nocapture"]).env(CHILD, task);
    command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().unwrap()
}

#[test]
fn of_a_lost_host_what_was_flushed_to_s3_or_committed_is_there() {
    let rounds: u64 = std::env::var("ROUNDS").ok().and_then(|rounds| rounds.parse().ok()).unwrap_or(20);
    let world = World::new();
    let (maker, _) = world.host("maker", quiet());
    VOLUMES.into_iter().for_each(|(volume, flush)| maker.create(new(id(volume), BLOCKS * 4096, flush)).unwrap());
    let mut plain = [(); 2].map(|()| vec![0; BLOCKS as usize * 4096]);
    let mut next = [1, 1];
    let mut lost = 0;
    for round in 0..rounds {
        let host = format!("lost-{}", round % 200);
        let mut child = start(&world, &host, next);
        let (mut wrote, mut flushed) = (next.map(|next| next - 1), next.map(|next| next - 1));
        let target = 20 + u64::from(noise(2, round)[0]) * 2;
        let mut killed = false;
        let stdout = child.stdout.take().unwrap();
        for line in BufReader::new(stdout).lines() {
            let Ok(line) = line else { break };
            let words: Vec<&str> = line.split(' ').collect();
            if let [what @ ("wrote" | "flushed"), volume, number] = words[..]
                && let (Ok(volume), Ok(number)) = (volume.parse::<usize>(), number.parse::<u64>())
            {
                let of = if what == "wrote" { &mut wrote } else { &mut flushed };
                of[volume - 1] = of[volume - 1].max(number);
            }
            // What it had said, and nobody had read yet, is read all the same.
            if !killed && wrote[0] >= next[0] + target && wrote[1] >= next[1] + target {
                child.kill().unwrap();
                killed = true;
            }
        }
        child.wait().unwrap();
        assert!(killed, "the writer ended by itself");
        std::fs::remove_dir_all(world.dir.join(&host)).unwrap();
        for (at, (volume, _)) in VOLUMES.into_iter().enumerate() {
            // Each write is one operation, so the head says how many of this attach it has.
            let keys = ClusterKeys::new(&[[1; 32]]).unwrap();
            let (head, _) = Head::read(id(volume), &keys, &world.object(&keys::head(id(volume)))).unwrap();
            let committed = next[at] - 1 + head.working.unwrap().op;
            (next[at]..=committed).for_each(|number| lay(volume, &mut plain[at], number));
            let (elsewhere, _) = world.host("elsewhere", quiet());
            let open = elsewhere.attach(id(volume), &by(250)).unwrap();
            let mut found = vec![0; plain[at].len()];
            open.read(0, &mut found).unwrap();
            assert!(found == plain[at], "round {round}, volume {volume}: not what was committed last, {committed} of {} writes", wrote[at]);
            if volume == 1 {
                assert!(committed >= flushed[at], "round {round}: {} was flushed to S3, and {committed} is there", flushed[at]);
            }
            lost += wrote[at].saturating_sub(committed);
            // It goes on with what is there.
            open.detach().unwrap();
            next[at] = committed + 1;
        }
    }
    println!("{rounds} hosts lost, {next:?} writes, of which {lost} were neither flushed to S3 nor committed");
}
