//! One captured stream: its beginning and its end, however much came in between.
//!
//! Owns the size cap, the truncation mark and the inline tail. Pure. Does not own reading the pipe (`execute`).

use std::collections::VecDeque;

use minicbor::bytes::ByteVec;
use volley_jobspecs::units;
use volley_jobspecs::wire::live::left_out;
use volley_jobspecs::wire::report::{Stream, TAIL_BYTES_MAX};

/// What is kept of a stream.
#[derive(Debug, Clone)]
pub struct Capture {
    head_max: usize,
    tail_max: usize,
    head: Vec<u8>,
    tail: VecDeque<u8>,
    total: u64,
}

impl Capture {
    /// Keeps at most `bytes_max`: a quarter from the beginning, where a program says what it is doing, the rest from the end, where
    /// it says what went wrong.
    #[must_use]
    pub fn new(bytes_max: usize) -> Self {
        let head_max = bytes_max / 4;
        Self { head_max, tail_max: bytes_max - head_max, head: Vec::new(), tail: VecDeque::new(), total: 0 }
    }

    /// Adds what was read.
    pub fn push(&mut self, bytes: &[u8]) {
        self.total += bytes.len() as u64;
        let room = self.head_max - self.head.len();
        let (first, rest) = bytes.split_at(room.min(bytes.len()));
        self.head.extend_from_slice(first);
        let rest = rest.get(rest.len().saturating_sub(self.tail_max)..).unwrap_or_default();
        let over = (self.tail.len() + rest.len()).saturating_sub(self.tail_max);
        self.tail.drain(..over);
        self.tail.extend(rest);
    }

    /// Bytes that came, also those not kept.
    #[must_use]
    pub fn total(&self) -> u64 {
        self.total
    }

    fn missing(&self) -> u64 {
        self.total - self.head.len() as u64 - self.tail.len() as u64
    }

    /// How much of it is not kept, in words; none when all of it is.
    #[must_use]
    pub fn cut(&self) -> Option<String> {
        let missing = self.missing();
        (missing > 0).then(|| {
            let (all, kept) = units::different_bytes(self.total, self.total - missing);
            format!("{kept} of {all} are kept, its beginning and its end")
        })
    }

    /// Is more kept than rides inline?
    #[must_use]
    pub fn wants_object(&self) -> bool {
        self.total > TAIL_BYTES_MAX as u64
    }

    /// What is held, at most `bytes_max` of it: the beginning, and the end with the place where that begins. With nothing between them
    /// when all is held and it isn't more.
    #[must_use]
    pub fn held(&self, bytes_max: usize) -> (Vec<u8>, u64, Vec<u8>) {
        let whole = self.missing() == 0;
        let mut first = self.head.clone();
        if !whole || self.total > bytes_max as u64 {
            first.truncate(bytes_max / 4);
        }
        let room = bytes_max - first.len();
        let from_tail = self.tail.len().min(room);
        let from_head = if whole { (room - from_tail).min(self.head.len() - first.len()) } else { 0 };
        let mut last: Vec<u8> = self.head.get(self.head.len() - from_head..).unwrap_or_default().to_vec();
        last.extend(self.tail.iter().skip(self.tail.len() - from_tail));
        (first, self.total - last.len() as u64, last)
    }

    /// Everything kept, with a line where the middle is missing.
    #[must_use]
    pub fn kept(&self) -> Vec<u8> {
        let mut all = self.head.clone();
        match self.missing() {
            0 => {}
            missing => all.extend_from_slice(left_out(missing).as_bytes()),
        }
        let (a, b) = self.tail.as_slices();
        all.extend_from_slice(a);
        all.extend_from_slice(b);
        all
    }

    /// What a report says of it; `None` when nothing came. `stored`: it is an object.
    #[must_use]
    pub fn stream(&self, stored: bool) -> Option<Stream> {
        if self.total == 0 {
            return None;
        }
        let from_tail = self.tail.len().min(TAIL_BYTES_MAX);
        // The head is followed by the tail only when nothing is missing.
        let from_head = if self.missing() == 0 { (TAIL_BYTES_MAX - from_tail).min(self.head.len()) } else { 0 };
        let mut tail: Vec<u8> = self.head.get(self.head.len() - from_head..).unwrap_or_default().to_vec();
        tail.extend(self.tail.iter().skip(self.tail.len() - from_tail));
        Some(Stream { bytes: self.total, tail: ByteVec::from(tail), stored, truncated: self.missing() > 0 })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_long_stream_keeps_both_ends_and_says_what_is_missing() {
        let mut capture = Capture::new(8_000);
        for byte in 0..100u8 {
            capture.push(&[byte; 1_000]);
        }
        let kept = capture.kept();
        assert_eq!(kept.iter().filter(|b| **b == 0).count(), 1_000);
        assert_eq!(kept.iter().filter(|b| **b == 99).count(), 1_000);
        assert!(String::from_utf8_lossy(&kept).contains("[volley: 92000 bytes left out here]"));
        assert!(capture.cut().is_some_and(|cut| cut.contains(" of ")));
        assert!(capture.stream(true).is_some_and(|s| s.truncated && s.bytes == 100_000 && s.tail.len() == TAIL_BYTES_MAX));
    }

    #[test]
    fn what_is_held_is_shown_from_both_ends() {
        let mut capture = Capture::new(400);
        capture.push(&(0..=99).collect::<Vec<u8>>());
        capture.push(&(100..150).collect::<Vec<u8>>());
        assert_eq!(capture.held(1_000), ((0..100).collect(), 100, (100..150).collect()));
        // Less is wanted than is held: also of the beginning's end.
        assert_eq!(capture.held(80), ((0..20).collect(), 90, (90..150).collect()));
        assert_eq!(capture.held(120), ((0..30).collect(), 60, (60..150).collect()));
        capture.push(&[7; 1_000]);
        let (first, at, last) = capture.held(1_000);
        assert_eq!((first, at, last.len()), ((0..100).collect(), 850, 300));
        assert_eq!(capture.held(80), ((0..20).collect(), 1_090, vec![7; 60]));
        assert_eq!(Capture::new(400).held(80), (Vec::new(), 0, Vec::new()));
    }

    proptest! {
        #[test]
        fn short_streams_are_kept_whole(pieces in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..700), 0..20)) {
            let all: Vec<u8> = pieces.concat();
            let mut capture = Capture::new(6_000);
            for piece in &pieces { capture.push(piece); }
            let tail = &all[all.len().saturating_sub(TAIL_BYTES_MAX)..];
            if all.len() <= 6_000 { prop_assert_eq!(capture.kept(), all.clone()); }
            match capture.stream(false) {
                None => prop_assert!(all.is_empty()),
                Some(stream) => prop_assert_eq!(&stream.tail[..], tail),
            }
        }
    }
}
