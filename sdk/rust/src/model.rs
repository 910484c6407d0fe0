//! Answers of the API that have no type in `volley_jobspecs::api`.
//!
//! Owns their shapes as a client reads them: a field that is missing takes its default, so that older coordinators are understood.

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// What a submit would create.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct PlanAnswer {
    /// How many tasks.
    pub tasks: u32,
    /// The first ones, as a worker would run them.
    #[serde(default)]
    pub first: Vec<Value>,
    /// The last ones.
    #[serde(default)]
    pub last: Vec<Value>,
}

/// The cluster.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct ClusterView {
    /// Its id, the same for as long as it lives.
    pub id: String,
    /// Build of the coordinator that answered.
    pub version: String,
    /// Name of the coordinator that leads; none while nobody does.
    pub leader: Option<String>,
    /// The leader's term.
    pub term: u64,
    /// Log sequence the answering coordinator has applied.
    pub sequence: u64,
    /// Behaviour level of the log.
    pub level: u32,
    /// Bytes in the log.
    pub log_bytes: u64,
    /// Most bytes the log may hold; submits are refused above 80 % of it.
    pub log_bytes_max: u64,
    /// What this cluster can do.
    pub features: Vec<String>,
    /// The bucket that holds results.
    pub bucket: String,
}

/// A piece of live output.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct LogLine {
    /// The task.
    pub index: u32,
    /// `stdout` or `stderr`.
    pub stream: String,
    /// What it wrote. Not always a whole line.
    pub text: String,
}
