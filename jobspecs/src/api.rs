//! The JSON of the HTTP API: what clients send and get.
//!
//! Owns the shapes, which are also the OpenAPI document's. Does not own the routes (coordinator/src/api) or the spec (`spec`).
//! Instants are RFC 3339 strings in UTC, durations are milliseconds as numbers ending in `Ms`, sizes are bytes.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

use crate::failure::FailureClass;

/// Most rows of one page.
pub const PAGE_ROWS_MAX: u32 = 1_000;
/// Rows of one page when the request doesn't say.
pub const PAGE_ROWS_DEFAULT: u32 = 100;
/// Header with the log sequence an answer reflects; a request that carries it waits until the coordinator has applied that much.
pub const SEQUENCE_HEADER: &str = "volley-sequence";
/// Header with the idempotency key of a submit.
pub const IDEMPOTENCY_HEADER: &str = "idempotency-key";

macro_rules! api_type {
    ($item:item) => {
        #[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema, JsonSchema)]
        #[serde(rename_all = "camelCase")]
        $item
    };
}

mod volumes;
mod workers;
pub use volumes::{
    CollectedView, DamageView, ResizeRequest, SnapshotRequest, SnapshotView, VerifiedView, VerifyLine, VolumeRequest, VolumeView,
};
pub use workers::{KeptView, WorkerView};

api_type! {
    /// Every error answer.
    pub struct ErrorBody {
        /// A stable word for programs: `bad_spec`, `not_found`, `conflict`, `unauthorized`, `too_large`, `overloaded`, …
        pub code: String,
        /// What happened, where, and what to do.
        pub message: String,
        /// May the same request succeed later?
        pub retryable: bool,
        /// Each problem of a spec, when the code is `bad_spec`.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        pub problems: Vec<ProblemView>,
    }
}

api_type! {
    /// One problem of a spec.
    pub struct ProblemView {
        /// JSON path, such as `$.task.resources.memory`.
        pub path: String,
        /// What is wrong and what is allowed.
        pub message: String,
    }
}

api_type! {
    /// The answer to a submit.
    pub struct SubmitAnswer {
        /// The job.
        pub job: String,
        /// How many tasks it has.
        pub tasks: u32,
        /// Was it there already, under the same idempotency key?
        pub existed: bool,
        /// What keeps it from running as things are now, such as that no worker could ever run its tasks; workers may come.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        pub warnings: Vec<String>,
    }
}

/// Where a job stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, ToSchema, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum JobState {
    /// Nothing has started yet.
    Queued,
    /// Tasks run or wait for a worker.
    Running,
    /// Nothing more is started until it is resumed.
    Paused,
    /// It is being ended; what runs may still end.
    Ending,
    /// Every task succeeded.
    Succeeded,
    /// Some tasks failed.
    Failed,
    /// Somebody cancelled it.
    Cancelled,
}

impl JobState {
    /// Has it ended?
    #[must_use]
    pub fn ended(self) -> bool {
        matches!(self, Self::Succeeded | Self::Failed | Self::Cancelled)
    }
}

api_type! {
    /// How many tasks stand where. They add up to `total`.
    #[derive(Default)]
    pub struct TaskCounts {
        /// All.
        pub total: u32,
        /// Wait for a worker.
        pub waiting: u32,
        /// Are with a worker.
        pub running: u32,
        /// Wait for their next try.
        pub backoff: u32,
        /// Ended well.
        pub succeeded: u32,
        /// Failed by themselves: a verdict.
        pub failed: u32,
        /// Given up because of infra failures: no verdict.
        pub infra_failed: u32,
        /// Were cancelled.
        pub cancelled: u32,
    }
}

