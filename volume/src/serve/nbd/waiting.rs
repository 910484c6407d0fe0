//! Requests that may have to wait: for the network, for the disk, or for each other.
//!
//! Owns a connection's threads for them, their number and the memory of what they hold, and that of two overlapping changes the one that
//! came first is done first. Does not own requests that need no wait (`connection`): those of others never wait for these.

use std::collections::VecDeque;
use std::io;
use std::ops::Range;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, Scope};
use std::time::Duration;

use crate::device::Device;

use super::incoming::PIECE;
use super::outgoing::Wire;
use super::wire::{DATA_CHUNK_BYTES, Errno, SIMPLE_REPLY_BYTES, data_chunk_head, error_chunk, simple_reply};

/// Threads of a connection: as many requests as QEMU has under way on one.
const THREADS_MAX: usize = 16;
/// Bytes of a thread's stack: it holds no data, but the device's code runs on it.
const STACK_BYTES: usize = 1 << 20;
/// A thread with nothing to do ends after this: most connections read cold data for a moment only.
const IDLE: Duration = Duration::from_secs(5);
/// Most requests that wait at a connection. A client that has more must wait until some are done.
const REQUESTS_MAX: usize = 256;
/// Most bytes that they hold or will read into memory: two of the largest.
const BYTES_MAX: usize = 64 << 20;

/// A request that may have to wait.
#[derive(Debug)]
pub struct Job {
    /// Names it in its reply.
    pub cookie: u64,
    /// What it wants.
    pub kind: Kind,
}

/// What such a request wants. Its range was checked.
#[derive(Debug)]
pub enum Kind {
    /// Reads; `structured` is how it is replied, `whole` in one piece.
    Read {
        /// In bytes.
        offset: u64,
        /// In bytes.
        len: u32,
        /// See there.
        structured: bool,
        /// See there.
        whole: bool,
    },
    /// Writes.
    Write {
        /// In bytes.
        offset: u64,
        /// What.
        bytes: Vec<u8>,
        /// Reply when it is durable.
        fua: bool,
    },
    /// Writes zeros.
    Zero {
        /// In bytes.
        offset: u64,
        /// In bytes.
        len: u64,
        /// They need keep no room.
        hole: bool,
        /// Reply when it is durable.
        fua: bool,
    },
    /// Discards.
    Trim {
        /// In bytes.
        offset: u64,
        /// In bytes.
        len: u64,
        /// Reply when it is durable.
        fua: bool,
    },
    /// Makes everything durable that was replied to.
    Flush,
}

impl Kind {
    /// What it changes.
    fn changes(&self) -> Option<Range<u64>> {
        match self {
            Self::Read { .. } | Self::Flush => None,
            Self::Write { offset, bytes, .. } => Some(super::request::blocks(*offset, bytes.len() as u64)),
            Self::Zero { offset, len, .. } | Self::Trim { offset, len, .. } => Some(super::request::blocks(*offset, *len)),
        }
    }

    /// Memory that it takes.
    fn bytes(&self) -> usize {
        match self {
            Self::Read { len, .. } => *len as usize,
            Self::Write { bytes, .. } => bytes.len(),
            Self::Zero { .. } | Self::Trim { .. } | Self::Flush => 0,
        }
    }
}

/// A connection's waiting requests.
pub struct Waiting<'a> {
    device: &'a dyn Device,
    wire: &'a Wire<'a>,
    state: Mutex<State>,
    /// There is work, or there will be none.
    work: Condvar,
    /// A request is done.
    done: Condvar,
    /// Changes that wait or are being done; read without the lock, as nearly always there are none.
    changes: AtomicUsize,
}

#[derive(Default)]
struct State {
    queue: VecDeque<Numbered>,
    /// Changes that wait or are being done, by number, and the blocks they touch.
    held: Vec<(u64, Range<u64>)>,
    next: u64,
    requests: usize,
    bytes: usize,
    threads: usize,
    idle: usize,
    closed: bool,
}

struct Numbered {
    number: u64,
    job: Job,
    bytes: usize,
}

