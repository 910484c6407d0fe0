//! `${…}` in the text fields of a task.
//!
//! Owns the names, reading a text once into segments, and putting a task's values in. Does not own which fields have it (`resolve`)
//! or whether an item has a field (`validate`, as far as that is known at submit).

use std::fmt::Write as _;

use serde_json::Value;

use crate::problem::{list, shorten, suggest};

/// Longest text that substitution may give, in bytes: the largest field (stdin) takes 256 KiB.
pub const TEXT_BYTES_MAX: usize = 256 * 1024;
/// Deepest `${item.a.b.c…}`, as deep as an item can be nested.
pub const ITEM_PATH_MAX: usize = 64;

/// The names that stand alone.
const NAMES: [&str; 4] = ["item", "index", "job.id", "attempt"];

/// One piece of a template.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Segment {
    /// Text as it stands.
    Text(String),
    /// The item, or what lies in it under these field names (or list indexes).
    Item(Vec<String>),
    /// The task's index.
    Index,
    /// The job's id.
    JobId,
    /// The attempt's number.
    Attempt,
}

/// A text that was read for `${…}`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Template {
    segments: Vec<Segment>,
}

/// Why a text is no template.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum TemplateError {
    /// `${` without `}`.
    #[error("${{ without its }}")]
    Unclosed,
    /// A name that isn't known.
    #[error("unknown name ${{{0}}}")]
    Unknown(String),
    /// `${item.}` and the like.
    #[error("${{{0}}} has an empty or overlong path")]
    BadPath(String),
}

impl TemplateError {
    /// What to do about it.
    #[must_use]
    pub fn hint(&self) -> String {
        match self {
            Self::Unclosed => "write $${ for a plain ${".to_owned(),
            Self::BadPath(_) => "a field's name follows the dot, such as ${item.name}".to_owned(),
            Self::Unknown(name) => match meant(name) {
                Some(meant) => format!("did you mean ${{{meant}}}?"),
                None => format!("for a variable of the shell write $${{{name}}}"),
            },
        }
    }

    /// What is allowed.
    #[must_use]
    pub fn allowed(&self) -> String {
        format!("${{item}}, ${{item.FIELD}}, {}", list(["${index}", "${job.id}", "${attempt}"].into_iter()))
    }
}

/// The values of one attempt.
#[derive(Debug, Clone, Copy)]
pub struct Values<'a> {
    /// The task's item.
    pub item: &'a Value,
    /// The task's index.
    pub index: u32,
    /// The job's id, as text.
    pub job: &'a str,
    /// The attempt's number, counted from 1.
    pub attempt: u32,
}

/// Why values couldn't be put in.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum SubstituteError {
    /// The item lacks a field.
    #[error("${{item.{path}}}: the item has no such field")]
    NoField {
        /// The whole path.
        path: String,
    },
    /// The result is too long.
    #[error("longer than {TEXT_BYTES_MAX} bytes once its values are put in")]
    TooLong,
}

impl Template {
    /// Reads a text.
    ///
    /// # Errors
    /// Every unknown name, and an open `${`.
    pub fn parse(text: &str) -> Result<Self, Vec<TemplateError>> {
        let mut segments = Vec::new();
        let mut errors = Vec::new();
        let mut plain = String::new();
        let mut rest = text;
        while let Some(at) = rest.find("${") {
            let (before, found) = rest.split_at(at);
            if let Some(kept) = before.strip_suffix('$') {
                plain.push_str(kept);
                plain.push_str("${");
                rest = &found[2..];
                continue;
            }
            plain.push_str(before);
            if !plain.is_empty() {
                segments.push(Segment::Text(std::mem::take(&mut plain)));
            }
            let Some(close) = found.find('}') else {
                errors.push(TemplateError::Unclosed);
                return Err(errors);
            };
            match name(&found[2..close]) {
                Ok(segment) => segments.push(segment),
                Err(error) => errors.push(error),
            }
            rest = &found[close + 1..];
        }
        plain.push_str(rest);
        if !plain.is_empty() {
            segments.push(Segment::Text(plain));
        }
        if errors.is_empty() { Ok(Self { segments }) } else { Err(errors) }
    }

    /// Its pieces, in order.
    #[must_use]
    pub fn segments(&self) -> &[Segment] {
        &self.segments
    }

    /// The text, if no value goes into it.
    #[must_use]
    pub fn literal(&self) -> Option<&str> {
        match self.segments.as_slice() {
            [] => Some(""),
            [Segment::Text(text)] => Some(text),
            _ => None,
        }
    }

    /// The text of a field in which nothing is replaced, so that `$${` means the same everywhere; none: something would have to be.
    #[must_use]
    pub fn plain(text: &str) -> Option<String> {
        Self::parse(text).ok()?.literal().map(str::to_owned)
    }

    /// The paths into the item that it uses; an empty path is the whole item.
    pub fn item_paths(&self) -> impl Iterator<Item = &[String]> {
        self.segments.iter().filter_map(|segment| match segment {
            Segment::Item(path) => Some(path.as_slice()),
            Segment::Text(_) | Segment::Index | Segment::JobId | Segment::Attempt => None,
        })
    }

