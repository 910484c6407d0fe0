//! Rules of items: exactly one kind, how many, how large, and whether what a task uses of them is there.

use std::collections::BTreeSet;

use serde_json::Value;

use super::{Features, unavailable};
use crate::expand::{ITEM_BYTES_MAX, ItemPlan, MatrixError, PlanError, TASKS_MAX};
use crate::ids::check_name;
use crate::problem::{Problem, list, shorten, suggest};
use crate::resolve::{TaskTemplate, s3_uri};
use crate::spec::{Items, Matrix, TaskSpec};
use crate::template::{list_index, look_up};

/// Most different `${item.…}` paths that are looked up in every item at submit; beyond them a missing field is found when the task
/// starts. It bounds the work of one submit.
const PATHS_CHECKED_MAX: usize = 64;

/// The items themselves.
pub(super) fn judge(path: &str, items: Option<&Items>, features: &Features, out: &mut Vec<Problem>) {
    let Some(items) = items else { return };
    let kinds = kinds(items);
    if kinds.len() != 1 {
        let found = if kinds.is_empty() { "none".to_owned() } else { kinds.join(", ") };
        let problem = Problem::new(path, "exactly one kind of items is needed").found(found);
        out.push(problem.allowed("one of inline, count, range, matrix, jsonl, csv, lines, results"));
        // Whichever of them is left, it must be right itself.
        judge_file(path, items, out);
        return;
    }
    if items.results.is_some() && !features.stages {
        out.push(unavailable(format!("{path}.results"), "stages"));
    }
    judge_file(path, items, out);
    if let Some(matrix) = &items.matrix {
        judge_matrix(path, matrix, out);
    }
    match ItemPlan::new(items) {
        Ok(plan) => {
            if let Some(count) = plan.count().filter(|count| *count > TASKS_MAX) {
                let problem = Problem::new(path, "too many tasks").found(count).allowed(format!("at most {TASKS_MAX}"));
                let enough = count.saturating_mul(u64::from(items.chunk.unwrap_or(1))).div_ceil(TASKS_MAX);
                out.push(problem.hint(format!("\"chunk\": {enough} gives each task several items")));
            }
        }
        Err(error) => out.push(plan_problem(path, items, &error)),
    }
    judge_sizes(path, items, out);
}

fn kinds(items: &Items) -> Vec<&'static str> {
    [
        ("inline", items.inline.is_some()),
        ("count", items.count.is_some()),
        ("range", items.range.is_some()),
        ("matrix", items.matrix.is_some()),
        ("jsonl", items.jsonl.is_some()),
        ("csv", items.csv.is_some()),
        ("lines", items.lines.is_some()),
        ("results", items.results.is_some()),
    ]
    .into_iter()
    .filter_map(|(name, there)| there.then_some(name))
    .collect()
}

