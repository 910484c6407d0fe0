//! From the items of a spec to the item of task i, without making the others.
//!
//! Owns counting and random access for everything but files; a file's items come from its pages (`pages`), and only their number is
//! needed here. Does not own checking the spec first (`validate`), though every failing case is refused here too.

pub mod matrix;

use serde_json::Value;

use crate::spec::items::CHUNK_MAX;
use crate::spec::{FileSource, Items};
pub use matrix::{MatrixError, MatrixPlan};

/// Most tasks of a job: ten million, at tens of bytes each, is what a coordinator can hold.
pub const TASKS_MAX: u64 = 10_000_000;
/// Largest item, in bytes of JSON: it is handed to the task in one environment variable, which Linux limits to 128 KiB.
pub const ITEM_BYTES_MAX: usize = 64 * 1024;

/// What a job fans out over, ready to be counted and picked from.
#[derive(Debug, Clone, PartialEq)]
pub struct ItemPlan {
    base: Base,
    chunk: u32,
}

#[derive(Debug, Clone, PartialEq)]
enum Base {
    Inline(Vec<Value>),
    Count(u64),
    Range { from: i64, step: i64, len: u64 },
    Matrix(MatrixPlan),
    File(ItemFile),
    Results(String),
}

/// A file with items: where it lies and how it is read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct ItemFile {
    /// Where.
    pub source: FileSource,
    /// How.
    pub format: FileFormat,
    /// How many items one task gets; 1 without `chunk` (then the item isn't in a list).
    pub chunk: Option<u32>,
}

/// How a file with items is read.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FileFormat {
    /// One JSON value a line.
    Jsonl,
    /// One text a line.
    Lines,
    /// Comma-separated values.
    Csv {
        /// Does the first row name the columns?
        header: bool,
        /// The byte between fields.
        delimiter: u8,
        /// The columns' names, if the spec gives them.
        columns: Vec<String>,
    },
}

/// Why items can't be planned.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum PlanError {
    /// None or several of the kinds.
    #[error("give exactly one of inline, count, range, matrix, jsonl, csv, lines and results")]
    NotOne,
    /// `step` is 0, or leads away from `to`, or the range is empty.
    #[error("the range is empty")]
    EmptyRange,
    /// The delimiter is no single ASCII byte.
    #[error("the delimiter isn't one ASCII character")]
    Delimiter,
    /// The matrix can't be planned.
    #[error(transparent)]
    Matrix(#[from] MatrixError),
}

impl ItemPlan {
    /// The plan of a job without `items`: one task.
    #[must_use]
    pub fn single() -> Self {
        Self { base: Base::Count(1), chunk: 0 }
    }

    /// Plans the items of a spec.
    ///
    /// # Errors
    /// [`PlanError`] when there is nothing sensible to plan.
    pub fn new(items: &Items) -> Result<Self, PlanError> {
        let mut bases = Vec::new();
        bases.extend(items.inline.clone().map(Base::Inline));
        bases.extend(items.count.map(Base::Count));
        if let Some(range) = items.range {
            let len = range_len(range.from, range.to, range.step).ok_or(PlanError::EmptyRange)?;
            bases.push(Base::Range { from: range.from, step: range.step, len });
        }
        if let Some(matrix) = &items.matrix {
            bases.push(Base::Matrix(MatrixPlan::new(matrix)?));
        }
        let file = |source: &FileSource, format| Base::File(ItemFile { source: source.clone(), format, chunk: items.chunk });
        bases.extend(items.jsonl.as_ref().map(|source| file(source, FileFormat::Jsonl)));
        bases.extend(items.lines.as_ref().map(|source| file(source, FileFormat::Lines)));
        if let Some(csv) = &items.csv {
            let [delimiter @ 0x01..=0x7f] = *csv.delimiter.as_bytes() else { return Err(PlanError::Delimiter) };
            let source = FileSource { upload: csv.upload.clone(), s3: csv.s3.clone() };
            bases.push(file(&source, FileFormat::Csv { header: csv.header, delimiter, columns: csv.columns.clone() }));
        }
        bases.extend(items.results.as_ref().map(|results| Base::Results(results.stage.clone())));
        match <[Base; 1]>::try_from(bases) {
            Ok([base]) => Ok(Self { base, chunk: items.chunk.unwrap_or(0).min(CHUNK_MAX) }),
            Err(_) => Err(PlanError::NotOne),
        }
    }

    /// How many tasks there are. `None`: that is known only once the file is cut or the stage has ended.
    #[must_use]
    pub fn count(&self) -> Option<u64> {
        let base = match &self.base {
            Base::Inline(items) => items.len() as u64,
            Base::Count(count) => *count,
            Base::Range { len, .. } => *len,
            Base::Matrix(matrix) => matrix.count(),
            Base::File(_) | Base::Results(_) => return None,
        };
        Some(if self.chunk == 0 { base } else { base.div_ceil(u64::from(self.chunk)) })
    }

    /// The item of task `index`, whatever the number of tasks. `None`: there is no such task, or the items are in a file or are
    /// results of a stage.
    #[must_use]
    pub fn item(&self, index: u64) -> Option<Value> {
        if index >= self.count()? {
            return None;
        }
        if self.chunk == 0 {
            return self.base_item(index);
        }
        let first = index * u64::from(self.chunk);
        (first..first + u64::from(self.chunk)).map_while(|i| self.base_item(i)).collect::<Vec<_>>().into_iter().map(Some).collect()
    }