api_type! {
    /// A job.
    pub struct JobView {
        /// Its id.
        pub job: String,
        /// Its name.
        pub name: String,
        /// Whose.
        pub tenant: String,
        /// Where it stands.
        pub state: JobState,
        /// Why it ended or is ending, for people: a cancel's reason, the failure limit, a deadline.
        pub reason: Option<String>,
        /// What keeps its tasks from beginning, or did last: an image that is not there, a template that can't be built. Said here once, however
        /// many tasks met it; gone with the next task that succeeds.
        #[serde(default)]
        pub trouble: Option<String>,
        /// How many tasks stand where.
        pub tasks: TaskCounts,
        /// Ended tasks by failure class.
        pub failures: BTreeMap<String, u32>,
        /// Its labels.
        pub labels: BTreeMap<String, String>,
        /// Priority class.
        pub priority: i16,
        /// Which round it is in; a rerun opens the next. From 1.
        pub round: u32,
        /// When it was submitted.
        pub submitted: String,
        /// When its first task started.
        pub started: Option<String>,
        /// When it ended.
        pub ended: Option<String>,
        /// What the CLI exits with, once it has ended: 0, 1, 3 or 4.
        pub exit_code: Option<u8>,
        /// Prefix of its objects, as `s3://bucket/jobs/…`.
        pub objects: String,
        /// Id of its trace, 32 hexadecimal digits; what is recorded of it is found under this id. None for jobs of older builds.
        #[serde(default)]
        pub trace_id: Option<String>,
        /// What workers do for the templates of its machines. Known to the coordinator that leads.
        #[serde(default)]
        pub templates: Vec<TemplateView>,
    }
}

api_type! {
    /// What a worker does for the template of a job's machines, while tasks wait for it.
    pub struct TemplateView {
        /// The worker.
        pub worker: String,
        /// What it does: `building template`, `waiting for another worker to build the template`, `fetching template`.
        pub step: String,
        /// For how long, in milliseconds.
        pub for_ms: u64,
        /// How many tasks wait for it there.
        pub tasks: u32,
    }
}

/// A page of rows.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, ToSchema, JsonSchema)]
pub struct Page<T> {
    /// The rows.
    pub rows: Vec<T>,
    /// Ask for the next page with this as `after`; none: this was the last.
    pub next: Option<String>,
}

/// Where a task stands.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize, ToSchema, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum TaskState {
    /// Waits for a worker.
    Waiting,
    /// With a worker.
    Running,
    /// Waits for its next try.
    Backoff,
    /// Ended well.
    Succeeded,
    /// Failed.
    Failed,
    /// Was cancelled.
    Cancelled,
}

api_type! {
    /// A task.
    pub struct TaskView {
        /// Counted from 0.
        pub index: u32,
        /// Where it stands.
        pub state: TaskState,
        /// Tries begun so far.
        pub attempts: u32,
        /// Why the last try failed.
        pub class: Option<FailureClass>,
        /// The worker it is with.
        pub worker: Option<String>,
        /// When its next try is due.
        pub next_try: Option<String>,
    }
}

api_type! {
    /// One try of a task.
    pub struct AttemptView {
        /// Counted from 1.
        pub number: u32,
        /// Log sequence of its assignment, part of its objects' keys.
        pub sequence: u64,
        /// Where it ran.
        pub worker: String,
        /// `succeeded`, `failed` or `running`.
        pub state: TaskState,
        /// Why it failed.
        pub class: Option<FailureClass>,
        /// Exit code, or number of the signal.
        pub code: Option<i32>,
        /// What happened, for people.
        pub message: Option<String>,
        /// Under which isolation it ran.
        pub isolation: String,
        /// When it was assigned.
        pub assigned: String,
        /// When its report was applied.
        pub ended: Option<String>,
        /// Waiting at the worker.
        pub wait_ms: u32,
        /// Inputs and machine.
        pub prepare_ms: u32,
        /// The command.
        pub run_ms: u32,
        /// Outputs and logs.
        pub persist_ms: u32,
        /// CPU time in microseconds.
        pub cpu_us: Option<u64>,
        /// Most memory resident at once.
        pub memory_bytes_max: Option<u64>,
        /// Last bytes of stdout.
        pub stdout_tail: Option<String>,
        /// Last bytes of stderr.
        pub stderr_tail: Option<String>,
        /// Bytes written to stdout in all.
        pub stdout_bytes: u64,
        /// Bytes written to stderr in all.
        pub stderr_bytes: u64,
        /// Number of output files.
        pub output_files: u32,
        /// Their bytes.
        pub output_bytes: u64,
        /// Prefix of its objects, as `s3://bucket/jobs/…`.
        pub objects: String,
    }
}

