//! What a task runs, and how, as the spec says it.
//!
//! Owns the types. Does not own substitution (`template`) or what a worker makes of it (`resolve`).

use std::borrow::Cow;
use std::collections::BTreeMap;

use schemars::{JsonSchema, Schema, SchemaGenerator, json_schema};
use serde::de::Error as _;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use serde_json::Value;

use super::scalars::{ByteSize, DurationMs, ExitCodes, Factor, MilliCpus, Signal};
use super::volumes::{VOLUMES_MAX, VolumeMount};
use crate::failure::FailureClass;

/// Most words of a command; the kernel's own limit is on their bytes.
pub const ARGS_MAX: usize = 4_096;
/// Most environment variables of a task.
pub const ENV_MAX: usize = 512;
/// Most inputs of a task: more belong in one archive.
pub const INPUTS_MAX: usize = 256;
/// Most declared output paths of a task; a directory counts as one.
pub const OUTPUTS_MAX: usize = 64;
/// Most retry rules.
pub const RULES_MAX: usize = 64;
/// Most commands of a warm-up; more belong in a script of the image.
pub const WARM_UP_MAX: usize = 16;

/// What each task runs.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct TaskSpec {
    /// The image whose files the task sees, such as "python:3.12". Needed for `container` and `microvm`, not allowed for `process`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<String>,
    /// How far the task is kept from its host. `microvm` (default): a virtual machine of its own, for code you don't trust.
    /// `container`: an OCI runtime. `process`: own session, cgroup and directory, for code you trust. Never weakened silently.
    #[serde(default)]
    pub isolation: Isolation,
    /// The command: a list of words that is run as it stands, or a text that is run by `sh -c`. In a text, substituted values
    /// are inserted as they are: pass values you don't trust in a list, or through `env`.
    pub command: Command,
    /// What is run once in the machine that all of the job's tasks begin in, before it is saved: at most 16 commands, one after the other, as
    /// root. Each task finds what they left, in memory and on the machine's disk: modules loaded, caches filled, programs compiled. They
    /// see the image and nothing else: no items, inputs, secrets or network. One that fails, or does not end within 4 minutes, fails all tasks as
    /// `input_missing`. Only with isolation `microvm`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = WARM_UP_MAX))]
    pub warm_up: Vec<WarmUpSpec>,
    /// Do processes that the warm-up left running go on in every task's machine? Default false: a command's processes end with it. Those
    /// that go on share what they drew from the random generator before, in every task. Only with `warmUp`.
    #[serde(default, skip_serializing_if = "crate::spec::is_default")]
    pub keep_processes: bool,
    /// How long the machine of an attempt that failed is kept, at most 24h, so that `volley exec JOB TASK` opens a shell in it: with the files
    /// that the command left, and without its processes. What is kept counts as memory for machines that wait; where the worker has
    /// no room the oldest goes, and the result says until when it is kept, or why not. Left out: not at all. Only with isolation `microvm`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub keep_failed: Option<DurationMs>,
    /// Environment variables. The task gets these, a minimal PATH, HOME and TMPDIR, and VOLLEY_JOB, VOLLEY_TASK_INDEX,
    /// VOLLEY_TASK_COUNT, VOLLEY_ATTEMPT, VOLLEY_ITEM (JSON) and VOLLEY_OUTPUT_DIR; names that begin with VOLLEY_ are not yours.
    /// What is written under VOLLEY_OUTPUT_DIR is kept as output files; see `outputs` for `result.json` there.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = ENV_MAX))]
    pub env: BTreeMap<String, String>,
    /// What the command reads from its standard input, at most 256 KiB. Left out: nothing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub stdin: Option<String>,
    /// The directory the command starts in, relative to the task's own directory (with an image, it may be absolute). Default: the
    /// task's own directory.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub workdir: Option<String>,
    /// What one task needs of its host.
    #[serde(default, skip_serializing_if = "crate::spec::is_default")]
    pub resources: Resources,
    /// Files that are there before the command starts, read-only; at most 256.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = INPUTS_MAX))]
    pub inputs: Vec<InputSpec>,
    /// Files or directories, relative to the task's own directory, that are kept beside everything under VOLLEY_OUTPUT_DIR; at most
    /// 64. One that isn't there at the end is left out. `result.json` under VOLLEY_OUTPUT_DIR is special: its content is the row's `result`;
    /// name it in `outputs` to have it kept as a file as well.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = OUTPUTS_MAX))]
    pub outputs: Vec<String>,
    /// Volumes that are mounted, at most 4.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = VOLUMES_MAX))]
    pub volumes: Vec<VolumeMount>,
    /// How long things may take.
    #[serde(default)]
    pub timeouts: Timeouts,
    /// What happens after a failure.
    #[serde(default)]
    pub retry: RetrySpec,
    /// What the task may reach over the network. Left out: nothing in a `microvm` or `container`; a `process` has its host's network.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub network: Option<NetworkSpec>,
    /// Secrets of the tenant that the task may use, at most 64.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64))]
    pub secrets: Vec<SecretMount>,
}

