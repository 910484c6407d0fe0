//! One call and its channels, as one end holds them.
//!
//! Owns what is held for a call; which frames change it is the session's (`mux`).

use std::collections::{BTreeMap, VecDeque};

use super::frame::{self, Kind};
use super::{Broken, Channel, FRAME_BYTES_MAX, MESSAGES_MAX, Side, WINDOW_BYTES};

/// A call.
#[derive(Debug)]
pub struct Call {
    /// The message being received.
    pub partial: Vec<u8>,
    /// Messages received and not taken.
    pub received: VecDeque<Vec<u8>>,
    /// Messages to be sent, and how far the first one is.
    pub sending: VecDeque<Vec<u8>>,
    pub sent: usize,
    /// Host: messages the agent will still take.
    pub room: usize,
    /// Guest: messages that were taken, and not yet given back as room.
    pub owed: usize,
    /// The last message; it goes behind everything else.
    pub last: Option<Vec<u8>>,
    /// The agent has said its last, or the host has given up.
    pub closing: bool,
    /// The host gave up: what comes for it is dropped, nothing but its close is sent.
    pub given_up: bool,
    /// Bytes that came since.
    pub dropped: usize,
    /// `given_up` has to be told.
    pub tell_given_up: bool,
    /// A frame of it was sent, so the other side knows it.
    pub begun: bool,
    pub channels: BTreeMap<u8, Pipe>,
}

/// One channel, in the one direction it has.
#[derive(Debug)]
pub struct Pipe {
    pub buffer: VecDeque<u8>,
    /// Writer: bytes the other side will still take. Reader: bytes it may still send.
    pub window: u32,
    /// Reader: read, and not yet given back.
    pub owed: u32,
    pub ended: bool,
    /// Writer: the end was told.
    pub end_sent: bool,
}

impl Pipe {
    pub fn new() -> Self {
        Self { buffer: VecDeque::new(), window: WINDOW_BYTES, owed: 0, ended: false, end_sent: false }
    }

    /// Writer: has everything been sent?
    pub fn flushed(&self) -> bool {
        self.buffer.is_empty() && (!self.ended || self.end_sent)
    }
}

impl Default for Call {
    fn default() -> Self {
        Self {
            partial: Vec::new(),
            received: VecDeque::new(),
            sending: VecDeque::new(),
            sent: 0,
            room: MESSAGES_MAX,
            owed: 0,
            last: None,
            closing: false,
            given_up: false,
            dropped: 0,
            tell_given_up: false,
            begun: false,
            channels: BTreeMap::new(),
        }
    }
}

impl Call {
    pub fn pipe(&mut self, channel: Channel) -> &mut Pipe {
        self.channels.entry(channel.number()).or_insert_with(Pipe::new)
    }

    pub fn take_message(&mut self, bytes: &[u8], whole: bool, call: u32, len_max: usize) -> Result<(), Broken> {
        if self.partial.len() + bytes.len() > len_max || self.received.len() >= MESSAGES_MAX {
            return Err(Broken::Messages { call });
        }
        self.partial.extend_from_slice(bytes);
        if whole {
            self.received.push_back(std::mem::take(&mut self.partial));
        }
        Ok(())
    }

    /// Drops what is held for nobody.
    pub fn give_up(&mut self) {
        self.given_up = true;
        self.received.clear();
        self.partial = Vec::new();
        for pipe in self.channels.values_mut() {
            pipe.buffer = VecDeque::new();
        }
    }
}

impl Call {
    /// The next message that was received and not taken.
    pub fn take(&mut self) -> Option<Vec<u8>> {
        let message = self.received.pop_front()?;
        self.owed += 1;
        Some(message)
    }

    /// One frame of the first message. False when there is none, or the other side has no room for it.
    pub fn send_message(&mut self, side: Side, number: u32, out: &mut Vec<u8>) -> bool {
        let Some(message) = self.sending.front() else { return false };
        if side == Side::Host && self.room == 0 {
            return false;
        }
        let rest = message.get(self.sent..).unwrap_or_default();
        let (now, later) = rest.split_at(rest.len().min(FRAME_BYTES_MAX));
        let whole = later.is_empty();
        self.begun = true;
        frame::put(out, if whole { Kind::Message } else { Kind::Part }, 0, number, now);
        self.sent += now.len();
        if whole {
            self.sending.pop_front();
            self.sent = 0;
            self.room = self.room.saturating_sub(1);
        }
        true
    }
}
