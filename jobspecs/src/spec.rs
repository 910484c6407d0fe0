//! The job spec, `volley/v1`, as its JSON says it.
//!
//! Owns the types, their defaults and the descriptions that become the JSON Schema. Does not own reading (`parse`), what is
//! allowed (`validate`) or what follows from it (`expand`, `template`, `plan`). Every description here is shown in editors.

pub mod items;
pub mod scalars;
pub mod task;
pub mod volumes;

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

pub use items::{CsvSource, FileSource, Items, Matrix, Range, ResultsSource};
pub use scalars::{ByteSize, DurationMs, ExitCodes, Factor, FailureLimit, Keep, MilliCpus, RateSpan, Signal, TaskRate};
pub use task::{
    BackoffSpec, Command, EgressRule, InputSpec, Isolation, NetworkSpec, Resources, RetryAction, RetryMatch, RetryRuleSpec, RetrySpec,
    SecretMount, TaskSpec, Timeouts, WarmUpSpec,
};
pub use volumes::{Access, FileSystem, Flush, KeepClone, KeepWhen, VolumeMount};

/// Most labels of a job, and of what it asks of workers: they are held in memory for every active job.
pub const LABELS_MAX: usize = 32;
/// Most stages of a job: a pipeline with more is several jobs.
pub const STAGES_MAX: usize = 64;

/// What `ids::check_name` takes, for editors.
const NAME_PATTERN: &str = "^[A-Za-z0-9][A-Za-z0-9_-]{0,63}$";

/// The spec versions this build reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
pub enum Version {
    /// The first version.
    #[serde(rename = "volley/v1")]
    V1,
}

/// A Volley job: one JSON document that becomes up to ten million tasks.
///
/// In the text fields of `task`, `${item}`, `${item.field}`, `${item.field.nested}`, `${index}`, `${job.id}` and `${attempt}`
/// stand for the task's own values; `$${` writes a plain `${`. Leaving a field out and writing `null` mean the same.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[schemars(extend("anyOf" = [items::given("task"), items::given("stages")]))]
pub struct JobSpec {
    /// The version of this document: `volley/v1`.
    pub version: Version,
    /// The job's name, for people: 1 to 64 of a-z A-Z 0-9 _ -, beginning with a letter or digit. Names needn't be unique.
    #[schemars(length(min = 1, max = 64), extend("pattern" = NAME_PATTERN, "examples" = ["nightly-report"]))]
    pub name: String,
    /// Labels to find the job by: at most 32, keys of 1 to 64 of a-z A-Z 0-9 . _ / -, values of at most 256 bytes.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = LABELS_MAX))]
    pub labels: BTreeMap<String, String>,
    /// What the job fans out over: one task per item. Left out: one task, whose item is 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub items: Option<Items>,
    /// What each task runs. Needed unless `stages` is given.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub task: Option<TaskSpec>,
    /// Limits of the job as a whole.
    #[serde(default, skip_serializing_if = "is_default")]
    pub limits: Limits,
    /// Priority class, -100 to 100; a higher one goes first. Default 0.
    #[serde(default)]
    #[schemars(range(min = -100, max = 100))]
    pub priority: i16,
    /// The job's share among the jobs of one tenant and priority class, 1 to 10000. Default 100.
    #[serde(default = "weight_default")]
    #[schemars(range(min = 1, max = 10_000))]
    pub weight: u32,
    /// Stages that depend on each other, at most 64. Instead of `items` and `task`.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = STAGES_MAX))]
    pub stages: Vec<StageSpec>,
    /// When the job is to be started again and again.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub schedule: Option<Schedule>,
    /// Whom to tell about the job, at most 16.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = 16))]
    pub notify: Vec<Notify>,
    /// How long what the job leaves behind is kept.
    #[serde(default)]
    pub retention: RetentionSpec,
    /// Which workers may run its tasks.
    #[serde(default, skip_serializing_if = "is_default")]
    pub placement: Placement,
}

pub(crate) fn is_default<T: Default + PartialEq>(value: &T) -> bool {
    *value == T::default()
}

fn weight_default() -> u32 {
    100
}

/// Limits of a job as a whole.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Limits {
    /// Most tasks that run at once, 1 to 1000000. Left out: as many as the workers have room for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 1_000_000))]
    pub concurrency: Option<u32>,
    /// Most task starts per second, minute or hour, such as "100/s". Left out: no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rate: Option<TaskRate>,
    /// How many tasks may fail for good: the job is given up when one more does. A count such as 10, or a share of all tasks
    /// such as "5%"; 0 gives up at the first. Infra failures don't count. Left out: every task is run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub max_failures: Option<FailureLimit>,
    /// What giving up does with tasks that run: `soft` (default) lets them end, `now` stops them. Only with `maxFailures`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fail_fast: Option<FailFastMode>,
    /// How long the whole job may take from its submit; what hasn't ended by then is cancelled. It holds for the first
    /// round: what is rerun has no deadline. Left out: no limit.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub deadline: Option<DurationMs>,
}

