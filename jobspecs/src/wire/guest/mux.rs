//! Calls on one stream of bytes.
//!
//! Owns the frames, the windows that bound what a receiver holds, and the state of every call, for both sides: bytes in, bytes out, no
//! I/O and no clock. A host opens a call with a request; the agent answers and closes it. Beside its messages a call has channels of
//! plain bytes, each with a window of its own, so that a reader that stopped holds up nothing but its own channel. Whatever the other
//! side sends, nothing here grows past the limits below: more is [`Broken`], and the session is over. Does not own what messages mean
//! (`guest`) nor how a session begins (`resync`).
//!
//! A frame is 8 bytes and what they announce: kind, channel, length (2), call (4), little end first.

mod call;
mod frame;

use std::collections::{BTreeMap, VecDeque};

use super::{ANSWER_BYTES_MAX, REQUEST_BYTES_MAX};
use call::{Call, Pipe};
use frame::{Decoder, Head, Kind, MESSAGES, WHY_BYTES_MAX};

pub use frame::{FRAME_BYTES_MAX, HEAD_BYTES};

/// Bytes of one channel that may be on the way or unread: enough to keep a virtio queue busy, little enough to hold for every channel.
pub const WINDOW_BYTES: u32 = 256 * 1024;
/// What was read is given back as window in steps of at least this, so that a small read costs no frame.
const CREDIT_STEP: u32 = WINDOW_BYTES / 4;
/// Bytes of one channel that wait here to be sent.
pub const SEND_BYTES_MAX: usize = 64 * 1024;
/// Calls open at once. A worker has a handful: the task, its files, what watches it.
pub const CALLS_MAX: usize = 64;
/// Messages of one call that were not taken yet. Most calls have two or three in their life; of a shell somebody may drag the window.
pub const MESSAGES_MAX: usize = 8;
/// Messages that were taken are given back as room in steps of this, so that a call with few costs no frame more.
const ROOM_STEP: usize = MESSAGES_MAX / 2;

/// Bytes the host takes for a call it has given up, with heads: all that an honest agent can have had on the way when it heard of it.
const GIVEN_UP_BYTES_MAX: usize = 4 * WINDOW_BYTES as usize + MESSAGES_MAX * ANSWER_BYTES_MAX;

/// A channel of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Channel {
    /// From the host: input of a command, files to take.
    Input,
    /// From the guest: output of a command, files that were asked for.
    Output,
    /// From the guest: errors of a command.
    Errors,
}

impl Channel {
    fn from_number(number: u8) -> Option<Self> {
        [Self::Input, Self::Output, Self::Errors].into_iter().find(|channel| channel.number() == number)
    }

    fn number(self) -> u8 {
        match self {
            Self::Input => 1,
            Self::Output => 2,
            Self::Errors => 3,
        }
    }

    /// Who writes it.
    fn writer(self) -> Side {
        match self {
            Self::Input => Side::Host,
            Self::Output | Self::Errors => Side::Guest,
        }
    }
}

/// Which end this is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Side {
    /// Opens calls.
    Host,
    /// Answers them.
    Guest,
}

/// The other side broke the rules: nothing it sent since can be understood, and the session is over.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Broken {
    /// Not a frame.
    #[error("a frame of no known kind ({kind:#04x}), or of a kind this side never sends")]
    Kind {
        /// Its first byte.
        kind: u8,
    },
    /// A frame that is too long, or too short for its kind.
    #[error("a frame of kind {kind:#04x} with {len} bytes")]
    Length {
        /// Its first byte.
        kind: u8,
        /// What it announced.
        len: usize,
    },
    /// A call that is not open.
    #[error("a frame for call {call}, which is not open")]
    Call {
        /// Which.
        call: u32,
    },
    /// A channel that doesn't exist, is not written by the other side, or was ended.
    #[error("a frame for channel {channel} of call {call}, which is not the sender's or was ended")]
    Channel {
        /// The call.
        call: u32,
        /// Its number.
        channel: u8,
    },
    /// More than the window.
    #[error("more bytes on call {call} than its window allows")]
    Window {
        /// The call.
        call: u32,
    },
    /// More messages, or longer ones, than the rules allow; or too many calls.
    #[error("more or longer messages on call {call} than the rules allow")]
    Messages {
        /// The call.
        call: u32,
    },
    /// The agent says that it did not understand this side.
    #[error("that it has ended the session: {why}")]
    Told {
        /// Its reason, in plain characters.
        why: String,
    },
}

/// What became of a message.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Said {
    /// It will be sent.
    Yes,
    /// As many wait as may.
    Full,
    /// There is no such call any more, or the message is too long.
    Gone,
}

