//! Starting processes without ever forking a large one.
//!
//! Owns the zygote (forked once, before the worker has threads or memory) and the worker's end of each slot's shim. A request and
//! its reply are one packet each. Does not own what is run or why (`runtime/process`), nor limits (`cgroup`).

mod child;
mod container;
pub mod mounts;
pub(crate) mod packet;
pub mod proto;
mod shim;
pub(crate) mod stack;
pub mod tree;
pub(crate) mod zygote;

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use rustix::net::{AddressFamily, SocketFlags, SocketType};
use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use volley_jobspecs::wire;

use proto::{MakeShim, PACKET_BYTES_MAX, Reply, Request, RequestOf, Spawn};

/// Longest reply of a shim, in bytes: a number of small fields or one error text.
const REPLY_BYTES_MAX: usize = 4 * 1024;

/// Why no process could be started.
#[derive(Debug, thiserror::Error)]
pub enum SpawnerError {
    /// The zygote could not be made.
    #[error("can't start the helper that spawns tasks: {0}; check the limits on processes and open files (ulimit -u, -n)")]
    Zygote(#[source] io::Error),
    /// A shim could not be made.
    #[error("can't start the helper of a slot: {0}")]
    Shim(String),
    /// The shim is gone: killed from outside, or by the kernel for want of memory.
    #[error("the helper of the slot was killed while the task ran")]
    ShimGone,
    /// The packet could not be sent or read.
    #[error("can't speak to the helper of a slot: {0}")]
    Socket(#[source] io::Error),
    /// The command is larger than any kernel takes.
    #[error("command and environment have {bytes} bytes; at most {} are possible", proto::REQUEST_BYTES_MAX)]
    TooLarge {
        /// How many.
        bytes: usize,
    },
}

/// The worker's end of the zygote.
#[derive(Debug, Clone)]
pub struct Spawner {
    zygote: Arc<Mutex<Zygote>>,
}

#[derive(Debug)]
struct Zygote {
    socket: OwnedFd,
    pid: u32,
}

impl Spawner {
    /// Forks the zygote. Call it first in `main`, before any thread exists and before memory is used: the copy is then small, and a
    /// lock held by another thread can't be copied with it.
    ///
    /// # Errors
    /// [`SpawnerError::Zygote`].
    pub fn start() -> Result<Self, SpawnerError> {
        Ok(Self { zygote: Arc::new(Mutex::new(Self::fork_zygote()?)) })
    }

    fn fork_zygote() -> Result<Zygote, SpawnerError> {
        let (ours, theirs) = socketpair().map_err(SpawnerError::Zygote)?;
        // SAFETY: the child runs the zygote's loop only, which takes no lock that the parent may hold: the allocator's are made
        // usable by the C library after a fork, and no other is touched.
        let pid = unsafe { libc::fork() };
        if pid < 0 {
            return Err(SpawnerError::Zygote(io::Error::last_os_error()));
        }
        if pid == 0 {
            let theirs = only_descriptor(theirs);
            zygote::main(theirs);
        }
        drop(theirs);
        Ok(Zygote { socket: ours, pid: pid.cast_unsigned() })
    }

    /// The zygote's process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.lock().pid
    }

    fn lock(&self) -> MutexGuard<'_, Zygote> {
        // A zygote is replaced whole or not at all.
        self.zygote.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Sends a request, and replaces a zygote that is gone: somebody killed it, and every shim died with it. The fork is dear then,
    /// but a worker that can start nothing would fail all it is given.
    fn ask_zygote(&self, request: &[u8], socket: BorrowedFd<'_>) -> Result<(), SpawnerError> {
        let mut zygote = self.lock();
        let Err(why) = packet::send(zygote.socket.as_fd(), request, &[socket]) else { return Ok(()) };
        tracing::error!(%why, pid = zygote.pid, "the helper that spawns tasks is gone; another is started");
        *zygote = Self::fork_zygote()?;
        packet::send(zygote.socket.as_fd(), request, &[socket]).map_err(SpawnerError::Socket)
    }

    /// Makes a shim.
    ///
    /// # Errors
    /// [`SpawnerError`] when it doesn't come up.
    pub async fn shim(&self, make: &MakeShim) -> Result<Shim, SpawnerError> {
        let (ours, theirs) = socketpair().map_err(SpawnerError::Socket)?;
        let request = wire::encode(make);
        self.ask_zygote(&request, theirs.as_fd())?;
        drop(theirs);
        rustix::io::ioctl_fionbio(&ours, true).map_err(|e| SpawnerError::Socket(e.into()))?;
        // To read only: whoever waits to write as well is woken each time the shim takes a request.
        // SAFETY: an OwnedFd always names the same open descriptor.
        let socket = unsafe { AsyncFd::register_with_interest(ours, Interest::READABLE) }.map_err(|e| SpawnerError::Socket(e.into()))?;
        let shim = Shim { socket };
        match shim.reply().await? {
            Reply::Ready => Ok(shim),
            Reply::Broken(why) => Err(SpawnerError::Shim(why)),
            Reply::NotStarted { .. } | Reply::Exited(_) | Reply::Refused(_) => Err(SpawnerError::Shim("it answered out of turn".into())),
        }
    }
}

/// The worker's end of a shim. One command at a time; the shim kills what runs when this is dropped.
#[derive(Debug)]
pub struct Shim {
    socket: AsyncFd<OwnedFd>,
}

impl Shim {
    /// Starts a command. Its end is the next [`Shim::reply`].
    ///
    /// # Errors
    /// [`SpawnerError`] when the request can't be sent.
    pub async fn spawn(
        &self,
        spawn: &Spawn,
        stdout: BorrowedFd<'_>,
        stderr: BorrowedFd<'_>,
        stdin: Option<BorrowedFd<'_>>,
        mounts: &[OwnedFd],
    ) -> Result<(), SpawnerError> {
        let mut fds = vec![stdout, stderr];
        fds.extend(stdin);
        fds.extend(mounts.iter().map(AsFd::as_fd));
        let bytes = wire::encode(&RequestOf::Spawn(spawn));
        if bytes.len() <= PACKET_BYTES_MAX {
            return self.send(&bytes, &fds).await;
        }
        if bytes.len() > proto::REQUEST_BYTES_MAX {
            return Err(SpawnerError::TooLarge { bytes: bytes.len() });
        }
        let file = memory_file("volley-request", &wire::encode(spawn)).map_err(SpawnerError::Socket)?;
        fds.insert(0, file.as_fd());
        self.send(&wire::encode(&Request::SpawnFromFile), &fds).await
    }

