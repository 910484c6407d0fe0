//! Starting a program in a process of its own.
//!
//! Owns what happens between the new process's first moment and its program's. The process shares the agent's memory until then, and is in
//! its cgroup from the start: in an emulated machine that was just restored, a copy of the agent's memory and a move between cgroups
//! (for which the kernel lets a grace period pass) are a good part of a first command's time. Does not know commands (`exec`).

use std::ffi::{CStr, CString};
use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd, RawFd};
use std::sync::atomic::{AtomicI32, Ordering};

use super::users::Ids;
use crate::program::Program;

/// The new process's stack until its program has its own, in units of 16 bytes, as the processor wants it aligned: 64 KiB, for a handful of
/// calls that are not deep.
const STACK_UNITS: usize = 4096;
/// Says to the kernel that this process is the first to go when memory is short; the most it takes.
const EXPENDABLE: &CStr = c"1000";
/// Exit code of a process that did not become its program: a shell's. Nobody asks for it.
const CODE_FAILED: libc::c_int = 127;

/// Of linux/sched.h; libc has them too narrow. The new process's signals are as if it had no handlers, and it begins in a given cgroup.
const CLONE_CLEAR_SIGHAND: u64 = 0x1_0000_0000;
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;

/// What a process is before it becomes its program.
#[derive(Debug)]
pub struct Plan {
    pub program: Program,
    /// Input, output, errors. None is one of the agent's own.
    pub streams: [OwnedFd; 3],
    pub group: Option<Place>,
    /// None: the agent's.
    pub ids: Option<Ids>,
    pub cwd: CString,
    pub open_files: Option<u64>,
    /// Is its input a terminal that it is to control?
    pub tty: bool,
    /// Is it the first to go when memory is short?
    pub expendable: bool,
}

/// A cgroup as processes enter it.
#[derive(Debug)]
pub struct Place {
    /// Its directory: who is begun in it counts against its limits.
    pub dir: File,
    /// What a process writes `0` to, to move into it whatever the limits are.
    pub entrance: File,
}

/// A plan on its way.
struct Birth<'a> {
    plan: &'a Plan,
    /// Was the process begun outside its group?
    enter: bool,
    /// The system's error number, once the process could not become its program.
    failed: AtomicI32,
}

impl Plan {
    /// Starts it, and returns when it is its program: its process id. That may take as long as somebody likes: the process can be stopped before, and its
    /// group can be frozen. Whoever calls holds no lock.
    ///
    /// # Errors
    /// What the system says. There may be a process then that has ended, for whoever reaps.
    pub fn spawn(&self) -> io::Result<u32> {
        if self.streams.iter().any(|stream| stream.as_raw_fd() <= libc::STDERR_FILENO) {
            return Err(io::Error::from_raw_os_error(libc::EBADF));
        }
        let begun = self.begin(self.group.as_ref().map(|place| place.dir.as_raw_fd()));
        let (pid, errno) = match begun {
            // The group, or the one of all commands, has no room for another. This is not what the limits are for: a shell in a machine
            // whose task makes more processes than it may is wanted then.
            Err(e) if self.group.is_some() && e.raw_os_error() == Some(libc::EAGAIN) => self.begin(None)?,
            begun => begun?,
        };
        if errno == 0 { Ok(pid) } else { Err(io::Error::from_raw_os_error(errno)) }
    }

    /// The process, and the error number it ended with before it was its program, or 0.
    fn begin(&self, group: Option<RawFd>) -> io::Result<(u32, i32)> {
        let birth = Birth { plan: self, enter: group.is_none(), failed: AtomicI32::new(0) };
        let mut stack = Box::new_uninit_slice(STACK_UNITS);
        let pid = clone(&birth, &mut stack, group)?;
        Ok((pid, birth.failed.load(Ordering::Acquire)))
    }
}