/// What a read gave.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Read {
    /// So many bytes.
    Bytes(usize),
    /// Nothing yet.
    Empty,
    /// The writer ended the channel, and everything was read.
    End,
    /// There is no such call any more.
    Gone,
}

/// What a write took.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Write {
    /// So many bytes.
    Bytes(usize),
    /// No room now.
    Full,
    /// There is no such call any more, or the host gave it up.
    Gone,
}

/// One end of a session.
#[derive(Debug)]
pub struct Mux {
    side: Side,
    decoder: Decoder,
    calls: BTreeMap<u32, Call>,
    /// The newest call ever opened.
    newest: u32,
    /// The call that sent data last: the next one after it is next.
    turn: u32,
    /// Calls that were opened and not taken, in order.
    opened: VecDeque<u32>,
    /// After [`Broken`]: what was fed and not understood.
    unread: Vec<u8>,
}

impl Mux {
    /// A session that has just begun.
    #[must_use]
    pub fn new(side: Side) -> Self {
        Self { side, decoder: Decoder::new(), calls: BTreeMap::new(), newest: 0, turn: 0, opened: VecDeque::new(), unread: Vec::new() }
    }

    /// Takes all of `bytes`.
    ///
    /// # Errors
    /// [`Broken`]: the session is over, and this is of no further use.
    pub fn feed(&mut self, mut bytes: &[u8]) -> Result<(), Broken> {
        let fed = self.feed_frames(&mut bytes);
        if fed.is_err() {
            self.unread = [self.decoder.head(), bytes].concat();
        }
        fed
    }

    fn feed_frames(&mut self, bytes: &mut &[u8]) -> Result<(), Broken> {
        while let Some((head, body)) = self.decoder.next(bytes)? {
            self.take(head, &body)?;
            self.decoder.reuse(body);
        }
        Ok(())
    }

    /// After [`Broken`]: the bytes from the head that could not be understood on, or behind the frame that broke a rule. A new session may
    /// begin in them.
    pub fn unread(&mut self) -> Vec<u8> {
        std::mem::take(&mut self.unread)
    }

    fn take(&mut self, head: Head, body: &[u8]) -> Result<(), Broken> {
        let Head { kind, channel, call: number, .. } = head;
        let (wrong_kind, wrong_call) = (Err(Broken::Kind { kind: kind as u8 }), Broken::Call { call: number });
        let by_guest_only = matches!(kind, Kind::Close | Kind::Over);
        let by_host_only = matches!(kind, Kind::GiveUp);
        if (by_guest_only && self.side == Side::Guest) || (by_host_only && self.side == Side::Host) {
            return wrong_kind;
        }
        if kind == Kind::Over {
            // It is printed, and a guest must not steer terminals.
            let plain = |byte: &u8| if byte.is_ascii_graphic() { char::from(*byte) } else { ' ' };
            return Err(Broken::Told { why: body.iter().map(plain).collect() });
        }
        let opens = self.side == Side::Guest && number > self.newest && matches!(kind, Kind::Message | Kind::Part);
        if opens {
            if number != self.newest + 1 || self.calls.len() >= CALLS_MAX {
                return Err(Broken::Messages { call: number });
            }
            self.newest = number;
            self.calls.insert(number, Call::default());
            self.opened.push_back(number);
        }
        let Some(call) = self.calls.get_mut(&number) else {
            // The agent's close and the host's last words cross; the agent never says anything behind its close.
            return if self.side == Side::Guest && number <= self.newest { Ok(()) } else { Err(wrong_call) };
        };
        let len_max = if self.side == Side::Host { ANSWER_BYTES_MAX } else { REQUEST_BYTES_MAX };
        match kind {
            Kind::Over => wrong_kind,
            Kind::Close => {
                // What was received can still be taken: the host forgets a call when nothing of it is left (`forget`).
                call.closing = true;
                call.sending.clear();
                for (channel, pipe) in &mut call.channels {
                    pipe.ended = true;
                    if *channel == Channel::Input.number() {
                        pipe.buffer = VecDeque::new();
                        pipe.end_sent = true;
                    }
                }
                if call.given_up {
                    self.calls.remove(&number);
                }
                Ok(())
            }
            _ if self.side == Side::Host && call.closing => Err(wrong_call),
            Kind::GiveUp => {
                call.give_up();
                Ok(())
            }
            _ if call.given_up => {
                // Dropped; but nobody may keep this side busy with it for ever.
                call.dropped = call.dropped.saturating_add(HEAD_BYTES + body.len());
                let too_much = self.side == Side::Host && call.dropped > GIVEN_UP_BYTES_MAX;
                if too_much { Err(Broken::Messages { call: number }) } else { Ok(()) }
            }
            Kind::Message | Kind::Part => call.take_message(body, kind == Kind::Message, number, len_max),
            Kind::Data => self.take_data(number, channel, body),
            Kind::End => {
                self.incoming(number, channel)?.ended = true;
                Ok(())
            }
            Kind::Credit => self.take_credit(number, channel, body),
        }
    }

