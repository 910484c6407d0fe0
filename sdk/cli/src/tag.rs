//! Output of many tasks in one stream.
//!
//! Owns cutting it into lines and tagging each with its task. Does not own where it comes from.

use std::collections::BTreeMap;

/// Longest line held back until it is whole, in bytes: a progress bar without line feeds must not fill the memory.
const HELD_BYTES_MAX: usize = 16 * 1024;

/// Cuts the output of many tasks into tagged lines.
#[derive(Debug, Default)]
pub struct Tagger {
    held: BTreeMap<(u32, String), Vec<u8>>,
}

impl Tagger {
    /// Takes what a task wrote to a stream; gives the lines that are whole now.
    pub fn feed(&mut self, index: u32, stream: &str, bytes: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        let mut held = self.held.remove(&(index, stream.to_owned())).unwrap_or_default();
        held.extend_from_slice(bytes);
        while let Some(at) = held.iter().position(|b| *b == b'\n') {
            let rest = held.split_off(at + 1);
            tagged(index, stream, &held, &mut out);
            held = rest;
        }
        if held.len() > HELD_BYTES_MAX {
            // Not within a character: its last bytes are at most three behind its first.
            let inside = held.iter().rev().take(3).take_while(|byte| **byte & 0xc0 == 0x80).count();
            let begins = held.iter().rev().nth(inside).is_some_and(|byte| *byte >= 0xc0);
            let rest = held.split_off(held.len() - if begins { inside + 1 } else { 0 });
            held.push(b'\n');
            tagged(index, stream, &held, &mut out);
            held = rest;
        }
        if !held.is_empty() {
            self.held.insert((index, stream.to_owned()), held);
        }
        out
    }

    /// Gives what was held back, as lines.
    pub fn end(&mut self) -> Vec<u8> {
        let mut out = Vec::new();
        for ((index, stream), mut held) in std::mem::take(&mut self.held) {
            held.push(b'\n');
            tagged(index, &stream, &held, &mut out);
        }
        out
    }
}

fn tagged(index: u32, stream: &str, line: &[u8], out: &mut Vec<u8>) {
    // Most output is stdout: the tag says so only where it isn't.
    let tag = if stream == "stderr" { format!("[{index} err] ") } else { format!("[{index}] ") };
    out.extend_from_slice(tag.as_bytes());
    out.extend_from_slice(line);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_of_tasks_are_not_mixed_up_and_none_is_lost() {
        let mut tagger = Tagger::default();
        let mut out = tagger.feed(3, "stdout", b"one\ntw");
        out.extend(tagger.feed(5, "stderr", b"oops\n"));
        out.extend(tagger.feed(3, "stdout", b"o\nthree"));
        out.extend(tagger.end());
        assert_eq!(String::from_utf8_lossy(&out), "[3] one\n[5 err] oops\n[3] two\n[3] three\n");
    }

    #[test]
    fn an_endless_line_is_cut() {
        let mut tagger = Tagger::default();
        let out = tagger.feed(1, "stdout", &[b'x'; HELD_BYTES_MAX + 1]);
        assert_eq!(out.len(), HELD_BYTES_MAX + 1 + "[1] \n".len());
        assert!(tagger.end().is_empty());
    }
}
