//! Where the threads meet: one session's calls, and whether there is a session at all.
//!
//! Owns the lock, the waiting, and what outlives a session: whether a reseed is due. A call belongs to the session it came in; what it says
//! in a later one is dropped. Does not move bytes (`channel`) nor know what calls mean (`verbs`).

use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use rustix::event::EventfdFlags;
use volley_jobspecs::wire::guest::mux::{Channel, Mux, Read, Side, Write};
use volley_jobspecs::wire::guest::{Answer, Order, Refusal, RefusalKind};
use volley_jobspecs::wire::{decode, encode};

/// Longest wait without a look at the clock.
const WAIT_MAX: Duration = Duration::from_secs(3600);

/// The session, if there is one.
#[derive(Debug)]
pub struct Session {
    state: Mutex<State>,
    changed: Condvar,
    /// Tells the thread that moves bytes that there are some.
    wake: OwnedFd,
}

/// What the lock protects.
#[derive(Debug, Default)]
pub struct State {
    /// The calls. None: a resync is awaited.
    pub mux: Option<Mux>,
    /// Counts sessions.
    epoch: u64,
    /// Must the machine be reseeded before anything else?
    pub reseed_due: bool,
    /// A snapshot is being prepared: no new calls.
    pub preparing: bool,
    /// Everything was answered: once it has been sent, only a resync is read for.
    pub quiet: bool,
    /// Processes may outlive the session.
    pub keep: bool,
}

