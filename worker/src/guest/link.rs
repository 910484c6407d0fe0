//! One session's bytes, and the calls that wait for them.
//!
//! Owns the task that moves bytes between the connection and `wire::guest::mux`, and waking whoever waits. Does not know verbs.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::sync::Notify;
use tokio::task::JoinHandle;
use volley_jobspecs::wire;
use volley_jobspecs::wire::guest::mux::{Broken, Channel, Mux, Read, Said, Side, Write};
use volley_jobspecs::wire::guest::{Answer, Order, Request};

use super::{GuestError, Stream};

/// Bytes read or written at once.
const CHUNK_BYTES: usize = 64 * 1024;

/// The session's end of the connection.
pub struct Link {
    shared: Arc<Shared>,
    task: Option<JoinHandle<Option<Box<dyn Stream>>>>,
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    /// Something came, or something was sent.
    changed: Notify,
    /// There is something to send, or the session is to stop.
    wake: Notify,
}

#[derive(Debug)]
struct State {
    mux: Mux,
    /// Why the session is over.
    over: Option<String>,
    /// The session is to end, and the connection to be given back.
    stop: bool,
}

impl Shared {
    /// Each change of the state is one call, so a panic elsewhere leaves nothing half done.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn end(&self, why: impl Into<String>) {
        self.lock().over.get_or_insert(why.into());
        self.changed.notify_waiters();
    }

    /// Waits until `done` gives something.
    async fn wait<T>(&self, mut done: impl FnMut(&mut State) -> Option<T>) -> T {
        loop {
            let changed = self.changed.notified();
            tokio::pin!(changed);
            // Before the look, so that what changes behind it is not missed.
            changed.as_mut().enable();
            if let Some(result) = done(&mut self.lock()) {
                return result;
            }
            changed.await;
        }
    }
}

impl std::fmt::Debug for Link {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Link").field("shared", &self.shared).finish_non_exhaustive()
    }
}

impl Link {
    /// Takes over the connection. `rest` came behind the echo.
    pub fn start(stream: Box<dyn Stream>, rest: &[u8]) -> Self {
        let state = State { mux: Mux::new(Side::Host), over: None, stop: false };
        let shared = Arc::new(Shared { state: Mutex::new(state), changed: Notify::new(), wake: Notify::new() });
        let broken = shared.lock().mux.feed(rest);
        if let Err(why) = broken {
            shared.end(why.to_string());
        }
        let task = Some(tokio::spawn(carry(stream, shared.clone())));
        Self { shared, task }
    }

    /// Opens a call.
    ///
    /// # Errors
    /// [`GuestError::TooLarge`], [`GuestError::Lost`].
    pub fn open(&self, request: &Request) -> Result<Call, GuestError> {
        let request = wire::encode(request);
        let bytes = request.len();
        let mut state = self.shared.lock();
        if let Some(why) = &state.over {
            return Err(GuestError::Lost(why.clone()));
        }
        let number = state.mux.open(request).ok_or(GuestError::TooLarge { bytes })?;
        drop(state);
        self.shared.wake.notify_one();
        Ok(Call { shared: self.shared.clone(), number })
    }

    /// Ends the session and gives the connection back, with nothing more read or written.
    ///
    /// # Errors
    /// [`GuestError::Lost`] when there is none any more.
    pub async fn stop(mut self) -> Result<Box<dyn Stream>, GuestError> {
        self.shared.lock().stop = true;
        self.shared.wake.notify_one();
        let stream = match self.task.take() {
            Some(task) => task.await.ok().flatten(),
            None => None,
        };
        stream.ok_or_else(|| GuestError::Lost("the connection broke".to_owned()))
    }
}

impl Drop for Link {
    fn drop(&mut self) {
        if let Some(task) = &self.task {
            task.abort();
        }
        self.shared.end("the session was ended");
    }
}

/// Moves bytes until the session is over. The connection, when it was asked for.
async fn carry(stream: Box<dyn Stream>, shared: Arc<Shared>) -> Option<Box<dyn Stream>> {
    let mut buffer = vec![0; CHUNK_BYTES];
    let (mut out, mut sent) = (Vec::new(), 0);
    let (mut reader, mut writer) = tokio::io::split(stream);
    loop {
        if sent == out.len() {
            out.clear();
            sent = 0;
            let mut state = shared.lock();
            if state.stop {
                return Some(reader.unsplit(writer));
            }
            if state.over.is_some() {
                return None;
            }
            state.mux.fill(&mut out, CHUNK_BYTES);
            drop(state);
            if !out.is_empty() {
                // Whoever waited for room may have it.
                shared.changed.notify_waiters();
            }
        }
        let rest = out.get(sent..).unwrap_or_default();
        let moved = tokio::select! {
            read = reader.read(&mut buffer) => match read {
                Ok(0) => Err("it hung up".to_owned()),
                Ok(len) => shared.lock().mux.feed(buffer.get(..len).unwrap_or_default()).map_err(|why| match why {
                    Broken::Told { .. } => format!("it says {why}"),
                    _ => format!("it sent {why}"),
                }),
                Err(e) => Err(format!("the connection broke: {e}")),
            },
            wrote = writer.write(rest), if !rest.is_empty() => wrote.map(|len| sent += len).map_err(|e| format!("the connection broke: {e}")),
            () = shared.wake.notified(), if rest.is_empty() => continue,
        };
        match moved {
            Ok(()) => shared.changed.notify_waiters(),
            Err(why) => {
                shared.end(why);
                return None;
            }
        }
    }
}

