//! What is wrong with a spec, in words for the person who wrote it.
//!
//! Owns the shape of one problem, its text, and the numbered list. Does not own finding problems (`parse`, `check`, `validate`).

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::units;

/// Most problems listed; a document with more is another document altogether.
pub const PROBLEMS_MAX: usize = 100;
/// Longest piece of the spec that is quoted, in characters.
const QUOTE_LEN_MAX: usize = 60;

/// One problem: where, what, what was found, what is allowed, what to do.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Problem {
    /// JSON path of the place, such as `$.task.resources.memory`.
    pub path: String,
    /// What is wrong.
    pub message: String,
    /// What stands there, as shortened JSON.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub found: Option<String>,
    /// What may stand there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub allowed: Option<String>,
    /// What to do about it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hint: Option<String>,
    /// A place this problem was concluded from: with a problem there, this one may be no problem at all and isn't shown.
    #[serde(skip)]
    pub(crate) depends: Option<String>,
}

impl Problem {
    /// A problem at `path`.
    #[must_use]
    pub fn new(path: impl Into<String>, message: impl Into<String>) -> Self {
        Self { path: path.into(), message: message.into(), found: None, allowed: None, hint: None, depends: None }
    }

    /// Says what was found there.
    #[must_use]
    pub fn found(mut self, found: impl fmt::Display) -> Self {
        self.found = Some(shorten(&found.to_string()));
        self
    }

    /// Says what is allowed there.
    #[must_use]
    pub fn allowed(mut self, allowed: impl Into<String>) -> Self {
        self.allowed = Some(allowed.into());
        self
    }

    /// Says what to do.
    #[must_use]
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// Everything but the path, as one line.
    #[must_use]
    pub fn explanation(&self) -> String {
        let mut text = self.message.clone();
        if let Some(found) = &self.found {
            text.push_str(&format!("; found {found}"));
        }
        if let Some(hint) = &self.hint {
            text.push_str(&format!("; {hint}"));
        }
        if let Some(allowed) = &self.allowed {
            let asked = self.hint.as_ref().is_some_and(|hint| hint.ends_with('?'));
            text.push_str(&format!("{} allowed: {allowed}", if asked { "" } else { ";" }));
        }
        text
    }

    pub(crate) fn depends(mut self, path: impl Into<String>) -> Self {
        self.depends = Some(path.into());
        self
    }
}

impl fmt::Display for Problem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.path, self.explanation())
    }
}

/// Everything that is wrong with a spec, at least one problem, in the order of finding.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
#[serde(transparent)]
pub struct Problems(pub Vec<Problem>);

impl From<Problem> for Problems {
    fn from(problem: Problem) -> Self {
        Self(vec![problem])
    }
}

impl fmt::Display for Problems {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let count = self.0.len();
        write!(f, "{} in the job spec; nothing was created:", units::count(count as u64, "problem"))?;
        for (number, problem) in (1..).zip(self.0.iter().take(PROBLEMS_MAX)) {
            write!(f, "\n  {number}. {problem}")?;
        }
        if count > PROBLEMS_MAX {
            write!(f, "\n  and {} more", count - PROBLEMS_MAX)?;
        }
        Ok(())
    }
}

/// Cuts a text that is quoted in a message.
#[must_use]
pub(crate) fn shorten(text: &str) -> String {
    match text.char_indices().nth(QUOTE_LEN_MAX) {
        Some((cut, _)) => format!("{}…", &text[..cut]),
        None => text.to_owned(),
    }
}

/// Adds a field to a JSON path.
#[must_use]
pub(crate) fn join(path: &str, key: &str) -> String {
    let plain =
        !key.is_empty() && key.len() <= QUOTE_LEN_MAX && key.bytes().all(|b| b.is_ascii_alphanumeric() || matches!(b, b'_' | b'-' | b'$'));
    if plain { format!("{path}.{key}") } else { format!("{path}[{:?}]", shorten(key)) }
}

/// The known name that `name` was probably meant to be.
#[must_use]
pub(crate) fn suggest<'a>(name: &str, known: impl Iterator<Item = &'a str>) -> Option<&'a str> {
    let plain = |text: &str| text.replace(['_', '-'], "").to_lowercase();
    let meant = plain(name);
    // Only short names are compared: the comparison takes the product of both lengths.
    if meant.len() > 64 {
        return None;
    }
    let allowance = 1.max(meant.chars().count() / 3);
    known
        .map(|candidate| (strsim::damerau_levenshtein(&meant, &plain(candidate)), candidate))
        .filter(|(distance, candidate)| *distance <= allowance && *distance < candidate.len())
        .min()
        .map(|(_, candidate)| candidate)
}

/// `a, b, c`, or the first thirty of them.
#[must_use]
pub(crate) fn list<'a>(names: impl Iterator<Item = &'a str>) -> String {
    const SHOWN: usize = 30;
    let names: Vec<&str> = names.take(SHOWN + 1).collect();
    let mut text = names.iter().take(SHOWN).copied().collect::<Vec<_>>().join(", ");
    if names.len() > SHOWN {
        text.push_str(", …");
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_problem_reads_as_one_line() {
        let p = Problem::new("$.task.retry.atempts", "unknown field").hint("did you mean \"attempts\"?").allowed("attempts, rules");
        assert_eq!(p.to_string(), "$.task.retry.atempts: unknown field; did you mean \"attempts\"? allowed: attempts, rules");
        let many = Problems(vec![p; 101]);
        assert!(many.to_string().ends_with("\n  and 1 more"));
    }

    #[test]
    fn names_are_suggested_when_near_and_only_then() {
        let known = ["attempts", "infraAttempts", "backoff", "rules"];
        assert_eq!(suggest("atempts", known.into_iter()), Some("attempts"));
        assert_eq!(suggest("infra_attempts", known.into_iter()), Some("infraAttempts"));
        assert_eq!(suggest("colour", known.into_iter()), None);
        assert_eq!(suggest(&"x".repeat(100_000), known.into_iter()), None);
    }

    #[test]
    fn odd_keys_are_quoted_in_paths() {
        assert_eq!(join("$.a", "b c"), "$.a[\"b c\"]");
        assert_eq!(join("$.a", "b"), "$.a.b");
    }
}
