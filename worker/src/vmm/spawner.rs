//! Starting VMMs: each with a user of its own, in a view of the host that holds next to nothing.
//!
//! Owns the machine spawner (a small process, forked before the worker has threads or memory) and the worker's end of each VMM it
//! started. The spawner enters one set of namespaces for all VMMs: no network, few mounts, processes of its own; so starting one costs
//! no copy of any. A VMM lives as long as its [`Process`] here, the spawner and the worker do; the kernel sees to it. Does not own what
//! is started (`qemu`, `firecracker`).

mod child;
mod init;
pub mod proto;
mod view;

use std::ffi::OsString;
use std::fs::File;
use std::io;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd, OwnedFd};
use std::os::unix::ffi::OsStringExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustix::event::{PollFd, PollFlags};
use rustix::fs::{FileType, OFlags};
use rustix::net::{AddressFamily, SocketFlags, SocketType};
use tokio::io::unix::AsyncFd;
use tokio::net::UnixStream;
use volley_jobspecs::wire;

use crate::beneath;
use crate::spawner::{only_descriptor, packet};
use crate::users::{self, UsersError};
use proto::{Exited, Order, PACKET_BYTES_MAX, REPLY_BYTES_MAX, Reply, Start, Step, What};

/// The first user and group of VMMs.
pub const USERS_FIRST: u32 = users::FIRST_OF_MACHINES;
/// How many there are: more machines than a host has memory for.
pub const USERS_MAX: u32 = 4_096;
/// Why nothing more can be done with a process.
const ENDED: &str = "it has ended";
/// How long the spawner may take to set itself up: a dozen system calls, on a host that may be busy.
const READY_WAIT: Duration = Duration::from_secs(20);
/// How long it may take to start a process or show a mount. It does one after the other, each within milliseconds.
const REPLY_WAIT: Duration = Duration::from_secs(20);