fn plan_problem(path: &str, items: &Items, error: &PlanError) -> Problem {
    match error {
        PlanError::NotOne => Problem::new(path, error.to_string()),
        PlanError::EmptyRange => {
            let problem = Problem::new(format!("{path}.range"), error.to_string());
            match items.range {
                Some(range) if range.step == 0 => problem.found("step 0").allowed("a step other than 0"),
                Some(range) => problem
                    .found(format!("from {} to {} by {}", range.from, range.to, range.step))
                    .hint("\"to\" isn't itself in the range; to count down, \"step\" is negative"),
                None => problem,
            }
        }
        PlanError::Delimiter => {
            let problem = Problem::new(format!("{path}.csv.delimiter"), "not one ASCII character");
            problem.allowed("such as \",\" or \";\" or \"\\t\"")
        }
        PlanError::Matrix(MatrixError::NoAxis { entry, axis }) => {
            let names = items.matrix.iter().flat_map(|matrix| matrix.axes.keys()).map(String::as_str);
            let place = format!("{path}.matrix.exclude[{entry}]");
            let problem = Problem::new(crate::problem::join(&place, axis), "no such axis").allowed(list(names.clone()));
            match suggest(axis, names) {
                Some(meant) => problem.hint(format!("did you mean \"{meant}\"?")),
                None => problem,
            }
        }
        PlanError::Matrix(MatrixError::NoValue { entry, axis }) => {
            let found = items.matrix.as_ref().and_then(|matrix| matrix.exclude.get(*entry)?.get(axis));
            let values = items.matrix.as_ref().and_then(|matrix| matrix.axes.get(axis));
            let values: Vec<String> = values.into_iter().flatten().map(|value| shorten(&value.to_string())).collect();
            let place = format!("{path}.matrix.exclude[{entry}]");
            Problem::new(crate::problem::join(&place, axis), "leaves nothing out: the axis has no such value")
                .found(found.unwrap_or(&Value::Null))
                .allowed(list(values.iter().map(String::as_str)))
        }
        PlanError::Matrix(MatrixError::NothingLeft) => Problem::new(format!("{path}.matrix.exclude"), error.to_string()),
        PlanError::Matrix(MatrixError::EmptyAxis) => Problem::new(format!("{path}.matrix.axes"), error.to_string()),
        PlanError::Matrix(MatrixError::TooManyCells | MatrixError::TooManyRuns) => {
            Problem::new(format!("{path}.matrix"), error.to_string())
        }
    }
}

fn judge_matrix(path: &str, matrix: &Matrix, out: &mut Vec<Problem>) {
    for (axis, values) in &matrix.axes {
        let mut seen = BTreeSet::new();
        if let Some(twice) = values.iter().find(|value| !seen.insert(value.to_string())) {
            let place = crate::problem::join(&format!("{path}.matrix.axes"), axis);
            out.push(Problem::new(place, "a value is given twice").found(twice));
        }
    }
}

/// Where a file lies, and its columns.
fn judge_file(path: &str, items: &Items, out: &mut Vec<Problem>) {
    let csv = items.csv.as_ref();
    let files = [
        ("jsonl", items.jsonl.as_ref().map(|f| (&f.upload, &f.s3))),
        ("csv", csv.map(|f| (&f.upload, &f.s3))),
        ("lines", items.lines.as_ref().map(|f| (&f.upload, &f.s3))),
    ];
    for (kind, file) in files {
        let Some((upload, s3)) = file else { continue };
        let place = format!("{path}.{kind}");
        if upload.is_some() == s3.is_some() {
            let found = if upload.is_some() { "both" } else { "none" };
            let problem = Problem::new(&place, "exactly one of \"upload\" and \"s3\" is needed").found(found);
            out.push(match found {
                "none" => problem.hint("a local file is given with `--items FILE` of `volley run`"),
                _ => problem,
            });
        }
        if let Some(upload) = upload
            && check_name(upload).is_err()
        {
            let problem = Problem::new(format!("{place}.upload"), "not the id of an upload").found(format!("{upload:?}"));
            out.push(problem.allowed("an id from `volley upload`, or a name with `--upload NAME=FILE` of `volley run`"));
        }
        if let Some(s3) = s3
            && s3_uri(s3).is_none()
        {
            let problem = Problem::new(format!("{place}.s3"), "not an S3 object").found(format!("{s3:?}"));
            out.push(problem.allowed("s3://bucket/key"));
        }
    }
    let mut seen = BTreeSet::new();
    for (index, column) in csv.iter().flat_map(|csv| &csv.columns).enumerate() {
        if column.is_empty() || !seen.insert(column) {
            let message = if column.is_empty() { "empty" } else { "a column is named twice" };
            out.push(Problem::new(format!("{path}.csv.columns[{index}]"), message).found(format!("{column:?}")));
        }
    }
}