    /// TERM to everything that runs.
    ///
    /// # Errors
    /// [`SpawnerError`] when the shim can't be reached.
    pub async fn term(&self) -> Result<(), SpawnerError> {
        self.send(&wire::encode(&Request::Term), &[]).await
    }

    /// KILL to everything that runs.
    ///
    /// # Errors
    /// [`SpawnerError`] when the shim can't be reached.
    pub async fn kill(&self) -> Result<(), SpawnerError> {
        self.send(&wire::encode(&Request::Kill), &[]).await
    }

    /// Waits for the next reply. Cancel-safe.
    ///
    /// # Errors
    /// [`SpawnerError::ShimGone`] when the shim died.
    pub async fn reply(&self) -> Result<Reply, SpawnerError> {
        loop {
            let mut ready = self.socket.readable().await.map_err(SpawnerError::Socket)?;
            // Not before: what is waited with is copied each time a wait begins.
            let mut buffer = [0; REPLY_BYTES_MAX];
            match ready.try_io(|socket| packet::receive(socket.as_fd(), &mut buffer)) {
                Ok(Ok((0, _))) => return Err(SpawnerError::ShimGone),
                Ok(Ok((len, _))) => {
                    // One request has one reply: nothing else waits here, and a look for it is saved. An end of the shim is remembered.
                    ready.clear_ready();
                    return minicbor::decode(buffer.get(..len).unwrap_or_default())
                        .map_err(|e| SpawnerError::Shim(format!("unreadable reply: {e}")));
                }
                Ok(Err(e)) if e.kind() == io::ErrorKind::ConnectionReset => return Err(SpawnerError::ShimGone),
                Ok(Err(e)) => return Err(SpawnerError::Socket(e)),
                Err(_would_block) => {}
            }
        }
    }

    async fn send(&self, bytes: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), SpawnerError> {
        loop {
            // First without waiting: the buffer is all but always empty.
            match packet::send(self.socket.get_ref().as_fd(), bytes, fds) {
                Ok(()) => return Ok(()),
                Err(e) if e.kind() == io::ErrorKind::WouldBlock => {
                    let socket = rustix::io::fcntl_dupfd_cloexec(self.socket.get_ref(), 0).map_err(|e| SpawnerError::Socket(e.into()))?;
                    // SAFETY: as above.
                    let socket = unsafe { AsyncFd::register_with_interest(socket, Interest::WRITABLE) }
                        .map_err(|e| SpawnerError::Socket(e.into()))?;
                    socket.writable().await.map_err(SpawnerError::Socket)?.retain_ready();
                }
                Err(e) if matches!(e.kind(), io::ErrorKind::BrokenPipe | io::ErrorKind::ConnectionReset) => {
                    return Err(SpawnerError::ShimGone);
                }
                Err(e) => return Err(SpawnerError::Socket(e)),
            }
        }
    }
}

fn socketpair() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?)
}

/// A file in memory with these bytes, at its beginning.
///
/// # Errors
/// What the system says.
pub fn memory_file(name: &str, bytes: &[u8]) -> io::Result<OwnedFd> {
    let file = File::from(rustix::fs::memfd_create(name, rustix::fs::MemfdFlags::CLOEXEC)?);
    file.write_all_at(bytes, 0)?;
    Ok(file.into())
}

/// In a process that was just forked: closes every descriptor but this one and the standard streams, which become /dev/null but for stderr.
pub(crate) fn only_descriptor(socket: OwnedFd) -> OwnedFd {
    /// Where the socket goes: right behind the standard streams.
    const PLACE: i32 = 3;
    use std::os::fd::FromRawFd;
    // SAFETY: system calls on descriptors of this process, which nobody else uses: it was just forked.
    unsafe {
        let null = libc::open(c"/dev/null".as_ptr(), libc::O_RDWR);
        if null >= 0 {
            libc::dup2(null, 0);
            libc::dup2(null, 1);
            if libc::fcntl(2, libc::F_GETFD) < 0 {
                libc::dup2(null, 2);
            }
        }
        if socket.as_raw_fd() != PLACE {
            libc::dup2(socket.as_raw_fd(), PLACE);
        }
        std::mem::forget(socket);
        libc::fcntl(PLACE, libc::F_SETFD, libc::FD_CLOEXEC);
        libc::syscall(libc::SYS_close_range, PLACE + 1, libc::c_uint::MAX, 0);
        OwnedFd::from_raw_fd(PLACE)
    }
}

#[cfg(test)]
mod tests;
