//! One client of a device, from its first byte to its last.
//!
//! Owns the order of things on a connection: requests are read one after another, and what needs no wait is done at once, by the thread
//! that reads; the rest goes to `waiting`. Replies to requests that came together leave together. Does not own who may connect
//! (`socket`).

use std::io;
use std::os::unix::net::UnixStream;
use std::thread::{self, Scope};
use std::time::Duration;

use crate::device::Device;

use super::handshake::{Agreed, Export, Handshake, HandshakeError, MESSAGE_BYTES_MAX, Step};
use super::incoming::{Incoming, PIECE};
use super::outgoing::{Outgoing, Wire};
use super::request::{BLOCK, Limits, What, blocks, check, edges, status};
use super::waiting::{Job, Kind, Waiting, piece};
use super::wire::{
    DATA_CHUNK_BYTES, Errno, REQUEST_BYTES, RequestHead, SIMPLE_REPLY_BYTES, chunk, chunk_head, command, data_chunk_head, error_chunk,
    simple_reply,
};

/// A client that says nothing for this long during the negotiation is let go: nobody else can have its place.
const NEGOTIATION_TIMEOUT: Duration = Duration::from_secs(30);

/// Why a connection ended that the client had not finished.
#[derive(Debug, thiserror::Error)]
pub enum ServeError {
    /// It never came to requests.
    #[error("the negotiation with an NBD client failed: {0}")]
    Handshake(#[from] HandshakeError),
    /// What follows cannot be understood.
    #[error("an NBD client sent something that is no request")]
    NoRequest,
    /// The socket, or a thread for the connection.
    #[error("the connection to an NBD client broke: {0}")]
    Io(#[from] io::Error),
}

/// Serves a client until it leaves or is gone, and returns when nothing it asked for is still being done. The device's size is what the
/// client is told at the beginning; requests are checked against what it is when they come.
///
/// # Errors
/// The client did not leave as the protocol has it; what was replied to is done nevertheless.
pub fn serve(stream: &UnixStream, device: &dyn Device, name: &str) -> Result<(), ServeError> {
    let wire = Wire::new(stream);
    let mut incoming = Incoming::new(stream);
    let export = Export { name: name.to_owned(), size: device.size(), read_only: device.read_only() };
    stream.set_read_timeout(Some(NEGOTIATION_TIMEOUT))?;
    let Some(agreed) = negotiate(&mut incoming, &wire, export)? else { return Ok(()) };
    stream.set_read_timeout(None)?;
    let waiting = Waiting::new(device, &wire);
    thread::scope(|scope| {
        let out = Outgoing::new(&wire);
        let mut connection = Connection { device, wire: &wire, incoming, out, agreed, waiting: &waiting, scope };
        let result = connection.run();
        waiting.close();
        result
    })
}

/// None: the client left.
fn negotiate(incoming: &mut Incoming<'_>, wire: &Wire<'_>, export: Export) -> Result<Option<Agreed>, ServeError> {
    let mut answers = Vec::new();
    let mut handshake = Handshake::new(export, &mut answers);
    loop {
        wire.send(&answers)?;
        answers.clear();
        let step = handshake.take(incoming.bytes(), &mut answers)?;
        match step {
            Step::More => {
                if !incoming.more(MESSAGE_BYTES_MAX, usize::MAX)? {
                    return Ok(None);
                }
            }
            Step::Took(bytes) => incoming.consume(bytes),
            Step::Serve(bytes, agreed) => {
                incoming.consume(bytes);
                wire.send(&answers)?;
                return Ok(Some(agreed));
            }
            Step::Leave => {
                // A client that leaves need not stay to hear it.
                let _ = wire.send(&answers);
                return Ok(None);
            }
        }
    }
}

/// How it goes on after a request.
#[derive(PartialEq, Eq)]
enum Next {
    Request,
    /// The client leaves, or is gone.
    End,
}

struct Connection<'scope, 'env> {
    device: &'env dyn Device,
    wire: &'env Wire<'env>,
    incoming: Incoming<'env>,
    out: Outgoing<'env>,
    agreed: Agreed,
    waiting: &'scope Waiting<'env>,
    scope: &'scope Scope<'scope, 'env>,
}

impl Connection<'_, '_> {
    fn run(&mut self) -> Result<(), ServeError> {
        let result = self.requests();
        match &result {
            // It left, and waits for what it asked before.
            Ok(true) => {}
            Ok(false) | Err(_) => self.wire.break_off(),
        }
        result.map(|_| ())
    }

    /// True: the client left. False: it is gone.
    fn requests(&mut self) -> Result<bool, ServeError> {
        loop {
            if !self.bytes(REQUEST_BYTES, usize::MAX)? {
                return Ok(false);
            }
            let head = self.incoming.bytes().first_chunk().and_then(RequestHead::decode).ok_or(ServeError::NoRequest)?;
            self.incoming.consume(REQUEST_BYTES);
            let limits = Limits { size: self.device.size(), read_only: self.device.read_only(), agreed: self.agreed };
            let next = match check(&head, &limits) {
                Ok(What::Leave) => {
                    self.out.send()?;
                    return Ok(true);
                }
                Ok(what) => self.request(&head, what)?,
                Err(error) => {
                    self.fail(&head, error)?;
                    if head.command == command::WRITE { self.skip(head.len)? } else { Next::Request }
                }
            };
            if next == Next::End {
                return Ok(false);
            }
        }
    }

    /// Makes `count` bytes be there, and takes up to `most` if it must wait. False: the client is gone.
    fn bytes(&mut self, count: usize, most: usize) -> io::Result<bool> {
        while self.incoming.bytes().len() < count {
            // Whoever waits for us has what we have.
            self.out.send()?;
            if !self.incoming.more(count, most)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn request(&mut self, head: &RequestHead, what: What) -> io::Result<Next> {
        let (cookie, offset, len) = (head.cookie, head.offset, u64::from(head.len));
        match what {
            What::Read { whole } if self.agreed.structured => self.read_structured(head, whole)?,
            What::Read { .. } => self.read_simple(head)?,
            What::Write { fua } => return self.write(head, fua),
            What::Flush => self.submit(Job { cookie, kind: Kind::Flush })?,
            What::Trim { fua } | What::Zero { fua, .. } if len == 0 => self.changed(cookie, Ok(()), fua)?,
            What::Trim { fua } if self.must_wait(offset, len) => self.submit(Job { cookie, kind: Kind::Trim { offset, len, fua } })?,
            What::Trim { fua } => {
                let result = self.device.discard(offset, len);
                self.changed(cookie, result, fua)?;
            }
            What::Zero { hole, fua } if self.must_wait(offset, len) => {
                self.submit(Job { cookie, kind: Kind::Zero { offset, len, hole, fua } })?;
            }
            What::Zero { hole, fua } => {
                let result = self.device.zero(offset, len, hole, false);
                self.changed(cookie, result, fua)?;
            }
            What::Status { one } => {
                let pieces = self.device.pieces(offset, len).map_err(|e| Errno::of(&e));
                match pieces.and_then(|pieces| status(cookie, head.len, one, &pieces)) {
                    Ok(reply) => self.out.put(&reply)?,
                    Err(error) => self.fail(head, error)?,
                }
            }
            // It was seen before.
            What::Leave => return Ok(Next::End),
        }
        Ok(Next::Request)
    }

    /// Replies to a change, at once or when it is durable.
    fn changed(&mut self, cookie: u64, result: io::Result<()>, fua: bool) -> io::Result<()> {
        match result {
            Ok(()) if fua => self.submit(Job { cookie, kind: Kind::Flush }),
            result => self.out.put(&simple_reply(cookie, result.err().as_ref().map(Errno::of))),
        }
    }

    fn fail(&mut self, head: &RequestHead, error: Errno) -> io::Result<()> {
        let structured = self.agreed.structured && matches!(head.command, command::READ | command::BLOCK_STATUS);
        if structured { self.out.put(&error_chunk(head.cookie, error)) } else { self.out.put(&simple_reply(head.cookie, Some(error))) }
    }

    fn submit(&mut self, job: Job) -> io::Result<()> {
        // Before it may have to wait.
        self.out.send()?;
        let bytes = if let Kind::Read { len, .. } = &job.kind { *len as usize } else { 0 };
        self.waiting.room(bytes);
        self.waiting.submit(self.scope, job)
    }

    fn read_structured(&mut self, head: &RequestHead, whole: bool) -> io::Result<()> {
        let cookie = head.cookie;
        let end = head.offset.saturating_add(head.len.into());
        let mut at = head.offset;
        if at == end {
            return self.out.put(&chunk_head(cookie, chunk::NONE, true, 0));
        }
        while at < end {
            let here = piece(at, end, whole);
            let next = at + here as u64;
            let size = DATA_CHUNK_BYTES + here;
            let (begin, data) = self.out.reserve(size)?.split_at_mut(DATA_CHUNK_BYTES);
            begin.copy_from_slice(&data_chunk_head(cookie, at, next == end, here as u32));
            match self.device.read_ready(at, data) {
                Some(Ok(())) => at = next,
                Some(Err(e)) => {
                    self.out.undo(size);
                    return self.out.put(&error_chunk(cookie, Errno::of(&e)));
                }
                None => {
                    self.out.undo(size);
                    let len = (end - at) as u32;
                    return self.submit(Job { cookie, kind: Kind::Read { offset: at, len, structured: true, whole } });
                }
            }
        }
        Ok(())
    }

    fn read_simple(&mut self, head: &RequestHead) -> io::Result<()> {
        let size = SIMPLE_REPLY_BYTES + head.len as usize;
        let (begin, data) = self.out.reserve(size)?.split_at_mut(SIMPLE_REPLY_BYTES);
        begin.copy_from_slice(&simple_reply(head.cookie, None));
        match self.device.read_ready(head.offset, data) {
            Some(Ok(())) => Ok(()),
            Some(Err(e)) => {
                self.out.undo(size);
                self.fail(head, Errno::of(&e))
            }
            None => {
                self.out.undo(size);
                let kind = Kind::Read { offset: head.offset, len: head.len, structured: false, whole: true };
                self.submit(Job { cookie: head.cookie, kind })
            }
        }
    }

    /// May a change have to wait? For an earlier one of the same blocks, or for what its first and last block hold beside it.
    fn must_wait(&self, offset: u64, len: u64) -> bool {
        let waits = |block: u64| {
            let mut bytes = [0; BLOCK as usize];
            // The last block may be short.
            let here = self.device.size().saturating_sub(block).min(BLOCK) as usize;
            self.device.read_ready(block, &mut bytes[..here]).is_none()
        };
        self.waiting.changes_any(&blocks(offset, len)) || edges(offset, len).into_iter().flatten().any(waits)
    }

    fn write(&mut self, head: &RequestHead, fua: bool) -> io::Result<Next> {
        if self.must_wait(head.offset, head.len.into()) {
            return self.write_later(head, fua);
        }
        let end = head.offset.saturating_add(head.len.into());
        let mut at = head.offset;
        let mut result = Ok(());
        while at < end {
            let here = piece(at, end, false);
            // No more than is left of this one is taken, so that little has to be moved to the front; behind it comes what comes.
            let last = at + here as u64 == end;
            if !self.bytes(here, if last { usize::MAX } else { here })? {
                return Ok(Next::End);
            }
            if result.is_ok() {
                result = self.device.write(at, &self.incoming.bytes()[..here], false);
            }
            self.incoming.consume(here);
            at += here as u64;
        }
        self.changed(head.cookie, result, fua)?;
        Ok(Next::Request)
    }

    /// Takes what is to be written into memory, for a thread that may wait.
    fn write_later(&mut self, head: &RequestHead, fua: bool) -> io::Result<Next> {
        self.out.send()?;
        let len = head.len as usize;
        self.waiting.room(len);
        let mut bytes = Vec::with_capacity(len);
        while bytes.len() < len {
            let here = (len - bytes.len()).min(PIECE);
            if !self.bytes(here, here)? {
                return Ok(Next::End);
            }
            bytes.extend_from_slice(&self.incoming.bytes()[..here]);
            self.incoming.consume(here);
        }
        let kind = Kind::Write { offset: head.offset, bytes, fua };
        self.waiting.submit(self.scope, Job { cookie: head.cookie, kind })?;
        Ok(Next::Request)
    }

    /// Passes over what was to be written.
    fn skip(&mut self, len: u32) -> io::Result<Next> {
        let mut left = len as usize;
        while left > 0 {
            let here = left.min(PIECE);
            if !self.bytes(here, here)? {
                return Ok(Next::End);
            }
            self.incoming.consume(here);
            left -= here;
        }
        Ok(Next::Request)
    }
}
