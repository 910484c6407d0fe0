//! The unix socket on which one volume is served to one machine.
//!
//! Owns who may connect: the socket's owner and mode, the uids that are taken, and that there is one client at a time. Each volume of
//! each attempt has a socket of its own, with nothing else to be had on it. Does not own what is said on it (`nbd`).

use std::io;
use std::net::Shutdown;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{AtFlags, FileType, Gid, Mode, OFlags, Stat, Uid};
use rustix::io::Errno;
use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType};

use crate::device::Device;

use super::nbd;

/// Clients whose connection the kernel holds before we look at it: there is one at a time, and some that are refused.
const BACKLOG: i32 = 8;
/// Until a host that has no descriptors left is asked for one again.
const SHORT_OF_FILES: Duration = Duration::from_millis(100);
/// Bytes of a connection's stack: it holds no data, but the device's code runs on it.
const STACK_BYTES: usize = 1 << 20;

/// Where a volume is served, and to whom.
#[derive(Debug, Clone)]
pub struct Place {
    /// A directory that is there.
    pub dir: PathBuf,
    /// The socket's name in it. A socket of that name that is there is replaced: a server that was killed leaves it.
    pub file: String,
    /// Its owner. Another than oneself takes root.
    pub owner: u32,
    /// Its group.
    pub group: u32,
    /// Users whose processes may connect, by uid; others are let go before anything is said.
    pub peers: Vec<u32>,
    /// The export's name, at most 4,096 bytes; clients that ask for none get it too.
    pub export: String,
}

/// Why there is no socket.
#[derive(Debug, thiserror::Error)]
pub enum SocketError {
    /// A path of a socket has at most 107 bytes.
    #[error("{} is too long for the path of a socket; serve volumes from a directory with a shorter path", .0.display())]
    TooLong(PathBuf),
    /// There is something that we did not make.
    #[error("{} is there and is no socket; remove it", .0.display())]
    Taken(PathBuf),
    /// The directory, the socket, its owner.
    #[error("making the socket {}: {source}", .path.display())]
    Io {
        /// Which.
        path: PathBuf,
        /// Why.
        source: io::Error,
    },
}

