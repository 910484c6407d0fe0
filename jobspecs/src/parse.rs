//! From bytes to a job spec.
//!
//! Owns reading JSON with bounds, doubled fields, and the entry that reports every problem of a document at once. Does not own what
//! the fields allow (`check`, by the schema) or how they go together (`validate`).

use std::fmt;

use serde::de::{DeserializeSeed, Deserializer, Error as _, MapAccess, SeqAccess, Visitor};
use serde_json::{Map, Value};

use crate::check::{Checked, check_job};
use crate::problem::{PROBLEMS_MAX, Problem, Problems, join};
use crate::spec::JobSpec;
use crate::units;
use crate::validate::{Features, ValidJob, conclude, judge};

/// Largest spec, in bytes: long item lists belong in a file, which has no such limit.
pub const SPEC_BYTES_MAX: usize = 4 * 1024 * 1024;
/// Deepest nesting of a spec or an item: it bounds the stack of everything that walks one.
pub const DEPTH_MAX: usize = 64;

/// Reads a job spec. Its fields fit the schema afterwards; whether they go together is for [`validate`](crate::validate::validate).
///
/// # Errors
/// Every problem of form: text that isn't JSON (with line and column), unknown, doubled and missing fields, wrong types and ranges.
pub fn parse(bytes: &[u8]) -> Result<JobSpec, Problems> {
    let read = read(bytes)?;
    match (read.spec, read.problems.is_empty()) {
        (Some(spec), true) => Ok(spec),
        _ => Err(Problems(read.problems)),
    }
}

/// Reads and validates a job spec, with the problems of form and those of meaning in one list.
///
/// # Errors
/// Every problem of the document.
pub fn parse_and_validate(bytes: &[u8], features: &Features) -> Result<ValidJob, Problems> {
    let Read { spec, mut problems, suspect } = read(bytes)?;
    let Some(spec) = spec else { return Err(Problems(problems)) };
    let found = judge(&spec, features);
    problems.extend(found.into_iter().filter(|problem| {
        let mut places = suspect.iter();
        !places.any(|place| near(place, &problem.path) || problem.depends.as_ref().is_some_and(|depends| near(place, depends)))
    }));
    conclude(spec, problems)
}

/// Is one of the two places within the other?
fn near(a: &str, b: &str) -> bool {
    let within = |outer: &str, inner: &str| {
        inner.strip_prefix(outer).is_some_and(|rest| rest.is_empty() || rest.starts_with('.') || rest.starts_with('['))
    };
    within(a, b) || within(b, a)
}

/// What is said of a spec above [`SPEC_BYTES_MAX`], which has this many bytes if that is known.
#[must_use]
pub fn too_large(bytes: Option<u64>) -> Problems {
    let max = SPEC_BYTES_MAX as u64;
    let (found, allowed) = match bytes {
        Some(bytes) => units::different_bytes(bytes, max),
        None => (format!("more than {}", units::bytes(max)), units::bytes(max)),
    };
    let problem = Problem::new("$", "the spec is too large").found(found).allowed(format!("at most {allowed}"));
    problem.hint("put the items in a file and name it in items.jsonl").into()
}

#[derive(Debug)]
struct Read {
    /// The spec, with stand-ins where there are problems; none if even that can't be read.
    spec: Option<JobSpec>,
    problems: Vec<Problem>,
    /// Places from which nothing should be concluded.
    suspect: Vec<String>,
}

fn read(bytes: &[u8]) -> Result<Read, Problems> {
    if bytes.len() > SPEC_BYTES_MAX {
        // Whoever read it may have stopped just above the limit.
        return Err(too_large(None));
    }
    let (value, mut problems) = read_json(bytes)?;
    let Checked { value, problems: misfits, stood_in } = check_job(value);
    problems.extend(misfits);
    let suspect = problems.iter().map(|problem| problem.path.clone()).chain(stood_in).collect();
    let spec = match serde_json::from_value(value) {
        Ok(spec) => Some(spec),
        Err(error) => {
            // The schema let something pass that the types don't take.
            if problems.is_empty() {
                problems.push(Problem::new("$", error.to_string()));
            }
            None
        }
    };
    Ok(Read { spec, problems, suspect })
}

