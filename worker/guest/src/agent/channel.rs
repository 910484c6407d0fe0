//! The stream of bytes to the host.
//!
//! Owns the connection and the thread that moves its bytes, in a session and while one is awaited. It waits with an edge-triggered epoll:
//! a virtio port without a host is "hung up" all the time, and a level-triggered wait would spin. Does not know calls (`session`).

use std::convert::Infallible;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::event::epoll::{self, CreateFlags, EventData, EventFlags};
use rustix::io::Errno;
use rustix::net::SocketFlags;
use volley_jobspecs::wire::guest::mux::{Broken, put_over};
use volley_jobspecs::wire::guest::resync::{self, From, Scanner};

use super::session::Session;

/// Bytes read or written at once.
const CHUNK_BYTES: usize = 64 * 1024;
const WAKE: u64 = 1;
const LISTENER: u64 = 2;
const CONNECTION: u64 = 3;

/// How the host reaches the agent. All descriptors are non-blocking.
#[derive(Debug)]
pub enum Transport {
    /// A virtio port: one stream that stays open while hosts come and go.
    Port(OwnedFd),
    /// A socket that hosts connect to (vsock); a new connection takes the place of the one before.
    Listener(OwnedFd),
}

/// What is done with bytes that come.
enum Link {
    /// Thrown away up to a resync.
    Awaits(Scanner),
    /// Given to the session.
    Lives,
}

struct Mover<'a> {
    session: &'a Session,
    link: Link,
    /// To be sent, from `sent` on.
    out: Vec<u8>,
    sent: usize,
}

/// What became of the connection.
#[derive(PartialEq, Eq)]
enum Moved {
    /// Nothing more can be moved now.
    Waits,
    /// The other side has gone.
    HungUp,
}

/// Moves bytes for ever. `called` is called when the host may have opened a call.
///
/// # Errors
/// What the system says.
pub fn serve(transport: Transport, session: &Session, called: impl Fn()) -> io::Result<Infallible> {
    let poll = epoll::create(CreateFlags::CLOEXEC)?;
    epoll::add(&poll, session.wake_fd(), EventData::new_u64(WAKE), EventFlags::IN)?;
    let (mut connection, listener) = match transport {
        Transport::Port(port) => (Some(port), None),
        Transport::Listener(listener) => (None, Some(listener)),
    };
    let all = EventFlags::IN | EventFlags::OUT | EventFlags::RDHUP | EventFlags::ET;
    if let Some(listener) = &listener {
        epoll::add(&poll, listener, EventData::new_u64(LISTENER), EventFlags::IN)?;
    }
    if let Some(connection) = &connection {
        epoll::add(&poll, connection, EventData::new_u64(CONNECTION), all)?;
    }
    let mut mover = Mover { session, link: Link::Awaits(Scanner::new(From::Host)), out: Vec::new(), sent: 0 };
    let mut events = Vec::with_capacity(8);
    loop {
        events.clear();
        match epoll::wait(&poll, rustix::buffer::spare_capacity(&mut events), None) {
            Ok(_) | Err(Errno::INTR) => {}
            Err(e) => return Err(e.into()),
        }
        for event in &events {
            match event.data.u64() {
                WAKE => drop(rustix::io::read(session.wake_fd(), &mut [0; 8])),
                LISTENER => {
                    if let Some(next) = listener.as_ref().and_then(|listener| accept(listener.as_fd())) {
                        mover.hang_up();
                        epoll::add(&poll, &next, EventData::new_u64(CONNECTION), all)?;
                        // The old one leaves the set when it is closed.
                        connection = Some(next);
                    }
                }
                _ => {}
            }
        }
        let Some(stream) = &connection else { continue };
        if mover.pass(stream.as_fd(), &called) == Moved::HungUp {
            mover.hang_up();
            if listener.is_some() {
                connection = None;
            }
        }
    }
}