/// Begins the process and waits until it is its program or has ended.
#[cfg(target_arch = "x86_64")]
fn clone(birth: &Birth<'_>, stack: &mut [MaybeUninit<u128>], group: Option<RawFd>) -> io::Result<u32> {
    let kind = libc::CLONE_VM | libc::CLONE_VFORK;
    // SAFETY: plain data, of which zeros mean that nothing is asked for.
    let mut args: libc::clone_args = unsafe { std::mem::zeroed() };
    // No handler may run in the memory it borrows.
    args.flags = u64::from(kind.cast_unsigned()) | CLONE_CLEAR_SIGHAND;
    args.exit_signal = u64::from(libc::SIGCHLD.cast_unsigned());
    args.stack = stack.as_mut_ptr() as u64;
    args.stack_size = size_of_val(stack) as u64;
    if let Some(group) = group {
        args.flags |= CLONE_INTO_CGROUP;
        args.cgroup = u64::from(group.cast_unsigned());
    }
    let result: i64;
    // SAFETY: the new process never returns to here: on a stack of its own it calls `born`, which does not return. This thread stands still
    // until the other has another program or has ended, so all that is lent to it lives. The kernel changes rax, rcx and r11 alone.
    unsafe {
        std::arch::asm!(
            "syscall",
            "test rax, rax",
            "jnz 2f",
            "xor ebp, ebp",
            "mov rdi, {birth}",
            "call {born}",
            "ud2",
            "2:",
            birth = in(reg) std::ptr::from_ref(birth),
            born = in(reg) born as unsafe extern "C" fn(*const Birth<'static>) -> !,
            inlateout("rax") libc::SYS_clone3 => result,
            in("rdi") &raw const args,
            in("rsi") size_of::<libc::clone_args>(),
            out("rcx") _,
            out("r11") _,
        );
    }
    u32::try_from(result).map_err(|_| io::Error::from_raw_os_error(i32::try_from(-result).unwrap_or(libc::EINVAL)))
}

/// The new process.
unsafe extern "C" fn born(birth: *const Birth<'static>) -> ! {
    // SAFETY: whoever began it stands still with what it lent.
    let birth = unsafe { &*birth };
    birth.failed.store(become_program(birth.plan, birth.enter), Ordering::Release);
    loop {
        // SAFETY: a plain system call, which does not return.
        unsafe { libc::syscall(libc::SYS_exit_group, CODE_FAILED) };
    }
}

/// Makes nothing but system calls. Returns only when one failed, with its error number. Where the C library would change all threads of the
/// process (they are the agent's), the calls are the kernel's own.
fn become_program(plan: &Plan, enter: bool) -> i32 {
    let prepared = || -> Result<(), i32> {
        // SAFETY: system calls, on data made before, which the thread that waits holds.
        unsafe {
            if let (true, Some(place)) = (enter, &plan.group) {
                check(libc::write(place.entrance.as_raw_fd(), c"0".as_ptr().cast(), 1) as libc::c_long)?;
            }
            for (fd, stream) in (0..).zip(&plan.streams) {
                check(libc::syscall(libc::SYS_dup3, stream.as_raw_fd(), fd, 0))?;
            }
            // What Rust has every process of its own ignore.
            libc::signal(libc::SIGPIPE, libc::SIG_DFL);
            let none: u64 = 0;
            check(libc::syscall(libc::SYS_rt_sigprocmask, libc::SIG_SETMASK, &raw const none, std::ptr::null::<u64>(), size_of::<u64>()))?;
            libc::syscall(libc::SYS_setsid);
            if plan.tty {
                check(libc::ioctl(libc::STDIN_FILENO, libc::TIOCSCTTY, 0).into())?;
            }
            if plan.expendable {
                // Where the kernel does not take it, it is no worse off than others.
                let file = libc::open(c"/proc/self/oom_score_adj".as_ptr(), libc::O_WRONLY | libc::O_CLOEXEC);
                if file >= 0 {
                    libc::write(file, EXPENDABLE.as_ptr().cast(), EXPENDABLE.count_bytes());
                    libc::close(file);
                }
            }
            if let Some(limit) = plan.open_files {
                let limit = libc::rlimit { rlim_cur: limit, rlim_max: limit };
                check(libc::setrlimit(libc::RLIMIT_NOFILE, &raw const limit).into())?;
            }
            if let Some(ids) = &plan.ids {
                check(libc::syscall(libc::SYS_setgroups, ids.groups.len(), ids.groups.as_ptr()))?;
                check(libc::syscall(libc::SYS_setgid, ids.gid))?;
                check(libc::syscall(libc::SYS_setuid, ids.uid))?;
            }
            // As the user: it must be able to be there.
            check(libc::chdir(plan.cwd.as_ptr()).into())
        }
    };
    match prepared() {
        Ok(()) => plan.program.exec(),
        Err(errno) => errno,
    }
}

fn check(result: libc::c_long) -> Result<(), i32> {
    // SAFETY: the place of this thread's error number, or of the thread's that waits.
    if result >= 0 { Ok(()) } else { Err(unsafe { *libc::__errno_location() }) }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, pipe};

    use super::*;

    fn plan(words: &[&str], cwd: &CStr) -> (Plan, io::PipeReader) {
        let text = |word: &&str| CString::new(*word).unwrap();
        let program = Program::new(words.iter().map(text).collect(), vec![c"A=b".to_owned()]).unwrap();
        let (reader, writer) = pipe().unwrap();
        let null = || OwnedFd::from(File::options().read(true).write(true).open("/dev/null").unwrap());
        let streams = [null(), writer.into(), null()];
        (Plan { program, streams, group: None, ids: None, cwd: cwd.to_owned(), open_files: None, tty: false, expendable: false }, reader)
    }

    fn status(pid: u32) -> i32 {
        let mut status = 0;
        // SAFETY: the call fills one int.
        assert_eq!(unsafe { libc::waitpid(pid.cast_signed(), &raw mut status, 0) }, pid.cast_signed());
        status
    }

    #[test]
    fn a_program_is_begun_with_what_it_was_given() {
        let script = "echo $A $(pwd); ulimit -n; trap | wc -l; kill -PIPE $$";
        let (mut plan, mut output) = plan(&["/bin/sh", "-c", script], c"/tmp");
        plan.open_files = Some(77);
        let pid = plan.spawn().unwrap();
        drop(plan);
        let mut text = String::new();
        output.read_to_string(&mut text).unwrap();
        assert_eq!(text, "b /tmp\n77\n0\n");
        let status = status(pid);
        assert!(libc::WIFSIGNALED(status) && libc::WTERMSIG(status) == libc::SIGPIPE, "a closed pipe ends it, as it ends others: {status}");
    }

    #[test]
    fn what_can_not_become_its_program_says_why() {
        let cases =
            [("/no/such/program", c"/", libc::ENOENT), ("/bin/true", c"/no/such/folder", libc::ENOENT), ("/etc", c"/", libc::EACCES)];
        for (program, cwd, errno) in cases {
            let failed = plan(&[program], cwd).0.spawn().unwrap_err();
            assert_eq!(failed.raw_os_error(), Some(errno), "{program} in {cwd:?}");
        }
    }

    #[test]
    fn many_are_begun_beside_threads_that_work() {
        let over = std::sync::atomic::AtomicBool::new(false);
        std::thread::scope(|scope| {
            // Threads that use memory and signals' masks as the agent's do.
            for _ in 0..2 {
                scope.spawn(|| {
                    while !over.load(Ordering::Relaxed) {
                        assert_eq!(vec![1_u8; 10_000].iter().map(|byte| usize::from(*byte)).sum::<usize>(), 10_000);
                    }
                });
            }
            for round in 0..200 {
                let (plan, mut output) = plan(&["/bin/echo", &round.to_string()], c"/");
                let pid = plan.spawn().unwrap();
                drop(plan);
                let mut text = String::new();
                output.read_to_string(&mut text).unwrap();
                assert_eq!((text, status(pid)), (format!("{round}\n"), 0));
            }
            over.store(true, Ordering::Relaxed);
        });
    }
}