api_type! {
    /// A line of the results stream: how one task ended.
    pub struct ResultRow {
        /// The task.
        pub index: u32,
        /// `succeeded`, `failed` or `cancelled`.
        pub state: TaskState,
        /// Why it failed.
        pub class: Option<FailureClass>,
        /// Does the failure say something about the task's own work?
        pub valid: bool,
        /// Exit code, or number of the signal.
        pub code: Option<i32>,
        /// What happened, for people.
        pub message: Option<String>,
        /// Tries it took.
        pub attempts: u32,
        /// The command, in milliseconds.
        pub run_ms: u32,
        /// `result.json` of the task, when it wrote a small one.
        pub result: Option<serde_json::Value>,
        /// Last bytes of stdout.
        pub stdout_tail: Option<String>,
        /// Last bytes of stderr.
        pub stderr_tail: Option<String>,
        /// Number of output files.
        pub output_files: u32,
        /// Prefix of its objects.
        pub objects: Option<String>,
        /// Did a rerun supersede it? Such rows come only when they are asked for.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        pub superseded: bool,
        /// Pass this as `after` to go on behind this row.
        pub cursor: String,
    }
}

api_type! {
    /// An output file.
    pub struct OutputFile {
        /// Relative to the output directory.
        pub path: String,
        /// Its size.
        pub bytes: u64,
        /// SHA-256, in hex.
        pub sha256: String,
    }
}

api_type! {
    /// Why a task or a job does not run, or ended as it did.
    pub struct Explanation {
        /// In a sentence.
        pub summary: String,
        /// What led to it: tries, rules, budgets.
        #[serde(default)]
        pub details: Vec<String>,
        /// What can be done now.
        #[serde(default)]
        pub next: Vec<String>,
        /// Per worker, while something waits for one.
        pub workers: Vec<WorkerExplanation>,
    }
}

api_type! {
    /// What stands between a task and one worker.
    pub struct WorkerExplanation {
        /// The worker.
        pub worker: String,
        /// Everything in the way; empty: it fits.
        pub reasons: Vec<String>,
    }
}

api_type! {
    /// An event of a job, as SSE data.
    pub struct EventView {
        /// Log sequence it comes from.
        pub sequence: u64,
        /// `job` (state or counts changed) or `task` (a task ended).
        pub kind: String,
        /// The job as it is now; none in an event of kind `task`.
        #[serde(default)]
        pub job: Option<JobView>,
        /// The task that ended; none in an event of kind `job`.
        #[serde(default)]
        pub task: Option<TaskView>,
    }
}

api_type! {
    /// Asks for a cancel.
    #[derive(Default)]
    #[serde(deny_unknown_fields)]
    pub struct CancelRequest {
        /// Stop tasks that run; otherwise they may end.
        #[serde(default)]
        pub now: bool,
        /// Why, for people.
        #[serde(default)]
        pub reason: String,
    }
}

api_type! {
    /// Makes or changes a tenant.
    #[serde(deny_unknown_fields)]
    pub struct TenantRequest {
        /// Its name.
        pub tenant: String,
        /// Share among tenants; 100 by default.
        #[serde(default)]
        pub weight: Option<u32>,
        /// Most tasks in jobs that have not ended.
        #[serde(default)]
        pub active_tasks_max: Option<u64>,
        /// Most jobs that have not ended.
        #[serde(default)]
        pub active_jobs_max: Option<u32>,
        /// Most bundles open at once.
        #[serde(default)]
        pub concurrency: Option<u32>,
        /// Highest priority class its jobs may ask for.
        #[serde(default)]
        pub priority_max: Option<i16>,
        /// Most bytes of its volumes, by their sizes.
        #[serde(default)]
        pub volume_bytes_max: Option<u64>,
        /// Most bytes of its volumes in the bucket; beyond it no volume is made.
        #[serde(default)]
        pub stored_bytes_max: Option<u64>,
    }
}

api_type! {
    /// Asks for a token.
    #[serde(deny_unknown_fields)]
    pub struct TokenRequest {
        /// Whose.
        pub tenant: String,
        /// May it do what only an operator may?
        #[serde(default)]
        pub operator: bool,
    }
}

api_type! {
    /// A token that is valid; its secret is nowhere. A revoked one is not kept.
    pub struct TokenView {
        /// Its id, for `revoke`.
        pub id: String,
        /// Whose.
        pub tenant: String,
        /// May it do what only an operator may?
        pub operator: bool,
        /// When it was made; none: before clusters kept that.
        pub created: Option<String>,
    }
}

api_type! {
    /// A fresh token; its secret is shown this once.
    pub struct TokenAnswer {
        /// Its id, for `revoke`.
        pub id: String,
        /// What goes behind `Authorization: Bearer`.
        pub token: String,
    }
}