/// The newest of the connections that wait.
fn accept(listener: BorrowedFd<'_>) -> Option<OwnedFd> {
    let mut newest = None;
    while let Ok(next) = rustix::net::accept_with(listener, SocketFlags::CLOEXEC | SocketFlags::NONBLOCK) {
        newest = Some(next);
    }
    newest
}

impl Mover<'_> {
    /// Moves what can be moved, both ways.
    fn pass(&mut self, stream: BorrowedFd<'_>, called: &impl Fn()) -> Moved {
        let mut buffer = [0; CHUNK_BYTES];
        loop {
            let (read, hung_up) = match rustix::io::read(stream, &mut buffer) {
                Ok(0) => (0, true),
                Ok(len) => (len, false),
                Err(Errno::AGAIN | Errno::INTR) => (0, false),
                Err(_) => (0, true),
            };
            if hung_up {
                return Moved::HungUp;
            }
            if read > 0 {
                self.take(buffer.get(..read).unwrap_or_default());
                called();
            }
            let wrote = match self.give(stream) {
                Ok(wrote) => wrote,
                Err(_) => return Moved::HungUp,
            };
            if read == 0 && !wrote {
                return Moved::Waits;
            }
        }
    }

    /// The host has gone. Without a session there is nothing to tell.
    fn hang_up(&mut self) {
        (self.out, self.sent) = (Vec::new(), 0);
        if matches!(self.link, Link::Lives) {
            self.session.drop_session();
        }
        self.link = Link::Awaits(Scanner::new(From::Host));
    }

    fn take(&mut self, bytes: &[u8]) {
        let mut left = bytes.to_vec();
        while !left.is_empty() {
            match &mut self.link {
                Link::Awaits(scanner) => {
                    let (taken, resync) = scanner.feed(&left);
                    left.drain(..taken);
                    if let Some(resync) = resync {
                        self.session.begin(resync.reseed);
                        (self.out, self.sent) = (resync.encode(From::Guest).to_vec(), 0);
                        self.link = Link::Lives;
                    }
                }
                Link::Lives => {
                    let mut state = self.session.lock();
                    let broken = match state.mux.as_mut() {
                        Some(mux) => mux.feed(&left).err().map(|why| (why, mux.unread())),
                        None => None,
                    };
                    // Its last answer has gone, or is about to: a snapshot may be taken, and nothing more is said.
                    let quiet = state.quiet;
                    drop(state);
                    match broken {
                        None => {
                            left.clear();
                            self.session.notify();
                        }
                        Some((why, rest)) => {
                            left = rest;
                            // Usually the host begins a new session, and this side did not hear the old one end.
                            if quiet || matches!(why, Broken::Kind { kind } if resync::begins_with(kind)) {
                                self.hang_up();
                            } else {
                                eprintln!("volley-guest: session over: {why}");
                                let unsent = self.out.split_off(self.sent);
                                self.hang_up();
                                // Behind what is on its way, so that it is a frame of its own; else the host would wait for ever.
                                self.out = unsent;
                                put_over(&mut self.out, &why);
                            }
                        }
                    }
                }
            }
        }
    }

    /// Sends what there is. False when there was nothing, or no room.
    fn give(&mut self, stream: BorrowedFd<'_>) -> io::Result<bool> {
        if self.sent == self.out.len() {
            self.out.clear();
            self.sent = 0;
            let mut state = self.session.lock();
            if let Some(mux) = state.mux.as_mut() {
                mux.fill(&mut self.out, CHUNK_BYTES);
            }
            let silent = state.quiet && self.out.is_empty();
            drop(state);
            if silent {
                // The answer to `PrepareSnapshot` has gone.
                self.hang_up();
            } else if !self.out.is_empty() {
                // Whoever waited for room may have it.
                self.session.notify();
            }
        }
        let rest = self.out.get(self.sent..).unwrap_or_default();
        if rest.is_empty() {
            return Ok(false);
        }
        match rustix::io::write(stream, rest) {
            Ok(len) => {
                self.sent += len;
                Ok(len > 0)
            }
            Err(Errno::AGAIN | Errno::INTR) => Ok(false),
            Err(e) => Err(e.into()),
        }
    }
}