impl Session {
    /// Nobody has called yet.
    ///
    /// # Errors
    /// What the system says.
    pub fn new() -> io::Result<Self> {
        let wake = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Self { state: Mutex::default(), changed: Condvar::new(), wake })
    }

    /// The state. A thread that panicked with it left nothing half done: each change is one call.
    pub fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Wakes whoever waits.
    pub fn notify(&self) {
        self.changed.notify_all();
    }

    /// What becomes readable when there may be bytes to send.
    pub fn wake_fd(&self) -> BorrowedFd<'_> {
        self.wake.as_fd()
    }

    fn wake(&self) {
        // It fails only when 2^64 wakes are pending.
        let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
    }

    /// A host has called.
    pub fn begin(&self, reseed: bool) {
        let mut state = self.lock();
        state.mux = Some(Mux::new(Side::Guest));
        state.epoch += 1;
        state.reseed_due |= reseed;
        (state.preparing, state.quiet, state.keep) = (false, false, false);
        drop(state);
        self.notify();
    }

    /// The session is over; what is left of its calls finds out.
    pub fn drop_session(&self) {
        let mut state = self.lock();
        state.mux = None;
        state.epoch += 1;
        state.quiet = false;
        drop(state);
        self.notify();
    }

    /// The next call and its request.
    pub fn accept(self: &Arc<Self>) -> Option<(Call, Vec<u8>)> {
        let mut state = self.lock();
        let epoch = state.epoch;
        let (number, request) = state.mux.as_mut()?.accept()?;
        Some((Call { session: self.clone(), epoch, number }, request))
    }

    /// Waits until `done` gives something or the deadline has passed.
    pub fn wait<T>(&self, deadline: Option<Instant>, mut done: impl FnMut(&mut State) -> Option<T>) -> Option<T> {
        let mut state = self.lock();
        loop {
            if let Some(result) = done(&mut state) {
                return Some(result);
            }
            let left = deadline.map_or(WAIT_MAX, |deadline| deadline.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                return None;
            }
            state = self.changed.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// One call, as the threads that carry it out see it.
#[derive(Debug, Clone)]
pub struct Call {
    pub session: Arc<Session>,
    epoch: u64,
    pub number: u32,
}

/// The host gave the call up, or the session is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the host has gone")]
pub struct Gone;

impl From<Gone> for io::Error {
    fn from(gone: Gone) -> Self {
        Self::new(io::ErrorKind::BrokenPipe, gone)
    }
}

impl Call {
    /// The calls of its session; none when that is over.
    pub fn mux<'a>(&self, state: &'a mut State) -> Option<&'a mut Mux> {
        let mine = state.epoch == self.epoch;
        state.mux.as_mut().filter(|_| mine)
    }

    /// Does nobody want it any more?
    pub fn is_over(&self, state: &mut State) -> bool {
        self.mux(state).is_none_or(|mux| mux.is_over(self.number))
    }

    /// Says something before the last.
    pub fn say(&self, answer: &Answer) {
        if let Some(mux) = self.mux(&mut self.session.lock()) {
            mux.say(self.number, encode(answer));
        }
        self.session.wake();
    }

    /// Says the last, and that is the end of the call.
    pub fn finish(&self, answer: &Answer) {
        if let Some(mux) = self.mux(&mut self.session.lock()) {
            mux.finish(self.number, encode(answer));
        }
        self.session.wake();
    }

    /// As [`Self::finish`]; and once it was sent, only a resync is read for.
    pub fn finish_session(&self, answer: &Answer) {
        let mut state = self.session.lock();
        if let Some(mux) = self.mux(&mut state) {
            mux.finish(self.number, encode(answer));
            state.quiet = true;
            state.reseed_due = true;
        }
        drop(state);
        self.session.wake();
    }

    /// The next order of the host, if it has come.
    pub fn order(&self, state: &mut State) -> Option<Order> {
        let bytes = self.mux(state)?.message(self.number)?;
        // There may be room for more, which has to be told.
        self.session.wake();
        decode("order", &bytes).ok()
    }

    /// Waits for bytes of the call's input. 0: it has ended.
    ///
    /// # Errors
    /// [`Gone`].
    pub fn read(&self, into: &mut [u8]) -> Result<usize, Gone> {
        let read = self.session.wait(None, |state| match self.mux(state).map(|mux| mux.read(self.number, Channel::Input, into)) {
            None | Some(Read::Gone) => Some(Err(Gone)),
            Some(Read::Empty) => None,
            Some(Read::Bytes(len)) => Some(Ok(len)),
            Some(Read::End) => Some(Ok(0)),
        });
        self.session.wake();
        read.unwrap_or(Err(Gone))
    }

    /// Waits until all of it waits to be sent.
    ///
    /// # Errors
    /// [`Gone`].
    pub fn write(&self, channel: Channel, mut bytes: &[u8]) -> Result<(), Gone> {
        while !bytes.is_empty() {
            let written = self.session.wait(None, |state| match self.mux(state).map(|mux| mux.write(self.number, channel, bytes)) {
                None | Some(Write::Gone) => Some(Err(Gone)),
                Some(Write::Full) => None,
                Some(Write::Bytes(len)) => Some(Ok(len)),
            });
            bytes = bytes.get(written.unwrap_or(Err(Gone))?..).unwrap_or_default();
            self.session.wake();
        }
        Ok(())
    }

    /// Ends a channel.
    pub fn end(&self, channel: Channel) {
        if let Some(mux) = self.mux(&mut self.session.lock()) {
            mux.end(self.number, channel);
        }
        self.session.wake();
    }
}

/// The call's input as a stream.
pub struct Input<'a>(pub &'a Call);

impl io::Read for Input<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        if into.is_empty() { Ok(0) } else { Ok(self.0.read(into)?) }
    }
}

/// The call's output as a stream.
pub struct Output<'a>(pub &'a Call);

impl io::Write for Output<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.write(Channel::Output, bytes)?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// What the system said, with what was tried.
pub fn refused(what: impl std::fmt::Display, e: &io::Error) -> Answer {
    let kind = match e.raw_os_error() {
        Some(libc::ENOENT) => RefusalKind::NotFound,
        _ if crate::files::is_full(e) => RefusalKind::NoSpace,
        _ => RefusalKind::System,
    };
    Answer::Refused(Refusal { errno: e.raw_os_error(), ..Refusal::new(kind, format!("{what}: {e}")) })
}
