//! From a job spec to a job that can run: everything that takes more than one field, or the cluster, to judge.
//!
//! Owns what a cluster can do (`Features`), the rules of a whole job and of its stages, and `ValidJob`, which only this file makes.
//! Does not own the form of single fields (`check`).

mod items;
mod task;
mod volumes;

use std::collections::{BTreeMap, BTreeSet};

use serde_json::Value;

use crate::expand::ItemPlan;
use crate::ids::check_name;
use crate::parse::parse_and_validate;
use crate::problem::{Problem, Problems, join, list, suggest};
use crate::resolve::{ResolveError, ResolvedTask, TaskTemplate, is_http_url};
use crate::spec::{Isolation, Items, JobSpec, Keep, Limits, NeedBy, StageNeed, TaskSpec};
use crate::template::Values;

/// Longest label, in bytes.
const LABEL_BYTES_MAX: usize = 256;
/// Shortest time a job is kept, in milliseconds: a shorter one would remove results before anybody can read them.
const KEEP_MS_MIN: u64 = 60_000;

/// What a cluster can do. What it can't is refused, never ignored.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Features {
    /// Isolation tiers that some worker offers.
    pub isolation: BTreeSet<Isolation>,
    /// Why workers that were to offer a tier can't; for tiers that none offers.
    pub why_not: BTreeMap<Isolation, String>,
    /// Volumes.
    pub volumes: bool,
    /// Several stages, and `items.results`.
    pub stages: bool,
    /// Jobs that start by themselves.
    pub schedule: bool,
    /// Webhooks.
    pub notify: bool,
    /// Secrets.
    pub secrets: bool,
    /// Egress rules.
    pub network: bool,
}

impl Features {
    /// A cluster with these isolation tiers and nothing else.
    #[must_use]
    pub fn with_isolation(tiers: &[Isolation]) -> Self {
        Self {
            isolation: tiers.iter().copied().collect(),
            why_not: BTreeMap::new(),
            volumes: false,
            stages: false,
            schedule: false,
            notify: false,
            secrets: false,
            network: false,
        }
    }

    /// What clusters of this version of Volley can do.
    #[must_use]
    pub fn current() -> Self {
        Self::with_isolation(&[Isolation::Null, Isolation::Process, Isolation::Container, Isolation::Microvm])
    }

    /// Everything a spec can say. For reading a spec again that was accepted before, and for tools without a cluster.
    #[must_use]
    pub fn all() -> Self {
        Self {
            isolation: [Isolation::Null, Isolation::Process, Isolation::Container, Isolation::Microvm].into(),
            why_not: BTreeMap::new(),
            volumes: true,
            stages: true,
            schedule: true,
            notify: true,
            secrets: true,
            network: true,
        }
    }
}

/// A job without problems.
#[derive(Debug, Clone, PartialEq)]
pub struct ValidJob {
    spec: JobSpec,
    stages: Vec<ValidStage>,
}

/// One stage of a valid job; a job without `stages` has one, called `main`.
#[derive(Debug, Clone, PartialEq)]
pub struct ValidStage {
    /// Its name.
    pub name: String,
    /// What it waits for.
    pub needs: Vec<StageNeed>,
    /// What it fans out over.
    pub items: ItemPlan,
    /// What its tasks run, ready to be resolved.
    pub template: TaskTemplate,
    /// Its own limits; empty for the only stage of a job, whose limits are the job's.
    pub limits: Limits,
}

impl ValidJob {
    /// Reads the canonical JSON of a job that was accepted before. What the cluster can do isn't asked again.
    ///
    /// # Errors
    /// The problems, when it is no such thing.
    pub fn from_json(bytes: &[u8]) -> Result<Self, Problems> {
        parse_and_validate(bytes, &Features::all())
    }

    /// The canonical JSON: sorted fields, no spaces, defaults written out. Equal jobs have equal bytes.
    #[must_use]
    pub fn to_json(&self) -> String {
        // A Value sorts its fields; a spec has no maps with other keys than text, so neither step can fail.
        serde_json::to_value(&self.spec).map(|value| value.to_string()).unwrap_or_default()
    }

    /// blake3 of the canonical JSON, in hex.
    #[must_use]
    pub fn spec_hash(&self) -> String {
        blake3::hash(self.to_json().as_bytes()).to_hex().to_string()
    }

