//! How a session begins.
//!
//! Owns the frame by which a host names a session and the agent takes it up, and finding that frame in a stream that may hold anything
//! before it: the rest of another session, half a frame, what a sibling restored from the same snapshot was told. No session spans a
//! snapshot or a connection, and either side may be in the middle of a frame when one ends, so both begin by throwing away.

/// Bytes of a frame: magic, flags, number of the try, nonce, check.
pub const FRAME_BYTES: usize = 16 + 4 + 4 + NONCE_BYTES + CHECK_BYTES;
/// Bytes of a nonce. It is drawn by the host for one session and never used again.
pub const NONCE_BYTES: usize = 32;
const CHECK_BYTES: usize = 8;
/// Of a frame of the host. The first byte is no kind of frame in a session (`mux`), so a session that meets it is over.
const CALL: [u8; 16] = *b"\xf7Volley resync>\n";
/// Of the agent's frame that takes it up.
const ECHO: [u8; 16] = *b"\xf7Volley resync<\n";
/// The machine may be a clone: nothing is run and no randomness is read before a reseed.
const FLAG_RESEED: u32 = 1;

/// Most bytes a host throws away before its nonce is echoed: all that a guest may have in its queues, many times over.
pub const DISCARD_BYTES_MAX: u64 = 4 * 1024 * 1024;
/// Bytes of [`FILLER`] a host sends before it repeats a frame that was not echoed: an agent that waits for the rest of a frame takes them
/// for it, and is then past every frame's end.
pub const FILLER_BYTES: usize = super::mux::HEAD_BYTES + super::mux::FRAME_BYTES_MAX;
/// No kind of frame in a session, and no part of a magic.
pub const FILLER: u8 = 0;

/// Is this first byte of what should be a frame of a session that of a resync, or of its filler?
#[must_use]
pub fn begins_with(byte: u8) -> bool {
    byte == FILLER || CALL.first() == Some(&byte)
}

/// Names a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Resync {
    /// Which.
    pub nonce: [u8; NONCE_BYTES],
    /// Counts how often the host has sent it. Only the echo of the last one counts: behind it no other is on the way, which would end the
    /// session that has just begun.
    pub attempt: u32,
    /// Must the agent be reseeded before anything else?
    pub reseed: bool,
}

/// Which side a frame is from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum From {
    /// The host calls.
    Host,
    /// The agent echoes.
    Guest,
}

impl From {
    fn magic(self) -> [u8; 16] {
        match self {
            Self::Host => CALL,
            Self::Guest => ECHO,
        }
    }
}

impl Resync {
    /// The frame.
    #[must_use]
    pub fn encode(&self, from: From) -> [u8; FRAME_BYTES] {
        let mut frame = [0; FRAME_BYTES];
        let (body, check) = frame.split_at_mut(FRAME_BYTES - CHECK_BYTES);
        let (magic, rest) = body.split_at_mut(16);
        let (flags, rest) = rest.split_at_mut(4);
        let (attempt, nonce) = rest.split_at_mut(4);
        magic.copy_from_slice(&from.magic());
        flags.copy_from_slice(&if self.reseed { FLAG_RESEED } else { 0 }.to_le_bytes());
        attempt.copy_from_slice(&self.attempt.to_le_bytes());
        nonce.copy_from_slice(&self.nonce);
        check.copy_from_slice(&sum(body));
        frame
    }

    fn decode(frame: &[u8; FRAME_BYTES]) -> Option<Self> {
        let (body, check) = frame.split_at(FRAME_BYTES - CHECK_BYTES);
        let (flags, rest) = body.split_at(16).1.split_at(4);
        let (attempt, nonce) = rest.split_at(4);
        if check != sum(body) {
            return None;
        }
        let (flags, attempt) = (u32::from_le_bytes(flags.try_into().ok()?), u32::from_le_bytes(attempt.try_into().ok()?));
        Some(Self { nonce: nonce.try_into().ok()?, attempt, reseed: flags & FLAG_RESEED != 0 })
    }
}

/// Half a frame followed by a whole one must not pass for a frame.
fn sum(body: &[u8]) -> [u8; CHECK_BYTES] {
    let mut check = [0; CHECK_BYTES];
    check.copy_from_slice(&blake3::hash(body).as_bytes()[..CHECK_BYTES]);
    check
}

/// Looks for a frame in a stream. Holds less than one frame.
#[derive(Debug)]
pub struct Scanner {
    magic: [u8; 16],
    held: [u8; FRAME_BYTES],
    len: usize,
}

impl Scanner {
    /// Looks for frames of that side.
    #[must_use]
    pub fn new(from: From) -> Self {
        Self { magic: from.magic(), held: [0; FRAME_BYTES], len: 0 }
    }

    /// Takes bytes up to the end of the first frame: how many, and the frame. Without one all of them are taken.
    pub fn feed(&mut self, bytes: &[u8]) -> (usize, Option<Resync>) {
        for (at, byte) in bytes.iter().enumerate() {
            if let Some(place) = self.held.get_mut(self.len) {
                *place = *byte;
                self.len += 1;
            }
            while !self.fits() {
                self.drop_first();
            }
            if self.len == FRAME_BYTES {
                let found = Resync::decode(&self.held);
                if found.is_some() {
                    self.len = 0;
                    return (at + 1, found);
                }
                // Not one after all; one may begin inside it.
                self.drop_first();
                while !self.fits() {
                    self.drop_first();
                }
            }
        }
        (bytes.len(), None)
    }

    /// Can what is held be the beginning of a frame?
    fn fits(&self) -> bool {
        let seen = self.len.min(self.magic.len());
        self.held.get(..seen) == self.magic.get(..seen)
    }

    fn drop_first(&mut self) {
        self.held.copy_within(1.., 0);
        self.len = self.len.saturating_sub(1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn resync(byte: u8) -> Resync {
        Resync { nonce: [byte; NONCE_BYTES], attempt: byte.into(), reseed: byte % 2 == 1 }
    }

    /// All frames in `bytes`, given in pieces.
    fn found(bytes: &[u8], piece: usize) -> Vec<Resync> {
        let mut scanner = Scanner::new(From::Host);
        let mut found = Vec::new();
        for mut part in bytes.chunks(piece.max(1)) {
            while !part.is_empty() {
                let (taken, frame) = scanner.feed(part);
                found.extend(frame);
                part = &part[taken..];
            }
        }
        found
    }

    #[test]
    fn the_other_sides_frames_are_passed_over() {
        assert_eq!(found(&resync(1).encode(From::Guest), 7), []);
        assert_eq!(found(&resync(1).encode(From::Host), 7), [resync(1)]);
    }

    #[test]
    fn a_changed_frame_is_none() {
        for at in 0..FRAME_BYTES {
            let mut frame = resync(2).encode(From::Host);
            frame[at] ^= 0x40;
            assert_eq!(found(&frame, 64), [], "{at}");
        }
    }

    proptest! {
        #[test]
        fn a_frame_is_found_behind_anything(noise: Vec<u8>, cut in 0..FRAME_BYTES, piece in 1usize..200, byte: u8) {
            let mut bytes = noise;
            let half = resync(byte.wrapping_add(1)).encode(From::Host);
            // What is cut off may by chance be what the next frame begins with: then the half one is whole.
            prop_assume!(!CALL.starts_with(&half[cut..]));
            bytes.extend_from_slice(&half[..cut]);
            bytes.extend_from_slice(&resync(byte).encode(From::Host));
            prop_assert_eq!(found(&bytes, piece), [resync(byte)]);
        }
    }
}