/// Reads any JSON within the bounds. Doubled fields are problems beside the value, which has the first of them.
pub(crate) fn read_json(bytes: &[u8]) -> Result<(Value, Vec<Problem>), Problem> {
    let text = match std::str::from_utf8(bytes) {
        Ok(text) => text,
        Err(error) => {
            let message = format!("not UTF-8 text: the first bad byte is at offset {}", error.valid_up_to());
            return Err(Problem::new("$", message));
        }
    };
    let text = text.strip_prefix('\u{feff}').unwrap_or(text);
    if text.trim_ascii().is_empty() {
        return Err(Problem::new("$", "the document is empty").hint("`volley schema` prints what a job spec looks like"));
    }
    let mut doubled = Vec::new();
    let mut reader = serde_json::Deserializer::from_str(text);
    let seed = Seed { path: Place::Root, depth: 0, doubled: &mut doubled };
    match seed.deserialize(&mut reader).and_then(|value| reader.end().map(|()| value)) {
        Ok(value) => Ok((value, doubled)),
        Err(error) => Err(syntax_problem(&error)),
    }
}

fn syntax_problem(error: &serde_json::Error) -> Problem {
    let text = error.to_string();
    let reason = text.rsplit_once(" at line ").map_or(text.as_str(), |(reason, _)| reason);
    let message = format!("not JSON at line {}, column {}: {reason}", error.line(), error.column());
    let problem = Problem::new("$", message);
    if reason.contains("trailing comma") {
        problem.hint("remove the comma before the closing bracket")
    } else if reason.contains("key must be a string") {
        problem.hint("field names stand in double quotation marks, and JSON has no comments")
    } else if reason.contains("EOF") {
        problem.hint("a bracket or quotation mark isn't closed")
    } else {
        problem
    }
}

/// Where in the document something is. Written out only when there is a problem: most documents have none.
#[derive(Clone, Copy)]
enum Place<'a> {
    Root,
    Field(&'a Place<'a>, &'a str),
    Element(&'a Place<'a>, usize),
}

impl Place<'_> {
    fn path(&self) -> String {
        match self {
            Self::Root => "$".to_owned(),
            Self::Field(outer, name) => join(&outer.path(), name),
            Self::Element(outer, index) => format!("{}[{index}]", outer.path()),
        }
    }
}

/// Builds a [`Value`], noting doubled fields and refusing depth.
struct Seed<'a> {
    path: Place<'a>,
    depth: usize,
    doubled: &'a mut Vec<Problem>,
}

impl<'de> DeserializeSeed<'de> for Seed<'_> {
    type Value = Value;
    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Value, D::Error> {
        deserializer.deserialize_any(self)
    }
}

impl Seed<'_> {
    fn deeper<E: serde::de::Error>(&self) -> Result<usize, E> {
        if self.depth >= DEPTH_MAX {
            return Err(E::custom(format_args!("nested more than {DEPTH_MAX} deep")));
        }
        Ok(self.depth + 1)
    }
}