/// What giving a job up does with the tasks that run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum FailFastMode {
    /// They run to their end; no new one starts.
    Soft,
    /// They are stopped.
    Now,
}

/// How long what a job leaves behind is kept.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct RetentionSpec {
    /// The job with its results, logs and outputs, counted from its end. A duration of at least 1m, or "forever". Default "30d".
    #[serde(default = "keep_job_default")]
    pub job: Keep,
    /// Outputs and logs of attempts that failed, counted from the job's end; never longer than `job`. Default "7d".
    #[serde(default = "keep_failed_default")]
    pub failed_outputs: Keep,
}

const DAY_MS: u64 = 24 * 60 * 60 * 1000;

fn keep_job_default() -> Keep {
    Keep::For(DurationMs(30 * DAY_MS))
}

fn keep_failed_default() -> Keep {
    Keep::For(DurationMs(7 * DAY_MS))
}

impl Default for RetentionSpec {
    fn default() -> Self {
        Self { job: keep_job_default(), failed_outputs: keep_failed_default() }
    }
}

/// Which workers may run the tasks.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Placement {
    /// Labels a worker must carry, each with exactly this value; at most 32.
    #[serde(default, skip_serializing_if = "BTreeMap::is_empty")]
    #[schemars(extend("maxProperties" = LABELS_MAX))]
    pub labels: BTreeMap<String, String>,
}

/// One stage of a job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct StageSpec {
    /// The stage's name, unique in the job: 1 to 64 of a-z A-Z 0-9 _ -, beginning with a letter or digit.
    #[schemars(length(min = 1, max = 64), extend("pattern" = NAME_PATTERN, "examples" = ["extract"]))]
    pub name: String,
    /// What must have succeeded before. Left out: nothing.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = STAGES_MAX))]
    pub needs: Vec<StageNeed>,
    /// What the stage fans out over. Left out: one task, whose item is 0.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub items: Option<Items>,
    /// What each task of the stage runs.
    pub task: TaskSpec,
    /// Limits of the stage; those of the job hold beside them.
    #[serde(default, skip_serializing_if = "is_default")]
    pub limits: Limits,
}

/// What a stage waits for.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct StageNeed {
    /// The name of the stage.
    #[schemars(extend("examples" = ["extract"]))]
    pub stage: String,
    /// `stage` (default): all of its tasks. `index`: task i waits for task i only; both stages have equally many.
    #[serde(default)]
    pub by: NeedBy,
}

/// How a stage waits for another.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum NeedBy {
    /// For all of its tasks.
    #[default]
    Stage,
    /// Task i for task i.
    Index,
}

/// When a job is started again and again.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Schedule {
    /// A cron expression of five fields: minute, hour, day of month, month, day of week.
    #[schemars(extend("examples" = ["0 2 * * *"]))]
    pub cron: String,
    /// An IANA time zone. Default "UTC".
    #[serde(default = "time_zone_default")]
    pub time_zone: String,
    /// What happens when the last run still goes on: `skip` (default) leaves the new one out, `queue` starts it after, `replace`
    /// cancels the old one.
    #[serde(default)]
    pub overlap: Overlap,
}

fn time_zone_default() -> String {
    "UTC".to_owned()
}

/// What a schedule does when the last run still goes on.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum Overlap {
    /// The new run is left out.
    #[default]
    Skip,
    /// The new run starts after the old one.
    Queue,
    /// The old run is cancelled.
    Replace,
}

/// Whom to tell about a job.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Notify {
    /// An http or https URL that gets a POST with the job as JSON.
    #[schemars(extend("examples" = ["https://example.org/hooks/volley"]))]
    pub webhook: String,
    /// When: any of `succeeded`, `failed`, `cancelled`. Default: all three.
    #[serde(default = "notify_default")]
    #[schemars(length(min = 1, max = 3))]
    pub on: Vec<NotifyOn>,
}

fn notify_default() -> Vec<NotifyOn> {
    vec![NotifyOn::Succeeded, NotifyOn::Failed, NotifyOn::Cancelled]
}

/// Ends of a job that are told.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase")]
pub enum NotifyOn {
    /// Every task succeeded.
    Succeeded,
    /// Some tasks failed.
    Failed,
    /// It was cancelled.
    Cancelled,
}
