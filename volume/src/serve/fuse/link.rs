//! The way from the file to the server: every request until it was replied to, over as many connections as that takes.
//!
//! Owns requests that are under way, sending them again on a new connection, and giving up. A request may so be done twice: all of them
//! leave the same when repeated, and the server is done with a connection before it takes the next one. Does not own what the kernel
//! asks (`session`) or how a connection begins (`nbd::client`).

use std::collections::BTreeMap;
use std::fs::File;
use std::io::{self, Write};
use std::net::Shutdown;
use std::os::unix::net::UnixStream;
use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustix::net::{SendFlags, send};

use crate::serve::nbd::client::{ClientError, Export, connect};
use crate::serve::nbd::incoming::Incoming;
use crate::serve::nbd::wire::{RequestHead, SIMPLE_REPLY_BYTES, command, command_flag, decode_simple_reply, flag};

use super::wire::{ANSWER_HEAD_BYTES, TRANSFER_BYTES_MAX, answer_head, forget_attributes, written};

/// Most requests under way: more than the kernel has in the background.
const REQUESTS_MAX: usize = 256;
/// Most bytes that they hold or will read.
const BYTES_MAX: usize = 32 << 20;
/// Longest range of one request, in bytes: the protocol's number, in whole blocks.
const RANGE_BYTES_MAX: u64 = (1 << 32) - (1 << 16);
/// Between two tries to connect: a server is back soon when it was restarted, and late when its host is busy.
const PAUSE_MIN: Duration = Duration::from_millis(5);
const PAUSE_MAX: Duration = Duration::from_millis(500);
/// Taken at once where heads of replies are waited for: what follows them is read to where it belongs.
const HEADS_BYTES: usize = 16 * 1024;
/// What a server must be able to do if it is written to.
const NEEDED: u16 = flag::SEND_FLUSH | flag::SEND_FUA | flag::SEND_WRITE_ZEROES;

/// Who serves the volume.
#[derive(Debug, Clone)]
pub struct Server {
    /// Its socket.
    pub socket: PathBuf,
    /// The export's name.
    pub export: String,
    /// How long requests wait for a server that is away before they fail.
    pub patience: Duration,
}

/// What is asked of the server.
#[derive(Debug, Clone)]
pub enum Wish {
    /// Reads.
    Read {
        /// In bytes.
        offset: u64,
        /// In bytes, at most a transfer.
        len: u32,
    },
    /// Writes.
    Write {
        /// In bytes.
        offset: u64,
        /// What, at most a transfer.
        bytes: Arc<[u8]>,
        /// Durably.
        fua: bool,
    },
    /// Makes durable what was written.
    Flush,
    /// Makes a range read as zeros.
    Zero {
        /// In bytes.
        offset: u64,
        /// In bytes.
        len: u64,
        /// They need keep no room.
        hole: bool,
    },
}

impl Wish {
    fn bytes(&self) -> usize {
        match self {
            Self::Read { len, .. } => *len as usize,
            Self::Write { bytes, .. } => bytes.len(),
            Self::Flush | Self::Zero { .. } => 0,
        }
    }

    /// What the kernel is answered.
    fn answer(&self) -> Vec<u8> {
        match self {
            Self::Write { bytes, .. } => written(bytes.len() as u32).to_vec(),
            Self::Read { .. } | Self::Flush | Self::Zero { .. } => Vec::new(),
        }
    }

    fn request(&self, cookie: u64) -> RequestHead {
        let (command, flags, offset, len) = match self {
            Self::Read { offset, len } => (command::READ, 0, *offset, *len),
            Self::Write { offset, bytes, fua } => (command::WRITE, if *fua { command_flag::FUA } else { 0 }, *offset, bytes.len() as u32),
            Self::Flush => (command::FLUSH, 0, 0, 0),
            // It was cut into ranges that fit.
            Self::Zero { offset, len, hole } => {
                (command::WRITE_ZEROES, if *hole { 0 } else { command_flag::NO_HOLE }, *offset, *len as u32)
            }
        };
        RequestHead { flags, command, cookie, offset, len }
    }
}