impl<'de> Visitor<'de> for Seed<'_> {
    type Value = Value;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("JSON")
    }

    fn visit_unit<E>(self) -> Result<Value, E> {
        Ok(Value::Null)
    }

    fn visit_bool<E>(self, value: bool) -> Result<Value, E> {
        Ok(Value::Bool(value))
    }

    fn visit_i64<E>(self, value: i64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_u64<E>(self, value: u64) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_f64<E: serde::de::Error>(self, value: f64) -> Result<Value, E> {
        serde_json::Number::from_f64(value).map(Value::Number).ok_or_else(|| E::custom("number out of range"))
    }

    fn visit_str<E>(self, value: &str) -> Result<Value, E> {
        Ok(value.into())
    }

    fn visit_string<E>(self, value: String) -> Result<Value, E> {
        Ok(Value::String(value))
    }

    fn visit_seq<A: SeqAccess<'de>>(self, mut sequence: A) -> Result<Value, A::Error> {
        let depth = self.deeper()?;
        let mut array = Vec::new();
        loop {
            let path = Place::Element(&self.path, array.len());
            match sequence.next_element_seed(Seed { path, depth, doubled: &mut *self.doubled })? {
                Some(value) => array.push(value),
                None => return Ok(Value::Array(array)),
            }
        }
    }

    fn visit_map<A: MapAccess<'de>>(self, mut entries: A) -> Result<Value, A::Error> {
        let depth = self.deeper()?;
        let mut object = Map::new();
        while let Some(key) = entries.next_key::<String>()? {
            let path = Place::Field(&self.path, &key);
            let value = entries.next_value_seed(Seed { path, depth, doubled: &mut *self.doubled })?;
            if object.contains_key(&key) {
                if self.doubled.len() > PROBLEMS_MAX {
                    return Err(A::Error::custom("far too many fields that are given twice"));
                }
                self.doubled.push(Problem::new(path.path(), "given twice").hint("keep one of the two"));
            } else {
                object.insert(key, value);
            }
        }
        Ok(Value::Object(object))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    /// Whatever is wrong in a spec, what stands in for it can be read: else the other problems would go unseen.
    #[test]
    fn stand_ins_always_make_a_readable_spec() {
        let base = json!({
            "version": "volley/v1", "name": "x",
            "items": { "matrix": { "axes": { "a": [1] }, "include": [{ "a": 2 }] } },
            "task": {
                "isolation": "microvm", "image": "i", "command": ["a", "b"], "env": { "A": "b" }, "stdin": "x",
                "resources": { "cpus": 1, "memory": "1GiB", "pids": 4 }, "outputs": ["o"],
                "inputs": [{ "from": "s3://bucket/k", "path": "p", "executable": true }],
                "volumes": [{ "volume": "v", "path": "/v", "access": "rw" }],
                "network": { "allow": [{ "host": "h", "ports": [1] }] }, "secrets": [{ "name": "n", "env": "N" }],
                "timeouts": { "run": "1s" },
                "retry": { "backoff": { "factor": 2 }, "rules": [{ "match": { "classes": ["oom"] }, "action": "fail" }] }
            },
            "stages": [{ "name": "s", "needs": [{ "stage": "t", "by": "index" }], "task": { "command": "x" } }],
            "schedule": { "cron": "* * * * *", "overlap": "skip" }, "notify": [{ "webhook": "http://x", "on": ["failed"] }],
            "retention": { "job": "1d" }, "limits": { "failFast": "now", "maxFailures": 1 }
        });
        assert!(read(base.to_string().as_bytes()).is_ok_and(|read| read.problems.is_empty()));
        let mut places = Vec::new();
        pointers(&base, "", &mut places);
        assert!(places.len() > 70);
        for place in places {
            for odd in [json!(-1), json!(1e300), json!(""), json!([]), json!({}), json!([[]]), json!(true), json!({ "odd": 1 })] {
                let mut changed = base.clone();
                if let Some(slot) = changed.pointer_mut(&place) {
                    *slot = odd.clone();
                }
                let read = read(changed.to_string().as_bytes());
                assert!(read.as_ref().is_ok_and(|read| read.spec.is_some()), "{place} {odd} {:?}", read.err());
            }
        }
    }

    fn pointers(value: &Value, at: &str, out: &mut Vec<String>) {
        out.push(at.to_owned());
        match value {
            Value::Object(object) => object.iter().for_each(|(key, value)| pointers(value, &format!("{at}/{key}"), out)),
            Value::Array(array) => array.iter().enumerate().for_each(|(i, value)| pointers(value, &format!("{at}/{i}"), out)),
            Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => {}
        }
    }
}