/// Is every item small enough to be handed to a task?
fn judge_sizes(path: &str, items: &Items, out: &mut Vec<Problem>) {
    let chunk = items.chunk.map_or(1, |chunk| chunk as usize);
    let mut refuse = |place: String, bytes: usize| {
        let problem = Problem::new(place, "the item of a task is too large").found(format!("{bytes} bytes of JSON"));
        let problem = problem.allowed(format!("at most {ITEM_BYTES_MAX} bytes"));
        out.push(match items.chunk {
            Some(_) => problem.hint("make \"chunk\" smaller"),
            None => problem.hint("put what is large in a file and name it in task.inputs"),
        });
    };
    if let Some(inline) = &items.inline {
        let sizes: Vec<usize> = inline.iter().map(|item| item.to_string().len() + 1).collect();
        for (task, sizes) in sizes.chunks(chunk).enumerate() {
            let bytes = sizes.iter().sum::<usize>() + 1;
            if bytes > ITEM_BYTES_MAX {
                return refuse(format!("{path}.inline[{}]", task * chunk), bytes);
            }
        }
    } else if let Some(matrix) = &items.matrix {
        let axis = |(name, values): (&String, &Vec<Value>)| {
            Value::from(name.as_str()).to_string().len() + 2 + values.iter().map(|value| value.to_string().len()).max().unwrap_or(0)
        };
        let combination = matrix.axes.iter().map(axis).sum::<usize>() + 2;
        let added = matrix.include.iter().map(|item| Value::Object(item.clone()).to_string().len()).max().unwrap_or(0);
        let bytes = (combination.max(added) + 1).saturating_mul(chunk);
        if bytes > ITEM_BYTES_MAX {
            refuse(format!("{path}.matrix"), bytes);
        }
    } else if items.count.is_some() || items.range.is_some() {
        let (from, to) = items.range.map_or((0, TASKS_MAX as i64), |range| (range.from, range.to));
        let width = from.to_string().len().max(to.to_string().len()) + 1;
        let bytes = width.saturating_mul(chunk) + 1;
        if bytes > ITEM_BYTES_MAX {
            refuse(format!("{path}.chunk"), bytes);
        }
    }
}

/// Is what the task uses of its item there, as far as that can be known?
pub(super) fn judge_uses(path: &str, items: Option<&Items>, task_path: &str, task: &TaskSpec, out: &mut Vec<Problem>) {
    let Ok(template) = TaskTemplate::compile(task) else { return };
    let mut checked: BTreeSet<Vec<String>> = BTreeSet::new();
    for (field, _, template) in template.templates() {
        for used in template.item_paths().filter(|used| !used.is_empty()) {
            if checked.len() >= PATHS_CHECKED_MAX || !checked.insert(used.to_vec()) {
                continue;
            }
            if let Err(why) = uses(items, used) {
                let name = shorten(&used.join("."));
                let mut problem = Problem::new(format!("{task_path}{field}"), format!("${{item.{name}}}: {}", why.message));
                problem.hint = why.hint;
                problem.allowed = why.allowed;
                out.push(problem.depends(path));
            }
        }
    }
}

/// Why a path isn't there.
struct Missing {
    message: String,
    hint: Option<String>,
    allowed: Option<String>,
}

impl Missing {
    fn plain(what: &str) -> Self {
        Self { message: format!("the item is {what}, without fields"), hint: None, allowed: Some("${item}".to_owned()) }
    }

    fn field<'a>(message: String, wanted: &str, known: impl Iterator<Item = &'a str> + Clone) -> Self {
        let hint = suggest(wanted, known.clone()).map(|meant| format!("did you mean ${{item.{meant}}}?"));
        let known = list(known);
        Self { message, hint, allowed: (!known.is_empty()).then_some(known) }
    }
}