/// A request under way.
#[derive(Debug, Clone)]
struct Pending {
    /// The kernel's name for it.
    unique: u64,
    wish: Wish,
}

/// See the file's head.
pub struct Link {
    kernel: File,
    server: Server,
    state: Mutex<State>,
    /// There is room, or an end.
    changed: Condvar,
}

struct State {
    /// By cookie, which is older for the older.
    pending: BTreeMap<u64, Pending>,
    /// Of a request that was cut: how many are left, and the first error.
    cut: BTreeMap<u64, (usize, i32)>,
    bytes: usize,
    next: u64,
    connection: Option<Arc<Connection>>,
    export: Export,
    /// Patience is at its end: requests fail until the server is back.
    failing: bool,
    ended: bool,
}

#[derive(Debug)]
struct Connection {
    stream: UnixStream,
    sending: Mutex<()>,
}

impl Connection {
    /// Sends a request whole. That it could not is noticed by the one who waits for replies.
    fn send(&self, cookie: u64, wish: &Wish) {
        let _sending = self.sending.lock().unwrap_or_else(PoisonError::into_inner);
        let head = wish.request(cookie).encode();
        let bytes: &[u8] = if let Wish::Write { bytes, .. } = wish { bytes } else { &[] };
        if self.send_all(&head, bytes).is_err() {
            let _ = self.stream.shutdown(Shutdown::Both);
        }
    }

    fn send_all(&self, head: &[u8], bytes: &[u8]) -> io::Result<()> {
        // A short one in one call: it is copied, and a call costs more.
        if bytes.len() <= 16 * 1024 && !bytes.is_empty() {
            return self.send_part(&[head, bytes].concat());
        }
        self.send_part(head)?;
        self.send_part(bytes)
    }

    fn send_part(&self, mut bytes: &[u8]) -> io::Result<()> {
        while !bytes.is_empty() {
            match send(&self.stream, bytes, SendFlags::NOSIGNAL) {
                Ok(sent) => bytes = &bytes[sent.min(bytes.len())..],
                Err(rustix::io::Errno::INTR) => {}
                Err(e) => return Err(e.into()),
            }
        }
        Ok(())
    }
}

/// What is connected to.
pub type Connected = (UnixStream, Export);

/// Connects, and makes sure that the server can do what a file needs.
///
/// # Errors
/// See [`ClientError`].
pub fn open(server: &Server) -> Result<Connected, ClientError> {
    let (stream, export) = connect(&server.socket, &server.export)?;
    if export.flags & flag::READ_ONLY == 0 && export.flags & NEEDED != NEEDED {
        return Err(ClientError::Protocol("it can be written to, but knows no FLUSH, FUA or WRITE_ZEROES"));
    }
    Ok((stream, export))
}