/// A socket on which a volume is served; detached at the latest when dropped.
#[derive(Debug)]
pub struct Socket {
    path: PathBuf,
    dir: OwnedFd,
    file: String,
    /// Which file it is: another of the same name is somebody else's.
    is: (u64, u64),
    listener: Arc<OwnedFd>,
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Debug, Default)]
struct State {
    detached: bool,
    /// Whoever is served, until nothing is done for it any more.
    client: Option<Arc<UnixStream>>,
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Socket {
    /// Makes the socket and serves `device` on it.
    ///
    /// # Errors
    /// See [`SocketError`].
    pub fn open(place: &Place, device: Arc<dyn Device>) -> Result<Self, SocketError> {
        let path = place.dir.join(&place.file);
        let (dir, listener, is) = listen(place, &path)?;
        let listener = Arc::new(listener);
        let shared = Arc::new(Shared::default());
        let serving = Serving {
            listener: Arc::clone(&listener),
            shared: Arc::clone(&shared),
            device,
            path: path.clone(),
            peers: place.peers.clone(),
            export: place.export.clone(),
            refused: 0,
        };
        let mut socket = Self { path, dir, file: place.file.clone(), is, listener, shared, thread: None };
        let thread = thread::Builder::new().name("nbd-accept".into()).stack_size(STACK_BYTES).spawn(move || serving.run());
        socket.thread = Some(thread.map_err(|source| SocketError::Io { path: socket.path.clone(), source })?);
        Ok(socket)
    }

    /// Where it is.
    #[must_use]
    pub fn path(&self) -> &Path {
        &self.path
    }

    /// Is somebody served now?
    #[must_use]
    pub fn has_client(&self) -> bool {
        self.shared.lock().client.is_some()
    }

    /// Ends it: the socket is unlinked, a client's connection shut. When it returns nothing that a client asked for is still being done;
    /// it waits for what the device has begun.
    pub fn detach(mut self) {
        self.end();
    }

    fn end(&mut self) {
        let Some(thread) = self.thread.take() else { return };
        {
            let mut state = self.shared.lock();
            state.detached = true;
            if let Some(client) = &state.client {
                let _ = client.shutdown(Shutdown::Both);
            }
            self.shared.changed.notify_all();
        }
        let ours = rustix::fs::statat(&self.dir, &self.file, AtFlags::SYMLINK_NOFOLLOW).is_ok_and(|stat| identity(&stat) == self.is);
        if ours && let Err(e) = rustix::fs::unlinkat(&self.dir, &self.file, AtFlags::empty()) {
            tracing::warn!(socket = %self.path.display(), error = %e, "the socket of a volume that was detached is left");
        }
        // Whoever waits for clients is told that there will be none.
        let _ = rustix::net::shutdown(&*self.listener, rustix::net::Shutdown::Both);
        if thread.join().is_err() {
            tracing::error!(socket = %self.path.display(), "serving a volume has panicked");
        }
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        self.end();
    }
}

fn identity(stat: &Stat) -> (u64, u64) {
    (stat.st_dev, stat.st_ino)
}

/// Makes the socket with its mode and owner before anybody can connect.
fn listen(place: &Place, path: &Path) -> Result<(OwnedFd, OwnedFd, (u64, u64)), SocketError> {
    let failed = |e: Errno| SocketError::Io { path: path.to_owned(), source: e.into() };
    let address = SocketAddrUnix::new(path).map_err(|_| SocketError::TooLong(path.to_owned()))?;
    let dir = rustix::fs::open(&place.dir, OFlags::DIRECTORY | OFlags::PATH | OFlags::CLOEXEC, Mode::empty()).map_err(failed)?;
    remove_old(&dir, &place.file, path)?;
    let listener = rustix::net::socket_with(AddressFamily::UNIX, SocketType::STREAM, SocketFlags::CLOEXEC, None).map_err(failed)?;
    // The file that bind makes takes the socket's mode: there is no moment in which it has another.
    rustix::fs::fchmod(&listener, Mode::RUSR | Mode::WUSR).map_err(failed)?;
    rustix::net::bind(&listener, &address).map_err(failed)?;
    let opened = rustix::fs::openat(&dir, &place.file, OFlags::PATH | OFlags::NOFOLLOW | OFlags::CLOEXEC, Mode::empty()).map_err(failed)?;
    // Of the file that was opened: whoever owns the directory may have put something else there.
    let stat = rustix::fs::fstat(&opened).map_err(failed)?;
    if FileType::from_raw_mode(stat.st_mode) != FileType::Socket {
        return Err(SocketError::Taken(path.to_owned()));
    }
    if (stat.st_uid, stat.st_gid) != (place.owner, place.group) {
        let (owner, group) = (Uid::from_raw(place.owner), Gid::from_raw(place.group));
        rustix::fs::chownat(&opened, "", Some(owner), Some(group), AtFlags::EMPTY_PATH).map_err(failed)?;
    }
    rustix::net::listen(&listener, BACKLOG).map_err(failed)?;
    Ok((dir, listener, identity(&stat)))
}

/// Removes a socket that a server left which was killed.
fn remove_old(dir: &OwnedFd, file: &str, path: &Path) -> Result<(), SocketError> {
    let failed = |e: Errno| SocketError::Io { path: path.to_owned(), source: e.into() };
    match rustix::fs::statat(dir, file, AtFlags::SYMLINK_NOFOLLOW) {
        Err(Errno::NOENT) => Ok(()),
        Err(e) => Err(failed(e)),
        Ok(stat) if FileType::from_raw_mode(stat.st_mode) != FileType::Socket => Err(SocketError::Taken(path.to_owned())),
        Ok(_) => rustix::fs::unlinkat(dir, file, AtFlags::empty()).map_err(failed),
    }
}

/// What the thread that waits for clients holds.
struct Serving {
    listener: Arc<OwnedFd>,
    shared: Arc<Shared>,
    device: Arc<dyn Device>,
    path: PathBuf,
    peers: Vec<u32>,
    export: String,
    refused: u64,
}

impl Serving {
    fn run(mut self) {
        let mut client: Option<JoinHandle<()>> = None;
        while let Some(stream) = self.accept() {
            if !self.may(&stream) {
                continue;
            }
            if !self.has_place() {
                self.refuse(None);
                continue;
            }
            // The former one has let go of the place: its thread is at its end.
            join(client.take());
            client = self.start(stream);
        }
        join(client.take());
    }

