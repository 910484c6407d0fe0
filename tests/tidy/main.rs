//! The house rules, checked on the repository's own files.
//!
//! Owns what no compiler checks: layout, directions of dependencies, sizes, links. Each test names every place that breaks its rule.
//! Generated files (JSON Schema, OpenAPI) are compared in the crates that generate them.
#![expect(clippy::unwrap_used, reason = "a test says with a panic that it failed")]

mod dependencies;
mod format;
mod layout;
mod links;
mod sizes;
mod source;
mod words;

/// Fails with all places at once.
#[track_caller]
fn none(rule: &str, broken: Vec<String>) {
    assert!(broken.is_empty(), "{rule}:\n  {}\n", broken.join("\n  "));
}
