//! Reading the repository's own files.
//!
//! Owns finding them, and a view of Rust source with comments and texts blanked out, so that the rules see code only.

use std::path::{Path, PathBuf};

/// The repository.
pub fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// Every file whose name ends with one of `endings`, relative to the root and in order; without what is built or hidden.
pub fn files(endings: &[&str]) -> Vec<String> {
    let mut found = Vec::new();
    walk(&root(), &mut found);
    let mut names: Vec<String> = found.iter().map(|path| path.strip_prefix(root()).unwrap().to_str().unwrap().to_owned()).collect();
    names.retain(|name| endings.iter().any(|ending| name.ends_with(ending)));
    names.sort();
    names
}

fn walk(dir: &Path, found: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(dir).unwrap() {
        let path = entry.unwrap().path();
        let name = path.file_name().unwrap().to_str().unwrap();
        match path.is_dir() {
            true if name.starts_with('.') || name == "target" || name == "node_modules" => {}
            true => walk(&path, found),
            false => found.push(path),
        }
    }
}

/// A file's text.
pub fn read(name: &str) -> String {
    std::fs::read_to_string(root().join(name)).unwrap_or_else(|e| panic!("{name}: {e}"))
}

/// Is the whole file for tests?
pub fn is_test(name: &str) -> bool {
    let parts: Vec<&str> = name.split('/').collect();
    parts.iter().any(|part| matches!(*part, "tests" | "examples" | "benches")) || matches!(parts.last(), Some(&"tests.rs" | &"testing.rs"))
}

/// The source with comments, texts and characters blanked out; lines stay where they are.
pub fn code(source: &str) -> String {
    let bytes = source.as_bytes();
    let mut out = bytes.to_vec();
    let mut at = 0;
    while at < bytes.len() {
        let end = token_end(bytes, at);
        if let Some(end) = end {
            out[at..end].iter_mut().filter(|byte| **byte != b'\n').for_each(|byte| *byte = b' ');
            at = end;
        } else if is_word(bytes[at]) {
            // A whole word at once: the r of `for` begins no raw text.
            while at < bytes.len() && is_word(bytes[at]) {
                at += 1;
            }
        } else {
            at += 1;
        }
    }
    String::from_utf8_lossy(&out).into_owned()
}

fn is_word(byte: u8) -> bool {
    byte.is_ascii_alphanumeric() || byte == b'_'
}

/// Where the comment, text or character that begins at `at` ends.
fn token_end(bytes: &[u8], at: usize) -> Option<usize> {
    let rest = &bytes[at..];
    let find = |text: &[u8], from: usize| rest[from..].windows(text.len()).position(|w| w == text).map(|i| from + i + text.len());
    let whole = rest.len();
    if rest.starts_with(b"//") {
        return Some(at + rest.iter().position(|byte| *byte == b'\n').unwrap_or(whole));
    }
    if rest.starts_with(b"/*") {
        return Some(at + find(b"*/", 2).unwrap_or(whole));
    }
    let prefix = rest.iter().take_while(|byte| matches!(byte, b'b' | b'c' | b'r')).count();
    let raw = rest[..prefix].contains(&b'r');
    let hashes = rest[prefix..].iter().take_while(|byte| **byte == b'#').count();
    if raw && rest.get(prefix + hashes) == Some(&b'"') {
        let close = [b"\"".as_slice(), &vec![b'#'; hashes]].concat();
        return Some(at + find(&close, prefix + hashes + 1).unwrap_or(whole));
    }
    if rest.get(prefix) == Some(&b'"') {
        return Some(at + quoted(rest, prefix + 1, b'"').unwrap_or(whole));
    }
    if rest[0] == b'\'' {
        // A lifetime has no second quote behind its first character.
        let escaped = rest.get(1) == Some(&b'\\');
        let width = std::str::from_utf8(&rest[1..whole.min(5)]).map_or_else(|e| e.valid_up_to(), str::len);
        let first = std::str::from_utf8(&rest[1..=width]).ok()?.chars().next()?.len_utf8();
        return if escaped {
            quoted(rest, 1, b'\'').map(|end| at + end)
        } else {
            (rest.get(1 + first) == Some(&b'\'')).then_some(at + 2 + first)
        };
    }
    None
}

fn quoted(bytes: &[u8], from: usize, close: u8) -> Option<usize> {
    let mut at = from;
    while at < bytes.len() {
        match bytes[at] {
            b'\\' => at += 2,
            byte if byte == close => return Some(at + 1),
            _ => at += 1,
        }
    }
    None
}

/// Code without its `#[cfg(test)]` modules and functions; their lines are blank.
pub fn without_tests(code: &str) -> String {
    let mut out = code.to_owned();
    while let Some(at) = out.find("#[cfg(test)]") {
        let item = at + "#[cfg(test)]".len();
        let open = out[item..].find(['{', ';']).map_or(out.len() - 1, |i| item + i);
        let end = if out.as_bytes()[open] == b'{' { block_end(&out, open) } else { open + 1 };
        let blank: String = out[at..end].chars().map(|c| if c == '\n' { '\n' } else { ' ' }).collect();
        out.replace_range(at..end, &blank);
    }
    out
}

/// Just behind the brace that closes the one at `open`.
pub fn block_end(code: &str, open: usize) -> usize {
    let mut depth = 0usize;
    for (at, byte) in code.bytes().enumerate().skip(open) {
        match byte {
            b'{' => depth += 1,
            b'}' => depth -= 1,
            _ => {}
        }
        if depth == 0 {
            return at + 1;
        }
    }
    code.len()
}

/// The number of the line that a byte is on, from 1.
pub fn line_of(code: &str, at: usize) -> usize {
    code[..at].bytes().filter(|byte| *byte == b'\n').count() + 1
}

#[test]
fn blanking_leaves_code() {
    let source = "let a = '\"'; // x {\nlet b = r#\"}\"#; /* { */ let c: &'static str = \"\\\"}\"; for x in 'a'..'é' {}\n";
    let blanked = code(source);
    assert_eq!(blanked.matches('{').count(), 1, "{blanked}");
    assert_eq!(blanked.matches('}').count(), 1, "{blanked}");
    assert!(blanked.contains("&'static str") && blanked.lines().count() == 2, "{blanked}");
    assert_eq!(without_tests("a\n#[cfg(test)]\nmod t {\n{}\n}\nb").split_whitespace().collect::<Vec<_>>(), ["a", "b"]);
}
