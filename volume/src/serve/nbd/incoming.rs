//! What a client has sent and nobody has looked at yet.
//!
//! Owns the buffer between the socket and the requests. It never grows: what is larger is taken in pieces.

use std::io::{self, Read};
use std::os::unix::net::UnixStream;

/// Most bytes that are taken at once: what is written or read is moved in pieces of this, so that they stay in the processor's cache
/// and no request takes more memory.
pub const PIECE: usize = 256 * 1024;
/// Bytes of the buffer: a piece, and heads of requests around it.
const BUFFER_BYTES: usize = PIECE + 64 * 1024;

/// A client's bytes.
#[derive(Debug)]
pub struct Incoming<'a> {
    stream: &'a UnixStream,
    buffer: Box<[u8]>,
    start: usize,
    end: usize,
}

impl<'a> Incoming<'a> {
    /// Nothing yet.
    pub fn new(stream: &'a UnixStream) -> Self {
        Self { stream, buffer: vec![0; BUFFER_BYTES].into_boxed_slice(), start: 0, end: 0 }
    }

    /// What is there.
    pub fn bytes(&self) -> &[u8] {
        &self.buffer[self.start..self.end]
    }

    /// The next `count` bytes are done with.
    pub fn consume(&mut self, count: usize) {
        self.start = self.end.min(self.start + count);
    }

    /// Waits for more, on the way to `count` bytes; of what comes it takes no more than makes `most` bytes there, or what there is room
    /// for. False: the client has ended.
    ///
    /// # Errors
    /// What the socket says; also its timeout.
    pub fn more(&mut self, count: usize, most: usize) -> io::Result<bool> {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
        if self.start.saturating_add(count) > self.buffer.len() {
            self.buffer.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        let until = self.start.saturating_add(most).min(self.buffer.len());
        let Some(room) = self.buffer.get_mut(self.end..until).filter(|room| !room.is_empty()) else {
            return Err(io::Error::other("bytes were waited for that are there, or have no room"));
        };
        loop {
            match self.stream.read(room) {
                Ok(0) => return Ok(false),
                Ok(count) => {
                    self.end += count;
                    return Ok(true);
                }
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(e),
            }
        }
    }
}

impl Incoming<'_> {
    /// Takes the next bytes, as many as there is room for; what is not there yet goes straight to its place. False: the other end has
    /// ended.
    ///
    /// # Errors
    /// What the socket says.
    pub fn fill(&mut self, into: &mut [u8]) -> io::Result<bool> {
        let here = self.bytes().len().min(into.len());
        into[..here].copy_from_slice(&self.bytes()[..here]);
        self.consume(here);
        let mut stream = self.stream;
        match stream.read_exact(&mut into[here..]) {
            Ok(()) => Ok(true),
            Err(e) if e.kind() == io::ErrorKind::UnexpectedEof => Ok(false),
            Err(e) => Err(e),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn bytes_come_in_order_through_a_buffer_that_stays() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        let sent: Vec<u8> = (0..3_000_000u32).map(|i| (i / 7) as u8).collect();
        let copy = sent.clone();
        let writer = std::thread::spawn(move || theirs.write_all(&copy).unwrap());
        let mut incoming = Incoming::new(&ours);
        let mut got: Vec<u8> = Vec::new();
        for size in [1, PIECE, 28, 4096, BUFFER_BYTES].into_iter().cycle() {
            let mut ended = false;
            while incoming.bytes().len() < size && !ended {
                ended = !incoming.more(size, size).unwrap();
            }
            let here = incoming.bytes().len().min(size);
            got.extend(&incoming.bytes()[..here]);
            incoming.consume(here);
            if ended {
                break;
            }
        }
        writer.join().unwrap();
        assert!(got == sent);
    }

    #[test]
    fn nothing_more_than_fits_is_waited_for() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        theirs.write_all(&[1; 10]).unwrap();
        let mut incoming = Incoming::new(&ours);
        assert!(incoming.more(10, 10).unwrap());
        assert!(incoming.more(10, 10).is_err());
        assert!(incoming.more(5, 5).is_err());
    }
}
