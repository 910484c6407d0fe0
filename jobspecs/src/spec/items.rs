//! What a job fans out over, as the spec says it.
//!
//! Owns the types. Does not own counting and picking items (`expand`) or cutting files into pages (`pages`).

use std::collections::BTreeMap;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};

/// Most items in one chunk: a chunk is one task's item, and that has a size limit too.
pub const CHUNK_MAX: u32 = 10_000;
/// Largest whole number in a range, either way: above 2^53 - 1 JSON readers don't agree on what they read.
pub const INTEGER_MAX: i64 = (1 << 53) - 1;
/// Most axes of a matrix: more than this is a list of items.
pub const AXES_MAX: usize = 16;

/// What the job fans out over. Exactly one of `inline`, `count`, `range`, `matrix`, `jsonl`, `csv`, `lines` and `results`; `chunk`
/// may stand beside it. One item may have at most 64 KiB of JSON.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[schemars(extend("oneOf" = one_of(&["inline", "count", "range", "matrix", "jsonl", "csv", "lines", "results"])))]
pub struct Items {
    /// The items themselves: any JSON values, at least one.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(length(min = 1))]
    pub inline: Option<Vec<Value>>,
    /// This many tasks, 1 to 10000000; the item of each is its index.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = 10_000_000))]
    pub count: Option<u64>,
    /// The whole numbers of a range.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub range: Option<Range>,
    /// Every combination of the values of some axes; each item is an object with one field per axis.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub matrix: Option<Matrix>,
    /// A file with one JSON value per line; empty lines are skipped.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub jsonl: Option<FileSource>,
    /// A CSV file; each item is an object with one text field per column (a list of texts without a header).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub csv: Option<CsvSource>,
    /// A text file; each line that isn't empty is an item, a text.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lines: Option<FileSource>,
    /// The results of an earlier stage, one item per task that succeeded, in the order of their indexes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub results: Option<ResultsSource>,
    /// Gives each task this many items at once, 1 to 10000: its item is then a list, the last one may be shorter.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    #[schemars(range(min = 1, max = CHUNK_MAX))]
    pub chunk: Option<u32>,
}

/// `oneOf` for "exactly one of these fields".
fn one_of(fields: &[&str]) -> Value {
    fields.iter().map(|field| given(field)).collect()
}

/// "This field is there"; one that is null is not.
pub(crate) fn given(field: &str) -> Value {
    json!({ "required": [field], "properties": { field: { "not": { "type": "null" } } } })
}

/// The whole numbers from `from` up to but not including `to`, every `step`-th.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Range {
    /// The first. Default 0.
    #[serde(default)]
    #[schemars(range(min = -INTEGER_MAX, max = INTEGER_MAX))]
    pub from: i64,
    /// The end, which is not itself in the range.
    #[schemars(range(min = -INTEGER_MAX, max = INTEGER_MAX), extend("examples" = [10]))]
    pub to: i64,
    /// The distance from one to the next, not 0; negative to count down. Default 1.
    #[serde(default = "step_default")]
    #[schemars(range(min = -INTEGER_MAX, max = INTEGER_MAX))]
    pub step: i64,
}

fn step_default() -> i64 {
    1
}

/// Every combination of the values of some axes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Matrix {
    /// Axis names with their values: 1 to 16 axes, each with at least one value and none twice. Combinations come in the
    /// alphabetical order of the axis names; the last one's values change fastest.
    #[schemars(extend("minProperties" = 1, "maxProperties" = AXES_MAX, "examples" = [{ "size": [1, 2] }]))]
    pub axes: BTreeMap<String, Vec<Value>>,
    /// Further items, added after the combinations as they are. They may have fields that are no axes.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub include: Vec<Map<String, Value>>,
    /// Leaves out every combination that has all of these values. Each must fit at least one.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub exclude: Vec<Map<String, Value>>,
}

/// Where a file lies: exactly one of `upload` and `s3`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[schemars(extend("oneOf" = one_of(&["upload", "s3"])))]
pub struct FileSource {
    /// The id of an uploaded file (`volley upload FILE` gives one), or any NAME that `volley run` and `volley submit` are given a local
    /// file for: `--upload NAME=FILE`. With `--items FILE` they upload that file and fill this in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub upload: Option<String>,
    /// An object: `s3://bucket/key`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub s3: Option<String>,
}

/// A CSV file: exactly one of `upload` and `s3`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[schemars(extend("oneOf" = one_of(&["upload", "s3"])))]
pub struct CsvSource {
    /// The id of an uploaded file (`volley upload FILE` gives one), or any NAME that `volley run` and `volley submit` are given a local
    /// file for: `--upload NAME=FILE`. With `--items FILE` they upload that file and fill this in.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub upload: Option<String>,
    /// An object: `s3://bucket/key`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub s3: Option<String>,
    /// Does the first row name the columns? Default true. Without one, items are lists: `${item.0}` is the first column.
    #[serde(default = "header_default")]
    pub header: bool,
    /// The character between fields, one byte of ASCII. Default ",".
    #[serde(default = "delimiter_default")]
    #[schemars(length(min = 1, max = 1))]
    pub delimiter: String,
    /// The columns' names, when they are known beforehand: `${item.column}` is then checked at submit. With a header, it must
    /// name the same columns in the same order; without one, these are the names.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    #[schemars(length(max = COLUMNS_MAX))]
    pub columns: Vec<String>,
}

/// Most columns of a CSV file: a row becomes one item, and that has a size limit too.
pub const COLUMNS_MAX: usize = 4_096;

fn header_default() -> bool {
    true
}

fn delimiter_default() -> String {
    ",".to_owned()
}

/// The results of an earlier stage.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ResultsSource {
    /// The stage's name; it must also stand in `needs`.
    #[schemars(extend("examples" = ["extract"]))]
    pub stage: String,
}
