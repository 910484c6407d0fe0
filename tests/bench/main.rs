//! The benches: `tests/bench/run [NAME]` builds and runs them.
//!
//! Owns what is measured of jobs: one line a figure: name, ours, the other, ratio. Everything of one figure is measured in one run on
//! one machine. Does not judge: these machines are noisy. Machines are measured by a program of their own (`machines/`).
#![expect(clippy::unwrap_used, reason = "a bench: a panic ends it with a place")]

mod cluster;
mod figures;
mod nulls;
mod raw;
mod spawn;

const NAMES: [&str; 5] = ["null", "scale", "memory", "submit", "spawn"];

fn main() {
    let name = std::env::args().nth(1);
    if name.as_deref().is_some_and(|name| !NAMES.contains(&name)) {
        eprintln!("usage: tests/bench/run [NAME], NAME one of {NAMES:?}");
        std::process::exit(2);
    }
    // The spawner of workers in this process is made while it is small and has one thread.
    figures::heading();
    for each in NAMES.into_iter().filter(|each| name.as_deref().is_none_or(|name| name == *each)) {
        let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build().unwrap();
        runtime.block_on(async {
            match each {
                "null" => nulls::null().await,
                "scale" => nulls::scale().await,
                "memory" => nulls::memory().await,
                "submit" => nulls::submit().await,
                _ => spawn::spawn().await,
            }
        });
        runtime.shutdown_timeout(std::time::Duration::from_secs(2));
    }
}
