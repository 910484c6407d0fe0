//! What a worker says of its attempts.
//!
//! Owns the report and what it carries inline. Does not own outputs and logs themselves: those are objects under the attempt's prefix.

use minicbor::bytes::ByteVec;
use minicbor::{Decode, Encode};
use serde::Serialize;

use crate::failure::FailureClass;
use crate::ids::{AttemptName, Incarnation, WorkerId};
use crate::wire::plan::Isolation;
use crate::wire::volume::{Kept, Left};

/// Largest report message, in bytes (DESIGN §5).
pub const REPORT_BYTES_MAX: usize = 256 * 1024;
/// Largest result that rides inline, in bytes.
pub const RESULT_BYTES_MAX: usize = 4 * 1024;
/// Largest tail of stdout or stderr that rides inline, in bytes each.
pub const TAIL_BYTES_MAX: usize = 2 * 1024;
/// Longest message of a failure, in bytes.
pub const MESSAGE_BYTES_MAX: usize = 2 * 1024;

/// Ends of attempts, in the order they came.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode, Serialize)]
#[cbor(map)]
pub struct Report {
    /// Who ran them.
    #[n(0)]
    pub worker: WorkerId,
    /// In which life.
    #[n(1)]
    pub incarnation: Incarnation,
    /// Counts the worker's reports in this life, from 1.
    #[n(2)]
    pub number: u64,
    /// The ends.
    #[n(3)]
    pub ends: Vec<AttemptEnd>,
}

/// How an attempt ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode, Serialize)]
pub enum Ending {
    /// The command ended with 0 and everything it left is safe.
    #[n(0)]
    Succeeded,
    /// It failed.
    #[n(1)]
    Failed(#[n(0)] FailureClass),
    /// It never began and was handed back (cancel, pause, fail-fast, drain): no budget is charged and no row is written.
    #[n(2)]
    Returned,
}

/// The end of one attempt.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode, Serialize)]
#[cbor(map)]
pub struct AttemptEnd {
    /// Which.
    #[n(0)]
    pub name: AttemptName,
    /// How.
    #[n(1)]
    pub ending: Ending,
    /// The exit code, or the number of the signal.
    #[n(2)]
    pub code: Option<i32>,
    /// What happened, where, and what to do, for people. At most [`MESSAGE_BYTES_MAX`].
    #[n(3)]
    pub message: Option<String>,
    /// Under which isolation it really ran.
    #[n(4)]
    pub isolation: Isolation,
    /// How long each part took.
    #[n(5)]
    pub timing: Timing,
    /// What it used.
    #[n(6)]
    pub usage: Option<Usage>,
    /// `result.json`, when it is small.
    #[n(7)]
    #[serde(serialize_with = "super::text_or_none")]
    pub result: Option<ByteVec>,
    /// Stdout.
    #[n(8)]
    pub stdout: Option<Stream>,
    /// Stderr.
    #[n(9)]
    pub stderr: Option<Stream>,
    /// Output files, when there are any.
    #[n(10)]
    pub outputs: Option<Outputs>,
    /// True: whatever its class says of others, it says nothing of the worker.
    #[n(11)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub blameless: Option<bool>,
    /// What kept it from beginning, where more is known than its class says.
    #[n(12)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cause: Option<Cause>,
    /// What it left in volumes that it wrote. Since level 7.
    #[n(13)]
    #[cbor(default)]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub volumes: Vec<Left>,
    /// Clones that it keeps. Since level 7.
    #[n(14)]
    #[cbor(default)]
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub kept: Vec<Kept>,
}

/// What kept an attempt from beginning. What can be done about it depends on this, and not on the class alone.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode, Serialize)]
pub enum Cause {
    /// The worker has no image of this name (`image::key`).
    #[n(0)]
    NoImage(#[n(0)] u64),
    /// What the task calls its image can be no image's name, or it names none.
    #[n(1)]
    NoName,
    /// A command of the warm-up failed.
    #[n(2)]
    WarmUp,
    /// The template of its machine could not be built for another reason.
    #[n(3)]
    Build,
    /// Its machine is larger than all the room that the worker has for templates.
    #[n(4)]
    TooLarge,
}

impl AttemptEnd {
    /// An end of which nothing more is known.
    #[must_use]
    pub fn bare(name: AttemptName, ending: Ending, isolation: Isolation) -> Self {
        Self {
            name,
            ending,
            code: None,
            message: None,
            isolation,
            timing: Timing::default(),
            usage: None,
            result: None,
            stdout: None,
            stderr: None,
            outputs: None,
            blameless: None,
            cause: None,
            volumes: Vec::new(),
            kept: Vec::new(),
        }
    }
}

/// Milliseconds of each part of an attempt, by the worker's monotonic clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Encode, Decode, Serialize)]
#[cbor(map)]
pub struct Timing {
    /// From receipt to a free slot.
    #[n(0)]
    pub wait_ms: u32,
    /// Inputs and machine.
    #[n(1)]
    pub prepare_ms: u32,
    /// The command.
    #[n(2)]
    pub run_ms: u32,
    /// Outputs and logs.
    #[n(3)]
    pub persist_ms: u32,
}

/// What the command used.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Encode, Decode, Serialize)]
#[cbor(map)]
pub struct Usage {
    /// CPU time, user and system, in microseconds.
    #[n(0)]
    pub cpu_us: u64,
    /// Most memory resident at once, in bytes.
    #[n(1)]
    pub memory_bytes_max: u64,
}

/// One captured stream.
#[derive(Debug, Clone, PartialEq, Eq, Encode, Decode, Serialize)]
#[cbor(map)]
pub struct Stream {
    /// All bytes the task wrote, also those that were not kept.
    #[n(0)]
    pub bytes: u64,
    /// The last bytes, at most [`TAIL_BYTES_MAX`].
    #[n(1)]
    #[serde(serialize_with = "super::text")]
    pub tail: ByteVec,
    /// Is the kept stream an object of its own (`keys::attempt_log`)? Else the tail is all of it.
    #[n(2)]
    pub stored: bool,
    /// Did it pass the size cap, so that its middle is missing?
    #[n(3)]
    pub truncated: bool,
}

/// Output files of an attempt; the list is an object (`keys::attempt_manifest`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Encode, Decode, Serialize)]
#[cbor(map)]
pub struct Outputs {
    /// How many.
    #[n(0)]
    pub files: u32,
    /// Their bytes.
    #[n(1)]
    pub bytes: u64,
}