    /// The spec.
    #[must_use]
    pub fn spec(&self) -> &JobSpec {
        &self.spec
    }

    /// The stages, at least one, each after what it needs.
    #[must_use]
    pub fn stages(&self) -> &[ValidStage] {
        &self.stages
    }

    /// The first stage: the whole job, unless it has several.
    #[must_use]
    pub fn main(&self) -> &ValidStage {
        // `conclude` makes no job without a stage.
        &self.stages[0]
    }

    /// What each task of the first stage runs.
    #[must_use]
    pub fn task(&self) -> &TaskSpec {
        self.main().template.task()
    }

    /// What the first stage fans out over.
    #[must_use]
    pub fn items(&self) -> &ItemPlan {
        &self.main().items
    }

    /// How many tasks the first stage has. `None`: that is known only once the items' file is cut.
    #[must_use]
    pub fn tasks(&self) -> Option<u32> {
        self.items().count().and_then(|count| u32::try_from(count).ok())
    }

    /// What attempt `attempt` of task `index` of the first stage runs.
    ///
    /// # Errors
    /// [`ResolveError`] when the item doesn't have what the task uses, or leads it somewhere it may not go.
    pub fn resolve(&self, item: &Value, index: u32, job: &str, attempt: u32) -> Result<ResolvedTask, ResolveError> {
        self.main().template.resolve(&Values { item, index, job, attempt })
    }
}

/// Validates a spec that a program made. It is read again from its own JSON, so that what was never text meets every rule that text
/// does.
///
/// # Errors
/// Every problem.
pub fn validate(spec: &JobSpec, features: &Features) -> Result<ValidJob, Problems> {
    match serde_json::to_vec(spec) {
        Ok(bytes) => parse_and_validate(&bytes, features),
        Err(error) => Err(Problem::new("$", error.to_string()).into()),
    }
}

/// Makes the job of a spec that has no problems.
pub(crate) fn conclude(spec: JobSpec, problems: Vec<Problem>) -> Result<ValidJob, Problems> {
    if !problems.is_empty() {
        return Err(Problems(problems));
    }
    let stage = |name: &str, needs: &[StageNeed], items: Option<&Items>, task: &TaskSpec, limits: &Limits| {
        let items = items.map_or_else(|| Ok(ItemPlan::single()), ItemPlan::new);
        match (items, TaskTemplate::compile(task)) {
            (Ok(items), Ok(template)) => {
                Some(ValidStage { name: name.to_owned(), needs: needs.to_vec(), items, template, limits: limits.clone() })
            }
            _ => None,
        }
    };
    let stages: Option<Vec<ValidStage>> = match &spec.task {
        Some(task) => stage(crate::keys::STAGE, &[], spec.items.as_ref(), task, &Limits::default()).map(|only| vec![only]),
        None => {
            let order = stage_order(&spec).unwrap_or_default();
            let stages = order.iter().filter_map(|at| spec.stages.get(*at));
            stages.map(|s| stage(&s.name, &s.needs, s.items.as_ref(), &s.task, &s.limits)).collect()
        }
    };
    match stages {
        Some(stages) if !stages.is_empty() => Ok(ValidJob { spec, stages }),
        // `judge` finds everything that could lead here.
        _ => Err(Problem::new("$", "the job has no task to run").into()),
    }
}

/// Everything that is wrong with a spec whose fields fit the schema.
pub(crate) fn judge(spec: &JobSpec, features: &Features) -> Vec<Problem> {
    let mut problems = Vec::new();
    let out = &mut problems;
    name("$.name", &spec.name, out);
    labels("$.labels", &spec.labels, out);
    labels("$.placement.labels", &spec.placement.labels, out);
    work(spec, features, out);
    limits("$.limits", &spec.limits, out);
    for (name, keep) in [("job", spec.retention.job), ("failedOutputs", spec.retention.failed_outputs)] {
        if let Keep::For(duration) = keep
            && duration.0 < KEEP_MS_MIN
        {
            let problem = Problem::new(format!("$.retention.{name}"), "too short").found(keep);
            out.push(problem.allowed("at least 1m, or \"forever\""));
        }
    }
    schedule(spec, features, out);
    notify(spec, features, out);
    problems
}