impl Link {
    /// A link on which nothing was asked yet. Answers go to `kernel`.
    pub fn new(kernel: File, server: Server, export: Export) -> Self {
        let state = State {
            pending: BTreeMap::new(),
            cut: BTreeMap::new(),
            bytes: 0,
            next: 0,
            connection: None,
            export,
            failing: false,
            ended: false,
        };
        Self { kernel, server, state: Mutex::new(state), changed: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is served, as far as is known.
    pub fn export(&self) -> Export {
        self.lock().export
    }

    /// Answers the kernel.
    pub fn answer(&self, unique: u64, error: i32, bytes: &[u8]) {
        let mut answer = answer_head(unique, error, bytes.len()).to_vec();
        answer.extend(bytes);
        self.say(&answer);
    }

    fn say(&self, answer: &[u8]) {
        // The kernel gave the request up, or is gone: then the session reads that.
        let _ = (&self.kernel).write(answer);
    }

    /// Asks the server; the kernel's request `unique` is answered when it has replied. Waits while too much is under way.
    pub fn ask(&self, unique: u64, wish: Wish) {
        let Wish::Zero { mut offset, len, hole } = wish else { return self.ask_one(unique, wish) };
        let parts = len.div_ceil(RANGE_BYTES_MAX).max(1);
        if parts > 1 {
            self.lock().cut.insert(unique, (usize::try_from(parts).unwrap_or(usize::MAX), 0));
        }
        let mut left = len;
        for _ in 0..parts {
            let here = left.min(RANGE_BYTES_MAX);
            self.ask_one(unique, Wish::Zero { offset, len: here, hole });
            left -= here;
            offset = offset.saturating_add(here);
        }
    }

    fn ask_one(&self, unique: u64, wish: Wish) {
        let mut state = self.lock();
        let full = |state: &State| {
            state.pending.len() >= REQUESTS_MAX || (state.bytes.saturating_add(wish.bytes()) > BYTES_MAX && !state.pending.is_empty())
        };
        while full(&state) && !state.failing && !state.ended {
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        if state.failing || state.ended {
            self.finish(&mut state, &Pending { unique, wish }, libc::EIO);
            return;
        }
        let cookie = state.next;
        state.next += 1;
        state.bytes += wish.bytes();
        state.pending.insert(cookie, Pending { unique, wish: wish.clone() });
        let connection = state.connection.clone();
        drop(state);
        // Without one it is sent when there is one again. If this one is broken, too.
        if let Some(connection) = connection {
            connection.send(cookie, &wish);
        }
    }

    /// Answers the kernel for a request without bytes.
    fn finish(&self, state: &mut State, pending: &Pending, error: i32) {
        let mut error = error;
        if let Some((left, first)) = state.cut.get_mut(&pending.unique) {
            *left -= 1;
            *first = if *first == 0 { error } else { *first };
            if *left > 0 {
                return;
            }
            error = *first;
            state.cut.remove(&pending.unique);
        }
        self.answer(pending.unique, error, &if error == 0 { pending.wish.answer() } else { Vec::new() });
    }

    /// Ends: the kernel asks nothing more.
    pub fn end(&self) {
        let mut state = self.lock();
        state.ended = true;
        if let Some(connection) = state.connection.take() {
            // Without a farewell: whatever was asked, nobody waits for it any more.
            let _ = connection.stream.shutdown(Shutdown::Both);
        }
        self.changed.notify_all();
    }

    /// Replies, for as long as the kernel asks. `first` is a connection that was made.
    pub fn run(&self, first: Connected) {
        let mut next = Some(first);
        let mut away = None;
        while let Some(connected) = next.take().or_else(|| self.connect_again(&mut away)) {
            let Some((connection, again)) = self.take_up(connected) else { return };
            let mut replied = false;
            let result = thread::scope(|scope| {
                // Beside reading replies: a server that waits for us to read would never take the rest.
                let resend = || again.iter().for_each(|(cookie, pending)| connection.send(*cookie, &pending.wish));
                if !again.is_empty() && thread::Builder::new().name("fuse-resend".into()).spawn_scoped(scope, resend).is_err() {
                    return Err(io::Error::other("no thread to send requests again"));
                }
                let result = self.replies(&connection, &mut replied);
                let _ = connection.stream.shutdown(Shutdown::Both);
                result
            });
            if replied || again.is_empty() {
                away = None;
            }
            let mut state = self.lock();
            state.connection = None;
            if state.ended {
                return;
            }
            let why = result.err().map_or_else(|| "it closed the connection".to_owned(), |e| e.to_string());
            tracing::warn!(socket = %self.server.socket.display(), why, pending = state.pending.len(), "the server of a volume is gone");
        }
    }

    /// Makes a connection the one that requests are sent on; gives those that were sent on another. None: it has ended.
    fn take_up(&self, (stream, export): Connected) -> Option<(Arc<Connection>, Vec<(u64, Pending)>)> {
        let connection = Arc::new(Connection { stream, sending: Mutex::new(()) });
        let mut state = self.lock();
        if state.ended {
            return None;
        }
        let grown = state.export.size != export.size;
        state.export = export;
        state.failing = false;
        state.connection = Some(Arc::clone(&connection));
        let again = state.pending.iter().map(|(cookie, pending)| (*cookie, pending.clone())).collect();
        drop(state);
        if grown {
            self.say(&forget_attributes());
        }
        Some((connection, again))
    }

    /// Connects when the server is back. `away` is since when requests wait for it: to be there and go again without a reply is not to
    /// be back. None: it has ended.
    fn connect_again(&self, away: &mut Option<Instant>) -> Option<Connected> {
        // At once, unless that was of no use just now.
        let mut pause = away.map(|_| PAUSE_MAX);
        let began = *away.get_or_insert_with(Instant::now);
        loop {
            let mut state = self.lock();
            if began.elapsed() >= self.server.patience && !state.failing {
                tracing::error!(socket = %self.server.socket.display(), "the server of a volume does not come back: requests fail");
                self.give_up(&mut state);
            }
            if let Some(pause) = pause
                && !state.ended
            {
                // An end wakes it; so does room, which does no harm.
                state = self.changed.wait_timeout(state, pause).unwrap_or_else(PoisonError::into_inner).0;
            }
            if state.ended {
                return None;
            }
            let size = state.export.size;
            drop(state);
            match open(&self.server) {
                Ok(connected) if connected.1.size >= size => return Some(connected),
                Ok((_, export)) => tracing::error!(size, now = export.size, "the volume is smaller than it was; it is not taken"),
                Err(e) => tracing::debug!(socket = %self.server.socket.display(), error = %e, "the server of a volume is not back yet"),
            }
            pause = Some(pause.map_or(PAUSE_MIN, |pause| (pause * 2).min(PAUSE_MAX)));
        }
    }

    fn give_up(&self, state: &mut State) {
        state.failing = true;
        state.bytes = 0;
        for pending in std::mem::take(&mut state.pending).into_values() {
            self.finish(state, &pending, libc::EIO);
        }
        self.changed.notify_all();
    }

    /// Replies of one connection, until it ends; `replied` when there was one.
    fn replies(&self, connection: &Connection, replied: &mut bool) -> io::Result<()> {
        let mut incoming = Incoming::new(&connection.stream);
        let mut answer = vec![0; ANSWER_HEAD_BYTES + TRANSFER_BYTES_MAX as usize];
        loop {
            while incoming.bytes().len() < SIMPLE_REPLY_BYTES {
                if !incoming.more(SIMPLE_REPLY_BYTES, HEADS_BYTES)? {
                    return Ok(());
                }
            }
            let head = incoming.bytes().first_chunk().and_then(decode_simple_reply);
            let (cookie, error) = head.ok_or_else(|| broken("what should begin a reply does not"))?;
            incoming.consume(SIMPLE_REPLY_BYTES);
            let (unique, read) = match self.lock().pending.get(&cookie) {
                Some(Pending { unique, wish: Wish::Read { len, .. } }) if error == 0 => (*unique, Some(*len as usize)),
                Some(pending) => (pending.unique, None),
                None => return Err(broken("a reply to nothing that was asked")),
            };
            if let Some(len) = read {
                let answer = answer.get_mut(..ANSWER_HEAD_BYTES + len).ok_or_else(|| broken("more than was asked for"))?;
                let (head, data) = answer.split_at_mut(ANSWER_HEAD_BYTES);
                if !incoming.fill(data)? {
                    return Ok(());
                }
                head.copy_from_slice(&answer_head(unique, 0, len));
            }
            let mut state = self.lock();
            // Only this thread takes requests out.
            let Some(pending) = state.pending.remove(&cookie) else { continue };
            *replied = true;
            state.bytes = state.bytes.saturating_sub(pending.wish.bytes());
            match read {
                Some(len) => {
                    drop(state);
                    self.say(&answer[..ANSWER_HEAD_BYTES + len]);
                }
                None => {
                    self.finish(&mut state, &pending, errno(error));
                    drop(state);
                }
            }
            self.changed.notify_all();
        }
    }
}

/// What the kernel is told of an error of the server: the protocol has Linux's numbers, but not all of them mean the same to a file.
fn errno(error: u32) -> i32 {
    match error {
        0 => 0,
        1 => libc::EPERM,
        28 => libc::ENOSPC,
        // Whatever it is, the bytes could not be had or kept.
        _ => libc::EIO,
    }
}

fn broken(why: &'static str) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, why)
}