    /// Puts the values in. A text of the item goes in as it is, anything else as compact JSON.
    ///
    /// # Errors
    /// [`SubstituteError`] when the item lacks a field or the result is too long.
    pub fn substitute(&self, values: &Values<'_>) -> Result<String, SubstituteError> {
        let mut text = String::new();
        for segment in &self.segments {
            match segment {
                Segment::Text(part) => text.push_str(part),
                Segment::Item(path) => match look_up(values.item, path) {
                    Some(Value::String(part)) => text.push_str(part),
                    Some(part) => push(&mut text, part),
                    None => return Err(SubstituteError::NoField { path: shorten(&path.join(".")) }),
                },
                Segment::Index => push(&mut text, values.index),
                Segment::JobId => text.push_str(values.job),
                Segment::Attempt => push(&mut text, values.attempt),
            }
            if text.len() > TEXT_BYTES_MAX {
                return Err(SubstituteError::TooLong);
            }
        }
        Ok(text)
    }
}

/// What an unknown name was probably meant to be.
fn meant(name: &str) -> Option<String> {
    if name == "job" {
        return Some("job.id".to_owned());
    }
    match name.split_once('.') {
        Some((head, field)) if suggest(head, ["item"].into_iter()).is_some() => Some(format!("item.{field}")),
        _ => suggest(name, NAMES.into_iter()).map(str::to_owned),
    }
}

fn push(text: &mut String, part: impl std::fmt::Display) {
    // Writing to a String can't fail.
    let _ = write!(text, "{part}");
}

fn name(name: &str) -> Result<Segment, TemplateError> {
    match name {
        "item" => Ok(Segment::Item(Vec::new())),
        "index" => Ok(Segment::Index),
        "job.id" => Ok(Segment::JobId),
        "attempt" => Ok(Segment::Attempt),
        other => {
            let path = other.strip_prefix("item.").ok_or_else(|| TemplateError::Unknown(shorten(other)))?;
            let path: Vec<String> = path.split('.').map(str::to_owned).collect();
            if path.len() > ITEM_PATH_MAX || path.iter().any(String::is_empty) {
                return Err(TemplateError::BadPath(shorten(other)));
            }
            Ok(Segment::Item(path))
        }
    }
}

/// What lies under a path: fields of objects by name, elements of lists by number.
#[must_use]
pub fn look_up<'a>(item: &'a Value, path: &[String]) -> Option<&'a Value> {
    path.iter().try_fold(item, |value, name| match value {
        Value::Object(object) => object.get(name),
        Value::Array(array) => list_index(name).and_then(|index| array.get(index)),
        Value::Null | Value::Bool(_) | Value::Number(_) | Value::String(_) => None,
    })
}

/// A list index as it is written in a path: digits without a leading zero.
#[must_use]
pub(crate) fn list_index(name: &str) -> Option<usize> {
    let plain = name.bytes().all(|b| b.is_ascii_digit()) && (name == "0" || !name.starts_with('0'));
    if plain { name.parse().ok() } else { None }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;
    use serde_json::json;

    fn put(text: &str, item: &Value) -> String {
        let values = Values { item, index: 7, job: "j42", attempt: 2 };
        match Template::parse(text) {
            Ok(template) => template.substitute(&values).unwrap_or_else(|e| format!("! {e}")),
            Err(errors) => errors.iter().map(|error| format!("? {error}; {}", error.hint())).collect(),
        }
    }

    #[test]
    fn names_become_values() {
        let item = json!({ "name": "a b", "n": 3, "deep": { "list": [1, { "x": null }] }, "flag": true });
        for (text, wanted) in [
            ("${item.name}-${index}-${job.id}-${attempt}", "a b-7-j42-2"),
            ("${item.n}${item.flag}", "3true"),
            ("${item.deep.list.0} ${item.deep.list.1.x}", "1 null"),
            ("${item.deep}", r#"{"list":[1,{"x":null}]}"#),
            ("$${item.n} $5 $$ {} $", "${item.n} $5 $$ {} $"),
            ("$$${index}", "$${index}"),
            ("", ""),
            ("${item.deep.list.01}", "! ${item.deep.list.01}: the item has no such field"),
            ("${item.nope}", "! ${item.nope}: the item has no such field"),
            ("${HOME}", "? unknown name ${HOME}; for a variable of the shell write $${HOME}"),
            ("${indx}", "? unknown name ${indx}; did you mean ${index}?"),
            ("${itm.name}", "? unknown name ${itm.name}; did you mean ${item.name}?"),
            ("${job}", "? unknown name ${job}; did you mean ${job.id}?"),
            ("${item", "? ${ without its }; write $${ for a plain ${"),
            ("${item.}", "? ${item.} has an empty or overlong path; a field's name follows the dot, such as ${item.name}"),
        ] {
            assert_eq!(put(text, &item), wanted, "{text}");
        }
    }

    #[test]
    fn a_result_is_bounded() {
        let item = json!("x".repeat(1000));
        assert!(put(&"${item}".repeat(300), &item).starts_with("! longer than"));
    }

    proptest! {
        #[test]
        fn no_text_panics_and_escaped_text_comes_back(text in r"(\PC|\$|\{|\}|item|\.){0,40}") {
            let _ = put(&text, &json!({ "a": [1] }));
            let escaped = text.replace("${", "$${");
            prop_assert_eq!(put(&escaped, &Value::Null), text);
        }
    }
}
