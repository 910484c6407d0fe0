//! One volume as one file: for Firecracker, and for processes and containers through a loop device.
//!
//! Owns the shim, a process of its own that is a client of the volume's NBD socket and holds nothing but what is under way: no S3, no
//! index, no runtime. The server of the volume may so be killed and started again, and whoever uses the file only waits.
//! `session` is the kernel's side, `link` the server's. One thread reads what the kernel asks and sends it on, one reads replies and
//! answers the kernel.

mod link;
mod mount;
mod session;
mod wire;

use std::io;
use std::path::PathBuf;
use std::thread;
use std::time::Duration;

use crate::serve::nbd::client::ClientError;
use crate::serve::nbd::wire::flag;

use link::{Link, Server};
use mount::Mounted;

/// What is shown where.
#[derive(Debug, Clone)]
pub struct Options {
    /// The volume's socket.
    pub socket: PathBuf,
    /// The export's name; empty for the one there is.
    pub export: String,
    /// The file that shows it; made if it is not there.
    pub file: PathBuf,
    /// Who may open it.
    pub owner: Owner,
    /// Who the shim is once it has mounted; it must be one of the socket's peers. None: who it was. Unmounting then takes another
    /// process, which has the right to.
    pub run_as: Option<Owner>,
    /// How long users of the file wait for a server that is away before their requests fail.
    pub patience: Duration,
}

/// A user.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Owner {
    /// Its uid.
    pub uid: u32,
    /// Its gid.
    pub gid: u32,
}

/// Why a volume is not shown, or no longer.
#[derive(Debug, thiserror::Error)]
pub enum FuseError {
    /// At the beginning the server must be there.
    #[error("a volume can't be shown as a file: {0}")]
    Server(#[from] ClientError),
    /// It takes root and /dev/fuse.
    #[error("mounting a volume on {}: {source}", .file.display())]
    Mount {
        /// Where.
        file: PathBuf,
        /// Why.
        source: io::Error,
    },
    /// Becoming another user.
    #[error("the process that shows a volume can't become uid {uid}: {source}")]
    User {
        /// Which.
        uid: u32,
        /// Why.
        source: io::Error,
    },
    /// A thread.
    #[error("no thread to show a volume: {0}")]
    Thread(io::Error),
    /// Its end of FUSE.
    #[error("the kernel can no longer be read from: {0}")]
    Kernel(io::Error),
    /// That is a bug, here or there.
    #[error("the kernel asked something of {0} bytes that is not understood")]
    NoRequest(usize),
    /// It is too old, or from another time.
    #[error("the kernel speaks FUSE {major}.{minor}; this speaks 7.31 and what grew out of it (Linux 5.4 and later)")]
    Version {
        /// Its version.
        major: u32,
        /// Its version.
        minor: u32,
    },
}

/// Shows a volume as a file until that is unmounted. `ready` is called when the file can be opened. The whole process serves it: call
/// this from its only thread.
///
/// # Errors
/// See [`FuseError`]. The mount is taken away, if this process still may.
pub fn run(options: &Options, ready: impl FnOnce()) -> Result<(), FuseError> {
    let server = Server { socket: options.socket.clone(), export: options.export.clone(), patience: options.patience };
    let first = link::open(&server)?;
    let read_only = first.1.flags & flag::READ_ONLY != 0;
    let failed = |source| FuseError::Mount { file: options.file.clone(), source };
    let (mounted, kernel) = Mounted::new(&options.file, read_only).map_err(failed)?;
    calm();
    if let Some(user) = options.run_as {
        become_user(user).map_err(|source| FuseError::User { uid: user.uid, source })?;
    }
    let link = Link::new(kernel.try_clone().map_err(FuseError::Kernel)?, server, first.1);
    let result = thread::scope(|scope| {
        let replies = thread::Builder::new().name("fuse-replies".into()).spawn_scoped(scope, || link.run(first));
        let result = replies.map_err(FuseError::Thread).and_then(|_| session::run(&kernel, &link, options.owner, ready));
        link.end();
        result
    });
    drop(mounted);
    result
}

/// This process lies below the file system that the kernel writes back to when it is short of memory: it must not itself wait for that.
fn calm() {
    // Both need rights, and help only where memory is short: without them it is served all the same.
    if let Err(e) = rustix::process::configure_io_flusher_behavior(true) {
        tracing::debug!(error = %e, "the process that shows a volume may have to wait for its own disk when memory is short");
    }
    let unlimited = rustix::process::Rlimit { current: None, maximum: None };
    // Memory that comes later is locked too, and whoever has a limit for that and no rights any more gets none of it.
    let may = rustix::process::setrlimit(rustix::process::Resource::Memlock, unlimited).is_ok();
    // SAFETY: it takes flags and touches nothing of ours.
    if may && unsafe { libc::mlockall(libc::MCL_CURRENT | libc::MCL_FUTURE | libc::MCL_ONFAULT) } != 0 {
        tracing::debug!(error = %io::Error::last_os_error(), "the memory of the process that shows a volume may be swapped out");
    }
}

/// The whole process becomes another user, with no other groups.
fn become_user(user: Owner) -> io::Result<()> {
    let done = |result: libc::c_int| if result == 0 { Ok(()) } else { Err(io::Error::last_os_error()) };
    // SAFETY: the list of groups is empty, and nothing else is a pointer.
    done(unsafe { libc::setgroups(0, std::ptr::null()) })?;
    // SAFETY: it takes numbers.
    done(unsafe { libc::setgid(user.gid) })?;
    // SAFETY: it takes a number.
    done(unsafe { libc::setuid(user.uid) })
}