fn name(path: &str, name: &str, out: &mut Vec<Problem>) {
    if check_name(name).is_err() {
        let problem = Problem::new(path, "not a name").found(format!("{name:?}"));
        out.push(problem.allowed("1 to 64 of a-z A-Z 0-9 _ -, beginning with a letter or digit"));
    }
}

/// A problem of something the cluster can't do.
pub(crate) fn unavailable(path: impl Into<String>, what: &str) -> Problem {
    Problem::new(path, format!("not available on this cluster: {what}"))
}

fn labels(path: &str, labels: &BTreeMap<String, String>, out: &mut Vec<Problem>) {
    for (key, value) in labels {
        let plain = key.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'.' | b'_' | b'/' | b'-'));
        if key.is_empty() || key.len() > crate::ids::NAME_LEN_MAX || !plain {
            let problem = Problem::new(join(path, key), "not a label's name");
            out.push(problem.allowed("1 to 64 of a-z A-Z 0-9 . _ / -"));
        }
        if value.len() > LABEL_BYTES_MAX || value.chars().any(char::is_control) {
            let problem = Problem::new(join(path, key), "not a label's value");
            out.push(problem.allowed(format!("at most {LABEL_BYTES_MAX} bytes without control characters")));
        }
    }
}

/// Items and tasks, of the job or of its stages.
fn work(spec: &JobSpec, features: &Features, out: &mut Vec<Problem>) {
    if spec.stages.is_empty() {
        match &spec.task {
            Some(task) => {
                items::judge("$.items", spec.items.as_ref(), features, out);
                task::judge("$.task", task, spec.items.is_some(), features, out);
                items::judge_uses("$.items", spec.items.as_ref(), "$.task", task, out);
            }
            None => {
                items::judge("$.items", spec.items.as_ref(), features, out);
                let problem = Problem::new("$.task", "missing").depends("$.stages");
                out.push(problem.allowed("an object with at least \"command\"; a job of several steps has \"stages\" instead"));
            }
        }
        return;
    }
    if !features.stages {
        out.push(unavailable("$.stages", "stages"));
    }
    for (name, there) in [("items", spec.items.is_some()), ("task", spec.task.is_some())] {
        if there {
            let problem = Problem::new(format!("$.{name}"), "can't stand beside \"stages\"");
            out.push(problem.hint(format!("move it into a stage, or leave \"stages\" out to have one \"{name}\" for the whole job")));
        }
    }
    let names: BTreeSet<&str> = spec.stages.iter().map(|stage| stage.name.as_str()).collect();
    let mut seen = BTreeSet::new();
    for (index, stage) in spec.stages.iter().enumerate() {
        let path = format!("$.stages[{index}]");
        name(&format!("{path}.name"), &stage.name, out);
        if !seen.insert(stage.name.as_str()) {
            out.push(Problem::new(format!("{path}.name"), "another stage has this name").found(format!("{:?}", stage.name)));
        }
        let (items_path, task_path) = (format!("{path}.items"), format!("{path}.task"));
        items::judge(&items_path, stage.items.as_ref(), features, out);
        task::judge(&task_path, &stage.task, stage.items.is_some(), features, out);
        items::judge_uses(&items_path, stage.items.as_ref(), &task_path, &stage.task, out);
        limits(&format!("{path}.limits"), &stage.limits, out);
        needs(spec, index, &names, out);
    }
    if stage_order(spec).is_none() {
        out.push(Problem::new("$.stages", "the stages wait for each other in a circle").hint("remove one of the \"needs\""));
    }
}

