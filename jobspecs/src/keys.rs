//! Keys of objects in the bucket.
//!
//! Owns where each kind of object lies. Does not own what is in it. Every key of an attempt begins with that attempt's own
//! prefix, so that two attempts can never overwrite each other.

use crate::ids::{AttemptName, JobId, TenantId};

/// The only stage a job has until stages come.
pub const STAGE: &str = "main";

/// Prefix of everything of one job: `jobs/j1042/`.
#[must_use]
pub fn job_prefix(job: JobId) -> String {
    format!("jobs/{job}/")
}

/// Prefix of everything one attempt wrote: `jobs/j1042/main/17/2-5310/`.
#[must_use]
pub fn attempt_prefix(name: &AttemptName) -> String {
    format!("jobs/{}/{STAGE}/{}/{}-{}/", name.job, name.index, name.number, name.sequence)
}

/// One output file of an attempt; `path` is relative to the output directory.
#[must_use]
pub fn attempt_output(name: &AttemptName, path: &str) -> String {
    format!("{}out/{path}", attempt_prefix(name))
}

/// The list of an attempt's output files, a JSON array.
#[must_use]
pub fn attempt_manifest(name: &AttemptName) -> String {
    format!("{}outputs.json", attempt_prefix(name))
}

/// A kept stream of an attempt: `stdout` or `stderr`.
#[must_use]
pub fn attempt_log(name: &AttemptName, stream: &str) -> String {
    format!("{}{stream}", attempt_prefix(name))
}

/// What a finished round of a job came to: counts and the list of result pages.
#[must_use]
pub fn job_manifest(job: JobId, round: u32) -> String {
    format!("jobs/{job}/manifest-{round}.json")
}

/// One page of a finished round's results, JSON lines, by its number.
#[must_use]
pub fn job_results(job: JobId, round: u32, page: u32) -> String {
    format!("jobs/{job}/results-{round}/{page:06}.ndjson")
}

/// A spec too large for the log, by the blake3 hash of its bytes.
#[must_use]
pub fn spec(hash: &str) -> String {
    format!("specs/{hash}")
}

/// A file somebody uploaded for items or inputs.
#[must_use]
pub fn upload(tenant: &TenantId, id: &str) -> String {
    format!("uploads/{tenant}/{id}")
}

/// Index of the item pages cut from one source, by the hash of its index.
#[must_use]
pub fn items_index(hash: &str) -> String {
    format!("items/{hash}/index.json")
}

/// One page of items, by its number.
#[must_use]
pub fn items_page(hash: &str, page: u32) -> String {
    format!("items/{hash}/{page:06}.jsonl")
}

/// The manifest of one checkpoint of the coordinator's state.
#[must_use]
pub fn checkpoint(sequence: u64) -> String {
    format!("checkpoints/{sequence:020}.json")
}

/// Prefix of everything of checkpoints.
pub const CHECKPOINTS: &str = "checkpoints/";

/// Prefix of the files of all checkpoints.
pub const CHECKPOINT_FILES: &str = "checkpoints/files/";

/// The checkpoint whose manifest lies at this key, if it is one.
#[must_use]
pub fn checkpoint_sequence(key: &str) -> Option<u64> {
    key.strip_prefix(CHECKPOINTS)?.strip_suffix(".json").filter(|digits| digits.len() == 20)?.parse().ok()
}

/// One file of a checkpoint. `name` is its hash and the checkpoint that stored it, so that a key which was deleted once is never
/// used again.
#[must_use]
pub fn checkpoint_file(name: &str) -> String {
    format!("{CHECKPOINT_FILES}{name}")
}

/// The cluster's identity, written once.
pub const CLUSTER: &str = "volley/cluster.json";
