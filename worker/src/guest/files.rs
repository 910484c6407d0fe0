//! Files into a machine and out of it.
//!
//! Owns joining a call's channel and `volley_guest::files`, which works in threads that may block. What comes out of a machine is
//! unpacked under the host's own limits, whatever was asked for.

use std::io;
use std::os::fd::OwnedFd;
use std::path::PathBuf;
use std::time::Duration;

use tokio::runtime::Handle;
use tokio::time::Instant;
use volley_guest::files::{PackError, Unpack, UnpackError, pack, unpack};
use volley_jobspecs::wire::guest::mux::Channel;
use volley_jobspecs::wire::guest::{Answer, Files, Get, GetNamed, Put, Request};

use super::{Call, Guest, GuestError};

/// Bytes gathered before they are sent.
const CHUNK_BYTES: usize = 32 * 1024;

/// Why files did not get across.
#[derive(Debug, thiserror::Error)]
pub enum FilesError {
    /// The machine did not do its part.
    #[error(transparent)]
    Guest(#[from] GuestError),
    /// They could not be read here.
    #[error(transparent)]
    Pack(#[from] PackError),
    /// What came out could not be unpacked here.
    #[error(transparent)]
    Unpack(#[from] UnpackError),
    /// The thread that did it ended.
    #[error("the thread that moved files ended: {0}")]
    Thread(String),
}

/// A call's channel for a thread that may block, until its deadline.
struct Blocking<'a> {
    call: &'a Call,
    runtime: Handle,
    deadline: Instant,
}

impl Blocking<'_> {
    fn wait<T>(&self, moved: impl Future<Output = Result<T, GuestError>>) -> io::Result<T> {
        let moved = async { tokio::time::timeout_at(self.deadline, moved).await };
        self.runtime.block_on(moved).map_err(io::Error::other)?.map_err(io::Error::other)
    }
}

impl io::Read for Blocking<'_> {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        self.wait(self.call.read(Channel::Output, into))
    }
}

impl io::Write for Blocking<'_> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.wait(self.call.write(bytes))?;
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

impl Guest {
    /// Copies all below `from`, a directory, or `from` itself, into the machine. What both sides counted and left out, here and there.
    ///
    /// # Errors
    /// [`FilesError`]. The guest's refusal comes before a failure here that follows from it.
    pub async fn put(&self, put: Put, from: PathBuf, time_max: Duration) -> Result<(Files, Files), FilesError> {
        let (what, limits) = ("put", put.limits);
        let call = self.link.open(&Request::Put(put))?;
        let moved = async {
            let (runtime, deadline) = (Handle::current(), Instant::now() + time_max);
            let task = tokio::task::spawn_blocking(move || {
                let out = io::BufWriter::with_capacity(CHUNK_BYTES, Blocking { call: &call, runtime, deadline });
                let packed = pack(&from, out, limits);
                if packed.is_ok() {
                    call.end_input();
                }
                (call, packed)
            });
            let (call, packed) = task.await.map_err(|e| FilesError::Thread(e.to_string()))?;
            match packed {
                Ok(packed) => files(call.answer(what).await?, what).map(|there| (packed, there)),
                // The agent closed the call: it says why. Otherwise the stream is cut here, and the agent has nothing to say.
                Err(PackError::Stream(e)) => Err(call.answer(what).await.err().map_or(PackError::Stream(e).into(), FilesError::Guest)),
                Err(e) => Err(e.into()),
            }
        };
        self.within(what, time_max, moved).await
    }

    /// Copies files out of the machine, into `dir`. What arrived here; what the guest left out is counted too.
    ///
    /// # Errors
    /// [`FilesError`]. The guest's refusal comes before a failure here that follows from it.
    pub async fn get(&self, get: Get, dir: OwnedFd, how: Unpack, time_max: Duration) -> Result<(Files, Files), FilesError> {
        self.fetch("get", &Request::Get(get), dir, how, time_max).await
    }

    /// The same of some files below a directory, by their paths from it.
    ///
    /// # Errors
    /// [`FilesError`].
    pub async fn get_named(&self, get: GetNamed, dir: OwnedFd, how: Unpack, time_max: Duration) -> Result<(Files, Files), FilesError> {
        self.fetch("get named", &Request::GetNamed(get), dir, how, time_max).await
    }

    async fn fetch(
        &self,
        what: &'static str,
        request: &Request,
        dir: OwnedFd,
        how: Unpack,
        time_max: Duration,
    ) -> Result<(Files, Files), FilesError> {
        let call = self.link.open(request)?;
        let moved = async {
            let (runtime, deadline) = (Handle::current(), Instant::now() + time_max);
            let task = tokio::task::spawn_blocking(move || {
                let unpacked = unpack(Blocking { call: &call, runtime, deadline }, &dir, how);
                (call, unpacked)
            });
            let (call, unpacked) = task.await.map_err(|e| FilesError::Thread(e.to_string()))?;
            match unpacked {
                Ok(unpacked) => files(call.answer(what).await?, what).map(|there| (unpacked, there)),
                // A stream that is cut has a reason.
                Err(UnpackError::Stream(e)) => Err(match call.answer(what).await {
                    Err(GuestError::Refused(refusal)) => GuestError::Refused(refusal).into(),
                    _ => UnpackError::Stream(e).into(),
                }),
                Err(e) => Err(e.into()),
            }
        };
        self.within(what, time_max, moved).await
    }

    /// Waits for it until the deadline, or until the machine gave no sign of life for too long: a large transfer may take long, and one that
    /// stands still may not.
    async fn within<T>(
        &self,
        what: &'static str,
        time_max: Duration,
        moved: impl Future<Output = Result<T, FilesError>>,
    ) -> Result<T, FilesError> {
        tokio::select! {
            moved = tokio::time::timeout(time_max, moved) => moved.unwrap_or(Err(GuestError::Silent { what, after: time_max }.into())),
            why = self.silence() => Err(why.into()),
        }
    }
}

fn files(answer: Answer, what: &'static str) -> Result<Files, FilesError> {
    match answer {
        Answer::Files(files) => Ok(files),
        _ => Err(GuestError::Nonsense { what }.into()),
    }
}
