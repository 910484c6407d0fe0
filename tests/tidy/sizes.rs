//! Nothing is too long to be read at once.

use crate::none;
use crate::source::{block_end, code, files, is_test, line_of, read, without_tests};

/// Longest file, in lines, without its tests.
const FILE_LINES_MAX: usize = 600;
/// Longest function, in lines, signature and closing brace included.
const FUNCTION_LINES_MAX: usize = 70;

/// Lines of a file that are not part of its tests. Blank lines and comments count.
fn lines(name: &str) -> usize {
    let source = read(name);
    if is_test(name) {
        return source.lines().count();
    }
    let code = code(&source);
    let tests = code.find("#[cfg(test)]\nmod ").map_or(code.len(), |at| at);
    line_of(&code, tests)
}

/// Name, first line and number of lines of each function.
fn functions(code: &str) -> Vec<(String, usize, usize)> {
    let mut found = Vec::new();
    for (at, _) in code.match_indices("fn ") {
        let before = code[..at].chars().next_back();
        let name: String = code[at + 3..].chars().take_while(|c| c.is_alphanumeric() || *c == '_').collect();
        if name.is_empty() || before.is_some_and(|c| c.is_alphanumeric() || c == '_') {
            continue;
        }
        let mut depth = 0i32;
        let open = code[at..].bytes().position(|byte| {
            depth += match byte {
                b'(' | b'[' => 1,
                b')' | b']' => -1,
                _ => 0,
            };
            depth == 0 && (byte == b'{' || byte == b';')
        });
        let Some(open) = open.map(|i| at + i).filter(|open| code.as_bytes()[*open] == b'{') else { continue };
        let first = line_of(code, at);
        found.push((name, first, line_of(code, block_end(code, open) - 1) - first + 1));
    }
    found
}

#[test]
fn files_are_short() {
    let long = files(&[".rs"]).into_iter().map(|name| (lines(&name), name)).filter(|(lines, _)| *lines > FILE_LINES_MAX);
    none(
        &format!("at most {FILE_LINES_MAX} lines a file without its tests"),
        long.map(|(lines, name)| format!("{name}: {lines}")).collect(),
    );
}

#[test]
fn functions_are_short() {
    let mut long = Vec::new();
    for name in files(&[".rs"]) {
        let all = code(&read(&name));
        let code = if is_test(&name) { all } else { without_tests(&all) };
        let over = functions(&code).into_iter().filter(|(_, _, lines)| *lines > FUNCTION_LINES_MAX);
        long.extend(over.map(|(function, line, lines)| format!("{name}:{line}: {function} has {lines}")));
    }
    none(&format!("at most {FUNCTION_LINES_MAX} lines a function"), long);
}

#[test]
fn functions_are_found() {
    let source = "fn a() {\n}\nimpl X { fn b(&self, f: fn(u8) -> [u8; 2]) -> Y {\n\n\n} }\ntrait T { fn c(); }\n";
    assert_eq!(functions(source), [("a".to_owned(), 1, 2), ("b".to_owned(), 3, 4)]);
}