fn uses(items: Option<&Items>, used: &[String]) -> Result<(), Missing> {
    let Some(items) = items else { return Err(Missing::plain("a number")) };
    if let Some(inline) = &items.inline {
        return uses_inline(inline, items.chunk, used);
    }
    let used = match (items.chunk, used) {
        (Some(chunk), [first, rest @ ..]) => {
            if list_index(first).is_none_or(|index| index >= chunk as usize) {
                let message = "with \"chunk\" the item is a list".to_owned();
                let allowed = Some(format!("${{item.0}} to ${{item.{}}}", chunk - 1));
                return Err(Missing { message, hint: None, allowed });
            }
            rest
        }
        _ => used,
    };
    let Some((first, rest)) = used.split_first() else { return Ok(()) };
    if let Some(matrix) = &items.matrix {
        return uses_matrix(matrix, first, rest);
    }
    if let Some(csv) = &items.csv {
        if !rest.is_empty() {
            return Err(Missing { message: "a field of a CSV file is text, without fields".to_owned(), hint: None, allowed: None });
        }
        let known = csv.columns.iter().map(String::as_str);
        return match (csv.columns.is_empty(), csv.header) {
            (true, true) => Ok(()),
            (true, false) if list_index(first).is_some() => Ok(()),
            (true, false) => {
                let allowed = Some("${item.0} for the first column, and so on".to_owned());
                Err(Missing { message: "without a header, columns have numbers".to_owned(), hint: None, allowed })
            }
            (false, _) if csv.columns.contains(first) => Ok(()),
            (false, _) => Err(Missing::field("no such column".to_owned(), first, known)),
        };
    }
    match (items.lines.is_some(), items.count.is_some() || items.range.is_some()) {
        (true, _) => Err(Missing::plain("a text")),
        (_, true) => Err(Missing::plain("a number")),
        // What a JSON line or a result has in it is known only when it is read.
        (false, false) => Ok(()),
    }
}

fn uses_inline(inline: &[Value], chunk: Option<u32>, used: &[String]) -> Result<(), Missing> {
    let Some((first, rest)) = used.split_first() else { return Ok(()) };
    let known = |item: &Value| -> Vec<String> { item.as_object().map(|object| object.keys().cloned().collect()).unwrap_or_default() };
    let Some(chunk) = chunk.map(|chunk| chunk as usize) else {
        let missing = inline.iter().enumerate().find(|(_, item)| look_up(item, used).is_none());
        return missing.map_or(Ok(()), |(index, item)| {
            let known = known(item);
            Err(Missing::field(format!("item {index} has no such field"), first, known.iter().map(String::as_str)))
        });
    };
    let at = list_index(first).filter(|at| *at < chunk);
    let missing = match at {
        Some(at) => inline.chunks(chunk).enumerate().find(|(_, items)| items.get(at).is_none_or(|item| look_up(item, rest).is_none())),
        None => inline.chunks(chunk).enumerate().next(),
    };
    missing.map_or(Ok(()), |(task, items)| {
        let message = format!("the item of task {task} is a list of {} and has no such element", items.len());
        Err(Missing { message, hint: None, allowed: Some(format!("${{item.0}} to ${{item.{}}}", items.len().saturating_sub(1))) })
    })
}

fn uses_matrix(matrix: &Matrix, first: &str, rest: &[String]) -> Result<(), Missing> {
    let axes = matrix.axes.keys().map(String::as_str);
    let Some(values) = matrix.axes.get(first) else { return Err(Missing::field("no such axis".to_owned(), first, axes)) };
    if let Some(value) = values.iter().find(|value| look_up(value, rest).is_none()) {
        let message = format!("the value {} of the axis has no such field", shorten(&value.to_string()));
        return Err(Missing { message, hint: None, allowed: None });
    }
    let lacks = |item: &serde_json::Map<String, Value>| item.get(first).is_none_or(|value| look_up(value, rest).is_none());
    match matrix.include.iter().position(lacks) {
        Some(index) => Err(Missing { message: format!("include[{index}] has no such field"), hint: None, allowed: None }),
        None => Ok(()),
    }
}