impl<'a> Waiting<'a> {
    /// None yet.
    pub fn new(device: &'a dyn Device, wire: &'a Wire<'a>) -> Self {
        Self { device, wire, state: Mutex::default(), work: Condvar::new(), done: Condvar::new(), changes: AtomicUsize::new(0) }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Is a change of some of these blocks waiting or being done? Only the one who submits may rely on a no.
    pub fn changes_any(&self, blocks: &Range<u64>) -> bool {
        self.changes.load(Ordering::Acquire) > 0 && self.lock().held.iter().any(|(_, held)| overlap(held, blocks))
    }

    /// Waits until a request with so many bytes may be submitted.
    pub fn room(&self, bytes: usize) {
        let mut state = self.lock();
        while !self.wire.is_broken()
            && state.requests > 0
            && (state.requests >= REQUESTS_MAX || state.bytes.saturating_add(bytes) > BYTES_MAX)
        {
            state = self.done.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// Takes a request, which will be replied to. Call [`Waiting::room`] first.
    ///
    /// # Errors
    /// The host gives no thread, and there is none.
    pub fn submit<'scope>(&'scope self, scope: &'scope Scope<'scope, '_>, job: Job) -> io::Result<()> {
        let mut state = self.lock();
        let (number, bytes) = (state.next, job.kind.bytes());
        state.next += 1;
        if let Some(blocks) = job.kind.changes() {
            state.held.push((number, blocks));
            self.changes.store(state.held.len(), Ordering::Release);
        }
        state.requests += 1;
        state.bytes += bytes;
        state.queue.push_back(Numbered { number, job, bytes });
        if state.queue.len() <= state.idle || state.threads == THREADS_MAX {
            self.work.notify_one();
            return Ok(());
        }
        let started = thread::Builder::new().name("nbd-waiting".into()).stack_size(STACK_BYTES).spawn_scoped(scope, || self.work());
        match started {
            Ok(_) => state.threads += 1,
            // Others will come to it.
            Err(_) if state.threads > 0 => self.work.notify_one(),
            Err(e) => return Err(e),
        }
        Ok(())
    }

    /// Nothing more is submitted: the threads end when all is done.
    pub fn close(&self) {
        self.lock().closed = true;
        self.work.notify_all();
    }

    /// A thread.
    fn work(&self) {
        let _guard = Guard(self);
        let mut buffer = Vec::new();
        while let Some(numbered) = self.next() {
            // Nobody waits for what a client has not heard of before it went.
            if !self.wire.is_broken() && self.is_next(&numbered) {
                self.perform(&numbered.job, &mut buffer);
            }
            self.finish(&numbered);
            if buffer.len() > PIECE + DATA_CHUNK_BYTES {
                buffer = Vec::new();
            }
        }
    }

    fn next(&self) -> Option<Numbered> {
        let mut state = self.lock();
        loop {
            if let Some(numbered) = state.queue.pop_front() {
                return Some(numbered);
            }
            if state.closed {
                return None;
            }
            state.idle += 1;
            let (again, waited) = self.work.wait_timeout(state, IDLE).unwrap_or_else(PoisonError::into_inner);
            state = again;
            state.idle -= 1;
            if waited.timed_out() && state.queue.is_empty() {
                state.threads -= 1;
                return None;
            }
        }
    }

    /// Waits until every earlier change of the same blocks is done. They began earlier too, so none waits for this one. False: there is
    /// no client any more.
    fn is_next(&self, numbered: &Numbered) -> bool {
        let Some(blocks) = numbered.job.kind.changes() else { return true };
        let mut state = self.lock();
        let earlier = |state: &State| state.held.iter().any(|(number, held)| *number < numbered.number && overlap(held, &blocks));
        while !self.wire.is_broken() && earlier(&state) {
            state = self.done.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        !self.wire.is_broken()
    }

    fn finish(&self, numbered: &Numbered) {
        let mut state = self.lock();
        state.held.retain(|(number, _)| *number != numbered.number);
        self.changes.store(state.held.len(), Ordering::Release);
        state.requests -= 1;
        state.bytes -= numbered.bytes;
        drop(state);
        self.done.notify_all();
    }

    fn perform(&self, job: &Job, buffer: &mut Vec<u8>) {
        let result = match &job.kind {
            Kind::Read { offset, len, structured: true, whole } => {
                self.read_structured(job.cookie, *offset, *len, *whole, buffer);
                return;
            }
            Kind::Read { offset, len, .. } => {
                let size = SIMPLE_REPLY_BYTES + *len as usize;
                grow(buffer, size);
                let (head, data) = buffer[..size].split_at_mut(SIMPLE_REPLY_BYTES);
                head.copy_from_slice(&simple_reply(job.cookie, None));
                let result = self.device.read(*offset, data);
                if result.is_ok() {
                    self.send(&buffer[..size]);
                    return;
                }
                result
            }
            Kind::Write { offset, bytes, fua } => self.device.write(*offset, bytes, *fua),
            Kind::Zero { offset, len, hole, fua } => self.device.zero(*offset, *len, *hole, *fua),
            Kind::Trim { offset, len, fua } => {
                let result = self.device.discard(*offset, *len);
                if *fua { result.and_then(|()| self.device.flush()) } else { result }
            }
            Kind::Flush => self.device.flush(),
        };
        self.send(&simple_reply(job.cookie, result.err().as_ref().map(Errno::of)));
    }

    fn read_structured(&self, cookie: u64, offset: u64, len: u32, whole: bool, buffer: &mut Vec<u8>) {
        let end = offset.saturating_add(len.into());
        let mut at = offset;
        while at < end && !self.wire.is_broken() {
            let here = piece(at, end, whole);
            let size = DATA_CHUNK_BYTES + here;
            grow(buffer, size);
            let (head, data) = buffer[..size].split_at_mut(DATA_CHUNK_BYTES);
            let next = at + here as u64;
            head.copy_from_slice(&data_chunk_head(cookie, at, next == end, here as u32));
            if let Err(e) = self.device.read(at, data) {
                self.send(&error_chunk(cookie, Errno::of(&e)));
                return;
            }
            self.send(&buffer[..size]);
            at = next;
        }
    }

    fn send(&self, bytes: &[u8]) {
        // A client that is gone is noticed by the one who waits for its requests.
        let _ = self.wire.send(bytes);
    }
}

/// How many bytes from `at` on are moved at once: up to a multiple of [`PIECE`], so that no block is halved.
pub fn piece(at: u64, end: u64, whole: bool) -> usize {
    let left = end.saturating_sub(at);
    let here = if whole { left } else { left.min(PIECE as u64 - at % PIECE as u64) };
    // At most 32 MiB: a request's length.
    here as usize
}

fn overlap(a: &Range<u64>, b: &Range<u64>) -> bool {
    a.start < b.end && b.start < a.end
}

fn grow(buffer: &mut Vec<u8>, size: usize) {
    if buffer.len() < size {
        buffer.resize(size, 0);
    }
}

/// A thread that panics would leave its client, and other threads, waiting for ever: the connection ends instead.
struct Guard<'a>(&'a Waiting<'a>);

impl Drop for Guard<'_> {
    fn drop(&mut self) {
        if thread::panicking() {
            self.0.wire.break_off();
            let _state = self.0.lock();
            self.0.done.notify_all();
        }
    }
}
