//! Bad days, on real processes: kill -9 and SIGSTOP of every part, NATS away, S3 refusing, disks full, malformed input.
//!
//! Each test starts its own cluster on loopback in a temporary directory and ends all of it. What `tests/run` does in minutes is
//! done at full length with the environment:
//!
//! | variable | what | in `tests/run` | in full |
//! |---|---|---|---|
//! | `VOLLEY_FAULTS_ROUNDS` | rounds of kills and freezes under 10,000 tasks | 2 | 20 |
//! | `VOLLEY_FAULTS_SEED` | where the rounds begin; each prints its own | from the clock | |
//! | `VOLLEY_FAULTS_AWAY_S` | seconds that NATS is away | 20 | 600 |
//! | `VOLLEY_FAULTS_SLEEPS` | tasks that run meanwhile | 200 | 1000 |
//! | `VOLLEY_FAULTS_REFUSING_S` | seconds that S3 answers 503 | 12 | 60 |
//! | `VOLLEY_FAULTS_MALFORMED` | malformed requests | 10,000 | 10,000 |
//! | `VOLLEY_FAULTS_BINARY` | another `volley` than the one just built, for long runs beside further work | | |
//! | `VOLLEY_FAULTS_KEEP` | keep the clusters' directories with all logs | | |

#![expect(clippy::unwrap_used, reason = "tests")]

mod cluster;
#[path = "../support/disk.rs"]
mod disk;
mod disks;
mod kills;
mod malformed;
mod outages;
mod poison;
mod process;
#[path = "../simulation/random.rs"]
mod random;
mod s3;

/// A number from the environment.
fn setting(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.replace(['_', ','], "").parse().ok()).unwrap_or(default)
}