/// One call. Dropped, it is given up.
#[derive(Debug)]
pub struct Call {
    shared: Arc<Shared>,
    number: u32,
}

impl Drop for Call {
    fn drop(&mut self) {
        self.shared.lock().mux.give_up(self.number);
        self.shared.wake.notify_one();
    }
}

impl Call {
    /// The next answer. A refusal is an error.
    ///
    /// # Errors
    /// [`GuestError`].
    pub async fn answer(&self, what: &'static str) -> Result<Answer, GuestError> {
        let next = self.shared.wait(|state| match state.mux.message(self.number) {
            Some(message) => Some(Ok(message)),
            None if state.over.is_some() => Some(Err(lost(state))),
            None if state.mux.is_over(self.number) => Some(Err(GuestError::Nonsense { what })),
            None => None,
        });
        let message = next.await?;
        match wire::decode("answer", &message) {
            Ok(Answer::Refused(mut refusal)) => {
                // It is printed, and a guest must not steer terminals.
                refusal.text = refusal.text.chars().map(|c| if c.is_control() { ' ' } else { c }).collect();
                Err(GuestError::Refused(refusal))
            }
            Ok(answer) => Ok(answer),
            Err(_unreadable) => Err(GuestError::Nonsense { what }),
        }
    }

    /// Waits until the agent has closed it, or is lost.
    pub async fn closed(&self) {
        self.shared.wait(|state| (state.over.is_some() || state.mux.is_over(self.number)).then_some(())).await;
    }

    /// Says something behind the request, at once.
    ///
    /// # Errors
    /// [`GuestError::Lost`]; also when too much was said that it did not take.
    pub fn say(&self, order: &Order) -> Result<(), GuestError> {
        let mut state = self.shared.lock();
        match state.mux.say(self.number, wire::encode(order)) {
            Said::Yes => {}
            Said::Full => return Err(GuestError::Lost("it takes none of the orders it was given".to_owned())),
            Said::Gone => return Err(lost(&state)),
        }
        drop(state);
        self.shared.wake.notify_one();
        Ok(())
    }

    /// As [`Self::say`], as soon as there is room for it.
    ///
    /// # Errors
    /// [`GuestError::Lost`].
    pub async fn say_in_time(&self, order: &Order) -> Result<(), GuestError> {
        let said = self.shared.wait(|state| match state.mux.say(self.number, wire::encode(order)) {
            Said::Yes => Some(Ok(())),
            Said::Full => state.over.is_some().then(|| Err(lost(state))),
            Said::Gone => Some(Err(lost(state))),
        });
        said.await?;
        self.shared.wake.notify_one();
        Ok(())
    }

    /// Reads a channel. 0: it has ended.
    ///
    /// # Errors
    /// [`GuestError::Lost`].
    pub async fn read(&self, channel: Channel, into: &mut [u8]) -> Result<usize, GuestError> {
        if into.is_empty() {
            return Ok(0);
        }
        let read = self.shared.wait(|state| match state.mux.read(self.number, channel, into) {
            Read::Bytes(len) => Some(Ok(len)),
            Read::End => Some(Ok(0)),
            Read::Gone => Some(Err(lost(state))),
            Read::Empty => state.over.is_some().then(|| Err(lost(state))),
        });
        let len = read.await?;
        // It may have opened the window.
        self.shared.wake.notify_one();
        Ok(len)
    }

    /// Writes the input.
    ///
    /// # Errors
    /// [`GuestError::Lost`]; also when the agent has closed the call.
    pub async fn write(&self, mut bytes: &[u8]) -> Result<(), GuestError> {
        while !bytes.is_empty() {
            let wrote = self.shared.wait(|state| match state.mux.write(self.number, Channel::Input, bytes) {
                Write::Bytes(len) => Some(Ok(len)),
                Write::Gone => Some(Err(lost(state))),
                Write::Full => state.over.is_some().then(|| Err(lost(state))),
            });
            bytes = bytes.get(wrote.await?..).unwrap_or_default();
            self.shared.wake.notify_one();
        }
        Ok(())
    }

    /// Ends the input.
    pub fn end_input(&self) {
        self.shared.lock().mux.end(self.number, Channel::Input);
        self.shared.wake.notify_one();
    }
}

fn lost(state: &State) -> GuestError {
    GuestError::Lost(state.over.clone().unwrap_or_else(|| "it has closed the call".to_owned()))
}
