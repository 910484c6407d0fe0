//! One end of a session: what it may say, and what it must hear.
//!
//! Owns the numbers, the windows and the silence, the same for both ends. Pure: time comes as milliseconds of any clock that never goes back.
//! Does not own I/O, nor what is done with what is heard. Frames may be lost or doubled on their way (core NATS), so each has a number,
//! and one that is not the next ends the session: output with a hole in it would be worse than none.

use std::fmt;

use super::{Body, Frame, PIECE_BYTES_MAX};

/// Bytes that may be on their way in one direction without having been taken: more than a round trip's worth on any network that a person
/// types over, and little enough to be held for everybody.
pub const WINDOW_BYTES: u64 = 256 * 1024;
/// A piece counts as at least so many bytes: what holding it costs beside them, so that many short ones are held for everybody too.
pub const PIECE_COUNTS_MIN: u64 = 256;
/// Pieces that may be on their way in one direction.
pub const PIECES_MAX: usize = 1_024;
const _: () = assert!(PIECES_MAX as u64 * PIECE_COUNTS_MIN == WINDOW_BYTES);
/// After so many bytes that were taken, it is said.
const ACK_BYTES: u64 = WINDOW_BYTES / 4;
/// Who has nothing to say for so long says that it lives, in milliseconds.
pub const ALIVE_MS: u64 = 5_000;
/// Who hears nothing for so long takes the other end for gone, in milliseconds: three of those may be late or lost with a connection.
pub const SILENCE_MS: u64 = 20_000;

/// Which end this is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum End {
    /// Whoever wants the command.
    Client,
    /// Where it runs.
    Worker,
}

/// Why a session can't go on.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum Broken {
    /// Something was lost, or came twice.
    #[error("what was sent as number {got} came where number {expected} was due: something was lost on its way; run the command again")]
    Gap {
        /// What should have come.
        expected: u64,
        /// What came.
        got: u64,
    },
    /// More than the window.
    #[error("the other end sent more than the {WINDOW_BYTES} bytes that may be on their way")]
    Window,
    /// An empty piece, or one that is too long.
    #[error("the other end sent a piece of {bytes} bytes; 1 to {PIECE_BYTES_MAX} are allowed")]
    Piece {
        /// How long.
        bytes: usize,
    },
    /// More was taken than was sent, or less than before.
    #[error("the other end says that it took {said} bytes, of {sent} that were sent")]
    Ack {
        /// What it says.
        said: u64,
        /// What was sent.
        sent: u64,
    },
    /// What this end never hears.
    #[error("the other end sent what only this end may")]
    Direction,
}

/// What is to be done because of the time.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Due {
    /// Nothing before this time.
    At(u64),
    /// Send this.
    Send(Frame),
    /// The other end is gone.
    Silent,
}

/// What a piece of so many bytes counts as, for whoever holds it.
#[must_use]
pub fn counted(bytes: usize) -> u64 {
    (bytes as u64).max(PIECE_COUNTS_MIN)
}

/// One end.
#[derive(Debug, Clone)]
pub struct Link {
    end: End,
    /// Numbers of the last frames.
    said: u64,
    heard: u64,
    /// Bytes that were sent, as they count, and that the other end has taken.
    bytes_out: u64,
    acked: u64,
    /// Bytes that came, that were taken here, and that were said to be.
    bytes_in: u64,
    taken: u64,
    told: u64,
    said_ms: u64,
    heard_ms: u64,
}

impl Link {
    /// At the beginning of a session.
    #[must_use]
    pub fn new(end: End, now_ms: u64) -> Self {
        let (said, heard, bytes_out, acked, bytes_in, taken, told) = (0, 0, 0, 0, 0, 0, 0);
        Self { end, said, heard, bytes_out, acked, bytes_in, taken, told, said_ms: now_ms, heard_ms: now_ms }
    }

    /// How long the next piece may be, in bytes. 0: not now.
    #[must_use]
    pub fn room(&self) -> usize {
        let left = WINDOW_BYTES.saturating_sub(self.bytes_out.saturating_sub(self.acked));
        if left < PIECE_COUNTS_MIN { 0 } else { usize::try_from(left).unwrap_or(PIECE_BYTES_MAX).min(PIECE_BYTES_MAX) }
    }

    /// Gives the next frame. A piece is at most [`Link::room`] long.
    pub fn say(&mut self, now_ms: u64, body: Body) -> Frame {
        self.said += 1;
        self.said_ms = now_ms;
        self.bytes_out += body.data().map_or(0, |bytes| counted(bytes.len()));
        Frame { number: self.said, body }
    }