    fn take_data(&mut self, number: u32, channel: u8, body: &[u8]) -> Result<(), Broken> {
        let pipe = self.incoming(number, channel)?;
        // A frame is at most 16 KiB.
        let len = u32::try_from(body.len()).unwrap_or(u32::MAX);
        pipe.window = pipe.window.checked_sub(len).ok_or(Broken::Window { call: number })?;
        pipe.buffer.extend(body);
        Ok(())
    }

    fn take_credit(&mut self, number: u32, channel: u8, body: &[u8]) -> Result<(), Broken> {
        let side = self.side;
        let wrong = Broken::Channel { call: number, channel };
        if channel == MESSAGES && side == Side::Host {
            return self.take_room(number, body);
        }
        let known = Channel::from_number(channel).filter(|c| c.writer() == side).ok_or(wrong)?;
        let more = body.try_into().map(u32::from_le_bytes).map_err(|_| Broken::Length { kind: Kind::Credit as u8, len: body.len() })?;
        let call = self.calls.get_mut(&number).ok_or(Broken::Call { call: number })?;
        let pipe = call.pipe(known);
        // None at all would be a frame that may come without end.
        let window = pipe.window.checked_add(more).filter(|window| *window <= WINDOW_BYTES && more > 0);
        pipe.window = window.ok_or(Broken::Window { call: number })?;
        Ok(())
    }

    fn take_room(&mut self, number: u32, body: &[u8]) -> Result<(), Broken> {
        let more = body.try_into().map(u32::from_le_bytes).ok().and_then(|more| usize::try_from(more).ok());
        let call = self.calls.get_mut(&number).ok_or(Broken::Call { call: number })?;
        let room = more.filter(|more| *more > 0).and_then(|more| call.room.checked_add(more)).filter(|room| *room <= MESSAGES_MAX);
        call.room = room.ok_or(Broken::Messages { call: number })?;
        Ok(())
    }

    /// The channel of a call that the other side writes and has not ended.
    fn incoming(&mut self, number: u32, channel: u8) -> Result<&mut Pipe, Broken> {
        let side = self.side;
        let known = Channel::from_number(channel).filter(|c| c.writer() != side);
        let call = self.calls.get_mut(&number).ok_or(Broken::Call { call: number })?;
        let pipe = known.map(|known| call.pipe(known)).filter(|pipe| !pipe.ended);
        pipe.ok_or(Broken::Channel { call: number, channel })
    }

    /// Host: opens a call. None when too many are open, or the request is too long, or all numbers were used.
    pub fn open(&mut self, request: Vec<u8>) -> Option<u32> {
        if self.calls.len() >= CALLS_MAX || request.len() > REQUEST_BYTES_MAX {
            return None;
        }
        let number = self.newest.checked_add(1)?;
        self.newest = number;
        let mut call = Call::default();
        call.sending.push_back(request);
        self.calls.insert(number, call);
        Some(number)
    }

    /// Guest: the next call that was opened, with its request.
    pub fn accept(&mut self) -> Option<(u32, Vec<u8>)> {
        loop {
            let number = *self.opened.front()?;
            match self.calls.get_mut(&number) {
                None => {}
                // Given up before its request was whole: it is closed all the same.
                Some(call) if call.given_up => call.closing = true,
                Some(call) => {
                    let request = call.take()?;
                    self.opened.pop_front();
                    return Some((number, request));
                }
            }
            self.opened.pop_front();
        }
    }

    /// Sends a further message on a call, when the other side has room for it.
    pub fn say(&mut self, number: u32, message: Vec<u8>) -> Said {
        let len_max = if self.side == Side::Host { REQUEST_BYTES_MAX } else { ANSWER_BYTES_MAX };
        match self.calls.get_mut(&number) {
            Some(call) if !call.given_up && !call.closing && message.len() <= len_max => {
                if call.sending.len() >= MESSAGES_MAX {
                    return Said::Full;
                }
                call.sending.push_back(message);
                Said::Yes
            }
            _ => Said::Gone,
        }
    }

