//! Workers, as the API shows them.
//!
//! Owns the shape of a worker and of what it keeps.

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

api_type! {
    /// A worker.
    pub struct WorkerView {
        /// Its name.
        pub worker: String,
        /// `ready`, `draining`, `quarantined` or `silent`; that it is silent, or drains by its own will, only the leader knows.
        pub state: String,
        /// Bundles it runs at once.
        pub slots: u32,
        /// Bundles it holds.
        pub bundles: u32,
        /// Tasks it holds.
        pub tasks: u32,
        /// CPU in thousandths of a core.
        pub cpu_milli: u32,
        /// Memory for tasks.
        pub memory_bytes: u64,
        /// Disk for tasks.
        pub disk_bytes: u64,
        /// Isolation tiers it offers.
        pub isolation: Vec<String>,
        /// Tiers that it was to offer and can't, each with what is missing and what to do.
        #[serde(default)]
        pub lacks: BTreeMap<String, String>,
        /// `yes`: its tasks can have volumes; else why they can't. None: it does not say.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        pub volumes: Option<String>,
        /// Machines of failed attempts that it keeps, of jobs that the caller may see. Known to the coordinator that leads.
        #[serde(default)]
        pub kept: Vec<KeptView>,
        /// Its labels.
        pub labels: BTreeMap<String, String>,
        /// Milliseconds since the leader last heard of it; none on a follower.
        pub silent_ms: Option<u64>,
        /// Its build.
        pub build: String,
        /// Its host.
        pub host: String,
    }
}

api_type! {
    /// The machine of a failed attempt, which its worker keeps for a while (`task.keepFailed`).
    pub struct KeptView {
        /// The job.
        pub job: String,
        /// The task, from 0.
        pub task: u32,
        /// Which attempt, from 1.
        pub attempt: u32,
        /// Until when at most.
        pub until: String,
        /// Memory of its host that it takes.
        pub memory_bytes: u64,
    }
}