    /// Takes a frame. What it means for whoever holds this end, if anything.
    ///
    /// # Errors
    /// [`Broken`]: the session is over.
    pub fn hear(&mut self, now_ms: u64, frame: Frame) -> Result<Option<Body>, Broken> {
        if frame.number == 0 && matches!(frame.body, Body::Failed(_)) {
            return Ok(Some(frame.body));
        }
        let expected = self.heard + 1;
        if frame.number != expected {
            return Err(Broken::Gap { expected, got: frame.number });
        }
        (self.heard, self.heard_ms) = (expected, now_ms);
        let to_worker = match &frame.body {
            Body::Input(_) | Body::EndInput | Body::Resize(_) | Body::Signal(_) => Some(true),
            Body::Output { .. } | Body::Ended(_) => Some(false),
            Body::Ack(_) | Body::Alive | Body::Failed(_) => None,
        };
        if to_worker.is_some_and(|to_worker| to_worker != (self.end == End::Worker)) {
            return Err(Broken::Direction);
        }
        if let Some(bytes) = frame.body.data() {
            if !(1..=PIECE_BYTES_MAX).contains(&bytes.len()) {
                return Err(Broken::Piece { bytes: bytes.len() });
            }
            self.bytes_in += counted(bytes.len());
            if self.bytes_in - self.told > WINDOW_BYTES {
                return Err(Broken::Window);
            }
        }
        match frame.body {
            Body::Alive => Ok(None),
            Body::Ack(said) if (self.acked..=self.bytes_out).contains(&said) => {
                self.acked = said;
                Ok(None)
            }
            Body::Ack(said) => Err(Broken::Ack { said, sent: self.bytes_out }),
            body => Ok(Some(body)),
        }
    }

    /// A piece of so many bytes was taken, of those that came. What is to be said of it, if anything.
    pub fn took(&mut self, now_ms: u64, bytes: usize) -> Option<Frame> {
        self.taken = self.taken.saturating_add(counted(bytes)).min(self.bytes_in);
        if self.taken - self.told < ACK_BYTES {
            return None;
        }
        self.told = self.taken;
        Some(self.say(now_ms, Body::Ack(self.told)))
    }

    /// What is due.
    pub fn due(&mut self, now_ms: u64) -> Due {
        let (silent_ms, alive_ms) = (self.heard_ms.saturating_add(SILENCE_MS), self.said_ms.saturating_add(ALIVE_MS));
        if now_ms >= silent_ms {
            Due::Silent
        } else if now_ms >= alive_ms {
            Due::Send(self.say(now_ms, Body::Alive))
        } else {
            Due::At(silent_ms.min(alive_ms))
        }
    }
}

impl fmt::Display for End {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Client => "the client",
            Self::Worker => "the worker",
        })
    }
}

#[cfg(test)]
mod tests {
    use std::collections::VecDeque;

    use proptest::prelude::*;

    use super::super::Ended;
    use super::*;

    fn piece(end: End, len: usize) -> Body {
        match end {
            End::Client => Body::Input(vec![1; len].into()),
            End::Worker => Body::Output { stderr: false, bytes: vec![1; len].into() },
        }
    }

    #[test]
    fn a_hole_ends_it_and_so_does_what_came_twice() {
        let (mut client, mut worker) = (Link::new(End::Client, 0), Link::new(End::Worker, 0));
        let first = client.say(1, Body::EndInput);
        assert_eq!(worker.hear(1, first.clone()), Ok(Some(Body::EndInput)));
        assert_eq!(worker.hear(1, first), Err(Broken::Gap { expected: 2, got: 1 }));
        let _lost = client.say(2, Body::Signal(2));
        let third = client.say(2, Body::Signal(15));
        assert_eq!(worker.hear(2, third), Err(Broken::Gap { expected: 2, got: 3 }));
    }

    #[test]
    fn who_hands_frames_on_may_end_it_at_any_time_and_nothing_else() {
        let mut worker = Link::new(End::Worker, 0);
        assert_eq!(worker.hear(5, Frame { number: 0, body: Body::EndInput }), Err(Broken::Gap { expected: 1, got: 0 }));
        assert_eq!(worker.hear(5, Frame::of_relay("gone")), Ok(Some(Body::Failed("gone".into()))));
    }

    #[test]
    fn what_only_this_end_may_say_is_not_heard() {
        let frame = |body| Frame { number: 1, body };
        let ended = Body::Ended(Ended::default());
        assert_eq!(Link::new(End::Worker, 0).hear(0, frame(ended)), Err(Broken::Direction));
        assert_eq!(Link::new(End::Client, 0).hear(0, frame(Body::EndInput)), Err(Broken::Direction));
        assert_eq!(Link::new(End::Worker, 0).hear(0, frame(piece(End::Client, 0))), Err(Broken::Piece { bytes: 0 }));
        let long = PIECE_BYTES_MAX + 1;
        assert_eq!(Link::new(End::Client, 0).hear(0, frame(piece(End::Worker, long))), Err(Broken::Piece { bytes: long }));
    }

