//! The benches of volumes: `tests/bench/run volume-io|volume-clone|volume-attach|volume-puts|volume-recovery`.
//!
//! Owns which there are, and the bucket they use: the embedded server on this disk, whose requests are counted. No cluster and no task takes part: what the
//! volume's library and its NBD server do is measured, beside `qemu-nbd` with a raw file on the same disk.
#![expect(clippy::unwrap_used, reason = "a bench: a panic ends it with a place")]

mod costs;
#[expect(dead_code, reason = "shared with the benches of jobs, whose lines have no limits")]
#[path = "../figures.rs"]
mod figures;
mod io;
#[expect(dead_code, reason = "shared with the benches of machines")]
#[path = "../machines/limits.rs"]
mod limits;
mod meter;
#[path = "../../../volume/tests/support/mod.rs"]
mod support;

const NAMES: [&str; 5] = ["volume-io", "volume-clone", "volume-attach", "volume-puts", "volume-recovery"];

fn main() {
    let name = std::env::args().nth(1);
    if name.as_deref().is_some_and(|name| !NAMES.contains(&name)) {
        eprintln!("usage: tests/bench/run [NAME], NAME one of {NAMES:?}");
        std::process::exit(2);
    }
    limits::heading();
    for each in NAMES.into_iter().filter(|each| name.as_deref().is_none_or(|name| name == *each)) {
        match each {
            "volume-io" => io::beside_qemu_nbd(),
            "volume-clone" => costs::clones(),
            "volume-attach" => costs::attach(),
            "volume-puts" => costs::puts(),
            _ => costs::recovery(),
        }
    }
}