/// What one stage needs.
fn needs(spec: &JobSpec, index: usize, names: &BTreeSet<&str>, out: &mut Vec<Problem>) {
    let Some(stage) = spec.stages.get(index) else { return };
    let path = format!("$.stages[{index}]");
    let unknown = |path: String, name: &str| {
        let problem = Problem::new(path, "no such stage").found(format!("{name:?}")).allowed(list(names.iter().copied()));
        match suggest(name, names.iter().copied()) {
            Some(meant) => problem.hint(format!("did you mean \"{meant}\"?")),
            None => problem,
        }
    };
    for (at, need) in stage.needs.iter().enumerate() {
        let place = format!("{path}.needs[{at}].stage");
        let Some(other) = spec.stages.iter().find(|other| other.name == need.stage) else {
            out.push(unknown(place, &need.stage));
            continue;
        };
        let count = |items: &Option<Items>| items.as_ref().map_or(Some(1), |items| ItemPlan::new(items).ok()?.count());
        if let (NeedBy::Index, Some(mine), Some(theirs)) = (need.by, count(&stage.items), count(&other.items))
            && mine != theirs
        {
            let message = format!("index by index takes equally many tasks; this stage has {mine}, \"{}\" has {theirs}", need.stage);
            out.push(Problem::new(format!("{path}.needs[{at}].by"), message));
        }
    }
    if let Some(results) = stage.items.as_ref().and_then(|items| items.results.as_ref()) {
        let place = format!("{path}.items.results.stage");
        if !names.contains(results.stage.as_str()) {
            out.push(unknown(place, &results.stage));
        } else if !stage.needs.iter().any(|need| need.stage == results.stage && need.by == NeedBy::Stage) {
            let hint = format!("add {{\"stage\": \"{}\"}} to this stage's \"needs\"", results.stage);
            out.push(Problem::new(place, "its results are used, but the stage isn't waited for").hint(hint));
        }
    }
}

/// The stages in an order in which each comes after what it needs; `None` when they wait in a circle.
fn stage_order(spec: &JobSpec) -> Option<Vec<usize>> {
    let at = |name: &str| spec.stages.iter().position(|stage| stage.name == name);
    let mut order: Vec<usize> = Vec::new();
    while order.len() < spec.stages.len() {
        let ready = spec.stages.iter().enumerate().find(|(index, stage)| {
            let done = |need: &StageNeed| at(&need.stage).is_none_or(|needed| order.contains(&needed));
            !order.contains(index) && stage.needs.iter().all(done)
        });
        order.push(ready?.0);
    }
    Some(order)
}

fn limits(path: &str, limits: &Limits, out: &mut Vec<Problem>) {
    if limits.fail_fast.is_some() && limits.max_failures.is_none() {
        let problem = Problem::new(format!("{path}.failFast"), "has no effect without \"maxFailures\"");
        out.push(problem.hint("add \"maxFailures\": 0 to give up at the first failure").depends(format!("{path}.maxFailures")));
    }
    if limits.deadline.is_some_and(|deadline| deadline.0 == 0) {
        out.push(Problem::new(format!("{path}.deadline"), "too short").allowed("at least 1ms"));
    }
}

fn schedule(spec: &JobSpec, features: &Features, out: &mut Vec<Problem>) {
    let Some(schedule) = &spec.schedule else { return };
    if !features.schedule {
        out.push(unavailable("$.schedule", "schedules"));
    }
    let fields: Vec<&str> = schedule.cron.split_ascii_whitespace().collect();
    let known = |c: char| c.is_ascii_alphanumeric() || matches!(c, '*' | ',' | '-' | '/' | '?' | '#');
    if fields.len() != 5 || !fields.iter().all(|field| field.chars().all(known)) {
        let problem = Problem::new("$.schedule.cron", "not a cron expression").found(format!("{:?}", schedule.cron));
        out.push(problem.allowed("five fields: minute, hour, day of month, month, day of week, such as \"0 2 * * *\""));
    }
    let zone = &schedule.time_zone;
    let plain = zone.chars().all(|c| c.is_ascii_alphanumeric() || matches!(c, '/' | '_' | '-' | '+'));
    if zone.is_empty() || zone.len() > 64 || !plain {
        let problem = Problem::new("$.schedule.timeZone", "not a time zone").found(format!("{zone:?}"));
        out.push(problem.allowed("an IANA name such as \"Europe/Vienna\" or \"UTC\""));
    }
}

fn notify(spec: &JobSpec, features: &Features, out: &mut Vec<Problem>) {
    if !spec.notify.is_empty() && !features.notify {
        out.push(unavailable("$.notify", "webhooks"));
    }
    for (index, notify) in spec.notify.iter().enumerate() {
        if !is_http_url(&notify.webhook) {
            let problem = Problem::new(format!("$.notify[{index}].webhook"), "not a URL").found(format!("{:?}", notify.webhook));
            out.push(problem.allowed("an http:// or https:// URL"));
        }
    }
}
