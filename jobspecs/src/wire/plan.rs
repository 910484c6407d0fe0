//! The part of a job spec that `apply` and `place` need, normalised: numbers, no text to parse.
//!
//! Owns its shape. Does not own the spec itself, which travels beside it as JSON and is read by workers and people only.

use std::collections::BTreeMap;

use minicbor::bytes::ByteVec;
use minicbor::{Decode, Encode};
use serde::Serialize;

use crate::backoff::Backoff;
use crate::failure::FailureClass;
use crate::wire::volume::VolumePlan;

/// Largest spec that rides in the log, in bytes; a larger one is an object named by its hash.
pub const SPEC_INLINE_BYTES_MAX: usize = 64 * 1024;

/// A job as the state machine sees it.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode, Serialize)]
#[cbor(map)]
pub struct JobPlan {
    /// The job's name, for people.
    #[n(0)]
    pub name: String,
    /// The job's labels.
    #[n(1)]
    pub labels: BTreeMap<String, String>,
    /// How many tasks.
    #[n(2)]
    pub tasks: u32,
    /// Priority class; higher goes first. 0 by default.
    #[n(3)]
    pub priority: i16,
    /// Share among the tenant's jobs of one class; 100 by default, at least 1.
    #[n(4)]
    pub weight: u32,
    /// Most bundles open at once.
    #[n(5)]
    pub concurrency: Option<u32>,
    /// Most task starts per span.
    #[n(6)]
    pub rate: Option<Rate>,
    /// When too many tasks have failed for the rest to be worth running.
    #[n(7)]
    pub fail_fast: Option<FailFast>,
    /// How long the job's first start may wait, in milliseconds: a job still without a start then fails its tasks as queue timeout.
    #[n(8)]
    pub queue_ms: Option<u64>,
    /// How long the job may take in all, in milliseconds.
    #[n(9)]
    pub total_ms: Option<u64>,
    /// Deadline of one attempt's preparation, in milliseconds.
    #[n(10)]
    pub start_ms: u64,
    /// Deadline of one attempt's command, in milliseconds.
    #[n(11)]
    pub run_ms: u64,
    /// Budgets, rules and backoff.
    #[n(12)]
    pub retry: Retry,
    /// What one task needs of a worker.
    #[n(13)]
    pub needs: Needs,
    /// How long things are kept after the job ended.
    #[n(14)]
    pub retention: Retention,
    /// Name of its items' pages (`keys::items_index`), when they are in a file; set by whoever cut the file. Since level 3 no other
    /// job's have it (`keys::of_one_job`); before, it was the hash of the index, which jobs may share.
    #[n(15)]
    pub items: Option<String>,
    /// Volumes that its tasks use, each in the slot of its place; at most 4. Since level 7.
    #[n(16)]
    #[cbor(default)]
    pub volumes: Vec<VolumePlan>,
}

/// At most `count` starts in any `per_ms` milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode, Serialize)]
#[cbor(map)]
pub struct Rate {
    /// Starts.
    #[n(0)]
    pub count: u32,
    /// Span, in milliseconds.
    #[n(1)]
    pub per_ms: u64,
}

/// The failure limit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode, Serialize)]
#[cbor(map)]
pub struct FailFast {
    /// The limit is passed when more tasks than this have failed. A percentage is turned into a count of tasks at submit.
    #[n(0)]
    pub failures_max: u32,
    /// Stop running tasks too, or let them end?
    #[n(1)]
    pub stop_running: bool,
}

/// Retry policy.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode, Serialize)]
#[cbor(map)]
pub struct Retry {
    /// Tries in a round, the first included, that may end in a failure of the task's own.
    #[n(0)]
    pub attempts: u16,
    /// Infra failures a task may meet in a round before it is given up.
    #[n(1)]
    pub infra_attempts: u16,
    /// The wait between tries.
    #[n(2)]
    pub backoff: Backoff,
    /// Looked through in order; the first that matches decides.
    #[n(3)]
    pub rules: Vec<RetryRule>,
}

/// One rule. All parts that are present must match.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode, Serialize)]
#[cbor(map)]
pub struct RetryRule {
    /// Classes it is about; empty: any.
    #[n(0)]
    pub classes: Vec<FailureClass>,
    /// Exit codes it is about, as inclusive ranges; empty: any.
    #[n(1)]
    pub exit_codes: Vec<(i32, i32)>,
    /// Signals it is about; empty: any.
    #[n(2)]
    pub signals: Vec<i32>,
    /// Retry, or give the task up?
    #[n(3)]
    pub retry: bool,
}

/// What one task needs.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord, Encode, Decode, Serialize)]
#[cbor(map)]
pub struct Needs {
    /// CPU in thousandths of a core.
    #[n(0)]
    pub cpu_milli: u32,
    /// Memory in bytes.
    #[n(1)]
    pub memory_bytes: u64,
    /// Disk in bytes.
    #[n(2)]
    pub disk_bytes: u64,
    /// Isolation tier.
    #[n(3)]
    pub isolation: Isolation,
    /// Labels a worker must carry.
    #[n(4)]
    pub labels: BTreeMap<String, String>,
    /// Are limits enforced on the task (cgroup), so that only a worker that can enforce them fits?
    #[n(5)]
    #[cbor(default)]
    pub limits: bool,
    /// What its image is called (`image::key`), where it is the same for all tasks of the job. Since level 6.
    #[n(6)]
    pub image: Option<u64>,
    /// True: it has volumes, so that only a worker that can have them fits. Since level 7.
    #[n(7)]
    pub volumes: Option<bool>,
}

/// Isolation tiers, weakest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Encode, Decode, Serialize)]
#[cbor(index_only)]
pub enum Isolation {
    /// Completes at once without running anything: measures everything but the task.
    #[n(0)]
    Null,
    /// Own session, process group and cgroup on the worker's host.
    #[n(1)]
    Process,
    /// An OCI runtime.
    #[n(2)]
    Container,
    /// A virtual machine of its own.
    #[n(3)]
    Microvm,
}

impl Isolation {
    /// The name used in specs and results.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        match self {
            Self::Null => "null",
            Self::Process => "process",
            Self::Container => "container",
            Self::Microvm => "microvm",
        }
    }
}

/// What is kept, and for how long after the job's end, in milliseconds.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode, Serialize)]
#[cbor(map)]
pub struct Retention {
    /// The job, its results and its objects; `None`: until somebody removes it.
    #[n(0)]
    pub job_ms: Option<u64>,
    /// Objects of attempts that failed and were tried again; `None`: as long as the job.
    #[n(1)]
    pub failed_objects_ms: Option<u64>,
}

/// Where the JSON spec is.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode, Serialize)]
pub enum SpecRef {
    /// Here, as canonical JSON.
    #[n(0)]
    Inline(
        #[n(0)]
        #[serde(serialize_with = "super::text")]
        ByteVec,
    ),
    /// In the bucket, under `keys::spec(name)`.
    #[n(1)]
    Stored {
        /// blake3 of its bytes, in hex.
        #[n(0)]
        hash: String,
        /// Its length in bytes.
        #[n(1)]
        len: u64,
        /// Its name, which no other job's spec has. None: the hash, which jobs may share. Since level 3.
        #[n(2)]
        name: Option<String>,
    },
}

impl SpecRef {
    /// The name of a spec in the bucket; none of one that is here.
    #[must_use]
    pub fn name(&self) -> Option<&str> {
        match self {
            Self::Inline(_) => None,
            Self::Stored { hash, name, .. } => Some(name.as_deref().unwrap_or(hash)),
        }
    }
}