/// A command that is run before the machine is saved that tasks begin in. `${item}` and the like are not replaced: the machine is one for all
/// tasks.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct WarmUpSpec {
    /// Program and arguments, run as they stand. For a text of the shell: `["sh", "-c", "…"]`, in which `$${NAME}` is the shell's `${NAME}`.
    #[schemars(length(min = 1, max = ARGS_MAX), extend("examples" = [["python3", "-c", "import json"]]))]
    pub command: Vec<String>,
    /// Environment variables, beside a minimal PATH and HOME, and the image's. Tasks don't see them.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = ENV_MAX))]
    pub env: BTreeMap<String, String>,
}

/// How far a task is kept from its host, strongest last.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum Isolation {
    /// Completes at once without running anything: measures everything but the task.
    Null,
    /// Own session, process group, cgroup and directory on the worker's host.
    Process,
    /// An OCI runtime found on the host.
    Container,
    /// A virtual machine of its own.
    #[default]
    Microvm,
}

impl Isolation {
    /// The name used in specs.
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

/// A command: words, or a text for the shell.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Command {
    /// Run by `sh -c`.
    Shell(String),
    /// Run as it stands.
    Words(Vec<String>),
}

impl Serialize for Command {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        match self {
            Self::Shell(text) => text.serialize(serializer),
            Self::Words(words) => words.serialize(serializer),
        }
    }
}

impl<'de> Deserialize<'de> for Command {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match Value::deserialize(deserializer)? {
            Value::String(text) => Ok(Self::Shell(text)),
            Value::Array(words) => words
                .into_iter()
                .map(|word| match word {
                    Value::String(word) => Ok(word),
                    other => Err(D::Error::custom(format_args!("a word of a command is a text, not {other}"))),
                })
                .collect::<Result<_, _>>()
                .map(Self::Words),
            other => Err(D::Error::custom(format_args!("a command is a text or a list of texts, not {other}"))),
        }
    }
}

impl JsonSchema for Command {
    fn schema_name() -> Cow<'static, str> {
        "Command".into()
    }

    fn json_schema(_: &mut SchemaGenerator) -> Schema {
        json_schema!({
            "description": "A list of words that is run as it stands, or a text that is run by `sh -c`.",
            "type": ["string", "array"],
            "items": { "type": "string" },
            "minItems": 1,
            "maxItems": ARGS_MAX,
            "minLength": 1,
            "examples": [["python3", "work.py", "${item}"]],
        })
    }
}

/// What one task needs of its host. What is given is set aside for it and enforced, but for the `disk` of a `process` or `container`, which
/// is only set aside; a worker that can't enforce it doesn't take it.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Resources {
    /// CPUs: a number of cores, or thousandths as text ("500m"); at least 0.05 for a `microvm`. Left out: one is set aside, and use isn't limited.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cpus: Option<MilliCpus>,
    /// Memory, at least 4MiB. Above it the task is ended as `oom`. Left out: none is set aside, and use isn't limited (a `microvm`
    /// gets 512MiB). Its machine has 96MiB more, in steps of 64MiB, and 40MiB beside it are set aside for what runs it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory: Option<ByteSize>,
    /// Disk space for the task's own directory. A `microvm` has at least 16MiB, and no more than it asks for; for `process` and `container` it
    /// is set aside, and use isn't limited. Left out: none is set aside (a `microvm` has 2GiB).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub disk: Option<ByteSize>,
    /// Most processes and threads at once, 1 to 4194304. Left out: not limited.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 4_194_304))]
    pub pids: Option<u32>,
}

/// A file that is there before the command starts.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct InputSpec {
    /// Where it comes from: `s3://bucket/key`, `http://…`, `https://…`, or `upload:ID` for an uploaded file. For a local file,
    /// `upload:NAME` with `--upload NAME=FILE` of `volley run` and `volley submit`.
    #[schemars(extend("examples" = ["s3://bucket/key"]))]
    pub from: String,
    /// Where it goes, relative to the task's own directory.
    #[schemars(extend("examples" = ["input.json"]))]
    pub path: String,
    /// Its SHA-256 in 64 hex digits; another file is an `input_missing` failure. Left out: not checked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub sha256: Option<String>,
    /// May it be executed? Default false.
    #[serde(default)]
    pub executable: bool,
}