    /// Guest: closes a call. Its last message goes when everything written before it has gone.
    pub fn finish(&mut self, number: u32, message: Vec<u8>) {
        if let Some(call) = self.calls.get_mut(&number) {
            call.last = Some(message).filter(|message| message.len() <= ANSWER_BYTES_MAX);
            call.closing = true;
            for pipe in call.channels.iter_mut().filter(|(number, _)| **number != Channel::Input.number()) {
                pipe.1.ended = true;
            }
        }
    }

    /// Host: wants nothing more of a call. It stays open until the agent has closed it, but takes no room.
    pub fn give_up(&mut self, number: u32) {
        if let Some(call) = self.calls.get_mut(&number) {
            if call.closing {
                self.calls.remove(&number);
            } else if !call.given_up {
                call.give_up();
                call.tell_given_up = true;
            }
        }
    }

    /// Guest: all calls but one are treated as given up by the host. Their close is still sent.
    pub fn abandon_others(&mut self, but: u32) {
        for (number, call) in self.calls.iter_mut().filter(|(number, _)| **number != but) {
            call.give_up();
            // Nobody will take up one that nobody has yet.
            call.closing |= self.opened.contains(number);
        }
        self.opened.retain(|number| *number == but);
    }

    /// The next message of a call.
    pub fn message(&mut self, number: u32) -> Option<Vec<u8>> {
        self.calls.get_mut(&number)?.take()
    }

    /// Reads a channel that the other side writes.
    pub fn read(&mut self, number: u32, channel: Channel, into: &mut [u8]) -> Read {
        let Some(call) = self.calls.get_mut(&number).filter(|call| !call.given_up) else { return Read::Gone };
        let closed = self.side == Side::Host && call.closing;
        let pipe = call.pipe(channel);
        let len = pipe.buffer.len().min(into.len());
        if len == 0 {
            return if pipe.buffer.is_empty() && (pipe.ended || closed) { Read::End } else { Read::Empty };
        }
        let (to, (front, back)) = (into.split_at_mut(len).0, pipe.buffer.as_slices());
        let (first, second) = to.split_at_mut(front.len().min(len));
        first.copy_from_slice(front.split_at(first.len()).0);
        second.copy_from_slice(back.split_at(second.len()).0);
        pipe.buffer.drain(..len);
        // At most a window.
        pipe.owed += u32::try_from(len).unwrap_or(u32::MAX);
        Read::Bytes(len)
    }

    /// Writes a channel of ours.
    pub fn write(&mut self, number: u32, channel: Channel, bytes: &[u8]) -> Write {
        let Some(call) = self.calls.get_mut(&number).filter(|call| !call.given_up && !call.closing) else { return Write::Gone };
        let pipe = call.pipe(channel);
        if pipe.ended {
            return Write::Gone;
        }
        let len = bytes.len().min(SEND_BYTES_MAX.saturating_sub(pipe.buffer.len()));
        if len == 0 && !bytes.is_empty() {
            return Write::Full;
        }
        pipe.buffer.extend(bytes.split_at(len).0);
        Write::Bytes(len)
    }

    /// Ends a channel of ours.
    pub fn end(&mut self, number: u32, channel: Channel) {
        if let Some(call) = self.calls.get_mut(&number) {
            call.pipe(channel).ended = true;
        }
    }

    /// Host: has the agent closed the call, and was every message of it taken? Guest: has the host given it up, or is it gone?
    #[must_use]
    pub fn is_over(&self, number: u32) -> bool {
        match (self.side, self.calls.get(&number)) {
            (_, None) => true,
            (Side::Host, Some(call)) => call.closing && call.received.is_empty(),
            (Side::Guest, Some(call)) => call.given_up,
        }
    }

    /// How many calls are open.
    #[must_use]
    pub fn open_calls(&self) -> usize {
        self.calls.len()
    }

    /// Is there nothing to be sent?
    #[must_use]
    pub fn is_flushed(&self) -> bool {
        self.calls.values().all(|call| {
            let said = call.sending.is_empty() && call.last.is_none() && !call.tell_given_up;
            let quiet = |number: u8, pipe: &Pipe| if self.writes(number) { pipe.flushed() } else { pipe.owed < CREDIT_STEP || pipe.ended };
            let closes = self.side == Side::Guest && (call.closing || (call.owed >= ROOM_STEP && !call.given_up));
            said && !closes && (call.given_up || call.channels.iter().all(|(number, pipe)| quiet(*number, pipe)))
        })
    }

    fn writes(&self, channel: u8) -> bool {
        Channel::from_number(channel).is_some_and(|channel| channel.writer() == self.side)
    }

