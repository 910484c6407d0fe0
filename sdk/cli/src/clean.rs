//! Text from tasks on a terminal.
//!
//! Owns making it harmless: what a task writes comes from code that nobody trusts, and escape sequences can retitle windows, move
//! the cursor over other lines, or answer as if somebody typed. Does not own what is shown.

use std::io::{self, IsTerminal as _};
use std::sync::OnceLock;

/// One line of at most `max` characters without control characters. Cut text ends in "…".
#[must_use]
pub fn line(text: &str, max: usize) -> String {
    let text = text.trim_end();
    let mut chars = text.chars().map(|c| match c {
        '\n' | '\t' | '\r' => ' ',
        c if is_unsafe(c) => '\u{fffd}',
        c => c,
    });
    let mut line: String = chars.by_ref().take(max).collect();
    if chars.next().is_some() {
        line.pop();
        line.push('…');
    }
    line
}

/// As [`line`], but cut only where a person looks at it: what goes into a file or another program stays whole.
#[must_use]
pub fn cell(text: &str, max: usize) -> String {
    static TERMINAL: OnceLock<bool> = OnceLock::new();
    let terminal = *TERMINAL.get_or_init(|| io::stdout().is_terminal());
    line(text, if terminal { max } else { usize::MAX })
}

/// Control characters, and those that turn the direction of writing.
fn is_unsafe(c: char) -> bool {
    c.is_control() || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

/// Filters bytes for a terminal: line feeds, tabs, carriage returns and colours stay, other control characters become "�". Works
/// across pieces.
#[derive(Debug, Default)]
pub struct Filter {
    /// An escape sequence that isn't whole yet.
    pending: Vec<u8>,
}

/// Longest colour sequence: `ESC [ 38;2;255;255;255;48;2;255;255;255 m` is 40 bytes.
const SEQUENCE_LEN_MAX: usize = 48;

impl Filter {
    /// Filters the next piece.
    #[must_use]
    pub fn feed(&mut self, bytes: &[u8]) -> Vec<u8> {
        let mut out = Vec::with_capacity(bytes.len());
        for &byte in bytes {
            match (self.pending.len(), byte) {
                (0, 0x1b) => self.pending.push(byte),
                (0, _) => plain(byte, &mut out),
                (1, b'[') => self.pending.push(byte),
                (2.., b'0'..=b'9' | b';' | b':') if self.pending.len() < SEQUENCE_LEN_MAX => self.pending.push(byte),
                (2.., b'm') => {
                    out.append(&mut self.pending);
                    out.push(byte);
                }
                _ => {
                    self.give_up(&mut out);
                    if byte == 0x1b { self.pending.push(byte) } else { plain(byte, &mut out) }
                }
            }
        }
        out
    }

    /// What began as a colour isn't one: without its escape character it is harmless.
    fn give_up(&mut self, out: &mut Vec<u8>) {
        out.extend_from_slice("\u{fffd}".as_bytes());
        out.extend_from_slice(self.pending.get(1..).unwrap_or_default());
        self.pending.clear();
    }
}

fn plain(byte: u8, out: &mut Vec<u8>) {
    match byte {
        b'\n' | b'\t' | b'\r' => out.push(byte),
        0..0x20 | 0x7f => out.extend_from_slice("\u{fffd}".as_bytes()),
        _ => out.push(byte),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_is_one_line_and_harmless() {
        assert_eq!(line("a\nb\tc\x1b[2J\u{202e}", 80), "a b c\u{fffd}[2J\u{fffd}");
        assert_eq!(line("abcdef", 4), "abc…");
        assert_eq!(line("abcd\n", 4), "abcd");
    }

    #[test]
    fn colours_pass_and_everything_else_is_shown_as_text() {
        let text = b"\x1b[1;31mred\x1b[0m\r\n\x1b]0;title\x07\x1b[2J\x08end\x1b";
        let wanted = "\x1b[1;31mred\x1b[0m\r\n\u{fffd}]0;title\u{fffd}\u{fffd}[2J\u{fffd}end";
        for size in 1..=text.len() {
            let mut filter = Filter::default();
            let out: Vec<u8> = text.chunks(size).flat_map(|piece| filter.feed(piece)).collect();
            assert_eq!(String::from_utf8_lossy(&out), wanted, "pieces of {size}");
        }
    }
}