    #[test]
    fn who_sends_more_than_the_window_or_lies_about_it_is_not_listened_to() {
        let mut worker = Link::new(End::Worker, 0);
        for number in 1..=WINDOW_BYTES / PIECE_BYTES_MAX as u64 {
            assert!(worker.hear(0, Frame { number, body: piece(End::Client, PIECE_BYTES_MAX) }).is_ok());
        }
        let number = WINDOW_BYTES / PIECE_BYTES_MAX as u64 + 1;
        assert_eq!(worker.clone().hear(0, Frame { number, body: piece(End::Client, 1) }), Err(Broken::Window));
        assert_eq!(worker.clone().hear(0, Frame { number, body: Body::Ack(1) }), Err(Broken::Ack { said: 1, sent: 0 }));
        assert!(worker.took(0, PIECE_BYTES_MAX).is_none(), "little is not said");
        assert_eq!(worker.took(0, PIECE_BYTES_MAX).map(|frame| frame.body), Some(Body::Ack(2 * PIECE_BYTES_MAX as u64)));
        assert!(worker.hear(0, Frame { number, body: piece(End::Client, 1) }).is_ok());
    }

    #[test]
    fn silence_ends_it_and_who_has_nothing_to_say_says_so() {
        let (mut client, mut worker) = (Link::new(End::Client, 0), Link::new(End::Worker, 0));
        assert_eq!(client.due(0), Due::At(ALIVE_MS));
        let Due::Send(alive) = client.due(ALIVE_MS) else { panic!("nothing is due") };
        assert_eq!(worker.hear(ALIVE_MS + 100, alive), Ok(None));
        assert_eq!(client.due(ALIVE_MS), Due::At(2 * ALIVE_MS));
        assert!(matches!(client.due(SILENCE_MS - 1), Due::Send(_)));
        assert_eq!(client.due(SILENCE_MS), Due::Silent);
        assert!(matches!(worker.due(SILENCE_MS), Due::Send(_)), "it has heard something since");
        assert_eq!(worker.due(SILENCE_MS + ALIVE_MS + 100), Due::Silent);
    }

    #[test]
    fn many_short_pieces_are_too_many_as_well() {
        let (mut client, mut worker) = (Link::new(End::Client, 0), Link::new(End::Worker, 0));
        for _ in 0..PIECES_MAX {
            assert!(client.room() > 0);
            let frame = client.say(0, piece(End::Client, 1));
            assert!(worker.hear(0, frame).is_ok());
        }
        assert_eq!(client.room(), 0);
        let number = PIECES_MAX as u64 + 1;
        assert_eq!(worker.hear(0, Frame { number, body: piece(End::Client, 1) }), Err(Broken::Window));
    }

    proptest! {
        /// Two ends that keep the rules, and frames that come in order however late: nothing breaks, nothing is held beyond the window, and
        /// everything that is sent can arrive.
        #[test]
        fn ends_that_keep_the_rules_understand_each_other(ops in proptest::collection::vec((0u8..5, any::<bool>(), 0usize..40_000), 0..400)) {
            let mut ends = [Link::new(End::Client, 0), Link::new(End::Worker, 0)];
            let kinds = [End::Client, End::Worker];
            // On their way to each end, and held by it without having been taken.
            let (mut ways, mut held) = ([VecDeque::new(), VecDeque::new()], [VecDeque::<usize>::new(), VecDeque::new()]);
            let (mut sent, mut came) = ([0u64; 2], [0u64; 2]);
            let mut now = 0;
            for (op, second, mut size) in ops {
                // Short ones as well.
                size = if size % 2 == 0 { size / 100 } else { size };
                let (me, other) = (usize::from(second), usize::from(!second));
                now += 1;
                match op {
                    0 => {
                        let len = size.min(ends[me].room());
                        if len > 0 {
                            sent[me] += len as u64;
                            let frame = ends[me].say(now, piece(kinds[me], len));
                            ways[other].push_back(frame);
                        }
                    }
                    1 | 2 => if let Some(frame) = ways[me].pop_front()
                        && let Some(len) = ends[me].hear(now, frame).unwrap().and_then(|body| body.data().map(<[u8]>::len))
                    {
                        held[me].push_back(len);
                        came[me] += len as u64;
                    },
                    3 => if let Some(len) = held[me].pop_front()
                        && let Some(frame) = ends[me].took(now, len)
                    {
                        ways[other].push_back(frame);
                    },
                    _ => if let Due::Send(frame) = ends[me].due(now) { ways[other].push_back(frame); },
                }
                prop_assert!(held[me].len() <= PIECES_MAX && held[me].iter().sum::<usize>() as u64 <= WINDOW_BYTES);
                prop_assert!(sent[me] - came[other] <= WINDOW_BYTES);
            }
            // Taken and delivered, there is room again.
            for _ in 0..4 {
                for me in 0..2 {
                    while let Some(frame) = ways[me].pop_front() {
                        held[me].extend(ends[me].hear(now, frame).unwrap().and_then(|body| body.data().map(<[u8]>::len)));
                    }
                    for len in std::mem::take(&mut held[me]) {
                        ways[1 - me].extend(ends[me].took(now, len));
                    }
                }
            }
            prop_assert!(ends.iter().all(|end| end.room() == PIECE_BYTES_MAX));
        }
    }
}
