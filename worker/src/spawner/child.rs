//! From a request to a running program: the few system calls between clone and exec.
//!
//! Owns what a task inherits: own session, default signals, none of them blocked, three descriptors, a directory, a user, death with its shim. Runs in a
//! child that shares its parent's memory until it execs, so it allocates nothing and calls nothing but the system.

use std::ffi::{CString, c_char, c_int, c_void};
use std::os::fd::{AsRawFd, OwnedFd};

use super::proto::{Spawn, Step};
use super::stack::Stack;
use super::zygote::IGNORED;

/// Where further descriptors are kept before they are placed: above every place they may get.
pub const HIGH: c_int = 64;

/// Why it doesn't run.
#[derive(Debug, Clone, Copy)]
pub struct NotStarted {
    /// At which step.
    pub step: Step,
    /// The system's error number.
    pub errno: i32,
}

/// Everything the child needs, made before it exists.
struct Plan {
    programs: Vec<CString>,
    argv: Strings,
    env: Strings,
    cwd: CString,
    /// What becomes its descriptors 0, 1, 2, …; those behind the three are [`HIGH`] or above.
    inherits: Vec<c_int>,
    user: Option<(u32, u32)>,
    failed: Option<NotStarted>,
}

/// A list of strings as the kernel takes it.
struct Strings {
    pointers: Vec<*const c_char>,
    /// What they point into: each with its NUL.
    _bytes: Vec<u8>,
}

impl Strings {
    /// All in one piece: a command has dozens, and each allocation counts.
    fn new(list: &[minicbor::bytes::ByteVec]) -> Result<Self, NotStarted> {
        let mut bytes = Vec::with_capacity(list.iter().map(|text| text.len() + 1).sum());
        for text in list {
            if text.contains(&0) {
                return Err(INVALID);
            }
            bytes.extend_from_slice(text);
            bytes.push(0);
        }
        let mut pointers = Vec::with_capacity(list.len() + 1);
        let mut rest = bytes.as_slice();
        for text in list {
            pointers.push(rest.as_ptr().cast());
            rest = rest.get(text.len() + 1..).unwrap_or_default();
        }
        pointers.push(std::ptr::null());
        Ok(Self { pointers, _bytes: bytes })
    }
}

/// A request that no process can be made of.
const INVALID: NotStarted = NotStarted { step: Step::Request, errno: libc::EINVAL };

/// Starts a command with these standard streams (stdin, stdout, stderr), and more descriptors behind them, which are [`HIGH`] or above.
/// Gives its process id, which is also its session and process group.
pub fn start(stack: &mut Stack, spawn: &Spawn, stdio: [&OwnedFd; 3], more: &[OwnedFd]) -> Result<libc::pid_t, NotStarted> {
    let mut plan = Plan {
        programs: programs(spawn).ok_or(INVALID)?,
        argv: Strings::new(&spawn.argv)?,
        env: Strings::new(&spawn.env)?,
        cwd: CString::new(spawn.cwd.as_slice()).map_err(|_| INVALID)?,
        inherits: stdio.into_iter().chain(more).map(AsRawFd::as_raw_fd).collect(),
        user: spawn.uid.zip(spawn.gid),
        failed: None,
    };
    let cloned = |errno| NotStarted { step: Step::Clone, errno };
    // SAFETY: the child is `child`, which follows the rules of one.
    unsafe { stack.start(child, &mut plan, |plan| plan.failed, cloned) }
}

/// The files to try, in order.
fn programs(spawn: &Spawn) -> Option<Vec<CString>> {
    let name: &[u8] = spawn.argv.first().filter(|name| !name.is_empty())?;
    if name.contains(&b'/') {
        return Some(vec![CString::new(name).ok()?]);
    }
    spawn
        .path
        .iter()
        .map(|folder| CString::new([folder.as_slice(), b"/", name].concat()).ok())
        .collect::<Option<Vec<_>>>()
        .filter(|programs| !programs.is_empty())
}

extern "C" fn child(arg: *mut c_void) -> c_int {
    // SAFETY: `arg` is the plan on our suspended parent's stack; only we touch it now.
    let plan = unsafe { &mut *arg.cast::<Plan>() };
    // SAFETY: system calls on memory that outlives them.
    let (step, errno) = unsafe { become_the_task(plan) };
    plan.failed = Some(NotStarted { step, errno });
    // SAFETY: leaves without running anything of the parent's.
    unsafe { libc::_exit(127) }
}

/// Returns only when it fails.
///
/// # Safety
/// Only for a child that shares its parent's memory.
unsafe fn become_the_task(plan: &Plan) -> (Step, c_int) {
    // SAFETY: nothing but system calls with valid pointers.
    unsafe {
        let errno = || *libc::__errno_location();
        if libc::setsid() < 0 {
            return (Step::Session, errno());
        }
        for signal in IGNORED {
            libc::signal(signal, libc::SIG_DFL);
        }
        // What was sent meanwhile arrives now.
        let none: libc::sigset_t = std::mem::zeroed();
        libc::sigprocmask(libc::SIG_SETMASK, &raw const none, std::ptr::null_mut());
        for (fd, target) in plan.inherits.iter().zip(0..) {
            if libc::dup2(*fd, target) < 0 {
                return (Step::Streams, errno());
            }
        }
        if let Some((uid, gid)) = plan.user {
            // The raw calls: the library's would try to change every thread of a process that isn't ours.
            if libc::syscall(libc::SYS_setgroups, 0, std::ptr::null::<u32>()) < 0
                || libc::syscall(libc::SYS_setresgid, gid, gid, gid) < 0
                || libc::syscall(libc::SYS_setresuid, uid, uid, uid) < 0
                || libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0
            {
                return (Step::User, errno());
            }
        }
        if libc::chdir(plan.cwd.as_ptr()) < 0 {
            return (Step::Directory, errno());
        }
        // After the change of user, which takes it back.
        libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0);
        let mut kept = libc::ENOENT;
        for program in &plan.programs {
            libc::execve(program.as_ptr(), plan.argv.pointers.as_ptr(), plan.env.pointers.as_ptr());
            match errno() {
                // As a shell does: go on looking, but remember that one was there and wouldn't run.
                libc::ENOENT | libc::ENOTDIR => {}
                libc::EACCES => kept = libc::EACCES,
                other => return (Step::Exec, other),
            }
        }
        (Step::Exec, kept)
    }
}
