//! Replies on their way to a client.
//!
//! Owns that a reply is sent whole before another one begins, and gathering short ones into one call. Does not own what they say.

use std::io;
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use rustix::io::Errno;
use rustix::net::{SendFlags, send};

use super::incoming::PIECE;

/// Bytes that are gathered: a piece that was read and its head, and short replies before it.
const BUFFER_BYTES: usize = PIECE + 64 * 1024;
/// Most bytes of the buffer that are kept between replies: what file systems read at once in one piece, and its head.
const KEPT_BYTES: usize = (1 << 20) + 4096;

/// The way to a client, which several threads use.
#[derive(Debug)]
pub struct Wire<'a> {
    stream: &'a UnixStream,
    sending: Mutex<()>,
    broken: AtomicBool,
}

impl<'a> Wire<'a> {
    /// To whoever has the other end.
    pub fn new(stream: &'a UnixStream) -> Self {
        Self { stream, sending: Mutex::new(()), broken: AtomicBool::new(false) }
    }

    /// Sends all of it, when what others send now has been sent.
    ///
    /// # Errors
    /// The client is gone.
    pub fn send(&self, mut bytes: &[u8]) -> io::Result<()> {
        let _sending = self.sending.lock().unwrap_or_else(PoisonError::into_inner);
        if self.is_broken() {
            return Err(io::ErrorKind::BrokenPipe.into());
        }
        while !bytes.is_empty() {
            match send(self.stream, bytes, SendFlags::NOSIGNAL) {
                Ok(count) => bytes = &bytes[count.min(bytes.len())..],
                Err(Errno::INTR) => {}
                Err(e) => {
                    // A part of a reply may be out: nothing can follow it.
                    self.break_off();
                    return Err(e.into());
                }
            }
        }
        Ok(())
    }

    /// Ends the connection. Whoever waits for the client, or waits to send to it, is told.
    pub fn break_off(&self) {
        self.broken.store(true, Ordering::Release);
        // It may be gone already.
        let _ = self.stream.shutdown(Shutdown::Both);
    }

    /// Is there nobody left to reply to?
    pub fn is_broken(&self) -> bool {
        self.broken.load(Ordering::Acquire)
    }
}

/// Replies that are gathered before they are sent.
#[derive(Debug)]
pub struct Outgoing<'a> {
    wire: &'a Wire<'a>,
    buffer: Vec<u8>,
    used: usize,
}

impl<'a> Outgoing<'a> {
    /// None yet.
    pub fn new(wire: &'a Wire<'a>) -> Self {
        Self { wire, buffer: vec![0; BUFFER_BYTES], used: 0 }
    }

    /// The next `count` bytes, to be filled. What was gathered is sent first if both have no room.
    ///
    /// # Errors
    /// The client is gone.
    pub fn reserve(&mut self, count: usize) -> io::Result<&mut [u8]> {
        if self.used + count > self.buffer.len() {
            self.send()?;
            if count > self.buffer.len() {
                self.buffer.resize(count, 0);
            }
        }
        let place = self.used;
        self.used += count;
        Ok(&mut self.buffer[place..place + count])
    }

    /// Takes the last `count` bytes back.
    pub fn undo(&mut self, count: usize) {
        self.used = self.used.saturating_sub(count);
    }

    /// Adds bytes.
    ///
    /// # Errors
    /// The client is gone.
    pub fn put(&mut self, bytes: &[u8]) -> io::Result<()> {
        self.reserve(bytes.len())?.copy_from_slice(bytes);
        Ok(())
    }

    /// Sends what was gathered.
    ///
    /// # Errors
    /// The client is gone.
    pub fn send(&mut self) -> io::Result<()> {
        if self.used > 0 {
            self.wire.send(&self.buffer[..self.used])?;
            self.used = 0;
        }
        if self.buffer.len() > KEPT_BYTES {
            // A reply that had to come in one piece is rare; its memory is not kept.
            self.buffer = vec![0; BUFFER_BYTES];
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use std::io::Read;

    use super::*;

    #[test]
    fn replies_are_whole_whoever_sends_them() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let wire = Wire::new(&ours);
        std::thread::scope(|scope| {
            for byte in 0..4u8 {
                let wire = &wire;
                scope.spawn(move || {
                    let mut out = Outgoing::new(wire);
                    for _ in 0..20 {
                        out.put(&vec![byte; 300_000]).unwrap();
                        out.send().unwrap();
                    }
                });
            }
            let mut reply = vec![0; 300_000];
            for _ in 0..80 {
                theirs.read_exact(&mut reply).unwrap();
                assert!(reply.iter().all(|byte| *byte == reply[0]));
            }
        });
    }

    #[test]
    fn what_is_taken_back_is_not_sent() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let wire = Wire::new(&ours);
        let mut out = Outgoing::new(&wire);
        out.put(b"ab").unwrap();
        out.reserve(2_000_000).unwrap();
        out.undo(2_000_000);
        out.put(b"cd").unwrap();
        out.send().unwrap();
        let mut reply = [0; 4];
        theirs.read_exact(&mut reply).unwrap();
        assert_eq!(&reply, b"abcd");
        assert_eq!(out.buffer.len(), BUFFER_BYTES);
    }

    #[test]
    fn a_client_that_is_gone_is_noticed() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        drop(theirs);
        let wire = Wire::new(&ours);
        assert!(wire.send(b"x").is_err() && wire.is_broken());
        assert!(wire.send(b"x").is_err());
    }
}