    /// The next client. None: the socket is detached.
    fn accept(&self) -> Option<UnixStream> {
        loop {
            let accepted = rustix::net::accept_with(&*self.listener, SocketFlags::CLOEXEC);
            let state = self.shared.lock();
            if state.detached {
                return None;
            }
            match accepted {
                Ok(stream) => return Some(stream.into()),
                Err(Errno::INTR | Errno::CONNABORTED) => {}
                Err(Errno::INVAL | Errno::BADF) => return None,
                Err(e) => {
                    tracing::warn!(socket = %self.path.display(), error = %e, "no client of a volume can be taken; trying again");
                    // The answer is the same: the lock is taken again and looked at.
                    drop(self.shared.changed.wait_timeout(state, SHORT_OF_FILES));
                }
            }
        }
    }

    /// Is it a process of a user that may connect?
    fn may(&mut self, stream: &UnixStream) -> bool {
        match rustix::net::sockopt::socket_peercred(stream) {
            Ok(peer) if self.peers.contains(&peer.uid.as_raw()) => true,
            Ok(peer) => {
                self.refuse(Some(peer.uid.as_raw()));
                false
            }
            Err(e) => {
                tracing::warn!(socket = %self.path.display(), error = %e, "who asks for a volume is not known");
                false
            }
        }
    }

    /// Tells of it, the more rarely the more often it happens: whoever may connect could fill the log. `uid`: of a user who may not.
    fn refuse(&mut self, uid: Option<u32>) {
        self.refused += 1;
        if self.refused.is_power_of_two() {
            let why = uid.map_or_else(|| "somebody is served already".to_owned(), |uid| format!("uid {uid} may not"));
            tracing::warn!(socket = %self.path.display(), why, refused = self.refused, "a client of a volume is refused");
        }
    }

    /// Is nobody served? A client that has hung up is waited for: what it asked for last must be done before another one's, or it could
    /// land on top of that.
    fn has_place(&self) -> bool {
        let mut state = self.shared.lock();
        loop {
            match &state.client {
                None => return !state.detached,
                Some(client) if !hung_up(client) => return false,
                Some(_) => state = self.shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    fn start(&self, stream: UnixStream) -> Option<JoinHandle<()>> {
        let stream = Arc::new(stream);
        {
            let mut state = self.shared.lock();
            if state.detached {
                return None;
            }
            state.client = Some(Arc::clone(&stream));
        }
        let (device, export, path) = (Arc::clone(&self.device), self.export.clone(), self.path.clone());
        let place = Occupied { shared: Arc::clone(&self.shared), stream };
        let serve = move || match nbd::serve(&place.stream, &*device, &export) {
            Ok(()) => tracing::debug!(socket = %path.display(), "a client of a volume has left"),
            Err(e) => tracing::debug!(socket = %path.display(), error = %e, "a client of a volume is gone"),
        };
        let started = thread::Builder::new().name("nbd".into()).stack_size(STACK_BYTES).spawn(serve);
        // Without a thread the closure is dropped, and with it the place is free.
        started.map_err(|e| tracing::warn!(socket = %self.path.display(), error = %e, "no thread for a client of a volume")).ok()
    }
}

/// A client's place; free again when dropped.
struct Occupied {
    shared: Arc<Shared>,
    stream: Arc<UnixStream>,
}

impl Drop for Occupied {
    fn drop(&mut self) {
        // Others may hold the descriptor for a moment longer than the connection should last.
        let _ = self.stream.shutdown(Shutdown::Both);
        self.shared.lock().client = None;
        self.shared.changed.notify_all();
    }
}

fn join(client: Option<JoinHandle<()>>) {
    if client.is_some_and(|client| client.join().is_err()) {
        tracing::error!("serving a client of a volume has panicked");
    }
}

/// Has the other end closed it?
fn hung_up(stream: &UnixStream) -> bool {
    let mut polled = [PollFd::new(stream, PollFlags::RDHUP)];
    let now = Timespec { tv_sec: 0, tv_nsec: 0 };
    poll(&mut polled, Some(&now)).is_ok_and(|_| polled[0].revents().intersects(PollFlags::RDHUP | PollFlags::HUP | PollFlags::ERR))
}
