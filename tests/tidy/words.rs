//! Words that may not stand in code.

use crate::none;
use crate::source::{code, files, is_test, line_of, read, without_tests};

/// Panics and unfinished work.
const NOWHERE: [&str; 6] = [".unwrap()", "todo!(", "unimplemented!(", "dbg!(", "#[allow(", "#![allow("];
/// What would make two coordinators differ: clocks, floats, chance, order of hash maps, I/O.
const NOT_IN_PURE_CODE: [&str; 9] = ["HashMap", "HashSet", "f32", "f64", "SystemTime", "Instant", "rand::", "tokio", "serde_json"];

/// Files of the coordinator that every coordinator must run alike.
fn is_pure(name: &str) -> bool {
    let pure = ["accept", "apply", "assign", "finish", "retry", "split", "track", "control", "timers", "uploads"];
    let rest = name.strip_prefix("coordinator/src/");
    rest.is_some_and(|rest| rest.starts_with("state/") || pure.iter().any(|stage| rest == format!("{stage}.rs")))
}

/// `word` on its own: no letter, digit or _ around it where it begins or ends with one.
fn places(code: &str, word: &str) -> Vec<usize> {
    let part = |c: Option<char>| c.is_some_and(|c| c.is_alphanumeric() || c == '_');
    let alone = |at: usize| {
        let (before, after) = (code[..at].chars().next_back(), code[at + word.len()..].chars().next());
        let (grows_before, grows_after) = (part(word.chars().next()) && part(before), part(word.chars().next_back()) && part(after));
        !grows_before && !grows_after
    };
    code.match_indices(word).map(|(at, _)| at).filter(|at| alone(*at)).collect()
}

#[test]
fn no_panics_and_nothing_unfinished_outside_tests() {
    let mut broken = Vec::new();
    for name in files(&[".rs"]).into_iter().filter(|name| !is_test(name)) {
        let code = without_tests(&code(&read(&name)));
        for word in NOWHERE {
            broken.extend(places(&code, word).into_iter().map(|at| format!("{name}:{}: {word}", line_of(&code, at))));
        }
    }
    none("an error is handled or handed on, work is finished, an exception has a reason (#[expect(…, reason)])", broken);
}

#[test]
fn no_work_is_left_in_comments() {
    let marks = [["TO", "DO"].concat(), ["FIX", "ME"].concat(), ["XX", "X"].concat()];
    let mut broken = Vec::new();
    for name in files(&[".rs", ".sh", ".py", ".md", ".toml"]) {
        let source = read(&name);
        for mark in &marks {
            broken.extend(places(&source, mark).into_iter().map(|at| format!("{name}:{}: {mark}", line_of(&source, at))));
        }
    }
    none("what is left to do stands in the issues", broken);
}

#[test]
fn what_every_coordinator_runs_alike_is_pure() {
    let mut broken = Vec::new();
    for name in files(&[".rs"]).into_iter().filter(|name| is_pure(name)) {
        let code = without_tests(&code(&read(&name)));
        for word in NOT_IN_PURE_CODE {
            broken.extend(places(&code, word).into_iter().map(|at| format!("{name}:{}: {word}", line_of(&code, at))));
        }
    }
    none("pure code takes time and chance as arguments and keeps order", broken);
}