api_type! {
    /// The answer to an upload.
    pub struct UploadAnswer {
        /// Name it in a spec as `upload: <id>`, or `upload:<id>` for an input.
        pub id: String,
        /// Its size.
        pub bytes: u64,
        /// SHA-256, in hex.
        pub sha256: String,
    }
}

api_type! {
    /// What a submit would do.
    pub struct PlanAnswer {
        /// How many tasks the job would have.
        pub tasks: u32,
        /// The first tasks as a worker would run them.
        pub first: Vec<serde_json::Value>,
        /// The last tasks, without those in `first`.
        pub last: Vec<serde_json::Value>,
        /// What would keep it from running as things are now; workers may come.
        #[serde(default, skip_serializing_if = "Vec::is_empty")]
        pub warnings: Vec<String>,
    }
}

api_type! {
    /// A piece of live output, a line of a job's log stream.
    pub struct LogLine {
        /// The task.
        pub index: u32,
        /// `stdout` or `stderr`.
        pub stream: String,
        /// The piece, of whole characters; bytes that are no UTF-8 are replaced.
        pub text: String,
    }
}

api_type! {
    /// A piece of a task's output, a line of its followed log in the form `pieces`.
    pub struct LogPiece {
        /// Of which attempt.
        pub attempt: u32,
        /// `stdout` or `stderr`.
        pub stream: String,
        /// Where it begins in the stream. A jump says that bytes are missing; once the attempt has ended, what was kept of it may have them.
        pub offset: u64,
        /// Its bytes.
        pub base64: String,
        /// Pass this as `after` to go on behind this piece.
        pub cursor: String,
        /// Is this the end? Then there are no bytes. A stream that ends without it broke off.
        #[serde(default, skip_serializing_if = "std::ops::Not::not")]
        pub end: bool,
    }
}

api_type! {
    /// A tenant.
    pub struct TenantView {
        /// Its name.
        pub tenant: String,
        /// Share among tenants.
        pub weight: u32,
        /// Most tasks in jobs that have not ended.
        pub active_tasks_max: Option<u64>,
        /// Most jobs that have not ended.
        pub active_jobs_max: Option<u32>,
        /// Most bundles open at once.
        pub concurrency: Option<u32>,
        /// Highest priority class its jobs may ask for.
        pub priority_max: i16,
        /// Most bytes of its volumes, by their sizes.
        pub volume_bytes_max: Option<u64>,
        /// Most bytes of its volumes in the bucket; beyond it no volume is made.
        pub stored_bytes_max: Option<u64>,
        /// Bytes of its volumes, by their sizes.
        pub volume_bytes: u64,
        /// Bytes of its volumes in the bucket, as they were last measured; only of a tenant with a limit.
        pub stored_bytes: Option<u64>,
        /// Jobs that have not ended.
        pub active_jobs: u32,
        /// Tasks in jobs that have not ended.
        pub active_tasks: u64,
    }
}

api_type! {
    /// The cluster, as this coordinator sees it.
    pub struct ClusterView {
        /// Its id, the same in the log, the bucket and every coordinator.
        pub id: String,
        /// This coordinator's build.
        pub version: String,
        /// The leading coordinator's name; none has led yet when empty.
        pub leader: String,
        /// Its term.
        pub term: u64,
        /// The last record applied here.
        pub sequence: u64,
        /// The record level in force.
        pub level: u32,
        /// Bytes of the log.
        pub log_bytes: u64,
        /// Most bytes of the log; none: no limit.
        pub log_bytes_max: Option<u64>,
        /// What specs may use: `process`, `container`, `volumes`, …
        pub features: Vec<String>,
        /// Tiers that workers were to offer and can't, a line each.
        #[serde(default)]
        pub lacks: Vec<String>,
        /// The bucket, as `s3://bucket/prefix`.
        pub bucket: String,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_request_with_a_field_that_nobody_knows_is_refused() {
        fn refused<T: serde::de::DeserializeOwned>(json: &str) -> bool {
            serde_json::from_str::<T>(json).is_err_and(|error| error.to_string().contains("unknown field"))
        }
        assert!(refused::<TenantRequest>(r#"{"tenant":"a","activeTaskMax":5}"#));
        assert!(refused::<TokenRequest>(r#"{"tenant":"a","ttl":"1h"}"#));
        assert!(refused::<CancelRequest>(r#"{"Now":true}"#));
        assert!(serde_json::from_str::<TenantRequest>(r#"{"tenant":"a","activeTasksMax":5}"#).is_ok());
    }
}
