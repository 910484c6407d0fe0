//! Combinations of axes, with some left out and some added, picked by number.
//!
//! Owns the arithmetic. A combination is a number in mixed radix, one digit per axis; what is left out is kept as sorted runs of such
//! numbers with the count of what came before, so that picking is one binary search however large the matrix is.

use std::collections::BTreeMap;

use serde_json::{Map, Value};

use crate::spec::Matrix;

/// Most combinations before anything is left out: what is left may be at most ten million, and a matrix that is nearly all exclusions
/// is better written as a list.
pub const CELLS_MAX: u64 = 1_000_000_000;
/// Most separate runs of left-out combinations, at 24 bytes each.
pub const RUNS_MAX: usize = 1_000_000;

/// A matrix, ready to be picked from.
#[derive(Debug, Clone, PartialEq)]
pub struct MatrixPlan {
    axes: Vec<(String, Vec<Value>)>,
    include: Vec<Map<String, Value>>,
    excluded: Vec<Run>,
    cells: u64,
}

/// Combinations that are left out: `start..end`, with `kept` combinations kept before.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Run {
    start: u64,
    end: u64,
    kept: u64,
}

/// Why a matrix can't be planned.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum MatrixError {
    /// An axis without values, or no axis.
    #[error("an axis has no values")]
    EmptyAxis,
    /// Too many combinations.
    #[error("the axes have more than {CELLS_MAX} combinations")]
    TooManyCells,
    /// An exclusion names something that is no axis.
    #[error("exclude[{entry}] names {axis:?}, which is no axis")]
    NoAxis {
        /// Which exclusion.
        entry: usize,
        /// What it names.
        axis: String,
    },
    /// An exclusion has a value its axis doesn't have.
    #[error("exclude[{entry}] leaves nothing out: {axis:?} has no such value")]
    NoValue {
        /// Which exclusion.
        entry: usize,
        /// The axis.
        axis: String,
    },
    /// The exclusions leave no combination, and nothing is included beside them.
    #[error("the exclusions leave nothing")]
    NothingLeft,
    /// The exclusions are too scattered.
    #[error("the exclusions fall into more than {RUNS_MAX} separate runs; list the items in a file instead")]
    TooManyRuns,
}

impl MatrixPlan {
    /// Plans a matrix.
    ///
    /// # Errors
    /// [`MatrixError`] when an axis is empty, an exclusion fits nothing, nothing is left, or it is too large.
    pub fn new(matrix: &Matrix) -> Result<Self, MatrixError> {
        let axes: Vec<(String, Vec<Value>)> = matrix.axes.iter().map(|(name, values)| (name.clone(), values.clone())).collect();
        if axes.is_empty() || axes.iter().any(|(_, values)| values.is_empty()) {
            return Err(MatrixError::EmptyAxis);
        }
        let mut cells = 1u64;
        for (_, values) in &axes {
            cells = cells.saturating_mul(values.len() as u64);
            if cells > CELLS_MAX {
                return Err(MatrixError::TooManyCells);
            }
        }
        let mut spans = Vec::new();
        for (entry, pattern) in matrix.exclude.iter().enumerate() {
            exclude(&axes, cells, entry, pattern, &mut spans)?;
        }
        let plan = Self { axes, include: matrix.include.clone(), excluded: merge(spans), cells };
        if plan.count() == 0 { Err(MatrixError::NothingLeft) } else { Ok(plan) }
    }

    /// How many items there are.
    #[must_use]
    pub fn count(&self) -> u64 {
        self.combinations() + self.include.len() as u64
    }

    fn combinations(&self) -> u64 {
        match self.excluded.last() {
            Some(last) => last.kept + (self.cells - last.end),
            None => self.cells,
        }
    }

