//! From a request to a running VMM: the few system calls between clone and exec.
//!
//! Owns what a VMM inherits: its cgroups, the listed descriptors and no others, its user without any right, death with the spawner. Runs
//! in a child that shares its parent's memory until it execs, so it allocates nothing and calls nothing but the system.

use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::os::fd::{AsRawFd, OwnedFd};

use super::proto::Step;
use rustix::process::{Pid, PidfdFlags, pidfd_open};

use crate::spawner::stack::Stack;

/// Threads and processes of one VMM's user: QEMU has one a processor, some for blocks and a handful else.
const PROCESSES_MAX: libc::rlim_t = 256;
/// Where descriptors are kept before they are placed: above every place they may get.
pub const HIGH: c_int = 128;

/// `_LINUX_CAPABILITY_VERSION_3` of linux/capability.h, and `SECBIT_NOROOT`, locked, of linux/securebits.h: user 0 gets no rights by
/// being user 0.
const CAPABILITY_VERSION: u32 = 0x2008_0522;
const NO_ROOT: libc::c_ulong = 3;

/// A VMM that runs.
pub struct Running {
    /// Its process id, in the spawner's namespace.
    pub pid: libc::pid_t,
    /// Becomes readable when it ends.
    pub pidfd: OwnedFd,
}

impl Running {
    /// One that was just started and not waited for. Is killed when the system gives no descriptor for it.
    ///
    /// # Errors
    /// The system's error number.
    pub fn new(pid: libc::pid_t) -> Result<Self, i32> {
        let known = Pid::from_raw(pid).ok_or(libc::ESRCH)?;
        match pidfd_open(known, PidfdFlags::empty()) {
            Ok(pidfd) => Ok(Self { pid, pidfd }),
            Err(e) => {
                // SAFETY: plain system calls on a child that was not waited for.
                unsafe {
                    libc::kill(pid, libc::SIGKILL);
                    libc::waitpid(pid, std::ptr::null_mut(), 0);
                }
                Err(e.raw_os_error())
            }
        }
    }
}

/// What is started.
pub struct Plan<'a> {
    /// The program's path; none: `program_fd`.
    pub program: Option<&'a CStr>,
    /// The program, opened; [`HIGH`] or above.
    pub program_fd: Option<&'a OwnedFd>,
    /// Its arguments.
    pub argv: &'a [CString],
    /// `cgroup.procs` files, opened for writing.
    pub joins: &'a [OwnedFd],
    /// What becomes its descriptors 0, 1, 2, …; all are [`HIGH`] or above.
    pub inherits: &'a [OwnedFd],
    /// Its directory.
    pub dir: &'a CStr,
    /// User and group.
    pub user: Option<u32>,
}

/// What the child reads: the plan, and pointers made before it exists.
struct Prepared<'a> {
    plan: &'a Plan<'a>,
    argv: Vec<*const c_char>,
    failed: Option<(Step, c_int)>,
}

/// Starts it.
///
/// # Errors
/// The step that failed, and the system's error number.
pub fn start(stack: &mut Stack, plan: &Plan<'_>) -> Result<Running, (Step, i32)> {
    let argv = plan.argv.iter().map(|text| text.as_ptr()).chain(std::iter::once(std::ptr::null())).collect();
    let mut prepared = Prepared { plan, argv, failed: None };
    // SAFETY: the child is `child`, which follows the rules of one.
    let pid = unsafe { stack.start(child, &mut prepared, |prepared| prepared.failed, |errno| (Step::Clone, errno)) }?;
    Running::new(pid).map_err(|errno| (Step::Clone, errno))
}

extern "C" fn child(arg: *mut c_void) -> c_int {
    // SAFETY: `arg` is on our suspended parent's stack; only we touch it now.
    let prepared = unsafe { &mut *arg.cast::<Prepared<'_>>() };
    // SAFETY: system calls on memory that outlives them.
    prepared.failed = Some(unsafe { become_it(prepared.plan, &prepared.argv) });
    // SAFETY: leaves without running anything of the parent's.
    unsafe { libc::_exit(127) }
}

/// Returns only when it fails.
///
/// # Safety
/// Only for a child that shares memory with a suspended parent.
unsafe fn become_it(plan: &Plan<'_>, argv: &[*const c_char]) -> (Step, c_int) {
    // SAFETY: nothing but system calls with valid pointers.
    unsafe {
        let errno = || *libc::__errno_location();
        libc::setsid();
        for signal in crate::spawner::zygote::IGNORED {
            libc::signal(signal, libc::SIG_DFL);
        }
        for file in plan.joins {
            // 0 is whoever writes.
            if libc::write(file.as_raw_fd(), c"0".as_ptr().cast(), 1) < 0 {
                return (Step::Cgroup, errno());
            }
        }
        for (fd, target) in plan.inherits.iter().zip(0..) {
            if libc::dup2(fd.as_raw_fd(), target) < 0 {
                return (Step::Descriptors, errno());
            }
        }
        // Nothing else gets over the exec; the program itself must still be there for it.
        let first = libc::c_uint::try_from(plan.inherits.len()).unwrap_or(3);
        if libc::syscall(libc::SYS_close_range, first, libc::c_uint::MAX, libc::CLOSE_RANGE_CLOEXEC) < 0 {
            return (Step::Descriptors, errno());
        }
        if libc::chdir(plan.dir.as_ptr()) < 0 {
            return (Step::Directory, errno());
        }
        if let Some(user) = plan.user {
            let most = libc::rlimit { rlim_cur: PROCESSES_MAX, rlim_max: PROCESSES_MAX };
            libc::setrlimit(libc::RLIMIT_NPROC, &raw const most);
            // The raw calls: the library's would try to change every thread of a process that isn't ours.
            if libc::syscall(libc::SYS_setgroups, 0, std::ptr::null::<u32>()) < 0
                || libc::syscall(libc::SYS_setresgid, user, user, user) < 0
                || libc::syscall(libc::SYS_setresuid, user, user, user) < 0
            {
                return (Step::User, errno());
            }
        } else {
            // In a namespace of users a worker without root has every right: none of them is for machines. Elsewhere there are none.
            let (head, none) = ([CAPABILITY_VERSION, 0], [0u32; 6]);
            libc::prctl(libc::PR_SET_SECUREBITS, NO_ROOT, 0, 0, 0);
            libc::syscall(libc::SYS_capset, head.as_ptr(), none.as_ptr());
        }
        // After the change of user, which takes it back. The spawner can't have died unseen: it is suspended until the exec.
        if libc::prctl(libc::PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) < 0 || libc::prctl(libc::PR_SET_PDEATHSIG, libc::SIGKILL, 0, 0, 0) < 0 {
            return (Step::User, errno());
        }
        let none: [*const c_char; 1] = [std::ptr::null()];
        match (plan.program, plan.program_fd) {
            (Some(path), _) => {
                libc::execve(path.as_ptr(), argv.as_ptr(), none.as_ptr());
            }
            (None, Some(fd)) => {
                let empty = c"".as_ptr();
                libc::syscall(libc::SYS_execveat, fd.as_raw_fd(), empty, argv.as_ptr(), none.as_ptr(), libc::AT_EMPTY_PATH);
            }
            (None, None) => return (Step::Request, libc::EINVAL),
        }
        (Step::Exec, errno())
    }
}