    fn base_item(&self, index: u64) -> Option<Value> {
        match &self.base {
            Base::Inline(items) => items.get(usize::try_from(index).ok()?).cloned(),
            Base::Count(count) => (index < *count).then(|| index.into()),
            Base::Range { from, step, len } => (index < *len).then(|| range_item(*from, *step, index).into()),
            Base::Matrix(matrix) => matrix.item(index).map(Value::Object),
            Base::File(_) | Base::Results(_) => None,
        }
    }

    /// The file the items are in, if they are in one.
    #[must_use]
    pub fn file(&self) -> Option<&ItemFile> {
        match &self.base {
            Base::File(file) => Some(file),
            Base::Inline(_) | Base::Count(_) | Base::Range { .. } | Base::Matrix(_) | Base::Results(_) => None,
        }
    }

    /// The stage whose results are the items, if they are that.
    #[must_use]
    pub fn results_of(&self) -> Option<&str> {
        match &self.base {
            Base::Results(stage) => Some(stage),
            Base::Inline(_) | Base::Count(_) | Base::Range { .. } | Base::Matrix(_) | Base::File(_) => None,
        }
    }
}

/// How many numbers a range has; `None` if none.
fn range_len(from: i64, to: i64, step: i64) -> Option<u64> {
    let distance = i128::from(to) - i128::from(from);
    let step = i128::from(step);
    if step == 0 || distance == 0 || (distance > 0) != (step > 0) {
        return None;
    }
    u64::try_from((distance.abs() + step.abs() - 1) / step.abs()).ok()
}

/// The `index`-th number of a range; `index` is below its length, so the number lies between `from` and `to`.
fn range_item(from: i64, step: i64, index: u64) -> i64 {
    let number = i128::from(from) + i128::from(step) * i128::from(index);
    i64::try_from(number).unwrap_or(from)
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    fn plan(items: Value) -> ItemPlan {
        let items: Items = serde_json::from_value(items).unwrap_or_else(|e| panic!("{e}"));
        ItemPlan::new(&items).unwrap_or_else(|e| panic!("{e}"))
    }

    #[test]
    fn the_last_item_of_the_largest_range_is_computed_not_reached() {
        // A range of more numbers than could be held or walked: picking one can't depend on how many lie before it.
        let plan = ItemPlan { base: Base::Range { from: 5, step: 3, len: u64::MAX / 4 }, chunk: 0 };
        assert_eq!(plan.item(9_999_999), Some(json!(5 + 3 * 9_999_999i64)));
        assert_eq!(std::mem::size_of_val(&plan.base), std::mem::size_of::<Base>());
        assert!(plan.item(1 << 60).is_some());
    }

    #[test]
    fn a_range_is_counted_and_ends_before_its_end() {
        for (from, to, step, all) in
            [(0, 5, 2, vec![0, 2, 4]), (0, 4, 2, vec![0, 2]), (5, 0, -2, vec![5, 3, 1]), (-3, 0, 1, vec![-3, -2, -1])]
        {
            let plan = plan(json!({ "range": { "from": from, "to": to, "step": step } }));
            assert_eq!(plan.count(), Some(all.len() as u64));
            assert_eq!((0..).map_while(|i| plan.item(i)).collect::<Vec<_>>(), all.into_iter().map(Value::from).collect::<Vec<_>>());
        }
        assert_eq!(range_len(0, 5, -1), None);
        assert_eq!(range_len(i64::MIN, i64::MAX, 1), Some(u64::MAX));
    }

    #[test]
    fn chunks_are_lists_and_the_last_may_be_short() {
        let plan = plan(json!({ "count": 7, "chunk": 3 }));
        assert_eq!(plan.count(), Some(3));
        assert_eq!(
            (0..4).map(|i| plan.item(i)).collect::<Vec<_>>(),
            [Some(json!([0, 1, 2])), Some(json!([3, 4, 5])), Some(json!([6])), None]
        );
    }

    #[test]
    fn exactly_one_kind_is_taken() {
        assert_eq!(ItemPlan::new(&Items::default()), Err(PlanError::NotOne));
        assert_eq!(ItemPlan::new(&Items { count: Some(1), inline: Some(vec![]), ..Items::default() }), Err(PlanError::NotOne));
    }

    proptest! {
        #[test]
        fn picking_equals_walking(from in -1000i64..1000, len in 1u64..500, step in prop_oneof![-9i64..=-1, 1i64..=9], chunk in 0u32..20) {
            let to = from + step * (len as i64);
            let base = (0..len).map(|i| json!(from + step * (i as i64))).collect::<Vec<_>>();
            let all: Vec<Value> = if chunk == 0 { base } else { base.chunks(chunk as usize).map(|c| json!(c)).collect() };
            let mut items = json!({ "range": { "from": from, "to": to, "step": step } });
            if chunk > 0 { items["chunk"] = json!(chunk); }
            let plan = plan(items);
            prop_assert_eq!(plan.count(), Some(all.len() as u64));
            for (i, wanted) in all.iter().enumerate().rev() {
                prop_assert_eq!(plan.item(i as u64), Some(wanted.clone()));
            }
            prop_assert_eq!(plan.item(all.len() as u64), None);
        }
    }
}