/// Why no VMM runs.
#[derive(Debug, thiserror::Error)]
pub enum SpawnError {
    /// The spawner does not come up.
    #[error("can't start the helper that spawns machines: {0}; run the worker as root, or leave `microvm` out of its isolation")]
    Spawner(String),
    /// Machines have no users.
    #[error(transparent)]
    Users(#[from] UsersError),
    /// It is gone.
    #[error("the helper that spawns machines was killed, and every machine with it")]
    Gone,
    /// The program can't be opened.
    #[error("{}: {source}", .path.display())]
    Open {
        /// Which file.
        path: PathBuf,
        /// What the system says.
        source: io::Error,
    },
    /// The process could not be started.
    #[error("can't start {program}: {}: {}", .step.as_str(), io::Error::from_raw_os_error(*.errno))]
    NotStarted {
        /// What.
        program: String,
        /// At which step.
        step: Step,
        /// The system's error number.
        errno: i32,
    },
    /// A mount can't be shown to a VMM.
    #[error("showing a disk to a machine as {name}: {why}")]
    Attach {
        /// Under which name.
        name: String,
        /// Why.
        why: String,
    },
    /// The socket.
    #[error("can't speak to the helper that spawns machines: {0}")]
    Socket(#[source] io::Error),
}

/// What a VMM's process runs.
#[derive(Debug, Clone, Copy)]
pub enum Program<'a> {
    /// A program below /usr or another directory of programs and libraries, with the libraries it is linked to.
    Path(&'a Path),
    /// An open file; one that needs no libraries.
    File(BorrowedFd<'a>),
}

/// A process to start.
#[derive(Debug)]
pub struct Launch<'a> {
    /// The program.
    pub program: Program<'a>,
    /// Its arguments; the first is its name.
    pub argv: Vec<OsString>,
    /// `cgroup.procs` files it enters.
    pub cgroups: &'a [String],
    /// What become its descriptors 0, 1, 2, …: at least those three. It has no others.
    pub inherits: Vec<BorrowedFd<'a>>,
}

/// The worker's end of the spawner.
#[derive(Debug, Clone)]
pub struct MachineSpawner {
    inner: Arc<Mutex<Inner>>,
}

#[derive(Debug)]
struct Inner {
    socket: OwnedFd,
    /// The directory of the processes' directories.
    machines: Arc<OwnedFd>,
    pid: u32,
    missing: Vec<String>,
}

impl MachineSpawner {
    /// Forks the spawner. Call it early in `main`, before any thread exists and before memory is used.
    ///
    /// # Errors
    /// [`SpawnError::Spawner`], [`SpawnError::Users`].
    pub fn start() -> Result<Self, SpawnError> {
        if rustix::process::geteuid().is_root() {
            users::for_machines(USERS_MAX)?;
        }
        Ok(Self { inner: Arc::new(Mutex::new(fork_spawner()?)) })
    }

    /// The spawner's process id.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.lock().pid
    }

    /// What could not be shut off for machines here, in words; empty where the worker is root on an ordinary host.
    #[must_use]
    pub fn missing(&self) -> Vec<String> {
        self.lock().missing.clone()
    }

    fn lock(&self) -> MutexGuard<'_, Inner> {
        // It is replaced whole or not at all.
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Starts a process.
    ///
    /// # Errors
    /// [`SpawnError`].
    pub async fn launch(&self, launch: &Launch<'_>) -> Result<Process, SpawnError> {
        let text = |word: &OsString| word.clone().into_vec().into();
        let (what, program) = match launch.program {
            Program::Path(path) => (What::Path(path.as_os_str().to_owned().into_vec().into()), None),
            Program::File(file) => (What::Descriptor, Some(file)),
        };
        let joins = opened(launch.cgroups)?;
        let joined = u32::try_from(joins.len()).unwrap_or(u32::MAX);
        let start = Start { what, argv: launch.argv.iter().map(text).collect(), joins: joined };
        let fds = program.into_iter().chain(joins.iter().map(AsFd::as_fd)).chain(launch.inherits.iter().copied());
        let name = launch.argv.first().map(|word| word.to_string_lossy().into_owned()).unwrap_or_default();
        self.begin(&start, fds.collect(), name).await
    }

    /// Has a process of the spawner look at KVM; it exits with a code of `kvm`.
    pub(super) async fn kvm_probe(&self) -> Result<Process, SpawnError> {
        let start = Start { what: What::KvmProbe, argv: Vec::new(), joins: 0 };
        self.begin(&start, Vec::new(), "a look at KVM".to_owned()).await
    }

    async fn begin(&self, start: &Start, mut fds: Vec<BorrowedFd<'_>>, program: String) -> Result<Process, SpawnError> {
        let (ours, theirs) = socketpair().map_err(SpawnError::Socket)?;
        fds.insert(0, theirs.as_fd());
        let machines = self.ask(&wire::encode(start), &fds)?;
        drop(fds);
        drop(theirs);
        rustix::io::ioctl_fionbio(&ours, true).map_err(|e| SpawnError::Socket(e.into()))?;
        let socket = Socket::new(ours)?;
        match tokio::time::timeout(REPLY_WAIT, socket.reply()).await.map_err(|_| SpawnError::Gone)?? {
            (Reply::Started { dir, user }, Some(pidfd)) => Process::new(socket, pidfd, user, machines, dir),
            (Reply::NotStarted { step, errno }, _) => Err(SpawnError::NotStarted { program, step, errno }),
            _ => Err(SpawnError::Spawner("it answered out of turn".to_owned())),
        }
    }

    /// Sends a request, and replaces a spawner that is gone.
    fn ask(&self, request: &[u8], fds: &[BorrowedFd<'_>]) -> Result<Arc<OwnedFd>, SpawnError> {
        let mut inner = self.lock();
        if request.len() > PACKET_BYTES_MAX {
            return Err(SpawnError::Socket(io::Error::from_raw_os_error(libc::E2BIG)));
        }
        if let Err(why) = packet::send(inner.socket.as_fd(), request, fds) {
            tracing::error!(%why, pid = inner.pid, "the helper that spawns machines is gone; another is started");
            *inner = fork_spawner()?;
            packet::send(inner.socket.as_fd(), request, fds).map_err(SpawnError::Socket)?;
        }
        Ok(inner.machines.clone())
    }
}

fn fork_spawner() -> Result<Inner, SpawnError> {
    let failed = |e: io::Error| SpawnError::Spawner(e.to_string());
    let (ours, theirs) = socketpair().map_err(failed)?;
    // SAFETY: the child runs the spawner's loop only, which takes no lock that the parent may hold: the allocator's are made usable by
    // the C library after a fork, and no other is touched.
    let pid = unsafe { libc::fork() };
    if pid < 0 {
        return Err(failed(io::Error::last_os_error()));
    }
    if pid == 0 {
        leave_and_fork(only_descriptor(theirs));
    }
    drop(theirs);
    // The first child leaves the namespaces and ends; the spawner is its child.
    // SAFETY: plain system call, on a child of ours.
    unsafe { libc::waitpid(pid, std::ptr::null_mut(), 0) };
    greeted(ours)
}

/// Waits until the spawner has said that it is ready.
fn greeted(ours: OwnedFd) -> Result<Inner, SpawnError> {
    let failed = |e: io::Error| SpawnError::Spawner(e.to_string());
    let (mut spawner, mut ready, mut buffer) = (None, None, vec![0; REPLY_BYTES_MAX]);
    loop {
        // The two are said by two processes: either may be the first.
        (spawner, ready) = match (spawner, ready) {
            (Some(pid), Some((machines, missing))) => return Ok(Inner { socket: ours, machines: Arc::new(machines), pid, missing }),
            one => one,
        };
        let wait = rustix::event::Timespec { tv_sec: READY_WAIT.as_secs().cast_signed(), tv_nsec: 0 };
        let waited = rustix::event::poll(&mut [PollFd::new(&ours, PollFlags::IN)], Some(&wait));
        if waited.is_ok_and(|count| count == 0) {
            return Err(SpawnError::Spawner(format!("it did not come up within {} s", READY_WAIT.as_secs())));
        }
        let (len, fds) = packet::receive(ours.as_fd(), &mut buffer).map_err(failed)?;
        match minicbor::decode(buffer.get(..len).unwrap_or_default()) {
            Ok(Hello::Pid(pid)) => spawner = Some(pid),
            Ok(Hello::Reply(Reply::Ready { missing })) => match fds.into_iter().next() {
                Some(machines) => ready = Some((machines, missing)),
                None => return Err(SpawnError::Spawner("it has no directory for machines".to_owned())),
            },
            Ok(Hello::Reply(Reply::Broken(why))) => return Err(SpawnError::Spawner(why)),
            Ok(Hello::Reply(_)) | Err(_) => return Err(SpawnError::Spawner("it ended while it set itself up".to_owned())),
        }
    }
}

/// What comes on the spawner's socket while it sets itself up.
#[derive(Debug, minicbor::Encode, minicbor::Decode)]
enum Hello {
    /// From the process that forked it.
    #[n(0)]
    Pid(#[n(0)] u32),
    /// From itself.
    #[n(1)]
    Reply(#[n(0)] Reply),
}

/// In the first child.
fn leave_and_fork(socket: OwnedFd) -> ! {
    let missing = view::leave();
    let own_mounts = missing.iter().all(|what| !what.starts_with(view::FILES));
    // SAFETY: this process has one thread, so the child may run anything.
    match unsafe { libc::fork() } {
        0 => init::main(socket, missing, own_mounts),
        pid => {
            let said = match u32::try_from(pid) {
                Ok(pid) => Hello::Pid(pid),
                Err(_) => Hello::Reply(Reply::Broken(format!("fork: {}", io::Error::last_os_error()))),
            };
            let _ = packet::send(socket.as_fd(), &wire::encode(&said), &[]);
            // SAFETY: ends this process, without what its parent would have it do at its end.
            unsafe { libc::_exit(0) }
        }
    }
}

/// `cgroup.procs` files, to be written by the spawner: the kernel asks who opened them.
fn opened(cgroups: &[String]) -> Result<Vec<File>, SpawnError> {
    let open = |path: &String| {
        let opened = File::options().write(true).open(path);
        opened.map_err(|source| SpawnError::Open { path: PathBuf::from(path), source })
    };
    cgroups.iter().map(open).collect()
}

fn socketpair() -> io::Result<(OwnedFd, OwnedFd)> {
    Ok(rustix::net::socketpair(AddressFamily::UNIX, SocketType::SEQPACKET, SocketFlags::CLOEXEC, None)?)
}

/// The worker's end of a process's socket.
#[derive(Debug)]
struct Socket(AsyncFd<OwnedFd>);

impl Socket {
    fn new(fd: OwnedFd) -> Result<Self, SpawnError> {
        // SAFETY: an OwnedFd always names the same open descriptor.
        unsafe { AsyncFd::register(fd) }.map(Self).map_err(|e| SpawnError::Socket(e.into()))
    }

    async fn reply(&self) -> Result<(Reply, Option<OwnedFd>), SpawnError> {
        loop {
            let mut ready = self.0.readable().await.map_err(SpawnError::Socket)?;
            let mut buffer = [0; REPLY_BYTES_MAX];
            match ready.try_io(|socket| packet::receive(socket.as_fd(), &mut buffer)) {
                Ok(Ok((0, _))) => return Err(SpawnError::Gone),
                Ok(Ok((len, fds))) => {
                    let reply = minicbor::decode(buffer.get(..len).unwrap_or_default());
                    let reply = reply.map_err(|e| SpawnError::Spawner(format!("unreadable reply: {e}")))?;
                    return Ok((reply, fds.into_iter().next()));
                }
                Ok(Err(e)) if e.kind() == io::ErrorKind::ConnectionReset => return Err(SpawnError::Gone),
                Ok(Err(e)) => return Err(SpawnError::Socket(e)),
                Err(_would_block) => {}
            }
        }
    }
}

/// A VMM's process. Dropped, it is killed.
#[derive(Debug)]
pub struct Process {
    /// One reader at a time: replies have no names.
    socket: tokio::sync::Mutex<Socket>,
    ended: AsyncFd<OwnedFd>,
    exited: std::sync::OnceLock<Exited>,
    pid: u32,
    user: Option<u32>,
    machines: Arc<OwnedFd>,
    dir: String,
}

impl Process {
    fn new(socket: Socket, pidfd: OwnedFd, user: Option<u32>, machines: Arc<OwnedFd>, dir: String) -> Result<Self, SpawnError> {
        let info = std::fs::read_to_string(format!("/proc/self/fdinfo/{}", pidfd.as_raw_fd())).map_err(SpawnError::Socket)?;
        let pid = info.lines().find_map(|line| line.strip_prefix("Pid:")?.trim().parse().ok()).unwrap_or(0);
        // SAFETY: an OwnedFd always names the same open descriptor.
        let ended = unsafe { AsyncFd::register(pidfd) }.map_err(|e| SpawnError::Socket(e.into()))?;
        Ok(Self { socket: tokio::sync::Mutex::new(socket), ended, exited: std::sync::OnceLock::new(), pid, user, machines, dir })
    }

    /// Its process id, as the worker sees it.
    #[must_use]
    pub fn pid(&self) -> u32 {
        self.pid
    }

    /// Its user and group; none where machines run as the worker.
    #[must_use]
    pub fn user(&self) -> Option<u32> {
        self.user
    }

    /// Connects to a socket that it made in its directory. A guest may have broken into it: what is no socket of its own there, a link to
    /// one of the host's above all, is not connected to.
    ///
    /// # Errors
    /// What the system says; also when there is something else of that name.
    pub async fn connect(&self, name: &str) -> io::Result<UnixStream> {
        let socket = beneath::open(&self.machines, &Path::new(&self.dir).join(name), OFlags::PATH)?;
        let stat = rustix::fs::fstat(&socket)?;
        if beneath::kind(&stat) != FileType::Socket || self.user.is_some_and(|user| stat.st_uid != user) {
            return Err(io::Error::from(io::ErrorKind::InvalidData));
        }
        UnixStream::connect(format!("/proc/self/fd/{}", socket.as_raw_fd())).await
    }

    /// Its directory, as the worker reaches it. It is the process's own: nothing in it is to be opened by its path.
    #[must_use]
    pub fn dir(&self) -> PathBuf {
        PathBuf::from(format!("/proc/self/fd/{}", self.machines.as_raw_fd())).join(&self.dir)
    }

    /// Kills it, whatever it does. Its end is told by [`Process::exited`].
    pub fn kill(&self) {
        // One that has ended can't be killed, and need not be.
        let _ = rustix::process::pidfd_send_signal(self.ended.get_ref(), rustix::process::Signal::KILL);
    }

    /// Waits for its end, and until nothing of it is left. Cancel-safe.
    ///
    /// # Errors
    /// [`SpawnError::Gone`]: it has ended with the spawner.
    pub async fn exited(&self) -> Result<Exited, SpawnError> {
        // Readable for ever once it has ended; nothing is read of it.
        let _ended = self.ended.readable().await.map_err(SpawnError::Socket)?;
        let socket = self.socket.lock().await;
        loop {
            if let Some(exited) = self.exited.get() {
                return Ok(*exited);
            }
            if let (Reply::Exited(exited), _) = socket.reply().await? {
                let _ = self.exited.set(exited);
            }
        }
    }

    /// Shows it a file or directory under this name in its directory, beside the descriptors it was given at its start.
    ///
    /// # Errors
    /// [`SpawnError::Attach`].
    pub async fn attach(&self, name: &str, file: BorrowedFd<'_>) -> Result<(), SpawnError> {
        let failed = |why: String| SpawnError::Attach { name: name.to_owned(), why };
        let stat = rustix::fs::fstat(file).map_err(|e| failed(e.to_string()))?;
        let dir = beneath::kind(&stat) == FileType::Directory;
        use rustix::mount::OpenTreeFlags as Flags;
        let flags = Flags::OPEN_TREE_CLONE | Flags::OPEN_TREE_CLOEXEC | Flags::AT_EMPTY_PATH;
        let mount = rustix::mount::open_tree(file, "", flags).map_err(|e| failed(format!("copying its mount: {}", io::Error::from(e))))?;
        let order = Order::Attach { name: name.to_owned(), dir };
        self.order(&order, &[mount.as_fd()]).await?.map_or(Ok(()), |why| Err(failed(why)))
    }

    /// Orders something, and hears why it was not done, if it was not.
    async fn order(&self, order: &Order, fds: &[BorrowedFd<'_>]) -> Result<Option<String>, SpawnError> {
        let socket = self.socket.lock().await;
        if self.exited.get().is_some() {
            return Ok(Some(ENDED.to_owned()));
        }
        packet::send(socket.0.get_ref().as_fd(), &wire::encode(order), fds).map_err(SpawnError::Socket)?;
        let reply = tokio::time::timeout(REPLY_WAIT, socket.reply()).await.map_err(|_| SpawnError::Gone)??;
        Ok(match reply.0 {
            Reply::Done(why) => why,
            Reply::Exited(exited) => {
                let _ = self.exited.set(exited);
                Some(ENDED.to_owned())
            }
            _ => Some("the helper answered out of turn".to_owned()),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the two processes say has no order.
    #[test]
    fn whoever_speaks_first_the_spawner_is_there() {
        let dir = File::open("/").unwrap();
        for pid_first in [true, false] {
            let (ours, theirs) = socketpair().unwrap();
            let pid = || packet::send(theirs.as_fd(), &wire::encode(&Hello::Pid(7)), &[]).unwrap();
            if pid_first {
                pid();
            }
            let ready = Hello::Reply(Reply::Ready { missing: vec!["something".to_owned()] });
            packet::send(theirs.as_fd(), &wire::encode(&ready), &[dir.as_fd()]).unwrap();
            if !pid_first {
                pid();
            }
            let inner = greeted(ours).unwrap();
            assert_eq!((inner.pid, inner.missing.as_slice()), (7, ["something".to_owned()].as_slice()));
        }
    }

    #[test]
    fn one_that_ends_before_it_is_ready_is_no_spawner() {
        let (ours, theirs) = socketpair().unwrap();
        packet::send(theirs.as_fd(), &wire::encode(&Hello::Pid(7)), &[]).unwrap();
        drop(theirs);
        assert!(matches!(greeted(ours), Err(SpawnError::Spawner(why)) if why.contains("ended")));
    }
}
