//! One frame: its head, and taking it from a stream that comes in pieces.
//!
//! Owns nothing of what frames mean. Holds at most one frame.

use super::Broken;

/// Longest body of a frame, in bytes: long enough that heads cost nothing, short enough that an urgent frame waits for little.
pub const FRAME_BYTES_MAX: usize = 16 * 1024;
/// Longest reason for the end of a session, in bytes.
pub const WHY_BYTES_MAX: usize = 200;
/// In place of a channel: the call's messages.
pub const MESSAGES: u8 = 0;
/// Bytes of a head.
pub const HEAD_BYTES: usize = 8;

/// Kinds of frames. None has the first byte of a resync (`resync`), nor of its filler.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// A whole message, or the last part of one.
    Message = 1,
    /// A part of a message; more follows.
    Part = 2,
    /// Bytes of a channel.
    Data = 3,
    /// So many more bytes may be sent on a channel; on [`MESSAGES`]: so many more messages.
    Credit = 4,
    /// The channel has ended.
    End = 5,
    /// The agent says nothing more on the call.
    Close = 6,
    /// The host wants nothing more of the call.
    GiveUp = 7,
    /// The agent did not understand the host and has ended the session, for this reason.
    Over = 8,
}

impl Kind {
    fn from_byte(byte: u8) -> Option<Self> {
        let kinds = [Self::Message, Self::Part, Self::Data, Self::Credit, Self::End, Self::Close, Self::GiveUp, Self::Over];
        kinds.into_iter().find(|kind| *kind as u8 == byte)
    }

    fn takes(self, len: usize) -> bool {
        match self {
            Self::Message => len <= FRAME_BYTES_MAX,
            Self::Part | Self::Data => (1..=FRAME_BYTES_MAX).contains(&len),
            Self::Credit => len == 4,
            Self::Over => len <= WHY_BYTES_MAX,
            Self::End | Self::Close | Self::GiveUp => len == 0,
        }
    }
}

/// What a frame begins with.
#[derive(Debug, Clone, Copy)]
pub struct Head {
    /// Its kind.
    pub kind: Kind,
    /// Its channel, 0 where the kind has none.
    pub channel: u8,
    /// Bytes of its body.
    pub len: usize,
    /// Its call.
    pub call: u32,
}

/// Appends a frame. `body` has at most [`FRAME_BYTES_MAX`] bytes.
pub fn put(out: &mut Vec<u8>, kind: Kind, channel: u8, call: u32, body: &[u8]) {
    put_parts(out, kind, channel, call, [body, &[]]);
}

/// Appends a frame whose body lies in two parts, of at most [`FRAME_BYTES_MAX`] bytes together.
pub fn put_parts(out: &mut Vec<u8>, kind: Kind, channel: u8, call: u32, body: [&[u8]; 2]) {
    let len = body.iter().map(|part| part.len()).sum::<usize>();
    out.extend_from_slice(&[kind as u8, channel]);
    out.extend_from_slice(&u16::try_from(len).unwrap_or_default().to_le_bytes());
    out.extend_from_slice(&call.to_le_bytes());
    body.into_iter().for_each(|part| out.extend_from_slice(part));
}

/// Takes frames from pieces of a stream.
#[derive(Debug)]
pub struct Decoder {
    head: [u8; HEAD_BYTES],
    head_len: usize,
    known: Option<Head>,
    body: Vec<u8>,
}

impl Decoder {
    pub fn new() -> Self {
        Self { head: [0; HEAD_BYTES], head_len: 0, known: None, body: Vec::new() }
    }

    /// The next frame, if `bytes` has the rest of it; it is taken off their front.
    pub fn next(&mut self, bytes: &mut &[u8]) -> Result<Option<(Head, Vec<u8>)>, Broken> {
        let head = match self.known {
            Some(head) => head,
            None => {
                let missing = HEAD_BYTES - self.head_len;
                let (now, rest) = bytes.split_at(missing.min(bytes.len()));
                for (to, from) in self.head.iter_mut().skip(self.head_len).zip(now) {
                    *to = *from;
                }
                self.head_len += now.len();
                *bytes = rest;
                // Seen at once, not only when the head is whole: a resync may be all that comes.
                if self.head_len > 0 && Kind::from_byte(self.head[0]).is_none() {
                    return Err(Broken::Kind { kind: self.head[0] });
                }
                if self.head_len < HEAD_BYTES {
                    return Ok(None);
                }
                let head = parse(self.head)?;
                self.known = Some(head);
                head
            }
        };
        let missing = head.len - self.body.len();
        let (now, rest) = bytes.split_at(missing.min(bytes.len()));
        self.body.extend_from_slice(now);
        *bytes = rest;
        if self.body.len() < head.len {
            return Ok(None);
        }
        self.known = None;
        self.head_len = 0;
        Ok(Some((head, std::mem::take(&mut self.body))))
    }

    /// What is held of a head.
    pub fn head(&self) -> &[u8] {
        self.head.get(..self.head_len).unwrap_or_default()
    }

    /// Gives the memory of a body back for the next one.
    pub fn reuse(&mut self, mut body: Vec<u8>) {
        body.clear();
        self.body = body;
    }
}

fn parse(head: [u8; HEAD_BYTES]) -> Result<Head, Broken> {
    let [kind, channel, low, high, call @ ..] = head;
    let len = usize::from(u16::from_le_bytes([low, high]));
    let known = Kind::from_byte(kind).ok_or(Broken::Kind { kind })?;
    if !known.takes(len) {
        return Err(Broken::Length { kind, len });
    }
    Ok(Head { kind: known, channel, len, call: u32::from_le_bytes(call) })
}