/// How long things may take.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Timeouts {
    /// How long the job's tasks may wait for their first start (`queue_timeout`, an infra failure). Left out: no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub queue: Option<DurationMs>,
    /// How long inputs and machine may take (`start_timeout`, an infra failure). Default "5m".
    #[serde(default = "start_default")]
    pub start: DurationMs,
    /// How long the command may run (`run_timeout`). Default "1h".
    #[serde(default = "run_default")]
    pub run: DurationMs,
    /// How long a command that is being stopped has between SIGTERM and SIGKILL, at most 10m. Default "10s".
    #[serde(default = "grace_default")]
    pub grace: DurationMs,
}

fn start_default() -> DurationMs {
    DurationMs(5 * 60_000)
}

fn run_default() -> DurationMs {
    DurationMs(60 * 60_000)
}

fn grace_default() -> DurationMs {
    DurationMs(10_000)
}

impl Default for Timeouts {
    fn default() -> Self {
        Self { queue: None, start: start_default(), run: run_default(), grace: grace_default() }
    }
}

/// What happens after a failure.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct RetrySpec {
    /// How often a task may fail by itself (exit code, signal, oom, run timeout) before it has failed: 1 to 100 tries in all.
    /// Default 1, no second try.
    #[serde(default = "attempts_default")]
    #[schemars(range(min = 1, max = 100))]
    pub attempts: u16,
    /// How many infra failures (host lost, storage failed, …) a task may meet beside that, 0 to 1000. Default 10.
    #[serde(default = "infra_attempts_default")]
    #[schemars(range(min = 0, max = 1000))]
    pub infra_attempts: u16,
    /// How long a task waits before its next try.
    #[serde(default)]
    pub backoff: BackoffSpec,
    /// Rules, looked through in order; the first that matches decides. At most 64.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = RULES_MAX))]
    pub rules: Vec<RetryRuleSpec>,
}

fn attempts_default() -> u16 {
    1
}

fn infra_attempts_default() -> u16 {
    10
}

impl Default for RetrySpec {
    fn default() -> Self {
        Self { attempts: attempts_default(), infra_attempts: infra_attempts_default(), backoff: BackoffSpec::default(), rules: Vec::new() }
    }
}

/// Exponential backoff with full jitter: the wait is anything between 0 and a bound that grows with each failure.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct BackoffSpec {
    /// The first bound. Default "1s".
    #[serde(default = "initial_default")]
    pub initial: DurationMs,
    /// What the bound is multiplied with after each failure, 1 to 100. Default 2.
    #[serde(default = "factor_default")]
    pub factor: Factor,
    /// The bound never passes this, at most 1d. Default "1m".
    #[serde(default = "cap_default")]
    pub cap: DurationMs,
}

fn initial_default() -> DurationMs {
    DurationMs(1_000)
}

fn factor_default() -> Factor {
    Factor(2_000)
}

fn cap_default() -> DurationMs {
    DurationMs(60_000)
}

impl Default for BackoffSpec {
    fn default() -> Self {
        Self { initial: initial_default(), factor: factor_default(), cap: cap_default() }
    }
}

/// One retry rule.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct RetryRuleSpec {
    /// Which failures it is about.
    #[serde(rename = "match")]
    #[schemars(extend("examples" = [{ "exitCodes": [75] }]))]
    pub matches: RetryMatch,
    /// `retry` the task while it has attempts left, or `fail` it at once.
    pub action: RetryAction,
}

/// Which failures a rule is about: all parts that are given must fit, each by any of its values.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct RetryMatch {
    /// Failure classes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 13))]
    pub classes: Vec<FailureClass>,
    /// Exit codes from 1 to 255, or ranges such as "64-78".
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64))]
    pub exit_codes: Vec<ExitCodes>,
    /// Signals by name or number.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 64))]
    pub signals: Vec<Signal>,
}

/// What a rule does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum RetryAction {
    /// Try again while attempts are left.
    Retry,
    /// The task has failed.
    Fail,
}

/// What a task may reach over the network.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct NetworkSpec {
    /// Hosts it may connect to; an empty list allows none. At most 256.
    #[schemars(length(max = 256), extend("examples" = [[]]))]
    pub allow: Vec<EgressRule>,
}

/// Hosts a task may connect to.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct EgressRule {
    /// A host name, or `*.` and a domain for all below it.
    #[schemars(extend("examples" = ["pypi.org"]))]
    pub host: String,
    /// TCP ports. Default 443.
    #[serde(default = "ports_default")]
    #[schemars(length(min = 1, max = 16))]
    pub ports: Vec<u16>,
}

fn ports_default() -> Vec<u16> {
    vec![443]
}

/// A secret a task may use: exactly one of `env` and `path` says where it finds it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct SecretMount {
    /// The secret's name.
    #[schemars(extend("examples" = ["api-key"]))]
    pub name: String,
    /// The environment variable that gets it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub env: Option<String>,
    /// The file that gets it, an absolute path.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
}
