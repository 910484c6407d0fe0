//! The simulation: the real state machines of coordinators and workers, driven by a seed through faults, and what must always hold.
//!
//! Owns the runs and the seeds. `VOLLEY_SEEDS=from..to` chooses them; a failure prints its seed, and `VOLLEY_SEEDS=17..18` replays
//! it. The world is in `world.rs`, its parts in `log.rs`, `coordinator.rs` and `host.rs`, the demands in `demands.rs`.
#![expect(clippy::unwrap_used, reason = "a test: a panic is a failure with a place")]

mod coordinator;
mod demands;
mod host;
mod log;
mod random;
mod world;

use std::ops::Range;

/// Seeds of an ordinary run.
const SEEDS: Range<u64> = 0..500;

fn seeds() -> Range<u64> {
    let Ok(text) = std::env::var("VOLLEY_SEEDS") else { return SEEDS };
    let (from, to) = text.split_once("..").expect("VOLLEY_SEEDS is from..to");
    from.parse().expect("a number")..to.parse().expect("a number")
}

fn run(range: Range<u64>) {
    for seed in range {
        let world = std::panic::catch_unwind(|| world::World::run(seed));
        match world {
            Ok(broken) if broken.is_empty() => {}
            Ok(broken) => {
                panic!("seed {seed}: {}\nreplay: VOLLEY_SEEDS={seed}..{} cargo nextest run --test simulation", broken.join("\n"), seed + 1)
            }
            Err(_) => panic!("seed {seed} panicked; replay: VOLLEY_SEEDS={seed}..{} cargo nextest run --test simulation", seed + 1),
        }
    }
}

/// Half of the seeds, so that two cores share them.
#[test]
fn whatever_happens_the_demands_hold_even() {
    let all = seeds();
    run(all.start..all.start + all.clone().count() as u64 / 2);
}

/// The other half.
#[test]
fn whatever_happens_the_demands_hold_odd() {
    let all = seeds();
    run(all.start + all.clone().count() as u64 / 2..all.end);
}

/// The same seed gives the same run, to the byte of the log.
#[test]
fn a_seed_replays() {
    for seed in 0..3 {
        assert_eq!(world::World::fingerprint(seed), world::World::fingerprint(seed), "seed {seed}");
    }
}