    /// Appends frames to `out` until it has at least `len_max` bytes or nothing can be sent. It grows past that by a frame at most.
    pub fn fill(&mut self, out: &mut Vec<u8>, len_max: usize) {
        // Small and urgent ones first: a full channel must not hold up a window, a message or an end.
        let numbers: Vec<u32> = self.calls.keys().copied().collect();
        for number in numbers {
            self.fill_urgent(number, out, len_max);
        }
        while out.len() < len_max {
            let later = self.calls.range(self.turn.saturating_add(1)..).map(|(number, _)| *number);
            let order: Vec<u32> = later.chain(self.calls.range(..=self.turn).map(|(number, _)| *number)).collect();
            if !order.into_iter().any(|number| self.fill_data(number, out)) {
                return;
            }
        }
    }

    fn fill_urgent(&mut self, number: u32, out: &mut Vec<u8>, len_max: usize) {
        let side = self.side;
        let Some(call) = self.calls.get_mut(&number) else { return };
        if call.tell_given_up && out.len() < len_max {
            call.tell_given_up = false;
            call.sending.clear();
            if !call.begun {
                // Every number is used, in order: the agent has to hear of the call that it need not carry out.
                frame::put(out, Kind::Message, 0, number, &[]);
            }
            frame::put(out, Kind::GiveUp, 0, number, &[]);
        }
        for (channel, pipe) in call.channels.iter_mut().filter(|_| !call.given_up) {
            if pipe.owed >= CREDIT_STEP && !pipe.ended && out.len() < len_max {
                frame::put(out, Kind::Credit, *channel, number, &pipe.owed.to_le_bytes());
                pipe.window += pipe.owed;
                pipe.owed = 0;
            }
        }
        if side == Side::Guest && !call.given_up && !call.closing && call.owed >= ROOM_STEP && out.len() < len_max {
            // At most as many as may be there untaken.
            frame::put(out, Kind::Credit, MESSAGES, number, &u32::try_from(call.owed).unwrap_or_default().to_le_bytes());
            call.owed = 0;
        }
        while !call.given_up && out.len() < len_max && call.send_message(side, number, out) {}
        // Everything before it has gone: the last message, then the close.
        let theirs = |number: &u8| Channel::from_number(*number).is_some_and(|channel| channel.writer() == side);
        let drained = call.given_up || (call.sending.is_empty() && call.channels.iter().all(|(n, pipe)| !theirs(n) || pipe.flushed()));
        if side == Side::Guest && call.closing && drained && out.len() < len_max {
            if let Some(last) = call.last.take().filter(|_| !call.given_up) {
                call.sending.push_back(last);
                while call.send_message(side, number, out) {}
            }
            frame::put(out, Kind::Close, 0, number, &[]);
            self.calls.remove(&number);
        }
    }

    /// One frame of data, or the end of a channel. False when the call has none that could go.
    fn fill_data(&mut self, number: u32, out: &mut Vec<u8>) -> bool {
        let side = self.side;
        let Some(call) = self.calls.get_mut(&number).filter(|call| !call.given_up) else { return false };
        // What comes behind its own close goes with it.
        let mut sent = false;
        for (channel, pipe) in &mut call.channels {
            if !Channel::from_number(*channel).is_some_and(|channel| channel.writer() == side) {
                continue;
            }
            let len = pipe.buffer.len().min(FRAME_BYTES_MAX).min(pipe.window as usize);
            if len > 0 {
                let (front, back) = pipe.buffer.as_slices();
                let first = front.split_at(front.len().min(len)).0;
                frame::put_parts(out, Kind::Data, *channel, number, [first, back.split_at(len - first.len()).0]);
                pipe.buffer.drain(..len);
                pipe.window -= u32::try_from(len).unwrap_or(pipe.window);
                sent = true;
            }
            if pipe.buffer.is_empty() && pipe.ended && !pipe.end_sent {
                frame::put(out, Kind::End, *channel, number, &[]);
                pipe.end_sent = true;
                sent = true;
            }
        }
        if sent {
            self.turn = number;
            if call.closing {
                self.fill_urgent(number, out, usize::MAX);
            }
        }
        sent
    }
}

/// Guest: appends to `out` that it has ended the session, as it did not understand the host, and why. Nothing may follow but a new session.
pub fn put_over(out: &mut Vec<u8>, why: &Broken) {
    let why = why.to_string();
    let why = why.as_bytes();
    frame::put(out, Kind::Over, 0, 0, why.get(..WHY_BYTES_MAX).unwrap_or(why));
}

#[cfg(test)]
mod tests;