    /// The item with this number.
    #[must_use]
    pub fn item(&self, index: u64) -> Option<Map<String, Value>> {
        let combinations = self.combinations();
        if index >= combinations {
            return self.include.get(usize::try_from(index - combinations).ok()?).cloned();
        }
        // The last run with at most `index` kept before it lies wholly before the combination that is looked for.
        let runs_before = self.excluded.partition_point(|run| run.kept <= index);
        let mut cell = match runs_before.checked_sub(1).and_then(|last| self.excluded.get(last)) {
            Some(run) => run.end + (index - run.kept),
            None => index,
        };
        let mut item = Map::new();
        for (name, values) in self.axes.iter().rev() {
            let len = values.len() as u64;
            item.insert(name.clone(), values.get(usize::try_from(cell % len).ok()?)?.clone());
            cell /= len;
        }
        Some(item)
    }

    /// The axes and their values, in the order of combination.
    #[must_use]
    pub fn axes(&self) -> &[(String, Vec<Value>)] {
        &self.axes
    }

    /// The added items.
    #[must_use]
    pub fn include(&self) -> &[Map<String, Value>] {
        &self.include
    }
}

/// Adds the spans of combinations one exclusion fits.
fn exclude(
    axes: &[(String, Vec<Value>)],
    cells: u64,
    entry: usize,
    pattern: &Map<String, Value>,
    spans: &mut Vec<(u64, u64)>,
) -> Result<(), MatrixError> {
    let mut fixed: BTreeMap<&str, u64> = BTreeMap::new();
    for (name, wanted) in pattern {
        let axis = axes.iter().find(|(axis, _)| axis == name);
        let (axis, values) = axis.ok_or_else(|| MatrixError::NoAxis { entry, axis: name.clone() })?;
        let at = values.iter().position(|value| value == wanted);
        fixed.insert(axis, at.ok_or_else(|| MatrixError::NoValue { entry, axis: name.clone() })? as u64);
    }
    // From the first axis on: `starts` are the numbers of all combinations of the axes so far, the others at their first value. Axes
    // after the last fixed one are free together, so each start stands for a run of `width`.
    let mut starts = vec![0u64];
    let mut width = cells;
    let mut left = fixed.len();
    for (name, values) in axes {
        if left == 0 {
            break;
        }
        width /= values.len() as u64;
        if let Some(at) = fixed.get(name.as_str()) {
            left -= 1;
            starts.iter_mut().for_each(|start| *start += at * width);
        } else {
            if starts.len().saturating_mul(values.len()) > RUNS_MAX {
                return Err(MatrixError::TooManyRuns);
            }
            starts = starts.iter().flat_map(|start| (0..values.len() as u64).map(move |at| start + at * width)).collect();
        }
    }
    if spans.len() + starts.len() > RUNS_MAX {
        return Err(MatrixError::TooManyRuns);
    }
    spans.extend(starts.into_iter().map(|start| (start, start + width)));
    Ok(())
}

