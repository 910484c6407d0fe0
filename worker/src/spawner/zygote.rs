//! The zygote: a small process, forked before the worker grows, that makes shims and sees to it that none outlives the worker.
//!
//! Owns making shims, and killing everything when the worker's end of its socket closes, however the worker died.

use std::ffi::CStr;
use std::os::fd::{AsFd, OwnedFd};
use std::time::{Duration, Instant};

use super::packet;
use super::proto::{MakeShim, PACKET_BYTES_MAX, Reply};
use super::shim::Shim;
use super::tree;

/// How long the zygote tries to kill what the worker left: longer than a shim tries, so that it comes after them.
const KILL_TIME: Duration = Duration::from_secs(15);

/// Runs in the forked child, never returns.
pub fn main(socket: OwnedFd) -> ! {
    // Shims that end are reaped by the kernel.
    set_up(c"volley-zygote", Children::Reaped);
    let mut buffer = vec![0; PACKET_BYTES_MAX];
    loop {
        match packet::receive(socket.as_fd(), &mut buffer) {
            Ok((0, _)) => break,
            Ok((len, fds)) => {
                let request = buffer.get(..len).and_then(|bytes| minicbor::decode::<MakeShim>(bytes).ok());
                if let (Some(request), Some(shim_socket)) = (request, fds.into_iter().next()) {
                    make_shim(&socket, request, shim_socket);
                }
            }
            Err(e) if e.kind() == std::io::ErrorKind::Interrupted => {}
            Err(_) => break,
        }
    }
    kill_everything();
    exit(0)
}

/// Signals that are for the worker, which decides what becomes of what its helpers started.
pub const IGNORED: [libc::c_int; 5] = [libc::SIGTERM, libc::SIGINT, libc::SIGHUP, libc::SIGQUIT, libc::SIGPIPE];

/// What becomes of a helper's children that end.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Children {
    /// The kernel reaps them.
    Reaped,
    /// The helper waits for them.
    Awaited,
}

/// Makes a process that was just forked off the worker a helper called `name`: it ends when the worker does, and gives nothing of it away.
pub fn set_up(name: &CStr, children: Children) {
    // SAFETY: plain system calls in a process of one thread.
    unsafe {
        // A terminal's Ctrl-C and a service manager's TERM are for the worker, which drains; we end when it does.
        libc::setsid();
        nothing_ignored();
        for signal in IGNORED {
            libc::signal(signal, libc::SIG_IGN);
        }
        libc::signal(libc::SIGCHLD, if children == Children::Reaped { libc::SIG_IGN } else { libc::SIG_DFL });
        libc::umask(0o022);
        let mut none: libc::sigset_t = std::mem::zeroed();
        libc::sigemptyset(&raw mut none);
        libc::sigprocmask(libc::SIG_SETMASK, &raw const none, std::ptr::null_mut());
        // No core files: a task that crashes by the thousand would fill the disk, and that of a VMM would hold its guest's memory.
        let no_core = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
        libc::setrlimit(libc::RLIMIT_CORE, &raw const no_core);
        libc::prctl(libc::PR_SET_NAME, name.as_ptr());
        // A task can look at /proc of its parent, which is a shim, and so can machines without root, which have our user: the worker's
        // credentials must not be in there. Root can look anyway, so the environment is wiped as well.
        libc::prctl(libc::PR_SET_DUMPABLE, 0, 0, 0, 0);
        wipe_environment();
    }
    let _ = rustix::process::set_child_subreaper(Some(rustix::process::getpid()));
}

/// Gives every signal its default: one that whoever started the worker ignored would be ignored by every task.
///
/// # Safety
/// Only in a process of one thread that handles no signal.
unsafe fn nothing_ignored() {
    /// Signals of Linux: the C library keeps two for itself and changes none of them by its own call.
    const SIGNALS: libc::c_int = 64;
    // SAFETY: a zeroed `struct sigaction` of the kernel's (four words here) is the default; two signals can't be changed, which is no loss.
    unsafe {
        let default = [0_u64; 4];
        for signal in 1..=SIGNALS {
            libc::syscall(libc::SYS_rt_sigaction, signal, default.as_ptr(), std::ptr::null::<u64>(), size_of::<u64>());
        }
    }
}

/// Overwrites every variable, where /proc/PID/environ reads them.
///
/// # Safety
/// Only in a process of one thread that reads no environment afterwards.
unsafe fn wipe_environment() {
    // SAFETY: the list ends with a null pointer, and each text with a NUL byte; both are ours since the fork.
    unsafe {
        let mut at = environ;
        while !at.is_null() && !(*at).is_null() {
            libc::memset((*at).cast(), 0, libc::strlen(*at));
            at = at.add(1);
        }
    }
}

unsafe extern "C" {
    /// The C library's list of variables.
    static environ: *const *mut libc::c_char;
}

fn make_shim(zygote_socket: &OwnedFd, request: MakeShim, socket: OwnedFd) {
    // SAFETY: this process has one thread, so the child may run anything.
    let pid = unsafe { libc::fork() };
    if pid < 0 {
        let error = std::io::Error::last_os_error();
        let _ = packet::send(socket.as_fd(), &volley_jobspecs::wire::encode(&Reply::Broken(format!("fork: {error}"))), &[]);
        return;
    }
    if pid > 0 {
        return;
    }
    // SAFETY: plain system calls; the descriptor closed is our copy of the zygote's socket, which would hide its end from it.
    unsafe {
        libc::signal(libc::SIGCHLD, libc::SIG_DFL);
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0);
        libc::prctl(libc::PR_SET_NAME, c"volley-shim".as_ptr());
        libc::close(std::os::fd::AsRawFd::as_raw_fd(zygote_socket));
    }
    let answer = socket.try_clone();
    match Shim::new(socket, &request) {
        Ok(shim) => {
            drop(answer);
            shim.serve();
        }
        Err(e) => {
            if let Ok(answer) = answer {
                let broken = Reply::Broken(e.to_string());
                let _ = packet::send(answer.as_fd(), &volley_jobspecs::wire::encode(&broken), &[]);
            }
        }
    }
    exit(0)
}

/// Shims first: their commands die with them, and what those left becomes ours and goes next.
fn kill_everything() {
    let begin = Instant::now();
    while begin.elapsed() < KILL_TIME {
        let left = tree::descendants(std::process::id().cast_signed());
        if left.is_empty() {
            return;
        }
        for pid in left {
            // SAFETY: plain system call, on descendants of ours.
            unsafe {
                libc::kill(pid, libc::SIGKILL);
            }
        }
        std::thread::sleep(Duration::from_millis(2));
    }
}

fn exit(code: i32) -> ! {
    // Not `std::process::exit`: handlers of the process we were forked from are none of our business.
    // SAFETY: ends this process.
    unsafe { libc::_exit(code) }
}
