//! Bytes of an answer, line by line.
//!
//! Owns splitting at line feeds wherever the network cut, and the limit of a line. Does not own what lines mean.

use bytes::{Buf as _, BytesMut};

use crate::error::Error;
use crate::http::Answer;
use bytes::Bytes;

/// Longest line, in bytes: a result row with every tail full and every byte escaped is a tenth of it.
const LINE_BYTES_MAX: usize = 1024 * 1024;

/// Splits bytes at line feeds.
#[derive(Debug, Default)]
pub(crate) struct Splitter {
    buffer: BytesMut,
    /// How much of the buffer has no line feed in it.
    searched: usize,
}

impl Splitter {
    pub(crate) fn push(&mut self, bytes: &[u8]) {
        self.buffer.extend_from_slice(bytes);
    }

    /// The next whole line, without its line feed (and carriage return).
    pub(crate) fn pop(&mut self) -> Option<Bytes> {
        let Some(at) = self.buffer[self.searched..].iter().position(|b| *b == b'\n') else {
            self.searched = self.buffer.len();
            return None;
        };
        let mut line = self.buffer.split_to(self.searched + at).freeze();
        self.buffer.advance(1);
        self.searched = 0;
        if line.last() == Some(&b'\r') {
            line.truncate(line.len() - 1);
        }
        Some(line)
    }

    /// Bytes of a line that isn't whole.
    pub(crate) fn rest(&self) -> usize {
        self.buffer.len()
    }
}

/// An answer, line by line.
#[derive(Debug)]
pub(crate) struct Lines {
    pub(crate) answer: Answer,
    splitter: Splitter,
}

impl Lines {
    pub(crate) fn new(answer: Answer) -> Self {
        Self { answer, splitter: Splitter::default() }
    }

    /// The next line; `None` at the regular end. An end within a line is a broken connection.
    pub(crate) async fn next(&mut self) -> Result<Option<Bytes>, Error> {
        loop {
            if let Some(line) = self.splitter.pop() {
                return Ok(Some(line));
            }
            if self.splitter.rest() > LINE_BYTES_MAX {
                return Err(self.answer.unexpected(format!("a line is longer than {LINE_BYTES_MAX} bytes")));
            }
            match self.answer.chunk().await? {
                Some(chunk) => self.splitter.push(&chunk),
                None if self.splitter.rest() > 0 => {
                    return Err(self.answer.broken("it ended within a line"));
                }
                None => return Ok(None),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_the_same_however_the_network_cut_them() {
        let text = b"one\r\n\ntwo three\nrest";
        for size in 1..=text.len() {
            let mut splitter = Splitter::default();
            let mut lines = Vec::new();
            for part in text.chunks(size) {
                splitter.push(part);
                while let Some(line) = splitter.pop() {
                    lines.push(String::from_utf8_lossy(&line).into_owned());
                }
            }
            assert_eq!(lines, ["one", "", "two three"], "parts of {size}");
            assert_eq!(splitter.rest(), 4);
        }
    }
}