/// Sorts spans, joins those that touch, and counts what is kept before each.
fn merge(mut spans: Vec<(u64, u64)>) -> Vec<Run> {
    spans.sort_unstable();
    let mut runs: Vec<Run> = Vec::new();
    for (start, end) in spans {
        match runs.last_mut() {
            Some(last) if start <= last.end => last.end = last.end.max(end),
            last => {
                let kept = last.map_or(start, |last| last.kept + (start - last.end));
                runs.push(Run { start, end, kept });
            }
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    fn matrix(json: Value) -> Matrix {
        serde_json::from_value(json).unwrap_or_else(|e| panic!("{e}"))
    }

    #[test]
    fn combinations_come_in_order_with_additions_last() {
        let plan = MatrixPlan::new(&matrix(json!({
            "axes": { "py": ["3.11", "3.12"], "os": ["a", "b"] },
            "exclude": [{ "os": "b", "py": "3.11" }],
            "include": [{ "os": "c", "extra": true }],
        })));
        let plan = plan.unwrap_or_else(|e| panic!("{e}"));
        let all: Vec<Value> = (0..).map_while(|i| plan.item(i)).map(Value::Object).collect();
        assert_eq!(all.len() as u64, plan.count());
        assert_eq!(
            json!(all),
            json!([{ "os": "a", "py": "3.11" }, { "os": "a", "py": "3.12" }, { "os": "b", "py": "3.12" }, { "os": "c", "extra": true }])
        );
    }

    #[test]
    fn a_hundred_million_combinations_are_picked_without_walking() {
        let values: Vec<u32> = (0..100).collect();
        let axes = json!({ "a": values, "b": values, "c": values, "d": values });
        let plan = MatrixPlan::new(&matrix(json!({ "axes": axes, "exclude": [{ "a": 0 }, { "b": 7 }] })));
        let plan = plan.unwrap_or_else(|e| panic!("{e}"));
        assert_eq!(plan.count(), 99 * 99 * 100 * 100);
        assert!(plan.excluded.len() <= 100, "{}", plan.excluded.len());
        assert_eq!(plan.item(0).map(Value::Object), Some(json!({ "a": 1, "b": 0, "c": 0, "d": 0 })));
        assert_eq!(plan.item(plan.count() - 1).map(Value::Object), Some(json!({ "a": 99, "b": 99, "c": 99, "d": 99 })));
    }

    #[test]
    fn what_fits_nothing_or_is_too_large_is_refused() {
        let one = |json| MatrixPlan::new(&matrix(json)).map(|_| ());
        assert_eq!(one(json!({ "axes": { "a": [] } })), Err(MatrixError::EmptyAxis));
        assert_eq!(one(json!({ "axes": { "a": [1] }, "exclude": [{ "b": 1 }] })), Err(MatrixError::NoAxis { entry: 0, axis: "b".into() }));
        assert_eq!(one(json!({ "axes": { "a": [1] }, "exclude": [{ "a": 2 }] })), Err(MatrixError::NoValue { entry: 0, axis: "a".into() }));
        let values: Vec<u32> = (0..1001).collect();
        let wide = json!({ "a": values, "b": values, "c": [1, 2] });
        assert_eq!(one(json!({ "axes": wide, "exclude": [{ "c": 1 }] })), Err(MatrixError::TooManyRuns));
        assert_eq!(one(json!({ "axes": { "a": values, "b": values, "c": values } })), Err(MatrixError::TooManyCells));
    }

    proptest! {
        #[test]
        fn picking_equals_filtering(
            sizes in proptest::collection::vec(1usize..5, 1..4),
            picks in proptest::collection::vec(proptest::collection::vec(proptest::option::of(0usize..5), 4), 0..4),
        ) {
            let axes: BTreeMap<String, Vec<Value>> =
                sizes.iter().enumerate().map(|(i, n)| (format!("x{i}"), (0..*n).map(Value::from).collect())).collect();
            let exclude: Vec<Map<String, Value>> = picks.iter().map(|pick| {
                sizes.iter().enumerate().filter_map(|(i, n)| pick[i].map(|at| (format!("x{i}"), Value::from(at % n)))).collect()
            }).collect();
            let mut all: Vec<Map<String, Value>> = vec![Map::new()];
            for (name, values) in &axes {
                all = all.iter().flat_map(|item| values.iter().map(move |v| {
                    let mut item = item.clone();
                    item.insert(name.clone(), v.clone());
                    item
                })).collect();
            }
            all.retain(|item| !exclude.iter().any(|pattern| pattern.iter().all(|(k, v)| item.get(k) == Some(v))));
            let plan = MatrixPlan::new(&Matrix { axes, include: vec![], exclude });
            if all.is_empty() {
                prop_assert_eq!(plan, Err(MatrixError::NothingLeft));
                return Ok(());
            }
            let plan = plan.map_err(|e| TestCaseError::fail(e.to_string()))?;
            prop_assert_eq!(plan.count(), all.len() as u64);
            for (i, item) in all.iter().enumerate() {
                prop_assert_eq!(plan.item(i as u64), Some(item.clone()));
            }
            prop_assert_eq!(plan.item(all.len() as u64), None);
        }
    }
}
