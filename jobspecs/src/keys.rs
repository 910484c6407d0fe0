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

/// Prefix of everything of all jobs.
pub const JOBS: &str = "jobs/";
/// Prefix of all specs that are too large for the log.
pub const SPECS: &str = "specs/";
/// Prefix of all uploads.
pub const UPLOADS: &str = "uploads/";
/// Prefix of all item pages.
pub const ITEMS: &str = "items/";

/// A name for what one submit stores: the hash of its content, and something of the submit's own. It is never used again, so what
/// belongs to a removed job can be deleted without a look at others.
#[must_use]
pub fn for_one_job(hash: &str, nonce: &str) -> String {
    format!("{hash}-{nonce}")
}

/// Is this a name of [`for_one_job`]? Older ones are hashes, which several jobs may share.
#[must_use]
pub fn of_one_job(name: &str) -> bool {
    name.contains('-')
}

/// A spec too large for the log, by its name.
#[must_use]
pub fn spec(name: &str) -> String {
    format!("specs/{name}")
}

/// A file somebody uploaded for items or inputs.
#[must_use]
pub fn upload(tenant: &TenantId, id: &str) -> String {
    format!("uploads/{tenant}/{id}")
}

/// Prefix of the item pages cut from one source, by their name.
#[must_use]
pub fn items_prefix(name: &str) -> String {
    format!("items/{name}/")
}

/// Index of the item pages cut from one source.
#[must_use]
pub fn items_index(name: &str) -> String {
    format!("items/{name}/index.json")
}

/// One page of items, by its number.
#[must_use]
pub fn items_page(name: &str, page: u32) -> String {
    format!("items/{name}/{page:06}.jsonl")
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

/// Prefix of shared templates, when none is configured.
pub const TEMPLATES: &str = "templates/";

/// Prefix of one owner's shared templates: a tenant's, or everybody's. No tenant's is the beginning of another's.
#[must_use]
pub fn templates_of(prefix: &str, tenant: Option<&TenantId>) -> String {
    match tenant {
        Some(tenant) => format!("{prefix}tenants/{tenant}/"),
        None => format!("{prefix}public/"),
    }
}

/// Prefix of the manifests of an owner's shared templates.
#[must_use]
pub fn template_manifests(owner: &str) -> String {
    format!("{owner}manifests/")
}

/// The manifest of a shared template, by its name in hex.
#[must_use]
pub fn template_manifest(owner: &str, name: &str) -> String {
    format!("{owner}manifests/{name}")
}

/// Prefix of the chunks of an owner's shared templates.
#[must_use]
pub fn template_chunks(owner: &str) -> String {
    format!("{owner}chunks/")
}

/// A chunk of an owner's shared templates, by its name in hex.
#[must_use]
pub fn template_chunk(owner: &str, name: &str) -> String {
    format!("{owner}chunks/{name}")
}
